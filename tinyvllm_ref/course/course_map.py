"""The map of the course: lessons in their parts, what has passed, and where to go on."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from . import look, reports

PART_TITLES = (
    "Part 0: Orientation",
    "Part I: A model is a file",
    "Part II: Kernels",
    "Part III: One transformer",
    "Part IV: Generation at scale",
)
_SHAPES = {"passed": "●◆", "tried": "◐◈", "untouched": "○◇"}


class Lesson(Protocol):
    """What the map needs of a lesson; exercises are (id, title, whether it is a stretch)."""

    @property
    def number(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def part(self) -> int: ...
    @property
    def minutes(self) -> int: ...
    @property
    def exercises(self) -> Sequence[tuple[str, str, bool]]: ...


@dataclass(frozen=True)
class Dot:
    """One exercise on the map; the shape tells the state without the colour."""

    shape: str
    state: str
    title: str


class CourseMap:
    """The lessons and how far the learner has come.

    Parameters
    ----------
    lessons : sequence of Lesson
        In the order of the course.
    state : mapping of str to str
        Exercise id -> ``"passed"``, ``"tried"`` or ``"untouched"``; what is missing is untouched.

    links : mapping of str to str, optional
        Lesson number -> the address of its notebook, relative to the one that shows the map.

    Raises
    ------
    ValueError
        If a state is another word, or a lesson belongs to no part.
    """

    def __init__(
        self, lessons: Sequence[Lesson], state: Mapping[str, str], links: Mapping[str, str] | None = None
    ) -> None:
        for id, word in state.items():
            if word not in _SHAPES:
                raise ValueError(f"exercise {id}: state {word!r}; it is one of {', '.join(_SHAPES)}")
        for lesson in lessons:
            if not 0 <= lesson.part < len(PART_TITLES):
                raise ValueError(
                    f"lesson {lesson.number}: part {lesson.part}; it is from 0 to {len(PART_TITLES) - 1}"
                )
        self.lessons = list(lessons)
        self.state = dict(state)
        self.links = dict(links or {})

    def state_of(self, id: str) -> str:
        """The state of an exercise."""
        return self.state.get(id, "untouched")

    def complete(self, lesson: Lesson) -> bool:
        """Whether all exercises of a lesson but the stretch ones have passed."""
        return all(self.state_of(id) == "passed" for id, _, stretch in lesson.exercises if not stretch)

    def here(self) -> Lesson | None:
        """Where to go on: a lesson that was begun, else the one after the last complete one, else the first left."""
        left = [lesson for lesson in self.lessons if not self.complete(lesson)]
        begun = [x for x in left if any(self.state_of(id) != "untouched" for id, _, _ in x.exercises)]
        last = max((k for k, x in enumerate(self.lessons) if self.complete(x) and x.exercises), default=-1)
        after = [lesson for lesson in self.lessons[last + 1 :] if lesson in left]
        return next(iter([*begun, *after, *left]), None)

    def counts(self) -> tuple[int, int]:
        """Passed exercises and all exercises, without the stretch ones."""
        core = [id for lesson in self.lessons for id, _, stretch in lesson.exercises if not stretch]
        return sum(self.state_of(id) == "passed" for id in core), len(core)

    @property
    def percent(self) -> int:
        """Share of the core exercises that passed, rounded down."""
        passed, total = self.counts()
        return 100 * passed // total if total else 0

    @property
    def headline(self) -> str:
        """How far the learner is, in a line."""
        passed, total = self.counts()
        lessons = sum(self.complete(lesson) for lesson in self.lessons)
        exercises = f"{passed} of {total} exercises passed ({self.percent}%)"
        return f"{exercises}, {lessons} of {len(self.lessons)} lessons complete"

    @property
    def where(self) -> str:
        """Where to go on, in words."""
        lesson = self.here()
        if lesson is None:
            return "The course is complete." if self.lessons else "There are no lessons yet."
        return f"→ go on with lesson {lesson.number}."

    def dots(self, lesson: Lesson) -> list[Dot]:
        """The exercises of a lesson."""
        return [
            Dot(_SHAPES[self.state_of(id)][stretch], self.state_of(id),
                f"{id} {title}: {'not yet' if self.state_of(id) == 'untouched' else self.state_of(id)}"
                + (" (stretch)" if stretch else ""))
            for id, title, stretch in lesson.exercises
        ]  # fmt: skip

    def _count(self, lesson: Lesson) -> str:
        core = [id for id, _, stretch in lesson.exercises if not stretch]
        return f"{sum(self.state_of(id) == 'passed' for id in core)}/{len(core)}"

    def _parts(self) -> list[tuple[str, list[Lesson]]]:
        parts = [
            (heading, [lesson for lesson in self.lessons if lesson.part == k])
            for k, heading in enumerate(PART_TITLES)
        ]
        return [(heading, lessons) for heading, lessons in parts if lessons]

    def _repr_html_(self) -> str:
        here = self.here()
        parts: list[dict[str, Any]] = [
            {
                "heading": heading,
                "lessons": [
                    {
                        "number": lesson.number,
                        "title": lesson.title,
                        "minutes": lesson.minutes,
                        "here": lesson is here,
                        "href": self.links.get(lesson.number, ""),
                        "dots": self.dots(lesson),
                        "count": self._count(lesson),
                    }
                    for lesson in lessons
                ],
            }
            for heading, lessons in self._parts()
        ]
        return reports.render(
            "map.html.jinja",
            headline=self.headline,
            percent=self.percent,
            parts=parts,
            where=reports.Link(self.where, self.links.get(here.number, "") if here is not None else ""),
        )

    def __str__(self) -> str:
        here = self.here()
        done = self.percent * 40 // 100
        lines = [self.headline, f"[{'#' * done}{'.' * (40 - done)}]"]
        for heading, lessons in self._parts():
            lines += ["", heading]
            for lesson in lessons:
                mark = "->" if lesson is here else "  "
                title = textwrap.shorten(lesson.title, 36, placeholder="…")
                dots = "".join(dot.shape for dot in self.dots(lesson))
                lines.append(
                    f"{mark} {lesson.number}  {title:<36}  {dots:<10}  {self._count(lesson):>5}"
                    f"  {lesson.minutes:>4} min"
                )
        lines += [
            "",
            f"● passed  ◐ tried  ○ not yet  ◆◈◇ the same, stretch   {self.where.replace('→', '->')}",
        ]
        return "\n".join(lines)


def completion_banner(
    number: str, title: str, next_title: str, done: int, total: int, complete: Sequence[bool] = ()
) -> bytes:
    """A small picture for a lesson whose last exercise has passed.

    Parameters
    ----------
    number, title : str
        The lesson.
    next_title : str
        What comes next; "" after the last lesson.
    done, total : int
        Lessons complete, and all.
    complete : sequence of bool, optional
        Which lessons are complete, in order; then their dots are filled.

    Returns
    -------
    bytes
        A PNG at twice the size it is to be shown at.
    """
    if not 0 <= done <= total or len(complete) not in (0, total):
        raise ValueError(
            f"completion_banner: {done} of {total} lessons done, {len(complete)} states of lessons"
        )
    png: bytes = _banner(number, title, next_title, done, total, complete).png()
    return png


def _banner(number: str, title: str, next_title: str, done: int, total: int, complete: Sequence[bool]) -> Any:
    from .figures.canvas import Sheet, in_one_look

    def draw() -> Any:
        sheet = Sheet()
        sheet.box(0, 0, 0.07, 1.6, fill=look.GREEN.line)
        y = sheet.y
        sheet.text(
            sheet.left, y + 0.08, f"Lesson {number} is complete", size=9, color=look.GREEN.line, bold=True
        )
        sheet.text(sheet.left, y + 0.34, title, size=15, bold=True, width=sheet.inner)
        says = f"{done} of {total} lessons complete."
        says += " That was the last one." if done == total else f" Next: {next_title}." if next_title else ""
        sheet.text(sheet.left, y + 0.62, says, color=look.MUTED, width=sheet.inner)
        sheet.y = y + 0.95
        _draw_lessons(sheet, number, total, complete)
        return sheet.finish(f"Lesson {number}, {title}, is complete: {says}")

    return in_one_look(draw)()


def _draw_lessons(sheet: Any, number: str, total: int, complete: Sequence[bool]) -> None:
    """A dot for each lesson: filled where complete, this one large with its number."""
    from matplotlib.patches import Circle

    if not total:
        return
    step = min(0.27, sheet.inner / total)
    lit = int(number) if number.isdigit() else -1
    for k in range(total):
        x = sheet.left + (k + 0.5) * step
        filled = bool(complete) and complete[k]
        face = look.GREEN.line if k == lit else look.GREEN.fill if filled else look.PAPER
        edge = look.GREEN.line if k == lit or filled else look.RULE
        radius = min(0.13, step * 0.48) if k == lit else min(0.065, step * 0.3)
        sheet.axes.add_patch(Circle((x, sheet.y), radius, facecolor=face, edgecolor=edge, lw=1.1, zorder=2))
        if k == lit and radius > 0.1:
            text = sheet.text(x, sheet.y, number, size=7.5, ha="center", color=look.PAPER, bold=True)
            text.set_zorder(3)
    sheet.y += 0.13
