"""Runs the emulation's corpus of correct kernels under CuPy on a card and writes how well the results agree.

    python benchmarks/gpu_agreement.py results/agreement.md
    python benchmarks/gpu_agreement.py results/agreement.json

Needs this repository, NumPy and CuPy. The table has a row a kernel: the largest error of its outputs against
NumPy in float64, relative to the larger of the value and the output's root mean square, and whether it is
within the tolerance that the emulation is held to. Exits with 1 where a kernel does not agree.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from tests.emulation.kernels import correct_cases  # noqa: E402
from tests.emulation.kernels.case import KernelCase  # noqa: E402


def run(case: KernelCase, cupy: Any) -> dict[str, Any]:
    """One row: name, largest error, tolerance, whether it passed (None: not run), and what went wrong."""
    row: dict[str, Any] = {
        "name": case.name,
        "tolerance": case.tolerance,
        "error": None,
        "passed": False,
        "note": "",
    }
    if int(cupy.cuda.Device().compute_capability) < case.min_arch:
        return {**row, "passed": None, "note": f"needs compute capability {case.min_arch / 10}"}
    try:
        errors = case.errors(case.launch(cupy, case.inputs()))
    except Exception as problem:
        return {**row, "note": f"{type(problem).__name__}: {problem}".splitlines()[0][:300]}
    worst = max(errors.values())
    wrong = sorted(name for name, error in errors.items() if not error <= case.tolerance)
    return {**row, "error": worst, "passed": not wrong, "note": ", ".join(wrong)}


def device(cupy: Any) -> dict[str, str]:
    """What it ran on."""
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    return {
        "device": properties["name"].decode(),
        "compute capability": f"{properties['major']}.{properties['minor']}",
        "cupy": cupy.__version__,
        "CUDA runtime": str(cupy.cuda.runtime.runtimeGetVersion()),
        "CUDA driver": str(cupy.cuda.runtime.driverGetVersion()),
    }


def summary(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """How many kernels agreed, of how many that ran."""
    return sum(row["passed"] is True for row in rows), sum(row["passed"] is not None for row in rows)


def as_markdown(result: dict[str, Any]) -> str:
    """The result as a page with a table."""
    lines = ["# Kernels of the emulation's corpus on a card", ""]
    lines += [f"- {key}: {value}" for key, value in result["machine"].items()]
    passed, run_at_all = summary(result["kernels"])
    lines += [
        f"- command: `{result['command']}`",
        f"- {passed} of {run_at_all} kernels agree",
        "",
    ]
    lines += ["| kernel | largest relative error | tolerance | agrees | note |", "|---|---|---|---|---|"]
    for row in result["kernels"]:
        error = "-" if row["error"] is None else f"{row['error']:.2e}"
        agrees = {True: "yes", False: "**no**", None: "not run"}[row["passed"]]
        lines.append(f"| {row['name']} | {error} | {row['tolerance']:.1e} | {agrees} | {row['note']} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, help="a .md or .json file to write")
    arguments = parser.parse_args()
    if arguments.output.suffix not in {".md", ".json"}:
        parser.error(f"output is {arguments.output}; it must end in .md or .json")
    import cupy

    result: dict[str, Any] = {
        "machine": device(cupy),
        "command": "python benchmarks/gpu_agreement.py " + str(arguments.output),
        "kernels": [run(case, cupy) for case in correct_cases()],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    if arguments.output.suffix == ".json":
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    else:
        arguments.output.write_text(as_markdown(result))
    failed = [row for row in result["kernels"] if row["passed"] is False]
    for row in failed:
        print(f"{row['name']}: error {row['error']}, tolerance {row['tolerance']}: {row['note']}")
    passed, run_at_all = summary(result["kernels"])
    print(f"{passed} of {run_at_all} kernels agree")
    return 0 if passed == run_at_all > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
