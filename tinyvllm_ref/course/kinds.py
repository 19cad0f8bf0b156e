"""Whether an answer is the kind of thing that was asked for.

The process that runs a class's answers sees this module; nothing here knows an answer.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

from .exercise import KINDS
from .lab import WrongAnswerType


class Asked(Protocol):
    """The part of an exercise that says what its answer must be."""

    @property
    def answer(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def arguments(self) -> Sequence[str]: ...
    @property
    def uses(self) -> Sequence[str]: ...


class NotFilledIn(Exception):
    """The answer is still what the lesson began with."""


class AnotherAnswer(Exception):
    """What ``check`` was given is not what the recorded cell makes."""


class OutsideNames(NameError):
    """An answer uses names that its cell does not make: it would not run anywhere else."""

    def __init__(self, names: list[str], exercise: Asked) -> None:
        if "check" in names:
            super().__init__("put check(...) into a cell of its own, under the answer")
            return
        them = ", ".join(f"`{name}`" for name in names)
        given = ", ".join(f"`{name}`" for name in ("np", "cp", *exercise.uses))
        super().__init__(
            f"the cell uses {them} from elsewhere in the notebook. An answer is saved and run on its own: "
            f"put what it needs into the cell (it has {given})"
        )


def check_kind(exercise: Asked, answer: Any) -> None:
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


def _check_arguments(exercise: Asked, answer: Any) -> None:
    try:
        inspect.signature(answer).bind(*exercise.arguments)
    except TypeError:
        raise WrongAnswerType(
            f"`{exercise.answer}{inspect.signature(answer)}` can not be called with "
            f"({', '.join(exercise.arguments)})"
        ) from None
