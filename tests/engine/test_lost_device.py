"""A card that is lost: what the engine, the commands and the server say of it, and how they end.

In this process with errors that are made up, then in processes of their own: with the stand-in for a card that
``losing.py`` loses, and (marked gpu) with a card and a kernel that writes where it must not.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tinyvllm_ref import LLM, SamplingParams, fast_path, lost_device
from tinyvllm_ref.assembly import Parts
from tinyvllm_ref.capturable_blas import CublasError
from tinyvllm_ref.device import cp, is_gpu
from tinyvllm_ref.engine import Engine
from tinyvllm_ref.lost_device import DeviceLost, losses_named

REPOSITORY = Path(__file__).resolve().parents[2]
LOSING = str(Path(__file__).with_name("losing.py"))
ILLEGAL = "cudaErrorIllegalAddress: an illegal memory access was encountered"
SANITIZER = "compute-sanitizer"
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
runtime, driver = cp.cuda.runtime, cp.cuda.driver
# A card's errors carry these texts; the emulation knows some of them only.
Raw = type("CUDARuntimeError", (runtime.CUDARuntimeError,), {"__init__": RuntimeError.__init__})


@pytest.fixture
def hooks(monkeypatch):
    """The hooks of the interpreter, which a loss changes, as they were."""
    for name in ("excepthook", "unraisablehook"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    lost_device._hush_destructors.cache_clear()
    yield
    lost_device._hush_destructors.cache_clear()


@pytest.fixture
def lose(monkeypatch, hooks):
    """Makes CUDA answer everything with an error."""

    def now(said=ILLEGAL):
        def refuse(*args):
            raise Raw(said)

        monkeypatch.setattr(runtime, "deviceSynchronize", refuse)
        return refuse

    return now


# ---------------- which errors
@pytest.mark.parametrize(
    "error",
    [
        Raw(ILLEGAL),
        driver.CUDADriverError(700),
        CublasError("cublasGemmEx of (1, 2) by (3, 2) transposed: CUBLAS_STATUS_EXECUTION_FAILED (13)"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_lost_device_raises_is_one_error(lose, error):
    lose()
    with pytest.raises(DeviceLost) as caught, losses_named(), losses_named():
        raise error
    assert caught.value.__cause__ is error
    assert isinstance(caught.value, RuntimeError)
    said = str(caught.value)
    name = runtime.getDeviceProperties(0)["name"]
    assert said.startswith(
        f"GPU 0 ({name.decode() if isinstance(name, bytes) else name}) is lost to this process: "
    )
    assert ILLEGAL in said
    assert "the process must be started again" in said


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("cudaErrorIllegalAddress: an illegal memory access was encountered", SANITIZER),
        ("cudaErrorMisalignedAddress: misaligned address", SANITIZER),
        ("cudaErrorLaunchFailure: unspecified launch failure", SANITIZER),
        ("cudaErrorAssert: device-side assert triggered", SANITIZER),
        ("cudaErrorECCUncorrectable: uncorrectable ECC error encountered", "nvidia-smi"),
        ("cudaErrorUnknown: unknown error", "nvidia-smi"),
        ("cudaErrorNoDevice: no CUDA-capable device is detected", "nvidia-smi"),
    ],
)
def test_what_to_do_depends_on_whose_fault_it_is(lose, said, words):
    refuse = lose(said)
    with pytest.raises(DeviceLost) as caught, losses_named():
        refuse()
    assert said in str(caught.value)
    assert (words in str(caught.value), SANITIZER in str(caught.value)) == (True, words == SANITIZER)


@pytest.mark.parametrize(
    "error", [Raw("cudaErrorInvalidValue: invalid argument"), MemoryError("no room"), ValueError("wrong")]
)
def test_an_error_after_which_the_device_works_stays_what_it_is(hooks, error):
    before = sys.excepthook, sys.unraisablehook
    with pytest.raises(type(error)) as caught, losses_named():
        raise error
    assert caught.value is error
    assert (sys.excepthook, sys.unraisablehook) == before


def test_a_graph_that_another_thread_records_is_no_loss(lose):
    """Nothing may wait for the device meanwhile."""
    lose("cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing")
    error = Raw("cudaErrorInvalidValue: invalid argument")
    with pytest.raises(type(error)) as caught, losses_named():
        raise error
    assert caught.value is error


def test_a_device_that_does_not_even_say_its_number(lose, monkeypatch):
    refuse = lose("cudaErrorNoDevice: no CUDA-capable device is detected")
    monkeypatch.setattr(cp.cuda, "Device", refuse)
    with (
        pytest.raises(DeviceLost, match=r"^the GPU is lost to this process: cudaErrorNoDevice"),
        losses_named(),
    ):
        pytest.fail("the device was not asked")


# ---------------- destructors
def _from_compiled_code(error):
    """The error with a traceback as an extension module's: no line of Python in it."""
    try:
        exec(compile("raise error", "cupy_backends/cuda/api/runtime.pyx", "exec"), {"error": error})
    except Exception as caught:
        return type(caught), caught, caught.__traceback__.tb_next
    raise AssertionError


def test_destructors_are_quiet_from_then_on_and_nothing_else_is(lose, monkeypatch):
    shown, ignored = [], []
    monkeypatch.setattr(sys, "excepthook", lambda *error: shown.append(error[1]))
    monkeypatch.setattr(sys, "unraisablehook", lambda what: ignored.append(what.exc_value))
    refuse = lose()
    with pytest.raises(DeviceLost), losses_named():
        refuse()
    ours = Raw(ILLEGAL), driver.CUDADriverError(700), cp.cuda.cublas.CUBLASError(13)
    theirs = ValueError("a bug"), RuntimeError("another")
    for error in (*ours, *theirs):
        sys.excepthook(*_from_compiled_code(error))  # Cython prints it twice: so,
        sys.unraisablehook(SimpleNamespace(exc_type=type(error), exc_value=error))  # and so
    assert shown == list(theirs)
    assert ignored == list(theirs)
    with pytest.raises(Raw) as caught:
        refuse()
    sys.excepthook(caught.type, caught.value, caught.tb)  # of a program that does not catch it
    assert shown[-1] is caught.value


# ---------------- the engine
@pytest.mark.parametrize("fast", ["on", "off"])
def test_an_llm_says_it_whatever_it_is_asked(lose, monkeypatch, fast):
    llm = LLM("tiny-stories", fast_path=fast, num_blocks=64, max_num_seqs=4)
    llm.generate(["Once", "A dog"], PARAMS)
    stream = llm.stream("Once", PARAMS)
    next(stream)
    refuse = lose()
    for owner, name in ((cp.RawKernel, "__call__"), (fast_path._Result, "wait"), (cp, "empty")):
        monkeypatch.setattr(owner, name, refuse)
    for what, ask in {
        "generate": lambda: llm.generate(["Once", "A dog"], PARAMS),
        "a stream that had begun": lambda: list(stream),
        "stream": lambda: list(llm.stream("Once", PARAMS)),
        "chat": lambda: llm.chat([{"role": "user", "content": "Hi"}], PARAMS),
        "logits": lambda: llm.logits([1, 2, 3]),
        "another": lambda: LLM("tiny-stories", fast_path=fast, num_blocks=64),
    }.items():
        with pytest.raises(DeviceLost, match="cudaErrorIllegalAddress"):
            pytest.fail(f"{what}: {ask()!r}")
    # Nothing of these is left in the queue, and no block is held.
    assert not llm.engine.scheduler.has_work
    assert llm.engine.blocks.num_free == 64


class Learners:
    """An engine that is not the reference's."""

    def __init__(self, model, parts, config):
        self._engine = Engine(model, parts, config)
        self.add_request, self.abort = self._engine.add_request, self._engine.abort
        self.fail = lambda: None

    def step(self):
        self.fail()
        return self._engine.step()


def test_a_learner_s_engine_is_named_the_loss_of_too(lose):
    llm = LLM("tiny-stories", parts=Parts().replace(Engine=Learners), num_blocks=64)
    llm.engine.fail = lose()
    with pytest.raises(DeviceLost, match="cudaErrorIllegalAddress"):
        llm.generate("Once", PARAMS)


# ---------------- programs
STAND_IN = {
    "TINYVLLM_DEVICE": "cuda",
    "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "tests/course/card"), str(REPOSITORY)]),
}
ON_A_CARD = {
    "TINYVLLM_DEVICE": "cuda",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
}
machines = pytest.mark.parametrize(
    "machine",
    [
        pytest.param(STAND_IN, id="stand-in"),
        pytest.param(
            ON_A_CARD,
            id="card",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not is_gpu, reason="no NVIDIA GPU")],
        ),
    ],
)
ONE_LINE = re.compile(rf"tinyvllm: GPU 0 \(.*\) is lost to this process: {ILLEGAL}\..*{SANITIZER}.*\n")


def losing(machine, *arguments):
    return subprocess.run(
        [sys.executable, LOSING, *arguments],
        env=os.environ | machine,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )


@machines
def test_a_program_goes_on_without_its_card_and_ends_as_it_wants(machine):
    done = losing(machine, "0", "program")
    assert done.stderr == ""
    assert done.returncode == 7, done.stdout
    first, fast, *told, left, deleted = done.stdout.splitlines()
    assert (first, fast, left, deleted) == ("generated [12, 12]", "fast True", "left False", "deleted")
    assert [line.split()[0] for line in told] == ["generate", "again", "stream", "logits", "another"]
    for line in told:
        seconds = int(line.split()[1])
        assert seconds < 20
        assert ILLEGAL in line


@machines
@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "-m", "tiny-stories", "Once upon a time"],
        ["bench", "tiny-stories", "--no-transformers", "--prompt", "8", "--tokens", "8", "--batch", "2"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_command_says_it_in_one_line(machine, arguments):
    done = losing(machine, "5", *arguments)
    assert done.returncode == 1
    assert ONE_LINE.fullmatch(done.stderr), done.stderr


@machines
@pytest.mark.parametrize("step", ["1", "3"])
def test_a_server_that_loses_it_before_it_serves_says_it_in_one_line(machine, step):
    """While it warms up: nobody is told that it serves."""
    done = losing(machine, step, "serve", "tiny-stories", "--port", "0", "--num-blocks", "64")
    assert (done.returncode, done.stdout) == (1, "")
    assert ONE_LINE.fullmatch(done.stderr), done.stderr


@machines
def test_a_server_tells_its_clients_and_ends(machine, tmp_path):
    httpx = pytest.importorskip("httpx")
    now = tmp_path / "now"
    command = [
        sys.executable,
        LOSING,
        str(now),
        "serve",
        "tiny-stories",
        "--port",
        "0",
        "--num-blocks",
        "128",
    ]
    with subprocess.Popen(
        command,
        env=os.environ | machine | {"PYTHONUNBUFFERED": "1"},
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            said = server.stdout.readline()
            url = re.search(r"is served at (http://\S+)", said)[1]
            body = {
                "model": "tiny-stories",
                "prompt": "Once",
                "max_tokens": 900,
                "stream": True,
                "temperature": 1,
            }
            events = []
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
                for line in filter(None, answer.iter_lines()):
                    events.append(json.loads(line.removeprefix("data: ")))
                    if len(events) == 3:
                        now.touch()
            error = events[-1]["error"]
            assert (error["type"], error["code"]) == ("server_error", "unavailable")
            assert "the engine has failed" in error["message"]
            assert all("choices" in event for event in events[:-1])
            with contextlib.suppress(httpx.HTTPError):  # it has ended
                assert httpx.get(f"{url}/health", timeout=10).status_code == 503
            _, log = server.communicate(timeout=60)
        finally:
            server.kill()
    assert server.returncode == 1, log
    lines = [line for line in log.splitlines() if " INFO " not in line]
    assert len(lines) == 1, log
    assert f"is lost to this process: {ILLEGAL}" in lines[0]
    assert "DeviceLost" in lines[0]


def test_only_the_last_moments_of_a_process_are_silent():
    """A destructor that Python runs when it clears `sys`; what a program says before that is heard."""
    program = """
import atexit, os, sys
from tinyvllm_ref import lost_device
class Late:
    def __del__(self, write=os.write):
        write(2, b"noise")
sys.late = Late()
atexit.register(lambda: print("bye", file=sys.stderr))
if sys.argv[1] == "lost":
    lost_device._hush_destructors()
print("working", file=sys.stderr)
"""
    said = {}
    for state in ("lost", "working"):
        command = [sys.executable, "-c", program, state]
        done = subprocess.run(command, env=os.environ | STAND_IN, capture_output=True, text=True, timeout=300)
        said[state] = (done.returncode, done.stderr)
    assert said == {"lost": (0, "working\nbye\n"), "working": (0, "working\nbye\nnoise")}
