"""The report of a class: who has how many points for what, in the forms that people and platforms read."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ..exercise import Exercise, Lesson, Prediction
from ..exercises import lesson_of
from ..store import write_atomically
from . import exports, pages
from .beside import Beside
from .containment import Containment
from .course_file import Course
from .notebooks import Answers
from .results import STATUSES, Result
from .roster import Learner
from .similarity import Alike
from .submissions import File
from .tables import safe_name, table

# What XML 1.0 allows.
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass
class Handed:
    """A learner, what was handed in, and what became of it."""

    learner: Learner
    in_roster: bool
    files: list[tuple[str, File]] = field(default_factory=list)
    answers: dict[str, Answers] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)
    nbval: dict[str, Beside] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class LessonScore:
    """A learner's points in one lesson.

    Attributes
    ----------
    lesson : str
    core, core_possible : float
        Points of the exercises that are not stretch, overrides counted.
    stretch : float
    late : float
        Share of the points that lateness leaves.
    percent : float
        Of the core, stretch added where it is a bonus, lateness taken off.
    files : tuple of str
    notes : tuple of str
    time_unknown : bool
        It has a due time, and nothing says when it was handed in.
    disagreements : tuple of str
        Where nbval says otherwise than the judge.
    nbval : str
    """

    lesson: str
    core: float
    core_possible: float
    stretch: float
    late: float
    percent: float
    files: tuple[str, ...]
    notes: tuple[str, ...]
    time_unknown: bool
    disagreements: tuple[str, ...]
    nbval: str


@dataclass(frozen=True)
class Row:
    """One learner of the report."""

    learner: Learner
    in_roster: bool
    results: Mapping[str, Result]
    scores: Mapping[str, LessonScore]
    overrides: Mapping[str, tuple[float, str]]
    total: float
    notes: tuple[str, ...]

    def points(self, exercise: str) -> float:
        """Of an exercise, with what was decided by hand."""
        return self.overrides[exercise][0] if exercise in self.overrides else self.results[exercise].points


@dataclass(frozen=True)
class MistakeCount:
    """A known mistake, and who makes it."""

    exercise: str
    name: str
    says: str
    learners: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """All of it."""

    course: Course
    lessons: tuple[Lesson, ...]
    rows: tuple[Row, ...]
    containment: Containment
    problems: tuple[str, ...]
    similar: tuple[Alike, ...]
    mistakes: tuple[MistakeCount, ...]

    @property
    def exercises(self) -> list[Exercise | Prediction]:
        return [exercise for lesson in self.lessons for exercise in lesson.exercises]


# ---------------- building


def build(
    course: Course,
    numbers: Sequence[str],
    handed: Sequence[Handed],
    where: Containment,
    problems: Sequence[str],
    similar: Sequence[Alike],
) -> Report:
    """Put the results of a class together."""
    chosen = tuple(lesson_of(number) for number in numbers)
    rows = tuple(_row(course, chosen, one) for one in handed)
    counts: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        for id, result in row.results.items():
            if result.mistake is not None:
                counts.setdefault((id, *result.mistake), []).append(row.learner.id)
    mistakes = [MistakeCount(*key, tuple(learners)) for key, learners in counts.items()]
    mistakes.sort(key=lambda one: (-len(one.learners), one.exercise, one.name))
    return Report(course, chosen, rows, where, tuple(problems), tuple(similar), tuple(mistakes))


def _row(course: Course, chosen: Sequence[Lesson], one: Handed) -> Row:
    learner = one.learner.id
    graded = {exercise.id for lesson in chosen for exercise in lesson.exercises}
    overrides = {
        id: value for (who, id), value in course.overrides.items() if who == learner and id in graded
    }
    scores = {lesson.number: _score(course, lesson, one, overrides) for lesson in chosen}
    weights = {lesson.number: course.weights.get(lesson.number, 1.0) for lesson in chosen}
    whole = sum(weights.values())
    total = sum(weights[number] * score.percent for number, score in scores.items()) / whole if whole else 0.0
    order = [exercise.id for lesson in chosen for exercise in lesson.exercises]
    results = {id: one.results[id] for id in order}
    return Row(one.learner, one.in_roster, results, scores, overrides, round(total, 2), tuple(one.notes))


def _score(
    course: Course, lesson: Lesson, one: Handed, overrides: Mapping[str, tuple[float, str]]
) -> LessonScore:
    points = {
        exercise.id: overrides[exercise.id][0]
        if exercise.id in overrides
        else one.results[exercise.id].points
        for exercise in lesson.exercises
    }
    core = sum(points[exercise.id] for exercise in lesson.exercises if not exercise.stretch)
    stretch = sum(points[exercise.id] for exercise in lesson.exercises if exercise.stretch)
    possible = sum(one.results[exercise.id].possible for exercise in lesson.exercises if not exercise.stretch)
    late = course.late_factor(one.learner.id, lesson.number)
    percent = 100 * late * (core + (stretch if course.bonus else 0)) / possible if possible else 0.0
    answers = one.answers[lesson.number]
    files = tuple(file.name for number, file in one.files if number == lesson.number)
    notes = list(answers.notes)
    due = course.due_for(one.learner.id, lesson.number)
    unknown = due is not None and bool(files) and (one.learner.id, lesson.number) not in course.times
    if late < 1:
        notes.append(_lateness(due, course.times[one.learner.id, lesson.number], late))
    notes += [f"{id}: {note}" for id in points for note in one.results[id].notes]
    beside = one.nbval.get(lesson.number)
    disagreements = _disagreements(lesson, one, beside)
    says = "not run" if beside is None else "" if beside.ran else beside.says
    return LessonScore(
        lesson.number,
        core,
        possible,
        stretch,
        late,
        round(percent, 2),
        files,
        tuple(notes),
        unknown,
        disagreements,
        says,
    )


def _lateness(due: datetime.datetime | None, time: datetime.datetime, factor: float) -> str:
    assert due is not None
    late = time - due
    hours, minutes = divmod(int(late.total_seconds() / 60), 60)
    long = f"{late.days} d {hours % 24} h" if late.days else f"{hours} h {minutes} min"
    count = f"{100 * factor:g} % of the points count" if factor else "it counts as not handed in"
    return f"late by {long}: {count}"


def _disagreements(lesson: Lesson, one: Handed, beside: Beside | None) -> tuple[str, ...]:
    if beside is None or not beside.ran:
        return ()
    found = []
    for exercise in lesson.exercises:
        result = one.results[exercise.id]
        judged = result.status in ("passed", "partial", "failed", "error", "stopped")
        if judged and exercise.id in beside.passed and beside.passed[exercise.id] != result.passed:
            nbval = "passes" if beside.passed[exercise.id] else "fails"
            why = f" ({beside.errors[exercise.id]})" if beside.errors.get(exercise.id) else ""
            found.append(f"{exercise.id}: nbval {nbval}{why}, the judge says {result.status}")
    return tuple(found)


# ---------------- writing


def write(report: Report, folder: Path) -> None:
    """Write all forms of the report."""
    write_atomically(folder / "grades.csv", grades_csv(report))
    write_atomically(folder / "report.json", json.dumps(as_dict(report), indent=1) + "\n")
    write_atomically(folder / "junit.xml", junit(report))
    write_atomically(folder / "canvas.csv", exports.canvas(report))
    write_atomically(folder / "moodle.csv", exports.moodle(report))
    write_atomically(folder / "index.html", pages.class_page(report))
    for row in report.rows:
        for lesson in report.lessons:
            path = folder / "feedback" / safe_name(row.learner.id) / f"{lesson.number}.html"
            write_atomically(path, pages.feedback_page(report, row, lesson))


def grades_csv(report: Report) -> str:
    """A row a learner, a column an exercise."""
    ids = [exercise.id for exercise in report.exercises]
    numbers = [lesson.number for lesson in report.lessons]
    head = ["learner", "name", *ids, *(f"lesson {n} percent" for n in numbers), "total percent", "remarks"]
    rows: list[list[Any]] = [head]
    for row in report.rows:
        remarks = _remarks(report, row)
        scores = [float(row.scores[number].percent) for number in numbers]
        rows.append(
            [
                row.learner.id,
                row.learner.name,
                *(float(row.points(id)) for id in ids),
                *scores,
                float(row.total),
                "; ".join(remarks),
            ]
        )
    return table(rows)


def _remarks(report: Report, row: Row) -> list[str]:
    """What the numbers of a row do not say."""
    remarks = [] if row.in_roster else ["not in the roster"]
    for lesson in report.lessons:
        statuses = {exercise.id: row.results[exercise.id].status for exercise in lesson.exercises}
        odd = {id: status for id, status in statuses.items() if status not in ("passed", "partial", "failed")}
        if len(odd) == len(statuses) and len(set(odd.values())) == 1:
            remarks.append(f"lesson {lesson.number} {next(iter(odd.values()))}")
        else:
            remarks += [f"{id} {status}" for id, status in odd.items()]
        late = [note for note in row.scores[lesson.number].notes if note.startswith("late by ")]
        remarks += [f"lesson {lesson.number} {note}" for note in late]
    remarks += [f"{id} set by hand: {reason}".rstrip(": ") for id, (_, reason) in row.overrides.items()]
    return remarks


def as_dict(report: Report) -> dict[str, Any]:
    """The report as plain data; the same for the same submissions."""
    return {
        "version": 1,
        "course": report.course.name,
        "containment": {
            "level": report.containment.level,
            "says": report.containment.says,
            "found": report.containment.found | {"uid": None},
            "why": list(report.containment.why),
        },
        "lessons": [
            {
                "number": lesson.number,
                "title": lesson.title,
                "exercises": [
                    {"id": exercise.id, "title": exercise.title, "stretch": exercise.stretch}
                    for exercise in lesson.exercises
                ],
            }
            for lesson in report.lessons
        ],
        "learners": [_row_dict(row) for row in report.rows],
        "mistakes": [
            {"exercise": one.exercise, "name": one.name, "says": one.says, "learners": list(one.learners)}
            for one in report.mistakes
        ],
        "similar": [asdict(one) for one in report.similar],
        "problems": list(report.problems),
    }


def _row_dict(row: Row) -> dict[str, Any]:
    return {
        "learner": row.learner.id,
        "name": row.learner.name,
        "in_roster": row.in_roster,
        "total": row.total,
        "results": {id: result.as_dict() for id, result in row.results.items()},
        "scores": {number: vars(score) for number, score in row.scores.items()},
        "overrides": {
            id: {"points": points, "reason": reason} for id, (points, reason) in row.overrides.items()
        },
        "notes": list(row.notes),
    }


@dataclass(frozen=True)
class Old:
    """What the report said that is there already.

    Attributes
    ----------
    results : dict of (str, str) to Result
        (learner, exercise) -> what was judged.
    overrides : dict of (str, str) to float
        (learner, exercise) -> points set by hand.
    percent : dict of (str, str) to float
        (learner, lesson) -> what it came to.
    """

    results: Mapping[tuple[str, str], Result]
    overrides: Mapping[tuple[str, str], float]
    percent: Mapping[tuple[str, str], float]

    def points(self, learner: str, exercise: str) -> float:
        """Of an exercise, with what was decided by hand."""
        key = learner, exercise
        return self.overrides[key] if key in self.overrides else self.results[key].points


def read_old(folder: Path) -> Old | None:
    """The report that is there; None where there is none.

    Raises
    ------
    ValueError
        The file is no report.
    """
    path = folder / "report.json"
    try:
        rows = {row["learner"]: row for row in json.loads(path.read_text(encoding="utf-8"))["learners"]}
        return Old(
            {
                (who, id): Result.from_dict(one)
                for who, row in rows.items()
                for id, one in row["results"].items()
            },
            {
                (who, id): float(one["points"])
                for who, row in rows.items()
                for id, one in row["overrides"].items()
            },
            {
                (who, number): float(one["percent"])
                for who, row in rows.items()
                for number, one in row["scores"].items()
            },
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no report of tinyvllm ({error!r}); move it away") from None


def changes(old: Old, report: Report) -> list[str]:
    """Whose points, or whose percent of a lesson, are not what they were; a line each."""
    found: list[str] = []
    for row in report.rows:
        who = row.learner.id
        for lesson in report.lessons:
            before = len(found)
            for exercise in lesson.exercises:
                id, key = exercise.id, (who, exercise.id)
                if key in old.results and old.points(*key) != row.points(id):
                    why = "set by hand" if id in row.overrides else row.results[id].status
                    found.append(f"{who} {id}: {old.points(*key):g} -> {row.points(id):g} ({why})")
            was, now = old.percent.get((who, lesson.number)), row.scores[lesson.number].percent
            if was is not None and was != now and len(found) == before:
                found.append(f"{who} lesson {lesson.number}: {was:g} % -> {now:g} %")
    return found


def junit(report: Report) -> str:
    """JUnit XML: a suite a learner, a case an exercise."""
    root = ElementTree.Element("testsuites", name=_xml(report.course.name))
    for row in report.rows:
        results = row.results
        failures = sum(not result.passed for result in results.values())
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=_xml(row.learner.id),
            tests=str(len(results)),
            failures=str(failures),
            errors="0",
            skipped="0",
        )
        for exercise in report.exercises:
            result = results[exercise.id]
            name = f"{exercise.id} {exercise.title}"
            case = ElementTree.SubElement(suite, "testcase", classname=_xml(row.learner.id), name=_xml(name))
            if not result.passed:
                message = f"{result.points} of {result.possible} points: {STATUSES[result.status]}"
                failure = ElementTree.SubElement(
                    case, "failure", message=_xml(message), type=_xml(result.status)
                )
                failure.text = _xml(result.says)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _xml(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)
