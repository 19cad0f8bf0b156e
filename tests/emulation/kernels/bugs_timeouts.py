"""Kernels that do not end. Each line of the endless loop is marked: any of them may be the one reported."""

from __future__ import annotations

import numpy as np

from .case import BugCase, empty, normal

CASES = [
    BugCase(
        name="while_true",
        code=r"""
extern "C" __global__ void forever(volatile int* x) {
    while (true)  // BUG
        x[0] = x[0] + 1;  // BUG
}
""",
        kernel_name="forever",
        make=lambda rng: {"x": np.zeros(1, np.int32)},
        grid=(1,),
        block=(1,),
        kind="KernelTimeout",
    ),
    BugCase(
        name="volatile_flag_never_set",
        code=r"""
extern "C" __global__ void wait(volatile int* flag, int* out) {
    while (*flag == 0) {  // BUG
    }
    out[threadIdx.x] = 1;
}
""",
        kernel_name="wait",
        make=lambda rng: {"flag": np.zeros(1, np.int32), "out": empty(33, dtype=np.int32)},
        grid=(2,),
        block=(33,),
        kind="KernelTimeout",
    ),
    BugCase(
        name="atomic_flag_never_set",
        code=r"""
extern "C" __global__ void wait(int* flag, int* out) {
    while (atomicAdd(flag, 0) == 0) {  // BUG
    }
    *out = 1;
}
""",
        kernel_name="wait",
        make=lambda rng: {"flag": np.zeros(1, np.int32), "out": empty(1, dtype=np.int32)},
        grid=(1,),
        block=(4,),
        kind="KernelTimeout",
    ),
    BugCase(
        name="stride_zero",
        code=r"""
extern "C" __global__ void fill(int* out, int n) {
    int stride = blockDim.x / 64;
    for (int i = threadIdx.x; i < n; i += stride)  // BUG
        out[i] = i;  // BUG
}
""",
        kernel_name="fill",
        make=lambda rng: {"out": empty(100, dtype=np.int32), "n": np.int32(100)},
        grid=(1,),
        block=(32,),
        kind="KernelTimeout",
    ),
    BugCase(
        name="unsigned_never_below_zero",
        code=r"""
extern "C" __global__ void sum(const float* x, float* out) {
    __shared__ float s[64];
    unsigned t = threadIdx.x;
    s[t] = x[t];
    __syncthreads();
    for (unsigned k = 32; k >= 0; k >>= 1) {  // BUG
        if (t < k) s[t] += s[t + k];  // BUG
        __syncthreads();  // BUG
    }
    if (t == 0) *out = s[0];
}
""",
        kernel_name="sum",
        make=lambda rng: {"x": normal(rng, 64), "out": empty(1)},
        grid=(1,),
        block=(64,),
        kind="KernelTimeout",
    ),
    BugCase(
        name="unsigned_counts_down",
        code=r"""
extern "C" __global__ void sum_backwards(const unsigned* x, unsigned* out, unsigned n) {
    unsigned sum = 0;
    for (unsigned i = n - 1; i >= 0; i--)  // BUG
        *out = sum += x[i % n];  // BUG
}
""",
        kernel_name="sum_backwards",
        make=lambda rng: {
            "x": np.arange(10, dtype=np.uint32),
            "out": empty(1, dtype=np.uint32),
            "n": np.uint32(10),
        },
        grid=(1,),
        block=(1,),
        kind="KernelTimeout",
    ),
    BugCase(
        name="only_shuffles",
        code=r"""
extern "C" __global__ void exchange(const int* x, int* out) {
    int v = x[threadIdx.x];
    while (v != 1000)  // BUG
        v = __shfl_xor_sync(0xffffffffu, v, 1);  // BUG
    out[threadIdx.x] = v;
}
""",
        kernel_name="exchange",
        make=lambda rng: {"x": np.arange(32, dtype=np.int32), "out": empty(32, dtype=np.int32)},
        grid=(1,),
        block=(32,),
        kind="KernelTimeout",
    ),
    BugCase(
        name="only_arithmetic",
        code=r"""
// From 0, halving stays at 0.
extern "C" __global__ void collatz(const unsigned* x, unsigned* out) {
    unsigned v = x[threadIdx.x], steps = 0;  // BUG
    while (v != 1) {  // BUG
        v = v % 2 ? 3 * v + 1 : v / 2;  // BUG
        steps++;  // BUG
    }
    out[threadIdx.x] = steps;
}
""",
        kernel_name="collatz",
        make=lambda rng: {"x": np.array([7, 27, 0, 3], np.uint32), "out": empty(4, dtype=np.uint32)},
        grid=(1,),
        block=(4,),
        kind="KernelTimeout",
        thread=(2, 0, 0),
    ),
    BugCase(
        name="float_counter_stands_still",
        code=r"""
// 16,777,216 + 1 is 16,777,216 in float.
extern "C" __global__ void count(float* out, float limit) {
    float i = 16777000.0f, sum = 0.0f;
    while (i < limit) {  // BUG
        sum += 0.5f;  // BUG
        i += 1.0f;  // BUG
    }
    *out = sum;
}
""",
        kernel_name="count",
        make=lambda rng: {"out": empty(1), "limit": np.float32(16777300)},
        grid=(1,),
        block=(1,),
        kind="KernelTimeout",
    ),
    BugCase(
        name="list_with_a_cycle",
        code=r"""
extern "C" __global__ void length(const int* next, int* out) {
    int count = 0;
    for (int node = 0; node >= 0; node = next[node])  // BUG
        count++;  // BUG
    *out = count;
}
""",
        kernel_name="length",
        make=lambda rng: {"next": np.array([3, 4, -1, 1, 3], np.int32), "out": empty(1, dtype=np.int32)},
        grid=(1,),
        block=(1,),
        kind="KernelTimeout",
    ),
    BugCase(
        name="bisection_that_does_not_shrink",
        code=r"""
extern "C" __global__ void find(const int* x, const int* wanted, int* out, int n) {
    int low = 0, high = n;
    while (low < high) {  // BUG
        int middle = (low + high) / 2;  // BUG
        if (x[middle] < wanted[threadIdx.x]) low = middle;  // BUG
        else high = middle;  // BUG
    }
    out[threadIdx.x] = low;
}
""",
        kernel_name="find",
        make=lambda rng: {
            "x": np.arange(0, 40, 2, dtype=np.int32),
            "wanted": np.array([0, 0, 0, 13, 0], np.int32),
            "out": empty(5, dtype=np.int32),
            "n": np.int32(20),
        },
        grid=(1,),
        block=(5,),
        kind="KernelTimeout",
        thread=(3, 0, 0),
    ),
    BugCase(
        name="shared_flag_never_set",
        code=r"""
extern "C" __global__ void until_done(const int* x, int* out) {
    __shared__ int done;
    int t = threadIdx.x, rounds = 0;
    if (t == 0) done = 0;
    do {
        __syncthreads();  // BUG
        if (x[t] == 99) done = 1;  // BUG
        rounds++;  // BUG
        __syncthreads();  // BUG
    } while (!done);  // BUG
    out[t] = rounds;
}
""",
        kernel_name="until_done",
        make=lambda rng: {"x": np.arange(40, dtype=np.int32), "out": empty(40, dtype=np.int32)},
        grid=(1,),
        block=(40,),
        kind="KernelTimeout",
    ),
    BugCase(
        name="lock_held_across_syncwarp",
        code=r"""
// The holder waits for its warp, and its warp for the lock.
extern "C" __global__ void deposit(int* lock, int* balance) {
    while (atomicCAS(lock, 0, 1) != 0) {  // BUG
    }
    __syncwarp();  // BUG
    *balance += 1;
    atomicExch(lock, 0);
}
""",
        kernel_name="deposit",
        make=lambda rng: {"lock": np.zeros(1, np.int32), "balance": np.zeros(1, np.int32)},
        grid=(1,),
        block=(32,),
        kind="KernelTimeout",
    ),
    BugCase(
        name="lock_taken_twice",
        code=r"""
__device__ void take(int* lock) {
    while (atomicCAS(lock, 0, 1) != 0) {  // BUG
    }
}
extern "C" __global__ void deposit(int* lock, int* balance) {
    take(lock);
    *balance += 1;
    take(lock);  // BUG
    atomicExch(lock, 0);
}
""",
        kernel_name="deposit",
        make=lambda rng: {"lock": np.zeros(1, np.int32), "balance": np.zeros(1, np.int32)},
        grid=(1,),
        block=(1,),
        kind="KernelTimeout",
    ),
    BugCase(
        name="waiting_for_a_later_block",
        code=r"""
// More blocks wait than any card runs at once, all of them for the last.
extern "C" __global__ void chain(int* done) {
    if (blockIdx.x == gridDim.x - 1) atomicExch(done, 1);
    else
        while (atomicAdd(done, 0) == 0) {  // BUG
        }
}
""",
        kernel_name="chain",
        make=lambda rng: {"done": np.zeros(1, np.int32)},
        grid=(20_000,),
        block=(1,),
        kind="KernelTimeout",
    ),
]
