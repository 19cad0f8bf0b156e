"""Every planted fault is found in full mode and named as what it is, and kernels run on after it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tinyvllm_ref import emulation as cp

from .kernels import bug_cases
from .kernels.case import BugCase

KINDS = ("OutOfBounds", "UninitializedRead", "DataRace", "BarrierDivergence", "KernelTimeout")
# Seconds that a kernel may run before it counts as endless; all but the endless ones need milliseconds.
TIMEOUT = {"KernelTimeout": 0.4}

DOUBLE = r"""
extern "C" __global__ void twice(const float* x, float* out, int n) {
    __shared__ float s[64];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    s[threadIdx.x] = i < n ? x[i] : 0.0f;
    __syncthreads();
    if (i < n) out[i] = 2.0f * s[threadIdx.x];
}
"""


def run(case: BugCase, mode: str) -> cp.KernelError | None:
    """The error that the case raises."""
    with cp.checks(mode), cp.timeout(TIMEOUT.get(case.kind, 30)):
        try:
            case.launch(cp, case.inputs())
        except cp.KernelError as error:
            return error
    return None


def assert_kernels_still_run(mode: str) -> None:
    x = np.arange(100, dtype=np.float32)
    out = cp.empty(100, np.float32)
    with cp.checks(mode):
        cp.RawKernel(DOUBLE, "twice")((2,), (64,), (cp.asarray(x), out, np.int32(100)))
    np.testing.assert_array_equal(cp.asnumpy(out), 2 * x)


@pytest.mark.parametrize("case", bug_cases(), ids=lambda case: case.name)
def test_found_in_full_mode(case: BugCase) -> None:
    error = run(case, "full")
    assert error is not None, f"{case.kind} was not found"
    assert type(error).__name__ == case.kind, str(error)
    assert error.kernel == case.kernel_name
    assert_lines(case, error)
    if case.array is not None:
        names = (case.array,) if isinstance(case.array, str) else case.array
        assert error.array in names, str(error)
    if case.index is not None:
        assert error.index == case.index, str(error)
    if case.thread is not None:
        assert error.thread == case.thread, str(error)
    if case.block_index is not None:
        assert error.block == case.block_index, str(error)
    assert_kernels_still_run("full")


def assert_lines(case: BugCase, error: cp.KernelError) -> None:
    """The line is the faulty one; of a race or a barrier the two sides are, in either order."""
    bug, other = case.marked_lines("BUG"), case.marked_lines("OTHER")
    assert bug, "the case marks no line"
    source = case.code.split("\n")
    if case.kind == "KernelTimeout":
        # Where a loop is stopped is chance, and compilers count its last jump to the kernel's closing brace.
        bug = [*bug, *(n for n, text in enumerate(source, 1) if text == "}" and n > max(bug))]
    if case.kind not in ("DataRace", "BarrierDivergence"):
        assert error.line in bug, str(error)
        assert error.source_line == source[error.line - 1]
        assert f"line {error.line}" in str(error)
        return
    assert error.line in bug + other, str(error)
    if case.kind == "DataRace" or (error.other is not None and error.other.line):
        assert error.other is not None, str(error)
        sides = (error.line, error.other.line)
        both = [sides, sides[::-1]]
        assert any(one in bug and two in (other or bug) for one, two in both), str(error)
        assert error.other.text == source[error.other.line - 1]


@pytest.mark.parametrize("case", bug_cases(), ids=lambda case: case.name)
def test_survived_in_fast_mode(case: BugCase) -> None:
    """Without checks a fault may pass unseen, but it ends, and the process and later kernels are well."""
    error = run(case, "fast")
    if case.kind in ("KernelTimeout", "KernelAssertion", "KernelFault"):
        assert type(error).__name__ == case.kind, str(error)
    assert_kernels_still_run("fast")


def test_every_kind_is_planted_often() -> None:
    counts = Counter(case.kind for case in bug_cases())
    assert all(counts[kind] >= 8 for kind in KINDS), counts
    assert sum(counts.values()) >= 60
