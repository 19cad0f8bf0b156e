"""Gives ``__shared__`` and ``__device__`` variables a place outside of the compiled kernel.

A ``__shared__`` variable lives in the storage of the block that runs, a ``__device__`` or ``__constant__`` one
in device memory, where it has exact bounds and is one variable in both modes. Either way the declaration
becomes that of a reference, so that C++ itself settles what a name means: which declaration hides which.

A reference can not be used everywhere that a variable of static storage can. A lambda that copies what it
captures, a member function of a local structure, and code that a ``case`` or a ``goto`` jumps to get a call
that finds the variable, instead of its name.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from .tokens import ATTRIBUTES, Block, Token, closing, line_starts, split

# What variables become; compiler messages are cleaned of these names again.
TYPE_PREFIX = "emu_type_"
TAG_PREFIX = "emu_tag_"
FILE_PREFIX = "emu_file_"
HOME_PREFIX = "emu_home_"
INITIALIZED_SHARED = "emu_shared_has_no_start_value"

_MEMBER = {".", "->", "::"}
_TYPES = {
    "auto", "bool", "char", "short", "int", "long", "unsigned", "signed", "float", "double", "half", "size_t",
    "float2", "float3", "float4", "int2", "int4", "uint2", "uint4", "double2", "uint8_t", "int32_t", "uint32_t",
}  # fmt: skip


@dataclass
class Edit:
    """Characters of the source from `start` to `end` become `text`."""

    start: int
    end: int
    text: str


@dataclass
class Source:
    """A source with what is known of it."""

    text: str
    tokens: list[Token]
    blocks: list[Block]

    def enclosing(self, k: int) -> list[Block]:
        """The blocks around token k, outermost first."""
        return [block for block in self.blocks if block.first < k < block.last]

    def end_of_statement(self, k: int) -> int:
        """Index of the ``;`` that ends the statement of token k; the number of tokens where none does."""
        while k < len(self.tokens) and self.tokens[k].text != ";":
            k = closing(self.tokens, k) + 1 if self.tokens[k].text in {"(", "[", "{"} else k + 1
        return k

    def line(self, k: int) -> int:
        return bisect_right(line_starts(self.text), self.tokens[k].start)


# ---------------- names and their uses
def _declarators(tokens: list[Token]) -> tuple[int, list[list[Token]]]:
    """Where the declarators start, and each of them: ``float a[2], b`` -> ``a[2]``, ``b``."""
    parts = split(tokens)
    first = parts[0]
    depth = 0
    end = len(first)
    for k, token in enumerate(first):
        if token.text in {"[", "="} and depth == 0:
            end = k
            break
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(token.text, 0)
    name = max((k for k in range(end) if first[k].kind == "word"), default=-1)
    return name, [first[name:], *parts[1:]]


def _is_use(tokens: list[Token], k: int, name: str) -> bool:
    return tokens[k].text == name and tokens[k - 1].text not in _MEMBER


def _declares(tokens: list[Token], k: int) -> bool:
    """Is the word at k being declared, as far as the words before it tell?"""
    j = k - 1
    while tokens[j].text in {"*", "&", "const", "__restrict__"}:
        j -= 1
    return tokens[j].text in _TYPES


def _hides(source: Source, block: Block, name: str) -> bool:
    """Does a lambda or a local structure have a parameter, a capture, or a variable of this name?"""
    head = source.tokens[block.head : block.first]
    if any(token.text == name for token in head):
        return True
    return any(
        _is_use(source.tokens, k, name) and _declares(source.tokens, k)
        for k in range(block.first, block.last)
    )


def _keeps_reference(source: Source, block: Block) -> bool:
    """Can code in this block use a reference of the function around it? A lambda that captures by one can."""
    if block.kind != "lambda":
        return False
    capture = source.tokens[block.head + 1 : closing(source.tokens, block.head)]
    return [token.text for token in capture[:1]] == ["&"] and (len(capture) == 1 or capture[1].text == ",")


def _use_edits(source: Source, first: int, last: int, name: str, call: str, everywhere: bool) -> list[Edit]:
    """Uses of a name between two tokens become calls where a reference does not reach, or everywhere."""
    inner = [b for b in source.blocks if first <= b.first < last and b.kind in {"lambda", "record"}]
    edits = []
    for k in range(first, min(last, len(source.tokens))):
        if not _is_use(source.tokens, k, name):
            continue
        around = [b for b in inner if b.first < k < b.last]
        if any(_hides(source, b, name) for b in around):
            continue
        if (everywhere and not _declares(source.tokens, k)) or not all(
            _keeps_reference(source, b) for b in around
        ):
            edits.append(Edit(source.tokens[k].start, source.tokens[k].end, call))
    return edits


def _is_jumped_over(source: Source, k: int) -> bool:
    """Can control come to the scope of token k past its declaration?"""
    around = source.enclosing(k)
    if around[-1].kind == "switch":
        return True
    body = next(b for b in reversed(around) if b.kind in {"function", "lambda"} or b is around[0])
    return any(token.text == "goto" for token in source.tokens[body.first : body.last])


def _function_edits(source: Source, after: int, name: str, reference: str, call: str) -> list[Edit]:
    """A variable declared outside of functions gets a reference at the head of each function that names it."""
    edits = []
    for block in source.blocks:
        if block.kind != "function" or block.first < after:
            continue
        parameters = source.tokens[block.head : block.first]
        named = any(_is_use(source.tokens, k, name) for k in range(block.first, block.last))
        if not named or any(token.text == name for token in parameters):
            continue
        start, end = source.tokens[block.first].end, source.tokens[block.last].start
        edits.append(Edit(start, start, f" {reference} {name} = {call}; (void){name}; {{"))
        edits.append(Edit(end, end, "}"))  # a scope of its own: the function may declare the name again
        edits += _use_edits(source, block.first + 1, block.last, name, call, everywhere=False)
    return edits


# ---------------- __shared__
def shared_edits(source: Source, k: int, start: int) -> tuple[list[Edit], list[str]]:
    """What turns the ``__shared__`` declaration around token k into C++, and the names that it declares."""
    tokens = source.tokens
    around = source.enclosing(k)
    local = any(block.kind not in {"namespace", "record"} for block in around)
    stop = source.end_of_statement(k)
    if stop >= len(tokens):
        return [], []
    statement = tokens[start:stop]
    is_extern = any(token.text == "extern" for token in statement)
    edits = [Edit(tokens[k].start, tokens[k].end, "typedef")]
    edits += [Edit(t.start, t.end, "") for t in statement if t.text in {"static", "extern"}]
    words = [t for t in statement if t.text not in {"static", "extern", "__shared__"}]
    if words and words[0].text in {"case", "default"}:  # a label stands before it
        words = words[next(j for j, t in enumerate(words) if t.text == ":") + 1 :]
    elif len(words) > 2 and words[1].text == ":" and words[0].kind == "word":
        words = words[2:]
    words, alignment = _take_alignment(source, words, edits)
    name_at, declarators = _declarators(words)
    if name_at < 0:
        return [], []
    line, names, tail = source.line(k), [], []
    for declared in declarators:
        declared, value = _without_value(declared)
        if value:  # a compiler for cards refuses it, in these words
            edits.append(Edit(value[0].start, value[-1].end, ""))
            tail.append(f' static_assert(false, "{INITIALIZED_SHARED}");')
        token = next((token for token in declared if token.kind == "word"), None)
        if token is None:
            return [], []
        name = token.text
        names.append(name)
        edits.append(Edit(token.start, token.end, TYPE_PREFIX + name))
        if alignment:
            edits.append(Edit(declared[-1].end, declared[-1].end, alignment))
        type_name, tag = TYPE_PREFIX + name, TAG_PREFIX + name
        if is_extern and [t.text for t in declared[1:3]] == ["[", "]"]:  # its first bound is the launch's
            edits.append(Edit(declared[1].start, declared[2].end, ""))
            reference, call = f"{type_name}*", f'emu_dynamic_pointer<{type_name}>("{name}")'
        else:
            reference, call = f"{type_name}&", f"emu_shared_reference<{type_name}, {tag}>()"
            tail.append(
                f' struct {tag} {{ static constexpr const char* emu_name() {{ return "{name}"; }}'
                f" static constexpr int emu_line() {{ return {line}; }} }};"
            )
        if not local:
            function = f"{FILE_PREFIX}{name}()"
            tail.append(f" static EMU_INLINE {reference} {function} {{ return {call}; }}")
            edits += _function_edits(source, stop, name, reference, function)
            continue
        jumped = _is_jumped_over(source, k)
        if not jumped:
            tail.append(f" {reference} {name} = {call}; (void){name};")
        edits += _use_edits(source, stop + 1, around[-1].last, name, call, everywhere=jumped)
    edits.append(Edit(tokens[stop].end, tokens[stop].end, "".join(tail)))
    return edits, names


def _without_value(declared: list[Token]) -> tuple[list[Token], list[Token]]:
    """``a[2] = {0}`` -> ``a[2]`` and ``= {0}``."""
    at = next((j for j, token in enumerate(declared) if token.text in {"=", "{"}), len(declared))
    return declared[:at], declared[at:]


def _take_alignment(source: Source, words: list[Token], edits: list[Edit]) -> tuple[list[Token], str]:
    """``__align__(n)`` moves behind the name: it belongs to the variable, and not to a typedef's type."""
    for j, token in enumerate(words):
        if token.text in {"__align__", "alignas"}:
            close = closing(words, j + 1)
            inner = source.text[words[j + 1].end : words[close].start]
            edits.append(Edit(token.start, words[close].end, ""))
            return words[:j] + words[close + 1 :], f" __attribute__((aligned({inner})))"
    return words, ""


# ---------------- __device__ and __constant__
def _without_attributes(tokens: list[Token]) -> list[Token]:
    out, k = [], 0
    while k < len(tokens):
        if tokens[k].text in ATTRIBUTES and k + 1 < len(tokens) and tokens[k + 1].text == "(":
            k = closing(tokens, k + 1)
        else:
            out.append(tokens[k])
        k += 1
    return out


def _variable_name(declarator: list[Token]) -> Token | None:
    """The name in ``float a[4]``, ``int b = 1``, ``float (*operation)(float)``; None for a function's."""
    depth, end = 0, len(declarator)
    for k, token in enumerate(declarator):
        if depth == 0 and token.text in {"=", "[", "{"}:
            end = k
            break
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(token.text, 0)
    for k in range(end - 1):
        if declarator[k].text == "(":
            if declarator[k + 1].text not in {"*", "&"}:
                return None
            end = closing(declarator, k)
            declarator = declarator[k:end]
            end = next((j for j, t in enumerate(declarator) if t.text == "["), len(declarator))
            break
    words = [token for token in declarator[:end] if token.kind == "word"]
    return words[-1] if words and declarator[end - 1] is words[-1] else None


def _is_constant(words: list[Token]) -> bool:
    """``const`` that belongs to the variable itself, not to what it points to."""
    texts = [token.text for token in words]
    stars = [k for k, text in enumerate(texts) if text == "*"]
    return "constexpr" in texts or "const" in (texts[stars[-1] :] if stars else texts)


def variable_edits(source: Source, k: int, start: int, number: int) -> tuple[list[Edit], list[str]]:
    """What moves the ``__device__`` or ``__constant__`` variables declared around token k to device memory.

    Constants of the compiler's own (``const``), members of classes, and ``extern`` declarations stay where they
    are.
    """
    tokens = source.tokens
    if any(block.kind != "namespace" for block in source.enclosing(k)):
        return [], []
    stop = source.end_of_statement(k)
    if stop >= len(tokens):
        return [], []
    whole = tokens[start:stop]
    texts = {token.text for token in whole}
    if texts & {"extern", "template", "operator", "typedef", "using", "friend", "__global__", "__shared__"}:
        return [], []
    statement = _without_attributes(whole)
    parts = split(statement)
    names = [_variable_name(part) for part in parts]
    if not all(names) or {"struct", "class", "union", "enum"} & texts:
        return [], []
    assert names[0] is not None
    if _is_constant(statement[: statement.index(names[0])]):
        return [], []
    twice = {name.text for name in names if name} & {t.text for t in statement if t not in names}
    if twice:  # `int a, *b = &a;`: the name must be there within its own statement
        return [], []
    edits, tail = [], []
    is_constant = int("__constant__" in texts)
    for j, name in enumerate(names):
        assert name is not None
        edits.append(Edit(name.start, name.end, HOME_PREFIX + name.text))
        tail.append(f" EMU_VARIABLE({number + j}, {is_constant}, {name.text})")
    edits.append(Edit(tokens[stop].end, tokens[stop].end, "".join(tail)))
    return edits, [name.text for name in names if name is not None]
