"""Slips of instructors and of busy machines: each is said, or made good, and none costs a learner points in silence."""

from __future__ import annotations

import csv
import errno
import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tinyvllm_ref.course.grading import cluster, grading, judge, report, runtime
from tinyvllm_ref.course.grading.beside import Beside, with_answers
from tinyvllm_ref.course.grading.course_file import read_course
from tinyvllm_ref.course.grading.grading import Options, grade, pristine_lesson
from tinyvllm_ref.course.grading.judge import Task, judge_answer
from tinyvllm_ref.course.grading.roster import Learner, Roster, read_roster
from tinyvllm_ref.course.grading.similarity import alike
from tinyvllm_ref.course.grading.submissions import collect

from .handing_in import IDS, LIMITS, graded, hand_in, level, notebook, right, row_of
from .test_hostile_answers import _FUNCTION

# ---------------- whose it is


def whose(tmp_path, names, roster=None):
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as archive:
        for name in names:
            archive.writestr(name, "{}")
    return collect(tmp_path / "in.zip", roster or Roster())


OUTER = {
    "a zip of the folder": ["class/ada/06_a.ipynb", "class/bob/06_a.ipynb"],
    "two folders": ["term/class/ada/06_a.ipynb", "term/class/bob/06_a.ipynb"],
    "files named for learners": ["class/ada_06_a.ipynb", "class/bob_06_a.ipynb"],
    "Canvas": ["class/ada_1_2_06_a.ipynb", "class/bob_3_4_06_a.ipynb"],
    "Moodle": [
        "class/ada_1_assignsubmission_file/06_a.ipynb",
        "class/bob_2_assignsubmission_file/06_a.ipynb",
    ],
    "both": ["class/ada/06_a.ipynb", "class/bob_06_a.ipynb"],
}


@pytest.mark.parametrize("name", OUTER)
def test_a_folder_around_the_class_is_no_learner(tmp_path, name):
    found = whose(tmp_path, OUTER[name])
    assert [file.learner for file in found.files] == ["ada", "bob"]
    (problem,) = found.problems
    assert "not taken for a learner" in problem


def test_the_roster_tells_a_class_of_one(tmp_path):
    found = whose(tmp_path, ["class/ada/06_a.ipynb"], Roster([Learner("ada")]))
    assert [file.learner for file in found.files] == ["ada"]


@pytest.mark.parametrize(
    "names",
    [
        ["ada/06_a.ipynb"],
        ["ada/06_a.ipynb", "ada/05_b.ipynb"],
        ["ada/06_a.ipynb", "ada/06_a (1).ipynb"],
        ["ada/lessons/06_a.ipynb", "ada/lessons/05_b.ipynb"],
        ["ada/Untitled.ipynb", "ada/lesson 6 final.ipynb"],
    ],
)
def test_one_learners_folder_is_theirs(tmp_path, names):
    found = whose(tmp_path, names)
    assert {file.learner for file in found.files} == {"ada"}
    assert found.problems == []


def test_a_folder_around_a_class_that_lies_on_the_disk(tmp_path):
    hand_in(tmp_path / "in", notebook(), "ada")
    hand_in(tmp_path / "in", notebook(), "bob")
    rows = graded(tmp_path).rows
    assert [row.learner.id for row in rows] == ["ada", "bob"]


def test_two_people_of_one_name_are_two(tmp_path):
    moodle = [f"Ada Lovelace_{k}_assignsubmission_file/06_a.ipynb" for k in (1, 2)]
    canvas = [f"lovelaceada_{k}_9_06_a.ipynb" for k in (1, 2)]
    for names, who in ((moodle, "Ada Lovelace"), (canvas, "lovelaceada")):
        found = whose(tmp_path, names)
        assert [file.learner for file in found.files] == [f"{who} (1)", f"{who} (2)"]


def test_one_person_whom_moodle_numbers_anew_in_each_assignment_is_one(tmp_path):
    names = [f"Ada Lovelace_{k}_assignsubmission_file/0{k}_a.ipynb" for k in (5, 6)]
    assert {file.learner for file in whose(tmp_path, names).files} == {"Ada Lovelace"}


def test_the_roster_is_asked_for_what_a_platform_says_and_nothing_else():
    roster = Roster(
        [
            Learner("eve", "ada", id_number="7", moodle_id="8"),
            Learner("ada", "Ada Lovelace", canvas_id="7", moodle_id="9"),
            Learner("tom", "Ada Lovelace", moodle_id="10"),
        ]
    )
    assert roster.find("x", canvas_id="7") == "ada"  # not eve, who has another number of that value
    assert roster.find("ada") == "ada"  # an id goes before a name
    assert roster.find("Ada Lovelace") is None  # two have it
    assert roster.find("Ada Lovelace", moodle_id="10") == "tom"
    assert roster.find("ada", moodle_id="8") == "ada"
    assert roster.find("Somebody Else", moodle_id="8") == "eve"
    assert roster.find("--") is None


# ---------------- settings that would have no effect


@pytest.fixture
def course(tmp_path):
    (tmp_path / "course.toml").write_text(
        "[course]\nsecret = 's'\n[lessons]\n05 = {}\n06 = { due = 2026-03-06T12:00:00Z }\n"
        "[extensions]\nadda = { 06 = 2026-03-08T12:00:00Z }\n"
    )
    (tmp_path / "roster.csv").write_text("learner,name,mail\nada,Ada,ada@example.org\nzed,Zed,\n")
    (tmp_path / "times.csv").write_text(
        "learner,lesson,time\nada,06,2026-03-08T13:30:00Z\nbbo,06,2026-03-06T12:00:00Z\n"
    )
    (tmp_path / "overrides.csv").write_text("learner,exercise,points,reason\nadda,06.1,2,shown\n")
    hand_in(tmp_path, notebook(), "ada")
    return tmp_path


def test_names_that_nobody_has_are_said(course):
    problems = " ".join(graded(course, course=course / "course.toml").problems)
    assert "[extensions]: adda: nobody of that name" in problems
    assert "times.csv: bbo: nobody" in problems
    assert "overrides.csv: adda: nobody" in problems
    assert "roster.csv: not used: mail" in problems
    assert "adda: nobody of that name" in (course / "report" / "index.html").read_text()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("times.csv", "learner,lesson,time\nada,6,2026-03-06T12:00:00Z\n", "no such lesson"),
        ("overrides.csv", "learner,exercise,points\nada,06.1,1\nada,06.1,2\n", "two rows"),
        ("roster.csv", "learner,name,email\nada,Lovelace, Ada,ada@example.org\n", "line 2 has more cells"),
        ("course.toml", "[extensions]\nada = { 6 = 2026-03-06T12:00:00Z }\n", "no such lesson"),
        ("course.toml", "[lessons]\n06 = { weight = inf }\n", "must be finite"),
    ],
)
def test_a_setting_that_could_not_count_is_refused(tmp_path, name, text, words):
    (tmp_path / "course.toml").write_text("[course]\nsecret = 's'\n")
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=words):
        read_course(tmp_path / "course.toml", tmp_path / "report")


def test_the_last_of_two_times_counts(tmp_path):
    (tmp_path / "course.toml").write_text("[course]\nsecret = 's'\n")
    times = ["2026-03-06T12:00:00Z", "2026-03-07T12:00:00Z", "2026-03-05T12:00:00Z"]
    rows = "".join(f"ada,06,{time}\n" for time in times)
    (tmp_path / "times.csv").write_text("learner,lesson,time\n" + rows)
    assert read_course(tmp_path / "course.toml", None).times["ada", "06"].day == 7


def test_columns_that_are_known_are_not_named(tmp_path):
    (tmp_path / "roster.csv").write_text("Learner,Name,Canvas ID,\nada,Ada,1,\n")
    assert read_roster(tmp_path / "roster.csv").unused == ()


@pytest.mark.parametrize("more", [{"jobs": 0}, {"scheduler": "tcp://10.0.0.1:8786"}])
def test_what_can_not_be_worked_with_is_refused_before_anything_is_done(tmp_path, more):
    with pytest.raises(ValueError, match=r"--jobs is 0|must be tls"):
        grade(Options(tmp_path, tmp_path / "report", **more))
    assert not (tmp_path / "report").exists()


def test_a_file_in_the_place_of_the_report(tmp_path):
    hand_in(tmp_path, notebook())
    (tmp_path / "report").write_text("mine")
    with pytest.raises(ValueError, match="it is a file"):
        graded(tmp_path)


# ---------------- what the report says


def test_what_is_set_by_hand_later_is_among_the_points_that_changed(course):
    graded(course, course=course / "course.toml")
    (course / "overrides.csv").write_text("learner,exercise,points,reason\nada,06.1,2,shown\n")
    said = []
    options = Options(
        course / "in", course / "report", course / "course.toml", containment=level(), limits=LIMITS
    )
    grade(options, said.append)
    assert any("ada 06.1: 0 -> 2 (set by hand)" in text for text in said)
    (course / "times.csv").write_text("learner,lesson,time\nada,06,2026-03-06T11:00:00Z\n")
    grade(options, said.append)
    assert "ada lesson 06:" in said[-2]  # no exercise changes, and its lateness does
    grade(options, said.append)
    assert said[-2] == "No points changed."


def test_remarks_say_what_is_late_and_what_is_missing(course):
    graded(course, course=course / "course.toml")
    with open(course / "report" / "grades.csv", encoding="utf-8", newline="") as file:
        remarks = {row["learner"]: row["remarks"] for row in csv.DictReader(file)}
    assert remarks["ada"].startswith(
        "lesson 05 not handed in; lesson 06 not filled in; lesson 06 late by 2 d 1 h: 70 %"
    )
    assert remarks["zed"] == "lesson 05 not handed in; lesson 06 not handed in"


def test_feedback_on_nothing_says_nothing_of_cases(course):
    graded(course, course=course / "course.toml")
    page = (course / "report" / "feedback" / "zed" / "06.html").read_text()
    assert "No notebook of this lesson was handed in" in page
    assert "Your answers ran" not in page
    assert "small 0 of" not in page
    assert "2026-03-06 12:00 UTC" in page


def test_two_files_with_the_same_answers_are_one_line(tmp_path):
    hand_in(tmp_path, notebook({id: right(id) for id in ("06.1", "06.2")}))
    hand_in(
        tmp_path, notebook({id: right(id) for id in ("06.1", "06.2")}), name="06_tree_reduction (1).ipynb"
    )
    row = row_of(graded(tmp_path))
    assert row.results["06.1"].passed
    assert len([note for note in row.scores["06"].notes if "several cells" in note]) == 1
    assert row.scores["06"].notes[1].startswith("06.1, 06.2: several cells answer it")


def test_a_stub_of_an_older_lesson_is_not_filled_in(tmp_path):
    content = notebook()
    for cell in content["cells"]:
        if cell["metadata"].get("tinyvllm", {}).get("exercise") == "06.1" and "RawKernel" in "".join(
            cell["source"]
        ):
            cell["source"] = "".join(cell["source"]).replace("cell[t] = 0.0f", "cell[t] = 1.0f")
            cell["metadata"]["tinyvllm"]["sha256"] = hashlib.sha256(cell["source"].encode()).hexdigest()[:16]
    hand_in(tmp_path, content)
    assert row_of(graded(tmp_path)).results["06.1"].status == "not filled in"


def test_copies_of_one_answer_are_one_line():
    lines = [f"    value_{k} = np.sqrt({k}) + x[{k} * 3] - y" for k in range(12)]
    one, other = "\n".join(lines), "\n".join(lines[:-1])
    own = {f"learner {k:02}": f"def f(x, y):\n{one}\n    return x" for k in range(30)}
    own |= {f"other {k:02}": f"def f(x, y):\n{other}\n    return x" for k in range(20)}
    found = alike("06.1", own, ["def f(x, y):\n    return x"])
    assert [(len(line.first), len(line.second)) for line in found] == [(30, 0), (20, 0), (30, 20)]
    assert 0.6 <= found[2].share < 1.0


def test_nbval_says_why_it_fails(tmp_path):
    hand_in(tmp_path, notebook({"06.1": right("06.1")}))
    class_ = graded(tmp_path)
    lesson = class_.lessons[0]
    one = report.Handed(Learner("ada"), True, results=dict(row_of(class_).results))
    beside = Beside(True, {"06.1": False}, errors={"06.1": "Timeout of 120 seconds exceeded"})
    (text,) = report._disagreements(lesson, one, beside)
    assert text == "06.1: nbval fails (Timeout of 120 seconds exceeded), the judge says passed"


def test_nbval_runs_what_is_checked_and_not_the_story():
    lesson = pristine_lesson("06")
    roles = [
        cell["metadata"].get("tinyvllm", {}).get("role")
        for cell in json.loads(with_answers(lesson, {"06.1": right("06.1")}))["cells"]
    ]
    assert roles.count("check") + roles.count("predict") == len(IDS)
    assert not {"show", "measure", "show_engine", "progress"} & set(roles)
    assert "show_engine" in lesson


def test_an_error_of_the_start_is_said_without_its_traceback():
    said = "Traceback (most recent call last):\n  File 'a.py', line 1\n    f()\n    ^^^\n"
    said += "a.b.CompilerNotFound: none\nInstall one"
    assert runtime._error_of(said) == "a.b.CompilerNotFound: none\nInstall one"
    assert runtime._error_of("killed") == "killed"


# ---------------- stopped in the middle, a full disk, how far it is


def one_result(jobs, *rest):
    from tinyvllm_ref.course.grading import work

    yield 0, work.do(jobs[0]), ""
    raise KeyboardInterrupt


def test_what_was_judged_before_it_was_stopped_is_kept(tmp_path, monkeypatch):
    for learner in ("ada", "bob"):
        hand_in(tmp_path, notebook({"06.1": right("06.1")}), learner)
    said = []
    options = Options(tmp_path / "in", tmp_path / "report", nbval=False, containment=level(), limits=LIMITS)
    with monkeypatch.context() as patch:
        patch.setattr(cluster, "run", one_result)
        with pytest.raises(KeyboardInterrupt):
            grade(options, said.append)
    assert "is kept in" in said[-1]
    assert not (tmp_path / "report" / "report.json").exists()
    said.clear()
    grade(options, said.append)
    assert "12 answers; 1 to judge, in 1 submission." in said


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    hand_in(tmp_path, notebook())
    monkeypatch.setattr(report, "write_atomically", full)
    with pytest.raises(ValueError, match=r"report: No space left on device\. .*run the same command again"):
        graded(tmp_path)


def test_how_far_it_is_is_said_by_time(tmp_path, monkeypatch):
    for learner in ("ada", "bob", "eve"):
        hand_in(tmp_path, notebook({"06.4": right("06.4")}), learner)
    monkeypatch.setattr(grading, "_TELL_EVERY", 0.0)
    said = []
    grade(
        Options(tmp_path / "in", tmp_path / "report", nbval=False, containment=level(), limits=LIMITS),
        said.append,
    )
    lines = [text for text in said if " of 3" in text]
    assert [line.split(",")[0].strip() for line in lines] == ["1 of 3", "2 of 3", "3 of 3"]
    assert "min left" in lines[0]
    assert "min left" not in lines[2]


# ---------------- a machine that is busy

_SHORT = replace(_FUNCTION, seconds=0.3)


def short(body):
    return judge_answer(_SHORT, Task(f"# Exercise 99.1 - a running sum\n{body}", 7), level(), LIMITS)


def test_time_in_which_the_process_did_not_run_is_not_the_answers():
    """It waits, as for a compiler that gets no processor, longer than its time and not as long as the second try."""
    result = short("import time\ndef running(x):\n    time.sleep(1.7)\n    return np.cumsum(x)")
    assert (result.status, result.points) == ("passed", 2), result


def test_a_loop_that_was_given_more_time_says_so(monkeypatch):
    monkeypatch.setattr(judge.Process, "cpu_seconds", lambda self: 0.0)
    result = short("def running(x):\n    while True: pass")
    assert (result.points, result.kind) == (0, "PythonTimeout")
    assert result.notes == ()  # nothing of it is for the learner
    assert result.remarks == ("judged on a busy machine; regrade with --exercise 99.1 if in doubt",)


def test_a_loop_that_had_its_time_is_not_tried_again(monkeypatch):
    used = iter(range(0, 1000, 10))
    monkeypatch.setattr(judge.Process, "cpu_seconds", lambda self: float(next(used)))
    result = short("def running(x):\n    while True: pass")
    assert (result.points, result.kind, result.notes, result.remarks) == (0, "PythonTimeout", (), ())
