"""Rotary embedding and the write to the cache in one pass: NumPy in float64, and the simple kernels beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests import nvrtc
from tinyvllm_ref.device import cp, is_gpu
from tinyvllm_ref.kernels import rope_write as module
from tinyvllm_ref.kernels import source
from tinyvllm_ref.kernels.kv_write import kv_write
from tinyvllm_ref.kernels.rope import rope
from tinyvllm_ref.kernels.rope_write import rope_write
from tinyvllm_ref.kernels.split_qkv import split_qkv

from .cases import BF16, FLOAT, Arrays, Case, checked, f64, in_emulation, normal, poisoned, random

F32, U16, I32, I64 = np.float32, np.uint16, np.int32, np.int64
POISON = 0x7FC1  # not a number


class Tokens:
    """`tokens` rows of a product, and slots for them in a cache of one block more than they fill."""

    def __init__(self, tokens: int, heads: tuple[int, int], d: int, block_size: int, padded: str) -> None:
        rng = random("rope_write", tokens, heads, d, block_size)
        self.heads, self.d = heads, d
        self.qkv = normal(rng, tokens, (heads[0] + 2 * heads[1]) * d)
        self.positions = rng.integers(0, 9000, tokens).astype(I32)
        self.positions[0] = 131_071
        self.inv_freq = (1e4 ** (-2 * np.arange(d // 2) / d)).astype(F32)
        self.cache = (tokens // block_size + 2, block_size, heads[1], d)
        self.slots = rng.permutation(self.cache[0] * block_size)[:tokens].astype(I64)
        if padded == "end":
            self.slots[-(tokens // 3) :] = -1
        elif padded == "all":
            self.slots[:] = -1
            self.slots[0] = -(2**40)

    def on_device(self) -> list[Any]:
        """All that the launch takes, outputs poisoned."""
        caches = (np.full(self.cache, POISON, U16) for _ in range(2))
        q = poisoned(len(self.slots), self.heads[0], self.d)
        given = (self.qkv, self.positions, self.inv_freq, self.slots)
        return [*map(cp.asarray, given), q, *map(cp.asarray, caches)]

    def run(self) -> Arrays:
        arrays = self.on_device()
        assert rope_write(*arrays) is arrays[4]
        q, keys, values = map(cp.asnumpy, arrays[4:])
        return {"q": q, "keys": keys, "values": values}

    def want(self) -> Arrays:
        q_heads, kv_heads = self.heads
        rows = f64(self.qkv).reshape(len(self.slots), q_heads + 2 * kv_heads, self.d)
        angles = f64(
            self.positions.astype(F32)[:, None] * self.inv_freq
        )  # a float32 product, as in the kernel
        a, b = np.split(rows[:, : q_heads + kv_heads], 2, axis=-1)
        cosine, sine = np.cos(angles)[:, None], np.sin(angles)[:, None]
        turned = np.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)
        kept = self.slots >= 0
        q = np.where(kept[:, None, None], turned[:, :q_heads], np.nan)
        flat = (self.cache[0] * self.cache[1], *self.cache[2:])
        keys, values = np.full(flat, np.nan), np.full(flat, np.nan)
        keys[self.slots[kept]] = turned[kept, q_heads:]
        values[self.slots[kept]] = rows[kept, q_heads + kv_heads :]
        return {"q": q, "keys": keys.reshape(self.cache), "values": values.reshape(self.cache)}


# (tokens, (Hq, Hk), D, block size, which rows pad the batch)
SIZES = (
    (1, (1, 1), 2, 1, "none"),
    (5, (4, 2), 26, 3, "end"),
    (3, (6, 2), 32, 16, "end"),
    (2, (5, 1), 80, 7, "all"),
    (4, (9, 3), 64, 16, "none"),
    (37, (6, 2), 32, 16, "end"),
    (6, (32, 8), 64, 16, "end"),
    (3, (3, 3), 128, 100, "end"),
)


def cases() -> Iterator[Case]:
    for size in SIZES:
        tokens = Tokens(*size)
        name = "T={} heads={} D={} BS={} padded={}".format(*size).replace(" ", "")
        yield Case(name, tokens.run, tokens.want, BF16, size[0] * sum(size[1]) * size[2] > 4000)


CASES = list(cases())


def _check(case: Case) -> None:
    errors = case.errors()
    assert {name: value for name, value in errors.items() if not value <= BF16} == {}
    assert errors["q"] <= FLOAT  # float32 all the way


@in_emulation
@pytest.mark.parametrize("case", [c for c in CASES if not c.long], ids=lambda case: case.name)
@pytest.mark.parametrize("threads", [1, 8, 96])
def test_with_every_access_checked(case: Case, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_THREADS", threads)
    with checked("full"):
        _check(case)


@in_emulation
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("threads", [8, 256])
def test_fast(case: Case, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_THREADS", threads)
    with checked("fast"):
        _check(case)


@pytest.mark.gpu
@pytest.mark.skipif(not is_gpu, reason="no NVIDIA GPU")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_a_card(case: Case) -> None:
    _check(case)


def test_the_measure_can_fail() -> None:
    tokens = Tokens(4, (4, 2), 32, 3, "end")
    shifted = Tokens(4, (4, 2), 32, 3, "end")
    shifted.positions = tokens.positions + 1
    case = Case("shifted", shifted.run, tokens.want, BF16)
    assert min(case.errors()["q"], case.errors()["keys"]) > 0.1
    assert case.errors()["values"] <= BF16


@pytest.mark.parametrize("size", [(5, (4, 2), 26, 3, "end"), (9, (9, 3), 64, 16, "none")])
def test_beside_the_simple_kernels(size: Any) -> None:
    """`split_qkv`, `rope` and `kv_write` give the same, but for the last bit of a multiply and add."""
    tokens = Tokens(*size)
    arrays = tokens.on_device()
    rope_write(*arrays)
    simple = tokens.on_device()
    count, (q_heads, kv_heads), d = len(tokens.slots), tokens.heads, tokens.d
    k, v = poisoned(count, kv_heads, d), poisoned(count, kv_heads, d)
    q = poisoned(count, q_heads, d)
    split_qkv(simple[0], q, k, v)
    rope(q, k, simple[1], simple[2])
    kv_write(k, v, simple[3], simple[5], simple[6])
    kept = tokens.slots >= 0
    np.testing.assert_allclose(cp.asnumpy(arrays[4])[kept], cp.asnumpy(q)[kept], rtol=0, atol=2e-6)
    np.testing.assert_array_equal(cp.asnumpy(arrays[6]), cp.asnumpy(simple[6]))
    ours, theirs = (cp.asnumpy(a[5]).astype(np.int64) for a in (arrays, simple))
    np.testing.assert_array_equal(ours == POISON, theirs == POISON)
    assert np.abs(ours - theirs).max() <= 1
    assert (ours != theirs).mean() < 0.01


def test_a_token_gives_the_same_bits_alone_and_in_a_batch() -> None:
    tokens = Tokens(7, (4, 2), 32, 3, "none")
    together = tokens.run()
    for row in (0, 3, 6):
        alone = Tokens(7, (4, 2), 32, 3, "none")
        for name in ("qkv", "positions", "slots"):
            setattr(alone, name, getattr(alone, name)[row : row + 1])
        got = alone.run()
        np.testing.assert_array_equal(got["q"][0], together["q"][row])
        slot = divmod(int(alone.slots[0]), 3)
        for name in ("keys", "values"):
            np.testing.assert_array_equal(got[name][slot], together[name][slot])


# ---------------- what is refused
SPECS: dict[str, tuple[tuple[int, ...], Any]] = {
    **{"qkv": ((3, 64), F32), "positions": ((3,), I32), "inv_freq": ((4,), F32), "slots": ((3,), I64)},
    **{"q": ((3, 4, 8), F32), "key_cache": ((5, 2, 2, 8), U16), "value_cache": ((5, 2, 2, 8), U16)},
}


def _call(**changed: Any) -> Any:
    made = {name: cp.zeros(*spec) for name, spec in SPECS.items()}
    if "slots" not in changed:
        made["slots"] = cp.asarray(np.array([4, -1, 9], I64))
    return rope_write(*(made | changed).values())


@pytest.mark.parametrize("name", SPECS)
def test_wrong_arrays(name: str) -> None:
    assert _call().shape == (3, 4, 8)
    shape, dtype = SPECS[name]
    wider = (*shape[:-1], 2 * shape[-1])
    for wrong, says in (
        (cp.zeros(shape, np.float64), "float64"),
        (cp.zeros((*shape, 1), dtype), re.escape(str((*shape, 1)))),
        (cp.zeros(wider, dtype)[..., ::2], "C-contiguous"),
        (np.zeros(shape, dtype), "NumPy"),
        (cp.zeros(wider, dtype), "must be"),
    ):
        with pytest.raises(ValueError, match=f"rope_write: .*{says}"):
            _call(**{name: wrong})


def test_sizes_that_do_not_fit_each_other() -> None:
    with pytest.raises(ValueError, match=r"the width of qkv is 65; it must be \(Hq \+ 2 Hk\) D = 64"):
        _call(qkv=cp.zeros((3, 65), F32))
    with pytest.raises(ValueError, match="the length of inv_freq is 5; it must be D / 2 = 4"):
        _call(inv_freq=cp.zeros(5, F32))


def test_no_tokens() -> None:
    none = {
        name: cp.zeros((0, *SPECS[name][0][1:]), SPECS[name][1])
        for name in ("qkv", "positions", "slots", "q")
    }
    assert _call(**none).shape == (0, 4, 8)


# ---------------- NVIDIA's compiler
@pytest.mark.parametrize("arch", ["compute_75", "compute_80", "compute_90", "compute_120"])
def test_nvidias_compiler_accepts_it(arch: str) -> None:
    try:
        done = nvrtc.compile_source(source.text("rope_write"), arch)
    except nvrtc.NvrtcMissing as missing:
        pytest.skip(str(missing))
    assert done.ok, done.log
    assert done.log == ""
    assert ".entry rope_write(" in done.ptx


@pytest.mark.gpu
@pytest.mark.skipif(not is_gpu, reason="no NVIDIA GPU")
def test_in_a_graph() -> None:
    """Recorded, and started with other slots and positions in the same arrays."""
    first, second = Tokens(9, (9, 3), 64, 16, "none"), Tokens(9, (9, 3), 64, 16, "none")
    second.slots, second.positions = first.slots[::-1].copy(), first.positions + 3
    second.slots[4:] = -1
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        arrays = first.on_device()
        rope_write(*arrays)
        stream.begin_capture()
        rope_write(*arrays)
        graph = stream.end_capture()
        for array, values in zip(arrays, second.on_device(), strict=True):
            array[...] = values
        graph.launch(stream)
        stream.synchronize()
    got = dict(zip(("q", "keys", "values"), map(cp.asnumpy, arrays[4:]), strict=True))
    case = Case("graph", lambda: got, second.want, BF16)
    assert max(case.errors().values()) <= BF16
