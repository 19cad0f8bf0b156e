"""Faults that an attempt to break the emulation found, each kept as a test."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tinyvllm_ref import emulation as cp


def run(code: str, grid: int, block: int, *args: object) -> None:
    name = code.split("__global__ void ")[1].split("(")[0]
    cp.RawKernel(code, name)((grid,), (block,), args)


def count_maps() -> int:
    """Mappings of this process, or 0 where the system does not tell."""
    path = Path("/proc/self/maps")
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_thread_s_memory_goes_with_it():
    code = 'extern "C" __global__ void k(float* a) { __syncthreads(); a[threadIdx.x] = 7; }'
    kernel = cp.RawKernel(code, "k")

    def in_a_thread(mode: str) -> None:
        def work() -> None:
            with cp.checks(mode):
                kernel((1,), (64,), (cp.zeros(64, np.float32),))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    for mode in ("full", "fast"):
        in_a_thread(mode)
        before = count_maps()
        for _ in range(40):
            in_a_thread(mode)
        deadline = time.monotonic() + 20  # Python's join does not wait for the end of the system's thread
        while count_maps() - before >= 1000 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert count_maps() - before < 1000  # one thread's stacks alone are some 2,000


@pytest.mark.parametrize(("grid", "block"), [(4, 64), (64, 1)])
def test_a_block_overwrites_what_another_reads(grid, block):
    code = """extern "C" __global__ void shift(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float y = 0;
    if (i + 1 < n) y = x[i] + x[i + 1];
    __syncthreads();
    if (i + 1 < n) x[i] = y;
}"""
    n = grid * block
    with pytest.raises(cp.DataRace, match="blocks run in no order") as caught:
        run(code, grid, block, cp.zeros(n, np.float32), np.int32(n))
    assert caught.value.array == "x"


def test_a_fence_is_no_barrier():
    missing = """extern "C" __global__ void tickets(unsigned* ticket, int* seen) {
    __shared__ int last;
    if (threadIdx.x == 0) last = 0;
    __syncthreads();
    if (threadIdx.x == 0) { __threadfence(); last = atomicAdd(ticket, 1u) == gridDim.x - 1; }
    seen[blockIdx.x * blockDim.x + threadIdx.x] = last;
}"""
    with pytest.raises(cp.DataRace, match="last"):
        run(missing, 2, 64, cp.zeros(1, np.uint32), cp.zeros(128, np.int32))
    unordered = """extern "C"
__global__ void sums(const float* x, float* partial, unsigned* ticket, float* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
    partial[i] = x[i];
    if (threadIdx.x == blockDim.x - 1) {
        __threadfence();
        if (atomicAdd(ticket, 1u) == gridDim.x - 1) {
            __threadfence();
            float s = 0;
            for (int j = 0; j < n; j++) s += partial[j];
            *out = s;
        }
    }
}"""
    arrays = [cp.zeros(size, np.float32) for size in (128, 128, 1)]
    arrays.insert(2, cp.zeros(1, np.uint32))
    with pytest.raises(cp.DataRace, match="partial"):
        run(unordered, 2, 64, *arrays)


def test_views_of_one_buffer_have_their_own_names():
    code = """extern "C" __global__ void split(const float* q, const float* k, float* v) {
    v[threadIdx.x] = q[threadIdx.x] + k[threadIdx.x];
}"""
    buffer = cp.zeros(40, np.float32)
    with pytest.raises(cp.OutOfBounds) as caught:
        run(code, 1, 10, buffer[:16], buffer[16:32], buffer[32:40])
    assert (caught.value.array, caught.value.index) == ("v", 8)


def test_printf_of_several_threads_is_whole(capsys):
    code = 'extern "C" __global__ void say(int n) { for (int i = 0; i < 50; i++) printf("<%d>\\n", n); }'
    kernel = cp.RawKernel(code, "say")
    kernel.compile()

    def work(number):
        for _ in range(20):
            kernel((1,), (4,), (np.int32(number),))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 * 20 * 4 * 50
    assert set(lines) == {f"<{number}>" for number in range(4)}


@pytest.mark.parametrize("mode", ["full", "fast"])
def test_ctrl_c_stops_a_kernel(mode):
    code = f"""
import os, signal, threading, time
import numpy as np
from tinyvllm_ref import emulation as cp
kernel = cp.RawKernel('extern "C" __global__ void spin(volatile int* x) {{ while (*x == 0) {{}} }}', "spin")
x = cp.zeros(1, np.int32)
with cp.checks("{mode}"):
    kernel.compile()
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    try:
        kernel((1,), (1,), (x,))
    except KeyboardInterrupt:
        print("stopped", time.monotonic() - start < 5)
    y = cp.zeros(4, np.int32)
    cp.RawKernel('extern "C" __global__ void one(int* y) {{ y[threadIdx.x] = 1; }}', "one")((1,), (4,), (y,))
    print(int(y.sum()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "stopped True\n4\n", "")


def test_the_cache_may_be_deleted_while_it_is_in_use(tmp_path):
    code = f"""
import os, shutil
import numpy as np
from tinyvllm_ref import emulation as cp
def run(value):
    x = cp.empty(1, np.int32)
    code = 'extern "C" __global__ void put(int* x) {{ x[0] = %d; }}' % value
    cp.RawKernel(code, "put")((1,), (1,), (x,))
    return int(x[0])
assert run(1) == 1
shutil.rmtree({str(tmp_path / "home")!r})
assert run(2) == 2
"""
    environment = {**os.environ, "TINYVLLM_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_another_thread_s_stack_is_out_of_bounds():
    code = """extern "C" __global__ void share(unsigned long long* where, int* out) {
    int mine[4] = {1, 2, 3, 4};
    if (threadIdx.x == 0) where[0] = (unsigned long long)mine;
    __syncthreads();
    if (threadIdx.x == 1) out[0] = ((int*)where[0])[2] + mine[out[0]];
    __syncthreads();
    if (threadIdx.x == 0) out[1] = mine[out[1]];
}"""
    with pytest.raises(cp.OutOfBounds):
        run(code, 1, 2, cp.zeros(1, np.uint64), cp.zeros(2, np.int32))


@pytest.mark.parametrize("reads", ["sum += x[i]", "sum = x[i] + sum"])
def test_a_sum_without_a_start_value_never_comes_out_right(reads):
    code = f"""
    extern "C" __global__ void total(const float* x, float* out, int n) {{
        float sum;
        for (int i = threadIdx.x; i < n; i += blockDim.x) {reads};
        out[threadIdx.x] = sum;
    }}"""
    x, out = cp.ones(96, np.float32), cp.empty(32, np.float32)
    cp.RawKernel(code, "total")((1,), (32,), (x, out, np.int32(96)))
    assert not (cp.asnumpy(out) == 3.0).any()


_FILLED = {
    "all threads": ("memset(s, 0, sizeof(s)); __syncthreads();", None),
    "one thread": ("if (threadIdx.x == 0) memset(s, 0, n); __syncthreads();", None),
    "copied": ("if (threadIdx.x == 0) memcpy(s, x, n); __syncthreads();", None),
    "moved": ("if (threadIdx.x == 0) memmove(s, x, n); __syncthreads();", None),
    "no barrier": ("if (threadIdx.x == 0) memset(s, 0, n);", "DataRace"),
    "too many bytes": ("memset(s, 0, n + 4); __syncthreads();", "OutOfBounds"),
    "too few bytes": ("memset(s, 0, n - 4); __syncthreads();", "UninitializedRead"),
}


@pytest.mark.parametrize("name", _FILLED)
def test_memory_that_the_c_library_fills(name):
    fill, fault = _FILLED[name]
    code = f"""
    extern "C" __global__ void k(const int* x, int* out, int n) {{
        __shared__ int s[64];
        {fill}
        float one;
        int bits = 0x3f800000;
        memcpy(&one, &bits, 4);
        out[threadIdx.x] = s[threadIdx.x] + one;
    }}"""
    x, out = cp.zeros(64, np.int32), cp.empty(64, np.int32)
    kernel = cp.RawKernel(code, "k")
    if fault is None:
        kernel((1,), (64,), (x, out, np.int32(256)))
        assert (cp.asnumpy(out) == 1).all()
    else:
        with pytest.raises(getattr(cp, fault)):
            kernel((1,), (64,), (x, out, np.int32(256)))


@pytest.mark.parametrize("declared", ["extern __shared__ float s[];", "__shared__ float s[8];"])
def test_behind_shared_memory_lies_no_right_value(declared):
    """Without the checks a read off the end is wrong each time, on a worker that is new as on one that is not."""
    code = f"""
    extern "C" __global__ void k(float* out) {{
        {declared}
        s[threadIdx.x] = 1.0f;
        __syncthreads();
        out[threadIdx.x] = s[threadIdx.x + 8];
    }}"""
    kernel, found = cp.RawKernel(code, "k"), []

    def launch() -> None:
        with cp.checks("fast"):
            for _ in range(2):
                out = cp.zeros(8, np.float32)
                kernel((1,), (8,), (out,), shared_mem=32 if "extern" in declared else 0)
                found.append(cp.asnumpy(out))

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert len(found) == 2
    assert np.isnan(found).all()
