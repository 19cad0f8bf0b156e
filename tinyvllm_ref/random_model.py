"""Models of well-known sizes with random weights and no files: how fast an engine is does not depend on what it says.

>>> llm = random_llm("llama-3.2-1b")  # doctest: +SKIP
>>> llm.generate([1, 2, 3], SamplingParams(max_tokens=4))[0].outputs[0].token_ids  # doctest: +SKIP
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from .assembly import Parts, build_model
from .checkpoint.load import allocate_weights
from .config import ModelConfig
from .kernels.random_normal import random_normal
from .llm import LLM
from .model_runner import engine_checks

DEVIATION = 0.02  # of every matrix: the `initializer_range` of these models, about
_ONE = 0x3F80  # 1 in bfloat16


def _llama3(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _fields(**sizes: Any) -> dict[str, Any]:
    common = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}
    return common | {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False} | sizes


# Each as its config.json has it, in the hub's repository that is named above it.
PRESETS: dict[str, dict[str, Any]] = {
    # huggingface.co/meta-llama/Llama-3.2-1B
    "llama-3.2-1b": _fields(
        **{"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64},
        **{"max_position_embeddings": 131072, "rope_theta": 500000.0, "rope_scaling": _llama3(32.0)},
        **{"tie_word_embeddings": True, "bos_token_id": 128000, "eos_token_id": 128001},
    ),
    # huggingface.co/meta-llama/Llama-3.2-3B
    "llama-3.2-3b": _fields(
        **{"vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28},
        **{"num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128},
        **{"max_position_embeddings": 131072, "rope_theta": 500000.0, "rope_scaling": _llama3(32.0)},
        **{"tie_word_embeddings": True, "bos_token_id": 128000, "eos_token_id": 128001},
    ),
    # huggingface.co/meta-llama/Llama-3.1-8B
    "llama-3.1-8b": _fields(
        **{"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8},
        **{"max_position_embeddings": 131072, "rope_theta": 500000.0, "rope_scaling": _llama3(8.0)},
        **{"tie_word_embeddings": False, "bos_token_id": 128000, "eos_token_id": 128001},
    ),
    # huggingface.co/HuggingFaceTB/SmolLM2-135M
    "smollm2-135m": _fields(
        **{"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30},
        **{"num_attention_heads": 9, "num_key_value_heads": 3},
        **{"max_position_embeddings": 8192, "rope_theta": 100000.0, "rope_scaling": None},
        **{"tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0},
    ),
    # huggingface.co/HuggingFaceTB/SmolLM2-360M
    "smollm2-360m": _fields(
        **{"vocab_size": 49152, "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32},
        **{"num_attention_heads": 15, "num_key_value_heads": 5},
        **{"max_position_embeddings": 8192, "rope_theta": 100000.0, "rope_scaling": None},
        **{"tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0},
    ),
    # huggingface.co/HuggingFaceTB/SmolLM2-1.7B
    "smollm2-1.7b": _fields(
        **{"vocab_size": 49152, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24},
        **{"num_attention_heads": 32, "num_key_value_heads": 32},
        **{"max_position_embeddings": 8192, "rope_theta": 130000.0, "rope_scaling": None},
        **{"tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0},
    ),
    # huggingface.co/TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T
    "tinyllama-1.1b": _fields(
        **{"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22},
        **{"num_attention_heads": 32, "num_key_value_heads": 4},
        **{"max_position_embeddings": 2048, "rope_theta": 10000.0, "rope_scaling": None},
        **{"tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2},
    ),
}


def preset_config(name: str) -> ModelConfig:
    """The sizes of a model of :data:`PRESETS`.

    Raises
    ------
    ValueError
        There is none of that name; the message lists those that there are.
    """
    if name not in PRESETS:
        raise ValueError(f"no sizes are known by the name {name!r}; there are {', '.join(PRESETS)}")
    return ModelConfig.from_dict(PRESETS[name], source=name)


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, Any]:
    """Weights that no training has seen: matrices normal with a standard deviation of 0.02, norms 1.

    Parameters
    ----------
    config : ModelConfig
    seed : int
        0 to 2**32 - 1. A weight depends on it, on the weight's name and on its shape.

    Returns
    -------
    dict of str to (...) bf16, on the device
        Laid out as :func:`~tinyvllm_ref.checkpoint.load.load_weights` does it. They are written as bfloat16 where
        they stay: no other copy is made, of any precision.

    Raises
    ------
    ValueError
        The seed is out of its range.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"random_weights: seed is {seed!r}; it must be from 0 to 2**32 - 1")
    weights = allocate_weights(config)
    with engine_checks():
        for name, weight in weights.items():
            if weight.ndim == 1:
                weight.fill(_ONE)
            else:
                random_normal(seed << 32 | zlib.crc32(name.encode()), DEVIATION, weight)
    return weights


def random_llm(model: str | ModelConfig, *, seed: int = 0, **options: Any) -> LLM:
    """An engine around random weights; prompts are token ids, for there is no tokenizer.

    Parameters
    ----------
    model : str or ModelConfig
        A name of :data:`PRESETS`, or sizes of one's own.
    seed : int
        Of the weights, as :func:`random_weights` takes it.
    **options
        Fields of :class:`~tinyvllm_ref.config.EngineConfig`, or ``config=`` with all of them.

    Returns
    -------
    LLM

    Raises
    ------
    ValueError
        The name is unknown, or an option cannot be used.
    """
    config = preset_config(model) if isinstance(model, str) else model

    def load(views: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
        return random_weights(config, seed)

    # In the place of what reads a checkpoint; all that computes is the engine's own.
    parts = Parts().replace(owner="reference", load_weights=load)
    return LLM.from_model(build_model(config, {}, parts), **options)
