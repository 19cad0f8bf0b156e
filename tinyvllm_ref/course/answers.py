"""From the source of an answer cell to the answer: run alone, with the names that the exercise gives."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from tinyvllm_ref.assembly import Parts

from . import cells, my_engine
from .exercise import KINDS, Exercise
from .lab import WrongAnswerType


class NotFilledIn(Exception):
    """The answer is still what the lesson began with."""


class OutsideNames(NameError):
    """An answer uses names that its cell does not make: it would not run anywhere else."""

    def __init__(self, names: list[str], exercise: Exercise) -> None:
        them = ", ".join(f"`{name}`" for name in names)
        given = ", ".join(f"`{name}`" for name in ("np", "cp", *exercise.uses))
        super().__init__(
            f"the cell uses {them} from elsewhere in the notebook. An answer is saved and run on its own: "
            f"put what it needs into the cell (it has {given})"
        )


def given_names(exercise: Exercise, cp: Any, earlier: Parts | None = None) -> dict[str, Any]:
    """What an answer cell may name: np, cp, and the earlier parts that the exercise uses.

    Parameters
    ----------
    exercise : Exercise
    cp : module
    earlier : Parts, optional
        By default the learner's own, with the reference's where one is missing.
    """
    given: dict[str, Any] = {"np": np, "cp": cp}
    if exercise.uses:
        parts = earlier if earlier is not None else my_engine.parts()
        given |= {name: getattr(parts, name) for name in exercise.uses}
    return given


def make_answer(
    exercise: Exercise,
    source: str,
    cp: Any,
    *,
    earlier: Parts | None = None,
    before: Mapping[str, str] | None = None,
) -> Any:
    """Run an answer cell alone and take the answer from it.

    Parameters
    ----------
    exercise : Exercise
    source : str
        The cell.
    cp : module
        What it gets as ``cp``.
    earlier : Parts, optional
        See :func:`given_names`.
    before : mapping of str to str, optional
        The cells of the exercises that this one builds on; by default those that have passed.

    Raises
    ------
    OutsideNames, NotFilledIn, WrongAnswerType
        Or whatever the cell raises.
    """
    return make_namespace(exercise, source, cp, earlier=earlier, before=before)[exercise.answer]


def make_namespace(
    exercise: Exercise,
    source: str,
    cp: Any,
    *,
    earlier: Parts | None = None,
    before: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """As :func:`make_answer`; gives all names of the cell."""
    given = given_names(exercise, cp, earlier)
    for id in exercise.builds_on:
        first = (before or {}).get(id) or my_engine.answer(id)
        if first is None:
            raise NotFilledIn(f"this exercise builds on {id}, which has not passed yet; do that one first")
        made = cells.run_alone(first, f"exercise {id}", given)
        given |= {name: value for name, value in made.items() if not name.startswith("__")}
    unknown = cells.outside_names(source, given)
    if unknown:
        raise OutsideNames(unknown, exercise)
    namespace = cells.run_alone(source, f"exercise {exercise.id}", given)
    check_kind(exercise, namespace.get(exercise.answer))
    return namespace


def check_kind(exercise: Exercise, answer: Any) -> None:
    """Raise unless the answer is the kind of thing that was asked for."""
    wanted = KINDS[exercise.kind]
    if answer is None or answer is Ellipsis:
        raise NotFilledIn(f"`{exercise.answer}` is {answer}; it must be {wanted}")
    found = type(answer).__name__
    is_right = {
        "kernel": hasattr(answer, "code") and callable(answer),
        "function": callable(answer) and not isinstance(answer, type) and not hasattr(answer, "code"),
        "class": isinstance(answer, type),
        "source": isinstance(answer, str),
        "value": True,
    }[exercise.kind]
    if not is_right:
        raise WrongAnswerType(f"`{exercise.answer}` is {found}; it must be {wanted}")
    if exercise.kind == "function" and exercise.arguments:
        _check_arguments(exercise, answer)


def _check_arguments(exercise: Exercise, answer: Any) -> None:
    try:
        inspect.signature(answer).bind(*exercise.arguments)
    except TypeError:
        raise WrongAnswerType(
            f"`{exercise.answer}{inspect.signature(answer)}` can not be called with "
            f"({', '.join(exercise.arguments)})"
        ) from None
