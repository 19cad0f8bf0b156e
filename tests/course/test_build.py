"""From one source to a solution's notebook and a lesson: ids, outputs, refusals, and files that survive a crash."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from typer.testing import CliRunner

from tinyvllm_ref.cli import app
from tinyvllm_ref.course import build, look
from tinyvllm_ref.course.build import LessonError
from tinyvllm_ref.course.making import notebook, setup_cell
from tinyvllm_ref.course.making.classroom import make_class
from tinyvllm_ref.course.making.lessons import to_lesson, work_in
from tinyvllm_ref.course.making.rules import examine
from tinyvllm_ref.course.making.scratch import scratch_environment
from tinyvllm_ref.emulation import cache

from .nbval_runs import failed_cells

SAMPLE = '''\
# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Twice as much — 二倍
# Write it once, $2x$; see ![two bars, one twice the other](bars.png).

# %%
import numpy as np

# cp is CuPy: this is a comment, and no shell command
# %config InlineBackend.figure_format = "png"


def check(exercise, answer):
    assert answer(3) == 6, f"{exercise} is not filled in yet"
    print(f"{exercise} passed ✓")


def measure(exercise):
    return time.perf_counter()


# %% [markdown] jupyter={"source_hidden": true}
# ## The first exercise

# %%
# Exercise 06.1 - twice
def twice(x):
    # BEGIN SOLUTION (1 line): twice x
    return x + x
    # STUB return None
    # END SOLUTION


# %%
check("06.1", twice)

# %% tags=["nbval-ignore-output"]
import time

measure("06.1")

# %% tags=["solution-only"]
print("for instructors")

# %%
# Exercise 06.2 - the same in CUDA
kernel = r"""
int twice(int x) {
    // BEGIN SOLUTION (2 lines): twice x
    int sum = x + x;
    return sum;
    // STUB return 0;
    // END SOLUTION
}
"""


def twice_in_cuda(x):
    return 2 * x if "sum" in kernel else 0


# %%
check("06.2", twice_in_cuda)

# %%
# !echo from the shell
np.arange(3)
'''


def course(folder: Path, **sources: str) -> Path:
    """A course of these sources; ``_06_a`` is of ``06_a.py``, and ``sample`` of ``06_sample.py``."""
    for name, text in sources.items():
        path = folder / "solutions" / f"{'06_sample' if name == 'sample' else name.lstrip('_')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text.encode())
    return folder


def lesson_of(folder: Path, text: str):
    return build.read(course(folder, sample=text) / "solutions" / "06_sample.py")


def quiet(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A course of the sample, executed and built. Tests read it."""
    root = course(tmp_path_factory.mktemp("made"), sample=SAMPLE)
    build.run_solutions(root, say=quiet)
    build.build_lessons(root, say=quiet)
    return root


@pytest.fixture
def built(tmp_path) -> Path:
    """A lesson of the sample that a test may change."""
    root = course(tmp_path, sample=SAMPLE)
    build.build_lessons(root, say=quiet)
    return root / "lessons" / "06_sample.ipynb"


# ---------------- what is made
def test_the_solution_holds_the_source_and_its_outputs(made):
    found = nbformat.read(made / "solutions" / "06_sample.ipynb", as_version=4)
    nbformat.validate(found)
    by_id = {cell.id: cell for cell in found.cells}
    assert by_id["check-06-1"].outputs[0].text == "06.1 passed ✓\n"
    assert "BEGIN SOLUTION (1 line)" in by_id["exercise-06-1"].source
    assert by_id["the-first-exercise"].metadata.jupyter == {"source_hidden": True}
    assert by_id["measure-06-1"].metadata.tags == ["nbval-ignore-output"]
    code = [cell for cell in found.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all("execution" not in cell.metadata for cell in code)
    assert "version" not in found.metadata.language_info
    assert found.metadata.kernelspec.name == "python3"


def test_magics_are_magics_and_comments_are_comments(made):
    found = nbformat.read(made / "solutions" / "06_sample.ipynb", as_version=4)
    by_id = {cell.id: cell for cell in found.cells}
    first = by_id["import-numpy-as-np"].source
    assert '\n%config InlineBackend.figure_format = "png"\n' in first
    assert "\n# cp is CuPy: this is a comment" in first
    shell = by_id["echo-from-the-shell"]
    assert shell.source.startswith("!echo from the shell\n")
    assert shell.outputs[0].text.replace("\r", "") == "from the shell\n"


def test_the_lesson_holds_stubs_and_no_outputs(made):
    found = nbformat.read(made / "lessons" / "06_sample.ipynb", as_version=4)
    nbformat.validate(found)
    solution = nbformat.read(made / "solutions" / "06_sample.ipynb", as_version=4)
    by_id = {cell.id: cell for cell in found.cells}
    assert by_id["exercise-06-1"].source == (
        "# Exercise 06.1 - twice\ndef twice(x):\n    # TODO (about 1 line): twice x\n    return None"
    )
    assert "    // TODO (about 2 lines): twice x\n    return 0;\n}" in by_id["exercise-06-2"].source
    kept = [cell for cell in solution.cells if "solution-only" not in cell.metadata.get("tags", [])]
    first = next(number for number, cell in enumerate(kept) if cell.cell_type == "code")
    ids = [cell.id for cell in kept]
    assert [*ids[:first], setup_cell.ID, *ids[first:]] == list(by_id)
    assert "for instructors" not in (made / "lessons" / "06_sample.ipynb").read_text()
    for cell in found.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
    own = by_id["exercise-06-1"].metadata.tinyvllm
    assert (own.exercise, own.role) == ("06.1", "answer")
    assert by_id["check-06-2"].metadata.tinyvllm.role == "check"
    assert set(found.metadata.tinyvllm.stubs) == {"06.1", "06.2"}


def test_checks_are_clean_after_making(made):
    build.check_solutions(made)
    build.check_lessons(made)


def test_the_solution_passes_nbval(made, tmp_path):
    ran, failed, said = failed_cells(made / "solutions" / "06_sample.ipynb", tmp_path)
    assert ran == 8
    assert failed == set(), said


def test_the_lesson_fails_at_its_checks_and_only_there(made, tmp_path):
    ran, failed, said = failed_cells(made / "lessons" / "06_sample.ipynb", tmp_path)
    assert ran == 8
    assert failed == {3, 6}, said


def test_nbval_sees_another_output(made, tmp_path):
    """That the solution passes says something: a notebook with another output fails at its cell."""
    found = nbformat.read(made / "solutions" / "06_sample.ipynb", as_version=4)
    (number,) = [n for n, cell in enumerate(found.cells) if cell.id == "check-06-1"]
    found.cells[number].outputs[0].text = "06.1 passed, they say\n"
    path = tmp_path / "06_sample.ipynb"
    nbformat.write(found, path)
    assert failed_cells(path, tmp_path)[1] == {2}


def test_making_it_again_gives_the_same_bytes(made, tmp_path):
    root = course(tmp_path, sample=SAMPLE.replace("\n", "\r\n"))  # as an editor on Windows saves it
    build.run_solutions(root, say=quiet)
    build.build_lessons(root, say=quiet)
    for name in ("lessons/06_sample.ipynb", "solutions/06_sample.ipynb"):
        here, there = (json.loads((folder / name).read_bytes()) for folder in (root, made))
        for cells in (here["cells"], there["cells"]):  # its output is a time
            for cell in cells:
                if cell["id"] == "measure-06-1":
                    cell.pop("outputs")
        assert here == there
    assert (root / "lessons/06_sample.ipynb").read_bytes() == (made / "lessons/06_sample.ipynb").read_bytes()


def test_a_solution_without_times_is_the_same_to_the_byte_and_is_not_touched(tmp_path):
    root = course(tmp_path, sample="# %%\nprint('one')\nprint('two')\n{'a': 1}\n")
    said = []
    build.run_solutions(root, say=said.append)
    path = root / "solutions" / "06_sample.ipynb"
    data, changed = path.read_bytes(), path.stat().st_mtime_ns
    build.run_solutions(root, say=said.append)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (data, changed)
    assert [line.split(" (")[0] for line in said] == [
        "solutions/06_sample.ipynb: written",
        "solutions/06_sample.ipynb: as it was",
    ]


# ---------------- ids
def ids(folder: Path, text: str) -> list[str]:
    return [cell.id for cell in lesson_of(folder, text).cells]


def test_a_change_in_a_cell_leaves_all_ids(tmp_path):
    before = ids(tmp_path, SAMPLE)
    assert len(set(before)) == len(before)
    for line in ("# Write it once", "    print(f", "    return x + x", "int twice(int x) {", "np.arange(3)"):
        assert line in SAMPLE
        assert ids(tmp_path, SAMPLE.replace(line, "# a line more\n" + line, 1)) == before


def test_a_cell_more_or_less_leaves_the_others_ids(tmp_path):
    before = ids(tmp_path, SAMPLE)
    marker = '# %%\ncheck("06.1", twice)'
    more = ids(tmp_path, SAMPLE.replace(marker, "# %% [markdown]\n# A word before it\n\n" + marker))
    assert [name for name in more if name != "a-word-before-it"] == before
    less = ids(
        tmp_path,
        SAMPLE.replace('# %% [markdown] jupyter={"source_hidden": true}\n# ## The first exercise\n', ""),
    )
    assert less == [name for name in before if name != "the-first-exercise"]


def test_another_heading_changes_its_own_id_alone(tmp_path):
    before = ids(tmp_path, SAMPLE)
    after = ids(tmp_path, SAMPLE.replace("## The first exercise", "## Exercise one"))
    assert [(a, b) for a, b in zip(before, after, strict=True) if a != b] == [
        ("the-first-exercise", "exercise-one")
    ]


def test_ids_are_unique_and_valid_whatever_the_cells_are(tmp_path):
    cells = [
        "x",
        "x",
        "x-2",
        "x",
        "二倍",
        "二倍",
        "é" * 300,
        "a " * 200,
        "- [ ] **b**",
        "Exercise 06 1",
        "check 06 1",
    ]
    text = "".join(f"# %% [markdown]\n# {cell}\n\n" for cell in cells)
    text += '# %%\n# Exercise 06.1 - a\nx = 1\n\n# %%\ncheck("06.1", x)\n\n# %%\ncheck("06.1", x)\n'
    found = ids(tmp_path, text)
    assert len(set(found)) == len(found) == len(cells) + 3
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) for name in found)
    assert found[:4] == ["x", "x-3", "x-2", "x-4"]


# ---------------- the source
def test_a_marker_inside_of_a_string_begins_no_cell(tmp_path):
    lesson = lesson_of(tmp_path, '# %%\ntext = """\n# %% not a cell\n# %time\n%d\n"""\nprint(text % 3)\n')
    (cell,) = lesson.cells
    assert cell.source == 'text = """\n# %% not a cell\n# %time\n%d\n"""\nprint(text % 3)'


def test_cell_magics(tmp_path):
    root = course(
        tmp_path, sample="# %%\n# %%capture shown\nprint('unseen')\n\n# %%\nprint(shown.stdout.upper())\n"
    )
    build.run_solutions(root, say=quiet)
    found = nbformat.read(root / "solutions" / "06_sample.ipynb", as_version=4)
    assert found.cells[0].source == "%%capture shown\nprint('unseen')"
    assert found.cells[0].outputs == []
    assert found.cells[1].outputs[0].text == "UNSEEN\n\n"


@pytest.mark.parametrize("prefix", ["\ufeff", ""])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends_and_byte_order_marks_change_nothing(tmp_path, end, prefix):
    plain = lesson_of(tmp_path, SAMPLE)
    other = lesson_of(tmp_path, prefix + SAMPLE.replace("\n", end))
    assert other == plain


def test_lines_of_cells_are_those_of_the_file(tmp_path):
    lines = SAMPLE.split("\n")
    for cell in lesson_of(tmp_path, SAMPLE).cells:
        first = cell.python.split("\n")[0]
        assert lines[cell.line - 1] in (first, f"# {first}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# %%\nx = (1\n\n# %%\ny = 2\n", "not Python"),
        ("# %%\nif x:\n        a\n    b\n", "06_sample.py:4: not Python"),
        ("# %%\nx = = 1\n", "06_sample.py:2: cell x-1: not valid Python"),
        ("x = 1\n# %%\ny = 2\n", "1 cells are marked with # %% at the start of a line, and Jupytext sees 2"),
        ("# %%\nif 1:\n    # %%\n    y = 2\n", "Jupytext sees 2"),
        (
            "# ---\n# jupyter:\n#   kernelspec:\n#     name: a\n# ---\n\n# %%\nx = 1\n",
            "'display_name' is a required",
        ),
    ],
)
def test_a_source_that_can_not_be_read(tmp_path, text, message):
    with pytest.raises(LessonError) as caught:
        lesson_of(tmp_path, text)
    assert message in str(caught.value)


def test_a_source_that_is_not_utf8(tmp_path):
    course(tmp_path, sample="")
    path = tmp_path / "solutions" / "06_sample.py"
    path.write_bytes(b"# %%\nx = '\xff'\n")
    with pytest.raises(LessonError, match=r"solutions/06_sample\.py: not UTF-8 at byte 10"):
        build.read(path)


def test_lessons_are_found_by_number_name_and_path(tmp_path):
    root = course(tmp_path, _06_a="", _07_b="")
    first, second = (root / "solutions" / name for name in ("06_a.py", "07_b.py"))
    assert build.discover(root) == [first, second]
    for name in ("06", "6", "06_a", "solutions/06_a.py", "lessons/06_a.ipynb"):
        assert build.discover(root, [name]) == [first]
    assert build.discover(root, ["7", "6", "06"]) == [first, second]
    with pytest.raises(ValueError, match=r"no solutions/08_\*.py; the lessons there are: 06, 07"):
        build.discover(root, ["8"])
    with pytest.raises(ValueError, match="names no lesson"):
        build.discover(root, ["tree"])
    course(tmp_path, _06_c="")
    with pytest.raises(ValueError, match=r"06_c\.py and 06_a\.py are both lesson 06"):
        build.discover(root)


def test_every_file_must_be_named_as_a_lesson(tmp_path):
    with pytest.raises(ValueError, match=r"solutions/helper\.py: a lesson's name must be NN_topic\.py"):
        build.discover(course(tmp_path, helper="", _06_a=""))


# ---------------- rules
def answer(body: str = "", number: str = "06.1", check: str | None = None) -> str:
    body = body or "# BEGIN SOLUTION (1 line): one\nx = 1\n# STUB x = None\n# END SOLUTION"
    below = f'# %%\ncheck("{number}", x)\n' if check is None else check
    return f"# %%\n# Exercise {number} - a title\n{body}\n\n{below}\n"


BEGIN, END = "# BEGIN SOLUTION (1 line): one\n", "\n# END SOLUTION"
FOUR_LINES = BEGIN.replace("1 line", "4 lines")


@pytest.mark.parametrize(
    ("text", "line", "cell", "message"),
    [
        (answer(BEGIN + "x = 1"), 3, "exercise-06-1", "without an END SOLUTION"),
        (answer("x = 1" + END), 4, "exercise-06-1", "without a BEGIN SOLUTION"),
        (answer(BEGIN + BEGIN + "x = 1" + END), 4, "exercise-06-1", "inside of the one"),
        (answer(BEGIN + "x = 1\ny = 1\nz = 1\n# STUB x = 1" + END), 3, "exercise-06-1", "says 1 lines and has 3"),
        (answer(FOUR_LINES + "x = 1\n# STUB x = 1" + END), 3, "exercise-06-1", "says 4 lines and has 1"),
        (answer(BEGIN + "# STUB x = 1" + END), 3, "exercise-06-1", "says 1 lines and has 0"),
        (answer("x = 1"), 2, "exercise-06-1", "an answer cell without a region"),
        (answer("def f():\n    " + BEGIN + "    x = 1" + END), 2, "exercise-06-1", "its stub is not valid Python"),
        (answer(check=""), 2, "exercise-06-1", 'no cell with check("06.1", ...) under it'),
        (answer(check='# %% tags=["solution-only"]\ncheck("06.1", x)\n'), 2, "exercise-06-1", "no cell with check"),
        (answer(check="") + answer() , 2, "exercise-06-1", "no cell with check"),
        (answer() + answer(), 12, "exercise-06-1-2", "exercise 06.1 is there already, in line 2"),
        (answer(number="07.1"), 2, "exercise-07-1", "exercise 07.1 in lesson 06"),
        (answer() + '# %%\ncheck("06.2", x)\n', 12, "check-06-2", 'check("06.2", ...) has no answer cell above it'),
        (answer() + "# %%\ncheck(name, x)\n", 12, "check-name-x", "must be given its exercise as a string"),
        (answer().replace(" - a title", ""), 2, "exercise-06-1", "must be `# Exercise 06.2 - title`"),
        (answer().replace("# Exercise", "y = 2\n# Exercise"), 3, "y-2", "is the first line of an answer cell"),
        ("# %%\n" + BEGIN + "x = 1" + END, 2, "begin-solution-1-line-one", "a region outside of an answer cell"),
        ("# %% [markdown]\n# # Title\n#\n# ![](a.png)\n", 4, "title", "an image without alternative text"),
        ("# %% [markdown]\n# ![ ][a]\n", 2, "a", "an image without alternative text"),
        ('# %% [markdown]\n# text\n# <img src="a.png">\n', 3, "text", "an image without alternative text"),
        ('# %% [markdown]\n# <img alt="" src="a.png">\n', 2, "img-alt-src-a-png", "an image without alternative text"),
        ('# %%\nmeasure("06.1")\n', 2, "measure-06-1", 'measure() shows what differs between runs: give'),
        ('# %%\nshow("06.1")\n', 2, "show-06-1", "show() shows"),
        ('# %%\nshow_engine("06")\n', 2, "show-engine-06", "show_engine() shows"),
        ("# %%\nprogress()\n", 2, "progress", "progress() shows"),
        ("# %%\nx = llm.generate(['a'])\n", 2, "x-llm-generate-a", "generate() shows"),
        ("# %%\nx = 1\n\n# %%\n\n# %% [markdown]\n# a\n", 6, "cell", "an empty code cell"),
    ],
)  # fmt: skip
def test_rules_name_the_cell_and_the_line(tmp_path, text, line, cell, message):
    problems = examine(lesson_of(tmp_path, text))
    found = [str(problem) for problem in problems]
    about = [problem for problem in problems if message in problem.message]
    assert len(about) == 1, found
    (problem,) = about
    assert (problem.line, problem.cell) == (line, cell)
    assert str(problem).startswith(f"solutions/06_sample.py:{line}: cell {cell}: ")
    with pytest.raises(LessonError, match=r"06_sample\.py"):
        build.build_lessons(tmp_path, say=quiet)
    assert not (tmp_path / "lessons").exists()


PREDICTION = """\
# %%
# Exercise 06.1 - how many bytes
predict(
    "06.1",
    # BEGIN SOLUTION (1 line): your number
    bytes=4096,
    # STUB bytes=...,
    # END SOLUTION
)
"""


@pytest.mark.parametrize(
    "text",
    [
        SAMPLE,
        answer() + answer(number="06.2"),
        PREDICTION,
        answer(check='# %%\npredict("06.1", bytes=x)\n'),
        "# %% [markdown]\n# `![](a.png)` is how\n#\n# ```\n# ![](b.png)\n# ```\n# <img alt='a bar' src='a.png'>\n",
        '# %% tags=["nbval-ignore-output"]\nmeasure("06.1")\n',
        "# %%\ndef f():\n    return show(1)\n",
        "# %%\nplt.show()\nawait something()\n",
    ],
)
def test_what_the_rules_allow(tmp_path, text):
    assert examine(lesson_of(tmp_path, text)) == []


def test_a_prediction_is_a_cell_with_both_roles(tmp_path):
    lesson = lesson_of(tmp_path, PREDICTION)
    assert [(cell.id, cell.role, cell.exercise) for cell in lesson.cells] == [
        ("exercise-06-1", "predict", "06.1")
    ]
    _, cell = to_lesson(lesson).cells  # behind the set-up
    assert cell.source.split("\n")[2:] == [
        '    "06.1",',
        "    # TODO (about 1 line): your number",
        "    bytes=...,",
        ")",
    ]


def test_all_problems_are_told_at_once(tmp_path):
    course(tmp_path, _06_a="# %% [markdown]\n# ![](a.png)\n\n# %%\nprogress()\n", _07_b="# %%\nx = = 1\n")
    with pytest.raises(LessonError) as caught:
        build.build_lessons(tmp_path, say=quiet)
    assert [str(problem).split(":")[:2] for problem in caught.value.problems] == [
        ["solutions/06_a.py", "2"],
        ["solutions/06_a.py", "5"],
        ["solutions/07_b.py", "2"],
    ]


# ---------------- executing
def failure(folder: Path, text: str, **options) -> str:
    root = course(folder, sample=text)
    with pytest.raises(LessonError) as caught:
        build.run_solutions(root, say=quiet, **options)
    assert not (root / "solutions" / "06_sample.ipynb").exists()
    return str(caught.value)


def test_an_error_names_the_cell_and_shows_the_traceback(tmp_path):
    said = failure(tmp_path, "# %%\nx = 0\n\n# %%\n# a division\n1 / x\n")
    assert said.startswith("solutions/06_sample.py:5: cell a-division: ZeroDivisionError: division by zero\n")
    assert "----> 2 1 / x" in said
    assert "\x1b" not in said


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys\nprint('careful', file=sys.stderr)", "it wrote on stderr:\ncareful"),
        ("import warnings\nwarnings.warn('old')", "UserWarning: old"),
        ("object()", "its output has an address, 0x"),
        ("import os\nos.getcwd()", "its output names a folder of this machine"),
        ("import os\nos.environ['TINYVLLM_HOME']", "its output names a folder of this machine"),
        ("import os\nos._exit(3)", "the kernel died"),
        ("import os\nos.write(2, b'last words'), os._exit(3)", "last words"),
    ],
)
def test_what_a_solution_must_not_do(tmp_path, code, message):
    said = failure(tmp_path, f"# %%\n{code}\n")
    assert said.startswith("solutions/06_sample.py:2: cell ")
    assert message in said


def test_a_cell_that_does_not_end(tmp_path):
    said = failure(tmp_path, "# %%\nimport time\ntime.sleep(60)\n", timeout=1)
    assert said == "solutions/06_sample.py:2: cell import-time: still running after 1 s"


def test_addresses_are_allowed_where_outputs_are_not_compared(tmp_path):
    root = course(tmp_path, sample='# %% tags=["nbval-ignore-output"]\nobject()\n')
    build.run_solutions(root, say=quiet)
    assert "0x" in (root / "solutions" / "06_sample.ipynb").read_text()


def test_a_cell_that_is_to_raise_keeps_no_traceback(tmp_path):
    root = course(tmp_path, sample='# %% tags=["raises-exception"]\n1 / 0\n\n# %%\nprint("on")\n')
    build.run_solutions(root, say=quiet)
    found = nbformat.read(root / "solutions" / "06_sample.ipynb", as_version=4)
    assert found.cells[0].outputs[0].traceback == ["ZeroDivisionError: division by zero"]
    assert found.cells[1].outputs[0].text == "on\n"
    assert failed_cells(root / "solutions" / "06_sample.ipynb", tmp_path)[1] == set()


def test_a_notebook_that_fails_does_not_stop_the_others(tmp_path):
    root = course(tmp_path, _06_a="# %%\n1 / 0\n", _07_b="# %%\nprint(7)\n", _08_c="# %%\nx = = 1\n")
    said = []
    with pytest.raises(LessonError) as caught:
        build.run_solutions(root, jobs=2, say=said.append)
    assert [problem.path.name for problem in caught.value.problems] == ["08_c.py", "06_a.py"]
    assert [line.split(":")[0] for line in said] == ["solutions/07_b.ipynb"]
    assert sorted(path.name for path in (root / "solutions").glob("*.ipynb")) == ["07_b.ipynb"]


def test_a_kernel_has_folders_of_its_own_and_the_user_s_compiled_kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("TINYVLLM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TINYVLLM_DEVICE", "cuda")
    monkeypatch.setenv("TINYVLLM_CHECKS", "fast")
    kernels = cache.folder()
    with scratch_environment() as environment:
        home = Path(environment["TINYVLLM_HOME"])
        assert home != tmp_path / "home"
        assert [path.name for path in home.iterdir()] == ["kernels"]
        assert (home / "kernels").samefile(kernels)
        assert (environment["TINYVLLM_DEVICE"], environment["TINYVLLM_CHECKS"]) == ("cpu", "full")
        code = "from tinyvllm_ref.emulation import cache; print(cache.get_or_make('made', lambda p: p.write_text('x')))"
        subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
    assert (kernels / "made").read_text() == "x"
    assert not home.exists()


# ---------------- files
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.ipynb"
    path.write_bytes(b"old")

    def fail(*arguments):
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        notebook.write(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_that_is_killed_leaves_the_old_notebook(tmp_path):
    root = course(tmp_path, sample="# %%\nprint(1)\n")
    build.run_solutions(root, say=quiet)
    path, begun = root / "solutions" / "06_sample.ipynb", tmp_path / "begun"
    old = path.read_bytes()
    slow = f"import os, pathlib, time\npathlib.Path({str(begun)!r}).write_text(str(os.getpid()))\ntime.sleep(600)"
    course(tmp_path, sample=f"# %%\n{slow}\n")
    program = [sys.executable, "-m", "tinyvllm_ref", "run-solutions", "--root", str(root)]
    with subprocess.Popen(program, stdout=subprocess.DEVNULL) as process:
        while not (begun.exists() and begun.read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert path.read_bytes() == old
    assert sorted(file.name for file in path.parent.iterdir()) == ["06_sample.ipynb", "06_sample.py"]
    with pytest.raises(LessonError, match="was changed since it was made"):
        build.check_solutions(root)
    wait_for_end(int(begun.read_text()))


def test_ctrl_c_ends_the_kernels(tmp_path):
    cell = "import os, pathlib, time\npathlib.Path({!r}).write_text(str(os.getpid()))\ntime.sleep(600)"
    marks = [tmp_path / "a", tmp_path / "b"]
    root = course(
        tmp_path, **{f"_0{n}_x": f"# %%\n{cell.format(str(mark))}\n" for n, mark in enumerate(marks)}
    )
    program = [sys.executable, "-m", "tinyvllm_ref", "run-solutions", "--jobs", "2", "--root", str(root)]
    with subprocess.Popen(
        program,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What a shell starts with & is told to ignore Ctrl-C, and so is what that starts: these tests, say.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        while not all(mark.exists() and mark.read_text() for mark in marks):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said
    for mark in marks:
        wait_for_end(int(mark.read_text()))


def wait_for_end(process: int) -> None:
    """A kernel looks for its parent once a second."""
    for _ in range(600):
        try:
            os.kill(process, 0)
            state = Path(f"/proc/{process}/stat")
            if state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return  # ended, and nobody here is its parent
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.kill(process, signal.SIGKILL)
    raise AssertionError(f"the kernel {process} was left behind")


# ---------------- --check of solutions
def edit(path: Path, change) -> None:
    found = nbformat.read(path, as_version=4)
    change(found)
    path.write_bytes(notebook.to_bytes(found))


def set_source(text: str, number: int = 1):
    return lambda found: found.cells[number].__setitem__("source", text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_source("import os"), "cell import-numpy-as-np: differs from 06_sample.py"),
        (set_source("# A title", 0), "cell twice-as-much: differs from 06_sample.py"),
        (lambda found: found.cells.pop(), "its cells are not those of 06_sample.py"),
        (lambda found: found.cells.reverse(), "its cells are not those of 06_sample.py"),
        (
            lambda found: found.cells[1].update(execution_count=None),
            "cell import-numpy-as-np: was not executed",
        ),
        (lambda found: found.cells[5].metadata.update(tags=[]), "cell measure-06-1: differs"),
        (lambda found: found.metadata.kernelspec.update(name="julia"), "its metadata were changed"),
        (lambda found: found.metadata.pop("tinyvllm"), "06_sample.py was changed since it was made"),
    ],
)
def test_a_solution_that_was_changed_by_hand(made, tmp_path, change, message):
    root = course(tmp_path, sample=SAMPLE)
    path = root / "solutions" / "06_sample.ipynb"
    path.write_bytes((made / "solutions" / "06_sample.ipynb").read_bytes())
    build.check_solutions(root)
    edit(path, change)
    with pytest.raises(LessonError, match=r"run `make solutions ONLY=06`") as caught:
        build.check_solutions(root)
    assert message in str(caught.value)
    assert len(caught.value.problems) == 1


def test_a_solution_whose_source_was_changed(made, tmp_path):
    root = course(tmp_path, sample=SAMPLE + "\n# a remark\n")
    path = root / "solutions" / "06_sample.ipynb"
    with pytest.raises(LessonError, match=r"solutions/06_sample\.ipynb: is not there"):
        build.check_solutions(root)
    path.write_bytes((made / "solutions" / "06_sample.ipynb").read_bytes())
    with pytest.raises(LessonError, match=r"06_sample\.ipynb: 06_sample\.py was changed since it was made"):
        build.check_solutions(root)
    path.write_text("{")
    with pytest.raises(LessonError, match="is not a notebook"):
        build.check_solutions(root)


REPORTS = """# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course.reports import PassCard, Table
print("a figure of this run: 42")
Table("T", ["a"], [[1]])

# %%
PassCard("06.1", "T", "2 points")

# %%
from IPython.display import HTML
HTML("<style>.mine { color: red; }</style><div class='mine'>mine</div>")
"""


def test_an_older_style_sheet_is_noticed_and_replaced_and_nothing_else(tmp_path, monkeypatch):
    root = course(tmp_path, sample=REPORTS)
    path = root / "solutions" / "06_sample.ipynb"
    build.run_solutions(root, say=quiet)
    made_today = path.read_bytes()
    html = [output["data"]["text/html"] for cell in notebook.read(path).cells for output in cell.outputs[-1:]]
    assert [look.SHEET in html[0], look.PASS_CSS in html[1], ".mine" in html[2]] == [True] * 3
    build.check_solutions(root)
    said: list[str] = []
    build.restyle(root, say=said.append)
    assert (said, path.read_bytes()) == ([], made_today)

    monkeypatch.setattr(look, "SHEET", look.SHEET + " .tv .tv-new { margin: 0; }")
    monkeypatch.setattr(look, "PASS_CSS", look.PASS_CSS + " .tv .tv-new { margin: 1px; }")
    with pytest.raises(
        LessonError, match=r"another style sheet than today's; .*--restyle 06` replaces it"
    ) as caught:
        build.check_solutions(root)
    assert len(caught.value.problems) == 1
    build.restyle(root, ["06"], say=said.append)
    assert said == ["solutions/06_sample.ipynb: 2 outputs have today's style sheet"]
    build.check_solutions(root)
    new = path.read_text()
    assert new.count(" .tv .tv-new { margin: 0; }") == new.count(" .tv .tv-new { margin: 1px; }") == 1
    old_again = new.replace(" .tv .tv-new { margin: 0; }", "").replace(" .tv .tv-new { margin: 1px; }", "")
    assert old_again.encode() == made_today


def test_notebooks_without_a_source(made, tmp_path):
    root = course(tmp_path, sample=SAMPLE)
    for folder in ("solutions", "lessons"):
        (root / folder).mkdir(exist_ok=True)
        for name in ("06_sample", "09_gone"):
            data = (made / folder / "06_sample.ipynb").read_bytes()
            (root / folder / f"{name}.ipynb").write_bytes(data)
    with pytest.raises(
        LessonError, match=r"^solutions/09_gone\.ipynb: there is no 09_gone\.py that it comes from$"
    ):
        build.check_solutions(root)
    with pytest.raises(LessonError, match=r"^lessons/09_gone\.ipynb: there is no solutions/09_gone\.py"):
        build.check_lessons(root)
    build.check_solutions(root, ["06"])
    build.check_lessons(root, ["06"])


# ---------------- lessons in which somebody works
def answer_cell(found):
    return next(cell for cell in found.cells if cell.id == "exercise-06-1")


MINE = "# Exercise 06.1 - twice\ntwice = 2"
WORK = [
    (lambda found: answer_cell(found).update(source=MINE), "cell 5 (# Exercise 06.1 - twice) was changed"),
    (lambda found: answer_cell(found).update(execution_count=3), "cell 5 (# Exercise 06.1 - twice) was run"),
    (lambda found: found.cells[4].outputs.append(nbformat.v4.new_output("stream", text="no")), "was run"),
    (lambda found: found.cells.append(nbformat.v4.new_code_cell("x = 1")), "cell 11 (x = 1) was added"),
    (lambda found: found.cells.insert(1, nbformat.v4.new_markdown_cell("my note")), "cell 2 (my note) was added"),
    (lambda found: found.cells[0].update(source="# Mine"), "cell 1 (# Mine) was changed"),
    (lambda found: answer_cell(found).metadata.pop("tinyvllm"), "was added"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WORK)
def test_work_is_not_overwritten(built, change, message):
    edit(built, change)
    before = built.read_bytes()
    with pytest.raises(LessonError) as caught:
        build.build_lessons(built.parents[1], say=quiet)
    assert message in str(caught.value)
    assert "use --force: it is then kept as 06_sample.backup-1.ipynb" in str(caught.value)
    assert built.read_bytes() == before
    assert list(built.parent.iterdir()) == [built]


def test_force_keeps_what_was_there(built):
    root, fresh = built.parents[1], built.read_bytes()
    kept = []
    for number in (1, 2):
        edit(built, set_source(f"mine = {number}"))
        kept.append(built.read_bytes())
        said = []
        build.build_lessons(root, force=True, say=said.append)
        assert said == [
            f"lessons/06_sample.ipynb: written; the one with work in it is 06_sample.backup-{number}.ipynb"
        ]
    assert built.read_bytes() == fresh
    assert [built.with_name(f"06_sample.backup-{n}.ipynb").read_bytes() for n in (1, 2)] == kept
    build.check_lessons(root)  # backups are nobody's lesson
    build.build_lessons(root, force=True, say=quiet)
    assert len(list(built.parent.iterdir())) == 3


def test_a_lesson_of_an_older_source_holds_no_work(built):
    root = course(
        built.parents[1], sample=SAMPLE.replace("twice x", "x, twice").replace("- twice", "- double")
    )
    assert work_in(built) == []
    build.build_lessons(root, say=quiet)
    assert "x, twice" in built.read_text()


def test_an_empty_cell_and_another_layout_are_no_work(built):
    found = json.loads(built.read_text())
    found["cells"].append(
        {
            "cell_type": "code",
            "id": "a1",
            "metadata": {},
            "source": [],
            "outputs": [],
            "execution_count": None,
        }
    )
    built.write_text(json.dumps(found))
    assert work_in(built) == []
    with pytest.raises(LessonError, match=r"is not what its source makes"):
        build.check_lessons(built.parents[1])
    build.build_lessons(built.parents[1], say=quiet)
    build.check_lessons(built.parents[1])


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"\xff", b'{"nbformat": 4}', b'{"nbformat": 3, "worksheets": []}']
)
def test_a_file_that_is_no_notebook_is_not_overwritten(built, data):
    built.write_bytes(data)
    with pytest.raises(LessonError, match="it can not be read as a notebook"):
        build.build_lessons(built.parents[1], say=quiet)
    with pytest.raises(LessonError, match="is not a notebook"):
        build.check_lessons(built.parents[1])
    assert built.read_bytes() == data


def test_one_lesson_with_work_does_not_stop_the_others(built):
    root = course(built.parents[1], _07_b="# %%\nprint(7)\n")
    edit(built, WORK[0][0])
    said = []
    with pytest.raises(LessonError, match="06_sample"):
        build.build_lessons(root, say=said.append)
    assert said == ["lessons/07_b.ipynb: written"]


def test_a_check_shows_the_difference(built):
    edit(
        built,
        lambda found: answer_cell(found).update(source="# Exercise 06.1 - twice\ndef twice(x): return 2 * x"),
    )
    with pytest.raises(LessonError) as caught:
        build.check_lessons(built.parents[1])
    said = str(caught.value)
    assert said.startswith(
        "lessons/06_sample.ipynb: is not what its source makes; run `make lessons ONLY=06`\n"
    )
    assert "\n-def twice(x): return 2 * x\n" in said
    assert "\n+    # TODO (about 1 line): twice x\n" in said
    edit(built, lambda found: found.cells.clear())
    with pytest.raises(LessonError, match=r"\(\d+ lines more\)$"):
        build.check_lessons(built.parents[1])
    built.unlink()
    with pytest.raises(LessonError, match=r"lessons/06_sample\.ipynb: is not there"):
        build.check_lessons(built.parents[1])


# ---------------- a class's copy
@pytest.fixture
def repository(built) -> Path:
    root = built.parents[1]
    others = {"README.md": "read me", "tests/golden/a.json": "{}", "tests/test_a.py": "", "data/ü b.txt": "x"}
    for name, text in others.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "tool.sh").write_text("#!/bin/sh\n")
    (root / "tool.sh").chmod(0o755)
    (root / "link").symlink_to("README.md")
    for arguments in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", "-C", str(root), *arguments], check=True, timeout=60)
    (root / "untracked.txt").write_text("mine")
    return root


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def test_a_class_gets_lessons_without_what_answers_them(repository, tmp_path_factory):
    target = tmp_path_factory.mktemp("class") / "new" / "class"
    fresh = (repository / "lessons" / "06_sample.ipynb").read_bytes()
    edit(repository / "lessons" / "06_sample.ipynb", WORK[0][0])  # the instructor tried it
    said = []
    make_class(repository, target, say=said.append)
    assert files_in(target) == ["README.md", "data/ü b.txt", "lessons/06_sample.ipynb", "link", "tool.sh"]
    assert (target / "lessons" / "06_sample.ipynb").read_bytes() == fresh
    assert (target / "link").is_symlink()
    assert os.access(target / "tool.sh", os.X_OK)
    assert "1 lessons" in said[0]
    assert list(target.parent.iterdir()) == [target]
    with pytest.raises(ValueError, match="it has something in it"):
        make_class(repository, target, say=quiet)


def test_a_class_is_made_whole_or_not_at_all(repository, tmp_path_factory):
    target = tmp_path_factory.mktemp("class") / "class"
    (repository / "README.md").unlink()
    with pytest.raises(ValueError, match=r"README\.md is tracked by git and is not there"):
        make_class(repository, target, say=quiet)
    (repository / "README.md").write_text("read me")
    course(repository, sample="# %%\nprogress()\n")
    with pytest.raises(LessonError, match="progress"):
        make_class(repository, target, say=quiet)
    assert list(target.parent.iterdir()) == []


def test_a_class_needs_a_repository(tmp_path, tmp_path_factory):
    with pytest.raises(ValueError, match="is not a git repository"):
        make_class(tmp_path, tmp_path_factory.mktemp("class") / "class", say=quiet)


# ---------------- the command
def invoke(*arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the command, in this process."""
    done = CliRunner().invoke(app, arguments)
    return done.exit_code, done.stdout, done.stderr


def test_the_commands(tmp_path):
    first = "# %%\ncheck = print\n\n" + answer()
    root = course(tmp_path, _06_a=first, _07_b="# %%\nprint(7)\n")
    where = ("--root", str(root))
    assert invoke("run-solutions", "7", *where)[1].startswith("solutions/07_b.ipynb: written")
    missing = "tinyvllm: solutions/06_a.ipynb: is not there; run `make solutions ONLY=06`\n"
    assert invoke("run-solutions", "--check", *where) == (1, "", missing)
    assert invoke("run-solutions", "--jobs", "2", *where)[0] == 0
    in_step = "The solutions' notebooks are in step with their sources.\n"
    assert invoke("run-solutions", "--check", *where) == (0, in_step, "")
    assert invoke("build-lessons", "--check", *where)[0] == 1
    made = "lessons/06_a.ipynb: written\nlessons/07_b.ipynb: written\n"
    assert invoke("build-lessons", *where) == (0, made, "")
    in_step = "The lessons are in step with the solutions.\n"
    assert invoke("build-lessons", "--check", "06", "07", *where) == (0, in_step, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build-lessons", "--check", "--force"], "--check, --class and --force go one at a time"),
        (["build-lessons", "--class", "x", "06"], "--class takes all lessons"),
        (["build-lessons", "6", "tree"], "'tree' names no lesson"),
        (["run-solutions", "--jobs", "0"], "jobs is 0; it must be at least 1"),
        (["run-solutions", "--check", "--restyle"], "--check and --restyle go one at a time"),
        (["run-solutions", "9"], "no solutions/09_*.py"),
    ],
)
def test_arguments_that_make_no_sense(tmp_path, arguments, message):
    root = course(tmp_path, sample=SAMPLE)
    code, _, said = invoke(*arguments, "--root", str(root))
    assert code == 1
    assert message in said


def test_a_folder_without_sources(tmp_path):
    message = f"tinyvllm: {tmp_path / 'solutions'} holds no lesson's source (NN_topic.py)\n"
    assert invoke("run-solutions", "--root", str(tmp_path)) == (1, "", message)
