"""Pictures of the model: attention maps, rotations, distributions, tokens and merges."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from matplotlib.colors import Normalize

from .. import look
from .arrays import column_room, name_axis, scale_bar, shade
from .canvas import (
    AltFigure,
    Sheet,
    drawable,
    in_one_look,
    need_at_most,
    need_some,
    plot_page,
    plural,
    shortened,
    span,
    text_width,
)
from .numbers import error_lines


def _weights(name: str, weights: Any, dimensions: int) -> Any:
    matrix = np.asarray(weights, np.float64)
    if matrix.ndim != dimensions or matrix.size == 0:
        shape = "(queries, keys)" if dimensions == 2 else "(heads, queries, keys)"
        raise ValueError(f"{name}: weights of shape {shape} are needed, not {matrix.shape}")
    queries, keys = matrix.shape[-2:]
    # Future keys have no weight: leave them out of the shades, so that a small weight differs from a masked one.
    future = np.arange(keys)[None, :] > np.arange(queries)[:, None] + keys - queries
    return np.where(future & (matrix == 0), np.nan, matrix)


@in_one_look
def attention_map(
    weights: Any, tokens: Sequence[str], *, title: str = "Attention: from which tokens each token reads"
) -> AltFigure:
    """The attention weights of one head as shades; masked places are hatched.

    Parameters
    ----------
    weights : array_like
        Shape (queries, keys), at most 128 keys; the queries are the last of the keys.
    tokens : sequence of str
        The keys' tokens.
    title : str
        Heading.

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        If there is no weight, or the tokens do not fit the keys.
    """
    matrix = _weights("attention_map", weights, 2)
    queries, keys = matrix.shape
    need_at_most("attention_map(weights)", keys, 128, "keys")
    if len(tokens) != keys:
        raise ValueError(f"attention_map: {len(tokens)} tokens for {keys} keys")
    names = [_token_name(token) for token in tokens]
    widest = max(text_width(shortened(name, 1.2, look.SMALL_SIZE), look.SMALL_SIZE) for name in names)
    left = 0.55 + max(0.2, widest)
    cell = min(0.46, (look.FIGURE_WIDTH - left - 1.3) / keys)
    wide, tall = max(cell * keys, 0.5), max(cell * queries, 0.5)
    figure, (axes,) = plot_page(title, "Row: the token that reads. Column: the token read.", above=0.2,
                                height=tall, left=left,
                                right=look.FIGURE_WIDTH - left - wide,
                                bottom=0.55 + column_room(names, wide / keys))  # fmt: skip
    top = np.nanmax(matrix) if np.isfinite(matrix).any() else 1.0
    norm = Normalize(0, float(top) if top > 0 else 1.0)
    shade(axes, matrix, norm, numbers=cell, form=".2f")
    name_axis(axes, "x", names, keys, wide, "key")
    name_axis(axes, "y", names[keys - queries :], queries, tall, "query")
    scale_bar(figure, axes, norm, "weight")
    last = np.nan_to_num(matrix[-1], nan=-1.0)
    figure.alt_text = (
        f"Attention weights of {plural(queries, 'query', 'queries')} over {plural(keys, 'key')}; the last token, "
        f"{names[-1]!r}, reads most from {names[int(last.argmax())]!r} ({last.max():.2g})."
    )
    return figure


@in_one_look
def attention_heads(
    weights: Any, names: Sequence[str] = (), *, title: str = "The same prompt, head by head", columns: int = 0
) -> AltFigure:
    """Small attention maps of many heads on one scale of shades.

    Parameters
    ----------
    weights : array_like
        Shape (heads, queries, keys), at most 32 heads.
    names : sequence of str, optional
        Names of the heads.
    title : str
        Heading.
    columns : int
        Maps in a row, 1 to 8; by default 4, or 8 where there are more than 12.

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        If there is no weight, or the names do not fit the heads.
    """
    matrix = _weights("attention_heads", weights, 3)
    heads = matrix.shape[0]
    need_at_most("attention_heads(weights)", heads, 32, "heads")
    if len(names) not in (0, heads):
        raise ValueError(f"attention_heads: {len(names)} names for {heads} heads")
    if not 0 <= columns <= 8:
        raise ValueError(
            f"attention_heads: columns is {columns}; it must be from 1 to 8, or 0 for the usual number"
        )
    columns = min(heads, columns or (4 if heads <= 12 else 8))
    lines = -(-heads // columns)
    size = min(1.6, (look.FIGURE_WIDTH - 1.0 - (columns - 1) * 0.14) / columns)
    figure, all_axes = plot_page(
        title, "Row: the token that reads. Column: the token read. Masked places are hatched.", rows=lines, above=0.2,
        columns=columns, height=size, left=0.22, gap=(0.14, 0.3), bottom=0.22,
        right=look.FIGURE_WIDTH - 0.22 - columns * size - (columns - 1) * 0.14,
    )  # fmt: skip
    top = float(np.nanmax(matrix)) if np.isfinite(matrix).any() else 1.0
    norm = Normalize(0, top if top > 0 else 1.0)
    for k, axes in enumerate(all_axes):
        if k >= heads:
            axes.set_axis_off()
            continue
        shade(axes, matrix[k], norm)
        axes.set(xticks=[], yticks=[])
        name = str(names[k]) if names else f"head {k}"
        axes.set_title(shortened(drawable(name), size, 7.5), fontsize=7.5, loc="left", pad=3)
    scale_bar(figure, all_axes[columns - 1], norm, "weight")
    sharp = int(np.nanargmax([np.nanmean(np.nanmax(np.nan_to_num(m, nan=0.0), axis=-1)) for m in matrix]))
    figure.alt_text = (
        f"Attention maps of {plural(heads, 'head')}, {matrix.shape[1]} queries by {matrix.shape[2]} keys; "
        f"{names[sharp] if names else f'head {sharp}'} reads most sharply."
    )
    return figure


def _token_name(token: object) -> str:
    text = str(token)
    return "␣" + drawable(text[1:]) if text[:1] == " " else drawable(text) or "∅"


@in_one_look
def rope_rotation(
    inv_freq: Any, positions: Sequence[int], *, pairs: Sequence[int] | None = None
) -> AltFigure:
    """The rotation of pairs of columns at several positions, each as the hand of a clock.

    Parameters
    ----------
    inv_freq : array_like
        Shape (head_dim / 2,): radians a position.
    positions : sequence of int
        At most 14.
    pairs : sequence of int, optional
        Which pairs; four spread over all if not given.

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        If there is no pair or position, or a pair is beyond `inv_freq`.
    """
    frequencies = np.asarray(inv_freq, np.float64).reshape(-1)
    need_some("rope_rotation(inv_freq)", frequencies, "frequency")
    need_some("rope_rotation(positions)", positions, "position")
    need_at_most("rope_rotation(positions)", len(positions), 14, "positions")
    count = len(frequencies)
    chosen = list(pairs) if pairs is not None else sorted({0, count // 3, 2 * count // 3, count - 1})
    need_some("rope_rotation(pairs)", chosen, "pair")
    need_at_most("rope_rotation(pairs)", len(chosen), 12, "pairs")
    for pair in chosen:
        if not 0 <= pair < count:
            raise ValueError(f"rope_rotation: pair {pair} of {count}")
    sheet = Sheet()
    sheet.title(
        "A position is a rotation",
        f"Pair i is columns i and i + {count}. Low pairs turn fast, high ones slowly.",
    )
    x0 = sheet.left + 1.35
    size = min(0.5, (sheet.right - x0) / len(positions))
    sheet.text(x0 - 0.15, sheet.y + 0.06, "position", size=look.SMALL_SIZE, ha="right", color=look.MUTED)
    for k, position in enumerate(positions):
        sheet.text(x0 + (k + 0.5) * size, sheet.y + 0.06, f"{position:,}", size=look.SMALL_SIZE, ha="center",
                   color=look.MUTED, width=size - 0.04)  # fmt: skip
    sheet.y += 0.2
    for pair in chosen:
        sheet.text(sheet.left, sheet.y + size / 2 - 0.08, f"pair {pair}", bold=True)
        sheet.text(sheet.left, sheet.y + size / 2 + 0.08, f"{frequencies[pair]:.3g} rad a token", size=look.SMALL_SIZE,
                   color=look.MUTED)  # fmt: skip
        for k, position in enumerate(positions):
            centre = (x0 + (k + 0.5) * size, sheet.y + size / 2)
            _dial(sheet, centre, size * 0.42, float(frequencies[pair]) * position)
        sheet.y += max(size, 0.36) + 0.04
    return sheet.finish(
        f"Rotations of {plural(len(chosen), 'pair')} at {plural(len(positions), 'position')} up to "
        f"{max(positions)}; pair {chosen[0]} turns {frequencies[chosen[0]]:.3g} radians a position, pair "
        f"{chosen[-1]} {frequencies[chosen[-1]]:.3g}."
    )


def _dial(sheet: Sheet, centre: tuple[float, float], radius: float, angle: float) -> None:
    from matplotlib.patches import Circle, Wedge

    x, y = centre
    sheet.axes.add_patch(Circle(centre, radius, facecolor=look.PAPER, edgecolor=look.RULE, lw=0.8))
    turn = float(np.mod(angle, 2 * np.pi))
    # y points down on the sheet, so an anticlockwise angle is drawn from -turn to 0.
    sheet.axes.add_patch(Wedge(centre, radius, -np.degrees(turn), 0, facecolor=look.BLUE.fill, lw=0))
    sheet.line((x, x + radius), (y, y), color=look.RULE)
    sheet.line(
        (x, x + radius * np.cos(turn)),
        (y, y - radius * np.sin(turn)),
        color=look.BLUE.line,
        width=1.8,
        above=3,
    )


@in_one_look
def wavelengths(frequencies: Mapping[str, Any], *, context: int | None = None) -> AltFigure:
    """Positions until each pair has turned once, for one or more settings of RoPE.

    Parameters
    ----------
    frequencies : mapping of str to array_like
        Label -> (head_dim / 2,) radians a position.
    context : int, optional
        A length that is drawn as one more line.

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        If there is no setting, or they differ in length.
    """
    need_some("wavelengths(frequencies)", frequencies, "setting")
    lines = {name: 2 * np.pi / np.asarray(f, np.float64).reshape(-1) for name, f in frequencies.items()}
    count = len(next(iter(lines.values())))
    spans = [f"{name} {span(y[0], y[-1])}" for name, y in lines.items() if len(y)]
    if context is not None:
        lines[f"context: {context:,}"] = np.full(count, float(context))
    figure = error_lines(
        np.arange(count), lines, "pair", "positions a turn", log_y=True,
        title="How many positions until a pair has turned once",
    )  # fmt: skip
    figure.alt_text = f"Wavelengths of {plural(count, 'pair')} in positions: {'; '.join(spans)}."
    if context is not None:
        figure.alt_text += f" The context has {plural(context, 'position')}."
    return figure


@in_one_look
def distribution_filters(
    tokens: Sequence[str], panels: Mapping[str, Any], *, title: str = "The next token under each filter"
) -> AltFigure:
    """The next token's probabilities under several filters, side by side; removed tokens carry a cross.

    Parameters
    ----------
    tokens : sequence of str
        The tokens shown, at most 30, most probable first.
    panels : mapping of str to array_like
        Filter -> probabilities, shape (tokens,); at most five.
    title : str
        Heading.
    title : str
        Heading.

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        If there is nothing to show, a probability is outside of [0, 1], or lengths differ.
    """
    need_some("distribution_filters(tokens)", tokens, "token")
    need_some("distribution_filters(panels)", panels, "panel")
    need_at_most("distribution_filters(tokens)", len(tokens), 30, "tokens")
    need_at_most("distribution_filters(panels)", len(panels), 5, "panels")
    shown = {name: np.asarray(p, np.float64).reshape(-1) for name, p in panels.items()}
    for name, p in shown.items():
        if len(p) != len(tokens) or not np.all((p >= 0) & (p <= 1 + 1e-6)):
            raise ValueError(f"distribution_filters: {name!r} needs {len(tokens)} probabilities from 0 to 1")
    sheet = Sheet()
    crossed = "; × marks a token that can not be drawn" if any((p <= 0).any() for p in shown.values()) else ""
    sheet.title(title, f"Bars on one scale{crossed}.")
    names = [shortened(_token_name(token), 1.1, look.TEXT_SIZE) for token in tokens]
    x0 = sheet.left + max(text_width(name, look.TEXT_SIZE) for name in names) + 0.14
    each = (sheet.right - x0) / len(shown)
    top = max(1e-12, *(float(p.max()) for p in shown.values()))
    for k, name in enumerate(shown):
        sheet.text(x0 + k * each, sheet.y + 0.06, name, bold=True, width=each - 0.12)
    sheet.y += 0.22
    for row, name in enumerate(names):
        sheet.text(x0 - 0.1, sheet.y + 0.09, name, ha="right")
        for k, p in enumerate(shown.values()):
            _probability(sheet, x0 + k * each, each, float(p[row]), top, look.hue(k))
        sheet.y += 0.21
    kept = "; ".join(f"{name} keeps {int((p > 0).sum())} of {len(p)}" for name, p in shown.items())
    best = f"the first, {names[0]!r}, has {float(next(iter(shown.values()))[0]):.2g}"
    return sheet.finish(f"{title}. Probabilities of {plural(len(tokens), 'token')}; {best}; {kept}.")


def _probability(sheet: Sheet, x: float, each: float, p: float, top: float, hue: look.Hue) -> None:
    if p <= 0:
        sheet.text(x, sheet.y + 0.09, "×", color=look.MUTED)
        return
    wide = (each - 0.62) * p / top
    sheet.box(x, sheet.y + 0.02, max(wide, 0.015), 0.15, fill=hue.fill, edge=hue.line)
    sheet.text(x + max(wide, 0.015) + 0.05, sheet.y + 0.09, f"{p:.3f}" if p >= 5e-4 else "<.001", size=7.5,
               color=look.MUTED)  # fmt: skip


@in_one_look
def token_strip(
    tokens: Sequence[bytes | str], ids: Sequence[int] | None = None, *, title: str = "The prompt as tokens"
) -> AltFigure:
    """A text as boxes, one a token; bytes that are only a part of a character are dashed and written in hex.

    Parameters
    ----------
    tokens : sequence of bytes or str
        Each token's bytes (or text).
    ids : sequence of int, optional
        Written under the boxes.
    title : str
        Heading.

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        If there is no token, or as many ids as tokens are not given.
    """
    need_some("token_strip(tokens)", tokens, "token")
    need_at_most("token_strip(tokens)", len(tokens), 400, "tokens")
    if ids is not None and len(ids) != len(tokens):
        raise ValueError(f"token_strip: {len(ids)} ids for {len(tokens)} tokens")
    raw = [token if isinstance(token, bytes) else token.encode() for token in tokens]
    texts, partial = zip(*(_token_text(token) for token in raw), strict=True)
    sheet = Sheet()
    whole = b"".join(raw)
    characters = len(whole.decode("utf-8", errors="replace"))
    sheet.title(title, f"{plural(characters, 'character')}, {plural(len(whole), 'byte')}, {plural(len(raw), 'token')}. "
                       "␣ is a space.")  # fmt: skip
    x, line = sheet.left, 0.5 if ids is not None else 0.34
    for k, (text, cut) in enumerate(zip(texts, partial, strict=True)):
        number = "" if ids is None else str(ids[k])
        text = shortened(text, sheet.inner - 0.2, look.TEXT_SIZE, mono=True)
        wide = max(text_width(text, look.TEXT_SIZE, mono=True) + 0.1, text_width(number, 7) + 0.06, 0.16)
        if x + wide > sheet.right and x > sheet.left:
            x, sheet.y = sheet.left, sheet.y + line
        hue = look.hue(k % 4)
        sheet.box(x, sheet.y, wide, 0.26, fill=look.PAPER if cut else hue.fill,
                  edge=look.VERMILION.line if cut else hue.line, dashed=cut, line=1.1 if cut else 0.7)  # fmt: skip
        sheet.text(x + wide / 2, sheet.y + 0.13, text, mono=True, ha="center")
        sheet.text(x + wide / 2, sheet.y + 0.34, number, size=7, ha="center", color=look.MUTED)
        x += wide + 0.035
    sheet.y += line - 0.08
    if any(partial):
        sheet.key([("part of a character, its bytes in hex", {"fill": look.PAPER, "edge": look.VERMILION.line,
                                                               "dashed": True, "line": 1.1})])  # fmt: skip
    return sheet.finish(
        f"A text of {plural(characters, 'character')} in {plural(len(raw), 'token')}; "
        f"{plural(sum(partial), 'token')} hold only a part of a character."
    )


def _token_text(token: bytes) -> tuple[str, bool]:
    """What to write for a token, and whether its bytes are no text by themselves."""
    text = token.decode("utf-8", errors="surrogateescape")
    if not text.isascii() and any("\udc80" <= character <= "\udcff" for character in text):
        pieces = re.split("([\udc80-\udcff]+)", text)
        hexes = [" ".join(f"{ord(c) - 0xDC00:02X}" for c in piece) for piece in pieces[1::2]]
        plain = [drawable(piece.replace(" ", "␣"), mono=True) for piece in pieces[::2]]
        mixed = [part for pair in zip_longest(plain, hexes, fillvalue="") for part in pair if part]
        return " ".join(mixed), True
    return drawable(text.replace(" ", "␣"), mono=True) or "∅", False


@in_one_look
def merge_tree(symbols: Sequence[str], merges: Sequence[tuple[str, str]], *, title: str = "") -> AltFigure:
    """The merges of byte-level BPE on a word, from its symbols up to its tokens.

    Parameters
    ----------
    symbols : sequence of str
        The symbols that the word begins with, at most 40.
    merges : sequence of (str, str)
        The pairs merged, in order; each is merged wherever it stands at that time.
    title : str
        Heading.

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        If there is no symbol, or a pair stands nowhere when its turn comes.
    """
    need_some("merge_tree(symbols)", symbols, "symbol")
    need_at_most("merge_tree(symbols)", len(symbols), 40, "symbols")
    sheet = Sheet()
    cell = min(0.5, sheet.inner / len(symbols))
    # A node: text, centre, and y of its top; the tree grows downwards from the symbols to the tokens.
    now = [(str(s), sheet.left + (k + 0.5) * cell, 1) for k, s in enumerate(symbols)]
    levels: list[list[tuple[str, float, int]]] = [list(now)]
    joins: list[tuple[int, float, float, float]] = []
    for number, (left, right) in enumerate(merges, 1):
        after: list[tuple[str, float, int]] = []
        k = 0
        while k < len(now):
            if k + 1 < len(now) and (now[k][0], now[k + 1][0]) == (left, right):
                width = now[k][2] + now[k + 1][2]
                centre = (now[k][1] * now[k][2] + now[k + 1][1] * now[k + 1][2]) / width
                joins.append((number, now[k][1], now[k + 1][1], centre))
                after.append((left + right, centre, width))
                k += 2
            else:
                after.append(now[k])
                k += 1
        if len(after) == len(now):
            raise ValueError(
                f"merge_tree: {left!r} and {right!r} do not stand side by side in merge {number}"
            )
        now = after
        levels.append(list(now))
    tokens = " ".join(drawable(text.replace(" ", "␣")) for text, _, _ in now)
    count = f"{plural(len(symbols), 'symbol')}, {plural(len(merges), 'merge')}, {plural(len(now), 'token')}"
    sheet.title(title or "Merges, lowest rank first", f"{count}: {tokens}")
    _draw_merges(sheet, levels, joins, cell)
    return sheet.finish(
        f"A word of {plural(len(symbols), 'symbol')} becomes {plural(len(now), 'token')} ({tokens}) in "
        f"{plural(len(merges), 'merge')}."
    )


def _draw_merges(
    sheet: Sheet, levels: Sequence[Sequence[tuple[str, float, int]]],
    joins: Sequence[tuple[int, float, float, float]], cell: float,
) -> None:  # fmt: skip
    tall, step = 0.24, 0.46 if len(levels) <= 14 else 0.36
    top = sheet.y
    for number, level in enumerate(levels):
        y = top + number * step
        made = {round(centre, 6) for n, _, _, centre in joins if n == number}
        for text, centre, width in level:
            new, last = round(centre, 6) in made, number == len(levels) - 1
            if not (new or last or number == 0):
                sheet.line((centre, centre), (y - step + tall, y + tall), color=look.RULE)
                continue
            if number and not new:
                sheet.line((centre, centre), (y - step + tall, y), color=look.RULE)
            hue = look.GREEN if last else look.BLUE if new else look.GREY
            half = width * cell / 2 - 0.03
            sheet.box(centre - half, y, 2 * half, tall, fill=hue.fill, edge=hue.line, above=2)
            sheet.text(
                centre, y + tall / 2, text.replace(" ", "␣"), ha="center", mono=True, width=2 * half - 0.02
            )
    for number, left, right, centre in joins:
        y = top + number * step
        for x in (left, right):
            sheet.line((x, centre), (y - step + tall, y), color=look.BLUE.line, width=1.2)
    sheet.y = top + (len(levels) - 1) * step + tall
    sheet.key([("symbol", {"fill": look.GREY.fill, "edge": look.GREY.line}),
               ("merged in this step", {"fill": look.BLUE.fill, "edge": look.BLUE.line}),
               ("token", {"fill": look.GREEN.fill, "edge": look.GREEN.line})])  # fmt: skip
