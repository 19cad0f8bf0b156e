"""What a step has to move and to compute at least, from the model's sizes alone.

Weights are read once a step, however many requests share it; each request reads its own keys and values. Activations
and logits are left out: they fit into a card's caches.
"""

from __future__ import annotations

import math

from ..checkpoint.weights import WeightGroup, weight_plan
from ..config import ModelConfig

_BF16 = 2  # bytes


def parameters(config: ModelConfig) -> int:
    """Numbers that the model is made of; a tied LM head counts once."""
    return sum(math.prod(group.shape) for group in weight_plan(config))


def decode_bytes(config: ModelConfig, batch: int, context: float) -> float:
    """The fewest bytes of a step in which every request gets one token.

    Parameters
    ----------
    config : ModelConfig
    batch : int
        Requests.
    context : float
        Tokens of a request with the step's own, on average: the keys and values of all but the last are read, those
        of the last are written.

    Returns
    -------
    float
        All layers, the last norm and the LM head once; one row of the embedding table for each request; the cache.
    """
    weights = sum(math.prod(group.shape) for group in weight_plan(config) if _is_read_whole(group, config))
    rows = batch * config.hidden_size
    return _BF16 * (weights + rows) + batch * context * config.kv_bytes_per_token


def prefill_flops(config: ModelConfig, batch: int, prompt: int) -> int:
    """Floating-point operations of computing prompts, a multiply-add being two.

    Matrix products of all tokens, causal attention (two products of D numbers for each query, head and earlier key),
    and the LM head for the last token of each prompt.
    """
    matrices = sum(
        math.prod(group.shape)
        for group in weight_plan(config)
        if group.name.startswith("layers.") and len(group.shape) == 2
    )
    pairs = prompt * (prompt + 1) // 2
    attention = 4 * config.num_hidden_layers * config.q_size * pairs
    head = 2 * config.vocab_size * config.hidden_size
    return batch * (2 * prompt * matrices + attention + head)


def _is_read_whole(group: WeightGroup, config: ModelConfig) -> bool:
    """All but an embedding table that is not the LM head too."""
    return group.name != "embed_tokens" or config.tie_word_embeddings
