"""Data races: two threads, one element, one of them writing, and nothing that orders them."""

from __future__ import annotations

import numpy as np

from .case import BugCase, empty, normal

CASES = [
    BugCase(
        name="no_barrier_after_load",
        code=r"""
extern "C" __global__ void reverse(const float* x, float* out) {
    __shared__ float s[64];
    int t = threadIdx.x;
    s[t] = x[t];  // OTHER
    out[t] = s[blockDim.x - 1 - t];  // BUG
}
""",
        kernel_name="reverse",
        make=lambda rng: {"x": normal(rng, 64), "out": empty(64)},
        grid=(1,),
        block=(64,),
        kind="DataRace",
        array="s",
    ),
    BugCase(
        name="no_barrier_in_reduction",
        code=r"""
extern "C" __global__ void sum(const float* x, float* out) {
    __shared__ float s[256];
    unsigned t = threadIdx.x;
    s[t] = x[blockIdx.x * blockDim.x + t];
    __syncthreads();
    for (unsigned k = blockDim.x / 2; k > 0; k >>= 1) {
        if (t < k)
            s[t] += s[t + k];  // BUG
    }
    __syncthreads();
    if (t == 0) out[blockIdx.x] = s[0];
}
""",
        kernel_name="sum",
        make=lambda rng: {"x": normal(rng, 512), "out": empty(2)},
        grid=(2,),
        block=(256,),
        kind="DataRace",
        array="s",
    ),
    BugCase(
        name="no_barrier_before_result",
        code=r"""
extern "C" __global__ void sum(const float* x, float* out) {
    extern __shared__ float s[];
    unsigned t = threadIdx.x;
    s[t] = x[t];
    for (unsigned k = blockDim.x / 2; k > 0; k >>= 1) {
        __syncthreads();
        if (t < k) s[t] += s[t + k];  // OTHER
    }
    out[t] = x[t] / s[0];  // BUG
}
""",
        kernel_name="sum",
        make=lambda rng: {"x": normal(rng, 64) + 5, "out": empty(64)},
        grid=(1,),
        block=(64,),
        shared_mem=256,
        kind="DataRace",
        array="s",
        index=0,
    ),
    BugCase(
        name="matmul_second_barrier_missing",
        code=r"""
#define TILE 8
extern "C" __global__ void matmul(const float* A, const float* B, float* C, int n) {
    __shared__ float a[TILE][TILE], b[TILE][TILE];
    int x = threadIdx.x, y = threadIdx.y, column = blockIdx.x * TILE + x, row = blockIdx.y * TILE + y;
    float sum = 0.0f;
    for (int k0 = 0; k0 < n; k0 += TILE) {
        a[y][x] = A[row * n + k0 + x];  // OTHER
        b[y][x] = B[(k0 + y) * n + column];  // OTHER
        __syncthreads();
        for (int k = 0; k < TILE; k++)
            sum += a[y][k] * b[k][x];  // BUG
    }
    C[row * n + column] = sum;
}
""",
        kernel_name="matmul",
        make=lambda rng: {
            "A": normal(rng, 16, 16),
            "B": normal(rng, 16, 16),
            "C": empty(16, 16),
            "n": np.int32(16),
        },
        grid=(2, 2),
        block=(8, 8),
        kind="DataRace",
        array=("a", "b"),
    ),
    BugCase(
        name="two_reductions_share_a_buffer",
        code=r"""
__device__ float block_sum(float value, float* scratch) {
    int t = threadIdx.x;
    scratch[t] = value;  // OTHER
    __syncthreads();
    for (int k = blockDim.x / 2; k > 0; k >>= 1) {
        if (t < k) scratch[t] += scratch[t + k];
        __syncthreads();
    }
    return scratch[0];  // BUG
}
extern "C" __global__ void statistics(const float* x, float* out) {
    __shared__ float buffer[64];
    float v = x[threadIdx.x];
    float mean = block_sum(v, buffer) / blockDim.x;
    float variance = block_sum((v - mean) * (v - mean), buffer) / blockDim.x;
    if (threadIdx.x == 0) {
        out[0] = mean;
        out[1] = variance;
    }
}
""",
        kernel_name="statistics",
        make=lambda rng: {"x": normal(rng, 64), "out": empty(2)},
        grid=(1,),
        block=(64,),
        kind="DataRace",
        array="buffer",
        index=0,
    ),
    BugCase(
        name="broadcast_then_overwrite",
        code=r"""
extern "C" __global__ void rows(const float* x, float* out, int rows, int width) {
    __shared__ float first;
    int t = threadIdx.x;
    for (int r = 0; r < rows; r++) {
        if (t == 0)
            first = x[r * width];  // OTHER
        __syncthreads();
        out[r * width + t] = x[r * width + t] - first;  // BUG
    }
}
""",
        kernel_name="rows",
        make=lambda rng: {
            "x": normal(rng, 4, 40),
            "out": empty(4, 40),
            "rows": np.int32(4),
            "width": np.int32(40),
        },
        grid=(1,),
        block=(40,),
        kind="DataRace",
        array="first",
        index=0,
    ),
    BugCase(
        name="lost_update_between_blocks",
        code=r"""
extern "C" __global__ void total(const float* x, float* out) {
    __shared__ float s[32];
    int t = threadIdx.x;
    s[t] = x[blockIdx.x * 32 + t];
    __syncthreads();
    for (int k = 16; k > 0; k >>= 1) {
        if (t < k) s[t] += s[t + k];
        __syncthreads();
    }
    if (t == 0)
        out[0] += s[0];  // BUG
}
""",
        kernel_name="total",
        make=lambda rng: {"x": normal(rng, 160), "out": np.zeros(1, np.float32)},
        grid=(5,),
        block=(32,),
        kind="DataRace",
        array="out",
        index=0,
    ),
    BugCase(
        name="histogram_without_atomics",
        code=r"""
extern "C" __global__ void histogram(const int* x, int* bins, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        bins[x[i]] += 1;  // BUG
}
""",
        kernel_name="histogram",
        make=lambda rng: {
            "x": np.where(np.arange(61) < 3, np.arange(61), 3).astype(np.int32),
            "bins": np.zeros(4, np.int32),
            "n": np.int32(61),
        },
        grid=(1,),
        block=(64,),
        kind="DataRace",
        array="bins",
        index=3,
    ),
    BugCase(
        name="shared_histogram_without_atomics",
        code=r"""
extern "C" __global__ void histogram(const unsigned char* x, unsigned* out) {
    __shared__ unsigned bins[8];
    int t = threadIdx.x;
    if (t < 8) bins[t] = 0;
    __syncthreads();
    bins[x[t] % 8]++;  // BUG
    __syncthreads();
    if (t < 8) out[t] = bins[t];
}
""",
        kernel_name="histogram",
        make=lambda rng: {"x": rng.integers(0, 255, 96).astype(np.uint8), "out": empty(8, dtype=np.uint32)},
        grid=(1,),
        block=(96,),
        kind="DataRace",
        array="bins",
    ),
    BugCase(
        name="neighbour_in_global_memory",
        code=r"""
// Each thread writes, and reads what its neighbour wrote: without a barrier, and over the edge of a block.
extern "C" __global__ void differences(const float* x, float* squares, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    squares[i] = x[i] * x[i];  // OTHER
    if (i + 1 < n) out[i] = squares[i + 1] - x[i];  // BUG
}
""",
        kernel_name="differences",
        make=lambda rng: {
            "x": normal(rng, 60),
            "squares": np.zeros(60, np.float32),
            "out": np.zeros(60, np.float32),
            "n": np.int32(60),
        },
        grid=(2,),
        block=(32,),
        kind="DataRace",
        array="squares",
    ),
    BugCase(
        name="neighbour_over_a_block_edge",
        code=r"""
// A barrier orders a block, not two of them.
extern "C" __global__ void shift(const int* x, int* y, int* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = x[i] + 1;  // OTHER
    __syncthreads();
    if (i > 0) out[i] = y[i - 1];  // BUG
}
""",
        kernel_name="shift",
        make=lambda rng: {
            "x": np.arange(64, dtype=np.int32),
            "y": np.zeros(64, np.int32),
            "out": np.zeros(64, np.int32),
            "n": np.int32(64),
        },
        grid=(2,),
        block=(32,),
        kind="DataRace",
        array="y",
        index=31,
    ),
    BugCase(
        name="stencil_in_place",
        code=r"""
extern "C" __global__ void smooth(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i == 0 || i >= n - 1) return;
    x[i] = (x[i - 1] + x[i] + x[i + 1]) / 3.0f;  // BUG
}
""",
        kernel_name="smooth",
        make=lambda rng: {"x": normal(rng, 100), "n": np.int32(100)},
        grid=(4,),
        block=(32,),
        kind="DataRace",
        array="x",
    ),
    BugCase(
        name="scan_with_one_buffer",
        code=r"""
extern "C" __global__ void scan(const float* x, float* out) {
    __shared__ float s[64];
    int t = threadIdx.x;
    s[t] = x[t];
    __syncthreads();
    for (int offset = 1; offset < 64; offset *= 2) {
        if (t >= offset)
            s[t] += s[t - offset];  // BUG
        __syncthreads();
    }
    out[t] = s[t];
}
""",
        kernel_name="scan",
        make=lambda rng: {"x": normal(rng, 64), "out": empty(64)},
        grid=(1,),
        block=(64,),
        kind="DataRace",
        array="s",
    ),
    BugCase(
        name="atomic_and_plain",
        code=r"""
extern "C" __global__ void count(const float* x, int* out) {
    __shared__ int positive;
    int t = threadIdx.x;
    if (t == 0)
        positive = 0;  // OTHER
    if (x[t] > -50.0f)
        atomicAdd(&positive, 1);  // BUG
    __syncthreads();
    if (t == 0) *out = positive;
}
""",
        kernel_name="count",
        make=lambda rng: {"x": normal(rng, 50), "out": empty(1, dtype=np.int32)},
        grid=(1,),
        block=(50,),
        kind="DataRace",
        array="positive",
        index=0,
    ),
    BugCase(
        name="counter_read_too_early",
        code=r"""
extern "C" __global__ void count(const float* x, int* counter, int* out) {
    int t = threadIdx.x;
    if (x[t] > -50.0f)
        atomicAdd(counter, 1);  // OTHER
    if (t == 40)
        *out = *counter;  // BUG
}
""",
        kernel_name="count",
        make=lambda rng: {
            "x": normal(rng, 64),
            "counter": np.zeros(1, np.int32),
            "out": empty(1, dtype=np.int32),
        },
        grid=(1,),
        block=(64,),
        kind="DataRace",
        array="counter",
        index=0,
    ),
    BugCase(
        name="warp_synchronous_without_syncwarp",
        code=r"""
// Lanes of a warp run together on old cards only.
extern "C" __global__ void sum(const float* x, float* out) {
    __shared__ float s[64];
    int t = threadIdx.x;
    s[t] = x[t];
    __syncthreads();
    if (t < 32) {
        s[t] += s[t + 32];  // BUG
        s[t] += s[t + 16];  // BUG
        s[t] += s[t + 8];  // BUG
        s[t] += s[t + 4];  // BUG
        s[t] += s[t + 2];  // BUG
        s[t] += s[t + 1];  // BUG
    }
    if (t == 0) *out = s[0];
}
""",
        kernel_name="sum",
        make=lambda rng: {"x": normal(rng, 64), "out": empty(1)},
        grid=(1,),
        block=(64,),
        kind="DataRace",
        array="s",
    ),
    BugCase(
        name="syncwarp_for_a_block",
        code=r"""
extern "C" __global__ void reverse(const float* x, float* out) {
    __shared__ float s[64];
    int t = threadIdx.x;
    s[t] = x[t];  // OTHER
    __syncwarp();
    out[t] = s[63 - t];  // BUG
}
""",
        kernel_name="reverse",
        make=lambda rng: {"x": normal(rng, 64), "out": empty(64)},
        grid=(1,),
        block=(64,),
        kind="DataRace",
        array="s",
    ),
    BugCase(
        name="flag_without_atomic",
        code=r"""
extern "C" __global__ void hand_over(const int* x, int* mailbox, int* ready, int* out) {
    if (threadIdx.x == 0) {
        *mailbox = x[0];  // OTHER
        *ready = 1;  // OTHER
    } else if (*ready) {  // BUG
        *out = *mailbox;  // BUG
    }
}
""",
        kernel_name="hand_over",
        make=lambda rng: {
            "x": np.array([7], np.int32),
            "mailbox": np.zeros(1, np.int32),
            "ready": np.zeros(1, np.int32),
            "out": np.zeros(1, np.int32),
        },
        grid=(1,),
        block=(2,),
        kind="DataRace",
        array=("ready", "mailbox"),
        index=0,
    ),
    BugCase(
        name="transpose_without_barrier",
        code=r"""
extern "C" __global__ void transpose(const float* x, float* out) {
    __shared__ float tile[16][17];
    int c = threadIdx.x, r = threadIdx.y;
    tile[r][c] = x[r * 16 + c];  // OTHER
    out[r * 16 + c] = tile[c][r];  // BUG
}
""",
        kernel_name="transpose",
        make=lambda rng: {"x": normal(rng, 16, 16), "out": empty(16, 16)},
        grid=(1,),
        block=(16, 16),
        kind="DataRace",
        array="tile",
    ),
    BugCase(
        name="two_writers",
        code=r"""
extern "C" __global__ void halve(const float* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        out[i / 2] = x[i];  // BUG
}
""",
        kernel_name="halve",
        make=lambda rng: {"x": normal(rng, 2), "out": empty(1), "n": np.int32(2)},
        grid=(1,),
        block=(32,),
        kind="DataRace",
        array="out",
        index=0,
    ),
    BugCase(
        name="two_writers_of_different_blocks",
        code=r"""
// Rows overlap: a row of threads is one longer than a row of the output.
extern "C" __global__ void fill(int* out, int width) {
    int r = blockIdx.x, c = threadIdx.x;
    if (c <= width && r * width + c < gridDim.x * width)
        out[r * width + c] = 100 * r + c;  // BUG
}
""",
        kernel_name="fill",
        make=lambda rng: {"out": empty(2, 7, dtype=np.int32), "width": np.int32(7)},
        grid=(2,),
        block=(8,),
        kind="DataRace",
        array="out",
        index=7,
    ),
    BugCase(
        name="last_block_without_fence",
        code=r"""
extern "C" __global__ void sum(const float* x, float* partial, unsigned* done, float* out) {
    if (threadIdx.x != 0) return;
    partial[blockIdx.x] = x[blockIdx.x];  // OTHER
    if (atomicAdd(done, 1u) == gridDim.x - 1) {
        float total = 0.0f;
        for (int b = 0; b < gridDim.x; b++)
            total += partial[b];  // BUG
        *out = total;
    }
}
""",
        kernel_name="sum",
        make=lambda rng: {
            "x": normal(rng, 5),
            "partial": empty(5),
            "done": np.zeros(1, np.uint32),
            "out": empty(1),
        },
        grid=(5,),
        block=(32,),
        kind="DataRace",
        array="partial",
    ),
    BugCase(
        name="flag_in_shared_without_barrier",
        code=r"""
extern "C" __global__ void leader(const float* x, float* out) {
    __shared__ bool large;
    if (threadIdx.x == 0)
        large = x[0] > 0.0f;  // OTHER
    out[threadIdx.x] = large ? 1.0f : 0.0f;  // BUG
}
""",
        kernel_name="leader",
        make=lambda rng: {"x": np.array([1.0], np.float32), "out": empty(32)},
        grid=(1,),
        block=(32,),
        kind="DataRace",
        array="large",
        index=0,
    ),
    BugCase(
        name="rope_in_place_by_elements",
        code=r"""
// A thread an element, not a pair: each reads the partner that another thread overwrites.
extern "C" __global__ void rope(float* x, const float* cosine, const float* sine, int dim) {
    int i = threadIdx.x, half = dim / 2;
    float* row = x + blockIdx.x * dim;
    float partner = i < half ? -row[i + half] : row[i - half];  // BUG
    row[i] = row[i] * cosine[i % half] + partner * sine[i % half];  // OTHER
}
""",
        kernel_name="rope",
        make=lambda rng: {
            "x": normal(rng, 3, 10),
            "cosine": normal(rng, 5),
            "sine": normal(rng, 5),
            "dim": np.int32(10),
        },
        grid=(3,),
        block=(10,),
        kind="DataRace",
        array="x",
    ),
    BugCase(
        name="half_accumulated_by_many",
        code=r"""
#include <cuda_bf16.h>
extern "C" __global__ void accumulate(const __nv_bfloat16* x, __nv_bfloat16* sum, int n) {
    int i = threadIdx.x;
    if (i < n)
        *sum += x[i];  // BUG
}
""",
        kernel_name="accumulate",
        make=lambda rng: {
            "x": np.full(40, 0x3F80, np.uint16),
            "sum": np.zeros(1, np.uint16),
            "n": np.int32(40),
        },
        grid=(1,),
        block=(64,),
        kind="DataRace",
        array="sum",
        index=0,
    ),
]
