"""What a contained process can reach, what it is given, and how a class's other forms are made."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from tinyvllm_ref.checkpoint.names import REPOSITORY
from tinyvllm_ref.course.grading import containment, runtime
from tinyvllm_ref.course.grading.cluster import require_safe
from tinyvllm_ref.course.grading.roster import Roster
from tinyvllm_ref.course.grading.submissions import owner
from tinyvllm_ref.course.grading.submit import default_folder, submit
from tinyvllm_ref.emulation import toolchain

from .handing_in import LIMITS, NAME, graded, mistake, notebook, perfect, right, row_of

ROOT = REPOSITORY


def test_bubblewrap_shows_nothing_of_the_course(bubblewrapped, tmp_path, monkeypatch):
    monkeypatch.setenv("A_SECRET", "of the environment")
    secret = tmp_path / "secret.txt"
    secret.write_text("x")
    found = containment.probe("bubblewrap", LIMITS, [secret, ROOT / "pyproject.toml"], [tmp_path])
    assert found["readable"] == found["writable"] == []
    assert found["network"] is False
    assert found["uid"] != 0
    assert "A_SECRET" not in found["environment"]
    assert found["environment"] == sorted(found["environment"])


def test_limits_alone_are_told_from_containment(tmp_path):
    found = containment.find("limits", LIMITS, writable=[tmp_path])
    assert found.says.startswith("not contained")
    assert str(tmp_path) in found.found["writable"]


def test_a_level_that_is_not_there_says_why(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(containment.NotAvailable, match="bubblewrap is not installed"):
        containment.find("bubblewrap", LIMITS)
    with pytest.raises(ValueError, match="must be one of auto, bubblewrap, user, limits"):
        containment.find("jail", LIMITS)


def test_the_compiler_is_the_one_outside(monkeypatch, bubblewrapped):
    """Its runtime is compiled already; the folders that are shown may have another that comes first."""
    monkeypatch.setenv("PATH", os.path.dirname(shutil.which("bwrap")))
    zig = toolchain.Toolchain(("/opt/zig", "c++"), "zig", "zig 0")
    monkeypatch.setattr(toolchain, "find", lambda: zig)
    with containment.place("bubblewrap", LIMITS, Path("/"), "none", Path("/")) as where:
        command = where.command
    at = command.index("CXX")
    assert command[at - 1 : at + 2] == ["--setenv", "CXX", "/opt/zig c++"]


@pytest.mark.parametrize("of_a_folder", [False, True])
def test_python_may_be_a_link_to_a_link(of_a_folder, bubblewrapped, tmp_path, monkeypatch):
    """As that of a virtual environment is, made with a Python that is a link itself."""
    if of_a_folder:
        (tmp_path / "versions").symlink_to(Path(sys.executable).parent)
        second = tmp_path / "versions" / Path(sys.executable).name
    else:
        second = tmp_path / "second"
        second.symlink_to(sys.executable)
    first = tmp_path / "first"
    first.symlink_to(second)
    monkeypatch.setattr(sys, "executable", str(first))
    containment._mount_list.cache_clear()
    try:
        assert containment.find("bubblewrap", LIMITS).level == "bubblewrap"
    finally:
        containment._mount_list.cache_clear()


def test_what_its_user_runs_already_does_not_count(tmp_path):
    """The system counts threads by user: a desktop's hundreds would leave an answer none."""

    def processes() -> int:
        with containment.place("limits", LIMITS, tmp_path, "none", tmp_path) as where:
            return json.loads(where.command[-1])["limits"]["processes"]

    more, end = 200, threading.Event()
    before = processes()
    threads = [threading.Thread(target=end.wait) for _ in range(more)]
    for thread in threads:
        thread.start()
    try:
        assert LIMITS.processes < before
        assert processes() >= LIMITS.processes + more
    finally:
        end.set()
        for thread in threads:
            thread.join()


def test_a_runner_gets_neither_answers_nor_the_judge():
    files = {str(path.relative_to(runtime.runner_tree())) for path in runtime.runner_tree().rglob("*.py")}
    assert "tinyvllm_ref/course/runner.py" in files
    assert "tinyvllm_ref/emulation/launch.py" in files
    for part in ("exercises", "kernels", "grading/judge", "hints", "assembly", "bf16", "lessons"):
        assert not [name for name in files if part in name], part
    assert not list(runtime.runner_tree().rglob("*.cu"))


def test_an_earlier_part_brings_what_it_needs_and_no_more():
    tree = runtime.runner_tree(frozenset(["tinyvllm_ref.kernels.rms_norm"]))
    kernels = {path.name for path in (tree / "tinyvllm_ref" / "kernels").iterdir()}
    assert {"rms_norm.py", "rms_norm.cu", "block_sum.cuh"} <= kernels
    assert not {"attention.cu", "paged_attention.cu", "silu_mul.cu"} & kernels
    assert not (tree / "tinyvllm_ref" / "course" / "exercises").exists()
    code = f"import sys; sys.path.insert(0, {str(tree)!r}); import tinyvllm_ref.kernels.rms_norm as r; "
    code += "print(r.__file__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.stdout.startswith(str(tree)), done.stderr


@pytest.mark.parametrize(
    "address", ["tcp://10.0.0.1:8786", "10.0.0.1:8786", "ws://localhost:1", "tcp://example.org:8786"]
)
def test_a_scheduler_that_others_can_reach_must_be_tls(address):
    with pytest.raises(ValueError, match="must be tls"):
        require_safe(address)


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:8786", "localhost:8786", "tls://example.org:8786", "tcp://[::1]:1"]
)
def test_a_scheduler_that_is_safe(address):
    require_safe(address)


# ---------------- submit


def test_submit_shows_what_will_be_graded_and_what_it_packs_is_graded(tmp_path):
    lessons = tmp_path / "lessons"
    lessons.mkdir()
    content = notebook({"06.1": right("06.1"), "06.2": mistake("06.2")})
    (lessons / NAME).write_text(json.dumps(content))
    said = []
    target = submit(lessons, learner="ada", out=tmp_path / "in" / "ada_lessons.zip", say=said.append)
    text = "\n".join(said)
    assert "06.1 a tree with modulo: will be graded" in text
    assert "06.3 any length, any block: not filled in" in text
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    receipt = target.with_suffix(".receipt.txt").read_text()
    assert digest in receipt
    assert digest in text
    with zipfile.ZipFile(target) as archive:
        assert archive.namelist() == [NAME]
    row = row_of(graded(tmp_path))
    assert row.results["06.1"].passed
    assert row.results["06.2"].status in ("partial", "failed")


def test_submit_says_what_is_in_the_way(tmp_path):
    with pytest.raises(ValueError, match="nothing is answered"):
        submit(tmp_path, learner="ada", out=tmp_path / "x.zip")
    with pytest.raises(FileNotFoundError, match="06_tree_reduction"):
        submit(tmp_path, ["06"], learner="ada", out=tmp_path / "x.zip")
    with pytest.raises(ValueError, match="--learner"):
        submit(tmp_path, learner="../ada")
    (tmp_path / NAME).write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        submit(tmp_path, ["06"], learner="ada", out=tmp_path / "x.zip")


def lessons_with(folder, answers):
    (folder / "lessons").mkdir(parents=True)
    (folder / "lessons" / NAME).write_text(json.dumps(notebook(answers)))
    return folder / "lessons"


def test_submit_says_where_it_read_and_that_nothing_is_filled_in(tmp_path, monkeypatch):
    """The working folder's notebooks come before those of the checkout whose command this is."""
    lessons = lessons_with(tmp_path / "mine", {})
    said = []
    monkeypatch.chdir(lessons.parent)
    target = submit(None, ["06"], learner="ada", say=said.append)
    assert said[0] == f"From {lessons}:"
    assert str(target) == "ada_lesson_06.zip"
    assert target.exists()
    assert said[-1].startswith(f"Nothing is filled in in {NAME}, and it is packed all the same")
    monkeypatch.chdir(lessons)
    assert default_folder() == lessons
    monkeypatch.chdir(tmp_path)
    assert default_folder() == REPOSITORY / "lessons"


def test_what_submit_packs_is_its_learner_s_whatever_lessons_are_in_it(tmp_path, monkeypatch):
    """The name of the zip is read again when it is graded."""
    lessons = lessons_with(tmp_path / "mine", {"06.1": right("06.1")})
    for number, slug in (("05", "embedding_kernel"), ("07", "rms_norm")):
        (lessons / f"{number}_{slug}.ipynb").write_text(json.dumps(notebook({})))
    monkeypatch.chdir(lessons.parent)
    said = []
    assert submit(None, learner="ada", say=said.append).name == "ada_lesson_06.zip"
    assert not any("Nothing is filled in" in line for line in said)
    target = submit(None, ["05", "06", "07"], learner="ada", say=said.append)
    assert target.name == "ada_lessons_05_06_07.zip"
    for name in ("ada_lesson_06.zip", target.name, "ada_lessons_00-24.zip"):
        assert owner((name,), Roster()).learner == "ada"


# ---------------- several processes, and a worker that dies


@pytest.mark.slow
def test_two_processes_give_what_one_gives(tmp_path):
    from tinyvllm_ref.course.grading.report import as_dict

    reports = []
    for jobs in (1, 2):
        folder = tmp_path / str(jobs)
        for learner in ("ada", "bob"):
            path = folder / "in" / learner / NAME
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(notebook({"06.1": right("06.1"), "06.2": mistake("06.2")})))
        (folder / "course.toml").write_text("[course]\nsecret = 's'\n")
        reports.append(as_dict(graded(folder, jobs=jobs, course=folder / "course.toml")))
    assert reports[0] == reports[1]


def _dies_once(job):
    import os
    import pathlib

    mark = pathlib.Path(job["mark"])
    if job["kills"] == "always" or (job["kills"] == "once" and not mark.exists()):
        mark.touch()
        os._exit(1)
    return {"learner": job["learner"]}


@pytest.mark.slow
def test_a_worker_that_dies_costs_its_submission_and_that_is_tried_again(tmp_path, monkeypatch):
    from tinyvllm_ref.course.grading import cluster, work

    monkeypatch.setattr(work, "do", _dies_once)
    jobs = [
        {"learner": k, "kills": kills, "mark": str(tmp_path / str(k))}
        for k, kills in enumerate(["never", "once", "always", "never", "once", "never", "never"])
    ]
    done = {number: (reply, why) for number, reply, why in cluster.run_with_dask(jobs, 1, None)}
    assert {number for number, (reply, _) in done.items() if reply is not None} == {0, 1, 3, 4, 5, 6}
    assert "died" in done[2][1]


@pytest.mark.slow
def test_plain_nbval_agrees_on_a_perfect_notebook(tmp_path):
    from tests.course.nbval_runs import failed_cells

    path = tmp_path / NAME
    path.write_text(json.dumps(perfect()))
    count, failed, said = failed_cells(path, tmp_path)
    assert count > 15
    assert not failed, said
