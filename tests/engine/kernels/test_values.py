"""Every kernel against NumPy in float64: with every access checked where that is affordable, and fast."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from tinyvllm_ref.device import cp, is_gpu

from .cases import Case, all_cases, error

pytestmark = pytest.mark.skipif(is_gpu, reason="test_gpu.py runs these on a card")
CASES = all_cases()


def _check(case: Case, mode: str) -> None:
    with warnings.catch_warnings(), cp.checks(mode):
        warnings.simplefilter("error")
        errors = case.errors()
    assert {name: value for name, value in errors.items() if not value <= case.tolerance} == {}


@pytest.mark.parametrize("case", [c for c in CASES if not c.long], ids=lambda case: case.name)
def test_with_every_access_checked(case: Case) -> None:
    _check(case, "full")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fast(case: Case) -> None:
    _check(case, "fast")


def test_the_measure_can_fail() -> None:
    want = np.array([1.0, -2.0, 4.0])
    assert error(want.astype(np.float32), want) == 0
    assert error(np.array([1.0, -2.0, 4.1], np.float32), want) > 0.02
    assert error(np.array([1.0, np.nan, 4.0], np.float32), want) == float("inf")
    assert error(np.zeros(2, np.float32), want) == float("inf")
    assert error(np.array([1, 2]), np.array([1, 3])) == float("inf")
