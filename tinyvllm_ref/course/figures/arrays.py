"""Pictures of arrays and files: who handles which element, and where the bytes lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, Normalize

from .. import look
from .canvas import (
    AltFigure,
    Sheet,
    amount,
    byte_count,
    drawable,
    in_one_look,
    line_height,
    need_at_most,
    need_some,
    on_paper,
    plot_page,
    plural,
    shortened,
    span,
    spread,
    text_width,
)

SHADES = LinearSegmentedColormap.from_list("paper_to_blue", [look.PAPER, "#BBD9EC", "#3F94C6", "#00406B"])


@in_one_look
def blocks_over_array(n: int, block: int, grid: int, guarded: bool = True) -> AltFigure:
    """Blocks of threads laid over an array: which threads have an element, and which have none.

    Parameters
    ----------
    n : int
        Elements of the array.
    block, grid : int
        Threads of a block, and blocks. At most 512 threads are drawn.
    guarded : bool
        Whether the kernel has a guard that stops the threads without an element; else they are only named.

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        If a size is not positive (`n` may be 0), or there are too many threads to draw.
    """
    if n < 0 or block < 1 or grid < 1:
        raise ValueError(f"blocks_over_array(n={n}, block={block}, grid={grid}): n >= 0, block and grid >= 1")
    threads = block * grid
    need_at_most("blocks_over_array", max(threads, n), 512, "threads or elements")
    stopped, missed = max(0, threads - n), max(0, n - threads)
    sheet = Sheet()
    sheet.title(
        f"{plural(grid, 'block')} of {plural(block, 'thread')} over {plural(n, 'element')}",
        f"{plural(threads, 'thread')}: {threads - stopped:,} with an element"
        + (f", {stopped:,} {'stopped by the guard' if guarded else 'without one'}" if stopped else "")
        + (f"; {plural(missed, 'element')} nobody handles" if missed else ""),
    )
    columns = block * max(1, 32 // block) if block <= 32 else 32
    size = min(0.3, sheet.inner / min(columns, max(threads, n)))
    for first in range(0, max(threads, n), columns):
        top = sheet.y + (0.24 if first < threads and first % block == 0 else 0.04)
        for i in range(first, min(first + columns, max(threads, n))):
            _thread_cell(sheet, i, sheet.left + (i - first) * size, top, size, n, block, threads)
        sheet.y = top + size
    entries: list[tuple[str, dict[str, Any]]] = [
        (
            "one thread, one element; colours change with the block",
            {"fill": look.BLUE.fill, "edge": look.BLUE.line},
        )
    ]
    if stopped:
        says = "stopped by if (i < n)" if guarded else "a thread without an element"
        entries.append((says, {"fill": look.WASTE, "edge": look.RULE, "hatch": look.HATCH}))
    if missed:
        entries.append(("no thread", {"fill": look.PAPER, "edge": look.VERMILION.line, "dashed": True}))
    sheet.key(entries)
    without = f"the guard stops {stopped} threads" if guarded else f"{stopped} threads have no element"
    return sheet.finish(
        f"{grid} blocks of {block} threads over an array of {n} elements; {without}, "
        f"and {missed} elements have no thread."
    )


def _thread_cell(
    sheet: Sheet, i: int, x: float, y: float, size: float, n: int, block: int, threads: int
) -> None:
    hue = (look.BLUE, look.ORANGE)[i // block % 2]
    inset = size * 0.06
    if i >= threads:
        style: dict[str, Any] = {"fill": look.PAPER, "edge": look.VERMILION.line, "dashed": True}
    elif i >= n:
        style = {"fill": look.WASTE, "edge": look.RULE, "hatch": look.HATCH}
    else:
        style = {"fill": hue.fill, "edge": hue.line}
    sheet.box(x + inset, y + inset, size - 2 * inset, size - 2 * inset, **style)
    if size > 0.2 and i < n:
        sheet.text(x + size / 2, y + size / 2, str(i), size=7, ha="center", width=size - 0.03)
    label = f"block {i // block}"
    if (
        i < threads
        and i % block == 0
        and text_width(label, look.SMALL_SIZE) + 0.08 <= size * max(block, 4 // threads)
    ):
        sheet.text(x + inset, y - 0.09, label, size=look.SMALL_SIZE, color=hue.line, bold=False)


@dataclass(frozen=True)
class Segment:
    """A stretch of a strip: bytes [start, stop) with a name and a kind (the same kind, the same colour)."""

    name: str
    start: int
    stop: int
    kind: str = ""


@in_one_look
def byte_strip(
    segments: Sequence[Segment],
    *,
    title: str = "The file, to scale",
    zoom: tuple[int, int] | None = None,
    end: int | None = None,
) -> AltFigure:
    """A file as a strip of bytes, to scale; what nobody names is hatched.

    Parameters
    ----------
    segments : sequence of Segment
        The parts, in any order. A segment too thin to be seen is drawn one hair wide.
    title : str
        Heading.
    zoom : (int, int), optional
        A range of bytes [start, stop) that is drawn once more in a second, magnified strip.
    end : int, optional
        Bytes of the whole, where something follows the last segment.

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        If there is no segment, one is reversed or two overlap, `zoom` is no range inside the file, or a segment
        goes on behind `end`.
    """
    need_some("byte_strip(segments)", segments, "segment")
    parts = _in_order(segments)
    if end is None:
        end = parts[-1].stop
    elif end < parts[-1].stop:
        raise ValueError(f"byte_strip(end={end:,}): {parts[-1].name} goes on to byte {parts[-1].stop:,}")
    kinds = list(dict.fromkeys(part.kind for part in parts if part.kind))
    sheet = Sheet()
    sheet.title(title, f"{byte_count(end)} ({end:,} bytes) in {plural(len(parts), 'part')}")
    first = sheet.y
    _strip(sheet, parts, kinds, 0, max(end, 1))
    if zoom is not None:
        low, high = zoom
        if not 0 <= low < high <= end:
            raise ValueError(f"byte_strip(zoom={zoom}): give start < stop inside of the file's {end:,} bytes")
        scale = sheet.inner / max(end, 1)
        bottom = sheet.y + 0.25
        for x, to in ((sheet.left + low * scale, sheet.left), (sheet.left + high * scale, sheet.right)):
            sheet.line((x, x), (first, first + 0.34), color=look.INK)
            sheet.line((x, x, to), (sheet.y + 0.02, sheet.y + 0.08, bottom), color=look.MUTED, dashed=True)
        label = f"bytes {low:,} to {high:,}, magnified"
        on_paper(sheet.text(sheet.left + 0.45 * sheet.inner, bottom - 0.06, label, size=look.SMALL_SIZE,
                            ha="center", color=look.MUTED))  # fmt: skip
        sheet.y = bottom + 0.1
        _strip(sheet, parts, kinds, low, high)
    entries: list[tuple[str, dict[str, Any]]] = [
        (kind, {"fill": look.hue(k).fill, "edge": look.hue(k).line}) for k, kind in enumerate(kinds)
    ]
    holes = end - sum(part.stop - part.start for part in parts)
    if holes:
        entries.append((f"named by nobody: {holes:,} bytes", {"fill": look.WASTE, "hatch": look.HATCH}))
    if entries:
        sheet.key(entries)
    largest = max(parts, key=lambda part: part.stop - part.start)
    return sheet.finish(
        f"A strip of {end:,} bytes in {plural(len(parts), 'part')}; the largest is {largest.name} with "
        f"{largest.stop - largest.start:,} bytes; {holes:,} bytes belong to no part."
    )


def _in_order(segments: Sequence[Segment]) -> list[Segment]:
    parts = sorted(segments, key=lambda part: (part.start, part.stop))
    for part in parts:
        if not 0 <= part.start <= part.stop:
            raise ValueError(
                f"{part.name}: bytes [{part.start}, {part.stop}) are no range; 0 <= start <= stop"
            )
    for before, after in pairwise(parts):
        if after.start < before.stop:
            raise ValueError(f"{before.name} and {after.name} overlap at byte {after.start:,}")
    return parts


def _strip(sheet: Sheet, parts: Sequence[Segment], kinds: list[str], low: int, high: int) -> None:
    """Draw the bytes [low, high) over the width of the sheet, with names inside or under the strip."""
    scale, top, tall = sheet.inner / (high - low), sheet.y, 0.34
    sheet.box(sheet.left, top, sheet.inner, tall, fill=look.WASTE, hatch=look.HATCH)
    outside: list[tuple[float, str, float]] = []
    for part in parts:
        if part.stop < low or part.start > high or (part.start < part.stop == low) or part.start == high:
            continue
        x = sheet.left + (max(part.start, low) - low) * scale
        wide = (min(part.stop, high) - max(part.start, low)) * scale
        hue = look.hue(kinds.index(part.kind)) if part.kind else look.GREY
        thin = wide < 0.03
        sheet.box(min(x, sheet.right - 0.02), top, max(wide, 0.02), tall, fill=hue.line if thin else hue.fill,
                  edge=hue.line if not thin else "none", above=2)  # fmt: skip
        name = shortened(drawable(part.name), wide - 0.1, look.SMALL_SIZE)
        if len(name) >= min(len(drawable(part.name)), 9):
            sheet.text(x + wide / 2, top + tall / 2, name, size=look.SMALL_SIZE, ha="center").set_zorder(3)  # type: ignore[union-attr]
        else:
            outside.append((x + wide / 2, drawable(part.name), wide))
    sheet.y = top + tall
    _names_below(sheet, outside)
    for x, byte, ha in ((sheet.left, low, "left"), (sheet.right, high, "right")):
        sheet.text(x, sheet.y + 0.1, f"byte {byte:,}", size=look.SMALL_SIZE, ha=ha, color=look.MUTED)
    sheet.y += 0.2


def _names_below(sheet: Sheet, names: Sequence[tuple[float, str, float]]) -> None:
    """Name places under the strip, with leader lines: of (x, name, extent) the largest that fit into one row."""
    size, gap, room = look.SMALL_SIZE, 0.14, sheet.inner
    row: list[tuple[float, str]] = []
    for x, name, _ in sorted(names, key=lambda entry: -entry[2]):
        text = shortened(name, 1.5, size)
        need = text_width(text, size) + gap
        if need <= room:
            room -= need
            row.append((x, text))
    if row:
        middles = spread(
            [x for x, _ in row], [text_width(text, size) for _, text in row], sheet.left, sheet.right, gap
        )
        top, y = sheet.y, sheet.y + 0.27
        for (x, text), middle in zip(row, middles, strict=True):
            sheet.line(
                (x, x, middle, middle), (top, top + 0.04, y - 0.12, y - 0.07), color=look.RULE, above=0.5
            )
            sheet.text(middle, y, text, size=size, ha="center")
        sheet.y = y + line_height(size) / 2
    left = len(names) - len(row)
    if left:
        middle = (sheet.left + sheet.right) / 2
        text = f"{plural(left, 'more part')} too thin to name"
        sheet.text(middle, sheet.y + 0.1, text, size=size, color=look.MUTED, ha="center")


@in_one_look
def row_column_major(shape: tuple[int, int]) -> AltFigure:
    """The same numbers in memory, read as row-major (rows, columns) and as column-major (columns, rows).

    Parameters
    ----------
    shape : (int, int)
        Rows and columns of the row-major matrix; each from 1 to 8.

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        If a side is not from 1 to 8.
    """
    rows, columns = shape
    if not (1 <= rows <= 8 and 1 <= columns <= 8):
        raise ValueError(f"row_column_major(shape={shape}): each side from 1 to 8; larger is not readable")
    sheet = Sheet()
    sheet.title(
        "The same bytes, read two ways",
        f"No number moves: row-major ({rows}, {columns}) and column-major ({columns}, {rows}) are transposes.",
    )
    size = 0.3
    count = rows * columns
    step = min(size, sheet.inner / count)
    sheet.text(sheet.left, sheet.y + 0.08, "memory", color=look.MUTED, size=look.SMALL_SIZE)
    for i in range(count):
        _numbered(sheet, i, sheet.left + i * step, sheet.y + 0.2, step, size, columns, _fits(count - 1, step))
    sheet.y += 0.2 + size + 0.1
    if not _fits(count - 1, step):
        for i in range(0, count, columns):
            sheet.text(
                sheet.left + (i + 0.5) * step, sheet.y, str(i), size=7.5, ha="center", color=look.MUTED
            )
        sheet.y += 0.12
    sheet.y += 0.14
    top, middle = sheet.y, sheet.left + sheet.inner / 2
    for x, title, detail in (
        (sheet.left, f"row-major ({rows}, {columns})", f"element (r, c) at r * {columns} + c"),
        (middle, f"column-major ({columns}, {rows}), ld = {columns}", f"element (r, c) at r + c * {columns}"),
    ):
        sheet.text(x, top, title, bold=True)
        sheet.text(x, top + 0.18, detail, size=look.SMALL_SIZE, color=look.MUTED)
    top += 0.34
    for i in range(count):
        r, c = divmod(i, columns)
        _numbered(sheet, i, sheet.left + c * size, top + r * size, size, size, columns)
        _numbered(sheet, i, middle + r * size, top + c * size, size, size, columns)
    sheet.y = top + size * max(rows, columns)
    return sheet.finish(
        f"{count} numbers in memory, drawn as a row-major matrix of {rows} rows and {columns} columns, and the "
        f"same numbers as a column-major matrix of {columns} rows and {rows} columns, which is its transpose."
    )


def _fits(number: int, width: float) -> bool:
    return text_width(str(number), look.SMALL_SIZE) <= width - 0.02


def _numbered(
    sheet: Sheet, i: int, x: float, y: float, wide: float, tall: float, columns: int, number: bool = True
) -> None:
    hue = look.hue(i // columns)
    sheet.box(x + 0.01, y + 0.01, wide - 0.02, tall - 0.02, fill=hue.fill, edge=hue.line)
    if number:
        sheet.text(x + wide / 2, y + tall / 2, str(i), size=look.SMALL_SIZE, ha="center")


@in_one_look
def grid(
    values: Any, *, title: str, subtitle: str = "", rows: Sequence[str] = (), columns: Sequence[str] = (),
    row_label: str = "", column_label: str = "", value_label: str = "",
) -> AltFigure:  # fmt: skip
    """A matrix of numbers as shades; the numbers are written in where they fit.

    Parameters
    ----------
    values : array_like
        Shape (rows, columns), at most 256 a side. NaN is hatched.
    title, subtitle : str
        Heading.
    rows, columns : sequence of str, optional
        Names; as many as there are rows and columns, or none for their numbers.
    row_label, column_label, value_label : str
        What the axes and the shades mean.

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        If `values` is empty or no matrix, or the names do not fit its shape.
    """
    matrix = np.asarray(values, np.float64)
    if matrix.ndim != 2 or matrix.size == 0:
        raise ValueError(
            f"grid(values): a matrix with at least one number is needed, not shape {matrix.shape}"
        )
    need_at_most("grid(values)", max(matrix.shape), 256, "rows or columns")
    for what, names, count in (("rows", rows, matrix.shape[0]), ("columns", columns, matrix.shape[1])):
        if len(names) not in (0, count):
            raise ValueError(f"grid({what}): {len(names)} names for {count} {what}")
    row_names = [shortened(drawable(name), 1.3, look.SMALL_SIZE) for name in rows]
    left = 0.45 + max([0.3, *(text_width(name, look.SMALL_SIZE) for name in row_names)])
    cell = min(0.5, (look.FIGURE_WIDTH - left - 1.3) / matrix.shape[1], 5.0 / matrix.shape[0])
    tall, wide = max(0.4, cell * matrix.shape[0]), max(0.4, cell * matrix.shape[1])
    figure, (axes,) = plot_page(
        title, subtitle, height=tall, above=0.2 if value_label else 0.0, left=left,
        right=look.FIGURE_WIDTH - left - wide,
        bottom=0.5 + column_room(columns, wide / matrix.shape[1]),
    )  # fmt: skip
    shade(axes, matrix, value_range(matrix), numbers=cell)
    name_axis(axes, "x", columns, matrix.shape[1], wide, column_label)
    name_axis(axes, "y", row_names, matrix.shape[0], tall, row_label)
    scale_bar(figure, axes, value_range(matrix), value_label)
    finite = matrix[np.isfinite(matrix)]
    found = "with no finite value"
    if finite.size:
        values = span(finite.min(), finite.max(), 4)
        found = f"from {values}" if " to " in values else f"all {values}"
    figure.alt_text = (
        f"{title}: a grid of {matrix.shape[0]} by {matrix.shape[1]} {value_label or 'values'}, {found}."
    )
    return figure


def value_range(matrix: Any) -> Normalize:
    """Shades from the smallest to the largest finite value; from 0 if none is negative."""
    finite = matrix[np.isfinite(matrix)]
    if not finite.size:
        return Normalize(0, 1)
    low, high = min(0.0, float(finite.min())), float(finite.max())
    return Normalize(low, high if high > low else low + 1)


def shade(axes: Any, matrix: Any, norm: Normalize, numbers: float = 0.0, form: str = ".2g") -> None:
    """Draw a matrix as shades, NaN hatched, with numbers in cells of `numbers` inches if they fit."""
    axes.set_facecolor(look.WASTE)
    axes.patch.set_hatch(look.HATCH)
    axes.patch.set_edgecolor("#B9B6B0")
    axes.patch.set_linewidth(0)
    axes.imshow(np.ma.masked_invalid(matrix), cmap=SHADES, norm=norm, aspect="auto", interpolation="nearest")
    for side in ("left", "bottom", "top", "right"):
        axes.spines[side].set(visible=True, color=look.RULE)
    axes.tick_params(length=0)
    texts = (
        {(r, c): f"{matrix[r, c] + 0.0:{form}}" for r, c in np.argwhere(np.isfinite(matrix))}
        if matrix.size <= 400
        else {}
    )
    if texts and max(text_width(text, 7) for text in texts.values()) < numbers - 0.04 and numbers > 0.17:
        for (r, c), text in texts.items():
            dark = norm(matrix[r, c]) > 0.55
            axes.text(
                c, r, text, ha="center", va="center", fontsize=7, color=look.PAPER if dark else look.INK
            )


def column_room(names: Sequence[str], cell: float) -> float:
    """Height that names under columns of `cell` inches need: upright names if they do not fit across."""
    widths = [text_width(shortened(drawable(name), 1.2, look.SMALL_SIZE), look.SMALL_SIZE) for name in names]
    return 0.0 if not widths or max(widths) + 0.06 <= cell else max(widths)


def name_axis(axes: Any, which: str, names: Sequence[str], count: int, length: float, label: str) -> None:
    """Name the rows or columns of a shaded matrix, as many as fit into `length` inches."""
    upright = which == "x" and column_room(names, length / count) > 0
    texts = [shortened(drawable(name), 1.3 if which == "y" else 1.2, look.SMALL_SIZE) for name in names]
    if not texts:
        texts = [str(k) for k in range(count)]
    across = (
        line_height(look.SMALL_SIZE)
        if which == "y" or upright
        else max(text_width(t, look.SMALL_SIZE) for t in texts) + 0.06
    )
    every = max(1, int(np.ceil(across / (length / count))))
    ticks = list(range(0, count, every))
    setter = axes.set_xticks if which == "x" else axes.set_yticks
    setter(ticks, [texts[k] for k in ticks], rotation=90 if upright else 0, parse_math=False)
    room = length + 0.1 if which == "y" else look.FIGURE_WIDTH - 2.5
    text = shortened(drawable(label), room, look.TEXT_SIZE)
    (axes.set_xlabel if which == "x" else axes.set_ylabel)(text)


def scale_bar(figure: AltFigure, axes: Any, norm: Normalize, label: str) -> None:
    """A narrow bar of the shades right of `axes`, with its two ends and its meaning."""
    width, height = figure.get_size_inches()
    place = axes.get_position()
    tall = min(place.height, 1.6 / height)
    bar = figure.add_axes((place.x1 + 0.15 / width, place.y1 - tall, 0.12 / width, tall))
    bar.imshow(np.linspace(1, 0, 64)[:, None], cmap=SHADES, norm=Normalize(0, 1), aspect="auto")
    bar.set(xticks=[])
    bar.yaxis.tick_right()
    bar.set_yticks([0, 63], [amount(float(norm.vmax or 0)), amount(float(norm.vmin or 0))])
    bar.tick_params(length=0)
    for side in ("left", "bottom", "top", "right"):
        bar.spines[side].set(visible=True, color=look.RULE)
    room = width - (place.x1 * width + 0.15) - 0.1
    text = shortened(drawable(label), max(0.5, min(room, 2.5)), look.SMALL_SIZE)
    figure.text(place.x1 + 0.15 / width, place.y1 + 0.19 / height, text, fontsize=look.SMALL_SIZE,
                color=look.MUTED, ha="left", va="center", parse_math=False)  # fmt: skip
