"""The files of the lessons: where a cell's stub and its solution are found."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path

from tinyvllm_ref.checkpoint.names import REPOSITORY

from . import cells, regions
from .exercises import lesson_of
from .making.identity import slug


def solution_file(number: str) -> Path:
    """The source of a lesson, ``solutions/NN_topic.py``; a class's copy has none."""
    lesson = lesson_of(number)
    return REPOSITORY / "solutions" / f"{lesson.number}_{lesson.slug}.py"


def lesson_file(number: str) -> Path:
    """The notebook that a learner opens."""
    lesson = lesson_of(number)
    return REPOSITORY / "lessons" / f"{lesson.number}_{lesson.slug}.ipynb"


def solution_cell(id: str) -> str | None:
    """The answer cell of the solution, as it is in the source; None where there is no source."""
    return _cells(solution_file(id), solution=True).get(id)


def stub_cell(id: str) -> str | None:
    """The answer cell that the lesson begins with; None where that is not known."""
    return _cells(solution_file(id), solution=False).get(id)


def stub_fingerprint(id: str) -> str | None:
    """The fingerprint of the stub: from the source, else from what the lesson's notebook records."""
    stub = stub_cell(id)
    if stub is not None:
        return cells.fingerprint(stub)
    try:
        metadata = json.loads(lesson_file(id).read_text(encoding="utf-8"))["metadata"]
        found = metadata["tinyvllm"]["stubs"][id]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


def heading_of(id: str) -> tuple[str, str] | None:
    """The cell of an exercise's heading, and the heading: the same in both notebooks; None where that is not known."""
    pattern = re.compile(rf"^#+ ({re.escape(id)}\b.*)$", re.MULTILINE)
    found = ((cell, pattern.search(text)) for cell, text in _texts(id))
    return next(((cell, heading[1]) for cell, heading in found if heading), None)


def _texts(number: str) -> Iterator[tuple[str, str]]:
    """The id and the text of each cell of a lesson; comments of the source lose their mark."""
    try:
        source = solution_file(number).read_text(encoding="utf-8")
    except OSError:
        try:
            notebook = json.loads(lesson_file(number).read_text(encoding="utf-8"))
            yield from [(str(cell["id"]), "".join(cell["source"])) for cell in notebook["cells"]]
        except (OSError, ValueError, KeyError, TypeError):
            return
    else:
        for cell in _MARKER.split(source):
            text = re.sub(r"^# ?", "", cell, flags=re.MULTILINE)
            yield slug(text), text


_MARKER = re.compile(r"^# %%.*$", re.MULTILINE)


def _cells(path: Path, *, solution: bool) -> dict[str, str]:
    """Answer cells of a source by exercise, with the solutions or as stubs."""
    try:
        changed = path.stat().st_mtime_ns
    except OSError:
        return {}
    return _read_cells(path, changed, solution)


@functools.lru_cache(maxsize=64)
def _read_cells(path: Path, changed: int, solution: bool) -> dict[str, str]:
    make = regions.to_solution if solution else regions.to_stub
    found = {}
    for text in _MARKER.split(path.read_text(encoding="utf-8")):
        id = cells.exercise_of(text)
        if id is not None:
            found[id] = make(text.strip("\n"))
    return found
