"""``progress``: the map of the course and what of it is done."""

from __future__ import annotations

from typing import Any

from . import notebook, store
from .course_map import CourseMap
from .exercise import Lesson
from .exercises import lesson_of, lessons
from .next_steps import address


def progress() -> None:
    """Draw the map of the course, with what has passed and where to go on."""
    notebook.display(course_map())


def course_map() -> CourseMap:
    """The map; its ``str()`` is for a terminal."""
    done = store.read()
    state = {
        exercise.id: _state(done.get(exercise.id, {}))
        for lesson in lessons().values()
        for exercise in lesson.exercises
    }
    links = {number: address(number) for number in lessons()}
    return CourseMap([_Drawn(lesson) for lesson in lessons().values()], state, links)


def lesson_complete(number: str) -> bool:
    """Whether all exercises of a lesson but the stretch ones have passed."""
    done = store.read()
    return all(
        done.get(exercise.id, {}).get("passed")
        for exercise in lesson_of(number).exercises
        if not exercise.stretch
    )


def _state(entry: dict[str, Any]) -> str:
    if entry.get("passed"):
        return "passed"
    return "tried" if entry.get("attempts") else "untouched"


class _Drawn:
    """A lesson as the map wants it."""

    def __init__(self, lesson: Lesson) -> None:
        self.number = lesson.number
        self.title = lesson.title
        self.part = lesson.part
        self.minutes = lesson.minutes
        self.exercises = [(exercise.id, exercise.title, exercise.stretch) for exercise in lesson.exercises]
