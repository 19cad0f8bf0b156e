// One decode step's attention of one request and one KV head, shared by a whole block: rotary embedding, the write of
// the new key and value, attention over some of the keys in the cache. Where several blocks share the keys, each kernel
// has its own way to merge what they found.
//
// HEAD_DIM (a multiple of 16, at most 256), GROUP (query heads of a KV head, at most 8) and BLOCK_SIZE (token slots of
// a block of the cache) are given to the compiler.
//
// The GROUP query heads of a KV head are worked on together, on tensor cores: a warp takes CHUNK keys at a time. Scores
// are one product, queries (heads x columns) times keys; outputs another, values (columns x keys) times weights. Neither
// keys nor values go through shared memory: in which order a sum takes its columns does not matter, so a lane loads 16
// bytes of a key (eight columns, which count as its share of two products), and 16 bytes of a value, whose eight columns
// become eight rows of four products. Queries and weights are rounded to bf16, sums are float32. Each warp keeps an
// online softmax of its own keys; there is no barrier until the keys are done with, and the first keys are on their way
// before the query is known. Scores are kept in base 2: their scale has log2(e) in it.
#include "common.cuh"
#include "tensor_core.cuh"

#define CHUNK 16                          // keys: two tiles of eight scores, one of sixteen weights
#define KEY_PARTS ((HEAD_DIM + 31) / 32)  // of 32 columns: four lanes with eight each
#define VALUE_PARTS ((HEAD_DIM + 63) / 64)  // of 64 columns: eight lanes with eight each
#define TILES (4 * VALUE_PARTS)           // of sixteen columns, of the outputs
#define CHUNK_PIECES (2 * KEY_PARTS + 4 * VALUE_PARTS)  // of 16 bytes, that a lane holds of a chunk
#define CHUNKS_HELD (HEAD_DIM <= 64 ? 2 : 1)  // in registers: one that is looked at, the others on their way
#ifndef CHUNKS_FIRST
#define CHUNKS_FIRST 1  // of those, on their way before the query is known
#endif
#define IN_ONE_BLOCK (BLOCK_SIZE % CHUNK == 0)  // whether a chunk is all in one block of the cache
#define HALF (HEAD_DIM / 2)
#define LOG2_E 1.4426950408889634f

// A kernel may have other threads in its blocks than those that call the functions of this file.
#ifndef BLOCK_THREADS
#define BLOCK_THREADS ((int)blockDim.x)
#define BLOCK_BARRIER() __syncthreads()
#endif
// Where block tables lie: in shared memory, where looking something up is soon done; or in global memory, from where the
// lanes of a warp bring what they will need of them together, and ahead.
#ifndef TABLES_IN_GLOBAL
#define TABLES_IN_GLOBAL 0
#endif

// Reads from the L2 cache, which all multiprocessors share: what another block wrote in this launch, or what a kernel
// wrote that was done before this launch began, if it is read before wait_for_previous().
template <typename T>
__device__ __forceinline__ T load_fresh(const T* from) {
#ifdef __CUDA_ARCH__
    return __ldcg(from);
#else
    return *from;
#endif
}

__device__ __forceinline__ void turn(int position, float frequency, float& cosine, float& sine) {
    float angle = (float)position * frequency;
    cosine = cosf(angle);
    sine = sinf(angle);
}

// The cosines and sines of a position's angles, by all threads of the block; a barrier has to follow.
__device__ __forceinline__ void fill_turns(int position, const float* inv_freq, float* cosines, float* sines) {
    for (int i = threadIdx.x; i < HALF; i += BLOCK_THREADS) turn(position, inv_freq[i], cosines[i], sines[i]);
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

__device__ __forceinline__ uint4 pack8(const float (&from)[8]) {
    return make_uint4(pack_bf16(from[0], from[1]), pack_bf16(from[2], from[3]), pack_bf16(from[4], from[5]),
                      pack_bf16(from[6], from[7]));
}

// exp2 of x - peak, where both may be -infinity.
__device__ __forceinline__ float weight_of(float x, float peak) { return x == -infinity() ? 0.0f : exp2f(x - peak); }

__device__ __forceinline__ int block_of(const int* table, int j) {
    return TABLES_IN_GLOBAL ? load_fresh(table + j / BLOCK_SIZE) : table[j / BLOCK_SIZE];
}

__device__ __forceinline__ size_t offset_of(const int* table, int j, int kv_head, int kv_heads, int column) {
    size_t slot = (size_t)block_of(table, j) * BLOCK_SIZE + j % BLOCK_SIZE;
    return (slot * kv_heads + kv_head) * HEAD_DIM + column;
}

// The cache of one layer, and how scores are made.
struct LayerCache {
    bf16 *keys, *values;  // (NB, BLOCK_SIZE, Hk, D)
    int kv_heads;
    float scale;          // of the scores, times log2(e)
};

// One request's new token, for one KV head: the products, not turned yet; and the turns of its position.
struct NewToken {
    const float *queries, *key, *value;  // (GROUP, D), (D,), (D,)
    const float *cosines, *sines;        // (D/2,) each
};

// The two lower halves of two registers, and the two upper ones.
__device__ __forceinline__ unsigned lower_halves(unsigned x, unsigned y) {
#ifdef __CUDA_ARCH__
    return __byte_perm(x, y, 0x5410);
#else
    return (x & 0xffffu) | y << 16;
#endif
}

__device__ __forceinline__ unsigned upper_halves(unsigned x, unsigned y) {
#ifdef __CUDA_ARCH__
    return __byte_perm(x, y, 0x7632);
#else
    return x >> 16 | (y & 0xffff0000u);
#endif
}

// This lane's part of CHUNK keys and values. With row = lane / 4 and quarter = lane % 4 it has keys row and row + 8, of
// which columns 8 * quarter to 8 * quarter + 7 of each 32; and values 2 * quarter, 2 * quarter + 1, 2 * quarter + 8 and
// 2 * quarter + 9, of which columns 8 * row to 8 * row + 7 of each 64.
struct Chunk {
    uint4 piece[CHUNK_PIECES];

    __device__ __forceinline__ uint4& key(int k, int part) { return piece[k * KEY_PARTS + part]; }
    __device__ __forceinline__ uint4& value(int k, int part) { return piece[(2 * KEY_PARTS) + k * VALUE_PARTS + part]; }
    __device__ __forceinline__ const uint4& key(int k, int part) const { return piece[k * KEY_PARTS + part]; }
    __device__ __forceinline__ const uint4& value(int k, int part) const {
        return piece[(2 * KEY_PARTS) + k * VALUE_PARTS + part];
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int p = 0; p < CHUNK_PIECES; p++) piece[p] = make_uint4(0u, 0u, 0u, 0u);
    }

    // Which key of the chunk value(k) belongs to.
    static __device__ __forceinline__ int place(int k) { return threadIdx.x % 4 * 2 + k % 2 + k / 2 * 8; }

    // Calls use(p, from, there) for every piece p: where in the cache it lies, if it is one of a key below `end`. The
    // chunk has keys start to start + CHUNK - 1; `start` is a multiple of CHUNK.
    template <class Use>
    static __device__ __forceinline__ void visit(const LayerCache& cache, const int* table, int kv_head, int start, int end,
                                                 Use use) {
        // Where a chunk is all in one block of the cache, the table is looked at once.
        int block = IN_ONE_BLOCK && start < end ? block_of(table, start) : 0;
        visit(cache, table, block, kv_head, start, end, use);
    }

    // The same where the block of the cache is known that a chunk is all in.
    template <class Use>
    static __device__ __forceinline__ void visit(const LayerCache& cache, const int* table, int block, int kv_head, int start,
                                                 int end, Use use) {
        int row = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4, stride = cache.kv_heads * HEAD_DIM;
        size_t base = ((size_t)block * BLOCK_SIZE + (unsigned)start % BLOCK_SIZE) * stride + kv_head * HEAD_DIM;
        // This lane's first piece of either kind: the others are as far from it for every lane.
        const bf16* keys = cache.keys + base + (row * stride + quarter * 8);
        const bf16* values = cache.values + base + (place(0) * stride + row * 8);
#pragma unroll
        for (int k = 0; k < 6; k++) {
            bool is_key = k < 2;
            int eight = is_key ? quarter : row, width = is_key ? 32 : 64;
            int further = is_key ? 8 * k : (k - 2) % 2 + (k - 2) / 2 * 8, j = (is_key ? row : place(0)) + further;
            const bf16* from = (is_key ? keys : values) + further * stride;
            if (!IN_ONE_BLOCK) {
                size_t at = start + j < end ? offset_of(table, start + j, kv_head, cache.kv_heads, eight * 8) : 0;
                from = (is_key ? cache.keys : cache.values) + at;
            }
#pragma unroll
            for (int part = 0; part < (is_key ? KEY_PARTS : VALUE_PARTS); part++)
                use(is_key ? k * KEY_PARTS + part : 2 * KEY_PARTS + (k - 2) * VALUE_PARTS + part, from + part * width,
                    start + j < end && part * width + eight * 8 < HEAD_DIM);
        }
    }

    // Zeros from `end` on.
    __device__ __forceinline__ void load(const LayerCache& cache, const int* table, int block, int kv_head, int start, int end) {
        clear();
        visit(cache, table, block, kv_head, start, end, [this](int p, const bf16* from, bool there) {
            if (there) piece[p] = load_fresh((const uint4*)from);
        });
    }
};

// A warp's attention so far. Scores: a lane has those of head row = lane / 4. Outputs: output[t] has columns 8 * row +
// 2 * t and the next one (of each 64) of heads 2 * quarter and 2 * quarter + 1, as tensor_core.cuh lays out a sum.
struct Seen {
    uint4 query[KEY_PARTS];  // of head row, as the keys' columns
    float peak, sum;         // of head row; the sum over this lane's keys
    float output[TILES][4];

    __device__ __forceinline__ explicit Seen(const NewToken& token) : peak(-infinity()), sum(0.0f) {
        int row = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
#pragma unroll
        for (int part = 0; part < KEY_PARTS; part++) {
            int column = part * 32 + quarter * 8;
            float eight[8] = {};
            if (row < GROUP && column < HEAD_DIM)
                load_turned(token.queries + row * HEAD_DIM, column, token.cosines, token.sines, eight);
            query[part] = pack8(eight);
        }
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int k = 0; k < 4; k++) output[t][k] = 0.0f;
    }

    // The first `count` keys of a chunk.
    __device__ __forceinline__ void look(const Chunk& chunk, int count, float scale) {
        int quarter = threadIdx.x % 4;
        float score[2][4] = {};  // of keys 2 * quarter and the next, of either eight; the other two are no heads
#pragma unroll
        for (int tile = 0; tile < 2; tile++)
#pragma unroll
            for (int part = 0; part < KEY_PARTS; part++) {
                const unsigned first[4] = {query[part].x, 0u, query[part].y, 0u};
                const unsigned second[4] = {query[part].z, 0u, query[part].w, 0u};
                multiply_add(score[tile], first, chunk.key(tile, part).x, chunk.key(tile, part).y);
                multiply_add(score[tile], second, chunk.key(tile, part).z, chunk.key(tile, part).w);
            }
        float highest = peak;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float& mine = score[k / 2][k % 2];
            mine = Chunk::place(k) < count ? mine * scale : -infinity();
            highest = fmaxf(highest, mine);
        }
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
        if (__any_sync(0xffffffffu, highest > peak)) {  // mostly not: the largest score soon stays what it is
            float shrink = weight_of(peak, highest);
            sum *= shrink;
            float even = __shfl_sync(0xffffffffu, shrink, quarter * 8), odd = __shfl_sync(0xffffffffu, shrink, quarter * 8 + 4);
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                output[t][0] *= even;
                output[t][1] *= odd;
                output[t][2] *= even;
                output[t][3] *= odd;
            }
        }
        peak = highest;
        float base = peak == -infinity() ? 0.0f : peak, weight[4];
#pragma unroll
        for (int k = 0; k < 4; k++) sum += weight[k] = exp2f(score[k / 2][k % 2] - base);
        unsigned low = pack_bf16(weight[0], weight[1]), high = pack_bf16(weight[2], weight[3]);
#pragma unroll
        for (int part = 0; part < VALUE_PARTS; part++) {
            const unsigned* v[4];
#pragma unroll
            for (int k = 0; k < 4; k++) v[k] = &chunk.value(k, part).x;
#pragma unroll
            for (int t = 0; t < 4; t++) {
                const unsigned columns[4] = {lower_halves(v[0][t], v[1][t]), upper_halves(v[0][t], v[1][t]),
                                             lower_halves(v[2][t], v[3][t]), upper_halves(v[2][t], v[3][t])};
                multiply_add(output[4 * part + t], columns, low, high);
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
struct SeenByBlock {
    float *totals, *peaks, *sums;

    __device__ __forceinline__ explicit SeenByBlock(float* scratch) {
        int warps = BLOCK_THREADS / 32;
        totals = scratch;
        peaks = totals + warps * GROUP * HEAD_DIM;
        sums = peaks + warps * GROUP;
    }

    __device__ __forceinline__ void put(const Seen& seen) {
        int warp = threadIdx.x / 32, row = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            int column = t / 4 * 64 + row * 8 + t % 4 * 2;
#pragma unroll
            for (int k = 0; k < 2; k++) {
                int head = 2 * quarter + k;
                if (head < GROUP && column < HEAD_DIM)
                    *(float2*)(totals + (warp * GROUP + head) * HEAD_DIM + column) =
                        make_float2(seen.output[t][k], seen.output[t][2 + k]);
            }
        }
        float sum = seen.sum;
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (quarter == 0 && row < GROUP) {
            peaks[warp * GROUP + row] = seen.peak;
            sums[warp * GROUP + row] = sum;
        }
    }

    // Columns p and p + 1 of the GROUP heads side by side.
    __device__ __forceinline__ Part part(int p) const {
        int h = p / HEAD_DIM, warps = BLOCK_THREADS / 32;
        float peak = -infinity(), sum = 0.0f, a = 0.0f, b = 0.0f;
        for (int w = 0; w < warps; w++) peak = fmaxf(peak, peaks[w * GROUP + h]);
        for (int w = 0; w < warps; w++) {
            float weight = weight_of(peaks[w * GROUP + h], peak);
            float2 total = *(const float2*)(totals + w * GROUP * HEAD_DIM + p);
            sum += sums[w * GROUP + h] * weight;
            a += total.x * weight;
            b += total.y * weight;
        }
        return {a / sum, b / sum, peak + log2f(sum)};
    }
};

// Keys begin to end - 1 of a KV head, as far as they are in the cache; `begin` is a multiple of CHUNK.
struct KeyRange {
    int kv_head, begin, end;
    // Keys that a warp looks at: from here on, a chunk out of so many.
    __device__ __forceinline__ int first() const { return begin + threadIdx.x / 32 * CHUNK; }
    static __device__ __forceinline__ int stride() { return BLOCK_THREADS / 32 * CHUNK; }
};

// Brings a warp its keys straight from the cache. The first are on their way before the query is known.
struct FromCache {
    const LayerCache& cache;
    const int* table;
    int block;      // of the cache: lane i has the one with the warp's chunk number i, of each 32 chunks
    bool is_known;  // whether those of the first 32 are asked for
    Chunk chunk[CHUNKS_HELD];

    __device__ __forceinline__ FromCache(const LayerCache& cache, const int* table)
        : cache(cache), table(table), block(0), is_known(false) {}

    // 32 chunks from the one on that begins with key `start`, as far as they begin below `end`.
    __device__ __forceinline__ void look_up(int start, int end) {
        int mine = start + threadIdx.x % 32 * KeyRange::stride();
        block = mine < end ? block_of(table, mine) : 0;
        is_known = true;
    }

    // The warp's chunk number `i`, if there is one.
    __device__ __forceinline__ void load(Chunk& to, KeyRange range, int i) {
        int start = range.first() + i * KeyRange::stride(), at = 0;
        if (IN_ONE_BLOCK && TABLES_IN_GLOBAL) {
            if (start >= range.end) return;
            if (i > 0 && i % 32 == 0) look_up(start, range.end);
            at = __shfl_sync(WHOLE_WARP, block, i % 32);
        } else if (IN_ONE_BLOCK && start < range.end) {
            at = block_of(table, start);
        }
        to.load(cache, table, at, range.kv_head, start, range.end);
    }

    __device__ __forceinline__ void start(KeyRange range) {
        if (IN_ONE_BLOCK && TABLES_IN_GLOBAL && !is_known) look_up(range.first(), range.end);
#pragma unroll
        for (int i = 0; i < CHUNKS_FIRST; i++) load(chunk[i], range, i);
    }

    __device__ __forceinline__ void show_all(Seen& seen, KeyRange range, float scale) {
#pragma unroll
        for (int i = CHUNKS_FIRST; i < CHUNKS_HELD; i++) load(chunk[i], range, i);
        int start = range.first();
        for (int i = 0; start < range.end; i += CHUNKS_HELD) {
#pragma unroll
            for (int k = 0; k < CHUNKS_HELD && start < range.end; k++, start += KeyRange::stride()) {
                seen.look(chunk[k], range.end - start, scale);
                load(chunk[k], range, i + k + CHUNKS_HELD);  // while the others are looked at
            }
        }
    }
};

// Attention over keys begin to end - 1 of a KV head, the new token among them if it is there; `context` counts it,
// `begin` is a multiple of CHUNK. `keys` brings those in the cache; await() returns the NewToken, and has a barrier in
// it where it needs one. Who has the new token writes its key and value to the cache, with the help of `table`. All
// BLOCK_THREADS threads call it; a barrier ends it.
template <class Keys, class Await>
__device__ __forceinline__ SeenByBlock attend_keys(const LayerCache& cache, const int* table, int context, KeyRange range,
                                                   float* scratch, Keys&& keys, Await await) {
    int warp = threadIdx.x / 32, kv_head = range.kv_head;
    bool newest = range.begin < context && range.end >= context;
    range.end = min(range.end, context - 1);
    keys.start(range);
    NewToken token = await();
    Seen seen(token);
    keys.show_all(seen, range, cache.scale);
    if (newest && warp == 0) {  // a chunk of one key
        int row = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
        size_t at = offset_of(table, context - 1, kv_head, cache.kv_heads, 0);
        Chunk single;
        single.clear();
#pragma unroll
        for (int part = 0; part < KEY_PARTS; part++) {
            int column = part * 32 + quarter * 8;
            if (row == 0 && column < HEAD_DIM) {
                float eight[8];
                load_turned(token.key, column, token.cosines, token.sines, eight);
                single.key(0, part) = pack8(eight);
            }
        }
#pragma unroll
        for (int part = 0; part < VALUE_PARTS; part++) {
            int column = part * 64 + row * 8;
            if (quarter == 0 && column < HEAD_DIM) {
                float eight[8];
                load_floats(token.value + column, eight);
                single.value(0, part) = pack8(eight);
            }
        }
        seen.look(single, 1, cache.scale);
#pragma unroll
        for (int part = 0; part < KEY_PARTS; part++) {
            int column = part * 32 + quarter * 8;
            if (row == 0 && column < HEAD_DIM) *(uint4*)(cache.keys + at + column) = single.key(0, part);
        }
#pragma unroll
        for (int part = 0; part < VALUE_PARTS; part++) {
            int column = part * 64 + row * 8;
            if (quarter == 0 && column < HEAD_DIM) *(uint4*)(cache.values + at + column) = single.value(0, part);
        }
    }
    SeenByBlock block(scratch);
    block.put(seen);
    BLOCK_BARRIER();
    return block;
}
