"""What a class gets: no solutions and no examples of submissions; a lesson's solution once it is past its due time."""

from __future__ import annotations

import datetime
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tinyvllm_ref.checkpoint.names import REPOSITORY
from tinyvllm_ref.course.exercises import lessons
from tinyvllm_ref.course.grading.course_file import read_course
from tinyvllm_ref.course.making.class_readme import KEPT, class_readme
from tinyvllm_ref.course.making.classroom import LEFT_OUT, STAYS, make_class

from .handing_in import NAME


@pytest.fixture
def repository(tmp_path):
    root = tmp_path / "course"
    (root / "solutions").mkdir(parents=True)
    shutil.copy(REPOSITORY / "solutions" / "06_tree_reduction.py", root / "solutions")
    mine = (".ci/run", "benchmarks/server.py", "docs/instructors.md", "tests/test_a.py")
    for name in ("README.md", "data/prompts.txt", f"data/submissions/perfect/{NAME}", *mine):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    for arguments in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", "-C", str(root), *arguments], check=True, timeout=60)
    return root


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_nothing_that_answers_comes_along(repository, tmp_path):
    make_class(repository, tmp_path / "class", say=lambda line: None)
    assert files_in(tmp_path / "class") == ["README.md", "data/prompts.txt", f"lessons/{NAME}"]
    assert "BEGIN SOLUTION" not in (tmp_path / "class" / "lessons" / NAME).read_text()


def test_the_copy_s_readme_is_a_learner_s(tmp_path):
    """Made from the repository's own: every lesson, how to hand in, and nothing that is not in the copy."""
    make_class(REPOSITORY, tmp_path / "class", say=lambda line: None)
    text = (tmp_path / "class" / "README.md").read_text()
    for lesson in lessons().values():
        assert f"| {lesson.number} | [" in text
    for name in KEPT:
        assert f"\n## {name}\n\n" in text
    assert ".venv/bin/tinyvllm submit 06 --learner NAME" in text
    for words in ("make test", "make grade", "instructor", "are in `solutions/`", "For engineers"):
        assert words not in text
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", text):
        assert (tmp_path / "class" / target).exists(), target
    for page in (tmp_path / "class" / "docs").glob("*.md"):  # nor do other pages lead to what is left out
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text()):
            name = (Path("docs") / target).as_posix().replace("docs/../", "")
            assert name in STAYS or not name.startswith(LEFT_OUT), f"{page.name}: {target}"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A class's copy of this repository."""
    folder = tmp_path_factory.mktemp("copy") / "class"
    make_class(REPOSITORY, folder, say=lambda line: None)
    return folder


def test_of_what_is_left_out_that_stays_which_the_copy_names(copy):
    """Reports that lessons, the code and links of pages name, and what `make` runs: no less and no more."""
    named = set()
    pages = [*copy.glob("lessons/*.ipynb"), copy / "README.md", copy / "Makefile", *copy.glob("docs/*.md")]
    code = set(copy.glob("tinyvllm_ref/**/*.py")) - {copy / "tinyvllm_ref/course/making/classroom.py"}
    for path in [*pages, *code]:
        beginning = r"\]\(\.\./" if path.parent.name == "docs" else r"\b"
        named.update(re.findall(beginning + r"(benchmarks/\w+\.\w+)", path.read_text(encoding="utf-8")))
    assert named == set(STAYS)
    assert [name for name in STAYS if not (copy / name).is_file()] == []
    assert [name for name in files_in(copy) if name.startswith(LEFT_OUT) and name not in STAYS] == []


def test_the_copy_s_make_bench_finds_what_it_needs(copy):
    """It measures for minutes; here it is only imported, which takes everything that it is made of."""
    (script,) = re.findall(
        r"^bench:.*\n\t\$\(BIN\)/python (\S+)$", (copy / "Makefile").read_text(), re.MULTILINE
    )
    done = subprocess.run(
        [sys.executable, script, "--help"], cwd=copy, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_the_copy_s_readme_says_which_solutions_are_there():
    assert "The solutions are not in this copy.\n" in class_readme("", [])
    assert "but for those of lesson 05, 06, in `solutions/`" in class_readme("", ["05", "06"])


def test_a_lesson_past_its_due_time_comes_with_its_solution(repository, tmp_path):
    said = []
    make_class(repository, tmp_path / "class", say=said.append, open_lessons=["06"])
    assert "solutions/06_tree_reduction.py" in files_in(tmp_path / "class")
    assert said[1] == "with the solutions of 06"


def test_a_lesson_is_over_when_it_is_for_everybody(tmp_path):
    (tmp_path / "course.toml").write_text(
        "[lessons]\n06 = { due = 2026-03-06T12:00:00Z }\n09 = {}\n[extensions]\nada = { 06 = 2026-03-08T12:00:00Z }\n"
    )
    course = read_course(tmp_path / "course.toml", None)
    day = lambda number: datetime.datetime(2026, 3, number, 13, tzinfo=datetime.UTC)  # noqa: E731
    assert not course.is_over("06", day(6))
    assert not course.is_over("06", day(7))
    assert course.is_over("06", day(8))
    assert not course.is_over("09", day(30))
