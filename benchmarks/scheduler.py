"""Time of the scheduler and block manager for one step of 64 running requests.

    python benchmarks/scheduler.py

Prints, for steps of pure decode and for a mix with a prompt that is computed in chunks, the median and the
99th percentile of ``schedule`` and ``update`` together, in microseconds.
"""

from __future__ import annotations

import gc
import json
import platform
import statistics
import time

from tinyvllm_ref.block_manager import BlockManager
from tinyvllm_ref.request import Request
from tinyvllm_ref.sampling_params import SamplingParams
from tinyvllm_ref.scheduler import Scheduler

RUNNING = 64
STEPS = 2000
PARAMS = SamplingParams(max_tokens=8192, ignore_eos=True)


def main() -> None:
    """Measure, and print one line of JSON per case."""
    for name, num_blocks, prompt_every in (
        ("64 decodes", 64 * 300, None),
        ("64 decodes, a long prompt behind them", 64 * 500, 20),
        ("64 requests, blocks for 40 of them: preemptions", 40 * 130, None),
    ):
        times, preemptions = measure(num_blocks, prompt_every)
        result = {
            "case": name,
            "steps": len(times),
            "median_us": round(statistics.median(times) * 1e6, 1),
            "p99_us": round(statistics.quantiles(times, n=100)[98] * 1e6, 1),
            "preemptions": preemptions,
            "python": platform.python_version(),
            "machine": platform.machine(),
        }
        print(json.dumps(result))


def measure(num_blocks: int, prompt_every: int | None) -> tuple[list[float], int]:
    """Seconds of each step, and how many preemptions there were."""
    scheduler = Scheduler(RUNNING + 1, 512, BlockManager(num_blocks, 16), max_model_len=16 * num_blocks)
    for index in range(RUNNING):
        scheduler.add(Request(f"decode-{index}", list(range(100 + 7 * index % 50)), PARAMS))
    while any(request.num_output_tokens == 0 for request in scheduler.running) or scheduler.waiting:
        batch = scheduler.schedule()
        scheduler.update(batch, [7] * sum(batch.samples))
    gc.collect()
    times = []
    preemptions = 0
    for step in range(STEPS):
        if prompt_every and step % prompt_every == 0:
            scheduler.add(Request(f"prompt-{step}", list(range(4000)), SamplingParams(max_tokens=1)))
        begin = time.perf_counter()
        batch = scheduler.schedule()
        scheduled = time.perf_counter() - begin
        ids = [7] * sum(batch.samples)
        begin = time.perf_counter()
        scheduler.update(batch, ids)
        times.append(scheduled + time.perf_counter() - begin)
        preemptions += len(batch.preempted)
    scheduler.blocks.check()  # type: ignore[attr-defined]
    return times, preemptions


if __name__ == "__main__":
    main()
