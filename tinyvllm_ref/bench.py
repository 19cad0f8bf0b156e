"""``tinyvllm bench``: how fast a model generates here, and how near to what the device can do.

>>> for line in bench(Settings(model="tiny-stories", batches=(1, 8))):  # doctest: +SKIP
...     print(line)
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .checkpoint.names import resolve
from .config import ModelConfig
from .device import cp, describe, is_gpu
from .llm import LLM
from .lost_device import losses_named
from .random_model import preset_config, random_llm
from .speed import beside, card
from .speed.report import Subject, Table
from .speed.timing import Measurement, measure
from .speed.traffic import parameters

__all__ = ["Measurement", "Settings", "Subject", "bench"]

BLOCK_SIZE = 16
_AHEAD = 1  # tokens of a request that an engine may compute before it knows that the last one has come


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure.

    Attributes
    ----------
    model : str, PathLike or None
        ``tiny-stories``, a name that ``tinyvllm fetch`` knows, or a folder (``./NAME``).
    random : str or None
        Instead: a name of :data:`~tinyvllm_ref.random_model.PRESETS`.
    batches : tuple of int
        Numbers of requests at once.
    prompt, tokens : int
        Tokens of each prompt, and generated for each.
    batching : {"continuous", "static"}
    max_num_batched_tokens : int or None
        Of a step; None for the engine's default.
    repeats : int or None
        Runs of each batch that count; None for 3 on a card and 1 in the emulation.
    transformers : bool or None
        Measure transformers beside it. None: on a card, where it is installed.
    compiled : bool
        Measure it also with a static cache and ``torch.compile``, which takes minutes.
    json : Path or None
        A file for machines.

    Raises
    ------
    ValueError
        A setting is wrong, or two of them contradict each other.
    """

    model: str | os.PathLike[str] | None = None
    random: str | None = None
    batches: tuple[int, ...] = (1, 8)
    prompt: int = 128
    tokens: int = 128
    batching: Literal["continuous", "static"] = "continuous"
    max_num_batched_tokens: int | None = None
    repeats: int | None = None
    transformers: bool | None = None
    compiled: bool = False
    json: Path | None = None

    def __post_init__(self) -> None:
        if self.model is not None and self.random is not None:
            raise ValueError(
                f"both a model ({os.fspath(self.model)!r}) and --random {self.random} were given; give one of them"
            )
        if self.model is None and self.random is None:
            raise ValueError(
                "give a MODEL, or --random with the name of sizes that are known, such as llama-3.2-1b"
            )
        for name in ("prompt", "tokens", "repeats", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
        if self.compiled and self.transformers is False:
            raise ValueError("--compiled measures transformers; leave --no-transformers out")
        if self.json is not None and self.json.is_dir():
            raise ValueError(f"--json is {self.json}, a folder; it must be a file to write")
        if self.json is not None and not self.json.absolute().parent.is_dir():
            raise ValueError(
                f"--json is {self.json}; the folder {self.json.absolute().parent} does not exist"
            )


def bench(settings: Settings) -> Iterator[str]:
    """Measure, line by line as it is known.

    Raises
    ------
    ValueError
        The model is unknown; prompts, tokens and batches do not fit into its context or into memory; or transformers
        was asked for and can not be measured.
    DeviceLost
        This process can not use the device any more.
    """
    with losses_named():
        yield from _bench(settings)


def _bench(settings: Settings) -> Iterator[str]:
    folder = None if settings.model is None else resolve(settings.model)
    config = preset_config(str(settings.random)) if folder is None else ModelConfig.from_json(folder)
    _check_context(config, settings)
    reason = beside.missing() if _wants_transformers(settings) else "not asked for"
    if settings.compiled and not is_gpu:
        raise ValueError("--compiled: transformers compiles for a card, and none is used here")
    if reason and (settings.transformers or settings.compiled):
        raise ValueError(f"transformers can not be measured: {reason}")
    repeats = settings.repeats or (3 if is_gpu else 1)

    yield describe()
    subject = _subject(settings, config)
    yield subject.sizes()
    yield (
        f"Greedy, random prompts, {settings.batching} batching; median of {repeats} run{'s' * (repeats > 1)} after a"
        " warm-up. First token: until the last request has one. Per token: mean of the steps in which all get one."
    )
    if is_gpu:
        yield subject.rates()
        yield (
            "GB/s: the fewest bytes of a step (weights, embedding rows, KV cache) over its time. TFLOP/s: of the"
            " prompts, until the last first token."
        )
    entries: list[dict[str, Any]] = []
    notes: list[str] = []
    table = Table(subject)
    yield table.heading()
    for found in _measure_ours(settings, config, folder, repeats):
        entries.append(subject.entry("tinyvllm", found))
        yield table.row(found)
    if not reason:
        yield from _measure_theirs(settings, subject, folder, repeats, entries, notes)
    elif is_gpu and settings.transformers is None:
        notes.append(f"transformers is not measured beside it: {reason}")
        yield notes[-1]
    if not is_gpu:
        yield (
            "These are times of this computer's processor: no GPU code ran. GB/s, TFLOP/s and their shares of what a"
            " card can do are left out."
        )
    if settings.json is not None:
        text = json.dumps(_document(settings, subject, repeats, entries, notes), indent=2)
        settings.json.write_text(text + "\n", encoding="utf-8")


def _check_context(config: ModelConfig, settings: Settings) -> None:
    limit = config.max_position_embeddings
    if settings.prompt + settings.tokens > limit:
        raise ValueError(
            f"the prompt has {settings.prompt} tokens and {settings.tokens} are to follow; this model's context has"
            f" {limit}"
        )


def _wants_transformers(settings: Settings) -> bool:
    return settings.compiled or (is_gpu if settings.transformers is None else settings.transformers)


def _subject(settings: Settings, config: ModelConfig) -> Subject:
    name = settings.random or Path(os.fspath(settings.model or "")).resolve().name
    read = matrix = None
    if is_gpu:
        read = card.read_bandwidth()
        matrix = card.matrix_rate()
        card.free_memory()
    return Subject(name, settings.random is not None, config, read, matrix)


def _measure_ours(
    settings: Settings, config: ModelConfig, folder: Path | None, repeats: int
) -> Iterator[Measurement]:
    """Our engine; what it takes of the memory is given back at the end."""
    most = max(settings.batches)
    num_blocks = most * -(-(settings.prompt + settings.tokens + _AHEAD) // BLOCK_SIZE)
    _check_memory(config, num_blocks)
    options: dict[str, Any] = {
        **{"max_num_seqs": most, "num_blocks": num_blocks, "block_size": BLOCK_SIZE},
        "batching": settings.batching,
    }
    if settings.max_num_batched_tokens is not None:
        options["max_num_batched_tokens"] = settings.max_num_batched_tokens
    llm = LLM(folder, **options) if folder is not None else random_llm(str(settings.random), **options)
    try:
        yield from measure(
            llm.engine, config.vocab_size, settings.batches, settings.prompt, settings.tokens, repeats
        )
    finally:
        del llm
        gc.collect()
        card.free_memory()


def _check_memory(config: ModelConfig, num_blocks: int) -> None:
    """Refuse before minutes have gone what can not fit."""
    weights, cache = 2 * parameters(config), num_blocks * BLOCK_SIZE * config.kv_bytes_per_token
    free = int(cp.cuda.runtime.memGetInfo()[0])
    if weights + cache > free:
        raise ValueError(
            f"the weights take {weights / 1e9:.2f} GB and the KV cache of the largest batch {cache / 1e9:.2f} GB;"
            f" {free / 1e9:.2f} GB are free: choose a smaller model, smaller batches or fewer tokens"
        )


def _measure_theirs(
    settings: Settings,
    subject: Subject,
    folder: Path | None,
    repeats: int,
    entries: list[dict[str, Any]],
    notes: list[str],
) -> Iterator[str]:
    """transformers: a table for each mode, in the columns of ours, and how many times as fast ours is."""
    ours = {entry["batch"]: entry["tokens_per_second"] for entry in entries}
    names = {"eager": "eager", "compiled": "static cache and torch.compile"}
    modes: list[beside.Mode] = ["eager", "compiled"] if settings.compiled else ["eager"]
    sizes = (settings.batches, settings.prompt, settings.tokens)
    shown: beside.Mode | None = None
    table = Table(subject)
    for mode, found in beside.measure_beside(subject.config, folder, *sizes, repeats, modes):
        if mode != shown:
            shown, table = mode, Table(subject)
            what = f"{beside.version()}, {names[mode]}, the same sizes in BF16"
            yield f"{what}; last column: how many times as fast tinyvllm is"
            yield f"{table.heading()} {'tinyvllm':>11}"
        if isinstance(found, str):
            notes.append(f"transformers, {names[mode]}: {found}")
            yield notes[-1]
            continue
        entries.append(subject.entry(f"transformers {mode}", found))
        yield f"{table.row(found)} {ours[found.batch] / found.tokens_per_second:>10.2f}x"


def _document(
    settings: Settings, subject: Subject, repeats: int, entries: list[dict[str, Any]], notes: list[str]
) -> dict[str, Any]:
    """The JSON: times in seconds, sizes in bytes, rates per second."""
    asked: dict[str, Any] = {
        "prompt": settings.prompt,
        "tokens": settings.tokens,
        "batching": settings.batching,
    }
    asked |= {"max_num_batched_tokens": settings.max_num_batched_tokens, "repeats": repeats}
    device = {"device": describe(), "gpu": is_gpu}
    return device | subject.about() | asked | {"results": entries, "notes": notes}
