"""What a run of an answer gets to work with: device arrays that are watched, and the place to launch kernels.

The process that runs an answer sees this module, and neither the expected values nor the mistakes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

_POISON = 0xFF  # as float32 and as bfloat16 a NaN, as an integer -1


class InputChanged(RuntimeError):
    """An answer wrote to an array that it was only to read."""

    def __init__(self, name: str, index: tuple[int, ...], before: Any, after: Any) -> None:
        super().__init__(
            f"`{name}` is an input, and {name}[{', '.join(map(str, index))}] is {after} now; it was {before}"
        )
        self.name = name


class WrongAnswerType(TypeError):
    """What the answer gave is not what it was asked for."""


class Lab:
    """Arrays and launches of one run.

    Parameters
    ----------
    cp : module
        CuPy, or the emulation.
    """

    def __init__(self, cp: Any) -> None:
        self.cp = cp
        self.preparing = False  # while the lab allocates for itself
        self._inputs: list[tuple[str, Any, np.ndarray[Any, Any]]] = []

    def input(self, name: str, values: Any) -> Any:
        """A device array that must be the same after the run."""
        host = np.ascontiguousarray(values)
        with self._preparing():
            array = self.cp.asarray(host)
        self._inputs.append((name, array, host))
        return array

    def inout(self, values: Any) -> Any:
        """A device array that the answer may change."""
        with self._preparing():
            return self.cp.asarray(np.ascontiguousarray(values))

    def output(self, shape: int | Sequence[int], dtype: Any = np.float32) -> Any:
        """A device array that nothing has written: poisoned, so that an element that is missed shows."""
        with self._preparing():
            array = self.cp.empty(shape, dtype)
        if not getattr(self.cp, "is_emulation", False):  # the emulation poisons by itself
            array.view(np.uint8).fill(_POISON)
        return array

    @contextmanager
    def _preparing(self) -> Iterator[None]:
        self.preparing = True
        try:
            yield
        finally:
            self.preparing = False

    def get(self, array: Any, name: str = "out") -> np.ndarray[Any, Any]:
        """What is in a device array, on the host."""
        if array is None:
            raise WrongAnswerType(f"`{name}` is None; did the function return it?")
        if not hasattr(array, "get"):
            raise WrongAnswerType(f"`{name}` is {_a(type(array).__name__)}; it must be a cp.ndarray")
        return np.asarray(array.get())

    def returned(self, value: Any, out: Any, name: str = "out") -> np.ndarray[Any, Any]:
        """What a part gave back: it must be the `out` that it was given, filled."""
        if value is not out:
            what = "None" if value is None else _a(type(value).__name__)
            if type(value) is type(out):
                what = "another array"
            raise WrongAnswerType(
                f"the function gave back {what}; it must fill `{name}` and return that same array"
            )
        return self.get(out, name)

    def check_inputs(self) -> None:
        """Raise InputChanged where an input was written to."""
        for name, array, before in self._inputs:
            after = np.asarray(array.get())
            same = (
                before.view(np.uint8) == after.view(np.uint8) if before.dtype.kind == "f" else before == after
            )
            if not np.all(same):
                flat = int(np.argmin(np.ravel(same))) // (before.itemsize if before.dtype.kind == "f" else 1)
                index = tuple(int(i) for i in np.unravel_index(flat, before.shape))
                raise InputChanged(name, index, before[index], after[index])


def _a(noun: str) -> str:
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"
