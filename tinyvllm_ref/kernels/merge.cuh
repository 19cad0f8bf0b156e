// How two partial attention results become one: out = a * out_a + b * out_b.
//
// A partial result is the weighted mean of some values, with the logarithm of the sum of their weights; one of no
// keys has -infinity, and two of these give another.
#include "common.cuh"

struct Merge {
    float a, b, lse;
};

__device__ __forceinline__ Merge merge_weights(float lse_a, float lse_b) {
    float peak = fmaxf(lse_a, lse_b);
    if (peak == -infinity()) return {0.0f, 0.0f, peak};
    float a = expf(lse_a - peak), b = expf(lse_b - peak), sum = a + b;
    return {a / sum, b / sum, peak + logf(sum)};
}

// The value of an empty partial result is not looked at: it may be anything.
__device__ __forceinline__ float merge_values(Merge weights, float out_a, float out_b) {
    if (weights.a == 0.0f) return weights.b == 0.0f ? 0.0f : weights.b * out_b;
    return weights.b == 0.0f ? weights.a * out_a : weights.a * out_a + weights.b * out_b;
}
