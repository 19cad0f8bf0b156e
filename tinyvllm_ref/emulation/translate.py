"""Turns CUDA C++ into C++ that a host compiler understands, on the same lines.

Most of CUDA C++ becomes C++ through macros (``runtime/cuda_shim.h``). What no macro can do is done here, on
tokens: ``__shared__`` declarations become references to the block's own storage, and the kernels with the
names of their parameters are found. No line is added or removed, so the compiler's line numbers are the
caller's own.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field

# Dynamic and static __shared__ variables become these; compiler messages are cleaned of them again.
TYPE_PREFIX = "emu_type_"
TAG_PREFIX = "emu_tag_"
FILE_PREFIX = "emu_file_"

_TOKEN = re.compile(
    r"""
    (?P<space>\s+)
  | (?P<comment>//[^\n]*|/\*.*?\*/)
  | (?P<directive>\#(?:[^\n\\]|\\\r?\n|\\.)*)
  | (?P<raw>R"(?P<delimiter>[^\s()\\]{0,16})\(.*?\)(?P=delimiter)")
  | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
  | (?P<word>[A-Za-z_$][\w$]*)
  | (?P<number>\.?\d(?:[eEpP][+-]|[\w.'])*)
  | (?P<symbol>::|->|\.\.\.|<<=|>>=|[-+*/%&|^=!<>]=|&&|\|\||\+\+|--|.)
    """,
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True)
class Token:
    """A token of the source that means something: no space, comment or preprocessor line."""

    kind: str
    text: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)


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
    """

    source: str
    code: str
    kernels: list[Kernel]
    edits: list[tuple[int, int, int]] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list, repr=False)
    marks: list[tuple[int, int, str]] = field(default_factory=list)

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


def line_starts(text: str) -> list[int]:
    """Offset of the first character of each line."""
    return [0, *(match.end() for match in re.finditer("\n", text))]


def tokenize(source: str) -> list[Token]:
    """The tokens of a source."""
    tokens = []
    for match in _TOKEN.finditer(source):
        kind = match.lastgroup or "symbol"
        if kind == "delimiter":
            kind = "raw"
        if kind not in {"space", "comment", "directive"}:
            tokens.append(Token(kind, match.group(), match.start()))
    return tokens


_OPEN = {"(": ")", "[": "]", "{": "}"}
ATTRIBUTES = {
    "__launch_bounds__",
    "__attribute__",
    "__maxnreg__",
    "__cluster_dims__",
    "alignas",
    "__align__",
}


def closing(tokens: list[Token], k: int) -> int:
    """Index of the bracket that closes the one at k; the last token where none does."""
    depth = 0
    for j in range(k, len(tokens)):
        if tokens[j].text in _OPEN:
            depth += 1
        elif tokens[j].text in _OPEN.values():
            depth -= 1
            if depth == 0:
                return j
    return len(tokens) - 1


def _split(tokens: list[Token], separator: str = ",") -> list[list[Token]]:
    """Split at separators that are outside of every bracket, ``<>`` included."""
    parts: list[list[Token]] = [[]]
    depth = angle = 0
    for token in tokens:
        if token.text in _OPEN:
            depth += 1
        elif token.text in _OPEN.values():
            depth -= 1
        elif depth == 0 and token.text == "<" and parts[-1] and parts[-1][-1].kind == "word":
            angle += 1
        elif depth == 0 and angle and token.text == ">":
            angle -= 1
        if token.text == separator and depth == 0 and angle == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


# ---------------- kernels
def _parameters(tokens: list[Token], source: str) -> tuple[Parameter, ...]:
    found = []
    for part in _split(tokens):
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
        kernel = Kernel(
            tokens[j].text,
            _parameters(tokens[j + 2 : close], source),
            "template" in before,
            '"C"' in before or any(braces),
            bisect_right(starts, tokens[j].start),
        )
        kernels[kernel.name] = kernel
    return list(kernels.values())


# ---------------- shared memory
@dataclass
class _Edit:
    start: int
    end: int
    text: str


def _declarators(tokens: list[Token]) -> tuple[int, list[list[Token]]]:
    """Where the declarators start, and each of them: ``float a[2], b`` -> ``a[2]``, ``b``."""
    parts = _split(tokens)
    first = parts[0]
    depth = 0
    end = len(first)
    for k, token in enumerate(first):
        if token.text == "[" and depth == 0:
            end = k
            break
        if token.text in _OPEN:
            depth += 1
        elif token.text in _OPEN.values():
            depth -= 1
    name = max((k for k in range(end) if first[k].kind == "word"), default=-1)
    return name, [first[name:], *parts[1:]]


def _use_edits(tokens: list[Token], after: int, name: str) -> list[_Edit]:
    """Uses of a variable declared outside of functions become calls: it has a place only in a block."""
    uses = [
        token
        for before, token in zip(tokens[after:], tokens[after + 1 :], strict=False)
        if token.text == name and before.text not in {".", "->", "::"}
    ]
    return [_Edit(use.start, use.end, f"{FILE_PREFIX}{name}()") for use in uses]


def _shared_edits(source: str, tokens: list[Token], k: int, start: int, local: bool) -> list[_Edit]:
    """The edits that turn the ``__shared__`` declaration around token k into C++."""
    stop = k
    while stop < len(tokens) and tokens[stop].text != ";":
        stop = closing(tokens, stop) + 1 if tokens[stop].text in _OPEN else stop + 1
    if stop >= len(tokens):
        return []
    statement = tokens[start:stop]
    is_extern = any(token.text == "extern" for token in statement)
    edits = [_Edit(tokens[k].start, tokens[k].end, "typedef")]
    edits += [_Edit(t.start, t.end, "") for t in statement if t.text in {"static", "extern"}]
    words = [t for t in statement if t.text not in {"static", "extern", "__shared__"}]
    alignment = ""
    for j, token in enumerate(words):
        if token.text in {"__align__", "alignas"}:  # moves behind the name: it belongs to the variable
            close = closing(words, j + 1)
            inner = source[words[j + 1].end : words[close].start]
            edits.append(_Edit(token.start, words[close].end, ""))
            alignment = f" __attribute__((aligned({inner})))"
            del words[j : close + 1]
            break
    line = bisect_right(line_starts(source), tokens[k].start)
    name_at, declarators = _declarators(words)
    if name_at < 0:
        return []
    tail = []
    for tokens_of in declarators:
        name = next((token for token in tokens_of if token.kind == "word"), None)
        if name is None:
            return []
        edits.append(_Edit(name.start, name.end, TYPE_PREFIX + name.text))
        type_name, tag = TYPE_PREFIX + name.text, TAG_PREFIX + name.text
        if alignment:
            edits.append(_Edit(tokens_of[-1].end, tokens_of[-1].end, alignment))
        is_dynamic = is_extern and len(tokens_of) > 2 and [t.text for t in tokens_of[1:3]] == ["[", "]"]
        if is_dynamic:  # its first bound is the launch's
            edits.append(_Edit(tokens_of[1].start, tokens_of[2].end, ""))
        tag_type = (
            f' struct {tag} {{ static constexpr const char* emu_name() {{ return "{name.text}"; }}'
            f" static constexpr int emu_line() {{ return {line}; }} }};"
        )
        if is_dynamic and local:
            tail.append(f' {type_name}* {name.text} = emu_dynamic_pointer<{type_name}>("{name.text}");')
        elif is_dynamic:
            pointer = f'emu_dynamic_pointer<{type_name}>("{name.text}")'
            tail.append(f" static EMU_INLINE {type_name}* {FILE_PREFIX}{name.text}() {{ return {pointer}; }}")
            edits += _use_edits(tokens, stop, name.text)
        elif local:
            reference = f"emu_shared_reference<{type_name}, {tag}>()"
            tail.append(f"{tag_type} {type_name}& {name.text} = {reference}; (void){name.text};")
        else:
            reference = f"emu_shared_reference<{type_name}, {tag}>()"
            function = f"static EMU_INLINE {type_name}& {FILE_PREFIX}{name.text}()"
            tail.append(f"{tag_type} {function} {{ return {reference}; }}")
            edits += _use_edits(tokens, stop, name.text)
    edits.append(_Edit(tokens[stop].end, tokens[stop].end, "".join(tail)))
    return edits


def _opens_namespace(tokens: list[Token], statement: int, k: int) -> bool:
    """Is the brace at k that of a namespace or of extern "C", in which declarations are global?"""
    words = [token.text for token in tokens[statement:k]]
    return words[:1] == ["namespace"] or words[:2] == ["inline", "namespace"] or words == ["extern", '"C"']


_LINE_DIRECTIVE = re.compile(r'^[ \t]*#[ \t]*(?:line[ \t]+)?(\d+)(?:[ \t]+"([^"\n]*)")?[^\n]*', re.MULTILINE)


def translate(source: str) -> Translation:
    """Translate one CUDA C++ source.

    ``#line`` directives are taken out, so that every line number that comes back is one of this text;
    :meth:`Translation.place` says what they would have made of it.
    """
    tokens = tokenize(source)
    starts = line_starts(source)
    directives = list(_LINE_DIRECTIVE.finditer(source))
    marks = [(bisect_right(starts, d.start()), int(d[1]), d[2] or "") for d in directives]
    edits: list[_Edit] = [_Edit(d.start(), d.end(), "") for d in directives]
    scopes: list[bool] = []  # of each open brace: are declarations in it global?
    statement = 0
    for k, token in enumerate(tokens):
        if token.text == "{":
            scopes.append(_opens_namespace(tokens, statement, k))
        elif token.text == "}" and scopes:
            scopes.pop()
        if token.text in {";", "{", "}"}:
            statement = k + 1
        if token.text == "__shared__":
            edits += _shared_edits(source, tokens, k, statement, local=not all(scopes))
    edits.sort(key=lambda edit: (edit.start, edit.end))
    pieces, at = [], 0
    for edit in edits:
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
    )
