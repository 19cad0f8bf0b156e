"""CUDA C++ text -> kernels: reads NAME.cu, pastes the ``.cuh`` files that it includes, compiles when called.

CuPy's cache of compiled kernels knows the source's text and not the files that it includes, so they are
pasted. ``#line`` goes with them: a compiler's message names the file and the line that a person would open.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.resources import files
from typing import Any, TypeVar

from ..device import cp, is_gpu

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"[ \t]*(?://.*)?$')
_F = TypeVar("_F", bound=Callable[..., Any])

Headers = tuple[tuple[str, str], ...]
_headers: ContextVar[Headers] = ContextVar("tinyvllm_kernel_headers", default=())


@functools.cache
def read(file: str) -> str:
    """The text of a ``.cu`` or ``.cuh`` file of this package.

    Raises
    ------
    FileNotFoundError
        There is no such file; the message lists those that there are.
    """
    folder = files(__package__)
    path = folder / file
    if not path.is_file():
        known = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith((".cu", ".cuh")))
        raise FileNotFoundError(f"no kernel source {file!r}; there are {', '.join(known)}")
    return path.read_text(encoding="utf-8")


def names() -> list[str]:
    """The kernels: every NAME for which there is a NAME.cu."""
    entries = (entry.name for entry in files(__package__).iterdir())
    return sorted(name.removesuffix(".cu") for name in entries if name.endswith(".cu"))


@functools.cache
def text(name: str, headers: Headers = ()) -> str:
    """NAME.cu with the files that it includes pasted in, each once.

    Parameters
    ----------
    name : str
        Such as ``"rms_norm"``.
    headers : tuple of (str, str)
        Texts to take instead of a file: ``(("block_sum.cuh", "..."),)``.
    """
    return "".join(_paste(f"{name}.cu", dict(headers), set()))


@functools.cache
def header(file: str) -> str:
    """A ``.cuh`` file with the files that it includes pasted in: to be put in front of a kernel."""
    return "".join(_paste(file, {}, set()))


def _paste(file: str, headers: Mapping[str, str], seen: set[str]) -> Iterator[str]:
    seen.add(file)
    yield f'#line 1 "{file}"\n'
    lines = (headers[file] if file in headers else read(file)).splitlines()
    for number, line in enumerate(lines, 1):
        include = _INCLUDE.match(line)
        if include is None:
            yield f"{line}\n"
        elif include[1] not in seen:
            yield from _paste(include[1], headers, seen)
            yield f'#line {number + 1} "{file}"\n'
        else:
            yield "\n"


def kernel(name: str, entry: str | None = None, *, target: str = "", **constants: int) -> Any:
    """A kernel, ready to be launched; the same object at every call.

    Parameters
    ----------
    name : str
        The file, NAME.cu.
    entry : str, optional
        The ``__global__`` function in it; by default, `name`.
    target : str
        The compiler's target, where the device's own does not do: ``"sm_90a"`` has instructions that 9.0 alone has.
    **constants : int
        Numbers that the compiler is told: ``HEAD_DIM=64``.

    Returns
    -------
    cupy.RawKernel
        It is compiled when it is called for the first time.
    """
    return _kernel(name, entry or name, target, tuple(constants.items()), _headers.get())


@functools.cache
def _kernel(
    name: str, entry: str, target: str, constants: tuple[tuple[str, int], ...], headers: Headers
) -> Any:
    options = tuple(f"-D{constant}={value}" for constant, value in constants)
    if target:  # CuPy gives its own besides, and NVRTC takes the more special one
        options += (f"-arch={target}",)
    return cp.RawKernel(text(name, headers), entry, options=options)


_FIBERS = 8


def summing_threads(threads: int) -> int:
    """How many threads of a block add up a row, where a card is given `threads`.

    In the emulation a thread that meets a barrier is a fiber, and each barrier a switch of stacks for each: few
    threads do it sooner. Device functions that are not this package's may count on whole warps, and get them.
    """
    return threads if is_gpu or _headers.get() else min(threads, _FIBERS)


@contextmanager
def _using(headers: Headers) -> Iterator[None]:
    token = _headers.set(headers)
    try:
        yield
    finally:
        _headers.reset(token)


def with_headers(function: _F, headers: Mapping[str, str]) -> _F:
    """The same launch function with other device functions in its kernels.

    Parameters
    ----------
    function : callable
        Such as :func:`tinyvllm_ref.kernels.rms_norm.rms_norm`.
    headers : mapping of str to str
        File -> text that takes its place: ``{"block_sum.cuh": my_block_sum}``.

    Raises
    ------
    FileNotFoundError
        A file is none of this package's, so that nothing would change.
    """
    for file in headers:
        read(file)
    fixed = tuple(sorted(headers.items()))

    @functools.wraps(function)
    def launch(*args: Any, **kwargs: Any) -> Any:
        with _using(fixed):
            return function(*args, **kwargs)

    return launch  # type: ignore[return-value]
