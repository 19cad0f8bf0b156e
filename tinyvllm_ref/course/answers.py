"""From the source of an answer cell to the answer: run alone, with the names that the exercise gives."""

from __future__ import annotations

import dis
from collections.abc import Mapping
from types import CodeType
from typing import Any

import numpy as np

from tinyvllm_ref.assembly import Parts

from . import cells, my_engine
from .exercise import Exercise
from .kinds import NotFilledIn, OutsideNames, check_kind


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
        # An engine leaves out the attention parts that it does not call; an answer may still name them.
        given |= {name: getattr(parts, name) or getattr(Parts.reference(), name) for name in exercise.uses}
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


def same_answer(given: Any, made: Any) -> bool:
    """Whether two answers come from the same source: kernels by their text, functions by their code."""
    if hasattr(given, "code") and hasattr(made, "code"):
        return bool(given.code == made.code and given.name == made.name)
    if isinstance(given, type) and isinstance(made, type):
        return given.__qualname__ == made.__qualname__ and vars(given).keys() == vars(made).keys()
    if hasattr(given, "__code__") and hasattr(made, "__code__"):
        return _steps(given.__code__) == _steps(made.__code__)
    if type(given) is not type(made):
        return False
    return not isinstance(made, str) or bool(given == made)


# A module that was imported in the same piece of source is called in another way than one that was not, and a notebook
# compiles a cell statement by statement: so `import json` above a function changes its bytecode, and not its meaning.
_SAME_STEP = {"LOAD_METHOD": "LOAD_ATTR"}
_NO_STEP = frozenset({"CACHE", "NOP", "PRECALL", "PUSH_NULL"})


def _steps(code: CodeType) -> list[tuple[str, Any]]:
    """What a function's bytecode does, step by step: names and constants, without where they lie."""
    steps: list[tuple[str, Any]] = []
    for step in dis.get_instructions(code):
        if step.opname in _NO_STEP:
            continue
        what = None if step.opcode in (*dis.hasjrel, *dis.hasjabs) else step.argval
        steps.append(
            (_SAME_STEP.get(step.opname, step.opname), _steps(what) if isinstance(what, CodeType) else what)
        )
    return steps


__all__ = ["NotFilledIn", "OutsideNames", "check_kind", "given_names", "make_answer", "make_namespace"]
