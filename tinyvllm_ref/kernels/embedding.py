"""Launches ``embedding.cu``: token ids -> rows of the embedding table."""

from __future__ import annotations

from typing import Any

from .launch import Contract, Int, row_threads
from .source import kernel

_contract = Contract("embedding", ids="int32 T", table="bf16 V H", out="float32 T H")


def embedding(ids: Any, table: Any, out: Any) -> Any:
    """Look up the rows of tokens.

    Parameters
    ----------
    ids : (T,) int32
        An id outside of 0 to V - 1 gives a row of NaN.
    table : (V, H) bf16
    out : (T, H) float32

    Returns
    -------
    out

    Raises
    ------
    ValueError
        A shape, dtype or layout is wrong.
    """
    sizes = _contract(ids, table, out)
    tokens, hidden = sizes["T"], sizes["H"]
    if hidden % 8 == 0:
        _contract.check_aligned(table=table, out=out)
    if tokens and hidden:
        threads = row_threads(hidden, 32)
        kernel("embedding")((tokens,), (threads,), (ids, table, out, Int(sizes["V"]), Int(hidden)))
    return out
