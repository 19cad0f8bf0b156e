"""The judge: draws the inputs of an exercise, has a contained process run the answer on them, and compares.

Nothing of a learner's is run in this process, and what comes back from the other is data.
"""

from __future__ import annotations

import functools
import inspect
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from ...assembly import Parts
from ...emulation import LaunchReport
from ...emulation.report import LineCounters
from ..compare import Difference
from ..diagnosis import find_mistake
from ..exercise import CLEAN, Case, Exercise, Prediction
from ..judging import HOPELESS, CaseResult, Verdict, assess, cases_of
from ..own_lines import in_cell
from ..runner import Fault, Observed, Outcome
from . import runtime
from .containment import place
from .limits import Limits
from .process import Process, Stopped
from .results import Result

_RUNNER = "tinyvllm_ref.course.grading.runner_process"
_APART = ("kernel", "source", "value")  # kinds that are made in one process and run in another
_OUT_OF_TIME = ("KernelTimeout", "PythonTimeout")
_PATIENT = 4  # times the exercise's own time, where the processors were busy with other things
# Faults that say nothing of the values of a case.
_MAKING = ("NotFilledIn", "OutsideNames", "WrongAnswerType", "SyntaxError", "CompileException")


@dataclass(frozen=True)
class Task:
    """One answer to be judged.

    Attributes
    ----------
    source : str
        The learner's cell.
    seed : int
        Of the inputs.
    own_before, solution_before : tuple of (str, str)
        Cells of the exercises that it builds on: the learner's, and the solution's where there is one.
    modules : tuple of str
        Of this project, that the lesson's own cell imports before anybody has filled it in.
    """

    source: str
    seed: int
    own_before: tuple[tuple[str, str], ...] = ()
    solution_before: tuple[tuple[str, str], ...] = ()
    modules: tuple[str, ...] = ()


def judge_answer(exercise: Exercise | Prediction, task: Task, level: str, limits: Limits) -> Result:
    """The result of one answer; whatever the answer does, there is one.

    Parameters
    ----------
    exercise : Exercise or Prediction
    task : Task
    level : str
        Of containment.
    limits : Limits
    """
    if isinstance(exercise, Prediction):
        return _judge_prediction(exercise, task, level, limits)
    first = _judge(exercise, task, task.own_before, level, limits)
    if not exercise.builds_on or first.passed or not task.solution_before:
        return first
    if task.solution_before == task.own_before:
        return first
    # What it builds on may be what is wrong; that costs the other exercise and not this one.
    second = _judge(exercise, task, task.solution_before, level, limits)
    if second.points <= first.points:
        return first
    return second.with_note(
        f"judged after the solution of {', '.join(exercise.builds_on)}, not the learner's cell"
    )


# ---------------- an exercise


def _judge(
    exercise: Exercise, task: Task, before: Sequence[tuple[str, str]], level: str, limits: Limits
) -> Result:
    if len(before) < len(exercise.builds_on):
        missing = [id for id in exercise.builds_on if id not in dict(before)]
        return _result(exercise, task, "missing", f"it builds on {', '.join(missing)}, which is not there")
    try:
        return _judge_within(exercise.seconds, exercise, task, before, level, limits)
    except _Starved:
        # The clock ran, and this machine did other things. That is not the answer's fault.
        patient = _PATIENT * exercise.seconds
        result = _judge_within(patient, exercise, task, before, level, limits, last=True)
        if result.kind not in (*_OUT_OF_TIME, "timeout"):
            return result
        return result.with_remarks(
            [f"judged on a busy machine; regrade with --exercise {exercise.id} if in doubt"]
        )


def _judge_within(
    seconds: float,
    exercise: Exercise,
    task: Task,
    before: Sequence[tuple[str, str]],
    level: str,
    limits: Limits,
    last: bool = False,
) -> Result:
    """Judge with `seconds` for each case; _Starved where these ran out without being used, unless it is the `last`."""
    results: list[CaseResult] = []
    pairs = cases_of(exercise, task.seed)
    running = False
    try:
        session = _Session(exercise, task, before, level, limits, seconds, last)
        with session.started():
            running = True
            for case, expected in pairs:
                outcome = session.run(case)
                results.append(_assess(exercise, case, expected, outcome))
                if outcome.fault is not None and outcome.fault.kind in HOPELESS:
                    break
    except _Refused as refused:
        return _refusal(exercise, task, refused.fault)
    except Stopped as stopped:
        label = pairs[len(results)][0].label if running and len(results) < len(pairs) else ""
        return _result(exercise, task, "stopped", f"{stopped}", kind=stopped.kind, case=label)
    verdict = Verdict(exercise, tuple(results), len(results) == len(pairs))
    return _verdict_result(exercise, task, verdict, dict(task.solution_before or before)).with_remarks(
        session.remarks
    )


def _assess(exercise: Exercise, case: Case, expected: Mapping[str, Any], outcome: Outcome) -> CaseResult:
    try:
        return assess(exercise, case, expected, outcome, counted=True)
    except Exception as error:  # outputs made to break a comparison
        return CaseResult(
            case, outcome, Difference(f"the outputs can not be compared ({type(error).__name__})")
        )


class _Refused(Exception):
    """The cell did not make an answer."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.kind)
        self.fault = fault


class _Starved(Exception):
    """A time ran out of which the answer's process had less than half: the processors were busy."""


class _Session:
    """The contained processes of one answer, with `seconds` for each case."""

    def __init__(
        self,
        exercise: Exercise,
        task: Task,
        before: Sequence[tuple[str, str]],
        level: str,
        limits: Limits,
        seconds: float,
        last: bool,
    ) -> None:
        self.exercise, self.level, self.limits = exercise, level, limits
        self.seconds, self.last = seconds, last
        texts, callables = earlier_parts(exercise.uses)
        source, name = run_source(exercise)
        modules = frozenset(
            [*(name for name, _ in callables.values()), *runtime.imports_of(source), *task.modules]
        )
        self.tree = runtime.runner_tree(modules)
        self.remarks = visible_references(exercise, modules)
        self._task = {
            name: getattr(exercise, name) for name in ("id", "answer", "kind", "arguments", "uses")
        } | {"seconds": seconds}
        common = {"task": self._task, "texts": texts, "callables": callables}
        self._make = {"do": "make", **common, "source": task.source, "before": list(before)}
        self._run = {"do": "run", **common, "run": source, "run_name": name}
        self._process: Process | None = None

    @contextmanager
    def started(self) -> Iterator[None]:
        """The process that runs the cases, with the answer in it."""
        if self.exercise.kind in _APART:
            with self._new_process() as process:
                made = self._ask(process, self._make, self.seconds)
            if "made" not in made:
                raise Stopped("bad reply", "the process replied with what is no result")
            message = {**self._run, "made": self._checked(made["made"])}
        else:
            message = {**self._run, "source": self._make["source"], "before": self._make["before"]}
        with self._new_process() as self._process:
            self._ask(self._process, message, self.seconds)
            yield

    def run(self, case: Case) -> Outcome:
        assert self._process is not None
        # Once with the checks, and once without them where they find something.
        message = {"do": "case", "inputs": dict(case.inputs)}
        return outcome_of(self._timed(self._process, message, 2 * (self.seconds + 1)))

    @contextmanager
    def _new_process(self) -> Iterator[Process]:
        with (
            place(self.level, self.limits, self.tree, _RUNNER, runtime.runner_seed()) as where,
            Process(where, self.limits) as process,
        ):
            yield process

    def _ask(self, process: Process, message: Any, seconds: float) -> dict[str, Any]:
        reply = self._timed(process, message, seconds)
        if reply.get("fault") is not None:
            raise _Refused(fault_of(reply["fault"]))
        return reply

    def _timed(self, process: Process, message: Any, seconds: float) -> dict[str, Any]:
        """Ask, and see to it that a time that ran out was the answer's."""
        begin, used = time.monotonic(), process.cpu_seconds()
        try:
            reply: dict[str, Any] = process.ask(message, seconds + self.limits.patience)
            fault = reply.get("fault")
            kind = fault.get("kind") if isinstance(fault, dict) else ""
        except Stopped as stopped:
            if stopped.kind == "timeout":
                self._require_used(process, begin, used)
            raise
        if kind in _OUT_OF_TIME:
            self._require_used(process, begin, used)
        return reply

    def _require_used(self, process: Process, begin: float, used: float) -> None:
        if not self.last and process.cpu_seconds() - used < (time.monotonic() - begin) / 2:
            raise _Starved

    def _checked(self, made: Any) -> Any:
        """What was made, if it is of the kind that was asked for."""
        kind = self.exercise.kind
        if kind == "value" or (kind == "source" and isinstance(made, str)):
            return made
        if kind == "kernel" and isinstance(made, dict) and isinstance(made.get("code"), str):
            return {name: made.get(name) for name in ("code", "name", "options", "expressions", "shared")}
        raise Stopped("bad reply", "the process replied with what is no answer")


def earlier_parts(names: Sequence[str]) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
    """The reference's parts that an answer may name: texts, and where the others are imported from."""
    texts, callables = dict[str, str](), dict[str, tuple[str, str]]()
    for name in names:
        part = getattr(_reference(), name)
        if isinstance(part, str):
            texts[name] = part
            continue
        module, attribute = getattr(part, "__module__", ""), getattr(part, "__name__", "")
        if getattr(sys.modules.get(module), attribute, None) is part:
            callables[name] = (module, attribute)
        else:  # made of other parts
            callables[name] = ("tinyvllm_ref.assembly", "")
    return texts, callables


@functools.cache
def _reference() -> Parts:
    return Parts.reference()


def visible_references(exercise: Exercise, modules: frozenset[str]) -> tuple[str, ...]:
    """Remarks on parts that this exercise makes and whose reference came along with what it needs."""
    if not modules:
        return ()
    files = runtime.needed_files(modules)
    seen = []
    for part in exercise.makes:
        module = getattr(getattr(_reference(), part, None), "__module__", "")
        if module.replace(".", "/").removeprefix("tinyvllm_ref/") + ".py" in files:
            seen.append(part)
    return (f"the reference's {', '.join(seen)} could be imported by this answer",) if seen else ()


def run_source(exercise: Exercise) -> tuple[str, str]:
    """The source of an exercise's `run`, and its name there."""
    source, name = textwrap.dedent(inspect.getsource(exercise.run)), exercise.run.__name__
    if not source.startswith(f"def {name}("):
        file = inspect.getsourcefile(exercise.run)
        raise ValueError(f"{file} was changed while this runs; grade again")
    return source, name


# ---------------- what comes back


def fault_of(reply: Any) -> Fault:
    """A fault from the other process; Stopped where it is none."""
    try:
        return Fault(
            kind=_text(reply["kind"], 100),
            message=_text(reply["message"], 4000),
            source=tuple((int(n), _text(line, 400), bool(here)) for n, line, here in reply["source"][:12]),
            in_kernel=bool(reply["in_kernel"]),
            details=tuple(_text(line, 400) for line in reply["details"][:6]),
        )
    except (KeyError, TypeError, ValueError, IndexError):
        raise Stopped("bad reply", "the process replied with what is no result") from None


def outcome_of(reply: dict[str, Any]) -> Outcome:
    """An outcome from the other process; Stopped where it is none."""
    fault = fault_of(reply["fault"]) if reply.get("fault") is not None else None
    outputs = reply.get("outputs")
    if outputs is not None and not isinstance(outputs, dict):
        raise Stopped("bad reply", "the process replied with what is no result")
    try:
        launches = [_report_of(report) for report in reply.get("launches", [])]
        observed = Observed(launches, int(reply.get("allocations", 0)), int(reply.get("peak_bytes", 0)))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Stopped("bad reply", "the process replied with what is no result") from None
    if outputs is None and fault is None:
        raise Stopped("bad reply", "the process replied with neither outputs nor an error")
    return Outcome(outputs, fault, observed)


def _report_of(parts: Any) -> LaunchReport:
    values: dict[str, Any] = {}
    for field in fields(LaunchReport):
        value = parts[field.name]
        if field.name in ("grid", "block"):
            value = tuple(int(n) for n in value)
        elif field.name == "warnings":
            value = tuple(_text(line, 1000) for line in value)
        elif field.name == "lines":
            value = tuple(LineCounters(*_counters(line)) for line in value)
        elif field.name in ("kernel", "mode"):
            value = _text(value, 1000)
        else:
            value = bool(value) if field.name == "estimated" else int(value)
        values[field.name] = value
    return LaunchReport(**values)


def _counters(line: Any) -> list[Any]:
    return [_text(value, 20) if isinstance(value, str) else int(value) for value in line]


def _text(value: Any, longest: int) -> str:
    if not isinstance(value, str):
        raise TypeError("a text is wanted")
    return value[:longest].encode("utf-8", "backslashreplace").decode()


# ---------------- results


def _result(exercise: Exercise | Prediction, task: Task, status: str, says: str, **more: Any) -> Result:
    groups = {name: (0, points) for name, points in points_of(exercise).items()}
    return Result(exercise.id, status, groups, says, more.pop("feedback", says), seed=task.seed, **more)


def points_of(exercise: Exercise | Prediction) -> dict[str, int]:
    """Points by group of cases."""
    return {"predicted": exercise.points} if isinstance(exercise, Prediction) else dict(exercise.points)


def _refusal(exercise: Exercise, task: Task, fault: Fault) -> Result:
    """Nothing was run: no inputs are in what the fault says."""
    status = "not filled in" if fault.kind == "NotFilledIn" else "error"
    says = fault.message if status == "not filled in" else f"{fault.kind}: {fault.message}"
    return _result(exercise, task, status, says, kind=fault.kind, source=fault.source)


def _verdict_result(exercise: Exercise, task: Task, verdict: Verdict, before: Mapping[str, str]) -> Result:
    earned = verdict.groups()
    groups = {name: (points if earned[name] else 0, points) for name, points in exercise.points.items()}
    if verdict.passed:
        return Result(exercise.id, "passed", groups, "passed", "passed", seed=task.seed)
    failure = verdict.first_failure
    fault, difference = failure.outcome.fault, failure.difference
    if fault is not None:
        fault = in_cell(fault, task.source)
    mistake = find_mistake(verdict, task.seed, before)
    if fault is not None:
        says, feedback, kind = f"{fault.kind}: {fault.message}", _safe(exercise, fault), fault.kind
    else:
        assert difference is not None
        says = feedback = difference.headline
        kind = "wrong values"
    failed = sum(not result.passed for result in verdict.results)
    counts = [f"{failed} of {len(cases_of(exercise, task.seed))} cases fail"]
    if not verdict.complete:
        counts = ["the cases after this one were not run, and count as failed"]
    counts += difference.counts if difference is not None else ()
    return Result(
        exercise.id,
        "partial" if any(points for points, _ in groups.values()) else "failed",
        groups,
        says,
        feedback,
        kind=kind,
        case=failure.case.label,
        counts=tuple(counts),
        rows=difference.rows if difference is not None else (),
        source=fault.source if fault is not None else (),
        mistake=(mistake.name, mistake.says) if mistake is not None else None,
        seed=task.seed,
    )


def _safe(exercise: Exercise, fault: Fault) -> str:
    """What a learner is told of a fault: nothing that may hold the values of a hidden case."""
    if fault.kind == "InputChanged":
        return "InputChanged: the answer wrote to an array that it was only to read"
    own_words = (
        exercise.kind not in _APART
    )  # the learner's Python was there, and may have put anything in a text
    if own_words and not (fault.in_kernel or fault.kind in ("PythonTimeout", "KernelTimeout")):
        lines = [str(number) for number, _, here in fault.source if here]
        return fault.kind + (f" at line {lines[0]} of the cell" if lines else "")
    return f"{fault.kind}: {fault.message}"


def _judge_prediction(exercise: Prediction, task: Task, level: str, limits: Limits) -> Result:
    message = {
        "do": "predict",
        "task": {"id": exercise.id, "seconds": 5.0},
        "texts": {},
        "callables": {},
        "source": task.source,
    }
    try:
        with (
            place(level, limits, runtime.runner_tree(), _RUNNER, runtime.runner_seed()) as where,
            Process(where, limits) as process,
        ):
            reply = process.ask(message, 5 + limits.patience)
    except Stopped as stopped:
        return _result(exercise, task, "stopped", str(stopped), kind=stopped.kind)
    if reply.get("fault") is not None:
        try:
            fault = fault_of(reply["fault"])
        except Stopped as stopped:
            return _result(exercise, task, "stopped", str(stopped), kind=stopped.kind)
        return _result(
            exercise, task, "error", f"{fault.kind}: {fault.message}", kind=fault.kind, source=fault.source
        )
    said = reply.get("said")
    numbers = said if isinstance(said, dict) else {}
    empty = [name for name in exercise.quantities if not isinstance(numbers.get(name), int | float)]
    if empty:
        return _result(exercise, task, "not filled in", f"no number for {', '.join(empty)}")
    groups = {"predicted": (exercise.points, exercise.points)}
    listed = ", ".join(f"{name} = {numbers[name]:g}" for name in exercise.quantities)
    return Result(exercise.id, "passed", groups, f"predicted {listed}", f"predicted {listed}", seed=task.seed)


__all__ = ["CLEAN", "Task", "earlier_parts", "judge_answer", "points_of"]
