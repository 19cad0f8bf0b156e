"""``RawKernel`` and ``RawModule``: CUDA C++ source in, something that can be called out."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import settings
from .compiler import Library, NoSuchKernel, compile_source
from .errors import CUDADriverError
from .launch import MAX_THREADS, SHARED_OPT_IN_LIMIT, STATIC_SHARED_LIMIT, Plan, launch, make_plan
from .memory import BaseMemory, MemoryPointer


def _compile(
    code: str, options: tuple[str, ...], mode: str, name: str | None, extra: tuple[str, ...]
) -> Library:
    """The source compiled so that `name` can be called; CUDADriverError where there is no such kernel."""
    library = compile_source(code, options, mode, extra)
    if name is None or name in library.entries:
        return library
    known = {kernel.name: kernel for kernel in library.translation.kernels}
    if name in known and not known[name].is_extern_c:
        what = "a template" if known[name].is_template else 'declared without extern "C"'
        raise CUDADriverError(
            500,
            f"kernel `{name}` is {what}, so its symbol has a C++ name. "
            + (
                "Use RawModule(..., name_expressions=[...])"
                if known[name].is_template
                else f'Write: extern "C" __global__ void {name}(...)'
            ),
        )
    try:  # a macro may have made it
        return compile_source(code, options, mode, (*extra, name))
    except NoSuchKernel:
        found = ", ".join(f"`{kernel}`" for kernel in known) or "no __global__ function"
        raise CUDADriverError(500, f"no kernel `{name}` in the source; it has {found}") from None


class RawKernel:
    """A kernel written in CUDA C++, as ``cupy.RawKernel``.

    Parameters
    ----------
    code : str
        Source with ``extern "C" __global__ void name(...)``.
    name : str
        The kernel.
    options : tuple of str
        NVRTC's: ``-D``, ``-I``, ``-std=c++17``; those that only change speed are accepted and ignored.
    backend : str
        ``"nvrtc"``.
    translate_cucomplex, enable_cooperative_groups, jitify : bool
        As in CuPy; all False here.

    Notes
    -----
    As in CuPy, the source is compiled at the first call (or by :meth:`compile`), not before. The mode of the
    call (:func:`~tinyvllm_ref.emulation.set_checks`) decides whether every access is checked.
    """

    def __init__(
        self,
        code: str,
        name: str,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        *,
        translate_cucomplex: bool = False,
        enable_cooperative_groups: bool = False,
        jitify: bool = False,
        _expressions: tuple[str, ...] = (),
    ) -> None:
        _check_source(code, options, backend, translate_cucomplex, enable_cooperative_groups, jitify)
        if not isinstance(name, str):
            raise TypeError(f"name must be a str, not {type(name).__name__}")
        self.code = code
        self.name = name
        self.options = tuple(options)
        self.backend = backend
        self.file_path: str | None = None
        self.enable_cooperative_groups = False
        self._expressions = _expressions
        self._dynamic_limit: int | None = None  # as the card has it until it is raised
        self._loaded: dict[str, tuple[Library, Plan]] = {}

    def _load(self, mode: str) -> tuple[Library, Plan]:
        loaded = self._loaded.get(mode)
        if loaded is None:
            library = _compile(self.code, self.options, mode, self.name, self._expressions)
            loaded = self._loaded[mode] = (library, make_plan(library.entries[self.name]))
        return loaded

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        *,
        shared_mem: int = 0,
        **kwargs: Any,
    ) -> None:
        """Launch the kernel.

        Parameters
        ----------
        grid, block : tuple of 1 to 3 int
            Blocks of the grid and threads of a block, x first.
        args : tuple
            Arrays for pointers, NumPy scalars (or Python ints for integers) for values.
        shared_mem : int
            Bytes of dynamic shared memory of a block.
        """
        kwargs.pop("stream", None)
        if kwargs:
            raise TypeError(f"RawKernel got an unexpected keyword argument {next(iter(kwargs))!r}")
        if not isinstance(args, tuple | list):
            raise TypeError(f"args must be a tuple such as (x, y, np.int32(n)); got {type(args).__name__}")
        mode = settings.current_mode()
        library, plan = self._load(mode)
        launch(library, plan, grid, block, args, shared_mem, self._dynamic_limit, mode)

    def compile(self, log_stream: Any = None) -> None:
        """Compile now, for the mode that is set."""
        self._load(settings.current_mode())

    @property
    def kernel(self) -> RawKernel:
        return self

    @property
    def max_threads_per_block(self) -> int:
        return MAX_THREADS

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        """Bytes of dynamic shared memory that a launch may ask for; can be raised to what a card allows."""
        return STATIC_SHARED_LIMIT if self._dynamic_limit is None else self._dynamic_limit

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size: int) -> None:
        if not 0 <= size <= SHARED_OPT_IN_LIMIT:
            raise CUDADriverError(
                1, f"max_dynamic_shared_size_bytes = {size}: it must be from 0 to {SHARED_OPT_IN_LIMIT:,}"
            )
        self._dynamic_limit = int(size)

    @property
    def attributes(self) -> dict[str, int]:
        """What is known of the kernel. Registers and local memory are a card's business: 0."""
        return {
            "max_threads_per_block": MAX_THREADS,
            "max_dynamic_shared_size_bytes": self.max_dynamic_shared_size_bytes,
            "shared_size_bytes": 0,
            "const_size_bytes": 0,
            "local_size_bytes": 0,
            "num_regs": 0,
            "binary_version": 0,
            "ptx_version": 0,
            "cache_mode_ca": 0,
            "preferred_shared_memory_carveout": -1,
        }

    def __repr__(self) -> str:
        return f"<RawKernel {self.name}>"


class _ModuleMemory(BaseMemory):
    """A ``__constant__`` or ``__device__`` variable: it lives as long as the process."""

    def __init__(self, library: Library, address: int, size: int) -> None:
        self.ptr = address
        self.size = size
        self._library = library


class RawModule:
    """CUDA C++ with any number of kernels, as ``cupy.RawModule``.

    Parameters
    ----------
    code : str, optional
        The source; or
    path : str, optional
        a file that holds it.
    options : tuple of str
        NVRTC's options.
    name_expressions : sequence of str, optional
        Instances of templates that :meth:`get_function` will be asked for: ``["sum<float>", "sum<int>"]``.
    """

    def __init__(
        self,
        *,
        code: str | None = None,
        path: str | None = None,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        translate_cucomplex: bool = False,
        enable_cooperative_groups: bool = False,
        name_expressions: Sequence[str] | None = None,
        jitify: bool = False,
    ) -> None:
        if (code is None) == (path is None):
            raise TypeError("Exactly one of `code` and `path` keyword arguments must be given.")
        if path is not None:
            if Path(path).suffix in {".cubin", ".ptx", ".fatbin"}:
                raise ValueError(
                    f"{path}: the emulation runs CUDA C++ source, not machine code; pass a .cu file"
                )
            code = Path(path).read_text()
        assert code is not None
        _check_source(code, options, backend, translate_cucomplex, enable_cooperative_groups, jitify)
        self.code = code
        self.file_path = path
        self.options = tuple(options)
        self.backend = backend
        self.name_expressions = tuple(name_expressions or ())
        self.enable_cooperative_groups = False

    def compile(self, log_stream: Any = None) -> None:
        """Compile now, for the mode that is set."""
        self._library()

    def _library(self) -> Library:
        return _compile(self.code, self.options, settings.current_mode(), None, self.name_expressions)

    @functools.cache  # noqa: B019  (a kernel lives as long as its module)
    def get_function(self, name: str) -> RawKernel:
        """The kernel `name`, or the instance of a template as it was named in ``name_expressions``."""
        kernel = RawKernel(self.code, name, self.options, self.backend, _expressions=self.name_expressions)
        kernel.file_path = self.file_path
        kernel.compile()
        return kernel

    def get_global(self, name: str) -> MemoryPointer:
        """A pointer to a ``__constant__`` or ``__device__`` variable; it is one variable in both modes."""
        library = self._library()
        found = [variable for variable in library.variables if variable.name == name.split("::")[-1]]
        if found:
            return MemoryPointer(_ModuleMemory(library, found[0].address, found[0].size), 0)
        try:  # a `const` one stays in the library
            address = ctypes.addressof(ctypes.c_char.in_dll(library.handle, name))
        except ValueError:
            raise CUDADriverError(
                500, f"no __constant__ or __device__ variable `{name}` in the source"
            ) from None
        size = library.image[1] - address if library.image[1] > address else 1 << 16
        return MemoryPointer(_ModuleMemory(library, address, size), 0)


def _check_source(
    code: Any, options: Any, backend: str, cucomplex: bool, cooperative: bool, jitify: bool
) -> None:
    if not isinstance(code, str):
        raise TypeError(f"code must be a str of CUDA C++, not {type(code).__name__}")
    if not isinstance(options, tuple | list) or not all(isinstance(option, str) for option in options):
        raise TypeError(f"options must be a tuple of str such as ('-DN=4',); got {options!r}")
    if backend not in {"nvrtc", "nvcc"}:
        raise ValueError(f"backend must be 'nvrtc' or 'nvcc', not {backend!r}")
    for given, name in (
        (cucomplex, "translate_cucomplex"),
        (cooperative, "enable_cooperative_groups"),
        (jitify, "jitify"),
    ):
        if given:
            raise NotSupported(f"{name}=True is not emulated; it needs a card")


class NotSupported(RuntimeError):
    """CuPy can do this, and the emulation can not."""
