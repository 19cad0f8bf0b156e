"""Drawing: the specification's own properties, the kernel against it in float64, and independence of the batch."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests import nvrtc
from tinyvllm_ref.assembly import Parts
from tinyvllm_ref.device import cp, is_gpu
from tinyvllm_ref.kernels import sampling, source
from tinyvllm_ref.kernels.sampling import (
    kept_probabilities,
    sample_rows,
    sample_specification,
    uniform,
)
from tinyvllm_ref.request import Request
from tinyvllm_ref.sampler import Sampler, sample
from tinyvllm_ref.sampling_params import SamplingParams

from .cases import in_emulation, normal, poisoned, random

F32, I32, U64 = np.float32, np.int32, np.uint64


@pytest.fixture(autouse=True)
def _fast() -> Iterator[None]:
    if getattr(cp, "is_emulation", False):
        with cp.checks("fast"):
            yield
    else:
        yield


def _draw(
    logits: np.ndarray,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seeds: np.ndarray,
    steps: np.ndarray,
) -> np.ndarray:
    n = len(seeds)
    rows = np.ascontiguousarray(np.broadcast_to(logits, (n, len(logits))))
    options = (
        np.full(n, temperature, np.float32),
        np.full(n, top_k, np.int32),
        np.full(n, top_p, np.float32),
        np.full(n, min_p, np.float32),
        seeds.astype(np.uint64),
        steps.astype(np.int32),
    )
    return np.asarray(
        cp.asnumpy(sample_rows(*map(cp.asarray, (rows, *options)), poisoned(n, dtype=np.int32)))
    )


def test_uniforms_are_uniform_and_independent() -> None:
    u = np.array([[uniform(seed, step) for step in range(200)] for seed in range(200)])
    assert u.min() >= 0
    assert u.max() < 1
    counts = np.histogram(u, bins=20, range=(0, 1))[0]
    expected = u.size / 20
    assert ((counts - expected) ** 2 / expected).sum() < 43.8  # chi-squared, 19 degrees, 0.1 %
    for shifted in (np.roll(u, 1, axis=0), np.roll(u, 1, axis=1), np.roll(u, (1, -1), axis=(0, 1))):
        assert abs(np.corrcoef(u.ravel(), shifted.ravel())[0, 1]) < 0.02
    assert len(np.unique(u)) > 0.99 * u.size
    assert 0 <= uniform(2**64 - 1, 2**31 - 1) < 1


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.6, 0, 1.0, 0.0), (1.0, 4, 1.0, 0.0), (1.3, 0, 0.7, 0.0), (1.0, 6, 0.8, 0.1)],
)
def test_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = 1.5 * normal(random("distribution"), 12)
    n = 4000
    drawn = _draw(logits, temperature, top_k, top_p, min_p, np.arange(n), np.arange(n) % 7)
    ids, probabilities = kept_probabilities(logits, temperature, top_k, top_p, min_p)
    assert set(drawn) <= set(ids.tolist())
    counts = np.array([(drawn == token).sum() for token in ids])
    chi_squared = ((counts - n * probabilities) ** 2 / (n * probabilities)).sum()
    assert chi_squared < len(ids) - 1 + 4 * np.sqrt(2 * len(ids)) + 8


def test_what_is_kept() -> None:
    logits = np.log(np.array([0.05, 0.5, 0.15, 0.3]))
    assert kept_probabilities(logits, 1, 0, 1, 0)[0].tolist() == [1, 3, 2, 0]
    assert kept_probabilities(logits, 1, 2, 1, 0)[0].tolist() == [1, 3]
    assert kept_probabilities(logits, 1, 0, 0.7, 0)[0].tolist() == [
        1,
        3,
    ]  # the token that crosses 0.7 is kept
    assert kept_probabilities(logits, 1, 0, 0.4, 0)[0].tolist() == [1]
    assert kept_probabilities(logits, 1, 0, 1, 0.25)[0].tolist() == [1, 3, 2]
    assert kept_probabilities(logits, 1, 2, 0.6, 0)[0].tolist() == [1]  # 0.5 / 0.8 is over 0.6: after top-k
    np.testing.assert_allclose(
        kept_probabilities(logits, 0.5, 0, 1, 0)[1], np.array([25, 9, 2.25, 0.25]) / 36.5
    )


@pytest.mark.parametrize("vocab", [9, 5000])
def test_the_kernel_draws_what_the_specification_draws(vocab: int) -> None:
    logits = 1.5 * normal(random("specification", vocab), vocab)
    seeds, steps = np.arange(300), np.arange(300) * 3
    for options in ((1.0, 0, 1.0, 0.0), (0.7, 40, 0.9, 0.02), (1.0, 0, 0.95, 0.0)):
        drawn = _draw(logits, *options, seeds, steps)
        want = [
            sample_specification(logits, *options, int(a), int(b)) for a, b in zip(seeds, steps, strict=True)
        ]
        # A draw within float32's rounding of an edge may fall to its neighbour.
        assert (drawn != want).sum() <= 1
        assert len(set(want)) > 2


def test_ties_and_cold() -> None:
    logits = np.array([0, 3, 3, 1], np.float32)
    seeds, steps = np.arange(50), np.zeros(50)
    assert set(_draw(logits, 0, 0, 1, 0, seeds, steps)) == {1}
    assert set(_draw(logits, 1, 1, 1, 0, seeds, steps)) == {1}
    assert set(_draw(logits, 1e-4, 0, 1, 0, seeds, steps)) == {1, 2}
    assert set(_draw(np.array([0, 3, 2.9, 1], np.float32), 1e-4, 0, 1, 0, seeds, steps)) == {1}


def test_tokens_without_probability_are_never_drawn() -> None:
    logits = np.full(3000, -np.inf, np.float32)
    logits[[5, 2999]] = 1
    assert set(_draw(logits, 1, 0, 1, 0, np.arange(200), np.zeros(200))) == {5, 2999}


# ---------------- every token against the specification
# The unit of subnormal numbers, for a difference of two quarters; a card takes all of these for 0.
LEAST_DIFFERENCE = 2.0**-123 if is_gpu else 2.0**-147
Options = tuple[float, int, float, float, int, int]  # temperature, top_k, top_p, min_p, seed, step
KINDS = (F32, I32, F32, F32, U64, I32)


@dataclass(frozen=True)
class Sorted:
    """A row in the specification's order, in float64."""

    ids: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, logits: np.ndarray) -> Sorted:
        ids = np.argsort(-logits, kind="stable")
        return cls(ids, logits[ids].astype(np.float64))

    def allowed(self, options: Options) -> set[int]:
        """The tokens that weights with the rounding errors of float32 may give; mostly one."""
        temperature, top_k, top_p, min_p, seed, step = options
        if temperature == 0 or not np.isfinite(self.values[0]):
            return {int(self.ids[0])}
        values = self.values[~np.isnan(self.values)][: top_k if top_k > 0 else None]
        exponents = (values - values[0]) / temperature
        weights = np.exp(exponents)
        errors = _errors(exponents, temperature)
        sums, error = np.cumsum(weights), float(errors.sum())
        kept = [len(sums), len(sums)]
        if top_p < 1:
            kept = [int(np.searchsorted(sums, top_p * sums[-1] + sign * error)) + 1 for sign in (-1, 1)]
        if min_p > 0:
            bound = np.log(min_p)
            off = LEAST_DIFFERENCE / temperature - 2.0**-21 * bound
            # Beside 1 float64 itself can tell nothing from it within 2^-54.
            bounds = (min(bound + off, -(2.0**-54)), bound - off - 2.0**-53)
            kept = [min(k, int((exponents >= bound).sum())) for k, bound in zip(kept, bounds, strict=True)]
        ranges = []
        for count in range(min(kept[0], len(sums)), min(kept[1], len(sums)) + 1):
            target = uniform(seed, step) * sums[count - 1]
            low, high = (int(np.searchsorted(sums, target + off, side="right")) for off in (-error, error))
            ranges.append(range(min(low, count - 1), min(high, count - 1) + 1))
        return {int(self.ids[place]) for places in ranges for place in places}


def _errors(exponents: np.ndarray, temperature: float) -> np.ndarray:
    """By how much weights from float32 may be off.

    The logarithm comes from a difference, a factor of two roundings and a product, each off by at most 2^-24 of it,
    and the exponential by 2^-22. Differences may be lost below the least numbers, and a weight below 2^-44. The
    largest logit, and what ties with it, weighs 1 to the bit.
    """
    sizes = np.where(exponents > -1000, np.abs(exponents), 0)
    parts = (3.5 * sizes + 4) * 2.0**-24 + LEAST_DIFFERENCE / temperature
    return np.where((exponents == 0) | (exponents == -np.inf), 0, parts * np.exp(exponents) + 2.0**-44)


def _rows(vocab: int) -> dict[str, np.ndarray]:
    """Logits of every shape that may make a selection stumble."""
    rng = random("rows", vocab)
    plain = normal(rng, vocab)
    rows = {
        "plain": plain,
        "wide": 8 * plain,
        "few values": np.round(plain),
        "of bfloat16": (2 * plain).view(np.uint32).__and__(0xFFFF0000).view(F32),
        "equal": np.full(vocab, -2.5, F32),
        "zeros of both signs": rng.choice(np.array([0.0, -0.0], F32), vocab),
        "neighbours": np.float32(1) + rng.integers(0, 9, vocab).astype(F32) * np.float32(2**-23),
        "subnormal": (rng.integers(0, 2000, vocab).astype(np.int32)).view(F32)
        * rng.choice([F32(-1), F32(1)], vocab),
        "ascending": np.sort(plain),
        "descending": -np.sort(-plain),
        "huge": np.float32(1e38) * np.clip(plain, -3, 3),
        "one far above": np.where(np.arange(vocab) == vocab // 2, F32(25), plain),
        "nothing": np.full(vocab, -np.inf, F32),
        "all NaN": np.full(vocab, np.nan, F32),
    }
    for name, value, share in (("-inf", -np.inf, 0.7), ("inf", np.inf, 0.01), ("NaN", np.nan, 0.3)):
        rows[f"some {name}"] = np.where(rng.random(vocab) < share, F32(value), plain)
    rows["NaN of either sign"] = np.where(
        rng.random(vocab) < 0.4, rng.choice([F32(np.nan), -F32(np.nan)], vocab), plain
    )
    return {name: np.ascontiguousarray(row, F32) for name, row in rows.items()}


LAST = 1 - 2.0**-24  # the largest float32 below 1
TEMPERATURES = (0.0, 1e-30, 0.05, 0.7, 1.0, 40.0, 1e30)
TOP_PS = (1.0, LAST, 0.9, 0.3, 1e-6, 0.0)
MIN_PS = (0.0, 1e-12, 0.05, 1.0)


def _options(vocab: int, most: int, *key: Any) -> list[Options]:
    """All combinations, or so many of them."""
    top_ks = sorted({0, 1, 2, 40, vocab // 3, vocab, 2 * vocab, -1})
    combinations = list(itertools.product(TEMPERATURES, top_ks, TOP_PS, MIN_PS))
    rng = random("options", vocab, *key)
    rng.shuffle(combinations)
    return [
        (
            *map(float, (F32(t),)),
            k,
            float(F32(p)),
            float(F32(m)),
            int(rng.integers(2**63)),
            int(rng.integers(1000)),
        )
        for t, k, p, m in combinations[:most]
    ]


def _draw_rows(rows: np.ndarray, options: list[Options]) -> np.ndarray:
    arrays = [
        cp.asarray(np.array(column, kind))
        for column, kind in zip(zip(*options, strict=True), KINDS, strict=True)
    ]
    out = poisoned(len(rows), dtype=I32)
    return np.asarray(cp.asnumpy(sample_rows(cp.asarray(rows), *arrays, out)))


def _check_rows(vocab: int, most: int) -> None:
    """Draw `most` times from each row, and look up each token."""
    open_ones = total = 0
    for name, row in _rows(vocab).items():
        options, order = _options(vocab, most, name), Sorted.of(row)
        for start in range(0, len(options), 64):
            some = options[start : start + 64]
            drawn = _draw_rows(np.ascontiguousarray(np.broadcast_to(row, (len(some), vocab))), some)
            for one, token in zip(some, drawn.tolist(), strict=True):
                allowed = order.allowed(one)
                assert token in allowed, (name, one, token, allowed)
                open_ones += len(allowed) > 1
                total += 1
    assert total > 0
    assert open_ones <= 4 + total * (0.02 if vocab < 5000 else 0.1)


# The threads of a block, and sizes that send short rows down every path.
BLOCKS: dict[str, tuple[int, dict[str, int]]] = {
    "one thread": (1, {}),
    "one thread, small": (1, {"BINS": 8, "LIST": 4}),
    "a warp, small": (32, {"BINS": 16, "LIST": 32}),
    "two warps, small": (64, {"BINS": 40, "LIST": 64}),
    "two warps": (64, {}),
}
if is_gpu:
    BLOCKS |= {"many rows": (512, {}), "few rows": (1024, {})}


def _use(monkeypatch: pytest.MonkeyPatch, block: str) -> None:
    threads, sizes = BLOCKS[block]
    made = source.kernel
    monkeypatch.setattr(sampling, "_threads", lambda rows: threads)
    monkeypatch.setattr(sampling, "kernel", lambda *names, **constants: made(*names, **constants, **sizes))


@in_emulation
@pytest.mark.parametrize("vocab", [1, 2, 31, 300, 2048])
def test_every_combination(vocab: int) -> None:
    _check_rows(vocab, 2000 if vocab < 2048 else 300)


@in_emulation
@pytest.mark.parametrize(("vocab", "most"), [(49152, 12), (128256, 5)])
def test_vocabularies_of_models(vocab: int, most: int) -> None:
    _check_rows(vocab, most)


@in_emulation
@pytest.mark.slow
@pytest.mark.parametrize("block", ["one thread", "two warps"])
@pytest.mark.parametrize("vocab", [49152, 128256])
def test_vocabularies_of_models_at_length(vocab: int, block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, block)
    _check_rows(vocab, 60)


@in_emulation
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("vocab", [3, 300, 2048])
def test_every_way_to_an_answer(vocab: int, block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, block)
    _check_rows(vocab, 60)


@in_emulation
@pytest.mark.parametrize("block", BLOCKS)
def test_with_every_access_checked(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, block)
    with warnings.catch_warnings(), cp.checks("full"):
        warnings.simplefilter("error")
        for vocab, most in ((1, 2), (37, 8), (300, 4), (1100, 1)):
            _check_rows(vocab, most)


@pytest.mark.gpu
@pytest.mark.skipif(not is_gpu, reason="no NVIDIA GPU")
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("vocab", [1, 2, 31, 300, 2048, 49152, 128256])
def test_on_a_card(vocab: int, block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if block != "few rows" and block != "many rows":
        _use(monkeypatch, block)
    _check_rows(vocab, 2000 if vocab <= 300 else 60)


def test_the_check_would_see_a_wrong_token() -> None:
    """Other options, seeds or steps give tokens that the margins do not let pass."""
    row = 2 * normal(random("other"), 300)
    order, right = Sorted.of(row), (0.8, 50, 0.9, 0.01)
    changed = (
        (0.9, 50, 0.9, 0.01, 0, 0),
        (0.8, 8, 0.9, 0.01, 0, 0),
        (0.8, 50, 0.6, 0.01, 0, 0),
        (0.8, 50, 0.9, 0.2, 0, 0),
    )
    for other in (*changed, (*right, 1, 0), (*right, 0, 1)):
        seen = 0
        for seed in range(100):
            want = order.allowed((*right, seed, 0))
            seen += not order.allowed((*other[:4], seed + other[4], other[5])) & want
        assert seen > 10, other


# ---------------- rows, blocks, places in memory
def _mixture(vocab: int, count: int) -> tuple[np.ndarray, list[Options]]:
    kinds = list(_rows(vocab).values())
    rng = random("mixture", vocab)
    rows = np.stack([kinds[i % len(kinds)][rng.permutation(vocab)] for i in range(count)])
    return rows, _options(vocab, count, "mixture")


@pytest.mark.parametrize("vocab", [300, 2051])
def test_a_row_draws_alone_what_it_draws_in_any_batch(vocab: int) -> None:
    rows, options = _mixture(vocab, 150)
    together = _draw_rows(rows, options)
    assert len(np.unique(together)) > 20
    order = random("order", vocab).permutation(len(rows))
    np.testing.assert_array_equal(_draw_rows(rows[order], [options[i] for i in order]), together[order])
    for start, count in ((0, 1), (7, 1), (149, 1), (3, 2), (40, 31), (10, 129)):
        some = slice(start, start + count)
        np.testing.assert_array_equal(_draw_rows(rows[some], options[some]), together[some])


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_of_any_size_draw_the_same(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of whole numbers: not one token depends on who adds what, or on the way to it."""
    for vocab in (300, 5000):
        rows, options = _mixture(vocab, 60)
        want = _draw_rows(rows, options)
        with monkeypatch.context() as patch:
            _use(patch, block)
            np.testing.assert_array_equal(_draw_rows(rows, options), want)


@pytest.mark.parametrize("shift", [1, 2, 3])
@pytest.mark.parametrize("vocab", [1, 2, 5, 301, 302, 304])
def test_rows_may_begin_anywhere(vocab: int, shift: int) -> None:
    rows, options = _mixture(vocab, 24)
    arrays = [
        cp.asarray(np.array(c, kind)) for c, kind in zip(zip(*options, strict=True), KINDS, strict=True)
    ]
    memory = cp.asarray(np.concatenate([np.full(shift, 99, F32), rows.ravel(), np.full(3, 99, F32)]))
    view = memory[shift : shift + rows.size].reshape(rows.shape)
    drawn = sample_rows(view, *arrays, poisoned(len(rows), dtype=I32))
    np.testing.assert_array_equal(cp.asnumpy(drawn), _draw_rows(rows, options))


def test_the_order_is_numpys_stable_one() -> None:
    """Uniform weights, so that a token's place can be told from its number: u falls into each place in turn."""
    rng = random("order of all")
    row = rng.choice(np.array([0.0, -0.0, 1e-45, -1e-45, 1e-40, -1e-40, 1e-38, -1e-38], F32), 40)
    places = [[] for _ in row]
    for seed in range(600):
        places[int(uniform(seed, 0) * len(row))].append(seed)
    assert all(places)
    seeds = [some[0] for some in places]
    drawn = _draw_rows(np.tile(row, (len(row), 1)), [(1e30, 0, 1.0, 0.0, seed, 0) for seed in seeds])
    np.testing.assert_array_equal(drawn, np.argsort(-row, kind="stable"))


@pytest.mark.parametrize("block", ["one thread", "a warp, small", "two warps"])
@pytest.mark.parametrize("options", [(1.0, 0, 1.0, 0.0), (0.7, 30, 0.95, 0.0), (1.2, 0, 0.8, 0.02)])
def test_frequencies_are_the_probabilities(
    options: tuple[float, int, float, float], block: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use(monkeypatch, block)
    row = np.round(1.5 * normal(random("frequencies"), 600), 1)
    n = 20_000 if is_gpu or block == "one thread" else 3_000
    drawn = _draw(row, *options, np.arange(n), np.arange(n) % 5)
    ids, probabilities = kept_probabilities(row, *options)
    counts = np.bincount(drawn, minlength=600)
    assert counts.sum() == counts[ids].sum()
    groups = (np.cumsum(probabilities) * n / 50).astype(
        int
    )  # of about 50 draws, and of one token where it has more
    got, want = (np.bincount(groups, values) for values in (counts[ids], n * probabilities))
    got, want = got[want > 5], want[want > 5]
    assert len(want) > 10
    degrees = len(want) - 1
    assert ((got - want) ** 2 / want).sum() < degrees + 4 * np.sqrt(2 * degrees) + 8


def test_a_vocabulary_that_is_too_large_for_the_sums() -> None:
    logits, arrays = cp.zeros((1, 2**20), F32), [cp.zeros(1, kind) for kind in (*KINDS, I32)]
    message = "the width of logits is 1048576; it must be at least 1 and at most 1048575"
    with pytest.raises(ValueError, match=message):
        sample_rows(logits, *arrays)


# ---------------- NVIDIA's compiler, and a graph
@pytest.mark.parametrize("vocab", [7, 3000])
def test_options_that_no_array_holds_mean_the_most_that_one_can(vocab: int) -> None:
    """All tokens for a top_k of 2^31, all of them alike for an endless temperature; and a step of others goes on."""
    logits = normal(random("beyond", vocab), vocab)
    params = [
        SamplingParams(top_k=2**31, seed=1),
        SamplingParams(top_k=10**30, temperature=0.8, seed=2),
        SamplingParams(temperature=1e300, seed=3),
        SamplingParams(seed=4),
        SamplingParams(temperature=0.0),
    ]
    steps = np.arange(len(params), dtype=np.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = cp.asarray(np.tile(logits, (len(params), 1)))
        drawn = sample(rows, params, cp.asarray(steps)).tolist()
    for row, (one, token) in enumerate(zip(params, drawn, strict=True)):
        options = (one.temperature, min(one.top_k, vocab), 1.0, 0.0, one.seed or 0, row)
        assert token in Sorted.of(logits).allowed(options)


def test_penalties_that_no_array_holds() -> None:
    request = Request("0", [1, 2], SamplingParams(repetition_penalty=1e300, temperature=0.0, seed=0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampled = Sampler(Parts.reference())(cp.asarray(np.array([[1, 4, -1, 0.5]], F32)), [request])
    assert sampled.ids == [0]  # of 1, 4 / 1e300, -1e300 and 0.5


@pytest.mark.parametrize("arch", ["compute_75", "compute_80", "compute_90", "compute_120"])
@pytest.mark.parametrize("threads", [512, 1024])
def test_nvidias_compiler_accepts_it(arch: str, threads: int) -> None:
    try:
        done = nvrtc.compile_source(source.text("sampling"), arch, (f"-DTHREADS={threads}",))
    except nvrtc.NvrtcMissing as missing:
        pytest.skip(str(missing))
    assert done.ok, done.log
    assert done.log == ""
    entries = dict(re.findall(r"\.entry (\w+)\((.*?)\n}", done.ptx, re.DOTALL))
    assert entries.keys() == {"apply_penalties", "sample_rows"}
    body = entries["sample_rows"]
    assert ".local" not in body
    assert "ld.global.v4" in body
    dependent = arch in ("compute_90", "compute_120")
    assert body.count("griddepcontrol.wait") == dependent
    assert len(re.findall(r"\bst\.global", body)) == 1
    if dependent:
        assert min(m.start() for m in re.finditer(r"\bld\.global", body)) > body.index("griddepcontrol.wait")


@pytest.mark.gpu
@pytest.mark.skipif(not is_gpu, reason="no NVIDIA GPU")
@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("count", [1, 8, 256])
def test_in_a_graph(count: int, dependent: bool) -> None:
    """Recorded once, replayed with other logits, options and steps."""
    vocab, stream = 32000, cp.cuda.Stream(non_blocking=True)
    with stream:
        logits = cp.zeros((count, vocab), F32)
        arrays = [cp.zeros(count, kind) for kind in KINDS]
        out = poisoned(count, dtype=I32)
        sample_rows(logits, *arrays, out, dependent=dependent)
        stream.synchronize()
        stream.begin_capture()
        sample_rows(logits, *arrays, out, dependent=dependent)
        graph = stream.end_capture()
        for round_ in range(3):
            rows, options = _mixture(vocab, count)
            rows = np.roll(rows, round_, axis=0)
            logits.set(rows)
            for array, column, kind in zip(arrays, zip(*options, strict=True), KINDS, strict=True):
                array.set(np.array(column, kind))
            out.fill(-1)
            graph.launch(stream)
            stream.synchronize()
            drawn = cp.asnumpy(out)
            np.testing.assert_array_equal(drawn, _draw_rows(rows, options))
