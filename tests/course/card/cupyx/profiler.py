"""The stand-in's ``cupyx.profiler``."""

from __future__ import annotations

from typing import Any

import card_ways
import numpy as np
from cupy.cupyx import PerfCaseResult


def benchmark(func: Any, args: Any = (), kwargs: Any = None, n_repeat: int = 10000, **options: Any) -> Any:
    """Call a function once, its launches checked and not run; each time is 1 us."""
    before, card_ways.only_timed = card_ways.only_timed, True
    try:
        func(*args, **(kwargs or {}))
    finally:
        card_ways.only_timed = before
    result = PerfCaseResult(getattr(func, "__name__", "run"), np.full(2, 1e-6))
    result.gpu_times = np.full((1, 2), 1e-6)
    return result
