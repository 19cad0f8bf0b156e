"""The answers of both endpoints, made of deltas. A whole answer is the sum of what would have been streamed."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from .async_engine import AsyncEngine, OutputStream
from .deltas import Delta
from .metrics import Metrics
from .protocol import ChatRequest, CompletionRequest
from .streaming import merged
from .tokens import CompletionLogprobs, TokenTexts, chat_logprobs, prompt_logprobs


class _Answer(ABC):
    """One request on its way: what its chunks have in common, and its counts.

    Parameters
    ----------
    engine : AsyncEngine
    asked : CompletionRequest or ChatRequest
    streams : list of OutputStream
        One for each prompt.
    metrics : Metrics
    """

    prefix = ""
    kind = ""
    chunk_kind = ""

    def __init__(
        self, engine: AsyncEngine, asked: Any, streams: list[OutputStream], metrics: Metrics
    ) -> None:
        self.asked = asked
        self.streams = streams
        self._texts = TokenTexts(engine)
        self._metrics = metrics
        self._completion_tokens = 0
        self._head = {
            "id": f"{self.prefix}{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": engine.model_name,
        }

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The objects of a streamed answer."""
        usage = {"usage": None} if self.asked.include_usage else {}
        head = {**self._head, "object": self.chunk_kind}
        for choice in self.opening():
            yield {**head, "choices": [choice], **usage}
        async for number, delta in self._deltas():
            for choice in self.pieces(number, delta):
                yield {**head, "choices": [choice], **usage}
        if self.asked.include_usage:
            yield {**head, "choices": [], "usage": self.usage}

    async def whole(self) -> dict[str, Any]:
        """The object of an answer that comes at once."""
        choices = [self.empty(index) for index in range(len(self.streams) * self.asked.count)]
        for choice in self.opening():
            self.add(choices[choice["index"]], choice)
        async for number, delta in self._deltas():
            for choice in self.pieces(number, delta):
                self.add(choices[choice["index"]], choice)
        return {**self._head, "object": self.kind, "choices": choices, "usage": self.usage}

    @property
    def usage(self) -> dict[str, int]:
        """Tokens so far; a prompt counts once, however many completions it has."""
        prompts = sum(len(stream.prompt_token_ids) for stream in self.streams)
        completions = self._completion_tokens
        return {
            "prompt_tokens": prompts,
            "completion_tokens": completions,
            "total_tokens": prompts + completions,
        }

    async def _deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        async for number, delta in self._metrics.watched(merged(self.streams), self.streams):
            self._completion_tokens += len(self._shown(delta))
            yield number, delta

    def _shown(self, delta: Delta) -> Sequence[int]:
        """The tokens of a delta that the client gets."""
        return delta.token_ids

    def _index(self, number: int, delta: Delta) -> int:
        return int(number * self.asked.count + delta.index)

    @abstractmethod
    def opening(self) -> list[dict[str, Any]]:
        """Choices that a stream begins with."""

    @abstractmethod
    def pieces(self, number: int, delta: Delta) -> list[dict[str, Any]]:
        """Choices of a delta's chunks: often none."""

    @abstractmethod
    def empty(self, index: int) -> dict[str, Any]:
        """A whole answer's choice before anything has come."""

    @abstractmethod
    def add(self, whole: dict[str, Any], piece: dict[str, Any]) -> None:
        """Add a chunk's choice to a whole answer's."""


class CompletionAnswer(_Answer):
    """Of ``/v1/completions``.

    Parameters
    ----------
    texts : sequence of str
        The prompts' texts, for `echo`.
    """

    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"
    asked: CompletionRequest

    def __init__(
        self,
        engine: AsyncEngine,
        asked: CompletionRequest,
        streams: list[OutputStream],
        metrics: Metrics,
        texts: Sequence[str],
    ) -> None:
        super().__init__(engine, asked, streams, metrics)
        self._engine = engine
        self._prompt_texts = texts
        self._prompt_lists: dict[int, dict[str, Any]] = {}
        self._nothing = asked.max_tokens == 0  # the engine gives one token at least; it is not shown
        self._unechoed = set(range(len(streams) * asked.count)) if asked.echo else set()
        self._lists = [CompletionLogprobs(self._texts, engine) for _ in range(len(streams) * asked.count)]

    def _shown(self, delta: Delta) -> Sequence[int]:
        return () if self._nothing else delta.token_ids

    def opening(self) -> list[dict[str, Any]]:
        return []

    def pieces(self, number: int, delta: Delta) -> list[dict[str, Any]]:
        index = self._index(number, delta)
        found = []
        if index in self._unechoed:  # with the first delta, for the prompt's log probabilities come with it
            self._unechoed.discard(index)
            self._lists[index].skip(self.streams[number].prompt_token_ids, self._prompt_texts[number])
            found.append(self._choice(index, self._prompt_texts[number], self._echoed(number)))
        tokens = self._shown(delta)
        text = "" if self._nothing else delta.text
        logprobs = None
        if delta.logprobs is not None and tokens:
            logprobs = self._lists[index].add(tokens, delta.logprobs)
        if text or logprobs or delta.finish_reason:
            reason = "length" if self._nothing else delta.finish_reason
            found.append(self._choice(index, text, logprobs, reason))
        return found

    def _echoed(self, number: int) -> dict[str, Any] | None:
        """Log probabilities of a prompt: made once for all its completions."""
        stream = self.streams[number]
        if stream.prompt_logprobs is None:
            return None
        if number not in self._prompt_lists:
            self._prompt_lists[number] = prompt_logprobs(
                self._texts,
                self._engine,
                stream.prompt_token_ids,
                stream.prompt_logprobs,
                self._prompt_texts[number],
            )
        return self._prompt_lists[number]

    def _choice(
        self, index: int, text: str, logprobs: Any = None, reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def empty(self, index: int) -> dict[str, Any]:
        return self._choice(index, "")

    def add(self, whole: dict[str, Any], piece: dict[str, Any]) -> None:
        whole["text"] += piece["text"]
        whole["finish_reason"] = piece["finish_reason"]
        if piece["logprobs"] is not None:
            if whole["logprobs"] is None:
                whole["logprobs"] = {name: [] for name in piece["logprobs"]}
            for name, values in piece["logprobs"].items():
                whole["logprobs"][name] += values


class ChatAnswer(_Answer):
    """Of ``/v1/chat/completions``."""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    asked: ChatRequest

    def opening(self) -> list[dict[str, Any]]:
        return [
            self._choice(index, {"role": "assistant", "content": ""}) for index in range(self.asked.count)
        ]

    def pieces(self, number: int, delta: Delta) -> list[dict[str, Any]]:
        logprobs = None
        if delta.logprobs is not None and delta.token_ids:
            top = self.asked.top_logprobs or 0
            logprobs = chat_logprobs(self._texts, delta.token_ids, delta.logprobs, top)
        if not (delta.text or logprobs or delta.finish_reason):
            return []
        content = {"content": delta.text} if delta.text or logprobs else {}
        return [self._choice(self._index(number, delta), content, logprobs, delta.finish_reason)]

    def _choice(
        self, index: int, delta: dict[str, str], logprobs: Any = None, reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def empty(self, index: int) -> dict[str, Any]:
        message = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": None}

    def add(self, whole: dict[str, Any], piece: dict[str, Any]) -> None:
        whole["message"]["content"] += piece["delta"].get("content", "")
        whole["finish_reason"] = piece["finish_reason"]
        if piece["logprobs"] is not None:
            if whole["logprobs"] is None:
                whole["logprobs"] = {"content": [], "refusal": None}
            whole["logprobs"]["content"] += piece["logprobs"]["content"]
