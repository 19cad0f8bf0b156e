"""Matrix products: naive, tiled, with dynamic tiles, a warp a row, bfloat16 weights."""

from __future__ import annotations

import numpy as np

from .case import BF16_CUDA, KernelCase, empty, f64, from_bf16, normal, to_bf16

NAIVE = r"""
// C (M, N) = A (M, K) B (K, N), an element a thread.
extern "C" __global__ void matmul(const float* A, const float* B, float* C, int M, int N, int K) {
    int n = blockIdx.x * blockDim.x + threadIdx.x, m = blockIdx.y * blockDim.y + threadIdx.y;
    if (m >= M || n >= N) return;
    float sum = 0.0f;
    for (int k = 0; k < K; k++) sum += A[m * K + k] * B[k * N + n];
    C[m * N + n] = sum;
}
"""

TILED = r"""
constexpr int TILE = 16;
extern "C" __global__ void matmul(const float* A, const float* B, float* C, int M, int N, int K) {
    __shared__ float a[TILE][TILE], b[TILE][TILE];
    int x = threadIdx.x, y = threadIdx.y, n = blockIdx.x * TILE + x, m = blockIdx.y * TILE + y;
    float sum = 0.0f;
    for (int start = 0; start < K; start += TILE) {
        a[y][x] = m < M && start + x < K ? A[m * K + start + x] : 0.0f;
        b[y][x] = start + y < K && n < N ? B[(start + y) * N + n] : 0.0f;
        __syncthreads();
        #pragma unroll
        for (int k = 0; k < TILE; ++k) sum += a[y][k] * b[k][x];
        __syncthreads();
    }
    if (m < M && n < N) C[m * N + n] = sum;
}
"""

DYNAMIC = r"""
// Tiles of blockDim.x by blockDim.x in dynamic shared memory, two arrays carved out of one.
extern "C" __global__ void matmul(const float* A, const float* B, float* C, int M, int N, int K) {
    extern __shared__ float tiles[];
    const int T = blockDim.x, x = threadIdx.x, y = threadIdx.y;
    float *a = tiles, *b = tiles + T * T;
    int n = blockIdx.x * T + x, m = blockIdx.y * T + y;
    float sum = 0.0f;
    for (int tile = 0; tile < (K + T - 1) / T; tile++) {
        int k = tile * T;
        a[y * T + x] = m < M && k + x < K ? A[m * K + k + x] : 0.0f;
        b[y * T + x] = k + y < K && n < N ? B[(k + y) * N + n] : 0.0f;
        __syncthreads();
        for (int j = 0; j < T; j++) sum = fmaf(a[y * T + j], b[j * T + x], sum);
        __syncthreads();
    }
    if (m < M && n < N) C[m * N + n] = sum;
}
"""

REGISTER_BLOCK = r"""
// Each thread computes 4 x 2 elements in registers, from 32 x 16 tiles; a block of 8 x 8 threads.
extern "C" __global__ void matmul(const float* A, const float* B, float* C, int M, int N, int K) {
    __shared__ float a[32][8 + 1];
    __shared__ float b[8][16];
    const int t = threadIdx.y * 8 + threadIdx.x, row = blockIdx.y * 32, column = blockIdx.x * 16;
    float sum[4][2] = {};
    for (int k0 = 0; k0 < K; k0 += 8) {
        for (int e = t; e < 32 * 8; e += 64) {
            int r = e / 8, k = e % 8;
            a[r][k] = row + r < M && k0 + k < K ? A[(row + r) * K + k0 + k] : 0.0f;
        }
        for (int e = t; e < 8 * 16; e += 64) {
            int k = e / 16, c = e % 16;
            b[k][c] = k0 + k < K && column + c < N ? B[(k0 + k) * N + column + c] : 0.0f;
        }
        __syncthreads();
        for (int k = 0; k < 8; k++)
            #pragma unroll
            for (int i = 0; i < 4; i++)
                #pragma unroll
                for (int j = 0; j < 2; j++)
                    sum[i][j] += a[4 * threadIdx.y + i][k] * b[k][2 * threadIdx.x + j];
        __syncthreads();
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++) {
            int m = row + 4 * threadIdx.y + i, n = column + 2 * threadIdx.x + j;
            if (m < M && n < N) C[m * N + n] = sum[i][j];
        }
}
"""

GEMV = (
    BF16_CUDA
    + r"""
// y (N,) = W (N, K) x (K,), bfloat16 weights, a warp a row.
extern "C" __global__ void gemv(const bf16* W, const float* x, float* y, int N, int K) {
    int warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (warp >= N) return;
    const bf16* row = W + (size_t)warp * K;
    float sum = 0.0f;
    for (int k = lane; k < K; k += 32) sum += bf16_to_float(row[k]) * x[k];
    #pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (lane == 0) y[warp] = sum;
}
"""
)

LINEAR = (
    BF16_CUDA
    + r"""
// Y (T, N) float32 = X (T, K) W (N, K)^T, both bfloat16: tiles of W are read along K and used along N.
extern "C" __global__ void linear(const bf16* X, const bf16* W, float* Y, int T, int N, int K) {
    __shared__ float xs[8][33], ws[32][33];
    int tx = threadIdx.x, ty = threadIdx.y, t = blockIdx.y * 8 + ty, n = blockIdx.x * 32 + tx;
    float sum = 0.0f;
    for (int k0 = 0; k0 < K; k0 += 32) {
        xs[ty][tx] = t < T && k0 + tx < K ? bf16_to_float(X[t * K + k0 + tx]) : 0.0f;
        for (int r = ty; r < 32; r += 8) {
            int row = blockIdx.x * 32 + r;
            ws[r][tx] = row < N && k0 + tx < K ? bf16_to_float(W[row * K + k0 + tx]) : 0.0f;
        }
        __syncthreads();
        for (int k = 0; k < 32; k++) sum += xs[ty][k] * ws[tx][k];
        __syncthreads();
    }
    if (t < T && n < N) Y[t * N + n] = sum;
}
"""
)

SPLIT_K = r"""
// Each block of the grid's third dimension adds its share of K into C, which starts at zero.
extern "C" __global__ void matmul_split(const float* A, const float* B, float* C, int M, int N, int K) {
    int n = blockIdx.x * blockDim.x + threadIdx.x, m = blockIdx.y;
    if (n >= N) return;
    int share = (K + gridDim.z - 1) / gridDim.z, begin = blockIdx.z * share, end = min(begin + share, K);
    float sum = 0.0f;
    for (int k = begin; k < end; k++) sum += A[m * K + k] * B[k * N + n];
    atomicAdd(&C[m * N + n], sum);
}
"""


def _matmul_case(
    name: str,
    code: str,
    sizes: tuple[int, int, int],
    block: tuple[int, int],
    tile: tuple[int, int],
    shared: int = 0,
) -> KernelCase:
    """A case of C = A B; `sizes` is (M, N, K), `tile` the columns and rows of C a block."""
    M, N, K = sizes
    return KernelCase(
        name=name,
        code=code,
        kernel_name="matmul",
        make=lambda rng: {
            "A": normal(rng, M, K),
            "B": normal(rng, K, N),
            "C": empty(M, N),
            "M": np.int32(M),
            "N": np.int32(N),
            "K": np.int32(K),
        },
        grid=(-(-N // tile[0]), -(-M // tile[1])),
        block=block,
        shared_mem=shared,
        expected=lambda a: {"C": f64(a.A) @ f64(a.B)},
        tolerance=1e-5,
    )


CASES = [
    _matmul_case("matmul_naive", NAIVE, (17, 23, 31), (8, 4), (8, 4)),
    _matmul_case("matmul_tiled", TILED, (19, 35, 41), (16, 16), (16, 16)),
    _matmul_case("matmul_tiled_one", TILED, (1, 1, 1), (16, 16), (16, 16)),
    _matmul_case("matmul_dynamic_tiles", DYNAMIC, (13, 22, 29), (9, 9), (9, 9), shared=2 * 81 * 4),
    _matmul_case("matmul_register_block", REGISTER_BLOCK, (37, 29, 21), (8, 8), (16, 32)),
    KernelCase(
        name="gemv_warp_per_row",
        code=GEMV,
        kernel_name="gemv",
        make=lambda rng: {
            "W": to_bf16(normal(rng, 21, 77)),
            "x": normal(rng, 77),
            "y": empty(21),
            "N": np.int32(21),
            "K": np.int32(77),
        },
        grid=(6,),
        block=(128,),
        expected=lambda a: {"y": f64(from_bf16(a.W)) @ f64(a.x)},
        tolerance=1e-5,
    ),
    KernelCase(
        name="linear_bf16",
        code=LINEAR,
        kernel_name="linear",
        make=lambda rng: {
            "X": to_bf16(normal(rng, 11, 45)),
            "W": to_bf16(normal(rng, 39, 45)),
            "Y": empty(11, 39),
            "T": np.int32(11),
            "N": np.int32(39),
            "K": np.int32(45),
        },
        grid=(2, 2),
        block=(32, 8),
        expected=lambda a: {"Y": f64(from_bf16(a.X)) @ f64(from_bf16(a.W)).T},
        tolerance=1e-5,
    ),
    KernelCase(
        name="matmul_split_k",
        code=SPLIT_K,
        kernel_name="matmul_split",
        make=lambda rng: {
            "A": normal(rng, 7, 61),
            "B": normal(rng, 61, 13),
            "C": np.zeros((7, 13), np.float32),
            "M": np.int32(7),
            "N": np.int32(13),
            "K": np.int32(61),
        },
        grid=(1, 7, 4),
        block=(32,),
        expected=lambda a: {"C": f64(a.A) @ f64(a.B)},
        tolerance=1e-5,
    ),
]
