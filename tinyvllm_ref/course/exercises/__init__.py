"""The exercises of the course: one module a lesson, found by discovery. Each has a ``LESSON``."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from tinyvllm_ref.course.exercise import Exercise, Lesson, Prediction


class _OneLine(Exception):
    """An error whose message says it all: in a notebook that line alone is shown, as of a check that fails."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__base__.__name__}: {self}"]  # type: ignore[union-attr]


class _NoSuchExercise(LookupError, _OneLine):
    """An exercise or a lesson that there is not."""


class _NoId(TypeError, _OneLine):
    """What is given as an exercise's id is no text."""


@functools.cache
def lessons() -> dict[str, Lesson]:
    """All lessons, by number, in order. A module is named ``lesson_NN_topic``."""
    return {_number(module): _load(module) for module in _modules()}


def lesson_of(id: str) -> Lesson:
    """The lesson of an exercise or of a lesson's number: ``"06.2"``, ``"06"``.

    Raises
    ------
    LookupError
        There is none; the message says which there are.
    """
    number = str(id).partition(".")[0]
    if number not in _numbers():
        raise _NoSuchExercise(f"there is no lesson {number!r}; the lessons are {', '.join(_numbers())}")
    return _load(next(name for name in _modules() if _number(name) == number))


def exercise_of(id: str) -> Exercise | Prediction:
    """An exercise by its id, such as ``"06.2"``.

    Raises
    ------
    LookupError
        There is none; the message says which there are.
    """
    if not isinstance(id, str):
        raise _NoId(f"an exercise is named by a string such as '06.2', not by {type(id).__name__} {id!r}")
    lesson = lesson_of(id)
    for exercise in lesson.exercises:
        if exercise.id == id:
            return exercise
    known = ", ".join(exercise.id for exercise in lesson.exercises)
    raise _NoSuchExercise(f"there is no exercise {id!r}; lesson {lesson.number} has {known}")


def _load(module: str) -> Lesson:
    lesson: Lesson = importlib.import_module(f"{__name__}.{module}").LESSON
    if lesson.number != _number(module):
        raise ValueError(
            f"{module}.py holds lesson {lesson.number!r}; the file's name says {_number(module)!r}"
        )
    return lesson


def _modules() -> list[str]:
    return sorted(found.name for found in pkgutil.iter_modules(__path__) if found.name.startswith("lesson_"))


def _number(module: str) -> str:
    return module.removeprefix("lesson_")[:2]


def _numbers() -> list[str]:
    return [_number(module) for module in _modules()]
