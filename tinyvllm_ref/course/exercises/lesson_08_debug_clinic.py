"""Lesson 08: six kernels with one fault each. A stub is the patient; a mistake is a mend that does not heal."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyvllm_ref.course.exercise import (
    Case,
    EngineCard,
    Exercise,
    Hints,
    Lesson,
    Mistake,
    Tolerance,
    with_changes,
)

_POINTS = {"small": 1, "awkward": 1, "clean": 1}


def _kernel(name: str, before: str, body: str, after: str = "") -> str:
    """A whole answer cell: what stands around the region, and what is in it."""
    return f'{name} = cp.RawKernel(r"""\n{before}{body}{after}}}\n""", "{name}")\n'


def _text(name: str, before: str, after: str, body: str) -> Any:
    """Makes an answer of the mended body, with some things exchanged."""

    def answer(*changes: tuple[str, str]) -> str:
        changed = body
        changed = with_changes(changed, changes)
        return _kernel(name, before, changed, after)

    return answer


# ---------------- 08.1: out of bounds


def _smooth_cases(rng: np.random.Generator) -> list[Case]:
    def case(n: int, group: str) -> Case:
        return Case(f"n = {n:,}", {"x": rng.standard_normal(n).astype(np.float32) + 3}, group)

    return [
        case(5, "small"),
        case(256, "small"),
        case(1, "awkward"),
        case(257, "awkward"),
        case(1000, "awkward"),
    ]


def _run_smooth(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    n = len(inputs["x"])
    x, y = lab.input("x", inputs["x"]), lab.output(n)
    answer((-(-n // 128),), (128,), (x, y, np.int32(n)))
    return {"y": lab.get(y)}


def _expect_smooth(inputs: Any) -> dict[str, Any]:
    x = np.pad(inputs["x"].astype(np.float64), 1, mode="edge")
    return {"y": ((x[:-2] + x[1:-1] + x[2:]) / 3).astype(np.float32)}


_smooth = _text(
    "smooth",
    """extern "C" __global__ void smooth(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
""",
    "",
    """    if (i < n) {
        int left = i > 0 ? i - 1 : 0, right = i < n - 1 ? i + 1 : n - 1;
        y[i] = (x[left] + x[i] + x[right]) / 3.0f;
    }
""",
)

_BOUNDS = Exercise(
    id="08.1",
    title="the neighbour that is not there",
    answer="smooth",
    kind="kernel",
    cases=_smooth_cases,
    run=_run_smooth,
    expected=_expect_smooth,
    points=_POINTS,
    tolerance=Tolerance(1e-6, 1e-6, "three float32 additions and a division"),
    hints=Hints(
        question="Take {case}. Which elements of x does the thread with i = 0 read? And the last thread that has an element?",
        rule="The guard i < n protects y[i] and x[i]. It says nothing about x[i - 1] and x[i + 1], which two threads of the "
        "whole grid reach outside with. For these two the nearest element counts: at the left end x[0], at the right end "
        "x[n - 1]. Every y[i] must still be written.\n\n"
        "By hand, x = 3 6 9: y[0] = (3 + 3 + 6) / 3 = 4, y[1] = 6, y[2] = (6 + 9 + 9) / 3 = 8.",
        code="""if (i < n) {
    int left = i > 0 ? ____ : ____, right = i < n - 1 ? ____ : ____;
    y[i] = (x[left] + x[i] + x[right]) / 3.0f;
}""",
    ),
    mistakes=(
        Mistake(
            "a guard that hides the fault and drops elements",
            _smooth(
                ("    if (i < n) {\n", "    if (i > 0 && i < n - 1) {\n"),
                ("        int left = i > 0 ? i - 1 : 0, right = i < n - 1 ? i + 1 : n - 1;\n", ""),
                ("x[left] + x[i] + x[right]", "x[i - 1] + x[i] + x[i + 1]"),
            ),
            "The sanitizer is silent now, because the two threads that reached outside do nothing at all, and y[0] and y[n - 1] "
            "are never written. A guard must stop the access, not the work.",
            "Who writes y[0] now?",
        ),
        Mistake(
            "only one end mended",
            _smooth(("int left = i > 0 ? i - 1 : 0,", "int left = i - 1,")),
            "A report names one end, because a launch stops at its first fault. The other end has it too: x[-1] is as far "
            "outside as x[n].",
            "The fault at one end is gone. Which element does the thread at the other end read?",
            variants=(_smooth((", right = i < n - 1 ? i + 1 : n - 1;", ", right = i + 1;")),),
        ),
        Mistake(
            "outside counts as 0",
            _smooth(
                ("        int left = i > 0 ? i - 1 : 0, right = i < n - 1 ? i + 1 : n - 1;\n",
                 "        float left = i > 0 ? x[i - 1] : 0.0f, right = i < n - 1 ? x[i + 1] : 0.0f;\n"),
                ("x[left] + x[i] + x[right]", "left + x[i] + right"),
            ),
            "Nothing outside is read any more, and the ends come out too small: what is missing counts as the nearest element, not "
            "as 0.",
            "All elements are 3. What should y[0] be, and what is it?",
        ),
        Mistake(
            "a mean of two at the ends",
            _smooth(
                ("        int left = i > 0 ? i - 1 : 0, right = i < n - 1 ? i + 1 : n - 1;\n",
                 "        float sum = x[i], count = 1.0f;\n"
                 "        if (i > 0) { sum += x[i - 1]; count += 1.0f; }\n"
                 "        if (i < n - 1) { sum += x[i + 1]; count += 1.0f; }\n"),
                ("(x[left] + x[i] + x[right]) / 3.0f", "sum / count"),
            ),
            "A sensible choice, and not the one that was specified: at an end the nearest element counts twice, and the division is "
            "by 3. A mend must keep to the specification.",
            "x = 3 6. By the specification, what is y[0]?",
        ),
        Mistake(
            "the ends copied",
            _smooth(
                ("        int left = i > 0 ? i - 1 : 0, right = i < n - 1 ? i + 1 : n - 1;\n", ""),
                ("(x[left] + x[i] + x[right]) / 3.0f",
                 "i == 0 || i == n - 1 ? x[i] : (x[i - 1] + x[i] + x[i + 1]) / 3.0f"),
            ),
            "The ends are left as they are. By the specification they are means as well, in which the nearest element counts twice.",
            "x = 3 6. By the specification, what is y[0]?",
        ),
        Mistake(
            "the far end taken for a neighbour",
            _smooth(("int left = i > 0 ? i - 1 : 0, right = i < n - 1 ? i + 1 : n - 1;",
                     "int left = (i + n - 1) % n, right = (i + 1) % n;")),
            "That closes the curve to a ring, as Python's x[-1] would. Here what is missing counts as the nearest element.",
            "x = 3 6 9. Which element does your kernel use to the left of 3?",
        ),
    ),
)  # fmt: skip


# ---------------- 08.2: a barrier is missing


def _rotate_cases(rng: np.random.Generator) -> list[Case]:
    def case(rows: int, width: int, group: str) -> Case:
        label = f"{rows} head{'s' if rows > 1 else ''} of {width}"
        return Case(label, {"x": rng.standard_normal((rows, width)).astype(np.float32)}, group)

    return [
        case(1, 4, "small"),
        case(3, 64, "small"),
        case(2, 2, "awkward"),
        case(5, 80, "awkward"),
        case(2, 256, "awkward"),
        case(1, 1024, "awkward"),
    ]


def _run_rotate(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    rows, width = inputs["x"].shape
    x = lab.inout(inputs["x"])
    answer((rows,), (width,), (x,), shared_mem=4 * width)
    return {"x": lab.get(x)}


def _expect_rotate(inputs: Any) -> dict[str, Any]:
    left, right = np.split(inputs["x"], 2, axis=1)
    return {"x": np.concatenate([-right, left], axis=1)}


_rotate = _text(
    "rotate_half",
    """extern "C" __global__ void rotate_half(float* x) {
    extern __shared__ float head[];
    int t = threadIdx.x, half = blockDim.x / 2;
    int i = blockIdx.x * blockDim.x + t;
""",
    "",
    """    head[t] = x[i];
    __syncthreads();
    x[i] = t < half ? -head[t + half] : head[t - half];
""",
)

_MISSING = Exercise(
    id="08.2",
    title="someone was faster",
    answer="rotate_half",
    kind="kernel",
    cases=_rotate_cases,
    run=_run_rotate,
    expected=_expect_rotate,
    points=_POINTS,
    hints=Hints(
        question="Take {case}. Thread 0 reads the cell half a head further on. Which thread fills it, and what makes sure that it "
        "has done so?",
        rule="Shared memory is written by one thread and read by another, and between the two there is nothing. All threads must "
        "have written before any of them reads: one barrier, which every thread of the block passes.\n\n"
        "By hand, a head of 4: 1 2 3 4. After the barrier all four cells are filled; the result is -3 -4 1 2.",
        code="""head[t] = x[i];
____;
x[i] = t < half ? -head[t + half] : head[t - half];""",
    ),
    mistakes=(
        Mistake(
            "a barrier put inside the branch",
            _rotate(
                ("    __syncthreads();\n    x[i] = t < half ? -head[t + half] : head[t - half];\n",
                 "    if (t < half) {\n        __syncthreads();\n        x[i] = -head[t + half];\n    } else {\n"
                 "        x[i] = head[t - half];\n    }\n"),
            ),
            "Half of the threads never come to this barrier, and they read without waiting. A barrier is for all threads of the "
            "block; it belongs in front of the branch.",
            "Which threads pass your barrier, and which do not?",
        ),
        Mistake(
            "only the warp waits",
            _rotate(("__syncthreads()", "__syncwarp()")),
            "__syncwarp() holds the 32 threads of a warp together. A head wider than 32 is written by several warps, and nothing "
            "holds these together.",
            "With a head of 64, which warp fills the cell that thread 0 reads?",
        ),
        Mistake(
            "the barrier in front of the write",
            _rotate(("    head[t] = x[i];\n    __syncthreads();\n", "    __syncthreads();\n    head[t] = x[i];\n")),
            "All threads meet, and then everyone writes and reads as before. What must be finished when they meet is the writing.",
            "Between which two statements must everybody have caught up?",
        ),
        Mistake(
            "shared memory left out",
            _rotate(
                ("    head[t] = x[i];\n    __syncthreads();\n", ""),
                ("-head[t + half] : head[t - half]", "-x[i + half] : x[i - half]"),
            ),
            "The race has moved: x is read and written in place, so a thread may read what its partner has overwritten already. The "
            "copy in shared memory was there for a reason.",
            "When thread 0 has written x[0], what does the thread half a head further on read?",
        ),
    ),
)  # fmt: skip


# ---------------- 08.3: a barrier that some threads skip


def _max_cases(rng: np.random.Generator) -> list[Case]:
    def case(rows: int, n: int, threads: int, group: str) -> Case:
        x = -rng.uniform(1, 9, (rows, n)).astype(np.float32)  # all negative: 0 is no harmless filling
        label = f"{rows} row{'s' if rows > 1 else ''} of {n}, {threads} threads"
        return Case(label, {"x": x, "threads": threads}, group)

    return [
        case(1, 3, 4, "small"),
        case(2, 40, 64, "small"),
        case(1, 1, 32, "awkward"),
        case(3, 129, 256, "awkward"),
        case(2, 64, 64, "awkward"),
        case(2, int(rng.integers(520, 1000)), 1024, "awkward"),
        # As low as a row of scores may be: below any "large negative number", and above minus infinity.
        Case("1 row of 5 around -2e38, 8 threads",
             {"x": -rng.uniform(1.9e38, 2.1e38, (1, 5)).astype(np.float32), "threads": 8}, "awkward"),
    ]  # fmt: skip


def _run_max(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    rows, n = inputs["x"].shape
    x, out = lab.input("x", inputs["x"]), lab.output((rows, n))
    answer((rows,), (inputs["threads"],), (x, out, np.int32(n)), shared_mem=4 * inputs["threads"])
    return {"out": lab.get(out)}


def _reduced_together(inputs: Any, outputs: Any, observed: Any) -> str | None:
    """No thread leaves early, and the threads find the maximum together."""
    left = [text for report in observed.launches for text in report.warnings if "had returned" in text]
    if left:
        return (
            "The values are right, and threads without an element return before a __syncthreads() at which the others wait. "
            "CUDA wants every thread of the block at a barrier"
        )
    # A tree reads a row twice, and asks shared memory less than once an element: a warp's request is for 32 of them.
    alone = observed.total("global_read_bytes") > 3 * inputs["x"].nbytes
    requests = observed.total("shared_requests")
    moved = observed.total("shared_read_bytes") + observed.total("shared_write_bytes")
    one_by_one = inputs["threads"] >= 1024 and requests > inputs["x"].size and moved < 32 * requests
    if alone or one_by_one:
        return (
            "The values are right, and the reduction is gone: a thread goes through the whole row by itself. Keep the tree, and "
            "mend who passes its barriers"
        )
    return None


_minus_max = _text(
    "minus_max",
    """extern "C" __global__ void minus_max(const float* x, float* out, int n) {
    extern __shared__ float cell[];
    int t = threadIdx.x;
""",
    """    float most = cell[0];
    __syncthreads();
    if (t < n) out[blockIdx.x * n + t] = x[blockIdx.x * n + t] - most;
""",
    """    if (t < n) cell[t] = x[blockIdx.x * n + t];
    __syncthreads();
    for (int s = blockDim.x / 2; s > 0; s /= 2) {
        if (t < s && t + s < n) cell[t] = fmaxf(cell[t], cell[t + s]);
        __syncthreads();
    }
""",
)

_DIVERGENT = Exercise(
    id="08.3",
    title="those who never came",
    answer="minus_max",
    kind="kernel",
    cases=_max_cases,
    run=_run_max,
    expected=lambda inputs: {"out": inputs["x"] - inputs["x"].max(axis=1, keepdims=True)},
    points=_POINTS,
    verify=_reduced_together,
    hints=Hints(
        question="Take {case}. Which threads come to the first barrier, and what do the others do meanwhile?",
        rule="Only the load and the comparison depend on whether a thread has an element. The loop and its barriers do not: every "
        "thread of the block must go through them. So close the branch right after the load, and guard the comparison by itself.\n\n"
        "By hand, a row of 3 with 4 threads: s = 2: thread 0 compares cells 0 and 2; thread 1 has no cell 3 to compare with. "
        "s = 1: thread 0 compares cells 0 and 1. Thread 3 does nothing, and passes every barrier.",
        code="""if (t < n) cell[t] = ____;
____;
for (int s = blockDim.x / 2; s > 0; s /= 2) {
    if (____) cell[t] = fmaxf(cell[t], cell[t + s]);
    ____;
}""",
    ),
    mistakes=(
        Mistake(
            "a barrier in each branch",
            _minus_max(
                ("    if (t < n) cell[t] = x[blockIdx.x * n + t];\n    __syncthreads();\n",
                 "    if (t < n) {\n        cell[t] = x[blockIdx.x * n + t];\n        __syncthreads();\n    } else {\n"
                 "        __syncthreads();\n    }\n"),
            ),
            "Two barriers in two branches are two different barriers. CUDA allows __syncthreads() in a branch only if all threads "
            "of the block take the same way.",
            "Is there one place in your kernel that all threads of the block pass together?",
        ),
        Mistake(
            "the barriers taken out",
            _minus_max(("    __syncthreads();\n    for", "    for"), ("        __syncthreads();\n", "")),
            "Nobody waits in vain now, because nobody waits. The rounds of the tree run into each other: the barriers were needed, in "
            "another place.",
            "In the second round thread 0 reads cell 1. Who wrote it, and when?",
        ),
        Mistake(
            "empty cells filled with 0",
            _minus_max(
                ("if (t < n) cell[t] = x[blockIdx.x * n + t];", "cell[t] = t < n ? x[blockIdx.x * n + t] : 0.0f;"),
                ("if (t < s && t + s < n)", "if (t < s)"),
            ),
            "0 changes no sum, but it does change a maximum: in a row of negative numbers it wins. What changes no maximum is "
            "minus infinity, __int_as_float(0xff800000).",
            "All numbers of the row are negative. Which is the largest in your cells?",
        ),
        Mistake(
            "empty cells compared",
            _minus_max(("if (t < s && t + s < n)", "if (t < s)")),
            "The branch is mended, and the comparison now takes in cells that nobody filled, with whatever was there before.",
            "What is in cell n?",
        ),
        Mistake(
            "the others sent home",
            _minus_max(("    if (t < n) cell[t] =", "    if (t >= n) return;\n    cell[t] =")),
            "A return is a branch as well: the threads that left will never come to a barrier. Many cards forgive it, and CUDA's rules do "
            "not.",
            "How many threads come to your first barrier, and how many has the block?",
        ),
        Mistake(
            "the reduction taken out",
            """minus_max = cp.RawKernel(r\"""
extern "C" __global__ void minus_max(const float* x, float* out, int n) {
    const float* row = x + blockIdx.x * n;
    float most = __int_as_float(0xff800000);
    for (int k = 0; k < n; k++) most = fmaxf(most, row[k]);
    if (threadIdx.x < n) out[blockIdx.x * n + threadIdx.x] = row[threadIdx.x] - most;
}
\""", "minus_max")
""",
            "No barrier, no divergence: every thread searches the whole row by itself, n times the work. The fault was where the "
            "barriers stood, and not that there are any.",
            "How often does your kernel read each element of a row?",
            variants=(
                _minus_max(
                    ("    for (int s = blockDim.x / 2; s > 0; s /= 2) {\n"
                     "        if (t < s && t + s < n) cell[t] = fmaxf(cell[t], cell[t + s]);\n"
                     "        __syncthreads();\n    }\n",
                     "    if (t == 0)\n        for (int k = 1; k < n; k++) cell[0] = fmaxf(cell[0], cell[k]);\n    __syncthreads();\n"),
                ),
            ),
        ),
        Mistake(
            "empty cells filled with a large negative number",
            _minus_max(
                ("if (t < n) cell[t] = x[blockIdx.x * n + t];", "cell[t] = t < n ? x[blockIdx.x * n + t] : -1e30f;"),
                ("if (t < s && t + s < n)", "if (t < s)"),
            ),
            "-1e30 is a number like others: a float goes down to -3.4e38, and a row that lies below your number loses to it. What "
            "changes no maximum is minus infinity, __int_as_float(0xff800000).",
            "Is there a float that is less than your filling?",
            variants=(
                _minus_max(
                    ("if (t < n) cell[t] = x[blockIdx.x * n + t];", "cell[t] = t < n ? x[blockIdx.x * n + t] : -1e9f;"),
                    ("if (t < s && t + s < n)", "if (t < s)"),
                ),
            ),
        ),
    ),
)  # fmt: skip


# ---------------- 08.4: shared memory that nobody set


def _histogram_cases(rng: np.random.Generator) -> list[Case]:
    def case(rows: int, n: int, threads: int, group: str) -> Case:
        symbols = np.minimum(rng.integers(0, 256, (rows, n)), rng.integers(0, 300, (rows, n))).astype(
            np.uint8
        )
        symbols[:, -1] = 255
        label = f"{rows} text{'s' if rows > 1 else ''} of {n} bytes, {threads} threads"
        return Case(label, {"symbols": symbols, "threads": threads}, group)

    return [
        case(1, 8, 256, "small"),
        case(2, 700, 256, "small"),
        case(2, 33, 32, "awkward"),
        case(3, int(rng.integers(400, 900)), 96, "awkward"),
    ]


def _run_histogram(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    texts, n = inputs["symbols"].shape
    symbols, out = lab.input("symbols", inputs["symbols"]), lab.output((texts, 256), np.int32)
    answer((texts,), (inputs["threads"],), (symbols, out, np.int32(n)))
    return {"out": lab.get(out)}


def _expect_histogram(inputs: Any) -> dict[str, Any]:
    return {"out": np.stack([np.bincount(row, minlength=256) for row in inputs["symbols"]]).astype(np.int32)}


def _in_shared(inputs: Any, outputs: Any, observed: Any) -> str | None:
    if observed.total("shared_requests"):
        return None
    return "The counts are right, and shared memory is not used. Gather a block's counts in `count`, as the kernel did"


_ZERO = "    for (int b = t; b < 256; b += blockDim.x) count[b] = 0;\n"
_COUNT = "    for (int i = t; i < n; i += blockDim.x) atomicAdd(&count[symbols[blockIdx.x * n + i]], 1);\n"
_SYNC = "    __syncthreads();\n"

_histogram = _text(
    "histogram",
    """extern "C" __global__ void histogram(const unsigned char* symbols, int* out, int n) {
    __shared__ int count[256];
    int t = threadIdx.x;
""",
    "    for (int b = t; b < 256; b += blockDim.x) out[blockIdx.x * 256 + b] = count[b];\n",
    _ZERO + _SYNC + _COUNT + _SYNC,
)

_STORE = "    for (int b = t; b < 256; b += blockDim.x) out[blockIdx.x * 256 + b] = count[b];\n"


def _histogram_with(count: str, body: str, store: str = _STORE) -> str:
    """An answer in which `count` is declared in another way."""
    head = 'extern "C" __global__ void histogram(const unsigned char* symbols, int* out, int n) {\n'
    return _kernel("histogram", head + count + "    int t = threadIdx.x;\n", body, store)


_UNSET = Exercise(
    id="08.4",
    title="what was there before",
    answer="histogram",
    kind="kernel",
    cases=_histogram_cases,
    run=_run_histogram,
    expected=_expect_histogram,
    points=_POINTS,
    verify=_in_shared,
    hints=Hints(
        question="Take {case}. What is in count[7] before the first thread adds 1 to it? Who put it there?",
        rule="A __shared__ array begins with whatever the block before left in it. All 256 cells must be set to 0, by however many "
        "threads there are, so each thread takes every blockDim.x-th cell. And no thread may count before all cells are set: a "
        "barrier.\n\n"
        "By hand, with 96 threads: thread 0 sets cells 0, 96 and 192; thread 95 sets 95 and 191.",
        code="""for (int b = ____; b < 256; b += ____) count[b] = 0;
____;
for (int i = t; i < n; i += blockDim.x) atomicAdd(&count[symbols[blockIdx.x * n + i]], 1);
__syncthreads();""",
    ),
    mistakes=(
        Mistake(
            "one cell a thread",
            _histogram((_ZERO, "    if (t < 256) count[t] = 0;\n")),
            "That sets as many cells as there are threads. With fewer than 256 threads the rest keep what was in them.",
            "With 32 threads, who sets count[200]?",
        ),
        Mistake(
            "no barrier after setting",
            _histogram((_ZERO + _SYNC, _ZERO)),
            "A fast thread counts while a slow one is still setting cells to 0, and its count is wiped out. All cells must be 0 before "
            "anyone counts.",
            "Thread 0 has set its cells and counts its first byte. Has the cell of that byte been set?",
        ),
        Mistake(
            "set to 0 after counting",
            _histogram((_ZERO + _SYNC + _COUNT + _SYNC, _COUNT + _SYNC + _ZERO + _SYNC)),
            "The counting still begins with rubbish, and then all of it is wiped out. The cells must be 0 before the first atomicAdd.",
            "In which order do your kernel's threads set, count and store?",
        ),
        Mistake(
            "thread 0 sets all, and nobody waits",
            _histogram((_ZERO + _SYNC, "    if (t == 0)\n        for (int b = 0; b < 256; b++) count[b] = 0;\n")),
            "One thread sets all cells while the others have begun to count. One thread may do it, slowly, but the others must wait.",
            "While thread 0 is at cell 100, what does thread 1 do?",
        ),
        Mistake(
            "atomicAdd replaced by ++",
            _histogram(
                ("atomicAdd(&count[symbols[blockIdx.x * n + i]], 1)", "count[symbols[blockIdx.x * n + i]]++")
            ),
            "The cells are set now, and ++ reads, adds and writes in three steps: two threads with the same byte lose one of their "
            "counts. atomicAdd was right.",
            "Two threads meet the same byte at the same time. What do both read, and what do both write?",
        ),
        Mistake(
            "a start value for shared memory",
            _histogram_with("    __shared__ int count[256] = {0};\n", _COUNT + _SYNC),
            "A __shared__ variable can not be declared with values: it belongs to the whole block, and no thread is the one that "
            "would set it. The threads must write them, and wait.",
            "Which of the block's threads should do what your = {0} asks for?",
        ),
        Mistake(
            "count is each thread's own",
            _histogram_with("    int count[256] = {0};\n", _COUNT + _SYNC),
            "Without __shared__ every thread has 256 cells of its own, and sees its own counts alone. The cells must be the block's.",
            "Thread 3 has counted a byte. In whose count does it stand, and who stores it?",
        ),
        Mistake(
            "shared memory left out",
            _histogram_with(
                "",
                "    for (int b = t; b < 256; b += blockDim.x) out[blockIdx.x * 256 + b] = 0;\n" + _SYNC
                + _COUNT.replace("count[", "out[blockIdx.x * 256 + "),
                "",
            ),
            "Counting in out directly is right, and each addition now goes to global memory. Shared memory is near, and is "
            "there to gather in.",
            "Where do the counts of a block lie while it counts?",
        ),
    ),
)  # fmt: skip


# ---------------- 08.5: two reductions in one buffer


def _softmax_cases(rng: np.random.Generator) -> list[Case]:
    def case(rows: int, n: int, scale: float, group: str) -> Case:
        x = (rng.standard_normal((rows, n)) * scale).astype(np.float32)
        return Case(f"{rows} row{'s' if rows > 1 else ''} of {n}", {"x": x}, group)

    return [
        case(1, 4, 1, "small"),
        case(2, 64, 3, "small"),
        case(2, 1, 1, "awkward"),
        case(2, 7, 90, "awkward"),
        case(3, 300, 5, "awkward"),
        case(1, 1000, 200, "awkward"),
    ]


def _run_softmax(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    rows, n = inputs["x"].shape
    x, out = lab.input("x", inputs["x"]), lab.output((rows, n))
    answer((rows,), (n,), (x, out), shared_mem=4 * n)
    return {"out": lab.get(out)}


def _expect_softmax(inputs: Any) -> dict[str, Any]:
    x = inputs["x"].astype(np.float64)
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return {"out": (e / e.sum(axis=1, keepdims=True)).astype(np.float32)}


_softmax = _text(
    "softmax",
    """__device__ float reduce(float value, float* cell, bool maximum) {
    int t = threadIdx.x;
    cell[t] = value;
    __syncthreads();
    for (int active = blockDim.x; active > 1;) {
        int half = (active + 1) / 2;
        if (t + half < active) cell[t] = maximum ? fmaxf(cell[t], cell[t + half]) : cell[t] + cell[t + half];
        __syncthreads();
        active = half;
    }
    return cell[0];
}
extern "C" __global__ void softmax(const float* x, float* out) {
    extern __shared__ float cell[];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
""",
    "",
    """    float most = reduce(x[i], cell, true);
    __syncthreads();
    float e = expf(x[i] - most);
    float total = reduce(e, cell, false);
    out[i] = e / total;
""",
)

_SHARED = Exercise(
    id="08.5",
    title="two that share one buffer",
    answer="softmax",
    kind="kernel",
    cases=_softmax_cases,
    run=_run_softmax,
    expected=_expect_softmax,
    points=_POINTS,
    tolerance=Tolerance(1e-4, 1e-6, "float32 expf, and a sum of up to 1,000 terms in another order"),
    hints=Hints(
        question="Take {case}. Thread 0 has its maximum and goes on. Which cell does it write next, and who may still want to read "
        "that cell?",
        rule="Each reduction is right by itself. It ends with every thread reading cell[0], and begins with every thread writing its "
        "own cell; for thread 0 that is cell[0]. Between the reading of one and the writing of the next there must be a barrier, "
        "for all threads. (That is why your block_sum of lesson 06 has one after reading.)\n\n"
        "By hand: thread 0 reads 9 as the maximum and writes its exp(x - 9) into cell[0], say 0.5. A slower thread now reads 0.5 "
        "as the maximum.",
        code="""float most = reduce(x[i], cell, true);
____;
float e = expf(x[i] - most);
float total = reduce(e, cell, false);
out[i] = e / total;""",
    ),
    mistakes=(
        Mistake(
            "the barrier after the second reduction",
            _softmax(
                ("    __syncthreads();\n", ""),
                ("cell, false);\n", "cell, false);\n    __syncthreads();\n"),
            ),
            "That protects the sum, which nobody overwrites. It is the maximum that is overwritten while others still read it: the "
            "barrier belongs between the two reductions.",
            "Which of your two results can be overwritten before everybody has read it?",
        ),
        Mistake(
            "a second buffer that nobody asked for",
            _softmax(("    __syncthreads();\n", ""), ("reduce(e, cell, false)", "reduce(e, cell + blockDim.x, false)")),
            "Two buffers would do as well, but the launch asks for the bytes of one: the second lies outside of the block's shared "
            "memory.",
            "How many floats of shared memory does the launch ask for, and which does your second reduction use?",
        ),
        Mistake(
            "only thread 0 waits",
            _softmax(("    __syncthreads();\n", "    if (threadIdx.x == 0) __syncthreads();\n")),
            "It is thread 0 that is too fast, so it looks right to hold thread 0. But a barrier waits for all, and the others never "
            "come to this one.",
            "How many threads come to your barrier?",
        ),
        Mistake(
            "only the warp waits",
            _softmax(("    __syncthreads();\n", "    __syncwarp();\n")),
            "__syncwarp() holds 32 threads together. A wider row has several warps, and another warp may still have to read its maximum.",
            "A row of 64 has two warps. Which of them does your barrier hold?",
        ),
        Mistake(
            "the maximum taken out",
            _softmax(
                ("    float most = reduce(x[i], cell, true);\n    __syncthreads();\n", ""),
                ("expf(x[i] - most)", "expf(x[i])"),
            ),
            "With one reduction there is nothing to share, and mathematically the result is the same. In float32 exp of 89 is "
            "infinite already, and infinity divided by infinity is NaN. The maximum was there for a reason.",
            "What is expf(90.0f)?",
        ),
    ),
)  # fmt: skip


# ---------------- 08.6: an index that does not fit


def _offset_cases(rng: np.random.Generator) -> list[Case]:
    def case(label: str, layers: int, slots: int, width: int, n: int, group: str) -> Case:
        layer = np.append(rng.integers(0, layers, n - 1), layers - 1).astype(np.int32)
        slot = np.append(rng.integers(0, slots, n - 1), slots - 1).astype(np.int32)
        return Case(label, {"layer": layer, "slot": slot, "slots": slots, "width": width}, group)

    return [
        case("16 layers, 400,000 slots of 512 numbers", 16, 400_000, 512, 4, "small"),
        case("2 layers, 100 slots of 64 numbers", 2, 100, 64, 300, "awkward"),
        case("32 layers, 1,000,000 slots of 1,024 numbers", 32, 1_000_000, 1024, 257, "awkward"),
        case("80 layers, 30,000,000 slots of 1,024 numbers", 80, 30_000_000, 1024, 100, "awkward"),
    ]


def _run_offset(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    n = len(inputs["layer"])
    layer, slot = lab.input("layer", inputs["layer"]), lab.input("slot", inputs["slot"])
    offset = lab.output(n, np.int64)
    sizes = (np.int32(inputs["slots"]), np.int32(inputs["width"]), np.int32(n))
    answer((-(-n // 128),), (128,), (layer, slot, offset, *sizes))
    return {"offset": lab.get(offset)}


def _expect_offset(inputs: Any) -> dict[str, Any]:
    layer, slot = inputs["layer"].astype(np.int64), inputs["slot"].astype(np.int64)
    return {"offset": (layer * inputs["slots"] + slot) * inputs["width"]}


_offset = _text(
    "cache_offset",
    """extern "C" __global__ void cache_offset(const int* layer, const int* slot, long long* offset,
                                        int slots, int width, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
""",
    "",
    "    offset[i] = ((long long)layer[i] * slots + slot[i]) * width;\n",
)

_OVERFLOW = Exercise(
    id="08.6",
    title="an index that does not fit",
    answer="cache_offset",
    kind="kernel",
    cases=_offset_cases,
    run=_run_offset,
    expected=_expect_offset,
    points=_POINTS,
    hints=Hints(
        question="Take {case}. Multiply it out by hand for the last slot of the last layer. What is the largest number that an int "
        "can hold?",
        rule="An int holds up to 2,147,483,647. A product of two ints is an int, wherever it is stored afterwards: the type of "
        "offset does not help, because the arithmetic is over by then. One operand of the *first* product must be a long long; "
        "then everything after it is one too.\n\n"
        "By hand: 15 * 400,000 = 6,000,000 fits, times 512 is 3,072,000,000 and does not: as an int it is -1,222,967,296.",
        code="offset[i] = (____layer[i] * slots + slot[i]) * width;",
    ),
    mistakes=(
        Mistake(
            "the finished product made wide",
            _offset(("((long long)layer[i] * slots + slot[i]) * width", "(long long)((layer[i] * slots + slot[i]) * width)")),
            "The cast comes when the number is wrong already: the products inside the brackets are products of ints. Make an operand "
            "wide, not the result.",
            "In your expression, which multiplication is done in 64 bits?",
        ),
        Mistake(
            "only the last product made wide",
            _offset(("((long long)layer[i] * slots + slot[i]) * width", "(long long)(layer[i] * slots + slot[i]) * width")),
            "layer * slots is still a product of ints, and a cache with many slots overflows it. The very first operand must be wide.",
            "How large is layer * slots in the largest case?",
        ),
        Mistake(
            "unsigned instead of long long",
            _offset(("((long long)layer[i] * slots + slot[i]) * width", "((unsigned)layer[i] * slots + slot[i]) * width")),
            "An unsigned int holds twice as much, 4,294,967,295, and then it wraps around too. That moves the fault to where it is "
            "found later.",
            "How many numbers has the cache of the failing case, and how far does an unsigned int count?",
        ),
        Mistake(
            "through a float",
            _offset(("((long long)layer[i] * slots + slot[i]) * width", "(long long)(((float)layer[i] * slots + slot[i]) * width)")),
            "A float has 24 bits of precision: above 16,777,216 it can not tell neighbouring whole numbers apart. The offset is near "
            "the right one, and not it.",
            "Which whole number comes after 16,777,216 in float32?",
        ),
        Mistake(
            "only one of two products made wide",
            _offset(("((long long)layer[i] * slots + slot[i]) * width", "1LL * layer[i] * slots * width + slot[i] * width")),
            "The first product is wide now. slot * width beside it is a product of two ints still, and overflows by itself.",
            "Which multiplications does your line have, and which of them has a long long in it?",
        ),
    ),
)  # fmt: skip


LESSON = Lesson(
    number="08",
    slug="debug_clinic",
    title="The debug clinic",
    part=2,
    minutes=50,
    exercises=(_BOUNDS, _MISSING, _DIVERGENT, _UNSET, _SHARED, _OVERFLOW),
    engine=EngineCard(
        note="This lesson makes no part: it is about the parts that you have, and those to come."
    ),
)
