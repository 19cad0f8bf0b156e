"""Launches ``add_rms_norm.cu``: the residual connection and the norm after it."""

from __future__ import annotations

from typing import Any

from .launch import Contract, Float, Int, row_threads
from .source import kernel, summing_threads

_contract = Contract("add_rms_norm", x="float32 T H", residual="float32 T H", weight="bf16 H", out="bf16 T H")


def add_rms_norm(x: Any, residual: Any, weight: Any, eps: float, out: Any) -> Any:
    """Add x to the residual stream in place, and normalise the sum.

    Parameters
    ----------
    x : (T, H) float32
        What a block of the layer gave.
    residual : (T, H) float32
        Becomes residual + x.
    weight : (H,) bf16
    eps : float
        Added to the mean square, inside the root.
    out : (T, H) bf16
        The norm of the new residual.

    Returns
    -------
    out

    Raises
    ------
    ValueError
        A shape, dtype or layout is wrong.
    """
    sizes = _contract(x, residual, weight, out)
    tokens, hidden = sizes["T"], sizes["H"]
    if tokens and hidden:
        threads = summing_threads(row_threads(hidden, 16))
        args = (x, residual, weight, out, Int(hidden), Float(eps))
        kernel("add_rms_norm")((tokens,), (threads,), args, shared_mem=4 * threads)
    return out
