"""Time a launch of each kernel in the emulation, at the sizes of a decode step and of a prefill.

    python benchmarks/kernels_cpu.py --model smollm2-135m --context 256 --batch 1 --prefill 256

Prints microseconds a launch (the fastest of many, Python included) and what all launches of a step of the
model take together. These are times of a CPU: they say nothing about a card.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tinyvllm_ref.blas import linear
from tinyvllm_ref.device import cp
from tinyvllm_ref.kernels.add_rms_norm import add_rms_norm
from tinyvllm_ref.kernels.argmax import argmax
from tinyvllm_ref.kernels.embedding import embedding
from tinyvllm_ref.kernels.gather_rows import gather_rows
from tinyvllm_ref.kernels.kv_write import kv_write
from tinyvllm_ref.kernels.paged_attention import paged_attention
from tinyvllm_ref.kernels.paged_prefill import paged_prefill
from tinyvllm_ref.kernels.rms_norm import rms_norm
from tinyvllm_ref.kernels.rope import rope
from tinyvllm_ref.kernels.sampling import sample_rows
from tinyvllm_ref.kernels.silu_mul import silu_mul
from tinyvllm_ref.kernels.split_qkv import split_qkv

MODELS = {
    "smollm2-135m": dict(L=30, H=576, F=1536, V=49152, Hq=9, Hk=3, D=64),
    "llama-3.2-1b": dict(L=16, H=2048, F=8192, V=128256, Hq=32, Hk=8, D=64),
}
_BLOCK = 16
Launch = Callable[[], Any]


def best(launch: Launch, seconds: float = 0.25) -> float:
    """The fastest of as many launches as fit into `seconds`, in microseconds."""
    launch()
    fastest, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        launch()
        stop = time.perf_counter()
        fastest = min(fastest, stop - start)
        if stop > end:
            return fastest * 1e6


def _random(*shape: int, dtype: Any = np.float32) -> Any:
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return cp.asarray((values.view(np.uint32) >> 16).astype(np.uint16) if dtype == np.uint16 else values)


def launches(
    sizes: dict[str, int], requests: int, tokens: int, context: int
) -> dict[str, tuple[int, Launch]]:
    """Name -> how often a step of the model launches it, and one launch."""
    s = SimpleNamespace(**sizes)
    rows = requests * tokens
    bf = np.uint16
    blocks = -(-context // _BLOCK)
    x, residual, normed = _random(rows, s.H), _random(rows, s.H), cp.empty((rows, s.H), bf)
    q, k, v = _random(rows, s.Hq, s.D), _random(rows, s.Hk, s.D), _random(rows, s.Hk, s.D)
    qkv, heads = _random(rows, (s.Hq + 2 * s.Hk) * s.D), cp.empty((rows, s.Hq, s.D), bf)
    gate_up, gated = _random(rows, 2 * s.F), cp.empty((rows, s.F), bf)
    weights = {name: _random(*shape, dtype=bf) for name, shape in (
        ("norm", (s.H,)), ("table", (s.V, s.H)), ("qkv", (qkv.shape[1], s.H)), ("o", (s.H, s.Hq * s.D)),
        ("gate_up", (2 * s.F, s.H)), ("down", (s.H, s.F)))}  # fmt: skip
    keys, values = (_random(requests * blocks, _BLOCK, s.Hk, s.D, dtype=bf) for _ in range(2))
    table = cp.arange(requests * blocks, dtype=np.int32).reshape(requests, blocks)
    lengths = cp.asarray(np.full(requests, context, np.int32))
    starts = cp.asarray(np.arange(requests + 1, dtype=np.int32) * tokens)
    ids = cp.asarray(np.arange(rows, dtype=np.int32))
    slots = cp.asarray(np.arange(rows, dtype=np.int64))
    frequencies, scale = _random(s.D // 2), s.D**-0.5
    last, logits = cp.empty((requests, s.H), bf), _random(requests, s.V)
    drawn = cp.empty(requests, np.int32)
    floats = [cp.asarray(np.full(requests, value, np.float32)) for value in (0.8, 0.95, 0.0)]
    top_k, steps = (cp.asarray(np.full(requests, value, np.int32)) for value in (0, 3))
    seeds = cp.asarray(np.arange(requests, dtype=np.uint64))

    def attend() -> Any:
        if tokens == 1:
            return paged_attention(q, keys, values, table, lengths, scale, heads)
        return paged_prefill(q, keys, values, table, starts, lengths, tokens, scale, heads)

    return {
        "embedding": (1, lambda: embedding(ids, weights["table"], x)),
        "rms_norm": (1, lambda: rms_norm(x, weights["norm"], 1e-5, normed)),
        "linear qkv": (s.L, lambda: linear(normed, weights["qkv"], qkv)),
        "split_qkv": (s.L, lambda: split_qkv(qkv, q, k, v)),
        "rope": (s.L, lambda: rope(q, k, ids, frequencies)),
        "kv_write": (s.L, lambda: kv_write(k, v, slots, keys, values)),
        "attention": (s.L, attend),
        "linear o": (s.L, lambda: linear(heads.reshape(rows, -1), weights["o"], x)),
        "add_rms_norm": (2 * s.L, lambda: add_rms_norm(x, residual, weights["norm"], 1e-5, normed)),
        "linear gate_up": (s.L, lambda: linear(normed, weights["gate_up"], gate_up)),
        "silu_mul": (s.L, lambda: silu_mul(gate_up, gated)),
        "linear down": (s.L, lambda: linear(gated, weights["down"], x)),
        "gather_rows": (1, lambda: gather_rows(normed, starts[:requests], last)),
        "linear head": (1, lambda: linear(last, weights["table"], logits)),
        "argmax": (1, lambda: argmax(logits, drawn)),
        "(sample_rows)": (
            0,
            lambda: sample_rows(logits, floats[0], top_k, floats[1], floats[2], seeds, steps, drawn),
        ),
    }


def report(title: str, work: dict[str, tuple[int, Launch]]) -> None:
    print(f"\n{title}\n{'kernel':<16}{'us a launch':>12}{'launches':>10}{'ms a step':>11}")
    total = products = 0.0
    for name, (count, launch) in work.items():
        microseconds = best(launch)
        total += count * microseconds
        products += count * microseconds * name.startswith("linear")
        print(f"{name:<16}{microseconds:>12.1f}{count:>10}{count * microseconds / 1e3:>11.2f}")
    print(f"{'together':<16}{'':>12}{'':>10}{total / 1e3:>11.2f}   of which products {products / 1e3:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="smollm2-135m")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prefill", type=int, default=256)
    given = parser.parse_args()
    sizes = MODELS[given.model]
    with cp.checks("fast"):
        title = f"{given.model}: decode, batch {given.batch}, context {given.context}"
        report(title, launches(sizes, given.batch, 1, given.context))
        if given.prefill:
            report(
                f"{given.model}: prefill of {given.prefill}", launches(sizes, 1, given.prefill, given.prefill)
            )


if __name__ == "__main__":
    main()
