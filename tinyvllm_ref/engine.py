"""The loop: schedule, run, update.

>>> engine = Engine(model, parts, EngineConfig())  # doctest: +SKIP
>>> engine.add_request(Request("0", token_ids, SamplingParams()))  # doctest: +SKIP
>>> while engine.has_work:  # doctest: +SKIP
...     for output in engine.step(): ...
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from .completion import Completion
from .config import EngineConfig
from .model import Model
from .model_runner import ModelRunner, StepResult
from .outputs import Logprob, RequestOutput
from .parts import Parts
from .request import Request

if TYPE_CHECKING:
    from .scheduler import ScheduledBatch

_MASK = 2**64 - 1


class _Prompt:
    """A prompt on its way: its completions, and what comes back for it."""

    def __init__(self, request: Request, prompt: str | None, completions: list[Completion]) -> None:
        self.completions = completions
        self.output = RequestOutput(
            request.request_id,
            prompt,
            request.prompt_token_ids,
            [completion.output for completion in completions],
        )
        if request.params.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None] * request.num_prompt_tokens


class Engine:
    """Generates for any number of requests at once.

    Parameters
    ----------
    model : Model
    parts : Parts
        `Scheduler`, `BlockManager`, `pack`, `sample` and `argmax` are used here.
    config : EngineConfig
    tokenizer : TokenizerPart, optional
        Makes text of tokens. Without it outputs have token ids only, and stop strings cannot be given.

    Attributes
    ----------
    scheduler, blocks, runner
        What it is made of.
    """

    def __init__(self, model: Model, parts: Parts, config: EngineConfig, tokenizer: Any = None) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.vocab_size = model.config.vocab_size
        self.runner = ModelRunner(model, parts, config)
        self.blocks: Any = parts.BlockManager(self.runner.num_blocks, config.block_size)  # type: ignore[misc]
        self.max_model_len = _longest(model.config.max_position_embeddings, config, self.runner.num_blocks)
        self.scheduler: Any = _make_scheduler(
            parts, config, self.blocks, self.max_model_len, lookahead=int(self.runner.fast is not None)
        )
        self._prompts: dict[str, _Prompt] = {}
        self._completions: dict[str, tuple[_Prompt, Completion]] = {}
        self._aborted: list[_Prompt] = []
        self._seeds = itertools.count()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._prompts or self._aborted)

    def add_request(self, request: Request, prompt: str | None = None) -> None:
        """Put a prompt in the queue, once for each of its ``n`` completions.

        Parameters
        ----------
        request : Request
            A new one. Its options get a seed if they have none.
        prompt : str, optional
            The text, for the output.

        Raises
        ------
        ValueError
            The id is in use, a token is outside the vocabulary, or the request can never fit.
        """
        if request.request_id in self._prompts:
            raise ValueError(f"request {request.request_id!r}: this id is in use; ids must be unique")
        self._check_tokens(request)
        if request.params.stop_strings and self.tokenizer is None:
            raise ValueError(
                f"request {request.request_id!r}: stop is {request.params.stop!r}, and this engine has no"
                " tokenizer to look for it in a text; use stop_token_ids"
            )
        requests = self._completion_requests(request)
        for added, one in enumerate(requests):
            if one.params.max_tokens is None:
                one.max_num_tokens = self.max_model_len  # a learner's scheduler does not know it
            try:
                self.scheduler.add(one)
            except ValueError:
                for earlier in requests[:added]:
                    self.scheduler.abort(earlier.request_id)
                raise
        completions = [Completion(one, index, self._stream(one)) for index, one in enumerate(requests)]
        entry = _Prompt(request, prompt, completions)
        self._prompts[request.request_id] = entry
        for completion in completions:
            self._completions[completion.request.request_id] = (entry, completion)

    def step(self) -> list[RequestOutput]:
        """Compute one batch.

        Returns
        -------
        list of RequestOutput
            Of every prompt that got on: all that it has so far. An output is the same object in each step.

        Raises
        ------
        RuntimeError
            The scheduler gives nothing to do, though requests are not finished.
        """
        batch = self.scheduler.schedule()  # who computes what
        if batch:
            result = self.runner.run(batch)  # one new token for each request that samples
            self.scheduler.update(batch, result.ids)  # blocks of the finished are free again
            touched = self._collect(batch, result)  # text; a stop string ends a request too
        else:
            touched = self._nothing_scheduled(batch)
        for entry in self._aborted:
            touched[entry.output.request_id] = entry
        self._aborted = []
        return [self._close_finished(entry) for entry in touched.values()]

    def abort(self, request_id: str) -> bool:
        """Stop a request and free its blocks; its output comes from the next step.

        Returns
        -------
        bool
            False where there is no such request.
        """
        entry = self._prompts.get(request_id)
        if entry is None:
            return False
        for completion in entry.completions:
            self.scheduler.abort(completion.request.request_id)
        self._close_finished(entry)
        self._aborted.append(entry)
        return True

    def _nothing_scheduled(self, batch: ScheduledBatch) -> dict[str, _Prompt]:
        """An empty step: right only where all is done, or the only running request has just been preempted."""
        if self._prompts and not batch.preempted:
            raise RuntimeError(
                f"the scheduler gives nothing to do, though {len(self._completions)} requests are not finished"
            )
        return {}

    def _collect(self, batch: ScheduledBatch, result: StepResult) -> dict[str, _Prompt]:
        """Give each completion its new token; returns the prompts that got one."""
        touched: dict[str, _Prompt] = {}
        sampling = (
            request for request, samples in zip(batch.requests, batch.samples, strict=True) if samples
        )
        for request, logprobs in zip(sampling, result.logprobs, strict=True):
            if request.request_id not in self._completions:  # aborted while the step was computed
                continue
            entry, completion = self._completions[request.request_id]
            found = completion.take(self._decoded(logprobs))
            if found is not None:
                self._finish(request, found)
            touched[entry.output.request_id] = entry
        for request_id, positions in result.prompt_logprobs.items():
            if request_id in self._completions:
                output = self._completions[request_id][0].output
                for position, logprobs in positions.items():
                    output.prompt_logprobs[position] = self._decoded(logprobs)  # type: ignore[index]
        return touched

    def _finish(self, request: Request, stop: str) -> None:
        """A stop string came."""
        if not request.finished:
            # A learner's scheduler has `abort` only.
            getattr(self.scheduler, "finish", self._finish_by_abort)(request.request_id, "stop", stop)
        else:  # by length, with the same token: the text says more
            request.finish_reason, request.stop_reason = "stop", stop

    def _finish_by_abort(self, request_id: str, reason: str, stop: str) -> None:
        self.scheduler.abort(request_id)
        request = self._completions[request_id][1].request
        request.finish_reason, request.stop_reason = reason, stop

    def _close_finished(self, entry: _Prompt) -> RequestOutput:
        """Complete the outputs whose requests have finished, and forget the prompt when all have."""
        finished = [completion for completion in entry.completions if completion.request.finished]
        for completion in finished:
            completion.close()
            self._completions.pop(completion.request.request_id, None)
        if finished and entry.output.finished:
            self._prompts.pop(entry.output.request_id, None)
            entry.output.num_preemptions = sum(c.request.num_preemptions for c in entry.completions)
        return entry.output

    def _completion_requests(self, request: Request) -> list[Request]:
        """One request for each completion, each with a seed of its own."""
        params = request.params
        seed = params.seed
        if seed is None:
            seed = mix_seed(self.config.seed, next(self._seeds))
        if params.n == 1:
            request.params = params.with_seed(seed)
            return [request]
        requests: list[Request] = []
        for index in range(params.n):
            own = params.with_seed(mix_seed(seed, index) if index else seed)
            name, parent = f"{request.request_id}#{index}", requests[0] if requests else None
            one = Request(name, request.token_ids, own, parent=parent)
            one.stop_tokens = request.stop_tokens
            requests.append(one)
        return requests

    def _check_tokens(self, request: Request) -> None:
        for token in (min(request.token_ids), max(request.token_ids)):
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"request {request.request_id!r}: token id {token} is in the prompt; ids must be from 0 to"
                    f" {self.vocab_size - 1}, the model's vocabulary"
                )

    def _stream(self, request: Request) -> Any:
        if self.tokenizer is None:
            return None
        if request.params.skip_special_tokens:
            return self.tokenizer.stream()
        return self.tokenizer.stream(skip_special_tokens=False)

    def _decoded(self, logprobs: dict[int, Logprob] | None) -> dict[int, Logprob] | None:
        """Log probabilities with the tokens' texts."""
        if logprobs is None or self.tokenizer is None:
            return logprobs
        return {
            token: dataclasses.replace(value, decoded_token=self.tokenizer.decode([token]))
            for token, value in logprobs.items()
        }


def mix_seed(seed: int, index: int) -> int:
    """A seed for the `index`-th of several that share one: splitmix64's finaliser (Steele and others, 2014)."""
    x = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def _longest(model_limit: int, config: EngineConfig, num_blocks: int) -> int:
    """The most tokens of one request."""
    asked = config.max_model_len
    if asked is not None and asked > model_limit:
        raise ValueError(
            f"max_model_len is {asked}; it must be at most {model_limit}, the model's max_position_embeddings"
        )
    return asked or min(model_limit, num_blocks * config.block_size)


def _make_scheduler(
    parts: Parts, config: EngineConfig, blocks: Any, max_model_len: int, lookahead: int
) -> Any:
    """The scheduler; a learner's takes the three arguments of its contract."""
    if parts.owners()["Scheduler"] != "reference":
        return parts.Scheduler(config.max_num_seqs, config.max_num_batched_tokens, blocks)  # type: ignore[misc]
    return parts.Scheduler(  # type: ignore[misc]
        config.max_num_seqs,
        config.max_num_batched_tokens,
        blocks,
        max_model_len=max_model_len,
        batching=config.batching,
        chunked_prefill=config.enable_chunked_prefill,
        lookahead=lookahead,
    )
