// The keys and values of one request, copied from its blocks to arrays without gaps: for an attention function that
// knows nothing of pages.
//
// Launch: grid (m), any one-dimensional block. A block copies one token; a thread takes columns of it.
// Reads key_cache, value_cache (NB, BS, Hk * D) bf16, block_table (max_blocks,) int32. Writes k, v (m, Hk * D) bf16.
#include "common.cuh"

extern "C" __global__ void gather_kv(const bf16* key_cache, const bf16* value_cache, const int* block_table, bf16* k,
                                     bf16* v, int block_size, int width) {
    int j = blockIdx.x;
    size_t slot = (size_t)block_table[j / block_size] * block_size + j % block_size;
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        k[(size_t)j * width + c] = key_cache[slot * width + c];
        v[(size_t)j * width + c] = value_cache[slot * width + c];
    }
}
