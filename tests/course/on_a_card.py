"""What the exercises of a lesson do on a card: run by ``test_on_a_card.py`` with the stand-in on its path.

    python -m tests.course.on_a_card 16 02.3

Each complaint is a line of standard output. The answers are the solutions and, with ``--mistakes``, every mistake; what
they need of earlier lessons is the reference's.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import Any

from tinyvllm_ref import device
from tinyvllm_ref.course import cells, checking, engine_card, examining, measuring, my_engine, notebook
from tinyvllm_ref.course.answers import make_namespace
from tinyvllm_ref.course.diagnosis import find_mistake
from tinyvllm_ref.course.exercise import Exercise, Lesson, Prediction
from tinyvllm_ref.course.exercises import lesson_of
from tinyvllm_ref.course.lessons import solution_cell, stub_cell

# What CuPy, the emulation and the engine say of an array that is another library's, or of a name that CuPy has not got.
MIXED = (
    "Unsupported type",
    "must be an array on the device",
    "module 'cupy' has no",
    "Implicit conversion to a NumPy",
)
shown: list[Any] = []


def complaints(exercise: Exercise | Prediction, lesson: Lesson, mistakes: bool) -> Iterator[str]:
    """What is not as it should be, in a line each."""
    if isinstance(exercise, Prediction):
        yield from _of_prediction(exercise)
        return
    yield from _of_solution(exercise)
    yield from _of_examining(exercise)
    for mistake in exercise.mistakes if mistakes else ():
        for answer in mistake.answers:
            yield from _of_mistake(exercise, mistake.name, answer)
    yield from _of_what_is_shown(exercise, lesson)


def _of_prediction(exercise: Prediction) -> Iterator[str]:
    for name, quantity in exercise.quantities.items():
        with _caught(f"{exercise.id} {name} can not be measured") as said:
            quantity.measure()
        yield from said


def _namespace(exercise: Exercise, source: str) -> dict[str, Any]:
    before = {id: solution_cell(id) or "" for id in exercise.builds_on}
    return make_namespace(exercise, source, device.cp, before=before)


def _judged(exercise: Exercise, source: str) -> tuple[Any, bool]:
    return checking._judge(exercise, source, _namespace(exercise, source)[exercise.answer])


def _of_solution(exercise: Exercise) -> Iterator[str]:
    source = solution_cell(exercise.id) or ""
    verdict, _ = _judged(exercise, source)
    if verdict.passed:
        my_engine.save(exercise, source, _namespace(exercise, source))
    else:
        yield f"{exercise.id}: the solution fails: {_said(checking.report_of_verdict(verdict, None, source))}"


def _of_mistake(exercise: Exercise, name: str, source: str) -> Iterator[str]:
    verdict, was_emulated = _judged(exercise, source)
    if verdict.passed:
        # Of an answer that works with the engine's parts nothing is counted on a card; some are wrong by counts alone.
        if exercise.verify is None or checking.emulated_answer(exercise, source) is not None:
            yield f"{exercise.id}, {name}: the check accepts it"
        return
    said = _said(checking.report_of_verdict(verdict, None, source))
    if _is_mixed(said):
        yield f"{exercise.id}, {name}: {said}"
    found = find_mistake(verdict, checking.SEED, source=source) if was_emulated else None
    if was_emulated and (found is None or found.name != name):
        yield f"{exercise.id}, {name}: named as {found and found.name}"


def _of_examining(exercise: Exercise) -> Iterator[str]:
    """The solution must be found free of faults, and the stub not blamed for what it has not done."""
    for source in (solution_cell(exercise.id), stub_cell(exercise.id)):
        cells.recorded = lambda id, source=source: source  # type: ignore[assignment, misc]
        shown.clear()
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            examining.examine(exercise.id)
        said = printed.getvalue() + " ".join(map(_said, shown))
        is_solution = source == solution_cell(exercise.id)
        if _is_mixed(said) or (is_solution and "nothing found" not in said):
            yield f"{exercise.id} examined: {said}"


def _of_what_is_shown(exercise: Exercise, lesson: Lesson) -> Iterator[str]:
    if exercise.id in lesson.pictures:
        shown.clear()
        printed = io.StringIO()
        with _caught(f"{exercise.id} can not be drawn") as said, contextlib.redirect_stdout(printed):
            measuring.show(exercise.id)
        yield from said
        if not shown:
            yield f"{exercise.id} is not drawn: {printed.getvalue()}"
    if exercise.id in lesson.works:
        with _caught(f"{exercise.id} can not be timed") as said:
            measuring.measure(exercise.id)
        yield from said


def _of_engine(lesson: Lesson) -> Iterator[str]:
    with _caught(f"the card of lesson {lesson.number}") as said:
        report = engine_card.engine_report(lesson)
        said += [
            f"the card of lesson {lesson.number}, {wrong.name}: {wrong.error}"
            for wrong in (*report.mistakes, *report.dial)
            if _is_mixed(wrong.error)
        ]
    yield from said


@contextlib.contextmanager
def _caught(what: str) -> Iterator[list[str]]:
    said: list[str] = []
    try:
        yield said
    except Exception as error:
        said.append(f"{what}: {type(error).__name__}: {error}")


def _said(report: Any) -> str:
    return report.render_text() if hasattr(report, "render_text") else str(report)


def _is_mixed(text: str) -> bool:
    return any(words in " ".join(text.split()) for words in MIXED)


def main(wanted: list[str]) -> None:
    assert device.is_gpu, device.describe()
    mistakes = "--mistakes" in wanted
    notebook.display = shown.append
    measuring.display_figure = shown.append
    for id in [one for one in wanted if not one.startswith("-")]:
        lesson = lesson_of(id)
        for exercise in lesson.exercises:
            if exercise.id.startswith(id):
                _print(complaints(exercise, lesson, mistakes))
        if id == lesson.number:
            _print(_of_engine(lesson))


def _print(lines: Iterator[str]) -> None:
    for line in lines:
        print(" ".join(line.split())[:400], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
