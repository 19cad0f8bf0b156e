// One token of one request through the whole model, in one launch: for batch 1, where a step is bound by reading the
// weights once, and every end of a launch is a moment in which nothing is read.
//
// The weights do not depend on the token. So on a card one more warp in each block does nothing but have them brought
// into a ring of shared memory, in the order in which they will be needed and over the borders of products and layers:
// while blocks wait for each other, compute a norm or an attention, memory goes on delivering what comes next. The keys
// and values of the cache go the same way, each layer's between its first product and its second.
//
// Blocks hand on what they have computed without a barrier: every number goes to global memory together with the
// number of the exchange that it belongs to, in one 8-byte word, and whoever needs it reads until all words are of this
// exchange. (The idea is that of NCCL's low-latency protocol.) A word is written again one layer later: by then every
// block has read it, because whoever writes it has needed something from every block since.
//
// Given to the compiler: HIDDEN, FFN, KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, WARPS of a block that compute, STAGES of
// the ring.
//
// Launch: grid (as many as multiprocessors: all of them must run at the same time, for they wait for each other), block
// (32 * WARPS), on a card with the copy engine of compute capability 9.0 one warp more, and dynamic shared memory as in
// decode_step.py. A block works on a share of the rows of each matrix; a warp on one piece of at most PIECE columns of
// some of these rows, a thread on four times eight of them.
// Reads ids (1,) int32, block_table (max_blocks,) int32, context_len (1,) int32 with the new token, weights: the
// addresses of qkv, o_proj, gate_up, down_proj of each layer, then of the LM head; norms: those of the two norms of each
// layer, then of the last norm; embedding (V, H) bf16, inv_freq (D/2,) float32. Writes key_cache and value_cache
// (layers, NB, BS, Hk, D) bf16 at the new token's slot, logits (V,) float32, chosen (1,) int32: the largest logit's
// index; and scratch memory: exchange (EXCHANGE_WORDS,) 8-byte words, candidates (blocks, 2), meeting (2,) uint32: the
// number of the next exchange, and the blocks that have ended, which are zero before and after.
#define BLOCK_THREADS (32 * WARPS)
// BLOCK_BARRIER is for all warps but the copying one. That waits at TABLE_BARRIER (sync) for the others, which go on
// (arrive).
#ifdef __CUDA_ARCH__
#define BLOCK_BARRIER() asm volatile("bar.sync 1, %0;" ::"n"(BLOCK_THREADS) : "memory")
#define TABLE_BARRIER(kind) asm volatile("bar." #kind " 2, %0;" ::"n"(BLOCK_THREADS + 32) : "memory")
#elif EMULATED_BULK_COPY
#define BLOCK_BARRIER() sync_threads<1, BLOCK_THREADS>()
#define TABLE_BARRIER(kind) kind##_threads<2, BLOCK_THREADS + 32>()
#else
#define BLOCK_BARRIER() __syncthreads()
#endif
#include "argmax.cuh"
#include "async_copy.cuh"
#include "bulk_copy.cuh"
#include "decode_attention.cuh"

// Copies of a block that are on their way at a time, of each kind of matrix: enough to keep memory busy, and no more,
// because whatever else is read waits behind all of them. More of a matrix, WITHIN it, from where the ring has nothing
// but this matrix in it: then the block is multiplying, and waits for nobody.
#define IN_FLIGHT_QKV 1
#define IN_FLIGHT_KEYS 4
#define IN_FLIGHT_O_PROJ 1
#define IN_FLIGHT_GATE_UP 1
#define IN_FLIGHT_DOWN_PROJ 1
#define IN_FLIGHT_LM_HEAD 4
#define IN_FLIGHT_WITHIN 2
#define PIECE 1024              // columns: 32 lanes, four 16-byte loads each
#define EIGHTS (PIECE / 256)    // of columns, that a lane has of a piece
#define TABLE 512               // blocks of the cache whose numbers a block keeps
// Over how many blocks of the launch the keys of a KV head are spread: one, FEW_SPLITS or MANY_SPLITS, by the length of
// the context. A split begins with a chunk and with a block of the cache.
#define ALIGNMENT (BLOCK_SIZE % CHUNK == 0 ? BLOCK_SIZE : BLOCK_SIZE * CHUNK)
#define FEW_KEYS 256
#define SOME_KEYS 1024
#define FEW_SPLITS 4
#define MANY_SPLITS 16
#define PARTS (KV_HEADS * MANY_SPLITS * GROUP * (HEAD_DIM + 2))  // words
#define HEADS_WIDTH (GROUP * KV_HEADS * HEAD_DIM)
#define KV_WIDTH (KV_HEADS * HEAD_DIM)
#define QKV_ROWS (HEADS_WIDTH + 2 * KV_WIDTH)
#define EXCHANGE_WORDS (QKV_ROWS + HEADS_WIDTH / 2 + HIDDEN + FFN / 2 + HIDDEN + PARTS)
#define MOST(a, b) ((a) > (b) ? (a) : (b))

// Into how many pieces a row is cut: a power of two, so that a warp has the same piece of all its rows.
__host__ __device__ constexpr int pieces_of(int width) {
    int pieces = 1;
    while (pieces * PIECE < width) pieces *= 2;
    return pieces;
}
__host__ __device__ constexpr int columns_of(int width) {
    return (width + 8 * pieces_of(width) - 1) / (8 * pieces_of(width)) * 8;
}
// A stage of the ring has two pieces for each warp: of two sets of so many rows.
__host__ __device__ constexpr int rows_of_set(int width) { return WARPS / pieces_of(width); }

#define CHUNK_BYTES (CHUNK_PIECES * 32 * 16)  // of keys and values
#define STAGE_BYTES                                                                                                \
    MOST(CHUNK_BYTES,                                                                                              \
         4 * MOST(rows_of_set(HIDDEN) * HIDDEN, MOST(rows_of_set(HEADS_WIDTH) * HEADS_WIDTH, rows_of_set(FFN) * FFN)))

// How many chunks of keys are in a stage: a power of two, at most one for each warp.
__host__ __device__ constexpr int chunks_of_stage() {
    int chunks = WARPS;
    while (chunks * CHUNK_BYTES > STAGE_BYTES) chunks /= 2;
    return chunks;
}

enum Kind { QKV, O_PROJ, GATE_UP, DOWN_PROJ, LM_HEAD };

// A block's rows of a matrix: first, first + 1, ...; of gate_up also the same number FFN rows further on. Where blocks
// do not get equally many, others get more in the next layer, except of o_proj and down_proj: their rows are those of
// the residual stream, which a block keeps.
struct Share {
    int first, rows;
};

__device__ __forceinline__ Share share_of(Kind kind, int layer, int vocab) {
    unsigned blocks = gridDim.x, block = blockIdx.x, unit = 1, count = HIDDEN;
    if (kind == QKV) count = QKV_ROWS;
    if (kind == GATE_UP) count = FFN / 2, unit = 2;  // activations are handed on in pairs
    if (kind == LM_HEAD) count = vocab;
    if (kind == QKV || kind == GATE_UP) block = (block + 41u * layer) % blocks;
    unsigned first = block * count / blocks, last = (block + 1) * count / blocks;
    return {(int)(first * unit), (int)((last - first) * unit)};
}

// The division of a layer's attention among blocks: `splits` of them, a power of two, for each KV head.
struct Division {
    int context, splits, keys_each;

    __device__ __forceinline__ explicit Division(int context)
        : context(context), splits(context <= FEW_KEYS ? 1 : context <= SOME_KEYS ? FEW_SPLITS : MANY_SPLITS) {
        keys_each = ((context + splits - 1) / splits + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    }

    __device__ __forceinline__ int items() const { return KV_HEADS * splits; }
    __device__ __forceinline__ KeyRange keys(int item) const {
        int begin = item % splits * keys_each;
        return {item / splits, begin, begin + keys_each};
    }
};

// The numbers of the cache's blocks: `near` has those of a block's first item, others are looked up in `all`. Further
// items are there where the launch has few blocks only.
struct Tables {
    const int *near, *all;
    __device__ __forceinline__ const int* of(const Division& division, int item) const {
        bool fits = item == blockIdx.x && division.keys_each <= TABLE * BLOCK_SIZE;
        return fits ? near - division.keys(item).begin / BLOCK_SIZE : all;
    }
};

// ---------------- the weights' and the keys' way

struct Ring {
    unsigned char* stages;
#if HAS_BULK_COPY
    PhaseBarrier *full, *empty;  // of each stage
#endif
    int stage, started;  // the stage at hand, and how many there were before it
    unsigned phase;
    __device__ __forceinline__ void next() {
        started++;
        if (++stage == STAGES) stage = 0, phase ^= 1u;
    }
};

#if HAS_BULK_COPY
#define IS_FIRST_LANE (threadIdx.x % 32 == 0)

// What the copying warp keeps in mind: where the next stage goes, and the oldest of the copies that are on their way.
struct Supply {
    Ring ring, oldest;
    unsigned long long policy;

    // Until less than `most` copies are on their way, and the next stage is free.
    __device__ __forceinline__ unsigned char* next_stage(int most) {
        while (ring.started - oldest.started >= most) {
            wait_phase(oldest.full + oldest.stage, oldest.phase);
            oldest.next();
        }
        wait_phase(ring.empty + ring.stage, ring.phase ^ 1u);
        return ring.stages + ring.stage * STAGE_BYTES;
    }

    // A block's rows of a matrix, a stage after the other. A stage's second set of rows are those that follow the first
    // set, or those `apart` rows further on.
    template <int WIDTH, int AT_FIRST, int WITHIN>
    __device__ __forceinline__ void bring(const bf16* matrix, Share share, int apart) {
        constexpr int SET = rows_of_set(WIDTH);
        int step = apart ? SET : 2 * SET;
        for (int r = 0; r < share.rows; r += step, ring.next()) {
            const bf16* from = matrix + (size_t)(share.first + r) * WIDTH;
            unsigned bytes = min(step, share.rows - r) * (2 * WIDTH);
            unsigned char* to = next_stage(r < STAGES * step ? AT_FIRST : WITHIN);
            PhaseBarrier* full = ring.full + ring.stage;
            if (!IS_FIRST_LANE) continue;
            before_bulk_copies();  // keys may have been in this stage
            arrive(full, 31);
            arrive_expecting(full, apart ? 2 * bytes : bytes);
            copy_bulk(to, from, bytes, full, policy);
            if (apart) copy_bulk(to + SET * 2 * WIDTH, from + (size_t)apart * WIDTH, bytes, full, policy);
        }
    }

    // Keys and values, in the order in which lanes want them. They lie in pieces that are too small for the copy engine.
    __device__ __forceinline__ void bring_keys(const LayerCache& cache, const int* table, KeyRange range) {
        constexpr int CHUNKS_OF_STAGE = chunks_of_stage();
        for (int start = range.begin; start < range.end; start += CHUNKS_OF_STAGE * CHUNK, ring.next()) {
            unsigned char* to = next_stage(IN_FLIGHT_KEYS) + threadIdx.x % 32 * 16;
            for (int c = 0; c < CHUNKS_OF_STAGE; c++, to += CHUNK_BYTES)
                Chunk::visit(cache, table, range.kv_head, start + c * CHUNK, range.end, [&](int p, const bf16* from, bool there) {
                    copy16_async_or_zero(to + p * 512, from, there);
                });
            arrive_with_copies(ring.full + ring.stage);
        }
    }
};

__device__ __forceinline__ void bring_all(Ring ring, const bf16* const* weights, int layers, int vocab, LayerCache cache,
                                          size_t layer_stride, int context, Tables tables) {
    Supply supply = {ring, ring, read_once()};
    Division division(context);
    Share rows = share_of(O_PROJ, 0, vocab);
    for (int layer = 0; layer < layers; layer++) {
        supply.bring<HIDDEN, IN_FLIGHT_QKV, IN_FLIGHT_QKV>(weights[4 * layer], share_of(QKV, layer, vocab), 0);
        if (layer == 0) TABLE_BARRIER(sync);
        for (int item = blockIdx.x; item < division.items(); item += gridDim.x) {
            KeyRange range = division.keys(item);
            range.end = min(range.end, context - 1);
            supply.bring_keys(cache, tables.of(division, item), range);
        }
        cache.keys += layer_stride;
        cache.values += layer_stride;
        supply.bring<HEADS_WIDTH, IN_FLIGHT_O_PROJ, IN_FLIGHT_O_PROJ>(weights[4 * layer + 1], rows, 0);
        supply.bring<HIDDEN, IN_FLIGHT_GATE_UP, IN_FLIGHT_WITHIN>(weights[4 * layer + 2], share_of(GATE_UP, layer, vocab), FFN);
        supply.bring<FFN, IN_FLIGHT_DOWN_PROJ, IN_FLIGHT_WITHIN>(weights[4 * layer + 3], rows, 0);
    }
    supply.bring<HIDDEN, IN_FLIGHT_LM_HEAD, IN_FLIGHT_LM_HEAD>(weights[4 * layers], share_of(LM_HEAD, layers, vocab), 0);
}

// Takes a warp's keys from the ring.
struct FromRing {
    Ring& ring;

    __device__ __forceinline__ void start(KeyRange) {}

    __device__ __forceinline__ void show_all(Seen& seen, KeyRange range, float scale) {
        constexpr int CHUNKS_OF_STAGE = chunks_of_stage();
        unsigned mine = threadIdx.x / 32;  // which chunk of the stage
        for (int first = range.begin; first < range.end; first += CHUNKS_OF_STAGE * CHUNK) {
            int start = first + (int)mine * CHUNK;
            bool any = mine < CHUNKS_OF_STAGE && start < range.end;
            wait_phase(ring.full + ring.stage, ring.phase);
            const unsigned char* from = ring.stages + ring.stage * STAGE_BYTES + mine * CHUNK_BYTES + threadIdx.x % 32 * 16;
            Chunk chunk;
            if (any) {
#pragma unroll
                for (int p = 0; p < CHUNK_PIECES; p++) chunk.piece[p] = *(const uint4*)(from + p * 512);
            }
            __syncwarp();
            if (IS_FIRST_LANE) arrive(ring.empty + ring.stage);
            ring.next();
            if (any) seen.look(chunk, range.end - start, scale);
            mine = (mine - CHUNKS_OF_STAGE) % WARPS;
        }
    }
};
#endif

// Which eight columns of a piece this lane takes, of four times eight: those of one segment in eight. Lanes of odd segments
// take theirs in another order, so that eight lanes read from all banks of shared memory.
__device__ __forceinline__ int column_of(int eight) {
    int lane = threadIdx.x % 32, segment = lane / 4;
    return segment * (PIECE / 8) + (eight ^ segment % 2) * 32 + lane % 4 * 8;
}

__device__ __forceinline__ uint4 load_columns(const bf16* from, int column, int columns) {
    return column < columns ? *(const uint4*)(from + column) : make_uint4(0u, 0u, 0u, 0u);
}

// Two pieces times the same columns of x, of which this lane has four times eight. Lane 0 gets the sums. Tensor cores
// multiply 16 rows, which are the eight segments of one piece and the eight of the other, by eight columns, which are the
// same segments of x. Of the 16 x 8 sums those on the diagonals are wanted, a segment of a piece times the same of x.
__device__ __forceinline__ float2 dot_pieces(const bf16* first, const bf16* second, int columns, const uint4 (&x)[EIGHTS]) {
#if HAS_BF16_PRODUCTS
    float sum[2][4] = {};
#pragma unroll
    for (int i = 0; i < EIGHTS; i++) {
        uint4 a = load_columns(first, column_of(i), columns), b = load_columns(second, column_of(i), columns);
        const unsigned left[4] = {a.x, b.x, a.y, b.y}, right[4] = {a.z, b.z, a.w, b.w};
        multiply_add(sum[0], left, x[i].x, x[i].y);
        multiply_add(sum[1], right, x[i].z, x[i].w);
    }
    // Column `segment` of row `segment` is in lane 4 * segment + segment / 2, and so for the second piece.
    int lane = threadIdx.x % 32, segment = lane / 4;
    float2 total = segment % 2 ? make_float2(sum[0][1] + sum[1][1], sum[0][3] + sum[1][3])
                               : make_float2(sum[0][0] + sum[1][0], sum[0][2] + sum[1][2]);
#pragma unroll
    for (int bit = 1; bit < 8; bit *= 2) {
        int other = segment ^ bit, holder = 4 * other + other / 2;
        total.x += __shfl_sync(0xffffffffu, total.x, holder);
        total.y += __shfl_sync(0xffffffffu, total.y, holder);
    }
#else
    float2 total = make_float2(0.0f, 0.0f);
    for (int i = 0; i < EIGHTS; i++)
        for (int c = 0; c < 8 && column_of(i) < columns; c++) {
            float factor = bf16_to_float(((const bf16*)&x[i])[c]);
            total.x += factor * bf16_to_float(first[column_of(i) + c]);
            total.y += factor * bf16_to_float(second[column_of(i) + c]);
        }
    for (int other = 16; other > 0; other /= 2) {
        total.x += __shfl_xor_sync(0xffffffffu, total.x, other);
        total.y += __shfl_xor_sync(0xffffffffu, total.y, other);
    }
#endif
    return total;
}

// A block's rows times x, as sums[row * pieces + piece]; APART: and those so many rows further on, whose sums follow.
// The columns of x that this lane has are in `x`. A barrier ends it.
template <int WIDTH, int APART>
__device__ __forceinline__ void multiply(Ring& ring, const bf16* matrix, Share share, const uint4 (&x)[EIGHTS],
                                         float* sums) {
    constexpr int PIECES = pieces_of(WIDTH), EACH = columns_of(WIDTH), SET = rows_of_set(WIDTH);
    int warp = threadIdx.x / 32, piece = warp % PIECES, mine = warp / PIECES;
    int columns = min(EACH, WIDTH - piece * EACH), last = share.rows - 1;
    float* second_sums = sums + (APART ? share.rows : SET) * PIECES;
    for (int r = mine; r - mine <= last; r += APART ? SET : 2 * SET) {
#if HAS_BULK_COPY
        wait_phase(ring.full + ring.stage, ring.phase);
        const bf16* first = (const bf16*)(ring.stages + ring.stage * STAGE_BYTES) + mine * WIDTH + piece * EACH;
        const bf16* second = first + SET * WIDTH;
#else
        const bf16* first = matrix + (size_t)(share.first + min(r, last)) * WIDTH + piece * EACH;
        const bf16* second = matrix + (size_t)(share.first + min(APART ? r : r + SET, last) + APART) * WIDTH + piece * EACH;
#endif
        float2 sum = dot_pieces(first, second, columns, x);
        if (threadIdx.x % 32 == 0) {
            if (r <= last) sums[r * PIECES + piece] = sum.x;
            if ((APART ? r : r + SET) <= last) second_sums[r * PIECES + piece] = sum.y;
        }
#if HAS_BULK_COPY
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(ring.empty + ring.stage);
        ring.next();
#endif
    }
    BLOCK_BARRIER();
}

template <int WIDTH>
__device__ __forceinline__ float row_sum(const float* sums, int row) {
    constexpr int PIECES = pieces_of(WIDTH);
    float sum = 0.0f;
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) sum += sums[row * PIECES + piece];
    return sum;
}

// The columns of x that this lane multiplies with, zeros where there are no more.
template <int WIDTH>
__device__ __forceinline__ void take_columns(const bf16* x, uint4 (&to)[EIGHTS]) {
    constexpr int PIECES = pieces_of(WIDTH), EACH = columns_of(WIDTH);
    int first = threadIdx.x / 32 % PIECES * EACH;
#pragma unroll
    for (int i = 0; i < EIGHTS; i++) to[i] = load_columns(x + first, column_of(i), min(EACH, WIDTH - first));
}

// ---------------- the numbers' way from block to block

struct Word {
    unsigned bits, exchange;
};

__device__ __forceinline__ void hand_on(Word* to, unsigned bits, unsigned exchange) {
#ifdef __CUDA_ARCH__
    asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(bits), "r"(exchange) : "memory");
#elif HAS_BULK_COPY
    __atomic_store_n((unsigned long long*)to, (unsigned long long)exchange << 32 | bits, __ATOMIC_RELAXED);
#else
    *to = {bits, exchange};
#endif
}

// Two words that lie side by side, each by itself whole.
struct Words {
    unsigned a, a_exchange, b, b_exchange;
    __device__ __forceinline__ bool of(unsigned exchange) const { return a_exchange == exchange && b_exchange == exchange; }
};

__device__ __forceinline__ Words look(const Word* from, unsigned exchange) {
    Words words;
#ifdef __CUDA_ARCH__
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.a), "=r"(words.a_exchange), "=r"(words.b), "=r"(words.b_exchange)
                 : "l"(from)
                 : "memory");
#elif HAS_BULK_COPY
    unsigned long long word[2];
    for (int k = 0; k < 2; k++) word[k] = __atomic_load_n((const unsigned long long*)from + k, __ATOMIC_RELAXED);
    words = {(unsigned)word[0], (unsigned)(word[0] >> 32), (unsigned)word[1], (unsigned)(word[1] >> 32)};
    if (!words.of(exchange)) __nanosleep(0);  // threads run in turn there, until they wait
#else
    words = {from[0].bits, from[0].exchange, from[1].bits, from[1].exchange};
#endif
    return words;
}

__device__ __forceinline__ Words look_until(const Word* from, unsigned exchange) {
    Words words = look(from, exchange);
    while (!words.of(exchange)) words = look(from, exchange);
    return words;
}

// 2 * PAIRS words from every 2 * BLOCK_THREADS-th on, as soon as they have been handed on: to[e] are the words
// 2 * (e * BLOCK_THREADS + threadIdx.x) and the next one, of `count`. A thread asks for one pair at a time: all blocks
// read the same words, and asking for all at once makes them stand in each other's way (measured).
template <int PAIRS>
__device__ __forceinline__ void receive(const Word* from, int count, unsigned exchange, uint2 (&to)[PAIRS]) {
#if !defined(__CUDA_ARCH__) && !HAS_BULK_COPY
    __syncthreads();  // blocks run one after the other there: what this one needs it wrote itself
#endif
    unsigned missing = (1u << PAIRS) - 1u;
    while (missing) {
#pragma unroll
        for (int e = 0; e < PAIRS; e++) {
            int word = 2 * (e * BLOCK_THREADS + threadIdx.x);
            if (!(missing >> e & 1u)) continue;
            if (word < count) {
                Words words = look(from + word, exchange);
                if (!words.of(exchange)) continue;
                to[e] = make_uint2(words.a, words.b);
            }
            missing &= ~(1u << e);
        }
    }
}

// Rounded numbers that were handed on two in a word, to x.
template <int WIDTH>
__device__ __forceinline__ void receive_packed(const Word* from, unsigned exchange, bf16* x) {
    constexpr int PAIRS = (WIDTH / 2 + 2 * BLOCK_THREADS - 1) / (2 * BLOCK_THREADS);
    uint2 word[PAIRS];
    receive(from, WIDTH / 2, exchange, word);
#pragma unroll
    for (int e = 0; e < PAIRS; e++) {
        int first = 2 * (e * BLOCK_THREADS + threadIdx.x);
        if (first < WIDTH / 2) *(uint2*)(x + 2 * first) = word[e];
    }
    BLOCK_BARRIER();
}

// The products of a KV head: the queries of its group, its key and its value, (GROUP + 2, D) float32.
__device__ __forceinline__ void receive_heads(const Word* qkv, int kv_head, unsigned exchange, float* to) {
#if !defined(__CUDA_ARCH__) && !HAS_BULK_COPY
    __syncthreads();
#endif
    for (int word = 2 * threadIdx.x; word < (GROUP + 2) * HEAD_DIM; word += 2 * BLOCK_THREADS) {
        int head = word / HEAD_DIM, row = kv_head * GROUP * HEAD_DIM + word;
        if (head >= GROUP) row = HEADS_WIDTH + (head - GROUP) * KV_WIDTH + kv_head * HEAD_DIM + word % HEAD_DIM;
        Words words = look_until(qkv + row, exchange);
        *(float2*)(to + word) = make_float2(__uint_as_float(words.a), __uint_as_float(words.b));
    }
    BLOCK_BARRIER();
}

// The attention of a layer, as far as it is this block's. What it gives goes to `heads`, two columns in a word.
struct Attention {
    Division division;
    const Word* qkv;
    Word *heads, *parts;
    unsigned exchange;
    static constexpr int PAIRS = GROUP * HEAD_DIM / 2, STRIDE = GROUP * (HEAD_DIM + 2);  // of columns; words of an item

    // What a block has found goes to the others of the same heads; each merges some columns and hands them on.
    __device__ __forceinline__ void finish(const SeenByBlock& seen, int item) const {
        Word *to = heads + item / division.splits * PAIRS, *mine = parts + (size_t)item * STRIDE;
        for (int p = 2 * threadIdx.x; p < GROUP * HEAD_DIM; p += 2 * BLOCK_THREADS) {
            Part part = seen.part(p);
            if (division.splits == 1) {
                hand_on(to + p / 2, pack_bf16(part.a, part.b), exchange);
                continue;
            }
            hand_on(mine + p, __float_as_uint(part.a), exchange);
            hand_on(mine + p + 1, __float_as_uint(part.b), exchange);
            if (p % HEAD_DIM == 0)
                for (int k = 0; k < 2; k++)  // twice: words are read in pairs
                    hand_on(mine + GROUP * HEAD_DIM + p / HEAD_DIM * 2 + k, __float_as_uint(part.lse), exchange);
        }
    }

    // The columns that this block merges, two at a time by as many neighbouring lanes as there are splits, each of which
    // has those of one split. A block with no keys of its own merges, too.
    __device__ __forceinline__ void merge(int item) const {
        int splits = division.splits, each = (PAIRS + splits - 1) / splits, split = threadIdx.x % splits;
        int first = item % splits * each, last = min(PAIRS, first + each);
        const Word* theirs = parts + (size_t)(item - item % splits + split) * STRIDE;
        Word* to = heads + item / splits * PAIRS;
        for (int start = first; start < last; start += BLOCK_THREADS / splits) {
            int pair = start + threadIdx.x / splits;
            float a = 0.0f, b = 0.0f, lse = -infinity();
            if (pair < last) {
                Words value = look_until(theirs + 2 * pair, exchange);
                lse = __uint_as_float(look_until(theirs + GROUP * HEAD_DIM + 2 * pair / HEAD_DIM * 2, exchange).a);
                a = __uint_as_float(value.a), b = __uint_as_float(value.b);
            }
            float peak = lse;
            for (int other = splits / 2; other > 0; other /= 2) peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, other));
            float sum = weight_of(lse, peak);
            a = sum > 0.0f ? sum * a : 0.0f;  // a split without keys has none
            b = sum > 0.0f ? sum * b : 0.0f;
            for (int other = splits / 2; other > 0; other /= 2) {
                sum += __shfl_xor_sync(0xffffffffu, sum, other);
                a += __shfl_xor_sync(0xffffffffu, a, other);
                b += __shfl_xor_sync(0xffffffffu, b, other);
            }
            if (split == 0 && pair < last) hand_on(to + pair, pack_bf16(a / sum, b / sum), exchange);
        }
    }

    __device__ __forceinline__ void operator()(const LayerCache& cache, const Tables& tables, const float* turns, Ring& ring,
                                               float* token, float* work) const {
        for (int item = blockIdx.x; item < division.items(); item += gridDim.x) {
            KeyRange range = division.keys(item);
            const int* table = tables.of(division, item);
            auto await = [&]() {
                receive_heads(qkv, range.kv_head, exchange, token);
                return NewToken{token, token + GROUP * HEAD_DIM, token + (GROUP + 1) * HEAD_DIM, turns, turns + HALF};
            };
#if HAS_BULK_COPY
            FromRing keys = {ring};
#else
            FromCache keys(cache, table);
#endif
            finish(attend_keys(cache, table, division.context, range, work, keys, await), item);
            BLOCK_BARRIER();  // the work memory is free again
        }
        if (division.splits > 1)
            for (int item = blockIdx.x; item < division.items(); item += gridDim.x) merge(item);
    }
};

// ---------------- norm and argmax

#define NORM_PAIRS ((HIDDEN + 2 * BLOCK_THREADS - 1) / (2 * BLOCK_THREADS))

__device__ __forceinline__ float sum_of_block(float value, float* scratch) {
#pragma unroll
    for (int other = 16; other > 0; other /= 2) value += __shfl_xor_sync(0xffffffffu, value, other);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    BLOCK_BARRIER();
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += scratch[w];
    return sum;
}

// A norm's weights for the columns that this thread has in `value`.
__device__ __forceinline__ void load_weights(const bf16* weight, unsigned (&to)[NORM_PAIRS]) {
#pragma unroll
    for (int e = 0; e < NORM_PAIRS; e++) {
        int column = 2 * (e * BLOCK_THREADS + threadIdx.x);
        to[e] = column < HIDDEN ? *(const unsigned*)(weight + column) : 0u;
    }
}

// x = the norm of the stream, rounded as products take it. `value` holds float32 bits, two columns a pair.
__device__ __forceinline__ void normalise(const uint2 (&value)[NORM_PAIRS], const unsigned (&weight)[NORM_PAIRS],
                                          float eps, bf16* x, float* scratch) {
    float squares = 0.0f;
#pragma unroll
    for (int e = 0; e < NORM_PAIRS; e++) {
        float a = __uint_as_float(value[e].x), b = __uint_as_float(value[e].y);
        if (2 * (e * BLOCK_THREADS + threadIdx.x) < HIDDEN) squares += a * a + b * b;
    }
    float scale = rsqrtf(sum_of_block(squares, scratch) / HIDDEN + eps);
#pragma unroll
    for (int e = 0; e < NORM_PAIRS; e++) {
        int column = 2 * (e * BLOCK_THREADS + threadIdx.x);
        float a = __uint_as_float(value[e].x) * scale * __uint_as_float(weight[e] << 16);
        float b = __uint_as_float(value[e].y) * scale * __uint_as_float(weight[e] & 0xffff0000u);
        if (column < HIDDEN) *(unsigned*)(x + column) = pack_bf16(a, b);
    }
    BLOCK_BARRIER();
}

__device__ __forceinline__ Candidate best_of_block(Candidate mine, Candidate* scratch) {
#pragma unroll
    for (int other = 16; other > 0; other /= 2) {
        Candidate theirs = {__shfl_xor_sync(0xffffffffu, mine.value, other), __shfl_xor_sync(0xffffffffu, mine.index, other)};
        mine = better(mine, theirs);
    }
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = mine;
    BLOCK_BARRIER();
    Candidate best = scratch[0];
    for (int w = 1; w < WARPS; w++) best = better(best, scratch[w]);
    return best;
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS + 32, 1)
    decode_step(const int* ids, const int* block_table, const int* context_len, const bf16* const* weights,
                const bf16* const* norms, const bf16* embedding, const float* inv_freq, bf16* key_cache,
                bf16* value_cache, Word* exchange, float* logits,
                Candidate* candidates, int* chosen, unsigned* meeting, long long layer_stride, int layers, int vocab,
                int sums_floats, float eps, float scale) {
    extern __shared__ __align__(128) unsigned char shared[];
    // The ring, x and what attention works in (at different times), sums, the block's part of the stream, small things.
    Ring ring;
    ring.stages = shared;
    ring.stage = ring.started = 0;
    ring.phase = 0u;
    float* work = (float*)(shared + (HAS_BULK_COPY ? STAGES * STAGE_BYTES : 0));
    bf16* x = (bf16*)work;
    float* token_floats = work + (ATTENTION_FLOATS(WARPS) + 3) / 4 * 4;  // (GROUP + 2) * HEAD_DIM of them
    float* sums = work + MOST((ATTENTION_FLOATS(WARPS) + 3) / 4 * 4 + (GROUP + 2) * HEAD_DIM,
                              MOST(HIDDEN, MOST(HEADS_WIDTH, FFN)) / 2);
    float* own = sums + sums_floats;  // the block's rows of the residual stream
    float* reduce = own + (HIDDEN / gridDim.x + 4) / 4 * 4;

    __shared__ int table[TABLE];  // the blocks of the keys that this block will look at
    int context = context_len[0];
    Division division(context);
    Tables tables = {table, block_table};
    LayerCache cache = {key_cache, value_cache, KV_HEADS, scale * LOG2_E};
#if HAS_BULK_COPY
    __shared__ PhaseBarrier full[STAGES], empty[STAGES];
    ring.full = full;
    ring.empty = empty;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            start_phases(full + s, 32);
            start_phases(empty + s, WARPS);
        }
        show_barriers();
    }
#ifndef __CUDA_ARCH__
    // A stage's rows that there are not are multiplied, too, and nothing comes of them. Somebody must have written them
    // where every access is checked.
    for (int i = threadIdx.x; i < STAGES * STAGE_BYTES / 16; i += BLOCK_THREADS + 32)
        ((uint4*)shared)[i] = make_uint4(0u, 0u, 0u, 0u);
    before_bulk_copies();
#endif
    __syncthreads();
    if (threadIdx.x >= BLOCK_THREADS) {  // the copying warp
        bring_all(ring, weights, layers, vocab, cache, layer_stride, context, tables);
        return;
    }
#endif
    int first_key = division.keys(blockIdx.x).begin;
    for (int i = threadIdx.x; i < TABLE && first_key + i * BLOCK_SIZE < context; i += BLOCK_THREADS)
        table[i] = block_table[first_key / BLOCK_SIZE + i];
#if HAS_BULK_COPY
    TABLE_BARRIER(arrive);
#endif
    unsigned number = meeting[0];
    Word *qkv = exchange, *heads = qkv + QKV_ROWS, *middle = heads + HEADS_WIDTH / 2;
    Word *activated = middle + HIDDEN, *stream = activated + FFN / 2, *parts = stream + HIDDEN;
    const bf16* embedded = embedding + (size_t)ids[0] * HIDDEN;
    Share rows = share_of(O_PROJ, 0, vocab);
    for (int r = threadIdx.x; r < rows.rows; r += BLOCK_THREADS) own[r] = bf16_to_float(embedded[rows.first + r]);
    __shared__ float turns[HEAD_DIM];
    fill_turns(context - 1, inv_freq, turns, turns + HALF);

    uint4 columns[EIGHTS];
    uint2 value[NORM_PAIRS];
    unsigned weight[NORM_PAIRS];
    load_weights(norms[0], weight);
#pragma unroll
    for (int e = 0; e < NORM_PAIRS; e++) {
        int column = 2 * (e * BLOCK_THREADS + threadIdx.x);
        unsigned both = column < HIDDEN ? *(const unsigned*)(embedded + column) : 0u;
        value[e] = make_uint2(both << 16, both & 0xffff0000u);
    }
    for (int layer = 0; layer < layers; layer++, number++) {
        normalise(value, weight, eps, x, reduce);
        take_columns<HIDDEN>(x, columns);
        load_weights(norms[2 * layer + 1], weight);
        Share share = share_of(QKV, layer, vocab);
        multiply<HIDDEN, 0>(ring, weights[4 * layer], share, columns, sums);
        for (int r = threadIdx.x; r < share.rows; r += BLOCK_THREADS)
            hand_on(qkv + share.first + r, __float_as_uint(row_sum<HIDDEN>(sums, r)), number);

        Attention attend = {division, qkv, heads, parts, number};
        attend(cache, tables, turns, ring, token_floats, work);
        cache.keys += layer_stride;
        cache.values += layer_stride;
        receive_packed<HEADS_WIDTH>(heads, number, x);
        take_columns<HEADS_WIDTH>(x, columns);
        multiply<HEADS_WIDTH, 0>(ring, weights[4 * layer + 1], rows, columns, sums);
        for (int r = threadIdx.x; r < rows.rows; r += BLOCK_THREADS) {
            own[r] += row_sum<HEADS_WIDTH>(sums, r);
            hand_on(middle + rows.first + r, __float_as_uint(own[r]), number);
        }

        receive(middle, HIDDEN, number, value);
        normalise(value, weight, eps, x, reduce);
        take_columns<HIDDEN>(x, columns);
        load_weights(norms[2 * layer + 2], weight);
        share = share_of(GATE_UP, layer, vocab);
        multiply<HIDDEN, FFN>(ring, weights[4 * layer + 2], share, columns, sums);
        for (int r = 2 * threadIdx.x; r < share.rows; r += 2 * BLOCK_THREADS) {
            float result[2];
#pragma unroll
            for (int k = 0; k < 2; k++) {
                float gate = row_sum<HIDDEN>(sums, r + k), up = row_sum<HIDDEN>(sums, share.rows + r + k);
                result[k] = gate / (1.0f + expf(-gate)) * up;
            }
            hand_on(activated + (share.first + r) / 2, pack_bf16(result[0], result[1]), number);
        }

        receive_packed<FFN>(activated, number, x);
        take_columns<FFN>(x, columns);
        multiply<FFN, 0>(ring, weights[4 * layer + 3], rows, columns, sums);
        for (int r = threadIdx.x; r < rows.rows; r += BLOCK_THREADS) {
            own[r] += row_sum<FFN>(sums, r);
            hand_on(stream + rows.first + r, __float_as_uint(own[r]), number);
        }
        receive(stream, HIDDEN, number, value);
    }

    normalise(value, weight, eps, x, reduce);
    take_columns<HIDDEN>(x, columns);
    Share share = share_of(LM_HEAD, layers, vocab);
    multiply<HIDDEN, 0>(ring, weights[4 * layers], share, columns, sums);
    Candidate best = {0.0f, -1};
    for (int r = threadIdx.x; r < share.rows; r += BLOCK_THREADS) {
        float logit = row_sum<HIDDEN>(sums, r);
        logits[share.first + r] = logit;
        best = better(best, Candidate{logit, share.first + r});
    }
    best = best_of_block(best, (Candidate*)reduce);
    unsigned* flag = (unsigned*)work;
    if (threadIdx.x == 0) {
        candidates[blockIdx.x] = best;
        __threadfence();
        *flag = atomicAdd(meeting + 1, 1u) == gridDim.x - 1u;
    }
    BLOCK_BARRIER();
    if (!*flag) return;
    // The last block to end: all candidates are there.
    __threadfence();
    best = {0.0f, -1};
    for (int b = threadIdx.x; b < gridDim.x; b += BLOCK_THREADS) {
        Candidate theirs = {load_fresh(&candidates[b].value), __float_as_int(load_fresh((const float*)&candidates[b].index))};
        best = better(best, theirs);
    }
    best = best_of_block(best, (Candidate*)reduce + WARPS);
    if (threadIdx.x == 0) {
        chosen[0] = best.index;
        meeting[0] = number;
        meeting[1] = 0u;
    }
}
