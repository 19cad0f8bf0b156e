"""Which requests compute how many tokens in the next step: continuous batching with preemption.

The scheduler knows token counts and blocks, nothing of arrays. One step of the engine is::

    batch = scheduler.schedule()            # who computes what; blocks are reserved
    ids = run(batch)                        # one new token for each request whose last token was computed
    finished = scheduler.update(batch, ids)
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from tinyvllm_ref.request import Request, RequestState


class Blocks(Protocol):
    """What the scheduler asks of a block manager (see ``block_manager.py``).

    A manager may also have ``fork(parent_id, child_id, num_tokens) -> int``; without it, completions of one
    prompt share nothing.
    """

    @property
    def num_free(self) -> int: ...

    def allocate(self, request_id: str, num_tokens: int) -> bool: ...

    def free(self, request_id: str) -> None: ...

    def table(self, request_id: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """What one step computes: a plain record, one entry per request in each list, decodes first.

    Attributes
    ----------
    requests : list of Request
        Whose tokens.
    starts : list of int
        Index of the first token that this step computes: how many are in the cache already.
    num_tokens : list of int
        How many tokens this step computes.
    samples : list of bool
        Whether the request's last token is among them, so that its logits give a new token.
    block_tables : list of list of int
        The blocks of the request, enough for ``starts + num_tokens`` tokens; not to be changed.
    num_decodes : int
        The first so many requests compute one token after their prompt.
    preempted : list of str
        Ids of the requests that lost their blocks in this step and wait again.
    others_wait : bool
        Whether a request that has no part in this step would take the place of one that ends in it.
    """

    requests: list[Request]
    starts: list[int]
    num_tokens: list[int]
    samples: list[bool]
    block_tables: list[list[int]]
    num_decodes: int
    preempted: list[str]
    others_wait: bool = False

    @property
    def total_tokens(self) -> int:
        """Tokens of the step."""
        return sum(self.num_tokens)

    def __bool__(self) -> bool:
        return bool(self.requests)


class Scheduler:
    """First come, first served, within a budget of requests, of tokens, and of blocks.

    A step goes through the running requests from the oldest to the newest and gives each the tokens that it
    misses; what is left of the budget admits requests from the queue. So a long prompt is computed in pieces
    behind everyone's next token, and never holds anyone up. Where blocks run out, the newest running request
    is preempted: it gives its blocks back, goes to the front of the queue, and will compute its tokens again.
    Nothing is ever taken from a request by a newer one, so the oldest always gets on, and every request
    becomes the oldest.

    Completions of one prompt share its full blocks: the first computes them, the others begin behind them. Where
    the first ends while others are still in the queue, the prompt's blocks are kept for these, until nobody is
    left who wants them or others need the room.

    Parameters
    ----------
    max_seqs : int
        The most requests in a step.
    max_tokens : int
        The most tokens in a step.
    blocks : BlockManager
        The pool, all of it free.
    max_model_len : int, optional
        The most tokens of one request, prompt and completion; at most what the whole pool holds. By default
        just that, ``blocks.num_blocks * blocks.block_size``.
    batching : {"continuous", "static"}
        ``"static"`` admits requests only when nothing runs.
    chunked_prefill : bool
        False: a prompt is computed in one step, or waits for one with enough room.
    lookahead : int
        So many tokens beyond those of a step have their blocks in time, where blocks are free: whoever runs the
        steps may then start the next one before it is scheduled.

    Raises
    ------
    ValueError
        A limit is not positive, `batching` is neither, or `lookahead` is negative.
    """

    def __init__(
        self,
        max_seqs: int,
        max_tokens: int,
        blocks: Blocks,
        *,
        max_model_len: int | None = None,
        batching: Literal["continuous", "static"] = "continuous",
        chunked_prefill: bool = True,
        lookahead: int = 0,
    ) -> None:
        max_model_len = _longest(blocks, max_model_len)
        for name, value in (
            ("max_seqs", max_seqs),
            ("max_tokens", max_tokens),
            ("max_model_len", max_model_len),
        ):
            if value < 1:
                raise ValueError(f"Scheduler: {name} is {value}; it must be at least 1")
        if batching not in ("continuous", "static"):
            raise ValueError(f"Scheduler: batching is {batching!r}; it must be 'continuous' or 'static'")
        if lookahead < 0:
            raise ValueError(f"Scheduler: lookahead is {lookahead}; it must be 0 or more")
        self.max_seqs = max_seqs
        self.max_tokens = max_tokens
        self.max_model_len = max_model_len
        # A preempted request computes prompt and completion again, and without chunks in one step.
        self._limit = max_model_len if chunked_prefill else min(max_model_len, max_tokens)
        self.blocks = blocks
        self.batching = batching
        self.chunked_prefill = chunked_prefill
        self.lookahead = lookahead
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order of admission: the oldest first
        self._requests: dict[str, Request] = {}
        # A static batch starts all at once, so no completion can wait until another has computed the prompt.
        self._fork = getattr(blocks, "fork", None) if batching == "continuous" else None
        self._parents: set[str] = set()  # ids of requests whose prompt others compute, too
        # Prompts of ended parents: the id that their blocks have now, and how many tokens these hold.
        self._kept: dict[Request, tuple[str, int]] = {}
        self._kept_ids = (
            f"\0prompt {number}" for number in itertools.count()
        )  # no request is called like that

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Put a new request at the end of the queue.

        Raises
        ------
        ValueError
            It can never fit, its id is in use, or it is not new.
        """
        name = f"request {request.request_id!r}"
        if request.request_id in self._requests:
            raise ValueError(f"{name}: a request with this id is waiting or running; ids must be unique")
        if request.state is not RequestState.WAITING or request.num_computed_tokens:
            raise ValueError(f"{name} is {request.state.value} already; only a new request can be added")
        limit = self._limit
        room = limit - request.num_prompt_tokens
        if room < 1:
            raise ValueError(
                f"{name}: the prompt has {request.num_prompt_tokens} tokens; at most {limit - 1} fit,"
                f" because prompt and completion together can have {limit}"
            )
        if request.params.max_tokens is not None and request.params.max_tokens > room:
            raise ValueError(
                f"{name}: max_tokens is {request.params.max_tokens}; at most {room} fit after its prompt of"
                f" {request.num_prompt_tokens} tokens, because both together can have {limit}"
            )
        if request.params.max_tokens is None:
            request.max_num_tokens = limit
        self._requests[request.request_id] = request
        self.waiting.append(request)
        if request.parent is not None:
            self._parents.add(request.parent.request_id)

    def schedule(self) -> ScheduledBatch:
        """Choose the tokens of the next step, and reserve the blocks for their keys and values.

        Returns
        -------
        ScheduledBatch
            Empty where nothing is waiting or running, or where the only running request has just been
            preempted.

        Raises
        ------
        RuntimeError
            The block manager refuses blocks to the only request, though all should be free.
        """
        rows = _Rows(self.max_tokens)
        preempted = self._schedule_running(rows)
        self._admit(rows)
        if not rows.requests and not preempted and self.has_work:
            raise RuntimeError(
                f"nothing can be scheduled: {len(self.waiting)} requests wait, {len(self.running)} run, and"
                f" {self.blocks.num_free} blocks are free; blocks were lost"
            )
        if self.lookahead:
            self._look_ahead(rows)
        # For a seat where batching is continuous; for tokens where these do not suffice for all who run.
        in_the_queue = bool(self.waiting) and self.batching == "continuous"
        others_wait = in_the_queue or len(rows.requests) < len(self.running)
        return rows.batch(self.blocks, preempted, others_wait)

    def update(self, batch: ScheduledBatch, ids: Sequence[int]) -> list[Request]:
        """Take note of a computed step.

        Parameters
        ----------
        batch : ScheduledBatch
            What :meth:`schedule` gave.
        ids : sequence of int
            The new token of each request with ``samples``, in the batch's order.

        Returns
        -------
        list of Request
            Those that have finished, by an end or stop token or by length. Their blocks are free again.

        Raises
        ------
        ValueError
            There are more or fewer ids than requests that sample.
        """
        if len(ids) != sum(batch.samples):
            raise ValueError(f"update: {len(ids)} ids came for {sum(batch.samples)} requests that sample")
        finished = []
        tokens = iter(ids)
        for request, count, samples in zip(batch.requests, batch.num_tokens, batch.samples, strict=True):
            token = int(next(tokens)) if samples else None
            if request.state is not RequestState.RUNNING:  # aborted while the step was computed
                continue
            request.num_computed_tokens += count
            if token is not None:
                request.append(token)
                if token in request.stop_tokens:
                    explicit = token in (request.params.stop_token_ids or ())
                    self._release(request, "stop", token if explicit else None)
                    finished.append(request)
                elif request.num_tokens == request.max_num_tokens:
                    self._release(request, "length")
                    finished.append(request)
        if finished:
            self.running = [request for request in self.running if not request.finished]
        return finished

    def finish(self, request_id: str, reason: str, stop_reason: str | None = None) -> bool:
        """End a request from outside (a stop string was seen, or nobody wants it any more), and free its
        blocks.

        Returns
        -------
        bool
            False where no such request is waiting or running: it may just have finished by itself.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
            self._has_left_the_queue(request)
        self._release(request, reason, stop_reason)
        return True

    def abort(self, request_id: str) -> bool:
        """:meth:`finish` with the reason ``"abort"``."""
        return self.finish(request_id, "abort")

    def _schedule_running(self, rows: _Rows) -> list[str]:
        """Give the running requests their tokens; returns the ids of those preempted for it."""
        preempted: list[str] = []
        index = 0
        while index < len(self.running):
            request = self.running[index]
            count = self._next_count(request, rows.budget)
            if count == 0:
                break
            # All requests from this one on have nothing in this step yet, so the newest of them can be
            # preempted, at the last this one itself.
            while not self.blocks.allocate(request.request_id, request.num_computed_tokens + count):
                if self._give_up_kept():
                    continue
                victim = self.running.pop()
                self._preempt(victim)
                preempted.append(victim.request_id)
                if victim is request:
                    return preempted
            rows.add(request, count)
            index += 1
        return preempted

    def _look_ahead(self, rows: _Rows) -> None:
        """Blocks for the tokens that come after this step, while there are free ones."""
        for request, start, count in zip(rows.requests, rows.starts, rows.counts, strict=True):
            ahead = min(start + count + self.lookahead, request.max_num_tokens)
            if ahead > start + count and not self.blocks.allocate(request.request_id, ahead):
                return

    def _admit(self, rows: _Rows) -> None:
        """Let requests in from the queue, in order, while seats, tokens and blocks last."""
        static = self.batching == "static"
        if static and self.running:
            return
        while self.waiting and len(self.running) < self.max_seqs:
            request = self.waiting[0]
            count = self._next_count(request, rows.budget)
            # A static batch is complete from its first step on, if need be with members that compute nothing
            # yet.
            if (count == 0 and not static) or not self._reserve(request):
                break
            self.waiting.popleft()
            self._has_left_the_queue(request)
            request.state = RequestState.RUNNING
            self.running.append(request)
            if count:
                rows.add(request, self._next_count(request, rows.budget))
            else:
                rows.budget = 0  # nobody behind it may overtake

    def _next_count(self, request: Request, budget: int) -> int:
        """How many tokens the request computes within a budget."""
        missing = request.num_tokens - request.num_computed_tokens
        if missing <= budget:
            return missing
        return budget if self.chunked_prefill else 0

    def _reserve(self, request: Request) -> bool:
        """Blocks for all tokens that a waiting request has now; False where they are not to be had yet.

        All, and not only those of the next step: a request that ran out of blocks in the middle of its own
        prompt would have computed the first part for nothing.
        """
        owner, computed = self._prompt_of(request)
        shared = 0
        if self._fork is not None and owner and request.parent is not None:
            common = _common(request.parent)
            if request.parent.state is RequestState.RUNNING and computed < common:
                return False  # until it has computed them
            shared = self._fork(owner, request.request_id, min(common, computed))
        while not self.blocks.allocate(request.request_id, request.num_tokens):
            # Where nobody runs, nobody else will give any back.
            if self.running or not self._give_up_kept():
                if owner:
                    self.blocks.free(request.request_id)
                return False
        request.num_computed_tokens = shared
        return True

    def _prompt_of(self, request: Request) -> tuple[str, int]:
        """Whose blocks have the tokens of a completion's prompt, and how many; nobody's is ("", 0)."""
        parent = request.parent
        if self._fork is None or parent is None:
            return "", 0
        if parent.state is RequestState.RUNNING:
            return parent.request_id, parent.num_computed_tokens
        return self._kept.get(parent, ("", 0))

    def _keep_prompt(self, parent: Request) -> None:
        """Before a request's blocks are freed: keep those of its prompt, if a completion in the queue wants them."""
        if self._fork is None or parent.request_id not in self._parents:
            return
        wanted = any(request.parent is parent for request in self.waiting)
        if wanted and parent.num_computed_tokens >= _common(parent):
            name = next(self._kept_ids)
            self._kept[parent] = (name, self._fork(parent.request_id, name, _common(parent)))

    def _has_left_the_queue(self, request: Request) -> None:
        """Free its prompt's blocks that were kept, unless others in the queue want them."""
        parent = request.parent
        if parent is None or parent not in self._kept:
            return
        if not any(other.parent is parent for other in self.waiting):
            self.blocks.free(self._kept.pop(parent)[0])

    def _give_up_kept(self) -> bool:
        """Free all blocks that are kept; False where there are none."""
        if not self._kept:
            return False
        for name, _ in self._kept.values():
            self.blocks.free(name)
        self._kept.clear()
        return True

    def _preempt(self, request: Request) -> None:
        """Take a request's blocks; it will compute its tokens again, those that it generated included."""
        self.blocks.free(request.request_id)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.state = RequestState.WAITING
        self.waiting.appendleft(request)

    def _release(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        if request.state is RequestState.RUNNING:
            self._keep_prompt(request)
            self.blocks.free(request.request_id)
        self._parents.discard(request.request_id)
        request.state = RequestState.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        del self._requests[request.request_id]


def _common(parent: Request) -> int:
    """Tokens of a prompt that a completion need not compute: all but the last, whose logits each needs."""
    return parent.num_prompt_tokens - 1


class _Rows:
    """A batch in the making."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.requests: list[Request] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.samples: list[bool] = []
        self.num_decodes = 0

    def add(self, request: Request, count: int) -> None:
        start = request.num_computed_tokens
        samples = start + count == request.num_tokens
        self.budget -= count
        self.requests.append(request)
        self.starts.append(start)
        self.counts.append(count)
        self.samples.append(samples)
        # These come first by themselves: a request is only admitted when all running ones have got their
        # tokens, so one that is still computing its prompt is always the newest.
        if count == 1 and samples and start >= request.num_prompt_tokens:
            self.num_decodes += 1

    def batch(self, blocks: Blocks, preempted: list[str], others_wait: bool) -> ScheduledBatch:
        tables = [blocks.table(request.request_id) for request in self.requests]
        lists = (self.requests, self.starts, self.counts, self.samples, tables)
        return ScheduledBatch(*lists, self.num_decodes, preempted, others_wait)


def _longest(blocks: Blocks, max_model_len: int | None) -> int:
    """The most tokens of one request: what was asked for, where the pool can hold it."""
    if not (hasattr(blocks, "num_blocks") and hasattr(blocks, "block_size")):
        if max_model_len is None:
            raise ValueError(
                "Scheduler: max_model_len must be given, because blocks has no num_blocks and block_size"
            )
        return max_model_len
    capacity = int(blocks.num_blocks * blocks.block_size)
    if max_model_len is not None and max_model_len > capacity:
        raise ValueError(
            f"Scheduler: max_model_len is {max_model_len}; it must be at most the {capacity} tokens that the"
            f" {blocks.num_blocks} blocks of {blocks.block_size} hold"
        )
    return max_model_len or capacity
