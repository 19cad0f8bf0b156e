"""Launches ``gather_rows.cu``: the rows of a step whose logits are wanted."""

from __future__ import annotations

from typing import Any

import numpy as np

from .launch import Contract, Int, row_threads
from .source import kernel

_contracts = {
    kind: Contract("gather_rows", x=f"{kind} T H", rows="int32 R", out=f"{kind} R H")
    for kind in ("float32", "bf16")
}


def gather_rows(x: Any, rows: Any, out: Any) -> Any:
    """out[r] = x[rows[r]].

    Parameters
    ----------
    x : (T, H) float32 or bf16
    rows : (R,) int32
        From 0 to T - 1.
    out : (R, H), of x's dtype

    Returns
    -------
    out

    Raises
    ------
    ValueError
        A shape, dtype or layout is wrong.
    """
    kind = "bf16" if getattr(x, "dtype", None) == np.uint16 else "float32"
    sizes = _contracts[kind](x, rows, out)
    count, hidden = sizes["R"], sizes["H"]
    if count and hidden:
        args = (x, rows, out, Int(hidden))
        kernel("gather_rows", f"gather_rows_{kind}")((count,), (row_threads(hidden, 16),), args)
    return out
