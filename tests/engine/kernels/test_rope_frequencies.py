"""Frequencies with and without scaling, against the formulas as Hugging Face transformers states them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from tinyvllm_ref.config import ModelConfig, RopeScaling
from tinyvllm_ref.device import cp
from tinyvllm_ref.kernels.rope import rope_frequencies

CONFIG = ModelConfig.from_dict(
    {
        **{"model_type": "llama", "vocab_size": 10, "hidden_size": 64, "intermediate_size": 8},
        **{"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 64, "rope_theta": 500000.0},
    }
)
LLAMA3 = RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)  # of Llama 3.2


def _frequencies(scaling: RopeScaling, head_dim: int = 64) -> np.ndarray:
    made = rope_frequencies(dataclasses.replace(CONFIG, rope_scaling=scaling, head_dim=head_dim))
    assert made.dtype == np.float32
    assert made.shape == (head_dim // 2,)
    return np.asarray(cp.asnumpy(made))


def _plain(head_dim: int = 64) -> np.ndarray:
    return 1.0 / 500000.0 ** (np.arange(0, head_dim, 2) / head_dim)


def _llama3(frequency: float, s: RopeScaling) -> float:
    """One frequency, branch by branch as ``_compute_llama3_parameters``."""
    wavelength = 2 * math.pi / frequency
    if wavelength < s.original_max_position_embeddings / s.high_freq_factor:
        return frequency
    if wavelength > s.original_max_position_embeddings / s.low_freq_factor:
        return frequency / s.factor
    smooth = s.original_max_position_embeddings / wavelength - s.low_freq_factor
    smooth /= s.high_freq_factor - s.low_freq_factor
    return (1 - smooth) * frequency / s.factor + smooth * frequency


@pytest.mark.parametrize("head_dim", [2, 26, 64, 128])
def test_plain(head_dim: int) -> None:
    np.testing.assert_array_equal(_frequencies(RopeScaling(), head_dim), _plain(head_dim).astype(np.float32))


def test_linear() -> None:
    np.testing.assert_allclose(_frequencies(RopeScaling("linear", 4.0)), _plain() / 4, rtol=1e-7)


def test_llama3() -> None:
    want = np.array([_llama3(f, LLAMA3) for f in _plain()])
    np.testing.assert_allclose(_frequencies(LLAMA3), want, rtol=2e-7)
    ratio = want / _plain()
    assert (ratio == 1).any()
    assert np.isclose(ratio, 1 / 32).any()
    assert ((ratio > 0.04) & (ratio < 0.9)).any()  # all three branches were taken
