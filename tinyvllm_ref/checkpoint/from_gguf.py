"""A Llama-family GGUF file made into a model folder: BF16 safetensors, config.json, tokenizer.json.

GGUF is llama.cpp's format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): one file with
quantised weights, sizes and tokenizer. Reading it needs the ``gguf`` package, which is not among this
project's requirements.

Two things are not as a Llama's are elsewhere. The rows of Q and K are permuted: llama.cpp rotates adjacent
pairs of columns, Hugging Face's checkpoints (and this engine) pair column i of a head with i + D/2, so the
rows of each head lie as 0, D/2, 1, D/2 + 1, ... And the tokenizer is a list of tokens and merges that names
its splitting rule only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tinyvllm_ref.checkpoint.safetensors import write_safetensors
from tinyvllm_ref.checkpoint.weights import CheckpointError, tensor_shapes
from tinyvllm_ref.config import ModelConfig
from tinyvllm_ref.installing import pip_install

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

# How text is split before merging, by the name that GGUF gives the rule.
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_SPLITTERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_BYTE_LEVEL],
    "smollm": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
}
_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


def convert_gguf(path: str | os.PathLike[str], folder: str | os.PathLike[str], origin: str) -> None:
    """Write a model folder from a GGUF file.

    Parameters
    ----------
    path : str or PathLike
        The GGUF file: architecture ``llama``, tokenizer model ``gpt2``.
    folder : str or PathLike
        Where the files go; it is made if need be.
    origin : str
        Where the weights came from, kept in the metadata of the safetensors file.

    Raises
    ------
    ImportError
        The ``gguf`` package is not installed.
    CheckpointError
        The file is of another kind, or lacks a tensor.
    """
    gguf = import_gguf()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    config = _make_config(path, fields, tied="output.weight" not in tensors)
    _write_json(folder / "config.json", config)
    for name, content in _make_tokenizer(path, fields).items():
        _write_json(folder / name, content)

    shapes = tensor_shapes(ModelConfig.from_dict(config, source=str(path)))
    missing = [name for name in shapes if _gguf_name(name) not in tensors]
    if missing:
        raise CheckpointError(f"{path}: lacks {', '.join(_gguf_name(name) for name in missing[:5])}")

    def chunks() -> Iterator[memoryview]:
        for name, shape in shapes.items():
            tensor = tensors[_gguf_name(name)]
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            if values.shape != shape:
                raise CheckpointError(f"{path}: {tensor.name} is {values.shape}; it must be {shape}")
            if name.endswith("q_proj.weight"):
                values = unpermute_heads(values, config["num_attention_heads"])
            elif name.endswith("k_proj.weight"):
                values = unpermute_heads(values, config["num_key_value_heads"])
            yield _round_to_bf16(values).data

    layout = {name: ("BF16", shape) for name, shape in shapes.items()}
    write_safetensors(folder / "model.safetensors", layout, chunks(), {"format": "pt", "origin": origin})


def import_gguf() -> Any:
    """The ``gguf`` package, or an ImportError that says how to get it."""
    try:
        import gguf
    except ImportError:
        raise ImportError(f"a GGUF file is read with the gguf package: {pip_install('gguf')}") from None
    return gguf


def unpermute_heads(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's order of the rows of Q or K: (heads * D, columns), same shape.

    Within a head, rows 0, 1, 2, 3, ... hold what belongs to 0, D/2, 1, D/2 + 1, ...

    >>> unpermute_heads(np.array([[0], [2], [1], [3]]), num_heads=1).ravel().tolist()
    [0, 1, 2, 3]
    """
    head_dim = rows.shape[0] // num_heads
    pairs = rows.reshape(num_heads, head_dim // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _round_to_bf16(values: np.ndarray) -> np.ndarray:
    """Finite float32 to the bits of bfloat16, to nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
        np.uint16
    )


def _gguf_name(name: str) -> str:
    """``model.layers.3.mlp.up_proj.weight`` is ``blk.3.ffn_up.weight`` there."""
    stem = name.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.weight"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{_NAMES[part]}.weight"


def _make_config(path: Any, fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    if fields.get("general.architecture") != "llama":
        raise CheckpointError(
            f"{path}: the architecture is {fields.get('general.architecture')!r}, must be 'llama'"
        )
    for name in fields:
        if name.startswith("llama.rope.scaling.") or name == "llama.expert_count":
            raise CheckpointError(f"{path}: {name} is {fields[name]!r}; it is not supported")
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "head_dim": fields.get("llama.rope.dimension_count", fields["llama.embedding_length"] // heads),
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        # Stored as float32; printed as one it is the decimal number that was meant.
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_scaling": None,
        "rope_theta": fields.get("llama.rope.freq_base", 10000.0),
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    }


def _make_tokenizer(path: Any, fields: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json, by file name."""
    kind, splitter = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or splitter not in _SPLITTERS:
        supported = ", ".join(f"gpt2/{name}" for name in _SPLITTERS)
        raise CheckpointError(f"{path}: the tokenizer is {kind}/{splitter}; supported: {supported}")
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, (token, token_kind) in enumerate(zip(tokens, kinds, strict=True))
        if token_kind == _CONTROL_TOKEN
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _SPLITTERS[splitter]},
        "post_processor": None,
        "decoder": {**_BYTE_LEVEL, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }
    settings = {
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "tokenizer_class": "GPT2Tokenizer",
    }
    if "tokenizer.chat_template" in fields:
        settings["chat_template"] = fields["tokenizer.chat_template"]
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
