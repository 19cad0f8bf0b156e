// Hopper's matrix products by warpgroups (wgmma), and the copies of tiles that feed them. Card only, and only where the
// target is sm_90a, the one architecture that has these products: HAS_WARPGROUP_PRODUCTS says whether.
//
// A tile is rows of 64 bf16, 128 bytes each, from a multiple of 1,024 bytes on, with the pieces of 16 bytes of row r in
// the order piece ^ r % 8 ("128-byte swizzle"), so that eight rows' pieces of a column lie in all banks. The copy engine
// writes it so by a tensor map (tensor_map.py), and the products read it so.
//
// Source: PTX ISA 8.0 and later, "Asynchronous Warpgroup Level Matrix Instructions" and "cp.async.bulk.tensor".
#include "bulk_copy.cuh"

#if HAS_BULK_COPY && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WARPGROUP_PRODUCTS 1

struct alignas(64) TensorMap {
    unsigned long long opaque[16];
};

// ---------------- tiles

// The first copy by a map need not wait for the map itself.
__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ __forceinline__ void copy_tile(void* shared, const TensorMap& from, int column, int row, PhaseBarrier* barrier,
                                          unsigned long long policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
        "l"(&from), "r"(column), "r"(row), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}

// Of a tensor of four axes: columns, rows of a group, halves, groups.
__device__ __forceinline__ void copy_tile_of_halves(void* shared, const TensorMap& from, int column, int group,
                                                    PhaseBarrier* barrier, unsigned long long policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %3, %4}], [%5], %6;" ::"r"(shared_address(shared)),
        "l"(&from), "r"(column), "r"(0), "r"(group), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}

// That what is read again and again is the last to leave the L2 cache.
__device__ __forceinline__ unsigned long long read_often() {
    unsigned long long policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// ---------------- products

// What a product is told of a tile in shared memory: where it begins, and that its groups of eight rows are 1,024 bytes
// apart, swizzled by 128 bytes.
__device__ __forceinline__ unsigned long long describe_tile(const void* tile) {
    const unsigned long long swizzled = 1ull << 62, group = 1024ull >> 4 << 32, unused = 1ull << 16;
    return swizzled | group | unused | (shared_address(tile) & 0x3ffffu) >> 4;
}

// sums += a b^T for 64 rows of a, N rows of b and 16 columns. The sums of a warpgroup's thread t are those of rows
// 16 (t / 32) + t % 32 / 4 of a, and eight below, and of rows 8 i + t % 4 * 2 of b, and one on: sums[4 i] to
// sums[4 i + 3] are (upper, even), (upper, odd), (lower, even), (lower, odd).
#define TEN(i) "%" #i "0, %" #i "1, %" #i "2, %" #i "3, %" #i "4, %" #i "5, %" #i "6, %" #i "7, %" #i "8, %" #i "9, "
#define SUM4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define SUM16(i) SUM4(i), SUM4(i + 4), SUM4(i + 8), SUM4(i + 12)

__device__ __forceinline__ void multiply_add(float (&sums)[32], unsigned long long a, unsigned long long b) {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, " TEN(1) TEN(2)
        "%30, %31}, %32, %33, add, 1, 1, 0, 0; }"
        : SUM16(0), SUM16(16)
        : "l"(a), "l"(b));
}

__device__ __forceinline__ void multiply_add(float (&sums)[64], unsigned long long a, unsigned long long b) {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, " TEN(1) TEN(2)
        TEN(3) TEN(4) TEN(5) "%60, %61, %62, %63}, %64, %65, add, 1, 1, 0, 0; }"
        : SUM16(0), SUM16(16), SUM16(32), SUM16(48)
        : "l"(a), "l"(b));
}

// Before the first product of a series, after the sums were touched by anything else.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Those begun since are one group,
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// and all groups but the NEWEST last ones are done.
template <int NEWEST>
__device__ __forceinline__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(NEWEST) : "memory");
}
#else
#define HAS_WARPGROUP_PRODUCTS 0
#endif
