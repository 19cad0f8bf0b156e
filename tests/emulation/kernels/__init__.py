"""A corpus of CUDA C++ kernels: correct ones with what they must compute, and ones with one planted fault.

Each module is a family: `CASES` lists its correct kernels (`case.KernelCase`), and in the modules named
`bugs_*` its faulty ones (`case.BugCase`). `correct_cases()` and `bug_cases()` find them all.
"""

from __future__ import annotations

import importlib
import pkgutil

from .case import BugCase, KernelCase


def _modules(bugs: bool) -> list[str]:
    """Names of the family modules, sorted."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "case")
    return [name for name in names if name.startswith("bugs_") == bugs]


def correct_cases() -> list[KernelCase]:
    """Every correct kernel, by family."""
    cases = [
        case for name in _modules(bugs=False) for case in importlib.import_module(f".{name}", __name__).CASES
    ]
    _require_distinct([case.name for case in cases])
    return cases


def bug_cases() -> list[BugCase]:
    """Every kernel with a planted fault, by kind of fault."""
    cases = [
        case for name in _modules(bugs=True) for case in importlib.import_module(f".{name}", __name__).CASES
    ]
    _require_distinct([case.name for case in cases])
    return cases


def _require_distinct(names: list[str]) -> None:
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"case names must be distinct; these are used twice: {sorted(twice)}")
