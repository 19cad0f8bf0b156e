"""A kernel's lines as lines of the cell that it stands in.

What is compiled is often an earlier part (``BF16_CUDA``) and the learner's own text behind it, so that the compiler
and the checks of the emulation count from the beginning of a text that nobody sees. A learner counts in the cell.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from .runner import Fault

_LINE = re.compile(r"\bline (\d+)\b( of the kernel\b)?")
_Lines = Sequence[tuple[int, str, bool]]


def in_cell(fault: Fault, cell: str) -> Fault:
    """A fault with the lines of the learner's cell.

    Parameters
    ----------
    fault : Fault
    cell : str
        The learner's own.

    Returns
    -------
    Fault
        The same one where it is not of a kernel, where a line that it names is not in the cell, or where it is not
        clear which of several it is.
    """
    if not (fault.in_kernel or fault.kind == "CompileException"):
        return fault
    lines = [line.rstrip() for line in cell.splitlines()]
    before = _lines_before(fault.source, lines)
    if before is None:
        return fault
    source = tuple(
        (number - before, text, here)
        for number, text, here in fault.source
        if _stands_at(lines, number - before, text)
    )
    return replace(
        fault,
        message=_counted_from(before, fault.message, len(lines)),
        details=tuple(_counted_from(before, detail, len(lines)) for detail in fault.details),
        source=source,
    )


def _lines_before(source: _Lines, lines: Sequence[str]) -> int | None:
    """How many lines of the kernel's text come before the cell's first one (fewer than none where the cell begins with
    other things); None where that is not clear."""
    marked = [(number, text) for number, text, here in source if here]
    if not marked:
        return None
    first, text = marked[0]
    scores: dict[int, int] = {}
    for at in range(1, len(lines) + 1):
        before = first - at
        if _stands_at(lines, at, text) and all(_stands_at(lines, n - before, other) for n, other in marked):
            scores[before] = sum(_stands_at(lines, n - before, other) for n, other, _ in source)
    best = [before for before, score in scores.items() if score == max(scores.values())]
    return best[0] if len(best) == 1 else None


def _stands_at(lines: Sequence[str], number: int, text: str) -> bool:
    """Whether a kernel's line is that line of the cell, behind the quotes that open the text as well."""
    if not 1 <= number <= len(lines):
        return False
    there, wanted = lines[number - 1], text.rstrip()
    return there == wanted or (bool(wanted) and there.endswith(('"""' + wanted, "'''" + wanted)))


def _counted_from(before: int, text: str, most: int) -> str:
    """A text that names lines, with those of the cell; what stands before the cell keeps its number."""

    def own(found: re.Match[str]) -> str:
        number = int(found[1]) - before
        if not 1 <= number <= most:
            return found[0]
        return f"line {number}" + (" of the cell" if found[2] else "")

    return _LINE.sub(own, text)
