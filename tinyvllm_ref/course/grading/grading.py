"""From a folder of submissions to a report: what ``tinyvllm grade`` does, in order."""

from __future__ import annotations

import errno
import hashlib
import hmac
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..exercises import exercise_of, lesson_of, lessons
from ..lessons import lesson_file, solution_cell, solution_file, stub_cell, stub_fingerprint
from ..making import notebook as notebook_files
from ..making.lessons import to_lesson
from ..making.source import LessonError, read
from . import cluster, containment, runtime, work
from .beside import Beside
from .cached import Cache, exercise_text
from .course_file import Course, read_course
from .judge import points_of
from .limits import Limits
from .notebooks import Answers, Cell, Unreadable, lessons_in, read_cells, take_answers
from .report import Handed, Old, Report, build, changes, read_old, write
from .results import Result
from .similarity import Alike, alike
from .submissions import Collected, File, collect

_TELL_EVERY = 15.0  # seconds between two lines of how far it is


@dataclass(frozen=True)
class Options:
    """What to grade, and how.

    Attributes
    ----------
    submissions, report : Path
    course : Path or None
        ``course.toml``.
    jobs : int
        Submissions at a time.
    scheduler : str or None
        Address of a Dask scheduler to use instead.
    tls : mapping or None
        ``ca``, ``cert`` and ``key``: files for that.
    containment : str
        ``"auto"``, or one of :data:`~tinyvllm_ref.course.grading.containment.LEVELS`.
    nbval : bool
        Whether nbval runs beside; the course file may say no as well.
    exercise : str or None
        Grade this one again, for everybody, and take the rest from the report that is there.
    learner : str or None
        Grade this learner again, all or the one `exercise`, and take the rest from the report that is there.
    fresh : bool
        Judge everything again, whatever is known already.
    limits : Limits
    """

    submissions: Path
    report: Path
    course: Path | None = None
    jobs: int = 1
    scheduler: str | None = None
    tls: Mapping[str, str] | None = None
    containment: str = "auto"
    nbval: bool = True
    exercise: str | None = None
    learner: str | None = None
    fresh: bool = False
    limits: Limits = field(default_factory=Limits)


def grade(options: Options, say: Callable[[str], None] = print) -> Report:
    """Grade a class and write the report.

    Parameters
    ----------
    options : Options
    say : callable
        Given a line now and then.

    Returns
    -------
    Report

    Raises
    ------
    ValueError, FileNotFoundError
        The submissions or the course's settings can not be used, or answers can not be contained as asked.
    """
    begin = time.perf_counter()
    cluster.require_usable(options.jobs, options.scheduler)
    if options.report.exists() and not options.report.is_dir():
        raise ValueError(f"--report {options.report}: it is a file; name a folder")
    try:
        options.report.mkdir(parents=True, exist_ok=True, mode=0o700)
        report = _grade(options, say)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ValueError(
            f"{options.report}: {error.strerror}. What is judged is kept there, and the report may be in parts the old "
            "one; make room, and run the same command again"
        ) from None
    except KeyboardInterrupt:
        say(
            f"Stopped. What is judged is kept in {options.report}/cache; the same command goes on from there."
        )
        raise
    say(f"{options.report}/index.html ({time.perf_counter() - begin:.1f} s)")
    return report


def _grade(options: Options, say: Callable[[str], None]) -> Report:
    course = read_course(options.course, options.report)
    old = read_old(options.report)
    _require_again(options, old)
    collected = collect(options.submissions, course.roster)
    numbers = _lessons(course, collected)
    handed = _sort(collected, course, numbers)
    if options.learner is not None and options.learner not in {one.learner.id for one in handed}:
        names = ", ".join(one.learner.id for one in handed)
        raise ValueError(
            f"--learner {options.learner}: nobody of that name is in the class; there are {names}"
        )
    problems = [*collected.problems, *_doubts(course, numbers, handed)]
    secret_files = [path for path in (options.course, options.report / "secret.txt") if path is not None]
    where = containment.find(
        options.containment, options.limits, secret_files=secret_files, writable=[options.report]
    )
    say("\n".join([f"Answers run {where.says}.", *(f"  ({why})" for why in where.why)]))
    notebooks = _count(sum(len(one.files) for one in handed), "notebook")
    which = f"lesson{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
    say("\n  ".join([f"{_count(len(handed), 'learner')}, {which}, {notebooks}.", *problems]))
    grader = _Grader(options, course, where.level, say)
    grader.run(handed, old)
    similar = [one for number in numbers for one in _similar(handed, number)]
    report = build(course, numbers, handed, where, problems, similar)
    write(report, options.report)
    if old is not None:
        changed = changes(old, report)
        say("\n  ".join(["Points that changed:", *changed]) if changed else "No points changed.")
    return report


def _require_again(options: Options, old: Old | None) -> None:
    """What is to be graded again exists, and the rest of the report does."""
    if options.exercise is not None:
        meant = re.fullmatch(r"(\d)\.(\d+)", options.exercise)
        if meant:
            raise ValueError(f"--exercise {options.exercise}: is 0{options.exercise} meant?")
        exercise_of(options.exercise)
    for name, value in (("exercise", options.exercise), ("learner", options.learner)):
        if value is not None and old is None:
            raise ValueError(f"--{name} {value}: {options.report} has no report yet; grade all first")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _doubts(course: Course, numbers: Sequence[str], handed: Sequence[Handed]) -> list[str]:
    """What is set and has no effect, which is most often a name that is misspelt."""
    found = course.strangers([one.learner.id for one in handed])
    found += [
        f"overrides.csv: {learner} {id}: lesson {id[:2]} is not graded, so it changes nothing"
        for learner, id in course.overrides
        if id[:2] not in numbers
    ]
    if course.roster.unused:
        found.append(f"roster.csv: not used: {', '.join(course.roster.unused)}")
    return found


# ---------------- who handed in what


def _lessons(course: Course, collected: Collected) -> list[str]:
    """The lessons that are graded: the course's, else those that were handed in."""
    if course.weights:
        return sorted(course.weights)
    found = {number for file in collected.files if (number := _lesson_of(file)) is not None}
    numbers = sorted(found & set(lessons()))
    if not numbers:
        raise ValueError("no notebook of any lesson was found among the submissions (NN_topic.ipynb)")
    return numbers


def _lesson_of(file: File) -> str | None:
    """By its name; where that says nothing, by what is in it."""
    if file.lesson is not None:
        return file.lesson
    if file.data is None:
        return None
    try:
        counts = lessons_in(read_cells(file.data))
    except Unreadable:
        return None
    return max(counts, key=lambda number: (counts[number], number)) if counts else None


def _sort(collected: Collected, course: Course, numbers: Sequence[str]) -> list[Handed]:
    """One entry a learner: the roster's in its order, then whoever else handed in."""
    ids = [learner.id for learner in course.roster.learners]
    ids += sorted({file.learner for file in collected.files} - set(ids))
    handed = {
        id: Handed(course.roster.of(id), id in course.roster or not course.roster.learners) for id in ids
    }
    for file in collected.files:
        number = _lesson_of(file)
        if number in numbers:
            handed[file.learner].files.append((str(number), file))
        else:
            what = f"of lesson {number}, which is not graded" if number else file.problem or "of no lesson"
            handed[file.learner].notes.append(f"{file.name}: {what}")
    for one in handed.values():
        for number in numbers:
            _read(one, number)
    return list(handed.values())


def _read(one: Handed, number: str) -> None:
    """Take a learner's answers to a lesson out of the files."""
    files = [file for lesson, file in one.files if lesson == number]
    ids = [exercise.id for exercise in lesson_of(number).exercises]
    if not files:
        one.answers[number] = Answers(problems=dict.fromkeys(ids, "not handed in"))
        return
    cells: list[Cell] = []
    notes = []
    unreadable = True
    for file in files:
        try:
            if file.data is None:
                raise Unreadable(file.problem)
            found = read_cells(file.data)
        except Unreadable as error:
            notes.append(f"{file.name}: {error}")
            continue
        unreadable = False
        others = {lesson: n for lesson, n in lessons_in(found).items() if lesson != number}
        if others and number not in lessons_in(found):
            notes.append(f"{file.name}: it holds answers to lesson {', '.join(others)}, and none to {number}")
        cells += found
    answers = take_answers(cells, ids, {id: stub_fingerprint(id) for id in ids})
    if unreadable:
        answers = Answers(problems=dict.fromkeys(ids, "unreadable"))
    answers.notes[:0] = notes
    if len(files) > 1:
        answers.notes.insert(0, f"{len(files)} files: {', '.join(file.name for file in files)}")
    one.answers[number] = answers


# ---------------- judging


def seed_of(secret: str, learner: str, exercise: str) -> int:
    """The seed of the inputs that a learner's answer is judged with."""
    digest = hmac.new(
        secret.encode(), f"{learner}\0{exercise}".encode("utf-8", "surrogatepass"), hashlib.sha256
    )
    return int.from_bytes(digest.digest()[:6], "big")


class _Grader:
    """Judges what is not known yet."""

    def __init__(self, options: Options, course: Course, level: str, say: Callable[[str], None]) -> None:
        self._options, self._course, self._level, self._say = options, course, level, say
        again = options.fresh or options.exercise is not None or options.learner is not None
        self._cache = Cache(options.report / "cache", fresh=again)
        self._known = Cache(options.report / "cache")
        self._pristine: dict[str, str] = {}
        self._nbval = options.nbval and course.nbval and options.exercise is None

    def run(self, handed: Sequence[Handed], old: Old | None) -> None:
        """Fill in the results of all learners."""
        jobs, whose = [], []
        for one in handed:
            for number, answers in one.answers.items():
                job = self._prepare(one, number, answers, old)
                if job is not None:
                    jobs.append(job)
                    whose.append((one, number))
        known = sum(len(one.results) for one in handed)
        total = known + sum(len(job["answers"]) for job in jobs)
        submissions = _count(len(jobs), "submission")
        self._say(f"{_count(total, 'answer')}; {total - known} to judge, in {submissions}.")
        options = self._options
        answered = cluster.run(jobs, options.jobs, options.scheduler, options.tls)
        begin = told = time.monotonic()
        for done, (k, reply, problem) in enumerate(answered, 1):
            one, number = whose[k]
            self._take(one, number, jobs[k], reply, problem)
            now = time.monotonic()
            if problem:
                self._say(f"  {one.learner.id}, lesson {number}: {problem}")
            if now - told > _TELL_EVERY or done == len(jobs):
                told, left = now, (now - begin) / done * (len(jobs) - done) / 60
                rest = f", about {max(1, round(left))} min left" if done < len(jobs) else ""
                self._say(f"  {done} of {len(jobs)}{rest}")

    def _prepare(self, one: Handed, number: str, answers: Answers, old: Old | None) -> dict[str, Any] | None:
        """What is to be judged of one submission; None where all is known."""
        learner = one.learner.id
        wanted: dict[str, Any] = {}
        for exercise in lesson_of(number).exercises:
            id = exercise.id
            kept = None
            if old is not None and not self._is_wanted(learner, id):
                kept = old.results.get((learner, id))
            if id in answers.problems:
                one.results[id] = _problem(id, answers.problems[id])
            elif kept is not None and kept.status != "not graded":
                one.results[id] = kept
            else:
                entry = self._answer(learner, id, answers)
                known = self._cache.get(entry["key"])
                try:
                    one.results[id] = Result.from_dict(known or {})
                except (KeyError, TypeError, ValueError):
                    wanted[id] = entry
        lesson = self._beside(one, number, answers)
        if not wanted and lesson is None:
            return None
        return {
            "version": runtime.version(),
            "level": self._level,
            "limits": self._options.limits.as_dict(),
            "answers": wanted,
            "lesson": lesson,
            "all_answers": dict(answers.sources),
        }

    def _is_wanted(self, learner: str, id: str) -> bool:
        """Whether it is to be judged, where only some are to be judged again."""
        return self._options.learner in (None, learner) and self._options.exercise in (None, id)

    def _answer(self, learner: str, id: str, answers: Answers) -> dict[str, Any]:
        before = [(other, answers.sources[other]) for other in work.builds_on(id) if other in answers.sources]
        solutions = [
            (other, cell) for other in work.builds_on(id) if (cell := solution_cell(other)) is not None
        ]
        entry: dict[str, Any] = {
            "source": answers.sources[id],
            "seed": seed_of(self._course.secret, learner, id),
            "before": before,
            "solution_before": solutions,
            "modules": given_modules(id),
        }
        settings = (self._level, self._options.limits.as_dict())
        return {**entry, "key": Cache.key(id, entry, exercise_text(id), settings)}

    def _beside(self, one: Handed, number: str, answers: Answers) -> str | None:
        """The lesson to run under nbval; None where that is known or not wanted."""
        if not self._nbval or not answers.sources:
            return None
        if number not in self._pristine:
            self._pristine[number] = pristine_lesson(number)
        lesson = self._pristine[number]
        asked = self._options.learner in (None, one.learner.id)
        known = (self._cache if asked else self._known).get(self._beside_key(number, answers))
        if known is not None:
            one.nbval[number] = Beside(**known)
            return None
        return lesson

    def _beside_key(self, number: str, answers: Answers) -> str:
        return Cache.key(
            "nbval", number, self._pristine[number], dict(answers.sources), self._level, exercise_text(number)
        )

    def _take(
        self, one: Handed, number: str, job: Mapping[str, Any], reply: dict[str, Any] | None, problem: str
    ) -> None:
        if reply is None:
            for id in job["answers"]:
                one.results[id] = replace(_problem(id, "not graded"), says=problem)
            return
        for id, parts in reply["results"].items():
            one.results[id] = Result.from_dict(parts)
            self._cache.put(job["answers"][id]["key"], parts)
        if reply["nbval"] is not None:
            one.nbval[number] = Beside(**reply["nbval"])
            if one.nbval[number].ran:
                self._cache.put(self._beside_key(number, one.answers[number]), reply["nbval"])


def _problem(id: str, status: str) -> Result:
    """The result of an exercise that has nothing to judge."""
    words = {
        "missing": "there is no cell that answers it",
        "duplicate": "several different cells answer it, so none was taken",
        "not filled in": "it is still the stub",
        "not handed in": "no notebook of this lesson was handed in",
        "unreadable": "the file could not be read",
        "too long": "the cell is too long to be an answer",
        "not graded": "the grader failed; run it again",
    }
    groups = {name: (0, points) for name, points in points_of(exercise_of(id)).items()}
    says = words[status]
    return Result(id, "error" if status == "too long" else status, groups, says, says)


def given_modules(id: str) -> list[str]:
    """Modules that the lesson's own cell imports before anybody has filled it in."""
    stub = stub_cell(id)
    try:
        return sorted(set(runtime.imports_of(stub or "")))
    except SyntaxError:
        return []


def pristine_lesson(number: str) -> str:
    """The lesson's notebook as it is made from its source; where there is no source, as it lies in ``lessons/``."""
    source = solution_file(number)
    if source.exists():
        try:
            return notebook_files.to_bytes(to_lesson(read(source))).decode()
        except LessonError as error:
            raise ValueError(f"lesson {number} can not be made: {error}") from None
    return lesson_file(number).read_text(encoding="utf-8")


def _similar(handed: Sequence[Handed], number: str) -> list[Alike]:
    found: list[Alike] = []
    for exercise in lesson_of(number).exercises:
        sources = {
            one.learner.id: one.answers[number].sources[exercise.id]
            for one in handed
            if exercise.id in one.answers[number].sources
        }
        common = [cell for cell in (stub_cell(exercise.id), solution_cell(exercise.id)) if cell]
        found += alike(exercise.id, sources, common)
    return found


__all__ = ["Options", "grade", "pristine_lesson", "seed_of"]
