"""The tests again on a machine that has no g++: with the ziglang wheel alone, and with clang++ alone.

What compilers differ in is few things: how they are started and contained, which accesses they leave in one piece, what
they say of an error. The tests of those run with every `make test`, more that compile kernels with `make test-slow`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
_COMPILER = re.compile(r"(\w+-linux-gnu-)?(g\+\+|gcc|c\+\+|cc|clang|clang\+\+)(-[\d.]+)?")
# By file, words that choose its tests.
_DIFFERENT = {
    "tests/course/test_exercises.py": "mistake_is_rejected and (05.5-wide or 05.5-no or 06.2-one)",
    "tests/course/test_checking.py": "slips and begins",
    "tests/course/grading/test_hostile_answers.py": "functions_right or (right_kernel and numpy)",
    "tests/emulation/test_compile_errors.py": "own_names",
}
_MORE = [
    *(
        f"tests/emulation/test_{name}.py"
        for name in ("kernels", "planted_bugs", "compile_errors", "hard_cases")
    ),
    *(f"tests/emulation/test_{name}.py" for name in ("raw_kernel", "report", "robustness")),
    "tests/course/grading/test_hostile_answers.py",
    "tests/course/test_checking.py",
]


@pytest.fixture(params=["zig", "clang++"])
def machine(request, tmp_path) -> dict[str, str]:
    """Variables of a machine with one compiler: all of its programs, but for the others."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for folder in os.environ["PATH"].split(os.pathsep):
        if not os.access(folder, os.R_OK | os.X_OK):  # another user's, say
            continue
        for program in Path(folder).glob("*"):
            link = programs / program.name
            if not _COMPILER.fullmatch(program.name) and not link.is_symlink():
                link.symlink_to(program)
    if request.param != "zig":
        found = shutil.which(request.param)
        if found is None:
            pytest.skip(f"{request.param} is not installed")
        (programs / request.param).symlink_to(found)
    variables = {name: value for name, value in os.environ.items() if name != "CXX"}
    variables |= {"PATH": str(programs), "TINYVLLM_HOME": str(tmp_path / "home")}
    code = "from tinyvllm_ref.emulation import toolchain; print(toolchain.find().family)"
    assert run(variables, "-c", code).stdout.strip() == request.param.rstrip("+")
    return variables


def run(variables: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env=variables, cwd=REPOSITORY, capture_output=True, text=True
    )


def run_tests(variables: dict[str, str], *arguments: str) -> str:
    done = run(variables, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["zig"], indirect=True)
def test_what_compilers_differ_in(machine):
    words = " or ".join(f"({Path(file).name} and ({choice}))" for file, choice in _DIFFERENT.items())
    said = run_tests(machine, *_DIFFERENT, "-k", words)
    assert int(re.search(r"(\d+) passed", said)[1]) >= 9, said


@pytest.mark.slow
def test_most_of_what_compiles_kernels(machine):
    run_tests(machine, *_MORE)
