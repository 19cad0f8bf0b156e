"""The pictures of the course, one look for all of them.

Each function takes plain data (arrays, lists, rows of ``emulation.trace()``) and gives a matplotlib Figure that
belongs to no global state, with an ``alt_text`` computed from the data. ``display_figure`` shows one in a notebook.
"""

from . import quiet as _quiet  # noqa: F401 (before anything imports matplotlib)
from .arrays import Segment, blocks_over_array, byte_strip, grid, row_column_major
from .canvas import AltFigure, display_figure
from .kernels import (
    Combine,
    Measured,
    Point,
    measured_bars,
    reduction_steps,
    reduction_tree,
    roofline,
)
from .memory import (
    BlockUse,
    Level,
    Lifetime,
    arena_map,
    bank_conflicts,
    lifetimes,
    memory_hierarchy,
    memory_map,
    threads_over_addresses,
    warp_requests,
)
from .model import (
    attention_heads,
    attention_map,
    distribution_filters,
    merge_tree,
    rope_rotation,
    token_strip,
    wavelengths,
)
from .numbers import bit_layout, error_lines, number_spacing
from .schedule import timeline

__all__ = [
    "AltFigure",
    "BlockUse",
    "Combine",
    "Level",
    "Lifetime",
    "Measured",
    "Point",
    "Segment",
    "arena_map",
    "attention_heads",
    "attention_map",
    "bank_conflicts",
    "bit_layout",
    "blocks_over_array",
    "byte_strip",
    "display_figure",
    "distribution_filters",
    "error_lines",
    "grid",
    "lifetimes",
    "measured_bars",
    "memory_hierarchy",
    "memory_map",
    "merge_tree",
    "number_spacing",
    "reduction_steps",
    "reduction_tree",
    "roofline",
    "rope_rotation",
    "row_column_major",
    "threads_over_addresses",
    "timeline",
    "token_strip",
    "warp_requests",
    "wavelengths",
]
