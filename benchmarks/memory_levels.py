"""How fast a card reads each level of its memory: the numbers of the picture in lesson 04.

    python benchmarks/memory_levels.py benchmarks/memory_levels.md

Needs an NVIDIA card, CuPy and NumPy. Each line is the median of twenty runs after three that are not counted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np
from cupyx.profiler import benchmark

SOURCE = r"""
// Every thread reads 16 bytes of shared memory a round; the words of a warp are neighbours.
extern "C" __global__ void read_shared(float* out, int rounds) {
    __shared__ float4 tile[2048];
    for (int i = threadIdx.x; i < 2048; i += blockDim.x) tile[i] = make_float4(i, 1, 2, 3);
    __syncthreads();
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
    for (int r = 0; r < rounds; r++) {
        float4 v = tile[(threadIdx.x + 32 * r) & 2047];
        sum.x += v.x; sum.y += v.y; sum.z += v.z; sum.w += v.w;
    }
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum.x + sum.y + sum.z + sum.w;
}
// All threads together read n 16-byte words, `passes` times; __ldcg goes past the L1 cache.
extern "C" __global__ void read_global(const float4* x, float* out, long long n, int passes) {
    long long step = (long long)gridDim.x * blockDim.x, first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    float4 sum = make_float4(0, 0, 0, 0);
    for (int pass = 0; pass < passes; pass++)
#pragma unroll 4
        for (long long i = first; i < n; i += step) {
            float4 v = __ldcg(x + i);
            sum.x += v.x; sum.y += v.y; sum.z += v.z; sum.w += v.w;
        }
    out[first] = sum.x + sum.y + sum.z + sum.w;
}
"""


def seconds(run: Callable[[], Any]) -> float:
    """Median time of a run on the card."""
    return float(np.median(benchmark(run, (), n_repeat=20, n_warmup=3).gpu_times))


def read_shared(processors: int) -> float:
    """Bytes a second, all SMs together."""
    kernel = cp.RawKernel(SOURCE, "read_shared")
    blocks, threads, rounds = 2 * processors, 1024, 4096
    out = cp.empty(blocks * threads, np.float32)
    time = seconds(lambda: kernel((blocks,), (threads,), (out, np.int32(rounds))))
    return 16 * blocks * threads * rounds / time


def read_global(processors: int, size: int, passes: int) -> float:
    """Bytes a second of reading `size` bytes `passes` times."""
    kernel = cp.RawKernel(SOURCE, "read_global")
    x = cp.zeros(size // 4, np.float32)
    rates = []
    for blocks in (2 * processors, 8 * processors, 16 * processors):
        out = cp.empty(blocks * 512, np.float32)
        args = (x, out, np.int64(size // 16), np.int32(passes))
        rates.append(size * passes / seconds(lambda: kernel((blocks,), (512,), args)))  # noqa: B023
    return max(rates)


def copy_from_host(pinned: bool, size: int = 1 << 30) -> float:
    """Bytes a second from the host's memory to the card."""
    host = (
        np.frombuffer(cp.cuda.alloc_pinned_memory(size), np.uint8, size)
        if pinned
        else np.ones(size, np.uint8)
    )
    device, times = cp.empty(size, np.uint8), []
    for _ in range(8):
        cp.cuda.Device().synchronize()
        start = time.perf_counter()
        device.set(host)
        cp.cuda.Device().synchronize()
        times.append(time.perf_counter() - start)
    return size / float(np.median(times[2:]))


def main() -> None:
    card = cp.cuda.runtime.getDeviceProperties(0)
    processors = card["multiProcessorCount"]
    rows = [
        ("registers, each of the SMs", 4 * card["regsPerMultiprocessor"], None),
        ("shared memory, each of the SMs", card["sharedMemPerMultiprocessor"], read_shared(processors)),
        ("L2 cache (16 MiB read 50 times)", card["l2CacheSize"], read_global(processors, 16 << 20, 50)),
        ("device memory (4 GiB read once)", card["totalGlobalMem"], read_global(processors, 4 << 30, 1)),
        ("host to device, pinned", None, copy_from_host(True)),
        ("host to device, not pinned", None, copy_from_host(False)),
    ]
    lines = [
        "# How fast a card reads each level of its memory",
        "",
        f"{date.today()}; command: `python benchmarks/memory_levels.py benchmarks/memory_levels.md`",
        "",
        f"{card['name'].decode()}, {processors} SMs, CuPy {cp.__version__}. Shared memory: all SMs together.",
        "",
        "| level | bytes | read, GB/s |",
        "|---|---|---|",
    ]
    for name, size, rate in rows:
        lines.append(
            f"| {name} | {'' if size is None else f'{size:,}'} | {'' if rate is None else f'{rate / 1e9:,.0f}'} |"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
