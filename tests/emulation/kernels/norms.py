"""Softmax and normalisation of rows, one block a row."""

from __future__ import annotations

import numpy as np

from .case import (
    BF16_CUDA,
    BF16_TOLERANCE,
    BLOCK_SUM_CUDA,
    KernelCase,
    empty,
    f64,
    from_bf16,
    normal,
    to_bf16,
)

SOFTMAX = (
    BLOCK_SUM_CUDA
    + r"""
__device__ float block_max(float value, float* scratch) {
    scratch[threadIdx.x] = value;
    __syncthreads();
    for (int active = blockDim.x; active > 1;) {
        int half = (active + 1) / 2;
        if (threadIdx.x + half < active)
            scratch[threadIdx.x] = fmaxf(scratch[threadIdx.x], scratch[threadIdx.x + half]);
        __syncthreads();
        active = half;
    }
    float peak = scratch[0];
    __syncthreads();
    return peak;
}
extern "C" __global__ void softmax(const float* x, float* out, int width) {
    extern __shared__ float scratch[];
    const float* row = x + (size_t)blockIdx.x * width;
    float* target = out + (size_t)blockIdx.x * width;
    float peak = -__int_as_float(0x7f800000), sum = 0.0f;
    for (int c = threadIdx.x; c < width; c += blockDim.x) peak = fmaxf(peak, row[c]);
    peak = block_max(peak, scratch);
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        float e = expf(row[c] - peak);
        target[c] = e;
        sum += e;
    }
    sum = block_sum(sum, scratch);
    for (int c = threadIdx.x; c < width; c += blockDim.x) target[c] /= sum;
}
"""
)

ONLINE_SOFTMAX = r"""
struct Running {
    float peak, sum;
};
// Two partial results as one; an empty one has peak -infinity and sum 0.
__device__ __forceinline__ Running merge(Running a, Running b) {
    float peak = fmaxf(a.peak, b.peak);
    if (peak == -__int_as_float(0x7f800000)) return a;
    return {peak, a.sum * __expf(a.peak - peak) + b.sum * __expf(b.peak - peak)};
}
// One pass for the maximum and the sum, one to write; blockDim.x is a multiple of 32.
extern "C" __global__ void online_softmax(const float* x, float* out, int width) {
    __shared__ Running partial[32];
    const float* row = x + blockIdx.x * width;
    Running mine = {-__int_as_float(0x7f800000), 0.0f};
    for (int c = threadIdx.x; c < width; c += blockDim.x) mine = merge(mine, Running{row[c], 1.0f});
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (int offset = 16; offset > 0; offset >>= 1) {
        Running other;
        other.peak = __shfl_xor_sync(0xffffffffu, mine.peak, offset);
        other.sum = __shfl_xor_sync(0xffffffffu, mine.sum, offset);
        mine = merge(mine, other);
    }
    if (lane == 0) partial[warp] = mine;
    __syncthreads();
    Running all = partial[0];
    for (int w = 1; w < warps; w++) all = merge(all, partial[w]);
    for (int c = threadIdx.x; c < width; c += blockDim.x)
        out[blockIdx.x * width + c] = __fdividef(__expf(row[c] - all.peak), all.sum);
}
"""

LAYER_NORM = r"""
// Mean and variance in one pass by Welford's method, merged across a warp; a warp a row, rows in threadIdx.y.
extern "C" __global__ void layer_norm(const float* x, const float* gamma, const float* beta, float* out,
                                      float eps, int rows, int width) {
    int row = blockIdx.x * blockDim.y + threadIdx.y, lane = threadIdx.x;
    if (row >= rows) return;
    float mean = 0.0f, m2 = 0.0f, count = 0.0f;
    for (int c = lane; c < width; c += 32) {
        float v = x[row * width + c], delta = v - mean;
        count += 1.0f;
        mean += delta / count;
        m2 += delta * (v - mean);
    }
    for (int offset = 16; offset > 0; offset /= 2) {
        float other_mean = __shfl_xor_sync(0xffffffff, mean, offset);
        float other_m2 = __shfl_xor_sync(0xffffffff, m2, offset);
        float other_count = __shfl_xor_sync(0xffffffff, count, offset);
        float total = count + other_count, delta = other_mean - mean;
        if (total > 0.0f) {
            // Symmetric in the two sides, so that all lanes agree.
            m2 += other_m2 + delta * delta * count * other_count / total;
            mean = (mean * count + other_mean * other_count) / total;
        }
        count = total;
    }
    float scale = rsqrtf(m2 / width + eps);
    for (int c = lane; c < width; c += 32)
        out[row * width + c] = (x[row * width + c] - mean) * scale * gamma[c] + beta[c];
}
"""

RMS_NORM = (
    BF16_CUDA
    + BLOCK_SUM_CUDA
    + r"""
// x (rows, width) float32, weight (width,) bfloat16 -> out (rows, width) bfloat16.
extern "C" __global__ void rms_norm(const float* x, const bf16* weight, bf16* out, float eps, int width) {
    extern __shared__ float scratch[];
    const float* row = x + (size_t)blockIdx.x * width;
    float squares = 0.0f;
    for (int c = threadIdx.x; c < width; c += blockDim.x) squares += row[c] * row[c];
    float scale = rsqrtf(block_sum(squares, scratch) / width + eps);
    for (int c = threadIdx.x; c < width; c += blockDim.x)
        out[(size_t)blockIdx.x * width + c] = float_to_bf16(row[c] * scale * bf16_to_float(weight[c]));
}
// residual += x in place, then the norm of the residual.
extern "C" __global__ void add_rms_norm(const float* x, float* residual, const bf16* weight, bf16* out,
                                        float eps, int width) {
    extern __shared__ float scratch[];
    const size_t start = (size_t)blockIdx.x * width;
    float squares = 0.0f;
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        float sum = residual[start + c] + x[start + c];
        residual[start + c] = sum;
        squares += sum * sum;
    }
    float scale = rsqrtf(block_sum(squares, scratch) / width + eps);
    for (int c = threadIdx.x; c < width; c += blockDim.x)
        out[start + c] = float_to_bf16(residual[start + c] * scale * bf16_to_float(weight[c]));
}
"""
)

_EPS = np.float32(1e-5)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(f64(x) - f64(x).max(axis=1, keepdims=True))
    return f64(e / e.sum(axis=1, keepdims=True))


def _rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    scale = 1 / np.sqrt((f64(x) ** 2).mean(axis=1, keepdims=True) + float(_EPS))
    return f64(f64(x) * scale * f64(from_bf16(weight)))


def _layer_norm(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray) -> np.ndarray:
    x = f64(x)
    variance = x.var(axis=1, keepdims=True)
    return f64((x - x.mean(axis=1, keepdims=True)) / np.sqrt(variance + float(_EPS)) * gamma + beta)


CASES = [
    *[
        KernelCase(
            name=f"softmax_{threads}_threads",
            code=SOFTMAX,
            kernel_name="softmax",
            make=lambda rng: {
                "x": 30 * normal(rng, 4, 131) + 100,
                "out": empty(4, 131),
                "width": np.int32(131),
            },
            grid=(4,),
            block=(threads,),
            shared_mem=4 * threads,
            expected=lambda a: {"out": _softmax(a.x)},
            tolerance=2e-5,
        )
        for threads in (37, 256)
    ],
    KernelCase(
        name="softmax_online",
        code=ONLINE_SOFTMAX,
        kernel_name="online_softmax",
        make=lambda rng: {"x": 10 * normal(rng, 5, 77), "out": empty(5, 77), "width": np.int32(77)},
        grid=(5,),
        block=(96,),
        expected=lambda a: {"out": _softmax(a.x)},
        tolerance=2e-5,
    ),
    KernelCase(
        name="layer_norm_welford",
        code=LAYER_NORM,
        kernel_name="layer_norm",
        make=lambda rng: {
            "x": normal(rng, 7, 83) * 3 + 5,
            "gamma": normal(rng, 83),
            "beta": normal(rng, 83),
            "out": empty(7, 83),
            "eps": _EPS,
            "rows": np.int32(7),
            "width": np.int32(83),
        },
        grid=(2,),
        block=(32, 4),
        expected=lambda a: {"out": _layer_norm(a.x, a.gamma, a.beta)},
        tolerance=1e-5,
    ),
    KernelCase(
        name="rms_norm_bf16",
        code=RMS_NORM,
        kernel_name="rms_norm",
        make=lambda rng: {
            "x": normal(rng, 5, 203) + 2,
            "weight": to_bf16(normal(rng, 203)),
            "out": empty(5, 203, dtype=np.uint16),
            "eps": _EPS,
            "width": np.int32(203),
        },
        grid=(5,),
        block=(96,),
        shared_mem=4 * 96,
        expected=lambda a: {"out": _rms_norm(a.x, a.weight)},
        tolerance=BF16_TOLERANCE,
    ),
    KernelCase(
        name="add_rms_norm_bf16",
        code=RMS_NORM,
        kernel_name="add_rms_norm",
        make=lambda rng: {
            "x": normal(rng, 3, 157),
            "residual": normal(rng, 3, 157) * 1e-3,
            "weight": to_bf16(normal(rng, 157)),
            "out": empty(3, 157, dtype=np.uint16),
            "eps": _EPS,
            "width": np.int32(157),
        },
        grid=(3,),
        block=(200,),
        shared_mem=4 * 200,
        expected=lambda a: {
            "residual": f64(a.x) + a.residual,
            "out": _rms_norm(f64(a.x) + a.residual, a.weight),
        },
        tolerance=BF16_TOLERANCE,
    ),
]
