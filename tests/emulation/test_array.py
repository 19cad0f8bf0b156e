"""``ndarray`` and the written list of array functions, each of them against NumPy on awkward inputs."""

from __future__ import annotations

import copy
import gc
import importlib
import itertools
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tinyvllm_ref.emulation import memory, native
from tinyvllm_ref.emulation import random as cp_random

# The module: as an attribute of the package the name is the function `array`.
cp: Any = importlib.import_module("tinyvllm_ref.emulation.array")

RNG = np.random.default_rng(1234)


def awkward_inputs() -> dict[str, np.ndarray]:
    """The arrays that the expressions below name."""
    rng = np.random.default_rng(7)
    a = rng.standard_normal((3, 5)).astype(np.float32)
    nasty = a.copy()
    nasty[0, 1], nasty[1, 2], nasty[2, 0] = np.nan, np.inf, -np.inf
    square = rng.standard_normal((4, 4))
    return {
        "a": a,
        "n": nasty,  # NaN and infinities
        "i": rng.integers(-9, 9, (3, 5), dtype=np.int32),
        "b": a > 0,
        "v": rng.standard_normal(7).astype(np.float32),
        "c": np.array([3, 0, 3, 1, 7, 1, 3], np.int64),  # ties, and a hole at 2
        "e": np.zeros((0, 3), np.float32),
        "s": np.array(2.5, np.float32),
        "t": rng.standard_normal((5, 3)).astype(np.float32).T,  # not contiguous
        "r": rng.standard_normal((2, 3, 4)).astype(np.float32)[:, ::-1],
        "m": square @ square.T + 4 * np.eye(4),
        "u": np.array([0, 1, 0x7FFF, 0x8000, 0xFFFF, 42], np.uint16),
        "q": np.array([0, 1, 2, 255], np.uint8),
        "h": rng.standard_normal((4, 5)).astype(np.float16),
        "z": (rng.standard_normal((2, 3)) + 1j * rng.standard_normal((2, 3))).astype(np.complex64),
        "k": np.array([[2, 0, 1, 4, 3]] * 3, np.int64),
        "sorted": np.array([-1.0, 0.0, 0.0, 0.5, 2.0], np.float32),
    }


# For each function of the list at least one expression; xp is the emulation, and then NumPy.
CASES: dict[str, list[str]] = {
    "all": ["xp.all(b)", "xp.all(b, axis=0)", "xp.all(e)", "b.all(1, keepdims=True)"],
    "any": ["xp.any(b)", "xp.any(b, axis=1, keepdims=True)", "xp.any(e)", "b.any(0)"],
    "amax": ["xp.amax(n)", "xp.amax(a, axis=0)"],
    "amin": ["xp.amin(n)", "xp.amin(a, 1)"],
    "argmax": ["xp.argmax(a)", "xp.argmax(n, axis=1)", "xp.argmax(c)", "t.argmax(0)", "xp.argmax(s)"],
    "argmin": ["xp.argmin(a)", "xp.argmin(n, axis=0)", "c.argmin()"],
    "average": ["xp.average(a, axis=1)", "xp.average(v, weights=c)"],
    "count_nonzero": ["xp.count_nonzero(c)", "xp.count_nonzero(b, axis=1)"],
    "max": ["xp.max(n)", "xp.max(a, axis=(0, 1))", "a.max(1, keepdims=True)", "i.max()"],
    "mean": ["xp.mean(a)", "xp.mean(i, axis=0)", "h.mean(dtype='float32')", "t.mean(1)"],
    "median": ["xp.median(a)", "xp.median(v, keepdims=True)", "xp.median(a, axis=1)"],
    "min": ["xp.min(n)", "a.min(0)", "xp.min(u)"],
    "nanargmax": ["xp.nanargmax(n)", "xp.nanargmax(n, axis=1)"],
    "nanargmin": ["xp.nanargmin(n)"],
    "nanmax": ["xp.nanmax(n)", "xp.nanmax(n, axis=0)"],
    "nanmean": ["xp.nanmean(n, axis=1)"],
    "nanmin": ["xp.nanmin(n)"],
    "nansum": ["xp.nansum(n)", "xp.nansum(n, axis=0, keepdims=True)"],
    "percentile": ["xp.percentile(a, 30)", "xp.percentile(v, 75, method='lower')"],
    "prod": ["xp.prod(a)", "xp.prod(i, axis=1)", "a.prod(0)", "xp.prod(e, axis=0)"],
    "ptp": ["xp.ptp(a)", "xp.ptp(a, axis=1)"],
    "quantile": ["xp.quantile(a, 0.25, axis=0)"],
    "std": ["xp.std(a)", "xp.std(a, axis=1, ddof=1)", "t.std(0, keepdims=True)"],
    "sum": ["xp.sum(n)", "xp.sum(b)", "xp.sum(i, axis=0)", "h.sum(dtype=xp.float32)", "xp.sum(e, axis=0)",
            "xp.sum(r, axis=(0, 2))", "t.sum(1, keepdims=True)", "xp.sum(u)", "xp.sum(s)"],
    "trace": ["xp.trace(m)", "m.trace(1)"],
    "var": ["xp.var(a)", "a.var(1)"],
    "cumprod": ["xp.cumprod(v)", "a.cumprod(axis=0)"],
    "cumsum": ["xp.cumsum(a)", "xp.cumsum(c)", "xp.cumsum(t, axis=1)", "b.cumsum()", "xp.cumsum(e, axis=0)"],
    "cumulative_sum": ["xp.cumulative_sum(c)", "xp.cumulative_sum(c, include_initial=True)"],
    "diff": ["xp.diff(v)", "xp.diff(a, axis=0)", "xp.diff(c, n=2)"],
    "argpartition": ["xp.sort(xp.take(v, xp.argpartition(v, 3)[:3]))"],
    "argsort": ["xp.argsort(v)", "xp.argsort(a, axis=0)", "xp.argsort(c, kind='stable')", "v.argsort()"],
    "argwhere": ["xp.argwhere(b)", "xp.argwhere(e)"],
    "bincount": ["xp.bincount(c)", "xp.bincount(c, minlength=12)", "xp.bincount(c, weights=v)"],
    "digitize": ["xp.digitize(v, sorted)", "xp.digitize(v, sorted, right=True)"],
    "flatnonzero": ["xp.flatnonzero(b)"],
    "histogram": ["xp.histogram(v, bins=4)", "xp.histogram(v, 3, range=(-1, 1), density=True)"],
    "isin": ["xp.isin(i, c)", "xp.isin(c, c[:2], invert=True)"],
    "nonzero": ["xp.nonzero(b)", "c.nonzero()"],
    "partition": ["xp.partition(v, 2)[2]"],
    "searchsorted": ["xp.searchsorted(sorted, v)", "sorted.searchsorted(v, side='right')"],
    "sort": ["xp.sort(v)", "xp.sort(n, axis=1)", "xp.sort(t, axis=0)"],
    "unique": ["xp.unique(c)", "xp.unique(c, return_index=True, return_inverse=True, return_counts=True)"],
    "append": ["xp.append(v, c)", "xp.append(a, a, axis=0)"],
    "array_split": ["xp.array_split(v, 3)"],
    "broadcast_to": ["xp.broadcast_to(v, (2, 7))", "xp.broadcast_to(s, (3,))",
                     "xp.broadcast_to(a[:1], (4, 5))"],
    "delete": ["xp.delete(v, 2)", "xp.delete(a, slice(1, 3), axis=1)"],
    "diag": ["xp.diag(v)", "xp.diag(m, k=1)"],
    "diagonal": ["xp.diagonal(m)", "m.diagonal(-1)"],
    "expand_dims": ["xp.expand_dims(v, 0)", "xp.expand_dims(a, axis=(0, -1))"],
    "flip": ["xp.flip(a)", "xp.flip(a, axis=1)"],
    "fliplr": ["xp.fliplr(a)"],
    "flipud": ["xp.flipud(a)"],
    "hsplit": ["xp.hsplit(m, 2)"],
    "moveaxis": ["xp.moveaxis(r, 0, -1)"],
    "pad": ["xp.pad(a, 1)", "xp.pad(v, (0, 3), constant_values=7)", "xp.pad(v, 2, mode='edge')"],
    "permute_dims": ["xp.permute_dims(r, (2, 0, 1))"],
    "ravel": ["xp.ravel(t)", "xp.ravel(a)", "a.ravel('F')", "xp.ravel(s)"],
    "repeat": ["xp.repeat(v, 3)", "xp.repeat(a, 2, axis=1)", "v.repeat(2)"],
    "reshape": ["xp.reshape(a, (5, 3))", "xp.reshape(t, -1)", "a.reshape(1, -1)", "a.reshape((15,))",
                "xp.reshape(a, (5, 3), order='F')", "e.reshape(3, 0)"],
    "roll": ["xp.roll(v, 2)", "xp.roll(a, -1, axis=0)"],
    "rollaxis": ["xp.rollaxis(r, 2)"],
    "rot90": ["xp.rot90(a)", "xp.rot90(a, k=3)"],
    "split": ["xp.split(m, 2)", "xp.split(v, [2, 3])", "xp.split(m, 4, axis=1)"],
    "squeeze": ["xp.squeeze(a[:1])", "a[None].squeeze(0)"],
    "swapaxes": ["xp.swapaxes(r, 0, 2)", "r.swapaxes(1, 2)"],
    "tile": ["xp.tile(v, 2)", "xp.tile(a, (2, 3))"],
    "transpose": ["xp.transpose(a)", "xp.transpose(r, (1, 2, 0))", "r.transpose(2, 0, 1)", "r.transpose()"],
    "tril": ["xp.tril(m)", "xp.tril(m, -1)"],
    "triu": ["xp.triu(m)", "xp.triu(m, k=1)"],
    "vsplit": ["xp.vsplit(m, 2)"],
    "compress": ["xp.compress(b[0], a, axis=1)"],
    "extract": ["xp.extract(b, a)"],
    "take": ["xp.take(v, c[:4] % 7)", "xp.take(a, k[0], axis=1)", "v.take(c % 7)", "xp.take(v, 3)"],
    "take_along_axis": ["xp.take_along_axis(a, k, axis=1)"],
    "where": ["xp.where(b, a, 0)", "xp.where(b, a, i)", "xp.where(b)", "xp.where(n > 0, 1.0, n)"],
    "allclose": ["xp.allclose(a, a + 1e-9)", "xp.allclose(n, n)", "xp.allclose(n, n, equal_nan=True)",
                 "xp.allclose(a, t)", "xp.allclose(a, 0.0, atol=10)"],
    "around": ["xp.around(a, 1)"],
    "array_equal": ["xp.array_equal(a, a)", "xp.array_equal(a, t)", "xp.array_equal(n, n, equal_nan=True)",
                    "xp.array_equal(a, v)"],
    "clip": ["xp.clip(a, -0.5, 0.5)", "xp.clip(i, a_min=0, a_max=None)", "a.clip(0, 1)"],
    "fix": ["xp.fix(a * 3)"],
    "isclose": ["xp.isclose(n, n)", "xp.isclose(a, a + 1e-4, atol=1e-3)"],
    "nan_to_num": ["xp.nan_to_num(n)", "xp.nan_to_num(n, nan=7.0, posinf=1.0)"],
    "round": ["xp.round(a, 2)", "a.round(1)", "xp.round(i)"],
    "dot": ["xp.dot(a, t.T)", "v.dot(v)", "xp.dot(m, m)"],
    "inner": ["xp.inner(v, v)", "xp.inner(a, a)"],
    "kron": ["xp.kron(m[:2], m[:2])"],
    "matmul": ["xp.matmul(a, t.T)", "a @ a.T", "xp.matmul(r, xp.swapaxes(r, 1, 2))", "i @ i.T", "v @ v",
               "m @ m[0]", "e.T @ e"],
    "outer": ["xp.outer(v, c)"],
    "tensordot": ["xp.tensordot(a, t.T, axes=1)", "xp.tensordot(r, r, axes=([0, 1], [0, 1]))"],
    "vdot": ["xp.vdot(v, v)", "xp.vdot(z, z)"],
    "angle": ["xp.angle(z)"],
    "imag": ["xp.imag(z)", "z.imag", "a.imag"],
    "interp": ["xp.interp(v, sorted, sorted * 2)"],
    "packbits": ["xp.packbits(b)"],
    "real": ["xp.real(z)", "z.real", "xp.real(a)"],
    "unpackbits": ["xp.unpackbits(q)"],
    "column_stack": ["xp.column_stack([v, c])"],
    "concat": ["xp.concat([v, v])"],
    "concatenate": ["xp.concatenate([a, t])", "xp.concatenate((a, t), axis=1)", "xp.concatenate([v, c])",
                    "xp.concatenate([e, e])", "xp.concatenate([a, i], axis=None)", "xp.concatenate(a)"],
    "dstack": ["xp.dstack([a, t])"],
    "hstack": ["xp.hstack([a, t])", "xp.hstack((v, c), dtype='float32', casting='unsafe')"],
    "lexsort": ["xp.lexsort(xp.stack([c, c[::-1]]))"],
    "stack": ["xp.stack([a, t])", "xp.stack([v, v], axis=1)", "xp.stack([s, s])"],
    "vstack": ["xp.vstack([a, t])"],
    "atleast_1d": ["xp.atleast_1d(s)", "xp.atleast_1d(s, a)"],
    "atleast_2d": ["xp.atleast_2d(v)"],
    "atleast_3d": ["xp.atleast_3d(a)"],
    "broadcast_arrays": ["xp.broadcast_arrays(a, a[:1], s)"],
    "einsum": ["xp.einsum('ij,kj->ik', a, t)", "xp.einsum('ii', m)", "xp.einsum('bij,bkj->bik', r, r)"],
    "ix_": ["xp.ix_(c[:2], c[2:4])"],
    "meshgrid": ["xp.meshgrid(v, c)", "xp.meshgrid(v, c, indexing='ij', sparse=True)"],
    "arange": ["xp.arange(5)", "xp.arange(2, 11, 3)", "xp.arange(0, 1, 0.25, dtype=xp.float32)",
               "xp.arange(4, dtype='int32')", "xp.arange(0)"],
    "eye": ["xp.eye(3)", "xp.eye(2, 4, k=1, dtype=xp.float32)"],
    "frombuffer": ["xp.frombuffer(b'abcdefgh', dtype='uint16')", "xp.frombuffer(b'abcdefgh', 'u1', 3, 2)"],
    "identity": ["xp.identity(3, dtype='float16')"],
    "indices": ["xp.indices((2, 3))"],
    "linspace": ["xp.linspace(0, 1, 7)", "xp.linspace(0, 1, 4, endpoint=False, dtype='float32')"],
    "logspace": ["xp.logspace(0, 2, 5)"],
    "tri": ["xp.tri(3, 4, k=1)"],
    "tril_indices": ["xp.tril_indices(4, k=-1)"],
    "triu_indices": ["xp.triu_indices(4)"],
    "copyto": ["(xp.copyto(a, t), a)[1]", "(xp.copyto(a, 0.0, where=b), a)[1]"],
    "fill_diagonal": ["(xp.fill_diagonal(m, 9), m)[1]"],
    "place": ["(xp.place(a, b, v), a)[1]"],
    "put": ["(xp.put(v, [1, 3], [8, 9]), v)[1]", "(v.put(c[:2], 5), v)[1]"],
    "put_along_axis": ["(xp.put_along_axis(a, k[:, :1], 9.0, axis=1), a)[1]"],
    "putmask": ["(xp.putmask(a, b, 7.0), a)[1]"],
    "broadcast_shapes": ["xp.broadcast_shapes((3, 1), (5,))"],
    "can_cast": ["xp.can_cast('int32', 'float32')"],
    "finfo": ["xp.finfo(xp.float16).max", "xp.finfo(a.dtype).eps"],
    "format_float_positional": ["xp.format_float_positional(1.5)"],
    "iinfo": ["xp.iinfo('int16').min"],
    "iscomplexobj": ["xp.iscomplexobj(z)", "xp.iscomplexobj(a)"],
    "isrealobj": ["xp.isrealobj(a)"],
    "isscalar": ["xp.isscalar(3)", "xp.isscalar(a)"],
    "issubdtype": ["xp.issubdtype(a.dtype, xp.floating)"],
    "may_share_memory": ["xp.may_share_memory(a, a[1:])", "xp.may_share_memory(a, v)"],
    "ndim": ["xp.ndim(r)", "xp.ndim(3)"],
    "promote_types": ["xp.promote_types('int32', 'float32')"],
    "result_type": ["xp.result_type(u, xp.float16)", "xp.result_type(a, 2.0)"],
    "set_printoptions": ["xp.set_printoptions(precision=8)"],
    "shape": ["xp.shape(r)"],
    "shares_memory": ["xp.shares_memory(a, a[0])"],
    "linalg.cholesky": ["xp.linalg.cholesky(m)"],
    "linalg.det": ["xp.linalg.det(m)"],
    "linalg.eigh": ["xp.linalg.eigh(m)"],
    "linalg.inv": ["xp.linalg.inv(m)"],
    "linalg.norm": ["xp.linalg.norm(a)", "xp.linalg.norm(a, axis=1)", "xp.linalg.norm(v, ord=1)",
                    "xp.linalg.norm(a, 2, 1, True)"],
    "linalg.qr": ["xp.linalg.qr(m)"],
    "linalg.solve": ["xp.linalg.solve(m, m[0])"],
    "linalg.svd": ["xp.linalg.svd(a, full_matrices=False)"],
    "array": ["xp.array([1, 2, 3])", "xp.array([[1.5, 2], [3, 4]], dtype=xp.float32)", "xp.array(a, ndmin=3)",
              "xp.array(7)", "xp.array([a[0], a[1]])", "xp.array([])", "xp.array([True, False])"],
    "asarray": ["xp.asarray(a)", "xp.asarray([1, 2.5])", "xp.asarray(a, dtype='float16')", "xp.asarray(s)",
                "xp.asarray(range(4))"],
    "asanyarray": ["xp.asanyarray([1, 2])"],
    "ascontiguousarray": ["xp.ascontiguousarray(t)", "xp.ascontiguousarray(s)"],
    "asfortranarray": ["xp.asfortranarray(a)"],
    "astype": ["xp.astype(a, xp.float64)", "a.astype('int32')", "i.astype(xp.uint16)", "b.astype(xp.float32)",
               "n.astype(xp.float16)", "u.astype(xp.int16)", "t.astype('float64')"],
    "copy": ["xp.copy(t)", "a.copy()", "t.copy(order='F')"],
    "full": ["xp.full((2, 3), 7)", "xp.full(4, xp.nan, dtype=xp.float32)", "xp.full(0, 1)",
             "xp.full((2,), 1.5, 'float16', 'F')"],
    "full_like": ["xp.full_like(a, 3)", "xp.full_like(i, 9, shape=(2,))"],
    "ones": ["xp.ones(3)", "xp.ones((2, 2), dtype='int32')"],
    "ones_like": ["xp.ones_like(a)", "xp.ones_like(t, dtype=xp.int8)"],
    "size": ["xp.size(a)", "xp.size(a, 1)", "xp.size(3)"],
    "zeros": ["xp.zeros((2, 3), xp.float32)", "xp.zeros(())", "xp.zeros((0, 4))",
              "xp.zeros((2, 3), order='F')"],
    "zeros_like": ["xp.zeros_like(u)", "xp.zeros_like(t)"],
}  # fmt: skip
# What has no counterpart in NumPy, or no values to compare, has tests of its own below.
ELSEWHERE = {
    "asnumpy", "empty", "empty_like", "get_array_module", "get_default_memory_pool",
    "get_default_pinned_memory_pool",
}  # fmt: skip


def on_device(values: dict[str, np.ndarray]) -> dict[str, Any]:
    """The same arrays on the device, with the same strides where they are not contiguous."""
    made: dict[str, Any] = {}
    for name, host in values.items():
        made[name] = cp.asarray(host)
        if name == "t":
            made[name] = cp.asarray(np.ascontiguousarray(host.T)).T
        if name == "r":
            made[name] = cp.asarray(np.ascontiguousarray(host[:, ::-1]))[:, ::-1]
    return made


def assert_same(got: Any, want: Any, plain: bool = False) -> None:
    """Same values, dtype and shape; arrays and nothing else where NumPy has arrays or its scalars."""
    if isinstance(want, (tuple, list)) and not plain:
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            assert_same(g, w)
    elif isinstance(want, (np.ndarray, np.generic, bool)) and not plain:
        want = np.asarray(want)
        assert isinstance(got, cp.ndarray), f"{type(got)} is no array of the device"
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        np.testing.assert_array_equal(got.get(), want)
    else:
        assert type(got) is type(want)
        assert got == want


@pytest.mark.parametrize(
    ("name", "expression"), [(name, text) for name, texts in CASES.items() for text in texts]
)
def test_listed_function_agrees_with_numpy(name: str, expression: str) -> None:
    values = awkward_inputs()
    with np.errstate(all="ignore"):
        want = eval(expression, {"xp": np}, awkward_inputs())
    got = eval(expression, {"xp": cp}, on_device(values))
    assert_same(got, want, plain=name in {*cp.PLAIN, "size"})


def test_every_listed_function_has_a_case() -> None:
    listed = set(cp.FUNCTIONS) | {f"linalg.{name}" for name in cp.LINALG}
    assert listed - set(cp.ELEMENTWISE) - ELSEWHERE == set(CASES)
    for name, texts in CASES.items():
        method = name.rpartition(".")[2]
        assert any(f"xp.{name}(" in text or f".{method}(" in text for text in texts), name


DTYPES = ["bool", "uint8", "int32", "uint16", "int64", "float16", "float32", "float64", "complex64"]


def elementwise_inputs(dtype: str) -> np.ndarray:
    if dtype == "bool":
        return np.array([[True, False, True], [False, False, True]])
    if np.dtype(dtype).kind in "iu":
        return np.array([[0, 1, 2], [3, 100, np.iinfo(dtype).max]], dtype)
    values = np.array([[0.0, -0.0, 1.5], [np.nan, np.inf, -0.25]]).astype(dtype)
    return values


@pytest.mark.parametrize("name", cp.ELEMENTWISE)
def test_elementwise_function_agrees_with_numpy(name: str) -> None:
    ufunc, function = getattr(np, name), getattr(cp, name)
    tried = 0
    for dtypes in itertools.product(DTYPES, repeat=ufunc.nin):
        hosts = [elementwise_inputs(dtype) for dtype in dtypes]
        if ufunc.nin == 2:
            hosts[1] = np.minimum(hosts[1][:1, ::-1], np.array(3, hosts[1].dtype))  # broadcast, small shifts
        devices = [cp.asarray(host) for host in hosts]
        try:
            with np.errstate(all="ignore"):
                want = ufunc(*hosts)
        except (TypeError, ValueError) as error:
            with pytest.raises(type(error)):
                function(*devices)
            continue
        assert_same(function(*devices), want)
        tried += 1
    assert tried >= 2


@pytest.mark.parametrize("layout", ["C", "F", "transposed 3-D", "strided"])
def test_elementwise_results_keep_the_order_of_the_axes(layout: str) -> None:
    host = RNG.standard_normal((3, 4, 5)).astype(np.float32)
    host = {"C": host, "F": np.asfortranarray(host), "transposed 3-D": host.transpose(1, 0, 2),
            "strided": host[:, ::2]}[layout]  # fmt: skip
    base = cp.asarray(RNG.standard_normal((3, 4, 5)).astype(np.float32))
    device = {"C": base, "F": cp.asfortranarray(base), "transposed 3-D": base.transpose(1, 0, 2),
              "strided": base[:, ::2]}[layout]  # fmt: skip
    assert cp.exp(device).strides == np.exp(host).strides


def test_float16_products_are_summed_in_float32() -> None:
    ones = cp.full((1, 4096), 1.0, dtype=cp.float16)
    small = cp.full((4096, 1), 2.0**-11, dtype=cp.float16)
    one = cp.concatenate([cp.ones((1, 1), cp.float16), small])
    product = cp.ones((1, 4097), cp.float16) @ one
    assert product.dtype == np.float16
    assert product.item() == 3.0  # float16 sums would stay at 1
    assert cp.dot(ones, small).item() == 2.0


# ---------------------------------------------------------------- operators


BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b,
    "//": lambda a, b: a // b, "%": lambda a, b: a % b, "**": lambda a, b: a**b, "divmod": divmod,
    "==": lambda a, b: a == b, "!=": lambda a, b: a != b, "<": lambda a, b: a < b, "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b, ">=": lambda a, b: a >= b,
}  # fmt: skip
BITS: dict[str, Callable[[Any, Any], Any]] = {
    "&": lambda a, b: a & b, "|": lambda a, b: a | b, "^": lambda a, b: a ^ b,
    "<<": lambda a, b: a << b, ">>": lambda a, b: a >> b,
}  # fmt: skip


@pytest.mark.parametrize("operator", [*BINARY, *BITS])
@pytest.mark.parametrize("other", ["array", "python", "numpy scalar"])
def test_binary_operators_agree_with_numpy(operator: str, other: str) -> None:
    integers = operator in BITS
    function = (BITS if integers else BINARY)[operator]
    left = np.array([[1, 2, 3], [4, 5, 6]], np.int32 if integers else np.float32)
    right: Any = {"array": left[:1] % 3 + 1, "python": 2, "numpy scalar": left.dtype.type(2)}[other]
    device_right = cp.asarray(right) if other == "array" else right
    assert_same(function(cp.asarray(left), device_right), function(left, right))
    assert_same(function(device_right, cp.asarray(left)), function(right, left))


@pytest.mark.parametrize("statement", [
    "+= 2", "-= 2", "*= 2", "/= 2", "//= 2", "%= 3", "**= 2", "&= 6", "|= 8", "^= 5", "<<= 1", ">>= 1",
])  # fmt: skip
def test_in_place_operators_write_in_place(statement: str) -> None:
    dtype = np.int32 if statement[0] in "&|^<>" else np.float32
    host = np.arange(12).reshape(3, 4).astype(dtype)
    device = cp.asarray(host)
    whole, column, host_column = device, device[:, 1], host[:, 1]
    address = device.data.ptr
    space = {"x": column, "y": host_column}
    exec(f"x {statement}\ny {statement}", {}, space)
    assert space["x"] is column
    assert whole.data.ptr == address
    np.testing.assert_array_equal(whole.get(), host)


def test_in_place_operators_refuse_a_narrowing_cast() -> None:
    numbers = cp.arange(3)
    with pytest.raises(TypeError, match="same_kind"):
        numbers += 0.5


def test_unary_operators() -> None:
    host = np.array([-1, 0, 5], np.int32)
    device = cp.asarray(host)
    for function in (lambda x: -x, lambda x: +x, abs, lambda x: ~x):
        assert_same(function(device), function(host))


def test_arithmetic_does_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    x = cp.asarray(np.array([0.0, -1.0, 1e38], np.float32))
    for y in (1 / x, cp.log(x), cp.sqrt(x), x * x, x.astype(cp.int32), cp.full(2, cp.nan).astype(cp.int32)):
        assert y.size
    assert not recwarn.list


def test_python_scalars_are_weak_and_numpy_scalars_are_not() -> None:
    half = cp.ones(2, cp.float16)
    assert (half + 1.0).dtype == np.float16
    assert (half + np.float32(1)).dtype == np.float32
    assert (np.float32(1) + half).dtype == np.float32
    assert (cp.ones(2, cp.uint16) + 1).dtype == np.uint16
    with pytest.raises(OverflowError):
        cp.ones(2, cp.uint16) + 70000


# ---------------------------------------------------------------- indexing

KEYS: list[Any] = [
    0, -1, np.int64(1), slice(None), slice(1, None), slice(None, None, -1), slice(5, 1), Ellipsis, None,
    (0, 1), (slice(None), 1), (Ellipsis, 1), (None, 0, Ellipsis), (1, slice(0, 3, 2), 2), (0, 1, 2),
    [0, 2], ([0, 2], [1, 1]), (slice(None), [3, 0]), np.array([2, 0, 2]), (np.array([[0], [2]]), 1),
    "mask", ("row mask", slice(None)), (0, slice(None), [1, 2]), (np.array(1), slice(None)),
]  # fmt: skip


def keyed(key: Any, host: np.ndarray, device: bool) -> Any:
    if isinstance(key, tuple):
        return tuple(keyed(item, host, device) for item in key)
    key = {"mask": host > 0, "row mask": host[:, 0, 0] > 0}.get(key, key) if isinstance(key, str) else key
    return cp.asarray(key) if device and isinstance(key, np.ndarray) else key


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_getting_and_setting_items_agrees_with_numpy(key: Any) -> None:
    host = RNG.standard_normal((3, 4, 5)).astype(np.float32)
    device = cp.asarray(host)
    host_key, device_key = keyed(key, host, False), keyed(key, host, True)
    assert_same(device[device_key], host[host_key])
    shape = np.asarray(host[host_key]).shape
    for value in (7.0, RNG.standard_normal(shape).astype(np.float32)):
        host[host_key] = value
        device[device_key] = cp.asarray(value) if isinstance(value, np.ndarray) else value
        np.testing.assert_array_equal(device.get(), host)


def test_basic_indices_give_views_and_index_arrays_give_copies() -> None:
    a = cp.zeros((3, 4))
    row, one, picked = a[1], a[1, 2], a[cp.asarray([1])]
    a[1, 2] = 5
    assert (row[2].item(), one.item(), picked[0, 2].item()) == (5, 5, 0)
    assert row.base is a
    assert row[1:].base is a
    assert picked.base is None
    assert one.shape == ()
    assert (row.flags.owndata, a.flags.owndata) == (False, True)
    one += 1
    assert a[1, 2].item() == 6


def test_an_index_that_is_out_of_range_is_refused() -> None:
    a = cp.zeros(4)
    with pytest.raises(IndexError, match="index 4 is out of bounds"):
        a[4]
    with pytest.raises(IndexError, match="a card would take the index modulo the size"):
        a[cp.asarray([0, 4])]


def test_assigning_what_is_not_on_the_device() -> None:
    a = cp.zeros(3)
    with pytest.raises(ValueError, match=r"non-scalar numpy\.ndarray cannot be used for fill"):
        a[:] = np.ones(3)
    with pytest.raises(TypeError, match="Unsupported type <class 'list'>"):
        a[:] = [1, 2, 3]
    a[:2] = np.array(4.0)
    a[cp.asarray([2])] = np.ones(1)  # CuPy takes NumPy's arrays here
    assert a.tolist() == [4, 4, 1]


def test_zero_dimensional_arrays_are_no_indices() -> None:
    with pytest.raises(TypeError):
        range(cp.asarray(3))
    with pytest.raises(TypeError):
        [1, 2, 3][cp.asarray(1)]


def test_iteration_and_length() -> None:
    a = cp.asarray(np.arange(6).reshape(2, 3))
    assert len(a) == 2
    assert [row.tolist() for row in a] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(TypeError, match="iteration over a 0-d array"):
        iter(cp.asarray(1))
    with pytest.raises(TypeError, match="unsized object"):
        len(cp.asarray(1))


# ---------------------------------------------------------------- between host and device


IMPLICIT = (
    "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array"
)


@pytest.mark.parametrize("convert", [np.asarray, np.array, lambda a: np.zeros(3).__setitem__(slice(None), a),
                                     lambda a: np.testing.assert_allclose(np.ones(3), a)])  # fmt: skip
def test_implicit_conversion_is_refused(convert: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=re.escape(IMPLICIT)):
        convert(cp.zeros(3))


@pytest.mark.parametrize("mix", [
    lambda a, n: a + n, lambda a, n: n + a, lambda a, n: a == n, lambda a, n: n @ a, lambda a, n: cp.exp(n),
    lambda a, n: cp.maximum(a, n), lambda a, n: cp.sum(n), lambda a, n: cp.concatenate([a, n]),
    lambda a, n: cp.where(a > 0, n, a), lambda a, n: cp.matmul(a, n), lambda a, n: a.dot(n),
    lambda a, n: cp.linalg.norm(n), lambda a, n: np.add(a, n), lambda a, n: np.concatenate([n, a]),
    lambda a, n: cp.allclose(a, n),
])  # fmt: skip
def test_mixing_with_numpy_arrays_is_refused(mix: Callable[[Any, Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"Unsupported type <class 'numpy\.ndarray'>"):
        mix(cp.ones(3), np.ones(3))


@pytest.mark.parametrize("value", [[1, 2, 3], None, "text"])
def test_operands_of_other_types_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="Unsupported type"):
        cp.ones(3) + value


def test_numpy_functions_on_device_arrays_give_device_arrays() -> None:
    a = cp.asarray(np.array([1.0, 4.0]))
    for result in (np.sqrt(a), np.sum(a), np.concatenate([a, a]), np.float32(2) * a):
        assert isinstance(result, cp.ndarray)
    with pytest.raises(TypeError):
        np.fft.fft(a)


def test_get_and_set() -> None:
    host = RNG.standard_normal((3, 4)).astype(np.float32)
    a = cp.empty((3, 4), np.float32)
    a.set(host)
    np.testing.assert_array_equal(a.get(), host)
    assert a.T.get(order="F").flags.f_contiguous
    out = np.empty((3, 4), np.float32)
    assert a.get(out=out) is out
    np.testing.assert_array_equal(out, host)
    got = a.get()
    got[0, 0] = 99  # a copy, not a window
    assert a[0, 0].item() == host[0, 0]


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda a: a.set([1, 2]), TypeError, r"Only numpy\.ndarray can be set to cupy\.ndarray"),
    (lambda a: a.set(np.zeros(2)), TypeError, "float64 array cannot be set to float32 array"),
    (lambda a: a.set(np.zeros(3, np.float32)), ValueError, r"Old shape: \(2,\), new shape: \(3,\)"),
    (lambda a: cp.zeros((2, 4))[:, ::2].set(np.zeros((2, 2))), RuntimeError, "Cannot set to non-contiguous"),
    (lambda a: a.get(out=np.zeros(2)), TypeError, "float64 array cannot be obtained from float32 array"),
    (lambda a: a.get(out=np.zeros(3, "f4")), ValueError, r"Expected shape: \(2,\), actual shape: \(3,\)"),
    (lambda a: a.item(), ValueError, r"size 1 to a Python scalar, not one of shape \(2,\)"),
    (lambda a: bool(a), ValueError, "truth value of an array with more than one element is ambiguous"),
    (lambda a: float(a), ValueError, "size 1"),
    (lambda a: a.__cuda_array_interface__, AttributeError, "not on a GPU"),
    (lambda a: a.__dlpack__(), BufferError, "not on a GPU"),
    (lambda a: a.fill(np.zeros(2)), ValueError, r"non-scalar numpy\.ndarray cannot be used for fill"),
    (lambda a: a.reshape(3), ValueError, "reshape"),
    (lambda a: cp.asarray(["x"]), ValueError, "Unsupported dtype <U1"),
    (lambda a: cp.asarray([None]), ValueError, "Unsupported dtype object"),
    (lambda a: cp.zeros(-1), ValueError, "Negative dimensions are not allowed: shape -1"),
    (lambda a: cp.zeros(2.5), TypeError, r"a shape must consist of integers, not 2\.5"),
    (lambda a: cp.sum(a, where=a > 0), TypeError, r"cupy\.sum\(\) got an unexpected keyword .* 'where'"),
    (lambda a: cp.exp(a, a, a), TypeError, "takes 1 arrays and out, 3 arguments were given"),
    (lambda a: cp.add(a, a, out=np.zeros(2)), TypeError, r"Output arguments type must be cupy\.ndarray"),
    (lambda a: cp.sum(a, out=np.zeros(())), TypeError, r"Output arguments type must be cupy\.ndarray"),
    (lambda a: cp.sum(a, 0, axis=0), TypeError, "multiple values for argument 'axis'"),
    (lambda a: cp.concatenate([a, 1]), TypeError, "Unsupported type <class 'int'>"),
    (lambda a: cp.ndarray((9,), np.float32, memptr=a.data), ValueError, r"does not fit: 8 bytes of memory"),
    (lambda a: cp.ndarray((2, 2), np.float32, strides=(8,)), ValueError, r"len\(shape\) != len\(strides\)"),
    (lambda a: cp.empty_like(np.zeros(3)), TypeError, "Unsupported type"),
    (lambda a: cp.asarray(np.zeros(2), copy=False), ValueError, "Unable to avoid copy"),
])  # fmt: skip
def test_error_messages(call: Callable[[Any], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call(cp.zeros(2, np.float32))


def test_scalars_come_out_of_one_element() -> None:
    a = cp.asarray([[3.5]])
    assert (float(a), int(a), bool(a), complex(a), a.item()) == (3.5, 3, True, 3.5 + 0j, 3.5)
    assert f"{a.sum():.2f}" == "3.50"
    assert (repr(a), str(a)) == ("array([[3.5]])", "[[3.5]]")


def test_asnumpy() -> None:
    a = cp.asarray([1, 2, 3])
    np.testing.assert_array_equal(cp.asnumpy(a), [1, 2, 3])
    host = np.ones(2)
    assert cp.asnumpy(host) is host
    out = np.empty(3, a.dtype)
    assert cp.asnumpy(a, out=out) is out


def test_asarray_does_not_copy_what_is_right_already() -> None:
    a = cp.zeros((2, 3), np.float32)
    assert cp.asarray(a) is a
    assert cp.asarray(a, dtype=np.float32) is a
    assert cp.ascontiguousarray(a) is a
    assert cp.array(a) is not a
    assert cp.array(a).data.ptr != a.data.ptr
    assert cp.ascontiguousarray(a.T).flags.c_contiguous
    assert a.astype(np.float32, copy=False) is a
    assert a.T.astype(np.float32, order="C", copy=False).flags.c_contiguous


def test_asarray_takes_other_byte_orders_and_read_only_arrays() -> None:
    host = np.arange(3, dtype=">i4")
    host.flags.writeable = False
    a = cp.asarray(host)
    assert a.dtype == np.dtype("int32")
    assert a.dtype.isnative
    a += 1
    assert a.tolist() == [1, 2, 3]


def test_views_of_another_dtype() -> None:
    a = cp.asarray(np.array([1.0, -2.0], np.float32))
    bits = a.view(np.uint32)
    np.testing.assert_array_equal(bits.get(), a.get().view(np.uint32))
    bits[0] = 0
    assert a[0].item() == 0
    assert a.view(np.uint16).shape == (4,)
    assert bits.base is a


def test_shape_can_be_set_where_no_copy_is_needed() -> None:
    a = cp.asarray(np.arange(6))
    a.shape = (2, 3)
    assert a.tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(AttributeError, match="without a copy"):
        a.T.shape = (6,)


def test_copies_are_copies() -> None:
    a = cp.asarray([1.0, 2.0])
    for other in (a.copy(), copy.copy(a), copy.deepcopy(a), pickle.loads(pickle.dumps(a)), a.flatten()):
        assert isinstance(other, cp.ndarray)
        assert other.tolist() == [1, 2]
        assert other.data.ptr != a.data.ptr


def test_sort_and_scatter_add_work_in_place() -> None:
    a = cp.asarray([3.0, 1.0, 2.0])
    a.sort()
    assert a.tolist() == [1, 2, 3]
    a.partition(1)
    a.scatter_add(cp.asarray([0, 0, 2]), 1.0)
    assert a.tolist() == [3, 2, 4]


def test_out_is_written_and_returned() -> None:
    a, out = cp.asarray([1.0, 4.0]), cp.empty(2)
    address = out.data.ptr
    assert cp.sqrt(a, out=out) is out
    assert cp.add(a, a, out) is out
    assert out.tolist() == [2, 8]
    assert out.data.ptr == address
    total = cp.empty(())
    assert cp.sum(a, out=total) is total
    assert a.sum(None, None, total) is total
    assert total.item() == 5


# ---------------------------------------------------------------- memory of arrays


def test_attributes() -> None:
    a = cp.zeros((3, 4, 5), np.float32)
    assert (a.size, a.ndim, a.nbytes, a.itemsize, a.strides) == (60, 3, 240, 4, (80, 20, 4))
    assert a.data.ptr % 512 == 0
    assert a.data.mem.size == 240
    assert a[1].data.ptr == a.data.ptr + 80
    assert a.T.shape == (5, 4, 3)
    assert a.mT.shape == (3, 5, 4)
    assert (a.flags.c_contiguous, a.T.flags.f_contiguous, a.T.flags["C_CONTIGUOUS"]) == (True, True, False)
    assert a.device.id == 0
    assert a.base is None
    with pytest.raises(AttributeError):
        a.color = "red"
    with pytest.raises(TypeError):
        hash(a)


def test_empty_arrays_are_poisoned() -> None:
    assert np.isnan(cp.empty(1000, np.float32).get()).all()
    assert np.isnan(cp.empty_like(cp.zeros(10, np.float16)).get()).all()
    assert (cp.empty(10, np.int32).get() == -1).all()
    like = cp.empty_like(cp.zeros((2, 3)).T, dtype=np.int8, shape=(4,))
    assert (like.shape, like.dtype) == ((4,), np.int8)
    assert cp.empty_like(cp.zeros((2, 3)).T).flags.f_contiguous


def test_a_view_keeps_its_memory_alive() -> None:
    a = cp.asarray(np.arange(1000.0))
    view, address = a[500:], a.data.ptr
    del a
    gc.collect()
    b = cp.empty(1000)
    assert b.data.ptr != address
    assert view[0].item() == 500


def test_memory_is_freed_by_reference_count() -> None:
    pool = memory.MemoryPool()
    gc.disable()
    try:
        with memory.using_allocator(pool.malloc):
            a = cp.zeros(100)
            b = (a + 1)[3:]
            assert pool.used_bytes() == 2 * 1024
            del a
            assert pool.used_bytes() == 1024
            del b
            assert pool.used_bytes() == 0
    finally:
        gc.enable()


def test_arrays_over_given_memory() -> None:
    pointer = memory.alloc(64)
    a = cp.ndarray((4,), np.float32, memptr=pointer + 16)
    a.fill(1)
    b = cp.ndarray((16,), np.float32, memptr=pointer)
    assert b.get()[4:8].tolist() == [1, 1, 1, 1]
    assert np.isnan(b.get()[8:]).all()
    strided = cp.ndarray((2, 2), np.float32, memptr=pointer + 16, strides=(8, 4))
    assert strided.tolist() == [[1, 1], [1, 1]]


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The (address, bytes) that host code reported as written."""
    seen: list[tuple[int, int]] = []
    real = native.runtime()

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def emu_mark_initialized(self, start: int, nbytes: int) -> None:
            seen.append((start, nbytes))
            real.emu_mark_initialized(start, nbytes)

    recorder = Recorder()
    monkeypatch.setattr(native, "runtime", lambda: recorder)
    return seen


def written_elements(seen: list[tuple[int, int]], a: Any) -> list[int]:
    """The elements of a contiguous array whose bytes were all reported, by flat number."""
    flags = np.zeros(a.nbytes, bool)
    for start, nbytes in seen:
        first = start - a.data.ptr
        assert first >= 0
        assert first + nbytes <= a.nbytes
        flags[first : first + nbytes] = True
    return np.flatnonzero(flags.reshape(a.size, a.itemsize).all(1)).tolist()


@pytest.mark.parametrize("key", [
    slice(2, 5), (slice(None), 1), (slice(None), slice(1, 3)), (1, 2),
    (slice(None, None, 2), slice(None, None, -2)),
    (slice(None, None, -1), slice(3)), Ellipsis, "indices", "mask", "nothing",
])  # fmt: skip
def test_only_what_was_assigned_counts_as_written(key: Any, marked: list[tuple[int, int]]) -> None:
    a = cp.empty((6, 4), np.float32)
    host = np.zeros((6, 4), bool)
    mask = np.arange(24).reshape(6, 4) % 5 == 0
    named = {"indices": (np.array([0, 5]), np.array([3, 1])), "mask": mask, "nothing": slice(3, 3)}
    key = named[key] if isinstance(key, str) else key
    marked.clear()
    a[key] = 1
    host[key] = True
    assert written_elements(marked, a) == np.flatnonzero(host).tolist()


@pytest.mark.parametrize("write", [
    lambda a: a.fill(0), lambda a: a.set(np.zeros(24, np.float32)), lambda a: cp.copyto(a, 0.0),
    lambda a: cp.exp(cp.zeros(24, np.float32), out=a), lambda a: a.__iadd__(1), lambda a: a.sort(),
    lambda a: cp.sum(cp.zeros((2, 24), np.float32), axis=0, out=a), lambda a: cp_random.default_rng(0).random(
        out=a, dtype=np.float32),
])  # fmt: skip
def test_whole_writes_count_as_written(write: Callable[[Any], Any], marked: list[tuple[int, int]]) -> None:
    a = cp.empty(24, np.float32)
    write(a)
    inside = [(s, n) for s, n in marked if a.data.ptr <= s < a.data.ptr + a.nbytes]
    assert written_elements(inside, a) == list(range(24))


def test_empty_marks_nothing_and_zeros_marks_all(marked: list[tuple[int, int]]) -> None:
    cp.empty((3, 3))
    assert marked == []
    a = cp.zeros((3, 3))
    assert written_elements(marked, a) == list(range(9))


def test_a_view_of_many_pieces_is_marked_as_one_span(marked: list[tuple[int, int]]) -> None:
    a = cp.empty((5000, 2), np.float32)
    marked.clear()
    a[:, 0] = 1
    assert marked == [(a.data.ptr, 5000 * 8 - 4)]


# ---------------------------------------------------------------- the module


def test_constants_are_numpys() -> None:
    for name in cp.CONSTANTS:
        assert getattr(cp, name) is getattr(np, name)
    assert cp.float32 is np.float32
    assert (cp.pi, cp.newaxis) == (np.pi, None)


def test_star_import_brings_the_whole_list() -> None:
    space: dict[str, Any] = {}
    exec("from tinyvllm_ref.emulation.array import *", space)
    assert {*cp.FUNCTIONS, *cp.CONSTANTS, "ndarray", "linalg"} <= set(space)
    assert space["random"] is cp_random


def test_what_is_missing_is_named() -> None:
    with pytest.raises(
        AttributeError, match=r"^cupy\.fft is not in the CPU emulation.*written list.*array\.py"
    ):
        cp.missing("fft")
    with pytest.raises(AttributeError, match=r"^cupy\.cuda\.runtime\.ipcOpenMemHandle is not in"):
        cp.missing("ipcOpenMemHandle", "cupy.cuda.runtime")
    with pytest.raises(AttributeError, match=r"^cupy\.random\.poisson is not in"):
        cp_random.poisson(3)
    assert not hasattr(cp, "fft")


def test_get_array_module() -> None:
    assert cp.get_array_module(np.zeros(2), 3) is np
    assert cp.get_array_module(cp.zeros(2)).__name__ == "tinyvllm_ref.emulation"


def test_pools_are_reachable() -> None:
    assert cp.get_default_memory_pool() is memory.default_memory_pool
    assert cp.get_default_pinned_memory_pool() is memory.default_pinned_memory_pool


# ---------------------------------------------------------------- random numbers


def draws(state: Any) -> dict[str, Any]:
    return {
        "rand": state.rand(3, 4, dtype=np.float32),
        "randn": state.randn(5),
        "random_sample": state.random_sample((2, 3)),
        "uniform": state.uniform(2, 5, 1000),
        "normal": state.normal(10, 0.1, (500,), dtype=np.float32),
        "standard_normal": state.standard_normal(2000),
        "randint": state.randint(3, 7, (1000,), dtype=np.int32),
        "permutation": state.permutation(20),
        "choice": state.choice(5, 100, p=np.array([0.5, 0, 0.5, 0, 0])),
    }


def test_random_state_is_seeded() -> None:
    first, second = draws(cp_random.RandomState(3)), draws(cp_random.RandomState(3))
    other = draws(cp_random.RandomState(4))
    for name, values in first.items():
        np.testing.assert_array_equal(values.get(), second[name].get())
        assert not np.array_equal(values.get(), other[name].get()), name


def test_random_state_draws_from_the_right_distributions() -> None:
    got = {name: values.get() for name, values in draws(cp_random.RandomState(5)).items()}
    assert (got["rand"].shape, got["rand"].dtype) == ((3, 4), np.float32)
    assert got["random_sample"].min() >= 0
    assert got["random_sample"].max() < 1
    assert got["uniform"].min() >= 2
    assert abs(got["uniform"].mean() - 3.5) < 0.1
    assert abs(got["normal"].mean() - 10) < 0.03
    assert abs(got["standard_normal"].std() - 1) < 0.1
    assert set(got["randint"]) == {3, 4, 5, 6}
    assert got["randint"].dtype == np.int32
    assert sorted(got["permutation"]) == list(range(20))
    assert set(got["choice"]) == {0, 2}


def test_default_rng() -> None:
    first, second = cp_random.default_rng(9), cp_random.default_rng(9)
    for name, args in (("random", (5,)), ("standard_normal", ((2, 3),)), ("uniform", (1, 2, 6)),
                       ("integers", (0, 10, 50))):  # fmt: skip
        np.testing.assert_array_equal(getattr(first, name)(*args).get(), getattr(second, name)(*args).get())
    single = first.random(4, dtype=np.float32)
    assert single.dtype == np.float32
    assert set(first.integers(1, 3, 200, endpoint=True).tolist()) == {1, 2, 3}
    out = cp.empty(3)
    assert first.standard_normal(out=out) is out
    with pytest.raises(TypeError, match="dtype must be float32 or float64, not int32"):
        first.random(3, dtype=np.int32)
    assert cp_random.default_rng(first) is first


def test_uniform_float32_draws_stay_below_one() -> None:
    class Highest:
        def random(self, size: Any) -> np.ndarray:
            return np.full(size, np.nextafter(1.0, 0.0))

    state = cp_random.RandomState(0)
    state._generator = Highest()  # type: ignore[assignment]
    assert state.random_sample(4, np.float32).max().item() < 1


def test_module_level_draws_follow_seed() -> None:
    cp_random.seed(11)
    first = cp_random.standard_normal(4).get()
    cp_random.seed(11)
    np.testing.assert_array_equal(first, cp_random.randn(4).get())


def test_shuffle_works_in_place() -> None:
    a = cp.arange(50)
    address = a.data.ptr
    cp_random.RandomState(1).shuffle(a)
    assert a.data.ptr == address
    assert sorted(a.tolist()) == list(range(50))
    assert a.tolist() != list(range(50))
    rows = cp.asarray(np.arange(12).reshape(4, 3))
    mixed = cp_random.RandomState(2).permutation(rows)
    assert sorted(map(tuple, mixed.tolist())) == [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)]


def test_tables_do_not_name_a_function_twice() -> None:
    tables = [cp.ELEMENTWISE, cp.ARRAY, cp.SEQUENCE, cp.VARIADIC, cp.CREATION, cp.WRITING, cp.PLAIN]
    names = [name for table in tables for name in table] + [f.__name__ for f in cp.WRITTEN_OUT]
    assert len(names) == len(set(names))


def test_sorting_is_stable_as_cupy_s_is():
    keys = np.arange(1000, dtype=np.int32) % 7
    order = cp.argsort(cp.asarray(keys))
    np.testing.assert_array_equal(cp.asnumpy(order), np.argsort(keys, kind="stable"))
    for call in (cp.argsort, cp.sort):
        with pytest.raises(ValueError, match=r"kind can only be None or 'stable'.*'quicksort'"):
            call(cp.asarray(keys), kind="quicksort")
    with pytest.raises(ValueError, match="heapsort"):
        cp.asarray(keys).sort(kind="heapsort")
