"""Make the golden values of this folder with Hugging Face transformers, in float32 on a CPU.

    pip install "torch>=2.4" "transformers>=4.46" -e .
    tinyvllm fetch smollm2-135m-instruct
    python tests/golden/make_golden.py

Writes ``random.npz`` (for each model of ``configs.py`` and each prompt: the logits of the last positions, a
greedy continuation and its margins), ``smollm2.npz`` (the same for a real model and six prompts) and
``golden.json`` (which versions, which weights, which prompts). A margin is the difference between the two
largest logits of a step: where it is small, another order of summation may give another token.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]

from configs import MODELS, SHARP, build, prompts_of  # noqa: E402

from tinyvllm_ref.checkpoint.names import resolve  # noqa: E402

RANDOM_STEPS = 8
REAL_STEPS = 24
LAST_POSITIONS = 4  # of a random model's prompt: those whose logits are stored
# The prompt that everybody tries, and of some thirty others five that have wide margins in all steps: a token
# that hangs on the last bit of a logit says nothing about an engine.
PROMPTS = [
    "The capital of France is",
    "She opened the door and saw",
    "def add(a, b):\n    return",
    "SELECT name, age FROM users WHERE",
    "1, 2, 3, 4, 5, 6,",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
]


def main() -> None:
    """Make all files."""
    parser = argparse.ArgumentParser(description="Golden values from Hugging Face transformers.")
    parser.add_argument("--real-model", default="smollm2-135m-instruct")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)  # one order of summation, wherever it runs
    about: dict[str, Any] = {
        "made_with": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        }
    }
    arrays: dict[str, np.ndarray] = {}
    about["random"] = {model.name: make_random(model, arrays) for model in MODELS + SHARP}
    np.savez_compressed(HERE / "random.npz", **arrays)
    arrays = {}
    about["smollm2"] = make_real(resolve(options.real_model), arrays)
    np.savez_compressed(HERE / "smollm2.npz", **arrays)
    (HERE / "golden.json").write_text(json.dumps(about, indent=1) + "\n")


def make_random(model: Any, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Values of one random model; returns what golden.json says of it."""
    with tempfile.TemporaryDirectory() as folder:
        build(model, Path(folder))
        weights = sha256_of(Path(folder))
        reference = load(Path(folder))
    margins = []
    for index, prompt in enumerate(prompts_of(model)):
        logits = run(reference, prompt)
        tokens, steps = generate(reference, prompt, RANDOM_STEPS)
        key = f"{model.name}/{index}"
        arrays[f"{key}/logits"] = logits[-LAST_POSITIONS:]
        arrays[f"{key}/tokens"] = np.array(tokens, np.int32)
        arrays[f"{key}/margins"] = np.array(steps, np.float32)
        margins.append(round(min(steps), 4))
    print(model.name, "smallest margins", margins)
    return {"weights_sha256": weights, "smallest_margins": margins}


def make_real(folder: Path, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Values of the real model; returns what golden.json says of it."""
    reference = load(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    prompts = []
    for index, text in enumerate(PROMPTS):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        logits = run(reference, ids)
        tokens, margins = generate(reference, ids, REAL_STEPS)
        arrays[f"{index}/logits"] = logits[-1]
        arrays[f"{index}/tokens"] = np.array(tokens, np.int32)
        arrays[f"{index}/margins"] = np.array(margins, np.float32)
        # Of the other positions: the five largest logits and a checksum (the mean of the squares).
        top = np.sort(np.argpartition(logits, -5, axis=1)[:, -5:], axis=1)
        arrays[f"{index}/top_ids"] = top.astype(np.int32)
        arrays[f"{index}/top_logits"] = np.take_along_axis(logits, top, axis=1)
        arrays[f"{index}/mean_square"] = (logits.astype(np.float64) ** 2).mean(axis=1)
        completion = tokenizer.decode(tokens)
        prompts.append(
            {
                "text": text,
                "ids": ids,
                "completion": completion,
                "smallest_margin": round(min(margins), 4),
                "smallest_margin_at": int(np.argmin(margins)),
            }
        )
        print(repr(text), "->", repr(completion), "smallest margin", round(min(margins), 4))
    return {"model": folder.name, "weights_sha256": sha256_of(folder), "prompts": prompts}


def load(folder: Path) -> Any:
    """The model in float32, with the plain attention of transformers' own Python."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def run(reference: Any, ids: list[int]) -> np.ndarray:
    """Logits of all positions, (tokens, vocab) float32."""
    logits: np.ndarray = reference(torch.tensor([ids]), use_cache=False).logits[0].float().numpy()
    return logits


def generate(reference: Any, prompt: list[int], steps: int) -> tuple[list[int], list[float]]:
    """Greedy tokens, past end tokens too, and each step's margin; the whole text anew in every step."""
    ids, margins = list(prompt), []
    for _ in range(steps):
        logits = run(reference, ids)[-1]
        second, first = np.sort(logits)[-2:]
        margins.append(float(first - second))
        ids.append(int(np.argmax(logits)))
    return ids[len(prompt) :], margins


def sha256_of(folder: Path) -> str:
    """One checksum of all weight files, in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
