"""One completion while it grows: its text, the stop strings in it, its log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .outputs import CompletionOutput, Logprob
from .request import Request

if TYPE_CHECKING:
    from .tokenizer import TextStream


class StopStrings:
    """Finds the first of some texts in a text that comes in pieces.

    What could be the beginning of one is held back until it is clear, so that nothing is shown that has to be
    taken back.

    Parameters
    ----------
    stops : sequence of str
        None of them empty.

    Examples
    --------
    >>> stops = StopStrings(["END"])
    >>> stops.push("the E"), stops.push("N"), stops.push("Ding")
    ('the ', '', 'ENDing')
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """The text that is certain now; after a stop string has been found, nothing more comes."""
        if self.found is not None:
            return ""
        text = self._held + piece
        hits = [(text.index(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if hits:
            position, _, self.found = min(hits)
            self._held = ""
            return text[:position]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def end(self) -> str:
        """What was held back: no more text comes, so it is none of a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that `stop` begins with, but is not all of."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class Completion:
    """A request's tokens made into an output.

    Parameters
    ----------
    request : Request
    index : int
        Of the completion, from 0 to n - 1.
    stream : TextStream or None
        The detokenizer; without one there is no text, and stop strings are not looked for.
    """

    def __init__(self, request: Request, index: int, stream: TextStream | None) -> None:
        self.request = request
        self.output = CompletionOutput(index)
        self._stream = stream
        self._stops = StopStrings(request.params.stop_strings)
        if request.params.logprobs is not None:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0

    def take(self, logprobs: dict[int, Logprob] | None) -> str | None:
        """Take note of the request's newest token; returns the stop string that it completed, if any."""
        output, request = self.output, self.request
        token = request.token_ids[-1]
        output.token_ids.append(token)
        if logprobs is not None and output.logprobs is not None:
            output.logprobs.append(logprobs)
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + logprobs[token].logprob
        ends_here = request.finished and request.finish_reason == "stop"  # by this token, which is no text
        if self._stream is not None and not ends_here:
            output.text += self._stops.push(self._stream.push(token))
        return self._stops.found

    def close(self) -> None:
        """The request has finished: give out what was held back."""
        output, request = self.output, self.request
        if output.finished:
            return
        if self._stream is not None and self._stops.found is None:
            output.text += self._stops.push(self._stream.end())
            output.text += self._stops.end()
        output.finish_reason, output.stop_reason = request.finish_reason, request.stop_reason
