"""Every solution through nbval on a card, and what its measured cells say there.

    python benchmarks/gpu_solutions.py --jobs 4 --write benchmarks/gpu_solutions.md

Needs this repository, CuPy, a card, a C++ compiler (small cases go through the emulation's checks first), nbval and
nbclient. Each notebook runs twice, from an empty folder of progress and with the reference's earlier parts: once by
``pytest --nbval``, which compares every cell that is not tagged with the output saved in emulation, and once to
read the tables of its ``measure`` cells.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass
class Ran:
    """What became of one notebook."""

    name: str
    cells: int
    failed: list[str]
    seconds: float
    tables: list[str]
    said: str


def environment(folder: str, device: str) -> dict[str, str]:
    """Nothing of the person who runs this takes part."""
    return os.environ | {
        "TINYVLLM_DEVICE": device,
        "TINYVLLM_HOME": folder,
        "TINYVLLM_MY_ENGINE": f"{folder}/my_engine",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
    }


def run(notebook: Path, device: str) -> Ran:
    """One notebook, by nbval and once more for its tables."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--nbval",
            "--nbval-current-env",
            "--nbval-cell-timeout=120",
        ]
        command += ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(notebook)]
        done = subprocess.run(
            command, env=environment(folder, device), capture_output=True, text=True, cwd=REPOSITORY
        )
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
        failed = [case.attrib["name"] for case in cases if len(case)]
        if not cases:
            failed = ["could not run"]
    seconds = time.monotonic() - started
    said = "" if not failed else done.stdout[-3000:] + done.stderr[-1000:]
    return Ran(notebook.stem, len(cases), failed, seconds, tables(notebook, device), said)


def tables(notebook: Path, device: str) -> list[str]:
    """The plain text of every table that a cell shows with a measured time."""
    import nbclient
    import nbformat

    with tempfile.TemporaryDirectory() as folder:
        before = dict(os.environ)
        book = nbformat.read(notebook, as_version=4)
        client = nbclient.NotebookClient(
            book, timeout=120, allow_errors=True, resources={"metadata": {"path": str(notebook.parent)}}
        )
        client.execute(env=environment(folder, device) | {"HOME": before.get("HOME", folder)})
    texts = [
        output.data["text/plain"]
        for cell in book.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "display_data" and "text/plain" in output.data
    ]
    return [text for text in texts if re.search(r"GB/s|\bus\b|TFLOP", text)]


def describe(device: str) -> str:
    """The machine, in a line."""
    program = "from tinyvllm_ref.device import describe; print(describe())"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment(folder, device), capture_output=True, text=True
        )
    return done.stdout.strip() or done.stderr.strip()[-200:]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("notebooks", nargs="*", type=Path, help="by default all of solutions/")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument(
        "--device", default="cuda", choices=["cuda", "cpu"], help="cpu to try it without a card"
    )
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    notebooks = options.notebooks or sorted((REPOSITORY / "solutions").glob("*.ipynb"))
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda path: run(path, options.device), notebooks))
    lines = [
        "# The solutions on a card",
        "",
        f"{datetime.date.today()}; command: `python {shlex.join(sys.argv)}`",
        "",
        f"{describe(options.device)}. {options.jobs} notebooks at a time: a whole notebook alone takes less.",
        "",
        "| lesson | code cells | failed | seconds |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {r.name} | {r.cells} | {', '.join(r.failed) or 'none'} | {r.seconds:.0f} |" for r in results
    ]
    for result in results:
        if result.tables:
            lines += ["", f"## {result.name}, measured", *(f"\n```\n{text}\n```" for text in result.tables)]
    text = "\n".join(lines) + "\n"
    print(text)
    for result in results:
        if result.failed:
            print(f"==== {result.name}\n{result.said}", file=sys.stderr)
    if options.write:
        options.write.write_text(text, encoding="utf-8")
    return 1 if any(result.failed for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
