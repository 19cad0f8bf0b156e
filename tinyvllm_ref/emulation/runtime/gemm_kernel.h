// The inner loops of gemm.cpp, for one instruction set. Included once for each, with these defined before:
//   KERNEL_NAMESPACE, TARGET (function attribute), and in that namespace MR and NR (rows of a block), Sum (16 floats),
//   Operand (what one load gives), Packed (an element of a packed row), kStep (elements of a load), zero(), load(p) from
//   each type that is multiplied, store(p, Operand) where packing converts, fma(Operand, Operand, Sum),
//   sum4(a, b, c, d, out), and sum16(sums, out) where a block has so many.
//
// The order in which one output's products are added is the same whatever the block. With float operands:
//   lane l of 16 adds up the products of k = l, l + 16, l + 32, ... of a block of kBlockK in order of k;
//   the lanes are added as a tree: l with l + 8, then with l + 4, then with l + 1, then with l + 2;
//   the blocks are added in order of k.
// With bfloat16 operands an instruction adds two products to a lane: those of k = 2 l and 2 l + 1, then + 32, ...

namespace KERNEL_NAMESPACE {

// acc[r][j] += x[r][0..] * w[j][0..] of one load, lane by lane.
template <int R, class Item>
TARGET inline __attribute__((always_inline)) void step(Sum* acc, const Packed* x, ptrdiff_t ldx,
                                                       const Item* const* w, long k) {
    Operand wv[NR];
    UNROLL for (int j = 0; j < NR; j++) wv[j] = load(w[j] + k);
    UNROLL for (int r = 0; r < R; r++) {
        Operand xv = load(x + r * ldx + k);
        UNROLL for (int j = 0; j < NR; j++) acc[r * NR + j] = fma(xv, wv[j], acc[r * NR + j]);
    }
}

// out[r][j] = or += the sum over k of x[r][k] * w[j][k]. Rows of x are zero from k on to the next kStep.
template <int R, class Item>
TARGET void block(const Packed* x, ptrdiff_t ldx, const Item* const* w, long k, float* out, ptrdiff_t ldo,
                  bool first) {
    Sum acc[R * NR];
    UNROLL for (int i = 0; i < R * NR; i++) acc[i] = zero();
    // With few rows of x the time goes into reading w: ask for the next block's rows, which lie behind these.
    const ptrdiff_t ahead = R <= 4 ? (w[NR - 1] - w[0]) + (w[1] - w[0]) : 0;
    long p = 0;
    for (; p + kStep <= k; p += kStep) {
        if (R <= 4) {
            UNROLL for (int j = 0; j < NR; j++) __builtin_prefetch(w[j] + ahead + p);
        }
        step<R>(acc, x, ldx, w, p);
    }
    if (p < k) {
        Item tail[NR][kStep] = {};
        const Item* rows[NR];
        for (int j = 0; j < NR; j++) {
            memcpy(tail[j], w[j] + p, size_t(k - p) * sizeof(Item));
            rows[j] = tail[j];
        }
        step<R>(acc, x + p, ldx, rows, 0);
    }
    float sums[(R * NR + 3) / 4 * 4];
    constexpr int last = R * NR - 1, sixteens = R * NR / 16 * 16;
    if constexpr (sixteens != 0) {
        UNROLL for (int i = 0; i < sixteens; i += 16) sum16(acc + i, sums + i);
    }
    UNROLL for (int i = sixteens; i <= last; i += 4) {
        sum4(acc[i], acc[i + 1 < last ? i + 1 : last], acc[i + 2 < last ? i + 2 : last],
             acc[i + 3 < last ? i + 3 : last], sums + i);
    }
    for (int r = 0; r < R; r++) {
        if (first) memcpy(out + r * ldo, sums + r * NR, NR * sizeof(float));
        else for (int j = 0; j < NR; j++) out[r * ldo + j] += sums[r * NR + j];
    }
}

// The same for any number of rows of x.
template <class Item>
TARGET void rows(const void* packed, ptrdiff_t ldx, long count, const void* const* w, long k, float* out,
                 ptrdiff_t ldo, bool first) {
    const Item* const* wt = (const Item* const*)w;
    long blocks = (count + MR - 1) / MR;
    for (long r = 0, height; r < count; r += height) {
        height = (count - r + blocks - 1) / blocks;  // as equal as they can be: 4 + 4, not 6 + 2
        blocks--;
        const Packed* x = (const Packed*)packed + r * ldx;
        float* to = out + r * ldo;
        switch (height) {
            case 1: block<1>(x, ldx, wt, k, to, ldo, first); break;
            case 2: block<MR < 2 ? MR : 2>(x, ldx, wt, k, to, ldo, first); break;
            case 3: block<MR < 3 ? MR : 3>(x, ldx, wt, k, to, ldo, first); break;
            case 4: block<MR < 4 ? MR : 4>(x, ldx, wt, k, to, ldo, first); break;
            case 5: block<MR < 5 ? MR : 5>(x, ldx, wt, k, to, ldo, first); break;
            default: block<MR>(x, ldx, wt, k, to, ldo, first);
        }
    }
}

// n elements of a type that lie side by side, packed.
template <class Item>
TARGET void convert(const Item* from, Packed* to, long n) {
    long i = 0;
    for (; i + kStep <= n; i += kStep) store(to + i, load(from + i));
    for (; i < n; i++) to[i] = to_float(from[i]);
}

}  // namespace KERNEL_NAMESPACE

#undef KERNEL_NAMESPACE
#undef TARGET
