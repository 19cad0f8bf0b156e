"""Compiled kernels on disk: by hash, safe with many processes, bounded, and never in the way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tinyvllm_ref.emulation import cache

RUN = r"""
import numpy as np
from tinyvllm_ref import emulation as cp
code = 'extern "C" __global__ void put(int* x) { x[threadIdx.x] = 41 + N; }'
x = cp.empty(8, np.int32)
cp.RawKernel(code, "put", options=("-DN=1",))((1,), (8,), (x,))
assert (cp.asnumpy(x) == 42).all()
print("done")
"""


def start(home: Path, **environment: str) -> subprocess.Popen[str]:
    variables = {**os.environ, "TINYVLLM_HOME": str(home), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", RUN], env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert err == ""
    return out


def test_many_processes_share_a_cold_cache(tmp_path):
    for process in [start(tmp_path) for _ in range(4)]:
        assert finish(process) == "done\n"
    files = list((tmp_path / "kernels").iterdir())
    assert len([f for f in files if f.name.startswith("runtime-")]) == 1
    assert not [f for f in files if f.suffix == ".tmp"]


def test_a_second_process_compiles_nothing(tmp_path):
    finish(start(tmp_path))
    before = {f: f.stat().st_ino for f in (tmp_path / "kernels").iterdir()}
    # No compiler can be started any more, and none is needed but for its version.
    finish(start(tmp_path))
    assert {f: f.stat().st_ino for f in (tmp_path / "kernels").iterdir()} == before


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc").exists(), reason="needs /proc to find a place")
def test_a_home_that_can_not_be_written_to(tmp_path):
    file = tmp_path / "a file"
    file.write_text("")
    assert finish(start(file)) == "done\n"


def test_a_damaged_library_is_made_again(tmp_path):
    finish(start(tmp_path))
    for file in (tmp_path / "kernels").iterdir():
        file.write_bytes(b"\x7fELF and nothing more")
    assert finish(start(tmp_path)) == "done\n"


def test_spaces_and_other_letters_in_the_path(tmp_path):
    assert finish(start(tmp_path / "мой дом ü")) == "done\n"


def test_pruning_keeps_what_was_used_last(tmp_path):
    for number in range(5):
        path = tmp_path / f"{number}.so"
        path.write_bytes(b"x" * 100)
        os.utime(path, (number, number))
    cache.prune(tmp_path, limit=250)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3.so", "4.so"]


def test_keys_differ_with_the_borders_of_their_parts():
    assert cache.key("ab", "c") != cache.key("a", "bc")
