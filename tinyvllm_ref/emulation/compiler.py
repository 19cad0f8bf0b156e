"""From CUDA C++ source to a loaded library with an entry for each kernel."""

from __future__ import annotations

import ctypes
import errno
import functools
import re
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import cache, native, toolchain
from .elf import elf_file
from .errors import CompileException
from .spaces import host_calls
from .storage import FILE_PREFIX, HOME_PREFIX, INITIALIZED_SHARED, TAG_PREFIX, TYPE_PREFIX
from .translate import MISSING_HEADER, Kernel, Parameter, Translation, translate

SOURCE_NAME = "kernel.cu"
_INCLUDE = native.SOURCE_FOLDER / "include"
# Options of NVRTC that change nothing here.
_IGNORED = re.compile(
    r"(--?(use_fast_math|lineinfo|generate-line-info|device-debug|G|restrict|extra-device-vectorization|"
    r"default-device|device-as-default-execution-space|device-int128|disable-warnings|w|dopt=?\w*|dlto|"
    r"minimal|no-source-include|arch=\S+|gpu-architecture=\S+|fmad=\S+|ftz=\S+|prec-div=\S+|prec-sqrt=\S+|"
    r"maxrregcount=\S+|diag-suppress=\S+|relocatable-device-code=\S+|rdc=\S+|split-compile=\S+))$"
)
_DIAGNOSTIC = re.compile(
    r"^(?P<file>[^:\n]+):(?P<line>\d+):(?:(?P<column>\d+):)? "
    r"(?P<what>(?:fatal )?error|warning): (?P<text>.*)$"
)
_NOT_DECLARED = re.compile(r"(?:undeclared identifier )?'(\w+)'(?: was not declared|$)")
_WORD_LANES = re.compile(r"\b__(v[a-z]+[24]|dp[24]a)")
# Sections of their own let the linker drop device functions that no kernel calls.
_FLAGS = {"full": ["-O1", "-DEMU_FULL"], "fast": ["-O2", "-ffunction-sections", "-fdata-sections"]}


class ParameterType(ctypes.Structure):
    """``emu_parameter`` of cuda_shim.h: what the compiler says of a kernel's parameter."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("size", ctypes.c_int),
        ("alignment", ctypes.c_int),
        ("item_kind", ctypes.c_int),
        ("item_size", ctypes.c_int),
        ("item_alignment", ctypes.c_int),
        ("is_const", ctypes.c_int),
    )


@dataclass(frozen=True)
class Entry:
    """A kernel that can be called.

    Attributes
    ----------
    name : str
        As asked for: the function's name, or a template's instance such as ``sum<float>``.
    address : int
        Of the C function ``void entry(void** args)`` that runs one thread.
    block_address : int
        Of the one that runs a whole block; 0 where threads may wait for each other.
    max_threads : int
        Of a block, from ``__launch_bounds__``.
    parameters : tuple of Parameter
        Names and types as written.
    types : tuple of ParameterType
        What the compiler made of them.
    """

    name: str
    address: int
    parameters: tuple[Parameter, ...]
    types: tuple[ParameterType, ...]
    block_address: int = 0
    max_threads: int = 1024


@dataclass(frozen=True)
class Variable:
    """A ``__device__`` or ``__constant__`` variable in device memory: address, bytes, bytes of an element."""

    name: str
    address: int
    size: int
    item: int
    is_constant: bool


@dataclass
class Library:
    """A compiled and loaded source."""

    path: Path
    handle: ctypes.CDLL
    base: int
    image: tuple[int, int]
    translation: Translation
    entries: dict[str, Entry]
    variables: tuple[Variable, ...] = ()

    @functools.cached_property
    def indexed_lines(self) -> bytes:
        """By line number, 1 where a variable with bounds of its own is indexed."""
        lines = self.translation.indexed_lines
        return bytes(line in lines for line in range(max(lines, default=-1) + 1))


class NoSuchKernel(LookupError):
    """The source has no kernel of this name that can be called by it."""


# ---------------- options
def _sort_options(options: tuple[str, ...], source: str) -> tuple[list[str], list[str]]:
    """The host compiler's flags, and preprocessor lines: a macro must not change our own header."""
    flags, lines, standard = [], [], "-std=c++17"
    queue = list(options)
    while queue:
        option = queue.pop(0)
        short = option.replace("--define-macro=", "-D").replace("--undefine-macro=", "-U")
        short = short.replace("--include-path=", "-I")
        if short in {"-D", "-U", "-I"} and queue:
            queue.insert(0, short + queue.pop(0))
        elif short[:2] == "-I":
            flags.append(short)
        elif short[:2] == "-U":
            lines.append(f"#undef {short[2:]}")
        elif short[:2] == "-D":
            name, _, value = short[2:].partition("=")
            lines.append(f"#define {name} {value or ('' if '=' in short else '1')}")
        elif re.fullmatch(r"--?std=c\+\+(11|14|17|20)", short):
            standard = "-std=" + short.split("=")[1]
        elif short in {"-default-device", "-w"} or _IGNORED.match(short):
            continue
        else:
            raise CompileException(
                f"nvrtc: error: unrecognized option {option!r}", source, SOURCE_NAME, tuple(options)
            )
    return [standard, *flags], lines


# ---------------- messages
def _tidy(text: str) -> str:
    """The compiler's words without our own names in them."""
    text = text.replace("‘", "'").replace("’", "'")
    for prefix in (TYPE_PREFIX, TAG_PREFIX, FILE_PREFIX, HOME_PREFIX):
        text = text.replace(prefix, "")
    if "emu_inline_ptx_is_not_emulated" in text:
        return "inline PTX is not emulated: put it behind #ifdef __CUDA_ARCH__, with plain C++ in the #else"
    if "emu_shared_inside_a_macro_is_not_emulated" in text:
        return "__shared__ inside of a macro is not emulated: write the declaration out"
    if INITIALIZED_SHARED in text:
        return "initializer not allowed for __shared__ variable"
    if "emu_managed_memory_is_not_emulated" in text:
        return "__managed__ memory is not emulated"
    if (
        "no matching function for call to 'emu_shared_reference" in text
        or "is a variably modified type" in text
    ):
        return (
            "the size of a __shared__ array must be a constant; for one that only the launch knows, "
            "declare extern __shared__ and pass shared_mem="
        )
    text = re.sub(r"; did you mean '_*emu_\w+'\?", "", text)  # our own names help nobody
    if (match := _NOT_DECLARED.search(text)) and match[1] in _called_names():
        return f"'{match[1]}' is a function: a call needs its parentheses, {match[1]}(...)"
    return re.sub(r" \[-W[\w+=-]+\]$", "", text)


@functools.cache
def _called_names() -> frozenset[str]:
    """Functions of CUDA that are macros with arguments here, so that a compiler does not know the bare name."""
    text = (native.SOURCE_FOLDER / "cuda_shim.h").read_text(encoding="utf-8")
    return frozenset(re.findall(r"^#define (\w+)\(", text, re.MULTILINE))


def _is_ptx(source: str, line: int) -> bool:
    """Does the line begin an ``asm`` statement? What compilers say of one differs."""
    lines = source.splitlines()
    return 1 <= line <= len(lines) and re.match(r"\s*(asm|__asm__|__asm)\b", lines[line - 1]) is not None


def format_messages(raw: str, translation: Translation) -> tuple[str, int]:
    """Compiler output in NVRTC's style, each with its line of the source and a caret; and the error count."""
    out: list[str] = []
    errors = 0
    seen: set[tuple[int, str]] = set()
    for match in map(_DIAGNOSTIC.match, raw.splitlines()):
        if match is None:
            continue
        number, text = int(match["line"]), _tidy(match["text"])
        if Path(match["file"]).name != SOURCE_NAME:
            if "error" in match["what"] and errors == 0 and not seen:
                out.append(f"{Path(match['file']).name}({number}): error: {text}")
            continue
        if (number, text) in seen or (seen and "emu_" in text):
            continue
        seen.add((number, text))
        errors += "error" in match["what"]
        if "error" in match["what"] and _is_ptx(translation.source, number):
            text = _tidy("emu_inline_ptx_is_not_emulated")
        file, shown = translation.place(number)
        out.append(f"{file or SOURCE_NAME}({shown}): {match['what'].replace('fatal ', '')}: {text}")
        column = translation.source_column(number, int(match["column"])) if match["column"] else None
        out += _show(translation, number, column)
    return "\n".join(out), errors


def _link_message(raw: str, translation: Translation) -> str:
    names = dict.fromkeys(re.findall(r"undefined (?:reference to|symbol:?) [`']?([^'\n]+?)'?(?:$|\n)", raw))
    return (
        "\n".join(f"{SOURCE_NAME}: error: Unresolved extern function '{_tidy(name)}'" for name in names)
        or raw
    )


def _show(translation: Translation, line: int, column: int | None) -> list[str]:
    """The line of the source with a caret under the column."""
    lines = translation.source.splitlines()
    if not 1 <= line <= len(lines):
        return []
    shown = [f"{translation.place(line)[1]:5d} | {lines[line - 1]}"]
    if column:
        pad = re.sub(r"[^\t]", " ", lines[line - 1][: column - 1])
        shown.append(f"      | {pad}^")
    return shown


def _count_text(errors: int) -> str:
    return f'{errors} error{"s" if errors > 1 else ""} detected in the compilation of "{SOURCE_NAME}".'


def _check_spaces(translation: Translation, options: tuple[str, ...]) -> None:
    """Refuse what only the missing word ``__device__`` makes wrong."""
    if {"-default-device", "--device-as-default-execution-space"} & set(options):
        return
    out = []
    calls = host_calls(translation.source, translation.tokens)
    for line, column, message in calls:
        file, shown = translation.place(line)
        out += [f"{file or SOURCE_NAME}({shown}): error: {message}", *_show(translation, line, column)]
    if calls:
        text = "\n".join([*out, _count_text(len(calls))])
        raise CompileException(text, translation.source, SOURCE_NAME, options)


# ---------------- compile
def _callable_names(translation: Translation, expressions: tuple[str, ...]) -> list[str]:
    """Kernels that get an entry: the plain ones, and the instances asked for."""
    plain = [kernel.name for kernel in translation.kernels if kernel.is_extern_c and not kernel.is_template]
    return list(dict.fromkeys([*plain, *expressions]))


def _base_name(name: str) -> str:
    """``sum`` of ``tools::sum<float>``."""
    return name.split("<")[0].split("::")[-1].strip()


def _thread_bounds(translation: Translation, names: list[str]) -> dict[int, str]:
    """By entry, the argument of ``__launch_bounds__``, where it means something outside of the declaration."""
    kernels = {kernel.name: kernel for kernel in translation.kernels}
    is_flat = all(token.text != "namespace" for token in translation.tokens)
    found = {}
    for k, name in enumerate(names):
        kernel = kernels.get(_base_name(name))
        text = kernel.max_threads if kernel else ""
        if kernel and text and (text.isdigit() or (is_flat and not kernel.is_template)):
            found[k] = text
    return found


def _unit(translation: Translation, names: list[str], defines: list[str]) -> str:
    entries = "".join(f"EMU_ENTRY({k}, {name})\n" for k, name in enumerate(names))
    entries += "".join(f"EMU_BOUND({k}, {text})\n" for k, text in _thread_bounds(translation, names).items())
    headers = ['#include "cuda_shim.h"']
    if _WORD_LANES.search(translation.source):  # many functions that few kernels use: compiling stays fast
        headers.append('#include "word_lanes.h"')
    before = "\n".join([*headers, *defines])
    return f'{before}\n#line 1 "{SOURCE_NAME}"\n{translation.code}\n#line 1 "entries"\n{entries}'


def _mode_flags(compiler: toolchain.Toolchain, mode: str, source: str) -> list[str]:
    flags = [*_FLAGS[mode], "-g1", "-gdwarf-4", *compiler.common_flags]
    flags += ["-Wno-unknown-pragmas", "-Werror=return-type"]
    if "__activemask" in source:
        flags += ["-DEMU_ASKS_ACTIVE_MASK", "-Wno-attributes", *compiler.keep_calls_flags]
    gcc, clang = ["-fno-diagnostics-show-caret"], ["-fno-caret-diagnostics", "-Wno-vla-extension"]
    flags += ["-fdiagnostics-color=never", *(gcc if compiler.family == "gcc" else clang)]
    return flags + (compiler.instrument_flags if mode == "full" else [])


def _build(target: Path, unit: str, translation: Translation, options: tuple[str, ...], mode: str) -> None:
    compiler = toolchain.find()
    flags = [*_sort_options(options, translation.source)[0], *_mode_flags(compiler, mode, translation.source)]
    flags += ["-nostdinc", "-isystem", str(_INCLUDE), "-isystem", str(native.SOURCE_FOLDER)]
    # `zig c++` looks for headers of a C library wherever it may link one.
    if compiler.family == "zig" and compiler.is_macos:
        flags += ["-nostdlib"]
    with tempfile.TemporaryDirectory(prefix="tinyvllm-") as work:
        source, made = Path(work) / "unit.cpp", Path(work) / "unit.so"
        source.write_text(unit)
        # In full mode the sanitizer's own runtime must not be linked: the checks are ours.
        done = compiler.build(flags, source, made, [native.library_path()], one_step=mode == "fast")
        if done.returncode != 0:
            raise _failure(done.stderr, translation, options)
        target.write_bytes(made.read_bytes() + (_PLAIN if mode == "fast" and _never_waits(made) else b""))


def _only_entries_fail(raw: str) -> bool:
    """Is what does not compile the names that were asked for, and nothing in the source or its headers?"""
    errors = [
        match for match in map(_DIAGNOSTIC.match, raw.splitlines()) if match and "error" in match["what"]
    ]
    return bool(errors) and all(match["file"] == "entries" for match in errors)


def _missing_header(raw: str, translation: Translation) -> str:
    """NVRTC's words for an included file that is not there; "" where every one is."""
    for match in map(_DIAGNOSTIC.match, raw.splitlines()):
        if match is None or MISSING_HEADER not in match["text"]:
            continue
        number = int(match["line"])
        name = match["text"].split(MISSING_HEADER)[1].strip().strip('"')
        file, shown = translation.place(number)
        rows = [f'{file or SOURCE_NAME}({shown}): catastrophic error: cannot open source file "{name}"']
        rows += _show(translation, number, None)
        rows += [f'1 catastrophic error detected in the compilation of "{SOURCE_NAME}".']
        return "\n".join([*rows, "Compilation terminated."])
    return ""


def _failure(raw: str, translation: Translation, options: tuple[str, ...]) -> Exception:
    if "No space left on device" in raw:
        return OSError(errno.ENOSPC, "no space left on the disk while compiling a kernel")
    missing = _missing_header(raw, translation)
    text, errors = (missing, 0) if missing else format_messages(raw, translation)
    if errors:
        text += "\n" + _count_text(errors)
    elif not missing and _only_entries_fail(raw):
        return NoSuchKernel(_tidy(raw))
    else:
        text = text or _link_message(raw, translation)
    return CompileException(text, translation.source, SOURCE_NAME, options)


# ---------------- load

# Calls into the runtime in which a thread may have to wait for others, or asks about them.
_WAITING = (
    *("emu_syncthreads", "emu_syncthreads_reduce", "emu_collective", "emu_yield", "emu_active_mask"),
    *("emu_wait_phase", "emu_named_barrier"),
)
_PLAIN = b"EMU-PLAIN"  # behind the library's own bytes: no thread of its kernels waits


def _never_waits(path: Path) -> bool:
    with path.open("rb") as file:
        if file.read(4) != b"\x7fELF":
            return False
        symbols: Any = elf_file(file).get_section_by_name(".dynsym")
        return symbols is not None and not any(symbols.get_symbol_by_name(name) for name in _WAITING)


def _is_plain(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-len(_PLAIN), 2)
        return file.read() == _PLAIN


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("fname", ctypes.c_char_p),
        ("fbase", ctypes.c_void_p),
        ("sname", ctypes.c_char_p),
        ("saddr", ctypes.c_void_p),
    )


def _base_address(address: int) -> int:
    """Where the library that holds `address` is loaded."""
    info = _DlInfo()
    dladdr = ctypes.CDLL(None).dladdr
    dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_DlInfo)]
    if dladdr(address, ctypes.byref(info)) == 0:
        return 0
    return info.fbase or 0


def _image_size(path: Path) -> int:
    """Bytes of address space that the library takes."""
    with path.open("rb") as file:
        if file.read(4) == b"\x7fELF":
            segments = [s for s in elf_file(file).iter_segments() if s["p_type"] == "PT_LOAD"]
            return int(max(s["p_vaddr"] + s["p_memsz"] for s in segments))
    return path.stat().st_size + (1 << 16)


def _find_variables(module: int) -> tuple[Variable, ...]:
    """The variables that loading this source's library has made, or found made."""
    runtime = native.runtime()
    found: list[Variable] = []
    name, constant = ctypes.c_char_p(), ctypes.c_int()
    numbers = [ctypes.c_uint64() for _ in range(3)]
    places = [ctypes.byref(place) for place in (name, *numbers, constant)]
    while runtime.emu_variable_info(module, len(found), *places):
        address, size, item = (number.value for number in numbers)
        found.append(
            Variable((name.value or b"").decode(), address, size, max(1, item), bool(constant.value))
        )
    return tuple(found)


def _load(
    handle: ctypes.CDLL, path: Path, translation: Translation, names: list[str], module: int
) -> Library:
    base = _base_address(ctypes.cast(handle.emu_entry_0, ctypes.c_void_p).value or 0) if names else 0
    image = (base, base + _image_size(path)) if names else (0, 0)
    kernels = {kernel.name: kernel for kernel in translation.kernels}
    entries = {}
    plain = _is_plain(path)
    for k, name in enumerate(names):
        address = ctypes.cast(handle[f"emu_entry_{k}"], ctypes.c_void_p).value or 0
        types = (ParameterType * 256)()
        count = handle[f"emu_describe_{k}"](types)
        kernel = kernels.get(_base_name(name), Kernel(name, (), False, False, 0))
        parameters = kernel.parameters
        if len(parameters) != count:  # made by a macro: the names are not in the text
            parameters = tuple(Parameter(f"argument {j}", "") for j in range(count))
        block = ctypes.cast(handle[f"emu_block_{k}"], ctypes.c_void_p).value or 0 if plain else 0
        bound = getattr(handle, f"emu_bound_{k}", None)
        entries[name] = Entry(
            name,
            address,
            parameters,
            tuple(types[j] for j in range(count)),
            block,
            min(1024, bound()) if bound else 1024,
        )
    return Library(path, handle, base, image, translation, entries, _find_variables(module))


@functools.lru_cache(maxsize=1024)
def compile_source(
    source: str, options: tuple[str, ...], mode: str, expressions: tuple[str, ...] = ()
) -> Library:
    """Compile (or take from the cache) and load a source.

    Parameters
    ----------
    source : str
        CUDA C++.
    options : tuple of str
        NVRTC's options.
    mode : {"full", "fast"}
        With every access checked, or without.
    expressions : tuple of str
        Instances of templates, or kernels with C++ names, that are to be called by these names.

    Raises
    ------
    CompileException
        With the source's own line numbers.
    NoSuchKernel
        When an expression names nothing.
    """
    compiler = toolchain.find()
    flags, defines = _sort_options(options, source)
    folders = [_INCLUDE, *(Path(flag[2:]) for flag in flags if flag.startswith("-I"))]
    translation = translate(source, lambda name: any((folder / name).is_file() for folder in folders))
    _check_spaces(translation, options)
    names = _callable_names(translation, expressions)
    unit = _unit(translation, names, defines)
    key_flags = shlex.join([*flags, *_mode_flags(compiler, mode, translation.source)])
    name = cache.key(unit, key_flags, compiler.version, str(native.library_path())) + ".so"
    module = int(cache.key(source, *flags, *defines)[:16], 16)
    native.runtime().emu_begin_module(module)
    handle, path = cache.load(name, lambda target: _build(target, unit, translation, options, mode))
    return _load(handle, path, translation, names, module)
