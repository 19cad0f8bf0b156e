"""Time to open a safetensors file of hundreds of megabytes: lesson 01's reader, the reference's, and the library.

    python benchmarks/safetensors_open.py [--megabytes 512]

Makes a file of 290 tensors (as many as a Llama of 32 layers has), opens it again and again with each reader, and
prints the median time and the memory that Python took for it. Opening means: header read and checked, and a view (for
the library: a handle) of every tensor made. No tensor is looked at.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from tinyvllm_ref.checkpoint.safetensors import read_safetensors, write_safetensors
from tinyvllm_ref.course.cells import run_alone
from tinyvllm_ref.course.lessons import solution_cell
from tinyvllm_ref.device import cp

TENSORS = 290
REPEATS = 100


def main() -> None:
    """Measure, and print one line of JSON per reader."""
    parser = argparse.ArgumentParser(description="Time to open a safetensors file.")
    parser.add_argument("--megabytes", type=int, default=512, help="size of the file")
    megabytes = parser.parse_args().megabytes
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        make_file(path, megabytes)
        for name, read in readers().items():
            times = []
            for _ in range(REPEATS):
                start = time.perf_counter()
                tensors = read(path)
                times.append(time.perf_counter() - start)
                del tensors
            tracemalloc.start()
            tensors = read(path)
            taken = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            result = {
                "reader": name,
                "file_bytes": path.stat().st_size,
                "tensors": len(tensors),
                "median_ms": round(statistics.median(times) * 1e3, 3),
                "python_peak_kib": taken // 1024,
                "python": platform.python_version(),
                "safetensors": safetensors.__version__,
            }
            print(json.dumps(result))


def make_file(path: Path, megabytes: int) -> None:
    """A file of `TENSORS` BF16 matrices."""
    rows = megabytes * 1_000_000 // (TENSORS * 2048 * 2)
    tensors = {
        f"model.layers.{k // 9}.self_attn.part_{k % 9}.weight": ("BF16", (rows, 2048)) for k in range(TENSORS)
    }
    block = np.random.default_rng(0).bytes(rows * 2048 * 2)
    write_safetensors(path, tensors, (block for _ in tensors))


def readers() -> dict[str, Callable[[Path], Any]]:
    """Name -> function that opens a file."""
    cells = [solution_cell("01.1"), solution_cell("01.2")]
    if None in cells:
        raise FileNotFoundError("solutions/01_safetensors.py has no cells of 01.1 and 01.2")
    lesson = run_alone("\n".join(cell or "" for cell in cells), "lesson 01", {"np": np, "cp": cp})
    return {
        "safetensors.safe_open": open_with_library,
        "tinyvllm_ref": read_safetensors,
        "lesson 01": lesson["read_safetensors"],
    }


def open_with_library(path: Path) -> Any:
    """A handle of every tensor, with its dtype and shape, by the library."""
    with safetensors.safe_open(path, framework="np") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (part.get_dtype(), part.get_shape(), part) for name, part in slices.items()}


if __name__ == "__main__":
    main()
