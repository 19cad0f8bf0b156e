"""A newcomer's first minutes, in a real browser: `make lab`, lesson 00, a check that fails, an answer, progress.

And what is around them: links that lead on, a terminal that finds `tinyvllm`, a server that warns of nothing. The same
minutes in Notebook 7, by `make notebook`, and lesson 05 there with its picture.
"""

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
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tinyvllm_ref.emulation import cache

from .conftest import CHROMIUM
from .pages import contrasts

REPOSITORY = Path(__file__).parents[2]
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
    for name in ("00_welcome.ipynb", "01_safetensors.ipynb", "05_embedding_kernel.ipynb"):
        shutil.copy2(REPOSITORY / "lessons" / name, course / "lessons")
    # An environment that is installed: this one, with a stamp that is newer than what make looks at.
    (course / "venv").mkdir()
    for path in Path(sys.prefix).iterdir():
        if not path.name.startswith(".installed"):
            (course / "venv" / path.name).symlink_to(path)
    for extra in ("course", "notebook"):
        (course / "venv" / f".installed-{extra}").touch()
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


@dataclass
class Lab:
    """The address that `make` prints, the folder of the copy, and what the terminal has said."""

    address: str
    folder: Path
    lines: list[str]

    def workspace(self, name: str) -> str:
        """The same page with a layout of its own: nothing that another test has open."""
        return self.address.replace("/lab/tree/", f"/lab/workspaces/{name}/tree/")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """`make lab`, as a person starts it."""
    with _started("lab", tmp_path_factory.mktemp("lab")) as started:
        yield started


@pytest.fixture(scope="module")
def notebook_7(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """`make notebook`."""
    pytest.importorskip("notebook")
    with _started("notebook", tmp_path_factory.mktemp("notebook")) as started:
        yield started


@contextlib.contextmanager
def _started(target: str, folder: Path) -> Iterator[Lab]:
    """A target of the Makefile that opens a browser, until its tests are done."""
    course, environment = copy_of_the_course(folder), own_homes(folder)
    options = "--no-browser --ip=127.0.0.1 --port=0"
    options += " --allow-root" if os.geteuid() == 0 else ""
    process = subprocess.Popen(
        ["make", target, "VENV=venv", f"LAB_OPTIONS={options}"],
        cwd=course,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    lines: queue.Queue[str | None] = queue.Queue()
    said: list[str] = []
    reader = threading.Thread(target=_read, args=(process, lines, said), daemon=True)
    reader.start()
    try:
        yield Lab(_address(lines), folder, said)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)
        reader.join(20)


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None], said: list[str]) -> None:
    """All that is printed, to its end, so that the server never waits for a reader."""
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        lines.put(line)
    lines.put(None)


def _address(lines: queue.Queue[str | None]) -> str:
    said = ""
    while (line := lines.get(timeout=60)) is not None:
        said += line
        if match := re.search(r"http://127\.0\.0\.1:\d+/\S+", line):
            return match[0]
    raise AssertionError(f"make ended:\n{said}")


class Notebook:
    """Lesson 00 in JupyterLab, as somebody at the keyboard uses it."""

    def __init__(self, page: Any, address: str) -> None:
        self.page = page
        page.set_default_timeout(PATIENCE)
        page.goto(address)
        self.wait_for_kernel()

    def wait_for_kernel(self) -> None:
        """Until the status bar says that the kernel is there and idle."""
        self.page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()

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


class Notebook7(Notebook):
    """A lesson in Notebook 7, which has no status bar: a sign on the toolbar says how the kernel is."""

    def wait_for_kernel(self) -> None:
        self.page.get_by_text("Python 3 (ipykernel)", exact=True).wait_for()
        self.page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').wait_for()


def answer_cell() -> str:
    """The stub of 00.1, as the lesson has it."""
    cells = json.loads((REPOSITORY / "lessons" / "00_welcome.ipynb").read_text(encoding="utf-8"))["cells"]
    (source,) = [text for cell in cells if (text := "".join(cell["source"])).startswith("# Exercise 00.1")]
    assert source.count(STUB) == 1
    return source


def test_the_first_minutes(lab, browser):
    folder = lab.folder
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    notebook = Notebook(page, lab.address)
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
    check = notebook.run('check("00.1", twice)')
    said = notebook.says(check, "00.1 passed")
    assert "CheckFailed" not in said
    assert "my_engine/answers/00_1.py" in said
    assert 'solution("00.1")' in said
    # Its card leads to the next exercise.
    heading = page.locator("h2", has_text="00.2 · A guard").first
    assert not _is_in_view(heading, page)
    check.get_by_role("link", name="00.2, a guard").click()
    heading.wait_for()
    page.wait_for_function("h => h.getBoundingClientRect().top < innerHeight", arg=heading.element_handle())
    notebook.says(notebook.run("progress()"), "1 of ")
    passed = page.locator(".tv-map .tv-passed")
    passed.first.wait_for()
    assert "00.1" in (passed.first.get_attribute("title") or "")
    assert page.locator(".jp-Dialog, .Toastify__toast").count() == 0

    # What it left: progress in the home, the answer in my_engine/.
    entries = json.loads((folder / "home" / "progress.json").read_text())["exercises"]
    assert entries["00.1"]["passed"]
    assert RIGHT in (folder / "my_engine" / "answers" / "00_1.py").read_text()

    # The map leads to the next lesson.
    page.locator(".tv-map").get_by_role("link", name="A model is a file").first.click()
    page.get_by_role("heading", name="01 · A model is a file").wait_for()
    page.close()


def _is_in_view(thing: Any, page: Any) -> bool:
    box = thing.bounding_box()
    return box is not None and 0 <= box["y"] < page.viewport_size["height"]


def test_a_stub_comes_back_once(lab, browser):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    notebook = Notebook(page, lab.workspace("reset"))
    notebook.run("import check, cp")
    notebook.write("# Exercise 00.1", answer_cell().replace(STUB, RIGHT))
    notebook.run("# Exercise 00.1")
    cells = page.locator(".jp-CodeCell", has_text="# Exercise 00.1")
    assert cells.count() == 1
    page.keyboard.press("b")
    page.keyboard.press("Enter")
    page.keyboard.insert_text('reset("00.1")')
    page.keyboard.press("Control+Enter")
    again = notebook.cell('reset("00.1")')
    notebook.says(again, "A fresh stub is in the next cell; your answer below is untouched.")
    cells.nth(1).wait_for()
    page.keyboard.press("Control+Enter")
    notebook.says(again, "no second one is put in")
    page.wait_for_timeout(500)  # a cell comes after what is printed
    assert cells.count() == 2
    page.close()


def test_a_terminal_and_a_cell_find_the_program(lab, browser):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    notebook = Notebook(page, lab.workspace("terminal"))
    notebook.cell("import check, cp").locator(".jp-InputPrompt").click()
    page.keyboard.press("b")
    page.keyboard.press("Enter")
    page.keyboard.insert_text("!tinyvllm --help")
    page.keyboard.press("Control+Enter")
    notebook.says(notebook.cell("!tinyvllm --help"), "doctor")

    page.get_by_role("menuitem", name="File").click()
    page.get_by_text("New", exact=True).first.hover()
    page.get_by_text("Terminal", exact=True).last.click()
    page.locator(".xterm-helper-textarea").wait_for(state="attached")
    told = lab.folder / "told"
    page.keyboard.type(f"command -v tinyvllm > {told}.new; mv {told}.new {told}\n", delay=5)
    end = time.monotonic() + 60
    while not told.exists() and time.monotonic() < end:
        page.wait_for_timeout(100)
    assert told.read_text().strip() == str(lab.folder / "course" / "venv" / "bin" / "tinyvllm")
    page.close()


def test_the_terminal_of_make_lab_warns_of_nothing(lab, browser):
    """Notebooks are opened, kernels start and are used, a notebook is saved: what is said is information alone."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    notebook = Notebook(page, lab.workspace("quiet"))
    notebook.run("import check, cp")
    page.locator(".jp-RenderedImage img").first.wait_for()
    page.keyboard.press("Control+s")
    page.wait_for_timeout(1000)
    page.close()
    said = "".join(lab.lines)
    assert "Kernel started" in said
    alarming = r"^\[[WE] |WARNING|ERROR|Traceback|not trusted|Skipped|encryption|ping_timeout"
    assert not [line for line in said.splitlines() if re.search(alarming, line)]


def test_the_first_minutes_in_notebook_7(notebook_7, browser):
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    notebook = Notebook7(page, notebook_7.address)
    # The lesson is signed, and the page says so.
    page.get_by_text("Trusted", exact=True).wait_for()
    assert page.locator(".jp-Dialog, .Toastify__toast").count() == 0

    notebook.run("import check, cp")
    page.locator(".jp-RenderedImage img").first.wait_for()
    notebook.write("# Exercise 00.1", answer_cell())
    notebook.run("# Exercise 00.1")
    said = notebook.says(notebook.run('check("00.1", twice)'), "CheckFailed: 00.1, as the report says")
    assert "Not filled in yet" in said
    assert "Traceback" not in said
    notebook.says(notebook.run('hint("00.1")'), "00.1 hint")

    notebook.write("# Exercise 00.1", answer_cell().replace(STUB, RIGHT))
    notebook.run("# Exercise 00.1")
    check = notebook.run('check("00.1", twice)')
    notebook.says(check, "00.1 passed")
    heading = page.locator("h2", has_text="00.2 · A guard").first
    check.get_by_role("link", name="00.2, a guard").click()
    heading.wait_for()
    page.wait_for_function("h => h.getBoundingClientRect().top < innerHeight", arg=heading.element_handle())

    # The map leads to the next lesson, in a page of its own, and that is no download of its file.
    notebook.says(notebook.run("progress()"), "exercises passed")
    with context.expect_page() as opened:
        page.locator(".tv-map").get_by_role("link", name="A model is a file").first.click()
    opened.value.get_by_role("heading", name="01 · A model is a file").wait_for(timeout=PATIENCE)
    assert "/notebooks/lessons/01_safetensors.ipynb" in opened.value.url
    context.close()


def test_a_picture_and_the_dark_theme_in_notebook_7(notebook_7, browser):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    notebook = Notebook7(page, notebook_7.address.replace("00_welcome", "05_embedding_kernel"))
    notebook.run("import check, cp")
    notebook.run("# Exercise 05.1")
    check = notebook.run('check("05.1", gather_one)')
    notebook.says(check, "CheckFailed: 05.1, as the report says")
    drawn = notebook.run("draw_walk").locator(".jp-RenderedImage img").first
    drawn.wait_for()
    assert drawn.evaluate("img => img.width / img.naturalWidth") == pytest.approx(0.5, abs=0.01)

    written = check.locator(".tv-card").locator(".tv-headline, .tv-title, .tv-next")
    assert min(contrasts(written)) > 4.5
    page.get_by_role("menuitem", name="Settings").click()
    page.get_by_text("Theme", exact=True).hover()
    page.get_by_text("JupyterLab Dark", exact=True).click()
    page.locator('body[data-jp-theme-light="false"]').wait_for(state="attached")
    assert min(contrasts(written)) > 4.5
    page.close()
