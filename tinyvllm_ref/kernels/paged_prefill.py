"""Launches ``paged_prefill.cu``: new tokens of several requests over the paged cache."""

from __future__ import annotations

from typing import Any

from .flash_attention import QUERIES
from .launch import Contract, Float, Int, ceil_div
from .source import kernel

_contract = Contract(
    "paged_prefill",
    q="float32 T Hq D",
    key_cache="bf16 NB BS Hk D",
    value_cache="bf16 NB BS Hk D",
    block_tables="int32 B M",
    query_starts="int32 S",
    context_lens="int32 B",
    out="bf16 T Hq D",
)


def paged_prefill(
    q: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    query_starts: Any,
    context_lens: Any,
    max_queries: int,
    scale: float,
    out: Any,
) -> Any:
    """Causal attention of the last tokens of each request over its keys in the cache.

    Parameters
    ----------
    q : (T, Hq, D) float32
    key_cache, value_cache : (NB, BS, Hk, D) bf16
        The new tokens are in it.
    block_tables : (B, max_blocks) int32
        Padded with -1.
    query_starts : (B + 1,) int32
        Request b has rows query_starts[b] to query_starts[b + 1] - 1 of q, the last tokens of its context.
        Rows of q that no request has are left alone in out.
    context_lens : (B,) int32
        Tokens of each request, the new ones included.
    max_queries : int
        The most rows that one request has.
    scale : float
        Multiplies the scores.
    out : (T, Hq, D) bf16

    Returns
    -------
    out
        Equal to the bit to :func:`~tinyvllm_ref.kernels.flash_attention.flash_attention` on gathered keys,
        and in the emulation to :func:`~tinyvllm_ref.kernels.paged_attention.paged_attention`.

    Raises
    ------
    ValueError
        A shape, dtype or layout is wrong, or Hk does not divide Hq.
    """
    sizes = _contract(q, key_cache, value_cache, block_tables, query_starts, context_lens, out)
    requests, q_heads, kv_heads, head_dim = sizes["B"], sizes["Hq"], sizes["Hk"], sizes["D"]
    _contract.check_heads(q_heads, kv_heads)
    starts = sizes["S"]
    _contract.check("the length of query_starts", starts, starts == requests + 1, f"B + 1 = {requests + 1}")
    if head_dim % 8 == 0:
        _contract.check_aligned(key_cache=key_cache, value_cache=value_cache)
    if requests and sizes["T"] and max_queries > 0 and q_heads and head_dim:
        args = (
            *(q, key_cache, value_cache, block_tables, query_starts, context_lens, out, Float(scale)),
            *(Int(sizes["M"]), Int(sizes["BS"]), Int(q_heads), Int(kv_heads)),
        )
        grid = (ceil_div(max_queries, QUERIES), q_heads, requests)
        kernel("paged_prefill", HEAD_DIM=head_dim)(grid, (QUERIES,), args)
    return out
