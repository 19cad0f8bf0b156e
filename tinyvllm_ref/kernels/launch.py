"""What every launch needs: arrays checked against a contract, grids, typed scalars.

A kernel sees addresses and nothing else. Shape, dtype and contiguity are compared here, before the launch, so
that a mistake is a ValueError that names the array and not a wrong number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from ..device import cp, is_gpu

Int = np.int32
Long = np.int64
Float = np.float32

_DTYPES = {
    "float32": np.dtype(np.float32),
    "bf16": np.dtype(np.uint16),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "uint32": np.dtype(np.uint32),
    "uint64": np.dtype(np.uint64),
}
_SAID = {"bf16": "uint16 (bfloat16 bits)"}
_VECTOR_BYTES = 16
MAX_GRID_Y = 65535


class Contract:
    """The arrays of one function: dtype and shape of each, in letters.

    Parameters
    ----------
    function : str
        Begins every message.
    **arrays : str
        Dtype and dimensions of each array: ``x="float32 T H"``. A letter stands for one size throughout, a
        number for itself. ``bf16`` means bfloat16 bits in uint16.

    Examples
    --------
    >>> contract = Contract("rms_norm", x="float32 T H", weight="bf16 H", out="bf16 T H")
    >>> sizes = contract(x, weight, out)  # doctest: +SKIP
    >>> sizes["T"], sizes["H"]  # doctest: +SKIP
    (7, 576)
    """

    def __init__(self, function: str, **arrays: str) -> None:
        self.function = function
        self._arrays = [
            (name, kind, _DTYPES[kind], tuple(int(d) if d.isdigit() else d for d in dimensions))
            for name, (kind, *dimensions) in ((name, text.split()) for name, text in arrays.items())
        ]

    def __call__(self, *arrays: Any, **sizes: int) -> dict[str, int]:
        """Compare the arrays, in the contract's order.

        Parameters
        ----------
        *arrays
            As many as the contract has.
        **sizes : int
            Letters whose size is known.

        Returns
        -------
        dict
            The size of each letter.

        Raises
        ------
        ValueError
            An array is not on the device, or its dtype, shape or layout is wrong.
        """
        for array, (name, kind, dtype, dimensions) in zip(arrays, self._arrays, strict=True):
            if not isinstance(array, cp.ndarray):
                self._fail(name, f"is {_said(array)}", f"an array on the device, {_meant(kind, dimensions)}")
            shape = array.shape
            if array.dtype != dtype or len(shape) != len(dimensions):
                self._mismatch(name, array, kind, dimensions, sizes)
            for size, dimension in zip(shape, dimensions, strict=True):
                known = dimension if isinstance(dimension, int) else sizes.setdefault(dimension, size)
                if known != size:
                    self._mismatch(name, array, kind, dimensions, sizes)
            if not array.flags.c_contiguous:
                self._fail(
                    name,
                    f"has gaps (shape {shape}, strides {array.strides})",
                    "C-contiguous: pass cp.ascontiguousarray(...) of it",
                )
        return sizes

    def check_aligned(self, **arrays: Any) -> None:
        """Raise ValueError for an array that does not start at a multiple of 16 bytes."""
        for name, array in arrays.items():
            if array.data.ptr % _VECTOR_BYTES and array.size:
                self._fail(
                    name,
                    f"starts at address {array.data.ptr:#x}",
                    f"at a multiple of {_VECTOR_BYTES} bytes, for it is read by vectors: pass a copy of it",
                )

    def check(self, name: str, value: Any, valid: bool, right: str) -> None:
        """Raise ValueError for a value that is not what it must be."""
        if not valid:
            self._fail(name, f"is {value!r}", right)

    def check_heads(self, q_heads: int, kv_heads: int) -> None:
        """Raise ValueError unless every KV head serves the same number of query heads."""
        valid = kv_heads > 0 and q_heads % kv_heads == 0
        self.check("the number of query heads", q_heads, valid, f"a multiple of the {kv_heads} KV heads")

    def _mismatch(
        self, name: str, array: Any, kind: str, dimensions: Sequence[str | int], sizes: dict[str, int]
    ) -> NoReturn:
        right = _meant(kind, dimensions)
        known = [str(sizes.get(d, d)) if isinstance(d, str) else str(d) for d in dimensions]
        if known != [str(d) for d in dimensions]:
            right += f" = ({', '.join(known)}{',' if len(known) == 1 else ''})"
        self._fail(name, f"has shape {array.shape} and dtype {array.dtype}", right)

    def _fail(self, name: str, came: str, right: str) -> NoReturn:
        raise ValueError(f"{self.function}: {name} {came}; it must be {right}")


def _meant(kind: str, dimensions: Sequence[str | int]) -> str:
    letters = ", ".join(map(str, dimensions)) + ("," if len(dimensions) == 1 else "")
    return f"{_SAID.get(kind, kind)} of shape ({letters})"


def _said(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"a NumPy array of shape {value.shape}"
    return f"{value!r} ({type(value).__name__})"


def ceil_div(count: int, size: int) -> int:
    """How many pieces of `size` hold `count`."""
    return -(-count // size)


def multiprocessors(in_emulation: int) -> int:
    """How many blocks run at once that each take a whole multiprocessor of the card; the emulation has those given."""
    return int(cp.cuda.Device().attributes["MultiProcessorCount"]) if is_gpu else in_emulation


def row_threads(width: int, per_thread: int = 8, most: int = 256) -> int:
    """Threads of a block that works on a row: whole warps, each thread on about `per_thread` elements.

    It depends on the row's width alone, and so does the order in which a row is summed.
    """
    return min(most, max(32, width // per_thread // 32 * 32))
