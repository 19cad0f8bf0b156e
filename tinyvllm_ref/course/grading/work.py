"""One learner's lesson as a piece of work that any machine can do: plain data in, plain data out."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from ..exercise import Exercise
from ..exercises import exercise_of
from . import runtime
from .beside import run_beside
from .judge import Task, judge_answer
from .limits import Limits


def do(job: Mapping[str, Any]) -> dict[str, Any]:
    """Judge the answers of one submission, and run it under nbval.

    Parameters
    ----------
    job : mapping
        ``version`` of the code that sends it; ``level``; ``limits``; ``answers``, exercise -> ``source``, ``seed``,
        ``before``, ``solution_before``, ``modules``; ``lesson``, the pristine notebook's JSON with ``all_answers``
        for nbval, or None.

    Returns
    -------
    dict
        ``results``, exercise -> a result as a dict; ``nbval``; ``seconds``.

    Raises
    ------
    RuntimeError
        This machine has another version of the code.
    """
    if job["version"] != runtime.version():
        raise RuntimeError(
            f"this machine has another version of tinyvllm ({runtime.version()}, not {job['version']})"
        )
    _own_folders()
    begin = time.perf_counter()
    limits, level = Limits(**job["limits"]), job["level"]
    results = {}
    for id, answer in job["answers"].items():
        exercise = exercise_of(id)
        task = Task(
            answer["source"],
            answer["seed"],
            _pairs(answer["before"]),
            _pairs(answer["solution_before"]),
            tuple(answer["modules"]),
        )
        results[id] = judge_answer(exercise, task, level, limits).as_dict()
    beside = None
    if job["lesson"] is not None:
        beside = run_beside(job["lesson"], job["all_answers"], level, limits).as_dict()
    return {"results": results, "nbval": beside, "seconds": time.perf_counter() - begin}


def _pairs(value: Any) -> tuple[tuple[str, str], ...]:
    return tuple((id, source) for id, source in value)


@functools.cache
def _own_folders() -> str:
    """Whoever's machine this is, their own parts take no part."""
    folder = tempfile.mkdtemp(prefix="tinyvllm-judge-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["TINYVLLM_MY_ENGINE"] = folder
    return folder


def builds_on(id: str) -> tuple[str, ...]:
    """The exercises whose answers come before this one's."""
    exercise = exercise_of(id)
    return exercise.builds_on if isinstance(exercise, Exercise) else ()
