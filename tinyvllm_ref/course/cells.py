"""The learner's cells: recorded as they run, told apart from stubs, and run again on their own.

nbval runs cells without storing history, so ``In`` is empty there; IPython's ``pre_run_cell`` event comes in any
case. A cell is an answer when it begins with a comment such as ``# Exercise 06.2 - sum a block with a tree``.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import io
import linecache
import re
import symtable
import tokenize
from collections.abc import Iterable, Mapping
from typing import Any

_MARK = re.compile(r"^#\s*Exercise\s+(\d\d\.\d+)\b", re.MULTILINE)
_COMMENT_IN_STRING = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)

_recorded: dict[str, str] = {}


def exercise_of(source: str) -> str | None:
    """The exercise whose answer this cell is; None for any other cell."""
    first = next((line for line in source.splitlines() if line.strip()), "")
    found = _MARK.match(first)
    return found.group(1) if found else None


def record(source: str) -> None:
    """Remember a cell that is about to run, if it is an answer."""
    exercise = exercise_of(source)
    if exercise is not None:
        _recorded[exercise] = source


def recorded(exercise: str) -> str | None:
    """The answer cell of an exercise, as it was last run in this process."""
    return _recorded.get(exercise)


def install() -> None:
    """Record answer cells from now on, where this runs in IPython. Safe to call again."""
    try:
        from IPython import get_ipython
    except ImportError:
        return
    shell = get_ipython()
    if shell is None or getattr(shell, "_tinyvllm_records", False):
        return
    shell._tinyvllm_records = True
    shell.events.register("pre_run_cell", lambda info: record(_as_run(shell, info.raw_cell or "")))


def _as_run(shell: Any, source: str) -> str:
    """A cell as IPython compiles it: among other things it empties lines of blanks, also within strings."""
    try:
        return str(shell.transform_cell(source))
    except Exception:  # what can not be read is no answer that runs
        return source


def fingerprint(source: str) -> str:
    """A hash of the code in a cell, the same whatever its comments and blanks are: tells a stub from an answer."""
    return hashlib.sha256("\x00".join(_code_tokens(source)).encode()).hexdigest()[:16]


def _code_tokens(source: str) -> Iterable[str]:
    """Tokens of Python code without comments and layout; strings lose the comments of C++ and all blanks."""
    skip = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.STRING:
                yield "".join(_COMMENT_IN_STRING.sub("", token.string).split())
            elif token.type not in skip:
                yield token.string
    except (tokenize.TokenError, IndentationError, SyntaxError):
        yield "".join(source.split())


def outside_names(source: str, known: Iterable[str]) -> list[str]:
    """Global names that a cell reads and neither makes nor finds among `known` and the builtins, sorted.

    Raises
    ------
    SyntaxError
    """
    table = symtable.symtable(source, "answer", "exec")
    made = {
        symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()
    }
    made |= {child.get_name() for child in table.get_children() if child.get_type() in ("function", "class")}
    read: set[str] = set()

    def visit(scope: symtable.SymbolTable) -> None:
        for symbol in scope.get_symbols():
            if symbol.is_referenced() and (symbol.is_global() or scope is table):
                read.add(symbol.get_name())
            if symbol.is_declared_global() and symbol.is_assigned():
                made.add(symbol.get_name())
        for child in scope.get_children():
            visit(child)

    visit(table)
    return sorted(read - made - set(known) - set(dir(builtins)) - {"__name__"})


def run_alone(source: str, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Run a cell by itself.

    Parameters
    ----------
    source : str
    name : str
        What tracebacks call it.
    given : mapping
        The names it may use.

    Returns
    -------
    dict
        Its namespace.
    """
    filename = f"<{name}>"
    # For tracebacks and inspect.getsource, as IPython does for its cells.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = {"__name__": "__answer__", **given}
    # Not with this module's own __future__ imports: a dataclass cannot read annotations that are texts here.
    exec(compile(ast.parse(source, filename), filename, "exec", dont_inherit=True), namespace)
    return namespace
