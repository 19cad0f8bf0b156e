"""The picture of shared heads: which key and value head each query head reads."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from .. import look
from .canvas import AltFigure, Sheet, drawable, in_one_look, need_at_most, need_some, plural

_MOST = 32  # query heads in a panel
_CELL, _GAP = 0.42, 0.34  # inches: the widest box, and the room for the lines


@in_one_look
def shared_heads(panels: Mapping[str, Sequence[Collection[int]]], *, title: str) -> AltFigure:
    """Query heads in a row, key and value heads under them, and a line where one reads the other.

    Parameters
    ----------
    panels : mapping of str to sequence of collection of int
        Name of a panel -> for each query head the key and value heads that it reads; at most 32 query heads.
    title : str
        Heading.

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        There is no panel or no query head, or a head is negative or beyond 31.
    """
    need_some("shared_heads(panels)", panels, "panel")
    need_at_most("shared_heads(panels)", len(panels), 6, "panels")
    sheet = Sheet()
    sheet.title(title, "Above: query heads. Below: the heads of keys and values that they read.")
    said = []
    for name, reads in panels.items():
        need_some(f"shared_heads({name!r})", reads, "query head")
        need_at_most(f"shared_heads({name!r})", len(reads), _MOST, "query heads")
        below = sorted({head for heads in reads for head in heads})
        if below and not 0 <= below[0] <= below[-1] < _MOST:
            raise ValueError(f"shared_heads: {name!r} reads head {below[-1] if below[0] >= 0 else below[0]}; "
                             f"heads are from 0 to {_MOST - 1}")  # fmt: skip
        _panel(sheet, name, reads, (below[-1] + 1) if below else 0)
        said.append(
            f"{drawable(name)}: {plural(len(reads), 'query head')} read {plural(len(below), 'KV head')}"
        )
    sheet.y -= 0.1
    return sheet.finish(f"Which key and value heads query heads read. {'; '.join(said)}.")


def _panel(sheet: Sheet, name: str, reads: Sequence[Collection[int]], kv_heads: int) -> None:
    sheet.text(sheet.left, sheet.y + 0.08, name, bold=True, width=sheet.inner - 0.3)
    sheet.y += 0.24
    cell = min(_CELL, sheet.inner / len(reads))
    top, under = sheet.y, sheet.y + 0.2 + _GAP
    step = len(reads) * cell / max(kv_heads, 1)
    wide = min(cell, step)

    def middle(kv_head: int) -> float:
        return sheet.left + (kv_head + 0.5) * step

    for head, heads in enumerate(reads):
        x = sheet.left + head * cell
        hue = look.hue(min(heads)) if heads else look.GREY
        for kv_head in heads:
            sheet.line(
                (x + cell / 2, middle(kv_head)), (top + 0.2, under), color=look.hue(kv_head).line, width=1.2
            )
        sheet.box(x + 0.02, top, cell - 0.04, 0.2, fill=hue.fill, edge=hue.line, above=2)
        sheet.text(x + cell / 2, top + 0.1, str(head), size=7, ha="center", width=cell - 0.05)
    for kv_head in range(kv_heads):
        hue = look.hue(kv_head)
        sheet.box(
            middle(kv_head) - wide / 2 + 0.02, under, wide - 0.04, 0.2, fill=hue.fill, edge=hue.line, above=2
        )
        sheet.text(middle(kv_head), under + 0.1, str(kv_head), size=7, ha="center", width=wide - 0.05)
    sheet.y = under + 0.2 + 0.2
