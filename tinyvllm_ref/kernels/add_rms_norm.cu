// The residual connection and the norm that follows it, in one pass over memory less than apart:
// residual += x, then out = rms_norm(residual).
//
// Launch: grid (T), any one-dimensional block, 4 bytes of dynamic shared memory a thread. A block works on a row;
// thread t takes the columns t, t + blockDim.x, ... It reads back only what it wrote itself.
// Reads x (T, H) float32, weight (H,) bf16. Adds to residual (T, H) float32. Writes out (T, H) bf16.
#include "common.cuh"

extern "C" __global__ void add_rms_norm(const float* x, float* residual, const bf16* weight, bf16* out, int hidden,
                                        float eps) {
    extern __shared__ float scratch[];
    const float* row = x + (size_t)blockIdx.x * hidden;
    float* stream = residual + (size_t)blockIdx.x * hidden;
    bf16* to = out + (size_t)blockIdx.x * hidden;
    float squares = 0.0f;
    for (int c = threadIdx.x; c < hidden; c += blockDim.x) {
        float sum = stream[c] + row[c];
        stream[c] = sum;
        squares += sum * sum;
    }
    float scale = rsqrtf(block_sum(squares, scratch) / hidden + eps);
    for (int c = threadIdx.x; c < hidden; c += blockDim.x)
        to[c] = float_to_bf16(stream[c] * scale * bf16_to_float(weight[c]));
}
