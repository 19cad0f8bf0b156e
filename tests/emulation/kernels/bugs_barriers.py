"""Barriers that not all threads reach, and warp functions that miss a lane which their mask names."""

from __future__ import annotations

import numpy as np

from .case import BugCase, empty, normal

CASES = [
    BugCase(
        name="barrier_in_a_branch",
        code=r"""
extern "C" __global__ void copy(const float* x, float* out, int n) {
    __shared__ float s[64];
    int t = threadIdx.x;
    if (t < n) {
        s[t] = x[t];
        __syncthreads();  // BUG
    }
    if (t < n) out[t] = s[n - 1 - t];
    __syncthreads();  // OTHER
}
""",
        kernel_name="copy",
        make=lambda rng: {"x": normal(rng, 50), "out": empty(50), "n": np.int32(50)},
        grid=(1,),
        block=(64,),
        kind="BarrierDivergence",
    ),
    BugCase(
        name="barrier_in_reduction_branch",
        code=r"""
extern "C" __global__ void sum(const float* x, float* out) {
    __shared__ float s[64];
    int t = threadIdx.x;
    s[t] = x[t];
    __syncthreads();  // OTHER
    for (int k = 32; k > 0; k >>= 1)
        if (t < k) {
            s[t] += s[t + k];
            __syncthreads();  // BUG
        }
    __syncthreads();  // OTHER
    out[t] = s[0];
}
""",
        kernel_name="sum",
        make=lambda rng: {"x": normal(rng, 64), "out": empty(64)},
        grid=(1,),
        block=(64,),
        kind="BarrierDivergence",
    ),
    BugCase(
        name="loops_of_different_lengths",
        code=r"""
extern "C" __global__ void rounds(const float* x, float* out, int n) {
    __shared__ float s[32];
    int t = threadIdx.x;
    float sum = 0.0f;
    for (int i = t; i < n; i += blockDim.x) {
        s[t] = x[i];
        __syncthreads();  // BUG
        sum += s[t];
    }
    s[t] = sum;
    __syncthreads();  // OTHER
    out[t] = s[31 - t];
}
""",
        kernel_name="rounds",
        make=lambda rng: {"x": normal(rng, 70), "out": empty(32), "n": np.int32(70)},
        grid=(1,),
        block=(32,),
        kind="BarrierDivergence",
    ),
    BugCase(
        name="barriers_of_if_and_else",
        code=r"""
extern "C" __global__ void halves(const float* x, float* out) {
    __shared__ float s[64];
    int t = threadIdx.x;
    if (t < 32) {
        s[t] = x[t];
        __syncthreads();  // BUG
        out[t] = s[t + 32];
    } else {
        s[t] = -x[t];
        __syncthreads();  // OTHER
        out[t] = s[t - 32];
    }
}
""",
        kernel_name="halves",
        make=lambda rng: {"x": normal(rng, 64), "out": empty(64)},
        grid=(1,),
        block=(64,),
        kind="BarrierDivergence",
    ),
    BugCase(
        name="break_before_the_barrier",
        code=r"""
extern "C" __global__ void search(const int* x, int* out, int wanted, int n) {
    __shared__ int where;
    int t = threadIdx.x;
    if (t == 0) where = -1;
    __syncthreads();
    for (int start = 0; start < n; start += blockDim.x) {
        if (x[start + t] == wanted) {
            atomicExch(&where, start + t);
            break;
        }
        __syncthreads();  // BUG
    }
    __syncthreads();  // OTHER
    if (t == 0) *out = where;
}
""",
        kernel_name="search",
        make=lambda rng: {
            "x": np.arange(96, dtype=np.int32),
            "out": empty(1, dtype=np.int32),
            "wanted": np.int32(40),
            "n": np.int32(96),
        },
        grid=(1,),
        block=(32,),
        kind="BarrierDivergence",
    ),
    BugCase(
        name="helper_called_by_some",
        code=r"""
__device__ float block_sum(float v, float* s) {
    int t = threadIdx.x;
    s[t] = v;
    __syncthreads();  // BUG
    for (int k = 24; k > 0; k /= 2) {
        if (t < k) s[t] += s[t + k];
        __syncthreads();  // BUG
        if (k == 3) break;
    }
    return s[0] + s[1] + s[2];
}
extern "C" __global__ void sums(const float* x, float* out, int n) {
    __shared__ float s[48];
    int t = threadIdx.x;
    float v = 0.0f;
    if (t < n) v = block_sum(x[t], s);
    __syncthreads();  // OTHER
    out[t] = v;
}
""",
        kernel_name="sums",
        make=lambda rng: {"x": normal(rng, 48), "out": empty(48), "n": np.int32(47)},
        grid=(1,),
        block=(48,),
        kind="BarrierDivergence",
    ),
    BugCase(
        name="count_against_plain_barrier",
        code=r"""
extern "C" __global__ void count(const float* x, int* out) {
    int t = threadIdx.x, n = 0;
    if (t % 2 == 0)
        n = __syncthreads_count(x[t] > 0.0f);  // BUG
    else
        __syncthreads();  // OTHER
    out[t] = n;
}
""",
        kernel_name="count",
        make=lambda rng: {"x": normal(rng, 40), "out": empty(40, dtype=np.int32)},
        grid=(1,),
        block=(40,),
        kind="BarrierDivergence",
    ),
    BugCase(
        name="one_row_waits",
        code=r"""
extern "C" __global__ void tile(const float* x, float* out) {
    __shared__ float s[4][8];
    int c = threadIdx.x, r = threadIdx.y;
    s[r][c] = x[r * 8 + c];
    if (r == 0) {
        __syncthreads();  // BUG
        s[0][c] *= 2.0f;
    }
    __syncthreads();  // OTHER
    out[r * 8 + c] = s[r][7 - c];
}
""",
        kernel_name="tile",
        make=lambda rng: {"x": normal(rng, 4, 8), "out": empty(4, 8)},
        grid=(1,),
        block=(8, 4),
        kind="BarrierDivergence",
    ),
    BugCase(
        name="syncwarp_waits_for_absent_lanes",
        code=r"""
extern "C" __global__ void half_warp(const float* x, float* out) {
    __shared__ float s[32];
    int lane = threadIdx.x;
    s[lane] = x[lane];
    if (lane < 16) {
        __syncwarp(0xffffffff);  // BUG
        s[lane] += 1.0f;
    }
    __syncthreads();  // OTHER
    out[lane] = s[31 - lane];
}
""",
        kernel_name="half_warp",
        make=lambda rng: {"x": normal(rng, 32), "out": empty(32)},
        grid=(1,),
        block=(32,),
        kind="BarrierDivergence",
    ),
    BugCase(
        name="full_mask_in_a_branch",
        code=r"""
extern "C" __global__ void sum16(const float* x, float* out) {
    int lane = threadIdx.x;
    float v = x[lane];
    if (lane < 16)
        v += __shfl_down_sync(0xffffffff, v, 8);  // BUG
    __syncthreads();  // OTHER
    out[lane] = v;
}
""",
        kernel_name="sum16",
        make=lambda rng: {"x": normal(rng, 32), "out": empty(32)},
        grid=(1,),
        block=(32,),
        kind="BarrierDivergence",
    ),
    BugCase(
        name="shuffle_against_barrier",
        code=r"""
extern "C" __global__ void mixed(const int* x, int* out) {
    int t = threadIdx.x, v = x[t];
    if (t % 32 < 31)
        __syncthreads();  // OTHER
    else
        v = __shfl_sync(0xffffffffu, v, 0);  // BUG
    out[t] = v;
}
""",
        kernel_name="mixed",
        make=lambda rng: {"x": np.arange(64, dtype=np.int32), "out": empty(64, dtype=np.int32)},
        grid=(1,),
        block=(64,),
        kind="BarrierDivergence",
    ),
    BugCase(
        name="masks_disagree",
        code=r"""
extern "C" __global__ void groups(const int* x, int* out) {
    int lane = threadIdx.x, v = x[lane];
    if (lane < 16)
        v = __shfl_sync(0xffffffffu, v, 3);  // BUG
    else
        v = __shfl_sync(0xffff0000u, v, 20);  // OTHER
    __syncthreads();  // OTHER
    out[lane] = v;
}
""",
        kernel_name="groups",
        make=lambda rng: {"x": np.arange(32, dtype=np.int32), "out": empty(32, dtype=np.int32)},
        grid=(1,),
        block=(32,),
        kind="BarrierDivergence",
    ),
    BugCase(
        name="mask_without_the_caller",
        code=r"""
extern "C" __global__ void broadcast(const int* x, int* out) {
    int lane = threadIdx.x;
    out[lane] = __shfl_sync(0x0000ffffu, x[lane], 0);  // BUG
}
""",
        kernel_name="broadcast",
        make=lambda rng: {"x": np.arange(17, dtype=np.int32), "out": empty(17, dtype=np.int32)},
        grid=(1,),
        block=(17,),
        kind="BarrierDivergence",
        thread=(16, 0, 0),
    ),
    BugCase(
        name="ballot_in_a_short_circuit",
        code=r"""
// The right-hand side of && is not reached by all lanes.
extern "C" __global__ void vote(const int* x, int* out) {
    int t = threadIdx.x;
    bool odd = x[t] % 2;
    bool all = odd && __all_sync(0xffffffffu, x[t] > 0);  // BUG
    __syncwarp();  // OTHER
    out[t] = all;
}
""",
        kernel_name="vote",
        make=lambda rng: {"x": np.arange(32, dtype=np.int32), "out": empty(32, dtype=np.int32)},
        grid=(1,),
        block=(32,),
        kind="BarrierDivergence",
    ),
    BugCase(
        name="reduction_of_an_uneven_row",
        code=r"""
// A warp a row; lanes with no element in the last round do not come to the shuffle.
extern "C" __global__ void rows(const float* x, float* out, int width) {
    int lane = threadIdx.x;
    float total = 0.0f;
    for (int c = lane; c < width; c += 32) {
        float v = x[c];
        for (int offset = 16; offset > 0; offset >>= 1)
            v += __shfl_xor_sync(0xffffffffu, v, offset);  // BUG
        total += v;
    }
    __syncwarp();  // OTHER
    out[lane] = total;
}
""",
        kernel_name="rows",
        make=lambda rng: {"x": normal(rng, 45), "out": empty(32), "width": np.int32(45)},
        grid=(1,),
        block=(32,),
        kind="BarrierDivergence",
    ),
]
