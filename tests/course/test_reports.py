"""Reports, hints and tables: everything is said in both forms, and nothing of the learner's text is markup."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tinyvllm_ref.course.exercise import Exercise
from tinyvllm_ref.course.exercises import lessons
from tinyvllm_ref.course.lessons import heading_of, lesson_file
from tinyvllm_ref.course.next_steps import after_exercise
from tinyvllm_ref.course.reports import (
    EngineReport,
    HintCard,
    Link,
    PassCard,
    Report,
    Table,
    WrongStory,
    markdown,
)

EVIL = "<script>alert('x')</script> & \"quoted\" {{ 7 * 7 }} {% raw %}"


def report(**changes: Any) -> Report:
    values: dict[str, Any] = {
        "exercise": "06.2",
        "title": "Sum a block with a tree",
        "headline": "3 of 1,000 elements differ.",
        "kind": "wrong values",
        "case": {"n": "1000", "x": "float32 of shape (1000,)"},
        "counts": ("3 of 1,000 elements differ", "2 NaN"),
        "rows": (((0, 997), "0.4213", "nan"), (998, "-1.0", "0.0")),
        "source": ((4, "    int t = 0;", False), (5, "\tscratch[t] += scratch[t + s];", True)),
        "mistake": ("a barrier is missing", "Every round needs `__syncthreads()`."),
        "next_step": 'hint("06.2")',
        "groups": (("small cases", 2, 2, True), ("awkward sizes", 0, 2, False), ("clean", 0, 1, None)),
        "notes": ("A note.",),
        "fault_note": "thread 3 wrote it",
    }
    return Report(**(values | changes))


class Reader(HTMLParser):
    """The text of a document, its tags, and whether they close."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.tags, self.open = "", [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.text += " "
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.text += " "

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def card() -> EngineReport:
    return EngineReport(
        "06", "Tree reduction", ("BLOCK_SUM_CUDA",), 20, (("BLOCK_SUM_CUDA", 1232),), ("other",), "Once",
        "Once a cat", "Once a dog", 2, 3, 0.25,
        (WrongStory("dropped", "The sum is small.", "Once the", 1, 0.5),
         WrongStory("race", "No barrier.", "", 0, float("nan"), "DataRace: scratch[3]")), "A note.",
    )  # fmt: skip


def passed(**changes: Any) -> PassCard:
    values: dict[str, Any] = {
        "exercise": "06.2",
        "title": "halves",
        "points": "3 of 3 points",
        "kept": ("my_engine/sum.cu", "my_engine/answers/06_2.py"),
        "following": (
            Link("06.3, any length", "#cell-id=06-3"),
            Link("lesson 07, RMSNorm", "07_rms_norm.ipynb"),
        ),
    }
    return PassCard(**(values | changes))


@pytest.mark.parametrize(
    "thing",
    [report(), HintCard("06.2", 2, "Read **this** `code`.\n\n- one\n- two\n\n```\nx = 1\n```", note="a note"), card(),
     HintCard("06.2", 0, "if (a < b) c();", True), passed(), Table("T", ("", "a"), (("rows", "1,024"),), ("note",))],
)  # fmt: skip
def test_html_closes_and_says_what_the_text_says(thing: Any) -> None:
    page = Reader(thing._repr_html_())
    assert not page.open
    # Words are compared: layout and the bars of the text form differ.
    words = set(re.findall(r"\w+", page.text))
    missing = [word for word in re.findall(r"\w+", str(thing)) if word not in words]
    assert not [word for word in missing if word not in ("Engine", "lesson", "With", "the", "mistake")]


def test_nothing_of_the_learner_is_markup() -> None:
    evil = report(
        title=EVIL, headline=EVIL, kind=EVIL, case={EVIL: EVIL}, counts=(EVIL,), rows=((EVIL, EVIL, EVIL),),
        source=((1, EVIL, True),), mistake=(EVIL, EVIL), next_step=EVIL, groups=((EVIL, 0, 1, None),), notes=(EVIL,),
        fault_note=EVIL,
    )  # fmt: skip
    evil_pass = passed(title=EVIL, points=EVIL, kept=(EVIL,), following=(Link(EVIL, "javascript:" + EVIL),))
    for thing in (evil, evil_pass, HintCard("06.2", 1, EVIL, note=EVIL), HintCard("06.2", 3, EVIL, True),
                  Table(EVIL, (EVIL,), ((EVIL,),), (EVIL,))):  # fmt: skip
        html = thing._repr_html_()
        assert "<script" not in html
        assert EVIL in Reader(html).text


def test_text_has_no_ansi_and_fits_100_columns() -> None:
    long = "word " * 60
    text = report(headline=long, case={"x": long}, counts=(long,), mistake=("m", long), notes=(long,),
                  source=((12345, "x" * 300, True),), rows=(("0", "1" * 200, "2"),)).render_text()  # fmt: skip
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_the_fault_is_marked_by_more_than_colour() -> None:
    assert "->" in next(line for line in str(report()).splitlines() if "scratch[t + s]" in line)
    text = Reader(report()._repr_html_()).text
    assert text.index("→") < text.index("scratch[t + s]")
    assert "thread 3 wrote it" in text


def test_a_pass_says_so_without_its_colour_and_where_to_go_on() -> None:
    html = passed()._repr_html_()
    said = " ".join(Reader(html).text.split())
    assert "✓ 06.2 passed: halves" in said
    assert "Kept in my_engine/sum.cu and my_engine/answers/06_2.py" in said
    assert 'solution("06.2") shows one to compare. Next: 06.3, any length , or lesson 07, RMSNorm .' in said
    assert re.findall(r'href="([^"]*)"', html) == ["#cell-id=06-3", "07_rms_norm.ipynb"]
    assert "Kept" not in passed(kept=())._repr_html_()
    assert "Next" not in passed(following=())._repr_html_()
    assert str(passed()) == "06.2 passed: halves (3 of 3 points)"


EXERCISES = [one for lesson in lessons().values() for one in lesson.exercises if isinstance(one, Exercise)]


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.id)
def test_what_comes_next_is_there(exercise: Exercise) -> None:
    """The notebooks are asked: the cell of the heading, the file of the next lesson."""
    cells = {cell["id"]: "".join(cell["source"]) for cell in notebook_of(exercise.lesson)["cells"]}
    links = after_exercise(exercise)
    assert links or exercise.id == last_of_all()
    for link in links:
        if link.href.startswith("#cell-id="):
            heading = re.compile(rf"^#+ {re.escape(link.text.partition(',')[0])}\b", re.MULTILINE)
            assert heading.search(cells[link.href.removeprefix("#cell-id=")])
        else:
            assert link.href == lesson_file(f"{int(exercise.lesson) + 1:02d}").name
            assert (lesson_file(exercise.lesson).parent / link.href).is_file()


def test_a_heading_is_found_without_the_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A class's copy has the lessons alone."""
    there = [heading_of(exercise.id) for exercise in EXERCISES]
    monkeypatch.setattr("tinyvllm_ref.course.lessons.solution_file", lambda number: tmp_path / "none.py")
    assert [heading_of(exercise.id) for exercise in EXERCISES] == there
    assert None not in there


@pytest.mark.parametrize("lesson", list(lessons().values())[:-1], ids=lambda lesson: lesson.number)
def test_a_lesson_ends_with_the_way_to_the_next(lesson: Any) -> None:
    text = "".join(notebook_of(lesson.number)["cells"][-1]["source"])
    after = lessons()[f"{int(lesson.number) + 1:02d}"]
    link = f"**Next:** [lesson {after.number}, {after.title}]({lesson_file(after.number).name})"
    assert text.rstrip().splitlines()[-1].startswith(link)


def notebook_of(number: str) -> Any:
    return json.loads(lesson_file(number).read_text(encoding="utf-8"))


def last_of_all() -> str:
    return EXERCISES[-1].id


def test_a_report_of_nothing_but_a_headline() -> None:
    plain = Report("06.1", "Race", "Not filled in yet.", "not filled in")
    assert str(plain) == "06.1 Race: not filled in\nNot filled in yet."
    assert "Smallest failing case" not in plain._repr_html_()
    assert "tv-todo" in plain._repr_html_()


def test_markdown() -> None:
    html = markdown("One `a < b`\nline.\n\n- x\n- **y**\n\n```c\nif (a < b)\n```")
    assert html == (
        "<p>One <code>a &lt; b</code> line.</p>\n<ul><li>x</li><li><b>y</b></li></ul>\n"
        '<pre class="tv-code"><span>if (a &lt; b)</span></pre>'
    )


def test_a_table_sets_numbers_to_the_right_and_refuses_ragged_rows() -> None:
    text = str(Table("Bytes", ("", "read"), (("naive", "16,384"), ("tree", "64"))))
    assert text.splitlines() == ["Bytes", "           read", "  naive  16,384", "  tree       64"]
    with pytest.raises(ValueError, match="2 cells under 1"):
        Table("t", ("a",), (("1", "2"),))


def test_the_engine_card_marks_where_a_story_leaves_the_reference() -> None:
    html = card()._repr_html_()
    assert '<span class="tv-off">cat</span>' in html
    assert "The engine stops: DataRace" in html
    assert "token 3 differs" in html
    same = EngineReport("06", "T", ("a",), 20, (), (), "Once", "Once a", "Once a", 3, 3, 0.0)
    assert "equal to the bit" in str(same)
    assert "The reference wrote" not in str(same)
    nobody = EngineReport("06", "T", (), 20, (), ("a",), "Once", "Once a", "Once a", 3, 3, 0.0)
    assert "joins when its check passes" in str(nobody)


def test_of_two_sides_each_stands_under_its_own_line() -> None:
    sides = report(
        source=((4, "s[t] = 1;", True), (5, "", False), (6, "y = s[0];", True)),
        fault_note="read by block 0, thread 1, line 6; written by block 0, thread 0, line 4",
    )
    assert sides.says_of(4) == "written by block 0, thread 0"
    assert sides.says_of(6) == "read by block 0, thread 1"
    lines = [line.strip() for line in sides.render_text().splitlines()]
    assert lines[lines.index("-> 4 | s[t] = 1;") + 1] == "written by block 0, thread 0"
    assert Reader(sides.render_html()).text.count("read by block 0, thread 1") == 1


def test_two_sides_of_one_line_and_a_remark_without_a_line() -> None:
    one = report(source=((4, "x[i] = x[j];", True),), fault_note="read by a, line 4; written by b, line 4")
    assert one.says_of(4) == "read by a; written by b"
    assert report(fault_note="a ; may be missing; 1 more error after it").says_of(5).endswith("after it")
