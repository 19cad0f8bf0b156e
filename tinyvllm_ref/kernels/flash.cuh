// Causal attention of many queries of one sequence, tile by tile: no matrix of scores, any length.
//
// A block of QUERIES threads works on that many consecutive queries of one head; a thread owns a query. It keeps the
// running maximum, sum and weighted values of its query; the block brings the keys, then the values, of one tile at
// a time to shared memory, where every thread reads all of them.
#include "attention.cuh"

#define QUERIES 64
// Keys (or values) that are in shared memory at a time: a whole tile where it fits into 32 KiB.
#define FITS(keys) ((keys) * HEAD_DIM * 2 <= 32768)
#define STAGE (FITS(64) ? 64 : FITS(32) ? 32 : FITS(16) ? 16 : FITS(8) ? 8 : FITS(4) ? 4 : 1)

// Where key j lies, in rows of (Hk, D): one after the other,
struct Contiguous {
    __device__ __forceinline__ size_t row(int j) const { return j; }
};

// or in the blocks of a table.
struct Paged {
    const int* table;
    int block_size;
    __device__ __forceinline__ size_t row(int j) const {
        return (size_t)table[j / block_size] * block_size + j % block_size;
    }
};

// The whole block copies the rows first to last - 1 of one KV head to `stage`.
template <class Keys>
__device__ __forceinline__ void load_stage(const bf16* from, Keys keys, int first, int last, int kv_head, int kv_heads,
                                           bf16* stage) {
    constexpr int VECTOR = HEAD_DIM % 8 == 0 ? 8 : 1, VECTORS = HEAD_DIM / VECTOR;
    __syncthreads();  // the threads are done with what the stage held
    for (int k = threadIdx.x; k < (last - first) * VECTORS; k += QUERIES) {
        int j = k / VECTORS, d = k % VECTORS * VECTOR;
        const bf16* source = from + (keys.row(first + j) * kv_heads + kv_head) * HEAD_DIM + d;
        if (VECTOR == 8) *(uint4*)(stage + j * HEAD_DIM + d) = *(const uint4*)source;
        else stage[j * HEAD_DIM + d] = *source;
    }
    __syncthreads();
}

// The attention of one thread's query so far, within one split.
struct Running {
    float peak, sum, total[PADDED];
};

__device__ __forceinline__ void start_split(Running& running) {
    running.peak = -infinity();
    running.sum = 0.0f;
#pragma unroll
    for (int d = 0; d < PADDED; d++) running.total[d] = 0.0f;
}

// Scores of a tile -> weights, in place; what was summed before is rescaled to the new maximum.
__device__ __forceinline__ void rescale(Running& running, float* score, int count) {
    float peak = running.peak;
    for (int j = 0; j < count; j++) peak = fmaxf(peak, score[j]);
    float shrink = expf(running.peak - peak);
    running.peak = peak;
    running.sum *= shrink;
    for (int j = 0; j < count; j++) {
        score[j] = expf(score[j] - peak);
        running.sum += score[j];
    }
#pragma unroll
    for (int d = 0; d < PADDED; d++) running.total[d] *= shrink;
}

// total += weight * value, for one value.
__device__ __forceinline__ void add_value(Running& running, float weight, const bf16* value) {
#pragma unroll
    for (int d = 0; d < PADDED; d += 8) {
        float column[8];
        load_eight(value, d, column);
#pragma unroll
        for (int l = 0; l < 8; l++) running.total[d + l] += weight * column[l];
    }
}

// The split that is finished joins those before it.
__device__ __forceinline__ void merge_split(float* merged, float& merged_lse, const Running& running) {
    Merge weights = merge_weights(merged_lse, running.peak + logf(running.sum));
    merged_lse = weights.lse;
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d++) merged[d] = merge_values(weights, merged[d], running.total[d] / running.sum);
}

// Queries first, first + 1, ... of n, which are the last n of m tokens: query i sees keys 0 to m - n + i.
// q and out point at the sequence's query 0 and have q_heads heads.
template <class Keys>
__device__ void flash(const float* q, const bf16* k, const bf16* v, Keys keys, bf16* out, float scale, int first, int n,
                      int m, int head, int q_heads, int kv_heads) {
    __shared__ __align__(16) bf16 stage[STAGE * HEAD_DIM];
    int i = first + threadIdx.x, kv_head = head / (q_heads / kv_heads);
    int seen = i < n ? m - n + i + 1 : 0;             // keys that this query sees
    int last = m - n + min(n, first + QUERIES);       // keys that some query of this block sees
    size_t row = ((size_t)i * q_heads + head) * HEAD_DIM;
    float query[PADDED], merged[HEAD_DIM], merged_lse = -infinity();
#pragma unroll
    for (int d = 0; d < PADDED; d++) query[d] = i < n && d < HEAD_DIM ? q[row + d] * scale : 0.0f;
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d++) merged[d] = 0.0f;
    Running running;
    start_split(running);
    for (int start = 0; start < last; start += TILE) {
        float score[TILE];
        int count = min(TILE, seen - start);          // keys of this tile that this query sees: 0 or less for none
        for (int s = 0; s < TILE && start + s < last; s += STAGE) {
            load_stage(k, keys, start + s, min(start + s + STAGE, last), kv_head, kv_heads, stage);
            for (int j = 0; j < STAGE && s + j < count; j++) score[s + j] = dot(query, stage + j * HEAD_DIM);
        }
        if (count > 0) rescale(running, score, count);
        for (int s = 0; s < TILE && start + s < last; s += STAGE) {
            load_stage(v, keys, start + s, min(start + s + STAGE, last), kv_head, kv_heads, stage);
            for (int j = 0; j < STAGE && s + j < count; j++) add_value(running, score[s + j], stage + j * HEAD_DIM);
        }
        bool split_ends = (start + TILE) % SPLIT == 0 || start + TILE >= seen;
        if (count > 0 && split_ends) {
            merge_split(merged, merged_lse, running);
            start_split(running);
        }
    }
    if (i >= n) return;
    for (int d = 0; d < HEAD_DIM; d++) out[row + d] = float_to_bf16(merged[d]);
}
