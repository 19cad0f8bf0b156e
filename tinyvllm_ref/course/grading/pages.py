"""The report as pages: one for the class, and one for each learner and lesson."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from ..reports import prose
from .results import NOT_RUN, STATUSES
from .tables import safe_name

if TYPE_CHECKING:
    from ..exercise import Lesson
    from .report import Report, Row

_TEMPLATES = Path(__file__).parent / "templates"
_MOST_ALIKE = 100  # lines of answers that are alike, the most alike first


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["prose"] = prose
    environment.filters["number"] = lambda value: f"{value:g}"
    environment.filters["several"] = _several
    environment.globals["statuses"] = STATUSES
    return environment


def _several(learners: Sequence[str]) -> str:
    """The first of learners with one and the same answer, and how many more."""
    more = len(learners) - 1
    return learners[0] + (f" (and {more} with the same)" if more else "")


def _render(template: str, **values: Any) -> str:
    text = _environment().get_template(template).render(**values)
    return text.encode("utf-8", "backslashreplace").decode()


def class_page(report: Report) -> str:
    """All learners, with filters; the mistakes of the class; what to look at."""
    counts = dict.fromkeys(STATUSES, 0)
    for row in report.rows:
        for result in row.results.values():
            counts[result.status] += 1
    return _render(
        "class.html.jinja",
        report=report,
        safe_name=safe_name,
        counts={status: count for status, count in counts.items() if count},
        whole=max(1, len(report.rows)),
        percent=_percent_passed(report),
        attention=_attention(report),
        most_alike=_MOST_ALIKE,
    )


def _percent_passed(report: Report) -> dict[str, float]:
    """Exercise -> share of the class that passed it."""
    whole = max(1, len(report.rows))
    return {
        exercise.id: 100 * sum(row.results[exercise.id].passed for row in report.rows) / whole
        for exercise in report.exercises
    }


def _attention(report: Report) -> list[tuple[str, str]]:
    """(learner, what) that a person should look at."""
    found = [("", text) for text in _unknown_times(report)] + _remarks(report)
    for row in report.rows:
        who = row.learner.id
        if not row.in_roster:
            found.append((who, "is not in the roster"))
        found += [(who, note) for note in row.notes]
        found += [(who, _by_hand(row, id)) for id in row.overrides]
        for number, score in row.scores.items():
            found += [(who, f"lesson {number}: {note}") for note in score.notes]
            found += [(who, text) for text in score.disagreements]
            if score.nbval not in ("", "not run"):
                found.append((who, f"lesson {number}: nbval did not finish: {score.nbval}"))
        for id, result in row.results.items():
            if result.status in ("stopped", "not graded"):
                found.append((who, f"{id}: {result.says}"))
    return found


def _remarks(report: Report) -> list[tuple[str, str]]:
    """What grading remarks on answers, once for all whom it is true of."""
    whose: dict[str, list[str]] = {}
    for exercise in report.exercises:
        for row in report.rows:
            for text in row.results[exercise.id].remarks:
                whose.setdefault(f"{exercise.id}: {text}", []).append(row.learner.id)
    return [(_some(learners), text) for text, learners in whose.items()]


def _some(learners: Sequence[str], most: int = 5) -> str:
    """Some of them by name, and how many more there are."""
    if len(learners) <= most + 1:
        return ", ".join(learners)
    return f"{', '.join(learners[:most])} and {len(learners) - most} more"


def _by_hand(row: Row, id: str) -> str:
    """What was decided by hand, and what the judge had said."""
    (points, reason), judged = row.overrides[id], row.results[id]
    why = f": {reason}" if reason else ""
    return (
        f"{id}: set by hand to {points:g} of {judged.possible}, where the judge says {judged.points:g}{why}"
    )


def _unknown_times(report: Report) -> list[str]:
    """Lessons with a due time, and how many notebooks of theirs have no known time."""
    texts = []
    for lesson in report.lessons:
        late = [row for row in report.rows if row.scores[lesson.number].time_unknown]
        if late:
            what = "notebook" if len(late) == 1 else "notebooks"
            texts.append(
                f"lesson {lesson.number}: when {len(late)} {what} came in is not known; they count as in time"
            )
    return texts


def feedback_page(report: Report, row: Row, lesson: Lesson) -> str:
    """One learner's lesson, without anything of the hidden inputs."""
    return _render(
        "feedback.html.jinja",
        report=report,
        row=row,
        lesson=lesson,
        score=row.scores[lesson.number],
        due=report.course.due_for(row.learner.id, lesson.number),
        nothing_ran=all(row.results[exercise.id].status in NOT_RUN for exercise in lesson.exercises),
        not_run=NOT_RUN,
    )
