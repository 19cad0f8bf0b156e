"""Launches ``random_normal.cu``: bfloat16 weights from a seed, made where they are used."""

from __future__ import annotations

from typing import Any

import numpy as np

from .launch import Contract, Float, Long, ceil_div
from .source import kernel

_contract = Contract("random_normal", out="bf16 N")
_THREADS, _PER_THREAD, _MAX_BLOCKS = 256, 8, 65535
_SEEDS = 2**64


def random_normal(seed: int, deviation: float, out: Any) -> Any:
    """Fill an array with normally distributed numbers of mean 0.

    Parameters
    ----------
    seed : int
        0 to 2**64 - 1. Element k depends on the seed and k only.
    deviation : float
        The standard deviation.
    out : bf16, any shape
        Begins at a multiple of 16 bytes.

    Returns
    -------
    out

    Raises
    ------
    ValueError
        The seed, or out's dtype or layout, is wrong.
    """
    _contract.check("seed", seed, 0 <= seed < _SEEDS, "from 0 to 2**64 - 1")
    _contract.check("out's layout", out.strides, out.flags.c_contiguous, "C-contiguous")
    count = _contract(out.reshape(-1))["N"]
    _contract.check_aligned(out=out)
    if count:
        grid = (min(_MAX_BLOCKS, ceil_div(count, _THREADS * _PER_THREAD)),)
        args = (out, np.uint64(seed), Float(deviation), Long(count))
        kernel("random_normal")(grid, (_THREADS,), args)
    return out
