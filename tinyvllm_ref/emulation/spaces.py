"""Which functions of a source run on the device: the one rule of CUDA C++ that plain C++ has not got.

To a host compiler every function is the same. NVRTC refuses a kernel that calls a function without
``__device__``, so the emulation does, with NVRTC's words.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from .tokens import ATTRIBUTES, Token, closing, line_starts

_RECORDS = {"struct", "class", "union", "enum"}
_NO_NAMES = ATTRIBUTES | {"decltype", "noexcept", "alignas", "if", "for", "while", "switch", "return"}


@dataclass(frozen=True)
class _Function:
    name: str
    space: str  # "__global__", "__device__" or "__host__"
    first: int  # tokens of its body
    last: int


def _space(words: list[str]) -> str:
    if "__global__" in words:
        return "__global__"
    return "__device__" if "__device__" in words else "__host__"


def _function(tokens: list[Token], statement: int, brace: int) -> _Function | None:
    """The function that a brace at namespace level opens, or None for anything else."""
    words = [token.text for token in tokens[statement:brace]]
    k = statement
    while k + 1 < brace:
        if tokens[k].text == "=":
            return None  # an initialiser
        if tokens[k + 1].text == "(":
            if tokens[k].kind == "word" and tokens[k].text not in _NO_NAMES:
                return _Function(tokens[k].text, _space(words), brace, closing(tokens, brace))
            k = closing(tokens, k + 1)
        k += 1
    return None


def _after_template(words: list[str]) -> list[str]:
    """The words of a declaration without ``template <...>`` in front."""
    if words[:1] != ["template"]:
        return words
    depth = 0
    for k, word in enumerate(words):
        depth += {"<": 1, ">": -1, ">>=": 0}.get(word, 0)
        if word == ">" and depth == 0:
            return _after_template(words[k + 1 :])
    return []


def _functions(tokens: list[Token]) -> list[_Function]:
    """The free functions that are defined in the source; constant expressions are left out."""
    found, statement, k = [], 0, 0
    while k < len(tokens):
        text = tokens[k].text
        if text == "{":
            words = [token.text for token in tokens[statement:k]]
            if "namespace" in words or words[-2:] == ["extern", '"C"']:
                statement = k + 1
            else:
                is_record = bool(_RECORDS & set(_after_template(words)[:1]))
                function = None if is_record else _function(tokens, statement, k)
                if function is not None and "constexpr" not in words:
                    found.append(function)
                k = closing(tokens, k)
                statement = k + 1
        elif text in {";", "}"}:
            statement = k + 1
        k += 1
    return found


def host_calls(source: str, tokens: list[Token]) -> list[tuple[int, int, str]]:
    """Calls of host functions from the device: (line, column, NVRTC's message), both from 1."""
    functions = _functions(tokens)
    device = {function.name for function in functions if function.space != "__host__"}
    host = {function.name for function in functions} - device
    starts = line_starts(source)
    found = []
    for function in functions:
        if function.space == "__host__":
            continue
        for k in range(function.first + 1, function.last):
            token = tokens[k]
            called = (
                token.text in host and tokens[k + 1].text == "(" and tokens[k - 1].text not in {".", "->"}
            )
            if called:
                line = bisect_right(starts, token.start)
                message = (
                    f'calling a __host__ function("{token.text}") from a {function.space} '
                    f'function("{function.name}") is not allowed: declare `{token.text}` with __device__'
                )
                found.append((line, token.start - starts[line - 1] + 1, message))
    return found
