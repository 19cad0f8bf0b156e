"""One request on its way through the engine: its tokens, and how many of them have been computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

from tinyvllm_ref.sampling_params import SamplingParams


class RequestState(StrEnum):
    """Where a request is: in the queue, in the batch, or done with. Each equals its text."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """A prompt and what has been generated after it.

    There are no phases, only one counter: each step computes some of the tokens from `num_computed_tokens`
    on, and when that has caught up with `num_tokens`, the model's answer for the last one gives the next
    token. A prefill is the case where many are missing, a decode the case where one is, and a preempted
    request simply starts again at 0, with the tokens that it had generated as part of what is to be computed.

    Parameters
    ----------
    request_id : str
        Unique in the engine.
    prompt_token_ids : sequence of int
        At least one token.
    params : SamplingParams
        What was asked for.
    eos_token_ids : iterable of int
        The model's end tokens; not used where ``params.ignore_eos`` is set.
    parent : Request, optional
        For the second and later completions of one prompt: the first one, whose blocks of the prompt may be
        shared.

    Attributes
    ----------
    token_ids : list of int
        Prompt and completion; it only grows.
    num_computed_tokens : int
        Tokens whose keys and values are in the cache.
    state : RequestState
        Changed by the scheduler only; the text alone (``"running"``) will do.
    max_num_tokens : int
        Prompt and completion together can have so many; where ``max_tokens`` is None, the scheduler sets it.
    finish_reason : str or None
        ``"stop"``, ``"length"`` or ``"abort"`` once finished.
    stop_reason : int, str or None
        The stop token or stop string that ended it; None where an end token of the model did.
    num_preemptions : int
        How often its blocks were taken away.

    Raises
    ------
    ValueError
        The prompt is empty, or is not the parent's.
    """

    __slots__ = (
        "finish_reason",
        "max_num_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "params",
        "parent",
        "request_id",
        "state",
        "stop_reason",
        "stop_tokens",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        eos_token_ids: Iterable[int] = (),
        parent: Request | None = None,
    ) -> None:
        if not prompt_token_ids:
            raise ValueError(f"request {request_id!r}: the prompt is empty; it needs at least one token")
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        # Kept beside the list because the scheduler reads it several times per request and step.
        self.num_tokens = self.num_prompt_tokens
        self.num_computed_tokens = 0
        self.max_num_tokens = self.num_prompt_tokens + (params.max_tokens or 0)
        self.params = params
        self.stop_tokens = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            self.stop_tokens |= frozenset(eos_token_ids)
        if parent is not None and parent.prompt_token_ids != self.token_ids:
            raise ValueError(
                f"request {request_id!r}: its prompt is not that of its parent {parent.request_id!r}"
            )
        self.parent = parent
        self.state = RequestState.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.num_preemptions = 0

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.state}, prompt {self.num_prompt_tokens},"
            f" output {self.num_output_tokens}, computed {self.num_computed_tokens})"
        )

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's tokens (a copy)."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """The completion's tokens so far (a copy)."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """How many tokens have been generated."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def finished(self) -> bool:
        """Whether it is done with."""
        return self.state == RequestState.FINISHED

    def append(self, token: int) -> None:
        """Add a generated token."""
        self.token_ids.append(token)
        self.num_tokens += 1
