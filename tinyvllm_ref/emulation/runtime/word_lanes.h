// Arithmetic on the two halves or four bytes of a word: __vadd4 and its kind, __dp4a.
#pragma once

// The k-th of N lanes of a word, extended with its sign or with zeros.
template <int N>
EMU_INLINE long emu_lane(unsigned word, int k, bool is_signed) {
    const int bits = 32 / N;
    unsigned value = word << (32 - bits * (k + 1)) >> (32 - bits);
    return is_signed && value >> (bits - 1) ? (long)value - (1l << bits) : (long)value;
}
template <int N, class F>
EMU_INLINE unsigned emu_by_lane(unsigned a, unsigned b, bool is_signed, F f) {
    const int bits = 32 / N;
    unsigned out = 0;
    for (int k = 0; k < N; k++)
        out |= ((unsigned)f(emu_lane<N>(a, k, is_signed), emu_lane<N>(b, k, is_signed)) & ((1u << bits) - 1)) << (bits * k);
    return out;
}
template <int N>
EMU_INLINE long emu_clamp(long x, bool is_signed) {
    const long high = is_signed ? (1l << (32 / N - 1)) - 1 : (1l << 32 / N) - 1, low = is_signed ? -high - 1 : 0;
    return x < low ? low : x > high ? high : x;
}
#define EMU_LANES(name, N, is_signed, result)                                                     \
    EMU_INLINE unsigned name(unsigned a, unsigned b) {                                            \
        return emu_by_lane<N>(a, b, is_signed, [](long x, long y) -> long { (void)y; return result; }); \
    }
#define EMU_LANES1(name, N, is_signed, result)                                                    \
    EMU_INLINE unsigned name(unsigned a) {                                                        \
        return emu_by_lane<N>(a, 0, is_signed, [](long x, long) -> long { return result; });      \
    }
#define EMU_COMPARE(suffix, N, is_signed, result)      \
    EMU_LANES(__vcmp##suffix, N, is_signed, (result) ? -1 : 0) \
    EMU_LANES(__vset##suffix, N, is_signed, (result) ? 1 : 0)
#define EMU_WORDS(N)                                                                     \
    EMU_LANES(__vadd##N, N, false, x + y)                                                \
    EMU_LANES(__vsub##N, N, false, x - y)                                                \
    EMU_LANES(__vaddss##N, N, true, emu_clamp<N>(x + y, true))                           \
    EMU_LANES(__vaddus##N, N, false, emu_clamp<N>(x + y, false))                         \
    EMU_LANES(__vsubss##N, N, true, emu_clamp<N>(x - y, true))                           \
    EMU_LANES(__vsubus##N, N, false, emu_clamp<N>(x - y, false))                         \
    EMU_LANES(__vavgs##N, N, true, (x + y + (x + y >= 0)) >> 1)                          \
    EMU_LANES(__vavgu##N, N, false, (x + y + 1) >> 1)                                    \
    EMU_LANES(__vhaddu##N, N, false, (x + y) >> 1)                                       \
    EMU_LANES(__vabsdiffs##N, N, true, x > y ? x - y : y - x)                            \
    EMU_LANES(__vabsdiffu##N, N, false, x > y ? x - y : y - x)                           \
    EMU_LANES(__vmaxs##N, N, true, x > y ? x : y)                                        \
    EMU_LANES(__vmaxu##N, N, false, x > y ? x : y)                                       \
    EMU_LANES(__vmins##N, N, true, x < y ? x : y)                                        \
    EMU_LANES(__vminu##N, N, false, x < y ? x : y)                                       \
    EMU_LANES1(__vabs##N, N, true, x < 0 ? -x : x)                                       \
    EMU_LANES1(__vabsss##N, N, true, emu_clamp<N>(x < 0 ? -x : x, true))                 \
    EMU_LANES1(__vneg##N, N, true, -x)                                                   \
    EMU_LANES1(__vnegss##N, N, true, emu_clamp<N>(-x, true))                             \
    EMU_COMPARE(eq##N, N, false, x == y)                                                 \
    EMU_COMPARE(ne##N, N, false, x != y)                                                 \
    EMU_COMPARE(ges##N, N, true, x >= y)                                                 \
    EMU_COMPARE(geu##N, N, false, x >= y)                                                \
    EMU_COMPARE(gts##N, N, true, x > y)                                                  \
    EMU_COMPARE(gtu##N, N, false, x > y)                                                 \
    EMU_COMPARE(les##N, N, true, x <= y)                                                 \
    EMU_COMPARE(leu##N, N, false, x <= y)                                                \
    EMU_COMPARE(lts##N, N, true, x < y)                                                  \
    EMU_COMPARE(ltu##N, N, false, x < y)                                                 \
    EMU_INLINE unsigned __vsads##N(unsigned a, unsigned b) {                             \
        long sum = 0;                                                                    \
        for (int k = 0; k < N; k++) {                                                    \
            long d = emu_lane<N>(a, k, true) - emu_lane<N>(b, k, true);                  \
            sum += d < 0 ? -d : d;                                                       \
        }                                                                                \
        return (unsigned)sum;                                                            \
    }                                                                                    \
    EMU_INLINE unsigned __vsadu##N(unsigned a, unsigned b) {                             \
        long sum = 0;                                                                    \
        for (int k = 0; k < N; k++) {                                                    \
            long d = emu_lane<N>(a, k, false) - emu_lane<N>(b, k, false);                \
            sum += d < 0 ? -d : d;                                                       \
        }                                                                                \
        return (unsigned)sum;                                                            \
    }
EMU_WORDS(2)
EMU_WORDS(4)

// Products of lanes, added up: four bytes with four bytes, two halves with the lower or upper two bytes.
EMU_INLINE int __dp4a(int a, int b, int c) {
    for (int k = 0; k < 4; k++) c += (int)(emu_lane<4>((unsigned)a, k, true) * emu_lane<4>((unsigned)b, k, true));
    return c;
}
EMU_INLINE unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
    for (int k = 0; k < 4; k++) c += (unsigned)(emu_lane<4>(a, k, false) * emu_lane<4>(b, k, false));
    return c;
}
EMU_INLINE int __dp4a(char4 a, char4 b, int c) { return c + a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
EMU_INLINE unsigned __dp4a(uchar4 a, uchar4 b, unsigned c) {
    return c + (unsigned)a.x * b.x + (unsigned)a.y * b.y + (unsigned)a.z * b.z + (unsigned)a.w * b.w;
}
#define EMU_DP2A(name, first)                                                                                   \
    EMU_INLINE int name(int a, int b, int c) {                                                                  \
        for (int k = 0; k < 2; k++)                                                                             \
            c += (int)(emu_lane<2>((unsigned)a, k, true) * emu_lane<4>((unsigned)b, first + k, true));          \
        return c;                                                                                               \
    }                                                                                                           \
    EMU_INLINE unsigned name(unsigned a, unsigned b, unsigned c) {                                              \
        for (int k = 0; k < 2; k++) c += (unsigned)(emu_lane<2>(a, k, false) * emu_lane<4>(b, first + k, false)); \
        return c;                                                                                               \
    }
EMU_DP2A(__dp2a_lo, 0)
EMU_DP2A(__dp2a_hi, 2)
