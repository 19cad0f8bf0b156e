"""What the card itself can do, measured in the same run: the rates that an engine's are shares of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..blas import best_path
from ..device import cp, is_gpu
from ..kernels.random_normal import random_normal
from ..kernels.read_memory import read_memory

READ_BYTES = 4 << 30  # many times any cache of the second level
CUBE = 8192
_THREADS = 512
_BLOCKS_PER_SM = (4, 8, 16, 32)
_REPEATS, _WARM = 10, 2

# cublas_api.h and library_types.h
_OP_N, _OP_T, _R_16BF, _COMPUTE_32F, _GEMM_DEFAULT = 0, 1, 14, 68, -1
_ONE, _ZERO = np.array(1, np.float32), np.array(0, np.float32)


def read_bandwidth(nbytes: int | None = None) -> float:
    """Bytes a second that a kernel of ours reads from the device's memory.

    Parameters
    ----------
    nbytes : int, optional
        Of the array, which is filled with random numbers; by default 4 GiB, or half of the free memory where that is
        less.

    Returns
    -------
    float
        The best of several grids, each the median of ten launches by the device's own clock. NaN in the emulation.
    """
    free = int(cp.cuda.runtime.memGetInfo()[0])
    size = min(READ_BYTES, free // 2) if nbytes is None else nbytes
    x = random_normal(1, 1.0, cp.empty(size // 16 * 8, np.uint16))
    rates: list[float] = []
    for blocks in _BLOCKS_PER_SM:
        out = cp.empty(_processors() * blocks * _THREADS, np.uint32)
        seconds = _median_seconds(lambda: read_memory(x, _THREADS, out))  # noqa: B023
        rates.append(x.nbytes / seconds)
    return max(rates)


def matrix_rate(size: int = CUBE) -> float | None:
    """Floating-point operations a second of cuBLAS on two square BF16 matrices of random numbers.

    Parameters
    ----------
    size : int
        Rows and columns.

    Returns
    -------
    float or None
        The median of ten products by the device's own clock, NaN in the emulation. None where cuBLAS has no BF16
        products, below compute capability 8.0.
    """
    if best_path() != "cublas":
        return None
    a, b = (random_normal(seed, 1.0, cp.empty((size, size), np.uint16)) for seed in (2, 3))
    out = cp.empty((size, size), np.uint16)
    return 2 * size**3 / _median_seconds(lambda: square_product(a, b, out))


def square_product(a: Any, b: Any, out: Any) -> Any:
    """out = a b^T for (N, N) bf16, out rounded to bf16; row-major, as :mod:`tinyvllm_ref.blas` explains it."""
    n = len(a)
    cp.cuda.cublas.gemmEx(
        cp.cuda.device.get_cublas_handle(), _OP_T, _OP_N, n, n, n,
        _ONE.ctypes.data, b.data.ptr, _R_16BF, n, a.data.ptr, _R_16BF, n,
        _ZERO.ctypes.data, out.data.ptr, _R_16BF, n, _COMPUTE_32F, _GEMM_DEFAULT,
    )  # fmt: skip
    return out


def free_memory() -> None:
    """Give back what CuPy keeps for later arrays, so that others can have it."""
    if is_gpu:
        cp.get_default_memory_pool().free_all_blocks()


def _processors() -> int:
    return (
        int(cp.cuda.runtime.getDeviceProperties(cp.cuda.Device().id)["multiProcessorCount"]) if is_gpu else 1
    )


def _median_seconds(launch: Callable[[], Any]) -> float:
    times = []
    for number in range(_WARM + _REPEATS):
        begin, end = cp.cuda.Event(), cp.cuda.Event()
        begin.record()
        launch()
        end.record()
        end.synchronize()
        if number >= _WARM:
            times.append(cp.cuda.get_elapsed_time(begin, end) / 1e3)
    return float(np.median(times))
