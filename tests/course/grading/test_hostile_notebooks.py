"""Notebooks and archives that are broken or that attack: nothing stops the run, and the report says what was found."""

from __future__ import annotations

import json
import os
import stat
import zipfile

import pytest

from tinyvllm_ref.course.grading import containment

from .handing_in import IDS, NAME, graded, hand_in, level, mistake, notebook, perfect, right, row_of, useless


def cells_of(content, role, id="06.1"):
    return [
        cell
        for cell in content["cells"]
        if cell["metadata"].get("tinyvllm", {}).get("role") == role
        and cell["metadata"]["tinyvllm"]["exercise"] == id
    ]


def only(id, text):
    """One exercise answered, so that one answer is judged."""
    return notebook({id: text})


def test_deleted_checks_cost_nothing(tmp_path):
    content = only("06.1", right("06.1"))
    content["cells"] = [
        cell for cell in content["cells"] if cell["metadata"].get("tinyvllm", {}).get("role") != "check"
    ]
    hand_in(tmp_path, content)
    assert row_of(graded(tmp_path)).results["06.1"].status == "passed"


@pytest.mark.parametrize("tags", [["raises-exception"], ["nbval-ignore-output"], ["nbval-skip"]])
def test_tags_earn_nothing(tmp_path, tags):
    content = only("06.1", mistake("06.1"))
    for cell in content["cells"]:
        cell["metadata"]["tags"] = tags
    hand_in(tmp_path, content)
    result = row_of(graded(tmp_path)).results["06.1"]
    assert result.points < 3
    assert not result.passed


def test_a_skip_comment_above_the_answer_earns_nothing_and_loses_nothing(tmp_path):
    wrong, well = (
        only("06.1", "# NBVAL_SKIP\n" + mistake("06.1")),
        only("06.1", "# NBVAL_SKIP\n" + right("06.1")),
    )
    hand_in(tmp_path, wrong, "ada")
    hand_in(tmp_path, well, "bob")
    report = graded(tmp_path)
    assert not row_of(report, "ada").results["06.1"].passed
    assert row_of(report, "bob").results["06.1"].passed
    assert "found by the cell's metadata" in row_of(report, "bob").scores["06"].notes[0]


def test_saved_success_lines_and_a_redefined_check_earn_nothing(tmp_path):
    content = only("06.1", useless("06.1", before="check = lambda *a: print('06.1 passed')"))
    for cell in cells_of(content, "check"):
        cell["source"] = "print('06.1 passed: a tree with modulo (3 of 3 points)')"
        cell["outputs"] = [
            {"output_type": "stream", "name": "stdout", "text": "06.1 passed (3 of 3 points)\n"}
        ]
        cell["execution_count"] = 1
    hand_in(tmp_path, content)
    assert row_of(graded(tmp_path)).results["06.1"].points == 0


def test_two_answers_are_none(tmp_path):
    content = only("06.1", right("06.1"))
    (answer,) = cells_of(content, "answer")
    content["cells"].append({**answer, "id": "again", "source": mistake("06.1")})
    hand_in(tmp_path, content)
    row = row_of(graded(tmp_path))
    assert (row.results["06.1"].status, row.results["06.1"].points) == ("duplicate", 0)
    assert any("2 different cells" in note for note in row.scores["06"].notes)


def test_the_same_answer_twice_counts_once(tmp_path):
    content = only("06.1", right("06.1"))
    (answer,) = cells_of(content, "answer")
    content["cells"].append({**answer, "id": "again", "source": answer["source"] + "\n# the same\n"})
    hand_in(tmp_path, content)
    assert row_of(graded(tmp_path)).results["06.1"].passed


def test_a_missing_answer_is_named(tmp_path):
    content = only("06.1", right("06.1"))
    content["cells"] = [cell for cell in content["cells"] if cell not in cells_of(content, "answer", "06.2")]
    hand_in(tmp_path, content)
    results = row_of(graded(tmp_path)).results
    assert results["06.2"].status == "missing"
    assert results["06.1"].passed


def test_order_and_metadata_do_not_matter(tmp_path):
    content = only("06.1", right("06.1"))
    content["cells"] = [
        {"cell_type": cell["cell_type"], "source": "".join(cell["source"]).splitlines(keepends=True)}
        for cell in reversed(content["cells"])
    ]
    content["metadata"] = {}
    hand_in(tmp_path, content)
    row = row_of(graded(tmp_path))
    assert row.results["06.1"].passed
    assert row.results["06.2"].status == "not filled in"


def test_metadata_of_another_exercise_are_not_believed(tmp_path):
    content = only("06.1", right("06.1"))
    for cell in cells_of(content, "answer"):
        cell["metadata"]["tinyvllm"]["exercise"] = "06.2"
    hand_in(tmp_path, content)
    row = row_of(graded(tmp_path))
    assert row.results["06.1"].passed
    assert any("metadata say 06.2" in note for note in row.scores["06"].notes)


def test_another_lessons_notebook_is_named(tmp_path):
    from tinyvllm_ref.course.grading.grading import pristine_lesson

    hand_in(tmp_path, pristine_lesson("09").encode())
    row = row_of(graded(tmp_path))
    assert row.total == 0
    assert any("holds answers to lesson 09" in note for note in row.scores["06"].notes)


BROKEN = {
    "no JSON": (b'{"cells": [', "not JSON"),
    "no notebook": (b"[1, 2]", "no list of cells"),
    "empty": (b"", "not JSON"),
    "Latin-1": ('{"cells": ["é"]}'.encode("latin-1"), "not UTF-8"),
    "nested": (b"[" * 200_000, "nested too deep"),
    "binary": (bytes(range(256)) * 4, "not"),
    "cells of all kinds": (
        json.dumps(
            {"cells": [1, None, [], {"cell_type": "code", "source": 5}, {"cell_type": "code"}]}
        ).encode(),
        "",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_can_not_be_read_costs_its_lesson_alone(tmp_path, name):
    data, words = BROKEN[name]
    hand_in(tmp_path, data, "ada")
    hand_in(tmp_path, only("06.1", right("06.1")), "bob")
    report = graded(tmp_path)
    ada = row_of(report, "ada")
    assert ada.total == 0
    assert words in " ".join(ada.scores["06"].notes)
    assert row_of(report, "bob").results["06.1"].passed


def test_a_notebook_that_is_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr("tinyvllm_ref.course.grading.submissions.MOST_BYTES", 1000)
    hand_in(tmp_path, perfect())
    row = row_of(graded(tmp_path))
    assert row.results["06.1"].status == "unreadable"
    assert "bytes" in row.scores["06"].notes[0]


def test_names_of_any_bytes(tmp_path):
    hand_in(tmp_path, only("06.1", right("06.1")), "bob")
    folder = os.fsencode(tmp_path / "in") + b"/\xff\xfe"
    os.mkdir(folder)
    with open(folder + b"/06_\xf0.ipynb", "wb") as file:
        file.write(json.dumps(notebook()).encode())
    report = graded(tmp_path)
    assert {row.learner.id for row in report.rows} == {"bob", "\\xff\\xfe"}
    assert (tmp_path / "report" / "grades.csv").read_text(encoding="utf-8").count("\n") == 3


@pytest.mark.parametrize("learner", ["x..", "=cmd()", "<b>x</b>", "a" * 200])
def test_learners_of_any_name_stay_inside_of_the_report(tmp_path, learner):
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as archive:
        archive.writestr(f"{learner}/{NAME}", json.dumps(notebook()))
    graded(tmp_path, tmp_path / "in.zip")
    found = [
        path.relative_to(tmp_path / "report" / "feedback") for path in (tmp_path / "report").rglob("06.html")
    ]
    assert len(found) == 1
    assert "<b>x</b>" not in (tmp_path / "report" / "index.html").read_text()
    assert "\n=cmd" not in (tmp_path / "report" / "grades.csv").read_text()


# ---------------- links, pipes and archives


def test_links_are_not_followed(tmp_path):
    secret = tmp_path / "secret.ipynb"
    secret.write_text(json.dumps(only("06.1", right("06.1"))))
    hand_in(tmp_path, notebook(), "bob")
    (tmp_path / "in" / "ada").mkdir()
    (tmp_path / "in" / "ada" / NAME).symlink_to(secret)
    (tmp_path / "in" / "eve").symlink_to(tmp_path / "in" / "bob", target_is_directory=True)
    report = graded(tmp_path)
    row = row_of(report)
    assert row.results["06.1"].status == "unreadable"
    assert "link" in row.scores["06"].notes[0]
    assert any("eve" in text for text in report.problems)


def test_a_pipe_is_not_waited_for(tmp_path):
    hand_in(tmp_path, notebook(), "bob")
    (tmp_path / "in" / "ada").mkdir()
    os.mkfifo(tmp_path / "in" / "ada" / NAME)
    row = row_of(graded(tmp_path))
    assert "no file" in row.scores["06"].notes[0]


def zipped(tmp_path, entries):
    with zipfile.ZipFile(tmp_path / "in.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return graded(tmp_path, tmp_path / "in.zip")


def test_a_zip_that_points_out_of_itself(tmp_path):
    text = json.dumps(notebook())
    names = ["../../evil/06_a.ipynb", "/etc/06_b.ipynb", "C:/06_c.ipynb", "a\\..\\..\\06_d.ipynb"]
    report = zipped(tmp_path, [(name, text) for name in names] + [(f"ada/{NAME}", text)])
    assert [row.learner.id for row in report.rows] == ["ada"]
    assert sum("points out of the zip" in text for text in report.problems) == 4


def test_a_link_in_a_zip(tmp_path):
    link = zipfile.ZipInfo(f"ada/{NAME}")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    report = zipped(tmp_path, [(link, "/etc/passwd"), (f"bob/{NAME}", json.dumps(notebook()))])
    assert "link" in row_of(report).scores["06"].notes[0]


def test_a_zip_bomb(tmp_path, monkeypatch):
    monkeypatch.setattr("tinyvllm_ref.course.grading.submissions.MOST_BYTES", 1 << 20)
    report = zipped(tmp_path, [(f"ada/{NAME}", b" " * (30 << 20)), (f"bob/{NAME}", json.dumps(notebook()))])
    assert "when unpacked" in row_of(report).scores["06"].notes[0]


def test_a_zip_in_the_place_of_a_notebook_and_one_that_is_none(tmp_path):
    inner = tmp_path / "inner.zip"
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr(NAME, json.dumps(only("06.1", right("06.1"))))
        archive.writestr("../06_x.ipynb", "{}")
    entries = [
        ("ada/work.zip", inner.read_bytes()),
        ("bob/06_work.zip", b"no zip"),
        (f"eve/{NAME}", json.dumps(notebook())),
    ]
    report = zipped(tmp_path, entries)
    assert row_of(report).results["06.1"].passed
    assert "not a zip" in row_of(report, "bob").scores["06"].notes[0]


# ---------------- all of it at once


@pytest.mark.slow
def test_the_examples_under_the_judge_and_nbval(tmp_path):
    """The five of data/submissions: the perfect one passes both; the hostile one passes neither."""
    from tinyvllm_ref.checkpoint.names import REPOSITORY

    report = graded(tmp_path, REPOSITORY / "data" / "submissions", nbval=True)
    points = {row.learner.id: [row.results[id].points for id in IDS] for row in report.rows}
    assert points["perfect"] == [3, 3, 4, 1, 4, 3]
    assert points["partial"] == [3, 1, 2, 1, 4, 0]
    for nobody in ("hostile", "broken", "empty"):
        assert points[nobody] == [0] * 6
    assert row_of(report, "perfect").scores["06"].disagreements == ()
    assert row_of(report, "perfect").scores["06"].nbval == ""
    assert row_of(report, "partial").scores["06"].disagreements == ()
    assert level() in containment.LEVELS
