// Puts the keys and values of new tokens into their slots of one layer's cache.
//
// Launch: grid (T), any one-dimensional block. A block writes one token; a thread takes columns of it.
// Reads k, v (T, Hk * D) float32, slots (T,) int64. Writes key_cache, value_cache (NB * BS, Hk * D) bf16 at the
// row slots[token] = block * BS + offset. A negative slot is skipped (a token that pads the batch).
#include "common.cuh"

extern "C" __global__ void kv_write(const float* k, const float* v, const long long* slots, bf16* key_cache,
                                    bf16* value_cache, int width) {
    long long slot = slots[blockIdx.x];
    if (slot < 0) return;
    size_t from = (size_t)blockIdx.x * width, to = (size_t)slot * width;
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        key_cache[to + c] = float_to_bf16(k[from + c]);
        value_cache[to + c] = float_to_bf16(v[from + c]);
    }
}
