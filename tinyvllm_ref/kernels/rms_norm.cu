// RMS normalisation of rows: out = x / sqrt(mean(x^2) + eps) * weight.
//
// Launch: grid (T), any one-dimensional block, 4 bytes of dynamic shared memory a thread. A block works on a row;
// thread t takes the columns t, t + blockDim.x, ..., twice: for the sum of squares, and to write.
// Reads x (T, H) float32, weight (H,) bf16. Writes out (T, H) bf16.
#include "common.cuh"

extern "C" __global__ void rms_norm(const float* x, const bf16* weight, bf16* out, int hidden, float eps) {
    extern __shared__ float scratch[];
    const float* row = x + (size_t)blockIdx.x * hidden;
    bf16* to = out + (size_t)blockIdx.x * hidden;
    float squares = 0.0f;
    for (int c = threadIdx.x; c < hidden; c += blockDim.x) squares += row[c] * row[c];
    float scale = rsqrtf(block_sum(squares, scratch) / hidden + eps);
    for (int c = threadIdx.x; c < hidden; c += blockDim.x)
        to[c] = float_to_bf16(row[c] * scale * bf16_to_float(weight[c]));
}
