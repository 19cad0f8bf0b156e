"""Outputs against the expected ones, and the difference in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .exercise import Tolerance

_SHOWN = 5
# What g++ puts into a local variable of a kernel that has no start value, in full mode; a small number added to it
# changes nothing. clang's is a NaN.
_NO_START_VALUE = np.uint32(0xFEFEFEFE).view(np.float32)


@dataclass(frozen=True)
class Difference:
    """How an output differs.

    Attributes
    ----------
    headline : str
        One sentence.
    counts : tuple of str
        ``"3 of 1,000 elements differ"``, ``"2 NaN"``.
    rows : tuple of (str, str, str)
        The first few: index, expected, got.
    values : bool
        Whether values are wrong; else they are right, and got in another way than was asked for.
    places : tuple of int
        The flat places of the rows, in an array.
    """

    headline: str
    counts: tuple[str, ...] = ()
    rows: tuple[tuple[str, str, str], ...] = ()
    values: bool = True
    places: tuple[int, ...] = ()


def compare(
    expected: dict[str, Any],
    got: dict[str, Any],
    tolerance: Callable[[str], Tolerance],
    inputs: Mapping[str, Any] | None = None,
) -> Difference | None:
    """The first output that is not as expected; None where all are.

    Parameters
    ----------
    expected, got : dict
        Plain values by name of the output.
    tolerance : callable
        Name of an output -> its tolerance. Integers, strings and bits are compared exactly.
    inputs : mapping, optional
        Of the case: where one input array alone has an output's shape, and all others have fewer dimensions, its
        elements stand beside the wrong ones.
    """
    for name, value in expected.items():
        if name not in got:
            return Difference(f"`{name}` is missing from what the answer gave")
        difference = _compare_value(name, value, got[name], tolerance(name))
        if difference is not None:
            return _with_inputs(difference, value, inputs or {})
    return None


def _with_inputs(difference: Difference, expected: Any, inputs: Mapping[str, Any]) -> Difference:
    """The same with the input element named beside each wrong one, where it is clear which that is."""
    arrays = {name: value for name, value in inputs.items() if isinstance(value, np.ndarray)}
    alike = [
        (name, value)
        for name, value in arrays.items()
        if isinstance(expected, np.ndarray) and value.shape == expected.shape
    ]
    if len(alike) != 1 or not difference.places:
        return difference
    # A query's row beside keys, or a table that has the shape by chance: no element of it belongs to one of the output.
    if any(value.ndim >= alike[0][1].ndim for name, value in arrays.items() if name != alike[0][0]):
        return difference
    ((name, values),) = alike
    rows = tuple(
        (f"{index}, {name} = {show(np.ravel(values)[place])}", wanted, got)
        for place, (index, wanted, got) in zip(difference.places, difference.rows, strict=True)
    )
    return replace(difference, rows=rows)


def _compare_value(name: str, expected: Any, got: Any, tolerance: Tolerance) -> Difference | None:
    if isinstance(expected, np.ndarray):
        return _compare_arrays(name, expected, got, tolerance)
    if isinstance(expected, dict):
        return _compare_dicts(name, expected, got, tolerance)
    if isinstance(expected, list | tuple):
        return _compare_lists(name, list(expected), got, tolerance)
    if isinstance(expected, bool) or expected is None or isinstance(expected, str | bytes):
        same = type(got) is type(expected) and got == expected
    elif isinstance(expected, int | float):
        number = isinstance(got, int | float) and not isinstance(got, bool)
        same = number and bool(_near(np.float64(expected), np.float64(got), tolerance))
    else:
        raise TypeError(f"{name}: an oracle must give plain values, not {type(expected).__name__}")
    if same:
        return None
    return Difference(f"`{name}` is not what it should be", (), ((name, show(expected), show(got)),))


def _compare_dicts(name: str, expected: dict[Any, Any], got: Any, tolerance: Tolerance) -> Difference | None:
    if not isinstance(got, dict):
        return Difference(
            f"`{name}` is {_a(got)}; it must be a dict", (), ((name, show(expected), show(got)),)
        )
    for key in [*expected, *(key for key in got if key not in expected)]:
        if key not in got:
            return Difference(
                f"`{name}` has no {key!r}", (), ((f"{name}[{key!r}]", show(expected[key]), "missing"),)
            )
        if key not in expected:
            return Difference(
                f"`{name}` has {key!r}, which does not belong there",
                (),
                ((f"{name}[{key!r}]", "not there", show(got[key])),),
            )
        difference = _compare_value(f"{name}[{key!r}]", expected[key], got[key], tolerance)
        if difference is not None:
            return difference
    return None


def _compare_lists(name: str, expected: list[Any], got: Any, tolerance: Tolerance) -> Difference | None:
    if not isinstance(got, list):
        return Difference(
            f"`{name}` is {_a(got)}; it must be a list", (), ((name, show(expected), show(got)),)
        )
    rows = []
    for i in range(max(len(expected), len(got))):
        if i >= len(got):
            rows.append((f"{name}[{i}]", show(expected[i]), "missing"))
        elif i >= len(expected):
            rows.append((f"{name}[{i}]", "not there", show(got[i])))
        elif _compare_value("", expected[i], got[i], tolerance) is not None:
            rows.append((f"{name}[{i}]", show(expected[i]), show(got[i])))
    if not rows:
        return None
    counts = [f"{len(rows):,} of {max(len(expected), len(got)):,} entries differ"]
    if len(expected) != len(got):
        counts.append(f"{len(got):,} entries; {len(expected):,} expected")
    return Difference(f"`{name}` is not what it should be", tuple(counts), tuple(rows[:_SHOWN]))


def _compare_arrays(name: str, expected: Any, got: Any, tolerance: Tolerance) -> Difference | None:
    if not isinstance(got, np.ndarray):
        return Difference(
            f"`{name}` is {_a(got)}; it must be an array", (), ((name, show(expected), show(got)),)
        )
    if got.dtype != expected.dtype and {got.dtype.kind, expected.dtype.kind} != {"f"}:
        return Difference(f"`{name}` has dtype {got.dtype}; it must be {expected.dtype}")
    if got.shape != expected.shape:
        return Difference(f"`{name}` has shape {got.shape}; it must be {expected.shape}")
    wrong = np.ravel(~_near(expected, got, tolerance))
    if not wrong.any():
        return None
    places = np.flatnonzero(wrong)
    flat_expected, flat_got = np.ravel(expected), np.ravel(got)
    counts = [f"{len(places):,} of {wrong.size:,} elements differ"]
    if got.dtype.kind == "f":
        counts += [
            f"{int(test(flat_got[places]).sum()):,} of them {word}"
            for test, word in (
                (_is_unwritten, "NaN (what nothing has written reads as NaN)"),
                (_is_computed_nan, "NaN"),
                (np.isinf, "infinite"),
                (_has_no_start, f"{_NO_START_VALUE:.3g} (what a variable without a start value holds here)"),
            )
            if test(flat_got[places]).any()
        ]
    elif got.dtype.itemsize > 1 and got.dtype.kind in "iu" and _is_unwritten(flat_got[places]).any():
        reads = show(flat_got[places][_is_unwritten(flat_got[places])][0])
        counts.append(
            f"{int(_is_unwritten(flat_got[places]).sum()):,} of them {reads} (so reads what nothing has written)"
        )
    if got.dtype.kind == "f" and tolerance != Tolerance() and _some_nearly(expected, got, wrong, tolerance):
        counts.append(
            f"tolerance {tolerance.relative:g} relative, {tolerance.absolute:g} absolute: {tolerance.why}"
        )
    rows = tuple(
        (_index(name, int(place), expected.shape), show(flat_expected[place]), show(flat_got[place]))
        for place in places[:_SHOWN]
    )
    shown = tuple(int(place) for place in places[:_SHOWN])
    return Difference(f"`{name}` has wrong values", tuple(counts), rows, places=shown)


def _some_nearly(expected: Any, got: Any, wrong: Any, tolerance: Tolerance) -> bool:
    """Whether one that differs is within a thousand tolerances: only there it matters what the tolerance is."""
    wide = Tolerance(1000 * tolerance.relative, 1000 * tolerance.absolute, tolerance.why)
    return bool((np.ravel(_near(expected, got, wide)) & wrong).any())


def _is_unwritten(values: Any) -> Any:
    """Where every bit is set, as in memory that is poisoned, be it with another sign; inf / inf has other bits."""
    bits = np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")
    ones = np.iinfo(bits.dtype).max
    return (bits == ones) | ((bits == ones >> 1) & (values.dtype.kind == "f"))


def _is_computed_nan(values: Any) -> Any:
    return np.isnan(values) & ~_is_unwritten(values)


def _has_no_start(values: Any) -> Any:
    return values == _NO_START_VALUE


def _near(expected: Any, got: Any, tolerance: Tolerance) -> Any:
    """Element by element; NaN equals NaN and infinities themselves."""
    if np.asarray(expected).dtype.kind != "f":
        return np.asarray(expected) == np.asarray(got)
    with np.errstate(invalid="ignore", over="ignore"):  # a signalling NaN is invalid even to convert
        wide, other = np.asarray(expected, np.float64), np.asarray(got, np.float64)
        close = np.abs(other - wide) <= tolerance.absolute + tolerance.relative * np.abs(wide)
    finite = np.isfinite(wide) & np.isfinite(other)
    return np.where(finite, close, (wide == other) | (np.isnan(wide) & np.isnan(other)))


def _index(name: str, place: int, shape: tuple[int, ...]) -> str:
    return f"{name}[{', '.join(str(int(i)) for i in np.unravel_index(place, shape))}]"


def _a(value: Any) -> str:
    noun = type(value).__name__
    if value is None:
        return "None"
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def show(value: Any) -> str:
    """A value in a table: short, and enough digits to see the difference. Unsigned 16 and 32 bits are bit patterns."""
    if isinstance(value, np.uint16 | np.uint32):
        return f"0x{int(value):0{2 * value.itemsize}X}"
    if isinstance(value, float | np.floating):
        return f"{float(value):.7g}"
    if isinstance(value, np.ndarray):
        return f"array of shape {value.shape}"
    text = str(value) if isinstance(value, int | np.integer) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
