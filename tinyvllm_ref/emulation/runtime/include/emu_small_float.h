// Rounding between float, double, integers and the two 16-bit floating-point formats, by bits.
//
//              sign  exponent  fraction  bias
//   __half       1      5        10       15     IEEE 754 binary16
//   bfloat16     1      8         7      127     the upper half of a float
//
// Bits, not arithmetic: what comes out does not depend on whether the host flushes subnormal numbers.
// A NaN becomes 0x7FFF, as NVIDIA's cvt instructions make it.
#pragma once
#pragma GCC system_header

// These functions carry no lines of their own in a report: an access belongs to the line that called them.
#if defined(__clang__)
#define EMU_SMALL_FLOAT static inline __attribute__((always_inline, nodebug))
#define EMU_SMALL_FLOAT_MEMBER inline __attribute__((always_inline, nodebug))
#else
#define EMU_SMALL_FLOAT static inline __attribute__((always_inline, artificial))
#define EMU_SMALL_FLOAT_MEMBER inline __attribute__((always_inline, artificial))
#endif

// To nearest (ties to even), toward zero, down, up: the endings of NVIDIA's function names.
enum emu_rounding { emu_rn, emu_rz, emu_rd, emu_ru };

EMU_SMALL_FLOAT unsigned emu_float_bits(float value) {
    unsigned bits;
    __builtin_memcpy(&bits, &value, 4);
    return bits;
}
EMU_SMALL_FLOAT float emu_bits_float(unsigned bits) {
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}
EMU_SMALL_FLOAT unsigned long long emu_double_bits(double value) {
    unsigned long long bits;
    __builtin_memcpy(&bits, &value, 8);
    return bits;
}
EMU_SMALL_FLOAT double emu_bits_double(unsigned long long bits) {
    double value;
    __builtin_memcpy(&value, &bits, 8);
    return value;
}

// float -> 16 bits.
template <int FRACTION, int BIAS> EMU_SMALL_FLOAT unsigned short emu_narrow(float value, emu_rounding mode) {
    const unsigned bits = emu_float_bits(value), magnitude = bits & 0x7fffffffu, negative = bits >> 31;
    const unsigned infinity = (0x7fffu >> FRACTION) << FRACTION, rebias = (127u - BIAS) << 23;
    if (magnitude > 0x7f800000u) return 0x7fff;
    if (magnitude == 0x7f800000u) return (unsigned short)(negative << 15 | infinity);

    // `scaled` counts in units of 2^-drop of the result's last place.
    unsigned scaled = magnitude - rebias, drop = 23 - FRACTION;
    if (BIAS != 127 && magnitude < rebias + (1u << 23)) {  // subnormal in the narrower format
        const unsigned exponent = magnitude >> 23;
        scaled = (magnitude & 0x7fffffu) | 0x800000u;
        drop += 128 - BIAS - exponent;
        if (drop > 25) {  // under a half of the smallest subnormal: only "more than nothing" matters
            scaled = magnitude != 0;
            drop = 25;
        }
    }
    unsigned kept = scaled >> drop;
    const unsigned rest = scaled & ((1u << drop) - 1), tie = 1u << (drop - 1);
    const bool away_from_zero = mode == emu_rn   ? rest > tie || (rest == tie && (kept & 1))
                                : mode == emu_rz ? false
                                : mode == emu_rd ? negative && rest
                                                 : !negative && rest;
    kept += away_from_zero;
    if (kept >= infinity) {
        const bool toward_zero = negative ? mode == emu_ru : mode == emu_rd;
        kept = infinity - (mode == emu_rz || toward_zero);  // then the largest finite number
    }
    return (unsigned short)(negative << 15 | kept);
}

// 16 bits -> float, always exact.
template <int FRACTION, int BIAS> EMU_SMALL_FLOAT float emu_widen(unsigned short bits) {
    if (BIAS == 127) return emu_bits_float((unsigned)bits << 16);
    const unsigned sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
    const unsigned wide = magnitude << (23 - FRACTION);
    if (magnitude >= (0x7fffu >> FRACTION) << FRACTION) return emu_bits_float(sign | 0x7f800000u | wide);
    if (magnitude >> FRACTION) return emu_bits_float(sign | (wide + ((127u - BIAS) << 23)));
    // Subnormal: a count of 2^(1 - BIAS - FRACTION), which is a normal float.
    const float unit = emu_bits_float((unsigned)(128 - BIAS - FRACTION) << 23);
    return emu_bits_float(sign | emu_float_bits((float)magnitude * unit));
}

// double -> float, rounded to odd: a last bit of 1 says "inexact", so that rounding once more, to fewer bits,
// gives what one rounding of the double would have given.
EMU_SMALL_FLOAT float emu_odd_float(double value) {
    const float nearest = (float)value;
    if ((double)nearest == value || value != value) return nearest;
    unsigned bits = emu_float_bits(nearest);
    if (__builtin_fabs((double)nearest) > __builtin_fabs(value)) bits -= 1;
    return emu_bits_float(bits | 1);
}

// a * b + c of 16-bit operands, rounded to odd: the product of two is exact in a double, the sum may not be.
EMU_SMALL_FLOAT float emu_odd_fma(float a, float b, float c) {
    const double product = (double)a * b, addend = c, sum = product + addend;
    // Knuth's TwoSum: the exact error of the sum.
    const double part = sum - product, error = (product - (sum - part)) + (addend - part);
    if (error != 0 && sum - sum == 0) {
        unsigned long long bits = emu_double_bits(sum);
        if ((error < 0) == (sum > 0)) bits -= 1;
        return emu_odd_float(emu_bits_double(bits | 1));
    }
    return emu_odd_float(sum);
}

// 64-bit integers -> double, with the bits that do not fit folded into the last one that does.
EMU_SMALL_FLOAT double emu_integer_double(unsigned long long magnitude) {
    if (magnitude >> 53) magnitude = (magnitude >> 11 | ((magnitude & 2047) != 0)) << 11;
    return (double)magnitude;
}
EMU_SMALL_FLOAT double emu_integer_double(long long value) {
    const unsigned long long bits = (unsigned long long)value;
    return value < 0 ? -emu_integer_double(0 - bits) : emu_integer_double(bits);
}

// Integers -> 16 bits, rounded once.
template <int FRACTION, int BIAS, class WIDE>
EMU_SMALL_FLOAT unsigned short emu_narrow_integer(WIDE value, emu_rounding mode) {
    return emu_narrow<FRACTION, BIAS>(emu_odd_float(emu_integer_double(value)), mode);
}

// 16 bits -> an integer of `size` bytes, signed as WIDE is, held to its ends. A NaN is 0, or in 64 bits the
// top bit alone.
template <int FRACTION, int BIAS, class WIDE>
EMU_SMALL_FLOAT WIDE emu_widen_integer(unsigned short bits, emu_rounding mode, unsigned size) {
    const float value = emu_widen<FRACTION, BIAS>(bits);
    const float whole = mode == emu_rn   ? __builtin_rintf(value)
                        : mode == emu_rz ? __builtin_truncf(value)
                        : mode == emu_rd ? __builtin_floorf(value)
                                         : __builtin_ceilf(value);
    const bool is_signed = (WIDE)-1 < (WIDE)1;
    const WIDE highest = (WIDE)(~0ull >> (64 - 8 * size + is_signed));
    const WIDE lowest = is_signed ? (WIDE)~highest : (WIDE)0;
    if (value != value) return size == 8 ? (WIDE)(1ull << 63) : (WIDE)0;
    if (whole <= (float)lowest) return lowest;
    if (whole >= (float)highest) return highest;
    return (WIDE)whole;
}
#ifdef __CHAR_UNSIGNED__
typedef unsigned long long emu_wide_char;
#else
typedef long long emu_wide_char;
#endif

// ---- what emu_small_float_ops.h writes its functions with; K is one of the two types --------------------

// Fraction bits, exponent bias and pair type of K.
template <class K> struct emu_format;

template <class K> EMU_SMALL_FLOAT K emu_of_bits(unsigned bits) {
    K result;
    result.__x = (unsigned short)bits;
    return result;
}
template <class K> EMU_SMALL_FLOAT float emu_value(K a) {
    return emu_widen<emu_format<K>::fraction, emu_format<K>::bias>(a.__x);
}
template <class K> EMU_SMALL_FLOAT K emu_rounded(float value, emu_rounding mode) {
    return emu_of_bits<K>(emu_narrow<emu_format<K>::fraction, emu_format<K>::bias>(value, mode));
}
template <class K, class WIDE> EMU_SMALL_FLOAT K emu_of_integer(WIDE value, emu_rounding mode) {
    return emu_of_bits<K>(emu_narrow_integer<emu_format<K>::fraction, emu_format<K>::bias>(value, mode));
}
template <class K, class I, class WIDE>
EMU_SMALL_FLOAT I emu_integer(unsigned short bits, emu_rounding mode) {
    return (I)emu_widen_integer<emu_format<K>::fraction, emu_format<K>::bias, WIDE>(bits, mode, sizeof(I));
}
template <class K> EMU_SMALL_FLOAT typename emu_format<K>::pair emu_pair_of(K low, K high) {
    typename emu_format<K>::pair result;
    result.x = low;
    result.y = high;
    return result;
}
template <class T> EMU_SMALL_FLOAT T &emu_store(T &target, T value) { return target = value; }

template <class K> EMU_SMALL_FLOAT bool emu_is_nan(unsigned short bits) {
    return (bits & 0x7fff) > ((0x7fff >> emu_format<K>::fraction) << emu_format<K>::fraction);
}
template <class K> EMU_SMALL_FLOAT bool emu_unordered(K a, K b) {
    return emu_is_nan<K>(a.__x) || emu_is_nan<K>(b.__x);
}
EMU_SMALL_FLOAT int emu_infinity_sign(float value) {
    return value == __builtin_inff() ? 1 : value == -__builtin_inff() ? -1 : 0;
}

// a > b, with +0 above -0.
template <class K> EMU_SMALL_FLOAT bool emu_is_above(K a, K b) {
    return emu_value(a) > emu_value(b) || (emu_value(a) == emu_value(b) && a.__x >> 15 < b.__x >> 15);
}
// Of two the one that was chosen, or the one that is a number; where NaN wins, or both are NaN, NaN.
template <class K> EMU_SMALL_FLOAT K emu_pick(K a, K b, bool take_a, bool nan_wins) {
    const bool a_nan = emu_is_nan<K>(a.__x), b_nan = emu_is_nan<K>(b.__x);
    if ((a_nan && b_nan) || (nan_wins && (a_nan || b_nan))) return emu_of_bits<K>(0x7fff);
    return a_nan ? b : b_nan || take_a ? a : b;
}
// Into [0, 1], NaN to +0.
template <class K> EMU_SMALL_FLOAT K emu_saturated(K a) {
    const float value = emu_value(a);
    return value >= 1 ? emu_rounded<K>(1, emu_rn) : value > 0 ? a : emu_of_bits<K>(0);
}
// max(a, 0), which keeps NaN.
template <class K> EMU_SMALL_FLOAT K emu_relu(K a) {
    const float value = emu_value(a);
    return value != value ? emu_of_bits<K>(0x7fff) : value > 0 ? a : emu_of_bits<K>(0);
}

// A compare-and-swap loop on the 2 or 4 bytes of a T.
template <class T, class WORD, class Add> EMU_SMALL_FLOAT T emu_atomic_add(T *address, T value, Add add) {
    WORD seen = __atomic_load_n((WORD *)address, __ATOMIC_RELAXED), next;
    T before, after;
    do {
        __builtin_memcpy(&before, &seen, sizeof(T));
        after = add(before, value);
        __builtin_memcpy(&next, &after, sizeof(T));
    } while (!__atomic_compare_exchange_n((WORD *)address, &seen, next, false, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED));
    return before;
}
