"""Every part once more, in NumPy and plain Python: what a learner's engine is, without a line of the reference's."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from tinyvllm_ref.batch import make_inputs
from tinyvllm_ref.checkpoint.safetensors import TensorView
from tinyvllm_ref.device import cp
from tinyvllm_ref.kv_cache import KVCache
from tinyvllm_ref.request import RequestState
from tinyvllm_ref.scheduler import ScheduledBatch

BF16_CUDA = """typedef unsigned short bf16;
__device__ __forceinline__ float bf16_to_float(bf16 u) { return __uint_as_float((unsigned)u << 16); }
__device__ __forceinline__ bf16 float_to_bf16(float x) {
    unsigned u = __float_as_uint(x);
    if (x != x) return (bf16)0x7fc0;
    return (bf16)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
"""
BLOCK_SUM_CUDA = """__device__ __forceinline__ float block_sum(float value, float* scratch) {
    scratch[threadIdx.x] = value;
    __syncthreads();
    float sum = 0.0f;
    for (int t = 0; t < blockDim.x; t++) sum += scratch[t];
    __syncthreads();
    return sum;
}
"""


def float_to_bf16(x):
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def bf16_to_float(u):
    return (np.asarray(u).astype(np.uint32) << 16).view(np.float32)


def host(array):
    """float32 of what is on the device."""
    values = array.get()
    return bf16_to_float(values) if values.dtype == np.uint16 else values


def put(out, values):
    """Write to the device, in the array's own numbers."""
    values = np.asarray(values, np.float32).reshape(out.shape)
    out.set(float_to_bf16(values) if out.dtype == np.uint16 else np.ascontiguousarray(values))
    return out


def read_safetensors(path):
    with open(path, "rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    size = int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8 : 8 + size]))
    header.pop("__metadata__", None)
    rest = data[8 + size :]
    return {
        name: TensorView(entry["dtype"], tuple(entry["shape"]), rest[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def load_weights(views, config):
    def group(*names):
        rows = np.concatenate([np.frombuffer(views[name].data, np.uint16) for name in names])
        return cp.asarray(rows.reshape((-1, *views[names[0]].shape[1:])))

    weights = {"embed_tokens": group("model.embed_tokens.weight"), "norm": group("model.norm.weight")}
    if not config.tie_word_embeddings:
        weights["lm_head"] = group("lm_head.weight")
    for i in range(config.num_hidden_layers):
        of = f"model.layers.{i}."
        for name, sources in {
            "input_layernorm": ["input_layernorm"],
            "post_attention_layernorm": ["post_attention_layernorm"],
            "qkv": [f"self_attn.{x}_proj" for x in "qkv"],
            "o_proj": ["self_attn.o_proj"],
            "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
            "down_proj": ["mlp.down_proj"],
        }.items():
            weights[f"layers.{i}.{name}"] = group(*(f"{of}{source}.weight" for source in sources))
    return weights


class Tokenizer:
    """Bytes."""

    def __init__(self, path):
        self.path = Path(path)

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def stream(self):
        return SimpleNamespace(push=lambda token: self.decode([token]), end=lambda: "")


def embedding(ids, table, out):
    return put(out, host(table)[ids.get()])


def normed(x, weight, eps):
    return x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + eps) * host(weight)


def rms_norm(x, weight, eps, out):
    return put(out, normed(x.get(), weight, eps))


def add_rms_norm(x, residual, weight, eps, out):
    put(residual, residual.get() + x.get())
    return put(out, normed(residual.get(), weight, eps))


def linear(x, w, out):
    return put(out, host(x) @ host(w).T)


def attention_gqa(q, k, v, scale, out):
    n, m, times = len(q), len(k), q.shape[1] // k.shape[1]
    keys, values = (np.repeat(host(array), times, axis=1) for array in (k, v))
    scores = np.einsum("nhd,mhd->hnm", q.get(), keys) * scale
    scores[:, ~np.tri(n, m, m - n, dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return put(out, np.einsum("hnm,mhd->nhd", weights / weights.sum(axis=-1, keepdims=True), values))


def attention(q, k, v, scale, out):
    """Lesson 10's: as many KV heads as query heads, and nothing else."""
    assert q.shape[1:] == k.shape[1:] == v.shape[1:]
    return attention_gqa(q, k, v, scale, out)


def paged_attention(q, key_cache, value_cache, block_tables, context_lens, scale, out):
    tables = block_tables.get()
    for b, length in enumerate(context_lens.tolist()):
        blocks = cp.asarray(tables[b][: -(-length // key_cache.shape[1])].astype(np.int64))
        k, v = (
            cp.ascontiguousarray(cache[blocks].reshape((-1, *cache.shape[2:]))[:length])
            for cache in (key_cache, value_cache)
        )
        attention_gqa(q[b : b + 1], k, v, scale, out[b : b + 1])
    return out


def merge_attention(out_a, lse_a, out_b, lse_b):
    a, b = lse_a.get(), lse_b.get()
    lse = np.logaddexp(a, b)
    merged = np.exp(a - lse)[..., None] * out_a.get() + np.exp(b - lse)[..., None] * out_b.get()
    return cp.asarray(merged), cp.asarray(lse)


def rope_frequencies(config):
    return cp.asarray(
        (config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)).astype(np.float32)
    )


def rope(q, k, positions, inv_freq):
    angles = np.outer(positions.get(), inv_freq.get())[:, None, :]
    for array in (q, k):
        left, right = np.split(array.get(), 2, axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        put(array, np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1))


def silu_mul(gate_up, out):
    gate, up = np.split(gate_up.get(), 2, axis=1)
    return put(out, gate / (1 + np.exp(-gate)) * up)


def argmax(logits, out):
    out.set(logits.get().argmax(axis=1).astype(np.int32))
    return out


def sample(logits, params, steps):
    rows = logits.get().astype(np.float64)
    noise = [
        np.random.default_rng([p.seed % 2**64, step]) for p, step in zip(params, steps.tolist(), strict=True)
    ]
    drawn = [
        row.argmax() if p.temperature == 0 else (row / p.temperature + rng.gumbel(size=len(row))).argmax()
        for row, p, rng in zip(rows, params, noise, strict=True)
    ]
    return cp.asarray(np.array(drawn, np.int32))


def kv_write(k, v, slots, key_cache, value_cache):
    for cache, new in ((key_cache, k), (value_cache, v)):
        rows = cache.reshape((-1, *cache.shape[2:]))
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                rows[slot].set(float_to_bf16(new[token].get()))


def plan_buffers(lifetimes):
    offsets, total = [], 0
    for size, _, _ in lifetimes:
        offsets.append(total)
        total += -(-size // 256) * 256
    return offsets, total


def pack(sequences):
    ids = [token for sequence in sequences for token in sequence]
    positions = [position for sequence in sequences for position in range(len(sequence))]
    starts = np.cumsum([0, *map(len, sequences)])
    return tuple(cp.asarray(np.array(values, np.int32)) for values in (ids, positions, starts))


def decoder_layer(x, residual, weights, layer, attend):
    config, tokens = weights.config, len(x)

    def new(columns, dtype):
        return cp.empty((tokens, columns), dtype)

    norm = weights[f"layers.{layer}.input_layernorm"]
    h = new(config.hidden_size, np.uint16)
    if layer == 0:
        rms_norm(residual, norm, config.rms_norm_eps, h)
    else:
        add_rms_norm(x, residual, norm, config.rms_norm_eps, h)
    qkv = linear(h, weights[f"layers.{layer}.qkv"], new(config.q_size + 2 * config.kv_size, np.float32)).get()
    cuts = np.split(qkv, [config.q_size, config.q_size + config.kv_size], axis=1)
    q, k, v = (cp.asarray(cut.reshape(tokens, -1, config.head_dim)) for cut in cuts)
    rope(q, k, attend.positions, weights["inv_freq"])
    out = cp.empty(q.shape, np.uint16)
    attend(layer, q, k, v, out)
    linear(out.reshape(tokens, -1), weights[f"layers.{layer}.o_proj"], x)
    add_rms_norm(x, residual, weights[f"layers.{layer}.post_attention_layernorm"], config.rms_norm_eps, h)
    gate_up = linear(h, weights[f"layers.{layer}.gate_up"], new(2 * config.intermediate_size, np.float32))
    activated = silu_mul(gate_up, new(config.intermediate_size, np.uint16))
    linear(activated, weights[f"layers.{layer}.down_proj"], x)
    return x


def forward(inputs, weights, attend):
    config, tokens = weights.config, len(inputs.ids)
    residual = embedding(
        inputs.ids, weights["embed_tokens"], cp.empty((tokens, config.hidden_size), np.float32)
    )
    x = cp.empty(residual.shape, np.float32)
    for layer in range(config.num_hidden_layers):
        decoder_layer(x, residual, weights, layer, attend)
    h = add_rms_norm(x, residual, weights["norm"], config.rms_norm_eps, cp.empty(x.shape, np.uint16))
    rows = cp.asarray(h.get()[inputs.logits_rows.get()])
    return linear(rows, weights.lm_head, cp.empty((len(rows), config.vocab_size), np.float32))


class BlockManager:
    """A set of free blocks and a dict of tables."""

    def __init__(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.unused, self.tables = set(range(num_blocks)), {}

    @property
    def num_free(self):
        return len(self.unused)

    def allocate(self, name, num_tokens):
        table = self.tables.setdefault(name, [])
        missing = -(-num_tokens // self.block_size) - len(table)
        if missing > len(self.unused):
            return False
        table += [self.unused.pop() for _ in range(max(0, missing))]
        return True

    def free(self, name):
        self.unused |= set(self.tables.pop(name))

    def table(self, name):
        return self.tables[name]

    def check(self):
        assert sum(map(len, self.tables.values())) + len(self.unused) == self.num_blocks


class Scheduler:
    """One request at a time, its whole prompt at once."""

    def __init__(self, max_seqs, max_tokens, blocks):
        self.blocks, self.waiting, self.started = blocks, [], set()

    def add(self, request):
        self.waiting.append(request)

    def schedule(self):
        if not self.waiting:
            return ScheduledBatch([], [], [], [], [], 0, [])
        request = self.waiting[0]
        start = request.num_computed_tokens
        count = request.num_tokens - start
        assert self.blocks.allocate(request.request_id, request.num_tokens)
        self.started.add(request.request_id)
        table = self.blocks.table(request.request_id)
        return ScheduledBatch([request], [start], [count], [True], [table], int(start > 0), [])

    def update(self, batch, ids):
        (request,), (token,) = batch.requests, ids
        request.num_computed_tokens = request.num_tokens
        request.append(token)
        if token not in request.stop_tokens and request.num_tokens < request.max_num_tokens:
            return []
        request.finish_reason = "stop" if token in request.stop_tokens else "length"
        return self._drop(request)

    def abort(self, name):
        for request in [r for r in self.waiting if r.request_id == name]:
            request.finish_reason = "abort"
            self._drop(request)

    def _drop(self, request):
        request.state = RequestState.FINISHED
        self.waiting.remove(request)
        if request.request_id in self.started:
            self.started.remove(request.request_id)
            self.blocks.free(request.request_id)
        return [request]


class Engine:
    """The loop, with nothing around it."""

    def __init__(self, model, parts, config):
        self.model, self.parts = model, parts
        self.block_size, num_blocks = config.block_size, config.num_blocks or 64
        self.kv_cache = KVCache(model.config, num_blocks, config.block_size)
        self.blocks = parts.BlockManager(num_blocks, config.block_size)
        self.scheduler = parts.Scheduler(config.max_num_seqs, config.max_num_batched_tokens, self.blocks)
        self.steps = 0

    @property
    def has_work(self):
        return bool(self.scheduler.waiting)

    def add_request(self, request):
        self.scheduler.add(request)

    def abort(self, name):
        self.scheduler.abort(name)

    def step(self):
        self.steps += 1
        batch = self.scheduler.schedule()
        if not batch:
            return []
        sequences = [
            request.token_ids[start : start + count]
            for request, start, count in zip(batch.requests, batch.starts, batch.num_tokens, strict=True)
        ]
        rows = (np.cumsum(batch.num_tokens) - 1).tolist()
        inputs = make_inputs(
            sequences,
            batch.starts,
            batch.block_tables,
            rows,
            batch.num_decodes,
            self.block_size,
            self.parts.pack,
        )
        logits = self.model.forward(inputs, self.kv_cache)
        ids = self.parts.argmax(logits, cp.empty(len(logits), np.int32)).tolist()
        self.scheduler.update(batch, ids)
        return [
            SimpleNamespace(
                request_id=request.request_id,
                finished=request.finish_reason is not None,
                outputs=[
                    SimpleNamespace(token_ids=request.output_token_ids, finish_reason=request.finish_reason)
                ],
            )
            for request in batch.requests
        ]


def build_app(engine):
    raise NotImplementedError("the server is not the engine's business")
