// out = x w^T for bfloat16 matrices, in float32: for cards whose cuBLAS has no product of bfloat16 matrices
// (compute capability below 8.0). TOKENS, the rows of x that a block works on, is given to the compiler.
//
// Launch: grid (ceil(N / 64), ceil(T / TOKENS)), block (64, 4). A block makes 64 columns of TOKENS rows of out. It
// brings 32 columns of its rows of w and x at a time to shared memory; thread (tx, ty) adds up the products for column
// tx and the rows ty, ty + 4, ... Each output is one sum over k = 0, 1, 2, ...: its order depends on nothing else.
// Reads x (T, K) bf16, w (N, K) bf16. Writes out (T, N) float32.
#include "common.cuh"

#define OUTPUTS 64
#define ROWS 4                                // of threads
#define DEPTH 32                              // columns of a tile
#define MINE ((TOKENS + ROWS - 1) / ROWS)     // rows of x of a thread

// The tile (rows, DEPTH) of a matrix (height, width) at (first_row, first_column), zeros outside of it. A row of the
// tile has one more element than it needs, so that the rows begin in different banks.
__device__ __forceinline__ void load_tile(const bf16* matrix, int height, int width, int first_row, int first_column,
                                          int rows, float (*tile)[DEPTH + 1]) {
    int t = threadIdx.y * OUTPUTS + threadIdx.x;
    for (int e = t; e < rows * DEPTH; e += OUTPUTS * ROWS) {
        int r = e / DEPTH, c = e % DEPTH;
        bool inside = first_row + r < height && first_column + c < width;
        tile[r][c] = inside ? bf16_to_float(matrix[(size_t)(first_row + r) * width + first_column + c]) : 0.0f;
    }
}

extern "C" __global__ void linear(const bf16* x, const bf16* w, float* out, int tokens, int n, int k) {
    __shared__ float w_tile[OUTPUTS][DEPTH + 1], x_tile[TOKENS][DEPTH + 1];
    int first_output = blockIdx.x * OUTPUTS, output = first_output + threadIdx.x;
    for (int first_token = blockIdx.y * TOKENS; first_token < tokens; first_token += gridDim.y * TOKENS) {
        float sum[MINE] = {};
        for (int start = 0; start < k; start += DEPTH) {
            load_tile(w, n, k, first_output, start, OUTPUTS, w_tile);
            load_tile(x, tokens, k, first_token, start, TOKENS, x_tile);
            __syncthreads();
            for (int c = 0; c < DEPTH; c++)
#pragma unroll
                for (int r = 0; r < MINE; r++)
                    if (r * ROWS + (int)threadIdx.y < TOKENS)
                        sum[r] += x_tile[r * ROWS + threadIdx.y][c] * w_tile[threadIdx.x][c];
            __syncthreads();
        }
#pragma unroll
        for (int r = 0; r < MINE; r++) {
            int row = r * ROWS + threadIdx.y, token = first_token + row;
            if (row < TOKENS && token < tokens && output < n) out[(size_t)token * n + output] = sum[r];
        }
    }
}
