"""The one place that decides between a GPU and its stand-in.

``from tinyvllm_ref.device import cp, cupyx`` gives CuPy where an NVIDIA GPU can be used, and
:mod:`tinyvllm_ref.emulation` elsewhere. ``TINYVLLM_DEVICE`` forces one: ``cuda``, ``cpu``, or ``auto``.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_CHOICES = ("auto", "cuda", "cpu")
_LEAST_CAPABILITY = (7, 5)  # what the kernels are compiled and tested for
# The oldest driver for each CUDA that CuPy may be built with (CUDA Toolkit release notes, "Minimum Required Driver").
_LEAST_DRIVER = {12: "525.60", 13: "580"}


def _install_hint() -> str:
    from .installing import pip_install  # not above: a learner's program needs nothing but this module

    line = pip_install("cupy-cuda12x>=14", "cuda-toolkit[nvrtc,cudart,cublas]==12.*")
    return f"Install CuPy and the CUDA libraries it uses with: {line}"


class NoDevice(RuntimeError):
    """``TINYVLLM_DEVICE=cuda`` was asked for and there is no usable GPU; the message says what is missing."""


def _choice() -> str:
    choice = os.environ.get("TINYVLLM_DEVICE", "auto") or "auto"
    if choice not in _CHOICES:
        raise ValueError(f"TINYVLLM_DEVICE is {choice!r}; it must be one of: {', '.join(_CHOICES)}")
    return choice


def _cupy() -> tuple[ModuleType, ModuleType] | str:
    """CuPy and cupyx when a kernel can be launched through them; else what is in the way."""
    try:
        import cupy
        import cupyx
        import cupyx.profiler
    except Exception as error:  # a broken install raises more than ImportError
        return f"CuPy can not be imported ({type(error).__name__}: {error}). {_install_hint()}"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
        if count == 0:
            return "CuPy finds no NVIDIA GPU on this machine"
        cupy.cuda.runtime.deviceSynchronize()
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    except Exception as error:
        return f"CuPy is installed, and the GPU does not answer ({error}). {_driver_hint(error, cupy)}"
    return _too_old(properties) or (cupy, cupyx)


def _too_old(properties: dict[str, Any]) -> str:
    """Why the kernels do not run on a card; "" where they do."""
    capability = (int(properties["major"]), int(properties["minor"]))
    if capability >= _LEAST_CAPABILITY:
        return ""
    has, needs = (".".join(map(str, version)) for version in (capability, _LEAST_CAPABILITY))
    return (
        f"the GPU, {properties['name'].decode()}, has compute capability {has}; it must be {needs} or more (such as a "
        "T4). CUDA_VISIBLE_DEVICES chooses another GPU of this machine"
    )


def _driver_hint(error: Exception, cupy: Any) -> str:
    """What to do about a device that CuPy can not use."""
    name = str(error).partition(":")[0].removeprefix("cudaError")
    if not has_driver():
        return "No NVIDIA driver is installed: install one, then restart"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if name == "NoDevice" and visible is not None:
        return f"CUDA_VISIBLE_DEVICES is {visible!r} and hides every GPU: unset it, or name one, such as 0"
    if name == "InsufficientDriver":
        return _update_hint(cupy)
    hints = {
        "MemoryAllocation": "Other programs hold all of its memory: `nvidia-smi` shows which",
        "DevicesUnavailable": "Another program has it for itself: `nvidia-smi` shows which",
        "SystemDriverMismatch": "The driver has been updated and is not loaded yet: restart the machine",
        "SystemNotReady": "Its services do not run (with NVSwitch: nvidia-fabricmanager): start them",
    }
    default = "See whether `nvidia-smi` works; if not, reinstall the NVIDIA driver, then restart"
    return hints.get(name, default)


def _update_hint(cupy: Any) -> str:
    """How new the driver must be for the CUDA that CuPy is built with."""
    try:
        cuda = cupy.cuda.runtime.runtimeGetVersion() // 1000
    except Exception:  # CuPy 14 is made for 12 and 13
        cuda = min(_LEAST_DRIVER)
    to = f" to {_LEAST_DRIVER[cuda]} or newer (Linux)" if cuda in _LEAST_DRIVER else ""
    return (
        f"The NVIDIA driver is older than CUDA {cuda} needs: update it{to}, then restart; "
        "`nvidia-smi` prints its version"
    )


def has_driver() -> bool:
    """Whether an NVIDIA driver is on this machine."""
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()


def _load() -> tuple[Any, Any, str]:
    """The array module, its companion, and why it is not the GPU's where that was not asked for."""
    choice, found = _choice(), ""
    if choice != "cpu":
        answer = _cupy()
        if not isinstance(answer, str):
            return *answer, ""
        if choice == "cuda":
            raise NoDevice(f"TINYVLLM_DEVICE=cuda, but {answer}")
        found = answer
    from . import emulation

    return emulation, emulation.cupyx, found


cp, cupyx, _no_gpu = _load()

is_gpu: bool = cp.__name__ == "cupy"
"""True where kernels run on an NVIDIA GPU, False where they run in the emulation."""


def unused_gpu() -> str:
    """Why the GPU of this machine is not used, and what to do; "" where it is, or where there is no driver."""
    return _no_gpu if _no_gpu and has_driver() else ""


def describe() -> str:
    """One line that says what kernels run on."""
    if not is_gpu:
        says = (
            "CPU emulation: kernels are compiled for this computer's processor and checked; no GPU code runs"
        )
        if not unused_gpu():
            return says
        from .installing import typed

        return f"{says}; a GPU is here and can not be used: `{typed('tinyvllm')} doctor` says why"
    properties = cp.cuda.runtime.getDeviceProperties(cp.cuda.Device().id)
    name = properties["name"].decode()
    return f"{name}, compute capability {properties['major']}.{properties['minor']}, CuPy {cp.__version__}"


def free_bytes() -> int:
    """Bytes that arrays can take now: what is free on the device and what CuPy keeps for later, within its limit."""
    pool = cp.get_default_memory_pool()
    free = int(cp.cuda.runtime.memGetInfo()[0]) + int(pool.free_bytes())
    limit = int(pool.get_limit())
    return max(0, min(free, limit - int(pool.used_bytes()))) if limit else free


def _say_once() -> None:
    """On a terminal, say that no GPU code runs; a notebook says it in its first cell."""
    if not is_gpu and "ipykernel" not in sys.modules and sys.stderr.isatty():
        print(f"tinyvllm: {describe()}", file=sys.stderr)


_say_once()
