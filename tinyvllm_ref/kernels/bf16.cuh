// bfloat16 by its bits, so that no CUDA header is needed: the upper half of a float32.
typedef unsigned short bf16;

__device__ __forceinline__ float bf16_to_float(bf16 bits) {
    return __uint_as_float((unsigned)bits << 16);
}

// To nearest, ties to even. Adding just under half of the last place that stays (and one more where that place is
// odd) carries exactly when the number must be rounded up; a NaN could carry into infinity and is kept apart.
__device__ __forceinline__ bf16 float_to_bf16(float x) {
    unsigned bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bf16)(bits >> 16 | 0x40u);
    return (bf16)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
