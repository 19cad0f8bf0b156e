"""Runs every kernel under CuPy on a card and writes how near the results are to NumPy in float64.

    python benchmarks/gpu_kernels.py results/gpu_kernels.md

Needs this repository, NumPy, CuPy and what `tinyvllm_ref` imports; no pytest. A row a case: the largest error
of its outputs, relative to the larger of the value and the output's root mean square, and the error that
passes. Exits with 1 where a kernel is wrong. With TINYVLLM_DEVICE=cpu, the same in the emulation, unchecked.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from tests.engine.kernels.cases import Case, all_cases  # noqa: E402
from tinyvllm_ref.blas import best_path  # noqa: E402
from tinyvllm_ref.device import cp, describe, is_gpu  # noqa: E402


def row(case: Case) -> tuple[bool, str]:
    """Whether the case passed, and its line of the table."""
    if case.name.startswith("linear_cublas") and best_path() != "cublas":
        return True, f"| {case.name} | | | skipped: cuBLAS has no BF16 products on this card |"
    try:
        errors = case.errors()
    except Exception as problem:
        text = f"{type(problem).__name__}: {problem}".splitlines()[0][:200]
        return False, f"| {case.name} | | {case.tolerance:.1e} | **{text}** |"
    worst = max(errors.values())
    passed = worst <= case.tolerance
    return passed, f"| {case.name} | {worst:.2e} | {case.tolerance:.1e} | {'ok' if passed else '**wrong**'} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, nargs="?")
    given = parser.parse_args()
    lines = [
        f"# Kernels against NumPy in float64\n\n{describe()}\n",
        "| case | error | passes | |",
        "|---|---|---|---|",
    ]
    failed, start = 0, time.perf_counter()
    with contextlib.nullcontext() if is_gpu else cp.checks("fast"):
        for case in all_cases():
            passed, line = row(case)
            failed += not passed
            lines.append(line)
            print(line)
    verdict = f"{len(lines) - 3} cases, {failed} wrong, {time.perf_counter() - start:.0f} s"
    print(verdict)
    if given.output:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text("\n".join([*lines, "", verdict, ""]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
