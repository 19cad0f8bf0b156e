// What CUDA C++ has beyond C++: included before every kernel, so that the host's compiler understands it.
//
// No header of the system is read: NVRTC has none either, and compiling stays fast. `EMU_FULL` is defined when
// the kernel is compiled for full mode. `__CUDA_ARCH__` is never defined.
#pragma once
#define EMU_CUDA_SHIM 1

typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;

// ---------------- qualifiers
#define EMU_EXPORT __attribute__((visibility("default")))
#define EMU_INLINE inline __attribute__((always_inline))
#ifdef __clang__
#define EMU_ONE_CALL __attribute__((convergent, nomerge))
#else
#define EMU_ONE_CALL
#endif
#if defined(EMU_FULL) || defined(EMU_ASKS_ACTIVE_MASK)
// Calls are inlined into the kernel: g++ does not instrument the store of a structure that a call returns, and
// a call of __activemask is told by its address.
#define __global__ __attribute__((flatten))
#else
#define __global__
#endif
#ifdef EMU_ASKS_ACTIVE_MASK
#define __device__ __attribute__((flatten))
#else
#define __device__
#endif
#define __host__
#define __managed__ emu_managed_memory_is_not_emulated
#define __constant__ EMU_EXPORT __attribute__((used))
#define __shared__ emu_shared_inside_a_macro_is_not_emulated
#define __forceinline__ EMU_INLINE
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __grid_constant__
#define __restrict__ __restrict
#define __align__(n) __attribute__((aligned(n)))
#define asm emu_inline_ptx_is_not_emulated
#define __asm__ emu_inline_ptx_is_not_emulated

// ---------------- the runtime
struct emu_shared_declaration {  // SharedDeclaration of context.h
    const char* name;
    size_t bytes, alignment, item;
    int line, slot;
};
extern "C" {
void emu_syncthreads(int site, int line);
int emu_syncthreads_reduce(int what, int predicate, int site, int line);
unsigned long emu_collective(int kind, unsigned mask, unsigned long value, int source, int width, int line);
EMU_ONE_CALL unsigned emu_active_mask();
void emu_yield();
void emu_fence();
void* emu_shared(emu_shared_declaration*);
void* emu_shared_dynamic(const char* name, size_t item);
[[noreturn]] void emu_assert_failed(const char* expression, int line);
[[noreturn]] void emu_trap(int line);
int emu_printf(const char* format, ...) __attribute__((format(printf, 1, 2)));
// The copy engine, for bulk_copy.cuh and async_copy.cuh; `pc` is the address in the kernel that a report names.
void emu_start_phases(unsigned long long* barrier, unsigned arrivals, const void* pc);
void emu_show_barriers();
void emu_before_bulk_copies();
void emu_arrive(unsigned long long* barrier, unsigned times, unsigned bytes, const void* pc);
void emu_wait_phase(unsigned long long* barrier, unsigned phase, const void* pc);
void emu_copy_bulk(void* to, const void* from, unsigned bytes, unsigned long long* barrier, const void* pc);
void emu_copy_piece(void* to, const void* from, unsigned bytes, const void* pc);
void emu_commit_pieces();
void emu_wait_pieces(unsigned newest);
void emu_arrive_with_pieces(unsigned long long* barrier, const void* pc);
void emu_named_barrier(unsigned number, unsigned threads, bool waits, const void* pc);
}

// ---------------- vector types
#if defined(EMU_FULL) && defined(__clang__)
// clang takes the copy of a plain structure apart, into a copy of each field. What copies itself as a vector of the
// machine stays one access, as it is on a card.
#define EMU_COPIED_WHOLE(T, name, n)                                                                  \
    typedef T emu_whole __attribute__((vector_size(sizeof(T) * n), may_alias));                       \
    name() = default;                                                                                 \
    __attribute__((always_inline, nodebug)) name(const name& from) {                                  \
        *(emu_whole*)this = *(const emu_whole*)&from;                                                 \
    }                                                                                                 \
    __attribute__((always_inline, nodebug)) name& operator=(const name& from) {                       \
        *(emu_whole*)this = *(const emu_whole*)&from;                                                 \
        return *this;                                                                                 \
    }
// Of a type of its own, so that `float4 v = 1.0f` stays an error while `float4 v = {1.0f}` is none.
template <class T> struct emu_first {
    T value;
    constexpr emu_first(T v) : value(v) {}
};
#define EMU_TWO(T, name, a)                                                                           \
    struct [[clang::trivial_abi]] __align__(a) name {                                                 \
        T x, y;                                                                                       \
        constexpr name(emu_first<T> x_, T y_ = {}) : x(x_.value), y(y_) {}                           \
        EMU_COPIED_WHOLE(T, name, 2)                                                                  \
    };
#define EMU_FOUR(T, name, a)                                                                          \
    struct [[clang::trivial_abi]] __align__(a) name {                                                 \
        T x, y, z, w;                                                                                 \
        constexpr name(emu_first<T> x_, T y_ = {}, T z_ = {}, T w_ = {})                           \
            : x(x_.value), y(y_), z(z_), w(w_) {}                                                     \
        EMU_COPIED_WHOLE(T, name, 4)                                                                  \
    };
#else
#define EMU_COPIED_WHOLE(T, name, n)
#define EMU_TWO(T, name, a) struct __align__(a) name { T x, y; };
#define EMU_FOUR(T, name, a) struct __align__(a) name { T x, y, z, w; };
#endif
#define EMU_LONG_FOUR(T, name, a) struct __align__(a) name { T x, y, z, w; };  // 32 bytes: no card has such an access
#define EMU_VECTOR(T, name, a1, a2, a4, FOUR)                                                         \
    struct __align__(a1) name##1 { T x; };                                                            \
    EMU_TWO(T, name##2, a2)                                                                           \
    struct name##3 { T x, y, z; };                                                                    \
    FOUR(T, name##4, a4)                                                                              \
    EMU_INLINE name##1 make_##name##1(T x) { return {x}; }                                            \
    EMU_INLINE name##2 make_##name##2(T x, T y) { return {x, y}; }                                    \
    EMU_INLINE name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                            \
    EMU_INLINE name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VECTOR(signed char, char, 1, 2, 4, EMU_FOUR)
EMU_VECTOR(unsigned char, uchar, 1, 2, 4, EMU_FOUR)
EMU_VECTOR(short, short, 2, 4, 8, EMU_FOUR)
EMU_VECTOR(unsigned short, ushort, 2, 4, 8, EMU_FOUR)
EMU_VECTOR(int, int, 4, 8, 16, EMU_FOUR)
EMU_VECTOR(unsigned int, uint, 4, 8, 16, EMU_FOUR)
EMU_VECTOR(long, long, 8, 16, 16, EMU_LONG_FOUR)
EMU_VECTOR(unsigned long, ulong, 8, 16, 16, EMU_LONG_FOUR)
EMU_VECTOR(long long, longlong, 8, 16, 16, EMU_LONG_FOUR)
EMU_VECTOR(unsigned long long, ulonglong, 8, 16, 16, EMU_LONG_FOUR)
EMU_VECTOR(float, float, 4, 8, 16, EMU_FOUR)
EMU_VECTOR(double, double, 8, 16, 16, EMU_LONG_FOUR)

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    constexpr operator uint3() const { return {x, y, z}; }
};

// Constants to a thread: they are its own, and never change while it runs.
#if defined(__APPLE__)
#define EMU_TLS EMU_EXPORT
#else
#define EMU_TLS __attribute__((visibility("default"), tls_model("initial-exec")))
#endif
extern "C" {
extern EMU_TLS const __thread uint3 threadIdx;
extern EMU_TLS const __thread uint3 blockIdx;
extern EMU_TLS const __thread uint3 blockDim;
extern EMU_TLS const __thread uint3 gridDim;
}
static const int warpSize = 32;

// ---------------- shared memory
// `__shared__ float s[256];` is translated into a typedef, a tag with the name, and a reference to the block's
// storage; each instance of a template has a declaration of its own.
template <class T>
struct emu_element {
    typedef T type;
};
template <class T, size_t N>
struct emu_element<T[N]> : emu_element<T> {};

template <class T, class Tag>
struct emu_shared_variable {
    static emu_shared_declaration declaration;
};
template <class T, class Tag>
emu_shared_declaration emu_shared_variable<T, Tag>::declaration = {
    Tag::emu_name(), sizeof(T), alignof(T), sizeof(typename emu_element<T>::type), Tag::emu_line(), 0};

template <class T, class Tag>
EMU_INLINE T& emu_shared_reference() {
    return *(T*)emu_shared(&emu_shared_variable<T, Tag>::declaration);
}
template <class T>
EMU_INLINE T* emu_dynamic_pointer(const char* name) {
    return (T*)emu_shared_dynamic(name, sizeof(typename emu_element<T>::type));
}

// `__device__ float t[8];` at file scope: what stands there holds the initial values, and the name is a reference
// to device memory.
extern "C" void* emu_variable(int number, const char* name, void* home, size_t bytes, size_t item, int is_constant);
#define EMU_VARIABLE(number, is_constant, name)                                                              \
    static __typeof__(emu_home_##name)& name = *(__typeof__(emu_home_##name)*)emu_variable(                  \
        number, #name, (void*)&emu_home_##name, sizeof(emu_home_##name),                                     \
        sizeof(emu_element<__typeof__(emu_home_##name)>::type), is_constant);

// ---------------- barriers and fences
#define __syncthreads() emu_syncthreads(__COUNTER__, __LINE__)
#define __syncthreads_count(p) emu_syncthreads_reduce(0, (p) != 0, __COUNTER__, __LINE__)
#define __syncthreads_and(p) emu_syncthreads_reduce(1, (p) != 0, __COUNTER__, __LINE__)
#define __syncthreads_or(p) emu_syncthreads_reduce(2, (p) != 0, __COUNTER__, __LINE__)
EMU_INLINE void __threadfence() { emu_fence(); }
EMU_INLINE void __threadfence_block() { emu_fence(); }
EMU_INLINE void __threadfence_system() { emu_fence(); }
EMU_INLINE void __nanosleep(unsigned) { emu_yield(); }

// ---------------- warp functions
// The numbers are those of `Collective` in scheduler.cpp.
template <class T>
EMU_INLINE T emu_warp_value(int kind, unsigned mask, T value, int source, int width, int line) {
    static_assert(sizeof(T) <= 8, "warp functions take values of at most 8 bytes");
    unsigned long bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    bits = emu_collective(kind, mask, bits, source, width, line);
    __builtin_memcpy(&value, &bits, sizeof(T));
    return value;
}
#define EMU_LINE int line = __builtin_LINE()
template <class T>
EMU_INLINE T __shfl_sync(unsigned mask, T v, int lane, int width = 32, EMU_LINE) {
    return emu_warp_value(0, mask, v, lane, width, line);
}
template <class T>
EMU_INLINE T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, EMU_LINE) {
    return emu_warp_value(1, mask, v, (int)delta, width, line);
}
template <class T>
EMU_INLINE T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, EMU_LINE) {
    return emu_warp_value(2, mask, v, (int)delta, width, line);
}
template <class T>
EMU_INLINE T __shfl_xor_sync(unsigned mask, T v, int lanes, int width = 32, EMU_LINE) {
    return emu_warp_value(3, mask, v, lanes, width, line);
}
EMU_INLINE unsigned __ballot_sync(unsigned mask, int p, EMU_LINE) {
    return (unsigned)emu_collective(4, mask, p != 0, 0, 32, line);
}
EMU_INLINE int __any_sync(unsigned mask, int p, EMU_LINE) { return (int)emu_collective(5, mask, p != 0, 0, 32, line); }
EMU_INLINE int __all_sync(unsigned mask, int p, EMU_LINE) { return (int)emu_collective(6, mask, p != 0, 0, 32, line); }
EMU_INLINE void __syncwarp(unsigned mask = 0xffffffffu, EMU_LINE) { emu_collective(7, mask, 0, 0, 32, line); }
template <class T>
EMU_INLINE unsigned __match_any_sync(unsigned mask, T v, EMU_LINE) {
    unsigned long bits = 0;
    __builtin_memcpy(&bits, &v, sizeof(T));
    return (unsigned)emu_collective(8, mask, bits, 0, 32, line);
}
template <class T>
EMU_INLINE unsigned __match_all_sync(unsigned mask, T v, int* all, EMU_LINE) {
    unsigned long bits = 0;
    __builtin_memcpy(&bits, &v, sizeof(T));
    unsigned same = (unsigned)emu_collective(9, mask, bits, 0, 32, line);
    *all = same != 0;
    return same;
}
#define EMU_REDUCE(name, kind)                                                                                  \
    EMU_INLINE unsigned name(unsigned mask, unsigned v, EMU_LINE) {                                             \
        return (unsigned)emu_collective(kind, mask, v, 0, 32, line);                                            \
    }                                                                                                           \
    EMU_INLINE int name(unsigned mask, int v, EMU_LINE) {                                                       \
        return (int)emu_collective(kind, mask, (unsigned)v, 1, 32, line);                                       \
    }
EMU_REDUCE(__reduce_add_sync, 10)
EMU_REDUCE(__reduce_min_sync, 11)
EMU_REDUCE(__reduce_max_sync, 12)
EMU_REDUCE(__reduce_and_sync, 13)
EMU_REDUCE(__reduce_or_sync, 14)
EMU_REDUCE(__reduce_xor_sync, 15)
EMU_INLINE unsigned __activemask() { return emu_active_mask(); }

// ---------------- atomics
#define EMU_ATOMIC_INTEGER(T)                                                                                   \
    EMU_INLINE T atomicAdd(T* p, T v) { emu_yield(); return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }       \
    EMU_INLINE T atomicExch(T* p, T v) { emu_yield(); return __atomic_exchange_n(p, v, __ATOMIC_RELAXED); }     \
    EMU_INLINE T atomicAnd(T* p, T v) { emu_yield(); return __atomic_fetch_and(p, v, __ATOMIC_RELAXED); }       \
    EMU_INLINE T atomicOr(T* p, T v) { emu_yield(); return __atomic_fetch_or(p, v, __ATOMIC_RELAXED); }         \
    EMU_INLINE T atomicXor(T* p, T v) { emu_yield(); return __atomic_fetch_xor(p, v, __ATOMIC_RELAXED); }       \
    EMU_INLINE T atomicCAS(T* p, T expected, T v) {                                                             \
        emu_yield();                                                                                            \
        __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);                \
        return expected;                                                                                        \
    }
EMU_ATOMIC_INTEGER(int)
EMU_ATOMIC_INTEGER(unsigned)
EMU_ATOMIC_INTEGER(unsigned long long)
EMU_INLINE int atomicSub(int* p, int v) { return atomicAdd(p, -v); }
EMU_INLINE unsigned atomicSub(unsigned* p, unsigned v) { return atomicAdd(p, 0u - v); }
EMU_INLINE unsigned short atomicCAS(unsigned short* p, unsigned short expected, unsigned short v) {
    emu_yield();
    __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}
// The rest has no instruction of the host's: a loop of compare-and-swap, or in full mode one checked step.
#ifdef EMU_FULL
#define EMU_ATOMIC_UPDATE(function, T, name, word, result)       \
    extern "C" T emu_atomic_##name(T* p, T v);                   \
    EMU_INLINE T function(T* p, T v) {                           \
        emu_yield();                                             \
        return emu_atomic_##name(p, v);                          \
    }
#else
#define EMU_ATOMIC_UPDATE(function, T, name, word, result)                                                        \
    EMU_INLINE T function(T* p, T v) {                                                                            \
        emu_yield();                                                                                              \
        word before = __atomic_load_n((word*)p, __ATOMIC_RELAXED), after;                                         \
        T old, made;                                                                                              \
        do {                                                                                                      \
            __builtin_memcpy(&old, &before, sizeof(T));                                                           \
            made = (T)(result);                                                                                   \
            __builtin_memcpy(&after, &made, sizeof(T));                                                           \
        } while (!__atomic_compare_exchange_n((word*)p, &before, after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)); \
        return old;                                                                                               \
    }
#endif
EMU_ATOMIC_UPDATE(atomicAdd, float, add_float, unsigned, old + v)
EMU_ATOMIC_UPDATE(atomicAdd, double, add_double, unsigned long long, old + v)
EMU_ATOMIC_UPDATE(atomicMin, int, min_int, unsigned, old < v ? old : v)
EMU_ATOMIC_UPDATE(atomicMax, int, max_int, unsigned, old < v ? v : old)
EMU_ATOMIC_UPDATE(atomicMin, unsigned, min_uint, unsigned, old < v ? old : v)
EMU_ATOMIC_UPDATE(atomicMax, unsigned, max_uint, unsigned, old < v ? v : old)
EMU_ATOMIC_UPDATE(atomicMin, long long, min_long, unsigned long long, old < v ? old : v)
EMU_ATOMIC_UPDATE(atomicMax, long long, max_long, unsigned long long, old < v ? v : old)
EMU_ATOMIC_UPDATE(atomicMin, unsigned long long, min_ulong, unsigned long long, old < v ? old : v)
EMU_ATOMIC_UPDATE(atomicMax, unsigned long long, max_ulong, unsigned long long, old < v ? v : old)
EMU_ATOMIC_UPDATE(atomicInc, unsigned, inc_uint, unsigned, old >= v ? 0 : old + 1)
EMU_ATOMIC_UPDATE(atomicDec, unsigned, dec_uint, unsigned, old == 0 || old > v ? v : old - 1)
EMU_INLINE float atomicExch(float* p, float v) {
    emu_yield();
    unsigned bits;
    __builtin_memcpy(&bits, &v, 4);
    bits = __atomic_exchange_n((unsigned*)p, bits, __ATOMIC_RELAXED);
    __builtin_memcpy(&v, &bits, 4);
    return v;
}
#define EMU_SCOPED(name)                                                            \
    template <class T>                                                              \
    EMU_INLINE T name##_block(T* p, T v) { return name(p, v); }                     \
    template <class T>                                                              \
    EMU_INLINE T name##_system(T* p, T v) { return name(p, v); }
EMU_SCOPED(atomicAdd)
EMU_SCOPED(atomicExch)
EMU_SCOPED(atomicMin)
EMU_SCOPED(atomicMax)
EMU_SCOPED(atomicAnd)
EMU_SCOPED(atomicOr)
EMU_SCOPED(atomicXor)
EMU_SCOPED(atomicSub)
EMU_SCOPED(atomicInc)
EMU_SCOPED(atomicDec)
template <class T>
EMU_INLINE T atomicCAS_block(T* p, T expected, T v) { return atomicCAS(p, expected, v); }
template <class T>
EMU_INLINE T atomicCAS_system(T* p, T expected, T v) { return atomicCAS(p, expected, v); }

// ---------------- memory access
template <class T> EMU_INLINE T __ldg(const T* p) { return *p; }
template <class T> EMU_INLINE T __ldcg(const T* p) { return *p; }
template <class T> EMU_INLINE T __ldca(const T* p) { return *p; }
template <class T> EMU_INLINE T __ldcs(const T* p) { return *p; }
template <class T> EMU_INLINE T __ldcv(const T* p) { return *p; }
template <class T> EMU_INLINE T __ldlu(const T* p) { return *p; }
template <class T> EMU_INLINE void __stcg(T* p, T v) { *p = v; }
template <class T> EMU_INLINE void __stcs(T* p, T v) { *p = v; }
template <class T> EMU_INLINE void __stwb(T* p, T v) { *p = v; }
template <class T> EMU_INLINE void __stwt(T* p, T v) { *p = v; }
#if defined(EMU_FULL) && defined(__clang__)
// clang copies structures with memcpy and, before version 15, leaves the check to a replaced memcpy: this is it.
#define EMU_CHECKED_COPY(name, From)                                                                  \
    extern "C" void* emu_checked_##name(void* to, From from, size_t n, const void* pc);               \
    extern "C" __attribute__((visibility("hidden"), used, noinline, no_sanitize("thread"))) void* name( \
        void* to, From from, size_t n) noexcept {                                                     \
        return emu_checked_##name(to, from, n, __builtin_return_address(0));                          \
    }
EMU_CHECKED_COPY(memcpy, const void*)
EMU_CHECKED_COPY(memmove, const void*)
EMU_CHECKED_COPY(memset, int)
#else
extern "C" void* memcpy(void*, const void*, size_t) noexcept;
extern "C" void* memset(void*, int, size_t) noexcept;
extern "C" void* memmove(void*, const void*, size_t) noexcept;
#endif
#if defined(EMU_FULL) && !defined(__clang__)
// g++ leaves what it does not make an assignment of to the C library, where no access is seen.
#define EMU_CHECKED_CALL(name, From)                                                          \
    extern "C" void* emu_checked_##name(void* to, From from, size_t n, const void* pc);       \
    static __attribute__((unused, noinline, no_sanitize_thread)) void* emu_call_##name(       \
        void* to, From from, size_t n) {                                                      \
        return emu_checked_##name(to, from, n, __builtin_return_address(0));                  \
    }                                                                                         \
    namespace std { using ::emu_call_##name; }
EMU_CHECKED_CALL(memcpy, const void*)
EMU_CHECKED_CALL(memmove, const void*)
EMU_CHECKED_CALL(memset, int)
#define EMU_IS_ASSIGNMENT(n) (__builtin_constant_p(n) && ((n) == 4 || (n) == 8 || (n) == 2 || (n) == 1))
#define memcpy(to, from, n) (EMU_IS_ASSIGNMENT(n) ? __builtin_memcpy(to, from, n) : emu_call_memcpy(to, from, n))
#define memmove(to, from, n) emu_call_memmove(to, from, n)
#define memset(to, value, n) emu_call_memset(to, value, n)
#endif

// ---------------- memory that kernels allocate
extern "C" void* emu_device_malloc(size_t bytes);
extern "C" void emu_device_free(void* p);
EMU_INLINE void* malloc(size_t bytes) { return emu_device_malloc(bytes); }
EMU_INLINE void free(void* p) { emu_device_free(p); }
void* operator new(size_t bytes) { return emu_device_malloc(bytes); }
void* operator new[](size_t bytes) { return emu_device_malloc(bytes); }
void operator delete(void* p) noexcept { emu_device_free(p); }
void operator delete[](void* p) noexcept { emu_device_free(p); }
void operator delete(void* p, size_t) noexcept { emu_device_free(p); }
void operator delete[](void* p, size_t) noexcept { emu_device_free(p); }
inline void* operator new(size_t, void* p) noexcept { return p; }

// ---------------- mathematics
#define EMU_MATH1(name)                                   \
    extern "C" double name(double) noexcept;              \
    extern "C" float name##f(float) noexcept;             \
    EMU_INLINE float name(float x) { return name##f(x); }
#define EMU_MATH2(name)                                   \
    extern "C" double name(double, double) noexcept;      \
    extern "C" float name##f(float, float) noexcept;      \
    EMU_INLINE float name(float x, float y) { return name##f(x, y); }
EMU_MATH1(sqrt) EMU_MATH1(cbrt) EMU_MATH1(exp) EMU_MATH1(exp2) EMU_MATH1(expm1) EMU_MATH1(log) EMU_MATH1(log2)
EMU_MATH1(log10) EMU_MATH1(log1p) EMU_MATH1(sin) EMU_MATH1(cos) EMU_MATH1(tan) EMU_MATH1(asin) EMU_MATH1(acos)
EMU_MATH1(atan) EMU_MATH1(sinh) EMU_MATH1(cosh) EMU_MATH1(tanh) EMU_MATH1(asinh) EMU_MATH1(acosh) EMU_MATH1(atanh)
EMU_MATH1(erf) EMU_MATH1(erfc) EMU_MATH1(lgamma) EMU_MATH1(tgamma) EMU_MATH1(floor) EMU_MATH1(ceil)
EMU_MATH1(trunc) EMU_MATH1(round) EMU_MATH1(rint) EMU_MATH1(nearbyint) EMU_MATH1(fabs)
EMU_MATH2(pow) EMU_MATH2(fmod) EMU_MATH2(atan2) EMU_MATH2(hypot) EMU_MATH2(copysign) EMU_MATH2(fmin) EMU_MATH2(fmax)
EMU_MATH2(fdim) EMU_MATH2(remainder) EMU_MATH2(nextafter)
extern "C" double fma(double, double, double) noexcept;
extern "C" float fmaf(float, float, float) noexcept;
extern "C" float ldexpf(float, int) noexcept;
extern "C" double ldexp(double, int) noexcept;
extern "C" float frexpf(float, int*) noexcept;
extern "C" double frexp(double, int*) noexcept;
extern "C" float modff(float, float*) noexcept;
extern "C" double modf(double, double*) noexcept;
extern "C" int abs(int) noexcept;
extern "C" long labs(long) noexcept;
extern "C" long long llabs(long long) noexcept;
extern "C" long lrintf(float) noexcept;
extern "C" long lrint(double) noexcept;
extern "C" long lroundf(float) noexcept;
extern "C" long lround(double) noexcept;
extern "C" long long llrintf(float) noexcept;
extern "C" long long llrint(double) noexcept;
extern "C" long long llroundf(float) noexcept;
extern "C" long long llround(double) noexcept;
extern "C" int ilogbf(float) noexcept;
extern "C" int ilogb(double) noexcept;
extern "C" float logbf(float) noexcept;
extern "C" double logb(double) noexcept;
extern "C" float scalbnf(float, int) noexcept;
extern "C" double scalbn(double, int) noexcept;
EMU_INLINE int ilogb(float x) { return ilogbf(x); }
EMU_INLINE float logb(float x) { return logbf(x); }
EMU_INLINE float scalbn(float x, int n) { return scalbnf(x, n); }
EMU_INLINE float fma(float a, float b, float c) { return fmaf(a, b, c); }
EMU_INLINE float abs(float x) { return fabsf(x); }
EMU_INLINE double abs(double x) { return fabs(x); }
EMU_INLINE long abs(long x) { return labs(x); }
EMU_INLINE long long abs(long long x) { return llabs(x); }
EMU_INLINE float rsqrtf(float x) { return 1.0f / sqrtf(x); }
EMU_INLINE float rsqrt(float x) { return 1.0f / sqrtf(x); }
EMU_INLINE double rsqrt(double x) { return 1.0 / sqrt(x); }
EMU_INLINE float rcbrtf(float x) { return 1.0f / cbrtf(x); }
EMU_INLINE float exp10f(float x) { return powf(10.0f, x); }
EMU_INLINE double exp10(double x) { return pow(10.0, x); }
EMU_INLINE void sincosf(float x, float* s, float* c) { *s = sinf(x); *c = cosf(x); }
EMU_INLINE void sincos(double x, double* s, double* c) { *s = sin(x); *c = cos(x); }
EMU_INLINE void sincos(float x, float* s, float* c) { sincosf(x, s, c); }
EMU_INLINE float sinpif(float x) { return (float)sin(3.14159265358979323846 * (double)x); }
EMU_INLINE float cospif(float x) { return (float)cos(3.14159265358979323846 * (double)x); }
EMU_INLINE double sinpi(double x) { return sin(3.14159265358979323846 * x); }
EMU_INLINE double cospi(double x) { return cos(3.14159265358979323846 * x); }
EMU_INLINE float normcdff(float x) { return 0.5f * erfcf(-x * 0.70710678118654752f); }
EMU_INLINE float fdividef(float a, float b) { return a / b; }
// A first guess, and two of Halley's steps to the root of erfc(y) = p.
EMU_INLINE double erfcinv(double p) {
    if (!(p > 0.0 && p < 2.0)) return p == 0.0 ? __builtin_inf() : p == 2.0 ? -__builtin_inf() : __builtin_nan("");
    double near = p < 1.0 ? p : 2.0 - p, t = sqrt(-2.0 * log(near / 2.0));
    double y = -0.70711 * ((2.30753 + t * 0.27061) / (1.0 + t * (0.99229 + t * 0.04481)) - t);
    for (int k = 0; k < 3; k++) {
        double off = erfc(y) - near;
        y += off / (1.12837916709551257 * exp(-y * y) - y * off);
    }
    return p < 1.0 ? y : -y;
}
EMU_INLINE double erfinv(double x) {
    if (!(x > -0.5 && x < 0.5)) return x < 0.0 ? -erfcinv(1.0 + x) : erfcinv(1.0 - x);
    double y = 0.886226925452758 * x;
    for (int k = 0; k < 4; k++) y -= (erf(y) - x) / (1.12837916709551257 * exp(-y * y));
    return y;
}
EMU_INLINE double normcdf(double x) { return 0.5 * erfc(-x * 0.707106781186547524); }
EMU_INLINE double normcdfinv(double p) { return -1.41421356237309505 * erfcinv(2.0 * p); }
EMU_INLINE float erfcinvf(float p) { return (float)erfcinv((double)p); }
EMU_INLINE float erfinvf(float x) { return (float)erfinv((double)x); }
EMU_INLINE float normcdfinvf(float p) { return (float)normcdfinv((double)p); }
EMU_INLINE double norm3d(double a, double b, double c) { return sqrt(a * a + b * b + c * c); }
EMU_INLINE double rnorm3d(double a, double b, double c) { return 1.0 / norm3d(a, b, c); }
EMU_INLINE double norm4d(double a, double b, double c, double d) { return sqrt(a * a + b * b + c * c + d * d); }
EMU_INLINE double rnorm4d(double a, double b, double c, double d) { return 1.0 / norm4d(a, b, c, d); }
EMU_INLINE double rhypot(double a, double b) { return 1.0 / hypot(a, b); }
EMU_INLINE float norm3df(float a, float b, float c) { return (float)norm3d(a, b, c); }
EMU_INLINE float rnorm3df(float a, float b, float c) { return (float)rnorm3d(a, b, c); }
EMU_INLINE float norm4df(float a, float b, float c, float d) { return (float)norm4d(a, b, c, d); }
EMU_INLINE float rnorm4df(float a, float b, float c, float d) { return (float)rnorm4d(a, b, c, d); }
EMU_INLINE float rhypotf(float a, float b) { return (float)rhypot((double)a, (double)b); }

#define EMU_CLASSIFY(T)                                                  \
    EMU_INLINE bool isnan(T x) { return __builtin_isnan(x); }            \
    EMU_INLINE bool isinf(T x) { return __builtin_isinf(x); }            \
    EMU_INLINE bool isfinite(T x) { return __builtin_isfinite(x); }      \
    EMU_INLINE bool signbit(T x) { return __builtin_signbit(x); }
EMU_CLASSIFY(float)
EMU_CLASSIFY(double)

#define EMU_MINMAX(T, A, B)                                              \
    EMU_INLINE T min(A a, B b) { return (T)a < (T)b ? (T)a : (T)b; }     \
    EMU_INLINE T max(A a, B b) { return (T)a > (T)b ? (T)a : (T)b; }
EMU_MINMAX(int, int, int)
EMU_MINMAX(unsigned, unsigned, unsigned)
EMU_MINMAX(unsigned, int, unsigned)
EMU_MINMAX(unsigned, unsigned, int)
EMU_MINMAX(long, long, long)
EMU_MINMAX(unsigned long, unsigned long, unsigned long)
EMU_MINMAX(unsigned long, long, unsigned long)
EMU_MINMAX(unsigned long, unsigned long, long)
EMU_MINMAX(long long, long long, long long)
EMU_MINMAX(unsigned long long, unsigned long long, unsigned long long)
EMU_MINMAX(unsigned long long, long long, unsigned long long)
EMU_MINMAX(unsigned long long, unsigned long long, long long)
EMU_INLINE float min(float a, float b) { return fminf(a, b); }
EMU_INLINE float max(float a, float b) { return fmaxf(a, b); }
EMU_INLINE double min(double a, double b) { return fmin(a, b); }
EMU_INLINE double max(double a, double b) { return fmax(a, b); }
EMU_INLINE double min(float a, double b) { return fmin((double)a, b); }
EMU_INLINE double max(float a, double b) { return fmax((double)a, b); }
EMU_INLINE double min(double a, float b) { return fmin(a, (double)b); }
EMU_INLINE double max(double a, float b) { return fmax(a, (double)b); }
EMU_INLINE unsigned umin(unsigned a, unsigned b) { return a < b ? a : b; }
EMU_INLINE unsigned umax(unsigned a, unsigned b) { return a > b ? a : b; }

// The fast intrinsics are less exact on a card; here they are the exact functions.
EMU_INLINE float __expf(float x) { return expf(x); }
EMU_INLINE float __exp10f(float x) { return exp10f(x); }
EMU_INLINE float __logf(float x) { return logf(x); }
EMU_INLINE float __log2f(float x) { return log2f(x); }
EMU_INLINE float __log10f(float x) { return log10f(x); }
EMU_INLINE float __sinf(float x) { return sinf(x); }
EMU_INLINE float __cosf(float x) { return cosf(x); }
EMU_INLINE float __tanf(float x) { return tanf(x); }
EMU_INLINE float __powf(float x, float y) { return powf(x, y); }
EMU_INLINE void __sincosf(float x, float* s, float* c) { sincosf(x, s, c); }
EMU_INLINE float __fdividef(float a, float b) { return a / b; }
EMU_INLINE float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
EMU_INLINE float __frcp_rn(float x) { return 1.0f / x; }
EMU_INLINE float __fsqrt_rn(float x) { return sqrtf(x); }
EMU_INLINE float __frsqrt_rn(float x) { return (float)(1.0 / sqrt((double)x)); }
EMU_INLINE float __fadd_rn(float a, float b) { return a + b; }
EMU_INLINE float __fsub_rn(float a, float b) { return a - b; }
EMU_INLINE float __fmul_rn(float a, float b) { return a * b; }
EMU_INLINE float __fdiv_rn(float a, float b) { return a / b; }
EMU_INLINE float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
EMU_INLINE double __dadd_rn(double a, double b) { return a + b; }
EMU_INLINE double __dmul_rn(double a, double b) { return a * b; }
EMU_INLINE double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
EMU_INLINE double __ddiv_rn(double a, double b) { return a / b; }

// ---------------- conversions, bits
#define EMU_BITS(name, To, From)             \
    EMU_INLINE To name(From x) {             \
        To y;                                \
        __builtin_memcpy(&y, &x, sizeof y);  \
        return y;                            \
    }
EMU_BITS(__float_as_int, int, float)
EMU_BITS(__float_as_uint, unsigned, float)
EMU_BITS(__int_as_float, float, int)
EMU_BITS(__uint_as_float, float, unsigned)
EMU_BITS(__double_as_longlong, long long, double)
EMU_BITS(__longlong_as_double, double, long long)
EMU_INLINE int __double2hiint(double x) { return (int)(__double_as_longlong(x) >> 32); }
EMU_INLINE int __double2loint(double x) { return (int)__double_as_longlong(x); }
EMU_INLINE double __hiloint2double(int hi, int lo) {
    return __longlong_as_double((long long)((unsigned long long)(unsigned)hi << 32 | (unsigned)lo));
}
// Out of range gives the nearest value of the type, NaN gives 0, as the card's conversion does.
template <class To>
EMU_INLINE To emu_to_integer(double x, double lo, double hi, To lo_value, To hi_value) {
    return x != x ? (To)0 : x <= lo ? lo_value : x >= hi ? hi_value : (To)x;
}
EMU_INLINE int emu_to_int(double x) { return emu_to_integer<int>(x, -2147483648.0, 2147483647.0, -2147483647 - 1, 2147483647); }
EMU_INLINE unsigned emu_to_uint(double x) { return emu_to_integer<unsigned>(x, 0.0, 4294967295.0, 0u, 4294967295u); }
EMU_INLINE long long emu_to_long(double x) {
    return emu_to_integer<long long>(x, -9223372036854775808.0, 9223372036854775808.0, -9223372036854775807LL - 1, 9223372036854775807LL);
}
EMU_INLINE unsigned long long emu_to_ulong(double x) {
    return emu_to_integer<unsigned long long>(x, 0.0, 18446744073709551616.0, 0ull, 18446744073709551615ull);
}
#define EMU_ROUND(suffix, function)                                                          \
    EMU_INLINE int __float2int_##suffix(float x) { return emu_to_int(function((double)x)); } \
    EMU_INLINE unsigned __float2uint_##suffix(float x) { return emu_to_uint(function((double)x)); } \
    EMU_INLINE long long __float2ll_##suffix(float x) { return emu_to_long(function((double)x)); }  \
    EMU_INLINE int __double2int_##suffix(double x) { return emu_to_int(function(x)); }              \
    EMU_INLINE unsigned __double2uint_##suffix(double x) { return emu_to_uint(function(x)); }       \
    EMU_INLINE long long __double2ll_##suffix(double x) { return emu_to_long(function(x)); }        \
    EMU_INLINE unsigned long long __float2ull_##suffix(float x) { return emu_to_ulong(function((double)x)); } \
    EMU_INLINE unsigned long long __double2ull_##suffix(double x) { return emu_to_ulong(function(x)); }
EMU_ROUND(rn, nearbyint)
EMU_ROUND(rz, trunc)
EMU_ROUND(rd, floor)
EMU_ROUND(ru, ceil)
EMU_INLINE float __int2float_rn(int x) { return (float)x; }
EMU_INLINE float __uint2float_rn(unsigned x) { return (float)x; }
EMU_INLINE float __ll2float_rn(long long x) { return (float)x; }
EMU_INLINE float __ull2float_rn(unsigned long long x) { return (float)x; }
EMU_INLINE double __uint2double_rn(unsigned x) { return (double)x; }
EMU_INLINE double __ll2double_rn(long long x) { return (double)x; }
EMU_INLINE float __double2float_rn(double x) { return (float)x; }
EMU_INLINE double __int2double_rn(int x) { return (double)x; }

// Not the compiler's built-in: on old processors that is a call into a library which kernels do not link.
EMU_INLINE int __popcll(unsigned long long x) {
    x -= x >> 1 & 0x5555555555555555ull;
    x = (x & 0x3333333333333333ull) + (x >> 2 & 0x3333333333333333ull);
    return (int)(((x + (x >> 4)) & 0x0f0f0f0f0f0f0f0full) * 0x0101010101010101ull >> 56);
}
EMU_INLINE int __popc(unsigned x) { return __popcll(x); }
EMU_INLINE int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
EMU_INLINE int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
EMU_INLINE int __ffs(int x) { return __builtin_ffs(x); }
EMU_INLINE int __ffsll(long long x) { return __builtin_ffsll(x); }
EMU_INLINE unsigned __brev(unsigned x) {
    unsigned y = 0;
    for (int k = 0; k < 32; k++) y |= (x >> k & 1u) << (31 - k);
    return y;
}
EMU_INLINE unsigned long long __brevll(unsigned long long x) {
    return (unsigned long long)__brev((unsigned)x) << 32 | __brev((unsigned)(x >> 32));
}
EMU_INLINE int __mulhi(int a, int b) { return (int)(((long long)a * b) >> 32); }
EMU_INLINE unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a * b) >> 32); }
EMU_INLINE long long __mul64hi(long long a, long long b) { return (long long)(((__int128)a * b) >> 64); }
EMU_INLINE unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
EMU_INLINE int __mul24(int a, int b) { return ((a << 8) >> 8) * ((b << 8) >> 8); }
EMU_INLINE unsigned __umul24(unsigned a, unsigned b) { return (a & 0xffffffu) * (b & 0xffffffu); }
EMU_INLINE int __hadd(int a, int b) { return (int)(((long long)a + b) >> 1); }
EMU_INLINE int __rhadd(int a, int b) { return (int)(((long long)a + b + 1) >> 1); }
EMU_INLINE unsigned __uhadd(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a + b) >> 1); }
EMU_INLINE unsigned __urhadd(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a + b + 1) >> 1); }
EMU_INLINE unsigned __usad(unsigned a, unsigned b, unsigned c) { return c + (a > b ? a - b : b - a); }
EMU_INLINE unsigned __sad(int a, int b, unsigned c) { return c + (unsigned)(a > b ? a - b : b - a); }
EMU_INLINE unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned n) {
    n &= 31;
    return n ? hi << n | lo >> (32 - n) : hi;
}
EMU_INLINE unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned n) {
    n &= 31;
    return n ? hi << (32 - n) | lo >> n : lo;
}
EMU_INLINE unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
    unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned y = 0;
    for (int k = 0; k < 4; k++) {
        unsigned choice = s >> (4 * k) & 0xf, byte = (unsigned)(both >> (8 * (choice & 7))) & 0xff;
        if (choice & 8) byte = byte & 0x80 ? 0xff : 0;
        y |= byte << (8 * k);
    }
    return y;
}
// ---------------- constants, printing, stopping
#define NULL __null  // NVRTC has this one without a header, and neither INFINITY nor NAN nor any of <float.h>
EMU_INLINE float nanf(const char*) { return __builtin_nanf(""); }
EMU_INLINE double nan(const char*) { return __builtin_nan(""); }
#define printf(...) emu_printf(__VA_ARGS__)
#define assert(...) ((__VA_ARGS__) ? (void)0 : emu_assert_failed(#__VA_ARGS__, __LINE__))
#define __trap() emu_trap(__LINE__)
#define __brkpt() ((void)0)
#define __builtin_assume(x) ((void)0)
#define __assume(x) ((void)0)
typedef long clock_t;
// A counter that goes up: one tick a call, for no CPU time says anything about a card's.
EMU_INLINE long long clock64() {
    static long long ticks;
    return __atomic_add_fetch(&ticks, 1, __ATOMIC_RELAXED);
}
EMU_INLINE clock_t clock() { return (clock_t)clock64(); }

// ---------------- how Python calls a kernel
struct emu_parameter {  // read by launch.py
    int kind;           // 0 pointer, 1 signed, 2 unsigned, 3 floating, 4 bool, 5 anything else
    int size, alignment;
    int item_kind, item_size, item_alignment;  // of what a pointer points to; kind 6 is void
    int is_const;
};
template <class T> struct emu_kind { static const int value = 5; };
#define EMU_KIND(T, k) template <> struct emu_kind<T> { static const int value = k; };
EMU_KIND(char, 1) EMU_KIND(signed char, 1) EMU_KIND(short, 1) EMU_KIND(int, 1) EMU_KIND(long, 1) EMU_KIND(long long, 1)
EMU_KIND(unsigned char, 2) EMU_KIND(unsigned short, 2) EMU_KIND(unsigned, 2) EMU_KIND(unsigned long, 2)
EMU_KIND(unsigned long long, 2) EMU_KIND(float, 3) EMU_KIND(double, 3) EMU_KIND(bool, 4) EMU_KIND(void, 6)
template <class T> struct emu_size { static const int value = sizeof(T), alignment = alignof(T); };
template <> struct emu_size<void> { static const int value = 1, alignment = 1; };
template <class T> struct emu_plain { typedef T type; static const int is_const = 0; };
template <class T> struct emu_plain<const T> { typedef T type; static const int is_const = 1; };
template <class T> struct emu_plain<volatile T> { typedef T type; static const int is_const = 0; };
template <class T> struct emu_plain<const volatile T> { typedef T type; static const int is_const = 1; };
template <class T> struct emu_describe_one {
    static emu_parameter value() { return {emu_kind<T>::value, (int)sizeof(T), (int)alignof(T), 0, 0, 0, 0}; }
};
template <class T> struct emu_describe_one<T*> {
    typedef typename emu_plain<T>::type item;
    static emu_parameter value() {
        return {0, 8, 8, emu_kind<item>::value, emu_size<item>::value, emu_size<item>::alignment, emu_plain<T>::is_const};
    }
};
template <class... A>
int emu_describe(void (*)(A...), emu_parameter* out) {
    emu_parameter all[] = {emu_describe_one<typename emu_plain<A>::type>::value()..., emu_parameter()};
    for (unsigned k = 0; k < sizeof...(A); k++) out[k] = all[k];
    return (int)sizeof...(A);
}
template <int... I> struct emu_numbers {};
template <int N, int... I> struct emu_count : emu_count<N - 1, N - 1, I...> {};
template <int... I> struct emu_count<0, I...> { typedef emu_numbers<I...> type; };
#ifdef EMU_FULL
#define EMU_UNCHECKED __attribute__((no_sanitize("thread")))
#else
#define EMU_UNCHECKED
#endif
extern "C" bool emu_next_lane();
// Threads one after another, with the arguments at hand, as long as none of them waits. The call must stay a
// call: inlined, the compiler would read threadIdx, a constant to it, once for all of them.
template <class... A>
EMU_UNCHECKED void emu_run_lanes(void (*f)(A...), typename emu_plain<A>::type... arguments) {
    __asm volatile("" : "+r"(f));
    do f(arguments...);
    while (emu_next_lane());
}
template <class... A, int... I>
EMU_UNCHECKED void emu_call_numbered(void (*f)(A...), void** p, emu_numbers<I...>) {
    emu_run_lanes<A...>(f, *(typename emu_plain<A>::type*)p[I]...);
}
template <class... A>
EMU_UNCHECKED void emu_call(void (*f)(A...), void** p) {
    emu_call_numbered(f, p, typename emu_count<sizeof...(A)>::type());
}
#ifndef EMU_FULL
// A whole block of a kernel in which no thread waits for another: a plain loop. threadIdx under a name that is
// no constant:
#if defined(__APPLE__)
extern "C" EMU_TLS __thread uint3 emu_thread_index __asm("_threadIdx");
#else
extern "C" EMU_TLS __thread uint3 emu_thread_index __asm("threadIdx");
#endif
template <class... A>
void emu_run_block(void (*f)(A...), typename emu_plain<A>::type... arguments) {
    __asm volatile("" : "+r"(f));
    const uint3 n = blockDim;
    for (unsigned z = 0; z < n.z; z++)
        for (unsigned y = 0; y < n.y; y++) {
            emu_thread_index = {0, y, z};
            for (unsigned x = 0; x < n.x; x++) {
                emu_thread_index.x = x;
                f(arguments...);
            }
        }
}
template <class... A, int... I>
void emu_block_numbered(void (*f)(A...), void** p, emu_numbers<I...>) {
    emu_run_block<A...>(f, *(typename emu_plain<A>::type*)p[I]...);
}
template <class... A>
void emu_block(void (*f)(A...), void** p) {
    emu_block_numbered(f, p, typename emu_count<sizeof...(A)>::type());
}
#define EMU_BLOCK_ENTRY(number, ...) \
    extern "C" EMU_EXPORT void emu_block_##number(void** emu_args) { emu_block(&__VA_ARGS__, emu_args); }
#else
#define EMU_BLOCK_ENTRY(number, ...)
#endif
#define EMU_ENTRY(number, ...)                                                                                       \
    extern "C" EMU_EXPORT EMU_UNCHECKED void emu_entry_##number(void** emu_args) { emu_call(&__VA_ARGS__, emu_args); } \
    EMU_BLOCK_ENTRY(number, __VA_ARGS__)                                                                           \
    extern "C" EMU_EXPORT EMU_UNCHECKED int emu_describe_##number(emu_parameter* emu_out) { return emu_describe(&__VA_ARGS__, emu_out); }
#define EMU_BOUND(number, ...) extern "C" EMU_EXPORT EMU_UNCHECKED int emu_bound_##number() { return (int)(__VA_ARGS__); }
