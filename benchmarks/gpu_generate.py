"""Whether the engine on a card writes what it writes in the emulation, and what transformers writes: token by token.

    python benchmarks/gpu_generate.py texts cpu --model tiny-stories --write cpu.json
    python benchmarks/gpu_generate.py texts transformers --model tiny-stories --write transformers.json
    python benchmarks/gpu_generate.py texts cuda --model tiny-stories --write card.json
    python benchmarks/gpu_generate.py compare --card card.json cpu.json transformers.json --write result.md

Each prompt of data/prompts.txt is completed greedily. The card does it in several ways: all prompts in one batch, and
one after another, by recorded steps (a persistent kernel where there is one request), and by launches one by one; and
once by the command `tinyvllm generate`. Texts can be made on different computers, each with what it has: `texts
transformers` needs torch and transformers, and computes in float32 with the weights as they are stored.

Right engines may part at a near tie: they add up in different orders, and their logits differ in the last places of
bfloat16. So `compare` takes the first token in which two texts differ, and asks the other engine for its logits there
(transformers by --transformers PYTHON, where this Python has none). The bound: the two tokens' logits lie within 0.5
of each other. A difference with a wider margin makes the exit status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve()
REPOSITORY = HERE.parent.parent
PROMPTS = REPOSITORY / "data" / "prompts.txt"
BOUND = 0.5  # of a margin, in logits
NAMES = {"cpu": "the emulation", "transformers": "transformers", "cuda": "the card"}
sys.path.insert(0, str(REPOSITORY))

Texts = dict[str, list[list[int]]]


# ---------------- the engines, each in a process of its own


def of_this_engine(
    model: str, prompts: list[str], tokens: int, device: str
) -> tuple[str, list[list[int]], Texts]:
    """What it runs on, the prompts' ids, and the completions by each way of making them."""
    from tinyvllm_ref import LLM, SamplingParams
    from tinyvllm_ref.device import describe

    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    texts: Texts = {}
    prompt_ids: list[list[int]] = []
    ways = {"": "auto"} if device == "cpu" else {"by recorded steps": "on", "launched one by one": "off"}
    for way, fast_path in ways.items():
        llm = LLM(model, fast_path=fast_path)
        together = llm.generate(prompts, params)
        prompt_ids = [list(output.prompt_token_ids) for output in together]
        texts[f"all in one batch {way}".strip()] = [list(output.outputs[0].token_ids) for output in together]
        if fast_path == "on":  # the other way takes a hundred times as long
            alone = [llm.generate(prompt, params)[0] for prompt in prompts]
            texts[f"one after another {way}"] = [list(output.outputs[0].token_ids) for output in alone]
        del llm
    return describe(), prompt_ids, texts


def by_command(model: str, prompt: str, tokens: int) -> str:
    """What `tinyvllm generate` prints."""
    command = [
        sys.executable,
        "-m",
        "tinyvllm_ref",
        "generate",
        "--model",
        model,
        "--max-tokens",
        str(tokens),
    ]
    done = subprocess.run([*command, prompt], capture_output=True, text=True, cwd=REPOSITORY)
    if done.returncode:
        raise SystemExit(f"tinyvllm generate: {done.stderr.strip()}")
    return done.stdout


def of_transformers(model: str, prompts: list[str], tokens: int) -> tuple[str, list[list[int]], Texts]:
    """The same of Hugging Face's engine."""
    import torch
    import transformers

    network, tokenizer = _network(model)
    prompt_ids = [tokenizer.encode(prompt).ids for prompt in prompts]
    completions = []
    for ids in prompt_ids:
        given = torch.tensor([ids])
        chosen = network.generate(
            given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
        )
        completions.append(chosen[0, len(ids) :].tolist())
    what = f"transformers {transformers.__version__}, torch {torch.__version__}, float32 on a CPU"
    return what, prompt_ids, {"one after another": completions}


def _network(model: str) -> tuple[Any, Any]:
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    from tinyvllm_ref.checkpoint.names import resolve

    folder = resolve(model)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    network.generation_config.eos_token_id = None  # all texts have the same length
    return network, Tokenizer.from_file(str(folder / "tokenizer.json"))


def logits_after(engine: str, model: str, sequences: list[list[int]]) -> np.ndarray:
    """(sequences, V) float32."""
    if engine == "transformers":
        import torch

        network, _ = _network(model)
        with torch.inference_mode():
            rows = [network(torch.tensor([ids])).logits[0, -1].numpy() for ids in sequences]
    else:
        from tinyvllm_ref import LLM

        llm = LLM(model)
        rows = [llm.logits(ids)[-1] for ids in sequences]
    return np.stack(rows).astype(np.float32)


def ask(engine: str, python: str, model: str, sequences: list[list[int]]) -> np.ndarray:
    """:func:`logits_after`, by a Python that has the engine."""
    with tempfile.TemporaryDirectory() as folder:
        job, file = Path(folder) / "job.json", Path(folder) / "logits.npy"
        job.write_text(json.dumps([engine, model, sequences, str(file)]))
        environment = {**os.environ, "TINYVLLM_DEVICE": "cpu"}
        done = subprocess.run(
            [python, str(HERE), "logits", str(job)], capture_output=True, text=True, env=environment
        )
        if done.returncode:
            raise SystemExit(f"logits of {NAMES[engine]}: {done.stderr.strip()}")
        found: np.ndarray = np.load(file)
        return found


# ---------------- comparison


@dataclass(frozen=True)
class Difference:
    """The first place at which two texts differ: which prompt, which token of its completion, both tokens' ids, and
    by how much the logit of the first one is above that of the second, in the engine that chose the first."""

    prompt: int
    position: int
    tokens: tuple[int, int]
    margin: float


def differences(
    want: list[list[int]], got: list[list[int]], after: Callable[[int, int], np.ndarray]
) -> list[Difference]:
    """Where completions part; ``after(prompt, position)`` has the logits from which the wanted token was chosen."""
    found = []
    for prompt, (a, b) in enumerate(zip(want, got, strict=False)):
        position = next((k for k, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if position is not None:
            x, y = a[position], b[position]
            logits = after(prompt, position)
            found.append(Difference(prompt, position, (x, y), float(logits[x] - logits[y])))
    return found


class Logits:
    """Logits of an engine at the places where texts part, all asked for at once."""

    def __init__(
        self, engine: str, python: str, model: str, prompt_ids: list[list[int]], want: list[list[int]]
    ) -> None:
        self._ask = lambda sequences: ask(engine, python, model, sequences)
        self._sequence = lambda prompt, position: prompt_ids[prompt] + want[prompt][:position]
        self._known: dict[tuple[int, int], np.ndarray] = {}

    def learn(self, places: set[tuple[int, int]]) -> None:
        ordered = sorted(places)
        if ordered:
            rows = self._ask([self._sequence(*place) for place in ordered])
            self._known = dict(zip(ordered, rows, strict=True))

    def __call__(self, prompt: int, position: int) -> np.ndarray:
        return self._known[prompt, position]


def record(
    card: dict[str, Any], other: dict[str, Any], prompts: list[str], python: str
) -> tuple[list[str], bool]:
    """The lines about one engine beside the card, and whether all differences are near ties."""
    if card["prompt_ids"] != other["prompt_ids"]:
        raise SystemExit(
            f"{NAMES[other['engine']]} has other token ids for the prompts of {card['model']} than the card"
        )
    want = next(iter(other["texts"].values()))
    logits = Logits(other["engine"], python, card["model"], card["prompt_ids"], want)
    places: set[tuple[int, int]] = set()
    nothing = np.zeros(1 << 20, np.float32)
    for got in card["texts"].values():
        places |= {(d.prompt, d.position) for d in differences(want, got, lambda *_: nothing)}
    logits.learn(places)
    lines = [f"### beside {NAMES[other['engine']]}", "", f"{other['what']}.", ""]
    lines += [
        "| on the card | texts equal to the last token | tokens before a difference | near ties | wider |"
    ]
    lines += ["|---|---|---|---|---|"]
    rows, good = [], True
    for way, got in card["texts"].items():
        found = differences(want, got, logits)
        wide = [d for d in found if not d.margin <= BOUND]
        good = good and not wide
        total = sum(map(len, got))
        same = total - sum(len(got[d.prompt]) - d.position for d in found)
        equal = f"{len(got) - len(found)} of {len(got)}"
        lines.append(f"| {way} | {equal} | {same:,} of {total:,} | {len(found) - len(wide)} | {len(wide)} |")
        rows += [
            f"| {d.prompt + 1}: {prompts[d.prompt][:40]} | {way} | {d.position} | {d.tokens[0]} | {d.tokens[1]}"
            f" | {d.margin:.3f} |"
            for d in found
        ]
    if rows:
        head = (
            f"| prompt | on the card | token | {NAMES[other['engine']]}: token | the card: token | margin |"
        )
        lines += [
            "",
            head,
            "|---|---|---|---|---|---|",
            *sorted(rows, key=lambda row: int(row[2:].partition(":")[0])),
        ]
    return [*lines, ""], good


def beside_the_command(card: dict[str, Any]) -> tuple[str, bool]:
    """Whether `tinyvllm generate` prints a prompt with what the engine gave for it alone."""
    from tinyvllm_ref import LLM

    tokenizer = LLM(card["model"]).tokenizer
    alone = next(texts for way, texts in card["texts"].items() if way.startswith("one after another"))
    same = card["command"].rstrip("\n") == tokenizer.decode(card["prompt_ids"][0] + alone[0]).rstrip("\n")
    return (
        f"`tinyvllm generate` prints {'the same' if same else '**another**'} text for the first prompt.",
        same,
    )


# ---------------- the command line


def make_texts(options: argparse.Namespace) -> int:
    prompts = PROMPTS.read_text(encoding="utf-8").splitlines()
    os.environ["TINYVLLM_DEVICE"] = "cuda" if options.engine == "cuda" else "cpu"
    result = []
    for model in options.model or ["tiny-stories"]:
        with contextlib.redirect_stdout(sys.stderr):
            if options.engine == "transformers":
                what, ids, texts = of_transformers(model, prompts, options.tokens)
            else:
                what, ids, texts = of_this_engine(model, prompts, options.tokens, options.engine)
        found: dict[str, Any] = {"engine": options.engine, "model": model, "what": what}
        found |= {"prompt_ids": ids, "texts": texts}
        if options.engine == "cuda":
            found["command"] = by_command(model, prompts[0], options.tokens)
        result.append(found)
    Path(options.write).write_text(json.dumps(result), encoding="utf-8")
    return 0


def compare(options: argparse.Namespace) -> int:
    prompts = PROMPTS.read_text(encoding="utf-8").splitlines()
    cards, *others = (json.loads(Path(file).read_text()) for file in (options.card, *options.other))
    lines = ["# What the engine writes on a card, beside the emulation and transformers", ""]
    lines += [f"{datetime.date.today()}; commands: as `benchmarks/gpu_generate.py` says, for each model.", ""]
    lines += [
        "Margin: by how much the logit of the other engine's token is above that of the card's token, in the other"
        " engine, after the tokens that both have in common. Near 0, the order of additions decides.",
        "",
    ]
    good = True
    for card in cards:
        count, length = len(card["prompt_ids"]), max(map(len, next(iter(card["texts"].values()))))
        lines += [
            f"## {card['model']}",
            "",
            f"{count} prompts, {length} tokens each, greedy. {card['what']}.",
            "",
        ]
        said, holds = beside_the_command(card)
        lines += [said, ""]
        good = good and holds
        for other in (other for file in others for other in file if other["model"] == card["model"]):
            python = options.transformers if other["engine"] == "transformers" else sys.executable
            found, holds = record(card, other, prompts, python)
            lines += found
            good = good and holds
    text = "\n".join(lines).rstrip() + "\n"
    print(text, end="")
    if options.write:
        Path(options.write).write_text(text, encoding="utf-8")
    return 0 if good else 1


def save_logits(options: argparse.Namespace) -> int:
    engine, model, sequences, file = json.loads(Path(options.job).read_text())
    np.save(file, logits_after(engine, model, sequences))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    texts = commands.add_parser("texts", help="make the completions of one engine")
    texts.add_argument("engine", choices=list(NAMES))
    texts.add_argument("--model", action="append", help="a name or a folder; can be given again")
    texts.add_argument("--tokens", type=int, default=100)
    texts.add_argument("--write", metavar="FILE", required=True)
    texts.set_defaults(run=make_texts)
    beside = commands.add_parser("compare", help="compare the card's completions with others'")
    beside.add_argument("--card", metavar="FILE", required=True)
    beside.add_argument("other", nargs="+", help="files of texts of other engines")
    beside.add_argument(
        "--transformers", metavar="PYTHON", default=sys.executable, help="one that has transformers"
    )
    beside.add_argument("--write", metavar="FILE", help="keep the record here")
    beside.set_defaults(run=compare)
    logits = commands.add_parser("logits")
    logits.add_argument("job")
    logits.set_defaults(run=save_logits)
    options = parser.parse_args()
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
