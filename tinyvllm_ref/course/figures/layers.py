"""The picture of a comparison layer by layer: a cell for each operation, and where it first differs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .. import look
from .canvas import AltFigure, Sheet, drawable, in_one_look, need_at_most, need_some, plural


def _state(error: float, tolerance: float) -> str:
    if np.isnan(error):
        return "did not run"
    return "agrees" if error <= tolerance else "differs"


_STYLES = {
    "agrees": {"fill": look.GREEN.fill, "edge": look.GREEN.line},
    "differs": {"fill": look.VERMILION.fill, "edge": look.VERMILION.line},
    "did not run": {"fill": look.WASTE, "hatch": look.HATCH},
}


def _short(error: float) -> str:
    """At most four characters: ``.003``, ``0.4``, ``12``, ``inf``."""
    if np.isnan(error):
        return "–"
    if not np.isfinite(error) or error >= 1000:
        return "inf" if not np.isfinite(error) else "1e3+"
    return f"{error:.3f}".lstrip("0") if error < 0.1 else f"{error:.2g}"


@in_one_look
def layer_errors(errors: Mapping[str, float], tolerance: float) -> AltFigure:
    """Relative errors by layer (rows) and operation (columns); the first that is too large is framed.

    Parameters
    ----------
    errors : mapping of str to float
        ``"layers.0.qkv"`` and the like, or a name without dots for what is outside of the layers, in the order of
        computation. NaN stands for an operation that did not run.
    tolerance : float
        The most that is called equal.

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        If there is no operation, or more than 40 layers or 14 operations in one.
    """
    need_some("layer_errors(errors)", errors, "operation")
    inside = [name.split(".") for name in errors if name.count(".") == 2]
    columns = list(dict.fromkeys(parts[2] for parts in inside))
    layers = list(dict.fromkeys(parts[1] for parts in inside))
    need_at_most("layer_errors(errors)", len(layers), 40, "layers")
    need_at_most("layer_errors(errors)", len(columns), 14, "operations")
    first = next((name for name, error in errors.items() if not error <= tolerance), None)
    sheet = Sheet()
    said = f"the first that differs: {first}" if first else "all agree"
    sheet.title("Relative error of every operation, against transformers", f"{said}; tolerance {tolerance:g}")
    left = sheet.left + 0.95
    wide, tall = (sheet.right - left) / max(1, len(columns)), 0.25
    rows: list[tuple[str, dict[str, str]]] = []
    for name in errors:
        if name.count(".") != 2:
            rows.append((name, {"": name}))
        elif not rows or rows[-1][0] != f"layer {name.split('.')[1]}":
            rows.append((f"layer {name.split('.')[1]}", {name.split(".")[2]: name}))
        else:
            rows[-1][1][name.split(".")[2]] = name
    within = False
    for label, cells in rows:
        # Heads are of the operations in layers: above the first layer, and what comes after the last is set off.
        if within and "" in cells:
            sheet.y += 0.1
        elif not within and "" not in cells:
            for k, column in enumerate(columns):
                sheet.text(
                    left + (k + 0.5) * wide, sheet.y + 0.11, column.replace("_", " "), ha="center",
                    size=7, color=look.MUTED, width=wide - 0.04,
                )  # fmt: skip
            sheet.y += 0.22
        within = "" not in cells
        sheet.text(left - 0.1, sheet.y + tall / 2, label.replace("_", " "), ha="right", width=0.85)
        for column, name in cells.items():
            x = left + columns.index(column) * wide if column else left
            error = errors[name]
            style = dict(_STYLES[_state(error, tolerance)])
            sheet.box(x + 0.02, sheet.y + 0.02, wide - 0.04, tall - 0.04, **style, above=1)  # type: ignore[arg-type]
            if name == first:
                sheet.box(x, sheet.y, wide, tall, edge=look.INK, line=2.0, above=3)
            sheet.text(x + wide / 2, sheet.y + tall / 2, _short(error), ha="center", size=7.5)
        sheet.y += tall
    sheet.key([(state, dict(style)) for state, style in _STYLES.items()])
    wrong = sum(not error <= tolerance for error in errors.values())
    return sheet.finish(
        f"Relative errors of {plural(len(errors), 'operation')} against transformers: {drawable(said)}; {wrong} above "
        f"the tolerance of {tolerance:g} or not run."
    )
