"""Launches ``rope_write.cu``: what a prefill does between its first product and its attention."""

from __future__ import annotations

from typing import Any

from ..device import is_gpu
from .launch import Contract, Int
from .source import kernel

_contract = Contract(
    "rope_write",
    qkv="float32 T N",
    positions="int32 T",
    inv_freq="float32 H",
    slots="int64 T",
    q="float32 T Hq D",
    key_cache="bf16 NB BS Hk D",
    value_cache="bf16 NB BS Hk D",
)
_THREADS = 256 if is_gpu else 8


def rope_write(
    qkv: Any, positions: Any, inv_freq: Any, slots: Any, q: Any, key_cache: Any, value_cache: Any
) -> Any:
    """Turn queries and keys by their positions, and write the keys and values to the cache.

    Parameters
    ----------
    qkv : (T, (Hq + 2 Hk) D) float32
    positions : (T,) int32
    inv_freq : (D/2,) float32
        Radians per token of each pair of columns.
    slots : (T,) int64
        block * BS + offset; negative for a token that pads the batch, of which nothing is written.
    q : (T, Hq, D) float32
        The turned queries.
    key_cache, value_cache : (NB, BS, Hk, D) bf16

    Returns
    -------
    q

    Raises
    ------
    ValueError
        A shape, dtype or layout is wrong.
    """
    sizes = _contract(qkv, positions, inv_freq, slots, q, key_cache, value_cache)
    q_heads, kv_heads, head_dim = sizes["Hq"], sizes["Hk"], sizes["D"]
    right = (q_heads + 2 * kv_heads) * head_dim
    _contract.check("the width of qkv", sizes["N"], sizes["N"] == right, f"(Hq + 2 Hk) D = {right}")
    half = sizes["H"]
    _contract.check("the length of inv_freq", half, 2 * half == head_dim, f"D / 2 = {head_dim // 2}")
    if sizes["T"] and head_dim:
        args = (qkv, positions, inv_freq, slots, q, key_cache, value_cache)
        counts = (Int(q_heads), Int(kv_heads), Int(half))
        kernel("rope_write")((sizes["T"],), (_THREADS,), (*args, *counts), shared_mem=4 * head_dim)
    return q
