"""``tinyvllm doctor``: what was found on this machine, and what to do about what was not."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .installing import install_extra


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes
    ----------
    name, value : str
        What was looked for and what was found.
    advice : str
        What to do; empty where all is well.
    """

    name: str
    value: str
    advice: str = ""

    def __str__(self) -> str:
        advice = f"  -> {self.advice}" if self.advice else ""
        return f"{self.name:<11}{self.value}{advice}"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> Finding:
    return Finding("Python", f"{platform.python_version()} at {sys.executable}")


def _system() -> Finding:
    advice = "use WSL (`wsl --install`), and this project inside it" if os.name == "nt" else ""
    return Finding("System", f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores", advice)


def _driver() -> Finding:
    program = shutil.which("nvidia-smi")
    if program is None:
        return Finding("Driver", "no NVIDIA driver; none is needed for the CPU emulation")
    query = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("Driver", f"nvidia-smi does not run ({error})", "reinstall the NVIDIA driver")
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines() or ["no message"]
        return Finding("Driver", f"nvidia-smi says: {said[0]}", "reinstall the NVIDIA driver, then restart")
    return Finding("Driver", "; ".join(done.stdout.strip().splitlines()))


def _cupy() -> Finding:
    found = [
        f"{name} {_version(name)}" for name in ("cupy-cuda12x", "cupy-cuda13x", "cupy") if _version(name)
    ]
    if len(found) > 1:
        return Finding(
            "CuPy", ", ".join(found), "keep one: they overwrite each other; pip uninstall the others"
        )
    if found:
        return Finding("CuPy", found[0])
    if shutil.which("nvidia-smi") is None:
        return Finding("CuPy", "not installed; none is needed without a GPU")
    return Finding("CuPy", "not installed", install_extra("gpu"))


def _device() -> Finding:
    try:
        from .device import describe, unused_gpu

        return Finding("Device", describe(), unused_gpu())
    except Exception as error:  # whatever is wrong, the report goes on
        return Finding("Device", "none", str(error))


def _compiler() -> Finding:
    from .emulation import toolchain

    try:
        found = toolchain.find()
    except toolchain.CompilerNotFound as error:
        return Finding("Compiler", "none", str(error))
    through_zig = found.family == "zig" and found.is_macos  # elsewhere it is as quick as the others
    slow = "works; clang++ compiles kernels faster" if through_zig else ""
    return Finding("Compiler", found.version, slow)


def _emulation() -> Finding:
    from .emulation import native, toolchain

    try:
        path = native.library_path()
    except (RuntimeError, OSError) as error:
        advice = (
            "see Compiler" if isinstance(error, toolchain.CompilerNotFound) else str(error).splitlines()[0]
        )
        return Finding("Emulation", "its runtime does not compile", advice)
    return Finding("Emulation", f"ready ({path.name})")


def _packages() -> Finding:
    names = ("numpy", "tokenizers", "safetensors", "jupyterlab", "matplotlib", "nbval")
    missing = [name for name in names if _version(name) is None]
    advice = f"missing {', '.join(missing)}: {install_extra('course')}" if missing else ""
    found = ", ".join(f"{n} {_version(n)}" for n in names if _version(n))
    return Finding("Packages", f"{found}; for grading: {_for_grading()}", advice)


def _for_grading() -> str:
    """What an instructor needs beyond the course; a learner needs none of it, so it is no advice."""
    missing = [name for name in ("psutil", "dask") if _version(name) is None]
    packages = f"{' and '.join(missing)} missing (make grade brings them)" if missing else "packages"
    contained = "bubblewrap" if shutil.which("bwrap") else "no bubblewrap (docs/instructors.md)"
    return f"{packages}, {contained}"


def _caches() -> Finding:
    from .emulation import cache

    folder = cache.folder()
    size = 0
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):  # another process has just renamed what it compiled
            size += entry.stat().st_size if entry.is_file() else 0
    temporary = "TemporaryDirectory" in str(folder) or "tinyvllm-kernels-" in str(folder)
    advice = "the cache folder can not be written to; set TINYVLLM_HOME to one that can" if temporary else ""
    return Finding("Caches", f"{folder} ({size / 2**20:.1f} MB of compiled kernels)", advice)


def _settings() -> Finding:
    names = ("TINYVLLM_DEVICE", "TINYVLLM_CHECKS", "TINYVLLM_HOME", "TINYVLLM_MY_ENGINE", "CXX")
    given = [f"{name}={os.environ[name]}" for name in names if os.environ.get(name)]
    if "CUDA_VISIBLE_DEVICES" in os.environ:  # the empty one says something, too
        given.append(f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r}")
    home = os.environ.get("TINYVLLM_HOME")
    advice = f"{home} is no folder" if home and Path(home).exists() and not Path(home).is_dir() else ""
    return Finding("Settings", ", ".join(given) or "all by default", advice)


def examine() -> list[Finding]:
    """Everything that is looked at, in order."""
    checks = (_system, _python, _driver, _cupy, _device, _compiler, _emulation, _packages, _caches, _settings)
    return [check() for check in checks]
