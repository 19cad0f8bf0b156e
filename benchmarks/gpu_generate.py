"""Whether the engine on a card writes what it writes in the emulation: greedy texts, token by token.

    python benchmarks/gpu_generate.py --model tiny-stories --model smollm2-135m-instruct --write result.md

Needs this repository, CuPy, a card and a C++ compiler. The emulation's tokens are made on the same machine, in a
process of its own. Each prompt of data/prompts.txt is completed greedily on the card, all of them in one batch and
then one at a time, and once by the command `tinyvllm generate`.

Two right engines may part at a near tie: they add up in different orders, and their logits differ in the last
places of bfloat16. So at the first token in which two texts differ the logits of both devices are compared there.
The bound: the two tokens' logits lie within 0.5 of each other on the emulation. A difference with a wider margin,
and any error, makes the exit status 1.

With --devices cpu,cpu the whole of it can be tried where there is no card.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve()
REPOSITORY = HERE.parent.parent
PROMPTS = REPOSITORY / "data" / "prompts.txt"
BOUND = 0.5  # of a margin, in logits


# ---------------- in a process of its own, on one device


def work(job: dict[str, Any]) -> dict[str, Any]:
    """What `job` asks for: greedy completions, or the logits after some sequences."""
    sys.path.insert(0, str(REPOSITORY))
    from tinyvllm_ref import LLM, SamplingParams
    from tinyvllm_ref.device import describe

    llm = LLM(job["model"])
    result: dict[str, Any] = {"device": describe()}
    if "prompts" in job:
        params = SamplingParams(max_tokens=job["tokens"], temperature=0.0, ignore_eos=True)
        together = llm.generate(job["prompts"], params)
        result["prompt_ids"] = [output.prompt_token_ids for output in together]
        result["together"] = [list(output.outputs[0].token_ids) for output in together]
        alone = [llm.generate(prompt, params)[0] for prompt in job["prompts"]] if job["alone"] else []
        result["alone"] = [list(output.outputs[0].token_ids) for output in alone]
    logits = [llm.logits(ids)[-1] for ids in job.get("sequences", [])]
    if logits:
        np.save(job["file"], np.stack(logits))
    return result


def on(device: str, **job: Any) -> dict[str, Any]:
    """Run :func:`work` on ``"cuda"`` or ``"cpu"``."""
    environment = {**os.environ, "TINYVLLM_DEVICE": device}
    command = [sys.executable, str(HERE), "--worker"]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"on {device}: {done.stderr.strip()}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


# ---------------- comparison


@dataclass(frozen=True)
class Difference:
    """The first place at which two texts differ.

    Attributes
    ----------
    prompt, position : int
        Which prompt, and which token of its completion.
    tokens : (int, int)
        Of the emulation and of the card.
    margin, card_margin : float
        The emulation's token's logit minus the card's token's, on either device.
    moved : float
        How far the logit that differs most lies apart.
    """

    prompt: int
    position: int
    tokens: tuple[int, int]
    margin: float
    card_margin: float
    moved: float


def compare(
    model: str,
    devices: tuple[str, str],
    prompt_ids: list[list[int]],
    want: list[list[int]],
    got: list[list[int]],
) -> list[Difference]:
    """Of each pair of completions that differ, where, and how near a tie that was."""
    places = []
    for index, (a, b) in enumerate(zip(want, got, strict=True)):
        position = next((k for k, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if position is not None:
            places.append((index, position))
    if not places:
        return []
    sequences = [prompt_ids[index] + want[index][:position] for index, position in places]
    with tempfile.TemporaryDirectory() as folder:
        logits = []
        for number, device in enumerate(devices):
            file = str(Path(folder) / f"{number}.npy")
            on(device, model=model, sequences=sequences, file=file)
            logits.append(np.load(file))
    differences = []
    for (index, position), emulated, carded in zip(places, *logits, strict=True):
        x, y = want[index][position], got[index][position]
        margins = (float(emulated[x] - emulated[y]), float(carded[x] - carded[y]))
        differences.append(
            Difference(index, position, (x, y), *margins, float(np.abs(emulated - carded).max()))
        )
    return differences


def command_line(model: str, device: str, prompt: str, tokens: int) -> tuple[str, str]:
    """`tinyvllm generate` and what it prints."""
    arguments = ["generate", "--model", model, "--max-tokens", str(tokens), prompt]
    done = subprocess.run(
        [sys.executable, "-m", "tinyvllm_ref", *arguments],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "TINYVLLM_DEVICE": device},
    )
    if done.returncode:
        raise SystemExit(f"tinyvllm {shlex.join(arguments)} on {device}: {done.stderr.strip()}")
    return shlex.join(["tinyvllm", *arguments]), done.stdout


def check(model: str, devices: tuple[str, str], tokens: int) -> tuple[list[str], bool]:
    """The lines of the record about one model, and whether it holds."""
    prompts = PROMPTS.read_text(encoding="utf-8").splitlines()
    emulation, card = devices
    want = on(emulation, model=model, prompts=prompts, tokens=tokens, alone=False)
    got = on(card, model=model, prompts=prompts, tokens=tokens, alone=True)
    good = want["prompt_ids"] == got["prompt_ids"]
    count, total = len(prompts), len(prompts) * tokens
    lines = [f"## {model}", "", f"- emulation: {want['device']}", f"- card: {got['device']}"]
    lines += [f"- {count} prompts, {tokens} tokens each, greedy"]
    if not good:
        lines.append("- **the prompts have other token ids on the card**")
    for title, one, other in (
        (f"the card, all {count} in one batch, beside the emulation", want["together"], got["together"]),
        ("the card, one at a time, beside the emulation", want["together"], got["alone"]),
    ):
        differences = compare(model, devices, got["prompt_ids"], one, other)
        same = total - sum(tokens - difference.position for difference in differences)
        wide = [difference for difference in differences if not difference.margin <= BOUND]
        good = good and not wide
        lines += ["", f"### {title}", ""]
        lines.append(
            f"{count - len(differences)} of {count} texts are equal to the last token; {same:,} of {total:,} tokens"
            f" come before a difference. Of the {len(differences)} differences, {len(wide)} are no near tie"
            f" (a margin above {BOUND})."
        )
        lines += table(prompts, differences)
    texts = [command_line(model, device, prompts[0], tokens) for device in devices]
    equal = texts[0][1] == texts[1][1]
    lines += [
        "",
        "### The command",
        "",
        f"`{texts[0][0]}` prints {'the same' if equal else 'another'} text on both.",
    ]
    if not equal:
        explained = any(a != b for a, b in zip(want["together"][0], got["alone"][0], strict=True))
        good = good and explained
        lines.append("It is the first prompt of the table above." if explained else "**Not explained.**")
    return [*lines, ""], good


def table(prompts: list[str], differences: list[Difference]) -> list[str]:
    """A row for each difference."""
    if not differences:
        return []
    rows = [
        f"| {d.prompt + 1}: {prompts[d.prompt][:40]} | {d.position} | {d.tokens[0]} | {d.tokens[1]} | {d.margin:.3f}"
        f" | {d.card_margin:.3f} | {d.moved:.3f} |"
        for d in differences
    ]
    head = "| prompt | token | emulation's | card's | margin, emulation | margin, card | largest change of a logit |"
    return ["", head, "|---|---|---|---|---|---|---|", *rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", action="append", help="a name or a folder; can be given again")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--devices", default="cpu,cuda", help="the emulation's and the card's")
    parser.add_argument("--write", metavar="FILE", help="keep the record here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(work(json.load(sys.stdin))))
        return 0
    emulation, _, card = options.devices.partition(",")
    good, lines = True, ["# The engine on a card, beside the emulation", ""]
    lines.append(
        f"{datetime.date.today()}; command: `python benchmarks/gpu_generate.py {shlex.join(sys.argv[1:])}`"
    )
    lines += [
        "",
        "Margin: by how much the logit of the emulation's token is above that of the card's token, after the tokens"
        " that both have in common. Near 0, the order of additions decides.",
        "",
    ]
    for model in options.model or ["tiny-stories"]:
        found, holds = check(model, (emulation, card), options.tokens)
        lines += found
        good = good and holds
    text = "\n".join(lines).rstrip() + "\n"
    print(text, end="")
    if options.write:
        Path(options.write).write_text(text, encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
