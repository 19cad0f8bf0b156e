"""What the notebooks import.

>>> from tinyvllm_ref.course import check, cp, hint, np  # doctest: +SKIP

Importing it makes a notebook's answer cells known to ``check``; the rest is loaded when it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import cells as _cells

if TYPE_CHECKING:
    import numpy as np

    from tinyvllm_ref.device import cp

    from .checking import CheckFailed, check
    from .compare_layers import show_layers
    from .course_progress import progress
    from .earlier_parts import earlier
    from .engine_card import show_engine
    from .examining import examine
    from .figures import display_figure
    from .hints import hint, reset, solution
    from .measuring import measure, show
    from .predictions import predict

__all__ = [
    "CheckFailed",
    "check",
    "cp",
    "display_figure",
    "earlier",
    "examine",
    "hint",
    "measure",
    "np",
    "predict",
    "progress",
    "reset",
    "show",
    "show_engine",
    "show_layers",
    "solution",
]

# Name -> the module that has it. No module here has the name of a function: that would hide it.
_WHERE = {
    "CheckFailed": ".checking",
    "check": ".checking",
    "cp": "tinyvllm_ref.device",
    "display_figure": ".figures",
    "earlier": ".earlier_parts",
    "examine": ".examining",
    "hint": ".hints",
    "measure": ".measuring",
    "predict": ".predictions",
    "progress": ".course_progress",
    "reset": ".hints",
    "show": ".measuring",
    "show_engine": ".engine_card",
    "show_layers": ".compare_layers",
    "solution": ".hints",
}

_cells.install()


def __getattr__(name: str) -> Any:
    if name == "np":
        return importlib.import_module("numpy")
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
