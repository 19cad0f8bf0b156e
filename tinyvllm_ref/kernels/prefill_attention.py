"""Launches ``prefill_attention.cu``: new tokens of several requests over the paged cache, on tensor cores."""

from __future__ import annotations

import functools
from typing import Any

from ..device import cp, is_gpu
from .launch import Contract, Float, Int, ceil_div
from .source import kernel

THREADS, WARPS, KEYS = 128, 4, 64
_STEP = 16  # columns of a query in one step of a matrix product
_LARGEST_HEAD_DIM = 128
_ENOUGH_BLOCKS = 256  # two for each multiprocessor of a large card
_MAX_SHARED_PER_BLOCK = 97  # cudaDevAttrMaxSharedMemoryPerBlockOptin

_contract = Contract(
    "prefill_attention",
    q="float32 T Hq D",
    key_cache="bf16 NB BS Hk D",
    value_cache="bf16 NB BS Hk D",
    block_tables="int32 B M",
    query_starts="int32 S",
    context_lens="int32 B",
    out="bf16 T Hq D",
)


def supports(head_dim: int) -> bool:
    """Whether :func:`prefill_attention` takes heads of this size, and the card multiplies bf16 matrices.

    Where it does not, :func:`~tinyvllm_ref.kernels.paged_prefill.paged_prefill` does the same.
    """
    fits = head_dim % _STEP == 0 and _STEP <= head_dim <= _LARGEST_HEAD_DIM
    return fits and (not is_gpu or int(cp.cuda.Device().compute_capability) >= 80)


def shared_bytes(head_dim: int, row_tiles: int) -> int:
    """Shared memory of a block: two tiles of keys and values, their slots, and queries that registers can not hold."""
    tiles = 2 * 2 * KEYS * (head_dim + 8) * 2 + 2 * KEYS * 4
    return tiles + (row_tiles * head_dim > 128) * row_tiles * head_dim // 16 * THREADS * 16


def prefill_attention(
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
        Rounded to bf16. D is a multiple of 16, at most 128: see :func:`supports`.
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
        Multiplies the scores; positive.
    out : (T, Hq, D) bf16

    Returns
    -------
    out
        That of :func:`~tinyvllm_ref.kernels.paged_prefill.paged_prefill`, but for the rounding of the queries
        and the weights to bf16. A token's row is the same to the bit whatever is computed beside it, and
        whether its prompt came whole or in chunks.

    Raises
    ------
    ValueError
        A shape, dtype or layout is wrong, Hk does not divide Hq, or D or the scale is none that it takes.
    """
    sizes = _contract(q, key_cache, value_cache, block_tables, query_starts, context_lens, out)
    requests, q_heads, kv_heads, head_dim = sizes["B"], sizes["Hq"], sizes["Hk"], sizes["D"]
    _contract.check_heads(q_heads, kv_heads)
    fits = head_dim % _STEP == 0 and _STEP <= head_dim <= _LARGEST_HEAD_DIM
    _contract.check("head_dim", head_dim, fits, f"a multiple of {_STEP}, at most {_LARGEST_HEAD_DIM}")
    _contract.check("scale", scale, scale > 0, "positive")
    starts = sizes["S"]
    _contract.check("the length of query_starts", starts, starts == requests + 1, f"B + 1 = {requests + 1}")
    _contract.check_aligned(q=q, key_cache=key_cache, value_cache=value_cache, out=out)
    if requests and sizes["T"] and sizes["BS"] and max_queries > 0 and q_heads:
        group, block_size = q_heads // kv_heads, sizes["BS"]
        args = (
            *(q, key_cache, value_cache, block_tables, query_starts, context_lens, out, Float(scale)),
            *(Int(sizes["M"]), Int(block_size), Int(KEYS // block_size), Int(kv_heads), Int(group)),
        )
        row_tiles = _row_tiles(head_dim, max_queries * group, kv_heads * requests)
        function, shared = _function(head_dim, row_tiles), shared_bytes(head_dim, row_tiles)
        grid = (kv_heads, ceil_div(max_queries * group, 16 * row_tiles * WARPS), requests)
        function(grid, (THREADS,), args, shared_mem=shared)
    return out


def _row_tiles(head_dim: int, rows: int, sequences: int) -> int:
    """16-row matrices of a warp: two, so that a key in registers serves 32 rows; else one.

    One where blocks would be few, or larger than the card's shared memory.
    """
    enough = ceil_div(rows, 2 * 16 * WARPS) * sequences >= _ENOUGH_BLOCKS
    return 2 if enough and shared_bytes(head_dim, 2) <= _shared_limit() else 1


def _shared_limit() -> int:
    """Bytes of shared memory that a block may have: 227 KB on an H100, 99 KB on an RTX 4090."""
    return _limit_of(cp.cuda.Device().id) if is_gpu else 227 * 1024


@functools.cache
def _limit_of(device: int) -> int:
    return int(cp.cuda.runtime.deviceGetAttribute(_MAX_SHARED_PER_BLOCK, device))


def _function(head_dim: int, row_tiles: int) -> Any:
    function = kernel("prefill_attention", HEAD_DIM=head_dim, ROW_TILES=row_tiles)
    shared = shared_bytes(head_dim, row_tiles)
    if function.max_dynamic_shared_size_bytes < shared:
        function.max_dynamic_shared_size_bytes = shared
    return function
