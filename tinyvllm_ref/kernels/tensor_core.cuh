// Small matrix products by a whole warp, on tensor cores: sum (16 x 8, float32) += a (16 x 16) b (16 x 8), both bf16.
//
// A matrix is spread over the 32 lanes; a register of 32 bits holds two bf16, the lower half first. With
// row = lane / 4 and pair = lane % 4 * 2, a lane holds (PTX ISA, "Matrix fragments for mma.m16n8k16"):
//
//   a[0]: a[row][pair], a[row][pair + 1]              b[0]: b[pair][row], b[pair + 1][row]
//   a[1]: a[row + 8][pair], a[row + 8][pair + 1]      b[1]: b[pair + 8][row], b[pair + 9][row]
//   a[2], a[3]: the same in columns 8 to 15
//   sum[0], sum[1]: sum[row][pair], sum[row][pair + 1]; sum[2], sum[3]: the same of row + 8
//
// A lane thus has of a sum what it must give as an a, rounded and packed: the product of a product needs no exchange.
// bf16 products came with compute capability 8.0. Elsewhere the lanes hand each other what they hold, by shuffles,
// and each adds up its own four sums: the same numbers but for the order of the additions, many times slower.
// All 32 lanes of a warp must call these functions together.
#include "bf16.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define HAS_BF16_PRODUCTS 1
#define PRODUCT __forceinline__
#else
#define HAS_BF16_PRODUCTS 0
#define PRODUCT __noinline__  // hundreds of copies would take the compiler long
#endif
#define WHOLE_WARP 0xffffffffu

// Two numbers, rounded to bf16: `low` comes first in memory.
__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
#if HAS_BF16_PRODUCTS
    unsigned packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
#else
    return (unsigned)float_to_bf16(low) | (unsigned)float_to_bf16(high) << 16;
#endif
}

#if !HAS_BF16_PRODUCTS
// What `lane` has in two registers.
__device__ __forceinline__ void from_lane(int lane, unsigned x, unsigned y, float (&to)[4]) {
    unsigned long long both = __shfl_sync(WHOLE_WARP, (unsigned long long)y << 32 | x, lane);
#pragma unroll
    for (int k = 0; k < 4; k++) to[k] = bf16_to_float((bf16)(both >> 16 * k));
}

// The address that `lane` gave.
__device__ __forceinline__ const bf16* address_from_lane(int lane, const bf16* address) {
    return (const bf16*)__shfl_sync(WHOLE_WARP, (unsigned long long)address, lane);
}
#endif

// sum += a b
__device__ PRODUCT void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if HAS_BF16_PRODUCTS
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    int lane = threadIdx.x % 32, quad = lane / 4 * 4, column = lane % 4 * 2;
    for (int k = 0; k < 4; k++) {                               // columns 2 k, 2 k + 1, 2 k + 8 and 2 k + 9 of a
        float upper[4], lower[4], left[4], right[4];
        from_lane(quad + k, a[0], a[2], upper);                 // row lane / 4 of a,
        from_lane(quad + k, a[1], a[3], lower);                 // and that 8 below
        from_lane(column * 4 + k, b0, b1, left);                // this lane's first column of b,
        from_lane(column * 4 + 4 + k, b0, b1, right);           // and its second
        for (int l = 0; l < 4; l++) {
            sum[0] += upper[l] * left[l];
            sum[1] += upper[l] * right[l];
            sum[2] += lower[l] * left[l];
            sum[3] += lower[l] * right[l];
        }
    }
#endif
}

// Four matrices of 8 x 8 from shared memory, one a register: lane 8 i + r gives the address of row r of matrix i,
// 8 bf16 from a multiple of 16 bytes on. A lane gets columns lane % 4 * 2 and the next of row lane / 4.
__device__ PRODUCT void load_matrices(unsigned (&to)[4], const bf16* row) {
#if HAS_BF16_PRODUCTS
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"((unsigned)__cvta_generic_to_shared(row))
                 : "memory");
#else
    int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; i++) to[i] = ((const unsigned*)address_from_lane(8 * i + lane / 4, row))[lane % 4];
#endif
}

// The same, transposed on the way: a lane gets rows lane % 4 * 2 and the next of column lane / 4.
__device__ PRODUCT void load_transposed(unsigned (&to)[4], const bf16* row) {
#if HAS_BF16_PRODUCTS
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"((unsigned)__cvta_generic_to_shared(row))
                 : "memory");
#else
    int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; i++) {
        const bf16* first = address_from_lane(8 * i + lane % 4 * 2, row);
        const bf16* second = address_from_lane(8 * i + lane % 4 * 2 + 1, row);
        to[i] = (unsigned)first[lane / 4] | (unsigned)second[lane / 4] << 16;
    }
#endif
}
