"""The one place that decides between a GPU and its stand-in.

``from tinyvllm_ref.device import cp, cupyx`` gives CuPy where an NVIDIA GPU can be used, and
:mod:`tinyvllm_ref.emulation` elsewhere. ``TINYVLLM_DEVICE`` forces one: ``cuda``, ``cpu``, or ``auto``.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

_CHOICES = ("auto", "cuda", "cpu")
_INSTALL_HINT = (
    "Install CuPy and the CUDA libraries it uses with: "
    'pip install "cupy-cuda12x>=14" "cuda-toolkit[nvrtc,cudart,cublas]==12.*"'
)


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
        return f"CuPy can not be imported ({type(error).__name__}: {error}). {_INSTALL_HINT}"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
        if count == 0:
            return "CuPy finds no NVIDIA GPU on this machine"
        cupy.cuda.runtime.deviceSynchronize()
    except Exception as error:
        return f"CuPy is installed, and the GPU does not answer ({error})"
    return cupy, cupyx


def _load() -> tuple[Any, Any]:
    choice = _choice()
    if choice != "cpu":
        found = _cupy()
        if not isinstance(found, str):
            return found
        if choice == "cuda":
            raise NoDevice(f"TINYVLLM_DEVICE=cuda, but {found}")
    from . import emulation

    return emulation, emulation.cupyx


cp, cupyx = _load()

is_gpu: bool = cp.__name__ == "cupy"
"""True where kernels run on an NVIDIA GPU, False where they run in the emulation."""


def describe() -> str:
    """One line that says what kernels run on."""
    if not is_gpu:
        return (
            "CPU emulation: kernels are compiled for this computer's processor and checked; no GPU code runs"
        )
    properties = cp.cuda.runtime.getDeviceProperties(cp.cuda.Device().id)
    name = properties["name"].decode()
    return f"{name}, compute capability {properties['major']}.{properties['minor']}, CuPy {cp.__version__}"


def _say_once() -> None:
    """On a terminal, say that no GPU code runs; a notebook says it in its first cell."""
    if not is_gpu and "ipykernel" not in sys.modules and sys.stderr.isatty():
        print(f"tinyvllm: {describe()}", file=sys.stderr)


_say_once()
