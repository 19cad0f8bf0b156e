// The attention of a decode step for many requests, in one launch a layer: rotary embedding of queries and keys, the
// write of the new keys and values to the cache, attention over the paged cache.
//
// HEAD_DIM, GROUP and BLOCK_SIZE are given to the compiler: decode_attention.cuh.
//
// Launch: grid (splits, Hk, B), block of whole warps, ATTENTION_FLOATS(warps) floats of dynamic shared memory. A block
// works on the GROUP query heads of one KV head of one request, and on one split of its keys; a warp on 16 of the keys
// at a time, a thread on some columns of some of these. Blocks of splits that a request is too short for return at once.
// Reads qkv (B, (Hq + 2 Hk) * D) float32, block_tables (B, max_blocks) int32, context_lens (B,) int32 (the new token
// included; 0 for a row that pads the batch: it is left alone), inv_freq (D/2,) float32. Writes key_cache and
// value_cache (NB, BS, Hk, D) bf16 at the new tokens' slots, out (B, Hq, D) bf16, and scratch memory: partial
// (B, Hk, splits, GROUP, D), lse (B, Hk, splits, GROUP) float32, arrived (B, Hk) uint32, which is zeros again at the end.
#ifndef LEAST_KEYS
#define LEAST_KEYS 256  // of a split: fewer are not worth a block
#endif
#include "decode_attention.cuh"
#include "dependent_launch.cuh"

#ifndef MOST_THREADS
#define MOST_THREADS 256
#endif

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

extern "C" __global__ void __launch_bounds__(MOST_THREADS, 512 / MOST_THREADS)
    decode_attention(const float* qkv, bf16* key_cache, bf16* value_cache, const int* block_tables,
                     const int* context_lens, const float* inv_freq, bf16* out, float* partial, float* lse,
                     unsigned* arrived, float scale, int max_blocks) {
    extern __shared__ __align__(16) float scratch[];
    __shared__ float cosines[HALF], sines[HALF];
    __shared__ bool last;
    int split = blockIdx.x, kv_head = blockIdx.y, request = blockIdx.z, kv_heads = gridDim.y, splits = gridDim.x;
    let_next_start();
    wait_for_previous();
    int context = context_lens[request];
    int keys_each = max(LEAST_KEYS, ((context + splits - 1) / splits + 31) / 32 * 32);
    int active = (context + keys_each - 1) / keys_each;
    if (split >= active) return;
    fill_turns(context - 1, inv_freq, cosines, sines);
    LayerCache cache = {key_cache, value_cache, kv_heads, scale * LOG2_E};
    const float* row = qkv + (size_t)request * kv_heads * (GROUP + 2) * HEAD_DIM;
    const float* key = row + ((size_t)kv_heads * GROUP + kv_head) * HEAD_DIM;
    NewToken token = {row + (size_t)kv_head * GROUP * HEAD_DIM, key, key + (size_t)kv_heads * HEAD_DIM, cosines, sines};
    auto await = [&]() {
        BLOCK_BARRIER();  // the turns are there
        return token;
    };
    const int* table = block_tables + (size_t)request * max_blocks;
    auto seen = attend_keys(cache, table, context, KeyRange{kv_head, split * keys_each, (split + 1) * keys_each}, scratch,
                            FromCache(cache, table), await);
    size_t pair = (size_t)request * kv_heads + kv_head;  // of request and KV head
    bf16* heads = out + pair * GROUP * HEAD_DIM;
    if (active == 1) {
        for (int p = 2 * threadIdx.x; p < GROUP * HEAD_DIM; p += 2 * blockDim.x) {
            Part part = seen.part(p);
            *(unsigned*)(heads + p) = pack_bf16(part.a, part.b);
        }
        return;
    }
    Splits mine = {partial + pair * splits * GROUP * HEAD_DIM, lse + pair * splits * GROUP, arrived + pair};
    for (int p = 2 * threadIdx.x; p < GROUP * HEAD_DIM; p += 2 * blockDim.x) mine.put(split, p, seen.part(p));
    __threadfence();  // our part is where all can see it,
    __syncthreads();  // every thread's of it,
    if (threadIdx.x == 0) last = atomicAdd(mine.arrived, 1u) == (unsigned)active - 1u;  // before we are counted
    __syncthreads();
    if (!last) return;
    __threadfence();  // and we see what the others wrote before they were counted
    for (int p = 2 * threadIdx.x; p < GROUP * HEAD_DIM; p += 2 * blockDim.x) {
        Part part = mine.merged(active, p);
        *(unsigned*)(heads + p) = pack_bf16(part.a, part.b);
    }
    if (threadIdx.x == 0) *mine.arrived = 0u;
}
