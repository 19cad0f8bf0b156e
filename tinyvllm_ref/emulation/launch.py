"""Calls a compiled kernel: the arguments in the order and layout that it expects, then the runtime's launch.

The structures repeat those of ``runtime/context.h`` and ``runtime/scheduler.cpp``.
"""

from __future__ import annotations

import ctypes
import operator
import os
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import diagnose, native, report, settings
from .array import ndarray
from .compiler import Entry, Library, ParameterType
from .errors import CUDADriverError
from .memory import MemoryPointer
from .translate import Parameter

MAX_THREADS = 1024
MAX_BLOCK = (1024, 1024, 64)
MAX_GRID = (2**31 - 1, 65535, 65535)
STATIC_SHARED_LIMIT = 48 << 10
SHARED_OPT_IN_LIMIT = 227 << 10  # what compute capability 9.0 allows

_POINTER, _SIGNED, _UNSIGNED, _FLOATING, _BOOL, _OTHER, _VOID = range(7)
_CODES = {
    (_SIGNED, 1): "b", (_SIGNED, 2): "h", (_SIGNED, 4): "i", (_SIGNED, 8): "q",
    (_UNSIGNED, 1): "B", (_UNSIGNED, 2): "H", (_UNSIGNED, 4): "I", (_UNSIGNED, 8): "Q",
    (_FLOATING, 4): "f", (_FLOATING, 8): "d", (_BOOL, 1): "?",
}  # fmt: skip


class LaunchRequest(ctypes.Structure):
    """``LaunchRequest`` of scheduler.cpp."""

    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("args", ctypes.c_char_p),
        ("args_bytes", ctypes.c_uint64),
        ("offsets", ctypes.c_void_p),
        ("item_sizes", ctypes.c_void_p),
        ("n_args", ctypes.c_uint64),
        ("image_lo", ctypes.c_void_p),
        ("image_hi", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_bytes", ctypes.c_uint64),
        ("shared_limit", ctypes.c_uint64),
        ("indexed_lines", ctypes.c_char_p),
        ("n_lines", ctypes.c_uint64),
        ("full", ctypes.c_int32),
        ("plain", ctypes.c_int32),
        ("timeout", ctypes.c_double),
    )


# ---------------- arguments
def _type_text(parameter: Parameter, kind: ParameterType) -> str:
    if parameter.type:
        return parameter.type
    names = {_SIGNED: "int", _UNSIGNED: "unsigned int", _FLOATING: "float", _BOOL: "bool"}
    if kind.kind == _POINTER:
        return f"pointer to {kind.item_size}-byte items"
    return f"{names.get(kind.kind, 'value')} of {kind.size} bytes"


def _dtype_fits(kind: ParameterType, dtype: np.dtype[Any]) -> bool:
    """May an array of this dtype be passed for this pointer?

    Same size and same sort of number; any integer array where bits are meant (``char*``, vectors, structures,
    the 2-byte float types).
    """
    if kind.item_kind == _VOID or (kind.item_kind in {_SIGNED, _UNSIGNED, _BOOL} and kind.item_size == 1):
        return True
    if kind.item_kind == _OTHER:  # float4, uint4, __half, a structure: what is read is the bytes
        return kind.item_size > 2 or dtype.itemsize == 2
    if dtype.itemsize != kind.item_size:
        return dtype.kind == "c" and kind.item_kind == _FLOATING and dtype.itemsize == 2 * kind.item_size
    return {"f": _FLOATING, "i": _SIGNED, "u": _UNSIGNED, "b": _BOOL}.get(dtype.kind) in (
        {_FLOATING} if kind.item_kind == _FLOATING else {_SIGNED, _UNSIGNED, _BOOL}
    )


def _pointer_converter(parameter: Parameter, kind: ParameterType, number: int) -> Callable[[Any], int]:
    label = f"argument {number}, {_type_text(parameter, kind)} {parameter.name}"
    fits: dict[Any, bool] = {}

    def convert(value: Any) -> int:
        if isinstance(value, ndarray):
            dtype = value.dtype
            good = fits.get(dtype)
            if good is None:
                good = fits[dtype] = _dtype_fits(kind, dtype)
            if not good:
                raise TypeError(
                    f"{label}: an array of {dtype} was given; the kernel reads it as "
                    f"{_type_text(parameter, kind)}. "
                    "Convert the array with .astype(...), or reinterpret its bits with .view(...)"
                )
            if not value.flags.c_contiguous:
                raise ValueError(
                    f"{label}: the array of shape {value.shape} is a view with gaps (strides "
                    f"{value.strides}); a kernel sees plain memory. Pass cp.ascontiguousarray(...) of it"
                )
            pointer = value.data.ptr
            if kind.item_alignment > 1 and pointer % kind.item_alignment and value.size:
                raise ValueError(
                    f"{label}: the array starts at an address that is no multiple of {kind.item_alignment} "
                    f"bytes, as {_type_text(parameter, kind)} needs"
                )
            return int(pointer)
        if isinstance(value, MemoryPointer):
            return int(value.ptr)
        if value is None:
            return 0
        if isinstance(value, np.ndarray):
            raise TypeError(
                f"Unsupported type {type(value)}: {label}: an array on the host; pass cp.asarray(...)"
            )
        if isinstance(value, int | np.integer) and not isinstance(value, bool):
            return int(value)
        raise TypeError(f"Unsupported type {type(value)}: {label}: pass a cp.ndarray")

    return convert


def _bounds(kind: ParameterType) -> tuple[int, int]:
    bits = 8 * kind.size
    return (0, 2**bits - 1) if kind.kind == _UNSIGNED else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _integer_converter(parameter: Parameter, kind: ParameterType, number: int) -> Callable[[Any], int]:
    label = f"argument {number}, {_type_text(parameter, kind)} {parameter.name}"
    low, high = _bounds(kind)

    def convert(value: Any) -> int:
        if not isinstance(value, int | np.integer | np.bool_):
            raise TypeError(f"{label}: {_describe(value)} was given; pass an integer, such as np.int32(...)")
        result = int(value)
        if isinstance(value, np.integer) and value.dtype.itemsize < kind.size:
            raise TypeError(
                f"{label}: a {value.dtype} was given, of {value.dtype.itemsize} bytes; "
                f"the kernel reads {kind.size}"
            )
        if not low <= result <= high:
            raise OverflowError(f"{label}: {result} is outside of {low} to {high}")
        return result

    return convert


def _float_converter(parameter: Parameter, kind: ParameterType, number: int) -> Callable[[Any], float]:
    name = {4: "float", 8: "double"}[kind.size]
    label = f"argument {number}, {_type_text(parameter, kind)} {parameter.name}"
    right = "np.float32(...)" if kind.size == 4 else "np.float64(...)"

    def convert(value: Any) -> float:
        if isinstance(value, np.floating) and value.dtype.itemsize == kind.size:
            return float(value)
        if kind.size == 8 and type(value) is float:
            return value
        if type(value) is float:
            raise TypeError(
                f"{label}: a Python float was given. CuPy passes it as 8 bytes (a double), and the "
                f"kernel would read 4 of them as its float: pass {right}"
            )
        raise TypeError(f"{label}: {_describe(value)} was given; the kernel reads a {name}: pass {right}")

    return convert


def _bool_converter(parameter: Parameter, kind: ParameterType, number: int) -> Callable[[Any], bool]:
    def convert(value: Any) -> bool:
        if isinstance(value, bool | np.bool_ | int | np.integer):
            return bool(value)
        raise TypeError(
            f"argument {number}, bool {parameter.name}: {_describe(value)} was given; pass a bool"
        )

    return convert


def _bytes_converter(parameter: Parameter, kind: ParameterType, number: int) -> Callable[[Any], bytes]:
    label = f"argument {number}, {_type_text(parameter, kind)} {parameter.name}"

    def convert(value: Any) -> bytes:
        if isinstance(value, np.generic | np.ndarray):  # as CuPy does: its bytes, by value
            data = value.tobytes()
            if len(data) == kind.size:
                return data
            raise TypeError(
                f"{label}: {_describe(value)} of {len(data)} bytes was given; the kernel reads {kind.size}"
            )
        raise TypeError(
            f"{label}: {_describe(value)} was given; pass a NumPy scalar of a structured dtype "
            f"of {kind.size} bytes"
        )

    return convert


def _describe(value: Any) -> str:
    if isinstance(value, ndarray | np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    if isinstance(value, np.generic):
        return f"{type(value).__name__}({value})"
    return f"{value!r} ({type(value).__name__})"


_MakeConverter = Callable[[Parameter, ParameterType, int], Callable[[Any], Any]]
_CONVERTERS: dict[int, _MakeConverter] = {
    _POINTER: _pointer_converter,
    _SIGNED: _integer_converter,
    _UNSIGNED: _integer_converter,
    _FLOATING: _float_converter,
    _BOOL: _bool_converter,
}


@dataclass(frozen=True)
class Plan:
    """How to pack the arguments of one kernel."""

    entry: Entry
    converters: tuple[Callable[[Any], Any], ...]
    pack: struct.Struct
    offsets: Any  # ctypes array: where each argument starts
    item_sizes: Any  # ctypes array: of pointers the bytes of an item, negative where const; of others 0


def make_plan(entry: Entry) -> Plan:
    """Work out the layout of a kernel's arguments, once."""
    layout, at, offsets, item_sizes, converters = "<", 0, [], [], []
    for k, (parameter, kind) in enumerate(zip(entry.parameters, entry.types, strict=True)):
        gap = -at % kind.alignment
        code = "Q" if kind.kind == _POINTER else _CODES.get((kind.kind, kind.size), f"{kind.size}s")
        layout += f"{gap}x{code}"
        at += gap
        offsets.append(at)
        at += kind.size
        size = kind.item_size if kind.kind == _POINTER else 0
        item_sizes.append(-size if kind.is_const else size)
        make: _MakeConverter = _CONVERTERS.get(kind.kind, _bytes_converter)
        converters.append(make(parameter, kind, k + 1))
    count = len(offsets)
    return Plan(
        entry,
        tuple(converters),
        struct.Struct(layout),
        (ctypes.c_int32 * max(1, count))(*offsets),
        (ctypes.c_int32 * max(1, count))(*item_sizes),
    )


def _pack(plan: Plan, args: Sequence[Any]) -> bytes:
    if len(args) != len(plan.converters):
        wanted = ", ".join(f"{p.type} {p.name}".strip() for p in plan.entry.parameters)
        raise TypeError(
            f"kernel `{plan.entry.name}` takes {len(plan.converters)} arguments ({wanted}); "
            f"{len(args)} were given"
        )
    return plan.pack.pack(*[convert(value) for convert, value in zip(plan.converters, args, strict=True)])


# ---------------- geometry
def _dimensions(value: Any, what: str, limits: tuple[int, int, int]) -> tuple[int, int, int]:
    if not isinstance(value, tuple):  # as CuPy, which takes neither lists nor numbers
        raise TypeError(f"{what} must be a tuple of 1 to 3 integers, such as (128,); got {value!r}")
    try:
        sizes = [operator.index(v) for v in value]
    except TypeError:
        raise TypeError(f"{what} must be a tuple of 1 to 3 integers, such as (128,); got {value!r}") from None
    if not 1 <= len(sizes) <= 3:
        raise ValueError(f"{what} must have 1 to 3 dimensions; got {tuple(sizes)}")
    sizes += [1] * (3 - len(sizes))
    for size, limit, axis in zip(sizes, limits, "xyz", strict=True):
        if size < 1:
            raise CUDADriverError(1, f"{what} {tuple(sizes)}: {axis} must be at least 1")
        if size > limit:
            raise CUDADriverError(1, f"{what} {tuple(sizes)}: {axis} is {size:,}; the limit is {limit:,}")
    return sizes[0], sizes[1], sizes[2]


def check_geometry(grid: Any, block: Any, shared: int, shared_limit: int) -> tuple[tuple[int, int, int], ...]:
    """The grid and block as three sizes each; CUDADriverError for what no card launches."""
    grid3 = _dimensions(grid, "grid", MAX_GRID)
    block3 = _dimensions(block, "block", MAX_BLOCK)
    threads = block3[0] * block3[1] * block3[2]
    if threads > MAX_THREADS:
        raise CUDADriverError(
            1, f"block {block3} has {threads:,} threads; a block holds at most {MAX_THREADS:,}"
        )
    if shared < 0:
        raise CUDADriverError(1, f"shared_mem is {shared}; it must be 0 or more bytes")
    if shared > shared_limit:
        raise CUDADriverError(
            1,
            f"shared_mem is {shared:,} bytes; the kernel's limit is {shared_limit:,}. Raise "
            f"kernel.max_dynamic_shared_size_bytes (up to {SHARED_OPT_IN_LIMIT:,}) before the launch",
        )
    return grid3, block3


# ---------------- launch
# Of a signal handler that launches a kernel, too: hence the same thread may enter again.
_one_at_a_time = threading.RLock()
os.register_at_fork(after_in_child=lambda: globals().update(_one_at_a_time=threading.RLock()))


def launch(
    library: Library,
    plan: Plan,
    grid: Any,
    block: Any,
    args: Sequence[Any],
    shared: int,
    shared_limit: int | None,
    mode: str,
) -> None:
    """Run a kernel to its end.

    `shared_limit` is what the kernel may ask for as dynamic shared memory, or None where nobody has raised it:
    then 48 KiB hold the static and the dynamic part together, as on a card.

    Raises
    ------
    KernelError
        When a check finds a fault; the launch stopped there.
    CUDADriverError
        For a geometry that no card launches.
    TypeError, ValueError
        For arguments that do not fit the kernel's parameters.
    """
    shared = int(shared)
    grid3, block3 = check_geometry(grid, block, shared, shared_limit or STATIC_SHARED_LIMIT)
    entry = plan.entry
    threads = block3[0] * block3[1] * block3[2]
    if threads > entry.max_threads:
        raise CUDADriverError(
            1,
            f"block {block3} has {threads:,} threads; kernel `{entry.name}` allows {entry.max_threads:,}, by its "
            f"__launch_bounds__",
        )
    packed = _pack(plan, args)
    plain = mode == "fast" and entry.block_address != 0
    request = LaunchRequest(
        entry.block_address if plain else entry.address,
        packed,
        len(packed),
        ctypes.addressof(plan.offsets),
        ctypes.addressof(plan.item_sizes),
        len(plan.converters),
        library.image[0],
        library.image[1],
        grid3,
        block3,
        shared,
        STATIC_SHARED_LIMIT if shared_limit is None else SHARED_OPT_IN_LIMIT,
        library.indexed_lines,
        len(library.indexed_lines),
        mode == "full",
        plain,
        settings.current_timeout(),
    )
    fault, counters = diagnose.Fault(), report.Counters()
    runtime = native.runtime()
    with _one_at_a_time:  # what the runtime tells of a launch stands until the next one
        kind = runtime.emu_launch(ctypes.byref(request), ctypes.byref(fault), ctypes.byref(counters))
        _print_output(runtime)
        launched = diagnose.Launched(library, entry, grid3, block3, args, mode)
        report.record(launched, counters)
        if kind == diagnose.INTERRUPTED:
            raise KeyboardInterrupt
        if kind:
            raise diagnose.error(fault, launched)


def _print_output(runtime: ctypes.CDLL) -> None:
    """What the kernel printed, on Python's standard output (so that a notebook shows it)."""
    text = ctypes.c_char_p()
    size = runtime.emu_printed(ctypes.byref(text))
    if size:
        sys.stdout.write(ctypes.string_at(text, size).decode(errors="replace"))
