"""One engine, timed: prompts of random tokens in, greedy tokens out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config import ModelConfig
from ..device import is_gpu
from ..request import Request
from ..sampling_params import SamplingParams
from .traffic import decode_bytes, prefill_flops

_VOCABULARY_USED = 1000  # ids of the prompts; what they say does not matter
_SHORT = (16, 4)  # tokens of a prompt and generated, where a warm-up only has to compile kernels


@dataclass(frozen=True, slots=True)
class Measurement:
    """One batch: medians over its runs.

    Attributes
    ----------
    batch : int
        Requests at once.
    prompt, tokens : int
        Tokens of each prompt, and generated for each.
    seconds : float
        For all of it.
    first_token : float
        Seconds until the last request had its first token.
    per_token : float or None
        Seconds of a step in which every request gets one token: the mean over such steps in a row, from when the last
        request had its first token until the first request ends. A mean, because an engine may compute a step while
        the step before is given out: the time between two outputs says little then. None where no step is like that.
    context : float or None
        Tokens of a request at these steps, with the step's own, on average.
    """

    batch: int
    prompt: int
    tokens: int
    seconds: float
    first_token: float
    per_token: float | None
    context: float | None

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all requests, over the time of all of it."""
        return self.batch * self.tokens / self.seconds

    @property
    def decode_tokens_per_second(self) -> float | None:
        """The same in the steps of `per_token`."""
        return None if self.per_token is None else self.batch / self.per_token

    def decode_bytes_per_second(self, config: ModelConfig) -> float | None:
        """The fewest bytes of a step over its time."""
        if self.per_token is None or self.context is None:
            return None
        return decode_bytes(config, self.batch, self.context) / self.per_token

    def prefill_flops_per_second(self, config: ModelConfig) -> float:
        """Operations of the prompts over the time until all had their first token."""
        return prefill_flops(config, self.batch, self.prompt) / self.first_token


def median(runs: Sequence[Measurement]) -> Measurement:
    """Runs of the same batch as one: each time is the median of theirs."""
    first = runs[0]
    steady = [run.per_token for run in runs if run.per_token is not None]
    contexts = [run.context for run in runs if run.context is not None]
    return Measurement(
        first.batch,
        first.prompt,
        first.tokens,
        float(np.median([run.seconds for run in runs])),
        float(np.median([run.first_token for run in runs])),
        float(np.median(steady)) if steady else None,
        float(np.median(contexts)) if contexts else None,
    )


def measure(
    engine: Any, vocab_size: int, batches: Sequence[int], prompt: int, tokens: int, repeats: int
) -> Iterator[Measurement]:
    """Generate greedily for random prompts, once for each number of requests at once.

    Parameters
    ----------
    engine : Engine
    vocab_size : int
    batches : sequence of int
    prompt, tokens : int
    repeats : int
        Runs of each batch that count. One before them does not: it compiles kernels, and on a card it meets all sizes
        that the others will.

    Raises
    ------
    ValueError
        Prompt and tokens are longer than the model's context.
    """
    rng = np.random.default_rng(0)
    limit = min(_VOCABULARY_USED, vocab_size)
    for batch in batches:
        length, count = (prompt, tokens) if is_gpu else (min(prompt, _SHORT[0]), min(tokens, _SHORT[1]))
        run_once(engine, rng.integers(0, limit, (batch, length)).tolist(), count)
        runs = [
            run_once(engine, rng.integers(0, limit, (batch, prompt)).tolist(), tokens) for _ in range(repeats)
        ]
        yield median(runs)


def run_once(engine: Any, prompts: list[list[int]], tokens: int) -> Measurement:
    """All prompts at once through an engine that has nothing else to do.

    A step may give no output, and then the one after it: times are taken where outputs come.
    """
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    batch, prompt = len(prompts), len(prompts[0])
    began = time.perf_counter()
    for number, ids in enumerate(prompts):
        engine.add_request(Request(f"bench/{number}", ids, params))
    waiting = {f"bench/{number}" for number in range(batch)}
    generated = 0  # tokens of all requests until the last one had its first
    first_token = last_token = began
    steps, steady = 0, True
    while engine.has_work:
        outputs = engine.step()
        if not outputs:
            continue
        now = time.perf_counter()
        if waiting:
            waiting -= {output.request_id for output in outputs}
            generated += len(outputs)
            first_token = last_token = now
        elif steady and len(outputs) == batch:
            steps += 1
            last_token = now
        else:
            steady = False
    seconds = time.perf_counter() - began
    per_token = (last_token - first_token) / steps if steps else None
    # The first of these steps adds a request's token number generated / batch to its context.
    context = prompt + generated / batch + (steps - 1) / 2 if steps else None
    return Measurement(batch, prompt, tokens, seconds, first_token - began, per_token, context)
