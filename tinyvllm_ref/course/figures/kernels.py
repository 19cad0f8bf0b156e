"""Pictures of what a kernel did: the tree of a reduction, measured against possible, the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import look
from .canvas import (
    AltFigure,
    Sheet,
    drawable,
    in_one_look,
    line_height,
    need_at_most,
    need_some,
    plot_page,
    plural,
    shortened,
    spread,
    text_width,
    with_unit,
)


@dataclass(frozen=True)
class Combine:
    """One thread's read-modify-write of a round: it read `reads` and wrote `target`."""

    thread: int
    reads: tuple[int, ...]
    target: int


def reduction_steps(rows: Any, array: str, block: int = 0) -> list[list[Combine]]:
    """Split the trace of a shared array into the rounds of a reduction.

    A trace has no marks for barriers. A round ends where a thread combines for the second time, or reads a cell
    that another thread has written in this round: without a race, both need a barrier in between.

    Parameters
    ----------
    rows : numpy.ndarray
        Rows of a trace (``emulation.trace()``): array, index, bytes, kind, line, block, thread, in the order in
        which they ran.
    array : str
        Name of the shared array.
    block : int
        Which block of threads.

    Returns
    -------
    list of list of Combine
        Round by round. Plain stores (the filling) and reads of one cell by all (the result) are no rounds.

    Raises
    ------
    ValueError
        If the trace has no access to `array` by that block.
    """
    of_array = rows[(rows["array"] == array) & (rows["block"] == block)]
    if len(of_array) == 0:
        names = ", ".join(sorted(set(rows["array"].tolist()))) or "nothing"
        raise ValueError(f"the trace has no access to {array!r} in block {block}; it has {names}")
    rounds: list[list[Combine]] = [[]]
    pending: dict[int, list[int]] = {}
    written: dict[int, int] = {}
    for row in of_array:
        thread, index = int(row["thread"]), int(row["index"])
        if row["kind"] == "read":
            if written.get(index, thread) != thread:
                rounds.append([])
                written = {}
            pending.setdefault(thread, []).append(index)
            continue
        reads = tuple(dict.fromkeys(pending.pop(thread, [])))
        if not reads or reads == (index,):
            continue
        if any(done.thread == thread for done in rounds[-1]):
            rounds.append([])
            written = {}
        rounds[-1].append(Combine(thread, reads, index))
        written[index] = thread
    return [one for one in rounds if one and not _is_broadcast(one)]


def _is_broadcast(one: Sequence[Combine]) -> bool:
    """All threads read the same single cell, the result, before they stored something new."""
    return len(one) > 1 and len({step.reads for step in one}) == 1 and len(one[0].reads) == 1


@in_one_look
def reduction_tree(
    steps: Sequence[Sequence[Combine]], *, title: str = "Who reads what, round by round"
) -> AltFigure:
    """The tree of a reduction in a shared array, drawn from what the threads did.

    Parameters
    ----------
    steps : sequence of sequence of Combine
        From ``reduction_steps``. Cells up to 63 are drawn.
    title : str
        Heading.

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        If there is no round, or a cell beyond 63.
    """
    need_some("reduction_tree(steps)", steps, "round")
    cells = 1 + max(max(*step.reads, step.target) for one in steps for step in one)
    need_at_most("reduction_tree(steps)", cells, 64, "cells")
    need_at_most("reduction_tree(steps)", len(steps), 40, "rounds")
    sheet = Sheet()
    adds = sum(len(one) for one in steps)
    sheet.title(
        title,
        f"{plural(len(steps), 'round')}, {plural(adds, 'combination')} of {plural(cells, 'cell')}. Thick: the cell "
        "that is written. Thin: a cell read.",
    )
    x0 = sheet.left + 0.85
    size = min(0.42, (sheet.right - x0) / cells)
    threads = {step.thread for one in steps for step in one}
    letter = "t" if text_width(f"t{max(threads)}", 7.5) <= size - 0.02 else ""
    _cell_row(sheet, x0, size, cells, {k: "" for k in range(cells)}, "start", "")
    live = set(range(cells))
    for number, one in enumerate(steps, 1):
        top = sheet.y
        sheet.y += 0.42
        for step in one:
            for read in step.reads:
                own = read == step.target
                sheet.line((x0 + (read + 0.5) * size, x0 + (step.target + 0.5) * size), (top, sheet.y - 0.05),
                           color=look.BLUE.line if own else look.VERMILION.line, width=1.8 if own else 0.9)  # fmt: skip
            x = x0 + (step.target + 0.5) * size
            sheet.arrow((x, sheet.y - 0.13), (x, sheet.y + 0.01), color=look.BLUE.line)
        live -= {read for step in one for read in step.reads}
        live |= {step.target for step in one}
        marks = {step.target: f"{letter}{step.thread}" for step in one}
        _cell_row(sheet, x0, size, cells, marks, f"round {number}", plural(len(one), "thread"), live)
    sheet.key(
        [
            (
                f"written in this round ({letter}3: by thread 3)",
                {"fill": look.BLUE.fill, "edge": look.BLUE.line},
            ),
            ("holds a part of the sum", {"fill": look.PAPER, "edge": look.MUTED}),
            ("used up", {"fill": look.WASTE, "hatch": look.HATCH}),
        ]
    )
    counts = ", ".join(str(len(one)) for one in steps)
    return sheet.finish(
        f"A reduction over {cells} cells in {plural(len(steps), 'round')}; the rounds combine {counts} pairs; the "
        f"last is written to cell {steps[-1][-1].target}."
    )


def _cell_row(
    sheet: Sheet, x0: float, size: float, cells: int, marks: dict[int, str], label: str, detail: str,
    live: set[int] | None = None,
) -> None:  # fmt: skip
    every = 1 if text_width(str(cells - 1), 7.5) <= size - 0.02 else 4
    if every > 1 and live is None:
        sheet.y += 0.16
    top, tall = sheet.y, 0.26
    sheet.text(sheet.left, top + (0.06 if detail else tall / 2), label, size=look.SMALL_SIZE, bold=True)
    if detail:
        sheet.text(sheet.left, top + 0.21, detail, size=look.SMALL_SIZE, color=look.MUTED)
    for k in range(cells):
        style: dict[str, Any] = {"fill": look.WASTE, "hatch": look.HATCH}
        if live is None or k in live:
            style = {"fill": look.PAPER, "edge": look.MUTED}
        if live is not None and k in marks:
            style = {"fill": look.BLUE.fill, "edge": look.BLUE.line}
        sheet.box(x0 + k * size + size * 0.05, top, size * 0.9, tall, **style)
        text = str(k) if live is None else marks.get(k, "")
        if every == 1:
            sheet.text(x0 + (k + 0.5) * size, top + tall / 2, text, size=7.5, ha="center")
        elif live is None and k % every == 0:
            sheet.text(x0 + (k + 0.5) * size, top - 0.09, text, size=7.5, ha="center", color=look.MUTED)
    sheet.y = top + tall


@dataclass(frozen=True)
class Measured:
    """A quantity of a run: what was measured, the fewest possible, and what the learner expected.

    Attributes
    ----------
    name : str
        The quantity, for example "bytes read".
    measured : float
        NaN where this machine can not measure it.
    fewest : float, optional
        The least that any kernel could do.
    predicted : float, optional
        What was written down before.
    unit : str
        Written after the numbers.
    """

    name: str
    measured: float
    fewest: float | None = None
    predicted: float | None = None
    unit: str = ""


@in_one_look
def measured_bars(rows: Sequence[Measured], *, title: str = "Measured, and the fewest possible") -> AltFigure:
    """A table of quantities with bars: measured, fewest possible, and predicted.

    Parameters
    ----------
    rows : sequence of Measured
        Each row has its own scale, so that bytes and counts can stand together.
    title : str
        Heading.

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        If there is no row or a value is negative.
    """
    need_some("measured_bars(rows)", rows, "row")
    need_at_most("measured_bars(rows)", len(rows), 24, "rows")
    sheet = Sheet()
    sheet.title(title, "Each quantity has its own scale.")
    names = [shortened(drawable(row.name), 1.9, look.TEXT_SIZE, bold=True) for row in rows]
    x0 = sheet.left + max(text_width(name, look.TEXT_SIZE, bold=True) for name in names) + 1.0
    says = []
    for name, row in zip(names, rows, strict=True):
        bars = [("measured", row.measured, look.BLUE, False)]
        if row.fewest is not None:
            bars.append(("fewest", row.fewest, look.GREEN, False))
        if row.predicted is not None:
            bars.append(("predicted", row.predicted, look.ORANGE, True))
        if any(value < 0 for _, value, _, _ in bars):
            raise ValueError(
                f"measured_bars: {row.name!r} has a negative value; counts and sizes are 0 or more"
            )
        top = max([1e-300, *(value for _, value, _, _ in bars if np.isfinite(value))])
        sheet.text(sheet.left, sheet.y + 0.1, name, bold=True)
        texts = [_with_unit(value, row.unit) for _, value, _, _ in bars]
        room = sheet.right - x0 - max(min(2.0, text_width(text, look.TEXT_SIZE)) for text in texts) - 0.15
        for (what, value, hue, dashed), text in zip(bars, texts, strict=True):
            sheet.text(x0 - 0.1, sheet.y + 0.1, what, size=look.SMALL_SIZE, ha="right", color=look.MUTED)
            wide = room * value / top if np.isfinite(value) else 0.0
            sheet.box(x0, sheet.y + 0.02, max(wide, 0.02), 0.16, fill=hue.fill, edge=hue.line, dashed=dashed)
            sheet.text(x0 + max(wide, 0.02) + 0.08, sheet.y + 0.1, text, width=2.0)
            sheet.y += 0.22
        sheet.y += 0.13
        says.append(
            f"{row.name}: " + ", ".join(f"{bar[0]} {text}" for bar, text in zip(bars, texts, strict=True))
        )
    sheet.y -= 0.1
    return sheet.finish(f"{title}. {'; '.join(says)}.")


def _with_unit(value: float, unit: str) -> str:
    if np.isnan(value):
        return "not measured here"
    return with_unit(value, unit)


@dataclass(frozen=True)
class Point:
    """A kernel on a roofline: operations a byte, and operations a second (None: on the roof, where it could be)."""

    name: str
    intensity: float
    flops: float | None = None


@in_one_look
def roofline(points: Sequence[Point], bandwidth: float, flops: float, *, device: str = "") -> AltFigure:
    """The most operations a second that memory and arithmetic allow, and where kernels stand under it.

    Parameters
    ----------
    points : sequence of Point
        Kernels; those without a speed are drawn on the roof, hollow.
    bandwidth : float
        Bytes a second.
    flops : float
        Operations a second.
    device : str
        Whose numbers these are, and where they come from.

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        If there is no point, or a number is not positive.
    """
    need_some("roofline(points)", points, "point")
    need_at_most("roofline(points)", len(points), 10, "points")
    for name, value in (("bandwidth", bandwidth), ("flops", flops), *((p.name, p.intensity) for p in points)):
        if not 0 < value < np.inf:
            raise ValueError(f"roofline: {name} is {value}; a positive number is needed")
    ridge = flops / bandwidth
    places = [
        (p.intensity, min(p.intensity * bandwidth, flops) if p.flops is None else p.flops) for p in points
    ]
    if any(not 0 < y < np.inf for _, y in places):
        raise ValueError("roofline: a point's flops must be positive, or None")
    low = min(ridge, *(x for x, _ in places)) / 4
    high = max(ridge, *(x for x, _ in places)) * 4
    names = [shortened(drawable(p.name), 2.0, look.TEXT_SIZE) for p in points]
    room = max(text_width(name, look.TEXT_SIZE) for name in names)
    limits = f"{with_unit(bandwidth, 'B/s')} and {with_unit(flops, 'FLOP/s')}"
    sub = f"{limits} meet at {ridge:.3g} operations a byte. {device}".strip()
    figure, (axes,) = plot_page(
        "Roofline: memory or arithmetic, whichever is less", sub, left=0.85, right=room + 0.5
    )
    x = np.geomspace(low, high, 200)
    axes.loglog(x, np.minimum(x * bandwidth, flops), color=look.INK, lw=1.6)
    axes.axvline(ridge, color=look.RULE, lw=1, ls="--", zorder=0)
    axes.fill_between(x, np.minimum(x * bandwidth, flops), 1e-300, color=look.GREY.fill, alpha=0.45, lw=0)
    axes.set(xlim=(low, high), xlabel="operations a byte of memory traffic", ylabel="operations a second")
    axes.set_ylim(min(low * bandwidth, *(y for _, y in places)) / 2, flops * 2.5)
    from .numbers import _calm_ticks

    _calm_ticks(axes)
    _point_labels(figure, axes, points, places, names)
    where = "; ".join(
        f"{p.name} at {p.intensity:.3g} operations a byte is limited by "
        f"{'memory' if p.intensity < ridge else 'arithmetic'}"
        for p in points
    )
    figure.alt_text = f"Roofline with its ridge at {ridge:.3g} operations a byte: {where}."
    return figure


def _point_labels(
    figure: AltFigure,
    axes: Any,
    points: Sequence[Point],
    places: Sequence[tuple[float, float]],
    names: Sequence[str],
) -> None:
    """Names in a column right of the axes, each tied to its point by a hair line."""
    width, height = figure.get_size_inches()
    box = axes.get_position()
    spots = [axes.transData.transform(place) / figure.dpi for place in places]
    low, high = box.y0 * height, box.y1 * height
    middles = spread(
        [float(s[1]) for s in spots], [line_height(look.TEXT_SIZE)] * len(spots), low, high, 0.02
    )
    shapes = "osD^vP*Xhp"
    for k, (point, place, name, y) in enumerate(zip(points, places, names, middles, strict=True)):
        hue = look.hue(k)
        axes.plot(*place, marker=shapes[k], ms=7, color=hue.line, ls="none", zorder=3,
                  markerfacecolor=look.PAPER if point.flops is None else hue.line)  # fmt: skip
        figure.text(
            box.x1 + 0.28 / width, y / height, name, color=hue.line, ha="left", va="center", parse_math=False
        )
        thread = {"arrowstyle": "-", "color": hue.line, "lw": 0.6, "shrinkA": 0, "shrinkB": 4}
        axes.annotate("", place, xycoords="data", xytext=(box.x1 + 0.24 / width, y / height),
                      textcoords="figure fraction", annotation_clip=False, arrowprops=thread)  # fmt: skip
