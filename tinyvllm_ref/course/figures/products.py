"""The picture of a matrix product: which elements one block reads, and how often."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.colors import LogNorm

from .. import look
from .arrays import SHADES
from .canvas import AltFigure, Sheet, drawable, in_one_look, plural

_MOST = 40  # elements along a side
_CELL = 0.15  # inches


def reads_of_block(rows: Any, array: str, shape: tuple[int, int], block: int = 0) -> np.ndarray[Any, Any]:
    """How often a block read each element of a matrix.

    Parameters
    ----------
    rows : numpy.ndarray
        Rows of a trace (``emulation.trace()``).
    array : str
        Name of the kernel's parameter.
    shape : (int, int)
        Of the matrix, row-major.
    block : int

    Returns
    -------
    numpy.ndarray of int, of that shape
    """
    mine = rows[(rows["array"] == array) & (rows["block"] == block) & (rows["kind"] == "read")]
    return np.bincount(mine["index"], minlength=shape[0] * shape[1])[: shape[0] * shape[1]].reshape(shape)


@in_one_look
def block_reads(x_reads: Any, w_reads: Any, tile: tuple[int, int], *, title: str) -> AltFigure:
    """A product out = x w^T: how often a block reads each element of x and w for its tile of out.

    Parameters
    ----------
    x_reads, w_reads : (T, K) and (N, K) int
        Reads of each element.
    tile : (int, int)
        Rows and columns of out that the block makes, from the upper left corner.
    title : str
        Heading.

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        The shapes do not fit each other, or a side is longer than 40.
    """
    x_reads, w_reads = np.asarray(x_reads), np.asarray(w_reads)
    if x_reads.ndim != 2 or w_reads.ndim != 2 or x_reads.shape[1] != w_reads.shape[1] or not x_reads.size:
        raise ValueError(f"block_reads: x is {x_reads.shape} and w {w_reads.shape}; (T, K) and (N, K) needed")
    (tokens, depth), outputs = x_reads.shape, len(w_reads)
    if max(tokens, depth, outputs) > _MOST or outputs < 1:
        raise ValueError(f"block_reads: T, K, N = {tokens}, {depth}, {outputs}; each from 1 to {_MOST}")
    sheet = Sheet()
    total = int(x_reads.sum() + w_reads.sum())
    sheet.title(title, f"The block in the upper left corner reads {plural(total, 'element')} in all.")
    cell = min(_CELL, (sheet.inner - 2.2) / (depth + outputs))
    most = max(int(x_reads.max()), int(w_reads.max()), 2)
    left, top = sheet.left, sheet.y + 0.2
    across, down = left + depth * cell + 0.3, top + depth * cell + 0.4
    for matrix, place, name in (
        (w_reads.T, (across, top), f"w, drawn transposed ({depth}, {outputs})"),
        (x_reads, (left, down), f"x ({tokens}, {depth})"),
        (None, (across, down), f"out ({tokens}, {outputs})"),
    ):
        high, wide = (tokens, outputs) if matrix is None else matrix.shape
        sheet.text(place[0], place[1] - 0.1, name, size=look.SMALL_SIZE, color=look.MUTED)
        if matrix is None:
            rows, columns = min(tile[0], tokens), min(tile[1], outputs)
            sheet.box(
                place[0], place[1], columns * cell, rows * cell, fill=look.ORANGE.fill, hatch=look.HATCH
            )
        else:
            _shade(sheet, matrix, place, cell, most)
        sheet.box(place[0], place[1], wide * cell, high * cell, edge=look.RULE)
    said = [f"{name}: {_reads(matrix)}" for name, matrix in (("x", x_reads), ("w", w_reads))]
    for k, text in enumerate(said):
        sheet.text(across + outputs * cell + 0.15, top + 0.1 + 0.2 * k, text, width=1.9)
    sheet.y = down + tokens * cell
    sheet.key([("the tile of out that the block makes", {"fill": look.ORANGE.fill, "hatch": look.HATCH})])
    return sheet.finish(f"Reads of one block of a matrix product. {drawable('; '.join(said))}.")


def _shade(sheet: Sheet, matrix: Any, place: tuple[float, float], cell: float, most: int) -> None:
    """Shade a matrix of counts; what was not read stays as paper."""
    high, wide = matrix.shape
    x, y = place
    sheet.axes.imshow(
        np.ma.masked_equal(matrix, 0), cmap=SHADES, norm=LogNorm(0.4, most), interpolation="nearest",
        extent=(x, x + wide * cell, y + high * cell, y), aspect="auto", zorder=1,
    )  # fmt: skip


def _reads(matrix: Any) -> str:
    """Counts in words: ``320 read, 16 times each``."""
    read = matrix[matrix > 0]
    if not read.size:
        return "not read"
    few, many = int(read.min()), int(read.max())
    times = "once" if many == 1 else f"{many} times" if few == many else f"{few} to {many} times"
    return f"{read.size:,} read, {times} each"
