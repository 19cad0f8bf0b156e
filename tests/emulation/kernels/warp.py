"""Warp functions: shuffles, votes, partial masks, sub-warp widths, and code that only warps synchronise."""

from __future__ import annotations

import numpy as np

from .case import KernelCase, empty, f64, normal

BROADCAST = r"""
extern "C" __global__ void broadcast(const double* x, double* out, long long* ranks) {
    int t = threadIdx.x, lane = t % 32, leader = (t / 32 * 5) % 32;
    out[t] = __shfl_sync(0xffffffffu, x[t], leader);
    ranks[t] = __shfl_sync(0xffffffffu, (long long)t << 33, 31 - lane);
}
"""

SUB_WARPS = r"""
// Groups of 8 lanes: a rotation, a sum in each group, and shuffles whose lane lies past the group's end.
extern "C" __global__ void groups(const int* x, int* rotated, int* sums, int* up, int* down) {
    int t = threadIdx.x, v = x[t], lane = t % 8;
    rotated[t] = __shfl_sync(~0u, v, (lane + 3) % 8, 8);
    int sum = v;
    for (int mask = 4; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask, 8);
    sums[t] = sum;
    up[t] = __shfl_up_sync(~0u, v, 3, 8);
    down[t] = __shfl_down_sync(~0u, v, 6, 8);
}
"""

SOURCE_LANES = r"""
// A source lane is taken modulo the width; shuffles off either end give a lane its own value.
extern "C" __global__ void ends(const int* x, int* wrapped, int* up, int* down) {
    int t = threadIdx.x;
    wrapped[t] = __shfl_sync(0xffffffff, x[t], t + 40);
    up[t] = __shfl_up_sync(0xffffffff, x[t], 7);
    down[t] = __shfl_down_sync(0xffffffff, x[t], 25);
}
"""

VOTES = r"""
extern "C" __global__ void votes(const int* x, unsigned* ballots, int* any, int* all, int n) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    int v = t < n ? x[t] : 7;
    unsigned ballot = __ballot_sync(0xffffffff, v % 3 == 0);
    int some = __any_sync(0xffffffff, v == 5), every = __all_sync(0xffffffff, v > 1);
    if (threadIdx.x % 32 == 0) {
        int warp = t / 32;
        ballots[warp] = ballot;
        any[warp] = some != 0;
        all[warp] = every != 0;
    }
}
"""

PARTIAL_MASK = r"""
// Only the first `count` lanes of the warp take part, and the mask says so.
extern "C" __global__ void partial_sum(const float* x, float* out, int count) {
    int lane = threadIdx.x;
    unsigned mask = __ballot_sync(0xffffffffu, lane < count);
    if (lane < count) {
        float v = x[blockIdx.x * count + lane];
        for (int offset = 16; offset > 0; offset /= 2) {
            float other = __shfl_down_sync(mask, v, offset);
            if (lane + offset < count) v += other;
        }
        if (lane == 0) out[blockIdx.x] = v;
    }
}
"""

ODD_AND_EVEN = r"""
// Two halves of a warp, each with its own mask, in two branches.
extern "C" __global__ void two_masks(const int* x, int* out) {
    int lane = threadIdx.x;
    int v = x[lane];
    if (lane % 2) {
        v += __shfl_sync(0xaaaaaaaau, v, 31);
        __syncwarp(0xaaaaaaaau);
    } else {
        v -= __shfl_sync(0x55555555u, v, 30);
    }
    out[lane] = v + __shfl_xor_sync(0xffffffffu, v, 1);
}
"""

LAST_WARP_SHORT = r"""
// A block that is no multiple of 32: the last warp's mask names the lanes that it has.
extern "C" __global__ void warp_maxima(const int* x, int* out) {
    int t = threadIdx.x, lane = t % 32, warp = t / 32, lanes = min(32, (int)blockDim.x - warp * 32);
    unsigned mask = lanes == 32 ? 0xffffffffu : (1u << lanes) - 1u;
    int v = x[t];
    for (int offset = 16; offset > 0; offset >>= 1) {
        int other = __shfl_down_sync(mask, v, offset);
        if (lane + offset < lanes) v = max(v, other);
    }
    if (lane == 0) out[warp] = v;
}
"""

ACTIVE_MASK = r"""
// Where a whole warp is together, __activemask names all of it.
extern "C" __global__ void active(unsigned* out) {
    unsigned mask = __activemask();
    if (threadIdx.x % 32 == 0) out[threadIdx.x / 32] = __popc(mask) + 100 * (__ffs(mask) - 1);
}
"""

AGGREGATED_FILTER = r"""
// One atomic operation for all lanes that are in the same branch: the leader adds for them, and each takes its
// place behind the lanes before it.
__device__ int take_place(int* counter) {
    unsigned mask = __activemask();
    int lane = threadIdx.x % 32, leader = __ffs(mask) - 1, first;
    if (lane == leader) first = atomicAdd(counter, __popc(mask));
    first = __shfl_sync(mask, first, leader);
    return first + __popc(mask & ((1u << lane) - 1));
}
extern "C" __global__ void divide_up(const int* x, int* positive, int* other, int* counters, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    if (x[i] > 0) atomicAdd(positive + take_place(counters), 1);  // each place is taken once
    else atomicAdd(other + take_place(counters + 1), 1);
}
"""

AGGREGATED_LOOP = r"""
// The branch is inside of a loop whose length differs from lane to lane.
extern "C" __global__ void odd_steps(const int* x, int* out, int* counter) {
    int lane = threadIdx.x % 32;
    for (int v = x[threadIdx.x]; v > 0; v /= 2) {
        if (v % 2 == 0) continue;
        unsigned mask = __activemask();
        int leader = __ffs(mask) - 1, first;
        if (lane == leader) first = atomicAdd(counter, __popc(mask));
        first = __shfl_sync(mask, first, leader);
        atomicAdd(out + first + __popc(mask & ((1u << lane) - 1)), 1);
    }
}
"""

ACTIVE_BRANCHES = r"""
// Lanes that have returned, and those in the other branch, are in no mask; after the branches all are together.
extern "C" __global__ void active_branches(unsigned* out, int threads) {
    int t = threadIdx.x, lane = t % 32;
    if (t >= threads) return;
    unsigned* mine = out + 3 * t;
    if (lane < 5) {
        mine[0] = __activemask();
        mine[1] = 0;
    } else {
        mine[1] = __activemask();
        mine[0] = 0;
    }
    __syncwarp(__ballot_sync(threads - t / 32 * 32 < 32 ? (1u << (threads - t / 32 * 32)) - 1 : ~0u, 1));
    mine[2] = __activemask();
}
"""

SPIN_AND_ACTIVE = r"""
// One lane spins on a flag that another sets after it has asked for the active lanes.
extern "C" __global__ void handshake(int* flag, unsigned* out) {
    if (threadIdx.x == 0) {
        while (atomicAdd(flag, 0) == 0) {}
        out[0] = 7;
    } else if (threadIdx.x == 1) {
        unsigned mask = __activemask();
        out[1] = mask >> 1 & 1;
        __threadfence();
        atomicExch(flag, 1);
    }
}
"""

WARP_SYNCHRONOUS = r"""
// Shared memory that only one warp touches needs no block barrier, but __syncwarp between write and read.
extern "C" __global__ void warp_rotate(const float* x, float* out, int steps) {
    __shared__ float s[96];
    int t = threadIdx.x, base = t / 32 * 32, lane = t % 32;
    s[t] = x[t];
    for (int k = 0; k < steps; k++) {
        __syncwarp();
        float next = s[base + (lane + 1) % 32];
        __syncwarp();
        s[t] = next;
    }
    out[t] = s[t];
}
"""

AGGREGATED_ATOMIC = r"""
// Lanes with the same key find each other by __match_any_sync and add once.
extern "C" __global__ void count_keys(const int* keys, int* counts) {
    int lane = threadIdx.x % 32, key = keys[blockIdx.x * blockDim.x + threadIdx.x];
    unsigned peers = __match_any_sync(0xffffffffu, key);
    if (lane == __ffs(peers) - 1) atomicAdd(&counts[key], __popc(peers));
}
"""

TWO_D_WARPS = r"""
// Warps of a 2-D block are cut from threads in x-first order: 16 x 4 threads are two warps.
extern "C" __global__ void row_sums(const int* x, int* out) {
    int row = threadIdx.y, v = x[row * 16 + threadIdx.x];
    for (int offset = 8; offset > 0; offset >>= 1) v += __shfl_down_sync(0xffffffffu, v, offset, 16);
    if (threadIdx.x == 0) out[row] = v;
}
"""

LOOPED_SHUFFLES = r"""
// Dot products of a warp over many keys: each key's sum is finished before the next begins.
extern "C" __global__ void warp_scores(const float* q, const float* keys, float* scores, int n, int dim) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (int j = warp; j < n; j += warps) {
        float dot = 0.0f;
        for (int d = lane; d < dim; d += 32) dot += q[d] * keys[j * dim + d];
        for (int offset = 16; offset > 0; offset >>= 1) dot += __shfl_down_sync(0xffffffffu, dot, offset);
        if (lane == 0) scores[j] = dot;
    }
}
"""


def _active_branches(threads: int, block: int) -> np.ndarray:
    """The three masks of each thread, flat."""
    masks = np.zeros((block, 3), np.uint32)
    for t in range(threads):
        first = t // 32 * 32
        lanes = [u - first for u in range(first, min(first + 32, threads))]
        low, high = (sum(1 << k for k in lanes if (k < 5) == side) for side in (True, False))
        masks[t] = (low, 0, low | high) if t % 32 < 5 else (0, high, low | high)
    return masks.ravel()


def _ones(x: np.ndarray) -> int:
    """Bits that are set in all numbers together."""
    return sum(int(v).bit_count() for v in x)


def _by_warp(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, 32)


def _groups(x: np.ndarray) -> dict[str, np.ndarray]:
    g = x.reshape(-1, 8)
    up, down = g.copy(), g.copy()
    up[:, 3:] = g[:, :5]
    down[:, :2] = g[:, 6:]
    return {
        "rotated": np.roll(g, -3, axis=1).ravel(),
        "sums": np.repeat(g.sum(axis=1), 8),
        "up": up.ravel(),
        "down": down.ravel(),
    }


def _ends(x: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "wrapped": np.roll(x, -8),
        "up": np.concatenate([x[:7], x[:25]]),
        "down": np.concatenate([x[25:], x[7:]]),
    }


def _votes(x: np.ndarray) -> dict[str, np.ndarray]:
    padded = _by_warp(np.pad(x, (0, -x.size % 32), constant_values=7))
    return {
        "ballots": ((padded % 3 == 0).astype(np.int64) << np.arange(32)).sum(axis=1),
        "any": (padded == 5).any(axis=1).astype(np.int64),
        "all": (padded > 1).all(axis=1).astype(np.int64),
    }


def _two_masks(x: np.ndarray) -> np.ndarray:
    odd = np.arange(32) % 2 == 1
    v = np.where(odd, x + x[31], x - x[30])
    return np.asarray(v + v[np.arange(32) ^ 1])


def _broadcast(x: np.ndarray) -> dict[str, np.ndarray]:
    t = np.arange(x.size)
    return {
        "out": f64(x[t // 32 * 32 + t // 32 * 5 % 32]),
        "ranks": (t // 32 * 32 + 31 - t % 32).astype(np.int64) << 33,
    }


CASES = [
    KernelCase(
        name="shfl_broadcast_64_bits",
        code=BROADCAST,
        kernel_name="broadcast",
        make=lambda rng: {
            "x": rng.standard_normal(160),
            "out": empty(160, dtype=np.float64),
            "ranks": empty(160, dtype=np.int64),
        },
        grid=(1,),
        block=(160,),
        expected=lambda a: _broadcast(a.x),
        tolerance=0,
    ),
    KernelCase(
        name="shfl_sub_warps",
        code=SUB_WARPS,
        kernel_name="groups",
        make=lambda rng: {
            "x": rng.integers(-99, 99, 64).astype(np.int32),
            **{name: empty(64, dtype=np.int32) for name in ("rotated", "sums", "up", "down")},
        },
        grid=(1,),
        block=(64,),
        expected=lambda a: _groups(a.x),
    ),
    KernelCase(
        name="shfl_past_the_ends",
        code=SOURCE_LANES,
        kernel_name="ends",
        make=lambda rng: {
            "x": rng.integers(-99, 99, 32).astype(np.int32),
            **{name: empty(32, dtype=np.int32) for name in ("wrapped", "up", "down")},
        },
        grid=(1,),
        block=(32,),
        expected=lambda a: _ends(a.x),
    ),
    KernelCase(
        name="warp_votes",
        code=VOTES,
        kernel_name="votes",
        make=lambda rng: {
            "x": np.concatenate([rng.integers(0, 9, 64), np.full(32, 4), rng.integers(2, 5, 20)]).astype(
                np.int32
            ),
            "ballots": empty(4, dtype=np.uint32),
            "any": empty(4, dtype=np.int32),
            "all": empty(4, dtype=np.int32),
            "n": np.int32(116),
        },
        grid=(2,),
        block=(64,),
        expected=lambda a: _votes(a.x),
    ),
    KernelCase(
        name="shfl_partial_mask",
        code=PARTIAL_MASK,
        kernel_name="partial_sum",
        make=lambda rng: {"x": normal(rng, 3, 19), "out": empty(3), "count": np.int32(19)},
        grid=(3,),
        block=(32,),
        expected=lambda a: {"out": f64(a.x).sum(axis=1)},
        tolerance=1e-5,
    ),
    KernelCase(
        name="shfl_two_masks",
        code=ODD_AND_EVEN,
        kernel_name="two_masks",
        make=lambda rng: {"x": rng.integers(-99, 99, 32).astype(np.int32), "out": empty(32, dtype=np.int32)},
        grid=(1,),
        block=(32,),
        expected=lambda a: {"out": _two_masks(a.x)},
    ),
    KernelCase(
        name="shfl_short_last_warp",
        code=LAST_WARP_SHORT,
        kernel_name="warp_maxima",
        make=lambda rng: {"x": rng.integers(-999, -9, 75).astype(np.int32), "out": empty(3, dtype=np.int32)},
        grid=(1,),
        block=(75,),
        expected=lambda a: {"out": np.maximum.reduceat(a.x, [0, 32, 64])},
    ),
    KernelCase(
        name="active_mask_whole_warps",
        code=ACTIVE_MASK,
        kernel_name="active",
        make=lambda rng: {"out": empty(3, dtype=np.uint32)},
        grid=(1,),
        block=(96,),
        expected=lambda a: {"out": np.array([32, 32, 32])},
    ),
    KernelCase(
        name="warp_synchronous_rotation",
        code=WARP_SYNCHRONOUS,
        kernel_name="warp_rotate",
        make=lambda rng: {"x": normal(rng, 96), "out": empty(96), "steps": np.int32(5)},
        grid=(1,),
        block=(96,),
        expected=lambda a: {"out": np.roll(f64(_by_warp(a.x)), -5, axis=1).ravel()},
        tolerance=0,
    ),
    *(
        KernelCase(
            name=f"activemask_aggregated_{n}_of_{grid}x{block}",
            code=AGGREGATED_FILTER,
            kernel_name="divide_up",
            make=lambda rng, n=n: {
                "x": rng.integers(-5, 6, n).astype(np.int32),
                "positive": np.zeros(n, np.int32),
                "other": np.zeros(n, np.int32),
                "counters": np.zeros(2, np.int32),
                "n": np.int32(n),
            },
            grid=(grid,),
            block=(block,),
            expected=lambda a: {
                "counters": np.array([(a.x > 0).sum(), (a.x <= 0).sum()]),
                "positive": np.arange(len(a.x)) < (a.x > 0).sum(),
                "other": np.arange(len(a.x)) < (a.x <= 0).sum(),
            },
        )
        for n, grid, block in ((1000, 11, 96), (77, 2, 50), (64, 2, 32), (5, 1, 5))
    ),
    KernelCase(
        name="activemask_in_a_loop",
        code=AGGREGATED_LOOP,
        kernel_name="odd_steps",
        make=lambda rng: {
            "x": rng.integers(0, 1000, 50).astype(np.int32),
            "out": np.zeros(500, np.int32),
            "counter": np.zeros(1, np.int32),
        },
        grid=(1,),
        block=(50,),
        expected=lambda a: {
            "counter": np.array([_ones(a.x)]),
            "out": np.arange(500) < _ones(a.x),
        },
    ),
    *(
        KernelCase(
            name=f"activemask_in_branches_{threads}_of_{block}",
            code=ACTIVE_BRANCHES,
            kernel_name="active_branches",
            make=lambda rng, threads=threads, block=block: {
                "out": np.zeros(3 * block, np.uint32),
                "threads": np.int32(threads),
            },
            grid=(1,),
            block=(block,),
            expected=lambda a, threads=threads, block=block: {"out": _active_branches(threads, block)},
        )
        for threads, block in ((64, 64), (40, 64), (41, 41))
    ),
    KernelCase(
        name="activemask_while_another_lane_spins",
        code=SPIN_AND_ACTIVE,
        kernel_name="handshake",
        make=lambda rng: {"flag": np.zeros(1, np.int32), "out": np.zeros(2, np.uint32)},
        grid=(1,),
        block=(32,),
        expected=lambda a: {"out": np.array([7, 1], np.uint32)},
    ),
    KernelCase(
        name="match_any_aggregated_atomic",
        code=AGGREGATED_ATOMIC,
        kernel_name="count_keys",
        make=lambda rng: {"keys": rng.integers(0, 7, 192).astype(np.int32), "counts": np.zeros(7, np.int32)},
        grid=(2,),
        block=(96,),
        expected=lambda a: {"counts": np.bincount(a.keys, minlength=7)},
    ),
    KernelCase(
        name="warps_of_a_2d_block",
        code=TWO_D_WARPS,
        kernel_name="row_sums",
        make=lambda rng: {
            "x": rng.integers(-99, 99, (4, 16)).astype(np.int32),
            "out": empty(4, dtype=np.int32),
        },
        grid=(1,),
        block=(16, 4),
        expected=lambda a: {"out": a.x.sum(axis=1)},
    ),
    KernelCase(
        name="shfl_in_a_loop",
        code=LOOPED_SHUFFLES,
        kernel_name="warp_scores",
        make=lambda rng: {
            "q": normal(rng, 50),
            "keys": normal(rng, 23, 50),
            "scores": empty(23),
            "n": np.int32(23),
            "dim": np.int32(50),
        },
        grid=(1,),
        block=(128,),
        expected=lambda a: {"scores": f64(a.keys) @ f64(a.q)},
        tolerance=1e-5,
    ),
]
