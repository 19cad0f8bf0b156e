"""Lesson 20: a softmax that sees each score once, partial results that merge, and attention without a matrix of scores."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from tinyvllm_ref import device, emulation
from tinyvllm_ref.bf16 import bf16_to_float, float_to_bf16
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
    Tolerance,
    Work,
    with_changes,
)
from tinyvllm_ref.kernels.attention import attention as reference_attention

_EXACT_ENOUGH = Tolerance(1e-9, 1e-12, "float64, added up in another order")
_MERGED = Tolerance(1e-5, 1e-6, "float32: one expf, one logf and one division a merge")
_OUT = Tolerance(
    8e-3, 2e-3, "BF16 keeps 8 significant bits, and the rounding of a large score grows in the exponential"
)


def _changed(text: str, *changes: tuple[str, str]) -> str:
    return with_changes(text, changes)


# ---------------- 20.1: one pass


def _pass_cases(rng: np.random.Generator) -> list[Case]:
    def case(label: str, scores: Any, columns: int, group: str) -> Case:
        scores = np.asarray(scores, np.float64)
        return Case(label, {"scores": scores, "values": rng.standard_normal((len(scores), columns))}, group)

    count = int(rng.integers(30, 60))
    return [
        case("scores 1, 3, 2", [1, 3, 2], 1, "small"),
        case("scores 4, 1", [4, 1], 2, "small"),
        case("one score, -1,000", [-1000], 3, "awkward"),
        case("rising scores, up to 1,000", np.linspace(0, 1000, 40), 3, "awkward"),
        case("falling scores, from -1,000", np.linspace(-1000, -1100, 25), 2, "awkward"),
        case(f"{count} random scores", 5 * rng.standard_normal(count), 4, "awkward"),
        case("equal scores", np.full(9, 7.0), 2, "awkward"),
        case("2,000 random scores", rng.standard_normal(2000), 64, "awkward"),
    ]


def _run_pass(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import tracemalloc

    import numpy as np

    buffer = np.empty(inputs["values"].shape[1])

    def stream() -> Any:
        """One pair after the other; the value is in a buffer that the next one overwrites."""
        for score, value in zip(inputs["scores"].tolist(), inputs["values"], strict=True):
            buffer[:] = value
            yield score, buffer

    most, traced = 0, tracemalloc.is_tracing()
    watched = inputs["values"].nbytes > 500_000 and not traced
    if watched:
        tracemalloc.start()
    try:
        with np.errstate(all="ignore"):
            result = answer(stream())
        most = tracemalloc.get_traced_memory()[1] if watched else 0
    finally:
        if watched:
            tracemalloc.stop()
    if not isinstance(result, tuple | list) or len(result) != 3:
        raise TypeError(
            f"one_pass gave {type(result).__name__}; it must give the largest score, the sum and the mean"
        )
    peak, total, out = result
    return {
        "peak": float(peak),
        "sum": float(total),
        "out": np.array(out, np.float64),
        "all values are kept": most > inputs["values"].nbytes / 2,
    }


def _expect_pass(inputs: Mapping[str, Any]) -> dict[str, Any]:
    peak = inputs["scores"].max()
    weights = np.exp(inputs["scores"] - peak)
    return {
        "peak": float(peak),
        "sum": float(weights.sum()),
        "out": weights @ inputs["values"] / weights.sum(),
        "all values are kept": False,
    }


def _one_pass(*changes: tuple[str, str]) -> str:
    return _changed(
        """def one_pass(pairs):
    peak, total, out = -np.inf, 0.0, 0.0
    for score, value in pairs:
        new_peak = max(peak, score)
        shrink = np.exp(peak - new_peak)
        weight = np.exp(score - new_peak)
        total = total * shrink + weight
        out = out * shrink + weight * value
        peak = new_peak
    return peak, total, out / total
""",
        *changes,
    )


_PASS = Exercise(
    id="20.1",
    title="one pass",
    answer="one_pass",
    kind="function",
    arguments=("pairs",),
    cases=_pass_cases,
    run=_run_pass,
    expected=_expect_pass,
    points={"small": 1, "awkward": 1},
    tolerance=_EXACT_ENOUGH,
    hints=Hints(
        question="Take {case}. When a score comes that is larger than all before it, what has been added up already, and against which "
        "maximum was it measured?",
        rule="Keep three things: the largest score so far, the sum of exp(score - largest), and the sum of exp(score - largest) * value. When "
        "the largest score grows from m to m', every old term is exp(score - m) and should be exp(score - m'): multiply both sums by "
        "exp(m - m'). If it does not grow, that factor is 1. Divide once, after the last pair.\n\n"
        "By hand, scores 1, 3: after the first, largest 1, sum 1. Then largest 3, and the old 1 becomes exp(1 - 3) = 0.135; the sum is "
        "0.135 + 1 = 1.135.",
        code="""peak, total, out = -np.inf, 0.0, 0.0
for score, value in pairs:
    new_peak = ____
    shrink = np.exp(____)
    weight = np.exp(____)
    total = total * ____ + weight
    out = ____
    peak = ____
return peak, total, ____""",
    ),
    mistakes=(
        Mistake(
            "the weighted values are not rescaled",
            _one_pass(("out = out * shrink + weight * value", "out = out + weight * value")),
            "The sum shrinks when a larger score comes, and the weighted values do not: what was added to them before is measured against "
            "the old maximum, and counts too much.",
            "After the scores 1 and 3, with which factor does the first value stand in your result?",
        ),
        Mistake(
            "the sum is not rescaled",
            _one_pass(("total = total * shrink + weight", "total = total + weight")),
            "The weighted values shrink when a larger score comes, and the sum does not: its old terms are measured against the old maximum.",
            "After the scores 1 and 3, what is the sum of exp(score - 3)?",
        ),
        Mistake(
            "the final division missing",
            _one_pass(("out / total", "out")),
            "The exponentials do not add up to 1. The weighted mean is the sum of weight times value, divided by the sum of the weights.",
            "If all values are 1, what must come out?",
        ),
        Mistake(
            "no maximum subtracted",
            _one_pass(
                ("shrink = np.exp(peak - new_peak)", "shrink = 1.0"),
                ("np.exp(score - new_peak)", "np.exp(score)"),
            ),
            "exp(1000) is infinite, and infinite over infinite is NaN. Measure every score against the largest so far.",
            "What is exp(1000)?",
        ),
        Mistake(
            "the maximum starts at 0",
            _one_pass(("peak, total, out = -np.inf,", "peak, total, out = 0.0,")),
            "Where all scores lie far below 0, a maximum of 0 is none of them: all exponentials are 0. Begin with minus infinity.",
            "What is the largest of the single score -1,000?",
        ),
        Mistake(
            "the factor upside down",
            _one_pass(("np.exp(peak - new_peak)", "np.exp(new_peak - peak) if np.isfinite(peak) else 0.0")),
            "When the maximum grows, the old terms become *smaller*: exp(old - new), an exponent below 0.",
            "The largest score grows from 1 to 3. Is an old term's exponential larger or smaller afterwards?",
            variants=(_one_pass(("np.exp(peak - new_peak)", "np.exp(new_peak - peak)")),),
        ),
        Mistake(
            "the old maximum overwritten too early",
            _one_pass(("new_peak = max(peak, score)", "peak = new_peak = max(peak, score)")),
            "The factor needs both maxima, the old and the new one. Here the old one has been overwritten before the factor is made of it, "
            "which is then exp(0) = 1, always.",
            "The score 3 comes after 1. Which two numbers does your factor subtract?",
            variants=(_one_pass(("shrink = np.exp(peak - new_peak)", "shrink = 1.0")),),
        ),
        Mistake(
            "all pairs collected first",
            """def one_pass(pairs):
    scores, values = zip(*pairs)
    scores, values = np.array(scores), np.array(values)
    weights = np.exp(scores - scores.max())
    return scores.max(), weights.sum(), weights @ values / weights.sum()
""",
            "A list of all pairs is just what we want to do without. And `value` is a buffer that the next pair overwrites, so the list holds "
            "the last value many times.",
            "How much memory does your function need for a million pairs?",
            variants=(
                """def one_pass(pairs):
    pairs = [(score, value.copy()) for score, value in pairs]
    peak = max(score for score, _ in pairs)
    weights = [np.exp(score - peak) for score, _ in pairs]
    total = sum(weights)
    return peak, total, sum(weight * value for weight, (_, value) in zip(weights, pairs)) / total
""",
            ),
        ),
    ),
)


# ---------------- 20.2: how much memory do the scores take?


def _peak_bytes(attention: Any, n: int, heads: int, dim: int, cp: Any) -> int:
    """Bytes that attention allocates beside its arguments, at most at a time; `cp` is the module that it works with."""
    q = cp.asarray(np.random.default_rng(0).standard_normal((n, heads, dim)).astype(np.float32))
    k = cp.asarray(np.full((n, heads, dim), 0x3F80, np.uint16))
    out = cp.empty((n, heads, dim), np.uint16)
    pool = cp.get_default_memory_pool()
    before, most = pool.used_bytes(), 0

    def allocate(size: int) -> Any:
        nonlocal most
        pointer = pool.malloc(size)
        most = max(most, pool.used_bytes() - before)
        return pointer

    with emulation.checks("fast"), cp.cuda.using_allocator(allocate):
        attention(q, k, k, dim**-0.5, out)
    return most


@functools.cache
def _plain_bytes(n: int) -> int:
    return _peak_bytes(reference_attention, n, 4, 4, device.cp)


_MEMORY = Prediction(
    id="20.2",
    title="how much memory do the scores take?",
    quantities={
        "bytes": Quantity(
            "for 512 tokens and 4 heads, plain attention allocates", lambda: _plain_bytes(512), "bytes"
        ),
        "times": Quantity("for 1,024 tokens, times as many", lambda: _plain_bytes(1024) / _plain_bytes(512)),
    },
    explains="A float32 for each head, query and key: 4 x 4 x 512 x 512 = 4,194,304 bytes. Twice the tokens have four times the pairs, and "
    "so four times the bytes. All else that attention needs grows with the length alone.",
    hints=Hints(
        question="How many pairs of a query and a key are there for 512 tokens, if masked ones get a place too?",
        rule="Plain attention keeps a score in float32, 4 bytes, for each (head, query, key). By hand, 2 heads and 10 tokens: "
        "4 x 2 x 10 x 10 = 800 bytes; for 20 tokens, 3,200.",
        code="bytes = 4 * 4 * ____\ntimes = ____",
    ),
)


# ---------------- 20.3: two partial results become one


def _merge_cases(rng: np.random.Generator) -> list[Case]:
    def case(
        label: str, shape: tuple[int, ...], keys: list[int], group: str, mean: float = 0.0, size: float = 1.0
    ) -> Case:
        """`keys` of each part: 0 for an empty one, whose values are NaN."""
        *rows, dim = shape
        outs, lses = [], []
        for count in keys:
            scores = mean + size * rng.standard_normal((*rows, count))
            values = rng.standard_normal((*rows, count, dim))
            peak = scores.max(axis=-1, keepdims=True, initial=-1e9)
            weights = np.exp(scores - peak)
            total = weights.sum(axis=-1, keepdims=True)
            with np.errstate(all="ignore"):
                outs.append(((weights[..., None] * values).sum(axis=-2) / total).astype(np.float32))
                lse = (peak + np.log(total))[..., 0] if count else np.full(rows, -np.inf)
            lses.append(lse.astype(np.float32))
        return Case(label, {"outs": np.stack(outs), "lses": np.stack(lses)}, group)

    return [
        case("2 and 3 keys, 2 columns", (1, 2), [2, 3], "small"),
        case("5 and 1 keys, 4 rows of 3", (4, 3), [5, 1], "small"),
        case("none and 3 keys", (3, 2), [0, 3], "empty"),
        case("4 keys and none", (3, 5), [4, 0], "empty"),
        case("none and none", (2, 3), [0, 0], "empty"),
        case("scores around 1,000", (3, 2, 20), [7, 4], "awkward", mean=1000),
        case("scores around -1,000", (2, 33), [3, 8], "awkward", mean=-1000),
        case("scores up to 400", (5, 130), [6, 6], "awkward", size=100),
        case("4 parts, one after the other and in pairs", (3, 4, 8), [3, 0, int(rng.integers(4, 9)), 2], "orders"),
        case("5 parts, the first ones empty", (2, 16), [0, 0, 3, 5, 1], "orders"),
    ]  # fmt: skip


def _run_merge(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    parts = [
        (lab.input(f"out_{i}", out), lab.input(f"lse_{i}", lse))
        for i, (out, lse) in enumerate(zip(inputs["outs"], inputs["lses"], strict=True))
    ]

    def merge(one: Any, other: Any) -> Any:
        merged = answer(*one, *other)
        if not isinstance(merged, tuple) or len(merged) != 2:
            raise TypeError(f"merge_attention gave {type(merged).__name__}; it must give (out, lse)")
        return merged

    left = parts[0]
    for part in parts[1:]:
        left = merge(left, part)
    result = {"out": lab.get(left[0]), "lse": lab.get(left[1], "lse")}
    if len(parts) > 2:
        pairs = [merge(parts[i], parts[i + 1]) for i in range(0, len(parts) - 1, 2)] + parts[
            len(parts) // 2 * 2 :
        ]
        while len(pairs) > 1:
            pairs = [merge(pairs[1], pairs[0]), *pairs[2:]]
        result |= {"out, merged in pairs": lab.get(pairs[0][0]), "lse, merged in pairs": lab.get(pairs[0][1])}
    return result


def _a_kernel_ran(inputs: Any, outputs: Any, observed: Any) -> str | None:
    if not observed.launches:
        return "The values are right, and no kernel has run: they were computed in Python. Here a kernel is asked for"
    return None


def _expect_merge(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """All parts at once, in float64, by the weights that their (rounded) lse give them."""
    lses, empty = inputs["lses"].astype(np.float64), np.isinf(inputs["lses"])
    outs = np.where(empty[..., None], 0, inputs["outs"].astype(np.float64))
    peak = np.where(empty.all(axis=0), 0, lses.max(axis=0))
    weights = np.exp(lses - peak)
    total = weights.sum(axis=0)
    with np.errstate(divide="ignore"):
        lse = peak + np.log(total)
    out = (weights[..., None] * outs).sum(axis=0) / np.where(total == 0, 1, total)[..., None]
    expected = {"out": out.astype(np.float32), "lse": lse.astype(np.float32)}
    if len(inputs["outs"]) > 2:
        expected |= {f"{name}, merged in pairs": array for name, array in expected.items()}
    return expected


_MERGE_LINES = """    float peak = fmaxf(lse_a[row], lse_b[row]);
    bool empty = peak == MINUS_INFINITY;
    float a = empty ? 0.0f : expf(lse_a[row] - peak);
    float b = empty ? 0.0f : expf(lse_b[row] - peak);
    for (int d = threadIdx.x; d < width; d += blockDim.x) {
        float total = 0.0f;
        if (a > 0.0f) total += a * out_a[row * width + d];
        if (b > 0.0f) total += b * out_b[row * width + d];
        out[row * width + d] = empty ? 0.0f : total / (a + b);
    }
    if (threadIdx.x == 0) lse[row] = empty ? MINUS_INFINITY : peak + logf(a + b);"""


def _merge(*changes: tuple[str, str]) -> str:
    return _changed(
        f'''merge_kernel = cp.RawKernel(r"""
#define MINUS_INFINITY __uint_as_float(0xFF800000u)
extern "C" __global__ void merge_kernel(const float* out_a, const float* lse_a, const float* out_b, const float* lse_b,
                                        float* out, float* lse, int width) {{
    size_t row = blockIdx.x;
{_MERGE_LINES}
}}
""", "merge_kernel")


def merge_attention(out_a, lse_a, out_b, lse_b):
    width = out_a.shape[-1]
    out, lse = cp.empty(out_a.shape, np.float32), cp.empty(lse_a.shape, np.float32)
    if lse.size:
        arguments = (out_a, lse_a, out_b, lse_b, out, lse, np.int32(width))
        merge_kernel((lse.size,), (64,), arguments)
    return out, lse
''',
        *changes,
    )


_MERGE = Exercise(
    id="20.3",
    title="two partial results become one: a part",
    answer="merge_attention",
    kind="function",
    arguments=("out_a", "lse_a", "out_b", "lse_b"),
    cases=_merge_cases,
    run=_run_merge,
    expected=_expect_merge,
    points={"small": 1, "empty": 1, "awkward": 1, "orders": 1, "clean": 1},
    tolerance=_MERGED,
    verify=_a_kernel_ran,
    makes={"merge_attention": "merge_attention"},
    file="merge_attention.py",
    hints=Hints(
        question="Take {case}. Which of the two parts weighs more in the first row, and by what factor? And what is in the values of a part "
        "without keys?",
        rule="exp(lse) is the sum of a part's exponentials, and so its weight; but exp(1000) is infinite, so subtract the larger lse from "
        "both first. out = (a * out_a + b * out_b) / (a + b), with a = exp(lse_a - peak) and b = exp(lse_b - peak). The new lse is "
        "peak + log(a + b). An lse of minus infinity means no keys: its weight is 0, its values may be NaN and must not be touched. If both "
        "are empty, minus infinity less minus infinity is NaN: give zeros and minus infinity.\n\n"
        "By hand, lse 2 with 10 and lse 1 with 20: peak 2, a = 1, b = 0.368; (10 + 7.36) / 1.368 = 12.69, lse = 2 + log(1.368) = 2.313.",
        code="""float peak = fmaxf(____);
bool empty = peak == ____;
float a = empty ? 0.0f : expf(____);
float b = empty ? 0.0f : expf(____);
for (int d = threadIdx.x; d < width; d += blockDim.x) {
    float total = 0.0f;
    if (a > 0.0f) total += ____;
    if (b > 0.0f) total += ____;
    out[____] = empty ? 0.0f : ____;
}
if (threadIdx.x == 0) lse[row] = empty ? MINUS_INFINITY : ____;""",
    ),
    mistakes=(
        Mistake(
            "two empties make a NaN",
            _merge(("bool empty = peak == MINUS_INFINITY;", "bool empty = false;")),
            "If both are empty the larger lse is minus infinity, and minus infinity less minus infinity is NaN. Two empty parts merge to an "
            "empty one: zeros, and an lse of minus infinity.",
            "Both lse are minus infinity. What is lse_a - peak?",
        ),
        Mistake(
            "the values of an empty part touched",
            _merge(("if (a > 0.0f) total", "total"), ("if (b > 0.0f) total", "total")),
            "A part without keys has the weight 0, but its values may be anything, NaN too, and 0 x NaN is NaN. Do not touch them.",
            "What is 0 times NaN?",
            variants=(_merge(("if (a > 0.0f) total", "if (!empty) total"), ("if (b > 0.0f) total", "if (!empty) total")),),
        ),
        Mistake(
            "the formulas without empty parts",
            _merge(("bool empty = peak == MINUS_INFINITY;", "bool empty = false;"), ("if (a > 0.0f) total", "total"),
                   ("if (b > 0.0f) total", "total")),
            "The formulas hold where both parts have keys. An empty part's weight is 0, and 0 times its NaN is NaN: leave its values alone. "
            "And where both are empty, minus infinity less minus infinity is NaN too.",
            "A part is empty. What is its weight, and what is that times NaN?",
        ),
        Mistake(
            "zero divided by zero",
            _merge(("empty ? 0.0f : total / (a + b)", "total / (a + b)")),
            "Where both parts are empty, a and b are 0, and 0 / 0 is NaN. The result of two empty parts is empty: zeros.",
            "Both weights are 0. What do you divide by?",
        ),
        Mistake(
            "the maximum missing in the new lse",
            _merge((": peak + logf(a + b)", ": logf(a + b)")),
            "a and b are measured against the larger lse, so the logarithm of their sum is too: add that lse again.",
            "Two parts with the same lse of 5: what are a and b, and is the merged lse near 0?",
        ),
        Mistake(
            "the mean of the two",
            _merge(("total / (a + b)", "0.5f * (out_a[row * width + d] + out_b[row * width + d])")),
            "A part over 5 keys counts more than one over 1 key, and a part with large scores more than one with small ones. The weights are "
            "exp(lse).",
            "One part has seen 5 keys, the other 1, all with the same score. Which weights do the two results deserve?",
        ),
        Mistake(
            "no maximum subtracted",
            _merge(("expf(lse_a[row] - peak)", "expf(lse_a[row])"), ("expf(lse_b[row] - peak)", "expf(lse_b[row])"),
                   ("peak + logf(a + b)", "logf(a + b)")),
            "expf(1000.0f) is infinite, and infinite over infinite is NaN; expf(-1000.0f) is 0, and 0 / 0 is NaN. Subtract the larger lse first.",
            "What is expf(1000.0f)?",
            variants=(
                _merge(("float peak = fmaxf(lse_a[row], lse_b[row]);", "float peak = 0.0f;"), ("peak == MINUS_INFINITY", "expf(lse_a[row]) + expf(lse_b[row]) == 0.0f")),
            ),
        ),
        Mistake(
            "not divided by the weights",
            _merge(("total / (a + b)", "total")),
            "a + b is between 1 and 2. The merged result is a weighted mean: divide by the sum of the weights.",
            "If all values are 1 in both parts, what must come out?",
        ),
        Mistake(
            "the logarithms added",
            _merge(("peak + logf(a + b)", "lse_a[row] + lse_b[row]")),
            "The *sums* are added, and lse is the logarithm of the sum: log(exp(lse_a) + exp(lse_b)). Adding logarithms multiplies the sums.",
            "Two parts have one key each with the score 0, so both lse are 0. What is the logarithm of the sum of both exponentials?",
        ),
        Mistake(
            "the larger logarithm kept",
            _merge(("peak + logf(a + b)", "peak")),
            "The merged lse is a little more than the larger one: peak + log(a + b). One merge does not show it; the next one has the wrong "
            "weights.",
            "Two parts have one key each with the score 0. What is the sum of both exponentials, and its logarithm?",
        ),
        Mistake(
            "the weights exchanged",
            _merge(("total += a * out_a", "total += b * out_a"), ("total += b * out_b", "total += a * out_b")),
            "Each part's values go with its own weight.",
            "Whose weight is a?",
        ),
        Mistake(
            "only as many columns as threads",
            _merge(("for (int d = threadIdx.x; d < width; d += blockDim.x) {", "int d = threadIdx.x;\n    if (d < width) {")),
            "Each thread takes one column, and a row may have more columns than the block has threads. Walk on in steps of blockDim.x.",
            "With 130 columns and 64 threads, who takes column 100?",
        ),
    ),
)  # fmt: skip


# ---------------- 20.4: attention in tiles


def _tiled_cases(rng: np.random.Generator) -> list[Case]:
    def case(
        n: int, m: int, heads: tuple[int, int, int], group: str, more: str = "",
        size: float = 1.0, rising: float = 0.0, loud: bool = False,
    ) -> Case:  # fmt: skip
        q_heads, kv_heads, dim = heads
        q = (size * rng.standard_normal((n, q_heads, dim))).astype(np.float32)
        keys = rng.standard_normal((m, kv_heads, dim))
        if rising:  # later keys fit better, so that the maximum moves in every tile
            q = np.abs(q)
            keys += rising * np.linspace(-1, 1, m)[:, None, None]
        values = rng.standard_normal((m, kv_heads, dim))
        if loud:
            values[-1] = 300
        inputs = {
            "q": q,
            "k": float_to_bf16(keys.astype(np.float32)),
            "v": float_to_bf16(values.astype(np.float32)),
            "scale": float(dim**-0.5),
        }
        queries = f"{n:,} quer{'y' if n == 1 else 'ies'}, {m:,} key{'' if m == 1 else 's'}"
        return Case(f"{queries}, {q_heads} and {kv_heads} heads of {dim}{more}", inputs, group)

    return [
        case(2, 2, (1, 1, 2), "small"),
        case(5, 5, (2, 1, 4), "small"),
        case(1, 18, (1, 1, 1), "small", ", later keys fit better", rising=3.0),
        case(1, 1, (1, 1, 1), "awkward"),
        case(3, 37, (4, 2, 33), "awkward"),
        case(70, 70, (3, 1, 8), "awkward", ", a loud last token", loud=True),
        case(19, 50, (2, 2, 20), "awkward", ", later keys fit better", rising=3.0),
        case(int(rng.integers(66, 90)), 130, (2, 1, 8), "awkward", ", large scores", size=60.0),
        case(2, 20, (1, 1, 128), "awkward"),
        case(1025, 1025, (1, 1, 2), "long", ", later keys fit better", rising=3.0),
        case(3, 4097, (2, 1, 8), "long"),
    ]


def _run_tiled(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    arrays = [lab.input(name, inputs[name]) for name in ("q", "k", "v")]
    out = lab.output(inputs["q"].shape, np.uint16)
    bits = lab.returned(answer(*arrays, inputs["scale"], out), out)
    return {"out": (bits.astype(np.uint32) << 16).view(np.float32)}


def _expect_tiled(inputs: Mapping[str, Any]) -> dict[str, Any]:
    (n, q_heads, _), (m, kv_heads, _) = inputs["q"].shape, inputs["k"].shape
    keys, values = (
        np.repeat(bf16_to_float(inputs[name]).astype(np.float64), q_heads // kv_heads, axis=1)
        for name in "kv"
    )
    sees = np.arange(m)[None, :] <= np.arange(n)[:, None] + m - n
    out = np.empty(inputs["q"].shape)
    for head in range(q_heads):
        scores = inputs["q"][:, head].astype(np.float64) @ keys[:, head].T * inputs["scale"]
        scores[~sees] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = weights @ values[:, head] / weights.sum(axis=1, keepdims=True)
    return {"out": out.astype(np.float32)}


def _tiles_are_shared(inputs: Any, outputs: Any, observed: Any) -> str | None:
    if not observed.launches:
        return "The values are right, and no kernel has run: they were computed in Python. Here a kernel is asked for"
    (n, q_heads, dim), m = inputs["q"].shape, len(inputs["k"])
    if n < 1000:
        return (
            "The values are right, and some threads have ended while others of their block wait at a __syncthreads(). A thread without a "
            "query must stay: it helps to bring the tiles"
            if any("had returned" in text for report in observed.launches for text in report.warnings)
            else None
        )
    matrix = 4 * n * m * q_heads
    if observed.peak_bytes > matrix / 8:
        return (
            f"The values are right, and {observed.peak_bytes:,} bytes were allocated, where a matrix of all scores takes {matrix:,}. No "
            "memory that grows with n x m is needed: keep the scores of one tile"
        )
    requests, alone = observed.total("global_read_requests"), n / 32 * m / 2 * 2 * dim * q_heads
    if requests > alone / 3:
        return (
            f"The values are right, and warps went to global memory {requests:,} times: every query reads its keys there by itself. "
            "Let the block bring a tile to shared memory once, for all its queries"
        )
    return None


_LOAD = """        __syncthreads();
        for (int c = threadIdx.x; c < TILE * HEAD_DIM; c += QUERIES) {
            int j = c / HEAD_DIM, d = c % HEAD_DIM;
            size_t place = ((size_t)(start + j) * kv_heads + kv_head) * HEAD_DIM + d;
            keys[j][d] = start + j < last ? bf16_to_float(k[place]) : 0.0f;
            values[j][d] = start + j < last ? bf16_to_float(v[place]) : 0.0f;
        }
        __syncthreads();
"""
_USE = """        int count = min(TILE, seen - start);
        float score[TILE], new_peak = peak;
        for (int j = 0; j < count; j++) {
            score[j] = 0.0f;
            for (int d = 0; d < HEAD_DIM; d++) score[j] += query[d] * keys[j][d];
            new_peak = fmaxf(new_peak, score[j]);
        }
        float shrink = expf(peak - new_peak);
        sum *= shrink;
        for (int d = 0; d < HEAD_DIM; d++) total[d] *= shrink;
        for (int j = 0; j < count; j++) {
            float weight = expf(score[j] - new_peak);
            sum += weight;
            for (int d = 0; d < HEAD_DIM; d++) total[d] += weight * values[j][d];
        }
        peak = new_peak;
"""


def _tiled(*changes: tuple[str, str]) -> str:
    return _changed(
        f'''TILED_CUDA = BF16_CUDA + r"""
#define MINUS_INFINITY __uint_as_float(0xFF800000u)
#define TILE 16
#define QUERIES 64
extern "C" __global__ void tiled(const float* q, const bf16* k, const bf16* v, bf16* out, float scale, int n, int m,
                                 int q_heads, int kv_heads) {{
    __shared__ float keys[TILE][HEAD_DIM], values[TILE][HEAD_DIM];
    int i = blockIdx.x * QUERIES + threadIdx.x, head = blockIdx.y;
    int kv_head = head / (q_heads / kv_heads);
    int seen = i < n ? m - n + i + 1 : 0;
    int last = m - n + min(n, (int)(blockIdx.x + 1) * QUERIES);
    size_t row = ((size_t)i * q_heads + head) * HEAD_DIM;
    float query[HEAD_DIM], total[HEAD_DIM], peak = MINUS_INFINITY, sum = 0.0f;
    for (int d = 0; d < HEAD_DIM; d++) {{
        query[d] = i < n ? q[row + d] * scale : 0.0f;
        total[d] = 0.0f;
    }}
    for (int start = 0; start < last; start += TILE) {{
{_LOAD}{_USE}    }}
    if (i < n)
        for (int d = 0; d < HEAD_DIM; d++) out[row + d] = float_to_bf16(total[d] / sum);
}}
"""
tiled_kernels = {{}}


def attention_tiled(q, k, v, scale, out):
    (n, q_heads, head_dim), (m, kv_heads) = q.shape, k.shape[:2]
    if head_dim not in tiled_kernels:
        tiled_kernels[head_dim] = cp.RawKernel(TILED_CUDA, "tiled", options=(f"-DHEAD_DIM={{head_dim}}",))
    sizes = (np.int32(n), np.int32(m), np.int32(q_heads), np.int32(kv_heads))
    tiled_kernels[head_dim]((-(-n // 64), q_heads), (64,), (q, k, v, out, np.float32(scale), *sizes))
    return out
''',
        *changes,
    )


_SEEN = "int seen = i < n ? m - n + i + 1 : 0;"

_TILED = Exercise(
    id="20.4",
    title="attention in tiles: a part",
    answer="attention_tiled",
    kind="function",
    arguments=("q", "k", "v", "scale", "out"),
    uses=("BF16_CUDA",),
    cases=_tiled_cases,
    run=_run_tiled,
    expected=_expect_tiled,
    points={"small": 1, "awkward": 2, "long": 1, "clean": 1},
    tolerance=_OUT,
    verify=_tiles_are_shared,
    makes={"attention_tiled": "attention_tiled"},
    file="attention_tiled.py",
    hints=Hints(
        question="Take {case}. In the last tile, which keys does the first query see, and which the last? And who writes keys[0][0] of that "
        "tile?",
        rule="Loading: all threads of the block share the TILE * HEAD_DIM numbers of a tile in a strided loop; c / HEAD_DIM is the key in the "
        "tile, c % HEAD_DIM the column. A barrier in front (everyone is done with the old tile) and one behind (the new one is "
        "there). Using it: this thread's query sees count = min(TILE, seen - start) keys of the tile, perhaps none. Scores first, and the "
        "new maximum; then shrink = exp(old - new) for the sum and for every column; then each key's weight is added to the sum, and "
        "weight times value to the columns.\n\n"
        "By hand, tiles of 16 and a query that sees 20 keys: 16 of the first tile, 4 of the second, none (-12) of the third.",
        code="""__syncthreads();
for (int c = threadIdx.x; c < TILE * HEAD_DIM; c += QUERIES) {
    int j = ____, d = ____;
    size_t place = ((size_t)(start + j) * kv_heads + kv_head) * HEAD_DIM + d;
    keys[j][d] = start + j < ____ ? bf16_to_float(k[place]) : 0.0f;
    values[j][d] = ____;
}
____;
int count = min(TILE, ____);
float score[TILE], new_peak = peak;
for (int j = 0; j < count; j++) { ... }
float shrink = ____;
sum *= ____;
for (int d = 0; d < HEAD_DIM; d++) total[d] *= ____;
for (int j = 0; j < count; j++) {
    float weight = ____;
    ...
}
peak = ____;""",
    ),
    mistakes=(
        Mistake(
            "the columns are not rescaled",
            _tiled(("        for (int d = 0; d < HEAD_DIM; d++) total[d] *= shrink;\n", "")),
            "When a tile brings a larger score, what was added up before must shrink by exp(old - new). The sum does, and the columns do not.",
            "A second tile has a larger score. With which maximum were the columns of the first tile measured?",
        ),
        Mistake(
            "the sum is not rescaled",
            _tiled(("        sum *= shrink;\n", "")),
            "The columns shrink when a larger score comes, and the sum does not: the result comes out too small.",
            "A second tile has a larger score. With which maximum were the terms of `sum` measured?",
        ),
        Mistake(
            "not divided by the sum",
            _tiled(("total[d] / sum", "total[d]")),
            "The exponentials do not add up to 1. Divide by their sum, once at the end.",
            "If all values are 1, what must come out?",
        ),
        Mistake(
            "no mask inside a tile",
            _tiled(("min(TILE, seen - start)", "start < seen ? min(TILE, last - start) : 0")),
            "A tile that the query sees in part is taken as a whole: up to 15 keys of later tokens get through. Of the last tile a query sees "
            "seen - start keys.",
            "Query 0 of a prompt sees one key. How many does your kernel give it?",
            variants=tuple(_tiled(("j < count; j++", loop)) for loop in ("j < TILE; j++", "j < TILE && count > 0; j++")),
        ),
        Mistake(
            "the tile filled up to this thread's keys",
            _tiled(("keys[j][d] = start + j < last", "keys[j][d] = start + j < seen"), ("values[j][d] = start + j < last", "values[j][d] = start + j < seen")),
            "A thread brings keys for the whole block, and others see more of them than its own query does. The tile goes up to `last`; "
            "`seen` counts only when the tile is used.",
            "Thread 0's query sees one key. Which keys does it bring for the others?",
        ),
        Mistake(
            "only as many columns as threads",
            _tiled(
                ("for (int c = threadIdx.x; c < TILE * HEAD_DIM; c += QUERIES) {\n            int j = c / HEAD_DIM, d = c % HEAD_DIM;",
                 "for (int j = 0, d = threadIdx.x; j < TILE && d < HEAD_DIM; j++) {"),
            ),
            "Each thread brings one column, and a head may have more columns than the block has threads. Share the TILE * HEAD_DIM numbers in "
            "steps of QUERIES.",
            "With a head of 128 and 64 threads, who brings column 100?",
        ),
        Mistake(
            "a token does not see itself",
            _tiled((_SEEN, "int seen = i < n ? m - n + i : 0;")),
            "The keys 0 to m - n + i are one more than m - n + i. The first token of a text has no key left, and 0 / 0 is NaN.",
            "With n = m, how many keys does query 0 see?",
        ),
        Mistake(
            "a token sees the next one",
            _tiled((_SEEN, "int seen = i < n ? min(m, m - n + i + 2) : 0;"), ("last = m - n + min(n, (int)(blockIdx.x + 1) * QUERIES)", "last = min(m, m - n + min(n, (int)(blockIdx.x + 1) * QUERIES) + 1)")),
            "One key too many gets through, that of the token which the model is about to guess.",
            "With n = m, how many keys does query 0 see?",
        ),
        Mistake(
            "the mask ignores the tokens before",
            _tiled((_SEEN, "int seen = i < n ? i + 1 : 0;")),
            "Query i is token m - n + i, and sees m - n + i + 1 keys. In a decode step n is 1: the newest token would read the first one alone.",
            "In a decode step with 5 keys, n = 1 and i = 0. How many keys must the query see?",
        ),
        Mistake(
            "no barrier before the tile is used",
            _tiled(("        __syncthreads();\n        int count", "        int count")),
            "Every thread reads the whole tile, and other threads bring it. A barrier belongs between bringing and using.",
            "Thread 0 reads keys[1]. What makes sure that it is there?",
        ),
        Mistake(
            "no barrier before the next tile",
            _tiled(("start += TILE) {\n        __syncthreads();\n", "start += TILE) {\n")),
            "A fast thread brings the next tile over the one that a slow thread still reads. In lesson 09 it was the second barrier too.",
            "Thread 0 is done with this tile. What does it write next, and who may still read it?",
        ),
        Mistake(
            "threads leave before the last tile",
            _tiled(("start < last; start += TILE", "start < seen; start += TILE")),
            "Every thread brings its share of every tile and passes every barrier: also one without a query, and one whose query sees "
            "nothing of the later tiles. All go to `last`. Who leaves early leaves holes in the tiles of the others.",
            "With 5 queries and 64 threads, which threads bring the columns of the tile, and do they all come so far?",
            variants=(_tiled(("    size_t row = ", "    if (i >= n) return;\n    size_t row = ")),),
        ),
        Mistake(
            "KV heads dealt out in turn",
            _tiled(("head / (q_heads / kv_heads)", "head % kv_heads")),
            "Query heads of one group share one KV head: head / (q_heads / kv_heads). The remainder deals them out in turn (lesson 12).",
            "With 4 query and 2 KV heads, which KV head does query head 1 read?",
        ),
        Mistake(
            "the query head's number as KV head",
            _tiled(("head / (q_heads / kv_heads)", "head")),
            "There are fewer KV heads than query heads, so the stub has made `kv_head` for you: keys and values are read with it.",
            "How many KV heads are there in your failing case, and which one does query head 1 read?",
            variants=(_tiled(("* kv_heads + kv_head) * HEAD_DIM", "* kv_heads + head) * HEAD_DIM")),),
        ),
        Mistake(
            "the tile's keys alone decide",
            _tiled(("new_peak = peak;\n        for", "new_peak = MINUS_INFINITY;\n        for")),
            "The maximum of a tile may be smaller than the one so far, and exp(old - new) is then more than 1, or infinite; and where a query "
            "sees nothing of a tile it is minus infinity. The maximum so far takes part.",
            "The first tile's maximum is 100 and the second's is 0. What is your shrink?",
        ),
        Mistake(
            "no scale",
            _tiled(("q[row + d] * scale", "q[row + d]")),
            "`scale` is an argument and is not used.",
            "What does your kernel do with `scale`?",
        ),
    ),
)  # fmt: skip


# ---------------- what is drawn and measured


def _running_picture(answer: Any, cp: Any) -> Any:
    """The learner's maximum and sum after each of 48 scores."""
    rng = np.random.default_rng(20)
    scores = np.linspace(1, 5, 48) + 1.2 * rng.standard_normal(48)
    runs = []
    for count in range(1, 49):
        inputs = {"scores": scores[:count], "values": np.zeros((count, 1))}
        runs.append(_run_pass(answer, inputs, None))
    return figures.error_lines(
        np.arange(1, 49),
        {"sum so far": [run["sum"] for run in runs], "largest so far": [run["peak"] for run in runs], "score": scores},
        "scores seen", "", title="Your running maximum and sum",
        subtitle="Where a new maximum comes, the sum drops: it is measured against the new one from then on.",
    )  # fmt: skip


def _memory_picture(answer: Any, cp: Any) -> Any:
    """Peak bytes of plain attention and of the learner's, by length."""
    own = my_engine.parts()
    plain = own.attention_gqa or own.attention or reference_attention
    mine = "learner" in (own.owners().get("attention_gqa"), own.owners().get("attention"))
    lengths = [64, 128, 256, 384, 512]
    peaks = {  # the engine's parts work on the device, and the answer where it was made for
        name: [_peak_bytes(attention, n, 4, 4, module) for n in lengths]
        for name, attention, module in (("plain", plain, device.cp), ("in tiles", answer, cp))
    }
    figure = figures.error_lines(
        lengths, {name: np.array(values) / 2**20 for name, values in peaks.items()}, "tokens", "MiB",
        title="Memory that attention takes beside its arguments",
        subtitle=f"4 heads. At 512 tokens: plain ({'yours' if mine else 'the reference'}) {peaks['plain'][-1]:,} bytes, "
        f"in tiles (yours) {peaks['in tiles'][-1]:,} bytes.",
    )  # fmt: skip
    figure.alt_text += f" At 512 tokens {peaks['plain'][-1]:,} and {peaks['in tiles'][-1]:,} bytes."
    return figure


def _make_run(n: int, m: int, q_heads: int, kv_heads: int, dim: int) -> Any:
    def make(answer: Any, cp: Any) -> Any:
        q = cp.ones((n, q_heads, dim), np.float32)
        k = cp.asarray(np.full((m, kv_heads, dim), 0x3F80, np.uint16))
        out = cp.empty((n, q_heads, dim), np.uint16)
        return lambda: answer(q, k, k, dim**-0.5, out)

    return make


def _bytes(n: int, m: int, q_heads: int, kv_heads: int, dim: int) -> tuple[int, int]:
    return 4 * n * q_heads * dim + 4 * m * kv_heads * dim, 2 * n * q_heads * dim


_LARGE, _SMALL = (2048, 2048, 32, 8, 64), (64, 64, 2, 2, 64)
_WORK = Work(
    label="2,048 tokens, 32 query and 8 KV heads of 64",
    make=_make_run(*_LARGE),
    read_bytes=_bytes(*_LARGE)[0],
    write_bytes=_bytes(*_LARGE)[1],
    small=_make_run(*_SMALL),
    small_read_bytes=_bytes(*_SMALL)[0],
    small_write_bytes=_bytes(*_SMALL)[1],
    small_label="64 tokens, 2 heads of 64",
    note="64 queries share each tile. What moved more than it must are the queries and results: each thread reads and writes a row of its "
    "own, so side by side the threads touch rows that lie far apart.",
)

LESSON = Lesson(
    number="20",
    slug="online_softmax",
    title="Online softmax",
    part=4,
    minutes=60,
    exercises=(_PASS, _MEMORY, _MERGE, _TILED),
    engine=EngineCard(
        mistakes=(
            ("20.4", "the mask ignores the tokens before"),
            ("20.4", "the columns are not rescaled"),
            ("20.4", "not divided by the sum"),
            ("20.4", "KV heads dealt out in turn"),
        ),
        note="Your attention_tiled reads the prompt, and until lesson 22 every new token as well, as a request of one query. "
        "merge_attention has no place in this engine yet: a kernel that cuts the keys of one request into splits calls for it. (Where "
        "logits are compared the text is read in one go, with no tokens before: there the first mistake changes nothing.)",
    ),
    pictures={"20.1": _running_picture, "20.4": _memory_picture},
    works={"20.4": _WORK},
)
