"""The part of CuPy that this project uses, on a machine without a GPU.

Import it as ``from tinyvllm_ref.device import cp``: that gives CuPy where an NVIDIA GPU is, and this module
elsewhere. Names and signatures are CuPy's. What is not here raises AttributeError and says so.

Kernels are compiled by the host's C++ compiler and run on the CPU. In *full* mode every access to memory is
checked; in *fast* mode blocks run on all cores (:func:`set_checks`).
"""

from __future__ import annotations

from typing import Any

from . import array as _array
from . import cuda, cupyx
from . import report as _report
from .array import *  # noqa: F403
from .errors import (
    BarrierDivergence,
    DataRace,
    KernelAssertion,
    KernelError,
    KernelFault,
    KernelTimeout,
    OutOfBounds,
    UninitializedRead,
)
from .raw_kernel import RawKernel, RawModule
from .report import LaunchReport, trace
from .settings import checks, current_mode, set_checks, set_workers, timeout

__all__ = [
    *_array.__all__,
    "BarrierDivergence",
    "DataRace",
    "KernelAssertion",
    "KernelError",
    "KernelFault",
    "KernelTimeout",
    "LaunchReport",
    "OutOfBounds",
    "RawKernel",
    "RawModule",
    "UninitializedRead",
    "checks",
    "cuda",
    "cupyx",
    "current_mode",
    "is_emulation",
    "set_checks",
    "set_workers",
    "timeout",
    "trace",
]

is_emulation = True


def __getattr__(name: str) -> Any:
    if name == "last_report":
        return _report.last_report()
    if name.startswith("__"):
        raise AttributeError(name)
    _array.missing(name)
