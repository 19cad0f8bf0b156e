"""The picture of an engine's run: which request computes in which step, and how full the cache is meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .. import look
from .canvas import AltFigure, Sheet, in_one_look, need_at_most, need_some, plural

_LEFT = 0.78  # inches, for labels
_KINDS = (
    ("reads its prompt", look.BLUE),
    ("writes a token", look.GREEN),
    ("is computed again", look.ORANGE),
)


@dataclass(frozen=True)
class Step:
    """One step of a run.

    Attributes
    ----------
    computed : mapping of int to int
        Request -> how many tokens it computes.
    again : frozenset of int
        Those among them that were preempted and compute what had been computed before.
    preempted : tuple of int
        Requests that lose their blocks in this step.
    used : int
        Blocks that belong to somebody once the step is planned.
    """

    computed: Mapping[int, int]
    again: frozenset[int] = frozenset()
    preempted: tuple[int, ...] = ()
    used: int = 0


@in_one_look
def engine_run(steps: Sequence[Step], num_requests: int, num_blocks: int, *, title: str) -> AltFigure:
    """Requests over steps, and below them the blocks in use.

    Parameters
    ----------
    steps : sequence of Step
        At most 2,000.
    num_requests, num_blocks : int
        At most 64 requests, which are numbered from 0.
    title : str

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        There is no step, a request is not below `num_requests`, or a step uses more than `num_blocks`.
    """
    need_some("engine_run(steps)", steps, "step")
    need_at_most("engine_run(steps)", len(steps), 2000, "steps")
    need_at_most("engine_run(num_requests)", num_requests, 64, "requests")
    for k, step in enumerate(steps):
        for number in (*step.computed, *step.preempted):
            if not 0 <= number < num_requests:
                raise ValueError(
                    f"engine_run: step {k} has request {number}; there are 0 to {num_requests - 1}"
                )
        if not 0 <= step.used <= num_blocks:
            raise ValueError(f"engine_run: step {k} uses {step.used} blocks; there are {num_blocks}")
    losses = sum(len(step.preempted) for step in steps)
    fullest = max(step.used for step in steps)
    mean = sum(step.used for step in steps) / len(steps)
    says = (
        f"{plural(len(steps), 'step')}, {plural(losses, 'preemption')}; of {plural(num_blocks, 'block')} "
        f"{mean:.0f} are in use on average, at most {fullest}"
    )
    sheet = Sheet()
    sheet.title(title, says)
    wide = (sheet.inner - _LEFT) / len(steps)
    _draw_requests(sheet, steps, num_requests, wide)
    _draw_cache(sheet, steps, num_blocks, wide)
    _draw_axis(sheet, len(steps), wide)
    sheet.key(
        [(name, {"fill": hue.fill, "edge": hue.line}) for name, hue in _KINDS]
        + [("loses its blocks", {"fill": look.VERMILION.line})]
    )
    return sheet.finish(f"{title}: {plural(num_requests, 'request')} in {says}.")


def _draw_requests(sheet: Sheet, steps: Sequence[Step], num_requests: int, wide: float) -> None:
    """A row a request: what it does in each step, from its first step to its last."""
    tall = min(0.15, 3.6 / num_requests)
    x0, y0 = sheet.left + _LEFT, sheet.y
    every = next(n for n in (1, 2, 5, 10, 20, 50) if n * tall >= 0.15)
    sheet.text(sheet.left, y0 + tall / 2, "request", size=7.5, color=look.MUTED)
    for number in range(num_requests):
        y = y0 + number * tall
        if number % every == 0:
            sheet.text(x0 - 0.08, y + tall / 2, str(number), size=7.5, ha="right", color=look.MUTED)
        kinds = [_kind(step, number, steps[:k]) for k, step in enumerate(steps)]
        start = 0
        for at in range(1, len(kinds) + 1):
            if at < len(kinds) and kinds[at] == kinds[start]:
                continue
            kind = kinds[start]
            if kind is not None:
                hue, across = _KINDS[kind][1], (at - start) * wide
                sheet.box(
                    x0 + start * wide, y + 0.01, across, tall - 0.02, fill=hue.fill, edge=hue.line, line=0.5
                )
            start = at
        for k, step in enumerate(steps):
            if number in step.preempted:
                sheet.box(
                    x0 + k * wide, y + 0.01, max(wide, 0.03), tall - 0.02, fill=look.VERMILION.line, above=3
                )
    sheet.y = y0 + num_requests * tall + 0.12


def _kind(step: Step, number: int, before: Sequence[Step]) -> int | None:
    """Index into the kinds; None where the request computes nothing."""
    if number not in step.computed:
        return None
    if number in step.again:
        return 2
    is_first = not any(number in earlier.computed for earlier in before)
    return 0 if is_first or step.computed[number] > 1 else 1


def _draw_cache(sheet: Sheet, steps: Sequence[Step], num_blocks: int, wide: float) -> None:
    """Blocks in use, a bar a step, under the line of all blocks."""
    tall, x0, y0 = 0.8, sheet.left + _LEFT, sheet.y + 0.08
    sheet.text(sheet.left, y0 + tall / 2, "blocks", size=7.5, color=look.MUTED)
    sheet.text(x0 - 0.08, y0, str(num_blocks), size=7.5, ha="right", color=look.MUTED)
    sheet.text(x0 - 0.08, y0 + tall, "0", size=7.5, ha="right", color=look.MUTED)
    sheet.box(x0, y0, wide * len(steps), tall, fill=look.WASTE, hatch=look.HATCH)
    for k, step in enumerate(steps):
        high = tall * step.used / num_blocks
        over = 0.006 * (k + 1 < len(steps))  # so that no thread of paper shows between two bars
        sheet.box(x0 + k * wide, y0 + tall - high, wide + over, high, fill=look.PURPLE.fill, above=2)
    sheet.line((x0, x0 + wide * len(steps)), (y0, y0), color=look.MUTED, above=3)
    sheet.y = y0 + tall


def _draw_axis(sheet: Sheet, count: int, wide: float) -> None:
    """Numbers of steps below everything."""
    x0, y = sheet.left + _LEFT, sheet.y
    every = next(n * 10**p for p in range(9) for n in (1, 2, 5) if count / (n * 10**p) <= 12)
    for at in range(0, count + 1, every):
        x = x0 + at * wide
        sheet.line((x, x), (y, y + 0.04), color=look.MUTED)
        if x < sheet.right - 0.05 or at == 0:
            sheet.text(x, y + 0.14, str(at), size=7.5, ha="center", color=look.MUTED)
    sheet.text(sheet.left, y + 0.14, "step", size=7.5, color=look.MUTED)
    sheet.y = y + 0.22
