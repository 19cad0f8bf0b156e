// Causal attention of the new tokens of several requests over their paged keys, on tensor cores: what
// paged_prefill.cu does, with matrix products of bf16 instead of float32 dot products.
//
// Launch: grid (Hk, ceil(longest * G / ROWS), B) with G = Hq / Hk, block (128). A block works on ROWS rows of one
// request and one KV head. Row r is head r % G, of the G query heads that share the KV head, of the request's query
// r / G: a key in shared memory thus serves all heads that want it. A warp has ROWS / 4 of the rows, and a thread
// holds of its warp's matrices what tensor_core.cuh says. Blocks past a request's last row do nothing; those with the
// most keys come first.
// Reads q (T, Hq, D) float32, key_cache and value_cache (NB, BS, Hk, D) bf16, block_tables (B, max_blocks) int32,
// query_starts (B + 1,) int32: request b has the rows query_starts[b] to query_starts[b + 1] - 1 of q, and they are
// the last of its context_lens[b] tokens. Writes out (T, Hq, D) bf16, these rows of it.
//
// FlashAttention-2 (Dao 2023, arXiv:2307.08691): scores, weights and sums stay in registers. KEYS keys are a tile;
// while the block computes with one, the next is on its way. Two things are rounded to bf16 that are float32 there:
// q, before the scale, and the weights. A row's tiles begin at its request's first key, and keys that it does not see
// change nothing: what is computed for it does not depend on the rows beside it.
#include "common.cuh"
#include "async_copy.cuh"
#include "tensor_core.cuh"

#define WARPS 4
#define THREADS (32 * WARPS)
#define ROWS (16 * ROW_TILES * WARPS)      // ROW_TILES: 16-row matrices of a warp
#define KEYS 64
#define STEPS (HEAD_DIM / 16)              // 16 columns of q and of keys are one step of a product
#define STRIDE (HEAD_DIM + 8)              // a row in shared memory; 16 bytes more, and eight rows meet all banks
#define CHUNKS (HEAD_DIM / 8)              // 16-byte pieces of a row
#define COPIERS (CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2)  // threads that copy a row together
#define QUERIES_IN_REGISTERS (ROW_TILES * HEAD_DIM <= 128)
#define SLACK 8.0f                         // weights may grow to 2^SLACK before the sums are rescaled

// One tile in shared memory.
struct Tile {
    bf16 keys[KEYS * STRIDE], values[KEYS * STRIDE];
};

struct Shared {
    Tile tiles[2];
    int slots[2][KEYS];  // where the keys of the next tiles lie
#if !QUERIES_IN_REGISTERS
    uint4 queries[ROW_TILES * STEPS][THREADS];
#endif
};

// What a lane has of its warp's rows: rows 16 t + lane / 4 + 8 h for each matrix t and half h.
struct Rows {
    float total[ROW_TILES][CHUNKS][4];  // weighted values: columns 8 c + lane % 4 * 2 and the next, of both halves
    float peak[ROW_TILES][2];           // what is taken off the scores: their maximum, or up to SLACK below it
    float sum[ROW_TILES][2];            // of the weights in this lane's columns
    int seen[ROW_TILES][2];             // keys that the row sees
};

// The queries as left operands.
#if QUERIES_IN_REGISTERS
struct Queries {
    unsigned fragment[ROW_TILES][STEPS][4];
    __device__ __forceinline__ void put(int t, int step, const unsigned (&from)[4]) {
#pragma unroll
        for (int k = 0; k < 4; k++) fragment[t][step][k] = from[k];
    }
    __device__ __forceinline__ void get(int t, int step, unsigned (&to)[4]) const {
#pragma unroll
        for (int k = 0; k < 4; k++) to[k] = fragment[t][step][k];
    }
};
#else
struct Queries {
    uint4* mine;  // in shared memory; nobody else reads them
    __device__ __forceinline__ void put(int t, int step, const unsigned (&from)[4]) {
        mine[(t * STEPS + step) * THREADS] = {from[0], from[1], from[2], from[3]};
    }
    __device__ __forceinline__ void get(int t, int step, unsigned (&to)[4]) const {
        uint4 raw = mine[(t * STEPS + step) * THREADS];
        to[0] = raw.x, to[1] = raw.y, to[2] = raw.z, to[3] = raw.w;
    }
};
#endif

// The request and the KV head of this block.
struct Place {
    int begin, n, m;            // its first row of q, its queries, its tokens
    int kv_head, kv_heads, group;

    // Row r in q and out.
    __device__ __forceinline__ size_t row(int r) const {
        int query = r / group, head = kv_head * group + r % group;
        return ((size_t)(begin + query) * (kv_heads * group) + head) * HEAD_DIM;
    }
};

// A thread's key of each tile, and where it lies: key thread + KEYS i of tile i. Divided once, then counted on.
struct Finder {
    const int* entry;   // the table's entry for the key
    int within, left;   // the key's place in its block of the cache, and the keys from it to the last

    __device__ __forceinline__ void start(const int* table, int m, int block_size) {
        entry = table + threadIdx.x / block_size, within = threadIdx.x % block_size, left = m - (int)threadIdx.x;
    }
    __device__ __forceinline__ void advance(int block_size, int blocks_per_tile) {
        entry += blocks_per_tile, within += KEYS - blocks_per_tile * block_size, left -= KEYS;
        if (within >= block_size) entry++, within -= block_size;
    }
    // The block of the cache, and of that the slot: -1 where there is no key.
    __device__ __forceinline__ int block() const { return left > 0 ? *entry : 0; }
    __device__ __forceinline__ int slot(int block, int block_size) const {
        return left > 0 ? block * block_size + within : -1;
    }
};

// The whole block starts to copy the keys and values of a tile; a row of the cache has `row_bytes`. WHOLE: the tile
// has KEYS keys; else the rows that are not there become zeros.
template <bool WHOLE>
__device__ __forceinline__ void start_tile(Tile& tile, const int* slots, const bf16* key_cache,
                                           const bf16* value_cache, int row_bytes) {
    const int apart = THREADS / COPIERS, count = KEYS / apart;  // a thread's rows: every so many, so many
    int first = threadIdx.x / COPIERS, d = threadIdx.x % COPIERS * 8, slot[count];
    bf16 *to_key = tile.keys + first * STRIDE + d, *to_value = tile.values + first * STRIDE + d;
#pragma unroll
    for (int i = 0; i < count; i++) slot[i] = slots[first + i * apart];
#pragma unroll
    for (int i = 0; i < count; i++) {
        const char* key = (const char*)(key_cache + d) + (long long)slot[i] * row_bytes;
        const char* value = (const char*)(value_cache + d) + (long long)slot[i] * row_bytes;
#pragma unroll
        for (int k = 0; k < HEAD_DIM; k += 8 * COPIERS) {
            int to = i * apart * STRIDE + k;
            if (WHOLE) {
                copy16_async(to_key + to, key + 2 * k);
                copy16_async(to_value + to, value + 2 * k);
            } else {
                copy16_async_or_zero(to_key + to, key + 2 * k, slot[i] >= 0);
                copy16_async_or_zero(to_value + to, value + 2 * k, slot[i] >= 0);
            }
        }
    }
}

__device__ __forceinline__ void start_tile(Shared& shared, int tile, int m, const bf16* key_cache,
                                           const bf16* value_cache, int row_bytes) {
    Tile& to = shared.tiles[tile % 2];
    const int* slots = shared.slots[tile % 2];
    if ((tile + 1) * KEYS <= m)
        start_tile<true>(to, slots, key_cache, value_cache, row_bytes);
    else
        start_tile<false>(to, slots, key_cache, value_cache, row_bytes);
    commit_copies();
}

// Reads this lane's queries and clears its sums. Rows past the last one repeat it, and are not written.
__device__ __forceinline__ void start_rows(Rows& rows, Queries& queries, const Place& place, const float* q,
                                           int first) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++) {
        const float* from[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int r = min(first + 16 * t + lane / 4 + 8 * h, place.n * place.group - 1);
            from[h] = q + place.row(r) + lane % 4 * 2;
            rows.seen[t][h] = place.m - place.n + r / place.group + 1;
            rows.peak[t][h] = -infinity();
            rows.sum[t][h] = 0.0f;
        }
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            unsigned a[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                float2 pair = *(const float2*)(from[k % 2] + 16 * step + k / 2 * 8);
                a[k] = pack_bf16(pair.x, pair.y);
            }
            queries.put(t, step, a);
        }
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int e = 0; e < 4; e++) rows.total[t][c][e] = 0.0f;
    }
}

// score = queries keys^T, of the warp's rows and the keys of a tile.
typedef float Scores[ROW_TILES][KEYS / 8][4];
__device__ __forceinline__ void multiply_keys(Scores& score, const Queries& queries, const bf16* keys) {
    int lane = threadIdx.x % 32;
    const bf16* mine = keys + (lane / 16 * 8 + lane % 8) * STRIDE + lane / 8 % 2 * 8;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        unsigned a[ROW_TILES][4];
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++) queries.get(t, step, a[t]);
#pragma unroll
        for (int j = 0; j < KEYS; j += 16) {
            unsigned b[4];
            load_matrices(b, mine + j * STRIDE + step * 16);
#pragma unroll
            for (int t = 0; t < ROW_TILES; t++) {
                multiply_add(score[t][j / 8], a[t], b[0], b[1]);
                multiply_add(score[t][j / 8 + 1], a[t], b[2], b[3]);
            }
        }
    }
}

// Scores of keys that a row does not see become -infinity. `start` is the tile's first key.
__device__ __forceinline__ void mask(Scores& score, const Rows& rows, int start) {
    int column = start + threadIdx.x % 4 * 2;
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
        for (int c = 0; c < KEYS / 8; c++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (column + 8 * c + e % 2 >= rows.seen[t][e / 2]) score[t][c][e] = -infinity();
}

// The largest score of a row, of the four lanes that have it.
__device__ __forceinline__ float row_max(const float (&score)[KEYS / 8][4], int h) {
    float top = fmaxf(score[0][2 * h], score[0][2 * h + 1]);
#pragma unroll
    for (int c = 1; c < KEYS / 8; c++) top = fmaxf(top, fmaxf(score[c][2 * h], score[c][2 * h + 1]));
    top = fmaxf(top, __shfl_xor_sync(WHOLE_WARP, top, 1));
    return fmaxf(top, __shfl_xor_sync(WHOLE_WARP, top, 2));
}

// Where a row's scores rise by more than SLACK over its peak, they are the new peak, and what was summed shrinks. With
// less than that nothing is lost: a weight of 2^SLACK has as many bits as one of 1, and the division takes it off.
__device__ __forceinline__ void raise_peaks(Rows& rows, const Scores& score, float factor) {
    float top[ROW_TILES][2];
    bool any = false;
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            top[t][h] = row_max(score[t], h);
            any = any || (top[t][h] - rows.peak[t][h]) * factor > SLACK;
        }
    if (!__any_sync(WHOLE_WARP, any)) return;
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float rise = (top[t][h] - rows.peak[t][h]) * factor, shrink = 1.0f;
            if (rise > SLACK) shrink = exp2f(-rise), rows.peak[t][h] = top[t][h];
            rows.sum[t][h] *= shrink;
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                rows.total[t][c][2 * h] *= shrink;
                rows.total[t][c][2 * h + 1] *= shrink;
            }
        }
}

// Scores -> weights, in place.
__device__ __forceinline__ void weigh(Rows& rows, float (&score)[KEYS / 8][4], int t, float factor) {
    const float peak[2] = {rows.peak[t][0] * factor, rows.peak[t][1] * factor};
#pragma unroll
    for (int c = 0; c < KEYS / 8; c++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            score[c][e] = exp2f(score[c][e] * factor - peak[e / 2]);
            rows.sum[t][e / 2] += score[c][e];
        }
}

// total += weights values. The weights lie in the lanes as a left operand must.
__device__ __forceinline__ void add_values(Rows& rows, const Scores& weight, const bf16* values) {
    int lane = threadIdx.x % 32;
    const bf16* mine = values + lane % 16 * STRIDE + lane / 16 * 8;
#pragma unroll
    for (int j = 0; j < KEYS; j += 16) {
        unsigned a[ROW_TILES][4];
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float* pair = weight[t][j / 8 + k / 2] + k % 2 * 2;
                a[t][k] = pack_bf16(pair[0], pair[1]);
            }
#pragma unroll
        for (int d = 0; d < HEAD_DIM; d += 16) {
            unsigned b[4];
            load_transposed(b, mine + j * STRIDE + d);
#pragma unroll
            for (int t = 0; t < ROW_TILES; t++) {
                multiply_add(rows.total[t][d / 8], a[t], b[0], b[1]);
                multiply_add(rows.total[t][d / 8 + 1], a[t], b[2], b[3]);
            }
        }
    }
}

// One tile, for one warp. `start` is its first key, `whole`: all rows of the warp see all of its keys.
__device__ __forceinline__ void attend(Rows& rows, const Queries& queries, const Tile& tile, int start, bool whole,
                                       float factor) {
    Scores score = {};
    multiply_keys(score, queries, tile.keys);
    if (!whole) mask(score, rows, start);
    raise_peaks(rows, score, factor);
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++) weigh(rows, score[t], t, factor);
    add_values(rows, score, tile.values);
}

// out = total / sum, of the rows that there are.
__device__ __forceinline__ void write_rows(const Rows& rows, const Place& place, bf16* out, int first) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum = rows.sum[t][h];
            sum += __shfl_xor_sync(WHOLE_WARP, sum, 1);
            sum += __shfl_xor_sync(WHOLE_WARP, sum, 2);
            int r = first + 16 * t + lane / 4 + 8 * h;
            if (r >= place.n * place.group) continue;
            unsigned* to = (unsigned*)(out + place.row(r)) + lane % 4;
            float factor = 1.0f / sum;
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
                to[4 * c] = pack_bf16(rows.total[t][c][2 * h] * factor, rows.total[t][c][2 * h + 1] * factor);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    prefill_attention(const float* q, const bf16* key_cache, const bf16* value_cache, const int* block_tables,
                      const int* query_starts, const int* context_lens, bf16* out, float scale, int max_blocks,
                      int block_size, int blocks_per_tile, int kv_heads, int group) {
    extern __shared__ uint4 raw[];
    Shared& shared = *(Shared*)raw;
    int request = blockIdx.z, begin = query_starts[request], n = query_starts[request + 1] - begin;
    int block_row = (gridDim.y - 1 - blockIdx.y) * ROWS, last_row = min(block_row + ROWS, n * group) - 1;
    if (block_row > last_row) return;
    Place place{begin, n, context_lens[request], (int)blockIdx.x, kv_heads, group};
    int thread = threadIdx.x, tiles = (place.m - n + last_row / group + KEYS) / KEYS;
    int row_bytes = kv_heads * HEAD_DIM * 2;
    key_cache += place.kv_head * HEAD_DIM, value_cache += place.kv_head * HEAD_DIM;
    Finder finder;
    if (thread < KEYS) {
        finder.start(block_tables + (size_t)request * max_blocks, place.m, block_size);
        for (int i = 0; i < 2; i++, finder.advance(block_size, blocks_per_tile))
            shared.slots[i][thread] = finder.slot(finder.block(), block_size);
    }
    __syncthreads();
    start_tile(shared, 0, place.m, key_cache, value_cache, row_bytes);

    int first = block_row + thread / 32 * (16 * ROW_TILES);  // the warp's first row
    float factor = scale * 1.44269504f;                      // e^x = 2^(x log2 e)
    Rows rows;
    Queries queries;
#if !QUERIES_IN_REGISTERS
    queries.mine = shared.queries[0] + thread;
#endif
    start_rows(rows, queries, place, q, first);
    int least = place.m - n + first / group + 1, most = 0;   // keys that its rows see; none if it has no rows
    if (first <= last_row) most = place.m - n + min(first + 16 * ROW_TILES - 1, last_row) / group + 1;
    for (int tile = 0; tile < tiles; tile++) {
        int block = thread < KEYS ? finder.block() : 0;  // of the tile after the next: on its way while all compute
        wait_copies<0>();
        __syncthreads();  // the tile is there, and all are done with the one before
        if (tile + 1 < tiles) start_tile(shared, tile + 1, place.m, key_cache, value_cache, row_bytes);
        int start = tile * KEYS;
        if (start < most) attend(rows, queries, shared.tiles[tile % 2], start, start + KEYS <= least, factor);
        if (thread < KEYS) {
            shared.slots[tile % 2][thread] = finder.slot(block, block_size);
            finder.advance(block_size, blocks_per_tile);
        }
    }
    if (most > 0) write_rows(rows, place, out, first);
}
