"""Opening a checkpoint: one file or shards, and every way in which files and config can disagree."""

import json

import numpy as np
import pytest

from tinyvllm_ref.checkpoint.names import REPOSITORY, home, resolve
from tinyvllm_ref.checkpoint.safetensors import SafetensorsError, write_safetensors
from tinyvllm_ref.checkpoint.weights import CheckpointError, open_checkpoint, tensor_shapes, weight_plan
from tinyvllm_ref.config import ConfigError, ModelConfig

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_hidden_layers": 2,
    "vocab_size": 17,
    "tie_word_embeddings": False,
}


def shapes_of(**changes):
    return tensor_shapes(ModelConfig.from_dict({**CONFIG, **changes}))


def write(path, shapes, dtype="BF16"):
    size = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}[dtype]
    layout = {name: (dtype, shape) for name, shape in shapes.items()}
    write_safetensors(path, layout, [bytes(size * int(np.prod(shape))) for shape in shapes.values()])


def checkpoint(folder, shapes=None, dtype="BF16", **changes):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    write(folder / "model.safetensors", shapes_of(**changes) if shapes is None else shapes, dtype)
    return folder


def sharded(folder, weight_map=None):
    """Two shards, by turns; the index as it should be, or as given."""
    shapes = shapes_of()
    files = {name: f"model-{n % 2}.safetensors" for n, name in enumerate(shapes)}
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for file in ("model-0.safetensors", "model-1.safetensors"):
        write(folder / file, {name: shapes[name] for name in shapes if files[name] == file})
    index = {"metadata": {"total_size": 0}, "weight_map": files if weight_map is None else weight_map(files)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_shapes_are_hugging_face_s():
    shapes = shapes_of()
    assert len(shapes) == 3 + 2 * 9
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (17, 12)
    layer = {name.removeprefix("model.layers.1."): shape for name, shape in shapes.items() if ".1." in name}
    assert layer == {
        "input_layernorm.weight": (12,),
        "self_attn.q_proj.weight": (24, 12),
        "self_attn.k_proj.weight": (8, 12),
        "self_attn.v_proj.weight": (8, 12),
        "self_attn.o_proj.weight": (12, 24),
        "post_attention_layernorm.weight": (12,),
        "mlp.gate_proj.weight": (20, 12),
        "mlp.up_proj.weight": (20, 12),
        "mlp.down_proj.weight": (12, 20),
    }
    assert "lm_head.weight" not in shapes_of(tie_word_embeddings=True)


def test_the_plan_stacks_qkv_and_gate_up():
    config = ModelConfig.from_dict(CONFIG)
    plan = {group.name: group for group in weight_plan(config)}
    assert plan["layers.1.qkv"].shape == (40, 12)
    assert [source.split(".")[-2] for source in plan["layers.1.qkv"].sources] == [
        "q_proj",
        "k_proj",
        "v_proj",
    ]
    assert plan["layers.0.gate_up"].shape == (40, 12)
    assert [source.split(".")[-2] for source in plan["layers.0.gate_up"].sources] == ["gate_proj", "up_proj"]
    shapes = tensor_shapes(config)
    assert sorted(source for group in plan.values() for source in group.sources) == sorted(shapes)
    for group in plan.values():
        assert sum(shapes[source][0] for source in group.sources) == group.shape[0]
    assert next(iter(plan)) == "embed_tokens"
    assert list(plan)[-2:] == ["norm", "lm_head"]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_one_file_opens(tmp_path, dtype):
    config, views = open_checkpoint(checkpoint(tmp_path, dtype=dtype))
    assert config.q_size == 24
    assert {name: view.shape for name, view in views.items()} == shapes_of()
    assert {view.dtype for view in views.values()} == {dtype}


def test_shards_open(tmp_path):
    _, views = open_checkpoint(sharded(tmp_path))
    assert {name: view.shape for name, view in views.items()} == shapes_of()


def test_what_nobody_reads_is_left_out(tmp_path):
    shapes = {**shapes_of(), "model.layers.0.self_attn.rotary_emb.inv_freq": (2,)}
    _, views = open_checkpoint(checkpoint(tmp_path, shapes, tie_word_embeddings=True))
    assert views.keys() == shapes_of(tie_word_embeddings=True).keys()


def test_a_config_that_is_not_supported_is_refused_before_any_weight_is_read(tmp_path):
    checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "attention_bias": True}))
    with pytest.raises(ConfigError, match="attention_bias"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(SafetensorsError, match="0 bytes"):
        open_checkpoint(tmp_path)


def test_missing_unexpected_and_misshaped_tensors_are_named(tmp_path):
    shapes = shapes_of()
    less = {name: shape for name, shape in shapes.items() if "q_proj" not in name}
    with pytest.raises(
        CheckpointError, match=r"2 tensors are missing: model\.layers\.0\.self_attn\.q_proj\.weight, "
    ):
        open_checkpoint(checkpoint(tmp_path, less))
    more = {**shapes, "model.layers.0.self_attn.q_proj.bias": (24,)}
    with pytest.raises(CheckpointError, match=r"1 tensors are not of this architecture: .*q_proj\.bias"):
        open_checkpoint(checkpoint(tmp_path, more))
    swapped = {**shapes, "model.layers.1.mlp.down_proj.weight": (20, 12)}
    with pytest.raises(CheckpointError, match=r"down_proj\.weight is \(20, 12\), must be \(12, 20\)"):
        open_checkpoint(checkpoint(tmp_path, swapped))
    with pytest.raises(
        CheckpointError, match=r"21 tensors are of a dtype other than BF16, F16, F32: .* and 16 more"
    ):
        open_checkpoint(checkpoint(tmp_path, dtype="F64"))
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.2\..* and 4 more"):
        open_checkpoint(checkpoint(tmp_path, shapes, num_hidden_layers=3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda files: {**files, "model.norm.weight": "model-2.safetensors"},
            r"lists model-2\.safetensors",
        ),
        (
            lambda files: {**files, "model.norm.weight": "../model-0.safetensors"},
            "must be the name of a .safetensors",
        ),
        (lambda files: {**files, "model.norm.weight": "/etc/passwd"}, "must be the name"),
        (lambda files: {**files, "model.norm.weight": 3}, "must be the name"),
        (
            lambda files: {**files, "extra.weight": "model-0.safetensors"},
            r"listed for model-0\.safetensors but not in it: extra",
        ),
        (
            lambda files: {name: files[name] for name in list(files)[1:]},
            "not listed for it: model.embed_tokens.weight",
        ),
        (lambda files: {}, "weight_map must be a non-empty object"),
        (lambda files: [], "weight_map must be a non-empty object"),
    ],
)
def test_an_index_that_does_not_fit_is_named(tmp_path, change, message):
    with pytest.raises((CheckpointError, FileNotFoundError), match=message):
        open_checkpoint(sharded(tmp_path, change))


def test_an_index_that_is_no_index_is_named(tmp_path):
    index = sharded(tmp_path) / "model.safetensors.index.json"
    for text in ("{", "[]", "{}", "3"):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=r"index\.json: is not JSON with a weight_map"):
            open_checkpoint(tmp_path)


def test_a_folder_without_weights_says_what_is_there(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(
        FileNotFoundError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"
    ):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin would have to be converted"):
        open_checkpoint(tmp_path)


def test_names_never_depend_on_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TINYVLLM_HOME", str(tmp_path / "home"))
    model = tmp_path / "home" / "models" / "my-model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    decoy = tmp_path / "work" / "my-model"
    decoy.mkdir(parents=True)
    (decoy / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "work")
    assert home() == tmp_path / "home"
    assert resolve("my-model") == model
    assert resolve("./my-model") == decoy
    assert resolve(decoy) == decoy
    assert resolve("../work/my-model").resolve() == decoy
    with pytest.raises(
        FileNotFoundError, match=r"no model 'other'(.|\n)*home/models/other(.|\n)*tinyvllm fetch other"
    ):
        resolve("other")
    with pytest.raises(FileNotFoundError, match=r"no model '\./other'"):
        resolve("./other")
    for text in ("", ".", ".."):
        with pytest.raises(FileNotFoundError):
            resolve(text)


def test_folders_are_found_from_the_root_of_the_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if not (REPOSITORY / "data" / "tiny-stories" / "config.json").is_file():
        pytest.skip("data/tiny-stories is not in this repository")
    assert resolve("data/tiny-stories") == resolve("tiny-stories") == REPOSITORY / "data" / "tiny-stories"
