// The attention of a decode step for many requests, in one launch a layer: rotary embedding of queries and keys, the
// write of the new keys and values to the cache, attention over the paged cache.
//
// HEAD_DIM, GROUP and BLOCK_SIZE are given to the compiler: decode_attention.cuh.
//
// Launch: grid (splits, Hk, B), block of whole warps, ATTENTION_FLOATS(warps) floats of dynamic shared memory. A block
// works on the GROUP query heads of one KV head of one request, and on one split of its keys; a thread on eight columns
// of some of the keys. Blocks of splits that a request is too short for return at once.
// Reads qkv (B, (Hq + 2 Hk) * D) float32, block_tables (B, max_blocks) int32, context_lens (B,) int32 (the new token
// included; 0 for a row that pads the batch: it is left alone), inv_freq (D/2,) float32. Writes key_cache and
// value_cache (NB, BS, Hk, D) bf16 at the new tokens' slots, out (B, Hq, D) bf16, and scratch memory: partial
// (B, Hk, splits, GROUP, D), lse (B, Hk, splits, GROUP) float32, arrived (B, Hk) uint32, which is zeros again at the end.
#define UNROLL 2
#define LEAST_KEYS 256
#include "decode_attention.cuh"
#include "dependent_launch.cuh"

#ifndef MOST_THREADS
#define MOST_THREADS 256
#endif
extern "C" __global__ void __launch_bounds__(MOST_THREADS, 512 / MOST_THREADS) decode_attention(const float* qkv, bf16* key_cache, bf16* value_cache,
                                            const int* block_tables, const int* context_lens, const float* inv_freq,
                                            bf16* out, float* partial, float* lse, unsigned* arrived, float scale,
                                            int max_blocks) {
    extern __shared__ __align__(16) float scratch[];
    __shared__ float cosines[HALF], sines[HALF];
    int split = blockIdx.x, kv_head = blockIdx.y, request = blockIdx.z, kv_heads = gridDim.y;
    wait_for_previous();
    let_next_start();
    int context = context_lens[request];
    if (context <= 0) return;
    fill_turns(context - 1, inv_freq, cosines, sines);
    Decode step = {key_cache, value_cache, partial, lse, arrived, kv_heads, (int)gridDim.x, scale * LOG2_E};
    const float* row = qkv + (size_t)request * kv_heads * (GROUP + 2) * HEAD_DIM;
    const float* key = row + ((size_t)kv_heads * GROUP + kv_head) * HEAD_DIM;
    NewToken token = {row + (size_t)kv_head * GROUP * HEAD_DIM, key, key + (size_t)kv_heads * HEAD_DIM, cosines, sines};
    bf16* heads = out + ((size_t)request * kv_heads + kv_head) * GROUP * HEAD_DIM;
    auto await = [&]() {
        BLOCK_BARRIER();  // the turns are there
        return token;
    };
    auto put = [&](int p, float a, float b) { *(unsigned*)(heads + p) = pack2(a, b); };
    attend_split<GROUP>(step, block_tables + (size_t)request * max_blocks, context, request, kv_head, split, true,
                        scratch, await, put);
}
