"""The source of a lesson: found, read by Jupytext, and its cells told apart."""

from __future__ import annotations

import hashlib
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...installing import install_extra
from ..cells import exercise_of
from .identity import ids_of, role_of, slug

SOLUTION_ONLY = "solution-only"
IGNORE_OUTPUT = "nbval-ignore-output"

_NAME = re.compile(r"(\d\d)_[a-z0-9_]+")
_MARKER = re.compile(r"# ?%%(\s|$)")
_MAGIC = re.compile(r"([ \t]*)# (%{1,2}[A-Za-z].*|![A-Za-z.~$/].*)")


@dataclass(frozen=True)
class Problem:
    """Something in a lesson that must be mended.

    Attributes
    ----------
    path : Path
    line : int
        Of the file, from 1; 0 where it is of no line.
    cell : str
        The cell's id; empty where it is of no cell.
    message : str
    """

    path: Path
    line: int
    cell: str
    message: str

    def __str__(self) -> str:
        line = f":{self.line}" if self.line else ""
        cell = f" cell {self.cell}:" if self.cell else ""
        return f"{self.path.parent.name}/{self.path.name}{line}:{cell} {self.message}"


class LessonError(ValueError):
    """A lesson can not be made; `problems` says all that was found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


@dataclass(frozen=True)
class Cell:
    """A cell as it stands in the source.

    Attributes
    ----------
    id : str
        The same in the solution and in the lesson.
    kind : str
        ``code``, ``markdown`` or ``raw``.
    source : str
        As in the notebook of the solution: regions as written, magics as magics.
    python : str
        The same with magics as comments.
    metadata : dict
        As written behind ``# %%``; ``tinyvllm`` is added.
    line : int
        Of the file, from 1: where the cell's text begins.
    exercise : str or None
        Such as ``06.2``.
    role : str or None
        ``answer``, or one of :data:`~tinyvllm_ref.course.making.identity.ROLES`.
    calls : frozenset of str
        Which of these functions it calls, outside of functions and classes.
    """

    id: str
    kind: str
    source: str
    python: str
    metadata: dict[str, Any]
    line: int
    exercise: str | None = None
    role: str | None = None
    calls: frozenset[str] = frozenset()

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(self.metadata.get("tags", ()))

    @property
    def is_answer(self) -> bool:
        """Is it a learner's to fill in?"""
        return self.kind == "code" and exercise_of(self.source) is not None


@dataclass(frozen=True)
class Lesson:
    """A source that was read.

    Attributes
    ----------
    path : Path
        ``solutions/NN_topic.py``.
    sha256 : str
        Of its text, line ends as ``\\n``.
    cells : tuple of Cell
    """

    path: Path
    sha256: str
    cells: tuple[Cell, ...]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def number(self) -> str:
        return self.name[:2]


# ---------------- finding
def discover(root: Path, numbers: Iterable[str] = ()) -> list[Path]:
    """The sources in ``solutions/``, all of them or those that `numbers` names.

    Parameters
    ----------
    root : Path
        The folder that has ``solutions/`` and ``lessons/``.
    numbers : iterable of str
        ``06``, ``6``, ``06_tree_reduction`` or a path of any of its three files.

    Raises
    ------
    ValueError
        A file's name is not ``NN_topic.py``, two have one number, or a number has no file.
    """
    found: dict[str, Path] = {}
    for path in sorted((root / "solutions").glob("*.py")):
        if not _NAME.fullmatch(path.stem):
            raise ValueError(
                f"solutions/{path.name}: a lesson's name must be NN_topic.py, such as 06_tree_reduction.py"
            )
        if path.stem[:2] in found:
            raise ValueError(
                f"solutions/{path.name} and {found[path.stem[:2]].name} are both lesson {path.stem[:2]}"
            )
        found[path.stem[:2]] = path
    asked = [_number(text) for text in numbers]
    missing = [number for number in asked if number not in found]
    if missing:
        there = ", ".join(found) or "none"
        raise ValueError(f"no solutions/{missing[0]}_*.py; the lessons there are: {there}")
    return [found[number] for number in sorted(set(asked))] if asked else list(found.values())


def _number(text: str) -> str:
    found = re.match(r"(\d{1,2})(?=_|$)", Path(text).name)
    if not found:
        raise ValueError(f"{text!r} names no lesson; give a number such as 06")
    return found[1].zfill(2)


# ---------------- reading
def read(path: Path) -> Lesson:
    """Read a source.

    Raises
    ------
    LessonError
        It is not UTF-8, not Python, or not in the percent format.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise LessonError([Problem(path, 0, "", f"not UTF-8 at byte {error.start}")]) from None
    starts = _cell_starts(path, text)
    notebook = _jupytext(path, text)
    if len(notebook.cells) != len(starts):
        message = (
            f"{len(starts)} cells are marked with # %% at the start of a line, and Jupytext sees "
            f"{len(notebook.cells)}; text before the first marker, an indented # %% or # In[1] make such a difference"
        )
        raise LessonError([Problem(path, 0, "", message)])
    raw = [
        _RawCell(cell.cell_type, cell.source, _metadata(cell.metadata), line)
        for cell, line in zip(notebook.cells, starts, strict=True)
    ]
    return Lesson(path, hashlib.sha256(text.encode()).hexdigest(), tuple(_identify(path, raw)))


def _jupytext(path: Path, text: str) -> Any:
    try:
        import jupytext
    except ImportError:
        raise ValueError(f"jupytext is not installed: {install_extra('grade')}") from None
    try:
        return jupytext.reads(
            text, fmt={"extension": ".py", "format_name": "percent", "comment_magics": False}
        )
    except Exception as error:  # of YAML, of nbformat's schema, its own
        reason = str(error).strip().split("\n")[0]
        raise LessonError([Problem(path, 0, "", f"Jupytext can not read it: {reason}")]) from None


def _cell_starts(path: Path, text: str) -> list[int]:
    """The line, from 1, on which each cell's text begins."""
    lines = text.split("\n")
    markers = [
        line
        for line, comment in _comments(path, text)
        if _MARKER.match(comment) and comment == lines[line - 1]
    ]
    starts = []
    for marker in markers:
        first = marker + 1
        while first <= len(lines) and not lines[first - 1].strip():
            first += 1
        starts.append(min(first, len(lines)))
    return starts


def _comments(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """(line from 1, text) of each comment: what looks like one inside of a string is none."""
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
    except tokenize.TokenError as error:
        raise LessonError([Problem(path, error.args[1][0], "", f"not Python: {error.args[0]}")]) from None
    except SyntaxError as error:
        raise LessonError([Problem(path, error.lineno or 0, "", f"not Python: {error.msg}")]) from None


def _with_magics(source: str) -> str:
    """Commented magics become magics; comments inside of strings and others stay."""
    lines = source.split("\n")
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    for number in [token.start[0] - 1 for token in tokens if token.type == tokenize.COMMENT]:
        match = _MAGIC.fullmatch(lines[number])
        if match:
            lines[number] = match[1] + match[2]
    return "\n".join(lines)


def _metadata(metadata: Any) -> dict[str, Any]:
    """What was written behind the marker, without Jupytext's own notes."""
    own = {"lines_to_next_cell", "lines_to_end_of_cell_marker", "cell_marker", "title", "tinyvllm"}
    return {name: value for name, value in metadata.items() if name not in own}


# ---------------- what a cell is
@dataclass(frozen=True)
class _RawCell:
    kind: str
    source: str
    metadata: dict[str, Any]
    line: int


def _identify(path: Path, cells: list[_RawCell]) -> Iterator[Cell]:
    problems = []
    found: list[tuple[_RawCell, str | None, str | None, frozenset[str]]] = []
    for cell in cells:
        exercise, role, calls = None, None, frozenset[str]()
        if cell.kind == "code":
            try:
                exercise, role, calls = role_of(cell.source)
            except SyntaxError as error:
                line = cell.line + (error.lineno or 1) - 1
                problems.append(Problem(path, line, slug(cell.source), f"not valid Python: {error.msg}"))
        found.append((cell, exercise, role, calls))
    if problems:
        raise LessonError(problems)
    ids = ids_of([(cell.source, exercise, role) for cell, exercise, role, _ in found])
    for (cell, exercise, role, calls), name in zip(found, ids, strict=True):
        metadata = dict(cell.metadata)
        if role:
            metadata["tinyvllm"] = {"role": role, **({"exercise": exercise} if exercise else {})}
        source = _with_magics(cell.source) if cell.kind == "code" else cell.source
        yield Cell(name, cell.kind, source, cell.source, metadata, cell.line, exercise, role, calls)
