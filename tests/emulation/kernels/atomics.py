"""Atomic functions, histograms, and what is built from compare-and-swap."""

from __future__ import annotations

import numpy as np

from .case import KernelCase, empty, f64, normal

HISTOGRAM = r"""
extern "C" __global__ void histogram(const int* x, int* bins, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomicAdd(&bins[x[i]], 1);
}
"""

PRIVATE_HISTOGRAM = r"""
// Each block counts in shared memory first, and adds its counts to the grid's.
extern "C" __global__ void histogram(const unsigned char* x, unsigned* bins, int n, int num_bins) {
    extern __shared__ unsigned counts[];
    for (int b = threadIdx.x; b < num_bins; b += blockDim.x) counts[b] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(counts + x[i], 1u);
    __syncthreads();
    for (int b = threadIdx.x; b < num_bins; b += blockDim.x)
        if (counts[b]) atomicAdd(bins + b, counts[b]);
}
"""

ALL_INTEGERS = r"""
// out: sum, difference, maximum, minimum, and, or, xor, first exchanges, first swaps.
extern "C" __global__ void combine(const int* x, int* out, unsigned* counters, int* last, int* winner,
                                   int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    atomicAdd(&out[0], x[i]);
    atomicSub(&out[1], x[i]);
    atomicMax(&out[2], x[i]);
    atomicMin(&out[3], x[i]);
    atomicAnd(&out[4], x[i]);
    atomicOr(&out[5], x[i]);
    atomicXor(&out[6], x[i]);
    if (atomicExch(last, i) == -1) atomicAdd(&out[7], 1);
    if (atomicCAS(winner, -1, i) == -1) atomicAdd(&out[8], 1);
    atomicInc(&counters[0], 9u);
    atomicDec(&counters[1], 9u);
}
"""

WIDE_TYPES = r"""
extern "C" __global__ void sums(const unsigned* x, unsigned long long* total, unsigned* wrapped,
                                double* halves, unsigned long long* peak, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    atomicAdd(total, (unsigned long long)x[i] << 8);
    atomicAdd(wrapped, x[i]);
    atomicAdd(halves, 0.5);
    atomicMax(peak, (unsigned long long)x[i] * x[i]);
}
"""

FLOAT_MAX = r"""
// There is no atomicMax of floats: compare and swap their bits until the larger one stays.
__device__ float atomic_max(float* address, float value) {
    int* bits = (int*)address;
    int seen = *(volatile int*)bits;
    while (__int_as_float(seen) < value) {
        int before = atomicCAS(bits, seen, __float_as_int(value));
        if (before == seen) break;
        seen = before;
    }
    return __int_as_float(seen);
}
extern "C" __global__ void row_max(const float* x, float* out, int rows, int width) {
    int c = blockIdx.x * blockDim.x + threadIdx.x, r = blockIdx.y;
    if (c < width) atomic_max(&out[r], x[r * width + c]);
}
"""

FLOAT_MAX_BITS = r"""
// Bits of floats are in order: atomicMax of ints serves those of one sign, atomicMin of unsigned the other.
__device__ void atomic_max(float* address, float value) {
    if (value >= 0.0f) atomicMax((int*)address, __float_as_int(value));
    else atomicMin((unsigned*)address, __float_as_uint(value));
}
extern "C" __global__ void row_max(const float* x, float* out, int rows, int width) {
    const float* row = x + blockIdx.y * width;
    for (int c = threadIdx.x; c < width; c += blockDim.x) atomic_max(&out[blockIdx.y], row[c]);
}
"""

QUEUE = r"""
// Work is drawn from a counter until none is left: which thread does which item is open, what is done is not.
extern "C" __global__ void drain(const int* items, int* done, int* next, int n) {
    while (true) {
        int k = atomicAdd(next, 1);
        if (k >= n) break;
        done[k] = items[k] * items[k];
    }
}
"""

SPIN_LOCK = r"""
// One thread of each block takes a lock and changes two numbers together. A fence after taking the lock, one
// before giving it back.
extern "C" __global__ void deposit(int* lock, long long* balance, int* deposits) {
    if (threadIdx.x != 0) return;
    while (atomicCAS(lock, 0, 1) != 0) {}
    __threadfence();
    *balance += blockIdx.x;
    *deposits += 1;
    __threadfence();
    atomicExch(lock, 0);
}
"""

SPIN_LOCK_IN_WARP = r"""
// Threads of one warp share a lock: the holder leaves it inside the loop, so that no lane waits for another.
extern "C" __global__ void deposit(int* lock, int* balance) {
    bool done = false;
    while (!done) {
        if (atomicCAS(lock, 0, 1) == 0) {
            __threadfence();
            *(volatile int*)balance += threadIdx.x;
            __threadfence();
            atomicExch(lock, 0);
            done = true;
        }
    }
}
"""

SHARED_ATOMICS = r"""
// The nearest pair of (distance, index) of each block in one 64-bit shared word.
extern "C" __global__ void nearest(const float* x, float target, int* out, int n) {
    __shared__ unsigned long long best;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (threadIdx.x == 0) best = ~0ull;
    __syncthreads();
    if (i < n) {
        unsigned long long distance = __float_as_uint(fabsf(x[i] - target));
        atomicMin(&best, distance << 32 | (unsigned)i);
    }
    __syncthreads();
    if (threadIdx.x == 0) out[blockIdx.x] = (int)(best & 0xffffffffull);
}
"""

HASH_TABLE = r"""
// Insert keys by linear probing, each once however often it comes; an empty slot is -1.
extern "C" __global__ void insert(const int* keys, int* table, int* probes, int n, int slots) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int slot = keys[i] % slots;
    for (int k = 0; k < slots; k++) {
        int seen = atomicCAS(&table[slot], -1, keys[i]);
        if (seen == -1 || seen == keys[i]) break;
        slot = (slot + 1) % slots;
        atomicAdd(probes, 1);
    }
}
"""

FLAGS = r"""
// A producer publishes with a fence and an atomic; a consumer in the same block waits in a loop of atomics.
extern "C" __global__ void hand_over(const int* x, int* mailbox, int* flag, int* out) {
    if (threadIdx.x == 0) {
        *mailbox = x[blockIdx.x] * 3;
        __threadfence();
        atomicExch(flag, 1);
    } else if (threadIdx.x == 40) {
        while (atomicAdd(flag, 0) == 0) {}
        __threadfence();
        *out = *mailbox + 1;
    }
}
"""


def _counts(x: np.ndarray, bins: int) -> np.ndarray:
    return np.bincount(x.astype(np.int64), minlength=bins)


def _combined(x: np.ndarray) -> np.ndarray:
    bits = (np.bitwise_and.reduce(x), np.bitwise_or.reduce(x), np.bitwise_xor.reduce(x))
    return np.array([x.sum(), -x.sum(), x.max(), x.min(), *bits, 1, 1])


CASES = [
    KernelCase(
        name="histogram_global",
        code=HISTOGRAM,
        kernel_name="histogram",
        make=lambda rng: {
            "x": rng.integers(0, 11, 1009).astype(np.int32),
            "bins": np.zeros(11, np.int32),
            "n": np.int32(1009),
        },
        grid=(5,),
        block=(224,),
        expected=lambda a: {"bins": _counts(a.x, 11)},
    ),
    KernelCase(
        name="histogram_privatised",
        code=PRIVATE_HISTOGRAM,
        kernel_name="histogram",
        make=lambda rng: {
            "x": rng.integers(0, 61, 2011).astype(np.uint8),
            "bins": np.zeros(61, np.uint32),
            "n": np.int32(2011),
            "num_bins": np.int32(61),
        },
        grid=(3,),
        block=(50,),
        shared_mem=4 * 61,
        expected=lambda a: {"bins": _counts(a.x, 61)},
    ),
    KernelCase(
        name="atomic_integers",
        code=ALL_INTEGERS,
        kernel_name="combine",
        make=lambda rng: {
            "x": rng.integers(-(2**20), 2**20, 203).astype(np.int32),
            "out": np.array([0, 0, -(2**31), 2**31 - 1, -1, 0, 0, 0, 0], np.int32),
            "counters": np.array([0, 9], np.uint32),
            "last": np.array([-1], np.int32),
            "winner": np.array([-1], np.int32),
            "n": np.int32(203),
        },
        grid=(2,),
        block=(128,),
        expected=lambda a: {"out": _combined(a.x), "counters": np.array([203 % 10, 9 - 203 % 10])},
    ),
    KernelCase(
        name="atomic_wide_types",
        code=WIDE_TYPES,
        kernel_name="sums",
        make=lambda rng: {
            "x": rng.integers(0, 2**32, 150, dtype=np.uint32),
            "total": np.zeros(1, np.uint64),
            "wrapped": np.zeros(1, np.uint32),
            "halves": np.zeros(1, np.float64),
            "peak": np.zeros(1, np.uint64),
            "n": np.int32(150),
        },
        grid=(3,),
        block=(64,),
        expected=lambda a: {
            "total": (a.x.astype(np.uint64) << np.uint64(8)).sum(keepdims=True),
            "wrapped": a.x.sum(keepdims=True, dtype=np.uint32),
            "halves": np.array([75.0]),
            "peak": (a.x.astype(np.uint64) ** 2).max(keepdims=True),
        },
        tolerance=0,
    ),
    *[
        KernelCase(
            name=name,
            code=code,
            kernel_name="row_max",
            make=lambda rng: {
                "x": normal(rng, 3, 101) - np.array([[0], [9], [-9]], np.float32),
                "out": np.full(3, -np.inf, np.float32),
                "rows": np.int32(3),
                "width": np.int32(101),
            },
            grid=(grid, 3),
            block=(64,),
            expected=lambda a: {"out": f64(a.x).max(axis=1)},
            tolerance=0,
        )
        for name, code, grid in [
            ("atomic_max_float_cas", FLOAT_MAX, 2),
            ("atomic_max_float_bits", FLOAT_MAX_BITS, 1),
        ]
    ],
    KernelCase(
        name="work_queue",
        code=QUEUE,
        kernel_name="drain",
        make=lambda rng: {
            "items": rng.integers(-99, 99, 157).astype(np.int32),
            "done": empty(157, dtype=np.int32),
            "next": np.zeros(1, np.int32),
            "n": np.int32(157),
        },
        grid=(3,),
        block=(33,),
        expected=lambda a: {"done": a.items**2, "next": np.array([157 + 99])},
    ),
    KernelCase(
        name="spin_lock",
        code=SPIN_LOCK,
        kernel_name="deposit",
        make=lambda rng: {
            "lock": np.zeros(1, np.int32),
            "balance": np.zeros(1, np.int64),
            "deposits": np.zeros(1, np.int32),
        },
        grid=(19,),
        block=(33,),
        expected=lambda a: {"balance": np.array([171]), "deposits": np.array([19]), "lock": np.array([0])},
    ),
    KernelCase(
        name="spin_lock_within_a_warp",
        code=SPIN_LOCK_IN_WARP,
        kernel_name="deposit",
        make=lambda rng: {"lock": np.zeros(1, np.int32), "balance": np.zeros(1, np.int32)},
        grid=(1,),
        block=(40,),
        expected=lambda a: {"balance": np.array([780]), "lock": np.array([0])},
    ),
    KernelCase(
        name="atomic_min_shared_64",
        code=SHARED_ATOMICS,
        kernel_name="nearest",
        make=lambda rng: {
            "x": normal(rng, 5 * 77),
            "target": np.float32(0.3),
            "out": empty(5, dtype=np.int32),
            "n": np.int32(5 * 77),
        },
        grid=(5,),
        block=(77,),
        expected=lambda a: {
            "out": np.abs(a.x - a.target).reshape(5, 77).argmin(axis=1) + np.arange(5) * 77,
        },
    ),
    KernelCase(
        name="hash_table",
        code=HASH_TABLE,
        kernel_name="insert",
        make=lambda rng: {
            # Every remainder once, as three copies of one key: no two keys want the same slot.
            "keys": rng.permutation(np.repeat(np.arange(29) + 29 * rng.integers(0, 99, 29), 3)).astype(
                np.int32
            ),
            "table": np.full(29, -1, np.int32),
            "probes": np.zeros(1, np.int32),
            "n": np.int32(87),
            "slots": np.int32(29),
        },
        grid=(3,),
        block=(32,),
        expected=lambda a: {
            "table": np.unique(a.keys)[np.argsort(np.unique(a.keys) % 29)],
            "probes": np.array([0]),
        },
    ),
    KernelCase(
        name="fence_and_flag",
        code=FLAGS,
        kernel_name="hand_over",
        make=lambda rng: {
            "x": np.array([14], np.int32),
            "mailbox": empty(1, dtype=np.int32),
            "flag": np.zeros(1, np.int32),
            "out": empty(1, dtype=np.int32),
        },
        grid=(1,),
        block=(64,),
        expected=lambda a: {"out": np.array([43])},
    ),
]
