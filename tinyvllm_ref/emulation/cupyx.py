"""The part of ``cupyx`` that the course uses: pinned arrays, ``scatter_add``, ``profiler.benchmark``."""

from __future__ import annotations

import math
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from . import memory
from .array import _require_array, ndarray

__all__ = [
    "empty_like_pinned",
    "empty_pinned",
    "profiler",
    "scatter_add",
    "zeros_like_pinned",
    "zeros_pinned",
]


def empty_pinned(shape: Any, dtype: Any = float, order: str = "C") -> np.ndarray:
    """A NumPy array in pinned memory, not initialised."""
    sizes = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    pointer: Any = memory.alloc_pinned_memory(math.prod(sizes) * np.dtype(dtype).itemsize)
    return np.ndarray(sizes, dtype, pointer, order="F" if order == "F" else "C")


def zeros_pinned(shape: Any, dtype: Any = float, order: str = "C") -> np.ndarray:
    """A NumPy array of zeros in pinned memory."""
    made = empty_pinned(shape, dtype, order)
    made[...] = 0
    return made


def empty_like_pinned(
    a: Any, dtype: Any = None, order: str = "K", subok: Any = None, shape: Any = None
) -> np.ndarray:
    """A NumPy array in pinned memory of the shape and dtype of `a`, not initialised."""
    if subok is not None:
        raise TypeError("subok is not supported yet")
    fortran = order == "F" or (order in ("K", "A") and a.flags.f_contiguous and not a.flags.c_contiguous)
    return empty_pinned(
        a.shape if shape is None else shape, a.dtype if dtype is None else dtype, "F" if fortran else "C"
    )


def zeros_like_pinned(
    a: Any, dtype: Any = None, order: str = "K", subok: Any = None, shape: Any = None
) -> np.ndarray:
    """A NumPy array of zeros in pinned memory, of the shape and dtype of `a`."""
    made = empty_like_pinned(a, dtype, order, subok, shape)
    made[...] = 0
    return made


def scatter_add(a: ndarray, slices: Any, value: Any) -> None:
    """Add `value` to the elements of `a` that an index names, once for each time that it names them."""
    _require_array(a)
    a.scatter_add(slices, value)


class PerfCaseResult:
    """What :func:`benchmark` measured.

    Attributes
    ----------
    name : str
        Of the function.
    cpu_times : numpy.ndarray
        Seconds on the CPU of each run: how long the emulation took, not a card.
    gpu_times : numpy.ndarray
        Seconds on the GPU, (devices, runs): NaN.
    """

    def __init__(self, name: str, cpu_times: np.ndarray) -> None:
        self.name = name
        self.cpu_times = cpu_times
        self.gpu_times = np.full((1, len(cpu_times)), np.nan)

    def to_str(self, show_gpu: bool = False) -> str:
        """One line, as CuPy writes it."""
        parts = [_times("CPU", self.cpu_times)]
        if show_gpu:
            parts.append(_times("GPU-0", self.gpu_times[0]))
        return f"{self.name:<20s}:{' '.join(parts)}"

    def __repr__(self) -> str:
        return self.to_str(show_gpu=True)


def _times(device: str, seconds: np.ndarray) -> str:
    us = seconds * 1e6
    text = f"    {device}: {us.mean():9.03f} us"
    if us.size > 1:
        text += f"   +/- {us.std():6.03f} (min: {us.min():9.03f} / max: {us.max():9.03f}) us"
    return text


def benchmark(
    func: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    n_repeat: int = 10000,
    *,
    name: str | None = None,
    n_warmup: int = 10,
    max_duration: float = math.inf,
    devices: Any = None,
) -> PerfCaseResult:
    """Time a function. Without a card the GPU times are NaN, and the CPU times are the emulation's own.

    Parameters
    ----------
    func : callable
        What is timed, called as ``func(*args, **kwargs)``.
    args, kwargs : tuple, dict
        Its arguments.
    n_repeat : int
        How many runs are timed.
    name : str, optional
        By default the function's.
    n_warmup : int
        How many runs come before, untimed.
    max_duration : float
        Seconds after which no further run is begun.
    devices : tuple of int, optional
        Must be (0,).

    Returns
    -------
    PerfCaseResult
    """
    from .report import notice
    from .stream import NO_TIMES

    if not callable(func):
        raise ValueError("`func` should be a callable object.")
    if not isinstance(args, tuple):
        raise ValueError("`args` should be of tuple type.")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise ValueError("`kwargs` should be of dict type.")
    for argument, value in (("n_repeat", n_repeat), ("n_warmup", n_warmup)):
        if not isinstance(value, int):
            raise ValueError(f"`{argument}` should be an integer.")
    if devices is not None and tuple(devices) != (0,):
        raise ValueError(f"`devices` is {devices!r}: the only device is 0")
    if n_repeat < 1:
        raise ValueError(f"`n_repeat` is {n_repeat}; it must be 1 or more")
    for _ in range(n_warmup):
        func(*args, **kwargs or {})
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < n_repeat and (not times or time.perf_counter() - begin < max_duration):
        start = time.perf_counter()
        func(*args, **kwargs or {})
        times.append(time.perf_counter() - start)
    notice(NO_TIMES)
    return PerfCaseResult(name if name is not None else func.__name__, np.array(times))


profiler = types.SimpleNamespace(benchmark=benchmark)
