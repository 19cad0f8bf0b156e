"""Lesson 09: x w^T by hand, by tiles, and by cublasGemmEx without moving a byte."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tinyvllm_ref import emulation
from tinyvllm_ref.bf16 import bf16_to_float, float_to_bf16
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
    with_changes,
)
from tinyvllm_ref.course.figures.products import block_reads, reads_of_block
from tinyvllm_ref.emulation import report as launch_reports
from tinyvllm_ref.kernels import source as kernel_source

_TILE = 16
_PRODUCT = Tolerance(1e-5, 1e-4, "float32 additions in another order than the oracle's float64")


# ---------------- inputs and the oracle, for all products of the lesson


def _matrices(rng: np.random.Generator, tokens: int, outputs: int, depth: int) -> dict[str, Any]:
    """x (T, K) and w (N, K) as bfloat16 bits; one row of x is zeros where there are several."""
    x = rng.standard_normal((tokens, depth)) * rng.choice([0.1, 1.0, 4.0], (tokens, 1))
    if tokens > 2:
        x[1] = 0
    w = rng.standard_normal((outputs, depth)) / np.sqrt(depth) + 0.05
    return {"x": float_to_bf16(x.astype(np.float32)), "w": float_to_bf16(w.astype(np.float32))}


def _case(rng: np.random.Generator, tokens: int, outputs: int, depth: int, group: str) -> Case:
    label = f"x ({tokens}, {depth}), w ({outputs}, {depth})"
    return Case(label, _matrices(rng, tokens, outputs, depth), group)


def _expect(inputs: Any) -> dict[str, Any]:
    x, w = (bf16_to_float(inputs[name]).astype(np.float64) for name in "xw")
    return {"out": (x @ w.T).astype(np.float32)}


# ---------------- 09.1: one thread an output


def _naive_cases(rng: np.random.Generator) -> list[Case]:
    return [
        _case(rng, 2, 4, 3, "small"),
        _case(rng, 16, 32, 8, "small"),
        _case(rng, 1, 17, 33, "awkward"),
        _case(rng, 35, 5, 12, "awkward"),
        _case(rng, 19, int(rng.integers(33, 60)), 70, "awkward"),
    ]


def _run_kernel(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    (tokens, depth), outputs = inputs["x"].shape, len(inputs["w"])
    x, w = lab.input("x", inputs["x"]), lab.input("w", inputs["w"])
    out = lab.output((tokens, outputs))
    grid = (-(-outputs // 16), -(-tokens // 16))
    answer(grid, (16, 16), (x, w, out, np.int32(tokens), np.int32(outputs), np.int32(depth)))
    return {"out": lab.get(out)}


_NAIVE_BODY = """    if (t < T && n < N) {
        float sum = 0.0f;
        for (int k = 0; k < K; k++) sum += bf16_to_float(x[t * K + k]) * bf16_to_float(w[n * K + k]);
        out[t * N + n] = sum;
    }"""


def _naive(old: str = "", new: str = "") -> str:
    """A whole answer for 09.1, with one thing exchanged."""
    assert old in _NAIVE_BODY
    body = _NAIVE_BODY.replace(old, new) if old else _NAIVE_BODY
    return f'''product_naive = cp.RawKernel(BF16_CUDA + r"""
extern "C" __global__ void product_naive(const bf16* x, const bf16* w, float* out, int T, int N, int K) {{
    int n = blockIdx.x * blockDim.x + threadIdx.x;
    int t = blockIdx.y * blockDim.y + threadIdx.y;
{body}
}}
""", "product_naive")
'''


_NAIVE = Exercise(
    id="09.1",
    title="one thread an output",
    answer="product_naive",
    kind="kernel",
    cases=_naive_cases,
    run=_run_kernel,
    expected=_expect,
    points={"small": 1, "awkward": 1, "clean": 1},
    tolerance=_PRODUCT,
    uses=("BF16_CUDA",),
    hints=Hints(
        question="Take {case}. Thread (n, t) makes one number of out. Which row of x does it need, and which row of w? "
        "How long are these rows?",
        rule="x is (T, K), so row t begins t * K elements into x. w is (N, K): row n begins n * K elements into w. out "
        "is (T, N): its element (t, n) lies at t * N + n. The grid covers whole blocks of 16 by 16, so a thread may lie "
        "past T, past N, or past both.\n\n"
        "By hand, x = [[1, 2, 3]] and w = [[1, 0, 2], [0, 1, 1]]: out[0][0] = 1*1 + 2*0 + 3*2 = 7 and "
        "out[0][1] = 1*0 + 2*1 + 3*1 = 5.",
        code="""if (t < ____ && n < ____) {
    float sum = 0.0f;
    for (int k = 0; k < ____; k++) sum += bf16_to_float(x[____]) * bf16_to_float(w[____]);
    out[____] = sum;
}""",
    ),
    mistakes=(
        Mistake(
            "guard in one direction only",
            _naive("t < T && n < N", "n < N"),
            "The grid is rounded up in both directions, so there are threads with t >= T as well as with n >= N. The "
            "guard must hold both off.",
            "With 2 rows and blocks of 16 by 16, which t do the threads of the first column have?",
            variants=(_naive("t < T && n < N", "t < T"), _naive("t < T && n < N", "t < T || n < N")),
        ),
        Mistake(
            "w indexed as if it were (K, N)",
            _naive("w[n * K + k]", "w[k * N + n]"),
            "The checkpoint stores w as (N, K), a row an output, and the product is with w transposed. Element (n, k) of "
            "w lies at n * K + k. With a square w nothing would have looked odd but the numbers.",
            "How many elements has a row of w: N or K?",
        ),
        Mistake(
            "rows of x are N apart",
            _naive("x[t * K + k]", "x[t * N + k]"),
            "Row t of x begins t * K elements in: a row of x has K elements. N is the width of out.",
            "x is (T, K). Where does its row 1 begin?",
            variants=(
                _naive(
                    "bf16_to_float(x[t * K + k]) * bf16_to_float(w[n * K + k])",
                    "bf16_to_float(x[t * N + k]) * bf16_to_float(w[n * N + k])",
                ),
            ),
        ),
        Mistake(
            "out written transposed",
            _naive("out[t * N + n]", "out[n * T + t]"),
            "out is (T, N), row-major: a row for each token. n * T + t is where the element lies in the transpose.",
            "Which two elements of out lie next to each other in memory: those of one token, or those of one n?",
        ),
        Mistake(
            "bits multiplied as integers",
            _naive(
                "bf16_to_float(x[t * K + k]) * bf16_to_float(w[n * K + k])", "x[t * K + k] * w[n * K + k]"
            ),
            "A bf16 here is an unsigned short that holds bits. Multiplied as it is, 1.0 counts as 16,256. "
            "bf16_to_float makes the number of the bits.",
            "What is the value of the unsigned short whose bits mean 1.0?",
            variants=(
                _naive(
                    "bf16_to_float(x[t * K + k]) * bf16_to_float(w[n * K + k])",
                    "(float)x[t * K + k] * (float)w[n * K + k]",
                ),
            ),
        ),
        Mistake(
            "the sum kept in out",
            _naive(
                """        float sum = 0.0f;
        for (int k = 0; k < K; k++) sum += bf16_to_float(x[t * K + k]) * bf16_to_float(w[n * K + k]);
        out[t * N + n] = sum;
""",
                """        for (int k = 0; k < K; k++) out[t * N + n] += bf16_to_float(x[t * K + k]) * bf16_to_float(w[n * K + k]);
""",
            ),
            "out begins with whatever was in that memory, and += adds to it. Add up in a variable of the thread, which "
            "begins with 0; it stays in a register, too.",
            "What is in out before the first addition?",
        ),
        Mistake(
            "two indices in one bracket",
            _naive(
                "bf16_to_float(x[t * K + k]) * bf16_to_float(w[n * K + k])",
                "bf16_to_float(x[t, k]) * bf16_to_float(w[n, k])",
            ),
            "x[t, k] is NumPy's. In C++ the comma forgets what stands before it: this is x[k], row 0 for every thread. An array is "
            "flat here; where row t begins, you must say yourself.",
            "How many elements lie in front of row t of x?",
        ),
        Mistake(
            "T and N exchanged in the guard",
            _naive("t < T && n < N", "n < T && t < N"),
            "t counts rows of out, of which there are T, and n columns, of which there are N. Exchanged, the guard lets threads "
            "through that have no element and stops others that have one.",
            "out is (T, N). How far does t run, and how far n?",
        ),
        Mistake(
            "a sum of whole numbers",
            _naive("float sum = 0.0f", "bf16 sum = 0"),
            "A bf16 here is an unsigned short: each addition to it cuts off what stands behind the point, and below 0 it begins again "
            "at 65,535. Add up in a float.",
            "Which numbers can your sum hold?",
            variants=(_naive("float sum = 0.0f", "int sum = 0"),),
        ),
    ),
)


# ---------------- 09.3: tiles in shared memory


def _tile_cases(rng: np.random.Generator) -> list[Case]:
    return [
        _case(rng, 16, 32, 16, "small"),
        _case(rng, 32, 16, 48, "small"),
        _case(rng, 1, 17, 33, "awkward"),
        _case(rng, 35, 5, 12, "awkward"),
        _case(rng, 19, int(rng.integers(33, 60)), 70, "awkward"),
    ]


_TILED_BODY = """    float sum = 0.0f;
    for (int start = 0; start < K; start += TILE) {
        int k = start + tx;
        x_tile[ty][tx] = t < T && k < K ? bf16_to_float(x[t * K + k]) : 0.0f;
        w_tile[ty][tx] = row < N && k < K ? bf16_to_float(w[row * K + k]) : 0.0f;
        __syncthreads();
        for (int c = 0; c < TILE; c++) sum += x_tile[ty][c] * w_tile[tx][c];
        __syncthreads();
    }
    if (t < T && n < N) out[t * N + n] = sum;"""


def _tiled(*changes: tuple[str, str]) -> str:
    """A whole answer for 09.3, with some things exchanged."""
    body = _TILED_BODY
    body = with_changes(body, changes)
    return f'''product_tiled = cp.RawKernel(BF16_CUDA + r"""
#define TILE 16
extern "C" __global__ void product_tiled(const bf16* x, const bf16* w, float* out, int T, int N, int K) {{
    __shared__ float x_tile[TILE][TILE], w_tile[TILE][TILE + 1];
    int tx = threadIdx.x, ty = threadIdx.y;
    int n = blockIdx.x * TILE + tx, t = blockIdx.y * TILE + ty;
    int row = blockIdx.x * TILE + ty;
{body}
}}
""", "product_tiled")
'''


def _by_tiles(inputs: Any, outputs: Any, observed: Any) -> str | None:
    """Each block brings an element of a tile once: between this and a read for every product lies a factor of up to 16."""
    (tokens, depth), width = inputs["x"].shape, len(inputs["w"])
    tiled = 2 * depth * (tokens * -(-width // _TILE) + width * -(-tokens // _TILE))
    read = observed.total("global_read_bytes")
    if observed.total("shared_requests") and 2 * read <= 3 * tiled:
        return None
    return (
        f"The values are right, and {read:,} bytes were read from global memory. With every element brought to a tile of the block "
        f"once, and read there, it would be {tiled:,}"
    )


_BARRIER = "        __syncthreads();\n"
_INNER = "        for (int c = 0; c < TILE; c++) sum += x_tile[ty][c] * w_tile[tx][c];\n"

_TILED = Exercise(
    id="09.3",
    title="tiles in shared memory",
    answer="product_tiled",
    kind="kernel",
    cases=_tile_cases,
    run=_run_kernel,
    expected=_expect,
    points={"small": 1, "awkward": 2, "clean": 1},
    tolerance=_PRODUCT,
    verify=_by_tiles,
    uses=("BF16_CUDA",),
    hints=Hints(
        question="Take {case}. In the first step of the loop, which element of x does thread (tx, ty) = (3, 0) bring, "
        "and which element of w? Who needs them?",
        rule="Each step handles TILE columns k of x and w. First every thread brings one element of each: column "
        "start + tx of row t of x, and of row `row` of w; what lies outside counts as 0. A barrier, so that both tiles "
        "are there. Then each thread adds TILE products, row ty of x_tile with row tx of w_tile. A second barrier, so "
        "that nobody overwrites a tile that others still read. After the loop, those that have an element of out store "
        "it.\n\n"
        "By hand, with TILE = 2 and K = 3: the first step handles k = 0 and 1; the second k = 2 and 3, where k = 3 does "
        "not exist and both tiles hold 0.",
        code="""for (int start = 0; start < K; start += TILE) {
    int k = start + ____;
    x_tile[ty][tx] = t < T && k < K ? ____ : 0.0f;
    w_tile[ty][tx] = row < N && k < K ? ____ : 0.0f;
    ____;
    for (int c = 0; c < TILE; c++) sum += x_tile[ty][____] * w_tile[____][c];
    ____;
}
if (____) out[t * N + n] = sum;""",
    ),
    mistakes=(
        Mistake(
            "second barrier missing",
            _tiled((_INNER + _BARRIER, _INNER)),
            "A fast warp goes on to the next step and overwrites the tiles while a slow one still reads them. The second "
            "barrier keeps everyone in the step until all have finished with its tiles.",
            "A thread has added its products of step one. What does it do next, and who may still be reading?",
        ),
        Mistake(
            "first barrier missing",
            _tiled((_BARRIER + _INNER, _INNER)),
            "Each thread brings two elements and reads thirty-two. Without a barrier after the loads it reads what others "
            "have not brought yet.",
            "Who brought the element in x_tile[ty][15], and how do you know that it is there?",
        ),
        Mistake(
            "nothing put in for what lies outside",
            _tiled(
                (
                    "x_tile[ty][tx] = t < T && k < K ? bf16_to_float(x[t * K + k]) : 0.0f;",
                    "if (t < T && k < K) x_tile[ty][tx] = bf16_to_float(x[t * K + k]);",
                ),
                (
                    "w_tile[ty][tx] = row < N && k < K ? bf16_to_float(w[row * K + k]) : 0.0f;",
                    "if (row < N && k < K) w_tile[ty][tx] = bf16_to_float(w[row * K + k]);",
                ),
            ),
            "At the edge of a matrix a tile is not full. A cell that nobody sets holds what was there before, and it is "
            "multiplied all the same. Put 0 there.",
            "K is not a multiple of 16. What is in the last columns of the last tile?",
        ),
        Mistake(
            "threads without an output leave",
            _tiled(("    float sum = 0.0f;\n", "    if (t >= T || n >= N) return;\n    float sum = 0.0f;\n")),
            "A thread whose element of out does not exist still has work: it brings elements of the tiles that others "
            "need, and it must come to the barriers. Only the store at the end is guarded.",
            "With one row of x, who brings row 1 of w_tile?",
        ),
        Mistake(
            "last columns of K left out",
            _tiled(("start < K;", "start + TILE <= K;")),
            "The loop takes whole tiles only. Where K is not a multiple of 16 the last, partial tile still counts: go on "
            "while start < K.",
            "K = 33 takes how many steps of 16?",
        ),
        Mistake(
            "w_tile read down a column",
            _tiled(("w_tile[tx][c]", "w_tile[c][tx]")),
            "Row r of w_tile holds a row of w: it belongs to output n = blockIdx.x * 16 + r. The thread of output tx needs "
            "row tx, from left to right, as the product is with w transposed.",
            "Which output does row 0 of w_tile belong to?",
        ),
        Mistake(
            "w loaded by the row of its output",
            _tiled(
                (
                    "row < N && k < K ? bf16_to_float(w[row * K + k])",
                    "n < N && k < K ? bf16_to_float(w[n * K + k])",
                )
            ),
            "Thread (tx, ty) fills w_tile[ty][tx], so it must bring the element of row ty of the tile. n goes with tx: that "
            "brings a diagonal of w into each row of the tile.",
            "Thread (3, 0) fills cell [0][3] of w_tile. Which row of w belongs into row 0?",
        ),
        Mistake(
            "row ty of w_tile",
            _tiled(("w_tile[tx][c]", "w_tile[ty][c]")),
            "ty is the row of out that a thread makes, and tx the column: out[t][n] needs row ty of x_tile and row tx of w_tile.",
            "Two threads with the same ty make different outputs. What must differ in what they read?",
        ),
        Mistake(
            "nothing stops k",
            _tiled(("t < T && k < K ?", "t < T ?"), ("row < N && k < K ?", "row < N ?")),
            "Where K is not a multiple of 16, the last step has columns that do not exist: k goes past the row, into the next one, and "
            "at the end out of the array.",
            "K = 33: which k do the threads of the third step have?",
        ),
        Mistake(
            "stored without a guard",
            _tiled(("    if (t < T && n < N) out", "    out")),
            "All threads bring and add, and those whose element of out does not exist must not store.",
            "out has one row. Where does the thread with ty = 1 write?",
        ),
        Mistake(
            "the kernel of 09.1 again",
            _tiled(
                (
                    _TILED_BODY,
                    _NAIVE_BODY,
                )
            ),
            "The numbers are right, and nothing is shared: every thread still fetches both of its rows from global memory by itself.",
            "How often does your block read the first element of x from global memory?",
            variants=(
                _tiled(
                    (
                        "        for (int c = 0; c < TILE; c++) sum += x_tile[ty][c] * w_tile[tx][c];\n",
                        "        for (int c = start; c < min(K, start + TILE); c++)\n"
                        "            if (t < T && n < N) sum += bf16_to_float(x[t * K + c]) * bf16_to_float(w[n * K + c]);\n",
                    )
                ),
            ),
        ),
    ),
)


# ---------------- 09.2: what the tile saves, predicted


_P_T, _P_N, _P_K = 32, 48, 64


@functools.cache
def _read_bytes(tiled: bool) -> int:
    """Bytes that the kernel reads from global memory for the prediction's product, counted by the emulation."""
    namespace: dict[str, Any] = {"cp": emulation, "BF16_CUDA": kernel_source.read("bf16.cuh")}
    exec(_tiled() if tiled else _naive(), namespace)
    kernel = namespace["product_tiled" if tiled else "product_naive"]
    x, w = emulation.zeros((_P_T, _P_K), np.uint16), emulation.zeros((_P_N, _P_K), np.uint16)
    out = emulation.empty((_P_T, _P_N), np.float32)
    reports: list[Any] = []
    with emulation.checks("full"), launch_reports.collect(reports):
        kernel(
            (_P_N // _TILE, _P_T // _TILE),
            (_TILE, _TILE),
            (x, w, out, np.int32(_P_T), np.int32(_P_N), np.int32(_P_K)),
        )
    return int(reports[0].global_read_bytes)


_PREDICTION = Prediction(
    id="09.2",
    title="what is read, and what had to be",
    quantities={
        "naive": Quantity("read by one thread an output", lambda: _read_bytes(False), "bytes"),
        "tiled": Quantity("read with tiles of 16 by 16", lambda: _read_bytes(True), "bytes"),
    },
    explains="32 x 48 threads read 2 x 64 numbers of 2 bytes each: 393,216 bytes, though x and w have only 10,240. With "
    "tiles, the 6 blocks read 2 x 16 x 64 numbers each: 24,576 bytes. A number that is in shared memory serves 16 threads, "
    "so the traffic falls by 16, the side of the tile.",
    hints=Hints(
        question="How many threads are there, and how many numbers does each of them read? With tiles: how many blocks, and "
        "how many numbers does a block bring in all its steps together?",
        rule="Naive: T x N threads, each reads K numbers of x and K of w. Tiled: (T / 16) x (N / 16) blocks, and each brings "
        "16 x K numbers of x and 16 x K of w. A bfloat16 takes 2 bytes.",
        code="naive = 32 * 48 * ____ * 2\ntiled = (32 // 16) * (48 // 16) * ____ * 2",
    ),
)


# ---------------- 09.4: the call, derived for one pair of matrices


def _call_cases(rng: np.random.Generator) -> list[Case]:
    def case(label: str, group: str, numbers: Any) -> Case:
        x, w = (numbers(shape).astype(np.float32) for shape in ((5, 7), (3, 7)))
        return Case(label, {"x": x, "w": w}, group)

    return [
        case("x (5, 7) and w (3, 7) of small whole numbers", "small", lambda s: rng.integers(-3, 4, s)),
        case("x (5, 7) and w (3, 7) of any numbers", "awkward", rng.standard_normal),
    ]


def _run_call(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    names = ("A", "opA", "B", "opB", "m", "n", "k", "lda", "ldb", "ldc")
    if not isinstance(answer, dict):
        raise TypeError(f"call is {answer!r}; it must be the dict that the cell began with, filled in")
    missing = [name for name in names if answer.get(name) is None]
    if missing:
        raise ValueError(f"call[{missing[0]!r}] is not filled in")
    # Each at the front of a larger array, as weights lie in an arena: what is read past the end is there, and wrong.
    rest = np.linspace(1, 2, 64).astype(np.float32)
    arrays = {name: lab.input(name, np.concatenate([inputs[name].ravel(), rest])) for name in ("x", "w")}
    for name in ("A", "B"):
        if answer[name] not in arrays:
            raise ValueError(f"call[{name!r}] is {answer[name]!r}; it must be 'x' or 'w'")
    for name in ("opA", "opB"):
        if answer[name] not in ("N", "T"):
            raise ValueError(
                f"call[{name!r}] is {answer[name]!r}; it must be 'N' (as it is) or 'T' (transposed)"
            )
    for name in names[4:]:
        if isinstance(answer[name], bool) or not isinstance(answer[name], int | np.integer):
            raise ValueError(
                f"call[{name!r}] is {answer[name]!r}; it must be a whole number, for these two matrices"
            )
    sizes = {name: int(answer[name]) for name in names[4:]}
    # cuBLAS makes these checks as well, and on a card says only that some value is invalid.
    rows = {
        "lda": sizes["m" if answer["opA"] == "N" else "k"],
        "ldb": sizes["k" if answer["opB"] == "N" else "n"],
        "ldc": sizes["m"],
    }
    for name, least in rows.items():
        if sizes[name] < least:
            matrix = {"lda": answer["A"], "ldb": answer["B"], "ldc": "out"}[name]
            refused = type("CUBLASError", (ValueError,), {})
            raise refused(
                f"cuBLAS refuses {name} = {sizes[name]}. You ask for op(A) op(B) with A = {answer['A']}, opA = {answer['opA']}, "
                f"B = {answer['B']}, opB = {answer['opB']}: with your sizes a column of {matrix}, as it sees that in memory, has "
                f"{least} elements, and the next one can not begin earlier"
            )
    out = lab.output(64)
    one, zero = np.array(1, np.float32), np.array(0, np.float32)
    first, second = arrays[answer["A"]], arrays[answer["B"]]
    flags = {"N": 0, "T": 1}
    lab.cp.cuda.cublas.sgemm(
        lab.cp.cuda.device.get_cublas_handle(),
        flags[answer["opA"]],
        flags[answer["opB"]],
        sizes["m"],
        sizes["n"],
        sizes["k"],
        one.ctypes.data,
        first.data.ptr,
        sizes["lda"],
        second.data.ptr,
        sizes["ldb"],
        zero.ctypes.data,
        out.data.ptr,
        sizes["ldc"],
    )
    return {"out": lab.get(out)[:15].reshape(5, 3)}


def _expect_call(inputs: Any) -> dict[str, Any]:
    return {"out": (inputs["x"].astype(np.float64) @ inputs["w"].astype(np.float64).T).astype(np.float32)}


def _call(**changes: Any) -> str:
    right: dict[str, Any] = {
        "A": "w", "opA": "T", "B": "x", "opB": "N", "m": 3, "n": 5, "k": 7, "lda": 7, "ldb": 7, "ldc": 3,
    }  # fmt: skip
    return f"call = {right | changes!r}\n"


_DERIVE = Exercise(
    id="09.4",
    title="the call, derived",
    answer="call",
    kind="value",
    cases=_call_cases,
    run=_run_call,
    expected=_expect_call,
    points={"small": 1, "awkward": 1},
    tolerance=_PRODUCT,
    hints=Hints(
        question="cuBLAS will write a column-major (m, n) matrix with ldc numbers from one column to the next. Read "
        "row-major, these bytes must be out (5, 3). So what are m and n?",
        rule="To cuBLAS a row-major (rows, columns) array is its transpose: a column-major (columns, rows) matrix with leading "
        "dimension `columns`. So it sees x as x^T (7, 5), w as w^T (7, 3), and what it writes must be out^T (3, 5). "
        "out^T = (x w^T)^T = w x^T: w comes first. It sees w^T, so w must be transposed back; it sees x^T, which is what is "
        "needed.\n\n"
        "By hand, x (2, 3) and w (4, 3): out^T is (4, 2), so m = 4, n = 2, k = 3; lda = 3, ldb = 3, ldc = 4.",
        code="""call = {
    "A": "w", "opA": ____,
    "B": "x", "opB": ____,
    "m": ____, "n": 5, "k": ____,
    "lda": ____, "ldb": 7, "ldc": ____,
}""",
    ),
    mistakes=(
        Mistake(
            "as if cuBLAS were row-major",
            _call(A="x", opA="N", B="w", opB="T", m=5, n=3, k=7, lda=7, ldb=7, ldc=5),
            "These are the flags of a row-major library. cuBLAS is column-major: what it takes for (5, 7) with leading "
            "dimension 7 are not the rows of x.",
            "Column 0 of A, as cuBLAS sees it, begins with which elements of x?",
            variants=(_call(A="x", opA="N", B="w", opB="T", m=5, n=3, k=7, lda=7, ldb=7, ldc=3),),
        ),
        Mistake(
            "result transposed",
            _call(A="x", opA="T", B="w", opB="N", m=5, n=3, k=7, lda=7, ldb=7, ldc=5),
            "This computes x w^T and stores it column by column. Read row-major, these bytes are the transpose of out. Ask "
            "for out^T instead, and its columns are the rows of out.",
            "In which order do the first five numbers that cuBLAS writes come, and in which order do they lie in out?",
        ),
        Mistake(
            "m and n swapped",
            _call(m=5, n=3),
            "cuBLAS writes m rows and n columns, column-major; that is out^T, which has N = 3 rows and T = 5 columns.",
            "out is (5, 3). How many rows has its transpose?",
        ),
        Mistake(
            "w not transposed",
            _call(opA="N", lda=7),
            "cuBLAS already sees w transposed, as a (7, 3) matrix. The product needs w itself, (3, 7), so the flag must turn it "
            "back. With a square w this would have passed without a word.",
            "op(A) must be (m, k). What shape does cuBLAS see w in?",
        ),
        Mistake(
            "leading dimension of op(A)",
            _call(lda=3),
            "lda belongs to the matrix as it lies in memory, before any flag: from one row of w to the next are 7 numbers. The "
            "flag changes how it is read, not how it lies.",
            "How many numbers lie between the beginnings of two rows of w?",
        ),
        Mistake(
            "ldc from the rows of out",
            _call(ldc=5),
            "ldc is the distance from one column of out^T to the next: from one row of out to the next, which is 3.",
            "From out[0][0] to out[1][0], how many numbers is that?",
        ),
        Mistake(
            "the flags exchanged",
            _call(opA="N", opB="T"),
            "w comes first, and it is w that must be turned back: cuBLAS sees w^T and is to use w. x^T, as it sees x, is what "
            "stands in w x^T.",
            "Which of the two matrices does cuBLAS see the other way round from how the product needs it?",
        ),
        Mistake(
            "x transposed as well",
            _call(opB="T", ldb=7),
            "cuBLAS sees x^T already, and x^T is what stands in w x^T. A flag T would turn it back into x.",
            "op(B) must be (k, n) = (7, 5). What shape does cuBLAS see x in?",
        ),
    ),
)


# ---------------- 09.5: linear


def _linear_cases(rng: np.random.Generator) -> list[Case]:
    return [
        _case(rng, 5, 3, 7, "small"),
        _case(rng, 3, 5, 7, "small"),
        _case(rng, 1, 320, 192, "small"),
        _case(rng, 1, 1, 5, "awkward"),
        _case(rng, 37, 2, 3, "awkward"),
        _case(rng, 7, 257, 31, "awkward"),
        _case(rng, 70, int(rng.integers(20, 60)), 129, "awkward"),
    ]


def _run_linear(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    x, w = lab.input("x", inputs["x"]), lab.input("w", inputs["w"])
    out = lab.output((len(inputs["x"]), len(inputs["w"])))
    copies = 0
    arrays = lab.cp.ndarray
    ways = ("get", "set")
    originals = {way: getattr(arrays, way) for way in ways}

    def counted(way: str) -> object:
        def copy(self: object, *args: object, **kwargs: object) -> object:
            nonlocal copies
            copies += 1
            return originals[way](self, *args, **kwargs)

        return copy

    emulated = getattr(lab.cp, "is_emulation", False)
    if emulated:  # a card's array type can not be changed; there the copies are not counted
        for way in ways:
            setattr(arrays, way, counted(way))
    try:
        returned = answer(x, w, out)
    finally:
        if emulated:
            for way in ways:
                setattr(arrays, way, originals[way])
    return {"out": lab.returned(returned, out), "copies": copies}


def _no_copies(inputs: Any, outputs: Any, observed: Any) -> str | None:
    if outputs["copies"]:
        return (
            f"The numbers are right, and {outputs['copies']} copies went between the card and the host. The product is to be made "
            "where its matrices lie, by one call of cublasGemmEx"
        )
    if observed.allocations:
        return (
            f"The numbers are right, and {observed.allocations} array(s) were made on the device on the way. The flags and "
            "leading dimensions are enough: no byte has to move"
        )
    if observed.launches:
        return (
            f"The numbers are right, by {len(observed.launches)} kernel(s) of your own. This exercise wants one call of "
            "cublasGemmEx"
        )
    return None


_GEMM = """    T, K = x.shape
    N = len(w)
    cublas = cp.cuda.cublas
    cublas.gemmEx(
        cp.cuda.device.get_cublas_handle(), cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N,
        N, T, K,
        ONE.ctypes.data, w.data.ptr, BF16, K, x.data.ptr, BF16, K,
        ZERO.ctypes.data, out.data.ptr, FLOAT32, N, COMPUTE_32F, -1,
    )
    return out"""


def _linear(*changes: tuple[str, str]) -> str:
    """A whole answer for 09.5, with some things exchanged."""
    text = f"""BF16, FLOAT32, COMPUTE_32F = 14, 0, 68
ONE, ZERO = np.array(1, np.float32), np.array(0, np.float32)


def linear(x, w, out):
{_GEMM}
"""
    return with_changes(text, changes)


_LINEAR = Exercise(
    id="09.5",
    title="linear, by cublasGemmEx",
    answer="linear",
    kind="function",
    arguments=("x", "w", "out"),
    cases=_linear_cases,
    run=_run_linear,
    expected=_expect,
    points={"small": 1, "awkward": 2},
    tolerance=Tolerance(
        1e-4, 2e-3, "float32 accumulation in another order; a card's tensor cores cut off low bits on the way"
    ),
    verify=_no_copies,
    uses=("BF16_CUDA",),  # for a kernel that stands in on cards whose cuBLAS has no such product
    makes={"linear": "linear"},
    file="linear.py",
    hints=Hints(
        question="Take {case}. Write down T, N and K; then what 09.4's ten entries become.",
        rule="It is the call of 09.4 with N, T, K in the place of 3, 5, 7. w comes first with flag T and leading dimension K; "
        "x comes second with flag N and leading dimension K; out has leading dimension N. Both inputs are of type 14, the "
        "result is of type 0. alpha is 1 and beta is 0, each a float32 in host memory, given by its address.\n\n"
        "By hand, x (5, 7) and w (3, 7): m, n, k = 3, 5, 7; lda, ldb, ldc = 7, 7, 3.",
        code="""cublas.gemmEx(
    cp.cuda.device.get_cublas_handle(), cublas.CUBLAS_OP_____, cublas.CUBLAS_OP_____,
    ____, ____, K,
    ONE.ctypes.data, ____.data.ptr, BF16, ____, ____.data.ptr, BF16, ____,
    ZERO.ctypes.data, out.data.ptr, FLOAT32, ____, COMPUTE_32F, -1,
)
return ____""",
    ),
    mistakes=(
        Mistake(
            "as if cuBLAS were row-major",
            _linear(
                ("cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N", "cublas.CUBLAS_OP_N, cublas.CUBLAS_OP_T"),
                ("        N, T, K,\n", "        T, N, K,\n"),
                ("w.data.ptr, BF16, K, x.data.ptr, BF16, K,", "x.data.ptr, BF16, K, w.data.ptr, BF16, K,"),
            ),
            "These are the flags of a row-major library: x as it is, w transposed. cuBLAS is column-major, so what it takes for x "
            "is not x. Write down what it sees in each array, and then what it must write.",
            "To cuBLAS, what shape have the bytes of x, and which matrix is that?",
            variants=(
                _linear(
                    ("cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N", "cublas.CUBLAS_OP_N, cublas.CUBLAS_OP_T"),
                    ("        N, T, K,\n", "        T, N, K,\n"),
                    (
                        "w.data.ptr, BF16, K, x.data.ptr, BF16, K,",
                        "x.data.ptr, BF16, T, w.data.ptr, BF16, N,",
                    ),
                    ("FLOAT32, N, COMPUTE", "FLOAT32, T, COMPUTE"),
                ),
            ),
        ),
        Mistake(
            "m and n swapped",
            _linear(("        N, T, K,\n", "        T, N, K,\n")),
            "cuBLAS writes out^T, which has N rows and T columns: m is N and n is T. Where T is N nobody would notice.",
            "out is (T, N). How many rows has what cuBLAS writes?",
        ),
        Mistake(
            "leading dimension of w is N",
            _linear(("w.data.ptr, BF16, K,", "w.data.ptr, BF16, N,")),
            "From one row of w to the next are K numbers: lda is K, whatever the flag says.",
            "w is (N, K). Where does its second row begin?",
        ),
        Mistake(
            "w not transposed",
            _linear(("cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N", "cublas.CUBLAS_OP_N, cublas.CUBLAS_OP_N")),
            "cuBLAS sees the row-major w as w^T. The product w x^T needs w itself: flag T turns it back. With a square w the "
            "call would go through and multiply by the wrong matrix.",
            "op(A) must be (N, K). What does cuBLAS see in the bytes of w?",
            variants=(
                _linear(
                    ("cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N", "cublas.CUBLAS_OP_N, cublas.CUBLAS_OP_N"),
                    ("w.data.ptr, BF16, K, x", "w.data.ptr, BF16, N, x"),
                ),
            ),
        ),
        Mistake(
            "result transposed",
            _linear(
                ("        N, T, K,\n", "        T, N, K,\n"),
                ("w.data.ptr, BF16, K, x.data.ptr, BF16, K,", "x.data.ptr, BF16, K, w.data.ptr, BF16, K,"),
                ("FLOAT32, N, COMPUTE", "FLOAT32, T, COMPUTE"),
            ),
            "The product is right and lies column by column, so that out holds its transpose. With one token the two are the "
            "same: the prompt goes wrong, and every step after it looks right. Ask for out^T = w x^T.",
            "Which numbers does cuBLAS write first: those of one token, or those of one output?",
        ),
        Mistake(
            "alpha reads as 0",
            _linear(("ONE, ZERO = np.array(1, np.float32)", "ONE, ZERO = np.array(1.0)")),
            "At alpha's address cuBLAS found no float32 of 1. np.array(1.0) is a float64, whose first four bytes are zeros. And an "
            "array that is made inside of the call is gone when its address has been taken: the next one, beta, may lie there.",
            "cuBLAS is given an address. What lies there when it reads four bytes, and who keeps it alive?",
        ),
        Mistake(
            "beta is 1",
            _linear(("ZERO.ctypes.data", "ONE.ctypes.data")),
            "The result is alpha * product + beta * C: with beta = 1 the old content of out is added, and out is memory that "
            "nobody has written. With beta = 0 cuBLAS does not read it at all.",
            "What is in out before the call?",
        ),
        Mistake(
            "inputs declared as float16",
            _linear(("BF16, FLOAT32, COMPUTE_32F = 14,", "BF16, FLOAT32, COMPUTE_32F = 2,")),
            "Type 2 is float16: the same 16 bits mean another number there, as lesson 02 showed. bfloat16 is type 14.",
            "Your inputs are 16 bits wide. Which of the two 16-bit formats did you name?",
        ),
        Mistake(
            "an array made on the way",
            _linear(
                ("    N = len(w)\n", "    N = len(w)\n    wt = cp.ascontiguousarray(w.T)\n"),
                ("cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N", "cublas.CUBLAS_OP_N, cublas.CUBLAS_OP_N"),
                ("w.data.ptr, BF16, K, x", "wt.data.ptr, BF16, N, x"),
            ),
            "It works, and it makes an array at every call. A transposed copy of w moves more bytes than the product itself reads; "
            "flag T does the same without moving one. And the result can go straight to out.",
            "How many bytes does your function move besides the product?",
            variants=(
                _linear(
                    ("    N = len(w)\n", "    N = len(w)\n    y = cp.empty((T, N), np.float32)\n"),
                    ("out.data.ptr", "y.data.ptr"),
                    ("    return out", "    out[...] = y\n    return out"),
                ),
            ),
        ),
        Mistake(
            "NumPy on the host",
            """def linear(x, w, out):
    def wide(bits):
        return (bits.get().astype(np.uint32) << 16).view(np.float32)

    out.set(wide(x) @ wide(w).T)
    return out
""",
            "Every weight crosses the narrow road of lesson 04 for each token, and the host does the work of the card.",
            "Where do x and w lie, and where is your product made?",
        ),
        Mistake(
            "out declared as bfloat16",
            _linear(("FLOAT32, N, COMPUTE", "BF16, N, COMPUTE")),
            "out holds float32, type 0. Declared as bfloat16, each result is written in two bytes, so that two of them make one float "
            "of out, and its second half stays as it was.",
            "How many bytes has an element of out, and how many does your call write for one?",
        ),
        Mistake(
            "the numbers of 09.4",
            _linear(
                ("        N, T, K,\n", "        3, 5, 7,\n"),
                ("w.data.ptr, BF16, K, x.data.ptr, BF16, K,", "w.data.ptr, BF16, 7, x.data.ptr, BF16, 7,"),
                ("FLOAT32, N, COMPUTE", "FLOAT32, 3, COMPUTE"),
            ),
            "3, 5 and 7 were one pair of matrices. The function gets any: N, T and K take their places.",
            "Which of the numbers in your call come from x and w?",
        ),
        Mistake(
            "out not returned",
            _linear(("    return out", "    pass")),
            "A part fills out and gives it back, so that calls can be written inside each other.",
            "What does a Python function without a return give?",
        ),
    ),
)


# ---------------- what is drawn and measured


def _picture(title: str) -> Any:
    def draw(answer: Any, cp: Any) -> Any:
        tokens, outputs, depth = 18, 22, 20
        x, w = cp.zeros((tokens, depth), np.uint16), cp.zeros((outputs, depth), np.uint16)
        out = cp.empty((tokens, outputs), np.float32)
        with cp.trace() as trace:
            answer((2, 2), (16, 16), (x, w, out, np.int32(tokens), np.int32(outputs), np.int32(depth)))
        x_reads = reads_of_block(trace.rows, "x", (tokens, depth))
        w_reads = reads_of_block(trace.rows, "w", (outputs, depth))
        return block_reads(x_reads, w_reads, (16, 16), title=title)

    return draw


def _make_run(tokens: int, outputs: int, depth: int) -> Any:
    def make(answer: Any, cp: Any) -> Any:
        x, w = cp.zeros((tokens, depth), np.uint16), cp.zeros((outputs, depth), np.uint16)
        out = cp.empty((tokens, outputs), np.float32)
        if not hasattr(answer, "code"):  # a function
            return lambda: answer(x, w, out)
        grid = (-(-outputs // 16), -(-tokens // 16))
        args = (x, w, out, np.int32(tokens), np.int32(outputs), np.int32(depth))
        return lambda: answer(grid, (16, 16), args)

    return make


def _work(large: tuple[int, int, int], small: tuple[int, int, int]) -> Work:
    def label(sizes: tuple[int, int, int]) -> str:
        return f"x ({sizes[0]:,}, {sizes[2]:,}), w ({sizes[1]:,}, {sizes[2]:,})"

    def reads(sizes: tuple[int, int, int]) -> int:
        return 2 * sizes[2] * (sizes[0] + sizes[1])

    return Work(
        label=label(large),
        make=_make_run(*large),
        read_bytes=reads(large),
        write_bytes=4 * large[0] * large[1],
        small=_make_run(*small),
        small_read_bytes=reads(small),
        small_write_bytes=4 * small[0] * small[1],
        small_label=label(small),
        note="One thread an output: threads side by side read w a whole row apart, so each of them moves a sector of its own. "
        "Asked for are the bytes that are read and those of out, which are written.",
    )


_WORK = _work((512, 3072, 2048), (32, 48, 64))

LESSON = Lesson(
    number="09",
    slug="cublas_trick",
    title="The cuBLAS trick",
    part=2,
    minutes=65,
    exercises=(_NAIVE, _PREDICTION, _TILED, _DERIVE, _LINEAR),
    engine=EngineCard(
        mistakes=(
            ("09.5", "result transposed"),
            ("09.5", "inputs declared as float16"),
            ("09.5", "alpha reads as 0"),
        ),
        note="Your linear makes every matrix product of the model: four a layer and one for the logits.",
    ),
    pictures={
        "09.1": _picture("One thread an output: how often a block reads each element"),
        "09.3": _picture("Tiles in shared memory: how often a block reads each element"),
    },
    works={"09.1": _WORK, "09.3": _WORK, "09.5": _WORK},
)
