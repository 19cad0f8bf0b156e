// The gate of the feed-forward block (SwiGLU): out = silu(gate) * up, silu(x) = x / (1 + exp(-x)).
//
// Launch: grid (any, T), any one-dimensional block. The blocks of one blockIdx.y share a row; a thread takes columns
// of it, a grid's width apart.
// Reads gate_up (T, 2F) float32, each row the F gates and then the F ups. Writes out (T, F) bf16.
#include "common.cuh"

extern "C" __global__ void silu_mul(const float* gate_up, bf16* out, int tokens, int ffn) {
    for (int token = blockIdx.y; token < tokens; token += gridDim.y) {
        const float* gate = gate_up + (size_t)token * 2 * ffn;
        const float* up = gate + ffn;
        bf16* to = out + (size_t)token * ffn;
        for (int c = blockIdx.x * blockDim.x + threadIdx.x; c < ffn; c += gridDim.x * blockDim.x) {
            float x = gate[c];
            // exp(-x) is infinity for a very negative x, and x / infinity is the 0 that is right.
            to[c] = float_to_bf16(x / (1.0f + expf(-x)) * up[c]);
        }
    }
}
