"""``measure`` and ``show``: what the learner's own kernel did, in numbers and in a picture.

On a GPU a kernel is timed, and its bandwidth stands beside what a plain copy reaches in the same process. In
emulation no time says anything about a card: there the bytes, sectors and bank conflicts are counted.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tinyvllm_ref import device, emulation
from tinyvllm_ref.emulation import report as launch_reports
from tinyvllm_ref.emulation.report import SECTOR_BYTES

from . import my_engine, notebook
from .answers import make_answer
from .exercise import Exercise, Prediction, Work
from .exercises import exercise_of, lesson_of
from .figures import display_figure
from .predictions import in_words, predicted
from .reports import Table


def measure(*ids: str) -> None:
    """Measure answers that have passed, side by side, or a prediction against what is so.

    Parameters
    ----------
    *ids : str
        Such as ``"06.2", "06.3"``; those that have not passed yet are named and left out.
    """
    if not ids:
        raise TypeError('measure() needs an exercise: measure("06.2")')
    first = exercise_of(ids[0])
    if isinstance(first, Prediction):
        _measure_prediction(first)
        return
    exercises = [exercise for exercise in map(exercise_of, ids) if isinstance(exercise, Exercise)]
    missing = [exercise.id for exercise in exercises if my_engine.answer(exercise.id) is None]
    if missing:
        print(
            f"nothing to measure yet: {' and '.join(missing)} {'has' if len(missing) == 1 else 'have'} not passed"
        )
    there = [exercise for exercise in exercises if exercise.id not in missing]
    if there:
        notebook.display(_timed(there) if device.is_gpu else _counted(there))


def show(id: str) -> None:
    """Draw the picture of an exercise from the run of the answer that has passed."""
    exercise = exercise_of(id)
    lesson = lesson_of(id)
    if id not in lesson.pictures:
        print(f"{id} has no picture; lesson {lesson.number} has {', '.join(lesson.pictures) or 'none'}")
        return
    source = my_engine.answer(id)
    if source is None or not isinstance(exercise, Exercise):
        print(f"nothing to draw yet: {id} has not passed")
        return
    with emulation.checks("full"):  # a trace exists in emulation alone
        answer = make_answer(exercise, source, emulation)
        try:
            figure = lesson.pictures[id](answer, emulation)
        except ValueError as error:  # a right answer may work in a way that this picture has no room for
            print(f"no picture of this answer: {error}")
            return
    display_figure(figure)


def _measure_prediction(exercise: Prediction) -> None:
    mine = predicted(exercise.id)
    if not mine:
        print(f"nothing to compare yet: {exercise.id} has no prediction")
        return
    rows = []
    for name, quantity in exercise.quantities.items():
        actual = quantity.measure()
        unit = f" {quantity.unit}" if quantity.unit else ""
        rows.append((quantity.label, f"{in_words(mine[name])}{unit}", f"{_short(actual)}{unit}"))
    notebook.display(
        Table(
            title=f"{exercise.id} {exercise.title}",
            columns=("", "you predicted", "measured"),
            rows=tuple(rows),
            notes=(exercise.explains,),
        )
    )


def _work(exercise: Exercise) -> Work:
    works = lesson_of(exercise.id).works
    if exercise.id not in works:
        raise LookupError(
            f"{exercise.id} has no measurement; lesson {exercise.lesson} has {', '.join(works) or 'none'}"
        )
    return works[exercise.id]


def _counted(exercises: list[Exercise]) -> Table:
    """Counts of one run of each, in emulation."""
    rows: dict[str, list[str]] = {}
    works = [_work(exercise) for exercise in exercises]
    for exercise, work in zip(exercises, works, strict=True):
        make = work.small or work.make
        reads = work.small_read_bytes if work.small else work.read_bytes
        writes = work.small_write_bytes if work.small else work.write_bytes
        answer = make_answer(exercise, my_engine.answer(exercise.id) or "", emulation)
        reports: list[Any] = []
        with emulation.checks("full"):
            run = make(answer, emulation)
            with launch_reports.collect(reports):
                run()
        fewest = -(-reads // SECTOR_BYTES) + -(-writes // SECTOR_BYTES)

        def total(name: str, reports: list[Any] = reports) -> int:
            return sum(getattr(report, name) for report in reports)

        sectors = total("global_sectors")
        for label, value in (
            ("bytes of global memory asked for", f"{total('global_bytes'):,}"),
            ("32-byte sectors touched", f"{sectors:,}"),
            ("fewest sectors possible", f"{fewest:,}"),
            ("share of what moved that was needed", f"{fewest / sectors:.0%}" if sectors else "-"),
            (
                "accesses to global memory (warps)",
                f"{total('global_read_requests') + total('global_write_requests'):,}",
            ),
            ("accesses to shared memory (warps)", f"{total('shared_requests'):,}"),
            ("extra turns for bank conflicts", f"{total('bank_conflicts'):,}"),
            ("barriers", f"{total('barriers'):,}"),
            ("kernel launches", f"{len(reports):,}"),
        ):
            rows.setdefault(label, []).append(value)
    label = works[0].small_label or works[0].label
    return Table(
        title=f"Counted in emulation, {label}",
        columns=("", *(f"{exercise.id} {exercise.title}" for exercise in exercises)),
        rows=tuple((name, *values) for name, values in rows.items()),
        notes=(
            *(note for note in [works[0].note] if note),
            "No GPU code ran: these are counts, and no time is claimed.",
        ),
    )


def _timed(exercises: list[Exercise]) -> Table:
    """Time and bandwidth of each on the card."""
    limit = copy_bandwidth()
    rows = []
    for exercise in exercises:
        work = _work(exercise)
        answer = make_answer(exercise, my_engine.answer(exercise.id) or "", device.cp)
        seconds = gpu_seconds(work.make(answer, device.cp))
        rate = (work.read_bytes + work.write_bytes) / seconds
        rows.append(
            (
                f"{exercise.id} {exercise.title}",
                f"{seconds * 1e6:,.1f} us",
                f"{rate / 1e9:,.0f} GB/s",
                f"{rate / limit:.0%}",
            )
        )
    return Table(
        title=f"Measured on {device.describe()}, {_work(exercises[0]).label}",
        columns=("", "median time", "bytes needed / time", "share of a copy's"),
        rows=tuple(rows),
        notes=(f"A copy within the card's memory moves {limit / 1e9:,.0f} GB/s, measured just now.",),
    )


def gpu_seconds(run: Any) -> float:
    """Median time of a run on the card, in seconds."""
    result = device.cupyx.profiler.benchmark(run, (), n_repeat=50, n_warmup=5, max_duration=2.0)
    return float(np.median(result.gpu_times))


@functools.cache
def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy of 256 MiB within the card's memory."""
    cp = device.cp
    source, target = cp.zeros(64 << 20, np.float32), cp.empty(64 << 20, np.float32)
    moved = 2 * int(source.nbytes)
    return moved / gpu_seconds(lambda: cp.copyto(target, source))


def _short(value: float) -> str:
    return f"{int(value):,}" if float(value).is_integer() else f"{value:,.4g}"
