"""The contained process: runs an answer, and tells the judge what came out.

It sees the answer, the source of the exercise's `run` and the inputs of one case at a time; not the expected values,
the tolerance, the mistakes, the seed. Messages come on standard input and go to what standard output was when it
began (:mod:`.wire`). An answer's own output goes nowhere.

A kernel, a text or a value is *made* here and *run* in a second process of this kind, in which nothing of the
learner's Python has been: what it patched is gone. A function or a class is made and run in one.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, BinaryIO

from . import wire
from .limits import Limits, apply

_LONGEST = 4000  # characters of a message


def main() -> None:
    """Serve messages until standard input ends."""
    os.umask(0o022)
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    settings = json.loads(sys.argv[1])
    if settings["open_folder"]:  # bubblewrap made it, and its owner is who this still is
        os.chmod(settings["open_folder"], 0o1777)
    apply(Limits(**settings["limits"]), settings["uid"])
    prepare_folders(settings["seed"])
    runner = _Runner()
    os.dup2(nothing, 2)  # until here an error is the grader's own
    while (message := receive(incoming)) is not None:
        send(outgoing, runner.answer_to(message))
    os._exit(0)  # what a learner registered for the end of the process does not run


def prepare_folders(seed: str) -> None:
    """The home of this process alone, with its own kernel cache, begins as a copy of what needs no learner."""
    shutil.copytree(seed, os.environ["TINYVLLM_HOME"])
    os.makedirs(os.environ["TMPDIR"], mode=0o700, exist_ok=True)
    os.chdir(os.environ["TMPDIR"])


def receive(file: BinaryIO) -> Any:
    header = file.read(wire.HEADER.size)
    if len(header) < wire.HEADER.size:
        return None
    document, blob = wire.HEADER.unpack(header)
    return wire.unpack(file.read(document), file.read(blob))


def send(file: BinaryIO, reply: Any) -> None:
    file.write(wire.pack(reply))
    file.flush()


class _Runner:
    """One answer and what is done with it."""

    def __init__(self) -> None:
        from tinyvllm_ref import emulation
        from tinyvllm_ref.course import runner

        self.cp = emulation
        self.tools = runner
        self.task = SimpleNamespace()
        self.run: Any = None
        self.answer: Any = None

    def answer_to(self, message: dict[str, Any]) -> dict[str, Any]:
        """The reply to one message; whatever happens becomes a fault."""
        work = {
            "probe": _probe,
            "make": self._make,
            "run": self._take,
            "predict": self._predict,
            "case": self._case,
        }
        try:
            return work[message["do"]](message)
        except BaseException as error:  # SystemExit and the runner's own timeout as well
            return {"fault": _fault(self.tools, error, self.answer)}

    def _set_task(self, message: dict[str, Any]) -> None:
        self.task = SimpleNamespace(**message["task"])

    def _make(self, message: dict[str, Any]) -> dict[str, Any]:
        """Run the cell; a kernel, a text or a value is sent back, to be run elsewhere."""
        self._set_task(message)
        answer = self._answer_of(message)
        if self.task.kind == "kernel":
            if type(answer) is not self.cp.RawKernel:
                raise TypeError(f"`{self.task.answer}` is {type(answer).__name__}; it must be a cp.RawKernel")
            return {"made": _kernel_parts(answer)}
        if self.task.kind == "source":
            return {"made": str.__str__(answer)}
        return {"made": self.tools._plain(answer)}

    def _take(self, message: dict[str, Any]) -> dict[str, Any]:
        """Take what was made, or make it, and the exercise's `run`."""
        self._set_task(message)
        self.tools.warm_up()
        self.run = _function(message["run"], message["run_name"])
        if "made" not in message:
            self.answer = self._answer_of(message)
        elif self.task.kind == "kernel":
            parts = message["made"]
            self.answer = self.cp.RawKernel(
                parts["code"],
                parts["name"],
                tuple(parts["options"]),
                _expressions=tuple(parts["expressions"]),
            )
            if parts["shared"] is not None:
                self.answer.max_dynamic_shared_size_bytes = parts["shared"]
        else:
            self.answer = message["made"]
        return {"ready": True}

    def _answer_of(self, message: dict[str, Any]) -> Any:
        from tinyvllm_ref.course import cells
        from tinyvllm_ref.course.kinds import OutsideNames, check_kind

        given = _given(message, self.cp)
        with self.tools.time_limit(self.task.seconds):
            for id, source in message["before"]:
                made = cells.run_alone(source, f"exercise {id}", given)
                given |= {name: value for name, value in made.items() if not name.startswith("__")}
            unknown = cells.outside_names(message["source"], given)
            if unknown:
                raise OutsideNames(unknown, self.task)
            namespace = cells.run_alone(message["source"], f"exercise {self.task.id}", given)
            answer = namespace.get(self.task.answer)
            check_kind(self.task, answer)
        return answer

    def _predict(self, message: dict[str, Any]) -> dict[str, Any]:
        """Run a prediction's cell, and note what it predicts."""
        from tinyvllm_ref.course import cells

        self._set_task(message)
        said: dict[str, Any] = {}

        def predict(id: str, **numbers: Any) -> None:
            if id == self.task.id:
                said.update(numbers)

        with self.tools.time_limit(self.task.seconds):
            cells.run_alone(
                message["source"],
                f"exercise {self.task.id}",
                {**_given(message, self.cp), "predict": predict},
            )
        return {"said": {str(name): _number(value) for name, value in said.items()}}

    def _case(self, message: dict[str, Any]) -> dict[str, Any]:
        from tinyvllm_ref.course.exercise import Case

        case = Case("", message["inputs"])
        outcome = self.tools.run_case(self.run, self.answer, case, self.cp, self.task.seconds)
        return {
            "outputs": outcome.outputs,
            "fault": _fault_parts(outcome.fault),
            "allocations": outcome.observed.allocations,
            "peak_bytes": outcome.observed.peak_bytes,
            "launches": [_report_parts(report) for report in outcome.observed.launches],
        }


def _given(message: dict[str, Any], cp: Any) -> dict[str, Any]:
    """What a cell may name: np, cp, and the earlier parts that the exercise uses."""
    import importlib

    import numpy as np

    given: dict[str, Any] = {"np": np, "cp": cp, **message["texts"]}
    for name, (module, attribute) in message["callables"].items():
        found: Any = importlib.import_module(module)
        if attribute:
            found = getattr(found, attribute)
        else:  # made of other parts
            found = getattr(found.Parts.reference(), name)
        given[name] = found
    return given


def _function(source: str, name: str) -> Any:
    namespace: dict[str, Any] = {}
    exec(compile("from __future__ import annotations\n" + source, "<run>", "exec"), namespace)
    return namespace[name]


def _kernel_parts(kernel: Any) -> dict[str, Any]:
    shared = kernel._dynamic_limit
    return {
        "code": str(kernel.code),
        "name": str(kernel.name),
        "options": [str(option) for option in kernel.options],
        "expressions": [str(name) for name in kernel._expressions],
        "shared": shared if type(shared) is int and shared > 48 << 10 else None,
    }


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and not isinstance(value, bool | str) else None


def _fault(tools: Any, error: BaseException, answer: Any) -> dict[str, Any] | None:
    try:
        return _fault_parts(tools.describe(error, answer))
    except BaseException:  # an error whose own text raises
        return {"kind": "Exception", "message": "", "source": [], "in_kernel": False, "details": []}


def _fault_parts(fault: Any) -> dict[str, Any] | None:
    if fault is None:
        return None
    return {
        "kind": str(fault.kind)[:100],
        "message": str(fault.message)[:_LONGEST],
        "source": [[int(n), str(text)[:400], bool(here)] for n, text, here in fault.source[:12]],
        "in_kernel": bool(fault.in_kernel),
        "details": [str(text)[:400] for text in fault.details[:6]],
    }


def _report_parts(report: Any) -> dict[str, Any]:
    parts = {field.name: getattr(report, field.name) for field in fields(report)}
    parts["grid"], parts["block"] = list(report.grid), list(report.block)
    parts["warnings"] = list(report.warnings)
    parts["lines"] = [[getattr(line, field.name) for field in fields(line)] for line in report.lines]
    return parts


def _probe(message: dict[str, Any]) -> dict[str, Any]:
    """What can be reached from here: files to read, folders to write to, the network, who this is."""
    import socket

    readable = [path for path in message["read"] if _can(path, os.O_RDONLY)]
    writable = [path for path in message["write"] if _can_write(path)]
    with socket.socket() as connection:
        connection.settimeout(2)
        try:
            connection.connect(tuple(message["connect"]))
            network = True
        except OSError:
            network = False
    return {
        "readable": readable,
        "writable": writable,
        "network": network,
        "uid": os.getuid(),
        "environment": sorted(os.environ),
    }


def _can(path: str, flags: int) -> bool:
    try:
        os.close(os.open(path, flags))
    except OSError:
        return False
    return True


def _can_write(folder: str) -> bool:
    import tempfile

    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    main()
