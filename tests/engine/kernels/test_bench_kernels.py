"""The kernels behind `tinyvllm bench`: random weights, a read of all memory, a square product."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from tinyvllm_ref.bf16 import bf16_to_float, float_to_bf16
from tinyvllm_ref.device import cp, is_gpu
from tinyvllm_ref.kernels.random_normal import random_normal
from tinyvllm_ref.kernels.read_memory import read_memory
from tinyvllm_ref.speed.card import matrix_rate, read_bandwidth, square_product

from .cases import BF16, EXACT, Case

SEED = 0x0123_4567_89AB_CDEF


def _mixed(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _normal(seed: int, deviation: float, count: int) -> np.ndarray:
    """What random_normal writes, in float64 and not rounded."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        stream = _mixed(np.array([seed], np.uint64) + golden)
        bits = _mixed(stream + np.arange(1, count // 2 + 2, dtype=np.uint64) * golden)
    u = ((bits >> np.uint64(40)).astype(np.float64) + 1) / 2**24
    angle = ((bits & np.uint64(0xFFFFFFFF)) >> np.uint64(8)).astype(np.float64) / 2**24 * 2 * np.pi
    radius = deviation * np.sqrt(-2 * np.log(u))
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)[:count]


def _normal_case(count: int, seed: int = SEED, deviation: float = 0.02) -> Case:
    def run() -> dict[str, np.ndarray]:
        out = cp.asarray(np.full(count + 8, 0x7FC0, np.uint16))  # NaN: what must not be written stays
        random_normal(seed, deviation, out[:count])
        values = cp.asnumpy(out)
        return {"out": bf16_to_float(values[:count]), "after": values[count:].astype(np.int64)}

    def want() -> dict[str, np.ndarray]:
        return {"out": _normal(seed, deviation, count), "after": np.full(8, 0x7FC0)}

    return Case(f"random_normal {count} seed {seed}", run, want, BF16, long=count > 10_000)


def _read_case(words: int, threads: int, blocks: int) -> Case:
    x = np.random.default_rng(words).integers(0, 2**16, 8 * words, np.uint16)

    def run() -> dict[str, np.ndarray]:
        out = cp.asarray(np.full(threads * blocks, 0xDEADBEEF, np.uint32))
        read_memory(cp.asarray(x), threads, out)
        return {"xor": np.bitwise_xor.reduce(cp.asnumpy(out)).reshape(1).astype(np.int64)}

    def want() -> dict[str, np.ndarray]:
        return {"xor": np.bitwise_xor.reduce(x.view(np.uint32), initial=0).reshape(1).astype(np.int64)}

    return Case(f"read_memory {words} by {blocks}x{threads}", run, want, EXACT, long=words > 4000)


def _square_case(size: int) -> Case:
    rng = np.random.default_rng(size)
    a, b = (float_to_bf16(rng.standard_normal((size, size))) for _ in range(2))

    def run() -> dict[str, np.ndarray]:
        out = cp.asarray(np.full((size, size), 0x7FC0, np.uint16))
        square_product(cp.asarray(a), cp.asarray(b), out)
        return {"out": bf16_to_float(cp.asnumpy(out))}

    def want() -> dict[str, np.ndarray]:
        return {"out": bf16_to_float(a).astype(np.float64) @ bf16_to_float(b).astype(np.float64).T}

    return Case(f"square_product {size}", run, want, BF16)


CASES = [
    *[_normal_case(count) for count in (1, 2, 7, 8, 9, 15, 2048, 4099, 100_003)],
    *[_normal_case(64, seed, 1.0) for seed in (0, 2**64 - 1)],
    *[_read_case(*sizes) for sizes in ((0, 32, 1), (1, 32, 2), (7, 1, 1), (513, 32, 2), (999, 5, 3))],
    *[_read_case(*sizes) for sizes in ((2048, 32, 8), (2049, 32, 8), (40_001, 512, 4))],
    *[_square_case(size) for size in (1, 8, 40)],
]


def _check(case: Case) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        errors = case.errors()
    assert {name: value for name, value in errors.items() if not value <= case.tolerance} == {}


@pytest.mark.skipif(is_gpu, reason="test_on_a_card runs these")
@pytest.mark.parametrize("mode", ["full", "fast"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_in_the_emulation(case: Case, mode: str) -> None:
    with cp.checks("fast" if case.long else mode):
        _check(case)


@pytest.mark.gpu
@pytest.mark.skipif(not is_gpu, reason="no NVIDIA GPU")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_a_card(case: Case) -> None:
    _check(case)


def test_draws_are_normal() -> None:
    """Mean, deviation and tails within five standard errors; the seed is fixed, so this passes or fails for good."""
    count = 200_000
    x = bf16_to_float(cp.asnumpy(random_normal(7, 1.0, cp.empty(count, np.uint16)))).astype(np.float64)
    assert abs(x.mean()) < 5 / np.sqrt(count)
    assert abs(x.std() - 1) < 5 / np.sqrt(2 * count) + 2.0**-8
    for bound, tail in ((1.0, 0.3173), (2.0, 0.0455), (3.0, 0.0027)):
        share = (np.abs(x) > bound * (1 + 2.0**-9)).mean()
        assert abs(share - tail) < 5 * np.sqrt(tail / count) + 0.003 * tail + 0.002 * (bound == 1.0)
    assert np.isfinite(x).all()
    assert abs(np.corrcoef(x[::2], x[1::2])[0, 1]) < 5 / np.sqrt(count / 2)


def test_wrong_arguments() -> None:
    x = cp.zeros(64, np.uint16)
    out = cp.zeros(64, np.uint32)
    with pytest.raises(ValueError, match=r"random_normal: seed is -1; it must be from 0"):
        random_normal(-1, 1.0, x)
    with pytest.raises(ValueError, match=r"random_normal: out has shape \(64,\) and dtype uint32"):
        random_normal(0, 1.0, out)
    with pytest.raises(ValueError, match="random_normal: out's layout"):
        random_normal(0, 1.0, x[::2])
    with pytest.raises(ValueError, match=r"random_normal: out starts at address .* multiple of 16 bytes"):
        random_normal(0, 1.0, x[1:])
    with pytest.raises(ValueError, match="the length of x is 63; it must be a multiple of 8"):
        read_memory(x[:63], 32, out)
    with pytest.raises(ValueError, match=r"read_memory: x starts at address"):
        read_memory(x[4:60], 32, out)
    with pytest.raises(ValueError, match="the length of out is 64; it must be a multiple of 48"):
        read_memory(x, 48, out)
    with pytest.raises(ValueError, match="threads is 0; it must be 1 to 1024"):
        read_memory(x, 0, out)


@pytest.mark.skipif(is_gpu, reason="a card has rates")
def test_the_emulation_gives_no_rate() -> None:
    with cp.checks("fast"):
        assert np.isnan(read_bandwidth(1 << 16))
        assert np.isnan(matrix_rate(32) or 0.0)


@pytest.mark.gpu
@pytest.mark.skipif(not is_gpu, reason="no NVIDIA GPU")
def test_a_card_gives_rates_that_a_card_can_have() -> None:
    assert 5e10 < read_bandwidth() < 5e13
    rate = matrix_rate(2048)
    assert rate is None or 1e12 < rate < 1e16
