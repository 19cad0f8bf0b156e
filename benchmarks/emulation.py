"""What the emulation costs: `python benchmarks/emulation.py [--write benchmarks/emulation.md]`.

Every figure is the best of several runs, for the machine may be busy with other things; the comparison with
Numba's CUDA simulator and with NumPy is made in the same run.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tinyvllm_ref import emulation as cp
from tinyvllm_ref.emulation import toolchain

NOTHING = 'extern "C" __global__ void nothing(float* x) {}'
SCALE = r"""
extern "C" __global__ void scale(float* x, float a) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    x[i] = a * x[i];
}
"""
KERNELS = r"""
extern "C" __global__ void barriers(float* x, int n) {
    for (int k = 0; k < n; k++) __syncthreads();
    x[threadIdx.x] = n;
}
extern "C" __global__ void shuffles(float* x, int n) {
    float v = threadIdx.x;
    for (int k = 0; k < n; k++) v += __shfl_xor_sync(0xffffffffu, v, 1);
    x[threadIdx.x] = v;
}
extern "C" __global__ void reduce(const float* x, float* out) {
    __shared__ float s[1024];
    unsigned t = threadIdx.x;
    s[t] = x[blockIdx.x * blockDim.x + t];
    __syncthreads();
    for (unsigned k = blockDim.x / 2; k > 0; k >>= 1) {
        if (t < k) s[t] += s[t + k];
        __syncthreads();
    }
    if (t == 0) out[blockIdx.x] = s[0];
}
"""
BLOCKS = 64

NUMBA = r"""
import time
import numpy as np
from numba import cuda, float32

@cuda.jit
def reduce(x, out):
    s = cuda.shared.array(1024, float32)
    t = cuda.threadIdx.x
    s[t] = x[cuda.blockIdx.x * cuda.blockDim.x + t]
    cuda.syncthreads()
    k = cuda.blockDim.x // 2
    while k > 0:
        if t < k:
            s[t] += s[t + k]
        cuda.syncthreads()
        k //= 2
    if t == 0:
        out[cuda.blockIdx.x] = s[0]

x = np.ones(1024, np.float32)
out = np.zeros(1, np.float32)
times = []
for _ in range(3):
    start = time.perf_counter()
    reduce[1, 1024](x, out)
    times.append(time.perf_counter() - start)
assert out[0] == 1024
print(min(times))
"""


def best(function: Callable[[], object], repeats: int = 9) -> float:
    """Seconds of the fastest of several calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def compile_times() -> tuple[float, float, float]:
    """Milliseconds to compile a small kernel in fast and in full mode, and to load it from the cache."""
    code = r"""
import sys, time
import numpy as np
from tinyvllm_ref import emulation as cp
code = open(sys.argv[1]).read()
x = cp.zeros(64, np.float32)
cp.RawKernel('extern "C" __global__ void warm(float* x) { x[0] = 1; }', "warm")((1,), (1,), (x,))
for mode in ("fast", "full"):
    with cp.checks(mode):
        kernel = cp.RawKernel(code, "scale")
        start = time.perf_counter()
        kernel.compile()
        print((time.perf_counter() - start) * 1e3)
"""
    with tempfile.TemporaryDirectory() as home:
        source = Path(home) / "scale.cu"
        environment = {**os.environ, "TINYVLLM_HOME": home}

        def run() -> list[float]:
            done = subprocess.run(
                [sys.executable, "-c", code, str(source)],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            )
            return [float(line) for line in done.stdout.split()]

        cold = []
        for attempt in range(4):
            source.write_text(f"{SCALE}// attempt {attempt}\n")
            cold.append(run())
        cached = min(min(run()) for _ in range(3))
    return min(c[0] for c in cold), min(c[1] for c in cold), cached


def numba_seconds() -> float | None:
    """Seconds of one 1,024-thread reduction block in Numba's CUDA simulator."""
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run([sys.executable, "-c", NUMBA], env=environment, capture_output=True, text=True)
    return float(done.stdout) if done.returncode == 0 else None


def measure() -> list[tuple[str, str, str]]:
    """Rows of (what, figure, aim)."""
    module = cp.RawModule(code=KERNELS)
    barriers, shuffles, reduce = (module.get_function(name) for name in ("barriers", "shuffles", "reduce"))
    nothing, scale = cp.RawKernel(NOTHING, "nothing"), cp.RawKernel(SCALE, "scale")
    x = cp.ones(BLOCKS * 1024, np.float32)
    out = cp.empty(BLOCKS, np.float32)
    host = cp.asnumpy(x)
    rows = []

    with cp.checks("fast"):
        nothing((1,), (1,), (x,))
        calls = 2000

        def launches() -> None:
            for _ in range(calls):
                nothing((1,), (1,), (x,))

        rows.append(("one launch, one thread", f"{best(launches) / calls * 1e6:.1f} us", "under 20 us"))

        cp.set_workers(1)
        threads = BLOCKS * 1024
        alone = best(lambda: scale((BLOCKS,), (1024,), (x, np.float32(1)))) / threads
        cp.set_workers(0)
        both = best(lambda: scale((BLOCKS,), (1024,), (x, np.float32(1)))) / threads
        rows.append(("a thread with no barrier, one core", f"{alone * 1e9:.2f} ns", "under 3 ns"))
        rows.append((f"the same on all {os.cpu_count()} cores", f"{both * 1e9:.2f} ns", ""))
        cp.set_workers(1)
        n = 200
        for count in (32, 1024):
            long = best(lambda c=count: barriers((1,), (c,), (x, np.int32(n))))
            short = best(lambda c=count: barriers((1,), (c,), (x, np.int32(0))))
            rows.append(
                (f"a barrier, {count} threads", f"{(long - short) / n / count * 1e9:.1f} ns a thread", "")
            )
        long = best(lambda: shuffles((1,), (32,), (x, np.int32(1000))))
        short = best(lambda: shuffles((1,), (32,), (x, np.int32(0))))
        rows.append(("a shuffle of 32 lanes", f"{(long - short) / 1000 * 1e6:.2f} us", "under 0.3 us"))
        block = best(lambda: reduce((4,), (1024,), (x, out))) / 4
        rows.append(
            ("a 1,024-thread tree reduction, one core", f"{block * 1e6:.0f} us a block", "under 250 us")
        )
        cp.set_workers(0)
        all_blocks = best(lambda: reduce((BLOCKS,), (1024,), (x, out))) / BLOCKS
        rows.append((f"the same on all {os.cpu_count()} cores", f"{all_blocks * 1e6:.0f} us a block", ""))
        numpy_block = best(lambda: host.reshape(BLOCKS, 1024).sum(1)) / BLOCKS
        rows.append(("NumPy's sum of 1,024 numbers", f"{numpy_block * 1e6:.2f} us", ""))

    with cp.checks("full"):
        full = best(lambda: reduce((4,), (1024,), (x, out)), 5) / 4
        accesses = cp.last_report.accesses / 4
        rows.append(("the reduction in full mode", f"{full * 1e6:.0f} us a block", ""))
        rows.append(("a checked access", f"{(full - block) / accesses * 1e9:.0f} ns", ""))

    fast_ms, full_ms, cached_ms = compile_times()
    rows.append(("compiling a kernel, fast mode, cold", f"{fast_ms:.0f} ms", "under 100 ms"))
    rows.append(("compiling a kernel, full mode, cold", f"{full_ms:.0f} ms", "under 100 ms"))
    rows.append(("loading it from the cache", f"{cached_ms:.1f} ms", "under 3 ms"))
    numba = numba_seconds()
    if numba is not None:
        rows.append(("Numba's CUDA simulator, the same reduction block", f"{numba * 1e3:.0f} ms", ""))
        rows.append(("the emulation is faster by", f"{numba / block:,.0f} times", "at least 1,000"))
    return rows


def processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")


SAYS = (
    "What the CPU emulation of CUDA kernels costs: a launch, a thread, a barrier, a shuffle, a checked access, a "
    "compiler's run. It says nothing of a card, nor of how fast the engine writes (`tinyvllm bench` measures that)."
)


def verdict(figure: str, aim: str) -> str:
    """The aim, with a remark where it is missed; both name the same unit."""
    if not aim:
        return ""
    measured, wanted = (
        float(re.sub(r"[^0-9.]", "", re.search(r"[\d.,]+", text)[0])) for text in (figure, aim)
    )
    missed = measured < wanted if aim.startswith("at least") else measured >= wanted
    return f"{aim} (missed)" if missed else aim


def main() -> None:
    """Measure, print, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="a Markdown file for the record")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    rows = measure()
    lines = [
        "# The emulation's cost",
        "",
        f"{datetime.date.today()}, {processor()}, {os.cpu_count()} cores, {toolchain.find().version}, "
        f"Python {platform.python_version()}. Load when it began: {load:.1f}.",
        "",
        SAYS,
        "",
        f"`python {' '.join(['benchmarks/emulation.py', *sys.argv[1:]])}`",
        "",
        "| what | measured | aim |",
        "|---|---|---|",
        *(f"| {what} | {figure} | {verdict(figure, aim)} |" for what, figure, aim in rows),
        "",
    ]
    print("\n".join(lines))
    if arguments.write:
        arguments.write.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
