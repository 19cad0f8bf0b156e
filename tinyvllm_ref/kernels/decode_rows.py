"""Launches ``decode_rows.cu``: the small steps between the products of a decode step.

Each gives what the simple kernel of the same step gives, up to the order of the additions: ``embedding.cu`` with
``rms_norm.cu``, ``add_rms_norm.cu``, ``silu_mul.cu``, ``argmax.cu``. None allocates or waits, so that a CUDA graph
can hold them; with ``dependent=True`` a kernel may come onto the card while the one before it ends
(:mod:`tinyvllm_ref.dependent_launch`), for which the weights and the table must not be written by that one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dependent_launch import launch
from ..device import is_gpu
from .launch import MAX_GRID_Y, Contract, Float, Int, ceil_div
from .source import kernel

_embed_norm = Contract(
    "embed_norm",
    ids="int32 T",
    table="bf16 V H",
    weight="bf16 H",
    residual="float32 T H",
    out="bf16 T H",
)
_norm_rows = Contract("norm_rows", residual="float32 T H", weight="bf16 H", out="bf16 T H")
_add_norm_rows = Contract(
    "add_norm_rows", x="float32 T H", residual="float32 T H", weight="bf16 H", out="bf16 T H"
)
_silu_mul = {
    kind: Contract("silu_mul_rows", gate_up=f"{kind} T G", out="bf16 T F") for kind in ("float32", "bf16")
}
_argmax = Contract("argmax_rows", logits="float32 R V", out="int32 R", scratch="uint64 R P")

_WIDTH = 8  # columns that a thread takes at once: 16 bytes of bfloat16
_WARP = 32
_MOST_THREADS = 512 if is_gpu else _WARP  # fibers are slow, and shuffles need a whole warp
_SILU_THREADS = 256 if is_gpu else _WARP
_ARGMAX_THREADS = 256 if is_gpu else _WARP
ARGMAX_PART = 2048
"""Columns of a row of logits that one block looks at."""


def embed_norm(
    ids: Any, table: Any, weight: Any, eps: float, residual: Any, out: Any, *, dependent: bool = False
) -> Any:
    """Begin the residual stream with the embeddings of tokens, and normalise it.

    Parameters
    ----------
    ids : (T,) int32
        An id outside of 0 to V - 1 gives rows of NaN.
    table : (V, H) bf16
    weight : (H,) bf16
    eps : float
        Added to the mean square, inside the root.
    residual : (T, H) float32
        Becomes the rows of the table.
    out : (T, H) bf16
        Their norm.
    dependent : bool
        Let the kernel start before the one before it is done.

    Returns
    -------
    out

    Raises
    ------
    ValueError
        A shape, dtype, layout or alignment is wrong, or H is no multiple of 8.
    """
    sizes = _embed_norm(ids, table, weight, residual, out)
    _embed_norm.check_aligned(table=table, weight=weight, residual=residual, out=out)
    vocab = sizes["V"]
    _embed_norm.check("the height of table", vocab, vocab > 0, "at least 1")
    _norm_launch(_embed_norm, sizes, (ids, table, weight, residual, out, Int(vocab)), eps, dependent)
    return out


def norm_rows(residual: Any, weight: Any, eps: float, out: Any, *, dependent: bool = False) -> Any:
    """Normalise the residual stream, to which the product before it has added already.

    Parameters
    ----------
    residual : (T, H) float32
    weight : (H,) bf16
    eps : float
        Added to the mean square, inside the root.
    out : (T, H) bf16
    dependent : bool
        Let the kernel start before the one before it is done.

    Returns
    -------
    out

    Raises
    ------
    ValueError
        A shape, dtype, layout or alignment is wrong, or H is no multiple of 8.
    """
    sizes = _norm_rows(residual, weight, out)
    _norm_rows.check_aligned(residual=residual, weight=weight, out=out)
    _norm_launch(_norm_rows, sizes, (residual, weight, out), eps, dependent)
    return out


def add_norm_rows(
    x: Any, residual: Any, weight: Any, eps: float, out: Any, *, dependent: bool = False
) -> Any:
    """Add x to the residual stream in place, and normalise the sum.

    Parameters
    ----------
    x : (T, H) float32
    residual : (T, H) float32
        Becomes residual + x.
    weight : (H,) bf16
    eps : float
        Added to the mean square, inside the root.
    out : (T, H) bf16
        The norm of the new residual.
    dependent : bool
        Let the kernel start before the one before it is done.

    Returns
    -------
    out

    Raises
    ------
    ValueError
        A shape, dtype, layout or alignment is wrong, or H is no multiple of 8.
    """
    sizes = _add_norm_rows(x, residual, weight, out)
    _add_norm_rows.check_aligned(x=x, residual=residual, weight=weight, out=out)
    _norm_launch(_add_norm_rows, sizes, (x, residual, weight, out), eps, dependent)
    return out


def silu_mul_rows(gate_up: Any, out: Any, *, dependent: bool = False) -> Any:
    """silu(gate) * up, to the bit as :func:`~tinyvllm_ref.kernels.silu_mul.silu_mul` of the same numbers.

    Parameters
    ----------
    gate_up : (T, 2F) float32 or bf16 (uint16)
        Columns 0 to F - 1 are the gate, the rest is up.
    out : (T, F) bf16
    dependent : bool
        Let the kernel start before the one before it is done.

    Returns
    -------
    out

    Raises
    ------
    ValueError
        A shape, dtype, layout or alignment is wrong, F is no multiple of 8, or T is above 65,535.
    """
    rounded = getattr(gate_up, "dtype", None) == np.uint16
    contract = _silu_mul["bf16" if rounded else "float32"]
    sizes = contract(gate_up, out)
    tokens, ffn = sizes["T"], sizes["F"]
    contract.check("the width of gate_up", sizes["G"], sizes["G"] == 2 * ffn, f"2F = {2 * ffn}, as out has F")
    _check_width(contract, ffn)
    contract.check("the number of rows", tokens, tokens <= MAX_GRID_Y, f"at most {MAX_GRID_Y}")
    contract.check_aligned(gate_up=gate_up, out=out)
    if tokens and ffn:
        threads = min(_SILU_THREADS, _whole_warps(ffn // _WIDTH))
        grid = (ceil_div(ffn, _WIDTH * threads), tokens)
        entry = f"silu_mul_rows_{'bf16' if rounded else 'float'}"
        made = kernel("decode_rows", entry)
        launch(made, grid, (threads,), (gate_up, out, Int(ffn)), dependent=dependent)
    return out


def argmax_scratch(rows: int, vocab: int) -> tuple[int, int]:
    """The shape of the scratch of :func:`argmax_rows`, (R, P) uint64.

    Parameters
    ----------
    rows, vocab : int
        R and V.

    Returns
    -------
    tuple of int
        Its first r rows are the scratch of r rows.
    """
    return rows, ceil_div(vocab, ARGMAX_PART)


def argmax_rows(logits: Any, out: Any, scratch: Any, *, dependent: bool = False) -> Any:
    """The index of the largest logit of each row.

    Parameters
    ----------
    logits : (R, V) float32
    out : (R,) int32
        The lowest index on ties; the first NaN where there is one, as ``numpy.argmax``.
    scratch : (R, P) uint64
        Of the shape ``argmax_scratch(R, V)``; what is in it is lost.
    dependent : bool
        Let the kernels start before the one before them is done.

    Returns
    -------
    out

    Raises
    ------
    ValueError
        A shape, dtype, layout or alignment is wrong, V is 0, or R is above 65,535.
    """
    sizes = _argmax(logits, out, scratch)
    rows, vocab, parts = sizes["R"], sizes["V"], sizes["P"]
    _argmax.check("the width of logits", vocab, vocab > 0, "at least 1")
    right = argmax_scratch(rows, vocab)
    _argmax.check("the shape of scratch", scratch.shape, scratch.shape == right, f"{right}")
    _argmax.check("the number of rows", rows, rows <= MAX_GRID_Y, f"at most {MAX_GRID_Y}")
    if vocab % 4 == 0:
        _argmax.check_aligned(logits=logits)
    if rows:
        first = kernel("decode_rows", "argmax_rows_parts", PART=ARGMAX_PART)
        args = (logits, scratch, Int(vocab))
        launch(first, (parts, rows), (_ARGMAX_THREADS,), args, dependent=dependent)
        merge = kernel("decode_rows", "argmax_rows_merge")
        launch(merge, (rows,), (_WARP,), (scratch, out, Int(parts)), dependent=dependent)
    return out


# ---------------- launches
def _check_width(contract: Contract, width: int) -> None:
    contract.check("the width of out", width, width % _WIDTH == 0, f"a multiple of {_WIDTH}")


def _whole_warps(threads: int) -> int:
    return ceil_div(threads, _WARP) * _WARP


def _norm_launch(
    contract: Contract, sizes: dict[str, int], args: tuple[Any, ...], eps: float, dependent: bool
) -> None:
    """The kernel of the contract's name; block and registers depend on H alone, and so does the order of sums."""
    tokens, hidden = sizes["T"], sizes["H"]
    _check_width(contract, hidden)
    if tokens and hidden:
        vectors = hidden // _WIDTH
        threads = min(_MOST_THREADS, _whole_warps(vectors))
        made = kernel("decode_rows", contract.function, PER_THREAD=ceil_div(vectors, threads))
        launch(made, (tokens,), (threads,), (*args, Int(hidden), Float(eps)), dependent=dependent)
