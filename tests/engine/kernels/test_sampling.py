"""Drawing: the specification's own properties, distributions, and independence of the batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tinyvllm_ref.device import cp
from tinyvllm_ref.kernels.sampling import (
    descending_order,
    kept_probabilities,
    sample_rows,
    sample_specification,
    uniform,
)

from .cases import normal, poisoned, random


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


def test_descending_order_is_numpys_stable_one() -> None:
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((6, 1001)).astype(np.float32)
    rows[1] = np.round(rows[1])  # ties
    rows[2] = rng.choice(np.array([0.0, -0.0, 1e-45, -1e-45, np.inf, -np.inf], np.float32), 1001)
    rows[3, ::7], rows[3, 1::7] = np.nan, -np.float32(np.nan)  # of either sign: last, and by id
    rows[4] *= 1e38
    rows[5] = np.float32(-3)
    got = descending_order(cp.asarray(rows))
    np.testing.assert_array_equal(cp.asnumpy(got), np.argsort(-rows, axis=1, kind="stable"))


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
