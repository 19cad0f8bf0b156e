"""``tinyvllm build-lessons``: from a source to what a learner opens."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..cells import fingerprint
from ..regions import to_stub
from . import notebook as files
from . import setup_cell
from .rules import require
from .source import SOLUTION_ONLY, Cell, Lesson, LessonError, Problem, discover, read

_DIFF_LINES = 40
_BACKUP = re.compile(r"\.backup-\d+$")


def to_lesson(lesson: Lesson) -> Any:
    """The lesson's notebook: stubs for regions, no outputs, and the set-up in front of the first code cell.

    Raises
    ------
    LessonError
        The lesson breaks a rule (:mod:`tinyvllm_ref.course.making.rules`).
    """
    require(lesson)
    cells = [_lesson_cell(cell) for cell in lesson.cells if SOLUTION_ONLY not in cell.tags]
    first = next((number for number, cell in enumerate(cells) if cell.cell_type == "code"), len(cells))
    cells.insert(first, _setup_cell())
    # By these a check tells a stub from an answer where there is no source.
    stubs = {
        str(cell.exercise): fingerprint(to_stub(cell.source))
        for cell in lesson.cells
        if cell.role == "answer"
    }
    return files.new(cells, kind="lesson", lesson=lesson.number, source_sha256=lesson.sha256, stubs=stubs)


def _lesson_cell(cell: Cell) -> Any:
    source = to_stub(cell.source) if cell.kind == "code" else cell.source
    own = {**cell.metadata.get("tinyvllm", {}), "sha256": _hash(source)}
    return files.new_cell(cell.kind, source, cell.id, {**cell.metadata, "tinyvllm": own})


def _setup_cell() -> Any:
    own = {"role": "setup", "sha256": _hash(setup_cell.SOURCE)}
    return files.new_cell("code", setup_cell.SOURCE, setup_cell.ID, {**setup_cell.METADATA, "tinyvllm": own})


def _hash(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def lesson_path(root: Path, source: Path) -> Path:
    """Where the lesson of ``solutions/NN_topic.py`` lies."""
    return root / "lessons" / f"{source.stem}.ipynb"


# ---------------- building
def build_lessons(
    root: Path,
    numbers: Iterable[str] = (),
    *,
    force: bool = False,
    into: Path | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Make the lessons.

    Parameters
    ----------
    root : Path
        The folder that has ``solutions/``.
    numbers : iterable of str
        Which lessons; all by default.
    force : bool
        Replace a lesson in which somebody worked; it is kept as ``NN_topic.backup-N.ipynb``.
    into : Path, optional
        The folder that has ``lessons/``, if it is another.
    say : callable
        Given a line for each lesson.

    Raises
    ------
    LessonError
        A source breaks a rule, or a lesson holds somebody's work; the others are made all the same.
    """
    problems: list[Problem] = []
    for source in discover(root, numbers):
        path = lesson_path(into or root, source)
        try:
            data = files.to_bytes(to_lesson(read(source)))
        except LessonError as error:
            problems += error.problems
            continue
        held = work_in(path)
        if held and not force:
            problems.append(Problem(path, 0, "", _refusal(path, held)))
            continue
        kept = f"; the one with work in it is {_back_up(path).name}" if held else ""
        done = "written" if files.write(path, data) else "as it was"
        say(f"{path.parent.name}/{path.name}: {done}{kept}")
    if problems:
        raise LessonError(problems)


def work_in(path: Path) -> list[str]:
    """What somebody did in a lesson since it was made, cell by cell; empty where nothing would be lost.

    A cell is known by the hash of its text that its metadata hold, so this needs no source, and lessons made from
    an older source are told from edited ones.
    """
    if not path.exists():
        return []
    try:
        notebook = files.read(path)
    except ValueError:
        return ["it can not be read as a notebook"]
    found = []
    for number, cell in enumerate(notebook.cells, 1):
        made = cell.metadata.get("tinyvllm", {}).get("sha256")
        lines = cell.source.strip().split("\n")
        name = f"cell {number} ({lines[0][:60]})"
        if made is None and (cell.source.strip() or cell.get("outputs")):
            found.append(f"{name} was added")
        elif made is not None and made != _hash(cell.source):
            found.append(f"{name} was changed")
        elif cell.get("outputs") or cell.get("execution_count") is not None:
            found.append(f"{name} was run")
    return found


def _refusal(path: Path, held: list[str]) -> str:
    listed = "".join(f"\n  {line}" for line in held[:8])
    more = f"\n  and {len(held) - 8} cells more" if len(held) > 8 else ""
    backup = _backup_path(path).name
    return (
        f"somebody worked in it, so it was left as it is:{listed}{more}\n"
        f"  Move it away to keep it, or use --force: it is then kept as {backup}"
    )


def _backup_path(path: Path) -> Path:
    number = 1
    while (backup := path.with_name(f"{path.stem}.backup-{number}.ipynb")).exists():
        number += 1
    return backup


def _back_up(path: Path) -> Path:
    backup = _backup_path(path)
    with open(backup, "xb") as file:  # never in the place of another
        file.write(path.read_bytes())
    return backup


# ---------------- --check
def check_lessons(root: Path, numbers: Iterable[str] = ()) -> None:
    """Compare the lessons with what would be made.

    Raises
    ------
    LessonError
        One is missing or differs, with the first lines of the difference, or has no source.
    """
    numbers = list(numbers)
    sources = discover(root, numbers)
    problems: list[Problem] = []
    for source in sources:
        try:
            problems += _compare(lesson_path(root, source), to_lesson(read(source)))
        except LessonError as error:
            problems += error.problems
    if not numbers:
        known = {source.stem for source in sources}
        for path in sorted((root / "lessons").glob("*.ipynb")):
            if _BACKUP.sub("", path.stem) not in known:
                problems.append(
                    Problem(path, 0, "", f"there is no solutions/{path.stem}.py that it comes from")
                )
    if problems:
        raise LessonError(problems)


def _compare(path: Path, wanted: Any) -> list[Problem]:
    again = f"run `make lessons ONLY={path.stem[:2]}`"
    if not path.exists():
        return [Problem(path, 0, "", f"is not there; {again}")]
    if path.read_bytes() == files.to_bytes(wanted):
        return []
    try:
        found = files.read(path)
    except ValueError as error:
        return [Problem(path, 0, "", f"{error}; {again}")]
    where = f"{path.parent.name}/{path.name}"
    lines = list(
        difflib.unified_diff(
            _as_text(found), _as_text(wanted), where, "as it would be made", lineterm="", n=1
        )
    )
    if not lines:  # the layout of the JSON, or metadata
        left, right = (files.to_bytes(found), files.to_bytes(wanted))
        lines = list(
            difflib.unified_diff(left.decode().split("\n"), right.decode().split("\n"), lineterm="", n=1)
        )
    more = f"\n({len(lines) - _DIFF_LINES} lines more)" if len(lines) > _DIFF_LINES else ""
    diff = "".join(f"\n{line}" for line in lines[:_DIFF_LINES])
    return [Problem(path, 0, "", f"is not what its source makes; {again}{diff}{more}")]


def _as_text(notebook: Any) -> list[str]:
    """A notebook for a reader of differences."""
    lines = []
    for cell in notebook.cells:
        lines += [f"%% {cell.cell_type} {cell.get('id', '')}", *cell.source.split("\n")]
        lines += [f"(output) {output.output_type}" for output in cell.get("outputs", ())]
    return lines
