"""From the runtime's record of a fault to an error that a person can act on."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from . import native, settings
from .array import ndarray
from .compiler import Entry, Library
from .debug_lines import line_of
from .errors import (
    BarrierDivergence,
    CompileException,
    CUDADriverError,
    DataRace,
    KernelAssertion,
    KernelError,
    KernelFault,
    KernelTimeout,
    OutOfBounds,
    OutOfMemoryError,
    Site,
    UninitializedRead,
)
from .memory import MemoryPointer

_WRITE, _ATOMIC, _COPIED = 1, 2, 16
INTERRUPTED = 14  # kInterrupted of context.h: the person pressed Ctrl-C
_NEAR = 1 << 30  # bytes; an address farther from every array than this is not an index gone wrong


class Fault(ctypes.Structure):
    """``Fault`` of context.h."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("problem", ctypes.c_int32),
        ("pc", ctypes.c_uint64),
        ("other_pc", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("access", ctypes.c_uint32),
        ("other_access", ctypes.c_uint32),
        ("thread", ctypes.c_uint32),
        ("other_thread", ctypes.c_uint32),
        ("block", ctypes.c_uint64),
        ("other_block", ctypes.c_uint64),
        ("line", ctypes.c_int32),
        ("other_line", ctypes.c_int32),
        ("count", ctypes.c_int32),
        ("other_count", ctypes.c_int32),
        ("shared_slot", ctypes.c_int32),
        ("exact", ctypes.c_int32),
        ("mask", ctypes.c_uint32),
        ("other_mask", ctypes.c_uint32),
        ("text", ctypes.c_char * 256),
    )


@dataclass(frozen=True)
class Region:
    """A piece of memory that a kernel was given: an argument, or a ``__shared__`` variable."""

    name: str
    base: int
    size: int
    item: int
    type: str
    is_const: bool = False
    pointed: str = ""  # of an array of pointers: what they point to


# Bytes of what a pointer in an array points to, by its type as written.
_POINTED_SIZE = {
    "char": 1, "unsigned char": 1, "short": 2, "unsigned short": 2, "__half": 2, "__nv_bfloat16": 2, "int": 4,
    "unsigned": 4, "unsigned int": 4, "float": 4, "double": 8, "long long": 8, "float2": 8, "float4": 16,
}  # fmt: skip
_MOST_POINTERS = 1 << 16
_BESIDE = 1 << 20  # bytes around an array in which no other lies


def _pointed_type(type_text: str) -> str:
    """``float`` of ``const float* const* __restrict__``; "" of what is no pointer to pointers."""
    words = re.sub(r"\b(const|volatile|__restrict__|__restrict)\b", " ", type_text)
    return " ".join(words.replace("*", " ").split()) if words.count("*") == 2 else ""


def _bytes_behind(pointer: int) -> int:
    """Bytes from a device pointer to the end of its allocation."""
    base, size = ctypes.c_void_p(), ctypes.c_size_t()
    found = native.runtime().emu_allocation_of(pointer, ctypes.byref(base), ctypes.byref(size))
    return (base.value or 0) + size.value - pointer if found else 0


@dataclass
class Launched:
    """A launch, as far as a report needs it."""

    library: Library
    entry: Entry
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: Sequence[Any]
    mode: str
    shared: dict[int, Region] = field(default_factory=dict)
    _regions: list[Region] | None = None

    # ---------------- positions
    def thread(self, number: int) -> tuple[int, int, int]:
        """threadIdx of a flat thread number."""
        x, y, _ = self.block
        return number % x, number // x % y, number // x // y

    def block_index(self, number: int) -> tuple[int, int, int]:
        """blockIdx of a flat block number."""
        x, y, _ = self.grid
        return number % x, number // x % y, number // x // y

    def line(self, pc: int, exact: bool = False) -> int:
        """Source line of a return address, or of the instruction itself where `exact`."""
        if not self.library.image[0] <= pc < self.library.image[1]:
            return 0
        return line_of(self.library.path, pc - self.library.base - (0 if exact else 1))

    def place(self, line: int) -> tuple[str, int]:
        """File and line as the source's ``#line`` directives have it."""
        return self.library.translation.place(line) if line else ("", 0)

    def source_line(self, line: int) -> str:
        lines = self.library.translation.source.splitlines()
        return lines[line - 1] if 1 <= line <= len(lines) else ""

    # ---------------- memory
    @property
    def regions(self) -> list[Region]:
        """The arrays among the arguments, and the source's ``__device__`` variables."""
        if self._regions is None:
            self._regions = [
                Region(v.name, v.address, v.size, v.item, "__constant__" if v.is_constant else "__device__")
                for v in self.library.variables
            ]
            for parameter, kind, value in zip(
                self.entry.parameters, self.entry.types, self.args, strict=False
            ):
                if kind.kind != 0 or not isinstance(value, ndarray | MemoryPointer):
                    continue
                pointer = value.data.ptr if isinstance(value, ndarray) else value.ptr
                length = value.nbytes if isinstance(value, ndarray) else _bytes_behind(pointer)
                text = str(value.dtype) if isinstance(value, ndarray) else "bytes"
                self._regions.append(
                    Region(
                        parameter.name,
                        pointer,
                        length,
                        max(1, kind.item_size),
                        text,
                        bool(kind.is_const),
                        _pointed_type(parameter.type),
                    )
                )
        return self._regions

    def remember_shared(self) -> None:
        """Ask the runtime for the last block's ``__shared__`` variables; the next launch replaces them."""
        runtime, slot = native.runtime(), 0
        name, numbers = ctypes.c_char_p(), [ctypes.c_uint64() for _ in range(3)]
        while runtime.emu_shared_info(slot, ctypes.byref(name), *[ctypes.byref(n) for n in numbers]):
            base, size, item = (n.value for n in numbers)
            text = (name.value or b"").decode() or "dynamic shared memory"
            self.shared[slot] = Region(text, base, size, max(1, item), "__shared__")
            slot += 1

    def without_arrays(self) -> Launched:
        """The same without keeping the arguments alive."""
        regions = self.regions if self.mode == "full" else []
        return replace(self, args=(), _regions=regions)

    def region(self, address: int, slot: int, write: bool = False) -> Region | None:
        """The array that an address belongs to, or misses by the least.

        Of views that share memory: one that the kernel may write where it wrote, then the smallest.
        """
        if slot >= 0:
            return self.shared.get(slot)

        def away(region: Region) -> tuple[int, bool, int]:
            low, high = region.base, region.base + region.size
            distance = low - address if address < low else max(0, address - high + 1)
            return distance, write and region.is_const, region.size

        near = [region for region in self.regions if away(region)[0] < _NEAR]
        best = min(near, key=away, default=None)
        if best is not None and away(best)[0] == 0:
            return best
        behind = [region for region in self._pointed_to() if away(region)[0] < _BESIDE]
        return min(behind, key=away, default=best)

    def _pointed_to(self) -> list[Region]:
        """Arrays that the kernel reaches by pointers which lie in the arrays it was given: ``rows[3]``."""
        found = []
        for region in self.regions:
            if region.item != 8 or not native.runtime().emu_is_live(region.base, region.size):
                continue
            count = min(region.size // 8, _MOST_POINTERS)
            for k, pointer in enumerate((ctypes.c_uint64 * count).from_address(region.base)):
                size = _bytes_behind(pointer)
                if size:
                    item = _POINTED_SIZE.get(region.pointed, 1)
                    found.append(
                        Region(f"{region.name}[{k}]", pointer, size, item, region.pointed or "bytes")
                    )
        return found

    def element(self, address: int, slot: int, write: bool = False) -> tuple[str, int | None]:
        """Name of the array and flat index of the element at an address."""
        region = self.region(address, slot, write)
        if region is None:
            return "", None
        return region.name, (address - region.base) // region.item


# ---------------- wording
def _verb(access: int) -> str:
    return "updated atomically" if access & _ATOMIC else "written" if access & _WRITE else "read"


def _access(access: int) -> str:
    return "atomic" if access & _ATOMIC else "write" if access & _WRITE else "read"


def _triple(index: tuple[int, int, int], sizes: tuple[int, int, int]) -> str:
    """``5`` in a one-dimensional launch, ``(1, 2, 0)`` in others."""
    return str(index[0]) if sizes[1] == sizes[2] == 1 else str(index)


def _who(launched: Launched, site: Site) -> str:
    block = _triple(site.block, launched.grid)
    return f"block {block}, thread {_triple(site.thread, launched.block)}"


def _show(site: Site) -> str:
    if not site.line:
        return "  (the line is not known)"
    where = f"{site.file}, line" if site.file else "line"
    return f"  {where} {site.line}:  {site.text.strip()}"


def _site(launched: Launched, fault: Fault) -> Site:
    line = fault.line or launched.line(fault.pc, bool(fault.exact))
    if not line and fault.exact:  # between the kernel and the runtime
        line = launched.line(fault.other_pc)
    file, shown = launched.place(line)
    return Site(
        shown,
        launched.source_line(line),
        launched.block_index(fault.block),
        launched.thread(fault.thread if fault.thread < 1024 else 0),
        _access(fault.access),
        file,
    )


def _other(launched: Launched, fault: Fault) -> Site:
    line = fault.other_line or launched.line(fault.other_pc)
    file, shown = launched.place(line)
    return Site(
        shown,
        launched.source_line(line),
        launched.block_index(fault.other_block),
        launched.thread(fault.other_thread if fault.other_thread < 1024 else 0),
        _access(fault.other_access),
        file,
    )


# ---------------- a function a kind
def _indexed_name(launched: Launched, line: int, column: int) -> str:
    """The name in front of the bracket that is nearest to a column of the translated line."""
    column = launched.library.translation.source_column(line, column)
    subscript = r"\s*(?:\[[^][]*\]\s*)*"
    found = re.finditer(rf"(?:\w+{subscript}(?:\.|->))*(\w+){subscript}\[", launched.source_line(line))

    def away(match: re.Match[str]) -> int:  # compilers point at the expression, its last name, or a bracket
        return min(abs(at + 1 - column) for at in (match.start(), match.start(1), match.end() - 1))

    nearest = min(found, key=away, default=None)
    return nearest[1] if nearest else ""


def _array_index(launched: Launched, fault: Fault, site: Site) -> KernelError:
    """An index out of the range of an array whose size the compiler knows: a local one, or a structure's."""
    index = ctypes.c_int64(fault.address).value
    array = _indexed_name(launched, launched.line(fault.pc), fault.count)
    type_text = fault.text.decode(errors="replace").strip("'")
    size = re.search(r"\[(\d+)\]", type_text)
    count = f"{int(size[1]):,} elements" if size else "fewer elements"
    name = array or "an array"
    message = (
        f"kernel `{launched.entry.name}`: out of bounds: {name}[{index}] was used; {name} has {count} "
        f"({type_text})\n  {_who(launched, site)}\n{_show(site)}"
    )
    return OutOfBounds(message, kernel=launched.entry.name, array=array, index=index, site=site)


def _out_of_bounds(launched: Launched, fault: Fault) -> KernelError:
    site = _site(launched, fault)
    if fault.problem == 1:
        return _array_index(launched, fault, site)
    region = launched.region(fault.address, fault.shared_slot, bool(fault.access & _WRITE))
    if fault.shared_slot >= 0 and region is None:
        what = (
            f"shared memory was {_verb(fault.access)}, and this launch gave none: pass shared_mem=... (bytes)"
        )
        array, index = "dynamic shared memory", None
    elif region is not None:
        index = (fault.address - region.base) // region.item
        array, count = region.name, region.size // region.item
        kind = "" if region.type.startswith("__") else f" ({region.type})"
        what = f"{array}[{index}] was {_verb(fault.access)}; {array} has {count:,} elements{kind}"
        if 0 <= index < count:
            what += f", and the {fault.bytes} bytes of this access reach past its end"
        elif index < 0:
            what += ": the index is negative"
    else:
        array, index = "", None
        address = fault.address
        near_null = address < 4096 or address >= 2**47
        what = (
            "an address next to a null pointer"
            if near_null
            else f"the address {address:#x}, far from every array,"
        ) + f" was {_verb(fault.access)}"
    message = (
        f"kernel `{launched.entry.name}`: out of bounds: {what}\n  {_who(launched, site)}\n{_show(site)}"
    )
    return OutOfBounds(message, kernel=launched.entry.name, array=array, index=index, site=site)


def _slack_overwritten(launched: Launched, fault: Fault) -> KernelError:
    array, index = launched.element(fault.address, -1, True)
    message = (
        f"kernel `{launched.entry.name}`: out of bounds: {array}[{index}] was written, beside the array. "
        "Fast mode saw it only after the launch; run it under `with cp.checks('full'):` "
        "to see the thread and the line"
    )
    return OutOfBounds(message, kernel=launched.entry.name, array=array, index=index)


def _uninitialized(launched: Launched, fault: Fault) -> KernelError:
    site = _site(launched, fault)
    array, index = launched.element(fault.address, fault.shared_slot, bool(fault.access & _WRITE))
    message = (
        f"kernel `{launched.entry.name}`: uninitialized read: {array}[{index}] was "
        f"{_verb(fault.access)}, and nothing had written it\n  {_who(launched, site)}\n{_show(site)}"
    )
    return UninitializedRead(message, kernel=launched.entry.name, array=array, index=index, site=site)


def _race_with_copy(launched: Launched, fault: Fault) -> KernelError:
    """One of the two is a copy that goes on after the thread that started it has gone on."""
    site, other = _site(launched, fault), _other(launched, fault)
    array, index = launched.element(fault.address, fault.shared_slot, bool(fault.access & _WRITE))
    if fault.other_access & _COPIED:
        why = (
            "a copy to it may still be on its way: this thread has not waited for the phase that ends with it"
        )
    else:
        why = (
            "a copy to it may come too early: the thread that starts it has not waited for those that use it"
        )
    message = (
        f"kernel `{launched.entry.name}`: data race on {array}[{index}]: {why}\n"
        f"  {_doing(fault.other_access)} by {_who(launched, other)}\n{_show(other)}\n"
        f"  {_doing(fault.access)} by {_who(launched, site)}\n{_show(site)}"
    )
    return DataRace(message, kernel=launched.entry.name, array=array, index=index, site=site, other=other)


def _doing(access: int) -> str:
    return "copy started" if access & _COPIED else _verb(access)


def _data_race(launched: Launched, fault: Fault) -> KernelError:
    if (fault.access | fault.other_access) & _COPIED:
        return _race_with_copy(launched, fault)
    site, other = _site(launched, fault), _other(launched, fault)
    array, index = launched.element(fault.address, fault.shared_slot, bool(fault.access & _WRITE))
    if site.block != other.block:
        why = "blocks run in no order: only atomics, or another launch, can order them"
    elif fault.thread // 32 == fault.other_thread // 32:
        why = "no barrier lies between: __syncthreads(), or __syncwarp() within a warp"
    else:
        why = "no __syncthreads() lies between"
    message = (
        f"kernel `{launched.entry.name}`: data race on {array}[{index}]: two threads use it, and {why}\n"
        f"  {_verb(fault.other_access)} by {_who(launched, other)}\n{_show(other)}\n"
        f"  {_verb(fault.access)} by {_who(launched, site)}\n{_show(site)}"
    )
    return DataRace(message, kernel=launched.entry.name, array=array, index=index, site=site, other=other)


def _lanes(mask: int) -> str:
    lanes = [lane for lane in range(32) if mask >> lane & 1]
    runs: list[list[int]] = []
    for lane in lanes:
        if runs and runs[-1][-1] == lane - 1:
            runs[-1].append(lane)
        else:
            runs.append([lane])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _barrier(launched: Launched, fault: Fault) -> KernelError:
    site, other = _site(launched, fault), _other(launched, fault)
    has_other = True
    if fault.problem == 1:
        what = (
            f"{fault.other_count} thread(s) of the block wait at one __syncthreads(), and thread "
            f"{_triple(site.thread, launched.block)} came to another. All threads of a "
            "block must come to the same one"
        )
    elif fault.problem == 2:
        has_other = False
        what = f"{fault.count} thread(s) wait at __syncthreads(), and the others of their block never come"
    elif fault.problem == 3:
        what = "lanes of one warp wait at different warp operations, and each needs the others"
    elif fault.problem == 4:
        has_other = bool(fault.other_count)
        what = f"a warp operation waits for lane(s) {_lanes(fault.other_mask)}, named in its mask, that "
        what += "never come"
        if has_other:
            what += f"; {fault.other_count} thread(s) wait at __syncthreads()"
    elif fault.problem == 6:
        has_other = bool(fault.other_pc)
        what = "threads wait for a phase that never ends, and no thread can go on: "
        what += fault.text.decode(errors="replace")
    else:
        has_other = False
        what = (
            f"thread {_triple(site.thread, launched.block)} calls a warp operation whose mask "
            f"{fault.mask:#010x} leaves out the thread's own lane"
        )
    message = (
        f"kernel `{launched.entry.name}`: barrier divergence: {what}\n  {_who(launched, site)}\n{_show(site)}"
    )
    if has_other:
        message += f"\n  {_who(launched, other)}\n{_show(other)}"
    return BarrierDivergence(
        message, kernel=launched.entry.name, site=site, other=other if has_other else None
    )


def _timeout(launched: Launched, fault: Fault) -> KernelError:
    site = _site(launched, fault)
    message = (
        f"kernel `{launched.entry.name}`: timeout: it ran for more than "
        f"{settings.current_timeout():g} seconds, and was stopped; does a loop never end?\n"
        f"  it was at {_who(launched, site)}\n{_show(site)}"
    )
    if launched.grid != (1, 1, 1):
        message += (
            "\n  (blocks are run in order here, one after another on each core: a block that waits for a later one "
            "waits forever. A card does not promise that it would not)"
        )
    return KernelTimeout(message, kernel=launched.entry.name, site=site)


def _assertion(launched: Launched, fault: Fault) -> KernelError:
    site = _site(launched, fault)
    message = (
        f"kernel `{launched.entry.name}`: assertion failed: {fault.text.decode(errors='replace')}\n"
        f"  {_who(launched, site)}\n{_show(site)}"
    )
    return KernelAssertion(message, kernel=launched.entry.name, site=site)


def _fault(text: str) -> Callable[[Launched, Fault], KernelError]:
    def make(launched: Launched, fault: Fault) -> KernelError:
        site = _site(launched, fault)
        message = f"kernel `{launched.entry.name}`: {text}\n  {_who(launched, site)}\n{_show(site)}"
        return KernelFault(message, kernel=launched.entry.name, site=site)

    return make


def _copy_refused(launched: Launched, fault: Fault) -> KernelError:
    return _fault(fault.text.decode(errors="replace"))(launched, fault)


def _misaligned(launched: Launched, fault: Fault) -> KernelError:
    site = _site(launched, fault)
    array, index = launched.element(fault.address, fault.shared_slot, bool(fault.access & _WRITE))
    message = (
        f"kernel `{launched.entry.name}`: misaligned address: {fault.bytes} bytes at {array}[{index}] were "
        f"{_verb(fault.access)}, which must start at a multiple of {fault.bytes} bytes\n"
        f"  {_who(launched, site)}\n{_show(site)}"
    )
    return KernelFault(message, kernel=launched.entry.name, array=array, index=index, site=site)


def _too_much_shared(launched: Launched, fault: Fault) -> Exception:
    if fault.problem == 1:
        return CUDADriverError(
            1,
            f"kernel `{launched.entry.name}`: its __shared__ variables take {fault.bytes:,} bytes, which leaves too "
            "little of the limit for shared_mem. Raise kernel.max_dynamic_shared_size_bytes (with the variables "
            "at most 232,448) before the launch, or ask for less",
        )
    if fault.problem == 2:
        return KernelFault(
            f"kernel `{launched.entry.name}`: it has more than {fault.bytes} __shared__ variables (each instance "
            "of a template counts); the emulation keeps no more apart: put some into one array",
            kernel=launched.entry.name,
        )
    message = (
        f"ptxas error   : Entry function '{launched.entry.name}' uses too much shared data "
        f"({fault.bytes:#x} bytes, {48 << 10:#x} max): its __shared__ variables take {fault.bytes:,} bytes; "
        "a block has 49,152, and more only as dynamic shared memory"
    )
    return CompileException(message, launched.library.translation.source, launched.entry.name, ())


def _no_memory(launched: Launched, fault: Fault) -> Exception:
    return OutOfMemoryError(1024 * (640 << 10), int(native.runtime().emu_live_bytes()))


_MAKERS: dict[int, Callable[[Launched, Fault], Exception]] = {
    1: _out_of_bounds,
    2: _uninitialized,
    3: _data_race,
    4: _barrier,
    5: _timeout,
    6: _assertion,
    7: _fault("integer division by zero, or of the most negative number by -1"),
    8: _fault("the kernel stopped itself (__trap, or an instruction that is not allowed)"),
    9: _fault("the stack is full: local arrays of a thread, or calls within calls, take more than 600 KB"),
    10: _too_much_shared,
    11: _misaligned,
    12: _slack_overwritten,
    13: _no_memory,
    15: _copy_refused,
}


def error(fault: Fault, launched: Launched) -> Exception:
    """The exception for a fault."""
    return _MAKERS[fault.kind](launched, fault)
