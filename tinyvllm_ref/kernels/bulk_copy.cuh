// Hopper's copy engine: one thread has kilobytes brought from global to shared memory, and a barrier in shared memory
// (mbarrier) says when they have arrived. There is one from compute capability 9.0 on: HAS_BULK_COPY says whether. The
// emulation has one where EMULATED_BULK_COPY is given to the compiler: it finds what goes wrong on a card only now and
// then, such as a read before the wait (emulation/runtime/copy_engine.cpp).
//
// A barrier goes through phases, numbered 0, 1, 0, 1, ...: a phase ends when the arrivals that were announced at its
// start have been made and all bytes that were announced in it have come. wait_phase(barrier, p) returns once the
// phase p is over; at the start the phase 1 counts as over.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define HAS_BULK_COPY 1

typedef unsigned long long PhaseBarrier;

__device__ __forceinline__ unsigned shared_address(const void* shared) {
    return (unsigned)__cvta_generic_to_shared(shared);
}

__device__ __forceinline__ void start_phases(PhaseBarrier* barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// The copy engine sees the barriers that have been started.
__device__ __forceinline__ void show_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void arrive(PhaseBarrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void arrive(PhaseBarrier* barrier, unsigned times) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(times) : "memory");
}

// Arrives once all copies of async_copy.cuh that this thread has started are there.
__device__ __forceinline__ void arrive_with_copies(PhaseBarrier* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// What was written to or read from shared memory so far comes before what the copy engine does there.
__device__ __forceinline__ void before_bulk_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void arrive_expecting(PhaseBarrier* barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void wait_phase(PhaseBarrier* barrier, unsigned phase) {
    asm volatile(
        "{\n"
        ".reg .pred over;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
        "@over bra done;\n"
        "bra again;\n"
        "done:\n"
        "}" ::"r"(shared_address(barrier)), "r"(phase) : "memory");
}

// That what is read once is the first to leave the L2 cache.
__device__ __forceinline__ unsigned long long read_once() {
    unsigned long long policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Addresses and bytes are multiples of 16.
__device__ __forceinline__ void copy_bulk(void* shared, const void* global, unsigned bytes, PhaseBarrier* barrier,
                                          unsigned long long policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}
#elif !defined(__CUDA_ARCH__) && EMULATED_BULK_COPY
#define HAS_BULK_COPY 1
#define CALLED_FROM __builtin_return_address(0)

typedef unsigned long long PhaseBarrier;

// Not inlined: where they are called from is what the emulation's reports name.
__device__ __noinline__ void start_phases(PhaseBarrier* barrier, unsigned arrivals) {
    emu_start_phases(barrier, arrivals, CALLED_FROM);
}
__device__ __forceinline__ void show_barriers() { emu_show_barriers(); }
__device__ __noinline__ void arrive(PhaseBarrier* barrier) { emu_arrive(barrier, 1, 0, CALLED_FROM); }
__device__ __noinline__ void arrive(PhaseBarrier* barrier, unsigned times) { emu_arrive(barrier, times, 0, CALLED_FROM); }
__device__ __noinline__ void arrive_with_copies(PhaseBarrier* barrier) { emu_arrive_with_pieces(barrier, CALLED_FROM); }
__device__ __forceinline__ void before_bulk_copies() { emu_before_bulk_copies(); }
__device__ __noinline__ void arrive_expecting(PhaseBarrier* barrier, unsigned bytes) {
    emu_arrive(barrier, 1, bytes, CALLED_FROM);
}
__device__ __noinline__ void wait_phase(PhaseBarrier* barrier, unsigned phase) {
    emu_wait_phase(barrier, phase, CALLED_FROM);
}
__device__ __forceinline__ unsigned long long read_once() { return 0ull; }
__device__ __noinline__ void copy_bulk(void* shared, const void* global, unsigned bytes, PhaseBarrier* barrier,
                                       unsigned long long) {
    emu_copy_bulk(shared, global, bytes, barrier, CALLED_FROM);
}

// bar.sync and bar.arrive: barriers of some of a block's threads.
template <int NUMBER, int THREADS>
__device__ __noinline__ void sync_threads() {
    emu_named_barrier(NUMBER, THREADS, true, CALLED_FROM);
}
template <int NUMBER, int THREADS>
__device__ __noinline__ void arrive_threads() {
    emu_named_barrier(NUMBER, THREADS, false, CALLED_FROM);
}
#undef CALLED_FROM
#else
#define HAS_BULK_COPY 0
#endif
