"""Lesson 17: from logits to a token that is drawn, the same for the same seed in any batch."""

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
    Tolerance,
    with_changes,
)
from tinyvllm_ref.kernels.sampling import kept_probabilities, sample_specification, uniform

_SOFTMAX = Tolerance(
    1e-4, 1e-9, "float32: a logit of 600, after dividing by T, is known to 3e-5, and so is its exponential"
)
OPENING = "Once upon a time, there was a"
"""The text whose next token the lesson draws."""


@functools.cache
def next_logits(text: str = OPENING) -> Any:
    """Logits of the token after a text, by tiny-stories: (V,) float32; not to be changed."""
    from tinyvllm_ref import LLM

    llm = LLM("tiny-stories")
    return llm.logits(llm.tokenizer.encode(text))[-1].copy()


@functools.cache
def words() -> tuple[str, ...]:
    """The text of each token of tiny-stories."""
    from tinyvllm_ref.checkpoint.names import resolve
    from tinyvllm_ref.tokenizer import Tokenizer

    tokenizer = Tokenizer(resolve("tiny-stories"))
    return tuple(tokenizer.decode([token]) for token in range(2048))


# ---------------- 17.1: temperature and softmax


def _soften_cases(rng: np.random.Generator) -> list[Case]:
    def case(label: str, logits: Any, temperature: list[float], group: str, threads: int = 64) -> Case:
        logits = np.asarray(logits, np.float32).reshape(len(temperature), -1)
        inputs = {"logits": logits, "temperature": np.array(temperature, np.float32), "threads": threads}
        return Case(label, inputs, group)

    odd = int(rng.integers(60, 90))
    return [
        case("one row of 3, T = 2", [2.0, 1.0, 0.0], [2.0], "small"),
        case("2 rows of 40, T = 0.5 and 1.5", rng.normal(0, 3, (2, 40)), [0.5, 1.5], "small", 32),
        case("one logit, T = 0.7", [3.5], [0.7], "awkward"),
        case("logits near 300, T = 0.8", rng.normal(300, 2, 33), [0.8], "awkward"),
        case("logits near -300, T = 1.2", rng.normal(-300, 2, 70), [1.2], "awkward"),
        case("logits near 60, T = 0.1", rng.normal(60, 1, 50), [0.1], "awkward"),
        case(f"3 rows of {17 * odd + 1:,}, 96 threads", rng.normal(-2, 4, (3, 17 * odd + 1)), [0.3, 1.0, 4.0],
             "awkward", 96),
    ]  # fmt: skip


def _run_soften(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    rows, vocab = inputs["logits"].shape
    logits = lab.input("logits", inputs["logits"])
    temperature = lab.input("temperature", inputs["temperature"])
    out = lab.output((rows, vocab))
    threads = inputs["threads"]
    answer((rows,), (threads,), (logits, temperature, out, np.int32(vocab)), shared_mem=4 * threads)
    return {"out": lab.get(out)}


def _expect_soften(inputs: Any) -> dict[str, Any]:
    scaled = inputs["logits"].astype(np.float64) / inputs["temperature"].astype(np.float64)[:, None]
    weights = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    return {"out": (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)}


def _rows_are_shared(inputs: Any, outputs: Any, observed: Any) -> str | None:
    rows, vocab = inputs["logits"].shape
    turns = observed.total("global_read_requests") / rows
    if vocab < 1000 or turns <= vocab / 2:
        return None
    return (
        f"The probabilities are right, and a row of {vocab:,} is read in {turns:,.0f} turns of warps, where about "
        f"{3 * -(-vocab // 32)} are enough: few threads do all the work. Let each of them take its share of the row"
    )


_MAX = """#define MINUS_INFINITY __uint_as_float(0xFF800000u)
__device__ __forceinline__ float block_max(float value, float* scratch) {
    int t = threadIdx.x;
    scratch[t] = value;
    __syncthreads();
    for (int active = blockDim.x; active > 1;) {
        int half = (active + 1) / 2;
        if (t + half < active) scratch[t] = fmaxf(scratch[t], scratch[t + half]);
        __syncthreads();
        active = half;
    }
    float peak = scratch[0];
    __syncthreads();
    return peak;
}
"""
_SOFTEN_BODY = """    float peak = MINUS_INFINITY;
    for (int j = threadIdx.x; j < V; j += blockDim.x) peak = fmaxf(peak, row[j]);
    peak = block_max(peak, scratch);
    float sum = 0.0f;
    for (int j = threadIdx.x; j < V; j += blockDim.x) sum += expf((row[j] - peak) / T);
    sum = block_sum(sum, scratch);
    for (int j = threadIdx.x; j < V; j += blockDim.x) to[j] = expf((row[j] - peak) / T) / sum;"""


def _changed(text: str, *changes: tuple[str, str]) -> str:
    return with_changes(text, changes)


def _soften(*changes: tuple[str, str]) -> str:
    """A whole answer for 17.1, with some things exchanged."""
    return f'''soften = cp.RawKernel(BLOCK_SUM_CUDA + r"""
{_MAX}
extern "C" __global__ void soften(const float* logits, const float* temperature, float* out, int V) {{
    extern __shared__ float scratch[];
    const float* row = logits + (size_t)blockIdx.x * V;
    float* to = out + (size_t)blockIdx.x * V;
    float T = temperature[blockIdx.x];
{_changed(_SOFTEN_BODY, *changes)}
}}
""", "soften")
'''


_SOFTEN = Exercise(
    id="17.1",
    title="temperature and softmax",
    answer="soften",
    kind="kernel",
    cases=_soften_cases,
    run=_run_soften,
    expected=_expect_soften,
    points={"small": 1, "awkward": 1, "clean": 1},
    tolerance=_SOFTMAX,
    verify=_rows_are_shared,
    uses=("BLOCK_SUM_CUDA",),
    hints=Hints(
        question="Take {case}. What is the weight of the largest logit, before anything is divided by the sum? It does "
        "not depend on the temperature. And the weight of the next one?",
        rule="Each weight is exp((logit - largest) / T), and the weights are divided by their sum. Three loops over the row, "
        "each thread taking every blockDim.x-th logit: the largest, then block_max; the sum of the weights, then "
        "block_sum; the result.\n\n"
        "By hand, logits 2, 1, 0 and T = 2: the weights are exp(0) = 1, exp(-0.5) = 0.6065 and exp(-1) = 0.3679. They sum "
        "to 1.9744, so the probabilities are 0.5065, 0.3072 and 0.1863.",
        code="""float peak = MINUS_INFINITY;
for (int j = threadIdx.x; j < V; j += blockDim.x) peak = ____;
peak = block_max(peak, scratch);
float sum = 0.0f;
for (int j = threadIdx.x; j < V; j += blockDim.x) sum += expf(____);
sum = ____;
for (int j = threadIdx.x; j < V; j += blockDim.x) to[j] = ____ / sum;""",
    ),
    mistakes=(
        Mistake(
            "probabilities divided by T",
            _soften(
                ("expf((row[j] - peak) / T) / sum", "(expf(row[j] - peak) / T) / sum"),
                ("sum += expf((row[j] - peak) / T)", "sum += expf(row[j] - peak) / T"),
            ),
            "A T that divides every weight also divides their sum, and cancels: the temperature has no effect at all. It "
            "must divide the logits, inside of the exponential.",
            "If all weights are halved, what happens to the probabilities?",
            variants=(_soften(("(row[j] - peak) / T", "row[j] - peak")),),
        ),
        Mistake(
            "multiplied by the temperature",
            _soften(("(row[j] - peak) / T", "(row[j] - peak) * T")),
            "A high temperature must make differences between logits smaller, so that unlikely tokens get their chance: "
            "divide by it.",
            "With T = 2, should the first token become more probable than it was, or less?",
        ),
        Mistake(
            "the largest subtracted after dividing",
            _soften(("(row[j] - peak) / T", "row[j] / T - peak")),
            "peak is the largest logit, not the largest logit over T. With a low temperature, logit / T - peak is still "
            "large, and the exponential overflows.",
            "With a largest logit of 60 and T = 0.1, what is 60 / T - 60?",
        ),
        Mistake(
            "maximum that starts at 0",
            _soften(("float peak = MINUS_INFINITY", "float peak = 0.0f")),
            "Logits may all be negative. Then 0 is larger than all of them, every exponential is zero, and 0 / 0 is no "
            "number. Begin with minus infinity.",
            "All logits lie near -300. Which of them is your maximum?",
        ),
        Mistake(
            "no maximum subtracted",
            _soften(("(row[j] - peak) / T", "row[j] / T")),
            "The exponential of a float is infinite from about 89 on, and zero below about -104. Subtract the largest "
            "logit first: the probabilities are the same, and the largest weight is 1.",
            "What is exp(300), as a float32?",
        ),
        Mistake(
            "not divided by the sum",
            _soften((" / T) / sum", " / T)")),
            "Weights become probabilities when they are divided by their sum: then they add up to 1.",
            "What do your three results add up to?",
        ),
        Mistake(
            "each thread's own sum",
            _soften(("    sum = block_sum(sum, scratch);\n", "")),
            "Each thread has added up its share of the row alone. block_sum makes one sum of the shares, for every thread.",
            "Which logits are in the sum of thread 1?",
        ),
    ),
)


# ---------------- 17.2: the filters, in NumPy


def _clear(logits: Any, temperature: float, top_k: int, top_p: float) -> bool:
    """Whether no sum of probabilities is so near top_p that rounding decides."""
    _, p = kept_probabilities(logits, temperature, top_k, 1.0, 0.0)
    return top_p == 1 or float(np.abs(np.cumsum(p) - top_p).min()) > 1e-3 / max(1, len(p) / 20)


def _keep_cases(rng: np.random.Generator) -> list[Case]:
    def case(label: str, V: int, temperature: float, top_k: int, top_p: float, group: str) -> Case:
        logits = rng.normal(0, 2, V)
        while not _clear(logits, temperature, top_k, top_p):
            logits = rng.normal(0, 2, V)
        inputs = {"logits": logits, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        return Case(label, inputs, group)

    by_hand = np.log([0.1, 0.4, 0.05, 0.25, 0.2])
    hand = {"logits": by_hand, "temperature": 1.0, "top_k": 0, "top_p": 0.8}
    flat = {"logits": np.zeros(6), "temperature": 1.0, "top_k": 4, "top_p": 1.0}
    return [
        Case("5 tokens of 0.1, 0.4, 0.05, 0.25, 0.2, and top_p = 0.8", hand, "small"),
        Case("the same 5 tokens, top_k = 2", {**hand, "top_k": 2, "top_p": 1.0}, "small"),
        Case("the same 5 tokens, top_k = 3 and top_p = 0.7", {**hand, "top_k": 3, "top_p": 0.7}, "small"),
        Case("6 equal logits, top_k = 4", flat, "awkward"),
        case("30 tokens, T = 2, top_p = 0.6", 30, 2.0, 0, 0.6, "awkward"),
        case("30 tokens, T = 0.5, top_k = 12, top_p = 0.9", 30, 0.5, 12, 0.9, "awkward"),
        case("4 tokens, top_k = 9", 4, 1.0, 9, 1.0, "awkward"),
        case("one token, top_p = 0.1", 1, 1.0, 0, 0.1, "awkward"),
        case("1,001 tokens, T = 1.5, top_p = 0.95", 1001, 1.5, 0, 0.95, "awkward"),
        case("200 tokens, nothing cut", 200, 1.0, 0, 1.0, "awkward"),
    ]


def _run_keep(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    ids, probabilities = answer(inputs["logits"], inputs["temperature"], inputs["top_k"], inputs["top_p"])
    return {"ids": np.asarray(ids, np.int64), "probabilities": np.asarray(probabilities, np.float64)}


def _expect_keep(inputs: Any) -> dict[str, Any]:
    ids, probabilities = kept_probabilities(
        inputs["logits"], inputs["temperature"], inputs["top_k"], inputs["top_p"], 0.0
    )
    return {"ids": ids.astype(np.int64), "probabilities": probabilities}


_KEEP_BODY = """    ids = np.argsort(-logits, kind="stable")
    scaled = logits[ids] / temperature
    p = np.exp(scaled - scaled[0])
    p = p / p.sum()
    if top_k > 0:
        ids, p = ids[:top_k], p[:top_k]
        p = p / p.sum()
    if top_p < 1:
        count = np.searchsorted(np.cumsum(p), top_p) + 1
        ids, p = ids[:count], p[:count]
    return ids, p / p.sum()"""


def _keep(*changes: tuple[str, str]) -> str:
    """A whole answer for 17.2, with some things exchanged."""
    return f"def keep(logits, temperature, top_k, top_p):\n{_changed(_KEEP_BODY, *changes)}\n"


_KEEP = Exercise(
    id="17.2",
    title="which tokens may be drawn",
    answer="keep",
    kind="function",
    arguments=("logits", "temperature", "top_k", "top_p"),
    cases=_keep_cases,
    run=_run_keep,
    expected=_expect_keep,
    points={"small": 1, "awkward": 2},
    tolerance=Tolerance(1e-6, 1e-12, "sums in another order"),
    hints=Hints(
        question="Take {case}. Write the probabilities down from the largest to the smallest, and under each the sum so far. "
        "Which tokens are kept?",
        rule="Sort first, with the ids along. Softmax with the temperature. top_k keeps the first k of the sorted tokens (0 "
        "keeps all), and divides by their sum. top_p then keeps tokens until their sum reaches p: the one that crosses p is "
        "kept. Divide by the sum once more.\n\n"
        "By hand: 0.4, 0.25, 0.2, 0.1, 0.05 have the sums 0.4, 0.65, 0.85, ... For p = 0.8 three are kept, because two reach "
        "only 0.65; their probabilities become 0.471, 0.294 and 0.235.",
        code="""ids = np.argsort(____, kind="stable")
scaled = logits[ids] / temperature
p = np.exp(scaled - ____)
p = p / p.sum()
if top_k > 0:
    ids, p = ids[:____], p[:____]
    p = ____
if top_p < 1:
    count = np.searchsorted(np.cumsum(p), ____) + ____
    ids, p = ids[:count], p[:count]
return ids, ____""",
    ),
    mistakes=(
        Mistake(
            "the crossing token is left out",
            _keep(
                ("np.searchsorted(np.cumsum(p), top_p) + 1", "max(1, np.searchsorted(np.cumsum(p), top_p))")
            ),
            "top_p keeps the smallest set whose sum is at least p. The token with which the sum crosses p belongs to it: "
            "without that token the sum is below p.",
            "What do the probabilities of your kept tokens sum to, before they are renormalised? Is that at least p?",
            variants=(
                _keep(
                    (
                        "        count = np.searchsorted(np.cumsum(p), top_p) + 1\n",
                        "        count = max(1, int((np.cumsum(p) <= top_p).sum()))\n",
                    )
                ),
            ),
        ),
        Mistake(
            "the first k of the vocabulary",
            _keep(
                (
                    "    if top_k > 0:\n        ids, p = ids[:top_k], p[:top_k]\n",
                    "    if top_k > 0:\n        first = ids < top_k\n        ids, p = ids[first], p[first]\n",
                ),
            ),
            "top_k means the k most probable tokens, and the vocabulary is in no order of probability. Sort first, and keep "
            "the ids along.",
            "Which token is the most probable one here, and what is its id?",
        ),
        Mistake(
            "top-p before top-k",
            _keep(("        p = p / p.sum()\n    if top_p", "    if top_p")),
            "top_p is a share of what top_k has left, so the k tokens must be renormalised before their sum is compared with "
            "p. Compared with the whole distribution, p is reached later, or never.",
            "After top_k, do the probabilities that you add up sum to 1?",
        ),
        Mistake(
            "temperature after the filters",
            """def keep(logits, temperature, top_k, top_p):
    ids = np.argsort(-logits, kind="stable")
    p = np.exp(logits[ids] - logits[ids[0]])
    p = p / p.sum()
    if top_k > 0:
        ids, p = ids[:top_k], p[:top_k]
        p = p / p.sum()
    if top_p < 1:
        count = np.searchsorted(np.cumsum(p), top_p) + 1
        ids, p = ids[:count], p[:count]
    p = p ** (1 / temperature)
    return ids, p / p.sum()
""",
            "The filter saw the probabilities at temperature 1. top_p is taken of the distribution that is drawn from: a "
            "hotter one needs more tokens to reach p.",
            "With T = 2 the distribution is flatter. Does it take more tokens to reach p, or fewer?",
        ),
        Mistake(
            "not renormalised",
            _keep(("return ids, p / p.sum()", "return ids, p")),
            "What was cut away leaves a gap: the kept probabilities sum to less than 1. A draw that falls into the gap finds "
            "no token. Divide by their sum.",
            "What do the probabilities that you return sum to?",
        ),
        Mistake(
            "tokens of at least p",
            _keep(
                (
                    "        count = np.searchsorted(np.cumsum(p), top_p) + 1\n",
                    "        count = max(1, int((p >= 1 - top_p).sum()))\n",
                )
            ),
            "top_p bounds the sum of the kept probabilities, not each of them. A bound for each is another filter: min-p.",
            "Add the probabilities up one by one, from the largest. Where does the sum reach p?",
        ),
        Mistake(
            "ties the other way round",
            _keep(('np.argsort(-logits, kind="stable")', 'np.argsort(logits, kind="stable")[::-1]')),
            "Sorted upwards and then turned round, equal logits come from the highest id down. Sort the negated logits: a "
            "stable sort leaves equal ones in the order of their ids.",
            "All logits are equal here. In which order should their ids come?",
        ),
        Mistake(
            "the least probable ones",
            _keep(("np.argsort(-logits, kind", "np.argsort(logits, kind"), ("- scaled[0]", "- scaled[-1]")),
            "argsort sorts upwards: the first of its ids is the least probable token. Sort the negated logits.",
            "Is the first of your ids the most probable token?",
        ),
    ),
)


# ---------------- 17.3: how many are kept, predicted


def _kept(temperature: float, top_p: float) -> int:
    return len(kept_probabilities(next_logits(), temperature, 0, top_p, 0.0)[0])


_PREDICTION = Prediction(
    id="17.3",
    title="how many are kept?",
    quantities={
        "plain": Quantity("tokens kept, T = 1, top_p = 0.9", lambda: _kept(1.0, 0.9)),
        "hot": Quantity("tokens kept, T = 2, top_p = 0.99", lambda: _kept(2.0, 0.99)),
    },
    explains="This model hesitates between sixteen adjectives, and gives each a few percent. Everything else it believes to "
    "be wrong, and at T = 1 all of that together weighs less than one percent. At T = 2 the wrong tokens weigh little one by "
    "one, but they are two thousand: together they hold several percent, and a top_p of 0.99 lets hundreds of them in. That "
    "is why a high temperature needs a filter.",
    hints=Hints(
        question="Look at the picture of 17.2. How many words have a bar that can be seen? How many tokens are not in the "
        "picture?",
        rule="Any number gets the credit. For the first, count bars until 90 percent are together. For the second, think of "
        "two thousand tokens with a tiny probability each.",
        code="plain = ____\nhot = ____",
    ),
)


# ---------------- 17.4: the search along the prefix sums


def _search_cases(rng: np.random.Generator) -> list[Case]:
    def case(label: str, weights: Any, shares: tuple[float, float], threads: int, group: str) -> Case:
        weights = np.asarray(weights, np.float32)
        sums = np.cumsum(weights.astype(np.float64))
        targets = []
        for share in shares:
            target = share * sums[-1]
            nearest = sums[np.abs(sums - target).argmin()]
            if abs(nearest - target) < 0.02 * weights.min():  # rounding must not decide
                target = nearest - 0.5 * float(weights.min())
            targets.append(max(0.0, target))
        inputs = {"weights": weights, "targets": np.array(targets, np.float32), "threads": threads}
        return Case(label, inputs, group)

    odd = int(rng.integers(300, 500))
    sizes = rng.uniform(0.2, 1.0, odd)
    past = case("7 weights, a target past the sum", [1, 1, 1, 1, 1, 1, 1], (0.5, 0.5), 4, "awkward")
    past.inputs["targets"][0] = 7.5
    reached = case("8 weights of 8, 7, ..., 1, targets 21 and 8, which sums reach exactly", np.arange(8, 0, -1), (0.5, 0.5),
                   4, "awkward")  # fmt: skip
    reached.inputs["targets"][:] = 21, 8
    return [
        case("8 weights of 8, 7, ..., 1, targets 20 and 3.6, 4 threads", np.arange(8, 0, -1), (20 / 36, 0.1), 4,
             "small"),
        case("64 weights, 32 threads", rng.uniform(0.2, 1.0, 64), (0.3, 0.95), 32, "small"),
        case("one weight, 32 threads", [2.0], (0.5, 0.9), 32, "awkward"),
        case("5 weights, 64 threads", [5, 4, 3, 2, 1], (0.99, 0.01), 64, "awkward"),
        past,
        reached,
        case(f"{odd} weights, 100 threads", sizes, (0.61, 0.17), 100, "awkward"),
        case("2,048 weights, 128 threads", rng.uniform(0.5, 1.0, 2048), (0.004, 0.999), 128, "awkward"),
    ]  # fmt: skip


def _run_search(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    if "search" not in answer:
        raise ValueError("the text defines no function `search`")
    # Two searches in a row with the same scratch; every thread stores what it got from each.
    kernel = lab.cp.RawKernel(
        answer
        + """
extern "C" __global__ void search_twice(const float* weights, int n, const float* targets, int* first, int* second) {
    extern __shared__ float scratch[];
    first[threadIdx.x] = search(weights, n, targets[0], scratch);
    second[threadIdx.x] = search(weights, n, targets[1], scratch);
}
""",
        "search_twice",
    )
    threads = inputs["threads"]
    weights, targets = lab.input("weights", inputs["weights"]), lab.input("targets", inputs["targets"])
    first, second = lab.output(threads, np.int32), lab.output(threads, np.int32)
    arguments = (weights, np.int32(len(inputs["weights"])), targets, first, second)
    kernel((1,), (threads,), arguments, shared_mem=4 * threads)
    return {"first": lab.get(first), "second": lab.get(second)}


def _expect_search(inputs: Any) -> dict[str, Any]:
    sums = np.cumsum(inputs["weights"].astype(np.float64))
    found = np.minimum(np.searchsorted(sums, inputs["targets"].astype(np.float64)), len(sums) - 1)
    return {
        name: np.full(inputs["threads"], index, np.int32)
        for name, index in zip(("first", "second"), found, strict=True)
    }


def _search_is_shared(inputs: Any, outputs: Any, observed: Any) -> str | None:
    n, turns = len(inputs["weights"]), observed.total("global_read_requests") / 2
    if n < 1000 or turns <= n / 4:
        return None
    return (
        f"The indices are right, and a search along {n:,} weights takes {turns:,.0f} turns of warps at memory: few threads "
        "do all the walking. Let each thread add up its share"
    )


_SEARCH_BODY = """    float mine = 0.0f;
    for (int j = begin; j < end; j++) mine += weights[j];
    before[t] = mine;
    if (t == 0) found = n - 1;
    __syncthreads();
    if (t == 0) {
        float sum = 0.0f;
        for (int s = 0; s < blockDim.x; s++) {
            float next = sum + before[s];
            before[s] = sum;
            sum = next;
        }
    }
    __syncthreads();
    float running = before[t];
    for (int j = begin; j < end; j++) {
        running += weights[j];
        if (running >= target) {
            atomicMin(&found, j);
            break;
        }
    }
    __syncthreads();
    int index = found;
    __syncthreads();
    return index;"""


def _search(*changes: tuple[str, str]) -> str:
    """A whole answer for 17.4, with some things exchanged."""
    return f'''SEARCH_CUDA = r"""
__device__ int search(const float* weights, int n, float target, float* before) {{
    __shared__ int found;
    int t = threadIdx.x;
    int each = (n + blockDim.x - 1) / blockDim.x;
    int begin = min(n, t * each), end = min(n, begin + each);
{_changed(_SEARCH_BODY, *changes)}
}}
"""
'''


_SEARCH = Exercise(
    id="17.4",
    title="a search along prefix sums",
    answer="SEARCH_CUDA",
    kind="source",
    cases=_search_cases,
    run=_run_search,
    expected=_expect_search,
    points={"small": 1, "awkward": 2, "clean": 1},
    verify=_search_is_shared,
    hints=Hints(
        question="Take 8 weights of 8, 7, ..., 1 and 4 threads. Which weights are the share of thread 1, and what do all weights "
        "in front of its share sum to?",
        rule="First each thread adds up its share into before[t]. A barrier. Then thread 0 walks along the cells and puts "
        "into each what lies *in front of* that share. A barrier. Then each thread goes through its share once more, beginning "
        "with before[t]; where the sum reaches the target it reports the index with atomicMin. A barrier; everyone reads "
        "found; one more barrier, so that the function can be called again.\n\n"
        "By hand, 8 weights 8 7 6 5 4 3 2 1, 4 threads, target 20: the shares sum to 15, 11, 7, 3; in front of them lie "
        "0, 15, 26, 33. Thread 1 begins with 15: 15 + 6 = 21 reaches 20, at index 2. Threads 2 and 3 report 4 and 6; the "
        "smallest stays.",
        code="""float mine = 0.0f;
for (int j = begin; j < end; j++) mine += ____;
before[t] = mine;
if (t == 0) found = ____;
__syncthreads();
if (t == 0) {
    float sum = 0.0f;
    for (int s = 0; s < blockDim.x; s++) { float next = sum + before[s]; before[s] = ____; sum = ____; }
}
____;
float running = ____;
for (int j = begin; j < end; j++) {
    running += weights[j];
    if (____) { atomicMin(&found, j); break; }
}
__syncthreads();
int index = found;
____;
return index;""",
    ),
    mistakes=(
        Mistake(
            "what lies in front is forgotten",
            _search(("float running = before[t];", "float running = 0.0f;")),
            "Each thread compares the sum of its own share with the target. The prefix sum begins with everything that the "
            "threads before it have.",
            "Thread 1 begins to walk. What do the weights before its first one sum to?",
        ),
        Mistake(
            "the own share counted twice",
            _search(("            before[s] = sum;\n", "            before[s] = next;\n")),
            "The cell then holds the sum up to the *end* of the share, and the walk adds the share once more. What the walk "
            "begins with must end just in front of it.",
            "What must thread 0 begin with?",
        ),
        Mistake(
            "the token before",
            _search(
                (
                    "        running += weights[j];\n        if (running >= target) {",
                    "        float after = running + weights[j];\n        bool crosses = after >= target;\n"
                    "        running = after;\n        if (crosses && j > 0) j = j - 1;\n        if (crosses) {",
                )
            ),
            "The index that is asked for is the one whose weight makes the sum reach the target, not the last one before "
            "that.",
            "Weights 8, 7, 6 and the target 20. Is the sum up to index 1 at least 20?",
        ),
        Mistake(
            "the sum must pass the target",
            _search(("running >= target", "running > target")),
            "A sum that is exactly the target has reached it: that index is the first. top_p asks for a sum of at least p.",
            "The first weight is 8, and so is the target. Does one weight reach it?",
        ),
        Mistake(
            "written without atomicMin",
            _search(("atomicMin(&found, j);", "found = j;")),
            "Every thread behind the right one also finds that its sum reaches the target, and writes its own index. "
            "atomicMin keeps the smallest; a plain write keeps whichever came last.",
            "The right index lies in the share of thread 1. What do threads 2 and 3 see in their shares?",
        ),
        Mistake(
            "shares that are not side by side",
            _search(
                (
                    "    for (int j = begin; j < end; j++) mine += weights[j];",
                    "    for (int j = t; j < n; j += blockDim.x) mine += weights[j];",
                )
            ),
            "With steps of blockDim.x a share is scattered over the row, and the sum in front of it is no prefix sum. Here "
            "a thread's weights must be neighbours: begin to end - 1.",
            "With 4 threads and 8 weights, which weights does thread 0 add, and which ones does it walk along later?",
        ),
        Mistake(
            "nothing where no sum reaches the target",
            _search(("found = n - 1;", "found = n;")),
            "Rounding can leave every sum a little below the target. Then the last entry is meant; n lies behind the row.",
            "What do you return when the target is larger than the sum of all weights?",
        ),
        Mistake(
            "not safe to call twice",
            _search(("    int index = found;\n    __syncthreads();\n    return index;", "    return found;")),
            "A fast thread that is called again sets found while a slow one has not read it yet. Read it into a variable, "
            "then let all meet once more.",
            "Thread 0 returns and is called again. What does it write first, and who still needs the old value?",
        ),
        Mistake(
            "no barrier before the walk",
            _search(("    __syncthreads();\n    float running", "    float running")),
            "before[t] is what thread 0 has put there, and it may not have come so far. A barrier belongs between its loop "
            "and the walk.",
            "Who writes before[3], and when is it safe for thread 3 to read it?",
        ),
    ),
)


# ---------------- 17.5: the part


def _draw_is_clear(logits: Any, p: dict[str, Any], step: int, last: bool = False) -> bool:
    """Whether rounding can not change the token; with `last`, whether it is also the last one that is kept."""
    if p["temperature"] == 0:
        return True
    if not _clear(logits, p["temperature"], p["top_k"], p["top_p"]):
        return False
    weights = np.exp((logits.astype(np.float64) - logits.max()) / p["temperature"])
    if p["min_p"] and np.abs(weights - p["min_p"]).min() < 1e-4:
        return False
    _, kept = kept_probabilities(logits, p["temperature"], p["top_k"], p["top_p"], p["min_p"])
    u = uniform(p["seed"] % 2**64, step)
    if last and (len(kept) < 2 or u < 1 - kept[-1]):
        return False
    return float(np.abs(np.cumsum(kept)[:-1] - u).min(initial=1.0)) > 2e-5


def _sample_cases(rng: np.random.Generator) -> list[Case]:
    def options(**given: Any) -> dict[str, Any]:
        return {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1, **given}

    def case(
        label: str,
        vocab: int,
        params: list[dict[str, Any]],
        group: str,
        same: bool = False,
        last: bool = False,
    ) -> Case:
        logits = rng.normal(0, 2.5, (len(params), vocab)).astype(np.float32)
        if same:
            logits[:] = logits[0]
        steps = rng.integers(0, 300, len(params)).astype(np.int32)
        for r, one in enumerate(params):
            while not _draw_is_clear(logits[r], one, int(steps[r]), last):
                steps[r] += 1
                if (
                    not same
                ):  # another step moves the draw, and only other logits move the bounds of the filters
                    logits[r] = rng.normal(0, 2.5, vocab)
        return Case(label, {"logits": logits, "params": params, "steps": steps}, group)

    def seeds(count: int) -> list[int]:
        return [int(seed) for seed in rng.integers(0, 2**62, count)]

    tie = {"logits": np.array([[1, 3, 3, 0, 3, 2]], np.float32), "params": [options(temperature=0.0)],
           "steps": np.zeros(1, np.int32)}  # fmt: skip
    ties = {"logits": rng.integers(0, 9, (2, 700)).astype(np.float32), "params": [options(temperature=0.0)] * 2,
            "steps": np.zeros(2, np.int32)}  # fmt: skip
    mixed = [options(temperature=0.0), options(temperature=0.7, seed=5), options(top_k=3, seed=6),
             options(top_p=0.6, seed=7), options(temperature=1.8, top_k=20, top_p=0.8, seed=8),
             options(min_p=0.2, seed=9), options(seed=-3), options(temperature=2.0, seed=2**63 + 11)]  # fmt: skip
    alike = [options(temperature=1.5, seed=seed) for seed in seeds(6)]
    return [
        case("one row of 8, T = 1", 8, [options(seed=4)], "small"),
        case("2 rows of 40, T = 0.7 and 1.5", 40, [options(temperature=0.7), options(temperature=1.5, seed=2)],
             "small"),
        case("one row of 8, top_k = 3", 8, [options(top_k=3, seed=6)], "awkward", last=True),
        case("one row of 8, top_p = 0.6", 8, [options(top_p=0.6, seed=7)], "awkward", last=True),
        case("one row of 5, top_k = 9", 5, [options(top_k=9, seed=3)], "awkward"),
        case("8 rows of 60 with all kinds of options", 60, mixed, "awkward"),
        Case("3 equal logits, T = 0", tie, "awkward"),
        Case("2 rows of 700 with many equal logits, T = 0", ties, "awkward"),
        case("6 equal rows of 300, 6 seeds", 300, alike, "awkward", same=True),
        case("4 rows of 50, top_k = 10 and top_p = 0.7", 50,
             [options(temperature=1.5, top_k=10, top_p=0.7, seed=seed) for seed in seeds(4)], "awkward", last=True),
        case("one row of 1, top_p = 0.5", 1, [options(top_p=0.5)], "awkward"),
        case("3 rows of 2,048, T = 1.2", 2048, [options(temperature=1.2, top_p=0.95, seed=seed) for seed in seeds(3)],
             "awkward"),
    ]  # fmt: skip


def _run_sample(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    from tinyvllm_ref.sampling_params import SamplingParams

    logits, steps = lab.input("logits", inputs["logits"]), lab.input("steps", inputs["steps"])
    params = [SamplingParams(**one) for one in inputs["params"]]
    return {"tokens": lab.get(answer(logits, params, steps), "the result")}


def _expect_sample(inputs: Any) -> dict[str, Any]:
    tokens = [
        sample_specification(
            row, p["temperature"], p["top_k"], p["top_p"], p["min_p"], p["seed"] % 2**64, int(step)
        )
        for row, p, step in zip(inputs["logits"], inputs["params"], inputs["steps"], strict=True)
    ]
    return {"tokens": np.array(tokens, np.int32)}


_UNIFORM = """__device__ unsigned long long mix(unsigned long long x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}
__device__ float uniform(unsigned long long seed, int step) {
    unsigned long long stream = mix(seed + 0x9e3779b97f4a7c15ull);
    unsigned long long bits = mix(stream + ((unsigned long long)step + 1) * 0x9e3779b97f4a7c15ull);
    return (float)(unsigned)(bits >> 40) / 16777216.0f;
}
__device__ float sum_of(const float* p, int n, float* scratch) {
    float sum = 0.0f;
    for (int j = threadIdx.x; j < n; j += blockDim.x) sum += p[j];
    return block_sum(sum, scratch);
}
__device__ int at_least(const float* p, int n, float bound, float* scratch) {
    float count = 0.0f;
    for (int j = threadIdx.x; j < n; j += blockDim.x) count += p[j] > 0.0f && p[j] >= bound ? 1.0f : 0.0f;
    return (int)block_sum(count, scratch);
}
"""
_PICK_BODY = """    int n = V;
    if (top_k[r] > 0) n = min(n, top_k[r]);
    int limit = at_least(p, n, min_p[r] * p[0], scratch);
    if (top_p[r] < 1.0f) n = search(p, n, top_p[r] * sum_of(p, n, scratch), scratch) + 1;
    n = min(n, limit);
    float target = uniform(seeds[r], steps[r]) * sum_of(p, n, scratch);
    int rank = search(p, n, target, scratch);
    if (threadIdx.x == 0) out[r] = (int)ids[(size_t)r * V + rank];"""
_SAMPLE_BODY = """    greedy = [p.temperature == 0 for p in params]
    temperature = column([1.0 if g else p.temperature for p, g in zip(params, greedy)], np.float32)
    top_k = column([1 if g else p.top_k for p, g in zip(params, greedy)], np.int32)
    top_p = column([p.top_p for p in params], np.float32)
    min_p = column([p.min_p for p in params], np.float32)
    seeds = column([(p.seed or 0) % 2**64 for p in params], np.uint64)
    ids = cp.argsort(-logits, axis=1, kind="stable")
    ranked = cp.take_along_axis(logits, ids, axis=1)
    p, out = cp.empty((R, V), np.float32), cp.empty(R, np.int32)
    threads = 128
    soften((R,), (threads,), (ranked, temperature, p, np.int32(V)), shared_mem=4 * threads)
    arguments = (p, ids, top_k, top_p, min_p, seeds, steps, out, np.int32(V))
    pick((R,), (threads,), arguments, shared_mem=4 * threads)
    return out"""


def _sample(kernel: tuple[tuple[str, str], ...] = (), function: tuple[tuple[str, str], ...] = ()) -> str:
    """A whole answer for 17.5, with some things exchanged in the kernel or in the function."""
    return f'''pick = cp.RawKernel(BLOCK_SUM_CUDA + SEARCH_CUDA + r"""
{_UNIFORM}
extern "C" __global__ void pick(const float* probabilities, const long long* ids, const int* top_k,
                                const float* top_p, const float* min_p, const unsigned long long* seeds,
                                const int* steps, int* out, int V) {{
    extern __shared__ float scratch[];
    int r = blockIdx.x;
    const float* p = probabilities + (size_t)r * V;
{_changed(_PICK_BODY, *kernel)}
}}
""", "pick")


def column(values, dtype):
    return cp.asarray(np.array(values, dtype))


def sample(logits, params, steps):
    R, V = logits.shape
{_changed(_SAMPLE_BODY, *function)}
'''


_DRAW = "uniform(seeds[r], steps[r]) * sum_of(p, n, scratch)"

_SAMPLE = Exercise(
    id="17.5",
    title="sample, the part",
    answer="sample",
    kind="function",
    arguments=("logits", "params", "steps"),
    cases=_sample_cases,
    run=_run_sample,
    expected=_expect_sample,
    points={"small": 1, "awkward": 2, "clean": 1},
    uses=("BLOCK_SUM_CUDA",),
    builds_on=("17.1", "17.4"),
    makes={"sample": "sample"},
    file="sample.py",
    hints=Hints(
        question="Take probabilities 0.4, 0.25, 0.2, 0.1, 0.05 with top_k = 4 and top_p = 0.8. How many tokens are left after "
        "each filter, and what do their probabilities sum to?",
        rule="n is how many of the sorted tokens may be drawn. top_k makes it smaller, if it is above 0. Then top_p: search "
        "for top_p times the sum of the first n, and keep the one that is found, so n is that index and one. Then min-p's "
        "limit. At the end search for uniform(seed, step) times the sum of the n that are left: that is a rank, and ids of "
        "this row says which token has it. In Python, a request with temperature 0 is drawn with temperature 1 and top_k "
        "1.\n\n"
        "By hand: 0.4, 0.25, 0.2, 0.1, 0.05 with top_p = 0.8 and a uniform of 0.5: three are kept, their sum is 0.85, the "
        "target 0.425; the sums are 0.4, 0.65: rank 1.",
        code="""int n = V;
if (top_k[r] > 0) n = min(n, ____);
int limit = at_least(p, n, min_p[r] * p[0], scratch);
if (top_p[r] < 1.0f) n = search(p, n, ____ * sum_of(p, n, scratch), scratch) + ____;
n = min(n, limit);
float target = uniform(____, ____) * sum_of(p, ____, scratch);
int rank = search(p, n, target, scratch);
if (threadIdx.x == 0) out[r] = (int)ids[____];""",
    ),
    mistakes=(
        Mistake(
            "the rank instead of the token",
            _sample((("(int)ids[(size_t)r * V + rank]", "rank"),)),
            "The search runs along the sorted row, so what it finds is a rank: 0 is the most probable token, whatever its id "
            "is. ids says which token has that rank.",
            "The most probable token of this row has rank 0. Is its id 0?",
        ),
        Mistake(
            "the first row's ids for every row",
            _sample((("(size_t)r * V + rank", "rank"),)),
            "Every row is sorted in an order of its own. The ids of row r begin r * V entries into ids.",
            "Where do the ids of row 1 begin?",
        ),
        Mistake(
            "the step left out",
            _sample((("uniform(seeds[r], steps[r])", "uniform(seeds[r], 0)"),)),
            "Every token of a request then gets the same number, and the draws are not independent: a request with a small "
            "number always takes a probable token, one with a large number never does. Seed and step together give the "
            "number.",
            "Which number does a request get for its second token, and which for its third?",
        ),
        Mistake(
            "one seed for the whole batch",
            _sample((("uniform(seeds[r], steps[r])", "uniform(seeds[0], steps[r])"),)),
            "Then what a request gets depends on who else is in the batch: on whose seed happens to be first. Each request "
            "has a seed of its own.",
            "Put the same request into another row. Does it get the same token?",
        ),
        Mistake(
            "the row in the place of the step",
            _sample((("uniform(seeds[r], steps[r])", "uniform(seeds[r], r)"),)),
            "The row of a batch is an accident: it changes when another request ends. The step is the number of the token "
            "in its completion, and belongs to the request.",
            "A request moves from row 3 to row 2 because another one has ended. Which number should it get now?",
        ),
        Mistake(
            "a global random state",
            _sample(
                function=(
                    (
                        "column([(p.seed or 0) % 2**64 for p in params], np.uint64)",
                        "column(np.random.default_rng(0).integers(0, 2**62, R), np.uint64)",
                    ),
                )
            ),
            "Numbers that come from one state, one after the other, depend on everything that was drawn before. A request "
            "that asked for a seed must get the same tokens alone, in a batch, and tomorrow.",
            "How many numbers have been drawn before this request's next one, and does that depend on the others?",
            variants=(
                _sample(
                    function=(
                        (
                            "column([(p.seed or 0) % 2**64 for p in params], np.uint64)",
                            "column(np.random.default_rng(0).integers(0, 2**62, len(params)), np.uint64)",
                        ),
                    )
                ),
            ),
        ),
        Mistake(
            "drawn from more than was kept",
            _sample((("* sum_of(p, n, scratch);\n    int rank", "* sum_of(p, V, scratch);\n    int rank"),)),
            "The target runs up to the sum of the whole row, but only n tokens are left. Whatever falls into the part that "
            "was cut away lands on the last token that was kept, much too often. Use the sum of those n.",
            "After top_k, what do the tokens that are left sum to?",
            variants=(_sample(((f"float target = {_DRAW}", "float target = uniform(seeds[r], steps[r])"),)),),
        ),
        Mistake(
            "top_k = 0 keeps nothing",
            _sample((("if (top_k[r] > 0) n = min(n, top_k[r]);", "n = min(n, top_k[r]);"),)),
            "A top_k of 0 means that nothing is cut. Taken as a number of tokens it leaves none, and there is nothing to draw.",
            "With top_k = 0, how many tokens does your n leave?",
        ),
        Mistake(
            "top_k larger than the vocabulary",
            _sample((("n = min(n, top_k[r]);", "n = top_k[r];"),)),
            "A row has V tokens, and top_k may be larger: then n must stay V, or the sums run on into the next row.",
            "5 tokens and top_k = 9: how many can be kept?",
        ),
        Mistake(
            "only one thread searches",
            _sample(
                (
                    ("    int rank = search(p, n, target, scratch);\n", ""),
                    ("(size_t)r * V + rank]", "(size_t)r * V + search(p, n, target, scratch)]"),
                )
            ),
            "search is for the whole block: every thread adds up its share. Called by thread 0 alone it sees one share, and "
            "barriers to which the others never come. Let all threads call it, and one of them write.",
            "Which threads take part in your last search?",
        ),
        Mistake(
            "a tiny temperature for 0",
            _sample(
                function=(
                    ("1.0 if g else p.temperature", "1e-6 if g else p.temperature"),
                    ("1 if g else p.top_k", "p.top_k"),
                )
            ),
            "Nearly greedy: where several logits are the largest they share the probability, and one of them is drawn. Greedy "
            "takes the first of them, always: keep one token.",
            "Three tokens have the same largest logit. Which of them does a very low temperature give?",
        ),
        Mistake(
            "the crossing token is left out",
            _sample(((", scratch) + 1;", ", scratch);\n    n = max(n, 1);"),)),
            "search gives the index of the token with which the sum reaches p. That one is kept, so there is one more than "
            "the index says.",
            "If the first token alone reaches p, which index does search give, and how many tokens are kept?",
            variants=(_sample(((", scratch) + 1;", ", scratch);"),)),),
        ),
        Mistake(
            "top-p of the whole, after top-k",
            _sample((("top_p[r] * sum_of(p, n, scratch)", "top_p[r]"),)),
            "After top_k the probabilities that are left no longer sum to 1. top_p is a share of what is left.",
            "top_k has left tokens with a sum of 0.6. Where is 0.7 of that reached?",
        ),
        Mistake(
            "temperature 0 divides by zero",
            _sample(
                function=(
                    ("1.0 if g else p.temperature", "p.temperature"),
                    ("1 if g else p.top_k", "p.top_k"),
                )
            ),
            "At temperature 0 the largest weight is exp(0 / 0), which is no number. Zero means greedy: keep one token, at any "
            "temperature.",
            "What is (largest - largest) / 0?",
        ),
    ),
)


# ---------------- 17.6: the end of a completion


def _end_cases(rng: np.random.Generator) -> list[Case]:
    def case(label: str, output: list[int], ends: list[int], most: int, group: str) -> Case:
        return Case(label, {"output_ids": output, "end_ids": ends, "max_tokens": most}, group)

    story = [int(token) for token in rng.integers(0, 2000, 20)]
    return [
        case("3 tokens, the last is an end token", [7, 5, 2], [2], 8, "small"),
        case("3 tokens, none is an end token", [7, 5, 3], [2], 8, "small"),
        case("3 tokens of at most 3", [7, 5, 3], [2], 3, "small"),
        case("2 of at most 3 tokens", [7, 5], [2], 3, "awkward"),
        case("the second of two end tokens", [7, 5, 9], [2, 9], 8, "awkward"),
        case("an end token, and the last that is allowed", [7, 5, 2], [2, 9], 3, "awkward"),
        case("no end tokens at all", [*story, 2], [], 100, "awkward"),
        case(
            "20 tokens, and the first of three end tokens", [*story, 2047], [2047, 2046, 2045], 64, "awkward"
        ),
        case("one token, an end token", [2046], [2047, 2046], 1, "awkward"),
    ]


def _run_end(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    return {"reason": answer(inputs["output_ids"], inputs["end_ids"], inputs["max_tokens"])}


def _expect_end(inputs: Any) -> dict[str, Any]:
    output = np.array(inputs["output_ids"])
    ended = bool(np.isin(output[-1], np.array(inputs["end_ids"], np.int64)))
    return {"reason": "stop" if ended else "length" if output.size == inputs["max_tokens"] else None}


def _end(*lines: str) -> str:
    body = "\n".join(f"    {line}" for line in lines)
    return f"def finish_reason(output_ids, end_ids, max_tokens):\n{body}\n"


_STOP = 'if output_ids[-1] in end_ids: return "stop"'
_LENGTH = 'if len(output_ids) >= max_tokens: return "length"'
_END = Exercise(
    id="17.6",
    title="the end of a completion",
    answer="finish_reason",
    kind="function",
    arguments=("output_ids", "end_ids", "max_tokens"),
    cases=_end_cases,
    run=_run_end,
    expected=_expect_end,
    points={"small": 1, "awkward": 1},
    hints=Hints(
        question="Take {case}. Is its last token in end_ids? How many tokens are there, and how many may there be?",
        rule='The last token decides first: if it is one of the end tokens, the reason is "stop". If not, and there are '
        'max_tokens of them, it is "length". Otherwise the request goes on: None.',
        code='if output_ids[-1] ____ end_ids:\n    return "stop"\nif len(output_ids) ____ max_tokens:\n    return "length"\nreturn None',
    ),
    mistakes=(
        Mistake(
            "one end token of several",
            _end('if end_ids and output_ids[-1] == end_ids[0]: return "stop"', _LENGTH, "return None"),
            "A model may have several end tokens: one that ends a text, one that ends a turn of a chat. Any of them ends "
            "the completion.",
            "How many end tokens does this case have, and which of them was drawn?",
        ),
        Mistake(
            "length asked before stop",
            _end(_LENGTH, _STOP, "return None"),
            "If the last token that was allowed is an end token, the model had finished. Whoever reads the reason would "
            "think that the text was cut.",
            "The model ended its text with the very last token it had. Was the text cut?",
        ),
        Mistake(
            "one token too many",
            _end(_STOP, _LENGTH.replace(">=", ">"), "return None"),
            "max_tokens tokens are allowed. When there are that many, the completion is full: do not wait for one more.",
            "With max_tokens = 3 and 3 tokens, may another one be drawn?",
        ),
        Mistake(
            "one token too few",
            _end(_STOP, _LENGTH.replace("max_tokens:", "max_tokens - 1:"), "return None"),
            "max_tokens is how many tokens there may be, not an index. With one less there is room for one more.",
            "With max_tokens = 3 and 2 tokens, may another one be drawn?",
        ),
        Mistake(
            "an end token is the length as well",
            _end('if output_ids[-1] in end_ids or len(output_ids) >= max_tokens: return "length"', "return None"),
            'The two ends are not the same: "stop" says that the model had finished, "length" that it was cut.',
            "Did the model end this text, or did the limit?",
        ),
    ),
)  # fmt: skip


# ---------------- 17.7: stretch, penalties


def _penalty_cases(rng: np.random.Generator) -> list[Case]:
    def case(label: str, vocab: int, seen: int, options: tuple[float, float, float], group: str) -> Case:
        logits = (rng.normal(0, 2, vocab)).astype(np.float32)
        tokens = rng.permutation(vocab)[:seen].astype(np.int32)
        counts = rng.integers(0, 4, seen).astype(np.int32)
        if seen > 3:
            logits[tokens[:4]] = [1.5, -1.5, 2.5, -0.5]
            counts[:4] = [0, 0, 1, 3]
        names = ("repetition", "presence", "frequency")
        inputs = {
            "logits": logits,
            "tokens": tokens,
            "counts": counts,
            **dict(zip(names, options, strict=True)),
        }
        return Case(label, inputs, group)

    return [
        case("8 logits, 4 seen, repetition 2", 8, 4, (2.0, 0.0, 0.0), "small"),
        case("8 logits, 4 seen, presence 0.5, frequency 0.25", 8, 4, (1.0, 0.5, 0.25), "small"),
        case("50 logits, 33 seen, all three", 50, 33, (1.3, 0.4, 0.7), "awkward"),
        case("one logit, seen", 1, 1, (1.5, 0.1, 0.2), "awkward"),
        case("2,000 logits, 701 seen, negative penalties", 2000, 701, (0.8, -0.5, -0.1), "awkward"),
    ]


def _run_penalty(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    logits = lab.inout(inputs["logits"])
    tokens, counts = lab.input("tokens", inputs["tokens"]), lab.input("counts", inputs["counts"])
    n = len(inputs["tokens"])
    options = [np.float32(inputs[name]) for name in ("repetition", "presence", "frequency")]
    answer((-(-n // 64),), (64,), (logits, tokens, counts, *options, np.int32(n)))
    return {"logits": lab.get(logits)}


def _expect_penalty(inputs: Any) -> dict[str, Any]:
    out = inputs["logits"].astype(np.float64)
    seen, counts = inputs["tokens"], inputs["counts"]
    x = out[seen]
    x = np.where(x > 0, x / inputs["repetition"], x * inputs["repetition"])
    out[seen] = x - np.where(counts > 0, inputs["presence"] + inputs["frequency"] * counts, 0)
    return {"logits": out.astype(np.float32)}


_PENALTY_BODY = """    if (i < n) {
        float x = logits[tokens[i]];
        x = x > 0.0f ? x / repetition : x * repetition;
        if (counts[i] > 0) x -= presence + frequency * counts[i];
        logits[tokens[i]] = x;
    }"""


def _penalty(*changes: tuple[str, str]) -> str:
    return f'''penalize = cp.RawKernel(r"""
extern "C" __global__ void penalize(float* logits, const int* tokens, const int* counts,
                                    float repetition, float presence, float frequency, int n) {{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
{_changed(_PENALTY_BODY, *changes)}
}}
""", "penalize")
'''


_PENALTY = Exercise(
    id="17.7",
    title="penalties",
    answer="penalize",
    kind="kernel",
    cases=_penalty_cases,
    run=_run_penalty,
    expected=_expect_penalty,
    points={"small": 1, "awkward": 1, "clean": 1},
    tolerance=Tolerance(1e-6, 1e-6, "float32 products, against float64"),
    stretch=True,
    hints=Hints(
        question="Take {case}. The seen tokens have logits above and below 0. Should a penalty move both kinds down?",
        rule="Repetition: a logit above 0 is divided, any other multiplied, so that both become smaller for a penalty above 1. "
        "Then, only where the completion has the token (its count is above 0), presence and frequency times count are "
        "subtracted.\n\nBy hand, repetition 2: 1.5 becomes 0.75, and -1.5 becomes -3.",
        code="""if (i < n) {
    float x = logits[____];
    x = x > 0.0f ? ____ : ____;
    if (counts[i] > 0) x -= ____;
    logits[____] = x;
}""",
    ),
    mistakes=(
        Mistake(
            "negative logits divided as well",
            _penalty(("x > 0.0f ? x / repetition : x * repetition", "x / repetition")),
            "Dividing a negative logit by 2 brings it nearer to 0: the token becomes more probable. Negative ones are "
            "multiplied.",
            "Which is more probable: a token with logit -1.5, or one with -0.75?",
        ),
        Mistake(
            "presence for tokens of the prompt",
            _penalty(("if (counts[i] > 0) x -=", "x -=")),
            "Presence and frequency look at the completion alone. A token that only the prompt has (count 0) is left to the "
            "repetition penalty.",
            "What does a count of 0 say about where the token was seen?",
        ),
        Mistake(
            "subtracted before the repetition",
            _penalty(
                ("        x = x > 0.0f ? x / repetition : x * repetition;\n", ""),
                ("* counts[i];\n", "* counts[i];\n        x = x > 0.0f ? x / repetition : x * repetition;\n"),
            ),
            "The order counts: repetition scales the logit that the model gave, and presence and frequency are subtracted "
            "from that. The other way round they are scaled as well.",
            "A logit of 1.5, repetition 2, presence 0.5: what comes first, and what is the result?",
        ),
        Mistake(
            "frequency once",
            _penalty(("frequency * counts[i]", "frequency")),
            "Presence is subtracted once, frequency once for each time that the completion has the token.",
            "A token came three times. How often is frequency subtracted?",
        ),
        Mistake(
            "the entry instead of the token",
            _penalty(("logits[tokens[i]]", "logits[i]")),
            "i counts the seen tokens; which logit belongs to it stands in tokens[i].",
            "Which token does entry 0 speak of?",
        ),
        Mistake(
            "no guard",
            _penalty(("if (i < n) {", "{")),
            "The last block has threads past n, and tokens[i] then lies behind the array.",
            "With 4 entries and 64 threads, what does thread 10 read?",
        ),
    ),
)


# ---------------- pictures


def _filters(answer: Any, cp: Any) -> Any:
    """The learner's `keep` on the model's next token."""
    logits = next_logits().astype(np.float64)
    top = np.argsort(-logits, kind="stable")[:20]

    def panel(temperature: float, top_k: int, top_p: float) -> Any:
        row = np.zeros(len(logits))
        ids, p = answer(logits, temperature, top_k, top_p)
        row[np.asarray(ids)] = p
        return row[top]

    return figures.distribution_filters(
        [words()[token] for token in top],
        {
            "T = 1": panel(1.0, 0, 1.0),
            "T = 0.3": panel(0.3, 0, 1.0),
            "T = 2": panel(2.0, 0, 1.0),
            "top_k = 5": panel(1.0, 5, 1.0),
            "top_p = 0.6": panel(1.0, 0, 0.6),
        },
    )


def _frequencies(answer: Any, cp: Any) -> Any:
    """How often the learner's `sample` draws each token, beside what was asked for."""
    from tinyvllm_ref import SamplingParams

    draws, keep = 2000, 16
    full = next_logits()
    top = np.argsort(-full, kind="stable")[:keep]
    row = np.ascontiguousarray(full[top], np.float32)
    counts = np.zeros(keep)
    with cp.checks("fast"):
        logits = cp.asarray(np.tile(row, (draws, 1)))
        params = [SamplingParams(temperature=1.0, top_k=12, seed=seed) for seed in range(draws)]
        tokens = answer(logits, params, cp.zeros(draws, np.int32)).get()
    np.add.at(counts, tokens, 1)
    ids, p = kept_probabilities(row, 1.0, 12, 1.0, 0.0)
    asked = np.zeros(keep)
    asked[ids] = p
    return figures.distribution_filters(
        [words()[token] for token in top],
        {"asked for, top_k = 12": asked, f"drawn, {draws:,} seeds": counts / draws},
        title="Is the draw fair?",
    )


LESSON = Lesson(
    number="17",
    slug="sampling",
    title="Sampling",
    part=4,
    minutes=70,
    exercises=(_SOFTEN, _KEEP, _PREDICTION, _SEARCH, _SAMPLE, _END, _PENALTY),
    engine=EngineCard(
        mistakes=(
            ("17.5", "the rank instead of the token"),
            ("17.5", "the step left out"),
            ("17.5", "a global random state"),
        ),
        note="Both stories are drawn at temperature 1 with top_p 0.95 and seed 17. The logits are nobody's fault here: what "
        "differs is which token is drawn from them.",
        sampling={"temperature": 1.0, "top_p": 0.95, "seed": 17},
    ),
    pictures={"17.2": _filters, "17.5": _frequencies},
)
