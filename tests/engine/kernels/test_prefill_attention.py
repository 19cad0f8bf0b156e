"""Attention of whole prompts on tensor cores: its warp-wide products, and its values against NumPy in float64."""

from __future__ import annotations

import itertools
import warnings
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from tests import nvrtc
from tinyvllm_ref import bf16
from tinyvllm_ref.device import cp, is_gpu
from tinyvllm_ref.kernels import prefill_attention as module
from tinyvllm_ref.kernels import source
from tinyvllm_ref.kernels.prefill_attention import prefill_attention, supports

from .cases import PagedCache, attend, bits, f64, normal, random

HERE = pytest.param("here", marks=pytest.mark.skipif(is_gpu, reason="the emulation is not used on a card"))
CARD = pytest.param(
    "card", marks=[pytest.mark.gpu, pytest.mark.skipif(not supports(64) or not is_gpu, reason="no such GPU")]
)
POISON = 0x7FC1


def _checks(mode: str) -> Any:
    return nullcontext() if is_gpu else cp.checks(mode)


# ---------------- the products
_PRODUCT = """
extern "C" __global__ void product(const bf16* a, const bf16* b, const bf16* rows, float* sum, unsigned* plain,
                                   unsigned* transposed) {
    __shared__ uint4 stage[32];  // 32 rows of 8: four matrices
    int lane = threadIdx.x, row = lane / 4, pair = lane % 4 * 2;
    stage[lane] = ((const uint4*)rows)[lane];
    __syncwarp();
    unsigned left[4], one[4], other[4];
    for (int k = 0; k < 4; k++) {
        const bf16* from = a + (row + k % 2 * 8) * 16 + pair + k / 2 * 8;
        left[k] = from[0] | (unsigned)from[1] << 16;
    }
    const bf16* column = b + pair * 8 + row;
    float total[4];
    for (int k = 0; k < 4; k++) total[k] = sum[(row + k / 2 * 8) * 8 + pair + k % 2];
    multiply_add(total, left, column[0] | (unsigned)column[8] << 16, column[64] | (unsigned)column[72] << 16);
    for (int k = 0; k < 4; k++) sum[(row + k / 2 * 8) * 8 + pair + k % 2] = total[k];
    load_matrices(one, (const bf16*)(stage + lane));
    load_transposed(other, (const bf16*)(stage + lane));
    for (int k = 0; k < 4; k++) plain[k * 32 + lane] = one[k], transposed[k * 32 + lane] = other[k];
}
"""


@pytest.mark.parametrize("where", [HERE, CARD])
def test_a_warps_products(where: str) -> None:
    """Each lane holds of each matrix what tensor_core.cuh says."""
    rng = random("fragments")
    a, b, rows = bits(rng, 16, 16), bits(rng, 16, 8), bits(rng, 4, 8, 8)
    begin = normal(rng, 16, 8)
    kernel = cp.RawKernel(source.header("tensor_core.cuh") + _PRODUCT, "product")
    sums, loads = cp.asarray(begin), [cp.zeros((4, 8, 4), np.uint32) for _ in range(2)]
    with _checks("full"):
        kernel((1,), (32,), (cp.asarray(a), cp.asarray(b), cp.asarray(rows), sums, *loads))
    np.testing.assert_allclose(f64(cp.asnumpy(sums)), begin + f64(a) @ f64(b), rtol=0, atol=2e-5)
    for got, want in zip(loads, (rows, rows.transpose(0, 2, 1)), strict=True):
        np.testing.assert_array_equal(cp.asnumpy(got), np.ascontiguousarray(want).view(np.uint32))


# ---------------- the attention
class Batch:
    """Requests in a paged cache, their last tokens' queries, and one more row of q before and after these."""

    def __init__(
        self,
        counts: tuple[int, ...],
        lengths: tuple[int, ...],
        heads: tuple[int, int],
        d: int,
        block_size: int,
    ) -> None:
        rng = random("prefill", counts, lengths, heads, d, block_size)
        self.k, self.v = ([bits(rng, m, heads[1], d) for m in lengths] for _ in range(2))
        self.cache = PagedCache(rng, self.k, self.v, block_size)
        self.starts = np.cumsum([1, *counts]).astype(np.int32)
        self.q = 2 * normal(rng, int(self.starts[-1]) + 1, heads[0], d)
        self.q[1, 0] *= 20  # large scores
        self.q[0], self.q[-1] = np.nan, np.nan
        self.scale = d**-0.5

    def run(self, requests: slice = slice(None), last: int | None = None) -> np.ndarray:
        """What is written, of some of the requests or of the last queries of each alone."""
        ends = self.starts[1:][requests]
        begins = self.starts[:-1][requests] if last is None else ends - last
        chosen = [self.q[:1], *(self.q[a:b] for a, b in zip(begins, ends, strict=True)), self.q[:1]]
        q = np.concatenate(chosen)
        starts = np.cumsum([1, *(ends - begins)]).astype(np.int32)
        tables, lengths = self.cache.tables[requests], self.cache.lengths[requests]
        out = cp.asarray(np.full(q.shape, POISON, np.uint16))
        arrays = (q, self.cache.keys, self.cache.values, np.ascontiguousarray(tables), starts, lengths)
        longest = int((ends - begins).max())
        assert prefill_attention(*map(cp.asarray, arrays), longest, self.scale, out) is out
        got = cp.asnumpy(out)
        assert (got[[0, -1]] == POISON).all()  # rows that no request has
        return np.asarray(got[1:-1])

    def errors(self, got: np.ndarray) -> np.ndarray:
        """|got - want| over what rounding may do.

        A weight, rounded to bf16, errs by 2^-8 of itself, and so does what is written: together at most 2^-8 of
        the weighted mean of |v|, and of the result. Sums in float32 err by little beside that.
        """
        parts = []
        for r, (a, b) in enumerate(itertools.pairwise(self.starts)):
            if b == a:
                continue
            q = bf16.bf16_to_float(bf16.float_to_bf16(self.q[a:b]))
            want = attend(q, self.k[r], self.v[r], self.scale)
            spread = attend(q, self.k[r], self.v[r] & 0x7FFF, self.scale)
            written = f64(got[a - 1 : b - 1])
            parts.append(np.abs(written - want) / (2.0**-8 * (spread + np.abs(want)) * 1.01 + 2e-5))
        return np.concatenate(parts)


# (queries of each request, tokens of each, (Hq, Hk), D, block size)
SHORT = (
    ((1,), (1,), (1, 1), 16, 16),
    ((3, 1), (66, 64), (4, 2), 32, 3),
    ((5, 0, 2), (5, 7, 130), (3, 1), 48, 1),
    ((2,), (65,), (2, 2), 96, 16),
    ((2,), (70,), (5, 1), 128, 100),
)
LONG = (
    ((1, 63, 64, 65), (1, 63, 64, 65), (3, 1), 32, 1),
    ((200, 1, 30), (200, 257, 129), (4, 1), 64, 16),
    ((64, 63, 65), (200, 65, 128), (9, 3), 64, 3),
    ((65, 20), (130, 300), (2, 2), 96, 16),
    ((33, 64), (33, 128), (8, 2), 128, 16),
    ((40,), (700,), (7, 1), 80, 5),
    ((20,), (20,), (2, 1), 112, 64),
)


def _name(size: Any) -> str:
    return "n={} m={} heads={} D={} BS={}".format(*size).replace(" ", "")


def _check(size: Any, mode: str, row_tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_row_tiles", lambda *_: row_tiles)
    batch = Batch(*size)
    with warnings.catch_warnings(), _checks(mode):
        warnings.simplefilter("error")
        errors = batch.errors(batch.run())
    assert errors.max() <= 1
    assert errors.size < 100 or np.sqrt(np.mean(errors**2)) < 0.25  # and far less as a rule


@pytest.mark.skipif(is_gpu, reason="the emulation is not used on a card")
@pytest.mark.parametrize("row_tiles", [1, 2])
@pytest.mark.parametrize("size", SHORT, ids=_name)
def test_with_every_access_checked(size: Any, row_tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _check(size, "full", row_tiles, monkeypatch)


@pytest.mark.parametrize("where", [HERE, CARD])
@pytest.mark.parametrize("row_tiles", [1, 2])
@pytest.mark.parametrize("size", SHORT + LONG, ids=_name)
def test_values(where: str, size: Any, row_tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _check(size, "fast", row_tiles, monkeypatch)


def test_the_measure_can_fail() -> None:
    batch = Batch((4,), (9,), (2, 1), 16, 16)
    want = [attend(batch.q[1:-1], batch.k[0], batch.v[0], batch.scale)][0].astype(np.float32)
    shifted = bf16.float_to_bf16(np.roll(want, 1, axis=0))
    assert batch.errors(bf16.float_to_bf16(want * 1.02)).max() > 1
    assert batch.errors(shifted).max() > 10


@pytest.mark.parametrize("where", [HERE, CARD])
def test_a_row_does_not_depend_on_what_is_beside_it(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit: alone or in a batch, in one piece or as a last chunk, however many rows a block has."""
    batch = Batch((70, 66), (70, 140), (4, 2), 32, 3)
    with _checks("fast"):
        together = batch.run()
        monkeypatch.setattr(module, "_row_tiles", lambda *_: 2)
        np.testing.assert_array_equal(batch.run(), together)
        np.testing.assert_array_equal(batch.run(slice(1, 2)), together[70:])
        for last in (1, 17):
            chunk = batch.run(slice(0, 1), last)
            np.testing.assert_array_equal(chunk, together[70 - last : 70])


@pytest.mark.parametrize("where", [HERE, CARD])
def test_scores_that_rise_and_fall(where: str) -> None:
    """The peak is raised in steps: a score far above it in each tile, one that is above by little, and low ones."""
    batch = Batch((3,), (320,), (1, 1), 16, 16)
    rising = np.repeat([0.0, 30.0, 31.0, -200.0, 90.0], 64)[:, None, None]
    keys = np.zeros((320, 1, 16), np.float32)
    keys[:, :, :1] = rising
    batch.k = [bf16.float_to_bf16(keys)]
    batch.cache = PagedCache(random("peaks"), batch.k, batch.v, 16)
    batch.q[1:-1] = np.array([1.0, 0.25, -1.0])[:, None, None]
    with _checks("fast"):
        assert batch.errors(batch.run()).max() <= 1


# ---------------- what NVIDIA's compiler and the contract say
@pytest.mark.parametrize("arch", ["75", "80", "90", "120"])
@pytest.mark.parametrize(("head_dim", "row_tiles"), [(16, 2), (64, 1), (64, 2), (96, 2), (128, 1), (128, 2)])
def test_nvidias_compiler_accepts_it(head_dim: int, row_tiles: int, arch: str) -> None:
    options = (f"-DHEAD_DIM={head_dim}", f"-DROW_TILES={row_tiles}")
    try:
        done = nvrtc.compile_source(source.text("prefill_attention"), f"compute_{arch}", options)
    except nvrtc.NvrtcMissing as missing:
        pytest.skip(str(missing))
    assert done.ok, done.log
    assert done.log == ""
    for instruction in ("mma.sync", "ldmatrix", "cp.async"):
        assert (instruction in done.ptx) == (arch != "75")


@pytest.mark.skipif(is_gpu and not supports(64), reason="a card without bf16 products takes none")
def test_which_heads_it_takes() -> None:
    assert [d for d in range(1, 300) if supports(d)] == [16, 32, 48, 64, 80, 96, 112, 128]


def test_the_larger_blocks_are_taken_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = module._row_tiles
    monkeypatch.setattr(module, "_shared_limit", lambda: 227 * 1024)
    assert choose(128, 2048 * 4, 8) == 2
    assert choose(128, 128 * 4, 8) == 1
    monkeypatch.setattr(module, "_shared_limit", lambda: 99 * 1024)  # compute capability 8.6, 8.9 and 12.0
    assert choose(128, 2048 * 4, 8) == 1
    assert choose(112, 2048 * 4, 8) == 2


@pytest.mark.parametrize("head_dim", range(16, 144, 16))
@pytest.mark.parametrize("row_tiles", [1, 2])
def test_a_block_fits_into_a_multiprocessor_twice(head_dim: int, row_tiles: int) -> None:
    assert 2 * (module.shared_bytes(head_dim, row_tiles) + 1024) <= 228 * 1024


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"d": 24}, "head_dim is 24; it must be a multiple of 16, at most 128"),
        ({"d": 144}, "head_dim is 144; it must be"),
        ({"heads": 3}, "the number of query heads is 3; it must be a multiple of the 2 KV heads"),
        ({"starts": 4}, r"the length of query_starts is 4; it must be B \+ 1 = 3"),
        ({"scale": 0.0}, "scale is 0.0; it must be positive"),
        ({"scale": float("nan")}, "scale is nan; it must be positive"),
        ({"out": np.float32}, "out has shape .* float32; it must be uint16"),
        ({"shift": 2}, "q starts at address .* multiple of 16 bytes"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], message: str) -> None:
    d, heads, shift = changed.get("d", 32), changed.get("heads", 4), changed.get("shift", 0)
    q = cp.zeros(6 * heads * d + shift, np.float32)[shift:].reshape(6, heads, d)
    cache = cp.zeros((5, 4, 2, d), np.uint16)
    starts = cp.zeros(changed.get("starts", 3), np.int32)
    tables, lengths = cp.zeros((2, 2), np.int32), cp.zeros(2, np.int32)
    out = cp.zeros((6, heads, d), changed.get("out", np.uint16))
    with pytest.raises(ValueError, match=f"prefill_attention: {message}"):
        prefill_attention(q, cache, cache, tables, starts, lengths, 2, changed.get("scale", 0.5), out)


def test_nothing_to_do() -> None:
    q, cache = cp.zeros((0, 4, 32), np.float32), cp.zeros((5, 4, 2, 32), np.uint16)
    tables, starts = cp.zeros((2, 2), np.int32), cp.zeros(3, np.int32)
    out = prefill_attention(
        q, cache, cache, tables, starts, cp.zeros(2, np.int32), 0, 0.5, cp.zeros((0, 4, 32), np.uint16)
    )
    assert out.shape == (0, 4, 32)
