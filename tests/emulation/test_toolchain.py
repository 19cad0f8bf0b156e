"""The host compiler: which is found, and that each of the three gives the same answers."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tinyvllm_ref.emulation import toolchain

ZIG = f"{sys.executable} -m ziglang c++"

# A barrier, a race, a template, the small float types and the vector types, in both modes: what differs between
# compilers.
SAMPLE = r"""
import numpy as np
from tinyvllm_ref import emulation as cp
from tinyvllm_ref.emulation import report
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
VECTORS = r'''
#include <cuda_bf16.h>
__constant__ float4 table[2] = {{1, 2, 3, 4}, {5, 6, 7, 8}};
struct Box { float4 corner; float size; };
union Pack { uint4 raw; unsigned part[4]; };
__device__ float4 twice(float4 v) { return make_float4(2 * v.x, 2 * v.y, 2 * v.z, 2 * v.w); }
extern "C" __global__ void vectors(const float4* x, const uint2* pairs, const __nv_bfloat162* halves, float4* out) {
    __shared__ float4 s[1];
    s[0] = twice(x[0]);
    uint2 pair = pairs[0];
    __nv_bfloat162 half = halves[0];
    float4 zero = {}, one = {1}, two = {2, 3};
    const float4 fixed = table[1];
    Box box = {{1, 2, 3, 4}, 5};
    Pack pack;
    pack.raw = *(const uint4*)x;
    __syncthreads(); out[0] = s[0];
    out[1] = make_float4(zero.w + one.x + two.y, fixed.z, box.corner.w + box.size, pack.part[0]);
    out[2] = make_float4(pair.x, __low2float(half), one.y, 0);
}
'''
numbers = np.array([1, 2, 3, 4], np.float32)
pairs = np.array([7, 8], np.uint32)
halves = np.array([0x3f80, 0x4000], np.uint16)
right = [2, 4, 6, 8, 4, 7, 9, 0x3f800000, 7, 1, 0, 0]
for mode in ("full", "fast"):
    out, reports = cp.empty(12, np.float32), []
    with cp.checks(mode), report.collect(reports):
        arrays = [cp.asarray(array) for array in (numbers, pairs, halves)]
        cp.RawKernel(VECTORS, "vectors")((1,), (1,), (*arrays, out))
    assert out.get().tolist() == right, out
    if mode == "full":  # what is one access on a card is one here
        seen = [(line.line, line.kind, line.bytes, line.accesses) for line in reports[0].lines]
        reads = [(9, 16), (10, 8), (11, 4), (16, 16), (17, 16)]
        writes = [(9, 16), (17, 16), (18, 16), (19, 16)]
        assert sorted(seen) == sorted(
            [(line, "read", size, 1) for line, size in reads] + [(line, "write", size, 1) for line, size in writes]
        ), seen
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


@pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="needs a folder that root can not write to either"
)
def test_without_any_other_compiler_and_without_a_home_zig_is_taken(tmp_path):
    """On a machine that has the ziglang wheel alone, and where neither our cache nor zig's own can be written to."""
    empty = tmp_path / "bin"
    empty.mkdir()
    nowhere = Path("/proc/self/nowhere")
    done = run(SAMPLE, nowhere, PATH=str(empty), CXX="", HOME=str(nowhere), XDG_CACHE_HOME=str(nowhere))
    assert (done.returncode, done.stdout, done.stderr) == (0, "zig\n", "")


def test_zig_has_one_name_however_it_is_found(monkeypatch):
    """What was compiled by one is taken from the cache by the other."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    alone = toolchain.find()
    assert alone.family == "zig"
    monkeypatch.setenv("CXX", shlex.join(alone.command))
    assert toolchain.find() == alone
    monkeypatch.setenv("CXX", ZIG)
    assert toolchain.find().version == alone.version


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
