"""How far each mistake in a kernel shows: the first token that differs, and the error of the logits.

The model is run here in NumPy, float32, once as it should be and once with each mistake, over ten prompts.
A greedy continuation differs from the right one first where the mistaken model, given the right text so far,
prefers another token; so one forward pass over the right text is enough for each mistake and prompt.

    python data/tiny-stories/visibility.py     # writes visibility.json beside the checkpoint
"""

from __future__ import annotations

import argparse
import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

HERE = Path(__file__).parent
PROMPTS, MAX_NEW_TOKENS = 10, 200

Array = npt.NDArray[Any]


def bf16_to_float(bits: Array) -> Array:
    """BF16 bits (uint16) as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def read_weights(path: Path) -> dict[str, Array]:
    """The tensors of a BF16 safetensors file, as float32."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    weights = {}
    for name, tensor in header.items():
        if tensor["dtype"] != "BF16":
            raise ValueError(f"{path}: {name} is {tensor['dtype']}, not BF16")
        begin, end = (8 + length + offset for offset in tensor["data_offsets"])
        weights[name] = bf16_to_float(np.frombuffer(content[begin:end], np.uint16)).reshape(tensor["shape"])
    return weights


def with_fraction_bits(x: Array, bits: int) -> Array:
    """float32 rounded to nearest even with fewer fraction bits (7 is BF16)."""
    drop = np.uint32(23 - bits)
    word = x.view(np.uint32)
    half = (np.uint32(1) << (drop - np.uint32(1))) - np.uint32(1)
    rounded = word + half + ((word >> drop) & np.uint32(1))
    return ((rounded >> drop) << drop).view(np.float32)


# --- The model, in parts that a mistake can replace ---------------------------------------------------


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """(T, H) -> (T, H)."""
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight)


def linear(x: Array, weight: Array) -> Array:
    """(T, K), (N, K) -> (T, N)."""
    return np.asarray(x @ weight.T)


def rope_frequencies(config: dict[str, Any]) -> Array:
    """(D/2,) float32, with Llama 3's scaling."""
    plain = plain_frequencies(config)
    scaling = config["rope_scaling"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(keep * plain + (1 - keep) * plain / scaling["factor"], dtype=np.float32)


def plain_frequencies(config: dict[str, Any]) -> Array:
    """(D/2,) without scaling."""
    return np.asarray(config["rope_theta"] ** -(np.arange(0, config["head_dim"], 2) / config["head_dim"]))


def rope(x: Array, angles: Array) -> Array:
    """(T, heads, D) turned by (T, D/2): element i with element i + D/2."""
    a, b = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)


def rope_adjacent(x: Array, angles: Array) -> Array:
    """The mistake: element 2i with element 2i + 1."""
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    return np.stack((a * cos - b * sin, b * cos + a * sin), axis=-1).reshape(x.shape)


def causal_mask(n: int) -> Array:
    """(n, n), True where query row sees key column."""
    return np.tri(n, dtype=bool)


def softmax(scores: Array) -> Array:
    """Along the last axis."""
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return np.asarray(x / (1 + np.exp(-x)))


def add(x: Array, y: Array) -> Array:
    """The residual stream and what a sublayer adds to it."""
    return np.asarray(x + y)


@dataclass(frozen=True)
class Model:
    """The model with its replaceable parts; the defaults are right."""

    config: dict[str, Any]
    weights: dict[str, Array]
    norm: Callable[[Array, Array, float], Array] = rms_norm
    final_norm: Callable[[Array, Array, float], Array] = rms_norm
    linear: Callable[[Array, Array], Array] = linear
    rope: Callable[[Array, Array], Array] = rope
    frequencies: Callable[[dict[str, Any]], Array] = rope_frequencies
    positions: Callable[[int], Array] = np.arange
    mask: Callable[[int], Array] = causal_mask
    repeat_kv: Callable[[Array, int], Array] = field(default=lambda x, n: np.repeat(x, n, axis=1))
    scale: Callable[[int], float] = field(default=lambda head_dim: head_dim**-0.5)
    softmax: Callable[[Array], Array] = softmax
    gate: Callable[[Array, Array], Array] = field(default=lambda gate, up: silu(gate) * up)
    add_attention: Callable[[Array, Array], Array] = add
    add_feed_forward: Callable[[Array, Array], Array] = add
    head: Callable[[Array], Array] = field(default=lambda logits: logits)

    def logits(self, ids: list[int]) -> Array:
        """(T, V) float32."""
        w, eps = self.weights, self.config["rms_norm_eps"]
        x = w["model.embed_tokens.weight"][ids]
        angles = np.outer(self.positions(len(ids)), self.frequencies(self.config)).astype(np.float32)
        for i in range(self.config["num_hidden_layers"]):
            p = f"model.layers.{i}."
            h = self.norm(x, w[p + "input_layernorm.weight"], eps)
            x = self.add_attention(x, self._attention(h, p + "self_attn.", angles))
            h = self.norm(x, w[p + "post_attention_layernorm.weight"], eps)
            gate, up = (self.linear(h, w[f"{p}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
            down = self.linear(self.gate(gate, up), w[p + "mlp.down_proj.weight"])
            x = self.add_feed_forward(x, down)
        x = self.final_norm(x, w["model.norm.weight"], eps)
        return self.head(self.linear(x, w["model.embed_tokens.weight"]))

    def _attention(self, h: Array, p: str, angles: Array) -> Array:
        """(T, H) -> (T, H)."""
        c, w, n = self.config, self.weights, len(h)
        num_heads, num_kv_heads, head_dim = (
            c["num_attention_heads"],
            c["num_key_value_heads"],
            c["head_dim"],
        )
        q = self.rope(self.linear(h, w[p + "q_proj.weight"]).reshape(n, num_heads, head_dim), angles)
        k = self.rope(self.linear(h, w[p + "k_proj.weight"]).reshape(n, num_kv_heads, head_dim), angles)
        v = self.linear(h, w[p + "v_proj.weight"]).reshape(n, num_kv_heads, head_dim)
        k, v = (self.repeat_kv(x, num_heads // num_kv_heads) for x in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) * np.float32(self.scale(head_dim))
        probabilities = self.softmax(np.where(self.mask(n), scores, np.float32(-1e30)))
        out = np.einsum("hqk,khd->qhd", probabilities, v).reshape(n, num_heads * head_dim)
        return self.linear(out, w[p + "o_proj.weight"])


# --- The mistakes ---------------------------------------------------------------------------------------


def norm_without_last(x: Array, weight: Array, eps: float) -> Array:
    """The sum of squares misses the last element; the mean is still over all."""
    squares = (x[:, :-1] ** 2).sum(-1, keepdims=True) / x.shape[-1]
    return np.asarray(x / np.sqrt(squares + eps) * weight)


def one_key_more(n: int) -> Array:
    """Each query also sees the token after it."""
    return np.tri(n, k=1, dtype=bool)


def one_key_fewer(n: int) -> Array:
    """No query sees its own token; the first one has no other."""
    mask = np.tri(n, k=-1, dtype=bool)
    mask[0, 0] = True
    return mask


def without_first_key(n: int) -> Array:
    """No query but the first sees the first token."""
    mask = causal_mask(n)
    mask[1:, 0] = False
    return mask


def without_last_entry(logits: Array) -> Array:
    """The maximum is looked for in all but the last entry of the vocabulary."""
    logits = logits.copy()
    logits[:, -1] = -np.inf
    return logits


def rounded(model: Model, bits: int) -> dict[str, Array]:
    """The weights with fewer fraction bits."""
    return {name: with_fraction_bits(w, bits) for name, w in model.weights.items()}


def mistakes(model: Model) -> dict[str, Model]:
    """What the mistake is -> the model with it."""

    def skip_norm(x: Array, weight: Array, eps: float) -> Array:
        return x

    def make(**parts: Any) -> Model:
        return replace(model, **parts)

    return {
        "RoPE on adjacent pairs": make(rope=rope_adjacent),
        "RoPE left out": make(rope=lambda x, angles: x),
        "RoPE scaling ignored": make(frequencies=plain_frequencies),
        "every position is 0": make(positions=np.zeros),
        "positions begin at 1": make(positions=lambda n: np.arange(1, n + 1)),
        "no causal mask": make(mask=lambda n: np.ones((n, n), bool)),
        "mask lets one key too many through": make(mask=one_key_more),
        "mask hides the query's own key": make(mask=one_key_fewer),
        "first key left out": make(mask=without_first_key),
        "scores not scaled by 1/sqrt(D)": make(scale=lambda head_dim: 1.0),
        "softmax without division by the sum": make(
            softmax=lambda s: np.exp(s - s.max(-1, keepdims=True)),
        ),
        "KV heads tiled, not repeated": make(repeat_kv=lambda x, n: np.tile(x, (1, n, 1))),
        "residual missing after attention": make(add_attention=lambda x, y: y),
        "residual missing after feed-forward": make(add_feed_forward=lambda x, y: y),
        "last element dropped in the norm's sum": make(
            norm=norm_without_last,
            final_norm=norm_without_last,
        ),
        "last element dropped in every dot product": make(linear=lambda x, w: x[:, :-1] @ w[:, :-1].T),
        "norm's weight left out": make(
            norm=lambda x, w, eps: rms_norm(x, np.ones_like(w), eps),
            final_norm=lambda x, w, eps: rms_norm(x, np.ones_like(w), eps),
        ),
        "mean subtracted in the norm": make(
            norm=lambda x, w, eps: rms_norm(x - x.mean(-1, keepdims=True), w, eps),
        ),
        "final norm left out": make(final_norm=skip_norm),
        "gate and up exchanged": make(gate=lambda gate, up: silu(up) * gate),
        "last entry of the vocabulary missed": make(head=without_last_entry),
        "weights with 5 fraction bits": make(weights=rounded(model, 5)),
        "weights with 3 fraction bits": make(weights=rounded(model, 3)),
        "weights with 2 fraction bits": make(weights=rounded(model, 2)),
    }


# --- The measurement ------------------------------------------------------------------------------------


def greedy(model: Model, ids: list[int]) -> list[int]:
    """The ids of the prompt and of its greedy continuation, up to and including the token that ends it."""
    ids = list(ids)
    for _ in range(MAX_NEW_TOKENS):
        ids.append(int(model.logits(ids)[-1].argmax()))
        if ids[-1] in model.config["eos_token_id"]:
            break
    return ids


def measure(model: Model, prompts: list[list[int]]) -> dict[str, Any]:
    """For each mistake and prompt: the first new token that differs (None: none), and the logits' error."""
    texts = [(len(prompt), greedy(model, prompt)) for prompt in prompts]
    right = [model.logits(ids[:-1]) for _, ids in texts]
    result: dict[str, Any] = {}
    for name, wrong_model in mistakes(model).items():
        first, errors = [], []
        for (start, ids), expected in zip(texts, right, strict=True):
            got = wrong_model.logits(ids[:-1])[start - 1 :]
            expected = expected[start - 1 :]
            differs = np.flatnonzero(got.argmax(-1) != np.array(ids[start:]))
            first.append(int(differs[0]) if len(differs) else None)
            finite = np.isfinite(got)
            difference = np.where(finite, got, 0) - np.where(finite, expected, 0)
            errors.append(float(np.linalg.norm(difference) / np.linalg.norm(expected)))
        result[name] = {"first_difference": first, "logit_error": [round(error, 4) for error in errors]}
        print(f"{name:45} {first} {np.median(errors):.3f}", flush=True)
    return {"new_tokens": [len(ids) - start for start, ids in texts], "mistakes": result}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="How far each mistake in a kernel shows.")
    parser.add_argument("--model", type=Path, default=HERE, help="folder of the checkpoint")
    arguments = parser.parse_args()
    config = json.loads((arguments.model / "config.json").read_text())
    model = Model(config, read_weights(arguments.model / "model.safetensors"))
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    lines = (HERE.parent / "prompts.txt").read_text(encoding="utf-8").splitlines()[:PROMPTS]
    result = {"prompts": lines} | measure(model, [tokenizer.encode(line).ids for line in lines])
    (arguments.model / "visibility.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
