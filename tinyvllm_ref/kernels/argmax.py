"""Launches ``argmax.cu``: the most probable token of each row of logits."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..device import cp
from .launch import MAX_GRID_Y, Contract, Int, ceil_div
from .source import kernel

_contract = Contract("argmax", logits="float32 R V", out="int32 R")
_THREADS, _PART = 64, 4096


def argmax(logits: Any, out: Any) -> Any:
    """The index of the largest logit of each row.

    Parameters
    ----------
    logits : (R, V) float32
    out : (R,) int32
        The lowest index on ties; the first NaN where there is one, as ``numpy.argmax``.

    Returns
    -------
    out

    Raises
    ------
    ValueError
        A shape, dtype or layout is wrong, or V is 0.
    """
    sizes = _contract(logits, out)
    rows, vocab = sizes["R"], sizes["V"]
    _contract.check("the width of logits", vocab, vocab > 0, "at least 1")
    shared = {"shared_mem": 8 * _THREADS}
    parts = ceil_div(vocab, _PART)
    for first in range(0, rows, MAX_GRID_Y):
        some = slice(first, min(rows, first + MAX_GRID_Y))
        count = some.stop - first
        values, indices = cp.empty((count, parts), np.float32), cp.empty((count, parts), np.int32)
        args = (logits[some], values, indices, Int(vocab), Int(_PART))
        kernel("argmax", "argmax_parts")((parts, count), (_THREADS,), args, **shared)
        merge_args = (values, indices, out[some], Int(parts))
        kernel("argmax", "argmax_merge")((count,), (_THREADS,), merge_args, **shared)
    return out
