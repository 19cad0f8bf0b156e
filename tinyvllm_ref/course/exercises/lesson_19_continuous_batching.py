"""Lesson 19: continuous batching. A seat that is free is taken, a budget in tokens, and a scheduler that starves nobody."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tinyvllm_ref.course import figures, my_engine
from tinyvllm_ref.course.exercise import (
    Case,
    EngineCard,
    Exercise,
    Hints,
    Lesson,
    Mistake,
    Prediction,
    Quantity,
    Work,
    with_changes,
)
from tinyvllm_ref.course.figures.steps import step_tokens

from .lesson_18_static_batching import LESSON as STATIC_BATCHING
from .lesson_18_static_batching import MOST, SLOTS, serve_case, stories


def _changed(text: str, *changes: tuple[str, str]) -> str:
    return with_changes(text, changes)


# ---------------- 19.1: a seat that is free is taken


def _serve_cases(rng: np.random.Generator) -> list[Case]:
    case = functools.partial(serve_case, rng)
    drawn = [int(n) for n in rng.integers(1, 20, 13)]
    return [
        case("2 slots, 4 requests of 2, 4, 1 and 3 tokens", [2, 4, 1, 3], 2, 9, "small"),
        case("3 slots, 5 requests, two end in the same step", [2, 2, 4, 3, 1], 3, 9, "small"),
        case("2 slots, 4 requests, at most 3 tokens", [6, 2, 8, 1], 2, 3, "awkward"),
        case("4 slots, one request", [3], 4, 9, "awkward"),
        case("1 slot, 3 requests", [2, 1, 3], 1, 9, "awkward"),
        case("4 slots, 13 requests of 1 to 19 tokens, at most 15", drawn, 4, 15, "awkward"),
    ]


def _expect_serve(inputs: Any) -> dict[str, Any]:
    """By lengths alone: each request goes to the slot that is free first."""
    outputs, free = [], [0] * inputs["slots"]
    slots: list[list[int | None]] = [[] for _ in free]
    for r, request in enumerate(inputs["requests"]):
        ends = [k + 1 for k, token in enumerate(request["text"]) if token in inputs["ends"]]
        length = min([*ends, inputs["most"]])
        outputs.append(request["text"][:length])
        slot = min(range(len(free)), key=lambda k: (free[k], k))
        slots[slot] += [r] * length
        free[slot] += length
    steps = max(free)
    return {
        "outputs": outputs,
        "slots": [row + [None] * (steps - len(row)) for row in slots],
        "calls of next_tokens": steps,
        "texts given to next_tokens": sum(map(len, outputs)),
    }


_SERVE_BODY = """    outputs = [[] for _ in prompts]
    slots = [[] for _ in range(num_slots)]
    seats, waiting = [None] * num_slots, list(range(len(prompts)))
    while waiting or any(r is not None for r in seats):
        for slot in range(num_slots):
            if seats[slot] is None and waiting:
                seats[slot] = waiting.pop(0)
        running = [r for r in seats if r is not None]
        tokens = next_tokens([prompts[r] + outputs[r] for r in running])
        for r, token in zip(running, tokens):
            outputs[r].append(token)
        for slot, r in enumerate(seats):
            slots[slot].append(r)
            if r is not None and (outputs[r][-1] in end_ids or len(outputs[r]) == max_tokens):
                seats[slot] = None
    return outputs, slots"""
_ADMIT = """        for slot in range(num_slots):
            if seats[slot] is None and waiting:
                seats[slot] = waiting.pop(0)
"""


def _serve(*changes: tuple[str, str]) -> str:
    return f"def serve(prompts, next_tokens, num_slots, end_ids, max_tokens):\n{_changed(_SERVE_BODY, *changes)}\n"


_SERVE = Exercise(
    id="19.1",
    title="a seat that is free is taken",
    answer="serve",
    kind="function",
    arguments=("prompts", "next_tokens", "num_slots", "end_ids", "max_tokens"),
    cases=_serve_cases,
    run=STATIC_BATCHING.exercise("18.4").run,  # type: ignore[union-attr]
    expected=_expect_serve,
    points={"small": 1, "awkward": 1},
    hints=Hints(
        question="Take {case}. In which step does a seat become free for the first time, and who should have it in the next?",
        rule="In every step: give each free seat, from the first on, to the next request that waits; ask for one token for each "
        "request that has a seat; note who sat where; and only then empty the seats of those that have ended. It goes on while "
        "anybody waits or sits.\n\n"
        "By hand, 2 slots and requests of 2, 4, 1 and 3 tokens: slot 0 is 0 0 2 3 3 3, slot 1 is 1 1 1 1 - -.",
        code="""for slot in range(num_slots):
    if seats[slot] is None and ____:
        seats[slot] = waiting.pop(____)
running = [r for r in seats if ____]
tokens = next_tokens([prompts[r] + outputs[r] for r in running])
for r, token in zip(running, tokens):
    outputs[r].append(token)
for slot, r in enumerate(seats):
    slots[slot].append(____)
    if r is not None and (____ in end_ids or len(outputs[r]) == ____):
        seats[slot] = ____""",
    ),
    mistakes=(
        Mistake(
            "a batch that waits",
            _serve((_ADMIT, "        if all(r is None for r in seats):\n" + "".join("    " + line + "\n" for line in _ADMIT.splitlines()))),
            "This is lesson 18's static batch: nobody is let in before all seats are empty. A seat that is free is to be taken in the "
            "very next step, whoever else still sits.",
            "When request 0 has ended, how long does its seat stay empty?",
            variants=(
                """def serve(prompts, next_tokens, num_slots, end_ids, max_tokens):
    outputs = [[] for _ in prompts]
    slots = [[] for _ in range(num_slots)]
    for first in range(0, len(prompts), num_slots):
        running = list(range(first, min(first + num_slots, len(prompts))))
        while running:
            tokens = next_tokens([prompts[r] + outputs[r] for r in running])
            for slot in range(num_slots):
                slots[slot].append(first + slot if first + slot in running else None)
            for r, token in zip(running, tokens):
                outputs[r].append(token)
            running = [r for r in running if outputs[r][-1] not in end_ids and len(outputs[r]) < max_tokens]
    return outputs, slots
""",
            ),
        ),
        Mistake(
            "freed a step late",
            """def serve(prompts, next_tokens, num_slots, end_ids, max_tokens):
    outputs = [[] for _ in prompts]
    slots = [[] for _ in range(num_slots)]
    seats, waiting = [None] * num_slots, list(range(len(prompts)))
    done = lambda r: outputs[r] and (outputs[r][-1] in end_ids or len(outputs[r]) == max_tokens)
    while waiting or any(r is not None and not done(r) for r in seats):
        for slot in range(num_slots):
            if seats[slot] is None and waiting:
                seats[slot] = waiting.pop(0)
        for slot, r in enumerate(seats):
            slots[slot].append(None if r is None or done(r) else r)
        running = [r for r in seats if r is not None and not done(r)]
        seats = [None if r is not None and done(r) else r for r in seats]
        tokens = next_tokens([prompts[r] + outputs[r] for r in running])
        for r, token in zip(running, tokens):
            outputs[r].append(token)
    return outputs, slots
""",
            "The seat is emptied only after the next step has been planned, so it stays empty for one step after every request. Whoever "
            "ends in step t must be gone when step t + 1 is planned.",
            "Request 0 ends in step 2. Who sits in its seat in step 3?",
        ),
        Mistake(
            "order lost",
            _serve(("waiting.pop(0)", "waiting.pop()")),
            "pop() takes the one that came *last*. As long as new requests keep coming, the first would wait for ever.",
            "Who has waited longest, and where in the list is that request?",
        ),
        Mistake(
            "seats close up",
            """def serve(prompts, next_tokens, num_slots, end_ids, max_tokens):
    outputs = [[] for _ in prompts]
    slots = [[] for _ in range(num_slots)]
    running, waiting = [], list(range(len(prompts)))
    while waiting or running:
        while waiting and len(running) < num_slots:
            running.append(waiting.pop(0))
        tokens = next_tokens([prompts[r] + outputs[r] for r in running])
        for slot in range(num_slots):
            slots[slot].append(running[slot] if slot < len(running) else None)
        for r, token in zip(running, tokens):
            outputs[r].append(token)
        running = [r for r in running if outputs[r][-1] not in end_ids and len(outputs[r]) < max_tokens]
    return outputs, slots
""",
            "The texts and the number of steps are right. But when a request ends, all behind it move up a seat. Here a seat is a place in "
            "the cache, so who sits must stay where it sits; the new one takes the seat that is free.",
            "Request 1 began in slot 1. Where is it after request 0 has ended?",
        ),
        Mistake(
            "one new request a step",
            _serve(("                seats[slot] = waiting.pop(0)\n", "                seats[slot] = waiting.pop(0)\n                break\n")),
            "Two requests may end in the same step, and then two seats are free at once. Fill all of them.",
            "How many seats are free before the first step?",
        ),
        Mistake(
            "the last ones are sent home",
            _serve(("while waiting or any(r is not None for r in seats):", "while waiting:")),
            "When nobody waits any more, there are still requests that sit, and their texts are not done.",
            "Nobody waits. Is there still something to do?",
        ),
        Mistake(
            "finished rows still computed",
            _serve(
                (_ADMIT, _ADMIT.replace("seats[slot] is None", "(seats[slot] is None or done(seats[slot]))")),
                ("    while waiting or any(r is not None for r in seats):", "    done = lambda r: outputs[r] and (outputs[r][-1] in end_ids or len(outputs[r]) == max_tokens)\n    while waiting or any(r is not None and not done(r) for r in seats):"),
                ("        for r, token in zip(running, tokens):\n            outputs[r].append(token)\n", "        ended = [r for r in running if done(r)]\n        for r, token in zip(running, tokens):\n            if r not in ended:\n                outputs[r].append(token)\n"),
                ("            slots[slot].append(r)\n", "            slots[slot].append(None if r in ended else r)\n"),
                ("            if r is not None and (outputs[r][-1] in end_ids or len(outputs[r]) == max_tokens):\n                seats[slot] = None\n", ""),
            ),
            "The texts are right, and next_tokens was asked for requests that had ended and whose seat nobody wanted: work that is thrown "
            "away. Empty the seat at once.",
            "How many sequences do you hand to next_tokens in the last step?",
        ),
        Mistake(
            "not the texts so far",
            _serve(("prompts[r] + outputs[r] for r in running", "prompts[r] for r in running")),
            "next_tokens knows nothing of earlier calls. What it draws next depends on the whole text so far: a prompt, and behind it all that has been "
            "drawn for it.",
            "Request 0 has drawn one token. What must next_tokens see to draw the second?",
            variants=(_serve(("[prompts[r] + outputs[r] for r in running]", "running")),),
        ),
        Mistake(
            "the end token is left out",
            _serve(
                ("            outputs[r].append(token)\n", "            if token not in end_ids:\n                outputs[r].append(token)\n            ended[r] = token in end_ids or len(outputs[r]) == max_tokens\n"),
                ("(outputs[r][-1] in end_ids or len(outputs[r]) == max_tokens)", "ended[r]"),
                ("    outputs = [[] for _ in prompts]\n", "    outputs, ended = [[] for _ in prompts], {}\n"),
            ),
            "An end token is drawn like any other: it is the last of the request's tokens.",
            "Request 2 draws one token, and that ends it. What are its drawn tokens?",
        ),
        Mistake(
            "one call for each seat",
            _serve(
                ("tokens = next_tokens([prompts[r] + outputs[r] for r in running])", "tokens = [next_tokens([prompts[r] + outputs[r]])[0] for r in running]"),
            ),
            "Each request is computed alone, in a call of its own, and for each of them all the weights are read. A step is *one* call, with the "
            "texts of all who sit.",
            "How often do you call next_tokens in a step in which two requests sit?",
            variants=(
                _serve(
                    ("        tokens = next_tokens([prompts[r] + outputs[r] for r in running])\n        for r, token in zip(running, tokens):\n            outputs[r].append(token)\n", "        for r in running:\n            outputs[r] += next_tokens([prompts[r] + outputs[r]])\n"),
                ),
            ),
        ),
    ),
)  # fmt: skip


# ---------------- 19.2: the idle share, predicted


def _steps_and_idle() -> tuple[int, float]:
    """Steps and idle slots in percent, when a free seat is taken at once by the next of the lesson's requests."""
    free = [0] * SLOTS
    lengths = [len(completion) for _, completion in stories()]
    for length in lengths:
        free[free.index(min(free))] += length
    return max(free), 100 * (1 - sum(lengths) / (SLOTS * max(free)))


_PREDICTION = Prediction(
    id="19.2",
    title="what is left of the waste?",
    quantities={
        "steps": Quantity("steps until all are done", lambda: float(_steps_and_idle()[0])),
        "idle": Quantity("slots idle, of all slots and steps", lambda: _steps_and_idle()[1], "percent"),
    },
    explains="The same texts, in a quarter fewer steps than static batches take. What is still idle lies at the end, when nobody waits any more and the seats empty one by "
    "one: with twelve requests that end is long. A server to which requests keep coming never gets there, and its idle share goes to zero.",
    hints=Hints(
        question="The number of tokens is printed above. In how many steps could four slots draw them if none were ever idle?",
        rule="Any numbers get the credit. Fewer steps than all tokens / 4 are impossible; idle is 1 - all tokens / (4 x steps).",
        code="steps = ____\nidle = ____",
    ),
)


# ---------------- 19.3: the rows close up


def _compact_cases(rng: np.random.Generator) -> list[Case]:
    def case(left: list[int], width: int, group: str, label: str = "") -> Case:
        state = rng.integers(1, 1000, (len(left), width)).astype(np.int32)
        label = label or f"{len(left)} slots, {sum(n > 0 for n in left)} running, {width} numbers each"
        return Case(label, {"state": state, "left": np.array(left, np.int32)}, group)

    def drawn(slots: int, share: float) -> list[int]:
        return [int(n) for n in rng.integers(1, 50, slots) * (rng.random(slots) < share)]

    small = {
        "state": np.array([[10, 11], [20, 21], [30, 31], [40, 41]], np.int32),
        "left": np.array([5, 0, 2, 7], np.int32),
    }
    return [
        Case("4 slots of 2 numbers, slot 1 has finished", small, "small"),
        case([0, 0, 3, 1, 0, 9], 3, "small"),
        case([4, 4, 4], 5, "awkward", "3 slots, all running"),
        case([0, 0, 0], 5, "awkward", "3 slots, all finished"),
        case([1], 1, "awkward"),
        case(drawn(70, 0.5), 65, "awkward"),
        case(drawn(130, 0.8), 200, "awkward"),
        case(drawn(33, 0.3), 129, "awkward"),
    ]


def _run_compact(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    slots, width = inputs["state"].shape
    state, left = lab.input("state", inputs["state"]), lab.input("left", inputs["left"])
    out = lab.inout(np.full((slots, width), -1, np.int32))
    answer((slots,), (64,), (state, left, out, np.int32(width)))
    return {"out": lab.get(out)}


def _expect_compact(inputs: Any) -> dict[str, Any]:
    running = inputs["state"][inputs["left"] > 0]
    out = np.full(inputs["state"].shape, -1, np.int32)
    out[: len(running)] = running
    return {"out": out}


def _threads_share(inputs: Any, outputs: Any, observed: Any) -> str | None:
    width = inputs["state"].shape[1]
    if width < 200:
        return None
    turns, fewest = observed.total("global_write_requests"), int((inputs["left"] > 0).sum()) * -(-width // 32)
    if turns <= 4 * fewest:
        return None
    return (
        f"The rows are right, and writing them took {turns:,} turns of warps, where {fewest:,} are enough: one thread copies "
        "a whole row. Let the threads share the columns"
    )


_COMPACT_BODY = """    int slot = blockIdx.x;
    if (left[slot] == 0) return;
    int to = 0;
    for (int s = 0; s < slot; s++) to += left[s] > 0;
    for (int c = threadIdx.x; c < width; c += blockDim.x) out[to * width + c] = state[slot * width + c];"""


def _compact(*changes: tuple[str, str]) -> str:
    return f'''compact = cp.RawKernel(r"""
extern "C" __global__ void compact(const int* state, const int* left, int* out, int width) {{
{_changed(_COMPACT_BODY, *changes)}
}}
""", "compact")
'''


_COUNT = "for (int s = 0; s < slot; s++) to += left[s] > 0;"
_COPY = "for (int c = threadIdx.x; c < width; c += blockDim.x) out"

_COMPACT = Exercise(
    id="19.3",
    title="the rows close up",
    answer="compact",
    kind="kernel",
    cases=_compact_cases,
    run=_run_compact,
    expected=_expect_compact,
    points={"small": 1, "awkward": 1, "clean": 1},
    verify=_threads_share,
    hints=Hints(
        question="Take {case}. How many running slots lie in front of the last one, and so, to which row does it move?",
        rule="A running slot moves to the row whose number is how many running slots lie in front of it. A finished slot writes "
        "nothing. In C++ a comparison is a number, 1 where it holds and 0 where not, and can be added up.\n\n"
        "By hand, left = 5 0 2 7: slot 0 stays in row 0, slot 1 has finished, slot 2 moves to row 1 and slot 3 to row 2.",
        code="""if (left[slot] == ____) return;
int to = 0;
for (int s = 0; s < ____; s++) to += left[s] > ____;
for (int c = threadIdx.x; c < width; c += ____) out[____ * width + c] = state[____ * width + c];""",
    ),
    mistakes=(
        Mistake(
            "holes stay",
            _compact((_COUNT, "to = slot;")),
            "The running rows are copied to where they were, and a hole is left for each slot that has finished. The step's rows must lie "
            "one behind the other, from 0 on.",
            "Which row is slot 2 in afterwards, and which rows lie in front of it?",
        ),
        Mistake(
            "finished rows go along",
            _compact(("    if (left[slot] == 0) return;\n", "")),
            "A finished slot counts the running ones in front of it as well, and writes its row to the place of the next running one: "
            "two blocks write to one row, and which of them wins is luck.",
            "Slot 1 has finished. To which row does your kernel copy it, and who else goes there?",
        ),
        Mistake(
            "counts itself",
            _compact(("s < slot;", "s <= slot;")),
            "The row is how many running slots lie *in front*. Counted with itself, every one comes a row too far.",
            "Slot 0 runs. How many running slots lie in front of it?",
        ),
        Mistake(
            "order lost",
            _compact((_COUNT, "int running = 0, holes = 0;\n    for (int s = 0; s < gridDim.x; s++) running += left[s] > 0;\n    to = slot;\n    if (slot >= running) {\n        for (int s = gridDim.x - 1; s > slot; s--) holes += left[s] > 0;\n        for (to = 0; left[to] > 0 || holes > 0; to++) holes -= left[to] == 0;\n    }")),
            "The last running rows are put into the holes. That moves less, and the rows are no longer in the order in which the requests "
            "came. Who is served first when the budget is short would be luck from then on.",
            "Slot 1 has finished. Which slot comes into row 1 in your kernel, and which one is next in order?",
        ),
        Mistake(
            "the numbers added up, not the slots",
            _compact(("to += left[s] > 0;", "to += left[s];")),
            "left[s] says how many tokens slot s may still draw. You want to know how *many slots* run: each counts as one.",
            "In your smallest case left[0] is 5. How many slots is that?",
        ),
        Mistake(
            "finished rows counted",
            _compact(("to += left[s] > 0;", "to += left[s] == 0;")),
            "That is how many have *finished* in front of this one, so it says how far the row moves, and not where to.",
            "Slot 3, with one finished slot in front of it: where does it go?",
        ),
        Mistake(
            "only the first columns",
            _compact((_COPY, "int c = threadIdx.x;\n    if (c < width) out")),
            "A block has 64 threads, and a row may have more numbers. Each thread takes every blockDim.x-th.",
            "Who copies column 64?",
        ),
        Mistake(
            "no guard for the columns",
            _compact((_COPY, "int c = threadIdx.x;\n    out")),
            "With fewer columns than threads, the threads behind the row's end write into the rows after it.",
            "A row has 2 numbers. What does thread 2 write?",
        ),
    ),
)  # fmt: skip


# ---------------- 19.4: a policy that starves


def _plan_cases(rng: np.random.Generator) -> list[Case]:
    def case(
        label: str, seats: int, budget: int, arrivals: str | list[str], group: str, steps: int = 0
    ) -> Case:
        asked = arrivals.split(", ") if isinstance(arrivals, str) else arrivals
        inputs = {"max_seqs": seats, "max_tokens": budget, "arrivals": asked, "last_step": steps or 60}
        return Case(label, inputs, group)

    def stream(
        first: str, prompts: tuple[int, int], answers: tuple[int, int], every: int, last: int
    ) -> list[str]:
        """One request, and behind it a stream of others."""
        names = (f"r{k}" for k in range(1000))
        later = [
            f"{next(names)}@{step} {int(rng.integers(*prompts))}+{int(rng.integers(*answers))}"
            for step in range(1, last, every)
        ]
        return [first, *later]

    return [
        case("a prompt of 6 in steps of 4", 2, 4, "a@1 6+2, b@1 2+2", "small"),
        case("someone writes, and prompts come", 3, 4, "a@1 2+4, b@2 4+1, c@3 4+1", "small"),
        case("more requests than seats", 2, 8, "a@1 3+3, b@1 3+1, c@1 1+2, d@1 2+1", "small"),
        case("a long prompt, and short ones in every step", 3, 6, stream("long@1 17+3", (2, 4), (1, 3), 1, 40), "starving", 50),
        case("a long answer, and prompts in every step", 4, 8, stream("a@1 3+9", (8, 12), (1, 2), 1, 40), "starving", 50),
        case("fewer tokens than seats", 6, 3, stream("a@1 2+5", (1, 5), (2, 5), 2, 20), "starving", 60),
        case("one token a step", 2, 1, "a@1 2+2, b@1 1+2, c@2 1+1", "awkward"),
        case("14 requests of all sizes", 4, 9, stream("a@1 5+4", (1, 25), (1, 9), 3, 40), "awkward", 120),
    ]  # fmt: skip


def _run_plan(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    """Play the arrivals `name@step prompt+answer`; who has computed all that it misses gets a token."""
    waiting: list[tuple[str, int]] = []
    running: list[tuple[str, int]] = []
    left: dict[str, int] = {}  # tokens of the answer that are still to be drawn
    arrivals, trace = list(inputs["arrivals"]), []
    for step in range(1, inputs["last_step"] + 1):
        while arrivals and int(arrivals[0].split()[0].split("@")[1]) <= step:
            who, sizes = arrivals.pop(0).split()
            prompt, count = sizes.split("+")
            waiting.append((who.split("@")[0], int(prompt)))
            left[waiting[-1][0]] = int(count)
        if not arrivals and not waiting and not running:
            break
        rows = answer(list(running), list(waiting), inputs["max_seqs"], inputs["max_tokens"])
        rows = [(str(name), int(count)) for name, count in rows]
        trace.append(", ".join(f"{name} {count}" for name, count in rows))
        missing = dict(running + waiting)
        wrong = [name for name, count in rows if name not in missing or not 0 <= count <= missing[name]]
        if wrong or len({name for name, _ in rows}) < len(rows):
            trace[-1] += f" ({wrong[0]} misses {missing.get(wrong[0], 0)})" if wrong else " (someone twice)"
            break
        planned = dict(rows)
        running += [one for one in waiting if one[0] in planned]
        waiting = [one for one in waiting if one[0] not in planned]
        for i, (name, count) in enumerate(running):
            after = count - planned.get(name, 0)
            if after == 0:  # all is computed: a token is drawn, and is the next to be computed
                left[name] -= 1
                after = 1
            running[i] = (name, after)
        running = [one for one in running if left[one[0]] > 0]
    starved = ", ".join([name for name, _ in running + waiting][:3])
    if starved:
        starved += "; steps: " + " | ".join(step or "-" for step in trace[:9])
    return {"not done at the end": starved or "nobody", "steps": trace}


def _expect_plan(inputs: Any) -> dict[str, Any]:
    """By the reference's scheduler."""
    from tinyvllm_ref.block_manager import BlockManager
    from tinyvllm_ref.request import Request
    from tinyvllm_ref.sampling_params import SamplingParams
    from tinyvllm_ref.scheduler import Scheduler

    scheduler = Scheduler(inputs["max_seqs"], inputs["max_tokens"], BlockManager(1000, 16))
    arrivals, trace = list(inputs["arrivals"]), []
    for step in range(1, inputs["last_step"] + 1):
        while arrivals and int(arrivals[0].split()[0].split("@")[1]) <= step:
            who, sizes = arrivals.pop(0).split()
            prompt, count = map(int, sizes.split("+"))
            scheduler.add(Request(who.split("@")[0], [7] * prompt, SamplingParams(max_tokens=count)))
        if not arrivals and not scheduler.has_work:
            break
        batch = scheduler.schedule()
        names = [request.request_id for request in batch.requests]
        trace.append(", ".join(f"{name} {n}" for name, n in zip(names, batch.num_tokens, strict=True)))
        scheduler.update(batch, [7] * sum(batch.samples))
    unfinished = [request.request_id for request in (*scheduler.running, *scheduler.waiting)]
    return {"not done at the end": ", ".join(unfinished[:3]) or "nobody", "steps": trace}


_PLAN_BODY = """    rows, budget, seats = [], max_tokens, max_seqs - len(running)
    for name, missing in running + waiting[:seats]:
        count = min(missing, budget)
        if count > 0:
            rows.append((name, count))
            budget -= count
    return rows"""
_FAULTY_PLAN = """    rows, budget, seats = [], max_tokens, max_seqs - len(running)
    for name, missing in sorted(waiting, key=lambda one: one[1])[:seats]:
        if missing <= budget:
            rows.append((name, missing))
            budget -= missing
    for name, missing in running:
        if budget > 0:
            rows.append((name, 1))
            budget -= 1
    return rows"""
_EVERYONE = "running + waiting[:seats]"
_PIECE = "count = min(missing, budget)"


def _plan(*changes: tuple[str, str], body: str = _PLAN_BODY) -> str:
    return f"def plan(running, waiting, max_seqs, max_tokens):\n{_changed(body, *changes)}\n"


_PLAN = Exercise(
    id="19.4",
    title="who starves?",
    answer="plan",
    kind="function",
    arguments=("running", "waiting", "max_seqs", "max_tokens"),
    cases=_plan_cases,
    run=_run_plan,
    expected=_expect_plan,
    points={"small": 1, "starving": 2, "awkward": 1},
    hints=Hints(
        question="Take {case}, and the first step that differs. Who came first, how many tokens does that request miss, and what "
        "would be left of the budget for the next one?",
        rule="Go through the running requests from the oldest to the newest, and then through those that wait, as many as there are "
        "seats free, from the oldest as well. Each gets what it misses, or what is left of the budget if that is less; once nothing "
        "is left, nobody else is in this step. Nobody is ever passed by one who came later.\n\n"
        "By hand, a budget of 4, prompts of 6 and 2: step 1 is a 4; step 2 is a 2, b 2; both draw, so step 3 is a 1, b 1.",
        code="""for name, missing in ____ + ____[:seats]:
    count = min(____, ____)
    if count > 0:
        rows.append((name, count))
        budget -= ____""",
    ),
    mistakes=(
        Mistake(
            "prefill blocks decode for ever",
            _plan((_EVERYONE, "waiting[:seats] + running")),
            "The prompts of those who wait come first, and whoever is writing gets what they leave. As long as new prompts keep coming, "
            "nothing is left, and a text that has begun stands still. Running requests come first.",
            "In each step a new prompt comes that fills the budget. When does a get its next token?",
        ),
        Mistake(
            "short prompts first",
            _plan((_EVERYONE, "running + sorted(waiting, key=lambda one: one[1])[:seats]")),
            "Short prompts let more requests in at once, and are served quickly. But as long as shorter ones keep coming, the long one "
            "waits for ever. Whoever came first goes first.",
            "In each step a short prompt comes. When is it the long one's turn?",
        ),
        Mistake(
            "whoever fits overtakes",
            _plan((_PIECE, "count = missing if missing <= budget else 0")),
            "A prompt that does not fit into what is left is passed over, and a shorter one behind it gets in. If there is always a "
            "shorter one, the long one never has its turn; and one that is longer than the whole budget never fits. Compute a piece of it.",
            "A prompt of 6 tokens, and 4 in a step. In which step does it fit?",
        ),
        Mistake(
            "whole prompts only",
            _plan(("        count = min(missing, budget)\n", "        if missing > budget:\n            break\n        count = missing\n")),
            "Nobody overtakes, which is right. But a prompt that is longer than the budget never fits into a step, and holds up all who "
            "came after it, for ever. Compute as much of it as there is room for; the rest comes in the next step.",
            "The first in the queue has a prompt of 17 tokens, and a step has 6. What happens to those behind it?",
        ),
        Mistake(
            "one token for whoever runs",
            _plan((_PIECE, "count = min(missing if (name, missing) in waiting else 1, budget)")),
            "A running request misses one token *once its prompt is computed*. As long as it is not, it misses the rest of the prompt: "
            "one token a step, while the budget goes unused, takes as many steps as the prompt has tokens.",
            "a has 4 of 6 prompt tokens computed, and nobody else is there. How many of its tokens should the next step compute?",
        ),
        Mistake(
            "budget counts requests",
            _plan(("budget -= count", "budget -= 1")),
            "The budget is in tokens, because tokens are what a step's time depends on. A request takes as many from it as it computes.",
            "The budget is 4 and a computes 4. What is left for b?",
        ),
        Mistake(
            "nothing is taken from the budget",
            _plan(("            budget -= count\n", "")),
            "Each of them gets as much as the whole step may compute. What one has got is no longer there for the next.",
            "The budget is 4. How many tokens has your second step?",
        ),
        Mistake(
            "more requests than seats",
            _plan((_EVERYONE, "running + waiting")),
            "A seat is a place in the cache, and there are max_seqs of them. Only as many may come in as there are seats free.",
            "Two seats, and two requests that run. How many may come in?",
        ),
        Mistake(
            "order lost",
            _plan((_EVERYONE, "running + waiting[::-1][:seats]")),
            "The newest in the queue is taken first. While new ones keep coming, the oldest stays where it is.",
            "Who has waited longest: the first in the list or the last?",
            variants=(_plan((_EVERYONE, "(running + waiting[:seats])[::-1]")),),
        ),
        Mistake(
            "a row of nothing",
            _plan(("        if count > 0:\n            rows.append((name, count))\n            budget -= count\n", "        rows.append((name, count))\n        budget -= count\n")),
            "A request for which nothing is left is in the step with 0 tokens: it takes a seat, and the model has no row for it. Leave it "
            "out; it waits for the next step.",
            "How many tokens does the last request of your step compute?",
        ),
        Mistake(
            "fair shares",
            """def plan(running, waiting, max_seqs, max_tokens):
    everyone = running + waiting[: max_seqs - len(running)]
    counts = {name: 0 for name, _ in everyone}
    while max_tokens > 0 and any(counts[name] < missing for name, missing in everyone):
        for name, missing in everyone:
            if max_tokens > 0 and counts[name] < missing:
                counts[name] += 1
                max_tokens -= 1
    return [(name, count) for name, count in counts.items() if count > 0]
""",
            "The budget is dealt out in turn, so nobody starves. But what a newer one gets, an older one that misses more goes without: its first token "
            "comes later the more others there are. Here the older one has all that it misses before a newer one has anything.",
            "a misses 6, the budget is 4, and b came later. How many of the 4 are a's?",
            variants=(
                """def plan(running, waiting, max_seqs, max_tokens):
    everyone = running + waiting[: max_seqs - len(running)]
    rows = []
    for i, (name, missing) in enumerate(everyone):
        count = min(missing, -(-max_tokens // (len(everyone) - i)))
        if count > 0:
            rows.append((name, count))
            max_tokens -= count
    return rows
""",
            ),
        ),
    ),
)  # fmt: skip


# ---------------- 19.5: the scheduler


def _scheduler_cases(rng: np.random.Generator) -> list[Case]:
    def case(
        label: str,
        seats: int,
        budget: int,
        events: str | list[str],
        group: str,
        room: tuple[int, int] = (64, 8),
    ) -> Case:
        inputs = {
            "max_seqs": seats,
            "max_tokens": budget,
            "events": events.split(", ") if isinstance(events, str) else events,
            "num_blocks": room[0],
            "block_size": room[1],
            "last_step": 150,
        }
        return Case(label, inputs, group)

    def crowd(count: int, longest: int) -> list[str]:
        events, step = [], 1
        for k in range(count):
            step += int(rng.integers(0, 3))
            event = f"r{k}@{step} {int(rng.integers(1, longest))}+{int(rng.integers(1, 9))}"
            events.append(event + f" end {int(rng.integers(1, 9))}" * (k % 3 == 0))
        return events

    return [
        case("2 seats, 3 requests", 2, 8, "a@1 3+2, b@1 2+4, c@1 2+2", "small"),
        case("two end in the same step", 3, 9, "a@1 2+2, b@1 2+2, c@1 1+4, d@1 2+1", "small"),
        case("a prompt of 9 in steps of 4", 2, 4, "a@1 2+4, b@2 9+2, c@2 2+1", "long prompt"),
        case("5 requests, 3 tokens a step", 5, 3, "a@1 2+3, b@1 1+3, c@1 3+2, d@2 1+2, e@2 4+1", "long prompt"),
        case("end tokens", 2, 8, "a@1 2+5 end 2, b@1 2+3 end 3, c@1 1+4 end 1, d@1 2+2", "end token"),
        case("aborted: one that runs, one that waits, one nobody knows", 2, 8,
             "a@1 2+6, b@1 2+3, c@1 2+2, d@2 1+2, abort a@3, abort d@3, abort x@3", "end token"),
        case("aborted while the step is computed", 2, 6, "a@1 2+4, b@1 3+3, c@2 2+2, abort a@2 meanwhile", "end token"),
        case("aborted while its last step is computed", 2, 6, "a@1 2+2, b@1 3+3, abort a@2 meanwhile", "end token"),
        case("the first in the queue is aborted", 1, 8, "a@1 2+4, b@1 2+2, c@1 2+1, abort b@3", "end token"),
        case("the last token that it may have is an end token", 1, 8, "a@1 2+2 end 2", "end token"),
        case("no room: the first in the queue waits, and so do all behind it", 4, 40,
             "a@1 6+2, b@1 14+2, big@1 22+2, small@1 6+2", "full cache", (4, 8)),
        case("a text that needs a second block", 1, 8, "a@1 6+5", "full cache", (4, 8)),
        case("3 places in the cache, 5 seats", 5, 12, "a@1 3+2, b@1 4+5, c@1 2+1, d@1 3+3, e@2 1+2", "full cache", (3, 16)),
        case("12 requests come one by one", 3, 7, crowd(12, 14), "crowded"),
        case("20 requests, a budget below the seats", 6, 4, crowd(20, 9), "crowded"),
    ]  # fmt: skip


def _run_scheduler(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    """Play the events with a model that is a sum over what lies in the cache.

    An event is `name@step prompt+most`, with `end n` where the n-th token is an end token, or `abort name@step`.
    """
    from tinyvllm_ref.request import Request
    from tinyvllm_ref.sampling_params import SamplingParams

    class Room:
        def __init__(self, num_blocks: int, block_size: int) -> None:
            self.num_blocks, self.block_size = num_blocks, block_size
            self.free_blocks, self.tables = list(range(num_blocks)), dict[str, list[int]]()

        @property
        def num_free(self) -> int:
            return len(self.free_blocks)

        def allocate(self, id: str, num_tokens: int) -> bool:
            table = self.tables.get(id, [])
            missing = -(-num_tokens // self.block_size) - len(table)
            if missing > len(self.free_blocks):
                return False
            self.tables[id] = table + [self.free_blocks.pop(0) for _ in range(missing)]
            return True

        def free(self, id: str) -> None:
            if id not in self.tables:
                raise KeyError(f"{id} has no room in the cache, so none can be freed")
            self.free_blocks += self.tables.pop(id)

        def table(self, id: str) -> list[int]:
            if id not in self.tables:
                raise KeyError(f"{id} has no room in the cache, so it has no table")
            return self.tables[id]

    room = Room(inputs["num_blocks"], inputs["block_size"])
    scheduler = answer(inputs["max_seqs"], inputs["max_tokens"], room)
    requests: dict[str, Any] = {}
    cache: dict[str, list[int]] = {}
    ends: dict[str, int] = {}
    steps, idle = list[str](), 0
    events = [(*event.split("@")[0].split(), "@", *event.split("@")[1].split()) for event in inputs["events"]]
    last = max(int(event[event.index("@") + 1]) for event in events)
    for step in range(1, inputs["last_step"] + 1):
        meanwhile = []
        for event in events:
            if event[event.index("@") + 1] != str(step):
                continue
            if event[0] == "abort":
                if event[-1] == "meanwhile":
                    meanwhile.append(event[1])
                else:
                    scheduler.abort(event[1])
                continue
            name, (prompt, most) = event[0], map(int, event[3].split("+"))
            tokens = [10 + (7 * sum(map(ord, name)) + 3 * i) % 80 for i in range(prompt)]
            requests[name] = Request(name, tokens, SamplingParams(max_tokens=most), (2,))
            cache[name], ends[name] = [], int(event[5]) if len(event) > 4 else 0
            scheduler.add(requests[name])
        batch = scheduler.schedule()
        rows, ids = [], []
        fields = (batch.requests, batch.starts, batch.num_tokens, batch.samples, batch.block_tables)
        for request, start, count, samples, table in zip(*fields):  # noqa: B905
            name = request.request_id
            row = f"{name} {start}:{start + count}" + "*" * bool(samples)
            if start != len(cache[name]):
                row += f" ({len(cache[name])} are in the cache)"
            if len(table) * room.block_size < start + count:
                row += f" (room for {len(table) * room.block_size})"
            if request.finished:
                row += " (has ended)"
            elif request.state != "running":
                row += f" (its state is {request.state})"
            rows.append(row)
            cache[name][start:] = request.token_ids[start : start + count]
            if samples:
                drawn = start + count - request.num_prompt_tokens + 1
                ids.append(10 + sum((i + 1) * token for i, token in enumerate(cache[name])) % 89)
                if drawn == ends[name]:
                    ids[-1] = 2
        decodes = batch.num_decodes
        for name in meanwhile:
            scheduler.abort(name)
        finished = scheduler.update(batch, ids)
        line = (", ".join(rows) or "nothing") + f" | {decodes} decoding" * bool(decodes)
        line += " | an empty step counts as true" * (bool(batch) and not rows)
        steps.append(
            line
            + "".join(
                f" | {one.request_id}: {one.finish_reason}"
                for one in sorted(finished or (), key=lambda one: one.request_id)
            )
        )
        if step >= last and all(request.finished for request in requests.values()):
            break
        idle = 0 if rows or step < last else idle + 1
        if idle == 3:
            steps.append("nothing, for ever")
            break
    return {
        "steps": steps,
        "reasons": {name: request.finish_reason for name, request in requests.items()},
        "texts": {name: request.output_token_ids for name, request in requests.items()},
        "blocks free at the end": room.num_free,
    }  # fmt: skip


def _expect_scheduler(inputs: Any) -> dict[str, Any]:
    """Steps by the reference's scheduler; texts one by one, each request alone, up to where it was aborted."""
    from tinyvllm_ref.scheduler import Scheduler

    expected = _run_scheduler(Scheduler, inputs, None)
    for event in inputs["events"]:
        name = event.split("@")[0]
        if name in expected["texts"]:
            alone = {**inputs, "events": [f"{name}@1 {event.split(maxsplit=1)[1]}"], "max_tokens": 1000}
            text = _run_scheduler(Scheduler, alone, None)["texts"][name]
            ended = expected["reasons"][name] != "abort"
            expected["texts"][name] = text if ended else text[: len(expected["texts"][name])]
    return expected


_SCHEDULER_TEXT = """from dataclasses import dataclass


@dataclass
class Batch:
    requests: list
    starts: list
    num_tokens: list
    samples: list
    block_tables: list
    num_decodes: int
    preempted: list

    def __bool__(self):
        return bool(self.requests)


class Scheduler:
    def __init__(self, max_seqs, max_tokens, blocks):
        self.max_seqs, self.max_tokens, self.blocks = max_seqs, max_tokens, blocks
        self.waiting, self.running = [], []

    def add(self, request):
        self.waiting.append(request)

    def schedule(self):
        rows, budget = [], self.max_tokens
        for request in self.running:
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            if count > 0:
                rows.append((request, count))
                budget -= count
        while self.waiting and budget > 0 and len(self.running) < self.max_seqs:
            request = self.waiting[0]
            if not self.blocks.allocate(request.request_id, request.max_num_tokens):
                break
            self.running.append(self.waiting.pop(0))
            request.state = "running"
            count = min(request.num_tokens, budget)
            rows.append((request, count))
            budget -= count
        return self.batch(rows)

    def batch(self, rows):
        requests = [request for request, _ in rows]
        counts = [count for _, count in rows]
        starts = [request.num_computed_tokens for request in requests]
        samples = [r.num_computed_tokens + count == r.num_tokens for r, count in rows]
        tables = [self.blocks.table(request.request_id) for request in requests]
        decodes = sum(start >= r.num_prompt_tokens for r, start in zip(requests, starts))
        return Batch(requests, starts, counts, samples, tables, decodes, [])

    def update(self, batch, ids):
        finished, ids = [], iter(ids)
        for request, count, samples in zip(batch.requests, batch.num_tokens, batch.samples):
            token = next(ids) if samples else None
            if request.finished:
                continue
            request.num_computed_tokens += count
            if token is not None:
                request.append(token)
                if token in request.stop_tokens:
                    self.end(request, "stop")
                elif request.num_tokens >= request.max_num_tokens:
                    self.end(request, "length")
                if request.finished:
                    finished.append(request)
        return finished

    def end(self, request, reason):
        if request.state == "running":
            self.running.remove(request)
            self.blocks.free(request.request_id)
        else:
            self.waiting.remove(request)
        request.state, request.finish_reason = "finished", reason

    def abort(self, id):
        for request in self.running + self.waiting:
            if request.request_id == id:
                self.end(request, "abort")
"""


def _scheduler(*changes: tuple[str, str]) -> str:
    return _changed(_SCHEDULER_TEXT, *changes)


_RUNNING_LOOP = """        for request in self.running:
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            if count > 0:
                rows.append((request, count))
                budget -= count
"""
_WAITING_LOOP = """        while self.waiting and budget > 0 and len(self.running) < self.max_seqs:
            request = self.waiting[0]
            if not self.blocks.allocate(request.request_id, request.max_num_tokens):
                break
            self.running.append(self.waiting.pop(0))
            request.state = "running"
            count = min(request.num_tokens, budget)
            rows.append((request, count))
            budget -= count
"""
_REFUSED = "            if not self.blocks.allocate(request.request_id, request.max_num_tokens):\n                break\n"
_STOPS = """                if token in request.stop_tokens:
                    self.end(request, "stop")
                elif request.num_tokens >= request.max_num_tokens:
"""
_IN_A_FOR = _changed(
    _WAITING_LOOP,
    (
        "        while self.waiting and budget > 0 and len(self.running) < self.max_seqs:\n            request = self.waiting[0]\n",
        "        for request in self.waiting:\n            if budget == 0 or len(self.running) == self.max_seqs:\n                break\n",
    ),
)
_SCHEDULE_LATE = (
    """    def schedule(self):
        rows, budget = [], self.max_tokens
        for request in self.running:
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            if count > 0 and request.finish_reason is None:
                rows.append((request, count))
                budget -= count
"""
    + _WAITING_LOOP
    + """        for request in list(self.running):
            if request.finish_reason is not None:
                self.running.remove(request)
                self.blocks.free(request.request_id)
        return self.batch(rows)
"""
)

_SCHEDULER = Exercise(
    id="19.5",
    title="the scheduler: a part",
    answer="Scheduler",
    kind="class",
    cases=_scheduler_cases,
    run=_run_scheduler,
    expected=_expect_scheduler,
    points={"small": 1, "long prompt": 1, "end token": 1, "full cache": 1, "crowded": 1},
    makes={"Scheduler": "Scheduler"},
    file="scheduler.py",
    hints=Hints(
        question="Take {case}, and the first step that differs. Who runs before this step, who waits, how many tokens does each of them miss, and how "
        "many seats are free?",
        rule="schedule: the running requests first, from the oldest, each with min(what it misses, what is left of the budget); then the queue, "
        "from its front, while there are budget, seats and room. A request misses num_tokens - num_computed_tokens. It draws if the step "
        "reaches its last token. update: count what was computed; append what was drawn; where that is a stop token or the request is as long "
        "as it may be, take it out of running, give its room back, and name it. An aborted one may still be in the batch: skip it, but "
        "not its id.\n\n"
        "By hand, 2 seats, a 3+2, b 2+4, c 2+2: step 1 computes a 0:3 and b 0:2, and both draw; step 2 a 3:4 and b 2:3, and a has its 2 "
        "tokens and ends; step 3 computes b 3:4 and c 0:2.",
        code="""for request in self.running:
    count = min(____ - request.num_computed_tokens, budget)
    ...
while self.waiting and budget > ____ and len(self.running) < ____:
    request = self.waiting[0]
    if not self.blocks.allocate(request.request_id, ____):
        ____
    self.running.append(self.waiting.pop(____))
    request.state = ____
    ...
samples = [r.num_computed_tokens + count == ____ for r, count in rows]

# update, for each request, count, samples of the batch:
token = next(ids) if samples else None
if request.finished:  # aborted meanwhile
    continue
request.num_computed_tokens += ____
if token is not None:
    request.append(token)
    if token in ____: self.end(request, "stop")
    elif request.num_tokens >= ____: self.end(request, "length")
    if request.finished: finished.append(request)""",
    ),
    mistakes=(
        Mistake(
            "freed a step late",
            _scheduler(
                (_SCHEDULER_TEXT[_SCHEDULER_TEXT.index("    def schedule") : _SCHEDULER_TEXT.index("    def batch")], _SCHEDULE_LATE + "\n"),
                ('self.end(request, "stop")', 'request.finish_reason = "stop"'),
                ('self.end(request, "length")', 'request.finish_reason = "length"'),
                ("                if request.finished:\n", "                if request.finish_reason:\n                    request.state = 'finished'\n"),
            ),
            "Whoever ends in step t keeps seat and room until the *next* schedule is done, so the seat is empty in step t + 1. Give both back in "
            "update: then the next schedule can use them.",
            "a ends in step 2. Is its seat free when step 3 is planned?",
        ),
        Mistake(
            "deleting while iterating",
            _scheduler(
                ('self.end(request, "stop")', 'request.finish_reason = "stop"'),
                ('self.end(request, "length")', 'request.finish_reason = "length"'),
                ("                if request.finished:\n                    finished.append(request)\n", ""),
                ("        return finished\n", "        for request in self.running:\n            if request.finish_reason is not None:\n                self.end(request, request.finish_reason)\n                finished.append(request)\n        return finished\n"),
            ),
            "A loop goes through a list, `self.running` or `self.waiting`, while its body takes requests out of it. Everything behind the gap moves up, "
            "and the loop steps over the next one: where two neighbours end in the same step, the second goes on writing; where two could come in, "
            "the second is passed over. Build a new list, or walk over a copy.",
            "The list is a, b, c, and the body takes a out of it. At which of them does the loop look next?",
            variants=(
                _scheduler((_WAITING_LOOP, _IN_A_FOR)),
                _scheduler((_WAITING_LOOP, _IN_A_FOR.replace("self.running.append(self.waiting.pop(0))", "self.running.append(request)\n            self.waiting.remove(request)"))),
            ),
        ),
        Mistake(
            "budget counts requests",
            _scheduler(("budget -= count", "budget -= 1")),
            "A step's time depends on its tokens, so the budget is in tokens: a prompt of 300 takes 300 from it, not 1.",
            "A step of 8 tokens, and two prompts of 6. How much of the second fits?",
        ),
        Mistake(
            "order lost",
            _scheduler(("request = self.waiting[0]", "request = self.waiting[-1]"), ("self.waiting.pop(0)", "self.waiting.pop()")),
            "The newest of the queue is let in first. While new requests keep coming, the oldest never is.",
            "Three requests came in the order a, b, c, and there are two seats. Who should sit?",
        ),
        Mistake(
            "the newest in front",
            _scheduler(("self.running.append(self.waiting.pop(0))", "self.running.insert(0, self.waiting.pop(0))")),
            "Whoever is let in is put at the front of `running`, and so comes before the older ones in every step from then on. `running` goes from the "
            "oldest to the newest.",
            "a came before b, and both run. Who stands first in `running`?",
        ),
        Mistake(
            "a row of nothing",
            _scheduler(("while self.waiting and budget > 0 and len", "while self.waiting and len")),
            "Somebody is let in when the budget is used up, and is in the step with 0 tokens. The model has no row for it: it waits for the next step.",
            "3 tokens a step, and the first two have got them. Who else is in this step?",
        ),
        Mistake(
            "nothing is taken from the budget",
            _scheduler(("            rows.append((request, count))\n            budget -= count\n        return", "            rows.append((request, count))\n        return")),
            "Whoever is let in gets tokens, and these are no longer there for the next one. The budget is that of the whole step.",
            "How many tokens has your step in all, and how many may it have?",
        ),
        Mistake(
            "prefill blocks decode for ever",
            _scheduler((_RUNNING_LOOP + _WAITING_LOOP, "        before = list(self.running)\n" + _WAITING_LOOP + _RUNNING_LOOP.replace("self.running", "before"))),
            "New prompts are planned before the running requests have got their tokens. As long as prompts keep coming, nobody who "
            "writes gets on. Running requests first; what they leave is for new ones.",
            "The budget is 4, and a prompt of 9 comes while a writes. Does a get a token in each step?",
        ),
        Mistake(
            "a piece of a prompt draws",
            _scheduler(("samples = [r.num_computed_tokens + count == r.num_tokens for r, count in rows]", "samples = [True for r, count in rows]")),
            "In the middle of a prompt the model's answer is a guess at a token that the prompt has already. Only the logits of the *last* token "
            "say what comes next: a request draws where the step reaches it.",
            "b has a prompt of 9, and this step computes its first 4. Which token would be drawn, and is it wanted?",
        ),
        Mistake(
            "only a single token draws",
            _scheduler(("samples = [r.num_computed_tokens + count == r.num_tokens for r, count in rows]", "samples = [count == 1 for r, count in rows]")),
            "How many tokens a step computes does not say whether a request draws. A prompt that is done in this step draws too, and a single token in the middle of "
            "a prompt does not: what counts is whether the request's *last* token is among them.",
            "a's whole prompt of 3 is computed in this step. Does it miss any token afterwards?",
        ),
        Mistake(
            "nothing was drawn, and it is appended",
            _scheduler(("            if token is not None:\n", "            if True:\n")),
            "A piece from the middle of a prompt draws nothing, and so there is no token to append. Only where `samples` says so does a request get longer.",
            "In which steps does b get a token, and in which does your b grow?",
        ),
        Mistake(
            "one token counted as computed",
            _scheduler(("request.num_computed_tokens += count", "request.num_computed_tokens += 1")),
            "A step has computed `count` tokens of the request. Counted as one, all but the first of a prompt are computed again, and "
            "again, in every step that follows.",
            "a's prompt of 3 has been computed. What is its num_computed_tokens, and what should the next step begin with?",
        ),
        Mistake(
            "the drawn token counted as computed",
            _scheduler(("                request.append(token)\n", "                request.append(token)\n                request.num_computed_tokens += 1\n")),
            "A token that has just been drawn is not in the cache: its keys and values come when it goes through the model, in the next "
            "step. Counted as computed, the request misses nothing, and stands still.",
            "After a draw, how many tokens does a request have, and how many of them lie in the cache?",
        ),
        Mistake(
            "an end token is not looked at",
            _scheduler((_STOPS, "                if request.num_tokens >= request.max_num_tokens:\n")),
            "The model says by an end token that its text is done (the request has them in stop_tokens). Whoever does not look, writes on behind the end, "
            "until the text is as long as it may be.",
            "Which token did the model draw just before the text went wrong?",
        ),
        Mistake(
            "the end token is left out",
            _scheduler(("                request.append(token)\n" + _STOPS, "                if token not in request.stop_tokens:\n                    request.append(token)\n" + _STOPS)),
            "An end token is drawn like any other, and is the last of the request's tokens: append it, and then the request ends.",
            "a draws its end token as the second. How many tokens has its text?",
        ),
        Mistake(
            "the length goes first",
            _scheduler((_STOPS, """                if request.num_tokens >= request.max_num_tokens:
                    self.end(request, "length")
                elif token in request.stop_tokens:
"""), ("""                    self.end(request, "length")
                if request.finished:""", """                    self.end(request, "stop")
                if request.finished:""")),
            "The last token that a request may have can be an end token. Then the text is complete, and not cut off: the reason is \"stop\". Look at the end "
            "tokens first.",
            "The last token that b may have is an end token. Is its text cut off?",
        ),
        Mistake(
            "the length is not looked at",
            _scheduler(("elif request.num_tokens >= request.max_num_tokens:", "elif False:")),
            "A model need not ever draw an end token. A request ends too when it is as long as it may be, max_num_tokens, prompt included.",
            "a may draw 2 tokens. How many has it drawn?",
        ),
        Mistake(
            "one token too many",
            _scheduler(("request.num_tokens >= request.max_num_tokens", "request.num_tokens > request.max_num_tokens")),
            "With max_num_tokens tokens the request is as long as it may be.",
            "A prompt of 3 that may draw 2 tokens: at which length does it end?",
        ),
        Mistake(
            "the room is not given back",
            _scheduler(("            self.blocks.free(request.request_id)\n", "")),
            "The request is gone, and its place in the cache still belongs to it: after a while nobody is let in any more.",
            "After a has ended, who owns its blocks?",
        ),
        Mistake(
            "room for one that does not come in",
            _scheduler((_REFUSED, ""), ("            request = self.waiting[0]\n", "            request = self.waiting[0]\n            fits = self.blocks.allocate(request.request_id, request.max_num_tokens)\n            if not fits or budget == 0 or len(self.running) == self.max_seqs:\n                break\n"), ("while self.waiting and budget > 0 and len(self.running) < self.max_seqs:", "while self.waiting:")),
            "Room is reserved before it is clear that the request comes in. While it waits for a seat, it holds room that it does not use; and if it is aborted in "
            "the queue, nobody gives that back. Ask for seat and budget first, and for room last.",
            "b was aborted while it waited. Had anything been allocated for it?",
        ),
        Mistake(
            "its state is not set",
            _scheduler(('            request.state = "running"\n', ""), ('if request.state == "running":', "if request in self.running:")),
            "The request has moved to `running`, and its state still says that it waits. The engine and `end` look at the state.",
            "a has been let in. Which state does it have?",
        ),
        Mistake(
            "its end is not noted",
            _scheduler(('request.state, request.finish_reason = "finished", reason', "request.finish_reason = reason"), ("                if request.finished:\n", "                if request.finish_reason:\n")),
            "The request is out of its list, but its state is not \"finished\": whoever asks for it is told that it goes on.",
            "After a has ended, what does a.finished say?",
        ),
        Mistake(
            "seats are not counted",
            _scheduler((" and len(self.running) < self.max_seqs", "")),
            "max_seqs limits how many requests run at once, however many tokens are left of the budget.",
            "How many requests run in your first step, and how many may?",
        ),
        Mistake(
            "whoever fits overtakes",
            _scheduler((_WAITING_LOOP, _WAITING_LOOP.replace("        while self.waiting and budget > 0 and len(self.running) < self.max_seqs:\n            request = self.waiting[0]\n", "        for request in list(self.waiting):\n            if budget == 0 or len(self.running) == self.max_seqs:\n                break\n").replace("break\n            self.running.append(self.waiting.pop(0))", "continue\n            self.waiting.remove(request)\n            self.running.append(request)"))),
            "There is no room for the first in the queue, and a smaller one behind it is let in. It takes room that the first one was "
            "waiting for; with enough small ones it waits for ever. If the first cannot come in, nobody does.",
            "big has waited longest. When small takes two blocks, is big nearer to its turn?",
            variants=(_scheduler((_REFUSED, _REFUSED.replace("                break\n", "                self.waiting.append(self.waiting.pop(0))\n                break\n"))),),
        ),
        Mistake(
            "a no is not heard",
            _scheduler((_REFUSED, "            self.blocks.allocate(request.request_id, request.max_num_tokens)\n")),
            "allocate answers False where there is no room, and the request is let in all the same: it has nowhere to keep its keys and values. "
            "Look at the answer: after a no, nobody else is let in.",
            "What does allocate say when the cache is full, and who reads it?",
        ),
        Mistake(
            "room for the prompt alone",
            _scheduler(("request.max_num_tokens):\n                break", "request.num_tokens):\n                break")),
            "allocate is called once, when the request comes in, and with the length of its prompt; the tokens that it draws have no place in the "
            "cache. Reserve for the longest that it may become: max_num_tokens.",
            "A prompt of 6 in blocks of 8. Where do the keys of its fourth drawn token go?",
        ),
        Mistake(
            "an aborted request gets its token",
            _scheduler(("            if request.finished:\n                continue\n", "")),
            "It was aborted while its step was computed: its seat and its room have been given back, and it must not change any more. "
            "Its drawn token is dropped.",
            "Between schedule and update a was aborted. What is its state in update?",
            variants=(
                # Nothing is asked at all, and it is named only where its token ends it.
                _scheduler(
                    ("            if request.finished:\n                continue\n", ""),
                    ('self.end(request, "stop")\n', 'self.end(request, "stop")\n                    finished.append(request)\n'),
                    ('self.end(request, "length")\n', 'self.end(request, "length")\n                    finished.append(request)\n'),
                    ("                if request.finished:\n                    finished.append(request)\n", ""),
                ),
                # It is not named, and does not grow; but it comes back among the finished.
                _scheduler(("            if request.finished:\n                continue\n", "            if request.finished:\n                finished.append(request)\n                continue\n")),
            ),
        ),
        Mistake(
            "one that waits cannot be aborted",
            _scheduler(("self.running + self.waiting", "self.running")),
            "A client may go while its request is still in the queue. Look in both lists.",
            "d was aborted while it waited. What has it to do in the last steps?",
        ),
        Mistake(
            "aborted, and still in its list",
            _scheduler(('                self.end(request, "abort")\n', '                request.state, request.finish_reason = "finished", "abort"\n')),
            "It is marked, and that is all: it keeps its place in the list, and the next step computes it again. `end` does all that there is to do.",
            "a was aborted before step 3. Who computes tokens in step 3?",
        ),
        Mistake(
            "an aborted request's id is left over",
            _scheduler(("            token = next(ids) if samples else None\n            if request.finished:\n                continue\n", "            if request.finished:\n                continue\n            token = next(ids) if samples else None\n")),
            "`ids` has a token for every request that samples, the aborted one too. If it is skipped before its id is taken, the next request gets "
            "that id: someone else's token.",
            "Whose token does b get, when a stands before it in the batch and was aborted?",
        ),
        Mistake(
            "room taken from one that never had any",
            _scheduler(("""        if request.state == "running":
            self.running.remove(request)
            self.blocks.free(request.request_id)
        else:
            self.waiting.remove(request)
""", """        (self.running if request in self.running else self.waiting).remove(request)
        self.blocks.free(request.request_id)
""")),
            "A request that still waits has no room in the cache, and freeing it is an error of which the block manager complains. Only one that runs has "
            "something to give back.",
            "d was aborted while it waited. What had been allocated for it?",
        ),
    ),
)  # fmt: skip


# ---------------- what is drawn and measured


def _model_of_stories() -> tuple[list[list[int]], Any]:
    """The prompts of lesson 18's run, and `next_tokens`, which draws the tokens that the model really wrote."""
    texts = {prompt: completion for prompt, completion in stories()}
    prompts = list(texts)

    def next_tokens(sequences: Any) -> list[int]:
        drawn = []
        for tokens in map(tuple, sequences):
            prompt = next(one for one in prompts if tokens[: len(one)] == one)
            drawn.append(texts[prompt][len(tokens) - len(prompt)])
        return drawn

    return [list(prompt) for prompt in prompts], next_tokens


def _timeline(answer: Any, cp: Any) -> Any:
    """The learner's continuous batches, under lesson 18's static ones: the learner's own, or made by length."""
    prompts, next_tokens = _model_of_stories()
    _, slots = answer(prompts, next_tokens, SLOTS, [2046, 2047], MOST)
    continuous = [[None if r is None else f"request {r}" for r in row] for row in slots]
    panels = {
        "static batches (lesson 18)": _static_slots(),
        "continuous: your serve": continuous,
    }
    return figures.timeline(panels, title=f"{len(prompts)} requests in {SLOTS} slots")


def _static_slots() -> list[list[str | None]]:
    """The slots of static batches: by the learner's `serve` of lesson 18 where it has passed, else by lengths."""
    passed = my_engine.answer("18.4")
    if passed is not None:
        prompts, next_tokens = _model_of_stories()
        namespace: dict[str, Any] = {"np": np}
        exec(passed, namespace)
        _, slots = namespace["serve"](prompts, next_tokens, SLOTS, [2046, 2047], MOST)
        return [[None if r is None else f"request {r}" for r in row] for row in slots]
    rows: list[list[str | None]] = [[] for _ in range(SLOTS)]
    lengths = [len(completion) for _, completion in stories()]
    for first in range(0, len(lengths), SLOTS):
        batch = lengths[first : first + SLOTS]
        for slot, row in enumerate(rows):
            busy = batch[slot] if slot < len(batch) else 0
            row += [f"request {first + slot}"] * busy + [None] * (max(batch) - busy)
    return rows


_HUNGRY: dict[str, Any] = {
    "max_seqs": 3, "max_tokens": 6, "last_step": 15,
    "arrivals": ["long@1 17+6", "a@1 2+3", *(f"{name}@{step} {2 + step % 3}+2" for step, name in enumerate("bcdefghijkmnop", 2))],
}  # fmt: skip


def _plans_picture(answer: Any, cp: Any) -> Any:
    """The tokens of each step, by the plan that starves and by the learner's."""
    namespace: dict[str, Any] = {}
    exec(_plan(body=_FAULTY_PLAN), namespace)
    plans = {"as it was: long does not get in": namespace["plan"], "your plan": answer}
    panels = {}
    for name, plan in plans.items():
        steps = _run_plan(plan, _HUNGRY, None)["steps"]
        rows = [[row.rsplit(" ", 1) for row in step.split(", ")] if step else [] for step in steps]
        panels[name] = [[(who, int(count)) for who, count in step] for step in rows]
    return step_tokens(
        panels, title="Who computes how many tokens", budgets=dict.fromkeys(panels, _HUNGRY["max_tokens"]),
        subtitle="One request with a long prompt, and a short one that comes in every step.",
    )  # fmt: skip


def _budget_picture(answer: Any, cp: Any) -> Any:
    """The learner's scheduler with a large and with a small budget, while a long prompt comes among three stories."""
    from tinyvllm_ref.block_manager import BlockManager
    from tinyvllm_ref.request import Request
    from tinyvllm_ref.sampling_params import SamplingParams

    panels, budgets = {}, {}
    for budget in (256, 32):
        scheduler = answer(4, budget, BlockManager(64, 16))
        requests = {
            0: [("a", 5, 14), ("b", 14, 12), ("c", 13, 13)],
            2: [("long", 200, 3)],
        }
        steps: list[list[tuple[str, int]]] = []
        while len(steps) < 60:
            for name, prompt, most in requests.get(len(steps), ()):
                scheduler.add(Request(name, [7] * prompt, SamplingParams(max_tokens=most)))
            batch = scheduler.schedule()
            if not batch:
                break
            steps.append(
                [(one.request_id, n) for one, n in zip(batch.requests, batch.num_tokens, strict=True)]
            )
            scheduler.update(batch, [7] * sum(batch.samples))
        name = f"a budget of {budget} tokens"
        panels[name], budgets[name] = steps, budget
    return step_tokens(
        panels, title="A prompt of 200 tokens comes while three others write", budgets=budgets,
        subtitle="By your Scheduler. How long a step takes grows with its tokens, and everyone in it waits for its end.",
    )  # fmt: skip


def _make_compact(slots: int, width: int) -> Any:
    def make(answer: Any, cp: Any) -> Any:
        left = np.arange(slots) % 4  # every fourth has finished
        state, out = cp.zeros((slots, width), np.int32), cp.zeros((slots, width), np.int32)
        arguments = (state, cp.asarray(left.astype(np.int32)), out, np.int32(width))
        return lambda: answer((slots,), (64,), arguments)

    return make


_WORK = Work(
    label="1,024 slots of 8,192 numbers, a quarter finished",
    make=_make_compact(1024, 8192),
    read_bytes=768 * 8192 * 4 + 4 * 1024,
    write_bytes=768 * 8192 * 4,
    small=_make_compact(32, 512),
    small_read_bytes=24 * 512 * 4 + 4 * 32,
    small_write_bytes=24 * 512 * 4,
    small_label="32 slots of 512 numbers, a quarter finished",
    note="Each block reads `left` up to its own slot, once for each of its two warps: that is what is read on top.",
)

LESSON = Lesson(
    number="19",
    slug="continuous_batching",
    title="Continuous batching",
    part=4,
    minutes=65,
    exercises=(_SERVE, _PREDICTION, _COMPACT, _PLAN, _SCHEDULER),
    engine=EngineCard(
        mistakes=(
            ("19.5", "a piece of a prompt draws"),
            ("19.5", "an end token is not looked at"),
            ("19.5", "the drawn token counted as computed"),
        ),
        prompt="Waffle could not sleep. She turned to the left, and she turned to the right. It did not help. Uncle Mole came in with a cup of",
        max_tokens=64,
        beside=("Then they both went home, tired and happy. And", "The end."),
        options={"max_num_seqs": 2, "max_num_batched_tokens": 8},
        note="Three requests share two seats and steps of at most 8 tokens: the story of the third is shown. It waits until a seat is free, and its "
        "prompt is computed in pieces, behind the tokens of whoever is writing.",
    ),
    pictures={"19.1": _timeline, "19.4": _plans_picture, "19.5": _budget_picture},
    works={"19.3": _WORK},
)
