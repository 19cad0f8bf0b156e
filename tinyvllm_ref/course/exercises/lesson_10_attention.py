"""Lesson 10: which earlier tokens a token reads, and how: scores, mask, softmax, weighted sum."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tinyvllm_ref import LLM, emulation
from tinyvllm_ref.bf16 import bf16_to_float, float_to_bf16
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
    Work,
    with_changes,
)
from tinyvllm_ref.kernels.attention import attention as reference_attention
from tinyvllm_ref.parts import Parts

_DOT = Tolerance(1e-5, 1e-4, "float32 additions in another order than the oracle's float64")
_WEIGHT = Tolerance(
    1e-4, 1e-6, "expf and float32 sums; a score near 1,000 is itself rounded to 1 part in 16 million"
)
_OUT = Tolerance(
    8e-3, 2e-3, "BF16 keeps 8 significant bits, and the rounding of a large score grows in the exponential"
)


# ---------------- inputs and the specification, for the whole lesson


def _random(rng: np.random.Generator, *shape: int, easy: bool, mean: float = 0.0, size: float = 1.0) -> Any:
    """Numbers that BF16 holds, as float32, so that a report shows numbers; easy ones are quarters."""
    values = mean + size * rng.standard_normal(shape)
    return bf16_to_float(float_to_bf16((np.round(values * 4) / 4 if easy else values).astype(np.float32)))


def _visible(n: int, m: int) -> Any:
    """(n, m) bool: query i is token m - n + i, and sees itself and what came before."""
    return np.arange(m)[None, :] <= np.arange(n)[:, None] + m - n


def _attention_spec(inputs: Any) -> Any:
    """q (n, H, D), k and v (m, H, D) -> (n, H, D), in float64."""
    q = inputs["q"].astype(np.float64)
    k, v = (inputs[name].astype(np.float64) for name in "kv")
    scores = np.einsum("nhd,mhd->hnm", q, k) * inputs["scale"]
    scores[:, ~_visible(len(q), len(k))] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hnm,mhd->nhd", weights, v)


# ---------------- 10.1: scores and the mask


def _score_cases(rng: np.random.Generator) -> list[Case]:
    def case(n: int, m: int, dim: int, group: str) -> Case:
        easy = group == "small"
        inputs = {"q": _random(rng, n, dim, easy=easy), "k": _random(rng, m, dim, easy=easy)}
        return Case(f"{n} quer{'y' if n == 1 else 'ies'}, {m} keys of {dim}", inputs, group)

    return [
        case(2, 2, 2, "small"),
        case(16, 16, 16, "small"),
        case(2, 4, 2, "awkward"),
        case(2, 5, 3, "awkward"),
        case(1, 37, 33, "awkward"),
        case(19, 40, 20, "awkward"),
        case(3, int(rng.integers(1030, 1200)), 7, "awkward"),
    ]


def _run_scores(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    (n, dim), m = inputs["q"].shape, len(inputs["k"])
    bits = (inputs["k"].view(np.uint32) >> 16).astype(np.uint16)  # exact: these are BF16 numbers
    q, k = lab.input("q", inputs["q"]), lab.input("k", bits)
    scores = lab.output((n, m))
    grid = (-(-m // 16), -(-n // 16))
    answer(grid, (16, 16), (q, k, scores, np.int32(n), np.int32(m), np.int32(dim)))
    return {"scores": lab.get(scores)}


def _expect_scores(inputs: Any) -> dict[str, Any]:
    q, k = inputs["q"].astype(np.float64), inputs["k"].astype(np.float64)
    scores = q @ k.T / np.sqrt(q.shape[1])
    return {"scores": np.where(_visible(len(q), len(k)), scores, -np.inf).astype(np.float32)}


_SCORE_BODY = """    if (i < n && j < m) {
        float dot = 0.0f;
        for (int d = 0; d < head_dim; d++) dot += q[i * head_dim + d] * bf16_to_float(k[j * head_dim + d]);
        scores[i * m + j] = j <= m - n + i ? dot * rsqrtf(head_dim) : MINUS_INFINITY;
    }"""


def _scores(*changes: tuple[str, str]) -> str:
    """A whole answer for 10.1, with some things exchanged."""
    body = _SCORE_BODY
    body = with_changes(body, changes)
    return f'''score_kernel = cp.RawKernel(BF16_CUDA + r"""
#define MINUS_INFINITY __uint_as_float(0xFF800000u)
extern "C" __global__ void score_kernel(const float* q, const bf16* k, float* scores, int n, int m, int head_dim) {{
    int j = blockIdx.x * blockDim.x + threadIdx.x;
    int i = blockIdx.y * blockDim.y + threadIdx.y;
{body}
}}
""", "score_kernel")
'''


_OFFSET = (
    "Query i is not token i. Where n queries come after tokens that are known already, query 0 is token m - n, and it sees "
    "all keys up to m - n + i."
)

_SCORES = Exercise(
    id="10.1",
    title="scores and the mask",
    answer="score_kernel",
    kind="kernel",
    uses=("BF16_CUDA",),
    cases=_score_cases,
    run=_run_scores,
    expected=_expect_scores,
    points={"small": 1, "awkward": 1, "clean": 1},
    tolerance=_DOT,
    hints=Hints(
        question="Take {case}. Which token is the first query: which number has it among the m? Which keys may it see?",
        rule="Thread (j, i) makes scores[i][j]. Row i of q begins i * head_dim elements in, row j of k begins "
        "j * head_dim in. The dot product of the two is multiplied by 1 / sqrt(head_dim). Query i is token m - n + i, so "
        "it may see the keys j <= m - n + i; all other places get MINUS_INFINITY. The grid covers whole blocks of 16 by "
        "16, so a thread may lie past n or past m.\n\n"
        "By hand, n = 2 queries and m = 5 keys: query 0 is token 3 and sees keys 0 to 3; query 1 is token 4 and sees all "
        "five.",
        code="""if (i < ____ && j < ____) {
    float dot = 0.0f;
    for (int d = 0; d < head_dim; d++) dot += q[____] * bf16_to_float(k[____]);
    scores[____] = j <= ____ ? dot * ____ : MINUS_INFINITY;
}""",
    ),
    mistakes=(
        Mistake(
            "no scale",
            _scores(("dot * rsqrtf(head_dim)", "dot")),
            "The dot product is not scaled. The more columns a head has, the larger its dot products; the factor "
            "1 / sqrt(head_dim) brings them back to one size.",
            "In the case that fails, how large is your score, divided by the expected one?",
        ),
        Mistake(
            "scaled by head_dim, not by its root",
            _scores(("dot * rsqrtf(head_dim)", "dot / head_dim")),
            "A sum of head_dim random products is sqrt(head_dim) times as large as one of them, not head_dim times: their "
            "signs differ and much cancels. Divide by the root.",
            "If you add up 64 numbers that are 1 or -1 at random, how far from 0 do you expect to be?",
        ),
        Mistake(
            "a token does not see itself",
            _scores(("j <= m - n + i", "j < m - n + i")),
            "The mask is one key too strict: token m - n + i reads itself too. And the first token of all would have "
            "nothing left to read.",
            "The first token of a text: which keys does it see?",
        ),
        Mistake(
            "a token sees the next one",
            _scores(("j <= m - n + i", "j <= m - n + i + 1")),
            "The mask lets one key too many through: the token that the model is about to guess. In training it would copy "
            "the answer.",
            "Query 0 of n = m is the first token. Which is the last key that it may see?",
        ),
        Mistake(
            "no mask",
            _scores(("j <= m - n + i ? dot * rsqrtf(head_dim) : MINUS_INFINITY", "dot * rsqrtf(head_dim)")),
            "Every query reads every key, also those of tokens that come later. A text is written from left to right: what "
            "comes later must not count.",
            "When the first token was processed, did the second exist?",
        ),
        Mistake(
            "the mask ignores the tokens before",
            _scores(("j <= m - n + i", "j <= i")),
            _OFFSET,
            "With 2 queries and 5 keys, which of the five tokens is query 0?",
        ),
        Mistake(
            "masked with 0",
            _scores(("MINUS_INFINITY;", "0.0f;")),
            "A score of 0 is an ordinary score, and softmax gives it weight: exp(0) is 1. Only minus infinity comes out as "
            "a weight of 0.",
            "What does softmax make of the scores 0 and 0?",
        ),
        Mistake(
            "guard in one direction only",
            _scores(("i < n && j < m", "j < m")),
            "The grid is rounded up in both directions, so there are threads with i >= n as well as with j >= m. The guard "
            "must hold both off.",
            "With 2 queries and blocks of 16 by 16, which i do the threads have?",
            variants=(_scores(("i < n && j < m", "i < n")),),
        ),
        Mistake(
            "bits multiplied as integers",
            _scores(("bf16_to_float(k[j * head_dim + d])", "k[j * head_dim + d]")),
            "A bf16 is an unsigned short that holds bits. Taken as a number, 1.0 counts as 16,256. bf16_to_float makes the "
            "number of the bits.",
            "What is the value of the unsigned short whose bits mean 1.0?",
        ),
        Mistake(
            "rows are n or m apart",
            _scores(("q[i * head_dim + d]", "q[i * n + d]"), ("k[j * head_dim + d]", "k[j * m + d]")),
            "q is (n, head_dim): a row has head_dim elements, so row i begins i * head_dim in. The same holds for k.",
            "How many numbers lie between the beginnings of two rows of k?",
            variants=(_scores(("k[j * head_dim + d]", "k[d * m + j]")),),
        ),
        Mistake(
            "scores written by columns",
            _scores(("scores[i * m + j]", "scores[j * n + i]")),
            "scores is (n, m): the scores of a query lie side by side, m of them, and score (i, j) is element i * m + j. This is "
            "the transposed array.",
            "Where does the row of query 1 begin?",
        ),
        Mistake(
            "a large number for minus infinity",
            _scores(("MINUS_INFINITY;", "-1e30f;")),
            "Softmax makes 0 of it as long as the row has another score. But it is a score like any other, and minus infinity costs "
            "no more: MINUS_INFINITY stands above the kernel.",
            "What are the weights of a row with nothing but -1e30 in it?",
            variants=(
                _scores(("MINUS_INFINITY;", "-1e9f;")),
                _scores(("MINUS_INFINITY;", "-3.402823466e38f;")),
            ),
        ),
    ),
)


# ---------------- 10.2: softmax


def _softmax_cases(rng: np.random.Generator) -> list[Case]:
    def case(
        rows: int, m: int, threads: int, group: str, mean: float = 0.0, size: float = 1.0, masked: int = 0
    ) -> Case:
        scores = (mean + size * rng.standard_normal((rows, m))).astype(np.float32)
        if masked:
            scores[:, m - masked :] = -np.inf
        told = (
            [f"around {mean:g}"] * bool(mean)
            + [f"up to {4 * size:g}"] * (size > 1)
            + [f"last {masked} masked"] * bool(masked)
        )
        label = f"{rows} row{'s' if rows > 1 else ''} of {m:,}, {threads} threads" + "".join(
            f", {t}" for t in told
        )
        return Case(label, {"scores": scores, "threads": threads}, group)

    return [
        case(1, 4, 4, "small"),
        case(2, 64, 32, "small", masked=3),
        case(2, 4, 2, "awkward"),
        case(2, 5, 3, "awkward"),
        case(3, 7, 32, "awkward", mean=1000),
        case(2, 40, 16, "awkward", mean=-1000),
        case(2, 100, 5, "awkward", size=100),
        case(2, 1, 8, "awkward"),
        case(2, int(rng.integers(1100, 1500)), 96, "awkward", size=3, masked=70),
        _one_high(rng, 7),
    ]


def _one_high(rng: np.random.Generator, m: int) -> Case:
    """A lone high score with each thread in turn: softmax forgives a largest score that is not quite the largest."""
    scores = (rng.standard_normal((m, m)) + 200 * np.eye(m)).astype(np.float32)
    label = f"{m} rows of {m}, {m} threads, score i of row i is 200 above the rest"
    return Case(label, {"scores": scores, "threads": m}, "awkward")


def _run_softmax(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    rows, m = inputs["scores"].shape
    scores, weights = lab.input("scores", inputs["scores"]), lab.output((rows, m))
    threads = inputs["threads"]
    answer((rows,), (threads,), (scores, weights, np.int32(m)), shared_mem=4 * threads)
    return {"weights": lab.get(weights)}


def _expect_softmax(inputs: Any) -> dict[str, Any]:
    scores = inputs["scores"].astype(np.float64)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return {"weights": (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)}


def _softmax_is_shared(inputs: Any, outputs: Any, observed: Any) -> str | None:
    (rows, m), threads = inputs["scores"].shape, inputs["threads"]
    turns = observed.total("global_read_requests") / rows
    shared = observed.total("shared_requests") / rows
    if threads >= 32 and m > 1000 and turns > m / 2:
        return (
            f"The weights are right, and a row of {m:,} is read in {turns:,.0f} turns of warps, where about "
            f"{3 * -(-m // 32)} are enough: few threads do all the work. Let each of them take its share of the row"
        )
    if threads >= 96 and shared > 3 * threads:
        return (
            f"The weights are right, and it takes {shared:,.0f} turns at shared memory for a block of {threads}: cells are "
            "compared one after the other. Use a tree for the maximum, as block_sum does for the sum"
        )
    return None


_MAX = '''BLOCK_MAX_CUDA = r"""
#define MINUS_INFINITY __uint_as_float(0xFF800000u)
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
'''
_SOFTMAX_BODY = """    float peak = MINUS_INFINITY;
    for (int j = threadIdx.x; j < m; j += blockDim.x) peak = fmaxf(peak, row[j]);
    peak = block_max(peak, scratch);
    float sum = 0.0f;
    for (int j = threadIdx.x; j < m; j += blockDim.x) sum += expf(row[j] - peak);
    sum = block_sum(sum, scratch);
    for (int j = threadIdx.x; j < m; j += blockDim.x) to[j] = expf(row[j] - peak) / sum;"""


def _softmax(*changes: tuple[str, str]) -> str:
    """A whole answer for 10.2, with some things exchanged."""
    text = f'''{_MAX}
softmax = cp.RawKernel(BLOCK_SUM_CUDA + BLOCK_MAX_CUDA + r"""
extern "C" __global__ void softmax(const float* scores, float* weights, int m) {{
    extern __shared__ float scratch[];
    const float* row = scores + (size_t)blockIdx.x * m;
    float* to = weights + (size_t)blockIdx.x * m;
{_SOFTMAX_BODY}
}}
""", "softmax")
'''
    return with_changes(text, changes)


_SOFTMAX = Exercise(
    id="10.2",
    title="softmax, a block a row",
    answer="softmax",
    kind="kernel",
    uses=("BLOCK_SUM_CUDA",),
    cases=_softmax_cases,
    run=_run_softmax,
    expected=_expect_softmax,
    points={"small": 1, "awkward": 2, "clean": 1},
    tolerance=_WEIGHT,
    verify=_softmax_is_shared,
    hints=Hints(
        question="Take {case}. What is its largest score? Which thread of your block knows it, and when do all of them know?",
        rule="block_max is your block_sum with fmaxf(a, b) in the place of a + b; both barriers at the end stay. In the kernel, "
        "three strided loops: the first finds this thread's largest score, beginning at MINUS_INFINITY, and block_max makes "
        "it the block's. The second adds up expf(score - peak), and block_sum makes it the block's. The third writes "
        "expf(score - peak) / sum.\n\n"
        "By hand, the scores 0, 1, 2: peak 2; the exponentials of -2, -1, 0 are 0.135, 0.368, 1; their sum is 1.503; the "
        "weights are 0.09, 0.24, 0.67.",
        code="""scratch[t] = value;
__syncthreads();
for (int active = blockDim.x; active > 1;) {
    int half = (active + 1) / 2;
    if (t + half < active) scratch[t] = ____;
    __syncthreads();
    active = half;
}
float peak = ____;
____;
return peak;

// the kernel
float peak = ____;
for (int j = threadIdx.x; j < m; j += blockDim.x) peak = ____;
peak = block_max(peak, scratch);
float sum = 0.0f;
for (...) sum += expf(____);
sum = ____;
for (...) to[j] = ____;""",
    ),
    mistakes=(
        Mistake(
            "the maximum starts at 0",
            _softmax(("float peak = MINUS_INFINITY;", "float peak = 0.0f;")),
            "Where all scores lie far below 0, a maximum of 0 is none of them: every exponential comes out as 0, and "
            "0 / 0 is NaN. Begin with minus infinity, which every score beats.",
            "What is the largest of -1,000 and -1,001, and what does your loop say?",
        ),
        Mistake(
            "no maximum subtracted",
            _softmax(("expf(row[j] - peak)", "expf(row[j])")),
            "expf(89) is more than a float can hold. Subtracting the row's largest score from all of them changes no weight "
            "and leaves no exponent above 0.",
            "What is expf(1000.0f)?",
        ),
        Mistake(
            "each thread's own maximum",
            _softmax(("    peak = block_max(peak, scratch);\n", "")),
            "Each thread subtracts the largest of the scores that it met itself. Then the exponentials of different threads "
            "are in different units, and their sum means nothing.",
            "Which scores went into `peak` of thread 0, and which into that of thread 1?",
        ),
        Mistake(
            "each thread's own sum",
            _softmax(("    sum = block_sum(sum, scratch);\n", "")),
            "`sum` holds the exponentials that this thread has met, a few of the row. block_sum makes it the sum of all "
            "threads, for all threads.",
            "Add up the weights of your row. What should come out?",
        ),
        Mistake(
            "not divided by the sum",
            _softmax(("to[j] = expf(row[j] - peak) / sum", "to[j] = expf(row[j] - peak)")),
            "The exponentials are there, but they do not add up to 1. Each is divided by the sum of its row.",
            "What do the weights of a row add up to?",
        ),
        Mistake(
            "block_max is not safe before the next call",
            _softmax(
                ("    float peak = scratch[0];\n    __syncthreads();\n", "    float peak = scratch[0];\n")
            ),
            "block_sum is called right after it with the same scratch: a fast thread overwrites scratch[0] while a slow one has "
            "not read the maximum yet. The last barrier of lesson 06 is needed here too.",
            "Who writes scratch[0] next, after block_max?",
        ),
        Mistake(
            "missing __syncthreads() between rounds",
            _softmax(
                (
                    "fmaxf(scratch[t], scratch[t + half]);\n        __syncthreads();",
                    "fmaxf(scratch[t], scratch[t + half]);",
                )
            ),
            "A thread starts its next round while its partner is still in the one before. Only __syncthreads() makes a round "
            "end for all of them.",
            "When thread 0 begins round 2, what makes sure that its partner has finished round 1?",
        ),
        Mistake(
            "only thread 0 gets the maximum",
            _softmax(("float peak = scratch[0];", "float peak = scratch[t];")),
            "scratch[t] is the largest of a part of the row, except in cell 0. Every thread must read cell 0.",
            "After the tree, what is in scratch[1]?",
        ),
        Mistake(
            "the sum, not the maximum",
            _softmax(("fmaxf(scratch[t], scratch[t + half])", "scratch[t] + scratch[t + half]")),
            "block_max still adds. With fmaxf in the place of +, the tree finds the largest value.",
            "What does your block_max give for the values 1, 2, 3, 4?",
        ),
        Mistake(
            "the odd cell dropped",
            _softmax(
                (
                    "active = blockDim.x; active > 1;) {\n        int half = (active + 1) / 2;\n        if (t + half < active)",
                    "half = blockDim.x / 2; half > 0; half /= 2) {\n        if (t < half)",
                ),
                ("        __syncthreads();\n        active = half;\n", "        __syncthreads();\n"),
            ),
            "Seven cells have a half of 3: the tree looks at six of them, and the last one, which may hold the largest score, never "
            "takes part. Round the half up, as in lesson 06.",
            "With 7 threads, which cells does the first round compare?",
        ),
        Mistake(
            "the first score for the largest",
            _softmax(("    peak = block_max(peak, scratch);\n", "    peak = row[0];\n")),
            "Any number may be subtracted from all scores, as long as nothing overflows. row[0] may lie far below the largest, and "
            "then it does.",
            "With the scores 0 and 100, what is the largest exponent?",
        ),
        Mistake(
            "subtracted from some and not from others",
            _softmax(("to[j] = expf(row[j] - peak) / sum", "to[j] = expf(row[j]) / sum")),
            "The sum was made of exponentials with the largest score subtracted. What is divided by it must be made in the same way.",
            "Which exponentials are in your sum, and which ones do you divide?",
            variants=(_softmax(("sum += expf(row[j] - peak)", "sum += expf(row[j])")),),
        ),
        Mistake(
            "one weight a thread",
            _softmax(
                (
                    "for (int j = threadIdx.x; j < m; j += blockDim.x) to[j] =",
                    "int j = threadIdx.x;\n    if (j < m) to[j] =",
                )
            ),
            "A row may have more scores than the block has threads. Each thread walks along it in steps of blockDim.x, also where "
            "it writes.",
            "Which thread writes weight number blockDim.x?",
        ),
    ),
)


# ---------------- 10.3: how many pairs?


@functools.cache
def _pairs(tokens: int) -> int:
    """Dot products that the reference's kernel makes for one head: how often it reads column 0 of a key."""
    dim = 2
    q = emulation.ones((tokens, 1, dim), np.float32)
    k, v = (emulation.asarray(np.full((tokens, 1, dim), 0x3F80, np.uint16)) for _ in range(2))
    out = emulation.empty((tokens, 1, dim), np.uint16)
    with emulation.checks("full"), emulation.trace(1_000_000) as trace:
        _in_emulation(q, k, v, out)
    rows = trace.rows
    return int(((rows["array"] == "k") & (rows["kind"] == "read") & (rows["index"] % dim == 0)).sum())


def _in_emulation(q: Any, k: Any, v: Any, out: Any) -> None:
    """The reference's kernel on arrays of the emulation, also where there is a GPU."""
    from tinyvllm_ref.kernels import source as kernel_source

    n, heads, dim = q.shape
    scores = emulation.empty((n, heads, len(k)), np.float32)
    kernel = emulation.RawKernel(kernel_source.text("attention"), "attention")
    sizes = (np.float32(dim**-0.5), np.int32(n), np.int32(len(k)), np.int32(heads), np.int32(dim))
    kernel((n, heads), (64,), (q, k, v, scores, out, *sizes), shared_mem=256)


_COST = Prediction(
    id="10.3",
    title="how many pairs?",
    quantities={
        "hundred": Quantity("pairs of a query and a key that it sees, 100 tokens", lambda: _pairs(100)),
        "two_hundred": Quantity("the same for 200 tokens", lambda: _pairs(200)),
    },
    explains="Token t sees t + 1 keys, so there are 1 + 2 + ... + n = n (n + 1) / 2 pairs: 5,050 and 20,100. Twice the "
    "tokens are four times the pairs. Each pair costs a dot product and a weighted row of v: 2 D multiplications.",
    hints=Hints(
        question="The first token sees one key: itself. How many does the second see? And the hundredth?",
        rule="1 + 2 + ... + n is n (n + 1) / 2: pair the first with the last, the second with the last but one, and so on.",
        code="hundred = 100 * ____ // 2\ntwo_hundred = ____ * ____ // 2",
    ),
)


# ---------------- 10.4: the part


def _part_cases(rng: np.random.Generator) -> list[Case]:
    def case(
        n: int,
        m: int,
        heads: int,
        dim: int,
        group: str,
        told: str = "",
        q_mean: float = 0.0,
        k_mean: float = 0.0,
        size: float = 1.0,
    ) -> Case:
        easy = group == "small"
        inputs = {
            "q": _random(rng, n, heads, dim, easy=easy, mean=q_mean, size=size),
            "k": _random(rng, m, heads, dim, easy=easy, mean=k_mean),
            "v": _random(rng, m, heads, dim, easy=easy),
            "scale": float(np.float32(dim**-0.5)),
        }
        label = f"{n} of {m:,} tokens, {heads} head{'s' if heads > 1 else ''} of {dim}{told}"
        return Case(label, inputs, group)

    other = case(5, 90, 2, 33, "awkward", ", scale 0.3")
    loud = case(6, 6, 2, 16, "awkward", ", the last one loud")
    other = Case(other.label, {**other.inputs, "scale": 0.3}, other.group)
    loud.inputs["v"][-1] = 300
    return [
        case(2, 2, 1, 2, "small"),
        case(3, 3, 2, 4, "small"),
        case(1, 3, 1, 2, "small"),
        case(1, 5, 2, 4, "small"),
        case(2, 7, 3, 5, "awkward"),
        loud,
        case(33, 33, 2, 20, "awkward", ", large scores", size=60.0),
        case(7, 9, 2, 20, "awkward", ", scores far below 0", q_mean=8.0, k_mean=-8.0),
        other,
        case(2, int(rng.integers(1030, 1400)), 1, 24, "awkward"),
        case(1, int(rng.integers(2050, 2300)), 2, 8, "awkward"),
        case(1, 1, 1, 1, "awkward"),
        case(2, 3, 2, 70, "awkward"),
    ]


def _run_part(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    k, v = (lab.input(name, (inputs[name].view(np.uint32) >> 16).astype(np.uint16)) for name in "kv")  # exact
    q, out = lab.input("q", inputs["q"]), lab.output(inputs["q"].shape, np.uint16)
    bits = lab.returned(answer(q, k, v, inputs["scale"], out), out)
    return {"out": (bits.astype(np.uint32) << 16).view(np.float32)}


def _expect_part(inputs: Any) -> dict[str, Any]:
    return {"out": _attention_spec(inputs).astype(np.float32)}


def _keys_are_shared(inputs: Any, outputs: Any, observed: Any) -> str | None:
    """Right values may come from one busy thread a block: then the kernel is not what was asked for."""
    (n, heads, dim), m = inputs["q"].shape, len(inputs["k"])
    turns = observed.total("global_read_requests") / (n * heads)
    if m < 500 or turns <= m * dim:
        return None
    return (
        f"The values are right, and a query with {m:,} keys takes {turns:,.0f} turns at global memory, more than one for every "
        "element of k: few threads do all the work. Let each thread take its share of the keys, and then of the columns of v"
    )


_PART_BODY = """    int keys = m - n + i + 1;
    const float* query = q + ((size_t)i * heads + head) * head_dim;
    float peak = MINUS_INFINITY;
    for (int j = threadIdx.x; j < keys; j += blockDim.x) {
        const bf16* key = k + ((size_t)j * heads + head) * head_dim;
        float dot = 0.0f;
        for (int d = 0; d < head_dim; d++) dot += query[d] * bf16_to_float(key[d]);
        score[j] = dot * scale;
        peak = fmaxf(peak, score[j]);
    }
    peak = block_max(peak, scratch);
    float sum = 0.0f;
    for (int j = threadIdx.x; j < keys; j += blockDim.x) {
        score[j] = expf(score[j] - peak);
        sum += score[j];
    }
    sum = block_sum(sum, scratch);
    bf16* to = out + ((size_t)i * heads + head) * head_dim;
    for (int d = threadIdx.x; d < head_dim; d += blockDim.x) {
        float total = 0.0f;
        for (int j = 0; j < keys; j++) total += score[j] * bf16_to_float(v[((size_t)j * heads + head) * head_dim + d]);
        to[d] = float_to_bf16(total / sum);
    }"""


def _part(*changes: tuple[str, str]) -> str:
    """A whole answer for 10.4, with some things exchanged."""
    text = f'''attention_kernel = cp.RawKernel(BF16_CUDA + BLOCK_SUM_CUDA + BLOCK_MAX_CUDA + r"""
extern "C" __global__ void attention_kernel(const float* q, const bf16* k, const bf16* v, float* scores, bf16* out,
                                            float scale, int n, int m, int heads, int head_dim) {{
    extern __shared__ float scratch[];
    int i = blockIdx.x, head = blockIdx.y;
    float* score = scores + ((size_t)i * heads + head) * m;
{_PART_BODY}
}}
""", "attention_kernel")


def attention(q, k, v, scale, out):
    n, heads, head_dim = q.shape
    m, threads = len(k), 64
    scores = cp.empty((n, heads, m), np.float32)
    sizes = (np.int32(n), np.int32(m), np.int32(heads), np.int32(head_dim))
    arguments = (q, k, v, scores, out, np.float32(scale), *sizes)
    attention_kernel((n, heads), (threads,), arguments, shared_mem=4 * threads)
    return out
'''
    return with_changes(text, changes)


_PART = Exercise(
    id="10.4",
    title="many heads, one kernel: the part",
    answer="attention",
    kind="function",
    arguments=("q", "k", "v", "scale", "out"),
    uses=("BF16_CUDA", "BLOCK_SUM_CUDA"),
    builds_on=("10.2",),
    cases=_part_cases,
    run=_run_part,
    expected=_expect_part,
    points={"small": 1, "awkward": 2, "clean": 1},
    tolerance=_OUT,
    verify=_keys_are_shared,
    makes={"attention": "attention"},
    file="attention.py",
    hints=Hints(
        question="Take {case}. For query 0 of head 0: how many keys does it see, and where in k does the first of them begin?",
        rule="Row (i, head) of q begins (i * heads + head) * head_dim elements in; k and v are laid out in the same way, with "
        "the token's number j. Query i sees keys = m - n + i + 1 keys. First loop, over keys: the scaled dot product goes to "
        "score[j], and the largest is kept; then block_max. Second loop, over keys: score[j] becomes expf(score[j] - peak), "
        "and is added up; then block_sum. Third loop, over columns d: add up score[j] * v over all keys, divide by the sum, "
        "round to BF16.\n\n"
        "By hand, weights 0.09, 0.24, 0.67 and values (10, 0), (0, 10), (10, 10): column 0 is 0.09*10 + 0.67*10 = 7.6, "
        "column 1 is 0.24*10 + 0.67*10 = 9.1.",
        code="""int keys = ____;
const float* query = q + ____;
float peak = MINUS_INFINITY;
for (int j = threadIdx.x; j < keys; j += blockDim.x) {
    const bf16* key = k + ____;
    float dot = 0.0f;
    for (int d = 0; d < head_dim; d++) dot += ____;
    score[j] = ____;
    peak = ____;
}
peak = ____;
float sum = 0.0f;
for (int j = threadIdx.x; j < keys; j += blockDim.x) {
    score[j] = ____;
    sum += score[j];
}
sum = ____;
for (int d = threadIdx.x; d < head_dim; d += blockDim.x) {
    float total = 0.0f;
    for (int j = 0; j < ____; j++) total += score[j] * bf16_to_float(v[____]);
    out[____] = float_to_bf16(____);
}""",
    ),
    mistakes=(
        Mistake(
            "heads split wrongly",
            _part(
                ("q + ((size_t)i * heads + head) * head_dim", "q + ((size_t)head * n + i) * head_dim"),
                ("k + ((size_t)j * heads + head) * head_dim", "k + ((size_t)head * m + j) * head_dim"),
                ("v[((size_t)j * heads + head) * head_dim + d]", "v[((size_t)head * m + j) * head_dim + d]"),
                ("out + ((size_t)i * heads + head) * head_dim", "out + ((size_t)head * n + i) * head_dim"),
            ),
            "This takes the arrays as (heads, tokens, head_dim). They are (tokens, heads, head_dim): a token's heads lie side by "
            "side, as the product with the weights leaves them. With a single query the two are the same for q, and not for k.",
            "Where does head 1 of token 0 begin: right after head 0 of token 0, or after head 0 of the last token?",
        ),
        Mistake(
            "the mask ignores the tokens before",
            _part(("int keys = m - n + i + 1;", "int keys = i + 1;")),
            _OFFSET + " In a decode step n is 1: the newest token would read the first token alone.",
            "In a decode step with 5 keys, n = 1 and i = 0. How many keys must the query see?",
        ),
        Mistake(
            "a token does not see itself",
            _part(("int keys = m - n + i + 1;", "int keys = m - n + i;")),
            "The keys 0 to m - n + i are one more than m - n + i. The first token of a text is left with no key at all, and 0 / 0 "
            "is NaN.",
            "With n = m, how many keys does query 0 see?",
        ),
        Mistake(
            "no mask",
            _part(("int keys = m - n + i + 1;", "int keys = m;")),
            "Every query reads all keys, also those of later tokens. In a decode step there are none, so the text looks nearly right: "
            "it is the prompt that has been read in the wrong way.",
            "How many keys does the first token of a prompt see?",
        ),
        Mistake(
            "masked after the softmax",
            _part(
                ("    int keys = m - n + i + 1;", "    int keys = m, seen = m - n + i + 1;"),
                ("for (int j = 0; j < keys; j++) total", "for (int j = 0; j < seen; j++) total"),
            ),
            "The sum that divides still counts the later keys, so the weights of a row add up to less than 1. Mask before the "
            "softmax, or do not let the later keys into the sum.",
            "Add up the weights that query 0 uses. What should they add up to?",
        ),
        Mistake(
            "no scale",
            _part(("score[j] = dot * scale;", "score[j] = dot;")),
            "`scale` is an argument and is not used. Without it the largest score takes nearly all the weight.",
            "What does your kernel do with `scale`?",
        ),
        Mistake(
            "not divided by the sum",
            _part(("float_to_bf16(total / sum)", "float_to_bf16(total)")),
            "The exponentials of a row do not add up to 1. Divide by their sum, once at the end.",
            "If all values v are 1, what must come out?",
        ),
        Mistake(
            "each thread's own maximum",
            _part(("    peak = block_max(peak, scratch);\n", "")),
            "Each thread subtracts the largest of the scores that it met itself: the exponentials of different threads are then "
            "in different units.",
            "Which scores went into `peak` of thread 0, and which into that of thread 1?",
        ),
        Mistake(
            "the maximum starts at 0",
            _part(("float peak = MINUS_INFINITY;", "float peak = 0.0f;")),
            "Where all scores lie far below 0, a maximum of 0 is none of them: every exponential comes out as 0, and 0 / 0 is NaN.",
            "What is the largest of -1,000 and -1,001, and what does your loop say?",
        ),
        Mistake(
            "no maximum subtracted",
            _part(("expf(score[j] - peak)", "expf(score[j])")),
            "expf(89) is more than a float can hold. Subtract the largest score first.",
            "What is expf(100.0f)?",
        ),
        Mistake(
            "scores read before all are written",
            _part(
                ("    sum = block_sum(sum, scratch);\n", "    sum = 0.0f;\n"),
                (
                    "for (int j = 0; j < keys; j++) total += score[j] * bf16_to_float(v[((size_t)j * heads + head) * head_dim + d]);",
                    "for (int j = 0; j < keys; j++) {\n            sum += score[j];\n"
                    "            total += score[j] * bf16_to_float(v[((size_t)j * heads + head) * head_dim + d]);\n        }",
                ),
                ("total = 0.0f;", "total = sum = 0.0f;"),
            ),
            "In the last loop every thread reads the scores of all keys, and other threads write them. Between the two a barrier is "
            "needed; block_sum has some, and that is why it stands there.",
            "Thread 0 reads score[1] in the last loop. What makes sure that thread 1 has written it?",
        ),
        Mistake(
            "a token sees the next one",
            _part(("int keys = m - n + i + 1;", "int keys = m - n + i + 2;")),
            "The keys 0 to m - n + i are m - n + i + 1 keys. One more is a token that did not exist when this one was read, and for the "
            "last token it lies behind the array.",
            "With n = m, how many keys does query 0 see?",
            variants=(_part(("int keys = m - n + i + 1;", "int keys = min(m, m - n + i + 2);")),),
        ),
        Mistake(
            "bits multiplied as integers",
            _part(
                (
                    "bf16_to_float(v[((size_t)j * heads + head) * head_dim + d])",
                    "v[((size_t)j * heads + head) * head_dim + d]",
                )
            ),
            "A bf16 is an unsigned short that holds bits. Taken as a number, 1.0 counts as 16,256. bf16_to_float makes the number of the "
            "bits.",
            "What is the value of the unsigned short whose bits mean 1.0?",
            variants=(_part(("bf16_to_float(key[d])", "key[d]")),),
        ),
        Mistake(
            "a scale of its own",
            _part(("score[j] = dot * scale;", "score[j] = dot * rsqrtf(head_dim);")),
            "`scale` is given by the caller. For most models it is 1 / sqrt(head_dim), and not for all; in one of the cases it is not.",
            "What is `scale` in the case that fails, and what is 1 / sqrt(head_dim)?",
        ),
        Mistake(
            "the same value for every key",
            _part(
                (
                    "v[((size_t)j * heads + head) * head_dim + d]",
                    "v[((size_t)i * heads + head) * head_dim + d]",
                )
            ),
            "The weighted sum runs over the values of the keys: v at j. At i, one value is taken again and again.",
            "Whose value does weight j belong to?",
        ),
        Mistake(
            "the head left out",
            _part(("k + ((size_t)j * heads + head) * head_dim", "k + (size_t)j * heads * head_dim")),
            "A token has `heads` rows of k, of v and of q, side by side, and this block's is the row `head`. Without it every head "
            "reads those of head 0, or rows that belong to other tokens.",
            "Where in k, in v and in q does head 1 of token 1 begin?",
            variants=(
                _part(("k + ((size_t)j * heads + head) * head_dim", "k + (size_t)j * head_dim")),
                _part(
                    ("v[((size_t)j * heads + head) * head_dim + d]", "v[(size_t)j * heads * head_dim + d]")
                ),
                _part(("v[((size_t)j * heads + head) * head_dim + d]", "v[(size_t)j * head_dim + d]")),
                _part(("q + ((size_t)i * heads + head) * head_dim", "q + (size_t)i * heads * head_dim")),
                _part(("q + ((size_t)i * heads + head) * head_dim", "q + (size_t)i * head_dim")),
            ),
        ),
        Mistake(
            "one column a thread",
            _part(
                (
                    "for (int d = threadIdx.x; d < head_dim; d += blockDim.x) {",
                    "int d = threadIdx.x;\n    if (d < head_dim) {",
                )
            ),
            "A head may have more columns than the block has threads: Llama 3.1 8B has 128. Share them among the threads in steps of "
            "blockDim.x, as the keys.",
            "Which thread writes column 64?",
        ),
        Mistake(
            "not rounded to BF16",
            _part(("float_to_bf16(total / sum)", "total / sum")),
            "out holds BF16 numbers, as patterns of 16 bits. Given a float, C++ cuts it to a whole number, and 0.4 becomes the "
            "pattern 0. float_to_bf16 makes the pattern.",
            "What does C++ make of 0.4f in an unsigned short?",
        ),
        Mistake(
            "scaled twice",
            _part(("score[j] = dot * scale;", "score[j] = dot * scale * rsqrtf(head_dim);")),
            "`scale` is 1 / sqrt(head_dim) already: the caller has computed it.",
            "What is `scale` in the case that fails?",
        ),
    ),
)


# ---------------- 10.5: what is missing


_PROMPT = "Once upon a time there was a little fox named Pip who lived in a forest."


def _no_rotation(q: Any, k: Any, positions: Any, inv_freq: Any) -> Any:
    return q, k


def _last_outputs(shuffled: bool) -> list[Any]:
    """What attention gives the last token in each layer, in an engine without positions."""
    outputs: list[Any] = []

    def recording(q: Any, k: Any, v: Any, scale: float, out: Any) -> Any:
        reference_attention(q, k, v, scale, out)
        outputs.append(bf16_to_float(out.get())[-1].ravel())
        return out

    with emulation.checks("fast"):
        llm = LLM("tiny-stories", parts=Parts().replace(attention=recording, rope=_no_rotation))
        ids = list(llm.tokenizer.encode(_PROMPT))
        if shuffled:
            ids = [ids[i] for i in np.random.default_rng(0).permutation(len(ids) - 1)] + ids[-1:]
        llm.logits(ids)
    return outputs


@functools.cache
def _changed() -> tuple[int, ...]:
    """By layer: how many of the last token's numbers change by more than 1 % of the largest."""
    pairs = zip(_last_outputs(False), _last_outputs(True), strict=True)
    return tuple(int((np.abs(a - b) > 0.01 * np.abs(a).max()).sum()) for a, b in pairs)


_ORDER = Prediction(
    id="10.5",
    title="what is missing?",
    quantities={
        "numbers": Quantity("numbers of the last token that change, first layer", lambda: _changed()[0]),
        "layers": Quantity("layers, of 5, in which nothing changes", lambda: sum(c == 0 for c in _changed())),
    },
    explains="A sum does not depend on the order of its terms, and the last token sees all keys: its weighted sum in the first layer "
    "is the same for every order. So attention by itself does not know whether Pip named the fox or the fox named Pip. From the second "
    "layer on something changes, because of the mask: a token in the middle has other tokens before it than it had, so its own "
    "output is another, and the last token reads that. But this is a faint trace of the order. Lesson 11 puts it in properly.",
    hints=Hints(
        question="In the first layer each key and value is made of its own token alone. If two keys and their values change places, what "
        "happens to the last token's weighted sum?",
        rule="The last token sees every key, in any order. 0.2 a + 0.3 b is 0.3 b + 0.2 a. In the second layer the keys are made of what "
        "the first layer has made of each token; and a token in the middle sees only those before it.",
        code="numbers = ____\nlayers = ____",
    ),
)


# ---------------- what is drawn and measured


@functools.cache
def _recorded(prompt: str) -> tuple[tuple[str, ...], tuple[tuple[Any, Any], ...]]:
    """A prompt's tokens, and by layer the queries (n, H, D) and keys (m, H, D) that the real model's attention gets."""
    calls: list[tuple[Any, Any]] = []

    def recording(q: Any, k: Any, v: Any, scale: float, out: Any) -> Any:
        calls.append((q.get().copy(), k.get().copy()))
        return reference_attention(q, k, v, scale, out)

    with emulation.checks("fast"):
        llm = LLM("tiny-stories", parts=Parts().replace(attention=recording))
        ids = list(llm.tokenizer.encode(prompt))
        llm.logits(ids)
    return tuple(llm.tokenizer.decode([token]) or "<bos>" for token in ids), tuple(calls)


def _score_picture(answer: Any, cp: Any) -> Any:
    """One head of the real model: the learner's scores, and NumPy's softmax."""
    layer, head = _SHARP
    tokens, calls = _recorded(_PROMPT)
    q, k = (np.ascontiguousarray(array[:, head]) for array in calls[layer])
    n, dim = q.shape
    scores = cp.empty((n, n), np.float32)
    blocks = -(-n // 16)
    arguments = (cp.asarray(q), cp.asarray(k), scores, np.int32(n), np.int32(n), np.int32(dim))
    answer((blocks, blocks), (16, 16), arguments)
    return figures.attention_map(
        _expect_softmax({"scores": scores.get()})["weights"], tokens,
        title=f"Your scores in tiny-stories: layer {layer}, head {head}",
    )  # fmt: skip


_SHARP = (1, 4)  # the head of this model that reads most sharply: one token back, or two


def _head_picture(answer: Any, cp: Any) -> Any:
    """All heads of the real model. With rows of the identity as values, what attention gives back are its weights."""
    _, calls = _recorded(_PROMPT)
    maps: list[Any] = []
    names: list[str] = []
    for layer, (q, k) in enumerate(calls):
        m, heads, dim = k.shape
        weights = np.zeros((heads, m, m))
        for start in range(0, m, dim):
            width = min(dim, m - start)
            v = np.zeros((m, heads, dim), np.uint16)
            v[range(start, start + width), :, range(width)] = 0x3F80
            out = cp.empty(q.shape, np.uint16)
            answer(cp.asarray(q), cp.asarray(k), cp.asarray(v), dim**-0.5, out)
            weights[:, :, start : start + width] = bf16_to_float(out.get()).transpose(1, 0, 2)[..., :width]
        maps.extend(weights)
        names += [f"layer {layer}, head {head}" for head in range(heads)]
    title = "Your attention in tiny-stories: a row for each layer"
    return figures.attention_heads(np.array(maps), names, title=title, columns=heads)


def _make_run(n: int, heads: int, dim: int) -> Any:
    def make(answer: Any, cp: Any) -> Any:
        q = cp.ones((n, heads, dim), np.float32)
        k = cp.asarray(np.full((n, heads, dim), 0x3F80, np.uint16))
        out = cp.empty((n, heads, dim), np.uint16)
        return lambda: answer(q, k, k, dim**-0.5, out)

    return make


_LARGE, _SMALL = (1024, 32, 64), (64, 2, 64)
_WORK = Work(
    label="1,024 tokens, 32 heads of 64",
    make=_make_run(*_LARGE),
    read_bytes=8 * int(np.prod(_LARGE)),
    write_bytes=2 * int(np.prod(_LARGE)),
    small=_make_run(*_SMALL),
    small_read_bytes=8 * int(np.prod(_SMALL)),
    small_write_bytes=2 * int(np.prod(_SMALL)),
    small_label="64 tokens, 2 heads of 64",
)

LESSON = Lesson(
    number="10",
    slug="attention",
    title="Attention",
    part=3,
    minutes=70,
    exercises=(_SCORES, _SOFTMAX, _COST, _PART, _ORDER),
    engine=EngineCard(
        mistakes=(
            ("10.4", "no scale"),
            ("10.4", "the mask ignores the tokens before"),
            ("10.4", "no mask"),
            ("10.4", "heads split wrongly"),
        ),
        prompt="Long ago, there lived a quiet otter named Hazel. One day, Hazel could not find",
        max_tokens=40,
        note="Your attention runs once for each of the 5 layers in every step: first for the whole prompt, then for one new token at "
        "a time. The model has 6 query heads and 2 key heads, and the engine copies the keys for you until lesson 12. The error of "
        "the logits is measured with the whole text as one prompt, where no token comes before the queries.",
        without=("attention_gqa", "attention_tiled", "paged_attention"),
    ),
    pictures={"10.1": _score_picture, "10.4": _head_picture},
    works={"10.4": _WORK},
)
