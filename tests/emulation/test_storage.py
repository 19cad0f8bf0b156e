"""Where variables live: ``__device__`` and ``__constant__`` in device memory, ``__shared__`` in the block's."""

from __future__ import annotations

import numpy as np
import pytest

from tinyvllm_ref import emulation as cp

from .. import nvrtc

VARIABLES = r"""
#define N 8
__device__ float table[N] = {1, 2, 3, 4, 5, 6, 7, 8}, other;
__constant__ float coefficients[4];
__device__ int counter;
__device__ int* where = &counter;
static __device__ unsigned char bytes[3];
__device__ const int fixed[4] = {1, 2, 3, 4};
namespace deep { __device__ __align__(16) double pair[2] = {1.5}; }
__device__ float twice(float x) { return 2 * x; }
__device__ float (*operation)(float) = twice;
struct Point { float x, y; };
__device__ Point point = {3, 4};
__constant__ float weights[] = {1, 2, 3};
extern "C" __global__ void sum(float* out, int n, int i) {
    float s = 0;
    for (int k = 0; k < n; k++) s += table[k] * coefficients[k % 4];
    atomicAdd(where, 1);
    if (threadIdx.x == 0) {
        bytes[i] = 7;
        out[0] = operation(s) + deep::pair[0] + point.y + fixed[1] + sizeof(weights) + weights[2] + other;
    }
}
extern "C" __global__ void count() {
    counter = counter + 1;
}
"""
# 2 * (1*1 + 2*2 + 3*3 + 4*4 + 5*1 + 6*2 + 7*3 + 8*4) + 1.5 + 4 + 2 + 12 + 3
SUM = 2 * (30 + 70) + 22.5


def test_device_variables_are_one_in_both_modes():
    module = cp.RawModule(code=VARIABLES)
    assert nvrtc.compile_source(VARIABLES, "compute_75").ok
    launches = 0
    for mode_of_pointer in ("full", "fast"):
        with cp.checks(mode_of_pointer):
            pointer = module.get_global("coefficients")
            counter = cp.ndarray((1,), np.int32, module.get_global("counter"))
            cp.ndarray((4,), np.float32, pointer)[...] = cp.asarray(np.arange(1, 5, dtype=np.float32))
        for mode in ("full", "fast"):
            out = cp.zeros(1, np.float32)
            with cp.checks(mode):
                module.get_function("sum")((1,), (4,), (out, np.int32(8), np.int32(0)))
            launches += 1
            assert float(out[0]) == SUM
            assert int(counter[0]) == 4 * launches


@pytest.mark.parametrize(
    ("n", "i", "array", "index"), [(9, 0, "table", 8), (8, 3, "bytes", 3), (8, -1, "bytes", -1)]
)
def test_an_index_out_of_a_device_variable(n, i, array, index):
    kernel = cp.RawModule(code=VARIABLES).get_function("sum")
    with pytest.raises(cp.OutOfBounds) as caught:
        kernel((1,), (1,), (cp.zeros(1, np.float32), np.int32(n), np.int32(i)))
    assert (caught.value.array, caught.value.index) == (array, index)
    assert f"{array}[" in caught.value.source_line


def test_an_index_far_out_of_a_device_variable_in_fast_mode():
    code = '__device__ int h[16];\nextern "C" __global__ void k(long long i) {\n    h[i] = 1;\n}'
    with cp.checks("fast"), pytest.raises(cp.OutOfBounds) as caught:
        cp.RawKernel(code, "k")((1,), (1,), (np.int64(1 << 24),))
    assert (caught.value.array, caught.value.line) == ("h", 3)


def test_a_race_on_a_device_variable():
    with pytest.raises(cp.DataRace) as caught:
        cp.RawModule(code=VARIABLES).get_function("count")((1,), (4,), ())
    assert (caught.value.array, caught.value.index) == ("counter", 0)


def test_reads_of_constant_memory_are_no_global_traffic():
    code = '__constant__ float c[32];\nextern "C" __global__ void k(float* x) { x[threadIdx.x] = c[threadIdx.x]; }'
    cp.RawKernel(code, "k")((1,), (32,), (cp.empty(32, np.float32),))
    assert (cp.last_report.global_read_bytes, cp.last_report.global_write_bytes) == (0, 128)


SHARED = r"""
__shared__ float buffer[32];
extern __shared__ float dynamic[];
__device__ float get(int i) { return buffer[i]; }
__device__ float a_parameter(float buffer) { return buffer + 1; }
__device__ float a_local(int i) { float buffer[2] = {5, 6}; return buffer[i]; }
extern "C" __global__ void everywhere(float* x, int n) {
    __shared__ float s[32];
    int t = threadIdx.x;
    s[t] = t;
    buffer[t] = 2 * t;
    dynamic[t] = 3 * t;
    __syncthreads();
    auto copies = [=](int i) { return s[i]; };
    auto nothing = [](int i) { return s[i] + buffer[i] + dynamic[i]; };
    auto refers = [&](int i) -> float { return s[i] + t; };
    auto hides = [](float s) { return s; };
    struct Local {
        int i;
        __device__ float sum() const { return s[i] + buffer[i]; }
    } local = {3};
    if (t) return;
    x[0] = copies(2) + nothing(3) + refers(4) + hides(5) + local.sum() + get(6) + a_parameter(1) + a_local(1);
    switch (n) {
        case 0: __shared__ float q[4]; q[0] = 1; x[1] = q[0] + 1; break;
        case 1: q[1] = 2; x[1] = q[1] + 5; break;
        default: break;
    }
}
extern "C" __global__ void jumps(float* x, int n) {
    if (n) goto end;
    __shared__ float s[4];
    s[0] = 1;
    x[0] = s[0];
    return;
end:
    s[1] = 3;
    x[0] = s[1];
}
"""


@pytest.mark.parametrize("mode", ["full", "fast"])
@pytest.mark.parametrize("n", [0, 1])
def test_shared_variables_wherever_they_are_named(mode, n):
    assert nvrtc.compile_source(SHARED, "compute_75").ok
    x = cp.zeros(2, np.float32)
    with cp.checks(mode):
        cp.RawKernel(SHARED, "everywhere")((1,), (32,), (x, np.int32(n)), shared_mem=128)
        want = 2 + (3 + 6 + 9) + (4 + 0) + 5 + (3 + 6) + 12 + 2 + 6
        assert cp.asnumpy(x).tolist() == [want, 7 if n else 2]
        cp.RawKernel(SHARED, "jumps")((1,), (1,), (x, np.int32(n)))
        assert float(x[0]) == (3 if n else 1)


def many_shared(count: int) -> str:
    uses = "".join(f"__shared__ int s{k}[4]; s{k}[t] = {k}; total += s{k}[t];\n" for k in range(count))
    return f'extern "C" __global__ void k(int* x) {{ int t = threadIdx.x, total = 0;\n{uses} x[t] = total; }}'


@pytest.mark.parametrize("mode", ["full", "fast"])
def test_many_shared_variables(mode):
    x = cp.zeros(4, np.int32)
    with cp.checks(mode):
        cp.RawKernel(many_shared(200), "k")((1,), (4,), (x,))
        assert cp.asnumpy(x).tolist() == [sum(range(200))] * 4
        with pytest.raises(cp.KernelFault, match="more than 256 __shared__ variables"):
            cp.RawKernel(many_shared(300), "k")((1,), (4,), (x,))
