"""To the bit: what is computed for a token does not depend on what is computed beside it, nor on when."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tinyvllm_ref.blas import linear_cublas
from tinyvllm_ref.device import cp, is_gpu
from tinyvllm_ref.kernels.add_rms_norm import add_rms_norm
from tinyvllm_ref.kernels.convert import to_bf16
from tinyvllm_ref.kernels.flash_attention import flash_attention
from tinyvllm_ref.kernels.kv_write import kv_write
from tinyvllm_ref.kernels.linear import linear_kernel
from tinyvllm_ref.kernels.paged_attention import SPLIT, paged_attention
from tinyvllm_ref.kernels.paged_prefill import paged_prefill
from tinyvllm_ref.kernels.rms_norm import rms_norm
from tinyvllm_ref.kernels.rope import rope
from tinyvllm_ref.kernels.sampling import sample_rows
from tinyvllm_ref.kernels.silu_mul import silu_mul
from tinyvllm_ref.kernels.softmax import softmax
from tinyvllm_ref.kv_cache import slots_of

from .cases import PagedCache, bits, normal, poisoned, poisoned_bf16, random

pytestmark = pytest.mark.skipif(is_gpu, reason="promised in the emulation")


@pytest.fixture(autouse=True)
def _fast() -> Iterator[None]:
    with cp.checks("fast"):
        yield


# ---------------- rows
_RNG = random("rows")
_WEIGHT, _MATRIX = bits(_RNG, 131), bits(_RNG, 77, 131)
_RESIDUAL = normal(_RNG, 70, 131)
_ON = cp.asarray


def _add(x: Any, rows: slice) -> Any:
    return add_rms_norm(x, _ON(_RESIDUAL[rows]), _ON(_WEIGHT), 1e-5, poisoned_bf16(*x.shape))


def _linear(function: Callable[..., Any], x: Any) -> Any:
    return function(to_bf16(x, poisoned_bf16(*x.shape)), _ON(_MATRIX), poisoned(len(x), 77))


def _sample(x: Any, rows: slice) -> Any:
    n = len(x)
    options = (
        np.full(n, 0.8),
        np.full(n, 50),
        np.full(n, 0.9),
        np.full(n, 0.01),
        np.arange(70)[rows],
        np.full(n, 3),
    )
    kinds = (np.float32, np.int32, np.float32, np.float32, np.uint64, np.int32)
    arrays = (_ON(np.asarray(o).astype(kind)) for o, kind in zip(options, kinds, strict=True))
    return sample_rows(x, *arrays, poisoned(n, dtype=np.int32))


ROWS: dict[str, Callable[[Any, slice], Any]] = {
    "rms_norm": lambda x, rows: rms_norm(x, _ON(_WEIGHT), 1e-5, poisoned_bf16(*x.shape)),
    "add_rms_norm": _add,
    "softmax": lambda x, rows: softmax(x, poisoned(*x.shape)),
    "silu_mul": lambda x, rows: silu_mul(x[:, :130].copy(), poisoned_bf16(len(x), 65)),
    "linear_kernel": lambda x, rows: _linear(linear_kernel, x),
    "linear_cublas": lambda x, rows: _linear(linear_cublas, x),
    "sample_rows": _sample,
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_alone_is_the_row_in_a_batch(name: str) -> None:
    x = normal(random("batch"), 70, 131)
    together = cp.asnumpy(ROWS[name](_ON(x), slice(0, 70)))
    assert len(np.unique(together, axis=0)) > 1  # rows differ, so that a wrong row would be seen
    for size in (1, 3, 5, 17, 65):
        rows = slice(4, 4 + size)
        alone = cp.asnumpy(ROWS[name](_ON(x[rows]), rows))
        np.testing.assert_array_equal(alone.view(np.uint8), together[rows].view(np.uint8))


def test_rope_of_a_token_alone() -> None:
    rng = random("rope rows")
    q, k = normal(rng, 9, 3, 26), normal(rng, 9, 1, 26)
    positions, frequencies = np.arange(100, 109, dtype=np.int32), normal(rng, 13)
    whole = [cp.asnumpy(x) for x in rope(*map(_ON, (q, k, positions, frequencies)))]
    for i in range(9):
        one = rope(*map(_ON, (q[i : i + 1], k[i : i + 1], positions[i : i + 1], frequencies)))
        for got, want in zip(one, whole, strict=True):
            np.testing.assert_array_equal(cp.asnumpy(got)[0], want[i])


# ---------------- attention
M = 2 * SPLIT + 70  # keys of the request that is watched: three splits, the last of them not full


class Watched:
    """One request among others in a paged cache, and its attention as one whole prefill."""

    def __init__(self, q_heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
        rng = random("watched", q_heads, kv_heads, head_dim, block_size)
        lengths = (3, M, 40)
        self.k, self.v = ([bits(rng, m, kv_heads, head_dim) for m in lengths] for _ in range(2))
        self.q = [3 * normal(rng, m, q_heads, head_dim) for m in lengths]
        self.cache = PagedCache(rng, self.k, self.v, block_size)
        self.arrays = tuple(map(_ON, (self.cache.keys, self.cache.values)))
        self.scale = head_dim**-0.5
        self.block_size = block_size
        self.whole = self.flash(0, M)

    def flash(self, first: int, last: int) -> np.ndarray:
        """Queries first to last - 1, and the keys up to there, gathered."""
        q = self.q[1][first:last]
        arrays = map(_ON, (q, self.k[1][:last], self.v[1][:last]))
        return np.asarray(cp.asnumpy(flash_attention(*arrays, self.scale, poisoned_bf16(*q.shape))))

    def decode(self, position: int, others: bool, width: int) -> np.ndarray:
        """The query at a position in a decode step, alone or between two others."""
        lengths = np.array([2, position + 1, 40] if others else [position + 1], np.int32)
        rows = [0, 1, 2] if others else [1]
        q = np.stack([self.q[row][length - 1] for row, length in zip(rows, lengths, strict=True)])
        tables = np.ascontiguousarray(self.cache.tables[rows, :width])
        arrays = (_ON(q), *self.arrays, _ON(tables), _ON(lengths))
        out = paged_attention(*arrays, self.scale, poisoned_bf16(*q.shape))
        return np.asarray(cp.asnumpy(out)[1 if others else 0])

    def prefill(self, first: int, last: int, others: bool) -> np.ndarray:
        """Queries first to last - 1 in a paged prefill."""
        rows = [0, 1, 2] if others else [1]
        ranges = {0: (1, 3), 1: (first, last), 2: (0, 40)}
        q = np.concatenate([self.q[row][slice(*ranges[row])] for row in rows])
        counts = [ranges[row][1] - ranges[row][0] for row in rows]
        starts = np.cumsum([0, *counts]).astype(np.int32)
        lengths = np.array([ranges[row][1] for row in rows], np.int32)
        arrays = (_ON(q), *self.arrays, *map(_ON, (self.cache.tables[rows], starts, lengths)))
        out = cp.asnumpy(paged_prefill(*arrays, max(counts), self.scale, poisoned_bf16(*q.shape)))
        begin = starts[1] if others else 0
        return np.asarray(out[begin : begin + last - first])


SIZES = [(9, 3, 64, 16), (4, 1, 26, 7), (2, 2, 5, 33), (8, 1, 128, 16)]


@pytest.fixture(scope="module", params=SIZES, ids=lambda s: f"Hq={s[0]} Hk={s[1]} D={s[2]} BS={s[3]}")
def watched(request: pytest.FixtureRequest) -> Watched:
    with cp.checks("fast"):
        return Watched(*request.param)


def test_chunks_of_flash_attention(watched: Watched) -> None:
    edges = [0, 1, 38, 64, 65, 200, SPLIT, SPLIT + 1, 400, M]
    chunks = [watched.flash(a, b) for a, b in itertools.pairwise(edges)]
    np.testing.assert_array_equal(np.concatenate(chunks), watched.whole)


@pytest.mark.parametrize("others", [False, True])
def test_chunks_through_the_paged_cache(watched: Watched, others: bool) -> None:
    edges = [0, 5, 64, 130, SPLIT - 1, SPLIT + 3, M]
    chunks = [watched.prefill(a, b, others) for a, b in itertools.pairwise(edges)]
    np.testing.assert_array_equal(np.concatenate(chunks), watched.whole)


@pytest.mark.parametrize("others", [False, True])
def test_token_by_token(watched: Watched, others: bool) -> None:
    full_width = watched.cache.tables.shape[1]
    positions = {*range(0, 70), *range(SPLIT - 2, SPLIT + 3), 2 * SPLIT - 1, 2 * SPLIT, M - 1}
    for position in sorted(positions):
        needed = max(position, 40) // watched.block_size + 1
        for width in {needed, full_width}:  # one split launched, or three
            out = watched.decode(position, others, width)
            np.testing.assert_array_equal(out, watched.whole[position], err_msg=f"position {position}")


def test_prefill_then_decode_through_kv_write() -> None:
    """From float32 keys: written in chunks or one by one, the cache and the attention are the same."""
    heads, kv_heads, d, block_size, m = 6, 2, 16, 8, 75
    rng = random("kv_write then attend")
    q, k, v = (normal(rng, m, h, d) for h in (heads, kv_heads, kv_heads))
    table = rng.permutation(12)[: -(-m // block_size)].astype(np.int32)

    def run(edges: list[int]) -> np.ndarray:
        caches = poisoned_bf16(12, block_size, kv_heads, d), poisoned_bf16(12, block_size, kv_heads, d)
        rows = []
        for a, b in itertools.pairwise(edges):
            kv_write(_ON(k[a:b]), _ON(v[a:b]), _ON(slots_of(table.tolist(), a, b - a, block_size)), *caches)
            tables, length, out = (
                _ON(table[None]),
                _ON(np.array([b], np.int32)),
                poisoned_bf16(b - a, heads, d),
            )
            if b - a == 1:
                paged_attention(_ON(q[a:b]), *caches, tables, length, d**-0.5, out)
            else:
                starts = _ON(np.array([0, b - a], np.int32))
                paged_prefill(_ON(q[a:b]), *caches, tables, starts, length, b - a, d**-0.5, out)
            rows.append(cp.asnumpy(out))
        return np.concatenate(rows)

    whole = run([0, m])
    np.testing.assert_array_equal(run(list(range(m + 1))), whole)
    np.testing.assert_array_equal(run([0, 31, 64, 65, 66, m]), whole)


def test_a_repeated_launch_gives_the_same_bits(watched: Watched) -> None:
    np.testing.assert_array_equal(watched.flash(0, M), watched.whole)
