"""Lesson 16: what is alive when, an arena packed once, and poison that finds what reads too late."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyvllm_ref.buffers import Buffers, plan_buffers
from tinyvllm_ref.config import ModelConfig
from tinyvllm_ref.course import figures
from tinyvllm_ref.course.exercise import (
    Case,
    EngineCard,
    Exercise,
    Hints,
    Lesson,
    Mistake,
    Prediction,
    Quantity,
    with_changes,
)
from tinyvllm_ref.device import cp

LAYER: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("add, norm", ("x", "residual"), ("residual", "normed")),
    ("product qkv", ("normed",), ("qkv",)),
    ("split", ("qkv",), ("q", "k", "v")),
    ("rope, attention", ("q", "k", "v"), ("q", "k", "attended")),
    ("product o", ("attended",), ("x",)),
    ("add, norm", ("x", "residual"), ("residual", "ffn_normed")),
    ("product gate_up", ("ffn_normed",), ("gate_up",)),
    ("silu_mul", ("gate_up",), ("activated",)),
    ("product down", ("activated",), ("x",)),
)
"""The operations of a layer, counted from 1: name, what is read, what is written."""

LIFETIMES = {
    "residual": (0, 10), "x": (0, 10), "normed": (1, 2), "qkv": (2, 3), "q": (3, 4), "k": (3, 4), "v": (3, 4),
    "attended": (4, 5), "ffn_normed": (6, 7), "gate_up": (7, 8), "activated": (8, 9),
}  # fmt: skip
"""First and last operation of each buffer, where a layer follows a layer."""


def config() -> ModelConfig:
    """Of tiny-stories."""
    from tinyvllm_ref.checkpoint.names import resolve

    return ModelConfig.from_json(resolve("tiny-stories"))


def row_bytes(config: ModelConfig) -> dict[str, int]:
    """Bytes that each buffer of a layer needs for a token."""
    hidden, ffn, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    return {
        "residual": 4 * hidden, "x": 4 * hidden, "normed": 2 * hidden, "qkv": 4 * (q + 2 * kv), "q": 4 * q,
        "k": 4 * kv, "v": 4 * kv, "attended": 2 * q, "ffn_normed": 2 * hidden, "gate_up": 8 * ffn,
        "activated": 2 * ffn,
    }  # fmt: skip


def _changed(text: str, *changes: tuple[str, str]) -> str:
    return with_changes(text, changes)


def _rounded(size: int) -> int:
    return -(-size // 256) * 256


def _least(buffers: list[list[int]]) -> int:
    """The most bytes that are alive in one step: no plan can take fewer."""
    steps = range(max(last for _, _, last in buffers) + 1)
    return max(sum(_rounded(s) for s, first, last in buffers if first <= step <= last) for step in steps)


# ---------------- 16.1: lifetimes from a program


def _program_cases(rng: np.random.Generator) -> list[Case]:
    def drawn(steps: int, names: int) -> list[list[Any]]:
        every = [f"b{k}" for k in range(names)]
        program = []
        for step in range(steps):
            known = every[: max(1, min(names, step + 1))]
            reads = sorted(
                rng.choice(known, min(len(known), int(rng.integers(0, 3))), replace=False).tolist()
            )
            writes = [every[step % names]] + ([str(rng.choice(known))] if rng.random() < 0.3 else [])
            program.append([f"step {step}", reads, sorted(set(writes))])
        return program

    two = [["load", [], ["a"]], ["double", ["a"], ["b"]], ["add", ["a", "b"], ["c"]], ["store", ["c"], []]]
    again = [
        ["w", [], ["a"]],
        ["r", ["a"], ["b"]],
        ["nothing", [], []],
        ["r", ["b"], ["c"]],
        ["w", ["c"], ["a"]],
    ]
    layer = [[name, list(reads), list(writes)] for name, reads, writes in LAYER]
    return [
        Case("4 operations: a, b = 2a, c = a + b, store c", {"program": two}, "small"),
        Case("a buffer that is written again at the end", {"program": again}, "small"),
        Case("one operation that writes and reads nothing else", {"program": [["w", [], ["a"]]]}, "awkward"),
        Case("a layer's 9 operations", {"program": layer}, "awkward"),
        Case("23 operations on 7 buffers", {"program": drawn(23, 7)}, "awkward"),
        Case("60 operations on 31 buffers", {"program": drawn(60, 31)}, "awkward"),
    ]  # fmt: skip


def _run_program(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    found = answer([(name, tuple(reads), tuple(writes)) for name, reads, writes in inputs["program"]])
    return {"lifetimes": {name: [int(step) for step in pair] for name, pair in dict(found).items()}}


def _expect_program(inputs: Any) -> dict[str, Any]:
    touched: dict[str, list[int]] = {}
    for step, (_, reads, writes) in enumerate(inputs["program"], 1):
        for name in {*reads, *writes}:
            touched.setdefault(name, []).append(step)
    return {"lifetimes": {name: [min(steps), max(steps)] for name, steps in touched.items()}}


_LIFE_BODY = """    first, last = {}, {}
    for step, (name, reads, writes) in enumerate(program, 1):
        for buffer in (*reads, *writes):
            first.setdefault(buffer, step)
            last[buffer] = step
    return {buffer: (first[buffer], last[buffer]) for buffer in first}"""


def _life(*changes: tuple[str, str]) -> str:
    return f"def lifetimes(program):\n{_changed(_LIFE_BODY, *changes)}\n"


_LIFE = Exercise(
    id="16.1",
    title="when is a buffer alive?",
    answer="lifetimes",
    kind="function",
    arguments=("program",),
    cases=_program_cases,
    run=_run_program,
    expected=_expect_program,
    points={"small": 1, "awkward": 1},
    hints=Hints(
        question="Take {case}. Go through the operations and note, for each buffer, every step that touches it. Which is the "
        "first, which the last?",
        rule="A buffer is alive from the first step that reads or writes it to the last step that reads or writes it, both "
        "included. Steps count from 1.\n\nBy hand: a is written in step 1 and read in 2 and 3, so it is (1, 3); b is (2, 3); "
        "c is written in 3 and read in 4: (3, 4).",
        code="""first, last = {}, {}
for step, (name, reads, writes) in enumerate(program, 1):
    for buffer in ____:
        first.setdefault(buffer, ____)
        last[buffer] = ____
return {buffer: (____, ____) for buffer in first}""",
    ),
    mistakes=(
        Mistake(
            "a later reader missed",
            _life(("            last[buffer] = step", "            if step > first[buffer]:\n                last.setdefault(buffer, step)"),
                  ("last[buffer])", "last.get(buffer, first[buffer]))")),
            "A buffer may be read several times. It lives until the *last* step that touches it, not until the first reader "
            "has had it.",
            "Which steps read a? Which of them is the last?",
        ),
        Mistake(
            "only writing counts",
            _life(("(*reads, *writes)", "writes")),
            "What was written must stay until it has been read. A lifetime ends with the last reader.",
            "a is written in step 1. Who needs it after that?",
        ),
        Mistake(
            "only reading counts",
            _life(("(*reads, *writes)", "reads")),
            "A buffer is occupied from the step that writes it on: its memory can not belong to another one in that step.",
            "In which step do the numbers get into b?",
        ),
        Mistake(
            "only a write begins a life",
            _life(("        for buffer in (*reads, *writes):\n            first.setdefault(buffer, step)\n",
                   "        for buffer in writes:\n            first.setdefault(buffer, step)\n"
                   "        for buffer in (*reads, *writes):\n"),
                  ("first[buffer], last[buffer]) for buffer in first",
                   "first.get(buffer, last[buffer]), last[buffer]) for buffer in last")),
            "What is read in a step was written before it, perhaps by the layer in front of this one. The first step that "
            "touches a buffer counts, whether it reads or writes.",
            "Which step is the first to touch x, and does it write it?",
            variants=(
                _life(("        for buffer in (*reads, *writes):\n            first.setdefault(buffer, step)\n",
                       "        for buffer in writes:\n            first.setdefault(buffer, step)\n"
                       "        for buffer in (*reads, *writes):\n")),
            ),
        ),
        Mistake(
            "steps counted from 0",
            _life(("enumerate(program, 1)", "enumerate(program)")),
            "The first operation is step 1: step 0 is kept for what happens before the layer.",
            "Which number has the first operation?",
        ),
        Mistake(
            "free in the step that reads it",
            _life(("(first[buffer], last[buffer])", "(first[buffer], max(first[buffer], last[buffer] - 1))")),
            "In its last step the buffer is still read, while that step writes its own results. If they shared memory, an "
            "operation would overwrite its input. The last step belongs to the lifetime.",
            "In step 3, c is written. Are a and b still needed while that happens?",
        ),
    ),
)  # fmt: skip


# ---------------- 16.2: bytes, predicted


_TOKENS = 256


def _arena_bytes(plan: Any) -> float:
    """Bytes a token of the arena that the engine allocates under a plan."""
    made: list[int] = []
    pool = cp.get_default_memory_pool()

    def allocate(size: int) -> Any:
        made.append(size)
        return pool.malloc(size)

    with cp.cuda.using_allocator(allocate):
        Buffers(plan).step(config(), _TOKENS)
    return float(made[0]) / _TOKENS  # the arena comes first, the logits after it


def apart(buffers: Any) -> tuple[list[int], int]:
    """The plan that shares nothing: one buffer behind the other."""
    ends = np.cumsum([0, *(_rounded(size) for size, _, _ in buffers)]).tolist()
    return ends[:-1], ends[-1]


_PREDICTION = Prediction(
    id="16.2",
    title="how many bytes a token?",
    quantities={
        "apart": Quantity("each in memory of its own", lambda: _arena_bytes(apart), "bytes a token"),
        "packed": Quantity("the fewest that will do", lambda: _arena_bytes(plan_buffers), "bytes a token"),
    },
    explains="Apart is the sum of the column. Fewer bytes than are alive at the same time can not be enough; that is most in "
    "operation 8, where silu_mul has gate_up, activated, and the two that live all the time: 4,096 + 1,024 + 768 + 768. "
    "Everything else finds room where something has died. The measured numbers are those of the arena that the engine "
    "allocates.",
    hints=Hints(
        question="In which operation is the largest sum of bytes alive? It has the largest buffer in it.",
        rule="For each operation add up the bytes of the buffers that are alive in it: first <= operation <= last. The most of "
        "these sums is a bound, and here it can be reached.",
        code="apart = 768 + 768 + ____\npacked = 768 + 768 + ____ + ____",
    ),
)


# ---------------- 16.3: the plan


def _plan_cases(rng: np.random.Generator) -> list[Case]:
    def case(label: str, buffers: list[list[int]], group: str, slack: float = 1.0) -> Case:
        budget = _rounded(int(slack * _least(buffers)))
        return Case(label, {"buffers": buffers, "budget": budget}, group)

    def drawn(count: int, steps: int) -> list[list[int]]:
        firsts = rng.integers(0, steps, count)
        return [
            [int(rng.integers(1, 20_000)), int(first), int(first + rng.integers(0, 6))] for first in firsts
        ]

    sizes = row_bytes(config())
    layer = [[37 * size, *LIFETIMES[name]] for name, size in sizes.items()]
    chain = [[1000, step, step + 1] for step in range(12)]
    nested = [[300, 0, 9], [5000, 1, 2], [700, 2, 8], [4000, 3, 4], [900, 4, 7], [3000, 5, 6]]
    return [
        case("3 buffers: 1000 bytes (1, 2), 500 (2, 3), 1000 (3, 4)", [[1000, 1, 2], [500, 2, 3], [1000, 3, 4]], "small"),
        case("2 buffers that are never alive together", [[256, 0, 1], [512, 2, 3]], "small"),
        case("4 buffers: the middle ones end early", [[256, 0, 5], [512, 0, 1], [256, 2, 5], [256, 1, 4]], "small", 1.2),
        case("one buffer of 1 byte", [[1, 3, 3]], "awkward"),
        case("a chain of 12", chain, "awkward", 1.05),
        case("6 buffers, one inside the other", nested, "awkward", 1.3),
        case("the layer, 37 tokens", layer, "awkward", 1.1),
        case("25 buffers", drawn(25, 12), "awkward", 1.6),
        case("60 buffers", drawn(60, 40), "awkward", 1.6),
    ]  # fmt: skip


def _run_plan(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    buffers = [tuple(one) for one in inputs["buffers"]]
    offsets, total = answer(list(buffers))
    offsets, total = [int(offset) for offset in offsets], int(total)
    shared, past, misaligned = [], [], []
    for i, (size, first, last) in enumerate(buffers):
        begin, end = offsets[i], offsets[i] + size
        if begin < 0 or end > total:
            past.append(f"buffer {i} lies in bytes {begin} to {end - 1}, and the arena has {total}")
        if begin % 256:
            misaligned.append(f"buffer {i} begins at byte {begin}")
        for j in range(i):
            other, step = buffers[j], max(first, buffers[j][1])
            if step <= min(last, other[2]) and begin < offsets[j] + other[0] and offsets[j] < end:
                shared.append(f"buffers {j} and {i} share bytes, and both are alive in step {step}")
    return {
        "buffers": len(offsets),
        "overlaps": shared[:5],
        "misaligned": misaligned[:5],
        "past_the_arena": past[:5],
        "bytes_over_budget": max(0, total - inputs["budget"]),
        "plan": [offsets, total],
    }


def _expect_plan(inputs: Any) -> dict[str, Any]:
    return {
        "buffers": len(inputs["buffers"]),
        "overlaps": [],
        "misaligned": [],
        "past_the_arena": [],
        "bytes_over_budget": 0,
    }


_PLAN_BODY = """    offsets, placed = [0] * len(lifetimes), []
    for i in sorted(range(len(lifetimes)), key=lambda i: -lifetimes[i][0]):
        size, first, last = lifetimes[i]
        offset = 0
        for begin, end, other_first, other_last in sorted(placed):
            together = other_first <= last and first <= other_last
            if together and begin < offset + size:
                offset = max(offset, end)
        offsets[i] = offset
        placed.append((offset, offset + (size + 255) // 256 * 256, first, last))
    return offsets, max(end for _, end, _, _ in placed)"""


def _plan(*changes: tuple[str, str]) -> str:
    return f"def plan_buffers(lifetimes):\n{_changed(_PLAN_BODY, *changes)}\n"


_PLAN = Exercise(
    id="16.3",
    title="plan_buffers, the part",
    answer="plan_buffers",
    kind="function",
    arguments=("lifetimes",),
    cases=_plan_cases,
    run=_run_plan,
    expected=_expect_plan,
    points={"small": 1, "awkward": 2},
    makes={"plan_buffers": "plan_buffers"},
    file="plan_buffers.py",
    hints=Hints(
        question="Take {case}. Draw each buffer as a bar from its first to its last step. Which bars stand above a common step? "
        "Only those must not share bytes.",
        rule="Place the largest buffer first, at 0. For each further one begin with offset 0, and go through the placed ones "
        "from the lowest offset up. One that is alive in a common step and begins before offset + size is in the way: move to "
        "its end. Ends are rounded up to 256, so every offset is a multiple of 256. The arena is as long as the largest "
        "end.\n\n"
        "By hand: 1000 bytes (1, 2), 500 (2, 3), 1000 (3, 4). The first goes to 0 and ends at 1024. The third is as large, "
        "and never alive with the first: it goes to 0, too. The second meets both: 1024. The arena has 1,536 bytes.",
        code="""offsets, placed = [0] * len(lifetimes), []
for i in sorted(range(len(lifetimes)), key=lambda i: ____):
    size, first, last = lifetimes[i]
    offset = 0
    for begin, end, other_first, other_last in sorted(placed):
        together = other_first <= ____ and first <= ____
        if together and begin < ____:
            offset = max(offset, ____)
    offsets[i] = offset
    placed.append((offset, offset + ____, first, last))
return offsets, max(____)""",
    ),
    mistakes=(
        Mistake(
            "in-place overlap",
            _plan(
                ("other_first <= last and first <= other_last", "other_first < last and first < other_last")
            ),
            "One buffer's last step is another's first: in that step an operation reads the one and writes the other. If they "
            "share bytes it overwrites its own input. Lifetimes that touch may not share.",
            "In step 2, buffer 0 is read while buffer 1 is written. May they share bytes?",
        ),
        Mistake(
            "alignment forgotten",
            _plan(("offset + (size + 255) // 256 * 256", "offset + size")),
            "A buffer begins where another ends, and sizes are not multiples of 256. Round the ends up: vector loads and "
            "coalesced warps need addresses that are round.",
            "500 bytes that begin at 1,000: is 1,000 a multiple of 256?",
        ),
        Mistake(
            "nothing is shared",
            _plan(("other_first <= last and first <= other_last", "True")),
            "Every buffer has memory of its own. Correct, and the arena is as large as before. Two that are never alive in a "
            "common step may lie in the same place.",
            "Are buffers 0 and 2 ever alive in the same step?",
        ),
        Mistake(
            "only the first step looked at",
            _plan(("other_first <= last and first <= other_last", "other_first <= first <= other_last")),
            "The place was free in the buffer's first step, but another buffer is already placed there for a later one. Two "
            "lifetimes meet if each begins before the other has ended.",
            "The largest buffers are placed first, and some of them begin later than this one. Do you see them?",
        ),
        Mistake(
            "placed ones not in order of offset",
            _plan(("in sorted(placed):", "in placed:")),
            "Moving past one buffer may bring you into one that you have looked at already. Go through the placed ones from "
            "the lowest offset up; then everything below has been settled.",
            "After moving to the end of one buffer, can a buffer that you passed before be in the way?",
        ),
        Mistake(
            "the arena ends with the last one placed",
            _plan(("max(end for _, end, _, _ in placed)", "placed[-1][1]")),
            "The buffer that was placed last need not lie highest. The arena must reach to the largest of all ends.",
            "Which of your buffers has the highest end?",
        ),
        Mistake(
            "offsets in the order of placing",
            _plan(
                ("offsets[i] = offset", "offsets.append(offset)"),
                ("offsets, placed = [0] * len(lifetimes), []", "offsets, placed = [], []"),
            ),
            "The offsets must come back in the order in which the buffers were given, not in which you placed them.",
            "Whose offset is the first one that you return?",
        ),
    ),
)


# ---------------- 16.4: the poison


def _poison_cases(rng: np.random.Generator) -> list[Case]:
    def case(n: int, begin: int, group: str) -> Case:
        return Case(f"{n:,} words, from word {begin}", {"n": n, "begin": begin}, group)

    return [
        case(4, 0, "small"),
        case(64, 8, "small"),
        case(1, 0, "awkward"),
        case(63, 6, "awkward"),
        case(int(rng.integers(500, 900)) * 2 + 1, 128, "awkward"),
    ]


def _run_poison(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    n, begin = inputs["n"], inputs["begin"]
    length = begin + n + 10
    words = lab.inout(np.full(length, 0x3F80, np.uint16))  # 1.0 as bfloat16
    answer((-(-n // 64),), (64,), (words[begin : begin + n], np.int32(n)))
    bits = lab.get(words)
    inside, outside = bits[begin : begin + n], np.concatenate([bits[:begin], bits[begin + n :]])
    floats = inside[: n // 2 * 2].view(np.float32)
    return {
        "nan_as_bf16": int(np.isnan((inside.astype(np.uint32) << 16).view(np.float32)).sum()),
        "nan_as_float32": int(np.isnan(floats).sum()),
        "words_changed_outside": int((outside != 0x3F80).sum()),
        "words": inside,
    }


def _expect_poison(inputs: Any) -> dict[str, Any]:
    n = inputs["n"]
    return {"nan_as_bf16": n, "nan_as_float32": n // 2, "words_changed_outside": 0}


def _poison(body: str) -> str:
    return f'''poison = cp.RawKernel(r"""
extern "C" __global__ void poison(unsigned short* words, int n) {{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    {body}
}}
""", "poison")
'''


_POISON = Exercise(
    id="16.4",
    title="poison",
    answer="poison",
    kind="kernel",
    cases=_poison_cases,
    run=_run_poison,
    expected=_expect_poison,
    points={"small": 1, "awkward": 1, "clean": 1},
    hints=Hints(
        question="Take {case}. What is in the first word after your kernel: are all its exponent bits set, and is any fraction "
        "bit?",
        rule="A bfloat16 is a NaN if its 8 exponent bits are all 1 and its fraction is not 0: 0x7FC0, or 0xFFFF. Two of them "
        "side by side are a float32 that is a NaN as well, since the upper half has the exponent. Each thread writes one word, "
        "if there is one.",
        code="if (i < ____) words[i] = ____;",
    ),
    mistakes=(
        Mistake(
            "infinity",
            _poison("if (i < n) words[i] = 0x7F80;"),
            "All exponent bits set and a fraction of 0 is infinity, and infinity hides: 1 / infinity is 0, and a maximum "
            "takes it for a number. A NaN has a fraction bit.",
            "Which of the 7 fraction bits of your word are set?",
            variants=(_poison("if (i < n) words[i] = 0xFF80;"),),
        ),
        Mistake(
            "an exponent bit too few",
            _poison("if (i < n) words[i] = 0x7E00;"),
            "0x7E00 is float16's NaN: float16 has 5 exponent bits. A bfloat16 has 8 of them, and 0x7F80 has them all set; then a "
            "fraction bit is needed as well.",
            "Which bits of your word are the exponent of a bfloat16, and are all eight of them set?",
            variants=(
                _poison("if (i < n) words[i] = 0x7F00;"),
                _poison("if (i < n) words[i] = 0x7C01;"),
                _poison("if (i < n) words[i] = 0x7F7F;"),
                _poison("if (i < n) words[i] = 0xFF00;"),
            ),
        ),
        Mistake(
            "every second word",
            _poison("if (i < n) words[i] = i % 2 ? 0x7FC0 : 0x0000;"),
            "0x7FC00000 is a NaN as float32, and as two bfloat16 it is a NaN and a zero. The arena holds both types: each "
            "word must be a NaN by itself.",
            "Read as bfloat16, what is the first word of a float32 NaN, 0x7FC00000, in memory?",
        ),
        Mistake(
            "no guard",
            _poison("words[i] = 0x7FC0;"),
            "The grid is rounded up to whole blocks. Without i < n the poison runs over the end, into a neighbour that is "
            "alive.",
            "With 4 words and 64 threads, what does thread 5 write to?",
        ),
        Mistake(
            "zeros",
            _poison("if (i < n) words[i] = 0;"),
            "A zero is a number like others: what is read too late goes on quietly. Poison must be seen in whatever is "
            "computed from it.",
            "What is 0 + 1, and what is NaN + 1?",
        ),
        Mistake(
            "half of the words",
            _poison("if (i < n / 2) words[i] = 0x7FC0;"),
            "n counts words, not bytes.",
            "How many words does the buffer have, and how many do you write?",
        ),
    ),
)


# ---------------- 16.5: a table with faults


def _table_cases(rng: np.random.Generator) -> list[Case]:
    def case(layers: int, tokens: int, group: str) -> Case:
        label = f"{layers} layer{'s' if layers > 1 else ''}, {tokens} token{'s' if tokens > 1 else ''}"
        return Case(label, {"layers": layers, "tokens": tokens, "seed": int(rng.integers(1 << 30))}, group)

    return [case(1, 1, "small"), case(2, 3, "small"), case(3, 7, "awkward")]


def _run_table(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    """Some layers of a small Llama, their buffers placed by the table; what is not alive in a step is poisoned before it."""
    from contextlib import nullcontext

    import numpy as np

    from tinyvllm_ref.assembly import Parts
    from tinyvllm_ref.bf16 import float_to_bf16
    from tinyvllm_ref.buffers import plan_buffers
    from tinyvllm_ref.kernels.split_qkv import split_qkv

    cp = lab.cp
    parts: Any = Parts.reference()
    T, H, Hq, Hk, D, F = inputs["tokens"], 32, 2, 1, 16, 96
    columns = {
        "residual": (H, 4), "x": (H, 4), "normed": (H, 2), "qkv": ((Hq + 2 * Hk) * D, 4), "q": (Hq * D, 4),
        "k": (Hk * D, 4), "v": (Hk * D, 4), "attended": (Hq * D, 2), "ffn_normed": (H, 2), "gate_up": (2 * F, 4),
        "activated": (F, 2),
    }  # fmt: skip
    true = {
        "residual": (0, 10), "x": (0, 10), "normed": (1, 2), "qkv": (2, 3), "q": (3, 4), "k": (3, 4), "v": (3, 4),
        "attended": (4, 5), "ffn_normed": (6, 7), "gate_up": (7, 8), "activated": (8, 9),
    }  # fmt: skip
    if set(answer) != set(columns):
        raise ValueError(
            f"the table has {', '.join(sorted(answer))}; it must have {', '.join(sorted(columns))}"
        )
    sizes = {name: T * count * size for name, (count, size) in columns.items()}

    def planned(table: Any) -> Any:
        return plan_buffers([(sizes[name], int(table[name][0]), int(table[name][1])) for name in columns])

    def bf16(*shape: int) -> Any:
        return cp.asarray(float_to_bf16(rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)))

    def run(table: Any, offsets: Any, total: int) -> Any:
        arena = cp.empty(total, np.uint8)
        arena.fill(255)
        b = {}
        for offset, (name, (count, size)) in zip(offsets, columns.items(), strict=True):
            flat = arena[offset : offset + sizes[name]].view(np.float32 if size == 4 else np.uint16)
            b[name] = flat.reshape(T, count)
        first_nan = "none"

        def poison_but(step: int) -> None:
            """Poison every byte that belongs to no buffer that is alive in a step."""
            free = np.ones(total, bool)
            for offset, name in zip(offsets, columns, strict=True):
                if table[name][0] <= step <= table[name][1]:
                    free[offset : offset + sizes[name]] = False
            edges = np.flatnonzero(np.diff(np.concatenate([[False], free, [False]]).astype(np.int8)))
            for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
                arena[begin:end].fill(255)

        def born(step: int) -> None:
            for name in columns:
                if table[name][0] == step:
                    b[name].view(np.uint8).fill(255)

        b["residual"].set(start)
        k_cache, v_cache = cp.empty((1, T, Hk, D), np.uint16), cp.empty((1, T, Hk, D), np.uint16)
        q, k, v = (b[name].reshape(T, -1, D) for name in ("q", "k", "v"))
        for layer in range(inputs["layers"]):
            w_qkv, w_o, w_up, w_down = weights[layer]
            poison_but(1)

            def attend() -> None:
                parts.rope(q, k, positions, inv_freq)
                parts.kv_write(k, v, slots, k_cache, v_cache)
                parts.attention_gqa(q, k_cache[0], v_cache[0], D**-0.5, b["attended"].reshape(T, Hq, D))

            def first_norm(layer: int = layer) -> None:
                if layer:
                    parts.add_rms_norm(b["x"], b["residual"], ones, 1e-5, b["normed"])
                else:
                    parts.rms_norm(b["residual"], ones, 1e-5, b["normed"])

            operations = (
                ("add, norm", ("residual", "normed"), first_norm),
                ("product qkv", ("qkv",), lambda w=w_qkv: parts.linear(b["normed"], w, b["qkv"])),
                ("split", ("q", "k", "v"), lambda: split_qkv(b["qkv"], q, k, v)),
                ("rope, attention", ("q", "k", "attended"), attend),
                ("product o", ("x",), lambda w=w_o: parts.linear(b["attended"], w, b["x"])),
                ("add, norm", ("residual", "ffn_normed"),
                 lambda: parts.add_rms_norm(b["x"], b["residual"], ones, 1e-5, b["ffn_normed"])),
                ("product gate_up", ("gate_up",), lambda w=w_up: parts.linear(b["ffn_normed"], w, b["gate_up"])),
                ("silu_mul", ("activated",), lambda: parts.silu_mul(b["gate_up"], b["activated"])),
                ("product down", ("x",), lambda w=w_down: parts.linear(b["activated"], w, b["x"])),
            )  # fmt: skip
            for step, (name, writes, operation) in enumerate(operations, 1):
                born(step)
                operation()  # type: ignore[no-untyped-call]
                for written in writes:
                    bits = b[written].get()
                    if bits.dtype == np.uint16:
                        bits = (bits.astype(np.uint32) << 16).view(np.float32)
                    if np.isnan(bits).any() and first_nan == "none":
                        first_nan = f"layer {layer}, operation {step} ({name}): NaN in {written}"
                poison_but(step + 1)
        out = b["residual"].get() + b["x"].get()
        if np.isnan(out).any() and first_nan == "none":
            first_nan = "residual + x, after the last layer, is NaN"
        return out, first_nan

    rng = np.random.default_rng(inputs["seed"])
    start = rng.normal(0, 1, (T, H)).astype(np.float32)
    weights = [
        (bf16((Hq + 2 * Hk) * D, H), bf16(H, Hq * D), bf16(2 * F, H), bf16(H, F))
        for _ in range(inputs["layers"])
    ]
    ones = cp.asarray(float_to_bf16(np.ones(H, np.float32)))
    positions = cp.arange(T, dtype=np.int32)
    slots = cp.arange(T, dtype=np.int64)
    inv_freq = cp.asarray((10000.0 ** (-np.arange(0, D, 2) / D)).astype(np.float32))
    separate = np.cumsum([0, *(-(-sizes[name] // 256) * 256 for name in columns)]).tolist()
    offsets, total = planned(answer)
    # Where buffers overlap threads race for the bytes: it is the NaN that says why.
    with cp.checks("fast") if getattr(cp, "is_emulation", False) else nullcontext():
        right, _ = run(dict.fromkeys(columns, (0, 10)), separate[:-1], separate[-1])
        out, first_nan = run(answer, offsets, total)
    return {
        "first_nan": first_nan,
        "as_with_memory_of_their_own": bool(np.array_equal(out, right)),
        "bytes_over_budget": max(0, total - planned(true)[1]),
        "lifetimes": {name: [int(step) for step in answer[name]] for name in columns},
    }


def _expect_table(inputs: Any) -> dict[str, Any]:
    return {"first_nan": "none", "as_with_memory_of_their_own": True, "bytes_over_budget": 0}


def _table(**changes: tuple[int, int]) -> str:
    rows = "\n".join(f'    "{name}": {pair},' for name, pair in {**LIFETIMES, **changes}.items())
    return f"table = {{\n{rows}\n}}\n"


_TABLE = Exercise(
    id="16.5",
    title="a table with faults",
    answer="table",
    kind="value",
    cases=_table_cases,
    run=_run_table,
    expected=_expect_table,
    points={"small": 2, "awkward": 1},
    seconds=60,  # where the reference's kernels have yet to be compiled
    runs_engine=True,
    hints=Hints(
        question="Take {case}. The report names the first operation that writes a NaN. Which buffers does this operation read? "
        "Until when does the table say that they live?",
        rule="Go from the first NaN backwards: the operation read something that was no longer alive, or not yet. A buffer is "
        "alive from the operation that writes it to the last one that reads it. The layers follow each other: what the next "
        "layer's first operation reads must live beyond operation 9, and then it lives all the time: (0, 10).\n\n"
        "By hand: operation 7 reads ffn_normed, and operation 6 writes it: (6, 7).",
        code='"x": (0, ____),\n"qkv": (2, ____),\n"ffn_normed": (____, 7),',
    ),
    mistakes=(
        Mistake(
            "a later reader missed",
            _table(qkv=(2, 2)),
            "The split in operation 3 reads qkv, which the product in operation 2 wrote. It must live until then.",
            "Which operation reads qkv?",
        ),
        Mistake(
            "alive only when it is read",
            _table(ffn_normed=(7, 7)),
            "A buffer's life begins with the operation that writes it. Before that its memory may belong to another one, or "
            "to nobody.",
            "Which operation writes ffn_normed?",
        ),
        Mistake(
            "x ends with the attention block",
            _table(x=(5, 6)),
            "x is used twice: operation 5 writes it and 6 adds it to the stream; then operation 9 writes it, and the *next "
            "layer's* first operation adds it.",
            "After operation 9, who reads x?",
        ),
        Mistake(
            "x ends with the layer",
            _table(x=(5, 9)),
            "The layers follow each other. What operation 9 writes is read by the first operation of the next layer, and after "
            "the last layer by the final norm. So x lives beyond operation 9, and from before operation 1 on.",
            "There is a layer after this one. What does its first operation read?",
            variants=(_table(x=(0, 9)), _table(x=(1, 9))),
        ),
        Mistake(
            "x begins with the attention block",
            _table(x=(5, 10)),
            "Operation 5 writes x, and operation 9 writes it again, for the first operation of the next layer: there it is read "
            "in step 1. So it lives from before operation 1 on.",
            "In which step of a layer is x read for the first time?",
            variants=(_table(x=(6, 10)),),
        ),
        Mistake(
            "all of them alive all the time",
            "table = dict.fromkeys("
            + repr(tuple(LIFETIMES))
            + ", (0, 10))\n",
            "Nothing is read too late then, and nothing can share memory. Give each buffer the life that it has, not more.",
            "How many bytes does the arena have now, and how many did the report allow?",
        ),
        Mistake(
            "gate_up and activated alive too long",
            _table(gate_up=(7, 9), activated=(7, 9)),
            "Safe, and larger than it need be: gate_up and activated are not both needed in operations 7 to 9.",
            "In which operation is gate_up read for the last time?",
            variants=(_table(gate_up=(7, 10), activated=(7, 10)),),
        ),
        Mistake(
            "as it was given",
            _table(qkv=(2, 2), ffn_normed=(7, 7), x=(5, 6)),
            "All three faults are still there. Begin with the first NaN: which buffer did that operation read, and until when "
            "does the table let it live?",
            "The first NaN is written by operation 3. What does it read?",
        ),
    ),
)  # fmt: skip


# ---------------- 16.6: the workspace


def _workspace_cases(rng: np.random.Generator) -> list[Case]:
    def case(label: str, buffers: dict[str, list[Any]], most: int, steps: list[int], group: str) -> Case:
        sizes = [
            [most * columns * (4 if dtype == "float32" else 2), first, last]
            for columns, dtype, first, last in buffers.values()
        ]
        budget = _rounded(int(1.3 * _least(sizes)))
        return Case(label, {"buffers": buffers, "max_tokens": most, "steps": steps, "budget": budget}, group)

    three = {"a": [4, "float32", 1, 2], "b": [8, "uint16", 2, 3], "c": [4, "float32", 3, 4]}
    sizes = row_bytes(config())
    floats = {"residual", "x", "qkv", "q", "k", "v", "gate_up"}
    layer = {
        name: [
            size // (4 if name in floats else 2),
            "float32" if name in floats else "uint16",
            *LIFETIMES[name],
        ]
        for name, size in sizes.items()
    }
    odd = {f"b{k}": [int(rng.integers(1, 90)), ("float32", "uint16")[k % 2], k, k + 2] for k in range(9)}
    return [
        case("3 buffers, at most 4 tokens, 5 steps", three, 4, [4, 1, 1, 2, 1], "small"),
        case("a layer, at most 32 tokens, a prompt of 32 and 6 tokens", layer, 32, [32, 1, 1, 1, 1, 1, 1], "awkward"),
        case("9 odd buffers, at most 5 tokens, 8 steps", odd, 5, [5, 3, 1, 4, 2, 5, 1, 1], "awkward"),
    ]  # fmt: skip


def _run_workspace(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    cp = lab.cp
    pool, made = cp.get_default_memory_pool(), []

    def allocate(size: int) -> object:
        made.append(size)
        return pool.malloc(size)

    table = {name: tuple(entry) for name, entry in inputs["buffers"].items()}
    shapes, dtypes, overwritten = [], [], []
    with cp.cuda.using_allocator(allocate):
        workspace = answer(dict(table), inputs["max_tokens"])
        at_start, start_bytes = len(made), sum(made)
        for number, tokens in enumerate(inputs["steps"]):
            views = workspace.views(tokens)
            shapes.append([[int(n) for n in views[name].shape] for name in table])
            dtypes.append([str(views[name].dtype) for name in table])
            for step in range(max(last for *_, last in table.values()) + 1):
                for value, (name, (_, _, first, _)) in enumerate(table.items(), 1):
                    if first == step:
                        views[name].fill(value)
                for value, (name, (_, _, first, last)) in enumerate(table.items(), 1):
                    if first <= step <= last and not (views[name].get() == value).all():
                        overwritten.append(f"pass {number}: {name} was overwritten in step {step}")
    return {
        "shapes": shapes,
        "dtypes": dtypes,
        "overwritten": overwritten[:5],
        "allocations_at_the_start": at_start,
        "allocations_in_the_loop": len(made) - at_start,
        "bytes_over_budget": int(max(0, start_bytes - inputs["budget"])),
        "bytes": int(np.sum(made)),
    }


def _expect_workspace(inputs: Any) -> dict[str, Any]:
    entries = list(inputs["buffers"].values())
    return {
        "shapes": [[[tokens, columns] for columns, *_ in entries] for tokens in inputs["steps"]],
        "dtypes": [[dtype for _, dtype, *_ in entries] for _ in inputs["steps"]],
        "overwritten": [],
        "allocations_at_the_start": 1,
        "allocations_in_the_loop": 0,
        "bytes_over_budget": 0,
    }


_SPACE_BODY = """class Workspace:
    def __init__(self, buffers, max_tokens):
        self.buffers = buffers
        sizes = {name: max_tokens * columns * np.dtype(dtype).itemsize for name, (columns, dtype, _, _) in buffers.items()}
        offsets, total = plan_buffers([(sizes[name], first, last) for name, (_, _, first, last) in buffers.items()])
        arena = cp.empty(total, np.uint8)
        self.whole = {}
        for name, offset in zip(buffers, offsets):
            columns, dtype = buffers[name][:2]
            flat = arena[offset : offset + sizes[name]].view(dtype)
            self.whole[name] = flat.reshape(max_tokens, columns)

    def views(self, tokens):
        return {name: array[:tokens] for name, array in self.whole.items()}
"""


def _space(*changes: tuple[str, str]) -> str:
    return _changed(_SPACE_BODY, *changes)


_NO_ARENA = """class Workspace:
    def __init__(self, buffers, max_tokens):
        self.buffers = buffers

    def views(self, tokens):
        return {name: cp.empty((tokens, one[0]), one[1]) for name, one in self.buffers.items()}
"""

_SPACE = Exercise(
    id="16.6",
    title="allocate once",
    answer="Workspace",
    kind="class",
    cases=_workspace_cases,
    run=_run_workspace,
    expected=_expect_workspace,
    points={"small": 1, "awkward": 2},
    builds_on=("16.3",),
    hints=Hints(
        question="Take {case}. How large is each buffer for the most tokens, in bytes? And which part of it is used in a pass "
        "over one token?",
        rule="__init__: bytes of each buffer for max_tokens, the plan, one arena of bytes (uint8). A buffer is a slice of the "
        "arena, seen as its dtype with .view(dtype), and shaped (max_tokens, columns). views: the first `tokens` rows of each; "
        "a slice is a view, and allocates nothing.\n\n"
        "By hand: 4 columns of float32 for at most 4 tokens are 64 bytes: arena[offset : offset + 64].view(np.float32), "
        "reshaped to (4, 4). For one token it is the first row.",
        code="""sizes = {name: max_tokens * columns * ____ for name, (columns, dtype, _, _) in buffers.items()}
offsets, total = plan_buffers([(____, first, last) for name, (_, _, first, last) in buffers.items()])
arena = cp.empty(total, ____)
...
    flat = arena[____ : ____].view(dtype)
    self.whole[name] = flat.reshape(____, ____)

def views(self, tokens):
    return {name: array[____] for name, array in self.whole.items()}""",
    ),
    mistakes=(
        Mistake(
            "an array for each buffer",
            _space(
                ("            flat = arena[offset : offset + sizes[name]].view(dtype)\n", ""),
                ("flat.reshape(max_tokens, columns)", "cp.empty((max_tokens, columns), dtype)"),
                ("        arena = cp.empty(total, np.uint8)\n", ""),
            ),
            "Each buffer has memory of its own, so nothing is shared. Allocate one arena, and cut the buffers out of it.",
            "How many allocations does your __init__ make, and how many bytes in all?",
            variants=(
                _space(
                    ("            flat = arena[offset : offset + sizes[name]].view(dtype)\n", ""),
                    ("flat.reshape(max_tokens, columns)", "cp.zeros((max_tokens, columns), dtype)"),
                    ("        arena = cp.empty(total, np.uint8)\n", ""),
                ),
            ),
        ),
        Mistake(
            "new arrays in every pass",
            _space(
                ("array[:tokens] for name, array in self.whole.items()",
                 "cp.empty((tokens, columns), dtype) for name, (columns, dtype, _, _) in self.buffers.items()"),
            ),
            "views makes arrays anew each time (copies count): one allocation a buffer and pass. A basic slice is a view of what "
            "is there, and costs nothing.",
            "How many arrays that own memory does one call of views create?",
            variants=(
                _space(("array[:tokens] for", "array[:tokens].copy() for")),
                _NO_ARENA,
                _NO_ARENA.replace("cp.empty", "cp.zeros"),
            ),
        ),
        Mistake(
            "as long as the longest",
            _space(("array[:tokens] for", "array for")),
            "A pass over one token must see one row. Otherwise every kernel computes the longest prompt again and again.",
            "Which shape must the view of a pass over one token have?",
        ),
        Mistake(
            "elements in the place of bytes",
            _space((" * np.dtype(dtype).itemsize", "")),
            "The plan and the arena count bytes. A float32 has four of them and a bfloat16 two.",
            "How many bytes are 4 columns of float32 for 4 tokens?",
        ),
        Mistake(
            "a plan for one token",
            _space(
                ("plan_buffers([(sizes[name], first", "plan_buffers([(sizes[name] // max_tokens, first"),
                ("cp.empty(total, np.uint8)", "cp.empty(total + sum(sizes.values()), np.uint8)"),
            ),
            "The offsets were planned for rows of one token, and the buffers are longer: they run into each other.",
            "For how many tokens must there be room between two buffers?",
        ),
    ),
)  # fmt: skip


# ---------------- pictures


def _packing(answer: Any, cp: Any) -> Any:
    """The learner's plan of a layer's buffers."""
    sizes = row_bytes(config())
    buffers = [figures.Lifetime(name, 64 * size, *LIFETIMES[name]) for name, size in sizes.items()]
    offsets, total = answer([(one.size, one.first, one.last) for one in buffers])
    return figures.lifetimes(buffers, [int(offset) for offset in offsets], int(total))


LESSON = Lesson(
    number="16",
    slug="buffer_reuse",
    title="Buffers used again",
    part=4,
    minutes=60,
    exercises=(_LIFE, _PREDICTION, _PLAN, _POISON, _TABLE, _SPACE),
    engine=EngineCard(
        mistakes=(
            ("16.3", "in-place overlap"),
            ("16.3", "only the first step looked at"),
            ("16.3", "the arena ends with the last one placed"),
        ),
        note="Your plan is asked when the engine starts, and again where a pass needs more room; every activation of the story "
        "lies where it says. In this card the reference's decoder_layer and forward run in the place of yours, since those take "
        "their arrays from the plan and yours allocate them.",
        without=("decoder_layer", "forward"),
    ),
    pictures={"16.3": _packing},
)
