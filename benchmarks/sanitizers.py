"""What compute-sanitizer says of the faulty kernels of lesson 08, on a card.

    python benchmarks/sanitizers.py benchmarks/sanitizers.md

Needs an NVIDIA card, CuPy and NVIDIA's compute-sanitizer. Each kernel runs as the lesson gives it, on the
second to fourth of its cases, under each tool; with CuPy's memory pool and without (``cp.cuda.set_allocator(None)``).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

EXERCISES = {
    "08.1": "reads outside", "08.2": "a barrier is missing", "08.3": "a barrier that some skip",
    "08.4": "shared memory not set", "08.5": "two reductions, one buffer", "08.6": "32-bit overflow",
}  # fmt: skip
SECONDS = 60  # a kernel that has not ended by then never does; the others take a few
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def run_one(id: str, pool: bool) -> None:
    """Launch one faulty kernel on a case, as the exercise does."""
    import cupy as cp

    from tinyvllm_ref.course.exercises import exercise_of
    from tinyvllm_ref.course.judging import cases_of
    from tinyvllm_ref.course.lab import Lab
    from tinyvllm_ref.course.lessons import stub_cell

    class WithLines:
        """CuPy, with line numbers in what it compiles."""

        def __getattr__(self, name: str) -> object:
            return getattr(cp, name)

        @staticmethod
        def RawKernel(code: str, name: str) -> object:
            return cp.RawKernel(code, name, options=("-lineinfo",))

    if not pool:
        cp.cuda.set_allocator(None)
    exercise = exercise_of(id)
    namespace = {"cp": WithLines()}
    exec(stub_cell(id), namespace)
    for case, _ in cases_of(exercise, 0)[1:4]:
        exercise.run(namespace[exercise.answer], dict(case.inputs), Lab(cp))


def sanitize(id: str, tool: str, pool: bool) -> tuple[int | None, str]:
    """Number of errors that a tool counts (None where the kernel does not end), and the first of them."""
    command = [
        "compute-sanitizer",
        "--tool",
        tool,
        sys.executable,
        __file__,
        "--one",
        id,
        "pool" if pool else "no-pool",
    ]
    # In a group of its own: where the kernel never ends, the tool and the process in it are ended together.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        text, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None, ""
    summary = re.search(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)", text)
    if not summary:
        raise SystemExit(f"{' '.join(command)}: no summary\n{text[-2000:]}")
    lines = [line.removeprefix("========= ") for line in text.splitlines() if line.startswith("=========")]
    start = next(
        (
            k
            for k, line in enumerate(lines)
            if re.match(r"(Invalid|Error|Barrier|Uninit|Warning|Divergent)", line)
        ),
        None,
    )
    return int(summary[1]), "" if start is None else "\n".join(
        line.rstrip() for line in lines[start : start + 4]
    )


def said(errors: int | None) -> str:
    """A count for the table."""
    return "no end" if errors is None else str(errors)


def main() -> None:
    jobs = [(id, tool, pool) for id in EXERCISES for tool in TOOLS for pool in (True, False)]
    with ThreadPoolExecutor(6) as workers:
        found = dict(zip(jobs, workers.map(lambda job: sanitize(*job), jobs), strict=True))
    version = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True).stdout
    version = next((line for line in version.splitlines() if "ersion" in line), "").strip()
    import cupy as cp

    card = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    lines = [
        "# compute-sanitizer on the faulty kernels of lesson 08",
        "",
        f"{date.today()}; command: `python benchmarks/sanitizers.py benchmarks/sanitizers.md`",
        "",
        f"{card}, CuPy {cp.__version__}, {version}. Errors counted, with CuPy's memory pool / without it.",
        "",
        f"| kernel | fault | {' | '.join(TOOLS)} |",
        "|---|---|" + "---|" * len(TOOLS),
    ]
    for id, fault in EXERCISES.items():
        counts = [" / ".join(said(found[id, tool, pool][0]) for pool in (True, False)) for tool in TOOLS]
        lines.append(f"| {id} | {fault} | {' | '.join(counts)} |")
    for (id, tool, pool), (_, first) in found.items():
        if first and not pool:
            lines += ["", f"{id}, {tool}, without the pool:", "", "```", first, "```"]
    text = "\n".join(lines) + "\n"
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        run_one(sys.argv[2], sys.argv[3] == "pool")
    else:
        main()
