"""The matrix products of a decode step, each with the norm before it or the activation after it, in two ways.

:class:`ManyRows` has cuBLAS and launches of their own for what lies between the products. :class:`FewRows` is for
batches whose products are bound by reading the weights: its kernels take norm and activation along, and each comes onto
the card while the one before it ends, to have its first weights there in time. Both give the same numbers up to the
order of additions. Neither allocates when it is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from .capturable_blas import Products
from .config import ModelConfig
from .kernels import decode_rows as rows_
from .kernels import skinny_linear as skinny

FEW_ROWS = 32
"""Up to so many, :class:`FewRows` is faster on an H200 (benchmarks/decode_ladder.md)."""


class DecodeProducts(Protocol):
    """What a decode step needs of them; R is the number of its rows."""

    dependent: bool
    """Whether the launches between these may begin before the one before them is done."""

    def of_norm(self, stream: Any, norm: Any, w: Any, out: Any, ready: bool = False) -> None:
        """(R, H) float32 stream, (H,) bf16 norm, (N, H) bf16 w: out (R, N) float32 = norm(stream) w^T.

        `ready`: the norm is in `normed` already.
        """

    def gated(self, stream: Any, norm: Any, w: Any, out: Any) -> None:
        """(2F, H) bf16 w: out (R, F) bf16 = silu(gate) * up of norm(stream) w^T."""

    def add(self, x: Any, w: Any, stream: Any) -> None:
        """(R, K) bf16 x, (H, K) bf16 w: stream (R, H) float32 += x w^T."""


@dataclass
class ManyRows:
    """By cuBLAS.

    Attributes
    ----------
    products : Products
    eps : float
        Of the norms.
    normed : (S, H) bf16
    gate_up : (S, 2F) float32
        Work memory for S rows or fewer.
    """

    products: Products
    eps: float
    normed: Any
    gate_up: Any
    dependent: bool = False

    def of_norm(self, stream: Any, norm: Any, w: Any, out: Any, ready: bool = False) -> None:
        normed = self.normed[: len(stream)]
        if not ready:
            rows_.norm_rows(stream, norm, self.eps, normed)
        self.products(normed, w, out)

    def gated(self, stream: Any, norm: Any, w: Any, out: Any) -> None:
        gate_up = self.gate_up[: len(stream)]
        self.of_norm(stream, norm, w, gate_up)
        rows_.silu_mul_rows(gate_up, out)

    def add(self, x: Any, w: Any, stream: Any) -> None:
        self.products(x, w, stream, accumulate=True)


@dataclass
class FewRows:
    """By kernels of our own, for as many rows as `scratch` was made for.

    Attributes
    ----------
    scratch : SkinnyScratch
    eps : float
        Of the norms.
    normed : (S, H) bf16
        Work memory.
    """

    scratch: skinny.SkinnyScratch
    eps: float
    normed: Any
    dependent: bool = True

    def of_norm(self, stream: Any, norm: Any, w: Any, out: Any, ready: bool = False) -> None:
        self._product(skinny.skinny_linear, stream, norm, w, out, ready)

    def gated(self, stream: Any, norm: Any, w: Any, out: Any) -> None:
        self._product(skinny.skinny_gate_up, stream, norm, w, out)

    def add(self, x: Any, w: Any, stream: Any) -> None:
        skinny.skinny_linear(x, w, stream, self.scratch, accumulate=True, dependent=True)

    def _product(self, product: Any, stream: Any, norm: Any, w: Any, out: Any, ready: bool = False) -> None:
        if takes_norm(*stream.shape):
            product(stream, w, out, norm=skinny.Norm(norm, self.eps), dependent=True)
            return
        normed = self.normed[: len(stream)]
        if not ready:
            rows_.norm_rows(stream, norm, self.eps, normed, dependent=True)
        product(normed, w, out, dependent=True)


def takes_norm(rows: int, width: int) -> bool:
    """Whether a product of :class:`FewRows` with so many rows of this width computes their norm itself."""
    return not skinny.unsupported(rows, width, norm=True)


def few_rows(config: ModelConfig, most: int) -> int:
    """Up to how many rows, at most `most`, a model's products can be those of :class:`FewRows`."""
    few = min(most, FEW_ROWS)
    widths = (config.hidden_size, config.q_size, config.intermediate_size)
    known = not any(skinny.unsupported(few, width) for width in widths)
    return few if known and config.hidden_size <= skinny.MOST_COLUMNS else 0
