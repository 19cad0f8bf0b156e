"""Launches ``read_memory.cu``: what a device's memory can give at most, for the share of it that others reach."""

from __future__ import annotations

from typing import Any

from .launch import Contract, Long
from .source import kernel

_contract = Contract("read_memory", x="bf16 N", out="uint32 P")
_WORD = 8  # elements in 16 bytes
MAX_THREADS = 1024


def read_memory(x: Any, threads: int, out: Any) -> Any:
    """Read an array once; each thread of the grid leaves the exclusive or of the 4-byte words that it has read.

    Parameters
    ----------
    x : (N,) bf16
        Begins at a multiple of 16 bytes; N is a multiple of 8.
    threads : int
        Of a block.
    out : (P,) uint32
        P threads are launched, P / `threads` blocks. The exclusive or over all of `out` is that of all words of x.

    Returns
    -------
    out

    Raises
    ------
    ValueError
        A shape, dtype or layout is wrong, or there are no whole blocks.
    """
    sizes = _contract(x, out)
    _contract.check_aligned(x=x)
    _contract.check("the length of x", sizes["N"], sizes["N"] % _WORD == 0, f"a multiple of {_WORD}")
    _contract.check("threads", threads, 1 <= threads <= MAX_THREADS, f"1 to {MAX_THREADS}")
    _contract.check("the length of out", sizes["P"], sizes["P"] % threads == 0, f"a multiple of {threads}")
    if sizes["P"]:
        args = (x, out, Long(sizes["N"] // _WORD))
        kernel("read_memory")((sizes["P"] // threads,), (threads,), args)
    return out
