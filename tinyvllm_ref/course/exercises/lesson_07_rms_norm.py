"""Lesson 07: rows brought to one size, in float32, and the residual added on the way."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tinyvllm_ref import emulation
from tinyvllm_ref.bf16 import bf16_to_float, float_to_bf16
from tinyvllm_ref.course import figures
from tinyvllm_ref.course.exercise import (
    Case,
    EngineCard,
    Exercise,
    Hints,
    Lesson,
    Mistake,
    Prediction,
    Quantity,
    Tolerance,
    Work,
)
from tinyvllm_ref.emulation import report as launch_reports
from tinyvllm_ref.emulation.report import SECTOR_BYTES
from tinyvllm_ref.kernels import source as kernel_source

_BF16 = Tolerance(
    4e-3, 1e-6, "BF16 keeps 8 significant bits: rounding moves a value by up to one part in 256"
)
_EXACT_SUM = Tolerance(1e-6, 1e-6, "one float32 addition")


def _rows(rng: np.random.Generator, rows: int, hidden: int, bias: float = 0.0, size: float = 1.0) -> Any:
    """Rows of numbers around `bias`, times `size`."""
    return ((rng.standard_normal((rows, hidden)) + bias) * size).astype(np.float32)


def _weight(rng: np.random.Generator, hidden: int) -> Any:
    """A norm's weight: numbers around 1 that BF16 can hold; a run makes BF16 of them."""
    return bf16_to_float(float_to_bf16((1 + 0.5 * rng.standard_normal(hidden)).astype(np.float32)))


def _normed(x: Any, inputs: Any) -> Any:
    """The specification in float64."""
    x = x.astype(np.float64)
    mean_square = (x * x).mean(axis=1, keepdims=True)
    return (x / np.sqrt(mean_square + inputs["eps"]) * inputs["weight"]).astype(np.float32)


def _expect(inputs: Any) -> dict[str, Any]:
    return {"out": _normed(inputs["x"], inputs)}


# ---------------- 07.1: what epsilon does


def _half_cases(rng: np.random.Generator) -> list[Case]:
    drawn = float(np.float32(10 ** rng.uniform(-8, -3)))
    return [
        Case("eps = 1e-05", {"eps": 1e-5}, "small"),
        Case("eps = 1e-06", {"eps": 1e-6}, "small"),
        Case(f"eps = {drawn:.3g}", {"eps": drawn}, "other"),
    ]


def _run_half(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    return {"rms": float(answer(inputs["eps"]))}


def _expect_half(inputs: Any) -> dict[str, Any]:
    """Found by halving an interval, with the norm itself: no formula for the answer is used."""
    low, high = 1e-12, 1.0
    for _ in range(200):
        rms = (low * high) ** 0.5
        row = np.full(16, rms)
        normed = row / np.sqrt((row * row).mean() + inputs["eps"])
        low, high = (rms, high) if np.sqrt((normed * normed).mean()) < 0.5 else (low, rms)
    return {"rms": float(low)}


def _half(expression: str) -> str:
    return f"def half_rms(eps):\n    return {expression}\n"


_DERIVE = Exercise(
    id="07.1",
    title="when does epsilon matter?",
    answer="half_rms",
    kind="function",
    arguments=("eps",),
    cases=_half_cases,
    run=_run_half,
    expected=_expect_half,
    points={"small": 1, "other": 1},
    tolerance=Tolerance(1e-6, 0.0, "float64, and an interval halved 200 times"),
    hints=Hints(
        question="Take {case}. If a row has rms r, what is its mean square? And what is the rms of the row after each of "
        "its elements has been divided by the same number?",
        rule="Every element is divided by sqrt(r^2 + eps), so the rms is divided by it as well: it becomes "
        "r / sqrt(r^2 + eps). Set this to 1/2, square both sides, and solve for r.\n\nBy hand, eps = 3: the answer is r = 1, "
        "for 1 / sqrt(1 + 3) = 1/2.",
        code="# r^2 / (r^2 + eps) = 1/4   so   4 r^2 = r^2 + eps   so   r^2 = ____\nreturn ____ ** 0.5",
    ),
    mistakes=(
        Mistake(
            "epsilon outside of the root",
            _half("eps"),
            "This solves r / (r + eps) = 1/2. Epsilon stands inside the root, beside the mean square, so it has to be "
            "compared with r^2 and not with r.",
            "Is epsilon added to the mean square, or to its root?",
        ),
        Mistake(
            "the root forgotten",
            _half("eps / 3"),
            "eps / 3 is r^2, the mean square. The question asks for r.",
            "You have solved for r^2. What is r?",
        ),
        Mistake(
            "where epsilon equals the mean square",
            _half("eps ** 0.5"),
            "Where r^2 = eps the row is divided by sqrt(2) times its rms, and keeps 71 % of the size that it would have. "
            "It has to be a little smaller to lose half.",
            "With r^2 = eps, what is r / sqrt(r^2 + eps)?",
        ),
        Mistake(
            "solved upside down",
            _half("(3 * eps) ** 0.5"),
            "With r^2 = 3 eps the rms becomes sqrt(3 / 4), 87 %. From 4 r^2 = r^2 + eps follows 3 r^2 = eps.",
            "Put your r into r / sqrt(r^2 + eps) for eps = 3. What comes out?",
        ),
    ),
)

# ---------------- 07.2: a thread a row


def _case(rng: np.random.Generator, rows: int, hidden: int, group: str, **how: float) -> Case:
    told = ", mean 3" if how.get("bias") else ", rms 0.001" if how.get("size") else ""
    label = f"{rows} row{'s' if rows > 1 else ''} of {hidden:,}{told}"
    inputs = {"x": _rows(rng, rows, hidden, **how), "weight": _weight(rng, hidden), "eps": 1e-5}
    if how.get("size") and rows > 1:
        inputs["x"][-1] = 0
        label += ", the last all 0"
    return Case(label, inputs, group)


def _naive_cases(rng: np.random.Generator) -> list[Case]:
    return [
        _case(rng, 1, 4, "small"),
        _case(rng, 3, 64, "small"),
        _case(rng, 2, 4, "awkward", size=1e-3),
        _case(rng, 3, 100, "awkward", size=1e-3),
        _case(rng, 5, 33, "awkward", bias=3),
        _case(rng, 2, int(rng.integers(2000, 2500)), "awkward"),
        _case(rng, 300, 8, "awkward"),
    ]


def _run_naive(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    rows, hidden = inputs["x"].shape
    bits = (inputs["weight"].view(np.uint32) >> 16).astype(np.uint16)  # as BF16: nothing is lost
    x, weight = lab.input("x", inputs["x"]), lab.input("weight", bits)
    out = lab.output((rows, hidden), np.uint16)
    arguments = (x, weight, out, np.int32(rows), np.int32(hidden), np.float32(inputs["eps"]))
    answer((-(-rows // 64),), (64,), arguments)
    return {"out": (lab.get(out).astype(np.uint32) << 16).view(np.float32)}


def _naive(
    add: str = "squares += row[c] * row[c];",
    scale: str = "rsqrtf(squares / hidden + eps)",
    value: str = "row[c] * scale * bf16_to_float(weight[c])",
    before: str = "",
    store: str = "float_to_bf16",
    start: str = " = 0.0f",
) -> str:
    return f'''norm_naive = cp.RawKernel(BF16_CUDA + r"""
extern "C" __global__ void norm_naive(const float* x, const bf16* weight, bf16* out, int rows, int hidden, float eps) {{
    int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= rows) return;
    const float* row = x + (size_t)r * hidden;
    bf16* to = out + (size_t)r * hidden;
    {before}
    float squares{start};
    for (int c = 0; c < hidden; c++) {add}
    float scale = {scale};
    for (int c = 0; c < hidden; c++) to[c] = {store}({value});
}}
""", "norm_naive")
'''


_GEMMA = (
    "Some models (Gemma) store the weight as what is to be added to 1. Llama's checkpoints store the factor itself, and "
    "most of its values lie near it, not near 0."
)

_NAIVE = Exercise(
    id="07.2",
    title="one thread a row",
    answer="norm_naive",
    kind="kernel",
    uses=("BF16_CUDA",),
    cases=_naive_cases,
    run=_run_naive,
    expected=_expect,
    points={"small": 1, "awkward": 2, "clean": 1},
    tolerance=_BF16,
    hints=Hints(
        question="Take {case}. Compute the mean square of its first row in NumPy. By what is every element divided?",
        rule="Two loops over the row. The first adds up the squares in a float. Then scale = 1 / sqrt(squares / hidden + "
        "eps), and rsqrtf(v) is 1 / sqrt(v). The second loop writes x times scale times weight, the weight widened by "
        "bf16_to_float and the product rounded by float_to_bf16.\n\nBy hand, the row 3 -4 12 0: the squares add up to 169, "
        "their mean is 42.25, scale = 1 / 6.5.",
        code="float squares = 0.0f;\n"
        "for (int c = 0; c < hidden; c++) squares += ____;\n"
        "float scale = rsqrtf(____ / hidden + ____);\n"
        "for (int c = 0; c < hidden; c++) to[c] = float_to_bf16(____ * scale * bf16_to_float(____));",
    ),
    mistakes=(
        Mistake(
            "the sum, not the mean",
            _naive(scale="rsqrtf(squares + eps)"),
            "The squares are added up and not divided by how many there are, so wide rows come out too small.",
            "If every element of a row is 2, what should the rms of the row be, whatever its width?",
        ),
        Mistake(
            "1 / n in integers",
            _naive(scale="rsqrtf(squares * (1 / hidden) + eps)"),
            "1 / hidden divides two integers, and rounds down to 0 for every width above 1. Then only epsilon is left "
            "under the root. Divide the float: squares / hidden.",
            "What is 1 / 4 in C, if both are int?",
        ),
        Mistake(
            "epsilon outside of the root",
            _naive(scale="1.0f / (sqrtf(squares / hidden) + eps)"),
            "Epsilon belongs under the root, beside the mean square. For rows of ordinary size the difference can not be "
            "seen, and for small ones it is large.",
            "In the case that fails, how large is the mean square, compared with epsilon?",
        ),
        Mistake(
            "epsilon left out",
            _naive(scale="rsqrtf(squares / hidden)"),
            "A row of zeros is then 0 times infinity, which is NaN, and a small row is blown up in full.",
            "What is 1 / sqrt(0), and what is 0 times that?",
        ),
        Mistake(
            "mean subtracted",
            _naive(
                before="float mean = 0.0f;\n    for (int c = 0; c < hidden; c++) mean += row[c] / hidden;",
                add="squares += (row[c] - mean) * (row[c] - mean);",
                value="(row[c] - mean) * scale * bf16_to_float(weight[c])",
            ),
            "That is LayerNorm. RMSNorm leaves the mean where it is: it divides by the root mean square and nothing else.",
            "Does the formula of this lesson subtract anything?",
        ),
        Mistake(
            "weight as 1 + w",
            _naive(value="row[c] * scale * (1.0f + bf16_to_float(weight[c]))"),
            _GEMMA,
            "What would a weight of 0 do in the formula, and what does it do in yours?",
        ),
        Mistake(
            "accumulation in BF16",
            _naive(add="squares = bf16_to_float(float_to_bf16(squares + row[c] * row[c]));"),
            "A sum that is kept in BF16 has 8 significant bits. Once it is 256 times as large as what is added, it stops "
            "growing. Add in float, and round the result once.",
            "What is 256 + 1 in BF16?",
        ),
        Mistake(
            "the value stored as a whole number",
            _naive(store=""),
            "to[c] is a bf16, which is an unsigned short of 16 bits. To assign a float to it, or to cast one with (bf16), "
            "makes a whole number of it: 1.7 becomes the bits 0x0001, which is next to nothing. float_to_bf16 gives the "
            "bits that mean 1.7.",
            "What are the bits of 1.0 in BF16, and what do you store for it?",
            variants=(_naive(store="(bf16)"), _naive(store="(unsigned short)")),
        ),
        Mistake(
            "bits of the weight taken for a whole number",
            _naive(value="row[c] * scale * weight[c]"),
            "weight[c] is an unsigned short with the bits of a BF16 number. In a product C takes the bits 0x3F80 for 16,256; "
            "what they mean is 1.0. bf16_to_float reads them as what they are.",
            "How large is weight[c], read as a whole number, where the weight is 1.0?",
            variants=(_naive(value="row[c] * scale * (float)weight[c]"),),
        ),
        Mistake(
            "epsilon divided as well",
            _naive(scale="rsqrtf((squares + eps) / hidden)"),
            "The mean is squares / hidden, and epsilon is added to the mean. Here it is added to the sum and divided along "
            "with it, so a row of 2,048 columns gets a 2,048th of it.",
            "With squares = 0 and 4 columns, what stands under the root in the formula, and what in yours?",
        ),
        Mistake(
            "the weight forgotten",
            _naive(value="row[c] * scale"),
            "The row is brought to size and not multiplied by the weight. There is one for each column, and the model has "
            "learned them.",
            "By what is your first element off, and is that number among the inputs?",
        ),
        Mistake(
            "the weight of the row's number",
            _naive(value="row[c] * scale * bf16_to_float(weight[r])"),
            "The weight has an element for each column, the same for all rows: weight[c].",
            "How many elements has weight, and how many rows are there?",
        ),
        Mistake(
            "the root instead of its inverse",
            _naive(scale="sqrtf(squares / hidden + eps)"),
            "This multiplies by the root mean square, and large rows become larger. rsqrtf(v) is 1 / sqrt(v), with an r in "
            "front.",
            "Should a row that is ten times as large come out larger?",
        ),
        Mistake(
            "low bits cut off, not rounded",
            _naive(store="(bf16)(__float_as_uint", value="row[c] * scale * bf16_to_float(weight[c])) >> 16"),
            "The upper 16 bits alone are the value rounded toward zero: twice the error, and always to the same side. "
            "float_to_bf16 rounds to the nearest.",
            "Which of the two BF16 numbers around your value lies nearer to it?",
        ),
    ),
)

# ---------------- 07.3: the part


def _part_cases(rng: np.random.Generator) -> list[Case]:
    return [
        _case(rng, 1, 8, "small"),
        _case(rng, 2, 192, "small"),
        _case(rng, 2, 100, "awkward", size=1e-3),
        _case(rng, 3, 33, "awkward", bias=3),
        _case(rng, 1, 2048, "awkward"),
        _case(rng, 2, int(rng.integers(2050, 5000)), "awkward"),
        _case(rng, 70, 64, "awkward"),
        _case(rng, 2, 1, "awkward"),
    ]


def _run_part(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    bits = (inputs["weight"].view(np.uint32) >> 16).astype(np.uint16)  # as BF16: nothing is lost
    x, weight = lab.input("x", inputs["x"]), lab.input("weight", bits)
    out = lab.output(inputs["x"].shape, np.uint16)
    normed = lab.returned(answer(x, weight, inputs["eps"], out), out)
    if len(inputs["x"]) >= 40:  # the first row once more, alone: as many threads are to work on it
        first = lab.input("the first row of x", inputs["x"][:1])
        answer(first, weight, inputs["eps"], lab.output(inputs["x"][:1].shape, np.uint16))
    return {"out": (normed.astype(np.uint32) << 16).view(np.float32)}


def _threads_by_width(inputs: Any, outputs: Any, observed: Any) -> str | None:
    threads = [int(np.prod(report.block)) for report in observed.launches]
    if len(set(threads)) <= 1:
        return None
    return (
        f"The values are right, with {threads[0]} threads a row for {len(inputs['x'])} rows and {threads[-1]} for the first "
        "row alone. The number of threads decides the order of the additions: take it from the width alone, so that a "
        "token's numbers do not depend on who else is in the batch"
    )


_STORE = "to[c] = float_to_bf16({value});"
_LAUNCH = "norm_kernel((rows,), (threads,), arguments, shared_mem=4 * threads)"


def _part(
    scale: str = "float scale = rsqrtf(block_sum(squares, scratch) / hidden + eps);",
    value: str = "row[c] * scale * bf16_to_float(weight[c])",
    loop: str = "for (int c = threadIdx.x; c < hidden; c += blockDim.x)",
    before: str = "",
    store: str = "float_to_bf16",
    add: str = "squares += row[c] * row[c];",
    threads: str = "min(256, max(32, hidden // 32 * 32))",
    launch: str = _LAUNCH,
    body: str = "",
) -> str:
    body = (
        body
        or f"""{before}
    float squares = 0.0f;
    {loop} {add}
    {scale}
    for (int c = threadIdx.x; c < hidden; c += blockDim.x) to[c] = {store}({value});"""
    )
    return f'''norm_kernel = cp.RawKernel(BF16_CUDA + BLOCK_SUM_CUDA + r"""
extern "C" __global__ void norm_kernel(const float* x, const bf16* weight, bf16* out, int hidden, float eps) {{
    extern __shared__ float scratch[];
    const float* row = x + (size_t)blockIdx.x * hidden;
    bf16* to = out + (size_t)blockIdx.x * hidden;
    {body}
}}
""", "norm_kernel")


def rms_norm(x, weight, eps, out):
    rows, hidden = x.shape
    threads = {threads}
    arguments = (x, weight, out, np.int32(hidden), np.float32(eps))
    {launch}
    return out
'''


_COUNTS = (64, 128, 256, 512, 1024)
_WIDTHS = ("min(256, hidden)", "min(1024, hidden)")
"""What people choose as the number of threads."""


def _with_threads(counts: tuple[int | str, ...], **how: str) -> tuple[str, ...]:
    """The same with other numbers of threads, where the values that come out depend on them."""
    return tuple(_part(threads=str(count), **how) for count in counts)


_EARLY = "if (threadIdx.x >= hidden) return;"
_ONE_ASKS = "float scale = 0.0f;\n    if (threadIdx.x == 0) scale = rsqrtf(block_sum(squares, scratch) / hidden + eps);"
_SHARED_ONE_ASKS = (
    "__shared__ float scale;\n    if (threadIdx.x == 0) scale = rsqrtf(block_sum(squares, scratch) / hidden + eps);\n"
    "    __syncthreads();"
)
_GUARDED = "float scale = 0.0f;\n    if (threadIdx.x < hidden) scale = rsqrtf(block_sum(squares, scratch) / hidden + eps);"
_IN_THE_LOOP = """for (int c = threadIdx.x; c < hidden; c += blockDim.x)
        to[c] = float_to_bf16(row[c] * rsqrtf(block_sum(row[c] * row[c], scratch) / hidden + eps)
            * bf16_to_float(weight[c]));"""
_IN_THE_SECOND_LOOP = """float squares = 0.0f;
    for (int c = threadIdx.x; c < hidden; c += blockDim.x) squares += row[c] * row[c];
    for (int c = threadIdx.x; c < hidden; c += blockDim.x) {
        float scale = rsqrtf(block_sum(squares, scratch) / hidden + eps);
        to[c] = float_to_bf16(row[c] * scale * bf16_to_float(weight[c]));
    }"""
_IN_THE_FIRST_LOOP = """float squares = 0.0f, total = 0.0f;
    for (int c = threadIdx.x; c < hidden; c += blockDim.x) {
        squares += row[c] * row[c];
        total = block_sum(squares, scratch);
    }
    float scale = rsqrtf(total / hidden + eps);
    for (int c = threadIdx.x; c < hidden; c += blockDim.x)
        to[c] = float_to_bf16(row[c] * scale * bf16_to_float(weight[c]));"""


_PART = Exercise(
    id="07.3",
    title="one block a row: the part",
    answer="rms_norm",
    kind="function",
    arguments=("x", "weight", "eps", "out"),
    uses=("BF16_CUDA", "BLOCK_SUM_CUDA"),
    cases=_part_cases,
    run=_run_part,
    expected=_expect,
    points={"small": 1, "awkward": 2, "clean": 1},
    tolerance=_BF16,
    verify=_threads_by_width,
    makes={"rms_norm": "rms_norm"},
    file="rms_norm.py",
    hints=Hints(
        question="Take {case}. Which columns does thread 0 square and add? What does it get from block_sum, and what do the "
        "other threads get?",
        rule="Each thread adds the squares of its own columns, threadIdx.x, threadIdx.x + blockDim.x, ... Then all threads "
        "call block_sum, also those that have no column, and each gets the sum of the whole row. From there on it is 07.2 "
        "with strided loops. The launch: a block for each row, and shared_mem in bytes, 4 for each thread.\n\nBy hand, "
        "2 threads and the row 3 -4 12 0: thread 0 has 9 + 144 = 153, thread 1 has 16; "
        "block_sum gives 169 to both.",
        code="float squares = 0.0f;\n"
        "for (int c = ____; c < hidden; c += ____) squares += ____;\n"
        "float scale = rsqrtf(block_sum(____, scratch) / ____ + eps);\n"
        "for (int c = ____; c < hidden; c += ____)\n"
        "    to[c] = float_to_bf16(____);\n...\n"
        "norm_kernel((____,), (threads,), arguments, shared_mem=____ * threads)",
    ),
    mistakes=(
        Mistake(
            "divided by the number of threads",
            _part(scale="float scale = rsqrtf(block_sum(squares, scratch) / blockDim.x + eps);"),
            "The mean is over the columns of the row. How many threads have added them up does not matter.",
            "How many squares are in the sum: as many as threads, or as many as columns?",
            variants=_with_threads(
                _COUNTS,
                scale="float scale = rsqrtf(block_sum(squares, scratch) / blockDim.x + eps);",
            ),
        ),
        Mistake(
            "every thread adds the whole row",
            _part(loop="for (int c = 0; c < hidden; c++)"),
            "Each thread has squared all columns, and block_sum adds up what all threads have: the sum comes out as many "
            "times too large as there are threads. A thread takes its own columns: threadIdx.x, then blockDim.x further on.",
            "Which columns does thread 0 square, which thread 1, and how often is column 0 in the sum?",
            variants=_with_threads(_COUNTS, loop="for (int c = 0; c < hidden; c++)"),
        ),
        Mistake(
            "not every thread reaches block_sum",
            _part(before=_EARLY),
            "block_sum has barriers inside, and every thread of the block must pass every barrier (the second rule of "
            "lesson 06), also one that has no column: it brings its 0. So no return in front of it, no `if` around it, and "
            "not inside of a loop whose number of turns differs from thread to thread. All threads call it once, after "
            "their loop.",
            "In this case, which threads of the block do not come to block_sum, or not as often as the others?",
            variants=(
                *_with_threads(_COUNTS, before=_EARLY),
                _part(scale=_ONE_ASKS),
                _part(scale=_SHARED_ONE_ASKS),
                _part(scale=_GUARDED),
                *_with_threads(_COUNTS, scale=_GUARDED),
                _part(body=_IN_THE_LOOP),
                _part(body=_IN_THE_SECOND_LOOP),
                _part(body=_IN_THE_FIRST_LOOP),
            ),
        ),
        Mistake(
            "the sum, not the mean",
            _part(scale="float scale = rsqrtf(block_sum(squares, scratch) + eps);"),
            "The squares are added up and not divided by how many there are, so wide rows come out too small.",
            "If every element of a row is 2, what should the rms of the row be, whatever its width?",
        ),
        Mistake(
            "each thread its own sum",
            _part(scale="float scale = rsqrtf(squares / hidden + eps);"),
            "squares holds what this thread has added up, a few columns of the row. block_sum makes it the sum of all "
            "threads, for all threads.",
            "Which columns are in `squares` of thread 0?",
            variants=_with_threads(
                (*_COUNTS, *_WIDTHS), scale="float scale = rsqrtf(squares / hidden + eps);"
            ),
        ),
        Mistake(
            "nothing has written out",
            _part(launch="pass"),
            "out is as it was before: all of it reads as NaN. Is the launch there (the second TODO, in rms_norm)? And does "
            "the kernel store to `to`? There are two places to fill in.",
            "Which line of rms_norm starts the kernel?",
            variants=(_part(body="// nothing yet"),),
        ),
        Mistake(
            "too few blocks",
            _part(launch=_LAUNCH.replace("(rows,)", "((rows + threads - 1) // threads,)")),
            "A block works for one row, so there are as many blocks as rows. rows / threads, rounded up, was the count of "
            "07.2, where each *thread* had a row.",
            "How many rows does one block write, and how many blocks do you launch?",
            variants=(
                _part(launch=_LAUNCH.replace("(rows,)", "(1,)")),
                *_with_threads(
                    (256,), launch=_LAUNCH.replace("(rows,)", "((rows + threads - 1) // threads,)")
                ),
            ),
        ),
        Mistake(
            "threads chosen by the number of rows",
            _part(threads="256 if rows < 8 else 32"),
            "A sum of floats depends a little on its order, and the order on the number of threads. If that depends on how "
            "many rows there are, the same token comes out differently alone and in a batch. Choose by the width.",
            "How many threads work on a row when it is alone, and how many when 39 others are there?",
            variants=(
                _part(threads="32 * min(8, rows)"),
                _part(threads="max(32, min(256, rows // 32 * 32))"),
            ),
        ),
        Mistake(
            "the value stored as a whole number",
            _part(store=""),
            "to[c] is a bf16, which is an unsigned short of 16 bits. To assign a float to it, or to cast one with (bf16), "
            "makes a whole number of it: 1.7 becomes the bits 0x0001, which is next to nothing. float_to_bf16 gives the "
            "bits that mean 1.7.",
            "What are the bits of 1.0 in BF16, and what do you store for it?",
        ),
        Mistake(
            "bits of the weight taken for a whole number",
            _part(value="row[c] * scale * weight[c]"),
            "weight[c] is an unsigned short with the bits of a BF16 number. In a product C takes the bits 0x3F80 for 16,256; "
            "what they mean is 1.0. bf16_to_float reads them as what they are.",
            "How large is weight[c], read as a whole number, where the weight is 1.0?",
        ),
        Mistake(
            "the weight forgotten",
            _part(value="row[c] * scale"),
            "The row is brought to size and not multiplied by the weight. There is one for each column, and the model has "
            "learned them.",
            "By what is your first element off, and is that number among the inputs?",
        ),
        Mistake(
            "the root instead of its inverse",
            _part(scale="float scale = sqrtf(block_sum(squares, scratch) / hidden + eps);"),
            "This multiplies by the root mean square, and large rows become larger. rsqrtf(v) is 1 / sqrt(v), with an r in "
            "front.",
            "Should a row that is ten times as large come out larger?",
        ),
        Mistake(
            "result read before the barrier",
            _part(
                scale="__shared__ float scale;\n    float total = block_sum(squares, scratch);\n"
                "    if (threadIdx.x == 0) scale = rsqrtf(total / hidden + eps);"
            ),
            "Thread 0 writes scale to shared memory, and the others read it without waiting. Either a __syncthreads() "
            "between, or let every thread compute scale: block_sum gave all of them the sum.",
            "What makes thread 33 wait until thread 0 has written scale?",
        ),
        Mistake(
            "shared memory counted in floats",
            _part(launch=_LAUNCH.replace("4 * threads", "threads")),
            "scratch has a quarter of the elements that it needs. Look at the launch: shared_mem is in bytes, and scratch "
            "holds a float of 4 bytes for each thread, so shared_mem=4 * threads.",
            "How many bytes does scratch need?",
            variants=_with_threads((*_COUNTS, *_WIDTHS), launch=_LAUNCH.replace("4 * threads", "threads")),
        ),
        Mistake(
            "no shared memory asked for",
            _part(launch=_LAUNCH.replace(", shared_mem=4 * threads", "")),
            "`extern __shared__ float scratch[]` has as many bytes as the launch gives, and without shared_mem= that is none. "
            "block_sum needs a float for each thread: shared_mem=4 * threads, as the last argument of the launch.",
            "Where in your cell is it said how many elements scratch has?",
        ),
        Mistake(
            "epsilon left out",
            _part(scale="float scale = rsqrtf(block_sum(squares, scratch) / hidden);"),
            "A row of zeros is then 0 times infinity, which is NaN, and a small row is blown up in full.",
            "What is 1 / sqrt(0), and what is 0 times that?",
        ),
        Mistake(
            "weight as 1 + w",
            _part(value="row[c] * scale * (1.0f + bf16_to_float(weight[c]))"),
            _GEMMA,
            "What would a weight of 0 do in the formula, and what does it do in yours?",
        ),
    ),
)

# ---------------- 07.4: a prediction


@functools.cache
def _sum_of_ones(count: int, in_bf16: bool) -> float:
    """What one thread gets that adds up so many ones, in float or in BF16."""
    keep = "bf16_to_float(float_to_bf16(sum + 1.0f))" if in_bf16 else "sum + 1.0f"
    source = f"""{kernel_source.header("bf16.cuh")}
extern "C" __global__ void ones(float* out, int n) {{
    float sum = 0.0f;
    for (int i = 0; i < n; i++) sum = {keep};
    *out = sum;
}}
"""
    out = emulation.empty(1, np.float32)
    with emulation.checks("fast"):
        emulation.RawKernel(source, "ones")((1,), (1,), (out, np.int32(count)))
    return float(out.get()[0])


_PREDICTION = Prediction(
    id="07.4",
    title="where does a sum stop growing?",
    quantities={
        "bf16": Quantity("2,048 ones added up in BF16", lambda: _sum_of_ones(2048, True)),
        "float32": Quantity("20 million ones added up in float32", lambda: _sum_of_ones(20_000_000, False)),
    },
    explains="BF16 has 8 significant bits. Up to 256 = 2^8 it has every whole number, and above that only every second one. "
    "256 + 1 lies just between 256 and 258; ties go to the even one, 256, and the sum stands still. float32 has 24 bits, so "
    "the same happens at 2^24 = 16,777,216. Of 2,048 ones, BF16 loses seven eighths; float32 loses none.",
    hints=Hints(
        question="BF16 keeps 8 significant bits. Which whole numbers can it hold near 100, near 200, near 300?",
        rule="A format with b significant bits holds all whole numbers up to 2^b, and above that every second one. At 2^b, "
        "adding 1 lands in the middle between two neighbours, and the tie goes to the one whose last bit is 0.",
        code="bf16 = 2 ** ____\nfloat32 = 2 ** ____",
    ),
)


def draw_accumulation() -> Any:
    """The error of a mean square that one thread adds up in BF16, and in float32, over the width of the row."""
    widths = 2 ** np.arange(4, 14)
    squares = np.random.default_rng(0).standard_normal((64, widths[-1])).astype(np.float32) ** 2
    exact = np.cumsum(squares.astype(np.float64), axis=1)
    in_float, in_bf16 = np.zeros(64, np.float32), np.zeros(64, np.float32)
    errors: dict[str, list[float]] = {"sum kept in BF16": [], "sum kept in float32": []}
    for width in range(1, int(widths[-1]) + 1):
        in_float = in_float + squares[:, width - 1]
        in_bf16 = bf16_to_float(float_to_bf16(in_bf16 + squares[:, width - 1]))
        if width in widths:
            for name, sums in zip(errors, (in_bf16, in_float), strict=True):
                errors[name].append(float(np.median(np.abs(sums / exact[:, width - 1] - 1))))
    return figures.error_lines(
        widths,
        errors,
        "width of the row",
        "relative error of the mean square",
        title="One thread adds up the squares of a row",
        subtitle="Median of 64 rows of random numbers. Once the sum is large, BF16 no longer notices what is added.",
        log_x=True,
        log_y=True,
        marks={"Llama 3.2 1B: 2,048": 2048},
    )


# ---------------- 07.5: the second part


def _add_cases(rng: np.random.Generator) -> list[Case]:
    def case(rows: int, hidden: int, group: str, **how: float) -> Case:
        plain = _case(rng, rows, hidden, group, **how)
        residual = _rows(rng, rows, hidden, size=how.get("size", 1.0))
        if how.get("size"):
            residual[-1] = 0
        return Case(plain.label, {**plain.inputs, "residual": residual}, group)

    return [
        case(1, 8, "small"),
        case(2, 192, "small"),
        case(2, 100, "awkward", size=1e-3),
        case(3, 33, "awkward", bias=3),
        case(1, 2048, "awkward"),
        case(2, int(rng.integers(2050, 5000)), "awkward"),
        case(40, 64, "awkward"),
        case(2, 1, "awkward"),
    ]


def _run_add(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    bits = (inputs["weight"].view(np.uint32) >> 16).astype(np.uint16)  # as BF16: nothing is lost
    x, weight = lab.input("x", inputs["x"]), lab.input("weight", bits)
    residual, out = lab.inout(inputs["residual"]), lab.output(inputs["x"].shape, np.uint16)
    normed = lab.returned(answer(x, residual, weight, inputs["eps"], out), out)
    return {
        "residual": lab.get(residual, "residual"),
        "out": (normed.astype(np.uint32) << 16).view(np.float32),
    }


def _expect_add(inputs: Any) -> dict[str, Any]:
    total = inputs["x"].astype(np.float64) + inputs["residual"]
    return {"residual": total.astype(np.float32), "out": _normed(total, inputs)}


def _one_launch(inputs: Any, outputs: Any, observed: Any) -> str | None:
    launches = len(observed.launches)
    if launches == 1:
        return None
    return (
        f"The values are right, in {launches} launches. One is enough, and then the sum need not be fetched again by a "
        "second kernel"
    )


def _add(
    first: str = "float v = residual_row[c] + row[c];\n        residual_row[c] = v;\n        squares += v * v;",
    value: str = "residual_row[c] * scale * bf16_to_float(weight[c])",
    second: str = "",
    x: str = "const float* x",
) -> str:
    constant = "const " if x.startswith("const") else ""
    return f'''add_norm_kernel = cp.RawKernel(BF16_CUDA + BLOCK_SUM_CUDA + r"""
extern "C" __global__ void add_norm_kernel({x}, float* residual, const bf16* weight, bf16* out, int hidden, float eps) {{
    extern __shared__ float scratch[];
    {constant}float* row = x + (size_t)blockIdx.x * hidden;
    float* residual_row = residual + (size_t)blockIdx.x * hidden;
    bf16* to = out + (size_t)blockIdx.x * hidden;
    float squares = 0.0f;
    for (int c = threadIdx.x; c < hidden; c += blockDim.x) {{
        {first}
    }}
    float scale = rsqrtf(block_sum(squares, scratch) / hidden + eps);
    for (int c = threadIdx.x; c < hidden; c += blockDim.x) {{
        to[c] = float_to_bf16({value});
        {second}
    }}
}}
""", "add_norm_kernel")


def add_rms_norm(x, residual, weight, eps, out):
    rows, hidden = x.shape
    threads = min(256, max(32, hidden // 32 * 32))
    arguments = (x, residual, weight, out, np.int32(hidden), np.float32(eps))
    add_norm_kernel((rows,), (threads,), arguments, shared_mem=4 * threads)
    return out
'''


_TWO_LAUNCHES = '''add_kernel = cp.RawKernel(r"""
extern "C" __global__ void add_kernel(const float* x, float* residual, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) residual[i] += x[i];
}
""", "add_kernel")
''' + _part().replace(
    "def rms_norm(x, weight, eps, out):\n    rows, hidden = x.shape\n",
    "def add_rms_norm(x, residual, weight, eps, out):\n    rows, hidden = x.shape\n"
    "    add_kernel((-(-x.size // 256),), (256,), (x, residual, np.int32(x.size)))\n    x = residual\n",
)

_ADD = Exercise(
    id="07.5",
    title="add and normalise in one pass: the part",
    answer="add_rms_norm",
    kind="function",
    arguments=("x", "residual", "weight", "eps", "out"),
    uses=("BF16_CUDA", "BLOCK_SUM_CUDA"),
    cases=_add_cases,
    run=_run_add,
    expected=_expect_add,
    points={"small": 1, "awkward": 2, "clean": 1},
    tolerance={"out": _BF16, "residual": _EXACT_SUM},
    verify=_one_launch,
    makes={"add_rms_norm": "add_rms_norm"},
    file="add_rms_norm.py",
    hints=Hints(
        question="Take {case}. What must residual hold afterwards, and what is it that gets normalised?",
        rule="In the first loop each thread does three things for a column: it adds x to residual, stores the sum in "
        "residual, and adds the square of the sum to its squares. The rest is rms_norm, with residual in the place of x. "
        "x itself is only read.\n\nBy hand, residual = 1 2 and x = 2 -6: residual becomes 3 -4, the mean square is 12.5, "
        "and out is 3 and -4 divided by sqrt(12.5), times the weight.",
        code="for (int c = threadIdx.x; c < hidden; c += blockDim.x) {\n"
        "    float v = ____ + ____;\n"
        "    ____ = v;\n"
        "    squares += ____;\n"
        "}\n"
        "float scale = ____;\n"
        "for (int c = threadIdx.x; c < hidden; c += blockDim.x)\n"
        "    to[c] = float_to_bf16(____ * scale * bf16_to_float(weight[c]));",
    ),
    mistakes=(
        Mistake(
            "residual not written back",
            _add(
                first="float v = residual_row[c] + row[c];\n        squares += v * v;",
                value="(residual_row[c] + row[c]) * scale * bf16_to_float(weight[c])",
            ),
            "The norm is right, and the sum is forgotten: what this part of the layer has computed never reaches the "
            "stream that all later layers add to.",
            "After your kernel, what is in residual?",
        ),
        Mistake(
            "residual overwritten by x",
            _add(
                first="float v = residual_row[c] + row[c];\n        squares += v * v;",
                value="(residual_row[c] + row[c]) * scale * bf16_to_float(weight[c])",
                second="residual_row[c] = row[c];",
            ),
            "What was in the stream before is lost: residual must become residual + x, the sum of all that came so far.",
            "What was in residual before your kernel, and where is it now?",
        ),
        Mistake(
            "squares of x, not of the sum",
            _add(
                first="float v = residual_row[c] + row[c];\n        residual_row[c] = v;\n        squares += row[c] * row[c];"
            ),
            "The sum is stored and normalised, but the factor was made of x alone. The size that a row is brought to is "
            "its own: square what has just been added up.",
            "Of which numbers is `squares` the sum, and which numbers does your second loop divide?",
        ),
        Mistake(
            "squares of the old residual",
            _add(first="squares += residual_row[c] * residual_row[c];\n        residual_row[c] += row[c];"),
            "The square is taken before x is added, so the factor fits what residual was and not what it is. Add first, then "
            "square.",
            "In the first loop, what is in residual_row[c] when it is squared?",
        ),
        Mistake(
            "the norm of x alone",
            _add(
                first="residual_row[c] += row[c];\n        squares += row[c] * row[c];",
                value="row[c] * scale * bf16_to_float(weight[c])",
            ),
            "The sum is stored as it should be, and then x is normalised. What goes on into the next layer part is the norm of "
            "the whole stream: of residual after the addition.",
            "Which array does the formula normalise, x or the sum?",
            variants=(_add(value="row[c] * scale * bf16_to_float(weight[c])"),),
        ),
        Mistake(
            "what was normed becomes the residual",
            _add(second="residual_row[c] = bf16_to_float(to[c]);"),
            "The stream is never normalised itself; it only grows by what is added to it. The norm is a copy for the next "
            "layer part to read.",
            "Should residual have an rms of about 1 after your kernel?",
            variants=(
                _add(
                    value="residual_row[c] = residual_row[c] * scale * bf16_to_float(weight[c])",
                ),
                _add(second="residual_row[c] = residual_row[c] * scale;"),
            ),
        ),
        Mistake(
            "x added twice",
            _add(value="(residual_row[c] + row[c]) * scale * bf16_to_float(weight[c])"),
            "In the second loop residual already holds the sum, so adding x once more counts it twice.",
            "What is in residual when the second loop begins?",
        ),
        Mistake(
            "the sum kept in x",
            _add(
                first="float v = residual_row[c] + row[c];\n        row[c] = v;\n        squares += v * v;",
                value="row[c] * scale * bf16_to_float(weight[c])",
                x="float* x",
            ),
            "The sum belongs in residual; x is only read. The engine uses x as a place for the next layer part's result, and "
            "residual is what lives through all layers.",
            "Which of the two arrays does the contract let you change?",
        ),
        Mistake(
            "in two launches",
            _TWO_LAUNCHES,
            "The values are right. But the first kernel writes the sum to memory and the second fetches it again. Fused into "
            "one, the sum is at hand when its square is needed.",
            "How many times does the sum cross the memory's bus in your version?",
        ),
    ),
)


# ---------------- what is measured


def _make_run(rows: int, hidden: int = 2048, add: bool = False) -> Any:
    def make(answer: Any, cp: Any) -> Any:
        x, weight = cp.ones((rows, hidden), np.float32), cp.asarray(np.full(hidden, 0x3F80, np.uint16))
        out = cp.empty((rows, hidden), np.uint16)
        if hasattr(answer, "code"):
            arguments = (x, weight, out, np.int32(rows), np.int32(hidden), np.float32(1e-5))
            return lambda: answer((-(-rows // 64),), (64,), arguments)
        if not add:
            return lambda: answer(x, weight, 1e-5, out)
        residual = cp.zeros((rows, hidden), np.float32)
        return lambda: answer(x, residual, weight, 1e-5, out)

    return make


def _work(add: bool) -> Work:
    large, small, hidden = 8192, 32, 2048
    reads, writes = (8, 6) if add else (4, 2)  # bytes an element
    return Work(
        label=f"{large:,} rows of {hidden:,}",
        make=_make_run(large, add=add),
        read_bytes=(large * reads + 2) * hidden,
        write_bytes=large * writes * hidden,
        small=_make_run(small, add=add),
        small_read_bytes=(small * reads + 2) * hidden,
        small_write_bytes=small * writes * hidden,
        small_label=f"{small} rows of {hidden:,}",
    )


def count_two_kernels() -> None:
    """Print what an addition and then a norm ask of memory, beside the fewest: 32 rows of 2,048, counted in emulation."""
    given: dict[str, Any] = {"np": np, "cp": emulation}
    given |= {
        "BF16_CUDA": kernel_source.read("bf16.cuh"),
        "BLOCK_SUM_CUDA": kernel_source.read("block_sum.cuh"),
    }
    exec(_TWO_LAUNCHES, given)
    work = _work(True)
    reports: list[Any] = []
    assert work.small is not None
    with emulation.checks("full"):
        run = work.small(given["add_rms_norm"], emulation)
        with launch_reports.collect(reports):
            run()
    sectors = sum(report.global_sectors for report in reports)
    asked = sum(report.global_bytes for report in reports)
    fewest = (work.small_read_bytes + work.small_write_bytes) // SECTOR_BYTES
    print(f"kernel launches                   {len(reports):>9,}")
    print(f"bytes of global memory asked for  {asked:>9,}")
    print(f"32-byte sectors touched           {sectors:>9,}")
    print(f"fewest sectors possible           {fewest:>9,}")


LESSON = Lesson(
    number="07",
    slug="rms_norm",
    title="RMSNorm",
    part=2,
    minutes=60,
    exercises=(_DERIVE, _NAIVE, _PART, _PREDICTION, _ADD),
    engine=EngineCard(
        mistakes=(
            ("07.3", "the sum, not the mean"),
            ("07.5", "residual not written back"),
            ("07.5", "what was normed becomes the residual"),
        ),
        note="rms_norm runs once a step, before the first layer. From there on something has always to be added first: "
        "add_rms_norm runs twice in each layer, less the first norm, and once at the end.",
    ),
    works={"07.2": _work(False), "07.3": _work(False), "07.5": _work(True)},
)
