"""C++ as a row of tokens: what the translation looks at."""

from __future__ import annotations

import re
from dataclasses import dataclass

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


def split(tokens: list[Token], separator: str = ",") -> list[list[Token]]:
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


# ---------------- blocks
@dataclass(frozen=True)
class Block:
    """A pair of braces: its tokens, and what it is.

    Attributes
    ----------
    first, last : int
        Indices of ``{`` and ``}``.
    kind : str
        ``"namespace"`` (or extern "C"), ``"record"``, ``"function"``, ``"lambda"``, ``"switch"``, or
        ``"other"``: a loop's body, an initialiser.
    head : int
        Index of the token at which its declaration or its capture list begins.
    """

    first: int
    last: int
    kind: str
    head: int


_RECORDS = {"struct", "class", "union", "enum"}
_CONTROL = {"if", "for", "while", "switch", "catch"}
_AFTER_PARAMETERS = {"const", "noexcept", "mutable", "override", "final", "constexpr", "__device__"}


def _openings(tokens: list[Token]) -> dict[int, int]:
    """Index of each closing bracket -> index of the one that opens it."""
    stack: list[int] = []
    found = {}
    for k, token in enumerate(tokens):
        if token.text in _OPEN:
            stack.append(k)
        elif token.text in _OPEN.values() and stack:
            found[k] = stack.pop()
    return found


def _kind(
    tokens: list[Token], openings: dict[int, int], statement: int, brace: int, inside: bool
) -> tuple[str, int]:
    """Kind and head of the block whose ``{`` is at `brace`; `inside`: in a function's body."""
    words = [token.text for token in tokens[statement:brace]]
    if words[:1] == ["namespace"] or words[:2] == ["inline", "namespace"] or words == ["extern", '"C"']:
        return "namespace", statement
    k = brace - 1
    while k > statement and (tokens[k].text in _AFTER_PARAMETERS):
        k -= 1
    arrow = next((j for j in range(k, max(statement, k - 12), -1) if tokens[j].text == "->"), None)
    if arrow is not None and tokens[arrow - 1].text in {")", *_AFTER_PARAMETERS}:
        k = arrow - 1
        while tokens[k].text in _AFTER_PARAMETERS:
            k -= 1
    if tokens[k].text == "]" and k in openings:
        before = tokens[openings[k] - 1] if openings[k] else None
        is_capture = before is None or (before.kind != "word" and before.text not in {")", "]"})
        if is_capture or (before is not None and before.text == "return"):
            return "lambda", openings[k]
    if tokens[k].text == ")" and k in openings:
        before = tokens[openings[k] - 1]
        if before.text == "]" and k - 1 > statement:
            return "lambda", openings.get(openings[k] - 1, statement)
        if before.text == "switch":
            return "switch", statement
        if not inside and before.text not in _CONTROL:
            return "function", statement
    if _RECORDS & set(words) and "=" not in words and tokens[brace - 1].text != ")":
        return "record", statement
    if not inside and ":" in words and ")" in words:  # a constructor's initialisers stand between
        return "function", statement
    return "other", statement


def find_blocks(tokens: list[Token]) -> list[Block]:
    """Every pair of braces, in the order of their ``{``."""
    openings = _openings(tokens)
    closings = {first: last for last, first in openings.items()}
    blocks: list[Block] = []
    around: list[Block] = []
    statement = 0
    for k, token in enumerate(tokens):
        while around and around[-1].last < k:
            around.pop()
        if token.text == "{":
            enclosing = next(
                (b.kind for b in reversed(around) if b.kind not in {"other", "switch"}), "namespace"
            )
            kind, head = _kind(tokens, openings, statement, k, enclosing in {"function", "lambda"})
            blocks.append(Block(k, closings.get(k, len(tokens) - 1), kind, head))
            around.append(blocks[-1])
        if token.text in {";", "{", "}"}:
            statement = k + 1
    return blocks
