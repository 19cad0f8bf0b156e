"""Lesson 23, the capstone: a loop, preemption, text as it comes; an engine in which every part is the learner's."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from tinyvllm_ref.bf16 import bf16_to_float, float_to_bf16
from tinyvllm_ref.course import capstone
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

from .lesson_13_feed_forward import layer_in_float64, random_layer, weights_of_layer


def _changed(text: str, *changes: tuple[str, str]) -> str:
    return with_changes(text, changes)


# ---------------- a small model with random weights, and what it says, in float64

_VOCAB = 29
_ALPHABET = "abcdefghijklmnopqrstuvwxyz .|"  # of 23.3's small model; the last one ends a text


def _model(rng: np.random.Generator, heads: int = 4, kv_heads: int = 2) -> dict[str, Any]:
    """Sizes and weights: two layers, four query heads that share two KV heads if nothing else is said."""
    sizes: dict[str, Any] = {
        "vocab_size": _VOCAB,
        "hidden_size": 16,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "max_position_embeddings": 200,
    }
    weights: dict[str, Any] = {
        "embed_tokens": float_to_bf16(rng.standard_normal((_VOCAB, 16)).astype(np.float32)),
        "norm": float_to_bf16((1 + 0.5 * rng.standard_normal(16)).astype(np.float32)),
    }
    for layer in range(2):
        weights |= random_layer(rng, layer, sizes)
    return {
        "sizes": sizes,
        "weights": weights,
        "inv_freq": (100.0 ** (-np.arange(0, 8, 2) / 8)).astype(np.float32),
    }


def _logits(model: Mapping[str, Any], text: list[int]) -> Any:
    """What comes after a text, in float64; every token is computed anew, and nothing is kept."""
    sizes, weights = model["sizes"], model["weights"]
    table = bf16_to_float(weights["embed_tokens"]).astype(np.float64)
    stream = table[text]
    nothing = np.empty((0, sizes["num_key_value_heads"], sizes["head_dim"]))
    seen = np.tri(len(text), dtype=bool)
    for layer in range(sizes["num_hidden_layers"]):
        own = weights_of_layer(weights, layer)
        stream, x = layer_in_float64(
            stream, own, sizes, model["inv_freq"], np.arange(len(text)), seen, nothing, nothing
        )
        stream = stream + x
    last = stream[-1]
    normed = last / np.sqrt((last**2).mean() + sizes["rms_norm_eps"]) * bf16_to_float(weights["norm"])
    return bf16_to_float(float_to_bf16(normed.astype(np.float32))).astype(np.float64) @ table.T


def _completion(
    model: Mapping[str, Any], request: Mapping[str, Any], ends: tuple[int, ...] = ()
) -> list[int] | None:
    """The tokens that a request gets; None where one of them is so nearly another that rounding could decide."""
    from tinyvllm_ref.kernels.sampling import kept_probabilities, uniform

    text, count = list(request["prompt"]), 0
    while count < request["max_tokens"]:
        logits = _logits(model, text)
        if request["temperature"] == 0:
            second, first = np.sort(logits)[-2:]
            if first - second < 0.25:
                return None
            token = int(logits.argmax())
        else:
            ids, probabilities = kept_probabilities(logits, request["temperature"], 0, 1.0, 0.0)
            edges, point = np.cumsum(probabilities), uniform(request["seed"], count)
            rank = int(np.searchsorted(edges, point, side="right"))
            around = logits[ids[max(0, rank - 1) : rank + 2]]
            if np.abs(edges - point).min() < 0.03 or np.abs(np.diff(around)).min() < 0.15:
                return None
            token = int(ids[rank])
        text.append(token)
        count += 1
        if token in ends:
            break
    return text[len(request["prompt"]) :]


def _drawn(
    rng: np.random.Generator, model: Mapping[str, Any], prompt: int, max_tokens: int, temperature: float = 0.0
) -> dict[str, Any]:
    """A request whose tokens are no near ties, and not all the same."""
    while True:
        request = {
            "prompt": rng.integers(0, _VOCAB, prompt).tolist(),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": int(rng.integers(1, 1000)),
        }
        tokens = _completion(model, request)
        if tokens is not None and len(set(tokens)) > min(2, max_tokens - 1):
            return request


# ---------------- 23.1: the loop


def _loop_cases(rng: np.random.Generator) -> list[Case]:
    usual = _model(rng)

    def case(
        label: str, requests: list[tuple[int, int]], group: str, *, seats: int = 8, budget: int = 64, blocks: int = 40,
        temperatures: tuple[float, ...] = (), abort: str = "", later: int = 0, model: Mapping[str, Any] = usual,
    ) -> Case:  # fmt: skip
        """`requests`: (tokens of the prompt, new tokens); the last `later` of them come after the first step."""
        drawn = []
        for number, (prompt, new) in enumerate(requests):
            warm = temperatures[number] if temperatures else 0.0
            one = _drawn(rng, model, prompt, new, warm)
            drawn.append({"name": "abcdef"[number], "at": int(number >= len(requests) - later), **one})
        inputs = {
            "requests": drawn, "max_seqs": seats, "max_tokens": budget, "num_blocks": blocks, "block_size": 4,
            "abort": abort, **model,
        }  # fmt: skip
        return Case(label, inputs, group)

    return [
        case("a prompt of 3 tokens, 1 new", [(3, 1)], "small"),
        case("a prompt of 3 tokens, 3 new", [(3, 3)], "small"),
        case("prompts of 5 and 2 tokens, 3 new each", [(5, 3), (2, 3)], "small"),
        case("a prompt comes while others write", [(5, 5), (2, 4), (6, 2)], "mixed", later=1),
        case("a prompt of 9 in pieces of at most 4, beside another", [(2, 5), (9, 2)], "mixed", budget=4),
        case("3 requests in 5 blocks of 4", [(6, 7), (5, 8), (3, 4)], "mixed", blocks=5),
        case("drawn by chance, two of three", [(4, 4), (3, 4), (5, 4)], "chance", temperatures=(1.3, 0.0, 1.6)),
        case("by chance and computed again, in 4 blocks of 4", [(5, 6), (4, 6)], "chance", blocks=4, temperatures=(1.0, 0.8)),
        case("one is aborted while it writes", [(4, 6), (5, 6)], "abort", abort="a@2"),
        case("one is aborted while it waits", [(6, 4), (7, 3)], "abort", abort="b@1", seats=1),
        # More numbers in a row than a block has threads.
        case("64 heads: rows of 512 numbers", [(6, 2), (3, 1)], "mixed", model=_model(rng, 64, 64)),
    ]  # fmt: skip


def _run_loop(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    from contextlib import nullcontext
    from types import SimpleNamespace

    from tinyvllm_ref.course.given.inputs import Weights
    from tinyvllm_ref.request import Request
    from tinyvllm_ref.sampling_params import SamplingParams
    from tinyvllm_ref.scheduler import Scheduler

    names = answer.step.__globals__  # the cell may name the parts as well
    array_parts = ("pack", "kv_write", "attention_tiled", "paged_attention", "argmax", "sample", "forward")
    plain = names.setdefault("__parts__", {name: names[name] for name in array_parts})
    calls = {"attention_tiled": 0, "paged_attention": 0}
    sizes = dict(inputs["sizes"])
    heads, kv_heads, head_dim = (sizes[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    sizes |= {"q_size": heads * head_dim, "kv_size": kv_heads * head_dim, "eos_token_ids": ()}
    sizes["kv_bytes_per_token"] = 4 * sizes["num_hidden_layers"] * sizes["kv_size"]

    arrays = {name: lab.input(name, values) for name, values in inputs["weights"].items()}
    weights = Weights(SimpleNamespace(**sizes), arrays, lab.input("inv_freq", inputs["inv_freq"]))
    pools: list[Any] = []

    def pool(num_blocks: int, block_size: int) -> Any:
        pools.append(names["BlockManager"](num_blocks, block_size))
        return pools[-1]

    # The parts of earlier lessons have been checked; here it is the kernel of this cell that runs with full checks.
    emulated = getattr(lab.cp, "is_emulation", False)

    def fast(name: str) -> Any:
        part = plain[name]

        def call(*arguments: Any) -> Any:
            if name in calls:
                calls[name] += 1
            with lab.cp.checks("fast") if emulated else nullcontext():
                return part(*arguments)

        return call

    class Checked:
        """The learner's attend, called from within a part."""

        def __init__(self, attend: Any) -> None:
            self.attend, self.positions = attend, attend.positions

        def __call__(self, *arguments: Any) -> Any:
            with lab.cp.checks("full") if emulated else nullcontext():
                return self.attend(*arguments)

    parts = SimpleNamespace(**{name: fast(name) for name in array_parts})
    forward = parts.forward
    parts.forward = lambda inputs, weights, attend: forward(inputs, weights, Checked(attend))
    names |= vars(parts)
    parts.BlockManager, parts.Scheduler = pool, Scheduler
    config = SimpleNamespace(
        num_blocks=inputs["num_blocks"], block_size=inputs["block_size"], max_num_seqs=inputs["max_seqs"],
        max_num_batched_tokens=inputs["max_tokens"], max_model_len=None, memory_fraction=0.9, seed=0,
    )  # fmt: skip
    model = SimpleNamespace(config=weights.config, weights=weights)
    engine = answer(model, parts, config)
    tokens: dict[str, Any] = {one["name"]: [] for one in inputs["requests"]}
    reasons: dict[str, Any] = {one["name"]: None for one in inputs["requests"]}
    told: list[str] = []
    arrivals = list(inputs["requests"])
    while (arrivals or engine.has_work) and len(told) < 40:
        while arrivals and arrivals[0]["at"] <= len(told):
            one = arrivals.pop(0)
            options = {name: one[name] for name in ("max_tokens", "temperature", "seed")}
            engine.add_request(Request(one["name"], one["prompt"], SamplingParams(**options)))
        outputs = engine.step()
        if not isinstance(outputs, list):
            raise TypeError(f"step() gave {type(outputs).__name__}; it must give a list of outputs")
        for output in outputs:
            (completion,) = output.outputs
            tokens[output.request_id] = [int(token) for token in completion.token_ids]
            reasons[output.request_id] = completion.finish_reason if output.finished else None
        told.append(", ".join(sorted(f"{o.request_id} has {len(o.outputs[0].token_ids)}" for o in outputs)))
        if inputs["abort"].endswith(f"@{len(told)}"):
            engine.abort(inputs["abort"][0])
    if inputs["abort"] and not engine.has_work:  # whoever serves may ask for a step when nobody is there
        told.append(f"nobody is there: {len(engine.step())} outputs")
    return {
        **{f"tokens of {name}": found for name, found in tokens.items()},
        "told in each step": told,
        "finish reasons": reasons,
        "has work at the end": bool(engine.has_work),
        "free blocks at the end": int(pools[0].num_free),
        "calls of paged_attention": calls["paged_attention"],
        "calls of attention_tiled": calls["attention_tiled"],
    }


def _expect_loop(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens by NumPy in float64; who gets one in which step by the reference's scheduler."""
    from tinyvllm_ref.block_manager import BlockManager
    from tinyvllm_ref.request import Request
    from tinyvllm_ref.sampling_params import SamplingParams
    from tinyvllm_ref.scheduler import Scheduler

    blocks = BlockManager(inputs["num_blocks"], inputs["block_size"])
    scheduler = Scheduler(inputs["max_seqs"], inputs["max_tokens"], blocks)
    texts = {one["name"]: _completion(inputs, one) or [] for one in inputs["requests"]}
    requests: dict[str, Request] = {}
    arrivals, told, paged, tiled = list(inputs["requests"]), list[str](), 0, 0
    while arrivals or scheduler.has_work:
        while arrivals and arrivals[0]["at"] <= len(told):
            one = arrivals.pop(0)
            params = SamplingParams(max_tokens=one["max_tokens"])
            requests[one["name"]] = Request(one["name"], one["prompt"], params)
            scheduler.add(requests[one["name"]])
        batch = scheduler.schedule()
        paged, tiled = paged + (batch.num_decodes > 0), tiled + len(batch.requests) - batch.num_decodes
        sampling = [r for r, samples in zip(batch.requests, batch.samples, strict=True) if samples]
        scheduler.update(batch, [texts[r.request_id][r.num_output_tokens] for r in sampling])
        told.append(", ".join(sorted(f"{r.request_id} has {r.num_output_tokens}" for r in sampling)))
        if inputs["abort"].endswith(f"@{len(told)}"):
            scheduler.abort(inputs["abort"][0])
    aborted = inputs["abort"][:1]
    told += ["nobody is there: 0 outputs"] if aborted else []
    return {
        **{f"tokens of {name}": requests[name].output_token_ids for name in texts},
        "told in each step": told,
        "finish reasons": {name: None if name == aborted else "length" for name in texts},
        "has work at the end": False,
        "free blocks at the end": inputs["num_blocks"],
        "calls of paged_attention": inputs["sizes"]["num_hidden_layers"] * paged,
        "calls of attention_tiled": inputs["sizes"]["num_hidden_layers"] * tiled,
    }


def _gather_is_used(inputs: Any, outputs: Any, observed: Any) -> str | None:
    gathers = [report for report in observed.launches if report.kernel == "gather"]
    if not gathers:
        return "The tokens are right, and the kernel `gather` was never launched: the keys came together in another way. Here a kernel is asked for"
    sizes = inputs["sizes"]
    fewest = sum(report.grid[0] for report in gathers) * -(
        -sizes["num_key_value_heads"] * sizes["head_dim"] // 32
    )
    turns = sum(report.global_write_requests for report in gathers)
    if turns > 4 * fewest:
        return f"The tokens are right, and `gather` wrote in {turns:,} turns of warps where {fewest:,} are enough: let the threads share the columns of a row"
    return None


_LOOP_TEXT = '''import dataclasses
import itertools
from types import SimpleNamespace

from tinyvllm_ref.course.given.inputs import blocks_that_fit, check_request, make_inputs

gather = cp.RawKernel(r"""
extern "C" __global__ void gather(const unsigned short* cache, const int* table, unsigned short* out,
                                  int block_size, int width) {
    int t = blockIdx.x;
    long long slot = (long long)table[t / block_size] * block_size + t % block_size;
    for (int c = threadIdx.x; c < width; c += blockDim.x) out[(size_t)t * width + c] = cache[slot * width + c];
}
""", "gather")


class Attend:
    def __init__(self, inputs, keys, values, parts):
        self.inputs, self.keys, self.values, self.parts = inputs, keys, values, parts
        self.positions = inputs.positions

    def __call__(self, layer, q, k, v, out):
        inputs, parts, scale = self.inputs, self.parts, q.shape[2] ** -0.5
        keys, values, d = self.keys[layer], self.values[layer], inputs.num_decodes
        parts.kv_write(k, v, inputs.slots, keys, values)
        if d > 0:
            tables, lens = inputs.block_tables[:d], inputs.context_lens[:d]
            parts.paged_attention(q[:d], keys, values, tables, lens, scale, out[:d])
        for b in range(d, len(inputs.spans)):
            first, last = inputs.spans[b]
            own_keys, own_values = self.gathered(keys, b), self.gathered(values, b)
            parts.attention_tiled(q[first:last], own_keys, own_values, scale, out[first:last])
        return out

    def gathered(self, cache, b):
        block_size, kv_heads, head_dim = cache.shape[1:]
        tokens = self.inputs.contexts[b]
        out = cp.empty((tokens, kv_heads, head_dim), np.uint16)
        sizes = np.int32(block_size), np.int32(kv_heads * head_dim)
        gather((tokens,), (128,), (cache, self.inputs.block_tables[b], out, *sizes))
        return out


class Engine:
    def __init__(self, model, parts, config):
        self.model, self.parts, self.config = model, parts, config
        num_blocks, block_size = blocks_that_fit(model.config, config), config.block_size
        m = model.config
        shape = (m.num_hidden_layers, num_blocks, block_size, m.num_key_value_heads, m.head_dim)
        self.keys, self.values = cp.empty(shape, np.uint16), cp.empty(shape, np.uint16)
        self.blocks = parts.BlockManager(num_blocks, block_size)
        self.scheduler = parts.Scheduler(config.max_num_seqs, config.max_num_batched_tokens, self.blocks)
        self.requests = {}
        self.seeds = itertools.count(config.seed)

    @property
    def has_work(self):
        return bool(self.requests)

    def add_request(self, request):
        check_request(request, self.model.config, self.config)
        if request.params.seed is None:
            request.params = dataclasses.replace(request.params, seed=next(self.seeds))
        self.scheduler.add(request)
        self.requests[request.request_id] = request

    def abort(self, id):
        self.scheduler.abort(id)
        self.requests.pop(id, None)

    def step(self):
        batch = self.scheduler.schedule()
        if not batch:
            return []
        inputs = make_inputs(batch, self.config.block_size, self.parts.pack)
        attend = Attend(inputs, self.keys, self.values, self.parts)
        logits = self.parts.forward(inputs, self.model.weights, attend)
        sampling = [request for request, samples in zip(batch.requests, batch.samples) if samples]
        ids = self.next_tokens(logits, sampling)
        for request in self.scheduler.update(batch, ids):
            del self.requests[request.request_id]
        return [self.output_of(request) for request in sampling]

    def next_tokens(self, logits, requests):
        if not requests:
            return []
        params = [request.params for request in requests]
        if all(p.temperature == 0 for p in params):
            return self.parts.argmax(logits, cp.empty(len(requests), np.int32)).tolist()
        steps = [request.num_output_tokens for request in requests]
        return self.parts.sample(logits, params, cp.asarray(np.array(steps, np.int32))).tolist()

    def output_of(self, request):
        completion = SimpleNamespace(
            index=0, text="", token_ids=request.output_token_ids, finish_reason=request.finish_reason
        )
        return SimpleNamespace(request_id=request.request_id, finished=request.finished, outputs=[completion])
'''


def _loop(*changes: tuple[str, str]) -> str:
    """The whole answer for 23.1, with some things exchanged."""
    return _changed(_LOOP_TEXT, *changes)


_SLOT = "(long long)table[t / block_size] * block_size + t % block_size"
_WRITE_LINE = "        parts.kv_write(k, v, inputs.slots, keys, values)\n"
_UPDATE_LINES = """        for request in self.scheduler.update(batch, ids):
            del self.requests[request.request_id]
"""

_LOOP = Exercise(
    id="23.1",
    title="the loop",
    answer="Engine",
    kind="class",
    uses=(
        "BlockManager", "pack", "kv_write", "attention_tiled", "paged_attention", "forward", "argmax", "sample",
    ),
    cases=_loop_cases,
    run=_run_loop,
    expected=_expect_loop,
    points={"small": 2, "mixed": 2, "chance": 1, "abort": 1},
    verify=_gather_is_used,
    seconds=15.0,  # on a machine that has compiled none of the parts yet
    makes={"Engine": "Engine"},
    file="engine.py",
    hints=Hints(
        question="Take {case}. What happens in the first step: who computes which tokens, where do their keys go, who reads which keys, "
        "and who gets a new token? And in the second?",
        rule="A step: schedule; nothing to do, nothing told. Else the inputs, the logits, a token for each request whose `samples` is true, and "
        "update with these tokens. Update gives the requests that have ended: they leave self.requests. Told are those that "
        "got a token.\n\n"
        "Attend: first write all new keys and values by their slots. The first num_decodes requests have one row each: rows 0 to "
        "num_decodes - 1 go to paged_attention, with their rows of block_tables and context_lens. Every other request b has the rows "
        "spans[b], and reads all contexts[b] of its keys, gathered into one piece.\n\n"
        "By hand, one decode and a prompt of 3: spans are (0, 1), (1, 4); row 0 is the decode, rows 1 to 3 are the prompt. The kernel: token "
        "6 with blocks of 4 lies in the block table[1], at offset 2.",
        code="""long long slot = (long long)table[____] * ____ + ____;
for (int c = threadIdx.x; c < width; c += blockDim.x) out[____ + c] = cache[____ + c];

parts.kv_write(k, v, ____, keys, values)
if d > 0:
    tables, lens = inputs.block_tables[____], inputs.context_lens[____]
    parts.paged_attention(q[____], keys, values, tables, lens, scale, out[____])
for b in range(d, len(inputs.spans)):
    first, last = inputs.spans[b]
    parts.attention_tiled(q[first:last], self.gathered(____, b), self.gathered(____, b), scale, ____)

batch = self.scheduler.schedule()
if not batch:
    return ____
inputs = make_inputs(batch, self.config.block_size, self.parts.pack)
logits = self.parts.forward(inputs, self.model.weights, Attend(____))
sampling = [request for request, samples in zip(batch.requests, ____) if samples]
ids = self.next_tokens(logits, ____)
for request in self.scheduler.update(batch, ids):
    del ____
return [self.output_of(request) for request in ____]""",
    ),
    mistakes=(
        Mistake(
            "keys read before they are written",
            _loop((_WRITE_LINE, ""), ("        return out\n\n    def gathered", _WRITE_LINE + "        return out\n\n    def gathered")),
            "Every token reads its own key, so the step's keys and values must be in the cache before anybody attends. Yours are "
            "written at the end, and what is read there is what nobody, or somebody else, has written.",
            "When the prompt's first token attends to itself, where does it find its key?",
        ),
        Mistake(
            "the table read by token",
            _loop((_SLOT, "(long long)table[t] * block_size + t % block_size")),
            "The table has an entry a block. Token t lies in the block table[t / block_size].",
            "A prompt of 3 tokens has one block. What is the second entry of its table?",
        ),
        Mistake(
            "the cache read as if it were in one piece",
            _loop((_SLOT, "t")),
            "Token t of a request lies in slot t only if its blocks happen to be 0, 1, 2. Where they are, its table says; without it "
            "a prompt reads somebody else's keys.",
            "Two requests each have a token 0. From which slot does your kernel take it?",
        ),
        Mistake(
            "only this step's keys",
            _loop(("        tokens = self.inputs.contexts[b]\n", "        first, last = self.inputs.spans[b]\n        tokens = last - first\n")),
            "A piece of a prompt reads all tokens of its request that came before it as well: contexts[b] of them, and not only the "
            "last - first that this step computes.",
            "The second piece of a prompt of 9: how many keys does it read?",
            variants=(
                _loop(("= self.gathered(keys, b), self.gathered(values, b)", "= self.gathered(keys, b)[first - last :], self.gathered(values, b)[first - last :]")),
            ),
        ),
        Mistake(
            "everybody decodes",
            _loop(
                ("d = self.keys[layer], self.values[layer], inputs.num_decodes", "d = self.keys[layer], self.values[layer], len(inputs.spans)"),
            ),
            "paged_attention takes one row a request. A prompt has a row for each of its tokens; those requests, from num_decodes on, go "
            "to attention_tiled.",
            "A prompt of 3 tokens: how many rows of q are its own, and how many does paged_attention read of it?",
        ),
        Mistake(
            "the slot without the remainder",
            _loop((_SLOT, "(long long)table[t / block_size] * block_size + t")),
            "table[t / block_size] says which block, and the block begins at that times block_size. From there on it is t % block_size slots: t itself "
            "counts the blocks before it once more.",
            "Token 4 with blocks of 4 is the first of its block. How far behind the block's beginning does your kernel read?",
        ),
        Mistake(
            "a number a thread, and no more",
            _loop(("    for (int c = threadIdx.x; c < width; c += blockDim.x) out", "    int c = threadIdx.x;\n    if (c < width) out")),
            "A block has 128 threads, and a row may have more numbers: a real model's has 1,024. What comes behind the first 128 is copied by nobody. Let each "
            "thread go on in steps of blockDim.x.",
            "A row has 512 numbers. Which thread copies the last one?",
        ),
        Mistake(
            "rows counted from the first prompt",
            _loop(("            first, last = inputs.spans[b]\n", "            first, last = inputs.spans[b - d]\n")),
            "spans has an entry for each request of the batch, those that decode included: request b's is spans[b].",
            "One request decodes, and a prompt is the second. Whose rows are spans[0]?",
        ),
        Mistake(
            "row b for request b",
            _loop(("            first, last = inputs.spans[b]\n", "            first, last = b, b + inputs.contexts[b]\n")),
            "Request b begins in row b only as long as all before it have one row. spans[b] says where its rows begin and end.",
            "Prompts of 5 and 2 tokens: in which row does the second begin?",
        ),
        Mistake(
            "the prompts' attention for everyone",
            _loop(
                ("d = self.keys[layer], self.values[layer], inputs.num_decodes", "d = self.keys[layer], self.values[layer], 0"),
            ),
            "The tokens are right. But attention_tiled wants the keys gathered: for each decoding request all its keys are copied first, in each layer and step. "
            "paged_attention reads them where they lie, for all decodes in one launch.",
            "A request of 1,000 tokens decodes one more. How many keys does your step copy?",
        ),
        Mistake(
            "one decode after the other",
            _loop(
                ("            tables, lens = inputs.block_tables[:d], inputs.context_lens[:d]\n            parts.paged_attention(q[:d], keys, values, tables, lens, scale, out[:d])\n",
                 "            for i in range(d):\n                tables, lens = inputs.block_tables[i : i + 1], inputs.context_lens[i : i + 1]\n                parts.paged_attention(q[i : i + 1], keys, values, tables, lens, scale, out[i : i + 1])\n"),
            ),
            "The tokens are right, with a launch for each decoding request. paged_attention takes all of them at once: rows 0 to num_decodes - 1, and "
            "their rows of block_tables and context_lens.",
            "Three requests decode. How many launches of paged_attention does a layer need?",
        ),
        Mistake(
            "one thread copies the row",
            _loop(("for (int c = threadIdx.x; c < width; c += blockDim.x)", "if (threadIdx.x == 0) for (int c = 0; c < width; c++)")),
            "One thread of 128 copies the whole row, number by number. Threads side by side should take numbers side by side.",
            "How many of the block's threads do anything?",
        ),
        Mistake(
            "one cache for all layers",
            _loop(("keys, values, d = self.keys[layer], self.values[layer]", "keys, values, d = self.keys[0], self.values[0]")),
            "Each layer has keys and values of its own. In the step that follows, layer 0 reads what the last layer wrote.",
            "After a step, whose keys are in self.keys[0]?",
        ),
        Mistake(
            "values are keys",
            _loop(("self.gathered(keys, b), self.gathered(values, b)", "self.gathered(keys, b), self.gathered(keys, b)")),
            "The second array that attention reads are the values; yours are the keys once more.",
            "Which two caches has a layer?",
        ),
        Mistake(
            "told of those that got nothing",
            _loop(("return [self.output_of(request) for request in sampling]", "return [self.output_of(request) for request in batch.requests]")),
            "A request that read a piece of its prompt, or that was preempted and is computed again, is in the batch and has no new token. Who "
            "listens and takes the last token of each output would write the same word twice.",
            "A prompt in three pieces: in which of the three steps is there a token to tell of?",
        ),
        Mistake(
            "told of those that have ended only",
            _loop(
                (_UPDATE_LINES, "        ended = self.scheduler.update(batch, ids)\n        for request in ended:\n            del self.requests[request.request_id]\n"),
                ("for request in sampling]\n\n", "for request in ended]\n\n"),
            ),
            "Texts are read as they are written: each request that got a token is told of in that step, and not only in its last one.",
            "A request with 3 new tokens: in how many steps is there something to tell?",
        ),
        Mistake(
            "tokens for the whole batch",
            _loop(("sampling = [request for request, samples in zip(batch.requests, batch.samples) if samples]", "sampling = list(batch.requests)")),
            "Only requests with `samples` have a row of logits, and update wants a token for each of these. Who is in the middle of a prompt gets "
            "none: its next token is known, it is in the prompt.",
            "A prompt of 9 has read 4 tokens. Which token comes next, and who says so?",
        ),
        Mistake(
            "the draw numbered by the text",
            _loop(("steps = [request.num_output_tokens for", "steps = [request.num_tokens for")),
            "Draws are numbered from 0 in every completion: the number of tokens it has so far (lesson 17). Counted from the start of "
            "the prompt, the same seed draws something else.",
            "A completion without any tokens draws its first. What is the number of that draw?",
        ),
        Mistake(
            "draws counted from 1",
            _loop(("steps = [request.num_output_tokens for", "steps = [request.num_output_tokens + 1 for")),
            "A request's first draw has the number 0 (lesson 17): as many as it has drawn so far.",
            "A completion without any tokens draws its first. How many has it drawn so far?",
        ),
        Mistake(
            "the draw numbered by what is computed",
            _loop(("steps = [request.num_output_tokens for", "steps = [request.num_computed_tokens for")),
            "num_computed_tokens says what is in the cache, prompt included, and falls back to 0 when a request is preempted: the draw would depend "
            "on who else is there. The number of tokens drawn so far depends on the request alone.",
            "A request was preempted and comes back. Which number has its next draw, and which one does it get from you?",
        ),
        Mistake(
            "everyone greedy",
            _loop(("        if all(p.temperature == 0 for p in params):\n    ", "")),
            "argmax serves a step in which all are greedy. As soon as one draws by chance, sample serves all of them: it knows that a "
            "temperature of 0 means the most probable token.",
            "Two of three requests draw by chance. Which function gets their logits?",
            variants=(_loop(("if all(p.temperature == 0", "if any(p.temperature == 0")),),
        ),
        Mistake(
            "the finished stay",
            _loop((_UPDATE_LINES, "        self.scheduler.update(batch, ids)\n")),
            "update gives back the requests that have ended. As long as they are in self.requests, has_work says yes, and whoever steps "
            "while there is work never stops.",
            "All requests have ended. What is in self.requests?",
        ),
        Mistake(
            "blocks lost on abort",
            _loop(("        self.scheduler.abort(id)\n", "")),
            "Your engine forgets the request, and the scheduler does not: it goes on computing it, or keeps its blocks, for nobody. Abort must "
            "reach whoever holds the blocks.",
            "Who gives back the blocks of a request that is aborted?",
        ),
        Mistake(
            "the aborted is remembered",
            _loop(("        self.requests.pop(id, None)\n", "")),
            "The scheduler has let it go, and self.requests still has it: has_work never becomes false.",
            "After abort, does the engine still have work?",
        ),
        Mistake(
            "an empty step is run",
            _loop(("        if not batch:\n            return []\n", "")),
            "A batch can be empty: the last request has been aborted, and whoever serves asks for a step all the same. Nothing is computed then, "
            "and nothing told; an empty batch is false, so `if not batch` finds it.",
            "How many tokens does an empty batch have, and where does the last one end?",
        ),
    ),
)  # fmt: skip


# ---------------- 23.2: preemption


def _preempt_cases(rng: np.random.Generator) -> list[Case]:
    def case(
        label: str, blocks: int, size: int, arrivals: str | list[str], group: str, *, seats: int = 8, budget: int = 64,
        aborts: str = "",
    ) -> Case:  # fmt: skip
        """`arrivals`: ``name@step prompt+new``."""
        asked = arrivals.split(", ") if isinstance(arrivals, str) else arrivals
        inputs = {
            "num_blocks": blocks, "block_size": size, "max_seqs": seats, "max_tokens": budget, "arrivals": asked, "aborts": aborts,
        }  # fmt: skip
        return Case(label, inputs, group)

    def many(count: int, prompts: tuple[int, int], new: tuple[int, int], last: int) -> list[str]:
        steps = sorted(int(s) for s in rng.integers(1, last, count))
        return [
            f"r{k}@{s} {int(rng.integers(*prompts))}+{int(rng.integers(*new))}" for k, s in enumerate(steps)
        ]

    return [
        case("3 blocks of 2, a has 2+4, b has 2+3", 3, 2, "a@1 2+4, b@1 2+3", "small"),
        case("3 blocks of 2, one request that just fits", 3, 2, "a@1 2+4", "small"),
        case("4 blocks of 2, three requests of 2+4", 4, 2, "a@1 2+4, b@1 2+4, c@1 2+4", "small"),
        case("3 blocks of 2, a prompt of 4, then 5+2 and 7+1, which can never fit", 3, 2, "a@1 4+2, b@1 5+2, d@1 7+1, c@2 1+1", "refused"),
        case("3 blocks of 2, a prompt of 6 tokens with no limit", 3, 2, "a@1 6+*, b@1 2+*", "refused"),
        case("5 blocks of 4, waiting and running ones are aborted", 5, 4, "a@1 5+9, b@1 4+9, c@1 9+2, d@2 3+3", "abort", aborts="c@2, a@4, nobody@5"),
        case("6 blocks of 2, aborted after it was preempted", 6, 2, "a@1 4+8, b@1 4+6, c@1 2+2", "abort", aborts="b@6"),
        case("8 blocks of 2, steps of 3 tokens, a prompt of 5 before one of 2", 8, 2, "a@1 5+2, b@1 2+1", "awkward", budget=3),
        case("9 blocks of 3, steps of 5 tokens", 9, 3, many(6, (1, 12), (1, 9), 6), "awkward", budget=5),
        case("2 seats, 7 blocks of 4", 7, 4, many(6, (1, 10), (2, 14), 8), "awkward", seats=2),
        case("blocks of 1", 12, 1, many(5, (1, 5), (2, 7), 4), "awkward", budget=6),
        case("40 requests in 24 blocks of 4", 24, 4, many(40, (1, 30), (1, 24), 12), "many", seats=16, budget=48),
    ]  # fmt: skip


def _run_preempt(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    """Play arrivals and aborts; the token after a text is one that depends on it alone."""
    from tinyvllm_ref.block_manager import BlockManager
    from tinyvllm_ref.request import Request
    from tinyvllm_ref.sampling_params import SamplingParams

    blocks = BlockManager(inputs["num_blocks"], inputs["block_size"])
    scheduler = answer(inputs["max_seqs"], inputs["max_tokens"], blocks)
    arrivals, aborts = (
        list(inputs["arrivals"]),
        [one.strip().split("@") for one in inputs["aborts"].split(",") if one],
    )
    requests: dict[str, Any] = {}
    refused, trace = [], []
    for step in range(1, 600):
        while arrivals and int(arrivals[0].split()[0].split("@")[1]) <= step:
            who, asked = arrivals.pop(0).split()
            name, (prompt, new) = who.split("@")[0], asked.split("+")
            params = SamplingParams(max_tokens=None if new == "*" else int(new))
            request = Request(name, [ord(name[-1]) + k for k in range(int(prompt))], params)
            if new == "*":
                request.max_num_tokens = 1000  # the engine knows how long a text may become
            try:
                scheduler.add(request)
                requests[name] = request
            except ValueError:
                refused.append(name)
        unfinished = [request for request in requests.values() if not request.finished]
        if not unfinished and not arrivals:
            break
        batch = scheduler.schedule()
        rows, trouble = [], ""
        for k, request in enumerate(batch.requests):
            start, count = int(batch.starts[k]), int(batch.num_tokens[k])
            rows.append(f"{request.request_id} {start}+{count}")
            try:
                held = len(blocks.table(request.request_id)) * inputs["block_size"]
            except KeyError:
                held = 0
            if held < start + count and not trouble:
                trouble = f"; {request.request_id} computes {start + count} tokens and has blocks for {held}"
            if (start, start + count == request.num_tokens) != (
                request.num_computed_tokens,
                bool(batch.samples[k]),
            ):
                trouble = trouble or f"; {request.request_id} has computed {request.num_computed_tokens}"
        decodes = sum(
            count == 1 and bool(samples) and start >= request.num_prompt_tokens
            for request, start, count, samples in zip(
                batch.requests, batch.starts, batch.num_tokens, batch.samples, strict=True
            )
        )
        if int(batch.num_decodes) != decodes:
            trouble = trouble or f"; num_decodes is {batch.num_decodes}"
        gone = f"; preempted {', '.join(map(str, batch.preempted))}" if batch.preempted else ""
        ids = [
            (7 * sum(r.token_ids) + len(r.token_ids)) % 1000
            for r, s in zip(batch.requests, batch.samples, strict=True)
            if s
        ]
        if not trouble:
            done = scheduler.update(batch, ids)
            gone += f"; finished {', '.join(sorted(r.request_id for r in done))}" if done else ""
        for name, at in aborts:
            if int(at) == step:
                scheduler.abort(name)
                gone += f"; aborted {name}"
        trace.append(f"{', '.join(rows) or 'nothing'}{gone}{trouble}; {blocks.num_free} free")
        if trouble or not (batch.requests or batch.preempted or aborts):
            break
    return {
        "refused": refused,
        "steps": trace,
        "texts": {name: list(request.output_token_ids) for name, request in requests.items()},
        "reasons": {name: request.finish_reason for name, request in requests.items()},
        "free blocks at the end": blocks.num_free,
    }  # fmt: skip


def _expect_preempt(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """By the reference's scheduler."""
    from tinyvllm_ref.scheduler import Scheduler

    return _run_preempt(Scheduler, inputs, None)


_PREEMPT_TEXT = """from collections import deque
from dataclasses import dataclass, field


@dataclass
class ScheduledBatch:
    requests: list = field(default_factory=list)
    starts: list = field(default_factory=list)
    num_tokens: list = field(default_factory=list)
    samples: list = field(default_factory=list)
    block_tables: list = field(default_factory=list)
    num_decodes: int = 0
    preempted: list = field(default_factory=list)

    def __bool__(self):
        return bool(self.requests)

    def take(self, request, count, table):
        start = request.num_computed_tokens
        self.requests.append(request)
        self.starts.append(start)
        self.num_tokens.append(count)
        self.samples.append(start + count == request.num_tokens)
        self.block_tables.append(table)
        self.num_decodes += count == 1 and self.samples[-1] and start >= request.num_prompt_tokens


class Scheduler:
    def __init__(self, max_seqs, max_tokens, blocks):
        self.max_seqs, self.max_tokens, self.blocks = max_seqs, max_tokens, blocks
        self.waiting, self.running = deque(), []

    def add(self, request):
        most = self.blocks.num_blocks * self.blocks.block_size
        if request.params.max_tokens is None:
            request.max_num_tokens = min(request.max_num_tokens, most)
        if max(request.max_num_tokens, request.num_prompt_tokens + 1) > most:
            raise ValueError(f"request {request.request_id!r} can have {request.max_num_tokens} tokens; {most} fit")
        self.waiting.append(request)

    def schedule(self):
        batch, budget, index = ScheduledBatch(), self.max_tokens, 0
        while index < len(self.running):
            request = self.running[index]
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            if count == 0:
                break
            while not self.blocks.allocate(request.request_id, request.num_computed_tokens + count):
                victim = self.running.pop()
                self.preempt(victim)
                batch.preempted.append(victim.request_id)
                if victim is request:
                    break
            else:
                batch.take(request, count, self.blocks.table(request.request_id))
                budget -= count
                index += 1
        while self.waiting and len(self.running) < self.max_seqs and budget > 0:
            request = self.waiting[0]
            if not self.blocks.allocate(request.request_id, request.num_tokens):
                break
            self.running.append(self.waiting.popleft())
            request.state = "running"
            count = min(request.num_tokens, budget)
            batch.take(request, count, self.blocks.table(request.request_id))
            budget -= count
        return batch

    def preempt(self, request):
        request.state = "waiting"
        request.num_preemptions += 1
        self.blocks.free(request.request_id)
        request.num_computed_tokens = 0
        self.waiting.appendleft(request)

    def update(self, batch, ids):
        tokens, finished = iter(ids), []
        for request, count, samples in zip(batch.requests, batch.num_tokens, batch.samples):
            token = next(tokens) if samples else None
            if request.state != "running":
                continue
            request.num_computed_tokens += count
            if not samples:
                continue
            request.append(int(token))
            if token in request.stop_tokens or request.num_tokens == request.max_num_tokens:
                request.finish_reason = "stop" if token in request.stop_tokens else "length"
                request.state = "finished"
                self.running.remove(request)
                self.blocks.free(request.request_id)
                finished.append(request)
        return finished

    def abort(self, id):
        for queue in (self.waiting, self.running):
            for request in [one for one in queue if one.request_id == id]:
                queue.remove(request)
                if request.state == "running":
                    self.blocks.free(id)
                request.state, request.finish_reason = "finished", "abort"
"""


def _preempt(*changes: tuple[str, str]) -> str:
    """The whole answer for 23.2, with some things exchanged."""
    return _changed(_PREEMPT_TEXT, *changes)


_VICTIM = "                victim = self.running.pop()\n"
_NOTED = "                batch.preempted.append(victim.request_id)\n"

_PREEMPT = Exercise(
    id="23.2",
    title="when blocks run out",
    answer="Scheduler",
    kind="class",
    cases=_preempt_cases,
    run=_run_preempt,
    expected=_expect_preempt,
    points={"small": 2, "refused": 1, "abort": 1, "awkward": 1, "many": 1},
    makes={"Scheduler": "Scheduler"},
    file="scheduler.py",
    hints=Hints(
        question="Take {case}. In the step that differs: who asks for a block that is not there, who came last of those that run, and what "
        "does that one lose?",
        rule="Go through the running requests from the oldest to the newest. Each gets what it misses, within the budget, and needs blocks for "
        "num_computed_tokens + count. As long as allocate says no, the last of self.running is preempted; if that is the request "
        "itself, there is nothing more to do for running ones. Preempted: blocks given back, num_computed_tokens 0, tokens kept, at the front of "
        "waiting.\n\nThen those that wait, in order, while seats, budget and blocks last: blocks for *all* tokens of a request at once, or it and all "
        "behind it stay.\n\nBy hand, 3 blocks of 2, a and b of 2+4 and 2+3. Step 1: a 0+2, b 0+2, a block each. Step 2: a needs a second block and "
        "gets the last one; b needs one too, and is itself the newest: it is preempted. It has 3 tokens then, which take 2 blocks, and comes "
        "back when a has ended: b 0+3.",
        code="""while index < len(self.running):
    request = self.running[index]
    count = min(____, budget)
    if count == 0:
        break
    while not self.blocks.allocate(request.request_id, ____):
        victim = ____
        self.preempt(victim)
        batch.preempted.append(victim.request_id)
        if victim is request:
            break
    else:  # allocate said yes
        batch.take(request, count, self.blocks.table(request.request_id))
        budget -= ____
        index += 1
while self.waiting and len(self.running) < self.max_seqs and ____:
    request = self.waiting[0]
    if not self.blocks.allocate(request.request_id, ____):
        break
    ...""",
    ),
    mistakes=(
        Mistake(
            "victim already scheduled this step",
            _preempt((_VICTIM, "                victim = self.running.pop(0)\n")),
            "The oldest is the first of self.running, and it has its row in this step's batch already. With its blocks gone, the model would write "
            "its keys into blocks of somebody else. The newest has nothing in the step yet, and least to lose.",
            "When a running request finds no block: which of the others are in the batch already?",
            variants=(
                _preempt((_VICTIM, "                victim = min(self.running, key=lambda one: one.num_tokens)\n                self.running.remove(victim)\n")),
            ),
        ),
        Mistake(
            "the victim gets a row all the same",
            _preempt(
                ("        while index < len(self.running):\n            request = self.running[index]\n", "        for request in list(self.running):\n"),
                ("                index += 1\n", ""),
            ),
            "You walk over a copy of the list, made before anybody was preempted, and so come to the victim as well and give it blocks and a row while it "
            "waits. Look at self.running itself, which gets shorter.",
            "b has just been preempted. What does your loop do when it comes to b?",
        ),
        Mistake(
            "whoever needs the block must go",
            _preempt((_VICTIM, "                victim = request\n                self.running.remove(request)\n")),
            "The one that asks is preempted, be it the oldest of all. Then old requests make room for new ones, and nobody is sure ever to end. Take from "
            "the newest; the oldest always gets on, and each becomes the oldest.",
            "Of those that run, who has most to lose?",
            variants=(
                _preempt(
                    (_VICTIM, "                victim = self.running.pop(index)\n"),
                    ("                budget -= count\n                index += 1\n", "                budget -= count\n            index += 1\n"),
                ),
            ),
        ),
        Mistake(
            "nobody is told who was preempted",
            _preempt((_NOTED, "")),
            "What happened is right; but batch.preempted is empty, and whoever looks at the batch does not see that somebody was sent away. Its id belongs there.",
            "In the step that differs, what does batch.preempted say?",
            variants=(_preempt((_NOTED, "                batch.preempted.append(victim)\n")),),
        ),
        Mistake(
            "blocks for the longest text",
            _preempt(("if not self.blocks.allocate(request.request_id, request.num_tokens):", "if not self.blocks.allocate(request.request_id, request.max_num_tokens):")),
            "So did lesson 19: who comes in has blocks for all that it may ever write. Then nobody is preempted, fewer get in, and most of what they hold is empty. "
            "Take blocks for the tokens that it has; more come one by one.",
            "a has 2 tokens and may have 6 in the end. How many blocks of 2 does it need in its first step?",
        ),
        Mistake(
            "still said to wait",
            _preempt(("            request.state = \"running\"\n", "")),
            "It is in self.running, and its state still says \"waiting\": update takes it for one that was aborted, and drops its tokens.",
            "Who is told by request.state that a request runs now?",
        ),
        Mistake(
            "let in without a token",
            _preempt(("len(self.running) < self.max_seqs and budget > 0:", "len(self.running) < self.max_seqs:")),
            "The step's tokens are used up, and somebody comes in all the same: a row of 0 tokens, and blocks that others could have had.",
            "How many tokens does the last row of the step compute?",
        ),
        Mistake(
            "to the back of the queue",
            _preempt(("self.waiting.appendleft(request)", "self.waiting.append(request)")),
            "The victim came before all that wait, and has been working. At the back of the queue it lets everyone pass who came later. It goes to the front.",
            "c has never run. Should it be served before b, which was preempted?",
        ),
        Mistake(
            "computed count kept",
            _preempt(("        request.num_computed_tokens = 0\n", "")),
            "num_computed_tokens says how many keys are in the cache. With the blocks they are gone: it must be 0, and everything, the tokens that were generated "
            "included, will be computed again.",
            "b's blocks are somebody else's now. How many of its keys are in the cache?",
        ),
        Mistake(
            "its tokens thrown away",
            _preempt(("        request.num_computed_tokens = 0\n", "        request.num_computed_tokens = 0\n        del request.token_ids[request.num_prompt_tokens :]\n        request.num_tokens = request.num_prompt_tokens\n")),
            "Tokens that were generated have been shown to somebody. They stay, and are computed like a prompt: one step, instead of one step a token, "
            "and no word comes twice.",
            "b has written one token when it is preempted. How many tokens does it compute when it comes back?",
            variants=(
                _preempt(("        request.num_computed_tokens = 0\n", "        request.num_computed_tokens = 0\n        del request.token_ids[request.num_prompt_tokens :]\n")),
            ),
        ),
        Mistake(
            "the victim keeps its blocks",
            _preempt(("        self.blocks.free(request.request_id)\n        request.num_computed_tokens = 0\n", "        request.num_computed_tokens = 0\n")),
            "Preemption is done for its blocks. They must be given back; otherwise one request after the other is sent away, and no block becomes free.",
            "How many blocks are free after a preemption, and how many before?",
        ),
        Mistake(
            "what can never fit is let in",
            _preempt(("        if max(request.max_num_tokens, request.num_prompt_tokens + 1) > most:\n            raise ValueError(f\"request {request.request_id!r} can have {request.max_num_tokens} tokens; {most} fit\")\n", "")),
            "A request that needs more blocks than the whole pool has waits for ever, and everyone behind it too; or it runs until it is alone, and then "
            "preempts itself again and again. It has to be refused when it comes, with a ValueError.",
            "How many tokens do all blocks hold together, and how many can the request have at the end?",
        ),
        Mistake(
            "refused for its prompt alone",
            _preempt(("max(request.max_num_tokens, request.num_prompt_tokens + 1) > most", "request.num_prompt_tokens > most")),
            "The prompt fits, and its completion does not: somewhere on the way the request would be alone, with all blocks, and need one more. Prompt and "
            "completion together must fit.",
            "5 tokens of prompt and 2 new ones, in 3 blocks of 2?",
        ),
        Mistake(
            "refused at the edge",
            _preempt((") > most:", ") >= most:")),
            "A request that needs all blocks, to the last slot, fits.",
            "2 + 4 tokens in 3 blocks of 2: how many slots are left over?",
        ),
        Mistake(
            "blocks lost on abort",
            _preempt(("                if request.state == \"running\":\n                    self.blocks.free(id)\n", "")),
            "The request is gone, and its blocks still have its name: nobody will ever give them back. After some aborts no block is left.",
            "Whose are the blocks of a request that is in neither list?",
        ),
        Mistake(
            "freed though it has none",
            _preempt(("                if request.state == \"running\":\n                    self.blocks.free(id)\n", "                self.blocks.free(id)\n")),
            "A request that waits has no blocks: it has not got any yet, or it was preempted. free() of such a one raises, as it should.",
            "Which blocks has a request that waits?",
        ),
        Mistake(
            "gone, and not finished",
            _preempt(("                request.state, request.finish_reason = \"finished\", \"abort\"\n", "")),
            "It is in neither list any more, and its state does not say so: whoever holds the request waits for its end. And an update of a step that is "
            "being computed would still take it for a running one.",
            "What does request.state say after the abort?",
        ),
        Mistake(
            "an id that is not there",
            _preempt(("        for queue in (self.waiting, self.running):\n", "        if id not in [one.request_id for one in (*self.waiting, *self.running)]:\n            raise KeyError(id)\n        for queue in (self.waiting, self.running):\n")),
            "A client goes away while the last token of its text is computed: by the time its abort comes, the request has ended. Nothing is wrong with that, and "
            "nothing is to be done.",
            "A request has just ended, and now its abort comes. Whose mistake is it?",
            variants=(_preempt(("        for queue in (self.waiting, self.running):\n", "        if id not in [one.request_id for one in (*self.waiting, *self.running)]:\n            raise ValueError(id)\n        for queue in (self.waiting, self.running):\n")),),
        ),
        Mistake(
            "abort of a waiting request lost",
            _preempt(("for queue in (self.waiting, self.running):", "for queue in (self.running,):")),
            "A client may go away while its request is still in the queue. Otherwise the request is let in later, and written for nobody.",
            "Where can a request be when it is aborted?",
        ),
        Mistake(
            "blocks for a piece only",
            _preempt(("if not self.blocks.allocate(request.request_id, request.num_tokens):", "if not self.blocks.allocate(request.request_id, min(request.num_tokens, budget)):")),
            "A long prompt would be let in with blocks for its first piece, and run out of them in the middle of its own prompt: what it has computed by then is "
            "computed for nothing. Let it in when there are blocks for all the tokens that it has.",
            "A prompt of 12 tokens in pieces of 5, and two free blocks of 3. Should it begin?",
        ),
        Mistake(
            "whoever fits overtakes",
            _preempt(
                ("        while self.waiting and len(self.running) < self.max_seqs and budget > 0:\n            request = self.waiting[0]\n", "        for request in list(self.waiting):\n            if len(self.running) == self.max_seqs or budget == 0:\n                break\n"),
                ("request.num_tokens):\n                break\n            self.running.append(self.waiting.popleft())", "request.num_tokens):\n                continue\n            self.waiting.remove(request)\n            self.running.append(request)"),
            ),
            "The first of the queue finds no room, and a smaller one behind it gets in. As long as small ones keep coming, the large one waits for ever. Stop "
            "at the first that does not fit.",
            "a waits for three blocks, and two are free. What if someone who needs only one gets it?",
        ),
        Mistake(
            "a block taken one token late",
            _preempt(("request.num_computed_tokens + count):", "request.num_computed_tokens):")),
            "The step computes `count` tokens more, and their keys need a place in this step. Blocks for what is in the cache already are not enough.",
            "b has 2 tokens in the cache and computes the third. For how many tokens must it have blocks?",
        ),
    ),
)  # fmt: skip


# ---------------- 23.3: text as it comes


def _text_cases(rng: np.random.Generator) -> list[Case]:
    def case(
        label: str, pieces: list[list[str]], group: str, *, stop: list[str] | None = None, told: list[list[int]] | None = None,
        ends: str = "", abort_late: bool = False,
    ) -> Case:  # fmt: skip
        """`pieces`: of each prompt, the bytes of its tokens, as Latin-1; `told`: by step, how many tokens each has in what the engine tells,
        -1 for a prompt it does not tell of."""
        longest = max(map(len, pieces))
        plan = told or [
            [min(k + 1, len(one)) if k < len(one) else -1 for one in pieces] for k in range(longest)
        ]
        inputs = {"pieces": pieces, "stop": stop or [], "told": plan, "ends": ends}
        return Case(label, inputs, group)

    def cut(text: str) -> list[str]:
        """The UTF-8 bytes of a text as pieces of 1 to 4 bytes."""
        raw, found = text.encode().decode("latin-1"), []
        while raw:
            size = int(rng.integers(1, 5))
            found.append(raw[:size])
            raw = raw[size:]
        return found

    stories = [
        "Ein Bär aß süße Äpfel.",
        "naïve café, 雪 and 🐈 at last",
        "no END, no E, but EN and then END. Never shown",
    ]
    fuzz = [cut(stories[int(k)]) for k in rng.permutation(3)]
    forty = _forty(rng)
    return [
        case("one prompt, 3 tokens", [[" a", " red", " cat"]], "small"),
        case("2 prompts, the first ends earlier", [[" a"], [" big", " dog", "."]], "small"),
        case("told twice of the same token: it was preempted", [[" a", " red", " cat"]], "small", told=[[1], [2], [2], [3]]),
        case("in pieces: no token, then one, then two at once", [[" a", " red", " cat"], ["x", "y"]], "small", told=[[0, 1], [1, 1], [3, -1], [-1, 2]]),
        case("stop string END in one token", [["one", " END", " two"]], "stop", stop=["END"]),
        case("stop string END over three tokens", [["one E", "N", "D two", " three"]], "stop", stop=["END"]),
        case("what might be END and is not", [["one E", "N", "ds here", " E"]], "stop", stop=["END"]),
        case("two stop strings, the later one listed first", [["a b", "c d", " e"]], "stop", stop=["d", "c"]),
        case("the stop string twice in one token", [["a END b END c", " d"]], "stop", stop=["END"]),
        case("oo is held, and not the last o alone", [["t", "oo", "ps", " and", " oo"]], "stop", stop=["oops"]),
        case("ends in the middle of what might be a stop string", [["on", "e E", "N"], ["E", "N", "D", "x"]], "stop", stop=["END"]),
        case("a character in two tokens", [["caf", "\u00c3", "\u00a9", " ok"], ["\u00f0\u009f", "\u0090", "\u0088"]], "awkward"),
        case("a character that never gets its last byte", [["caf", "\u00c3"]], "awkward"),
        case("an end token, whose text is none", [["one", " two", "<end>"], ["<end>"]], "awkward", ends="<end>"),
        case("three stories in pieces of 1 to 4 bytes", fuzz, "awkward", stop=["END", "🐈 at"]),
        Case("40 ragged prompts in 24 blocks of 4, by your engine", forty, "forty prompts"),
    ]  # fmt: skip


def _forty(rng: np.random.Generator) -> dict[str, Any]:
    """Forty prompts of ragged lengths for a small model, with what an engine has for them."""
    model = _model(rng)
    requests = []
    for number in range(40):
        most = int(rng.integers(4, 9))
        while True:
            request = {
                "prompt": rng.integers(0, _VOCAB - 1, int(rng.integers(1, 30))).tolist(), "max_tokens": most,
                "temperature": 0.8 if number % 4 == 3 else 0.0, "seed": 100 + number,
            }  # fmt: skip
            if _completion(model, request, (_VOCAB - 1,)) is not None:
                break
        requests.append(request)
    return {
        "requests": requests,
        "num_blocks": 24,
        "block_size": 4,
        "max_seqs": 16,
        "max_tokens": 64,
        **model,
    }


def _run_text(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    """With a scripted engine; or, where there is a model, with the learner's own."""
    import codecs
    from contextlib import nullcontext
    from types import SimpleNamespace

    import numpy as np

    from tinyvllm_ref.course.given.inputs import Weights
    from tinyvllm_ref.sampling_params import SamplingParams

    names = answer.__globals__
    shown: dict[int, str] = {}
    now: dict[int, str] = {}

    def show(number: int, piece: str) -> None:
        if not isinstance(piece, str) or not piece:
            raise TypeError(f"on_text got {piece!r}; it must get a piece of text that is not empty")
        shown[int(number)] = shown.get(int(number), "") + piece
        now[int(number)] = now.get(int(number), "") + piece

    class Pieces:
        """A tokenizer: token k is the k-th of some pieces of bytes."""

        def __init__(self, pieces: list[bytes], alphabet: str) -> None:
            self.pieces, self.alphabet = pieces, alphabet

        def encode(self, text: str) -> list[int]:
            return [self.alphabet.index(character) for character in text]

        def decode(self, ids: Any) -> str:
            return b"".join(self.pieces[id] for id in ids).decode(errors="replace")

        def stream(self) -> Any:
            utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
            return SimpleNamespace(
                push=lambda id: utf8.decode(self.pieces[id]), end=lambda: utf8.decode(b"", final=True)
            )

    def outputs_of(found: Any) -> dict[str, Any]:
        found = [(str(text), reason) for text, reason in found]
        return {
            "texts": [text for text, _ in found],
            "reasons": [reason for _, reason in found],
            "shown, all in all": [shown.get(number, "") for number in range(len(found))],
        }

    if "requests" not in inputs:
        flat = [piece for pieces in inputs["pieces"] for piece in pieces]
        tokenizer = Pieces([piece.encode("latin-1") for piece in flat], "abc")
        own, first = [], 0
        for pieces in inputs["pieces"]:
            own.append(list(range(first, first + len(pieces))))
            first += len(pieces)

        class Scripted:
            """Tells what the case says, of the requests that were not aborted."""

            model = SimpleNamespace(config=SimpleNamespace(eos_token_ids=()))

            def __init__(self) -> None:
                self.added: list[Any] = []
                self.gone: set[int] = set()
                self.aborted: list[str] = []
                self.told = list(inputs["told"])
                self.steps: list[str] = []

            @property
            def has_work(self) -> bool:
                self.note()
                return bool(self.told) and len(self.gone) < len(own)

            def note(self) -> None:
                if self.steps and self.steps[-1] is None:
                    self.steps[-1] = (
                        "; ".join(f"{number} {text!r}" for number, text in sorted(now.items())) or "nothing"
                    )
                now.clear()

            def add_request(self, request: Any) -> None:
                self.added.append(request)

            def abort(self, id: Any) -> None:
                """As an engine does: an id that is nobody's is no error, and ends nothing."""
                ids = [request.request_id for request in self.added]
                self.aborted.append(str(id) if id in ids else f"{id!r}, which is nobody's id")
                if id in ids:
                    self.gone.add(ids.index(id))

            def step(self) -> list[Any]:
                self.note()
                outputs = []
                self.steps.append(None)  # type: ignore[arg-type]
                for number, count in enumerate(self.told.pop(0)):
                    if count < 0 or number in self.gone:
                        continue
                    done = count == len(own[number])
                    ended = done and inputs["ends"] and inputs["pieces"][number][-1] == inputs["ends"]
                    reason = ("stop" if ended else "length") if done else None
                    if done:
                        self.gone.add(number)
                    ids = own[number][:count]
                    completion = SimpleNamespace(index=0, text="", token_ids=ids, finish_reason=reason)
                    request_id = self.added[number].request_id
                    outputs.append(
                        SimpleNamespace(request_id=request_id, finished=done, outputs=[completion])
                    )
                return outputs[::-1]

        scripted = Scripted()
        prompts = ["abc"[: number % 3 + 1] for number in range(len(own))]
        params = [SamplingParams(max_tokens=len(one), stop=inputs["stop"]) for one in own]
        found = answer(scripted, tokenizer, prompts, params, show)
        scripted.note()
        return {
            **outputs_of(found), "shown in each step": scripted.steps, "aborted": sorted(scripted.aborted),
            "prompts added": [list(request.prompt_token_ids) for request in scripted.added],
        }  # fmt: skip

    alphabet = "abcdefghijklmnopqrstuvwxyz .|"
    sizes = dict(inputs["sizes"])
    sizes |= {
        "q_size": sizes["num_attention_heads"] * sizes["head_dim"],
        "kv_size": sizes["num_key_value_heads"] * sizes["head_dim"],
        "eos_token_ids": (len(alphabet) - 1,),
    }

    arrays = {name: lab.input(name, values) for name, values in inputs["weights"].items()}
    weights = Weights(SimpleNamespace(**sizes), arrays, lab.input("inv_freq", inputs["inv_freq"]))
    array_parts = ("pack", "kv_write", "attention_tiled", "paged_attention", "forward", "argmax", "sample")
    parts = SimpleNamespace(**{name: names[name] for name in (*array_parts, "BlockManager", "Scheduler")})
    config = SimpleNamespace(
        num_blocks=inputs["num_blocks"], block_size=inputs["block_size"], max_num_seqs=inputs["max_seqs"],
        max_num_batched_tokens=inputs["max_tokens"], max_model_len=None, memory_fraction=0.9, seed=0,
    )  # fmt: skip
    with lab.cp.checks("fast") if getattr(lab.cp, "is_emulation", False) else nullcontext():
        engine = names["Engine"](SimpleNamespace(config=weights.config, weights=weights), parts, config)
        pieces = [np.array([ord(character)], np.uint8).tobytes() for character in alphabet]
        params = [
            SamplingParams(max_tokens=one["max_tokens"], temperature=one["temperature"], seed=one["seed"])
            for one in inputs["requests"]
        ]
        prompts = ["".join(alphabet[id] for id in one["prompt"]) for one in inputs["requests"]]
        found = answer(engine, Pieces(pieces, alphabet), prompts, params, show)
    engine.blocks.check()
    return {**outputs_of(found), "free blocks at the end": engine.blocks.num_free}


def _expect_text(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Texts from the whole of each completion at once; what can be shown after a step, from all that is known by then."""
    if "requests" in inputs:
        end = _VOCAB - 1
        tokens = [_completion(inputs, one, (end,)) or [] for one in inputs["requests"]]
        texts = ["".join(_ALPHABET[id] for id in ids if id != end) for ids in tokens]
        return {
            "texts": texts,
            "reasons": ["stop" if ids[-1] == end else "length" for ids in tokens],
            "shown, all in all": texts,
            "free blocks at the end": inputs["num_blocks"],
        }
    stops, count = inputs["stop"], len(inputs["pieces"])

    def certain(raw: bytes, whole: bool) -> tuple[str, bool]:
        """What of a completion's bytes can be shown, and whether a stop string ended it."""
        text = raw.decode("utf-8", errors="replace")
        if not whole:  # bytes at the end that may become a character
            text = raw.decode("utf-8", errors="ignore")
        ends = [text.index(stop) for stop in stops if stop in text]
        if ends:
            return text[: min(ends)], True
        if whole:
            return text, False
        beginnings = [stop[:n] for stop in stops for n in range(1, len(stop))]
        return text[: len(text) - max([len(b) for b in beginnings if text.endswith(b)], default=0)], False

    texts, reasons, aborted, steps = [""] * count, [""] * count, list[str](), list[str]()
    over: set[int] = set()
    for told in inputs["told"]:
        shown = {}
        if len(over) == count:
            break
        for number, length in enumerate(told):
            if length < 0 or number in over:
                continue
            pieces = inputs["pieces"][number]
            done = length == len(pieces)
            ended = bool(done and inputs["ends"] and pieces[-1] == inputs["ends"])
            raw = "".join(pieces[: length - ended]).encode("latin-1")
            text, stopped = certain(raw, done)
            if done or stopped:
                over.add(number)
                reasons[number] = "stop" if stopped or ended else "length"
                aborted += [str(number)] * (stopped and not done)
            if text != texts[number]:
                shown[number] = text[len(texts[number]) :]
            texts[number] = text
        steps.append("; ".join(f"{number} {text!r}" for number, text in shown.items()) or "nothing")
    return {
        "texts": texts,
        "reasons": reasons,
        "shown, all in all": texts,
        "shown in each step": steps,
        "aborted": sorted(aborted),
        "prompts added": [list(range(number % 3 + 1)) for number in range(count)],
    }


_TEXT_TEXT = """from tinyvllm_ref.course.given.request import Request


class Stops:
    def __init__(self, stops):
        self.stops, self.held, self.found = stops, "", None

    def push(self, piece):
        text = self.held + piece
        hits = [(text.index(stop), stop) for stop in self.stops if stop in text]
        if hits:
            end, self.found = min(hits)
            self.held = ""
            return text[:end]
        held = max((n for stop in self.stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        self.held = text[len(text) - held :]
        return text[: len(text) - held]


def generate(engine, tokenizer, prompts, params, on_text):
    texts, reasons, read = [""] * len(prompts), [None] * len(prompts), [0] * len(prompts)
    streams = [tokenizer.stream() for _ in prompts]
    stops = [Stops(one.stop_strings) for one in params]
    for number, prompt in enumerate(prompts):
        ids = tokenizer.encode(prompt)
        engine.add_request(Request(str(number), ids, params[number], engine.model.config.eos_token_ids))

    def give(number, piece):
        if piece:
            texts[number] += piece
            on_text(number, piece)

    while engine.has_work:
        for output in engine.step():
            number, completion = int(output.request_id), output.outputs[0]
            new = completion.token_ids[read[number] :]
            read[number] += len(new)
            if completion.finish_reason == "stop":
                new = new[:-1]
            for id in new:
                if stops[number].found is None:
                    give(number, stops[number].push(streams[number].push(id)))
            if output.finished and stops[number].found is None:
                give(number, stops[number].push(streams[number].end()))
                give(number, stops[number].held)
            reasons[number] = completion.finish_reason
            if stops[number].found is not None:
                reasons[number] = "stop"
                if not output.finished:
                    engine.abort(output.request_id)
    return list(zip(texts, reasons))
"""


def _text(*changes: tuple[str, str]) -> str:
    """The whole answer for 23.3, with some things exchanged."""
    return _changed(_TEXT_TEXT, *changes)


_NEW = "            new = completion.token_ids[read[number] :]\n            read[number] += len(new)\n"
_HOLD = (
    "held = max((n for stop in self.stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)"
)
_ENDING = """                give(number, stops[number].push(streams[number].end()))
                give(number, stops[number].held)
"""

_TEXT = Exercise(
    id="23.3",
    title="text as it comes",
    answer="generate",
    kind="function",
    arguments=("engine", "tokenizer", "prompts", "params", "on_text"),
    uses=(
        "BlockManager", "pack", "kv_write", "attention_tiled", "paged_attention", "forward", "argmax", "sample",
    ),
    builds_on=("23.1", "23.2"),
    cases=_text_cases,
    run=_run_text,
    expected=_expect_text,
    points={"small": 1, "stop": 2, "awkward": 1, "forty prompts": 3},
    seconds=15.0,
    hints=Hints(
        question="Take {case}. Go through it step by step: which tokens are new, which text do they make, and which of its characters might still "
        "turn out to belong to a stop string?",
        rule="New are the tokens behind those you have read: token_ids[read:], be they none, one or two. Each goes through the stream of its request, and what comes out "
        "through Stops. If the engine says that the request has ended with \"stop\", its last token is an end token and no text.\n\n"
        "Stops: put what was held in front of the piece. If a stop string is in it, what stands before the first is the last text there is. Else hold "
        "back the longest end of the text that some stop string begins with, and give out the rest. By hand, END: \"one E\" gives \"one \" and holds "
        "\"E\"; then \"N\" gives nothing and holds \"EN\"; then \"ds\" gives \"ENds\".\n\n"
        "At the end, without a stop string: what the stream still has, and what is held. After a stop string: abort, unless the request has ended.",
        code="""text = self.held + ____
hits = [(text.index(stop), stop) for stop in self.stops if ____]
if hits:
    end, self.found = min(hits)
    self.held = ""
    return text[:____]
held = max((n for stop in self.stops for n in range(len(stop)) if text.endswith(____)), default=0)
self.held = ____
return ____

new = completion.token_ids[____:]
read[number] += ____
if completion.finish_reason == "stop":
    new = ____
for id in new:
    if stops[number].found is None:
        give(number, stops[number].push(____))
if output.finished and stops[number].found is None:
    give(number, stops[number].push(streams[number].____))
    give(number, ____)
reasons[number] = completion.finish_reason
if stops[number].found is not None:
    reasons[number] = ____
    if not output.finished:
        ____""",
    ),
    mistakes=(
        Mistake(
            "preempted text emitted twice",
            _text((_NEW, "            new = completion.token_ids[-1:]\n")),
            "The last token of each output is taken for a new one. But an engine may tell of a request in a step in which it got none, because it was preempted and "
            "is computed again: then the same word is written twice. Another step may bring two. Remember how many tokens you have read.",
            "The output has two tokens, as in the step before. Which of them is new?",
            variants=(
                _text((_NEW, "            new = list(completion.token_ids)\n"), ("            for id in new:\n", "            for id in new[-1:]:\n")),
            ),
        ),
        Mistake(
            "one token a step",
            _text((_NEW, "            new = completion.token_ids[read[number] : read[number] + 1]\n            read[number] = len(completion.token_ids)\n")),
            "Most steps bring one token, and some engines bring two at once. All that stand behind those you have read are new.",
            "You have read 1 token, and the output has 3. Which of them are new?",
            variants=(
                _text((_NEW, "            new = completion.token_ids[read[number] : read[number] + 1]\n            read[number] += 1\n")),
                _text((_NEW, "            new = completion.token_ids[read[number] : read[number] + 1]\n            read[number] += len(new)\n")),
            ),
        ),
        Mistake(
            "the whole text again in each step",
            _text((_NEW, "            new = completion.token_ids\n")),
            "token_ids are all tokens so far, not those of this step. Only what comes behind the ones you have read is new.",
            "After the second step token_ids has two tokens. Which of them have you shown already?",
        ),
        Mistake(
            "stop string looked for in each piece alone",
            _text(
                ("        text = self.held + piece\n", "        text = piece\n"),
                (_HOLD, "held = 0"),
            ),
            "A stop string rarely is one token. END may come as E, N, D, in three steps; in none of the three pieces is it found.",
            "In which piece is the whole of the stop string?",
        ),
        Mistake(
            "the beginning of a stop string shown",
            _text(
                ("        text = self.held + piece\n", "        text = self.held + piece\n        before = len(self.held)\n"),
                ("            return text[:end]\n", "            return text[before:end] if end > before else \"\"\n"),
                (_HOLD, "self.held = text"),
                ("        self.held = text[len(text) - held :]\n        return text[: len(text) - held]\n", "        return piece\n"),
                ("            self.held = \"\"\n", ""),
                (_ENDING, "                give(number, stops[number].push(streams[number].end()))\n"),
            ),
            "You look at the whole text, and so find the stop string; but its first letters have been shown by then, and what is shown cannot be taken back. "
            "What might be the beginning of one must wait.",
            "The text ends with E, and the stop string is END. May the E be shown?",
        ),
        Mistake(
            "held back by length",
            _text((_HOLD, "held = min(len(text), max((len(stop) - 1 for stop in self.stops), default=0))")),
            "As many characters as a stop string has, less one, are always held back, whatever they are. Nothing wrong is ever shown; but the text comes later than it "
            "must. Hold back only what a stop string really begins with.",
            "The text ends with \"cat\", and the stop string is END. What could become of it?",
        ),
        Mistake(
            "everything held back",
            _text((_HOLD, "held = len(text) if self.stops else 0")),
            "Nothing wrong is ever shown; but the reader sees nothing until it is all over. Only the end of the text can be the beginning of a stop string: what stands "
            "in front of it is certain.",
            "The text is \"one\", and the stop string is END. What of it may be shown?",
        ),
        Mistake(
            "the shortest end held back",
            _text((_HOLD, "held = min((n for stop in self.stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)")),
            "Several ends of the text may be beginnings of a stop string. The longest must be held; otherwise its first letter is on the screen when the rest comes.",
            "The text ends with oo, and the stop string is oops. How much of it might belong to one?",
        ),
        Mistake(
            "held for ever",
            _text((_ENDING, "                give(number, stops[number].push(streams[number].end()))\n")),
            "When the request ends no more text comes, so what is held back can be no stop string any more: it belongs to the text. Otherwise its last letters "
            "are missing.",
            "The text ends with E, and that was its last token. Who shows the E?",
        ),
        Mistake(
            "the last bytes forgotten",
            _text((_ENDING, "                give(number, stops[number].held)\n")),
            "The tokenizer's stream holds something back as well: bytes of a character that is not complete. end() gives them out as U+FFFD.",
            "What does the stream know when it is told that nothing more comes?",
        ),
        Mistake(
            "the stop string is in the text",
            _text(("            return text[:end]\n", "            return text[: end + len(self.found)]\n")),
            "The completion ends *before* the stop string.",
            "Does the reader want to see END?",
        ),
        Mistake(
            "the end of the piece is lost with the stop string",
            _text(("            return text[:end]\n", "            return \"\"\n")),
            "In the piece that completes a stop string there may be text in front of it; it is the last text of this completion.",
            "A piece is \"one END two\". What of it belongs to the text?",
        ),
        Mistake(
            "goes on behind the stop string",
            _text(("                if not output.finished:\n                    engine.abort(output.request_id)\n", "")),
            "The text is right. But the engine knows nothing of your stop string: it goes on computing, in blocks that others wait for. Tell it to abort.",
            "Who tells the engine that this request is done?",
        ),
        Mistake(
            "the first of the list, not of the text",
            _text(("            end, self.found = min(hits)\n", "            end, self.found = hits[0]\n")),
            "Two stop strings are in the piece, and the text ends at whichever comes first *in the text*. You took the one that comes first in the list.",
            "\"c\" comes before \"d\" in the text. Where does it end?",
        ),
        Mistake(
            "the last stop string of the piece",
            _text(("(text.index(stop), stop)", "(text.rindex(stop), stop)")),
            "The text ends at the first stop string in it. Looked for from the end, the second one is found, and the first stands in the text.",
            "\"a END b END c\": what is the text?",
        ),
        Mistake(
            "aborted by another name",
            _text(("engine.abort(output.request_id)", "engine.abort(number)")),
            "The engine knows the request by the id that it was given, a text; a number is nobody's id, and an abort of it ends nothing. output.request_id is the id.",
            "Under which id was the request added, and which one does abort get from you?",
        ),
        Mistake(
            "each token by itself as UTF-8",
            _text(("streams[number].push(id)", "tokenizer.decode([id])"), ("streams[number].end()", "''")),
            "A character's bytes may come in two tokens (lesson 03). Decoded by itself, each half is a U+FFFD. The stream waits for the other half.",
            "\"é\" is two bytes. What is the first of them alone?",
        ),
        Mistake(
            "the end token as text",
            _text(("            if completion.finish_reason == \"stop\":\n                new = new[:-1]\n", "")),
            "An end token says that the text is over; it is not part of it.",
            "Which token made the engine say \"stop\"?",
        ),
        Mistake(
            "the last token always dropped",
            _text(("            if completion.finish_reason == \"stop\":\n", "            if output.finished:\n")),
            "A request that ends by \"length\" ends with a token like any other, and its text belongs to the completion. Only with \"stop\" the last token is an end "
            "token.",
            "Three tokens were asked for, and three came. Which of them is an end token?",
        ),
        Mistake(
            "in the order of finishing",
            _text(
                ("    texts, reasons,", "    order = []\n    texts, reasons,"),
                ("            reasons[number] = completion.finish_reason\n", "            reasons[number] = completion.finish_reason\n            if output.finished or stops[number].found is not None:\n                order.append(number)\n"),
                ("return list(zip(texts, reasons))", "return [(texts[number], reasons[number]) for number in order]"),
            ),
            "Who asks for forty texts wants the first one first. The order in which they end has nothing to do with the order of the prompts.",
            "The second prompt's text is done first. Where in the answer does it belong?",
        ),
        Mistake(
            "a stop string, and yet \"None\"",
            _text(("                reasons[number] = \"stop\"\n", "")),
            "A completion that a stop string ends has the reason \"stop\": the caller cannot tell otherwise whether it was cut off.",
            "Why did this completion end?",
        ),
    ),
)  # fmt: skip


# ---------------- 23.4: what a batch is good for

_NEW_TOKENS = 24


@functools.cache
def _steps(seats: int, num_blocks: int) -> tuple[int, int]:
    """Steps, and tokens computed, until the forty prompts have 24 new tokens each: by the reference's scheduler."""
    from tinyvllm_ref.block_manager import BlockManager
    from tinyvllm_ref.request import Request
    from tinyvllm_ref.sampling_params import SamplingParams
    from tinyvllm_ref.scheduler import Scheduler

    scheduler = Scheduler(seats, 2048, BlockManager(num_blocks, 16))
    for number, length in enumerate(capstone.prompt_lengths()):
        scheduler.add(Request(str(number), [0] * length, SamplingParams(max_tokens=_NEW_TOKENS)))
    steps = tokens = 0
    while scheduler.has_work:
        batch = scheduler.schedule()
        scheduler.update(batch, [0] * sum(batch.samples))
        steps, tokens = steps + 1, tokens + batch.total_tokens
    return steps, tokens


_PREDICTION = Prediction(
    id="23.4",
    title="how often are the weights read?",
    quantities={
        "one_by_one": Quantity("steps, one request after the other", lambda: float(_steps(1, 1000)[0])),
        "together": Quantity(
            "steps, all in one batch with blocks for all", lambda: float(_steps(64, 1000)[0])
        ),
    },
    explains="A step reads every weight once, whoever is in it. One by one each request takes a step for its prompt, which gives its first token, and 23 more: "
    f"40 x 24 = 960. All together there is one step with all prompts and 23 more: 24. With {capstone.NUM_BLOCKS} blocks of 16 for all, they do not all fit at once, "
    "and some are preempted and computed again: the picture of 23.2 shows what that costs.",
    hints=Hints(
        question="How many tokens does the step give that reads a prompt? How many steps does one request take, then, for 24 new tokens?",
        rule="The prompt's step gives the first new token; each further one takes a step. Whoever is in a batch gets a token in each step. "
        "By hand, 2 requests with 3 new tokens each: 6 steps one by one, 3 together.",
        code="one_by_one = 40 * ____\ntogether = ____",
    ),
)


# ---------------- what is measured and drawn


def _make_gather(tokens: int) -> Any:
    """A run of the gather kernel of 23.1's cell, on shuffled blocks of 16 slots of 8 heads of 64."""

    def make(answer: Any, cp: Any) -> Any:
        gather = answer.step.__globals__["gather"]
        blocks = tokens // 16
        cache = cp.zeros((blocks, 16, 8, 64), np.uint16)
        table = cp.asarray(np.random.default_rng(0).permutation(blocks).astype(np.int32))
        out = cp.empty((tokens, 8, 64), np.uint16)
        return lambda: gather((tokens,), (128,), (cache, table, out, np.int32(16), np.int32(512)))

    return make


_WORK = Work(
    label="gather, 8,192 tokens of 8 heads of 64 from shuffled blocks",
    make=_make_gather(8192),
    read_bytes=8192 * 1024 + 4 * 512,
    write_bytes=8192 * 1024,
    small=_make_gather(64),
    small_read_bytes=64 * 1024 + 4 * 4,
    small_write_bytes=64 * 1024,
    small_label="gather, 64 tokens of 8 heads of 64 from shuffled blocks",
    note="This traffic is what a prompt pays for an attention that knows nothing of pages; a decode step pays none of it.",
)


def _scheduler_picture(answer: Any, cp: Any) -> Any:
    """The forty prompts through the learner's scheduler: who computes in each step, and how full the cache is."""
    return capstone.draw_schedule(answer)


LESSON = Lesson(
    number="23",
    slug="batched_generator",
    title="A batched generator",
    part=4,
    minutes=120,
    exercises=(_LOOP, _PREEMPT, _TEXT, _PREDICTION),
    engine=EngineCard(
        mistakes=(
            ("23.1", "the cache read as if it were in one piece"),
            ("23.1", "one cache for all layers"),
            ("23.2", "a block taken one token late"),
            ("23.2", "computed count kept"),
            ("23.2", "its tokens thrown away"),
        ),
        prompt="One dark night, Ella and her friend Leo heard a noise.",
        beside=(
            "Once upon a time, there was a brave little fox named Pip.",
            "There was once a frog named Button who loved to sing.",
        ),
        options={"num_blocks": 9},
        note="Three stories share 9 blocks of 16 slots, which are too few for them; the youngest one is shown. It is preempted and computed again, and you cannot tell "
        "from the text. With all lessons passed everything that runs here is yours: the loop, the scheduler, and every part that they call.",
    ),
    pictures={"23.2": _scheduler_picture},
    works={"23.1": _WORK},
    passed=capstone.save_program,
)
