"""Train the tiny-stories model: corpus, tokenizer, training, checkpoint, and a report for the model card.

The defaults are the released run: minutes on one NVIDIA card, most of it training. On a CPU, try

    python train.py --out /tmp/try --documents 20000 --steps 300 --batch 4 --context 256 --no-compile

What comes out, in one folder: config.json, generation_config.json, model.safetensors (BF16),
tokenizer.json, tokenizer_config.json, log.csv (the losses on the way) and report.json.
"""

# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import multiprocessing
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from corpus import HELD_OUT_SEED, TRAIN_SEED, corpus_sha256, documents
from llama import Llama, rope_kinds
from report import answers_right, continue_openings, held_out_openings
from safetensors.torch import save_file
from tokenizer import save_tokenizer, train_tokenizer
from torch import Tensor

CHUNK = 5_000  # documents made and tokenized by a worker at a time
SHARE = 0.15  # of each position's sum of squares: what the last channel is to have
HERE = Path(__file__).parent


# --- Tokens --------------------------------------------------------------------------------------------

_worker_tokenizer: tokenizers.Tokenizer | None = None


def _start_worker(tokenizer_json: str) -> None:
    """Load the tokenizer once in each worker."""
    global _worker_tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)


def _make_chunk(job: tuple[int, int, int]) -> np.ndarray:
    """Token ids of documents start to stop - 1 of a corpus, one after the other."""
    assert _worker_tokenizer is not None
    encoded = _worker_tokenizer.encode_batch_fast(list(documents(*job)), add_special_tokens=False)
    return np.concatenate([np.array(document.ids, dtype=np.uint16) for document in encoded])


def make_tokens(tokenizer: tokenizers.Tokenizer, seed: int, num_documents: int, workers: int) -> np.ndarray:
    """Token ids of the first documents of a corpus, in order, whatever the number of workers."""
    jobs = [(seed, start, min(start + CHUNK, num_documents)) for start in range(0, num_documents, CHUNK)]
    # A forked worker need not import PyTorch again; nothing here has touched a GPU yet.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with context.Pool(workers, _start_worker, (tokenizer.to_str(),)) as pool:
        return np.concatenate(list(pool.imap(_make_chunk, jobs)))


class Windows:
    """Draws windows of the packed corpus: half of them from anywhere, half from the start of a document.

    The packed corpus is documents one after the other, each begun by `<|bos|>`. A window holds several of
    them, so that positions far beyond one story are trained; a window that begins with a document is what a
    prompt looks like.
    """

    def __init__(self, tokens: np.ndarray, context: int, bos_id: int, seed: int, device: str) -> None:
        self.tokens = torch.from_numpy(tokens.astype(np.int32)).to(device)
        self.starts = torch.nonzero(self.tokens[: -context - 1] == bos_id).flatten()
        self.offsets = torch.arange(context + 1, device=device)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.device = device

    def draw(self, batch: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, (batch, context) each."""
        anywhere = self._random(len(self.tokens) - len(self.offsets), batch - batch // 2)
        at_starts = self.starts[self._random(len(self.starts), batch // 2)]
        windows = self.tokens[torch.cat((anywhere, at_starts))[:, None] + self.offsets].long()
        return windows[:, :-1], windows[:, 1:]

    def _random(self, below: int, count: int) -> Tensor:
        return torch.randint(below, (count,), device=self.device, generator=self.generator)


# --- Training ------------------------------------------------------------------------------------------


def losses_of(model: torch.nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy per token, in nats, and by how much the last channel is too light.

    Real models have a few channels that are far larger than the others. Here the last one is made so: then
    a reduction that drops its last element changes every norm, and cannot go unseen.
    """
    with torch.autocast(inputs.device.type, torch.bfloat16):
        logits, shares = model(inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()), F.relu(SHARE - shares).mean()


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, tokens: np.ndarray, context: int, batch: int, device: str) -> float:
    """Mean loss over held-out tokens, in whole windows one after the other."""
    count = (len(tokens) - 1) // context // batch * batch
    inputs = torch.from_numpy(tokens[: count * context].astype(np.int64)).view(-1, batch, context)
    targets = torch.from_numpy(tokens[1 : count * context + 1].astype(np.int64)).view(-1, batch, context)
    losses = [losses_of(model, x.to(device), y.to(device))[0] for x, y in zip(inputs, targets, strict=True)]
    return float(torch.stack(losses).mean())


def learning_rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """Linear warm-up, then a cosine down to 1% of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def make_optimizer(model: Llama, weight_decay: float, device: str) -> torch.optim.AdamW:
    """AdamW; the layers' matrices are decayed, the embedding and the norm weights are not."""
    layers: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        (layers if name.endswith("proj.weight") else others).append(parameter)
    groups = [{"params": layers, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=device == "cuda")


def compiled(model: Llama, windows: Windows, batch: int) -> torch.nn.Module:
    """The model through torch.compile, or as it is where that does not work (no C compiler, say)."""
    try:
        fast = torch.compile(model)
        loss, too_light = losses_of(fast, *windows.draw(batch))
        (loss + too_light).backward()
    except Exception as error:
        print(f"training without torch.compile: {type(error).__name__}: {error}"[:2000], flush=True)
        fast = model
    model.zero_grad()
    return fast


def train(
    model: Llama, windows: Windows, held_out: np.ndarray, arguments: argparse.Namespace
) -> dict[str, Any]:
    """The loop. Returns what the report says about it; the losses on the way go to log.csv.

    If the time limit would end the run before its last step, the number of steps is cut early on (once the
    speed is known), so that the learning rate still comes down in full.
    """
    device = arguments.device
    optimizer = make_optimizer(model, arguments.weight_decay, device)
    steps, started, measured_at = arguments.steps, time.monotonic(), 0.0
    step_model = compiled(model, windows, arguments.batch) if arguments.compile else model
    with (arguments.out / "log.csv").open("w", newline="") as file:
        log = csv.writer(file, lineterminator="\n")
        log.writerow(["step", "tokens", "seconds", "learning_rate", "training_loss", "held_out_loss"])
        step = 0
        while step < steps:
            rate = learning_rate(step, steps, arguments.learning_rate, arguments.warmup)
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss, too_light = losses_of(step_model, *windows.draw(arguments.batch))
            (loss + too_light).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step in (20, 220):  # the first steps are slower
                loss.item()
                now = time.monotonic()
                if step == 220:
                    left = arguments.seconds - (now - started)
                    steps = min(steps, step + int(left * 200 / (now - measured_at)))
                measured_at = now
            if step % arguments.log_every == 0 or step == steps:
                every = arguments.log_every * 10
                held = ""
                if step % every == 0:
                    held = f"{held_out_loss(model, held_out, arguments.context, 16, device):.4f}"
                row = [step, step * arguments.batch * arguments.context, f"{time.monotonic() - started:.1f}"]
                row += [f"{rate:.2e}", f"{loss.item():.4f}", held]
                log.writerow(row)
                file.flush()
                print(*row, flush=True)
    seconds = round(time.monotonic() - started, 1)
    return {
        "steps": step,
        "tokens_seen": step * arguments.batch * arguments.context,
        "training_seconds": seconds,
    }


# --- After training ------------------------------------------------------------------------------------


def exchange_with_last(parameter: Tensor, dim: int, i: int) -> None:
    """Exchange row (dim 0) or column (dim 1) i with the last one, in place."""
    order = torch.arange(parameter.shape[dim], device=parameter.device)
    order[i], order[-1] = len(order) - 1, i
    parameter.copy_(parameter.index_select(dim, order))


@torch.no_grad()
def heaviest_last(model: Llama, ids: Tensor) -> float:
    """Exchange each feed-forward's inner channels so that the heaviest is last; the model computes the same.

    Their order means nothing to a model. With the one that adds most to the residual stream at the end of the
    row, a dot product that drops its last element cannot go unseen. Returns the mean share of the sum of
    squares that the last channel of the residual stream has.
    """
    inner: dict[str, Tensor] = {}
    parameters = dict(model.named_parameters())

    def keep_energy(name: str, inputs: tuple[Tensor, ...]) -> None:
        inner[name] = inputs[0].float().square().mean((0, 1)) * parameters[f"{name}.weight"].square().sum(0)

    hooks = [
        module.register_forward_pre_hook(lambda _, inputs, name=name: keep_energy(name, inputs))
        for name, module in model.named_modules()
        if name.endswith("down_proj")
    ]
    _, shares = model(ids)
    for hook in hooks:
        hook.remove()
    for name, energy in inner.items():
        mlp = name.removesuffix("down_proj")
        exchange_with_last(parameters[f"{mlp}down_proj.weight"], 1, int(energy.argmax()))
        exchange_with_last(parameters[f"{mlp}gate_proj.weight"], 0, int(energy.argmax()))
        exchange_with_last(parameters[f"{mlp}up_proj.weight"], 0, int(energy.argmax()))
    return float(shares.mean())


def save(model: Llama, config: dict[str, Any], folder: Path) -> None:
    """Write the two configurations and the BF16 weights, and load what was written back into the model."""
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    parameters = model.named_parameters()
    weights = {name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in parameters}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    model.load_state_dict(weights)


def hardware() -> str:
    """What the run ran on."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"


def parse_arguments() -> argparse.Namespace:
    """Command line; the defaults are the released run."""
    parser = argparse.ArgumentParser(description="Train the tiny-stories model.")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for the checkpoint and its report")
    parser.add_argument("--documents", type=int, default=1_000_000, help="training documents")
    parser.add_argument("--held-out", type=int, default=5_000, help="held-out documents")
    parser.add_argument("--questions", type=int, default=500, help="held-out conversations to answer")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=250, help="cut the steps to fit this training time")
    parser.add_argument("--batch", type=int, default=64, help="windows per step")
    parser.add_argument("--context", type=int, default=1024, help="tokens per window")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak")
    parser.add_argument("--warmup", type=int, default=400, help="steps")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1, help="of the weights and the windows")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="for making the tokens")
    parser.add_argument("--log-every", type=int, default=100, help="steps; held-out loss each tenth time")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="without torch.compile")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    """Make the corpus's tokens, train, save, and write the report."""
    started = time.monotonic()
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    config = json.loads((HERE / "config.json").read_text())

    tokenizer = train_tokenizer()
    save_tokenizer(tokenizer, arguments.out)
    tokens = make_tokens(tokenizer, TRAIN_SEED, arguments.documents, arguments.workers)
    held_out = make_tokens(tokenizer, HELD_OUT_SEED, arguments.held_out, arguments.workers)
    corpus_seconds = time.monotonic() - started
    print(f"{len(tokens):,} tokens, {len(held_out):,} held out: {corpus_seconds:.0f} s", flush=True)

    model = Llama(config).to(arguments.device)
    windows = Windows(tokens, arguments.context, config["bos_token_id"], arguments.seed, arguments.device)
    result = train(model, windows, held_out, arguments)
    result |= {"held_out_loss": held_out_loss(model, held_out, arguments.context, 16, arguments.device)}
    inputs, _ = windows.draw(16)
    result["share_of_last_channel"] = round(heaviest_last(model, inputs), 4)
    save(model, config, arguments.out)
    result |= {"held_out_loss_bf16": held_out_loss(model, held_out, arguments.context, 16, arguments.device)}

    openings = held_out_openings(10)
    result |= {
        "parameters": sum(p.numel() for p in model.parameters()),
        "corpus_tokens": len(tokens),
        "held_out_tokens": len(held_out),
        "corpus_seconds": round(corpus_seconds, 1),
        "tokens_sha256": hashlib.sha256(tokens.astype("<u2").tobytes()).hexdigest(),
        "first_20000_documents_sha256": corpus_sha256(TRAIN_SEED, 20_000),
        "rope_pairs": rope_kinds(config),
        "hardware": hardware(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "arguments": {key: value for key, value in vars(arguments).items() if key != "out"},
        "answers": answers_right(model, tokenizer, arguments.questions),
        "samples": continue_openings(arguments.out, openings),
    }
    result["total_seconds"] = round(time.monotonic() - started, 1)
    (arguments.out / "report.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "samples"}, indent=2))
    for sample in result["samples"]:
        print(f"--- ended by itself: {sample['ended']}, {sample['tokens']} tokens")
        print(sample["opening"], "//", sample["continuation"])


if __name__ == "__main__":
    main()
