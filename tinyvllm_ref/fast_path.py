"""The fast path of the reference's engine on a card: fused kernels, recorded steps, and a step that runs ahead.

The simple path (``model.py``) calls one part after the other, and is what this one is checked against. Here

- a decode step is one graph for each size of batch, or one persistent kernel for a single request; drawing the
  token and preparing the next step's inputs are part of it, so that the host only reads tokens;
- while the host works on a step's tokens, the next step is computed already, for the same requests with one token
  more, without those that this step ends by their length. Where more of them have ended meanwhile, their tokens are
  left aside. Where another request is to join, that step is dropped: it has written nothing but keys and values that
  are computed again or that nobody reads;
- every other step (prefill, chunks, a mixture) is one graph for each size of step, with attention on tensor cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .batch import ModelInputs
from .buffers import Buffers, arena_bytes
from .capturable_blas import Products
from .config import EngineConfig, ModelConfig
from .decode_graph import Recording, can_record
from .decode_products import DecodeProducts, FewRows, ManyRows, few_rows
from .device import cp, free_bytes, is_gpu
from .kernels import decode_attention as attention
from .kernels import decode_rows as rows_
from .kernels import prefill_attention
from .kernels.advance import advance
from .kernels.decode_step import DecodeStep
from .kernels.gather_rows import gather_rows
from .kernels.launch import ceil_div
from .kernels.rope_write import rope_write
from .kernels.sampling import sample_rows
from .kernels.skinny_linear import SkinnyScratch
from .kv_cache import KVCache
from .model import Model
from .parts import Parts
from .request import Request
from .sampler import SAMPLING_TYPES, has_penalties, sampling_arrays

if TYPE_CHECKING:
    from .scheduler import ScheduledBatch

_SOME_SEATS = 16  # requests of a step that is recorded for more than one and less than all
_FINER_STEPS = ((2, 1), (4, 2), (16, 4), (64, 8), (128, 16))  # from a size below the first to the next size
_FINEST = 16  # tokens: sizes of a prefill are not told apart more finely
_TO_HOST, _TO_DEVICE = 2, 1  # cudaMemcpyKind
_MIN_CAPABILITY = 80  # cuBLAS has products of bfloat16 matrices from there on


def unsupported(model: Model, config: EngineConfig, parts: Parts | None = None) -> str:
    """Why a model is run by the simple path; "" where the fast one can run it.

    Parameters
    ----------
    model : Model
    config : EngineConfig
    parts : Parts, optional
        Of the engine, where they are others than the model's.
    """
    sizes = model.config
    if config.fast_path == "off":
        return "fast_path is 'off'"
    owners = [*model.parts.owners().items(), *(parts.owners().items() if parts is not None else ())]
    learners = dict.fromkeys(name for name, owner in owners if owner != "reference")
    if learners:
        return f"parts are not the reference's: {', '.join(learners)}"
    if is_gpu and not can_record():
        return "this device has no CUDA graphs"
    if is_gpu and int(cp.cuda.Device().compute_capability) < _MIN_CAPABILITY:
        return f"compute capability is {cp.cuda.Device().compute_capability}; it must be {_MIN_CAPABILITY} or more"
    heads, kv_heads, head_dim = sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim
    if not attention.supports(heads, kv_heads, head_dim) or not prefill_attention.supports(head_dim):
        return f"its kernels are not made for {heads} heads on {kv_heads} of {head_dim} columns"
    for name in ("hidden_size", "intermediate_size"):
        if getattr(sizes, name) % 8:
            return f"{name} is {getattr(sizes, name)}; it must be a multiple of 8"
    return ""


def decode_sizes(most: int) -> list[int]:
    """The numbers of rows that a decode step is recorded for, up to `most`: steps of an eighth to a half."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size += next((step for below, step in _FINER_STEPS if size < below), 32)
    return [*sizes, most]


def step_size(tokens: int, most: int) -> int:
    """`tokens` rounded up to a size that is recorded: four for each doubling, at most `most`."""
    unit = max(_FINEST, 1 << max(0, (tokens - 1).bit_length() - 3))
    return min(most, ceil_div(tokens, unit) * unit)


def longest_size(tokens: int, most: int) -> int:
    """The most tokens of one request in a step, rounded up to a power of two: at most `most`."""
    return min(most, max(_FINEST, 1 << (tokens - 1).bit_length()))


@dataclass(slots=True)
class _Seat:
    """A row of the decode arrays: whose it is, and what the device has of it."""

    request: Request
    context: int  # tokens in the cache after the step that was started last
    blocks: int  # of its table
    left: bool = False  # its request has ended; until all are seated anew, the row pads the steps


class _Result:
    """The tokens of a step that was started, on their way to the host."""

    def __init__(self, rows: int) -> None:
        self._memory = cp.cuda.alloc_pinned_memory(4 * rows)
        self._tokens = np.frombuffer(self._memory, np.int32, rows)
        self._done = cp.cuda.Event(disable_timing=True)
        self._count = 0

    def fetch(self, chosen: Any, count: int, stream: Any) -> None:
        """Copy the first `count` of `chosen` once the stream comes to it."""
        self._count = count
        cp.cuda.runtime.memcpyAsync(
            self._tokens.ctypes.data, chosen.data.ptr, 4 * count, _TO_HOST, stream.ptr
        )
        self._done.record(stream)

    def wait(self) -> list[int]:
        """The tokens, when they have come."""
        self._done.synchronize()
        return [int(token) for token in self._tokens[: self._count]]


class FastPath:
    """Runs the steps of one model by recorded launches.

    Parameters
    ----------
    model : Model
        Such that :func:`unsupported` says nothing.
    config : EngineConfig

    Raises
    ------
    MemoryError
        Its arrays do not fit; the message says what they take, and what to lower.

    Notes
    -----
    Memory for activations is taken here; :meth:`use` takes the cache, which is measured afterwards.
    """

    def __init__(self, model: Model, config: EngineConfig) -> None:
        self._config: ModelConfig = model.config
        self._weights: Any = model.weights
        self._block_size = config.block_size
        self._seats_most = config.max_num_seqs
        self._tokens_most = config.max_num_batched_tokens
        self._sizes = decode_sizes(self._seats_most)
        self._stream: Any = cp.cuda.Stream(non_blocking=False) if is_gpu else cp.cuda.Stream.null
        self._width = _table_width(model.config, config)
        self._recordings: dict[tuple[Any, ...], Recording] = {}
        try:
            self._products = Products(self._stream)
            self._allocate()
            self._persistent = (
                None if DecodeStep.unsupported(model.config) else DecodeStep(model.config, model.weights)
            )
        except cp.cuda.memory.OutOfMemoryError as error:
            self.__dict__.clear()  # a notebook keeps the error, and with it this object
            raise MemoryError(f"{_what_it_takes(model.config, config)} ({error})") from None
        self._seats: list[_Seat] = []
        self._ahead: _Result | None = None
        self._greedy = True
        self._kv_cache: KVCache

    def use(self, kv_cache: KVCache) -> None:
        """Work in this cache from now on."""
        self._kv_cache = kv_cache
        self._recordings.clear()

    def drop(self) -> None:
        """Forget the step that was started ahead, for another one comes: its tokens are drawn again."""
        self._ahead = None

    # ---------------- decode

    def can_decode(self, batch: ScheduledBatch) -> bool:
        """Whether a step is one token of each request, drawn without looking at its logits on the host."""
        return batch.num_decodes == len(batch.requests) and all(
            request.params.logprobs is None and not has_penalties(request.params)
            for request in batch.requests
        )

    def decode(self, batch: ScheduledBatch) -> list[int]:
        """Compute one token of each request, and draw the next.

        Parameters
        ----------
        batch : ScheduledBatch
            Such that :meth:`can_decode` says yes.

        Returns
        -------
        list of int
            The drawn tokens, in the batch's order.
        """
        result, self._ahead = self._ahead, None
        rows = [] if result is None else self._rows_of(batch)
        if result is None or not rows:
            self._seat(batch)
            result, rows = self._start(), list(range(len(batch.requests)))
        else:
            if len(rows) < len(self._seats):
                self._leave(set(range(len(self._seats))) - set(rows))
            self._extend_tables(rows, batch)
        # This step gives the token number context + 1; where that is the last one, the request ends with it.
        ending = {
            row for row in rows if self._seats[row].context + 1 >= self._seats[row].request.max_num_tokens
        }
        if self._may_run_ahead(ending, rows, batch.others_wait):
            self._leave(ending)
            self._ahead = self._start()
        tokens = result.wait()
        return [tokens[row] for row in rows]

    def _rows_of(self, batch: ScheduledBatch) -> list[int]:
        """The rows of a batch's requests in the step that was started ahead; none where that is another step."""
        rows, row = [], 0
        for request, start in zip(batch.requests, batch.starts, strict=True):
            while row < len(self._seats) and self._seats[row].request is not request:
                row += 1  # ended meanwhile, or before
            if row == len(self._seats) or self._seats[row].left or self._seats[row].context != start + 1:
                return []
            rows.append(row)
        return rows

    def _may_run_ahead(self, ending: set[int], rows: list[int], others_wait: bool) -> bool:
        """Whether the next step is likely to be for the rows that do not end, and has blocks to write to."""
        staying = [row for row in rows if row not in ending]
        if not staying or (ending and others_wait):  # one who waits takes the seat
            return False
        # Where a smaller step would do, they are better seated anew.
        if self._size_of(len(staying)) < self._size_of(len(self._seats)):
            return False
        seats = (self._seats[row] for row in staying)
        return all(seat.context < seat.blocks * self._block_size for seat in seats)

    def _leave(self, rows: set[int]) -> None:
        """From the next step on, rows whose requests have ended are such that pad a batch."""
        for row in rows:
            if not self._seats[row].left:
                self._seats[row].left = True
                with self._stream:
                    self._contexts[row : row + 1].fill(0)

    def _seat(self, batch: ScheduledBatch) -> None:
        """Bring the requests' tokens, contexts and tables to the device."""
        count = len(batch.requests)
        size = self._size_of(count)
        contexts = np.zeros(size, np.int32)
        ids, steps = np.zeros(size, np.int32), np.zeros(size, np.int32)
        width = max(map(len, batch.block_tables))
        tables = np.full((count, width), -1, np.int32)
        self._seats = []
        for row, (request, start, table) in enumerate(
            zip(batch.requests, batch.starts, batch.block_tables, strict=True)
        ):
            ids[row], contexts[row] = request.token_ids[start], start + 1
            steps[row] = request.num_output_tokens
            tables[row, : len(table)] = table
            self._seats.append(_Seat(request, start, len(table)))
        with self._stream:
            for to, values in ((self._ids, ids), (self._contexts, contexts), (self._steps, steps)):
                to[:size].set(values)
            self._tables[:count, :width] = cp.asarray(tables)
            self._greedy = all(request.params.greedy for request in batch.requests)
            if not self._greedy:
                options = sampling_arrays([request.params for request in batch.requests])
                for to, values in zip(self._options, options, strict=True):
                    to[:count] = values

    def _extend_tables(self, rows: list[int], batch: ScheduledBatch) -> None:
        """Bring the blocks to the device that requests have got since."""
        for row, table in zip(rows, batch.block_tables, strict=True):
            seat, count = self._seats[row], len(table)
            if count > seat.blocks:
                self._mirror[row, seat.blocks : count] = table[seat.blocks :]
                offset = 4 * (row * self._width + seat.blocks)
                cp.cuda.runtime.memcpyAsync(
                    self._tables.data.ptr + offset,
                    self._mirror.ctypes.data + offset,
                    4 * (count - seat.blocks),
                    _TO_DEVICE,
                    self._stream.ptr,
                )
                seat.blocks = count

    def _start(self) -> _Result:
        """Start a step for those who are seated."""
        count = len(self._seats)
        size = self._size_of(count)
        persistent = count == 1 and self._persistent is not None
        launches = self._launch_persistent if persistent else self._launch_decode
        self._launch(("decode", size, self._greedy), launches, size, self._greedy)
        result = self._results[0]
        self._results.reverse()  # the other one may still be waited for
        result.fetch(self._chosen, count, self._stream)
        for seat in self._seats:
            seat.context += 1
        return result

    def _launch_persistent(self, size: int, greedy: bool) -> None:
        """One decode step of one row, up to the next step's inputs."""
        kv, one = self._kv_cache, slice(0, size)
        self._persistent(  # type: ignore[misc]
            self._ids[one],
            self._tables[0],
            self._contexts[one],
            kv.keys,
            kv.values,
            self._logits[0],
            self._chosen[one],
        )
        self._launch_end(one, greedy, chosen=True)

    def _launch_decode(self, size: int, greedy: bool, products: DecodeProducts | None = None) -> None:
        """One decode step of `size` rows, up to the next step's inputs."""
        config, weights, eps = self._config, self._weights, self._config.rms_norm_eps
        do: DecodeProducts = products or (self._few if size <= self._few_rows else self._many)
        some, dependent = slice(0, size), do.dependent
        residual, normed, qkv = self._residual[some], self._normed[some], self._qkv[some]
        attended, activated = self._attended[some], self._activated[some]
        norm = weights["layers.0.input_layernorm"]
        rows_.embed_norm(
            *(self._ids[some], weights["embed_tokens"], norm, eps, residual, normed), dependent=dependent
        )
        for layer in range(config.num_hidden_layers):
            name = f"layers.{layer}"
            keys, values = self._kv_cache.layer(layer)
            norm = weights[f"{name}.input_layernorm"]
            do.of_norm(residual, norm, weights[f"{name}.qkv"], qkv, ready=layer == 0)
            attention.decode_attention(
                *(qkv, keys, values, self._tables[some], self._contexts[some], weights["inv_freq"]),
                *(config.head_dim**-0.5, attended, self._scratch[size]),
                dependent=dependent,
            )
            do.add(attended.reshape(size, -1), weights[f"{name}.o_proj"], residual)
            norm = weights[f"{name}.post_attention_layernorm"]
            do.gated(residual, norm, weights[f"{name}.gate_up"], activated)
            do.add(activated, weights[f"{name}.down_proj"], residual)
        do.of_norm(residual, weights["norm"], weights.lm_head, self._logits[some])
        self._launch_end(some, greedy, dependent=dependent)

    def _launch_end(self, some: slice, greedy: bool, chosen: bool = False, dependent: bool = False) -> None:
        """Draw a token of each row's logits, where the largest one has not been `chosen` yet; prepare the next step."""
        logits, tokens, steps = self._logits[some], self._chosen[some], self._steps[some]
        if not greedy:
            temperature, top_k, top_p, min_p, seeds = (option[some] for option in self._options)
            sample_rows(
                *(logits, temperature, top_k, top_p, min_p, seeds, steps, tokens), dependent=dependent
            )
        elif not chosen:
            rows_.argmax_rows(logits, tokens, self._argmax_scratch[some], dependent=dependent)
        advance(tokens, self._ids[some], self._contexts[some], steps)

    # ---------------- all other steps

    def can_forward(self, inputs: ModelInputs) -> bool:
        """Whether :meth:`forward` has room for a step."""
        return (
            len(inputs.counts) <= self._seats_most
            and len(inputs.logits_rows) <= self._seats_most
            and inputs.ids.shape[0] <= self._tokens_most
        )

    def forward(self, inputs: ModelInputs) -> Any:
        """Compute a step's tokens, and write their keys and values to the cache.

        Returns
        -------
        (R, V) float32
            Logits of ``inputs.logits_rows``; the next step writes over them.
        """
        self.drop()
        tokens, requests, wanted = len(inputs.ids), len(inputs.counts), len(inputs.logits_rows)
        size, seats = step_size(tokens, self._tokens_most), self.step_seats(max(requests, wanted))
        longest = longest_size(max(inputs.counts), size)
        with self._stream:
            s = self._step
            s["ids"][:tokens], s["positions"][:tokens] = inputs.ids, inputs.positions
            s["slots"][:tokens] = inputs.slots
            s["slots"][tokens:size] = -1
            s["starts"][: requests + 1] = inputs.query_starts
            s["starts"][requests + 1 : seats + 1] = tokens
            s["lens"][:requests], s["lens"][requests:seats] = inputs.context_lens, 0
            s["tables"][:requests, : inputs.block_tables.shape[1]] = inputs.block_tables
            s["rows"][:wanted], s["rows"][wanted:seats] = inputs.logits_rows, 0
        key = (size, seats, longest, wanted > 0)
        self._launch(("step", *key), self._launch_step, *key)
        return self._logits[:wanted]

    def step_seats(self, requests: int) -> int:
        """The number of requests that a step is recorded for: few numbers, for one that is not there costs little."""
        most = self._seats_most
        return next(seats for seats in (1, min(_SOME_SEATS, most), most) if seats >= requests)

    def _launch_step(self, size: int, seats: int, longest: int, heads: bool) -> None:
        """`size` tokens of up to `seats` requests of up to `longest` each, and up to `seats` rows of logits."""
        config, weights, eps, s = self._config, self._weights, self._config.rms_norm_eps, self._step
        b = self._buffers.step(config, size)
        some = slice(0, size)
        gate_up = b.gate_up.ravel().view(np.uint16)[: b.gate_up.size].reshape(b.gate_up.shape)
        layers = range(config.num_hidden_layers)
        norms = [*(f"layers.{i}.input_layernorm" for i in layers), "norm"]
        rows_.embed_norm(
            s["ids"][some], weights["embed_tokens"], weights[norms[0]], eps, b.residual, b.normed
        )
        for layer in layers:
            name = f"layers.{layer}"
            keys, values = self._kv_cache.layer(layer)
            self._products(b.normed, weights[f"{name}.qkv"], b.qkv)
            rope_write(b.qkv, s["positions"][some], weights["inv_freq"], s["slots"][some], b.q, keys, values)
            prefill_attention.prefill_attention(
                *(b.q, keys, values, s["tables"][:seats], s["starts"][: seats + 1], s["lens"][:seats]),
                *(longest, config.head_dim**-0.5, b.attended),
            )
            self._products(b.heads, weights[f"{name}.o_proj"], b.residual, accumulate=True)
            rows_.norm_rows(b.residual, weights[f"{name}.post_attention_layernorm"], eps, b.ffn_normed)
            self._products(b.ffn_normed, weights[f"{name}.gate_up"], gate_up)
            rows_.silu_mul_rows(gate_up, b.activated)
            self._products(b.activated, weights[f"{name}.down_proj"], b.residual, accumulate=True)
            if layer + 1 < config.num_hidden_layers:
                rows_.norm_rows(b.residual, weights[norms[layer + 1]], eps, b.normed)
        if heads:
            picked, normed = self._residual[:seats], self._normed[:seats]
            gather_rows(b.residual, s["rows"][:seats], picked)
            rows_.norm_rows(picked, weights["norm"], eps, normed)
            self._products(normed, weights.lm_head, self._logits[:seats])

    # ---------------- both

    def _launch(self, key: tuple[Any, ...], launches: Any, *args: Any) -> None:
        """Start recorded launches; the first time, start and record them."""
        if not can_record():
            launches(*args)
        elif key in self._recordings:
            self._recordings[key].start()
        else:
            self._recordings[key] = Recording(self._stream, lambda: launches(*args))

    def _size_of(self, count: int) -> int:
        return next(size for size in self._sizes if size >= count)

    def _allocate(self) -> None:
        """All arrays that recorded launches know."""
        config, seats, tokens = self._config, self._seats_most, self._tokens_most
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        hidden, ffn, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
        self._ids, self._contexts, self._steps, self._chosen = (cp.zeros(seats, np.int32) for _ in range(4))
        self._options = tuple(cp.zeros(seats, dtype) for dtype in SAMPLING_TYPES)
        self._tables = cp.zeros((seats, self._width), np.int32)
        self._mirror_memory = cp.cuda.alloc_pinned_memory(self._tables.nbytes)
        mirror = np.frombuffer(self._mirror_memory, np.int32, self._tables.size)
        self._mirror = mirror.reshape(self._tables.shape)
        self._residual = cp.empty((seats, hidden), np.float32)
        self._normed = cp.empty((seats, hidden), np.uint16)
        self._qkv = cp.empty((seats, config.q_size + 2 * config.kv_size), np.float32)
        self._attended = cp.zeros((seats, heads, dim), np.uint16)  # rows that pad a batch are not written
        self._activated = cp.empty((seats, ffn), np.uint16)
        self._logits = cp.empty((seats, vocab), np.float32)
        self._many = ManyRows(
            *(self._products, config.rms_norm_eps, self._normed), cp.empty((seats, 2 * ffn), np.float32)
        )
        self._few_rows = few_rows(config, seats)
        self._few = FewRows(
            SkinnyScratch(self._few_rows, hidden, max(config.q_size, ffn)), config.rms_norm_eps, self._normed
        )
        self._argmax_scratch = cp.empty(rows_.argmax_scratch(seats, vocab), np.uint64)
        self._scratch = {size: attention.DecodeScratch(size, heads, kv_heads, dim) for size in self._sizes}
        self._results = [_Result(seats), _Result(seats)]
        self._buffers = Buffers()
        self._buffers.reserve(config, tokens, 1)
        self._step = {
            "ids": cp.zeros(tokens, np.int32),
            "positions": cp.zeros(tokens, np.int32),
            "slots": cp.zeros(tokens, np.int64),
            "starts": cp.zeros(seats + 1, np.int32),
            "lens": cp.zeros(seats, np.int32),
            "tables": cp.zeros((seats, self._width), np.int32),
            "rows": cp.zeros(seats, np.int32),
        }


def _table_width(model: ModelConfig, config: EngineConfig) -> int:
    """Blocks of the longest request, and one more that it may be given ahead."""
    longest = min(config.max_model_len or model.max_position_embeddings, model.max_position_embeddings)
    return ceil_div(longest, config.block_size) + 1


def _what_it_takes(model: ModelConfig, config: EngineConfig) -> str:
    """The largest arrays of a fast path that does not fit, by the option that each depends on."""
    seats, tokens = config.max_num_seqs, config.max_num_batched_tokens
    tables = 2 * seats * _table_width(model, config) * 4
    return (
        f"the fast path may take {free_bytes():,} bytes, and needs more: {arena_bytes(model, tokens):,} for the "
        f"activations of max_num_batched_tokens = {tokens}, {4 * seats * model.vocab_size:,} for the logits of "
        f"max_num_seqs = {seats}, {tables:,} for their block tables (max_model_len = {config.max_model_len}): lower "
        "one of these, or free memory"
    )
