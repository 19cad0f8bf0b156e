"""What comes back for a prompt; names and meanings are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """How probable the model took a token to be, before penalties and temperature.

    Attributes
    ----------
    logprob : float
        Natural logarithm of its probability.
    rank : int
        1 for the most probable token.
    decoded_token : str or None
        Its text.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes
    ----------
    index : int
        From 0 to n - 1.
    text : str
        Without the stop string or the end token that ended it.
    token_ids : list of int
        All tokens that were generated, those of a stop string and the end token included.
    finish_reason : str or None
        ``"stop"`` (an end token, a stop token, a stop string), ``"length"``, ``"abort"``; None while it runs.
    stop_reason : int, str or None
        The stop token or stop string of the options that ended it; None after one of the model's end tokens.
    logprobs : list of dict of int to Logprob, or None
        For each token: itself and the most probable ones, where they were asked for.
    cumulative_logprob : float or None
        Sum over the tokens, where log probabilities were asked for.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions, finished or so far.

    Attributes
    ----------
    request_id : str
    prompt : str or None
        Its text, where it was given as text.
    prompt_token_ids : list of int
    outputs : list of CompletionOutput
        n of them, by index.
    prompt_logprobs : list of (dict of int to Logprob or None), or None
        For each token of the prompt, where asked for; the first has None, for nothing comes before it.
    num_preemptions : int
        How often the completions lost their place in the cache and were computed again.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_preemptions: int = 0

    @property
    def finished(self) -> bool:
        """Whether all completions are."""
        return all(output.finished for output in self.outputs)
