"""Lesson 00: the first kernels, and how the course works."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyvllm_ref.course import figures
from tinyvllm_ref.course.exercise import Case, Exercise, Hints, Lesson, Mistake, Tolerance
from tinyvllm_ref.emulation import report as launch_reports

_ROUNDED = Tolerance(
    1e-6, 1e-6, "float32 keeps some 7 digits; a card may round once, after the sum, or the product as well"
)

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
            variants=(_twice("blockIdx.x + blockDim.x + threadIdx.x"),),
        ),
        Mistake(
            "the block's size written as a number",
            _twice("blockIdx.x * 4 + threadIdx.x"),
            "The picture has blocks of 4. Whoever launches the kernel chooses how many threads a block has, and the "
            "kernel learns it from blockDim.x.",
            "How many threads has a block in the case that failed, and how many does your kernel count?",
        ),
        Mistake(
            "the thread left out",
            _twice("blockIdx.x * blockDim.x"),
            "That is where the block begins. All threads of a block get the same number, and so they all work on "
            "its first element.",
            "Which element does thread 0 of block 2 take, and which does thread 3 of block 2 take?",
            variants=(_twice("blockIdx.x"),),
        ),
        Mistake(
            "multiplied where it should be added",
            _twice("blockIdx.x * threadIdx.x"),
            "A product is 0 as soon as one of its factors is, so all threads of block 0, or the first threads of all "
            "blocks, get the same element. Multiply to find where the block begins, then *add* the thread.",
            "Which element does thread 3 of block 0 take?",
            variants=(
                _twice("blockDim.x * threadIdx.x"),
                _twice("blockIdx.x * blockDim.x * threadIdx.x"),
            ),
        ),
        Mistake(
            "the sum taken before the product",
            _twice("blockIdx.x * (blockDim.x + threadIdx.x)"),
            "With these brackets the thread's number is multiplied by the block's as well. Only the size of a block is: "
            "first the product, then the thread is added.",
            "Take block 0. Which elements do its threads get?",
        ),
        Mistake(
            "the answer for one thread",
            _twice("2 * 4 + 3"),
            "For thread 3 of block 2 that is right. All threads run this same line, so all of them take that one "
            "element. Write it with the names from the table.",
            "Which of these numbers are other ones in another thread?",
            variants=(_twice("11"),),
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
            "Threads, blocks and elements all count from 0, so the first thread of the first block takes element 0, "
            "with nothing added or taken away.",
            "Which element does thread 0 of block 0 take?",
            variants=(
                _twice("(blockIdx.x + 1) * blockDim.x + threadIdx.x"),
                _twice("blockIdx.x * blockDim.x + threadIdx.x - 1"),
                _twice("(blockIdx.x - 1) * blockDim.x + threadIdx.x"),
            ),
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


def _side_by_side(inputs: Any, outputs: Any, observed: Any) -> str | None:
    """A warp reads x and y once each; one thread that does all elements reads for each of them."""
    warps = sum(report.grid[0] * -(-report.block[0] // 32) for report in observed.launches)
    reads = observed.total("global_read_requests")
    if reads <= 4 * warps:
        return None
    return (
        f"The values are right, and the kernel read memory {reads:,} times, one after the other; {2 * warps:,} are "
        "enough where each thread does its own element"
    )


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
    verify=_side_by_side,
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
            variants=(
                _axpy("if (i < n); y[i] = a * x[i] + y[i];"),
                _axpy("if (threadIdx.x < n) y[i] = a * x[i] + y[i];"),
                _axpy("if (i < blockDim.x * gridDim.x) y[i] = a * x[i] + y[i];"),
            ),
        ),
        Mistake(
            "the size of a block in place of n",
            _axpy("if (i < blockDim.x) y[i] = a * x[i] + y[i];"),
            "blockDim.x is how many threads a block has, and i counts through all blocks: this lets the first block work "
            "and no other. What counts is how many elements there are: n.",
            "With n = 5 and blocks of 4, which thread has i = 4, and may it work?",
        ),
        Mistake(
            "the guard turned round",
            _axpy("if (i >= n) y[i] = a * x[i] + y[i];"),
            "The line behind an if runs where its condition is true. Here that is for the threads *without* an element.",
            "With n = 5, is your condition true for i = 2, and should it be?",
            variants=(_axpy("if (i > n) y[i] = a * x[i] + y[i];"),),
        ),
        Mistake(
            "only element n guarded",
            _axpy("if (i == n) return; y[i] = a * x[i] + y[i];"),
            "The thread with i = n stops, and those after it go on. There may be up to a block less one of them.",
            "With n = 5 and blocks of 4, which threads have no element?",
            variants=(_axpy("if (i != n) y[i] = a * x[i] + y[i];"),),
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
        Mistake(
            "y counted twice",
            _axpy("if (i < n) y[i] += a * x[i] + y[i];"),
            "y[i] += z is y[i] = y[i] + z, so y[i] must not stand on the right once more.",
            "What does your line make of y[0] if x[0] is 0?",
        ),
        Mistake(
            "the sum taken before the product",
            _axpy("if (i < n) y[i] = a * (x[i] + y[i]);"),
            "a is the factor of x alone: a times x, plus y.",
            "What should y[0] be if x[0] is 0?",
        ),
        Mistake(
            "a given to y in place of x",
            _axpy("if (i < n) y[i] = x[i] + a * y[i];"),
            "a is the factor of x: a times x, plus y.",
            "With a = 0, what should y be afterwards?",
        ),
        Mistake(
            "== in place of =",
            _axpy("if (i < n) y[i] == a * x[i] + y[i];"),
            "== compares, and what comes out of the comparison is thrown away, so nothing is stored. A single = stores.",
            "Is y another one after your kernel than before?",
            variants=(_axpy("if (i < n) a * x[i] + y[i];"),),
        ),
        Mistake(
            "one thread does everything",
            _axpy("if (i == 0) for (int j = 0; j < n; j++) y[j] = a * x[j] + y[j];"),
            "A single thread goes through the array, and all others stop at once. The loop of NumPy or C is what the many "
            "threads are for: each does one step of it.",
            "How many elements does thread 1 of block 0 do?",
        ),
        Mistake(
            "every thread does everything",
            _axpy("for (int j = 0; j < n; j++) y[j] = a * x[j] + y[j];"),
            "All threads run this loop, so each of them adds to every element, at the same time as the others. A thread "
            "has one element, number i, and needs no loop.",
            "How many threads change y[0]?",
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
    if not launches:
        return "The values are right, and no kernel was launched: they were computed in another way"
    if len(launches) != 1:
        return f"The values are right, and there were {len(launches)} launches; one is enough"
    blocks, size = launches[0]
    if (size, blocks) == (wanted, threads):
        return (
            f"The values are right, and number and size are exchanged: {blocks:,} blocks of {size:,} threads"
        )
    if size == 1 < threads:
        return f"The values are right, and each of {blocks:,} blocks has one thread, where {threads:,} were asked for"
    if size != threads:
        return f"The values are right, and the blocks have {size:,} threads, where {threads:,} were asked for"
    return (
        f"The values are right, and the launch has {blocks:,} block{'s' if blocks != 1 else ''} of {size:,} threads. "
        f"{wanted:,} of {threads:,} are just enough for n = {n:,}"
    )


def _launch(
    blocks: str = "(n + threads - 1) // threads",
    a: str = "np.float32(a)",
    back: str = "y",
    call: str = "axpy((blocks,), (threads,), ({a}, x, y, np.int32(n)))",
) -> str:
    return f"""def add_scaled(a, x, y, threads=256):
    n = len(x)
    blocks = {blocks}
    {call.replace("{a}", a)}
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
            variants=(_launch(blocks="n // threads"),),
        ),
        Mistake(
            "grid rounded to the nearest",
            _launch(blocks="max(1, round(n / threads))"),
            "Rounding to the nearest rounds down half of the time, and then the last elements have no thread. Round up.",
            "With n = 9 and blocks of 4, what is 9 / 4, rounded? How many threads is that?",
            variants=(_launch(blocks="round(n / threads)"),),
        ),
        Mistake(
            "a number of blocks that is no integer",
            _launch(blocks="np.ceil(n / threads)"),
            "n / threads is a float in Python, and so is what np.ceil makes of it: 3.0. A launch wants an int. Stay with "
            "whole numbers, that is with //, or write int(...) around it.",
            "Which type has np.ceil(2.5), and which type counts things?",
            variants=(_launch(blocks="n / threads"), _launch(blocks="(n + threads - 1) / threads")),
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
            "blocks of another size than was asked for",
            _launch(blocks="(n + 255) // 256", call="axpy((blocks,), (256,), ({a}, x, y, np.int32(n)))"),
            "256 is the size that the function takes if nobody says another. Whoever calls it may ask for any, and it is "
            "in `threads`.",
            "What is `threads` in the case that failed, and how many threads has a block of yours?",
            variants=(_launch(call="axpy((blocks,), (256,), ({a}, x, y, np.int32(n)))"),),
        ),
        Mistake(
            "blocks of one thread",
            _launch(call="axpy((n,), (1,), ({a}, x, y, np.int32(n)))"),
            "A block for each element gives the right values. The blocks should have as many threads as the caller asked "
            "for, and there should be only as many blocks as that needs.",
            "How many threads has a block of yours, and how many were asked for?",
        ),
        Mistake(
            "number of blocks and size of a block exchanged",
            _launch(call="axpy((threads,), (blocks,), ({a}, x, y, np.int32(n)))"),
            "The first tuple says how many blocks there are, the second how many threads each of them has. The product is "
            "the same, so the values are right all the same.",
            "In kernel((3,), (4,), ...), how many blocks are there, and how large are they?",
        ),
        Mistake(
            "numbers where tuples are wanted",
            _launch(call="axpy(blocks, threads, ({a}, x, y, np.int32(n)))"),
            "A grid may have up to three dimensions, so its size is a tuple, also where there is one. It is the comma that "
            "makes a tuple: (blocks,) is one, and (blocks) is a number in brackets.",
            "What is type((3)) in Python, and what is type((3,))?",
        ),
        Mistake(
            "launched with square brackets",
            _launch(call="axpy[blocks, threads]({a}, x, y, np.int32(n))"),
            "Numba writes launches so. A RawKernel of CuPy is called with three tuples: axpy(grid, block, arguments).",
            "How was the kernel of 00.1 launched, in the folded box under it?",
            variants=(_launch(call="axpy[(blocks,), (threads,)]({a}, x, y, np.int32(n))"),),
        ),
        Mistake(
            "the arguments without a tuple around them",
            _launch(call="axpy((blocks,), (threads,), {a}, x, y, np.int32(n))"),
            "A launch has three things: the grid, the block, and *one* tuple of all arguments of the kernel.",
            "How many things stand between the outer brackets of kernel((3,), (4,), (x, y))?",
        ),
        Mistake(
            "an argument left out",
            _launch(call="axpy((blocks,), (threads,), ({a}, x, y))"),
            "The kernel has four parameters, and all are given with every launch. It knows addresses and no lengths, so n "
            "is one of them.",
            "Which parameters stand in the first line of the kernel axpy?",
        ),
        Mistake(
            "arguments in another order than the kernel's",
            _launch(call="axpy((blocks,), (threads,), (x, y, {a}, np.int32(n)))"),
            "Arguments have no names here: the first one goes to the kernel's first parameter. That is a.",
            "What does the first line of your kernel axpy say, from left to right?",
        ),
        Mistake(
            "x and y exchanged",
            _launch(call="axpy((blocks,), (threads,), ({a}, y, x, np.int32(n)))"),
            "The kernel adds into its third parameter, and it was given x there. So x was changed, and y was not.",
            "Which of its parameters does your kernel write to?",
        ),
        Mistake(
            "computed by NumPy's operators",
            _launch(blocks="0", call="y[:] = a * x + y"),
            "Arrays on the device can be added like NumPy's, and CuPy then launches kernels of its own. Here you are asked "
            "to launch yours.",
            "Which line of your function launches axpy?",
            variants=(_launch(blocks="0", call="y += np.float32(a) * x"),),
        ),
        Mistake(
            "a Python float passed for a float",
            _launch(a="a"),
            "A Python float has 8 bytes and the kernel's float has 4. CuPy passes what it gets and does not convert, so "
            "on a card the kernel would read half of the number. np.float32(a) makes it the right size.",
            "How many bytes has a Python float, and how many has a float in C?",
            variants=(_launch(a="np.float64(a)"), _launch(a="float(a)")),
        ),
        Mistake(
            "no launch",
            _launch(call="kernel = axpy"),
            "y is as it was: nothing has been launched. A launch is a call, axpy(grid, block, arguments).",
            "Which line of your function launches axpy?",
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
