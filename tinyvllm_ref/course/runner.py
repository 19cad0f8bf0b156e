"""One answer on one case: what came out, what went wrong, and what was counted meanwhile."""

from __future__ import annotations

import copy
import ctypes
import functools
import linecache
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tinyvllm_ref import emulation
from tinyvllm_ref.emulation import report as launch_reports

from .exercise import Case
from .lab import InputChanged, Lab, WrongAnswerType

Run = Callable[[Any, Mapping[str, Any], Lab], dict[str, Any]]


class PythonTimeout(BaseException):
    """An answer's Python code ran too long. Not an Exception: an answer that catches all of these still ends."""


@dataclass(frozen=True)
class Fault:
    """What stopped a run, in words.

    Attributes
    ----------
    kind : str
        Name of the error's class: ``"DataRace"``, ``"CompileException"``, ``"TypeError"``.
    message : str
    source : tuple of (int, str, bool)
        Lines of the learner's source around the fault: number, text, whether it is the line (or one of two).
    in_kernel : bool
        Found by the checks of a kernel's run, so that the kernel can be run without these.
    details : tuple of str
        Further lines: who read, who wrote.
    called : tuple of (int, str, bool)
        Of a kernel's fault: the lines of the answer's Python code around the call that led to the launch.
    """

    kind: str
    message: str
    source: tuple[tuple[int, str, bool], ...] = ()
    in_kernel: bool = False
    details: tuple[str, ...] = ()
    called: tuple[tuple[int, str, bool], ...] = ()


@dataclass
class Observed:
    """What was counted in a run, over all its launches (emulation, full checks)."""

    launches: list[Any] = field(default_factory=list)
    allocations: int = 0
    peak_bytes: int = 0

    def total(self, name: str) -> int:
        """The sum of a counter of :class:`~tinyvllm_ref.emulation.LaunchReport` over the launches."""
        return sum(getattr(report, name) for report in self.launches)


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes
    ----------
    outputs : dict or None
        Plain values by name; None where there are none.
    fault : Fault or None
    observed : Observed
    """

    outputs: dict[str, Any] | None
    fault: Fault | None
    observed: Observed = field(default_factory=Observed)


def run_case(run: Run, answer: Any, case: Case, cp: Any, seconds: float) -> Outcome:
    """Call an answer on a case, with full checks where it is emulated.

    Where the checks stop a kernel it is run once more without them: its values tell of the mistake as well.
    """
    if not getattr(cp, "is_emulation", False):
        return _attempt(run, answer, case, cp, seconds)
    warm_up()
    with emulation.checks("full"):
        outcome = _attempt(run, answer, case, cp, seconds)
    if outcome.fault is not None and outcome.fault.in_kernel:
        with emulation.checks("fast"):
            again = _attempt(run, answer, case, cp, seconds)
        return Outcome(again.outputs, outcome.fault, outcome.observed)
    return outcome


@functools.cache
def warm_up() -> None:
    """Build the emulation's runtime and start its compiler, so that no answer's time is spent on that."""
    for mode in ("full", "fast"):
        with emulation.checks(mode):
            emulation.RawKernel('extern "C" __global__ void nothing() {}', "nothing").compile()


def _attempt(run: Run, answer: Any, case: Case, cp: Any, seconds: float) -> Outcome:
    observed = Observed()
    lab = Lab(cp)
    inputs = copy.deepcopy(dict(case.inputs))
    try:
        with _observing(observed, lab), time_limit(seconds):
            outputs = run(answer, inputs, lab)
            cp.cuda.runtime.deviceSynchronize()
            lab.check_inputs()
            _check_host_inputs(case.inputs, inputs)
        return Outcome(_plain(outputs), None, observed)
    except (Exception, PythonTimeout) as error:
        return Outcome(None, describe(error, answer), observed)


def _check_host_inputs(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Raise InputChanged where an input on the host is not what it was."""
    for name, value in before.items():
        now = after.get(name)
        if isinstance(value, np.ndarray):
            if value.tobytes() != np.asarray(now).tobytes():
                different = np.flatnonzero(np.ravel(value) != np.ravel(np.asarray(now)))
                index = np.unravel_index(int(different[0]) if len(different) else 0, value.shape)
                raise InputChanged(name, tuple(map(int, index)), value[index], np.asarray(now)[index])
        elif isinstance(value, list | dict) and repr(value) != repr(now):
            raise WrongAnswerType(f"`{name}` is an input, and the answer changed it; work on a copy")


@contextmanager
def _observing(observed: Observed, lab: Lab) -> Iterator[None]:
    """Count launches (in emulation) and allocations inside of the block, less those of the lab itself."""
    cp = lab.cp
    pool = cp.get_default_memory_pool()
    before = pool.used_bytes()

    def allocate(size: int) -> Any:
        pointer = pool.malloc(size)
        if not lab.preparing:
            observed.allocations += 1
            observed.peak_bytes = max(observed.peak_bytes, pool.used_bytes() - before)
        return pointer

    emulated = getattr(cp, "is_emulation", False)
    with cp.cuda.using_allocator(allocate), launch_reports.collect(observed.launches if emulated else []):
        yield


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise PythonTimeout in this thread after `seconds`, and KernelTimeout in a kernel a little earlier."""
    with emulation.timeout(seconds):
        if threading.current_thread() is threading.main_thread():
            limit = _alarm(seconds + 1.0)
        else:
            limit = _asynchronous(seconds + 1.0)
        with limit:
            yield


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(signum: int, frame: Any) -> None:
        raise PythonTimeout

    before = signal.signal(signal.SIGALRM, ring)
    # Again and again: one that falls into a destructor, where exceptions are dropped, is not lost.
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _asynchronous(seconds: float) -> Iterator[None]:
    thread = ctypes.c_ulong(threading.get_ident())
    done = threading.Event()

    def ring() -> None:
        if not done.wait(seconds):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(PythonTimeout))

    watch = threading.Thread(target=ring, daemon=True)
    watch.start()
    try:
        yield
    finally:
        done.set()
        watch.join()


def _plain(value: Any) -> Any:
    """Outputs as plain values: NumPy scalars become Python's, tuples lists; anything else is refused."""
    if isinstance(value, np.ndarray) or value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, int):
        return int(value)
    if hasattr(value, "get") and hasattr(value, "dtype"):  # a device array
        return np.asarray(value.get())
    raise WrongAnswerType(
        f"the answer gave {type(value).__name__} {value!r:.80}; numbers, strings, lists or arrays are expected"
    )


def describe(error: BaseException, answer: Any = None) -> Fault:
    """An error as a Fault, with the learner's own line."""
    kind = type(error).__name__
    if isinstance(error, emulation.KernelError):
        first, details = _kernel_words(str(error))
        lines, called = _kernel_lines(error, answer), _calling_lines(error)
        return Fault(kind, first, lines, in_kernel=True, details=details, called=called)
    if kind == "CompileException":
        return _compile_fault(str(error), str(getattr(error, "source", "")), answer)
    lines = _python_lines(error)
    if isinstance(error, PythonTimeout):
        return Fault(
            kind, "The Python code did not end; most often a loop whose condition stays true.", lines
        )
    return Fault(kind, str(error) or "(no message)", lines)


def _kernel_words(text: str) -> tuple[str, tuple[str, ...]]:
    """The first line of a kernel's fault, and who did what where; the source's lines are shown elsewhere."""
    first, *rest = text.split("\n")
    details: list[str] = []
    for line in map(str.strip, rest):
        place = re.match(r"line (\d+):", line)
        if place and details:
            details[-1] += f", line {place[1]}"
        elif line and not place:
            details.append(line)
    return re.sub(r"^kernel `\w+`: ", "", first), tuple(details)


_COMPILER_LINE = re.compile(r"^[^\n(]*\((\d+)\): (?:catastrophic |fatal )?error:? ?(.*)$", re.MULTILINE)


def _compile_fault(message: str, source: str, answer: Any) -> Fault:
    """A compiler's messages: the first error, its line, and how many there are."""
    source = source or str(getattr(answer, "code", ""))
    found = _COMPILER_LINE.findall(message)
    if not found:
        return Fault("CompileException", message.strip())
    line, first = int(found[0][0]), found[0][1]
    more = (f"{len(found) - 1} more error{'s' if len(found) > 2 else ''} after it",) if len(found) > 1 else ()
    excerpt = _excerpt(source.split("\n"), {line}) if source else ()
    first = _READ_ONLY.sub("assignment to an array that is declared const", first)
    where = f"line {line} of the kernel"
    if isinstance(answer, str) and line > answer.count("\n"):
        where = "in the kernel that calls your function (is its name right, is every brace closed?)"
    # A compiler that misses something may name the line of the word that came instead, which is the next one.
    texts = [text for number, text, _ in excerpt if number in (line - 1, line)]
    return Fault("CompileException", f"{where}: {first}", excerpt, details=(*_remarks(first, *texts), *more))


# g++ and clang write the whole element out, as they read it.
_READ_ONLY = re.compile(
    r"assignment of read-only location '.*'"
    r"|read-only variable is not assignable|cannot assign to variable '.*' with const-qualified type.*"
)

_UNKNOWN = (
    r"['\"]({0})['\"] (was not declared|is undefined)|undeclared identifier '({0})'"  # g++, NVRTC; clang
)

# What a compiler says of a slip that Python readers make, and what to look for.
_REMARKS = (
    (
        r"expected '[^']*' or ';'|expected ';'",
        "a ; may be missing at the end of this line or of the one before",
    ),
    (
        r"'operator.*(uint3|dim3)|operand.*(uint3|dim3)",
        "blockIdx, threadIdx and blockDim are triples: write .x",
    ),
    (r"expected '\(' (before|after 'if'|after 'while')", "C++ wants parentheses: if (...), while (...)"),
    (r"expected unqualified-id|expected '\}'|at end of input", "a brace may be missing, or one too many"),
    (
        r"declared const|must be a modifiable lvalue",
        "what the parameter list calls const is only read; which array is to be written?",
    ),
    (
        r"invalid types '.*' for array subscript|subscripted value is not an array|must have pointer-to-object type",
        "an array is flat here: one index, row * columns + column",
    ),
    (
        _UNKNOWN.format(r"shared|sync(threads|warp)|shfl\w*"),
        "CUDA's own names begin with two underscores: __syncthreads()",
    ),
    (
        _UNKNOWN.format("INFINITY"),
        "that is of a header which a card's compiler has not; __int_as_float(0x7f800000) is infinity",
    ),
    (
        _UNKNOWN.format("True|False|None|elif"),
        "that is Python's; C++ writes true, false, nullptr, else if",
    ),
    (
        r"initializer not allowed for __shared__",
        "the threads of the block must write its first values, and wait",
    ),
)


def _remarks(message: str, *lines: str) -> tuple[str, ...]:
    remarks = [remark for pattern, remark in _REMARKS if re.search(pattern, message)]
    parts = [line.partition("//") for line in lines]
    if any(slashes and sum(map(code.count, "([")) > sum(map(code.count, ")]")) for code, slashes, _ in parts):
        remarks.insert(0, "// begins a comment in C++; / between whole numbers divides as Python's // does")
    return tuple(remarks)


_AROUND = 2  # lines shown before and after a fault


def _kernel_lines(error: Any, answer: Any) -> tuple[tuple[int, str, bool], ...]:
    """The lines of a kernel's source that a fault names."""
    code = answer if isinstance(answer, str) else getattr(answer, "code", None)
    marked = {error.line, *([error.other.line] if error.other is not None else [])} - {0}
    if (
        not isinstance(code, str)
        or not marked
        or any(site.file for site in (error.site, error.other) if site)
    ):
        return tuple((line, text, True) for line, text in [(error.line, error.source_line)] if line)
    return _excerpt(code.split("\n"), marked)


def _excerpt(lines: list[str], marked: set[int]) -> tuple[tuple[int, str, bool], ...]:
    near = {n for line in marked for n in range(line - _AROUND, line + _AROUND + 1) if 1 <= n <= len(lines)}
    return tuple((n, lines[n - 1], n in marked) for n in sorted(near))


def _calling_lines(error: BaseException) -> tuple[tuple[int, str, bool], ...]:
    """The last line in a traceback of the cell that was judged: the outermost, not one that it builds on."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith("<exercise")
    ]
    own = [frame.lineno for frame in frames if frame.filename == frames[0].filename and frame.lineno]
    if not own:
        return ()
    lines = [line.rstrip("\n") for line in linecache.getlines(frames[0].filename)]
    return _excerpt(lines, {own[-1]})


def _python_lines(error: BaseException) -> tuple[tuple[int, str, bool], ...]:
    """The last line of the answer's own cell in a traceback."""
    if isinstance(error, SyntaxError) and error.filename and error.filename.startswith("<exercise"):
        lines = [line.rstrip("\n") for line in linecache.getlines(error.filename)] or [error.text or ""]
        return _excerpt(lines, {error.lineno or 1})
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith("<exercise") and frame.lineno:
            lines = [line.rstrip("\n") for line in linecache.getlines(frame.filename)]
            return _excerpt(lines, {frame.lineno})
    return ()
