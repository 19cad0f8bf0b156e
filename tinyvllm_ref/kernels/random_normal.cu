// Normally distributed bfloat16, a function of the seed and of an element's number alone: the same on every device
// and with every grid, but for the last places of logf, cosf and sinf.
//
// Launch: grid (any), any one-dimensional block. A thread takes groups of eight elements a grid's width apart.
// Reads nothing; writes out (n,), which begins at a multiple of 16 bytes.
#include "bf16.cuh"

#define EACH 8

// A number that looks random, from any number: splitmix64's finaliser (Steele, Lea and Flood, 2014).
__device__ __forceinline__ unsigned long long mix(unsigned long long x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

// Two independent draws, from the 64 bits of one number (Box and Muller, 1958). The first uniform is above 0, so that
// its logarithm is finite; no draw is further from 0 than 5.8.
__device__ __forceinline__ void normal_pair(unsigned long long bits, float* first, float* second) {
    float u = ((float)(unsigned)(bits >> 40) + 1.0f) * (1.0f / 16777216.0f);
    float angle = (float)((unsigned)bits >> 8) * (6.283185307179586f / 16777216.0f);
    float radius = sqrtf(-2.0f * logf(u));
    *first = radius * cosf(angle);
    *second = radius * sinf(angle);
}

extern "C" __global__ void random_normal(bf16* out, unsigned long long seed, float deviation, long long n) {
    long long step = (long long)gridDim.x * blockDim.x;
    unsigned long long stream = mix(seed + 0x9e3779b97f4a7c15ull);
    for (long long group = (long long)blockIdx.x * blockDim.x + threadIdx.x; group * EACH < n; group += step) {
        unsigned words[EACH / 2];
#pragma unroll
        for (int k = 0; k < EACH / 2; k++) {
            unsigned long long number = (unsigned long long)group * (EACH / 2) + k + 1;
            float first, second;
            normal_pair(mix(stream + number * 0x9e3779b97f4a7c15ull), &first, &second);
            words[k] = (unsigned)float_to_bf16(deviation * first) | (unsigned)float_to_bf16(deviation * second) << 16;
        }
        bf16* to = out + group * EACH;
        if (group * EACH + EACH <= n) {
            *(uint4*)to = make_uint4(words[0], words[1], words[2], words[3]);
        } else {
#pragma unroll
            for (int k = 0; k < EACH; k++)
                if (group * EACH + k < n) to[k] = (bf16)(words[k / 2] >> 16 * (k % 2));
        }
    }
}
