"""The picture of what steps compute: how many tokens of whom, under the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .. import look
from .canvas import AltFigure, Sheet, drawable, in_one_look, need_at_most, need_some, plural, text_width

Steps = Sequence[Sequence[tuple[str, int]]]

_LEFT, _TALL = 0.8, 1.15  # inches: the column of labels, and a panel


@in_one_look
def step_tokens(
    panels: Mapping[str, Steps],
    *,
    title: str,
    subtitle: str = "",
    budgets: Mapping[str, int] | None = None,
) -> AltFigure:
    """Tokens by step, stacked by request; several named runs stand under each other on one scale.

    Parameters
    ----------
    panels : mapping of str to steps
        ``panels[name][step]`` lists (request, tokens) of those that compute in the step, the first at the bottom.
    title, subtitle : str
    budgets : mapping of str to int, optional
        The most tokens of a step, by panel; drawn as a line.

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        There is no panel, no step or no token, or a count is negative.
    """
    need_some("step_tokens(panels)", panels, "panel")
    need_at_most("step_tokens(panels)", len(panels), 4, "panels")
    for name, steps in panels.items():
        need_some(f"step_tokens: {name!r}", steps, "step")
        need_at_most(f"step_tokens: {name!r}", len(steps), 400, "steps")
        for who, count in (row for step in steps for row in step):
            if count < 0:
                raise ValueError(f"step_tokens: {who!r} has {count} tokens; a count must be at least 0")
    budgets = budgets or {}
    longest = max(map(len, panels.values()))
    highest = max(
        [*(sum(n for _, n in step) for steps in panels.values() for step in steps), *budgets.values()]
    )
    if highest == 0:
        raise ValueError("step_tokens(panels): no step has any tokens")
    names = dict.fromkeys(who for steps in panels.values() for step in steps for who, _ in step)
    hues = {who: look.hue(k) for k, who in enumerate(names)}
    sheet = Sheet()
    sheet.title(title, subtitle)
    for name, steps in panels.items():
        sheet.text(sheet.left, sheet.y + 0.08, name, bold=True, width=sheet.inner)
        sheet.y += 0.26
        _draw_panel(sheet, steps, (longest, highest), budgets.get(name), hues)
    _time_axis(sheet, longest)
    sheet.key(
        [("one request a colour; its height is its tokens", {"fill": look.BLUE.fill, "edge": look.BLUE.line})]
    )
    return sheet.finish(f"{title}: " + "; ".join(_in_words(*one) for one in panels.items()) + ".")


def _in_words(name: str, steps: Steps) -> str:
    totals = [sum(count for _, count in step) for step in steps]
    return f"{drawable(name)}: {plural(len(steps), 'step')} of up to {plural(max(totals), 'token')}"


def _draw_panel(
    sheet: Sheet, steps: Steps, most: tuple[int, int], budget: int | None, hues: Mapping[str, look.Hue]
) -> None:
    x0, tall = sheet.left + _LEFT, _TALL / most[1]
    own = max([sum(count for _, count in step) for step in steps] + [budget or 0])
    ground = sheet.y + max(own * tall, 0.2)
    wide = (sheet.right - x0) / most[0]
    for at, step in enumerate(steps):
        x, y = x0 + at * wide, ground
        for who, count in step:
            high = count * tall
            y -= high
            sheet.box(x, y, wide, high, fill=hues[who].fill, edge=hues[who].line, line=0.8 if wide > 0.06 else 0.3,
                      above=2)  # fmt: skip
            if high >= 0.15 and text_width(drawable(who), 7.5) <= wide - 0.05:
                sheet.text(x + wide / 2, y + high / 2, who, size=7.5, ha="center")
    sheet.line((x0, sheet.right), (ground, ground), color=look.RULE)
    if budget is not None:
        sheet.line(
            (x0, sheet.right), (ground - budget * tall,) * 2, color=look.VERMILION.line, dashed=True, above=3
        )
        sheet.text(x0 - 0.08, ground - budget * tall, f"budget {budget}", size=7.5, ha="right", color=look.MUTED,
                   width=_LEFT)  # fmt: skip
    sheet.y = ground + 0.12


def _time_axis(sheet: Sheet, steps: int) -> None:
    x0, y = sheet.left + _LEFT, sheet.y - 0.1
    wide = (sheet.right - x0) / steps
    every = next(n * 10**p for p in range(4) for n in (1, 2, 5) if steps / (n * 10**p) <= 12)
    for at in range(0, steps, every):
        sheet.text(x0 + (at + 0.5) * wide, y + 0.1, str(at + 1), size=7.5, ha="center", color=look.MUTED)
    sheet.text(x0 - 0.3, y + 0.1, "step", size=7.5, ha="right", color=look.MUTED)
    sheet.y = y + 0.2
