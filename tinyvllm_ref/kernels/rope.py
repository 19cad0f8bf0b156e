"""Rotary positions: the frequencies of a model, and the launch of ``rope.cu``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..config import ModelConfig, RopeScaling
from ..device import cp
from .launch import Contract, Int, ceil_div
from .source import kernel

_contract = Contract(
    "rope", q="float32 T Hq D", k="float32 T Hk D", positions="int32 T", inv_freq="float32 P"
)
_THREADS, _MAX_BLOCKS = 32, 4096


def rope_frequencies(config: ModelConfig) -> Any:
    """Radians per token of each pair of columns, with the model's scaling.

    Parameters
    ----------
    config : ModelConfig

    Returns
    -------
    (D/2,) float32, on the device
        Computed in float64 and rounded once.

    Notes
    -----
    theta^(-2i/D) (Su and others, RoFormer, 2021). "linear" divides it by the factor. "llama3" is the rule of
    ``_compute_llama3_parameters`` in Hugging Face transformers.
    """
    pairs = np.arange(config.head_dim // 2, dtype=np.float64)
    frequencies = config.rope_theta ** (-2.0 * pairs / config.head_dim)
    return cp.asarray(_scaled(frequencies, config.rope_scaling).astype(np.float32))


def _scaled(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Frequencies after scaling, in float64."""
    if scaling.rope_type == "default":
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    if scaling.rope_type != "llama3":
        raise ValueError(
            f"rope_frequencies: rope_type is {scaling.rope_type!r}; it must be default, linear or llama3"
        )
    # How often a pair turns within the context of the first training. Below `low` turns it is slowed by the
    # whole factor, above `high` turns it is kept, and between the two are blended.
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray((1 - kept) * frequencies / scaling.factor + kept * frequencies)


def rope(q: Any, k: Any, positions: Any, inv_freq: Any) -> tuple[Any, Any]:
    """Rotate queries and keys by their positions, in place.

    Parameters
    ----------
    q : (T, Hq, D) float32
    k : (T, Hk, D) float32
    positions : (T,) int32
        Index of each token in its own sequence.
    inv_freq : (D/2,) float32
        Of :func:`rope_frequencies`.

    Returns
    -------
    q, k

    Raises
    ------
    ValueError
        A shape, dtype or layout is wrong.
    """
    sizes = _contract(q, k, positions, inv_freq)
    tokens, half, head_dim = sizes["T"], sizes["P"], sizes["D"]
    _contract.check("head_dim", head_dim, 2 * half == head_dim, f"2 * {half}, twice the length of inv_freq")
    if tokens and half:
        grid = (min(_MAX_BLOCKS, ceil_div(tokens * half, _THREADS)),)
        args = (q, k, positions, inv_freq, Int(tokens), Int(sizes["Hq"]), Int(sizes["Hk"]), Int(half))
        kernel("rope")(grid, (_THREADS,), args)
    return q, k
