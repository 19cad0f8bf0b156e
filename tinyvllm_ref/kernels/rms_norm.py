"""Launches ``rms_norm.cu``: the normalisation in front of every block of a layer."""

from __future__ import annotations

from typing import Any

from .launch import Contract, Float, Int, row_threads
from .source import kernel, summing_threads

_contract = Contract("rms_norm", x="float32 T H", weight="bf16 H", out="bf16 T H")


def rms_norm(x: Any, weight: Any, eps: float, out: Any) -> Any:
    """Normalise rows by their root mean square (Zhang and Sennrich, 2019).

    Parameters
    ----------
    x : (T, H) float32
    weight : (H,) bf16
    eps : float
        Added to the mean square, inside the root.
    out : (T, H) bf16

    Returns
    -------
    out

    Raises
    ------
    ValueError
        A shape, dtype or layout is wrong.
    """
    sizes = _contract(x, weight, out)
    tokens, hidden = sizes["T"], sizes["H"]
    if tokens and hidden:
        threads = summing_threads(row_threads(hidden, 16))
        args = (x, weight, out, Int(hidden), Float(eps))
        kernel("rms_norm")((tokens,), (threads,), args, shared_mem=4 * threads)
    return out
