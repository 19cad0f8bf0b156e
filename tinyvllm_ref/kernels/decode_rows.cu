// The small steps between the products of a decode step, each on rows of 1 to some hundred tokens, made to be over
// soon: loads of 16 bytes, all of a row at once, kept in registers from the sum of squares to the writing.
//
// Launch of embed_norm, norm_rows, add_norm_rows: grid (T), a block of whole warps with
// blockDim.x * PER_THREAD * 8 >= H. A block works on a row; thread t takes the columns 8t to 8t + 7, then those
// 8 blockDim.x further, PER_THREAD times at most. H is a multiple of 8.
// embed_norm reads ids (T,) int32, table (V, H) bf16, weight (H,) bf16. Writes residual (T, H) float32 and out.
// norm_rows reads residual and weight. Writes out (T, H) bf16.
// add_norm_rows reads x (T, H) float32 too, and adds it to residual.
//
// Launch of silu_mul_rows_float, silu_mul_rows_bf16: grid (any, T), any block. A thread takes 8 columns of a row.
// Reads gate_up (T, 2F) float32 or bf16, each row the F gates and then the F ups. Writes out (T, F) bf16.
//
// Launch of argmax_rows_parts: grid (parts, R), a block of whole warps. A block looks at PART columns of a row.
// Reads logits (R, V) float32. Writes keys (R, parts).
// Launch of argmax_rows_merge: grid (R), a block of 32 threads. Reads keys. Writes out (R,) int32.
#include "common.cuh"
#include "dependent_launch.cuh"

#ifndef PER_THREAD
#define PER_THREAD 1
#endif
#define ALL_LANES 0xffffffffu

typedef unsigned long long Key;

// ---------------- eight columns
struct Eight {
    float x[8];
};

__device__ __forceinline__ Eight read_eight(const float* from) {
    float4 a = ((const float4*)from)[0], b = ((const float4*)from)[1];
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

__device__ __forceinline__ Eight read_eight(const bf16* from) {
    Eight values;
    load8(from, values.x);
    return values;
}

__device__ __forceinline__ void write_eight(float* to, const Eight& v) {
    ((float4*)to)[0] = make_float4(v.x[0], v.x[1], v.x[2], v.x[3]);
    ((float4*)to)[1] = make_float4(v.x[4], v.x[5], v.x[6], v.x[7]);
}

__device__ __forceinline__ unsigned two_bf16(float low, float high) {
    return float_to_bf16(low) | (unsigned)float_to_bf16(high) << 16;
}

__device__ __forceinline__ void write_eight(bf16* to, const Eight& v) {
    *(uint4*)to = make_uint4(two_bf16(v.x[0], v.x[1]), two_bf16(v.x[2], v.x[3]), two_bf16(v.x[4], v.x[5]),
                             two_bf16(v.x[6], v.x[7]));
}

// ---------------- norms
// The columns of this thread: the k-th eight of them begin at column(k).
__device__ __forceinline__ int column(int k) { return 8 * (threadIdx.x + k * blockDim.x); }

// The sum over a block of whole warps, given to each thread. One barrier; the order of the additions depends on
// blockDim.x alone. A block calls it once.
__device__ __forceinline__ float sum_of_block(float value) {
    __shared__ float warp_sums[32];
    int lane = threadIdx.x % 32, warps = blockDim.x / 32;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
    if (warps == 1) return value;
    if (lane == 0) warp_sums[threadIdx.x / 32] = value;
    __syncthreads();
    value = lane < warps ? warp_sums[lane] : 0.0f;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
    return value;
}

// out = rms_norm of the row whose columns the threads hold.
__device__ __forceinline__ void write_norm(const Eight (&row)[PER_THREAD], const Eight (&weight)[PER_THREAD],
                                           bf16* out, int hidden, float eps) {
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < PER_THREAD; k++) {
        if (column(k) >= hidden) continue;
#pragma unroll
        for (int c = 0; c < 8; c++) squares += row[k].x[c] * row[k].x[c];
    }
    float scale = rsqrtf(sum_of_block(squares) / hidden + eps);
    bf16* to = out + (size_t)blockIdx.x * hidden;
#pragma unroll
    for (int k = 0; k < PER_THREAD; k++) {
        if (column(k) >= hidden) continue;
        Eight normal;
#pragma unroll
        for (int c = 0; c < 8; c++) normal.x[c] = row[k].x[c] * scale * weight[k].x[c];
        write_eight(to + column(k), normal);
    }
}

// The weights do not depend on the kernel before: they are on their way while it still runs.
__device__ __forceinline__ void read_weight(const bf16* from, Eight (&weight)[PER_THREAD], int hidden) {
#pragma unroll
    for (int k = 0; k < PER_THREAD; k++)
        if (column(k) < hidden) weight[k] = read_eight(from + column(k));
}

extern "C" __global__ void __launch_bounds__(512)
    embed_norm(const int* ids, const bf16* table, const bf16* weight, float* residual, bf16* out, int vocab, int hidden,
               float eps) {
    Eight row[PER_THREAD], scales[PER_THREAD];
    read_weight(weight, scales, hidden);
    wait_for_previous();
    let_next_start();  // not sooner: what was written before a step may then be read at once by all that follows in it
    int id = ids[blockIdx.x];
    bool known = 0 <= id && id < vocab;
    const bf16* from = table + (size_t)(known ? id : 0) * hidden;
    float* stream = residual + (size_t)blockIdx.x * hidden;
#pragma unroll
    for (int k = 0; k < PER_THREAD; k++) {
        if (column(k) >= hidden) continue;
        row[k] = read_eight(from + column(k));
        if (!known) {
#pragma unroll
            for (int c = 0; c < 8; c++) row[k].x[c] = __uint_as_float(0x7fc00000u);
        }
        write_eight(stream + column(k), row[k]);
    }
    write_norm(row, scales, out, hidden, eps);
}

extern "C" __global__ void __launch_bounds__(512)
    norm_rows(const float* residual, const bf16* weight, bf16* out, int hidden, float eps) {
    Eight row[PER_THREAD], scales[PER_THREAD];
    let_next_start();
    read_weight(weight, scales, hidden);
    wait_for_previous();
    const float* stream = residual + (size_t)blockIdx.x * hidden;
#pragma unroll
    for (int k = 0; k < PER_THREAD; k++)
        if (column(k) < hidden) row[k] = read_eight(stream + column(k));
    write_norm(row, scales, out, hidden, eps);
}

extern "C" __global__ void __launch_bounds__(512)
    add_norm_rows(const float* x, float* residual, const bf16* weight, bf16* out, int hidden, float eps) {
    Eight row[PER_THREAD], scales[PER_THREAD], added[PER_THREAD];
    let_next_start();
    read_weight(weight, scales, hidden);
    wait_for_previous();
    const float* from = x + (size_t)blockIdx.x * hidden;
    float* stream = residual + (size_t)blockIdx.x * hidden;
#pragma unroll
    for (int k = 0; k < PER_THREAD; k++) {
        if (column(k) >= hidden) continue;
        row[k] = read_eight(stream + column(k));
        added[k] = read_eight(from + column(k));
    }
#pragma unroll
    for (int k = 0; k < PER_THREAD; k++) {
        if (column(k) >= hidden) continue;
#pragma unroll
        for (int c = 0; c < 8; c++) row[k].x[c] += added[k].x[c];
        write_eight(stream + column(k), row[k]);
    }
    write_norm(row, scales, out, hidden, eps);
}

// ---------------- the gate of the feed-forward block
template <typename T>
__device__ __forceinline__ void silu_mul_eight(const T* gate_up, bf16* out, int ffn) {
    let_next_start();
    wait_for_previous();
    int c = 8 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (c >= ffn) return;
    const T* row = gate_up + (size_t)blockIdx.y * 2 * ffn;
    Eight gate = read_eight(row + c), up = read_eight(row + ffn + c), product;
#pragma unroll
    for (int k = 0; k < 8; k++) product.x[k] = gate.x[k] / (1.0f + expf(-gate.x[k])) * up.x[k];
    write_eight(out + (size_t)blockIdx.y * ffn + c, product);
}

extern "C" __global__ void silu_mul_rows_float(const float* gate_up, bf16* out, int ffn) {
    silu_mul_eight(gate_up, out, ffn);
}

extern "C" __global__ void silu_mul_rows_bf16(const bf16* gate_up, bf16* out, int ffn) {
    silu_mul_eight(gate_up, out, ffn);
}

// ---------------- argmax
// A logit and its column as one number, the larger the better: the value as an unsigned integer of the same order,
// NaN above all, then the column turned round, so that the lowest wins a tie. 0 stands for no column.
__device__ __forceinline__ Key key_of(float value, int column) {
    unsigned bits = value == 0.0f ? 0u : __float_as_uint(value);  // -0 equals 0
    unsigned ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    if (value != value) ordered = 0xffffffffu;
    return (Key)ordered << 32 | ~(unsigned)column;
}

__device__ __forceinline__ Key largest_of_warp(Key key) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        Key other = __shfl_xor_sync(ALL_LANES, key, distance);
        key = other > key ? other : key;
    }
    return key;
}

// The best of the columns that a thread has seen, in ascending order.
struct Best {
    float value;
    int column;  // -1: none yet

    // A NaN is better than a number, and nothing is better than the first NaN.
    __device__ __forceinline__ void see(float x, int c) {
        if (column < 0 || (!(x <= value) && value == value)) value = x, column = c;
    }

    __device__ __forceinline__ void see_four(float4 x, int c) {
        see(x.x, c);
        see(x.y, c + 1);
        see(x.z, c + 2);
        see(x.w, c + 3);
    }
};

#ifndef PART
#define PART 2048
#endif

extern "C" __global__ void argmax_rows_parts(const float* logits, Key* keys, int vocab) {
    __shared__ Key warp_keys[32];
    let_next_start();
    wait_for_previous();
    const float* row = logits + (size_t)blockIdx.y * vocab;
    int begin = blockIdx.x * PART, end = min(vocab, begin + PART);
    Best best = {0.0f, -1};
    if (vocab % 4 == 0) {
        for (int c = begin + 4 * threadIdx.x; c < end; c += 8 * blockDim.x) {
            int d = c + 4 * blockDim.x;  // two loads are on their way before the first is looked at
            float4 near = *(const float4*)(row + c), far = near;
            if (d < end) far = *(const float4*)(row + d);
            best.see_four(near, c);
            if (d < end) best.see_four(far, d);
        }
    } else {
        for (int c = begin + threadIdx.x; c < end; c += blockDim.x) best.see(row[c], c);
    }
    Key key = largest_of_warp(best.column < 0 ? 0 : key_of(best.value, best.column));
    int warps = blockDim.x / 32;
    if (warps > 1) {
        if (threadIdx.x % 32 == 0) warp_keys[threadIdx.x / 32] = key;
        __syncthreads();
        if (threadIdx.x >= 32) return;
        key = largest_of_warp((int)threadIdx.x < warps ? warp_keys[threadIdx.x] : 0);
    }
    if (threadIdx.x == 0) keys[(size_t)blockIdx.y * gridDim.x + blockIdx.x] = key;
}

extern "C" __global__ void argmax_rows_merge(const Key* keys, int* out, int parts) {
    let_next_start();
    wait_for_previous();
    const Key* row = keys + (size_t)blockIdx.x * parts;
    Key key = 0;
    for (int p = threadIdx.x; p < parts; p += 32) key = row[p] > key ? row[p] : key;
    key = largest_of_warp(key);
    if (threadIdx.x == 0) out[blockIdx.x] = (int)~(unsigned)key;
}
