"""``check`` from a learner's side: what passes is kept, and whatever goes wrong becomes a short report."""

import json
import textwrap

import numpy as np
import pytest

from tinyvllm_ref import emulation
from tinyvllm_ref.course import cells, checking, my_engine, store
from tinyvllm_ref.course.answers import make_answer
from tinyvllm_ref.course.checking import CheckFailed, check
from tinyvllm_ref.course.compare import compare
from tinyvllm_ref.course.exercise import Case, Exercise, Hints, Mistake, Tolerance
from tinyvllm_ref.course.exercises import exercise_of
from tinyvllm_ref.course.hints import hint, reset, solution
from tinyvllm_ref.course.judging import cases_of, judge
from tinyvllm_ref.course.lessons import solution_cell, stub_cell
from tinyvllm_ref.course.predictions import predict
from tinyvllm_ref.course.slips import slips_in
from tinyvllm_ref.parts import Parts, PartsError

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(autouse=True)
def _learner(tmp_path, monkeypatch):
    monkeypatch.setenv("TINYVLLM_MY_ENGINE", str(tmp_path / "my engine"))
    monkeypatch.setattr(store, "path", lambda: tmp_path / "home" / "progress.json")
    monkeypatch.setattr(cells, "_recorded", {})
    monkeypatch.setattr(checking, "_PATIENCE", 60.0)  # on a busy machine


def run_cell(source, name=None):
    """As a notebook would: the cell is recorded, runs, and gives its answer."""
    source = textwrap.dedent(source).lstrip("\n")
    cells.record(source)
    namespace = {"np": np, "cp": emulation}
    exec(source, namespace)
    return namespace.get(name) if name else None


def failing(id, source, name):
    answer = run_cell(source, name)
    with pytest.raises(CheckFailed) as caught:
        check(id, answer)
    return caught.value.report


def kernel_cell(body, name="sum_modulo", id="06.1"):
    return (
        f"# Exercise {id} - a tree\n{name} = cp.RawKernel(r'''\n"
        f'extern "C" __global__ void {name}(const float* x, float* out, int n) {{\n{body}\n}}\n'
        f"''', {name!r})\n"
    )


# ---------------- passing


def test_a_pass_is_one_line_the_same_each_time(capsys):
    answer = run_cell(solution_cell("06.1"), "sum_modulo")
    check("06.1", answer)
    check("06.1", answer)
    captured = capsys.readouterr()
    line = "06.1 passed: a tree with modulo (3 of 3 points)\n"
    assert captured.out == line * 2
    assert captured.err == ""


def test_what_passed_is_kept(capsys):
    check("06.5", run_cell(solution_cell("06.5"), "BLOCK_SUM_CUDA"))
    parts = my_engine.own_parts()
    assert parts.owners() == {"BLOCK_SUM_CUDA": "learner"}
    assert "block_sum" in parts.BLOCK_SUM_CUDA
    assert store.entry("06.5")["passed"]
    assert my_engine.answer("06.5").startswith("# Exercise 06.5")
    assert my_engine.parts().owners()["BLOCK_SUM_CUDA"] == "learner"
    assert my_engine.parts().owners()["rms_norm"] == "reference"


def test_the_first_pass_stays_the_first(capsys):
    answer = run_cell(solution_cell("06.1"), "sum_modulo")
    check("06.1", answer)
    first = store.entry("06.1")["passed"]
    check("06.1", answer)
    assert store.entry("06.1")["passed"] == first
    assert store.entry("06.1")["attempts"] == 2


# ---------------- failing


def test_a_mistake_is_named(capsys):
    source = solution_cell("06.2").replace("s > 0", "s > 1")
    report = failing("06.2", source, "sum_halves")
    assert report.mistake[0] == "last round left out"
    assert report.kind == "wrong values"
    assert report.rows
    assert 'hint("06.2")' in report.next_step
    assert "06.2" in capsys.readouterr().out


def test_groups_tell_what_is_earned():
    report = failing("06.3", solution_cell("06.3").replace("(active + 1) / 2", "active / 2"), "sum_rows")
    earned = {name: (got, of) for name, got, of, _ in report.groups}
    assert earned["small cases"] == (1, 1)
    assert earned["awkward cases"] == (0, 2)


def test_a_race_shows_the_learners_line():
    lines = solution_cell("06.1").split("\n")
    barriers = [k for k, line in enumerate(lines) if "__syncthreads" in line]
    del lines[barriers[1]]
    report = failing("06.1", "\n".join(lines), "sum_modulo")
    assert report.headline.startswith("DataRace")
    assert any("cell[t] += cell[t + s]" in text for _, text, is_fault in report.source if is_fault)


def test_a_compile_error_shows_the_learners_line():
    report = failing("06.1", kernel_cell("    out[0] = x[0] + yy;"), "sum_modulo")
    assert "yy" in report.headline
    assert report.kind == "error"


def test_an_index_out_of_bounds():
    report = failing("06.1", kernel_cell("    out[n] = x[0];"), "sum_modulo")
    assert report.headline.startswith("OutOfBounds")


def test_an_endless_kernel(monkeypatch):
    _limit(monkeypatch, 0.5)
    report = failing("06.1", kernel_cell("    while (true) { out[0] = 1.0f; }"), "sum_modulo")
    assert report.headline.startswith("KernelTimeout")


def test_the_stub_is_not_filled_in():
    report = failing("06.1", stub_cell("06.1"), "sum_modulo")
    assert report.kind == "not filled in"
    assert store.entry("06.1") == {}, "it is no attempt"


def test_a_cell_that_did_not_run():
    with pytest.raises(CheckFailed, match="has run since"):
        check("06.1", None)


def test_a_name_from_elsewhere_in_the_notebook():
    source = solution_cell("06.1").replace("cp.RawKernel(", "cp.RawKernel(PREFIX + ")
    cells.record(source)
    with pytest.raises(CheckFailed) as caught:
        check("06.1")
    assert "`PREFIX`" in caught.value.report.headline


def test_an_answer_of_the_wrong_kind():
    report = failing("06.1", "# Exercise 06.1 - a tree\nsum_modulo = 'a string'\n", "sum_modulo")
    assert "it must be a cp.RawKernel" in report.headline


def test_an_unknown_exercise_lists_those_there_are():
    with pytest.raises(LookupError, match=r"lesson 06 has 06\.1"):
        check("06.99", None)
    with pytest.raises(LookupError, match="the lessons are"):
        check("77.1", None)
    with pytest.raises(TypeError, match="string"):
        check(6.1, None)


# ---------------- functions: an exercise of the tests' own


def _run_double(answer, inputs, lab):
    x, out = lab.input("x", inputs["x"]), lab.output(len(inputs["x"]))
    return {"out": lab.returned(answer(x, out), out)}


def _limit(monkeypatch, seconds):
    original = checking.exercise_of

    def with_limit(id):
        exercise = original(id)
        object.__setattr__(exercise, "seconds", seconds)
        return exercise

    monkeypatch.setattr(checking, "exercise_of", with_limit)


def double(seconds=1.0, **changes):
    fields = {
        "id": "06.1",
        "title": "twice",
        "answer": "double",
        "kind": "function",
        "arguments": ("x", "out"),
        "cases": lambda rng: [Case("n = 3", {"x": np.arange(3, dtype=np.float32)})],
        "run": _run_double,
        "expected": lambda inputs: {"out": 2 * inputs["x"]},
        "points": {"small": 1},
        "hints": Hints("?", "rule", "code"),
        "mistakes": (Mistake("three times", "double = lambda x, out: out.fill(0) or out", "It is 2.", "?"),),
        "tolerance": Tolerance(1e-6),
        "seconds": seconds,
    }
    return Exercise(**(fields | changes))


@pytest.fixture
def doubled(monkeypatch):
    exercise = double()
    monkeypatch.setattr(checking, "exercise_of", lambda id: exercise)
    monkeypatch.setattr(checking, "stub_fingerprint", lambda id: None)
    return exercise


RIGHT = """
# Exercise 06.1 - twice
def double(x, out):
    out[:] = x * 2
    return out
"""


def test_a_function_passes(doubled, capsys):
    check("06.1", run_cell(RIGHT, "double"))
    assert "passed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("    return None", "gave back None"),
        ("    return np.zeros(3)", "gave back a ndarray"),
        ("    x[:] = 0\n    out[:] = 0\n    return out", "`x` is an input, and x[1]"),
        ("    raise ValueError('mine')", "ValueError: mine"),
        ("    return 1 / 0", "ZeroDivisionError"),
        ("    return out", "wrong values"),
        ("    import sys\n    sys.exit(3)", "SystemExit"),
        ("    return double(x, out)", "RecursionError"),
        ("    while True: pass", "did not end"),
        ("    while True:\n        try:\n            len([])\n        except Exception: pass", "did not end"),
        ("    import time\n    time.sleep(60)", "did not end"),
        ("    return [0] * 10**15", "MemoryError"),
    ],
)
def test_whatever_a_function_does_becomes_a_report(doubled, body, expected):
    report = failing("06.1", f"# Exercise 06.1 - twice\ndef double(x, out):\n{body}\n", "double")
    assert expected in report.headline
    assert len(report.headline) < 500


def test_the_python_line_is_shown(doubled):
    report = failing(
        "06.1",
        "# Exercise 06.1 - twice\ndef double(x, out):\n    return out + missing.thing\nmissing = 3\n",
        "double",
    )
    assert [text for _, text, is_fault in report.source if is_fault] == ["    return out + missing.thing"]


def test_wrong_parameters(doubled):
    report = failing("06.1", "# Exercise 06.1 - twice\ndef double(x):\n    return x\n", "double")
    assert "can not be called with (x, out)" in report.headline


def test_a_class_instead_of_a_function(doubled):
    report = failing("06.1", "# Exercise 06.1 - twice\nclass double: pass\n", "double")
    assert "must be a function" in report.headline


def test_none_is_not_filled_in(doubled):
    report = failing("06.1", "# Exercise 06.1 - twice\ndouble = None\n", "double")
    assert report.kind == "not filled in"


def test_a_wrong_shape(monkeypatch):
    exercise = double(run=_run_double_shape)
    monkeypatch.setattr(checking, "exercise_of", lambda id: exercise)
    report = failing(
        "06.1", "# Exercise 06.1 - twice\ndef double(x, out):\n    return x[:2].get()\n", "double"
    )
    assert "shape (2,); it must be (3,)" in report.headline


def _run_double_shape(answer, inputs, lab):
    return {"out": answer(lab.input("x", inputs["x"]), None)}


def test_after_all_of_these_the_process_works(doubled, capsys):
    for _ in range(20):
        failing("06.1", "# Exercise 06.1 - twice\ndef double(x, out):\n    raise OSError\n", "double")
    check("06.1", run_cell(RIGHT, "double"))


def test_a_part_made_by_a_function_is_a_module_that_runs(monkeypatch, capsys):
    exercise = double(makes={"rms_norm": "double"}, file="rms_norm.py", uses=("BLOCK_SUM_CUDA",))
    monkeypatch.setattr(checking, "exercise_of", lambda id: exercise)
    source = """
# Exercise 06.1 - twice
TEXT = BLOCK_SUM_CUDA
def double(x, out):
    out[:] = x * 2
    return out
"""
    cells.record(source.lstrip("\n"))
    check("06.1")
    parts = my_engine.own_parts()
    x, out = emulation.arange(3, dtype=np.float32), emulation.empty(3, np.float32)
    assert parts.rms_norm(x, out).tolist() == [0, 2, 4]
    assert "block_sum" in parts.rms_norm.__globals__["TEXT"], (
        "from the reference, for lesson 06 has not passed"
    )
    monkeypatch.undo()


def test_a_part_is_made_of_the_learners_own_earlier_part(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TINYVLLM_MY_ENGINE", str(tmp_path / "my engine"))
    own = solution_cell("06.5").replace("int t =", "int t /* mine */ =")
    check("06.5", run_cell(own, "BLOCK_SUM_CUDA"))
    exercise = double(makes={"rms_norm": "double"}, file="rms_norm.py", uses=("BLOCK_SUM_CUDA",))
    monkeypatch.setattr(checking, "exercise_of", lambda id: exercise)
    cells.record("# Exercise 06.1 - twice\nTEXT = BLOCK_SUM_CUDA\n" + RIGHT.split("\n", 2)[2])
    check("06.1")
    assert "/* mine */" in my_engine.own_parts().rms_norm.__globals__["TEXT"]


def test_a_broken_file_of_my_engine_is_named(tmp_path, capsys):
    check("06.5", run_cell(solution_cell("06.5"), "BLOCK_SUM_CUDA"))
    listing = my_engine.folder() / "parts.json"
    content = json.loads(listing.read_text())
    content["parts"]["rms_norm"] = {"file": "gone.py"}
    listing.write_text(json.dumps(content))
    with pytest.raises(PartsError, match=r"gone\.py"):
        my_engine.own_parts()


# ---------------- predictions, hints, solutions, reset


def test_a_prediction_is_noted(capsys):
    predict("06.4", modulo=100, halves=50.5)
    assert capsys.readouterr().out == "06.4 noted: modulo = 100, halves = 50.5\n"
    assert store.entry("06.4")["predicted"] == {"modulo": 100, "halves": 50.5}
    predict("06.4", modulo=1e6, halves=1000 / (2 * np.pi))
    assert capsys.readouterr().out == "06.4 noted: modulo = 1,000,000, halves = 159.155\n"


@pytest.mark.parametrize("number", [None, ..., "many", float("nan"), True])
def test_no_number_is_no_prediction(number):
    with pytest.raises(CheckFailed):
        predict("06.4", modulo=number, halves=1)
    assert store.entry("06.4") == {}


def test_a_prediction_of_something_else():
    with pytest.raises(TypeError, match="it asks for modulo, halves"):
        predict("06.4", modulo=1, halves=1, thirds=1)
    with pytest.raises(TypeError, match="is no prediction"):
        predict("06.1", modulo=1)
    with pytest.raises(TypeError, match="asks for a prediction"):
        check("06.4", 3)


def test_hints_open_one_by_one(capsys):
    hint("06.1")
    smallest = cases_of(exercise_of("06.1"), checking.SEED)[0][0].label
    assert f"Take {smallest}." in " ".join(capsys.readouterr().out.split())
    hint("06.1")
    assert "open after a check that failed" in capsys.readouterr().out
    assert store.entry("06.1")["hints"] == [1]
    failing("06.1", kernel_cell("    out[blockIdx.x] = 0.0f;"), "sum_modulo")
    hint("06.1")
    hint("06.1")
    text = capsys.readouterr().out
    assert "multiple of 2s" in text
    assert "cell[t] = i < n ? ____" in text
    with pytest.raises(ValueError, match="the tiers are 1, 2 and 3"):
        hint("06.1", 4)


def test_the_first_hint_is_about_the_mistake(capsys):
    failing("06.2", solution_cell("06.2").replace("s > 0", "s > 1"), "sum_halves")
    capsys.readouterr()
    hint("06.2")
    assert "Which two cells are left?" in capsys.readouterr().out


def test_a_solution_after_passing_or_on_request(capsys):
    solution("06.1")
    assert "has not passed yet" in capsys.readouterr().out
    solution("06.1", anyway=True)
    assert "cell[t + s]" in capsys.readouterr().out


def test_reset_moves_and_loses_nothing(capsys):
    check("06.5", run_cell(solution_cell("06.5"), "BLOCK_SUM_CUDA"))
    reset("06.5")
    assert my_engine.own_parts() == Parts()
    assert store.entry("06.5") == {}
    kept = list((my_engine.folder() / "removed").iterdir())
    assert any("block_sum" in path.read_text() for path in kept)
    check("06.5", run_cell(solution_cell("06.5"), "BLOCK_SUM_CUDA"))
    reset("06")
    assert len(list((my_engine.folder() / "removed").iterdir())) == 4


# ---------------- what a newcomer stumbled on


@pytest.mark.parametrize(
    ("id", "name"), [("01.77", "LookupError"), ("99", "LookupError"), (0.1, "TypeError")]
)
def test_a_mistyped_exercise_is_one_line_in_a_notebook(id, name):
    for function in (hint, check, solution):
        with pytest.raises((LookupError, TypeError)) as caught:
            function(id)
        (line,) = caught.value._render_traceback_()
        assert line == f"{name}: {caught.value}"
        assert "\n" not in line


def test_the_tolerance_is_said_where_it_matters():
    expected = np.array([1.0, 2.0], np.float32)
    tolerance = Tolerance(1e-6, 1e-6, "float32 keeps some 7 digits")
    far = compare({"y": expected}, {"y": expected + 1}, lambda _: tolerance)
    near = compare({"y": expected}, {"y": expected + np.float32(1e-5)}, lambda _: tolerance)
    assert not any("tolerance" in count for count in far.counts)
    assert any("tolerance 1e-06 relative" in count for count in near.counts)


def test_check_says_when_it_is_given_something_else(capsys):
    run_cell(solution_cell("06.2"), "sum_halves")
    other = emulation.RawKernel('extern "C" __global__ void sum_halves() {}', "sum_halves")
    with pytest.raises(CheckFailed, match="something else than the cell makes"):
        check("06.2", other)
    cells.record(solution_cell("06.5"))
    with pytest.raises(CheckFailed, match="something else"):
        check("06.5", 5)


def test_a_check_inside_of_the_answer_cell():
    cells.record(solution_cell("06.1") + "\ncheck('06.1', sum_modulo)\n")
    with pytest.raises(CheckFailed, match="a cell of its own"):
        check("06.1")


ONE_BY_ONE = """
    extern __shared__ float cell[];
    int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
    cell[t] = i < n ? x[i] : 0.0f;
    __syncthreads();
    if (t == 0) {
        float sum = 0.0f;
        for (int k = 0; k < blockDim.x; k++) sum += cell[k];
        out[blockIdx.x] = sum;
    }
"""


@pytest.mark.parametrize(
    ("id", "name"), [("06.1", "sum_modulo"), ("06.2", "sum_halves"), ("06.6", "sum_shuffle")]
)
def test_right_sums_by_one_thread_are_not_a_tree(id, name):
    report = failing(id, kernel_cell(ONE_BY_ONE, name, id), name)
    assert report.kind == "not as asked"
    assert "The sums are right" in report.headline


def test_the_modulo_tree_is_no_answer_to_the_second_exercise():
    source = solution_cell("06.1").replace("sum_modulo", "sum_halves").replace("06.1", "06.2")
    assert "spread over many warps" in failing("06.2", source, "sum_halves").headline


@pytest.mark.parametrize("stages", ["two"])
def test_a_shuffle_sum_in_two_stages_is_right(stages, capsys):
    body = """
    extern __shared__ float cell[];
    int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
    cell[t] = i < n ? x[i] : 0.0f;
    __syncthreads();
    float sum = cell[t];
    for (int k = 16; k > 0; k /= 2) sum += __shfl_down_sync(0xffffffff, sum, k);
    __syncthreads();
    if (t % 32 == 0) cell[t / 32] = sum;
    __syncthreads();
    if (t < 32) {
        sum = t < blockDim.x / 32 ? cell[t] : 0.0f;
        for (int k = 16; k > 0; k /= 2) sum += __shfl_down_sync(0xffffffff, sum, k);
        if (t == 0) out[blockIdx.x] = sum;
    }
"""
    check("06.6", run_cell(kernel_cell(body, "sum_shuffle", "06.6"), "sum_shuffle"))


def test_a_picture_that_has_no_room_is_said_in_a_line(capsys, monkeypatch):
    from tinyvllm_ref.course.measuring import measure, show

    body = ONE_BY_ONE.replace("int k = 0; k < blockDim.x; k++", "int k = blockDim.x - 1; k >= 0; k--")
    monkeypatch.setattr(my_engine, "answer", lambda id: kernel_cell(body))
    show("06.1")
    assert "\n" not in capsys.readouterr().out.strip()
    show("06.3")
    measure("06.4")
    assert (
        capsys.readouterr().out
        == "06.3 has no picture; lesson 06 has 06.1, 06.2\nnothing to compare yet: 06.4 has no prediction\n"
    )


def test_a_text_that_defines_no_block_sum():
    report = failing(
        "06.5",
        '# Exercise 06.5 - x\nBLOCK_SUM_CUDA = "__device__ float sum(float v, float* s) { return v; }"\n',
        "BLOCK_SUM_CUDA",
    )
    assert "defines no function `block_sum`" in report.headline


def test_small_inputs_are_shown():
    report = failing("06.1", kernel_cell("    out[blockIdx.x] = 0.0f;"), "sum_modulo")
    assert report.case["x"].startswith("[")
    states = {name: passed for name, _, _, passed in report.groups}
    assert states["checks of memory and barriers"] is None, "nothing was found, and nothing is right"


def test_an_answer_in_a_cell_without_its_first_line(capsys):
    """The recorded cell is still the stub; what check is given comes from elsewhere."""
    cells.record(stub_cell("06.2"))
    namespace = {"np": np, "cp": emulation}
    exec(solution_cell("06.2"), namespace)
    with pytest.raises(CheckFailed, match="with that first line"):
        check("06.2", namespace["sum_halves"])


def test_the_input_stands_beside_a_wrong_element(doubled):
    report = failing(
        "06.1", "# Exercise 06.1 - twice\ndef double(x, out):\n    out[:] = x\n    return out\n", "double"
    )
    assert report.rows[0] == ("out[1], x = 1", "2", "1")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("int k = 1\n    out[0] = k;", "a ; may be missing"),
        ("int k = blockIdx * blockDim;", "triples: write .x"),
        ("if n > 0 { out[0] = x[0]; }", "C++ wants parentheses"),
        ("out[0] = x[n//2];", "// begins a comment"),
        ("x[0] = 1;", "const is only read"),
        ("out[0] = x[0][0];", "row * columns + column"),
        ("syncthreads();", "two underscores"),
        ("bool odd = True;", "true, false, nullptr"),
        ("out[0] = -INFINITY;", "__int_as_float(0x7f800000) is infinity"),
        ("__shared__ int count[4] = {0};", "must write its first values"),
    ],
)
def test_slips_of_python_readers_get_a_remark(line, says):
    report = failing("06.1", kernel_cell(f"    {line}"), "sum_modulo")
    assert says in report.fault_note
    assert report.case == {}


def test_two_indices_in_one_bracket_get_a_remark():
    """Where no mistake of the exercise is that one."""
    report = failing("06.1", kernel_cell("    out[blockIdx.x] = x[blockIdx.x, threadIdx.x];"), "sum_modulo")
    assert any("this is `x[threadIdx.x]`" in note for note in report.notes)


@pytest.mark.parametrize(
    "cell",
    [
        "y = x[1, 2]",
        'K = """__global__ void k(int* x) { x[min(1, 2)] = 3; int y[2] = {1, 2}; } // x[1, 2]"""',
        "not Python (",
    ],
)
def test_what_is_no_slip(cell):
    assert slips_in(cell) == ()


def test_a_nan_that_was_computed_is_told_from_memory_that_nothing_wrote():
    def counts(got: np.ndarray) -> tuple[str, ...]:
        difference = compare({"y": np.zeros_like(got)}, {"y": got}, lambda name: Tolerance())
        assert difference is not None
        return difference.counts

    unwritten = np.full(3, 0xFFFFFFFF, np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        computed = np.full(2, np.inf, np.float32) / np.inf
    assert counts(unwritten)[1:] == ("3 of them NaN (what nothing has written reads as NaN)",)
    assert counts(-unwritten)[1:] == counts(unwritten)[1:]
    assert counts(computed)[1:] == ("2 of them NaN",)
    assert counts(np.array([-1, 5], np.int32))[1:] == ("1 of them -1 (so reads what nothing has written)",)
    assert counts(np.array([5, 6], np.int32))[1:] == ()


def test_bit_patterns_are_shown_in_hexadecimal():
    from tinyvllm_ref.course.compare import show

    assert show(np.uint16(0x3F80)) == "0x3F80"
    assert show(np.uint32(1)) == "0x00000001"
    assert show(7) == "7"


def test_what_later_cases_add_is_said():
    source = solution_cell("06.1").replace("i < n ? x[i] : 0.0f", "x[i] * 2.0f")
    report = failing("06.1", source, "sum_modulo")
    assert any("Also, in the case" in note and "OutOfBounds" in note for note in report.notes)


def test_a_fault_in_an_earlier_part_is_said_to_be_there(monkeypatch):
    """Not every thread calls block_sum: the fault is found inside of it."""
    exercise = double(kind="kernel", answer="k", uses=("BLOCK_SUM_CUDA",), arguments=(), run=_run_half)
    monkeypatch.setattr(checking, "exercise_of", lambda id: exercise)
    monkeypatch.setattr(checking, "stub_fingerprint", lambda id: None)
    cells.record(
        "# Exercise 06.1 - half\nk = cp.RawKernel(BLOCK_SUM_CUDA + r'''\n"
        'extern "C" __global__ void k(const float* x, float* out) {\n'
        "    extern __shared__ float s[];\n"
        "    if (threadIdx.x < 2) out[threadIdx.x] = block_sum(1.0f, s);\n}\n''', 'k')\n"
    )
    with pytest.raises(CheckFailed) as caught:
        check("06.1")
    assert any("part of an earlier exercise" in note for note in caught.value.report.notes)


def _run_half(answer, inputs, lab):
    import numpy as np

    x, out = lab.input("x", inputs["x"]), lab.output(3, np.float32)
    answer((1,), (3,), (x, out), shared_mem=12)
    return {"out": lab.get(out)}


def test_the_search_for_a_mistake_ends_in_time_and_goes_on_later(monkeypatch):
    from tinyvllm_ref.course import diagnosis

    exercise = checking.exercise_of("06.2")
    source = solution_cell("06.2").replace("s > 0", "s > 1")
    verdict = judge(exercise, make_answer(exercise, source, emulation), emulation, checking.SEED)
    monkeypatch.setattr(diagnosis, "_results", {})
    clock = [0.0]
    real = diagnosis.judge_case

    def slow(*arguments):
        clock[0] += 1.0
        return real(*arguments)

    monkeypatch.setattr(diagnosis, "judge_case", slow)
    monkeypatch.setattr(diagnosis.time, "monotonic", lambda: clock[0])
    tries = 0
    while (found := diagnosis.find_mistake(verdict, seconds=1.5)) is None:
        tries += 1
        assert tries < 50
    assert found.name == "last round left out"
    assert tries > 0
    assert exercise.mistakes.index(found) > 0


def test_what_a_variable_without_a_start_value_holds_is_named():
    from tinyvllm_ref.course.compare import compare

    got = np.array([1, -1.6947395e38, 3], np.float32)
    difference = compare({"y": np.array([1, 2, 3], np.float32)}, {"y": got}, lambda name: Tolerance())
    assert "1 of them -1.69e+38 (what a variable without a start value holds here)" in difference.counts


def test_a_fault_in_a_kernel_that_python_led_to_shows_the_call():
    """13.4 has no kernel of its own: the line to look at is the call, not one of add_rms_norm's."""
    source = solution_cell("13.4")
    begin, end = source.index("    if layer == 0"), source.index("    qkv = ")
    call = '    add_rms_norm(x, residual, weight("input_layernorm"), eps, h)'
    report = failing("13.4", f"{source[:begin]}{call}\n{source[end:]}", "decoder_layer")
    assert [text for _, text, fault in report.source if fault] == [call]
    assert any("this line leads to" in note for note in report.notes)
    assert report.mistake is not None
    assert report.mistake[0] == "x added in layer 0 as well"


def test_a_kernels_line_in_a_function_stands_among_its_neighbours():
    source = solution_cell("13.3").replace("if (i >= n) return;", "if (i > n) return;")
    cells.record(source)
    with pytest.raises(CheckFailed) as caught:
        check("13.3")
    report = caught.value.report
    faults = [text.strip() for _, text, fault in report.source if fault]
    assert len(faults) == 1
    assert len(report.source) > 1
    assert all(text in source for _, text, _ in report.source)


def test_a_line_of_the_stub_that_is_left_is_named_and_no_mistake_is():
    stub, source = stub_cell("14.1"), solution_cell("14.1")
    left = "    return false;  // replace this line"
    assert left in stub
    beats = next(line for line in source.splitlines() if "a.value" in line)
    report = failing("14.1", source.replace(beats, left), "BLOCK_BEST_CUDA")
    assert report.mistake is None
    assert "`return false;  // replace this line` is a line of the stub." in report.notes


def test_a_riddle_keeps_its_answer_to_itself():
    source = solution_cell("14.5")
    wrong = source.replace("pairs side by side", "not rotated")
    report = failing("14.5", wrong, "found")
    assert report.rows == (("what", "(yours to find)", "'not rotated'"),)
    assert "pairs side by side" not in report.render_text()
    assert {name: points for name, points, _, _ in report.groups} == {
        "model A": 1,
        "model B": 0,
        "model C": 1,
    }
    half = source.replace('("layers.3.rope", "pairs side by side")', "(None, None)")
    report = failing("14.5", half, "found")
    assert report.kind == "not filled in"
    assert "found['B']" in report.headline
    typo = source.replace("future tokens seen", "the future")
    assert "must be one of FAULTS" in failing("14.5", typo, "found").headline


def test_the_mistake_whose_text_is_likest_is_tried_first(monkeypatch):
    """A search that may take no longer than one mistake finds the last one of the list, too."""
    from tinyvllm_ref.course import diagnosis

    exercise = checking.exercise_of("20.3")
    mistake = exercise.mistakes[-1]
    source = "# Exercise 20.3\n" + mistake.answer.replace("peak", "largest")
    verdict = judge(exercise, make_answer(exercise, source, emulation), emulation, checking.SEED)
    monkeypatch.setattr(diagnosis, "_results", {})
    looks = []
    monkeypatch.setattr(diagnosis.time, "monotonic", lambda: float(len(looks)))
    real = diagnosis._fails_as
    monkeypatch.setattr(diagnosis, "_fails_as", lambda *given: looks.append(given) or real(*given))
    assert diagnosis.find_mistake(verdict, seconds=0.5) is None
    looks.clear()
    assert diagnosis.find_mistake(verdict, seconds=0.5, source=source) is mistake


def test_an_input_of_the_outputs_shape_is_named_only_where_it_belongs_to_it():
    """Beside keys of as many dimensions a query's elements say nothing of the output's."""
    from tinyvllm_ref.course.compare import compare

    x = np.arange(6, dtype=np.float32).reshape(2, 3)

    def row(**others):
        difference = compare({"y": x}, {"y": x + 1}, lambda name: Tolerance(), {"x": x, **others})
        return difference.rows[1][0]

    assert row() == row(weight=np.ones(3)) == "y[0, 1], x = 1"
    assert row(keys=np.ones((5, 3))) == "y[0, 1]"
