"""Launches ``linear.cu``: the matrix product without cuBLAS. The engine's own choice is in ``blas.py``."""

from __future__ import annotations

from typing import Any

from .launch import MAX_GRID_Y, Contract, Int, ceil_div
from .source import kernel

_OUTPUTS, _ROWS = 64, 4
LINEAR = Contract("linear", x="bf16 T K", w="bf16 N K", out="float32 T N")


def linear_kernel(x: Any, w: Any, out: Any) -> Any:
    """x w^T by a kernel of our own.

    Parameters
    ----------
    x : (T, K) bf16
    w : (N, K) bf16
        As checkpoints store it: a row an output.
    out : (T, N) float32

    Returns
    -------
    out

    Raises
    ------
    ValueError
        A shape, dtype or layout is wrong.
    """
    sizes = LINEAR(x, w, out)
    tokens, outputs, depth = sizes["T"], sizes["N"], sizes["K"]
    if tokens and outputs:
        rows = 4 if tokens <= 4 else 16 if tokens <= 64 else 64
        grid = (ceil_div(outputs, _OUTPUTS), min(MAX_GRID_Y, ceil_div(tokens, rows)))
        args = (x, w, out, Int(tokens), Int(outputs), Int(depth))
        kernel("linear", TOKENS=rows)(grid, (_OUTPUTS, _ROWS), args)
    return out
