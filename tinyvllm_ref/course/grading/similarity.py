"""Answers that look alike: a list for a person to look at, which never costs a point.

An answer is its tokens, names and numbers as they are, without comments and layout; CUDA C++ in strings is taken
apart as well. Runs of tokens that the stub or the solution has too are left out. What is left of two answers is
compared by the share of their runs that both have (Jaccard's index; runs as in Schleimer, Wilkerson and Aiken,
"Winnowing: Local Algorithms for Document Fingerprinting", SIGMOD 2003).
"""

from __future__ import annotations

import io
import itertools
import re
import tokenize
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

RUN = 6  # tokens
LONG = 40  # runs of its own, from which on an answer is compared
ALIKE = 0.6
_CUDA = re.compile(r"//[^\n]*|/\*.*?\*/|([A-Za-z_]\w*|\d[\w.]*|[^\s\w])", re.DOTALL)
_STRING = re.compile(r"^[A-Za-z]{0,2}('''|\"\"\"|'|\")(.*)\1$", re.DOTALL)
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Alike:
    """Answers that are alike: two groups of learners, each with one and the same answer; or one such group alone.

    Attributes
    ----------
    exercise : str
    first, second : tuple of str
        Learners; `second` is empty where all that is to be said is that `first` have the same.
    share : float
        Of the runs of tokens of either answer, those that both have.
    runs : int
        How many both have.
    """

    exercise: str
    first: tuple[str, ...]
    second: tuple[str, ...]
    share: float
    runs: int


def alike(exercise: str, answers: Mapping[str, str], common: Iterable[str]) -> list[Alike]:
    """Learners whose answers are alike, most alike first.

    Parameters
    ----------
    exercise : str
    answers : mapping of str to str
        Learner -> cell.
    common : iterable of str
        Cells that everybody may have in parts: stub and solution.
    """
    known = set().union(*map(runs_of, common))
    same: dict[frozenset[tuple[str, ...]], list[str]] = {}
    for learner in sorted(answers):
        own = frozenset(runs_of(answers[learner]) - known)
        if len(own) >= LONG:
            same.setdefault(own, []).append(learner)
    found = [
        Alike(exercise, tuple(learners), (), 1.0, len(own))
        for own, learners in same.items()
        if len(learners) > 1
    ]
    for (one, first), (other, second) in itertools.combinations(same.items(), 2):
        both = len(one & other)
        share = both / len(one | other)
        if share >= ALIKE:
            found.append(Alike(exercise, tuple(first), tuple(second), share, both))
    return sorted(found, key=lambda one: (-one.share, one.first, one.second))


def runs_of(source: str) -> set[tuple[str, ...]]:
    """All runs of :data:`RUN` tokens of a cell."""
    tokens = list(_tokens(source))
    return {tuple(tokens[k : k + RUN]) for k in range(len(tokens) - RUN + 1)}


def _tokens(source: str) -> Iterable[str]:
    try:
        found = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, SyntaxError):
        yield from _cuda(source)
        return
    for token in found:
        text = _STRING.match(token.string) if token.type == tokenize.STRING else None
        if text is not None:
            yield from _cuda(text.group(2))
        elif token.type not in _LAYOUT:
            yield token.string


def _cuda(text: str) -> Iterable[str]:
    return (found.group(1) for found in _CUDA.finditer(text) if found.group(1))
