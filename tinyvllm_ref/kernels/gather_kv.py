"""Launches ``gather_kv.cu``: one request's keys and values out of the paged cache."""

from __future__ import annotations

from typing import Any

from .launch import Contract, Int, row_threads
from .source import kernel

_contract = Contract(
    "gather_kv",
    key_cache="bf16 NB BS Hk D",
    value_cache="bf16 NB BS Hk D",
    block_table="int32 M",
    k="bf16 m Hk D",
    v="bf16 m Hk D",
)


def gather_kv(key_cache: Any, value_cache: Any, block_table: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Copy the first m tokens of a request.

    Parameters
    ----------
    key_cache, value_cache : (NB, BS, Hk, D) bf16
        Of one layer.
    block_table : (max_blocks,) int32
        The request's blocks; those of its first m tokens are read.
    k, v : (m, Hk, D) bf16

    Returns
    -------
    k, v

    Raises
    ------
    ValueError
        A shape, dtype or layout is wrong, or the table has not enough blocks.
    """
    sizes = _contract(key_cache, value_cache, block_table, k, v)
    tokens, room, width = sizes["m"], sizes["M"] * sizes["BS"], sizes["Hk"] * sizes["D"]
    _contract.check("the number of tokens", tokens, tokens <= room, f"at most {room}, the table's slots")
    if tokens and width:
        args = (key_cache, value_cache, block_table, k, v, Int(sizes["BS"]), Int(width))
        kernel("gather_kv")((tokens,), (row_threads(width),), args)
    return k, v
