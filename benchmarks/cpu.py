"""How fast the engine is in the emulation, beside Hugging Face transformers on the same cores: one run, one table.

    python benchmarks/cpu.py [--transformers PYTHON] [--rounds 3] [--write benchmarks/cpu.md]

PYTHON is an interpreter that has torch and transformers, this one or another. Everything is measured in processes of
its own, one after the other and in turns, so that what else the machine does meets all of them; a measurement during
which other processes took more than a twentieth of the cores is made again, ten times at most. A step is one
token of one request, greedy, after a prompt of 16 tokens; its time is the median of 96. Peak memory is the largest
resident set that the operating system saw of a process that loads the model, prefills and generates.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
MODEL = "smollm2-135m-instruct"
PROMPT, STEPS, PREFILL = 16, 96, 256
THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
QUIET, TRIES = 0.05, 10  # the share of the cores that others may take, and how often it is tried
ENGINE, PARTS = "tinyvllm", "tinyvllm, by part"
OTHERS = {"transformers, float32": "float32", "transformers, bfloat16": "bfloat16"}


def tokens(count: int, offset: int = 0) -> list[int]:
    """Some token ids; another offset gives others, so that nothing can be kept from one time to the next."""
    return [1000 + 7 * k + offset for k in range(count)]


def peak_megabytes() -> float:
    """Of this process so far."""
    scale = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e6


# ---------------- workers: each prints one JSON object


def measure_engine(folder: str) -> dict[str, Any]:
    """The engine as a user has it."""
    sys.path.insert(0, str(HERE.parent.parent))
    from tinyvllm_ref import LLM
    from tinyvllm_ref.device import describe

    began = time.perf_counter()
    llm = LLM(folder, max_num_seqs=1)
    loaded = time.perf_counter() - began
    run_engine(llm, tokens(PROMPT), 2)  # compiles the kernels, where that has not been done
    steps = run_engine(llm, tokens(PROMPT), STEPS)[1:]
    prefills = [run_engine(llm, tokens(PREFILL, k), 1)[0] for k in range(3)]
    return {
        "what": describe(),
        "load": loaded,
        "step": statistics.median(steps),
        "prefill": min(prefills),
        "peak": peak_megabytes(),
    }


def run_engine(llm: Any, ids: list[int], count: int) -> list[float]:
    """Seconds of each step."""
    from tinyvllm_ref import SamplingParams
    from tinyvllm_ref.request import Request

    llm.engine.add_request(
        Request("0", ids, SamplingParams(max_tokens=count, temperature=0, ignore_eos=True))
    )
    seconds = []
    while llm.engine.has_work:
        began = time.perf_counter()
        llm.engine.step()
        seconds.append(time.perf_counter() - began)
    return seconds


def measure_parts(folder: str) -> dict[str, Any]:
    """Where a step's time goes: each part, with a clock around it."""
    sys.path.insert(0, str(HERE.parent.parent))
    from tinyvllm_ref import LLM
    from tinyvllm_ref.assembly import Parts

    clocks: dict[str, list[float]] = {}

    def timed(name: str, part: Any) -> Any:
        own = clocks[name] = []

        def call(*args: Any) -> Any:
            began = time.perf_counter()
            result = part(*args)
            own.append(time.perf_counter() - began)
            return result

        return call

    names = (
        *("embedding", "rms_norm", "add_rms_norm", "linear", "rope", "kv_write", "paged_attention"),
        *("silu_mul", "argmax"),
    )
    reference = Parts.reference()
    timed_parts = {name: timed(name, getattr(reference, name)) for name in names}
    llm = LLM(folder, parts=reference.replace(owner="reference", **timed_parts), max_num_seqs=1)
    run_engine(llm, tokens(PROMPT), 2)
    for own in clocks.values():
        own.clear()
    steps = run_engine(llm, tokens(PROMPT), STEPS)
    total = sum(steps[1:])
    parts = {}
    for name, own in clocks.items():
        calls = len(own) // STEPS if name != "paged_attention" else len(own) // (STEPS - 1)
        decode = own[calls:] if name != "paged_attention" else own  # without those of the prefill
        parts[name] = {"calls": calls, "seconds": sum(decode) / (STEPS - 1)}
    rest = total / (STEPS - 1) - sum(part["seconds"] for part in parts.values())
    parts["all else"] = {"calls": 0, "seconds": rest}
    return {"parts": parts, "step": total / (STEPS - 1)}


def measure_transformers(folder: str, dtype: str) -> dict[str, Any]:
    """The same steps with transformers' model and its cache, in a plain loop."""
    import torch
    import transformers

    torch.set_num_threads(THREADS)
    began = time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    loaded = time.perf_counter() - began
    with torch.inference_mode():
        steps: list[float] = []
        for _ in range(2):
            ids, past = torch.tensor([tokens(PROMPT)]), None
            steps.clear()
            for _ in range(STEPS):
                began = time.perf_counter()
                out = model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
                ids, past = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
                int(ids)
                steps.append(time.perf_counter() - began)
        prefills = []
        for k in range(3):
            began = time.perf_counter()
            model(torch.tensor([tokens(PREFILL, k)]), logits_to_keep=1)
            prefills.append(time.perf_counter() - began)
    return {
        "what": f"transformers {transformers.__version__}, torch {torch.__version__}, {THREADS} threads",
        "load": loaded,
        "step": statistics.median(steps[1:]),
        "prefill": min(prefills),
        "peak": peak_megabytes(),
    }


# ---------------- the run


def busy_seconds() -> float:
    """Processor time that all processes of the machine have used so far; 0 where the system does not say it."""
    try:
        user, nice, system, _idle, _waiting, *rest = (
            Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        )
    except OSError:
        return 0.0
    return sum(map(int, (user, nice, system, *rest[:3]))) / os.sysconf("SC_CLK_TCK")


def run_quietly(python: str, name: str, folder: str) -> dict[str, Any]:
    """One worker to its end; again, where other processes took the cores from it, and the quietest run counts."""
    best: dict[str, Any] = {}
    for _ in range(TRIES):
        began, busy = time.perf_counter(), busy_seconds()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = run_worker(python, name, folder)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        own = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        others = max(0.0, busy_seconds() - busy - own) / (time.perf_counter() - began) / THREADS
        if not best or others < best["others"]:
            best = {**result, "others": others}
        if others < QUIET:
            break
    return best


def run_worker(python: str, name: str, folder: str) -> dict[str, Any]:
    """One worker to its end."""
    done = subprocess.run(
        [python, str(HERE), "--worker", name, "--model", folder], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr.strip()}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def processor() -> str:
    """The processor's name, where the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def middle(results: list[dict[str, Any]], name: str) -> float:
    return float(statistics.median(result[name] for result in results))


def report(results: dict[str, list[dict[str, Any]]], parts: dict[str, Any], load: tuple[float, float]) -> str:
    """The record, in Markdown."""
    # Where the other interpreter lies says nothing to a reader.
    places = {place: "PYTHON" for flag, place in itertools.pairwise(sys.argv) if flag == "--transformers"}
    command = "python benchmarks/cpu.py " + " ".join(places.get(word, word) for word in sys.argv[1:])
    others = max(result["others"] for found in [*results.values(), [parts]] for result in found)
    lines = [
        "# The engine on a CPU",
        "",
        f"{datetime.date.today()}, {THREADS} cores of {processor()}, {platform.system()}, Python"
        f" {platform.python_version()}; load average {load[0]:.2f} before, {load[1]:.2f} after. Command:"
        f" `{command.strip()}`",
        "",
        f"SmolLM2-135M-Instruct, one request, greedy. Medians of {len(results[ENGINE])} rounds in turns."
        f" Other processes took at most {others:.0%} of the cores during a measurement.",
        "",
        "| | ms a token | tokens/s | ratio | prefill of 256 tokens, ms | peak memory, MB | load, s |",
        "|---|---|---|---|---|---|---|",
    ]
    own = middle(results[ENGINE], "step")
    for name, found in results.items():
        step = middle(found, "step")
        lines.append(
            f"| {name} | {step * 1e3:.1f} | {1 / step:.1f} | {own / step:.2f} | {middle(found, 'prefill') * 1e3:.0f}"
            f" | {max(result['peak'] for result in found):.0f} | {middle(found, 'load'):.1f} |"
        )
    lines += [
        "",
        "Ratio: tokens/s in units of the engine's. "
        + "; ".join(dict.fromkeys(found[0]["what"] for found in results.values()))
        + ".",
        "",
        f"Time of a step by part ({parts['step'] * 1e3:.1f} ms, with clocks around each part; the rest is what lies"
        " between them: splitting q, k and v, the scheduler, the arrays of the step, Python):",
        "",
        "| part | calls | ms a token | share |",
        "|---|---|---|---|",
    ]
    for name, part in sorted(parts["parts"].items(), key=lambda item: -item[1]["seconds"]):
        share = part["seconds"] / parts["step"]
        lines.append(f"| {name} | {part['calls'] or ''} | {part['seconds'] * 1e3:.2f} | {share:.0%} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--transformers", metavar="PYTHON", help="an interpreter with torch and transformers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", metavar="FILE", help="keep the record here")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        if options.worker in OTHERS:
            found = measure_transformers(options.model, OTHERS[options.worker])
        else:
            found = (measure_engine if options.worker == ENGINE else measure_parts)(options.model)
        print(json.dumps(found))
        return
    sys.path.insert(0, str(HERE.parent.parent))
    from tinyvllm_ref.checkpoint.names import resolve

    folder = str(resolve(options.model))
    before = os.getloadavg()[0]
    contenders = {ENGINE: sys.executable}
    if options.transformers:
        contenders |= dict.fromkeys(OTHERS, options.transformers)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for _ in range(options.rounds):
        for name, python in contenders.items():
            results[name].append(run_quietly(python, name, folder))
    parts = run_quietly(sys.executable, PARTS, folder)
    text = report(results, parts, (before, os.getloadavg()[0]))
    print(text, end="")
    if options.write:
        Path(options.write).write_text(text)


if __name__ == "__main__":
    main()
