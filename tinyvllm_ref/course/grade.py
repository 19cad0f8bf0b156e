"""Grading a class: ``tinyvllm grade``. ``docs/instructors.md`` is the guide.

>>> from pathlib import Path
>>> from tinyvllm_ref.course.grade import Options, grade
>>> grade(Options(Path("data/submissions"), Path("report")))  # doctest: +SKIP
"""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("psutil") is None:
    raise ValueError('grading needs psutil and Dask: pip install "tinyvllm-ref[grade]"')

from .grading.grading import Options, grade
from .grading.limits import Limits

__all__ = ["Limits", "Options", "grade"]
