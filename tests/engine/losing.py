"""The ``tinyvllm`` command, or a program, whose card is lost before one of the engine's steps.

    python tests/engine/losing.py 5 generate Once        # before the fifth step
    python tests/engine/losing.py /a/file serve MODEL    # before the first step after the file is there
    python tests/engine/losing.py 0 program              # what `program` below does

A kernel writes to an address that is nobody's. Where ``cupy`` is the stand-in of ``tests/course/card``, that is made
up: from then on launches and calls of the runtime raise what CuPy raises, and so do destructors.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import sys
import time
from pathlib import Path
from typing import Any

from tinyvllm_ref import LLM, SamplingParams, capturable_blas, dependent_launch, fast_path
from tinyvllm_ref.device import cp, is_gpu
from tinyvllm_ref.lost_device import DeviceLost
from tinyvllm_ref.model_runner import ModelRunner
from tinyvllm_ref.speed import card

ILLEGAL = r"""
extern "C" __global__ void write_to(unsigned long long address) { *(volatile int*)address = 1; }
"""
EXIT_CODE = 7
_lost = False


def lose() -> None:
    """Lose the card, as a faulty kernel does: nothing is raised here."""
    global _lost
    if _is_stand_in():
        _lost = True
    else:
        cp.RawKernel(ILLEGAL, "write_to")((1,), (1,), (cp.uint64(16),))


def lose_in_a_step(when: str) -> None:
    """Before the engine's step of this number, or the first one after a file of this name is there."""
    inner, numbers = ModelRunner.run, itertools.count(1)

    def run(self: Any, batch: Any) -> Any:
        number = next(numbers)
        if number == int(when) if when.isdecimal() else Path(when).exists() and not _lost:
            lose()
        return inner(self, batch)

    ModelRunner.run = run  # type: ignore[method-assign]


def program() -> None:
    """A program that goes on for a while without its card; its exit code is its own."""
    llm = LLM("tiny-stories", num_blocks=64, max_num_seqs=4)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    print(
        "generated", [len(output.outputs[0].token_ids) for output in llm.generate(["Once", "A dog"], params)]
    )
    print("fast", llm.engine.runner.fast is not None)
    lose()
    _ask(llm, params)
    print("left", llm.engine.scheduler.has_work)
    del llm
    gc.collect()
    cp.get_default_memory_pool().free_all_blocks()
    print("deleted")
    sys.exit(EXIT_CODE)


def _ask(llm: LLM, params: SamplingParams) -> None:
    """Everything that a lost card refuses, with the seconds that it takes, and what it says."""
    for what, work in {
        "generate": lambda: llm.generate(["Once", "A dog"], params),
        "again": lambda: llm.generate("Once", params),
        "stream": lambda: list(llm.stream("Once", params)),
        "logits": lambda: llm.logits([1, 2, 3]),
        "another": lambda: LLM("tiny-stories"),
    }.items():
        began = time.monotonic()
        try:
            work()
        except DeviceLost as error:
            print(what, int(time.monotonic() - began), "s:", error)


# ---------------- the stand-in
def _is_stand_in() -> bool:
    return "stand-in" in cp.__version__


def _prepare_stand_in() -> None:
    """The stand-in runs the fast path, too, and can be lost."""

    class Recording:
        def __init__(self, stream: Any, launches: Any) -> None:
            self.start = launches
            launches()

        def __del__(self) -> None:
            _fail_if_lost()

    fast_path.can_record = lambda: True
    dependent_launch.has_dependent_launch = lambda: False  # type: ignore[assignment]  # libcuda's, by ctypes
    fast_path.DecodeStep.unsupported = staticmethod(lambda *_: "its blocks would not all run at once")  # type: ignore
    fast_path.Recording = Recording  # type: ignore[misc, assignment]
    capturable_blas._Cublas = lambda size: capturable_blas._EmulatedBlas()  # type: ignore[misc, assignment]
    capturable_blas._recommended_workspace = lambda: 0
    card.read_bandwidth = card.matrix_rate = lambda: 1e12  # type: ignore[assignment]
    raw_kernel, stream = (importlib.import_module(f"cupy.{name}") for name in ("raw_kernel", "stream"))
    raw_kernel.launch = _failing(raw_kernel.launch, cp.cuda.driver.CUDADriverError)
    stream.Event.__del__ = lambda self: _fail_if_lost()
    stream.Event.synchronize = _failing(stream.Event.synchronize)
    for name, member in vars(cp.cuda.runtime).items():
        if callable(member) and not isinstance(member, type):
            setattr(cp.cuda.runtime, name, _failing(member))


def _failing(function: Any, kind: Any = None) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        _fail_if_lost(kind)
        return function(*args, **options)

    return call


def _fail_if_lost(kind: Any = cp.cuda.runtime.CUDARuntimeError) -> None:
    if _lost:
        raise (kind or cp.cuda.runtime.CUDARuntimeError)(700)


def main() -> None:
    when, *arguments = sys.argv[1:]
    assert is_gpu
    if _is_stand_in():
        _prepare_stand_in()
    lose_in_a_step(when)
    if arguments == ["program"]:
        program()
    from tinyvllm_ref import cli

    sys.argv = ["tinyvllm", *arguments]
    cli.main()


if __name__ == "__main__":
    main()
