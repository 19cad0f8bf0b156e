"""Launches ``split_qkv.cu``: one product's output -> queries, keys and values."""

from __future__ import annotations

from typing import Any

from .launch import Contract, Int, row_threads
from .source import kernel

_contract = Contract(
    "split_qkv", qkv="float32 T W", q="float32 T Hq D", k="float32 T Hk D", v="float32 T Hk D"
)


def split_qkv(qkv: Any, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Copy the columns of a packed product into arrays of their own.

    Parameters
    ----------
    qkv : (T, Hq*D + 2*Hk*D) float32
        Queries, keys, values, as the stacked weight has them.
    q : (T, Hq, D) float32
    k, v : (T, Hk, D) float32

    Returns
    -------
    q, k, v

    Raises
    ------
    ValueError
        A shape, dtype or layout is wrong.
    """
    sizes = _contract(qkv, q, k, v)
    tokens, q_size, kv_size = sizes["T"], sizes["Hq"] * sizes["D"], sizes["Hk"] * sizes["D"]
    width = q_size + 2 * kv_size
    _contract.check("the width of qkv", sizes["W"], sizes["W"] == width, f"Hq*D + 2*Hk*D = {width}")
    if tokens and width:
        args = (qkv, q, k, v, Int(q_size), Int(kv_size))
        kernel("split_qkv")((tokens,), (row_threads(width, 16),), args)
    return q, k, v
