"""Lesson 18: many requests in one pass, padded, packed, and what a batch that waits for its slowest member wastes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

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
    Work,
    with_changes,
)

PROMPTS = (
    "Once upon a time",
    "The end.",
    "There was once a frog named Button who loved to sing.",
    "Everyone on Heather Hill knew Waffle, the busy little rabbit.",
    "Say red, white, blue, and the old gate will open.",
    "Finn waved goodbye to the sailor. He was so happy that",
    "One dark night, Ella and her friend Leo heard a noise.",
    "I am not afraid any more. And from that day on",
    "The sun was shining. Clover and her friend Rusty packed a basket with plums and nuts.",
    "A fox named Dot lived in a cosy den near Stony Brook.",
    "Then they both went home, tired and happy. And",
    "Max wanted to make a kite. He put on his blue apron and",
)
"""Requests of the lesson's run, whose stories are of very different lengths."""
SLOTS, MOST = 4, 160


@functools.cache
def stories() -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Prompt and completion of each request, as token ids; by tiny-stories, greedily, all in one batch."""
    from tinyvllm_ref import LLM, SamplingParams

    llm = LLM("tiny-stories")
    params = SamplingParams(max_tokens=MOST, temperature=0.0)
    outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
    return tuple((tuple(output.prompt_token_ids), tuple(output.outputs[0].token_ids)) for output in outputs)


def _changed(text: str, *changes: tuple[str, str]) -> str:
    return with_changes(text, changes)


def _ragged(rng: np.random.Generator, lengths: list[int], vocab: int = 2000) -> list[list[int]]:
    return [[int(token) for token in rng.integers(1, vocab, length)] for length in lengths]


# ---------------- 18.1: padding


def _pad_cases(rng: np.random.Generator) -> list[Case]:
    def case(lengths: list[int], group: str) -> Case:
        label = f"{len(lengths)} prompts of {', '.join(map(str, lengths))} tokens"
        return Case(label, {"sequences": _ragged(rng, lengths)}, group)

    first = Case("2 prompts: [5, 6, 7] and [8]", {"sequences": [[5, 6, 7], [8]]}, "small")
    return [
        first,
        case([2, 3], "small"),
        case([1], "awkward"),
        case([4, 4], "awkward"),
        case([1, 9, 3, 2], "awkward"),
        case([int(n) for n in rng.integers(1, 30, 7)], "awkward"),
    ]


def _run_pad(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    ids, positions, mask = answer([list(one) for one in inputs["sequences"]])
    return {
        "ids": np.asarray(ids, np.int64),
        "positions": np.asarray(positions, np.int64),
        "mask": np.asarray(mask).astype(np.int64),
    }


def _expect_pad(inputs: Any) -> dict[str, Any]:
    sequences = inputs["sequences"]
    B, L = len(sequences), max(map(len, sequences))
    ids, positions = np.zeros((B, L), np.int64), np.zeros((B, L), np.int64)
    mask = np.zeros((B, L, L), np.int64)
    for b, tokens in enumerate(sequences):
        for j, token in enumerate(tokens):
            column = L - len(tokens) + j
            ids[b, column], positions[b, column] = token, j
            mask[b, column, L - len(tokens) : column + 1] = 1
    return {"ids": ids, "positions": positions, "mask": mask}


_PAD_BODY = """    B, L = len(sequences), max(len(tokens) for tokens in sequences)
    ids, positions = np.zeros((B, L), np.int64), np.zeros((B, L), np.int64)
    mask = np.zeros((B, L, L), bool)
    for b, tokens in enumerate(sequences):
        n = len(tokens)
        ids[b, L - n :] = tokens
        positions[b, L - n :] = np.arange(n)
        mask[b, L - n :, L - n :] = np.tri(n, dtype=bool)
    return ids, positions, mask"""


def _pad(*changes: tuple[str, str]) -> str:
    return f"def pad(sequences):\n{_changed(_PAD_BODY, *changes)}\n"


_PAD = Exercise(
    id="18.1",
    title="a rectangle of prompts",
    answer="pad",
    kind="function",
    arguments=("sequences",),
    cases=_pad_cases,
    run=_run_pad,
    expected=_expect_pad,
    points={"small": 1, "awkward": 1},
    hints=Hints(
        question="Take {case}. Draw the rectangle. In the shorter row, which columns hold a token, and what is the position of "
        "the first of these?",
        rule="A row of n tokens begins in column L - n. Its positions there are 0 to n - 1. Query i may see key j if both are "
        "tokens and j is not later than i; everything that touches padding is False.\n\n"
        "By hand, [5, 6, 7] and [8]: the second row is 0 0 8, its positions are 0 0 0, and its mask has a single True, at "
        "query 2 and key 2.",
        code="""for b, tokens in enumerate(sequences):
    n = len(tokens)
    ids[b, ____ :] = tokens
    positions[b, ____ :] = ____
    mask[b, ____ :, ____ :] = np.tri(n, dtype=bool)""",
    ),
    mistakes=(
        Mistake(
            "padding attended to",
            _pad(("mask[b, L - n :, L - n :] = np.tri(n, dtype=bool)", "mask[b] = np.tri(L, dtype=bool)")),
            "The causal mask alone lets a token see everything in front of it, and in front of a short prompt there is "
            "padding. Its keys are those of token 0, and take part in the softmax. Padding must be masked.",
            "What does the only token of the short row see, besides itself?",
            variants=(
                _pad(("mask[b, L - n :, L - n :] = np.tri(n, dtype=bool)", "mask[b, L - n :] = np.tri(L, dtype=bool)[L - n :]")),
            ),
        ),
        Mistake(
            "positions counted with padding",
            _pad(("positions[b, L - n :] = np.arange(n)", "positions[b] = np.arange(L)")),
            "The first token of a prompt has position 0, wherever its row puts it. With the column's number it is rotated as "
            "if words had come before it.",
            "Alone, which position would the first token of the short prompt have?",
        ),
        Mistake(
            "padded on the right",
            _pad(("[b, L - n :]", "[b, :n]"), ("mask[b, L - n :, L - n :]", "mask[b, :n, :n]")),
            "Then the last token of each row is in another column. On the left it is always column L - 1, where the next token "
            "is drawn from, and where it will be appended.",
            "In which column is the last token of the short row?",
        ),
        Mistake(
            "everyone sees everyone",
            _pad(("np.tri(n, dtype=bool)", "True")),
            "A token may not see those that come after it: the mask of a prompt by itself is a triangle.",
            "May the first token of a prompt see its second?",
        ),
    ),
)  # fmt: skip


# ---------------- 18.2: the packed batch


def _pack_cases(rng: np.random.Generator) -> list[Case]:
    def case(lengths: list[int], group: str) -> Case:
        label = f"{len(lengths)} sequence{'s' if len(lengths) > 1 else ''} of {', '.join(map(str, lengths))}"
        return Case(label, {"sequences": _ragged(rng, lengths)}, group)

    return [
        Case("2 sequences: [5, 6, 7] and [8, 9]", {"sequences": [[5, 6, 7], [8, 9]]}, "small"),
        case([2, 1, 3], "small"),
        case([1], "awkward"),
        case([1, 1, 1, 1, 1], "awkward"),
        case([513, 1, 7], "awkward"),
        case([int(n) for n in rng.integers(1, 40, 33)], "awkward"),
    ]


def _run_pack(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    ids, positions, query_starts = answer([list(one) for one in inputs["sequences"]])
    return {
        "ids": lab.get(ids, "ids"),
        "positions": lab.get(positions, "positions"),
        "query_starts": lab.get(query_starts, "query_starts"),
    }


def _expect_pack(inputs: Any) -> dict[str, Any]:
    sequences = inputs["sequences"]
    return {
        "ids": np.array([token for tokens in sequences for token in tokens], np.int32),
        "positions": np.array([j for tokens in sequences for j, _ in enumerate(tokens)], np.int32),
        "query_starts": np.array([sum(map(len, sequences[:b])) for b in range(len(sequences) + 1)], np.int32),
    }


_PACK_BODY = """    ids = np.concatenate([np.array(tokens, np.int32) for tokens in sequences])
    positions = np.concatenate([np.arange(len(tokens), dtype=np.int32) for tokens in sequences])
    query_starts = np.cumsum([0] + [len(tokens) for tokens in sequences], dtype=np.int32)
    return cp.asarray(ids), cp.asarray(positions), cp.asarray(query_starts)"""


def _pack(*changes: tuple[str, str]) -> str:
    return f"def pack(sequences):\n{_changed(_PACK_BODY, *changes)}\n"


_PACK = Exercise(
    id="18.2",
    title="pack, the part",
    answer="pack",
    kind="function",
    arguments=("sequences",),
    cases=_pack_cases,
    run=_run_pack,
    expected=_expect_pack,
    points={"small": 1, "awkward": 2},
    makes={"pack": "pack"},
    file="pack.py",
    hints=Hints(
        question="Take {case}. Write all tokens in one line. Where in it does each sequence begin, and where does the last one "
        "end?",
        rule="ids: all tokens, one sequence after the other. positions: 0, 1, 2, ... anew for each sequence. query_starts: one "
        "entry more than there are sequences; it begins with 0, each entry adds the length of a sequence, and the last is the "
        "number of tokens. All three int32, on the device.\n\n"
        "By hand: [5, 6, 7] and [8, 9] give 5 6 7 8 9, the positions 0 1 2 0 1, and query_starts 0 3 5.",
        code="""ids = np.concatenate([np.array(tokens, ____) for tokens in sequences])
positions = np.concatenate([____ for tokens in sequences])
query_starts = np.cumsum([____] + [____ for tokens in sequences], dtype=np.int32)
return cp.asarray(ids), ____, ____""",
    ),
    mistakes=(
        Mistake(
            "positions run on",
            _pack(("np.concatenate([np.arange(len(tokens), dtype=np.int32) for tokens in sequences])", "np.arange(len(ids), dtype=np.int32)")),
            "The sequences share a line, and nothing else: each begins at position 0. Counted through, the second one is "
            "rotated as if it followed the first.",
            "Alone, which position would the first token of the second sequence have?",
        ),
        Mistake(
            "no last entry",
            _pack(("[0] + [len(tokens) for tokens in sequences]", "[0] + [len(tokens) for tokens in sequences[:-1]]")),
            "Sequence b is query_starts[b] up to query_starts[b + 1]. The last sequence needs an end as well: B sequences have "
            "B + 1 entries.",
            "Where does the last sequence end, and which entry says so?",
        ),
        Mistake(
            "no leading 0",
            _pack(("[0] + [len(tokens)", "[len(tokens)")),
            "The first sequence begins at 0, and query_starts must say so. There is one entry more than sequences.",
            "Where does the first sequence begin, and which entry says so?",
        ),
        Mistake(
            "lengths instead of starts",
            _pack(("np.cumsum([0] + [len(tokens) for tokens in sequences], dtype=np.int32)", "np.array([0] + [len(tokens) for tokens in sequences], np.int32)")),
            "Each entry says where a sequence begins in the line: the sum of all lengths before it.",
            "With sequences of 3 and 2 tokens, where does the second end?",
        ),
        Mistake(
            "positions from 1",
            _pack(("np.arange(len(tokens), dtype=np.int32)", "np.arange(1, len(tokens) + 1, dtype=np.int32)")),
            "Positions count from 0, as in training. RoPE sees only differences of positions, so a text in which all are one too "
            "large hardly changes: this fault is seen by a check alone, and by whoever mixes such positions with right ones.",
            "What is the position of the first token of a text?",
        ),
        Mistake(
            "64-bit integers",
            _pack(("np.array(tokens, np.int32)", "np.array(tokens, np.int64)"), ("np.arange(len(tokens), dtype=np.int32)", "np.arange(len(tokens))"), ("sequences], dtype=np.int32)", "sequences])")),
            "The kernels read these arrays as int, which has 32 bits. NumPy makes 64-bit integers unless it is told otherwise, "
            "and a kernel would take the halves of each for two numbers.",
            "What is the dtype of np.arange(3)?",
        ),
    ),
)  # fmt: skip


# ---------------- 18.3: the last rows


def _last_cases(rng: np.random.Generator) -> list[Case]:
    def case(lengths: list[int], hidden: int, group: str) -> Case:
        starts = np.cumsum([0, *lengths]).astype(np.int32)
        x = rng.integers(0x3C00, 0x4400, (int(starts[-1]), hidden)).astype(np.uint16)
        label = f"{len(lengths)} request{'s' if len(lengths) > 1 else ''} of {', '.join(map(str, lengths))}, H = {hidden}"
        return Case(label, {"x": x, "query_starts": starts}, group)

    return [
        case([3, 2], 4, "small"),
        case([2, 5, 1], 64, "small"),
        case([1], 1, "awkward"),
        case([1, 1, 1, 4], 130, "awkward"),
        case([7, 1, 12], 192, "awkward"),
        case([3, int(rng.integers(4, 9))], 1037, "awkward"),
    ]


def _run_last(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    requests, hidden = len(inputs["query_starts"]) - 1, inputs["x"].shape[1]
    x, starts = lab.input("x", inputs["x"]), lab.input("query_starts", inputs["query_starts"])
    out = lab.output((requests, hidden), np.uint16)
    answer((requests,), (128,), (x, starts, out, np.int32(hidden)))
    return {"out": lab.get(out)}


def _expect_last(inputs: Any) -> dict[str, Any]:
    return {"out": inputs["x"][inputs["query_starts"][1:] - 1]}


def _is_coalesced(inputs: Any, outputs: Any, observed: Any) -> str | None:
    requests, hidden = len(inputs["query_starts"]) - 1, inputs["x"].shape[1]
    turns = observed.total("global_read_requests") / requests
    if hidden < 1000 or turns <= hidden / 4:
        return None
    return (
        f"The rows are right, and reading a row of {hidden:,} numbers takes {turns:,.0f} turns of warps, where about "
        f"{-(-hidden // 32) + 8} are enough: the threads do not share the columns. Let each take every blockDim.x-th"
    )


_LAST_BODY = """    int row = query_starts[b + 1] - 1;
    for (int c = threadIdx.x; c < H; c += blockDim.x) out[(size_t)b * H + c] = x[(size_t)row * H + c];"""


def _last(*changes: tuple[str, str]) -> str:
    return f'''gather_last = cp.RawKernel(r"""
extern "C" __global__ void gather_last(const unsigned short* x, const int* query_starts, unsigned short* out, int H) {{
    int b = blockIdx.x;
{_changed(_LAST_BODY, *changes)}
}}
""", "gather_last")
'''


_LAST = Exercise(
    id="18.3",
    title="only the last row of each",
    answer="gather_last",
    kind="kernel",
    cases=_last_cases,
    run=_run_last,
    expected=_expect_last,
    points={"small": 1, "awkward": 1, "clean": 1},
    verify=_is_coalesced,
    hints=Hints(
        question="Take {case}. Which rows of x belong to request 1? Which of them is its last?",
        rule="Request b has the rows query_starts[b] to query_starts[b + 1] - 1, so its last row is query_starts[b + 1] - 1. The "
        "threads of block b copy it, each every blockDim.x-th column.\n\n"
        "By hand, query_starts 0 3 5: the last rows are 2 and 4.",
        code="""int row = query_starts[____] - ____;
for (int c = threadIdx.x; c < ____; c += ____) out[(size_t)b * H + c] = x[____];""",
    ),
    mistakes=(
        Mistake(
            "one row too far",
            _last(("query_starts[b + 1] - 1", "query_starts[b + 1]")),
            "query_starts[b + 1] is where the *next* request begins. The last row of b is the one before.",
            "With query_starts 0 3 5, whose row is row 3?",
        ),
        Mistake(
            "the first row",
            _last(("query_starts[b + 1] - 1", "query_starts[b]")),
            "The first row of a prompt has seen only one token. The next token comes from the last row, which has seen all.",
            "Which row of a request has attended to its whole prompt?",
        ),
        Mistake(
            "as if all were as long as the first",
            _last(("query_starts[b + 1] - 1", "(b + 1) * query_starts[1] - 1")),
            "Row (b + 1) * length - 1 is right in a rectangle. In a packed line every request has its own length. With padding on the "
            "right this is how logits get taken from padding.",
            "Is the second request as long as the first?",
        ),
        Mistake(
            "row b",
            _last(("query_starts[b + 1] - 1", "b")),
            "b counts requests, and x has a row for each *token*.",
            "Which request does row 1 of x belong to?",
        ),
        Mistake(
            "only the first columns",
            _last(("    for (int c = threadIdx.x; c < H; c += blockDim.x) out", "    int c = threadIdx.x;\n    if (c < H) out")),
            "A block has 128 threads here, and a row may have more columns than that. Each thread takes every blockDim.x-th.",
            "Who copies column 128?",
        ),
        Mistake(
            "no guard for the columns",
            _last(("for (int c = threadIdx.x; c < H; c += blockDim.x) out", "int c = threadIdx.x;\n    out")),
            "Rows may be shorter than the block. A thread without a column then writes into the next row.",
            "With H = 4, what does thread 5 write?",
        ),
    ),
)  # fmt: skip


# ---------------- 18.4: a batch that waits


def serve_case(
    rng: np.random.Generator, label: str, lengths: list[int], slots: int, most: int, group: str
) -> Case:
    """Requests whose texts have these lengths, end token included, to be served in so many slots."""
    ends = [1, 2]
    requests = []
    for r, length in enumerate(lengths):
        prompt = [100 + r, *(int(t) for t in rng.integers(10, 90, int(rng.integers(0, 4))))]
        text = [int(t) for t in rng.integers(10, 90, length - 1)] + [int(rng.choice(ends))]
        # What a model would say after its end token: whoever still asks gets it.
        requests.append({"prompt": prompt, "text": text + [int(t) for t in rng.integers(10, 90, most + 2)]})
    return Case(label, {"requests": requests, "slots": slots, "ends": ends, "most": most}, group)


def _serve_cases(rng: np.random.Generator) -> list[Case]:
    case = functools.partial(serve_case, rng)
    drawn = [int(n) for n in rng.integers(1, 20, 11)]
    return [
        case("2 slots, 4 requests of 2, 4, 1 and 3 tokens", [2, 4, 1, 3], 2, 9, "small"),
        case("3 slots, 3 requests of 1, 5 and 2 tokens", [1, 5, 2], 3, 9, "small"),
        case("2 slots, 3 requests, at most 3 tokens", [6, 2, 8], 2, 3, "awkward"),
        case("4 slots, one request", [3], 4, 9, "awkward"),
        case("1 slot, 3 requests", [2, 1, 3], 1, 9, "awkward"),
        case("4 slots, 11 requests of 1 to 19 tokens, at most 15", drawn, 4, 15, "awkward"),
    ]


def _run_serve(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    rows = []

    def next_tokens(sequences: Any) -> Any:
        rows.append(len(sequences))
        drawn = []
        for tokens in sequences:
            request = inputs["requests"][tokens[0] - 100]
            drawn.append(request["text"][len(tokens) - len(request["prompt"])])
        return drawn

    prompts = [list(request["prompt"]) for request in inputs["requests"]]
    outputs, slots = answer(prompts, next_tokens, inputs["slots"], list(inputs["ends"]), inputs["most"])
    if prompts != [request["prompt"] for request in inputs["requests"]]:
        raise ValueError("`prompts` is an input, and the answer changed it; work on copies")
    return {
        "outputs": [[int(token) for token in tokens] for tokens in outputs],
        "slots": [[None if one is None else int(one) for one in row] for row in slots],
        "calls of next_tokens": len(rows),
        "texts given to next_tokens": sum(rows),
    }


def _expect_serve(inputs: Any) -> dict[str, Any]:
    outputs, slots = [], [[] for _ in range(inputs["slots"])]  # type: ignore[var-annotated]
    for request in inputs["requests"]:
        ends = [k for k, token in enumerate(request["text"]) if token in inputs["ends"]]
        outputs.append(request["text"][: min([*(k + 1 for k in ends), inputs["most"]])])
    steps = 0
    for first in range(0, len(outputs), inputs["slots"]):
        batch = [len(tokens) for tokens in outputs[first : first + inputs["slots"]]]
        steps += max(batch)
        for slot, row in enumerate(slots):
            busy = batch[slot] if slot < len(batch) else 0
            row += [first + slot] * busy + [None] * (max(batch) - busy)
    asked = {"calls of next_tokens": steps, "texts given to next_tokens": sum(map(len, outputs))}
    return {"outputs": outputs, "slots": slots, **asked}


_SERVE_BODY = """    outputs = [[] for _ in prompts]
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
    return outputs, slots"""


def _serve(*changes: tuple[str, str]) -> str:
    return f"def serve(prompts, next_tokens, num_slots, end_ids, max_tokens):\n{_changed(_SERVE_BODY, *changes)}\n"


_ALL = "            running = [r for r in running if outputs[r][-1] not in end_ids and len(outputs[r]) < max_tokens]\n"

_SERVE = Exercise(
    id="18.4",
    title="a batch that waits",
    answer="serve",
    kind="function",
    arguments=("prompts", "next_tokens", "num_slots", "end_ids", "max_tokens"),
    cases=_serve_cases,
    run=_run_serve,
    expected=_expect_serve,
    points={"small": 1, "awkward": 2},
    hints=Hints(
        question="Take {case}. In step 1 every slot is busy. Write down, step by step, who is still running, until the first "
        "batch is over.",
        rule="For each group of num_slots requests: as long as any of them runs, ask for one token for each that runs; note the "
        "slots of this step; append the tokens; keep those whose last token is no end token and that have fewer than max_tokens. "
        "When nobody runs, the next group begins.\n\n"
        "By hand, 2 slots and requests of 2, 4, 1 and 3 tokens: slot 0 is 0 0 - - 2 - -, slot 1 is 1 1 1 1 3 3 3.",
        code="""for first in range(0, len(prompts), ____):
    running = list(range(first, min(____, len(prompts))))
    while running:
        tokens = next_tokens([____ for r in running])
        for slot in range(num_slots):
            slots[slot].append(first + slot if ____ else None)
        for r, token in zip(running, tokens):
            ____
        running = [r for r in running if ____]""",
    ),
    mistakes=(
        Mistake(
            "finished rows still sampled",
            """def serve(prompts, next_tokens, num_slots, end_ids, max_tokens):
    outputs = [[] for _ in prompts]
    slots = [[] for _ in range(num_slots)]
    for first in range(0, len(prompts), num_slots):
        batch = list(range(first, min(first + num_slots, len(prompts))))
        done = set()
        while len(done) < len(batch):
            tokens = next_tokens([prompts[r] + outputs[r] for r in batch])
            for slot in range(num_slots):
                r = first + slot
                slots[slot].append(r if r in batch and r not in done else None)
            for r, token in zip(batch, tokens):
                outputs[r].append(token)
                if token in end_ids or len(outputs[r]) >= max_tokens:
                    done.add(r)
    return outputs, slots
""",
            "A request that has ended stays in its slot, but no token may be appended to it any more. What the model says after "
            "its end token is nobody's text.",
            "Request 0 has drawn its end token. What is appended to it in the next step?",
        ),
        Mistake(
            "finished rows still computed",
            """def serve(prompts, next_tokens, num_slots, end_ids, max_tokens):
    outputs = [[] for _ in prompts]
    slots = [[] for _ in range(num_slots)]
    for first in range(0, len(prompts), num_slots):
        batch = list(range(first, min(first + num_slots, len(prompts))))
        done = set()
        while len(done) < len(batch):
            tokens = next_tokens([prompts[r] + outputs[r] for r in batch])
            for slot in range(num_slots):
                r = first + slot
                slots[slot].append(r if r in batch and r not in done else None)
            for r, token in zip(batch, tokens):
                if r not in done:
                    outputs[r].append(token)
                    if token in end_ids or len(outputs[r]) >= max_tokens:
                        done.add(r)
    return outputs, slots
""",
            "The texts are right, and next_tokens was asked for requests that had ended: work that is thrown away. Ask only for "
            "those that run.",
            "How many sequences do you hand to next_tokens in the last step of the first batch?",
        ),
        Mistake(
            "a free slot filled at once",
            """def serve(prompts, next_tokens, num_slots, end_ids, max_tokens):
    outputs = [[] for _ in prompts]
    slots = [[] for _ in range(num_slots)]
    waiting, seats = list(range(len(prompts))), [None] * num_slots
    while waiting or any(r is not None for r in seats):
        for slot in range(num_slots):
            if seats[slot] is None and waiting:
                seats[slot] = waiting.pop(0)
        running = [r for r in seats if r is not None]
        tokens = next_tokens([prompts[r] + outputs[r] for r in running])
        for slot in range(num_slots):
            slots[slot].append(seats[slot])
        for r, token in zip(running, tokens):
            outputs[r].append(token)
            if token in end_ids or len(outputs[r]) >= max_tokens:
                seats[seats.index(r)] = None
    return outputs, slots
""",
            "This is better than what was asked for: it is continuous batching, the subject of lesson 19. Here a batch ends "
            "as a whole before the next one begins, so that you can measure what that wastes.",
            "When request 0 has ended, does its slot stay empty until the whole batch is over?",
        ),
        Mistake(
            "the batch ends with its first member",
            _serve((_ALL, _ALL + "            if len(running) < min(num_slots, len(prompts) - first): running = []\n")),
            "The batch goes on as long as *any* of its requests runs.",
            "Request 0 ends first. What happens to request 1?",
        ),
        Mistake(
            "one end token of several",
            _serve(("outputs[r][-1] not in end_ids", "outputs[r][-1] != end_ids[0]")),
            "There may be several end tokens, and any of them ends a request.",
            "Which tokens end a request here?",
        ),
        Mistake(
            "the last batch left out",
            _serve(("range(0, len(prompts), num_slots)", "range(0, len(prompts) // num_slots * num_slots, num_slots)")),
            "The last group may be smaller than the number of slots. It is served all the same, with empty slots.",
            "How many groups are needed for this many requests?",
        ),
        Mistake(
            "the last batch taken for a full one",
            _serve(("range(first, min(first + num_slots, len(prompts)))", "range(first, first + num_slots)")),
            "The last group may be smaller than the number of slots: there is no request for every seat.",
            "With 3 requests and 2 slots, which requests does the second batch have?",
        ),
        Mistake(
            "the end token thrown away",
            _serve(
                ("                outputs[r].append(token)\n",
                 "                if token in end_ids: ended.add(r)\n                else: outputs[r].append(token)\n"),
                ("    slots = [[]", "    ended = set()\n    slots = [[]"),
                ("outputs[r][-1] not in end_ids", "r not in ended"),
            ),
            "The token that ends a request is kept as its last one: whoever reads the tokens sees why it ended.",
            "With which token does request 0 end, and is it among your tokens?",
        ),
        Mistake(
            "the prompts alone",
            _serve(("[prompts[r] + outputs[r] for r in running]", "[prompts[r] for r in running]")),
            "The model goes on from what it is given. Without the tokens that it has drawn so far it draws the first one again "
            "and again.",
            "What does next_tokens get in step 2, and what should it get?",
        ),
        Mistake(
            "the prompts are written to",
            _serve(
                ("[prompts[r] + outputs[r] for r in running]", "[prompts[r] for r in running]"),
                ("outputs[r].append(token)", "outputs[r].append(token); prompts[r].append(token)"),
            ),
            "The lists belong to whoever called serve, and a second run would begin with the first one's stories. Join prompt and "
            "drawn tokens into a new list: prompts[r] + outputs[r].",
            "What is in prompts[0] after your function has returned?",
        ),
        Mistake(
            "those that still run move up",
            _serve(("first + slot if first + slot in running else None", "running[slot] if slot < len(running) else None")),
            "A request keeps its slot until the batch is over; only then does the picture show which seat stands empty.",
            "Request 0 has ended. In which slot does request 1 go on?",
        ),
        Mistake(
            "an empty slot leaves no entry",
            _serve(("                slots[slot].append(first + slot if first + slot in running else None)\n",
                    "                if first + slot in running: slots[slot].append(first + slot)\n")),
            "Each slot has an entry a step, and None where it is empty. Otherwise the lists are of different lengths, and nobody "
            "can tell which step an entry belongs to.",
            "How many steps are there, and how many entries has your slot 0?",
        ),
        Mistake(
            "one token too many",
            _serve(("len(outputs[r]) < max_tokens", "len(outputs[r]) <= max_tokens")),
            "A request that has max_tokens tokens is full.",
            "With max_tokens = 3 and 3 tokens, does the request still run?",
        ),
    ),
)  # fmt: skip


# ---------------- 18.5: the idle share, predicted


def _idle_share() -> float:
    """Idle slots in percent, when the lesson's requests are served by static batches."""
    lengths = [len(completion) for _, completion in stories()]
    steps = sum(max(lengths[first : first + SLOTS]) for first in range(0, len(lengths), SLOTS))
    return 100 * (1 - sum(lengths) / (SLOTS * steps))


_PREDICTION = Prediction(
    id="18.5",
    title="how many slots are idle?",
    quantities={"idle": Quantity("slots idle, of all slots and steps", _idle_share, "percent")},
    explains="A batch takes as many steps as its longest story, and all the shorter ones leave their slots empty until then. The "
    "more the lengths differ, the more is wasted; with one very long request among short ones nearly everything is. "
    "Measured on the completions that the model really wrote.",
    hints=Hints(
        question="In a batch of four with lengths 100, 40, 120 and 140, how many slot-steps are there, and how many are busy?",
        rule="Any number gets the credit. Idle is 1 - (sum of all lengths) / (slots x sum over the batches of the longest "
        "length).",
        code="idle = ____",
    ),
)


# ---------------- 18.6: bytes of a step


_LLAMA = {
    "hidden": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "head_dim": 64, "ffn": 8192, "vocab": 128_256,
}  # fmt: skip


def _bytes_cases(rng: np.random.Generator) -> list[Case]:
    def case(label: str, model: dict[str, int], batch: int, context: int, group: str) -> Case:
        return Case(label, {"model": model, "batch": batch, "context": context}, group)

    tiny = {"hidden": 192, "layers": 5, "heads": 6, "kv_heads": 2, "head_dim": 32, "ffn": 512, "vocab": 2048}
    odd = {
        "hidden": 576,
        "layers": 30,
        "heads": 9,
        "kv_heads": 3,
        "head_dim": 80,
        "ffn": 1536,
        "vocab": 49_152,
    }
    return [
        case("tiny-stories, one request of 100 tokens", tiny, 1, 100, "small"),
        case("Llama 3.2 1B, 32 requests of 8,192 tokens", _LLAMA, 32, 8192, "small"),
        case("Llama 3.2 1B, one request of 1 token", _LLAMA, 1, 1, "awkward"),
        case("another model, 7 requests of 300 tokens", odd, 7, 300, "awkward"),
    ]


def _run_bytes(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    weights, cache = answer(dict(inputs["model"]), inputs["batch"], inputs["context"])
    return {"weights": int(weights), "kv_cache": int(cache)}


def _expect_bytes(inputs: Any) -> dict[str, Any]:
    m = inputs["model"]
    q, kv = m["heads"] * m["head_dim"], m["kv_heads"] * m["head_dim"]
    shapes = [
        (q + 2 * kv, m["hidden"]),
        (m["hidden"], q),
        (2 * m["ffn"], m["hidden"]),
        (m["hidden"], m["ffn"]),
    ]
    matrices = m["layers"] * sum(rows * columns for rows, columns in shapes) + m["vocab"] * m["hidden"]
    cache = np.empty((2, m["layers"], inputs["context"], m["kv_heads"], m["head_dim"]), np.uint16).nbytes
    return {"weights": 2 * matrices, "kv_cache": inputs["batch"] * cache}


_BYTES_BODY = """    q, kv = m["heads"] * m["head_dim"], m["kv_heads"] * m["head_dim"]
    layer = (q + 2 * kv) * m["hidden"] + q * m["hidden"] + 3 * m["hidden"] * m["ffn"]
    weights = 2 * (m["layers"] * layer + m["vocab"] * m["hidden"])
    cache = 2 * 2 * m["layers"] * kv * context * batch
    return weights, cache"""


def _bytes(*changes: tuple[str, str]) -> str:
    return f"def step_bytes(m, batch, context):\n{_changed(_BYTES_BODY, *changes)}\n"


_BYTES = Exercise(
    id="18.6",
    title="what a step must read",
    answer="step_bytes",
    kind="function",
    arguments=("m", "batch", "context"),
    cases=_bytes_cases,
    run=_run_bytes,
    expected=_expect_bytes,
    points={"small": 1, "awkward": 1},
    hints=Hints(
        question="Take {case}. How many parameters has one layer's matrix that makes queries, keys and values? How often is it "
        "read in a step, with this batch?",
        rule="Weights, once for the whole batch, 2 bytes each: for each layer qkv (q + 2 kv) x hidden, the output projection "
        "q x hidden, and three feed-forward matrices of hidden x ffn; then vocab x hidden for the LM head. q is heads x head_dim, "
        "kv is kv_heads x head_dim. Cache, for each request: 2 (key and value) x 2 bytes x layers x kv x context.\n\n"
        "By hand: for Llama 3.2 1B a token's keys and values are 2 x 2 x 16 x 512 = 32,768 bytes.",
        code="""q, kv = ____, ____
layer = ____ * m["hidden"] + q * m["hidden"] + ____ * m["hidden"] * m["ffn"]
weights = 2 * (m["layers"] * layer + ____)
cache = ____ * m["layers"] * kv * context * ____
return weights, cache""",
    ),
    mistakes=(
        Mistake(
            "the weights once for each request",
            _bytes(("weights = 2 *", "weights = batch * 2 *")),
            "That is what serving them one by one would read. In a batch each weight is read once, and used for every row of the "
            "product: this is why batches pay.",
            "In the product of 32 rows with a matrix, how often must the matrix come from memory?",
        ),
        Mistake(
            "one cache for all",
            _bytes((" * context * batch", " * context")),
            "Each request attends to its own keys and values. They are not shared, so their bytes grow with the batch.",
            "Whose keys does request 5 read?",
        ),
        Mistake(
            "keys without values",
            _bytes(("cache = 2 * 2 *", "cache = 2 *")),
            "A token's cache holds a key and a value, each of 2 bytes a number.",
            "What is the second product of attention with?",
        ),
        Mistake(
            "query heads in the cache",
            _bytes(('cache = 2 * 2 * m["layers"] * kv', 'cache = 2 * 2 * m["layers"] * q')),
            "Keys and values have kv_heads heads, which several query heads share (lesson 12).",
            "How many KV heads has this model, and how many query heads?",
        ),
        Mistake(
            "no LM head",
            _bytes((' + m["vocab"] * m["hidden"])', ")")),
            "The last product, with the LM head, reads vocab x hidden numbers: for a small model a large part of all.",
            "Which matrix makes the logits, and how large is it?",
        ),
        Mistake(
            "numbers instead of bytes",
            _bytes(("weights = 2 *", "weights ="), ("cache = 2 * 2 *", "cache = 2 *")),
            "That counts parameters. Each is a bfloat16, of 2 bytes.",
            "How many bytes does one weight take?",
            variants=(_bytes(("weights = 2 *", "weights =")),),
        ),
        Mistake(
            "two matrices in the feed-forward layer",
            _bytes(("3 * m", "2 * m")),
            "There are three: gate, up and down (lesson 13).",
            "Which matrices does the feed-forward layer have?",
        ),
        Mistake(
            "the embedding read as a whole",
            _bytes((' + m["vocab"] * m["hidden"])', ' + 2 * m["vocab"] * m["hidden"])')),
            "The embedding is a table: a token reads one row of it, and that is too little to count. The LM head is a product, "
            "and reads all of its matrix.",
            "How many rows of the embedding does a step of this batch read?",
        ),
        Mistake(
            "hidden in the place of heads x head_dim",
            _bytes(('q, kv = m["heads"] * m["head_dim"]', 'q, kv = m["hidden"]')),
            "In many models heads x head_dim is the hidden size, but nothing demands it. Queries have heads x head_dim numbers.",
            "How large are heads x head_dim and hidden in this model?",
        ),
        Mistake(
            "float32",
            _bytes(("weights = 2 *", "weights = 4 *"), ("cache = 2 * 2 *", "cache = 4 * 2 *")),
            "Weights and cache are bfloat16: 2 bytes each.",
            "How many bytes has a bfloat16?",
        ),
    ),
)


# ---------------- pictures and measurements


def _timeline(answer: Any, cp: Any) -> Any:
    """The slots of the learner's own run on the model's stories."""
    texts = {prompt: completion for prompt, completion in stories()}
    prompts = list(texts)

    def next_tokens(sequences: Any) -> list[int]:
        drawn = []
        for tokens in map(tuple, sequences):
            prompt = next(one for one in prompts if tokens[: len(one)] == one)
            drawn.append(texts[prompt][len(tokens) - len(prompt)])
        return drawn

    _, slots = answer([list(prompt) for prompt in prompts], next_tokens, SLOTS, [2046, 2047], MOST)
    named = [[None if r is None else f"request {r}" for r in row] for row in slots]
    return figures.timeline(named, title=f"{len(prompts)} requests in {SLOTS} slots, static batches")


def _bytes_picture(answer: Any, cp: Any) -> Any:
    """Bytes a token over the batch size, by the learner's own function, for Llama 3.2 1B."""
    batches = 2 ** np.arange(9)

    def megabytes(context: int) -> list[float]:
        return [sum(answer(dict(_LLAMA), int(batch), context)) / batch / 1e6 for batch in batches]

    lines = {f"context {context:,}": megabytes(context) for context in (128, 1024, 8192)}
    return figures.error_lines(
        batches, lines, "requests in the batch", "MB read a token", log_x=True, log_y=True,
        title="Bytes that decoding one token must read, Llama 3.2 1B",
        subtitle="Weights are shared by the batch, the KV cache is not.",
    )  # fmt: skip


def _make_last(requests: int, hidden: int) -> Any:
    def make(answer: Any, cp: Any) -> Any:
        x = cp.zeros((requests * 16, hidden), np.uint16)
        starts = cp.asarray((np.arange(requests + 1) * 16).astype(np.int32))
        out = cp.empty((requests, hidden), np.uint16)
        return lambda: answer((requests,), (128,), (x, starts, out, np.int32(hidden)))

    return make


_WORK = Work(
    label="4,096 requests, H = 4,096",
    make=_make_last(4096, 4096),
    read_bytes=4096 * 4096 * 2 + 4 * 4096,
    write_bytes=4096 * 4096 * 2,
    small=_make_last(8, 512),
    small_read_bytes=8 * 512 * 2 + 4 * 8,
    small_write_bytes=8 * 512 * 2,
    small_label="8 requests, H = 512",
)

LESSON = Lesson(
    number="18",
    slug="static_batching",
    title="Static batching",
    part=4,
    minutes=60,
    exercises=(_PAD, _PACK, _LAST, _SERVE, _PREDICTION, _BYTES),
    engine=EngineCard(
        mistakes=(
            ("18.2", "positions run on"),
            ("18.2", "lengths instead of starts"),
            ("18.2", "positions from 1"),
        ),
        prompt="One dark night, Ella and her friend Leo heard a noise.",
        beside=("Once upon a time", "The sun was shining. Clover and her friend Rusty packed a basket"),
        note="Three requests run in one batch; the story of the third is shown. Your pack lays them side by side, in the prompts' pass "
        "and in each decode step.",
    ),
    pictures={"18.4": _timeline, "18.6": _bytes_picture},
    works={"18.3": _WORK},
)
