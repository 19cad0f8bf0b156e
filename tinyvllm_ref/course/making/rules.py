"""What every lesson must hold to, so that nbval, grading and a screen reader can rely on it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..cells import exercise_of
from ..regions import Region, RegionError, find, to_stub
from .identity import parse
from .source import IGNORE_OUTPUT, SOLUTION_ONLY, Cell, Lesson, LessonError, Problem

# What they show differs from run to run, or between a card and the emulation.
DISPLAYS = ("measure", "show", "show_engine", "progress", "generate")

_HEADING = re.compile(r"# Exercise (\d\d)\.(\d+) - \S.*")
_FENCE = re.compile(r"^(```+|~~~+).*?^\1[ \t]*$|^(```+|~~~+).*\Z|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_IMAGE = re.compile(r"!\[([^\]]*)\]\s*[(\[]")
_HTML_IMAGE = re.compile(r"<img\b[^>]*>", re.IGNORECASE)
_HTML_ALT = re.compile(r"\balt\s*=\s*(\"\s*[^\"\s][^\"]*\"|'\s*[^'\s][^']*')", re.IGNORECASE)


def examine(lesson: Lesson) -> list[Problem]:
    """All that is wrong with a lesson, from the top."""
    found = []
    for cell in lesson.cells:
        rules = (_markdown,) if cell.kind == "markdown" else (_regions, _answer, _display, _not_empty)
        if cell.kind != "raw":
            found += [(cell, *problem) for rule in rules for problem in rule(cell)]
    found += _exercises(lesson)
    problems = [Problem(lesson.path, cell.line + line, cell.id, message) for cell, line, message in found]
    return sorted(problems, key=lambda problem: problem.line)


def require(lesson: Lesson) -> None:
    """Raise LessonError with all that `examine` finds."""
    problems = examine(lesson)
    if problems:
        raise LessonError(problems)


# ---------------- one cell: (line of the cell from 0, message)
Found = Iterator[tuple[int, str]]


def _regions(cell: Cell) -> Found:
    try:
        regions = find(cell.source)
    except RegionError as error:
        yield error.line, str(error)
        return
    for region in regions:
        if not cell.is_answer:
            yield (
                region.begin,
                "a region outside of an answer cell: begin the cell with `# Exercise NN.k - title`",
            )
        if _is_far(region):
            yield region.begin, f"the region says {region.stated} lines and has {region.counted}"
    if cell.is_answer and not regions:
        yield 0, "an answer cell without a region: its lesson would hold the solution"
    elif cell.is_answer:
        try:
            parse(to_stub(cell.python))
        except SyntaxError as error:
            yield (
                0,
                f"its stub is not valid Python: {error.msg}, line {error.lineno} of the stub; add a STUB line",
            )


def _is_far(region: Region) -> bool:
    return region.counted > 2 * region.stated or 2 * region.counted < region.stated or region.counted == 0


def _answer(cell: Cell) -> Found:
    for number, line in enumerate(cell.source.split("\n")):
        if exercise_of(line) is None:
            continue
        if not _HEADING.fullmatch(line.rstrip()):
            yield number, f"{line.strip()!r} must be `# Exercise 06.2 - title`"
        if not cell.is_answer or number != _first_line(cell):
            yield number, "`# Exercise` is the first line of an answer cell, and of nothing else"


def _first_line(cell: Cell) -> int:
    return next(number for number, line in enumerate(cell.source.split("\n")) if line.strip())


def _display(cell: Cell) -> Found:
    names = [name for name in DISPLAYS if name in cell.calls]
    if names and IGNORE_OUTPUT not in cell.tags:
        yield 0, f'{names[0]}() shows what differs between runs: give the cell tags=["{IGNORE_OUTPUT}"]'


def _not_empty(cell: Cell) -> Found:
    if not cell.source.strip():
        yield 0, "an empty code cell"


def _markdown(cell: Cell) -> Found:
    text = _FENCE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), cell.source)
    for pattern, has_alt in (
        (_IMAGE, lambda m: m[1].strip()),
        (_HTML_IMAGE, lambda m: _HTML_ALT.search(m[0])),
    ):
        for match in pattern.finditer(text):
            if not has_alt(match):
                yield text.count("\n", 0, match.start()), "an image without alternative text"


# ---------------- all cells
def _exercises(lesson: Lesson) -> Iterator[tuple[Cell, int, str]]:
    """Each exercise once, of this lesson, with its check below it and before the next answer."""
    code = [cell for cell in lesson.cells if cell.kind == "code"]
    answers = [cell for cell in code if cell.is_answer]
    seen: dict[str, Cell] = {}
    for cell in answers:
        exercise = str(cell.exercise)
        if not exercise.startswith(lesson.number + "."):
            yield cell, 0, f"exercise {exercise} in lesson {lesson.number}"
        if exercise in seen:
            yield cell, 0, f"exercise {exercise} is there already, in line {seen[exercise].line}"
        seen.setdefault(exercise, cell)
        if SOLUTION_ONLY in cell.tags:
            yield cell, 0, f'an answer cell can not be tagged "{SOLUTION_ONLY}": the lesson would lack it'
        if cell.role != "predict" and not _has_check(code, cell):
            yield cell, 0, f'no cell with check("{exercise}", ...) under it, before the next answer'
    for index, cell in enumerate(code):
        above = {str(other.exercise) for other in code[:index] if other.is_answer}
        if cell.role in ("check", "predict") and not cell.is_answer:
            if cell.exercise is None:
                yield (
                    cell,
                    0,
                    f'{cell.role}() must be given its exercise as a string, such as "{lesson.number}.1"',
                )
            elif cell.exercise not in above:
                yield cell, 0, f'{cell.role}("{cell.exercise}", ...) has no answer cell above it'


def _has_check(code: list[Cell], answer: Cell) -> bool:
    for cell in code[code.index(answer) + 1 :]:
        if cell.is_answer:
            return False
        if (
            cell.role in ("check", "predict")
            and cell.exercise == answer.exercise
            and SOLUTION_ONLY not in cell.tags
        ):
            return True
    return False
