"""What the emulation tells of a launch: counters and warnings of the last one, traces, notices."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from . import native

if TYPE_CHECKING:
    from .diagnose import Launched

_READ, _WRITE, _ATOMIC = 0, 1, 2
SECTOR_BYTES = 32


class Counters(ctypes.Structure):
    """``Counters`` of context.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in (
            "global_read_bytes", "global_write_bytes", "global_read_sectors", "global_write_sectors",
            "global_read_requests", "global_write_requests", "shared_read_bytes", "shared_write_bytes",
            "shared_requests", "bank_conflicts", "barriers", "atomics", "accesses",
            "threads", "blocks", "shared_bytes",
        )),
        ("estimated", ctypes.c_int32),
        ("n_warnings", ctypes.c_int32),
    )  # fmt: skip


class _Site(ctypes.Structure):
    _fields_ = (
        ("pc", ctypes.c_uint64),
        ("access", ctypes.c_uint32),
        ("shared", ctypes.c_int32),
        *((name, ctypes.c_uint64) for name in ("accesses", "bytes", "sectors", "requests", "conflicts")),
    )


class _Warning(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("line", ctypes.c_int32),
        ("pc", ctypes.c_uint64),
        ("other_pc", ctypes.c_uint64),
        ("thread", ctypes.c_uint32),
        ("other_thread", ctypes.c_uint32),
        ("block", ctypes.c_uint64),
        ("other_block", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("shared_slot", ctypes.c_int32),
        ("count", ctypes.c_int32),
    )


@dataclass(frozen=True)
class LineCounters:
    """What one access in the source did in a launch.

    Attributes
    ----------
    line : int
        Line of the kernel's source.
    kind : str
        ``"read"``, ``"write"`` or ``"atomic"``.
    space : str
        ``"global"`` or ``"shared"``.
    accesses, bytes : int
        Of all threads.
    requests : int
        Instructions of warps: the lanes' k-th executions of the access form one.
    sectors : int
        32-byte sectors that the requests touched (global memory).
    conflicts : int
        Extra turns because words lay in one bank (shared memory).
    """

    line: int
    kind: str
    space: str
    accesses: int
    bytes: int
    requests: int
    sectors: int
    conflicts: int


@dataclass(frozen=True)
class LaunchReport:
    """Counters of one launch. In fast mode only the geometry is known, and the counts are 0.

    Attributes
    ----------
    kernel, mode : str
        Name, and ``"full"`` or ``"fast"``.
    grid, block : tuple of int
        The launch's geometry.
    global_read_bytes, global_write_bytes : int
        Bytes that threads asked for.
    global_read_sectors, global_write_sectors : int
        32-byte sectors that these requests touched, each counted once a warp's request: what moves between
        the L1 cache and the SM. Fewest possible: the bytes asked for, each once, over 32.
    global_read_requests, global_write_requests, shared_requests : int
        Instructions of warps.
    shared_read_bytes, shared_write_bytes : int
        Bytes in shared memory.
    bank_conflicts : int
        Extra turns that requests to shared memory took because words lay in one bank.
    barriers, atomics, accesses : int
        Barriers passed (blocks together), atomic operations, and all accesses.
    shared_bytes : int
        Shared memory of a block.
    estimated : bool
        True where a loop was so long that sectors and conflicts were counted for a part and scaled.
    warnings : tuple of str
        What is no fault but deserves a look.
    lines : tuple of LineCounters
        The same by access of the source.
    """

    kernel: str
    mode: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    global_read_bytes: int
    global_write_bytes: int
    global_read_sectors: int
    global_write_sectors: int
    global_read_requests: int
    global_write_requests: int
    shared_read_bytes: int
    shared_write_bytes: int
    shared_requests: int
    bank_conflicts: int
    barriers: int
    atomics: int
    accesses: int
    shared_bytes: int
    estimated: bool
    warnings: tuple[str, ...]
    lines: tuple[LineCounters, ...]

    @property
    def global_bytes(self) -> int:
        """Bytes of global memory asked for, read and written."""
        return self.global_read_bytes + self.global_write_bytes

    @property
    def global_sectors(self) -> int:
        """32-byte sectors of global memory touched, read and written."""
        return self.global_read_sectors + self.global_write_sectors

    @property
    def coalescing(self) -> float:
        """Bytes asked for, over the bytes of the sectors touched: 1.0 where every byte moved was wanted."""
        moved = self.global_sectors * SECTOR_BYTES
        return self.global_bytes / moved if moved else float("nan")

    def __str__(self) -> str:
        if self.mode == "fast":
            return f"{self.kernel}: grid {self.grid}, block {self.block}, fast mode: nothing was counted"
        about = " (scaled from a part)" if self.estimated else ""
        rows = [
            f"{self.kernel}: grid {self.grid}, block {self.block}",
            f"  global memory  {self.global_read_bytes:,} bytes read in {self.global_read_sectors:,} "
            f"sectors, {self.global_write_bytes:,} written in {self.global_write_sectors:,}{about}",
            f"  shared memory  {self.shared_read_bytes:,} bytes read, {self.shared_write_bytes:,} written, "
            f"{self.bank_conflicts:,} bank conflicts in {self.shared_requests:,} requests",
            f"  barriers       {self.barriers:,}, atomics {self.atomics:,}",
        ]
        rows += [f"  warning        {text}" for text in self.warnings]
        return "\n".join(rows)


# The dtype of a trace: one row an access, in the order in which the emulation ran them.
TRACE_DTYPE = np.dtype(
    [
        ("array", "U32"), ("index", "i8"), ("bytes", "u4"), ("kind", "U6"), ("line", "i4"),
        ("block", "i8"), ("thread", "i4"),
    ]
)  # fmt: skip


class _TraceEntry(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_uint64),
        ("pc", ctypes.c_uint64),
        ("block", ctypes.c_uint64),
        ("thread", ctypes.c_uint32),
        ("bytes", ctypes.c_uint32),
        ("access", ctypes.c_uint32),
        ("shared_slot", ctypes.c_int32),
    )


class Trace:
    """The accesses of the launches inside of a ``with emulation.trace():`` block.

    Attributes
    ----------
    rows : numpy.ndarray
        Structured array of :data:`TRACE_DTYPE`; ``block`` and ``thread`` are flat numbers, ``index`` counts
        elements of ``array``, and ``bytes`` is the size of the access.
    full : bool
        Whether a launch made more accesses than the limit: its later ones are not among the rows.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.full = False
        self._parts: list[np.ndarray[Any, Any]] = []

    @property
    def rows(self) -> np.ndarray[Any, Any]:
        return np.concatenate(self._parts) if self._parts else np.empty(0, TRACE_DTYPE)

    def _collect(self, launched: Launched) -> None:
        runtime = native.runtime()
        count = runtime.emu_trace(None, 0)
        if count > self.limit:  # the runtime keeps one more than it was asked for, to tell
            count, self.full = self.limit, True
            notice(
                f"cp.trace(): a launch made more than {self.limit:,} accesses; only these are kept."
                " cp.trace(limit=...) keeps more."
            )
        entries = (_TraceEntry * max(1, count))()
        runtime.emu_trace(entries, count)
        lines: dict[int, int] = {}
        rows = np.empty(count, TRACE_DTYPE)
        for k in range(count):
            entry = entries[k]
            if entry.pc not in lines:
                lines[entry.pc] = launched.place(launched.line(entry.pc))[1]
            array, index = launched.element(entry.address, entry.shared_slot)
            kind = _kind(entry.access)
            rows[k] = (array, index or 0, entry.bytes, kind, lines[entry.pc], entry.block, entry.thread)
        self._parts.append(rows)


_trace: Trace | None = None
_last: tuple[Launched, Counters, list[_Site], list[_Warning]] | None = None
_report: LaunchReport | None = None


@contextmanager
def trace(limit: int = 100_000) -> Iterator[Trace]:
    """Record every access of the launches inside of the block, up to `limit` a launch (full mode only)."""
    global _trace
    if limit < 1:
        raise ValueError(f"trace(limit={limit}): the limit must be at least 1")
    before, _trace = _trace, Trace(limit)
    native.runtime().emu_set_trace(limit + 1)
    try:
        yield _trace
    finally:
        _trace = before
        native.runtime().emu_set_trace(before.limit + 1 if before else 0)


def _kind(access: int) -> str:
    return "atomic" if access & _ATOMIC else "write" if access & _WRITE else "read"


def record(launched: Launched, counters: Counters) -> None:
    """Keep what the runtime says of the launch that just ended; it is put into words when asked for."""
    global _last, _report
    sites: list[_Site] = []
    warnings: list[_Warning] = []
    if launched.mode == "full":
        runtime = native.runtime()
        while runtime.emu_site(len(sites), ctypes.byref(site := _Site())):
            sites.append(site)
        while runtime.emu_warning(len(warnings), ctypes.byref(warning := _Warning())):
            warnings.append(warning)
        launched.remember_shared()
        if _trace is not None:
            _trace._collect(launched)
    _last, _report = (launched.without_arrays(), counters, sites, warnings), None
    for collected in _collecting:
        collected.append(_last)


_Raw = tuple["Launched", Counters, list[_Site], list[_Warning]]
_collecting: list[list[_Raw]] = []


@contextmanager
def collect(reports: list[LaunchReport]) -> Iterator[None]:
    """Append the report of every launch inside of a ``with`` block to `reports`, when the block ends."""
    raw: list[_Raw] = []
    _collecting.append(raw)
    try:
        yield
    finally:
        _collecting[:] = [other for other in _collecting if other is not raw]
        reports.extend(_make_report(*one) for one in raw)


def last_report() -> LaunchReport | None:
    """The report of the last launch; None before the first."""
    global _report
    if _report is None and _last is not None:
        _report = _make_report(*_last)
    return _report


def _make_report(
    launched: Launched, counters: Counters, sites: list[_Site], warnings: list[_Warning]
) -> LaunchReport:
    lines = tuple(
        LineCounters(
            line=launched.place(launched.line(site.pc))[1],
            kind=_kind(site.access),
            space="shared" if site.shared else "global",
            accesses=site.accesses,
            bytes=site.bytes,
            requests=site.requests,
            sectors=site.sectors,
            conflicts=site.conflicts,
        )
        for site in sites
    )
    names = {field[0] for field in Counters._fields_} & set(LaunchReport.__annotations__) - {"estimated"}
    return LaunchReport(
        kernel=launched.entry.name,
        mode=launched.mode,
        grid=launched.grid,
        block=launched.block,
        estimated=bool(counters.estimated),
        warnings=tuple(dict.fromkeys(_warning_text(launched, warning) for warning in warnings)),
        lines=tuple(sorted(lines, key=lambda c: (c.line, c.space, c.kind))),
        **{name: getattr(counters, name) for name in names},
    )


_UNDEFINED = {
    3: "a floating-point number is cast to an integer type that can not hold it: a card gives the nearest number "
    "of the type (0 for NaN), a CPU does not",
    4: "a shift by {count} bits, which the type has not got: C++ leaves the result open, and a card and a CPU "
    "differ",
    5: "a lane reads from lane {other}, which the mask names and which has returned or is not in the block: on a "
    "card the value is undefined",
}


def _warning_text(launched: Launched, warning: _Warning) -> str:
    if warning.kind == 1:
        array, index = launched.element(warning.address, warning.shared_slot)
        line, other = (launched.place(launched.line(pc))[1] for pc in (warning.pc, warning.other_pc))
        where = f"line {line}" if line == other else f"lines {other} and {line}"
        return f"{where}: two threads store the same value in {array}[{index}]: harmless, but they race"
    if warning.kind in _UNDEFINED:
        line = launched.place(launched.line(warning.pc) or warning.line)[1]
        who = f"thread {launched.thread(warning.thread)} of block {launched.block_index(warning.block)}"
        what = _UNDEFINED[warning.kind].format(count=warning.count, other=warning.other_thread)
        return f"line {line}: {what}, in {who}"
    return (
        f"line {launched.place(warning.line)[1]}: {warning.count} thread(s), thread "
        f"{launched.thread(warning.thread)} first, "
        "had returned before this __syncthreads(), at which the others of their block wait"
    )


# ---------------- notices
_said: set[str] = set()


def notice(text: str) -> None:
    """Print `text` on standard output, once a process."""
    if text not in _said:
        _said.add(text)
        print(text)
