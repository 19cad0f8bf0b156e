"""Lesson 05: rows of a table by token id, and who should touch which address."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tinyvllm_ref import emulation
from tinyvllm_ref.bf16 import bf16_to_float
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
    Work,
)
from tinyvllm_ref.emulation import report as launch_reports

# Nothing is computed, only copied and widened: all comparisons are exact.


def _inputs(rng: np.random.Generator, tokens: int, vocab: int, hidden: int) -> dict[str, Any]:
    """A table of finite numbers that BF16 can hold, without zeros, and ids of which one comes twice.

    The table is in float32, so that a report shows numbers; a run makes BF16 of it. One that is small enough to be
    shown whole holds multiples of 1/8.
    """
    ids = rng.integers(0, vocab, tokens).astype(np.int32)
    if tokens > 2:
        ids[-1] = ids[0]
    if vocab * hidden <= 8:
        ids[:] = vocab - 1
        table = rng.permutation(np.arange(1, 64))[: vocab * hidden].reshape(vocab, hidden) / 8
        return {"ids": ids, "table": table.astype(np.float32)}
    bits = rng.integers(0x3800, 0x4200, (vocab, hidden)) | rng.integers(0, 2, (vocab, hidden)) << 15
    return {"ids": ids, "table": bf16_to_float(bits.astype(np.uint16))}


def _expect(inputs: Any) -> dict[str, Any]:
    ids, table = inputs["ids"], inputs["table"]
    known = (ids >= 0) & (ids < len(table))
    rows = table[np.where(known, ids, 0)]
    rows[~known] = np.nan
    return {"out": rows}


def _label(tokens: int, hidden: int, threads: int) -> str:
    return f"{tokens} token{'s' if tokens > 1 else ''}, width {hidden:,}, {threads:,} threads"


# ---------------- 05.1 and 05.2: kernels with a fixed number of elements a thread


def _one_cases(rng: np.random.Generator) -> list[Case]:
    def case(tokens: int, vocab: int, hidden: int, group: str) -> Case:
        inputs = _inputs(rng, tokens, vocab, hidden) | {"threads": hidden}
        return Case(_label(tokens, hidden, hidden), inputs, group)

    return [
        case(1, 2, 4, "small"),
        case(2, 6, 8, "small"),
        case(3, 9, 32, "small"),
        case(4, 7, 33, "awkward"),
        case(1, 5, 1, "awkward"),
        case(int(rng.integers(5, 12)), 30, 576, "awkward"),
        case(2, 4, 1024, "awkward"),
    ]


def _two_cases(rng: np.random.Generator) -> list[Case]:
    def case(tokens: int, vocab: int, hidden: int, threads: int, group: str) -> Case:
        inputs = _inputs(rng, tokens, vocab, hidden) | {"threads": threads}
        return Case(_label(tokens, hidden, threads), inputs, group)

    return [
        case(1, 2, 4, 2, "small"),
        case(2, 6, 8, 4, "small"),
        case(3, 9, 64, 32, "small"),
        case(1, 2, 3, 2, "awkward"),
        case(2, 5, 2048, 1024, "awkward"),
        case(4, 7, 7, 4, "awkward"),
        case(3, 8, 33, 32, "awkward"),
        case(2, 6, int(rng.integers(1100, 1900)) | 1, 1024, "awkward"),
    ]


def _run_gather(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    tokens, hidden = len(inputs["ids"]), inputs["table"].shape[1]
    bits = (inputs["table"].view(np.uint32) >> 16).astype(np.uint16)  # as BF16: nothing is lost
    ids, table = lab.input("ids", inputs["ids"]), lab.input("table", bits)
    out = lab.output((tokens, hidden))
    answer((tokens,), (inputs["threads"],), (ids, table, out, np.int32(hidden)))
    return {"out": lab.get(out)}


def _gather(name: str, body: str) -> str:
    return f'''{name} = cp.RawKernel(BF16_CUDA + r"""
extern "C" __global__ void {name}(const int* ids, const bf16* table, float* out, int hidden) {{
{body}
}}
""", "{name}")
'''


def _one(row: str = "ids[blockIdx.x]", to: str = "blockIdx.x", value: str = "bf16_to_float(row[c])") -> str:
    return _gather(
        "gather_one",
        f"""    int c = threadIdx.x;
    const bf16* row = table + (size_t){row} * hidden;
    out[(size_t){to} * hidden + c] = {value};""",
    )


_ONE = Exercise(
    id="05.1",
    title="one thread, one element",
    answer="gather_one",
    kind="kernel",
    uses=("BF16_CUDA",),
    cases=_one_cases,
    run=_run_gather,
    expected=_expect,
    points={"small": 1, "awkward": 1, "clean": 1},
    hints=Hints(
        question="Take {case}. Which row of the table does block 0 copy, and at which element of the table does this row begin?",
        rule="Block b works for token b: it reads ids[b], and copies that row of the table to row b of out. Thread c of "
        "the block copies column c. Row r of an array with `hidden` columns begins r * hidden elements after its "
        "start.\n\nBy hand, ids = 5 2 and a width of 4: thread 3 of block 1 reads element 2 * 4 + 3 = 11 of the table "
        "and writes element 1 * 4 + 3 = 7 of out.",
        code="const bf16* row = table + (size_t)____ * hidden;\nout[(size_t)____ * hidden + c] = ____(row[c]);",
    ),
    mistakes=(
        Mistake(
            "id not looked up",
            _one(row="blockIdx.x"),
            "This copies row 0 of the table for the first token, row 1 for the second, whatever their ids are. The row "
            "is ids[blockIdx.x].",
            "What would change in your output if all ids were 0?",
        ),
        Mistake(
            "id looked up by the thread's number",
            _one(row="ids[threadIdx.x]"),
            "All threads of a block work for one token, the block's, so the id is ids[blockIdx.x]. threadIdx.x is the "
            "column.",
            "For how many different tokens does one block work?",
        ),
        Mistake(
            "written to the row of the id",
            _one(to="ids[blockIdx.x]"),
            "out has one row a token, in the order of the tokens. The id is a row of the table; the row of out is the "
            "block's number.",
            "How many rows has out, and what happens if an id is larger than that?",
        ),
        Mistake(
            "bits taken for a whole number",
            _one(value="(float)row[c]"),
            "row[c] is an unsigned short that holds the bits of a BF16 number. A cast turns the bits 0x3F80 into 16,256; "
            "what they mean is 1.0. bf16_to_float reads them as what they are.",
            "What is the bit pattern of 1.0 in BF16, and what do you get for it?",
        ),
    ),
)


def _two(
    row: str = "hidden",
    first: str = "threadIdx.x",
    second: str = "threadIdx.x + blockDim.x",
    guard: str = "if (second < hidden) ",
    then: str = "to[second] = bf16_to_float(row[second]);",
    guard_first: str = "if (first < hidden) ",
) -> str:
    return _gather(
        "gather_two",
        f"""    const bf16* row = table + (size_t)ids[blockIdx.x] * {row};
    float* to = out + (size_t)blockIdx.x * hidden;
    int first = {first}, second = {second};
    {guard_first}to[first] = bf16_to_float(row[first]);
    {guard}{then}""",
    )


_TWO = Exercise(
    id="05.2",
    title="two elements a thread",
    answer="gather_two",
    kind="kernel",
    uses=("BF16_CUDA",),
    cases=_two_cases,
    run=_run_gather,
    expected=_expect,
    points={"small": 1, "awkward": 1, "clean": 1},
    hints=Hints(
        question="Take {case}. Write down the two columns of thread 0, of thread 1, and of the last thread. Is every "
        "column there once, and none that does not exist?",
        rule="One way to share out the columns: thread t takes column t and column t + blockDim.x. Each of the two needs "
        "a guard of its own. The row of the table and the row of out begin a multiple of `hidden` elements on, and not "
        "of the number of threads.\n\nBy hand, 4 threads and a width of 7: first columns 0 1 2 3, second columns 4 5 6 "
        "and 7, and there is no column 7.",
        code="int first = threadIdx.x, second = ____;\n"
        "if (first < hidden) to[first] = bf16_to_float(row[first]);\n"
        "if (____) to[second] = bf16_to_float(row[____]);",
    ),
    mistakes=(
        Mistake(
            "only the first blockDim.x columns",
            _two(guard="", then=""),
            "A block has at most 1,024 threads, and with one element each the rest of a wider row is never written.",
            "The row has twice as many columns as the block has threads. Who writes the second half?",
        ),
        Mistake(
            "no guard for the second element",
            _two(guard=""),
            "Where the width is odd, the last thread has no second element. Without a guard it writes into the next row, "
            "which belongs to another block, or past the end of out.",
            "With 4 threads and 7 columns, what is the second column of thread 3?",
            variants=(
                _two(guard="", guard_first=""),
                _two(guard="", first="2 * threadIdx.x", second="2 * threadIdx.x + 1"),
                _two(guard="", guard_first="", first="2 * threadIdx.x", second="2 * threadIdx.x + 1"),
            ),
        ),
        Mistake(
            "the last column of an odd width dropped",
            _two(first="2 * threadIdx.x", second="2 * threadIdx.x + 1", guard_first="if (second < hidden) "),
            "Where the width is odd, one thread has a first element and no second one. A guard that asks for both drops "
            "the last column, and so does one at hidden / 2, which C rounds down. Each element needs a guard of its own: "
            "is it less than hidden?",
            "With 3 columns, which thread has column 2, and what does your guard ask there?",
            variants=(
                _two(guard_first="if (second < hidden) "),
                _two(
                    second="threadIdx.x + hidden / 2",
                    guard_first="if (first < hidden / 2) ",
                    guard="if (first < hidden / 2) ",
                ),
            ),
        ),
        Mistake(
            "row offset by the number of threads",
            _two(row="blockDim.x"),
            "Row r of the table begins r * hidden elements on. blockDim.x was the same number as long as a thread had one "
            "element; now it is half of it.",
            "At which element of the table does row 1 begin?",
        ),
        Mistake(
            "second element right beside the first",
            _two(second="threadIdx.x + 1"),
            "If thread t takes t and t + 1, and its neighbour t + 1 and t + 2, most columns are made twice and the end of "
            "the row by nobody. Take t and t + blockDim.x, or 2t and 2t + 1.",
            "Which columns does thread 0 take, and which thread 1?",
        ),
    ),
)

# ---------------- 05.3: a prediction

_NEIGHBOURS = "for (int c = threadIdx.x; c < n; c += blockDim.x) to[c] = widen(row[c]);"
_PIECES = """int piece = n / blockDim.x;
    for (int c = threadIdx.x * piece; c < (threadIdx.x + 1) * piece; c++) to[c] = widen(row[c]);"""


def walk(body: str) -> Any:
    """A kernel, emulated, that widens one row of n numbers of 16 bits; `body` says who takes which."""
    # On one line, as a picture names the line of an access.
    source = (
        "__device__ float widen(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); } "
        'extern "C" __global__ void walk(const unsigned short* row, float* to, int n) { ' + body + " }"
    )
    return emulation.RawKernel(source, "walk")


def draw_walk(body: str, columns: int = 256) -> Any:
    """The first load of the first warp of such a kernel, over the addresses of the row."""
    row, to = emulation.ones(columns, np.uint16), emulation.empty(columns, np.float32)
    with emulation.checks("full"), emulation.trace() as trace:
        walk(body)((1,), (32,), (row, to, np.int32(columns)))
    return figures.threads_over_addresses(trace.rows, "row")


@functools.cache
def _sectors(body: str) -> int:
    """Sectors of the row that are touched, counted request by request: 2,048 columns, 256 threads."""
    row, to = emulation.ones(2048, np.uint16), emulation.empty(2048, np.float32)
    reports: list[Any] = []
    with emulation.checks("full"), launch_reports.collect(reports):
        walk(body)((1,), (256,), (row, to, np.int32(2048)))
    return int(reports[0].global_read_sectors)


_PREDICTION = Prediction(
    id="05.3",
    title="how many sectors move?",
    quantities={
        "neighbours": Quantity("sectors read, neighbours take neighbours", lambda: _sectors(_NEIGHBOURS)),
        "pieces": Quantity("sectors read, each thread its own piece", lambda: _sectors(_PIECES)),
    },
    explains="The row is 4,096 bytes, 128 sectors. Where neighbours take neighbours, a warp's load covers 32 x 2 = 64 "
    "bytes that lie side by side: 2 sectors. There are 64 such loads (8 warps, 8 times round), so 128 sectors, each once. "
    "Where each thread walks along a piece of 8 columns, a warp's load picks 2 bytes from every 16, all over 512 bytes: "
    "16 sectors. 64 loads make 1,024. The same sectors are asked for again seven times; a cache may soften that, and "
    "nothing undoes it.",
    hints=Hints(
        question="Look at the two pictures above. How many sectors does one load of one warp touch in each? And how many "
        "such loads does it take to read 2,048 columns?",
        rule="One load of one warp fetches 32 elements, so 2,048 columns take 64 loads, either way. Multiply by the "
        "sectors of one load. Neighbours: 32 elements of 2 bytes side by side. Pieces of 8 columns: 32 elements that lie "
        "16 bytes apart.",
        code="neighbours = 64 * ____\npieces = 64 * ____",
    ),
)

# ---------------- 05.4: any width, any block, any id


def _any_cases(rng: np.random.Generator) -> list[Case]:
    def case(tokens: int, vocab: int, hidden: int, threads: int, group: str, *unknown: int) -> Case:
        inputs = _inputs(rng, tokens, vocab, hidden) | {"threads": threads}
        for place, id in enumerate(unknown):
            inputs["ids"][place] = id
        told = f", ids {' '.join(map(str, inputs['ids']))} of {vocab}" if unknown else ""
        inputs["out_before"] = 77.0  # a row that is left alone is no NaN
        return Case(_label(tokens, hidden, threads) + told, inputs, group)

    return [
        case(1, 2, 4, 2, "small"),
        case(2, 6, 8, 4, "small"),
        case(2, 5, 256, 32, "small"),
        case(1, 2, 4, 2, "small", -1),
        case(1, 2, 4, 2, "awkward", 2),
        case(3, 6, 8, 32, "awkward", 6),
        case(3, 8, 2048, 256, "awkward"),
        case(2, 7, 7, 3, "awkward"),
        case(2, 5, int(rng.integers(1100, 3000)) | 1, 96, "awkward"),
        case(4, 300, 33, 64, "awkward", -7, 299, 300),
    ]


def _run_any(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    tokens, (vocab, hidden) = len(inputs["ids"]), inputs["table"].shape
    bits = (inputs["table"].view(np.uint32) >> 16).astype(np.uint16)  # as BF16: nothing is lost
    ids, table = lab.input("ids", inputs["ids"]), lab.input("table", bits)
    out = lab.inout(np.full((tokens, hidden), inputs["out_before"], np.float32))
    answer((tokens,), (inputs["threads"],), (ids, table, out, np.int32(vocab), np.int32(hidden)))
    return {"out": lab.get(out)}


def _once(outputs: Any, observed: Any) -> str | None:
    """Whether each column is written once; twice is let pass (NaN first, then the row)."""
    times = observed.total("global_write_bytes") / outputs["out"].nbytes
    if times <= 2:
        return None
    return f"The values are right, and every column is written {times:,.1f} times on average; once is enough"


def _neighbours_together(inputs: Any, outputs: Any, observed: Any) -> str | None:
    tokens, hidden = outputs["out"].shape
    if often := _once(outputs, observed):
        return often
    if inputs["threads"] % 32 or hidden % 8:
        return None  # whole warps and rows that begin with a sector, where the fewest is easily said
    fewest, found = tokens * hidden // 8, observed.total("global_write_sectors")
    if found <= fewest:
        return None
    return (
        f"The values are right, and the warps' stores touch {found:,} sectors; {fewest:,} are enough. Threads that are "
        "neighbours in a warp should take columns that are neighbours in memory"
    )


def _any(
    loop: str = "for (int c = threadIdx.x; c < hidden; c += blockDim.x)",
    known: str = "id >= 0 && id < vocab",
    row: str = "hidden",
    value: str = "known ? bf16_to_float(row[c]) : nan",
) -> str:
    return f'''gather = cp.RawKernel(BF16_CUDA + r"""
extern "C" __global__ void gather(const int* ids, const bf16* table, float* out, int vocab, int hidden) {{
    float nan = __uint_as_float(0x7fc00000u);
    int id = ids[blockIdx.x];
    float* to = out + (size_t)blockIdx.x * hidden;
    bool known = {known};
    const bf16* row = table + (size_t)id * {row};
    {loop}
        to[c] = {value};
}}
""", "gather")
'''


_ANY = Exercise(
    id="05.4",
    title="any width, any id",
    answer="gather",
    kind="kernel",
    uses=("BF16_CUDA",),
    cases=_any_cases,
    run=_run_any,
    expected=_expect,
    points={"small": 1, "awkward": 2, "clean": 1},
    verify=_neighbours_together,
    hints=Hints(
        question="Take {case}. Which columns does thread 0 take, one after the other? And is every id a row of the table?",
        rule="A strided loop: thread t takes columns t, t + blockDim.x, t + 2 * blockDim.x, ... as long as they exist. It "
        "is right for any width and any block, and in each turn neighbours take neighbours.\n\nAn id is a row of the table "
        "if it is at least 0 and less than vocab. If it is not, every column of that row of out becomes NaN, and the table "
        "is not touched.\n\nBy hand, 3 threads and 7 columns: thread 0 takes 0 3 6, thread 1 takes 1 4, thread 2 takes 2 5.",
        code="bool known = ____ && ____;\n"
        "for (int c = threadIdx.x; c < hidden; c += ____)\n"
        "    to[c] = known ? ____ : nan;",
    ),
    mistakes=(
        Mistake(
            "a piece of neighbouring columns for each thread",
            _any(
                loop="int piece = (hidden + blockDim.x - 1) / blockDim.x;\n"
                "    for (int c = threadIdx.x * piece; c < hidden && c < (threadIdx.x + 1) * piece; c++)"
            ),
            "That is how one would share out work on a CPU, where each core has a cache of its own. Here the 32 threads "
            "of a warp load together, and they should ask for addresses side by side: stride by blockDim.x.",
            "In one turn of the loop, how far apart are the columns of thread 0 and thread 1?",
        ),
        Mistake(
            "one column on instead of blockDim.x",
            _any(loop="for (int c = threadIdx.x; c < hidden; c++)"),
            "With c++ thread 0 goes over the whole row, thread 1 over all but the first column, and so on: most columns "
            "are made by many threads. The values are the same each time, and the work is many times as much. The "
            "next column of a thread is blockDim.x further on.",
            "Which threads write column 3?",
            variants=(_any(loop="for (int c = 0; c < hidden; c++)"),),
        ),
        Mistake(
            "only the first blockDim.x columns",
            _any(loop="int c = threadIdx.x; if (c < hidden)"),
            "Each thread does one column and stops, so a row wider than the block is cut off. It must go on by blockDim.x.",
            "After its first column, which one should thread 0 take next?",
        ),
        Mistake(
            "row offset by the number of threads",
            _any(row="blockDim.x"),
            "Row r of the table begins r * hidden elements on. The number of threads is something else.",
            "At which element of the table does row 1 begin?",
        ),
        Mistake(
            "an id outside of the vocabulary",
            _any(known="true"),
            "An id that is no row of the table must not be used as one: the kernel would read what lies before or behind "
            "it. Ask both `id >= 0` and `id < vocab`, joined by &&. (C does not chain comparisons: `0 <= id < vocab` "
            "compiles, compares the 0 or 1 of the first with vocab, and is true for every id.)",
            "Where in memory is row -1 of the table, and what does your condition say of it?",
            variants=(_any(known="0 <= id < vocab"), _any(known="id < vocab"), _any(known="id <= vocab")),
        ),
        Mistake(
            "id = vocab let through",
            _any(known="id >= 0 && id <= vocab"),
            "A vocabulary of 6 has the rows 0 to 5. Row 6 is the first that does not exist.",
            "What is the last row of a table with vocab rows?",
        ),
        Mistake(
            "row of an unknown id left as it was",
            _any(known="id >= 0 && id < vocab; if (!known) return"),
            "A thread that returns writes nothing, and the row keeps what was in memory before, which may look like "
            "numbers. NaN can not be mistaken for a result.",
            "What is in that row of out after your kernel has run?",
            variants=(_any(loop="if (known) for (int c = threadIdx.x; c < hidden; c += blockDim.x)"),),
        ),
        Mistake(
            "bits taken for a whole number",
            _any(value="known ? (float)row[c] : nan"),
            "row[c] holds the bits of a BF16 number; bf16_to_float reads them as what they are, a cast does not.",
            "What is the bit pattern of 1.0 in BF16, and what do you get for it?",
        ),
    ),
)

# ---------------- 05.5: the part


def _part_cases(rng: np.random.Generator) -> list[Case]:
    def case(
        tokens: int, vocab: int, hidden: int, group: str, *ids: int, table_from: int = 0, out_from: int = 0
    ) -> Case:
        inputs = _inputs(rng, tokens, vocab, hidden)
        for place, id in enumerate(ids):
            inputs["ids"][place] = id
        label = f"{tokens} token{'s' if tokens > 1 else ''}, width {hidden:,}"
        if ids:
            label += f", ids {' '.join(map(str, inputs['ids']))} of {vocab}"
        if table_from or out_from:
            label += f", {'table' if table_from else 'out'} begins one element into a longer array"
        before = {"out_before": 77.0, "table_from": table_from, "out_from": out_from}
        return Case(label, inputs | before, group)

    return [
        case(1, 2, 4, "small"),
        case(2, 6, 8, "small"),
        case(3, 9, 192, "small"),
        case(1, 5, 2048, "small"),
        case(1, 9, 33, "awkward", 1),
        case(2, 9, 33, "awkward", 0, 4),
        case(1, 2, 5, "awkward"),
        case(2, 5, 8, "awkward", table_from=1),
        case(2, 5, 8, "awkward", out_from=1),
        case(3, 9, 33, "awkward", 1, 4, 7),
        case(3, 9, 2050, "awkward", 2, 3, 8),
        case(2, 9, 4100, "awkward"),
        case(5, 7, 20, "awkward", -1, 7, 3, 6, 0),
        case(int(rng.integers(30, 60)), 70, 576, "awkward"),
        case(1, 3, 1, "awkward"),
    ]


def _run_part(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    vocab, hidden = inputs["table"].shape
    bits = (inputs["table"].view(np.uint32) >> 16).astype(np.uint16)  # as BF16: nothing is lost
    skipped, shape = inputs["table_from"], (len(inputs["ids"]), hidden)
    ids = lab.input("ids", inputs["ids"])
    table = lab.input("table", np.concatenate([np.zeros(skipped, np.uint16), bits.ravel()]))
    table = table[skipped:].reshape(vocab, hidden)
    out = lab.inout(np.full(inputs["out_from"] + shape[0] * hidden, inputs["out_before"], np.float32))
    out = out[inputs["out_from"] :].reshape(shape)
    return {"out": lab.returned(answer(ids, table, out), out)}


@functools.cache
def _vectors_are_seen() -> bool:
    """Whether this compiler leaves a vector's load in one piece, so that it is counted as one."""
    kernel = emulation.RawKernel(
        'extern "C" __global__ void f(const uint2* x, unsigned* y) { uint2 r = x[0]; y[0] = r.x + r.y; }', "f"
    )
    x, y = emulation.ones(2, np.uint32), emulation.empty(1, np.uint32)
    reports: list[Any] = []
    with emulation.checks("full"), launch_reports.collect(reports):
        kernel((1,), (1,), (x, y))
    return any(line.bytes == 8 for line in reports[0].lines)


def _wide(inputs: Any, outputs: Any, observed: Any) -> str | None:
    hidden = outputs["out"].shape[1]
    if often := _once(outputs, observed):
        return often
    threads = max((int(np.prod(report.block)) for report in observed.launches), default=0)
    if hidden >= 2048 and threads < 64:
        return (
            f"The values are right, with {threads} thread{'s' if threads > 1 else ''} for a row of {hidden:,} columns. "
            "That is one warp, which does the row piece after piece; take at least 64 threads for such a row"
        )
    if hidden % 4 or inputs["table_from"] or inputs["out_from"] or not _vectors_are_seen():
        return None  # here not all rows begin where a vector may
    lines = [line for report in observed.launches for line in report.lines if line.space == "global"]

    def widest(kind: str) -> int:
        return max((line.bytes // line.accesses for line in lines if line.kind == kind), default=0)

    if widest("read") < 8:
        return (
            f"The values are right, and no load of the table is wider than {widest('read')} bytes. All rows of width "
            f"{hidden:,} begin at a multiple of 8 bytes, so that 4 elements can come in one load"
        )
    if hidden >= 128 and widest("write") < 16:
        return (
            f"The values are right, and the loads are wide; but each store writes {widest('write')} bytes. A thread that "
            "has 4 neighbouring floats can store them at once, as a float4"
        )
    return None


_PART_VECTORS = """    for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
        uint2 raw = ((const uint2*)row)[v];
        ((float4*)to)[v] = make_float4(bf16_to_float(raw.x & 0xffff), bf16_to_float(raw.x >> 16),
                                       bf16_to_float(raw.y & 0xffff), bf16_to_float(raw.y >> 16));
    }"""
_PART_TAIL = (
    "    for (int c = 4 * vectors + threadIdx.x; c < hidden; c += blockDim.x) to[c] = bf16_to_float(row[c]);"
)


def _part(
    aligned: str = "(size_t)row % 8 == 0 && (size_t)to % 16 == 0",
    vectors: str = _PART_VECTORS,
    tail: str = _PART_TAIL,
    threads: str = "min(256, max(32, hidden // 4))",
) -> str:
    return f'''gather_rows = cp.RawKernel(BF16_CUDA + r"""
extern "C" __global__ void gather_rows(const int* ids, const bf16* table, float* out, int vocab, int hidden) {{
    float nan = __uint_as_float(0x7fc00000u);
    int id = ids[blockIdx.x];
    float* to = out + (size_t)blockIdx.x * hidden;
    if (id < 0 || id >= vocab) {{
        for (int c = threadIdx.x; c < hidden; c += blockDim.x) to[c] = nan;
        return;
    }}
    const bf16* row = table + (size_t)id * hidden;
    int vectors = {aligned} ? hidden / 4 : 0;
{vectors}
{tail}
}}
""", "gather_rows")


def embedding(ids, table, out):
    tokens, (vocab, hidden) = len(ids), table.shape
    threads = {threads}
    gather_rows((tokens,), (threads,), (ids, table, out, np.int32(vocab), np.int32(hidden)))
    return out
'''


_PART = Exercise(
    id="05.5",
    title="four at a time: the part",
    answer="embedding",
    kind="function",
    arguments=("ids", "table", "out"),
    uses=("BF16_CUDA",),
    cases=_part_cases,
    run=_run_part,
    expected=_expect,
    points={"small": 2, "awkward": 2, "clean": 1},
    verify=_wide,
    makes={"embedding": "embedding"},
    file="embedding.py",
    hints=Hints(
        question="Take {case}. At which byte, counted from the start of the table, does each of its rows begin? Which of "
        "these are multiples of 8? And which columns are left over after the last whole group of four?",
        rule="Where the row of the table begins at a multiple of 8 bytes and the row of out at a multiple of 16, there are "
        "hidden / 4 whole vectors; where not, none. A strided loop over the vectors, then one over the single columns from "
        "4 * vectors on: after no vectors at all, that is every column.\n\nOf the 4 bytes of raw.x, the element that comes "
        "first in memory is the lower half: raw.x & 0xffff. The second is raw.x >> 16.\n\nBy hand, width 33: row 4 begins "
        "at byte 264 = 33 * 8, so it has 8 vectors and a tail of one column. Row 1 begins at byte 66, so it is copied "
        "one by one.",
        code="int vectors = (size_t)row % ____ == 0 && (size_t)to % ____ == 0 ? ____ : 0;\n"
        "for (int v = threadIdx.x; v < vectors; v += blockDim.x) {\n"
        "    uint2 raw = ((const uint2*)row)[v];\n"
        "    ((float4*)to)[v] = make_float4(bf16_to_float(raw.x & 0xffff), bf16_to_float(____),\n"
        "                                   bf16_to_float(____), bf16_to_float(____));\n"
        "}\n"
        "for (int c = ____ + threadIdx.x; c < hidden; c += blockDim.x) to[c] = ____;",
    ),
    mistakes=(
        Mistake(
            "more than 1,024 threads",
            _part(threads="hidden"),
            "A block has at most 1,024 threads, and the width of a row knows no such limit. With the loop in the kernel "
            "any number will do; take a multiple of 32, at most 256 or so.",
            "How many threads do you ask for when the width is 2,048?",
        ),
        Mistake(
            "no threads for a narrow row",
            _part(threads="hidden // 4"),
            "hidden // 4 is 0 for a row of 1 to 3 columns, and more than 1,024 for one of 4,100 and more. The number of "
            "threads must be right for every width: bound it on both sides, as in min(256, max(32, ...)).",
            "What is hidden // 4 for the width of this case?",
            variants=(_part(threads="min(256, hidden // 4)"), _part(threads="min(1024, hidden // 4)")),
        ),
        Mistake(
            "one warp for a wide row",
            _part(threads="32"),
            "Every width works with 32 threads, and a row of 2,048 columns then waits for 16 turns of one warp, where a "
            "card has room for dozens of warps at once. The number of threads should grow with the width, up to 256 or "
            "so.",
            "How many vectors has a row of 2,048 columns, and how many of them can your threads fetch at once?",
            variants=(_part(threads="1"), _part(threads="min(32, hidden)")),
        ),
        Mistake(
            "the row of out has its own address",
            _part(aligned="(size_t)row % 8 == 0"),
            "You look at where the row of the table begins. The store has an address too: a float4 must go to a multiple "
            "of 16 bytes, and with a width of 33 row 1 of out begins at byte 132. Test `to` as well.",
            "At which byte of out does row 1 begin, if the width is 33?",
            variants=(_part(aligned="(size_t)row % 8 == 0 && (size_t)to % 4 == 0"),),
        ),
        Mistake(
            "the row of the table has its own address",
            _part(aligned="(size_t)to % 16 == 0"),
            "You look at where the row of out begins, which depends on the token's place in the batch. Where the row of "
            "the table begins depends on its id: with a width of 33, row 1 begins at byte 66. Test `row` as well.",
            "At which byte of the table does row 1 begin, if the width is 33?",
        ),
        Mistake(
            "the width tested, not the address",
            _part(aligned="hidden % 4 == 0"),
            "With a width that is a multiple of 4 all rows are aligned, if the first one is. An array may begin in the "
            "middle of another (a slice does), and then none is. The pointer itself tells: (size_t)row % 8.",
            "At which address does row 0 of the table begin in this case?",
        ),
        Mistake(
            "a vector load at an odd row width",
            _part(aligned="true"),
            "A load of 8 bytes must begin at a multiple of 8 bytes. With a width of 33, row 1 begins at byte 66. The "
            "address of each row has to be looked at.",
            "At which byte of the table does row 1 begin, if the width is 33?",
        ),
        Mistake(
            "tail lost",
            _part(
                tail=_PART_TAIL.replace("    for", "    if (vectors == 0) for").replace("4 * vectors + ", "")
            ),
            "hidden / 4 rounds down, and what is left over after the last whole vector still has to be copied, one by one.",
            "With a width of 33, how many columns are left after 8 vectors?",
            variants=(_part(tail=""),),
        ),
        Mistake(
            "tail begun at the number of vectors",
            _part(tail=_PART_TAIL.replace("4 * vectors + ", "vectors + ")),
            "Each vector holds 4 columns, so after `vectors` of them the first column that is left is 4 * vectors. The "
            "columns in front of that are copied twice.",
            "With 8 vectors, what is the first column that none of them holds?",
            variants=(_part(tail=_PART_TAIL.replace("4 * vectors + ", "")),),
        ),
        Mistake(
            "one vector on instead of blockDim.x",
            _part(vectors=_PART_VECTORS.replace("v += blockDim.x", "v++")),
            "With v++ thread 0 copies all vectors, thread 1 all but one, and so on. The values are right, and the work is "
            "many times as much. The next vector of a thread is blockDim.x further on.",
            "Which threads write vector 3?",
            variants=(
                _part(
                    vectors=_PART_VECTORS.replace("v += blockDim.x", "v++"),
                    tail=_PART_TAIL.replace("c += blockDim.x", "c++"),
                ),
                _part(
                    vectors=_PART_VECTORS.replace("v = threadIdx.x", "v = 0").replace(
                        "v += blockDim.x", "v++"
                    )
                ),
            ),
        ),
        Mistake(
            "bits taken for a whole number",
            _part(vectors=_PART_VECTORS.replace("bf16_to_float", "(float)")),
            "raw.x holds the bits of two BF16 numbers. A cast makes the number 16,256 of the bits 0x3F80; bf16_to_float "
            "makes 1.0 of them.",
            "What is the bit pattern of 1.0 in BF16, and what do you get for it?",
            variants=(
                _part(
                    vectors=_PART_VECTORS.replace("bf16_to_float", "(float)"),
                    tail=_PART_TAIL.replace("bf16_to_float(row[c])", "row[c]"),
                ),
            ),
        ),
        Mistake(
            "only the first vector of each thread",
            _part(
                vectors=_PART_VECTORS.replace(
                    "for (int v = threadIdx.x; v < vectors; v += blockDim.x)",
                    "int v = threadIdx.x; if (v < vectors)",
                )
            ),
            "With 256 threads of 4 elements, the first turn reaches column 1,023. A wider row needs the loop.",
            "How many columns do all threads of your block do in one turn?",
        ),
        Mistake(
            "halves of each word exchanged",
            _part(
                vectors=_PART_VECTORS.replace("raw.x & 0xffff", "HIGH")
                .replace("raw.x >> 16", "raw.x & 0xffff")
                .replace("HIGH", "raw.x >> 16")
                .replace("raw.y & 0xffff", "HIGH")
                .replace("raw.y >> 16", "raw.y & 0xffff")
                .replace("HIGH", "raw.y >> 16")
            ),
            "These machines are little endian: of two numbers of 16 bits in a word, the one that comes first in memory is "
            "the lower half. Exchanged, every pair of columns changes places.",
            "Which half of raw.x is the element at the lower address?",
        ),
        Mistake(
            "upper half keeps the lower one's bits",
            _part(
                vectors=_PART_VECTORS.replace("bf16_to_float(raw.x >> 16)", "__uint_as_float(raw.x)").replace(
                    "bf16_to_float(raw.y >> 16)", "__uint_as_float(raw.y)"
                )
            ),
            "The upper half is in the right place already, and the lower half is still behind it: a neighbour's bits as the "
            "last 16 bits of the fraction. The error is below one part in 128, and no text may show it. Clear them.",
            "Which 16 bits stand behind the upper half of raw.x, and what do they mean as part of a float?",
        ),
        Mistake(
            "wide loads, single stores",
            _part(
                vectors="""    for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
        uint2 raw = ((const uint2*)row)[v];
        to[4 * v] = bf16_to_float(raw.x & 0xffff);
        to[4 * v + 1] = bf16_to_float(raw.x >> 16);
        to[4 * v + 2] = bf16_to_float(raw.y & 0xffff);
        to[4 * v + 3] = bf16_to_float(raw.y >> 16);
    }"""
            ),
            "Each of the four stores puts 4 bytes into every 16, so neighbours no longer write neighbours: these are the "
            "pieces of 05.3 again. Store the four at once.",
            "In your first store, how far apart are the addresses of thread 0 and thread 1?",
        ),
        Mistake(
            "no vectors",
            _part(aligned="false", vectors=""),
            "The values are right, and every element is loaded and stored on its own. Four at a time means a quarter of "
            "the instructions for the same bytes.",
            "How many loads does your block make for a row of 2,048, and how many would do with 8 bytes each?",
        ),
    ),
)


# ---------------- what is drawn and measured


def _picture_of(threads: int, columns: int) -> Any:
    def draw(answer: Any, cp: Any) -> Any:
        table = cp.asarray(np.full((3, columns), 0x3F80, np.uint16))
        ids, out = cp.asarray(np.array([1], np.int32)), cp.empty((1, columns), np.float32)
        with cp.trace() as trace:
            if hasattr(answer, "code"):
                # 05.1 and 05.2 get the width, 05.4 the vocabulary as well.
                sizes = (3, columns) if "int vocab" in answer.code else (columns,)
                answer((1,), (threads,), (ids, table, out, *map(np.int32, sizes)))
            else:
                answer(ids, table, out)
        return figures.threads_over_addresses(trace.rows, "table", itemsize=2)

    return draw


def _make_run(tokens: int, vocab: int, hidden: int = 2048) -> Any:
    def make(answer: Any, cp: Any) -> Any:
        ids = cp.asarray(np.random.default_rng(0).permutation(vocab)[:tokens].astype(np.int32))
        table, out = cp.zeros((vocab, hidden), np.uint16), cp.empty((tokens, hidden), np.float32)
        if not hasattr(answer, "code"):
            return lambda: answer(ids, table, out)
        threads, sizes = (256, (vocab, hidden)) if "int vocab" in answer.code else (1024, (hidden,))
        return lambda: answer((tokens,), (threads,), (ids, table, out, *map(np.int32, sizes)))

    return make


_WORK = Work(
    label="8,192 tokens, 128,256 rows of 2,048",
    make=_make_run(8192, 128256),
    read_bytes=8192 * (2048 * 2 + 4),
    write_bytes=8192 * 2048 * 4,
    small=_make_run(16, 64),
    small_read_bytes=16 * (2048 * 2 + 4),
    small_write_bytes=16 * 2048 * 4,
    small_label="16 tokens, 64 rows of 2,048",
)

LESSON = Lesson(
    number="05",
    slug="embedding_kernel",
    title="The embedding kernel",
    part=2,
    minutes=60,
    exercises=(_ONE, _TWO, _PREDICTION, _ANY, _PART),
    engine=EngineCard(
        mistakes=(
            ("05.5", "halves of each word exchanged"),
            ("05.5", "upper half keeps the lower one's bits"),
        ),
        note="Your embedding runs once for each step of the engine: at the beginning, before the first layer.",
    ),
    pictures={"05.1": _picture_of(64, 64), "05.4": _picture_of(32, 128), "05.5": _picture_of(32, 128)},
    works={"05.2": _WORK, "05.4": _WORK, "05.5": _WORK},
)
