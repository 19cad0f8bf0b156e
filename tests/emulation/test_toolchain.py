"""The host compiler: which is found, and that each of the three gives the same answers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tinyvllm_ref.emulation import toolchain

REPOSITORY = Path(__file__).parents[2]
ZIG = f"{sys.executable} -m ziglang c++"

# A barrier, a race, a template, and the small float types, in both modes: what differs between compilers.
SAMPLE = r"""
import numpy as np
from tinyvllm_ref import emulation as cp
SUM = r'''
#include <cuda_bf16.h>
template <typename T> __device__ float widened(T x) { return __bfloat162float(x); }
extern "C" __global__ void sum(const __nv_bfloat16* x, float* out, int n, int forget) {
    __shared__ float s[128];
    int t = threadIdx.x;
    s[t] = t < n ? widened(x[t]) : 0.0f;
    __syncthreads();
    for (int k = 64; k > 0; k /= 2) {
        if (t < k) s[t] += s[t + k];
        if (!forget) __syncthreads();
    }
    if (t == 0) out[0] = s[0];
}
'''
x = cp.asarray((np.arange(100, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16))
out = cp.empty(1, np.float32)
kernel = cp.RawKernel(SUM, "sum")
for mode in ("full", "fast"):
    with cp.checks(mode):
        kernel((1,), (128,), (x, out, np.int32(100), np.int32(0)))
        assert float(out[0]) == 4950, float(out[0])
try:
    kernel((1,), (128,), (x, out, np.int32(100), np.int32(1)))
except cp.DataRace as race:
    assert race.array == "s" and race.line == 10 and race.other.line == 10, race
else:
    raise AssertionError("the missing barrier was not found")
from tinyvllm_ref.emulation import toolchain
print(toolchain.find().family)
"""


def run(code: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "TINYVLLM_HOME": str(home), **environment}
    return subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(("command", "family"), [("g++", "gcc"), ("clang++", "clang"), (ZIG, "zig")])
def test_each_compiler_gives_the_same(command, family, tmp_path):
    if shutil.which(command.split()[0]) is None:
        pytest.skip(f"{command} is not installed")
    done = run(SAMPLE, tmp_path, CXX=command)
    assert (done.returncode, done.stdout, done.stderr) == (0, family + "\n", "")


def test_without_any_other_compiler_zig_is_taken(tmp_path):
    empty = tmp_path / "bin"
    empty.mkdir()
    done = run(SAMPLE, tmp_path, PATH=str(empty), CXX="")
    assert (done.returncode, done.stdout, done.stderr) == (0, "zig\n", "")


def test_no_compiler_at_all_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(toolchain, "_zig", lambda: None)
    toolchain._find.cache_clear()
    with pytest.raises(toolchain.CompilerNotFound, match=r"apt-get install g\+\+.*ziglang"):
        toolchain.find()
    toolchain._find.cache_clear()


def test_a_wrong_cxx_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler --flag")
    with pytest.raises(toolchain.CompilerNotFound, match="no-such-compiler"):
        toolchain.find()


def test_windows_is_sent_to_wsl(monkeypatch):
    monkeypatch.setattr(toolchain.platform, "system", lambda: "Windows")
    toolchain._find.cache_clear()
    with pytest.raises(toolchain.CompilerNotFound, match="WSL"):
        toolchain.find()
    toolchain._find.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", ["aarch64-linux-gnu", "x86_64-linux-musl", "aarch64-macos", "x86_64-macos"]
)
def test_the_runtime_compiles_for_other_systems(target, tmp_path):
    """zig cross-compiles what can not be run here."""
    from tinyvllm_ref.emulation import native

    compiler = toolchain._find(ZIG, os.environ["PATH"])
    for source in sorted(native.SOURCE_FOLDER.glob("*.cpp")):
        flags = ["-std=c++17", "-O1", "-target", target, "-c", *compiler.common_flags]
        done = compiler.run([*flags, str(source), "-o", str(tmp_path / "unit.o")])
        assert done.returncode == 0, done.stderr
    kernel = tmp_path / "kernel.cpp"
    kernel.write_text(
        '#include "cuda_shim.h"\nextern "C" __global__ void k(float* x) {\n'
        "    x[threadIdx.x] = sqrtf(x[threadIdx.x]);\n    __syncthreads();\n}\nEMU_ENTRY(0, k)\n"
    )
    for mode in ([], ["-DEMU_FULL"]):
        flags = ["-std=c++17", "-O1", "-target", target, "-c", "-nostdinc", *mode, *compiler.common_flags]
        include = ["-isystem", str(native.SOURCE_FOLDER)]
        done = compiler.run([*flags, *include, str(kernel), "-o", str(tmp_path / "kernel.o")])
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_whole_corpus_with_zig_alone(tmp_path):
    """The emulation's tests again on a machine that has no compiler but the ziglang wheel."""
    empty = tmp_path / "bin"
    empty.mkdir()
    variables = {**os.environ, "TINYVLLM_HOME": str(tmp_path), "PATH": str(empty), "CXX": ""}
    tests = [
        "test_kernels.py",
        "test_planted_bugs.py",
        "test_raw_kernel.py",
        "test_report.py",
        "test_robustness.py",
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [str(REPOSITORY / "tests/emulation" / name) for name in tests]
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, cwd=REPOSITORY, timeout=1200
    )
    assert done.returncode == 0, done.stdout[-4000:]
