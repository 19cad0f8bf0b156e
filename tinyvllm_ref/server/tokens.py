"""Tokens as the API's log probabilities show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..outputs import Logprob
from .async_engine import AsyncEngine

Logprobs = Mapping[int, Logprob]


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

    def add(self, tokens: Sequence[int], found: Sequence[Logprobs | None]) -> dict[str, Any]:
        """The lists for the next tokens; None stands for the first token of a prompt, which follows nothing."""
        chosen, offsets, top = [], [], []
        for token, values in zip(tokens, found, strict=True):
            chosen.append(None if values is None else _finite(values[token].logprob))
            top.append(None if values is None else self._best(values))
            offsets.append(self._offset)
            self._offset += len(self._stream.push(token))
        names = [self._texts.text_of(token) for token in tokens]
        return {"tokens": names, "token_logprobs": chosen, "text_offset": offsets, "top_logprobs": top}

    def _best(self, values: Logprobs) -> dict[str, float]:
        """By text, the most probable first; of two tokens with one text, the more probable."""
        best: dict[str, float] = {}
        for token, value in sorted(values.items(), key=lambda item: item[1].rank):
            best.setdefault(self._texts.text_of(token), _finite(value.logprob))
        return best


def _finite(logprob: float) -> float:
    """JSON has no infinity: what is impossible is -9999, as in OpenAI's answers."""
    return max(logprob, -9999.0)
