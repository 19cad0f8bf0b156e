"""What was measured, as a table for people and as JSON for machines."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ..config import ModelConfig
from .timing import Measurement
from .traffic import decode_bytes, parameters, prefill_flops

_ON_A_CARD = (
    *("batch", "prompt", "tokens", "tokens/s", "first token", "per token", "GB/s", "of read"),
    *("TFLOP/s", "of matrix"),
)
_EMULATED = ("batch", "prompt", "tokens", "tokens/s", "ratio", "first token", "ratio", "per token", "ratio")


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """What is measured, and what its rates are shares of.

    Attributes
    ----------
    name : str
        Of the model.
    random : bool
        Its weights are random.
    config : ModelConfig
    read_bandwidth : float or None
        Bytes a second that this device's memory gives; None in the emulation.
    matrix_rate : float or None
        Operations a second of BF16 products on it; None in the emulation, and where it has none.
    """

    name: str
    random: bool
    config: ModelConfig
    read_bandwidth: float | None = None
    matrix_rate: float | None = None

    def sizes(self) -> str:
        """One line about the model."""
        c = self.config
        count = parameters(c)
        weights = "random weights" if self.random else "its own weights"
        return (
            f"{self.name} ({weights}): {_count(count)} parameters, {2 * count / 1e9:.3g} GB in BF16;"
            f" {c.num_hidden_layers} layers, hidden {c.hidden_size}, ffn {c.intermediate_size},"
            f" {c.num_attention_heads} query and {c.num_key_value_heads} KV heads of {c.head_dim},"
            f" vocabulary {c.vocab_size}"
        )

    def rates(self) -> str:
        """One line about the device, measured in this run."""
        if self.read_bandwidth is None:
            return ""
        text = f"This device, measured now: reads {self.read_bandwidth / 1e9:,.0f} GB/s"
        if self.matrix_rate is not None:
            text += (
                f", multiplies BF16 matrices (cuBLAS, 8192 cubed) at {self.matrix_rate / 1e12:,.0f} TFLOP/s"
            )
        return text

    def entry(self, engine: str, found: Measurement) -> dict[str, Any]:
        """A measurement for machines: seconds, bytes, operations, and these per second; null where there is none."""
        on_a_card = self.read_bandwidth is not None
        moved = found.decode_bytes_per_second(self.config) if on_a_card else None
        computed = found.prefill_flops_per_second(self.config) if on_a_card else None
        step = None if found.context is None else decode_bytes(self.config, found.batch, found.context)
        return {
            "engine": engine,
            **dataclasses.asdict(found),
            "tokens_per_second": found.tokens_per_second,
            "decode_tokens_per_second": found.decode_tokens_per_second,
            "decode_bytes": step,
            "decode_bytes_per_second": moved,
            "share_of_read_bandwidth": _share(moved, self.read_bandwidth),
            "prefill_flops": prefill_flops(self.config, found.batch, found.prompt),
            "prefill_flops_per_second": computed,
            "share_of_matrix_rate": _share(computed, self.matrix_rate),
        }

    def about(self) -> dict[str, Any]:
        """The model and the device for machines."""
        model = {"name": self.name, "random_weights": self.random, "parameters": parameters(self.config)}
        return {
            "model": model | {"config": dataclasses.asdict(self.config)},
            "read_bandwidth": self.read_bandwidth,
            "matrix_rate": self.matrix_rate,
        }


class Table:
    """Rows of equal columns. On a card: rates and their shares. In the emulation, where a time says little: ratios.

    A time in the emulation says nothing of any GPU, and little of another computer: what carries over is how the rows
    compare, so each is also given as a ratio to the first.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._on_a_card = subject.read_bandwidth is not None
        self._first: Measurement | None = None

    def heading(self) -> str:
        """The names of the columns."""
        return _row(_ON_A_CARD if self._on_a_card else _EMULATED)

    def row(self, found: Measurement) -> str:
        """One measurement."""
        self._first = self._first or found
        return _row(self._with_rates(found) if self._on_a_card else self._with_ratios(found, self._first))

    def _with_rates(self, found: Measurement) -> tuple[str, ...]:
        entry = self._subject.entry("", found)
        return (
            *(str(found.batch), str(found.prompt), str(found.tokens), f"{found.tokens_per_second:.1f}"),
            _milliseconds(found.first_token, 1),
            _milliseconds(found.per_token, 3),
            _number(entry["decode_bytes_per_second"], 1e9, ",.0f"),
            _number(entry["share_of_read_bandwidth"], 0.01, ".0f", " %"),
            _number(entry["prefill_flops_per_second"], 1e12, ".1f"),
            _number(entry["share_of_matrix_rate"], 0.01, ".0f", " %"),
        )

    def _with_ratios(self, found: Measurement, first: Measurement) -> tuple[str, ...]:
        per_token = None if first.per_token is None else _share(found.per_token, first.per_token)
        return (
            *(str(found.batch), str(found.prompt), str(found.tokens), f"{found.tokens_per_second:.1f}"),
            f"{found.tokens_per_second / first.tokens_per_second:.2f}",
            _milliseconds(found.first_token, 1),
            f"{found.first_token / first.first_token:.2f}",
            _milliseconds(found.per_token, 2),
            _number(per_token, 1, ".2f"),
        )


def _row(cells: tuple[str, ...]) -> str:
    return " ".join(f"{cell:>11}" for cell in cells)


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole or math.isnan(whole) else part / whole


def _milliseconds(seconds: float | None, digits: int) -> str:
    return _number(seconds, 1e-3, f".{digits}f", " ms")


def _number(value: float | None, unit: float, form: str, after: str = "") -> str:
    return "-" if value is None else f"{value / unit:{form}}{after}"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"
