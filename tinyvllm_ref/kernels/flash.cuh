// Causal attention of many queries of one sequence, tile by tile: no matrix of scores, any length.
//
// A block of QUERIES threads works on that many consecutive queries of one head; a thread owns a query. It keeps the
// running maximum, sum and weighted values of its query; the block brings the keys, then the values, of one tile at
// a time to shared memory, as float32, where every thread reads all of them.
#include "attention.cuh"

#define QUERIES 64
// Keys (or values) that are in shared memory at a time: a whole tile where it fits into 32 KiB.
#define FITS(keys) ((keys) * PADDED * 4 <= 32768)
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

// The whole block brings rows first to last - 1 of one KV head to shared memory: each is converted once, not once a
// query. Column d of row j goes to stage[d * BY_COLUMN + j * BY_ROW]; rows that are not there are zeros.
template <int BY_COLUMN, int BY_ROW, class Keys>
__device__ __forceinline__ void load_stage(const bf16* from, Keys keys, int first, int last, int kv_head, int kv_heads,
                                           float* stage) {
    __syncthreads();  // the threads are done with what the stage held
    for (int k = threadIdx.x; k < STAGE * (PADDED / 8); k += QUERIES) {
        int j = k % STAGE, d = k / STAGE * 8;
        float column[8] = {};
        if (first + j < last)
            load_eight(from + (keys.row(first + j) * kv_heads + kv_head) * HEAD_DIM, d, column);
#pragma unroll
        for (int l = 0; l < 8; l++) stage[(d + l) * BY_COLUMN + j * BY_ROW] = column[l];
    }
    __syncthreads();
}

// Four products joined to a sum, one after the other.
__device__ __forceinline__ float add_four(float sum, const float* x, const float* y, int stride) {
    return (((sum + x[0] * y[0]) + x[1] * y[stride]) + x[2] * y[2 * stride]) + x[3] * y[3 * stride];
}

// Scores of the KEYS keys from `stage` on, which stands by columns. Each is what attention.cuh says, sums and order; the
// innermost loops are over keys, so that a processor with vectors, too, has that many independent sums.
#define KEYS (STAGE < 16 ? STAGE : 16)
__device__ __forceinline__ void dots(const float* query, const float* stage, float* score) {
    float lane[8][KEYS] = {};
    int d = 0;
    for (; d + 32 <= PADDED; d += 32)
#pragma unroll
        for (int l = 0; l < 8; l++) {
            const float column[4] = {query[d + l], query[d + l + 8], query[d + l + 16], query[d + l + 24]};
#pragma unroll
            for (int k = 0; k < KEYS; k++)
                lane[l][k] = add_four(lane[l][k], column, stage + (d + l) * STAGE + k, 8 * STAGE);
        }
    for (; d < PADDED; d++)
#pragma unroll
        for (int k = 0; k < KEYS; k++) lane[d % 8][k] += query[d] * stage[d * STAGE + k];
#pragma unroll
    for (int k = 0; k < KEYS; k++)
        score[k] = ((lane[0][k] + lane[4][k]) + (lane[2][k] + lane[6][k])) +
                   ((lane[1][k] + lane[5][k]) + (lane[3][k] + lane[7][k]));
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

// total += weight * value, for four values that lie one after the other, or for one.
__device__ __forceinline__ void add_four_values(Running& running, const float* weight, const float* value) {
    const float weights[4] = {weight[0], weight[1], weight[2], weight[3]};
#pragma unroll
    for (int d = 0; d < PADDED; d++) running.total[d] = add_four(running.total[d], weights, value + d, PADDED);
}

__device__ __forceinline__ void add_value(Running& running, float weight, const float* value) {
#pragma unroll
    for (int d = 0; d < PADDED; d++) running.total[d] += weight * value[d];
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
    __shared__ __align__(16) float stage[STAGE * PADDED];
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
            load_stage<STAGE, 1>(k, keys, start + s, min(start + s + STAGE, last), kv_head, kv_heads, stage);
            for (int j = 0; j < STAGE && s + j < count; j += KEYS) dots(query, stage + j, score + s + j);
        }
        if (count > 0) rescale(running, score, count);
        for (int s = 0; s < TILE && start + s < last; s += STAGE) {
            load_stage<1, PADDED>(v, keys, start + s, min(start + s + STAGE, last), kv_head, kv_heads, stage);
            int here = min(STAGE, count - s), j = 0;
            for (; j + 4 <= here; j += 4) add_four_values(running, score + s + j, stage + j * PADDED);
            for (; j < here; j++) add_value(running, score[s + j], stage + j * PADDED);
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
