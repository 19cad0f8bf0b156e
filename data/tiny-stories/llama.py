"""The Llama architecture in plain PyTorch, for training. Parameters have Hugging Face's names.

Shapes: B sequences of T tokens, hidden size H, Hq query and Hk key/value heads of D, vocabulary V.
"""

# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Config = dict[str, Any]


def rope_frequencies(config: Config) -> Tensor:
    """Angles per position of each of the D/2 pairs, float32, with Llama 3's scaling.

    A pair that turns more than `high_freq_factor` times within the original context keeps its frequency;
    one that turns less than `low_freq_factor` times is slowed by `factor`; between them the two are
    blended. Source: Llama 3.1, `transformers.modeling_rope_utils._compute_llama3_parameters`.
    """
    head_dim = config["head_dim"]
    inv_freq = config["rope_theta"] ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    scaling = config["rope_scaling"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (keep * inv_freq + (1 - keep) * inv_freq / scaling["factor"]).float()


def rope_kinds(config: Config) -> dict[str, int]:
    """How many pairs keep their frequency, are blended, and are slowed in full."""
    plain = config["rope_theta"] ** -(torch.arange(0, config["head_dim"], 2).double() / config["head_dim"])
    ratio = (rope_frequencies(config) / plain).double()
    kept = int((ratio > 1 - 1e-6).sum())
    slowed = int((ratio < 1 / config["rope_scaling"]["factor"] + 1e-6).sum())
    return {"kept": kept, "blended": len(ratio) - kept - slowed, "slowed": slowed}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on (B, heads, T, D): element i turns with element i + D/2, by the angles of (T, D/2)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def share_of_last(x: Tensor) -> Tensor:
    """(..., H) -> (...): what share of the sum of squares the last element has."""
    return x[..., -1].square() / x.square().sum(-1)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Causal attention in which each key/value head serves Hq/Hk query heads."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, self.head_dim = config["hidden_size"], config["head_dim"]
        self.num_heads, self.num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.q_proj = nn.Linear(hidden, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Norm, attention, norm, feed-forward, each added to the residual stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """Embedding, layers and final norm: what Hugging Face calls `model`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])


class Llama(nn.Module):
    """The whole model; the LM head is the embedding table.

    Parameters
    ----------
    config : dict
        The contents of a Llama `config.json` with tied embeddings and Llama 3's rope scaling.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.model = Body(config)
        positions = torch.arange(config["max_position_embeddings"]).float()
        angles = positions[:, None] * rope_frequencies(config)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialize(config["initializer_range"], config["num_hidden_layers"])

    def _initialize(self, std: float, num_layers: int) -> None:
        """Normal weights; those that write to the residual stream are smaller, by the number of writes."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=std / math.sqrt(2 * num_layers) if writes else std)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, T, V) of token ids (B, T), and the last channel's share of the residual stream.

        The share (layers + 1, B, T) is of the sum of squares, after the embedding and after each layer.
        """
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = self.model.embed_tokens(ids)
        shares = [share_of_last(x)]
        for layer in self.model.layers:
            x = layer(x, cos, sin)
            shares.append(share_of_last(x))
        logits = F.linear(self.model.norm(x), self.model.embed_tokens.weight)
        return logits, torch.stack(shares)
