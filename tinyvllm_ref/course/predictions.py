"""``predict``: a number is written down before it is measured."""

from __future__ import annotations

import math
from typing import Any

from . import notebook, store
from .checking import CheckFailed
from .course_progress import lesson_complete
from .exercise import Prediction
from .exercises import exercise_of, lesson_of
from .reports import Report


def predict(id: str, **numbers: Any) -> None:
    """Commit to a prediction. Any number is credited; the measured ones are drawn beside it.

    Parameters
    ----------
    id : str
        Such as ``"06.4"``.
    **numbers
        What the exercise asks for, by name.

    Raises
    ------
    CheckFailed
        A number is missing, or is none.
    """
    exercise = exercise_of(id)
    if not isinstance(exercise, Prediction):
        raise TypeError(f'{id} is no prediction: check("{id}", {exercise.answer})')
    wanted = exercise.quantities
    unknown = [name for name in numbers if name not in wanted]
    if unknown:
        raise TypeError(f"predict({id!r}) has no {unknown[0]!r}; it asks for {', '.join(wanted)}")
    empty = [name for name in wanted if numbers.get(name) is None or numbers.get(name) is ...]
    if empty:
        _fail(exercise, "not filled in", f"Not filled in yet: write down a number for `{empty[0]}`.")
    odd = [name for name in wanted if not _is_number(numbers[name])]
    if odd:
        _fail(exercise, "error", f"`{odd[0]}` is {numbers[odd[0]]!r}; it must be a number")
    was_complete = lesson_complete(exercise.lesson)

    def change(entry: dict[str, Any]) -> None:
        entry["predicted"] = {name: _plain(numbers[name]) for name in wanted}
        entry.setdefault("passed", store.now())

    store.update(id, change)
    listed = ", ".join(f"{name} = {in_words(_plain(numbers[name]))}" for name in wanted)
    print(f"{id} noted: {listed}")
    if not was_complete and lesson_complete(exercise.lesson):
        notebook.celebrate(lesson_of(id))


def predicted(id: str) -> dict[str, float]:
    """What was predicted; empty where nothing was."""
    return dict(store.entry(id).get("predicted", {}))


def in_words(number: float) -> str:
    """A predicted number as it is shown: ``16,777,216`` or ``159.155``, without the digits that nobody wrote."""
    return f"{number:,}" if isinstance(number, int) else f"{number:,.6g}"


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, bool | str) and math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def _plain(value: Any) -> float:
    number = float(value)
    return int(number) if number.is_integer() else number


def _fail(exercise: Prediction, kind: str, headline: str) -> None:
    report = Report(exercise.id, exercise.title, headline, kind, next_step=f'hint("{exercise.id}")')
    notebook.display(report)
    raise CheckFailed(report) from None
