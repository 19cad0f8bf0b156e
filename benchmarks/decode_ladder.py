"""How a decode step of a Llama gets from the simple path to the fast one: each step's time, predicted and measured.

    python benchmarks/decode_ladder.py --write benchmarks/decode_ladder.md

Needs this repository, CuPy and a card of compute capability 8.0 or more. Every rung of the ladder computes the same
decode step: the same weights, cache, tokens and contexts. What a rung gives is compared with the simple path first,
with outputs and the slots to be written poisoned; one that is wrong is given no time, and the exit status is 1. A
time is the median of steps between two events, the device idle before; rates are shares of what the card reads and
multiplies in the same run.

Where there is no card it is a rehearsal: the same launches in the emulation, compared in the same way, without times.

    python benchmarks/decode_ladder.py --model data/tiny-stories --batch 1,3 --context 20-40 --prefill 16,40 --long 70

The recorded steps are those of the engine: this file looks into FastPath for them, so that nothing else is timed.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent.parent))

from tinyvllm_ref import LLM, SamplingParams  # noqa: E402
from tinyvllm_ref.assembly import Parts, build_model  # noqa: E402
from tinyvllm_ref.batch import ModelInputs, host_inputs, make_inputs  # noqa: E402
from tinyvllm_ref.bf16 import bf16_to_float  # noqa: E402
from tinyvllm_ref.buffers import Buffers  # noqa: E402
from tinyvllm_ref.capturable_blas import Products  # noqa: E402
from tinyvllm_ref.checkpoint.names import resolve  # noqa: E402
from tinyvllm_ref.checkpoint.weights import open_checkpoint  # noqa: E402
from tinyvllm_ref.config import EngineConfig, ModelConfig  # noqa: E402
from tinyvllm_ref.decode_graph import Recording, can_record  # noqa: E402
from tinyvllm_ref.decode_products import takes_norm  # noqa: E402
from tinyvllm_ref.device import cp, describe, is_gpu  # noqa: E402
from tinyvllm_ref.fast_path import FastPath, unsupported  # noqa: E402
from tinyvllm_ref.kernels import decode_rows as rows_  # noqa: E402
from tinyvllm_ref.kernels import warpgroup_linear as warpgroup  # noqa: E402
from tinyvllm_ref.kernels.add_rms_norm import add_rms_norm  # noqa: E402
from tinyvllm_ref.kernels.decode_attention import DecodeScratch, decode_attention  # noqa: E402
from tinyvllm_ref.kernels.embedding import embedding  # noqa: E402
from tinyvllm_ref.kernels.gather_rows import gather_rows  # noqa: E402
from tinyvllm_ref.kernels.kv_write import kv_write  # noqa: E402
from tinyvllm_ref.kernels.paged_attention import SPLIT, paged_attention  # noqa: E402
from tinyvllm_ref.kernels.random_normal import random_normal  # noqa: E402
from tinyvllm_ref.kernels.rms_norm import rms_norm  # noqa: E402
from tinyvllm_ref.kernels.rope import rope  # noqa: E402
from tinyvllm_ref.kernels.silu_mul import silu_mul  # noqa: E402
from tinyvllm_ref.kernels.split_qkv import split_qkv  # noqa: E402
from tinyvllm_ref.kv_cache import KVCache  # noqa: E402
from tinyvllm_ref.model import Model  # noqa: E402
from tinyvllm_ref.model_runner import all_logits, engine_checks  # noqa: E402
from tinyvllm_ref.random_model import preset_config, random_weights  # noqa: E402
from tinyvllm_ref.speed import card  # noqa: E402
from tinyvllm_ref.speed.timing import median, run_once  # noqa: E402
from tinyvllm_ref.speed.traffic import decode_bytes, prefill_flops  # noqa: E402

PARTS = ("decode", "engine", "prefill", "long")
HISTORY = HERE.with_name("decode_ladder_history.csv")
HISTORY_COLUMNS = ["what", "predicted", "measured", "date"]
TIMED = is_gpu

BLOCK_SIZE = 16
WARM, REPEATS, ENGINE_RUNS = 3, 20, 2
NAN = 0x7FFF  # in bfloat16: what must be written, and what must not be read
KEY_DEVIATION, VALUE_DEVIATION = 1.0, 4.0  # of the cache: enough for attention to show in the logits
# Of a row's root mean square. Queries and weights of the attention are rounded to bfloat16 on tensor cores: with random
# weights of 16 layers that moves logits by up to 0.035 of it (by 0.018 with attention in float32).
BOUND, TIE = 0.05, 0.1


# ---------------- what is predicted

# Measured on an H200 before there was a fast path: Llama-3.2-1B in BF16, batch 1 unless it says otherwise.
FACT_BYTES, FACT_READ = 2.4715e9, 0.546e-3  # reading as many bytes as the weights have
FACT_GEMVS, FACT_WITH_TINY, FACT_TINY = 0.818e-3, 0.955e-3, 8 * 16  # 65 products; with 8 tiny kernels a layer
FACT_GEMMS = {1: 0.831e-3, 32: 0.882e-3, 128: 0.990e-3, 256: 1.158e-3}  # by cuBLAS in a graph, by batch
FACT_ONE_BY_ONE = 1.9e-3  # products and tiny kernels from Python, one after the other, at any batch
FACT_MATRIX = 789e12  # operations a second of an 8,192-cube product

READ_RATE = FACT_BYTES / FACT_READ
TINY_LAUNCH = (FACT_WITH_TINY - FACT_GEMVS) / FACT_TINY  # 1.1 us, of a kernel that does next to nothing
GRAPH_LAUNCH = 2e-6  # of one that reads and writes rows: twice that; an assumption, not a measurement
PYTHON_LAUNCH = FACT_ONE_BY_ONE / (65 + FACT_TINY)  # 9.8 us


@dataclass(frozen=True)
class Counts:
    """What a step consists of, as far as the prediction knows.

    Attributes
    ----------
    products : int
        Launches that are matrix products; 0 where one launch does all.
    small : int
        The other launches.
    row_bytes : int
        What the small launches read and write for each token, besides weights and cache.
    recorded : bool
        All are started by one call.
    overlapped : bool
        A launch begins before the one before it is done.
    """

    products: int
    small: int
    row_bytes: int
    recorded: bool = True
    overlapped: bool = False


def predicted(config: ModelConfig, counts: Counts, batch: int, context: float) -> float:
    """Seconds of a decode step on an H200, from counts alone.

    It knows how many launches there are and how many bytes they move, nothing of how well a kernel does it: of a
    change of kernels that leaves both as they are, it says that nothing is saved.
    """
    weights = decode_bytes(config, 0, 0)
    cache = decode_bytes(config, batch, context) - weights
    if not counts.products:  # it reads without a pause
        return counts.small * GRAPH_LAUNCH + (weights + cache) / READ_RATE
    if counts.overlapped:  # of each launch half is hidden: an assumption
        launches = (counts.products + counts.small) * GRAPH_LAUNCH / 2
        return launches + (weights + cache + batch * counts.row_bytes) / READ_RATE
    products = float(np.interp(batch, [*FACT_GEMMS], [*FACT_GEMMS.values()])) * weights / FACT_BYTES
    device = products + counts.small * GRAPH_LAUNCH + (cache + batch * counts.row_bytes) / READ_RATE
    return device if counts.recorded else max(device, (counts.products + counts.small) * PYTHON_LAUNCH)


def predicted_prefill(config: ModelConfig, tokens: int, counts: Counts) -> float:
    """The same of a prompt: its operations or the weights' bytes, whichever takes longer, and the small launches."""
    moved = tokens * counts.row_bytes / READ_RATE
    computed = max(
        prefill_flops(config, 1, tokens) / FACT_MATRIX, decode_bytes(config, 1, tokens) / READ_RATE
    )
    return computed + counts.small * GRAPH_LAUNCH + moved


def counts_of(config: ModelConfig, rung: int, splits: int, batch: int = 1) -> Counts:
    """Of each rung of the ladder; `splits` are those of the simple attention of the batch."""
    layers, hidden, ffn = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    qkv, rotated = config.q_size + 2 * config.kv_size, config.q_size + config.kv_size
    products = 4 * layers + 1
    if rung == 5:
        return Counts(0, 2, 0)  # the second is `advance`
    # Bytes of a token in a layer. Simple norms read x and the stream, and write the stream and their result.
    norms = 2 * (14 if rung < 2 else 6 + 4) * hidden  # fused: the product reads the stream to add to it
    apart = 8 * qkv + 8 * rotated + 12 * config.kv_size + 6 * config.q_size  # split, rope, write, attend
    fused = 4 * qkv + 4 * config.kv_size + 2 * config.q_size
    together = rung >= 3 or (rung > 0 and splits > 1)
    activation = (6 if rung == 3 else 10) * ffn  # rung 3 rounds gate and up
    row_bytes = layers * (norms + (fused if together else apart) + activation) + 4 * config.vocab_size
    attention = 1 if together else 4 + (splits > 1)
    # Before and after the layers: embedding, last norm, gathering and argmax (two); in rung 3 also `advance`.
    around = {0: 5, 1: 5, 2: 3, 3: 4, 4: 4}[rung]
    if rung == 4:  # activations are part of the products, and up to some rows norms are
        row_bytes = layers * (norms + fused + 4 * ffn) + 4 * config.vocab_size
        small_norms = 0 if takes_norm(batch, hidden) else 2 * layers
        return Counts(products, layers + small_norms + around, row_bytes, overlapped=True)
    small = 3 + attention
    if rung == 3 and warpgroup.pays(batch, ffn, hidden, gate=True):
        row_bytes, small = row_bytes - layers * 4 * ffn, small - 1
    return Counts(products, layers * small + around, row_bytes, recorded=rung > 0)


def prefill_counts(config: ModelConfig) -> Counts:
    """Of a recorded prefill step."""
    layers = config.num_hidden_layers
    qkv = config.q_size + 2 * config.kv_size
    row_bytes = layers * (
        20 * config.hidden_size + 8 * qkv + 6 * config.q_size + 10 * config.intermediate_size
    )
    return Counts(4 * layers + 1, 5 * layers + 2, row_bytes)


# ---------------- one decode step, in several ways


@dataclass
class Rung:
    """One way to compute a step.

    Attributes
    ----------
    number, name : int, str
    counts : Counts
    launch : callable
        Starts the step's launches on the current stream.
    prepare : callable
        Brings what the launches change, but the cache, back to what it was.
    logits : (B or more, V) float32
    chosen : (B or more,) int32
        What they write.
    stream : Stream
    start : callable
        What is timed: `launch`, or the start of its recording.
    wrong : str
        Why it is given no time.
    difference, cache_difference : float
        From the simple path: of the worst row of logits, and of the worst request's new keys and values, each relative
        to its root mean square.
    seconds, host_seconds : float or None
    """

    number: int
    name: str
    counts: Counts
    launch: Callable[[], Any]
    prepare: Callable[[], Any]
    logits: Any
    chosen: Any
    stream: Any
    start: Callable[[], Any] = field(default=lambda: None)
    wrong: str = ""
    difference: float = math.nan
    cache_difference: float = math.nan
    seconds: float | None = None
    host_seconds: float | None = None


class Step:
    """The inputs of one decode step, and the memory that rungs 1 and 2 write to.

    Parameters
    ----------
    config : ModelConfig
    num_blocks : int
        Of the cache.
    contexts : sequence of int
        Tokens of each request, the new one included.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, contexts: Sequence[int]) -> None:
        rng = np.random.default_rng(len(contexts))
        batch, width = len(contexts), -(-max(contexts) // BLOCK_SIZE)
        self.batch, self.context = batch, float(np.mean(contexts))
        self.splits = max(1, -(-width * BLOCK_SIZE // SPLIT))
        tables = rng.permutation(num_blocks)[: batch * width].reshape(batch, width)
        ids = rng.integers(0, config.vocab_size, (batch, 1)).tolist()
        starts = [context - 1 for context in contexts]
        self.inputs: ModelInputs = make_inputs(
            ids, starts, tables.tolist(), range(batch), num_decodes=batch, block_size=BLOCK_SIZE
        )
        # From the new token's slot to the end of each table: written by the step, or never read.
        slots = tables.repeat(BLOCK_SIZE, axis=1) * BLOCK_SIZE + np.tile(np.arange(BLOCK_SIZE), width)
        unread = [row[start:] for row, start in zip(slots, starts, strict=True)]
        self.unread = cp.asarray(np.concatenate(unread).astype(np.int64))
        self.buffers = Buffers().step(config, batch)
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.attended = cp.empty((batch, heads, dim), np.uint16)
        self.heads = self.attended.reshape(batch, -1)
        self.rows = cp.empty((batch, config.hidden_size), np.uint16)
        self.logits = cp.empty((batch, config.vocab_size), np.float32)
        self.chosen = cp.empty(batch, np.int32)
        self.argmax_scratch = cp.empty(rows_.argmax_scratch(batch, config.vocab_size), np.uint64)
        self.scratch = DecodeScratch(batch, heads, kv_heads, dim) if self.splits > 1 else None


class Ladder:
    """A model, a cache of random keys and values, and the rungs.

    Parameters
    ----------
    model : Model
    seats : int
        The most requests of a step.
    tokens : int
        The most tokens of a prefill step.
    longest : int
        The most tokens of a request.
    num_blocks : int
        Of the cache.

    Raises
    ------
    ValueError
        The model or the device has no fast path.
    """

    def __init__(self, model: Model, seats: int, tokens: int, longest: int, num_blocks: int) -> None:
        config = EngineConfig(
            max_num_seqs=seats,
            max_num_batched_tokens=tokens,
            max_model_len=longest,
            block_size=BLOCK_SIZE,
            fast_path="on",
        )
        reason = unsupported(model, config)
        if reason:
            raise ValueError(f"there is no fast path to climb to: {reason}")
        self.model, self.config, self.weights = model, model.config, model.weights
        self.fast: Any = FastPath(model, config)
        self.stream = self.fast._stream
        self.products = Products(self.stream)
        self.cache = KVCache(model.config, num_blocks, BLOCK_SIZE)
        self.fast.use(self.cache)

    def rungs(self, step: Step, numbers: Sequence[int]) -> Iterator[Rung]:
        """Those of `numbers` that there are for a step."""
        made = (self._simple, self._recorded, self._rows, self._fused, self._own_products, self._persistent)
        for number in numbers:
            rung = made[number](step)
            if rung is not None:
                yield rung

    def _simple(self, step: Step) -> Rung:
        logits = self.model.buffers.logits(self.config, step.batch)[1]
        parts: Any = self.model.parts

        def launch() -> None:
            parts.argmax(self.model.forward(step.inputs, self.cache), step.chosen)

        counts = counts_of(self.config, 0, step.splits)
        name = "simple path, launched one by one"
        return Rung(0, name, counts, launch, lambda: None, logits, step.chosen, cp.cuda.Stream.null)

    def _recorded(self, step: Step) -> Rung:
        return self._own(step, 1, "the same launches in a graph", self._launch_simple)

    def _rows(self, step: Step) -> Rung:
        return self._own(step, 2, "fused row kernels", self._launch_rows)

    def _own(self, step: Step, number: int, name: str, launch: Callable[[Step], None]) -> Rung:
        counts = counts_of(self.config, number, step.splits)
        started = (lambda: launch(step), lambda: None)
        return Rung(number, name, counts, *started, step.logits, step.chosen, self.stream)

    def _fused(self, step: Step) -> Rung:
        fast = self.fast
        size = fast._size_of(step.batch)
        counts = counts_of(self.config, 3, step.splits, size)
        launch = lambda: fast._launch_decode(size, True, fast._many)  # noqa: E731
        name = "fused attention"
        return Rung(
            *(3, name, counts, launch, self._seated(step, size)), *(fast._logits, fast._chosen, self.stream)
        )

    def _own_products(self, step: Step) -> Rung | None:
        fast = self.fast
        size = fast._size_of(step.batch)
        if size > fast._few_rows:
            return None
        counts = counts_of(self.config, 4, step.splits, size)
        launch = lambda: fast._launch_decode(size, True, fast._few)  # noqa: E731
        name = "own products, launches that overlap"
        return Rung(
            *(4, name, counts, launch, self._seated(step, size)), *(fast._logits, fast._chosen, self.stream)
        )

    def _persistent(self, step: Step) -> Rung | None:
        fast = self.fast
        if step.batch > 1 or fast._persistent is None:
            return None
        counts = counts_of(self.config, 5, step.splits)
        launch, prepare = (lambda: fast._launch_persistent(1, True)), self._seated(step, 1)
        name = "one persistent kernel"
        return Rung(5, name, counts, launch, prepare, fast._logits, fast._chosen, self.stream)

    def _seated(self, step: Step, size: int) -> Callable[[], None]:
        """Brings a step's inputs to where the engine's launches look for them, which also change them."""
        fast, inputs, batch = self.fast, step.inputs, step.batch

        def prepare() -> None:
            for array in (fast._ids, fast._contexts, fast._steps):
                array[:size] = 0  # a context of 0 is a row that pads the batch
            fast._ids[:batch], fast._contexts[:batch] = inputs.ids, inputs.context_lens
            fast._tables[:size] = 0
            fast._tables[:batch, : inputs.block_tables.shape[1]] = inputs.block_tables

        return prepare

    # ---- rungs 1 and 2

    def _launch_simple(self, step: Step) -> None:
        """What the simple path launches. Argmax is the fused one: the simple one allocates."""
        config, weights, eps, b = self.config, self.weights, self.config.rms_norm_eps, step.buffers
        embedding(step.inputs.ids, weights["embed_tokens"], b.residual)
        for layer in range(config.num_hidden_layers):
            name = f"layers.{layer}"
            if layer == 0:
                rms_norm(b.residual, weights[f"{name}.input_layernorm"], eps, b.normed)
            else:
                add_rms_norm(b.x, b.residual, weights[f"{name}.input_layernorm"], eps, b.normed)
            self._launch_attention(step, layer)
            self.products(step.heads, weights[f"{name}.o_proj"], b.x)
            weight = weights[f"{name}.post_attention_layernorm"]
            add_rms_norm(b.x, b.residual, weight, eps, b.ffn_normed)
            self.products(b.ffn_normed, weights[f"{name}.gate_up"], b.gate_up)
            silu_mul(b.gate_up, b.activated)
            self.products(b.activated, weights[f"{name}.down_proj"], b.x)
        add_rms_norm(b.x, b.residual, weights["norm"], eps, b.normed)
        gather_rows(b.normed, step.inputs.logits_rows, step.rows)
        self.products(step.rows, weights.lm_head, step.logits)
        rows_.argmax_rows(step.logits, step.chosen, step.argmax_scratch)

    def _launch_rows(self, step: Step) -> None:
        """Rows by 16-byte loads; products add to the stream themselves, so that norms only read it."""
        config, weights, eps, b = self.config, self.weights, self.config.rms_norm_eps, step.buffers
        norms = [*(f"layers.{layer}.input_layernorm" for layer in range(config.num_hidden_layers)), "norm"]
        table = weights["embed_tokens"]
        rows_.embed_norm(step.inputs.ids, table, weights[norms[0]], eps, b.residual, b.normed)
        for layer in range(config.num_hidden_layers):
            name = f"layers.{layer}"
            self._launch_attention(step, layer)
            self.products(step.heads, weights[f"{name}.o_proj"], b.residual, accumulate=True)
            rows_.norm_rows(b.residual, weights[f"{name}.post_attention_layernorm"], eps, b.ffn_normed)
            self.products(b.ffn_normed, weights[f"{name}.gate_up"], b.gate_up)
            rows_.silu_mul_rows(b.gate_up, b.activated)
            self.products(b.activated, weights[f"{name}.down_proj"], b.residual, accumulate=True)
            rows_.norm_rows(b.residual, weights[norms[layer + 1]], eps, b.normed)
        self.products(b.normed, weights.lm_head, step.logits)
        rows_.argmax_rows(step.logits, step.chosen, step.argmax_scratch)

    def _launch_attention(self, step: Step, layer: int) -> None:
        """normed -> heads, by the simple kernels, unless they would allocate: that is where keys come in splits."""
        weights, inputs, b = self.weights, step.inputs, step.buffers
        keys, values = self.cache.layer(layer)
        self.products(b.normed, weights[f"layers.{layer}.qkv"], b.qkv)
        cache = (keys, values, inputs.block_tables, inputs.context_lens)
        scale = self.config.head_dim**-0.5
        if step.scratch is not None:
            decode_attention(b.qkv, *cache, weights["inv_freq"], scale, step.attended, step.scratch)
            return
        split_qkv(b.qkv, b.q, b.k, b.v)
        rope(b.q, b.k, inputs.positions, weights["inv_freq"])
        kv_write(b.k, b.v, inputs.slots, keys, values)
        paged_attention(b.q, *cache, scale, step.attended)

    # ---- compared with the simple path, and timed

    def poison(self, unread: Any) -> None:
        """Fill the cache with random numbers, but these slots in all layers with NaN."""
        random_normal(1, KEY_DEVIATION, self.cache.keys)
        random_normal(2, VALUE_DEVIATION, self.cache.values)
        for cache in (self.cache.keys, self.cache.values):
            self._slots(cache)[:, unread] = NAN

    def written(self, slots: Any) -> np.ndarray:
        """Keys and values of these slots: (slots, 2 x layers x Hk x D) float32, on the host."""
        both = [
            bf16_to_float(cp.asnumpy(self._slots(c)[:, slots])) for c in (self.cache.keys, self.cache.values)
        ]
        return np.moveaxis(np.stack(both), 2, 0).reshape(len(slots), -1)

    def _slots(self, cache: Any) -> Any:
        return cache.reshape(len(cache), -1, *cache.shape[3:])

    def climb(self, step: Step, numbers: Sequence[int], repeats: int) -> list[Rung]:
        """Each rung compared with rung 0, which must be the first, and those that are right timed."""
        rungs = list(self.rungs(step, numbers))
        want: tuple[np.ndarray, np.ndarray] | None = None
        for rung in rungs:
            try:
                rung.start = self._starter(rung)
                logits, chosen, written = self._run(rung, step)
                if rung.number == 0:
                    want = logits, written
                if want is None:
                    rung.wrong = "there is no simple path to compare it with"
                else:
                    compare(rung, logits, chosen, written, *want)
            except Exception as error:
                rung.wrong = failure(error)
        for rung in rungs if TIMED else []:
            if not rung.wrong:
                rung.seconds, rung.host_seconds = timed(rung.start, rung.prepare, rung.stream, repeats)
        return rungs

    def _starter(self, rung: Rung) -> Callable[[], Any]:
        if rung.number == 0 or not can_record():
            return rung.launch
        rung.prepare()
        return Recording(rung.stream, rung.launch).start

    def _run(self, rung: Rung, step: Step) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(B, V) logits, (B,) tokens, and the new keys and values of one step, of what was poisoned before."""
        self.poison(step.unread)
        rung.logits[: step.batch] = np.float32(np.nan)
        rung.chosen[: step.batch] = -1
        rung.prepare()
        with rung.stream:
            rung.start()
        rung.stream.synchronize()
        some = slice(0, step.batch)
        return cp.asnumpy(rung.logits[some]), cp.asnumpy(rung.chosen[some]), self.written(step.inputs.slots)


def compare(
    rung: Rung,
    logits: np.ndarray,
    chosen: np.ndarray,
    written: np.ndarray,
    want_logits: np.ndarray,
    want_written: np.ndarray,
) -> None:
    """Note how far a rung is from the simple path, and what is wrong with it."""
    rung.difference = relative(logits, want_logits)
    rung.cache_difference = relative(written, want_written)
    if not rung.difference <= BOUND:
        rung.wrong = f"logits differ by {rung.difference:.2g} of their root mean square (bound {BOUND:g})"
    elif not rung.cache_difference <= BOUND:
        rung.wrong = f"new keys and values differ by {rung.cache_difference:.2g} of their root mean square"
    elif (chosen != logits.argmax(axis=1)).any():
        row = int((chosen != logits.argmax(axis=1)).argmax())
        rung.wrong = (
            f"row {row}: token {chosen[row]} was chosen, {logits[row].argmax()} has the largest logit"
        )


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """Root mean square of the difference over that of `want`, of the worst row; NaN where there is one."""
    size = np.sqrt(np.mean(np.square(want), axis=1, dtype=np.float64))
    off = np.sqrt(np.mean(np.square(got - want), axis=1, dtype=np.float64))
    return float(np.max(off / size))


def failure(error: Exception) -> str:
    """One line about an error; where it came from goes to stderr."""
    traceback.print_exception(error, limit=-3)
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def timed(
    start: Callable[[], Any], prepare: Callable[[], Any], stream: Any, repeats: int
) -> tuple[float, float]:
    """Median seconds between events around a step, and those that the host takes to start it."""
    device, host = [], []
    for number in range(WARM + repeats):
        prepare()
        cp.cuda.runtime.deviceSynchronize()
        begin, end = cp.cuda.Event(), cp.cuda.Event()
        with stream:
            begin.record()
            began = time.perf_counter()
            start()
            taken = time.perf_counter() - began
            end.record()
        end.synchronize()
        if number >= WARM:
            device.append(cp.cuda.get_elapsed_time(begin, end) / 1e3)
            host.append(taken)
    return float(np.median(device)), float(np.median(host))


# ---------------- the parts of the record


@dataclass
class Record:
    """What the parts share.

    Attributes
    ----------
    options : Namespace
    ladder : Ladder
    read, matrix : float
        Bytes and operations a second, measured now; NaN in the emulation.
    good : bool
        Nothing was wrong so far.
    """

    options: argparse.Namespace
    ladder: Ladder
    read: float = math.nan
    matrix: float = math.nan
    good: bool = True

    @property
    def config(self) -> ModelConfig:
        return self.ladder.config

    def step(self, batch: int, low: int, high: int) -> Step:
        """A step of requests whose contexts are spread over a range."""
        contexts = (
            np.linspace(low, high, batch).round().astype(int).tolist() if batch > 1 else [(low + high) // 2]
        )
        return Step(self.config, self.ladder.cache.num_blocks, contexts)

    def verdict(self, wrong: str) -> str:
        """A cell of a table."""
        self.good = self.good and not wrong
        return f"**wrong: {wrong}**" if wrong else "right"


def decode_part(record: Record) -> Iterator[str]:
    """The ladder for each batch."""
    low, high = record.options.context
    for batch in record.options.batch:
        step = record.step(batch, low, high)
        spread = (
            f"contexts {low} to {high}, {step.context:.0f} on average"
            if batch > 1
            else f"context {step.context:.0f}"
        )
        yield f"## Decode, {batch} request{'s' * (batch > 1)}, {spread}"
        yield from climbed(record, step, (0, 1, 2, 3, 4, 5))


def long_part(record: Record) -> Iterator[str]:
    """One request with many keys."""
    step = record.step(1, record.options.long, record.options.long)
    yield f"## Decode, 1 request, context {record.options.long:,}"
    yield from climbed(record, step, (0, 3, 5))


def climbed(record: Record, step: Step, numbers: Sequence[int]) -> Iterator[str]:
    """A table of rungs."""
    config, batch = record.config, step.batch
    nbytes = decode_bytes(config, batch, step.context)
    rungs = record.ladder.climb(step, numbers, record.options.repeats)
    least = f", {nbytes / record.read * 1e6:,.0f} us at this card's read bandwidth" if TIMED else ""
    yield f"A step moves {nbytes / 1e9:.4g} GB at least{least}."
    if step.splits > 1 and {1, 2} & set(numbers):
        yield (
            f"The simple attention divides keys into {step.splits} splits here and allocates for them, so the fused one"
            " stands in its place in rungs 1 and 2."
        )
    if not TIMED:
        yield table(
            ["rung", "launches", "logits differ by", "keys and values", "verdict"],
            [
                [f"{r.number}. {r.name}", launches(r.counts), *differences(r), record.verdict(r.wrong)]
                for r in rungs
            ],
        )
        return
    lines, before = [], None
    for rung in rungs:
        guess = predicted(config, rung.counts, batch, step.context)
        cells = [f"{rung.number}. {rung.name}", launches(rung.counts), us(guess), us(rung.seconds)]
        cells += [us(before[0] - guess), us(less(before[1], rung.seconds))] if before else ["", ""]
        cells += [
            us(rung.host_seconds),
            rate(nbytes, rung.seconds, 1e9),
            share(nbytes, rung.seconds, record.read),
        ]
        cells += [rate(batch, rung.seconds, 1), *differences(rung), record.verdict(rung.wrong)]
        lines.append(cells)
        before = guess, rung.seconds
    head = ["rung", "launches", "predicted us", "measured us", "predicted to save", "saved", "host us"]
    yield table(
        [*head, "GB/s", "of read", "tokens/s", "logits differ by", "keys and values", "verdict"], lines
    )


def engine_part(record: Record) -> Iterator[str]:
    """The whole engine, with the fast path and without."""
    low, high = record.options.context
    prompt, tokens = low, max(2, high - low)
    yield f"## The engine: prompts of {prompt} tokens, {tokens} generated greedily for each"
    lines: list[list[str]] = []
    for mode in ("off", "on"):
        try:
            for line in engine_lines(record, mode, prompt, tokens):
                lines.append(line)  # at once: a batch that fails takes away no other
        except Exception as error:
            lines.append([mode, record.verdict(failure(error))])
    head = ["fast path", "verdict", "requests"]
    if TIMED:
        head += ["predicted us", "us a token", "its graph alone, us", "graph's share", "GB/s", "of read"]
        head += ["tokens/s, decode", "tokens/s, all"]
    yield table(head, lines)
    yield (
        "Verdict: of two requests of each batch, the simple path computes all tokens in one prefill; every token that"
        " the engine chose is the most probable one there, or nearly"
        f" (within {TIE:g} of the logits' root mean square)."
    )
    if TIMED:
        yield (
            "A token's time is the mean of steps in which every request gets one. The graph's share is the time of the"
            " step's recorded launches alone, as above, over it: what is left is time in which the card has nothing to"
            " do."
        )


def engine_lines(record: Record, mode: str, prompt: int, tokens: int) -> Iterator[list[str]]:
    """A line for each batch."""
    config, options, model = record.config, record.options, record.ladder.model
    blocks = max(options.batch) * -(-(prompt + tokens + 1) // BLOCK_SIZE)
    llm = LLM.from_model(
        model,
        fast_path=mode,
        max_num_seqs=max(options.batch),
        num_blocks=blocks,
        block_size=BLOCK_SIZE,
    )
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for batch in options.batch:
        prompts = rng.integers(0, config.vocab_size, (batch, prompt)).tolist()
        outputs = llm.generate(prompts, params, use_tqdm=False)  # and a warm-up
        found = [list(output.outputs[0].token_ids) for output in outputs[:2]]
        wrong = next(filter(None, (unlikely(model, p, t) for p, t in zip(prompts, found, strict=False))), "")
        cells = [mode, record.verdict(wrong), str(batch)]
        if TIMED and not wrong:
            cells += engine_times(record, llm, mode, batch, prompt, tokens)
        yield cells


def engine_times(record: Record, llm: Any, mode: str, batch: int, prompt: int, tokens: int) -> list[str]:
    """The cells of one batch that have times."""
    config, rng = record.config, np.random.default_rng(1)
    runs = [
        run_once(llm.engine, rng.integers(0, config.vocab_size, (batch, prompt)).tolist(), tokens)
        for _ in range(ENGINE_RUNS)
    ]
    run = median(runs)
    step = record.step(batch, prompt, prompt + tokens)
    numbers = (0,) if mode == "off" else (3, 4, 5)
    rung = list(record.ladder.rungs(step, numbers))[-1]
    guess = predicted(config, rung.counts, batch, step.context)
    alone = None
    if mode == "on":
        record.ladder.poison(step.unread)
        rung.start = record.ladder._starter(rung)
        alone = timed(rung.start, rung.prepare, rung.stream, record.options.repeats)[0]
    nbytes = decode_bytes(config, batch, run.context or step.context)
    busy = f"{alone / run.per_token:.0%}" if alone and run.per_token else ""
    return [
        *(us(guess), us(run.per_token), us(alone), busy),
        *(rate(nbytes, run.per_token, 1e9), share(nbytes, run.per_token, record.read)),
        *(rate(batch, run.per_token, 1), rate(batch * tokens, run.seconds, 1)),
    ]


def unlikely(model: Model, prompt: list[int], tokens: list[int]) -> str:
    """What is wrong with greedy tokens, by the logits of the whole sequence; "" where nothing is."""
    parts: Any = model.parts
    logits = all_logits(model, parts, prompt + tokens[:-1], BLOCK_SIZE)[len(prompt) - 1 :]
    behind = logits.max(axis=1) - logits[np.arange(len(tokens)), tokens]
    behind /= np.sqrt(np.mean(np.square(logits), axis=1, dtype=np.float64))
    place = int(np.argmax(behind > TIE))
    if behind[place] > TIE or np.isnan(behind).any():
        return f"token {place} is {behind[place]:.2g} of the logits' root mean square behind the most probable one"
    return ""


def prefill_part(record: Record) -> Iterator[str]:
    """Prompts through the recorded step, and the time to the first token through the engine."""
    config = record.config
    yield "## Prefill of one prompt"
    lines = []
    for tokens in record.options.prefill:
        try:
            seconds, first, wrong, difference = prefill(record, tokens)
        except Exception as error:
            seconds, first, wrong, difference = None, {}, failure(error), math.nan
        counts = prefill_counts(config)
        cells = [f"{tokens:,}", launches(counts)]
        if TIMED:
            flops = prefill_flops(config, 1, tokens)
            cells += [ms(predicted_prefill(config, tokens, counts)), ms(seconds), rate(flops, seconds, 1e12)]
            cells += [share(flops, seconds, record.matrix), ms(first.get("on")), ms(first.get("off"))]
        lines.append([*cells, f"{difference:.1e}", record.verdict(wrong)])
    head = ["tokens", "launches"]
    if TIMED:
        head += ["predicted ms", "measured ms", "TFLOP/s", "of matrix rate"]
        head += ["first token of the engine, ms", "without the fast path, ms"]
    yield table([*head, "logits differ by", "verdict"], lines)


def prefill(record: Record, tokens: int) -> tuple[float | None, dict[str, float], str, float]:
    """Seconds of the recorded step, seconds to the first token by mode, what is wrong, and how far logits differ."""
    config, ladder = record.config, record.ladder
    fast, blocks = ladder.fast, -(-tokens // BLOCK_SIZE)
    rng = np.random.default_rng(tokens)
    table_ = rng.permutation(ladder.cache.num_blocks)[:blocks]
    ids = rng.integers(0, config.vocab_size, tokens).tolist()
    hosted = host_inputs([ids], [0], [table_.tolist()], [tokens - 1], 0, BLOCK_SIZE)
    inputs = hosted.on_device()
    slots = (table_[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1).astype(np.int64)
    found = []
    runs: list[Callable[[], Any]] = [
        lambda: ladder.model.forward(inputs, ladder.cache),
        lambda: fast.forward(hosted),
    ]
    for run in runs:
        run()  # compiles and records, so that what is looked at below is the recording's
        ladder.poison(cp.asarray(slots))
        logits = run()
        cp.cuda.runtime.deviceSynchronize()
        found.append((cp.asnumpy(logits), ladder.written(inputs.slots)))
    (want, want_written), (got, got_written) = found
    difference, of_cache = relative(got, want), relative(got_written, want_written)
    if not max(difference, of_cache) <= BOUND:
        wrong = (
            f"logits differ by {difference:.2g}, keys and values by {of_cache:.2g} of their root mean square"
        )
        return None, {}, wrong, difference
    if not TIMED:
        return None, {}, "", difference
    key = fast.step_key(hosted)

    def start() -> None:
        fast._launch(("step", *key), fast._launch_step, *key)

    seconds = timed(start, lambda: None, ladder.stream, record.options.repeats)[0]
    return seconds, {mode: first_token(record, mode, tokens) for mode in ("off", "on")}, "", difference


def first_token(record: Record, mode: str, tokens: int) -> float:
    """Seconds from a request to its first token, in an engine that has met prompts of this length."""
    llm = LLM.from_model(
        record.ladder.model,
        fast_path=mode,
        max_num_seqs=1,
        max_num_batched_tokens=max(record.options.prefill),
        num_blocks=tokens // BLOCK_SIZE + 2,
        block_size=BLOCK_SIZE,
    )
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, record.config.vocab_size, (1, tokens)).tolist() for _ in range(WARM + 5)]
    return float(np.median([run_once(llm.engine, prompt, 1).first_token for prompt in prompts][WARM:]))


def history() -> Iterator[str]:
    """How the kernels came to what they are, as far as it was written down."""
    with HISTORY.open(encoding="utf-8", newline="") as file:
        header, *lines = list(csv.reader(file)) or [[]]
    if header != HISTORY_COLUMNS:
        raise ValueError(f"{HISTORY}: its columns are {header}; they must be {HISTORY_COLUMNS}")
    for number, line in enumerate(lines, 2):
        if len(line) != len(HISTORY_COLUMNS):
            raise ValueError(
                f"{HISTORY}: line {number} has {len(line)} values; it must have {len(HISTORY_COLUMNS)}"
            )
    if lines:
        yield "## The kernels, from change to change (context 256 where none is named)"
        yield table(HISTORY_COLUMNS, lines)


# ---------------- text


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table; short lines are filled up."""
    filled = [[*line, *[""] * (len(head) - len(line))] for line in lines]
    cells = [head, ["---"] * len(head), *filled]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in cells)


def us(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:,.1f}"


def ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:,.3f}"


def less(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else before - after


def rate(amount: float, seconds: float | None, unit: float) -> str:
    return "" if not seconds else f"{amount / seconds / unit:,.0f}"


def share(amount: float, seconds: float | None, whole: float) -> str:
    return "" if not seconds else f"{amount / seconds / whole:.1%}"


def launches(counts: Counts) -> str:
    return f"{counts.products + counts.small}"


def differences(rung: Rung) -> list[str]:
    return [f"{rung.difference:.1e}", f"{rung.cache_difference:.1e}"]


RUNGS = """\
0. The simple path: the parts are called one by one from Python, as `model.py` has them.
1. The same launches, recorded in a CUDA graph. CuPy lets no graph record its cuBLAS, so the products go through a
   handle of our own; the simple argmax allocates, so the fused one is in its place.
2. Row kernels that load 16 bytes at a time (`decode_rows.cu`); products add to the residual stream themselves.
3. Rotation, cache write and attention in one launch (`decode_attention.cu`), whose first keys are on their way while
   the product before it ends; where a matrix's tiles fill the card, products by warpgroups, with the activation in them
   (`warpgroup_linear.cu`); and `advance`, which makes the chosen tokens the next step's inputs. The engine starts this
   graph for large batches.
4. Up to 32 requests: products by kernels of our own (`skinny_linear.cu`), with norms and activations in them; each
   launch comes onto the card while the one before it ends, and has its first weights under way by then. The engine
   starts this graph for small batches.
5. One request only: everything in one persistent kernel (`decode_step.cu`), as the engine starts it."""


def heading(record: Record, name: str) -> Iterator[str]:
    """What was run, where, and how to read it."""
    yield "# A decode step, from the simple path to the fast one"
    yield f"{datetime.date.today()}; command: `python benchmarks/decode_ladder.py {shlex.join(record.options.given)}`"
    yield describe()
    if TIMED:
        yield (
            f"Measured in this run: the card reads {record.read / 1e9:,.0f} GB/s and multiplies BF16 matrices at"
            f" {record.matrix / 1e12:,.0f} TFLOP/s."
        )
    weights = decode_bytes(record.config, 0, 0)
    yield f"The model: {name}; {weights / 1e9:.4g} GB of weights are read a step."
    yield RUNGS
    yield (
        "Differences are those from rung 0, of the worst row, relative to its root mean square; a rung is right up to"
        f" {BOUND:g}. Cache and outputs were poisoned before."
    )
    if TIMED:
        yield (
            "Times: the median of steps between two events, the device idle before; *host* is what Python takes to"
            " start the step. GB/s: the fewest bytes of a step (weights, embedding rows, KV cache) over its time."
        )
        yield (
            "Predictions were made from counts before anything here was measured: products as long as cuBLAS took on"
            f" an H200, {TINY_LAUNCH * 1e6:.1f} us for a launch that does nothing and so {GRAPH_LAUNCH * 1e6:.0f} us"
            f" for a small one in a graph, {PYTHON_LAUNCH * 1e6:.1f} us for one from Python, and the bytes that small"
            f" kernels and attention move at {READ_RATE / 1e12:.2f} TB/s. They know nothing of how well a kernel is"
            " written: where rung 2 saves more than predicted, that is it."
        )
    else:
        yield "A rehearsal: no GPU code ran, and times are left out."


# ---------------- options


def positive(text: str) -> list[int]:
    """``"1,8"`` -> [1, 8]."""
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: every number must be at least 1")
    return values


def span(text: str) -> tuple[int, int]:
    """``"128-256"`` -> (128, 256)."""
    low, _, high = text.partition("-")
    found = int(low), int(high or low)
    if not 1 <= found[0] <= found[1]:
        raise argparse.ArgumentTypeError(f"{text!r} must be LOW-HIGH, such as 128-256")
    return found


def parse(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--random", default="llama-3.2-1b", help="sizes with random weights")
    parser.add_argument("--model", help="a name or a folder, in place of random weights")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this; can be given again")
    parser.add_argument("--batch", type=positive, default=[1, 8, 32, 128], help="requests: 1,8,32,128")
    parser.add_argument("--context", type=span, default=(128, 256), help="tokens of the requests: 128-256")
    parser.add_argument("--prefill", type=positive, default=[128, 2048], help="tokens of a prompt: 128,2048")
    parser.add_argument("--long", type=int, default=8192, help="the context of the long part")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="steps that are timed")
    parser.add_argument("--write", type=Path, metavar="FILE", help="keep the record here")
    options = parser.parse_args(given)
    for name in ("long", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it must be at least 1")
    if options.write is not None and not options.write.absolute().parent.is_dir():
        parser.error(
            f"--write is {options.write}; the folder {options.write.absolute().parent} does not exist"
        )
    options.given, options.part = list(given), options.part or list(PARTS)
    return options


def load(options: argparse.Namespace) -> tuple[str, Model]:
    """The model, and what it is called."""
    with engine_checks():
        if options.model is not None:
            folder = resolve(options.model)
            config, views = open_checkpoint(folder)
            return folder.resolve().name, build_model(config, views)
        config = preset_config(options.random)

        def weights(views: Any, config: ModelConfig) -> dict[str, Any]:
            return random_weights(config)

        parts = Parts().replace(owner="reference", load_weights=weights)
        return f"{options.random}, random weights", build_model(config, {}, parts)


def prepare(options: argparse.Namespace, model: Model) -> Ladder:
    """A ladder with room for all that is asked for."""
    high, batch = options.context[1], max(options.batch)
    prompts = options.prefill if "prefill" in options.part else []
    longest = max(high + 1, *prompts, options.long if "long" in options.part else 0)
    limit = model.config.max_position_embeddings
    if longest > limit:
        raise ValueError(f"{longest} tokens of a request were asked for; this model's context has {limit}")
    blocks = max(batch * -(-high // BLOCK_SIZE), -(-longest // BLOCK_SIZE))
    tokens = max(batch, *prompts, 1)
    # The engine's own steps leave room for the token that it computes ahead.
    return Ladder(model, batch, tokens, min(limit, longest + 1), blocks)


def paragraphs(record: Record, name: str) -> Iterator[str]:
    """The record; a part that fails is named, and the others are there all the same."""
    yield from heading(record, name)
    parts = {"decode": decode_part, "engine": engine_part, "prefill": prefill_part, "long": long_part}
    for part in record.options.part:
        try:
            yield from parts[part](record)
        except Exception as error:
            yield record.verdict(f"{part}: {failure(error)}")


def main(given: Sequence[str] | None = None) -> int:
    """Everything; the exit status says whether all of it was right."""
    options = parse(sys.argv[1:] if given is None else given)
    began = time.monotonic()
    try:
        past = list(history())
        name, model = load(options)
        with engine_checks():
            ladder = prepare(options, model)
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"decode_ladder: {error}") from None
    record = Record(options, ladder)
    if TIMED:
        record.read, record.matrix = card.read_bandwidth(), card.matrix_rate() or math.nan
        card.free_memory()
    said: list[str] = []
    with engine_checks():
        for paragraph in paragraphs(record, name):
            print(f"{paragraph}\n", flush=True)
            said.append(paragraph)
    said += past
    said.append("All of it was right." if record.good else "**Not all of it was right.**")
    print(f"{said[-1]} {time.monotonic() - began:.0f} s")
    if options.write:
        options.write.write_text("\n\n".join(said) + "\n", encoding="utf-8")
    return 0 if record.good else 1


if __name__ == "__main__":
    sys.exit(main())
