// What several kernels use. The loader pastes these files in place of the #include lines.
#include "bf16.cuh"
#include "block_sum.cuh"

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

// The largest value of a block's threads, as block_sum gives their sum. A NaN is passed over.
__device__ __forceinline__ float block_max(float value, float* scratch) {
    unsigned t = threadIdx.x;
    scratch[t] = value;
    __syncthreads();
    for (unsigned active = blockDim.x; active > 1;) {
        unsigned half = (active + 1) / 2;
        if (t + half < active) scratch[t] = fmaxf(scratch[t], scratch[t + half]);
        __syncthreads();
        active = half;
    }
    float largest = scratch[0];
    __syncthreads();
    return largest;
}

// Eight bfloat16 that lie side by side, as float32, by one 16-byte load: `from` is a multiple of 16 bytes.
__device__ __forceinline__ void load8(const bf16* from, float* to) {
    uint4 raw = *(const uint4*)from;
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        to[2 * k] = __uint_as_float(words[k] << 16);              // the lower half comes first in memory
        to[2 * k + 1] = __uint_as_float(words[k] & 0xffff0000u);
    }
}

// The same by the number of columns: eight, two by one load of 4 bytes, or one.
__device__ __forceinline__ void load_columns(const bf16* from, float (&to)[8]) { load8(from, to); }

__device__ __forceinline__ void load_columns(const bf16* from, float (&to)[2]) {
    unsigned raw = *(const unsigned*)from;
    to[0] = __uint_as_float(raw << 16);
    to[1] = __uint_as_float(raw & 0xffff0000u);
}

__device__ __forceinline__ void load_columns(const bf16* from, float (&to)[1]) { to[0] = bf16_to_float(*from); }
