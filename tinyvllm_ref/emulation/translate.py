"""Turns CUDA C++ into C++ that a host compiler understands, on the same lines.

Most of CUDA C++ becomes C++ through macros (``runtime/cuda_shim.h``). What no macro can do is done here, on
tokens: ``__shared__`` and ``__device__`` variables become references to storage of their own (``storage.py``),
and the kernels with the names of their parameters are found. No line is added or removed, so the compiler's
line numbers are the caller's own.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

from .storage import Edit, Source, shared_edits, variable_edits
from .tokens import ATTRIBUTES, Token, closing, find_blocks, line_starts, split, tokenize


@dataclass(frozen=True)
class Parameter:
    """A kernel's parameter: its name, and its type as written."""

    name: str
    type: str


@dataclass(frozen=True)
class Kernel:
    """A ``__global__`` function of the source."""

    name: str
    parameters: tuple[Parameter, ...]
    is_template: bool
    is_extern_c: bool
    line: int
    max_threads: str = ""  # the first argument of __launch_bounds__, as written


@dataclass
class Translation:
    """A translated source.

    Attributes
    ----------
    code : str
        C++ with as many lines as the source.
    kernels : list of Kernel
        In the order of the source.
    edits : list of (offset in source, characters removed, characters added)
        What changed, to find a column of the source again.
    indexed_lines : frozenset of int
        Lines on which a ``__shared__`` or ``__device__`` variable is indexed: its own bounds are checked there.
    """

    source: str
    code: str
    kernels: list[Kernel]
    edits: list[tuple[int, int, int]] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list, repr=False)
    marks: list[tuple[int, int, str]] = field(default_factory=list)
    indexed_lines: frozenset[int] = frozenset()

    def place(self, line: int) -> tuple[str, int]:
        """File ("" for the source itself) and line, by the source's own ``#line`` directives."""
        for at, number, file in reversed(self.marks):
            if at < line:
                return file, number + line - at - 1
        return "", line

    def source_column(self, line: int, column: int) -> int:
        """The column of the source that a column of the translated line came from; both from 1."""
        starts = line_starts(self.source)
        if not 1 <= line <= len(starts):
            return column
        first = starts[line - 1]
        end = starts[line] if line < len(starts) else len(self.source)
        shift = 0
        for offset, removed, added in self.edits:
            if not first <= offset < end or offset - first + shift >= column - 1:
                continue
            where = offset - first + shift
            if column - 1 < where + added:  # inside of what was put in
                return offset - first + 1
            shift += added - removed
        return max(1, column - shift)


# ---------------- kernels
def _parameters(tokens: list[Token], source: str) -> tuple[Parameter, ...]:
    found = []
    for part in split(tokens):
        if not part or [token.text for token in part] == ["void"]:
            continue
        equals = next((k for k, token in enumerate(part) if token.text == "="), len(part))
        declared = part[:equals]
        words = [token for token in declared if token.kind == "word"]
        name = words[-1] if words else declared[-1]
        text = source[declared[0].start : name.start].strip()
        found.append(Parameter(name.text, re.sub(r"\s+", " ", text)))
    return tuple(found)


def find_kernels(source: str, tokens: list[Token]) -> list[Kernel]:
    """Every ``__global__`` function, declared or defined, once."""
    kernels: dict[str, Kernel] = {}
    starts = line_starts(source)
    braces: list[bool] = []  # of each open brace: does it belong to extern "C"?
    statement = 0  # index of the first token of this declaration
    for k, token in enumerate(tokens):
        if token.text == "{":
            braces.append([t.text for t in tokens[max(0, k - 2) : k]] == ["extern", '"C"'])
        elif token.text == "}" and braces:
            braces.pop()
        if token.text in {";", "{", "}"}:
            statement = k + 1
        if token.text != "__global__":
            continue
        j = k + 1
        while j + 1 < len(tokens) and not (tokens[j].kind == "word" and tokens[j + 1].text == "("):
            j += 1
        while j + 1 < len(tokens) and tokens[j].text in ATTRIBUTES:
            j = closing(tokens, j + 1) + 1
            while j + 1 < len(tokens) and not (tokens[j].kind == "word" and tokens[j + 1].text == "("):
                j += 1
        if j + 1 >= len(tokens):
            continue
        before = [t.text for t in tokens[statement:j]]
        close = closing(tokens, j + 1)
        bound = next((i for i in range(statement, j) if tokens[i].text == "__launch_bounds__"), None)
        bounds = split(tokens[bound + 2 : closing(tokens, bound + 1)])[0] if bound is not None else []
        kernel = Kernel(
            tokens[j].text,
            _parameters(tokens[j + 2 : close], source),
            "template" in before,
            '"C"' in before or any(braces),
            bisect_right(starts, tokens[j].start),
            " ".join(token.text for token in bounds),
        )
        kernels[kernel.name] = kernel
    return list(kernels.values())


_LINE_DIRECTIVE = re.compile(r'^[ \t]*#[ \t]*(?:line[ \t]+)?(\d+)(?:[ \t]+"([^"\n]*)")?[^\n]*', re.MULTILINE)


_INCLUDE_DIRECTIVE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]', re.MULTILINE)
MISSING_HEADER = "emu_missing_header"


def _include_edits(source: str, has_header: Callable[[str], bool]) -> list[Edit]:
    """An ``#include`` of what is not there becomes an ``#error``: a host compiler may well find it."""
    return [
        Edit(found.start(), found.end(), f"#error {MISSING_HEADER} {found[1]}")
        for found in _INCLUDE_DIRECTIVE.finditer(source)
        if not has_header(found[1])
    ]


def translate(source: str, has_header: Callable[[str], bool] = lambda name: True) -> Translation:
    """Translate one CUDA C++ source.

    `has_header` says of an included file whether NVRTC would find it.

    ``#line`` directives are taken out, so that every line number that comes back is one of this text;
    :meth:`Translation.place` says what they would have made of it.
    """
    tokens = tokenize(source)
    starts = line_starts(source)
    directives = list(_LINE_DIRECTIVE.finditer(source))
    marks = [(bisect_right(starts, d.start()), int(d[1]), d[2] or "") for d in directives]
    edits = [Edit(d.start(), d.end(), "") for d in directives] + _include_edits(source, has_header)
    moved, names = _storage_edits(Source(source, tokens, find_blocks(tokens)))
    edits = sorted(edits + moved, key=lambda edit: (edit.start, edit.end))
    pieces, at = [], 0
    for edit in edits:
        if edit.start < at:  # the same use, found from two declarations around it
            continue
        pieces += [source[at : edit.start], edit.text]
        at = edit.end
    pieces.append(source[at:])
    return Translation(
        source,
        "".join(pieces),
        find_kernels(source, tokens),
        [(edit.start, edit.end - edit.start, len(edit.text)) for edit in edits],
        tokens,
        marks,
        frozenset(bisect_right(starts, token.start) for token in tokens if token.text in names),
    )


def _storage_edits(source: Source) -> tuple[list[Edit], set[str]]:
    """The edits for every variable that has storage of its own, and the variables' names."""
    edits: list[Edit] = []
    names: list[str] = []
    statement, done = 0, -1
    for k, token in enumerate(source.tokens):
        if token.text in {";", "{", "}"}:
            statement = k + 1
        if k <= done or token.text not in {"__shared__", "__device__", "__constant__"}:
            continue
        if token.text == "__shared__":
            more, declared = shared_edits(source, k, statement)
        else:
            more, declared = variable_edits(source, k, statement, len(names))
        edits += more
        names += declared
        if declared:
            done = source.end_of_statement(k)  # one statement may have two of these words
    return edits, set(names)
