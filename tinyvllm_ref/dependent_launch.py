"""Programmatic dependent launch: a kernel that may come onto the card while the one before it still runs.

Compute capability 9.0 and above (CUDA C++ Programming Guide, "Programmatic Dependent Launch and
Synchronization"). CuPy launches without attributes, so the call goes to libcuda itself, by ctypes. A kernel that
is launched so must wait for the one before it with ``wait_for_previous()`` of
``kernels/dependent_launch.cuh``; elsewhere the launch is an ordinary one.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from .device import cp, is_gpu

_MIN_CAPABILITY = 90  # ten times the compute capability
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # cuda.h, CUlaunchAttributeID
_INVALID_CONTEXT = 201


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and a union of 64 bytes at offset 8."""

    _fields_ = [
        ("id", ctypes.c_int),
        ("pad", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_int * 15),
    ]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_mem", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


@functools.cache
def has_dependent_launch() -> bool:
    """Whether the current device starts a kernel before the one before it is done."""
    return is_gpu and int(cp.cuda.Device().compute_capability) >= _MIN_CAPABILITY


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    args: tuple[Any, ...],
    shared_mem: int = 0,
    *,
    dependent: bool,
) -> None:
    """Launch a kernel in the current stream: where it is `dependent` as :func:`launch_dependent`, else as usual."""
    if dependent:
        launch_dependent(kernel, grid, block, args, shared_mem)
    else:
        kernel(grid, block, args, shared_mem=shared_mem)


def launch_dependent(
    kernel: Any,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    args: tuple[Any, ...],
    shared_mem: int = 0,
    stream: Any = None,
) -> None:
    """Launch a kernel that may start before the one before it in the stream is done.

    Where the device has no such launch, an ordinary one. A stream that is being captured records it, if the
    kernel was launched or its attribute ``kernel`` read once before (that loads it).

    Parameters
    ----------
    kernel : cupy.RawKernel
        It calls ``wait_for_previous()`` before it reads what an earlier kernel wrote, and before it writes.
    grid, block : tuple of int
        One to three sizes each.
    args : tuple
        Arrays on the device, and NumPy scalars of the very types that the kernel takes.
    shared_mem : int
        Bytes of dynamic shared memory a block.
    stream : cupy.cuda.Stream, optional
        By default, the current one.

    Raises
    ------
    TypeError
        An argument is neither.
    RuntimeError
        The driver refused; the message has its name for the error.
    """
    if stream is None:
        stream = cp.cuda.get_current_stream()
    if not has_dependent_launch():
        with stream:
            kernel(grid, block, args, shared_mem=shared_mem)
        return
    values = [_packed(arg, place) for place, arg in enumerate(args)]
    addresses = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
    attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
    config = _Config(_three(grid), _three(block), shared_mem, stream.ptr, ctypes.pointer(attribute), 1)
    call_driver(
        "cuLaunchKernelEx",
        *(ctypes.byref(config), kernel.kernel.ptr, addresses, None),
        what=f"{kernel.name}, grid {grid}, block {block}, {shared_mem} bytes of shared memory",
    )


def call_driver(name: str, *args: Any, what: str) -> None:
    """Call a function of libcuda, which CuPy has none for.

    Parameters
    ----------
    name : str
        Such as ``"cuLaunchKernelEx"``.
    *args
        As ctypes takes them.
    what : str
        Of what; for the message.

    Raises
    ------
    RuntimeError
        The driver refused; the message has its name for the error.
    """
    function = getattr(_driver(), name)
    status = function(*args)
    if status == _INVALID_CONTEXT:  # the first call of this thread
        cp.cuda.runtime.free(0)
        status = function(*args)
    if status:
        raise RuntimeError(f"{name} of {what}: {_error_name(status)}")


def _packed(arg: Any, place: int) -> np.ndarray:
    """The bytes of one argument, as CuPy hands them over: an array's address, a scalar itself."""
    if isinstance(arg, cp.ndarray):
        return np.array(arg.data.ptr, np.uint64)
    if isinstance(arg, np.generic):
        return np.array(arg)
    raise TypeError(
        f"launch_dependent: argument {place} is {arg!r} ({type(arg).__name__}); it must be an array on the "
        f"device or a NumPy scalar, such as np.int32(...)"
    )


def _three(sizes: tuple[int, ...]) -> Any:
    return (ctypes.c_uint * 3)(*sizes, *(1,) * (3 - len(sizes)))


@functools.cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    library.cuGetErrorName.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    return library


def _error_name(status: int) -> str:
    name = ctypes.c_char_p()
    _driver().cuGetErrorName(status, ctypes.byref(name))
    return f"{(name.value or b'an unknown error').decode()} ({status})"
