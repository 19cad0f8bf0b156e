"""Assertions that fail, and what a processor refuses to do."""

from __future__ import annotations

import numpy as np

from .case import BugCase, empty

CASES = [
    BugCase(
        name="assertion_fails",
        code=r"""
extern "C" __global__ void roots(const float* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    assert(x[i] >= 0.0f);  // BUG
    out[i] = sqrtf(x[i]);
}
""",
        kernel_name="roots",
        make=lambda rng: {
            "x": np.where(np.arange(60) == 45, -1, 1).astype(np.float32),
            "out": empty(60),
            "n": np.int32(60),
        },
        grid=(2,),
        block=(32,),
        kind="KernelAssertion",
        thread=(13, 0, 0),
        block_index=(1, 0, 0),
    ),
    BugCase(
        name="trap",
        code=r"""
extern "C" __global__ void stop(const int* x, int* out) {
    if (x[threadIdx.x] == 17)
        __trap();  // BUG
    out[threadIdx.x] = x[threadIdx.x];
}
""",
        kernel_name="stop",
        make=lambda rng: {"x": np.arange(32, dtype=np.int32), "out": empty(32, dtype=np.int32)},
        grid=(1,),
        block=(32,),
        kind="KernelFault",
        thread=(17, 0, 0),
    ),
    BugCase(
        name="stack_overflow",
        code=r"""
__device__ __noinline__ int depth(const int* x, int n) {  // BUG
    volatile int mine[64];  // BUG
    mine[n % 64] = x[0];  // BUG
    return n < 0 ? 0 : depth(x, n + 1) + mine[n % 64];  // BUG
}
extern "C" __global__ void dive(const int* x, int* out) {
    out[threadIdx.x] = depth(x, threadIdx.x);
}
""",
        kernel_name="dive",
        make=lambda rng: {"x": np.array([1], np.int32), "out": empty(1, dtype=np.int32)},
        grid=(1,),
        block=(1,),
        kind="KernelFault",
    ),
]
