"""Lesson 06: the sum of many numbers by many threads."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tinyvllm_ref import emulation
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

_SUM = Tolerance(1e-5, 1e-4, "float32 additions in another order")


def _numbers(rng: np.random.Generator, *shape: int) -> Any:
    """Numbers around 0.5, so that a sum is far from 0 and a relative error means something."""
    return (rng.standard_normal(shape) + 0.5).astype(np.float32)


# ---------------- 06.1 and 06.2: one sum a block


def _block_cases(rng: np.random.Generator) -> list[Case]:
    def case(n: int, threads: int, group: str) -> Case:
        return Case(
            f"n = {n:,}, {threads} threads a block", {"x": _numbers(rng, n), "threads": threads}, group
        )

    odd = int(rng.integers(300, 900))
    return [
        case(8, 8, "small"),
        case(64, 64, "small"),
        case(512, 256, "small"),
        case(5, 8, "awkward"),
        case(1, 32, "awkward"),
        case(1000, 256, "awkward"),
        case(odd, 128, "awkward"),
    ]


def _run_blocks(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    n, threads = len(inputs["x"]), inputs["threads"]
    blocks = -(-n // threads)
    x, out = lab.input("x", inputs["x"]), lab.output(blocks)
    answer((blocks,), (threads,), (x, out, np.int32(n)), shared_mem=threads * 4)
    return {"out": lab.get(out)}


def _expect_blocks(inputs: Any) -> dict[str, Any]:
    x, threads = inputs["x"].astype(np.float64), inputs["threads"]
    starts = range(0, len(x), threads)
    return {"out": np.array([x[start : start + threads].sum() for start in starts], np.float32)}


def _no_early_return(inputs: Any, outputs: Any, observed: Any) -> str | None:
    left = [text for report in observed.launches for text in report.warnings if "had returned" in text]
    if not left:
        return None
    return (
        "The sums are right, and some threads end while others of their block still wait at a __syncthreads(). CUDA wants "
        "every thread of the block at every barrier: no return before one, and none inside a branch"
    )


def _is_a_tree(inputs: Any, outputs: Any, observed: Any) -> str | None:
    """Right sums may come from one busy thread, or from atomics: then they are not what was asked for."""
    threads = inputs["threads"]
    turns = observed.total("shared_requests") / -(-len(inputs["x"]) // threads)
    if observed.total("atomics"):
        return "The sums are right, and atomicAdd makes the threads wait in line for one cell. A tree needs no atomics"
    if threads >= 64 and turns >= threads:
        return (
            f"The sums are right, and the additions are made one after the other: {turns:,.0f} turns at shared memory in "
            f"a block of {threads}. In a tree, half of the threads add in the first round"
        )
    return _no_early_return(inputs, outputs, observed)


def _is_packed(inputs: Any, outputs: Any, observed: Any) -> str | None:
    """The threads that add must be neighbours, and so must the words they read."""
    threads = inputs["threads"]
    turns = observed.total("shared_requests") / -(-len(inputs["x"]) // threads)
    most = 2 * _halves_turns(threads, 1)
    if observed.total("bank_conflicts"):
        return (
            "The sums are right, and the busy threads are neighbours, but the words that they read are far apart, several "
            "in one bank. Thread t should add cell t + s"
        )
    if threads >= 128 and not observed.total("atomics") and most < turns < threads:
        return (
            f"The sums are right, and the busy threads are still spread over many warps: {turns:,.0f} turns at shared "
            f"memory in a block of {threads}, where neighbours need {_halves_turns(threads, 1)}"
        )
    return _is_a_tree(inputs, outputs, observed)


def _halves_turns(threads: int, last: int) -> int:
    """Warps' accesses to shared memory of a tree by halves whose last stride is `last`, and its filling and result."""
    rounds = [threads >> k for k in range(1, threads.bit_length()) if threads >> k >= last]
    return -(-threads // 32) + 3 * sum(-(-s // 32) for s in rounds) + 1


def _tree(name: str, load: str, loop: str) -> str:
    """A whole answer for 06.1 or 06.2: `load` fills the thread's cell, `loop` adds."""
    return f'''{name} = cp.RawKernel(r"""
extern "C" __global__ void {name}(const float* x, float* out, int n) {{
    extern __shared__ float cell[];
    int t = threadIdx.x;
    int i = blockIdx.x * blockDim.x + t;
{load}
    __syncthreads();
{loop}
    if (t == 0) out[blockIdx.x] = cell[0];
}}
""", "{name}")
'''


_LOAD = "    cell[t] = i < n ? x[i] : 0.0f;"
_MODULO_LOOP = """    for (int s = 1; s < blockDim.x; s *= 2) {
        if (t % (2 * s) == 0) cell[t] += cell[t + s];
        __syncthreads();
    }"""
_HALVES_LOOP = """    for (int s = blockDim.x / 2; s > 0; s /= 2) {
        if (t < s) cell[t] += cell[t + s];
        __syncthreads();
    }"""


def _missing_barrier(name: str, loop: str) -> Mistake:
    return Mistake(
        "missing __syncthreads() between rounds",
        _tree(name, _LOAD, loop.replace("        __syncthreads();\n", "")),
        "A thread starts its next round while its partner is still in the one before, and adds a half-made sum. "
        "Warps run in no fixed order; only __syncthreads() makes a round end for all of them.",
        "When thread 0 begins round 2, what makes sure that thread 2 has finished round 1?",
    )


def _unfilled(name: str, loop: str) -> Mistake:
    return Mistake(
        "no barrier after filling the cells",
        _tree(name, _LOAD, loop).replace("    __syncthreads();\n    for", "    for", 1),
        "The first round reads cells that other threads fill, and these may not have come so far. A barrier belongs "
        "between filling and the first round.",
        "Thread 0 is in its first round and reads cell 1. What makes sure that thread 1 has filled it?",
    )


def _divergent_barrier(name: str, loop: str) -> Mistake:
    condition = loop.split("if (")[1].split(") cell")[0]
    body = loop.split(f"if ({condition}) ")[1].split("\n")[0]
    inside = loop.replace(
        f"        if ({condition}) {body}\n        __syncthreads();\n",
        f"        if ({condition}) {{\n            {body}\n            __syncthreads();\n        }}\n",
    )
    return Mistake(
        "barrier inside a branch that not all threads take",
        _tree(name, _LOAD, inside),
        "__syncthreads() waits for every thread of the block, and those that skip the branch never come to it. "
        "The barrier belongs after the if, where all threads pass.",
        "Which threads reach your __syncthreads() in the first round, and which do not?",
    )


def _unset_cells(name: str, loop: str) -> Mistake:
    return Mistake(
        "cells past n not set",
        _tree(name, "    if (i < n) cell[t] = x[i];", loop),
        "Shared memory begins with whatever the last block left there. A thread without an element must still set "
        "its cell, to the number that changes no sum.",
        "In the last block, what is in the cell of a thread whose i is n or more?",
    )


def _early_return(name: str, loop: str) -> Mistake:
    return Mistake(
        "return before a barrier",
        _tree(name, _LOAD + "\n    if (i >= n) return;", loop),
        "A thread without an element must not leave: the others wait at __syncthreads() for all of the block. It "
        "works on many cards by luck. Let it stay, with a cell that holds 0.",
        "Who waits at the first __syncthreads() of the last block, and for whom?",
    )


_INTERLEAVED = Exercise(
    id="06.1",
    title="a tree with modulo",
    answer="sum_modulo",
    kind="kernel",
    cases=_block_cases,
    run=_run_blocks,
    expected=_expect_blocks,
    points={"small": 1, "awkward": 1, "clean": 1},
    tolerance=_SUM,
    verify=_is_a_tree,
    hints=Hints(
        question="Take {case}. Write down the cells after the first round. Which threads added, and what did each read?",
        rule="In the round with stride s, the threads whose number is a multiple of 2s add the cell s further on to "
        "their own. s is 1, then 2, 4, ... as long as it is smaller than the block. Between two rounds every thread "
        "passes a __syncthreads(), whether it added or not.\n\n"
        "By hand, 8 cells: 3 1 4 1 5 9 2 6. Stride 1: threads 0, 2, 4, 6 make 4, 5, 14, 8. Stride 2: threads 0 and 4 "
        "make 9 and 22. Stride 4: thread 0 makes 31.",
        code="""cell[t] = i < n ? ____ : ____;
__syncthreads();
for (int s = 1; s < blockDim.x; s *= ____) {
    if (t % ____ == 0) cell[t] += cell[____];
    __syncthreads();
}""",
    ),
    mistakes=(
        _missing_barrier("sum_modulo", _MODULO_LOOP),
        _divergent_barrier("sum_modulo", _MODULO_LOOP),
        _unfilled("sum_modulo", _MODULO_LOOP),
        _unset_cells("sum_modulo", _MODULO_LOOP),
        Mistake(
            "no guard for the last block",
            _tree("sum_modulo", "    cell[t] = x[i];", _MODULO_LOOP),
            "The last block has threads whose element does not exist, and x[i] then lies behind the array. Such a thread "
            "takes 0.",
            "With 5 numbers and 8 threads, what does thread 6 read?",
        ),
        _early_return("sum_modulo", _MODULO_LOOP),
        Mistake(
            "every thread adds in every round",
            _tree(
                "sum_modulo", _LOAD, _MODULO_LOOP.replace("if (t % (2 * s) == 0)", "if (t + s < blockDim.x)")
            ),
            "In one round thread t reads the cell that thread t + s writes. Only every 2s-th thread may add, so that "
            "no cell is both read by one thread and written by another between two barriers.",
            "In round one, who writes cell 1, and who reads it?",
        ),
        Mistake(
            "last round left out",
            _tree("sum_modulo", _LOAD, _MODULO_LOOP.replace("s < blockDim.x;", "s < blockDim.x / 2;")),
            "The loop ends one round early: two halves of the block are never added to each other. The last stride is "
            "half of the block.",
            "With 8 threads, what is s in the last round that has to happen?",
        ),
    ),
)

_SEQUENTIAL = Exercise(
    id="06.2",
    title="halves instead of modulo",
    answer="sum_halves",
    kind="kernel",
    cases=_block_cases,
    run=_run_blocks,
    expected=_expect_blocks,
    points={"small": 1, "awkward": 1, "clean": 1},
    tolerance=_SUM,
    verify=_is_packed,
    hints=Hints(
        question="Take {case}. After the first round the sum must lie in the first half of the cells. Which cell did "
        "thread 0 read?",
        rule="Start with s as half of the block. The threads below s add the cell s further on; then s is halved, until "
        "it is 0. The threads that add are always 0 to s - 1: whole warps, while s is 32 or more.\n\n"
        "By hand, 8 cells: 3 1 4 1 5 9 2 6. s = 4: 8 10 6 7. s = 2: 14 17. s = 1: 31.",
        code="""for (int s = ____; s > 0; s /= 2) {
    if (t < ____) cell[t] += cell[____];
    __syncthreads();
}""",
    ),
    mistakes=(
        _missing_barrier("sum_halves", _HALVES_LOOP),
        _divergent_barrier("sum_halves", _HALVES_LOOP),
        _unset_cells("sum_halves", _HALVES_LOOP),
        _early_return("sum_halves", _HALVES_LOOP),
        Mistake(
            "last round left out",
            _tree("sum_halves", _LOAD, _HALVES_LOOP.replace("s > 0;", "s > 1;")),
            "The loop stops before s is 1, and cell 1 is never added to cell 0.",
            "With 8 threads, s is 4, then 2. Which two cells are left?",
        ),
        Mistake(
            "a cell read after it was written in the same round",
            _tree("sum_halves", _LOAD, _HALVES_LOOP.replace("if (t < s)", "if (t + s < blockDim.x)")),
            "Without t < s, thread s writes its cell in the round in which thread 0 reads it. Only the lower half may "
            "add.",
            "In the second round, which thread writes the cell that thread 0 reads?",
        ),
        Mistake(
            "one thread too many adds",
            _tree("sum_halves", _LOAD, _HALVES_LOOP.replace("if (t < s)", "if (t <= s)")),
            "The threads 0 to s - 1 add: that is t < s. Thread s has no cell s further on in the first round, and its own "
            "cell is another thread's to read.",
            "With 8 threads and s = 4, which cell does thread 4 read?",
        ),
    ),
)


# ---------------- 06.3: a row of any length, a block of any size


def _row_cases(rng: np.random.Generator) -> list[Case]:
    def case(rows: int, n: int, threads: int, group: str) -> Case:
        label = f"{rows} row{'s' if rows > 1 else ''} of {n:,}, {threads} threads"
        return Case(label, {"x": _numbers(rng, rows, n), "threads": threads}, group)

    return [
        case(1, 8, 4, "small"),
        case(2, 64, 32, "small"),
        case(2, 7, 3, "awkward"),
        case(3, 5, 8, "awkward"),
        case(3, 1000, 96, "awkward"),
        case(2, int(rng.integers(1100, 2100)), 257, "awkward"),
        case(2, 33, 1, "awkward"),
    ]


def _run_rows(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    rows, n = inputs["x"].shape
    x, out = lab.input("x", inputs["x"]), lab.output(rows)
    answer((rows,), (inputs["threads"],), (x, out, np.int32(n)), shared_mem=inputs["threads"] * 4)
    return {"out": lab.get(out)}


def _expect_rows(inputs: Any) -> dict[str, Any]:
    return {"out": inputs["x"].astype(np.float64).sum(axis=1).astype(np.float32)}


def _rows_are_shared(inputs: Any, outputs: Any, observed: Any) -> str | None:
    (rows, n), threads = inputs["x"].shape, inputs["threads"]
    fewest = -(-n // threads) * -(-threads // 32)
    turns = observed.total("global_read_requests") / rows
    if threads < 32 or turns <= 4 * fewest:
        return None
    return (
        f"The sums are right, and a row of {n:,} is read in {turns:,.0f} turns of warps, where {fewest} are enough: few "
        "threads do all the work. Let each of them take its share of the row"
    )


def _rows_answer(load: str, loop: str) -> str:
    return f'''sum_rows = cp.RawKernel(r"""
extern "C" __global__ void sum_rows(const float* x, float* out, int n) {{
    extern __shared__ float cell[];
    int t = threadIdx.x;
    const float* row = x + (size_t)blockIdx.x * n;
{load}
    __syncthreads();
{loop}
    if (t == 0) out[blockIdx.x] = cell[0];
}}
""", "sum_rows")
'''


_ROW_LOAD = """    float sum = 0.0f;
    for (int i = t; i < n; i += blockDim.x) sum += row[i];
    cell[t] = sum;"""
_ROW_LOOP = """    for (int active = blockDim.x; active > 1;) {
        int half = (active + 1) / 2;
        if (t + half < active) cell[t] += cell[t + half];
        __syncthreads();
        active = half;
    }"""

_ANY = Exercise(
    id="06.3",
    title="any length, any block",
    answer="sum_rows",
    kind="kernel",
    cases=_row_cases,
    run=_run_rows,
    expected=_expect_rows,
    points={"small": 1, "awkward": 2, "clean": 1},
    tolerance=_SUM,
    verify=_rows_are_shared,
    hints=Hints(
        question="Take {case}. Which elements of its row does thread 0 add up before the tree begins? And which cell "
        "has no partner in the first round of the tree?",
        rule="Two things change. First, a thread adds every blockDim.x-th element of its row, beginning with its own "
        "number, and puts the sum into its cell; a thread that gets none puts 0. Second, a number of cells that is odd "
        "keeps its middle one: with `active` cells left, half = (active + 1) / 2 stay, and thread t adds cell t + half "
        "only where there is one.\n\n"
        "By hand, 5 cells: 3 1 4 1 5. half = 3: thread 0 adds cell 3, thread 1 adds cell 4: 4 6 4. half = 2: thread 0 "
        "adds cell 2: 8 6. half = 1: 14.",
        code="""float sum = 0.0f;
for (int i = ____; i < n; i += ____) sum += row[i];
cell[t] = sum;
__syncthreads();
for (int active = blockDim.x; active > 1;) {
    int half = ____;
    if (____ < active) cell[t] += cell[t + half];
    __syncthreads();
    active = half;
}""",
    ),
    mistakes=(
        Mistake(
            "part that is no power of two dropped",
            _rows_answer(_ROW_LOAD, _HALVES_LOOP),
            "Halving rounds down, so a block of 3 threads goes on with 1, and the last cell is lost. Keep the middle "
            "cell: round half up.",
            "With 3 threads, s = 3 / 2. Which cell is never added?",
        ),
        Mistake(
            "adds where there is no partner",
            _rows_answer(_ROW_LOAD, _ROW_LOOP.replace("t + half < active", "t < half")),
            "With an odd number of cells the middle one has no partner: half of them go on, and one fewer adds. The test "
            "must be that cell t + half is there: t + half < active.",
            "With 3 cells half is 2. Which cell does thread 1 read?",
        ),
        Mistake(
            "no barrier after filling the cells",
            _rows_answer(_ROW_LOAD, _ROW_LOOP).replace("    __syncthreads();\n    for", "    for", 1),
            "The first round of the tree reads cells that other threads fill, and these may still be adding up their "
            "elements. A barrier belongs in between.",
            "What makes sure that cell t + half is filled when thread t reads it?",
        ),
        Mistake(
            "every block reads row 0",
            _rows_answer(_ROW_LOAD.replace("row[i]", "x[i]"), _ROW_LOOP),
            "x points at row 0. This block's elements begin at `row`.",
            "Which rows does block 1 add up?",
        ),
        Mistake(
            "only the first blockDim.x elements",
            _rows_answer("    cell[t] = t < n ? row[t] : 0.0f;", _ROW_LOOP),
            "Each thread takes one element, so a row longer than the block is cut off. A thread goes on by blockDim.x "
            "until the row ends.",
            "The row has more elements than the block has threads. Who adds the rest?",
        ),
        Mistake(
            "rows a block's width apart",
            _rows_answer(_ROW_LOAD, _ROW_LOOP).replace("blockIdx.x * n;", "blockIdx.x * blockDim.x;"),
            "Row r begins r * n elements into x. blockDim.x is the number of threads, which is something else.",
            "At which element of x does row 1 begin?",
        ),
        Mistake(
            "threads without an element leave their cell unset",
            _rows_answer(
                "    if (t < n) {\n        float sum = 0.0f;\n"
                "        for (int i = t; i < n; i += blockDim.x) sum += row[i];\n        cell[t] = sum;\n    }",
                _ROW_LOOP,
            ),
            "Where a row is shorter than the block some threads have nothing to add, and the tree reads their cells all "
            "the same. They must hold 0.",
            "A row of 5 and a block of 8: what is in cell 6?",
        ),
        Mistake(
            "first element of each thread counted twice",
            _rows_answer(
                _ROW_LOAD.replace("float sum = 0.0f;", "float sum = t < n ? row[t] : 0.0f;"), _ROW_LOOP
            ),
            "The sum begins with the thread's first element, and the loop begins there as well. Begin the sum with 0, "
            "or the loop one stride on.",
            "What is sum before the loop, and which element does the loop add first?",
        ),
    ),
)


# ---------------- 06.4: a prediction


@functools.cache
def _warp_rounds(name: str) -> int:
    """Rounds x warps in which a thread adds, in one block of 1,024 threads, counted by the emulation."""
    loop = {"sum_modulo": _MODULO_LOOP, "sum_halves": _HALVES_LOOP}[name]
    namespace: dict[str, Any] = {"cp": emulation}
    exec(_tree(name, _LOAD, loop), namespace)
    x, out = emulation.ones(1024, np.float32), emulation.empty(1, np.float32)
    reports: list[Any] = []
    with emulation.checks("full"), launch_reports.collect(reports):
        namespace[name]((1,), (1024,), (x, out, np.int32(1024)), shared_mem=4096)
    # Each addition reads two cells and writes one; beside these, 32 warps fill their cells and one reads the result.
    return int(reports[0].shared_requests - 32 - 1) // 3


_PREDICTION = Prediction(
    id="06.4",
    title="how busy are the warps?",
    quantities={
        "modulo": Quantity("rounds x warps that add, with modulo", lambda: _warp_rounds("sum_modulo")),
        "halves": Quantity("rounds x warps that add, with halves", lambda: _warp_rounds("sum_halves")),
    },
    explains="Both trees make 1,023 additions in 10 rounds. With modulo, the threads that add are spread out: in the "
    "first five rounds all 32 warps have some, then 16, 8, 4, 2 and 1 warps: 5 x 32 + 31 = 191. With halves they are "
    "packed: 16, 8, 4, 2 and 1 warps, then one warp for five more rounds: 36. A warp with one busy thread costs as much "
    "as a warp with 32.",
    hints=Hints(
        question="A warp is 32 threads with neighbouring numbers. In the first round with modulo, which threads of warp "
        "0 add? Is there a warp in which none does?",
        rule="Count, for each of the 10 rounds, the warps with at least one thread that adds, and add these up. With "
        "modulo and stride s, thread t adds where t is a multiple of 2s. With halves, the threads 0 to s - 1 add.",
        code="modulo = 32 + 32 + 32 + 32 + 32 + ____\nhalves = 16 + 8 + ____",
    ),
)


# ---------------- 06.5: the device function


def _function_cases(rng: np.random.Generator) -> list[Case]:
    def case(blocks: int, threads: int, group: str) -> Case:
        values = _numbers(rng, blocks, threads)
        label = f"{blocks} block{'s' if blocks > 1 else ''} of {threads} threads"
        return Case(label, {"first": values, "second": _numbers(rng, blocks, threads)}, group)

    return [
        case(1, 4, "small"),
        case(2, 64, "small"),
        case(1, 5, "awkward"),
        case(2, 1, "awkward"),
        case(2, 100, "awkward"),
        case(1, 1000, "awkward"),
    ]


def _run_function(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    # Two calls in a row with the same scratch; every thread stores what it got from each.
    if "block_sum" not in answer:
        raise ValueError("the text defines no function `block_sum`")
    kernel = lab.cp.RawKernel(
        answer
        + """
extern "C" __global__ void call_twice(const float* first, const float* second, float* sums, float* sums_again) {
    extern __shared__ float scratch[];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    sums[i] = block_sum(first[i], scratch);
    sums_again[i] = block_sum(second[i], scratch);
}
""",
        "call_twice",
    )
    blocks, threads = inputs["first"].shape
    first, second = lab.input("first", inputs["first"]), lab.input("second", inputs["second"])
    sums, again = lab.output((blocks, threads)), lab.output((blocks, threads))
    kernel((blocks,), (threads,), (first, second, sums, again), shared_mem=threads * 4)
    return {"sums": lab.get(sums), "sums_again": lab.get(again)}


def _expect_function(inputs: Any) -> dict[str, Any]:
    def sums(values: Any) -> Any:
        total = values.astype(np.float64).sum(axis=1, keepdims=True)
        return np.broadcast_to(total, values.shape).astype(np.float32)

    return {"sums": sums(inputs["first"]), "sums_again": sums(inputs["second"])}


def _function_answer(
    start: str = "blockDim.x",
    half: str = "(active + 1) / 2",
    total: str = "scratch[0]",
    last: str = "    __syncthreads();\n",
) -> str:
    return f'''BLOCK_SUM_CUDA = r"""
__device__ __forceinline__ float block_sum(float value, float* scratch) {{
    int t = threadIdx.x;
    scratch[t] = value;
    __syncthreads();
    for (int active = {start}; active > 1;) {{
        int half = {half};
        if (t + half < active) scratch[t] += scratch[t + half];
        __syncthreads();
        active = half;
    }}
    float total = {total};
{last}    return total;
}}
"""
'''


def _order_is_fixed(inputs: Any, outputs: Any, observed: Any) -> str | None:
    blocks, threads = inputs["first"].shape
    turns = observed.total("shared_requests") / (2 * blocks)
    if observed.total("atomics"):
        return (
            "The sums are right, and atomicAdd lets the threads add in any order, so that the last bits change from run to "
            "run. The engine's tokens must not: use the tree"
        )
    if threads >= 64 and turns >= threads:
        return (
            f"The sums are right, and a sum takes {turns:,.0f} turns at shared memory in a block of {threads}: the "
            "additions are made one after the other. Use the tree"
        )
    return None


_FUNCTION = Exercise(
    id="06.5",
    title="block_sum, for every kernel to come",
    answer="BLOCK_SUM_CUDA",
    kind="source",
    cases=_function_cases,
    run=_run_function,
    expected=_expect_function,
    points={"small": 1, "awkward": 2, "clean": 1},
    tolerance=_SUM,
    verify=_order_is_fixed,
    makes={"BLOCK_SUM_CUDA": "BLOCK_SUM_CUDA"},
    file="block_sum.cu",
    hints=Hints(
        question="Take {case}. Thread 0 returns the sum. What does the last thread return? And when the function is "
        "called again right away, who may still be reading scratch[0]?",
        rule="The tree is that of 06.3. Two things come after it. Every thread reads scratch[0] into a variable of its "
        "own. Then one more __syncthreads(): without it a fast thread that is called again writes scratch[0] while a "
        "slow one has not yet read the sum.",
        code="""float total = ____;
____;
return total;""",
    ),
    mistakes=(
        Mistake(
            "last element dropped",
            _function_answer(start="blockDim.x - 1"),
            "The tree begins with one cell too few, so the value of the last thread is never added.",
            "With 4 threads, which cells does the first round touch?",
        ),
        Mistake(
            "only thread 0 gets the sum",
            _function_answer(total="scratch[t]"),
            "scratch[t] holds the whole sum in cell 0 alone; elsewhere it is a part. Every thread must read cell 0.",
            "After the tree, what is in scratch[1]?",
            variants=(
                _function_answer().replace(
                    "    return total;", "    if (t == 0) return total;\n    return 0.0f;"
                ),
            ),
        ),
        Mistake(
            "no barrier after filling scratch",
            _function_answer().replace(
                "    scratch[t] = value;\n    __syncthreads();", "    scratch[t] = value;"
            ),
            "The first round reads cells that other threads fill, and these may not have come so far. A barrier belongs "
            "in between.",
            "What makes sure that scratch[t + half] is filled when thread t reads it?",
        ),
        Mistake(
            "not safe to call twice",
            _function_answer(last=""),
            "A thread that is called again writes scratch[0] before a slower one has read the sum. One more barrier "
            "after reading makes the function safe.",
            "Thread 0 returns and is called again. What does it write, and who still needs the old value?",
        ),
        Mistake(
            "part that is no power of two dropped",
            _function_answer(half="active / 2"),
            "Halving rounds down: with 5 cells, 2 go on, and the last is lost. Round up, and add only where there is a "
            "partner.",
            "With 5 threads, half is 2. Who adds cell 4?",
            variants=(
                _function_answer().replace(
                    """    for (int active = blockDim.x; active > 1;) {
        int half = (active + 1) / 2;
        if (t + half < active) scratch[t] += scratch[t + half];
        __syncthreads();
        active = half;
    }""",
                    """    for (int s = blockDim.x / 2; s > 0; s /= 2) {
        if (t < s) scratch[t] += scratch[t + s];
        __syncthreads();
    }""",
                ),
            ),
        ),
    ),
)


# ---------------- 06.6: stretch


def _shuffle_cases(rng: np.random.Generator) -> list[Case]:
    def case(n: int, threads: int, group: str) -> Case:
        return Case(
            f"n = {n:,}, {threads} threads a block", {"x": _numbers(rng, n), "threads": threads}, group
        )

    return [
        case(64, 64, "small"),
        case(512, 256, "small"),
        case(32, 32, "awkward"),
        case(1000, 128, "awkward"),
        case(3000, 1024, "awkward"),
    ]


def _few_barriers(inputs: Any, outputs: Any, observed: Any) -> str | None:
    threads, blocks = inputs["threads"], -(-len(inputs["x"]) // inputs["threads"])
    most = max(3, (threads // 32).bit_length())  # the tree down to 32 cells, or a sum a warp and one more
    found = observed.total("barriers") // blocks
    turns, enough = observed.total("shared_requests") / blocks, _halves_turns(threads, 32) + 6
    if found > most:
        return (
            f"The sums are right, with {found} barriers a block. Once 32 cells are left one warp can finish with shuffles "
            f"and no barrier: {most} are enough for {threads} threads"
        )
    if turns > enough or observed.total("atomics"):
        return (
            f"The sums are right, with {turns:,.0f} turns at shared memory a block of {threads}. Shuffles go from register "
            f"to register: {enough} are enough"
        )
    return None


def _shuffle_answer(
    stop: str = "32",
    first: str = "16",
    mask: str = "0xffffffff",
    shuffle: str = "down",
    guard: str = "t < 32",
) -> str:
    return f'''sum_shuffle = cp.RawKernel(r"""
extern "C" __global__ void sum_shuffle(const float* x, float* out, int n) {{
    extern __shared__ float cell[];
    int t = threadIdx.x;
    int i = blockIdx.x * blockDim.x + t;
    cell[t] = i < n ? x[i] : 0.0f;
    __syncthreads();
    for (int s = blockDim.x / 2; s >= {stop}; s /= 2) {{
        if (t < s) cell[t] += cell[t + s];
        __syncthreads();
    }}
    if ({guard}) {{
        float sum = cell[t];
        for (int offset = {first}; offset > 0; offset /= 2) sum += __shfl_{shuffle}_sync({mask}, sum, offset);
        if (t == 0) out[blockIdx.x] = sum;
    }}
}}
""", "sum_shuffle")
'''


_SHUFFLE = Exercise(
    id="06.6",
    title="finish with shuffles",
    answer="sum_shuffle",
    kind="kernel",
    cases=_shuffle_cases,
    run=_run_blocks,
    expected=_expect_blocks,
    points={"small": 1, "awkward": 1, "clean": 1},
    tolerance=_SUM,
    verify=_few_barriers,
    stretch=True,
    hints=Hints(
        question="Take {case}. When 32 cells are left, how many warps still have something to do?",
        rule="__shfl_down_sync(0xffffffff, v, k) gives a thread the v of the thread k further on in its warp, from "
        "register to register. All 32 lanes that the mask names must call it. Offsets 16, 8, 4, 2, 1 leave the sum in "
        "lane 0. The tree in shared memory stops when 32 cells are left, so its last stride is 32.",
        code="""for (int s = blockDim.x / 2; s >= ____; s /= 2) { ... }
if (t < ____) {
    float sum = cell[t];
    for (int offset = ____; offset > 0; offset /= 2)
        sum += __shfl_down_sync(0xffffffff, sum, ____);
    if (t == 0) out[blockIdx.x] = sum;
}""",
    ),
    mistakes=(
        Mistake(
            "tree stops with 64 cells left",
            _shuffle_answer(stop="64"),
            "Stride 32 is left out, so cells 32 to 63 are never added: one warp can only take 32 of them.",
            "What is the last stride of your tree, and how many cells are left after it?",
        ),
        Mistake(
            "first offset is 32",
            _shuffle_answer(first="32"),
            "A warp has lanes 0 to 31, so there is none 32 further on: a lane then gets its own value back and counts it "
            "twice.",
            "Which lane is 32 further on than lane 0?",
        ),
        Mistake(
            "shuffle up instead of down",
            _shuffle_answer(shuffle="up"),
            "__shfl_up_sync reads from lower lanes, so that the sum gathers in lane 31; lane 0 has nothing below it.",
            "In which lane does your sum end?",
        ),
        Mistake(
            "mask names lanes that do not come",
            _shuffle_answer(guard="t < 16", first="16"),
            "The mask says that 32 lanes take part, and the branch lets 16 of them in. The lanes of the mask must all call.",
            "How many lanes does 0xffffffff name, and how many are inside your if?",
        ),
    ),
)


# ---------------- what is drawn and measured


def _picture(answer: Any, cp: Any) -> Any:
    """The tree of the learner's own run on 16 cells."""
    x, out = cp.asarray(np.arange(1, 17, dtype=np.float32)), cp.empty(1, np.float32)
    with cp.trace() as trace:
        answer((1,), (16,), (x, out, np.int32(16)), shared_mem=64)
    rows = trace.rows
    shared = [name for name in dict.fromkeys(rows["array"].tolist()) if name not in ("x", "out")]
    return figures.reduction_tree(figures.reduction_steps(rows, shared[0] if shared else "cell"))


def _make_run(n: int, threads: int = 256) -> Any:
    def make(answer: Any, cp: Any) -> Any:
        blocks = -(-n // threads)
        x, out = cp.ones(n, np.float32), cp.empty(blocks, np.float32)
        return lambda: answer((blocks,), (threads,), (x, out, np.int32(n)), shared_mem=threads * 4)

    return make


_LARGE, _SMALL = 1 << 26, 1 << 13
_WORK = Work(
    label=f"{_LARGE:,} numbers, 256 threads a block",
    make=_make_run(_LARGE),
    read_bytes=4 * _LARGE,
    write_bytes=4 * (_LARGE // 256),
    small=_make_run(_SMALL),
    small_read_bytes=4 * _SMALL,
    small_write_bytes=4 * (_SMALL // 256),
    small_label=f"{_SMALL:,} numbers, 256 threads a block",
)

LESSON = Lesson(
    number="06",
    slug="tree_reduction",
    title="Tree reduction",
    part=2,
    minutes=55,
    exercises=(_INTERLEAVED, _SEQUENTIAL, _ANY, _PREDICTION, _FUNCTION, _SHUFFLE),
    engine=EngineCard(
        mistakes=(("06.5", "last element dropped"), ("06.5", "only thread 0 gets the sum")),
        note="Your block_sum runs inside the reference's rms_norm, once for every token and every norm.",
    ),
    pictures={"06.1": _picture, "06.2": _picture},
    works={"06.1": _WORK, "06.2": _WORK, "06.6": _WORK},
)
