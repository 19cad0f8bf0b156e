"""Counters, warnings and traces: against counts that can be made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tinyvllm_ref import emulation as cp

COPY = r"""
extern "C" __global__ void copy(const float* x, float* y, int n, int stride) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i * stride];
}
"""


def run_copy(n: int, stride: int, offset: int = 0):
    x = cp.zeros(n * stride + offset, np.float32)
    y = cp.empty(n, np.float32)
    cp.RawKernel(COPY, "copy")((-(-n // 128),), (128,), (x[offset:], y, np.int32(n), np.int32(stride)))
    return cp.last_report


@pytest.mark.parametrize(
    ("stride", "sectors"),
    [(1, 1024 * 4 // 32), (2, 2 * 1024 * 4 // 32), (8, 1024), (33, 1024)],
)
def test_sectors_of_strided_reads(stride, sectors):
    report = run_copy(1024, stride)
    assert report.global_read_bytes == report.global_write_bytes == 4096
    assert report.global_read_sectors == sectors
    assert report.global_write_sectors == 128
    assert report.global_read_requests == report.global_write_requests == 32
    assert report.coalescing == pytest.approx(8192 / (32 * (sectors + 128)))
    assert not report.estimated


def test_an_offset_costs_one_sector_a_warp():
    assert run_copy(1024, 1, offset=1).global_read_sectors == 128 + 32


def test_a_partial_warp_counts_what_it_touches():
    report = run_copy(33, 1)
    assert (report.global_read_sectors, report.global_read_requests) == (5, 2)


CONFLICTS = r"""
extern "C" __global__ void strided(float* out, int stride) {
    __shared__ float s[32 * 33];
    for (int i = threadIdx.x; i < 32 * 33; i += 32) s[i] = i;
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x * stride % (32 * 33)];
}
"""


@pytest.mark.parametrize(("stride", "conflicts"), [(1, 0), (2, 1), (4, 3), (32, 31), (33, 0), (0, 0)])
def test_bank_conflicts(stride, conflicts):
    cp.RawKernel(CONFLICTS, "strided")((1,), (32,), (cp.empty(32, np.float32), np.int32(stride)))
    report = cp.last_report
    assert report.bank_conflicts == conflicts
    assert report.shared_bytes == 32 * 33 * 4
    assert report.barriers == 1
    (read,) = [line for line in report.lines if line.space == "shared" and line.kind == "read"]
    assert (read.line, read.requests, read.conflicts) == (6, 1, conflicts)


def test_vector_loads_are_one_request():
    code = 'extern "C" __global__ void copy(const float4* x, float4* y) { y[threadIdx.x] = x[threadIdx.x]; }'
    cp.RawKernel(code, "copy")((1,), (32,), (cp.zeros(128, np.float32), cp.empty(128, np.float32)))
    report = cp.last_report
    assert (report.global_read_bytes, report.global_read_sectors) == (512, 16)


def test_a_long_loop_is_scaled_and_says_so():
    code = """extern "C" __global__ void sum(const float* x, float* y, int n) {
        float s = 0;
        for (int i = threadIdx.x; i < n; i += 32) s += x[i];
        y[threadIdx.x] = s;
    }"""
    n = 32 * 1000
    cp.RawKernel(code, "sum")((1,), (32,), (cp.zeros(n, np.float32), cp.empty(32, np.float32), np.int32(n)))
    report = cp.last_report
    assert report.estimated
    assert report.global_read_bytes == 4 * n
    assert report.global_read_sectors == pytest.approx(4 * n / 32, rel=0.01)


def test_the_same_value_stored_twice_is_a_warning():
    code = (
        'extern "C" __global__ void any(const int* x, int* found) {\n    if (x[threadIdx.x]) *found = 1;\n}'
    )
    found = cp.zeros(1, np.int32)
    cp.RawKernel(code, "any")((1,), (64,), (cp.ones(64, np.int32), found))
    (warning,) = cp.last_report.warnings
    assert "line 2" in warning
    assert "found[0]" in warning


def test_different_values_stored_to_one_place_are_a_race():
    code = 'extern "C" __global__ void last(int* out) {\n    *out = threadIdx.x;\n}'
    with pytest.raises(cp.DataRace, match=r"out\[0\]"):
        cp.RawKernel(code, "last")((1,), (2,), (cp.zeros(1, np.int32),))


def test_a_return_before_a_barrier_is_a_warning():
    code = """extern "C" __global__ void early(float* x, int n) {
    if (threadIdx.x >= n) return;
    x[threadIdx.x] = 1;
    __syncthreads();
}"""
    cp.RawKernel(code, "early")((1,), (64,), (cp.zeros(64, np.float32), np.int32(50)))
    (warning,) = cp.last_report.warnings
    assert "line 4" in warning
    assert "14 thread(s)" in warning


def test_fast_mode_counts_nothing_and_says_so():
    with cp.checks("fast"):
        report = run_copy(64, 1)
    assert report.mode == "fast"
    assert report.global_read_bytes == 0
    assert "nothing was counted" in str(report)


def test_the_report_reads_well():
    text = str(run_copy(1024, 2))
    assert "4,096 bytes read in 256 sectors" in text
    assert "copy: grid (8, 1, 1), block (128, 1, 1)" in text


def test_a_trace_holds_every_access_in_order():
    with cp.trace() as trace:
        run_copy(40, 3)
    rows = trace.rows
    reads = rows[rows["kind"] == "read"]
    assert set(rows["array"]) == {"x", "y"}
    np.testing.assert_array_equal(reads["index"], np.arange(40) * 3)
    np.testing.assert_array_equal(reads["thread"], np.arange(40))
    assert set(rows["line"]) == {4}
    assert not trace.full


def test_a_trace_says_when_it_is_full(capsys):
    with cp.trace(limit=80) as trace:
        run_copy(40, 3)  # 40 reads and 40 writes
    assert (len(trace.rows), trace.full, capsys.readouterr().out) == (80, False, "")
    with cp.trace(limit=79) as trace:
        run_copy(40, 3)
    assert (len(trace.rows), trace.full) == (79, True)
    assert "more than 79 accesses" in capsys.readouterr().out


def test_event_times_are_nan():
    start, stop = cp.cuda.Event(), cp.cuda.Event()
    start.record()
    run_copy(64, 1)
    stop.record()
    stop.synchronize()
    assert np.isnan(cp.cuda.get_elapsed_time(start, stop))
