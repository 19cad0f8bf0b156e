"""Every correct kernel of the corpus, with all checks and with none: right results, no false alarm."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from tinyvllm_ref import emulation as cp

from .kernels import correct_cases
from .kernels.case import Empty, KernelCase


@pytest.mark.parametrize("mode", ["full", "fast"])
@pytest.mark.parametrize("case", correct_cases(), ids=lambda case: case.name)
def test_correct_kernel(case: KernelCase, mode: str, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings(), cp.checks(mode), cp.timeout(60):
        warnings.simplefilter("error")
        outputs = case.launch(cp, case.inputs())
    assert cp.last_report.warnings == ()
    errors = case.errors(outputs)
    assert {name: error for name, error in errors.items() if not error <= case.tolerance} == {}
    said = capfd.readouterr()
    if case.prints:
        lines = [line for line in said.out.splitlines() if line in case.prints]
        assert sorted(lines) == sorted(case.prints)
    assert "warning" not in (said.out + said.err).lower()


def test_corpus_is_not_empty() -> None:
    assert len(correct_cases()) >= 60


def test_expected_values_depend_on_the_kernel() -> None:
    """The comparison itself can fail: an output that the kernel has not written is no right result."""
    for case in correct_cases():
        inputs = case.inputs()
        arrays = {
            name: value for name, value in inputs.items() if hasattr(value, "shape") and value.shape != ()
        }
        untouched = {name: _poison(value) for name, value in arrays.items()}
        errors = case.errors(untouched)
        if not case.prints:
            assert any(error > case.tolerance for error in errors.values()), case.name


def _poison(value: np.ndarray | Empty) -> np.ndarray:
    """What an argument would hold if the kernel did nothing."""
    if isinstance(value, np.ndarray):
        return value
    unwritten = np.full((*value.shape, value.dtype.itemsize), 0xFF, np.uint8)
    return np.asarray(unwritten.view(value.dtype)[..., 0])
