"""Where bubblewrap is not there and the grader is root: answers run as a user made for each.

The tests of answers that attack run once more at this level, in a process that does not see bubblewrap. It is a mount
namespace of its own, in which a Python that lies in a closed folder, such as root's home, can be read by everybody.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tinyvllm_ref.checkpoint.names import REPOSITORY
from tinyvllm_ref.course.grading import containment

from .handing_in import CONTAINMENT_VARIABLE
from .test_hostile_answers import READS

HERE = Path(__file__).parent.relative_to(REPOSITORY)


def without_bubblewrap(command: list[str]) -> list[str]:
    """A command that runs `command` where there is no bubblewrap, and everybody can read this Python."""
    lines = ["keep=$(mktemp -d)", "chmod 755 $keep"]
    program = shutil.which("bwrap")
    if program:
        lines.append(f"mount --bind /dev/null {shlex.quote(os.path.realpath(program))}")
    needed = dict.fromkeys([sys.base_prefix, sys.prefix, str(REPOSITORY)])
    for number, folder in enumerate(needed):
        closed = [parent for parent in Path(folder).parents if not parent.stat().st_mode & 0o001]
        if closed:
            inside, outside = shlex.quote(folder), f"$keep/{number}"
            lines += [f"mkdir {outside}", f"mount --bind {inside} {outside}"]
            lines += [f"mount -t tmpfs -o mode=755 none {shlex.quote(str(closed[-1]))}"]
            lines += [f"mkdir -p {inside}", f"mount --bind {outside} {inside}"]
    lines.append('exec "$@"')
    return ["unshare", "--mount", "sh", "-ec", "\n".join(lines), "sh", *command]


@pytest.fixture
def run(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can start a process as another user")
    if subprocess.run(without_bubblewrap(["true"]), capture_output=True).returncode:
        pytest.skip("mount namespaces can not be made here")

    def run(*arguments: str) -> str:
        environment = {**os.environ, CONTAINMENT_VARIABLE: "user", "TINYVLLM_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(
            without_bubblewrap(command), env=environment, cwd=REPOSITORY, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        return done.stdout

    return run


def passed(said: str) -> int:
    assert "skipped" not in said
    (found,) = re.findall(r"(\d+) passed", said)
    return int(found)


def test_root_without_bubblewrap_gets_a_user_for_each_answer(run):
    names = ("test_it_is_what_root_gets_without_bubblewrap", "test_what_it_starts_ends_with_it")
    assert passed(run(*(f"{HERE}/as_another_user.py::{name}" for name in names))) == len(names)


@pytest.mark.slow
def test_what_such_a_user_may_and_may_not(run):
    assert passed(run(f"{HERE}/as_another_user.py")) > 10


@pytest.mark.slow
def test_answers_that_attack_get_no_points_and_the_grader_goes_on(run):
    everything = ("-m", "slow or not slow")
    said = run(f"{HERE}/test_hostile_answers.py", f"{HERE}/test_hostile_notebooks.py", *everything)
    skipped = re.search(r"(\d+) skipped", said)
    assert skipped, said
    assert int(skipped.group(1)) == len(READS)  # what only bubblewrap stops


def test_a_python_that_others_can_not_read_is_named(tmp_path, monkeypatch):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    monkeypatch.setattr(sys, "base_prefix", str(closed))
    assert f"can not read {closed}, for {closed} is its owner's alone" in containment._closed_to_others()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names are not claimed")
def test_no_two_answers_have_one_user(monkeypatch):
    """Not even by chance: here two of three numbers are taken, and the third is found."""
    monkeypatch.setattr(containment, "_NUM_UIDS", 3)
    with containment._own_uid() as first, containment._own_uid() as second, containment._own_uid() as third:
        assert len({first, second, third}) == 3
        with pytest.raises(RuntimeError, match="none of the 3 users"), containment._own_uid():
            pass
    with containment._own_uid() as again:
        assert again in (first, second, third)
