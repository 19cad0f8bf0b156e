// Reads an array as fast as the memory gives it, and does next to nothing with it: the exclusive or of its words.
//
// Launch: grid (any), any one-dimensional block. A thread takes words of 16 bytes a grid's width apart, DEPTH of them
// in flight at a time: neighbours in a warp read neighbours in memory.
// Reads x (words,) of 16 bytes; writes out (threads of the grid,) uint32.
#define DEPTH 8

__device__ __forceinline__ unsigned fold(uint4 v) { return v.x ^ v.y ^ v.z ^ v.w; }

// Kept out of the first-level cache: no word is read twice.
__device__ __forceinline__ uint4 read_once(const uint4* from) {
#ifdef __CUDA_ARCH__
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
#else
    return *from;
#endif
}

extern "C" __global__ void read_memory(const uint4* x, unsigned* out, long long words) {
    long long step = (long long)gridDim.x * blockDim.x;
    long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned found = 0;
    long long k = first;
    for (; k + (DEPTH - 1) * step < words; k += DEPTH * step) {
        uint4 v[DEPTH];
#pragma unroll
        for (int d = 0; d < DEPTH; d++) v[d] = read_once(x + k + d * step);
#pragma unroll
        for (int d = 0; d < DEPTH; d++) found ^= fold(v[d]);
    }
    for (; k < words; k += step) found ^= fold(read_once(x + k));
    out[first] = found;
}
