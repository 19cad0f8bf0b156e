"""What the model card shows: greedy continuations of held-out openings, answers, and the card itself.

python data/tiny-stories/report.py     # writes README.md from report.json, visibility.json and model_card.md
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
from pathlib import Path
from typing import Any

from corpus import (
    ASSISTANT,
    BOS,
    END,
    EOS,
    HELD_OUT_SEED,
    TRAIN_SEED,
    Dice,
    count_frames,
    document,
    facts_document,
    question_document,
)
from grammar import PLOTS

MAX_NEW_TOKENS = 200


def held_out_openings(count: int) -> list[str]:
    """The first sentence, and a few words of the second, of the first held-out stories."""
    openings: list[str] = []
    index = 10_000  # beyond the documents of the validation loss
    while len(openings) < count:
        text = document(HELD_OUT_SEED, index)
        index += 1
        if not text.endswith(EOS):
            continue
        first, rest = re.split(r"(?<=[.!?])\s", text.removeprefix(BOS), maxsplit=1)
        openings.append(first if len(first.split()) > 7 else f"{first} {' '.join(rest.split()[:3])}")
    return openings


def continue_openings(folder: Path, openings: list[str]) -> list[dict[str, Any]]:
    """Continue each opening greedily with Hugging Face transformers, in float32 on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    samples = []
    for opening in openings:
        ids = tokenizer(opening, return_tensors="pt").input_ids
        out = model.generate(ids, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)[0, ids.shape[1] :].tolist()
        ended = out[-1] in model.generation_config.eos_token_id
        text = tokenizer.decode(out[:-1] if ended else out)
        samples.append({"opening": opening, "continuation": text, "ended": ended, "tokens": len(out)})
    return samples


def answers_right(model: Any, tokenizer: Any, count: int) -> dict[str, float]:
    """The share of held-out questions that the model answers right, about stories and about small facts.

    An answer is right if each of its tokens, and the `<|end|>` after it, has the largest logit given the
    ones before: then greedy generation gives it too.
    """
    import torch

    assistant_id, end_id = tokenizer.token_to_id(ASSISTANT), tokenizer.token_to_id(END)
    device = next(model.parameters()).device
    shares = {}
    for name, make in (("about stories", question_document), ("about small facts", facts_document)):
        right = total = 0
        for index in range(count):
            ids = tokenizer.encode(make(Dice(HELD_OUT_SEED, 100_000 + index)), add_special_tokens=False).ids
            with torch.no_grad():
                best = model(torch.tensor([ids[:-1]], device=device))[0][0].argmax(-1).tolist()
            for start in (i for i, token in enumerate(ids) if token == assistant_id):
                end = ids.index(end_id, start)
                right += best[start:end] == ids[start + 1 : end + 1]
                total += 1
        shares[name] = round(right / total, 4)
    return shares


# --- The model card --------------------------------------------------------------------------------------


def mistake_rows(folder: Path) -> tuple[str, str]:
    """The rows of the table of mistakes, and a sentence about those that change no text."""
    mistakes = json.loads((folder / "visibility.json").read_text())["mistakes"]
    rows, invisible = [], []
    for name, result in mistakes.items():
        seen = [first for first in result["first_difference"] if first is not None]
        error = statistics.median(result["logit_error"])
        first = f"{statistics.median(seen):g}" if seen else "none"
        rows.append(f"| {name} | {first} | {len(seen)} of {len(result['first_difference'])} | {error:.1%} |")
        if not seen:
            invisible.append(name)
    note = (
        f"No text changes for: {', '.join(invisible)}." if invisible else "Every mistake changes some text."
    )
    return "\n".join(rows), note


def story_lines(samples: list[dict[str, Any]]) -> str:
    """The samples as a numbered list."""
    lines = []
    for number, sample in enumerate(samples, start=1):
        end = "ended by itself" if sample["ended"] else "cut off"
        text = f"**{sample['opening']}** {sample['continuation'].strip()} ({sample['tokens']} tokens, {end})"
        lines.append(f"{number}. " + text.replace("\n", "\n   "))
    return "\n".join(lines)


def card(folder: Path) -> str:
    """The model card of the checkpoint in a folder."""
    report = json.loads((folder / "report.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    weights = (folder / "model.safetensors").read_bytes()
    vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    rows, note = mistake_rows(folder)
    pairs, arguments = report["rope_pairs"], report["arguments"]
    template = (Path(__file__).parent / "model_card.md").read_text(encoding="utf-8")
    return template.format(
        **{key: value for key, value in report.items() if key not in ("samples", "parameters")},
        parameters=report["parameters"],
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        ffn=config["intermediate_size"],
        theta=config["rope_theta"],
        original=config["rope_scaling"]["original_max_position_embeddings"],
        factor=config["rope_scaling"]["factor"],
        pairs=sum(pairs.values()),
        **pairs,
        vocabulary=config["vocab_size"],
        size=len(weights),
        sha256=hashlib.sha256(weights).hexdigest(),
        seed=TRAIN_SEED,
        frames=count_frames(),
        plots=len(PLOTS),
        words=sum(1 for token in vocabulary if token.startswith("Ġ") and len(token) > 2),
        corpus_sha=report["first_20000_documents_sha256"],
        **{key: arguments[key] for key in ("documents", "batch", "context", "learning_rate")},
        about_stories=report["answers"]["about stories"],
        about_facts=report["answers"]["about small facts"],
        share=report["share_of_last_channel"],
        mean_share=1 / config["hidden_size"],
        rows=rows,
        note=note,
        max_new_tokens=MAX_NEW_TOKENS,
        ended=sum(sample["ended"] for sample in report["samples"]),
        n_samples=len(report["samples"]),
        stories=story_lines(report["samples"]),
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write the model card.")
    parser.add_argument("--model", type=Path, default=Path(__file__).parent, help="folder of the checkpoint")
    folder = parser.parse_args().model
    (folder / "README.md").write_text(card(folder), encoding="utf-8")


if __name__ == "__main__":
    main()
