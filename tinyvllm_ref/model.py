"""A Llama: what each block computes, from token ids to logits.

T tokens of one step, packed over all requests; H hidden, F ffn, V vocabulary, D head_dim, Hq and Hk query and
KV heads. The arithmetic is in the parts (:mod:`tinyvllm_ref.parts`), which are called one by one and write to
buffers that are allocated once; this file is the order in which they are called. The weights' inputs are
bfloat16 (bits in uint16), their outputs and the residual stream float32.

Nothing is global: a layer gets its weights, and `attend`, which knows the step's positions and the cache. So the
same layer serves a plain forward pass, a prefill and a decode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .batch import ModelInputs
from .buffers import Buffers, StepBuffers
from .config import ModelConfig
from .kernels.gather_rows import gather_rows
from .kernels.split_qkv import split_qkv
from .kv_cache import KVCache
from .parts import Parts

Array = Any


class Weights(dict[str, Array]):
    """The model's weights by name, and what a layer has to know besides them.

    Parameters
    ----------
    config : ModelConfig
    arrays : mapping of str to array
        ``"embed_tokens"``, ``"layers.0.qkv"``, ...: see
        :func:`~tinyvllm_ref.checkpoint.weights.weight_plan`.
    inv_freq : (D/2,) float32
        Radians per token of each pair of columns; it is also here as ``"inv_freq"``.

    Attributes
    ----------
    config : ModelConfig
    lm_head : (V, H) bf16
        The embedding table where the two are tied.
    """

    def __init__(self, config: ModelConfig, arrays: Mapping[str, Array], inv_freq: Array) -> None:
        super().__init__(arrays, inv_freq=inv_freq)
        self.config = config
        self.lm_head = self["embed_tokens" if config.tie_word_embeddings else "lm_head"]


class Attention:
    """Tokens look at the earlier ones of their request: normed (T, H) bf16 -> x (T, H) float32."""

    def __init__(self, parts: Parts) -> None:
        self._parts: Any = parts  # filled: none of them is None

    def __call__(self, weights: Weights, layer: int, attend: Any, b: StepBuffers) -> None:
        parts = self._parts
        parts.linear(b.normed, weights[f"layers.{layer}.qkv"], b.qkv)  # (T, (Hq + 2 Hk) D)
        split_qkv(b.qkv, b.q, b.k, b.v)  # (T, Hq, D), (T, Hk, D), (T, Hk, D)
        parts.rope(b.q, b.k, attend.positions, weights["inv_freq"])  # in place
        attend(layer, b.q, b.k, b.v, b.attended)  # (T, Hq, D) bf16; writes k and v to the cache
        parts.linear(b.heads, weights[f"layers.{layer}.o_proj"], b.x)


class FeedForward:
    """Each token for itself: ffn_normed (T, H) bf16 -> x (T, H) float32."""

    def __init__(self, parts: Parts) -> None:
        self._parts: Any = parts  # filled: none of them is None

    def __call__(self, weights: Weights, layer: int, b: StepBuffers) -> None:
        parts = self._parts
        parts.linear(b.ffn_normed, weights[f"layers.{layer}.gate_up"], b.gate_up)  # (T, 2F)
        parts.silu_mul(b.gate_up, b.activated)  # (T, F) bf16
        parts.linear(b.activated, weights[f"layers.{layer}.down_proj"], b.x)


class Layer:
    """Both blocks, each in front of it a norm; has the contract of the part `decoder_layer`.

    x is what the block before computed and has not been added to the stream yet: so the addition and the next norm
    are one pass over memory. Before layer 0 the stream is complete, and x is not read.
    """

    def __init__(self, parts: Parts, buffers: Buffers) -> None:
        self._parts: Any = parts  # filled: none of them is None
        self._buffers = buffers
        self._attention = Attention(parts)
        self._feed_forward = FeedForward(parts)

    def __call__(self, x: Array, residual: Array, weights: Weights, layer: int, attend: Any) -> Array:
        parts, eps = self._parts, weights.config.rms_norm_eps
        b = self._buffers.around(weights.config, x, residual)
        if layer == 0:
            parts.rms_norm(residual, weights["layers.0.input_layernorm"], eps, b.normed)
        else:
            parts.add_rms_norm(x, residual, weights[f"layers.{layer}.input_layernorm"], eps, b.normed)
        self._attention(weights, layer, attend, b)
        parts.add_rms_norm(
            x, residual, weights[f"layers.{layer}.post_attention_layernorm"], eps, b.ffn_normed
        )
        self._feed_forward(weights, layer, b)
        return x


class Forward:
    """Embedding, all layers, the last norm, the LM head; has the contract of the part `forward`."""

    def __init__(self, parts: Parts, buffers: Buffers) -> None:
        self._parts: Any = parts  # filled: none of them is None
        self._buffers = buffers

    def __call__(self, inputs: ModelInputs, weights: Weights, attend: Any) -> Array:
        parts, config = self._parts, weights.config
        b = self._buffers.step(config, len(inputs.ids))
        rows, logits = self._buffers.logits(config, len(inputs.logits_rows))  # (R, H) bf16, (R, V)
        parts.embedding(inputs.ids, weights["embed_tokens"], b.residual)  # (T, H)
        for layer in range(config.num_hidden_layers):
            parts.decoder_layer(b.x, b.residual, weights, layer, attend)
        if len(rows):
            parts.add_rms_norm(b.x, b.residual, weights["norm"], config.rms_norm_eps, b.normed)
            gather_rows(b.normed, inputs.logits_rows, rows)
            parts.linear(rows, weights.lm_head, logits)
        return logits


class Model:
    """A model's weights and how they are used.

    Parameters
    ----------
    weights : Weights
    parts : Parts
        All that a forward pass takes: :func:`tinyvllm_ref.assembly.complete` gives them.
    attention : callable
        ``attention(inputs, kv_cache) -> attend``: joins the attention parts to the paged cache, for one step.
    buffers : Buffers
        Those that `parts` writes to.
    """

    def __init__(
        self,
        weights: Weights,
        parts: Parts,
        attention: Callable[[ModelInputs, KVCache], Any],
        buffers: Buffers,
    ) -> None:
        self.config = weights.config
        self.weights = weights
        self.parts = parts
        self.buffers = buffers
        self._attention = attention

    def forward(self, inputs: ModelInputs, kv_cache: KVCache) -> Array:
        """Compute a step's tokens, and write their keys and values to the cache.

        Returns
        -------
        (R, V) float32
            Logits of ``inputs.logits_rows``; a buffer that the next pass writes to again.
        """
        return self.parts.forward(inputs, self.weights, self._attention(inputs, kv_cache))  # type: ignore[misc]
