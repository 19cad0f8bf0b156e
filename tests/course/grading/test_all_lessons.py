"""Every exercise as a class is graded: its solution passes in containment, on inputs of a secret seed."""

from __future__ import annotations

import pytest

from tinyvllm_ref.course.exercise import Exercise
from tinyvllm_ref.course.exercises import exercise_of, lessons
from tinyvllm_ref.course.grading.grading import given_modules
from tinyvllm_ref.course.grading.judge import Task, judge_answer
from tinyvllm_ref.course.grading.limits import Limits
from tinyvllm_ref.course.grading.work import builds_on

from .handing_in import level, right

IDS = [exercise.id for lesson in lessons().values() for exercise in lesson.exercises]


@pytest.mark.slow
@pytest.mark.parametrize("id", IDS)
def test_a_solution_passes(id):
    before = tuple((other, right(other)) for other in builds_on(id))
    task = Task(right(id), 987654321, before, before, tuple(given_modules(id)))
    result = judge_answer(exercise_of(id), task, level(), Limits())
    assert result.passed, result
    assert result.points == result.possible


@pytest.mark.slow
@pytest.mark.parametrize("id", [id for id in IDS if isinstance(exercise_of(id), Exercise)])
def test_a_mistake_is_named(id):
    """The first one: diagnosis works on what came through the pipe as it does in a notebook."""
    exercise = exercise_of(id)
    mistake = exercise.mistakes[0]
    before = tuple((other, right(other)) for other in builds_on(id))
    task = Task(f"# Exercise {id}\n{mistake.answer}", 987654321, before, before, tuple(given_modules(id)))
    result = judge_answer(exercise, task, level(), Limits())
    assert not result.passed
    assert result.mistake is not None, result
    assert result.mistake[0] == mistake.name
