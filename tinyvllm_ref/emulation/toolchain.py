"""The host compiler: which one is there, and the flags that make it stand in for NVIDIA's."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import cache

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
        # A float4 stays one access where only some of its parts are used.
        flags.append("-disable-vector-combine")
        stay += ["-fno-vectorize", "-fno-slp-vectorize"]  # an access is one element, as it was written
        return [*stay, *(part for flag in flags for part in ("-mllvm", flag))]

    def run(self, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        """Start the compiler; its messages come back as text, in English."""
        return _start([*self.command, *arguments], _zig_cache() if self.family == "zig" else {})

    def build(
        self, flags: list[str], source: Path, target: Path, libraries: Sequence[Path], *, one_step: bool
    ) -> subprocess.CompletedProcess[str]:
        """Make a shared library of a source that includes no header of the system.

        Parameters
        ----------
        flags : list of str
            To compile with.
        source, target : Path
        libraries : sequence of Path
            Shared libraries that it calls, beside the C library and its mathematics.
        one_step : bool
            Compile and link at once where the compiler can. In two steps no flag that is there for the compiler, such
            as a sanitizer's, makes it link a library of its own.
        """
        tools = self._zig_tools()
        if one_step and tools is None:
            return self.run(
                [*flags, "-shared", "-nostdlib", str(source), "-o", str(target), *self._link(libraries)]
            )
        made = target.with_suffix(".o")
        compile_it = ["-c", str(source), "-o", str(made)]
        done = _start([*tools[0], *flags, *compile_it]) if tools else self.run([*flags, *compile_it])
        if done.returncode:
            return done
        if tools is None:
            return self.run(["-shared", "-nostdlib", str(made), "-o", str(target), *self._link(libraries)])
        inputs = [made, *libraries, *_loaded_c_libraries()]
        return _start([*tools[1], *map(str, inputs), "-o", str(target)])

    def _link(self, libraries: Sequence[Path]) -> list[str]:
        link = [*map(str, libraries), "-lm", "-lc"]
        return link if self.is_macos else [*link, "-Wl,-Bsymbolic", "-Wl,-z,defs", "-Wl,--gc-sections"]

    def _zig_tools(self) -> tuple[list[str], list[str]] | None:
        """The clang and the linker inside of zig, which need no cache and none of zig's own libraries.

        ``zig c++`` takes twice as long, and seconds where its cache is empty, as it is for each answer that is graded.
        """
        if self.family != "zig" or self.is_macos:
            return None
        at = self.command.index("c++")
        zig, own = self.command[:at], self.command[at + 1 :]
        linker = [*zig, "ld.lld", "-shared", "-Bsymbolic", "-z", "defs", "--gc-sections", "--eh-frame-hdr"]
        return [*zig, "clang", f"--target={platform.machine()}-linux-gnu", *own], linker


def _start(
    command: list[str], variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, "LC_ALL": "C", **(variables or {})},
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


def _zig_cache() -> dict[str, str]:
    """A folder of this process for what zig keeps, where its own can not be written to."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zig"
        folder = Path(os.environ.get("ZIG_GLOBAL_CACHE_DIR") or home)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return {}
    except (OSError, RuntimeError):  # RuntimeError: nobody knows where home is
        return {"ZIG_GLOBAL_CACHE_DIR": str(cache.process_folder() / "zig")}


@functools.cache
def _loaded_c_libraries() -> tuple[Path, ...]:
    """The C library of this process, its mathematics, and the loader, for a linker that knows no folders."""
    with contextlib.suppress(OSError):
        ctypes.CDLL("libm.so.6")  # glibc's, where nothing has needed it so far
    text = Path("/proc/self/maps").read_text()
    # An upgrade that replaces a library while this process runs leaves "(deleted)" behind its name.
    names = r"^.* (/\S*/(?:libc|libm|ld)[-.](?:\S*\.)?so[.\d]*)(?: \(deleted\))?$"
    return tuple(Path(path) for path in dict.fromkeys(re.findall(names, text, re.MULTILINE)))


def _version(command: list[str], argument: str = "--version") -> str | None:
    """First line of what the compiler says of itself; None where it does not run."""
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


def _own_toolchain(command: list[str]) -> Toolchain | None:
    """A compiler that this machine has by itself."""
    version = _version(command)
    family = "clang" if version and "clang" in version.lower() else "gcc"
    return Toolchain(tuple(command), family, version) if version else None


def _zig_toolchain(command: list[str]) -> Toolchain | None:
    """zig by its own version, which is the same however it was found."""
    version = _version(command[: command.index("c++")], "version")
    return Toolchain(tuple(command), "zig", f"zig {version}") if version else None


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
        if "c++" in command[1:] and (Path(command[0]).name == "zig" or "ziglang" in command):
            found = _zig_toolchain(command)
        else:
            found = _own_toolchain(command)
        if found is not None:
            return found
    if cxx:
        raise CompilerNotFound(f"CXX={cxx!r} does not start a compiler; unset it, or: {INSTALL_HINT}")
    zig = _zig()
    if zig is not None and (found := _zig_toolchain([*zig, "c++"])) is not None:
        return found
    raise CompilerNotFound(INSTALL_HINT)


def find() -> Toolchain:
    """The compiler to use: ``$CXX``, g++, clang++, c++, else the ziglang wheel.

    Raises
    ------
    CompilerNotFound
        When there is none; the message says how to install one.
    """
    return _find(os.environ.get("CXX", ""), os.environ.get("PATH", ""))
