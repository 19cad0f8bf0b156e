"""What compute-sanitizer says of every kernel of the engine, on a card.

    python benchmarks/gpu_sanitizer.py --write benchmarks/gpu_sanitizer.md

Needs an NVIDIA card, CuPy and NVIDIA's compute-sanitizer. Each kernel is launched at small, awkward sizes, once under
memcheck and once under racecheck, without CuPy's memory pool, so that arrays do not lie side by side in one allocation.
The launches run in one process per tool; a launch that fails is named, and the others go on.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from tests.engine.kernels.cases import all_cases  # noqa: E402
from tinyvllm_ref.config import ModelConfig  # noqa: E402
from tinyvllm_ref.device import cp, describe, is_gpu  # noqa: E402
from tinyvllm_ref.kernels import decode_attention as attention  # noqa: E402
from tinyvllm_ref.kernels import decode_rows as rows  # noqa: E402
from tinyvllm_ref.kernels import skinny_linear as skinny  # noqa: E402
from tinyvllm_ref.kernels import warpgroup_linear as warpgroup  # noqa: E402
from tinyvllm_ref.kernels.advance import advance  # noqa: E402
from tinyvllm_ref.kernels.decode_step import DecodeStep  # noqa: E402
from tinyvllm_ref.kernels.prefill_attention import prefill_attention  # noqa: E402
from tinyvllm_ref.kernels.rope_write import rope_write  # noqa: E402
from tinyvllm_ref.random_model import random_llm  # noqa: E402

TOOLS = ("memcheck", "racecheck")
SECONDS = 240
PER_KERNEL = 2  # of the simple kernels' cases: those with the fewest elements come first in cases.py

RINGS = {"decode_step", "skinny_linear", "warpgroup_linear"}  # kernels with copies into a ring
RING = """
The hazards that racecheck names in {names} are pairs of a copy into a ring (UBLKCP of weights,
LDGSTS of keys, UTMALDG of tiles, by a warp that does nothing else) and a read of the same stage. mbarriers order the
two: a read waits until the copy has come, a copy until every warp has arrived after its reads. racecheck does not
follow them; the emulation's copy engine does, and finds nothing in `decode_step` and `skinny_linear`. No other kernel
is named."""

Launches = Iterator[tuple[str, Callable[[], Any]]]


def simple() -> Launches:
    """The first cases of each simple kernel."""
    seen: dict[str, int] = {}
    for case in all_cases():
        kernel = case.name.split()[0].rstrip(",")
        seen[kernel] = seen.get(kernel, 0) + 1
        if seen[kernel] <= PER_KERNEL and not case.long:
            yield case.name, case.run


def floats(*shape: int) -> Any:
    return cp.asarray(np.random.default_rng(0).standard_normal(shape).astype(np.float32))


def bits(*shape: int) -> Any:
    return (floats(*shape).view(np.uint32) >> 16).astype(np.uint16)


def fused() -> Launches:
    """The kernels of the fast path."""
    for tokens, hidden in ((1, 8), (3, 1032)):
        normed, residual = cp.empty((tokens, hidden), np.uint16), floats(tokens, hidden)
        ids, weight = cp.zeros(tokens, np.int32), bits(hidden)
        yield (
            f"embed_norm T={tokens} H={hidden}",
            lambda i=ids, h=hidden, w=weight, r=residual, n=normed: rows.embed_norm(
                i, bits(3, h), w, 1e-5, r, n
            ),
        )
        yield (
            f"norm_rows T={tokens} H={hidden}",
            lambda r=residual, w=weight, n=normed: rows.norm_rows(r, w, 1e-5, n),
        )
        yield (
            f"add_norm_rows T={tokens} H={hidden}",
            lambda r=residual, w=weight, n=normed: rows.add_norm_rows(r.copy(), r, w, 1e-5, n),
        )
        yield (
            f"silu_mul_rows T={tokens} F={hidden}",
            lambda t=tokens, h=hidden, n=normed: rows.silu_mul_rows(floats(t, 2 * h), n),
        )
        for vocab in (9, 4099):
            yield (
                f"argmax_rows R={tokens} V={vocab}",
                lambda t=tokens, v=vocab: rows.argmax_rows(
                    floats(t, v), cp.empty(t, np.int32), cp.empty(rows.argmax_scratch(t, v), np.uint64)
                ),
            )
    for count, columns in ((1, 64), (8, 200), (16, 4104), (19, 72), (32, 2056)):
        yield (
            f"skinny_linear, skinny_gate_up R={count} K={columns}",
            lambda r=count, k=columns: products(r, k),
        )
    for count, columns in ((33, 72), (128, 584)):
        yield (
            f"warpgroup_linear, warpgroup_gate_up R={count} K={columns}",
            lambda r=count, k=columns: wide_products(r, k),
        )
    ones = [cp.ones(5, np.int32) for _ in range(4)]
    yield "advance", lambda: advance(*ones)
    for heads, kv_heads, dim, block_size, contexts in ((6, 2, 32, 16, (1, 40, 0)), (8, 2, 64, 4, (600, 17))):
        yield f"decode_attention {heads}/{kv_heads} D={dim} BS={block_size}", lambda a=(
            heads, kv_heads, dim, block_size, contexts
        ): decode(*a)  # fmt: skip
        yield f"prefill_attention, rope_write {heads}/{kv_heads} D={dim} BS={block_size}", lambda a=(
            heads, kv_heads, dim, block_size
        ): prefill(*a)  # fmt: skip


def products(count: int, columns: int) -> None:
    """A launch that waits for the one before it, and where there is one the form that takes the norm along."""
    scratch = skinny.SkinnyScratch(count, 42, columns)
    x, w, stream = bits(count, columns), bits(42, columns), floats(count, columns)
    skinny.skinny_linear(x, w, floats(count, 42), scratch, accumulate=True)
    skinny.skinny_gate_up(x, w, cp.empty((count, 21), np.uint16), scratch, dependent=True)
    if not skinny.unsupported(count, columns, norm=True):
        norm = skinny.Norm(bits(columns), 1e-5)
        skinny.skinny_linear(stream, w, floats(count, 42), norm=norm, dependent=True)


def wide_products(count: int, columns: int) -> None:
    """A tile and a bit, and with gate and up two and a bit."""
    x, w = bits(count, columns), bits(272, columns)
    warpgroup.warpgroup_linear(x, w[:136], floats(count, 136))
    warpgroup.warpgroup_gate_up(x, w, cp.empty((count, 136), np.uint16))


def tables(requests: int, blocks: int) -> Any:
    order = np.random.default_rng(1).permutation(requests * blocks).astype(np.int32)
    return cp.asarray(order.reshape(requests, blocks))


def decode(heads: int, kv_heads: int, dim: int, block_size: int, contexts: tuple[int, ...]) -> None:
    requests, blocks = len(contexts), -(-max(contexts) // block_size)
    cache = [bits(requests * blocks, block_size, kv_heads, dim) for _ in range(2)]
    out = cp.empty((requests, heads, dim), np.uint16)
    scratch = attention.DecodeScratch(requests, heads, kv_heads, dim, 3)
    lens = cp.asarray(np.array(contexts, np.int32))
    qkv = floats(requests, (heads + 2 * kv_heads) * dim)
    attention.decode_attention(
        *(qkv, *cache, tables(requests, blocks), lens, floats(dim // 2), dim**-0.5, out, scratch)
    )


def prefill(heads: int, kv_heads: int, dim: int, block_size: int) -> None:
    counts, contexts = (5, 70, 1), (5, 90, 33)
    tokens, blocks = sum(counts), -(-max(contexts) // block_size)
    table = tables(len(counts), blocks)
    cache = [bits(len(counts) * blocks, block_size, kv_heads, dim) for _ in range(2)]
    positions = np.concatenate([np.arange(m - n, m) for n, m in zip(counts, contexts, strict=True)])
    request = np.repeat(np.arange(len(counts)), counts)
    slots = cp.asnumpy(table)[request, positions // block_size].astype(np.int64) * block_size
    slots += positions % block_size
    slots[3] = -1
    q = floats(tokens, heads, dim)
    qkv = floats(tokens, (heads + 2 * kv_heads) * dim)
    rope_write(*(qkv, cp.asarray(positions.astype(np.int32)), floats(dim // 2), cp.asarray(slots), q, *cache))
    starts = cp.asarray(np.cumsum([0, *counts]).astype(np.int32))
    lens = cp.asarray(np.array(contexts, np.int32))
    out = cp.empty((tokens, heads, dim), np.uint16)
    prefill_attention(q, *cache, table, starts, lens, max(counts), dim**-0.5, out)


def whole() -> Launches:
    """The persistent kernel, in a small model."""

    def step(context: int) -> None:
        config = ModelConfig.from_dict(
            {"model_type": "llama", "vocab_size": 521, "hidden_size": 256, "intermediate_size": 1032}
            | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
            | {"tie_word_embeddings": True, "max_position_embeddings": 8192}
        )
        llm = random_llm(config, max_num_seqs=1, max_num_batched_tokens=16, num_blocks=8, fast_path="off")
        cache = [bits(2, 100, 16, 2, 64) for _ in range(2)]
        one = [cp.asarray(np.array([value], np.int32)) for value in (3, context, 0)]
        run = DecodeStep(config, llm.model.weights)
        logits = cp.empty(521, np.float32)
        run(one[0], cp.asarray(np.arange(100, dtype=np.int32)), one[1], *cache, logits, one[2])

    for context in (1, 100, 300, 1500):
        yield f"decode_step, context {context}", lambda c=context: step(c)


def launch_all() -> int:
    """In a process under a tool: every launch; what fails is printed."""
    if is_gpu:
        cp.cuda.set_allocator(None)
    failed = count = 0
    with contextlib.nullcontext() if is_gpu else cp.checks("fast"):
        for kind in (simple, fused, whole):
            for name, run in kind():
                count += 1
                try:
                    run()
                    cp.cuda.Device().synchronize()
                except Exception:
                    failed += 1
                    print(f"FAILED {name}\n{traceback.format_exc(limit=-2)}", flush=True)
    print(f"{count} launches, {failed} failed", flush=True)
    return failed


def under(tool: str) -> tuple[str, str]:
    """A line of the table, and what the tool said where it said anything."""
    command = ["compute-sanitizer", "--tool", tool, sys.executable, __file__, "--launches"]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=REPOSITORY)
        text = done.stdout + done.stderr
    except subprocess.TimeoutExpired as stopped:
        text = f"stopped after {SECONDS} s\n{(stopped.stdout or b'').decode(errors='replace')[-3000:]}"
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", text) or ["none came"]
    launches = re.findall(r"\d+ launches, \d+ failed", text) or ["not all were launched"]
    clean = summary[-1].startswith("0 ") and launches[-1].endswith(" 0 failed")
    line = f"| {tool} | {launches[-1]} | {summary[-1]} | {time.perf_counter() - start:.0f} |"
    return line, "" if clean else text if len(text) < 12_000 else f"{text[:6000]}\n...\n{text[-6000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path)
    parser.add_argument("--launches", action="store_true", help="only launch, in this process")
    given = parser.parse_args()
    if given.launches:
        return launch_all()
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not here; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    with ThreadPoolExecutor(len(TOOLS)) as pool:
        results = list(pool.map(under, TOOLS))
    lines = [
        "# The engine's kernels under compute-sanitizer",
        "",
        f"{datetime.date.today()}; command: `python benchmarks/gpu_sanitizer.py --write benchmarks/gpu_sanitizer.md`",
        "",
        f"{describe()}. Without CuPy's memory pool.",
        "",
        "| tool | launches | its summary | seconds |",
        "|---|---|---|---|",
        *(line for line, _ in results),
    ]
    named = set(re.findall(r"access at (\w+)\+", "".join(said for _, said in results)))
    if named and named <= RINGS:
        lines.append(RING.format(names=" and ".join(f"`{name}`" for name in sorted(named))))
    text = "\n".join(lines) + "\n"
    print(text)
    for _, said in results:
        print(said, file=sys.stderr)
    if given.write:
        given.write.write_text(text, encoding="utf-8")
    return 1 if any(said for _, said in results) else 0


if __name__ == "__main__":
    sys.exit(main())
