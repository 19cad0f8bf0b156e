"""The host compiler: which one is there, and the flags that make it stand in for NVIDIA's."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

INSTALL_HINT = (
    "no C++ compiler was found. Install one of: `apt-get install g++` (Debian, Ubuntu), `dnf install "
    "gcc-c++` (Fedora), `xcode-select --install` (macOS), `conda install cxx-compiler`, "
    "or `pip install ziglang`; or name yours in the environment variable CXX"
)


class CompilerNotFound(RuntimeError):
    """There is no C++ compiler on this machine; the message says how to get one."""


@dataclass(frozen=True)
class Toolchain:
    """A C++ compiler.

    Attributes
    ----------
    command : tuple of str
        How it is started.
    family : str
        ``"gcc"``, ``"clang"`` or ``"zig"``.
    version : str
        First line of ``--version``; part of every cache key.
    """

    command: tuple[str, ...]
    family: str
    version: str

    @property
    def is_macos(self) -> bool:
        return platform.system() == "Darwin"

    @property
    def common_flags(self) -> list[str]:
        """What the runtime and every kernel are compiled with."""
        flags = ["-fPIC", "-fvisibility=hidden", "-U_FORTIFY_SOURCE", "-fno-exceptions", "-fno-rtti"]
        flags += ["-fno-strict-aliasing", "-fwrapv", "-ffp-contract=off", "-fno-math-errno"]
        flags += ["-fno-trapping-math", "-fno-stack-protector", "-fno-threadsafe-statics"]
        flags += ["-fno-delete-null-pointer-checks", "-fstack-clash-protection"]
        flags += ["-fno-finite-loops"]  # a loop that never ends is there to be found
        if self.family != "gcc":
            flags += ["-fno-sanitize=undefined"]  # zig turns it on by itself
            # A value that only the leader of a warp has is passed to __shfl_sync by every lane.
            flags += _undefined_arguments(self.command, self.family)
        return flags

    @property
    def keep_calls_flags(self) -> list[str]:
        """Leave a call one call: neither copied to where control comes from, nor merged with a like one."""
        if self.family != "gcc":
            return []  # clang has attributes for it
        return ["-fno-thread-jumps", "-fno-tree-tail-merge", "-fno-crossjumping", "-fno-reorder-blocks"]

    @property
    def instrument_flags(self) -> list[str]:
        """Make every access to memory call one of our ``__tsan_*`` functions with its address.

        And what C++ leaves undefined one of our ``__ubsan_*`` functions, where it happens.
        """
        bounds = "bounds" if self.family == "gcc" else "array-bounds"
        undefined = f"{bounds},float-cast-overflow,shift-exponent"
        stay = ["-fsanitize=thread", "-fno-optimize-sibling-calls"]  # a tail call hides the line it is on
        stay += [f"-fsanitize={undefined}", f"-fsanitize-recover={undefined}"]
        if self.family != "gcc":
            stay += ["-fno-sanitize-trap=all"]
        # A variable without a start value holds what no sum comes out right with, and not the zeros of a new stack.
        stay += _supported_flag(self.command, "-ftrivial-auto-var-init=pattern")
        if self.family == "gcc":
            params = ["tsan-distinguish-volatile=1", "tsan-instrument-func-entry-exit=0"]
            # A float4 stays one access of 16 bytes, as on a card, where only some of its parts are used.
            return [*stay, "-fno-tree-sra", *_supported_params(self.command, tuple(params))]
        options = ["read-before-write", "func-entry-exit=0"]
        flags = [f"-tsan-instrument-{option}" for option in options] + ["-tsan-distinguish-volatile"]
        stay += ["-fno-vectorize", "-fno-slp-vectorize"]  # an access is one element, as it was written
        return [*stay, *(part for flag in flags for part in ("-mllvm", flag))]

    def run(self, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        """Start the compiler; its messages come back as text, in English."""
        environment = {**os.environ, "LC_ALL": "C"}
        return subprocess.run(
            [*self.command, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            stdin=subprocess.DEVNULL,
        )


@functools.cache
def _undefined_arguments(command: tuple[str, ...], family: str) -> list[str]:
    """clang's flag, by its version, that lets an argument be undefined as long as nothing looks at it."""
    if family == "zig":
        return ["-Xclang", "-no-enable-noundef-analysis"]
    for flag in ("-no-enable-noundef-analysis", "-disable-noundef-analysis"):
        test = [*command, "-Xclang", flag, "-x", "c++", "-fsyntax-only", "/dev/null"]
        if subprocess.run(test, capture_output=True, stdin=subprocess.DEVNULL).returncode == 0:
            return ["-Xclang", flag]
    return []


@functools.cache
def _supported_flag(command: tuple[str, ...], flag: str) -> list[str]:
    """The flag, where this version knows it."""
    test = [*command, flag, "-x", "c++", "-E", "/dev/null", "-o", "/dev/null"]
    done = subprocess.run(test, capture_output=True, stdin=subprocess.DEVNULL)
    return [flag] if done.returncode == 0 else []


@functools.cache
def _supported_params(command: tuple[str, ...], params: tuple[str, ...]) -> list[str]:
    """Those of GCC's ``--param`` settings that this version knows."""
    known = []
    for param in params:
        test = [*command, "--param", param, "-x", "c++", "-E", "/dev/null", "-o", "/dev/null"]
        if subprocess.run(test, capture_output=True, stdin=subprocess.DEVNULL).returncode == 0:
            known += ["--param", param]
    return known


def _version(command: list[str]) -> str | None:
    """First line of what the compiler says of itself; None where it does not run."""
    argument = "version" if command[-1].endswith("zig") else "--version"
    try:
        done = subprocess.run(
            [*command, argument], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.splitlines()
    return lines[0] if done.returncode == 0 and lines else None


def _zig() -> list[str] | None:
    """The zig program inside the ziglang wheel, without Python in front of it."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        return None
    zig = Path(spec.origin).parent / "zig"
    return [str(zig)] if zig.exists() else [sys.executable, "-m", "ziglang"]


@functools.cache
def _find(cxx: str, path: str) -> Toolchain:
    if platform.system() == "Windows":
        raise CompilerNotFound(
            "the emulation does not run on Windows itself; use WSL (Windows Subsystem for Linux): "
            "`wsl --install`, then this project inside it"
        )
    candidates = [shlex.split(cxx)] if cxx else [["g++"], ["clang++"], ["c++"]]
    for command in candidates:
        if shutil.which(command[0]) is None:
            continue
        version = _version(command)
        if version is None:
            continue
        is_zig = Path(command[0]).name == "zig" or "ziglang" in command
        family = "zig" if is_zig else "clang" if "clang" in version.lower() else "gcc"
        return Toolchain(tuple(command), family, version)
    if cxx:
        raise CompilerNotFound(f"CXX={cxx!r} does not start a compiler; unset it, or: {INSTALL_HINT}")
    zig = _zig()
    if zig is not None:
        version = _version(zig)
        if version is not None:
            return Toolchain((*zig, "c++"), "zig", f"zig {version}")
    raise CompilerNotFound(INSTALL_HINT)


def find() -> Toolchain:
    """The compiler to use: ``$CXX``, g++, clang++, c++, else the ziglang wheel.

    Raises
    ------
    CompilerNotFound
        When there is none; the message says how to install one.
    """
    return _find(os.environ.get("CXX", ""), os.environ.get("PATH", ""))
