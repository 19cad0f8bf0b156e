"""What a cell is, from its text alone: its exercise, its role, and an id that does not hang on its place."""

from __future__ import annotations

import ast
import re
import unicodedata
from collections.abc import Iterator

from ..cells import exercise_of

# Functions of the course whose call gives a cell its role; where a cell calls several, the first here counts.
ROLES = (
    "check",
    "predict",
    "solution",
    "hint",
    "measure",
    "show_engine",
    "show",
    "progress",
    "reset",
    "generate",
)

_ID_LENGTH = 48  # nbformat allows 64; a role or a number is added


# ---------------- roles
def role_of(source: str) -> tuple[str | None, str | None, frozenset[str]]:
    """(exercise, role, calls) of a code cell.

    Raises
    ------
    SyntaxError
    """
    arguments = dict[str, str | None]()
    for call in _calls_outside_definitions(parse(source)):
        name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        if name in ROLES and (isinstance(call.func, ast.Name) or name == "generate"):
            first = call.args[0] if call.args else None
            value = first.value if isinstance(first, ast.Constant) else None
            arguments.setdefault(name, value if isinstance(value, str) and _is_exercise(value) else None)
    calls = frozenset(arguments)
    answer = exercise_of(source)
    if answer and arguments.get("predict") != answer:
        return answer, "answer", calls
    role = next((name for name in ROLES if name in calls), None)
    return (answer or arguments.get(role or ""), role, calls)


def parse(python: str) -> ast.Module:
    """The syntax tree of a cell; ``await`` may stand outside of functions.

    Raises
    ------
    SyntaxError
    """
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    tree = compile(python, "<cell>", "exec", flags, dont_inherit=True)
    assert isinstance(tree, ast.Module)
    return tree


def _calls_outside_definitions(tree: ast.AST) -> Iterator[ast.Call]:
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.Call):
            yield node
        stack += reversed(list(ast.iter_child_nodes(node)))


def _is_exercise(text: str) -> bool:
    return re.fullmatch(r"\d\d\.\d+", text) is not None


# ---------------- ids
def ids_of(cells: list[tuple[str, str | None, str | None]]) -> list[str]:
    """An id for each (source, exercise, role): from the cell alone, numbered where equal."""
    names = []
    for source, exercise, role in cells:
        if exercise and (role == "answer" or exercise_of(source)):
            names.append("exercise-" + exercise.replace(".", "-"))
        elif exercise:
            names.append(f"{role}-{exercise.replace('.', '-')}")
        else:
            names.append(slug(source))
    # Names that are taken as they are come first: a numbered one must not be one of them.
    taken = set(names)
    seen: set[str] = set()
    ids = []
    for name in names:
        number, unique = 1, name
        while unique in seen or (number > 1 and unique in taken):
            number += 1
            unique = f"{name}-{number}"
        seen.add(unique)
        ids.append(unique)
    return ids


def slug(source: str) -> str:
    """``"## A tree of sums"`` -> ``"a-tree-of-sums"``; of the first line that has letters."""
    for line in source.split("\n"):
        plain = unicodedata.normalize("NFKD", line).encode("ascii", "ignore").decode().lower()
        words = re.findall(r"[a-z0-9]+", plain)
        if words:
            text = ""
            for word in words:
                if text and len(text) + 1 + len(word) > _ID_LENGTH:
                    break
                text += ("-" if text else "") + word[:_ID_LENGTH]
            return text
    return "cell"
