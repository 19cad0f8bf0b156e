// Drawing tokens from logits: penalties, then temperature, top-k, top-p and min-p over rows that nobody has sorted.
//
// Launch of apply_penalties: grid (any), any one-dimensional block. A thread takes entries a grid's width apart; an
// entry is a token that a row's request has seen, and stands once.
// Reads rows, tokens, counts (P,) int32: counts says how often the completion has the token, 0 where only the prompt
// does; repetition, presence, frequency (R,) float32. Changes logits (R, V) float32.
//
// Launch of sample_rows: grid (R), block (THREADS), of whole warps or of one thread. A block draws for one row.
// Reads logits (R, V) float32; temperature, top_p, min_p (R,) float32, top_k, steps (R,) int32, seeds (R,) uint64.
// Writes out (R,) int32.
//
// What is drawn is defined on the sorted row, from the most probable token to the least, the lower id first on ties:
// options cut it off behind some token, and a token is the first with which the running sum of the weights passes a
// uniform part of their sum. So all that is asked of the row is "with which token does a running sum pass this number":
// of counts for top-k, of weights for top-p and for the draw. No sorted row is needed for that: a histogram says in
// which bin the sum passes, and only that bin's entries are sorted, in shared memory. This is radix selection (Alabi,
// Blanchard, Gordon and Steinbach, "Fast k-selection algorithms for graphics processing units", 2012), here by sums of
// weights too. A bin with more entries than the list holds is cut into finer bins by the bits of the logit, down to
// ties of one value, of which the n-th id is looked for. Rows of a card's size are asked for a short list first: of the
// largest logits of the threads, the m-th has at least m entries of the row at or above it, and seldom many more; what
// top-k keeps, or where the weight lies, is mostly among these, and the histogram is spared.
//
// A weight is exp((logit - largest) / temperature) as a whole number of 2^-44. Sums of whole numbers do not depend on
// their order, so that neither the block's size nor the way to an answer changes it. What is below 2^-44 weighs
// nothing: of 2^18 tokens it is less than 2^-26 of the sum, below the steps of the uniform number.
#include "common.cuh"
#include "dependent_launch.cuh"

extern "C" __global__ void apply_penalties(float* logits, const int* rows, const int* tokens, const int* counts,
                                           const float* repetition, const float* presence, const float* frequency,
                                           int entries, int vocab) {
    for (int p = blockIdx.x * blockDim.x + threadIdx.x; p < entries; p += gridDim.x * blockDim.x) {
        int row = rows[p];
        float* logit = logits + (size_t)row * vocab + tokens[p];
        float x = *logit;
        x = x > 0.0f ? x / repetition[row] : x * repetition[row];
        if (counts[p] > 0) x -= presence[row] + frequency[row] * (float)counts[p];
        *logit = x;
    }
}

#ifndef THREADS
#define THREADS 1024  // a multiple of 32; or 1
#endif
#ifndef BINS
#define BINS 1024
#endif
#ifndef LIST
#define LIST 1024  // entries that can be sorted in shared memory: a power of two, at least THREADS
#endif
#define ONE 17592186044416.0f  // 2^44, the weight of the largest logit
#define LOWEST -44.0f          // the binary logarithm of the least weight
#define ALL_LANES 0xffffffffu

typedef unsigned long long Entry;   // a logit's place in the order, and below it the id, turned round
typedef unsigned long long Weight;  // in steps of 2^-44

// ---------------- the uniform number
// A number that looks random, from any number: splitmix64's finaliser (Steele, Lea and Flood, 2014).
__device__ __forceinline__ unsigned long long mix(unsigned long long x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

// The part of a sum that a uniform number 0 <= u < 1 points at, rounded down. u has 24 bits, and comes from the seed
// of a request and the number of its token: nothing else matters.
__device__ __forceinline__ Weight uniform_part(Weight sum, unsigned long long seed, int step) {
    unsigned long long stream = mix(seed + 0x9e3779b97f4a7c15ull);
    unsigned long long u = mix(stream + ((unsigned long long)step + 1) * 0x9e3779b97f4a7c15ull) >> 40;
    return u * (sum >> 24) + (u * (sum & 0xffffff) >> 24);
}

// ---------------- the order
// Bits are compared, not floats: compiled for a card, comparisons take the least numbers for 0.
// The larger the more probable; 0 and -0 tie; a NaN is 0, below -infinity.
__device__ __forceinline__ unsigned place_of(float x) {
    unsigned bits = __float_as_uint(x), size = bits << 1;
    if (size == 0) bits = 0;
    unsigned place = bits ^ ((unsigned)((int)bits >> 31) | 0x80000000u);
    return size > 0xff000000u ? 0u : place;
}

__device__ __forceinline__ float value_of(unsigned place) {
    return __uint_as_float(place & 0x80000000u ? place ^ 0x80000000u : ~place);
}

// The larger the earlier in the order: on ties the lower id.
__device__ __forceinline__ Entry entry_of(unsigned place, int id) { return (Entry)place << 32 | ~(unsigned)id; }
__device__ __forceinline__ unsigned place_in(Entry entry) { return (unsigned)(entry >> 32); }
__device__ __forceinline__ int id_in(Entry entry) { return (int)~(unsigned)entry; }

// see(logit, id) for each logit of the row, by some thread; a thread sees its ids in ascending order.
template <class See>
__device__ __forceinline__ void each(const float* row, int vocab, See see) {
    int head = min(vocab, (int)(0 - (size_t)row / 4 & 3));  // up to a multiple of 16 bytes
    int fours = (vocab - head) / 4;
    const float4* vectors = (const float4*)(row + head);
#pragma unroll 1
    for (int id = threadIdx.x; id < head; id += THREADS) see(row[id], id);
#pragma unroll 1
    for (int f = threadIdx.x; f < fours; f += 2 * THREADS) {
        int g = f + THREADS;  // two loads are on their way before the first is looked at
        float4 near = vectors[f], far = near;
        if (g < fours) far = vectors[g];
        int id = head + 4 * f;
        see(near.x, id), see(near.y, id + 1), see(near.z, id + 2), see(near.w, id + 3);
        if (g >= fours) break;
        id = head + 4 * g;
        see(far.x, id), see(far.y, id + 1), see(far.z, id + 2), see(far.w, id + 3);
    }
#pragma unroll 1
    for (int id = head + 4 * fours + threadIdx.x; id < vocab; id += THREADS) see(row[id], id);
}

// ---------------- sums over the block
struct Sums {
    unsigned count;
    Weight weight;
};

__device__ __forceinline__ Sums operator+(Sums a, Sums b) { return {a.count + b.count, a.weight + b.weight}; }

struct Histogram {  // of counts and weights; after add_up(), of all bins up to each
    unsigned count[BINS], low[BINS], high[BINS];
};

struct List {  // entries in their order, and the weights of all up to each
    Entry entries[LIST];
    Weight sums[LIST];
};

struct Shared {
    Histogram bins;
    union {
        List list;
        Histogram finer;
    };
    Weight weight[32];  // of a warp
    unsigned count[32];
    int size, found;
    unsigned least, largest;
};

template <class Number>
__device__ __forceinline__ Number add_to(Number* to, Number value) {
    if (THREADS > 1) return atomicAdd(to, value);
    Number old = *to;
    *to = old + value;
    return old;
}

__device__ __forceinline__ Sums of_lane(Sums sums, int lane) {
    return {__shfl_sync(ALL_LANES, sums.count, lane), __shfl_sync(ALL_LANES, sums.weight, lane)};
}

__device__ __forceinline__ Sums up_to_lane(Sums sums) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        Sums other = {__shfl_up_sync(ALL_LANES, sums.count, distance),
                      __shfl_up_sync(ALL_LANES, sums.weight, distance)};
        if (lane >= distance) sums = sums + other;
    }
    return sums;
}

// What the threads before this one have together; `all` becomes what all have.
__device__ __forceinline__ Sums sums_before(Shared& s, Sums mine, Sums& all) {
    all = mine;
    if (THREADS == 1) return {0, 0};
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Sums sums = up_to_lane(mine);
    if (lane == 31) s.count[warp] = sums.count, s.weight[warp] = sums.weight;
    __syncthreads();
    Sums warps = up_to_lane(lane < THREADS / 32 ? Sums{s.count[lane], s.weight[lane]} : Sums{0, 0});
    all = of_lane(warps, 31);
    Sums before = of_lane(warps, (warp + 31) % 32);  // those of warp 0 are not needed
    if (warp > 0) sums = sums + before;
    __syncthreads();
    return {sums.count - mine.count, sums.weight - mine.weight};
}

__device__ __forceinline__ void ends_of_warp(Entry& best, unsigned& least) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        Entry other = __shfl_xor_sync(ALL_LANES, best, distance);
        best = other > best ? other : best;
        least = min(least, __shfl_xor_sync(ALL_LANES, least, distance));
    }
}

// The first entry of the row in the order, of the best ones of the threads, and the least place, of the least ones.
__device__ __forceinline__ Entry ends(Shared& s, Entry best, unsigned& least) {
    if (THREADS == 1) return best;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    ends_of_warp(best, least);
    if (lane == 0) s.weight[warp] = best, s.count[warp] = least;
    __syncthreads();
    best = lane < THREADS / 32 ? s.weight[lane] : 0;
    least = lane < THREADS / 32 ? s.count[lane] : ~0u;
    ends_of_warp(best, least);
    __syncthreads();
    return best;
}

__device__ __forceinline__ void clear(Histogram& h) {
    for (int i = threadIdx.x; i < BINS; i += THREADS) h.count[i] = h.low[i] = h.high[i] = 0;
    __syncthreads();
}

// Shared memory has no atomic sum of 64 bits that is fast: the lower half tells when to carry.
__device__ __forceinline__ void add(Histogram& h, int i, Weight weight) {
    unsigned low = (unsigned)weight, high = (unsigned)(weight >> 32);
    add_to(&h.count[i], 1u);
    unsigned old = add_to(&h.low[i], low);
    high += old + low < old;
    if (high > 0) add_to(&h.high[i], high);
}

__device__ __forceinline__ Sums up_to(const Histogram& h, int i) {
    return i < 0 ? Sums{0, 0} : Sums{h.count[i], (Weight)h.high[i] << 32 | h.low[i]};
}

__device__ __forceinline__ void add_up(Shared& s, Histogram& h) {
    const int part = (BINS + THREADS - 1) / THREADS;
    int begin = min(BINS, (int)threadIdx.x * part), end = min(BINS, begin + part);
    Sums mine = {0, 0}, all;
    __syncthreads();
    for (int i = begin; i < end; i++) mine = mine + up_to(h, i);
    Sums running = sums_before(s, mine, all);
    for (int i = begin; i < end; i++) {
        running = running + up_to(h, i);
        h.count[i] = running.count, h.low[i] = (unsigned)running.weight, h.high[i] = (unsigned)(running.weight >> 32);
    }
    __syncthreads();
}

// Where a running sum goes beyond a number.
struct Goal {
    bool counts;  // of counts, else of weights
    Weight number;
    __device__ __forceinline__ bool passed_by(Sums sums) const {
        return (counts ? sums.count : sums.weight) > number;
    }
};

// ---------------- the row
struct Reached {
    Weight weight;  // of the entries up to it, its own included
    int id;
};

struct Row {
    const float* logits;
    int vocab;
    float top, factor;     // a quarter of the largest logit; 4 log2(e) / temperature
    float lowest, floor;   // logarithms: below the one nothing weighs, below the other min_p drops
    float per_bin;         // bins to a step of the logarithm
    Sums before;           // the list: what comes before it, and
    int size;              // its entries, 0 where there is none
    bool counted;          // the histogram is there
    Sums all;              // what weighs something; counts only by the histogram
    Weight kept;           // the weight that min_p leaves

    // The binary logarithm of a weight. Quarters keep the difference of any two finite numbers finite.
    __device__ __forceinline__ float logarithm(float x) const { return fmaf(x, 0.25f, -top) * factor; }
    __device__ __forceinline__ bool weighs(float y) const { return y >= lowest; }  // no NaN does
    __device__ __forceinline__ Weight weight(float y) const { return weighs(y) ? (Weight)(exp2f(y) * ONE) : 0; }
    __device__ __forceinline__ int bin(float y) const { return min(BINS - 1, (int)(-y * per_bin)); }

    __device__ __forceinline__ void scale(float largest, float least, float temperature, float top_p, float min_p) {
        top = largest * 0.25f;
        factor = fminf(5.7707801636f / temperature, 3.4028234e38f);
        // What float64 can not tell from 1, 2^-54 below it, is as probable as the largest.
        floor = min_p <= 0.0f ? LOWEST : min_p == 1.0f ? -8.0e-17f : log2f(min_p);
        lowest = top_p < 1.0f || floor <= LOWEST ? LOWEST : floor;  // of all weights only top-p wants the sum
        per_bin = BINS / fmaxf(fminf(-lowest, -logarithm(least)), 1e-30f);
        before = all = {0, 0};
        size = 0;
        counted = false;
        kept = ~0ull;
    }

    // ---------------- ways to fill the list
    __device__ __forceinline__ void put(Shared& s, float x, int id) const {
        int slot = add_to(&s.size, 1);
        if (slot < LIST) s.list.entries[slot] = entry_of(place_of(x), id);
    }

    __device__ __forceinline__ void sort(Shared& s, int count) const {
        int width = 1;
        while (width < count) width *= 2;
#pragma unroll 1
        for (int i = count + threadIdx.x; i < width; i += THREADS) s.list.entries[i] = 0;
        __syncthreads();
        for (int run = 2; run <= width; run *= 2)  // a bitonic network (Batcher, 1968)
            for (int distance = run / 2; distance > 0; distance /= 2) {
#pragma unroll 1
                for (int i = threadIdx.x; i < width / 2; i += THREADS) {
                    int a = 2 * i - (i & (distance - 1)), b = a + distance;
                    Entry first = s.list.entries[a], second = s.list.entries[b];
                    if (first < second == ((a & run) == 0)) s.list.entries[a] = second, s.list.entries[b] = first;
                }
                // Pairs at most 32 apart are of the same 64 entries before and after, and these of one warp.
                int next = distance > 1 ? distance / 2 : run;
                if (max(distance, next) > 32 || (run == width && distance == 1)) __syncthreads();
                else __syncwarp();
            }
    }

    // Entries that were put become the list; what is before it must be known.
    __device__ __forceinline__ void make_list(Shared& s, Sums preceding) {
        __syncthreads();
        before = preceding;
        size = min(s.size, LIST);
        sort(s, size);
        int part = (size + THREADS - 1) / THREADS;
        int begin = min(size, (int)threadIdx.x * part), end = min(size, begin + part);
        Sums mine = {0, 0}, together;
#pragma unroll 1
        for (int i = begin; i < end; i++) {
            s.list.sums[i] = mine.weight += weight(logarithm(value_of(place_in(s.list.entries[i]))));
        }
        Weight sum = sums_before(s, mine, together).weight;
#pragma unroll 1
        for (int i = begin; i < end; i++) s.list.sums[i] += sum;
        __syncthreads();
    }

    __device__ __forceinline__ void start_list(Shared& s) {
        __syncthreads();
        if (threadIdx.x == 0) s.size = 0;
        size = 0;
        __syncthreads();
    }

    // The entries at or above the m-th largest of the best ones of the threads, if they are not too many; whether.
    // And the weight of all, unless only these matter.
    __device__ __forceinline__ bool short_list(Shared& s, Entry best, int m, bool only) {
        s.list.entries[threadIdx.x] = best;
        sort(s, THREADS);
        unsigned place = place_in(s.list.entries[m - 1]);
        start_list(s);
        float bound = value_of(place);
        // Where the last ones still weigh more than a 64th of the largest, most of the weight lies below them.
        if (place == 0 || (!only && logarithm(bound) > -6.0f)) return false;
        Weight sum = 0, above = 0;
        each(logits, vocab, [&](float x, int id) {
            bool listed = x >= bound;
            if (listed) put(s, x, id);
            if (!only || listed) {
                float y = logarithm(x);
                Weight w = weight(y);
                sum += w;
                if (y >= floor) above += w;
            }
        });
        add_all(s, sum, above);
        if (s.size > LIST) return false;
        make_list(s, {0, 0});
        return true;
    }

    __device__ __forceinline__ void add_all(Shared& s, Weight sum, Weight above) {
        sums_before(s, {0, sum}, all);
        Sums left;
        sums_before(s, {0, above}, left);
        kept = left.weight;
    }

    __device__ __forceinline__ void count(Shared& s) {
        Weight above = 0;
        clear(s.bins);
        each(logits, vocab, [&](float x, int) {
            float y = logarithm(x);
            if (!weighs(y)) return;
            Weight w = weight(y);
            add(s.bins, bin(y), w);
            if (y >= floor) above += w;
        });
        add_up(s, s.bins);
        add_all(s, 0, above);
        all = up_to(s.bins, BINS - 1);
        counted = true;
    }

    // ---------------- where a sum passes a number
    __device__ __forceinline__ int find(Shared& s, const Histogram& h, Sums preceding, Goal goal) const {
        for (int i = threadIdx.x; i < BINS; i += THREADS)
            if (goal.passed_by(preceding + up_to(h, i)) && !goal.passed_by(preceding + up_to(h, i - 1))) s.found = i;
        __syncthreads();
        int found = s.found;
        __syncthreads();
        return found;
    }

    __device__ __forceinline__ bool listed(Shared& s, Goal goal) const {
        if (size == 0 || goal.passed_by(before)) return false;
        return goal.passed_by(before + Sums{(unsigned)size, s.list.sums[size - 1]});
    }

    __device__ __forceinline__ Reached in_list(Shared& s, Goal goal) const {
#pragma unroll 1
        for (int i = threadIdx.x; i < size; i += THREADS) {
            Sums up_to_here = before + Sums{i + 1u, s.list.sums[i]};
            Sums up_to_last = before + Sums{(unsigned)i, i > 0 ? s.list.sums[i - 1] : 0};
            if (goal.passed_by(up_to_here) && !goal.passed_by(up_to_last)) s.found = i;
        }
        __syncthreads();
        int i = s.found;
        Reached reached = {before.weight + s.list.sums[i], id_in(s.list.entries[i])};
        __syncthreads();
        return reached;
    }

    // The first token for which the sum passes; it must for some. A token costs a look at the row where many tie.
    __device__ __forceinline__ Reached reach(Shared& s, Goal goal, bool want_id) {
        if (listed(s, goal)) return in_list(s, goal);
        if (!counted) count(s);
        int last = find(s, s.bins, {0, 0}, goal), first = last;
        unsigned up_to_last = up_to(s.bins, last).count;
        // All up to there answer the next question too; for a short row another look is cheaper than sorting.
        if (up_to_last <= LIST && up_to_last <= vocab / 32) first = 0;
        Sums preceding = up_to(s.bins, first - 1);
        if (up_to_last - preceding.count > LIST) {
            Reached tie;
            if (look_closer(s, goal, last, preceding, want_id, tie)) return tie;
        } else {
            start_list(s);
            each(logits, vocab, [&](float x, int id) {
                float y = logarithm(x);
                if (weighs(y) && bin(y) >= first && bin(y) <= last) put(s, x, id);
            });
            make_list(s, preceding);
        }
        return in_list(s, goal);
    }

    // For a bin that is too full: finer bins of it, by the bits of its logits, until the list holds one of these, or
    // a single value is left, whose entries all weigh the same (then it answers true).
    __device__ __forceinline__ bool look_closer(Shared& s, Goal goal, int full, Sums preceding, bool want_id,
                                                Reached& tie) {
        if (threadIdx.x == 0) s.least = ~0u, s.largest = 0;
        __syncthreads();
        unsigned least = ~0u, largest = 0;
        each(logits, vocab, [&](float x, int) {
            float y = logarithm(x);
            if (!weighs(y) || bin(y) != full) return;
            least = min(least, place_of(x)), largest = max(largest, place_of(x));
        });
        atomicMin(&s.least, least);
        atomicMax(&s.largest, largest);
        __syncthreads();
        least = s.least, largest = s.largest;
        size = 0;
        unsigned entries = ~0u;
        while (least < largest && entries > LIST) {
            int shift = 0;
            while ((largest - least) >> shift >= BINS) shift++;
            clear(s.finer);
            each(logits, vocab, [&](float x, int) {
                unsigned place = place_of(x);
                if (place < least || place > largest) return;
                add(s.finer, (int)((largest - place) >> shift), weight(logarithm(x)));
            });
            add_up(s, s.finer);
            int i = find(s, s.finer, preceding, goal);
            entries = up_to(s.finer, i).count - up_to(s.finer, i - 1).count;
            preceding = preceding + up_to(s.finer, i - 1);
            largest -= (unsigned)i << shift;
            unsigned width = (1u << shift) - 1;
            if (largest - least > width) least = largest - width;
            __syncthreads();
        }
        if (entries > LIST) {
            Weight one = weight(logarithm(value_of(largest)));
            Weight rest = goal.number - (goal.counts ? preceding.count : preceding.weight);
            Weight before_it = goal.counts ? rest : rest / one;
            tie = {preceding.weight + (before_it + 1) * one, want_id ? nth(s, largest, (unsigned)before_it) : -1};
            return true;
        }
        start_list(s);
        each(logits, vocab, [&](float x, int id) {
            unsigned place = place_of(x);
            if (place >= least && place <= largest) put(s, x, id);
        });
        make_list(s, preceding);
        return false;
    }

    // The id with so many ids below it that have a logit of this place too.
    __device__ __forceinline__ int nth(Shared& s, unsigned place, unsigned below) const {
        int part = (vocab + THREADS - 1) / THREADS;
        int begin = min(vocab, (int)threadIdx.x * part), end = min(vocab, begin + part);
        Sums mine = {0, 0}, together;
#pragma unroll 1
        for (int id = begin; id < end; id++) mine.count += place_of(logits[id]) == place;
        unsigned seen = sums_before(s, mine, together).count;
#pragma unroll 1
        for (int id = begin; id < end && seen <= below; id++)
            if (place_of(logits[id]) == place && seen++ == below) s.found = id;
        __syncthreads();
        int found = s.found;
        __syncthreads();
        return found;
    }
};

// How many entries a short list asks for: as many as top-k keeps, or of all half as many as there are threads, by which
// some two thirds as many as there are threads are let in. 0: no list, for top-k keeps more, or the row is too short.
__device__ __forceinline__ int wanted(int vocab, int most) {
    if (THREADS < 32 || vocab < 8 * THREADS) return 0;
    if (most == vocab) return THREADS / 2;
    return most <= THREADS / 2 ? most : 0;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sample_rows(const float* logits, const float* temperature, const int* top_k, const float* top_p, const float* min_p,
                const unsigned long long* seeds, const int* steps, int* out, int vocab) {
    __shared__ Shared s;
    let_next_start();
    wait_for_previous();
    int r = blockIdx.x;
    Row row;
    row.logits = logits + (size_t)r * vocab, row.vocab = vocab;

    unsigned largest = 0, least = ~0u;
    int largest_id = 0x7fffffff;
    each(row.logits, vocab, [&](float x, int id) {
        unsigned place = place_of(x);
        if (place > largest || largest_id == 0x7fffffff) largest = place, largest_id = id;
        least = min(least, place - 1);  // of a NaN, ~0
    });
    Entry best = entry_of(largest, largest_id);
    Entry first = ends(s, best, least);
    float top = value_of(place_in(first)), p = top_p[r];
    int chosen = id_in(first);
    if (temperature[r] > 0.0f && fabsf(top) < infinity()) {  // else the most probable one
        int most = top_k[r] > 0 ? min(top_k[r], vocab) : vocab;
        row.scale(top, value_of(least + 1), temperature[r], p, min_p[r]);
        int entries = wanted(vocab, most);
        bool cut = most < vocab;
        if (entries == 0 || !row.short_list(s, best, entries, cut)) {
            row.count(s);
            cut = (unsigned)most < row.all.count;
        }
        Weight end = row.all.weight;  // of what is kept
        for (int question = 0; question < 3; question++) {
            Goal goal = {question == 0, most - 1u};
            if (question == 0 && !cut) continue;
            if (question == 1) {
                if (!(p < 1.0f)) continue;
                Weight enough = (Weight)ceil((double)fmaxf(p, 0.0f) * (double)end);
                goal.number = enough > 0 ? enough - 1 : 0;
            }
            if (question == 2) {
                end = end < row.kept ? end : row.kept;
                goal.number = uniform_part(end, seeds[r], steps[r]);
            }
            if (end == 0) break;  // min_p is above 1: nothing is left but the first
            Reached reached = row.reach(s, goal, question == 2);
            end = reached.weight;
            if (question == 2) chosen = reached.id;
        }
    }
    if (threadIdx.x == 0) out[r] = chosen;
}
