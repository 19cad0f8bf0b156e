"""The tensors of a checkpoint, checked against its config, and how they are put together for the engine.

>>> config, views = open_checkpoint("data/tiny-stories")  # doctest: +SKIP
>>> for group in weight_plan(config):  # doctest: +SKIP
...     print(group.name, group.shape, group.sources)
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tinyvllm_ref.checkpoint.safetensors import TensorView, read_safetensors
from tinyvllm_ref.config import ModelConfig

WEIGHT_DTYPES = ("BF16", "F16", "F32")
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".gguf")
_NAMED_AT_MOST = 5  # tensors that one message lists


class CheckpointError(ValueError):
    """A checkpoint's files do not fit each other or its config; the message names file and tensor."""


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """One weight of the engine: tensors of the checkpoint, stacked by rows.

    Attributes
    ----------
    name : str
        Such as ``"layers.0.qkv"``.
    shape : tuple of int
        Of the whole.
    sources : tuple of str
        The tensors that are its rows, from the first to the last; most weights have one.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]


def weight_plan(config: ModelConfig) -> list[WeightGroup]:
    """Every weight of the engine, in the order in which a forward pass reads them.

    Query, key and value rows make one matrix, so that one product serves the three; gate and up likewise.
    Where the embedding table is also the LM head there is no ``"lm_head"``.

    Returns
    -------
    list of WeightGroup
        ``"embed_tokens"`` (V, H); for each layer i ``"layers.i."`` and ``"input_layernorm"`` (H,), ``"qkv"``
        (Hq*D + 2*Hk*D, H), ``"o_proj"`` (H, Hq*D), ``"post_attention_layernorm"`` (H,), ``"gate_up"`` (2F,
        H), ``"down_proj"`` (H, F); then ``"norm"`` (H,) and ``"lm_head"`` (V, H).
    """
    hidden, ffn, q_size, kv_size = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    plan = [WeightGroup("embed_tokens", (config.vocab_size, hidden), ("model.embed_tokens.weight",))]
    for layer in range(config.num_hidden_layers):
        for name, shape, parts in (
            ("input_layernorm", (hidden,), ("input_layernorm",)),
            (
                "qkv",
                (q_size + 2 * kv_size, hidden),
                ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            ),
            ("o_proj", (hidden, q_size), ("self_attn.o_proj",)),
            ("post_attention_layernorm", (hidden,), ("post_attention_layernorm",)),
            ("gate_up", (2 * ffn, hidden), ("mlp.gate_proj", "mlp.up_proj")),
            ("down_proj", (hidden, ffn), ("mlp.down_proj",)),
        ):
            sources = tuple(f"model.layers.{layer}.{part}.weight" for part in parts)
            plan.append(WeightGroup(f"layers.{layer}.{name}", shape, sources))
    plan.append(WeightGroup("norm", (hidden,), ("model.norm.weight",)))
    if not config.tie_word_embeddings:
        plan.append(WeightGroup("lm_head", (config.vocab_size, hidden), ("lm_head.weight",)))
    return plan


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name (Hugging Face's) and shape of every tensor that a checkpoint of this config must have."""
    rows = {"q_proj": config.q_size, "k_proj": config.kv_size, "v_proj": config.kv_size}
    shapes: dict[str, tuple[int, ...]] = {}
    for group in weight_plan(config):
        for source in group.sources:
            own_rows = rows.get(source.split(".")[-2], group.shape[0] // len(group.sources))
            shapes[source] = (own_rows, *group.shape[1:])
    return shapes


def open_checkpoint(
    folder: str | os.PathLike[str], read: Callable[..., Mapping[str, TensorView]] | None = None
) -> tuple[ModelConfig, dict[str, TensorView]]:
    """Read a model's config, map its weights, and check that they are the ones that the config describes.

    Parameters
    ----------
    folder : str or PathLike
        Holds ``config.json`` and either ``model.safetensors`` or the shards that
        ``model.safetensors.index.json`` lists.
    read : callable, optional
        Reads one file; by default :func:`~tinyvllm_ref.checkpoint.safetensors.read_safetensors`.

    Returns
    -------
    config : ModelConfig
    views : dict of str to TensorView
        Exactly the tensors of :func:`tensor_shapes`; the bytes stay in the files.

    Raises
    ------
    FileNotFoundError
        A file is missing.
    ConfigError, SafetensorsError, CheckpointError
        The config is not supported; a file is malformed; tensors are missing, unexpected, or of the wrong
        shape or dtype.
    """
    folder = Path(folder)
    config = ModelConfig.from_json(folder)
    views = _map_files(folder, read or read_safetensors)
    expected = tensor_shapes(config)
    for name in [name for name in views if name not in expected and _is_redundant(name, config)]:
        del views[name]
    _report(folder, "tensors are missing", [name for name in expected if name not in views])
    _report(folder, "tensors are not of this architecture", [name for name in views if name not in expected])
    shapes = [
        f"{name} is {views[name].shape}, must be {shape}"
        for name, shape in expected.items()
        if views[name].shape != shape
    ]
    _report(folder, "tensors have another shape than config.json says", shapes)
    kinds = [f"{name} is {view.dtype}" for name, view in views.items() if view.dtype not in WEIGHT_DTYPES]
    _report(folder, f"tensors are of a dtype other than {', '.join(WEIGHT_DTYPES)}", kinds)
    return config, {name: views[name] for name in expected}


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Tensors that checkpoints may carry and nobody reads: RoPE's constants, a copy of a tied head."""
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _report(folder: Path, fault: str, items: list[str]) -> None:
    if items:
        more = f", and {len(items) - _NAMED_AT_MOST} more" if len(items) > _NAMED_AT_MOST else ""
        raise CheckpointError(f"{folder}: {len(items)} {fault}: {', '.join(items[:_NAMED_AT_MOST])}{more}")


def _map_files(folder: Path, read: Callable[..., Mapping[str, TensorView]]) -> dict[str, TensorView]:
    """All tensors of the one file, or of the shards that the index lists."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return dict(read(single))
    if not index.is_file():
        others = sorted(
            path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf")
        )
        hint = f"; {', '.join(others)} would have to be converted" if others else ""
        raise FileNotFoundError(f"{folder}: has neither {single.name} nor {index.name}{hint}")
    weight_map = _read_index(index)
    views: dict[str, TensorView] = {}
    shards = list(dict.fromkeys(weight_map.values()))
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    if absent:
        raise FileNotFoundError(f"{index}: lists {', '.join(absent)}, which the folder has not")
    for shard in shards:
        tensors = read(folder / shard)
        _check_shard(index, shard, weight_map, tensors)
        views.update(tensors)
    return views


def _read_index(index: Path) -> Mapping[str, str]:
    """The index's map from tensor to the file name of its shard."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index}: is not JSON with a weight_map: {error!r}") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map must be a non-empty object")
    for name, shard in weight_map.items():
        # A name with a folder in it could lead anywhere on the machine.
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            fault = (
                f"the shard of {name!r} is {shard!r}; it must be the name of a .safetensors file beside it"
            )
            raise CheckpointError(f"{index}: {fault}")
    return weight_map


def _check_shard(index: Path, shard: str, weight_map: Mapping[str, str], tensors: Iterable[str]) -> None:
    listed = {name for name, file in weight_map.items() if file == shard}
    _report(index, f"tensors are listed for {shard} but not in it", sorted(listed - set(tensors)))
    _report(index, f"tensors are in {shard} but not listed for it", sorted(set(tensors) - listed))
