"""Lesson 14: the whole model, from token ids to the next one, and a wrong layer found by comparing."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tinyvllm_ref.bf16 import bf16_to_float, float_to_bf16
from tinyvllm_ref.course.exercise import (
    Case,
    EngineCard,
    Exercise,
    Hints,
    Lesson,
    Mistake,
    Tolerance,
    Work,
    with_changes,
)

from .lesson_13_feed_forward import layer_in_float64, random_layer, weights_of_layer

# ---------------- 14.1: the best of a block


def _best_cases(rng: np.random.Generator) -> list[Case]:
    def case(values: Any, indices: Any, label: str, group: str) -> Case:
        inputs = {"values": np.array(values, np.float32), "indices": np.array(indices, np.int32)}
        return Case(label, inputs, group)

    def drawn(blocks: int, threads: int, distinct: int, label: str) -> Case:
        """Few different numbers, so that many are equal, with the indices in no order."""
        values = rng.choice(rng.standard_normal(distinct) - 5, (blocks, threads))
        indices = np.stack([rng.permutation(10 * threads)[:threads] for _ in range(blocks)])
        return case(values, indices, label, "awkward")

    last = rng.standard_normal((1, 33)) - 9
    last[0, 32] = -1
    return [
        case([[1, 7, 3, 5]], [[0, 1, 2, 3]], "4 threads, all different", "small"),
        case([[-2, -2, -3, -2]], [[6, 1, 2, 9]], "4 threads, three equal", "small"),
        drawn(2, 64, 3, "2 blocks of 64, many equal"),
        case(last, [np.arange(33)[::-1]], "33 threads, the best in the last, with index 0", "awkward"),
        drawn(3, 100, 7, "3 blocks of 100"),
        case([[-np.inf, -np.inf]], [[5, 4]], "2 threads, both minus infinity", "awkward"),
        drawn(2, 1, 1, "2 blocks of 1"),
    ]


def _run_best(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    # Two calls in a row with the same scratch; every thread stores what it got from each.
    for name in ("beats", "block_best"):
        if name not in answer:
            raise ValueError(f"the text defines no function `{name}`")
    kernel = lab.cp.RawKernel(
        answer
        + """
extern "C" __global__ void call_twice(const float* values, const int* indices, int* best, int* best_again) {
    extern __shared__ Candidate scratch[];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    best[i] = block_best(Candidate{values[i], indices[i]}, scratch).index;
    best_again[i] = block_best(Candidate{-values[i], indices[i]}, scratch).index;
}
""",
        "call_twice",
    )
    blocks, threads = inputs["values"].shape
    values, indices = lab.input("values", inputs["values"]), lab.input("indices", inputs["indices"])
    best, again = lab.output((blocks, threads), "int32"), lab.output((blocks, threads), "int32")
    kernel((blocks,), (threads,), (values, indices, best, again), shared_mem=8 * threads)
    return {"best": lab.get(best), "best_again": lab.get(again)}


def _expect_best(inputs: Any) -> dict[str, Any]:
    """By sorting: larger values first, among equals the lower index."""

    def best(values: Any) -> Any:
        first = [np.lexsort((i, -v))[0] for v, i in zip(values, inputs["indices"], strict=True)]
        index = np.take_along_axis(inputs["indices"], np.array(first)[:, None], axis=1)
        return np.ascontiguousarray(np.broadcast_to(index, values.shape))

    return {"best": best(inputs["values"]), "best_again": best(-inputs["values"])}


_BEATS = "a.value > b.value || (a.value == b.value && a.index < b.index)"


def _best(
    beats: str = _BEATS,
    half: str = "(active + 1) / 2",
    fill: str = "    __syncthreads();\n",
    take: str = "scratch[t] = scratch[t + half];",
    result: str = "scratch[0]",
    last: str = "    __syncthreads();\n",
    round_end: str = "        __syncthreads();\n        active = half;\n",
    partner: str = "t + half < active && beats(scratch[t + half], scratch[t])",
    loop: str = "for (int active = blockDim.x; active > 1;)",
) -> str:
    return f'''BLOCK_BEST_CUDA = r"""
struct Candidate {{ float value; int index; }};
__device__ __forceinline__ bool beats(Candidate a, Candidate b) {{
    return {beats};
}}
__device__ __forceinline__ Candidate block_best(Candidate mine, Candidate* scratch) {{
    int t = threadIdx.x;
    scratch[t] = mine;
{fill}    {loop} {{
        int half = {half};
        if ({partner}) {take}
{round_end}    }}
    Candidate best = {result};
{last}    return best;
}}
"""
'''


def _in_a_tree(inputs: Any, outputs: Any, observed: Any) -> str | None:
    blocks, threads = inputs["values"].shape
    turns = observed.total("shared_requests") / (2 * blocks)
    if threads >= 64 and turns >= 4 * threads:
        return (
            f"The results are right, and each takes {turns:,.0f} turns at shared memory in a block of {threads}: the candidates are "
            "compared one after the other. Use the tree of lesson 06"
        )
    return None


_BEST = Exercise(
    id="14.1",
    title="the best of a block",
    answer="BLOCK_BEST_CUDA",
    kind="source",
    cases=_best_cases,
    run=_run_best,
    expected=_expect_best,
    points={"small": 1, "awkward": 1, "clean": 1},
    verify=_in_a_tree,
    hints=Hints(
        question="Take {case}. Which candidate has to win? Go through your tree by hand: who is compared with whom in the first round, "
        "and who stays?",
        rule="a beats b if its value is larger, or if the values are equal and its index is lower. The tree is block_sum's of lesson 06: "
        "in each round cell t + half is compared with cell t, and cell t keeps the one that wins. At the end every thread reads "
        "cell 0, and one more barrier makes the function safe to call again.\n\nBy hand, (-2, 6) (-2, 1) (-3, 2) (-2, 9): with half "
        "= 2, cell 0 keeps (-2, 6), cell 1 keeps (-2, 1); then (-2, 1) beats (-2, 6).",
        code="""__device__ __forceinline__ bool beats(Candidate a, Candidate b) {
    return a.value ____ b.value || (a.value == b.value && ____);
}
...
scratch[t] = ____;
____;
for (int active = blockDim.x; active > 1;) {
    int half = (active + 1) / 2;
    if (t + half < ____ && beats(____, ____)) scratch[t] = ____;
    ____;
    active = half;
}
Candidate best = ____;
____;
return best;""",
    ),
    mistakes=(
        Mistake(
            "equal values: whoever was there first stays",
            _best(beats="a.value > b.value"),
            "Cell t need not hold the lower index: threads take columns a block's width apart, so a later thread may have an earlier "
            "column. Among equal values the lower index has to win, and must be asked for.",
            "Among the candidates with the same value, does the one in the lower cell always have the lower index?",
        ),
        Mistake(
            "part that is no power of two dropped",
            _best(half="active / 2"),
            "Halving rounds down: with 33 candidates, 16 go on and the last is lost. Round up, and compare only where there is a "
            "partner.",
            "With 33 threads, half is 16. Who looks at cell 32?",
            variants=(
                _best(
                    half="stride",
                    loop="for (int stride = blockDim.x / 2; stride > 0; stride /= 2)",
                    partner="t < half && beats(scratch[t + half], scratch[t])",
                    round_end="        __syncthreads();\n",
                ),
            ),
        ),
        Mistake(
            "equal values: the later one wins",
            _best(beats="a.value >= b.value"),
            "With >= a candidate is pushed out by its equal. The contract says: the lowest index.",
            "Of two candidates with the same value, which one does yours keep?",
        ),
        Mistake(
            "equal values: the higher index wins",
            _best(beats="a.value > b.value || (a.value == b.value && a.index > b.index)"),
            "The contract says the *lowest* index, as NumPy's argmax has it: the comparison of indices is the wrong way round.",
            "Of two candidates with the same value, which index should come out?",
        ),
        Mistake(
            "the smallest wins",
            _best(beats="a.value < b.value || (a.value == b.value && a.index < b.index)"),
            "a beats b if its value is larger, and cell t takes its partner's candidate if that one beats its own.",
            "What does your function give for 1, 7, 3 and 5?",
            variants=(_best(partner="t + half < active && beats(scratch[t], scratch[t + half])"),),
        ),
        Mistake(
            "only the value goes on",
            _best(take="scratch[t].value = scratch[t + half].value;"),
            "A candidate is a value and its index, and both must go along. Here the winner's value stands beside the loser's index.",
            "After the first round, whose index is in cell 0?",
        ),
        Mistake(
            "no barrier after filling scratch",
            _best(fill=""),
            "The first round reads cells that other threads fill, and these may not have come so far.",
            "What makes sure that scratch[t + half] is filled when thread t reads it?",
        ),
        Mistake(
            "no barrier between the rounds",
            _best(round_end="        active = half;\n"),
            "A round reads what the round before it has written, and the last one is read by every thread. Without a barrier some are "
            "a round ahead of others.",
            "In the second round, who has written the cell that thread 0 reads?",
        ),
        Mistake(
            "the rounds' barrier only for threads with a partner",
            _best(
                partner="t + half < active",
                take="{\n            if (beats(scratch[t + half], scratch[t])) scratch[t] = scratch[t + half];\n"
                "            __syncthreads();\n        }",
                round_end="        active = half;\n",
            ),
            "A barrier waits for every thread of the block: it stands after the if, where all of them pass.",
            "In the first round, which threads come to your barrier?",
        ),
        Mistake(
            "only thread 0 gets the result",
            _best(result="scratch[t]"),
            "Cell 0 alone holds the winner of all; every thread must read that one.",
            "After the tree, what is in scratch[1]?",
            variants=(_best(result="t == 0 ? scratch[0] : mine"),),
        ),
        Mistake(
            "not safe to call twice",
            _best(last=""),
            "A thread that is called again writes scratch[0] before a slower one has read the result. One more barrier after reading "
            "makes the function safe.",
            "Thread 0 returns and is called again. What does it write, and who still needs the old value?",
        ),
    ),
)

# ---------------- 14.2: argmax, the part


def _argmax_cases(rng: np.random.Generator) -> list[Case]:
    def case(rows: int, vocab: int, group: str, told: str = "", label: str = "") -> Case:
        logits = rng.standard_normal((rows, vocab)).astype(np.float32) * 3
        if told == "negative":
            logits -= 100
        if told == "ties":
            logits = np.minimum(np.round(logits), 4)
            logits[0] = 4
        if told == "last":
            logits[:, -1] = 50
        name = label or f"{rows} row{'s' if rows > 1 else ''} of {vocab:,}"
        words = {"negative": ", all negative", "ties": ", many equal", "last": ", the last is the largest"}
        return Case(name + words.get(told, ""), {"logits": logits}, group)

    return [
        Case("1 row of 6", {"logits": np.array([[-3, -1, -4, -1, -5, -9]], np.float32)}, "small"),
        case(3, 7, "small", "last"),
        case(2, 700, "awkward", "negative"),
        case(2, 2048, "awkward", "ties"),
        case(1, int(rng.integers(5000, 6000)), "awkward", "last", "1 row of some 5,500"),
        case(1, 40_000, "awkward", "last"),
        case(33, 1, "awkward", "negative"),
    ]


def _run_argmax(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    logits = lab.input("logits", inputs["logits"])
    out = lab.output(len(inputs["logits"]), "int32")
    return {"out": lab.returned(answer(logits, out), out)}


def _expect_argmax(inputs: Any) -> dict[str, Any]:
    return {"out": inputs["logits"].argmax(axis=1).astype(np.int32)}


def _many_blocks(inputs: Any, outputs: Any, observed: Any) -> str | None:
    rows, vocab = inputs["logits"].shape
    if not observed.launches:
        return "The tokens are right, and no kernel of yours was launched: the search is to be a kernel"
    blocks = max(int(np.prod(report.grid)) for report in observed.launches)
    if vocab >= 5000 and blocks < 4 * rows:
        return (
            f"The tokens are right, and a row of {vocab:,} is searched by {blocks // rows or 1} block. A card has many "
            "multiprocessors, and a decode step few rows: cut the row into parts"
        )
    return None


_ARGMAX_WRAPPER = """

def argmax(logits, out):
    rows, vocab = logits.shape
    parts = -(-vocab // PART)
    values, indices = cp.empty((rows, parts), np.float32), cp.empty((rows, parts), np.int32)
    first = (logits, values, indices, np.int32(vocab), np.int32(PART))
    argmax_parts((parts, rows), (THREADS,), first, shared_mem=8 * THREADS)
    argmax_merge((rows,), (THREADS,), (values, indices, out, np.int32(parts)), shared_mem=8 * THREADS)
    return out
"""


def _argmax(
    start: str = "MINUS_INFINITY, vocab",
    end: str = "min(vocab, begin + part)",
    column: str = "c",
    compare: str = "beats(one, best)",
    loop: str = "begin + threadIdx.x",
    merge_loop: str = "for (int p = threadIdx.x; p < parts; p += blockDim.x)",
    row: str = "(size_t)blockIdx.x * parts",
    answer: str = "best.index",
    merge_start: str = "MINUS_INFINITY, 2147483647",
    index: str = "indices[row + p]",
    every: str = "for (int c = {}; c < end; c += blockDim.x)",
    joined: str = "    best = block_best(best, scratch);\n",
    merged: str = "    best = block_best(best, scratch);\n",
) -> str:
    return f'''THREADS, PART = 64, 512
argmax_parts = cp.RawKernel(BLOCK_BEST_CUDA + r"""
#define MINUS_INFINITY __uint_as_float(0xFF800000u)
extern "C" __global__ void argmax_parts(const float* logits, float* values, int* indices, int vocab, int part) {{
    extern __shared__ Candidate scratch[];
    const float* row = logits + (size_t)blockIdx.y * vocab;
    int begin = blockIdx.x * part, end = {end};
    Candidate best = {{{start}}};
    {every.format(loop)} {{
        Candidate one = {{row[c], {column}}};
        if ({compare}) best = one;
    }}
{joined}    if (threadIdx.x == 0) {{
        values[blockIdx.y * gridDim.x + blockIdx.x] = best.value;
        indices[blockIdx.y * gridDim.x + blockIdx.x] = best.index;
    }}
}}
""", "argmax_parts")
argmax_merge = cp.RawKernel(BLOCK_BEST_CUDA + r"""
#define MINUS_INFINITY __uint_as_float(0xFF800000u)
extern "C" __global__ void argmax_merge(const float* values, const int* indices, int* out, int parts) {{
    extern __shared__ Candidate scratch[];
    size_t row = {row};
    Candidate best = {{{merge_start}}};
    {merge_loop} {{
        Candidate one = {{values[row + p], {index}}};
        if (beats(one, best)) best = one;
    }}
{merged}    if (threadIdx.x == 0) out[blockIdx.x] = {answer};
}}
""", "argmax_merge")
{_ARGMAX_WRAPPER}'''


_ARGMAX = Exercise(
    id="14.2",
    title="argmax, the part",
    answer="argmax",
    kind="function",
    arguments=("logits", "out"),
    builds_on=("14.1",),
    cases=_argmax_cases,
    run=_run_argmax,
    expected=_expect_argmax,
    points={"small": 1, "awkward": 2, "clean": 1},
    verify=_many_blocks,
    makes={"argmax": "argmax"},
    file="argmax.py",
    hints=Hints(
        question="Take {case}. How many parts are there, which columns does the last one have, and what does each part put into values "
        "and indices?",
        rule="Pass 1: block (part, row) looks at the columns from part * PART up to the next part or the end of the row, whichever comes "
        "first. Each thread begins with something that every real candidate beats, minus infinity with an index beyond the row. Pass "
        "2: a block a row does the same with the parts' winners; the index is already that of the column.\n\nBy hand, PART = 4 "
        "and the row -3 -1 -4 -1 -5 -9: part 0 gives (-1, 1), part 1 gives (-5, 4); the merge gives 1.",
        code="""// pass 1
int begin = ____, end = min(____, ____);
Candidate best = {MINUS_INFINITY, vocab};
for (int c = begin + ____; c < end; c += ____) {
    Candidate one = {row[c], ____};
    if (beats(____, ____)) best = one;
}
best = block_best(best, scratch);
// pass 2
Candidate best = {MINUS_INFINITY, ____};
for (int p = threadIdx.x; p < ____; p += blockDim.x) {
    Candidate one = {values[row + p], ____};
    if (beats(one, best)) best = one;
}""",
    ),
    mistakes=(
        Mistake(
            "the search begins with 0",
            _argmax(start="0.0f, 0"),
            "Logits may all be negative. Then nothing beats a value of 0 that was never there, and its index comes out. Begin with minus "
            "infinity.",
            "If all numbers of a row are negative, which one is larger than your first best?",
            variants=(_argmax(start="0.0f, vocab"), _argmax(merge_start="0.0f, 0")),
        ),
        Mistake(
            "the last part runs into the next row",
            _argmax(end="begin + part"),
            "The last part of a row is mostly shorter than the others. Without a limit it reads on: in the next row, or beyond the array.",
            "With 7 columns and parts of 512, where does the first part end?",
        ),
        Mistake(
            "the index counts from the part's beginning",
            _argmax(column="c - begin"),
            "The winner of part 3 is not in column 0 to PART - 1: pass 2 does not know where the part began, so pass 1 has to store the "
            "column in the row.",
            "The largest lies in the second part. Which number is stored for it?",
        ),
        Mistake(
            "the part's number comes out",
            _argmax(index="p"),
            "The merge compares the parts' winners, and must pass on the column that each of them stored.",
            "What are the numbers in indices, and where does your second kernel read them?",
        ),
        Mistake(
            "only as many parts as threads",
            _argmax(
                merge_loop="int p = threadIdx.x;\n    if (p < parts)",
            ),
            "40,000 columns are 79 parts, and the block has 64 threads. A strided loop takes any number.",
            "How many parts are there, and how many threads does the second kernel have?",
        ),
        Mistake(
            "one column a thread",
            _argmax(every="int c = {};\n    if (c < end)"),
            "A part has more columns than the block has threads: with one column each, most of them are looked at by nobody.",
            "How many columns has a part, and how many threads search it?",
        ),
        Mistake(
            "thread 0's best taken for the part's",
            _argmax(joined=""),
            "After the loop every thread has a best of its own. `block_best` finds the best among them, and thread 0 stores that one.",
            "After the loop, which columns has thread 0 looked at?",
            variants=(_argmax(joined="", merged=""),),
        ),
        Mistake(
            "thread 0's best taken for the row's",
            _argmax(merged=""),
            "After the loop of pass 2 every thread has the best of some parts. `block_best` finds the best among them.",
            "In pass 2, how many parts has thread 0 looked at?",
        ),
        Mistake(
            "every row reads the first row's parts",
            _argmax(row="0"),
            "values and indices have a row of parts for each row of logits.",
            "Where in values do the parts of row 1 begin?",
        ),
        Mistake(
            "equal values: the later column stays",
            _argmax(compare="one.value >= best.value"),
            "Inside of a thread's loop too, the lower index has to win among equals: use beats, or >.",
            "In the row -3 -1 -4 -1 -5 -9, which of the two -1 should come out?",
        ),
        Mistake(
            "one column too many between the threads",
            _argmax(loop="begin + threadIdx.x + 1"),
            "Threads count from 0. The first column of every part is looked at by nobody.",
            "Which thread looks at column 0?",
        ),
    ),
)

# ---------------- 14.3: forward, the part


def _forward_cases(rng: np.random.Generator) -> list[Case]:
    def case(lengths: list[int], rows: list[int], group: str, tied: bool = True, label: str = "") -> Case:
        sizes: dict[str, Any] = {
            "vocab_size": 40,
            "hidden_size": 24,
            "intermediate_size": 20,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 6,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": tied,
        }
        hidden, vocab = sizes["hidden_size"], sizes["vocab_size"]
        weights: dict[str, Any] = {
            "embed_tokens": float_to_bf16(rng.standard_normal((vocab, hidden)).astype(np.float32)),
            "norm": float_to_bf16((1 + 0.5 * rng.standard_normal(hidden)).astype(np.float32)),
        }
        if not tied:
            weights["lm_head"] = float_to_bf16(rng.standard_normal((vocab, hidden)).astype(np.float32))
        for layer in range(sizes["num_hidden_layers"]):
            weights |= random_layer(rng, layer, sizes)
        inputs = {
            "sizes": sizes,
            "weights": weights,
            "inv_freq": (10000.0 ** (-np.arange(0, 6, 2) / 6)).astype(np.float32),
            "ids": rng.integers(0, vocab, sum(lengths)).astype(np.int32),
            "lengths": lengths,
            "logits_rows": np.array(rows, np.int32),
        }
        return Case(label, inputs, group)

    return [
        case([3], [2], "one", True, "3 tokens, logits of the last"),
        case([1], [0], "one", True, "1 token"),
        case([4, 2], [3, 5], "several", True, "2 requests of 4 and 2 tokens"),
        case([5], [4], "several", False, "5 tokens, an LM head of its own"),
        case([2, 3, 1], [1, 2, 3, 4, 5], "several", False, "3 requests, logits of five tokens"),
        case([3], [], "several", True, "3 tokens, no logits wanted"),
        case([70], [69], "several", True, "70 tokens"),
    ]


def _run_forward(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    from types import SimpleNamespace

    import numpy as np

    sizes, lengths, tokens = dict(inputs["sizes"]), inputs["lengths"], len(inputs["ids"])
    sizes["q_size"] = sizes["num_attention_heads"] * sizes["head_dim"]
    sizes["kv_size"] = sizes["num_key_value_heads"] * sizes["head_dim"]

    class Weights(dict):  # type: ignore[type-arg]
        config = SimpleNamespace(**sizes)

    weights: Any = Weights({name: lab.input(name, values) for name, values in inputs["weights"].items()})
    weights["inv_freq"] = lab.input("inv_freq", inputs["inv_freq"])
    weights.lm_head = weights["embed_tokens" if sizes["tie_word_embeddings"] else "lm_head"]
    request = np.repeat(np.arange(len(lengths)), lengths)
    seen = (request[:, None] == request[None, :]) & np.tri(tokens, dtype=bool)
    positions = np.concatenate([np.arange(length) for length in lengths]).astype(np.int32)
    asked: list[int] = []

    def attend(layer: Any, q: Any, k: Any, v: Any, out: Any) -> Any:
        asked.append(int(layer))
        times = q.shape[1] // k.shape[1]
        keys, values = (a.get().astype(np.float64).repeat(times, axis=1) for a in (k, v))
        scores = np.einsum("nhd,mhd->hnm", q.get().astype(np.float64), keys) * q.shape[2] ** -0.5
        scores[:, ~seen] = -np.inf
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        u = np.einsum("hnm,mhd->nhd", shares, values).astype(np.float32).view(np.uint32)
        out.set(((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16))
        return out

    attend.positions = lab.input("positions", positions)  # type: ignore[attr-defined]
    ends = np.cumsum(lengths)
    given = SimpleNamespace(
        ids=lab.input("ids", inputs["ids"]),
        positions=attend.positions,  # type: ignore[attr-defined]
        query_starts=lab.input("query_starts", np.concatenate([[0], ends]).astype(np.int32)),
        logits_rows=lab.input("logits_rows", inputs["logits_rows"]),
    )
    # How many rows go through the LM head: linear is told.
    names = getattr(answer, "__globals__", {"linear": None})
    plain, rows = names["linear"], []

    def linear(x: Any, w: Any, out: Any) -> Any:
        if w is weights.lm_head:
            rows.append(len(x))
        return plain(x, w, out)

    names["linear"] = linear
    try:
        logits = lab.get(answer(given, weights, attend), "what forward returned")
    finally:
        names["linear"] = plain
    return {"layers": asked, "logits": logits, "rows through the LM head": sum(rows) if rows else len(logits)}


def _expect_forward(inputs: Any) -> dict[str, Any]:
    sizes, weights, lengths = inputs["sizes"], inputs["weights"], inputs["lengths"]
    tokens = len(inputs["ids"])
    stream = bf16_to_float(weights["embed_tokens"]).astype(np.float64)[inputs["ids"]]
    request = np.repeat(np.arange(len(lengths)), lengths)
    seen = (request[:, None] == request[None, :]) & np.tri(tokens, dtype=bool)
    positions = np.concatenate([np.arange(length) for length in lengths])
    nothing = np.empty((0, sizes["num_key_value_heads"], sizes["head_dim"]))
    for layer in range(sizes["num_hidden_layers"]):
        stream, x = layer_in_float64(
            stream,
            weights_of_layer(weights, layer),
            sizes,
            inputs["inv_freq"],
            positions,
            seen,
            nothing,
            nothing,
        )
        stream = stream + x
    rms = np.sqrt((stream**2).mean(-1, keepdims=True) + sizes["rms_norm_eps"])
    normed = (stream / rms * bf16_to_float(weights["norm"])).astype(np.float32)
    rows = bf16_to_float(float_to_bf16(normed)).astype(np.float64)[inputs["logits_rows"]]
    head = bf16_to_float(weights["embed_tokens" if sizes["tie_word_embeddings"] else "lm_head"])
    return {
        "layers": list(range(sizes["num_hidden_layers"])),
        "logits": (rows @ head.astype(np.float64).T).astype(np.float32),
        "rows through the LM head": len(rows),
    }


_FORWARD_TEXT = """def forward(inputs, weights, attend):
    config, tokens = weights.config, len(inputs.ids)
    residual = cp.empty((tokens, config.hidden_size), np.float32)
    x = cp.empty((tokens, config.hidden_size), np.float32)
    embedding(inputs.ids, weights["embed_tokens"], residual)
    for layer in range(config.num_hidden_layers):
        decoder_layer(x, residual, weights, layer, attend)
    h = cp.empty((tokens, config.hidden_size), np.uint16)
    add_rms_norm(x, residual, weights["norm"], config.rms_norm_eps, h)
    rows = h[inputs.logits_rows]
    logits = cp.empty((len(rows), config.vocab_size), np.float32)
    return linear(rows, weights.lm_head, logits)
"""


def _forward(*changes: tuple[str, str]) -> str:
    """The whole answer for 14.3, with some things exchanged."""
    text = _FORWARD_TEXT
    return with_changes(text, changes)


_FINAL = 'add_rms_norm(x, residual, weights["norm"], config.rms_norm_eps, h)'
_LOOP = "        decoder_layer(x, residual, weights, layer, attend)\n"

_FORWARD = Exercise(
    id="14.3",
    title="the forward pass, the part",
    answer="forward",
    kind="function",
    arguments=("inputs", "weights", "attend"),
    uses=("embedding", "rms_norm", "add_rms_norm", "linear", "decoder_layer"),
    cases=_forward_cases,
    run=_run_forward,
    expected=_expect_forward,
    points={"one": 1, "several": 3},
    tolerance=Tolerance(
        3e-2,
        0.15,
        "a BF16 value may round the other way at four places of each of three layers; logits are about 5",
    ),
    makes={"forward": "forward"},
    file="forward.py",
    hints=Hints(
        question="Take {case}. What is in residual, and what in x, after the embedding? And after the last layer? Which rows of the "
        "result are wanted?",
        rule="The embedding makes the stream: it goes to residual. Each layer takes x and residual. After the last layer x holds what "
        "its feed-forward has computed, so the final norm is add_rms_norm. Then the rows of inputs.logits_rows alone go through the LM "
        "head, weights.lm_head, which is already the right one, tied or not.\n\nBy hand, two requests of 4 and 2 tokens: the rows "
        "are 0 to 3 and 4 to 5, and logits_rows = 3 5.",
        code="""embedding(inputs.ids, weights["embed_tokens"], ____)
for layer in range(____):
    decoder_layer(____, ____, weights, layer, attend)
h = cp.empty((tokens, config.hidden_size), np.uint16)
____(x, residual, weights["norm"], config.rms_norm_eps, h)
rows = h[____]
logits = cp.empty((len(rows), ____), np.float32)
return linear(rows, ____, logits)""",
    ),
    mistakes=(
        Mistake(
            "the last layer never added",
            _forward((_FINAL, _FINAL.replace("add_rms_norm(x, ", "rms_norm("))),
            "After the last layer x holds what its feed-forward has computed, and nobody has added it. The final norm has to do it, as "
            "the norms of the layers do.",
            "What is in x when the loop ends?",
        ),
        Mistake(
            "the norm of x alone",
            _forward((_FINAL, _FINAL.replace("add_rms_norm(x, residual", "rms_norm(x"))),
            "x is what the last feed-forward has computed. The final norm reads the whole stream, x added.",
            "Which array holds what all layers before have found?",
        ),
        Mistake(
            "norm skipped",
            _forward(
                (
                    _FINAL,
                    "residual += x\n    bits = residual.view(np.uint32)\n    h[...] = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)"
                    ".astype(np.uint16)",
                )
            ),
            "The LM head was trained on the normed stream. The largest logit may well be the same; how sure the model is of it is not.",
            "Between the last layer and the LM head, what happens to the size of the stream?",
        ),
        Mistake(
            "the norm put in the place of the stream",
            _forward(
                (
                    "    for layer",
                    "    h = cp.empty((tokens, config.hidden_size), np.uint16)\n    for layer",
                ),
                (
                    _LOOP,
                    _LOOP
                    + f"        {_FINAL}\n        residual[...] = (h.astype(np.uint32) << 16).view(np.float32)\n"
                    + "        x.fill(0)\n",
                ),
            ),
            "The stream is normed once, at the very end, and what is normed is a copy. Between the layers it stays as it is: each layer "
            "has norms of its own.",
            "How many norms with the weight `norm` does a model have?",
        ),
        Mistake(
            "all rows through the LM head, then those wanted",
            _forward(
                ("    rows = h[inputs.logits_rows]\n", "    rows = h\n"),
                ("weights.lm_head, logits)", "weights.lm_head, logits)[inputs.logits_rows]"),
            ),
            "The logits are right, and most of the largest product of all was for nothing. Take the rows before it.",
            "Of a prompt of 1,000 tokens, how many rows does your product compute, and how many are kept?",
        ),
        Mistake(
            "the table's bits taken for numbers",
            _forward(
                (
                    'embedding(inputs.ids, weights["embed_tokens"], residual)',
                    'residual[...] = weights["embed_tokens"][inputs.ids]',
                )
            ),
            "The table holds BF16 as 16-bit integers: copied, the bits of 1.0 become 16256.0. `embedding` takes the rows and turns "
            "the bits into the numbers that they stand for.",
            "Which dtype has the table, and which the stream?",
        ),
        Mistake(
            "logits of every position",
            _forward(("    rows = h[inputs.logits_rows]\n", "    rows = h\n")),
            "The LM head is the largest product of all, and only the rows of inputs.logits_rows are wanted: of a prompt, the last.",
            "How many rows does the caller ask for?",
        ),
        Mistake(
            "always the last row",
            _forward(("h[inputs.logits_rows]", "h[-1:]")),
            "Several requests lie one after the other, and each has a last token. inputs.logits_rows says which rows are wanted.",
            "With two requests, in which rows are their last tokens?",
        ),
        Mistake(
            "always the embedding table",
            _forward(("weights.lm_head", 'weights["embed_tokens"]')),
            "Many models have tied embeddings, and then the two are the same. Others have an LM head of their own: weights.lm_head is "
            "right in both cases.",
            "Does the model of this case have tied embeddings?",
        ),
        Mistake(
            "LM head transposed",
            _forward(("weights.lm_head, logits", "cp.ascontiguousarray(weights.lm_head.T), logits")),
            "The table is (V, H): a row for each token, just what linear wants, for it multiplies by w^T. As the LM head it is used as it "
            "lies.",
            "linear(x, w, out) wants w as (outputs, inputs). What is the shape of the table?",
            variants=(_forward(("weights.lm_head, logits", "weights.lm_head.T, logits")),),
        ),
        Mistake(
            "one layer too few",
            _forward(("range(config.num_hidden_layers)", "range(config.num_hidden_layers - 1)")),
            "Layers count from 0: range(n) gives all n of them.",
            "Which layers does your loop run?",
        ),
        Mistake(
            "embedding put into x",
            _forward(('weights["embed_tokens"], residual)', 'weights["embed_tokens"], x)')),
            "The embedding is the stream as it begins. Layer 0 reads residual, and does not read x.",
            "Which of the two arrays does layer 0 read?",
        ),
        Mistake(
            "x added once more",
            _forward((f"    {_FINAL}", f"    residual += x\n    {_FINAL}")),
            "add_rms_norm adds x to the stream itself; added before as well, it counts twice.",
            "What does add_rms_norm do before it norms?",
        ),
    ),
)

# ---------------- 14.4: where two runs first differ


_STEPS = ("embedding", "qkv", "attention", "o_proj", "norm")  # not in the order of the alphabet


def _difference_cases(rng: np.random.Generator) -> list[Case]:
    def run(sizes: list[float]) -> dict[str, Any]:
        return {
            name: (rng.standard_normal((3, 4)) * size).astype(np.float32)
            for name, size in zip(_STEPS, sizes, strict=False)
        }

    def rounding(arrays: dict[str, Any]) -> dict[str, Any]:
        return {
            name: (values * (1 + 0.004 * rng.standard_normal(values.shape))).astype(np.float32)
            for name, values in arrays.items()
        }

    def case(
        label: str, group: str, sizes: list[float], faults: dict[int, float], plant: str = "noise"
    ) -> Case:
        golden = run(sizes)
        for values in list(golden.values())[2:]:  # a number near 0 has a large relative error of its own
            values[0, 0] = 1e-7 * float(np.abs(values).max())
        mine = rounding(golden)
        for values in list(mine.values())[2:]:
            values[0, 0] += 1e-4 * float(np.abs(values).max())
        mine[_STEPS[0]] = golden[_STEPS[0]].copy()  # as the embedding: what is only looked up is the same
        for step, share in faults.items():
            values = mine[_STEPS[step]]
            if plant == "nan":
                values[1, 2] = np.nan
            elif plant == "balanced":
                values += np.float32(share * sizes[step]) * np.where(np.arange(12) % 2, 1, -1).reshape(3, 4)
            else:
                noise = rng.standard_normal(values.shape)
                values += (noise * share * np.linalg.norm(values) / np.linalg.norm(noise)).astype(np.float32)
        return Case(label, {"mine": mine, "golden": golden, "tolerance": 0.03}, group)

    return [
        case("4 steps, from attention on wrong", "small", [1, 1, 1, 1], {2: 0.5, 3: 0.5}),
        case("4 steps, only rounding", "small", [1, 1, 1, 1], {}),
        case("a later step is further off", "awkward", [1, 1, 1, 1, 1], {1: 0.1, 2: 0.2, 3: 0.6, 4: 1.5}),
        case("steps of many sizes, qkv is wrong", "awkward", [0.001, 0.002, 300, 2], {1: 0.6, 3: 0.05}),
        case("steps of many sizes, only rounding", "awkward", [0.001, 1, 300, 2], {}),
        case("a NaN in qkv", "awkward", [1, 1, 1], {1: 1, 2: 1}, "nan"),
        case("errors up and down in qkv", "awkward", [1, 1, 1], {1: 0.2}, "balanced"),
    ]


def _run_difference(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    return {"first": answer(inputs["mine"], inputs["golden"], inputs["tolerance"])}


def _expect_difference(inputs: Any) -> dict[str, Any]:
    for name, wanted in inputs["golden"].items():
        off = inputs["mine"][name].astype(np.float64) - wanted
        if not np.linalg.norm(off) / np.linalg.norm(wanted.astype(np.float64)) <= inputs["tolerance"]:
            return {"first": name}
    return {"first": None}


def _difference(
    error: str = "np.linalg.norm(mine[name] - golden[name]) / np.linalg.norm(golden[name])",
    test: str = "not error <= tolerance",
) -> str:
    return f"""def first_difference(mine, golden, tolerance):
    for name in golden:
        error = {error}
        if {test}:
            return name
    return None
"""


_DIFFERENCE = Exercise(
    id="14.4",
    title="where two runs first differ",
    answer="first_difference",
    kind="function",
    arguments=("mine", "golden", "tolerance"),
    cases=_difference_cases,
    run=_run_difference,
    expected=_expect_difference,
    points={"small": 1, "awkward": 2},
    hints=Hints(
        question="Take {case}. For each step in order: how large is mine - golden, as a whole, and how large is golden? Which quotient "
        "is the first that is too large?",
        rule="The relative error of an array is |mine - golden| / |golden|, where |a| is the root of the sum of all squares "
        "(np.linalg.norm). Go through the names in golden's order and return the first whose error is above the tolerance, or None. "
        "Every comparison with NaN is False, so ask `not error <= tolerance`.",
        code="""for name in golden:
    error = np.linalg.norm(____) / np.linalg.norm(____)
    if not ____ <= ____:
        return ____
return ____""",
    ),
    mistakes=(
        Mistake(
            "NaN passes",
            _difference(test="error > tolerance"),
            "NaN > tolerance is False, like every comparison with NaN. `not error <= tolerance` catches it.",
            "What does Python give for float('nan') > 0.03?",
        ),
        Mistake(
            "the largest difference, not the first",
            """def first_difference(mine, golden, tolerance):
    errors = {name: np.linalg.norm(mine[name] - golden[name]) / np.linalg.norm(golden[name]) for name in golden}
    worst = max(errors, key=errors.get)
    return worst if not errors[worst] <= tolerance else None
""",
            "An error grows as it goes on through the model, so the largest is mostly near the end. The fault is where it begins.",
            "Two steps are wrong. Which of them can be the consequence of the other?",
        ),
        Mistake(
            "the last that differs",
            """def first_difference(mine, golden, tolerance):
    found = None
    for name in golden:
        if not np.linalg.norm(mine[name] - golden[name]) / np.linalg.norm(golden[name]) <= tolerance:
            found = name
    return found
""",
            "What comes after the fault differs as well, since it was computed from it. Return at the first one.",
            "When your loop has found the first one, what does it do with the next?",
        ),
        Mistake(
            "None after the first step",
            _difference().replace("    return None", "        return None"),
            "A return ends the function, the loop with it: this one is reached in the first round already. Only after the loop is it "
            "known that nothing differs.",
            "When the first step agrees, which line runs next?",
        ),
        Mistake(
            "in the order of the alphabet",
            """def first_difference(mine, golden, tolerance):
    for name in sorted(golden):
        if not np.linalg.norm(mine[name] - golden[name]) / np.linalg.norm(golden[name]) <= tolerance:
            return name
    return None
""",
            "The dicts are in the order of computation, and that is what `first` means. Sorted by name, final_norm comes before layers.0.",
            "In which order were the steps computed, and in which do you look at them?",
        ),
        Mistake(
            "the absolute error",
            _difference("np.abs(mine[name] - golden[name]).max()"),
            "Activations have many sizes: in one place 0.01 is nothing, in another it is everything. Divide by the size of what is "
            "expected.",
            "How large are the numbers of each step in this case?",
            variants=(
                _difference("np.linalg.norm(mine[name] - golden[name])"),
                _difference("np.linalg.norm(mine[name] - golden[name])", "error > tolerance"),
                _difference("np.abs(mine[name] - golden[name]).mean()"),
                _difference("np.abs(mine[name] - golden[name]).max()", "error > tolerance"),
            ),
        ),
        Mistake(
            "signed differences cancel",
            _difference("abs((mine[name] - golden[name]).sum()) / np.abs(golden[name]).sum()"),
            "Errors up and errors down cancel in a sum. Take squares or absolute values first.",
            "If one element is 1 too large and another 1 too small, what is the sum of the differences?",
            variants=(_difference("abs((mine[name] - golden[name]).mean()) / np.abs(golden[name]).mean()"),),
        ),
        Mistake(
            "element by element",
            _difference("np.max(np.abs(mine[name] - golden[name]) / np.abs(golden[name]))"),
            "An element that happens to be near 0 has a huge relative error from rounding alone. Compare the sizes of whole arrays.",
            "In the step that you name, what is expected in the element that is furthest off?",
            variants=(
                _difference("np.abs((mine[name] - golden[name]) / golden[name]).max()"),
                _difference("np.abs((mine[name] - golden[name]) / golden[name]).max()", "error > tolerance"),
                _difference(
                    "np.abs((mine[name] - golden[name]) / golden[name])", "(error > tolerance).any()"
                ),
            ),
        ),
        Mistake(
            "exactly equal",
            _difference("0.0", "not np.array_equal(mine[name], golden[name])"),
            "BF16 rounds, and the golden values were computed in float32: nothing is equal to the bit. The tolerance says what is the "
            "same.",
            "How far off is the step that you name?",
        ),
    ),
)

# ---------------- 14.5: what is wrong in three broken models

FAULTS = (
    "pairs side by side",
    "not rotated",
    "future tokens seen",
    "sigmoid in place of SiLU",
    "gate and up swapped",
    "the other norm's weight",
)
"""What may have been planted."""


def _bits(values: Any) -> Any:
    return float_to_bf16(np.ascontiguousarray(values, np.float32))


def _rotate_side_by_side(q: Any, k: Any, positions: Any, inv_freq: Any) -> None:
    angle = np.outer(positions.get(), inv_freq.get())[:, None, :]
    for array in (q, k):
        values = array.get()
        even, odd = values[..., ::2], values[..., 1::2]
        turned = np.stack(
            [even * np.cos(angle) - odd * np.sin(angle), odd * np.cos(angle) + even * np.sin(angle)], axis=-1
        )
        array.set(np.ascontiguousarray(turned.reshape(values.shape), np.float32))


def _see_the_future(layer: int, q: Any, k: Any, v: Any, out: Any) -> None:
    queries, times = q.get(), q.shape[1] // k.shape[1]
    keys, values = (np.repeat(array.get(), times, axis=1) for array in (k, v))
    scores = np.einsum("nhd,mhd->hnm", queries, keys) * queries.shape[2] ** -0.5
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    out.set(_bits(np.einsum("hnm,mhd->nhd", shares, values)))


def _sigmoid_gate(gate_up: Any, out: Any) -> None:
    gate, up = np.split(gate_up.get(), 2, axis=1)
    out.set(_bits(0.5 * (1 + np.tanh(gate / 2)) * up))


_PLANTED: dict[str, tuple[str, str, Any]] = {
    "A": ("layers.1.silu_mul", FAULTS[3], _sigmoid_gate),
    "B": ("layers.3.rope", FAULTS[0], _rotate_side_by_side),
    "C": ("layers.2.attention", FAULTS[2], _see_the_future),
}


@functools.cache
def broken(letter: str) -> dict[str, Any]:
    """What the operations of a broken model put out: ``"A"``, ``"B"`` or ``"C"``."""
    if letter not in _PLANTED:
        raise KeyError(f"there is no broken model {letter!r}; they are {', '.join(_PLANTED)}")
    from tinyvllm_ref.course.compare_layers import activations

    where, _, function = _PLANTED[letter]
    return activations(planted={where: function})


def golden_activations() -> dict[str, Any]:
    """What transformers computes for the same prompt, by the same names."""
    from tinyvllm_ref.course.compare_layers import golden

    return dict(golden().activations)


_OPERATIONS = (
    "input_norm", "qkv", "rope", "attention", "o_proj", "post_norm", "gate_up", "silu_mul", "down_proj", "stream",
)  # fmt: skip


def _found_cases(rng: np.random.Generator) -> list[Case]:
    known = [*FAULTS, *_OPERATIONS]
    return [
        Case(f"model {letter}", {"model": letter, "known": known}, f"model {letter}") for letter in _PLANTED
    ]


def _run_found(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    from tinyvllm_ref.course.kinds import NotFilledIn

    model = inputs["model"]
    if not isinstance(answer, dict) or model not in answer:
        raise TypeError(
            f"found is {answer!r:.80}; it must be a dict of A, B and C, each with (operation, fault)"
        )
    pair = answer[model]
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(f"found[{model!r}] is {pair!r:.80}; it must be a pair: (operation, fault)")
    where, what = pair
    if where is None or what is None:
        raise NotFilledIn(f"found[{model!r}] is {tuple(pair)!r}")
    layer, _, operation = str(where).removeprefix("layers.").partition(".")
    if not (str(where).startswith("layers.") and layer.isdigit() and operation in inputs["known"]):
        raise ValueError(
            f"found[{model!r}] names the operation {where!r}; the names are those of golden, such as 'layers.1.qkv'"
        )
    if what not in inputs["known"]:
        raise ValueError(
            f"found[{model!r}] names the fault {what!r}; it must be one of FAULTS, letter by letter"
        )
    return {"where": where, "what": what}


def _expect_found(inputs: Any) -> dict[str, Any]:
    from tinyvllm_ref.course.compare_layers import compare

    letter = inputs["model"]
    return {"where": compare(broken(letter)).first, "what": _PLANTED[letter][1]}


def _found(*changes: tuple[str, str]) -> str:
    text = f"""found = {{
    "A": ("{_PLANTED["A"][0]}", "{_PLANTED["A"][1]}"),
    "B": ("{_PLANTED["B"][0]}", "{_PLANTED["B"][1]}"),
    "C": ("{_PLANTED["C"][0]}", "{_PLANTED["C"][1]}"),
}}
"""
    return with_changes(text, changes)


_FOUND = Exercise(
    id="14.5",
    title="three broken models",
    answer="found",
    kind="value",
    cases=_found_cases,
    run=_run_found,
    expected=_expect_found,
    points={f"model {letter}": 1 for letter in _PLANTED},
    riddle=True,
    hints=Hints(
        question="What does first_difference(broken(letter), golden_activations(), 0.03) give for each letter? And of the faults on the "
        "list, which can be at that operation at all?",
        rule="All that comes before the first difference is right, so the golden values of the operation before are its input. Compute "
        "what each fault would make of that input, in NumPy, and compare. RoPE: `qkv` holds 6 query heads, 2 key heads and 2 value "
        "heads of 32 columns each; not rotated means equal to these. Attention: the first token can only read itself, so its row "
        "must be its own value, once for each query head that reads it.",
        code="""gate, up = np.split(golden["layers.1.gate_up"], 2, axis=1)
mine = broken("A")["layers.1.silu_mul"]
for fault, values in {
    "sigmoid in place of SiLU": ____,
    "gate and up swapped": ____,
}.items():
    print(fault, np.linalg.norm(values - mine) / np.linalg.norm(mine))""",
    ),
    mistakes=(
        Mistake(
            "layers counted from 1",
            _found(
                ("layers.3.rope", "layers.4.rope"),
                ("layers.2.attention", "layers.3.attention"),
                ("layers.1.silu_mul", "layers.2.silu_mul"),
            ),
            "The names count layers from 0: layers.0 is the first.",
            "What exactly does first_difference return?",
        ),
        Mistake(
            "where it is furthest off",
            _found(
                ("layers.1.silu_mul", "layers.1.down_proj"),
                ("layers.3.rope", "layers.3.attention"),
                ("layers.2.attention", "layers.2.o_proj"),
            ),
            "These operations only pass on what came wrong into them. The fault is in the first one that differs.",
            "Is the input of the operation that you name still right?",
        ),
        Mistake(
            "RoPE taken for not rotated",
            _found(("pairs side by side", "not rotated")),
            "Compare with layers.3.qkv: had it not been rotated, the two would be equal. They are not: something has been rotated, and "
            "differently.",
            "If queries and keys were not rotated, which golden array would they be equal to?",
        ),
        Mistake(
            "gate taken for swapped",
            _found(("sigmoid in place of SiLU", "gate and up swapped")),
            "Compute silu(up) * gate from layers.1.gate_up: it is not what came out.",
            "From the golden gate_up, what would swapping give, and what did the model give?",
        ),
    ),
)

# ---------------- pictures


def draw_stack(tokens: int = 10) -> Any:
    """tiny-stories from ids to logits, with the shapes of a prompt."""
    from tinyvllm_ref.checkpoint.names import resolve
    from tinyvllm_ref.config import ModelConfig
    from tinyvllm_ref.course.figures.stack import model_stack

    c = ModelConfig.from_json(resolve("tiny-stories"))
    return model_stack(
        tokens=tokens,
        hidden=c.hidden_size,
        ffn=c.intermediate_size,
        q_size=c.q_size,
        kv_size=c.kv_size,
        vocab=c.vocab_size,
        layers=c.num_hidden_layers,
    )


def draw_stream() -> Any:
    """The size of the residual stream after each layer, in the learner's own model and in transformers."""
    from tinyvllm_ref.course import figures, my_engine
    from tinyvllm_ref.course.compare_layers import activations, golden

    def sizes(arrays: Any) -> list[float]:
        names = ["embedding", *(name for name in golden().activations if name.endswith(".stream"))]
        return [float(np.sqrt((arrays[name].astype(np.float64) ** 2).mean())) for name in names]

    wanted, mine = sizes(golden().activations), sizes(activations(my_engine.own_parts()))
    return figures.error_lines(
        np.arange(len(wanted)),
        {"your engine": mine, "transformers": wanted},
        "layers passed",
        "rms of the stream",
        title="The stream grows as it goes through the layers",
        subtitle=f"tiny-stories, {len(golden().ids)} tokens. 0 is the embedding.",
        log_y=True,
    )


def draw_next_tokens(prompt: str, count: int = 10) -> Any:
    """The most probable next tokens, by the learner's own engine."""
    from tinyvllm_ref import LLM, emulation
    from tinyvllm_ref.course import figures, my_engine

    llm = LLM("tiny-stories", parts=my_engine.own_parts())
    ids = llm.tokenizer.encode(prompt)
    with emulation.checks("fast"):
        logits = llm.logits(ids)[-1].astype(np.float64)
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    best = np.argsort(-probabilities, kind="stable")[:count]
    return figures.distribution_filters(
        [llm.tokenizer.decode([int(token)]) for token in best],
        {f"after “{prompt if len(prompt) <= 48 else '…' + prompt[-47:]}”": probabilities[best]},
        title="What may come next",
    )


def compare_greedy() -> None:
    """Say how many greedy tokens of the learner's engine are those of transformers."""
    from tinyvllm_ref import LLM, SamplingParams, emulation
    from tinyvllm_ref.course import my_engine
    from tinyvllm_ref.course.compare_layers import golden

    wanted = golden()
    options = SamplingParams(max_tokens=len(wanted.new_ids), temperature=0.0)
    with emulation.checks("fast"):
        llm = LLM("tiny-stories", parts=my_engine.own_parts())
        (output,) = llm.generate([list(wanted.ids)], options, use_tqdm=False)
    got = output.outputs[0].token_ids
    same = next(
        (i for i, (a, b) in enumerate(zip(got, wanted.new_ids, strict=False)) if a != b),
        min(len(got), len(wanted.new_ids)),
    )
    print(f"{wanted.prompt}{output.outputs[0].text}")
    print(f"\n{same} of {len(wanted.new_ids)} greedy tokens are those of transformers", end="")
    if same < len(wanted.new_ids):
        print(
            f"; at the first other one its two best were {wanted.margins[same]:.2g} apart, and below 0.1 BF16 decides",
            end="",
        )
    print(".")


# ---------------- what is measured


def _make_run(vocab: int) -> Any:
    def make(answer: Any, cp: Any) -> Any:
        logits, out = cp.zeros((1, vocab), np.float32), cp.empty(1, np.int32)
        return lambda: answer(logits, out)

    return make


_WORK = Work(
    label="1 row of 128,256 logits",
    make=_make_run(128_256),
    read_bytes=4 * 128_256,
    write_bytes=4,
    small=_make_run(8192),
    small_read_bytes=4 * 8192,
    small_write_bytes=4,
    small_label="1 row of 8,192 logits",
)

LESSON = Lesson(
    number="14",
    slug="forward_pass",
    title="The forward pass",
    part=3,
    minutes=65,
    exercises=(_BEST, _ARGMAX, _FORWARD, _DIFFERENCE, _FOUND),
    engine=EngineCard(
        mistakes=(
            ("14.3", "the last layer never added"),
            ("14.3", "the norm put in the place of the stream"),
            ("14.2", "the index counts from the part's beginning"),
        ),
        note="forward runs once a step, argmax once for every token. All that is left of the reference between a prompt and its next "
        "token is what you have not passed yet.",
    ),
    works={"14.2": _WORK},
)
