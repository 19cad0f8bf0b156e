// Rotary position embedding, in place: the pair of columns (i, i + D/2) of each head is turned by the angle
// position * inv_freq[i]. The checkpoints of this family were trained with these half-split pairs.
//
// Launch: grid (any), any one-dimensional block. A thread takes a (token, i): it computes one angle and turns that
// pair in every head of q and k.
// Reads positions (T,) int32, inv_freq (D/2,) float32. Changes q (T, Hq, D) and k (T, Hk, D) float32.
#include "common.cuh"

__device__ __forceinline__ void rotate(float* row, int heads, int half, int i, float cosine, float sine) {
    for (int head = 0; head < heads; head++) {
        float* pair = row + (size_t)head * 2 * half + i;
        float a = pair[0], b = pair[half];  // both are read before either is overwritten
        pair[0] = a * cosine - b * sine;
        pair[half] = b * cosine + a * sine;
    }
}

extern "C" __global__ void rope(float* q, float* k, const int* positions, const float* inv_freq, int tokens,
                                int q_heads, int k_heads, int half) {
    long long pairs = (long long)tokens * half;
    for (long long p = (long long)blockIdx.x * blockDim.x + threadIdx.x; p < pairs;
         p += (long long)gridDim.x * blockDim.x) {
        int token = (int)(p / half), i = (int)(p % half);
        float angle = (float)positions[token] * inv_freq[i];
        float cosine = cosf(angle), sine = sinf(angle);
        rotate(q + (size_t)token * q_heads * 2 * half, q_heads, half, i, cosine, sine);
        rotate(k + (size_t)token * k_heads * 2 * half, k_heads, half, i, cosine, sine);
    }
}
