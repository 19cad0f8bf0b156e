"""The small random models that golden values exist for, and how their weights are made from a seed.

The repository stores no weights: :func:`build` writes the same checkpoint wherever it runs, with NumPy alone,
both for ``make_golden.py`` (which asks Hugging Face transformers for the values) and for the tests (which ask
the engine).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tinyvllm_ref.checkpoint.safetensors import write_safetensors
from tinyvllm_ref.checkpoint.weights import tensor_shapes
from tinyvllm_ref.config import ModelConfig

VOCAB = 320


@dataclass(frozen=True)
class GoldenModel:
    """One random model: sizes that differ from the base, how its files are written, and its prompts.

    Attributes
    ----------
    name : str
    sizes : dict
        Fields of config.json that differ from the base.
    dtype : {"BF16", "F16", "F32"}
        Of the weights in the files.
    shards : int
        Files that the weights are spread over; more than one have an index.
    prompts : tuple of int
        Lengths, in tokens; the tokens come from the seed.
    seed : int
    gain : float
        A matrix multiplies the size of what goes through it by this: its weights have the standard deviation
        gain / sqrt(columns). 1 is where training starts and about where it stays; see :data:`SHARP` for more.
    """

    name: str
    sizes: dict[str, Any]
    dtype: str = "BF16"
    shards: int = 1
    prompts: tuple[int, ...] = (1, 7, 33)
    seed: int = 0
    gain: float = 1.0


_BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 160,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Short, so that a prompt of 600 tokens reaches the wavelengths that are scaled.
    "original_max_position_embeddings": 64,
}

MODELS = [
    GoldenModel("mha", {"head_dim": 16}),
    GoldenModel("gqa2_f32", {"num_key_value_heads": 2, "head_dim": 64}, dtype="F32", seed=1),
    GoldenModel(
        "gqa3_f16", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}, "F16", seed=2
    ),
    GoldenModel("gqa4_tied", {"num_key_value_heads": 1, "tie_word_embeddings": True, "head_dim": 48}, seed=3),
    GoldenModel("gqa8", {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 16}, seed=4),
    GoldenModel(
        "mqa_tied_f32",
        {
            "hidden_size": 80,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 26,
            "tie_word_embeddings": True,
        },
        "F32",
        seed=5,
    ),
    GoldenModel(
        "head80",
        {"hidden_size": 160, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 80},
        seed=6,
    ),
    GoldenModel(
        "head128_f16", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}, "F16", seed=7
    ),
    GoldenModel(
        "linear_rope",
        {"num_key_value_heads": 2, "rope_scaling": {"type": "linear", "factor": 4.0}},
        prompts=(1, 100, 600),
        seed=8,
    ),
    GoldenModel(
        "llama3_rope",
        {
            "num_key_value_heads": 2,
            "head_dim": 64,
            "rope_theta": 500000.0,
            "rope_scaling": _LLAMA3,
            "tie_word_embeddings": True,
        },
        prompts=(5, 64, 600),
        seed=9,
    ),
    GoldenModel(
        "llama3_rope_parameters",
        {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rope_theta": None,
            "rope_parameters": {**_LLAMA3, "rope_theta": 50000.0},
        },
        prompts=(17, 300),
        seed=10,
    ),
    GoldenModel("sharded", {"num_hidden_layers": 3, "num_key_value_heads": 2}, shards=3, seed=11),
    GoldenModel(
        "sharded_tied_f16",
        {
            "hidden_size": 96,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 26,
            "tie_word_embeddings": True,
        },
        "F16",
        2,
        (2, 63, 64, 65),
        12,
    ),
    GoldenModel(
        "odd_sizes",
        {
            "hidden_size": 90,
            "intermediate_size": 250,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 30,
            "vocab_size": 311,
            "rms_norm_eps": 1e-6,
        },
        prompts=(1, 15, 16, 17, 257),
        seed=13,
    ),
]
# Harder than any trained model: with a gain of 2 the scores of attention are four times as large, so that mostly
# one key takes all the weight, and which one can hang on a rounding to BF16 before it.
SHARP = [
    GoldenModel(
        "sharp",
        {
            "hidden_size": 90,
            "intermediate_size": 250,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 30,
        },
        prompts=(1, 15, 16, 17, 257),
        seed=13,
        gain=2.0,
    ),
    GoldenModel(
        "sharp_gqa_f32",
        {"num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True},
        "F32",
        prompts=(7, 33, 100),
        seed=14,
        gain=2.0,
    ),
]


def config_of(model: GoldenModel) -> dict[str, Any]:
    """The model's config.json."""
    return {name: value for name, value in {**_BASE, **model.sizes}.items() if value is not None}


def prompts_of(model: GoldenModel) -> list[list[int]]:
    """Its prompts, as token ids."""
    rng = np.random.default_rng([model.seed, 1])
    vocab = config_of(model)["vocab_size"]
    return [rng.integers(3, vocab, length).tolist() for length in model.prompts]


def build(model: GoldenModel, folder: Path) -> Path:
    """Write config.json and the weights; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(model)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    rng = np.random.default_rng([model.seed, 0])
    tensors = {}
    for name, shape in tensor_shapes(ModelConfig.from_dict(config)).items():
        values = rng.standard_normal(shape, dtype=np.float32)
        values = 1 + 0.2 * values if len(shape) == 1 else values * np.float32(model.gain / np.sqrt(shape[1]))
        tensors[name] = _encode(values.astype(np.float32), model.dtype)
    names = list(tensors)
    if model.shards == 1:
        _write(folder / "model.safetensors", model.dtype, tensors)
        return folder
    weight_map = {}
    for shard in range(model.shards):
        file = f"model-{shard + 1:05}-of-{model.shards:05}.safetensors"
        part = names[shard :: model.shards]
        _write(folder / file, model.dtype, {name: tensors[name] for name in part})
        weight_map.update(dict.fromkeys(part, file))
    index = {
        "metadata": {"total_size": sum(array.nbytes for array in tensors.values())},
        "weight_map": weight_map,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return folder


def _encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 in the file's dtype, BF16 (rounded to nearest even) as the uint16 of its bits."""
    if dtype == "BF16":
        bits = values.view(np.uint32)
        return (
            (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        ).astype(np.uint16)
    return values.astype({"F16": np.float16, "F32": np.float32}[dtype])


def _write(path: Path, dtype: str, tensors: dict[str, np.ndarray]) -> None:
    layout = {name: (dtype, array.shape) for name, array in tensors.items()}
    write_safetensors(
        path, layout, [np.ascontiguousarray(array).data for array in tensors.values()], {"format": "pt"}
    )
