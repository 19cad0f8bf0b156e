"""Mathematical functions, fast intrinsics, bits of numbers, and integer intrinsics."""

from __future__ import annotations

import math

import numpy as np

from .case import KernelCase, empty, f64, normal

MATHS = r"""
extern "C" __global__ void maths(const float* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v = x[i], p = fabsf(v) + 0.1f, *row = out + 30 * i;
    row[0] = expf(v);
    row[1] = logf(p);
    row[2] = sqrtf(p);
    row[3] = rsqrtf(p);
    row[4] = tanhf(v);
    row[5] = erff(v);
    row[6] = sinf(v);
    row[7] = cosf(v);
    row[8] = powf(p, 1.7f);
    row[9] = fmaf(v, 3.0f, p);
    row[10] = fminf(v, 0.5f);
    row[11] = fmaxf(v, 0.5f);
    row[12] = copysignf(p, v);
    row[13] = floorf(v);
    row[14] = ceilf(v);
    row[15] = roundf(v * 1.3f);
    row[16] = truncf(v);
    row[17] = fmodf(v, 0.75f);
    row[18] = exp2f(v);
    row[19] = log2f(p);
    row[20] = log10f(p);
    row[21] = cbrtf(v);
    row[22] = atan2f(v, p);
    row[23] = hypotf(v, p);
    row[24] = log1pf(p);
    row[25] = expm1f(v);
    row[26] = sinhf(v);
    row[27] = acosf(v / (p + 1.0f));
    row[28] = rintf(v * 1.3f);
    row[29] = fabsf(v);
}
"""

OVERLOADS = r"""
// The names without an f, which choose by type; and min, max, abs of integers.
extern "C" __global__ void overloads(const float* x, const double* y, float* out, double* wide, int* whole,
                                     int n) {
    int i = threadIdx.x;
    if (i >= n) return;
    out[3 * i] = exp(x[i]);
    out[3 * i + 1] = max(x[i], 0.25f) + min(x[i], -0.25f);
    out[3 * i + 2] = abs(x[i]) + pow(2.0f, x[i]);
    wide[3 * i] = sqrt(fabs(y[i]));
    wide[3 * i + 1] = fmax(y[i], 0.1) * tanh(y[i]);
    wide[3 * i + 2] = floor(y[i]) + rsqrt(y[i] * y[i] + 1.0);
    int k = i - 20;
    whole[3 * i] = abs(k);
    whole[3 * i + 1] = max(k, 3) * min(k, -3);
    whole[3 * i + 2] = (int)max(5u, (unsigned)i) + (int)min(7ll, (long long)k);
}
"""

FAST = r"""
extern "C" __global__ void fast(const float* x, float* out, int n) {
    int i = threadIdx.x;
    if (i >= n) return;
    float v = x[i], p = fabsf(v) + 0.1f, *row = out + 14 * i, s, c;
    row[0] = __expf(v);
    row[1] = __logf(p);
    row[2] = __fdividef(v, p);
    row[3] = __frcp_rn(p);
    row[4] = __fmaf_rn(v, p, 1.0f);
    row[5] = __saturatef(v);
    __sincosf(v, &s, &c);
    row[6] = s;
    row[7] = c;
    row[8] = __powf(p, 1.5f);
    row[9] = __fadd_rn(v, p) * __fmul_rn(v, p);
    row[10] = __fsqrt_rn(p);
    row[11] = __exp10f(v * 0.5f);
    row[12] = __log2f(p);
    row[13] = __fdiv_rn(v, p) + __frsqrt_rn(p) - __fsub_rn(p, v);
}
"""

SPECIAL_NUMBERS = r"""
#define NOT_A_NUMBER __int_as_float(0x7fffffff)
#define INF __int_as_float(0x7f800000)
extern "C" __global__ void special(float zero, float* out, bool* tests) {
    out[0] = 1.0f / zero;
    out[1] = -1.0f / zero;
    out[2] = zero / zero;
    out[3] = fmaxf(NOT_A_NUMBER, 2.0f);
    out[4] = fminf(NOT_A_NUMBER, -2.0f);
    out[5] = expf(-INF) + expf(-200.0f);
    out[6] = expf(89.0f);
    out[7] = sqrtf(-1.0f);
    out[8] = INF - INF;
    out[9] = logf(zero);
    out[10] = tanhf(INF);
    out[11] = 1.0f / (1.0f + expf(100.0f));
    tests[0] = isnan(out[2]);
    tests[1] = isinf(out[0]);
    tests[2] = isfinite(out[3]);
    tests[3] = signbit(-zero);
    tests[4] = NOT_A_NUMBER == NOT_A_NUMBER;
    tests[5] = NOT_A_NUMBER != NOT_A_NUMBER;
    tests[6] = NOT_A_NUMBER < 1.0f;
}
"""

BIT_CASTS = r"""
extern "C" __global__ void bits(const float* x, unsigned* as_uint, int* as_int, float* flipped, float* next,
                                long long* wide, double* halves, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    as_uint[i] = __float_as_uint(x[i]);
    as_int[i] = __float_as_int(x[i]);
    flipped[i] = __uint_as_float(as_uint[i] ^ 0x80000000u);
    next[i] = __int_as_float(as_int[i] + 1);
    double d = x[i];
    wide[i] = __double_as_longlong(d);
    halves[i] = __hiloint2double(__double2hiint(d), __double2loint(d)) + __longlong_as_double(wide[i]);
}
"""

INTEGERS = r"""
extern "C" __global__ void integers(const unsigned* x, const unsigned* y, unsigned* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned a = x[i], b = y[i], *row = out + 20 * i;
    row[0] = __clz(a);
    row[1] = __ffs(a);
    row[2] = __popc(a);
    row[3] = __brev(a);
    row[4] = __umulhi(a, b);
    row[5] = __mulhi((int)a, (int)b);
    row[6] = __mul24((int)(a >> 9), (int)(b >> 9));
    row[7] = __umul24(a, b);
    row[8] = __clzll(((unsigned long long)a << 20) | 1ull);
    row[9] = __popcll(((unsigned long long)a << 32) | b);
    row[10] = __ffsll((unsigned long long)a << 32);
    row[11] = __sad((int)a >> 1, (int)b >> 1, 7u);
    row[12] = __usad(a, b, 9u);
    row[13] = __byte_perm(a, b, 0x5140);
    row[14] = __funnelshift_l(a, b, 7);
    row[15] = __funnelshift_r(a, b, 39);
    row[16] = (unsigned)(__umul64hi((unsigned long long)a << 32 | b, 0x9e3779b97f4a7c15ull) >> 32);
    row[17] = (unsigned)__hadd((int)a, (int)b);
    row[18] = __urhadd(a, b);
    row[19] = (unsigned)(__brevll((unsigned long long)a) >> 32);
}
"""

CONVERSIONS = r"""
extern "C" __global__ void conversions(const float* x, int* rounded, int* floored, unsigned* clipped,
                                       float* back, unsigned char* bytes, long long* wide, int n) {
    int i = threadIdx.x;
    if (i >= n) return;
    rounded[i] = __float2int_rn(x[i]);
    floored[i] = __float2int_rd(x[i]);
    clipped[i] = __float2uint_rz(fabsf(x[i]));
    back[i] = __int2float_rn((int)x[i] * 1000003);
    bytes[i] = (unsigned char)min(255, max(0, __float2int_rz(x[i])));
    wide[i] = __float2ll_rn(x[i]) + __double2ll_rz(1.0e10 * x[i]);
}
"""

SIGNED_ARITHMETIC = r"""
// Division truncates, shifts of negative numbers keep the sign, char is signed or not as its name says.
extern "C" __global__ void signs(const int* x, int* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int v = x[i], *row = out + 6 * i;
    row[0] = v / 7;
    row[1] = v % 7;
    row[2] = v >> 3;
    row[3] = (signed char)v;
    row[4] = (unsigned char)v;
    row[5] = (short)(v * 3);
}
"""


def _maths(x: np.ndarray) -> np.ndarray:
    v = f64(x)
    p = f64(np.abs(x) + np.float32(0.1))
    erf = np.array([math.erf(value) for value in v])
    scaled = f64(x * np.float32(1.3))
    away = np.copysign(np.floor(np.abs(scaled) + 0.5), scaled)
    columns = [
        *(np.exp(v), np.log(p), np.sqrt(p), 1 / np.sqrt(p), np.tanh(v), erf, np.sin(v), np.cos(v)),
        *(p ** float(np.float32(1.7)), 3 * v + p, np.minimum(v, 0.5), np.maximum(v, 0.5), np.copysign(p, v)),
        *(np.floor(v), np.ceil(v), away, np.trunc(v), np.fmod(v, 0.75), np.exp2(v), np.log2(p), np.log10(p)),
        *(np.cbrt(v), np.arctan2(v, p), np.hypot(v, p), np.log1p(p), np.expm1(v), np.sinh(v)),
        *(np.arccos(v / (p + 1)), np.rint(scaled), np.abs(v)),
    ]
    return np.stack(columns, axis=1)


def _overloads(x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
    v, i = f64(x), np.arange(x.size)
    k = i - 20
    return {
        "out": np.stack(
            [np.exp(v), np.maximum(v, 0.25) + np.minimum(v, -0.25), np.abs(v) + 2**v],
            axis=1,
        ),
        "wide": np.stack(
            [np.sqrt(np.abs(y)), np.fmax(y, 0.1) * np.tanh(y), np.floor(y) + (y * y + 1) ** -0.5],
            axis=1,
        ),
        "whole": np.stack(
            [np.abs(k), np.maximum(k, 3) * np.minimum(k, -3), np.maximum(5, i) + np.minimum(7, k)], axis=1
        ),
    }


def _fast(x: np.ndarray) -> np.ndarray:
    v = f64(x)
    p = f64(np.abs(x) + np.float32(0.1))
    columns = [
        *(np.exp(v), np.log(p), v / p, 1 / p, v * p + 1, np.clip(v, 0, 1), np.sin(v), np.cos(v), p**1.5),
        *((v + p) * (v * p), np.sqrt(p), 10 ** (v / 2), np.log2(p), v / p + p**-0.5 - (p - v)),
    ]
    return np.stack(columns, axis=1)


def _integers(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Row by row in Python's unbounded integers."""
    return np.array([_integer_row(int(a), int(b)) for a, b in zip(x, y, strict=True)])


def _integer_row(a: int, b: int) -> list[int]:
    mask = 2**32 - 1
    sa, sb = (v - 2**32 if v >> 31 else v for v in (a, b))
    wide = a << 20 | 1
    pair = b << 32 | a
    nibbles = [(pair >> (8 * selector)) & 255 for selector in (0, 4, 1, 5)]
    return [
        32 - a.bit_length(),
        (a & -a).bit_length(),
        a.bit_count(),
        int(f"{a:032b}"[::-1], 2),
        a * b >> 32,
        (sa * sb >> 32) & mask,
        ((a >> 9) * (b >> 9)) & mask,
        ((a & 0xFFFFFF) * (b & 0xFFFFFF)) & mask,
        64 - wide.bit_length(),
        a.bit_count() + b.bit_count(),
        ((a << 32) & -(a << 32)).bit_length(),
        (abs((sa >> 1) - (sb >> 1)) + 7) & mask,
        (abs(a - b) + 9) & mask,
        sum(byte << (8 * k) for k, byte in enumerate(nibbles)),
        (pair << 7 >> 32) & mask,
        (pair >> 7) & mask,
        ((a << 32 | b) * 0x9E3779B97F4A7C15 >> 64) >> 32,
        ((sa + sb) >> 1) & mask,
        (a + b + 1) >> 1,
        int(f"{a:064b}"[::-1], 2) >> 32,
    ]


def _conversions(x: np.ndarray) -> dict[str, np.ndarray]:
    v = f64(x)
    product = np.trunc(v).astype(np.int64) * 1000003
    return {
        "rounded": np.rint(v).astype(np.int64),
        "floored": np.floor(v).astype(np.int64),
        "clipped": np.floor(np.abs(v)).astype(np.int64),
        "back": f64(product.astype(np.float32)),
        "bytes": np.clip(np.trunc(v), 0, 255).astype(np.int64),
        "wide": np.rint(v).astype(np.int64) + np.trunc(1e10 * v).astype(np.int64),
    }


def _signs(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.int64)
    quotient = np.trunc(wide / 7).astype(np.int64)
    casts = [
        c.astype(np.int64)
        for c in (x.astype(np.int8), x.astype(np.uint8), np.multiply(x, 3).astype(np.int16))
    ]
    return np.stack([quotient, wide - 7 * quotient, wide >> 3, *casts], axis=1)


_INF = np.inf
_SPECIAL = np.array([_INF, -_INF, np.nan, 2, -2, 0, _INF, np.nan, np.nan, -_INF, 1, 0])

CASES = [
    KernelCase(
        name="maths_functions",
        code=MATHS,
        kernel_name="maths",
        make=lambda rng: {
            "x": np.concatenate([normal(rng, 60) * 2, np.linspace(-8, 8, 41, dtype=np.float32)]),
            "out": empty(101, 30),
            "n": np.int32(101),
        },
        grid=(2,),
        block=(64,),
        expected=lambda a: {"out": _maths(a.x)},
        by_column=True,
        tolerance=2e-6,
    ),
    KernelCase(
        name="maths_overloads",
        code=OVERLOADS,
        kernel_name="overloads",
        make=lambda rng: {
            "x": normal(rng, 45),
            "y": rng.standard_normal(45),
            "out": empty(45, 3),
            "wide": empty(45, 3, dtype=np.float64),
            "whole": empty(45, 3, dtype=np.int32),
            "n": np.int32(45),
        },
        grid=(1,),
        block=(64,),
        expected=lambda a: _overloads(a.x, a.y),
        by_column=True,
    ),
    KernelCase(
        name="fast_intrinsics",
        code=FAST,
        kernel_name="fast",
        make=lambda rng: {"x": normal(rng, 100), "out": empty(100, 14), "n": np.int32(100)},
        grid=(1,),
        block=(128,),
        expected=lambda a: {"out": _fast(a.x)},
        by_column=True,
        tolerance=1e-5,
    ),
    KernelCase(
        name="special_numbers",
        code=SPECIAL_NUMBERS,
        kernel_name="special",
        make=lambda rng: {"zero": np.float32(0), "out": empty(12), "tests": empty(7, dtype=np.bool_)},
        grid=(1,),
        block=(1,),
        expected=lambda a: {"out": _SPECIAL, "tests": np.array([1, 1, 1, 1, 0, 1, 0], np.bool_)},
    ),
    KernelCase(
        name="bit_casts",
        code=BIT_CASTS,
        kernel_name="bits",
        make=lambda rng: {
            "x": normal(rng, 73),
            "as_uint": empty(73, dtype=np.uint32),
            "as_int": empty(73, dtype=np.int32),
            "flipped": empty(73),
            "next": empty(73),
            "wide": empty(73, dtype=np.int64),
            "halves": empty(73, dtype=np.float64),
            "n": np.int32(73),
        },
        grid=(3,),
        block=(32,),
        expected=lambda a: {
            "as_uint": a.x.view(np.uint32),
            "as_int": a.x.view(np.int32),
            "flipped": -f64(a.x),
            "next": f64((a.x.view(np.int32) + 1).view(np.float32)),
            "wide": f64(a.x).view(np.int64),
            "halves": 2 * f64(a.x),
        },
        tolerance=0,
    ),
    KernelCase(
        name="integer_intrinsics",
        code=INTEGERS,
        kernel_name="integers",
        make=lambda rng: {
            "x": np.concatenate([[0, 1, 2**31, 2**32 - 1], rng.integers(0, 2**32, 90)]).astype(np.uint32),
            "y": np.concatenate([[5, 2**32 - 1, 2**31, 0], rng.integers(0, 2**32, 90)]).astype(np.uint32),
            "out": empty(94, 20, dtype=np.uint32),
            "n": np.int32(94),
        },
        grid=(2,),
        block=(64,),
        expected=lambda a: {"out": _integers(a.x, a.y)},
    ),
    KernelCase(
        name="number_conversions",
        code=CONVERSIONS,
        kernel_name="conversions",
        make=lambda rng: {
            "x": np.concatenate([100 * normal(rng, 40), [0.5, 1.5, -0.5, -2.5, 300.0]]).astype(np.float32),
            "rounded": empty(45, dtype=np.int32),
            "floored": empty(45, dtype=np.int32),
            "clipped": empty(45, dtype=np.uint32),
            "back": empty(45),
            "bytes": empty(45, dtype=np.uint8),
            "wide": empty(45, dtype=np.int64),
            "n": np.int32(45),
        },
        grid=(1,),
        block=(64,),
        expected=lambda a: _conversions(a.x),
        tolerance=0,
    ),
    KernelCase(
        name="signed_arithmetic",
        code=SIGNED_ARITHMETIC,
        kernel_name="signs",
        make=lambda rng: {
            "x": rng.integers(-100_000, 100_000, 99).astype(np.int32),
            "out": empty(99, 6, dtype=np.int32),
            "n": np.int32(99),
        },
        grid=(2,),
        block=(64,),
        expected=lambda a: {"out": _signs(a.x)},
    ),
]
