"""Launches ``skinny_linear.cu``: products of 1 to 32 rows with a large matrix, bound by reading that matrix.

They give what :class:`~tinyvllm_ref.capturable_blas.Products` and the row kernels beside it (``decode_rows.cu``) give,
up to the order of the additions. None allocates or waits, so that a CUDA graph can hold them; with ``dependent=True``
a kernel may come onto the card while the one before it ends (:mod:`tinyvllm_ref.dependent_launch`), for which that one
must not write the matrix or the norm's weight.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..dependent_launch import launch
from ..device import cp, is_gpu
from .launch import Contract, Float, Int, ceil_div, multiprocessors
from .source import kernel

MOST_ROWS = 32
"""Rows of x, at most."""
MOST_NORM_ROWS = 8
"""The same with a norm; of more rows a launch before the product is sooner."""
MOST_COLUMNS = 2048
"""Columns that a block keeps of x; wider matrices are shared out, but for those that are multiplied with a norm."""

_TILE, _CHUNK = 8, 64  # rows of w, and columns
_MOST_WARPS = 8 if is_gpu else 2  # fibers are slow
# Tiles in the ring. A step of 8 requests took 895 us on an H200 with two, 933 with three: what kernels read from each
# other waits behind what is on its way.
_STAGES = 2
_EMULATED_BLOCKS = 3  # a few, so that they get unequal shares
# Whether the emulation takes the path of cards that have a copy engine, as some tests do, or that of others.
_EMULATED_COPIES = False
_MAX_SHARED_PER_BLOCK = 97  # cudaDevAttrMaxSharedMemoryPerBlockOptin
_STATIC_BYTES = 2048  # more than the kernel lays out itself
_MOST_FOUND = 16 << 10  # bytes of sums that a block keeps for others of its cluster

_linear = {
    kind: Contract("skinny_linear", x=f"{kind} R K", w="bf16 N K", out="float32 R N")
    for kind in ("bf16", "float32")
}
_gate_up = {
    kind: Contract("skinny_gate_up", x=f"{kind} R K", w="bf16 G K", out="bf16 R F")
    for kind in ("bf16", "float32")
}


class Norm(NamedTuple):
    """The norm of the residual stream that a product takes in place of x.

    Attributes
    ----------
    weight : (K,) bf16
    eps : float
        Added to the mean square, inside the root.
    """

    weight: Any
    eps: float


def unsupported(rows: int, columns: int, norm: bool = False) -> str:
    """Why there is no kernel for rows of this number and width; "" where there is one.

    Parameters
    ----------
    rows, columns : int
        R and K.
    norm : bool
        Whether x is to be normalised.
    """
    if not 0 <= rows <= MOST_ROWS:
        return f"x has {rows} rows; it must have at most {MOST_ROWS}"
    if norm and rows > MOST_NORM_ROWS:
        return f"x has {rows} rows; for a norm it must have at most {MOST_NORM_ROWS}"
    if columns % 8 or not columns:
        return f"x has {columns} columns; their number must be a multiple of 8, and not 0"
    if norm and columns > MOST_COLUMNS:
        return f"x has {columns} columns; for a norm it must have at most {MOST_COLUMNS}"
    return ""


class SkinnyScratch:
    """Memory in which blocks that share the columns of a matrix add up what they have found.

    One object serves one stream. It is needed by matrices of more than :data:`MOST_COLUMNS` columns, and serves all of
    up to the given size.

    Parameters
    ----------
    rows : int
        R, at most.
    outputs : int
        Rows of w, at most.
    columns : int
        K, at most.
    """

    def __init__(self, rows: int, outputs: int, columns: int) -> None:
        splits = ceil_div(columns, MOST_COLUMNS)
        self.partial = cp.empty(splits * ceil_div(outputs, _TILE) * _TILE * _padded(rows), np.float32)
        self.arrived = cp.zeros(multiprocessors(_EMULATED_BLOCKS), np.uint32)


def skinny_linear(
    x: Any,
    w: Any,
    out: Any,
    scratch: SkinnyScratch | None = None,
    *,
    norm: Norm | None = None,
    accumulate: bool = False,
    dependent: bool = False,
) -> Any:
    """out = x w^T, or out += x w^T, or either with the norm of x in place of x.

    Parameters
    ----------
    x : (R, K) bf16; with a norm float32
        R is 32 or less, K a multiple of 8.
    w : (N, K) bf16
        As checkpoints store it: a row an output.
    out : (R, N) float32
    scratch : SkinnyScratch, optional
        For K above 2,048.
    norm : Norm, optional
        Normalise x first, rounded as :func:`~tinyvllm_ref.kernels.decode_rows.norm_rows` does it. R is 8 or less and K
        2,048 or less: every block does it for itself, which is sooner than a launch before it for few rows only.
    accumulate : bool
        Add to what is in `out`: straight into the residual stream.
    dependent : bool
        Let the kernel start before the one before it is done.

    Returns
    -------
    out
        A row has the same bits whatever is computed beside it.

    Raises
    ------
    ValueError
        A shape, dtype, layout or alignment is wrong, there is no kernel for the size, or the scratch is missing or too
        small.
    """
    contract = _linear["bf16" if norm is None else "float32"]
    sizes = contract(x, w, out)
    _launch(
        contract,
        _Job(x, w, out, sizes["R"], sizes["N"], sizes["K"], norm, accumulate),
        scratch,
        dependent,
    )
    return out


def skinny_gate_up(
    x: Any,
    w: Any,
    out: Any,
    scratch: SkinnyScratch | None = None,
    *,
    norm: Norm | None = None,
    dependent: bool = False,
) -> Any:
    """out = silu(gate) * up, where gate and up are the two halves of x w^T.

    Parameters
    ----------
    x : (R, K) bf16; with a norm float32
        R is 32 or less, K a multiple of 8.
    w : (2F, K) bf16
        The rows 0 to F - 1 give the gate, the others up.
    out : (R, F) bf16
    scratch : SkinnyScratch, optional
        For K above 2,048.
    norm : Norm, optional
        As of :func:`skinny_linear`.
    dependent : bool
        Let the kernel start before the one before it is done.

    Returns
    -------
    out
        A row has the same bits whatever is computed beside it.

    Raises
    ------
    ValueError
        A shape, dtype, layout or alignment is wrong, there is no kernel for the size, or the scratch is missing or too
        small.
    """
    contract = _gate_up["bf16" if norm is None else "float32"]
    sizes = contract(x, w, out)
    ffn = sizes["F"]
    contract.check("the height of w", sizes["G"], sizes["G"] == 2 * ffn, f"2F = {2 * ffn}, as out has F")
    _launch(contract, _Job(x, w, out, sizes["R"], ffn, sizes["K"], norm, gate=True), scratch, dependent)
    return out


# ---------------- launches
@dataclass(frozen=True, slots=True)
class _Job:
    """A product. `outputs` are those of a row of x."""

    x: Any
    w: Any
    out: Any
    rows: int
    outputs: int
    columns: int
    norm: Norm | None = None
    add: bool = False
    gate: bool = False


class _Shape(NamedTuple):
    """How a product is divided. The first three depend on the width of w alone, and so does the order of sums."""

    splits: int
    warps: int
    chunks: int
    blocks: int
    stages: int
    cluster: bool
    shared: int


@functools.cache
def _shape(rows: int, tiles: int, columns: int, most_warps: int) -> _Shape:
    """Of `rows` that are padded already."""
    splits = ceil_div(columns, MOST_COLUMNS)
    each = ceil_div(ceil_div(columns, _CHUNK), splits)  # chunks of a block
    chunks = ceil_div(each, most_warps)
    warps = ceil_div(each, chunks)
    blocks = max(1, min(tiles, multiprocessors(_EMULATED_BLOCKS) // splits))
    tiles_each = ceil_div(tiles, blocks)
    if splits > 1:
        blocks = ceil_div(tiles, tiles_each)
    stage = _TILE * (2 * _CHUNK * chunks * warps + 64)
    found = 4 * tiles_each * _TILE * rows
    cluster = 1 < splits <= _largest_cluster() and found <= _MOST_FOUND and rows <= 16
    sums = 2 * 4 * warps * _TILE * rows + cluster * found
    stages = min(tiles_each, _STAGES, max(1, (_shared_limit() - _STATIC_BYTES - sums) // stage))
    return _Shape(splits, warps, chunks, blocks, stages, cluster, stages * stage + sums)


def _launch(contract: Contract, job: _Job, scratch: SkinnyScratch | None, dependent: bool) -> None:
    _check(contract, job)
    rows, tiles = _padded(job.rows), ceil_div(job.outputs * (1 + job.gate), _TILE)
    shape = _shape(rows, max(1, tiles), job.columns, _MOST_WARPS)
    partial, arrived = _nothing()
    if shape.splits > 1:
        need, has = shape.splits * tiles * _TILE * rows, 0
        if scratch is not None:
            partial, arrived = scratch.partial, scratch.arrived
            has = partial.size
        right = f"at least {need} numbers: SkinnyScratch(R, N, K)"
        contract.check("the scratch's room", has, has >= need, right)
    if not job.rows or not job.outputs:
        return
    made = kernel(
        "skinny_linear",
        ROWS=rows,
        WARPS=shape.warps,
        CHUNKS=shape.chunks,
        STAGES=shape.stages,
        WIDTH=job.columns,
        NORM=int(job.norm is not None),
        GATE=int(job.gate),
        ADD=int(job.add),
        SPLIT=shape.splits,
        CLUSTER=int(shape.cluster),
        EMULATED_BULK_COPY=int(_EMULATED_COPIES),
    )
    if made.max_dynamic_shared_size_bytes < shape.shared:
        made.max_dynamic_shared_size_bytes = shape.shared
    weight, eps = (job.w, 0.0) if job.norm is None else job.norm
    args = (
        *(job.x, job.w, job.out, weight, partial, arrived),
        *(Int(job.rows), Int(job.outputs), Float(eps)),
    )
    grid, block = (shape.blocks, shape.splits), (32 * shape.warps,)
    launch(made, grid, block, args, shape.shared, dependent=dependent)


def _check(contract: Contract, job: _Job) -> None:
    """What shapes alone do not say."""
    reason = unsupported(job.rows, job.columns, job.norm is not None)
    if reason:
        raise ValueError(f"{contract.function}: {reason}")
    contract.check_aligned(x=job.x, w=job.w)
    if job.norm is not None:
        _norm_weights(contract.function)(job.norm.weight, K=job.columns)
        contract.check_aligned(**{"norm.weight": job.norm.weight})


@functools.cache
def _norm_weights(function: str) -> Contract:
    return Contract(function, **{"norm.weight": "bf16 K"})


def _padded(rows: int) -> int:
    """8, 16 or 32."""
    return next(padded for padded in (8, 16, MOST_ROWS) if padded >= min(rows, MOST_ROWS))


@functools.cache
def _nothing() -> tuple[Any, Any]:
    """Stands for the scratch of a product that needs none."""
    return cp.zeros(1, np.float32), cp.zeros(1, np.uint32)


@functools.cache
def _largest_cluster() -> int:
    """Blocks that can read each other's shared memory: eight from compute capability 9.0 on."""
    return 8 if is_gpu and int(cp.cuda.Device().compute_capability) >= 90 else 1


@functools.cache
def _shared_limit() -> int:
    """Bytes that a block may lay out: 227 KB at 9.0, 99 KB at 12.0."""
    if not is_gpu:
        return 96 << 10
    return int(cp.cuda.runtime.deviceGetAttribute(_MAX_SHARED_PER_BLOCK, cp.cuda.Device().id))
