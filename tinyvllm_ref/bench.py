"""``tinyvllm bench``: how fast a model generates here."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .device import describe, is_gpu
from .llm import LLM
from .request import Request
from .sampling_params import SamplingParams

_VOCABULARY_USED = 1000  # ids of the prompts; what they say does not matter


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run.

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
    per_token : float
        Median seconds of a step in which every request gets one token.
    """

    batch: int
    prompt: int
    tokens: int
    seconds: float
    first_token: float
    per_token: float

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all requests, over the time of all of it."""
        return self.batch * self.tokens / self.seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """The same after the first token, from the median step."""
        return self.batch / self.per_token


def measure(
    model: str | os.PathLike[str],
    batches: Sequence[int],
    prompt: int,
    tokens: int,
    batching: Literal["continuous", "static"] = "continuous",
) -> Iterator[Measurement]:
    """Generate greedily for random prompts, once for each number of requests at once.

    Raises
    ------
    ValueError
        Prompt and tokens are longer than the model's context.
    """
    needed = max(batches) * (prompt + tokens)
    block_size = 16
    llm = LLM(
        model,
        max_num_seqs=max(batches),
        num_blocks=max(batches) * -(-(prompt + tokens) // block_size) if needed < 1 << 20 else None,
        block_size=block_size,
        batching=batching,
    )
    rng = np.random.default_rng(0)
    limit = min(_VOCABULARY_USED, llm.config.vocab_size)
    for batch in batches:
        _run(
            llm.engine, rng.integers(0, limit, (batch, min(prompt, 16))).tolist(), 2, "warm"
        )  # compile the kernels
        yield _run(llm.engine, rng.integers(0, limit, (batch, prompt)).tolist(), tokens, f"batch {batch}")


def _run(engine: Any, prompts: list[list[int]], tokens: int, name: str) -> Measurement:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    for number, ids in enumerate(prompts):
        engine.add_request(Request(f"{name}/{number}", ids, params))
    steps: list[float] = []
    first_token = 0.0
    waiting = {f"{name}/{number}" for number in range(len(prompts))}
    while engine.has_work:
        before = time.perf_counter()
        outputs = engine.step()
        now = time.perf_counter()
        if waiting:
            waiting -= {output.request_id for output in outputs}
            first_token = now - began
        elif len(outputs) == len(prompts):
            steps.append(now - before)
    seconds = time.perf_counter() - began
    per_token = float(np.median(steps)) if steps else seconds / tokens
    return Measurement(len(prompts), len(prompts[0]), tokens, seconds, first_token, per_token)


def table(measurements: Iterator[Measurement]) -> Iterator[str]:
    """The lines to print, each as it is known.

    A time in the emulation says nothing of any GPU, and little of another computer: what carries over is how the
    rows compare, so each is also given as a ratio to the first.
    """
    yield describe()
    heading = ("batch", "prompt", "tokens", "tokens/s", "ratio", "first token", "ratio", "per token", "ratio")
    yield " ".join(f"{name:>11}" for name in heading)
    first: Measurement | None = None
    for found in measurements:
        first = first or found
        cells = (
            str(found.batch),
            str(found.prompt),
            str(found.tokens),
            f"{found.tokens_per_second:.1f}",
            f"{found.tokens_per_second / first.tokens_per_second:.2f}",
            f"{found.first_token * 1e3:.1f} ms",
            f"{found.first_token / first.first_token:.2f}",
            f"{found.per_token * 1e3:.2f} ms",
            f"{found.per_token / first.per_token:.2f}",
        )
        yield " ".join(f"{cell:>11}" for cell in cells)
    if not is_gpu:
        yield "These are times of this computer's processor: no GPU code ran."
