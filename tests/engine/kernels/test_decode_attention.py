"""A decode step's attention in one launch: NumPy in float64, the simple kernels' bits, rows apart, what is refused."""

from __future__ import annotations

import re
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests import nvrtc
from tinyvllm_ref import bf16
from tinyvllm_ref.device import cp, is_gpu
from tinyvllm_ref.kernels import decode_attention as module
from tinyvllm_ref.kernels import source
from tinyvllm_ref.kernels.advance import advance
from tinyvllm_ref.kernels.decode_attention import DecodeScratch, decode_attention, splits_for, supports
from tinyvllm_ref.kernels.decode_rows import embed_norm
from tinyvllm_ref.kernels.kv_write import kv_write
from tinyvllm_ref.kernels.launch import ceil_div
from tinyvllm_ref.kernels.rope import rope
from tinyvllm_ref.kernels.skinny_linear import skinny_linear

from .cases import PagedCache, attend, bits, f64, normal, random

HERE = pytest.param("here", marks=pytest.mark.skipif(is_gpu, reason="the emulation is not used on a card"))
CARD = pytest.param("card", marks=[pytest.mark.gpu, pytest.mark.skipif(not is_gpu, reason="no NVIDIA GPU")])
POISON = 0x7FC1
RAGGED = (1, 2, 15, 0, 16, 17, 63, 64, 65, 300, 999)
LEAST_KEYS = int(
    re.findall(r"^#define LEAST_KEYS (\d+)", source.read("decode_attention.cu"), re.MULTILINE)[0]
)


# On tensor cores queries and weights are rounded to bfloat16; a kernel without them keeps both in float32.
TENSOR_CORES = "tensor_core.cuh" in source.read("decode_attention.cuh")


def _checks(mode: str) -> Any:
    return nullcontext() if is_gpu else cp.checks(mode)


@dataclass(frozen=True)
class Size:
    """Contexts with the new token, 0 for a row that pads; heads; into how many parts keys are cut; warps of a block."""

    contexts: tuple[int, ...]
    heads: tuple[int, int]
    d: int
    block_size: int
    splits: int
    warps: int = 0  # 0: as many as the launcher takes

    def __str__(self) -> str:
        lengths = "ragged" if self.contexts == RAGGED else ",".join(map(str, self.contexts))
        heads = "/".join(map(str, self.heads))
        return (
            f"m={lengths} heads={heads} D={self.d} BS={self.block_size} S={self.splits} W={self.warps or ''}"
        )


@dataclass
class Launched:
    """What a launch left: out, the whole cache, and the scratch memory."""

    out: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    partial: np.ndarray
    lse: np.ndarray
    arrived: np.ndarray


@dataclass
class Batch:
    """Requests whose last token is not in the cache yet: its slot, like all that no request has, is poison."""

    size: Size
    gain: float = 1.0  # of the queries
    qkv: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        size, (q_heads, kv_heads) = self.size, self.size.heads
        rng = random("decode attention", self.size)
        self.lengths = np.array(size.contexts, np.int32)
        rows = len(self.lengths)
        self.k, self.v = ([bits(rng, m, kv_heads, size.d) for m in size.contexts] for _ in range(2))
        self.cache = PagedCache(rng, self.k, self.v, size.block_size)
        self.slots = np.full(rows, -1, np.int64)
        for row, last in enumerate(self.lengths - 1):
            if last >= 0:
                block = int(self.cache.tables[row, last // size.block_size])
                self.slots[row] = block * size.block_size + last % size.block_size
        for cache in (self.cache.keys, self.cache.values):
            cache.reshape(-1, kv_heads, size.d)[self.slots[self.slots >= 0]] = POISON
        self.qkv = 2 * normal(rng, rows, (q_heads + 2 * kv_heads) * size.d)
        self.qkv[:, : q_heads * size.d] *= self.gain
        self.qkv[self.lengths == 0] = np.nan
        self.inv_freq = (1e4 ** (-2 * np.arange(size.d // 2) / size.d)).astype(np.float32)
        self.scale = size.d**-0.5

    def parts(self) -> list[np.ndarray]:
        """Queries (B, Hq, D), keys and values (B, Hk, D) of the new tokens, not turned."""
        (q_heads, kv_heads), d, rows = self.size.heads, self.size.d, len(self.lengths)
        widths = np.cumsum([q_heads * d, kv_heads * d])
        return [
            np.ascontiguousarray(part).reshape(rows, -1, d) for part in np.split(self.qkv, widths, axis=1)
        ]

    def scratch(self) -> DecodeScratch:
        """Filled with NaN, but for what has to be zeros."""
        scratch = DecodeScratch(len(self.lengths), *self.size.heads, self.size.d, self.size.splits)
        for array in (scratch.partial, scratch.lse):
            array.fill(np.nan)
        return scratch

    def run(
        self,
        rows: slice = slice(None),
        launches: int = 1,
        scratch: DecodeScratch | None = None,
        dependent: bool = False,
    ) -> Launched:
        """Some of the rows, `launches` times in a row."""
        scratch = scratch or self.scratch()
        tables = np.ascontiguousarray(self.cache.tables[rows])
        keys, values = cp.asarray(self.cache.keys), cp.asarray(self.cache.values)
        qkv, lengths, tables = (cp.asarray(a) for a in (self.qkv[rows], self.lengths[rows], tables))
        inv_freq = cp.asarray(self.inv_freq)
        out = cp.asarray(np.full((len(qkv), self.size.heads[0], self.size.d), POISON, np.uint16))
        args = (qkv, keys, values, tables, lengths, inv_freq, self.scale, out, scratch)
        chosen = self.size.warps
        with mock.patch.object(module, "_warps", return_value=chosen) if chosen else nullcontext():
            for _ in range(launches):
                assert decode_attention(*args, dependent=dependent) is out
        arrays = (out, keys, values, scratch.partial, scratch.lse, scratch.arrived)
        return Launched(*map(cp.asnumpy, arrays))

    def turned(self, part: np.ndarray) -> np.ndarray:
        """Rotated in float64, by the float32 product that the simple kernel takes for the angle."""
        angles = f64((self.lengths - 1).astype(np.float32)[:, None] * self.inv_freq)[:, None]
        a, b = np.split(f64(part), 2, axis=-1)
        cosine, sine = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)

    def simple(self) -> tuple[np.ndarray, np.ndarray]:
        """The whole cache, after the launches that the simple path makes of this."""
        q, k, v = map(cp.asarray, self.parts())
        keys, values = cp.asarray(self.cache.keys), cp.asarray(self.cache.values)
        rope(q, k, cp.asarray(self.lengths - 1), cp.asarray(self.inv_freq))
        kv_write(k, v, cp.asarray(self.slots), keys, values)
        return cp.asnumpy(keys), cp.asnumpy(values)

    def check(self, got: Launched) -> None:
        self._check_cache(got)
        self._check_scratch(got)
        errors = self.errors(got)
        assert errors.max() <= 1

    def _check_cache(self, got: Launched) -> None:
        keys, values = self.simple()
        np.testing.assert_array_equal(got.values, values)
        if is_gpu:  # where a product and a sum may be one instruction in one kernel and two in the other
            assert np.abs(got.keys.astype(np.int64) - keys.astype(np.int64)).max() <= 1
        else:
            np.testing.assert_array_equal(got.keys, keys)
        live = self.slots >= 0
        flat = got.keys.reshape(-1, *got.keys.shape[2:])
        want = self.turned(self.parts()[1])[live]
        assert (np.abs(f64(flat[self.slots[live]]) - want) <= 2.0**-8 * np.abs(want) + 4e-6).all()
        others = np.ones(len(flat), bool)
        others[self.slots[live]] = False
        np.testing.assert_array_equal(flat[others], self.cache.keys.reshape(flat.shape)[others])

    def _check_scratch(self, got: Launched) -> None:
        assert not got.arrived.any()
        group, kv_heads = self.size.heads[0] // self.size.heads[1], self.size.heads[1]
        lse = got.lse.reshape(len(self.lengths), kv_heads, self.size.splits, group)
        for row, context in enumerate(self.lengths):
            used = _splits_used(int(context), self.size.splits)
            assert np.isfinite(lse[row, :, :used]).all()
            assert np.isnan(lse[row, :, used:]).all()

    def errors(self, got: Launched) -> np.ndarray:
        """|out - want| over what rounding may do: 2^-8 of the result; float32 errs by little of the mean of |v|.

        A weight that is rounded errs by 2^-8 of itself, and so all of them by that of the weighted mean of |v|. The
        keys and values are those that lie in the cache, the new token's among them.
        """
        assert (got.out[self.lengths == 0] == POISON).all()
        queries, parts = self._queries(), []
        of_weights = 2.0**-8 if TENSOR_CORES else 0.0
        for row in np.flatnonzero(self.lengths):
            k, v = (self._tokens(cache, row) for cache in (got.keys, got.values))
            want, spread = (attend(queries[row : row + 1], k, x, self.scale)[0] for x in (v, v & 0x7FFF))
            allowed = 1.01 * 2.0**-8 * np.abs(want) + (of_weights + 1e-5 * self.gain) * spread
            parts.append((np.abs(f64(got.out[row]) - want) / allowed).ravel())
        return np.concatenate(parts)

    def _queries(self) -> np.ndarray:
        """(B, Hq, D) as they are multiplied with keys."""
        plain = self.parts()[0]
        q, k = cp.asarray(plain), cp.asarray(self.parts()[1])
        turned = cp.asnumpy(rope(q, k, cp.asarray(self.lengths - 1), cp.asarray(self.inv_freq))[0])
        live, want = self.lengths > 0, self.turned(plain)
        assert (np.abs(turned - want)[live] <= 4e-6 * np.abs(plain[live]).max()).all()
        return bf16.bf16_to_float(bf16.float_to_bf16(turned)) if TENSOR_CORES else want

    def _tokens(self, cache: np.ndarray, row: int) -> np.ndarray:
        table = self.cache.tables[row, : -(-self.size.contexts[row] // self.size.block_size)]
        return cache[table].reshape(-1, *cache.shape[2:])[: self.size.contexts[row]]


def _splits_used(context: int, splits: int) -> int:
    """How many splits leave a partial result: none where there is one split."""
    each = max(LEAST_KEYS, ceil_div(ceil_div(context, splits), 32) * 32)
    used = ceil_div(context, each)
    return used if used > 1 else 0


# ---------------- values
SIZES = (
    Size((0, 1, 2, 17), (1, 1), 16, 1, 1),
    Size((257, 0, 15, 64), (4, 2), 32, 4, 2, warps=2),
    Size((300, 16), (3, 1), 48, 16, 3, warps=1),
    Size((63, 266, 70), (8, 1), 64, 4, 32, warps=4),
    Size((1, 129), (7, 1), 96, 16, 2, warps=8),
    Size((5, 65), (8, 2), 128, 1, 2),
    Size((66,), (1, 1), 256, 16, 2, warps=2),
)
LONG = (
    Size(RAGGED, (2, 2), 16, 16, 32),
    Size(RAGGED, (6, 2), 32, 4, 3, warps=2),
    Size(RAGGED, (2, 1), 48, 1, 2, warps=8),
    Size(RAGGED, (8, 2), 64, 16, 32),
    Size(RAGGED, (9, 3), 64, 16, 1, warps=4),
    Size(RAGGED, (7, 1), 96, 4, 3, warps=2),
    Size(RAGGED, (8, 1), 128, 16, 32),
    Size(RAGGED, (3, 3), 128, 1, 3, warps=8),
    Size(RAGGED, (4, 1), 256, 16, 2, warps=2),
    Size((999, 0, 300), (8, 1), 256, 4, 32, warps=4),
    Size((999, 64), (8, 1), 16, 1, 32),
    Size((4100, 2100), (2, 1), 80, 16, 32),
    Size((2049, 1111), (4, 1), 64, 16, 64, warps=8),
)


def _check(size: Size, mode: str, gain: float = 1.0, dependent: bool = False) -> None:
    with warnings.catch_warnings(), _checks(mode):
        warnings.simplefilter("error")
        batch = Batch(size, gain)
        batch.check(batch.run(dependent=dependent))


@pytest.mark.skipif(is_gpu, reason="the emulation is not used on a card")
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dependent", [False, True])
def test_with_every_access_checked(size: Size, dependent: bool) -> None:
    _check(size, "full", dependent=dependent)


@pytest.mark.parametrize("where", [HERE, CARD])
@pytest.mark.parametrize("size", SIZES + LONG, ids=str)
def test_values(where: str, size: Size) -> None:
    _check(size, "fast")


@pytest.mark.parametrize("where", [HERE, CARD])
@pytest.mark.parametrize("size", [LONG[1], LONG[3]], ids=str)
def test_large_scores(where: str, size: Size) -> None:
    """Hundreds apart: one key takes all the weight, and the others' is 0 in float32."""
    _check(size, "fast", 40.0)


@pytest.mark.parametrize("where", [HERE, CARD])
@pytest.mark.parametrize("splits", [1, 3])
def test_scores_that_rise_and_fall(where: str, splits: int) -> None:
    """Peaks in each split and at the new token's end, so that every merge has to rescale what it has."""
    batch = Batch(Size((400 * 4,), (2, 1), 16, 16, splits, warps=2))
    batch.inv_freq[:] = 0  # nothing is turned
    rising = np.repeat([0.0, 9.0, 10.0, -60.0, 30.0, 31.0, -5.0, 29.0], 200)
    keys = np.zeros((1600, 1, 16), np.float32)
    keys[:, 0, 0] = rising
    batch.cache.keys[batch.cache.tables[0]] = bf16.float_to_bf16(keys).reshape(-1, 16, 1, 16)
    for query, height in ((1.0, 31.5), (-1.0, -3.0), (4.0, 0.0)):
        batch.qkv[0, :48] = 0
        batch.qkv[0, [0, 16, 32]] = 4 * query, query, height
        with _checks("fast"):
            got = batch.run()
            assert batch.errors(got).max() <= 1


@pytest.mark.parametrize("where", [HERE, CARD])
@pytest.mark.parametrize("size", [*SIZES, LONG[1], LONG[3], LONG[8]], ids=str)
def test_an_early_launch_gives_the_same_bits(where: str, size: Size) -> None:
    """Keys before the product, or the product before the keys: sums keep their order."""
    batch = Batch(size)
    with _checks("fast"):
        early, late = batch.run(dependent=True), batch.run()
        batch.check(early)
        for name in ("out", "keys", "values", "partial", "lse", "arrived"):
            np.testing.assert_array_equal(getattr(early, name), getattr(late, name))


@pytest.mark.parametrize("where", [HERE, CARD])
def test_a_batch_of_nothing_but_padding(where: str) -> None:
    batch = Batch(Size((0, 0, 0), (4, 2), 32, 16, 3))
    with _checks("fast"):
        got = batch.run(dependent=True)
        assert (got.out == POISON).all()
        np.testing.assert_array_equal(got.keys, batch.cache.keys)
        np.testing.assert_array_equal(got.values, batch.cache.values)
        assert not got.arrived.any()


def test_the_measure_can_fail() -> None:
    batch = Batch(Size((1, 9), (2, 1), 16, 16, 1))
    got = batch.run()
    right = got.out.copy()
    assert batch.errors(got).max() <= 1
    for wrong in (
        np.roll(right, 1, axis=1),
        bf16.float_to_bf16(bf16.bf16_to_float(right) * np.float32(1.02)),
    ):
        got.out = wrong
        assert batch.errors(got).max() > 2
    got.out = right
    for array in (got.keys, got.values):
        before = array.reshape(-1)[0]
        array.reshape(-1)[0] ^= 2
        with pytest.raises(AssertionError):
            batch.check(got)
        array.reshape(-1)[0] = before


# ---------------- rows and launches apart
@pytest.mark.parametrize("where", [HERE, CARD])
@pytest.mark.parametrize("size", [LONG[0], LONG[3], LONG[5]], ids=str)
def test_a_row_does_not_depend_on_what_is_beside_it(where: str, size: Size) -> None:
    batch = Batch(replace(size, warps=size.warps or 2))  # a card's launcher chooses them by the batch
    with _checks("fast"):
        together = batch.run()
        for rows in (slice(0, 1), slice(3, 6), slice(8, 9), slice(10, 11)):
            np.testing.assert_array_equal(batch.run(rows).out, together.out[rows])


@pytest.mark.parametrize("where", [HERE, CARD])
@pytest.mark.parametrize("size", [SIZES[1], LONG[3]], ids=str)
def test_launches_one_after_the_other(where: str, size: Size) -> None:
    """The same bits again, from scratch memory that others left."""
    batch = Batch(size)
    with _checks("fast"):
        once, scratch = batch.run(), batch.scratch()
        for launches in (2, 3):
            again = batch.run(launches=launches, scratch=scratch)
            for name in ("out", "keys", "values", "arrived"):
                np.testing.assert_array_equal(getattr(again, name), getattr(once, name))


@pytest.mark.parametrize("where", [HERE, CARD])
def test_scratch_serves_fewer_rows(where: str) -> None:
    batch = Batch(Size((600, 0, 70), (6, 2), 32, 16, 3))
    with _checks("fast"):
        scratch = DecodeScratch(9, 6, 2, 32, 3)
        np.testing.assert_array_equal(batch.run(scratch=scratch).out, batch.run().out)
        assert not cp.asnumpy(scratch.arrived).any()


# ---------------- step after step
@pytest.mark.parametrize("where", [HERE, CARD])
@pytest.mark.parametrize(
    "size",
    [
        Size((40, 1, 0, 31, 15), (4, 2), 32, 16, 1, warps=2),
        Size((700, 255, 256, 16), (8, 1), 64, 16, 3, warps=2),
    ],
    ids=str,
)
def test_steps_that_follow_each_other_at_once(where: str, size: Size) -> None:
    """Each reads the keys and the contexts that the one before it wrote; ordinary launches give the bits."""
    with _checks("fast"):
        steps, layers = (12, 3) if is_gpu else (3, 2)
        want, got = (_steps(Batch(size), steps, layers, dependent) for dependent in (False, True))
        for a, b in zip(want, got, strict=True):
            np.testing.assert_array_equal(a, b)


def _steps(batch: Batch, steps: int, layers: int, dependent: bool) -> list[np.ndarray]:
    """Token, stream and caches after some steps of embedding, products and attention."""
    size, rng, vocab = batch.size, random("steps", batch.size), 64
    (q_heads, kv_heads), d, rows = size.heads, size.d, len(size.contexts)
    hidden, width = q_heads * d, (q_heads + 2 * kv_heads) * d
    blocks = ceil_div(max(size.contexts) + steps, size.block_size)
    tables = cp.asarray(rng.permutation(rows * blocks).reshape(rows, blocks).astype(np.int32))
    shape = (rows * blocks, size.block_size, kv_heads, d)
    caches = [[cp.asarray(bits(rng, *shape)) for _ in range(2)] for _ in range(layers)]
    table, norm = cp.asarray(bits(rng, vocab, hidden)), cp.asarray(bits(rng, hidden))
    weights = [[cp.asarray(bits(rng, n, hidden)) for n in (width, hidden)] for _ in range(layers)]
    drawn = [cp.asarray(rng.integers(0, vocab, rows).astype(np.int32)) for _ in range(steps)]
    contexts, counts = cp.asarray(batch.lengths), cp.zeros(rows, np.int32)
    ids, inv_freq = cp.zeros(rows, np.int32), cp.asarray(batch.inv_freq)
    residual, normed = cp.zeros((rows, hidden), np.float32), cp.zeros((rows, hidden), np.uint16)
    qkv, heads = cp.zeros((rows, width), np.float32), cp.zeros((rows, q_heads, d), np.uint16)
    scratch = DecodeScratch(rows, q_heads, kv_heads, d, size.splits)
    for tokens in drawn:
        embed_norm(ids, table, norm, 1e-5, residual, normed, dependent=dependent)
        for (keys, values), (to_qkv, to_stream) in zip(caches, weights, strict=True):
            skinny_linear(normed, to_qkv, qkv, dependent=dependent)
            decode_attention(
                qkv, keys, values, tables, contexts, inv_freq, d**-0.5, heads, scratch, dependent=dependent
            )
            skinny_linear(heads.reshape(rows, -1), to_stream, residual, accumulate=True, dependent=dependent)
        advance(tokens, ids, contexts, counts)
    live = batch.lengths > 0
    assert (cp.asnumpy(contexts) == batch.lengths + steps * live).all()
    assert np.isfinite(cp.asnumpy(residual)).all()
    flat = [cp.asnumpy(cache) for pair in caches for cache in pair]
    return [cp.asnumpy(ids), cp.asnumpy(residual), cp.asnumpy(heads), *flat]


# ---------------- NVIDIA's compiler
ARCHITECTURES = ("compute_75", "compute_80", "compute_90", "compute_120")


def _ptx(name: str, arch: str, **constants: int) -> str:
    options = tuple(f"-D{key}={value}" for key, value in constants.items())
    try:
        done = nvrtc.compile_source(source.text(name), arch, options)
    except nvrtc.NvrtcMissing as missing:
        pytest.skip(str(missing))
    assert done.ok, done.log
    assert done.log == ""
    return done.ptx


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize(
    ("d", "group", "block_size", "warps", "chunks"),
    [(64, 4, 16, 2, 1), (64, 4, 16, 8, 2), (32, 3, 4, 8, 2), (256, 8, 16, 4, 1)],
)
def test_what_is_read_before_the_wait(
    arch: str, early: int, d: int, group: int, block_size: int, warps: int, chunks: int
) -> None:
    """An early launch asks for keys and values first; none writes before it has waited."""
    ptx = _ptx("decode_attention", arch, HEAD_DIM=d, GROUP=group, KV_HEADS=2, BLOCK_SIZE=block_size, WARPS=warps,
               CHUNKS_FIRST=chunks, EARLY=early)  # fmt: skip
    waits, lets = (
        [match.start() for match in re.finditer(rf"griddepcontrol\.{word}", ptx)]
        for word in ("wait", "launch_dependents")
    )
    if arch in ("compute_75", "compute_80"):
        assert not waits + lets
        return
    assert len(waits) == 1 + early  # a row that pads the batch waits too
    assert len(lets) == 1
    assert lets[0] < min(waits)
    stores = [match.start() for match in re.finditer(r"\bst\.global", ptx)]
    assert min(stores) > max(waits)
    of_qkv = [match.start() for match in re.finditer(r"cp\.async\.cg", ptx)]
    assert min(of_qkv) > max(waits)
    keys = [match.start() for match in re.finditer(r"ld\.global\.cg\.v4", ptx)]
    first = len([key for key in keys if key < max(waits)])
    chunk = module.chunk_bytes(d) // 512
    assert first == early * chunk * chunks
    assert len(keys) > first


@pytest.mark.parametrize("arch", ["compute_90", "compute_120"])
def test_a_step_begins_with_a_kernel_that_waits_first(arch: str) -> None:
    """So that what was written before it may be read at once by all that follows."""
    entries = re.findall(r"\.entry (\w+)\((.*?)\n}", _ptx("decode_rows", arch), re.DOTALL)
    body = dict(entries)["embed_norm"]
    assert 0 < body.index("griddepcontrol.wait") < body.index("griddepcontrol.launch_dependents")


@pytest.mark.parametrize(("d", "group", "warps"), [(16, 1, 1), (64, 4, 8), (96, 7, 2), (256, 8, 4)])
def test_shared_memory_is_what_is_counted(d: int, group: int, warps: int) -> None:
    ptx = _ptx(
        "decode_attention", "compute_90", HEAD_DIM=d, GROUP=group, KV_HEADS=2, BLOCK_SIZE=16, WARPS=warps
    )
    arrays = sum(map(int, re.findall(r"\.shared .*\[(\d+)\];", ptx)))
    counted = 4 * (module.shared_floats(warps, group, d) - module.attention_floats(warps, group, d))
    assert counted == arrays > 0


# ---------------- what it takes and what is refused
def test_which_heads_it_takes() -> None:
    assert [d for d in range(1, 300) if supports(4, 2, d)] == list(range(16, 257, 16))
    assert [q for q in range(1, 40) if supports(q, 4, 64)] == list(range(4, 33, 4))


@pytest.mark.parametrize("requests", [1, 2, 7, 64, 5000])
@pytest.mark.parametrize("kv_heads", [1, 3, 8])
def test_splits_keep_a_card_busy_and_no_more(requests: int, kv_heads: int) -> None:
    splits = splits_for(requests, kv_heads)
    assert 1 <= splits <= module._MOST_SPLITS
    assert splits == 1 or splits * requests * kv_heads <= module._BLOCKS
    assert splits == module._MOST_SPLITS or (splits + 1) * requests * kv_heads > module._BLOCKS
    scratch = DecodeScratch(requests, 2 * kv_heads, kv_heads, 16)
    assert scratch.partial.shape == (requests, 2 * kv_heads, splits, 16)


@pytest.mark.parametrize("head_dim", range(16, 272, 16))
def test_shared_memory_is_what_every_card_has(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own arrays and what the launch asks for."""
    monkeypatch.setattr(module, "is_gpu", True)
    for group in range(1, 9):
        for blocks in (1, 10**6):
            warps = module._warps(blocks, group, head_dim)
            assert warps >= 1
            assert 4 * module.shared_floats(warps, group, head_dim) < 48 * 1024


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"heads": (9, 1)},
            r"\(query heads, KV heads, head_dim\) is '\(9, 1, 32\)'; it must be such that at most 8",
        ),
        ({"heads": (5, 2)}, r"is '\(5, 2, 32\)'; it must be such that"),
        ({"d": 24}, r"is '\(4, 2, 24\)'; it must be such that .* multiple of 16 up to 256"),
        ({"d": 272}, r"is '\(4, 2, 272\)'; it must be"),
        ({"width": 8}, r"the width of qkv is 264; it must be \(Hq \+ 2 Hk\) D = 256"),
        ({"inv_freq": 1}, "the length of inv_freq is 17; it must be D / 2 = 16"),
        ({"rows": 1}, r"context_lens has shape \(4,\) .* = \(3,\)"),
        ({"qkv": np.float64}, "qkv has shape .* float64; it must be float32"),
        ({"out": np.float32}, "out has shape .* float32; it must be uint16"),
        ({"cache": np.float32}, "key_cache has shape .* float32; it must be uint16"),
        ({"shift_qkv": 1}, "qkv starts at address .* multiple of 16 bytes"),
        ({"shift_cache": 4}, "key_cache starts at address .* multiple of 16 bytes"),
        ({"scratch": (2, 4, 2, 32)}, "scratch's number of requests is 2; it must be at least 3"),
        ({"scratch": (3, 2, 2, 32)}, r"scratch's .* is \(2, 2, 32\); it must be \(4, 2, 32\)"),
        ({"scratch": (3, 4, 1, 32)}, r"scratch's .* is \(4, 1, 32\); it must be \(4, 2, 32\)"),
        ({"scratch": (3, 4, 2, 48)}, r"scratch's .* is \(4, 2, 48\); it must be \(4, 2, 32\)"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], message: str) -> None:
    heads, d = changed.get("heads", (4, 2)), changed.get("d", 32)
    width = (heads[0] + 2 * heads[1]) * d + changed.get("width", 0)
    shift, cache_shift = changed.get("shift_qkv", 0), changed.get("shift_cache", 0)
    qkv = cp.zeros(3 * width + shift, changed.get("qkv", np.float32))[shift:].reshape(3, width)
    cache = cp.zeros(5 * 4 * heads[1] * d + cache_shift, changed.get("cache", np.uint16))
    cache = cache[cache_shift:].reshape(5, 4, heads[1], d)
    tables, lengths = cp.zeros((3, 2), np.int32), cp.ones(3 + changed.get("rows", 0), np.int32)
    inv_freq = cp.zeros(d // 2 + changed.get("inv_freq", 0), np.float32)
    out = cp.full((3, heads[0], d), 7, changed.get("out", np.uint16))
    scratch = DecodeScratch(*changed.get("scratch", (3, *heads, d)), splits=2)
    with pytest.raises(ValueError, match=f"decode_attention: .*{message}"):
        decode_attention(qkv, cache, cache, tables, lengths, inv_freq, 0.5, out, scratch)
    assert (cp.asnumpy(out) == 7).all()


def test_nothing_to_do() -> None:
    cache = cp.zeros((5, 4, 2, 32), np.uint16)
    tables, lengths = cp.zeros((0, 2), np.int32), cp.zeros(0, np.int32)
    qkv, out = cp.zeros((0, 256), np.float32), cp.zeros((0, 4, 32), np.uint16)
    scratch = DecodeScratch(1, 4, 2, 32)
    assert (
        decode_attention(qkv, cache, cache, tables, lengths, cp.zeros(16, np.float32), 0.5, out, scratch)
        is out
    )
