"""The whole course, taken by a program: every answer into its lesson, in order, from nothing, one kernel a lesson.

It ends where a learner ends: all exercises passed, every part the learner's, and a program of their own that writes
what the reference writes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tinyvllm_ref import LLM, SamplingParams
from tinyvllm_ref.course import my_engine, store
from tinyvllm_ref.course.build import discover, read
from tinyvllm_ref.course.cells import exercise_of as exercise_in
from tinyvllm_ref.course.exercise import Exercise
from tinyvllm_ref.course.exercises import lessons
from tinyvllm_ref.course.lessons import solution_cell
from tinyvllm_ref.course.making import notebook
from tinyvllm_ref.course.making.lessons import to_lesson
from tinyvllm_ref.course.making.scratch import scratch_environment
from tinyvllm_ref.parts import LESSONS

from .nbval_runs import REPOSITORY
from .taken import only_the_device

SECONDS_A_CELL = 300


def answered(source):
    """The lesson that a learner opens, with the solution's cell in place of each stub; and what is filled in."""
    lesson = nbformat.reads(notebook.to_bytes(to_lesson(read(source))).decode(), as_version=4)
    filled = []
    for cell in lesson.cells:
        id = exercise_in(cell.source) if cell.cell_type == "code" else None
        if id is not None:
            text = solution_cell(id)
            assert text is not None, id
            assert text != cell.source, f"{id}: the lesson holds its answer already"
            cell.source = text
            filled.append(id)
    return lesson, filled


def texts_of(cell):
    """What a cell has printed, and the plain form of what it has shown."""
    shown = (
        output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in cell.outputs
    )
    return "\n".join(shown)


def take(source, environment):
    """Work through a lesson in a kernel of its own; returns its executed notebook and the exercises in it."""
    lesson, filled = answered(source)
    client = NotebookClient(
        lesson,
        timeout=SECONDS_A_CELL,
        kernel_name="python3",
        resources={"metadata": {"path": str(REPOSITORY / "lessons")}},
    )
    client.execute(env=environment)  # raises where a cell does
    return lesson, filled


def look_at(lesson, filled):
    """Every check has passed, every prediction was noted, nothing came on stderr."""
    code = [cell for cell in lesson.cells if cell.cell_type == "code"]
    for cell in code:
        for output in cell.outputs:
            assert output.output_type != "error", output
            assert output.get("name") != "stderr", (cell.source, output.text)
    said = "".join(texts_of(cell) for cell in code)
    for id in filled:
        assert f"{id} passed: " in said or f"{id} noted: " in said, id


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_course(tmp_path):
    with scratch_environment() as environment:
        folder, home = environment["TINYVLLM_MY_ENGINE"], environment["TINYVLLM_HOME"]
        taken = []
        for source in discover(REPOSITORY):
            lesson, filled = take(source, environment)
            look_at(lesson, filled)
            taken.append(source.stem[:2])
            done = json.loads((Path(home) / "progress.json").read_text(encoding="utf-8"))["exercises"]
            assert all(done[id].get("passed") for id in filled), source.stem
        assert taken == sorted(lessons())
        exercises = [exercise.id for lesson in lessons().values() for exercise in lesson.exercises]
        assert {id for id, entry in done.items() if entry.get("passed")} == set(exercises)
        assert not any(entry.get("failed") for entry in done.values())
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TINYVLLM_MY_ENGINE", folder)
            patch.setenv("TINYVLLM_HOME", home)
            assert store.read() == done
            every_part_is_the_learner_s()
        write_with_the_program(tmp_path, folder)


def every_part_is_the_learner_s():
    made = {
        part for lesson in lessons().values() for exercise in lesson.exercises
        if isinstance(exercise, Exercise) for part in exercise.makes
    }  # fmt: skip
    owners = my_engine.parts().owners()
    assert set(owners) == made
    assert set(owners.values()) == {"learner"}
    missing = set(LESSONS) - made
    assert missing <= {part for part, numbers in LESSONS.items() if numbers[-1] not in lessons()}


def write_with_the_program(tmp_path, folder):
    """`python my_engine/generate.py "Once upon a time"`, with nothing of this project but the device."""
    command = [sys.executable, f"{folder}/generate.py", "Once upon a time"]
    environment = only_the_device(tmp_path / "path")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd="/")
    params = SamplingParams(max_tokens=128, temperature=0.0)
    output = LLM("tiny-stories").generate("Once upon a time", params, use_tqdm=False)[0].outputs[0]
    assert (done.stdout, done.stderr, done.returncode) == (f"Once upon a time{output.text}\n", "", 0)


def test_a_lesson_with_its_answers_left_out_is_not_taken():
    """What this test would overlook if it looked at too little: a lesson as it is opened fails at its first check."""
    from nbclient.exceptions import CellExecutionError

    source = next(path for path in discover(REPOSITORY) if path.stem.startswith("00"))
    lesson = nbformat.reads(notebook.to_bytes(to_lesson(read(source))).decode(), as_version=4)
    client = NotebookClient(
        lesson,
        timeout=SECONDS_A_CELL,
        kernel_name="python3",
        resources={"metadata": {"path": str(REPOSITORY / "lessons")}},
    )
    with scratch_environment() as environment, pytest.raises(CellExecutionError, match="CheckFailed"):
        client.execute(env=environment)
