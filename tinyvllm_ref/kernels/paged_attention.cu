// Attention of a decode step: one query a request, its keys and values in the blocks of a paged cache.
//
// HEAD_DIM, and HEADS, the query heads of a block (at most 64, of one KV head), are given to the compiler.
//
// Launch of paged_attention: grid (splits, Hq / HEADS, B), block (64). A block works on HEADS query heads of one
// request and on one split of its keys, in tiles of 64: thread j computes the scores of key j of the tile; one thread
// a head the maximum and the sum; then a thread adds up a few columns of the weighted values.
// Reads q (B, Hq, D) float32, key_cache and value_cache (NB, BS, Hk, D) bf16, block_tables (B, max_blocks) int32,
// context_lens (B,) int32. With one split, writes out (B, Hq, D) bf16. With more, writes partial (B, Hq, splits, D)
// float32 and lse (B, Hq, splits) float32 of the splits that a request has, for the second kernel.
//
// Launch of merge_splits: grid (Hq, B), any one-dimensional block. A block merges the splits of one head of a request
// in their order; a thread takes columns.
// Reads partial, lse, context_lens. Writes out (B, Hq, D) bf16.
//
// A request of no tokens (a padded row of a batch) gets zeros.
#include "attention.cuh"

#define COLUMNS (HEAD_DIM % 8 == 0 ? 8 : HEAD_DIM % 2 == 0 ? 2 : 1)  // that a thread adds up side by side
#define GROUPS (HEAD_DIM / COLUMNS)                                  // of columns in a head
#define ITEMS ((HEADS * GROUPS + TILE - 1) / TILE)                   // (head, group) pairs of a thread

// Scores of one key for all heads of the block. The key is read once for them.
__device__ __forceinline__ void dot_heads(const float* query, const bf16* key, float* score) {
    float lane[HEADS][8] = {};
#pragma unroll
    for (int d = 0; d < PADDED; d += 8) {
        float column[8];
        load_eight(key, d, column);
#pragma unroll
        for (int h = 0; h < HEADS; h++)
#pragma unroll
            for (int l = 0; l < 8; l++) lane[h][l] += query[h * PADDED + d + l] * column[l];
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++) score[h * TILE] = add_lanes(lane[h]);
}

extern "C" __global__ void paged_attention(const float* q, const bf16* key_cache, const bf16* value_cache,
                                           const int* block_tables, const int* context_lens, bf16* out,
                                           float* partial, float* lse, float scale, int max_blocks, int block_size,
                                           int q_heads, int kv_heads) {
    __shared__ __align__(16) float query[HEADS * PADDED];
    __shared__ float score[HEADS * TILE];     // then weights
    __shared__ float new_peak[HEADS], shrink[HEADS], sum[HEADS];
    __shared__ long long slot[TILE];          // where each key of the tile lies
    int t = threadIdx.x, splits = gridDim.x, request = blockIdx.z, first_head = blockIdx.y * HEADS;
    int kv_head = first_head / (q_heads / kv_heads);
    int length = context_lens[request], begin = blockIdx.x * SPLIT, end = min(length, begin + SPLIT);
    if (begin >= length && blockIdx.x > 0) return;
    const int* table = block_tables + (size_t)request * max_blocks;
    size_t row = (size_t)request * q_heads + first_head;
    for (int c = t; c < HEADS * PADDED; c += TILE) {
        int h = c / PADDED, d = c % PADDED;
        query[c] = d < HEAD_DIM ? q[(row + h) * HEAD_DIM + d] * scale : 0.0f;
    }

    float total[ITEMS][COLUMNS] = {};
    int my_head = TILE - 1 - t;               // the last HEADS threads look after a head each
    float peak = -infinity(), my_sum = 0.0f;
    for (int start = begin; start < end; start += TILE) {
        int count = min(TILE, end - start);
        __syncthreads();                      // the queries are there; the tile before is done with
        if (t < count) {
            int j = start + t;
            slot[t] = (long long)table[j / block_size] * block_size + j % block_size;
            dot_heads(query, key_cache + (slot[t] * kv_heads + kv_head) * HEAD_DIM, score + t);
        }
        __syncthreads();
        if (my_head < HEADS) {
            float before = peak;
            for (int j = 0; j < count; j++) peak = fmaxf(peak, score[my_head * TILE + j]);
            new_peak[my_head] = peak;
            shrink[my_head] = expf(before - peak);
        }
        __syncthreads();
        if (t < count)
            for (int h = 0; h < HEADS; h++) score[h * TILE + t] = expf(score[h * TILE + t] - new_peak[h]);
        __syncthreads();
        if (my_head < HEADS) {
            my_sum *= shrink[my_head];
            for (int j = 0; j < count; j++) my_sum += score[my_head * TILE + j];
        }
#pragma unroll
        for (int item = 0; item < ITEMS; item++) {
            int pair = item * TILE + t, h = pair / GROUPS, d = pair % GROUPS * COLUMNS;
            if (h >= HEADS) break;
            float mine[COLUMNS];
            for (int c = 0; c < COLUMNS; c++) mine[c] = total[item][c] * shrink[h];
            const bf16* values = value_cache + (size_t)kv_head * HEAD_DIM + d;
            for (int j = 0; j < count; j++) {
                const bf16* value = values + slot[j] * kv_heads * HEAD_DIM;
                float weight = score[h * TILE + j], column[COLUMNS];
                load_columns(value, column);
                for (int c = 0; c < COLUMNS; c++) mine[c] += weight * column[c];
            }
            for (int c = 0; c < COLUMNS; c++) total[item][c] = mine[c];
        }
    }
    if (my_head < HEADS) {
        sum[my_head] = my_sum;
        if (splits > 1) lse[(row + my_head) * splits + blockIdx.x] = peak + logf(my_sum);
    }
    __syncthreads();
#pragma unroll
    for (int item = 0; item < ITEMS; item++) {
        int pair = item * TILE + t, h = pair / GROUPS, d = pair % GROUPS * COLUMNS;
        if (h >= HEADS) break;
        for (int c = 0; c < COLUMNS; c++) {
            float value = sum[h] == 0.0f ? 0.0f : total[item][c] / sum[h];
            if (splits == 1) out[(row + h) * HEAD_DIM + d + c] = float_to_bf16(value);
            else partial[((row + h) * splits + blockIdx.x) * HEAD_DIM + d + c] = value;
        }
    }
}

extern "C" __global__ void merge_splits(const float* partial, const float* lse, const int* context_lens, bf16* out,
                                        int max_splits) {
    int head = blockIdx.x, heads = gridDim.x, request = blockIdx.y;
    int splits = (context_lens[request] + SPLIT - 1) / SPLIT;
    size_t row = (size_t)request * heads + head;
    for (int d = threadIdx.x; d < HEAD_DIM; d += blockDim.x) {
        float merged = 0.0f, merged_lse = -infinity();
        for (int s = 0; s < splits; s++) {
            Merge weights = merge_weights(merged_lse, lse[row * max_splits + s]);
            merged = merge_values(weights, merged, partial[(row * max_splits + s) * HEAD_DIM + d]);
            merged_lse = weights.lse;
        }
        out[row * HEAD_DIM + d] = float_to_bf16(merged);
    }
}
