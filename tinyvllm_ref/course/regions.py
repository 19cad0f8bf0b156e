"""Regions of an answer: what a solution holds, and what a learner is given in its place.

In the source of a lesson the lines to be found by the learner stand between two comments, in Python or inside of a
string of CUDA C++::

    extern "C" __global__ void scale(const float* x, float* y, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        // BEGIN SOLUTION (1 line): twice x[i], where there is an x[i]
        if (i < n) y[i] = 2.0f * x[i];
        // STUB // if (...) y[i] = ...;
        // END SOLUTION
    }

A learner sees the same text with the region replaced::

        // TODO (about 1 line): twice x[i], where there is an x[i]
        // if (...) y[i] = ...;

- ``BEGIN SOLUTION (N lines): what to do`` gives the number of lines to write. Blank lines and lines that are only
  a comment are not counted.
- ``STUB code`` gives a line of the learner's text: ``code``, as deep as the comment stands. What makes a stub
  compile and return something belongs there (a non-void function without a ``return`` crashes).
- All comments of a region are of one kind, ``#`` or ``//``, each alone on its line. Regions do not nest. Text
  outside of regions is the same in both.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_WORDS = re.compile(r"\b(BEGIN SOLUTION|END SOLUTION)\b")
_BEGIN = re.compile(r"([ \t]*)(#|//) BEGIN SOLUTION \((\d+) lines?\): (\S.*)")
_END = re.compile(r"[ \t]*(#|//) END SOLUTION[ \t]*")
_STUB = re.compile(r"([ \t]*)(#|//) STUB(?: (.*)|[ \t]*)")

BEGIN_FORM = "BEGIN SOLUTION (6 lines): what to do"


class RegionError(ValueError):
    """A region that can not be read.

    Attributes
    ----------
    line : int
        Of the text, from 0.
    """

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class Region:
    """One region of a text.

    Attributes
    ----------
    begin, end : int
        Lines of its two comments, from 0.
    indent : str
        What stands in front of ``BEGIN SOLUTION``.
    mark : str
        ``#`` or ``//``.
    stated : int
        Lines to write, as the comment says.
    what : str
        What to do.
    answer, stub : tuple of str
        The solution's lines, and the learner's.
    """

    begin: int
    end: int
    indent: str
    mark: str
    stated: int
    what: str
    answer: tuple[str, ...]
    stub: tuple[str, ...]

    @property
    def counted(self) -> int:
        """Lines of the answer that are neither blank nor only a comment."""
        return sum(1 for line in self.answer if line.strip() and not line.strip().startswith(self.mark))

    @property
    def todo(self) -> str:
        """The line that a learner sees first."""
        lines = "1 line" if self.stated == 1 else f"{self.stated} lines"
        return f"{self.indent}{self.mark} TODO (about {lines}): {self.what}"


def find(text: str) -> list[Region]:
    """The regions of a text, from the top.

    Parameters
    ----------
    text : str
        Lines are separated by ``\\n`` alone.

    Raises
    ------
    RegionError
        One is not closed, not opened, inside of another, or not written as it must be.
    """
    lines = text.split("\n")
    regions: list[Region] = []
    begin: int | None = None
    for number, line in enumerate(lines):
        words = _WORDS.search(line)
        if words and words[1] == "BEGIN SOLUTION":
            if not _BEGIN.fullmatch(line):
                raise RegionError(
                    number, f"{line.strip()!r} must be `# {BEGIN_FORM}` (or //), alone on its line"
                )
            if begin is not None:
                raise RegionError(number, f"a region begins inside of the one of {lines[begin].strip()!r}")
            begin = number
        elif words:
            if not _END.fullmatch(line):
                raise RegionError(
                    number, f"{line.strip()!r} must be `# END SOLUTION` (or //), alone on its line"
                )
            if begin is None:
                raise RegionError(number, "END SOLUTION without a BEGIN SOLUTION above it")
            regions.append(_read(lines, begin, number))
            begin = None
        elif begin is None and _STUB.fullmatch(line):
            raise RegionError(number, "STUB outside of a region")
    if begin is not None:
        raise RegionError(begin, "BEGIN SOLUTION without an END SOLUTION below it")
    return regions


def _read(lines: list[str], begin: int, end: int) -> Region:
    opening, closing = _BEGIN.fullmatch(lines[begin]), _END.fullmatch(lines[end])
    assert opening is not None  # `find` looked
    assert closing is not None
    indent, mark, stated, what = opening.groups()
    if closing[1] != mark:
        raise RegionError(end, f"a region that begins with {mark} ends with {closing[1]}")
    answer, stub = [], []
    for number in range(begin + 1, end):
        found = _STUB.fullmatch(lines[number])
        if found is None:
            answer.append(lines[number])
        elif found[2] != mark:
            raise RegionError(number, f"STUB after {found[2]} in a region that begins with {mark}")
        else:
            stub.append(found[1] + found[3] if found[3] else "")
    return Region(begin, end, indent, mark, int(stated), what.rstrip(), tuple(answer), tuple(stub))


def to_stub(text: str) -> str:
    """What a learner is given: each region becomes its TODO line and its STUB lines."""
    return _replace(text, lambda region: [region.todo, *region.stub])


def to_solution(text: str) -> str:
    """What a learner is shown afterwards: the answers without the comments around them and the STUB lines."""
    return _replace(text, lambda region: list(region.answer))


def _replace(text: str, lines_of: Callable[[Region], list[str]]) -> str:
    lines = text.split("\n")
    for region in reversed(find(text)):
        lines[region.begin : region.end + 1] = lines_of(region)
    return "\n".join(lines)
