// Products of some ten to 128 rows with a matrix so large that its tiles fill a card, as the decode steps of many requests
// have them: y = x w^T.
//
// A block works on TILE rows of w at a time, a tile (with GATE half of them gates, half ups). w is the left side of the
// products (warpgroups.cuh), 64 rows of it a warpgroup; x, all of it, the right side. A warp of its own has CHUNK columns
// of both after the other brought into a ring, and goes on with the next tile while this one's sums are written. So that
// memory never rests the ring is as large as shared memory allows: 6 to 8 chunks, half or more of them w. w does not
// depend on the kernel before: with a dependent launch its first chunks are on their way while that one ends.
//
// Elsewhere than on Hopper each thread makes the same sums, of chunks in shared memory, one after the other.
//
// Given to the compiler: ROWS (64 or 128; x has that many or fewer), STAGES (chunks that the ring holds), GATE (w is gate
// and up, (2 outputs, columns), and the result silu(gate) * up).
//
// Launch: grid (any), block BLOCK_THREADS; dynamic shared memory: STAGES * (STAGE_BYTES + 16), elsewhere STAGE_BYTES.
// Reads x (rows, columns) bf16 and w (outputs, columns) bf16: on Hopper by tensor maps with boxes of CHUNK columns and
// ROWS or TILE rows; with GATE w has the axes columns, 8, 2, outputs / 8. Writes out (rows, outputs) float32, with GATE
// bf16. columns and outputs are multiples of 8.
#ifndef ROWS
#define ROWS 64
#define STAGES 2
#define GATE 0
#endif
#include "common.cuh"
#include "dependent_launch.cuh"
#include "warpgroups.cuh"

#define TILE 128  // rows of w
#define CHUNK 64  // columns
#define MULTIPLYING 256  // threads: two warpgroups, of 64 rows of w each
#define BLOCK_THREADS (MULTIPLYING + 32)
#define OUTPUTS (GATE ? TILE / 2 : TILE)
#define W_BYTES (2 * TILE * CHUNK)
#define X_BYTES (2 * ROWS * CHUNK)
#define STAGE_BYTES (W_BYTES + X_BYTES)
#define EARLY 2  // chunks of w that are on their way before x is there: what the kernel before reads waits behind them

#if HAS_WARPGROUP_PRODUCTS
#define GRID_CONSTANT __grid_constant__
typedef TensorMap Source;
#else
#define GRID_CONSTANT
typedef const bf16* Source;
#endif
#if GATE
typedef bf16 Result;
#else
typedef float Result;
#endif

// What a thread of a warpgroup sums up: laid out as warpgroups.cuh says.
typedef float Sums[ROWS / 2];

// Rows of w's tile and of x that sums[4 i + k] belongs to.
__device__ __forceinline__ int row_of_w(int k) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + k / 2 * 8; }
__device__ __forceinline__ int row_of_x(int i, int k) { return 8 * i + threadIdx.x % 4 * 2 + k % 2; }

#if HAS_WARPGROUP_PRODUCTS
// The chunks that a block works on, one tile's after the other's, and where they lie while they are there.
struct Ring {
    unsigned char* stages;
    PhaseBarrier *full, *free;

    __device__ __forceinline__ explicit Ring(unsigned char* shared)
        : stages(shared), full((PhaseBarrier*)(shared + STAGES * STAGE_BYTES)), free(full + STAGES) {
        if (threadIdx.x == 0) {
            for (int s = 0; s < STAGES; s++) {
                start_phases(full + s, 1);
                start_phases(free + s, MULTIPLYING / 32);
            }
            show_barriers();
        }
        __syncthreads();
    }
    __device__ __forceinline__ unsigned char* w(int t) const { return stages + t % STAGES * STAGE_BYTES; }
    __device__ __forceinline__ unsigned char* x(int t) const { return w(t) + W_BYTES; }
    __device__ __forceinline__ void wait_until_full(int t) const { wait_phase(full + t % STAGES, t / STAGES & 1u); }
    __device__ __forceinline__ void wait_until_free(int t) const { wait_phase(free + t % STAGES, t / STAGES & 1u ^ 1u); }

    // This warp has multiplied with chunk t.
    __device__ __forceinline__ void release(int t) const {
        if (threadIdx.x % 32 == 0) arrive(free + t % STAGES);
    }
};

// By one thread: `count` chunks, of the block's tiles with `chunks` each, as the ring has room.
struct Bringer {
    const Ring& ring;
    const Source &x, &w;
    int chunks, count;
    unsigned long long once, often;

    __device__ __forceinline__ void bring_w(int t) const {
        PhaseBarrier* full = ring.full + t % STAGES;
        int tile = blockIdx.x + t / chunks * gridDim.x, column = t % chunks * CHUNK;
        arrive_expecting(full, STAGE_BYTES);
        if (GATE) copy_tile_of_halves(ring.w(t), w, column, tile * (OUTPUTS / 8), full, once);
        else copy_tile(ring.w(t), w, column, tile * TILE, full, once);
    }
    __device__ __forceinline__ void bring_x(int t) const {
        copy_tile(ring.x(t), x, t % chunks * CHUNK, 0, ring.full + t % STAGES, often);
    }

    __device__ __forceinline__ void bring_all() const {
        int early = min(EARLY, count);
        prefetch_map(w);
        prefetch_map(x);
        for (int t = 0; t < early; t++) bring_w(t);
        wait_for_previous();
        for (int t = 0; t < early; t++) bring_x(t);
        for (int t = early; t < count; t++) {
            ring.wait_until_free(t);
            bring_w(t);
            bring_x(t);
        }
    }
};

// By a warpgroup: its 64 rows of w, chunks t to t + chunks - 1. A chunk is given back when the next one's products have
// begun.
__device__ __forceinline__ void multiply(const Ring& ring, int t, int chunks, Sums& sums) {
    for (int last = t + chunks - 1, c = t; c <= last; c++) {
        ring.wait_until_full(c);
        unsigned long long w = describe_tile(ring.w(c) + threadIdx.x / 128 * 64 * 2 * CHUNK);
        unsigned long long x = describe_tile(ring.x(c));
        begin_products();
#pragma unroll
        for (int k = 0; k < CHUNK / 16; k++) multiply_add(sums, w + 2 * k, x + 2 * k);  // 16 columns are 2 x 16 bytes on
        commit_products();
        wait_products<1>();
        if (c > t) ring.release(c - 1);
    }
    wait_products<0>();
    ring.release(t + chunks - 1);
}
#else
// Row j of a tile of w, or null.
__device__ __forceinline__ const bf16* row_of_tile(const bf16* w, int tile, int j, int outputs, int columns) {
    int output = GATE ? tile * OUTPUTS + j / 16 * 8 + j % 8 : tile * TILE + j;
    if (output >= outputs) return nullptr;
    return w + ((size_t)output + (GATE && j % 16 >= 8 ? outputs : 0)) * columns;
}

// Eight columns; zeros where there are none.
__device__ __forceinline__ void take(bf16* to, const bf16* row, int column, int columns) {
    uint4 raw = make_uint4(0u, 0u, 0u, 0u);
    if (row != nullptr && column < columns) raw = *(const uint4*)(row + column);
    *(uint4*)to = raw;
}

__device__ __forceinline__ void multiply(unsigned char* shared, const bf16* x, const bf16* w, int tile, int rows, int outputs,
                                         int columns, Sums& sums) {
    bf16 *w_tile = (bf16*)shared, *x_tile = (bf16*)(shared + W_BYTES);
    for (int first = 0; first < columns; first += CHUNK) {
        for (int i = threadIdx.x; i < (TILE + ROWS) * CHUNK / 8; i += BLOCK_THREADS) {
            int j = i / (CHUNK / 8), column = i % (CHUNK / 8) * 8;
            const bf16* row = j < TILE ? row_of_tile(w, tile, j, outputs, columns)
                                       : (j - TILE < rows ? x + (size_t)(j - TILE) * columns : nullptr);
            take((j < TILE ? w_tile + j * CHUNK : x_tile + (j - TILE) * CHUNK) + column, row, first + column, columns);
        }
        __syncthreads();
        if (threadIdx.x < MULTIPLYING) {
            for (int s = 0; s < ROWS / 2; s++) {
                const bf16 *a = w_tile + row_of_w(s % 4) * CHUNK, *b = x_tile + row_of_x(s / 4, s % 4) * CHUNK;
                for (int c = 0; c < CHUNK; c++) sums[s] += bf16_to_float(a[c]) * bf16_to_float(b[c]);
            }
        }
        __syncthreads();
    }
}
#endif

// ---------------- from sums to out: eight lanes write eight outputs side by side

__device__ __forceinline__ bf16 gated(float gate, float up) { return float_to_bf16(gate / (1.0f + expf(-gate)) * up); }

// A thread has an output's gate and its up: w's tile has eight rows of the one, eight of the other, and so on.
__device__ __forceinline__ void write(bf16* out, const Sums& sums, int tile, int rows, int outputs) {
    int output = tile * OUTPUTS + threadIdx.x / 32 * 8 + threadIdx.x % 32 / 4;
    if (output >= outputs) return;
#pragma unroll
    for (int s = 0; s < ROWS / 2; s++) {
        int row = row_of_x(s / 4, s % 4);
        if (s % 4 < 2 && row < rows) out[(size_t)row * outputs + output] = gated(sums[s], sums[s + 2]);
    }
}

__device__ __forceinline__ void write(float* out, const Sums& sums, int tile, int rows, int outputs) {
#pragma unroll
    for (int s = 0; s < ROWS / 2; s++) {
        int row = row_of_x(s / 4, s % 4), output = tile * TILE + row_of_w(s % 4);
        if (row < rows && output < outputs) out[(size_t)row * outputs + output] = sums[s];
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
    warpgroup_linear(GRID_CONSTANT const Source x, GRID_CONSTANT const Source w, Result* out, int rows, int outputs,
                     int columns) {
    extern __shared__ __align__(1024) unsigned char shared[];
    int tiles = (outputs + OUTPUTS - 1) / OUTPUTS;
    bool multiplies = threadIdx.x < MULTIPLYING;
#if HAS_WARPGROUP_PRODUCTS
    int chunks = (columns + CHUNK - 1) / CHUNK, mine = (tiles - 1 - (int)blockIdx.x) / (int)gridDim.x + 1;
    Ring ring(shared);
    let_next_start();
    if (!multiplies) {
        if (threadIdx.x == MULTIPLYING) Bringer{ring, x, w, chunks, chunks * mine, read_once(), read_often()}.bring_all();
        return;
    }
    for (int tile = blockIdx.x, t = 0; tile < tiles; tile += gridDim.x, t += chunks) {
        Sums sums = {};
        multiply(ring, t, chunks, sums);
        if (t == 0) wait_for_previous();  // before anything is written
        write(out, sums, tile, rows, outputs);
    }
#else
    let_next_start();
    wait_for_previous();
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        Sums sums = {};
        multiply(shared, x, w, tile, rows, outputs, columns, sums);
        if (multiplies) write(out, sums, tile, rows, outputs);
    }
#endif
}
