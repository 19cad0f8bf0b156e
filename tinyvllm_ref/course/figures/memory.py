"""Pictures of memory: which thread touches what, how fast each level is, who owns which bytes and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from .. import look
from .arrays import Segment, byte_strip
from .canvas import (
    AltFigure,
    Sheet,
    byte_count,
    drawable,
    in_one_look,
    need_at_most,
    need_some,
    plot_page,
    plural,
    shortened,
    text_width,
    with_unit,
)

WARP = 32
SECTOR = 32  # bytes
BANKS = 32  # of 4 bytes each


@dataclass(frozen=True)
class Request:
    """One instruction of a warp: for each thread that took part, the first byte and the size of its access."""

    line: int
    kind: str
    threads: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def sectors(self) -> list[int]:
        """Numbers of the 32-byte sectors touched, in order; the array begins at a sector's start."""
        touched = {
            sector
            for start, size in zip(self.starts, self.sizes, strict=True)
            for sector in range(start // SECTOR, (start + size - 1) // SECTOR + 1)
        }
        return sorted(touched)

    @property
    def fewest_sectors(self) -> int:
        """Sectors that the same bytes, each once, would fill."""
        wanted = {
            byte
            for start, size in zip(self.starts, self.sizes, strict=True)
            for byte in range(start, start + size)
        }
        return -(-len(wanted) // SECTOR)

    @property
    def turns(self) -> int:
        """Turns that the banks of shared memory need: the most different words that lie in one bank."""
        return max(len(words) for words in self.banks().values())

    def banks(self) -> dict[int, dict[int, list[int]]]:
        """Bank -> word -> threads that access it."""
        banks: dict[int, dict[int, list[int]]] = {}
        for thread, start, size in zip(self.threads, self.starts, self.sizes, strict=True):
            for word in range(start // 4, (start + size - 1) // 4 + 1):
                banks.setdefault(word % BANKS, {}).setdefault(word, []).append(thread)
        return banks


def warp_requests(
    rows: Any, array: str, *, warp: int = 0, block: int = 0, itemsize: int | None = None
) -> list[Request]:
    """Group a trace's accesses of one warp to `array` into requests: the threads' k-th execution of a line's access.

    Parameters
    ----------
    rows : numpy.ndarray
        Rows of a trace: array, index, bytes, kind, line, block, thread.
    array : str
        Name of the array.
    warp, block : int
        Which warp of which block.
    itemsize : int, optional
        Bytes of an element; the smallest access in the trace if not given.

    Returns
    -------
    list of Request
        In the order in which they first ran.

    Raises
    ------
    ValueError
        If the trace has no such access.
    """
    of_array = rows[rows["array"] == array]
    if len(of_array) == 0:
        names = ", ".join(sorted(set(rows["array"].tolist()))) or "nothing"
        raise ValueError(f"the trace has no access to {array!r}; it has {names}")
    size = int(itemsize or of_array["bytes"].min())
    mine = of_array[(of_array["block"] == block) & (of_array["thread"] // WARP == warp)]
    if len(mine) == 0:
        raise ValueError(f"warp {warp} of block {block} does not access {array!r} in this trace")
    # A thread may access one line several times between two turns of a loop (s[t] += s[t + k] reads twice): the
    # k-th access of a thread on a line and of a kind belongs to the k-th of the others.
    count: dict[tuple[int, str, int], int] = {}
    groups: dict[tuple[int, str, int], list[tuple[int, int, int]]] = {}
    for row in mine:
        site = (int(row["line"]), str(row["kind"]))
        k = count.get((*site, int(row["thread"])), 0)
        count[*site, int(row["thread"])] = k + 1
        groups.setdefault((*site, k), []).append(
            (int(row["thread"]), int(row["index"]) * size, int(row["bytes"]))
        )
    requests = []
    for (line, kind, _), accesses in groups.items():
        threads, starts, sizes = zip(*sorted(accesses), strict=True)
        requests.append(Request(line, kind, threads, starts, sizes))
    return requests


@in_one_look
def threads_over_addresses(
    rows: Any, array: str, warp: int = 0, *, block: int = 0, request: int = 0, itemsize: int | None = None
) -> AltFigure:
    """Which thread of a warp touches which address, with the 32-byte sectors that have to move.

    Parameters
    ----------
    rows : numpy.ndarray
        Rows of a trace (``emulation.trace()``).
    array : str
        Name of the array.
    warp, block : int
        Which warp of which block.
    request : int
        Which of the warp's requests to the array, in the order in which they ran.
    itemsize : int, optional
        Bytes of an element; the smallest access in the trace if not given.

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        If the trace has no such access.
    """
    requests = warp_requests(rows, array, warp=warp, block=block, itemsize=itemsize)
    if not 0 <= request < len(requests):
        raise ValueError(f"request {request}: the warp made {plural(len(requests), 'request')} to {array!r}")
    one = requests[request]
    sectors, moved = one.sectors, len(one.sectors) * SECTOR
    need_at_most("threads_over_addresses", len(sectors), 64, "sectors")
    item = int(itemsize or rows[rows["array"] == array]["bytes"].min())
    wanted = sum(one.sizes)
    sheet = Sheet()
    sheet.title(
        f"Line {one.line}, {one.kind} of {array}: warp {warp} of block {block}",
        f"Asked for: {wanted:,} bytes, by {plural(len(one.threads), 'thread')}. Moved: "
        f"{plural(len(sectors), 'sector')} of 32 bytes ({moved:,} bytes); fewest possible: {one.fewest_sectors}.",
    )
    cell = sheet.inner / WARP
    sheet.text(sheet.left, sheet.y + 0.05, "threads", size=look.SMALL_SIZE, color=look.MUTED)
    top = sheet.y + 0.18
    for lane in range(WARP):
        thread = warp * WARP + lane
        active = thread in one.threads
        style: dict[str, Any] = {"fill": look.BLUE.fill, "edge": look.BLUE.line}
        if not active:
            style = {"fill": look.WASTE, "hatch": look.HATCH}
        sheet.box(sheet.left + lane * cell + 0.01, top, cell - 0.02, 0.2, **style)
        if active:
            sheet.text(sheet.left + (lane + 0.5) * cell, top + 0.105, str(thread), size=7, ha="center",
                       width=cell)  # fmt: skip
    lines_from, sheet.y = top + 0.2, top + 0.2 + 0.75
    _sector_row(sheet, one, sectors, item, lines_from, warp, cell)
    sheet.key(
        [
            ("a byte that was asked for", {"fill": look.BLUE.fill, "edge": look.BLUE.line}),
            ("moves, and nobody asked", {"fill": look.WASTE, "hatch": look.HATCH}),
            ("outline: one sector, 32 bytes", {"fill": look.PAPER, "edge": look.INK, "line": 1.3}),
        ]
    )
    return sheet.finish(
        f"Line {one.line}: {plural(len(one.threads), 'thread')} of warp {warp} {one.kind} {wanted} bytes of "
        f"{array}; they touch {plural(len(sectors), 'sector')} of 32 bytes, the fewest possible is "
        f"{one.fewest_sectors}."
    )


def _sector_row(
    sheet: Sheet, one: Request, sectors: Sequence[int], item: int, lines_from: float, warp: int, cell: float
) -> None:
    """The touched sectors side by side, with a gap where addresses jump, and a line from each thread."""
    jumps = sum(after != before + 1 for before, after in pairwise(sectors))
    gap = min(0.12, 1.6 / max(1, jumps))
    wide = min(1.4, (sheet.inner - jumps * gap) / len(sectors))
    tall, top = 0.26, sheet.y
    x_of: dict[int, float] = {}
    x = sheet.left + (sheet.inner - jumps * gap - wide * len(sectors)) / 2
    labelled = -1e9
    for k, sector in enumerate(sectors):
        jump = k > 0 and sector != sectors[k - 1] + 1
        x += gap if jump else 0
        x_of[sector] = x
        sheet.box(x, top, wide, tall, fill=look.WASTE, hatch=look.HATCH)
        sheet.box(x, top, wide, tall, edge=look.INK, line=1.3 if wide > 0.15 else 0.8, above=3)
        label = f"[{sector * SECTOR // item:,}]"
        end = x + text_width(label, 7.5, mono=True)
        if x > labelled + 0.1 and end <= sheet.right + 0.05:
            sheet.text(x, top + tall + 0.1, label, size=7.5, mono=True, color=look.MUTED)
            labelled = end
        x += wide
    byte = wide / SECTOR
    for thread, start, size in zip(one.threads, one.starts, one.sizes, strict=True):
        for first in range(start, start + size, item):
            here = x_of[first // SECTOR] + first % SECTOR * byte
            sheet.box(here, top + 0.03, item * byte, tall - 0.06, fill=look.BLUE.fill,
                      edge=look.BLUE.line, line=0.5, above=2)  # fmt: skip
        middle = x_of[start // SECTOR] + (start % SECTOR + min(size, SECTOR - start % SECTOR) / 2) * byte
        lane = thread - warp * WARP
        sheet.line(
            (sheet.left + (lane + 0.5) * cell, middle), (lines_from, top), color=look.BLUE.line, width=0.7
        )
    sheet.y = top + tall + 0.2


@in_one_look
def bank_conflicts(
    rows: Any, array: str, *, warp: int = 0, block: int = 0, itemsize: int | None = None
) -> AltFigure:
    """The 32 banks of shared memory in a warp's worst request: words in one bank are served one after the other.

    Parameters
    ----------
    rows : numpy.ndarray
        Rows of a trace (``emulation.trace()``).
    array : str
        Name of the shared array.
    warp, block : int
        Which warp of which block.
    itemsize : int, optional
        Bytes of an element; the smallest access in the trace if not given.

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        If the trace has no such access.
    """
    requests = warp_requests(rows, array, warp=warp, block=block, itemsize=itemsize)
    worst = max(requests, key=lambda one: one.turns)
    extra = sum(one.turns - 1 for one in requests)
    sheet = Sheet()
    sheet.title(
        f"Line {worst.line}, {worst.kind} of {array}: the banks of shared memory",
        f"The slowest request of warp {warp} takes {plural(worst.turns, 'turn')}; one is the fewest. All its "
        f"requests together ({len(requests):,}): {plural(extra, 'extra turn')}.",
    )
    x0 = sheet.left + 0.5
    cell = (sheet.right - x0) / BANKS
    tall = min(0.24, 3.2 / worst.turns)
    bottom = sheet.y + tall * worst.turns
    banks = worst.banks()
    for bank in range(BANKS):
        x = x0 + bank * cell
        sheet.box(x + 0.01, bottom + 0.03, cell - 0.02, 0.17, edge=look.RULE)
        sheet.text(x + cell / 2, bottom + 0.12, str(bank), size=6.5, ha="center", color=look.MUTED)
        for turn, threads in enumerate(banks.get(bank, {}).values()):
            hue = look.BLUE if turn == 0 else look.VERMILION
            y = bottom - (turn + 1) * tall
            sheet.box(x + 0.01, y + 0.01, cell - 0.02, tall - 0.02, fill=hue.fill, edge=hue.line,
                      hatch=None if turn == 0 else "\\\\\\\\", line=0.6)  # fmt: skip
            if tall > 0.16 and turn == 0:
                sheet.text(
                    x + cell / 2, y + tall / 2, str(threads[0]), size=6.5, ha="center", width=cell - 0.01
                )
    for turn in range(worst.turns):
        if tall >= 0.16 or turn in (0, worst.turns - 1):
            y = bottom - (turn + 0.5) * tall
            sheet.text(x0 - 0.08, y, f"turn {turn + 1}", size=7, ha="right", color=look.MUTED)
    sheet.text(x0 - 0.08, bottom + 0.12, "bank", size=7, ha="right", color=look.MUTED)
    sheet.y = bottom + 0.2
    sheet.key(
        [
            ("first word of its bank, with its thread", {"fill": look.BLUE.fill, "edge": look.BLUE.line}),
            ("another word of the same bank: waits", {"fill": look.VERMILION.fill, "edge": look.VERMILION.line,
                                                       "hatch": "\\\\\\\\"}),
        ]
    )  # fmt: skip
    return sheet.finish(
        f"In line {worst.line} the accesses of warp {warp} to {array} fall into {plural(len(banks), 'bank')}; the "
        f"fullest holds {plural(worst.turns, 'word')}, so the request takes {plural(worst.turns, 'turn')}."
    )


@dataclass(frozen=True)
class Level:
    """A level of memory: size in bytes, bandwidth in bytes a second (None where unknown), a short remark."""

    name: str
    size: float
    bandwidth: float | None
    note: str = ""


@in_one_look
def memory_hierarchy(levels: Sequence[Level], *, source: str) -> AltFigure:
    """Levels of memory from the nearest to the farthest: size, and bandwidth as bars.

    Parameters
    ----------
    levels : sequence of Level
        From the fastest to the slowest.
    source : str
        Where the numbers come from.

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        If there is no level, or a size or bandwidth is not positive.
    """
    need_some("memory_hierarchy(levels)", levels, "level")
    need_at_most("memory_hierarchy(levels)", len(levels), 12, "levels")
    for level in levels:
        for what, value in (("size", level.size), ("bandwidth", level.bandwidth)):
            if value is not None and not 0 < value < np.inf:
                raise ValueError(
                    f"memory_hierarchy: {what} of {level.name!r} is {value}; it must be positive"
                )
    known = [level.bandwidth for level in levels if level.bandwidth is not None]
    sheet = Sheet()
    sheet.title("Memory: small and near is fast", "The bars show bandwidth on a logarithmic scale.")
    floor = np.log10(min(known, default=1.0)) - 0.5
    span = max(0.1, np.log10(max(known, default=1.0)) - floor)
    x1, x2 = sheet.left + 1.75, sheet.left + 2.85
    for k, level in enumerate(levels):
        hue, y = look.hue(k), sheet.y
        sheet.text(sheet.left, y + 0.13, level.name, bold=True, width=1.6)
        sheet.text(x1, y + 0.13, byte_count(level.size), color=look.INK)
        if level.bandwidth is None:
            sheet.text(x2, y + 0.13, "bandwidth not known", color=look.MUTED)
        else:
            wide = 2.9 * float(np.log10(level.bandwidth) - floor) / span
            sheet.box(x2, y + 0.02, wide, 0.22, fill=hue.fill, edge=hue.line)
            sheet.text(x2 + wide + 0.08, y + 0.13, with_unit(level.bandwidth, "B/s"))
        if level.note:
            sheet.text(
                sheet.left, y + 0.34, level.note, size=look.SMALL_SIZE, color=look.MUTED, width=sheet.inner
            )
        sheet.y += 0.54 if level.note else 0.36
    sheet.y -= 0.14
    sheet.note(f"Source: {source}")
    says = ", ".join(
        f"{level.name} {byte_count(level.size)}"
        + ("" if level.bandwidth is None else f" at {with_unit(level.bandwidth, 'B/s')}")
        for level in levels
    )
    return sheet.finish(f"Levels of memory: {says}.")


def arena_map(
    items: Sequence[tuple[str, int, int]], *, kinds: Mapping[str, str] | None = None, title: str = "One arena"
) -> AltFigure:
    """The plan of an arena: which bytes belong to which array; padding is hatched.

    Parameters
    ----------
    items : sequence of (str, int, int)
        Name, offset and bytes of each array.
    kinds : mapping of str to str, optional
        Name -> kind; arrays of one kind have one colour.
    title : str
        Heading.

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        If there is no item, or two overlap.
    """
    need_some("arena_map(items)", items, "item")
    kinds = kinds or {}
    return byte_strip(
        [Segment(name, offset, offset + size, kinds.get(name, "arrays")) for name, offset, size in items],
        title=title,
    )


@dataclass(frozen=True)
class BlockUse:
    """A block of the cache at one step: whose it is, and how many of its slots hold a token."""

    owner: str
    used: int


History = Sequence[Sequence[BlockUse | None]]


@in_one_look
def memory_map(
    history: History | Mapping[str, History],
    block_size: int,
    *,
    title: str = "Who holds which block, step by step",
    subtitle: str = "",
) -> AltFigure:
    """Blocks of memory over time; reserved slots that hold no token are hatched.

    Parameters
    ----------
    history : sequence of sequence of (BlockUse or None), or a mapping of names to such
        ``history[step][block]``, None where a block is free. Several named ones stand under each other.
    block_size : int
        Slots of a block.
    title : str
        Heading.
    subtitle : str, optional
        Under it; how much of what is reserved is empty, if not given.

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        If there is no step or no block, or more slots are used than a block has.
    """
    panels = dict(history) if isinstance(history, Mapping) else {"": history}
    need_some("memory_map(history)", panels, "history")
    if block_size < 1:
        raise ValueError(f"memory_map(block_size={block_size}): at least one slot")
    for name, steps in panels.items():
        need_some(f"memory_map(history {name})", steps, "step")
        need_some(f"memory_map(history {name})", steps[0], "block")
        need_at_most("memory_map(history)", len(steps) * len(steps[0]), 40_000, "block-steps")
    wasted = {name: _waste(steps, block_size) for name, steps in panels.items()}
    blocks = max(len(steps[0]) for steps in panels.values())
    sub = subtitle or "; ".join(
        f"{name.partition(':')[0] + ': ' if name else ''}"
        + ("nothing is reserved" if np.isnan(share) else f"{share:.0%} of the reserved slots hold no token")
        for name, share in wasted.items()
    )
    figure, all_axes = plot_page(title, sub, rows=len(panels), height=float(np.clip(0.16 * blocks, 1.1, 2.6)),
                                 gap=(0.5, 0.62), left=0.75, above=0.14 if any(panels) else 0.0)  # fmt: skip
    owners = list(dict.fromkeys(
        use.owner for steps in panels.values() for step in steps for use in step if use is not None
    ))  # fmt: skip
    for axes, (name, steps) in zip(all_axes, panels.items(), strict=True):
        _draw_blocks(axes, steps, block_size, owners)
        axes.set(xlabel="step", ylabel="block")
        if name:
            axes.set_title(shortened(drawable(name), 5, look.TEXT_SIZE, bold=True), loc="left",
                           fontsize=look.TEXT_SIZE, fontweight="bold", pad=4)  # fmt: skip
    steps_drawn = max(len(steps) for steps in panels.values())
    sub = sub.rstrip(".")
    figure.alt_text = (
        f"{title}: {blocks} blocks over {steps_drawn} steps, {plural(len(owners), 'owner')}. {sub}."
    )
    return figure


def _waste(steps: History, block_size: int) -> float:
    uses = [use for step in steps for use in step if use is not None]
    for use in uses:
        if not 0 <= use.used <= block_size:
            raise ValueError(f"{use.owner}: {use.used} slots used in a block of {block_size}")
    reserved = len(uses) * block_size
    return 1 - sum(use.used for use in uses) / reserved if reserved else float("nan")


def _draw_blocks(axes: Any, steps: History, block_size: int, owners: list[str]) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.ticker import MaxNLocator

    count = len(steps[0])
    used: list[Any] = []
    colours: list[str] = []
    empty: list[Any] = []
    runs: dict[tuple[int, str], list[int]] = {}
    for t, step in enumerate(steps):
        for b, use in enumerate(step):
            if use is None:
                continue
            split = b + 0.08 + 0.84 * use.used / block_size
            used.append([(t, b + 0.08), (t + 1, b + 0.08), (t + 1, split), (t, split)])
            empty.append([(t, split), (t + 1, split), (t + 1, b + 0.92), (t, b + 0.92)])
            colours.append(look.hue(owners.index(use.owner)).fill)
            runs.setdefault((b, use.owner), []).append(t)
    axes.add_collection(
        PolyCollection(empty, facecolor=look.WASTE, edgecolor="#B9B6B0", hatch=look.HATCH, linewidth=0)
    )
    axes.add_collection(PolyCollection(used, facecolor=colours, edgecolor=colours, linewidth=0.3))
    axes.set(xlim=(0, len(steps)), ylim=(count, 0))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    shown = range(0, count, -(-count // 8))
    axes.set_yticks([b + 0.5 for b in shown], [str(b) for b in shown])
    width, height = axes.figure.get_size_inches() * np.array(axes.get_position().bounds[2:])
    for (b, owner), at in runs.items():
        room = (_first_run(at) / len(steps)) * width - 0.04
        name = drawable(owner)
        if height / count > 0.11 and text_width(name, 7) <= room:
            fill = look.hue(owners.index(owner)).fill
            axes.text(at[0] + 0.05 / width * len(steps), b + 0.5, name, fontsize=7, va="center", zorder=4,
                      parse_math=False, bbox={"facecolor": fill, "edgecolor": "none", "pad": 0.8})  # fmt: skip


def _first_run(at: Sequence[int]) -> int:
    """Length of the unbroken run at the start of `at`."""
    length = 1
    while length < len(at) and at[length] == at[0] + length:
        length += 1
    return length


@dataclass(frozen=True)
class Lifetime:
    """A buffer: bytes, and the first and the last step in which it is needed."""

    name: str
    size: int
    first: int
    last: int


@in_one_look
def lifetimes(buffers: Sequence[Lifetime], offsets: Sequence[int], total: int | None = None) -> AltFigure:
    """Buffers over time, each in memory of its own, and packed into one arena.

    Parameters
    ----------
    buffers : sequence of Lifetime
        In the order in which they are made.
    offsets : sequence of int
        Where each begins in the arena, in bytes.
    total : int, optional
        Bytes of the arena; its highest used byte if not given.

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        If there is no buffer, or offsets do not fit them, or a lifetime is reversed.
    """
    need_some("lifetimes(buffers)", buffers, "buffer")
    need_at_most("lifetimes(buffers)", len(buffers), 60, "buffers")
    if len(offsets) != len(buffers):
        raise ValueError(f"lifetimes: {len(offsets)} offsets for {len(buffers)} buffers")
    for one in buffers:
        if one.first > one.last or one.size < 0:
            raise ValueError(
                f"lifetimes: {one.name!r} has {one.size} bytes in steps {one.first} to {one.last}"
            )
    alone = [int(v) for v in np.cumsum([0, *(one.size for one in buffers)])]
    packed = max(total or 0, *(o + one.size for o, one in zip(offsets, buffers, strict=True)))
    top = max(alone[-1], packed, 1)
    saved = 1 - packed / alone[-1] if alone[-1] else 0.0
    figure, axes = plot_page(
        "Lifetimes of the buffers, before and after packing",
        f"Apart {byte_count(alone[-1])}, packed {byte_count(packed)}: {saved:.0%} less.",
        columns=2, above=0.14, left=0.95, gap=(0.35, 0.5), height=3.1,
    )  # fmt: skip
    for one_axes, starts, name in (
        (axes[0], alone[:-1], "each by itself"),
        (axes[1], list(offsets), "packed"),
    ):
        _draw_lifetimes(one_axes, buffers, starts, top)
        one_axes.set_title(name, loc="left", fontsize=look.TEXT_SIZE, fontweight="bold", pad=4)
        one_axes.set(xlabel="step")
    for one_axes, end in zip(axes, (alone[-1], packed), strict=True):
        one_axes.axhline(end, color=look.INK, lw=1, ls="--")
    step = top / 4
    axes[0].set_yticks([k * step for k in range(5)], [byte_count(round(k * step)) for k in range(5)])
    axes[1].set_yticks([k * step for k in range(5)], [])
    figure.alt_text = (
        f"{plural(len(buffers), 'buffer')} as bars over time: in memory of their own they take "
        f"{byte_count(alone[-1])}, packed {byte_count(packed)}."
    )
    return figure


def _draw_lifetimes(axes: Any, buffers: Sequence[Lifetime], starts: Sequence[int], top: float) -> None:
    from matplotlib.ticker import MaxNLocator

    first, last = min(b.first for b in buffers), max(b.last for b in buffers)
    axes.set(xlim=(first, last + 1), ylim=(0, top * 1.04))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    width, height = axes.figure.get_size_inches() * np.array(axes.get_position().bounds[2:])
    across, up = width / (last + 1 - first), height / (top * 1.04)
    bars = []
    for k, (one, start) in enumerate(zip(buffers, starts, strict=True)):
        wide = one.last + 1 - one.first
        axes.add_patch(_bar(one.first, start, wide, one.size, look.hue(k)))
        left = (one.first - first) * across
        bars.append((left, left + wide * across, start * up, (start + one.size) * up))
    taken: list[_Place] = []
    for one, bar in zip(buffers, bars, strict=True):
        others = [other for other in bars if other is not bar]
        name, place = _name_place(drawable(one.name), bar, others, taken, width)
        if name:
            taken.append(place)
            x, y = first + (place[0] + place[1]) / 2 / across, (place[2] + place[3]) / 2 / up
            axes.text(x, y, name, fontsize=7.5, ha="center", va="center", parse_math=False)


_Place = tuple[float, float, float, float]  # left, right, bottom, top; in inches


def _name_place(
    name: str, bar: _Place, others: Sequence[_Place], taken: Sequence[_Place], width: float
) -> tuple[str, _Place]:
    """Where a bar's name stands: inside, else beside or above it where that is free, else shortened, or nowhere."""
    left, right, bottom, top = bar
    middle, centre = (bottom + top) / 2, (left + right) / 2
    whole, inside = text_width(name, 7.5), top - bottom > 0.14

    def at(text: str, x: float, y: float = middle) -> _Place:
        return (x, x + text_width(text, 7.5), y - 0.065, y + 0.065)

    def unwritten(place: _Place) -> bool:
        return not any(_overlap(place, one) for one in taken)

    def free(place: _Place) -> bool:
        letters = (
            place[0],
            place[1],
            place[2] + 0.02,
            place[3] - 0.02,
        )  # without what lies above and below them
        within = place[0] >= 0 and place[1] <= width
        return within and unwritten(place) and not any(_overlap(letters, one) for one in others)

    place = at(name, centre - whole / 2)
    if inside and whole <= right - left - 0.06 and unwritten(place):
        return name, place
    around = (
        at(name, right + 0.05),
        at(name, left - 0.05 - whole),
        at(name, centre - whole / 2, top + 0.075),
    )
    for place in around:
        if free(place):
            return name, place
    short = shortened(name, right - left - 0.06, 7.5)
    place = at(short, centre - text_width(short, 7.5) / 2)
    return (short if inside and len(short) >= min(3, len(name)) and unwritten(place) else ""), place


def _overlap(one: _Place, other: _Place) -> bool:
    return one[0] < other[1] and other[0] < one[1] and one[2] < other[3] and other[2] < one[3]


def _bar(x: float, y: float, wide: float, tall: float, hue: look.Hue) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), wide, tall, facecolor=hue.fill, edgecolor=hue.line, linewidth=0.8)
