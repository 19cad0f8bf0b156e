"""What the tests of grading hand in, and how they grade it."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

from tinyvllm_ref.course.exercises import exercise_of, lesson_of
from tinyvllm_ref.course.grading import containment
from tinyvllm_ref.course.grading.grading import Options, grade, pristine_lesson
from tinyvllm_ref.course.grading.limits import Limits
from tinyvllm_ref.course.lessons import solution_cell

CONTAINMENT_VARIABLE = "TINYVLLM_TEST_CONTAINMENT"
NAME = "06_tree_reduction.ipynb"
LIMITS = Limits(patience=20.0, memory_bytes=2 << 30, processes=48, cpu_seconds=30, file_bytes=64 << 20)
IDS = [exercise.id for exercise in lesson_of("06").exercises]


@functools.cache
def level() -> str:
    """The containment that answers run in here: what the environment asks for, else bubblewrap, else limits alone."""
    wanted = os.environ.get(CONTAINMENT_VARIABLE)
    if wanted is not None:
        return containment.find(wanted, LIMITS).level
    try:
        return containment.find("bubblewrap", LIMITS).level
    except containment.NotAvailable:
        return "limits"


def right(id: str) -> str:
    text = solution_cell(id)
    assert text is not None
    return text


def mistake(id: str, name: str = "last round left out") -> str:
    """An answer with a known mistake."""
    exercise = exercise_of(id)
    (found,) = [mistake for mistake in exercise.mistakes if mistake.name == name]
    return f"# Exercise {id} - {exercise.title}\n{found.answer}"


def useless(id: str, before: str = "", after: str = "") -> str:
    """An answer that does nothing right, with other code around it."""
    name = exercise_of(id).answer
    kernel = f'{name} = cp.RawKernel(r"""\nextern "C" __global__ void {name}(const float* x, float* out, int n) {{}}\n'
    return f'# Exercise {id} - a try\n{before}\n{kernel}""", "{name}")\n{after}\n'


def notebook(answers: dict[str, str] | None = None) -> dict:
    """The lesson with answers in it."""
    lesson = json.loads(pristine_lesson("06"))
    for cell in lesson["cells"]:
        id = cell["metadata"].get("tinyvllm", {}).get("exercise")
        if cell["cell_type"] == "code" and answer_role(cell) and id in (answers or {}):
            cell["source"] = answers[id]
    return lesson


def answer_role(cell: dict) -> bool:
    return cell["metadata"].get("tinyvllm", {}).get("role") in ("answer", "predict")


def perfect() -> dict:
    return notebook({id: right(id) for id in IDS})


def hand_in(folder: Path, content: dict | bytes, learner: str = "ada", name: str = NAME) -> Path:
    path = folder / "in" / learner / name
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.write_bytes(data)
    return folder / "in"


def graded(folder: Path, submissions: Path | None = None, *, nbval: bool = False, jobs: int = 1, **more):
    """The report of what lies in ``folder/in``."""
    options = Options(
        submissions or folder / "in",
        folder / "report",
        nbval=nbval,
        jobs=jobs,
        containment=level(),
        limits=LIMITS,
        **more,
    )
    return grade(options, say=lambda line: None)


def row_of(report, learner: str = "ada"):
    (row,) = [row for row in report.rows if row.learner.id == learner]
    return row
