"""One token through the whole model in one launch: beside NumPy in float64 and beside the simple path.

The models are small, and their sizes are such that rows are cut into 1, 2, 4 or 8 pieces, or do not fill the last one.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import tempfile
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.engine.models import GOLDEN, GoldenModel, build, load
from tinyvllm_ref import bf16
from tinyvllm_ref.batch import make_inputs
from tinyvllm_ref.checkpoint.weights import open_checkpoint
from tinyvllm_ref.config import ModelConfig
from tinyvllm_ref.device import cp, is_gpu
from tinyvllm_ref.kernels import decode_step as module
from tinyvllm_ref.kernels import source
from tinyvllm_ref.kernels.decode_step import DecodeStep, pieces_of
from tinyvllm_ref.kv_cache import KVCache
from tinyvllm_ref.model import Weights

from .cases import f64, poisoned, random

assert GOLDEN  # on the path from now on
from numpy_llama import _norm, _rotate, _round, forward  # noqa: E402

NO_CARD = not is_gpu or int(cp.cuda.Device().compute_capability) < 90
HERE = pytest.param("here", marks=pytest.mark.skipif(is_gpu, reason="the emulation is not used on a card"))
CARD = pytest.param(
    "card", marks=[pytest.mark.gpu, pytest.mark.skipif(NO_CARD, reason="no GPU of compute capability 9.0")]
)
TINY_STORIES = Path(__file__).resolve().parents[3] / "data" / "tiny-stories"
NOTHING = 0x7FC0  # NaN: what lies in slots that nobody has written

# Queries and the weights of attention are rounded to bfloat16 here and not in the simple path, and roundings that fall
# on the other side of a tie go on through the layers: so two right answers differ by this much of the root mean square
# of the logits, at most and in the root mean square. A wrong column, row or weight gives far more.
NEAR, NEAR_ON_THE_WHOLE = 0.08, 0.02
NEAR_KEYS = 0.06  # of a layer's keys or values of a token


# ---------------- models
@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@functools.cache
def model_of(name: str) -> SimpleNamespace:
    """Its config, the checkpoint's tensors, and what the engine makes of them."""
    folder = TINY_STORIES if name == "tiny-stories" else Path(_folder().name) / name
    if name != "tiny-stories":
        build(GoldenModel(name, MODELS[name], seed=sum(map(ord, name))), folder)
    config, views = open_checkpoint(folder)
    return SimpleNamespace(config=config, views=views, model=load(folder))


def _sizes(
    h: int, f: int, heads: tuple[int, int], d: int, v: int, layers: int, tied: bool = False
) -> dict[str, Any]:
    return {
        **{"hidden_size": h, "intermediate_size": f, "num_attention_heads": heads[0], "head_dim": d},
        **{"num_key_value_heads": heads[1], "vocab_size": v, "num_hidden_layers": layers},
        "tie_word_embeddings": tied,
    }


MODELS = {
    # the least there can be
    "least": _sizes(8, 8, (1, 1), 16, 3, 1),
    "small": _sizes(40, 24, (2, 1), 16, 9, 1),
    "small, H in 2": _sizes(1032, 8, (1, 1), 16, 5, 1),
    "group 1": _sizes(72, 200, (4, 4), 16, 311, 2),
    "group 3": _sizes(192, 328, (6, 2), 32, 257, 3, tied=True),
    "group 4, F in 2": _sizes(104, 1032, (4, 1), 48, 313, 2, tied=True),
    "group 8": _sizes(136, 264, (16, 2), 16, 99, 3),
    "H in 2": _sizes(1032, 1544, (3, 1), 64, 257, 2),
    "q in 2": _sizes(264, 520, (8, 1), 256, 131, 2),
    "H and F in 4": _sizes(2056, 2064, (4, 2), 96, 133, 1, tied=True),
    "H in 2, F in 4": _sizes(1536, 4096, (8, 2), 64, 509, 1),
    "F in 8": _sizes(256, 8184, (4, 1), 128, 100, 1),
}


# ---------------- steps
class Steps:
    """A DecodeStep, and a cache of shuffled blocks that holds NaN where nothing has been written."""

    def __init__(self, name: str, tokens: int, block_size: int, blocks: int | None = None) -> None:
        found = model_of(name)
        self.config, self.model = found.config, found.model
        self.step = DecodeStep(self.config, self.model.weights, blocks)
        needed = -(-tokens // block_size)
        order = random("blocks", name, tokens, block_size).permutation(needed + 2)
        self.table = order[:needed].astype(np.int32)
        self.block_size = block_size
        self.kv = KVCache(self.config, needed + 2, block_size)
        self.kv.keys.fill(NOTHING)
        self.kv.values.fill(NOTHING)
        self.on_device = cp.asarray(self.table)

    def __call__(self, token: int, context: int) -> tuple[np.ndarray, int]:
        """Logits of the step, and the token that it chose."""
        logits, chosen = poisoned(self.config.vocab_size), poisoned(1, dtype=np.int32)
        ids, length = (cp.asarray(np.array([value], np.int32)) for value in (token, context))
        cache = (self.kv.keys, self.kv.values)
        assert self.step(ids, self.on_device, length, *cache, logits, chosen) is chosen
        return cp.asnumpy(logits), int(cp.asnumpy(chosen)[0])

    def simple(self, tokens: list[int], start: int) -> np.ndarray:
        """The simple path's logits of the last token, on the same kind of cache."""
        decodes = int(len(tokens) == 1)
        table = self.table.tolist()
        inputs = make_inputs([tokens], [start], [table], [len(tokens) - 1], decodes, self.block_size)
        return cp.asnumpy(self.model.forward(inputs, self.kv))[0].copy()

    def fill(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Keys and values (layers, tokens, Hk, D) of the first tokens; nothing of those after them."""
        for cache, given in ((self.kv.keys, keys), (self.kv.values, values)):
            whole = np.full(cache.shape, NOTHING, np.uint16)
            slots = np.full(
                (len(given), self.table.size * self.block_size, *given.shape[2:]), NOTHING, np.uint16
            )
            slots[:, : given.shape[1]] = given
            whole[:, self.table] = slots.reshape(len(given), -1, *cache.shape[2:])
            cache[...] = cp.asarray(whole)

    def written(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values (layers, slots in the sequence's order, Hk, D); all others must be what they were."""
        found = []
        for cache in map(cp.asnumpy, (self.kv.keys, self.kv.values)):
            others = np.delete(cache, self.table, axis=1)
            assert (others == NOTHING).all()
            found.append(cache[:, self.table].reshape(len(cache), -1, *cache.shape[3:]))
        return found[0], found[1]


def _ids(name: str, count: int) -> list[int]:
    return random("ids", name).integers(0, model_of(name).config.vocab_size, count).tolist()


def _distance(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference over the root mean square of `want`."""
    assert np.isfinite(got).all()
    return float(np.abs(f64(got) - f64(want)).max() / np.sqrt(np.mean(f64(want) ** 2)))


def _check_logits(got: np.ndarray, chosen: int, want: np.ndarray, near: float = NEAR) -> None:
    assert _distance(got, want) <= near
    if len(want) > 50:
        assert np.mean((f64(got) - f64(want)) ** 2) <= NEAR_ON_THE_WHOLE**2 * np.mean(f64(want) ** 2)
    assert chosen == int(got.argmax())
    scale = np.sqrt(np.mean(f64(want) ** 2))
    assert want.max() - want[chosen] <= 2 * near * scale  # the same one, but where two are as good


def _check_cache(ours: Steps, theirs: Steps, context: int, since: int = 0) -> None:
    """Of all tokens the first layer's; of those from `since` on all layers'."""
    for got, want in zip(ours.written(), theirs.written(), strict=True):
        assert (got[:, context:] == NOTHING).all()
        for layer in range(len(got)):
            for token in range(since, context):
                assert _distance(got[layer, token], want[layer, token]) <= NEAR_KEYS
        # The first layer's inputs are the same, so that its keys differ by one step of bfloat16 at most, and rarely. A
        # card adds up in another order: where products nearly cancel, by a step of numbers of the usual size.
        a, b = (x[0, :context] for x in (got, want))
        usual = np.sqrt(np.mean(f64(b) ** 2, axis=(-2, -1), keepdims=True))
        assert (np.abs(f64(a) - f64(b)) <= 2.0**-7 * np.maximum(np.abs(f64(b)), usual)).all()
        if not is_gpu:
            steps = np.abs(a.astype(np.int64) - b.astype(np.int64))
            assert steps.max() <= 1
            assert (steps > 0).mean() <= 0.02


def _fast() -> Any:
    return nullcontext() if is_gpu else cp.checks("fast")


# ---------------- values
def _decode(name: str, count: int, block_size: int, blocks: int | None = None) -> None:
    """From the first token on, one at a time: NumPy sees the whole sequence, the simple path what we see."""
    ours, theirs = Steps(name, count, block_size, blocks), Steps(name, count, block_size)
    ids, found = _ids(name, count), model_of(name)
    whole = forward(found.config, found.views, ids, rounded=True)
    for i, token in enumerate(ids):
        logits, chosen = ours(token, i + 1)
        _check_logits(logits, chosen, whole[i])
        _check_logits(logits, chosen, theirs.simple([token], i))
    _check_cache(ours, theirs, count)


# (model, tokens, block size)
SEQUENCES = (
    ("least", 5, 1),
    ("group 1", 35, 16),
    ("group 3", 12, 4),
    ("group 4, F in 2", 9, 3),
    ("group 8", 17, 1),
    ("H in 2", 3, 2),
    ("q in 2", 3, 1),
    ("H in 2, F in 4", 2, 16),
    ("F in 8", 2, 16),
    ("tiny-stories", 6, 4),
)
LONG_SEQUENCES = (("group 3", 70, 16), ("H and F in 4", 5, 2), ("F in 8", 9, 4), ("tiny-stories", 40, 16))


@pytest.mark.parametrize("where", [HERE, CARD])
@pytest.mark.parametrize(("name", "tokens", "block_size"), SEQUENCES)
def test_a_sequence_from_its_first_token_on(where: str, name: str, tokens: int, block_size: int) -> None:
    with warnings.catch_warnings(), _fast():
        warnings.simplefilter("error")
        _decode(name, tokens, block_size)


@pytest.mark.slow
@pytest.mark.parametrize("where", [HERE, CARD])
@pytest.mark.parametrize(("name", "tokens", "block_size"), LONG_SEQUENCES)
def test_longer_sequences(where: str, name: str, tokens: int, block_size: int) -> None:
    with _fast():
        _decode(name, tokens, block_size)


@pytest.mark.skipif(is_gpu, reason="the emulation is not used on a card")
@pytest.mark.parametrize(("name", "tokens"), [("least", 2), ("small", 3), ("small, H in 2", 2)])
def test_with_every_access_checked(name: str, tokens: int) -> None:
    with warnings.catch_warnings(), cp.checks("full"):
        warnings.simplefilter("error")
        _decode(name, tokens, 2)
        # Each weight by itself, so that what is read past its end is seen.
        steps = Steps(name, 1, 2)
        weights = steps.model.weights
        apart = {key: cp.asarray(cp.asnumpy(weight)) for key, weight in weights.items()}
        steps.step = DecodeStep(steps.config, Weights(steps.config, apart, apart.pop("inv_freq")))
        np.testing.assert_array_equal(steps(1, 1)[0], Steps(name, 1, 2)(1, 1)[0])


# ---------------- contexts that are long
def _one_step(found: SimpleNamespace, token: int, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Logits in float64 of a token after those whose keys and values (layers, tokens, Hk, D) are in the cache."""
    config = found.config
    weight = functools.partial(_weight, found.views)
    group, dim = config.num_attention_heads // config.num_key_value_heads, config.head_dim
    frequencies = f64(cp.asnumpy(found.model.weights["inv_freq"]).astype(np.float32))
    angles = f64(np.float32(keys.shape[1]) * frequencies.astype(np.float32))
    turn = functools.partial(_rotate, cos=np.cos(angles), sin=np.sin(angles))
    x = weight("model.embed_tokens")[token]
    for layer in range(config.num_hidden_layers):
        own = functools.partial(weight, layer=layer)
        h = _round(_norm(x, own("input_layernorm"), config.rms_norm_eps))
        q, k, v = (own(f"self_attn.{name}_proj") @ h for name in "qkv")
        k, v = _round(turn(k.reshape(-1, dim))), _round(v.reshape(-1, dim))
        k, v = (np.concatenate([f64(old[layer]), new[None]]) for old, new in ((keys, k), (values, v)))
        k, v = (np.repeat(array, group, axis=1) for array in (k, v))
        scores = np.einsum("hd,jhd->hj", turn(q.reshape(-1, dim)), k) / np.sqrt(dim)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        attended = np.einsum("hj,jhd->hd", weights / weights.sum(axis=1, keepdims=True), v)
        x = x + own("self_attn.o_proj") @ _round(attended.ravel())
        h = _round(_norm(x, own("post_attention_layernorm"), config.rms_norm_eps))
        gate, up = own("mlp.gate_proj") @ h, own("mlp.up_proj") @ h
        x = x + own("mlp.down_proj") @ _round(gate / (1 + np.exp(-gate)) * up)
    head = weight("model.embed_tokens" if config.tie_word_embeddings else "lm_head")
    return np.asarray(head @ _round(_norm(x, weight("model.norm"), config.rms_norm_eps)))


def _weight(views: Any, name: str, layer: int | None = None) -> np.ndarray:
    return f64(views[f"{name}.weight" if layer is None else f"model.layers.{layer}.{name}.weight"].numpy())


def _defined(name: str) -> int:
    return int(re.findall(rf"^#define {name} (\d+)$", source.read("decode_step.cu"), re.MULTILINE)[0])


# Up to FEW no two blocks share a head's keys, up to SOME a few do, then many.
FEW, SOME = _defined("FEW_KEYS"), _defined("SOME_KEYS")
# (model, contexts, block size): where blocks are large, some share has no keys, or none but the new token.
CONTEXTS = (
    ("group 3", (64, FEW - 1, FEW, FEW + 1, 1000, SOME, SOME + 1, SOME + 400), 16),
    ("group 1", (FEW, FEW + 1, SOME + 1, 8300), 1),  # more blocks than a block keeps the numbers of
    ("group 4, F in 2", (FEW + 88, 1100, SOME + 52), 100),
    ("group 8", (FEW + 1, 769, 1025, SOME + 1), 256),
    ("q in 2", (FEW + 1, SOME + 1), 256),
)


@pytest.mark.parametrize("where", [HERE, CARD])
@pytest.mark.parametrize(("name", "contexts", "block_size"), CONTEXTS)
def test_long_contexts(where: str, name: str, contexts: tuple[int, ...], block_size: int) -> None:
    found = model_of(name)
    shape = (
        found.config.num_hidden_layers,
        max(contexts),
        found.config.num_key_value_heads,
        found.config.head_dim,
    )
    rng = random("long", name)
    keys, values = (bf16.float_to_bf16(rng.standard_normal(shape).astype(np.float32)) for _ in range(2))
    with _fast():
        ours = Steps(name, max(contexts), block_size)
        theirs = Steps(name, max(contexts), block_size)
        for context, token in zip(contexts, _ids(name, len(contexts)), strict=True):
            for steps in (ours, theirs):
                steps.fill(keys[:, : context - 1], values[:, : context - 1])
            logits, chosen = ours(token, context)
            _check_logits(logits, chosen, theirs.simple([token], context - 1))
            _check_logits(
                logits, chosen, _one_step(found, token, keys[:, : context - 1], values[:, : context - 1])
            )
            _check_cache(ours, theirs, context, context - 1)


# ---------------- the path of cards, in the emulation: a copying warp and the copy engine's ring
@pytest.fixture
def copy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_EMULATED_COPIES", True)


IN_EMULATION = pytest.mark.skipif(is_gpu, reason="the emulation is not used on a card")


@IN_EMULATION
@pytest.mark.parametrize(
    ("name", "tokens", "block_size", "stages"),
    [
        ("group 3", 4, 16, 6),
        *(
            pytest.param(*sizes, marks=pytest.mark.slow)
            for sizes in (
                *(
                    ("least", 5, 1, 6),
                    ("group 1", 35, 16, 3),
                    ("group 4, F in 2", 9, 3, 2),
                    ("group 8", 17, 1, 4),
                ),
                *(("H in 2", 3, 2, 3), ("q in 2", 3, 1, 2), ("H and F in 4", 5, 2, 2), ("F in 8", 9, 16, 2)),
                ("tiny-stories", 40, 16, 6),
            )
        ),
    ],
)
def test_with_a_copying_warp(
    name: str, tokens: int, block_size: int, stages: int, copy_engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STAGES", stages)
    with warnings.catch_warnings(), _fast():
        warnings.simplefilter("error")
        _decode(name, tokens, block_size)


@IN_EMULATION
@pytest.mark.parametrize(
    ("name", "warps"),
    [pytest.param("least", 8, marks=pytest.mark.slow), ("small", 8), ("small, H in 2", 2)],
)
def test_with_a_copying_warp_and_every_access_checked(
    name: str, warps: int, copy_engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WARPS", warps)
    with warnings.catch_warnings(), cp.checks("full"):
        warnings.simplefilter("error")
        _decode(name, 3, 2)


@IN_EMULATION
@pytest.mark.parametrize(
    ("name", "contexts", "block_size"),
    [
        ("group 3", (FEW + 1, SOME + 1), 16),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in CONTEXTS),
    ],
)
def test_long_contexts_with_a_copying_warp(
    name: str, contexts: tuple[int, ...], block_size: int, copy_engine: None
) -> None:
    test_long_contexts("here", name, contexts, block_size)


TAKE = "wait_phase(ring.full + ring.stage, ring.phase);\n"
GIVE = "if (threadIdx.x % 32 == 0) arrive(ring.empty + ring.stage);\n"
GIVE_KEYS = "if (IS_FIRST_LANE) arrive(ring.empty + ring.stage);\n"
ANNOUNCED = "min(step, share.rows - r) * (2 * WIDTH)"
# A line of the kernel, what takes its place, and what the checks say of it.
WRONG = [
    (f"        {TAKE}        const", "        const", "DataRace", "a copy to it may still be on its way"),
    ("        wait_phase(ring.empty + ring.stage, ring.phase ^ 1u);\n", "", "DataRace", "may come too early"),
    ("        if (layer == 0) TABLE_BARRIER(sync);\n", "", "DataRace", r"data race on table\[0\]"),
    (
        "apart ? 2 * bytes : bytes",
        "bytes",
        "KernelFault",
        r"640 bytes come to full\[\d\], which has been told of 0",
    ),
]
MORE_WRONG = [
    (f"            {TAKE}", "", "DataRace", r"copy16_async_or_zero\(to"),
    (f"__syncwarp();\n        {GIVE}", GIVE, "DataRace", "may come too early"),
    (
        f"__syncwarp();\n            {GIVE_KEYS}",
        GIVE_KEYS,
        "DataRace",
        "two threads use it|may come too early",
    ),
    (
        "            arrive(full, 31);\n",
        "",
        "BarrierDivergence",
        r"for full\[0\], which lacks 31 of 32 arrivals",
    ),
    (ANNOUNCED, "step * (2 * WIDTH)", "OutOfBounds", "reach past its end"),
    (
        "            arrive_with_copies(ring.full + ring.stage);\n",
        "",
        "BarrierDivergence",
        "lacks 32 of 32 arrivals",
    ),
    ("        show_barriers();\n", "", "KernelFault", "show_barriers has not shown"),
    (
        "            before_bulk_copies();  // keys may",
        "            // keys may",
        "KernelFault",
        "nobody who knew of it",
    ),
    ("    BLOCK_BARRIER();\n    if (!*flag) return;\n", "    if (!*flag) return;\n", "DataRace", "shared"),
]


@IN_EMULATION
@pytest.mark.parametrize(
    ("old", "new", "kind", "says"),
    [*WRONG, *(pytest.param(*wrong, marks=pytest.mark.slow) for wrong in MORE_WRONG)],
)
def test_a_copying_warp_that_is_wrong(old: str, new: str, kind: str, says: str, copy_engine: None) -> None:
    text = source.read("decode_step.cu")
    assert text.count(old) == 1, old
    steps = Steps("small", 3, 2)
    steps.step = source.with_headers(steps.step, {"decode_step.cu": text.replace(old, new)})

    def run() -> None:
        for context in (1, 2, 3):
            steps(5, context)

    with cp.checks("full"), pytest.raises(getattr(cp, kind), match=says):
        run()


# ---------------- the token that is chosen
@pytest.mark.parametrize("where", [HERE, CARD])
@pytest.mark.parametrize("name", ["group 1", "H in 2"])
def test_ties_and_what_is_not_a_number(where: str, name: str) -> None:
    """As numpy.argmax: the lowest index of the largest, and the first NaN before all."""
    with _fast():
        steps = Steps(name, 4, 4)
        head = steps.model.weights.lm_head
        before, vocab = cp.asnumpy(head), steps.config.vocab_size
        try:
            plain, _ = steps(5, 1)
            best, worst = before[plain.argmax()], before[plain.argmin()]
            assert plain.min() < 0
            for rows, row in (
                (range(vocab), worst),  # all are equal, and negative
                ((vocab - 1,), best * 1),
                ((vocab - 1, vocab // 2, vocab // 2 + 1), best),
                ((3, vocab - 1), np.full_like(best, 0x7FC0)),
                ((vocab - 1,), np.full_like(best, 0xFFC0)),
            ):
                changed = before.copy()
                changed[list(rows)] = row
                head[...] = cp.asarray(changed)
                logits, chosen = steps(5, 1)
                assert chosen == int(np.argmax(logits))
                others = np.delete(np.arange(vocab), list(rows))
                np.testing.assert_array_equal(logits[others], plain[others])
                assert len(set(logits[list(rows)].view(np.uint32).tolist())) == 1
            changed = np.tile(worst, (vocab, 1))  # all are negative, and the first is not the largest
            changed[0] = bf16.float_to_bf16(2 * bf16.bf16_to_float(worst))
            head[...] = cp.asarray(changed)
            logits, chosen = steps(5, 1)
            assert chosen == 1
            assert logits.max() < 0
        finally:
            head[...] = cp.asarray(before)


@pytest.mark.parametrize("where", [HERE, CARD])
def test_every_row_of_the_head_can_be_chosen(where: str) -> None:
    with _fast():
        steps = Steps("group 8", 1, 1)
        head = steps.model.weights.lm_head
        before = cp.asnumpy(head)
        try:
            _, chosen = steps(7, 1)
            best = bf16.float_to_bf16(2 * bf16.bf16_to_float(before[chosen]))
            for row in range(steps.config.vocab_size):
                changed = before.copy()
                changed[row] = best
                head[...] = cp.asarray(changed)
                assert steps(7, 1)[1] == row
        finally:
            head[...] = cp.asarray(before)


# ---------------- launches one after the other
def _state(step: DecodeStep) -> tuple[int, int, set[int]]:
    """The next exchange, blocks that have ended, and the exchanges that the words are of; without shared attention."""
    number, ended = cp.asnumpy(step._meeting).tolist()
    config = step.config
    count = (
        config.q_size * 3 // 2 + 2 * config.kv_size + 2 * config.hidden_size + config.intermediate_size // 2
    )
    words = cp.asnumpy(step._exchange).view(np.uint32).reshape(-1, 2)
    assert not words[count:].any()
    return number, ended, set(words[:count, 1].tolist())


@pytest.mark.parametrize("where", [HERE, CARD])
def test_exchanges_are_counted_through(where: str) -> None:
    """One a layer, over all launches, and over the end of 32 bits."""
    with _fast():
        steps, again = Steps("group 3", 8, 4), Steps("group 3", 8, 4)
        assert _state(steps.step) == (1, 0, {0})
        for launch, token in enumerate(_ids("group 3", 5)):
            logits, chosen = steps(token, launch + 1)
            assert _state(steps.step) == (1 + 3 * (launch + 1), 0, {3 * (launch + 1)})
            if launch == 2:
                again.step._meeting[...] = cp.asarray(np.array([2**32 - 2, 0], np.uint32))
            other, other_chosen = again(token, launch + 1)
            np.testing.assert_array_equal(other, logits)
            assert other_chosen == chosen
        assert _state(again.step) == (7, 0, {6})  # 2^32 - 2, 2^32 - 1, 0, then from 1 on: nine layers


@pytest.mark.parametrize("where", [HERE, CARD])
def test_what_earlier_launches_left_is_not_read(where: str) -> None:
    """Contexts that are divided in one way, then in others, then as before: each as it is from fresh memory."""
    rng = random("left")
    with _fast():
        steps, longest = Steps("group 3", SOME + 9, 16), SOME + 9
        keys, values = (
            bf16.float_to_bf16(rng.standard_normal((3, longest, 2, 32)).astype(np.float32)) for _ in range(2)
        )
        for context in (SOME + 9, 7, FEW + 5, SOME + 1, FEW + 300, 7, SOME + 9):
            fresh = Steps("group 3", longest, 16)
            for some in (steps, fresh):
                some.fill(keys[:, : context - 1], values[:, : context - 1])
            (got, chosen), (want, want_chosen) = steps(13, context), fresh(13, context)
            np.testing.assert_array_equal(got, want)
            assert chosen == want_chosen


@pytest.mark.parametrize("where", [HERE, CARD])
def test_two_models_take_turns(where: str) -> None:
    names = ("group 3", "group 8")
    with _fast():
        alone = {}
        for name in names:
            steps = Steps(name, 6, 4)
            alone[name] = [steps(token, i + 1) for i, token in enumerate(_ids(name, 6))]
        together = {name: Steps(name, 6, 4) for name in names}
        for i in range(6):
            for name in names:
                logits, chosen = together[name](_ids(name, 6)[i], i + 1)
                np.testing.assert_array_equal(logits, alone[name][i][0])
                assert chosen == alone[name][i][1]


@pytest.mark.parametrize("where", [HERE, CARD])
@pytest.mark.parametrize("context", [6, 700])
def test_the_same_bits_each_time(where: str, context: int) -> None:
    """However long a block has to wait for the others."""
    rng = random("again")
    with _fast():
        steps = Steps("group 3", context, 16)
        shape = (3, context - 1, 2, 32)
        steps.fill(*(bf16.float_to_bf16(rng.standard_normal(shape).astype(np.float32)) for _ in range(2)))
        first, cache = steps(11, context), steps.written()
        for _ in range(20 if is_gpu else 3):
            logits, chosen = steps(11, context)
            np.testing.assert_array_equal(logits, first[0])
            assert chosen == first[1]
            for got, want in zip(steps.written(), cache, strict=True):
                np.testing.assert_array_equal(got, want)


@pytest.mark.gpu
@pytest.mark.skipif(NO_CARD, reason="no GPU of compute capability 9.0")
@pytest.mark.parametrize("blocks", [1, 2, 7, 31, 100])
@pytest.mark.parametrize("name", ["group 3", "q in 2", "H in 2, F in 4", "tiny-stories"])
def test_fewer_blocks_than_multiprocessors(name: str, blocks: int) -> None:
    _decode(name, 5, 4, blocks)


# ---------------- what it takes and what is refused
@pytest.mark.parametrize(
    ("width", "pieces"), [(8, 1), (1024, 1), (1032, 2), (2048, 2), (2056, 4), (4096, 4), (4104, 8), (8192, 8)]
)
def test_pieces_of_a_row(width: int, pieces: int) -> None:
    assert pieces_of(width) == pieces


def _config(**changed: Any) -> ModelConfig:
    return dataclasses.replace(model_of("group 3").config, **changed)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, ""),
        ({"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "head_dim": 64}, ""),
        ({"hidden_size": 196}, "hidden_size is 196; it must be a multiple of 8 up to 8192"),
        ({"hidden_size": 8200}, "hidden_size is 8200; it must be"),
        ({"intermediate_size": 1001}, "intermediate_size is 1001; it must be"),
        ({"intermediate_size": 14336}, "intermediate_size is 14336; it must be"),
        (
            {"num_attention_heads": 128, "num_key_value_heads": 16, "head_dim": 128},
            "q_size is 16384; it must be",
        ),
        ({"head_dim": 24}, "heads are 6 on 2 of 24 columns, which decode_attention does not support"),
        ({"num_attention_heads": 18}, "heads are 18 on 2 of 32 columns, which"),
        (
            {"vocab_size": 10**7},
            r"the shared memory of a block is \d+; it must be at most \d+",
        ),
    ],
)
@pytest.mark.skipif(is_gpu and NO_CARD, reason="a card without bulk copies takes none")
def test_which_models_it_takes(changed: dict[str, Any], reason: str) -> None:
    config = _config(**changed)
    said = DecodeStep.unsupported(config)
    assert re.match(reason, said)
    assert bool(said) == bool(reason)
    if reason:
        with pytest.raises(ValueError, match="decode_step: " + reason):
            DecodeStep(config, {})


@pytest.mark.skipif(is_gpu, reason="a card has more than one block")
def test_blocks_that_could_not_wait_for_each_other() -> None:
    with pytest.raises(
        ValueError, match="decode_step: blocks is 2; it must be from 1 to 1, for all run at the same"
    ):
        DecodeStep(_config(), {}, blocks=2)


@pytest.mark.parametrize(
    ("changed", "kilobytes", "stages"),
    [
        ({"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}, 227, 6),
        ({"hidden_size": 3072, "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128}, 227, 5),
        ({"hidden_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256}, 227, 4),
        ({"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}, 99, 2),
    ],
)
def test_the_ring_has_the_stages_that_there_is_memory_for(
    changed: dict[str, Any], kilobytes: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a card with 132 multiprocessors, at compute capability 9.0 and 12.0."""
    monkeypatch.setattr(module, "is_gpu", True)
    limit = kilobytes * 1024 - 4096
    monkeypatch.setattr(module, "_shared_limit", lambda: limit)
    warps, chosen, shared = module._layout(_config(intermediate_size=8192, vocab_size=128256, **changed), 132)
    assert (warps, chosen) == (8, stages)
    assert limit - 32768 < shared <= limit


def test_an_older_card(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(Device=lambda: SimpleNamespace(compute_capability="89"))
    monkeypatch.setattr(module, "is_gpu", True)
    monkeypatch.setattr(module, "cp", SimpleNamespace(cuda=card))
    assert DecodeStep.unsupported(_config()) == "compute capability is 89; it must be 90 or more"


def test_a_weight_that_vectors_can_not_read() -> None:
    model = model_of("least").model
    weights = type(model.weights)(model.config, dict(model.weights), model.weights["inv_freq"])
    shifted = cp.zeros(8 * 16 + 1, np.uint16)[1:].reshape(8, 16)
    weights["layers.0.o_proj"] = shifted
    with pytest.raises(ValueError, match=r"decode_step: a weight starts at 0x.*, no multiple of 16 bytes"):
        DecodeStep(model.config, weights)


@pytest.mark.parametrize(
    ("which", "array", "message"),
    [
        (0, ((2,), np.int32), r"ids has shape \(2,\) .*; it must be int32 of shape \(1,\)"),
        (0, ((1,), np.int64), "ids has .* int64; it must be int32"),
        (1, ((1, 3), np.int32), "block_table has shape"),
        (2, ((1,), np.int64), "context_len has .* int64"),
        (3, ((2, 3, 4, 4, 16), np.float32), "keys has .* float32; it must be uint16"),
        (4, ((2, 3, 5, 4, 16), np.uint16), r"values has shape \(2, 3, 5, 4, 16\)"),
        (5, ((310,), np.float32), r"logits has shape \(310,\) .* = \(311,\)"),
        (6, ((1,), np.int64), "chosen has .* int64; it must be int32"),
        (3, ((1, 3, 4, 4, 16), np.uint16), r"keys has shape \(1, 3, 4, 4, 16\) .* = \(2, NB, BS, 4, 16\)"),
        (3, ((2, 3, 4, 2, 16), np.uint16), r"keys has shape \(2, 3, 4, 2, 16\)"),
        (4, ((2, 3, 4, 4, 32), np.uint16), r"values has shape \(2, 3, 4, 4, 32\)"),
    ],
)
def test_what_is_refused(which: int, array: tuple[tuple[int, ...], Any], message: str) -> None:
    specs = [((1,), np.int32), ((3,), np.int32), ((1,), np.int32), *[((2, 3, 4, 4, 16), np.uint16)] * 2]
    specs += [((311,), np.float32), ((1,), np.int32)]
    arrays = [cp.zeros(*(array if i == which else spec)) for i, spec in enumerate(specs)]
    with pytest.raises(ValueError, match=f"decode_step: {message}"):
        DecodeStep(model_of("group 1").config, model_of("group 1").model.weights)(*arrays)
