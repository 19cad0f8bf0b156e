// Causal attention of the new tokens of several requests over their paged keys: flash_attention.cu, with the keys
// found through block tables.
//
// Launch: grid (ceil(longest / 64), Hq, B), block (64). A block works on 64 queries of one head of one request, a
// thread on one: flash.cuh. Blocks past a request's last query do nothing.
// Reads q (T, Hq, D) float32, key_cache and value_cache (NB, BS, Hk, D) bf16, block_tables (B, max_blocks) int32,
// query_starts (B + 1,) int32: request b has the rows query_starts[b] to query_starts[b + 1] - 1 of q, and they are
// the last of its context_lens[b] tokens. Writes out (T, Hq, D) bf16, these rows of it.
#include "flash.cuh"

extern "C" __global__ void paged_prefill(const float* q, const bf16* key_cache, const bf16* value_cache,
                                         const int* block_tables, const int* query_starts, const int* context_lens,
                                         bf16* out, float scale, int max_blocks, int block_size, int q_heads,
                                         int kv_heads) {
    int request = blockIdx.z, first = blockIdx.x * QUERIES;
    int begin = query_starts[request], n = query_starts[request + 1] - begin;
    if (first >= n) return;
    size_t offset = (size_t)begin * q_heads * HEAD_DIM;
    Paged keys{block_tables + (size_t)request * max_blocks, block_size};
    flash(q + offset, key_cache, value_cache, keys, out + offset, scale, first, n, context_lens[request], blockIdx.y,
          q_heads, kv_heads);
}
