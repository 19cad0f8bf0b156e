"""Lines that a report names are those of the learner's cell, whatever text stands before the kernel."""

from __future__ import annotations

import pytest

from tinyvllm_ref import emulation
from tinyvllm_ref.course import cells
from tinyvllm_ref.course.checking import report_of_verdict
from tinyvllm_ref.course.exercises import exercise_of
from tinyvllm_ref.course.grading.judge import earlier_parts
from tinyvllm_ref.course.judging import judge
from tinyvllm_ref.course.lessons import solution_cell
from tinyvllm_ref.course.own_lines import in_cell
from tinyvllm_ref.course.runner import Fault


def first_failure(id: str, cell: str):
    """The verdict of an answer cell, run with the earlier parts that it may name."""
    exercise = exercise_of(id)
    texts, _ = earlier_parts(exercise.uses)
    names = cells.run_alone(cell, f"exercise {id}", {"cp": emulation, **texts})
    return judge(exercise, names[exercise.answer], emulation, 0)


def changed(id: str, old: str, new: str) -> tuple[str, int]:
    """The solution with one line changed, and which line of the cell that is."""
    cell = solution_cell(id)
    assert cell is not None
    assert cell.count(old) == 1
    return cell.replace(old, new), cell[: cell.index(old)].count("\n") + 1


# 05.1 has one text before it (BF16_CUDA), 06.2 none.
BROKEN = [("05.1", 'extern "C"', 'extrn "C"'), ("06.2", 'extern "C"', 'extrn "C"')]


@pytest.mark.parametrize(("id", "old", "new"), BROKEN)
def test_a_compiler_s_line_is_that_of_the_cell(id, old, new):
    cell, line = changed(id, old, new)
    report = report_of_verdict(first_failure(id, cell), None, cell)
    assert f"line {line} of the cell: " in report.headline
    assert [(number, here) for number, _, here in report.source if here] == [(line, True)]
    lines = cell.splitlines()
    for number, text, _ in report.source:
        assert lines[number - 1].endswith(text.rstrip())


def test_a_race_s_two_lines_are_those_of_the_cell():
    cell = solution_cell("06.2")
    at = [k for k, line in enumerate(cell.splitlines()) if "__syncthreads();" in line]
    lines = cell.splitlines()
    lines[at[0]] = lines[at[0]].replace("__syncthreads();", "")
    cell = "\n".join(lines)
    report = report_of_verdict(first_failure("06.2", cell), None, cell)
    marked = [(number, text) for number, text, here in report.source if here]
    assert marked
    assert all(lines[number - 1].rstrip() == text.rstrip() for number, text in marked)
    for number, _ in marked:
        assert report.says_of(number)


CELL = "# Exercise 05.1 - a\nx = 1\nk = cp.RawKernel(A + r'''\nint a;\nint b;\nint a;\nint c;\n''', 'k')\n"


@pytest.mark.parametrize(
    ("source", "numbers"),
    [
        (((11, "int b;", True),), [5]),
        (((10, "int a;", True), (11, "int b;", False)), [4, 5]),  # its neighbour tells which of the two it is
        (((12, "int a;", True),), [12]),  # which of the two it is, nothing tells
        (((3, "int elsewhere;", True),), [3]),
        (
            ((9, "float before;", False), (11, "int b;", True)),
            [5],
        ),  # what stands before the cell is not shown
        ((), []),
    ],
)
def test_which_line_of_the_cell_it_is(source, numbers):
    fault = Fault("DataRace", "a race", source, in_kernel=True)
    assert [number for number, _, _ in in_cell(fault, CELL).source] == numbers


def test_words_that_name_lines():
    fault = Fault(
        "DataRace",
        "see line 11 of the kernel",
        ((11, "int b;", True),),
        True,
        ("read, line 11", "written, line 2"),
    )
    found = in_cell(fault, CELL)
    assert (found.message, found.details) == ("see line 5 of the cell", ("read, line 5", "written, line 2"))


def test_python_s_own_lines_stay():
    fault = Fault("TypeError", "line 11", ((11, "int b;", True),))
    assert in_cell(fault, CELL) is fault
