"""What comes after an exercise or a lesson, as links that work in a notebook of ``lessons/`` or ``solutions/``."""

from __future__ import annotations

from .exercise import Exercise, Lesson, Prediction
from .exercises import lesson_of, lessons
from .front_end import link_to_cell
from .lessons import heading_of, lesson_file
from .reports import Link


def after_exercise(exercise: Exercise) -> list[Link]:
    """The next exercise of the lesson; where only stretch ones are left, or none, also the next lesson."""
    lesson = lesson_of(exercise.id)
    ids = [other.id for other in lesson.exercises]
    left = lesson.exercises[ids.index(exercise.id) + 1 :]
    links = [_to_exercise(other) for other in left[:1]]
    if all(other.stretch for other in left):
        links += [to_lesson(later) for later in after_lesson(lesson)]
    return links


def after_lesson(lesson: Lesson) -> list[Lesson]:
    """The lesson behind this one; none behind the last."""
    return [other for other in lessons().values() if other.number > lesson.number][:1]


def to_lesson(lesson: Lesson) -> Link:
    """A link to a lesson's notebook, from another one in the same folder."""
    return Link(f"lesson {lesson.number}, {lesson.title}", address(lesson.number))


def address(number: str) -> str:
    """The file of a lesson's notebook, without its folder."""
    return lesson_file(number).name


def _to_exercise(exercise: Exercise | Prediction) -> Link:
    """A link to the cell of this notebook that has the heading of an exercise."""
    stretch = " (stretch)" if exercise.stretch else ""
    heading = heading_of(exercise.id)
    return Link(f"{exercise.id}, {exercise.title}{stretch}", link_to_cell(*heading) if heading else "")
