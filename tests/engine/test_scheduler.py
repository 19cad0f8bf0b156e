"""The scheduler: scripted traces, and any mix of arrivals, lengths, budgets and aborts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyvllm_ref.block_manager import BlockManager
from tinyvllm_ref.request import Request, RequestState
from tinyvllm_ref.sampling_params import SamplingParams
from tinyvllm_ref.scheduler import Scheduler

EOS = 2


def make_request(name, prompt=4, max_tokens=3, **options):
    return Request(
        name, [10 + i for i in range(prompt)], SamplingParams(max_tokens=max_tokens), (EOS,), **options
    )


def make_scheduler(max_seqs=8, max_tokens=64, num_blocks=32, block_size=4, **options):
    return Scheduler(max_seqs, max_tokens, BlockManager(num_blocks, block_size), **options)


def shape(batch):
    """What a step computes, as (id, first token, count) of each request."""
    return [
        (request.request_id, start, count)
        for request, start, count in zip(batch.requests, batch.starts, batch.num_tokens, strict=True)
    ]


def step(scheduler, token=7):
    """One step in which every request that samples gets the same token."""
    batch = scheduler.schedule()
    return batch, scheduler.update(batch, [token] * sum(batch.samples))


def test_a_request_is_prefilled_then_decoded_then_finished():
    scheduler = make_scheduler()
    request = make_request("a", prompt=4, max_tokens=3)
    scheduler.add(request)
    trace = []
    while scheduler.has_work:
        batch, finished = step(scheduler)
        trace.append((shape(batch), batch.num_decodes))
    assert trace == [([("a", 0, 4)], 0), ([("a", 4, 1)], 1), ([("a", 5, 1)], 1)]
    assert finished == [request]
    assert (request.state, request.finish_reason) == (RequestState.FINISHED, "length")
    assert request.output_token_ids == [7, 7, 7]
    assert scheduler.blocks.num_free == 32


def test_decodes_come_first_and_a_long_prompt_is_computed_in_chunks_behind_them():
    scheduler = make_scheduler(max_tokens=8, num_blocks=64)
    scheduler.add(make_request("a", prompt=3, max_tokens=9))
    step(scheduler)
    scheduler.add(make_request("long", prompt=17, max_tokens=2))
    scheduler.add(make_request("next", prompt=2, max_tokens=2))
    shapes = [
        (shape(batch), batch.num_decodes, batch.samples) for batch in (step(scheduler)[0] for _ in range(4))
    ]
    assert shapes == [
        ([("a", 3, 1), ("long", 0, 7)], 1, [True, False]),
        ([("a", 4, 1), ("long", 7, 7)], 1, [True, False]),
        ([("a", 5, 1), ("long", 14, 3), ("next", 0, 2)], 1, [True, True, True]),
        ([("a", 6, 1), ("long", 17, 1), ("next", 2, 1)], 3, [True, True, True]),
    ]


def test_without_chunks_a_prompt_waits_for_a_step_with_room_and_nobody_overtakes():
    scheduler = make_scheduler(max_tokens=8, chunked_prefill=False)
    scheduler.add(make_request("a", prompt=3, max_tokens=3))
    scheduler.add(make_request("big", prompt=7, max_tokens=1))
    scheduler.add(make_request("small", prompt=1, max_tokens=1))
    shapes = [shape(step(scheduler)[0]) for _ in range(4)]
    assert shapes == [[("a", 0, 3)], [("a", 3, 1), ("big", 0, 7)], [("a", 4, 1), ("small", 0, 1)], []]


def test_a_seat_freed_by_update_is_taken_by_the_next_schedule():
    scheduler = make_scheduler(max_seqs=2)
    for name, tokens in (("a", 2), ("b", 4), ("c", 2)):
        scheduler.add(make_request(name, max_tokens=tokens))
    assert shape(step(scheduler)[0]) == [("a", 0, 4), ("b", 0, 4)]
    assert [request.request_id for request in step(scheduler)[1]] == ["a"]
    assert shape(step(scheduler)[0]) == [("b", 5, 1), ("c", 0, 4)]


def test_a_static_batch_admits_nobody_before_all_of_it_has_finished():
    scheduler = make_scheduler(max_seqs=2, batching="static")
    for name, tokens in (("a", 1), ("b", 3), ("c", 1)):
        scheduler.add(make_request(name, max_tokens=tokens))
    names = [[request.request_id for request in step(scheduler)[0].requests] for _ in range(4)]
    assert names == [["a", "b"], ["b"], ["b"], ["c"]]


def test_a_static_batch_is_complete_even_if_its_prompts_take_several_steps():
    scheduler = make_scheduler(max_seqs=3, max_tokens=6, batching="static")
    for name in "abc":
        scheduler.add(make_request(name, prompt=4, max_tokens=2))
    assert shape(step(scheduler)[0]) == [("a", 0, 4), ("b", 0, 2)]
    scheduler.add(make_request("late", prompt=1, max_tokens=1))
    assert shape(step(scheduler)[0]) == [("a", 4, 1), ("b", 2, 2), ("c", 0, 3)]
    assert shape(step(scheduler)[0]) == [("b", 4, 1), ("c", 3, 1)]
    assert shape(step(scheduler)[0]) == [("c", 4, 1)]
    assert shape(step(scheduler)[0]) == [("late", 0, 1)]


def test_the_newest_is_preempted_waits_in_front_and_keeps_its_tokens():
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    old, new = make_request("old", prompt=4, max_tokens=8), make_request("new", prompt=4, max_tokens=8)
    scheduler.add(old)
    scheduler.add(new)
    while not (batch := step(scheduler)[0]).preempted:
        pass
    scheduler.add(make_request("later", prompt=1, max_tokens=1))
    assert batch.preempted == ["new"]
    assert [request.request_id for request in batch.requests] == ["old"]
    assert (new.state, new.num_computed_tokens, new.num_preemptions) == (RequestState.WAITING, 0, 1)
    kept = new.output_token_ids
    assert len(kept) == 5
    assert [request.request_id for request in scheduler.waiting] == ["new", "later"]
    while not old.finished:
        scheduler.blocks.check()
        step(scheduler)
    batch, _ = step(scheduler)
    assert shape(batch)[0] == ("new", 0, 9)
    assert batch.samples[0]
    while scheduler.has_work:
        step(scheduler)
    assert new.output_token_ids[:5] == kept
    assert new.num_output_tokens == 8
    assert scheduler.blocks.num_free == 4


def test_several_victims_keep_their_order_in_the_queue():
    scheduler = make_scheduler(num_blocks=6, block_size=2, max_tokens=64)
    for name in "abc":
        scheduler.add(make_request(name, prompt=4, max_tokens=8))
    batch, _ = step(scheduler)
    batch, _ = step(scheduler)
    assert batch.preempted == ["c"]
    while len(scheduler.waiting) < 2:
        step(scheduler)
    assert [request.request_id for request in scheduler.waiting] == ["b", "c"]


def test_end_tokens_stop_tokens_and_ignore_eos():
    cases = [
        (SamplingParams(max_tokens=5), EOS, "stop", None),
        (SamplingParams(max_tokens=5, stop_token_ids=[9]), 9, "stop", 9),
        (SamplingParams(max_tokens=5, stop_token_ids=[9], ignore_eos=True), 9, "stop", 9),
        (SamplingParams(max_tokens=1, ignore_eos=True), EOS, "length", None),
    ]
    for params, token, reason, stop_reason in cases:
        scheduler = make_scheduler()
        request = Request("a", [5], params, (EOS, 3))
        scheduler.add(request)
        _, finished = step(scheduler, token)
        assert finished == [request]
        assert (request.finish_reason, request.stop_reason) == (reason, stop_reason)
        assert request.output_token_ids == [token]
    ignoring = Request("a", [5], SamplingParams(max_tokens=2, ignore_eos=True), (EOS,))
    scheduler.add(ignoring)
    assert step(scheduler, EOS)[1] == []


def test_max_tokens_none_runs_to_the_end_of_the_context():
    scheduler = make_scheduler(num_blocks=3, block_size=4, max_model_len=10)
    request = make_request("a", prompt=4, max_tokens=None)
    scheduler.add(request)
    while scheduler.has_work:
        step(scheduler)
    assert (request.num_tokens, request.finish_reason) == (10, "length")


def test_what_can_never_fit_is_refused_by_name():
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    with pytest.raises(ValueError, match=r"'a': the prompt has 16 tokens; at most 15 fit.* can have 16"):
        scheduler.add(make_request("a", prompt=16, max_tokens=None))
    with pytest.raises(ValueError, match=r"'a': max_tokens is 9; at most 8 fit after its prompt of 8 tokens"):
        scheduler.add(make_request("a", prompt=8, max_tokens=9))
    scheduler.add(make_request("a", prompt=8, max_tokens=8))
    with pytest.raises(ValueError, match="ids must be unique"):
        scheduler.add(make_request("a"))
    whole = make_scheduler(max_tokens=8, chunked_prefill=False)
    with pytest.raises(ValueError, match="at most 4 fit"):
        whole.add(make_request("a", prompt=4, max_tokens=5))
    while scheduler.has_work:
        step(scheduler)


def test_wrong_limits_are_refused():
    with pytest.raises(ValueError, match="max_seqs is 0"):
        make_scheduler(max_seqs=0)
    with pytest.raises(ValueError, match="must be 'continuous' or 'static'"):
        make_scheduler(batching="dynamic")
    with pytest.raises(ValueError, match="max_model_len is 129; it must be at most the 128 tokens"):
        make_scheduler(max_model_len=129)
    with pytest.raises(ValueError, match="lookahead is -1; it must be 0 or more"):
        make_scheduler(lookahead=-1)
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    batch = scheduler.schedule()
    with pytest.raises(ValueError, match="3 ids came for 1 requests"):
        scheduler.update(batch, [1, 2, 3])


def test_abort_works_on_waiting_running_and_scheduled_requests():
    scheduler = make_scheduler(max_seqs=2)
    requests = [make_request(name) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    batch = scheduler.schedule()
    assert scheduler.abort("b")  # while the step is computed: its token is dropped
    assert scheduler.abort("c")  # from the queue
    assert not scheduler.abort("b")
    assert not scheduler.abort("unknown")
    scheduler.update(batch, [7, 7])
    assert [request.output_token_ids for request in requests] == [[7], [], []]
    assert [request.finish_reason for request in requests] == [None, "abort", "abort"]
    assert scheduler.finish("a", "stop", "###")
    assert (requests[0].finish_reason, requests[0].stop_reason) == ("stop", "###")
    assert not scheduler.has_work
    assert scheduler.blocks.num_free == 32
    scheduler.add(make_request("b"))  # the id is free again


def test_completions_of_one_prompt_share_its_full_blocks():
    scheduler = make_scheduler(num_blocks=32, block_size=4)
    first = make_request("first", prompt=11, max_tokens=4)
    scheduler.add(first)
    scheduler.add(make_request("second", prompt=11, max_tokens=4, parent=first))
    scheduler.add(make_request("other", prompt=2, max_tokens=1))
    assert shape(step(scheduler)[0]) == [("first", 0, 11)]
    batch, _ = step(scheduler)
    assert shape(batch) == [("first", 11, 1), ("second", 8, 3), ("other", 0, 2)]
    assert batch.block_tables[1][:2] == batch.block_tables[0][:2]
    assert batch.block_tables[1][2] != batch.block_tables[0][2]
    scheduler.blocks.check()
    scheduler.abort("first")
    scheduler.blocks.check()
    while scheduler.has_work:
        step(scheduler)
    assert scheduler.blocks.num_free == 32


@pytest.mark.parametrize("prompt", [1, 4, 5, 8])
def test_a_completion_computes_the_last_prompt_token_itself(prompt):
    scheduler = make_scheduler(block_size=4)
    first = make_request("first", prompt=prompt)
    scheduler.add(first)
    scheduler.add(make_request("second", prompt=prompt, parent=first))
    rows = []
    while not rows or rows[-1][0] != "second":
        rows = shape(step(scheduler)[0])
    shared = (prompt - 1) // 4 * 4
    assert rows[-1] == ("second", shared, prompt - shared)


def test_a_completion_that_finds_no_blocks_leaves_the_shared_ones_alone():
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    first = make_request("first", prompt=8, max_tokens=2)
    scheduler.add(first)
    scheduler.add(make_request("fork", prompt=8, max_tokens=2, parent=first))
    step(scheduler)
    # Now first has all five blocks: fork could share three, and finds no fourth.
    assert shape(step(scheduler)[0]) == [("first", 8, 1)]
    assert first.finished
    assert scheduler.blocks.num_free == 2
    assert shape(step(scheduler)[0]) == [("fork", 6, 2)]
    assert scheduler.blocks.num_free == 1


def add_completions(scheduler, name, count, **options):
    first = make_request(f"{name}0", **options)
    requests = [first, *(make_request(f"{name}{k}", parent=first, **options) for k in range(1, count))]
    for request in requests:
        scheduler.add(request)
    return requests


@pytest.mark.parametrize("max_seqs", [1, 2, 3, 8])
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_a_prompt_is_computed_once_however_many_complete_it(max_seqs, max_tokens):
    """Also where the first has ended before the others have a seat, or with its first token."""
    scheduler = make_scheduler(max_seqs=max_seqs, block_size=4)
    requests = add_completions(scheduler, "a", 5, prompt=11, max_tokens=max_tokens)
    computed = 0
    while scheduler.has_work:
        batch, _ = step(scheduler)
        computed += batch.total_tokens
        scheduler.blocks.check()
    # All but the first begin behind the two full blocks; of the last token, nothing is computed.
    assert computed == 11 + 4 * 3 + 5 * (max_tokens - 1)
    assert all(request.output_token_ids == [7] * max_tokens for request in requests)
    assert scheduler.blocks.num_free == 32


@pytest.mark.parametrize("leaves", [["a1", "a2"], ["a0", "a2", "a1"], ["a0", "a1", "a2"]])
def test_a_prompt_is_kept_no_longer_than_somebody_in_the_queue_wants_it(leaves):
    scheduler = make_scheduler(max_seqs=1, block_size=4)
    add_completions(scheduler, "a", 3, prompt=9, max_tokens=1 if leaves[0] == "a1" else 4)
    step(scheduler)
    for name in leaves:
        assert scheduler.blocks.num_free < 32
        assert scheduler.abort(name)
        scheduler.blocks.check()
    assert scheduler.blocks.num_free == 32
    assert not scheduler.has_work


@pytest.mark.parametrize("who", ["running", "waiting"])
def test_a_prompt_that_is_kept_makes_room_for_others(who):
    """For a request that runs, before any is preempted; for one in front of the queue, when nobody runs."""
    scheduler = make_scheduler(max_seqs=2 if who == "running" else 1, num_blocks=6, block_size=4)
    if who == "running":
        scheduler.add(make_request("b", prompt=3, max_tokens=17))
    add_completions(scheduler, "a", 2, prompt=13, max_tokens=1)
    step(scheduler)
    assert scheduler.blocks.num_free == (2 if who == "running" else 3)
    if who == "waiting":  # as one that has been preempted
        scheduler.add(make_request("b", prompt=15, max_tokens=2))
        scheduler.waiting.rotate(1)
    steps = []
    while scheduler.has_work:
        batch, _ = step(scheduler)
        steps.append(shape(batch))
        assert not batch.preempted
        scheduler.blocks.check()
    if who == "waiting":
        assert steps[0] == [("b", 0, 15)]
        assert steps[-1] == [("a1", 0, 13)]
    else:
        assert ("a1", 12, 1) in steps[0]
    assert scheduler.blocks.num_free == 6


def test_a_prompt_that_is_kept_is_not_taken_for_another_one_s_of_the_same_name():
    scheduler = make_scheduler(max_seqs=1, block_size=4)
    add_completions(scheduler, "a", 2, prompt=9, max_tokens=1)
    step(scheduler)
    again = make_request("a0", prompt=13, max_tokens=1)
    for request in (again, make_request("a2", prompt=13, max_tokens=1, parent=again)):
        scheduler.add(request)
    assert [shape(step(scheduler)[0]) for _ in range(3)] == [[("a1", 8, 1)], [("a0", 0, 13)], [("a2", 12, 1)]]
    assert scheduler.blocks.num_free == 32


def test_a_completion_whose_parent_never_computed_the_prompt_computes_it():
    scheduler = make_scheduler(max_tokens=4, block_size=4)
    first, *_ = add_completions(scheduler, "a", 2, prompt=9, max_tokens=2)
    step(scheduler)
    assert first.num_computed_tokens == 4
    scheduler.abort("a0")
    assert scheduler.blocks.num_free == 32
    assert shape(step(scheduler)[0]) == [("a1", 0, 4)]


def test_a_request_checks_its_parent_and_its_prompt():
    with pytest.raises(ValueError, match="'a': the prompt is empty"):
        Request("a", [], SamplingParams())
    with pytest.raises(ValueError, match="not that of its parent 'p'"):
        Request("a", [1], SamplingParams(), parent=Request("p", [2], SamplingParams()))


def tables(batch):
    """How many blocks each request has."""
    return {r.request_id: len(t) for r, t in zip(batch.requests, batch.block_tables, strict=True)}


def test_with_lookahead_a_block_comes_a_step_before_its_first_token():
    counts = []
    for lookahead in (0, 1):
        scheduler = make_scheduler(block_size=4, lookahead=lookahead)
        scheduler.add(make_request("a", prompt=3, max_tokens=7))
        seen = []
        while scheduler.has_work:
            batch = scheduler.schedule()
            seen.append(tables(batch)["a"])
            scheduler.update(batch, [7])
        counts.append(seen)
    # Tokens 3, 4, ... are computed; the tenth and last one never is, and so has no slot.
    assert counts == [[1, 1, 2, 2, 2, 2, 3], [1, 2, 2, 2, 2, 3, 3]]


def test_lookahead_goes_no_further_than_a_request():
    scheduler = make_scheduler(block_size=4, lookahead=100)
    scheduler.add(make_request("a", prompt=3, max_tokens=9))
    assert tables(scheduler.schedule()) == {"a": 3}


def test_lookahead_takes_only_what_is_free():
    """Nobody is preempted for it, and nobody is kept out; the oldest is served first."""
    scheduler = make_scheduler(num_blocks=5, block_size=4, lookahead=1)
    for name in "ab":
        scheduler.add(make_request(name, prompt=4, max_tokens=4))
    scheduler.add(make_request("c", prompt=8, max_tokens=1))
    batch = scheduler.schedule()
    assert shape(batch) == [("a", 0, 4), ("b", 0, 4), ("c", 0, 8)]
    assert tables(batch) == {"a": 2, "b": 1, "c": 2}
    assert batch.preempted == []
    scheduler.update(batch, [7, 7, 7])
    batch = scheduler.schedule()
    assert tables(batch) == {"a": 2, "b": 2}
    scheduler.blocks.check()


def test_a_whole_pool_is_used_in_spite_of_lookahead():
    scheduler = make_scheduler(num_blocks=3, block_size=4, lookahead=2)
    scheduler.add(make_request("a", prompt=4, max_tokens=8))
    while scheduler.has_work:
        batch, _ = step(scheduler)
        assert batch.preempted == []
    assert scheduler.blocks.num_free == 3


class Leaky(BlockManager):
    """Forgets the last block of each request."""

    def free(self, request_id):
        self.table(request_id).pop()
        super().free(request_id)


def test_lost_blocks_are_an_error_and_no_endless_loop():
    scheduler = Scheduler(8, 64, Leaky(2, 4))
    scheduler.add(make_request("a", prompt=4, max_tokens=4))
    while scheduler.has_work:
        step(scheduler)
    scheduler.add(make_request("b", prompt=5, max_tokens=3))  # two blocks; one is left
    with pytest.raises(RuntimeError, match="blocks were lost"):
        scheduler.schedule()


class SlotManager:
    """One contiguous slot per request, with no more methods than the contract has."""

    def __init__(self, slots):
        self.slots, self.owners = list(range(slots)), {}

    @property
    def num_free(self):
        return len(self.slots)

    def allocate(self, request_id, num_tokens):
        if request_id not in self.owners:
            if not self.slots:
                return False
            self.owners[request_id] = [self.slots.pop()]
        return True

    def free(self, request_id):
        self.slots += self.owners.pop(request_id)

    def table(self, request_id):
        return self.owners[request_id]


def test_any_manager_with_the_four_methods_will_do():
    with pytest.raises(ValueError, match="max_model_len must be given"):
        Scheduler(8, 64, SlotManager(2))
    scheduler = Scheduler(8, 64, SlotManager(2), max_model_len=16)
    requests = [make_request(name) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    assert len(step(scheduler)[0].requests) == 2
    while scheduler.has_work:
        step(scheduler)
    assert all(request.num_output_tokens == 3 for request in requests)
    assert scheduler.blocks.num_free == 2


arrivals = st.lists(
    st.tuples(
        st.integers(0, 12),  # the step in which it arrives
        st.integers(1, 30),  # tokens of the prompt
        st.integers(1, 20),  # max_tokens
        st.integers(1, 3),  # n
        st.one_of(st.none(), st.integers(0, 25)),  # aborted so many steps after its arrival
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(
    arrivals=arrivals,
    max_seqs=st.integers(1, 6),
    max_tokens=st.integers(1, 40),
    block_size=st.sampled_from([1, 3, 4, 16]),
    spare=st.integers(0, 30),
    batching=st.sampled_from(["continuous", "static"]),
    chunked=st.booleans(),
    lookahead=st.sampled_from([0, 0, 1, 5]),
    data=st.data(),
)
def test_any_load_is_served(
    arrivals, max_seqs, max_tokens, block_size, spare, batching, chunked, lookahead, data
):
    # The pool holds the longest request and some spare blocks; the tokens of a step at least it, if not
    # chunked.
    longest = max(prompt + tokens for _, prompt, tokens, _, _ in arrivals)
    blocks = BlockManager(-(-longest // block_size) + spare, block_size)
    if not chunked:
        max_tokens = max(max_tokens, longest)
    scheduler = Scheduler(
        max_seqs, max_tokens, blocks, batching=batching, chunked_prefill=chunked, lookahead=lookahead
    )

    timeline, aborts, requests, arrived = {}, {}, [], []
    for index, (when, prompt, tokens, n, abort_after) in enumerate(arrivals):
        parent = None
        for completion in range(n):
            request = make_request(f"{index}-{completion}", prompt, tokens, parent=parent)
            parent = parent or request
            requests.append(request)
            arrived.append((when, request))
            timeline.setdefault(when, []).append(request)
            if abort_after is not None:
                aborts.setdefault(when + abort_after, []).append(request)

    admitted = []
    work = sum(request.num_prompt_tokens + request.params.max_tokens for request in requests)
    now = 0
    while timeline or scheduler.has_work:
        for request in timeline.pop(now, []):
            scheduler.add(request)
        before = {request.request_id: request.state for request in requests}
        batch = scheduler.schedule()
        check_batch(scheduler, batch, before)
        admitted += [
            request.request_id
            for request in scheduler.running
            if before[request.request_id] is RequestState.WAITING and not request.num_preemptions
        ]
        for request in aborts.pop(now, []):
            scheduler.abort(request.request_id)
        ids = [data.draw(st.sampled_from([EOS, 7, 8])) for _ in range(sum(batch.samples))]
        finished = scheduler.update(batch, ids)
        assert all(request.finished for request in finished)
        blocks.check()
        now += 1
        # Every step computes something for the oldest request or for one that finishes after finitely many
        # tokens; the bound leaves room for each token being computed again after a preemption for each other
        # request.
        assert now < 100 + work * (1 + len(requests)), "a request starves"

    assert blocks.num_free == blocks.num_blocks
    in_order = [request.request_id for _, request in sorted(arrived, key=lambda pair: pair[0])]
    assert [name for name in in_order if name in admitted] == admitted, "somebody was overtaken"
    for request in requests:
        assert request.finished
        if request.finish_reason == "length":
            assert request.num_output_tokens == request.params.max_tokens
        elif request.finish_reason == "stop":
            assert request.token_ids[-1] == EOS
        assert EOS not in request.output_token_ids[:-1]


def check_batch(scheduler, batch, before):
    """What must hold for every batch, whatever was asked."""
    assert len(batch.requests) <= scheduler.max_seqs
    assert len(scheduler.running) <= scheduler.max_seqs
    assert batch.total_tokens <= scheduler.max_tokens
    assert len({id(request) for request in batch.requests}) == len(batch.requests)
    assert not {request.request_id for request in batch.requests} & set(batch.preempted)
    decodes = []
    for request, start, count, samples, table in zip(
        batch.requests, batch.starts, batch.num_tokens, batch.samples, batch.block_tables, strict=True
    ):
        assert request.state is RequestState.RUNNING
        assert start == request.num_computed_tokens
        assert 1 <= count <= request.num_tokens - start
        assert samples is (start + count == request.num_tokens)
        assert len(table) * scheduler.blocks.block_size >= start + count
        decodes.append(start >= request.num_prompt_tokens and count == 1 and samples)
    assert decodes == sorted(decodes, reverse=True), "decodes come first"
    assert sum(decodes) == batch.num_decodes
    # A slot that a step writes to belongs to one request only.
    written = [
        table[position // scheduler.blocks.block_size]
        for table, start, count in zip(batch.block_tables, batch.starts, batch.num_tokens, strict=True)
        for position in range(start, start + count)
    ]
    owners = {}
    for request in scheduler.running:
        for block in scheduler.blocks.table(request.request_id):
            owners[block] = owners.get(block, 0) + 1
    assert all(owners[block] == 1 for block in written), "a shared block is written to"
    if scheduler.batching == "static" and RequestState.RUNNING in before.values():
        assert all(before[request.request_id] is RequestState.RUNNING for request in batch.requests)


@settings(max_examples=200, deadline=None)
@given(
    arrivals=arrivals,
    max_seqs=st.integers(1, 6),
    max_tokens=st.integers(1, 40),
    block_size=st.sampled_from([1, 3, 4, 16]),
    lookahead=st.integers(1, 4),
    batching=st.sampled_from(["continuous", "static"]),
)
def test_with_blocks_for_all_lookahead_changes_no_step(arrivals, lookahead, **options):
    traces = [_trace(arrivals, ahead, options) for ahead in (0, lookahead)]
    assert traces[0] == traces[1]


def _trace(arrivals, lookahead, options):
    """What each step computes, where no block is ever missing; everyone's blocks are ahead as far as may be."""
    size = options["block_size"]
    blocks = BlockManager(3000, size)
    scheduler = Scheduler(
        options["max_seqs"],
        options["max_tokens"],
        blocks,
        batching=options["batching"],
        lookahead=lookahead,
    )
    requests = [
        (when, make_request(f"{index}-{completion}", prompt, tokens), abort)
        for index, (when, prompt, tokens, n, abort) in enumerate(arrivals)
        for completion in range(n)
    ]
    trace, now = [], 0
    while scheduler.has_work or now <= max(when for when, *_ in requests):
        for when, request, abort in requests:
            if when == now:
                scheduler.add(request)
            if abort is not None and when + abort == now:
                scheduler.abort(request.request_id)
        batch = scheduler.schedule()
        for request, start, count, table in zip(
            batch.requests, batch.starts, batch.num_tokens, batch.block_tables, strict=True
        ):
            assert len(table) * size >= min(start + count + lookahead, request.max_num_tokens)
        trace.append((shape(batch), batch.samples, batch.num_decodes, batch.preempted))
        scheduler.update(batch, [7] * sum(batch.samples))
        now += 1
    assert blocks.num_free == blocks.num_blocks
    return trace
