// One decode step's attention of one request and one KV head, shared by a whole block: rotary embedding, the write of
// the new key and value, attention over some of the keys in the cache. Where several blocks share the keys, each kernel
// has its own way to merge what they found.
//
// HEAD_DIM (a multiple of 16, at most 256), GROUP (query heads of a KV head, at most 8) and BLOCK_SIZE (token slots of
// a block of the cache) are given to the compiler.
//
// HEADS query heads are worked on together, of one KV head (all GROUP of them, or fewer). A key is shared by LANES lanes
// of a warp, eight columns each, so that one 16-byte load a lane brings it; a warp looks at AT_ONCE keys side by side,
// and has UNROLL times as many on their way, the first of them before the query is known. Each set of LANES lanes keeps
// an online softmax of its own keys for all HEADS in registers: there is no barrier until the keys are done with. The
// sets of a warp are then merged by shuffles, the warps through shared memory. Scores are kept in base 2: their scale
// has log2(e) in it.
#include "common.cuh"

#define LANES (HEAD_DIM <= 16 ? 2 : HEAD_DIM <= 32 ? 4 : HEAD_DIM <= 64 ? 8 : HEAD_DIM <= 128 ? 16 : 32)
#define AT_ONCE (32 / LANES)
#define HALF (HEAD_DIM / 2)
#define LOG2_E 1.4426950408889634f

// A kernel may have other threads in its blocks than those that call the functions of this file.
#ifndef BLOCK_THREADS
#define BLOCK_THREADS ((int)blockDim.x)
#define BLOCK_BARRIER() __syncthreads()
#endif
#ifndef UNROLL
#define UNROLL 4
#endif
// What another block wrote in this launch: read from the L2 cache, which all multiprocessors share.
__device__ __forceinline__ float load_fresh(const float* from) {
#ifdef __CUDA_ARCH__
    return __ldcg(from);
#else
    return *from;
#endif
}

// The cosines and sines of a position's angles, by all threads of the block; a barrier has to follow.
__device__ __forceinline__ void fill_turns(int position, const float* inv_freq, float* cosines, float* sines) {
    for (int i = threadIdx.x; i < HALF; i += BLOCK_THREADS) {
        float angle = (float)position * inv_freq[i];
        cosines[i] = cosf(angle);
        sines[i] = sinf(angle);
    }
}

__device__ __forceinline__ void load_floats(const float* from, float (&to)[8]) {
    float4 first = *(const float4*)from, second = *(const float4*)(from + 4);
    to[0] = first.x, to[1] = first.y, to[2] = first.z, to[3] = first.w;
    to[4] = second.x, to[5] = second.y, to[6] = second.z, to[7] = second.w;
}

// Columns first, ..., first + 7 of a head, turned by the position's angles.
__device__ __forceinline__ void load_turned(const float* head, int first, const float* cosines, const float* sines,
                                            float (&to)[8]) {
    bool lower = first < HALF;
    int angle = lower ? first : first - HALF;
    float own[8], other[8];
    load_floats(head + first, own);
    load_floats(head + (lower ? first + HALF : first - HALF), other);
#pragma unroll
    for (int c = 0; c < 8; c++) {
        float sine = lower ? -sines[angle + c] : sines[angle + c];
        to[c] = own[c] * cosines[angle + c] + other[c] * sine;
    }
}

__device__ __forceinline__ unsigned pack2(float low, float high) {
    return (unsigned)float_to_bf16(low) | (unsigned)float_to_bf16(high) << 16;
}

__device__ __forceinline__ void store8(const float (&from)[8], bf16* to) {
    *(uint4*)to = make_uint4(pack2(from[0], from[1]), pack2(from[2], from[3]), pack2(from[4], from[5]),
                             pack2(from[6], from[7]));
}

// exp2 of x - peak, where both may be -infinity.
__device__ __forceinline__ float weight_of(float x, float peak) { return x == -infinity() ? 0.0f : exp2f(x - peak); }

__device__ __forceinline__ size_t offset_of(const int* table, int j, int kv_head, int kv_heads, int column) {
    size_t slot = (size_t)table[j / BLOCK_SIZE] * BLOCK_SIZE + j % BLOCK_SIZE;
    return (slot * kv_heads + kv_head) * HEAD_DIM + column;
}

// The cache of one layer, and how scores are made.
struct Decode {
    bf16 *keys, *values;  // (NB, BLOCK_SIZE, Hk, D)
    int kv_heads;
    float scale;          // of the scores, times log2(e)
};

// One request's new token, for one KV head: the products, not turned yet; and the turns of its position.
struct NewToken {
    const float *queries, *key, *value;  // (HEADS, D), (D,), (D,)
    const float *cosines, *sines;        // (D/2,) each
};

// This lane's columns of UNROLL keys and values, with zeros for those past `end`.
struct Keys {
    uint4 key[UNROLL], value[UNROLL];

    __device__ __forceinline__ void load(const Decode& step, const int* table, int kv_head, int start, int end) {
        int mine = threadIdx.x % 32 / LANES, column = threadIdx.x % LANES * 8;
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            int j = start + u * AT_ONCE + mine;
            key[u] = value[u] = make_uint4(0u, 0u, 0u, 0u);
            if (j < end && column < HEAD_DIM) {
                size_t at = offset_of(table, j, kv_head, step.kv_heads, column);
                key[u] = *(const uint4*)(step.keys + at);
                value[u] = *(const uint4*)(step.values + at);
            }
        }
    }
};

// The attention so far of one set of lanes.
template <int HEADS>
struct Seen {
    float peak[HEADS], sum[HEADS], total[HEADS][8];

    __device__ __forceinline__ Seen() {
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            peak[h] = -infinity();
            sum[h] = 0.0f;
#pragma unroll
            for (int c = 0; c < 8; c++) total[h][c] = 0.0f;
        }
    }

    // COUNT keys and values of this set, of which those from `valid` on do not count.
    template <int COUNT>
    __device__ __forceinline__ void look(const float (&query)[HEADS][8], const uint4* key, const uint4* value, int valid) {
        float score[COUNT][HEADS];
#pragma unroll
        for (int u = 0; u < COUNT; u++) {
            float k[8];
            load8((const bf16*)(key + u), k);
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                float dot = 0.0f;
#pragma unroll
                for (int c = 0; c < 8; c++) dot += query[h][c] * k[c];
#pragma unroll
                for (int other = 1; other < LANES; other *= 2) dot += __shfl_xor_sync(0xffffffffu, dot, other);
                score[u][h] = u < valid ? dot : -infinity();
            }
        }
        bool rises = false;
        float before[HEADS];
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            before[h] = peak[h];
#pragma unroll
            for (int u = 0; u < COUNT; u++) peak[h] = fmaxf(peak[h], score[u][h]);
            rises |= peak[h] > before[h];
        }
        if (__any_sync(0xffffffffu, rises)) {  // mostly not: the largest score soon stays what it is
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                float shrink = weight_of(before[h], peak[h]);
                sum[h] *= shrink;
#pragma unroll
                for (int c = 0; c < 8; c++) total[h][c] *= shrink;
            }
        }
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float base = peak[h] == -infinity() ? 0.0f : peak[h];
#pragma unroll
            for (int u = 0; u < COUNT; u++) sum[h] += score[u][h] = exp2f(score[u][h] - base);
        }
#pragma unroll
        for (int u = 0; u < COUNT; u++) {
            float v[8];
            load8((const bf16*)(value + u), v);
#pragma unroll
            for (int h = 0; h < HEADS; h++)
#pragma unroll
                for (int c = 0; c < 8; c++) total[h][c] += score[u][h] * v[c];
        }
    }

    // The sets of lanes of a warp become one: afterwards every set holds the same.
    __device__ __forceinline__ void merge_within_warp() {
#pragma unroll
        for (int h = 0; h < HEADS; h++)
#pragma unroll
            for (int other = LANES; other < 32; other *= 2) {
                float their_peak = __shfl_xor_sync(0xffffffffu, peak[h], other);
                float their_sum = __shfl_xor_sync(0xffffffffu, sum[h], other);
                float highest = fmaxf(peak[h], their_peak);
                float ours = weight_of(peak[h], highest), theirs = weight_of(their_peak, highest);
                peak[h] = highest;
                sum[h] = sum[h] * ours + their_sum * theirs;
#pragma unroll
                for (int c = 0; c < 8; c++) {
                    float their_total = __shfl_xor_sync(0xffffffffu, total[h][c], other);
                    total[h][c] = total[h][c] * ours + their_total * theirs;
                }
            }
    }
};

// float32 values of shared memory that attend_keys takes for so many warps: totals, peaks, sums.
#define ATTENTION_FLOATS(warps) ((warps) * GROUP * (HEAD_DIM + 2))

// Two neighbouring columns of a head's attention over some keys, and the logarithm (base 2) of its weights' sum.
struct Part {
    float a, b, lse;
};

// What the warps of a block have seen, in shared memory.
template <int HEADS>
struct SeenByBlock {
    float *totals, *peaks, *sums;

    __device__ __forceinline__ explicit SeenByBlock(float* scratch) {
        int warps = BLOCK_THREADS / 32;
        totals = scratch;
        peaks = totals + warps * HEADS * HEAD_DIM;
        sums = peaks + warps * HEADS;
    }

    // Columns p and p + 1 of the HEADS heads side by side.
    __device__ __forceinline__ Part part(int p) const {
        int h = p / HEAD_DIM, warps = BLOCK_THREADS / 32;
        float peak = -infinity(), sum = 0.0f, a = 0.0f, b = 0.0f;
        for (int w = 0; w < warps; w++) peak = fmaxf(peak, peaks[w * HEADS + h]);
        for (int w = 0; w < warps; w++) {
            float weight = weight_of(peaks[w * HEADS + h], peak);
            float2 total = *(const float2*)(totals + w * HEADS * HEAD_DIM + p);
            sum += sums[w * HEADS + h] * weight;
            a += total.x * weight;
            b += total.y * weight;
        }
        return {a / sum, b / sum, peak + log2f(sum)};
    }
};

// Keys begin to end - 1 of KV head `kv_head`, the new token among them if it is there; `context` counts
// the new token. Keys are on their way before await() is called, which returns the NewToken; it has a barrier in it where
// it needs one. Where `writes`, the new key and value go to the cache. All BLOCK_THREADS threads call it; a barrier
// ends it.
template <int HEADS, class Await>
__device__ __forceinline__ SeenByBlock<HEADS> attend_keys(const Decode& step, const int* table, int context, int kv_head,
                                                          int begin, int end, bool writes, float* scratch, Await await) {
    int warp = threadIdx.x / 32, warps = BLOCK_THREADS / 32, lane = threadIdx.x % 32, column = lane % LANES * 8;
    bool newest = begin < context && end >= context;
    end = min(end, context - 1);
    Keys keys;
    int start = begin + warp * AT_ONCE * UNROLL;
    keys.load(step, table, kv_head, start, end);
    NewToken token = await();
    float query[HEADS][8] = {};
    if (column < HEAD_DIM) {
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            load_turned(token.queries + h * HEAD_DIM, column, token.cosines, token.sines, query[h]);
#pragma unroll
            for (int c = 0; c < 8; c++) query[h][c] *= step.scale;
        }
    }
    Seen<HEADS> seen;
    while (start < end) {
        int next = start + warps * AT_ONCE * UNROLL;
        Keys following;
        following.load(step, table, kv_head, next, end);  // while these are looked at
        int valid = (end - start - lane / LANES + AT_ONCE - 1) / AT_ONCE;
        seen.template look<UNROLL>(query, keys.key, keys.value, end - start > lane / LANES ? valid : 0);
        keys = following;
        start = next;
    }
    if (newest && warp == 0) {
        float key[8] = {}, value[8] = {};
        if (column < HEAD_DIM) {
            load_turned(token.key, column, token.cosines, token.sines, key);
            load_floats(token.value + column, value);
        }
        uint4 rounded[2];
        store8(key, (bf16*)&rounded[0]);
        store8(value, (bf16*)&rounded[1]);
        seen.template look<1>(query, rounded, rounded + 1, lane < LANES);
        if (writes && lane < LANES && column < HEAD_DIM) {
            size_t at = offset_of(table, context - 1, kv_head, step.kv_heads, column);
            *(uint4*)(step.keys + at) = rounded[0];
            *(uint4*)(step.values + at) = rounded[1];
        }
    }
    seen.merge_within_warp();
    SeenByBlock<HEADS> block(scratch);
    if (lane < LANES && column < HEAD_DIM) {
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float4* to = (float4*)(block.totals + (warp * HEADS + h) * HEAD_DIM + column);
            to[0] = make_float4(seen.total[h][0], seen.total[h][1], seen.total[h][2], seen.total[h][3]);
            to[1] = make_float4(seen.total[h][4], seen.total[h][5], seen.total[h][6], seen.total[h][7]);
            if (lane == 0) {
                block.peaks[warp * HEADS + h] = seen.peak[h];
                block.sums[warp * HEADS + h] = seen.sum[h];
            }
        }
    }
    BLOCK_BARRIER();
    return block;
}
