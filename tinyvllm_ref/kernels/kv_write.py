"""Launches ``kv_write.cu``: new keys and values -> the paged cache."""

from __future__ import annotations

from typing import Any

from .launch import Contract, Int, row_threads
from .source import kernel

_contract = Contract(
    "kv_write",
    k="float32 T Hk D",
    v="float32 T Hk D",
    slots="int64 T",
    key_cache="bf16 NB BS Hk D",
    value_cache="bf16 NB BS Hk D",
)


def kv_write(k: Any, v: Any, slots: Any, key_cache: Any, value_cache: Any) -> tuple[Any, Any]:
    """Write tokens into the cache of one layer.

    Parameters
    ----------
    k, v : (T, Hk, D) float32
        Keys after RoPE.
    slots : (T,) int64
        block * BS + offset; -1 skips the token. No slot stands twice.
    key_cache, value_cache : (NB, BS, Hk, D) bf16

    Returns
    -------
    key_cache, value_cache

    Raises
    ------
    ValueError
        A shape, dtype or layout is wrong.
    """
    sizes = _contract(k, v, slots, key_cache, value_cache)
    tokens, width = sizes["T"], sizes["Hk"] * sizes["D"]
    if tokens and width:
        args = (k, v, slots, key_cache, value_cache, Int(width))
        kernel("kv_write")((tokens,), (row_threads(width),), args)
    return key_cache, value_cache
