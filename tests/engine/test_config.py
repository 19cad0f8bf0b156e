"""ModelConfig and EngineConfig: what config.json may say, and what is refused by name."""

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyvllm_ref.config import ConfigError, EngineConfig, ModelConfig, RopeScaling

# As published: a model with tied weights and no scaling, in the older spelling.
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}
LLAMA3_SCALING = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA32 = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3_SCALING,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}


def test_every_size_is_read():
    config = ModelConfig.from_dict(SMOLLM2)
    assert config == ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        rope_scaling=RopeScaling(),
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    assert (config.q_size, config.kv_size) == (576, 192)


def test_llama_3_2():
    config = ModelConfig.from_dict(LLAMA32)
    assert config.rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.kv_bytes_per_token == 32768


def test_both_spellings_of_rope_mean_the_same():
    newer = {name: value for name, value in LLAMA32.items() if not name.startswith("rope_")}
    newer["rope_parameters"] = {**LLAMA3_SCALING, "rope_theta": 500000.0}
    assert ModelConfig.from_dict(newer) == ModelConfig.from_dict(LLAMA32)
    assert ModelConfig.from_dict({**newer, "rope_theta": 500000.0}) == ModelConfig.from_dict(LLAMA32)
    assert ModelConfig.from_dict({**LLAMA32, **newer}) == ModelConfig.from_dict(LLAMA32)
    with pytest.raises(ConfigError, match=r"rope_theta is 1000000\.0; it must agree"):
        ModelConfig.from_dict({**newer, "rope_theta": 1e6})
    with pytest.raises(ConfigError, match=r"rope_scaling is .* must agree"):
        ModelConfig.from_dict({**newer, "rope_scaling": {"type": "linear", "factor": 2}})
    default = {**SMOLLM2, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}}
    assert ModelConfig.from_dict(default) == ModelConfig.from_dict(SMOLLM2)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_linear_scaling(key):
    config = ModelConfig.from_dict({**SMOLLM2, "rope_scaling": {key: "linear", "factor": 4}})
    assert config.rope_scaling == RopeScaling("linear", 4.0)
    assert config.rope_theta == 100000.0


def test_defaults_where_a_field_may_be_missing():
    old = {
        name: value for name, value in SMOLLM2.items() if name not in ("num_key_value_heads", "rope_theta")
    }
    config = ModelConfig.from_dict(
        {**old, "tie_word_embeddings": None, "eos_token_id": None, "bos_token_id": None}
    )
    assert config.num_key_value_heads == 9
    assert config.rope_theta == 10000.0
    assert config.tie_word_embeddings is False
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())


def test_head_dim_may_be_other_than_hidden_size_by_heads():
    config = ModelConfig.from_dict(
        {**SMOLLM2, "head_dim": 80, "num_attention_heads": 7, "num_key_value_heads": 7}
    )
    assert (config.head_dim, config.q_size) == (80, 560)


def test_end_tokens_of_the_generation_config_are_added(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    assert ModelConfig.from_json(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert ModelConfig.from_json(tmp_path).eos_token_ids == (2, 7)
    assert ModelConfig.from_json(tmp_path / "config.json").eos_token_ids == (2, 7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "two"}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id is 'two'"):
        ModelConfig.from_json(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'; it must be one of the supported: llama"),
        ({"model_type": None}, "model_type is None"),
        ({"model_type": ["llama"]}, "model_type is"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            r"architectures is .* must be \['LlamaForCausalLM'\]",
        ),
        ({"attention_bias": True}, "attention_bias is True; it is not supported; supported: false"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; it is not supported; supported: \"silu\""),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_interleaved": True}, "rope_interleaved is True"),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is"),
        ({"num_local_experts": 8}, "num_local_experts is 8"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is"),
        ({"logits_scaling": 8.0}, "logits_scaling is 8.0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling: rope_type is 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_scaling: type is 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor is 0.5; it must be at least 1"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be an object or null"),
        (
            {"rope_scaling": {**LLAMA3_SCALING, "low_freq_factor": 4.0}},
            r"low_freq_factor is 4.0; it must be below",
        ),
        ({"rope_scaling": {**LLAMA3_SCALING, "original_max_position_embeddings": None}}, "is missing"),
        ({"rope_theta": math.nan}, "rope_theta is nan; it must be a positive finite number"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 0}, "hidden_size is 0; it must be a positive integer"),
        ({"hidden_size": 576.0}, "hidden_size is 576.0"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"vocab_size": "49152"}, "vocab_size is '49152'"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_key_value_heads": 4}, r"num_key_value_heads is 4; it must divide num_attention_heads \(9\)"),
        ({"num_attention_heads": 10, "num_key_value_heads": 5}, "must divide hidden_size"),
        ({"head_dim": 63}, "head_dim is 63; it must be even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; it must be true or false"),
        ({"eos_token_id": -1}, "eos_token_id is -1; it must be a token id"),
        ({"eos_token_id": [2, None]}, "eos_token_id is"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        ModelConfig.from_dict({**SMOLLM2, **change}, source="some/config.json")
    assert str(caught.value).startswith("some/config.json: ")


def test_files_that_are_no_config_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json at .*; a model's folder has one"):
        ModelConfig.from_json(tmp_path)
    for text, message in [
        ("{", "is not valid JSON"),
        ("[1]", "holds a JSON list"),
        ("[" * 100_000, "not valid JSON"),
    ]:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            ModelConfig.from_json(tmp_path)
    (tmp_path / "config.json").write_bytes(b'{"model_type": "\xff"}')
    with pytest.raises(ConfigError, match="is not valid JSON"):
        ModelConfig.from_json(tmp_path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=3,
)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(sorted({**SMOLLM2, **LLAMA32, "rope_parameters": 0})), json_values, max_size=3
    )
)
def test_any_json_gives_a_config_or_a_config_error(change):
    try:
        config = ModelConfig.from_dict({**SMOLLM2, **change})
    except ConfigError:
        return
    assert config.num_attention_heads % config.num_key_value_heads == 0
    assert min(config.hidden_size, config.head_dim, config.vocab_size, config.num_hidden_layers) > 0


def test_configs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelConfig.from_dict(SMOLLM2).head_dim = 32
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().num_blocks = 10


def test_engine_config_accepts_its_ranges():
    EngineConfig()
    EngineConfig(max_num_seqs=1, max_num_batched_tokens=1, block_size=1, num_blocks=1, max_model_len=1)
    EngineConfig(batching="static", memory_fraction=1, seed=3)
    EngineConfig(enable_chunked_prefill=False, max_model_len=2048)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "EngineConfig: max_num_seqs is 0; it must be a positive integer"),
        ({"max_num_seqs": None}, "max_num_seqs is missing"),
        ({"max_num_batched_tokens": 2.5}, "max_num_batched_tokens is 2.5"),
        ({"block_size": True}, "block_size is True"),
        ({"num_blocks": -1}, "num_blocks is -1"),
        ({"memory_fraction": 1.5}, "memory_fraction is 1.5; it must be above 0 and at most 1"),
        ({"memory_fraction": math.nan}, "memory_fraction is nan"),
        ({"max_model_len": "8k"}, "max_model_len is '8k'"),
        ({"batching": "dynamic"}, "batching is 'dynamic'; it must be 'continuous' or 'static'"),
        ({"enable_chunked_prefill": 1}, "enable_chunked_prefill is 1"),
        ({"seed": -1}, "seed is -1"),
        (
            {"enable_chunked_prefill": False, "max_model_len": 4096},
            "max_model_len is 4096; it must be at most",
        ),
    ],
)
def test_engine_config_names_what_is_wrong(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)
