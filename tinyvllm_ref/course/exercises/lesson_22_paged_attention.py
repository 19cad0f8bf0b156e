"""Lesson 22: one new token a request reads its keys and values where they lie, in the blocks of a table."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from tinyvllm_ref import emulation
from tinyvllm_ref.bf16 import bf16_to_float, float_to_bf16
from tinyvllm_ref.course.answers import make_namespace
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
from tinyvllm_ref.course.figures.paging import block_walks
from tinyvllm_ref.emulation import report as launch_reports

_DOT = Tolerance(1e-5, 1e-4, "float32 additions in another order than the oracle's float64")
_OUT = Tolerance(
    8e-3, 2e-3, "BF16 keeps 8 significant bits, and the rounding of a large score grows in the exponential"
)
_NOT_A_NUMBER = 0x7FC0  # as BF16


def _changed(text: str, *changes: tuple[str, str]) -> str:
    return with_changes(text, changes)


# ---------------- inputs and the specification, for the whole lesson


def _paged(
    rng: np.random.Generator,
    lengths: list[int],
    heads: tuple[int, int, int],
    size: int,
    scores: float = 1.0,
    rising: float = 0.0,
) -> dict[str, Any]:
    """A cache in which every slot is a NaN that holds no token of these requests, and its shuffled block tables.

    `heads` are query heads, KV heads and head_dim; `rising` makes later keys fit better (below 0: earlier ones), so that the maximum moves.
    """
    q_heads, kv_heads, dim = heads
    need = [-(-length // size) for length in lengths]
    blocks = rng.permutation(sum(need) + 2)
    caches = np.full((2, len(blocks), size, kv_heads, dim), _NOT_A_NUMBER, np.uint16)
    tables = np.full((len(lengths), max(need) + 1), -1, np.int32)
    q = (scores * rng.standard_normal((len(lengths), q_heads, dim))).astype(np.float32)
    first = 0
    for row, (length, count) in enumerate(zip(lengths, need, strict=True)):
        tables[row, :count] = blocks[first : first + count]
        first += count
        slots = tables[row, np.arange(length) // size].astype(np.int64) * size + np.arange(length) % size
        for which, cache in enumerate(caches):
            values = rng.standard_normal((length, kv_heads, dim))
            if which == 0:
                values += rising * np.linspace(-1, 1, length)[:, None, None] * np.sign(q[row, :1].mean(0))
            cache.reshape(-1, kv_heads, dim)[slots] = float_to_bf16(values.astype(np.float32))
    return {
        "q": q,
        "key_cache": caches[0],
        "value_cache": caches[1],
        "block_tables": tables,
        "context_lens": np.array(lengths, np.int32),
        "scale": float(dim**-0.5),
    }


def _label(lengths: list[int], heads: tuple[int, int, int], size: int, more: str = "") -> str:
    them = ", ".join(f"{length:,}" for length in lengths)
    return f"{them} tokens, {heads[0]} query and {heads[1]} KV heads of {heads[2]}, blocks of {size}{more}"


def _gathered(inputs: Mapping[str, Any], row: int) -> tuple[Any, Any]:
    """Keys and values of one request in order, one for each query head, in float64: (m, Hq, D)."""
    size, times = inputs["key_cache"].shape[1], inputs["q"].shape[1] // inputs["key_cache"].shape[2]
    positions = np.arange(inputs["context_lens"][row])
    blocks = inputs["block_tables"][row, positions // size]
    found = [bf16_to_float(inputs[name][blocks, positions % size]) for name in ("key_cache", "value_cache")]
    keys, values = (np.repeat(array.astype(np.float64), times, axis=1) for array in found)
    return keys, values


# ---------------- 22.1 and 22.5: scores


def _score_cases(rng: np.random.Generator) -> list[Case]:
    def case(lengths: list[int], heads: tuple[int, int, int], size: int, group: str) -> Case:
        return Case(_label(lengths, heads, size), _paged(rng, lengths, heads, size), group)

    return [
        case([3], (1, 1, 2), 2, "small"),
        case([5, 9], (2, 1, 4), 4, "small"),
        case([1, 15, 16, 17], (4, 2, 32), 16, "awkward"),
        case([70, 33], (3, 3, 33), 3, "awkward"),
        case([int(rng.integers(130, 200)), 2], (8, 1, 64), 16, "awkward"),
    ]


def _run_scores(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    (requests, q_heads, dim), kv_heads = inputs["q"].shape, inputs["key_cache"].shape[2]
    max_blocks, size = inputs["block_tables"].shape[1], inputs["key_cache"].shape[1]
    names = ("q", "key_cache", "block_tables", "context_lens")
    arrays = [lab.input(name, inputs[name]) for name in names]
    scores = lab.inout(np.full((requests, q_heads, max_blocks * size), -7, np.float32))  # -7: not written
    sizes = [np.int32(n) for n in (max_blocks, size, q_heads, kv_heads, dim)]
    answer((q_heads, requests), (64,), (*arrays, scores, np.float32(inputs["scale"]), *sizes))
    return {"scores": lab.get(scores)}


def _expect_scores(inputs: Mapping[str, Any]) -> dict[str, Any]:
    (requests, q_heads, _), size = inputs["q"].shape, inputs["key_cache"].shape[1]
    scores = np.full((requests, q_heads, inputs["block_tables"].shape[1] * size), -7, np.float32)
    for row in range(requests):
        keys, _ = _gathered(inputs, row)
        dots = np.einsum("hd,mhd->hm", inputs["q"][row].astype(np.float64), keys)
        scores[row, :, : len(keys)] = dots * inputs["scale"]
    return {"scores": scores}


def _keys_are_shared(inputs: Any, outputs: Any, observed: Any) -> str | None:
    (_, q_heads, dim), longest = inputs["q"].shape, int(inputs["context_lens"].max())
    if longest < 100:
        return None
    requests, alone = observed.total("global_read_requests"), q_heads * longest * dim
    if requests > alone:
        return (
            f"The scores are right, and warps went to global memory {requests:,} times, as often as if one thread did all the work. "
            "Let the threads of the block share the keys: thread t takes keys t, t + 64, ..."
        )
    return None


_SCORE_LINES = """    const int* table = block_tables + request * max_blocks;
    const float* query = q + (size_t)(request * q_heads + head) * head_dim;
    int kv_head = head / (q_heads / kv_heads);
    for (int j = threadIdx.x; j < length; j += blockDim.x) {
        long long slot = (long long)table[j / block_size] * block_size + j % block_size;
        const bf16* key = key_cache + (slot * kv_heads + kv_head) * head_dim;
        float dot = 0.0f;
        for (int d = 0; d < head_dim; d++) dot += query[d] * bf16_to_float(key[d]);
        score[j] = dot * scale;
    }"""


def _scores(*changes: tuple[str, str], name: str = "paged_scores", body: str = _SCORE_LINES) -> str:
    return _changed(
        f'''{name} = cp.RawKernel(BF16_CUDA + r"""
extern "C" __global__ void {name}(
    const float* q, const bf16* key_cache, const int* block_tables, const int* context_lens, float* scores,
    float scale, int max_blocks, int block_size, int q_heads, int kv_heads, int head_dim) {{
    int head = blockIdx.x, request = blockIdx.y, length = context_lens[request];
    float* score = scores + (size_t)(request * q_heads + head) * max_blocks * block_size;
{body}
}}
""", "{name}")
''',
        *changes,
    )


_LOGICAL = (
    "j / block_size is the block's place in the *text*. Where the block lies in the cache the table says: table[j / block_size]. Only "
    "for a request whose blocks lie in order, from 0 on, are the two the same."
)
_TABLE = "(long long)table[j / block_size] * block_size + j % block_size"

_SCORES = Exercise(
    id="22.1",
    title="scores over a block table",
    answer="paged_scores",
    kind="kernel",
    uses=("BF16_CUDA",),
    cases=_score_cases,
    run=_run_scores,
    expected=_expect_scores,
    points={"small": 1, "awkward": 1, "clean": 1},
    tolerance=_DOT,
    verify=_keys_are_shared,
    hints=Hints(
        question="Take {case}. The last key of the first request: which entry of its table names its block, and at which offset does "
        "it lie there?",
        rule="Row `request` of block_tables is this request's table. Key j lies in slot table[j / block_size] * block_size + "
        "j % block_size, and its row for one KV head begins (slot * kv_heads + kv_head) * head_dim numbers in. Query head `head` reads "
        "KV head head / (q_heads / kv_heads). The threads share the keys: j starts at threadIdx.x and goes up by blockDim.x, as long as "
        "it is below length.\n\n"
        "By hand, blocks of 2 and the table 4, 1: key 0 is slot 8, key 1 slot 9, key 2 slot 2.",
        code="""const int* table = block_tables + ____;
const float* query = q + (size_t)(request * q_heads + head) * head_dim;
int kv_head = ____;
for (int j = threadIdx.x; j < ____; j += blockDim.x) {
    long long slot = ____;
    const bf16* key = key_cache + (____) * head_dim;
    float dot = 0.0f;
    for (int d = 0; d < head_dim; d++) dot += ____;
    score[j] = ____;
}""",
    ),
    mistakes=(
        Mistake(
            "logical block used as physical",
            _scores((_TABLE, "j")),
            _LOGICAL,
            "The first block of the first request: which number does the table give it, and which do you?",
        ),
        Mistake(
            "the first request's table for all",
            _scores(("block_tables + request * max_blocks", "block_tables")),
            "Each request has a row of its own in block_tables; request r's begins r * max_blocks entries in.",
            "Where in block_tables does the second request's table begin?",
        ),
        Mistake(
            "the new token left out",
            _scores(("j < length", "j < length - 1")),
            "context_lens counts the new token too: its key has just been written, and a token reads itself.",
            "How many keys does a request with a context of 1 read?",
        ),
        Mistake(
            "the block's tail read too",
            _scores(("j < length", "j < (length + block_size - 1) / block_size * block_size")),
            "The last block is read to its end, also the slots behind the last token. What lies there is whatever the block's last "
            "owner left, or nothing that anyone has written.",
            "The request has 3 tokens in blocks of 2. Which slots of its second block hold a token?",
        ),
        Mistake(
            "slot without block x size",
            _scores((_TABLE, "(long long)table[j / block_size] + j % block_size")),
            "The table counts blocks, and a slot counts tokens: multiply by block_size.",
            "With blocks of 4, which is the first slot of block 2?",
        ),
        Mistake(
            "KV heads dealt out in turn",
            _scores(("head / (q_heads / kv_heads)", "head % kv_heads")),
            "Query heads 0, 1, 2, ... of one group share one KV head: head / (q_heads / kv_heads). The remainder deals them out in "
            "turn (lesson 12).",
            "With 4 query and 2 KV heads, which KV head does query head 1 read?",
        ),
        Mistake(
            "the query head's number as KV head",
            _scores(("head / (q_heads / kv_heads)", "head")),
            "There are fewer KV heads than query heads: head number 1 of 2 query heads does not exist in a cache with one.",
            "How many heads has the cache in your failing case?",
        ),
        Mistake(
            "no scale",
            _scores(("dot * scale", "dot")),
            "`scale` is an argument and is not used.",
            "How large is your score, divided by the expected one?",
        ),
        Mistake(
            "only as many keys as threads",
            _scores(
                (
                    "for (int j = threadIdx.x; j < length; j += blockDim.x) {",
                    "int j = threadIdx.x;\n    if (j < length) {",
                )
            ),
            "Each thread takes one key, and a text has more keys than the block has threads. Walk on in steps of blockDim.x.",
            "With 70 keys and 64 threads, who takes key 64?",
        ),
        Mistake(
            "the table read to its end",
            _scores(("j < length", "j < max_blocks * block_size")),
            "max_blocks is the length of a row of the array, and most requests have fewer blocks: the rest of the row is -1, and block -1 lies "
            "in front of the cache. Stop at length.",
            "What does the table hold behind the request's last block?",
        ),
        Mistake(
            "the KV heads of a slot forgotten",
            _scores(("(slot * kv_heads + kv_head) * head_dim", "slot * head_dim")),
            "A slot holds a row for each KV head: slot s begins s * kv_heads rows in, and this head's row lies kv_head rows further. With one "
            "KV head nobody notices.",
            "With 2 KV heads, how many rows of head_dim numbers lie in front of slot 1?",
            variants=(
                _scores(("(slot * kv_heads + kv_head) * head_dim", "(slot + kv_head) * head_dim")),
                _scores(("(slot * kv_heads + kv_head) * head_dim", "slot * kv_heads * head_dim")),
            ),
        ),
        Mistake(
            "the heads in front of the slots",
            _scores(
                (
                    "(slot * kv_heads + kv_head) * head_dim",
                    "((long long)(table[j / block_size] * kv_heads + kv_head) * block_size + j % block_size) * head_dim",
                )
            ),
            "In this cache a block is (block_size, kv_heads, head_dim): the heads of one token lie side by side, and then comes the next token.",
            "The cache is (blocks, block_size, kv_heads, head_dim). What lies behind the row of KV head 0 of a token?",
        ),
        Mistake(
            "the first request's query for all",
            _scores(("q + (size_t)(request * q_heads + head) * head_dim", "q + (size_t)head * head_dim")),
            "q is (requests, q_heads, head_dim): each request has a query of its own for each head.",
            "How many rows of q lie in front of the first query of request 1?",
        ),
    ),
)


def _lanes_are_neighbours(inputs: Any, outputs: Any, observed: Any) -> str | None:
    (_, q_heads, dim), tokens = inputs["q"].shape, int(inputs["context_lens"].sum())
    if dim < 64:
        return None
    # a key row of 64 numbers in two requests of 2 sectors, the query once more a key in the worst case, the score
    sectors, enough = observed.total("global_sectors"), q_heads * tokens * (dim // 32) * 8
    if sectors > 2 * enough:
        return (
            f"The scores are right, and {sectors:,} sectors were touched, where {enough:,} are enough: the lanes of a warp read different "
            "keys at a time. Let lane l read column l of one and the same key"
        )
    if sectors > enough:
        return (
            f"The scores are right, and {sectors:,} sectors were touched, where {enough:,} are enough: lanes side by side read columns that "
            "do not lie side by side. Let lane l read column l, and then l + 32"
        )
    return None


_WARP_LINES = """    const int* table = block_tables + request * max_blocks;
    const float* query = q + (size_t)(request * q_heads + head) * head_dim;
    int kv_head = head / (q_heads / kv_heads);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int j = warp; j < length; j += blockDim.x / 32) {
        long long slot = (long long)table[j / block_size] * block_size + j % block_size;
        const bf16* key = key_cache + (slot * kv_heads + kv_head) * head_dim;
        float dot = 0.0f;
        for (int d = lane; d < head_dim; d += 32) dot += query[d] * bf16_to_float(key[d]);
        for (int offset = 16; offset > 0; offset /= 2) dot += __shfl_down_sync(0xffffffff, dot, offset);
        if (lane == 0) score[j] = dot * scale;
    }"""


def _warp(*changes: tuple[str, str]) -> str:
    return _scores(*changes, name="warp_scores", body=_WARP_LINES)


_WARPS = Exercise(
    id="22.5",
    title="a warp for each key",
    answer="warp_scores",
    kind="kernel",
    uses=("BF16_CUDA",),
    cases=_score_cases,
    run=_run_scores,
    expected=_expect_scores,
    points={"small": 1, "awkward": 1, "clean": 1},
    tolerance=_DOT,
    verify=_lanes_are_neighbours,
    stretch=True,
    hints=Hints(
        question="Take {case}. In one turn of a warp, which numbers of the key do its 32 lanes read?",
        rule="A warp takes a key: j = warp, then warp + 2, ... with 64 threads. Lane l takes the columns l, l + 32, ... and adds up its "
        "products. Then the 32 sums become one by shuffles, as in 06.6: offsets 16, 8, 4, 2, 1. Lane 0 stores the score.",
        code="""for (int j = warp; j < length; j += ____) {
    ...
    for (int d = lane; d < head_dim; d += ____) dot += ____;
    for (int offset = 16; offset > 0; offset /= 2) dot += __shfl_down_sync(0xffffffff, dot, ____);
    if (____) score[j] = dot * scale;
}""",
    ),
    mistakes=(
        Mistake(
            "one lane's part alone",
            _warp(
                (
                    "        for (int offset = 16; offset > 0; offset /= 2) dot += __shfl_down_sync(0xffffffff, dot, offset);\n",
                    "",
                )
            ),
            "Each lane has summed the products of its own columns. Lane 0's sum is a 32nd of the dot product until the shuffles have "
            "brought the others to it.",
            "Which columns are in lane 0's sum?",
        ),
        Mistake(
            "any lane stores",
            _warp(("if (lane == 0) score[j]", "score[j]")),
            "After the shuffles lane 0 alone holds the whole sum. All lanes write to one place, and the last one to come wins.",
            "Which lane holds the whole sum after the shuffles?",
        ),
        Mistake(
            "only 32 columns",
            _warp(
                (
                    "for (int d = lane; d < head_dim; d += 32) dot += query[d] * bf16_to_float(key[d]);",
                    "if (lane < head_dim) dot = query[lane] * bf16_to_float(key[lane]);",
                )
            ),
            "A lane takes one column, and heads have 64 or more. Walk on in steps of 32.",
            "With a head of 33, who takes column 32?",
        ),
        Mistake(
            "a thread a key once more",
            _scores(name="warp_scores"),
            "This is 22.1: right, and side by side its lanes read rows that lie far apart.",
            "In one turn of a warp, how many different keys are read?",
        ),
        Mistake(
            "a stretch of columns for each lane",
            _warp(
                (
                    "for (int d = lane; d < head_dim; d += 32)",
                    "int each = (head_dim + 31) / 32;\n        for (int d = lane * each; d < min(head_dim, (lane + 1) * each); d++)",
                )
            ),
            "Each lane goes along a stretch of its own, so in one turn the warp reads every second column, and the others in the next turn: each "
            "sector is touched twice. On a CPU that would be the way; here the lanes of a *turn* should be neighbours.",
            "With a head of 64, which columns do lanes 0 and 1 read in their first turn?",
        ),
        Mistake(
            "most keys left out",
            _warp(("j += blockDim.x / 32", "j += blockDim.x")),
            "The block has blockDim.x / 32 warps, and each goes on by that many keys. By blockDim.x, most keys are left out.",
            "Two warps: after keys 0 and 1, which come next?",
        ),
    ),
)


# ---------------- 22.2: a racy version to mend


def _tile_cases(rng: np.random.Generator) -> list[Case]:
    def case(lengths: list[int], heads: tuple[int, int, int], size: int, group: str) -> Case:
        return Case(_label(lengths, heads, size), _paged(rng, lengths, heads, size), group)

    return [
        case([3], (1, 1, 4), 2, "small"),
        case([5, 8], (2, 1, 32), 4, "small"),
        case([1, 15, 16, 17], (4, 2, 20), 16, "awkward"),
        case([64, 63, 40], (2, 2, 80), 16, "awkward"),
    ]


def _run_tile(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    (requests, q_heads, dim), kv_heads = inputs["q"].shape, inputs["key_cache"].shape[2]
    max_blocks, size = inputs["block_tables"].shape[1], inputs["key_cache"].shape[1]
    names = ("q", "key_cache", "value_cache", "block_tables", "context_lens")
    arrays = [lab.input(name, inputs[name]) for name in names]
    out = lab.output(inputs["q"].shape, np.uint16)
    sizes = [np.int32(n) for n in (max_blocks, size, q_heads, kv_heads, dim)]
    answer((q_heads, requests), (64,), (*arrays, out, np.float32(inputs["scale"]), *sizes))
    bits = lab.get(out)
    return {"out": (bits.astype(np.uint32) << 16).view(np.float32)}


def _nobody_has_left(inputs: Any, outputs: Any, observed: Any) -> str | None:
    if any("had returned" in text for report in observed.launches for text in report.warnings):
        return (
            "The values are right, and some threads have ended while others of their block wait at a __syncthreads(). Every thread of the "
            "block must come to every barrier: none in a branch or loop that some of them skip"
        )
    return None


def _expect_out(inputs: Mapping[str, Any]) -> dict[str, Any]:
    out = np.empty(inputs["q"].shape, np.float32)
    for row in range(len(out)):
        keys, values = _gathered(inputs, row)
        scores = np.einsum("hd,mhd->hm", inputs["q"][row].astype(np.float64), keys) * inputs["scale"]
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[row] = np.einsum("hm,mhd->hd", weights, values)
    return {"out": out}


BLOCK_MAX = '''BLOCK_MAX_CUDA = r"""
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

_TILE_TEXT = (
    BLOCK_MAX
    + '''
one_tile = cp.RawKernel(BF16_CUDA + BLOCK_SUM_CUDA + BLOCK_MAX_CUDA + r"""
extern "C" __global__ void one_tile(
    const float* q, const bf16* key_cache, const bf16* value_cache, const int* block_tables, const int* context_lens,
    bf16* out, float scale, int max_blocks, int block_size, int q_heads, int kv_heads, int head_dim) {
    __shared__ float weight[64], scratch[64];
    __shared__ long long slot[64];
    int t = threadIdx.x, head = blockIdx.x, request = blockIdx.y, length = context_lens[request];
    const int* table = block_tables + request * max_blocks;
    const float* query = q + (size_t)(request * q_heads + head) * head_dim;
    int kv_head = head / (q_heads / kv_heads);
    float score = MINUS_INFINITY;
    if (t < length) {
        slot[t] = (long long)table[t / block_size] * block_size + t % block_size;
        const bf16* key = key_cache + (slot[t] * kv_heads + kv_head) * head_dim;
        float dot = 0.0f;
        for (int d = 0; d < head_dim; d++) dot += query[d] * bf16_to_float(key[d]);
        score = dot * scale;
    }
    float peak = block_max(score, scratch);
    float exponential = expf(score - peak);
    float sum = block_sum(exponential, scratch);
    weight[t] = exponential / sum;
    __syncthreads();
    for (int d = t; d < head_dim; d += blockDim.x) {
        float total = 0.0f;
        for (int j = 0; j < length; j++)
            total += weight[j] * bf16_to_float(value_cache[(slot[j] * kv_heads + kv_head) * head_dim + d]);
        out[(size_t)(request * q_heads + head) * head_dim + d] = float_to_bf16(total);
    }
}
""", "one_tile")
'''
)
_AFTER_WEIGHT = "    weight[t] = exponential / sum;\n    __syncthreads();\n"
_WHOLE_BLOCKS = (
    ("    if (t < length) {\n        slot[t]", "    int whole = (length + block_size - 1) / block_size * block_size;\n    if (t < whole)\n        slot[t]"),
    ("        const bf16* key", "    if (t < length) {\n        const bf16* key"),
    ("for (int j = 0; j < length; j++)", "for (int j = 0; j < whole; j++)"),
)  # fmt: skip


def _tile(*changes: tuple[str, str]) -> str:
    return _changed(_TILE_TEXT, *changes)


_TILE = Exercise(
    id="22.2",
    title="someone was faster, and something was not there",
    answer="one_tile",
    kind="kernel",
    uses=("BF16_CUDA", "BLOCK_SUM_CUDA"),
    cases=_tile_cases,
    run=_run_tile,
    expected=_expect_out,
    points={"small": 1, "awkward": 1, "clean": 2},
    tolerance=_OUT,
    verify=_nobody_has_left,
    hints=Hints(
        question="Take {case}. Which threads write weight[t], and which read it? And how many of the slots that are read hold a token?",
        rule="There are two faults. A thread stores its weight, and in the next line all threads read all weights: between the two "
        "belongs a barrier, outside of any branch or loop. And the values are added up to the end of the last *block*, with a weight of 0 "
        "behind the last token: but 0 x NaN is NaN. Stop at the last token.",
        code="""weight[t] = exponential / sum;
____;
for (int d = t; d < head_dim; d += blockDim.x) {
    float total = 0.0f;
    for (int j = 0; j < ____; j++)
        ...""",
    ),
    mistakes=(
        Mistake(
            "only the race mended",
            _tile(*_WHOLE_BLOCKS),
            "The barrier is there. The sum still runs to the end of the last block, over slots that hold no token of this request; "
            "their weight is 0, but 0 x NaN is NaN.",
            "What is 0 times NaN?",
        ),
        Mistake(
            "only the tail mended",
            _tile((_AFTER_WEIGHT, "    weight[t] = exponential / sum;\n")),
            "The sum stops at the last token. But weights are still read that another thread may not have written yet.",
            "Thread 0 reads weight[1]. What makes sure that thread 1 has written it?",
        ),
        Mistake(
            "nothing mended",
            _tile(*_WHOLE_BLOCKS, (_AFTER_WEIGHT, "    weight[t] = exponential / sum;\n")),
            "Weights are read before all are written, and values are read behind the last token.",
            "Between which two lines do threads need each other's results?",
        ),
        Mistake(
            "the barrier in front of the weights",
            _tile(
                (_AFTER_WEIGHT, "    __syncthreads();\n    weight[t] = exponential / sum;\n"),
            ),
            "A barrier makes what was written *before* it readable after it. It belongs between writing and reading.",
            "What has been written when the threads meet at your barrier?",
            variants=(
                _tile(
                    *_WHOLE_BLOCKS,
                    (_AFTER_WEIGHT, "    __syncthreads();\n    weight[t] = exponential / sum;\n"),
                ),
            ),
        ),
        Mistake(
            "a barrier inside the loop over columns",
            _tile(
                (_AFTER_WEIGHT, "    weight[t] = exponential / sum;\n"),
                ("        float total = 0.0f;", "        __syncthreads();\n        float total = 0.0f;"),
            ),
            "Threads go round that loop a different number of times, or not at all: with 4 columns, 60 threads never come to the "
            "barrier. It belongs in front of the loop.",
            "With a head of 4, which threads enter the loop?",
        ),
        Mistake(
            "weights of the tail left out as well as others",
            _tile(("for (int j = 0; j < length; j++)", "for (int j = 0; j < length / block_size * block_size; j++)")),
            "Now only whole blocks are added up, and the tokens of the last one are lost, as the text has a length that is no multiple of "
            "the block size.",
            "With 3 tokens in blocks of 2, how many values does your sum take?",
        ),
    ),
)  # fmt: skip


# ---------------- 22.3: the part


def _part_cases(rng: np.random.Generator) -> list[Case]:
    def case(
        lengths: list[int], heads: tuple[int, int, int], size: int, group: str, more: str = "", **how: float
    ) -> Case:
        return Case(_label(lengths, heads, size, more), _paged(rng, lengths, heads, size, **how), group)

    return [
        case([3], (1, 1, 2), 2, "small"),
        case([5, 9], (2, 1, 4), 4, "small"),
        case([1, 15, 16, 17], (4, 2, 32), 16, "awkward"),
        case([65, 130, 64], (8, 1, 20), 3, "awkward", ", later keys fit better", rising=3.0),
        case([33, 7, int(rng.integers(66, 100))], (3, 3, 80), 16, "awkward"),
        case([200, 2], (2, 1, 16), 1, "awkward", ", large scores", scores=60.0),
        case([150], (1, 1, 16), 16, "awkward", ", earlier keys fit better", rising=-60.0),
        case([4097, 5], (2, 1, 8), 16, "long", ", later keys fit better", rising=2.0),
    ]


def _run_part(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    names = ("q", "key_cache", "value_cache", "block_tables", "context_lens")
    arrays = [lab.input(name, inputs[name]) for name in names]
    out = lab.output(inputs["q"].shape, np.uint16)
    bits = lab.returned(answer(*arrays, inputs["scale"], out), out)
    return {"out": (bits.astype(np.uint32) << 16).view(np.float32)}


def _reads_in_place(inputs: Any, outputs: Any, observed: Any) -> str | None:
    if not observed.launches:
        return "The values are right, and no kernel has run: they were computed in Python. Here a kernel is asked for"
    (_, q_heads, dim), longest = inputs["q"].shape, int(inputs["context_lens"].max())
    if longest < 1000:
        return None
    keys = 2 * longest * inputs["key_cache"].shape[2] * dim
    if observed.peak_bytes > keys / 2:
        return (
            f"The values are right, and {observed.peak_bytes:,} bytes were allocated for it; the keys themselves are {keys:,}. The kernel "
            "must read keys and values where they lie, and keep no row of scores"
        )
    requests = observed.total("global_read_requests")
    if requests > q_heads * longest * dim:
        return (
            f"The values are right, and warps went to global memory {requests:,} times, as often as if one thread did all the work. "
            "Let the threads share the keys of a tile, and then its columns"
        )
    return None


_PART_LINES = """    for (int start = 0; start < length; start += TILE) {
        int count = min(TILE, length - start);
        float score = MINUS_INFINITY;
        if (t < count) {
            int j = start + t;
            slot[t] = (long long)table[j / block_size] * block_size + j % block_size;
            const bf16* key = key_cache + (slot[t] * kv_heads + kv_head) * head_dim;
            float dot = 0.0f;
            for (int d = 0; d < head_dim; d++) dot += query[d] * bf16_to_float(key[d]);
            score = dot * scale;
        }
        float new_peak = fmaxf(peak, block_max(score, scratch));
        float shrink = expf(peak - new_peak);
        weight[t] = expf(score - new_peak);
        sum = sum * shrink + weight[t];
        peak = new_peak;
        __syncthreads();
        for (int d = t; d < head_dim; d += TILE) {
            float column = total[d] * shrink;
            for (int j = 0; j < count; j++)
                column += weight[j] * bf16_to_float(value_cache[(slot[j] * kv_heads + kv_head) * head_dim + d]);
            total[d] = column;
        }
        __syncthreads();
    }
    sum = block_sum(sum, scratch);
    for (int d = t; d < head_dim; d += TILE) to[d] = float_to_bf16(total[d] / sum);"""


def _part(*changes: tuple[str, str]) -> str:
    return _changed(
        f'''paged_attention_kernel = cp.RawKernel(BF16_CUDA + BLOCK_SUM_CUDA + BLOCK_MAX_CUDA + r"""
#define TILE 64
extern "C" __global__ void paged_attention_kernel(
    const float* q, const bf16* key_cache, const bf16* value_cache, const int* block_tables, const int* context_lens,
    bf16* out, float scale, int max_blocks, int block_size, int q_heads, int kv_heads, int head_dim) {{
    __shared__ float weight[TILE], scratch[TILE];
    __shared__ long long slot[TILE];
    extern __shared__ float total[];
    int t = threadIdx.x, head = blockIdx.x, request = blockIdx.y, length = context_lens[request];
    const int* table = block_tables + request * max_blocks;
    const float* query = q + (size_t)(request * q_heads + head) * head_dim;
    bf16* to = out + (size_t)(request * q_heads + head) * head_dim;
    int kv_head = head / (q_heads / kv_heads);
    float peak = MINUS_INFINITY, sum = 0.0f;
    for (int d = t; d < head_dim; d += TILE) total[d] = 0.0f;
{_PART_LINES}
}}
""", "paged_attention_kernel")


def paged_attention(q, key_cache, value_cache, block_tables, context_lens, scale, out):
    requests, q_heads, head_dim = q.shape
    block_size, kv_heads = key_cache.shape[1:3]
    sizes = [np.int32(n) for n in (block_tables.shape[1], block_size, q_heads, kv_heads, head_dim)]
    arrays = (q, key_cache, value_cache, block_tables, context_lens, out)
    paged_attention_kernel((q_heads, requests), (64,), (*arrays, np.float32(scale), *sizes), shared_mem=4 * head_dim)
    return out
''',
        *changes,
    )


_PART = Exercise(
    id="22.3",
    title="a tile at a time: the part",
    answer="paged_attention",
    kind="function",
    arguments=("q", "key_cache", "value_cache", "block_tables", "context_lens", "scale", "out"),
    uses=("BF16_CUDA", "BLOCK_SUM_CUDA"),
    builds_on=("22.2",),
    cases=_part_cases,
    run=_run_part,
    expected=_expect_out,
    points={"small": 1, "awkward": 2, "long": 1, "clean": 1},
    tolerance=_OUT,
    verify=_reads_in_place,
    makes={"paged_attention": "paged_attention"},
    file="paged_attention.py",
    hints=Hints(
        question="Take {case}. How many tiles of 64 are there, and how many keys has the last one? When its maximum is larger than all "
        "before, what must happen to what has been added up so far?",
        rule="A tile has count = min(TILE, length - start) keys. Thread t < count makes the score of key start + t, as in 22.2; the others "
        "keep minus infinity. The new maximum is the larger of the old one and block_max of the scores. shrink = exp(old - new); the "
        "thread's sum and every column of total are multiplied by it before the tile's terms are added. A barrier before all weights are "
        "read, and one after, before the next tile overwrites them. At the end block_sum makes one sum of the threads' sums.\n\n"
        "By hand, scores 1, 3 in the first tile and 4 in the second, values 10, 20 and 30: after the first, peak 3, sum 1.135, total "
        "21.35. Then peak 4, shrink 0.368: sum 0.418 + 1 = 1.418, total 7.86 + 30 = 37.86; the result is 26.7.",
        code="""for (int start = 0; start < length; start += TILE) {
    int count = ____;
    float score = MINUS_INFINITY;
    if (t < count) {
        int j = ____;
        slot[t] = ____;
        ...
        score = dot * scale;
    }
    float new_peak = fmaxf(peak, ____);
    float shrink = ____;
    weight[t] = ____;
    sum = ____;
    peak = new_peak;
    ____;
    for (int d = t; d < head_dim; d += TILE) {
        float column = total[d] * ____;
        for (int j = 0; j < ____; j++) column += weight[j] * ____;
        total[d] = column;
    }
    ____;
}
sum = ____;
for (int d = t; d < head_dim; d += TILE) to[d] = ____;""",
    ),
    mistakes=(
        Mistake(
            "logical block used as physical",
            _part(("(long long)table[j / block_size] * block_size + j % block_size", "j")),
            _LOGICAL,
            "The first block of the first request: which number does the table give it, and which do you?",
        ),
        Mistake(
            "the tail of the last block attended",
            _part(
                (
                    "        if (t < count) {\n            int j = start + t;\n            slot[t]",
                    "        int whole = min(TILE, (count + block_size - 1) / block_size * block_size), j = start + t;\n"
                    "        if (t < whole && j / block_size < max_blocks && table[j / block_size] >= 0)\n            slot[t]",
                ),
                ("            const bf16* key", "        if (t < count) {\n            const bf16* key"),
                ("for (int j = 0; j < count; j++)", "for (int j = 0; j < whole; j++)"),
            ),
            "Values are added up to the end of the last block. Behind the last token the weight is 0, but what lies there may be a NaN, "
            "and 0 x NaN is NaN. Stop at the last token.",
            "What is 0 times NaN?",
        ),
        Mistake(
            "the new token left out",
            _part(("length = context_lens[request];", "length = context_lens[request] - 1;")),
            "context_lens counts the new token: its key and value are in the cache already, and a token reads itself. A request of one "
            "token would have nothing to read.",
            "How many keys does a request with a context of 1 read?",
        ),
        Mistake(
            "two reductions in one buffer",
            _part(
                ("sum = sum * shrink + weight[t];", "sum = sum * shrink + block_sum(weight[t], weight);"),
                ("    sum = block_sum(sum, scratch);\n", ""),
            ),
            "block_sum uses its buffer for its tree: after it, `weight` holds partial sums and no weights any more. Give it a scratch of its "
            "own.",
            "What is in weight[0] when block_sum has ended?",
        ),
        Mistake(
            "the columns are not rescaled",
            _part(("float column = total[d] * shrink;", "float column = total[d];")),
            "What was added up so far was measured against the old maximum. When the maximum grows, it must shrink by exp(old - new); else "
            "old and new terms are in different units.",
            "The first tile's maximum is 3 and the second's 4. By which factor do the first tile's terms become smaller?",
        ),
        Mistake(
            "the sum is not rescaled",
            _part(("sum = sum * shrink + weight[t];", "sum = sum + weight[t];")),
            "The sum's old terms were measured against the old maximum too. It is multiplied by exp(old - new), like the columns.",
            "In which unit are the terms in `sum` when the maximum has grown?",
        ),
        Mistake(
            "each tile's own maximum",
            _part(("fmaxf(peak, block_max(score, scratch))", "block_max(score, scratch)")),
            "If a later tile has smaller scores, its own maximum is below the one so far; exp(old - new) is then more than 1, and with "
            "large scores infinite. The maximum only ever grows.",
            "The first tile's maximum is 100 and the second's is 0. What is your shrink?",
        ),
        Mistake(
            "each thread's own sum",
            _part(("    sum = block_sum(sum, scratch);\n", "")),
            "A thread has added up the weights of its own keys, one a tile. The weights of all keys are in the sum of all threads: "
            "block_sum.",
            "Whose weights are in the `sum` of thread 0?",
        ),
        Mistake(
            "a loop that threads leave one by one",
            _part(
                (
                    "for (int start = 0; start < length; start += TILE) {\n",
                    "for (int j = t; j < length; j += TILE) {\n        int start = j - t;\n",
                ),
                ("            int j = start + t;\n", ""),
            ),
            "The loop of 22.1 ends for a thread that has no key left. Here every turn has barriers, in block_max too, and all threads must come "
            "to each: also those without a key in the last tile. Let all go by tiles, and ask in the loop who has a key.",
            "With 3 keys and 64 threads, which threads enter your loop? And who waits at the barriers of block_max?",
        ),
        Mistake(
            "the last tile taken as full",
            _part(("for (int j = 0; j < count; j++)", "for (int j = 0; j < TILE; j++)")),
            "The last tile has fewer keys than TILE, and nobody has written a slot for the others: what is read there is left from the tile "
            "before, or from nobody. A weight of 0 does not help.",
            "A text has 3 tokens. Who writes slot[3]?",
        ),
        Mistake(
            "each thread's own maximum",
            _part(("fmaxf(peak, block_max(score, scratch))", "fmaxf(peak, score)")),
            "Weights are added up by other threads than those that made them, so all must be measured against one maximum: that of the whole "
            "tile, and all before. block_max tells it to everyone.",
            "Thread 0 adds up the weights of all threads. Against which maximum was each of them measured?",
        ),
        Mistake(
            "the whole sum kept by every thread",
            _part(("sum = sum * shrink + weight[t];", "sum = sum * shrink + block_sum(weight[t], scratch);")),
            "After block_sum in each tile every thread has the whole sum already. block_sum at the end adds up 64 whole sums. One of the two "
            "is enough, and one at the end is cheaper.",
            "What is in the `sum` of thread 0 before the last block_sum, and what in that of thread 1?",
        ),
        Mistake(
            "divided in every tile",
            _part(("total[d] = column;", "total[d] = column / sum;")),
            "Until the last tile nobody knows the sum; and here it is only the part of this thread. Divide once, at the very end.",
            "By what have the first tile's terms been divided when the second tile is done?",
        ),
        Mistake(
            "not divided by the sum",
            _part(("total[d] / sum", "total[d]")),
            "The exponentials do not add up to 1. Divide by their sum, once at the end.",
            "If all values are 1, what must come out?",
        ),
        Mistake(
            "no barrier before the weights are read",
            _part(
                (
                    "        peak = new_peak;\n        __syncthreads();\n",
                    "        peak = new_peak;\n",
                )
            ),
            "Every thread reads the weights and slots of all keys of the tile, and other threads write them. A barrier belongs in between.",
            "Thread 0 reads weight[1]. What makes sure that thread 1 has written it?",
        ),
        Mistake(
            "no barrier before the next tile",
            _part(
                (
                    "            total[d] = column;\n        }\n        __syncthreads();\n",
                    "            total[d] = column;\n        }\n",
                )
            ),
            "A fast thread begins the next tile and overwrites its slot, while a slow one still reads the slots and weights of this one.",
            "Thread 1 is done with this tile. Which cell does it write next, and who may still read it?",
        ),
        Mistake(
            "the first tile alone",
            _part(("start < length; start += TILE", "start < TILE && start < length; start += TILE")),
            "Only the first 64 keys are read. A text has as many as it has tokens.",
            "How many keys does your kernel read of a text of 65 tokens?",
        ),
        Mistake(
            "as many columns as threads",
            _part(
                ("for (int d = t; d < head_dim; d += TILE) {", "if (int d = t; d < head_dim) {"),
                ("for (int d = t; d < head_dim; d += TILE) to[d]", "if (int d = t; d < head_dim) to[d]"),
            ),
            "Each thread takes one column, and a head may have more columns than the block has threads: 80, or 128. Walk on in steps of TILE.",
            "With a head of 80 and 64 threads, who takes column 64?",
        ),
        Mistake(
            "KV heads dealt out in turn",
            _part(("head / (q_heads / kv_heads)", "head % kv_heads")),
            "Query heads of one group share one KV head: head / (q_heads / kv_heads). The remainder deals them out in turn (lesson 12).",
            "With 4 query and 2 KV heads, which KV head does query head 1 read?",
        ),
    ),
)


# ---------------- 22.4: how often is a key read?


@functools.cache
def _traced(shuffled: bool) -> Any:
    """Reads of the key cache by the finished kernel: one request of 50 tokens, 8 query and 2 KV heads of 16."""
    inputs = _paged(np.random.default_rng(4), [50], (8, 2, 16), 16)
    if not shuffled:
        order = inputs["block_tables"][0, :4]
        for name in ("key_cache", "value_cache"):
            inputs[name] = np.concatenate([inputs[name][order], inputs[name][:2]])
        inputs["block_tables"][0, :4] = np.arange(4)
    namespace = make_namespace(_PART, _part(), emulation, before={"22.2": _TILE_TEXT})
    names = ("q", "key_cache", "value_cache", "block_tables", "context_lens")
    with emulation.checks("full"):
        arrays = [emulation.asarray(inputs[name]) for name in names]
        out = emulation.empty(inputs["q"].shape, np.uint16)
        reports: list[Any] = []
        with emulation.trace() as trace, launch_reports.collect(reports):
            namespace["paged_attention"](*arrays, inputs["scale"], out)
    rows = trace.rows
    keys = rows[(rows["array"] == "key_cache") & (rows["kind"] == "read")]
    return len(keys) / (50 * 2 * 16), sum(report.global_sectors for report in reports)


_READS = Prediction(
    id="22.4",
    title="how often is a key read?",
    quantities={
        "times": Quantity("times that each number of the keys is read", lambda: _traced(True)[0]),
        "extra": Quantity(
            "sectors touched more because the blocks are shuffled",
            lambda: _traced(True)[1] - _traced(False)[1],
        ),
    },
    explains="Four query heads share a KV head, and each is worked on by a block of its own, which reads all keys by itself: 4 times. A "
    "card's cache will catch most of that, if the four run at about the same time; a kernel that takes the four heads together reads "
    "each key once, and that is what this project's own does. Shuffling costs nothing: the keys of 16 tokens lie together, and where the "
    "next 16 are does not matter to a memory that moves 32 bytes at a time.",
    hints=Hints(
        question="Which blocks of threads read the keys of KV head 0?",
        rule="A block of threads works on one query head and reads every key of its KV head once. Count the query heads that share a KV "
        "head. For the second number: a sector has 32 bytes, and a token's key of one head 16 numbers of 2 bytes.",
        code="times = 8 / ____\nextra = ____",
    ),
)


# ---------------- what is drawn and measured


def _walk_picture(answer: Any, cp: Any) -> Any:
    """Which blocks the learner's kernel reads for each of three requests, in the order of its tiles."""
    lengths, size = [200, 37, 120], 16
    inputs = _paged(np.random.default_rng(8), lengths, (1, 1, 4), size)
    names = ("q", "key_cache", "value_cache", "block_tables", "context_lens")
    arrays = [cp.asarray(inputs[name]) for name in names]
    out = cp.empty(inputs["q"].shape, np.uint16)
    with cp.trace() as trace:
        answer(*arrays, inputs["scale"], out)
    rows = trace.rows
    read = rows[(rows["array"] == "key_cache") & (rows["kind"] == "read")]
    if not len(read):
        raise ValueError("its kernel reads no array of the name key_cache")
    owner = {
        int(block): row for row, table in enumerate(inputs["block_tables"]) for block in table if block >= 0
    }
    walks: dict[int, list[int]] = {}
    for block in dict.fromkeys((read["index"] // (size * 4)).tolist()):
        walks.setdefault(owner[block], []).append(block)
    place = {int(block): k for table in inputs["block_tables"] for k, block in enumerate(table)}
    return block_walks(
        {f"request {row}, {lengths[row]} tokens,": sorted(walk, key=place.__getitem__) for row, walk in sorted(walks.items())},
        len(inputs["key_cache"]), title="The blocks that your kernel reads",
        subtitle="Each request's in the order of its text; the numbers are places in the cache.",
    )  # fmt: skip


def _make_run(requests: int, length: int, q_heads: int, kv_heads: int, dim: int) -> Any:
    def make(answer: Any, cp: Any) -> Any:
        blocks = -(-length // 16)
        caches = [
            cp.asarray(np.full((requests * blocks, 16, kv_heads, dim), 0x3F80, np.uint16)) for _ in range(2)
        ]
        order = np.random.default_rng(0).permutation(requests * blocks).astype(np.int32)
        tables, lens = cp.asarray(order.reshape(requests, blocks)), cp.full(requests, length, np.int32)
        q = cp.ones((requests, q_heads, dim), np.float32)
        out = cp.empty((requests, q_heads, dim), np.uint16)
        return lambda: answer(q, *caches, tables, lens, dim**-0.5, out)

    return make


_LARGE, _SMALL = (32, 2048, 32, 8, 64), (2, 100, 4, 1, 64)


def _bytes(requests: int, length: int, q_heads: int, kv_heads: int, dim: int) -> tuple[int, int]:
    return requests * (4 * length * kv_heads * dim + 4 * q_heads * dim), 2 * requests * q_heads * dim


_WORK = Work(
    label="32 requests of 2,048 tokens, 32 query and 8 KV heads of 64",
    make=_make_run(*_LARGE),
    read_bytes=_bytes(*_LARGE)[0],
    write_bytes=_bytes(*_LARGE)[1],
    small=_make_run(*_SMALL),
    small_read_bytes=_bytes(*_SMALL)[0],
    small_write_bytes=_bytes(*_SMALL)[1],
    small_label="2 requests of 100 tokens, 4 query heads and 1 KV head of 64",
    note="A thread walks along its own key, so side by side the threads of a warp touch 32 rows at a time; the next columns lie in "
    "the sectors that have just come, and a card's cache has them still.",
)


def _make_scores(requests: int, length: int, heads: int, dim: int) -> Any:
    def make(answer: Any, cp: Any) -> Any:
        blocks = -(-length // 16)
        cache = cp.asarray(np.full((requests * blocks, 16, heads, dim), 0x3F80, np.uint16))
        order = np.random.default_rng(0).permutation(requests * blocks).astype(np.int32)
        tables, lens = cp.asarray(order.reshape(requests, blocks)), cp.full(requests, length, np.int32)
        q = cp.ones((requests, heads, dim), np.float32)
        scores = cp.empty((requests, heads, blocks * 16), np.float32)
        sizes = [np.int32(n) for n in (blocks, 16, heads, heads, dim)]
        arguments = (q, cache, tables, lens, scores, np.float32(dim**-0.5), *sizes)
        return lambda: answer((heads, requests), (64,), arguments)

    return make


_LARGE_SCORES, _SMALL_SCORES = (32, 2048, 8, 64), (2, 100, 2, 64)


def _score_bytes(requests: int, length: int, heads: int, dim: int) -> tuple[int, int]:
    return requests * heads * (2 * length * dim + 4 * dim), 4 * requests * heads * length


_SCORE_WORK = Work(
    label="scores of 32 requests of 2,048 tokens, 8 heads of 64",
    make=_make_scores(*_LARGE_SCORES),
    read_bytes=_score_bytes(*_LARGE_SCORES)[0],
    write_bytes=_score_bytes(*_LARGE_SCORES)[1],
    small=_make_scores(*_SMALL_SCORES),
    small_read_bytes=_score_bytes(*_SMALL_SCORES)[0],
    small_write_bytes=_score_bytes(*_SMALL_SCORES)[1],
    small_label="scores of 2 requests of 100 tokens, 2 heads of 64",
)

LESSON = Lesson(
    number="22",
    slug="paged_attention",
    title="Paged attention",
    part=4,
    minutes=60,
    exercises=(_SCORES, _TILE, _PART, _READS, _WARPS),
    engine=EngineCard(
        mistakes=(
            ("22.3", "logical block used as physical"),
            ("22.3", "the tail of the last block attended"),
            ("22.3", "KV heads dealt out in turn"),
            ("22.3", "each thread's own sum"),
        ),
        note="Your kernel reads the cache for every new token, in every layer; the prompt is read by the attention for many queries. "
        "Beside your story another one is written, so that your blocks do not lie where the text would have them. (Where logits are "
        "compared the story is read like a prompt, in one go: there your kernel has no part, so they are equal.)",
        beside=("The dragon was",),
    ),
    pictures={"22.3": _walk_picture},
    works={"22.1": _SCORE_WORK, "22.3": _WORK, "22.5": _SCORE_WORK},
)
