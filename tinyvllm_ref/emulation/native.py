"""The C++ runtime of the emulation: compiled on first use, kept in the cache, called through ctypes."""

from __future__ import annotations

import ctypes
import errno
import functools
import shutil
import tempfile
from pathlib import Path

from . import cache, toolchain

SOURCE_FOLDER = Path(__file__).parent / "runtime"

_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "emu_malloc": (ctypes.c_void_p, [ctypes.c_size_t]),
    "emu_free": (None, [ctypes.c_void_p]),
    "emu_is_live": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_size_t]),
    "emu_allocation_of": (
        ctypes.c_int,
        [ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t)],
    ),
    "emu_live_bytes": (ctypes.c_size_t, []),
    "emu_mark_initialized": (None, [ctypes.c_void_p, ctypes.c_size_t]),
    "emu_mark_uninitialized": (None, [ctypes.c_void_p, ctypes.c_size_t]),
    "emu_nearest": (
        ctypes.c_void_p,
        [ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint64)],
    ),
    "emu_launch": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]),
    "emu_set_workers": (None, [ctypes.c_int]),
    "emu_workers": (ctypes.c_int, []),
    "emu_warning": (ctypes.c_int, [ctypes.c_int, ctypes.c_void_p]),
    "emu_printed": (ctypes.c_size_t, [ctypes.c_void_p]),
    "emu_shared_info": (ctypes.c_int, [ctypes.c_int, *[ctypes.c_void_p] * 4]),
    "emu_begin_module": (None, [ctypes.c_uint64]),
    "emu_variable_info": (ctypes.c_int, [ctypes.c_uint64, ctypes.c_int, *[ctypes.c_void_p] * 5]),
    "emu_site": (ctypes.c_int, [ctypes.c_int, ctypes.c_void_p]),
    "emu_set_trace": (None, [ctypes.c_size_t]),
    "emu_trace": (ctypes.c_size_t, [ctypes.c_void_p, ctypes.c_size_t]),
}


@functools.cache
def source_hash() -> str:
    """Hash of everything in runtime/: part of the key of each compiled kernel."""
    files = sorted(path for path in SOURCE_FOLDER.rglob("*") if path.suffix in {".cpp", ".h"})
    return cache.key(*(text for path in files for text in (path.name, path.read_text())))


def _flags() -> list[str]:
    # No C++ library is linked, and zig, which would build its own for a minute, is told so in its own words.
    compiler = toolchain.find()
    return [
        "-std=c++17",
        "-O2",
        "-g1",
        "-shared",
        "-pthread",
        "-nodefaultlibs",
        *(["-nostdlib++"] if compiler.family == "zig" else []),
        *compiler.common_flags,
    ]


@functools.cache
def _load() -> tuple[ctypes.CDLL, Path, bytes]:
    name = cache.key(source_hash(), toolchain.find().version, *_flags())
    library, path = cache.load(f"runtime-{name}.so", _compile)
    return library, path, path.read_bytes()


def library_path() -> Path:
    """The runtime as a shared library, compiled if it has not been before.

    Where somebody has deleted it meanwhile, its bytes are put back: kernels are linked against the file.
    """
    _, path, data = _load()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return path


def _compile(target: Path) -> None:
    compiler = toolchain.find()
    sources = sorted(str(path) for path in SOURCE_FOLDER.glob("*.cpp"))
    with tempfile.TemporaryDirectory(prefix="tinyvllm-") as work:
        made = Path(work) / "runtime.so"
        whole = [] if compiler.is_macos else ["-Wl,-z,defs"]
        done = compiler.run([*_flags(), *sources, "-o", str(made), *whole, "-lc", "-lm", "-lpthread"])
        if "No space left on device" in done.stderr:
            raise OSError(errno.ENOSPC, "no space left on the disk while compiling the emulation's runtime")
        if done.returncode != 0:
            raise RuntimeError(
                f"the emulation's runtime does not compile with {compiler.version}:\n{done.stderr.strip()}"
            )
        shutil.copyfile(made, target)


@functools.cache
def runtime() -> ctypes.CDLL:
    """The loaded runtime library, its functions declared."""
    library = _load()[0]
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library
