"""The map of the course: where to go on, and the same states in HTML and in a terminal."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import pytest

from tinyvllm_ref.course.course_map import CourseMap, completion_banner


@dataclass(frozen=True)
class Lesson:
    number: str
    part: int = 2
    title: str = "A lesson <b>"
    minutes: int = 45
    exercises: list[tuple[str, str, bool]] = field(default_factory=list)


def lessons(count: int = 4) -> list[Lesson]:
    numbers = [f"{k:02d}" for k in range(count)]
    return [
        Lesson(
            n, min(4, k), exercises=[(f"{n}.1", "a", False), (f"{n}.2", "b", False), (f"{n}.3", "c", True)]
        )
        for k, n in enumerate(numbers)
    ]


def passed(*numbers: str) -> dict[str, str]:
    return {f"{n}.{k}": "passed" for n in numbers for k in (1, 2)}


@pytest.mark.parametrize(
    ("state", "here"),
    [
        ({}, "00"),
        (passed("00"), "01"),
        (passed("00") | {"02.1": "tried"}, "02"),
        (passed("02"), "03"),
        (passed("02", "03"), "00"),
        (passed("00", "01", "02", "03"), None),
    ],
)
def test_where_to_go_on(state: dict[str, str], here: str | None) -> None:
    lesson = CourseMap(lessons(), state).here()
    assert (lesson and lesson.number) == here


def test_stretch_exercises_do_not_count() -> None:
    course = CourseMap(lessons(), passed("00") | {"01.3": "passed"})
    assert course.counts() == (2, 8)
    assert course.percent == 25
    assert "1 of 4 lessons complete" in course.headline


def test_states_differ_in_shape() -> None:
    course = CourseMap(lessons(1), {"00.1": "passed", "00.2": "tried", "00.3": "passed"})
    assert [dot.shape for dot in course.dots(course.lessons[0])] == ["●", "◐", "◆"]
    assert "●◐◆" in str(course)
    html = course._repr_html_()
    assert 'title="00.2 b: tried"' in html
    assert "A lesson &lt;b&gt;" in html
    assert "<b>" not in html.split("tv-name")[-1]


def test_the_map_leads_to_the_lessons() -> None:
    html = CourseMap(lessons(2), passed("00"), {"00": "00_a.ipynb", "01": "01_b.ipynb"})._repr_html_()
    assert html.count('<a href="00_a.ipynb">A lesson') == 1
    assert html.count('<a href="01_b.ipynb">') == 2, "its name, and where to go on"
    assert "<a " not in CourseMap(lessons(2), {})._repr_html_()


def test_text_fits_a_terminal() -> None:
    course = CourseMap([Lesson("06", title="t" * 99, exercises=[("06.1", "a", False)])], {})
    text = str(course)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "-> 06" in text


@pytest.mark.parametrize("found", [[], [Lesson("06")]])
def test_few_lessons(found: list[Lesson]) -> None:
    course = CourseMap(found, {})
    assert course._repr_html_()
    assert str(course)
    assert course.percent == 0


def test_wrong_input_is_named() -> None:
    with pytest.raises(ValueError, match="done"):
        CourseMap([], {"06.1": "done"})
    with pytest.raises(ValueError, match="part 9"):
        CourseMap([Lesson("06", part=9)], {})
    with pytest.raises(ValueError, match="26 of 25"):
        completion_banner("06", "a", "b", 26, 25)


@pytest.mark.parametrize(
    ("number", "next_title", "done", "total", "complete"),
    [("06", "RMS norm", 7, 25, [k < 7 for k in range(25)]), ("24", "", 25, 25, ()), ("00", "x" * 200, 1, 1, (True,)),
     ("99", "", 0, 0, ())],
)  # fmt: skip
def test_banner(number: str, next_title: str, done: int, total: int, complete: list[bool]) -> None:
    png = completion_banner(number, "Tree reduction", next_title, done, total, complete)
    assert png.startswith(b"\x89PNG\r\n")
    width, height = struct.unpack(">II", png[16:24])
    assert 1000 < width < 1700
    assert 150 < height < 500
