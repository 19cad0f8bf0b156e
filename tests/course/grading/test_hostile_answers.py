"""Answers that attack: each gets no points that it should not, the grader goes on, and the result says what happened.

The exercises are lesson 06's kernels, and a function made for these tests, for what needs Python beside the run.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from tinyvllm_ref.course.exercise import Case, Exercise, Hints, Mistake, Prediction
from tinyvllm_ref.course.exercises import exercise_of
from tinyvllm_ref.course.grading.judge import Task, judge_answer
from tinyvllm_ref.course.judging import cases_of

from .handing_in import LIMITS, level, right, useless


def judged(id, source, **task):
    return judge_answer(exercise_of(id), Task(source, 7, **task), level(), LIMITS)


# ---------------- a function, of which Python runs beside the judge's inputs


def _cases(rng):
    return [Case(f"n = {n}", {"x": rng.standard_normal(n)}, "small") for n in (4, 9)]


def _run(answer, inputs, lab):
    return {"y": answer(inputs["x"])}


def _expected(inputs):
    return {"y": np.cumsum(inputs["x"])}


_WRONG = Mistake("half", "running = lambda x: x / 2", "It is halved.", "Why half?")
_FUNCTION = Exercise(
    id="99.1",
    title="a running sum",
    answer="running",
    kind="function",
    cases=_cases,
    run=_run,
    expected=_expected,
    points={"small": 2},
    hints=Hints("?", "?", "?"),
    mistakes=(_WRONG, _WRONG, _WRONG),
    arguments=("x",),
    seconds=2.0,
)


def function(body):
    return judge_answer(_FUNCTION, Task(f"# Exercise 99.1 - a running sum\n{body}", 7), level(), LIMITS)


def test_the_functions_right_answer_passes():
    result = function("def running(x):\n    return np.cumsum(x)")
    assert (result.status, result.points) == ("passed", 2), result.says


def test_the_functions_mistake_is_named():
    result = function("def running(x):\n    return x / 2")
    assert result.points == 0
    assert result.mistake == ("half", "It is halved.")


# ---------------- patches of what might compare

PATCHES = {
    "numpy": "np.allclose = np.array_equal = np.isclose = lambda *a, **k: True\nnp.all = lambda *a, **k: True",
    "numpy in C": "import builtins\nbuiltins.abs = lambda x: 0\nnp.abs = lambda x: x * 0",
    "the course": "import tinyvllm_ref.course.runner as r\nr.run_case = lambda *a, **k: None",
    "check": "check = lambda *a, **k: print('06.1 passed')\n"
    "import tinyvllm_ref.course\ntinyvllm_ref.course.check = check",
    "the lab": "import tinyvllm_ref.course.lab as lab\n"
    "lab.Lab.get = lambda self, a, name='out': np.zeros(a.shape, 'f')",
    "the emulation": "cp.RawKernel.__call__ = lambda self, *a, **k: None\ncp.checks = None",
    "pytest": "import sys, types\nsys.modules['pytest'] = types.ModuleType('pytest')",
    "IPython": "import sys, types\nsys.modules['IPython'] = types.ModuleType('IPython')",
    "json": "import json\njson.dumps = lambda *a, **k: '{}'",
    "exit hooks": "import atexit\natexit.register(lambda: print('passed'))",
}


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_before_a_useless_kernel_earns_nothing(name):
    result = judged("06.1", useless("06.1", before=PATCHES[name]))
    assert result.points == 0, result
    assert result.status in ("failed", "error", "stopped")
    assert result.says


@pytest.mark.parametrize("name", ["numpy", "the emulation", "check", "exit hooks"])
def test_a_right_kernel_passes_whatever_its_cell_patches(name):
    text = right("06.1")
    first, rest = text.split("\n", 1)
    result = judged("06.1", f"{first}\n{rest}\n{PATCHES[name]}")
    assert (result.status, result.points) == ("passed", 3), result


def test_an_object_that_poses_as_a_kernel_is_refused():
    fake = "class RawKernel:\n    code = 'x'\n    def __call__(self, *a, **k):\n        a[2][1][...] = a[2][0].sum()\n"
    result = judged("06.1", f"# Exercise 06.1 - fake\n{fake}sum_modulo = RawKernel()")
    assert (result.status, result.points) == ("error", 0)
    assert "cp.RawKernel" in result.says


# ---------------- leaving, crashing, never ending

ENDS = {
    "sys.exit": ("import sys\nsys.exit(0)", "error", "SystemExit"),
    "os._exit": ("import os\nos._exit(0)", "stopped", "ended itself"),
    "kill -9": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "stopped", "SIGKILL"),
    "a crash": ("import ctypes\nctypes.string_at(0)", "stopped", "SIGSEGV"),
    "an error without words": ("class E(Exception):\n    def __str__(self): raise E\nraise E", "error", ""),
    "a loop": ("while True: pass", "error", "PythonTimeout"),
    "text that is no Python": ("def (:", "error", "SyntaxError"),
    "brackets": ("(" * 3000, "error", ""),
    "a null byte": ("x = '\0'", "error", ""),
    "half a surrogate": ("x = '\ud800'", "error", ""),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_cell_that_does_not_come_back(name):
    body, status, words = ENDS[name]
    result = judged("06.1", useless("06.1", before=body))
    assert result.points == 0
    assert result.status == status, result
    assert words in result.says


@pytest.mark.slow
def test_a_loop_that_takes_no_alarm(contained):
    body = "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\n"
    body += "while True:\n    try:\n        while True: pass\n"
    begin = time.monotonic()
    result = function(body + "    except BaseException: pass")
    assert (result.status, result.points) == ("stopped", 0)
    assert "stopped" in result.says
    assert time.monotonic() - begin < 60


@pytest.mark.slow
def test_a_kernel_that_never_ends():
    kernel = useless("06.1").replace("int n) {}", "int n) { for (;;) out[0] = x[0]; }")
    result = judged("06.1", kernel)
    assert result.points == 0
    assert "KernelTimeout" in result.says


def test_a_kernel_that_calls_exit():
    kernel = useless("06.1").replace('extern "C" __g', 'extern "C" void _exit(int);\nextern "C" __g')
    result = judged("06.1", kernel.replace("int n) {}", "int n) { _exit(0); }"))
    assert result.points == 0
    assert result.status in ("stopped", "failed", "error")


# ---------------- too much of something


@pytest.mark.slow
def test_a_fork_bomb(contained):
    result = function(
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\ndef running(x): return x"
    )
    assert result.points == 0
    assert result.status in ("error", "stopped"), result


def test_a_memory_bomb(contained):
    result = function("def running(x):\n    return np.ones(1 << 33)")
    assert result.points == 0
    assert "MemoryError" in result.says, result


def test_a_memory_bomb_in_children(contained):
    body = """import os, signal, time
for k in range(12):
    if os.fork() == 0:
        x = b"1" * (300 << 20)
        time.sleep(60)
signal.signal(signal.SIGALRM, signal.SIG_IGN)
time.sleep(60)
def running(x): return x
"""
    result = function(body)
    assert (result.status, result.points) == ("stopped", 0), result
    assert "memory" in result.says


def test_gigabytes_of_output():
    result = function("while True: print('x' * 10_000_000)")
    assert result.points == 0
    assert "PythonTimeout" in result.says


def test_a_result_of_gigabytes(contained):
    result = function("def running(x):\n    return np.zeros(70 << 20, np.uint8)")
    assert (result.status, result.points) == ("stopped", 0), result
    assert "bytes" in result.says


def test_a_full_disk(contained):
    result = function("file = open('big', 'wb')\nwhile True: file.write(bytes(1 << 20))")
    assert result.points == 0
    assert result.status in ("error", "stopped"), result


# ---------------- reading what is not for it

READS = {
    "solutions": "open('{root}/solutions/06_tree_reduction.py').read()",
    "exercises": "import tinyvllm_ref.course.exercises",
    "the reference's kernel": "from tinyvllm_ref.kernels.rms_norm import rms_norm",
    "the judge": "import tinyvllm_ref.course.grading.judge",
    "solution()": "from tinyvllm_ref.course import solution\nsolution('06.1', anyway=True)",
    "the machine's users": "open('/etc/passwd').read()",
    "another process": "import os\nif sum(name.isdigit() for name in os.listdir('/proc')) < 8: raise OSError('alone')",
    "the network": "import socket\nsocket.create_connection(('127.0.0.1', 22), 2)",
    "a file outside": "open('{root}/report.json', 'w')",
    "its own modules": "import tinyvllm_ref.course.lab as lab\nopen(lab.__file__, 'a')",
}


@pytest.mark.parametrize("name", READS)
def test_what_is_not_for_it_is_not_there(name, bubblewrapped):
    from tinyvllm_ref.checkpoint.names import REPOSITORY

    line = READS[name].format(root=REPOSITORY)
    result = judged("06.1", f"# Exercise 06.1 - look around\n{line}\n" + right("06.1").split("\n", 1)[1])
    assert (result.status, result.points) == ("error", 0), result
    assert any(
        word in result.says
        for word in (
            "FileNotFoundError",
            "ModuleNotFoundError",
            "PermissionError",
            "OSError",
            "ConnectionRefused",
            "ImportError",
        )
    ), result.says


# ---------------- inputs that were seen before, outputs that were never computed


def test_the_public_seed_is_of_no_use():
    """The sums of the notebook's own inputs, kept in the kernel."""
    pairs = cases_of(exercise_of("06.1"), 0)
    by_hand = "".join(
        f"static const float k{len(case.inputs['x'])}[] = {{{', '.join(f'{v}f' for v in expected['out'].tolist())}}};\n"
        for case, expected in pairs
    )
    chosen = " ".join(
        f"if (n == {len(case.inputs['x'])}) out[blockIdx.x] = k{len(case.inputs['x'])}[blockIdx.x];"
        for case, _ in pairs
    )
    kernel = useless("06.1").replace("int n) {}", f"int n) {{ if (threadIdx.x == 0) {{ {chosen} }} }}")
    kernel = kernel.replace(
        'extern "C"', by_hand.replace("static const", "__constant__ const") + 'extern "C"', 1
    )
    assert judge_answer(exercise_of("06.1"), Task(kernel, 0), level(), LIMITS).points > 0  # it is right there
    result = judged("06.1", kernel)
    assert result.groups["small"] == (0, 1), result
    assert result.groups["awkward"] == (0, 1)
    assert result.status in ("failed", "partial")


def test_a_forged_message_is_a_wrong_result(contained):
    """It finds the way to the judge, and sends what it likes: the judge still compares."""
    body = (
        "import os, struct, json\n"
        "def running(x):\n"
        "    y = {'d': [['y', {'a': ['<f8', [4], 0]}]]}\n"
        "    text = json.dumps({'d': [['outputs', y], ['fault', None]]}).encode()\n"
        "    data = struct.pack('<QQ', len(text), 32) + text + bytes(32)\n"
        "    for k in range(3, 40):\n"
        "        try: os.write(k, data)\n"
        "        except OSError: pass\n"
        "    return x\n"
    )
    result = function(body)
    assert result.points == 0
    assert result.status in ("failed", "stopped")


@pytest.mark.parametrize(
    "value",
    [
        "object()",
        "np.array([object()])",
        "{'a': x}",
        "[[[[[[x]]]]]]",
        "10 ** 5000",
        "float('nan')",
        "x.astype('M8[s]')",
        "'x' * 10**6",
        "type('A', (np.ndarray,), {})(4)",
    ],
)
def test_odd_results_are_wrong_results(value):
    result = function(f"def running(x):\n    return {value}")
    assert result.points == 0
    assert result.status in ("failed", "stopped", "error"), result


@pytest.mark.slow
def test_a_patched_engine_is_gone_in_the_next_exercise():
    first = useless("06.1", before=PATCHES["the lab"] + "\n" + PATCHES["the emulation"])
    plant = "import os, glob\nfor p in glob.glob(os.environ['TINYVLLM_HOME'] + '/kernels/*'):\n"
    plant += "    open(p, 'wb').write(b'no library')"
    judged("06.1", first)
    judged("06.1", useless("06.1", before=plant))
    assert judged("06.2", right("06.2")).status == "passed"
    assert judged("06.2", useless("06.2")).points == 0


def test_feedback_has_nothing_of_the_inputs():
    result = function("def running(x):\n    raise ValueError(x.tolist())")
    assert "[" in result.says
    assert result.feedback == "ValueError at line 3 of the cell"


# ---------------- predictions


@pytest.mark.parametrize(
    "numbers",
    ["modulo=float('nan'), halves=1", "modulo='many', halves=1", "modulo=1", "modulo=True, halves=1"],
)
def test_a_prediction_wants_numbers(numbers):
    prediction = exercise_of("06.4")
    assert isinstance(prediction, Prediction)
    result = judged("06.4", f'# Exercise 06.4 - how busy\npredict("06.4", {numbers})')
    assert (result.status, result.points) == ("not filled in", 0)


def test_any_numbers_are_credited():
    result = judged("06.4", '# Exercise 06.4 - how busy\npredict("06.4", modulo=3, halves=2e5)')
    assert (result.status, result.points) == ("passed", 1)


def test_a_prediction_for_another_exercise_is_none():
    result = judged("06.4", '# Exercise 06.4 - how busy\npredict("09.2", modulo=3, halves=2)')
    assert result.points == 0
