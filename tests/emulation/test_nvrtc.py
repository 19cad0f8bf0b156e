"""NVIDIA's own compiler accepts every kernel of the corpus: the emulation's truth is CUDA C++.

On Linux the wheels are part of the development requirements, and a test without them fails.
"""

from __future__ import annotations

import platform

import pytest

from .. import nvrtc
from .kernels import bug_cases, correct_cases
from .kernels.case import Program

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="NVIDIA has no wheel for this system")


@pytest.mark.parametrize("arch", [75, 90])
@pytest.mark.parametrize("case", [*correct_cases(), *bug_cases()], ids=lambda case: case.name)
def test_nvrtc_compiles(case: Program, arch: int) -> None:
    result = nvrtc.compile_source(
        case.code, f"compute_{max(arch, case.min_arch)}", case.options, case.name_expressions
    )
    assert result.ok, result.log
    symbol = result.lowered_names.get(case.kernel_name, case.kernel_name)
    assert f".entry {symbol}(" in result.ptx


def test_nvrtc_refuses_what_is_wrong() -> None:
    result = nvrtc.compile_source('extern "C" __global__ void k(float* x) {\n    x[0] = y;\n}', "compute_75")
    assert not result.ok
    assert "kernel.cu(2): error" in result.log


def test_version() -> None:
    assert nvrtc.version()[0] == 12
