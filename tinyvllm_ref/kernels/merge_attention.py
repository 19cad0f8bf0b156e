"""Launches ``merge_attention.cu``: attention over two sets of keys, merged."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..device import cp
from .launch import Contract, Int
from .source import kernel

_contract = Contract(
    "merge_attention", out_a="float32 R D", lse_a="float32 R", out_b="float32 R D", lse_b="float32 R"
)
_THREADS = 32


def merge_attention(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """Merge two partial results of attention over different keys.

    Parameters
    ----------
    out_a, out_b : (..., D) float32
        Weighted means of the values.
    lse_a, lse_b : (...) float32
        Logarithm of the sum of exp(score) of their keys; -infinity where there was none, and then the other
        side is the result.

    Returns
    -------
    out : (..., D) float32
    lse : (...) float32

    Raises
    ------
    ValueError
        A shape, dtype or layout is wrong.
    """
    for name, array, right in (
        ("lse_a", lse_a, out_a.shape[:-1]),
        ("out_b", out_b, out_a.shape),
        ("lse_b", lse_b, out_a.shape[:-1]),
    ):
        _contract.check(
            f"{name}'s shape", array.shape, array.shape == right, f"{right}, as out_a has {out_a.shape}"
        )
    for name, array in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        _contract.check(f"{name}'s strides", array.strides, array.flags.c_contiguous, "C-contiguous")
    width = out_a.shape[-1]
    flat = [a.reshape((-1, width) if a.ndim == out_a.ndim else -1) for a in (out_a, lse_a, out_b, lse_b)]
    rows = _contract(*flat)["R"]
    out, lse = cp.empty(out_a.shape, np.float32), cp.empty(lse_a.shape, np.float32)
    if rows:
        kernel("merge_attention")((rows,), (_THREADS,), (out_a, lse_a, out_b, lse_b, out, lse, Int(width)))
    return out, lse
