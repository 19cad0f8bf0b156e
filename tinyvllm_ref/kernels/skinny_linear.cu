// Products of few rows with a large matrix, as decode steps have them: y = x w^T, where reading w is all that counts.
//
// A block works on 8 rows of w at a time, a tile: 8 outputs of each row of x. Its warps share the columns; each keeps
// its columns of x in registers, as the left side of a product of tensor cores (tensor_core.cuh), from the first tile
// to the last. The tiles come through a ring in shared memory, brought by the copy engine where there is one, by each
// warp for itself elsewhere. What the warps have found is added up in shared memory, in their order.
//
// w does not depend on the kernel before, so that with a dependent launch the ring is full by the time x is there.
//
// Sums are in float32, and their order depends on the columns alone: a row gives the same bits beside any others.
//
// Given to the compiler:
//   ROWS      8, 16 or 32: at least as many as x has
//   WARPS     that compute, and CHUNKS of 64 columns of each: a block has DEPTH columns of w
//   STAGES    tiles that the ring holds: all but the one at hand are on their way
//   WIDTH     columns of x and w, a multiple of 8
//   NORM      x is the residual stream in float32, and its norm is what is multiplied; with ROWS 8 and SPLIT 1
//   GATE      w is gate and up, (2 outputs, WIDTH), and the result silu(gate) * up
//   ADD       to out
//   SPLIT     so many blocks share the columns, if there is more than one: the last of them to end adds up what all have
//             found; with CLUSTER (compute capability 9.0) they read it from each other's shared memory, each a part
//
// Launch: grid (any, SPLIT), block (32 WARPS); dynamic shared memory: the ring, STAGES * STAGE_BYTES, SUMS_BYTES, and
// with CLUSTER TILE * ROWS floats for each of the most tiles that a block has. Block x has a part of the tiles. A thread
// multiplies, with its warp, and adds up the warps' sums of an output or none.
// Reads x (rows, WIDTH) bf16, with NORM float32, and then the weight norm (WIDTH,) bf16; w (outputs, WIDTH) bf16. Writes
// out (rows, outputs) float32, with GATE bf16; with SPLIT and no CLUSTER also partial (splits, tiles, ROWS, 8) float32,
// and arrived (gridDim.x,) uint32, which is zeros before and after.
#ifndef WARPS
#define ROWS 8
#define WARPS 8
#define CHUNKS 4
#define STAGES 2
#define WIDTH 2048
#define NORM 0
#define GATE 0
#define ADD 0
#define SPLIT 1
#define CLUSTER 0
#endif
#include "async_copy.cuh"
#include "bulk_copy.cuh"
#include "common.cuh"
#include "dependent_launch.cuh"
#include "tensor_core.cuh"

#define TILE 8    // rows of w
#define CHUNK 64  // columns: 128 bytes
#define DEPTH (CHUNK * CHUNKS * WARPS)
#define PITCH (2 * DEPTH + 64)  // bytes from row to row: two rows side by side then lie in all banks
#define STAGE_BYTES (TILE * PITCH)
#define BLOCK_THREADS (32 * WARPS)
#define OUTPUTS (GATE ? TILE / 2 : TILE)  // of a tile and a row of x: with GATE half of its rows are gates, half ups
#define CHAINS 4                          // sums that are added up side by side, for each of them takes long
#define PAIRS ((ROWS + 15) / 16)          // of 8 rows of x
#define EACH ((OUTPUTS * ROWS + BLOCK_THREADS - 1) / BLOCK_THREADS)  // outputs of a tile that a thread adds up
#define SUMS_OF_WARP (TILE * ROWS)
#define SUMS_BYTES (2 * 4 * WARPS * SUMS_OF_WARP)
#define BLOCKS_BESIDE (ROWS > 16 ? 1 : 2)  // of this kernel and the next, on a multiprocessor

// ---------------- the tiles of a block

struct Matrix {
    const bf16* w;
    int outputs, begin, columns;  // the block's columns are begin to begin + columns - 1
    int first, count;             // its tiles

    __device__ __forceinline__ Matrix(const bf16* w, int outputs) : w(w), outputs(outputs) {
        unsigned tiles = (outputs + OUTPUTS - 1) / OUTPUTS;
        begin = SPLIT > 1 ? blockIdx.y * DEPTH : 0;
        columns = WIDTH % DEPTH ? min(DEPTH, WIDTH - begin) : DEPTH;
        first = blockIdx.x * tiles / gridDim.x;
        count = (blockIdx.x + 1) * tiles / gridDim.x - first;
    }

    // Row j of a tile, and whether there is one; with GATE each output has two.
    __device__ __forceinline__ bool has_row(int tile, int j) const { return tile * OUTPUTS + j % OUTPUTS < outputs; }
    __device__ __forceinline__ int rows_of(int tile) const { return TILE / OUTPUTS * min(OUTPUTS, outputs - tile * OUTPUTS); }
    __device__ __forceinline__ const bf16* row(int tile, int j) const {
        return w + ((size_t)(tile * OUTPUTS + j % OUTPUTS) + j / OUTPUTS * (size_t)outputs) * WIDTH + begin;
    }
};

struct Ring {
    unsigned char* stages;
    int stage;
    unsigned phase;

    __device__ __forceinline__ explicit Ring(unsigned char* stages) : stages(stages), stage(0), phase(0u) {}
    __device__ __forceinline__ unsigned char* here() const { return stages + stage * STAGE_BYTES; }
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, phase ^= 1u;
    }
};

#if HAS_BULK_COPY
// Tile t of the block, if there is one: by the last warp, each row by a lane.
__device__ __forceinline__ void bring(const Matrix& matrix, const Ring& ring, PhaseBarrier* full, int t) {
    int lane = threadIdx.x % 32, tile = matrix.first + t;
    if (threadIdx.x / 32 != WARPS - 1 || t >= matrix.count) return;
    unsigned bytes = 2 * matrix.columns;
    if (lane == 0) arrive_expecting(full + ring.stage, matrix.rows_of(tile) * bytes);
    __syncwarp();
    unsigned char* to = ring.here() + lane * PITCH;
    if (lane < TILE && matrix.has_row(tile, lane)) copy_bulk(to, matrix.row(tile, lane), bytes, full + ring.stage, read_once());
}

// Columns that there are not are zeros, for good. Rows that there are not may be anything: what comes of them is not
// written. Where every access is checked they are zeros, too, for somebody must have written what is read.
__device__ __forceinline__ void clear_ends(unsigned char* stages, const Matrix& matrix) {
    int columns = matrix.columns, pieces = (DEPTH - columns) / 8;
    for (int i = threadIdx.x; i < STAGES * TILE * pieces; i += BLOCK_THREADS)
        *(uint4*)(stages + i / pieces * PITCH + 2 * columns + i % pieces * 16) = make_uint4(0u, 0u, 0u, 0u);
#ifndef __CUDA_ARCH__
    pieces = columns / 8;
    for (int i = threadIdx.x; i < STAGES * TILE * pieces; i += BLOCK_THREADS)
        if (!matrix.has_row(matrix.first + matrix.count - 1, i / pieces % TILE))
            *(uint4*)(stages + i / pieces * PITCH + i % pieces * 16) = make_uint4(0u, 0u, 0u, 0u);
    before_bulk_copies();
#endif
}
#else
// A warp's columns of a tile, as one group of copies; an empty one after the last tile.
__device__ __forceinline__ void bring(const Matrix& matrix, const Ring& ring, int t) {
    int lane = threadIdx.x % 32, first = threadIdx.x / 32 * CHUNKS * CHUNK;
    if (t < matrix.count) {
        for (int i = 0; i < 2 * CHUNKS; i++) {
            int j = i % 2 * 4 + lane / 8, column = first + i / 2 * CHUNK + lane % 8 * 8, tile = matrix.first + t;
            bool valid = column < matrix.columns && matrix.has_row(tile, j);
            const bf16* from = valid ? matrix.row(tile, j) + column : matrix.w;
            copy16_async_or_zero(ring.here() + j * PITCH + 2 * column, from, valid);
        }
    }
    commit_copies();
}
#endif

// ---------------- blocks that read each other's shared memory

#if CLUSTER
__device__ __forceinline__ unsigned address_of_block(const void* shared, int block) {
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(shared)), "r"(block));
    return there;
}

__device__ __forceinline__ float load_of_block(const float* shared, int block) {
    float value;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address_of_block(shared, block)) : "memory");
    return value;
}

// All threads of all blocks of the cluster come to both, in turn.
__device__ __forceinline__ void arrive_in_cluster() {
    __syncwarp();  // .aligned: a warp comes whole
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() {
    __syncwarp();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
#endif

// ---------------- x

// A lane has eight columns of every 32 of its warp's, of the rows lane / 4 + 8 m. Which columns of x and w meet in a
// product of tensor cores is free, as long as all of them do: so both sides are read by 16 bytes.
typedef unsigned Columns[ROWS / 8][2 * CHUNKS][4];

__device__ __forceinline__ int column_of(int half) {
    return threadIdx.x / 32 * CHUNKS * CHUNK + 32 * half + threadIdx.x % 4 * 8;
}

// Rows that there are not are some others, for what becomes of them is not written.
__device__ __forceinline__ void take_rows(const bf16* x, const Matrix& matrix, int rows, Columns& to) {
#pragma unroll
    for (int m = 0; m < ROWS / 8; m++) {
        const bf16* row = x + (size_t)min(8 * m + (int)threadIdx.x % 32 / 4, rows - 1) * WIDTH + matrix.begin;
#pragma unroll
        for (int h = 0; h < 2 * CHUNKS; h++) {
            uint4 raw = make_uint4(0u, 0u, 0u, 0u);
            if (column_of(h) < matrix.columns) raw = *(const uint4*)(row + column_of(h));
            to[m][h][0] = raw.x, to[m][h][1] = raw.y, to[m][h][2] = raw.z, to[m][h][3] = raw.w;
        }
    }
}

// Eight columns of the stream.
struct Eight {
    float4 a, b;

    __device__ __forceinline__ void load(const float* from, bool there) {
        a = b = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (there) a = ((const float4*)from)[0], b = ((const float4*)from)[1];
    }
    __device__ __forceinline__ float squares() const {
        return a.x * a.x + a.y * a.y + a.z * a.z + a.w * a.w + (b.x * b.x + b.y * b.y + b.z * b.z + b.w * b.w);
    }
    __device__ __forceinline__ void scaled(float scale, const uint4& weight, unsigned (&to)[4]) const {
        to[0] = two(a.x, a.y, scale, weight.x);
        to[1] = two(a.z, a.w, scale, weight.y);
        to[2] = two(b.x, b.y, scale, weight.z);
        to[3] = two(b.z, b.w, scale, weight.w);
    }
    static __device__ __forceinline__ unsigned two(float low, float high, float scale, unsigned weight) {
        return pack_bf16(low * scale * __uint_as_float(weight << 16),
                         high * scale * __uint_as_float(weight & 0xffff0000u));
    }
};

// The norm of rows of the stream, rounded; they stay in registers until all warps' sums of squares are in `squares`.
__device__ __forceinline__ void take_stream(const float* stream, const uint4 (&weight)[2 * CHUNKS],
                                            const Matrix& matrix, int rows, float eps, Columns& to, float* squares) {
    int row = threadIdx.x % 32 / 4;
    const float* from = stream + (size_t)min(row, rows - 1) * WIDTH;
    Eight kept[2 * CHUNKS];
    float sum = 0.0f;
#pragma unroll
    for (int h = 0; h < 2 * CHUNKS; h++) {
        kept[h].load(from + column_of(h), column_of(h) < matrix.columns);
        sum += kept[h].squares();
    }
    sum += __shfl_xor_sync(WHOLE_WARP, sum, 1);
    sum += __shfl_xor_sync(WHOLE_WARP, sum, 2);
    if (threadIdx.x % 4 == 0) squares[threadIdx.x / 32 * ROWS + row] = sum;
    __syncthreads();
    sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) sum += squares[warp * ROWS + row];
    float scale = rsqrtf(sum / WIDTH + eps);
#pragma unroll
    for (int h = 0; h < 2 * CHUNKS; h++) kept[h].scaled(scale, weight[h], to[0][h]);
}

// ---------------- sums

// The warp's columns of x times those of a tile: as sums[row of x][row of the tile].
__device__ __forceinline__ void multiply(const unsigned char* tile, const Columns& x, float* sums) {
    int lane = threadIdx.x % 32, row = lane / 4;
    const unsigned char* from = tile + row * PITCH + 2 * column_of(0);
    float sum[PAIRS][CHAINS][4] = {};
#pragma unroll
    for (int h = 0; h < 2 * CHUNKS; h++) {
        uint4 raw = *(const uint4*)(from + 64 * h);
        const unsigned w[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            constexpr int LAST = ROWS / 8 - 1;
#pragma unroll
            for (int k = 0; k < 4; k += 2) {
                const unsigned a[4] = {x[2 * p][h][k], ROWS > 8 ? x[min(2 * p + 1, LAST)][h][k] : 0u,  //
                                       x[2 * p][h][k + 1], ROWS > 8 ? x[min(2 * p + 1, LAST)][h][k + 1] : 0u};
                multiply_add(sum[p][2 * (h % 2) + k / 2], a, w[k], w[k + 1]);
            }
        }
    }
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
        float* to = sums + (16 * p + row) * TILE + lane % 4 * 2;
        float total[4];
#pragma unroll
        for (int i = 0; i < 4; i++) total[i] = (sum[p][0][i] + sum[p][1][i]) + (sum[p][2][i] + sum[p][3][i]);
        *(float2*)to = make_float2(total[0], total[1]);
        if (ROWS > 8) *(float2*)(to + 8 * TILE) = make_float2(total[2], total[3]);
    }
}

// An output of the block's tiles, number i of a tile.
struct Output {
    int row, j;  // of x, of the tile
    size_t place;
    bool there;

    __device__ __forceinline__ Output(const Matrix& matrix, int tile, int i, int rows) : row(i / OUTPUTS), j(i % OUTPUTS) {
        int column = tile * OUTPUTS + j;
        place = (size_t)row * matrix.outputs + column;
        there = row < rows && column < matrix.outputs;
    }
};

__device__ __forceinline__ float sum_of_warps(const float* sums, int row, int j) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) sum += sums[warp * SUMS_OF_WARP + row * TILE + j];
    return sum;
}

// What becomes of a sum; of two with GATE, and `old` is what was there with ADD.
__device__ __forceinline__ void write(float* out, float sum, float, float old) { *out = ADD ? old + sum : sum; }
__device__ __forceinline__ void write(bf16* out, float gate, float up, float) {
    *out = float_to_bf16(gate / (1.0f + expf(-gate)) * up);
}

#if NORM
typedef float Input;
#else
typedef bf16 Input;
#endif
#if GATE
typedef bf16 Result;
#else
typedef float Result;
#endif

// What the blocks that share their columns have found of an output, in their order: load(s, j) gives that of block s, j
// columns of the tile further on.
template <class Load>
__device__ __forceinline__ void write_total(Result* out, float old, Load load) {
    float sum = 0.0f, up = 0.0f;
#pragma unroll
    for (int s = 0; s < SPLIT; s++) {
        sum += load(s, 0);
        if (GATE) up += load(s, OUTPUTS);
    }
    write(out, sum, up, old);
}

#if CLUSTER
// This block's part of the outputs; `found` (tiles, ROWS, TILE) is what each block has found.
__device__ __forceinline__ void merge(const Matrix& matrix, const float* found, Result* out, int rows) {
    int all = matrix.count * rows * OUTPUTS, stride = SPLIT * BLOCK_THREADS;
    auto output_of = [&](int i) { return Output(matrix, matrix.first + i / (rows * OUTPUTS), i % (rows * OUTPUTS), rows); };
    int i = threadIdx.x * SPLIT + blockIdx.y;
    float old = ADD && i < all && output_of(i).there ? (float)out[output_of(i).place] : 0.0f;  // while others end
    arrive_in_cluster();
    wait_for_cluster();
    for (; i < all; i += stride) {
        Output output = output_of(i);
        const float* from = found + i / (rows * OUTPUTS) * SUMS_OF_WARP + output.row * TILE + output.j;
        if (output.there) write_total(out + output.place, old, [&](int s, int j) { return load_of_block(from + j, s); });
        int next = i + stride;
        if (ADD && next < all && output_of(next).there) old = (float)out[output_of(next).place];
    }
    arrive_in_cluster();  // nobody ends while others read
    wait_for_cluster();
}
#elif SPLIT > 1
__device__ __forceinline__ float load_fresh(const float* from) {
#ifdef __CUDA_ARCH__
    return __ldcg(from);  // another block wrote it: from the L2 cache, which all multiprocessors share
#else
    return *from;
#endif
}

// All of the outputs, if this block is the last to end of those that share their columns.
__device__ __forceinline__ void merge(const Matrix& matrix, const float* partial, unsigned* arrived, Result* out, int rows) {
    __shared__ bool last;
    __threadfence();  // what this block has found is where all can see it,
    __syncthreads();  // every thread's of it,
    if (threadIdx.x == 0) last = atomicAdd(arrived + blockIdx.x, 1u) == SPLIT - 1u;  // before it is counted
    __syncthreads();
    if (!last) return;
    __threadfence();  // and it sees what the others wrote before they were counted
    size_t stride = (size_t)((matrix.outputs + OUTPUTS - 1) / OUTPUTS) * SUMS_OF_WARP;
    for (int i = threadIdx.x; i < matrix.count * rows * OUTPUTS; i += BLOCK_THREADS) {
        int tile = matrix.first + i / (rows * OUTPUTS);
        Output output(matrix, tile, i % (rows * OUTPUTS), rows);
        if (!output.there) continue;
        const float* from = partial + (size_t)tile * SUMS_OF_WARP + output.row * TILE + output.j;
        float old = ADD ? (float)out[output.place] : 0.0f;
        write_total(out + output.place, old, [&](int s, int j) { return load_fresh(from + s * stride + j); });
    }
    if (threadIdx.x == 0) arrived[blockIdx.x] = 0u;
}
#endif

#if CLUSTER
#define CLUSTERED __cluster_dims__(1, SPLIT, 1)
#else
#define CLUSTERED
#endif

extern "C" __global__ void CLUSTERED __launch_bounds__(BLOCK_THREADS, BLOCKS_BESIDE)
    skinny_linear(const Input* x, const bf16* w, Result* out, const bf16* norm, float* partial, unsigned* arrived, int rows,
                  int outputs, float eps) {
    extern __shared__ __align__(128) unsigned char shared[];
    float* sums = (float*)(shared + STAGES * STAGE_BYTES);
    Matrix matrix(w, outputs);
    Ring ring(shared), further(shared);  // the stage at hand, and the one that is filled next
#if HAS_BULK_COPY
    __shared__ PhaseBarrier full[STAGES];
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) start_phases(full + s, 1);
        show_barriers();
    }
    clear_ends(shared, matrix);
    __syncthreads();
#define BRING(t) bring(matrix, further, full, t)
#else
#define BRING(t) bring(matrix, further, t)
#endif
    let_next_start();
    for (int t = 0; t < STAGES; t++, further.next()) {
#if HAS_BULK_COPY
        // One after the other: the kernel before is still at work, and what it reads waits behind what is on its way.
        if (0 < t && t < matrix.count && threadIdx.x / 32 == WARPS - 1) wait_phase(full + t - 1, 0u);
#endif
        BRING(t);
    }
    Columns columns;
#if NORM
    __shared__ float squares[WARPS * ROWS];
    uint4 weight[2 * CHUNKS];
#pragma unroll
    for (int h = 0; h < 2 * CHUNKS; h++) {
        weight[h] = make_uint4(0u, 0u, 0u, 0u);
        if (column_of(h) < matrix.columns) weight[h] = *(const uint4*)(norm + column_of(h));
    }
    wait_for_previous();
    take_stream(x, weight, matrix, rows, eps, columns, squares);
#else
    wait_for_previous();
    take_rows(x, matrix, rows, columns);
#endif

#if SPLIT == 1
    float old[EACH];  // what there is of the outputs that this thread adds up
#endif
    for (int t = 0; t < matrix.count; t++, ring.next(), further.next()) {
        float* parts = sums + t % 2 * WARPS * SUMS_OF_WARP;  // the other half may still be read
#if SPLIT == 1
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            Output output(matrix, matrix.first + t, e * BLOCK_THREADS + threadIdx.x, rows);
            old[e] = ADD && output.there ? (float)out[output.place] : 0.0f;
        }
#endif
#if HAS_BULK_COPY
        wait_phase(full + ring.stage, ring.phase);
#else
        wait_copies<STAGES - 1>();
        __syncwarp();
#endif
        multiply(ring.here(), columns, parts + threadIdx.x / 32 * SUMS_OF_WARP);
        __syncthreads();
        BRING(t + STAGES);
#if SPLIT > 1
#if CLUSTER
        float* found = sums + 2 * WARPS * SUMS_OF_WARP + t * SUMS_OF_WARP;
#else
        size_t tiles = (outputs + OUTPUTS - 1) / OUTPUTS;
        float* found = partial + (blockIdx.y * tiles + matrix.first + t) * SUMS_OF_WARP;
#endif
        for (int i = threadIdx.x; i < rows * TILE; i += BLOCK_THREADS) found[i] = sum_of_warps(parts, i / TILE, i % TILE);
#else
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            Output output(matrix, matrix.first + t, e * BLOCK_THREADS + threadIdx.x, rows);
            if (!output.there) continue;
            float sum = sum_of_warps(parts, output.row, output.j);
            float up = GATE ? sum_of_warps(parts, output.row, output.j + OUTPUTS) : 0.0f;
            write(out + output.place, sum, up, old[e]);
        }
#endif
    }
#if CLUSTER
    merge(matrix, sums + 2 * WARPS * SUMS_OF_WARP, out, rows);
#elif SPLIT > 1
    merge(matrix, partial, arrived, out, rows);
#endif
}
