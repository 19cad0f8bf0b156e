"""What a model is (:class:`ModelConfig`, read from its ``config.json``) and how the engine runs it
(:class:`EngineConfig`). Both are frozen: what is measured later, such as the number of KV blocks that fit
into memory, is passed on as a value and never written back.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

SUPPORTED_ARCHITECTURES = {"llama": "LlamaForCausalLM"}

# Fields that change the arithmetic, with the values under which they change nothing. Any other value is
# refused. Fields that are in neither list are about training or about other software.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", None),
    "partial_rotary_factor": (1, 1.0, None),
    "rope_interleaved": (False, None),
    "sliding_window": (None,),
    "quantization_config": (None,),
    "compression_config": (None,),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "use_qk_norm": (False, None),
    "qk_norm": (False, None),
    "no_rope_layers": (None,),
    "num_local_experts": (None, 1),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (1, 1.0, None),
    "logits_scaling": (1, 1.0, None),
    "embedding_multiplier": (1, 1.0, None),
    "residual_multiplier": (1, 1.0, None),
    "attention_multiplier": (None,),
}


class ConfigError(ValueError):
    """A configuration cannot be used; the message names the field, the value and what would be right."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for longer contexts.

    Attributes
    ----------
    rope_type : {"default", "linear", "llama3"}
        ``"linear"`` divides all frequencies by `factor`. ``"llama3"`` divides the slow ones, keeps the fast
        ones and blends between (as ``_compute_llama3_parameters`` of Hugging Face transformers does).
    factor : float
        At least 1.
    low_freq_factor, high_freq_factor : float
        ``"llama3"`` only: `original_max_position_embeddings` divided by these are the wavelengths, in tokens,
        where blending begins and ends.
    original_max_position_embeddings : int
        ``"llama3"`` only: the context length of the first training.
    """

    rope_type: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes and constants of a Llama-family model, under the names that ``config.json`` uses.

    Attributes
    ----------
    vocab_size, hidden_size, intermediate_size, num_hidden_layers : int
        V, H, F of the shapes in this project's docstrings, and the number of layers.
    num_attention_heads, num_key_value_heads, head_dim : int
        Hq, Hk and D. Query head h reads key and value head ``h // (Hq // Hk)``.
    max_position_embeddings : int
        The longest context, in tokens.
    rms_norm_eps : float
        Added to the mean square inside the root.
    rope_theta : float
        The base of the rotary frequencies.
    rope_scaling : RopeScaling
        Their scaling.
    tie_word_embeddings : bool
        The LM head is the embedding table.
    bos_token_id : int or None
        Begins a text.
    eos_token_ids : tuple of int
        Any of these ends a text: those of ``config.json``, then those that ``generation_config.json`` adds.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def q_size(self) -> int:
        """Columns of all query heads together, Hq * D."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of all key heads (or all value heads) together, Hk * D."""
        return self.num_key_value_heads * self.head_dim

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take in all layers, in BF16."""
        return 2 * self.num_hidden_layers * self.kv_size * 2

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> ModelConfig:
        """Read a model's ``config.json``, and the end tokens of the ``generation_config.json`` beside it.

        Parameters
        ----------
        path : str or PathLike
            The model's folder, or its ``config.json``.

        Raises
        ------
        FileNotFoundError
            There is no ``config.json``.
        ConfigError
            It is not JSON, a size is missing or impossible, or the model is of a kind that is not supported.
        """
        path = Path(path)
        if path.is_dir():
            path = path / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"no config.json at {path}; a model's folder has one beside its weights")
        generation = path.with_name("generation_config.json")
        more = _load_json(generation) if generation.is_file() else {}
        return cls.from_dict(_load_json(path), more, str(path))

    @classmethod
    def from_dict(
        cls,
        fields: Mapping[str, Any],
        generation: Mapping[str, Any] | None = None,
        source: str = "config.json",
    ) -> ModelConfig:
        """The same from parsed JSON; `source` names it in error messages.

        Raises
        ------
        ConfigError
            As for :meth:`from_json`.
        """
        read = _Fields(fields, source)
        _refuse_unsupported(read)
        hidden_size = read.size("hidden_size")
        heads = read.size("num_attention_heads")
        kv_heads = read.size("num_key_value_heads", default=heads)
        if heads % kv_heads:
            read.fail("num_key_value_heads", f"must divide num_attention_heads ({heads})")
        if fields.get("head_dim") is None and hidden_size % heads:
            read.fail("num_attention_heads", f"must divide hidden_size ({hidden_size}), or head_dim be given")
        head_dim = read.size("head_dim", default=hidden_size // heads)
        if head_dim % 2:
            raise ConfigError(
                f"{source}: head_dim is {head_dim}; it must be even, for RoPE's pairs of columns"
            )
        theta, scaling = _read_rope(read)
        return cls(
            vocab_size=read.size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=read.size("intermediate_size"),
            num_hidden_layers=read.size("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=read.size("max_position_embeddings", default=2048),
            rms_norm_eps=read.positive("rms_norm_eps", default=1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=read.flag("tie_word_embeddings", default=False),
            bos_token_id=next(iter(read.token_ids("bos_token_id")), None),
            eos_token_ids=_end_tokens(read, generation or {}),
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How an engine runs a model.

    Attributes
    ----------
    max_num_seqs : int
        The most requests that run at once.
    max_num_batched_tokens : int
        The most tokens in one step, prefill and decode together.
    block_size : int
        Token slots in one block of the KV cache.
    num_blocks : int or None
        Blocks of the KV cache. None: as many as `memory_fraction` of the device's memory leaves room for.
    memory_fraction : float
        The share of the device's memory that weights, activations and KV cache may take together.
    max_model_len : int or None
        The most tokens of one request, prompt and completion together. None: the model's own limit, or what
        the KV cache can hold where that is less.
    batching : {"continuous", "static"}
        ``"static"`` admits a batch and lets no other request in before all of it has finished; it is here to
        be compared with.
    enable_chunked_prefill : bool
        A prompt longer than what is left of a step's tokens is computed in pieces over several steps.
    seed : int
        Seeds the requests that have no seed of their own.
    fast_path : {"auto", "on", "off"}
        Fused kernels and recorded steps (``fast_path.py``) in place of one part after the other. ``"auto"``: on a
        card, where all parts are the reference's and the model is such as its kernels are made for. ``"on"``: also
        in the emulation, where it is slower; an error where it can not be.

    Raises
    ------
    ConfigError
        A value is of the wrong type or outside its range.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    num_blocks: int | None = None
    memory_fraction: float = 0.9
    max_model_len: int | None = None
    batching: Literal["continuous", "static"] = "continuous"
    enable_chunked_prefill: bool = True
    seed: int = 0
    fast_path: Literal["auto", "on", "off"] = "auto"

    def __post_init__(self) -> None:
        read = _Fields({name: getattr(self, name) for name in self.__slots__}, "EngineConfig")
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            read.size(name)
        for name in ("num_blocks", "max_model_len"):
            read.size(name, default=1)
        if read.positive("memory_fraction") > 1:
            read.fail("memory_fraction", "must be above 0 and at most 1")
        if self.batching not in ("continuous", "static"):
            read.fail("batching", "must be 'continuous' or 'static'")
        if self.fast_path not in ("auto", "on", "off"):
            read.fail("fast_path", "must be 'auto', 'on' or 'off'")
        read.flag("enable_chunked_prefill")
        if type(self.seed) is not int or self.seed < 0:
            read.fail("seed", "must be a non-negative integer")
        limit = self.max_model_len
        if not self.enable_chunked_prefill and limit is not None and limit > self.max_num_batched_tokens:
            read.fail(
                "max_model_len",
                f"must be at most max_num_batched_tokens ({self.max_num_batched_tokens}) without chunked"
                " prefill, because a whole prompt must fit into one step",
            )


_REQUIRED: Any = object()


class _Fields:
    """Typed access to the fields of one JSON object; a failure names the object, the field and the value."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def fail(self, name: str, rule: str) -> Any:
        raise ConfigError(f"{self.source}: {name} is {self.values.get(name)!r}; it {rule}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ConfigError(f"{self.source}: {name} is missing")
        return default

    def size(self, name: str, default: int = _REQUIRED) -> int:
        value = self._get(name, default)
        if type(value) is not int or value < 1:
            self.fail(name, "must be a positive integer")
        return int(value)

    def positive(self, name: str, default: float = _REQUIRED) -> float:
        value = self._get(name, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            self.fail(name, "must be a positive finite number")
        return float(value)

    def flag(self, name: str, default: bool = _REQUIRED) -> bool:
        value = self._get(name, default)
        if type(value) is not bool:
            self.fail(name, "must be true or false")
        return bool(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id, a list of ids, or nothing."""
        value = self._get(name, [])
        ids = value if isinstance(value, list) else [value]
        if any(type(token) is not int or token < 0 for token in ids):
            self.fail(name, "must be a token id (a non-negative integer) or a list of them")
        return tuple(ids)


def _load_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a JSON {type(value).__name__}; it must hold an object")
    return value


def _refuse_unsupported(read: _Fields) -> None:
    """Refuse by name what this engine would silently compute wrongly."""
    kinds = ", ".join(SUPPORTED_ARCHITECTURES)
    model_type = read.values.get("model_type")
    if not isinstance(model_type, str) or model_type not in SUPPORTED_ARCHITECTURES:
        read.fail("model_type", f"must be one of the supported: {kinds}")
    architecture = SUPPORTED_ARCHITECTURES[str(model_type)]
    if read.values.get("architectures") not in (None, [], [architecture]):
        read.fail("architectures", f"must be ['{architecture}'] for model_type '{model_type}'")
    for name, neutral in _NEUTRAL_VALUES.items():
        value = read.values.get(name)
        # By type too: False is not the 0 or 1 of another field.
        if not any(value == allowed and type(value) is type(allowed) for allowed in neutral):
            read.fail(name, f"is not supported; supported: {', '.join(json.dumps(v) for v in neutral)}")
    layer_types = read.values.get("layer_types")
    if layer_types is not None and (
        not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types)
    ):
        read.fail("layer_types", "must be 'full_attention' in every layer")


def _read_rope(read: _Fields) -> tuple[float, RopeScaling]:
    """(theta, scaling) from either spelling.

    The older one has ``rope_theta`` beside ``rope_scaling`` (null for none; its kind under ``rope_type``, or
    earlier ``type``), the newer one has both in ``rope_parameters``.
    """
    old, new = read.values.get("rope_scaling"), read.values.get("rope_parameters")
    for name, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, Mapping):
            read.fail(name, "must be an object or null")
    # transformers 5 writes rope_parameters and may repeat rope_theta; both may stand there if they agree.
    if new is not None:
        rope = _Fields(new, f"{read.source}: rope_parameters")
        theta = rope.positive("rope_theta", default=read.positive("rope_theta", default=10000.0))
        if read.positive("rope_theta", default=theta) != theta:
            read.fail("rope_theta", f"must agree with rope_parameters, which has {theta}")
        scaling = _read_scaling(rope)
        if old is not None and _read_scaling(_Fields(old, f"{read.source}: rope_scaling")) != scaling:
            read.fail("rope_scaling", f"must agree with rope_parameters ({new!r})")
        return theta, scaling
    return read.positive("rope_theta", default=10000.0), _read_scaling(
        _Fields(old or {}, f"{read.source}: rope_scaling")
    )


def _read_scaling(rope: _Fields) -> RopeScaling:
    if rope.values.get("partial_rotary_factor") not in (None, 1):
        rope.fail("partial_rotary_factor", "is not supported; supported: 1")
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind in (None, "default"):
        return RopeScaling()
    name = "rope_type" if "rope_type" in rope.values else "type"
    if kind not in ("linear", "llama3"):
        rope.fail(name, "must be one of the supported: default, linear, llama3")
    factor = rope.positive("factor")
    if factor < 1:
        rope.fail("factor", "must be at least 1")
    if kind == "linear":
        return RopeScaling("linear", factor)
    low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    if low >= high:
        rope.fail("low_freq_factor", f"must be below high_freq_factor ({high})")
    return RopeScaling("llama3", factor, low, high, rope.size("original_max_position_embeddings"))


def _end_tokens(read: _Fields, generation: Mapping[str, Any]) -> tuple[int, ...]:
    more = _Fields(generation, "generation_config.json").token_ids("eos_token_id")
    return tuple(dict.fromkeys(read.token_ids("eos_token_id") + more))
