"""Errors of the emulation: CuPy's own classes where it has one, and what the checks of full mode find.

CuPy's classes keep CuPy's names and the start of its messages (``CUDA_ERROR_INVALID_VALUE: invalid
argument``), so that an ``except`` clause written here works on a card. What a card could not have said, the
thing that is wrong and the value that would be right, follows after a colon.
"""

from __future__ import annotations

from dataclasses import dataclass

# The part of the CUDA driver's and runtime's error codes that the emulation can produce: name and text as
# cuGetErrorName / cuGetErrorString and their runtime twins give them.
_DRIVER_ERRORS = {
    1: ("CUDA_ERROR_INVALID_VALUE", "invalid argument"),
    2: ("CUDA_ERROR_OUT_OF_MEMORY", "out of memory"),
    101: ("CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"),
    500: ("CUDA_ERROR_NOT_FOUND", "named symbol not found"),
    700: ("CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"),
    701: ("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"),
}
_RUNTIME_ERRORS = {
    1: ("cudaErrorInvalidValue", "invalid argument"),
    2: ("cudaErrorMemoryAllocation", "out of memory"),
    101: ("cudaErrorInvalidDevice", "invalid device ordinal"),
    400: ("cudaErrorInvalidResourceHandle", "invalid resource handle"),
    600: ("cudaErrorNotReady", "device not ready"),
    700: ("cudaErrorIllegalAddress", "an illegal memory access was encountered"),
}


def _message(table: dict[int, tuple[str, str]], status: int, detail: str) -> str:
    name, text = table.get(status, (f"error {status}", "unknown error"))
    return f"{name}: {text}" + (f": {detail}" if detail else "")


class CUDADriverError(RuntimeError):
    """What ``cupy.cuda.driver`` raises; ``status`` is the CUresult code."""

    def __init__(self, status: int, detail: str = "") -> None:
        self.status = status
        super().__init__(_message(_DRIVER_ERRORS, status, detail))


class CUDARuntimeError(RuntimeError):
    """What ``cupy.cuda.runtime`` raises; ``status`` is the cudaError_t code."""

    def __init__(self, status: int, detail: str = "") -> None:
        self.status = status
        super().__init__(_message(_RUNTIME_ERRORS, status, detail))


class CUBLASError(RuntimeError):
    """What ``cupy.cuda.cublas`` raises; ``status`` is the cublasStatus_t code."""

    _NAMES = {  # noqa: RUF012  (a constant table)
        1: "CUBLAS_STATUS_NOT_INITIALIZED",
        7: "CUBLAS_STATUS_INVALID_VALUE",
        13: "CUBLAS_STATUS_EXECUTION_FAILED",
        15: "CUBLAS_STATUS_NOT_SUPPORTED",
    }

    def __init__(self, status: int, detail: str = "") -> None:
        self.status = status
        name = self._NAMES.get(status, f"CUBLAS_STATUS {status}")
        super().__init__(name + (f": {detail}" if detail else ""))


class OutOfMemoryError(MemoryError):
    """What ``cupy.cuda.memory`` raises when an allocation does not fit."""

    def __init__(self, size: int, total: int, limit: int = 0) -> None:
        limit_text = f", limit set to: {limit:,} bytes" if limit else ""
        super().__init__(
            f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes{limit_text})."
        )


class TooManyArrays(OutOfMemoryError):
    """There is memory left, and no way to put an inaccessible page beside one more array."""

    def __str__(self) -> str:
        return (
            "too many arrays are alive: each lies beside an inaccessible page, which takes two of the mappings that "
            "the system allows a process (vm.max_map_count). Let go of arrays that are no longer needed, put many "
            "small ones into one, or raise the limit: sudo sysctl vm.max_map_count=1048576"
        )


class CompileException(Exception):
    """The kernel's source does not compile.

    Attributes
    ----------
    source : str
        The source as the caller gave it.
    options : tuple of str
        The compiler options.
    """

    def __init__(self, msg: str, source: str, name: str, options: tuple[str, ...], backend: str = "nvrtc"):
        self._msg = msg
        self.source = source
        self.name = name
        self.options = options
        self.backend = backend
        super().__init__(msg)

    def __str__(self) -> str:
        return self.get_message()

    def get_message(self) -> str:
        """The compiler's messages, with line numbers of the caller's own source."""
        return self._msg


@dataclass(frozen=True)
class Site:
    """Where in a launch something happened.

    Attributes
    ----------
    line : int
        Line of the kernel's source, from 1; 0 where it is not known.
    text : str
        That line.
    file : str
        What a ``#line`` directive of the source calls it; empty for the source itself.
    block, thread : tuple of int
        blockIdx and threadIdx as (x, y, z).
    access : str
        ``"read"``, ``"write"``, ``"atomic"`` or ``""`` where nothing was accessed.
    """

    line: int = 0
    text: str = ""
    block: tuple[int, int, int] = (0, 0, 0)
    thread: tuple[int, int, int] = (0, 0, 0)
    access: str = ""
    file: str = ""


class KernelError(RuntimeError):
    """A fault of a kernel that ran: the launch stopped, the process and its arrays are well.

    Attributes
    ----------
    kernel : str
        Name of the kernel.
    array : str
        Name of the array: the kernel's parameter, the ``__shared__`` variable, or ``""``.
    index : int or None
        Element of the array, counted in the kernel's element type, flat.
    block, thread : tuple of int
        blockIdx and threadIdx as (x, y, z).
    line, source_line : int, str
        Line of the source from 1 and its text.
    other : Site or None
        The other side of a race, or the other barrier.
    """

    def __init__(
        self,
        message: str,
        *,
        kernel: str = "",
        array: str = "",
        index: int | None = None,
        site: Site | None = None,
        other: Site | None = None,
    ) -> None:
        super().__init__(message)
        self.kernel = kernel
        self.array = array
        self.index = index
        self.site = site if site is not None else Site()
        self.other = other

    @property
    def line(self) -> int:
        return self.site.line

    @property
    def source_line(self) -> str:
        return self.site.text

    @property
    def block(self) -> tuple[int, int, int]:
        return self.site.block

    @property
    def thread(self) -> tuple[int, int, int]:
        return self.site.thread


class OutOfBounds(KernelError):
    """A thread read or wrote outside of every array that it was given."""


class UninitializedRead(KernelError):
    """A thread read memory that nothing had written."""


class DataRace(KernelError):
    """Two threads used the same memory, one of them to write, with nothing to order them."""


class BarrierDivergence(KernelError):
    """Threads of a block (or warp) wait at different places, or for one that will not come."""


class KernelTimeout(KernelError):
    """The kernel ran longer than the limit: most often a loop that does not end."""


class KernelAssertion(KernelError):
    """An ``assert`` in a kernel failed."""


class KernelFault(KernelError):
    """An integer division by zero, a trap, or a stack that is full."""
