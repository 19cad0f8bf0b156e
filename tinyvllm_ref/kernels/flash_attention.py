"""Launches ``flash_attention.cu``: attention of prompts of any length, with no matrix of scores."""

from __future__ import annotations

from typing import Any

from .attention import AttentionContract
from .launch import Float, Int, ceil_div
from .source import kernel

QUERIES = 64  # of flash.cuh
_contract = AttentionContract("flash_attention")


def flash_attention(q: Any, k: Any, v: Any, scale: float, out: Any) -> Any:
    """Causal attention of the last n of m tokens of one request, with an online softmax over tiles of keys.

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
    Milakov and Gimelshein (2018) for the online softmax, Dao and others (2022) for the tiles. What is
    computed for a query depends on its own keys alone: see ``attention.cuh``.
    """
    sizes = _contract(q, k, v, out)
    n, q_heads, head_dim = sizes["n"], sizes["Hq"], sizes["D"]
    if head_dim % 8 == 0:
        _contract.check_aligned(k=k, v=v)
    if n and q_heads and head_dim:
        args = (q, k, v, out, Float(scale), Int(n), Int(sizes["m"]), Int(q_heads), Int(sizes["Hk"]))
        flash = kernel("flash_attention", HEAD_DIM=head_dim)
        flash((ceil_div(n, QUERIES), q_heads), (QUERIES,), args)
    return out
