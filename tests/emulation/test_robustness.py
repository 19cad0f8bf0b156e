"""Faults end a launch, never the process: a thousand in a row, in plain Python, in pytest and in Jupyter."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from tinyvllm_ref import emulation as cp

# Every kind of fault, `rounds` times over; prints what came. Runs here, in a bare Python, and in a notebook.
STORM = r'''
import numpy as np
from tinyvllm_ref import emulation as cp

CODE = r"""
extern "C" __global__ void good(float* x, int n) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    if (threadIdx.x < n) x[threadIdx.x] = s[n - 1 - threadIdx.x] + 1;
}
extern "C" __global__ void past_the_end(float* x, long long i) { x[i] = 1; }
extern "C" __global__ void null(float* x, int zero) { float* p = zero ? x : 0; *p = 1; }
extern "C" __global__ void wild(unsigned long long address) { *(float*)address = 1; }
extern "C" __global__ void divide(int* x, int d) { x[0] = 7 / d; }
extern "C" __global__ void trap() { __trap(); }
extern "C" __global__ void asserts(int n) { assert(n == 1); }
extern "C" __global__ void diverge(float* x) {
    if (threadIdx.x < 7) { __syncthreads(); x[0] = 1; } else { __syncthreads(); }
}
extern "C" __global__ void barrier_then_fault(float* x, long long i) {
    __syncthreads();
    if (threadIdx.x == 13) x[i] = 1;
    __syncthreads();
}
"""
module = cp.RawModule(code=CODE)
names = "good past_the_end null wild divide trap asserts diverge barrier_then_fault"
kernels = {name: module.get_function(name) for name in names.split()}

def storm(rounds):
    x = cp.asarray(np.arange(64, dtype=np.float32))
    ints = cp.zeros(4, np.int32)
    far = np.int64(1 << 32)
    launches = [
        ("past_the_end", (1,), (x, far), cp.OutOfBounds),
        ("null", (1,), (x, np.int32(0)), cp.OutOfBounds),
        ("wild", (1,), (np.uint64(0x123456789abc),), cp.OutOfBounds),
        ("divide", (1,), (ints, np.int32(0)), cp.KernelFault),
        ("trap", (1,), (), cp.KernelFault),
        ("asserts", (1,), (np.int32(2),), cp.KernelAssertion),
        ("diverge", (64,), (x,), cp.BarrierDivergence),
        ("barrier_then_fault", (64,), (x, far), cp.OutOfBounds),
    ]
    caught = 0
    for _ in range(rounds):
        for name, block, args, expected in launches:
            try:
                kernels[name]((2,), block, args)
            except expected:
                caught += 1
        y = cp.asarray(np.arange(64, dtype=np.float32))
        kernels["good"]((1,), (64,), (y, np.int32(64)))
        assert (cp.asnumpy(y) == np.arange(64)[::-1] + 1).all()
    return caught

ROUNDS = 125
for mode in ("fast", "full"):
    with cp.checks(mode):
        print(mode, storm(ROUNDS), "faults of", 8 * ROUNDS)
'''
EXPECTED = "fast 1000 faults of 1000\nfull 1000 faults of 1000\n"


def test_in_this_process(capsys):
    exec(compile(STORM, "storm", "exec"), {})
    assert capsys.readouterr().out == EXPECTED


@pytest.mark.parametrize("options", [[], ["-X", "faulthandler"]])
def test_in_plain_python(options):
    done = subprocess.run(
        [sys.executable, *options, "-c", STORM], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, EXPECTED, "")


def test_in_a_jupyter_kernel():
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    try:
        said = []

        def listen(message):
            if message["msg_type"] == "stream":
                said.append((message["content"]["name"], message["content"]["text"]))

        reply = client.execute_interactive(STORM, timeout=180, output_hook=listen)
        assert reply["content"]["status"] == "ok", reply["content"]
        assert "".join(text for name, text in said if name == "stdout") == EXPECTED
        assert not [text for name, text in said if name == "stderr"]
        assert manager.is_alive()
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_memory_does_not_grow_with_faults():
    resource = pytest.importorskip("resource")
    code = 'extern "C" __global__ void past(float* x) { x[1 << 28] = threadIdx.x; }'
    kernel = cp.RawKernel(code, "past")

    def faults(count):
        for _ in range(count):
            x = cp.zeros(1000, np.float32)
            with pytest.raises(cp.OutOfBounds):
                kernel((1,), (256,), (x,))

    faults(200)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    faults(2000)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 20 * 1024  # KiB


def test_a_fault_of_python_is_still_python_s():
    """Outside of a kernel, SIGSEGV goes where it went before."""
    code = (
        "import ctypes, faulthandler\n"
        "from tinyvllm_ref import emulation as cp\n"
        "kernel = cp.RawKernel('extern \"C\" __global__ void k(int* x) { x[0] = 1; }', 'k')\n"
        "kernel((1,), (1,), (cp.zeros(1, 'i4'),))\n"
        "faulthandler.enable()\n"
        "ctypes.string_at(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode < 0
    assert "Segmentation fault" in done.stderr


@pytest.mark.parametrize("mode", ["full", "fast"])
@pytest.mark.parametrize(
    "body", ["while (true) {}", "while (true) x[0] = x[0];", "while (atomicAdd(&x[0], 0) == 0) {}"]
)
def test_endless_loops_are_stopped_in_time(mode, body):
    code = f'extern "C" __global__ void spin(int* x) {{\n    {body}\n}}'
    start = time.monotonic()
    with cp.checks(mode), cp.timeout(0.3), pytest.raises(cp.KernelTimeout, match=r"0\.3 seconds") as caught:
        cp.RawKernel(code, "spin")((4,), (32,), (cp.zeros(1, np.int32),))
    assert time.monotonic() - start < 10
    assert caught.value.line in {2, 3}


def test_an_endless_block_among_many_on_several_cores():
    code = """extern "C" __global__ void spin(int* x, int which) {
        while (blockIdx.x == which) {}
        x[blockIdx.x] = 1;
    }"""
    x = cp.zeros(64, np.int32)
    with cp.checks("fast"), cp.timeout(0.3), pytest.raises(cp.KernelTimeout):
        cp.RawKernel(code, "spin")((64,), (256,), (x, np.int32(5)))
    with cp.checks("fast"):
        cp.RawKernel(code, "spin")((64,), (256,), (x, np.int32(-1)))
    assert int(x.sum()) == 64


def test_a_fault_in_one_of_many_blocks_on_several_cores():
    code = """extern "C" __global__ void fault(int* x) {
        if (blockIdx.x == 77) x[1 << 28] = 1;
        x[blockIdx.x] = 1;
    }"""
    for _ in range(20):
        with cp.checks("fast"), pytest.raises(cp.OutOfBounds) as caught:
            cp.RawKernel(code, "fault")((200,), (256,), (cp.zeros(200, np.int32),))
        assert caught.value.block == (77, 0, 0)


def test_python_threads_may_launch_at_once():
    code = 'extern "C" __global__ void fill(int* x, int v) { __syncthreads(); x[threadIdx.x] = v; }'
    kernel = cp.RawKernel(code, "fill")
    wrong = []

    def work(value):
        for _ in range(50):
            x = cp.empty(64, np.int32)
            kernel((1,), (64,), (x, np.int32(value)))
            if not (cp.asnumpy(x) == value).all():
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_may_launch():
    code = r"""
import os, sys, warnings
import numpy as np
warnings.simplefilter("ignore")
from tinyvllm_ref import emulation as cp
code = 'extern "C" __global__ void one(int* x) { x[blockIdx.x * 256 + threadIdx.x] = 1; }'
kernel = cp.RawKernel(code, "one")
def run():
    with cp.checks("fast"):
        x = cp.zeros(256 * 64, np.int32)
        kernel((64,), (256,), (x,))
        return int(x.sum())
assert run() == 256 * 64
pid = os.fork()
if pid == 0:
    os._exit(0 if run() == 256 * 64 else 1)
_, status = os.waitpid(pid, 0)
assert run() == 256 * 64
sys.exit(os.waitstatus_to_exitcode(status))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_many_arrays_at_once():
    arrays = [cp.zeros(10, np.float32) for _ in range(20000)]
    code = 'extern "C" __global__ void set(float* x) { x[threadIdx.x] = 2; }'
    cp.RawKernel(code, "set")((1,), (10,), (arrays[17777],))
    assert float(arrays[17777].sum()) == 20
    assert float(arrays[17776].sum()) == 0


FLOOD = r"""
import contextlib, signal, threading
import numpy as np
from tinyvllm_ref import emulation as cp

spin = cp.RawKernel('extern "C" __global__ void spin(volatile int* x) { while (x[0] == 0) ; }', "spin")
one = cp.RawKernel('extern "C" __global__ void one(int* x) { x[0] = 1; }', "one")
x = cp.zeros(1, np.int32)
one((1,), (1,), (x,))  # from now on the timer's signal is taken
x[0] = 0
main, on, timeouts = threading.get_ident(), True, 0

def flood():
    while on:
        with contextlib.suppress(BlockingIOError):  # the queue is full
            signal.pthread_kill(main, signal.SIGRTMIN + 3)

threads = [threading.Thread(target=flood) for _ in range(2)]
for thread in threads: thread.start()
for mode in ("fast", "full"):
    try:
        with cp.checks(mode), cp.timeout(0.2):
            spin((1,), (1,), (x,))
    except cp.KernelTimeout:
        timeouts += 1
on = False
for thread in threads: thread.join()
one((1,), (1,), (x,))
print(timeouts, int(x[0]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the signal is not queued")
def test_any_number_of_the_timer_s_signals_at_once():
    """As a thread finds them that has waited for its processor on a busy machine, while the time limit passed."""
    done = subprocess.run([sys.executable, "-c", FLOOD], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2 1\n", "")
