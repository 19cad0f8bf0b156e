"""Every kernel under CuPy on a card, against NumPy in float64."""

from __future__ import annotations

import pytest

from tinyvllm_ref.device import cp, is_gpu

from .cases import Case, all_cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not is_gpu, reason="no NVIDIA GPU")]


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_on_a_card(case: Case) -> None:
    if "cublas" in case.name and int(cp.cuda.Device().compute_capability) < 80:
        pytest.skip("cuBLAS has no BF16 products below compute capability 8.0")
    errors = case.errors()
    assert {name: value for name, value in errors.items() if not value <= case.tolerance} == {}
