"""Grading a class of lesson 06: learners a minute and peak memory, on this machine's processes and on a Dask cluster.

    python benchmarks/grading.py [--learners 100] [--jobs 2] [--nbval] [--cluster]

Every learner hands in the solutions with a comment of their own, so that nothing is known from another's. With
--cluster a scheduler and its workers are started as processes of this machine, and reached over loopback.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tinyvllm_ref.course.exercises import lesson_of
from tinyvllm_ref.course.grade import Options, grade
from tinyvllm_ref.course.grading import runtime
from tinyvllm_ref.course.grading.beside import with_answers
from tinyvllm_ref.course.grading.grading import pristine_lesson
from tinyvllm_ref.course.lessons import solution_cell

LESSON = "06"


def hand_in(folder: Path, learners: int) -> None:
    """Write the submissions."""
    lesson = lesson_of(LESSON)
    for k in range(learners):
        answers = {
            exercise.id: f"{solution_cell(exercise.id)}\n# learner {k}" for exercise in lesson.exercises
        }
        path = folder / f"learner{k:03}" / f"{lesson.number}_{lesson.slug}.ipynb"
        path.parent.mkdir(parents=True)
        path.write_text(with_answers(pristine_lesson(LESSON), answers), encoding="utf-8")


class Peak:
    """The most memory that this process and all that it starts have at once, in bytes (proportional shares)."""

    def __init__(self) -> None:
        self.bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        me = psutil.Process()
        while not self._done.wait(0.5):
            total = 0
            for process in [me, *me.children(recursive=True)]:
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue
            self.bytes = max(self.bytes, total)


@contextmanager
def dask_cluster(workers: int) -> Iterator[str]:
    """A scheduler and workers on loopback, started as an instructor would."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scheduler.json"
        common = ["--scheduler-file", str(file), "--no-dashboard"]
        python = [sys.executable, "-m"]
        starts = [[*python, "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0", *common]]
        starts += [
            [*python, "distributed.cli.dask_worker", "--host", "127.0.0.1", "--nthreads", "1", *common]
            for _ in range(workers)
        ]
        processes = [
            subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for command in starts
        ]
        try:
            while not file.exists():
                time.sleep(0.1)
            yield json.loads(file.read_text())["address"]
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait()


def measure(learners: int, jobs: int, nbval: bool, scheduler: str | None) -> str:
    """One row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        hand_in(Path(folder) / "in", learners)
        options = Options(
            Path(folder) / "in", Path(folder) / "report", jobs=jobs, nbval=nbval, scheduler=scheduler
        )
        before = os.getloadavg()[0]
        with Peak() as peak:
            begin = time.perf_counter()
            report = grade(options, say=lambda line: None)
            seconds = time.perf_counter() - begin
        begin = time.perf_counter()
        grade(options, say=lambda line: None)
        again = time.perf_counter() - begin
    passed = sum(all(result.passed for result in row.results.values()) for row in report.rows)
    where = "Dask cluster on loopback" if scheduler else "processes of this machine"
    return (
        f"| {where} | {jobs} | {'yes' if nbval else 'no'} | {learners} | {passed} | {seconds:.0f} | "
        f"{60 * learners / seconds:.1f} | {peak.bytes / 2**20:,.0f} | {again:.1f} | {before:.1f} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learners", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--nbval", action="store_true")
    parser.add_argument("--cluster", action="store_true")
    arguments = parser.parse_args()
    runtime.runner_seed()
    print(
        "| where | workers | nbval | learners | all passed | seconds | learners a minute | peak MiB | again, seconds | "
        "load before |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    if not arguments.cluster:
        print(measure(arguments.learners, arguments.jobs, arguments.nbval, None), flush=True)
        return
    with dask_cluster(arguments.jobs) as address:
        print(measure(arguments.learners, arguments.jobs, arguments.nbval, address), flush=True)


if __name__ == "__main__":
    main()
