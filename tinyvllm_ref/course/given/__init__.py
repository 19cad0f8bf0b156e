"""The plain modules that stand beside a learner's parts in ``my_engine/``: what a model is, what a request is, how a
step's lists become arrays, and the program that puts all of it to work.

A cell imports from here (``from tinyvllm_ref.course.given.inputs import make_inputs``); in ``my_engine/`` the same line
reads ``from .inputs import make_inputs``, and the module lies beside it. So that folder needs nothing of this project
but :mod:`tinyvllm_ref.device`.
"""

from __future__ import annotations

import re
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_PACKAGE = _HERE.parent.parent

# Name in my_engine/ -> where its text is. Those of the engine itself are plain already.
_TEXTS = {
    "config": _PACKAGE / "config.py",
    "sampling_params": _PACKAGE / "sampling_params.py",
    "request": _PACKAGE / "request.py",
    "inputs": _HERE / "inputs.py",
    "generate": _HERE / "generate.py",
}
MODULES = tuple(_TEXTS)
"""All of them, in the order in which they build on one another."""

_IMPORT = re.compile(r"^(\s*)from tinyvllm_ref(?:\.course\.given)?\.(\w+) import", re.MULTILINE)
_BESIDE = re.compile(r"^\s*from \.(\w+) import", re.MULTILINE)


def localized(source: str) -> str:
    """A module's text with its imports of given modules changed to those beside it."""

    def beside(found: re.Match[str]) -> str:
        indent, name = found.groups()
        if name == "bf16":  # its two functions are parts: the folder's own
            return f"{indent}from .earlier import"
        return f"{indent}from .{name} import" if name in _TEXTS else found[0]

    return _IMPORT.sub(beside, source)


def module_text(name: str) -> str:
    """The text of a given module, as it stands in ``my_engine/``."""
    return localized(_TEXTS[name].read_text(encoding="utf-8"))


def needed_by(source: str) -> list[str]:
    """The given modules that a (localized) text imports, and those that these import."""
    wanted, found = _BESIDE.findall(source), set[str]()
    while wanted:
        name = wanted.pop()
        if name in _TEXTS and name not in found:
            found.add(name)
            wanted += _BESIDE.findall(module_text(name))
    return [name for name in MODULES if name in found]
