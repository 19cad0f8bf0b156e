"""The server with one client at a time and with 64 at once: one run, one table.

    python benchmarks/server.py [--clients 64] [--rounds 3] [--write benchmarks/server.md]

`tinyvllm serve tiny-stories` runs in a process of its own; the clients are coroutines of this one, on the same cores,
so what they cost is in the figures; how long each of the two computed is said below the table. Each client sends one
streamed completion of 64 tokens (prompts of 3 to 30 tokens, half of them greedy, all with a seed, no early end). First
the clients come one after the other, then all at once, in turns for each round; every text must be the same both times.
The time to first token is from the sending of the request to the first event that has text.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).resolve()
MODEL = "tiny-stories"
TOKENS = 64
STARTS = [
    "Once upon a time",
    "The dog",
    "One sunny morning",
    "Tim was sad because",
    "Mia and Ben went",
    "It was",
]


@dataclass(frozen=True, slots=True)
class Stream:
    """One answer: its text, and seconds from the request to its first and to its last piece."""

    text: str
    first: float
    last: float


async def ask(client: httpx.AsyncClient, number: int) -> Stream:
    """One streamed completion, its own for each number."""
    start = STARTS[number % len(STARTS)]
    body = {
        "model": MODEL,
        "prompt": " ".join([start] * (1 + number % 6)),
        "max_tokens": TOKENS,
        "temperature": number % 2,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
    }
    began = time.perf_counter()
    text, first = "", 0.0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            first = first or time.perf_counter() - began
    return Stream(text, first, time.perf_counter() - began)


async def one_by_one(client: httpx.AsyncClient, clients: int) -> list[Stream]:
    return [await ask(client, number) for number in range(clients)]


async def all_at_once(client: httpx.AsyncClient, clients: int) -> list[Stream]:
    return list(await asyncio.gather(*(ask(client, number) for number in range(clients))))


async def timed(work: Coroutine[Any, Any, list[Stream]]) -> tuple[float, list[Stream]]:
    began = time.perf_counter()
    streams = await work
    return time.perf_counter() - began, streams


def computed(process: int) -> float:
    """Seconds that all threads of another process have computed; NaN where the system has no /proc."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return math.nan
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(
    url: str, server: int, clients: int, rounds: int
) -> tuple[dict[str, list[tuple[float, list[Stream]]]], list[tuple[float, float]]]:
    """Of each round: (seconds, streams) with one client at a time and with all at once, and for the latter the seconds
    that clients and server computed."""
    costs = []
    results: dict[str, list[tuple[float, list[Stream]]]] = {
        "one client at a time": [],
        f"{clients} at once": [],
    }
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        await all_at_once(client, clients)  # connections are made, kernels compiled
        for _ in range(rounds):
            for (_, found), way in zip(results.items(), (one_by_one, all_at_once), strict=True):
                before = time.process_time(), computed(server)
                found.append(await timed(way(client, clients)))
            costs.append((time.process_time() - before[0], computed(server) - before[1]))
    texts = {tuple(stream.text for stream in streams) for found in results.values() for _, streams in found}
    if len(texts) != 1:
        raise SystemExit("some client did not get the text that it gets alone")
    return results, costs


def start_server(clients: int) -> tuple[subprocess.Popen[str], str]:
    """The process, and where it listens."""
    command = [
        sys.executable,
        "-m",
        "tinyvllm_ref",
        "serve",
        MODEL,
        "--port",
        "0",
        "--max-num-seqs",
        str(clients),
    ]
    process = subprocess.Popen(
        command, cwd=HERE.parent.parent, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    for line in process.stdout or ():
        if " is served at " in line:
            return process, line.split(" is served at ")[1].split()[0]
    raise SystemExit("the server did not start")


def processor() -> str:
    """The processor's name, where the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def report(
    results: dict[str, list[tuple[float, list[Stream]]]],
    costs: list[tuple[float, float]],
    clients: int,
    load: tuple[float, float],
    what: str,
) -> str:
    """The record, in Markdown."""
    command = " ".join(["python benchmarks/server.py", *sys.argv[1:]])
    rounds = len(next(iter(results.values())))
    lines = [
        "# The server, with one client and with many",
        "",
        f"{datetime.date.today()}, {os.cpu_count()} cores of {processor()}, {platform.system()}, Python"
        f" {platform.python_version()}; load average {load[0]:.2f} before, {load[1]:.2f} after. Command: `{command}`",
        "",
        f"{MODEL}, {clients} streamed completions of {TOKENS} tokens. Medians of {rounds} rounds in turns; server and"
        f" clients share the cores. {what}.",
        "",
        "| | tokens/s | ratio | first token, ms: p50 | p95 | between tokens, ms |",
        "|---|---|---|---|---|---|",
    ]
    base = 0.0
    for name, found in results.items():
        rate = clients * TOKENS / statistics.median(seconds for seconds, _ in found)
        base = base or rate
        streams = list(itertools.chain.from_iterable(streams for _, streams in found))
        firsts = sorted(stream.first for stream in streams)
        between = statistics.median((stream.last - stream.first) / (TOKENS - 1) for stream in streams)
        p50, p95 = (firsts[int(share * (len(firsts) - 1))] for share in (0.5, 0.95))
        lines.append(
            f"| {name} | {rate:.0f} | {rate / base:.2f} | {p50 * 1e3:.0f} | {p95 * 1e3:.0f} | {between * 1e3:.1f} |"
        )
    many_rounds = list(results.values())[1]
    ratios = [one / many for (one, _), (many, _) in zip(*results.values(), strict=True)]
    lines += [
        "",
        f"All {clients} texts were the same in all {2 * rounds} runs. Ratio in each round:"
        f" {', '.join(f'{ratio:.2f}' for ratio in ratios)}.",
    ]
    whole = statistics.median(seconds for seconds, _ in many_rounds)
    ours, theirs = (statistics.median(cost) for cost in zip(*costs, strict=True))
    lines += [
        "",
        f"With {clients} at once the clients computed for {ours:.2f} s, the server's threads together for"
        f" {theirs:.2f} s (medians), and a round took {whole:.2f} s.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", metavar="FILE", help="keep the record here")
    options = parser.parse_args()
    sys.path.insert(0, str(HERE.parent.parent))
    from tinyvllm_ref.device import describe

    before = os.getloadavg()[0]
    process, url = start_server(options.clients)
    try:
        results, costs = asyncio.run(measure(url, process.pid, options.clients, options.rounds))
    finally:
        process.terminate()
        process.wait(60)
    text = report(results, costs, options.clients, (before, os.getloadavg()[0]), describe())
    print(text, end="")
    if options.write:
        Path(options.write).write_text(text)


if __name__ == "__main__":
    main()
