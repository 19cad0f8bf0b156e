"""Tensor maps: what Hopper's copy engine is told of an array in device memory, to bring tiles of it to shared memory.

CuPy has no call for them, so they are made by libcuda itself, by ctypes (CUDA Driver API, "Tensor Map Object
Management"). The tiles are such as ``kernels/warpgroups.cuh`` describes: 64 columns of bfloat16, swizzled by 128 bytes,
with zeros where the array has ended.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from .dependent_launch import call_driver

COLUMNS = 64
"""Of a tile: 128 bytes, the width of the swizzle."""

_UINT16, _NO_INTERLEAVE, _SWIZZLE_128B, _PROMOTE_128B, _ZEROS = 1, 0, 3, 2, 0  # cuda.h
_BYTES, _ALIGNED = 128, 64  # CUtensorMap


def tensor_map(array: Any, shape: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> np.void:
    """Describe bfloat16 numbers, as an argument of a kernel: ``const __grid_constant__ TensorMap``.

    Parameters
    ----------
    array : cupy.ndarray, uint16
        Where they lie. The map holds the address, and does not keep the array.
    shape : sequence of int
        Sizes of the axes, the fastest first.
    strides : sequence of int
        Bytes from one to the next along each axis but the first; multiples of 16.
    box : sequence of int
        Sizes of a tile; the first is :data:`COLUMNS`, the others are 256 or less.

    Returns
    -------
    numpy.void
        128 bytes.

    Raises
    ------
    RuntimeError
        The driver refused; the message has its name for the error.
    """
    room = ctypes.create_string_buffer(_BYTES + _ALIGNED)
    at = -(-ctypes.addressof(room) // _ALIGNED) * _ALIGNED
    rank = len(shape)
    call_driver(
        "cuTensorMapEncodeTiled",
        ctypes.c_void_p(at), ctypes.c_int(_UINT16), ctypes.c_uint(rank), ctypes.c_void_p(array.data.ptr),
        (ctypes.c_uint64 * rank)(*shape),
        (ctypes.c_uint64 * max(1, rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*(1,) * rank),
        *map(ctypes.c_int, (_NO_INTERLEAVE, _SWIZZLE_128B, _PROMOTE_128B, _ZEROS)),
        what=f"shape {tuple(shape)}, strides {tuple(strides)}, box {tuple(box)}",
    )  # fmt: skip
    return np.void(ctypes.string_at(at, _BYTES))
