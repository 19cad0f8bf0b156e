"""Device memory: allocations, pointers into them, the memory pools, and pinned host memory.

The names and the arithmetic of ``cupy.cuda.memory``. Device memory is host memory that the runtime library
hands out between inaccessible pages, poisoned with 0xFF (NaN as a float, -1 as an integer) until something
writes it.

Two things differ from CuPy, both for the sake of the checks. A pool hands a freed block out again only for a
request of the same size: it never splits one. And a block's bound is the size that was asked for, not the
next multiple of 512 (what the pool *counts* is the multiple, as in CuPy).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import native
from .errors import CUDARuntimeError, OutOfMemoryError, TooManyArrays

if TYPE_CHECKING:
    from .cuda import Device

__all__ = [
    "BaseMemory",
    "ManagedMemory",
    "Memory",
    "MemoryPointer",
    "MemoryPool",
    "OutOfMemoryError",
    "PinnedMemory",
    "PinnedMemoryPointer",
    "PinnedMemoryPool",
    "PooledMemory",
    "UnownedMemory",
    "alloc",
    "alloc_pinned_memory",
    "get_allocator",
    "malloc_managed",
    "set_allocator",
    "set_pinned_memory_allocator",
    "using_allocator",
]

ALLOCATION_UNIT = 512  # bytes; a pool counts in multiples of it
_ALWAYS_TRY = 64 << 20  # bytes; below this an allocation is tried without looking at the free memory first

_pools: weakref.WeakSet[MemoryPool] = weakref.WeakSet()


def _hold_pools() -> None:
    """Before a fork: no other thread is in the midst of a change that the child would never see finished."""
    for pool in list(_pools):
        pool._lock.acquire()


def _release_pools() -> None:
    for pool in list(_pools):
        with contextlib.suppress(RuntimeError):  # made since
            pool._lock.release()


os.register_at_fork(before=_hold_pools, after_in_parent=_release_pools, after_in_child=_release_pools)

Allocator = Callable[[int], "MemoryPointer"]
HostPointer = int | ctypes.c_void_p


# ---------------- how much there is


def total_bytes() -> int:
    """Bytes of memory of the "device": the machine's, or the container's limit where that is lower."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read_number("/sys/fs/cgroup/memory.max")
    return physical if limit is None else min(physical, limit)


def free_bytes() -> int:
    """Bytes of that memory which could be allocated now."""
    free = total_bytes() - int(native.runtime().emu_live_bytes())
    for line in _read_lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit = _read_number("/sys/fs/cgroup/memory.max")
    used = _read_number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        free = min(free, limit - used)
    return max(free, 0)


def mappings_are_used_up() -> bool:
    """Has this process as many mappings as the system allows one? Every live array takes two of them."""
    limit = _read_number("/proc/sys/vm/max_map_count")
    return limit is not None and len(_read_lines("/proc/self/maps")) >= limit - 100


def _read_lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _read_number(path: str) -> int | None:
    """The number in a one-line file, or None where there is no file or no limit ("max")."""
    text = "".join(_read_lines(path))
    return int(text) if text.isdigit() else None


# ---------------- checks on raw addresses


def is_device(ptr: int) -> bool:
    """Whether `ptr` lies in a live device allocation."""
    return bool(native.runtime().emu_is_live(ptr, 0))


def check_device_range(ptr: int, size: int, what: str) -> None:
    """Raise CUDARuntimeError unless [ptr, ptr + size) lies in one live device allocation.

    Parameters
    ----------
    ptr : int
        Address of the first byte.
    size : int
        Bytes; 0 needs no memory at all.
    what : str
        What the range is, for the message: ``"memcpy: destination"``.
    """
    if size < 0:
        raise CUDARuntimeError(1, f"{what}: the size must be 0 or more bytes, not {size}")
    if size == 0 or native.runtime().emu_is_live(ptr, size):
        return
    base, length = ctypes.c_void_p(), ctypes.c_size_t()
    if not native.runtime().emu_allocation_of(ptr, ctypes.byref(base), ctypes.byref(length)):
        raise CUDARuntimeError(
            1, f"{what} {ptr:#x} is not device memory, or was freed; pass the .data.ptr of a live array"
        )
    offset = ptr - int(base.value or 0)
    raise CUDARuntimeError(
        1, f"{what} needs {size:,} bytes from byte {offset:,} of an allocation of {length.value:,} bytes"
    )


def check_host_pointer(pointer: HostPointer | None, what: str) -> int:
    """The address that a host pointer holds; CUDARuntimeError for null."""
    address = pointer.value if isinstance(pointer, ctypes.c_void_p) else pointer
    if not address:
        raise CUDARuntimeError(1, f"{what} is a null pointer")
    return int(address)


# ---------------- allocations


class BaseMemory:
    """A range of device memory.

    Attributes
    ----------
    ptr : int
        Address of its first byte; 0 for an empty one.
    size : int
        Its bytes.
    device_id : int
        Always 0: there is one device.
    """

    ptr: int = 0
    size: int = 0
    device_id: int = 0
    _buffer: Any = None

    @property
    def device(self) -> Device:
        """The device that the memory is on."""
        from .cuda import Device

        return Device(self.device_id)

    def buffer(self) -> Any:
        """The bytes as an object that NumPy can make an array over."""
        if self._buffer is None:
            self._buffer = (ctypes.c_char * self.size).from_address(self.ptr)
        return self._buffer


class Memory(BaseMemory):
    """One allocation, as ``cudaMalloc`` would make it; freed with the object.

    Parameters
    ----------
    size : int
        Bytes.

    Raises
    ------
    OutOfMemoryError
        If the machine has not got that much memory.
    """

    def __init__(self, size: int) -> None:
        if size < 0:
            raise ValueError(f"the size of an allocation must be 0 or more bytes, not {size}")
        self.size = size
        if size == 0:
            return
        library = native.runtime()
        if size > _ALWAYS_TRY and size > free_bytes():
            raise OutOfMemoryError(size, int(library.emu_live_bytes()))
        self.ptr = int(library.emu_malloc(size) or 0)
        if not self.ptr:
            if mappings_are_used_up():
                raise TooManyArrays(size, int(library.emu_live_bytes()))
            raise OutOfMemoryError(size, int(library.emu_live_bytes()))
        # Kept here because module globals may be gone when the interpreter ends.
        self._free = library.emu_free

    def __del__(self) -> None:
        if self.ptr:
            self._free(self.ptr)
            self.ptr = 0


class ManagedMemory(Memory):
    """Unified memory: the same thing here, where host and device share their memory anyway."""


class UnownedMemory(BaseMemory):
    """Device memory that someone else owns: `owner` is kept alive, nothing is freed.

    Parameters
    ----------
    ptr, size : int
        Address and bytes: must lie in a live allocation.
    owner : object
        What keeps the memory alive.
    device_id : int
        -1 (find out) or 0.
    """

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        if device_id not in (-1, 0):
            raise CUDARuntimeError(101, f"device_id {device_id}: the only device is 0")
        check_device_range(ptr, size, "UnownedMemory: pointer")
        self.ptr = ptr
        self.size = size
        self._owner = owner


class PooledMemory(BaseMemory):
    """A block that goes back to its pool with the object, or earlier by :meth:`free`."""

    def __init__(self, block: BaseMemory, pool: MemoryPool) -> None:
        self.ptr = block.ptr
        self.size = block.size
        self.pool = pool
        self._buffer = block.buffer()

    def free(self) -> None:
        """Give the block back to the pool; a second time does nothing."""
        ptr, self.ptr = self.ptr, 0
        if ptr:
            self.pool._give_back(ptr)

    def __del__(self) -> None:
        self.free()


class MemoryPointer:
    """A place in device memory, which it keeps alive.

    Parameters
    ----------
    mem : BaseMemory
        The memory.
    offset : int
        Bytes from its start.
    """

    def __init__(self, mem: BaseMemory, offset: int) -> None:
        self.mem = mem
        self.ptr = mem.ptr + offset

    @property
    def device_id(self) -> int:
        return self.mem.device_id

    @property
    def device(self) -> Device:
        """The device that the memory is on."""
        return self.mem.device

    def __int__(self) -> int:
        return self.ptr

    def _check(self, size: int, what: str) -> None:
        """Raise CUDARuntimeError unless `size` bytes from here lie in the memory."""
        offset = self.ptr - self.mem.ptr
        if size < 0:
            raise CUDARuntimeError(1, f"{what}: the size must be 0 or more bytes, not {size}")
        if size and not 0 <= offset <= self.mem.size - size:
            raise CUDARuntimeError(
                1,
                f"{what} needs {size:,} bytes from byte {offset:,} of memory of {self.mem.size:,} bytes",
            )

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + int(offset))

    def __radd__(self, offset: int) -> MemoryPointer:
        return self + offset

    def __sub__(self, offset: int) -> MemoryPointer:
        return self + -int(offset)

    def __repr__(self) -> str:
        return f"<MemoryPointer {self.ptr:#x} device=0 mem={self.mem!r}>"

    def copy_from_host(self, mem: HostPointer, size: int) -> None:
        """Copy `size` bytes from host address `mem` to here."""
        self._check(size, "copy_from_host: destination")
        if size:
            ctypes.memmove(self.ptr, check_host_pointer(mem, "copy_from_host: source"), size)
            native.runtime().emu_mark_initialized(self.ptr, size)

    def copy_from_device(self, src: MemoryPointer, size: int) -> None:
        """Copy `size` bytes from device pointer `src` to here."""
        src._check(size, "copy_from_device: source")
        self._check(size, "copy_from_device: destination")
        if size:
            ctypes.memmove(self.ptr, src.ptr, size)
            native.runtime().emu_mark_initialized(self.ptr, size)

    def copy_from(self, mem: HostPointer | MemoryPointer, size: int) -> None:
        """Copy `size` bytes from a device pointer or a host address to here."""
        if isinstance(mem, MemoryPointer):
            self.copy_from_device(mem, size)
        else:
            self.copy_from_host(mem, size)

    def copy_to_host(self, mem: HostPointer, size: int) -> None:
        """Copy `size` bytes from here to host address `mem`."""
        self._check(size, "copy_to_host: source")
        if size:
            ctypes.memmove(check_host_pointer(mem, "copy_to_host: destination"), self.ptr, size)

    def memset(self, value: int, size: int) -> None:
        """Set `size` bytes from here on to the low byte of `value`."""
        self._check(size, "memset: destination")
        if size:
            ctypes.memset(self.ptr, value & 0xFF, size)
            native.runtime().emu_mark_initialized(self.ptr, size)

    # Work on a stream is done when it is asked for, so the asynchronous forms are the same functions.
    def copy_from_host_async(self, mem: HostPointer, size: int, stream: Any = None) -> None:
        """:meth:`copy_from_host`, on a stream."""
        self.copy_from_host(mem, size)

    def copy_from_device_async(self, src: MemoryPointer, size: int, stream: Any = None) -> None:
        """:meth:`copy_from_device`, on a stream."""
        self.copy_from_device(src, size)

    def copy_from_async(self, mem: HostPointer | MemoryPointer, size: int, stream: Any = None) -> None:
        """:meth:`copy_from`, on a stream."""
        self.copy_from(mem, size)

    def copy_to_host_async(self, mem: HostPointer, size: int, stream: Any = None) -> None:
        """:meth:`copy_to_host`, on a stream."""
        self.copy_to_host(mem, size)

    def memset_async(self, value: int, size: int, stream: Any = None) -> None:
        """:meth:`memset`, on a stream."""
        self.memset(value, size)


def _malloc(size: int) -> MemoryPointer:
    """The raw allocator: no pool."""
    return MemoryPointer(Memory(size), 0)


def malloc_managed(size: int) -> MemoryPointer:
    """Allocate unified memory, which here is all the memory there is."""
    return MemoryPointer(ManagedMemory(size), 0)


# ---------------- the pool


class MemoryPool:
    """Keeps freed blocks and hands them out again, so that allocating is cheap and needs no synchronising.

    A block that is handed out again is poisoned and uninitialised, like a new one.

    Parameters
    ----------
    allocator : callable, optional
        Makes new blocks: ``allocator(size) -> MemoryPointer``; by default one allocation a block.
    """

    def __init__(self, allocator: Allocator | None = None) -> None:
        self._allocator = allocator if allocator is not None else _malloc
        self._free: dict[int, list[BaseMemory]] = {}  # counted size -> blocks, the last freed at the end
        # Address -> block. The pool owns the blocks in use too: were they their PooledMemory's, the garbage
        # collector could finalise a block before the PooledMemory that then gives it back.
        self._in_use: dict[int, BaseMemory] = {}
        self._used_bytes = 0
        self._free_bytes = 0
        self._limit = 0
        # Reentrant: the garbage collector may give a block back while this thread is in malloc.
        self._lock = threading.RLock()
        _pools.add(self)

    def malloc(self, size: int) -> MemoryPointer:
        """Allocate.

        Parameters
        ----------
        size : int
            Bytes.

        Returns
        -------
        MemoryPointer

        Raises
        ------
        OutOfMemoryError
            If neither the machine nor the limit has room, even with all free blocks given back.
        """
        if size == 0:
            return _malloc(0)
        counted = _counted(size)
        with self._lock:
            block = self._reuse(counted, size) or self._make(counted, size)
            self._used_bytes += counted
            self._in_use[block.ptr] = block
            return MemoryPointer(PooledMemory(block, self), 0)

    def _reuse(self, counted: int, size: int) -> BaseMemory | None:
        """A free block of exactly this size; one that only counts the same is given up for a new one."""
        blocks = self._free.get(counted)
        if not blocks:
            return None
        position = next((i for i in reversed(range(len(blocks))) if blocks[i].size == size), None)
        block = blocks.pop(-1 if position is None else position)
        self._free_bytes -= counted
        if position is None:
            return None
        native.runtime().emu_mark_uninitialized(block.ptr, block.size)
        return block

    def _make(self, counted: int, size: int) -> BaseMemory:
        """A new block, giving the free ones back first where it does not fit otherwise."""
        if self._limit and self.total_bytes() + counted > self._limit:
            self.free_all_blocks()
            if self.total_bytes() + counted > self._limit:
                raise OutOfMemoryError(counted, self.total_bytes(), self._limit)
        try:
            return self._allocator(size).mem
        except OutOfMemoryError:
            self.free_all_blocks()
        try:
            return self._allocator(size).mem
        except TooManyArrays:
            raise
        except OutOfMemoryError:
            raise OutOfMemoryError(counted, self.total_bytes(), self._limit) from None

    def _give_back(self, ptr: int) -> None:
        with self._lock:
            block = self._in_use.pop(ptr)
            counted = _counted(block.size)
            self._free.setdefault(counted, []).append(block)
            self._used_bytes -= counted
            self._free_bytes += counted

    def free_all_blocks(self, stream: Any = None) -> None:
        """Give all free blocks back to the system."""
        with self._lock:
            self._free.clear()
            self._free_bytes = 0

    def free_all_free(self) -> None:
        """The old name of :meth:`free_all_blocks`."""
        self.free_all_blocks()

    def n_free_blocks(self) -> int:
        """How many blocks wait to be used again."""
        with self._lock:
            return sum(len(blocks) for blocks in self._free.values())

    def used_bytes(self) -> int:
        """Bytes in use, in multiples of 512 a block."""
        return self._used_bytes

    def free_bytes(self) -> int:
        """Bytes that wait to be used again."""
        return self._free_bytes

    def total_bytes(self) -> int:
        """Bytes that the pool holds: used and free."""
        return self._used_bytes + self._free_bytes

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        """Set an upper limit to what the pool holds; 0 or nothing removes it.

        Parameters
        ----------
        size : int, optional
            Bytes.
        fraction : float, optional
            Part of the device's memory, from 0 to 1; not together with `size`.
        """
        if size is not None and fraction is not None:
            raise ValueError("size and fraction cannot be specified at the same time")
        if fraction is not None:
            if not 0 <= fraction <= 1:
                raise ValueError(f"memory limit fraction out of range: {fraction}; it must be from 0 to 1")
            size = int(fraction * total_bytes())
        if size is not None and size < 0:
            raise ValueError(f"memory limit size out of range: {size}; it must be 0 or more bytes")
        self._limit = size or 0

    def get_limit(self) -> int:
        """The limit in bytes, 0 for none."""
        return self._limit


def _counted(size: int) -> int:
    """The bytes that a pool counts for a request of `size` bytes."""
    return -(-size // ALLOCATION_UNIT) * ALLOCATION_UNIT


default_memory_pool = MemoryPool()
_allocator: Allocator = default_memory_pool.malloc
_thread = threading.local()


def alloc(size: int) -> MemoryPointer:
    """Allocate `size` bytes of device memory with the current allocator."""
    return get_allocator()(size)


def get_allocator() -> Allocator:
    """The current allocator: the innermost :func:`using_allocator` of this thread, else the global one."""
    stack = getattr(_thread, "allocators", None)
    return stack[-1] if stack else _allocator


def set_allocator(allocator: Allocator | None = None) -> None:
    """Set the allocator of all threads; None is the raw allocator, with no pool."""
    global _allocator
    if getattr(_thread, "allocators", None):
        raise ValueError("Can't change the global allocator inside `using_allocator` context manager")
    _allocator = allocator if allocator is not None else _malloc


@contextlib.contextmanager
def using_allocator(allocator: Allocator | None = None) -> Iterator[None]:
    """Use another allocator in this thread within a ``with`` statement; None is the raw allocator."""
    if not hasattr(_thread, "allocators"):
        _thread.allocators = []
    _thread.allocators.append(allocator if allocator is not None else _malloc)
    try:
        yield
    finally:
        _thread.allocators.pop()


# ---------------- pinned host memory


class PinnedMemory:
    """Page-locked host memory on a card; here plain host memory.

    Parameters
    ----------
    size : int
        Bytes.
    flags : int
        What ``cudaHostAlloc`` would be given; without effect.
    """

    def __init__(self, size: int, flags: int = 0) -> None:
        if size < 0:
            raise ValueError(f"the size of an allocation must be 0 or more bytes, not {size}")
        self._storage = ctypes.create_string_buffer(max(size, 1))
        self.ptr = ctypes.addressof(self._storage)
        self.size = size


class PinnedMemoryPointer:
    """A place in pinned memory: ``.ptr``, ``.mem``, ``.size()``, and a buffer for ``numpy.frombuffer``.

    Parameters
    ----------
    mem : PinnedMemory
        The memory, which the pointer keeps alive.
    offset : int
        Bytes from its start.
    """

    mem: PinnedMemory
    ptr: int

    def __new__(cls, mem: PinnedMemory, offset: int = 0) -> PinnedMemoryPointer:
        if not 0 <= offset <= mem.size:
            raise ValueError(f"offset {offset} lies outside of pinned memory of {mem.size} bytes")
        pointer: PinnedMemoryPointer = _pinned_pointer_type(mem.size - offset).from_address(mem.ptr + offset)
        return pointer

    def __init__(self, mem: PinnedMemory, offset: int = 0) -> None:
        self.mem = mem
        self.ptr = mem.ptr + offset

    def size(self) -> int:
        """Bytes from here to the end of the memory."""
        return self.mem.size - (self.ptr - self.mem.ptr)

    def __add__(self, offset: int) -> PinnedMemoryPointer:
        return PinnedMemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)


@functools.lru_cache(maxsize=64)
def _pinned_pointer_type(size: int) -> Any:
    """PinnedMemoryPointer with the buffer interface of `size` bytes (a class can not give it before 3.12)."""
    return type("PinnedMemoryPointer", (PinnedMemoryPointer, ctypes.c_ubyte * size), {})


class PinnedMemoryPool:
    """The pool of pinned memory. Plain host memory needs none, so it never holds a free block."""

    def __init__(self, allocator: Callable[[int], PinnedMemoryPointer] | None = None) -> None:
        self._allocator = allocator if allocator is not None else _malloc_pinned

    def malloc(self, size: int) -> PinnedMemoryPointer:
        """Allocate `size` bytes."""
        return self._allocator(size)

    def free_all_blocks(self) -> None:
        """Give all free blocks back: there is none."""

    def n_free_blocks(self) -> int:
        """How many blocks wait to be used again: 0."""
        return 0


def _malloc_pinned(size: int) -> PinnedMemoryPointer:
    return PinnedMemoryPointer(PinnedMemory(size), 0)


default_pinned_memory_pool = PinnedMemoryPool()
_pinned_allocator: Callable[[int], PinnedMemoryPointer] = default_pinned_memory_pool.malloc


def alloc_pinned_memory(size: int) -> PinnedMemoryPointer:
    """Allocate `size` bytes of pinned host memory."""
    return _pinned_allocator(size)


def set_pinned_memory_allocator(allocator: Callable[[int], PinnedMemoryPointer] | None = None) -> None:
    """Set the allocator of pinned memory; None is the raw allocator."""
    global _pinned_allocator
    _pinned_allocator = allocator if allocator is not None else _malloc_pinned
