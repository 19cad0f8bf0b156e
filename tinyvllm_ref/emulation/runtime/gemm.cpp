// C = alpha op(A) op(B) + beta C as cublasGemmEx computes it: column-major; BF16, F16 or F32 in and out;
// products and sums in float32.
//
// An output is the dot product of a row of op(A) with a column of op(B). The order in which its products are
// added is fixed (gemm_kernel.h): it does not depend on m, n, the batch or the number of threads, so a row gives
// the same bits alone and in a batch.
//
// The smaller operand is converted to float32 a panel at a time and stays in the cache ("resident"); the rows of
// the larger one stream past it, converted NR rows and kBlockK columns at a time. Neither is ever expanded whole.
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

namespace {

enum { kF32 = 0, kF16 = 2, kBf16 = 14 };       // cudaDataType
constexpr long kPad = 32;                      // packed rows are zero up to a multiple of this: of every kStep
constexpr long kBlockK = 1024;                 // part of the fixed order of the sums
constexpr long kPanelRows = 120;               // resident rows at a time: a multiple of every MR
constexpr size_t kPanelBytes = 512 << 10;      // a panel of all k is kept where it fits into this
constexpr long kStreamRows = 256;              // streamed rows that share a panel of one kBlockK
constexpr long kWholeStreamRows = 16;          // that are multiplied by a panel of all k before C is written
constexpr long kWorkPerThread = 1 << 17;       // multiply-adds that are worth a thread: some 10 us
constexpr long kTasksPerThread = 8;
constexpr int kMaxNR = 4;

inline float bits_to_float(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

inline uint32_t float_to_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

inline float bf16_to_float(uint16_t h) { return bits_to_float(uint32_t(h) << 16); }

inline uint16_t float_to_bf16(float f) {
    uint32_t u = float_to_bits(f);
    if ((u & 0x7FFFFFFFu) > 0x7F800000u) return uint16_t(u >> 16 | 0x40);  // a NaN stays one
    return uint16_t((u + 0x7FFFu + (u >> 16 & 1)) >> 16);                  // to nearest, ties to even
}

inline float f16_to_float(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
    if (exponent == 31) return bits_to_float(sign | 0x7F800000u | fraction << 13);
    if (exponent == 0) {
        float f = float(fraction) * (1.0f / 16777216.0f);                  // subnormal: units of 2^-24
        return sign ? -f : f;
    }
    return bits_to_float(sign | (exponent + 112) << 23 | fraction << 13);
}

inline uint16_t float_to_f16(float f) {
    uint32_t u = float_to_bits(f), sign = u >> 16 & 0x8000, a = u & 0x7FFFFFFFu;
    if (a > 0x7F800000u) return uint16_t(sign | 0x7E00);
    if (a >= 0x477FF000u) return uint16_t(sign | 0x7C00);                  // rounds to 2^16 or more: infinity
    if (a < 0x38800000u) {                                                 // below 2^-14: subnormal or zero
        // Adding 0.5 leaves the result in units of 2^-24 in the low bits, rounded by the addition itself.
        uint32_t r = float_to_bits(bits_to_float(a) + 0.5f) - 0x3F000000u;
        return uint16_t(sign | r);
    }
    return uint16_t(sign | (a - 0x38000000u + 0xFFFu + (a >> 13 & 1)) >> 13);
}

struct Bf16 {
    uint16_t bits;
};
struct F16 {
    uint16_t bits;
};
inline float to_float(Bf16 h) { return bf16_to_float(h.bits); }
inline float to_float(F16 h) { return f16_to_float(h.bits); }

// The sums of `count` packed rows with nr rows at w: gemm_kernel.h.
typedef void (*Rows)(const void* packed, ptrdiff_t ldx, long count, const void* const* w, long k, float* out,
                     ptrdiff_t ldo, bool first);
struct Kernels {
    int mr, nr;
    size_t item;             // bytes of a packed element: float32, or bfloat16 as it came
    void (*from_bf16)(const Bf16* from, float* to, long n);
    void (*from_f16)(const F16* from, float* to, long n);
    Rows packed, bf16, f16;  // by the type of the rows at w
};

// ---------------- instruction sets

#if defined(__x86_64__)

// clang 18 to 20 have the registers of 512 bits as a feature of their own, which zig turns off by itself.
#if defined(__clang__) && !defined(__apple_build_version__) && __clang_major__ >= 18 && __clang_major__ <= 20
#define WIDE "evex512,"
#else
#define WIDE ""
#endif
#define AVX512 __attribute__((target(WIDE "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
namespace avx512 {
enum { MR = 6, NR = 4 };
typedef __m512 Sum, Operand;
typedef float Packed;
constexpr int kStep = 16;
AVX512 inline __m512 zero() { return _mm512_setzero_ps(); }
AVX512 inline __m512 load(const float* p) { return _mm512_loadu_ps(p); }
AVX512 inline __m512 load(const Bf16* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
AVX512 inline __m512 load(const F16* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
AVX512 inline void store(float* p, __m512 v) { _mm512_storeu_ps(p, v); }
AVX512 inline __m512 fma(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
AVX512 inline __m128 to4(__m512 v) {
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    return _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
}
AVX512 inline void sum4(__m512 a, __m512 b, __m512 c, __m512 d, float* out) {
    _mm_storeu_ps(out, _mm_hadd_ps(_mm_hadd_ps(to4(a), to4(b)), _mm_hadd_ps(to4(c), to4(d))));
}
// Two vectors become one, in which each has half as many lanes: l + 8 and l; l + 4; and, by other shuffles, l + 1; l + 2.
AVX512 inline __m512 fold8(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
}
AVX512 inline __m512 fold4(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
}
AVX512 inline __m512 fold1(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xDD));
}
AVX512 inline void sum16(const __m512* v, float* out) {
    __m512 quad[4];
    UNROLL for (int q = 0; q < 4; q++) {
        quad[q] = fold4(fold8(v[4 * q], v[4 * q + 1]), fold8(v[4 * q + 2], v[4 * q + 3]));
    }
    const __m512 sums = fold1(fold1(quad[0], quad[1]), fold1(quad[2], quad[3]));  // of v[0], v[4], v[8], v[12], v[1], ...
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_ps(out, _mm512_permutexvar_ps(order, sums));
}
}  // namespace avx512
#define KERNEL_NAMESPACE avx512
#define TARGET AVX512
#include "gemm_kernel.h"
namespace avx512 {
const Kernels kernels = {MR, NR, sizeof(Packed), convert<Bf16>, convert<F16>, rows<float>, rows<Bf16>, rows<F16>};
}

// bfloat16 times bfloat16 by the instruction that is made for it: two products a lane, and nothing is converted. It
// takes subnormal numbers (below 1.2e-38) for zero.
#define AVX512_BF16 __attribute__((target(WIDE "avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
namespace avx512_bf16 {
enum { MR = 6, NR = 4 };
typedef __m512 Sum;
typedef __m512i Operand;
typedef Bf16 Packed;
constexpr int kStep = 32;
AVX512_BF16 inline __m512 zero() { return _mm512_setzero_ps(); }
AVX512_BF16 inline __m512i load(const Bf16* p) { return _mm512_loadu_si512(p); }
AVX512_BF16 inline __m512 fma(__m512i a, __m512i b, __m512 c) {
    return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
}
AVX512_BF16 inline void sum4(__m512 a, __m512 b, __m512 c, __m512 d, float* out) { avx512::sum4(a, b, c, d, out); }
AVX512_BF16 inline void sum16(const __m512* v, float* out) { avx512::sum16(v, out); }
}  // namespace avx512_bf16
#define KERNEL_NAMESPACE avx512_bf16
#define TARGET AVX512_BF16
#include "gemm_kernel.h"
namespace avx512_bf16 {
const Kernels kernels = {MR, NR, sizeof(Packed), nullptr, nullptr, rows<Bf16>, rows<Bf16>, nullptr};
}

#define AVX2 __attribute__((target("avx2,fma,f16c")))
namespace avx2 {
enum { MR = 2, NR = 2 };
struct Vector {
    __m256 lo, hi;
};
typedef Vector Sum, Operand;
typedef float Packed;
constexpr int kStep = 16;
AVX2 inline Vector zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
AVX2 inline Vector load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
AVX2 inline __m256 half(const Bf16* p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
AVX2 inline Vector load(const Bf16* p) { return {half(p), half(p + 8)}; }
AVX2 inline Vector load(const F16* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
AVX2 inline void store(float* p, Vector v) {
    _mm256_storeu_ps(p, v.lo);
    _mm256_storeu_ps(p + 8, v.hi);
}
AVX2 inline Vector fma(Vector a, Vector b, Vector c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
AVX2 inline __m128 to4(Vector v) {
    __m256 h = _mm256_add_ps(v.lo, v.hi);
    return _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
}
AVX2 inline void sum4(Vector a, Vector b, Vector c, Vector d, float* out) {
    _mm_storeu_ps(out, _mm_hadd_ps(_mm_hadd_ps(to4(a), to4(b)), _mm_hadd_ps(to4(c), to4(d))));
}
}  // namespace avx2
#define KERNEL_NAMESPACE avx2
#define TARGET AVX2
#include "gemm_kernel.h"
namespace avx2 {
const Kernels kernels = {MR, NR, sizeof(Packed), convert<Bf16>, convert<F16>, rows<float>, rows<Bf16>, rows<F16>};
}

#endif

// Every processor: four vectors of four, which the compiler maps to SSE2 or NEON. There is a fused multiply-add
// in every arm64 processor and in no SSE2 one; either way all blocks use the same.
namespace plain {
#if defined(__aarch64__)
enum { MR = 3, NR = 2 };
#else
enum { MR = 1, NR = 2 };
#endif
typedef float Quad __attribute__((vector_size(16)));
struct Vector {
    Quad q[4];
};
typedef Vector Sum, Operand;
typedef float Packed;
constexpr int kStep = 16;
inline Vector zero() { return {}; }
inline Vector load(const float* p) {
    Vector v;
    memcpy(&v, p, sizeof v);
    return v;
}
inline Vector load(const Bf16* p) {
    Vector v;
    for (int q = 0; q < 4; q++) {
        uint32_t bits[4] = {uint32_t(p[4 * q].bits) << 16, uint32_t(p[4 * q + 1].bits) << 16,
                            uint32_t(p[4 * q + 2].bits) << 16, uint32_t(p[4 * q + 3].bits) << 16};
        memcpy(&v.q[q], bits, sizeof bits);
    }
    return v;
}
inline Vector load(const F16* p) {
    float f[kStep];
    for (int l = 0; l < kStep; l++) f[l] = f16_to_float(p[l].bits);
    return load(f);
}
inline void store(float* p, Vector v) { memcpy(p, &v, sizeof v); }
inline Vector fma(Vector a, Vector b, Vector c) {
    UNROLL for (int q = 0; q < 4; q++) {
#if defined(__aarch64__)
        c.q[q] = (Quad)vfmaq_f32((float32x4_t)c.q[q], (float32x4_t)a.q[q], (float32x4_t)b.q[q]);
#else
        c.q[q] += a.q[q] * b.q[q];
#endif
    }
    return c;
}
inline float sum(Vector v) {
    Quad s = (v.q[0] + v.q[2]) + (v.q[1] + v.q[3]);
    return (s[0] + s[1]) + (s[2] + s[3]);
}
inline void sum4(Vector a, Vector b, Vector c, Vector d, float* out) {
    out[0] = sum(a), out[1] = sum(b), out[2] = sum(c), out[3] = sum(d);
}
}  // namespace plain
#define KERNEL_NAMESPACE plain
#define TARGET
#include "gemm_kernel.h"
namespace plain {
const Kernels kernels = {MR, NR, sizeof(Packed), convert<Bf16>, convert<F16>, rows<float>, rows<Bf16>, rows<F16>};
}

#if defined(__x86_64__)
// What processor and system support: asked directly, because not every compiler's library has
// __builtin_cpu_supports.
int best_level() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 1;
    const unsigned fma_bit = 1u << 12, osxsave = 1u << 27, avx = 1u << 28, f16c = 1u << 29;
    if ((c & (fma_bit | osxsave | avx | f16c)) != (fma_bit | osxsave | avx | f16c)) return 1;
    unsigned saved, high;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if ((saved & 6) != 6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b >> 5 & 1)) return 1;
    const unsigned f512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
    if ((saved & 0xE6) != 0xE6 || (b & f512) != f512) return 2;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 5 & 1 ? 4 : 3;
}
#else
int best_level() { return 1; }
#endif

int forced_level = 0;

int level() {
    static int best = 0;  // no guarded initialisation: there is no C++ library behind it, and it is idempotent
    if (best == 0) best = best_level();
    return forced_level && forced_level < best ? forced_level : best;
}

const Kernels& select_kernels(bool both_bf16) {
#if defined(__x86_64__)
    if (level() == 4 && both_bf16) return avx512_bf16::kernels;
    if (level() >= 3) return avx512::kernels;
    if (level() == 2) return avx2::kernels;
#endif
    (void)both_bf16;
    return plain::kernels;
}

// ---------------- blocking

// One operand as rows of k: element (i, k) lies at data[(i * row + k * col)].
struct Operand {
    const char* data;
    int type;
    long count;                // rows
    ptrdiff_t row, col;        // strides in elements
    long long batch_stride;

    size_t item() const { return type == kF32 ? 4 : 2; }
    const char* at(long i, long k) const { return data + (i * row + k * col) * ptrdiff_t(item()); }
    float value(long i, long k) const {
        const char* p = at(i, k);
        if (type == kF32) return *(const float*)p;
        uint16_t h = *(const uint16_t*)p;
        return type == kBf16 ? bf16_to_float(h) : f16_to_float(h);
    }
};

struct Problem {
    const Kernels* kernels;
    Operand resident, streamed;
    long k;
    float alpha, beta;
    char* c;
    int c_type;
    ptrdiff_t c_resident, c_streamed;  // strides of C along the two operands' rows, in elements
    long long c_batch_stride;
    long batch;
};

// The work is cut into tasks, (batch, resident panel, chunk of streamed rows), which the threads take in turn: a
// core that is slower, or busy with something else, takes fewer.
struct Job {
    const Problem* problem;
    long panels, chunk, chunks;      // panels of resident rows; streamed rows of a chunk; chunks
    long next;                       // the first task that no thread has taken
};

long round_up(long n, long to) { return (n + to - 1) / to * to; }

// One row from column k on, as float or, where packed elements are bfloat16, as it is.
void pack_row(const Kernels& kernels, const Operand& x, long i, long k, long width, char* to) {
    if (x.col != 1) {
        for (long p = 0; p < width; p++) {
            if (kernels.item == 2) memcpy(to + 2 * p, x.at(i, k + p), 2);
            else ((float*)to)[p] = x.value(i, k + p);
        }
    } else if (kernels.item == x.item()) {
        memcpy(to, x.at(i, k), size_t(width) * x.item());
    } else if (x.type == kBf16) {
        kernels.from_bf16((const Bf16*)x.at(i, k), (float*)to, width);
    } else {
        kernels.from_f16((const F16*)x.at(i, k), (float*)to, width);
    }
}

// Rows i.. of columns k.., packed ld elements apart, each zero up to a multiple of kPad.
void pack(const Kernels& kernels, const Operand& x, long i, long rows, long k, long width, char* to, ptrdiff_t ld) {
    for (long r = 0; r < rows; r++) {
        char* row = to + r * ld * ptrdiff_t(kernels.item);
        pack_row(kernels, x, i + r, k, width, row);
        memset(row + size_t(width) * kernels.item, 0, size_t(round_up(width, kPad) - width) * kernels.item);
    }
}

// C = alpha * sums + beta * C for some rows of both operands; sums is [resident row][streamed row].
void write_out(const Problem& g, char* c, long resident, long rows, long streamed, long count,
               const float* sums, ptrdiff_t ld) {
    const size_t item = g.c_type == kF32 ? 4 : 2;
    if (g.c_type == kF32 && g.alpha == 1 && g.beta == 0 && g.c_streamed == 1) {
        for (long r = 0; r < rows; r++)
            memcpy((float*)c + (resident + r) * g.c_resident + streamed, sums + r * ld, size_t(count) * item);
        return;
    }
    for (long r = 0; r < rows; r++) {
        for (long j = 0; j < count; j++) {
            char* p = c + ((resident + r) * g.c_resident + (streamed + j) * g.c_streamed) * ptrdiff_t(item);
            float value = g.alpha * sums[r * ld + j];
            if (g.c_type == kF32) {
                if (g.beta != 0) value += g.beta * *(float*)p;
                *(float*)p = value;
            } else {
                uint16_t* h = (uint16_t*)p;
                bool bf16 = g.c_type == kBf16;
                if (g.beta != 0) value += g.beta * (bf16 ? bf16_to_float(*h) : f16_to_float(*h));
                *h = bf16 ? float_to_bf16(value) : float_to_f16(value);
            }
        }
    }
}

// Memory of one thread.
struct Scratch {
    char* panel;     // resident rows
    char* packed;    // NR streamed rows of one kBlockK
    float* sums;     // [kPanelRows][kStreamRows]
};

constexpr ptrdiff_t kPackedLd = kBlockK + kPad;  // not a power of two: rows must not share cache sets
constexpr ptrdiff_t kSumsLd = kStreamRows + 16;

// Elements from one row of a panel of all k to the next.
ptrdiff_t whole_ld(const Problem& g) { return round_up(g.k, kPad) + kPad; }

bool panel_holds_all(const Problem& g, long rows) {
    return size_t(rows) * size_t(whole_ld(g)) * g.kernels->item <= kPanelBytes;
}

// The sums of `rows` resident rows from `i` with `count` streamed rows from `s`, for all k.
void tile(const Problem& g, const Operand& resident, const Operand& streamed, long i, long rows, long s,
          long count, const Scratch& m) {
    const Kernels& kernels = *g.kernels;
    const bool whole = panel_holds_all(g, rows);
    const ptrdiff_t ld = whole ? whole_ld(g) : kPackedLd;
    // With four blocks or fewer, converting streamed rows as they are used is cheaper than storing them first; and
    // bfloat16 that stays as it is need never be stored.
    const bool direct = streamed.col == 1 && (rows <= 4 * kernels.mr || kernels.item == sizeof(Bf16));
    for (long k = 0; k < g.k; k += kBlockK) {
        const long width = g.k - k < kBlockK ? g.k - k : kBlockK;
        if (!whole) pack(kernels, resident, i, rows, k, width, m.panel, ld);
        const char* x = whole ? m.panel + size_t(k) * kernels.item : m.panel;
        for (long j = 0; j < count; j += kernels.nr) {
            const long n = count - j < kernels.nr ? count - j : kernels.nr;
            const void* w[kMaxNR];
            if (!direct) pack(kernels, streamed, s + j, n, k, width, m.packed, kPackedLd);
            // A block has always NR rows: the last one stands in for those that are not there.
            for (long q = 0; q < kernels.nr; q++) {
                const long row = q < n ? q : n - 1;
                w[q] = direct ? streamed.at(s + j + row, k) : m.packed + row * kPackedLd * ptrdiff_t(kernels.item);
            }
            Rows run = !direct || streamed.type == kF32 ? kernels.packed
                       : streamed.type == kBf16         ? kernels.bf16
                                                        : kernels.f16;
            run(x, ld, rows, w, direct ? width : round_up(width, kPad), m.sums + j, kSumsLd, k == 0);
        }
    }
}

// One task. *packed_panel says which (batch, panel) the thread's resident rows are of, where they hold all k.
void multiply(const Job& job, long task, const Scratch& m, long* packed_panel) {
    const Problem& g = *job.problem;
    const long from = task % job.chunks * job.chunk, panel = task / job.chunks;
    const long batch = panel / job.panels, i = panel % job.panels * kPanelRows;
    Operand resident = g.resident, streamed = g.streamed;
    resident.data += batch * resident.batch_stride * (long long)resident.item();
    streamed.data += batch * streamed.batch_stride * (long long)streamed.item();
    char* c = g.c + batch * g.c_batch_stride * (g.c_type == kF32 ? 4 : 2);
    const long rows = resident.count - i < kPanelRows ? resident.count - i : kPanelRows;
    const bool whole = panel_holds_all(g, rows);
    if (whole && *packed_panel != panel) {
        pack(*g.kernels, resident, i, rows, 0, g.k, m.panel, whole_ld(g));
        *packed_panel = panel;
    }
    const long to = from + job.chunk < streamed.count ? from + job.chunk : streamed.count;
    const long step = whole ? kWholeStreamRows : kStreamRows;
    for (long s = from; s < to; s += step) {
        const long count = to - s < step ? to - s : step;
        tile(g, resident, streamed, i, rows, s, count, m);
        write_out(g, c, i, rows, s, count, m.sums, kSumsLd);
    }
}

pthread_once_t key_once = PTHREAD_ONCE_INIT;
pthread_key_t scratch_key;
void make_key() { pthread_key_create(&scratch_key, free); }

// A thread's working memory: made at its first product, and kept until the thread ends.
bool take_scratch(Scratch* m) {
    constexpr size_t least = size_t(kPanelRows * kPackedLd) * sizeof(float);
    constexpr size_t panel_bytes = kPanelBytes > least ? kPanelBytes : least;
    constexpr size_t packed_bytes = size_t(kMaxNR * kPackedLd) * sizeof(float);
    constexpr size_t sums_bytes = size_t(kPanelRows * kSumsLd) * sizeof(float);
    static __thread void* memory;
    if (!memory) {
        if (posix_memalign(&memory, 4096, panel_bytes + packed_bytes + sums_bytes) != 0) {
            memory = nullptr;
            return false;
        }
        pthread_once(&key_once, make_key);
        pthread_setspecific(scratch_key, memory);
    }
    m->panel = (char*)memory;
    m->packed = m->panel + panel_bytes;
    m->sums = (float*)(m->packed + packed_bytes);
    return true;
}

void run_job(void* argument) {
    Job& job = *(Job*)argument;
    Scratch m;
    if (!take_scratch(&m)) return;
    if (job.problem->k == 0) memset(m.sums, 0, size_t(kPanelRows * kSumsLd) * sizeof(float));
    const long tasks = job.problem->batch * job.panels * job.chunks;
    long packed_panel = -1;
    for (;;) {
        const long task = __atomic_fetch_add(&job.next, 1, __ATOMIC_RELAXED);
        if (task >= tasks) break;
        multiply(job, task, m, &packed_panel);
    }
}

// True unless memory ran out.
bool run(const Problem& g, int threads) {
    const double work = double(g.resident.count) * double(g.streamed.count) * double(g.k) * double(g.batch);
    if (threads > work / kWorkPerThread) threads = int(work / kWorkPerThread);
    Job job;
    job.problem = &g;
    job.panels = (g.resident.count + kPanelRows - 1) / kPanelRows;
    const long others = g.batch * job.panels, wanted = threads * kTasksPerThread;
    const long pieces = threads <= 1 || others >= wanted ? 1 : (wanted + others - 1) / others;
    job.chunk = round_up((g.streamed.count + pieces - 1) / pieces, 16);
    job.chunks = (g.streamed.count + job.chunk - 1) / job.chunk;
    job.next = 0;
    if (threads > others * job.chunks) threads = int(others * job.chunks);
    const bool helped = threads > 1 && emu::start_help(run_job, &job, threads - 1);
    run_job(&job);
    if (helped) emu::finish_help();
    // A helper without memory leaves its share to the others; only when nobody had any is work left.
    return job.next >= g.batch * job.panels * job.chunks;
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

// C = alpha op(A) op(B) + beta C for each of `batch`; column-major, strides and leading dimensions in elements.
// trans_*: 0 as stored, 1 transposed. Types: 0 F32, 2 F16, 14 BF16. Where alpha or k is 0, A and B are not read;
// where beta is 0, C is not. 0 on success, 2 when there is no memory to work in. All ranges must be valid.
API int emu_gemm(int trans_a, int trans_b, long m, long n, long k, float alpha, const void* a, int a_type,
                 long lda, long long stride_a, const void* b, int b_type, long ldb, long long stride_b,
                 float beta, void* c, int c_type, long ldc, long long stride_c, long batch, int threads) {
    if (m <= 0 || n <= 0 || batch <= 0) return 0;
    Problem g;
    g.kernels = &select_kernels(a_type == kBf16 && b_type == kBf16);
    g.k = alpha == 0 ? 0 : k;
    g.alpha = alpha;
    g.beta = beta;
    g.c = (char*)c;
    g.c_type = c_type;
    g.c_batch_stride = stride_c;
    g.batch = batch;
    const Operand rows_a = {(const char*)a, a_type, m, trans_a ? lda : 1, trans_a ? 1 : lda, stride_a};
    const Operand rows_b = {(const char*)b, b_type, n, trans_b ? 1 : ldb, trans_b ? ldb : 1, stride_b};
    const bool a_streams = m >= n;
    g.streamed = a_streams ? rows_a : rows_b;
    g.resident = a_streams ? rows_b : rows_a;
    g.c_streamed = a_streams ? 1 : ldc;
    g.c_resident = a_streams ? ldc : 1;
    return run(g, threads) ? 0 : 2;
}

// Which instructions emu_gemm uses: 1 those of every processor, 2 AVX2, 3 AVX-512, 4 its bfloat16
// products too. A `wanted` above 0 sets an
// upper limit (for tests), 0 removes it, below 0 only asks.
API int emu_gemm_level(int wanted) {
    if (wanted >= 0) forced_level = wanted;
    return level();
}
