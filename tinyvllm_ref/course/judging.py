"""All cases of an exercise on one answer: which groups of points it earns, and what fails first."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .compare import Difference, compare
from .exercise import CLEAN, Case, Exercise
from .runner import Outcome, run_case

# After these a further case would only take time: it fails in the same way.
HOPELESS = frozenset(
    {"CompileException", "KernelTimeout", "NobodyWakes", "PythonTimeout", "SyntaxError", "WrongAnswerType"}
)


@dataclass(frozen=True)
class CaseResult:
    """One case: what came out and how it differs from what was expected."""

    case: Case
    outcome: Outcome
    difference: Difference | None

    @property
    def right(self) -> bool:
        """The values are as expected (with or without a fault that full mode found)."""
        return self.outcome.outputs is not None and self.difference is None

    @property
    def clean(self) -> bool:
        return self.outcome.fault is None

    @property
    def passed(self) -> bool:
        return self.right and self.clean


@dataclass(frozen=True)
class Verdict:
    """The judgement of one answer.

    Attributes
    ----------
    exercise : Exercise
    results : tuple of CaseResult
        Of the cases that were run, in order; after a hopeless one the rest is not run, and counts as failed.
    complete : bool
        Whether all cases were run.
    """

    exercise: Exercise
    results: tuple[CaseResult, ...]
    complete: bool

    @property
    def passed(self) -> bool:
        return self.complete and all(result.passed for result in self.results)

    @property
    def first_failure(self) -> CaseResult:
        return next(result for result in self.results if not result.passed)

    def groups(self) -> dict[str, bool]:
        """Group -> whether its points are earned."""
        return {name: self._earned(name) for name in self.exercise.points}

    def _earned(self, name: str) -> bool:
        if not self.complete:
            return False
        if name == CLEAN:
            # No fault, and at least one case whose values are right: a kernel that does nothing is not clean.
            return all(result.clean for result in self.results) and any(
                result.right for result in self.results
            )
        return all(result.right for result in self.results if result.case.group == name)

    @property
    def points(self) -> int:
        return sum(self.exercise.points[name] for name, earned in self.groups().items() if earned)


@functools.lru_cache(maxsize=64)
def cases_of(exercise: Exercise, seed: int) -> tuple[tuple[Case, dict[str, Any]], ...]:
    """The cases of an exercise under a seed, each with what is expected."""
    number = int(exercise.id.replace(".", ""))
    drawn = exercise.cases(np.random.default_rng([seed, number]))
    return tuple((case, exercise.expected(case.inputs)) for case in drawn)


def judge(exercise: Exercise, answer: Any, cp: Any, seed: int = 0, only: str | None = None) -> Verdict:
    """Run an answer on all cases.

    Parameters
    ----------
    exercise : Exercise
    answer : object
        What the answer cell made, with `cp` as its ``cp``.
    cp : module
        CuPy or the emulation.
    seed : int
        Of the inputs.
    only : str, optional
        Run the cases of this group alone.
    """
    results: list[CaseResult] = []
    chosen = [pair for pair in cases_of(exercise, seed) if only is None or pair[0].group == only]
    for case, expected in chosen:
        result = judge_case(exercise, answer, case, expected, cp)
        results.append(result)
        if result.outcome.fault is not None and result.outcome.fault.kind in HOPELESS:
            break
    return Verdict(exercise, tuple(results), len(results) == len(chosen))


def judge_case(
    exercise: Exercise, answer: Any, case: Case, expected: Mapping[str, Any], cp: Any
) -> CaseResult:
    """Run an answer on one case and compare."""
    outcome = run_case(exercise.run, answer, case, cp, exercise.seconds)
    return assess(exercise, case, expected, outcome, counted=getattr(cp, "is_emulation", False))


def assess(
    exercise: Exercise, case: Case, expected: Mapping[str, Any], outcome: Outcome, *, counted: bool
) -> CaseResult:
    """Compare what came out, wherever it was run; `counted` says that launches were, as the emulation does."""
    difference = None
    if outcome.outputs is not None:
        difference = compare(dict(expected), outcome.outputs, exercise.tolerance_of, case.inputs)
        # The counts are complete only where nothing stopped the run.
        if difference is None and exercise.verify is not None and outcome.fault is None:
            observed = outcome.observed if counted else _NoCounts()
            try:
                problem = exercise.verify(case.inputs, outcome.outputs, observed)
            except _NotCounted:  # on a card: what was looked at before the counts is right
                problem = None
            difference = Difference(problem, values=False) if problem else None
    return CaseResult(case, outcome, difference)


class _NotCounted(Exception):
    """A count was asked for where nothing counts."""


class _NoCounts:
    """In the place of :class:`~tinyvllm_ref.course.runner.Observed` on a card."""

    def __getattr__(self, name: str) -> Any:
        raise _NotCounted(name)
