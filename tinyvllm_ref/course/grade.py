"""Grading a class: ``tinyvllm grade``. ``docs/instructors.md`` is the guide.

>>> from pathlib import Path
>>> from tinyvllm_ref.course.grade import Options, grade
>>> grade(Options(Path("data/submissions"), Path("report")))  # doctest: +SKIP
"""

from __future__ import annotations

import importlib.util

from ..installing import install_extra

# Said now: a missing one would stop a grading in the midst of it, or be taken for an answer's fault.
if _missing := [
    name
    for name in ("psutil", "nbformat", "nbval", "ipykernel", "pytest")
    if importlib.util.find_spec(name) is None
]:
    raise ValueError(f"grading needs {', '.join(_missing)}, not installed here: {install_extra('grade')}")

from .grading.grading import Options, grade
from .grading.limits import Limits

__all__ = ["Limits", "Options", "grade"]
