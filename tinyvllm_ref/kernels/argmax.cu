// The index of the largest number of each row, in two passes: a row of 128,256 logits is too much for one block.
// The lowest index wins a tie, and a NaN counts as larger than any number, as NumPy has it.
//
// Launch of pass 1, argmax_parts: grid (parts, R), any one-dimensional block, 8 bytes of dynamic shared memory a
// thread. A block looks at `part` columns of a row; thread t at each blockDim.x-th of them.
// Reads logits (R, V) float32. Writes values (R, parts) float32, indices (R, parts) int32.
//
// Launch of pass 2, argmax_merge: grid (R), block and shared memory as above. A block looks at the parts of a row.
// Reads values, indices (R, parts). Writes out (R,) int32.
#include "argmax.cuh"
#include "common.cuh"

// The best of a block's threads, known to thread 0.
__device__ __forceinline__ Candidate block_best(Candidate mine, Candidate* scratch) {
    unsigned t = threadIdx.x;
    scratch[t] = mine;
    __syncthreads();
    for (unsigned active = blockDim.x; active > 1;) {
        unsigned half = (active + 1) / 2;
        if (t + half < active) scratch[t] = better(scratch[t], scratch[t + half]);
        __syncthreads();
        active = half;
    }
    return scratch[0];
}

extern "C" __global__ void argmax_parts(const float* logits, float* values, int* indices, int vocab, int part) {
    extern __shared__ Candidate scratch[];
    const float* row = logits + (size_t)blockIdx.y * vocab;
    int begin = blockIdx.x * part, end = min(vocab, begin + part);
    Candidate best = {0.0f, -1};
    for (int c = begin + threadIdx.x; c < end; c += blockDim.x) best = better(best, Candidate{row[c], c});
    best = block_best(best, scratch);
    if (threadIdx.x == 0) {
        values[(size_t)blockIdx.y * gridDim.x + blockIdx.x] = best.value;
        indices[(size_t)blockIdx.y * gridDim.x + blockIdx.x] = best.index;
    }
}

extern "C" __global__ void argmax_merge(const float* values, const int* indices, int* out, int parts) {
    extern __shared__ Candidate scratch[];
    size_t row = (size_t)blockIdx.x * parts;
    Candidate best = {0.0f, -1};
    for (int c = threadIdx.x; c < parts; c += blockDim.x) best = better(best, Candidate{values[row + c], indices[row + c]});
    best = block_best(best, scratch);
    if (threadIdx.x == 0) out[blockIdx.x] = best.index;
}
