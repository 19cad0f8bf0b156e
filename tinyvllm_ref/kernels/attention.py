"""Launches ``attention.cu``: attention with all scores in memory; ``flash_attention.py`` is for more."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..device import cp
from .launch import Contract, Float, Int
from .source import kernel

_THREADS = 64


class AttentionContract(Contract):
    """What the functions with the contract of `attention` check."""

    def __init__(self, function: str) -> None:
        super().__init__(function, q="float32 n Hq D", k="bf16 m Hk D", v="bf16 m Hk D", out="bf16 n Hq D")

    def __call__(self, *arrays: Any, **sizes: int) -> dict[str, int]:
        sizes = super().__call__(*arrays, **sizes)
        self.check_heads(sizes["Hq"], sizes["Hk"])
        n, m = sizes["n"], sizes["m"]
        self.check("the number of queries", n, n <= m, f"at most that of the keys, {m}")
        return sizes


_contract = AttentionContract("attention")


def attention(q: Any, k: Any, v: Any, scale: float, out: Any) -> Any:
    """Causal attention of the last n of m tokens of one request.

    Parameters
    ----------
    q : (n, Hq, D) float32
        Query i sees keys 0 to m - n + i.
    k, v : (m, Hk, D) bf16
        Query head h reads KV head h // (Hq // Hk).
    scale : float
        Multiplies the scores, mostly D ** -0.5.
    out : (n, Hq, D) bf16

    Returns
    -------
    out

    Raises
    ------
    ValueError
        A shape, dtype or layout is wrong, Hk does not divide Hq, or n > m.

    Notes
    -----
    Takes n * Hq * m * 4 bytes of memory while it runs.
    """
    sizes = _contract(q, k, v, out)
    n, m, q_heads, head_dim = sizes["n"], sizes["m"], sizes["Hq"], sizes["D"]
    if n and q_heads and head_dim:
        scores = cp.empty((n, q_heads, m), np.float32)
        args = (q, k, v, scores, out, Float(scale), Int(n), Int(m), Int(sizes["Hk"]), Int(head_dim))
        kernel("attention")((n, q_heads), (_THREADS,), args, shared_mem=4 * _THREADS)
    return out
