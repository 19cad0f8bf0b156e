"""Templates, name expressions, shared memory in every form, and __constant__ memory."""

from __future__ import annotations

import numpy as np

from .case import Constant, KernelCase, empty, f64, normal

BLOCK_TEMPLATE = r"""
template <int BLOCK> __device__ float tree_sum(float v) {
    __shared__ float s[BLOCK];
    s[threadIdx.x] = v;
    __syncthreads();
    #pragma unroll
    for (int k = BLOCK / 2; k > 0; k /= 2) {
        if (threadIdx.x < k) s[threadIdx.x] += s[threadIdx.x + k];
        __syncthreads();
    }
    return s[0];
}
template <int BLOCK> __global__ void sums(const float* x, float* out) {
    float total = tree_sum<BLOCK>(x[blockIdx.x * BLOCK + threadIdx.x]);
    if (threadIdx.x == 0) out[blockIdx.x] = total;
}
"""

TYPE_TEMPLATE = r"""
template <typename T, int SCALE = 2> __global__ void scale(const T* x, T* out, int n) {
    __shared__ T staged[64];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) staged[threadIdx.x] = x[i] * T(SCALE);
    __syncthreads();
    if (i < n) out[i] = staged[threadIdx.x];
}
"""

FUNCTORS = r"""
struct Add {
    __device__ static int identity() { return 0; }
    __device__ int operator()(int a, int b) const { return a + b; }
};
struct Max {
    __device__ static int identity() { return -2147483647 - 1; }
    __device__ int operator()(int a, int b) const { return a > b ? a : b; }
};
template <class Op> __device__ int fold(const int* x, int n, Op op) {
    __shared__ int s[64];
    int v = Op::identity();
    for (int i = threadIdx.x; i < n; i += blockDim.x) v = op(v, x[i]);
    s[threadIdx.x] = v;
    __syncthreads();
    for (int k = 32; k > 0; k >>= 1) {
        if (threadIdx.x < k) s[threadIdx.x] = op(s[threadIdx.x], s[threadIdx.x + k]);
        __syncthreads();
    }
    return s[0];
}
// Two instances of the template, each with a shared array of its own.
extern "C" __global__ void folds(const int* x, int* out, int n) {
    int sum = fold(x, n, Add());
    int peak = fold(x, n, Max());
    if (threadIdx.x == 0) {
        out[0] = sum;
        out[1] = peak;
    }
}
"""

TWO_KERNELS = r"""
// Two kernels and a template in one source, all with a shared array of the same name.
template <typename T> __device__ T neighbour(T v) {
    __shared__ T s[40];
    s[threadIdx.x] = v;
    __syncthreads();
    return s[(threadIdx.x + 1) % blockDim.x];
}
extern "C" __global__ void first(const int* x, int* out) {
    __shared__ int s[40];
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = s[blockDim.x - 1 - threadIdx.x];
}
extern "C" __global__ void second(const int* x, const double* y, double* out) {
    __shared__ double s[40];
    s[threadIdx.x] = neighbour(y[threadIdx.x]);
    __syncthreads();
    out[threadIdx.x] = s[blockDim.x - 1 - threadIdx.x] + neighbour(x[threadIdx.x]);
}
"""

CARVED = r"""
// One dynamic allocation cut into doubles, floats, ints and bytes, the most aligned first.
extern __shared__ unsigned char arena[];
extern "C" __global__ void carve(const float* x, double* sums, int* order, unsigned char* low, int n) {
    double* d = (double*)arena;
    float* f = (float*)(d + n);
    int* k = (int*)(f + n);
    unsigned char* b = (unsigned char*)(k + n);
    int t = threadIdx.x;
    f[t] = x[t];
    k[t] = 10 * t;
    b[t] = (unsigned char)(7 * t);
    __syncthreads();
    d[t] = (double)f[t] + f[(t + 1) % n];
    __syncthreads();
    sums[t] = d[n - 1 - t];
    order[t] = k[(t + 5) % n];
    low[t] = b[(t + 2) % n];
}
"""

SHARED_FORMS = r"""
struct Pair {
    float value;
    int index;
};
constexpr int ROWS = 5, COLUMNS = 7;
// Scalars, structs, two and three dimensions, several in one statement, aligned, and a block-wide counter.
extern "C" __global__ void forms(const float* x, float* out, int* counted) {
    __shared__ float grid[ROWS][COLUMNS], cube[2][ROWS][COLUMNS + 1], scale;
    __shared__ Pair pairs[ROWS * COLUMNS];
    __shared__ __align__(16) float aligned[(ROWS * COLUMNS + 3) / 4 * 4];
    __shared__ int count;
    int t = threadIdx.x, r = t / COLUMNS, c = t % COLUMNS;
    if (t == 0) {
        scale = 3.0f;
        count = 0;
    }
    grid[r][c] = x[t];
    pairs[t] = {x[t], t};
    aligned[t] = (float)t;
    __syncthreads();
    cube[t % 2][r][c] = grid[ROWS - 1 - r][c] * scale;
    cube[1 - t % 2][r][c] = grid[r][COLUMNS - 1 - c];
    atomicAdd(&count, pairs[(t + 1) % (ROWS * COLUMNS)].index);
    __syncthreads();
    out[t] = cube[0][r][c] + 10.0f * cube[1][r][c] + pairs[(t + 2) % (ROWS * COLUMNS)].value + *(&aligned[t]);
    if (t == 0) *counted = count;
}
"""

POINTER_TO_SHARED = r"""
// Shared memory handed to helpers by pointer and by reference, and two buffers that change places.
__device__ void smooth(const float* from, float* to, int n) {
    int t = threadIdx.x;
    if (t < n) to[t] = 0.25f * from[(t + n - 1) % n] + 0.5f * from[t] + 0.25f * from[(t + 1) % n];
}
__device__ void fill(float (&target)[64], float v) { target[threadIdx.x] = v; }
extern "C" __global__ void diffuse(const float* x, float* out, int n, int steps) {
    __shared__ float a[64], b[64];
    float *from = a, *to = b;
    fill(a, threadIdx.x < n ? x[threadIdx.x] : 0.0f);
    __syncthreads();
    for (int k = 0; k < steps; k++) {
        smooth(from, to, n);
        __syncthreads();
        float* swap = from;
        from = to;
        to = swap;
    }
    if (threadIdx.x < n) out[threadIdx.x] = from[threadIdx.x];
}
"""

CONSTANT_MEMORY = r"""
__constant__ float weights[9];
__constant__ int offset[2];
// out = x W^T + offset for rows of three.
extern "C" __global__ void affine(const float* x, float* out, int rows) {
    int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= rows) return;
    for (int i = 0; i < 3; i++) {
        float sum = offset[i % 2];
        for (int j = 0; j < 3; j++) sum += weights[3 * i + j] * x[3 * r + j];
        out[3 * r + i] = sum;
    }
}
"""

CONSTANT_INITIALISED = r"""
__constant__ float taps[] = {0.25f, 0.5f, 0.25f};
__device__ int calls[2] = {5, 7};
extern "C" __global__ void filter(const float* x, float* out, int* seen, int n) {
    int i = threadIdx.x;
    if (i >= n) return;
    float sum = 0.0f;
    for (int k = 0; k < 3; k++)
        if (i + k - 1 >= 0 && i + k - 1 < n) sum += taps[k] * x[i + k - 1];
    out[i] = sum;
    if (i == 0) seen[0] = calls[0] + calls[1];
}
"""

OPTIONS = r"""
#ifndef WIDTH
#error "WIDTH comes from the options"
#endif
extern "C" __global__ void fill(int* out) {
    if (threadIdx.x < WIDTH) out[threadIdx.x] = WIDTH * STEP;
}
"""

MODERN = r"""
// What C++17 has: if constexpr, fold expressions, structured bindings, constexpr functions, static_assert.
__device__ constexpr int triangle(int n) { return n * (n + 1) / 2; }
static_assert(triangle(4) == 10, "");
template <class... T> __device__ float sum_of(T... v) { return (v + ...); }
template <bool NEGATE> __device__ float maybe(float v) {
    if constexpr (NEGATE) return -v;
    else return v;
}
struct Split {
    float whole, rest;
};
__device__ Split split(float v) { return {floorf(v), v - floorf(v)}; }
extern "C" __global__ void modern(const float* x, float* out, int n) {
    int i = threadIdx.x;
    if (i >= n) return;
    auto [whole, rest] = split(x[i]);
    out[i] = sum_of(whole, 2.0f * rest, maybe<true>(1.0f), maybe<false>(float(triangle(3))));
}
"""


def _diffuse(x: np.ndarray, steps: int) -> np.ndarray:
    x = f64(x)
    for _ in range(steps):
        x = 0.25 * np.roll(x, 1) + 0.5 * x + 0.25 * np.roll(x, -1)
    return x


def _forms(x: np.ndarray) -> np.ndarray:
    grid = f64(x).reshape(5, 7)
    t = np.arange(35).reshape(5, 7)
    flipped, mirrored = 3 * grid[::-1], grid[:, ::-1]
    even = np.where(t % 2 == 0, flipped, mirrored)
    odd = np.where(t % 2 == 0, mirrored, flipped)
    return f64(even + 10 * odd + np.roll(f64(x), -2).reshape(5, 7) + t).ravel()


def _scale_case(name: str, expression: str, dtype: type, factor: int) -> KernelCase:
    exact = np.issubdtype(dtype, np.integer)
    return KernelCase(
        name=name,
        code=TYPE_TEMPLATE,
        kernel_name=expression,
        name_expressions=("scale<int>", "scale<float>", "scale<double, 5>", "scale<unsigned char, 3>"),
        make=lambda rng: {
            "x": rng.integers(0, 50, 99).astype(dtype),
            "out": empty(99, dtype=dtype),
            "n": np.int32(99),
        },
        grid=(2,),
        block=(64,),
        expected=lambda a: {"out": a.x.astype(np.int64 if exact else np.float64) * factor},
        tolerance=0,
    )


CASES = [
    *[
        KernelCase(
            name=f"template_block_{block}",
            code=BLOCK_TEMPLATE,
            kernel_name=f"sums<{block}>",
            name_expressions=("sums<64>", "sums<256>"),
            make=lambda rng, block=block: {"x": normal(rng, 3, block), "out": empty(3)},  # type: ignore[misc]
            grid=(3,),
            block=(block,),
            expected=lambda a: {"out": f64(a.x).sum(axis=1)},
            tolerance=1e-5,
        )
        for block in (64, 256)
    ],
    _scale_case("template_int", "scale<int>", np.int32, 2),
    _scale_case("template_double_5", "scale<double, 5>", np.float64, 5),
    _scale_case("template_bytes_3", "scale<unsigned char, 3>", np.uint8, 3),
    KernelCase(
        name="template_functors",
        code=FUNCTORS,
        kernel_name="folds",
        make=lambda rng: {
            "x": rng.integers(-999, -5, 501).astype(np.int32),
            "out": empty(2, dtype=np.int32),
            "n": np.int32(501),
        },
        grid=(1,),
        block=(64,),
        expected=lambda a: {"out": np.array([a.x.sum(), a.x.max()])},
    ),
    KernelCase(
        name="two_kernels_second",
        code=TWO_KERNELS,
        kernel_name="second",
        make=lambda rng: {
            "x": rng.integers(-99, 99, 40).astype(np.int32),
            "y": rng.standard_normal(40),
            "out": empty(40, dtype=np.float64),
        },
        grid=(1,),
        block=(40,),
        expected=lambda a: {"out": np.roll(a.y, -1)[::-1] + np.roll(a.x, -1)},
    ),
    KernelCase(
        name="shared_carved",
        code=CARVED,
        kernel_name="carve",
        make=lambda rng: {
            "x": normal(rng, 53),
            "sums": empty(53, dtype=np.float64),
            "order": empty(53, dtype=np.int32),
            "low": empty(53, dtype=np.uint8),
            "n": np.int32(53),
        },
        grid=(1,),
        block=(53,),
        shared_mem=53 * (8 + 4 + 4 + 1),
        expected=lambda a: {
            "sums": (f64(a.x) + np.roll(f64(a.x), -1))[::-1],
            "order": 10 * ((np.arange(53) + 5) % 53),
            "low": 7 * ((np.arange(53) + 2) % 53) % 256,
        },
        tolerance=0,
    ),
    KernelCase(
        name="shared_forms",
        code=SHARED_FORMS,
        kernel_name="forms",
        make=lambda rng: {"x": normal(rng, 35), "out": empty(35), "counted": empty(1, dtype=np.int32)},
        grid=(1,),
        block=(35,),
        expected=lambda a: {"out": _forms(a.x), "counted": np.array([35 * 34 // 2])},
    ),
    KernelCase(
        name="shared_by_pointer",
        code=POINTER_TO_SHARED,
        kernel_name="diffuse",
        make=lambda rng: {"x": normal(rng, 51), "out": empty(51), "n": np.int32(51), "steps": np.int32(7)},
        grid=(1,),
        block=(64,),
        expected=lambda a: {"out": _diffuse(a.x, 7)},
    ),
    KernelCase(
        name="constant_memory",
        code=CONSTANT_MEMORY,
        kernel_name="affine",
        make=lambda rng: {
            "x": normal(rng, 41, 3),
            "out": empty(41, 3),
            "rows": np.int32(41),
            "weights": Constant(normal(rng, 9)),
            "offset": Constant(np.array([3, -4], np.int32)),
        },
        grid=(2,),
        block=(32,),
        expected=lambda a: {"out": f64(a.x) @ f64(a.weights.value.reshape(3, 3)).T + np.array([3, -4, 3])},
    ),
    KernelCase(
        name="constant_initialised",
        code=CONSTANT_INITIALISED,
        kernel_name="filter",
        make=lambda rng: {
            "x": normal(rng, 29),
            "out": empty(29),
            "seen": empty(1, dtype=np.int32),
            "n": np.int32(29),
        },
        grid=(1,),
        block=(32,),
        expected=lambda a: {"out": np.convolve(f64(a.x), [0.25, 0.5, 0.25], "same"), "seen": np.array([12])},
    ),
    KernelCase(
        name="options_define",
        code=OPTIONS,
        kernel_name="fill",
        options=("-DWIDTH=17", "-DSTEP=(2+1)"),
        make=lambda rng: {"out": empty(17, dtype=np.int32)},
        grid=(1,),
        block=(32,),
        expected=lambda a: {"out": np.full(17, 51)},
    ),
    KernelCase(
        name="modern_cpp",
        code=MODERN,
        kernel_name="modern",
        options=("-std=c++17",),
        make=lambda rng: {"x": 5 * normal(rng, 31), "out": empty(31), "n": np.int32(31)},
        grid=(1,),
        block=(32,),
        expected=lambda a: {"out": np.floor(f64(a.x)) + 2 * (f64(a.x) - np.floor(f64(a.x))) - 1 + 6},
    ),
]
