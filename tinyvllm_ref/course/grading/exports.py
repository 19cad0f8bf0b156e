"""Grades as Canvas and Moodle import them.

Canvas: the columns that its gradebook exports, "Student", "ID", "SIS User ID", "SIS Login ID", "Section", then one
for each assignment, and a row "Points Possible" (``lib/gradebook_importer.rb`` of instructure/canvas-lms: the header's
first cell must have "Student" in it, the second "ID", and "Section" must be the last before the assignments). A
student is found by ID, else by SIS ID, login or name; an assignment by ``Title (ID)``, else by its title.

Moodle: CSV with any columns, which are matched in the import's preview
(https://docs.moodle.org/en/Grade_import): "Email address" or "ID number" to the user, a lesson to its grade item.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .tables import table

if TYPE_CHECKING:
    from ..exercise import Lesson
    from .report import Report


def _title(lesson: Lesson) -> str:
    return f"{lesson.number} {lesson.title}"


def canvas(report: Report) -> str:
    """A gradebook for Canvas: percent of each lesson."""
    titles = [_title(lesson) for lesson in report.lessons]
    rows: list[list[Any]] = [
        ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", *titles],
        ["    Points Possible", "", "", "", "", *(100.0 for _ in titles)],
    ]
    for row in report.rows:
        learner = row.learner
        who = [learner.name or learner.id, learner.canvas_id, learner.sis_user_id, learner.sis_login_id]
        rows.append(
            [*who, learner.section, *(float(row.scores[lesson.number].percent) for lesson in report.lessons)]
        )
    return table(rows)


def moodle(report: Report) -> str:
    """A table for Moodle's import of grades: percent of each lesson."""
    rows: list[list[Any]] = [
        ["Name", "ID number", "Email address", *(_title(lesson) for lesson in report.lessons)]
    ]
    for row in report.rows:
        learner = row.learner
        scores = [float(row.scores[lesson.number].percent) for lesson in report.lessons]
        rows.append([learner.name or learner.id, learner.id_number, learner.email, *scores])
    return table(rows)
