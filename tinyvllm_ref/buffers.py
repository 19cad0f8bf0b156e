"""The arrays that a forward pass writes to, planned once so that those never used together share memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .config import ModelConfig
from .device import cp

ALIGNMENT = 256
_SIZES_KEPT = 64  # numbers of tokens whose views are kept: those of a decoding batch come again and again


def plan_buffers(lifetimes: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Place buffers in one arena so that no two that are in use at the same time overlap.

    Parameters
    ----------
    lifetimes : sequence of (bytes, first, last)
        Of each buffer: its size, and the first and the last operation that uses it.

    Returns
    -------
    offsets : list of int
        In the order of `lifetimes`, each a multiple of 256.
    total : int
        Bytes of the arena.

    Raises
    ------
    ValueError
        A size is negative, or a buffer's last operation comes before its first.

    Notes
    -----
    The largest are placed first, each at the lowest offset that is free all the time that it is in use: the
    greedy-by-size rule of Pisarchyk and Lee (2020), which is mostly within a few percent of the least.

    Examples
    --------
    >>> plan_buffers([(1000, 0, 1), (500, 1, 2), (1000, 2, 3)])
    ([0, 1024, 0], 1536)
    """
    offsets = [0] * len(lifetimes)
    placed: list[tuple[int, int, int, int]] = []  # begin, end, first, last
    for index in sorted(range(len(lifetimes)), key=lambda i: -lifetimes[i][0]):
        size, first, last = lifetimes[index]
        if size < 0 or last < first:
            raise ValueError(
                f"plan_buffers: buffer {index} is {lifetimes[index]}; it must be (bytes >= 0, first, last >= first)"
            )
        offset = 0
        for begin, end, other_first, other_last in sorted(placed):
            if other_first <= last and first <= other_last and begin < offset + size:
                offset = max(offset, end)
        offsets[index] = offset
        placed.append((offset, offset + -(-size // ALIGNMENT) * ALIGNMENT, first, last))
    return offsets, max((end for _, end, _, _ in placed), default=0)


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """What one pass over T tokens writes to; the same for every layer.

    Attributes
    ----------
    residual, x : (T, H) float32
        The residual stream, and what the last block will add to it.
    normed : (T, H) bf16
        Input of the attention block, and of the LM head.
    qkv : (T, (Hq + 2 Hk) D) float32
    q : (T, Hq, D) float32
    k, v : (T, Hk, D) float32
    attended : (T, Hq, D) bf16
    heads : (T, Hq D) bf16
        The same memory as `attended`: all heads of a token side by side.
    ffn_normed : (T, H) bf16
        Input of the feed-forward block.
    gate_up : (T, 2F) float32
    activated : (T, F) bf16
    """

    residual: Any
    x: Any
    normed: Any
    qkv: Any
    q: Any
    k: Any
    v: Any
    attended: Any
    heads: Any
    ffn_normed: Any
    gate_up: Any
    activated: Any


# When each is in use, counted in the operations of a layer: 1 norm, 2 product (qkv), 3 split, 4 rope and
# attention, 5 product (o), 6 add and norm, 7 product (gate and up), 8 silu_mul, 9 product (down). The stream
# and x live on from layer to layer.
_LIFETIMES = {
    "residual": (0, 10),
    "x": (0, 10),
    "normed": (1, 2),
    "qkv": (2, 3),
    "q": (3, 4),
    "k": (3, 4),
    "v": (3, 4),
    "attended": (4, 5),
    "ffn_normed": (6, 7),
    "gate_up": (7, 8),
    "activated": (8, 9),
}


class Buffers:
    """The arrays of a model's forward passes: allocated once, given out as views for any number of tokens.

    Parameters
    ----------
    plan : callable
        With the contract of :func:`plan_buffers`.
    """

    def __init__(self, plan: Callable[..., tuple[list[int], int]] = plan_buffers) -> None:
        self._plan = plan
        self._config: ModelConfig | None = None
        self._capacity = 0
        self._arrays: dict[str, Any] = {}
        self._steps: dict[int, StepBuffers] = {}
        self._logits: Any = None
        self._rows: Any = None

    def use_plan(self, plan: Callable[..., tuple[list[int], int]]) -> None:
        """Place the arrays by another plan from the next allocation on."""
        self._plan = plan

    def reserve(self, config: ModelConfig, tokens: int, rows: int) -> int:
        """Allocate for passes of up to `tokens` tokens and `rows` rows of logits; returns the bytes it took.

        A pass that needs more allocates again.
        """
        if config != self._config or tokens > self._capacity:
            self._allocate(config, tokens)
        self.logits(config, rows)
        arena = sum(array.nbytes for array in {id(a.base): a.base for a in self._arrays.values()}.values())
        return int(arena + self._logits.nbytes + self._rows.nbytes)

    def step(self, config: ModelConfig, tokens: int) -> StepBuffers:
        """The buffers of a pass over so many tokens. What they hold is not kept from pass to pass."""
        if config is not self._config or tokens > self._capacity:
            self.reserve(config, tokens, 1)
            self._config = config
        found = self._steps.get(tokens)
        if found is None:
            if len(self._steps) >= _SIZES_KEPT:
                self._steps.clear()
            found = StepBuffers(**{name: array[:tokens] for name, array in self._arrays.items()})
            self._steps[tokens] = found
        return found

    def around(self, config: ModelConfig, x: Any, residual: Any) -> StepBuffers:
        """The buffers of a layer that is given x and residual; mostly they are the step's own."""
        found = self.step(config, len(x))
        return (
            found if found.x is x and found.residual is residual else replace(found, x=x, residual=residual)
        )

    def logits(self, config: ModelConfig, rows: int) -> tuple[Any, Any]:
        """(rows, H) bf16 for the input of the LM head, and (rows, V) float32 for its output."""
        if self._logits is None or len(self._logits) < rows or self._logits.shape[1] != config.vocab_size:
            self._logits = None  # the old one goes before the new one comes
            self._logits = cp.empty((rows, config.vocab_size), np.float32)
            self._rows = cp.empty((rows, config.hidden_size), np.uint16)
        if len(self._rows) < rows or self._rows.shape[1] != config.hidden_size:
            self._rows = cp.empty((rows, config.hidden_size), np.uint16)
        return self._rows[:rows], self._logits[:rows]

    def _allocate(self, config: ModelConfig, tokens: int) -> None:
        shapes, lifetimes = _shapes(config, tokens), _lifetimes(config, tokens)
        self._arrays, self._steps = {}, {}
        offsets, total = self._plan(lifetimes)
        arena = cp.empty(total, np.uint8)
        for (name, (shape, dtype)), offset, (size, *_) in zip(
            shapes.items(), offsets, lifetimes, strict=True
        ):
            self._arrays[name] = arena[offset : offset + size].view(dtype).reshape(shape)
        self._arrays["heads"] = self._arrays["attended"].reshape(tokens, -1)
        self._config, self._capacity = config, tokens


def arena_bytes(config: ModelConfig, tokens: int) -> int:
    """Bytes that the buffers of passes over up to `tokens` tokens take, logits not counted."""
    return plan_buffers(_lifetimes(config, tokens))[1]


def _lifetimes(config: ModelConfig, tokens: int) -> list[tuple[int, int, int]]:
    """What a plan is made from: the bytes of each buffer, and the operations that use it."""
    return [
        (int(np.prod(shape)) * np.dtype(dtype).itemsize, *_LIFETIMES[name])
        for name, (shape, dtype) in _shapes(config, tokens).items()
    ]


def _shapes(config: ModelConfig, tokens: int) -> dict[str, tuple[tuple[int, ...], type]]:
    """Shape and dtype of each buffer."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    q_heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    return {
        "residual": ((tokens, hidden), np.float32),
        "x": ((tokens, hidden), np.float32),
        "normed": ((tokens, hidden), np.uint16),
        "qkv": ((tokens, config.q_size + 2 * config.kv_size), np.float32),
        "q": ((tokens, q_heads, head_dim), np.float32),
        "k": ((tokens, kv_heads, head_dim), np.float32),
        "v": ((tokens, kv_heads, head_dim), np.float32),
        "attended": ((tokens, q_heads, head_dim), np.uint16),
        "ffn_normed": ((tokens, hidden), np.uint16),
        "gate_up": ((tokens, 2 * ffn), np.float32),
        "activated": ((tokens, ffn), np.uint16),
    }
