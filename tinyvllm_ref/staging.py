"""A step's inputs on their way to the device: all arrays in one piece of pinned memory, and one copy.

A copy of a few bytes costs the host as much as one of some thousand, and one from memory that is not pinned makes it
wait. While it makes eight of them, one for each array, the card has nothing to do.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .device import cp
from .kernels.launch import ceil_div

_ALIGNED = 256  # bytes: where each array begins
_TO_DEVICE = 1  # cudaMemcpyKind


class Staged:
    """Arrays that the host fills for a step, and that one copy brings to the device.

    They lie behind one another, on the device once and in pinned memory twice: the host may write a step's arrays
    while the copy of those before is still to be made.

    Parameters
    ----------
    fields : dict of str to (int, dtype)
        Length and dtype of each array, in their order.

    Attributes
    ----------
    device : dict of str to array
        What recorded launches know.
    """

    def __init__(self, fields: dict[str, tuple[int, Any]]) -> None:
        self._places: dict[str, tuple[int, int, np.dtype[Any]]] = {}  # first byte, bytes, dtype
        size = 0
        for name, (count, dtype) in fields.items():
            self._places[name] = (size, count * np.dtype(dtype).itemsize, np.dtype(dtype))
            size = ceil_div(sum(self._places[name][:2]), _ALIGNED) * _ALIGNED
        self._memory = cp.zeros(size, np.uint8)
        self.device = self._views(self._memory)
        self._hosts = []
        for _ in range(2):
            memory = np.frombuffer(cp.cuda.alloc_pinned_memory(size), np.uint8, size)
            memory[:] = 0  # what a step does not fill is valid, too
            done = cp.cuda.Event(disable_timing=True)
            self._hosts.append((memory.ctypes.data, self._views(memory), done))

    def _views(self, memory: Any) -> dict[str, Any]:
        places = self._places.items()
        return {name: memory[first : first + size].view(dtype) for name, (first, size, dtype) in places}

    def host(self) -> dict[str, np.ndarray]:
        """The arrays to fill; they hold what was sent the time before last."""
        _, arrays, done = self._hosts[0]
        done.synchronize()
        return arrays

    def send(self, last: str, count: int, stream: Any) -> None:
        """Copy the arrays up to the first `count` elements of the one called `last`."""
        address, _, done = self._hosts[0]
        self._hosts.reverse()
        first, _, dtype = self._places[last]
        size = first + count * dtype.itemsize
        cp.cuda.runtime.memcpyAsync(self._memory.data.ptr, address, size, _TO_DEVICE, stream.ptr)
        done.record(stream)
