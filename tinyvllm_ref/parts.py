"""Parts: what a learner makes and the engine uses, with a Protocol for each and the record of them.

The engine takes every part from a :class:`Parts` and knows nothing of who made it. A part that nobody has
made is None here; the engine's assembly fills those from the reference.

Notation: T tokens of one step, packed over B requests; H hidden, F ffn, V vocabulary, D head_dim, Hq and Hk
query and KV heads; NB blocks of BS slots. ``Array`` is a device array, C-contiguous; its dtype is given as
``bf16`` where it holds bfloat16 bits as uint16. Array parts write into `out`, which the caller allocates, and
return it; a wrong shape or dtype raises ValueError.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tinyvllm_ref.checkpoint.safetensors import TensorView
    from tinyvllm_ref.config import ModelConfig
    from tinyvllm_ref.request import Request
    from tinyvllm_ref.sampling_params import SamplingParams
    from tinyvllm_ref.scheduler import ScheduledBatch

Array = Any
Attend = Callable[[int, Array, Array, Array, Array], Array]
"""``attend(layer, q, k, v, out)``: given by whoever owns the KV cache."""


class ReadSafetensors(Protocol):
    """A safetensors file -> its tensors, as views of one map of the file."""

    def __call__(self, path: str | os.PathLike[str], /) -> Mapping[str, TensorView]: ...


class FloatToBf16(Protocol):
    """NumPy float32 -> uint16 bits, to nearest, ties to even; a NaN stays a NaN."""

    def __call__(self, x: Any, /) -> Any: ...


class Bf16ToFloat(Protocol):
    """NumPy uint16 bits -> float32, exactly."""

    def __call__(self, u: Any, /) -> Any: ...


class TextStreamPart(Protocol):
    """Decodes tokens as they come; never half a character."""

    def push(self, id: int, /) -> str: ...

    def end(self) -> str: ...


class TokenizerPart(Protocol):
    """Text <-> token ids. The part is the class; it is called with the model's folder."""

    def encode(self, text: str, /) -> list[int]: ...

    def decode(self, ids: Sequence[int], /) -> str: ...

    def stream(self) -> TextStreamPart: ...


class LoadWeights(Protocol):
    """Views -> one arena on the device, as a dict of name -> array.

    Query, key and value are one array ``qkv`` (Hq*D + 2*Hk*D, H); gate and up are ``gate_up`` (2F, H).
    """

    def __call__(self, views: Mapping[str, TensorView], config: ModelConfig, /) -> dict[str, Array]: ...


class Embedding(Protocol):
    """ids (T,) int32, table (V, H) bf16 -> out (T, H) float32."""

    def __call__(self, ids: Array, table: Array, out: Array, /) -> Array: ...


class RmsNorm(Protocol):
    """x (T, H) float32, weight (H,) bf16 -> out (T, H) bf16: x / sqrt(mean(x^2) + eps) * weight."""

    def __call__(self, x: Array, weight: Array, eps: float, out: Array, /) -> Array: ...


class AddRmsNorm(Protocol):
    """residual (T, H) float32 += x in place, then the norm of residual -> out (T, H) bf16."""

    def __call__(self, x: Array, residual: Array, weight: Array, eps: float, out: Array, /) -> Array: ...


class Linear(Protocol):
    """x (T, K) bf16, w (N, K) bf16 -> out (T, N) float32 = x w^T."""

    def __call__(self, x: Array, w: Array, out: Array, /) -> Array: ...


class Attention(Protocol):
    """One request: q (n, Hq, D) float32, k and v (m, Hk, D) bf16, n <= m -> out (n, Hq, D) bf16.

    Query i sees keys j <= m - n + i. Lesson 10's needs Hk = Hq.
    """

    def __call__(self, q: Array, k: Array, v: Array, scale: float, out: Array, /) -> Array: ...


class RopeFrequencies(Protocol):
    """The config -> (D/2,) float32 on the device, scaling included."""

    def __call__(self, config: ModelConfig, /) -> Array: ...


class Rope(Protocol):
    """Rotates q (T, Hq, D) and k (T, Hk, D) float32 in place.

    positions (T,) int32, inv_freq (D/2,) float32; column i turns with column i + D/2.
    """

    def __call__(self, q: Array, k: Array, positions: Array, inv_freq: Array, /) -> Any: ...


class SiluMul(Protocol):
    """gate_up (T, 2F) float32, gate first -> out (T, F) bf16: silu(gate) * up."""

    def __call__(self, gate_up: Array, out: Array, /) -> Array: ...


class DecoderLayer(Protocol):
    """One layer, composed of the other parts; x and residual (T, H) float32, changed in place; returns x.

    `residual` is the stream. What the block before computed comes in x and has still to be added to it; before
    layer 0 nothing has, and x is not read. What this layer's feed-forward block computes goes out in x, not added.
    `weights` are the arrays by name (``"layers.3.qkv"``, and ``"inv_freq"``), with the model's sizes in
    ``weights.config``; the tokens' positions are in ``attend.positions``.
    """

    def __call__(
        self, x: Array, residual: Array, weights: Mapping[str, Array], layer: int, attend: Attend, /
    ) -> Any: ...


class Forward(Protocol):
    """ModelInputs -> logits (R, V) float32 of the rows in ``inputs.logits_rows``.

    `weights` as for `decoder_layer`; ``weights.lm_head`` is the embedding table where the two are tied.
    """

    def __call__(self, inputs: Any, weights: Mapping[str, Array], attend: Attend, /) -> Array: ...


class Argmax(Protocol):
    """logits (R, V) float32 -> out (R,) int32; the lowest index on ties."""

    def __call__(self, logits: Array, out: Array, /) -> Array: ...


class KvWrite(Protocol):
    """k, v (T, Hk, D) float32 -> the caches (NB, BS, Hk, D) bf16 of one layer.

    slots (T,) int64; slot = block * BS + offset; -1 skips.
    """

    def __call__(self, k: Array, v: Array, slots: Array, key_cache: Array, value_cache: Array, /) -> Any: ...


class PlanBuffers(Protocol):
    """(bytes, first, last) of each buffer -> (offsets, total bytes), each offset a multiple of 256."""

    def __call__(self, lifetimes: Sequence[tuple[int, int, int]], /) -> tuple[list[int], int]: ...


class Sample(Protocol):
    """logits (R, V) float32, R options, steps (R,) -> (R,) int32. Uniforms come from (seed, step) alone.

    Every option has a seed, and penalties have been applied. A step in which all are greedy goes to `argmax`.
    """

    def __call__(self, logits: Array, params: Sequence[SamplingParams], steps: Array, /) -> Array: ...


class Pack(Protocol):
    """Ragged token lists -> ids (T,), positions (T,), query_starts (B+1,), all int32."""

    def __call__(self, sequences: Sequence[Sequence[int]], /) -> tuple[Array, Array, Array]: ...


class SchedulerPart(Protocol):
    """Who computes what next. The part is the class; it is called with (max_seqs, max_tokens, blocks)."""

    def add(self, request: Request, /) -> None: ...

    def schedule(self) -> ScheduledBatch: ...

    def update(self, batch: ScheduledBatch, ids: Sequence[int], /) -> list[Request]: ...

    def abort(self, id: str, /) -> Any: ...


class MergeAttention(Protocol):
    """Two partial attention results with their scores' log-sum-exp -> merged; an empty one has lse -inf."""

    def __call__(self, out_a: Array, lse_a: Array, out_b: Array, lse_b: Array, /) -> tuple[Array, Array]: ...


class BlockManagerPart(Protocol):
    """Who owns which block. The part is the class; it is called with (num_blocks, block_size)."""

    @property
    def num_free(self) -> int: ...

    def allocate(self, id: str, num_tokens: int, /) -> bool: ...

    def free(self, id: str, /) -> None: ...

    def table(self, id: str, /) -> list[int]: ...

    def check(self) -> None: ...


class PagedAttention(Protocol):
    """q (B, Hq, D) float32, one query a request, caches (NB, BS, Hk, D) bf16 -> out (B, Hq, D) bf16.

    block_tables (B, max_blocks) int32, padded with -1; context_lens (B,) int32, the new token included.
    """

    def __call__(
        self,
        q: Array,
        key_cache: Array,
        value_cache: Array,
        block_tables: Array,
        context_lens: Array,
        scale: float,
        out: Array,
        /,
    ) -> Array: ...


class EnginePart(Protocol):
    """The loop. The part is the class; it is called with (model, parts, config).

    ``add_request`` takes a :class:`~tinyvllm_ref.request.Request`. ``step`` gives, for each request that got on,
    an object with ``request_id``, ``finished`` and ``outputs``: of each completion ``token_ids`` so far and
    ``finish_reason``. The text is made of them by whoever asked.
    """

    @property
    def has_work(self) -> bool: ...

    def add_request(self, request: Any, /) -> Any: ...

    def step(self) -> list[Any]: ...

    def abort(self, id: str, /) -> Any: ...


class ServedDelta(Protocol):
    """What one step added to one completion (:class:`~tinyvllm_ref.server.deltas.Delta`).

    `index` of the completion, from 0 to n - 1; `text` that is certain now, often ""; the new `token_ids`; the
    `logprobs` of these, where asked for; `finish_reason` "stop" or "length" in a completion's last delta.
    """

    @property
    def index(self) -> int: ...

    @property
    def text(self) -> str: ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def logprobs(self) -> Sequence[Mapping[int, Any]] | None: ...

    @property
    def finish_reason(self) -> str | None: ...


class ServedStream(Protocol):
    """What comes back for a prompt: ``async for delta in stream``, until all its completions have finished.

    ``abort()`` ends it early; the engine frees its blocks before the next step. Nothing else does: a stream that
    is merely dropped runs on.
    """

    @property
    def request_id(self) -> str: ...

    @property
    def prompt_token_ids(self) -> Sequence[int]: ...

    def __aiter__(self) -> AsyncIterator[ServedDelta]: ...

    def abort(self) -> None: ...


class ServedEngine(Protocol):
    """An engine for an event loop (:class:`~tinyvllm_ref.server.async_engine.AsyncEngine`).

    One thread of its own makes the steps; no method here waits for one, but ``await submit(...)``, which gives
    the stream once the request is in the queue. It raises ValueError where the request can never fit, and
    ``EngineBusy`` or ``EngineStopped`` where it cannot be taken now.
    """

    @property
    def model_name(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    def encode(self, text: str, /) -> list[int]: ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /) -> list[int]: ...

    def decode(self, ids: Sequence[int], /) -> str: ...

    async def submit(self, prompt_token_ids: Sequence[int], params: SamplingParams, /) -> ServedStream: ...

    def abort(self, request_id: str, /) -> None: ...


class BuildApp(Protocol):
    """An engine -> an ASGI application that serves it as OpenAI's API does.

    The application answers `/v1/models`, `/v1/completions` and `/v1/chat/completions`. Key, host and length of
    the body are checked before a request reaches it, by ``tinyvllm serve``.
    """

    def __call__(self, engine: ServedEngine, /) -> Any: ...


class PartsError(ValueError):
    """A folder of parts cannot be used; the message names the part and the file."""


LESSONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "read_safetensors": ("01",),
        "float_to_bf16": ("02",),
        "bf16_to_float": ("02",),
        "BF16_CUDA": ("02",),
        "Tokenizer": ("03",),
        "load_weights": ("04",),
        "embedding": ("05",),
        "BLOCK_SUM_CUDA": ("06",),
        "rms_norm": ("07",),
        "add_rms_norm": ("07",),
        "linear": ("09",),
        "attention": ("10",),
        "rope_frequencies": ("11",),
        "rope": ("11",),
        "attention_gqa": ("12",),
        "silu_mul": ("13",),
        "decoder_layer": ("13",),
        "forward": ("14",),
        "argmax": ("14",),
        "kv_write": ("15", "21"),
        "plan_buffers": ("16",),
        "sample": ("17",),
        "pack": ("18",),
        "Scheduler": ("19", "23"),
        "attention_tiled": ("20",),
        "merge_attention": ("20",),
        "BlockManager": ("21",),
        "paged_attention": ("22",),
        "Engine": ("23",),
        "build_app": ("24",),
    }
)
"""The lessons whose exercises make each part, in the order of the lessons."""


@dataclass(frozen=True)
class Parts:
    """The parts of one engine; None where nobody has made one.

    Each field's Protocol says what it must do. `attention` is lesson 10's, `attention_gqa` lesson 12's and
    `attention_tiled` lesson 20's: the same contract, and the newest that is there is used.

    >>> parts = Parts().replace(rms_norm=my_rms_norm)  # doctest: +SKIP
    >>> parts.owners()["rms_norm"]  # doctest: +SKIP
    'learner'
    """

    read_safetensors: ReadSafetensors | None = None
    float_to_bf16: FloatToBf16 | None = None
    bf16_to_float: Bf16ToFloat | None = None
    BF16_CUDA: str | None = None
    Tokenizer: Callable[[str | os.PathLike[str]], TokenizerPart] | None = None
    load_weights: LoadWeights | None = None
    embedding: Embedding | None = None
    BLOCK_SUM_CUDA: str | None = None
    rms_norm: RmsNorm | None = None
    add_rms_norm: AddRmsNorm | None = None
    linear: Linear | None = None
    attention: Attention | None = None
    rope_frequencies: RopeFrequencies | None = None
    rope: Rope | None = None
    attention_gqa: Attention | None = None
    silu_mul: SiluMul | None = None
    decoder_layer: DecoderLayer | None = None
    forward: Forward | None = None
    argmax: Argmax | None = None
    kv_write: KvWrite | None = None
    plan_buffers: PlanBuffers | None = None
    sample: Sample | None = None
    pack: Pack | None = None
    Scheduler: Callable[..., SchedulerPart] | None = None
    attention_tiled: Attention | None = None
    merge_attention: MergeAttention | None = None
    BlockManager: Callable[[int, int], BlockManagerPart] | None = None
    paged_attention: PagedAttention | None = None
    Engine: Callable[..., EnginePart] | None = None
    build_app: BuildApp | None = None
    _owners: Mapping[str, str] = field(
        default_factory=lambda: MappingProxyType({}), repr=False, compare=False
    )

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """All parts, in the order of the lessons."""
        return tuple(LESSONS)

    def replace(self, *, owner: str = "learner", **parts: Any) -> Parts:
        """A copy with some parts exchanged; None takes one out.

        Parameters
        ----------
        owner : str
            Who made them: ``"learner"``, or ``"reference"``.
        **parts
            By name.

        Raises
        ------
        ValueError
            There is no part of that name.
        """
        self._check_names(parts)
        values = {name: getattr(self, name) for name in self.names()} | parts
        owners = {**self._owners, **dict.fromkeys(parts, owner)}
        owners = {name: who for name, who in owners.items() if values[name] is not None}
        return type(self)(**values, _owners=MappingProxyType(owners))

    def owners(self) -> dict[str, str]:
        """Who made each part that is there, in the order of the lessons."""
        return {
            name: self._owners.get(name, "learner")
            for name in self.names()
            if getattr(self, name) is not None
        }

    def missing(self) -> tuple[str, ...]:
        """The parts that are not there."""
        return tuple(name for name in self.names() if getattr(self, name) is None)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Parts:
        """The parts that a learner's folder holds, as its ``parts.json`` lists them.

        ``parts.json`` is written when an exercise's check passes::

            {"version": 1, "parts": {
                "rms_norm": {"file": "rms_norm.py", "name": "rms_norm"},
                "BLOCK_SUM_CUDA": {"file": "block_sum.cu"}}}

        A ``.py`` file is imported, and the part is what it calls `name` (by default the part's own name); the
        text of any other file is the part.

        Parameters
        ----------
        folder : str or PathLike
            Such as ``my_engine/``; one that does not exist holds no parts.

        Raises
        ------
        PartsError
            ``parts.json`` is malformed, names an unknown part or a file outside the folder, or a file fails.
        """
        folder = Path(folder).resolve()
        listing = folder / "parts.json"
        if not listing.is_file():
            return cls()
        modules: dict[Path, ModuleType] = {}
        _forget_modules(folder)
        return cls().replace(
            **{
                name: _load_part(folder, name, entry, modules)
                for name, entry in _read_listing(listing).items()
            }
        )

    @classmethod
    def _check_names(cls, names: Any) -> None:
        known = cls.names()
        for name in names:
            if name not in known:
                raise ValueError(f"there is no part {name!r}; the parts are {', '.join(known)}")


def _read_listing(listing: Path) -> dict[str, Any]:
    """The entries of parts.json, names checked."""
    try:
        content = json.loads(listing.read_text(encoding="utf-8"))
        version, entries = content["version"], content["parts"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PartsError(f"{listing}: is not JSON with version and parts: {error!r}") from None
    if version != 1:
        raise PartsError(f"{listing}: version is {version!r}; this program reads 1")
    if not isinstance(entries, dict):
        raise PartsError(f"{listing}: parts is {entries!r}; it must be an object")
    unknown = [name for name in entries if name not in Parts.names()]
    if unknown:
        raise PartsError(
            f"{listing}: there is no part {unknown[0]!r}; the parts are {', '.join(Parts.names())}"
        )
    return entries


def _load_part(folder: Path, name: str, entry: Any, modules: dict[Path, ModuleType]) -> Any:
    """One part, from its file."""
    file = entry.get("file") if isinstance(entry, dict) else None
    if not isinstance(file, str):
        raise PartsError(f"{folder}: part {name!r} is {entry!r}; it must be an object with a file")
    path = (folder / file).resolve()
    if not path.is_relative_to(folder) or not path.is_file():
        raise PartsError(f"{folder}: part {name!r} lies in {file!r}, which is no file in this folder")
    if path.suffix != ".py":
        return path.read_text(encoding="utf-8")
    if path not in modules:
        modules[path] = _import_file(path, name)
    attribute = entry.get("name", name)
    if not isinstance(attribute, str) or not hasattr(modules[path], attribute):
        raise PartsError(f"{path}: has no {attribute!r}, which parts.json gives for part {name!r}")
    return getattr(modules[path], attribute)


def _import_file(path: Path, part: str) -> ModuleType:
    """Run a file as a module of its folder, anew each time, under a name that shadows nothing.

    The files may import one another: ``from .earlier import BF16_CUDA``.
    """
    package = f"my_engine_{zlib.crc32(os.fsencode(path.parent)):08x}"
    if package not in sys.modules:
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [str(path.parent)]
    writes_bytecode, sys.dont_write_bytecode = (
        sys.dont_write_bytecode,
        True,
    )  # it would outlive a quick change
    try:
        importlib.invalidate_caches()
        return importlib.import_module(f"{package}.{path.stem}")
    except Exception as error:
        raise PartsError(f"{path}: part {part!r} fails: {type(error).__name__}: {error}") from error
    finally:
        sys.dont_write_bytecode = writes_bytecode


def _forget_modules(folder: Path) -> None:
    """Modules of an earlier load of this folder and those below it."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.startswith("my_engine_") and file is not None and Path(file).is_relative_to(folder):
            del sys.modules[name]
