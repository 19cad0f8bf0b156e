"""The contained process beside the judge's: a whole notebook under nbval, as ``pytest --nbval`` runs it.

It sees what a lesson imports, and so the exercises, but no solutions. What it says is reported and earns nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from typing import Any
from xml.etree import ElementTree

from .limits import Limits, apply
from .runner_process import prepare_folders, receive, send


def main() -> None:
    """One notebook comes on standard input; which of its cells failed goes to standard output."""
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(nothing, number)
    settings = json.loads(sys.argv[1])
    if settings["open_folder"]:
        os.chmod(settings["open_folder"], 0o1777)
    apply(Limits(**settings["limits"]), settings["uid"])
    prepare_folders(settings["seed"])
    message = receive(incoming)
    if message is not None:
        send(outgoing, _run(message))
    os._exit(0)


def _run(message: dict[str, Any]) -> dict[str, Any]:
    with open("lesson.ipynb", "w", encoding="utf-8") as file:
        file.write(message["notebook"])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "nbval.plugin",
        "--nbval",
        "--nbval-current-env",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    command += [f"--nbval-cell-timeout={message['cell_seconds']:.0f}", "--color=no", "--junitxml=report.xml"]
    paths = [os.environ["TINYVLLM_GRADING_TREE"], os.environ["TINYVLLM_GRADING_PACKAGES"]]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "MPLCONFIGDIR": os.environ["TINYVLLM_HOME"],
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # whatever else is installed takes seconds to import
    }
    environment["IPYTHONDIR"] = environment["JUPYTER_RUNTIME_DIR"] = os.environ["TMPDIR"] + "/jupyter"
    command += ["-c", "/dev/null", "--rootdir=.", "lesson.ipynb"]
    said = _run_while_the_kernel_lives(command, environment)
    try:
        cases = ElementTree.parse("report.xml").findall(".//testcase")
    except (OSError, ElementTree.ParseError):
        return {"passed": None, "said": said}
    bad = ("failure", "error", "skipped")
    passed = [_number(case) for case in cases if all(case.find(name) is None for name in bad)]
    failed = [[_number(case), _last_line(case)] for case in cases if case.find("failure") is not None]
    return {"passed": passed, "failed": failed, "said": said}


def _run_while_the_kernel_lives(command: list[str], environment: dict[str, str]) -> str:
    """Run pytest; what it said at the end. It would wait long for a kernel that is dead, so it is stopped then."""
    import psutil

    with open("said.txt", "w+b") as said:
        pytest = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said
        )
        seen, without = False, 0
        while pytest.poll() is None:
            time.sleep(0.25)
            with contextlib.suppress(psutil.Error):
                alive = any(
                    child.status() != psutil.STATUS_ZOMBIE for child in psutil.Process(pytest.pid).children()
                )
                seen = seen or alive
                without = 0 if alive or not seen else without + 1
            if without >= 20:  # five seconds
                pytest.kill()
                return "the kernel died"
        said.seek(max(0, said.tell() - 1500))
        return said.read().decode(errors="replace")


def _last_line(case: ElementTree.Element) -> str:
    """The end of what a cell's failure says: the error's name and message."""
    lines = [line.strip() for text in case.itertext() for line in text.splitlines()]
    return next((line for line in reversed(lines) if line), "")[:300]


def _number(case: ElementTree.Element) -> int:
    text = case.attrib.get("name", "").removeprefix("Cell ")
    return int(text) if text.isdigit() else -1


__all__ = ["main"]
