"""A scheduled batch through the model: arrays, forward pass, sampling. Owns the KV cache."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .batch import ModelInputs, Piece, host_inputs, inputs_of, make_inputs, pieces_of
from .config import EngineConfig
from .device import cp, is_gpu
from .fast_path import FastPath, unsupported
from .kv_cache import KVCache, blocks_that_fit
from .lost_device import losses_named
from .model import Model
from .outputs import Logprob
from .parts import Parts
from .sampler import Sampler, log_probabilities, top_logprobs

if TYPE_CHECKING:
    from .scheduler import ScheduledBatch

_MIN_ROWS = 256  # of logits that a pass may have at least
# The emulation's device memory is the computer's own, which others want too: a cache takes no more than this
# unless it is told to.
_EMULATED_CACHE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave.

    Attributes
    ----------
    ids : list of int
        The new token of each request that samples, in the batch's order.
    logprobs : list of (dict of int to Logprob) or None
        For each of these.
    prompt_logprobs : dict of str to dict of int to (dict of int to Logprob)
        By request and position: what the model thought of the prompt's token there.
    """

    ids: list[int]
    logprobs: list[dict[int, Logprob] | None]
    prompt_logprobs: dict[str, dict[int, dict[int, Logprob]]]


def engine_checks() -> AbstractContextManager[Any]:
    """In the emulation, run kernels without checking each access, unless ``TINYVLLM_CHECKS=full`` is set."""
    if is_gpu or os.environ.get("TINYVLLM_CHECKS") == "full":
        return nullcontext()
    return cp.checks("fast")  # type: ignore[no-any-return]


@contextmanager
def _device_work() -> Iterator[None]:
    """Around all that the engine does on the device."""
    with losses_named(), engine_checks():
        yield


def _fast_path(model: Model, parts: Parts, config: EngineConfig) -> FastPath | None:
    """The fast path, where it is wanted and can be."""
    if config.fast_path == "off" or (config.fast_path == "auto" and not is_gpu):
        return None
    reason = unsupported(model, config, parts)
    if reason and config.fast_path == "on":
        raise ValueError(f"fast_path is 'on', and it can not be: {reason}")
    return None if reason else FastPath(model, config)


class ModelRunner:
    """Runs the steps of one model.

    Parameters
    ----------
    model : Model
    parts : Parts
        `pack`, `sample` and `argmax` are used here; the others are in the model.
    config : EngineConfig

    Attributes
    ----------
    num_blocks : int
        What the KV cache has: measured where the config leaves it open.
    fast : FastPath or None
        Runs the steps in place of the model's parts, where it can.

    Raises
    ------
    ValueError
        The fast path is asked for, and this model or device has none.
    MemoryError
        Activations or cache do not fit.
    DeviceLost
        The process can not use the device any more; :meth:`run` raises it, too.
    """

    def __init__(self, model: Model, parts: Parts, config: EngineConfig) -> None:
        self.model = model
        self._sampler = Sampler(parts)
        self._block_size = config.block_size
        self._max_rows = max(_MIN_ROWS, config.max_num_seqs)
        with _device_work():
            # Activations first: what is free after them is the cache's.
            self.fast = _fast_path(model, parts, config)
            if self.fast is None:
                model.buffers.reserve(model.config, config.max_num_batched_tokens, config.max_num_seqs)
            self.num_blocks = config.num_blocks or self._measure(config)
            self.kv_cache = KVCache(model.config, self.num_blocks, config.block_size)
            if self.fast is not None:
                self.fast.use(self.kv_cache)
        # The fast path brings the arrays to the device itself.
        by_pack = functools.partial(make_inputs, pack=parts.pack)  # type: ignore[arg-type]
        self._make_inputs = by_pack if self.fast is None else host_inputs

    def run(self, batch: ScheduledBatch) -> StepResult:
        """Compute a batch's tokens and draw the next ones."""
        if self.fast is not None and self.fast.can_draw(batch):
            with _device_work():
                ids = self.fast.draw(batch)
            return StepResult(ids, [None] * len(ids), {})
        if self.fast is not None:
            self.fast.drop()
        drawn: dict[int, tuple[int, dict[int, Logprob] | None]] = {}
        prompt_logprobs: dict[str, dict[int, dict[int, Logprob]]] = {}
        with _device_work():
            for piece in pieces_of(batch, self._max_rows):
                inputs = inputs_of(batch, piece, self._block_size, self._make_inputs)
                logits = self._forward(inputs)
                sampling = self._take_prompt_logprobs(batch, piece, logits, prompt_logprobs)
                requests = [batch.requests[index] for index, _ in sampling]
                sampled = self._sampler(self._rows(logits, [row for _, row in sampling]), requests)
                for (index, _), token, logprobs in zip(sampling, sampled.ids, sampled.logprobs, strict=True):
                    drawn[index] = (token, logprobs)
        order = sorted(drawn)
        return StepResult([drawn[i][0] for i in order], [drawn[i][1] for i in order], prompt_logprobs)

    def _forward(self, inputs: ModelInputs) -> Any:
        if self.fast is None:
            return self.model.forward(inputs, self.kv_cache)
        if self.fast.can_forward(inputs):
            return self.fast.forward(inputs)
        return self.model.forward(inputs.on_device(), self.kv_cache)

    def _measure(self, config: EngineConfig) -> int:
        """How many blocks fit into the device's share of memory."""
        cp.get_default_memory_pool().free_all_blocks()  # what an engine before this one had is free, too
        free, total = cp.cuda.runtime.memGetInfo()
        room = int(total * config.memory_fraction) - (total - free)
        if not is_gpu:  # what other programs hold does not count: their memory is not this device's
            room = min(free // 2, _EMULATED_CACHE_BYTES)
        longest = config.max_model_len or self.model.config.max_position_embeddings
        return blocks_that_fit(room, self.model.config, config.block_size, longest * config.max_num_seqs)

    def _take_prompt_logprobs(
        self,
        batch: ScheduledBatch,
        piece: Piece,
        logits: Any,
        found: dict[str, dict[int, dict[int, Logprob]]],
    ) -> list[tuple[int, int]]:
        """Note what the logits say of prompts' tokens; returns (request, row of logits) to be drawn from."""
        sampling = []
        row = 0
        for index, start, count, wanted in zip(
            piece.index, piece.starts, piece.counts, piece.rows, strict=True
        ):
            request = batch.requests[index]
            draws = batch.samples[index] and start + count == batch.starts[index] + batch.num_tokens[index]
            told = wanted[:-1] if draws else wanted
            if told:
                tokens = [request.token_ids[position + 1] for position in told]
                rows = log_probabilities(logits[row : row + len(told)])
                own = found.setdefault(request.request_id, {})
                for position, values, token in zip(told, rows, tokens, strict=True):
                    own[position + 1] = top_logprobs(values, token, request.params.prompt_logprobs or 0)
            row += len(wanted)
            if draws:
                sampling.append((index, row - 1))
        return sampling

    def _rows(self, logits: Any, rows: Sequence[int]) -> Any:
        """These rows of the logits: all of them, mostly."""
        if len(rows) == len(logits):
            return logits
        return logits[cp.asarray(np.array(rows, np.int64))]


def all_logits(model: Model, parts: Parts, token_ids: Sequence[int], block_size: int = 16) -> np.ndarray:
    """Logits of every position of one sequence, in a cache of its own: (tokens, V) float32, on the host."""
    num_blocks = -(-len(token_ids) // block_size)
    with _device_work():
        kv_cache = KVCache(model.config, num_blocks, block_size)
        out = np.empty((len(token_ids), model.config.vocab_size), np.float32)
        for start in range(0, len(token_ids), _MIN_ROWS):
            part = list(token_ids[start : start + _MIN_ROWS])
            inputs = make_inputs(
                [part],
                [start],
                [range(num_blocks)],
                range(len(part)),
                0,
                block_size,
                parts.pack,  # type: ignore[arg-type]
            )
            model.forward(inputs, kv_cache).get(out=out[start : start + len(part)])
    return out
