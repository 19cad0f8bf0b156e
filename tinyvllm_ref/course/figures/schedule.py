"""Pictures of the engine at work: whose turn it is in which slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .. import look
from .canvas import (
    MARGIN,
    AltFigure,
    Sheet,
    drawable,
    in_one_look,
    need_at_most,
    need_some,
    plural,
    text_width,
)

Slots = Sequence[Sequence[str | None]]


@in_one_look
def timeline(
    slots: Slots | Mapping[str, Slots], *, title: str = "Slots over steps", time: str = "step"
) -> AltFigure:
    """Slots over steps by request; idle slots are hatched.

    Parameters
    ----------
    slots : sequence of sequence of (str or None), or a mapping of names to such
        ``slots[slot][step]`` is the request that the slot worked for, or None. Several named ones (static,
        continuous) stand under each other on one scale of time.
    title : str
        Heading.
    time : str
        What a column is.

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        If there is no slot or no step.
    """
    panels = dict(slots) if isinstance(slots, Mapping) else {"": slots}
    need_some("timeline(slots)", panels, "panel of slots")
    for name, panel in panels.items():
        need_some(f"timeline(slots {name})".replace(" )", ")"), panel, "slot")
        need_at_most("timeline(slots)", len(panel), 64, "slots")
    steps = max(len(row) for panel in panels.values() for row in panel)
    if steps == 0:
        raise ValueError("timeline(slots) is empty: give at least one step")
    need_at_most("timeline(slots)", steps, 4000, "steps")
    idle = {name: _idle(panel) for name, panel in panels.items()}
    sheet = Sheet()
    sheet.title(title, "; ".join(f"{name + ': ' if name else ''}{_in_words(panels[name], share, time)}"
                                 for name, share in idle.items()))  # fmt: skip
    requests = list(dict.fromkeys(
        one for panel in panels.values() for row in panel for one in row if one is not None
    ))  # fmt: skip
    for name, panel in panels.items():
        if name:
            sheet.text(sheet.left, sheet.y + 0.08, name, bold=True, width=sheet.inner)
            sheet.y += 0.2
        _draw_slots(sheet, panel, steps, requests)
        sheet.y += 0.12
    _time_axis(sheet, steps, time)
    sheet.key([("busy with a request", {"fill": look.BLUE.fill, "edge": look.BLUE.line}),
               ("idle", {"fill": look.WASTE, "hatch": look.HATCH})])  # fmt: skip
    says = "; ".join(
        f"{name + ': ' if name else ''}{_in_words(panels[name], s, time)}" for name, s in idle.items()
    )
    return sheet.finish(f"{title}: {plural(len(requests), 'request')}. {says}.")


def _idle(panel: Slots) -> float:
    """Share of idle slot-steps until the last busy step of the panel."""
    busy = [k for row in panel for k, one in enumerate(row) if one is not None]
    end = max(busy, default=-1) + 1
    return 1 - len(busy) / (end * len(panel)) if end else 1.0


def _in_words(panel: Slots, share: float, time: str) -> str:
    end = max((k + 1 for row in panel for k, one in enumerate(row) if one is not None), default=0)
    return f"{plural(end, time)}, {share:.0%} of the slots idle"


_LEFT = 0.55


def _draw_slots(sheet: Sheet, panel: Slots, steps: int, requests: list[str]) -> None:
    x0 = sheet.left + _LEFT
    step = (sheet.right - x0) / steps
    tall = 0.24 if len(panel) <= 16 else 0.15
    end = max((k + 1 for row in panel for k, one in enumerate(row) if one is not None), default=len(panel[0]))
    for k, row in enumerate(panel):
        y = sheet.y + k * tall
        if tall > 0.2 or k % 2 == 0:
            sheet.text(x0 - 0.08, y + tall / 2, f"slot {k}", size=7.5, ha="right", color=look.MUTED)
        sheet.box(x0, y + 0.02, end * step, tall - 0.04, fill=look.WASTE, hatch=look.HATCH)
        start = 0
        for at in range(1, len(row) + 1):
            if at < len(row) and row[at] == row[start]:
                continue
            owner = row[start]
            if owner is not None:
                hue, wide = look.hue(requests.index(owner)), (at - start) * step
                sheet.box(x0 + start * step, y + 0.02, wide, tall - 0.04, fill=hue.fill, edge=hue.line,
                          line=0.8 if wide > 0.04 else 0.2, above=2)  # fmt: skip
                wanted = text_width(drawable(owner), 7.5)
                if wanted <= wide - 0.05:
                    sheet.text(x0 + start * step + wide / 2, y + tall / 2, owner, size=7.5, ha="center")
                elif tall > 0.2 and wanted + 0.1 <= _idle_after(row, at, end) * step:
                    x = x0 + at * step + 0.04
                    sheet.box(x, y + 0.04, wanted + 0.04, tall - 0.08, fill=look.WASTE, above=2)
                    sheet.text(x + 0.02, y + tall / 2, owner, size=7.5)
            start = at
    sheet.y += len(panel) * tall


def _idle_after(row: Sequence[str | None], at: int, end: int) -> int:
    """How many steps a slot is idle from a step on, before the panel's end."""
    busy = next((k for k in range(at, len(row)) if row[k] is not None), end)
    return busy - at


def _time_axis(sheet: Sheet, steps: int, time: str) -> None:
    x0 = sheet.left + _LEFT
    step = (sheet.right - x0) / steps
    every = next(n * 10**p for p in range(9) for n in (1, 2, 5) if steps / (n * 10**p) <= 12)
    y = sheet.y - 0.04
    sheet.line((x0, x0 + steps * step), (y, y), color=look.RULE)
    for at in range(0, steps + 1, every):
        sheet.line((x0 + at * step,) * 2, (y, y + 0.04), color=look.MUTED)
        if x0 + at * step < sheet.width - MARGIN + 0.05:
            sheet.text(x0 + at * step, y + 0.12, str(at), size=7.5, ha="center", color=look.MUTED)
    sheet.text(x0 - 0.12, y + 0.12, time, size=7.5, ha="right", color=look.MUTED, width=_LEFT)
    sheet.y = y + 0.2
