"""half and bfloat16 through <cuda_fp16.h> and <cuda_bf16.h>: conversions, arithmetic, vectors."""

from __future__ import annotations

import numpy as np

from .case import BF16_TOLERANCE, HALF_TOLERANCE, KernelCase, empty, f64, from_bf16, normal, to_bf16

HALF_CONVERSIONS = r"""
#include <cuda_fp16.h>
extern "C" __global__ void conversions(const float* x, half* h, float* back, unsigned short* bits, int* whole,
                                       half* truncated, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    h[i] = __float2half(x[i]);
    back[i] = __half2float(__float2half_rn(x[i]));
    bits[i] = __half_as_ushort(__float2half(x[i])) ^ __half_as_ushort(__ushort_as_half(0x8000));
    whole[i] = __half2int_rn(h[i]);
    truncated[i] = __float2half_rz(x[i]);
}
"""

HALF_ARITHMETIC = r"""
#include <cuda_fp16.h>
extern "C" __global__ void arithmetic(const half* a, const half* b, const half* c, half* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    half* row = out + 10 * i;
    row[0] = __hadd(a[i], b[i]);
    row[1] = __hsub(a[i], b[i]);
    row[2] = __hmul(a[i], b[i]);
    row[3] = __hdiv(a[i], b[i]);
    row[4] = __hfma(a[i], b[i], c[i]);
    row[5] = a[i] + b[i] * c[i];
    row[6] = -a[i];
    row[7] = __habs(b[i]);
    half sum = a[i];
    sum += b[i];
    sum *= c[i];
    row[8] = sum;
    row[9] = half(2.5f) - __hneg(a[i]);
}
"""

HALF_COMPARISONS = r"""
#include <cuda_fp16.h>
extern "C" __global__ void comparisons(const __half* a, const __half* b, bool* out, __half* larger, int n) {
    int i = threadIdx.x;
    if (i >= n) return;
    bool* row = out + 8 * i;
    row[0] = __hgt(a[i], b[i]);
    row[1] = __hlt(a[i], b[i]);
    row[2] = __heq(a[i], b[i]);
    row[3] = __hge(a[i], b[i]);
    row[4] = a[i] <= b[i];
    row[5] = a[i] != b[i];
    row[6] = __hisnan(a[i]);
    row[7] = __hne(a[i], b[i]);
    larger[i] = __hmax(a[i], b[i]);
}
"""

HALF_FUNCTIONS = r"""
#include <cuda_fp16.h>
extern "C" __global__ void functions(const half* x, float* out, int n) {
    int i = threadIdx.x;
    if (i >= n) return;
    float* row = out + 6 * i;
    row[0] = __half2float(hexp(x[i]));
    row[1] = __half2float(hsqrt(x[i]));
    row[2] = __half2float(hrsqrt(x[i]));
    row[3] = __half2float(hlog(x[i]));
    row[4] = __half2float(hfloor(x[i]));
    row[5] = __half2float(hrcp(x[i]));
}
"""

HALF2_SAXPY = r"""
#include <cuda_fp16.h>
// Pairs, and the odd one at the end.
extern "C" __global__ void saxpy(float a, const half* x, half* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    half2 factor = __float2half2_rn(a);
    if (i < n / 2) {
        const half2* pairs = reinterpret_cast<const half2*>(x);
        half2* target = reinterpret_cast<half2*>(y);
        target[i] = __hfma2(factor, pairs[i], target[i]);
    }
    if (i == n / 2 && n % 2) y[n - 1] = __hfma(__low2half(factor), x[n - 1], y[n - 1]);
}
"""

HALF2_PARTS = r"""
#include <cuda_fp16.h>
extern "C" __global__ void parts(const float2* x, half2* packed, float* low, float* high, half2* swapped,
                                 float2* back, half2* sums, int n) {
    int i = threadIdx.x;
    if (i >= n) return;
    half2 v = __float22half2_rn(x[i]);
    packed[i] = v;
    low[i] = __low2float(v);
    high[i] = __high2float(v);
    swapped[i] = __halves2half2(__high2half(v), __low2half(v));
    back[i] = __half22float2(__hmul2(v, __floats2half2_rn(2.0f, 0.5f)));
    sums[i] = v + __lowhigh2highlow(v) - make_half2(__float2half(1.0f), __float2half(-1.0f));
}
"""

HALF_REDUCTION = r"""
#include <cuda_fp16.h>
// half in shared memory and through shuffles; the sum in float.
extern "C" __global__ void reduce(const half* x, float* sums, half* peaks) {
    __shared__ half staged[64], peak[2];
    int t = threadIdx.x;
    staged[63 - t] = x[blockIdx.x * 64 + t];
    __syncthreads();
    half best = staged[t];
    float sum = __half2float(best);
    for (int offset = 16; offset > 0; offset >>= 1) {
        best = __hmax(best, __shfl_xor_sync(0xffffffffu, best, offset));
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    }
    if (t % 32 == 0) {
        peak[t / 32] = best;
        atomicAdd(&sums[blockIdx.x], sum);
    }
    __syncthreads();
    if (t == 0) peaks[blockIdx.x] = peak[0] > peak[1] ? peak[0] : peak[1];
}
"""

BF16_CONVERSIONS = r"""
#include <cuda_bf16.h>
extern "C" __global__ void conversions(const float* x, __nv_bfloat16* out, float* back, unsigned short* bits,
                                       __nv_bfloat16* down, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    out[i] = __float2bfloat16(x[i]);
    back[i] = __bfloat162float(__float2bfloat16_rn(x[i]));
    bits[i] = __bfloat16_as_ushort(__ushort_as_bfloat16(__bfloat16_as_ushort(out[i])));
    down[i] = __float2bfloat16_rd(x[i]);
}
"""

BF16_ARITHMETIC = r"""
#include <cuda_bf16.h>
extern "C" __global__ void arithmetic(const __nv_bfloat16* a, const __nv_bfloat16* b, const __nv_bfloat16* c,
                                      __nv_bfloat16* out, bool* compared, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    nv_bfloat16* row = out + 7 * i;
    row[0] = __hadd(a[i], b[i]);
    row[1] = __hmul(a[i], b[i]);
    row[2] = a[i] - b[i];
    row[3] = a[i] / b[i];
#if defined(FUSED)
    row[4] = __hfma(a[i], b[i], c[i]);
#else
    row[4] = a[i] * b[i] + c[i];
#endif
    row[5] = __hmin(a[i], b[i]);
    row[6] = hexp(c[i]);
    compared[2 * i] = a[i] < b[i];
    compared[2 * i + 1] = __hge(a[i], b[i]);
}
"""

BF162_DOT = r"""
#include <cuda_bf16.h>
// Rows of W (rows, width), two bfloat16 a load; a warp a row.
extern "C" __global__ void gemv(const __nv_bfloat162* W, const float2* x, float* y, int pairs) {
    float sum = 0.0f;
    for (int k = threadIdx.x; k < pairs; k += 32) {
        float2 w = __bfloat1622float2(W[blockIdx.x * pairs + k]);
        sum += w.x * x[k].x + w.y * x[k].y;
    }
    for (int mask = 16; mask; mask >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    if (threadIdx.x == 0) y[blockIdx.x] = sum;
}
"""

BF162_PARTS = r"""
#include <cuda_bf16.h>
extern "C" __global__ void parts(const float2* x, __nv_bfloat162* packed, __nv_bfloat162* sums, float* low,
                                 float* high, int n) {
    int i = threadIdx.x;
    if (i >= n) return;
    __nv_bfloat162 v = __float22bfloat162_rn(x[i]);
    packed[i] = v;
#if defined(FUSED)
    sums[i] = __hfma2(v, __float2bfloat162_rn(3.0f), __halves2bfloat162(v.y, v.x));
#else
    sums[i] = v * __float2bfloat162_rn(3.0f) + __halves2bfloat162(v.y, v.x);
#endif
    low[i] = __low2float(v);
    high[i] = __bfloat162float(__high2bfloat16(v));
}
"""

HALF_ATOMICS = r"""
#include <cuda_fp16.h>
// Whole numbers, whose sums are exact in any order.
extern "C" __global__ void sums(const half* x, half* total, half2* pair, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    atomicAdd(total, x[i]);
    atomicAdd(pair, __halves2half2(x[i], __hneg(x[i])));
}
"""

BF16_ATOMICS = r"""
#include <cuda_bf16.h>
extern "C" __global__ void sums(const __nv_bfloat16* x, __nv_bfloat16* total, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomicAdd(&total[i % 3], x[i]);
}
"""

PROMOTIONS = r"""
#include <cuda_fp16.h>
// What converts by itself: numbers to half, half to float, to int and to bool; stepping by one.
__device__ float plus_one(float v) { return v + 1.0f; }
extern "C" __global__ void promotions(const half* x, float* out, int n) {
    int i = threadIdx.x;
    if (i >= n) return;
    half h = 3, from_float = 0.5f, from_double = 0.25, v = x[i];
    float* row = out + 8 * i;
    row[0] = h;
    row[1] = from_float + from_double;
    row[2] = plus_one(v);
    row[3] = (int)v;
    row[4] = v ? 1.0f : 0.0f;
    row[5] = v++;
    row[6] = --v;
    row[7] = (float)(unsigned char)(v * half(10.0f)) + static_cast<float>(v);
}
"""

MIXED = r"""
#include <cuda_fp16.h>
#include <cuda_bf16.h>
template <typename T> __device__ float to_float(T v);
template <> __device__ float to_float(half v) { return __half2float(v); }
template <> __device__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
template <> __device__ float to_float(float v) { return v; }
template <typename T> __global__ void widen(const T* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = to_float(x[i]);
}
"""


def _special() -> np.ndarray:
    """float32 numbers at the edges: ties, subnormals of half, overflow, infinities."""
    edges = [0.0, -0.0, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 65504.0, 65519.0, 65520.0, 1e6]
    small = [2.0**-14, 2.0**-24, 2.0**-25, 3 * 2.0**-26, 6e-8, -1e-6, np.inf, -np.inf]
    return np.array([*edges, *small], np.float32)


def _half(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x.astype(np.float16)


def _truncated_half(x: np.ndarray) -> np.ndarray:
    nearest = _half(x)
    too_far = np.abs(f64(nearest)) > np.abs(f64(x))
    return f64(np.where(too_far, np.nextafter(nearest, np.float16(0)), nearest))


def _bf16_down(x: np.ndarray) -> np.ndarray:
    """Rounded down: the bits cut off; a negative number that loses something goes one place further."""
    bits = x.view(np.uint32)
    lost = ((bits & 0xFFFF) != 0) & (x < 0)
    return np.asarray((bits >> 16) + lost).astype(np.int64)


def _half_arithmetic(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    wa, wb, wc = f64(a), f64(b), f64(c)
    product, total = f64(_half(wb * wc)), f64(_half(wa + wb))
    columns = [
        wa + wb,
        wa - wb,
        wa * wb,
        wa / wb,
        wa * wb + wc,
        wa + product,
        -wa,
        np.abs(wb),
        total * wc,
        2.5 + wa,
    ]
    return np.stack(columns, axis=1)


def _half_comparisons(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    nan = np.isnan(a) | np.isnan(b)
    return np.stack([a > b, a < b, a == b, a >= b, a <= b, a != b, np.isnan(a), (a != b) & ~nan], axis=1)


def _halves_with_nan(rng: np.random.Generator) -> np.ndarray:
    x = rng.integers(-3, 4, 60).astype(np.float16)
    x[::11] = np.nan
    return x


CASES = [
    KernelCase(
        name="half_conversions",
        code=HALF_CONVERSIONS,
        kernel_name="conversions",
        make=lambda rng: {
            "x": np.concatenate([normal(rng, 83) * 100, _special()]),
            "h": empty(101, dtype=np.float16),
            "back": empty(101),
            "bits": empty(101, dtype=np.uint16),
            "whole": empty(101, dtype=np.int32),
            "truncated": empty(101, dtype=np.float16),
            "n": np.int32(101),
        },
        grid=(2,),
        block=(64,),
        expected=lambda a: {
            "h": f64(_half(a.x)),
            "back": f64(_half(a.x)),
            "bits": (_half(a.x).view(np.uint16) ^ 0x8000).astype(np.int64),
            "whole": np.clip(np.rint(f64(_half(a.x))), -(2**31), 2**31 - 1).astype(np.int64),
            "truncated": _truncated_half(a.x[:-4]).tolist() + _truncated_half(a.x[-4:]).tolist(),
        },
        tolerance=0,
    ),
    KernelCase(
        name="half_arithmetic",
        code=HALF_ARITHMETIC,
        kernel_name="arithmetic",
        make=lambda rng: {
            "a": _half(normal(rng, 77)),
            "b": _half(normal(rng, 77) + 3),
            "c": _half(normal(rng, 77)),
            "out": empty(77, 10, dtype=np.float16),
            "n": np.int32(77),
        },
        grid=(2,),
        block=(40,),
        by_column=True,
        expected=lambda a: {"out": _half_arithmetic(a.a, a.b, a.c)},
        # Contraction of a + b * c to a fused step is allowed on a card: one rounding less.
        tolerance=2 * HALF_TOLERANCE,
    ),
    KernelCase(
        name="half_comparisons",
        code=HALF_COMPARISONS,
        kernel_name="comparisons",
        make=lambda rng: {
            "a": _halves_with_nan(rng),
            "b": rng.integers(-3, 4, 60).astype(np.float16),
            "out": empty(60, 8, dtype=np.bool_),
            "larger": empty(60, dtype=np.float16),
            "n": np.int32(60),
        },
        grid=(1,),
        block=(64,),
        expected=lambda a: {
            "out": _half_comparisons(a.a, a.b),
            "larger": f64(np.fmax(a.a, a.b)),
        },
        tolerance=0,
    ),
    KernelCase(
        name="half_functions",
        code=HALF_FUNCTIONS,
        kernel_name="functions",
        make=lambda rng: {
            "x": _half(rng.uniform(0.1, 5, 50)),
            "out": empty(50, 6),
            "n": np.int32(50),
        },
        grid=(1,),
        block=(64,),
        by_column=True,
        expected=lambda a: {
            "out": np.stack(
                [
                    f(f64(a.x))
                    for f in (np.exp, np.sqrt, lambda v: v**-0.5, np.log, np.floor, lambda v: 1 / v)
                ],
                axis=1,
            )
        },
        tolerance=2 * HALF_TOLERANCE,
    ),
    KernelCase(
        name="half2_saxpy_with_tail",
        code=HALF2_SAXPY,
        kernel_name="saxpy",
        make=lambda rng: {
            "a": np.float32(1.5),
            "x": _half(normal(rng, 205)),
            "y": _half(normal(rng, 205)),
            "n": np.int32(205),
        },
        grid=(2,),
        block=(64,),
        expected=lambda a: {"y": 1.5 * f64(a.x) + f64(a.y)},
        tolerance=HALF_TOLERANCE,
    ),
    KernelCase(
        name="half2_parts",
        code=HALF2_PARTS,
        kernel_name="parts",
        make=lambda rng: {
            "x": normal(rng, 45, 2),
            "packed": empty(45, 2, dtype=np.float16),
            "low": empty(45),
            "high": empty(45),
            "swapped": empty(45, 2, dtype=np.float16),
            "back": empty(45, 2),
            "sums": empty(45, 2, dtype=np.float16),
            "n": np.int32(45),
        },
        grid=(1,),
        block=(64,),
        expected=lambda a: {
            "packed": f64(_half(a.x)),
            "low": f64(_half(a.x))[:, 0],
            "high": f64(_half(a.x))[:, 1],
            "swapped": f64(_half(a.x))[:, ::-1],
            "back": f64(_half(a.x)) * [2, 0.5],
            "sums": f64(_half(_half(f64(_half(a.x)).sum(axis=1)).astype(np.float64)[:, None] - [1, -1])),
        },
        tolerance=0,
    ),
    KernelCase(
        name="half_shared_and_shuffles",
        code=HALF_REDUCTION,
        kernel_name="reduce",
        make=lambda rng: {
            "x": _half(normal(rng, 3, 64)),
            "sums": np.zeros(3, np.float32),
            "peaks": empty(3, dtype=np.float16),
        },
        grid=(3,),
        block=(64,),
        expected=lambda a: {"sums": f64(a.x).sum(axis=1), "peaks": f64(a.x).max(axis=1)},
        tolerance=1e-5,
    ),
    KernelCase(
        name="bf16_conversions",
        code=BF16_CONVERSIONS,
        kernel_name="conversions",
        make=lambda rng: {
            "x": np.concatenate([normal(rng, 83) * 100, _special()]),
            "out": empty(101, dtype=np.uint16),
            "back": empty(101),
            "bits": empty(101, dtype=np.uint16),
            "down": empty(101, dtype=np.uint16),
            "n": np.int32(101),
        },
        grid=(2,),
        block=(64,),
        expected=lambda a: {
            "out": to_bf16(a.x).astype(np.int64),
            "back": f64(from_bf16(to_bf16(a.x))),
            "bits": to_bf16(a.x).astype(np.int64),
            "down": _bf16_down(a.x),
        },
        tolerance=0,
    ),
    *[
        KernelCase(
            name=f"bf16_arithmetic{ending}",
            options=options,
            min_arch=arch,
            code=BF16_ARITHMETIC,
            kernel_name="arithmetic",
            make=lambda rng: {
                "a": to_bf16(normal(rng, 77)),
                "b": to_bf16(normal(rng, 77) + 3),
                "c": to_bf16(normal(rng, 77)),
                "out": empty(77, 7, dtype=np.uint16),
                "compared": empty(77, 2, dtype=np.bool_),
                "n": np.int32(77),
            },
            grid=(2,),
            block=(40,),
            by_column=True,
            expected=lambda a: {
                "out": _bf16_arithmetic(*(f64(from_bf16(x)) for x in (a.a, a.b, a.c))),
                "compared": np.stack(
                    [from_bf16(a.a) < from_bf16(a.b), from_bf16(a.a) >= from_bf16(a.b)],
                    axis=1,
                ),
            },
            tolerance=BF16_TOLERANCE if arch == 80 else 2 * BF16_TOLERANCE,  # unfused: rounded twice
        )
        for ending, options, arch in [("", (), 75), ("_fused", ("-DFUSED",), 80)]
    ],
    KernelCase(
        name="bfloat162_gemv",
        code=BF162_DOT,
        kernel_name="gemv",
        make=lambda rng: {
            "W": to_bf16(normal(rng, 7, 94)),
            "x": normal(rng, 94),
            "y": empty(7),
            "pairs": np.int32(47),
        },
        grid=(7,),
        block=(32,),
        expected=lambda a: {"y": f64(from_bf16(a.W)) @ f64(a.x)},
        tolerance=1e-5,
    ),
    *[
        KernelCase(
            name=f"bfloat162_parts{ending}",
            options=options,
            min_arch=arch,
            code=BF162_PARTS,
            kernel_name="parts",
            make=lambda rng: {
                "x": normal(rng, 45, 2),
                "packed": empty(45, 2, dtype=np.uint16),
                "sums": empty(45, 2, dtype=np.uint16),
                "low": empty(45),
                "high": empty(45),
                "n": np.int32(45),
            },
            grid=(1,),
            block=(64,),
            expected=lambda a: {
                "packed": f64(from_bf16(to_bf16(a.x))),
                "sums": 3 * f64(from_bf16(to_bf16(a.x))) + f64(from_bf16(to_bf16(a.x)))[:, ::-1],
                "low": f64(from_bf16(to_bf16(a.x)))[:, 0],
                "high": f64(from_bf16(to_bf16(a.x)))[:, 1],
            },
            tolerance=BF16_TOLERANCE if arch == 80 else 2 * BF16_TOLERANCE,  # unfused: rounded twice
        )
        for ending, options, arch in [("", (), 75), ("_fused", ("-DFUSED",), 80)]
    ],
    KernelCase(
        name="half_atomic_add",
        code=HALF_ATOMICS,
        kernel_name="sums",
        make=lambda rng: {
            "x": rng.integers(-9, 10, 90).astype(np.float16),
            "total": np.zeros(1, np.float16),
            "pair": np.zeros(2, np.float16),
            "n": np.int32(90),
        },
        grid=(3,),
        block=(32,),
        expected=lambda a: {
            "total": f64(a.x).sum(keepdims=True),
            "pair": f64(a.x).sum() * np.array([1.0, -1.0]),
        },
        tolerance=0,
    ),
    KernelCase(
        name="bf16_atomic_add",
        code=BF16_ATOMICS,
        kernel_name="sums",
        min_arch=80,
        make=lambda rng: {
            "x": to_bf16(rng.integers(-3, 4, 75).astype(np.float32)),
            "total": np.zeros(3, np.uint16),
            "n": np.int32(75),
        },
        grid=(2,),
        block=(40,),
        expected=lambda a: {"total": f64(from_bf16(a.x)).reshape(25, 3).sum(axis=0)},
        tolerance=0,
    ),
    KernelCase(
        name="half_conversions_by_themselves",
        code=PROMOTIONS,
        kernel_name="promotions",
        make=lambda rng: {
            "x": np.arange(-2, 9).astype(np.float16) / 2,
            "out": empty(11, 8),
            "n": np.int32(11),
        },
        grid=(1,),
        block=(32,),
        expected=lambda a: {"out": _promotions(f64(a.x))},
        tolerance=0,
    ),
    *[
        KernelCase(
            name=f"widen_{name}",
            code=MIXED,
            kernel_name=f"widen<{type_name}>",
            name_expressions=("widen<half>", "widen<__nv_bfloat16>", "widen<float>"),
            make=lambda rng, pack=pack: {  # type: ignore[misc]
                "x": pack(normal(rng, 70)),
                "out": empty(70),
                "n": np.int32(70),
            },
            grid=(2,),
            block=(50,),
            expected=lambda a: {"out": f64(from_bf16(a.x) if a.x.dtype == np.uint16 else a.x)},
            tolerance=0,
        )
        for name, type_name, pack in [("half", "half", _half), ("bf16", "__nv_bfloat16", to_bf16)]
    ],
]


def _bf16_arithmetic(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return np.stack([a + b, a * b, a - b, a / b, a * b + c, np.minimum(a, b), np.exp(c)], axis=1)


def _promotions(x: np.ndarray) -> np.ndarray:
    three, sum_of_two = np.full(x.size, 3.0), np.full(x.size, 0.75)
    bytes_of = np.clip(np.trunc(10 * x), 0, 255)
    return np.stack([three, sum_of_two, x + 1, np.trunc(x), x != 0, x, x, bytes_of + x], axis=1)
