"""Products that a graph can hold: values, what is asked of cuBLAS and in what order, errors, and on a card a graph."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.engine.kernels.cases import BF16, bits, error, f64, normal, poisoned, poisoned_bf16, random
from tinyvllm_ref import capturable_blas as blas
from tinyvllm_ref.blas import linear_cublas
from tinyvllm_ref.capturable_blas import CublasError, Products
from tinyvllm_ref.device import cp, is_gpu

# (T, N, K)
SIZES = ((1, 1, 1), (1, 65, 33), (3, 64, 192), (17, 70, 31), (65, 3, 9), (2, 1025, 576))
FLOAT = 1e-4  # tensor cores cut off where they add; a product summed in bfloat16 errs by 4e-3


@pytest.fixture
def products() -> Iterator[Products]:
    if is_gpu and int(cp.cuda.Device().compute_capability) < 80:
        pytest.skip("cuBLAS has no BF16 products below compute capability 8.0")
    with Products() as made:
        yield made


def _operands(*size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, w, and x w^T in float64."""
    tokens, outputs, depth = size
    rng = random("capturable", *size)
    x, w = bits(rng, tokens, depth), bits(rng, outputs, depth)
    return x, w, f64(x) @ f64(w).T


def _check_values(products: Products, size: tuple[int, int, int]) -> None:
    x, w, want = _operands(*size)
    xd, wd = cp.asarray(x), cp.asarray(w)
    out = products(xd, wd, poisoned(*want.shape))
    assert error(cp.asnumpy(out), want) <= FLOAT
    rounded = products(xd, wd, poisoned_bf16(*want.shape))
    assert error(cp.asnumpy(rounded), want) <= BF16
    start = normal(random("start", *size), *want.shape)
    residual = cp.asarray(start)
    assert products(xd, wd, residual, accumulate=True) is residual
    assert error(cp.asnumpy(residual), f64(start) + want) <= FLOAT


@pytest.mark.skipif(is_gpu, reason="test_values_on_a_card runs these")
@pytest.mark.parametrize("size", SIZES)
def test_values(products: Products, size: tuple[int, int, int]) -> None:
    _check_values(products, size)
    x, w, want = _operands(*size)
    xd, wd = cp.asarray(x), cp.asarray(w)
    ours, simple = (f(xd, wd, poisoned(*want.shape)) for f in (products, linear_cublas))
    np.testing.assert_array_equal(cp.asnumpy(ours), cp.asnumpy(simple))


def test_nothing_to_sum(products: Products) -> None:
    x, w, out = cp.zeros((3, 0), np.uint16), cp.zeros((5, 0), np.uint16), poisoned(3, 5)
    assert not cp.asnumpy(products(x, w, out)).any()
    out.fill(7)
    assert (cp.asnumpy(products(x, w, out, accumulate=True)) == 7).all()


@pytest.mark.parametrize(("tokens", "outputs"), [(0, 5), (3, 0), (0, 0)])
def test_nothing_to_write(products: Products, tokens: int, outputs: int) -> None:
    x, w = cp.zeros((tokens, 8), np.uint16), cp.zeros((outputs, 8), np.uint16)
    assert products(x, w, cp.zeros((tokens, outputs), np.float32)).shape == (tokens, outputs)


def test_two_at_once(products: Products) -> None:
    x, w, want = _operands(5, 33, 40)
    xd, wd = cp.asarray(x), cp.asarray(w)
    with Products(cp.cuda.Stream()) as other:
        theirs, ours = other(xd, wd, poisoned(5, 33)), products(xd, wd, poisoned(5, 33))
        cp.cuda.Device().synchronize()
        assert error(cp.asnumpy(theirs), want) <= FLOAT
        assert error(cp.asnumpy(ours), want) <= FLOAT
    assert other.closed
    assert not products.closed
    assert error(cp.asnumpy(products(xd, wd, poisoned(5, 33))), want) <= FLOAT


def test_a_closed_object(products: Products) -> None:
    products.close()
    products.close()
    x, w, _ = _operands(3, 64, 192)
    for use in (
        lambda: products(cp.asarray(x), cp.asarray(w), poisoned(3, 64)),
        lambda: products.set_stream(cp.cuda.Stream.null),
    ):
        with pytest.raises(CublasError, match="Products: this object was closed; make another one"):
            use()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"x": ((3, 9), np.uint16)},
            r"w has shape \(5, 8\) .*must be uint16 .* of shape \(N, K\) = \(5, 9\)",
        ),
        ({"x": ((3, 8), np.float32)}, r"x has shape \(3, 8\) and dtype float32"),
        ({"out": ((3, 6), np.float32)}, r"out has shape \(3, 6\) .* = \(3, 5\)"),
        ({"out": ((3, 6), np.uint16)}, r"out has shape \(3, 6\) .* must be uint16 .* = \(3, 5\)"),
        ({"out": ((3, 5), np.float64)}, r"out has shape \(3, 5\) and dtype float64; it must be float32"),
        ({"out": ((3, 5), np.uint16), "accumulate": True}, "bfloat16.*must be float32 where accumulate"),
    ],
)
def test_wrong_arguments(products: Products, changes: dict[str, Any], message: str) -> None:
    right = {"x": ((3, 8), np.uint16), "w": ((5, 8), np.uint16), "out": ((3, 5), np.float32)}
    made = {
        name: cp.zeros(*spec) if isinstance(spec, tuple) else spec for name, spec in (right | changes).items()
    }
    with pytest.raises(ValueError, match=f"Products: .*{message}"):
        products(**made)


def test_an_array_on_the_host(products: Products) -> None:
    x, w, _ = _operands(3, 64, 192)
    with pytest.raises(ValueError, match="Products: out is a NumPy array"):
        products(cp.asarray(x), cp.asarray(w), np.zeros((3, 64), np.float32))


def test_a_negative_workspace() -> None:
    with pytest.raises(ValueError, match="workspace_bytes is -1; it must be 0 or more"):
        Products(workspace_bytes=-1)


@pytest.mark.skipif(is_gpu, reason="looks at the emulation's handles")
def test_a_handle_lives_as_long_as_the_object() -> None:
    from tinyvllm_ref.emulation import cublas

    before = set(cublas._math_modes)
    made = Products()
    assert len(set(cublas._math_modes) - before) == 1
    del made
    gc.collect()
    assert set(cublas._math_modes) == before


# ---------------- what is asked of libcublas, with a library that only writes it down


class _Library:
    """Answers each call with a status, and remembers its name and arguments."""

    def __init__(self, **statuses: int) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.statuses = statuses

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.calls.append((name, args))
            if name == "cublasCreate_v2":
                args[0]._obj.value = 77
            return self.statuses.get(name, 0)

        return call

    def names(self) -> list[str]:
        return [name.removeprefix("cublas").removesuffix("_v2") for name, _ in self.calls]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make :class:`Products` use a library."""

    def use(library: _Library) -> _Library:
        monkeypatch.setattr(blas, "is_gpu", True)
        monkeypatch.setattr(blas, "_library", lambda: library)
        return library

    return use


def test_the_workspace_is_set_after_the_stream(use: Any) -> None:
    """cublasSetStream takes a workspace away: "unconditionally resets" it, its documentation says."""
    library = use(_Library())
    first, second = (SimpleNamespace(ptr=ptr) for ptr in (16, 32))
    products = Products(first, workspace_bytes=1 << 16)
    assert library.names() == ["Create", "SetMathMode", "SetStream", "SetWorkspace"]
    assert library.calls[2][1] == (77, 16)
    handle, address, size = library.calls[3][1]
    assert (handle, size) == (77, 1 << 16)
    assert address % 256 == 0  # what cuBLAS asks of a workspace
    products.set_stream(first)
    assert len(library.calls) == 4
    products.set_stream(second)
    assert library.names()[4:] == ["SetStream", "SetWorkspace"]
    products.close()
    assert library.calls[-1] == ("cublasDestroy_v2", (77,))
    products.close()
    assert library.names().count("Destroy") == 1


def test_the_product_that_is_asked_for(use: Any) -> None:
    """Compared by doing the product from the arguments, column-major as BLAS has it."""
    library = use(_Library())
    x, w, want = _operands(3, 7, 5)
    xd, wd = cp.asarray(x), cp.asarray(w)
    with Products(SimpleNamespace(ptr=16), workspace_bytes=1 << 16) as products:
        for out, out_type, accumulate in (
            (poisoned(3, 7), 0, False),
            (poisoned_bf16(3, 7), 14, False),
            (poisoned(3, 7), 0, True),
        ):
            products(xd, wd, out, accumulate)
            name, args = library.calls[-1]
            assert name == "cublasGemmEx"
            handle, ta, tb, m, n, k, alpha, a, at, lda, b, bt, ldb, beta, c, ct, ldc, compute, algo = args
            assert (handle, at, bt, ct, compute, algo) == (77, 14, 14, out_type, 68, -1)
            assert (a, b, c) == (wd.data.ptr, xd.data.ptr, out.data.ptr)
            assert ctypes.c_float.from_address(alpha).value == 1
            assert ctypes.c_float.from_address(beta).value == float(accumulate)
            stored = {
                name: f64(array.reshape(-1)).reshape(-1, ld).T
                for name, array, ld in (("a", w, lda), ("b", x, ldb))
            }
            left, right = (stored[s].T if t else stored[s] for s, t in (("a", ta), ("b", tb)))
            assert (left.shape, right.shape, ldc) == ((m, k), (k, n), m)
            np.testing.assert_allclose((left @ right).T, want)


@pytest.mark.parametrize(
    ("call", "status", "message"),
    [
        ("cublasCreate_v2", 1, r"cublasCreate_v2: CUBLAS_STATUS_NOT_INITIALIZED \(1\)"),
        ("cublasSetStream_v2", 7, r"cublasSetStream_v2: CUBLAS_STATUS_INVALID_VALUE \(7\)"),
        ("cublasSetWorkspace_v2", 3, r"cublasSetWorkspace_v2: CUBLAS_STATUS_ALLOC_FAILED \(3\)"),
        (
            "cublasGemmEx",
            15,
            r"cublasGemmEx of \(3, 5\) by \(7, 5\) transposed: CUBLAS_STATUS_NOT_SUPPORTED \(15\)",
        ),
        ("cublasGemmEx", 99, r"an unknown cuBLAS status \(99\)"),
    ],
)
def test_a_refusal_names_call_and_status(use: Any, call: str, status: int, message: str) -> None:
    library = use(_Library(**{call: status}))
    x, w, _ = _operands(3, 7, 5)
    with pytest.raises(CublasError, match=message):
        Products(SimpleNamespace(ptr=16), workspace_bytes=0)(cp.asarray(x), cp.asarray(w), poisoned(3, 7))
    gc.collect()
    assert library.names().count("Destroy") == (call != "cublasCreate_v2")


def test_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_candidates", lambda: iter(["libcublas-of-nobody.so"]))
    with pytest.raises(CublasError, match=r"libcublas cannot be loaded; .*Tried: libcublas-of-nobody\.so \("):
        blas._library.__wrapped__()


def test_the_library_that_is_mapped() -> None:
    maps = (
        "7f00-7f01 r--p 00000000 08:01 123   /opt/with space/lib/libcublas.so.12.9.1.4\n"
        "7f01-7f02 r-xp 00000000 08:01 123   /opt/with space/lib/libcublas.so.12.9.1.4\n"
        "7f02-7f03 r--p 00000000 08:01 124   /opt/lib/libcublasLt.so.12\n"
        "7f03-7f04 r--p 00000000 08:01 125   /usr/lib/libcublas.so.13\n"
        "7f04-7f05 rw-p 00000000 00:00 0     [heap]\n"
        "7f05-7f06 r--p 00000000 08:01 126   /usr/lib/libcublas.so.13.bak\n"
    )
    assert blas.mapped_libraries(maps) == [
        "/opt/with space/lib/libcublas.so.12.9.1.4",
        "/usr/lib/libcublas.so.13",
    ]
    assert blas.mapped_libraries("") == []


# ---------------- on a card
_on_a_card = [pytest.mark.gpu, pytest.mark.skipif(not is_gpu, reason="no NVIDIA GPU")]


def _gpu(test: Any) -> Any:
    for mark in _on_a_card:
        test = mark(test)
    return test


@_gpu
@pytest.mark.parametrize("size", [*SIZES, (128, 3072, 2048), (1, 16384, 2048), (33, 2048, 8192)])
def test_values_on_a_card(products: Products, size: tuple[int, int, int]) -> None:
    _check_values(products, size)


@_gpu
@pytest.mark.parametrize("tokens", [1, 8, 200])
def test_in_a_graph(tokens: int) -> None:
    """Captured once, replayed on other numbers: each time what they make, alone and after one another."""
    if int(cp.cuda.Device().compute_capability) < 80:
        pytest.skip("cuBLAS has no BF16 products below compute capability 8.0")
    size = (tokens, 2048, 1024)
    x, w, _ = _operands(*size)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream, Products(stream) as products:
        xd, wd = cp.asarray(x), cp.asarray(w)
        out, rounded = poisoned(tokens, 2048), poisoned_bf16(tokens, 2048)
        residual = cp.zeros((tokens, 2048), np.float32)

        def step() -> None:
            products(xd, wd, out)
            products(xd, wd, rounded)
            products(xd, wd, residual, accumulate=True)

        step()
        stream.synchronize()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        residual.fill(0)
        total = np.zeros((tokens, 2048))
        for seed in range(3):
            fresh = bits(random("graph", seed), tokens, 1024)
            xd.set(fresh)
            out.fill(0)
            rounded.fill(0)
            graph.launch(stream)
            stream.synchronize()
            want = f64(fresh) @ f64(w).T
            total += want
            assert error(cp.asnumpy(out), want) <= FLOAT
            assert error(cp.asnumpy(rounded), want) <= BF16
            assert error(cp.asnumpy(residual), total) <= FLOAT
            simple = linear_cublas(xd, wd, poisoned(tokens, 2048))
            assert error(cp.asnumpy(out), f64(cp.asnumpy(simple))) <= FLOAT
        del graph


@_gpu
def test_a_workspace_is_given_back() -> None:
    pool = cp.get_default_memory_pool()
    products = Products(workspace_bytes=1 << 25)
    used = pool.used_bytes()
    gone = weakref.ref(products)
    del products
    gc.collect()
    assert gone() is None
    assert used - pool.used_bytes() == 1 << 25
