"""Launches ``convert.cu``: arrays on the device between float32 and bfloat16 bits."""

from __future__ import annotations

from typing import Any

from .launch import Contract, Long, ceil_div
from .source import kernel

_to_bf16 = Contract("to_bf16", x="float32 N", out="bf16 N")
_to_float = Contract("to_float", x="bf16 N", out="float32 N")
_THREADS, _PER_THREAD, _MAX_BLOCKS = 256, 8, 65535


def to_bf16(x: Any, out: Any) -> Any:
    """Round float32 to bfloat16, to nearest even; a NaN stays a NaN.

    Parameters
    ----------
    x : float32, any shape
    out : bf16, of x's shape

    Returns
    -------
    out

    Raises
    ------
    ValueError
        A shape, dtype or layout is wrong.
    """
    return _convert(_to_bf16, "convert_to_bf16", x, out)


def to_float(x: Any, out: Any) -> Any:
    """Widen bfloat16 to float32, exactly.

    Parameters
    ----------
    x : bf16, any shape
    out : float32, of x's shape

    Returns
    -------
    out

    Raises
    ------
    ValueError
        A shape, dtype or layout is wrong.
    """
    return _convert(_to_float, "convert_to_float", x, out)


def _convert(contract: Contract, entry: str, x: Any, out: Any) -> Any:
    contract.check("out's shape", out.shape, out.shape == x.shape, f"x's, {x.shape}")
    for array, name in ((x, "x"), (out, "out")):  # a view with gaps would be copied by reshape
        contract.check(f"{name}'s layout", array.strides, array.flags.c_contiguous, "C-contiguous")
    sizes = contract(x.reshape(-1), out.reshape(-1))
    count = sizes["N"]
    if count:
        grid = (min(_MAX_BLOCKS, ceil_div(count, _THREADS * _PER_THREAD)),)
        kernel("convert", entry)(grid, (_THREADS,), (x, out, Long(count)))
    return out
