"""Every solution and every lesson: in step with its source, and through nbval."""

from __future__ import annotations

import os
import re

import pytest

from tinyvllm_ref.course.build import check_lessons, check_solutions, discover, read
from tinyvllm_ref.course.making import notebook
from tinyvllm_ref.course.making.lessons import to_lesson

from .nbval_runs import REPOSITORY, failed_cells

SOURCES = discover(REPOSITORY)
every_lesson = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


def test_every_file_in_solutions_is_taken():
    folder = REPOSITORY / "solutions"
    files = os.listdir(folder) if folder.exists() else []
    assert sorted(path.name for path in SOURCES) == sorted(name for name in files if name.endswith(".py"))


def test_no_notebook_is_without_a_source():
    stems = {path.stem for path in SOURCES}
    for folder in ("solutions", "lessons"):
        made = {path.stem for path in (REPOSITORY / folder).glob("*.ipynb") if ".backup-" not in path.name}
        assert made == stems, f"{folder}/ and solutions/*.py differ"


@every_lesson
def test_the_solution_is_in_step(source):
    check_solutions(REPOSITORY, [source.stem])


@every_lesson
def test_the_lesson_is_in_step(source):
    """Where you have worked in lessons/ yourself this fails, and says in which cells."""
    check_lessons(REPOSITORY, [source.stem])


@every_lesson
def test_the_solution_passes_nbval(source, tmp_path):
    ran, failed, said = failed_cells(source.with_suffix(".ipynb"), tmp_path)
    assert ran == sum(cell.kind == "code" for cell in read(source).cells)
    assert failed == set(), said


# One lesson at each run of the tests; all of them, which take minutes, among the slow ones.
one_lesson = pytest.mark.parametrize(
    "source",
    [pytest.param(path, marks=[] if path.stem.startswith("06_") else pytest.mark.slow) for path in SOURCES],
    ids=lambda path: path.stem,
)


@one_lesson
def test_the_lesson_fails_at_its_checks_and_only_there(source, tmp_path):
    """The lesson is made anew, so that this holds in a repository in which somebody learns."""
    made = to_lesson(read(source))
    path = tmp_path / f"{source.stem}.ipynb"
    notebook.write(path, notebook.to_bytes(made))
    code = [cell for cell in made.cells if cell.cell_type == "code"]
    roles = [cell.metadata.tinyvllm.get("role") for cell in code]
    ran, failed, said = failed_cells(path, tmp_path)
    assert ran == len(code)
    assert failed == {number for number, role in enumerate(roles) if role in ("check", "predict")}, said


@every_lesson
def test_what_reports_tell_to_call_is_imported(source):
    """A report ends with hint("NN.k"): a lesson that does not import it leaves its reader alone."""
    text = source.read_text(encoding="utf-8")
    for name in ("check", "hint", "solution"):
        assert re.search(rf"^from tinyvllm_ref\.course import .*\b{name}\b", text, re.MULTILINE), name
