"""Functions of CUDA C++ against NumPy in the widest type: words as lanes, special functions, memory of kernels."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from tinyvllm_ref import emulation as cp

from .. import nvrtc


def compiled(code: str, name: str) -> cp.RawKernel:
    """The kernel, once NVRTC has accepted it."""
    result = nvrtc.compile_source(code, "compute_75")
    assert result.ok, result.log
    return cp.RawKernel(code, name)


def lanes(words: np.ndarray, count: int, signed: bool) -> np.ndarray:
    """Words as (words, count) lanes in int64."""
    dtype = {(2, False): np.uint16, (2, True): np.int16, (4, False): np.uint8, (4, True): np.int8}[
        count, signed
    ]
    return words.view(dtype).reshape(-1, count).astype(np.int64)


def clamp(x: np.ndarray, count: int, signed: bool) -> np.ndarray:
    info = np.iinfo(f"{'int' if signed else 'uint'}{32 // count}")
    return np.clip(x, info.min, info.max)


# Name without the number of lanes -> (are they signed, the result of a lane)
WORDS = {
    "vadd": (False, lambda a, b, n: a + b),
    "vsub": (False, lambda a, b, n: a - b),
    "vaddss": (True, lambda a, b, n: clamp(a + b, n, True)),
    "vaddus": (False, lambda a, b, n: clamp(a + b, n, False)),
    "vsubss": (True, lambda a, b, n: clamp(a - b, n, True)),
    "vsubus": (False, lambda a, b, n: clamp(a - b, n, False)),
    "vavgu": (False, lambda a, b, n: (a + b + 1) // 2),
    "vhaddu": (False, lambda a, b, n: (a + b) // 2),
    "vabsdiffs": (True, lambda a, b, n: abs(a - b)),
    "vabsdiffu": (False, lambda a, b, n: abs(a - b)),
    "vmaxs": (True, lambda a, b, n: np.maximum(a, b)),
    "vmaxu": (False, lambda a, b, n: np.maximum(a, b)),
    "vmins": (True, lambda a, b, n: np.minimum(a, b)),
    "vminu": (False, lambda a, b, n: np.minimum(a, b)),
    **{
        f"v{kind}{name}": (signed, lambda a, b, n, f=f, one=one: np.where(f(a, b), one, 0))
        for kind, one in (("cmp", -1), ("set", 1))
        for name, signed, f in (
            ("eq", False, np.equal), ("ne", False, np.not_equal), ("ges", True, np.greater_equal),
            ("geu", False, np.greater_equal), ("gts", True, np.greater), ("gtu", False, np.greater),
            ("les", True, np.less_equal), ("leu", False, np.less_equal), ("lts", True, np.less),
            ("ltu", False, np.less),
        )
    },
}  # fmt: skip
ONE_WORD = {
    "vabs": (True, lambda a, n: abs(a)),
    "vabsss": (True, lambda a, n: clamp(abs(a), n, True)),
    "vneg": (True, lambda a, n: -a),
    "vnegss": (True, lambda a, n: clamp(-a, n, True)),
}


def some_words() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    edge = np.array([0, 0x80808080, 0x7F7F7F7F, 0x80008000, 0x7FFF7FFF, 0xFFFFFFFF, 0x01010101], np.uint32)
    a, b = (x.ravel() for x in np.meshgrid(edge, edge))
    more = rng.integers(0, 2**32, (2, 200), dtype=np.uint64).astype(np.uint32)
    return np.concatenate([a, more[0]]), np.concatenate([b, more[1]])


@pytest.mark.parametrize("count", [2, 4])
def test_words_as_lanes(count):
    names = [*WORDS, *ONE_WORD]
    calls = "\n".join(
        f"    out[{k} * n + i] = __{name}{count}({'a[i], b[i]' if name in WORDS else 'a[i]'});"
        for k, name in enumerate(names)
    )
    code = (
        'extern "C" __global__ void k(const unsigned* a, const unsigned* b, unsigned* out, unsigned* sums, int n) {\n'
        f"    int i = blockIdx.x * blockDim.x + threadIdx.x;\n    if (i >= n) return;\n{calls}\n"
        f"    sums[i] = __vsads{count}(a[i], b[i]);\n    sums[n + i] = __vsadu{count}(a[i], b[i]);\n}}"
    )
    a, b = some_words()
    n = len(a)
    out, sums = cp.empty((len(names), n), np.uint32), cp.empty((2, n), np.uint32)
    compiled(code, "k")((-(-n // 64),), (64,), (cp.asarray(a), cp.asarray(b), out, sums, np.int32(n)))
    got = cp.asnumpy(out)
    for k, name in enumerate(names):
        signed, f = {**WORDS, **ONE_WORD}[name]
        x, y = lanes(a, count, signed), lanes(b, count, signed)
        want = f(x, y, count) if name in WORDS else f(x, count)
        unsigned = want.astype(np.uint16 if count == 2 else np.uint8).view(np.uint32).ravel()
        np.testing.assert_array_equal(got[k], unsigned, err_msg=name)
    for row, signed in enumerate((True, False)):
        want = abs(lanes(a, count, signed) - lanes(b, count, signed)).sum(axis=1)
        np.testing.assert_array_equal(cp.asnumpy(sums)[row], want)


def test_dot_products_of_bytes():
    code = """extern "C" __global__ void k(const unsigned* a, const unsigned* b, int* s, unsigned* u, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    s[i] = __dp4a((int)a[i], (int)b[i], 5);
    u[i] = __dp4a(a[i], b[i], 5u);
    s[n + i] = __dp2a_lo((int)a[i], (int)b[i], 7);
    s[2 * n + i] = __dp2a_hi((int)a[i], (int)b[i], 7);
    u[n + i] = __dp2a_lo(a[i], b[i], 7u);
    u[2 * n + i] = __dp2a_hi(a[i], b[i], 7u);
}"""
    a, b = some_words()
    n = len(a)
    s, u = cp.empty((3, n), np.int32), cp.empty((3, n), np.uint32)
    compiled(code, "k")((-(-n // 64),), (64,), (cp.asarray(a), cp.asarray(b), s, u, np.int32(n)))
    for signed, out in ((True, s), (False, u)):
        a4, b4, a2 = lanes(a, 4, signed), lanes(b, 4, signed), lanes(a, 2, signed)
        want = [(a4 * b4).sum(1) + 5, (a2 * b4[:, :2]).sum(1) + 7, (a2 * b4[:, 2:]).sum(1) + 7]
        np.testing.assert_array_equal(cp.asnumpy(out).astype(np.int64), want)


@pytest.mark.parametrize("mode", ["full", "fast"])
def test_special_functions(mode):
    code = """extern "C" __global__ void k(const float* p, float* y, double* d, int n) {
    int i = threadIdx.x;
    y[i] = erfinvf(2 * p[i] - 1);
    y[n + i] = normcdfinvf(p[i]);
    y[2 * n + i] = rnorm3df(p[i], 2.0f, 3.0f);
    y[3 * n + i] = norm4df(p[i], 2.0f, 3.0f, 4.0f);
    d[i] = erfcinv((double)p[i]);
}"""
    p = np.linspace(0.001, 0.999, 64).astype(np.float32)
    y, d = cp.empty((4, 64), np.float32), cp.empty(64, np.float64)
    with cp.checks(mode):
        compiled(code, "k")((1,), (64,), (cp.asarray(p), y, d, np.int32(64)))
    exact = p.astype(np.float64)
    quantile = np.vectorize(NormalDist().inv_cdf)
    x = (2 * p - 1).astype(np.float64)
    want = [
        quantile((x + 1) / 2) / math.sqrt(2),
        quantile(exact),
        1 / np.sqrt(exact**2 + 13),
        np.sqrt(exact**2 + 29),
    ]
    np.testing.assert_allclose(cp.asnumpy(y), want, rtol=3e-7, atol=1e-7)
    np.testing.assert_allclose(cp.asnumpy(d), -quantile(exact / 2) / math.sqrt(2), rtol=1e-12)


def test_rounding_to_integers_and_exponents():
    code = """extern "C" __global__ void k(const float* x, long long* y, int n) {
    int i = threadIdx.x;
    y[i] = llroundf(x[i]);
    y[n + i] = lroundf(x[i]);
    y[2 * n + i] = llrintf(x[i]);
    y[3 * n + i] = lrintf(x[i]);
    y[4 * n + i] = ilogbf(x[i]);
    y[5 * n + i] = __float2int_rn(x[i]);
    y[6 * n + i] = __ldcv(&y[i]);
}"""
    x = np.array([0.5, 1.5, 2.5, -0.5, -2.5, 1e6 + 0.5, 7.49, -123.5], np.float32)
    y = cp.empty((7, len(x)), np.int64)
    compiled(code, "k")((1,), (len(x),), (cp.asarray(x), y, np.int32(len(x))))
    away = np.sign(x) * np.floor(np.abs(x.astype(np.float64)) + 0.5)
    even = np.rint(x.astype(np.float64))
    exponent = np.frexp(x)[1] - 1
    np.testing.assert_array_equal(cp.asnumpy(y), [away, away, even, even, exponent, even, away])


def test_scoped_atomics():
    code = """extern "C" __global__ void k(int* x, unsigned* u) {
    atomicCAS_block(&x[0], 0, 5);
    atomicCAS_system(&x[1], 0, 6);
    atomicXor_block(&u[0], 1u << threadIdx.x);
    atomicSub_system(&x[2], 1);
    atomicInc_block(&u[1], 100u);
    atomicAdd_block(&x[3], 2);
}"""
    x, u = cp.zeros(4, np.int32), cp.zeros(2, np.uint32)
    compiled(code, "k")((1,), (32,), (x, u))
    assert cp.asnumpy(x).tolist() == [5, 6, -32, 64]
    assert cp.asnumpy(u).tolist() == [2**32 - 1, 32]


@pytest.mark.parametrize("mode", ["full", "fast"])
def test_memory_that_kernels_allocate(mode):
    code = """struct Node { int value; Node* next; };
extern "C" __global__ void k(int* out, int n) {
    Node* list = 0;
    for (int i = 1; i <= n; i++) list = new Node{i, list};
    int sum = 0;
    while (list) { Node* next = list->next; sum += list->value; delete list; list = next; }
    int* more = (int*)malloc(n * sizeof(int));
    for (int i = 0; i < n; i++) more[i] = i;
    for (int i = 0; i < n; i++) sum += more[i];
    free(more);
    out[threadIdx.x] = sum + (malloc(1 << 30) == 0);
}"""
    out = cp.empty(8, np.int32)
    with cp.checks(mode):
        compiled(code, "k")((1,), (8,), (out, np.int32(20)))
    assert cp.asnumpy(out).tolist() == [210 + 190 + 1] * 8


def test_a_shuffle_from_a_lane_that_is_not_there():
    code = """extern "C" __global__ void k(const float* x, float* y) {
    float v = x[threadIdx.x];
    v += __shfl_down_sync(0xffffffffu, v, 16);
    y[threadIdx.x] = v;
}"""
    kernel = compiled(code, "k")
    kernel((1,), (32,), (cp.ones(32, np.float32), cp.empty(32, np.float32)))
    assert cp.last_report.warnings == ()
    kernel((1,), (20,), (cp.ones(32, np.float32), cp.empty(32, np.float32)))
    (text,) = cp.last_report.warnings
    assert text.startswith("line 3: a lane reads from lane 20, which the mask names")


def test_an_array_that_a_pointer_in_an_array_leads_to():
    code = """extern "C" __global__ void k(float** rows, float* out, int row, int i) {
    out[0] = rows[row][i];
}"""
    arrays = [cp.zeros(10, np.float32) for _ in range(3)]
    rows = cp.asarray(np.array([array.data.ptr for array in arrays], np.uint64))
    kernel, out = compiled(code, "k"), cp.empty(1, np.float32)
    kernel((1,), (1,), (rows, out, np.int32(1), np.int32(9)))
    for i in (10, -1):
        with pytest.raises(cp.OutOfBounds) as caught:
            kernel((1,), (1,), (rows, out, np.int32(1), np.int32(i)))
        assert (caught.value.array, caught.value.index) == ("rows[1]", i)
    with pytest.raises(cp.OutOfBounds) as caught:
        kernel((1,), (1,), (rows, out, np.int32(3), np.int32(0)))
    assert (caught.value.array, caught.value.index) == ("rows", 3)
