"""Launches ``softmax.cu``: probabilities of rows, and their logarithms."""

from __future__ import annotations

from typing import Any

from .launch import Contract, Int, row_threads
from .source import kernel

_contracts = {name: Contract(name, x="float32 R V", out="float32 R V") for name in ("softmax", "log_softmax")}


def softmax(x: Any, out: Any) -> Any:
    """exp(x) / sum(exp(x)) of each row.

    Parameters
    ----------
    x : (R, V) float32
    out : (R, V) float32
        May be x.

    Returns
    -------
    out

    Raises
    ------
    ValueError
        A shape, dtype or layout is wrong.
    """
    return _launch("softmax", x, out)


def log_softmax(x: Any, out: Any) -> Any:
    """x - log(sum(exp(x))) of each row: log probabilities of logits.

    Parameters
    ----------
    x : (R, V) float32
    out : (R, V) float32
        May be x.

    Returns
    -------
    out

    Raises
    ------
    ValueError
        A shape, dtype or layout is wrong.
    """
    return _launch("log_softmax", x, out)


def _launch(name: str, x: Any, out: Any) -> Any:
    sizes = _contracts[name](x, out)
    rows, width = sizes["R"], sizes["V"]
    if rows and width:
        threads = row_threads(width, 16)
        kernel("softmax", name)((rows,), (threads,), (x, out, Int(width)), shared_mem=4 * threads)
    return out
