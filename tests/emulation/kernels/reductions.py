"""Sums, maxima and argmaxima over blocks and grids, in every style."""

from __future__ import annotations

import numpy as np

from .case import BLOCK_SUM_CUDA, KernelCase, empty, f64, normal

INTERLEAVED = r"""
// Interleaved addressing with modulo; blockDim.x a power of two; out[block] is the block's sum.
extern "C" __global__ void block_sums(const float* x, float* out, int n) {
    extern __shared__ float s[];
    unsigned t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
    s[t] = i < n ? x[i] : 0.0f;
    __syncthreads();
    for (unsigned stride = 1; stride < blockDim.x; stride *= 2) {
        if (t % (2 * stride) == 0) s[t] += s[t + stride];
        __syncthreads();
    }
    if (t == 0) out[blockIdx.x] = s[0];
}
"""

SEQUENTIAL = r"""
extern "C" __global__ void block_sums(const float* x, float* out, int n) {
    __shared__ float s[1024];
    unsigned t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
    s[t] = i < n ? x[i] : 0.0f;
    __syncthreads();
    for (unsigned k = blockDim.x / 2; k > 0; k >>= 1) {
        if (t < k) s[t] += s[t + k];
        __syncthreads();
    }
    if (t == 0) out[blockIdx.x] = s[0];
}
"""

FIRST_ADD = r"""
// The first addition is made while loading: a block sums 2 * blockDim.x elements.
extern "C" __global__ void block_sums(const float* x, float* out, int n) {
    extern __shared__ float s[];
    unsigned t = threadIdx.x, i = blockIdx.x * blockDim.x * 2 + t;
    float mine = i < n ? x[i] : 0.0f;
    if (i + blockDim.x < n) mine += x[i + blockDim.x];
    s[t] = mine;
    __syncthreads();
    for (unsigned k = blockDim.x / 2; k > 0; k >>= 1) {
        if (t < k) s[t] = mine = mine + s[t + k];
        __syncthreads();
    }
    if (t == 0) out[blockIdx.x] = mine;
}
"""

UNROLLED_LAST_WARP = r"""
// The last warp needs no block barrier, but a warp barrier between each read and each write.
__device__ void warp_reduce(volatile float* s, unsigned t) {
    float v = s[t];
    v += s[t + 32]; __syncwarp(); s[t] = v; __syncwarp();
    v += s[t + 16]; __syncwarp(); s[t] = v; __syncwarp();
    v += s[t + 8]; __syncwarp(); s[t] = v; __syncwarp();
    v += s[t + 4]; __syncwarp(); s[t] = v; __syncwarp();
    v += s[t + 2]; __syncwarp(); s[t] = v; __syncwarp();
    v += s[t + 1]; __syncwarp(); s[t] = v;
}
extern "C" __global__ void block_sums(const float* x, float* out, int n) {
    __shared__ float s[256];
    unsigned t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
    s[t] = i < n ? x[i] : 0.0f;
    __syncthreads();
    for (unsigned k = blockDim.x / 2; k > 32; k >>= 1) {
        if (t < k) s[t] += s[t + k];
        __syncthreads();
    }
    if (t < 32) warp_reduce(s, t);
    if (t == 0) out[blockIdx.x] = s[0];
}
"""

SHUFFLE_DOWN = r"""
// One warp a row of 32 or fewer.
extern "C" __global__ void warp_sums(const float* x, float* out, int n) {
    int lane = threadIdx.x % warpSize, i = blockIdx.x * 32 + lane;
    float v = i < n ? x[i] : 0.0f;
    for (int offset = 16; offset > 0; offset /= 2) v += __shfl_down_sync(0xffffffff, v, offset);
    if (lane == 0) out[blockIdx.x] = v;
}
"""

BUTTERFLY = r"""
// After the exchange every lane has the sum and the maximum; a warp a row, several rows a block.
extern "C" __global__ void row_stats(const float* x, float* shares, float* peaks, int rows, int width) {
    int lane = threadIdx.x & 31, row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    float sum = 0.0f, peak = -INFINITY;
    for (int c = lane; c < width; c += 32) {
        sum += x[row * width + c];
        peak = fmaxf(peak, x[row * width + c]);
    }
    for (int mask = 16; mask > 0; mask >>= 1) {
        sum += __shfl_xor_sync(0xffffffffu, sum, mask);
        peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, mask));
    }
    for (int c = lane; c < width; c += 32) shares[row * width + c] = x[row * width + c] - sum / width;
    if (lane == 0) peaks[row] = peak;
}
"""
_INFINITY = r"""
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
"""

TWO_LEVELS = r"""
__inline__ __device__ int warp_sum(int v) {
    for (int offset = warpSize / 2; offset > 0; offset >>= 1) v += __shfl_down_sync(0xffffffff, v, offset);
    return v;
}
// A sum in each warp, then one of the warps' sums; the whole grid through atomicAdd.
extern "C" __global__ void total(const int* x, int* out, int n) {
    __shared__ int partial[32];
    int v = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) v += x[i];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    v = warp_sum(v);
    if (lane == 0) partial[warp] = v;
    __syncthreads();
    v = threadIdx.x < blockDim.x / 32 ? partial[lane] : 0;
    if (warp == 0) v = warp_sum(v);
    if (threadIdx.x == 0) atomicAdd(out, v);
}
"""

GRID_ATOMIC_FLOAT = r"""
extern "C" __global__ void dot(const float* x, const float* y, float* out, int n) {
    __shared__ float s[96];
    float v = 0.0f;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x)
        v = fmaf(x[i], y[i], v);
    s[threadIdx.x] = v;
    __syncthreads();
    for (int active = blockDim.x; active > 1; active = (active + 1) / 2) {
        int half = (active + 1) / 2;
        if (threadIdx.x + half < active) s[threadIdx.x] += s[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) atomicAdd(out, s[0]);
}
"""

LAST_BLOCK = r"""
// Every block leaves its sum; the last one to be done, by an atomic counter, adds them up.
__device__ unsigned blocks_done = 0;
extern "C" __global__ void sum_once(const float* x, float* partial, float* out, int n) {
    __shared__ float s[64];
    __shared__ bool is_last;
    unsigned t = threadIdx.x;
    float v = 0.0f;
    for (unsigned i = blockIdx.x * blockDim.x + t; i < n; i += gridDim.x * blockDim.x) v += x[i];
    s[t] = v;
    __syncthreads();
    for (unsigned k = 32; k > 0; k >>= 1) {
        if (t < k) s[t] += s[t + k];
        __syncthreads();
    }
    if (t == 0) {
        partial[blockIdx.x] = s[0];
        __threadfence();
        is_last = atomicAdd(&blocks_done, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (is_last && t == 0) {
        __threadfence();
        float sum = 0.0f;
        for (unsigned b = 0; b < gridDim.x; b++) sum += partial[b];
        *out = sum;
        blocks_done = 0;
    }
}
"""

LAST_BLOCK_INC = r"""
// The same with atomicInc, which wraps the counter back to 0 by itself, and all threads of the last block.
extern "C" __global__ void max_once(const int* x, int* partial, unsigned* done, int* out, int n) {
    __shared__ bool is_last;
    int t = threadIdx.x, best = -2147483647;
    for (int i = blockIdx.x * blockDim.x + t; i < n; i += gridDim.x * blockDim.x) best = max(best, x[i]);
    for (int offset = 16; offset > 0; offset >>= 1) best = max(best, __shfl_down_sync(~0u, best, offset));
    if (t == 0) {
        partial[blockIdx.x] = best;
        __threadfence();
        unsigned ticket = atomicInc(done, gridDim.x - 1);
        is_last = ticket == gridDim.x - 1;
    }
    __syncthreads();
    if (is_last) {
        __threadfence();
        best = t < gridDim.x ? partial[t] : -2147483647;
        for (int offset = 16; offset > 0; offset >>= 1) best = max(best, __shfl_xor_sync(~0u, best, offset));
        if (t == 0) *out = best;
    }
}
"""

BLOCK_SUM_TWICE = (
    BLOCK_SUM_CUDA
    + r"""
// Mean and variance of a row, one block a row, with the same scratch memory for both sums.
extern "C" __global__ void mean_and_variance(const float* x, float* mean, float* variance, int width) {
    extern __shared__ float scratch[];
    const float* row = x + (size_t)blockIdx.x * width;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < width; c += blockDim.x) sum += row[c];
    float mu = block_sum(sum, scratch) / width;
    float squares = 0.0f;
    for (int c = threadIdx.x; c < width; c += blockDim.x) squares += (row[c] - mu) * (row[c] - mu);
    float var = block_sum(squares, scratch) / width;
    if (threadIdx.x == 0) {
        mean[blockIdx.x] = mu;
        variance[blockIdx.x] = var;
    }
}
"""
)

ARGMAX_ROWS = r"""
// First pass: each block's best of its chunk of a row; second pass: the best of those. Lowest index on ties.
__device__ void keep_better(float& value, int& index, float other_value, int other_index) {
    if (other_value > value || (other_value == value && other_index < index)) {
        value = other_value;
        index = other_index;
    }
}
__device__ void block_argmax(float& value, int& index, float* values, int* indices) {
    int t = threadIdx.x;
    values[t] = value;
    indices[t] = index;
    __syncthreads();
    for (int active = blockDim.x; active > 1;) {
        int half = (active + 1) / 2;
        if (t + half < active) keep_better(values[t], indices[t], values[t + half], indices[t + half]);
        __syncthreads();
        active = half;
    }
    value = values[0];
    index = indices[0];
}
extern "C" __global__ void argmax_chunks(const float* logits, float* best, int* where, int width) {
    __shared__ float values[96];
    __shared__ int indices[96];
    const float* row = logits + (size_t)blockIdx.y * width;
    float value = -__int_as_float(0x7f800000);
    int index = 0x7fffffff;
    for (int c = blockIdx.x * blockDim.x + threadIdx.x; c < width; c += gridDim.x * blockDim.x)
        keep_better(value, index, row[c], c);
    block_argmax(value, index, values, indices);
    if (threadIdx.x == 0) {
        best[blockIdx.y * gridDim.x + blockIdx.x] = value;
        where[blockIdx.y * gridDim.x + blockIdx.x] = index;
    }
}
extern "C" __global__ void argmax_merge(const float* best, const int* where, int* out, int chunks) {
    __shared__ float values[96];
    __shared__ int indices[96];
    float value = -__int_as_float(0x7f800000);
    int index = 0x7fffffff;
    for (int c = threadIdx.x; c < chunks; c += blockDim.x)
        keep_better(value, index, best[blockIdx.x * chunks + c], where[blockIdx.x * chunks + c]);
    block_argmax(value, index, values, indices);
    if (threadIdx.x == 0) out[blockIdx.x] = index;
}
"""

TOP_K = r"""
// The k largest of a row in order, a block a row: k rounds of argmax, each hiding the winner. k is small.
extern "C" __global__ void top_k(const float* x, int* out, int width, int k) {
    extern __shared__ char storage[];
    float* row = (float*)storage;
    float* values = row + width;
    int* indices = (int*)(values + blockDim.x);
    int t = threadIdx.x;
    for (int c = t; c < width; c += blockDim.x) row[c] = x[(size_t)blockIdx.x * width + c];
    for (int round = 0; round < k; round++) {
        __syncthreads();
        float best = -3.0e38f;
        int where = width;
        for (int c = t; c < width; c += blockDim.x)
            if (row[c] > best) best = row[c], where = c;
        values[t] = best;
        indices[t] = where;
        __syncthreads();
        if (t == 0) {
            for (int j = 1; j < blockDim.x; j++)
                if (values[j] > best || (values[j] == best && indices[j] < where))
                    best = values[j], where = indices[j];
            out[blockIdx.x * k + round] = where;
            row[where] = -3.0e38f;
        }
    }
}
"""

COUNTS = r"""
// __syncthreads_count, _and, _or: a barrier that also says how many, all, any.
extern "C" __global__ void signs(const float* x, int* positive, int* all_small, int* any_large) {
    float v = x[blockIdx.x * blockDim.x + threadIdx.x];
    int count = __syncthreads_count(v > 0.0f);
    int small = __syncthreads_and(fabsf(v) < 3.0f);
    int large = __syncthreads_or(v > 2.5f);
    if (threadIdx.x == 0) {
        positive[blockIdx.x] = count;
        all_small[blockIdx.x] = small != 0;
        any_large[blockIdx.x] = large != 0;
    }
}
"""


def _block_sums(x: np.ndarray, width: int) -> np.ndarray:
    """Sum of each `width` elements."""
    return np.add.reduceat(f64(x), np.arange(0, x.size, width))


def _sums_case(name: str, code: str, n: int, block: int, shared: bool, per_thread: int = 1) -> KernelCase:
    width = block * per_thread
    blocks = -(-n // width)
    return KernelCase(
        name=name,
        code=code,
        kernel_name="block_sums",
        make=lambda rng: {"x": normal(rng, n), "out": empty(blocks), "n": np.int32(n)},
        grid=(blocks,),
        block=(block,),
        shared_mem=4 * block if shared else 0,
        expected=lambda a: {"out": _block_sums(a.x, width)},
        tolerance=1e-5,
    )


def _argmax_chunks(logits: np.ndarray, chunks: int, threads: int) -> dict[str, np.ndarray]:
    """Best value and its index over the columns that each block of the first pass strides through."""
    owner = np.arange(logits.shape[1]) // threads % chunks
    seen = [np.where(owner == chunk, logits, -np.inf) for chunk in range(chunks)]
    return {
        "best": np.stack([row.max(axis=1) for row in seen], axis=1),
        "where": np.stack([row.argmax(axis=1) for row in seen], axis=1),
    }


def _ties(rng: np.random.Generator, rows: int, width: int) -> np.ndarray:
    """Rows with few distinct values, so that the largest comes more than once."""
    return rng.integers(-9, 4, (rows, width)).astype(np.float32)


CASES = [
    _sums_case("sum_interleaved", INTERLEAVED, 1001, 128, shared=True),
    _sums_case("sum_sequential", SEQUENTIAL, 777, 256, shared=False),
    _sums_case("sum_sequential_1024", SEQUENTIAL, 1500, 1024, shared=False),
    _sums_case("sum_first_add", FIRST_ADD, 1789, 64, shared=True, per_thread=2),
    _sums_case("sum_unrolled_last_warp", UNROLLED_LAST_WARP, 1234, 256, shared=False),
    KernelCase(
        name="sum_shuffle_down",
        code=SHUFFLE_DOWN,
        kernel_name="warp_sums",
        make=lambda rng: {"x": normal(rng, 331), "out": empty(11), "n": np.int32(331)},
        grid=(11,),
        block=(32,),
        expected=lambda a: {"out": _block_sums(a.x, 32)},
        tolerance=1e-5,
    ),
    KernelCase(
        name="butterfly_row_stats",
        code=_INFINITY + BUTTERFLY,
        kernel_name="row_stats",
        make=lambda rng: {
            "x": normal(rng, 7, 45) - 5,
            "shares": empty(7, 45),
            "peaks": empty(7),
            "rows": np.int32(7),
            "width": np.int32(45),
        },
        grid=(2,),
        block=(128,),
        expected=lambda a: {
            "shares": f64(a.x) - f64(a.x).mean(axis=1, keepdims=True),
            "peaks": f64(a.x).max(axis=1),
        },
        tolerance=1e-5,
    ),
    KernelCase(
        name="sum_two_levels",
        code=TWO_LEVELS,
        kernel_name="total",
        make=lambda rng: {
            "x": rng.integers(-1000, 1000, 3001).astype(np.int32),
            "out": np.zeros(1, np.int32),
            "n": np.int32(3001),
        },
        grid=(3,),
        block=(256,),
        expected=lambda a: {"out": a.x.sum(keepdims=True)},
    ),
    KernelCase(
        name="dot_atomic_add",
        code=GRID_ATOMIC_FLOAT,
        kernel_name="dot",
        make=lambda rng: {
            "x": normal(rng, 2003),
            "y": normal(rng, 2003) + 1,
            "out": np.zeros(1, np.float32),
            "n": np.int32(2003),
        },
        grid=(5,),
        block=(96,),
        expected=lambda a: {"out": np.array([f64(a.x) @ f64(a.y)])},
        tolerance=1e-4,
    ),
    KernelCase(
        name="sum_last_block_done",
        code=LAST_BLOCK,
        kernel_name="sum_once",
        make=lambda rng: {
            "x": normal(rng, 1999) + 1,
            "partial": empty(7),
            "out": empty(1),
            "n": np.int32(1999),
        },
        grid=(7,),
        block=(64,),
        expected=lambda a: {"out": f64(a.x).sum(keepdims=True)},
        tolerance=1e-5,
    ),
    KernelCase(
        name="max_last_block_done_inc",
        code=LAST_BLOCK_INC,
        kernel_name="max_once",
        make=lambda rng: {
            "x": rng.integers(-(10**9), -5, 1777).astype(np.int32),
            "partial": empty(13, dtype=np.int32),
            "done": np.zeros(1, np.uint32),
            "out": empty(1, dtype=np.int32),
            "n": np.int32(1777),
        },
        grid=(13,),
        block=(32,),
        expected=lambda a: {"out": a.x.max(keepdims=True), "done": np.zeros(1, np.int64)},
    ),
    *[
        KernelCase(
            name=f"block_sum_twice_{threads}_threads",
            code=BLOCK_SUM_TWICE,
            kernel_name="mean_and_variance",
            make=lambda rng: {
                "x": normal(rng, 3, 211) * 2 + 7,
                "mean": empty(3),
                "variance": empty(3),
                "width": np.int32(211),
            },
            grid=(3,),
            block=(threads,),
            shared_mem=4 * threads,
            expected=lambda a: {"mean": f64(a.x).mean(axis=1), "variance": f64(a.x).var(axis=1)},
            tolerance=1e-5,
        )
        for threads in (1, 33, 100, 256)
    ],
    KernelCase(
        name="argmax_chunks",
        code=ARGMAX_ROWS,
        kernel_name="argmax_chunks",
        make=lambda rng: {
            "logits": _ties(rng, 3, 701) - 20,
            "best": empty(3, 2),
            "where": empty(3, 2, dtype=np.int32),
            "width": np.int32(701),
        },
        grid=(2, 3),
        block=(96,),
        expected=lambda a: _argmax_chunks(a.logits, chunks=2, threads=96),
        tolerance=0,
    ),
    KernelCase(
        name="argmax_merge",
        code=ARGMAX_ROWS,
        kernel_name="argmax_merge",
        make=lambda rng: {
            "best": _ties(rng, 4, 11),
            "where": np.sort(rng.permutation(4 * 11).reshape(4, 11).astype(np.int32), axis=1),
            "out": empty(4, dtype=np.int32),
            "chunks": np.int32(11),
        },
        grid=(4,),
        block=(65,),
        expected=lambda a: {"out": np.take_along_axis(a.where, a.best.argmax(axis=1)[:, None], axis=1)[:, 0]},
    ),
    KernelCase(
        name="top_k",
        code=TOP_K,
        kernel_name="top_k",
        make=lambda rng: {
            "x": _ties(rng, 2, 150),
            "out": empty(2, 5, dtype=np.int32),
            "width": np.int32(150),
            "k": np.int32(5),
        },
        grid=(2,),
        block=(48,),
        shared_mem=4 * (150 + 2 * 48),
        expected=lambda a: {"out": np.argsort(-a.x, axis=1, kind="stable")[:, :5]},
    ),
    KernelCase(
        name="syncthreads_count_and_or",
        code=COUNTS,
        kernel_name="signs",
        make=lambda rng: {
            "x": np.clip(normal(rng, 6, 77), -3.5, 3.5)
            + np.repeat([[0], [0], [0], [2], [-2], [0]], 77, axis=1).astype(np.float32),
            "positive": empty(6, dtype=np.int32),
            "all_small": empty(6, dtype=np.int32),
            "any_large": empty(6, dtype=np.int32),
        },
        grid=(6,),
        block=(77,),
        expected=lambda a: {
            "positive": (a.x > 0).sum(axis=1),
            "all_small": (np.abs(a.x) < 3).all(axis=1).astype(np.int64),
            "any_large": (a.x > 2.5).any(axis=1).astype(np.int64),
        },
    ),
]
