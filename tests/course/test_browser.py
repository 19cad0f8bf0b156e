"""A newcomer's first minutes, in a real browser: `make lab`, lesson 00, a check that fails, an answer, progress."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tinyvllm_ref.emulation import cache

REPOSITORY = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE = 60_000  # ms; what is waited for comes in a fraction of it

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or shutil.which("make") is None,
    reason="needs Chromium and make, which are not installed here",
)

STUB = "int i = 0;"
WRONG = "int i = threadIdx.x;"
RIGHT = "int i = blockIdx.x * blockDim.x + threadIdx.x;"


def copy_of_the_course(folder: Path) -> Path:
    """What `make lab` needs, with the lessons as they are committed, so that this checkout stays as it is."""
    course = folder / "course"
    (course / "lessons").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy2(REPOSITORY / name, course / name)
    shutil.copytree(REPOSITORY / "tools", course / "tools")
    shutil.copy2(REPOSITORY / "lessons" / "00_welcome.ipynb", course / "lessons")
    # An environment that is installed: this one, with a stamp that is newer than what make looks at.
    (course / "venv").mkdir()
    (course / "venv" / "bin").symlink_to(Path(sys.executable).parent)
    (course / "venv" / ".installed-course").touch()
    return course


def own_homes(folder: Path) -> dict[str, str]:
    """An environment in which nothing of this user's is read or written, but for compiled kernels."""
    home = folder / "home"
    home.mkdir()
    (home / "kernels").symlink_to(cache.folder())
    names = (
        "HOME",
        "IPYTHONDIR",
        "JUPYTER_CONFIG_DIR",
        "JUPYTER_DATA_DIR",
        "JUPYTER_RUNTIME_DIR",
        "TINYVLLM_HOME",
    )
    homes = dict.fromkeys(names, str(home)) | {
        "TINYVLLM_MY_ENGINE": str(folder / "my_engine"),
        "TINYVLLM_DEVICE": "cpu",
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return kept | homes


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address that `make lab` prints, and the folder of the copy."""
    folder = tmp_path_factory.mktemp("lab")
    course, environment = copy_of_the_course(folder), own_homes(folder)
    options = "--no-browser --ip=127.0.0.1 --port=0"
    options += " --allow-root" if os.geteuid() == 0 else ""
    process = subprocess.Popen(
        ["make", "lab", "VENV=venv", f"LAB_OPTIONS={options}"],
        cwd=course,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
    reader.start()
    try:
        yield _address(lines), folder
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)
        reader.join(20)


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    """All that is printed, to its end, so that the server never waits for a reader."""
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def _address(lines: queue.Queue[str | None]) -> str:
    said = ""
    while (line := lines.get(timeout=60)) is not None:
        said += line
        if match := re.search(r"http://127\.0\.0\.1:\d+/\S+", line):
            return match[0]
    raise AssertionError(f"make lab ended:\n{said}")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield made
        made.close()


class Notebook:
    """Lesson 00 in JupyterLab, as somebody at the keyboard uses it."""

    def __init__(self, page: Any, address: str) -> None:
        self.page = page
        page.set_default_timeout(PATIENCE)
        page.goto(address)
        page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()

    def cell(self, text: str) -> Any:
        """The code cell whose source has this text."""
        found = self.page.locator(".jp-CodeCell").filter(
            has=self.page.locator(".jp-InputArea").filter(has_text=text)
        )
        return found.first

    def run(self, text: str) -> Any:
        """Run a cell with Shift + Enter; what it is given back as can be asked for its output."""
        cell = self.cell(text)
        cell.scroll_into_view_if_needed()
        cell.locator(".jp-InputPrompt").click()
        self.page.keyboard.press("Shift+Enter")
        return cell

    def write(self, text: str, source: str) -> None:
        """Replace a cell's source."""
        cell = self.cell(text)
        cell.scroll_into_view_if_needed()
        cell.locator(".cm-content").click()
        self.page.keyboard.press("ControlOrMeta+A")
        self.page.keyboard.insert_text(source)

    def says(self, cell: Any, text: str) -> str:
        """Wait until a cell's output has a text; all that it puts out."""
        output = cell.locator(".jp-OutputArea-output")
        output.filter(has_text=text).first.wait_for()
        return "\n".join(output.all_inner_texts())


def answer_cell() -> str:
    """The stub of 00.1, as the lesson has it."""
    cells = json.loads((REPOSITORY / "lessons" / "00_welcome.ipynb").read_text(encoding="utf-8"))["cells"]
    (source,) = [text for cell in cells if (text := "".join(cell["source"])).startswith("# Exercise 00.1")]
    assert source.count(STUB) == 1
    return source


def test_the_first_minutes(lab, browser):
    address, folder = lab
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    notebook = Notebook(page, address)
    # It opens on lesson 00, with its kernel, and nothing else asks for attention.
    assert page.title().startswith("00_welcome")
    assert page.locator(".jp-Dialog, .Toastify__toast").count() == 0

    for _ in range(3):  # the title, the set-up, the story
        page.keyboard.press("Shift+Enter")
    notebook.says(notebook.cell("import textwrap"), "Once upon a time")
    notebook.run("import check, cp")
    page.locator(".jp-RenderedImage img").first.wait_for()
    page.get_by_role("img", name="3 blocks of 4 threads").wait_for(
        state="attached"
    )  # what a screen reader says

    # The stub: it is said what is to be done, in a report, and no traceback is shown.
    notebook.run("# Exercise 00.1")
    said = notebook.says(notebook.run('check("00.1", twice)'), "CheckFailed: 00.1, as the report says")
    assert "Not filled in yet" in said
    assert "Traceback" not in said

    # A wrong answer: the smallest case that fails, what was assumed, and what to call next.
    notebook.write("# Exercise 00.1", answer_cell().replace(STUB, WRONG))
    notebook.run("# Exercise 00.1")
    said = notebook.says(notebook.run('check("00.1", twice)'), "Smallest failing case")
    assert "It looks like:" in said
    assert 'hint("00.1")' in said

    # The right one.
    notebook.write("# Exercise 00.1", answer_cell().replace(STUB, RIGHT))
    notebook.run("# Exercise 00.1")
    said = notebook.says(notebook.run('check("00.1", twice)'), "00.1 passed")
    assert "CheckFailed" not in said
    notebook.says(notebook.run("progress()"), "1 of ")
    passed = page.locator(".tv-map .tv-passed")
    passed.first.wait_for()
    assert "00.1" in (passed.first.get_attribute("title") or "")
    assert page.locator(".jp-Dialog, .Toastify__toast").count() == 0

    # What it left: progress in the home, the answer in my_engine/.
    entries = json.loads((folder / "home" / "progress.json").read_text())["exercises"]
    assert entries["00.1"]["passed"]
    assert RIGHT in (folder / "my_engine" / "answers" / "00_1.py").read_text()
    page.close()
