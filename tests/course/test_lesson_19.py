"""Lesson 19's scheduler: its exact script, any mix of arrivals and aborts, and real stories in the engine."""

from __future__ import annotations

import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyvllm_ref import LLM, SamplingParams, emulation
from tinyvllm_ref.block_manager import BlockManager
from tinyvllm_ref.course.answers import make_answer
from tinyvllm_ref.course.engine_card import engine_report
from tinyvllm_ref.course.exercises import exercise_of, lesson_of
from tinyvllm_ref.course.judging import judge
from tinyvllm_ref.course.lessons import solution_cell
from tinyvllm_ref.parts import Parts
from tinyvllm_ref.request import Request, RequestState


def answer(id: str) -> Any:
    source = solution_cell(id)
    assert source is not None
    return make_answer(exercise_of(id), source, emulation)


Scheduler = answer("19.5")


def shape(batch: Any) -> list[tuple[str, int, int]]:
    fields = (batch.requests, batch.starts, batch.num_tokens)
    return [(request.request_id, start, count) for request, start, count in zip(*fields, strict=True)]


def test_the_exact_script() -> None:
    """2 seats, 8 tokens a step; a ends in step 2 and c has its seat in step 3; long is computed in pieces."""
    scheduler = Scheduler(2, 8, BlockManager(16, 8))
    sizes = {"a": (3, 2), "b": (2, 5), "c": (2, 1), "long": (17, 2)}
    requests = {name: Request(name, [7] * p, SamplingParams(max_tokens=m)) for name, (p, m) in sizes.items()}
    for request in requests.values():
        scheduler.add(request)
    trace = []
    while batch := scheduler.schedule():
        ended = [request.request_id for request in scheduler.update(batch, [9] * sum(batch.samples))]
        trace.append((shape(batch), batch.samples, batch.num_decodes, ended))
    assert trace == [
        ([("a", 0, 3), ("b", 0, 2)], [True, True], 0, []),
        ([("a", 3, 1), ("b", 2, 1)], [True, True], 2, ["a"]),
        ([("b", 3, 1), ("c", 0, 2)], [True, True], 1, ["c"]),
        ([("b", 4, 1), ("long", 0, 7)], [True, False], 1, []),
        ([("b", 5, 1), ("long", 7, 7)], [True, False], 1, ["b"]),
        ([("long", 14, 3)], [True], 0, []),
        ([("long", 17, 1)], [True], 1, ["long"]),
    ]
    assert all(one.finished and one.finish_reason == "length" for one in requests.values())
    assert all(one.state == RequestState.FINISHED for one in requests.values())
    assert scheduler.blocks.num_free == 16


EVENTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(1, 12), st.sampled_from(["stay"] * 4 + ["abort"])),
    min_size=1,
    max_size=14,
)  # fmt: skip


@given(st.integers(1, 5), st.integers(1, 12), st.integers(3, 12), EVENTS)
def test_nobody_starves_and_no_limit_is_passed(
    seats: int, budget: int, places: int, events: list[Any]
) -> None:
    """Each step computes something; the oldest running request is always in it; all end, and all room comes back."""
    blocks = BlockManager(places, 48)
    scheduler = Scheduler(seats, budget, blocks)
    arrivals, step = [], 0
    for number, (later, prompt, most, fate) in enumerate(events):
        step += later
        arrivals.append((step, Request(f"{number}", [7] * prompt, SamplingParams(max_tokens=most)), fate))
    requests = [request for _, request, _ in arrivals]
    begun: list[str] = []
    for step in range(100_000):
        for when, request, _ in arrivals:
            if when == step:
                scheduler.add(request)
        for when, request, fate in arrivals:
            if fate == "abort" and when + 3 == step:
                scheduler.abort(request.request_id)
        oldest = next((one for one in requests if one.state == "running"), None)
        has_work = any(when <= step and not one.finished for when, one, _ in arrivals)
        batch = scheduler.schedule()
        assert bool(batch) is has_work
        begun += [one.request_id for one in batch.requests if one.request_id not in begun]
        assert len(batch.requests) <= seats
        # Also with fewer tokens than seats: only so many are let in that each who runs is in every step.
        assert sum(one.state == "running" for one in requests) == len(batch.requests)
        assert sum(batch.num_tokens) <= budget
        assert all(count > 0 for count in batch.num_tokens)
        assert oldest is None or batch.requests[0] is oldest
        for one, start, count, table in zip(
            batch.requests, batch.starts, batch.num_tokens, batch.block_tables, strict=True
        ):
            assert start == one.num_computed_tokens
            assert start + count <= len(table) * 48
        decodes = [
            start >= one.num_prompt_tokens for one, start in zip(batch.requests, batch.starts, strict=True)
        ]
        assert decodes == sorted(decodes, reverse=True)
        assert batch.num_decodes == sum(decodes)
        scheduler.update(batch, [7] * sum(batch.samples))
        blocks.check()
        if all(one.finished for one in requests) and step > arrivals[-1][0]:
            break
    assert all(one.finished for one in requests)
    for _, one, fate in arrivals:
        assert one.finish_reason == ("length" if fate == "stay" else one.finish_reason)
        assert one.finish_reason in ("length", "abort")
        assert one.finish_reason == "abort" or one.num_tokens == one.max_num_tokens
    assert begun == sorted(begun, key=int), "first come, first served"
    assert blocks.num_free == places


def test_real_stories_in_the_engine_are_those_of_one_by_one() -> None:
    """Two seats and 8 tokens a step, end tokens and all; with the learner's scheduler and without."""
    prompts = [
        "The end.",
        "Once upon a time",
        "Then they both went home, tired and happy. And",
        "A fox named Dot",
    ]
    params = SamplingParams(max_tokens=12, temperature=0.0)
    mine = LLM(
        "tiny-stories", parts=Parts().replace(Scheduler=Scheduler), max_num_seqs=2, max_num_batched_tokens=8
    )
    assert mine.parts.owners()["Scheduler"] == "learner"
    together = mine.generate(prompts, params, use_tqdm=False)
    alone = [LLM("tiny-stories").generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    assert [one.outputs[0].token_ids for one in together] == [one.outputs[0].token_ids for one in alone]
    assert [one.outputs[0].finish_reason for one in together] == [
        one.outputs[0].finish_reason for one in alone
    ]
    assert {one.outputs[0].finish_reason for one in together} == {"stop", "length"}


def test_without_max_tokens_a_text_goes_on_to_its_end() -> None:
    mine = LLM("tiny-stories", parts=Parts().replace(Scheduler=Scheduler))
    (output,) = mine.generate(
        ["Then they both went home, tired and happy. And"], SamplingParams(max_tokens=None, temperature=0.0)
    )
    assert output.outputs[0].finish_reason == "stop"
    assert len(output.outputs[0].token_ids) > 1


def test_the_card_shows_it_at_work(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistakes that it shows do damage the text, or stop the engine."""
    monkeypatch.setenv("TINYVLLM_MY_ENGINE", str(tmp_path / "my_engine"))
    report = engine_report(lesson_of("19"))
    draws, writes_on, stands_still = report.mistakes
    assert draws.text != report.reference_text
    assert writes_on.text.startswith(report.reference_text)
    assert len(writes_on.text) > len(report.reference_text)
    assert "nothing to do" in stands_still.error
    assert all(mistake.logit_error is None for mistake in (draws, writes_on))


# Right answers of other kinds must pass.
OTHER_SCHEDULERS = {
    "a deque, and room as it is needed": (
        (
            "from dataclasses import dataclass",
            "from collections import deque\nfrom dataclasses import dataclass",
        ),
        ("self.waiting, self.running = [], []", "self.waiting, self.running = deque(), []"),
        ("self.waiting.pop(0)", "self.waiting.popleft()"),
        ("request.request_id, request.max_num_tokens)", "request.request_id, request.num_tokens)"),
        (
            "            if count > 0:",
            "            if self.blocks.allocate(request.request_id, request.num_tokens) and count > 0:",
        ),
        ("self.running + self.waiting", "[*self.running, *self.waiting]"),
    ),
    "the state from the engine's enum": (
        ("from dataclasses import", "from tinyvllm_ref.request import RequestState\nfrom dataclasses import"),
        ('request.state = "running"', "request.state = RequestState.RUNNING"),
        ('request.state == "running"', "request.state == RequestState.RUNNING"),
        ('= "finished", reason', "= RequestState.FINISHED, reason"),
    ),
    "a look into the lists instead of the state, lists made anew": (
        ('if request.state == "running":', "if request in self.running:"),
        (
            "self.running.remove(request)",
            "self.running = [one for one in self.running if one is not request]",
        ),
        (
            "self.waiting.remove(request)",
            "self.waiting = [one for one in self.waiting if one is not request]",
        ),
    ),
    "admitted first, and the tokens dealt out in one loop over all": (
        (
            """            if count > 0:
                rows.append((request, count))
                budget -= count
""",
            "            budget -= count\n",
        ),
        (
            """            rows.append((request, count))
            budget -= count
        return self.batch(rows)
""",
            """            budget -= count
        budget = self.max_tokens
        for request in self.running:
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            rows += [(request, count)] * (count > 0)
            budget -= count
        return self.batch(rows)
""",
        ),
    ),
    "another test of length, and abort that answers": (
        ('self.end(request, "abort")', 'return self.end(request, "abort") or True'),
        ("num_tokens >= request.max", "num_tokens == request.max"),
    ),
}


@pytest.mark.parametrize("name", OTHER_SCHEDULERS)
def test_other_right_schedulers_pass(name: str) -> None:
    source = solution_cell("19.5") or ""
    for old, new in OTHER_SCHEDULERS[name]:
        assert old in source, old
        source = source.replace(old, new)
    verdict = judge(exercise_of("19.5"), make_answer(exercise_of("19.5"), source, emulation), emulation)
    assert verdict.passed, verdict.first_failure


OTHERS = {
    "19.1": '''def serve(prompts, next_tokens, num_slots, end_ids, max_tokens):
    outputs, slots, seats, nobody = [[] for _ in prompts], [[] for _ in range(num_slots)], {}, iter(range(len(prompts)))
    while True:
        for slot in range(num_slots):
            if slot not in seats and (r := next(nobody, None)) is not None:
                seats[slot] = r
        if not seats:
            return outputs, slots
        order = sorted(seats, reverse=True)
        for slot, token in zip(order, next_tokens([prompts[seats[s]] + outputs[seats[s]] for s in order])):
            outputs[seats[slot]].append(token)
        for slot in range(num_slots):
            slots[slot].append(seats.get(slot))
            if slot in seats and (outputs[seats[slot]][-1] in end_ids or len(outputs[seats[slot]]) >= max_tokens):
                del seats[slot]
''',
    "19.3": '''compact = cp.RawKernel(r"""
extern "C" __global__ void compact(const int* state, const int* left, int* out, int width) {
    __shared__ int to;
    if (threadIdx.x == 0) {
        to = 0;
        for (int s = 0; s < blockIdx.x; s++) if (left[s]) to++;
    }
    __syncthreads();
    if (left[blockIdx.x])
        for (int c = threadIdx.x; c < width; c += 64) out[to * width + c] = state[blockIdx.x * width + c];
}
""", "compact")
''',
    "19.4": """def plan(running, waiting, max_seqs, max_tokens):
    rows = []
    everyone = (list(running) + list(waiting))[:max_seqs]
    while everyone and max_tokens:
        name, missing = everyone.pop(0)
        rows.append((name, min(missing, max_tokens)))
        max_tokens -= rows[-1][1]
    return rows
""",
}  # fmt: skip


@pytest.mark.parametrize("id", OTHERS)
def test_other_right_answers_pass(id: str) -> None:
    verdict = judge(exercise_of(id), make_answer(exercise_of(id), OTHERS[id], emulation), emulation)
    assert verdict.passed, verdict.first_failure


def test_one_thread_for_a_row_is_not_enough() -> None:
    slow = OTHERS["19.3"].replace("int c = threadIdx.x; c < width; c += 64", "int c = 0; c < width; c++").replace(
        "if (left[blockIdx.x])", "if (left[blockIdx.x] && threadIdx.x == 0)"
    )  # fmt: skip
    verdict = judge(exercise_of("19.3"), make_answer(exercise_of("19.3"), slow, emulation), emulation)
    assert not verdict.passed
    assert "one thread copies" in verdict.first_failure.difference.headline


@pytest.mark.parametrize("id", ["19.1", "19.4", "19.5"])
def test_the_pictures_say_what_they_show(id: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYVLLM_MY_ENGINE", str(tmp_path / "my_engine"))
    figure = lesson_of("19").pictures[id](answer(id), types.SimpleNamespace())
    said = {
        "19.1": ("428 steps, 38% of the slots idle", "318 steps, 17% of the slots idle"),
        "19.4": ("long does not get in: 15 steps", "your plan: 15 steps"),
        "19.5": ("up to 203 tokens", "up to 32 tokens"),
    }[id]
    assert all(part in figure.alt_text for part in said), figure.alt_text
