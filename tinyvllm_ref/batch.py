"""What the scheduler decided, in lists, made into the arrays that the model reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, compress, islice, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from .device import cp

if TYPE_CHECKING:
    from .scheduler import ScheduledBatch


@dataclass(frozen=True, slots=True, eq=False)
class ModelInputs:
    """One step of the model: T tokens of B requests, packed one after the other, decodes first.

    Its arrays are all on the device or, made by :func:`host_inputs`, all on the host.

    Attributes
    ----------
    ids : (T,) int32
    positions : (T,) int32
        Of each token in its own sequence.
    slots : (T,) int64
        Where its key and value go in the cache: block * BS + offset.
    query_starts : (B + 1,) int32
        Request b has the tokens ``query_starts[b]`` to ``query_starts[b + 1] - 1``.
    context_lens : (B,) int32
        Tokens of each request that are in the cache after this step.
    block_tables : (B, max_blocks) int32
        Padded with -1 to the longest of the batch.
    logits_rows : (R,) int32
        The tokens whose logits are wanted.
    num_decodes : int
        The first so many requests have one token each.
    counts, contexts : tuple of int
        What `query_starts` and `context_lens` say, on the host: who needs only these waits for no copy.
    """

    ids: Any
    positions: Any
    slots: Any
    query_starts: Any
    context_lens: Any
    block_tables: Any
    logits_rows: Any
    num_decodes: int
    counts: tuple[int, ...]
    contexts: tuple[int, ...]

    def on_device(self) -> ModelInputs:
        """Inputs that are on the host, on the device."""
        names = ["ids", "positions", "slots", "query_starts", "context_lens", "block_tables", "logits_rows"]
        return replace(self, **{name: cp.asarray(getattr(self, name)) for name in names})


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of a step that go through the model together: one entry per request in each list.

    Attributes
    ----------
    index : list of int
        Of the request in the scheduler's batch.
    starts, counts : list of int
        First token and number of tokens.
    rows : list of list of int
        The tokens (their positions) whose logits are wanted.
    num_decodes : int
        The first so many requests decode.
    """

    index: list[int]
    starts: list[int]
    counts: list[int]
    rows: list[list[int]]
    num_decodes: int


def pack(sequences: Sequence[Sequence[int]]) -> tuple[Any, Any, Any]:
    """Ragged token lists one after the other, with no padding.

    Returns
    -------
    ids, positions : (T,) int32
        Positions count from 0 in every sequence.
    query_starts : (B + 1,) int32
    """
    counts = np.array([len(sequence) for sequence in sequences], np.int32)
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    ids = np.array([token for sequence in sequences for token in sequence], np.int32)
    positions = np.arange(starts[-1], dtype=np.int32) - np.repeat(starts[:-1], counts)
    return cp.asarray(ids), cp.asarray(positions), cp.asarray(starts)


def padded(tables: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """The first blocks of each table in a row: (B, width) int32, -1 behind those of shorter ones."""
    columns = list(islice(zip_longest(*tables, fillvalue=-1), width))
    columns += [(-1,) * len(tables)] * (width - len(columns))
    return np.ascontiguousarray(np.array(columns, np.int32).T)


def host_inputs(
    sequences: Sequence[Sequence[int]],
    starts: Sequence[int],
    tables: Sequence[Sequence[int]],
    rows: Sequence[int],
    num_decodes: int,
    block_size: int,
) -> ModelInputs:
    """Inputs of a step, in NumPy arrays; the parameters are those of :func:`make_inputs`."""
    counts = [len(sequence) for sequence in sequences]
    contexts = [start + count for start, count in zip(starts, counts, strict=True)]
    block_tables = padded(tables, -(-max(contexts) // block_size))
    lengths = np.array(counts, np.int32)
    query_starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(lengths, out=query_starts[1:])
    # Of a token of a request: its place in the step, less its position.
    before = query_starts[:-1] - np.array(starts, np.int32)
    positions = np.arange(query_starts[-1], dtype=np.int32) - np.repeat(before, lengths)
    block, offset = np.divmod(positions, np.int32(block_size))
    blocks = block_tables[np.repeat(np.arange(len(counts)), lengths), block]
    return ModelInputs(
        np.fromiter(chain.from_iterable(sequences), np.int32, len(positions)),
        positions,
        blocks.astype(np.int64) * block_size + offset,
        query_starts,
        np.array(contexts, np.int32),
        block_tables,
        np.array(rows, np.int32),
        num_decodes,
        tuple(counts),
        tuple(contexts),
    )


def make_inputs(
    sequences: Sequence[Sequence[int]],
    starts: Sequence[int],
    tables: Sequence[Sequence[int]],
    rows: Sequence[int],
    num_decodes: int,
    block_size: int,
    pack: Callable[..., tuple[Any, Any, Any]] = pack,
) -> ModelInputs:
    """Inputs of a step, on the device.

    Parameters
    ----------
    sequences : sequence of sequence of int
        The tokens that each request computes.
    starts : sequence of int
        How many tokens each request has in the cache already.
    tables : sequence of sequence of int
        Each request's blocks: enough for its tokens after this step.
    rows : sequence of int
        Index of the tokens, in the packed order, whose logits are wanted.
    num_decodes : int
        The first so many requests have one token each.
    block_size : int
        BS.
    pack : callable
        With the contract of :func:`pack`.
    """
    inputs = host_inputs(sequences, starts, tables, rows, num_decodes, block_size)
    ids, positions, query_starts = pack(sequences)
    if any(starts):
        positions = positions + cp.asarray(np.repeat(np.array(starts, np.int32), inputs.counts))
    names = ["slots", "context_lens", "block_tables", "logits_rows"]
    others = {name: cp.asarray(getattr(inputs, name)) for name in names}
    return replace(inputs, ids=ids, positions=positions, query_starts=query_starts, **others)


def inputs_of(
    batch: ScheduledBatch, piece: Piece, block_size: int, make: Callable[..., ModelInputs]
) -> ModelInputs:
    """Inputs of one piece of the scheduler's batch; `make` is :func:`make_inputs` or :func:`host_inputs`."""
    sequences, tables, rows, packed = [], [], [], 0
    for index, start, count, wanted in zip(piece.index, piece.starts, piece.counts, piece.rows, strict=True):
        sequences.append(batch.requests[index].token_ids[start : start + count])
        tables.append(batch.block_tables[index])
        rows += [packed + position - start for position in wanted]
        packed += count
    return make(sequences, piece.starts, tables, rows, piece.num_decodes, block_size)


def whole_batch(batch: ScheduledBatch, block_size: int) -> ModelInputs:
    """Inputs of a whole batch, on the host, where only the last token of a request that samples wants logits."""
    sequences = [
        request.token_ids[start : start + count]
        for request, start, count in zip(batch.requests, batch.starts, batch.num_tokens, strict=True)
    ]
    ends = accumulate(batch.num_tokens)
    rows = [end - 1 for end in compress(ends, batch.samples)]
    return host_inputs(sequences, batch.starts, batch.block_tables, rows, batch.num_decodes, block_size)


def pieces_of(batch: ScheduledBatch, max_rows: int) -> list[Piece]:
    """Cut a batch so that no piece wants more than `max_rows` rows of logits.

    Only a request that asks for the log probabilities of its prompt wants more than one row, so mostly the
    piece is the whole batch. The order of a request's tokens is kept: a later piece reads from the cache what
    an earlier one wrote.
    """
    max_rows = max(max_rows, batch.num_decodes)
    pieces: list[Piece] = []
    piece, used = Piece([], [], [], [], batch.num_decodes), 0
    for index, request in enumerate(batch.requests):
        start, end = batch.starts[index], batch.starts[index] + batch.num_tokens[index]
        wants_prompt = request.params.prompt_logprobs is not None and request.parent is None
        while start < end:
            first_row = start if wants_prompt and start < request.num_prompt_tokens else end
            if used >= max_rows and piece.index:
                pieces.append(piece)
                piece, used = Piece([], [], [], [], 0), 0
            count = min(end - start, max_rows - used) if first_row == start else end - start
            last = start + count == end and batch.samples[index]
            # The logits of a prompt's token tell of the token after it; those of the last are drawn from.
            limit = min(start + count, request.num_prompt_tokens - 1) if first_row == start else start
            wanted = [*range(start, limit), *([end - 1] if last else [])]
            for values, value in zip(
                (piece.index, piece.starts, piece.counts, piece.rows),
                (index, start, count, wanted),
                strict=True,
            ):
                values.append(value)  # type: ignore[attr-defined]
            used += len(wanted)
            start += count
    pieces.append(piece)
    return pieces
