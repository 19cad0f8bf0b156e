"""nbval beside the judge: the pristine lesson with a learner's answers in it, run as a notebook in containment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

from .. import cells
from . import runtime
from .containment import Place, place
from .limits import Limits
from .process import Process, Stopped

CELL_SECONDS = 120
# Cells that draw, measure and tell a story. Nothing is checked in them, and the story takes as long as all the rest.
_SHOWING = ("show", "measure", "show_engine", "progress")
_MODULE = "tinyvllm_ref.course.grading.notebook_process"


@dataclass(frozen=True)
class Beside:
    """What nbval says.

    Attributes
    ----------
    ran : bool
    passed : mapping of str to bool
        Exercise -> whether its check's cell passed.
    says : str
        Why it did not run.
    errors : mapping of str to str
        Exercise -> how its check's cell failed.
    """

    ran: bool
    passed: Mapping[str, bool]
    says: str = ""
    errors: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def with_answers(lesson: str, answers: Mapping[str, str]) -> str:
    """A lesson's notebook (its JSON) with answers in the place of the stubs, and without what only shows something."""
    notebook = json.loads(lesson)
    notebook["cells"] = [cell for cell in notebook["cells"] if _role(cell) not in _SHOWING]
    for cell in notebook["cells"]:
        id = _answer_id(cell)
        if id is not None and id in answers:
            cell["source"] = answers[id]
    return json.dumps(notebook)


def run_beside(lesson: str, answers: Mapping[str, str], level: str, limits: Limits) -> Beside:
    """Run a lesson with answers under nbval.

    Parameters
    ----------
    lesson : str
        The pristine notebook's JSON.
    answers : mapping of str to str
    level : str
    limits : Limits
    """
    text = with_answers(lesson, answers)
    message = {"notebook": text, "cell_seconds": CELL_SECONDS}
    try:
        with _place(level, limits) as where, Process(where, limits) as process:
            reply = process.ask(message, limits.nbval_seconds)
    except Stopped as stopped:
        return Beside(False, {}, str(stopped))
    passed = reply.get("passed")
    if not isinstance(passed, list) or not all(isinstance(number, int) for number in passed):
        return Beside(False, {}, f"pytest gave no report: {reply.get('said', '')!s:.600}")
    failed = reply.get("failed")
    said = {number: str(line) for number, line in failed} if isinstance(failed, list) else {}
    checks = _check_cells(text)
    return Beside(
        True,
        {id: number in passed for id, number in checks.items()},
        errors={id: said[number] for id, number in checks.items() if said.get(number)},
    )


def _place(level: str, limits: Limits) -> AbstractContextManager[Place]:
    return place(level, limits, runtime.notebook_tree(), _MODULE, runtime.notebook_seed())


def _check_cells(text: str) -> dict[str, int]:
    """Exercise -> number of the cell that checks it, as nbval counts: code cells from 0."""
    found = {}
    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code):
        own = cell["metadata"].get("tinyvllm", {})
        if own.get("role") in ("check", "predict") and own.get("exercise"):
            found[own["exercise"]] = number
    return found


def _role(cell: Any) -> str:
    return str(cell["metadata"].get("tinyvllm", {}).get("role", ""))


def _answer_id(cell: Any) -> str | None:
    if cell["cell_type"] != "code":
        return None
    source = cell["source"]
    return cells.exercise_of(source if isinstance(source, str) else "".join(source))
