"""Stencils and convolutions: halos in shared memory, borders, three dimensions, many steps in one launch."""

from __future__ import annotations

import numpy as np

from .case import Constant, KernelCase, empty, f64, normal

STENCIL_1D = r"""
#define RADIUS 3
// A block's elements and RADIUS on either side in shared memory; zeros beyond the ends.
extern "C" __global__ void stencil(const float* x, float* out, int n) {
    extern __shared__ float s[];
    int i = blockIdx.x * blockDim.x + threadIdx.x, t = threadIdx.x + RADIUS;
    s[t] = i < n ? x[i] : 0.0f;
    if (threadIdx.x < RADIUS) {
        s[t - RADIUS] = i - RADIUS >= 0 ? x[i - RADIUS] : 0.0f;
        int right = i + (int)blockDim.x;
        s[t + blockDim.x] = right < n ? x[right] : 0.0f;
    }
    __syncthreads();
    if (i >= n) return;
    float sum = 0.0f;
    for (int k = -RADIUS; k <= RADIUS; k++) sum += s[t + k];
    out[i] = sum;
}
"""

CONVOLUTION_2D = r"""
__constant__ float filter[25];
// 5 x 5, borders repeated; a 12 x 12 tile of output from a 16 x 16 tile of input, a thread an input.
extern "C" __global__ void convolve(const float* x, float* out, int height, int width) {
    __shared__ float tile[16][16 + 1];
    int tx = threadIdx.x, ty = threadIdx.y, column = blockIdx.x * 12 + tx - 2, row = blockIdx.y * 12 + ty - 2;
    tile[ty][tx] = x[min(max(row, 0), height - 1) * width + min(max(column, 0), width - 1)];
    __syncthreads();
    if (tx < 2 || tx >= 14 || ty < 2 || ty >= 14 || row >= height || column >= width) return;
    float sum = 0.0f;
    #pragma unroll
    for (int i = 0; i < 5; i++)
        #pragma unroll
        for (int j = 0; j < 5; j++) sum += filter[i * 5 + j] * tile[ty + i - 2][tx + j - 2];
    out[row * width + column] = sum;
}
"""

HEAT_3D = r"""
// Seven points in three dimensions; faces of the box keep their value. x is the fastest axis.
extern "C" __global__ void heat(const double* u, double* out, int nz, int ny, int nx) {
    int x = blockIdx.x * blockDim.x + threadIdx.x;
    int y = blockIdx.y * blockDim.y + threadIdx.y;
    int z = blockIdx.z * blockDim.z + threadIdx.z;
    if (x >= nx || y >= ny || z >= nz) return;
    int i = (z * ny + y) * nx + x;
    bool inside = x > 0 && x < nx - 1 && y > 0 && y < ny - 1 && z > 0 && z < nz - 1;
    double around = 0.0;
    if (inside) around = u[i - 1] + u[i + 1] + u[i - nx] + u[i + nx] + u[i - nx * ny] + u[i + nx * ny];
    out[i] = inside ? u[i] + 0.1 * (around - 6.0 * u[i]) : u[i];
}
"""

LIFE = r"""
// Conway's rules on a torus, several generations in one block, double buffered in shared memory.
extern "C" __global__ void life(unsigned char* cells, int height, int width, int generations) {
    __shared__ unsigned char board[2][300];
    int n = height * width;
    for (int i = threadIdx.x; i < n; i += blockDim.x) board[0][i] = cells[i];
    __syncthreads();
    for (int g = 0; g < generations; g++) {
        const unsigned char* now = board[g & 1];
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            int r = i / width, c = i % width, alive = 0;
            for (int dr = -1; dr <= 1; dr++)
                for (int dc = -1; dc <= 1; dc++)
                    if (dr || dc) alive += now[(r + dr + height) % height * width + (c + dc + width) % width];
            board[~g & 1][i] = alive == 3 || (alive == 2 && now[i]);
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < n; i += blockDim.x) cells[i] = board[generations & 1][i];
}
"""


def _life(cells: np.ndarray, generations: int) -> np.ndarray:
    shifts = [(r, c) for r in (-1, 0, 1) for c in (-1, 0, 1) if r or c]
    for _ in range(generations):
        alive = sum(np.roll(cells.astype(np.int64), shift, axis=(0, 1)) for shift in shifts)
        cells = (alive == 3) | ((alive == 2) & (cells == 1))
    return np.array(cells, np.int64)


def _convolve(x: np.ndarray, taps: np.ndarray) -> np.ndarray:
    height, width = x.shape
    padded = np.pad(f64(x), 2, mode="edge")
    parts = [taps[i, j] * padded[i : i + height, j : j + width] for i in range(5) for j in range(5)]
    return f64(np.sum(parts, axis=0))


def _heat(u: np.ndarray) -> np.ndarray:
    out = u.copy()
    c = (slice(1, -1),) * 3
    around = sum(np.roll(u, shift, axis)[c] for axis in range(3) for shift in (-1, 1))
    out[c] = u[c] + 0.1 * (around - 6 * u[c])
    return out


CASES = [
    KernelCase(
        name="stencil_1d_halo",
        code=STENCIL_1D,
        kernel_name="stencil",
        make=lambda rng: {"x": normal(rng, 307), "out": empty(307), "n": np.int32(307)},
        grid=(5,),
        block=(67,),
        shared_mem=4 * (67 + 6),
        expected=lambda a: {"out": np.convolve(f64(a.x), np.ones(7), "same")},
        tolerance=1e-5,
    ),
    KernelCase(
        name="convolution_2d_constant",
        code=CONVOLUTION_2D,
        kernel_name="convolve",
        make=lambda rng: {
            "x": normal(rng, 31, 41),
            "out": empty(31, 41),
            "height": np.int32(31),
            "width": np.int32(41),
            "filter": Constant(normal(rng, 25)),
        },
        grid=(4, 3),
        block=(16, 16),
        expected=lambda a: {"out": _convolve(a.x, f64(a.filter.value).reshape(5, 5))},
        tolerance=1e-5,
    ),
    KernelCase(
        name="stencil_3d",
        code=HEAT_3D,
        kernel_name="heat",
        make=lambda rng: {
            "u": rng.standard_normal((7, 9, 11)),
            "out": empty(7, 9, 11, dtype=np.float64),
            "nz": np.int32(7),
            "ny": np.int32(9),
            "nx": np.int32(11),
        },
        grid=(2, 3, 4),
        block=(8, 4, 2),
        expected=lambda a: {"out": _heat(a.u)},
        tolerance=1e-14,
    ),
    KernelCase(
        name="life_bytes_in_shared",
        code=LIFE,
        kernel_name="life",
        make=lambda rng: {
            "cells": rng.integers(0, 2, (13, 17)).astype(np.uint8),
            "height": np.int32(13),
            "width": np.int32(17),
            "generations": np.int32(5),
        },
        grid=(1,),
        block=(101,),
        expected=lambda a: {"cells": _life(a.cells, 5)},
    ),
]
