"""Cells of a Python file in the percent format, as Jupytext writes it: ``# %%`` and ``# %% [markdown]`` begin one.

This is read here, and not by Jupytext, because grading and a class's copy need the lessons as well, and Jupytext comes
with an extension of JupyterLab that pairs notebooks with scripts. The tests hold the two against one another. What
people write by accident, and Jupytext takes for a cell or leaves in one, is refused here with its line.
"""

from __future__ import annotations

import io
import json
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_MARKER = re.compile(r"# ?%%(?:\s+(?P<options>.*))?")
_KIND = re.compile(r"\[(?P<kind>markdown|md|raw)\]\s*")
_OPTION = re.compile(r"(?P<name>[A-Za-z_][\w.-]*)=")
# What Jupytext takes for a marker, and nobody means as one here.
_OTHER_MARKER = re.compile(r"#\s*(?:%%(?:\s|$)|<codecell>\s*$|In\[[0-9 ]*\]:?\s*$)")


class NotPercent(ValueError):
    """A text that is not in the format; `line`, from 1, says where, and 0 that it is of no line."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class PercentCell:
    """One cell.

    Attributes
    ----------
    kind : str
        ``code``, ``markdown`` or ``raw``.
    source : str
        Without blank lines at its ends; of a text, without the ``# `` of its lines.
    metadata : dict
        As written behind the marker.
    line : int
        Of the file, from 1: where the cell's text begins.
    """

    kind: str
    source: str
    metadata: dict[str, Any]
    line: int


def cells_of(text: str) -> list[PercentCell]:
    """Read a file's cells.

    Parameters
    ----------
    text : str
        Line ends are ``\\n``.

    Raises
    ------
    NotPercent
        It is not Python, something stands before the first marker, a marker is indented or of another kind, an option
        is no JSON, or a line of a text is no comment.
    """
    lines = text.split("\n")
    markers = list(_markers(text, lines))
    begin = _after_header(lines)
    for number, line in enumerate(lines[begin : markers[0] - 1 if markers else None], begin + 1):
        if line.strip():
            raise NotPercent(number, f"{line.strip()[:40]!r} stands before the first cell; # %% begins one")
    ends = [*(marker - 1 for marker in markers[1:]), len(lines)]
    return [_cell(lines, marker, end) for marker, end in zip(markers, ends, strict=True)]


def _after_header(lines: Sequence[str]) -> int:
    """How many lines Jupytext's own notes at the beginning have, from ``# ---`` to ``# ---``; they say nothing here."""
    if lines[0] == "# ---":
        for number, line in enumerate(lines[1:], 2):
            if line == "# ---":
                return number
            if not line.startswith("#"):
                break
    return 0


def _markers(text: str, lines: Sequence[str]) -> Iterator[int]:
    """Lines, from 1, that begin a cell: what looks like a marker inside of a string is none."""
    for number, comment in _comments(text):
        if _MARKER.fullmatch(comment) and comment == lines[number - 1]:
            yield number
        elif _OTHER_MARKER.match(comment) and lines[number - 1].strip() == comment:
            raise NotPercent(
                number,
                f"{comment.strip()!r} looks like the beginning of a cell; that is # %% at the start of a line",
            )


def _comments(text: str) -> Iterator[tuple[int, str]]:
    """(line from 1, text) of each comment.

    Raises
    ------
    NotPercent
        It is not Python.
    """
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
    except tokenize.TokenError as error:
        raise NotPercent(error.args[1][0], f"not Python: {error.args[0]}") from None
    except SyntaxError as error:
        raise NotPercent(error.lineno or 0, f"not Python: {error.msg}") from None


def _cell(lines: Sequence[str], marker: int, end: int) -> PercentCell:
    """The cell behind a marker's line (from 1), up to the line `end`."""
    found = _MARKER.fullmatch(lines[marker - 1])
    assert found is not None
    options = (found["options"] or "").strip()
    kind = _KIND.match(options)
    metadata = _metadata(options[kind.end() :] if kind else options, marker)
    first = marker
    while first < end and not lines[first].strip():
        first += 1
    while end > first and not lines[end - 1].strip():
        end -= 1
    body = lines[first:end]
    name = kind["kind"] if kind else "code"
    if name != "code":
        body = [_uncommented(line, number) for number, line in enumerate(body, first + 1)]
    return PercentCell(name, "\n".join(body), metadata, min(first + 1, len(lines)))


def _metadata(text: str, line: int) -> dict[str, Any]:
    """``tags=["a"] b=1`` -> a dict; the values are JSON."""
    found: dict[str, Any] = {}
    while text:
        option = _OPTION.match(text)
        try:
            if option is None:
                raise ValueError
            found[option["name"]], used = json.JSONDecoder().raw_decode(text[option.end() :])
        except ValueError:
            raise NotPercent(line, f'{text!r} behind # %% is no option, such as tags=["name"]') from None
        text = text[option.end() + used :].lstrip()
    return found


def _uncommented(line: str, number: int) -> str:
    if line.strip() and not line.startswith("#"):
        raise NotPercent(number, f"{line.strip()[:40]!r} is no comment, and stands in a cell of text")
    return line.removeprefix("# ") if line.startswith("# ") else line.removeprefix("#")
