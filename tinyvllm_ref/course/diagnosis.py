"""Which known mistake a failing answer makes: its results are compared with those of each mistake."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from tinyvllm_ref import emulation

from .answers import make_answer
from .exercise import Exercise, Mistake
from .judging import CaseResult, Verdict, cases_of, judge_case

_MOST_CASES = 4


def find_mistake(
    verdict: Verdict,
    seed: int = 0,
    before: Mapping[str, str] | None = None,
    seconds: float | None = None,
    source: str = "",
) -> Mistake | None:
    """The mistake whose results are those of the failing answer, in every case that is looked at.

    The cases are the smallest that fail and one that passes, if there is one: a mistake that fails more is another.
    All was and is run in emulation. `before` is as for :func:`~tinyvllm_ref.course.answers.make_answer`.

    With `seconds` the search ends after that time. What was run by then is kept, and compiled kernels are kept on
    disk: the same answer's next check goes on where this one ended. With `source`, the text of the failing answer, the
    mistakes whose text is most like it are tried first: they are found before the time is up.
    """
    ends = time.monotonic() + seconds if seconds is not None else math.inf
    failing = [result for result in verdict.results if not result.passed]
    passing = [result for result in verdict.results if result.passed]
    looked_at = [*failing[: _MOST_CASES - 1], *passing[:1]]
    known = [(mistake, answer) for mistake in verdict.exercise.mistakes for answer in mistake.answers]
    if source:
        mine = _triples(source)
        known.sort(key=lambda pair: len(mine ^ _triples(pair[1])))
    for mistake, answer in known:
        if time.monotonic() > ends:
            return None
        if all(_fails_as(verdict.exercise, answer, result, seed, before) for result in looked_at):
            return mistake
    return None


def _triples(source: str) -> set[tuple[str, ...]]:
    """Every three words or signs that stand side by side."""
    words = re.findall(r"\w+|\S", source)
    return set(zip(words, words[1:], words[2:], strict=False))


_results: dict[tuple[str, str, int, str], CaseResult] = {}  # exercise, answer, seed, case


def _fails_as(
    exercise: Exercise, source: str, result: CaseResult, seed: int, before: Mapping[str, str] | None
) -> bool:
    """Whether the mistake fails in this case as the answer did."""
    key = (exercise.id, source, seed, result.case.label)
    if key not in _results:
        expected = next(
            wanted for case, wanted in cases_of(exercise, seed) if case.label == result.case.label
        )
        answer = make_answer(exercise, source, emulation, before=before)
        _results[key] = judge_case(exercise, answer, result.case, expected, emulation)
    return same_signature(_results[key], result)


def same_signature(one: CaseResult, other: CaseResult) -> bool:
    """The same kind of fault (or none), and the same values, to rounding."""
    kinds = [result.outcome.fault.kind if result.outcome.fault else None for result in (one, other)]
    if kinds[0] != kinds[1]:
        return False
    if kinds[0] == "OutOfBounds":
        # Without the checks such a kernel gets whatever lies there, which is not the same twice; a kernel whose values
        # come out right all the same is another than one whose do not.
        return _numbers_in(one) == _numbers_in(other) and _ended(one) == _ended(other)
    if (one.difference is None) != (other.difference is None):
        return False
    if _said(one) != _said(other):
        return False
    return _same(one.outcome.outputs, other.outcome.outputs)


def _ended(result: CaseResult) -> tuple[bool, bool]:
    """Whether there are values without the checks, and whether they are right."""
    return result.outcome.outputs is not None, result.right


def _said(result: CaseResult) -> str:
    """What Python or the compiler complained of, or `verify` of right values; without numbers and plurals."""
    fault, difference = result.outcome.fault, result.difference
    text = ""
    if fault is not None and not fault.in_kernel:
        text = fault.message
    elif fault is None and difference is not None and not difference.values:
        text = difference.headline
    return re.sub(r"[\d,.]+|s\b", "", text)


def _numbers_in(result: CaseResult) -> list[str]:
    """Index and size in a fault's message; the names are each author's own."""
    fault = result.outcome.fault
    return re.findall(r"-?\d+", re.sub(r"\w*[A-Za-z_]\w*", "", fault.message)) if fault else []


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return _same_arrays(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return bool(np.isclose(one, other, rtol=1e-5, atol=1e-8, equal_nan=True))
    return type(one) is type(other) and one == other


def _same_arrays(one: Any, other: Any) -> bool:
    if not (isinstance(one, np.ndarray) and isinstance(other, np.ndarray)):
        return False
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype.kind != "f":
        return bool(np.array_equal(one, other))
    return bool(np.allclose(one, other, rtol=1e-4, atol=1e-6 * _scale(one), equal_nan=True))


def _scale(values: Any) -> float:
    finite = np.abs(values[np.isfinite(values)])
    return float(finite.max()) if finite.size else 0.0
