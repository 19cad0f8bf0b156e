"""Slips that compile: what stands in a kernel's text and means something else than in NumPy."""

from __future__ import annotations

import ast
import re

_SUBSCRIPT = re.compile(r"\b([A-Za-z_]\w*)\[((?:[^][(){};]|\([^()]*\))*)\]")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def slips_in(cell: str) -> tuple[str, ...]:
    """A sentence for each kind of slip in the kernels of an answer cell.

    ``x[t, k]`` is an element of two dimensions in NumPy. In C++ it is ``x[k]``: the comma is an operator there.
    """
    for text in _kernel_texts(cell):
        for found in _SUBSCRIPT.finditer(_COMMENT.sub(" ", text)):
            indices = re.sub(r"\([^()]*\)", "", found[2]).split(",")
            if len(indices) > 1:
                kept = indices[-1].strip()
                return (
                    f"`{found[0]}` is NumPy's: in C++ the comma forgets what stands before it, and this is "
                    f"`{found[1]}[{kept}]`. An array is flat in a kernel: `{found[1]}[row * columns + column]`.",
                )
    return ()


def _kernel_texts(cell: str) -> list[str]:
    """The strings of a cell that hold CUDA C++."""
    try:
        tree = ast.parse(cell)
    except SyntaxError:
        return []
    strings = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return [text for text in strings if "__global__" in text or "__device__" in text]
