"""``hint``, ``solution``, ``reset``: help on request, and a way back to the beginning."""

from __future__ import annotations

from typing import Any

from . import cells, my_engine, notebook, store
from .checking import SEED
from .exercise import Exercise, Prediction
from .exercises import exercise_of, lesson_of
from .judging import cases_of
from .lessons import solution_cell, stub_cell
from .reports import HintCard

_TIERS = 3


def hint(id: str, tier: int | None = None) -> None:
    """Show the next hint for an exercise; each call goes one tier further, and none costs points.

    Parameters
    ----------
    id : str
        Such as ``"06.2"``.
    tier : int, optional
        1 asks about your smallest failing case; 2 gives the rule and an example by hand; 3 gives code with
        holes. 2 and 3 open once a check has failed.
    """
    exercise = exercise_of(id)
    entry = store.entry(id)
    may_see = _TIERS if entry.get("failed") or entry.get("passed") or isinstance(exercise, Prediction) else 1
    seen = entry.get("hints", [])
    wanted = tier if tier is not None else min(max(seen, default=0) + 1, _TIERS)
    if wanted not in range(1, _TIERS + 1):
        raise ValueError(f"hint({id!r}, {tier!r}): the tiers are 1, 2 and 3")
    note = ""
    if wanted > may_see:
        wanted, note = may_see, "Tiers 2 and 3 open after a check that failed: try, and run the check."
    elif wanted < may_see:
        note = f'hint("{id}") again goes further.'
    elif wanted < _TIERS:
        note = "After a check that failed it goes further."

    def change(entry: dict[str, Any]) -> None:
        entry["hints"] = sorted({*entry.get("hints", []), wanted})

    store.update(id, change)
    text = _text(exercise, wanted, entry)
    notebook.display(HintCard(exercise=id, tier=wanted, text=text, is_code=wanted == _TIERS, note=note))


def _text(exercise: Exercise | Prediction, tier: int, entry: dict[str, Any]) -> str:
    if tier == 1:
        if isinstance(exercise, Exercise):
            for mistake in exercise.mistakes:
                if mistake.name == entry.get("mistake"):
                    return mistake.question
        return exercise.hints.question.replace("{case}", entry.get("case") or _smallest(exercise))
    return exercise.hints.rule if tier == 2 else exercise.hints.code


def _smallest(exercise: Exercise | Prediction) -> str:
    """The label of an exercise's first case, for whoever asks before a check has failed."""
    return cases_of(exercise, SEED)[0][0].label if isinstance(exercise, Exercise) else ""


def solution(id: str, anyway: bool = False) -> None:
    """Show a solution, once the exercise has passed.

    Parameters
    ----------
    id : str
    anyway : bool
        Show it before that.
    """
    exercise = exercise_of(id)
    if not store.entry(id).get("passed") and not anyway:
        print(f'{id} has not passed yet. hint("{id}") helps; solution("{id}", anyway=True) shows it now.')
        return
    text = solution_cell(id) if isinstance(exercise, Exercise) else exercise.explains
    if text is None:
        print(f"the solution of {id} is not in this copy of the course")
        return
    note = "One way to do it; yours may be as good."
    is_code = isinstance(exercise, Exercise)
    notebook.display(HintCard(exercise=id, tier=0, text=text, is_code=is_code, note=note))


_put_in: dict[str, str] = {}  # exercise -> the cell that was recorded when its last fresh stub was put in


def reset(id: str) -> None:
    """Begin an exercise (``"06.2"``) or a lesson (``"06"``) again.

    Its progress is forgotten, and its parts leave ``my_engine/``; the files are moved to ``my_engine/removed/``.
    A new cell gets the stub of an exercise, unless the last one that it got is still as it was.
    """
    whole = "." not in id
    chosen = lesson_of(id).exercises if whole else (exercise_of(id),)
    moved = []
    for exercise in chosen:
        store.update(exercise.id, lambda entry: entry.clear())
        if isinstance(exercise, Exercise):
            moved += my_engine.remove(exercise)
    print(
        f"{'lesson' if whole else 'exercise'} {id} is as at the beginning. {_cells_after_reset(id, whole)}".rstrip()
    )
    for path in moved:
        print(f"what had passed is now {path}")


def _cells_after_reset(id: str, whole: bool) -> str:
    """Put a fresh stub into the next cell where there is none yet; what became of the cells, in words."""
    if not notebook.in_notebook():
        return ""
    if whole:
        return "The cells of the notebook are untouched."
    stub = stub_cell(id)
    if stub is None:
        return "Your answer's cell is untouched."
    now = cells.recorded(id) or ""
    if cells.fingerprint(now) == cells.fingerprint(stub) or _put_in.get(id) == now:
        return (
            "There is a stub already that has not been filled in, so no second one is put in. "
            "If you deleted its cell, Esc and Z bring it back."
        )
    from IPython import get_ipython

    _put_in[id] = now
    get_ipython().set_next_input(stub)
    return "A fresh stub is in the next cell; your answer below is untouched. check takes the one that you run last."
