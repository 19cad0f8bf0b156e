"""``check``: an answer is run alone on all cases; it passes in one line, or fails with a report."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyvllm_ref import device, emulation

from . import cells, my_engine, notebook, store
from .answers import make_namespace, same_answer
from .compare import show
from .course_progress import lesson_complete
from .diagnosis import find_mistake
from .exercise import CLEAN, Exercise, Mistake, Prediction
from .exercises import exercise_of, lesson_of
from .judging import CaseResult, Verdict, judge
from .kinds import AnotherAnswer, NotFilledIn, OutsideNames
from .lessons import stub_cell, stub_fingerprint
from .next_steps import after_exercise
from .own_lines import in_cell
from .reports import PassCard, Report
from .runner import Fault, describe, time_limit
from .slips import slips_in

_PATIENCE = 3.0  # seconds for the search of a known mistake, where none of its kernels is compiled yet
SEED = 0
"""Of the inputs that a notebook's checks draw."""

# What the case groups are called in a report.
_GROUP_TITLES = {CLEAN: "checks of memory and barriers"}

_ORDER = (
    "Without the checks the values of this case come out right here, by luck: "
    "another order of threads would show it."
)
_LUCK = {"DataRace": _ORDER, "BarrierDivergence": _ORDER}
_NO_MATTER = "Without the checks the values of this case come out right all the same; a card may do anything."
_WRONG_AS_WELL = "Without the checks the values are wrong as well."
_IN_A_PART = (
    "That line is in a part of an earlier exercise, which your kernel calls. Does every thread of the block call it, "
    "with the shared memory that it needs?"
)
_IN_A_CALL = (
    "The fault was found in a kernel that this line leads to, and the message has that kernel's names. Look at what "
    "the call gets: is each array filled by now, as large as it must be, and in its place?"
)


class CheckFailed(Exception):
    """An answer did not pass. In a notebook the report is shown above, and this is one line."""

    def __init__(self, report: Report) -> None:
        super().__init__(report.render_text())
        self.report = report

    def _render_traceback_(self) -> list[str]:
        return [f"CheckFailed: {self.report.exercise}, as the report says"]


def check(id: str, answer: Any = ...) -> None:
    """Check the answer to an exercise.

    Parameters
    ----------
    id : str
        Such as ``"06.2"``.
    answer : object
        What the answer cell made.

    Raises
    ------
    CheckFailed
        With the report, which is also shown.
    """
    exercise = exercise_of(id)
    if isinstance(exercise, Prediction):
        arguments = ", ".join(f"{name}=..." for name in exercise.quantities)
        raise TypeError(f'{id} asks for a prediction: predict("{id}", {arguments})')
    cells.install()
    try:
        source = _answer_source(exercise, answer)
        with time_limit(exercise.seconds):
            namespace = make_namespace(exercise, source, device.cp)
        if answer is not ... and not same_answer(answer, namespace[exercise.answer]):
            raise _another(exercise)
        verdict, was_emulated = _judge(exercise, source, namespace[exercise.answer])
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # PythonTimeout and sys.exit() in an answer among them
        _fail(exercise, report_of_error(exercise, error))
    if not verdict.passed:
        # With a line of the stub left in, half of the answer is the learner's: that says nothing of what they think.
        known = was_emulated and not _left_of_stub(exercise, source)
        mistake = find_mistake(verdict, SEED, seconds=_PATIENCE, source=source) if known else None
        _fail(exercise, report_of_verdict(verdict, mistake, source), verdict, mistake)
    _pass(exercise, source, namespace, verdict)


def _answer_source(exercise: Exercise, answer: Any) -> str:
    """The cell that the learner ran; refused where it is still the stub."""
    source = cells.recorded(exercise.id)
    if source is None:
        raise NotFilledIn(
            f"no cell that begins with `# Exercise {exercise.id}` has run since this kernel started; "
            "run the answer's cell, then this one"
        )
    if cells.fingerprint(source) == stub_fingerprint(exercise.id):
        _refuse_another(exercise, source, answer)
        raise NotFilledIn(
            "the answer is still the stub: fill in what its TODO asks for, and run the cell again"
        )
    if answer is None:
        raise NotFilledIn(f"`{exercise.answer}` is None")
    return source


def _another(exercise: Exercise) -> AnotherAnswer:
    return AnotherAnswer(
        f"check was given something else than the cell makes that begins with `# Exercise {exercise.id}`. That cell is "
        f"what is judged and kept: make `{exercise.answer}` there, with that first line, and run it before the check"
    )


def _refuse_another(exercise: Exercise, stub: str, answer: Any) -> None:
    """Raise where the recorded cell is the stub, and the answer comes from another cell."""
    if answer is ... or answer is None:
        return
    try:
        made = make_namespace(exercise, stub, device.cp)[exercise.answer]
    except Exception:  # the stub makes nothing to compare with
        return
    if not same_answer(answer, made):
        raise _another(exercise)


def _judge(exercise: Exercise, source: str, answer: Any) -> tuple[Verdict, bool]:
    """All cases on this machine, and whether what came of them was run in the emulation.

    With a GPU they go through the emulation's checks first: one illegal access on a card ruins the process's context,
    and with it the learner's kernel. And nothing else counts launches and sectors.
    """
    if not device.is_gpu:
        return judge(exercise, answer, device.cp, SEED), True
    emulated = emulated_answer(exercise, source)
    if emulated is not None:
        first = judge(exercise, emulated, emulation, SEED)
        if not first.passed:
            return first, True
    return judge(exercise, answer, device.cp, SEED), False


# Parts that take no device arrays: they work beside the emulation as well as beside a card.
_ON_THE_HOST = frozenset(
    {
        "read_safetensors",
        "float_to_bf16",
        "bf16_to_float",
        "Tokenizer",
        "plan_buffers",
        "Scheduler",
        "BlockManager",
    }
)


def emulated_answer(exercise: Exercise, source: str) -> Any:
    """The answer for the emulation, on a machine with a GPU; None where it needs parts that run on the card."""
    if exercise.runs_engine:
        return None
    parts = my_engine.parts() if exercise.uses else None
    if any(not isinstance(getattr(parts, name), str) for name in set(exercise.uses) - _ON_THE_HOST):
        return None
    try:
        return make_namespace(exercise, source, emulation)[exercise.answer]
    except _no_compiler():
        return None


def _no_compiler() -> type[Exception]:
    """The error of a machine without a C++ compiler."""
    from tinyvllm_ref.emulation.toolchain import CompilerNotFound

    return CompilerNotFound


# ---------------- passing and failing


def _pass(exercise: Exercise, source: str, namespace: dict[str, Any], verdict: Verdict) -> None:
    kept: tuple[str, ...] = ()
    try:
        my_engine.save(exercise, source, namespace)
        kept = my_engine.files_of(exercise)
    except OSError as error:
        print(
            f"{exercise.id} is right and is not kept: {my_engine.folder()} can not be written ({error}); set "
            "TINYVLLM_MY_ENGINE to a folder that can, and check again"
        )

    def change(entry: dict[str, Any]) -> None:
        entry["attempts"] = entry.get("attempts", 0) + 1
        entry.setdefault("passed", store.now())
        entry.pop("mistake", None)

    was_complete = lesson_complete(exercise.lesson)
    store.update(exercise.id, change)
    passed = lesson_of(exercise.id).passed
    if passed is not None:
        passed()
    possible = sum(exercise.points.values())
    points = f"{verdict.points} of {possible} points{', stretch' if exercise.stretch else ''}"
    notebook.display(PassCard(exercise.id, exercise.title, points, kept, after_exercise(exercise)))
    if not was_complete and lesson_complete(exercise.lesson):
        notebook.celebrate(lesson_of(exercise.id))


def _fail(
    exercise: Exercise, report: Report, verdict: Verdict | None = None, mistake: Mistake | None = None
) -> None:
    def change(entry: dict[str, Any]) -> None:
        if report.kind == "not filled in":
            return
        entry["attempts"] = entry.get("attempts", 0) + 1
        entry["failed"] = entry.get("failed", 0) + 1
        entry["mistake"] = mistake.name if mistake is not None else ""
        entry["case"] = verdict.first_failure.case.label if verdict is not None else ""

    store.update(exercise.id, change)
    notebook.display(report)
    raise CheckFailed(report) from None


# ---------------- reports


def report_of_verdict(verdict: Verdict, mistake: Mistake | None, cell: str = "") -> Report:
    """The report of an answer that was run and is not right; `cell` is its source."""
    exercise, result = verdict.exercise, verdict.first_failure
    fault, difference = result.outcome.fault, result.difference
    if fault is not None and cell:
        fault = in_cell(fault, cell)
    notes: list[str] = []
    source = fault.source if fault is not None else ()
    fault_note = "; ".join(fault.details) if fault is not None else ""
    if fault is not None and fault.kind == "NotFilledIn":
        headline, kind = f"Not filled in yet: {fault.message}.", "not filled in"
    elif fault is not None:
        headline, kind = _headline(fault), "error"
        if cell and _is_elsewhere(fault, cell):
            by_python = bool(fault.called) and "__global__" not in cell
            if by_python:
                source, fault_note = fault.called, f"in the kernel, {fault_note}"
            notes.append(_IN_A_CALL if by_python else _IN_A_PART)
        elif cell and fault.in_kernel:
            source = _with_neighbours(fault.source, cell)
        if result.outcome.outputs is not None and fault.in_kernel:
            notes.append(_LUCK.get(fault.kind, _NO_MATTER) if difference is None else _WRONG_AS_WELL)
    else:
        assert difference is not None
        headline, kind = difference.headline, "wrong values" if difference.values else "not as asked"
    notes += [f"`{line}` is a line of the stub." for line in _left_of_stub(exercise, cell)]
    if mistake is None:
        notes += slips_in(cell)
    counts, rows = (difference.counts, difference.rows) if difference is not None else ((), ())
    compiled_not = fault is not None and fault.kind == "CompileException"  # that is of no case
    if exercise.riddle:
        rows = tuple((index, "(yours to find)", got) for index, _, got in rows)
    later = next((other for other in verdict.results if not other.clean and fault is None), None)
    if later is not None and later.outcome.fault is not None:
        notes.append(
            f"Also, in the case {later.case.label}: {_headline(in_cell(later.outcome.fault, cell))}."
        )
    return Report(
        exercise=exercise.id,
        title=exercise.title,
        headline=headline,
        kind=kind,
        case={} if compiled_not else {"case": result.case.label, **_input_lines(result)},
        counts=counts,
        rows=rows,
        source=source,
        fault_note=fault_note,
        mistake=(mistake.name, mistake.says) if mistake is not None else None,
        next_step=f'hint("{exercise.id}")',
        groups=_group_rows(verdict),
        notes=tuple(notes),
    )


def _is_elsewhere(fault: Fault, cell: str) -> bool:
    """Whether a kernel's fault lies in text that was pasted in front of what the cell holds."""
    lines = [text.strip() for _, text, is_fault in fault.source if is_fault]
    return fault.in_kernel and bool(lines) and not any(line in cell for line in lines)


def _with_neighbours(
    source: tuple[tuple[int, str, bool], ...], cell: str
) -> tuple[tuple[int, str, bool], ...]:
    """A kernel's line that stands alone, with those around it in the cell; as it is where that is not clear."""
    lines = [line.rstrip() for line in cell.splitlines()]
    found = [k for k, line in enumerate(lines) if len(source) == 1 and line.strip() == source[0][1].strip()]
    if len(found) != 1:
        return source
    (number, _, _), here = source[0], found[0]
    first = max(k for k in range(here + 1) if k == max(0, here - 2) or '"""' in lines[k])
    last = min(k for k in range(here, len(lines)) if k == min(len(lines) - 1, here + 2) or '"""' in lines[k])
    return tuple(
        (number + k - here, lines[k], k == here)
        for k in range(first, last + 1)
        if '"""' not in lines[k] or k == here
    )


def _left_of_stub(exercise: Exercise, cell: str) -> list[str]:
    """Lines of the stub that say of themselves that they are to be replaced, and are still in a cell."""
    kept = {line.strip() for line in cell.splitlines()}
    marked = (line.strip() for line in (stub_cell(exercise.id) or "").splitlines())
    return [line for line in dict.fromkeys(marked) if line.endswith("replace this line") and line in kept]


def _headline(fault: Fault) -> str:
    return f"{fault.kind}: {fault.message}"


def _input_lines(result: CaseResult) -> dict[str, str]:
    """Inputs that fit on a line: numbers, texts, and arrays and lists of a few elements."""
    return {name: text for name, value in result.case.inputs.items() if (text := _input_text(value))}


def _input_text(value: Any) -> str:
    if isinstance(value, bool | int | float | str | bytes):
        return _cut(repr(value))
    if (
        isinstance(value, dict)
        and 0 < len(value) <= 8
        and all(isinstance(v, np.ndarray) for v in value.values())
    ):
        return _cut(", ".join(f"{name} {array.shape}" for name, array in value.items()))
    if isinstance(value, list | tuple | dict) and len(value) <= 8:
        return _cut(repr(value))
    if isinstance(value, list | tuple | dict):
        return f"{type(value).__name__} of {len(value):,}"
    if isinstance(value, np.ndarray) and 0 < value.size <= 8:
        if value.dtype in (np.uint16, np.uint32):
            return np.array2string(value, separator=", ", formatter={"int": show}).replace("\n", "")
        return np.array2string(value, precision=4, suppress_small=True, separator=", ").replace("\n", "")
    return f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else ""


def _cut(text: str) -> str:
    return text if len(text) <= 100 else text[:97] + "..."


def _group_rows(verdict: Verdict) -> tuple[tuple[str, int, int, bool | None], ...]:
    points = verdict.exercise.points
    nothing_found = all(result.clean for result in verdict.results)
    return tuple(
        (
            _GROUP_TITLES.get(name, name if " " in name else f"{name} cases"),
            points[name] if earned else 0,
            points[name],
            # Nothing was found because nothing is right yet: neither passed nor failed.
            None if name == CLEAN and nothing_found and not earned else earned,
        )
        for name, earned in verdict.groups().items()
    )


def report_of_error(exercise: Exercise, error: BaseException) -> Report:
    """The report of an answer that could not be run at all."""
    source: tuple[tuple[int, str, bool], ...] = ()
    fault_note = ""
    if isinstance(error, NotFilledIn):
        kind, headline = "not filled in", f"Not filled in yet: {error}."
    elif isinstance(error, OutsideNames):
        kind, headline = "error", f"The answer does not stand alone: {error}."
    elif isinstance(error, AnotherAnswer):
        kind, headline = "another answer", f"{error}."
    else:
        fault = describe(error)
        kind, headline, source = "error", _headline(fault), fault.source
        fault_note = "; ".join(fault.details)
    return Report(
        exercise=exercise.id,
        title=exercise.title,
        headline=headline,
        kind=kind,
        source=source,
        fault_note=fault_note,
        next_step=f'hint("{exercise.id}")',
    )
