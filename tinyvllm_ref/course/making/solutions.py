"""``tinyvllm run-solutions``: from a source to its executed notebook."""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ...installing import typed
from . import notebook as files
from .restyle import outputs_of_older_sheets
from .scratch import scratch_environment
from .source import IGNORE_OUTPUT, Cell, Lesson, LessonError, Problem, discover, read

CELL_TIMEOUT = 120.0  # seconds; nbval is run with the same
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_ADDRESS = re.compile(r"\b0x[0-9a-f]{9,16}\b")
_WIDGET = "application/vnd.jupyter.widget-view+json"


def to_notebook(lesson: Lesson) -> Any:
    """The solution's notebook, not executed."""
    cells = [files.new_cell(cell.kind, cell.source, cell.id, cell.metadata) for cell in lesson.cells]
    return files.new(cells, kind="solution", lesson=lesson.number, source_sha256=lesson.sha256)


def run_solutions(
    root: Path,
    numbers: Iterable[str] = (),
    *,
    jobs: int = 1,
    timeout: float = CELL_TIMEOUT,
    say: Callable[[str], None] = print,
) -> None:
    """Execute the solutions and write their notebooks beside them.

    Parameters
    ----------
    root : Path
        The folder that has ``solutions/``.
    numbers : iterable of str
        Which lessons; all by default.
    jobs : int
        How many at a time, each with a kernel of its own.
    timeout : float
        Seconds a cell may take.
    say : callable
        Given a line for each notebook.

    Raises
    ------
    LessonError
        A source can not be read, or a cell failed; notebooks that went well are written all the same.
    """
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}; it must be at least 1")
    paths = discover(root, numbers)
    problems: list[Problem] = []
    lessons = []
    for path in paths:
        try:
            lessons.append(read(path))
        except LessonError as error:
            problems += error.problems
    problems += _in_a_thread(_run_all(lessons, jobs, timeout, say))
    if problems:
        raise LessonError(problems)


def _in_a_thread(work: Coroutine[Any, Any, list[Problem]]) -> list[Problem]:
    """Run a coroutine beside a loop that may run here; Ctrl-C cancels it, and its kernels end.

    (In the main thread, nbclient takes Ctrl-C for itself, and ends one kernel of many.)
    """
    started: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def main() -> list[Problem]:
        task = asyncio.current_task()
        assert task is not None
        started.append((asyncio.get_running_loop(), task))
        return await work

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(asyncio.run, main())
        try:
            return future.result()
        except KeyboardInterrupt:
            for loop, task in started:
                loop.call_soon_threadsafe(task.cancel)
            raise


async def _run_all(
    lessons: list[Lesson], jobs: int, timeout: float, say: Callable[[str], None]
) -> list[Problem]:
    turn = asyncio.Semaphore(jobs)

    async def run(lesson: Lesson) -> list[Problem]:
        async with turn:
            begin = time.perf_counter()
            notebook, problems = await _execute(lesson, timeout)
        path = lesson.path.with_suffix(".ipynb")
        problems = problems or _examine_outputs(lesson, notebook)
        if not problems:
            _tidy(notebook)
            done = "written" if files.write(path, files.to_bytes(notebook)) else "as it was"
            say(f"{path.parent.name}/{path.name}: {done} ({time.perf_counter() - begin:.1f} s)")
        return problems

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(lesson)) for lesson in lessons]
    return [problem for task in tasks for problem in task.result()]


# ---------------- executing
async def _execute(lesson: Lesson, timeout: float) -> tuple[Any, list[Problem]]:
    """The executed notebook, and what stopped it."""
    import nbclient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    notebook = to_notebook(lesson)
    current = [0]
    client = nbclient.NotebookClient(
        notebook,
        kernel_name="python3",
        kernel_manager_class=_kernel_manager(),
        resources={"metadata": {"path": str(lesson.path.parent)}},
        timeout=timeout,
        coalesce_streams=True,
        store_widget_state=False,
        record_timing=False,
        on_cell_start=lambda cell, cell_index: current.__setitem__(0, cell_index),
    )
    with scratch_environment() as environment, tempfile.TemporaryFile() as stderr:
        try:
            await client.async_execute(env=environment, stderr=stderr)
        except CellExecutionError as error:
            traceback = _ANSI.sub("", error.traceback).rstrip()
            return notebook, [_at(lesson, current[0], f"{error.ename}: {error.evalue}\n{traceback}")]
        except CellTimeoutError:
            return notebook, [_at(lesson, current[0], f"still running after {timeout:.0f} s")]
        except DeadKernelError:
            stderr.seek(0)
            said = stderr.read().decode(errors="replace").strip()
            return notebook, [_at(lesson, current[0], "the kernel died" + (f"\n{said}" if said else ""))]
    return notebook, []


def _kernel_manager() -> Any:
    """A kernel manager whose ``python3`` is the Python that runs this, whatever the user's own kernels are."""
    from ipykernel.kernelspec import RESOURCES, get_kernel_dict
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from traitlets import default

    class ThisPython(KernelSpecManager):
        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            return KernelSpec(resource_dir=RESOURCES, **get_kernel_dict())

    class Manager(AsyncKernelManager):
        @default("kernel_spec_manager")
        def _this_python(self) -> KernelSpecManager:
            return ThisPython()

    return Manager


def _at(lesson: Lesson, index: int, message: str) -> Problem:
    cell = lesson.cells[index]
    return Problem(lesson.path, cell.line, cell.id, message)


# ---------------- outputs
def _examine_outputs(lesson: Lesson, notebook: Any) -> list[Problem]:
    """What must not be committed."""
    problems = []
    for cell, made in zip(lesson.cells, notebook.cells, strict=True):
        for output in made.get("outputs", ()):
            found = _wrong_output(lesson, cell, output)
            if found:
                problems.append(Problem(lesson.path, cell.line, cell.id, found))
                break
    return problems


def _wrong_output(lesson: Lesson, cell: Cell, output: Any) -> str | None:
    if output.output_type == "stream" and output.name == "stderr":
        return f"it wrote on stderr:\n{output.text.rstrip()}"
    text = _text(output)
    for folder in (str(lesson.path.parent.parent.resolve()), str(Path.home()), tempfile.gettempdir()):
        if folder != "/" and re.search(re.escape(folder) + r"(?![\w.-])", text):
            return f"its output names a folder of this machine, {folder}"
    address = _ADDRESS.search(text)
    if address and IGNORE_OUTPUT not in cell.tags:
        return f"its output has an address, {address[0]}, which differs from run to run"
    return None


def _text(output: Any) -> str:
    """All text of an output; tracebacks are left out, for they are not kept."""
    if output.output_type == "stream":
        return str(output.text)
    if output.output_type == "error":
        return f"{output.ename}: {output.evalue}"
    return "\n".join(
        value for kind, value in output.data.items() if isinstance(value, str) and "png" not in kind
    )


def _tidy(notebook: Any) -> None:
    """Take out what differs between runs and machines."""
    notebook.metadata["language_info"] = dict(files.LANGUAGE)
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", ()):
            if output.output_type == "error":  # of a cell tagged raises-exception
                output.traceback = [f"{output.ename}: {output.evalue}"]
            elif output.output_type != "stream":
                output.data.pop(_WIDGET, None)


# ---------------- --check
def check_solutions(root: Path, numbers: Iterable[str] = ()) -> None:
    """Compare the notebooks with their sources, without executing.

    Raises
    ------
    LessonError
        One is missing, made from another state of its source, changed by hand, or not executed, or its outputs have
        another style sheet than they would have today.
    """
    numbers = list(numbers)
    paths = discover(root, numbers)
    problems: list[Problem] = []
    for path in paths:
        try:
            problems += _compare(read(path))
        except LessonError as error:
            problems += error.problems
        except ValueError as error:
            problems.append(Problem(path.with_suffix(".ipynb"), 0, "", str(error)))
    if not numbers:
        sources = {path.stem for path in paths}
        for path in sorted((root / "solutions").glob("*.ipynb")):
            if path.stem not in sources:
                problems.append(Problem(path, 0, "", f"there is no {path.stem}.py that it comes from"))
    if problems:
        raise LessonError(problems)


def _compare(lesson: Lesson) -> list[Problem]:
    path = lesson.path.with_suffix(".ipynb")
    again = f"run `make solutions ONLY={lesson.number}`"
    if not path.exists():
        return [Problem(path, 0, "", f"is not there; {again}")]
    found, wanted = files.read(path), to_notebook(lesson)
    if found.metadata.get("tinyvllm", {}).get("source_sha256") != lesson.sha256:
        return [Problem(path, 0, "", f"{lesson.path.name} was changed since it was made; {again}")]
    if [cell.get("id") for cell in found.cells] != [cell.id for cell in wanted.cells]:
        return [Problem(path, 0, "", f"its cells are not those of {lesson.path.name}; {again}")]
    problems = []
    for have, want in zip(found.cells, wanted.cells, strict=True):
        message = ""
        if any(have.get(name) != want.get(name) for name in ("cell_type", "source", "metadata")):
            message = f"differs from {lesson.path.name}; {again}"
        elif have.cell_type == "code" and have.execution_count is None:
            message = f"was not executed; {again}"
        if message:
            problems.append(Problem(path, 0, have.id, message))
    if not problems and found.metadata != wanted.metadata:
        problems.append(Problem(path, 0, "", f"its metadata were changed; {again}"))
    if not problems and any(outputs_of_older_sheets(cell) for cell in found.cells):
        anew = f"`{typed('tinyvllm')} run-solutions --restyle {lesson.number}` replaces it"
        problems.append(Problem(path, 0, "", f"its outputs have another style sheet than today's; {anew}"))
    return problems
