"""What every figure stands on: the Figure with its alternative text, a sheet to draw on, measured text."""

from __future__ import annotations

import base64
import functools
import html
import io
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.text import Text
from matplotlib.textpath import text_to_path

from .. import front_end, look

# One figure is one PNG of a bounded size; a caller that asks for more gets a clear error, not a picture of dust.
MARGIN = 0.22

_RC: dict[str, Any] = {
    "font.family": [look.SANS],
    "font.size": look.TEXT_SIZE,
    "text.color": look.INK,
    "text.usetex": False,
    "axes.facecolor": look.PAPER,
    "axes.edgecolor": look.MUTED,
    "axes.labelcolor": look.INK,
    "axes.labelsize": look.TEXT_SIZE,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "axes.unicode_minus": True,
    "axes.xmargin": 0.03,
    "xtick.color": look.MUTED,
    "ytick.color": look.MUTED,
    "xtick.labelcolor": look.INK,
    "ytick.labelcolor": look.INK,
    "xtick.labelsize": look.SMALL_SIZE,
    "ytick.labelsize": look.SMALL_SIZE,
    "hatch.color": "#B9B6B0",
    "hatch.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "path.simplify": True,
}

P = ParamSpec("P")


class AltFigure(Figure):
    """A matplotlib Figure that knows what it shows in words; a cell that ends with one displays it.

    Attributes
    ----------
    alt_text : str
        A sentence computed from the data, for readers who do not see the picture.
    """

    alt_text: str = ""

    def png(self) -> bytes:
        """The picture, at twice the size it is shown at."""
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=look.SAVED_DPI, facecolor=look.PAPER)
        return file.getvalue()

    def _repr_mimebundle_(
        self, include: Any = None, exclude: Any = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        width, height = (round(float(inches) * look.PIXELS_PER_INCH) for inches in self.get_size_inches())
        png = self.png()
        if front_end.in_vscode():
            picture = front_end.sized_picture(png, self.alt_text, width)
            return {"text/html": picture, "text/plain": self.alt_text}, {}
        data = {"image/png": base64.b64encode(png).decode("ascii"), "text/plain": self.alt_text}
        # nbconvert takes the alt text from here. JupyterLab 4.6 takes the size alone, so that display_figure says it
        # once more.
        return data, {"image/png": {"alt": self.alt_text, "width": width, "height": height}}


def display_figure(fig: AltFigure) -> None:
    """Show `fig` in a notebook: an ``image/png`` output with its alternative text, and nothing else that is seen.

    The second output is for screen readers: JupyterLab makes an ``<img>`` of a PNG without an ``alt``. In VS Code the
    one output is an ``<img>`` that has all of it.
    """
    from IPython.display import display

    data, metadata = fig._repr_mimebundle_()
    display(data, metadata=metadata, raw=True)  # type: ignore[no-untyped-call]
    if "text/html" in data:
        return
    label = html.escape(fig.alt_text)
    spoken = {"text/html": f'<span role="img" aria-label="{label}"></span>', "text/plain": ""}
    display(spoken, raw=True)  # type: ignore[no-untyped-call]


def in_one_look(draw: Callable[P, AltFigure]) -> Callable[P, AltFigure]:
    """Draw with the course's settings, whatever the notebook has set in ``matplotlib.rcParams``."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> AltFigure:
        with mpl.rc_context(_RC):  # type: ignore[arg-type, unused-ignore]
            return draw(*args, **kwargs)

    return drawn


# ---------------- text that is measured before it is drawn


@functools.lru_cache(maxsize=64)
def _font(mono: bool, bold: bool) -> FontProperties:
    return FontProperties(family=look.MONO if mono else look.SANS, weight="bold" if bold else "normal")


@functools.lru_cache(maxsize=8192)
def text_width(text: str, size: float = look.TEXT_SIZE, *, mono: bool = False, bold: bool = False) -> float:
    """Width of one line of text in inches."""
    prop = _font(mono, bold).copy()
    prop.set_size(size)
    width, _, _ = text_to_path.get_text_width_height_descent(text, prop, ismath=False)
    return float(width) / 72


def line_height(size: float) -> float:
    """Height of a line of text in inches."""
    return size * 1.42 / 72


@functools.lru_cache(maxsize=4096)
def _has_glyph(character: str, mono: bool) -> bool:
    return bool(get_font(findfont(_font(mono, False))).get_char_index(ord(character)))


def drawable(text: object, *, mono: bool = False) -> str:
    """`text` in one line, with what the font can not draw written as its code point (``U+1F642``)."""
    marks = {"\n": "↵", "\t": "⇥", "\r": "␍"}
    out: list[str] = []
    for character in str(text):
        character = marks.get(character, character)
        if character.isprintable() and _has_glyph(character, mono):
            out.append(character)
        else:
            gap = " " if out and out[-1].startswith(("U+", " U+")) else ""
            out.append(f"{gap}U+{ord(character):04X}")
    return "".join(out)


def shortened(text: str, width: float, size: float, *, mono: bool = False, bold: bool = False) -> str:
    """`text`, cut in its middle with an ellipsis until it fits into `width` inches; "" if nothing fits."""
    if text_width(text, size, mono=mono, bold=bold) <= width:
        return text

    def cut(keep: int) -> str:
        head, tail = (keep + 1) // 2, keep // 2
        return text[:head].rstrip() + "…" + (text[-tail:].lstrip() if tail else "")

    def fits(keep: int) -> bool:
        return text_width(cut(keep), size, mono=mono, bold=bold) <= width

    low, high = 0, min(len(text) - 1, 200)  # keeping `low` characters fits, or is nothing
    if width < 1.2 * size / 72:  # not even one character and the ellipsis
        return ""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return cut(low) if low else ""


def wrapped(text: str, width: float, size: float, *, bold: bool = False) -> list[str]:
    """`text` in lines of at most `width` inches; a single longer word is cut."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, size, bold=bold) <= width:
            lines[-1] = longer
        else:
            lines.append(shortened(word, width, size, bold=bold))
    return lines


def spread(
    centres: Sequence[float], sizes: Sequence[float], low: float, high: float, gap: float
) -> list[float]:
    """Move the centres of labels apart, as little as simple passes can, so that none overlaps inside [low, high].

    `sizes` are the labels' extents along the line. Labels that need more room than there is are a ValueError.
    """
    order = sorted(range(len(centres)), key=lambda k: centres[k])
    if sum(sizes) + gap * max(0, len(sizes) - 1) > high - low + 1e-9:
        raise ValueError(f"labels need {sum(sizes):.2f}, and there is room for {high - low:.2f}")
    at = list(centres)
    edge = low
    for k in order:
        at[k] = max(at[k], edge + sizes[k] / 2)
        edge = at[k] + sizes[k] / 2 + gap
    edge = high
    for k in reversed(order):
        at[k] = min(at[k], edge - sizes[k] / 2)
        edge = at[k] - sizes[k] / 2 - gap
    return at


# ---------------- a sheet: diagrams in inches, y downwards


class Sheet:
    """A blank page on which a diagram is laid out in inches, from the top left corner downwards.

    The height is known only at the end: ``finish`` cuts the page under the last thing drawn (`y`).
    """

    def __init__(self, width: float = look.FIGURE_WIDTH) -> None:
        self.width = width
        self.left, self.right = MARGIN, width - MARGIN
        self.y = MARGIN
        self.figure = new_figure(width, 1.0)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()

    @property
    def inner(self) -> float:
        """Width between the margins."""
        return self.right - self.left

    def title(self, title: str, subtitle: str = "") -> None:
        """Write the heading; `y` moves below it."""
        self.y = write_heading(self.text, self.left, self.y, self.inner, title, subtitle)

    def text(
        self, x: float, y: float, text: str, *, size: float = look.TEXT_SIZE, color: str = look.INK,
        ha: str = "left", va: str = "center", mono: bool = False, bold: bool = False,
        width: float | None = None,
    ) -> Text | None:  # fmt: skip
        """Write one line at (x, y), cut to `width` if that is given; None if nothing is left of it."""
        text = drawable(text, mono=mono)
        if width is not None:
            text = shortened(text, width, size, mono=mono, bold=bold)
        if not text:
            return None
        return self.axes.text(
            x, y, text, fontsize=size, color=color, ha=ha, va=va, parse_math=False,
            family=look.MONO if mono else look.SANS, weight="bold" if bold else "normal",
        )  # fmt: skip

    def box(
        self, x: float, y: float, width: float, height: float, *, fill: str = "none", edge: str = "none",
        hatch: str | None = None, line: float = 0.8, dashed: bool = False, above: int = 1,
    ) -> None:  # fmt: skip
        """Draw a rectangle whose top left corner is (x, y)."""
        self.axes.add_patch(
            Rectangle(
                (x, y), width, height, facecolor=fill, edgecolor=edge, linewidth=line if edge != "none" else 0,
                linestyle="--" if dashed else "-", zorder=above,
            )
        )  # fmt: skip
        if hatch:
            self.axes.add_patch(
                Rectangle((x, y), width, height, facecolor="none", edgecolor="#B9B6B0", hatch=hatch, linewidth=0,
                          zorder=above)
            )  # fmt: skip

    def line(
        self, x: Sequence[float], y: Sequence[float], *, color: str = look.MUTED, width: float = 0.8,
        dashed: bool = False, above: float = 1.5,
    ) -> None:  # fmt: skip
        """Draw a line through the points."""
        self.axes.plot(x, y, color=color, lw=width, ls="--" if dashed else "-", zorder=above,
                       solid_capstyle="round")  # fmt: skip

    def arrow(
        self,
        start: tuple[float, float],
        end: tuple[float, float],
        *,
        color: str = look.MUTED,
        width: float = 0.9,
    ) -> None:
        """Draw an arrow."""
        self.axes.add_patch(
            FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=7, color=color, lw=width, shrinkA=0,
                            shrinkB=0, zorder=1.5)
        )  # fmt: skip

    def key(self, entries: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Draw a row of swatches with their meaning; each entry is (text, keywords of ``box``)."""
        x, size = self.left, look.SMALL_SIZE
        self.y += 0.16
        for text, style in entries:
            need = 0.3 + text_width(drawable(text), size) + 0.22
            if x > self.left and x + need - 0.22 > self.right:
                x, self.y = self.left, self.y + 0.21
            self.box(x, self.y, 0.22, 0.14, **style)
            self.text(x + 0.3, self.y + 0.07, text, size=size, color=look.MUTED, width=self.right - x - 0.3)
            x += need
        self.y += 0.16

    def note(self, text: str) -> None:
        """Write small lines under what is drawn."""
        self.y += 0.1
        for line in wrapped(drawable(text), self.inner, look.SMALL_SIZE):
            self.y += line_height(look.SMALL_SIZE)
            self.text(self.left, self.y - line_height(look.SMALL_SIZE) / 2, line, size=look.SMALL_SIZE,
                      color=look.MUTED)  # fmt: skip

    def finish(self, alt_text: str) -> AltFigure:
        """Cut the page and give the figure."""
        height = self.y + MARGIN
        self.figure.set_size_inches(self.width, height)
        self.axes.set(xlim=(0, self.width), ylim=(height, 0))
        self.figure.alt_text = alt_text
        return self.figure


def on_paper(text: Text | None) -> None:
    """Give a text a background of paper, where a line passes behind it."""
    if text is not None:
        text.set_bbox({"facecolor": look.PAPER, "edgecolor": "none", "pad": 1.2})
        text.set_zorder(4)


def new_figure(width: float, height: float) -> AltFigure:
    """An empty figure on the course's paper, known to no global state."""
    figure = AltFigure(figsize=(width, height), facecolor=look.PAPER)
    FigureCanvasAgg(figure)
    return figure


def write_heading(
    write: Callable[..., Any], x: float, y: float, width: float, title: str, subtitle: str
) -> float:
    """Write title and subtitle from `y` downwards with `write`; give the y below them."""
    for text, size, bold, color in (
        (title, look.TITLE_SIZE, True, look.INK),
        (subtitle, look.TEXT_SIZE, False, look.MUTED),
    ):
        for line in wrapped(drawable(text), width, size, bold=bold):
            write(x, y + line_height(size) / 2, line, size=size, bold=bold, color=color)
            y += line_height(size)
    return y + 0.14


def plot_page(
    title: str, subtitle: str = "", *, height: float = 2.9, left: float = 0.75, right: float = 0.3,
    bottom: float = 0.55, above: float = 0.0, columns: int = 1, rows: int = 1, gap: tuple[float, float] = (0.5, 0.5),
) -> tuple[AltFigure, list[Axes]]:  # fmt: skip
    """A figure with a heading and axes under it, laid out in inches.

    Parameters
    ----------
    height : float
        Height of one row of axes in inches.
    left, right, bottom : float
        Room beside and under the axes for their labels.
    above : float
        Room under the heading, for what stands over the axes.
    columns, rows : int
        The axes, given row by row.
    gap : (float, float)
        Room between columns and between rows.
    """
    width = look.FIGURE_WIDTH
    head = write_heading(lambda *_, **__: None, 0, MARGIN, width - 2 * MARGIN, title, subtitle)
    head += above
    total = head + rows * height + (rows - 1) * gap[1] + bottom
    figure = new_figure(width, total)

    def write(x: float, y: float, text: str, *, size: float, bold: bool, color: str) -> None:
        figure.text(x / width, 1 - y / total, text, fontsize=size, weight="bold" if bold else "normal",
                    color=color, ha="left", va="center", parse_math=False)  # fmt: skip

    write_heading(write, MARGIN, MARGIN, width - 2 * MARGIN, title, subtitle)
    each = (width - left - right - (columns - 1) * gap[0]) / columns
    axes = [
        figure.add_axes(
            (
                (left + c * (each + gap[0])) / width,
                1 - (head + (r + 1) * height + r * gap[1]) / total,
                each / width,
                height / total,
            )
        )
        for r in range(rows)
        for c in range(columns)
    ]
    return figure, axes


# ---------------- numbers and checks


def amount(value: float) -> str:
    """A count for a reader: ``1,024``; ``2.5 M`` from ten million on; ``nan`` stays a word."""
    if not np.isfinite(value):
        return str(float(value))
    if float(value).is_integer() and abs(value) < 1e7:
        return f"{int(value):,}"
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def byte_count(value: float) -> str:
    """Bytes for a reader: ``512 B``, ``48 KiB``, ``2.3 GiB``."""
    size = float(value)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" or size.is_integer() else f"{size:.3g} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def with_unit(value: float, unit: str) -> str:
    """A number and its unit: ``8,192 bytes``, ``33 TB/s``."""
    number = amount(value)
    return number + unit if number[-1].isalpha() and unit[:1].isupper() else f"{number} {unit}".rstrip()


def plural(count: int, one: str, many: str | None = None) -> str:
    """``1 sector``, ``2 sectors``."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def span(low: float, high: float, digits: int = 3) -> str:
    """``2 to 6.28``; of two ends that print alike, one: ``128``."""
    ends = f"{low:.{digits}g}", f"{high:.{digits}g}"
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def need_some(name: str, items: Any, what: str) -> None:
    """Raise a ValueError if `items` is empty."""
    if len(items) == 0:
        raise ValueError(f"{name} is empty: give at least one {what}")


def need_at_most(name: str, count: int, limit: int, what: str) -> None:
    """Raise a ValueError if more is asked for than a picture can show."""
    if count > limit:
        raise ValueError(f"{name}: {count:,} {what} do not fit into one figure; {limit:,} do. Draw a part.")
