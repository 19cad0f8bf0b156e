"""Parts put together into an engine: what nobody has made comes from the reference, and adapters join the rest.

>>> from tinyvllm_ref.assembly import Parts
>>> llm = LLM("tiny-stories", parts=Parts.mine())  # doctest: +SKIP
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from . import parts as _parts
from .batch import ModelInputs, pack
from .bf16 import bf16_to_float, float_to_bf16
from .blas import linear
from .block_manager import BlockManager
from .buffers import Buffers, plan_buffers
from .checkpoint.load import load_weights
from .checkpoint.names import REPOSITORY
from .checkpoint.safetensors import TensorView, read_safetensors
from .checkpoint.weights import weight_plan
from .config import ModelConfig
from .device import cp, free_bytes
from .engine import Engine
from .kernels import source
from .kernels.add_rms_norm import add_rms_norm
from .kernels.argmax import argmax
from .kernels.attention import attention
from .kernels.embedding import embedding
from .kernels.flash_attention import flash_attention
from .kernels.gather_kv import gather_kv
from .kernels.kv_write import kv_write
from .kernels.merge_attention import merge_attention
from .kernels.paged_attention import paged_attention
from .kernels.paged_prefill import paged_prefill
from .kernels.rms_norm import rms_norm
from .kernels.rope import rope, rope_frequencies
from .kernels.silu_mul import silu_mul
from .kv_cache import KVCache
from .model import Forward, Layer, Model, Weights
from .sampler import sample
from .scheduler import Scheduler
from .tokenizer import Tokenizer

# The parts that are launches of kernels: a learner's device functions are pasted into these.
_KERNELS: dict[str, Callable[..., Any]] = {
    "embedding": embedding,
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "linear": linear,
    "attention": attention,
    "attention_gqa": attention,
    "attention_tiled": flash_attention,
    "merge_attention": merge_attention,
    "paged_attention": paged_attention,
    "rope": rope,
    "silu_mul": silu_mul,
    "argmax": argmax,
    "kv_write": kv_write,
    "sample": sample,
}
_OTHERS: dict[str, Any] = {
    "read_safetensors": read_safetensors,
    "float_to_bf16": float_to_bf16,
    "bf16_to_float": bf16_to_float,
    "Tokenizer": Tokenizer,
    "load_weights": load_weights,
    "rope_frequencies": rope_frequencies,
    "plan_buffers": plan_buffers,
    "pack": pack,
    "Scheduler": Scheduler,
    "BlockManager": BlockManager,
    "Engine": Engine,
}
# The texts of device functions, and the file of the kernels that each takes the place of.
_DEVICE_FUNCTIONS = {"BF16_CUDA": "bf16.cuh", "BLOCK_SUM_CUDA": "block_sum.cuh"}
_PREFILL = ("attention_tiled", "attention_gqa", "attention")  # the newest first


class Parts(_parts.Parts):
    """The record of parts, and where whole sets of them come from."""

    @classmethod
    def reference(cls) -> Parts:
        """Every part of the engine, from the reference."""
        return complete(cls(), Buffers())

    @classmethod
    def mine(cls, folder: str | os.PathLike[str] | None = None) -> Parts:
        """What a learner has made, and the reference where something is missing.

        Parameters
        ----------
        folder : str or PathLike, optional
            By default ``$TINYVLLM_MY_ENGINE``, else ``my_engine/`` beside ``lessons/``.

        Raises
        ------
        PartsError
            The folder's ``parts.json`` cannot be used.
        """
        chosen = folder or os.environ.get("TINYVLLM_MY_ENGINE") or REPOSITORY / "my_engine"
        return complete(cls.load(Path(chosen)), Buffers())


def complete(parts: _parts.Parts, buffers: Buffers) -> Parts:
    """Fill the parts that are missing from the reference.

    Parameters
    ----------
    parts : Parts
    buffers : Buffers
        What the reference's `decoder_layer` and `forward` write to.

    Returns
    -------
    Parts
        With an owner for each. `build_app` stays as it is, for the server is not the engine's business. Where
        a learner has any attention of lessons 10, 12 and 20, no newer one is filled in, and none of lesson
        22: see :class:`PagedAttend`.
    """
    learners = {name: getattr(parts, name) for name, owner in parts.owners().items() if owner != "reference"}
    headers = {file: learners[name] for name, file in _DEVICE_FUNCTIONS.items() if name in learners}
    reference = dict(_OTHERS) | {name: source.read(file) for name, file in _DEVICE_FUNCTIONS.items()}
    for name, function in _KERNELS.items():
        reference[name] = source.with_headers(function, headers) if headers else function
    reference |= _chosen_otherwise(parts, learners)
    if any(name in learners for name in _PREFILL):
        for name in (*_PREFILL, "paged_attention"):
            del reference[name]
    if "float_to_bf16" in learners:
        reference["load_weights"] = functools.partial(load_weights, to_bf16=learners["float_to_bf16"])
    filled = Parts().replace(owner="reference", **reference).replace(**learners)
    if filled.decoder_layer is None:
        filled = filled.replace(owner="reference", decoder_layer=Layer(filled, buffers))
    if filled.forward is None:
        filled = filled.replace(owner="reference", forward=Forward(filled, buffers))
    return cast(Parts, filled)


def _chosen_otherwise(parts: _parts.Parts, learners: dict[str, Any]) -> dict[str, Any]:
    """Parts of the reference's that are not what is filled in, such as one of two paths of `linear`.

    What is composed of other parts, or compiled with other device functions, is made anew and not kept.
    """
    defaults = {**_OTHERS, **_KERNELS}
    kept = {}
    for name in defaults:
        value = getattr(parts, name)
        plain = getattr(value, "__wrapped__", getattr(value, "func", value))
        if value is not None and name not in learners and plain is not defaults[name]:
            kept[name] = value
    return kept


def for_engine(parts: _parts.Parts) -> _parts.Parts:
    """The parts as a learner's engine takes them, which calls the attention of lessons 20 and 22 by name.

    Where one of the two is missing although an older attention is the learner's own, the newest that there is stands
    in for lesson 20's, and the reference for lesson 22's.
    """
    missing: dict[str, Any] = {}
    if parts.attention_tiled is None:
        older: Any = parts.attention
        missing["attention_tiled"] = parts.attention_gqa or RepeatKvHeads(older)
    if parts.paged_attention is None:
        missing["paged_attention"] = paged_attention
    return parts.replace(owner="reference", **missing) if missing else parts


def build_model(config: ModelConfig, views: Any, parts: _parts.Parts | None = None) -> Model:
    """A model that can run.

    Parameters
    ----------
    config : ModelConfig
    views : mapping of str to TensorView
        The checkpoint's tensors.
    parts : Parts, optional
        Those that there are; by default all from the reference.

    Raises
    ------
    MemoryError
        The weights do not fit; the message says what they take. What was loaded of them is free again.
    """
    buffers = Buffers()
    filled = complete(parts or Parts(), buffers)
    # Only now, because the learner's plan is among the parts.
    buffers.use_plan(cast(Any, filled.plan_buffers))
    try:
        arrays = filled.load_weights(views, config)  # type: ignore[misc]
    except cp.cuda.memory.OutOfMemoryError as error:
        reason = str(error)
    else:
        reason = ""
    if reason:  # raised here, the error has nothing to do with the frames that hold what was loaded
        size = sum(2 * math.prod(group.shape) for group in weight_plan(config))
        raise MemoryError(
            f"the weights take {size:,} bytes, and the device may take {free_bytes():,}: free memory, "
            f"or choose a smaller model ({reason})"
        )
    weights = Weights(config, arrays, filled.rope_frequencies(config))  # type: ignore[misc]
    return Model(weights, filled, functools.partial(PagedAttend, filled, config), buffers)


# ---------------- the attention adapter


class PagedAttend:
    """`attend` of one step: the attention parts on the paged cache.

    New keys and values are written to the cache. Then a decoding request is served by lesson 22's part, and every
    other one by the newest of lessons 20, 12 and 10, which knows nothing of pages: it gets the request's keys and
    values gathered. Where lesson 22's is missing, a decode is a prefill of one token.

    Parameters
    ----------
    parts : Parts
    config : ModelConfig
    inputs : ModelInputs
    kv_cache : KVCache

    Attributes
    ----------
    positions : (T,) int32
        Of the step's tokens: what a layer needs for its rotations.
    """

    def __init__(self, parts: Parts, config: ModelConfig, inputs: ModelInputs, kv_cache: KVCache) -> None:
        self.positions = inputs.positions
        self._inputs = inputs
        self._kv_cache = kv_cache
        self._scale = config.head_dim**-0.5
        self._write: Any = parts.kv_write
        self._decode: Any = parts.paged_attention
        owners = parts.owners()
        newest = next(name for name in _PREFILL if name in owners)
        self._prefill: Any = getattr(parts, newest)
        if newest == "attention":
            self._prefill = RepeatKvHeads(self._prefill)
        # The reference's kernel finds the keys through the block tables and serves all requests at once.
        self._gathers = owners[newest] != "reference"
        self._num_decodes = inputs.num_decodes if self._decode is not None else 0
        self._plan_rows()

    def __call__(self, layer: int, q: Any, k: Any, v: Any, out: Any) -> Any:
        """Attention of one layer: q (T, Hq, D), k and v (T, Hk, D) float32 -> out (T, Hq, D) bf16."""
        keys, values = self._kv_cache.layer(layer)
        self._write(k, v, self._inputs.slots, keys, values)
        decodes, tokens = self._num_decodes, len(q)
        if decodes:
            queries, results = (q, out) if decodes == tokens else (q[:decodes], out[:decodes])
            self._decode(queries, keys, values, self._tables, self._lens, self._scale, results)
        if decodes < tokens and self._gathers:
            for request, (first, last) in self._rows:
                self._prefill_gathered(request, q[first:last], keys, values, out[first:last])
        elif decodes < tokens:
            paged_prefill(
                *(q, keys, values, self._prefill_tables, self._starts, self._prefill_lens),
                *(self._longest, self._scale, out),
            )
        return out

    def _plan_rows(self) -> None:
        """What is the same for all layers: which rows are whose."""
        inputs, decodes = self._inputs, self._num_decodes
        self._tables, self._lens = inputs.block_tables, inputs.context_lens
        self._prefill_tables, self._prefill_lens = self._tables, self._lens
        self._starts = inputs.query_starts
        if 0 < decodes < len(inputs.counts):
            self._tables, self._lens = self._tables[:decodes], self._lens[:decodes]
            self._prefill_tables = inputs.block_tables[decodes:]
            self._prefill_lens = inputs.context_lens[decodes:]
            self._starts = inputs.query_starts[decodes:]
        self._longest = max(inputs.counts[decodes:], default=0)
        self._rows: list[tuple[int, tuple[int, int]]] = []
        first = 0
        for request, count in enumerate(inputs.counts):
            if request >= decodes:
                self._rows.append((request, (first, first + count)))
            first += count

    def _prefill_gathered(self, request: int, q: Any, keys: Any, values: Any, out: Any) -> None:
        """One request by a part that takes its keys and values in one piece."""
        shape = (self._inputs.contexts[request], *keys.shape[2:])
        k, v = cp.empty(shape, np.uint16), cp.empty(shape, np.uint16)
        gather_kv(keys, values, self._inputs.block_tables[request], k, v)
        self._prefill(q, k, v, self._scale, out)


class RepeatKvHeads:
    """Lesson 10's attention, which wants as many KV heads as query heads, for a model that shares them."""

    def __init__(self, attention: Any) -> None:
        self._attention = attention

    def __call__(self, q: Any, k: Any, v: Any, scale: float, out: Any) -> Any:
        times = q.shape[1] // k.shape[1]
        if times > 1:  # query head h reads KV head h // times
            k, v = cp.repeat(k, times, axis=1), cp.repeat(v, times, axis=1)
        return self._attention(q, k, v, scale, out)


__all__ = ["PagedAttend", "Parts", "RepeatKvHeads", "TensorView", "build_model", "complete", "for_engine"]
