"""Accesses outside of every array. Where one thread alone is at fault, the case says which."""

from __future__ import annotations

import numpy as np

from .case import BF16_CUDA, BugCase, empty, normal, to_bf16


def _vectors(n: int, **more: object) -> dict[str, object]:
    rng = np.random.default_rng(n)
    return {"x": normal(rng, n), "out": empty(n), "n": np.int32(n), **more}


CASES = [
    BugCase(
        name="missing_guard",
        code=r"""
extern "C" __global__ void scale(const float* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = 2.0f * x[i];  // BUG
}
""",
        kernel_name="scale",
        make=lambda rng: _vectors(1023),
        grid=(8,),
        block=(128,),
        kind="OutOfBounds",
        array="x",
        index=1023,
        thread=(127, 0, 0),
        block_index=(7, 0, 0),
    ),
    BugCase(
        name="guard_less_or_equal",
        code=r"""
extern "C" __global__ void fill(const float* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i <= n)
        out[i] = i;  // BUG
}
""",
        kernel_name="fill",
        make=lambda rng: _vectors(1000),
        grid=(8,),
        block=(128,),
        kind="OutOfBounds",
        array="out",
        index=1000,
        thread=(104, 0, 0),
        block_index=(7, 0, 0),
    ),
    BugCase(
        name="guard_off_by_one_bytes",
        code=r"""
extern "C" __global__ void invert(unsigned char* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i > n) return;
    x[i] = 255 - x[i];  // BUG
}
""",
        kernel_name="invert",
        make=lambda rng: {"x": rng.integers(0, 256, 1001).astype(np.uint8), "n": np.int32(1001)},
        grid=(8,),
        block=(128,),
        kind="OutOfBounds",
        array="x",
        index=1001,
        thread=(105, 0, 0),
        block_index=(7, 0, 0),
    ),
    BugCase(
        name="index_minus_one",
        code=r"""
extern "C" __global__ void differences(const float* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float before = x[i - 1];  // BUG
    out[i] = x[i] - before;
}
""",
        kernel_name="differences",
        make=lambda rng: _vectors(100),
        grid=(4,),
        block=(32,),
        kind="OutOfBounds",
        array="x",
        index=-1,
        thread=(0, 0, 0),
        block_index=(0, 0, 0),
    ),
    BugCase(
        name="unsigned_index_below_zero",
        code=r"""
extern "C" __global__ void differences(const float* x, float* out, unsigned n) {
    unsigned i = threadIdx.x;
    if (i >= n) return;
    float before = x[i - 1];  // BUG
    out[i] = x[i] - before;
}
""",
        kernel_name="differences",
        make=lambda rng: {"x": normal(rng, 30), "out": empty(30), "n": np.uint32(30)},
        grid=(1,),
        block=(32,),
        kind="OutOfBounds",
        thread=(0, 0, 0),
    ),
    BugCase(
        name="transposed_index",
        code=r"""
extern "C" __global__ void copy(const float* x, float* out, int rows, int columns) {
    int c = threadIdx.x, r = threadIdx.y;
    out[r * columns + c] = x[c * columns + r];  // BUG
}
""",
        kernel_name="copy",
        make=lambda rng: {
            "x": normal(rng, 4, 5),
            "out": empty(4, 5),
            "rows": np.int32(4),
            "columns": np.int32(5),
        },
        grid=(1,),
        block=(5, 4),
        kind="OutOfBounds",
        array="x",
    ),
    BugCase(
        name="row_stride_wrong",
        code=r"""
// x (rows, width); a block a row.
extern "C" __global__ void copy_rows(const float* x, float* out, int width) {
    const float* row = x + blockIdx.x * (width + 1);
    for (int c = threadIdx.x; c < width; c += blockDim.x)
        out[blockIdx.x * width + c] = row[c];  // BUG
}
""",
        kernel_name="copy_rows",
        make=lambda rng: {"x": normal(rng, 2, 7), "out": empty(2, 7), "width": np.int32(7)},
        grid=(2,),
        block=(7,),
        kind="OutOfBounds",
        array="x",
        index=14,
        thread=(6, 0, 0),
        block_index=(1, 0, 0),
    ),
    BugCase(
        name="column_loop_too_long",
        code=r"""
extern "C" __global__ void row_sums(const float* x, float* out, int rows, int width) {
    int r = threadIdx.x;
    if (r >= rows) return;
    float sum = 0.0f;
    for (int c = 0; c <= width; c++)
        sum += x[r * width + c];  // BUG
    out[r] = sum;
}
""",
        kernel_name="row_sums",
        make=lambda rng: {
            "x": normal(rng, 9, 11),
            "out": empty(9),
            "rows": np.int32(9),
            "width": np.int32(11),
        },
        grid=(1,),
        block=(32,),
        kind="OutOfBounds",
        array="x",
        index=99,
        thread=(8, 0, 0),
    ),
    BugCase(
        name="vector_load_past_the_tail",
        code=r"""
extern "C" __global__ void sum_fours(const float* x, float* out, int n) {
    int i = threadIdx.x;
    if (i >= (n + 3) / 4) return;
    float4 v = reinterpret_cast<const float4*>(x)[i];  // BUG
    out[i] = v.x + v.y + v.z + v.w;
}
""",
        kernel_name="sum_fours",
        make=lambda rng: {"x": normal(rng, 1022), "out": empty(256), "n": np.int32(1022)},
        grid=(1,),
        block=(256,),
        kind="OutOfBounds",
        array="x",
        thread=(255, 0, 0),
    ),
    BugCase(
        name="vector_parameter",
        code=r"""
extern "C" __global__ void copy(const float4* x, float4* out, int fours) {
    int i = threadIdx.x;
    if (i > fours) return;
    out[i] = x[i];  // BUG
}
""",
        kernel_name="copy",
        make=lambda rng: {"x": normal(rng, 21, 4), "out": empty(22, 4), "fours": np.int32(21)},
        grid=(1,),
        block=(32,),
        kind="OutOfBounds",
        array="x",
        index=21,
        thread=(21, 0, 0),
    ),
    BugCase(
        name="vector_store_past_the_tail",
        code=r"""
extern "C" __global__ void zeros(int* out, int n) {
    int i = threadIdx.x;
    if (4 * i < n)
        reinterpret_cast<int4*>(out)[i] = make_int4(0, 0, 0, 0);  // BUG
}
""",
        kernel_name="zeros",
        make=lambda rng: {"out": empty(101, dtype=np.int32), "n": np.int32(101)},
        grid=(1,),
        block=(64,),
        kind="OutOfBounds",
        array="out",
        thread=(25, 0, 0),
    ),
    BugCase(
        name="id_outside_the_vocabulary",
        code=BF16_CUDA
        + r"""
// A thread a token.
extern "C" __global__ void embedding(const int* ids, const bf16* table, float* out, int tokens, int width) {
    int token = threadIdx.x;
    if (token >= tokens) return;
    const bf16* row = table + (size_t)ids[token] * width;
    for (int c = 0; c < width; c++)
        out[token * width + c] = bf16_to_float(row[c]);  // BUG
}
""",
        kernel_name="embedding",
        make=lambda rng: {
            "ids": np.array([3, 0, 12, 11, 5], np.int32),
            "table": to_bf16(normal(rng, 12, 9)),
            "out": empty(5, 9),
            "tokens": np.int32(5),
            "width": np.int32(9),
        },
        grid=(1,),
        block=(32,),
        kind="OutOfBounds",
        array="table",
        index=108,
        thread=(2, 0, 0),
    ),
    BugCase(
        name="padding_block_minus_one",
        code=r"""
// A block table padded with -1, and a length that is one block too long.
extern "C" __global__ void gather(const int* table, const float* cache, float* out, int blocks, int size) {
    int t = threadIdx.x;
    for (int b = 0; b < blocks; b++)
        out[b * size + t] = cache[table[b] * size + t];  // BUG
}
""",
        kernel_name="gather",
        make=lambda rng: {
            "table": np.array([2, 0, -1], np.int32),
            "cache": normal(rng, 3, 1),
            "out": empty(3, 1),
            "blocks": np.int32(3),
            "size": np.int32(1),
        },
        grid=(1,),
        block=(1,),
        kind="OutOfBounds",
        array="cache",
        index=-1,
        thread=(0, 0, 0),
    ),
    BugCase(
        name="overflow_of_32_bits",
        code=r"""
// 4 * 1,073,741,823 does not fit: it wraps around to -4.
extern "C" __global__ void first_of_row(const float* x, float* out, int row, int stride) {
    int offset = row * stride;
    out[0] = x[offset];  // BUG
}
""",
        kernel_name="first_of_row",
        make=lambda rng: {
            "x": normal(rng, 64),
            "out": empty(1),
            "row": np.int32(4),
            "stride": np.int32(1_073_741_823),
        },
        grid=(1,),
        block=(1,),
        kind="OutOfBounds",
        array="x",
        index=-4,
        thread=(0, 0, 0),
    ),
    BugCase(
        name="shared_array_overrun",
        code=r"""
extern "C" __global__ void reverse(const float* x, float* out) {
    __shared__ float s[64];
    int t = threadIdx.x;
    s[t] = x[t];  // BUG
    __syncthreads();
    out[t] = s[blockDim.x - 1 - t];
}
""",
        kernel_name="reverse",
        make=lambda rng: {"x": normal(rng, 65), "out": empty(65)},
        grid=(1,),
        block=(65,),
        kind="OutOfBounds",
        array="s",
        index=64,
        thread=(64, 0, 0),
    ),
    BugCase(
        name="shared_between_two_arrays",
        code=r"""
// One past the end of `a` is not `b`, even where it is next to it.
extern "C" __global__ void shift(const int* x, int* out) {
    __shared__ int a[32];
    __shared__ int b[32];
    int t = threadIdx.x;
    a[t] = x[t];
    b[t] = -x[t];
    __syncthreads();
    out[t] = a[t + 1] + b[t];  // BUG
}
""",
        kernel_name="shift",
        make=lambda rng: {"x": np.arange(32, dtype=np.int32), "out": empty(32, dtype=np.int32)},
        grid=(1,),
        block=(32,),
        kind="OutOfBounds",
        array="a",
        index=32,
        thread=(31, 0, 0),
    ),
    BugCase(
        name="shared_tile_above_the_top",
        code=r"""
extern "C" __global__ void above(const float* x, float* out) {
    __shared__ float tile[8][8];
    int c = threadIdx.x, r = threadIdx.y;
    tile[r][c] = x[r * 8 + c];
    __syncthreads();
    if (c == 3)
        out[r] = tile[r - 1][c];  // BUG
}
""",
        kernel_name="above",
        make=lambda rng: {"x": normal(rng, 8, 8), "out": empty(8)},
        grid=(1,),
        block=(8, 8),
        kind="OutOfBounds",
        array="tile",
        index=-5,
        thread=(3, 0, 0),
    ),
    BugCase(
        name="dynamic_shared_too_small",
        code=r"""
extern "C" __global__ void reverse(const float* x, float* out) {
    extern __shared__ float scratch[];
    int t = threadIdx.x;
    scratch[t] = x[t];  // BUG
    __syncthreads();
    out[t] = scratch[blockDim.x - 1 - t];
}
""",
        kernel_name="reverse",
        make=lambda rng: {"x": normal(rng, 50), "out": empty(50)},
        grid=(1,),
        block=(50,),
        shared_mem=4 * 49,
        kind="OutOfBounds",
        array="scratch",
        index=49,
        thread=(49, 0, 0),
    ),
    BugCase(
        name="dynamic_shared_not_given",
        code=r"""
extern "C" __global__ void reverse(const float* x, float* out) {
    extern __shared__ float scratch[];
    int t = threadIdx.x;
    scratch[t] = x[t];  // BUG
    __syncthreads();
    out[t] = scratch[blockDim.x - 1 - t];
}
""",
        kernel_name="reverse",
        make=lambda rng: {"x": normal(rng, 1), "out": empty(1)},
        grid=(1,),
        block=(1,),
        kind="OutOfBounds",
        thread=(0, 0, 0),
    ),
    BugCase(
        name="index_of_another_array",
        code=r"""
// bias has one element for each column but the last.
extern "C" __global__ void add_bias(const float* x, const float* bias, float* out, int rows, int width) {
    int c = threadIdx.x, r = blockIdx.x;
    if (c < width && r == rows - 1)
        out[c] = x[r * width + c] + bias[c];  // BUG
}
""",
        kernel_name="add_bias",
        make=lambda rng: {
            "x": normal(rng, 3, 40),
            "bias": normal(rng, 39),
            "out": empty(40),
            "rows": np.int32(3),
            "width": np.int32(40),
        },
        grid=(3,),
        block=(64,),
        kind="OutOfBounds",
        array="bias",
        index=39,
        thread=(39, 0, 0),
        block_index=(2, 0, 0),
    ),
    BugCase(
        name="atomic_outside_of_the_bins",
        code=r"""
extern "C" __global__ void histogram(const int* x, int* bins, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        atomicAdd(&bins[x[i]], 1);  // BUG
}
""",
        kernel_name="histogram",
        make=lambda rng: {
            "x": np.where(np.arange(100) == 77, 10, np.arange(100) % 10).astype(np.int32),
            "bins": np.zeros(10, np.int32),
            "n": np.int32(100),
        },
        grid=(2,),
        block=(64,),
        kind="OutOfBounds",
        array="bins",
        index=10,
        thread=(13, 0, 0),
        block_index=(1, 0, 0),
    ),
    BugCase(
        name="read_through_ldg",
        code=r"""
extern "C" __global__ void shifted(const float* __restrict__ x, float* __restrict__ out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        out[i] = __ldg(&x[i + 1]);  // BUG
}
""",
        kernel_name="shifted",
        make=lambda rng: _vectors(77),
        grid=(3,),
        block=(32,),
        kind="OutOfBounds",
        array="x",
        index=77,
        thread=(12, 0, 0),
        block_index=(2, 0, 0),
    ),
    BugCase(
        name="structs_one_too_many",
        code=r"""
struct Particle {
    float x, y;
    int id;
};
extern "C" __global__ void ids(const Particle* particles, int* out, int n) {
    int i = threadIdx.x;
    if (i <= n)
        out[i] = particles[i].id;  // BUG
}
""",
        kernel_name="ids",
        make=lambda rng: {
            "particles": np.zeros(30 * 12, np.uint8),
            "out": empty(31, dtype=np.int32),
            "n": np.int32(30),
        },
        grid=(1,),
        block=(32,),
        kind="OutOfBounds",
        array="particles",
        index=30,
        thread=(30, 0, 0),
    ),
    BugCase(
        name="half_pair_past_an_odd_end",
        code=r"""
#include <cuda_fp16.h>
extern "C" __global__ void double_all(half* x, int n) {
    int i = threadIdx.x;
    half2* pairs = (half2*)x;
    if (2 * i < n)
        pairs[i] = __hadd2(pairs[i], pairs[i]);  // BUG
}
""",
        kernel_name="double_all",
        make=lambda rng: {"x": normal(rng, 33).astype(np.float16), "n": np.int32(33)},
        grid=(1,),
        block=(32,),
        kind="OutOfBounds",
        array="x",
        thread=(16, 0, 0),
    ),
    BugCase(
        name="helper_walks_too_far",
        code=r"""
// The fault is in a helper, and the array has the caller's name.
__device__ float sum_until(const float* p, const float* last) {
    float sum = 0.0f;
    while (p <= last)
        sum += *p++;  // BUG
    return sum;
}
extern "C" __global__ void total(const float* numbers, float* out, int n) {
    out[0] = sum_until(numbers, numbers + n);
}
""",
        kernel_name="total",
        make=lambda rng: {"numbers": normal(rng, 21), "out": empty(1), "n": np.int32(21)},
        grid=(1,),
        block=(1,),
        kind="OutOfBounds",
        array="numbers",
        index=21,
        thread=(0, 0, 0),
    ),
    BugCase(
        name="wild_pointer",
        code=r"""
extern "C" __global__ void poke(float* out, unsigned long long address) {
    float* where = (float*)address;
    if (threadIdx.x == 5)
        *where = 1.0f;  // BUG
    out[threadIdx.x] = 0.0f;
}
""",
        kernel_name="poke",
        make=lambda rng: {"out": empty(32), "address": np.uint64(0x123456789A8)},
        grid=(1,),
        block=(32,),
        kind="OutOfBounds",
        thread=(5, 0, 0),
    ),
    BugCase(
        name="null_pointer",
        code=r"""
__device__ const float* find(const float* x, int key) { return key == 3 ? 0 : x; }
extern "C" __global__ void look(const float* x, float* out) {
    const float* found = find(x, threadIdx.x);
    out[threadIdx.x] = found[0];  // BUG
}
""",
        kernel_name="look",
        make=lambda rng: {"x": normal(rng, 4), "out": empty(8)},
        grid=(1,),
        block=(8,),
        kind="OutOfBounds",
        thread=(3, 0, 0),
    ),
]
