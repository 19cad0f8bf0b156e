"""What one request asks for: how many tokens, how they are drawn, and where to stop."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NoReturn


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Options of one request; names and meanings are vLLM's.

    Parameters
    ----------
    n : int
        Completions of the prompt, each with its own randomness.
    max_tokens : int or None
        The most tokens of a completion. None: as many as the context holds.
    temperature : float
        Divides the logits; 0 takes the most probable token (greedy).
    top_p : float
        Keep the smallest set of the most probable tokens whose probabilities sum to at least this, in (0, 1].
    top_k : int
        Keep this many of the most probable tokens; 0 or -1 keeps all.
    min_p : float
        Drop tokens less probable than this times the most probable one, in [0, 1].
    repetition_penalty : float
        For tokens of the prompt and the completion, positive logits are divided by this and negative ones
        multiplied; above 0, and 1 does nothing.
    presence_penalty, frequency_penalty : float
        Subtracted from the logit of a token that the completion has: once, and once per occurrence; in [-2,
        2].
    seed : int or None
        The same seed gives the same tokens, whatever else is in the batch. None: the engine picks one.
    stop : str or sequence of str or None
        The completion ends before the first of these texts.
    stop_token_ids : sequence of int or None
        The completion ends with the first of these tokens.
    ignore_eos : bool
        Go on after the model's end tokens (for measurements).
    logprobs : int or None
        For each token of the completion, its log probability and those of this many most probable ones.
    prompt_logprobs : int or None
        The same for each token of the prompt.
    skip_special_tokens : bool
        Leave special tokens out of the text.

    Raises
    ------
    ValueError
        A value is outside its range (or is NaN).
    TypeError
        A value is of the wrong type.

    Examples
    --------
    >>> SamplingParams(temperature=0.0, max_tokens=64).greedy
    True
    """

    n: int = 1
    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._check_int("n", "must be an integer of at least 1", low=1)
        self._check_int("max_tokens", "must be an integer of at least 1, or None", low=1, optional=True)
        self._check_int("top_k", "must be at least 1, or 0 or -1 to keep all tokens", low=-1)
        self._check_int("seed", "must be an integer of 64 bits, or None", -(2**63), 2**64 - 1, optional=True)
        self._check_int("logprobs", "must be an integer of at least 0, or None", optional=True)
        self._check_int("prompt_logprobs", "must be an integer of at least 0, or None", optional=True)
        self._check_float("temperature", "must be a finite number of at least 0", lambda x: x >= 0)
        self._check_float("top_p", "must be above 0 and at most 1", lambda x: 0 < x <= 1)
        self._check_float("min_p", "must be from 0 to 1", lambda x: 0 <= x <= 1)
        self._check_float("repetition_penalty", "must be a finite number above 0", lambda x: x > 0)
        self._check_float("presence_penalty", "must be from -2 to 2", lambda x: -2 <= x <= 2)
        self._check_float("frequency_penalty", "must be from -2 to 2", lambda x: -2 <= x <= 2)
        for name in ("ignore_eos", "skip_special_tokens"):
            if type(getattr(self, name)) is not bool:
                self._wrong_type(name, "must be True or False")
        self._check_stop()
        self._check_stop_token_ids()

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken and nothing is drawn."""
        return self.temperature == 0

    def with_seed(self, seed: int) -> SamplingParams:
        """The same for one completion with this seed. What was checked when these were made is not checked again."""
        one = copy.copy(self)
        object.__setattr__(one, "seed", seed)
        object.__setattr__(one, "n", 1)
        return one

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, as a tuple whatever it was given as."""
        return tuple(self.stop or ())

    def _check_int(
        self, name: str, rule: str, low: int = 0, high: int | None = None, optional: bool = False
    ) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, Integral):
            self._wrong_type(name, rule)
        value = int(value)
        if value < low or (high is not None and value > high):
            self._out_of_range(name, rule)
        # NumPy integers pass; plain ones are kept, so that equal options compare and print equally.
        object.__setattr__(self, name, value)

    def _check_float(self, name: str, rule: str, valid: Any) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, Real):
            self._wrong_type(name, rule)
        if not math.isfinite(value) or not valid(value):
            self._out_of_range(name, rule)
        object.__setattr__(self, name, float(value))

    def _check_stop(self) -> None:
        rule = "must be a non-empty string or a sequence of them"
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        if not isinstance(stop, list | tuple) or not all(isinstance(text, str) for text in stop):
            self._wrong_type("stop", rule)
        if "" in stop:
            self._out_of_range("stop", rule)
        object.__setattr__(self, "stop", tuple(stop))

    def _check_stop_token_ids(self) -> None:
        rule = "must be a sequence of token ids (non-negative integers)"
        ids = self.stop_token_ids or ()
        if not isinstance(ids, list | tuple | set | frozenset) or any(
            isinstance(token, bool) or not isinstance(token, Integral) for token in ids
        ):
            self._wrong_type("stop_token_ids", rule)
        object.__setattr__(self, "stop_token_ids", tuple(int(token) for token in ids))
        if min(self.stop_token_ids or (0,)) < 0:
            self._out_of_range("stop_token_ids", rule)

    def _wrong_type(self, name: str, rule: str) -> NoReturn:
        value = getattr(self, name)
        raise TypeError(f"SamplingParams: {name} is {value!r} ({type(value).__name__}); it {rule}")

    def _out_of_range(self, name: str, rule: str) -> NoReturn:
        raise ValueError(f"SamplingParams: {name} is {getattr(self, name)!r}; it {rule}")
