"""printf, assert, clocks: what a kernel has beside its arrays."""

from __future__ import annotations

import numpy as np

from .case import KernelCase, empty, f64, normal

PRINTF = r"""
extern "C" __global__ void report(const float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && i % 2 == 0)
        printf("x[%d] = %.3f from block %u, %s %c %lld %%\n", i, x[i], blockIdx.x, "thread", 'T', 1ll << 40);
}
"""

ASSERT = r"""
extern "C" __global__ void checked_sqrt(const float* x, float* out, int n) {
    int i = threadIdx.x;
    assert(n > 0 && "n is the number of elements");
    if (i >= n) return;
    assert(x[i] >= 0.0f);
    out[i] = sqrtf(x[i]);
}
"""

CLOCK = r"""
// clock64 never runs backwards in a thread.
extern "C" __global__ void clocks(const float* x, float* out, int* monotone, int n) {
    long long before = clock64();
    float sum = 0.0f;
    for (int i = 0; i < n; i++) sum += x[i] * (float)(threadIdx.x + 1);
    long long after = clock64();
    out[threadIdx.x] = sum;
    monotone[threadIdx.x] = after >= before && clock64() >= after;
}
"""

LIMITS = r"""
// NVRTC has no headers with these; the kernel brings what it does not find.
#ifndef FLT_MAX
#define FLT_MAX 3.402823466e+38f
#endif
#ifndef FLT_EPSILON
#define FLT_EPSILON 1.192092896e-07f
#endif
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef INT_MAX
#define INT_MAX 2147483647
#endif
extern "C" __global__ void limits(float* out, int* whole) {
    out[0] = FLT_MAX;
    out[1] = FLT_EPSILON;
    out[2] = -INFINITY;
    whole[0] = INT_MAX;
    whole[1] = -INT_MAX - 1;
    whole[2] = warpSize;
}
"""


def _printed() -> tuple[str, ...]:
    values = _printf_inputs(np.random.default_rng(5))["x"]
    lines = [f"x[{i}] = {values[i]:.3f} from block {i // 8}, thread T {1 << 40} %" for i in range(0, 11, 2)]
    return tuple(lines)


def _printf_inputs(rng: np.random.Generator) -> dict[str, np.ndarray]:
    # Numbers that no rounding of the third decimal can change.
    return {"x": np.arange(11, dtype=np.float32) / 8 - 0.5}


CASES = [
    KernelCase(
        name="printf",
        code=PRINTF,
        kernel_name="report",
        make=lambda rng: {**_printf_inputs(rng), "n": np.int32(11)},
        grid=(2,),
        block=(8,),
        expected=lambda a: {"x": f64(a.x)},
        prints=_printed(),
        tolerance=0,
    ),
    KernelCase(
        name="assert_that_holds",
        code=ASSERT,
        kernel_name="checked_sqrt",
        make=lambda rng: {"x": np.abs(normal(rng, 45)), "out": empty(45), "n": np.int32(45)},
        grid=(1,),
        block=(64,),
        expected=lambda a: {"out": np.sqrt(f64(a.x))},
    ),
    KernelCase(
        name="clock64_is_monotone",
        code=CLOCK,
        kernel_name="clocks",
        make=lambda rng: {
            "x": normal(rng, 50),
            "out": empty(20),
            "monotone": empty(20, dtype=np.int32),
            "n": np.int32(50),
        },
        grid=(1,),
        block=(20,),
        expected=lambda a: {"monotone": np.ones(20, np.int64), "out": f64(a.x).sum() * np.arange(1, 21)},
        tolerance=1e-5,
    ),
    KernelCase(
        name="limits",
        code=LIMITS,
        kernel_name="limits",
        make=lambda rng: {"out": empty(3), "whole": empty(3, dtype=np.int32)},
        grid=(1,),
        block=(1,),
        expected=lambda a: {
            "out": np.array([float(np.finfo(np.float32).max), 2.0**-23, -np.inf]),
            "whole": np.array([2**31 - 1, -(2**31), 32]),
        },
        tolerance=0,
    ),
]
