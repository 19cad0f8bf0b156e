"""Launches ``warpgroup_linear.cu``: products of up to 128 rows with a large matrix, by Hopper's warpgroups.

They give what :class:`~tinyvllm_ref.capturable_blas.Products` and ``silu_mul_rows`` after it give, up to the order of
the additions. None allocates or waits, so that a CUDA graph can hold them. On a card a kernel may come onto it while
the one before it ends (:mod:`tinyvllm_ref.dependent_launch`); that one must not write the matrix.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dependent_launch import launch_dependent
from ..device import cp, is_gpu
from ..tensor_map import COLUMNS, tensor_map
from .launch import Contract, Int, ceil_div, multiprocessors
from .source import kernel

MOST_ROWS = 128
"""Rows of x, at most."""
_HOPPER = 90
_TILE, _THREADS = 128, 288
_SHARED_BYTES = 200 << 10  # of the ring, at most
_WELL_FILLED = 0.9
_EMULATED_BLOCKS = 2  # so few that a block has several tiles

_linear = Contract("warpgroup_linear", x="bf16 R K", w="bf16 N K", out="float32 R N")
_gate_up = Contract("warpgroup_gate_up", x="bf16 R K", w="bf16 G K", out="bf16 R F")


def unsupported(rows: int, outputs: int, columns: int) -> str:
    """Why there is no kernel for sizes like these, or none on this device; "" where there is one.

    Parameters
    ----------
    rows, outputs, columns : int
        R, N (of gate and up F) and K.
    """
    if is_gpu and int(cp.cuda.Device().compute_capability) != _HOPPER:
        return f"compute capability is {cp.cuda.Device().compute_capability}; products by warpgroups need 90"
    if not 0 <= rows <= MOST_ROWS:
        return f"x has {rows} rows; it must have at most {MOST_ROWS}"
    if columns % 8 or not columns:
        return f"x has {columns} columns; their number must be a multiple of 8, and not 0"
    if outputs % 8:
        return f"there are {outputs} outputs; their number must be a multiple of 8"
    return ""


def pays(rows: int, outputs: int, columns: int, *, gate: bool = False) -> bool:
    """Whether a product is sooner done here than by cuBLAS, which shares out small matrices better.

    Parameters
    ----------
    rows, outputs, columns : int
        R, N (of gate and up F) and K.
    gate : bool
        Whether it is that of :func:`warpgroup_gate_up`.

    Returns
    -------
    bool
        True where the tiles of w keep all multiprocessors busy to the end, or nearly (benchmarks/decode_ladder.md);
        never in the emulation.
    """
    if not is_gpu or not outputs or unsupported(rows, outputs, columns):
        return False
    tiles, blocks = _tiles(outputs, gate), multiprocessors(_EMULATED_BLOCKS)
    return tiles >= _WELL_FILLED * blocks * ceil_div(tiles, blocks)


def warpgroup_linear(x: Any, w: Any, out: Any) -> Any:
    """out = x w^T.

    Parameters
    ----------
    x : (R, K) bf16
        R is 128 or less, K a multiple of 8.
    w : (N, K) bf16
        As checkpoints store it: a row an output. N is a multiple of 8.
    out : (R, N) float32

    Returns
    -------
    out
        A row has the same bits whatever is computed beside it.

    Raises
    ------
    ValueError
        A shape, dtype, layout or alignment is wrong, or there is no kernel for the size or the device.
    """
    sizes = _linear(x, w, out)
    _launch(_linear, x, w, out, (sizes["R"], sizes["N"], sizes["K"]))
    return out


def warpgroup_gate_up(x: Any, w: Any, out: Any) -> Any:
    """out = silu(gate) * up, where gate and up are the two halves of x w^T.

    Parameters
    ----------
    x : (R, K) bf16
        R is 128 or less, K a multiple of 8.
    w : (2F, K) bf16
        The rows 0 to F - 1 give the gate, the others up. F is a multiple of 8.
    out : (R, F) bf16

    Returns
    -------
    out
        A row has the same bits whatever is computed beside it.

    Raises
    ------
    ValueError
        A shape, dtype, layout or alignment is wrong, or there is no kernel for the size or the device.
    """
    sizes = _gate_up(x, w, out)
    ffn = sizes["F"]
    _gate_up.check("the height of w", sizes["G"], sizes["G"] == 2 * ffn, f"2F = {2 * ffn}, as out has F")
    _launch(_gate_up, x, w, out, (sizes["R"], ffn, sizes["K"]), gate=True)
    return out


# ---------------- launches
def _launch(
    contract: Contract, x: Any, w: Any, out: Any, sizes: tuple[int, int, int], *, gate: bool = False
) -> None:
    rows, outputs, columns = sizes
    reason = unsupported(rows, outputs, columns)
    if reason:
        raise ValueError(f"{contract.function}: {reason}")
    contract.check_aligned(x=x, w=w, out=out)
    if not rows or not outputs:
        return
    padded = 64 if rows <= 64 else MOST_ROWS
    stage = 2 * COLUMNS * (_TILE + padded)
    stages = _SHARED_BYTES // stage if is_gpu else 1
    shared = stages * (stage + 16)  # two barriers each
    target = "sm_90a" if is_gpu else ""
    made = kernel("warpgroup_linear", target=target, ROWS=padded, STAGES=stages, GATE=int(gate))
    if made.max_dynamic_shared_size_bytes < shared:
        made.max_dynamic_shared_size_bytes = shared
    sources = (x, w)
    if is_gpu:
        sources = (_map_of_rows(x, padded), _map_of_halves(w) if gate else _map_of_rows(w, _TILE))
    args = (*sources, out, Int(rows), Int(outputs), Int(columns))
    blocks = min(_tiles(outputs, gate), multiprocessors(_EMULATED_BLOCKS))
    launch_dependent(made, (blocks,), (_THREADS,), args, shared)


def _tiles(outputs: int, gate: bool) -> int:
    return ceil_div(outputs, _TILE // 2 if gate else _TILE)


def _map_of_rows(array: Any, rows: int) -> np.void:
    """Of a matrix, so many rows a tile."""
    height, width = array.shape
    return tensor_map(array, (width, height), (2 * width,), (COLUMNS, rows))


def _map_of_halves(w: Any) -> np.void:
    """Of gate and up: a tile has eight rows of the one, eight of the other, and so on."""
    height, width = w.shape
    ffn = height // 2
    strides = (2 * width, 2 * width * ffn, 2 * width * 8)
    return tensor_map(w, (width, 8, 2, ffn // 8), strides, (COLUMNS, 8, 2, _TILE // 16))
