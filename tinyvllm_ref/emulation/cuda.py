"""The namespace ``cp.cuda``: memory, streams, events, cuBLAS, and what is called by name of the CUDA runtime.

The device says what it is: "CPU emulation (no GPU)", compute capability 0.0, no clock. Its limits are CUDA's,
so that a launch which is refused here would be refused by a card.
"""

from __future__ import annotations

import ctypes
import os
import threading
import types
from typing import Any

from . import cublas, memory, native, stream
from .array import missing
from .errors import CompileException, CUDADriverError, CUDARuntimeError
from .memory import (
    BaseMemory,
    ManagedMemory,
    Memory,
    MemoryPointer,
    MemoryPool,
    PinnedMemory,
    PinnedMemoryPointer,
    PinnedMemoryPool,
    UnownedMemory,
    alloc,
    alloc_pinned_memory,
    get_allocator,
    malloc_managed,
    set_allocator,
    set_pinned_memory_allocator,
    using_allocator,
)
from .stream import Event, ExternalStream, Graph, Stream, get_current_stream, get_elapsed_time

__all__ = [
    "BaseMemory",
    "Device",
    "Event",
    "ExternalStream",
    "Graph",
    "ManagedMemory",
    "Memory",
    "MemoryPointer",
    "MemoryPool",
    "PinnedMemory",
    "PinnedMemoryPointer",
    "PinnedMemoryPool",
    "Stream",
    "UnownedMemory",
    "alloc",
    "alloc_pinned_memory",
    "compiler",
    "cublas",
    "device",
    "driver",
    "get_allocator",
    "get_cublas_handle",
    "get_current_stream",
    "get_device_id",
    "get_elapsed_time",
    "get_local_runtime_version",
    "is_available",
    "malloc_managed",
    "memory",
    "pinned_memory",
    "runtime",
    "set_allocator",
    "set_pinned_memory_allocator",
    "stream",
    "using_allocator",
]


class _Namespace(types.ModuleType):
    """A module of ``cp.cuda`` that has what it is given, and says so of anything else."""

    def __init__(self, name: str, **members: Any) -> None:
        super().__init__(name)
        self.__dict__.update(members)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        missing(name, self.__name__)


# ---------------- the device

# cudaDeviceAttr by CuPy's names (cudaDevAttr...), with its number and its value here. The limits are those of
# cards of compute capability 8.6, 8.9 and 12.0 (101,376 bytes of shared memory a block, if asked for).
_ATTRIBUTES: dict[str, tuple[int, int]] = {
    "MaxThreadsPerBlock": (1, 1024),
    "MaxBlockDimX": (2, 1024),
    "MaxBlockDimY": (3, 1024),
    "MaxBlockDimZ": (4, 64),
    "MaxGridDimX": (5, 2**31 - 1),
    "MaxGridDimY": (6, 65535),
    "MaxGridDimZ": (7, 65535),
    "MaxSharedMemoryPerBlock": (8, 49152),
    "TotalConstantMemory": (9, 65536),
    "WarpSize": (10, 32),
    "MaxRegistersPerBlock": (12, 65536),
    "ClockRate": (13, 0),
    "MultiProcessorCount": (16, os.cpu_count() or 1),
    "Integrated": (18, 1),
    "MemoryClockRate": (36, 0),
    "GlobalMemoryBusWidth": (37, 0),
    "L2CacheSize": (38, 0),
    "MaxThreadsPerMultiProcessor": (39, 1024),
    "UnifiedAddressing": (41, 1),
    "MaxSharedMemoryPerMultiprocessor": (81, 102400),
    "MaxRegistersPerMultiprocessor": (82, 65536),
    "MaxSharedMemoryPerBlockOptin": (97, 101376),
}
_NAME = b"CPU emulation (no GPU)"


def _check_device(device: int) -> None:
    if device != 0:
        raise CUDARuntimeError(101, f"device {device}: the only device is 0, {_NAME.decode()}")


class Device:
    """The device: there is one, number 0.

    Parameters
    ----------
    device : int or Device, optional
        Its number.
    """

    def __init__(self, device: int | Device | None = None) -> None:
        self.id: int = device.id if isinstance(device, Device) else int(device or 0)
        _check_device(self.id)

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def use(self) -> Device:
        """Make this the current device, which it is."""
        return self

    def synchronize(self) -> None:
        """Wait until the device is done, which it is."""

    @property
    def compute_capability(self) -> str:
        """``"00"``: it is no card."""
        return "00"

    @property
    def attributes(self) -> dict[str, int]:
        """The device's attributes, by CUDA's names without ``cudaDevAttr``."""
        return {name: value for name, (_, value) in _ATTRIBUTES.items()}

    @property
    def mem_info(self) -> tuple[int, int]:
        """Free and total bytes of memory."""
        return memory.free_bytes(), memory.total_bytes()

    @property
    def pci_bus_id(self) -> str:
        """There is none."""
        raise CUDARuntimeError(101, "pci_bus_id: the emulation is on no bus")

    @property
    def cublas_handle(self) -> int:
        """The handle for ``cp.cuda.cublas``."""
        return cublas.default_handle()


def get_cublas_handle() -> int:
    """The handle for ``cp.cuda.cublas``."""
    return cublas.default_handle()


def get_device_id() -> int:
    """The current device: 0."""
    return 0


def is_available() -> bool:
    """False: there is no GPU that CuPy could use."""
    return False


def get_local_runtime_version() -> int:
    """0: no CUDA runtime is in use."""
    return 0


# ---------------- cp.cuda.runtime

HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, DEFAULT = range(5)
_allocations: dict[int, Memory | PinnedMemory] = {}
_lock = threading.Lock()


def _malloc(size: int) -> int:
    """cudaMalloc: the address of `size` new bytes, to be given to ``free``."""
    made = Memory(size)
    with _lock:
        _allocations[made.ptr] = made
    return made.ptr


def _malloc_async(size: int, stream: int) -> int:
    """``malloc``, on a stream."""
    return _malloc(size)


def _free(ptr: int) -> None:
    """cudaFree: only what ``malloc`` gave, once; 0 does nothing."""
    with _lock:
        if ptr and not isinstance(_allocations.get(ptr), Memory):
            raise CUDARuntimeError(1, f"free: {ptr:#x} did not come from malloc, or was freed before")
        _allocations.pop(ptr, None)


def _free_async(ptr: int, stream: int) -> None:
    """``free``, on a stream."""
    _free(ptr)


def _host_alloc(size: int, flags: int = 0) -> int:
    """cudaHostAlloc: the address of `size` new bytes of pinned host memory."""
    made = PinnedMemory(size, flags)
    with _lock:
        _allocations[made.ptr] = made
    return made.ptr


def _free_host(ptr: int) -> None:
    """cudaFreeHost: only what ``hostAlloc`` gave, once; 0 does nothing."""
    with _lock:
        if ptr and not isinstance(_allocations.get(ptr), PinnedMemory):
            raise CUDARuntimeError(1, f"freeHost: {ptr:#x} did not come from hostAlloc, or was freed before")
        _allocations.pop(ptr, None)


def _memcpy(dst: int, src: int, size: int, kind: int) -> None:
    """cudaMemcpy, with both addresses checked against `kind`."""
    if kind not in range(5):
        raise CUDARuntimeError(
            1, f"memcpy: kind is {kind}; it must be 0 to 4 (cp.cuda.runtime.memcpyHostToDevice ...)"
        )
    if size < 0:
        raise CUDARuntimeError(1, f"memcpy: size is {size}; it must be 0 or more bytes")
    if size == 0:
        return
    to_device = kind in (HOST_TO_DEVICE, DEVICE_TO_DEVICE) or (kind == DEFAULT and memory.is_device(dst))
    from_device = kind in (DEVICE_TO_HOST, DEVICE_TO_DEVICE) or (kind == DEFAULT and memory.is_device(src))
    _check_side("destination", dst, size, to_device)
    _check_side("source", src, size, from_device)
    ctypes.memmove(dst, src, size)
    if to_device:
        native.runtime().emu_mark_initialized(dst, size)


def _check_side(what: str, ptr: int, size: int, on_device: bool) -> None:
    if on_device:
        memory.check_device_range(ptr, size, f"memcpy: {what}")
        return
    memory.check_host_pointer(ptr, f"memcpy: {what}")
    if memory.is_device(ptr):
        raise CUDARuntimeError(1, f"memcpy: {what} {ptr:#x} is device memory, but the kind says host")


def _memcpy_async(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    """``memcpy``, on a stream."""
    _memcpy(dst, src, size, kind)


def _memset(ptr: int, value: int, size: int) -> None:
    """cudaMemset: set `size` bytes to the low byte of `value`."""
    memory.check_device_range(ptr, size, "memset: destination")
    if size:
        ctypes.memset(ptr, value & 0xFF, size)
        native.runtime().emu_mark_initialized(ptr, size)


def _memset_async(ptr: int, value: int, size: int, stream: int) -> None:
    """``memset``, on a stream."""
    _memset(ptr, value, size)


def _mem_get_info() -> tuple[int, int]:
    """Free and total bytes of memory."""
    return memory.free_bytes(), memory.total_bytes()


def _get_device_properties(device: int) -> dict[str, Any]:
    """The properties of the device, by the names of ``cudaDeviceProp``."""
    _check_device(device)
    value = Device(device).attributes
    return {
        "name": _NAME,
        "totalGlobalMem": memory.total_bytes(),
        "sharedMemPerBlock": value["MaxSharedMemoryPerBlock"],
        "sharedMemPerBlockOptin": value["MaxSharedMemoryPerBlockOptin"],
        "sharedMemPerMultiprocessor": value["MaxSharedMemoryPerMultiprocessor"],
        "regsPerBlock": value["MaxRegistersPerBlock"],
        "regsPerMultiprocessor": value["MaxRegistersPerMultiprocessor"],
        "warpSize": value["WarpSize"],
        "maxThreadsPerBlock": value["MaxThreadsPerBlock"],
        "maxThreadsPerMultiProcessor": value["MaxThreadsPerMultiProcessor"],
        "maxThreadsDim": tuple(value[f"MaxBlockDim{axis}"] for axis in "XYZ"),
        "maxGridSize": tuple(value[f"MaxGridDim{axis}"] for axis in "XYZ"),
        "multiProcessorCount": value["MultiProcessorCount"],
        "totalConstMem": value["TotalConstantMemory"],
        "major": 0,
        "minor": 0,
        "clockRate": 0,
        "memoryClockRate": 0,
        "memoryBusWidth": 0,
        "l2CacheSize": 0,
        "integrated": value["Integrated"],
        "unifiedAddressing": value["UnifiedAddressing"],
    }


def _device_get_attribute(attrib: int, device: int) -> int:
    """An attribute of the device by its number, ``cp.cuda.runtime.cudaDevAttr...``."""
    _check_device(device)
    for number, value in _ATTRIBUTES.values():
        if number == attrib:
            return value
    raise CUDARuntimeError(1, f"deviceGetAttribute: the emulation has no attribute {attrib}")


def _do_nothing(*handles: int) -> None:
    """Work is done when it is asked for: there is nothing to wait for."""


runtime = _Namespace(
    "cupy.cuda.runtime",
    CUDARuntimeError=CUDARuntimeError,
    is_hip=False,
    malloc=_malloc,
    mallocAsync=_malloc_async,
    mallocManaged=lambda size, flags=1: _malloc(size),
    free=_free,
    freeAsync=_free_async,
    hostAlloc=_host_alloc,
    freeHost=_free_host,
    memcpy=_memcpy,
    memcpyAsync=_memcpy_async,
    memset=_memset,
    memsetAsync=_memset_async,
    memGetInfo=_mem_get_info,
    getDeviceProperties=_get_device_properties,
    deviceGetAttribute=_device_get_attribute,
    getDevice=get_device_id,
    setDevice=_check_device,
    getDeviceCount=lambda: 1,
    deviceSynchronize=_do_nothing,
    streamSynchronize=_do_nothing,
    eventSynchronize=_do_nothing,
    profilerStart=_do_nothing,
    profilerStop=_do_nothing,
    driverGetVersion=lambda: 0,
    runtimeGetVersion=lambda: 0,
    memcpyHostToHost=HOST_TO_HOST,
    memcpyHostToDevice=HOST_TO_DEVICE,
    memcpyDeviceToHost=DEVICE_TO_HOST,
    memcpyDeviceToDevice=DEVICE_TO_DEVICE,
    memcpyDefault=DEFAULT,
    CUDA_R_32F=0,
    CUDA_R_16F=2,
    CUDA_R_16BF=14,
    streamDefault=0,
    streamNonBlocking=1,
    streamLegacy=1,
    streamPerThread=2,
    hostAllocDefault=0,
    eventDefault=0,
    eventDisableTiming=2,
    **{f"cudaDevAttr{name}": number for name, (number, _) in _ATTRIBUTES.items()},
)

# ---------------- the small namespaces

driver = _Namespace("cupy.cuda.driver", CUDADriverError=CUDADriverError, get_build_version=lambda: 0)
compiler = _Namespace("cupy.cuda.compiler", CompileException=CompileException)
device = _Namespace(
    "cupy.cuda.device", Device=Device, get_cublas_handle=get_cublas_handle, get_device_id=get_device_id
)
pinned_memory = _Namespace(
    "cupy.cuda.pinned_memory",
    PinnedMemory=PinnedMemory,
    PinnedMemoryPointer=PinnedMemoryPointer,
    PinnedMemoryPool=PinnedMemoryPool,
    alloc_pinned_memory=alloc_pinned_memory,
    set_pinned_memory_allocator=set_pinned_memory_allocator,
)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    missing(name, "cupy.cuda")
