"""Answers that are kept apart by their user alone: run by ``test_user_level.py``, where that level works."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tinyvllm_ref.course.exercises import exercise_of
from tinyvllm_ref.course.grading import containment
from tinyvllm_ref.course.grading.judge import Task, judge_answer

from .handing_in import LIMITS, graded, hand_in, level, mistake, notebook, right, row_of

_LOOK = "# Exercise 06.1 - look around\n{line}\n"


def judged(line):
    source = _LOOK.format(line=line) + right("06.1").split("\n", 1)[1]
    return judge_answer(exercise_of("06.1"), Task(source, 7), level(), LIMITS)


def of_made_users():
    """Processes of the users that are made for answers."""
    first, count = containment._FIRST_UID, containment._NUM_UIDS
    return [
        one for one in psutil.process_iter(["uids"]) if one.info["uids"].real in range(first, first + count)
    ]


def test_it_is_what_root_gets_without_bubblewrap(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("of the seeds")
    secret.chmod(0o600)
    found = containment.find("auto", LIMITS, secret_files=[secret], writable=[tmp_path])
    assert (found.level, level()) == ("user", "user")
    assert found.says.startswith("not contained")
    assert any("bubblewrap is not installed" in why for why in found.why)
    assert found.found["uid"] in range(containment._FIRST_UID, containment._FIRST_UID + containment._NUM_UIDS)
    assert str(secret) not in found.found["readable"]
    assert found.found["writable"] == []
    assert found.found["network"] is True  # as docs/instructors.md says


def test_a_class(tmp_path):
    hand_in(tmp_path, notebook({"06.1": right("06.1"), "06.2": mistake("06.2")}), "ada")
    hand_in(tmp_path, notebook({"06.1": "# Exercise 06.1 - go\nimport os\nos._exit(0)"}), "bob")
    report = graded(tmp_path, nbval=True)
    ada = row_of(report)
    assert ada.results["06.1"].passed
    assert ada.results["06.2"].mistake[0] == "last round left out"
    assert ada.scores["06"].disagreements == ()
    assert ada.scores["06"].nbval == ""
    assert row_of(report, "bob").results["06.1"].status == "stopped"


FORBIDDEN = {
    "being root again": "import os\nos.setuid(0)",
    "the judge's memory": "import os\nopen(f'/proc/{os.getppid()}/mem', 'rb')",
    "the judge's environment": "import os\nopen(f'/proc/{os.getppid()}/environ', 'rb').read()",
    "the judge's files": "import os\nos.listdir(f'/proc/{os.getppid()}/fd')",
    "ending the judge": "import os\nos.kill(os.getppid(), 9)",
    "root's files": "open('/etc/shadow').read()",
    "the compiled runtime of all": "import glob, tempfile\n"
    "for name in glob.glob('/tmp/tinyvllm-grading-*/*/*'): open(name + '/x', 'w')\n"
    "open('/etc/x', 'w')",
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_another_user_may_not(name):
    result = judged(FORBIDDEN[name])
    assert (result.status, result.points) == ("error", 0), result
    assert "PermissionError" in result.says or "Operation not permitted" in result.says, result


def test_what_it_starts_ends_with_it(tmp_path):
    """A daemon that left the session and the family of its process."""
    line = "import os, time\nif os.fork() == 0:\n    os.setsid()\n"
    line += "    if os.fork() == 0: time.sleep(600)\n    os._exit(0)"
    result = judged(line)
    assert result.passed, result
    deadline = time.monotonic() + 10
    while (left := of_made_users()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []


def test_ending_all_that_it_may_ends_nobody_else():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as bystander:
        try:
            assert judged("import os\nos.kill(-1, 9)").status in ("passed", "stopped")
            assert bystander.poll() is None
        finally:
            bystander.kill()


def test_no_folder_is_left():
    before = set(Path("/tmp").glob("tinyvllm-run-*"))
    assert judged("open('left', 'w').write('x')").passed
    assert set(Path("/tmp").glob("tinyvllm-run-*")) <= before
