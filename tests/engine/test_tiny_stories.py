"""The model that comes with the repository: what transformers says of it, and what its card says."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes  # noqa: F401  (gives NumPy the name bfloat16)
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from tinyvllm_ref import LLM, SamplingParams

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "data" / "tiny-stories"
GOLDEN = json.loads((REPOSITORY / "tests/golden/tiny_stories.json").read_text())
NEAR_TIE = 0.1  # logits; below this margin the order of sums may decide which token is first


@pytest.fixture(scope="module")
def llm():
    return LLM("tiny-stories")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_golden_values_are_of_this_checkpoint():
    assert digest(FOLDER / "model.safetensors") == GOLDEN["model_sha256"]


def test_logits_are_those_of_transformers(llm):
    stored = np.load(REPOSITORY / "tests/golden/tiny_stories_logits.npz")
    for name in (name for name in stored.files if name.startswith("ids_")):
        want = stored[name.replace("ids", "logits")]
        got = llm.logits([int(token) for token in stored[name]])
        assert np.linalg.norm(got - want) / np.linalg.norm(want) < 2e-2


def test_greedy_text_is_that_of_transformers_up_to_the_first_near_tie(llm):
    options = SamplingParams(max_tokens=GOLDEN["max_new_tokens"], temperature=0.0)
    outputs = llm.generate([prompt["ids"] for prompt in GOLDEN["prompts"]], options)
    whole = 0
    for prompt, output in zip(GOLDEN["prompts"], outputs, strict=True):
        got, want = list(output.outputs[0].token_ids), prompt["new_ids"]
        same = next((k for k, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), None)
        if same is None:
            whole += 1
        else:
            assert prompt["margins"][same] < NEAR_TIE, (prompt["prompt"], same, prompt["margins"][same])
    assert whole >= 0.8 * len(outputs)


def test_other_libraries_open_it():
    arrays = safetensors.numpy.load_file(FOLDER / "model.safetensors")
    report = json.loads((FOLDER / "report.json").read_text())
    assert sum(array.size for array in arrays.values()) == report["parameters"]
    tokenizer = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    for prompt in GOLDEN["prompts"]:
        assert tokenizer.encode(prompt["prompt"]).ids == prompt["ids"]


def test_sizes_are_fit_for_git():
    assert (FOLDER / "model.safetensors").stat().st_size < 6_000_000


def test_the_card_s_samples_are_what_comes(llm):
    """Held-out openings: each story ends by itself, as the card shows it."""
    samples = json.loads((FOLDER / "report.json").read_text())["samples"]
    assert len(samples) == 10
    assert all(sample["ended"] and sample["tokens"] <= 200 for sample in samples)
    options = SamplingParams(max_tokens=200, temperature=0.0)
    outputs = llm.generate([sample["opening"] for sample in samples], options)
    finished = [output.outputs[0].finish_reason for output in outputs]
    assert finished == ["stop"] * len(samples)


def test_the_corpus_is_the_same_everywhere():
    wanted = json.loads((FOLDER / "report.json").read_text())["first_20000_documents_sha256"]
    command = [sys.executable, str(FOLDER / "corpus.py"), "--stories", "20000", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert wanted in done.stdout[:200] + done.stdout[-200:] + done.stderr
