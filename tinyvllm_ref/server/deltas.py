"""What is new in a request's output since the step before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..completion import StopStrings
from ..outputs import Logprob
from ..sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one completion.

    Attributes
    ----------
    index : int
        Of the completion, from 0 to n - 1.
    text : str
        The text that is certain now: often "", never half a character, never the beginning of a stop string.
    token_ids : tuple of int
        The new tokens.
    logprobs : tuple of dict of int to Logprob, or None
        For each of these, where they were asked for.
    finish_reason : str or None
        ``"stop"`` or ``"length"`` in the completion's last delta.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    finish_reason: str | None = None


class DeltaMaker:
    """Compares a request's growing output with what has been told of it.

    Parameters
    ----------
    llm : LLM
        Whose engine the outputs come from. A learner's engine gives token ids only; the text of them is made
        here, and stop strings are found here.
    params : SamplingParams

    Attributes
    ----------
    first : bool
        Whether the last :meth:`take` was the first.
    finished : bool
        Whether every completion has had its last delta.
    """

    def __init__(self, llm: Any, params: SamplingParams) -> None:
        self.first = False
        self.finished = False
        self._begun = False
        self._told: dict[int, _Told] = {}
        for index in range(params.n):
            text = None if llm.parts.owners()["Engine"] == "reference" else _Text(llm, params)
            self._told[index] = _Told(text)

    def take(self, output: Any) -> list[Delta]:
        """The deltas of a step's output, one for each completion that got on."""
        self.first, self._begun = not self._begun, True
        deltas = []
        for completion in output.outputs:
            told = self._told[completion.index]
            delta = None if told.finished else told.take(completion)
            if delta is not None:
                deltas.append(delta)
        self.finished = all(told.finished for told in self._told.values())
        return deltas


class _Told:
    """How far one completion has been told."""

    def __init__(self, text: _Text | None) -> None:
        self.finished = False
        self._text = text
        self._characters = 0
        self._tokens = 0

    def take(self, completion: Any) -> Delta | None:
        tokens = tuple(completion.token_ids[self._tokens :])
        reason = completion.finish_reason
        if self._text is not None:
            piece, stopped = self._text.push(tokens, reason)
            reason = "stop" if stopped else reason
        else:
            piece = completion.text[self._characters :]
        if not tokens and not piece and reason is None:
            return None
        logprobs = getattr(completion, "logprobs", None)
        if logprobs is not None:
            logprobs = tuple(logprobs[self._tokens : self._tokens + len(tokens)])
        self._characters += len(piece)
        self._tokens += len(tokens)
        self.finished = reason is not None
        return Delta(completion.index, piece, tokens, logprobs, reason)


class _Text:
    """Text and stop strings of a completion whose engine knows tokens only."""

    def __init__(self, llm: Any, params: SamplingParams) -> None:
        self._stream = llm.tokenizer.stream()
        self._stops = StopStrings(params.stop_strings)
        self._silent = frozenset(llm.config.eos_token_ids) | frozenset(params.stop_token_ids or ())

    def push(self, tokens: tuple[int, ...], reason: str | None) -> tuple[str, bool]:
        """(text of new tokens, whether a stop string came)."""
        piece = ""
        for number, token in enumerate(tokens, 1):
            ends_here = reason == "stop" and number == len(tokens) and token in self._silent
            if not ends_here:
                piece += self._stops.push(self._stream.push(token))
        if reason is not None and self._stops.found is None:
            piece += self._stops.push(self._stream.end())
            piece += self._stops.end()
        return piece, self._stops.found is not None
