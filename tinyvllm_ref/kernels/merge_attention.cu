// Two partial attention results over different keys become one.
//
// Launch: grid (R), any one-dimensional block. A block merges one row; a thread takes columns of it.
// Reads out_a, out_b (R, D) float32: weighted means of values; lse_a, lse_b (R,) float32: log of the sums of their
// weights, -infinity where there were no keys (and then out_a or out_b is not looked at).
// Writes out (R, D), lse (R,) float32.
#include "merge.cuh"

extern "C" __global__ void merge_attention(const float* out_a, const float* lse_a, const float* out_b,
                                           const float* lse_b, float* out, float* lse, int width) {
    size_t row = blockIdx.x;
    Merge weights = merge_weights(lse_a[row], lse_b[row]);
    for (int d = threadIdx.x; d < width; d += blockDim.x)
        out[row * width + d] = merge_values(weights, out_a[row * width + d], out_b[row * width + d]);
    if (threadIdx.x == 0) lse[row] = weights.lse;
}
