"""Launches ``silu_mul.cu``: the activation of the feed-forward block."""

from __future__ import annotations

from typing import Any

from .launch import MAX_GRID_Y, Contract, Int, ceil_div
from .source import kernel

_contract = Contract("silu_mul", gate_up="float32 T G", out="bf16 T F")
_THREADS, _PER_THREAD = 128, 4


def silu_mul(gate_up: Any, out: Any) -> Any:
    """silu(gate) * up, the SwiGLU of Shazeer (2020).

    Parameters
    ----------
    gate_up : (T, 2F) float32
        Columns 0 to F - 1 are the gate, the rest is up.
    out : (T, F) bf16

    Returns
    -------
    out

    Raises
    ------
    ValueError
        A shape, dtype or layout is wrong.
    """
    sizes = _contract(gate_up, out)
    tokens, ffn = sizes["T"], sizes["F"]
    _contract.check(
        "the width of gate_up", sizes["G"], sizes["G"] == 2 * ffn, f"2F = {2 * ffn}, as out has F"
    )
    if tokens and ffn:
        grid = (ceil_div(ffn, _THREADS * _PER_THREAD), min(tokens, MAX_GRID_Y))
        kernel("silu_mul")(grid, (_THREADS,), (gate_up, out, Int(tokens), Int(ffn)))
    return out
