"""What tells the stand-in for a card from the emulation that it is made of."""

from __future__ import annotations

import ctypes
import importlib
import time
from typing import Any

from tinyvllm_ref.emulation import launch as emulations_launch

_NOT_IN_CUPY = (
    "BarrierDivergence", "DataRace", "KernelAssertion", "KernelError", "KernelFault", "KernelTimeout", "LaunchReport",
    "OutOfBounds", "UninitializedRead", "checks", "current_mode", "cupyx", "is_emulation", "set_checks", "set_workers",
    "timeout", "trace",
)  # fmt: skip
_MEMORY = 2 << 30  # bytes that it says it has
_LEFTOVER = 0x3C  # in each byte of fresh memory: as float32 or bfloat16 about 0.01

only_timed = False
"""Launches and products are checked and not run: what the course times has a card's size."""


def change(cupy: dict[str, Any]) -> None:
    """Make a card of the second emulation; `cupy` has the names of its module."""
    _launches()
    _memory()
    _device()
    _times()
    for name in _NOT_IN_CUPY:
        del cupy[name]


def _module(name: str) -> Any:
    return importlib.import_module(f"cupy.{name}")


def _launches() -> None:
    """No access is checked, and a launch for a time alone does not run."""
    launch, raw_kernel, cublas, settings = map(_module, ("launch", "raw_kernel", "cublas", "settings"))
    settings.current_mode = lambda: "fast"
    launch._one_at_a_time = emulations_launch._one_at_a_time  # the native library is one for both
    really_launch, product = launch.launch, cublas._gemm

    def checked(library: Any, plan: Any, grid: Any, block: Any, args: Any, *rest: Any) -> None:
        if only_timed:
            shared, limit, _ = rest
            launch.check_geometry(grid, block, int(shared), limit or launch.STATIC_SHARED_LIMIT)
            launch._pack(plan, args)
        else:
            really_launch(library, plan, grid, block, args, *rest)

    raw_kernel.launch = checked
    cublas._gemm = lambda: (lambda *_: 0) if only_timed else product()


def _memory() -> None:
    """Fresh memory holds what somebody left there, and not the emulation's poison."""
    memory, native = _module("memory"), _module("native")
    take = memory.PooledMemory.__init__

    def taken(self: Any, block: Any, pool: Any) -> None:
        take(self, block, pool)
        ctypes.memset(self.ptr, _LEFTOVER, min(self.size, 16 << 20))

    memory.PooledMemory.__init__ = taken
    memory.total_bytes = lambda: _MEMORY
    memory.free_bytes = lambda: max(0, _MEMORY - int(native.runtime().emu_live_bytes()))


def _device() -> None:
    """It says of itself what a card says."""
    cuda = _module("cuda")
    cuda.is_available = lambda: True
    cuda.Device.compute_capability = property(lambda self: "90")
    cuda._ATTRIBUTES["L2CacheSize"] = (38, 50 << 20)
    cuda._ATTRIBUTES["MaxSharedMemoryPerBlockOptin"] = (97, 227 << 10)
    properties = cuda.runtime.getDeviceProperties
    said = {"name": b"a stand-in for a card", "major": 9, "minor": 0, "l2CacheSize": 50 << 20}
    cuda.runtime.getDeviceProperties = lambda device: properties(device) | said


def _times() -> None:
    """Times between events are numbers."""
    stream, cuda = _module("stream"), _module("cuda")
    record = stream.Event.record

    def recorded(self: Any, on: Any = None) -> None:
        record(self, on)
        self.at = time.perf_counter()

    def elapsed(start: Any, end: Any) -> float:
        return max(1e-3, 1e3 * (end.at - start.at))

    stream.Event.record = recorded
    stream.get_elapsed_time = cuda.get_elapsed_time = elapsed
