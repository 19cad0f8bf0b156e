"""Prefix sums, stream compaction and sorting."""

from __future__ import annotations

import numpy as np

from .case import KernelCase, empty, f64, normal

HILLIS_STEELE = r"""
// Inclusive scan of at most blockDim.x elements, double buffered.
extern "C" __global__ void inclusive_scan(const float* x, float* out, int n) {
    extern __shared__ float buffers[];
    int t = threadIdx.x, in = 1, now = 0;
    buffers[t] = t < n ? x[t] : 0.0f;
    __syncthreads();
    for (int offset = 1; offset < blockDim.x; offset *= 2) {
        now = 1 - now;
        in = 1 - now;
        const float* from = buffers + in * blockDim.x;
        float* to = buffers + now * blockDim.x;
        to[t] = t >= offset ? from[t] + from[t - offset] : from[t];
        __syncthreads();
    }
    if (t < n) out[t] = buffers[now * blockDim.x + t];
}
"""

BLELLOCH = r"""
// Exclusive scan of 2 * blockDim.x elements, up the tree and down; blockDim.x a power of two.
extern "C" __global__ void exclusive_scan(const int* x, int* out, int* total, int n) {
    __shared__ int s[256];
    int t = threadIdx.x, size = 2 * blockDim.x, offset = 1;
    s[2 * t] = 2 * t < n ? x[2 * t] : 0;
    s[2 * t + 1] = 2 * t + 1 < n ? x[2 * t + 1] : 0;
    for (int active = size >> 1; active > 0; active >>= 1) {
        __syncthreads();
        if (t < active) s[offset * (2 * t + 2) - 1] += s[offset * (2 * t + 1) - 1];
        offset *= 2;
    }
    if (t == 0) {
        *total = s[size - 1];
        s[size - 1] = 0;
    }
    for (int active = 1; active < size; active *= 2) {
        offset >>= 1;
        __syncthreads();
        if (t < active) {
            int left = offset * (2 * t + 1) - 1, right = offset * (2 * t + 2) - 1;
            int moved = s[left];
            s[left] = s[right];
            s[right] += moved;
        }
    }
    __syncthreads();
    if (2 * t < n) out[2 * t] = s[2 * t];
    if (2 * t + 1 < n) out[2 * t + 1] = s[2 * t + 1];
}
"""

WARP_SCAN = r"""
// Inclusive scan: within each warp by shuffles, then the warps' totals, then together.
__device__ int warp_inclusive(int v, int lane) {
    for (int delta = 1; delta < 32; delta <<= 1) {
        int below = __shfl_up_sync(0xffffffff, v, delta);
        if (lane >= delta) v += below;
    }
    return v;
}
extern "C" __global__ void block_scan(const int* x, int* out, int n) {
    __shared__ int totals[32];
    int t = threadIdx.x, lane = t & 31, warp = t >> 5;
    int v = warp_inclusive(t < n ? x[t] : 0, lane);
    if (lane == 31) totals[warp] = v;
    __syncthreads();
    if (warp == 0) totals[lane] = warp_inclusive(lane < blockDim.x / 32 ? totals[lane] : 0, lane);
    __syncthreads();
    if (warp > 0) v += totals[warp - 1];
    if (t < n) out[t] = v;
}
"""

BALLOT_COMPACTION = r"""
// Keep the positive numbers, each warp's in order, at the place that one atomicAdd a warp reserves.
extern "C" __global__ void compact(const float* x, float* kept, int* count, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32;
    bool keep = i < n && x[i] > 0.0f;
    unsigned votes = __ballot_sync(0xffffffffu, keep);
    int first = 0;
    if (lane == 0) first = atomicAdd(count, __popc(votes));
    first = __shfl_sync(0xffffffffu, first, 0);
    if (keep) kept[first + __popc(votes & ((1u << lane) - 1u))] = x[i];
}
"""

SCAN_COMPACTION = r"""
// Keep the even numbers in order: one block, each thread a run of elements, positions by a shared scan.
extern "C" __global__ void keep_even(const int* x, int* kept, int* count, int n) {
    __shared__ int before[129];
    int t = threadIdx.x, run = (n + blockDim.x - 1) / blockDim.x;
    int begin = t * run, end = min(begin + run, n), mine = 0;
    for (int i = begin; i < end; i++) mine += x[i] % 2 == 0;
    before[t + 1] = mine;
    if (t == 0) before[0] = 0;
    __syncthreads();
    if (t == 0)
        for (int k = 1; k <= blockDim.x; k++) before[k] += before[k - 1];
    __syncthreads();
    int at = before[t];
    for (int i = begin; i < end; i++)
        if (x[i] % 2 == 0) kept[at++] = x[i];
    if (t == blockDim.x - 1) *count = before[blockDim.x];
}
"""

BITONIC = r"""
// Sorts blockDim.x numbers, a power of two, in shared memory.
extern "C" __global__ void bitonic_sort(const float* x, float* out, int n) {
    __shared__ float s[128];
    int t = threadIdx.x;
    s[t] = t < n ? x[t] : 3.0e38f;
    for (int size = 2; size <= blockDim.x; size *= 2)
        for (int stride = size / 2; stride > 0; stride /= 2) {
            __syncthreads();
            int partner = t ^ stride;
            if (partner > t) {
                bool ascending = (t & size) == 0;
                float a = s[t], b = s[partner];
                if ((a > b) == ascending) {
                    s[t] = b;
                    s[partner] = a;
                }
            }
        }
    __syncthreads();
    if (t < n) out[t] = s[t];
}
"""

ODD_EVEN = r"""
// Odd-even transposition until nothing moves: a loop whose length all threads agree on by __syncthreads_or.
extern "C" __global__ void odd_even_sort(int* x, int n) {
    __shared__ int s[61];
    int t = threadIdx.x;
    for (int i = t; i < n; i += blockDim.x) s[i] = x[i];
    __syncthreads();
    int moved;
    do {
        moved = 0;
        for (int phase = 0; phase < 2; phase++) {
            for (int i = 2 * t + phase; i + 1 < n; i += 2 * blockDim.x)
                if (s[i] > s[i + 1]) {
                    int swap = s[i];
                    s[i] = s[i + 1];
                    s[i + 1] = swap;
                    moved = 1;
                }
            __syncthreads();
        }
    } while (__syncthreads_or(moved));
    for (int i = t; i < n; i += blockDim.x) x[i] = s[i];
}
"""


CASES = [
    KernelCase(
        name="scan_hillis_steele",
        code=HILLIS_STEELE,
        kernel_name="inclusive_scan",
        make=lambda rng: {"x": normal(rng, 201), "out": empty(201), "n": np.int32(201)},
        grid=(1,),
        block=(211,),
        shared_mem=2 * 211 * 4,
        expected=lambda a: {"out": np.cumsum(f64(a.x))},
        tolerance=1e-5,
    ),
    KernelCase(
        name="scan_blelloch",
        code=BLELLOCH,
        kernel_name="exclusive_scan",
        make=lambda rng: {
            "x": rng.integers(-50, 50, 247).astype(np.int32),
            "out": empty(247, dtype=np.int32),
            "total": empty(1, dtype=np.int32),
            "n": np.int32(247),
        },
        grid=(1,),
        block=(128,),
        expected=lambda a: {"out": np.cumsum(a.x) - a.x, "total": a.x.sum(keepdims=True)},
    ),
    KernelCase(
        name="scan_shuffle_up",
        code=WARP_SCAN,
        kernel_name="block_scan",
        make=lambda rng: {
            "x": rng.integers(-50, 50, 301).astype(np.int32),
            "out": empty(301, dtype=np.int32),
            "n": np.int32(301),
        },
        grid=(1,),
        block=(320,),
        expected=lambda a: {"out": np.cumsum(a.x)},
    ),
    KernelCase(
        name="compact_ballot_one_warp",
        code=BALLOT_COMPACTION,
        kernel_name="compact",
        make=lambda rng: {
            "x": normal(rng, 27),
            "kept": np.full(27, np.nan, np.float32),
            "count": np.zeros(1, np.int32),
            "n": np.int32(27),
        },
        grid=(1,),
        block=(32,),
        expected=lambda a: {
            "kept": np.pad(f64(a.x[a.x > 0]), (0, int((a.x <= 0).sum())), constant_values=np.nan),
            "count": (a.x > 0).sum(keepdims=True),
        },
        tolerance=0,
    ),
    KernelCase(
        name="compact_scan_in_order",
        code=SCAN_COMPACTION,
        kernel_name="keep_even",
        make=lambda rng: {
            "x": rng.integers(0, 100, 613).astype(np.int32),
            "kept": np.full(613, -1, np.int32),
            "count": empty(1, dtype=np.int32),
            "n": np.int32(613),
        },
        grid=(1,),
        block=(128,),
        expected=lambda a: {
            "kept": np.pad(a.x[a.x % 2 == 0], (0, int((a.x % 2).sum())), constant_values=-1),
            "count": (a.x % 2 == 0).sum(keepdims=True),
        },
    ),
    KernelCase(
        name="bitonic_sort",
        code=BITONIC,
        kernel_name="bitonic_sort",
        make=lambda rng: {"x": normal(rng, 121), "out": empty(121), "n": np.int32(121)},
        grid=(1,),
        block=(128,),
        expected=lambda a: {"out": np.sort(f64(a.x))},
        tolerance=0,
    ),
    KernelCase(
        name="odd_even_sort",
        code=ODD_EVEN,
        kernel_name="odd_even_sort",
        make=lambda rng: {"x": rng.permutation(61).astype(np.int32), "n": np.int32(61)},
        grid=(1,),
        block=(31,),
        expected=lambda a: {"x": np.arange(61)},
    ),
]
