"""The fast path of the reference's engine on a card: fused kernels, recorded steps, and a step that runs ahead.

The simple path (``model.py``) calls one part after the other, and is what this one is checked against. Here

- a decode step is one graph for each size of batch, or one persistent kernel for a single request; drawing the
  token and preparing the next step's inputs are part of it, so that the host only reads tokens;
- while the host works on a step's tokens, the next step is computed already, for the same requests with one token
  more, without those that this step ends by their length. Where more of them have ended meanwhile, their tokens are
  left aside. Where another request is to join, that step is dropped: it has written nothing but keys and values that
  are computed again or that nobody reads;
- every other step (prefill, chunks, a mixture) is one graph for each size of step, with attention on tensor cores. Its
  inputs go to the device by one copy, and another graph draws its tokens: between two such steps the card waits only
  until the host has taken note of the tokens, and has scheduled the next step.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .batch import ModelInputs, padded, whole_batch
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
from .sampler import SAMPLING_TYPES, has_penalties, sampling_options
from .staging import Staged

if TYPE_CHECKING:
    from .scheduler import ScheduledBatch

_SOME_SEATS = 16  # requests of a step that is recorded for more than one and less than all
_FINER_STEPS = ((2, 1), (4, 2), (16, 4), (64, 8), (128, 16))  # from a size below the first to the next size
_FINEST = 16  # tokens: sizes of a prefill are not told apart more finely
_FEWEST_BLOCKS = 64  # columns of a step's block tables: fewer are not told apart
_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "seeds")
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


def table_size(blocks: int, most: int) -> int:
    """Columns of a step's block tables, rounded up to few sizes: four times the one before, at most `most`."""
    size = _FEWEST_BLOCKS
    while size < blocks:
        size *= 4
    return min(size, most)


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
        tokens: list[int] = self._tokens[: self._count].tolist()
        return tokens


def _fill(array: np.ndarray, values: Any, size: int, rest: int = 0) -> None:
    """Begin an array with `values`, and put `rest` from there to `size`."""
    array[: len(values)], array[len(values) : size] = values, rest


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
            # A notebook keeps the error, and with it this object and what was half made when memory ran out.
            self.__dict__.clear()
            traceback.clear_frames(error.__traceback__)
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

    # ---------------- steps whose tokens are drawn on the device

    def can_draw(self, batch: ScheduledBatch) -> bool:
        """Whether :meth:`draw` has room for a step, and nobody looks at its logits on the host."""
        if len(batch.requests) > self._seats_most or batch.total_tokens > self._tokens_most:
            return False
        for request, start in zip(batch.requests, batch.starts, strict=True):
            params = request.params
            if params.logprobs is not None or has_penalties(params):
                return False
            if params.prompt_logprobs is not None and start < request.num_prompt_tokens:
                return False
        return True

    def draw(self, batch: ScheduledBatch) -> list[int]:
        """Compute a step, and draw the next token of each request that samples.

        Parameters
        ----------
        batch : ScheduledBatch
            Such that :meth:`can_draw` says yes.

        Returns
        -------
        list of int
            The drawn tokens, in the batch's order.
        """
        if batch.num_decodes == len(batch.requests):
            return self.decode(batch)
        drawing = [request for request, samples in zip(batch.requests, batch.samples, strict=True) if samples]
        greedy = all(request.params.greedy for request in drawing)
        inputs = whole_batch(batch, self._block_size)
        self.forward(inputs, [] if greedy else drawing)
        if not drawing:
            return []
        seats = self.step_seats(len(batch.requests))
        self._launch(("draw", seats, greedy), self._launch_draw, seats, greedy)
        return self._fetch(len(drawing)).wait()

    # ---------------- decode

    def decode(self, batch: ScheduledBatch) -> list[int]:
        """Compute one token of each request, and draw the next.

        Parameters
        ----------
        batch : ScheduledBatch
            One token of each request, such that :meth:`can_draw` says yes.

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
        requests, starts, count = batch.requests, batch.starts, len(batch.requests)
        size, width = self._size_of(count), max(map(len, batch.block_tables))
        s = self._seating.host()
        ids = [request.token_ids[start] for request, start in zip(requests, starts, strict=True)]
        _fill(s["ids"], ids, size)
        _fill(s["contexts"], [start + 1 for start in starts], size)
        self._greedy = all(request.params.greedy for request in requests)
        self._fill_options(s, requests, size, self._greedy)
        self._seating.send("seeds", size, self._stream)
        with self._stream:
            self._tables[:count, :width] = cp.asarray(padded(batch.block_tables, width))
        self._seats = [
            _Seat(request, start, len(table))
            for request, start, table in zip(requests, starts, batch.block_tables, strict=True)
        ]

    def _fill_options(
        self, s: dict[str, np.ndarray], requests: Sequence[Request], size: int, greedy: bool
    ) -> None:
        """The numbers of the tokens that are drawn, and what they depend on besides."""
        _fill(s["steps"], [request.num_output_tokens for request in requests], size)
        if not greedy:
            options = sampling_options([request.params for request in requests])
            for name, values in zip(_OPTIONS, options, strict=True):
                _fill(s[name], values, size)

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
        for seat in self._seats:
            seat.context += 1
        return self._fetch(count)

    def _fetch(self, count: int) -> _Result:
        """Let the first `count` drawn tokens come to the host."""
        result = self._results[0]
        self._results.reverse()  # the other one may still be waited for
        result.fetch(self._chosen, count, self._stream)
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
        some = slice(0, size)
        residual, normed, qkv = self._residual[some], self._normed[some], self._qkv[some]
        attended, activated = self._attended[some], self._activated[some]
        norm = weights["layers.0.input_layernorm"]
        rows_.embed_norm(
            *(self._ids[some], weights["embed_tokens"], norm, eps, residual, normed), dependent=True
        )
        for layer in range(config.num_hidden_layers):
            name = f"layers.{layer}"
            keys, values = self._kv_cache.layer(layer)
            norm = weights[f"{name}.input_layernorm"]
            do.of_norm(residual, norm, weights[f"{name}.qkv"], qkv, ready=layer == 0)
            attention.decode_attention(
                *(qkv, keys, values, self._tables[some], self._contexts[some], weights["inv_freq"]),
                *(config.head_dim**-0.5, attended, self._scratch[size]),
                dependent=True,
            )
            do.add(attended.reshape(size, -1), weights[f"{name}.o_proj"], residual)
            norm = weights[f"{name}.post_attention_layernorm"]
            do.gated(residual, norm, weights[f"{name}.gate_up"], activated)
            do.add(activated, weights[f"{name}.down_proj"], residual)
        do.of_norm(residual, weights["norm"], weights.lm_head, self._logits[some])
        self._launch_end(some, greedy)

    def _launch_end(self, some: slice, greedy: bool, chosen: bool = False) -> None:
        """Draw a token of each row's logits, where the largest one has not been `chosen` yet; prepare the next step."""
        if not (greedy and chosen):
            self._draw(some, greedy, self._seating, dependent=True)
        advance(self._chosen[some], self._ids[some], self._contexts[some], self._steps[some])

    def _draw(self, some: slice, greedy: bool, options: Staged, *, dependent: bool) -> None:
        """Draw a token of each row's logits; what is drawn with stands beside the rows' other inputs."""
        logits, tokens = self._logits[some], self._chosen[some]
        if greedy:
            rows_.argmax_rows(logits, tokens, self._argmax_scratch[some], dependent=dependent)
        else:
            arrays = (options.device[name][some] for name in (*_OPTIONS, "steps"))
            temperature, top_k, top_p, min_p, seeds, steps = arrays
            sample_rows(
                *(logits, temperature, top_k, top_p, min_p, seeds, steps, tokens), dependent=dependent
            )

    # ---------------- all other steps

    def can_forward(self, inputs: ModelInputs) -> bool:
        """Whether :meth:`forward` has room for a step."""
        return (
            len(inputs.counts) <= self._seats_most
            and len(inputs.logits_rows) <= self._seats_most
            and inputs.ids.shape[0] <= self._tokens_most
        )

    def forward(self, inputs: ModelInputs, drawing: Sequence[Request] = ()) -> Any:
        """Compute a step's tokens, and write their keys and values to the cache.

        Parameters
        ----------
        inputs : ModelInputs
            On the host.
        drawing : sequence of Request
            The requests of ``inputs.logits_rows``, where their options are wanted on the device, too.

        Returns
        -------
        (R, V) float32
            Logits of ``inputs.logits_rows``; the next step writes over them.
        """
        self.drop()
        key = self.step_key(inputs)
        size, seats, _, blocks, _ = key
        self._bring(inputs, drawing, size, seats, blocks)
        self._launch(("step", *key), self._launch_step, *key)
        return self._logits[: len(inputs.logits_rows)]

    def step_key(self, inputs: ModelInputs) -> tuple[int, int, int, int, bool]:
        """What a step's recording depends on: the arguments of its launches."""
        size = step_size(len(inputs.ids), self._tokens_most)
        seats = self.step_seats(max(len(inputs.counts), len(inputs.logits_rows)))
        blocks = table_size(inputs.block_tables.shape[1], self._width)
        return size, seats, longest_size(max(inputs.counts), size), blocks, len(inputs.logits_rows) > 0

    def _bring(
        self, inputs: ModelInputs, drawing: Sequence[Request], size: int, seats: int, blocks: int
    ) -> None:
        """Copy a step's inputs to the device, and what pads them."""
        s, tokens, requests = self._step.host(), len(inputs.ids), len(inputs.counts)
        s["ids"][:tokens], s["positions"][:tokens] = inputs.ids, inputs.positions
        _fill(s["slots"], inputs.slots, size, -1)
        _fill(s["starts"], inputs.query_starts, seats + 1, tokens)
        _fill(s["lens"], inputs.context_lens, seats)
        _fill(s["rows"], inputs.logits_rows, seats)
        tables = s["tables"][: requests * blocks].reshape(requests, blocks)
        tables[:, : inputs.block_tables.shape[1]] = inputs.block_tables
        if drawing:
            self._fill_options(s, drawing, seats, greedy=False)
        self._step.send("tables", requests * blocks, self._stream)

    def step_seats(self, requests: int) -> int:
        """The number of requests that a step is recorded for: few numbers, for one that is not there costs little."""
        most = self._seats_most
        return next(seats for seats in (1, min(_SOME_SEATS, most), most) if seats >= requests)

    def _launch_step(self, size: int, seats: int, longest: int, blocks: int, heads: bool) -> None:
        """`size` tokens of up to `seats` requests of up to `longest` each, and up to `seats` rows of logits."""
        config, weights, eps, s = self._config, self._weights, self._config.rms_norm_eps, self._step.device
        tables = s["tables"][: seats * blocks].reshape(seats, blocks)
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
                *(b.q, keys, values, tables, s["starts"][: seats + 1], s["lens"][:seats]),
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

    def _launch_draw(self, seats: int, greedy: bool) -> None:
        """Draw a token of each of a step's rows of logits."""
        self._draw(slice(0, seats), greedy, self._step, dependent=False)

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
        types = zip(("steps", *_OPTIONS), (np.int32, *SAMPLING_TYPES), strict=True)
        drawing: dict[str, Any] = {name: (seats, dtype) for name, dtype in types}
        self._seating = Staged({"ids": (seats, np.int32), "contexts": (seats, np.int32), **drawing})
        names = ("ids", "contexts", "steps")
        self._ids, self._contexts, self._steps = (self._seating.device[name] for name in names)
        self._chosen = cp.zeros(seats, np.int32)
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
            *(self._products, config.rms_norm_eps, self._normed), cp.empty((seats, 2 * ffn), np.uint16)
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
        self._step = Staged(
            {
                "ids": (tokens, np.int32),
                "positions": (tokens, np.int32),
                "slots": (tokens, np.int64),
                "starts": (seats + 1, np.int32),
                "lens": (seats, np.int32),
                "rows": (seats, np.int32),
                **drawing,
                "tables": (seats * self._width, np.int32),
            }
        )


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
