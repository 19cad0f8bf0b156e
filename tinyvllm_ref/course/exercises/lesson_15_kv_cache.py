"""Lesson 15: keys and values are kept, so that a new token costs one token's work."""

from __future__ import annotations

import functools
from collections.abc import Mapping
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
    Prediction,
    Quantity,
    Setting,
    Tolerance,
    Work,
    with_changes,
)

from .lesson_13_feed_forward import layer_in_float64, random_layer, weights_of_layer

# ---------------- 15.1: kv_write, the part


def _write_cases(rng: np.random.Generator) -> list[Case]:
    def case(
        slots: list[int], blocks: int, block_size: int, heads: int, head_dim: int, group: str, told: str
    ) -> Case:
        shape = (blocks, block_size, heads, head_dim)
        inputs = {
            "k": rng.standard_normal((len(slots), heads, head_dim)).astype(np.float32),
            "v": rng.standard_normal((len(slots), heads, head_dim)).astype(np.float32),
            "slots": np.array(slots, np.int64),
            # What was there before must stay, except in the slots that are written.
            "key_cache": float_to_bf16(rng.standard_normal(shape).astype(np.float32)),
            "value_cache": float_to_bf16(rng.standard_normal(shape).astype(np.float32)),
        }
        return Case(told, inputs, group)

    wide = 1030 + 2 * int(rng.integers(0, 40))
    return [
        case([2, 0], 1, 4, 1, 2, "small", "2 tokens into slots 2 and 0 of 4"),
        case([3, 4, 5], 1, 8, 2, 8, "small", "3 tokens into slots 3 to 5"),
        case([7, -1, 4, -1], 2, 5, 3, 6, "awkward", "4 tokens, two of them with slot -1"),
        case(
            rng.permutation(28)[:19].tolist(), 4, 7, 2, 5, "awkward", "19 tokens in any order, 4 blocks of 7"
        ),
        case([5], 3, 2, 1, wide, "awkward", "1 token of more than 1,024 columns"),
        case(list(range(33)), 1, 40, 1, 33, "awkward", "33 tokens of 33 columns"),
    ]


def _run_write(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    k, v, slots = (lab.input(name, inputs[name]) for name in ("k", "v", "slots"))
    key_cache, value_cache = lab.inout(inputs["key_cache"]), lab.inout(inputs["value_cache"])
    answer(k, v, slots, key_cache, value_cache)
    return {
        "key_cache": (lab.get(key_cache).astype("uint32") << 16).view("float32"),
        "value_cache": (lab.get(value_cache).astype("uint32") << 16).view("float32"),
    }


def _expect_write(inputs: Any) -> dict[str, Any]:
    wanted = {}
    for name, new in (("key_cache", inputs["k"]), ("value_cache", inputs["v"])):
        cache = bf16_to_float(inputs[name]).copy()
        rows = cache.reshape(-1, *cache.shape[2:])
        for token, slot in enumerate(inputs["slots"]):
            if slot >= 0:
                rows[slot] = bf16_to_float(float_to_bf16(new[token]))
        wanted[name] = cache
    return wanted


def _write(
    slot: str = "slots[blockIdx.x]",
    skip: str = "    if (slot < 0) return;\n",
    to: str = "(size_t)slot * width",
    loop: str = "for (int c = threadIdx.x; c < width; c += blockDim.x)",
    key: str = "float_to_bf16(k[from + c])",
    value: str = "value_cache[to + c] = float_to_bf16(v[from + c]);",
    slots: str = "const long long* slots",
) -> str:
    return f'''kv_write_kernel = cp.RawKernel(BF16_CUDA + r"""
extern "C" __global__ void kv_write_kernel(
    const float* k, const float* v, {slots}, bf16* key_cache, bf16* value_cache, int width) {{
    long long slot = {slot};
{skip}    size_t from = (size_t)blockIdx.x * width, to = {to};
    {loop} {{
        key_cache[to + c] = {key};
        {value}
    }}
}}
""", "kv_write_kernel")


def kv_write(k, v, slots, key_cache, value_cache):
    tokens, heads, head_dim = k.shape
    width = heads * head_dim
    threads = min(256, -(-width // 32) * 32)
    kv_write_kernel((tokens,), (threads,), (k, v, slots, key_cache, value_cache, np.int32(width)))
'''


_IN_CUPY = """def kv_write(k, v, slots, key_cache, value_cache):
    kept = slots >= 0
    for new, cache in ((k, key_cache), (v, value_cache)):
        bits = new.view(np.uint32)
        rows = cache.reshape(-1, *cache.shape[2:])
        rows[slots[kept]] = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)[kept]
"""


def _no_arrays(inputs: Any, outputs: Any, observed: Any) -> str | None:
    if observed.launches and not observed.allocations:
        return None
    return (
        f"The caches are right, and {observed.allocations} arrays were made on the way. A kernel reads k, v and slots and writes the "
        "caches, with nothing between"
    )


_WRITE = Exercise(
    id="15.1",
    title="kv_write, the part",
    answer="kv_write",
    kind="function",
    arguments=("k", "v", "slots", "key_cache", "value_cache"),
    uses=("BF16_CUDA",),
    cases=_write_cases,
    run=_run_write,
    expected=_expect_write,
    points={"small": 1, "awkward": 2, "clean": 1},
    tolerance=Tolerance(0.0, 0.0, "rounding to BF16 is exact: there is one nearest value"),
    verify=_no_arrays,
    makes={"kv_write": "kv_write"},
    file="kv_write.py",
    hints=Hints(
        question="Take {case}. Block 0 handles token 0. From which elements of k does it read, and to which elements of key_cache does it "
        "write?",
        rule="A token has width = heads * head_dim numbers, one after the other. Token t's begin at t * width in k and v, slot s's at "
        "s * width in the caches. Threads take columns, blockDim.x apart; float_to_bf16 rounds. A negative slot: nothing is "
        "written.\n\nBy hand, width 2 and slots 2 0: k[0], k[1] go to key_cache[4], key_cache[5]; k[2], k[3] go to "
        "key_cache[0], key_cache[1].",
        code="""long long slot = slots[____];
if (____) return;
size_t from = (size_t)____ * width, to = (size_t)____ * width;
for (int c = threadIdx.x; c < ____; c += ____) {
    key_cache[to + c] = ____(k[from + c]);
    value_cache[to + c] = ____(v[from + c]);
}""",
    ),
    mistakes=(
        Mistake(
            "token t into slot t",
            _write(slot="blockIdx.x"),
            "Where a token goes is told by slots, and need not be where it stands in this step: earlier tokens are in the cache already.",
            "Which slot does token 0 get, by the list of slots?",
            variants=(_write(to="(size_t)blockIdx.x * width"),),
        ),
        Mistake(
            "slots counted in numbers",
            _write(to="(size_t)slot"),
            "A slot is room for a whole token: slot s begins s times `width` numbers from the beginning.",
            "With width 2, at which element does slot 2 begin?",
        ),
        Mistake(
            "slot -1 not skipped",
            _write(skip=""),
            "A token with slot -1 is not to be kept. Its place would be in front of the array.",
            "Where does slot -1 begin in the cache?",
        ),
        Mistake(
            "slot 0 skipped as well",
            _write(skip="    if (slot <= 0) return;\n"),
            "Slot 0 is the first slot there is. Only negative ones are skipped.",
            "Which slots exist?",
        ),
        Mistake(
            "values not written",
            _write(value=""),
            "Attention needs both: keys to compare with, and values to add up.",
            "How many arrays does your kernel write?",
        ),
        Mistake(
            "keys into both caches",
            _write(value="value_cache[to + c] = float_to_bf16(k[from + c]);"),
            "The value cache gets v.",
            "From which array does the second line of your loop read?",
        ),
        Mistake(
            "both into the key cache",
            _write(value="key_cache[to + c] = float_to_bf16(v[from + c]);"),
            "The second line overwrites what the first has just written. v goes to value_cache.",
            "Which arrays does your kernel write?",
        ),
        Mistake(
            "cast in place of conversion",
            _write(key="(bf16)k[from + c]", value="value_cache[to + c] = (bf16)v[from + c];"),
            "bf16 is a name for 16-bit integers here: the cast rounds 1.7 to the integer 1. float_to_bf16 gives the bits.",
            "To the compiler, what kind of number is a bf16?",
        ),
        Mistake(
            "low bits cut off, not rounded",
            _write(
                key="(bf16)(__float_as_uint(k[from + c]) >> 16)",
                value="value_cache[to + c] = (bf16)(__float_as_uint(v[from + c]) >> 16);",
            ),
            "The upper 16 bits alone are the value rounded toward zero: always to the same side. float_to_bf16 rounds to the nearest.",
            "Which of the two BF16 numbers around your value lies nearer to it?",
        ),
        Mistake(
            "only as many columns as threads",
            _write(loop="int c = threadIdx.x;\n    if (c < width)"),
            "There may be more columns than threads. A strided loop takes any number.",
            "How many threads has a block here, and how many columns has a token?",
        ),
        Mistake(
            "more threads than columns",
            _write(loop="int c = threadIdx.x;"),
            "A block has 32 threads at least, and a token may have two columns. The strided loop is the guard as well.",
            "How many threads has a block here, and how many columns has a token?",
        ),
        Mistake(
            "array by array",
            _IN_CUPY,
            "The caches are right. But each operation on arrays is a kernel of its own, with a result in memory that the next one fetches, "
            "and this runs in every layer of every step. One kernel does it in one pass.",
            "How many arrays does your version make before anything lies in the cache?",
        ),
        Mistake(
            "slots read as 32-bit numbers",
            _write(slots="const int* slots"),
            "slots holds int64, 8 bytes each: long long in C++. As int, every second number is the upper half of one, mostly 0.",
            "How many bytes apart are two slots?",
        ),
    ),
)

# ---------------- 15.2: attend, with a cache


def _attend_cases(rng: np.random.Generator) -> list[Case]:
    def case(
        steps: list[int], group: str, told: str, layers: int = 2, heads: tuple[int, int, int] = (4, 2, 6)
    ) -> Case:
        """`steps` are numbers of new tokens; -n stands for going back to n tokens."""
        query_heads, kv_heads, head_dim = heads
        new = [step for step in steps if step > 0]

        def draw(count: int) -> Any:
            return rng.standard_normal((layers, sum(new), count, head_dim)).astype(np.float32)

        inputs = {
            "sizes": {
                "num_hidden_layers": layers,
                "num_attention_heads": query_heads,
                "num_key_value_heads": kv_heads,
                "head_dim": head_dim,
            },
            "steps": steps,
            "q": draw(query_heads),
            "k": draw(kv_heads),
            "v": draw(kv_heads),
        }
        return Case(told, inputs, group)

    return [
        case([3], "small", "a prompt of 3 tokens"),
        case([2, 0, 2], "small", "2 tokens, then back to none and 2 others"),
        case([3, 1, 1], "small", "a prompt of 3 tokens, then 2 more one by one"),
        case([1, 1, 1, 1, 1], "awkward", "5 tokens, one by one"),
        case([4, 3, 1], "awkward", "a prompt in two pieces of 4 and 3, then one more", 3, (6, 2, 4)),
        case([5, 1, 1, -3, 1, 1], "awkward", "back to 3 tokens after 7, and on from there"),
        case([70, 1], "awkward", "a prompt of 70 tokens, then one more", 1, (3, 1, 8)),
    ]


def _run_attend(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    from types import SimpleNamespace

    import numpy as np

    sizes, steps = dict(inputs["sizes"]), inputs["steps"]
    attend = answer(SimpleNamespace(**sizes), sum(step for step in steps if step > 0) + 3)
    found: dict[str, Any] = {"positions": [], "length": []}
    first = 0
    for number, step in enumerate(steps):
        if step <= 0:
            attend.length = -step
            continue
        attend.begin(step)
        positions = lab.get(attend.positions, "positions")
        if positions.dtype != np.int32:
            raise TypeError(f"attend.positions is {positions.dtype}; rope reads int32")
        found["positions"].append(positions.tolist())
        for layer in range(sizes["num_hidden_layers"]):
            q, k, v = (lab.input(name, inputs[name][layer, first : first + step]) for name in ("q", "k", "v"))
            out = lab.output(q.shape, np.uint16)
            bits = lab.returned(attend(layer, q, k, v, out), out)
            found[f"step {number}, layer {layer}"] = (bits.astype(np.uint32) << 16).view(np.float32)
        attend.end()
        found["length"].append(int(attend.length))
        first += step
    return found


def _expect_attend(inputs: Any) -> dict[str, Any]:
    """Each step from all that went before, without a cache: the whole history of every layer."""
    sizes = inputs["sizes"]
    times = sizes["num_attention_heads"] // sizes["num_key_value_heads"]
    values: dict[str, Any] = {}
    kept: list[int] = []  # index of the tokens of the text as it stands
    positions, lengths, first = [], [], 0
    for number, step in enumerate(inputs["steps"]):
        if step <= 0:
            kept = kept[:-step]
            continue
        positions.append(list(range(len(kept), len(kept) + step)))
        kept = kept + list(range(first, first + step))
        lengths.append(len(kept))
        for layer in range(sizes["num_hidden_layers"]):
            k, v = (
                bf16_to_float(float_to_bf16(inputs[name][layer][kept])).astype(np.float64).repeat(times, 1)
                for name in ("k", "v")
            )
            q = inputs["q"][layer, first : first + step].astype(np.float64)
            scores = np.einsum("nhd,mhd->hnm", q, k) * sizes["head_dim"] ** -0.5
            scores[:, ~np.tri(step, len(kept), len(kept) - step, dtype=bool)] = -np.inf
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            shares /= shares.sum(-1, keepdims=True)
            values[f"step {number}, layer {layer}"] = np.einsum("hnm,mhd->nhd", shares, v).astype(np.float32)
        first += step
    return {"positions": positions, "length": lengths, **values}


_ATTEND_TEXT = """class CachedAttend:
    def __init__(self, config, max_len):
        shape = (config.num_hidden_layers, 1, max_len, config.num_key_value_heads, config.head_dim)
        self.keys, self.values = cp.empty(shape, np.uint16), cp.empty(shape, np.uint16)
        self.scale = config.head_dim ** -0.5
        self.length = 0

    def begin(self, count):
        self.positions = cp.arange(self.length, self.length + count, dtype=np.int32)
        self.slots = self.positions.astype(np.int64)

    def __call__(self, layer, q, k, v, out):
        kv_write(k, v, self.slots, self.keys[layer], self.values[layer])
        m = self.length + len(q)
        attention_gqa(q, self.keys[layer, 0, :m], self.values[layer, 0, :m], self.scale, out)
        return out

    def end(self):
        self.length += len(self.slots)
"""


def _attend(*changes: tuple[str, str]) -> str:
    """The whole answer for 15.2, with some things exchanged."""
    text = _ATTEND_TEXT
    return with_changes(text, changes)


_WRITE_LINE = "        kv_write(k, v, self.slots, self.keys[layer], self.values[layer])\n"
_ATTENTION = "        attention_gqa(q, self.keys[layer, 0, :m], self.values[layer, 0, :m], self.scale, out)\n"
_BF16 = Tolerance(4e-3, 1e-4, "BF16 keeps 8 significant bits; sums of values that cancel lose some more")

_ATTEND = Exercise(
    id="15.2",
    title="attend, with a cache",
    answer="CachedAttend",
    kind="class",
    uses=("kv_write", "attention_gqa"),
    cases=_attend_cases,
    run=_run_attend,
    expected=_expect_attend,
    points={"small": 1, "awkward": 2},
    tolerance=_BF16,
    hints=Hints(
        question="Take {case}. Before each step: what is length, and which positions and slots have the new tokens? During the step: how "
        "many keys are in a layer's cache once the new ones are written?",
        rule="With n tokens kept and c new ones: positions and slots are n, n + 1, ..., n + c - 1, for a token's slot is its position "
        "here. Each layer writes the new keys and values first, and then attends to the first n + c of its own cache: the new tokens "
        "are among them. Only when all layers are done is the length n + c.\n\nBy hand, 3 tokens kept, 1 new: position 3, slot 3; "
        "4 keys are attended to; then length is 4.",
        code="""def begin(self, count):
    self.positions = cp.arange(____, ____, dtype=np.int32)
    self.slots = self.positions.astype(np.int64)

def __call__(self, layer, q, k, v, out):
    kv_write(k, v, self.slots, self.keys[____], self.values[____])
    m = self.length + ____
    attention_gqa(q, self.keys[layer, 0, :____], self.values[layer, 0, :____], self.scale, out)
    return out

def end(self):
    self.length += ____""",
    ),
    mistakes=(
        Mistake(
            "one cache for all layers",
            _attend(
                ("self.keys[layer], self.values[layer]", "self.keys[0], self.values[0]"),
                (
                    "self.keys[layer, 0, :m], self.values[layer, 0, :m]",
                    "self.keys[0, 0, :m], self.values[0, 0, :m]",
                ),
            ),
            "Every layer has keys and values of its own. With one cache a layer reads, for all earlier tokens, what the *last* layer "
            "wrote in the step before.",
            "After the first step, whose keys are in the cache: layer 0's, or the last layer's?",
        ),
        Mistake(
            "length advanced by every layer",
            _attend(
                ("        return out\n", "        self.length += len(q)\n        return out\n"),
                ("        self.length += len(self.slots)\n", "        pass\n"),
            ),
            "A step of one token makes the text one token longer, however many layers there are. Count in end().",
            "After a step of 3 tokens through 2 layers, how many tokens are kept?",
        ),
        Mistake(
            "the new token does not see itself",
            _attend(("m = self.length + len(q)", "m = self.length")),
            "A token attends to itself and to all before it. Once written, the new keys are the last of the cache: there are length + "
            "len(q) of them.",
            "Which keys may the newest token read?",
        ),
        Mistake(
            "attention before writing",
            _attend((_WRITE_LINE, ""), (_ATTENTION, _ATTENTION + _WRITE_LINE)),
            "The new tokens read themselves in the cache, so they must be written before.",
            "When attention runs, what is in the slots of the new tokens?",
        ),
        Mistake(
            "the whole cache attended to",
            _attend(
                (
                    "self.keys[layer, 0, :m], self.values[layer, 0, :m]",
                    "self.keys[layer, 0], self.values[layer, 0]",
                )
            ),
            "Behind the tokens that are kept lies memory that nobody has written. Attention may read the first length + len(q) only.",
            "What is in the last slot of the cache?",
        ),
        Mistake(
            "positions from 0 in every step",
            _attend(
                (
                    "cp.arange(self.length, self.length + count, dtype=np.int32)",
                    "cp.arange(count, dtype=np.int32)",
                ),
                (
                    "self.positions.astype(np.int64)",
                    "cp.arange(self.length, self.length + count, dtype=np.int64)",
                ),
            ),
            "The new tokens go on where the kept ones end. RoPE would take them for the first of the text.",
            "3 tokens are kept. Which position has the next?",
        ),
        Mistake(
            "positions one too far",
            _attend(
                (
                    "cp.arange(self.length, self.length + count,",
                    "cp.arange(self.length + 1, self.length + count + 1,",
                )
            ),
            "Positions count from 0: with n tokens kept the next one has position n.",
            "Which position has the first token of all?",
            variants=(
                _attend(
                    (
                        "cp.arange(self.length, self.length + count,",
                        "cp.arange(self.length + 1, self.length + count + 1,",
                    ),
                    ("self.positions.astype(np.int64)", "self.positions.astype(np.int64) - 1"),
                ),
            ),
        ),
        Mistake(
            "every step written to the front",
            _attend(("self.positions.astype(np.int64)", "cp.arange(count, dtype=np.int64)")),
            "The slots of earlier tokens are overwritten. New tokens go behind those that are kept.",
            "After the second step, what is left of the first token's key?",
        ),
        Mistake(
            "only the new tokens attended to",
            _attend(
                (
                    "self.keys[layer, 0, :m], self.values[layer, 0, :m]",
                    "self.keys[layer, 0, self.length:m], self.values[layer, 0, self.length:m]",
                )
            ),
            "The point of the cache is that the earlier tokens need not be computed again. They must still be read.",
            "In a step of one token, how many keys does your attention read?",
        ),
        Mistake(
            "length never advanced",
            _attend(("        self.length += len(self.slots)\n", "        pass\n")),
            "end() has to say that the new tokens are kept from now on.",
            "After the prompt, what is length?",
        ),
        Mistake(
            "one token counted for a step",
            _attend(("self.length += len(self.slots)", "self.length += 1")),
            "A step may have many tokens, as that of the prompt has, and all of them are kept.",
            "How many tokens did the step of the prompt have?",
        ),
        Mistake(
            "positions that are not int32",
            _attend(
                ("self.length + count, dtype=np.int32)", "self.length + count)"),
            ),
            "Without a dtype arange makes 64-bit integers, as in NumPy. A kernel reads bytes as what its parameter list says, and "
            "rope's says int.",
            "Which dtype does cp.arange give where none is asked for?",
        ),
    ),
)

# ---------------- 15.3: a text, token by token


def _model(rng: np.random.Generator) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "vocab_size": 23,
        "hidden_size": 16,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    weights: dict[str, Any] = {
        "embed_tokens": float_to_bf16(rng.standard_normal((23, 16)).astype(np.float32)),
        "norm": float_to_bf16((1 + 0.5 * rng.standard_normal(16)).astype(np.float32)),
    }
    for layer in range(2):
        weights |= random_layer(rng, layer, sizes)
    return {
        "sizes": sizes,
        "weights": weights,
        "inv_freq": (100.0 ** (-np.arange(0, 8, 2) / 8)).astype(np.float32),
    }


def _greedy(inputs: Mapping[str, Any]) -> tuple[list[int], float]:
    """Greedy tokens in float64, the whole text anew in each step, and the smallest margin between the two best."""
    weights, sizes = inputs["weights"], inputs["sizes"]
    table = bf16_to_float(weights["embed_tokens"]).astype(np.float64)
    text, margin = list(inputs["prompt"]), np.inf
    nothing = np.empty((0, sizes["num_key_value_heads"], sizes["head_dim"]))
    for _ in range(inputs["count"]):
        stream = table[text]
        for layer in range(sizes["num_hidden_layers"]):
            stream, x = layer_in_float64(
                stream,
                weights_of_layer(weights, layer),
                sizes,
                inputs["inv_freq"],
                np.arange(len(text)),
                np.tri(len(text), dtype=bool),
                nothing,
                nothing,
            )
            stream = stream + x
        last = stream[-1]
        normed = last / np.sqrt((last**2).mean() + sizes["rms_norm_eps"]) * bf16_to_float(weights["norm"])
        logits = bf16_to_float(float_to_bf16(normed.astype(np.float32))) @ table.T
        second, first = np.sort(logits)[-2:]
        margin = min(margin, float(first - second))
        text.append(int(logits.argmax()))
    return text[len(inputs["prompt"]) :], margin


def _generate_cases(rng: np.random.Generator) -> list[Case]:
    def case(prompt: int, count: int, group: str) -> Case:
        """A model and a prompt whose tokens are no near ties, and not all the same."""
        while True:
            inputs = {**_model(rng), "prompt": rng.integers(0, 23, prompt).tolist(), "count": count}
            tokens, margin = _greedy(inputs)
            if margin > 0.3 and len(set(tokens)) > min(2, count - 1):
                break
        label = f"a prompt of {prompt} token{'s' if prompt > 1 else ''}, {count} new"
        return Case(label, inputs, group)

    return [
        case(3, 2, "small"),
        case(5, 1, "small"),
        case(4, 6, "longer"),
        case(1, 5, "longer"),
    ]


def _run_generate(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    from types import SimpleNamespace

    sizes = dict(inputs["sizes"])
    sizes["q_size"] = sizes["num_attention_heads"] * sizes["head_dim"]
    sizes["kv_size"] = sizes["num_key_value_heads"] * sizes["head_dim"]

    class Weights(dict):  # type: ignore[type-arg]
        config = SimpleNamespace(**sizes)

    weights: Any = Weights({name: lab.input(name, values) for name, values in inputs["weights"].items()})
    weights["inv_freq"] = lab.input("inv_freq", inputs["inv_freq"])
    weights.lm_head = weights["embed_tokens"]
    # How many tokens are new in each step: CachedAttend is told when a step begins.
    names = answer.__globals__
    plain, steps = names["CachedAttend"], []

    class Counted(plain):  # type: ignore[misc, valid-type]
        def begin(self, count: int) -> Any:
            steps.append(int(count))
            return super().begin(count)

    Counted.__name__ = Counted.__qualname__ = "CachedAttend"
    # How many rows of logits each step asks for: forward is told.
    whole, rows = names["forward"], []

    def forward(given: Any, *others: Any, **named: Any) -> Any:
        rows.append(len(given.logits_rows))
        return whole(given, *others, **named)

    names["CachedAttend"], names["forward"] = Counted, forward
    try:
        tokens = answer(list(inputs["prompt"]), inputs["count"], weights)
    finally:
        names["CachedAttend"], names["forward"] = plain, whole
    return {
        "tokens": [int(token) for token in tokens],
        "tokens computed in each step": steps,
        "rows of logits in each step": rows,
    }


def _expect_generate(inputs: Any) -> dict[str, Any]:
    tokens, _ = _greedy(inputs)
    steps = [len(inputs["prompt"]), *[1] * (inputs["count"] - 1)]
    return {
        "tokens": tokens,
        "tokens computed in each step": steps,
        "rows of logits in each step": [1] * inputs["count"],
    }


_GENERATE_TEXT = """from types import SimpleNamespace


def generate(prompt, count, weights):
    attend = CachedAttend(weights.config, len(prompt) + count)
    new, tokens = list(prompt), []
    while len(tokens) < count:
        attend.begin(len(new))
        inputs = SimpleNamespace(
            ids=cp.asarray(np.array(new, np.int32)),
            positions=attend.positions,
            logits_rows=cp.asarray(np.array([len(new) - 1], np.int32)),
        )
        logits = forward(inputs, weights, attend)
        attend.end()
        tokens.append(int(argmax(logits, cp.empty(1, np.int32))[0]))
        new = tokens[-1:]
    return tokens
"""


def _generate(*changes: tuple[str, str]) -> str:
    """The whole answer for 15.3, with some things exchanged."""
    text = _GENERATE_TEXT
    return with_changes(text, changes)


_MADE = "    attend = CachedAttend(weights.config, len(prompt) + count)\n"

_GENERATE = Exercise(
    id="15.3",
    title="a text, token by token",
    answer="generate",
    kind="function",
    arguments=("prompt", "count", "weights"),
    uses=("kv_write", "attention_gqa", "forward", "argmax"),
    builds_on=("15.2",),
    cases=_generate_cases,
    run=_run_generate,
    expected=_expect_generate,
    points={"small": 1, "longer": 2},
    hints=Hints(
        question="Take {case}. Write down the steps: which tokens are new in the first one, which in the second? Whose logits are wanted "
        "in each?",
        rule="The first step has the whole prompt, and its last row gives the first new token. Every further step has one token, the one "
        "that was found last: its key is not in the cache yet. begin() before the step, end() after it.\n\nBy hand, the prompt 7 3 9 "
        "and 2 new tokens: step 1 computes 7 3 9 and gives, say, 4; step 2 computes 4 and gives 8; the answer is 4 8, and 8 was never "
        "computed.",
        code="""new, tokens = list(prompt), []
while len(tokens) < ____:
    attend.begin(____)
    inputs = SimpleNamespace(
        ids=cp.asarray(np.array(____, np.int32)),
        positions=attend.positions,
        logits_rows=cp.asarray(np.array([____], np.int32)),
    )
    logits = forward(inputs, weights, attend)
    ____
    tokens.append(int(argmax(logits, cp.empty(1, np.int32))[0]))
    new = ____
return tokens""",
    ),
    mistakes=(
        Mistake(
            "a new cache in every step",
            _generate(
                (_MADE, ""),
                ("    while len(tokens) < count:\n", "    while len(tokens) < count:\n    " + _MADE),
                ("new = tokens[-1:]", "new = list(prompt) + tokens"),
            ),
            "The tokens are right, and every step computes the whole text again. With the cache kept, a step after the first has one token.",
            "Whose keys are in the cache when the second step begins?",
        ),
        Mistake(
            "the whole text again, behind the kept one",
            _generate(
                ("len(prompt) + count)", "(len(prompt) + count) * (count + 1))"),
                ("new = tokens[-1:]", "new = list(prompt) + tokens"),
            ),
            "The prompt is in the cache. Given again, it stands behind itself: the model reads it twice, and the cache has no room for "
            "that.",
            "In the second step, which tokens does the cache not have yet?",
            variants=(
                _generate(("new = tokens[-1:]", "new = list(prompt) + tokens")),
                _generate(("        new = tokens[-1:]\n", "")),
            ),
        ),
        Mistake(
            "logits of every row of the prompt",
            _generate(
                ("cp.asarray(np.array([len(new) - 1], np.int32))", "cp.arange(len(new), dtype=np.int32)"),
                ("cp.empty(1, np.int32))[0]", "cp.empty(len(new), np.int32))[-1]"),
            ),
            "The tokens are right. But the LM head is the largest product of all, and what comes after the prompt's first tokens is "
            "known: the last row is enough.",
            "Of a prompt of 1,000 tokens, how many rows of logits do you look at?",
        ),
        Mistake(
            "one step more than needed",
            _generate(
                ("    while len(tokens) < count:\n", "    for _ in range(count + 1):\n"),
                ("    return tokens", "    return tokens[:count]"),
            ),
            "The first step, that of the prompt, gives the first new token: `count` steps in all.",
            "How many tokens have you got after the first step?",
            variants=(
                _generate(
                    ("    while len(tokens) < count:\n", "    for _ in range(count + 1):\n"),
                ),
            ),
        ),
        Mistake(
            "begin() not called",
            _generate(
                ("        attend.begin(len(new))\n", ""),
                ("positions=attend.positions", "positions=cp.arange(len(new), dtype=np.int32)"),
            ),
            "forward hands `attend` to the layers, which ask it for positions; begin() sets them and the slots.",
            "Who sets attend.positions, and when?",
            variants=(_generate(("        attend.begin(len(new))\n", "")),),
        ),
        Mistake(
            "the prompt read token by token",
            _generate(
                (
                    "    new, tokens = list(prompt), []\n",
                    "    rest = list(prompt)\n    new, tokens = [rest.pop(0)], []\n",
                ),
                (
                    "        tokens.append(",
                    "        if rest:\n            new = [rest.pop(0)]\n            continue\n        tokens.append(",
                ),
            ),
            "The tokens are right, in as many steps as the prompt has tokens. Each step reads all weights; the whole prompt in one step "
            "reads them once.",
            "How often are the weights read until the first new token is there?",
        ),
        Mistake(
            "logits of the first row",
            _generate(("[len(new) - 1]", "[0]")),
            "What comes after the prompt is said by its last token's row. In steps of one token the two are the same.",
            "Row i says what comes after token i. Which row do you want?",
        ),
        Mistake(
            "the prompt's last token once more",
            _generate(
                (
                    "        attend.end()\n        tokens.append",
                    "        attend.end()\n        first = not tokens\n        tokens.append",
                ),
                ("new = tokens[-1:]", "new = prompt[-1:] if first else tokens[-2:-1]"),
            ),
            "The new token is what the next step has to compute: it is not in the cache yet, and the one before it is.",
            "After the prompt has been read, which token has no key in the cache?",
        ),
        Mistake(
            "end() not called",
            _generate(("        attend.end()\n", "")),
            "Without it the cache does not know that the tokens are kept, and the next step writes over them.",
            "What is attend.length in the second step?",
        ),
        Mistake(
            "the first new token left out",
            _generate(("    return tokens", "    return tokens[1:]")),
            "The step that reads the prompt gives a token, too: the first of the answer.",
            "How many tokens have you got after the first step?",
        ),
        Mistake(
            "the prompt given back as well",
            _generate(("    return tokens", "    return list(prompt) + tokens")),
            "The new tokens alone are asked for.",
            "How long is your list, and how many tokens were asked for?",
        ),
    ),
)

# ---------------- 15.4: a prediction, and the work of a step


@functools.cache
def measured_work(past: int, new: int) -> dict[str, int]:
    """Multiplications of one step of tiny-stories, from the shapes of the calls that it makes.

    Parameters
    ----------
    past, new : int
        Tokens in the cache, and tokens that the step computes.

    Returns
    -------
    dict
        ``"products"`` of all layers (the LM head is left out), and ``"attention"``.
    """
    from tinyvllm_ref import emulation
    from tinyvllm_ref.assembly import PagedAttend, complete
    from tinyvllm_ref.batch import make_inputs
    from tinyvllm_ref.buffers import Buffers
    from tinyvllm_ref.checkpoint.names import resolve
    from tinyvllm_ref.checkpoint.weights import open_checkpoint
    from tinyvllm_ref.kv_cache import KVCache
    from tinyvllm_ref.model import Forward, Layer, Weights
    from tinyvllm_ref.parts import Parts

    config, views = open_checkpoint(resolve("tiny-stories"))
    counted = {"products": 0, "attention": 0}
    buffers = Buffers()
    filled: Any = complete(Parts(), buffers)
    plain = filled.linear

    def linear(x: Any, w: Any, out: Any) -> Any:
        if len(w) != config.vocab_size:
            counted["products"] += x.shape[0] * w.shape[0] * w.shape[1]
        return plain(x, w, out)

    filled = filled.replace(owner="reference", linear=linear)
    filled = filled.replace(owner="reference", decoder_layer=Layer(filled, buffers))
    forward: Any = Forward(filled, buffers)
    weights = Weights(config, filled.load_weights(views, config), filled.rope_frequencies(config))
    with emulation.checks("fast"):
        cache = KVCache(config, 1, past + new)
        for start, count in ((0, past), (past, new)):
            if not count:
                continue
            counted["products"] = counted["attention"] = 0
            ids = np.random.default_rng(0).integers(0, 1000, count).tolist()
            inputs = make_inputs(
                [ids], [start], [[0]], [count - 1], int(start > 0 and count == 1), past + new
            )
            attend: Any = PagedAttend(filled, config, inputs, cache)

            def counting(
                layer: int, q: Any, k: Any, v: Any, out: Any, attend: Any = attend, start: int = start
            ) -> Any:
                tokens, heads, head_dim = q.shape
                seen = sum(start + i + 1 for i in range(tokens))  # keys, over all queries
                counted["attention"] += 2 * seen * heads * head_dim
                return attend(layer, q, k, v, out)

            counting.positions = attend.positions  # type: ignore[attr-defined]
            forward(inputs, weights, counting)
    return dict(counted)


def _crossing_of_tiny_stories() -> float:
    """Where attention of one token costs what the products cost, from two measured steps."""
    near, far = measured_work(15, 1), measured_work(63, 1)
    a_key = (far["attention"] - near["attention"]) / 48
    return near["products"] / a_key


def _crossing_of_llama_1b() -> float:
    """The same from the weights that a Llama 3.2 1B has."""
    from tinyvllm_ref.checkpoint.weights import weight_plan
    from tinyvllm_ref.config import ModelConfig

    config = ModelConfig.from_dict(LLAMA_1B)
    products = sum(
        int(np.prod(group.shape))
        for group in weight_plan(config)
        if len(group.shape) == 2 and group.name.startswith("layers.")
    )
    a_key = 2 * config.q_size * config.num_hidden_layers
    return products / a_key


LLAMA_1B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
"""Sizes of Llama 3.2 1B, from its config.json."""

_PREDICTION = Prediction(
    id="15.4",
    title="when does attention cost as much as the products?",
    quantities={
        "tiny": Quantity("tiny-stories, from two steps that were run", _crossing_of_tiny_stories, "tokens"),
        "llama_1b": Quantity("Llama 3.2 1B, from the shapes of its weights", _crossing_of_llama_1b, "tokens"),
    },
    explains="A token's products take one multiplication for each weight of the layer; its attention takes 2 Hq D for each key, once for "
    "the score and once for the value. tiny-stories: 393,216 weights a layer / (2 x 192) = 1,024. Llama 3.2 1B: 60,817,408 / (2 x 2,048) "
    "= 14,848. Below that length a decode step is mostly products.",
    hints=Hints(
        question="For one new token, how many multiplications does a product with a weight of (N, K) take? And how many does one query head "
        "need for one key: for the score, and for adding up the value?",
        rule="Products: as many as the layer has weights (13.2 counted them). Attention with n keys: for each of Hq heads, D for each score "
        "and D for each value that is added: 2 n Hq D. Set the two equal. The number of layers is on both sides.",
        code="weights = 192 * (192 + 2 * 64) + 192 * 192 + ____\ntiny = weights / (2 * ____)\n"
        "weights = 2048 * (2048 + 2 * 512) + 2048 * 2048 + 3 * ____ * ____\nllama_1b = weights / ____",
    ),
)


def draw_work() -> Any:
    """Multiplications for one new token over the length of the text, with and without a cache."""
    from tinyvllm_ref.course import figures

    lengths = [4, 8, 16, 32, 64, 128, 256]
    kept = [measured_work(n - 1, 1) for n in lengths]
    anew = [measured_work(0, n) for n in lengths]
    return figures.error_lines(
        lengths,
        {
            "anew: products": [work["products"] for work in anew],
            "anew: attention": [work["attention"] for work in anew],
            "kept: products": [work["products"] for work in kept],
            "kept: attention": [work["attention"] for work in kept],
        },
        "tokens of the text, the new one included",
        "multiplications",
        title="What one more token costs",
        subtitle="tiny-stories, counted from the calls of real steps; all layers, without the LM head. Anew: no cache, the whole text is "
        "computed again.",
        log_x=True,
        log_y=True,
    )


def compare_with_one_prefill() -> None:
    """Say how far the learner's engine is, token by token, from one prefill of the same text."""
    from tinyvllm_ref import emulation
    from tinyvllm_ref.assembly import build_model
    from tinyvllm_ref.batch import make_inputs
    from tinyvllm_ref.checkpoint.names import resolve
    from tinyvllm_ref.checkpoint.weights import open_checkpoint
    from tinyvllm_ref.course import my_engine
    from tinyvllm_ref.course.compare_layers import golden
    from tinyvllm_ref.course.wiring import wired
    from tinyvllm_ref.kv_cache import KVCache

    config, views = open_checkpoint(resolve("tiny-stories"))
    own = my_engine.own_parts()
    model: Any = build_model(config, views, own)
    text = [*golden().ids, *golden().new_ids[:20]]
    with emulation.checks("fast"), wired(own):
        size = len(text)

        def step(cache: Any, start: int, count: int) -> Any:
            ids, rows, decodes = text[start : start + count], range(count), int(start > 0)
            return model.forward(make_inputs([ids], [start], [[0]], rows, decodes, size), cache).get()

        at_once = step(KVCache(config, 1, size), 0, size)
        cache = KVCache(config, 1, size)
        one_by_one = np.concatenate([step(cache, position, 1) for position in range(size)])
    off = np.linalg.norm(one_by_one - at_once, axis=1) / np.linalg.norm(at_once, axis=1)
    same = int((one_by_one.argmax(axis=1) == at_once.argmax(axis=1)).sum())
    said = f"differ by at most {off.max():.1g}" if off.any() else "are equal to the bit"
    print(f"{size} positions: the next token is the same at {same} of them, and the logits {said}")


def write_own_story(prompt: str = "Once upon a time", count: int = 40) -> None:
    """Write with the learner's `generate` on tiny-stories, and say whether the engine writes the same."""
    from tinyvllm_ref import LLM, SamplingParams, device, emulation
    from tinyvllm_ref.course import my_engine
    from tinyvllm_ref.course.answers import make_answer

    source = my_engine.answer("15.3")
    if source is None:
        print("no story yet: 15.3 has not passed")
        return
    generate = make_answer(_GENERATE, source, device.cp)
    llm = LLM("tiny-stories", parts=my_engine.own_parts())
    ids = llm.tokenizer.encode(prompt)
    with emulation.checks("fast"):
        tokens = generate(list(ids), count, llm.model.weights)
        options = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        (output,) = llm.generate([list(ids)], options, use_tqdm=False)
    wanted = list(output.outputs[0].token_ids)
    same = sum(a == b for a, b in zip(tokens, wanted, strict=False))
    print(prompt + llm.tokenizer.decode(tokens))
    print(f"\n{same} of {count} tokens are those of the engine.")


# ---------------- what the engine card turns


def _keys_not_rotated(parts: Any) -> dict[str, Any]:
    """The keys go into the cache as they were before RoPE; the queries are rotated."""
    from tinyvllm_ref.assembly import Parts

    rope: Any = parts.rope or Parts.reference().rope

    def queries_only(q: Any, k: Any, positions: Any, inv_freq: Any) -> None:
        rope(q, k.copy(), positions, inv_freq)

    return {"rope": queries_only}


def _one_too_far(parts: Any) -> dict[str, Any]:
    """In steps of one token the position is one too large."""
    from tinyvllm_ref.assembly import Parts

    rope: Any = parts.rope or Parts.reference().rope

    def shifted(q: Any, k: Any, positions: Any, inv_freq: Any) -> None:
        rope(q, k, positions + np.int32(1) if len(q) == 1 else positions, inv_freq)

    return {"rope": shifted}


# ---------------- what is measured


def _make_run(tokens: int, heads: int = 8, head_dim: int = 64) -> Any:
    def make(answer: Any, cp: Any) -> Any:
        k = cp.ones((tokens, heads, head_dim), np.float32)
        v, slots = cp.ones((tokens, heads, head_dim), np.float32), cp.arange(tokens, dtype=np.int64)
        key_cache = cp.empty((1, tokens, heads, head_dim), np.uint16)
        value_cache = cp.empty((1, tokens, heads, head_dim), np.uint16)
        return lambda: answer(k, v, slots, key_cache, value_cache)

    return make


_LARGE, _SMALL, _WIDTH = 16_384, 16, 512
_WORK = Work(
    label=f"{_LARGE:,} tokens of 8 heads of 64",
    make=_make_run(_LARGE),
    read_bytes=_LARGE * (8 * _WIDTH + 8),
    write_bytes=4 * _LARGE * _WIDTH,
    small=_make_run(_SMALL),
    small_read_bytes=_SMALL * (8 * _WIDTH + 8),
    small_write_bytes=4 * _SMALL * _WIDTH,
    small_label=f"{_SMALL} tokens of 8 heads of 64",
)

LESSON = Lesson(
    number="15",
    slug="kv_cache",
    title="The KV cache",
    part=4,
    minutes=55,
    exercises=(_WRITE, _ATTEND, _GENERATE, _PREDICTION),
    engine=EngineCard(
        mistakes=(("15.1", "token t into slot t"), ("15.1", "keys into both caches")),
        note="kv_write runs once for each layer and step. The engine's slots are not simply positions, as yours were: its cache is cut "
        "into blocks, and lesson 21 says why. Your kernel only follows the list.",
        dial=(
            Setting(
                "keys kept before RoPE",
                "The cache gets keys that were not rotated, and the queries are. Every key looks as if it stood at position 0.",
                _keys_not_rotated,
            ),
            Setting(
                "positions one too far",
                "Each new token takes itself to stand one place further on than it does. To the prompt the distance is wrong by one; "
                "among themselves the new tokens are right.",
                _one_too_far,
            ),
        ),
        dial_title="What else goes wrong around a cache",
    ),
    works={"15.1": _WORK},
)
