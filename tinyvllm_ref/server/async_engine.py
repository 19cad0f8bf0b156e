"""The engine behind an event loop: one thread makes the steps, and any number of coroutines wait for tokens.

>>> engine = AsyncEngine(LLM("tiny-stories"))  # doctest: +SKIP
>>> stream = await engine.submit(engine.encode("Once"), SamplingParams(max_tokens=8))  # doctest: +SKIP
>>> async for delta in stream:  # doctest: +SKIP
...     print(delta.text, end="")
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..llm import LLM
from ..lost_device import losses_named
from ..outputs import Logprob
from ..request import Request
from ..sampling_params import SamplingParams
from .deltas import Delta, DeltaMaker
from .failures import where

_FAILED = "the engine has failed"
_NORMALIZED = 4  # a tokenizer may shorten a text before it divides it (NFC, to a third at most)

log = logging.getLogger("tinyvllm.engine")


class EngineBusy(Exception):
    """As many requests are waiting as may wait; the same request may be sent again later."""


class EngineStopped(Exception):
    """The engine takes no more requests, or has ended this one: it is shutting down, or has failed."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine has in hand.

    Attributes
    ----------
    running, waiting : int
        Completions that are being computed, and that are not yet.
    blocks_used, blocks_total : int
        Of the KV cache.
    preemptions : int
        How often a finished request had lost its blocks, over all of them.
    """

    running: int
    waiting: int
    blocks_used: int
    blocks_total: int
    preemptions: int


class OutputStream:
    """What comes back for one prompt: an asynchronous iterator of :class:`Delta`.

    It ends when all completions have finished. Leave it early with :meth:`abort`, or by ``async with``.

    Attributes
    ----------
    request_id : str
    prompt_token_ids : list of int
    params : SamplingParams
    prompt_logprobs : list or None
        Of each token of the prompt, where they were asked for: complete when the first delta has come.
    """

    def __init__(
        self, engine: AsyncEngine, request_id: str, prompt_token_ids: list[int], params: SamplingParams
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._accepted: asyncio.Future[None] = self._loop.create_future()
        self._queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()
        self._ended = False

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self._ended:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, Delta):
            return item
        self._ended = True
        if item is None:
            raise StopAsyncIteration
        raise item

    async def __aenter__(self) -> OutputStream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.abort()

    def abort(self) -> None:
        """Nobody wants the rest: before its next step, the engine ends the request and frees its blocks.

        Of a request that has ended, nothing is left to abort, and this does nothing.
        """
        self._ended = True
        self._engine.abort(self.request_id)


# (stream, deltas, whether they are the last, log probabilities of the prompt)
_News = tuple[OutputStream, list[Delta], bool, Any]


class AsyncEngine:
    """Runs an :class:`~tinyvllm_ref.llm.LLM` in a thread of its own, for coroutines.

    From now on the LLM is that thread's; nothing else may call it.

    Parameters
    ----------
    llm : LLM
        With the reference's engine, or with a learner's.
    model_name : str, optional
        What clients call the model; by default its folder's name.
    max_queue : int
        The most completions that may wait beyond those that the engine runs at once.

    Attributes
    ----------
    model_name : str
    max_model_len : int
        The most tokens of a prompt and its completion together.
    capacity : int
        The most completions in hand: ``max_num_seqs + max_queue``.
    failed : bool
        Whether a step has raised an error: the engine is of no use any more.
    """

    def __init__(self, llm: LLM, *, model_name: str | None = None, max_queue: int = 256) -> None:
        if max_queue < 0:
            raise ValueError(f"AsyncEngine: max_queue is {max_queue}; it must be at least 0")
        self.llm = llm
        self.model_name = model_name or llm.folder.name
        engine = llm.engine
        self.max_model_len: int = getattr(engine, "max_model_len", llm.config.max_position_embeddings)
        self.capacity: int = llm.engine_config.max_num_seqs + max_queue
        self._ids = itertools.count()
        self._wake = threading.Condition()
        # Under the lock: what coroutines ask of the thread.
        self._added: deque[OutputStream] = deque()
        self._aborted: deque[str] = deque()
        self._stopping = False
        self._in_hand: dict[str, int] = {}  # completions of every stream that has not ended
        # The thread's alone.
        self._streams: dict[str, tuple[OutputStream, DeltaMaker]] = {}
        self._preemptions = 0
        self._refusing: str | None = None
        self.failed = False
        self._thread: threading.Thread | None = None

    # ---------------- for coroutines

    async def submit(
        self, prompt_token_ids: Sequence[int], params: SamplingParams | None = None
    ) -> OutputStream:
        """Put a prompt in the queue.

        Parameters
        ----------
        prompt_token_ids : sequence of int
            See :meth:`encode` and :meth:`encode_chat`.
        params : SamplingParams, optional

        Returns
        -------
        OutputStream

        Raises
        ------
        ValueError
            The request can never fit, or a token is outside the vocabulary.
        EngineBusy
            The queue is full.
        EngineStopped
            The engine is shutting down or has failed.
        """
        (stream,) = await self.submit_many([(prompt_token_ids, params or SamplingParams())])
        return stream

    async def submit_many(
        self, prompts: Sequence[tuple[Sequence[int], SamplingParams]]
    ) -> list[OutputStream]:
        """:meth:`submit` several prompts, all of them or none."""
        for ids, params in prompts:
            self._check_fits(ids, params)
        self.check_room(sum(params.n for _, params in prompts))
        streams = [OutputStream(self, f"{next(self._ids)}", list(ids), params) for ids, params in prompts]
        self._start()
        with self._wake:
            if self._stopping:  # by another thread, since the check: nobody would answer any more
                raise EngineStopped(self._refusing or _FAILED)
            self._in_hand |= {stream.request_id: stream.params.n for stream in streams}
            self._added.extend(streams)
            self._wake.notify()
        try:
            for stream in streams:
                await stream._accepted
        except BaseException:
            for stream in streams:
                stream.abort()
                stream._accepted.cancel()
            raise
        return streams

    def abort(self, request_id: str) -> None:
        """End a request before the next step, and free its blocks. One that has ended is left alone."""
        with self._wake:
            if request_id in self._in_hand:
                self._aborted.append(request_id)
                self._wake.notify()

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt.

        Raises
        ------
        ValueError
            The text is so long that no tokens of it could fit into the context.
        """
        self._check_length(text)
        return list(self.llm.tokenizer.encode(text))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, by the model's chat template.

        Raises
        ------
        ValueError
            The model has no template, it refuses the conversation, or the text is too long as for :meth:`encode`.
        """
        template = self.llm._template()
        if sum(len(str(message.get("content"))) for message in messages) > _NORMALIZED * self.max_model_len:
            self._check_length(template.apply_chat_template(messages))
        return list(template.encode_chat(messages))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        return str(self.llm.tokenizer.decode(ids))

    def check_room(self, completions: int) -> None:
        """Raise what :meth:`submit_many` would raise for so many completions at this moment."""
        if self._refusing is not None:
            raise EngineStopped(self._refusing)
        if completions > self.capacity:
            raise ValueError(
                f"{completions} completions were asked for at once; at most {self.capacity} can wait and run"
            )
        if self.in_hand + completions > self.capacity:
            raise EngineBusy(f"{self.capacity} completions wait or run, and no more may; try again later")

    @property
    def stats(self) -> EngineStats:
        """What is in hand at this moment."""
        engine = self.llm.engine
        with self._wake:
            in_hand = sum(self._in_hand.values())
        running = len(getattr(getattr(engine, "scheduler", None), "running", ()))
        blocks = getattr(engine, "blocks", None)
        total = getattr(getattr(engine, "runner", None), "num_blocks", 0)
        used = 0 if blocks is None else total - blocks.num_free
        return EngineStats(running, max(0, in_hand - running), used, total, self._preemptions)

    @property
    def in_hand(self) -> int:
        """Completions that wait or run."""
        with self._wake:
            return sum(self._in_hand.values())

    @property
    def refusing(self) -> str | None:
        """Why new requests are refused, or None while they are taken."""
        return self._refusing

    # ---------------- its life

    def refuse(self, reason: str = "the server is shutting down") -> None:
        """Take no more requests; those that are in hand go on."""
        self._refusing = self._refusing or reason

    def abort_all(self) -> None:
        """End everything in hand; whoever waits gets :class:`EngineStopped`."""
        with self._wake:
            self._aborted.extend(self._in_hand)
            self._wake.notify()

    def close(self, timeout: float | None = 10.0) -> bool:
        """End everything in hand and the thread; returns whether it has ended within `timeout` seconds."""
        self.refuse()
        with self._wake:
            self._stopping = True
            self._aborted.extend(self._in_hand)
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return True

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tinyvllm-engine", daemon=True)
            self._thread.start()

    def _check_fits(self, ids: Sequence[int], params: SamplingParams) -> None:
        """What can be known here is refused here; the engine refuses the rest."""
        if not ids:
            raise ValueError("the prompt is empty; it needs at least one token")
        vocabulary = self.llm.config.vocab_size
        for token in (min(ids), max(ids)):
            if not 0 <= token < vocabulary:
                raise ValueError(
                    f"token id {token} is in the prompt; ids must be from 0 to {vocabulary - 1}, the model's"
                    " vocabulary"
                )
        limit = self.max_model_len
        wanted = params.max_tokens or 1
        if len(ids) + wanted > limit:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and max_tokens is {wanted}; both together can have at most"
                f" {limit}, the context length of this model"
            )

    def _check_length(self, text: str) -> None:
        """Refuse a text that is far too long before it is made tokens of, which would take seconds."""
        limit = self.max_model_len
        if len(text) > _NORMALIZED * limit and self._longest_token:
            size = len(text.encode())
            if size > _NORMALIZED * limit * self._longest_token:
                raise ValueError(
                    f"the prompt has {size:,} bytes, which are more than {limit} tokens; it can have at most {limit},"
                    " the context length of this model"
                )

    @functools.cached_property
    def _longest_token(self) -> int:
        """Bytes of it; 0 where the tokenizer, a learner's, does not tell."""
        bytes_of = getattr(self.llm.tokenizer, "token_bytes", None)
        if bytes_of is None:
            return 0
        return max(len(bytes_of(token)) for token in range(self.llm.config.vocab_size))

    # ---------------- the engine's thread

    def _run(self) -> None:
        """Steps while there is work; between two of them, what coroutines have asked for."""
        while True:
            try:
                if not self._take_orders():
                    return
                with losses_named():
                    outputs = self.llm.engine.step() if self._streams else []
                self._hand_out(outputs)
            except Exception as error:
                # After a failed step nobody knows what the engine holds: no request may trust it.
                log.error("the engine has failed: %s", where(error))
                self._fail_all()

    def _take_orders(self) -> bool:
        """Wait for work; False at the end."""
        with self._wake:
            while not (self._streams or self._added or self._aborted or self._stopping):
                self._wake.wait()
            added, aborted = list(self._added), list(self._aborted)
            self._added.clear()
            self._aborted.clear()
            stopping = self._stopping
        # In this order, so that a request that is dropped while it is still on its way here is dropped, too.
        for stream in added:
            self._add(stream)
        for request_id in aborted:
            self._abort(request_id)
        return not stopping

    def _add(self, stream: OutputStream) -> None:
        llm = self.llm
        try:
            if self.failed:
                raise EngineStopped(_FAILED)
            eos = llm.config.eos_token_ids
            llm.engine.add_request(Request(stream.request_id, stream.prompt_token_ids, stream.params, eos))
        except Exception as error:
            self._forget(stream.request_id)
            self._call(stream, _refuse, stream, error)
            return
        self._streams[stream.request_id] = (stream, DeltaMaker(llm, stream.params))
        self._call(stream, _accept, stream)

    def _abort(self, request_id: str) -> None:
        if request_id not in self._streams:
            return
        stream, _ = self._streams.pop(request_id)
        reason = self._refusing or "the request was aborted"
        try:
            self.llm.engine.abort(request_id)
        finally:  # if this fails, too: whoever waits is told
            self._forget(request_id)
            self._call(stream, stream._queue.put_nowait, EngineStopped(reason))

    def _hand_out(self, outputs: Sequence[Any]) -> None:
        """What a step gave, to those who wait: one call into the event loop for all of them."""
        news: dict[asyncio.AbstractEventLoop, list[_News]] = {}
        try:
            for output in outputs:
                if output.request_id in self._streams:
                    item = self._news(output)
                    news.setdefault(item[0]._loop, []).append(item)
        finally:  # if one fails, those before it may have ended: nobody else would tell them
            for loop, items in news.items():
                try:
                    loop.call_soon_threadsafe(_deliver, items)
                except RuntimeError:  # the loop is closed: nobody waits any more
                    with self._wake:
                        self._aborted.extend(stream.request_id for stream, *_ in items)

    def _news(self, output: Any) -> _News:
        """What is new for one stream."""
        stream, maker = self._streams[output.request_id]
        deltas = maker.take(output)
        if maker.finished and not output.finished:  # by a stop string, which a learner's engine cannot see
            self.llm.engine.abort(output.request_id)
        if maker.finished:
            del self._streams[output.request_id]
            self._forget(output.request_id)
            self._preemptions += getattr(output, "num_preemptions", 0)
        prompt_logprobs = None
        if maker.first and getattr(output, "prompt_logprobs", None) is not None:
            prompt_logprobs = list(output.prompt_logprobs)
        return stream, deltas, maker.finished, prompt_logprobs

    def _fail_all(self) -> None:
        self.failed, self._refusing = True, _FAILED
        for request_id, (stream, _) in list(self._streams.items()):
            self._forget(request_id)
            self._call(stream, stream._queue.put_nowait, EngineStopped(_FAILED))
        self._streams.clear()

    def _forget(self, request_id: str) -> None:
        with self._wake:
            self._in_hand.pop(request_id, None)

    def _call(self, stream: OutputStream, function: Any, *arguments: Any) -> None:
        try:
            stream._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed
            with self._wake:
                self._aborted.append(stream.request_id)


# ---------------- on the event loop


def _accept(stream: OutputStream) -> None:
    if not stream._accepted.done():
        stream._accepted.set_result(None)


def _refuse(stream: OutputStream, error: Exception) -> None:
    if not stream._accepted.done():
        stream._accepted.set_exception(error)


def _deliver(items: list[_News]) -> None:
    for stream, deltas, finished, prompt_logprobs in items:
        if prompt_logprobs is not None:
            stream.prompt_logprobs = prompt_logprobs
        for delta in deltas:
            stream._queue.put_nowait(delta)
        if finished:
            stream._queue.put_nowait(None)
