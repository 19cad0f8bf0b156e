"""What goes into the model: a step's lists as arrays, the weights by name, and what an engine refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinyvllm_ref.device import cp


@dataclass(frozen=True)
class ModelInputs:
    """One step of the model: T tokens of B requests, packed one after the other, decodes first.

    Attributes
    ----------
    ids, positions : (T,) int32
        The tokens, and the place of each in its own sequence.
    slots : (T,) int64
        Where its key and value go in the cache: block * block_size + offset.
    query_starts : (B + 1,) int32
        Request b has the tokens ``query_starts[b]`` to ``query_starts[b + 1] - 1``.
    context_lens : (B,) int32
        Tokens of each request that are in the cache after this step.
    block_tables : (B, max_blocks) int32
        Padded with -1 to the longest of the batch.
    logits_rows : (R,) int32
        The tokens whose logits are wanted: the last one of each request that gets a new token. Where none does, the
        step's last token, so that there is always a row.
    num_decodes : int
        The first so many requests have one token each.
    spans : list of (int, int)
        What ``query_starts`` says, on the host: first token and the one after the last, of each request.
    contexts : list of int
        What ``context_lens`` says, on the host.
    """

    ids: Any
    positions: Any
    slots: Any
    query_starts: Any
    context_lens: Any
    block_tables: Any
    logits_rows: Any
    num_decodes: int
    spans: list[tuple[int, int]]
    contexts: list[int]


def make_inputs(batch: Any, block_size: int, pack: Callable[..., Any]) -> ModelInputs:
    """The arrays of a scheduled batch.

    Parameters
    ----------
    batch : ScheduledBatch
        With ``requests``, ``starts``, ``num_tokens``, ``samples``, ``block_tables`` and ``num_decodes``.
    block_size : int
    pack : callable
        Lesson 18's part.
    """
    counts = list(batch.num_tokens)
    contexts = [start + count for start, count in zip(batch.starts, counts, strict=True)]
    sequences = [
        request.token_ids[start:end]
        for request, start, end in zip(batch.requests, batch.starts, contexts, strict=True)
    ]
    ids, positions, query_starts = pack(sequences)
    ends = np.cumsum(counts)
    spans = [(int(end - count), int(end)) for end, count in zip(ends, counts, strict=True)]

    width = max(-(-context // block_size) for context in contexts)
    tables = np.full((len(counts), width), -1, np.int32)
    for row, table in zip(tables, batch.block_tables, strict=True):
        row[: min(width, len(table))] = table[:width]

    # pack counts each request's positions from 0; here they go on behind what is in the cache.
    offsets = np.repeat(np.array(batch.starts, np.int32), counts)
    where = np.arange(int(ends[-1])) - np.repeat(ends - counts, counts) + offsets
    request = np.repeat(np.arange(len(counts)), counts)
    slots = tables[request, where // block_size].astype(np.int64) * block_size + where % block_size

    rows = [end - 1 for (_, end), samples in zip(spans, batch.samples, strict=True) if samples]
    return ModelInputs(
        ids,
        positions + cp.asarray(offsets) if offsets.any() else positions,
        cp.asarray(slots),
        query_starts,
        cp.asarray(np.array(contexts, np.int32)),
        cp.asarray(tables),
        cp.asarray(np.array(rows or [int(ends[-1]) - 1], np.int32)),
        batch.num_decodes,
        spans,
        contexts,
    )


class Weights(dict[str, Any]):
    """The model's weights by name, and what a layer has to know besides them.

    ``weights["inv_freq"]`` are the rotary frequencies, ``weights.config`` the sizes, and ``weights.lm_head`` the
    embedding table where the two are tied.
    """

    def __init__(self, config: Any, arrays: Mapping[str, Any], inv_freq: Any) -> None:
        super().__init__(arrays, inv_freq=inv_freq)
        self.config = config
        self.lm_head = self["embed_tokens" if config.tie_word_embeddings else "lm_head"]


def blocks_that_fit(model: Any, engine: Any) -> int:
    """How many blocks the cache gets: ``engine.num_blocks``, or as many as there is use and room for.

    Parameters
    ----------
    model : ModelConfig
    engine : EngineConfig
        ``memory_fraction`` of the device's memory may be taken in all. In the emulation, whose memory is the
        computer's own, the cache takes half of what is free, and at most 256 MiB.

    Raises
    ------
    MemoryError
        There is no room for a single block.
    """
    if engine.num_blocks is not None:
        return int(engine.num_blocks)
    free, total = cp.cuda.runtime.memGetInfo()
    room = int(total * engine.memory_fraction) - (total - free)
    if getattr(cp, "is_emulation", False):
        room = min(free // 2, 256 << 20)
    block_bytes = engine.block_size * model.kv_bytes_per_token
    longest = engine.max_model_len or model.max_position_embeddings
    useful = -(-longest // engine.block_size) * engine.max_num_seqs
    if room < block_bytes:
        raise MemoryError(
            f"the cache may take {max(0, room):,} bytes, and a block of {engine.block_size} tokens takes "
            f"{block_bytes:,}: free memory, or choose a smaller block_size"
        )
    return int(min(room // block_bytes, useful))


_ALWAYS_SO = {
    "n": 1,
    "logprobs": None,
    "prompt_logprobs": None,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def check_request(request: Any, model: Any, engine: Any) -> None:
    """Refuse by name what this engine would do wrongly, and give a limit to a request without one.

    Called before the scheduler gets the request.

    Raises
    ------
    ValueError
        An option is not supported, a token is outside the vocabulary, or the text can become longer than the model's
        context.
    """
    name, params = f"request {request.request_id!r}", request.params
    for option, value in _ALWAYS_SO.items():
        if getattr(params, option) != value:
            raise ValueError(
                f"{name}: {option} is {getattr(params, option)!r}; this engine supports {value!r} alone"
            )
    for token in (min(request.token_ids), max(request.token_ids)):
        if not 0 <= token < model.vocab_size:
            raise ValueError(
                f"{name}: token id {token} is in the prompt; ids must be from 0 to {model.vocab_size - 1}"
            )
    longest = engine.max_model_len or model.max_position_embeddings
    most = request.num_prompt_tokens + (params.max_tokens or 1)
    if most > longest:
        raise ValueError(
            f"{name}: a prompt of {request.num_prompt_tokens} tokens and max_tokens {params.max_tokens} make {most}; "
            f"together they can have {longest}"
        )
    if params.max_tokens is None:
        request.max_num_tokens = longest
