"""The matrix products of a decode step, each with the norm before it or the activation after it, in two ways.

:class:`FewRows` is for batches whose products are bound by reading the weights: its kernels take norm and activation
along, and each comes onto the card while the one before it ends, to have its first weights there in time.
:class:`ManyRows` has cuBLAS, and our own warpgroups where a matrix is large enough for them. Both give the same numbers
up to the order of additions. Neither allocates when it is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from .capturable_blas import Products
from .config import ModelConfig
from .kernels import decode_rows as rows_
from .kernels import skinny_linear as skinny
from .kernels import warpgroup_linear as warpgroup

FEW_ROWS = 32
"""Up to so many, :class:`FewRows` is faster on an H200 (benchmarks/decode_ladder.md)."""


class DecodeProducts(Protocol):
    """What a decode step needs of them; R is the number of its rows."""

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
    """By cuBLAS, or by warpgroups where that pays (:func:`~tinyvllm_ref.kernels.warpgroup_linear.pays`).

    Attributes
    ----------
    products : Products
    eps : float
        Of the norms.
    normed : (S, H) bf16
    gate_up : (S, 2F) bf16
        Work memory for S rows or fewer.
    """

    products: Products
    eps: float
    normed: Any
    gate_up: Any

    def of_norm(self, stream: Any, norm: Any, w: Any, out: Any, ready: bool = False) -> None:
        normed = self.normed[: len(stream)]
        if not ready:
            rows_.norm_rows(stream, norm, self.eps, normed, dependent=True)
        if warpgroup.pays(len(normed), *w.shape):
            warpgroup.warpgroup_linear(normed, w, out)
        else:
            self.products(normed, w, out)

    def gated(self, stream: Any, norm: Any, w: Any, out: Any) -> None:
        normed = self.normed[: len(stream)]
        rows_.norm_rows(stream, norm, self.eps, normed, dependent=True)
        rows, outputs = out.shape
        if warpgroup.pays(rows, outputs, w.shape[1], gate=True):
            warpgroup.warpgroup_gate_up(normed, w, out)
        else:
            gate_up = self.gate_up[:rows]
            self.products(normed, w, gate_up)
            rows_.silu_mul_rows(gate_up, out, dependent=True)

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
