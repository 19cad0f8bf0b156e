// The inner loops of gemm.cpp, for one instruction set. Included once for each, with these defined before:
//   KERNEL_NAMESPACE, TARGET (function attribute), V (16 floats), MR and NR (rows of a block), and in that
//   namespace zero(), load_f32(p), load_bf16(p), load_f16(p), store(p, v), fma(a, b, c), sum4(a, b, c, d, out).
//
// The order in which one output's products are added is the same in all of them, whatever the block:
//   lane l of 16 adds up the products of k = l, l + 16, l + 32, ... of a block of kBlockK in order of k;
//   the lanes are added as a tree: l with l + 8, then with l + 4, then with l + 1, then with l + 2;
//   the blocks are added in order of k.

namespace KERNEL_NAMESPACE {

struct LoadF32 {
    typedef float item;
    TARGET static inline V load(const item* p) { return load_f32(p); }
};
struct LoadBf16 {
    typedef uint16_t item;
    TARGET static inline V load(const item* p) { return load_bf16(p); }
};
struct LoadF16 {
    typedef uint16_t item;
    TARGET static inline V load(const item* p) { return load_f16(p); }
};

// acc[r][j] += x[r][0..15] * w[j][0..15], lane by lane.
template <int R, class Load>
TARGET inline __attribute__((always_inline)) void step(V* acc, const float* x, ptrdiff_t ldx,
                                                       const typename Load::item* const* w, long k) {
    V wv[NR];
    UNROLL for (int j = 0; j < NR; j++) wv[j] = Load::load(w[j] + k);
    UNROLL for (int r = 0; r < R; r++) {
        V xv = load_f32(x + r * ldx + k);
        UNROLL for (int j = 0; j < NR; j++) acc[r * NR + j] = fma(xv, wv[j], acc[r * NR + j]);
    }
}

// out[r][j] = or += the sum over k of x[r][k] * w[j][k]. Rows of x are zero from k on to the next 16.
template <int R, class Load>
TARGET void block(const float* x, ptrdiff_t ldx, const typename Load::item* const* w, long k, float* out,
                  ptrdiff_t ldo, bool first) {
    typedef typename Load::item item;
    V acc[R * NR];
    UNROLL for (int i = 0; i < R * NR; i++) acc[i] = zero();
    // With few rows of x the time goes into reading w: ask for the next block's rows, which lie behind these.
    const ptrdiff_t ahead = R <= 2 ? (w[NR - 1] - w[0]) + (w[1] - w[0]) : 0;
    long p = 0;
    for (; p + kLanes <= k; p += kLanes) {
        if (R <= 2) {
            UNROLL for (int j = 0; j < NR; j++) __builtin_prefetch(w[j] + ahead + p);
        }
        step<R, Load>(acc, x, ldx, w, p);
    }
    if (p < k) {
        item tail[NR][kLanes] = {};
        const item* rows[NR];
        for (int j = 0; j < NR; j++) {
            memcpy(tail[j], w[j] + p, size_t(k - p) * sizeof(item));
            rows[j] = tail[j];
        }
        step<R, Load>(acc, x + p, ldx, rows, 0);
    }
    float sums[(R * NR + 3) / 4 * 4];
    constexpr int last = R * NR - 1;
    UNROLL for (int i = 0; i <= last; i += 4) {
        sum4(acc[i], acc[i + 1 < last ? i + 1 : last], acc[i + 2 < last ? i + 2 : last],
             acc[i + 3 < last ? i + 3 : last], sums + i);
    }
    for (int r = 0; r < R; r++) {
        for (int j = 0; j < NR; j++) out[r * ldo + j] = first ? sums[r * NR + j] : out[r * ldo + j] + sums[r * NR + j];
    }
}

// The same for any number of rows of x.
template <class Load>
TARGET void rows(const float* x, ptrdiff_t ldx, long count, const void* const* w, long k, float* out,
                 ptrdiff_t ldo, bool first) {
    typename Load::item const* const* wt = (typename Load::item const* const*)w;
    long blocks = (count + MR - 1) / MR;
    for (long r = 0, height; r < count; r += height) {
        height = (count - r + blocks - 1) / blocks--;  // as equal as they can be: 4 + 4, not 6 + 2
        const float* xr = x + r * ldx;
        float* to = out + r * ldo;
        switch (height) {
            case 1: block<1, Load>(xr, ldx, wt, k, to, ldo, first); break;
            case 2: block<MR < 2 ? MR : 2, Load>(xr, ldx, wt, k, to, ldo, first); break;
            case 3: block<MR < 3 ? MR : 3, Load>(xr, ldx, wt, k, to, ldo, first); break;
            case 4: block<MR < 4 ? MR : 4, Load>(xr, ldx, wt, k, to, ldo, first); break;
            case 5: block<MR < 5 ? MR : 5, Load>(xr, ldx, wt, k, to, ldo, first); break;
            default: block<MR, Load>(xr, ldx, wt, k, to, ldo, first);
        }
    }
}

// n elements of a type that lie side by side -> float.
TARGET static void convert(const void* from, int type, float* to, long n) {
    long i = 0;
    if (type == kF32) {
        memcpy(to, from, size_t(n) * sizeof(float));
    } else if (type == kBf16) {
        for (; i + kLanes <= n; i += kLanes) store(to + i, load_bf16((const uint16_t*)from + i));
        for (; i < n; i++) to[i] = bf16_to_float(((const uint16_t*)from)[i]);
    } else {
        for (; i + kLanes <= n; i += kLanes) store(to + i, load_f16((const uint16_t*)from + i));
        for (; i < n; i++) to[i] = f16_to_float(((const uint16_t*)from)[i]);
    }
}

static const Kernels kernels = {MR, NR, convert, rows<LoadF32>, rows<LoadBf16>, rows<LoadF16>};

}  // namespace KERNEL_NAMESPACE

#undef KERNEL_NAMESPACE
#undef TARGET
#undef V
#undef MR
#undef NR
