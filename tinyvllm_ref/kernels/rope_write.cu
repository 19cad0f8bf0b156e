// Between the product of the stacked query, key and value weights and the attention of a prefill: rotary embedding of
// queries and keys, and the write of the new keys and values to the cache, in one pass.
//
// Launch: grid (T), any one-dimensional block, D floats of dynamic shared memory. A block works on one token; a thread
// takes pairs of columns (i, i + D/2) of a head, then columns of the values.
// Reads qkv (T, (Hq + 2 Hk) * D) float32, positions (T,) int32, inv_freq (D/2,) float32, slots (T,) int64. Writes
// q (T, Hq, D) float32, and key_cache and value_cache (NB * BS, Hk, D) bf16 at the row slots[token] = block * BS +
// offset. A token with a negative slot pads the batch: nothing of it is written.
#include "common.cuh"

extern "C" __global__ void rope_write(const float* qkv, const int* positions, const float* inv_freq,
                                      const long long* slots, float* q, bf16* key_cache, bf16* value_cache, int q_heads,
                                      int kv_heads, int half) {
    extern __shared__ float turns[];  // cosines, then sines
    long long slot = slots[blockIdx.x];
    if (slot < 0) return;
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        float angle = (float)positions[blockIdx.x] * inv_freq[i];
        turns[i] = cosf(angle);
        turns[half + i] = sinf(angle);
    }
    __syncthreads();
    int width = 2 * half;
    const float* row = qkv + (size_t)blockIdx.x * (q_heads + 2 * kv_heads) * width;
    float* queries = q + (size_t)blockIdx.x * q_heads * width;
    bf16* keys = key_cache + (size_t)slot * kv_heads * width;
    bf16* values = value_cache + (size_t)slot * kv_heads * width;
    for (int p = threadIdx.x; p < (q_heads + kv_heads) * half; p += blockDim.x) {
        int head = p / half, i = p % half;
        const float* pair = row + (size_t)head * width + i;
        float a = pair[0], b = pair[half], cosine = turns[i], sine = turns[half + i];
        float lower = a * cosine - b * sine, upper = b * cosine + a * sine;
        if (head < q_heads) {
            queries[head * width + i] = lower;
            queries[head * width + half + i] = upper;
        } else {
            keys[(head - q_heads) * width + i] = float_to_bf16(lower);
            keys[(head - q_heads) * width + half + i] = float_to_bf16(upper);
        }
    }
    const float* new_values = row + (size_t)(q_heads + kv_heads) * width;
    for (int c = threadIdx.x; c < kv_heads * width; c += blockDim.x) values[c] = float_to_bf16(new_values[c]);
}
