"""NVIDIA's run-time compiler through ctypes: what a card's own compiler says of a source, with no card.

NVRTC comes in the `nvidia-cuda-nvrtc-cu12` wheel, the headers (cuda_fp16.h, cuda_bf16.h) in
`nvidia-cuda-runtime-cu12`; neither needs a driver.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path


class NvrtcMissing(RuntimeError):
    """One of NVIDIA's wheels is not installed; the message says which."""


@dataclass(frozen=True)
class Compilation:
    """What NVRTC made of a source.

    Attributes
    ----------
    ok : bool
        It compiled.
    log : str
        Errors and warnings, with the source's own line numbers.
    ptx : str
        The code, ``""`` where it did not compile.
    lowered_names : dict of str
        Name expression -> the symbol of that instance.
    """

    ok: bool
    log: str
    ptx: str
    lowered_names: dict[str, str]


def _wheel_folder(package: str) -> Path:
    """Folder of ``nvidia.<package>``; the wheels are namespace packages."""
    try:
        spec = importlib.util.find_spec(f"nvidia.{package}")
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        wheel = f"nvidia-{package.replace('_', '-')}-cu12"
        raise NvrtcMissing(
            f"the wheel {wheel} is not installed: `pip install {wheel}`, or this project's [dev]"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def header_folder() -> Path:
    """The folder with CUDA's headers."""
    return _wheel_folder("cuda_runtime") / "include"


@functools.cache
def _library() -> ctypes.CDLL:
    folder = _wheel_folder("cuda_nvrtc") / "lib"
    libraries = sorted(folder.glob("libnvrtc.so.12*"))
    if not libraries:
        raise NvrtcMissing(f"no libnvrtc.so.12 in {folder}: install nvidia-cuda-nvrtc-cu12 again")
    return ctypes.CDLL(str(libraries[0]))


@functools.cache
def version() -> tuple[int, int]:
    """NVRTC's version, as (12, 9)."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def _check(status: int) -> None:
    if status != 0:
        function = _library().nvrtcGetErrorString
        function.restype = ctypes.c_char_p
        raise RuntimeError(f"NVRTC: {function(status).decode()}")


def _text(program: ctypes.c_void_p, what: str) -> str:
    """A text that NVRTC holds for a program: ``what`` is ``"ProgramLog"`` or ``"PTX"``."""
    size = ctypes.c_size_t()
    _check(getattr(_library(), f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(_library(), f"nvrtcGet{what}")(program, buffer))
    return buffer.value.decode(errors="replace")


def compile_source(
    code: str, arch: str, options: tuple[str, ...] = (), name_expressions: tuple[str, ...] = ()
) -> Compilation:
    """Compile CUDA C++ for `arch` (``"compute_75"``), with the options that CuPy adds.

    Raises
    ------
    NvrtcMissing
        When a wheel is not installed.
    """
    library = _library()
    program = ctypes.c_void_p()
    source = code.encode()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), source, b"kernel.cu", 0, None, None))
    try:
        for expression in name_expressions:
            _check(library.nvrtcAddNameExpression(program, expression.encode()))
        flags = [f"--gpu-architecture={arch}", f"-I{header_folder()}", "-ftz=true"]
        if not any(option.startswith(("-std", "--std")) for option in options):
            flags.append("--std=c++17")
        flags += options
        array = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        status = library.nvrtcCompileProgram(program, len(flags), array)
        log = _text(program, "ProgramLog").strip()
        if status != 0:
            return Compilation(False, log, "", {})
        return Compilation(True, log, _text(program, "PTX"), _lowered(program, name_expressions))
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _lowered(program: ctypes.c_void_p, name_expressions: tuple[str, ...]) -> dict[str, str]:
    names = {}
    for expression in name_expressions:
        lowered = ctypes.c_char_p()
        _check(_library().nvrtcGetLoweredName(program, expression.encode(), ctypes.byref(lowered)))
        names[expression] = (lowered.value or b"").decode()
    return names
