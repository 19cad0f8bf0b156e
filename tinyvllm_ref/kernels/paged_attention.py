"""Launches ``paged_attention.cu``: the attention of a decode step over the paged cache."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..device import cp
from .launch import Contract, Float, Int, ceil_div
from .source import kernel

TILE, SPLIT = 64, 256  # of attention.cuh
_MAX_HEADS, _SHARED_BYTES = 8, 40960

_contract = Contract(
    "paged_attention",
    q="float32 B Hq D",
    key_cache="bf16 NB BS Hk D",
    value_cache="bf16 NB BS Hk D",
    block_tables="int32 B M",
    context_lens="int32 B",
    out="bf16 B Hq D",
)


@functools.cache
def heads_per_block(group: int, head_dim: int) -> int:
    """How many of the `group` query heads of a KV head one block works on: a divisor of `group`."""
    fits = [
        heads
        for heads in range(1, _MAX_HEADS + 1)
        if group % heads == 0 and 4 * heads * (head_dim + TILE) <= _SHARED_BYTES
    ]
    return max(fits, default=1)


def paged_attention(
    q: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    context_lens: Any,
    scale: float,
    out: Any,
) -> Any:
    """Attention of one query a request over its keys in the cache.

    Parameters
    ----------
    q : (B, Hq, D) float32
    key_cache, value_cache : (NB, BS, Hk, D) bf16
        The new token is in it.
    block_tables : (B, max_blocks) int32
        Padded with -1. Its width says how many splits are launched: keep it to the longest of the batch.
    context_lens : (B,) int32
        The new token included; 0 gives zeros.
    scale : float
        Multiplies the scores, mostly D ** -0.5.
    out : (B, Hq, D) bf16

    Returns
    -------
    out

    Raises
    ------
    ValueError
        A shape, dtype or layout is wrong, or Hk does not divide Hq.

    Notes
    -----
    Keys come in splits of 256, worked on in parallel and merged in their order, so that a request's result
    does not depend on the others. Kwon and others (2023) for the paging, Flash-Decoding (Dao and others,
    2023) for the splits.
    """
    sizes = _contract(q, key_cache, value_cache, block_tables, context_lens, out)
    requests, q_heads, kv_heads, head_dim = sizes["B"], sizes["Hq"], sizes["Hk"], sizes["D"]
    _contract.check_heads(q_heads, kv_heads)
    if head_dim % 2 == 0:
        _contract.check_aligned(key_cache=key_cache, value_cache=value_cache)
    if not (requests and q_heads and head_dim):
        return out
    splits = max(1, ceil_div(sizes["M"] * sizes["BS"], SPLIT))
    heads = heads_per_block(q_heads // kv_heads, head_dim)
    partial = lse = None  # one split writes the result itself
    if splits > 1:
        partial = cp.empty((requests, q_heads, splits, head_dim), np.float32)
        lse = cp.empty((requests, q_heads, splits), np.float32)
    args = (
        *(q, key_cache, value_cache, block_tables, context_lens, out, partial, lse, Float(scale)),
        *(Int(sizes["M"]), Int(sizes["BS"]), Int(q_heads), Int(kv_heads)),
    )
    grid = (splits, q_heads // heads, requests)
    kernel("paged_attention", HEAD_DIM=head_dim, HEADS=heads)(grid, (TILE,), args)
    if splits > 1:
        merge = kernel("paged_attention", "merge_splits", HEAD_DIM=head_dim, HEADS=heads)
        merge((q_heads, requests), (TILE,), (partial, lse, context_lens, out, Int(splits)))
    return out
