"""Answers that are right in another way than the solution: a check that looks at more than values lets them pass."""

from __future__ import annotations

import pytest

from tinyvllm_ref import emulation
from tinyvllm_ref.course.answers import make_answer
from tinyvllm_ref.course.exercise import Exercise
from tinyvllm_ref.course.exercises import exercise_of
from tinyvllm_ref.course.judging import judge
from tinyvllm_ref.course.lessons import solution_cell


def _kernel(name: str, parameters: str, body: str, before: str = "") -> str:
    text = f'{before}extern "C" __global__ void {name}({parameters}) {{\n{body}\n}}'
    return f'{name} = cp.RawKernel(r"""\n{text}\n""", "{name}")\n'


def _minus_max(body: str) -> str:
    head = "extern __shared__ float cell[];\nint t = threadIdx.x;\nconst float* row = x + blockIdx.x * n;\n"
    tail = "\nif (t < n) out[blockIdx.x * n + t] = row[t] - most;"
    return _kernel("minus_max", "const float* x, float* out, int n", head + body + tail)


def _histogram(body: str) -> str:
    head = "__shared__ int count[256];\nint t = threadIdx.x;\n"
    tail = """
for (int i = t; i < n; i += blockDim.x) atomicAdd(count + symbols[blockIdx.x * n + i], 1);
__syncthreads();
for (int b = t; b < 256; b += blockDim.x) out[blockIdx.x * 256 + b] = count[b];"""
    return _kernel("histogram", "const unsigned char* symbols, int* out, int n", head + body + tail)


def _tiled(loads: str, sums: str, tiles: str) -> str:
    text = f"""
extern "C" __global__ void product_tiled(const bf16* x, const bf16* w, float* out, int T, int N, int K) {{
    __shared__ float {tiles};
    int tx = threadIdx.x, ty = threadIdx.y;
    int n = blockIdx.x * 16 + tx, t = blockIdx.y * 16 + ty, row = blockIdx.x * 16 + ty;
    float sum = 0;
    for (int start = 0; start < K; start += 16) {{
        {loads}
        __syncthreads();
        {sums}
        __syncthreads();
    }}
    if (t < T && n < N) out[t * N + n] = sum;
}}"""
    return f'product_tiled = cp.RawKernel(BF16_CUDA + r"""{text}\n""", "product_tiled")\n'


_BRING_X = "x_tile[ty][tx] = t < T && start + tx < K ? bf16_to_float(x[t * K + start + tx]) : 0;"
_BRING_W = "row < N && start + tx < K ? bf16_to_float(w[row * K + start + tx]) : 0;"
_SHUFFLE = """float most = t < n ? row[t] : __int_as_float(0xff800000);
for (int lanes = 16; lanes > 0; lanes /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, lanes));
if (t % 32 == 0) cell[t / 32] = most;
__syncthreads();
most = cell[0];
for (int k = 1; k < (blockDim.x + 31) / 32; k++) most = fmaxf(most, cell[k]);"""

RIGHT = {
    "04.1, NumPy": (
        "04.1",
        """def plan_arena(groups):
    offsets, end = [], 0
    for sizes in groups:
        starts = end + np.concatenate([[0], np.cumsum(sizes)]).astype(int)
        offsets.append(starts[:-1])
        end = int(np.ceil(starts[-1] / 256)) * 256
    return offsets, end
""",
    ),
    "04.1, rounded by the remainder, tuples": (
        "04.1",
        """from itertools import accumulate
def plan_arena(groups):
    offsets, end = [], 0
    for sizes in groups:
        *starts, end = accumulate(sizes, initial=end)
        offsets.append(tuple(starts))
        end += -end % 256
    return tuple(offsets), np.int64(end)
""",
    ),
    "04.3, pointers to bytes": (
        "04.3",
        _kernel(
            "move_tensors",
            "const char* file, char* arena, const long long* source, const long long* target, const long long* count",
            "long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;\nif (i >= count[blockIdx.y]) return;\n"
            "const unsigned short* from = (const unsigned short*)(file + source[blockIdx.y]);\n"
            "((unsigned short*)(arena + target[blockIdx.y]))[i] = from[i];",
        ),
    ),
    "04.4, the least of five": (
        "04.4",
        """def seconds_of(launch, clock, synchronize):
    spent = []
    for _ in range(5):
        synchronize()
        start = clock()
        launch()
        synchronize()
        spent.append(clock() - start)
    return min(spent)
""",
    ),
    "04.4, the difference of two and one": (
        "04.4",
        """def seconds_of(launch, clock, synchronize):
    def spent(times):
        synchronize()
        start = clock()
        for _ in range(times):
            launch()
        synchronize()
        return clock() - start
    spent(1)
    return spent(2) - spent(1)
""",
    ),
    "08.1, through shared memory": (
        "08.1",
        _kernel(
            "smooth",
            "const float* x, float* y, int n",
            """__shared__ float near[1026];
int k = threadIdx.x, i = blockIdx.x * blockDim.x + k;
if (i < n) near[k + 1] = x[i];
if (k == 0) near[0] = x[max(i - 1, 0)];
if (i < n && (k == blockDim.x - 1 || i == n - 1)) near[k + 2] = x[min(i + 1, n - 1)];
__syncthreads();
if (i < n) y[i] = (near[k] + near[k + 1] + near[k + 2]) * (1.0f / 3);""",
        ),
    ),
    "08.2, half of the threads turn pairs": (
        "08.2",
        _kernel(
            "rotate_half",
            "float* x",
            """int half = blockDim.x / 2, i = blockIdx.x * blockDim.x + threadIdx.x;
if (threadIdx.x >= half) return;
float a = x[i], b = x[i + half];
x[i] = -b;
x[i + half] = a;""",
        ),
    ),
    "08.3, empty cells filled": (
        "08.3",
        _minus_max("""cell[t] = t < n ? row[t] : __int_as_float(0xff800000);
__syncthreads();
for (int s = blockDim.x / 2; s > 0; s /= 2) {
    if (t < s) cell[t] = fmaxf(cell[t], cell[t + s]);
    __syncthreads();
}
float most = cell[0];"""),
    ),
    "08.3, neighbours first": (
        "08.3",
        _minus_max("""if (t < n) cell[t] = row[t];
__syncthreads();
for (int s = 1; s < n; s *= 2) {
    if (t % (2 * s) == 0 && t + s < n) cell[t] = fmaxf(cell[t], cell[t + s]);
    __syncthreads();
}
float most = cell[0];"""),
    ),
    "08.3, shuffles": ("08.3", _minus_max(_SHUFFLE)),
    "08.4, thread 0 sets all": (
        "08.4",
        _histogram("if (t == 0)\n    for (int b = 0; b < 256; b++) count[b] = 0;\n__syncthreads();"),
    ),
    "08.4, every thread sets all": (
        "08.4",
        _histogram("for (int b = 0; b < 256; b++) count[b] = 0;\n__syncthreads();"),
    ),
    "08.4, memset": ("08.4", _histogram("memset(count, 0, sizeof(count));\n__syncthreads();")),
    "08.5, a second buffer of its own": (
        "08.5",
        solution_cell("08.5")
        .replace("    __syncthreads();\n    float e", "    __shared__ float other[1024];\n    float e")
        .replace("reduce(e, cell, false)", "reduce(e, other, false)"),
    ),
    "08.6, in double": (
        "08.6",
        solution_cell("08.6").replace("(long long)layer[i]", "(double)layer[i]"),
    ),
    "09.1, fma and pointers": (
        "09.1",
        'product_naive = cp.RawKernel(BF16_CUDA + r"""\n'
        'extern "C" __global__ void product_naive(const bf16* x, const bf16* w, float* out, int T, int N, int K) {\n'
        """    int n = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y * blockDim.y + threadIdx.y;
    if (t >= T || n >= N) return;
    double sum = 0;
    for (int k = K; k--;) sum = fma((double)bf16_to_float(x[t * K + k]), (double)bf16_to_float(w[n * K + k]), sum);
    out[t * N + n] = sum;
}
""\", "product_naive")
""",
    ),
    "09.3, no column too many": (
        "09.3",
        _tiled(
            f"{_BRING_X} w_tile[ty][tx] = {_BRING_W}",
            "for (int c = 0; c < min(16, K - start); c++) sum += x_tile[ty][c] * w_tile[tx][c];",
            "x_tile[16][16], w_tile[16][16]",
        ),
    ),
    "09.3, w turned in its tile": (
        "09.3",
        _tiled(
            f"{_BRING_X} w_tile[tx][ty] = {_BRING_W}",
            "for (int c = 0; c < 16; c++) sum += x_tile[ty][c] * w_tile[c][tx];",
            "x_tile[16][17], w_tile[16][17]",
        ),
    ),
    "09.3, w brought down a column": (
        "09.3",
        _tiled(
            f"{_BRING_X} w_tile[tx][ty] = n < N && start + ty < K ? bf16_to_float(w[n * K + start + ty]) : 0;",
            "for (int c = 0; c < 16; c++) sum += x_tile[ty][c] * w_tile[tx][c];",
            "x_tile[16][16], w_tile[16][17]",
        ),
    ),
    "09.4, made by dict()": (
        "09.4",
        'call = dict(A="w", opA="T", B="x", opB="N", m=3, n=5, k=7, lda=np.int64(7), ldb=7, ldc=3)\n',
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_an_answer_that_is_right_in_another_way_passes(name: str) -> None:
    id, source = RIGHT[name]
    exercise = exercise_of(id)
    assert isinstance(exercise, Exercise)
    verdict = judge(exercise, make_answer(exercise, source, emulation), emulation)
    assert verdict.passed, verdict.first_failure
