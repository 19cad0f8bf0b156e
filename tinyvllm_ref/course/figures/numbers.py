"""Pictures of number formats, and of any quantity over another."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
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
    shortened,
    spread,
    text_width,
)

# Exponent and fraction bits; one more bit is the sign.
FORMATS: dict[str, tuple[int, int]] = {"float32": (8, 23), "float16": (5, 10), "bfloat16": (8, 7)}


def format_bits(name: str, value: float) -> int:
    """The bits of `value` in a format of ``FORMATS``, rounded to nearest even; NaN keeps a set fraction bit."""
    if name not in FORMATS:
        raise ValueError(f"unknown number format {name!r}; known: {', '.join(FORMATS)}")
    if name == "float16":
        with np.errstate(over="ignore"):
            return int(np.float16(value).view(np.uint16))
    with np.errstate(over="ignore"):
        bits = int(np.float32(value).view(np.uint32))
    if name == "float32":
        return bits
    if value != value:
        return (bits >> 16) | 0x40
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def bits_value(name: str, bits: int) -> float:
    """The number that `bits` stand for in a format of ``FORMATS``."""
    if name == "float16":
        return float(np.uint16(bits).view(np.float16))
    wide = bits << 16 if name == "bfloat16" else bits
    return float(struct.unpack("<f", struct.pack("<I", wide))[0])


@in_one_look
def bit_layout(
    formats: Sequence[str] = ("float32", "float16", "bfloat16"), value: float | None = None
) -> AltFigure:
    """Sign, exponent and fraction of number formats, one cell a bit.

    Parameters
    ----------
    formats : sequence of str
        Of ``float32``, ``float16``, ``bfloat16``.
    value : float, optional
        If given, the cells hold its bits, and what each format makes of it is written beside them.

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        If there is no format or an unknown one.
    """
    need_some("bit_layout(formats)", formats, "format")
    for name in formats:
        format_bits(name, 0.0)
    sheet = Sheet()
    sheet.title("Where the bits go" if value is None else f"The bits of {value!r}", "Left: the highest bit.")
    says = []
    for name in formats:
        exponent, fraction = FORMATS[name]
        text = f"{1 + exponent + fraction} bits: 1 sign, {exponent} exponent, {fraction} fraction"
        if value is not None:
            bits = format_bits(name, value)
            text += f"   0x{bits:0{(1 + exponent + fraction) // 4}X} = {bits_value(name, bits)!r}"
            says.append(f"{name} makes it {bits_value(name, bits)!r}")
        else:
            says.append(f"{name} has {exponent} exponent and {fraction} fraction bits")
        sheet.text(sheet.left, sheet.y + 0.08, name, bold=True)
        sheet.text(sheet.left + 0.85, sheet.y + 0.08, text, color=look.MUTED, size=look.SMALL_SIZE)
        _bit_row(sheet, name, None if value is None else format_bits(name, value))
    sheet.key([(text, {"fill": hue.fill, "edge": hue.line}) for text, hue in _FIELDS])
    return sheet.finish(f"Bit layout{'' if value is None else f' of {value!r}'}: {'; '.join(says)}.")


_FIELDS = (("s: sign", look.VERMILION), ("e: exponent", look.BLUE), ("f: fraction", look.GREEN))


def _bit_row(sheet: Sheet, name: str, bits: int | None) -> None:
    exponent, fraction = FORMATS[name]
    count = 1 + exponent + fraction
    size, top = sheet.inner / 32, sheet.y + 0.2
    for k in range(count):
        field = 0 if k == 0 else 1 if k <= exponent else 2
        hue, x = _FIELDS[field][1], sheet.left + k * size
        sheet.box(x + 0.008, top, size - 0.016, 0.28, fill=hue.fill, edge=hue.line)
        cell = "sef"[field] if bits is None else str(bits >> (count - 1 - k) & 1)
        sheet.text(
            x + size / 2,
            top + 0.145,
            cell,
            ha="center",
            mono=True,
            color=look.MUTED if bits is None else look.INK,
        )
    sheet.y = top + 0.28 + 0.2


def spacing(name: str, x: Any) -> np.ndarray[Any, Any]:
    """Distance from each of `x` to the next number of the format (float64); infinity beyond its range."""
    if name not in FORMATS:
        raise ValueError(f"unknown number format {name!r}; known: {', '.join(FORMATS)}")
    exponent_bits, fraction = FORMATS[name]
    bias = 2 ** (exponent_bits - 1) - 1
    exponent = np.frexp(np.abs(np.asarray(x, np.float64)))[1] - 1
    return np.where(exponent > bias, np.inf, np.exp2(np.maximum(exponent, 1 - bias) - float(fraction)))


@in_one_look
def number_spacing(
    formats: Sequence[str] = ("float32", "float16", "bfloat16"), low: float = 1e-6, high: float = 1e6
) -> AltFigure:
    """How far apart the numbers of each format lie, from `low` to `high`.

    Parameters
    ----------
    formats : sequence of str
        Of ``float32``, ``float16``, ``bfloat16``.
    low, high : float
        Range of magnitudes, 0 < low < high.

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        If there is no format, an unknown one, or the range is empty.
    """
    need_some("number_spacing(formats)", formats, "format")
    if not 0 < low < high < np.inf:
        raise ValueError(f"number_spacing(low={low}, high={high}): 0 < low < high is needed")
    x = np.geomspace(low, high, 600)
    lines = {name: spacing(name, x) for name in formats}
    figure = error_lines(
        x, lines, "magnitude of the number", "distance to the next number", log_x=True, log_y=True,
        title="How far apart neighbouring numbers lie",
        subtitle="Each step doubles. A line ends where the format does.",
    )  # fmt: skip
    at_one = ", ".join(f"{name} {spacing(name, 1.0).item():.3g}" for name in formats)
    figure.alt_text = f"Distance to the next number against magnitude, {low:g} to {high:g}. Near 1: {at_one}."
    return figure


_STYLES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (9, 2)))


@in_one_look
def error_lines(
    x: Any, lines: Mapping[str, Any], xlabel: str, ylabel: str, *, title: str = "", subtitle: str = "",
    log_x: bool = False, log_y: bool = False, marks: Mapping[str, float] | None = None,
) -> AltFigure:  # fmt: skip
    """Lines over a common x, each labelled at its end; dashes differ as well as colours.

    Parameters
    ----------
    x : array_like
        Shape (points,).
    lines : mapping of str to array_like
        Label -> y, shape (points,); at most eight. Values that are not finite leave a gap.
    xlabel, ylabel : str
        What the axes mean, with units.
    title, subtitle : str
        Heading.
    log_x, log_y : bool
        Logarithmic axes; what is not positive is then left out.
    marks : mapping of str to float, optional
        Label -> x of a vertical line, for what happens at a certain x.

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        If there is nothing to draw, or a line's length is not that of `x`.
    """
    points = np.asarray(x, np.float64).reshape(-1)
    need_some("error_lines(x)", points, "point")
    need_some("error_lines(lines)", lines, "line")
    need_at_most("error_lines(lines)", len(lines), 8, "lines")
    need_at_most("error_lines(marks)", len(marks or {}), 5, "marks")
    series = {str(name): np.asarray(y, np.float64).reshape(-1) for name, y in lines.items()}
    for name, y in series.items():
        if y.shape != points.shape:
            raise ValueError(f"error_lines: {name!r} has {y.size} values for {points.size} points of x")
    heading = title or f"{ylabel} over {xlabel}"
    room = max(text_width(shortened(drawable(name), 1.9, look.TEXT_SIZE), look.TEXT_SIZE) for name in series)
    figure, (axes,) = plot_page(
        heading, subtitle, left=0.85, right=room + 0.35, above=0.19 * len(marks or {})
    )
    axes.set_xscale("log" if log_x else "linear")
    axes.set_yscale("log" if log_y else "linear")
    axes.set_xlabel(shortened(drawable(xlabel), 5.0, look.TEXT_SIZE), parse_math=False)
    axes.set_ylabel(shortened(drawable(ylabel), 2.8, look.TEXT_SIZE), parse_math=False)
    axes.grid(color=look.GREY.fill, linewidth=0.7)
    axes.set_axisbelow(True)
    for k, (_name, y) in enumerate(series.items()):
        shown = np.isfinite(y) & ((y > 0) | (not log_y)) & ((points > 0) | (not log_x))
        axes.plot(points[shown], y[shown], color=look.hue(k).line, ls=_STYLES[k % len(_STYLES)],
                  marker="o" if shown.sum() <= 20 else None, markersize=4)  # fmt: skip
    _calm_ticks(axes)
    axes.autoscale_view()  # else the ends are placed on limits of before
    _end_labels(figure, axes, list(series))
    _mark_labels(axes, marks or {})
    figure.alt_text = f"{heading}: {'; '.join(_in_words(name, points, y) for name, y in series.items())}."
    return figure


def _in_words(name: str, x: Any, y: Any) -> str:
    good = np.flatnonzero(np.isfinite(y) & np.isfinite(x))
    if not good.size:
        return f"{name} has no finite value"
    first, last = (f"{value:.4g}" for value in x[good[[0, -1]]])
    begin, end, low, high = (f"{value:.3g}" for value in (*y[good[[0, -1]]], y[good].min(), y[good].max()))
    if low == high:
        return f"{name} is {low} at {first}" if first == last else f"{name} is {low} from {first} to {last}"
    if begin == end:
        return f"{name} is {begin} at {first} and at {last}, and between them from {low} to {high}"
    return f"{name} goes from {begin} at {first} to {end} at {last}"


def _calm_ticks(axes: Any) -> None:
    """Few tick labels on logarithmic axes, none on the minor ticks."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    for axis, scale, most in ((axes.xaxis, axes.get_xscale(), 8), (axes.yaxis, axes.get_yscale(), 6)):
        if scale == "log":
            axis.set_major_locator(LogLocator(numticks=most))
            axis.set_minor_formatter(NullFormatter())
        else:
            axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]))


def _end_labels(figure: AltFigure, axes: Any, names: Sequence[str]) -> None:
    """Write each line's name at its right end, moved apart where the ends lie close together."""
    width, height = figure.get_size_inches()
    place = axes.get_position()
    low, high = place.y0 * height, place.y1 * height
    ends = []
    for line in axes.get_lines():
        x, y = line.get_data()
        last = axes.transData.transform((x[-1], y[-1])) / figure.dpi if len(x) else (0, low)
        ends.append(float(last[1]) if np.isfinite(last[1]) else low)
    middles = spread(ends, [line_height(look.TEXT_SIZE)] * len(ends), low - 0.1, high + 0.1, 0.02)
    x = place.x1 + 0.1 / width
    for k, (name, y) in enumerate(zip(names, middles, strict=True)):
        text = shortened(drawable(name), 1.9, look.TEXT_SIZE)
        figure.text(x, y / height, text, color=look.hue(k).line, ha="left", va="center", parse_math=False)


def _mark_labels(axes: Any, marks: Mapping[str, float]) -> None:
    for k, (text, x) in enumerate(marks.items()):
        axes.axvline(x, color=look.MUTED, lw=1, ls=":")
        low, high = axes.get_xlim()
        scaled = np.log([low, x, high]) if axes.get_xscale() == "log" else np.array([low, x, high])
        right_half = (scaled[1] - scaled[0]) / (scaled[2] - scaled[0]) > 0.5
        axes.annotate(shortened(drawable(text), 2.0, look.SMALL_SIZE), (x, 1), xycoords=("data", "axes fraction"),
                      xytext=(4 if right_half else -4, 7 + 13 * k), textcoords="offset points", color=look.MUTED,
                      ha="right" if right_half else "left", va="center", fontsize=look.SMALL_SIZE,
                      parse_math=False)  # fmt: skip
