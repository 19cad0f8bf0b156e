"""Transposes, copies and rearrangements: naive, tiled, tiled with padding, over 2-D and 3-D grids."""

from __future__ import annotations

import numpy as np

from .case import KernelCase, empty, f64, normal

NAIVE = r"""
extern "C" __global__ void transpose(const float* x, float* out, int rows, int columns) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    int r = blockIdx.y * blockDim.y + threadIdx.y;
    if (r < rows && c < columns) out[c * rows + r] = x[r * columns + c];
}
"""

TILED = r"""
#define TILE 16
// A tile a block, read by rows and written by rows.
extern "C" __global__ void transpose(const float* x, float* out, int rows, int columns) {
    __shared__ float tile[TILE][TILE];
    int c = blockIdx.x * TILE + threadIdx.x, r = blockIdx.y * TILE + threadIdx.y;
    if (r < rows && c < columns) tile[threadIdx.y][threadIdx.x] = x[r * columns + c];
    __syncthreads();
    c = blockIdx.y * TILE + threadIdx.x;
    r = blockIdx.x * TILE + threadIdx.y;
    if (r < columns && c < rows) out[r * rows + c] = tile[threadIdx.x][threadIdx.y];
}
"""

PADDED = r"""
// 32 x 32 tiles with a column of padding against bank conflicts; a thread moves four elements.
extern "C" __global__ void transpose(const float* __restrict__ x, float* __restrict__ out, int rows,
                                     int columns) {
    __shared__ float tile[32][32 + 1];
    int c = blockIdx.x * 32 + threadIdx.x;
    for (int k = threadIdx.y; k < 32; k += blockDim.y) {
        int r = blockIdx.y * 32 + k;
        if (r < rows && c < columns) tile[k][threadIdx.x] = x[r * columns + c];
    }
    __syncthreads();
    c = blockIdx.y * 32 + threadIdx.x;
    for (int k = threadIdx.y; k < 32; k += blockDim.y) {
        int r = blockIdx.x * 32 + k;
        if (r < columns && c < rows) out[r * rows + c] = tile[threadIdx.x][k];
    }
}
"""

BATCHED = r"""
// x (batch, rows, columns) -> (batch, columns, rows); the batch is the grid's third dimension.
extern "C" __global__ void transpose_batch(const short* x, short* out, int rows, int columns) {
    __shared__ short tile[8][8 + 1];
    size_t matrix = (size_t)blockIdx.z * rows * columns;
    int c = blockIdx.x * 8 + threadIdx.x, r = blockIdx.y * 8 + threadIdx.y;
    if (r < rows && c < columns) tile[threadIdx.y][threadIdx.x] = x[matrix + r * columns + c];
    __syncthreads();
    c = blockIdx.y * 8 + threadIdx.x, r = blockIdx.x * 8 + threadIdx.y;
    if (r < columns && c < rows) out[matrix + r * rows + c] = tile[threadIdx.x][threadIdx.y];
}
"""

PERMUTE = r"""
// x (a, b, c) -> out (c, a, b), a 3-D block of threads in a 3-D grid.
extern "C" __global__ void permute(const int* x, int* out, int a, int b, int c) {
    int i = blockIdx.z * blockDim.z + threadIdx.z;
    int j = blockIdx.y * blockDim.y + threadIdx.y;
    int k = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a || j >= b || k >= c) return;
    out[(k * a + i) * b + j] = x[(i * b + j) * c + k];
}
"""

WHERE_AM_I = r"""
// Every built-in variable, for each thread of a 3-D grid of 3-D blocks.
extern "C" __global__ void where_am_i(int* out) {
    int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    int* mine = out + (block * blockDim.x * blockDim.y * blockDim.z + thread) * 8;
    mine[0] = threadIdx.x;
    mine[1] = threadIdx.y;
    mine[2] = threadIdx.z;
    mine[3] = blockIdx.x;
    mine[4] = blockIdx.y;
    mine[5] = blockIdx.z;
    mine[6] = thread % warpSize;
    dim3 size = gridDim;
    mine[7] = size.x * 100 + size.y * 10 + size.z;
}
"""

REVERSE_IN_PLACE = r"""
// Each thread swaps its pair; the middle of an odd length stays.
extern "C" __global__ void reverse(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, j = n - 1 - i;
    if (i < j) {
        float swap = x[i];
        x[i] = x[j];
        x[j] = swap;
    }
}
"""

POINTERS = r"""
// A row at a time by pointers that walk.
extern "C" __global__ void copy_rows(const float* from, float* to, int rows, int columns) {
    int row = blockIdx.x;
    const float *p = from + row * columns, *end = p + columns;
    float* q = to + (rows - 1 - row) * columns;
    p += threadIdx.x;
    q += threadIdx.x;
    while (p < end) {
        *q = *p;
        p += blockDim.x;
        q += blockDim.x;
    }
}
"""


def _where_am_i(grid: tuple[int, int, int], block: tuple[int, int, int]) -> np.ndarray:
    rows = []
    for bz, by, bx in np.ndindex(grid[2], grid[1], grid[0]):
        for tz, ty, tx in np.ndindex(block[2], block[1], block[0]):
            thread = (tz * block[1] + ty) * block[0] + tx
            rows.append([tx, ty, tz, bx, by, bz, thread % 32, grid[0] * 100 + grid[1] * 10 + grid[2]])
    return np.array(rows)


def _transpose_case(
    name: str, code: str, block: tuple[int, int], tile: tuple[int, int], rows: int, columns: int
) -> KernelCase:
    return KernelCase(
        name=name,
        code=code,
        kernel_name="transpose",
        make=lambda rng: {
            "x": normal(rng, rows, columns),
            "out": empty(columns, rows),
            "rows": np.int32(rows),
            "columns": np.int32(columns),
        },
        grid=(-(-columns // tile[0]), -(-rows // tile[1])),
        block=block,
        expected=lambda a: {"out": f64(a.x).T},
        tolerance=0,
    )


CASES = [
    _transpose_case("transpose_naive", NAIVE, (16, 8), (16, 8), 37, 53),
    _transpose_case("transpose_tiled", TILED, (16, 16), (16, 16), 37, 53),
    _transpose_case("transpose_padded", PADDED, (32, 8), (32, 32), 65, 71),
    KernelCase(
        name="transpose_batched_shorts",
        code=BATCHED,
        kernel_name="transpose_batch",
        make=lambda rng: {
            "x": rng.integers(-999, 999, (3, 13, 19)).astype(np.int16),
            "out": empty(3, 19, 13, dtype=np.int16),
            "rows": np.int32(13),
            "columns": np.int32(19),
        },
        grid=(3, 2, 3),
        block=(8, 8),
        expected=lambda a: {"out": a.x.transpose(0, 2, 1)},
    ),
    KernelCase(
        name="permute_3d",
        code=PERMUTE,
        kernel_name="permute",
        make=lambda rng: {
            "x": rng.integers(0, 999, (5, 7, 11)).astype(np.int32),
            "out": empty(11, 5, 7, dtype=np.int32),
            "a": np.int32(5),
            "b": np.int32(7),
            "c": np.int32(11),
        },
        grid=(3, 3, 2),
        block=(4, 3, 3),
        expected=lambda a: {"out": a.x.transpose(2, 0, 1)},
    ),
    KernelCase(
        name="builtin_variables",
        code=WHERE_AM_I,
        kernel_name="where_am_i",
        make=lambda rng: {"out": empty(2 * 3 * 2 * 5 * 3 * 3, 8, dtype=np.int32)},
        grid=(2, 3, 2),
        block=(5, 3, 3),
        expected=lambda a: {"out": _where_am_i((2, 3, 2), (5, 3, 3))},
    ),
    KernelCase(
        name="reverse_in_place",
        code=REVERSE_IN_PLACE,
        kernel_name="reverse",
        make=lambda rng: {"x": normal(rng, 501), "n": np.int32(501)},
        grid=(2,),
        block=(128,),
        expected=lambda a: {"x": f64(a.x)[::-1]},
        tolerance=0,
    ),
    KernelCase(
        name="walking_pointers",
        code=POINTERS,
        kernel_name="copy_rows",
        make=lambda rng: {
            "from": normal(rng, 6, 43),
            "to": empty(6, 43),
            "rows": np.int32(6),
            "columns": np.int32(43),
        },
        grid=(6,),
        block=(32,),
        expected=lambda a: {"to": f64(getattr(a, "from"))[::-1]},
        tolerance=0,
    ),
]
