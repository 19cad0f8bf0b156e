"""Cells: which are answers, when two have the same code, and which names they take from elsewhere."""

import json
import os
import re
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyvllm_ref.course import cells, store


@pytest.mark.parametrize(
    ("source", "exercise"),
    [
        ("# Exercise 06.2 - a tree\nx = 1", "06.2"),
        ("\n\n#Exercise 12.10: title\n", "12.10"),
        ("x = 1\n# Exercise 06.2 - a tree", None),
        ("# exercise 06.2", None),
        ("# Exercise six", None),
        ("", None),
    ],
)
def test_an_answer_begins_with_its_exercise(source, exercise):
    assert cells.exercise_of(source) == exercise


def test_comments_and_layout_are_not_code():
    stub = 'k = cp.RawKernel(r"""\n  // TODO (about 2 lines): add\n  int i = 0;\n""", "k")  # a comment\n'
    same = '# Exercise\nk = cp.RawKernel(r"""\n int i =  0; /* mine */\n""",\n  "k")\n'
    other = 'k = cp.RawKernel(r"""\n  int i = 1;\n""", "k")\n'
    assert cells.fingerprint(stub) == cells.fingerprint(same)
    assert cells.fingerprint(stub) != cells.fingerprint(other)


@given(st.text(max_size=200))
def test_a_fingerprint_of_anything(source):
    assert len(cells.fingerprint(source)) == 16


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("x = np.zeros(3)", []),
        ("x = PREFIX + y", ["PREFIX", "y"]),
        ("def f(a):\n    return a + helper(a)\ndef helper(b):\n    return b", []),
        ("def f(a):\n    return a + elsewhere(a)", ["elsewhere"]),
        ("import math\nx = math.pi", []),
        ("from os import path as p\nx = p", []),
        ("x = [i for i in range(3)]", []),
        ("x = [i + q for i in range(3)]", ["q"]),
        ("class A:\n    b = 1\n    def m(self):\n        return self.b + c", ["c"]),
        ("def f():\n    global g\n    g = 1\nx = g", []),
        ("x = (lambda a: a + z)(1)", ["z"]),
        ("for i in y:\n    pass", ["y"]),
        ("try:\n    pass\nexcept ValueError as e:\n    print(e)", []),
        ("with open('f') as f:\n    print(f)", []),
        ("x: int = 3", []),
    ],
)
def test_names_from_elsewhere(source, names):
    assert cells.outside_names(source, ["np", "cp"]) == names


def test_recorded_in_a_real_kernel_without_history(tmp_path):
    """nbval runs cells with store_history=False, so that In stays empty."""
    program = textwrap.dedent(
        """
        import json, sys
        from jupyter_client.manager import start_new_kernel
        manager, client = start_new_kernel(kernel_name="python3")
        def run(code):
            message = client.execute(code, store_history=False)
            client.get_shell_msg(timeout=60)
            said = []
            while True:
                got = client.get_iopub_msg(timeout=60)
                if got["parent_header"].get("msg_id") != message: continue
                if got["msg_type"] == "stream": said.append([got["content"]["name"], got["content"]["text"]])
                if got["msg_type"] == "error": said.append(["error", "\\n".join(got["content"]["traceback"])])
                if got["msg_type"] == "display_data": said.append(["html", got["content"]["data"].get("text/html", "")])
                if got["msg_type"] == "status" and got["content"]["execution_state"] == "idle": return said
        out = [run(code) for code in json.load(sys.stdin)]
        client.stop_channels(); manager.shutdown_kernel(now=True)
        print(json.dumps(out))
        """
    )
    from tinyvllm_ref.course.lessons import solution_cell, stub_cell

    codes = [
        "from tinyvllm_ref.course import check, cp, np",
        stub_cell("06.1"),
        "check('06.1', sum_modulo)",
        solution_cell("06.1"),
        "check('06.1', sum_modulo)",
        "print(6 * 7)",
        re.sub(r"\n(?= +\S)", "\n    \n", solution_cell("06.1")),  # a notebook indents by itself
        "check('06.1', sum_modulo)",
    ]
    environment = os.environ | {"TINYVLLM_MY_ENGINE": str(tmp_path / "mine"), "TINYVLLM_DEVICE": "cpu"}
    environment["HOME"] = environment["XDG_DATA_HOME"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(codes), capture_output=True, text=True, env=environment,
        timeout=300, check=True,
    )  # fmt: skip
    out = json.loads(done.stdout)
    assert out[0] == out[1] == out[3] == []
    kinds = [kind for kind, _ in out[2]]
    assert kinds == ["html", "error"]
    assert "not filled in" in out[2][0][1]
    assert "\n" not in out[2][1][1], "one line"
    ((kind, card),) = out[4]
    assert kind == "html"
    assert "06.1 passed:" in card
    assert out[5] == [["stdout", "42\n"]]
    assert out[7] == out[4], "lines of blanks, which IPython empties, make no other answer"


# ---------------- progress


@pytest.fixture
def progress(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "path", lambda: tmp_path / "home" / "progress.json")
    return tmp_path / "home" / "progress.json"


def test_progress_outlives_the_process(progress):
    store.update("06.1", lambda entry: entry.update(passed="now"))
    assert store.entry("06.1") == {"passed": "now"}
    assert json.loads(progress.read_text())["version"] == store.VERSION


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 99, "exercises": {}}', '{"version": 1}', "\x00"]
)
def test_a_broken_file_is_kept_and_said(progress, capsys, text):
    progress.parent.mkdir()
    progress.write_text(text)
    store.update("06.1", lambda entry: entry.update(passed="now"))
    assert store.entry("06.1") == {"passed": "now"}
    (kept,) = progress.parent.glob("progress.broken-*.json")
    assert kept.read_text() == text
    assert str(kept) in capsys.readouterr().out


def test_a_folder_that_can_not_be_written_is_said(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(store, "path", lambda: tmp_path / "file" / "progress.json")
    store.update("06.1", lambda entry: entry.update(passed="now"))
    assert "set TINYVLLM_HOME" in capsys.readouterr().out


def test_many_processes_at_once_lose_nothing(tmp_path):
    program = (
        "import sys; from tinyvllm_ref.course import store\n"
        "for k in range(20): store.update(f'{sys.argv[1]}.{k}', lambda entry: entry.update(passed='now'))"
    )
    environment = os.environ | {"TINYVLLM_HOME": str(tmp_path)}
    running = [
        subprocess.Popen([sys.executable, "-c", program, f"{k:02d}"], env=environment) for k in range(4)
    ]
    assert [process.wait(timeout=120) for process in running] == [0] * 4
    assert len(json.loads((tmp_path / "progress.json").read_text())["exercises"]) == 80
