"""Layer by layer against Hugging Face: which operation of a learner's model is the first that differs.

The golden values (``golden_operations.npz`` beside the tiny-stories checkpoint) were computed by transformers in
float32, for one prompt. A model made of any parts is run on that prompt, and what every operation puts out is kept: a
product and a norm are known by the weight that they are given, the rest by the layer that they are called in. So it
does not matter whose function calls them, nor in what order.

>>> from tinyvllm_ref.course import show_layers  # doctest: +SKIP
>>> show_layers()  # doctest: +SKIP
All 57 operations agree with transformers: ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinyvllm_ref import device, emulation
from tinyvllm_ref.assembly import PagedAttend, complete
from tinyvllm_ref.batch import make_inputs
from tinyvllm_ref.bf16 import bf16_to_float
from tinyvllm_ref.buffers import Buffers
from tinyvllm_ref.checkpoint.names import resolve
from tinyvllm_ref.checkpoint.weights import open_checkpoint
from tinyvllm_ref.kv_cache import KVCache
from tinyvllm_ref.model import Forward, Layer, Weights
from tinyvllm_ref.parts import Parts

from .wiring import wired

MODEL = "tiny-stories"
TOLERANCE = 0.03
"""Relative error of an operation's output. With the reference, whose products have BF16 inputs, it is below 0.7 %."""

IN_LAYER = {
    "input_norm": "the norm before attention",
    "qkv": "the product that makes queries, keys and values",
    "rope": "queries and keys after RoPE",
    "attention": "what attention puts out",
    "o_proj": "the product after attention",
    "post_norm": "the norm before the feed-forward",
    "gate_up": "the product that makes gate and up",
    "silu_mul": "SiLU(gate) * up",
    "down_proj": "the product that ends the feed-forward",
    "stream": "the stream after the layer, x added",
}
"""The operations of a layer, in order."""
_OUTSIDE = {
    "embedding": "the embedding",
    "final_norm": "the norm after the last layer",
    "logits": "the logits",
}
# The weight that an operation is given -> the operation.
_BY_WEIGHT = {
    "input_layernorm": "input_norm",
    "qkv": "qkv",
    "o_proj": "o_proj",
    "post_attention_layernorm": "post_norm",
    "gate_up": "gate_up",
    "down_proj": "down_proj",
}
_RECORDED = ("embedding", "rms_norm", "add_rms_norm", "linear", "rope", "silu_mul")


@dataclass(frozen=True)
class Golden:
    """What transformers computes for one prompt.

    Attributes
    ----------
    prompt : str
    ids, new_ids : tuple of int
        The prompt's tokens, and its greedy continuation.
    margins : tuple of float
        Between the two largest logits, at each new token.
    activations : mapping of str to (T, columns) float32
        ``"embedding"``, ``"layers.0.input_norm"``, ... in the order in which they are computed.
    """

    prompt: str
    ids: tuple[int, ...]
    new_ids: tuple[int, ...]
    margins: tuple[float, ...]
    activations: Mapping[str, Any]


@functools.cache
def golden() -> Golden:
    """The golden values of tiny-stories, from the folder of the checkpoint."""
    with np.load(resolve(MODEL) / "golden_operations.npz") as file:
        arrays = {name: file[name] for name in file.files}
    return Golden(
        str(arrays.pop("prompt")),
        tuple(int(token) for token in arrays.pop("ids")),
        tuple(int(token) for token in arrays.pop("new_ids")),
        tuple(float(margin) for margin in arrays.pop("margins")),
        {name: arrays[name].astype(np.float32) for name in sorted(arrays, key=_place)},
    )


def _place(name: str) -> tuple[float, int]:
    """Where an operation stands in the order of computation."""
    if name in _OUTSIDE:
        return (-1 if name == "embedding" else np.inf), list(_OUTSIDE).index(name)
    _, layer, what = name.split(".")
    return int(layer), list(IN_LAYER).index(what)


def in_words(name: str) -> str:
    """``"layers.3.rope"`` -> ``"layer 3, queries and keys after RoPE"``."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, layer, what = name.split(".")
    return f"layer {layer}, {IN_LAYER[what]}"


# ---------------- recording


def activations(
    parts: Parts | None = None, planted: Mapping[str, Callable[..., Any]] | None = None
) -> dict[str, Any]:
    """What every operation puts out for the golden prompt, with these parts.

    Parameters
    ----------
    parts : Parts, optional
        What is missing comes from the reference.
    planted : mapping of str to callable, optional
        Name of an operation (``"layers.3.rope"``) -> what is called in its place.

    Returns
    -------
    dict of str to (T, columns) float32, NumPy
        By the names of the golden values and in their order; an operation that did not run is not there.
    """
    config, views = open_checkpoint(resolve(MODEL))
    buffers = Buffers()
    filled: Any = complete(parts or Parts(), buffers)
    mine = filled.owners()
    weights = Weights(config, filled.load_weights(views, config), filled.rope_frequencies(config))
    recorder = _Recorder(weights, planted or {})
    filled = filled.replace(
        owner="reference", **{name: recorder.around(name, getattr(filled, name)) for name in _RECORDED}
    )
    layer = filled.decoder_layer if mine["decoder_layer"] == "learner" else Layer(filled, buffers)
    filled = filled.replace(decoder_layer=recorder.around_layer(layer))
    forward = filled.forward if mine["forward"] == "learner" else Forward(filled, buffers)
    filled = filled.replace(forward=forward)
    ids = list(golden().ids)
    with _fast(), wired(filled):
        cache = KVCache(config, 1, len(ids))
        inputs = make_inputs([ids], [0], [[0]], range(len(ids)), 0, len(ids), filled.pack)
        attend = recorder.around_attend(PagedAttend(filled, config, inputs, cache))
        logits = forward(inputs, weights, attend)
        recorder.keep("logits", logits)
    return {name: recorder.found[name] for name in sorted(recorder.found, key=_place)}


def _fast() -> Any:
    return emulation.checks("fast")


class _Recorder:
    """Keeps what each operation puts out, under its name."""

    def __init__(self, weights: Weights, planted: Mapping[str, Callable[..., Any]]) -> None:
        self.found: dict[str, Any] = {}
        self._planted = planted
        self._layer = 0
        self._by_address = {array.data.ptr: name for name, array in weights.items()}
        self._by_address[weights["embed_tokens"].data.ptr] = "embed_tokens"

    def keep(self, name: str, array: Any) -> None:
        """The first time counts: what runs again is a mistake that shows further on."""
        values = array.get()
        values = bf16_to_float(values) if values.dtype == np.uint16 else values
        self.found.setdefault(name, values.reshape(len(values), -1).copy())

    def around(self, part: str, function: Any) -> Any:
        """The same part; what it puts out is kept."""

        def call(*args: Any) -> Any:
            name = self._name(part, args)
            result = self._planted.get(name or "", function)(*args)
            if name is not None:
                self.keep(name, args[-1]) if part != "rope" else self._keep_rotated(name, *args[:2])
            return result

        return call

    def around_layer(self, function: Any) -> Any:
        @functools.wraps(function)
        def call(x: Any, residual: Any, weights: Any, layer: int, attend: Any) -> Any:
            self._layer = layer
            result = function(x, residual, weights, layer, attend)
            self.found.setdefault(f"layers.{layer}.stream", residual.get() + x.get())
            return result

        return call

    def around_attend(self, attend: Any) -> Any:
        def call(layer: int, q: Any, k: Any, v: Any, out: Any) -> Any:
            name = f"layers.{self._layer}.attention"
            result = self._planted.get(name, attend)(layer, q, k, v, out)
            self.keep(name, out)
            return result

        call.positions = attend.positions  # type: ignore[attr-defined]
        return call

    def _keep_rotated(self, name: str, q: Any, k: Any) -> None:
        values = [array.get().reshape(len(array), -1) for array in (q, k)]
        self.found.setdefault(name, np.concatenate(values, axis=1))

    def _name(self, part: str, args: tuple[Any, ...]) -> str | None:
        """Which operation this call is; None for one that has no golden value."""
        if part == "embedding":
            return "embedding"
        if part in ("rope", "silu_mul"):
            return f"layers.{self._layer}.{part}"
        weight = args[{"rms_norm": 1, "add_rms_norm": 2, "linear": 1}[part]]
        known = self._by_address.get(weight.data.ptr)
        if known == "norm":
            return "final_norm"
        if known is None or not known.startswith("layers."):
            return None  # the LM head: its output is what forward gives
        _, layer, which = known.split(".")
        self._layer = int(layer)
        return f"layers.{layer}.{_BY_WEIGHT[which]}"


# ---------------- comparing


@dataclass(frozen=True)
class LayersReport:
    """Activations against the golden ones.

    Attributes
    ----------
    errors : mapping of str to float
        Relative error of each operation, in order; infinity where values are not finite, NaN where it did not run.
    tolerance : float
    first : str or None
        The first operation that is not within the tolerance, or did not run.
    """

    errors: Mapping[str, float]
    tolerance: float
    first: str | None

    def __str__(self) -> str:
        if self.first is None:
            worst = max(self.errors, key=lambda name: self.errors[name])
            return (
                f"All {len(self.errors)} operations agree with transformers: the largest relative error is "
                f"{self.errors[worst]:.1%} ({in_words(worst)}), from BF16."
            )
        before = list(self.errors.values())[: list(self.errors).index(self.first)]
        agreed = f" The {len(before)} operations before it agree." if before else ""
        error = self.errors[self.first]
        what = (
            "did not run"
            if np.isnan(error)
            else "has numbers that are not finite, or another shape"
            if np.isinf(error)
            else f"has a relative error of {error:.2g}"
        )
        return f"The first operation that differs: {in_words(self.first)} ({self.first}). It {what}.{agreed}"


def compare(mine: Mapping[str, Any], tolerance: float = TOLERANCE) -> LayersReport:
    """Compare activations, as :func:`activations` gives them, with the golden ones."""
    errors: dict[str, float] = {}
    for name, wanted in golden().activations.items():
        errors[name] = relative_error(mine[name], wanted) if name in mine else float("nan")
    first = next((name for name, error in errors.items() if not error <= tolerance), None)
    return LayersReport(errors, tolerance, first)


def relative_error(got: Any, wanted: Any) -> float:
    """|got - wanted| / |wanted|, infinity where a value is not finite or the shapes differ."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    if got.shape != wanted.shape or not np.isfinite(got).all():
        return float("inf")
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


# ---------------- in a notebook


def show_layers(what: str | Parts | None = None) -> None:
    """Compare a model with transformers, layer by layer, and say where it first differs.

    Parameters
    ----------
    what : str or Parts, optional
        An exercise that makes a part, such as ``"14.3"``: its cell as it was last run, in the learner's engine. By
        default all that has passed.

    Raises
    ------
    LookupError
        No cell of this exercise has run, or it makes no part.
    """
    from .figures import display_figure
    from .figures.layers import layer_errors

    report = compare(activations(_parts_of(what)))
    print(report)
    display_figure(layer_errors(report.errors, report.tolerance))


def _parts_of(what: str | Parts | None) -> Parts:
    from . import cells, my_engine
    from .answers import make_namespace
    from .exercise import Exercise
    from .exercises import exercise_of

    if isinstance(what, Parts):
        return what
    own = my_engine.own_parts()
    if what is None:
        return own
    exercise = exercise_of(what)
    if not isinstance(exercise, Exercise) or not exercise.makes:
        raise LookupError(f"{what} makes no part that runs in a model")
    source = cells.recorded(what) or my_engine.answer(what)
    if source is None:
        raise LookupError(f"no cell that begins with `# Exercise {what}` has run since this kernel started")
    namespace = make_namespace(exercise, source, device.cp)
    return own.replace(**{part: namespace[name] for part, name in exercise.makes.items()})
