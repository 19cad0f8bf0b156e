// The rows of a table, by token id.
//
// Launch: grid (T), any one-dimensional block. A block copies the row of one token; a thread converts eight
// elements at a time with one 16-byte load, then single ones of what is left.
// Reads ids (T,) int32, table (V, H) bf16. Writes out (T, H) float32.
// An id outside of the vocabulary gives a row of NaN.
#include "common.cuh"

extern "C" __global__ void embedding(const int* ids, const bf16* table, float* out, int vocab, int hidden) {
    int id = ids[blockIdx.x];
    float* to = out + (size_t)blockIdx.x * hidden;
    if (id < 0 || id >= vocab) {
        for (int c = threadIdx.x; c < hidden; c += blockDim.x) to[c] = __uint_as_float(0x7fc00000u);
        return;
    }
    const bf16* from = table + (size_t)id * hidden;
    // A row is a multiple of 16 bytes from the table's start only where its width is a multiple of 8.
    int vectors = hidden % 8 == 0 ? hidden / 8 : 0;
    for (int k = threadIdx.x; k < vectors; k += blockDim.x) {
        float values[8];
        load8(from + 8 * k, values);
        ((float4*)to)[2 * k] = make_float4(values[0], values[1], values[2], values[3]);
        ((float4*)to)[2 * k + 1] = make_float4(values[4], values[5], values[6], values[7]);
    }
    for (int c = 8 * vectors + threadIdx.x; c < hidden; c += blockDim.x) to[c] = bf16_to_float(from[c]);
}
