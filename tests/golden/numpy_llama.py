"""A Llama's forward pass in NumPy, float64, a whole sequence at a time: nothing is cached, fused or fast.

It reads what ``open_checkpoint`` gives, so it shows that config and weights are read as Hugging Face means
them, apart from any kernel. On request it rounds to bfloat16 where the engine does: weights, the inputs of
matrix products, keys and values. What then still differs is the engine's float32 and its mistakes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from tinyvllm_ref.checkpoint.safetensors import TensorView
from tinyvllm_ref.config import ModelConfig


def forward(
    config: ModelConfig, views: Mapping[str, TensorView], ids: list[int], rounded: bool = False
) -> np.ndarray:
    """Logits of every position, (tokens, vocab) float64."""
    r = _round if rounded else _keep
    weights = {name: r(_to_float(view)) for name, view in views.items()}
    x = weights["model.embed_tokens.weight"][ids]
    cos, sin = _rotations(config, len(ids))
    for layer in range(config.num_hidden_layers):
        own = {name: weights[f"model.layers.{layer}.{name}.weight"] for name in _NAMES}
        x = x + _attention(config, own, r(_norm(x, own["input_layernorm"], config.rms_norm_eps)), cos, sin, r)
        h = r(_norm(x, own["post_attention_layernorm"], config.rms_norm_eps))
        gate, up = h @ own["mlp.gate_proj"].T, h @ own["mlp.up_proj"].T
        x = x + r(gate / (1 + np.exp(-gate)) * up) @ own["mlp.down_proj"].T
    x = r(_norm(x, weights["model.norm.weight"], config.rms_norm_eps))
    head = weights["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return x @ head.T


_NAMES = (
    "input_layernorm",
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    "post_attention_layernorm",
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


def _to_float(view: TensorView) -> np.ndarray:
    values = view.numpy()
    if view.dtype == "BF16":
        values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float64)


def _keep(x: np.ndarray) -> np.ndarray:
    return x


def _round(x: np.ndarray) -> np.ndarray:
    """To the nearest bfloat16, ties to even."""
    bits = x.astype(np.float32).view(np.uint32)
    bits = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def _rotations(config: ModelConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of every position and pair, (tokens, 1, D/2)."""
    scaling = config.rope_scaling
    frequencies = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    if scaling.rope_type == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling.rope_type == "llama3":
        turns = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0, 1)
        frequencies = keep * frequencies + (1 - keep) * frequencies / scaling.factor
    angles = np.outer(np.arange(length), frequencies)[:, None, :]
    return np.cos(angles), np.sin(angles)


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    left, right = np.split(x, 2, axis=-1)
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def _attention(
    config: ModelConfig,
    own: Mapping[str, np.ndarray],
    h: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    r: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    tokens, heads, kv_heads = len(h), config.num_attention_heads, config.num_key_value_heads
    q = _rotate((h @ own["self_attn.q_proj"].T).reshape(tokens, heads, -1), cos, sin)
    k = _rotate((h @ own["self_attn.k_proj"].T).reshape(tokens, kv_heads, -1), cos, sin)
    v = (h @ own["self_attn.v_proj"].T).reshape(tokens, kv_heads, -1)
    k, v = (np.repeat(r(array), heads // kv_heads, axis=1) for array in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(config.head_dim)
    scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return r(np.einsum("hij,jhd->ihd", weights, v)).reshape(tokens, -1) @ own["self_attn.o_proj"].T
