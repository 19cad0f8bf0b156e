"""Launches ``decode_attention.cu``: all that a decode step's attention does between two products, in one launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dependent_launch import launch
from ..device import cp, is_gpu
from .launch import Contract, Float, ceil_div
from .source import kernel

MAX_GROUP, MAX_HEAD_DIM = 8, 256
_MULTIPROCESSORS = 132  # of a large card
_BLOCKS = 3 * _MULTIPROCESSORS  # that keep it busy
_MANY_BLOCKS = 512  # from there on small blocks are better: more of them fit on a multiprocessor
_MOST_SPLITS = 64
_SHARED_BYTES = 48 << 10  # that a block may have without asking for more

_contract = Contract(
    "decode_attention",
    qkv="float32 B N",
    key_cache="bf16 NB BS Hk D",
    value_cache="bf16 NB BS Hk D",
    block_tables="int32 B M",
    context_lens="int32 B",
    inv_freq="float32 H",
    out="bf16 B Hq D",
)


def supports(q_heads: int, kv_heads: int, head_dim: int) -> bool:
    """Whether the kernel is made for heads like these."""
    return (
        q_heads % kv_heads == 0
        and q_heads // kv_heads <= MAX_GROUP
        and head_dim % 16 == 0
        and head_dim <= MAX_HEAD_DIM
    )


def attention_floats(warps: int, group: int, head_dim: int) -> int:
    """float32 values of shared memory that a block of so many warps takes: ATTENTION_FLOATS."""
    return warps * group * (head_dim + 2)


def shared_floats(warps: int, group: int, head_dim: int) -> int:
    """float32 values of shared memory that a block of ``decode_attention.cu`` has: also the new token and its turns."""
    return attention_floats(warps, group, head_dim) + (group + 2) * head_dim + head_dim


def chunk_bytes(head_dim: int) -> int:
    """Bytes of the keys and values that a warp looks at at a time: CHUNK_PIECES of 16 bytes for each lane."""
    return (2 * ceil_div(head_dim, 32) + 4 * ceil_div(head_dim, 64)) * 32 * 16


def splits_for(requests: int, kv_heads: int) -> int:
    """Into how many splits the keys of a request are divided at most, so that every multiprocessor has work."""
    return max(1, min(_MOST_SPLITS, _BLOCKS // (requests * kv_heads)))


def _warps(blocks: int, group: int, head_dim: int) -> int:
    """Warps of a block: what was fastest on an H200 (benchmarks/decode_ladder.md); few where fibers are slow."""
    if not is_gpu:
        return 1
    warps = 2 if blocks >= _MANY_BLOCKS else 8
    while 4 * shared_floats(warps, group, head_dim) >= _SHARED_BYTES:  # a flag is there too
        warps //= 2
    return warps


def _chunks_first(requests: int, kv_heads: int, head_dim: int) -> int:
    """Chunks of keys that a warp asks for before the query is there: what was fastest on an H200.

    Many blocks keep the memory busy with one each, and what they wait for, the query, comes sooner.
    """
    return 2 if head_dim <= 64 and requests * kv_heads <= _MULTIPROCESSORS else 1


class DecodeScratch:
    """Memory that launches of :func:`decode_attention` share.

    Parameters
    ----------
    requests, q_heads, kv_heads, head_dim : int
        B, Hq, Hk, D: the most that will be asked for.
    splits : int, optional
        By default what :func:`splits_for` says.
    """

    def __init__(
        self, requests: int, q_heads: int, kv_heads: int, head_dim: int, splits: int | None = None
    ) -> None:
        self.splits = splits or splits_for(requests, kv_heads)
        self.partial = cp.empty((requests, q_heads, self.splits, head_dim), np.float32)
        self.lse = cp.empty((requests, q_heads, self.splits), np.float32)
        self.arrived = cp.zeros((requests, kv_heads), np.uint32)


def decode_attention(
    qkv: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    context_lens: Any,
    inv_freq: Any,
    scale: float,
    out: Any,
    scratch: DecodeScratch,
    *,
    dependent: bool = False,
) -> Any:
    """Turn the new queries and keys, write the new keys and values, and attend, for one token a request.

    Parameters
    ----------
    qkv : (B, (Hq + 2 Hk) D) float32
        The product of the normed stream with the stacked query, key and value weights.
    key_cache, value_cache : (NB, BS, Hk, D) bf16
        Changed at the new tokens' slots.
    block_tables : (B, max_blocks) int32
        Each with a block for the new token.
    context_lens : (B,) int32
        The new token included. 0 pads the batch: nothing is read or written for that request.
    inv_freq : (D/2,) float32
    scale : float
        Multiplies the scores.
    out : (B, Hq, D) bf16
    scratch : DecodeScratch
        For at least B requests; not to be shared by launches that may run at the same time.
    dependent : bool
        Let the kernel start before the one before it is done, and read all but `qkv` until then: so the rest must have
        been written before a kernel that lets others start only after it has waited, or that was launched in the
        ordinary way, and that is not this one. :func:`~tinyvllm_ref.kernels.decode_rows.embed_norm` is one, and a
        decode step begins with it.

    Returns
    -------
    out
        The same bits whether `dependent` or not.

    Raises
    ------
    ValueError
        A shape, dtype or layout is wrong, or the heads are not such as :func:`supports` names.

    Notes
    -----
    What `rope`, `kv_write` and `paged_attention` do in three launches, with the same roundings; the keys of a
    request are divided differently, so the last bits may differ.
    """
    sizes = _contract(qkv, key_cache, value_cache, block_tables, context_lens, inv_freq, out)
    requests, q_heads, kv_heads, head_dim = sizes["B"], sizes["Hq"], sizes["Hk"], sizes["D"]
    right = supports(q_heads, kv_heads, head_dim)
    heads = f"({q_heads}, {kv_heads}, {head_dim})"
    _contract.check(
        "(query heads, KV heads, head_dim)",
        heads,
        right,
        f"such that at most {MAX_GROUP} query heads share a KV head and head_dim is a multiple of 16 up to "
        f"{MAX_HEAD_DIM}",
    )
    _contract.check("the width of qkv", sizes["N"], sizes["N"] == (q_heads + 2 * kv_heads) * head_dim,
                    f"(Hq + 2 Hk) D = {(q_heads + 2 * kv_heads) * head_dim}")  # fmt: skip
    _contract.check(
        "the length of inv_freq", sizes["H"], 2 * sizes["H"] == head_dim, f"D / 2 = {head_dim // 2}"
    )
    _contract.check_aligned(qkv=qkv, key_cache=key_cache, value_cache=value_cache)
    room = scratch.arrived.shape[0]
    scratch_heads = (scratch.partial.shape[1], scratch.arrived.shape[1], scratch.partial.shape[3])
    _contract.check("scratch's number of requests", room, room >= requests, f"at least {requests}")
    same = scratch_heads == (q_heads, kv_heads, head_dim)
    _contract.check("scratch's (query heads, KV heads, head_dim)", scratch_heads, same, heads)
    if not requests:
        return out
    group = q_heads // kv_heads
    warps = _warps(requests * kv_heads * scratch.splits, group, head_dim)
    compiled = kernel(
        "decode_attention",
        HEAD_DIM=head_dim,
        GROUP=group,
        KV_HEADS=kv_heads,
        BLOCK_SIZE=sizes["BS"],
        WARPS=warps,
        CHUNKS_FIRST=_chunks_first(requests, kv_heads, head_dim),
        EARLY=int(dependent),
    )
    args = (
        *(qkv, key_cache, value_cache, block_tables, context_lens, inv_freq, out),
        *(scratch.partial, scratch.lse, scratch.arrived, Float(scale), np.int32(sizes["M"])),
    )
    grid, block = (scratch.splits, kv_heads, requests), (32 * warps,)
    shared = 4 * attention_floats(warps, group, head_dim)
    launch(compiled, grid, block, args, shared, dependent=dependent)
    return out
