"""Notebooks through ``pytest --nbval``, as a learner or an instructor runs it, and what became of each cell."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

from tinyvllm_ref.course.making.scratch import scratch_environment

REPOSITORY = Path(__file__).resolve().parents[2]


def failed_cells(
    notebook: Path, folder: Path, changes: Mapping[str, str] | None = None
) -> tuple[int, set[int], str]:
    """Run nbval on a notebook.

    Parameters
    ----------
    notebook : Path
    folder : Path
        For the report.
    changes : mapping of str to str, optional
        Of the environment, by default that of the emulation.

    Returns
    -------
    tuple of (int, set of int, str)
        How many code cells ran, the numbers of those that failed (from 0, code cells alone), and what pytest said.
    """
    report = folder / f"{notebook.stem}.xml"
    command = [sys.executable, "-m", "pytest", "-p", "nbval.plugin", "--nbval", "--nbval-current-env"]
    command += ["--nbval-cell-timeout=120"]
    command += ["-q", "-p", "no:cacheprovider", "--color=no", f"--junitxml={report}", str(notebook)]
    with scratch_environment() as environment:
        for name in [name for name in environment if name.startswith("PYTEST_")]:
            del environment[name]
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they load longer than a notebook runs
        environment |= changes or {}
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=900
        )
    assert report.exists(), done.stdout + done.stderr
    cases = {}
    for case in ElementTree.parse(report).iter("testcase"):
        number = int(case.attrib["name"].removeprefix("Cell "))
        cases[number] = case.find("failure") is not None or case.find("error") is not None
        assert case.find("skipped") is None, f"cell {number} of {notebook.name} was skipped:\n{done.stdout}"
    failed = {number for number, has_failed in cases.items() if has_failed}
    assert done.returncode == (1 if failed else 0), os.linesep.join((done.stdout, done.stderr))
    return len(cases), failed, done.stdout
