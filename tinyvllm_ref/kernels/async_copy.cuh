// Copies from global to shared memory that go on while the block computes: 16 bytes each, in groups.
//
// A thread starts copies, commits those since its last commit as one group, and later waits until all but its N
// newest groups have arrived; then a barrier lets the others see them. Both addresses are multiples of 16 bytes. From
// compute capability 8.0 on these are the instructions cp.async; elsewhere the copy is done at once, and the wait is
// nothing. The emulation has copies that go on, too, where EMULATED_BULK_COPY is given to the compiler (bulk_copy.cuh).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define HAS_ASYNC_COPY 1
#else
#define HAS_ASYNC_COPY 0
#endif

#if !defined(__CUDA_ARCH__) && EMULATED_BULK_COPY
// Not inlined: where they are called from is what the emulation's reports name.
__device__ __noinline__ void copy16_async(void* shared, const void* global) {
    emu_copy_piece(shared, global, 16, __builtin_return_address(0));
}
__device__ __noinline__ void copy16_async_or_zero(void* shared, const void* global, bool valid) {
    emu_copy_piece(shared, valid ? global : nullptr, 16, __builtin_return_address(0));
}
__device__ __forceinline__ void commit_copies() { emu_commit_pieces(); }
template <int NEWEST>
__device__ __forceinline__ void wait_copies() {
    emu_wait_pieces(NEWEST);
}
#else

__device__ __forceinline__ void copy16_async(void* shared, const void* global) {
#if HAS_ASYNC_COPY
    unsigned to = (unsigned)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(to), "l"(global) : "memory");
#else
    *(uint4*)shared = *(const uint4*)global;
#endif
}

// Zeros where the copy is not valid; `global` is then not read, and may be any address.
__device__ __forceinline__ void copy16_async_or_zero(void* shared, const void* global, bool valid) {
#if HAS_ASYNC_COPY
    unsigned to = (unsigned)__cvta_generic_to_shared(shared);
    asm volatile("{ .reg .pred missing; setp.eq.b32 missing, %2, 0;\n"
                 "cp.async.cg.shared.global [%0], [%1], 16, missing; }\n" ::"r"(to), "l"(global), "r"((int)valid)
                 : "memory");
#else
    uint4 value = {0u, 0u, 0u, 0u};
    if (valid) value = *(const uint4*)global;
    *(uint4*)shared = value;
#endif
}

// The copies that this thread has started since its last commit become a group.
__device__ __forceinline__ void commit_copies() {
#if HAS_ASYNC_COPY
    asm volatile("cp.async.commit_group;\n" ::: "memory");
#endif
}

// Until all groups of this thread but the NEWEST last ones have arrived.
template <int NEWEST>
__device__ __forceinline__ void wait_copies() {
#if HAS_ASYNC_COPY
    asm volatile("cp.async.wait_group %0;\n" ::"n"(NEWEST) : "memory");
#endif
}
#endif
