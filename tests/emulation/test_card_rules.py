"""What a card refuses or leaves undefined: limits of a launch, indices of local arrays, casts and shifts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tinyvllm_ref import emulation as cp

LIMITS = r"""
#define THREADS 64
extern "C" __global__ void __launch_bounds__(THREADS) bounded(int* x) { x[threadIdx.x] = 1; }
extern "C" __global__ void both(int* x) {
    __shared__ int fixed[2048];
    extern __shared__ int dynamic[];
    fixed[threadIdx.x] = dynamic[threadIdx.x] = x[threadIdx.x];
}
template <int N> __global__ void __launch_bounds__(N) instance(int* x) { x[threadIdx.x] = N; }
"""


def launch(name: str, block: int, shared: int = 0, limit: int | None = None) -> None:
    names = ["instance<32>"] if "<" in name else None
    kernel = cp.RawModule(code=LIMITS, name_expressions=names).get_function(name)
    if limit is not None:
        kernel.max_dynamic_shared_size_bytes = limit
    kernel((1,), (block,), (cp.zeros(64, np.int32),), shared_mem=shared)


# Both were seen on an H200 (CUDA 13.0): cuLaunchKernel gives CUDA_ERROR_INVALID_VALUE.
@pytest.mark.parametrize("mode", ["full", "fast"])
def test_launch_bounds_are_kept(mode):
    with cp.checks(mode):
        launch("bounded", 64)
        launch("instance<32>", 64)
        with pytest.raises(
            cp.cuda.driver.CUDADriverError, match=r"INVALID_VALUE.*allows 64, by its __launch_bounds__"
        ):
            launch("bounded", 65)


@pytest.mark.parametrize("mode", ["full", "fast"])
def test_static_and_dynamic_shared_memory_have_one_limit(mode):
    with cp.checks(mode):
        launch("both", 2, 40960)
        launch("both", 2, 49152, limit=49152)
        launch("both", 2, 224256, limit=224256)
        for shared, limit in ((40961, None), (49152, None), (224257, 224257)):
            with pytest.raises(cp.cuda.driver.CUDADriverError, match=r"INVALID_VALUE.*8,192 bytes"):
                launch("both", 2, shared, limit)


UNDEFINED = r"""
__device__ const int fixed[4] = {1, 2, 3, 4};
struct Row { float v[3]; int n; };
extern "C" __global__ void local(float* x, int n) {
    float acc[4] = {0};
    for (int k = 0; k < n; k++)
        acc[k] += x[k];
    x[0] = acc[0] + acc[1];
}
extern "C" __global__ void constant(int* x, int n) {
    x[threadIdx.x] = fixed[n];
}
extern "C" __global__ void member(Row* rows, int n) {
    rows[0].v[n] = 1;
}
extern "C" __global__ void row(float* x, int n) {
    float m[3][5] = {};
    m[1][n] = 1;
    for (int k = 0; k < 15; k++) x[k] = m[k / 5][k % 5];
}
extern "C" __global__ void arithmetic(const float* x, int* y, int n) {
    y[0] = (int)x[0];
    y[1] = 1 << n;
    y[2] = __float2int_rn(x[0]);
}
"""


@pytest.mark.parametrize(
    ("name", "array", "n", "line"),
    [
        ("local", "acc", 5, 7),
        ("constant", "fixed", 4, 11),
        ("constant", "fixed", -1, 11),
        ("member", "v", 3, 14),
        ("row", "m", 5, 18),
    ],
)
def test_an_index_out_of_an_array_of_known_size(name, array, n, line):
    x = cp.zeros(15, np.int32 if name == "constant" else np.float32)
    kernel = cp.RawKernel(UNDEFINED, name)
    with pytest.raises(cp.OutOfBounds) as caught:
        kernel((1,), (1,), (x, np.int32(n)))
    assert (caught.value.array, caught.value.line) == (array, line)
    assert caught.value.index == (4 if name == "local" else n)
    kernel((1,), (1,), (x, np.int32(2)))


def test_casts_and_shifts_out_of_range_are_warned_of():
    y = cp.zeros(3, np.int32)
    kernel = cp.RawKernel(UNDEFINED, "arithmetic")
    kernel((1,), (1,), (cp.full(1, 1e9, np.float32), y, np.int32(31)))
    assert cp.last_report.warnings == ()
    kernel((1,), (1,), (cp.full(1, 3e9, np.float32), y, np.int32(32)))
    cast, shift = cp.last_report.warnings
    assert cast.startswith("line 22: a floating-point number is cast to an integer type that can not hold it")
    assert shift.startswith("line 23: a shift by 32 bits")
    assert int(y[2]) == 2**31 - 1  # as the card's instruction has it


def test_a_timeout_says_how_blocks_run():
    code = """extern "C" __global__ void chain(int* done) {
    if (blockIdx.x == gridDim.x - 1) atomicExch(done, 1);
    else while (atomicAdd(done, 0) == 0) {}
}"""
    with cp.timeout(0.3), pytest.raises(cp.KernelTimeout, match="blocks are run in order here"):
        cp.RawKernel(code, "chain")((4,), (1,), (cp.zeros(1, np.int32),))


@pytest.mark.parametrize("steps", [65535, 65536, 65537])
def test_a_warp_may_meet_any_number_of_times(steps):
    code = """extern "C" __global__ void k(int* x, int n) {
    __shared__ int s;
    if (threadIdx.x == 0) s = 5;
    for (int k = 0; k < n; k++) __syncwarp();
    x[threadIdx.x] = s;
}"""
    x = cp.zeros(2, np.int32)
    cp.RawKernel(code, "k")((1,), (2,), (x, np.int32(steps)))
    assert cp.asnumpy(x).tolist() == [5, 5]


FORKS = r"""
import os, threading, warnings
import numpy as np
warnings.simplefilter("ignore")
from tinyvllm_ref import emulation as cp
code = 'extern "C" __global__ void one(int* x) { __syncthreads(); x[blockIdx.x * 256 + threadIdx.x] = 1; }'
kernel = cp.RawKernel(code, "one")
def run(mode):
    with cp.checks(mode):
        x = cp.zeros(256 * 40, np.int32)
        kernel((40,), (256,), (x,))
        return int(x.sum()) == 256 * 40
stop = False
def work(mode):
    while not stop:
        run(mode)
threads = [threading.Thread(target=work, args=(mode,)) for mode in ("full", "fast", "fast")]
for thread in threads: thread.start()
bad = 0
for k in range(40):
    pid = os.fork()
    if pid == 0:
        os._exit(0 if run("fast") and run("full") else 1)
    bad += os.waitpid(pid, 0)[1] != 0
stop = True
for thread in threads: thread.join()
print(bad, "bad of 40")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_may_fork_while_its_threads_launch():
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 bad of 40\n", "")


FORKS_IN_AN_IMPORT = r"""
import os, sys, threading, time
from tinyvllm_ref.emulation import elf

inside = threading.Event()

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "elftools.elf.elffile":
            inside.set()
            time.sleep(0.5)

sys.meta_path.insert(0, Slow())

def read():
    with open(sys.executable, "rb") as file:
        return elf.elf_file(file).header["e_type"]

thread = threading.Thread(target=read)
thread.start()
inside.wait()
pid = os.fork()
if pid == 0:
    os._exit(0 if read().startswith("ET_") else 1)
thread.join()
print(os.waitpid(pid, 0)[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads an ELF file")
def test_a_process_may_fork_while_a_thread_imports_what_reads_elf_files():
    done = subprocess.run(
        [sys.executable, "-c", FORKS_IN_AN_IMPORT], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of addresses")
def test_no_room_for_a_worker_is_a_python_error():
    code = r"""
import resource, threading
import numpy as np
from tinyvllm_ref import emulation as cp
kernel = cp.RawKernel('extern "C" __global__ void k(int* x) { x[0] = 1; }', "k")
x = cp.zeros(1, np.int32)
kernel((1,), (1,), (x,))
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), -1))
def work():
    try:
        kernel((1,), (1,), (x,))
    except MemoryError as error:
        print("MemoryError")
thread = threading.Thread(target=work)
thread.start()
thread.join()
kernel((1,), (1,), (x,))
print(int(x[0]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "MemoryError\n1\n", "")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_many_workers_leave_mappings_to_others():
    code = r"""
import numpy as np
from tinyvllm_ref import emulation as cp
cp.set_workers(64)
code = 'extern "C" __global__ void k(int* x) { __syncthreads(); x[blockIdx.x * 1024 + threadIdx.x] = 1; }'
kernel = cp.RawKernel(code, "k")
with cp.checks("fast"):
    for _ in range(10):
        x = cp.zeros(200 * 1024, np.int32)
        kernel((200,), (1024,), (x,))
        assert int(x.sum()) == 200 * 1024
print(sum(1 for line in open("/proc/self/maps")) < 32000)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_too_many_arrays_are_named_as_that():
    code = r"""
from pathlib import Path
import numpy as np
from tinyvllm_ref import emulation as cp
limit = int(Path("/proc/sys/vm/max_map_count").read_text())
arrays = []
try:
    while len(arrays) < limit:
        arrays.append(cp.empty(4, np.float32))
except MemoryError as error:
    print(len(arrays) > limit // 2 - 2000, "too many arrays are alive" in str(error))
del arrays[100:]
print(cp.zeros(4, np.float32).sum())
"""
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    if limit > 200_000:
        pytest.skip(f"vm.max_map_count is {limit:,}: more arrays than this test makes")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True True\n0.0\n", "")


def test_a_helper_older_than_the_first_launch_is_stopped_in_time():
    code = r"""
import numpy as np
from tinyvllm_ref import emulation as cp
cp.set_workers(4)
a = cp.ones((512, 512), np.float32)
product = a @ a
code = 'extern "C" __global__ void spin(int* x) { while (atomicAdd(x, 0) == 0) {} }'
with cp.checks("fast"), cp.timeout(0.3):
    for _ in range(3):
        try:
            cp.RawKernel(code, "spin")((64,), (256,), (cp.zeros(1, np.int32),))
        except cp.KernelTimeout:
            print("stopped")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "stopped\n" * 3, "")
