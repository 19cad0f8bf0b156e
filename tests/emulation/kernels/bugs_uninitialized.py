"""Reads of memory that nothing wrote: shared memory of a block, and arrays from ``cp.empty``."""

from __future__ import annotations

import numpy as np

from .case import BugCase, empty, normal

CASES = [
    BugCase(
        name="shared_tail_unset",
        code=r"""
extern "C" __global__ void sum(const float* x, float* out, int n) {
    __shared__ float s[64];
    int t = threadIdx.x;
    if (t < n) s[t] = x[t];
    __syncthreads();
    for (int k = 32; k > 0; k >>= 1) {
        if (t < k)
            s[t] += s[t + k];  // BUG
        __syncthreads();
    }
    if (t == 0) out[0] = s[0];
}
""",
        kernel_name="sum",
        make=lambda rng: {"x": normal(rng, 63), "out": empty(1), "n": np.int32(63)},
        grid=(1,),
        block=(64,),
        kind="UninitializedRead",
        array="s",
        index=63,
        thread=(31, 0, 0),
    ),
    BugCase(
        name="dynamic_shared_tail_unset",
        code=r"""
extern "C" __global__ void sum(const float* x, float* out) {
    extern __shared__ float scratch[];
    int t = threadIdx.x;
    if (t + 1 < blockDim.x) scratch[t] = x[t];
    __syncthreads();
    if (t == 7) {
        float total = 0.0f;
        for (int k = 0; k < blockDim.x; k++)
            total += scratch[k];  // BUG
        *out = total;
    }
}
""",
        kernel_name="sum",
        make=lambda rng: {"x": normal(rng, 37), "out": empty(1)},
        grid=(1,),
        block=(37,),
        shared_mem=4 * 37,
        kind="UninitializedRead",
        array="scratch",
        index=36,
        thread=(7, 0, 0),
    ),
    BugCase(
        name="shared_written_by_some",
        code=r"""
extern "C" __global__ void copy(const int* x, int* out) {
    __shared__ int s[33];
    int t = threadIdx.x;
    if (t < 32) s[t] = x[t];
    __syncthreads();
    out[t] = s[t];  // BUG
}
""",
        kernel_name="copy",
        make=lambda rng: {"x": np.arange(33, dtype=np.int32), "out": empty(33, dtype=np.int32)},
        grid=(1,),
        block=(33,),
        kind="UninitializedRead",
        array="s",
        index=32,
        thread=(32, 0, 0),
    ),
    BugCase(
        name="shared_scalar_unset",
        code=r"""
extern "C" __global__ void count(const int* x, int* out) {
    __shared__ int found;
    int t = threadIdx.x;
    __syncthreads();
    if (t == 4) found = found + x[t];  // BUG
    __syncthreads();
    if (t == 0) *out = found;
}
""",
        kernel_name="count",
        make=lambda rng: {"x": np.arange(32, dtype=np.int32), "out": empty(1, dtype=np.int32)},
        grid=(1,),
        block=(32,),
        kind="UninitializedRead",
        array="found",
        index=0,
        thread=(4, 0, 0),
    ),
    BugCase(
        name="shared_counter_unset_atomic",
        code=r"""
extern "C" __global__ void count(const float* x, int* out) {
    __shared__ int positive;
    if (x[threadIdx.x] > -99.0f)
        atomicAdd(&positive, 1);  // BUG
    __syncthreads();
    if (threadIdx.x == 0) *out = positive;
}
""",
        kernel_name="count",
        make=lambda rng: {"x": normal(rng, 32), "out": empty(1, dtype=np.int32)},
        grid=(1,),
        block=(32,),
        kind="UninitializedRead",
        array="positive",
        index=0,
    ),
    BugCase(
        name="shared_halo_unset",
        code=r"""
extern "C" __global__ void smooth(const float* x, float* out, int n) {
    __shared__ float s[34];
    int i = blockIdx.x * 32 + threadIdx.x, t = threadIdx.x + 1;
    s[t] = x[i];
    if (threadIdx.x == 0 && i > 0) s[0] = x[i - 1];
    if (threadIdx.x == 31) s[33] = i + 1 < n ? x[i + 1] : 0.0f;
    __syncthreads();
    out[i] = s[t - 1] + s[t] + s[t + 1];  // BUG
}
""",
        kernel_name="smooth",
        make=lambda rng: {"x": normal(rng, 96), "out": empty(96), "n": np.int32(96)},
        grid=(3,),
        block=(32,),
        kind="UninitializedRead",
        array="s",
        index=0,
        thread=(0, 0, 0),
        block_index=(0, 0, 0),
    ),
    BugCase(
        name="shared_padding_read",
        code=r"""
extern "C" __global__ void last_column(const float* x, float* out) {
    __shared__ float tile[8][8 + 1];
    int c = threadIdx.x, r = threadIdx.y;
    tile[r][c] = x[r * 8 + c];
    __syncthreads();
    if (c == 0 && r == 5)
        out[0] = tile[r][8];  // BUG
}
""",
        kernel_name="last_column",
        make=lambda rng: {"x": normal(rng, 8, 8), "out": empty(1)},
        grid=(1,),
        block=(8, 8),
        kind="UninitializedRead",
        array="tile",
        index=53,
        thread=(0, 5, 0),
    ),
    BugCase(
        name="shared_of_another_block",
        code=r"""
// Block 0 writes, block 1 trusts that it is still there.
extern "C" __global__ void hand_on(const int* x, int* out) {
    __shared__ int s;
    if (blockIdx.x == 0) s = x[0];
    __syncthreads();
    if (threadIdx.x == 0 && blockIdx.x > 0)
        out[blockIdx.x] = s;  // BUG
}
""",
        kernel_name="hand_on",
        make=lambda rng: {"x": np.array([5], np.int32), "out": empty(2, dtype=np.int32)},
        grid=(2,),
        block=(1,),
        kind="UninitializedRead",
        array="s",
        index=0,
        thread=(0, 0, 0),
        block_index=(1, 0, 0),
    ),
    BugCase(
        name="shared_struct_half_set",
        code=r"""
struct Best {
    float value;
    int index;
};
extern "C" __global__ void best(const float* x, int* out) {
    __shared__ Best candidates[32];
    int t = threadIdx.x;
    candidates[t].value = x[t];
    __syncthreads();
    if (t == 9)
        *out = candidates[20].index;  // BUG
}
""",
        kernel_name="best",
        make=lambda rng: {"x": normal(rng, 32), "out": empty(1, dtype=np.int32)},
        grid=(1,),
        block=(32,),
        kind="UninitializedRead",
        array="candidates",
        index=20,
        thread=(9, 0, 0),
    ),
    BugCase(
        name="shared_flags_unset",
        code=r"""
extern "C" __global__ void any_large(const float* x, int* out) {
    __shared__ bool large[64];
    int t = threadIdx.x;
    if (x[t] > 100.0f) large[t] = true;
    __syncthreads();
    if (t == 0) {
        int count = 0;
        for (int k = 0; k < 64; k++)
            count += large[k];  // BUG
        *out = count;
    }
}
""",
        kernel_name="any_large",
        make=lambda rng: {"x": normal(rng, 64), "out": empty(1, dtype=np.int32)},
        grid=(1,),
        block=(64,),
        kind="UninitializedRead",
        array="large",
        index=0,
        thread=(0, 0, 0),
    ),
    BugCase(
        name="empty_output_accumulated",
        code=r"""
extern "C" __global__ void accumulate(const float* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        out[i] += x[i];  // BUG
}
""",
        kernel_name="accumulate",
        make=lambda rng: {"x": normal(rng, 1), "out": empty(1), "n": np.int32(1)},
        grid=(1,),
        block=(32,),
        kind="UninitializedRead",
        array="out",
        index=0,
        thread=(0, 0, 0),
    ),
    BugCase(
        name="empty_output_atomic",
        code=r"""
extern "C" __global__ void total(const float* x, float* sum, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        atomicAdd(sum, x[i]);  // BUG
}
""",
        kernel_name="total",
        make=lambda rng: {"x": normal(rng, 50), "sum": empty(1), "n": np.int32(50)},
        grid=(2,),
        block=(32,),
        kind="UninitializedRead",
        array="sum",
        index=0,
    ),
    BugCase(
        name="beta_on_empty_output",
        code=r"""
// C = alpha A B + beta C: with beta 0, NaN times 0 is NaN.
extern "C" __global__ void gemm(const float* A, const float* B, float* C, float alpha, float beta, int n) {
    int c = threadIdx.x, r = threadIdx.y;
    float sum = 0.0f;
    for (int k = 0; k < n; k++) sum += A[r * n + k] * B[k * n + c];
    C[r * n + c] = alpha * sum + beta * C[r * n + c];  // BUG
}
""",
        kernel_name="gemm",
        make=lambda rng: {
            "A": normal(rng, 5, 5),
            "B": normal(rng, 5, 5),
            "C": empty(5, 5),
            "alpha": np.float32(1),
            "beta": np.float32(0),
            "n": np.int32(5),
        },
        grid=(1,),
        block=(5, 5),
        kind="UninitializedRead",
        array="C",
    ),
    BugCase(
        name="partial_results_unset",
        code=r"""
extern "C" __global__ void merge(const float* partial, float* out, int blocks) {
    float sum = 0.0f;
    for (int b = 0; b < blocks; b++)
        sum += partial[b];  // BUG
    *out = sum;
}
""",
        kernel_name="merge",
        make=lambda rng: {"partial": empty(7), "out": empty(1), "blocks": np.int32(7)},
        grid=(1,),
        block=(1,),
        kind="UninitializedRead",
        array="partial",
        index=0,
        thread=(0, 0, 0),
    ),
    BugCase(
        name="last_element_dropped",
        code=r"""
// The rows are written but for the last column, and read whole by the thread that wrote them.
extern "C" __global__ void scale_and_sum(const float* x, float* scaled, float* sums, int rows, int width) {
    int r = threadIdx.x;
    if (r >= rows) return;
    for (int c = 0; c < width - 1; c++) scaled[r * width + c] = 2.0f * x[r * width + c];
    float sum = 0.0f;
    for (int c = 0; c < width; c++)
        sum += scaled[r * width + c];  // BUG
    sums[r] = sum;
}
""",
        kernel_name="scale_and_sum",
        make=lambda rng: {
            "x": normal(rng, 1, 13),
            "scaled": empty(1, 13),
            "sums": empty(1),
            "rows": np.int32(1),
            "width": np.int32(13),
        },
        grid=(1,),
        block=(4,),
        kind="UninitializedRead",
        array="scaled",
        index=12,
        thread=(0, 0, 0),
    ),
    BugCase(
        name="empty_half_accumulated",
        code=r"""
#include <cuda_fp16.h>
extern "C" __global__ void accumulate(const half* x, half* y, int n) {
    int i = threadIdx.x;
    if (i >= n) return;
    y[i] += x[i];  // BUG
}
""",
        kernel_name="accumulate",
        make=lambda rng: {
            "x": normal(rng, 1).astype(np.float16),
            "y": empty(1, dtype=np.float16),
            "n": np.int32(1),
        },
        grid=(1,),
        block=(4,),
        kind="UninitializedRead",
        array="y",
        index=0,
        thread=(0, 0, 0),
    ),
    BugCase(
        name="vector_load_partly_set",
        code=r"""
// Three of four components are written, and four are read.
extern "C" __global__ void lengths(const float* x, float4* points, float* out, int n) {
    int i = threadIdx.x;
    if (i >= n) return;
    points[i].x = x[3 * i];
    points[i].y = x[3 * i + 1];
    points[i].z = x[3 * i + 2];
    float4 p = points[i];  // BUG
    out[i] = p.x * p.x + p.y * p.y + p.z * p.z + p.w * p.w;  // BUG
}
""",
        kernel_name="lengths",
        make=lambda rng: {
            "x": normal(rng, 1, 3),
            "points": empty(1, 4),
            "out": empty(1),
            "n": np.int32(1),
        },
        grid=(1,),
        block=(4,),
        kind="UninitializedRead",
        array="points",
        index=0,
        thread=(0, 0, 0),
    ),
]
