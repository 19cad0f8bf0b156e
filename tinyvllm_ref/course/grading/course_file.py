"""``course.toml`` and the tables beside it: what counts, until when, and what an instructor decided by hand."""

from __future__ import annotations

import datetime
import math
import os
import secrets
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..exercises import exercise_of, lessons
from .judge import points_of
from .roster import Roster, read_roster, read_table

_SECRET_FILE = "secret.txt"


@dataclass(frozen=True)
class LateRule:
    """What lateness costs.

    Attributes
    ----------
    grace_minutes : float
        After the due time, in which nothing is taken off.
    per_day : float
        Percent of the lesson's points taken off for every day begun.
    at_most_days : float
        After these it counts as not handed in.
    """

    grace_minutes: float = 0.0
    per_day: float = 10.0
    at_most_days: float = math.inf

    def factor(self, due: datetime.datetime, handed_in: datetime.datetime) -> float:
        """What is left of the points: 1 for in time, 0 for too late."""
        late = (handed_in - due).total_seconds() - 60 * self.grace_minutes
        if late <= 0:
            return 1.0
        days = math.ceil(late / 86400)
        return 0.0 if days > self.at_most_days else max(0.0, 1.0 - days * self.per_day / 100)


@dataclass(frozen=True)
class Course:
    """The settings of a class.

    Attributes
    ----------
    name : str
    secret : str
        Of the seeds: who has it can draw the inputs that a learner is graded with.
    weights : dict of str to float
        Lesson -> weight; empty where all that were handed in count alike.
    due : dict of str to datetime
    extensions : dict of (str, str) to datetime
        (learner, lesson) -> due time of their own.
    bonus : bool
        Whether stretch exercises add to the total.
    late : LateRule
    nbval : bool
    roster : Roster
    overrides : dict of (str, str) to (float, str)
        (learner, exercise) -> points and reason.
    times : dict of (str, str) to datetime
        (learner, lesson) -> when it was handed in.
    """

    name: str = "tinyvllm"
    secret: str = ""
    weights: Mapping[str, float] = field(default_factory=dict)
    due: Mapping[str, datetime.datetime] = field(default_factory=dict)
    extensions: Mapping[tuple[str, str], datetime.datetime] = field(default_factory=dict)
    bonus: bool = True
    late: LateRule = LateRule()
    nbval: bool = True
    roster: Roster = field(default_factory=Roster)
    overrides: Mapping[tuple[str, str], tuple[float, str]] = field(default_factory=dict)
    times: Mapping[tuple[str, str], datetime.datetime] = field(default_factory=dict)

    def due_for(self, learner: str, lesson: str) -> datetime.datetime | None:
        """When a learner's lesson is due; None where it is not said."""
        return self.extensions.get((learner, lesson), self.due.get(lesson))

    def strangers(self, known: Collection[str]) -> list[str]:
        """What is set for learners that are not there: a line for each file that names such, for a misspelt name
        would cost somebody an extension or points."""
        named = {
            "course.toml, [extensions]": {learner for learner, _ in self.extensions},
            "times.csv": {learner for learner, _ in self.times},
            "overrides.csv": {learner for learner, _ in self.overrides},
        }
        return [
            f"{where}: {', '.join(sorted(learners - set(known)))}: nobody of that name is in the roster or handed in"
            for where, learners in named.items()
            if learners - set(known)
        ]

    def is_over(self, lesson: str, now: datetime.datetime) -> bool:
        """Whether a lesson is past its due time, for everybody."""
        times = [time for (_, number), time in self.extensions.items() if number == lesson]
        times += [self.due[lesson]] if lesson in self.due else []
        return bool(times) and max(times) < now

    def late_factor(self, learner: str, lesson: str) -> float:
        """What lateness leaves of a lesson's points; 1 where no time is known."""
        due, time = self.due_for(learner, lesson), self.times.get((learner, lesson))
        return 1.0 if due is None or time is None else self.late.factor(due, time)


def read_course(path: Path | None, report: Path | None) -> Course:
    """The course's settings.

    Parameters
    ----------
    path : Path or None
        ``course.toml``; ``roster.csv``, ``overrides.csv`` and ``times.csv`` lie beside it. None: the defaults.
    report : Path or None
        Where a secret is kept if the file gives none; None where no seeds are drawn.

    Raises
    ------
    ValueError, FileNotFoundError
        A setting is unknown or not what it must be.
    """
    table: dict[str, Any] = {}
    if path is not None:
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise FileNotFoundError(f"{path} is not there") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: {error}") from None
    known = ("course", "late", "lessons", "extensions")
    _only(table, known, f"{path}")
    course, late = _table(table, "course", path), _table(table, "late", path)
    _only(course, ("name", "secret", "bonus", "nbval"), f"{path}: [course]")
    _only(late, ("grace_minutes", "per_day", "at_most_days"), f"{path}: [late]")
    weights, due = _lessons(_table(table, "lessons", path), path)
    folder = path.parent if path is not None else None
    return Course(
        name=_typed(course, "name", str, "tinyvllm", path),
        secret=_typed(course, "secret", str, "", path)
        or (_kept_secret(report) if report is not None else ""),
        weights=weights,
        due=due,
        extensions=_extensions(_table(table, "extensions", path), path),
        bonus=_typed(course, "bonus", bool, True, path),
        late=LateRule(**{name: _number(value, f"{path}: [late] {name}") for name, value in late.items()}),
        nbval=_typed(course, "nbval", bool, True, path),
        roster=read_roster(_beside(folder, "roster.csv")),
        overrides=_overrides(_beside(folder, "overrides.csv")),
        times=_times(_beside(folder, "times.csv")),
    )


def _kept_secret(report: Path) -> str:
    """The secret of a report that has no course file: made once, and readable for its owner alone."""
    path = report / _SECRET_FILE
    try:
        return path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        pass
    report.mkdir(parents=True, exist_ok=True)
    secret = secrets.token_hex(16)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secret + "\n")
    return secret


def _beside(folder: Path | None, name: str) -> Path | None:
    path = folder / name if folder is not None else None
    return path if path is not None and path.exists() else None


def _lessons(
    table: dict[str, Any], path: Path | None
) -> tuple[dict[str, float], dict[str, datetime.datetime]]:
    weights, due = dict[str, float](), dict[str, datetime.datetime]()
    for number, entry in table.items():
        where = f"{path}: [lessons.{number}]"
        _require_lesson(number, where)
        if not isinstance(entry, dict):
            raise ValueError(f"{where} must be a table, such as {{ weight = 1.0 }}")
        _only(entry, ("weight", "due"), where)
        weights[number] = _number(entry.get("weight", 1.0), f"{where} weight")
        if math.isinf(weights[number]):
            raise ValueError(f"{where} weight is {entry['weight']!r}; it must be finite")
        if "due" in entry:
            due[number] = _time(entry["due"], f"{where} due")
    return weights, due


def _extensions(table: dict[str, Any], path: Path | None) -> dict[tuple[str, str], datetime.datetime]:
    found = {}
    for learner, entry in table.items():
        if not isinstance(entry, dict):
            raise ValueError(
                f"{path}: [extensions] {learner} must be a table: {{ 06 = 2026-03-08T12:00:00Z }}"
            )
        for number, time in entry.items():
            _require_lesson(number, f"{path}: [extensions] {learner} {number}")
            found[learner, number] = _time(time, f"{path}: [extensions] {learner} {number}")
    return found


def _overrides(path: Path | None) -> dict[tuple[str, str], tuple[float, str]]:
    found: dict[tuple[str, str], tuple[float, str]] = {}
    if path is None:
        return found
    for row in read_table(path, ("learner", "exercise", "points")):
        where = f"{path}: {row['learner']} {row['exercise']}"
        try:
            possible = sum(points_of(exercise_of(row["exercise"])).values())
        except LookupError as error:
            raise ValueError(f"{where}: {error}") from None
        if (row["learner"], row["exercise"]) in found:
            raise ValueError(f"{where} stands in two rows; which of them counts?")
        points = _number(row["points"], f"{where} points")
        if points > possible:
            raise ValueError(f"{where}: {points:g} points; {row['exercise']} has {possible}")
        found[row["learner"], row["exercise"]] = (points, row.get("reason", ""))
    return found


def _times(path: Path | None) -> dict[tuple[str, str], datetime.datetime]:
    found: dict[tuple[str, str], datetime.datetime] = {}
    for row in read_table(path, ("learner", "lesson", "time")) if path is not None else ():
        key = (row["learner"], row["lesson"])
        where = f"{path}: {row['learner']} {row['lesson']}"
        _require_lesson(row["lesson"], where)
        time = _time(row["time"], where)
        found[key] = max(time, found.get(key, time))  # handed in again: the last one is what is graded
    return found


def _require_lesson(number: str, where: str) -> None:
    if number not in lessons():
        raise ValueError(f"{where}: there is no such lesson; the lessons are {', '.join(lessons())}")


def _time(value: Any, where: str) -> datetime.datetime:
    if isinstance(value, str):
        try:
            value = datetime.datetime.fromisoformat(value)
        except ValueError:
            raise ValueError(f"{where} is {value!r}; a time is written 2026-03-06T23:59:00+01:00") from None
    if not isinstance(value, datetime.datetime) or value.tzinfo is None:
        raise ValueError(f"{where} is {value}; it must be a time with its zone, 2026-03-06T23:59:00+01:00")
    return value


def _number(value: Any, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not number >= 0:
        raise ValueError(f"{where} is {value!r}; it must be a number of at least 0")
    return number


def _typed(table: dict[str, Any], name: str, kind: type, default: Any, path: Path | None) -> Any:
    value = table.get(name, default)
    if not isinstance(value, kind):
        raise ValueError(f"{path}: {name} is {value!r}; it must be a {kind.__name__}")
    return value


def _table(table: dict[str, Any], name: str, path: Path | None) -> dict[str, Any]:
    found = table.get(name, {})
    if not isinstance(found, dict):
        raise ValueError(f"{path}: {name} must be a table: [{name}]")
    return found


def _only(table: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    unknown = [name for name in table if name not in known]
    if unknown:
        raise ValueError(f"{where}: {unknown[0]!r} is not known here; known are {', '.join(known)}")
