"""Logits to tokens: penalties, then greedy or by chance, and the log probabilities that were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .device import cp
from .kernels.sampling import apply_penalties, sample_rows
from .kernels.softmax import log_softmax
from .outputs import Logprob
from .parts import Parts
from .request import Request
from .sampling_params import SamplingParams

_SEED_MASK = 2**64 - 1
_LARGEST_INT, _LARGEST_FLOAT = np.iinfo(np.int32).max, float(np.finfo(np.float32).max)
SAMPLING_TYPES = (np.float32, np.int32, np.float32, np.float32, np.uint64)
"""Of the arrays that :func:`sampling_options` returns."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step drew.

    Attributes
    ----------
    ids : list of int
        A token for each request.
    logprobs : list of (dict of int to Logprob) or None
        For each request that asked: the chosen token and the most probable ones.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)


def sample(logits: Any, params: Sequence[SamplingParams], steps: Any) -> Any:
    """Draw a token for each row, by its own options.

    Parameters
    ----------
    logits : (R, V) float32
    params : sequence of SamplingParams
        R of them. One without a seed has the seed 0.
    steps : (R,) int32, on the device
        Number of the token in its completion: with the seed, all that the draw depends on.

    Returns
    -------
    (R,) int32, on the device
    """
    return sample_rows(logits, *sampling_arrays(params), steps, cp.empty(len(params), np.int32))


def sampling_options(params: Sequence[SamplingParams]) -> tuple[Any, Any, Any, Any, Any]:
    """The options of R requests, on the host, as :func:`~tinyvllm_ref.kernels.sampling.sample_rows` takes them.

    What is beyond a type's largest number, a top_k of 2^31 say, means just that.

    Returns
    -------
    temperature : (R,) float32
    top_k : (R,) int32
    top_p, min_p : (R,) float32
    seeds : (R,) uint64
        0 for one without a seed.
    """
    return (
        _float32([p.temperature for p in params]),
        np.array([min(p.top_k, _LARGEST_INT) for p in params], np.int32),
        _float32([p.top_p for p in params]),
        _float32([p.min_p for p in params]),
        np.array([(p.seed or 0) & _SEED_MASK for p in params], np.uint64),
    )


def sampling_arrays(params: Sequence[SamplingParams]) -> tuple[Any, Any, Any, Any, Any]:
    """:func:`sampling_options`, on the device."""
    temperature, top_k, top_p, min_p, seeds = map(cp.asarray, sampling_options(params))
    return temperature, top_k, top_p, min_p, seeds


def _float32(values: Sequence[float]) -> np.ndarray:
    return np.minimum(np.array(values, np.float64), _LARGEST_FLOAT).astype(np.float32)


class Sampler:
    """Gives every request its next token.

    Parameters
    ----------
    parts : Parts
        `argmax` serves a batch in which all are greedy, `sample` every other.
    """

    def __init__(self, parts: Parts) -> None:
        self._argmax = parts.argmax
        self._sample = parts.sample

    def __call__(self, logits: Any, requests: Sequence[Request]) -> Sampled:
        """Draw a token for each request.

        Parameters
        ----------
        logits : (R, V) float32
            A row for each request; penalties change it.
        requests : sequence of Request
            With a seed in each one's options.
        """
        if not requests:
            return Sampled()
        wanted = [request.params.logprobs for request in requests]
        raw = log_probabilities(logits) if any(count is not None for count in wanted) else None
        self._penalize(logits, requests)
        if all(request.params.greedy for request in requests):
            chosen = self._argmax(logits, cp.empty(len(requests), np.int32))  # type: ignore[misc]
        else:
            steps = cp.asarray(np.array([request.num_output_tokens for request in requests], np.int32))
            chosen = self._sample(logits, [request.params for request in requests], steps)  # type: ignore[misc]
        ids = chosen.tolist()
        if raw is None:
            return Sampled(ids, [None] * len(ids))
        rows = zip(raw, ids, wanted, strict=True)
        return Sampled(ids, [None if n is None else top_logprobs(row, token, n) for row, token, n in rows])

    def _penalize(self, logits: Any, requests: Sequence[Request]) -> None:
        """Apply the penalties of those requests that have any."""
        rows, tokens, counts = [], [], []
        for row, request in enumerate(requests):
            if not has_penalties(request.params):
                continue
            history = np.array(request.token_ids, np.int64)
            seen = np.unique(history)
            times = np.bincount(history[request.num_prompt_tokens :], minlength=int(seen[-1]) + 1)
            rows.append(np.full(len(seen), row))
            tokens.append(seen)
            counts.append(times[seen])
        if not rows:
            return
        entries = [cp.asarray(np.concatenate(parts).astype(np.int32)) for parts in (rows, tokens, counts)]
        options = [
            cp.asarray(_float32([getattr(request.params, name) for request in requests]))
            for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
        ]
        apply_penalties(logits, *entries, *options)


def has_penalties(params: SamplingParams) -> bool:
    """Whether any penalty of these options changes a logit."""
    return bool(params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty)


def log_probabilities(logits: Any) -> np.ndarray:
    """Logarithms of the softmax of each row, on the host: (R, V) float32 -> (R, V) float32."""
    return np.asarray(log_softmax(logits, cp.empty(logits.shape, np.float32)).get())


def top_logprobs(row: np.ndarray, token: int, count: int) -> dict[int, Logprob]:
    """A token and the `count` most probable ones, with log probability and rank (1 is the most probable).

    >>> top_logprobs(np.log(np.array([0.2, 0.5, 0.3], np.float32)), token=0, count=1).keys()
    dict_keys([0, 1])
    """
    count = min(count, len(row))
    best = np.argpartition(-row, count - 1)[:count] if count else np.empty(0, np.int64)
    best = best[np.lexsort((best, -row[best]))]
    rank = int((row > row[token]).sum()) + int((row[:token] == row[token]).sum()) + 1
    found = {int(token): Logprob(float(row[token]), rank)}
    for position, other in enumerate(best.tolist(), 1):
        found.setdefault(other, Logprob(float(row[other]), position))
    return found
