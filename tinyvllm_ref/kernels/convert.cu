// Whole arrays between float32 and bfloat16.
//
// Launch: grid (any), any one-dimensional block. A thread takes elements a grid's width apart.
// Reads x (n,), writes out (n,).
#include "common.cuh"

extern "C" __global__ void convert_to_bf16(const float* x, bf16* out, long long n) {
    long long step = (long long)gridDim.x * blockDim.x;
    for (long long k = (long long)blockIdx.x * blockDim.x + threadIdx.x; k < n; k += step)
        out[k] = float_to_bf16(x[k]);
}

extern "C" __global__ void convert_to_float(const bf16* x, float* out, long long n) {
    long long step = (long long)gridDim.x * blockDim.x;
    for (long long k = (long long)blockIdx.x * blockDim.x + threadIdx.x; k < n; k += step)
        out[k] = bf16_to_float(x[k]);
}
