"""The golden values themselves: remade from their seeds they are the same weights, and config and checkpoint
are read as
Hugging Face transformers reads them (with a forward pass in NumPy in between, and no kernel)."""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tinyvllm_ref.checkpoint.weights import open_checkpoint

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
sys.path.insert(0, str(GOLDEN))

from configs import MODELS, SHARP, build, prompts_of  # noqa: E402
from numpy_llama import forward  # noqa: E402

ABOUT = json.loads((GOLDEN / "golden.json").read_text())


@pytest.fixture(scope="module")
def values():
    with np.load(GOLDEN / "random.npz") as file:
        return dict(file)


def sha256_of(folder):
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@pytest.mark.parametrize("model", MODELS + SHARP, ids=lambda model: model.name)
def test_checkpoints_are_read_as_transformers_reads_them(model, values, tmp_path):
    folder = build(model, tmp_path)
    assert sha256_of(folder) == ABOUT["random"][model.name]["weights_sha256"], (
        "NumPy makes other weights from this seed than it did for the golden values; run make_golden.py"
    )
    config, views = open_checkpoint(folder)
    for index, prompt in enumerate(prompts_of(model)):
        golden = values[f"{model.name}/{index}/logits"]
        logits = forward(config, views, prompt)[-len(golden) :]
        # float64 here against float32 there: an angle of 600 radians alone has an error of 3e-5 in float32.
        error = np.abs(logits - golden).max() / np.abs(golden).max()
        assert error < 1e-4, f"prompt {index}: relative error {error:.2e}"
        assert int(logits[-1].argmax()) == values[f"{model.name}/{index}/tokens"][0]


def test_the_models_cover_what_they_should():
    configs = {model.name: (model, ABOUT["random"][model.name]) for model in MODELS}
    assert len(configs) == len(MODELS) >= 12
    assert {model.dtype for model in MODELS} == {"BF16", "F16", "F32"}
    assert any(model.shards > 1 for model in MODELS)
    lengths = [length for model in MODELS for length in model.prompts]
    assert (min(lengths), max(lengths)) == (1, 600)


def test_the_real_model_s_values_say_paris():
    first = ABOUT["smollm2"]["prompts"][0]
    assert first["text"] == "The capital of France is"
    assert first["completion"].startswith(" Paris")
    with np.load(GOLDEN / "smollm2.npz") as file:
        for index, prompt in enumerate(ABOUT["smollm2"]["prompts"]):
            assert file[f"{index}/logits"].shape == (49152,)
            assert int(file[f"{index}/logits"].argmax()) == file[f"{index}/tokens"][0]
            assert file[f"{index}/tokens"].shape == file[f"{index}/margins"].shape == (24,)
            assert np.isclose(file[f"{index}/margins"].min(), prompt["smallest_margin"], atol=1e-4)
            assert file[f"{index}/top_ids"].shape == (len(prompt["ids"]), 5)


def test_golden_values_stay_small():
    assert sum(path.stat().st_size for path in GOLDEN.iterdir() if path.is_file()) < 3_000_000
