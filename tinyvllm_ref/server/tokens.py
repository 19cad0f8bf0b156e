"""Tokens as the API's log probabilities show them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from ..outputs import Logprob
from .async_engine import AsyncEngine

Logprobs = Mapping[int, Logprob]
_CONTEXT = (
    16  # tokens before a completion that can change its first character: four bytes, and their neighbours
)


class TokenTexts:
    """Texts and bytes of single tokens.

    Parameters
    ----------
    engine : AsyncEngine
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._bytes = getattr(engine.llm.tokenizer, "token_bytes", None)

    def bytes_of(self, token: int) -> bytes:
        """What a token stands for: often no whole character."""
        if self._bytes is not None:
            return bytes(self._bytes(token))
        return self._engine.decode([token]).encode()  # a learner's tokenizer need not have more

    def text_of(self, token: int) -> str:
        """The same as text; bytes that are no character as OpenAI writes them, ``bytes:\\xf0\\x9f``."""
        data = self.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(
    texts: TokenTexts, tokens: Sequence[int], found: Sequence[Logprobs], top: int
) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat completion, for some tokens of it."""

    def entry(token: int, value: Logprob) -> dict[str, Any]:
        data = texts.bytes_of(token)
        return {"token": texts.text_of(token), "logprob": _finite(value.logprob), "bytes": list(data)}

    content = []
    for token, values in zip(tokens, found, strict=True):
        best = sorted((item for item in values.items() if item[1].rank <= top), key=lambda item: item[1].rank)
        content.append({**entry(token, values[token]), "top_logprobs": [entry(*item) for item in best]})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """``choices[].logprobs`` of a text completion: parallel lists, with each token's place in the text.

    Parameters
    ----------
    texts : TokenTexts
    engine : AsyncEngine
    """

    def __init__(self, texts: TokenTexts, engine: AsyncEngine) -> None:
        self._texts = texts
        self._stream = engine.llm.tokenizer.stream()
        self._offset = 0

    def skip(self, prompt: Sequence[int], text: str) -> None:
        """The next token follows a prompt whose text is returned before it."""
        for token in prompt[-_CONTEXT:]:
            self._stream.push(token)
        self._offset = len(text)

    def add(self, tokens: Sequence[int], found: Sequence[Logprobs]) -> dict[str, Any]:
        """The lists for the next tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._stream.push(token))
        return _lists(self._texts, tokens, found, offsets)


def prompt_logprobs(
    texts: TokenTexts, engine: AsyncEngine, tokens: Sequence[int], found: Sequence[Logprobs | None], text: str
) -> dict[str, Any]:
    """The same lists for a prompt that is returned before its completion, as `text`."""
    return _lists(texts, tokens, found, _places(engine, tokens, text))


def _places(engine: AsyncEngine, tokens: Sequence[int], text: str) -> list[int]:
    """Where in the text each token begins.

    A client's text may spell special tokens, which decoding leaves out. A text that was made of token ids has none of
    them; and what was put in front, such as BOS, is in neither.
    """
    tokenizer = engine.llm.tokenizer
    lengths = _lengths(tokenizer.stream(), tokens)
    if sum(lengths) != len(text) and any(tokenizer.decode([token]) == "" for token in tokens):
        with contextlib.suppress(TypeError):  # a learner's tokenizer need not give these texts
            lengths = _lengths(tokenizer.stream(skip_special_tokens=False), tokens)
    excess = max(0, sum(lengths) - len(text))
    return [max(0, end - length - excess) for end, length in zip(accumulate(lengths), lengths, strict=True)]


def _lengths(stream: Any, tokens: Sequence[int]) -> list[int]:
    """Characters that come with each token, and with the last those of an unfinished character."""
    lengths = [len(stream.push(token)) for token in tokens]
    lengths[-1] += len(stream.end())
    return lengths


def _lists(
    texts: TokenTexts, tokens: Sequence[int], found: Sequence[Logprobs | None], offsets: list[int]
) -> dict[str, Any]:
    """None among `found` stands for the first token of a prompt, which follows nothing."""
    chosen = [
        None if values is None else _finite(values[token].logprob)
        for token, values in zip(tokens, found, strict=True)
    ]
    top = [None if values is None else _best(texts, values) for values in found]
    names = [texts.text_of(token) for token in tokens]
    return {"tokens": names, "token_logprobs": chosen, "text_offset": offsets, "top_logprobs": top}


def _best(texts: TokenTexts, values: Logprobs) -> dict[str, float]:
    """By text, the most probable first; of two tokens with one text, the more probable."""
    best: dict[str, float] = {}
    for token, value in sorted(values.items(), key=lambda item: item[1].rank):
        best.setdefault(texts.text_of(token), _finite(value.logprob))
    return best


def _finite(logprob: float) -> float:
    """JSON has no infinity: what is impossible is -9999, as in OpenAI's answers."""
    return max(logprob, -9999.0)
