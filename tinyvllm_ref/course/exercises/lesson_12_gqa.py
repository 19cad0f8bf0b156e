"""Lesson 12: query heads that share keys and values: what it saves, and how a kernel finds the shared head."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tinyvllm_ref import LLM, SamplingParams, emulation
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
from tinyvllm_ref.course.figures.heads import shared_heads
from tinyvllm_ref.kernels.attention import attention as reference_attention
from tinyvllm_ref.parts import Parts

_OUT = Tolerance(
    8e-3, 2e-3, "BF16 keeps 8 significant bits, and the rounding of a large score grows in the exponential"
)


# ---------------- 12.1: bytes of keys and values


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"


def _bytes_cases(rng: np.random.Generator) -> list[Case]:
    def case(name: str, layers: int, kv_heads: int, head_dim: int, group: str) -> Case:
        inputs = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim}
        label = f"{name}: {_counted(layers, 'layer')}, {_counted(kv_heads, 'KV head')} of {head_dim}"
        return Case(label, inputs, group)

    return [
        case("the smallest", 1, 1, 1, "small"),
        case("tiny-stories", 5, 2, 32, "small"),
        case("Llama 3.2 1B", 16, 8, 64, "models"),
        case(
            "drawn", int(rng.integers(2, 90)), int(rng.integers(3, 40)), int(rng.integers(10, 200)), "models"
        ),
    ]


def _run_bytes(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    return {"bytes": answer(inputs["layers"], inputs["kv_heads"], inputs["head_dim"])}


def _expect_bytes(inputs: Any) -> dict[str, Any]:
    """By making the arrays of one token."""
    one = np.zeros((inputs["layers"], inputs["kv_heads"], inputs["head_dim"]), np.uint16)
    return {"bytes": sum(array.nbytes for array in (one, one.copy()))}


def _bytes(expression: str) -> str:
    return f"def kv_bytes_per_token(layers, kv_heads, head_dim):\n    return {expression}\n"


_BYTES = Exercise(
    id="12.1",
    title="bytes of keys and values",
    answer="kv_bytes_per_token",
    kind="function",
    arguments=("layers", "kv_heads", "head_dim"),
    cases=_bytes_cases,
    run=_run_bytes,
    expected=_expect_bytes,
    points={"small": 1, "models": 1},
    hints=Hints(
        question="Take {case}. How many numbers is one key? How many such keys has a token, and what else is kept besides keys?",
        rule="A token keeps a key and a value, in each layer, for each KV head. Each is head_dim numbers of 2 bytes.\n\n"
        "By hand, 5 layers with 2 KV heads of 32: 2 * 5 * 2 * 32 = 640 numbers, 1,280 bytes.",
        code="return 2 * layers * ____ * ____ * ____",
    ),
    mistakes=(
        Mistake(
            "a factor of two missing",
            _bytes("layers * kv_heads * head_dim * 2"),
            "Two things here are two: keys and values are kept, and a BF16 number takes two bytes. One of the two is missing.",
            "What does a query need from an earlier token, besides its key? And how many bytes has a bfloat16?",
        ),
        Mistake(
            "numbers of the keys alone",
            _bytes("layers * kv_heads * head_dim"),
            "This counts numbers, and only those of the keys. Values are kept too, and each number takes two bytes.",
            "What does a query need from an earlier token, besides its key? And how many bytes has a bfloat16?",
        ),
        Mistake(
            "in float32",
            _bytes("2 * layers * kv_heads * head_dim * 4"),
            "Keys and values are kept in BF16, 2 bytes a number. Queries are float32, and nobody keeps them.",
            "In which type did lesson 10 read k and v?",
        ),
        Mistake(
            "one layer",
            _bytes("2 * kv_heads * head_dim * 2"),
            "Each layer has keys and values of its own, made of what the layer before it has computed.",
            "Could layer 1 use the keys of layer 0?",
        ),
        Mistake(
            "bits, not bytes",
            _bytes("2 * layers * kv_heads * head_dim * 16"),
            "A BF16 number has 16 bits. That is 2 bytes.",
            "How many bits has a byte?",
        ),
    ),
)


# ---------------- 12.2: copies


def _repeat_cases(rng: np.random.Generator) -> list[Case]:
    def case(tokens: int, q_heads: int, kv_heads: int, dim: int, group: str) -> Case:
        values = (
            np.arange(tokens * kv_heads * dim)
            if group == "small"
            else rng.standard_normal(tokens * kv_heads * dim)
        )
        kv = bf16_to_float(float_to_bf16(values.reshape(tokens, kv_heads, dim).astype(np.float32)))
        inputs = {"kv": kv, "q_heads": q_heads}
        label = f"{tokens} token{'s' if tokens > 1 else ''}, {q_heads} query and {kv_heads} KV heads of {dim}"
        return Case(label, inputs, group)

    return [
        case(1, 4, 2, 1, "small"),
        case(2, 6, 2, 4, "small"),
        case(3, 6, 3, 5, "awkward"),
        case(5, 12, 4, 33, "awkward"),
        case(7, 3, 3, 10, "awkward"),
        case(int(rng.integers(60, 90)), 8, 1, 7, "awkward"),
    ]


def _run_repeat(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    tokens, kv_heads, dim = inputs["kv"].shape
    bits = (inputs["kv"].view(np.uint32) >> 16).astype(np.uint16)  # exact: these are BF16 numbers
    kv, out = lab.input("kv", bits), lab.output((tokens, inputs["q_heads"], dim), np.uint16)
    sizes = (np.int32(tokens), np.int32(inputs["q_heads"]), np.int32(kv_heads), np.int32(dim))
    answer((-(-tokens * inputs["q_heads"] * dim // 64),), (64,), (kv, out, *sizes))
    return {"out": (lab.get(out).astype(np.uint32) << 16).view(np.float32)}


def _expect_repeat(inputs: Any) -> dict[str, Any]:
    times = inputs["q_heads"] // inputs["kv"].shape[1]
    return {"out": np.repeat(inputs["kv"], times, axis=1)}


_REPEAT_BODY = """    if (p >= tokens * q_heads * head_dim) return;
    int d = p % head_dim, head = p / head_dim % q_heads, token = p / (head_dim * q_heads);
    int kv_head = head / (q_heads / kv_heads);
    out[p] = kv[((size_t)token * kv_heads + kv_head) * head_dim + d];"""


def _repeat(*changes: tuple[str, str]) -> str:
    """A whole answer for 12.2, with some things exchanged."""
    body = _REPEAT_BODY
    body = with_changes(body, changes)
    return f'''repeat_heads = cp.RawKernel(r"""
extern "C" __global__ void repeat_heads(const unsigned short* kv, unsigned short* out, int tokens, int q_heads, int kv_heads,
                                        int head_dim) {{
    int p = blockIdx.x * blockDim.x + threadIdx.x;
{body}
}}
""", "repeat_heads")
'''


_DIVIDE = "int kv_head = head / (q_heads / kv_heads);"
_TILED = (
    "This deals the KV heads out in turn: 0 1 0 1 ... The checkpoints were trained with groups that lie side by side: query heads 0 to "
    "group - 1 read KV head 0, the next ones KV head 1. Divide by the size of the group, do not take a remainder."
)
_INVERTED = (
    "head / kv_heads is the number of the group only if there happen to be as many heads in a group as there are groups. The size of a group is "
    "q_heads / kv_heads: divide by that."
)

_REPEAT = Exercise(
    id="12.2",
    title="copies for every head",
    answer="repeat_heads",
    kind="kernel",
    cases=_repeat_cases,
    run=_run_repeat,
    expected=_expect_repeat,
    points={"small": 1, "awkward": 1, "clean": 1},
    hints=Hints(
        question="Take {case}. How many query heads share a KV head? Write down for each query head which one it reads.",
        rule="A group has q_heads / kv_heads query heads, side by side. Query head h belongs to group h / (q_heads / kv_heads), an integer "
        "division. Element (token, kv_head, d) of kv lies at (token * kv_heads + kv_head) * head_dim + d.\n\n"
        "By hand, 6 query and 2 KV heads: groups of 3. Heads 0, 1, 2 read KV head 0; heads 3, 4, 5 read KV head 1.",
        code="""if (p >= ____) return;
int d = p % head_dim, head = p / head_dim % ____, token = p / (head_dim * ____);
int kv_head = head / (____);
out[p] = kv[((size_t)token * ____ + kv_head) * head_dim + d];""",
    ),
    mistakes=(
        Mistake(
            "KV heads dealt out in turn",
            _repeat((_DIVIDE, "int kv_head = head % kv_heads;")),
            _TILED,
            "With 4 query and 2 KV heads, which two query heads read KV head 0?",
        ),
        Mistake(
            "divided by the number of KV heads",
            _repeat((_DIVIDE, "int kv_head = head / kv_heads;")),
            _INVERTED,
            "With 6 query and 2 KV heads, how many query heads has a group, and what is 5 / 2?",
        ),
        Mistake(
            "rows as long as those of the queries",
            _repeat(("(size_t)token * kv_heads", "(size_t)token * q_heads")),
            "kv is (tokens, kv_heads, head_dim): from one token to the next are kv_heads * head_dim numbers.",
            "Where does token 1 of kv begin?",
        ),
        Mistake(
            "the guard counts what is read",
            _repeat(("tokens * q_heads * head_dim) return", "tokens * kv_heads * head_dim) return")),
            "There is a thread for each element of out, which has q_heads heads a token. With kv_heads in the guard the rest of out "
            "stays empty.",
            "How many elements has out, and how many threads get past your guard?",
        ),
        Mistake(
            "no guard",
            _repeat(("    if (p >= tokens * q_heads * head_dim) return;\n", "")),
            "The grid is rounded up to whole blocks, and the threads past the last element write behind the array.",
            "How many elements has out, and how many threads are there?",
        ),
        Mistake(
            "always KV head 0",
            _repeat((_DIVIDE, "int kv_head = head / q_heads;")),
            "head is always less than q_heads, so this is 0. Every query head then reads the same keys, as in multi-query attention.",
            "What is head / q_heads for the last head?",
        ),
    ),
)


# ---------------- 12.3: what copying costs


@functools.cache
def _copied(max_tokens: int) -> tuple[int, int]:
    """Bytes of repeated keys and values in one layer's last step, and in all layers of all steps of a story."""
    sizes: list[int] = []

    def counting(q: Any, k: Any, v: Any, scale: float, out: Any) -> Any:
        sizes.append(k.nbytes + v.nbytes)  # lesson 10's part is given the copies
        return reference_attention(q, k, v, scale, out)

    with emulation.checks("fast"):
        llm = LLM("tiny-stories", parts=Parts().replace(attention=counting))
        options = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        llm.generate(["Once upon a time"], options, use_tqdm=False)
    return sizes[-1], sum(sizes)


_COPIES = Prediction(
    id="12.3",
    title="what copying costs",
    quantities={
        "last": Quantity("bytes copied in one layer, the last step", lambda: _copied(48)[0]),
        "story": Quantity("bytes copied in all layers, all steps", lambda: _copied(48)[1]),
    },
    explains="A token's repeated keys and values are 2 * 6 * 32 numbers of 2 bytes, 768 bytes. The last step has 52 tokens: 39,936 bytes. Over all "
    "steps it is (5 + 52) * 48 / 2 = 1,368 tokens, so 1,050,624 bytes a layer and five times that in all: more than the model's own "
    "weights, to write 48 tokens. And the sum grows with the square of the length.",
    hints=Hints(
        question="How many bytes are the key and the value of one token in one layer, once they have been repeated for 6 heads of 32?",
        rule="Repeated, a token has 6 keys and 6 values of 32 numbers of 2 bytes, in each layer. Step by step there are 5, 6, 7, ..., 52 tokens; "
        "these add up to (5 + 52) * 48 / 2.",
        code="last = 2 * ____ * 32 * 2 * 52\nstory = 2 * ____ * 32 * 2 * (5 + 52) * 48 // 2 * ____",
    ),
)


# ---------------- 12.4: the part


def _inputs(
    rng: np.random.Generator, n: int, m: int, q_heads: int, kv_heads: int, dim: int
) -> dict[str, Any]:
    def numbers(*shape: int) -> Any:
        """Numbers that BF16 holds, as float32, so that a report shows numbers: quarters where there are few."""
        values = rng.standard_normal(shape)
        return bf16_to_float(
            float_to_bf16((np.round(values * 4) / 4 if m < 4 else values).astype(np.float32))
        )

    return {
        "q": numbers(n, q_heads, dim),
        "k": numbers(m, kv_heads, dim),
        "v": numbers(m, kv_heads, dim),
        "scale": float(np.float32(dim**-0.5)),
    }


def _case(
    rng: np.random.Generator, n: int, m: int, q_heads: int, kv_heads: int, dim: int, group: str
) -> Case:
    label = f"{n} of {m:,} tokens, {q_heads} query and {kv_heads} KV heads of {dim}"
    return Case(label, _inputs(rng, n, m, q_heads, kv_heads, dim), group)


def _part_cases(rng: np.random.Generator) -> list[Case]:
    return [
        _case(rng, 1, 2, 4, 2, 2, "small"),
        _case(rng, 3, 3, 6, 2, 4, "small"),
        _case(rng, 1, 9, 6, 2, 32, "small"),
        _case(rng, 2, 7, 6, 3, 5, "awkward"),
        _case(rng, 5, 12, 8, 2, 20, "awkward"),
        _case(rng, 3, 8, 12, 4, 33, "awkward"),
        _case(rng, 4, 6, 3, 3, 7, "awkward"),
        _case(rng, 4, 6, 8, 1, 3, "awkward"),
        _case(rng, 2, int(rng.integers(1030, 1300)), 6, 2, 24, "awkward"),
    ]


def _run_part(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    k, v = (lab.input(name, (inputs[name].view(np.uint32) >> 16).astype(np.uint16)) for name in "kv")  # exact
    q, out = lab.input("q", inputs["q"]), lab.output(inputs["q"].shape, np.uint16)
    bits = lab.returned(answer(q, k, v, inputs["scale"], out), out)
    return {"out": (bits.astype(np.uint32) << 16).view(np.float32)}


def _expect_part(inputs: Any) -> dict[str, Any]:
    """Attention with repeated heads, in float64."""
    q = inputs["q"].astype(np.float64)
    times = q.shape[1] // inputs["k"].shape[1]
    k, v = (np.repeat(inputs[name].astype(np.float64), times, axis=1) for name in "kv")
    n, m = len(q), len(k)
    scores = np.einsum("nhd,mhd->hnm", q, k) * inputs["scale"]
    scores[:, np.arange(m)[None, :] > np.arange(n)[:, None] + m - n] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return {
        "out": np.einsum("hnm,mhd->nhd", weights / weights.sum(axis=-1, keepdims=True), v).astype(np.float32)
    }


def _no_copies(inputs: Any, outputs: Any, observed: Any) -> str | None:
    (n, q_heads, dim), m = inputs["q"].shape, len(inputs["k"])
    scores, copies = 4 * n * q_heads * m, 2 * m * q_heads * dim * 2
    given = inputs["q"].nbytes + inputs["k"].nbytes + 2 * n * q_heads * dim  # q, and k and v in BF16, and out
    made = observed.peak_bytes - given
    if m < 500 or made <= scores + copies // 4:
        return None
    return (
        f"The values are right, with some {made:,} bytes of new arrays; the scores take {scores:,}. Were keys and values copied for "
        "every head? A kernel that knows which head to read needs no copy"
    )


_KERNEL = r"""
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
_PART_TEXT = (
    '''gqa_kernel = cp.RawKernel(BF16_CUDA + BLOCK_SUM_CUDA + r"""'''
    + _KERNEL
    + '''
extern "C" __global__ void gqa_kernel(const float* q, const bf16* k, const bf16* v, float* scores, bf16* out,
                                      float scale, int n, int m, int q_heads, int kv_heads, int head_dim) {
    extern __shared__ float scratch[];
    int i = blockIdx.x, head = blockIdx.y, keys = m - n + i + 1;
    size_t row = (size_t)i * q_heads + head;
    const float* query = q + row * head_dim;
    float* score = scores + row * m;
    int kv_head = head / (q_heads / kv_heads);
    float peak = MINUS_INFINITY;
    for (int j = threadIdx.x; j < keys; j += blockDim.x) {
        const bf16* key = k + ((size_t)j * kv_heads + kv_head) * head_dim;
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
    for (int d = threadIdx.x; d < head_dim; d += blockDim.x) {
        float total = 0.0f;
        for (int j = 0; j < keys; j++) {
            const bf16* value = v + ((size_t)j * kv_heads + kv_head) * head_dim;
            total += score[j] * bf16_to_float(value[d]);
        }
        out[row * head_dim + d] = float_to_bf16(total / sum);
    }
}
""", "gqa_kernel")


def attention_gqa(q, k, v, scale, out):
    n, q_heads, head_dim = q.shape
    m, kv_heads, threads = len(k), k.shape[1], 64
    scores = cp.empty((n, q_heads, m), np.float32)
    sizes = (np.int32(n), np.int32(m), np.int32(q_heads), np.int32(kv_heads), np.int32(head_dim))
    arguments = (q, k, v, scores, out, np.float32(scale), *sizes)
    gqa_kernel((n, q_heads), (threads,), arguments, shared_mem=4 * threads)
    return out
'''
)
_KEY = "k + ((size_t)j * kv_heads + kv_head) * head_dim"
_VALUE = "v + ((size_t)j * kv_heads + kv_head) * head_dim"


def _part(*changes: tuple[str, str]) -> str:
    """A whole answer for 12.4, with some things exchanged."""
    text = _PART_TEXT
    return with_changes(text, changes)


_PART = Exercise(
    id="12.4",
    title="no copies: the part",
    answer="attention_gqa",
    kind="function",
    arguments=("q", "k", "v", "scale", "out"),
    uses=("BF16_CUDA", "BLOCK_SUM_CUDA"),
    cases=_part_cases,
    run=_run_part,
    expected=_expect_part,
    points={"small": 1, "awkward": 2, "clean": 1},
    tolerance=_OUT,
    verify=_no_copies,
    makes={"attention_gqa": "attention_gqa"},
    file="attention_gqa.py",
    hints=Hints(
        question="Take {case}. Which KV head does the last query head read? Where in k does that head's row of token 1 begin?",
        rule="Three places change. kv_head = head / (q_heads / kv_heads). Row (j, kv_head) of k begins (j * kv_heads + kv_head) * head_dim elements "
        "in, and the same holds for v. Everything that belongs to the query stays as it was: q, scores and out have q_heads rows for each "
        "token.\n\nBy hand, 6 query and 2 KV heads of 4: query head 5 reads KV head 1; for token 1 its key begins (1 * 2 + 1) * 4 = 12 elements in.",
        code="int kv_head = head / (____);\n...\nconst bf16* key = k + ((size_t)j * ____ + ____) * head_dim;\n...\n"
        "const bf16* value = v + ((size_t)j * ____ + ____) * head_dim;",
    ),
    mistakes=(
        Mistake(
            "KV heads dealt out in turn",
            _part((_DIVIDE, "int kv_head = head % kv_heads;")),
            _TILED,
            "With 4 query and 2 KV heads, which two query heads read KV head 0?",
        ),
        Mistake(
            "divided by the number of KV heads",
            _part((_DIVIDE, "int kv_head = head / kv_heads;")),
            _INVERTED,
            "With 6 query and 2 KV heads, how many query heads has a group, and what is 5 / 2?",
        ),
        Mistake(
            "always KV head 0",
            _part((_DIVIDE, "int kv_head = head / q_heads;")),
            "head is always less than q_heads, so this is 0, and the other KV heads are never read.",
            "What is head / q_heads for the last head?",
        ),
        Mistake(
            "keys looked for where unshared ones would be",
            _part(
                (_KEY, "k + ((size_t)j * q_heads + kv_head) * head_dim"),
                (_VALUE, "v + ((size_t)j * q_heads + kv_head) * head_dim"),
            ),
            "k and v are (m, kv_heads, head_dim): from one token to the next are kv_heads rows, not q_heads, and the row in it is kv_head, not head. "
            "Elsewhere lie the keys of later tokens, or nothing.",
            "With 2 KV heads, how many rows of k belong to one token, and which of them does query head 3 read?",
            variants=(
                _part((_KEY, "k + ((size_t)j * q_heads + kv_head) * head_dim")),
                _part((_KEY, "k + ((size_t)j * kv_heads + head) * head_dim")),
                _part((_KEY, "k + ((size_t)j * q_heads + head) * head_dim")),
            ),
        ),
        Mistake(
            "keys shared and values not",
            _part((_VALUE, "v + ((size_t)j * q_heads + head) * head_dim")),
            "The scores are made with the shared key, and then the value is looked for where an unshared one would be. v is laid out as k is.",
            "Which row of v belongs to the key that score[j] was made of?",
            variants=(_part((_VALUE, "v + ((size_t)j * kv_heads + head) * head_dim")),),
        ),
        Mistake(
            "a block for each KV head",
            _part(("gqa_kernel((n, q_heads),", "gqa_kernel((n, kv_heads),")),
            "Each query head needs its own scores and its own sum, so there are n * q_heads blocks. With fewer, the last query heads are never "
            "computed.",
            "How many rows of out does a block write, and how many are there?",
        ),
        Mistake(
            "copied for every head",
            _part(
                ("    m, kv_heads, threads = len(k), k.shape[1], 64\n", "    times = q_heads // k.shape[1]\n"
                 "    k, v = cp.repeat(k, times, axis=1), cp.repeat(v, times, axis=1)\n"
                 "    m, kv_heads, threads = len(k), k.shape[1], 64\n"),
            ),
            "The values are right, and the keys and values were copied first, as the engine did for lesson 10. This exercise is about leaving them "
            "where they are.",
            "How many bytes of new arrays does your function make, besides the scores?",
        ),
    ),
)  # fmt: skip


# ---------------- 12.5: stretch, the reading shared as well


def _group_cases(rng: np.random.Generator) -> list[Case]:
    return [
        _case(rng, 1, 2, 4, 2, 2, "small"),
        _case(rng, 3, 3, 6, 2, 4, "small"),
        _case(rng, 2, 7, 6, 3, 5, "awkward"),
        _case(rng, 3, 9, 8, 1, 33, "awkward"),
        _case(rng, 4, 6, 3, 3, 7, "awkward"),
        _case(rng, 1, int(rng.integers(520, 640)), 8, 2, 32, "awkward"),
        _far_apart(rng),
    ]


def _far_apart(rng: np.random.Generator) -> Case:
    """The heads of a group have scores of very different sizes, so that none can do with another's largest."""
    case = _case(rng, 2, 7, 6, 2, 8, "awkward")
    sizes = np.array([1, 200, 1, 1, 1, 300], np.float32)[
        :, None
    ]  # the first head of each group is a quiet one
    q = bf16_to_float(float_to_bf16(case.inputs["q"] * sizes))
    return Case(f"{case.label}, one of a group with large scores", {**case.inputs, "q": q}, case.group)


def _read_once(inputs: Any, outputs: Any, observed: Any) -> str | None:
    (n, q_heads, dim), (m, kv_heads, _) = inputs["q"].shape, inputs["k"].shape
    if m < 500:
        return None
    shared, each = 4 * n * m * kv_heads * dim, 4 * n * m * q_heads * dim  # bytes of k and v
    rest = 8 * n * m * q_heads * dim  # a query's columns for each key, a score for each value
    asked = observed.total("global_bytes")
    if asked <= rest + (shared + each) // 2:
        return None
    return (
        f"The values are right, and {asked:,} bytes are asked for. With each key and each value read once for its whole group, about "
        f"{rest + shared:,} are enough"
    )


_GROUP_KERNEL = r"""
    float dot[8];
    int i = blockIdx.x, kv_head = blockIdx.y, group = q_heads / kv_heads, keys = m - n + i + 1;
    size_t first = (size_t)i * q_heads + kv_head * group;
    const float* query = q + first * head_dim;
    float* score = scores + first * m;
    for (int j = threadIdx.x; j < keys; j += blockDim.x) {
        const bf16* key = k + ((size_t)j * kv_heads + kv_head) * head_dim;
        for (int g = 0; g < group; g++) dot[g] = 0.0f;
        for (int d = 0; d < head_dim; d++) {
            float x = bf16_to_float(key[d]);
            for (int g = 0; g < group; g++) dot[g] += query[g * head_dim + d] * x;
        }
        for (int g = 0; g < group; g++) score[(size_t)g * m + j] = dot[g] * scale;
    }
    float sum[8];
    for (int g = 0; g < group; g++) {
        float* row = score + (size_t)g * m;
        float peak = MINUS_INFINITY;
        for (int j = threadIdx.x; j < keys; j += blockDim.x) peak = fmaxf(peak, row[j]);
        peak = block_max(peak, scratch);
        sum[g] = 0.0f;
        for (int j = threadIdx.x; j < keys; j += blockDim.x) {
            row[j] = expf(row[j] - peak);
            sum[g] += row[j];
        }
        sum[g] = block_sum(sum[g], scratch);
    }
    for (int d = threadIdx.x; d < head_dim; d += blockDim.x) {
        float total[8];
        for (int g = 0; g < group; g++) total[g] = 0.0f;
        for (int j = 0; j < keys; j++) {
            float x = bf16_to_float(v[((size_t)j * kv_heads + kv_head) * head_dim + d]);
            for (int g = 0; g < group; g++) total[g] += score[(size_t)g * m + j] * x;
        }
        for (int g = 0; g < group; g++) out[(first + g) * head_dim + d] = float_to_bf16(total[g] / sum[g]);
    }
"""


def _group(*changes: tuple[str, str]) -> str:
    """A whole answer for 12.5, with some things exchanged."""
    text = (
        '''group_kernel = cp.RawKernel(BF16_CUDA + BLOCK_SUM_CUDA + r"""'''
        + _KERNEL
        + """
extern "C" __global__ void group_kernel(const float* q, const bf16* k, const bf16* v, float* scores, bf16* out,
                                        float scale, int n, int m, int q_heads, int kv_heads, int head_dim) {
    extern __shared__ float scratch[];"""
        + _GROUP_KERNEL
        + '''}
""", "group_kernel")


def attention_groups(q, k, v, scale, out):
    n, q_heads, head_dim = q.shape
    m, kv_heads, threads = len(k), k.shape[1], 64
    scores = cp.empty((n, q_heads, m), np.float32)
    sizes = (np.int32(n), np.int32(m), np.int32(q_heads), np.int32(kv_heads), np.int32(head_dim))
    arguments = (q, k, v, scores, out, np.float32(scale), *sizes)
    group_kernel((n, kv_heads), (threads,), arguments, shared_mem=4 * threads)
    return out
'''
    )
    return with_changes(text, changes)


_GROUP = Exercise(
    id="12.5",
    title="read once for the group",
    answer="attention_groups",
    kind="function",
    arguments=("q", "k", "v", "scale", "out"),
    uses=("BF16_CUDA", "BLOCK_SUM_CUDA"),
    cases=_group_cases,
    run=_run_part,
    expected=_expect_part,
    points={"small": 1, "awkward": 2, "clean": 1},
    tolerance=_OUT,
    verify=_read_once,
    stretch=True,
    hints=Hints(
        question="Take {case}. Which query heads does the block of KV head 0 serve, and where do their rows of q, scores and out begin?",
        rule="The query heads of a group lie side by side: group of them, from kv_head * group on. So their rows of q, of scores and of out are "
        "neighbours too. For a key, read each element once, and add its product to `group` sums. The softmax is done head by head, group times. "
        "For a column of v, read each element once, and add it to `group` totals.\n\n"
        "By hand, 6 query and 2 KV heads: the block of KV head 1 keeps three sums a key, for the query heads 3, 4, 5.",
        code="""for (int j = threadIdx.x; j < keys; j += blockDim.x) {
    for (int g = 0; g < group; g++) dot[g] = 0.0f;
    for (int d = 0; d < head_dim; d++) {
        float x = bf16_to_float(____);
        for (int g = 0; g < group; g++) dot[g] += query[____] * x;
    }
    for (int g = 0; g < group; g++) score[____] = dot[g] * scale;
}
for (int g = 0; g < group; g++) { /* peak, exponentials and sum[g] of row g */ }
for (int d = threadIdx.x; d < head_dim; d += blockDim.x) {
    /* group totals; each element of v is read once */
}""",
    ),
    mistakes=(
        Mistake(
            "one row of scores for the whole group",
            _group(
                ("score[(size_t)g * m + j] = dot[g]", "score[j] = dot[g]"),
                ("score + (size_t)g * m;", "score;"),
                ("score[(size_t)g * m + j] * x", "score[j] * x"),
            ),
            "Every query head of the group has scores of its own. In one row each overwrites those of the head before.",
            "How many scores belong to one key in this block?",
        ),
        Mistake(
            "only the first head of the group",
            _group(
                ("group = q_heads / kv_heads,", "group = 1,"),
                ("kv_head * group;", "kv_head * (q_heads / kv_heads);"),
            ),
            "The block must serve all query heads that share this KV head; here the others are never written.",
            "How many rows of out does your block write?",
        ),
        Mistake(
            "groups dealt out in turn",
            _group(
                (
                    "size_t first = (size_t)i * q_heads + kv_head * group;",
                    "size_t first = (size_t)i * q_heads + kv_head;",
                ),
                ("query[g * head_dim + d]", "query[g * kv_heads * head_dim + d]"),
                ("(first + g) * head_dim", "(first + g * kv_heads) * head_dim"),
                ("score[(size_t)g * m + j] = dot[g]", "score[(size_t)g * kv_heads * m + j] = dot[g]"),
                ("score + (size_t)g * m;", "score + (size_t)g * kv_heads * m;"),
                ("score[(size_t)g * m + j] * x", "score[(size_t)g * kv_heads * m + j] * x"),
            ),
            _TILED,
            "With 4 query and 2 KV heads, which two query heads read KV head 0?",
        ),
        Mistake(
            "12.4 once more",
            _PART_TEXT.replace("attention_gqa", "attention_groups"),
            "The values are right, and every query head reads the keys and values for itself. Let a block serve a whole group, and read each "
            "element once.",
            "How many times is one element of k read in your version?",
        ),
        Mistake(
            "one largest score for the whole group",
            _group(
                (
                    """        float peak = MINUS_INFINITY;
        for (int j = threadIdx.x; j < keys; j += blockDim.x) peak = fmaxf(peak, row[j]);
""",
                    """        float peak = MINUS_INFINITY;
        for (int j = threadIdx.x; j < keys; j += blockDim.x) peak = fmaxf(peak, score[j]);
""",
                )
            ),
            "Each head of the group has scores of its own, and so a largest one of its own. With that of the first head, another head's "
            "exponentials may overflow, or all come out as 0.",
            "If the scores of one head reach 10 and those of another 200, what is subtracted from each?",
        ),
        Mistake(
            "sums that go on from key to key",
            _group(
                ("    float dot[8];\n", "    float dot[8] = {};\n"),
                ("        for (int g = 0; g < group; g++) dot[g] = 0.0f;\n", ""),
            ),
            "A thread takes several keys, and each key's dot products begin at 0 again.",
            "What is in dot[0] when a thread begins with its second key?",
        ),
        Mistake(
            "sums that begin at nothing",
            _group(("        for (int g = 0; g < group; g++) dot[g] = 0.0f;\n", "")),
            "An array of a thread's own holds whatever was there before. Set each sum to 0, for every key.",
            "What is in dot[0] before the first `+=`?",
        ),
        Mistake(
            "keys and values looked for where unshared ones would be",
            _group(
                ("k + ((size_t)j * kv_heads + kv_head)", "k + ((size_t)j * q_heads + kv_head)"),
                ("v[((size_t)j * kv_heads + kv_head)", "v[((size_t)j * q_heads + kv_head)"),
            ),
            "k and v are (m, kv_heads, head_dim): from one token to the next are kv_heads rows.",
            "With 2 KV heads, where does token 1 of k begin?",
            variants=(
                _group(("k + ((size_t)j * kv_heads + kv_head)", "k + ((size_t)j * q_heads + kv_head)")),
            ),
        ),
    ),
)


# ---------------- what is drawn and measured


def draw_kinds() -> Any:
    """Six query heads with six, two and one KV heads: as many as there are colours for."""
    kinds = {
        "Multi-head attention: 6 and 6": 6,
        "Grouped-query attention: 6 and 2": 2,
        "Multi-query attention: 6 and 1": 1,
    }
    panels = {name: [{head // (6 // kv_heads)} for head in range(6)] for name, kv_heads in kinds.items()}
    return shared_heads(panels, title="Who reads whose keys and values")


def _cache_picture(answer: Any, cp: Any) -> Any:
    """The cache of Llama 3.2 1B's sizes over the length of the text, by the learner's function."""
    lengths = 2 ** np.arange(10, 18)
    kinds = {"MHA: 32 KV heads": 32, "GQA: 8, as it is": 8, "MQA: 1": 1}
    lines = {name: lengths * answer(16, kv_heads, 64) / 1e9 for name, kv_heads in kinds.items()}
    lines["its weights"] = np.full(len(lengths), 2.47)
    return figures.error_lines(
        lengths, lines, "tokens of one request", "GB of keys and values",
        title="Llama 3.2 1B: keys and values of one request", log_x=True, log_y=True,
    )  # fmt: skip


def _head_picture(answer: Any, cp: Any) -> Any:
    """Which KV heads each query head reads, from the learner's own run with the sizes of tiny-stories and of Llama 3.2 1B."""
    panels = {}
    for name, q_heads, kv_heads in (("tiny-stories: 6 and 2", 6, 2), ("Llama 3.2 1B: 32 and 8", 32, 8)):
        dim = 2
        q = cp.ones((1, q_heads, dim), np.float32)
        k, v = (cp.asarray(np.full((3, kv_heads, dim), 0x3F80, np.uint16)) for _ in range(2))
        with cp.trace() as trace:
            answer(q, k, v, 1.0, cp.empty((1, q_heads, dim), np.uint16))
        rows = trace.rows
        mine = rows[(rows["array"] == "k") & (rows["kind"] == "read")]
        if not len(mine):
            raise ValueError("no kernel parameter of yours is called k")
        panels[name] = [
            {int(index) // dim % kv_heads for index in mine["index"][mine["block"] == head]}
            for head in range(q_heads)
        ]
    return shared_heads(panels, title="Your kernel: which KV head each query head reads")


def _make_run(n: int, m: int, q_heads: int, kv_heads: int, dim: int) -> Any:
    def make(answer: Any, cp: Any) -> Any:
        q = cp.ones((n, q_heads, dim), np.float32)
        k, v = (cp.asarray(np.full((m, kv_heads, dim), 0x3F80, np.uint16)) for _ in range(2))
        out = cp.empty((n, q_heads, dim), np.uint16)
        return lambda: answer(q, k, v, dim**-0.5, out)

    return make


_LARGE, _SMALL = (1, 8192, 32, 8, 64), (1, 256, 8, 2, 64)


def _least(n: int, m: int, q_heads: int, kv_heads: int, dim: int) -> tuple[int, int]:
    return 4 * n * q_heads * dim + 4 * m * kv_heads * dim, 2 * n * q_heads * dim


_WORK = Work(
    label="one new token, 8,192 keys, 32 and 8 heads of 64",
    make=_make_run(*_LARGE),
    read_bytes=_least(*_LARGE)[0],
    write_bytes=_least(*_LARGE)[1],
    small=_make_run(*_SMALL),
    small_read_bytes=_least(*_SMALL)[0],
    small_write_bytes=_least(*_SMALL)[1],
    small_label="one new token, 256 keys, 8 and 2 heads of 64",
)

LESSON = Lesson(
    number="12",
    slug="gqa",
    title="Grouped-query attention",
    part=3,
    minutes=45,
    exercises=(_BYTES, _REPEAT, _COPIES, _PART, _GROUP),
    engine=EngineCard(
        mistakes=(
            ("12.4", "KV heads dealt out in turn"),
            ("12.4", "always KV head 0"),
        ),
        note="Once you have this part the engine no longer copies keys and values for you: it hands them over as they lie in the cache, 2 heads "
        "for 6.",
        without=("attention_tiled", "paged_attention"),
    ),
    pictures={"12.1": _cache_picture, "12.4": _head_picture},
    works={"12.4": _WORK, "12.5": _WORK},
)
