"""``examine`` shows what is wrong with a cell as it stands, and counts nothing."""

import pytest

from tinyvllm_ref.course import cells, store
from tinyvllm_ref.course.examining import examine
from tinyvllm_ref.course.lessons import solution_cell, stub_cell


@pytest.fixture(autouse=True)
def _own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("TINYVLLM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TINYVLLM_MY_ENGINE", str(tmp_path / "my_engine"))
    monkeypatch.setattr(cells, "_recorded", {})


@pytest.mark.parametrize(
    ("id", "fault"),
    [
        ("08.1", "OutOfBounds: out of bounds: x[-1] was read"),
        ("08.2", "DataRace: data race on head["),
        ("08.3", "BarrierDivergence: barrier divergence"),
        ("08.4", "UninitializedRead: uninitialized read: count["),
        ("08.5", "DataRace: data race on cell[0]"),
        ("08.6", "`offset` has wrong values"),
    ],
)
def test_a_patient_of_lesson_08_shows_its_fault(id, fault, capsys):
    cells.record(stub_cell(id))
    examine(id)
    said = capsys.readouterr()
    assert fault in said.out
    assert said.err == ""
    assert store.read() == {}


def test_a_mended_one_is_clean(capsys):
    cells.record(solution_cell("08.1"))
    examine("08.1")
    assert capsys.readouterr().out == "08.1 examined: nothing found in 5 cases\n"


def test_a_cell_that_does_not_compile_is_shown(capsys):
    cells.record(stub_cell("08.1").replace("x[i - 1]", "x[i - 1"))
    examine("08.1")
    assert "CompileException" in capsys.readouterr().out


def test_a_cell_that_never_ran(capsys):
    examine("08.1")
    assert "nothing to examine yet" in capsys.readouterr().out


def test_a_prediction_is_refused():
    with pytest.raises(TypeError, match="asks for a prediction"):
        examine("09.2")
