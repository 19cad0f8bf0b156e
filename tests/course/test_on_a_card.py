"""The course on a card, as far as a machine without one can tell: which arrays meet which functions.

``card/`` holds a stand-in for CuPy that is the emulation a second time. To the project it is a GPU, and its arrays are
not the emulation's. So a cell fails here that gives the one's array to the other's kernel, listens to the other's
allocator, or asks CuPy for what only the emulation has. It says nothing of a card's values, times or compiler.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tinyvllm_ref.course.build import discover, read
from tinyvllm_ref.course.exercises import exercise_of, lessons
from tinyvllm_ref.course.judging import assess, cases_of
from tinyvllm_ref.course.making.scratch import scratch_environment
from tinyvllm_ref.course.runner import Outcome

from .nbval_runs import REPOSITORY, failed_cells
from .on_a_card import MIXED as SAID_OF_MIXED
from .test_whole_course import look_at, take

CARD = Path(__file__).parent / "card"
CHANGES = {"TINYVLLM_DEVICE": "cuda", "PYTHONPATH": os.pathsep.join([str(CARD), str(REPOSITORY)])}
AT_EACH_RUN = ("16", "20")  # the lessons in which a card once found arrays of two kinds

every_solution = pytest.mark.parametrize(
    "source",
    [
        pytest.param(path, marks=[] if path.stem[:2] in AT_EACH_RUN else pytest.mark.slow)
        for path in discover(REPOSITORY)
    ],
    ids=lambda path: path.stem,
)


def run(*arguments: str) -> str:
    """Standard output of a Python process that takes the stand-in for a card."""
    with scratch_environment() as environment:
        environment |= CHANGES | {"MPLBACKEND": "agg"}
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


PRELUDE = """
import numpy as np
from tinyvllm_ref import emulation
from tinyvllm_ref.device import cp, cupyx, is_gpu
assert is_gpu and cp is not emulation
CODE = 'extern "C" __global__ void add_one(float* x) { x[threadIdx.x] += 1; }'
here, there = cp.zeros(4, np.float32), emulation.zeros(4, np.float32)
"""
MIXED = [
    "cp.RawKernel(CODE, 'add_one')((1,), (4,), (there,))",
    "emulation.RawKernel(CODE, 'add_one')((1,), (4,), (here,))",
    "here + there",
    "there + here",
    "here.__iadd__(there)",
    "cp.asarray(there)",
    "emulation.asarray(here)",
    "here.set(there)",
    "here.__setitem__(slice(None), there)",
    "cp.copyto(here, there)",
    "cp.concatenate([here, there])",
    "here[emulation.arange(2)]",
    "cp.sum(there)",
    "np.asarray(here)",
    "__import__('tinyvllm_ref.kernels.argmax').kernels.argmax.argmax(there[None], there)",
]
NOT_IN_CUPY = [
    "is_emulation", "last_report", "checks", "set_checks", "trace", "timeout", "KernelError", "OutOfBounds", "cupyx",
]  # fmt: skip


def test_arrays_of_two_kinds_do_not_mix():
    program = (
        PRELUDE
        + f"""
for text in {MIXED!r}:
    try:
        eval(text)
    except (TypeError, ValueError):
        continue
    print(text)
"""
    )
    assert run("-c", program) == ""


def test_each_kind_works_by_itself_with_an_allocator_of_its_own():
    program = (
        PRELUDE
        + """
for module, array in ((cp, here), (emulation, there)):
    sizes, pool = [], module.get_default_memory_pool()
    with module.cuda.using_allocator(lambda size: (sizes.append(size), pool.malloc(size))[1]):
        cp.empty(10, np.uint8), emulation.empty(20, np.uint8)
    module.RawKernel(CODE, "add_one")((1,), (4,), (array,))
    print(sizes, array.get())
fresh = cp.empty(100, np.float32)
print(np.isfinite(fresh.get()).all(), np.isnan(emulation.empty(100, np.float32).get()).all())
"""
    )
    lines = run("-c", program).splitlines()
    assert lines == ["[10] [1. 1. 1. 1.]", "[20] [1. 1. 1. 1.]", "True True"]


def test_it_has_nothing_of_the_emulations_own():
    program = PRELUDE + f"print([name for name in {NOT_IN_CUPY!r} if hasattr(cp, name)])"
    assert run("-c", program) == "[]\n"


def test_where_nothing_counts_the_values_are_verified_all_the_same():
    wrong = exercise_of("02.3")
    case, expected = cases_of(wrong, 0)[0]
    outcome = Outcome({name: 0 for name in case.inputs["names"]}, None)
    assert assess(wrong, case, expected, outcome, counted=False).difference is not None
    counting = exercise_of("04.5")
    case, expected = cases_of(counting, 0)[0]
    outcome = Outcome({**expected, "copies": 1}, None)  # right, and with no allocation
    assert assess(counting, case, expected, outcome, counted=True).difference is not None
    assert assess(counting, case, expected, outcome, counted=False).difference is None


@every_solution
def test_the_solution_passes_nbval(source, tmp_path):
    ran, failed, said = failed_cells(source.with_suffix(".ipynb"), tmp_path, CHANGES)
    assert ran == sum(cell.kind == "code" for cell in read(source).cells)
    assert failed == set(), said


def test_what_the_lessons_show_that_once_failed():
    assert run("-m", "tests.course.on_a_card", *AT_EACH_RUN) == ""


# 02.3 has no arrays, 05.5 a mistake that would end a card's context, 16.5 works on the engine's arrays.
@pytest.mark.parametrize("id", ["02.3", "05.5", "16.5"])
def test_wrong_answers_are_rejected(id):
    assert run("-m", "tests.course.on_a_card", "--mistakes", id) == ""


@pytest.mark.slow
@pytest.mark.parametrize("number", lessons())
def test_a_whole_lesson(number):
    """Right answers pass, mistakes are rejected and named; each picture is drawn, each measurement made."""
    assert run("-m", "tests.course.on_a_card", "--mistakes", number) == ""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_course():
    """Every lesson with the learner's own earlier parts, and nothing shown that tells of two kinds of arrays."""
    with scratch_environment() as environment:
        environment |= CHANGES
        for source in discover(REPOSITORY):
            lesson, filled = take(source, environment)
            look_at(lesson, filled)
            for cell in lesson.cells:
                said = " ".join(str(cell.get("outputs", "")).replace("\\n", " ").split())
                assert not [words for words in (*SAID_OF_MIXED, "no picture of") if words in said], (
                    cell.source
                )
