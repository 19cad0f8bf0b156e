"""The correct kernels of the corpus under CuPy on a card: what the emulation must agree with."""

from __future__ import annotations

import pytest

from .kernels import correct_cases
from .kernels.case import KernelCase

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", correct_cases(), ids=lambda case: case.name)
def test_correct_kernel_on_a_card(case: KernelCase) -> None:
    import cupy

    if int(cupy.cuda.Device().compute_capability) < case.min_arch:
        pytest.skip(f"needs compute capability {case.min_arch / 10}")
    errors = case.errors(case.launch(cupy, case.inputs()))
    assert {name: error for name, error in errors.items() if not error <= case.tolerance} == {}
