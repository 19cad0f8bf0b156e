"""The answers in a notebook that somebody handed in: its cells are read, and nothing else of it is used."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import cells

MOST_BYTES = 20 << 20
_LONGEST_ANSWER = 200_000  # characters


class Unreadable(ValueError):
    """A file that is no notebook; the message says what it is."""


@dataclass
class Answers:
    """What was found in a learner's notebooks of one lesson.

    Attributes
    ----------
    sources : dict of str to str
        Exercise -> the cell.
    problems : dict of str to str
        Exercise -> why there is no answer to judge, such as two of them.
    notes : list of str
    """

    sources: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Cell:
    """A code cell that may be an answer.

    Attributes
    ----------
    source : str
    by_comment, by_metadata : str or None
        The exercise that its comment says, and that its metadata say.
    untouched : bool
        It is as the lesson was made, by the hash in its metadata; the lesson may be older than this one.
    """

    source: str
    by_comment: str | None
    by_metadata: str | None
    untouched: bool = False


def read_cells(data: bytes) -> list[Cell]:
    """The code cells of a notebook.

    Raises
    ------
    Unreadable
    """
    if len(data) > MOST_BYTES:
        raise Unreadable(f"it has {len(data):,} bytes; a notebook has at most {MOST_BYTES:,}")
    try:
        notebook = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise Unreadable(f"it is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise Unreadable("its JSON is nested too deep") from None
    except ValueError as error:
        raise Unreadable(f"it is not JSON ({error})") from None
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        raise Unreadable("it is JSON, and no notebook: there is no list of cells (nbformat 4)")
    return [found for cell in notebook["cells"] if (found := _code_cell(cell)) is not None]


def _code_cell(cell: Any) -> Cell | None:
    if not isinstance(cell, dict) or cell.get("cell_type") != "code":
        return None
    source = cell.get("source", "")
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        source = "".join(source)
    if not isinstance(source, str):
        return None
    source = source.replace("\r\n", "\n").replace("\r", "\n").encode("utf-8", "replace").decode()
    metadata = cell.get("metadata")
    own = metadata.get("tinyvllm") if isinstance(metadata, dict) else None
    by_metadata = None
    if isinstance(own, dict) and own.get("role") in ("answer", "predict"):
        id = own.get("exercise")
        by_metadata = id if isinstance(id, str) and re.fullmatch(r"\d\d\.\d+", id) else None
    made = own.get("sha256") if isinstance(own, dict) else None
    untouched = isinstance(made, str) and made == hashlib.sha256(source.encode()).hexdigest()[:16]
    return Cell(source, cells.exercise_of(source), by_metadata, untouched)


def lessons_in(found: Sequence[Cell]) -> dict[str, int]:
    """Lesson -> how many of the cells are answers to it."""
    counts = dict[str, int]()
    for cell in found:
        id = cell.by_comment or cell.by_metadata
        if id is not None:
            counts[id[:2]] = counts.get(id[:2], 0) + 1
    return counts


def take_answers(found: Sequence[Cell], wanted: Sequence[str], stubs: dict[str, str | None]) -> Answers:
    """The answers to some exercises.

    Parameters
    ----------
    found : sequence of Cell
        Of all of a learner's notebooks of the lesson.
    wanted : sequence of str
        The exercises, in order.
    stubs : dict
        Exercise -> fingerprint of its stub; None where it is not known.

    Notes
    -----
    The comment decides; metadata are used where no cell has the comment, for people delete comments. Where several
    cells answer one exercise, stubs among them are left out, and equal ones count as one.
    """
    answers = Answers()
    for id in wanted:
        candidates = [cell for cell in found if cell.by_comment == id]
        if not candidates:
            candidates = [cell for cell in found if cell.by_comment is None and cell.by_metadata == id]
            if candidates:
                answers.notes.append(f"{id}: its comment is gone; found by the cell's metadata")
        moved = [cell for cell in candidates if cell.by_metadata not in (None, id)]
        if moved:
            answers.notes.append(
                f"{id}: the cell's metadata say {moved[0].by_metadata}; its comment was followed"
            )
        _choose(answers, id, candidates, stubs.get(id))
    several = [id for id in answers.sources if len([cell for cell in found if _is(cell, id)]) > 1]
    if several:
        answers.notes.append(
            f"{', '.join(several)}: several cells answer it, alike or not filled in; one was taken"
        )
    others = sorted({cell.by_comment for cell in found if cell.by_comment} - set(wanted))
    if others:
        answers.notes.append(f"answers to {', '.join(others)} are not of this lesson, and were left out")
    return answers


def _is(cell: Cell, id: str) -> bool:
    return id == (cell.by_comment or cell.by_metadata)


def _choose(answers: Answers, id: str, candidates: Sequence[Cell], stub: str | None) -> None:
    if not candidates:
        answers.problems[id] = "missing"
        return
    if any(len(cell.source) > _LONGEST_ANSWER for cell in candidates):
        answers.problems[id] = "too long"
        return
    by_print = {cells.fingerprint(cell.source): cell.source for cell in candidates if not cell.untouched}
    filled = {mark: source for mark, source in by_print.items() if mark != stub}
    if len(filled) > 1:
        answers.problems[id] = "duplicate"
        answers.notes.append(f"{id}: {len(filled)} different cells answer it")
    elif not filled:
        answers.problems[id] = "not filled in"
    else:
        (answers.sources[id],) = filled.values()
