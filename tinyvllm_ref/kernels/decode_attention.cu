// The attention of a decode step for many requests, in one launch a layer: rotary embedding of queries and keys, the
// write of the new keys and values to the cache, attention over the paged cache.
//
// Given to the compiler: HEAD_DIM, GROUP and BLOCK_SIZE as decode_attention.cuh has them; KV_HEADS, WARPS of a block;
// CHUNKS_FIRST, of keys, that are under way before the query is there; and whether the launch is a dependent one: then it
// is EARLY, and these keys are under way while the product before it still runs.
//
// Launch: grid (splits, KV_HEADS, B), block (32 WARPS), ATTENTION_FLOATS(WARPS) floats of dynamic shared memory. A block
// works on the GROUP query heads of one KV head of one request, and on one split of its keys; a warp on 16 of the keys
// at a time, a thread on some columns of some of these. Blocks of splits that a request is too short for return at once.
// Reads qkv (B, (Hq + 2 Hk) * D) float32, block_tables (B, max_blocks) int32, context_lens (B,) int32 (the new token
// included; 0 for a row that pads the batch: it is left alone), inv_freq (D/2,) float32. Writes key_cache and
// value_cache (NB, BS, Hk, D) bf16 at the new tokens' slots, out (B, Hq, D) bf16, and scratch memory: partial
// (B, Hk, splits, GROUP, D), lse (B, Hk, splits, GROUP) float32, arrived (B, Hk) uint32, which is zeros again at the end.
//
// An early launch reads everything but qkv before it waits for the kernel before it. That is right because none of it is
// written after the step has begun, in the sense of dependent_launch.cuh: context_lens and block_tables are written
// before embed_norm, which opens a step and lets the next kernel start after it has waited; so once anything behind
// it runs, they are there. Keys and values of earlier tokens were written in earlier steps, so before it too. Those of
// the new tokens are written by this launch, after its wait, each by the block that has its place, from qkv; no block
// reads the place of one from the cache, for all of them end at context - 1, and no two requests share the block of
// the cache that a new token goes to.
#ifndef LEAST_KEYS
#define LEAST_KEYS 256  // of a split: fewer are not worth a block
#endif
#ifndef WARPS
#define WARPS 8
#endif
#ifndef KV_HEADS
#define KV_HEADS 8
#endif
#ifndef EARLY
#define EARLY 0
#endif
// Threads that a multiprocessor has room for, as many as do without spilled registers.
#define RESIDENT (HEAD_DIM <= 128 ? 512 : 256)
#define BLOCK_THREADS (32 * WARPS)
#define BLOCK_BARRIER() __syncthreads()
#define TABLES_IN_GLOBAL 1
#define BLOCKS_RESIDENT (RESIDENT > BLOCK_THREADS ? RESIDENT / BLOCK_THREADS : 1)
#include "async_copy.cuh"
#include "decode_attention.cuh"
#include "dependent_launch.cuh"

#define HEADS_OF_TOKEN (GROUP + 2)  // its queries, key and value
#define PIECES_OF_TOKEN (HEADS_OF_TOKEN * HEAD_DIM / 4)  // of 16 bytes
#define ANGLES ((HALF + BLOCK_THREADS - 1) / BLOCK_THREADS)  // of a thread

// Where the partial results of one request and KV head lie, and who has come.
struct Splits {
    float *partial, *lse;  // (splits, GROUP, D), (splits, GROUP)
    unsigned* arrived;

    __device__ __forceinline__ void put(int split, int p, Part part) const {
        *(float2*)(partial + (size_t)split * GROUP * HEAD_DIM + p) = make_float2(part.a, part.b);
        if (p % HEAD_DIM == 0) lse[split * GROUP + p / HEAD_DIM] = part.lse;
    }

    // The first `count` splits as one, in their order.
    __device__ __forceinline__ Part merged(int count, int p) const {
        int h = p / HEAD_DIM;
        float peak = -infinity(), sum = 0.0f, a = 0.0f, b = 0.0f;
        for (int s = 0; s < count; s++) peak = fmaxf(peak, load_fresh(lse + s * GROUP + h));
#pragma unroll 4
        for (int s = 0; s < count; s++) {
            const float* theirs = partial + (size_t)s * GROUP * HEAD_DIM + p;
            float weight = exp2f(load_fresh(lse + s * GROUP + h) - peak);
            sum += weight;
            a += weight * load_fresh(theirs);
            b += weight * load_fresh(theirs + 1);
        }
        return {a / sum, b / sum, 0.0f};
    }
};

// How the keys of a request are shared out.
struct Division {
    int keys_each, active;  // of a split; splits that have any

    __device__ __forceinline__ Division(int context, int splits) : keys_each(LEAST_KEYS), active(context > 0) {
        if (context <= LEAST_KEYS) return;
        keys_each = max(LEAST_KEYS, ((context + splits - 1) / splits + 31) / 32 * 32);
        active = (context + keys_each - 1) / keys_each;
    }
};

// What the product has of a request's new token for a KV head, to shared memory: queries, key and value, not turned.
__device__ __forceinline__ void bring_token(const float* row, int kv_head, float* token) {
#pragma unroll
    for (int p = 0; p < PIECES_OF_TOKEN; p += BLOCK_THREADS) {
        int i = 4 * (p + threadIdx.x), head = i / HEAD_DIM;
        int place = head < GROUP ? kv_head * GROUP + head : KV_HEADS * head + kv_head;
        if (i < 4 * PIECES_OF_TOKEN) copy16_async(token + i, row + place * HEAD_DIM + i % HEAD_DIM);
    }
    commit_copies();
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, BLOCKS_RESIDENT)
    decode_attention(const float* qkv, bf16* key_cache, bf16* value_cache, const int* block_tables,
                     const int* context_lens, const float* inv_freq, bf16* out, float* partial, float* lse,
                     unsigned* arrived, float scale, int max_blocks) {
    extern __shared__ __align__(16) float scratch[];
    __shared__ float4 token_pieces[PIECES_OF_TOKEN];
    __shared__ float cosines[HALF], sines[HALF];
    __shared__ bool last;
    int split = blockIdx.x, kv_head = blockIdx.y, request = blockIdx.z, splits = gridDim.x;
    float* token = (float*)token_pieces;
    const float* row = qkv + (size_t)request * KV_HEADS * HEADS_OF_TOKEN * HEAD_DIM;
    const int* table = block_tables + (size_t)request * max_blocks;
    let_next_start();
    if (!EARLY) wait_for_previous();
    LayerCache cache = {key_cache, value_cache, KV_HEADS, scale * LOG2_E};
    FromCache keys(cache, table);
    // All of these are asked for at once. The first split begins with the first key, whatever the context is.
    if (split == 0 && IN_ONE_BLOCK) keys.look_up(KeyRange{kv_head, 0, 0}.first(), max_blocks * BLOCK_SIZE);
    float frequency[ANGLES];
#pragma unroll
    for (int a = 0; a < ANGLES; a++) {
        int i = threadIdx.x + a * BLOCK_THREADS;
        frequency[a] = i < HALF ? load_fresh(inv_freq + i) : 0.0f;
    }
    int context = load_fresh(context_lens + request);
    Division division(context, splits);
    if (split >= division.active) {
        // What ends before it has waited counts as done; but the launch must not, before the one before it is.
        if (EARLY && split == 0) wait_for_previous();
        return;
    }
    if (!EARLY) bring_token(row, kv_head, token);  // it would wait behind the keys
    auto await = [&]() {
#pragma unroll
        for (int a = 0; a < ANGLES; a++) {
            int i = threadIdx.x + a * BLOCK_THREADS;
            if (i < HALF) turn(context - 1, frequency[a], cosines[i], sines[i]);
        }
        if (EARLY) {
            wait_for_previous();
            bring_token(row, kv_head, token);
        }
        wait_copies<0>();
        BLOCK_BARRIER();  // token and turns are there
        return NewToken{token, token + GROUP * HEAD_DIM, token + (GROUP + 1) * HEAD_DIM, cosines, sines};
    };
    KeyRange range = {kv_head, split * division.keys_each, (split + 1) * division.keys_each};
    auto seen = attend_keys(cache, table, context, range, scratch, keys, await);
    size_t pair = (size_t)request * KV_HEADS + kv_head;  // of request and KV head
    bf16* heads = out + pair * GROUP * HEAD_DIM;
    if (division.active == 1) {
        for (int p = 2 * threadIdx.x; p < GROUP * HEAD_DIM; p += 2 * BLOCK_THREADS) {
            Part part = seen.part(p);
            *(unsigned*)(heads + p) = pack_bf16(part.a, part.b);
        }
        return;
    }
    Splits mine = {partial + pair * splits * GROUP * HEAD_DIM, lse + pair * splits * GROUP, arrived + pair};
    for (int p = 2 * threadIdx.x; p < GROUP * HEAD_DIM; p += 2 * BLOCK_THREADS) mine.put(split, p, seen.part(p));
    __threadfence();  // our part is where all can see it,
    __syncthreads();  // every thread's of it,
    if (threadIdx.x == 0) last = atomicAdd(mine.arrived, 1u) == (unsigned)division.active - 1u;  // before we are counted
    __syncthreads();
    if (!last) return;
    __threadfence();  // and we see what the others wrote before they were counted
    for (int p = 2 * threadIdx.x; p < GROUP * HEAD_DIM; p += 2 * BLOCK_THREADS) {
        Part part = mine.merged(division.active, p);
        *(unsigned*)(heads + p) = pack_bf16(part.a, part.b);
    }
    if (threadIdx.x == 0) *mine.arrived = 0u;
}
