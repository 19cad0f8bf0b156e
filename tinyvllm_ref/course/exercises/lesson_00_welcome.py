"""Lesson 00: the first kernels, and how the course works."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyvllm_ref.course import figures
from tinyvllm_ref.course.exercise import Case, Exercise, Hints, Lesson, Mistake, Tolerance
from tinyvllm_ref.emulation import report as launch_reports

_ROUNDED = Tolerance(1e-6, 1e-6, "one float32 product and one sum; a card may round them together")

# ---------------- 00.1: who am I?


def _twice_cases(rng: np.random.Generator) -> list[Case]:
    def case(blocks: int, threads: int, group: str) -> Case:
        x = rng.standard_normal(blocks * threads).astype(np.float32)
        label = f"{blocks} block{'s' if blocks > 1 else ''} of {threads} threads"
        return Case(label, {"x": x, "blocks": blocks, "threads": threads}, group)

    return [
        case(3, 4, "small"),
        case(1, 8, "small"),
        case(4, 4, "small"),
        case(7, 5, "awkward"),
        case(int(rng.integers(11, 30)), 33, "awkward"),
        case(2, 1000, "awkward"),
    ]


def _run_twice(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    x, y = lab.input("x", inputs["x"]), lab.output(len(inputs["x"]))
    answer((inputs["blocks"],), (inputs["threads"],), (x, y))
    return {"y": lab.get(y, "y")}


def _twice(expression: str) -> str:
    return f'''twice = cp.RawKernel(r"""
extern "C" __global__ void twice(const float* x, float* y) {{
    int i = {expression};
    y[i] = 2.0f * x[i];
}}
""", "twice")
'''


_TWICE = Exercise(
    id="00.1",
    title="which element is mine?",
    answer="twice",
    kind="kernel",
    cases=_twice_cases,
    run=_run_twice,
    expected=lambda inputs: {"y": 2 * inputs["x"]},
    points={"small": 1, "awkward": 1, "clean": 1},
    hints=Hints(
        question="Take {case}. How many threads stand in the blocks before block 2? And which number has its first "
        "thread, if all threads are counted in a row from 0?",
        rule="In front of a thread stand all threads of the blocks before its own, blockIdx.x blocks of blockDim.x "
        "threads each, and then those before it in its own block, threadIdx.x of them.\n\n"
        "By hand, blocks of 4 threads: thread 3 of block 2 has 2 * 4 = 8 threads in earlier blocks and 3 in its own "
        "in front of it, so it takes element 8 + 3 = 11.",
        code="int i = blockIdx.x * ____ + ____;",
    ),
    mistakes=(
        Mistake(
            "threadIdx.x alone",
            _twice("threadIdx.x"),
            "threadIdx.x counts within a block, and begins at 0 again in the next one. So all blocks work on the same "
            "first few elements, and nobody on the rest.",
            "What is threadIdx.x of the first thread of block 1? Which element does that thread take?",
        ),
        Mistake(
            "block number added, not multiplied",
            _twice("blockIdx.x + threadIdx.x"),
            "Block 1 begins only one element further on than block 0, so the blocks overlap. Each block must begin "
            "where the one before ends: blockDim.x elements further on.",
            "Block 0 takes elements 0 to blockDim.x - 1. Where must block 1 begin?",
        ),
        Mistake(
            "number of blocks in place of their size",
            _twice("blockIdx.x * gridDim.x + threadIdx.x"),
            "gridDim.x is how many blocks there are. What stands in front of a thread is counted by how many threads "
            "a block has: blockDim.x.",
            "Which of gridDim.x and blockDim.x says how many threads one block has?",
        ),
        Mistake(
            "block and thread exchanged",
            _twice("threadIdx.x * blockDim.x + blockIdx.x"),
            "Here neighbouring threads take elements that lie blockDim.x apart. The block gives the large steps and "
            "the thread the small ones.",
            "Which element does thread 1 of block 0 take, and which would you like it to take?",
        ),
        Mistake(
            "counting from 1",
            _twice("blockIdx.x * blockDim.x + threadIdx.x + 1"),
            "Threads, blocks and elements all count from 0, so the first thread of the first block takes element 0 "
            "with nothing added.",
            "Which element does thread 0 of block 0 take?",
        ),
    ),
)

# ---------------- 00.2: a guard


def _axpy_cases(rng: np.random.Generator) -> list[Case]:
    def case(n: int, room: int, threads: int, group: str) -> Case:
        """The arrays have `room` elements, of which the kernel is to touch the first n."""
        inputs = {
            "a": float(np.float32(rng.uniform(-3, 3))),
            "x": rng.standard_normal(room).astype(np.float32),
            "y": rng.standard_normal(room).astype(np.float32),
            "n": n,
            "threads": threads,
        }
        spare = f" in arrays of {room:,}" if room > n else ""
        return Case(f"n = {n:,}{spare}, {threads} threads a block", inputs, group)

    return [
        case(5, 5, 4, "small"),
        case(5, 12, 4, "small"),
        case(8, 8, 8, "small"),
        case(1, 1, 32, "awkward"),
        case(1000, 1000, 256, "awkward"),
        case(int(rng.integers(300, 900)), 2000, 96, "awkward"),
    ]


def _run_axpy(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    n, threads = inputs["n"], inputs["threads"]
    x, y = lab.input("x", inputs["x"]), lab.inout(inputs["y"])
    answer((-(-n // threads),), (threads,), (np.float32(inputs["a"]), x, y, np.int32(n)))
    return {"y": lab.get(y, "y")}


def _expect_axpy(inputs: Any) -> dict[str, Any]:
    y, n = inputs["y"].astype(np.float64), inputs["n"]
    y[:n] += inputs["a"] * inputs["x"][:n].astype(np.float64)
    return {"y": y.astype(np.float32)}


def _axpy(body: str, index: str = "blockIdx.x * blockDim.x + threadIdx.x") -> str:
    return f'''axpy = cp.RawKernel(r"""
extern "C" __global__ void axpy(float a, const float* x, float* y, int n) {{
    int i = {index};
    {body}
}}
""", "axpy")
'''


_AXPY = Exercise(
    id="00.2",
    title="a guard",
    answer="axpy",
    kind="kernel",
    cases=_axpy_cases,
    run=_run_axpy,
    expected=_expect_axpy,
    points={"small": 1, "awkward": 1, "clean": 1},
    tolerance=_ROUNDED,
    hints=Hints(
        question="Take {case}. How many threads are launched in all, and what is the i of the last one? Is there such "
        "an element?",
        rule="A launch has whole blocks, so there may be more threads than elements. Every thread runs the same code, "
        "and one without an element must be kept from touching memory: if (i < n).\n\n"
        "By hand, n = 5 and blocks of 4: two blocks, 8 threads, i from 0 to 7. Elements 0 to 4 exist. The threads with "
        "i = 5, 6 and 7 have nothing to do.",
        code="if (i ____ n) y[i] = ____ * x[i] + ____;",
    ),
    mistakes=(
        Mistake(
            "no bounds guard",
            _axpy("y[i] = a * x[i] + y[i];"),
            "There are more threads than elements, and those without one read and write past the end of the arrays. On "
            "a card that may go unnoticed, and change what happens to lie there.",
            "How many threads does this case launch, and how many elements are there for them?",
        ),
        Mistake(
            "<= in the guard",
            _axpy("if (i <= n) y[i] = a * x[i] + y[i];"),
            "Elements are numbered 0 to n - 1, so element n is the first that does not exist. The guard is i < n.",
            "What is the number of the last element of an array of n?",
        ),
        Mistake(
            "last element left out",
            _axpy("if (i < n - 1) y[i] = a * x[i] + y[i];"),
            "i < n already stops before element n. With n - 1 the last element that exists is skipped.",
            "With n = 5, for which i is i < n - 1 true?",
        ),
        Mistake(
            "threadIdx.x alone",
            _axpy("if (i < n) y[i] = a * x[i] + y[i];", index="threadIdx.x"),
            "threadIdx.x begins at 0 in every block, so several blocks add to the same elements, and nobody to the rest.",
            "Which threads of which blocks have i = 0?",
        ),
        Mistake(
            "what was in y is lost",
            _axpy("if (i < n) y[i] = a * x[i];"),
            "The product is stored in place of what was in y, and it should be added to it.",
            "What should y[0] be if x[0] is 0?",
        ),
    ),
)

# ---------------- 00.3: how many blocks?


def _launch_cases(rng: np.random.Generator) -> list[Case]:
    def case(n: int, threads: int, group: str) -> Case:
        inputs = {
            "a": float(np.float32(rng.uniform(-3, 3))),
            "x": rng.standard_normal(n).astype(np.float32),
            "y": rng.standard_normal(n).astype(np.float32),
            "threads": threads,
        }
        return Case(f"n = {n:,}, {threads} threads a block", inputs, group)

    return [
        case(10, 4, "small"),
        case(11, 4, "small"),
        case(8, 4, "small"),
        case(9, 4, "awkward"),
        case(3, 256, "awkward"),
        case(1000, 256, "awkward"),
        case(int(rng.integers(1100, 5000)), 96, "awkward"),
        case(2048, 1024, "awkward"),
    ]


def _run_launch(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    x, y = lab.input("x", inputs["x"]), lab.inout(inputs["y"])
    returned = answer(inputs["a"], x, y, inputs["threads"])
    return {"y": lab.returned(returned, y, "y")}


def _expect_launch(inputs: Any) -> dict[str, Any]:
    product = inputs["a"] * inputs["x"].astype(np.float64)
    return {"y": (product + inputs["y"]).astype(np.float32)}


def _just_enough_blocks(inputs: Any, outputs: Any, observed: Any) -> str | None:
    n, threads = len(inputs["x"]), inputs["threads"]
    wanted = -(-n // threads)
    launches = [(report.grid[0], report.block[0]) for report in observed.launches]
    if launches == [(wanted, threads)]:
        return None
    if len(launches) != 1:
        return f"The values are right, and there were {len(launches)} launches; one is enough"
    blocks, size = launches[0]
    return (
        f"The values are right, and the launch has {blocks:,} block{'s' if blocks != 1 else ''} of {size:,} threads. "
        f"{wanted:,} of {threads:,} are just enough for n = {n:,}"
    )


def _launch(blocks: str = "(n + threads - 1) // threads", a: str = "np.float32(a)", back: str = "y") -> str:
    return f"""def add_scaled(a, x, y, threads=256):
    n = len(x)
    blocks = {blocks}
    axpy((blocks,), (threads,), ({a}, x, y, np.int32(n)))
    return {back}
"""


_LAUNCH = Exercise(
    id="00.3",
    title="a launch for any n",
    answer="add_scaled",
    kind="function",
    arguments=("a", "x", "y", "threads"),
    cases=_launch_cases,
    run=_run_launch,
    expected=_expect_launch,
    points={"small": 1, "awkward": 1},
    tolerance=_ROUNDED,
    verify=_just_enough_blocks,
    builds_on=("00.2",),
    hints=Hints(
        question="Take {case}. How many blocks do you need so that every element has a thread, and no block is without "
        "an element?",
        rule="The number of blocks is n / threads, rounded up. In whole numbers: (n + threads - 1) // threads. Adding "
        "threads - 1 lifts everything but exact multiples over the next step.\n\n"
        "By hand, blocks of 4: n = 8 gives 11 // 4 = 2, n = 9 gives 12 // 4 = 3, n = 10 gives 13 // 4 = 3.\n\n"
        "And the kernel's first parameter is a float of 4 bytes. A Python float has 8, so it is passed as "
        "np.float32(a).",
        code="blocks = (n + ____) // threads\naxpy((blocks,), (threads,), (np.____(a), x, y, np.int32(n)))",
    ),
    mistakes=(
        Mistake(
            "grid rounded down",
            _launch(blocks="max(1, n // threads)"),
            "n // threads rounds down, so the elements of the last, unfilled block have no thread. Round up.",
            "With n = 10 and blocks of 4, how many threads do 10 // 4 blocks have?",
        ),
        Mistake(
            "grid rounded to the nearest",
            _launch(blocks="max(1, round(n / threads))"),
            "Rounding to the nearest rounds down half of the time, and then the last elements have no thread. Round up.",
            "With n = 9 and blocks of 4, what is 9 / 4, rounded? How many threads is that?",
        ),
        Mistake(
            "one block too many",
            _launch(blocks="n // threads + 1"),
            "Where n is a multiple of the block's size, this launches a block whose threads all have nothing to do. "
            "The guard makes it harmless, and it is not free.",
            "With n = 8 and blocks of 4, how many blocks are enough?",
        ),
        Mistake(
            "a block for every element",
            _launch(blocks="n"),
            "Each block brings as many threads as you ask for, so n blocks are that many times too many. The guard "
            "stops them, after they have been started.",
            "How many threads do n blocks have together?",
        ),
        Mistake(
            "a Python float passed for a float",
            _launch(a="a"),
            "A Python float has 8 bytes and the kernel's float has 4. CuPy passes what it gets and does not convert, so "
            "on a card the kernel would read half of the number. np.float32(a) makes it the right size.",
            "How many bytes has a Python float, and how many has a float in C?",
        ),
        Mistake(
            "y not given back",
            _launch(back="None"),
            "The values are in y, and the function returns nothing. Parts of the engine fill an array and return that "
            "same array, so that calls can be chained.",
            "What does a Python function return when it has no return?",
        ),
    ),
)


# ---------------- the picture: the learner's own launch


def _picture(answer: Any, cp: Any) -> Any:
    """The blocks that the learner's function launches for 27 elements."""
    x, y = cp.ones(27, np.float32), cp.ones(27, np.float32)
    reports: list[Any] = []
    with launch_reports.collect(reports):
        answer(1.0, x, y, 8)
    return figures.blocks_over_array(27, reports[0].block[0], reports[0].grid[0])


LESSON = Lesson(
    number="00",
    slug="welcome",
    title="Welcome",
    part=0,
    minutes=30,
    exercises=(_TWICE, _AXPY, _LAUNCH),
    pictures={"00.3": _picture},
)
