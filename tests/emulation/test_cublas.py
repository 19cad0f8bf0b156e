"""``cp.cuda.cublas``: products against float64, one order of sums for every shape, and cuBLAS's errors."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tinyvllm_ref.emulation import cublas, cuda, native
from tinyvllm_ref.emulation.array import asarray, empty, ndarray, zeros
from tinyvllm_ref.emulation.errors import CUBLASError, CUDARuntimeError

N, T = cublas.CUBLAS_OP_N, cublas.CUBLAS_OP_T
F32, F16, BF16 = 0, 2, 14
HANDLE = cuda.get_cublas_handle()
RNG = np.random.default_rng(99)
# Rounding of one stored number, and of a float32 sum of k terms.
EPS = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8}


def scalar(value: float) -> np.ndarray:
    return np.array(value, np.float32)


ONE, ZERO = scalar(1), scalar(0)


def encode(values: np.ndarray, kind: int) -> np.ndarray:
    """Numbers as they are stored: float32, float16, or bfloat16 as uint16 bits (rounded by ml_dtypes)."""
    with np.errstate(all="ignore"):
        if kind == F32:
            return values.astype(np.float32)
        if kind == F16:
            return values.astype(np.float16)
        return values.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)


def decode(stored: np.ndarray, kind: int) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        if kind == BF16:
            return stored.view(ml_dtypes.bfloat16).astype(np.float64)
        return stored.astype(np.float64)


@dataclass
class Matrix:
    """A random column-major matrix of `rows` x `columns` with a leading dimension, and what it holds."""

    kind: int
    device: Any
    stored: np.ndarray  # (batch, stride) elements, padding included
    values: np.ndarray  # (batch, rows, columns) float64
    ld: int
    stride: int

    @classmethod
    def random(cls, rows: int, columns: int, kind: int, pad: int = 0, batch: int = 1) -> Matrix:
        ld = rows + pad
        stride = ld * columns + 2 * pad
        stored = encode(RNG.standard_normal((batch, stride)), kind)
        made = cls(kind, asarray(stored.reshape(-1)), stored, np.empty(0), ld, stride)
        made.values = made.read(stored, rows, columns)
        return made

    def read(self, stored: np.ndarray, rows: int, columns: int) -> np.ndarray:
        matrices = stored.reshape(len(self.stored), -1)[:, : self.ld * columns]
        shaped = matrices.reshape(len(self.stored), columns, self.ld)[:, :, :rows]
        return decode(np.ascontiguousarray(shaped), self.kind).transpose(0, 2, 1)

    @property
    def ptr(self) -> int:
        return int(self.device.data.ptr)


def op(values: np.ndarray, trans: int) -> np.ndarray:
    return values.transpose(0, 2, 1) if trans else values


def run(
    ta: int,
    tb: int,
    m: int,
    n: int,
    k: int,
    a: Matrix,
    b: Matrix,
    c: Matrix,
    alpha: float,
    beta: float,
    batch: int,
) -> None:
    al, be = scalar(alpha), scalar(beta)
    cublas.gemmStridedBatchedEx(
        HANDLE, ta, tb, m, n, k, al.ctypes.data, a.ptr, a.kind, a.ld, a.stride, b.ptr, b.kind, b.ld, b.stride,
        be.ctypes.data, c.ptr, c.kind, c.ld, c.stride, batch, 68, -1,
    )  # fmt: skip


def check(
    ta: int, tb: int, m: int, n: int, k: int, kind: int = F32, out: int = F32, pad: int = 0, batch: int = 1,
    alpha: float = 1.0, beta: float = 0.0,
) -> None:  # fmt: skip
    """One product of random matrices against float64, within the rounding that float32 sums allow."""
    a = Matrix.random(*((m, k) if ta == N else (k, m)), kind, pad, batch)
    b = Matrix.random(*((k, n) if tb == N else (n, k)), kind, pad, batch)
    c = Matrix.random(m, n, out, pad, batch)
    run(ta, tb, m, n, k, a, b, c, alpha, beta, batch)
    x, y = op(a.values, ta), op(b.values, tb)
    want = alpha * (x @ y) + beta * c.values
    scale = abs(alpha) * (abs(x) @ abs(y)) + abs(beta * c.values)
    after = c.device.get().reshape(batch, -1)
    error = np.abs(c.read(after, m, n) - want)
    # Sixteen lanes of k / 16 terms each, in blocks of 1,024: far fewer than k roundings in a row.
    assert (error <= scale * EPS[F32] * (80 + k / 1024) + np.abs(want) * EPS[out]).all()
    padding = np.ones(after.shape, bool)
    for column in range(n):
        padding[:, column * c.ld : column * c.ld + m] = False
    np.testing.assert_array_equal(after[padding], c.stored[padding])


@pytest.fixture(params=[1, 2, 3, 4], ids=["every processor", "AVX2", "AVX-512", "AVX-512 BF16"])
def level(request: pytest.FixtureRequest) -> Iterator[int]:
    """Each of the instruction sets that gemm.cpp has and this processor too."""
    choose = native.runtime().emu_gemm_level
    choose.argtypes, choose.restype = [ctypes.c_int], ctypes.c_int
    if choose(request.param) != request.param:
        choose(0)
        pytest.skip("this processor has not got these instructions")
    yield request.param
    choose(0)


@pytest.mark.parametrize(("ta", "tb"), [(N, N), (N, T), (T, N), (T, T)])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 7, 16), (5, 3, 17), (13, 1, 100), (33, 29, 1023),
                                           (4, 130, 1025), (130, 250, 40), (2, 2, 3000)])  # fmt: skip
def test_sizes_and_transposes(level: int, ta: int, tb: int, m: int, n: int, k: int) -> None:
    check(ta, tb, m, n, k, BF16, pad=3)
    check(ta, tb, m, n, k, F32)


@pytest.mark.parametrize(("kind", "out"), [(F32, F32), (F16, F32), (F16, F16), (BF16, F32), (BF16, BF16)])
@pytest.mark.parametrize(("ta", "tb"), [(N, N), (T, N)])
def test_types(level: int, kind: int, out: int, ta: int, tb: int) -> None:
    check(ta, tb, 19, 6, 70, kind, out, pad=5)
    check(ta, tb, 3, 40, 70, kind, out, alpha=-0.5, beta=2.0)


@pytest.mark.parametrize("rows", range(1, 30))
def test_every_number_of_resident_rows(level: int, rows: int) -> None:
    check(T, N, 37, rows, 50, BF16)


@pytest.mark.parametrize(("ta", "tb"), [(N, N), (T, N), (N, T), (T, T)])
def test_batches(ta: int, tb: int) -> None:
    check(ta, tb, 6, 5, 33, BF16, pad=2, batch=4)
    check(ta, tb, 70, 9, 64, F32, pad=1, batch=3, alpha=2.0, beta=1.0)


def test_a_batch_may_share_a_matrix() -> None:
    a, b, c = Matrix.random(4, 6, F32), Matrix.random(6, 5, F32, batch=3), Matrix.random(4, 5, F32, batch=3)
    a.stride = 0
    run(N, N, 4, 5, 6, a, b, c, 1, 0, 3)
    got = c.read(c.device.get(), 4, 5)
    np.testing.assert_allclose(got, a.values[0] @ b.values, atol=1e-5)


def test_large_enough_for_threads_and_panels() -> None:
    check(T, N, 700, 300, 1100, BF16)
    check(T, N, 64, 64, 512, BF16, batch=9)
    check(T, N, 9, 2000, 9000, BF16)  # a panel that does not hold all k


def linear(x: np.ndarray, w: np.ndarray, out: int = F32) -> np.ndarray:
    """Row-major Y[M, N] = X[M, K] W[N, K]^T with BF16 bits in: the engine's use of gemmEx."""
    (m, k), n = x.shape, len(w)
    xd, wd, y = asarray(x), asarray(w), empty((m, n), np.float32 if out == F32 else np.uint16)
    cublas.gemmEx(HANDLE, T, N, n, m, k, ONE.ctypes.data, wd.data.ptr, BF16, k, xd.data.ptr, BF16, k,
                  ZERO.ctypes.data, y.data.ptr, out, n, 68, -1)  # fmt: skip
    return y.get()


@pytest.mark.parametrize(("m", "n", "k"), [(40, 70, 300), (7, 333, 2050), (130, 64, 1024), (25, 8, 5000),
                                           (24, 40, 17), (300, 20, 96)])  # fmt: skip
def test_a_row_gives_the_same_bits_alone_and_in_a_batch(level: int, m: int, n: int, k: int) -> None:
    """The order of the sum over k depends on neither m nor n, nor on the number of threads."""
    x, w = encode(RNG.standard_normal((m, k)), BF16), encode(RNG.standard_normal((n, k)), BF16)
    whole = linear(x, w)
    for size in (1, 2, 3, 6, 13):
        for start in range(0, m, max(size, m // 3)):
            rows = slice(start, start + size)
            np.testing.assert_array_equal(linear(x[rows], w), whole[rows])
    for columns in (slice(0, 1), slice(n // 2, n // 2 + 5), slice(1, None, 2)):
        np.testing.assert_array_equal(linear(x, w[columns]), whole[:, columns])
    np.testing.assert_array_equal(linear(w, x), whole.T)  # nor on which operand is which


def test_threads_do_not_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = encode(RNG.standard_normal((150, 1500)), BF16), encode(RNG.standard_normal((601, 1500)), BF16)
    results = []
    for threads in (1, 2, 5, 64):
        monkeypatch.setattr(cublas, "_threads", lambda threads=threads: threads)
        results.append(linear(x, w))
        results[-1][:1] = linear(x[:1], w)
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


def test_products_of_many_python_threads_at_once() -> None:
    """They share the helpers, which are at one product at a time."""
    x, w = encode(RNG.standard_normal((60, 700)), BF16), encode(RNG.standard_normal((900, 700)), BF16)
    want = linear(x, w)
    same: list[bool] = []

    def work() -> None:
        for _ in range(20):
            same.append(np.array_equal(linear(x, w), want))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(same) == 80
    assert all(same)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_may_multiply() -> None:
    code = """
import os, sys, warnings
import numpy as np
warnings.simplefilter("ignore")
from tinyvllm_ref import emulation as cp
from tinyvllm_ref.blas import linear_cublas
cp.set_workers(4)
x, w = cp.full((50, 600), 0x3F80, np.uint16), cp.full((900, 600), 0x3F80, np.uint16)  # ones
def right():
    return bool((linear_cublas(x, w, cp.empty((50, 900), np.float32)).get() == 600).all())
assert right()
children = []
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        os._exit(0 if right() and right() else 1)
    children.append(pid)
    assert right()
assert all(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 for pid in children)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_memory_layout_does_not_change_bits(level: int) -> None:
    """The same numbers, transposed in memory, in F32, or with a leading dimension of their own."""
    x, w = encode(RNG.standard_normal((30, 700)), BF16), encode(RNG.standard_normal((50, 700)), BF16)
    want = linear(x, w)
    wide = np.zeros((50, 733), np.uint16)
    wide[:, :700] = w
    transposed = asarray(np.ascontiguousarray(w.T))
    xd, y = asarray(x), empty((30, 50), np.float32)
    for trans, other, ld in ((N, transposed, 50), (T, asarray(wide), 733)):
        cublas.gemmEx(HANDLE, trans, N, 50, 30, 700, ONE.ctypes.data, other.data.ptr, BF16, ld, xd.data.ptr,
                      BF16, 700, ZERO.ctypes.data, y.data.ptr, F32, 50, 68, -1)  # fmt: skip
        np.testing.assert_array_equal(y.get(), want)
    x32, w32 = asarray(decode(x, BF16).astype(np.float32)), asarray(decode(w, BF16).astype(np.float32))
    cublas.sgemm(HANDLE, T, N, 50, 30, 700, ONE.ctypes.data, w32.data.ptr, 700, x32.data.ptr, 700,
                 ZERO.ctypes.data, y.data.ptr, 50)  # fmt: skip
    if level < 4:
        np.testing.assert_array_equal(y.get(), want)
    else:  # instructions for BF16 add in an order of their own
        np.testing.assert_allclose(y.get(), want, rtol=0, atol=1e-5 * np.abs(want).max())


# ---------------------------------------------------------------- numbers at the edge


@pytest.mark.parametrize("kind", [F16, BF16])
def test_results_are_rounded_to_nearest_even(level: int, kind: int) -> None:
    """Every float32 near a tie, subnormals and overflow among them, through alpha * 1 * 1."""
    patterns = np.arange(0, 2**32, 2_000_003, dtype=np.uint64).astype(np.uint32)
    near_ties = np.array([0x7FFF, 0x8000, 0x8001, 0x0FFF, 0x1000, 0x1001, 0x3000], np.uint32)
    ties = (np.arange(0, 2**16, 127, dtype=np.uint32) << 16)[:, None] + near_ties
    values = np.concatenate([patterns, ties.reshape(-1)]).view(np.float32)
    one, c = asarray(encode(np.ones(1), kind)), empty(len(values), np.uint16)
    for index in range(len(values)):
        cublas.gemmEx(HANDLE, N, N, 1, 1, 1, values[index:].ctypes.data, one.data.ptr, kind, 1, one.data.ptr,
                      kind, 1, ZERO.ctypes.data, c.data.ptr + 2 * index, kind, 1, 68, -1)  # fmt: skip
    stored = np.float16 if kind == F16 else np.uint16
    got, want = c.get().view(stored), encode(values, kind)
    nan = np.isnan(values)
    np.testing.assert_array_equal(got.view(np.uint16)[~nan], want.view(np.uint16)[~nan])
    assert np.isnan(decode(got, kind)[nan]).all()


@pytest.mark.parametrize("kind", [F16, BF16])
@pytest.mark.parametrize("trans", [N, T])
def test_all_stored_patterns_are_read_exactly(level: int, kind: int, trans: int) -> None:
    bits = np.arange(65536, dtype=np.uint16)
    a, one, c = asarray(bits), asarray(encode(np.ones(1), kind)), empty(65536, np.float32)
    ld = 65536 if trans == N else 1
    cublas.gemmEx(HANDLE, trans, N, 65536, 1, 1, ONE.ctypes.data, a.data.ptr, kind, ld, one.data.ptr, kind, 1,
                  ZERO.ctypes.data, c.data.ptr, F32, 65536, 68, -1)  # fmt: skip
    with np.errstate(invalid="ignore"):
        want = decode(bits.view(np.float16) if kind == F16 else bits, kind).astype(np.float32)
    if level == 4 and kind == BF16:
        want[np.abs(want) < np.finfo(np.float32).tiny] = 0  # its instruction takes subnormal numbers for zero
    np.testing.assert_array_equal(c.get(), want)


@pytest.mark.parametrize("k", [0, 1, 20])
def test_beta_zero_does_not_read_c(k: int) -> None:
    a, b, c = Matrix.random(4, max(k, 1), F32), Matrix.random(max(k, 1), 3, F32), Matrix.random(4, 3, F32)
    c.device.fill(np.nan)
    run(N, N, 4, 3, k, a, b, c, 1, 0, 1)
    want = a.values[0, :, :k] @ b.values[0, :k]
    np.testing.assert_allclose(c.read(c.device.get(), 4, 3)[0], want, atol=1e-5)
    c.device.fill(np.nan)
    run(N, N, 4, 3, k, a, b, c, 1, 1, 1)
    assert np.isnan(c.device.get()).all()


def test_nothing_to_add_leaves_beta_times_c() -> None:
    c = Matrix.random(4, 3, F32)
    nothing = Matrix.random(4, 4, F32)
    nothing.device.fill(np.nan)
    for k, alpha in ((0, 1.0), (4, 0.0)):
        before = c.read(c.device.get(), 4, 3)
        run(N, N, 4, 3, k, nothing, nothing, c, alpha, 3.0, 1)
        np.testing.assert_allclose(c.read(c.device.get(), 4, 3), 3 * before, rtol=1e-6)


@pytest.mark.parametrize(("m", "n", "batch"), [(0, 3, 1), (3, 0, 1), (3, 3, 0), (0, 0, 0)])
def test_empty_results_touch_nothing(m: int, n: int, batch: int) -> None:
    one, c = zeros(9, np.float32), zeros(9, np.float32)
    cublas.gemmStridedBatchedEx(HANDLE, N, N, m, n, 2, ONE.ctypes.data, one.data.ptr, F32, 3, 0, 0, F32, 2, 0,
                                ONE.ctypes.data, c.data.ptr, F32, 3, 0, batch, 68, -1)  # fmt: skip
    assert not c.get().any()


def test_alpha_is_read_as_the_bytes_at_its_address() -> None:
    """A float64 1.0 begins with four zero bytes: cuBLAS reads the float32 0.0 from it, and so does this."""
    a, b, c = Matrix.random(3, 3, F32), Matrix.random(3, 3, F32), Matrix.random(3, 3, F32)
    wrong = np.array(1.0, np.float64)
    cublas.gemmEx(HANDLE, N, N, 3, 3, 3, wrong.ctypes.data, a.ptr, F32, 3, b.ptr, F32, 3, ZERO.ctypes.data,
                  c.ptr, F32, 3, 68, -1)  # fmt: skip
    assert not c.device.get().any()


def test_infinities_and_nans_go_where_they_belong() -> None:
    x, w = np.ones((3, 20)), np.ones((4, 20))
    x[1, 19] = np.inf
    w[2, 3] = np.nan
    got = linear(encode(x, BF16), encode(w, BF16))
    assert np.isnan(got[:, 2]).all()
    assert np.isinf(got[1, [0, 1, 3]]).all()
    assert (got[[0, 2]][:, [0, 1, 3]] == 20).all()


def test_results_count_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    real = native.runtime()

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def emu_mark_initialized(self, start: int, nbytes: int) -> None:
            seen.append((start, nbytes))

    a, b, c = Matrix.random(3, 4, F32), Matrix.random(4, 2, F32), Matrix.random(3, 2, BF16)
    wide = Matrix.random(3, 2, F32, pad=5, batch=2)
    recorder = Recorder()
    monkeypatch.setattr(native, "runtime", lambda: recorder)
    cublas.sgemm(HANDLE, N, N, 3, 2, 4, ONE.ctypes.data, a.ptr, 3, b.ptr, 4, ZERO.ctypes.data, wide.ptr, 8)
    assert seen == [(wide.ptr, 12), (wide.ptr + 32, 12)]
    seen.clear()
    a.stride = b.stride = 0
    run(N, N, 3, 2, 4, a, b, wide, 1, 0, 2)
    assert seen == [(wide.ptr + 4 * (wide.stride * batch + 8 * j), 12) for batch in (0, 1) for j in (0, 1)]
    assert c.kind == BF16


# ---------------------------------------------------------------- errors


def call_gemm(**changes: Any) -> None:
    """gemmEx on 6 x 4 times 4 x 5 in F32 with some arguments replaced."""
    size: Callable[[int], ndarray] = lambda n: zeros(n, np.float32)  # noqa: E731
    a, b, c = size(24), size(20), size(30)
    arguments: dict[str, Any] = {
        "handle": HANDLE, "transa": N, "transb": N, "m": 6, "n": 5, "k": 4, "alpha": ONE.ctypes.data,
        "A": a.data.ptr, "Atype": F32, "lda": 6, "B": b.data.ptr, "Btype": F32, "ldb": 4,
        "beta": ZERO.ctypes.data, "C": c.data.ptr, "Ctype": F32, "ldc": 6, "computeType": 68, "algo": -1,
    }  # fmt: skip
    assert changes.keys() <= arguments.keys()
    cublas.gemmEx(**(arguments | changes))


@pytest.mark.parametrize(("changes", "status", "text"), [
    ({"lda": 5}, 7, r"gemmEx: lda is 5; it must be at least 6, the rows of A as it is stored .*m = 6"),
    ({"transa": T, "lda": 3}, 7, r"lda is 3; it must be at least 4, .*k = 4"),
    ({"ldb": 3}, 7, r"ldb is 3; it must be at least 4, the rows of B .*k = 4"),
    ({"transb": T, "ldb": 4}, 7, r"ldb is 4; it must be at least 5, .*n = 5"),
    ({"ldc": 5}, 7, r"ldc is 5; it must be at least 6, the rows of C .*m = 6"),
    ({"m": 0, "lda": 0}, 7, "lda is 0; it must be at least 1"),
    ({"m": -1}, 7, "m is -1; it must be 0 or more"),
    ({"k": -2}, 7, "k is -2"),
    ({"transa": 5}, 7, "transa is 5; it must be 0"),
    ({"algo": 1000}, 7, "algo is 1000"),
    ({"alpha": 0}, 7, "alpha is 0x0, no address"),
    ({"Atype": 1}, 15, r"Atype is 1; the emulation has 0 \(CUDA_R_32F\), 2 \(CUDA_R_16F\) or 14"),
    ({"Btype": F16}, 15, "Btype is 2; it must be Atype, 0"),
    ({"Ctype": BF16}, 15, "Ctype is 14; with Atype 0"),
    ({"computeType": 64}, 15, r"computeType is 64; the emulation has 68 \(CUBLAS_COMPUTE_32F\)"),
    ({"handle": 77}, 1, "handle 77 is not a live handle; use cp.cuda.device.get_cublas_handle"),
])  # fmt: skip
def test_arguments_that_cublas_refuses(changes: dict[str, Any], status: int, text: str) -> None:
    with pytest.raises(CUBLASError, match=text) as caught:
        call_gemm(**changes)
    assert caught.value.status == status


@pytest.mark.parametrize(("changes", "text"), [
    ({"lda": 7}, r"gemmEx: A \(6 x 4 elements of 4 bytes, lda = 7\) needs 108 bytes from byte 0 .* 96 b"),
    ({"k": 5, "ldb": 5}, r"A \(6 x 5 elements"),
    ({"ldb": 5}, r"B \(4 x 5 elements of 4 bytes, ldb = 5\) needs 96 bytes"),
    ({"ldc": 8}, r"C \(6 x 5 elements of 4 bytes, ldc = 8\) needs 152 bytes"),
    ({"A": 4096}, "A .* is not device memory, or was freed"),
    ({"C": 0}, "C .* is not device memory"),
])  # fmt: skip
def test_matrices_must_lie_in_live_memory(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(CUDARuntimeError, match=text) as caught:
        call_gemm(**changes)
    assert str(caught.value).count("invalid argument") == 1


def test_more_addresses_that_are_wrong() -> None:
    array = zeros(30, np.float32)
    with pytest.raises(CUBLASError, match=r"alpha is 0x[0-9a-f]+, device memory; it must be the address"):
        call_gemm(alpha=array.data.ptr)
    with pytest.raises(TypeError, match="beta must be the address of a float32 in host memory"):
        call_gemm(beta=0.0)
    with pytest.raises(TypeError, match=r"A must be an address of device memory \(array.data.ptr\)"):
        call_gemm(A=array)
    with pytest.raises(CUDARuntimeError, match="not a multiple of its 4 byte elements"):
        call_gemm(A=array.data.ptr + 2)
    freed = zeros(30, np.float32)
    address = freed.data.ptr
    del freed
    cuda.memory.default_memory_pool.free_all_blocks()
    with pytest.raises(CUDARuntimeError, match="was freed"):
        call_gemm(C=address)


def test_batches_must_not_overlap_or_run_out() -> None:
    a, b, c = Matrix.random(3, 3, F32), Matrix.random(3, 3, F32), Matrix.random(3, 3, F32, batch=2)
    a.stride = b.stride = 0
    c.stride = 8
    with pytest.raises(CUBLASError, match="strideC is 8: the results overlap; it must be 9 or more"):
        run(N, N, 3, 3, 3, a, b, c, 1, 0, 2)
    c.stride = 10
    with pytest.raises(CUDARuntimeError, match=r"C \(3 x 3 .*, 2 of them 10 apart\) needs 76 bytes"):
        run(N, N, 3, 3, 3, a, b, c, 1, 0, 2)


def test_handles() -> None:
    handle = cublas.create()
    cublas.setStream(handle, 5)
    cublas.setMathMode(handle, cublas.CUBLAS_TENSOR_OP_MATH)
    cublas.setPointerMode(handle, cublas.CUBLAS_POINTER_MODE_HOST)
    assert (cublas.getStream(handle), cublas.getMathMode(handle), cublas.getPointerMode(handle)) == (5, 1, 0)
    assert cublas.getVersion(handle) == 0
    with pytest.raises(CUBLASError, match="alpha and beta in host memory only"):
        cublas.setPointerMode(handle, cublas.CUBLAS_POINTER_MODE_DEVICE)
    cublas.destroy(handle)
    for call in (cublas.destroy, cublas.getStream):
        with pytest.raises(CUBLASError, match="CUBLAS_STATUS_NOT_INITIALIZED"):
            call(handle)
    assert cuda.get_cublas_handle() == HANDLE


def test_strided_sgemm() -> None:
    a, b, c = (Matrix.random(4, 4, F32, batch=3) for _ in range(3))
    cublas.sgemmStridedBatched(HANDLE, N, T, 4, 4, 4, ONE.ctypes.data, a.ptr, 4, a.stride, b.ptr, 4, b.stride,
                               ZERO.ctypes.data, c.ptr, 4, c.stride, 3)  # fmt: skip
    want = a.values @ op(b.values, T)
    np.testing.assert_allclose(c.read(c.device.get(), 4, 4), want, atol=1e-5)


def test_small_shapes_all_together() -> None:
    for m, n, k, (ta, tb) in itertools.product((1, 2, 5), (1, 3), (1, 2, 15, 16, 18), ((N, N), (T, T))):
        check(ta, tb, m, n, k, F16, pad=1, alpha=1.5, beta=-1)
