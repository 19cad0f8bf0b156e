// The class of one 16-bit floating-point type, its pair type, and the functions that both have.
//
// Included once by cuda_fp16.h and once by cuda_bf16.h, which set
//   EMU_TYPE, EMU_PAIR      names of the two types              __half, __half2
//   EMU_OTHER               the other 16-bit type               __nv_bfloat16
//   EMU_RAW, EMU_RAW_PAIR   their plain-bits structs            __half_raw, __half2_raw
//   EMU_NAME                its name inside function names      half
//   EMU_FRACTION, EMU_BIAS  fraction bits and exponent bias     10, 15
//
// Arithmetic is that of the hardware: exact, then rounded once. Sums, products and quotients are taken in
// float, whose 24 bits are more than twice the format's, so that the second rounding changes nothing.
//
// Every function is a template of a type K that nobody passes. A body that depends on K is only parsed; its
// overloads are resolved when a kernel calls it. Resolved here, they cost every compilation 50 ms.
// No #pragma once: this text is meant to be read twice.
#pragma GCC system_header

#define EMU_PASTE_(a, b, c) a##b##c
#define EMU_PASTE(a, b, c) EMU_PASTE_(a, b, c)
// EMU_FN(__float2, _rn) is __float2half_rn, EMU_PAIR_FN(__float2, _rn) is __float2half2_rn.
#define EMU_FN(before, after) EMU_PASTE(before, EMU_NAME, after)
#define EMU_PAIR_FN(before, after) EMU_PASTE(before, EMU_NAME, 2##after)
// What every function begins with.
#define EMU_DEFINE template <class K = EMU_TYPE> EMU_SMALL_FLOAT

struct EMU_PAIR;
struct EMU_OTHER;
struct alignas(2) EMU_RAW {
    unsigned short x;
};
struct alignas(4) EMU_RAW_PAIR {
    unsigned short x, y;
};

struct alignas(2) EMU_TYPE {
    unsigned short __x;

    EMU_TYPE() = default;
    EMU_SMALL_FLOAT_MEMBER EMU_TYPE(const EMU_RAW &raw) : __x(raw.x) {}
    EMU_SMALL_FLOAT_MEMBER operator EMU_RAW() const { return EMU_RAW{__x}; }
    EMU_SMALL_FLOAT_MEMBER operator bool() const { return (__x & 0x7fff) != 0; }
    explicit EMU_TYPE(EMU_OTHER other);

    // From and to every arithmetic type: to nearest; to integers toward zero, held to the ends of the type.
#define EMU_FROM(T, BITS) \
    EMU_SMALL_FLOAT_MEMBER EMU_TYPE(T value) : __x(BITS) {}
#define EMU_TO(T, VALUE) \
    EMU_SMALL_FLOAT_MEMBER operator T() const { return VALUE; }
#define EMU_TO_INTEGER(T, WIDE) \
    EMU_TO(T, (T)(emu_widen_integer<EMU_FRACTION, EMU_BIAS, WIDE>(__x, emu_rz, sizeof(T))))
#define EMU_INTEGER(T, WIDE)                                                       \
    EMU_FROM(T, (emu_narrow_integer<EMU_FRACTION, EMU_BIAS>((WIDE)value, emu_rn))) \
    EMU_TO_INTEGER(T, WIDE)
    EMU_FROM(float, (emu_narrow<EMU_FRACTION, EMU_BIAS>(value, emu_rn)))
    EMU_FROM(double, (emu_narrow<EMU_FRACTION, EMU_BIAS>(emu_odd_float(value), emu_rn)))
    EMU_TO(float, (emu_widen<EMU_FRACTION, EMU_BIAS>(__x)))
    EMU_TO_INTEGER(char, emu_wide_char)
    EMU_TO_INTEGER(signed char, long long)
    EMU_TO_INTEGER(unsigned char, unsigned long long)
    EMU_INTEGER(short, long long)
    EMU_INTEGER(unsigned short, unsigned long long)
    EMU_INTEGER(int, long long)
    EMU_INTEGER(unsigned int, unsigned long long)
    EMU_INTEGER(long, long long)
    EMU_INTEGER(unsigned long, unsigned long long)
    EMU_INTEGER(long long, long long)
    EMU_INTEGER(unsigned long long, unsigned long long)
#undef EMU_INTEGER
#undef EMU_TO_INTEGER
#undef EMU_FROM
#undef EMU_TO
};

struct alignas(4) EMU_PAIR {
    EMU_TYPE x, y;

#if defined(EMU_FULL) && defined(__clang__)
    EMU_COPIED_WHOLE(unsigned short, EMU_PAIR, 2)
#else
    EMU_PAIR() = default;
#endif
    EMU_SMALL_FLOAT_MEMBER EMU_PAIR(const EMU_TYPE &low, const EMU_TYPE &high) : x(low), y(high) {}
    EMU_SMALL_FLOAT_MEMBER EMU_PAIR(const EMU_RAW_PAIR &raw) : x(EMU_RAW{raw.x}), y(EMU_RAW{raw.y}) {}
    EMU_SMALL_FLOAT_MEMBER operator EMU_RAW_PAIR() const { return EMU_RAW_PAIR{x.__x, y.__x}; }
};

// The parts that bodies are written with: a number as a float, rounded to K, by its bits; a pair.
template <> struct emu_format<EMU_TYPE> {
    typedef EMU_PAIR pair;
    static constexpr int fraction = EMU_FRACTION, bias = EMU_BIAS;
};
#define EMU_F(a) emu_value<K>(a)
#define EMU_K(value) emu_rounded<K>(value, emu_rn)
#define EMU_BITS(bits) emu_of_bits<K>(bits)
#define EMU_2(low, high) emu_pair_of<K>(low, high)

// ---- conversions -------------------------------------------------------------------------------------

EMU_DEFINE float EMU_FN(__, 2float)(EMU_TYPE a) { return EMU_F(a); }
EMU_DEFINE EMU_TYPE EMU_FN(__float2, )(float a) { return EMU_K(a); }
EMU_DEFINE EMU_TYPE EMU_FN(__float2, _rn)(float a) { return EMU_K(a); }
EMU_DEFINE EMU_TYPE EMU_FN(__float2, _rz)(float a) { return emu_rounded<K>(a, emu_rz); }
EMU_DEFINE EMU_TYPE EMU_FN(__float2, _rd)(float a) { return emu_rounded<K>(a, emu_rd); }
EMU_DEFINE EMU_TYPE EMU_FN(__float2, _ru)(float a) { return emu_rounded<K>(a, emu_ru); }
EMU_DEFINE EMU_TYPE EMU_FN(__double2, )(double a) { return EMU_K(emu_odd_float(a)); }
EMU_DEFINE unsigned short EMU_FN(__, _as_ushort)(EMU_TYPE a) { return a.__x; }
EMU_DEFINE short EMU_FN(__, _as_short)(EMU_TYPE a) { return (short)a.__x; }
EMU_DEFINE EMU_TYPE EMU_FN(__ushort_as_, )(unsigned short a) { return EMU_BITS(a); }
EMU_DEFINE EMU_TYPE EMU_FN(__short_as_, )(short a) { return EMU_BITS((unsigned short)a); }
EMU_DEFINE signed char EMU_FN(__, 2char_rz)(EMU_TYPE a) {
    return emu_integer<K, signed char, long long>(a.__x, emu_rz);
}
EMU_DEFINE unsigned char EMU_FN(__, 2uchar_rz)(EMU_TYPE a) {
    return emu_integer<K, unsigned char, unsigned long long>(a.__x, emu_rz);
}

#define EMU_INTEGER_MODE(NAME, T, WIDE, MODE)               \
    EMU_DEFINE EMU_TYPE EMU_FN(__##NAME##2, _##MODE)(T a) { \
        return emu_of_integer<K>((WIDE)a, emu_##MODE);      \
    }                                                       \
    EMU_DEFINE T EMU_FN(__, 2##NAME##_##MODE)(EMU_TYPE a) { \
        return emu_integer<K, T, WIDE>(a.__x, emu_##MODE);  \
    }
#define EMU_INTEGER(NAME, T, WIDE)      \
    EMU_INTEGER_MODE(NAME, T, WIDE, rn) \
    EMU_INTEGER_MODE(NAME, T, WIDE, rz) \
    EMU_INTEGER_MODE(NAME, T, WIDE, rd) \
    EMU_INTEGER_MODE(NAME, T, WIDE, ru)
EMU_INTEGER(short, short, long long)
EMU_INTEGER(ushort, unsigned short, unsigned long long)
EMU_INTEGER(int, int, long long)
EMU_INTEGER(uint, unsigned int, unsigned long long)
EMU_INTEGER(ll, long long, long long)
EMU_INTEGER(ull, unsigned long long, unsigned long long)
#undef EMU_INTEGER
#undef EMU_INTEGER_MODE

// ---- making and taking apart a pair ------------------------------------------------------------------

EMU_DEFINE EMU_PAIR EMU_PAIR_FN(make_, )(EMU_TYPE a, EMU_TYPE b) { return EMU_2(a, b); }
EMU_DEFINE EMU_PAIR EMU_PAIR_FN(__halves2, )(EMU_TYPE a, EMU_TYPE b) { return EMU_2(a, b); }
EMU_DEFINE EMU_PAIR EMU_PAIR_FN(EMU_FN(__, 2), )(EMU_TYPE a) { return EMU_2(a, a); }
EMU_DEFINE EMU_PAIR EMU_PAIR_FN(__float2, _rn)(float a) { return EMU_2(EMU_K(a), EMU_K(a)); }
EMU_DEFINE EMU_PAIR EMU_PAIR_FN(__floats2, _rn)(float a, float b) { return EMU_2(EMU_K(a), EMU_K(b)); }
EMU_DEFINE EMU_PAIR EMU_PAIR_FN(__float22, _rn)(float2 a) { return EMU_2(EMU_K(a.x), EMU_K(a.y)); }
EMU_DEFINE float2 EMU_FN(__, 22float2)(EMU_PAIR a) { return float2{EMU_F(a.x), EMU_F(a.y)}; }
EMU_DEFINE float __low2float(EMU_PAIR a) { return EMU_F(a.x); }
EMU_DEFINE float __high2float(EMU_PAIR a) { return EMU_F(a.y); }
EMU_DEFINE EMU_TYPE EMU_FN(__low2, )(EMU_PAIR a) { return EMU_BITS(a.x.__x); }
EMU_DEFINE EMU_TYPE EMU_FN(__high2, )(EMU_PAIR a) { return EMU_BITS(a.y.__x); }
EMU_DEFINE EMU_PAIR EMU_PAIR_FN(__low2, )(EMU_PAIR a) { return EMU_2(a.x, a.x); }
EMU_DEFINE EMU_PAIR EMU_PAIR_FN(__high2, )(EMU_PAIR a) { return EMU_2(a.y, a.y); }
EMU_DEFINE EMU_PAIR EMU_PAIR_FN(__lows2, )(EMU_PAIR a, EMU_PAIR b) { return EMU_2(a.x, b.x); }
EMU_DEFINE EMU_PAIR EMU_PAIR_FN(__highs2, )(EMU_PAIR a, EMU_PAIR b) { return EMU_2(a.y, b.y); }
EMU_DEFINE EMU_PAIR __lowhigh2highlow(EMU_PAIR a) { return EMU_2(a.y, a.x); }

// ---- arithmetic --------------------------------------------------------------------------------------

// One function of one, two or three numbers, and the same on both halves of pairs.
#define EMU_UNARY(NAME, PAIR_NAME, EXPRESSION)                  \
    EMU_DEFINE EMU_TYPE NAME(EMU_TYPE a) { return EXPRESSION; } \
    EMU_DEFINE EMU_PAIR PAIR_NAME(EMU_PAIR a) { return EMU_2(NAME<K>(a.x), NAME<K>(a.y)); }
#define EMU_BINARY(NAME, PAIR_NAME, EXPRESSION)                             \
    EMU_DEFINE EMU_TYPE NAME(EMU_TYPE a, EMU_TYPE b) { return EXPRESSION; } \
    EMU_DEFINE EMU_PAIR PAIR_NAME(EMU_PAIR a, EMU_PAIR b) {                 \
        return EMU_2(NAME<K>(a.x, b.x), NAME<K>(a.y, b.y));                 \
    }
#define EMU_TERNARY(NAME, PAIR_NAME, EXPRESSION)                                        \
    EMU_DEFINE EMU_TYPE NAME(EMU_TYPE a, EMU_TYPE b, EMU_TYPE c) { return EXPRESSION; } \
    EMU_DEFINE EMU_PAIR PAIR_NAME(EMU_PAIR a, EMU_PAIR b, EMU_PAIR c) {                 \
        return EMU_2(NAME<K>(a.x, b.x, c.x), NAME<K>(a.y, b.y, c.y));                   \
    }

EMU_BINARY(__hadd, __hadd2, EMU_K(EMU_F(a) + EMU_F(b)))
EMU_BINARY(__hsub, __hsub2, EMU_K(EMU_F(a) - EMU_F(b)))
EMU_BINARY(__hmul, __hmul2, EMU_K(EMU_F(a) * EMU_F(b)))
EMU_BINARY(__hdiv, __h2div, EMU_K(EMU_F(a) / EMU_F(b)))
EMU_BINARY(__hadd_rn, __hadd2_rn, __hadd<K>(a, b))
EMU_BINARY(__hsub_rn, __hsub2_rn, __hsub<K>(a, b))
EMU_BINARY(__hmul_rn, __hmul2_rn, __hmul<K>(a, b))
EMU_BINARY(__hadd_sat, __hadd2_sat, emu_saturated(__hadd<K>(a, b)))
EMU_BINARY(__hsub_sat, __hsub2_sat, emu_saturated(__hsub<K>(a, b)))
EMU_BINARY(__hmul_sat, __hmul2_sat, emu_saturated(__hmul<K>(a, b)))
EMU_BINARY(__hmax, __hmax2, emu_pick<K>(a, b, emu_is_above<K>(a, b), false))
EMU_BINARY(__hmin, __hmin2, emu_pick<K>(a, b, emu_is_above<K>(b, a), false))
EMU_BINARY(__hmax_nan, __hmax2_nan, emu_pick<K>(a, b, emu_is_above<K>(a, b), true))
EMU_BINARY(__hmin_nan, __hmin2_nan, emu_pick<K>(a, b, emu_is_above<K>(b, a), true))

EMU_TERNARY(__hfma, __hfma2, EMU_K(emu_odd_fma(EMU_F(a), EMU_F(b), EMU_F(c))))
EMU_TERNARY(__hfma_sat, __hfma2_sat, emu_saturated(__hfma<K>(a, b, c)))
EMU_TERNARY(__hfma_relu, __hfma2_relu, emu_relu(__hfma<K>(a, b, c)))

EMU_UNARY(__hneg, __hneg2, EMU_BITS(a.__x ^ 0x8000))
EMU_UNARY(__habs, __habs2, EMU_BITS(a.__x & 0x7fff))
EMU_UNARY(hsqrt, h2sqrt, EMU_K(__builtin_sqrtf(EMU_F(a))))
EMU_UNARY(hrsqrt, h2rsqrt, EMU_K(emu_odd_float(1 / __builtin_sqrt((double)EMU_F(a)))))
EMU_UNARY(hrcp, h2rcp, EMU_K(1 / EMU_F(a)))
EMU_UNARY(hexp, h2exp, EMU_K(__builtin_expf(EMU_F(a))))
EMU_UNARY(hexp2, h2exp2, EMU_K(__builtin_exp2f(EMU_F(a))))
EMU_UNARY(hexp10, h2exp10, EMU_K(__builtin_powf(10.0f, EMU_F(a))))
EMU_UNARY(hlog, h2log, EMU_K(__builtin_logf(EMU_F(a))))
EMU_UNARY(hlog2, h2log2, EMU_K(__builtin_log2f(EMU_F(a))))
EMU_UNARY(hlog10, h2log10, EMU_K(__builtin_log10f(EMU_F(a))))
EMU_UNARY(hsin, h2sin, EMU_K(__builtin_sinf(EMU_F(a))))
EMU_UNARY(hcos, h2cos, EMU_K(__builtin_cosf(EMU_F(a))))
EMU_UNARY(htanh, h2tanh, EMU_K(__builtin_tanhf(EMU_F(a))))
EMU_UNARY(hceil, h2ceil, EMU_K(__builtin_ceilf(EMU_F(a))))
EMU_UNARY(hfloor, h2floor, EMU_K(__builtin_floorf(EMU_F(a))))
EMU_UNARY(htrunc, h2trunc, EMU_K(__builtin_truncf(EMU_F(a))))
EMU_UNARY(hrint, h2rint, EMU_K(__builtin_rintf(EMU_F(a))))
#undef EMU_UNARY
#undef EMU_BINARY
#undef EMU_TERNARY

// a * b + c of complex numbers, (x, y) = x + iy, four fused steps.
EMU_DEFINE EMU_PAIR __hcmadd(EMU_PAIR a, EMU_PAIR b, EMU_PAIR c) {
    return EMU_2(__hfma<K>(__hneg<K>(a.y), b.y, __hfma<K>(a.x, b.x, c.x)),
                 __hfma<K>(a.y, b.x, __hfma<K>(a.x, b.y, c.y)));
}

// ---- comparisons: false where a NaN is (__hne too); the "u" ones are true there ----------------------

EMU_DEFINE bool __hisnan(EMU_TYPE a) { return emu_is_nan<K>(a.__x); }
EMU_DEFINE int __hisinf(EMU_TYPE a) { return emu_infinity_sign(EMU_F(a)); }
EMU_DEFINE EMU_PAIR __hisnan2(EMU_PAIR a) { return EMU_2(EMU_K(__hisnan<K>(a.x)), EMU_K(__hisnan<K>(a.y))); }

#define EMU_COMPARE_AS(WORD, CONDITION)                                             \
    EMU_DEFINE bool __h##WORD(EMU_TYPE a, EMU_TYPE b) { return CONDITION; }         \
    EMU_DEFINE bool __hb##WORD##2(EMU_PAIR a, EMU_PAIR b) {                         \
        return __h##WORD<K>(a.x, b.x) && __h##WORD<K>(a.y, b.y);                    \
    }                                                                               \
    EMU_DEFINE EMU_PAIR __h##WORD##2(EMU_PAIR a, EMU_PAIR b) {                      \
        return EMU_2(EMU_K(__h##WORD<K>(a.x, b.x)), EMU_K(__h##WORD<K>(a.y, b.y))); \
    }
#define EMU_COMPARE(WORD, OPERATOR)                                             \
    EMU_COMPARE_AS(WORD, EMU_F(a) OPERATOR EMU_F(b) && !emu_unordered<K>(a, b)) \
    EMU_COMPARE_AS(WORD##u, EMU_F(a) OPERATOR EMU_F(b) || emu_unordered<K>(a, b))
EMU_COMPARE(eq, ==)
EMU_COMPARE(ne, !=)
EMU_COMPARE(lt, <)
EMU_COMPARE(le, <=)
EMU_COMPARE(gt, >)
EMU_COMPARE(ge, >=)
#undef EMU_COMPARE
#undef EMU_COMPARE_AS

// ---- operators ---------------------------------------------------------------------------------------

#define EMU_OPERATOR(SYMBOL, T, NAME)                                \
    EMU_DEFINE T operator SYMBOL(T a, T b) { return NAME<K>(a, b); } \
    EMU_DEFINE T &operator SYMBOL##=(T &a, T b) { return emu_store(a, NAME<K>(a, b)); }
#define EMU_STEP(SYMBOL, T, NAME, ONE)                                            \
    EMU_DEFINE T &operator SYMBOL(T &a) { return emu_store(a, NAME<K>(a, ONE)); } \
    EMU_DEFINE T operator SYMBOL(T &a, int) {                                     \
        const T before = a;                                                       \
        emu_store(a, NAME<K>(before, ONE));                                       \
        return before;                                                            \
    }
#define EMU_OPERATORS(T, ADD, SUB, MUL, DIV, NEG, EQ, NE, LT, LE, GT, GE, ONE) \
    EMU_OPERATOR(+, T, ADD)                                                    \
    EMU_OPERATOR(-, T, SUB)                                                    \
    EMU_OPERATOR(*, T, MUL)                                                    \
    EMU_OPERATOR(/, T, DIV)                                                    \
    EMU_STEP(++, T, ADD, ONE)                                                  \
    EMU_STEP(--, T, SUB, ONE)                                                  \
    EMU_DEFINE T operator+(T a) { return a; }                                  \
    EMU_DEFINE T operator-(T a) { return NEG<K>(a); }                          \
    EMU_DEFINE bool operator==(T a, T b) { return EQ<K>(a, b); }               \
    EMU_DEFINE bool operator!=(T a, T b) { return NE<K>(a, b); }               \
    EMU_DEFINE bool operator<(T a, T b) { return LT<K>(a, b); }                \
    EMU_DEFINE bool operator<=(T a, T b) { return LE<K>(a, b); }               \
    EMU_DEFINE bool operator>(T a, T b) { return GT<K>(a, b); }                \
    EMU_DEFINE bool operator>=(T a, T b) { return GE<K>(a, b); }
EMU_OPERATORS(EMU_TYPE, __hadd, __hsub, __hmul, __hdiv, __hneg, __heq, __hneu, __hlt, __hle, __hgt, __hge,
              EMU_K(1.0f))
EMU_OPERATORS(EMU_PAIR, __hadd2, __hsub2, __hmul2, __h2div, __hneg2, __hbeq2, __hbneu2, __hblt2, __hble2,
              __hbgt2, __hbge2, EMU_2(EMU_K(1.0f), EMU_K(1.0f)))
#undef EMU_OPERATORS
#undef EMU_OPERATOR
#undef EMU_STEP

EMU_DEFINE EMU_TYPE atomicAdd(EMU_TYPE *address, EMU_TYPE value) {
    return emu_atomic_add<K, unsigned short>(address, value, [](auto a, auto b) { return __hadd<K>(a, b); });
}
EMU_DEFINE EMU_PAIR atomicAdd(EMU_PAIR *address, EMU_PAIR value) {
    return emu_atomic_add<typename emu_format<K>::pair, unsigned int>(
        address, value, [](auto a, auto b) { return __hadd2<K>(a, b); });
}

#undef EMU_F
#undef EMU_K
#undef EMU_2
#undef EMU_BITS
#undef EMU_DEFINE
#undef EMU_FN
#undef EMU_PAIR_FN
#undef EMU_PASTE
#undef EMU_PASTE_
