"""What an instructor gets: rows for all, lateness, decisions by hand, exports, re-grading, the same grades twice."""

from __future__ import annotations

import csv
import datetime
import json
from pathlib import PurePosixPath
from xml.etree import ElementTree

import pytest

from tinyvllm_ref.course.grading.course_file import LateRule, read_course
from tinyvllm_ref.course.grading.grading import Options, grade, seed_of
from tinyvllm_ref.course.grading.roster import Learner, Roster
from tinyvllm_ref.course.grading.similarity import alike
from tinyvllm_ref.course.grading.submissions import owner

from .handing_in import LIMITS, graded, hand_in, level, mistake, notebook, right, row_of

COURSE = """
[course]
name = "Engines"
secret = "of the seeds"
bonus = true

[late]
per_day = 20
grace_minutes = 10
at_most_days = 3

[lessons]
06 = { weight = 2.0, due = 2026-03-06T12:00:00Z }
09 = { weight = 1.0 }

[extensions]
bob = { 06 = 2026-03-08T12:00:00Z }
"""
ROSTER = "learner,name,email,Canvas ID,SIS User ID,SIS Login ID,Section,Moodle ID,ID number\n"
ROSTER += "ada,Ada Lovelace,ada@example.org,101,s-ada,ada1,A,9001,n1\n"
ROSTER += "bob,Bob Iverson,,102,,,,9002,\neve,Eve Noether,,,,,,,\n"


@pytest.fixture
def course(tmp_path):
    (tmp_path / "course.toml").write_text(COURSE)
    (tmp_path / "roster.csv").write_text(ROSTER)
    (tmp_path / "times.csv").write_text(
        "learner,lesson,time\nada,06,2026-03-07T13:00:00Z\nbob,06,2026-03-07T13:00:00Z\n"
    )
    hand_in(tmp_path, notebook({"06.1": right("06.1"), "06.6": right("06.6")}), "ada")
    hand_in(tmp_path, notebook({"06.1": mistake("06.1", "cells past n not set")}), "bob")
    hand_in(tmp_path, notebook(), "mallory")
    return tmp_path


def rows_of(path):
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def test_a_class(course):
    report = graded(course, course=course / "course.toml")
    ada, bob, eve = (row_of(report, name) for name in ("ada", "bob", "eve"))
    # 3 of 15 core points and 3 of stretch, 40 % off for two days begun; lesson 09 not handed in, weights 2 to 1.
    assert ada.scores["06"].late == pytest.approx(0.6)
    assert ada.scores["06"].percent == pytest.approx(100 * 0.6 * 6 / 15)
    assert ada.total == pytest.approx(24 * 2 / 3)
    assert bob.scores["06"].late == 1.0  # of an extension
    assert bob.results["06.1"].mistake[0] == "cells past n not set"
    assert {result.status for result in eve.results.values()} == {"not handed in"}
    assert not row_of(report, "mallory").in_roster
    assert [row.learner.id for row in report.rows] == ["ada", "bob", "eve", "mallory"]
    assert [(one.exercise, one.name, one.learners) for one in report.mistakes] == [
        ("06.1", "cells past n not set", ("bob",))
    ]

    grades = rows_of(course / "report" / "grades.csv")
    assert grades[0][:3] == ["learner", "name", "06.1"]
    assert [row[0] for row in grades[1:]] == ["ada", "bob", "eve", "mallory"]
    assert grades[1][2] == "3"
    canvas = rows_of(course / "report" / "canvas.csv")
    assert canvas[0][:6] == ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", "06 Tree reduction"]
    assert canvas[1][0].strip() == "Points Possible"
    assert canvas[2][:5] == ["Ada Lovelace", "101", "s-ada", "ada1", "A"]
    assert float(canvas[2][5]) == pytest.approx(24)
    moodle = rows_of(course / "report" / "moodle.csv")
    assert moodle[0][:3] == ["Name", "ID number", "Email address"]
    assert moodle[1][:3] == ["Ada Lovelace", "n1", "ada@example.org"]
    suites = ElementTree.parse(course / "report" / "junit.xml").getroot()
    assert [suite.get("name") for suite in suites] == ["ada", "bob", "eve", "mallory"]
    assert all(len(suite) == int(suite.get("tests")) for suite in suites)
    bobs = next(suite for suite in suites if suite.get("name") == "bob")
    assert int(bobs.get("failures")) == len(bobs)
    assert len(list((course / "report" / "feedback").rglob("*.html"))) == 8


def test_the_same_grades_twice_with_and_without_what_is_known(course):
    graded(course, course=course / "course.toml")
    names = ("grades.csv", "report.json", "junit.xml", "index.html", "feedback/bob/06.html")
    first = {name: (course / "report" / name).read_text() for name in names}
    graded(course, course=course / "course.toml")
    assert first == {name: (course / "report" / name).read_text() for name in names}
    graded(course, course=course / "course.toml", fresh=True)
    assert first == {name: (course / "report" / name).read_text() for name in names}


def test_one_exercise_again_and_decisions_by_hand_stay(course):
    (course / "overrides.csv").write_text(
        "learner,exercise,points,reason\nbob,06.2,2,shown in the tutorial\n"
    )
    graded(course, course=course / "course.toml")
    hand_in(course, notebook({"06.1": right("06.1"), "06.3": right("06.3")}), "bob")
    report = graded(course, course=course / "course.toml", exercise="06.1")
    bob = row_of(report, "bob")
    assert bob.results["06.1"].passed
    assert not bob.results["06.3"].passed  # not looked at again
    assert bob.points("06.2") == 2
    assert "shown in the tutorial" in (course / "report" / "index.html").read_text()


def test_what_is_set_by_hand_is_shown_with_what_the_judge_says(course):
    (course / "overrides.csv").write_text(
        "learner,exercise,points,reason\nbob,06.2,2,shown in the tutorial\nbob,07.1,1,for another lesson\n"
    )
    said = []
    options = Options(
        course / "in",
        course / "report",
        course / "course.toml",
        nbval=False,
        containment=level(),
        limits=LIMITS,
    )
    grade(options, said.append)
    page = (course / "report" / "index.html").read_text()
    what = "06.2: set by hand to 2 of 3, where the judge says 0: shown in the tutorial"
    assert f"<li><b>bob</b> {what}</li>" in page
    details = page[page.index("<h2>Learners</h2>") :]
    assert "0/3</span> <b>06.2</b>" not in details[details.index("<b>bob</b>") : details.index("<b>eve</b>")]
    assert (
        "2/3!</span> <b>06.2</b> set by hand: shown in the tutorial.<br>The judge: 0/3, not filled in"
        in details
    )
    ignored = "overrides.csv: bob 07.1: lesson 07 is not graded, so it changes nothing"
    assert f"<li>{ignored}</li>" in page
    assert any(ignored in text for text in said)
    assert "07.1" not in (course / "report" / "grades.csv").read_text()


def test_one_learner_again(course):
    graded(course, course=course / "course.toml")
    new = notebook({"06.1": right("06.1"), "06.3": right("06.3")})
    for learner in ("bob", "mallory"):
        hand_in(course, new, learner)
    report = graded(course, course=course / "course.toml", learner="bob", exercise="06.1")
    assert row_of(report, "bob").results["06.1"].passed
    assert not row_of(report, "bob").results["06.3"].passed
    report = graded(course, course=course / "course.toml", learner="bob")
    assert row_of(report, "bob").results["06.3"].passed
    assert not row_of(report, "mallory").results["06.1"].passed  # not looked at
    with pytest.raises(
        ValueError, match="--learner bib: nobody of that name is in the class; there are ada, bob"
    ):
        graded(course, course=course / "course.toml", learner="bib")


@pytest.mark.parametrize(
    ("again", "words"),
    [
        ({"learner": "ada"}, "--learner ada: .* has no report yet; grade all first"),
        ({"exercise": "06.1"}, "--exercise 06.1: .* has no report yet"),
        ({"exercise": "6.5"}, "--exercise 6.5: is 06.5 meant?"),
        ({"exercise": "06.9"}, "no exercise '06.9'"),
    ],
)
def test_what_can_not_be_graded_again(course, again, words):
    with pytest.raises((ValueError, LookupError), match=words):
        graded(course, course=course / "course.toml", **again)


def test_what_grading_remarks_is_for_the_instructor_and_said_once(course, monkeypatch):
    """Not on a learner's page; and one line for all of whom it is true."""
    graded(course, course=course / "course.toml")
    path = course / "report" / "report.json"
    old = json.loads(path.read_text())
    remark = "judged on a busy machine; regrade with --exercise 06.1 if in doubt"
    for row in old["learners"]:
        row["results"]["06.1"]["remarks"] = [remark] if row["learner"] in ("ada", "bob") else []
    path.write_text(json.dumps(old))
    graded(course, course=course / "course.toml", exercise="06.2")
    page = (course / "report" / "index.html").read_text()
    assert page.count("busy machine") == 1
    assert f"<b>ada, bob</b> 06.1: {remark}" in page
    for feedback in (course / "report" / "feedback").rglob("*.html"):
        assert "busy machine" not in feedback.read_text()


def test_a_report_of_before_there_were_remarks_is_read(course):
    graded(course, course=course / "course.toml")
    path = course / "report" / "report.json"
    old = json.loads(path.read_text())
    for row in old["learners"]:
        for result in row["results"].values():
            del result["remarks"]
    path.write_text(json.dumps(old))
    assert row_of(graded(course, course=course / "course.toml", exercise="06.2")).results["06.1"].passed


def test_a_bar_is_a_share_of_the_class_and_a_group_is_all_or_nothing(course):
    graded(course, course=course / "course.toml")
    page = (course / "report" / "index.html").read_text()
    teach = page[page.index("What to teach next") : page.index("Passed, by exercise")]
    assert "by how many of the 4 learners make them" in teach
    assert "width: 25.0%" in teach
    feedback = (course / "report" / "feedback" / "bob" / "06.html").read_text()
    assert "A group's points come when all of its cases pass." in feedback


def test_feedback_has_no_values_of_hidden_inputs(course):
    graded(course, course=course / "course.toml")
    report = json.loads((course / "report" / "report.json").read_text())
    (bob,) = [row for row in report["learners"] if row["learner"] == "bob"]
    (row, *_) = bob["results"]["06.1"]["rows"]
    page = (course / "report" / "feedback" / "bob" / "06.html").read_text()
    assert row[1] not in page
    assert "Smallest case that fails" in page
    assert "cells past n not set" in page
    assert "Ada" not in page


def test_seeds_differ_by_learner_exercise_and_secret():
    seeds = {
        seed_of(*key)
        for key in [("a", "b", "06.1"), ("a", "b", "06.2"), ("a", "c", "06.1"), ("x", "b", "06.1")]
    }
    assert len(seeds) == 4
    assert seed_of("a", "b", "06.1") == seed_of("a", "b", "06.1")


def test_late():
    due = datetime.datetime(2026, 3, 6, 12, tzinfo=datetime.UTC)
    rule = LateRule(grace_minutes=10, per_day=20, at_most_days=3)
    after = lambda **more: rule.factor(due, due + datetime.timedelta(**more))  # noqa: E731
    assert after(minutes=-5) == after(minutes=10) == 1.0
    assert after(minutes=11) == after(days=1, minutes=10) == 0.8
    assert after(days=1, minutes=11) == 0.6
    assert after(days=3, minutes=10) == pytest.approx(0.4)
    assert after(days=3, minutes=11) == 0.0
    assert LateRule(per_day=40).factor(due, due + datetime.timedelta(days=9)) == 0.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[course]\nnaem = 'x'", "'naem' is not known"),
        ("[lessons]\n77 = {}", "no such lesson"),
        ("[lessons]\n06 = { due = 2026-03-06T12:00:00 }", "with its zone"),
        ("[lessons]\n06 = { weight = -1 }", "at least 0"),
        ("[late]\nper_day = 'ten'", "at least 0"),
        ("[course", "course.toml"),
        ("[course]\nbonus = 3", "must be a bool"),
        ("[extensions]\nbob = 3", "must be a table"),
    ],
)
def test_a_course_file_that_is_not_right_says_where(tmp_path, text, words):
    (tmp_path / "course.toml").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_course(tmp_path / "course.toml", tmp_path / "report")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("roster.csv", "name\nAda\n", "no column 'learner'"),
        ("roster.csv", "learner\nada\nada\n", "one row"),
        ("overrides.csv", "learner,exercise,points\nada,06.9,1\n", "no exercise"),
        ("overrides.csv", "learner,exercise,points\nada,06.1,9\n", "06.1 has 3"),
        ("times.csv", "learner,lesson,time\nada,06,yesterday\n", "a time is written"),
    ],
)
def test_a_table_that_is_not_right_says_where(tmp_path, name, text, words):
    (tmp_path / "course.toml").write_text("[course]\nsecret = 's'\n")
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=words):
        read_course(tmp_path / "course.toml", tmp_path / "report")


CLASS = Roster(
    [Learner("ada", "Ada Lovelace", canvas_id="101", moodle_id="9001"), Learner("zoe", "Zoe de la Cruz")]
)


@pytest.mark.parametrize(
    ("path", "whose"),
    [
        ("ada/06_tree_reduction.ipynb", ("ada", "06_tree_reduction.ipynb")),
        ("ada_06_tree_reduction.ipynb", ("ada", "06_tree_reduction.ipynb")),
        ("lovelaceada_101_5550_06_tree_reduction.ipynb", ("ada", "06_tree_reduction.ipynb")),
        ("lovelaceada_LATE_101_5550_06_tree_reduction-1.ipynb", ("ada", "06_tree_reduction-1.ipynb")),
        ("Ada Lovelace_9001_assignsubmission_file/06_x.ipynb", ("ada", "06_x.ipynb")),
        ("Ada Lovelace_77_assignsubmission_file_/06_x.ipynb", ("ada", "06_x.ipynb")),
        ("Zoe de la Cruz_5_assignsubmission_file_06_x.ipynb", ("zoe", "06_x.ipynb")),
        ("unknown_person_06_x.ipynb", ("unknown_person", "06_x.ipynb")),
        ("ada_lessons.zip", ("ada", "lessons.zip")),
    ],
)
def test_whose_file_it_is(path, whose):
    assert owner(PurePosixPath(path).parts, CLASS)[:2] == whose


def test_alike():
    long = "\n".join(f"    value_{k} = np.sqrt({k}) + x[{k} * 3] - y" for k in range(12))
    stub = "# Exercise 06.1 - a\ndef f(x, y):\n    return x"
    own = {
        "ada": f"def f(x, y):\n{long}\n    return x",
        "bob": f"def f(x, y):  # mine\n{long}\n    return x  # really",
        "cyd": "def f(x, y):\n    return x",
        "eve": "def f(x, y):\n" + "\n".join(f"    t{k} = {k} * y ** {k} if x else None" for k in range(12)),
    }
    (one,) = alike("06.1", own, [stub])
    assert (one.first, one.second, one.share) == (("ada", "bob"), (), 1.0)
    assert alike("06.1", own, [own["ada"]]) == []  # it is the solution
