"""Launches ``advance.cu``: the inputs of the next decode step from the tokens of this one."""

from __future__ import annotations

from typing import Any

from .launch import Contract, Int, ceil_div
from .source import kernel

_contract = Contract("advance", chosen="int32 B", ids="int32 B", context_lens="int32 B", steps="int32 B")
_THREADS = 128


def advance(chosen: Any, ids: Any, context_lens: Any, steps: Any) -> None:
    """Make `chosen` the inputs of the next step.

    Parameters
    ----------
    chosen : (B,) int32
    ids : (B,) int32
        Becomes `chosen`.
    context_lens, steps : (B,) int32
        One more, where the context is not 0.

    Raises
    ------
    ValueError
        A shape, dtype or layout is wrong.
    """
    requests = _contract(chosen, ids, context_lens, steps)["B"]
    if requests:
        args = (chosen, ids, context_lens, steps, Int(requests))
        kernel("advance")((ceil_div(requests, _THREADS),), (_THREADS,), args)
