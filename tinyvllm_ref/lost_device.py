"""A card that this process can not use any more: one error that says so, and quiet from there on.

A kernel that touches memory which is not its own, an ECC error that can not be corrected, a card that has left the bus:
CUDA then answers every later call of the process with the same error, whatever the call is. It may come to light long
after its cause, in a copy or a launch that is innocent.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, TracebackType
from typing import Any

from .device import cp

# What a kernel's own fault is called (cudaError_t in the CUDA runtime's manual), without "cudaError".
_FAULTS_OF_KERNELS = (
    *("IllegalAddress", "MisalignedAddress", "InvalidAddressSpace", "IllegalInstruction", "InvalidPc"),
    *("HardwareStackError", "LaunchFailure", "Assert"),
)


class DeviceLost(RuntimeError):
    """This process can not use its GPU any more; the message says which, CUDA's name of the error, and what to do."""


@contextmanager
def losses_named() -> Iterator[None]:
    """Around work on the device: an error after which CUDA answers nothing any more becomes a :class:`DeviceLost`.

    Every other error stays what it is.

    Raises
    ------
    DeviceLost
        The device is lost, with this error or since an earlier one.
    """
    device = "the GPU"
    try:
        device = _name(cp.cuda.Device().id)
        yield
    except DeviceLost:
        raise
    except Exception as error:
        said = _what_cuda_says()
        if not said:
            raise
        _hush_destructors()
        raise DeviceLost(_message(device, said)) from error


@functools.cache
def _name(device: int) -> str:
    """``"GPU 0 (NVIDIA H200)"``: asked while it answers."""
    name = cp.cuda.runtime.getDeviceProperties(device)["name"]
    return f"GPU {device} ({name.decode() if isinstance(name, bytes) else name})"


def _what_cuda_says() -> str:
    """CUDA's name and text of the error that it answers everything with; "" where the device works."""
    try:
        cp.cuda.runtime.deviceSynchronize()
    except Exception as error:
        # While another thread records a graph, waiting is not allowed: no news of the device.
        return "" if "StreamCapture" in str(error) else str(error)
    return ""


def _message(device: str, said: str) -> str:
    if said.partition(":")[0].removeprefix("cudaError") in _FAULTS_OF_KERNELS:
        hint = (
            "A kernel did something that it must not: run the same command with `compute-sanitizer` before it, which "
            "names the kernel"
        )
    else:
        hint = "`nvidia-smi` and the system's log (`dmesg`, lines with Xid) say more of the card"
    return (
        f"{device} is lost to this process: {said}. CUDA refuses every later call, so the process must be started "
        f"again (a notebook's kernel: restarted). {hint}"
    )


@functools.cache
def _hush_destructors() -> None:
    """Keep destructors of events, graphs, kernels and memory quiet, each of which fails now and can not be mended."""
    package = cp.cuda.runtime.CUDARuntimeError.__module__.partition(".")[0]
    show, show_ignored = sys.excepthook, sys.unraisablehook

    # These are called until the interpreter's very end, when this module has no names any more.
    def is_cudas(kind: type[BaseException]) -> bool:
        """Whether it is an error of CUDA's runtime, its driver or one of its libraries."""
        return any(base.__module__.partition(".")[0] == package for base in kind.__mro__)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Before it calls an error ignored, Cython prints it as if nobody had caught it."""
        compiled = trace is None or trace.tb_frame.f_code.co_filename.endswith(".pyx")
        if not (compiled and is_cudas(kind)):
            show(kind, error, trace)

    def hook_ignored(ignored: Any) -> None:
        if not is_cudas(ignored.exc_type):
            show_ignored(ignored)

    sys.excepthook, sys.unraisablehook = hook, hook_ignored
    last_moments = ModuleType(f"{__name__}.last_moments")
    last_moments.silence = _Silence()  # type: ignore[attr-defined]
    sys.modules[last_moments.__name__] = last_moments


class _Silence:
    """Closes standard error when it dies: with the modules, after all that programs have to say at their end.

    The very last destructors run when ``sys`` itself has no hooks any more, and Python would say that it misses them.
    """

    def __del__(
        self, open_: Any = os.open, dup2: Any = os.dup2, nowhere: Any = (os.devnull, os.O_WRONLY)
    ) -> None:
        dup2(open_(*nowhere), 2)
