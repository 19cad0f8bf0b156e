// Attention over keys in a fixed order, the same in every kernel that includes this file.
//
// The keys of a query come in tiles of TILE, numbered from its sequence's first key, with an online softmax; SPLIT
// keys make one partial result, and the partial results are merged from the first to the last. What is computed for
// a query thus depends on its own keys alone: not on the batch, nor on whether it came in a prefill, in a chunk of
// one, or in a decode step. HEAD_DIM is given to the compiler.
#include "common.cuh"
#include "merge.cuh"

#define TILE 64
#define SPLIT 256  // four tiles
#define PADDED ((HEAD_DIM + 7) / 8 * 8)  // columns of a query, with zeros up to a multiple of 8

// Eight columns of a key or value from column `first` on; zeros where there are no more.
__device__ __forceinline__ void load_eight(const bf16* from, int first, float* to) {
#if HEAD_DIM % 8 == 0
    load8(from + first, to);
#else
#pragma unroll
    for (int l = 0; l < 8; l++) to[l] = first + l < HEAD_DIM ? bf16_to_float(from[first + l]) : 0.0f;
#endif
}

// Column d of a dot product is added to sum d % 8, and the eight sums at the end as a tree: eight independent chains
// of additions instead of a long one.
__device__ __forceinline__ float add_lanes(const float* lane) {
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}
