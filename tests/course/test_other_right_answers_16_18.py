"""Answers of lessons 16 to 18 that are right in another way than the solution: a plan, a draw, a batch."""

from __future__ import annotations

import pytest

from tinyvllm_ref import emulation
from tinyvllm_ref.course.answers import make_answer
from tinyvllm_ref.course.exercise import Exercise
from tinyvllm_ref.course.exercises import exercise_of
from tinyvllm_ref.course.judging import judge
from tinyvllm_ref.course.lessons import solution_cell


@pytest.fixture(autouse=True)
def _own_folders(tmp_path, monkeypatch):
    """Nothing of the person who runs the tests takes part."""
    monkeypatch.setenv("TINYVLLM_MY_ENGINE", str(tmp_path / "my_engine"))


def _solution(id: str) -> str:
    text = solution_cell(id)
    assert text is not None
    return text


def _changed(id: str, *changes: tuple[str, str]) -> str:
    text = _solution(id)
    for old, new in changes:
        assert old in text, (id, old)
        text = text.replace(old, new)
    return text


def _answers() -> dict[str, tuple[str, str]]:
    return {
        "16.1, every step collected": (
            "16.1",
            """def lifetimes(program):
    steps = {}
    for step, (name, reads, writes) in enumerate(program, 1):
        for buffer in {*reads, *writes}:
            steps.setdefault(buffer, []).append(step)
    return {buffer: [min(touched), max(touched)] for buffer, touched in steps.items()}
""",
        ),
        "16.3, in the order of birth, the first place that is free": (
            "16.3",
            """def plan_buffers(lifetimes):
    offsets, placed, arena = [0] * len(lifetimes), [], 0
    for i in sorted(range(len(lifetimes)), key=lambda i: (lifetimes[i][1], -lifetimes[i][0])):
        size, first, last = lifetimes[i]
        met = [(begin, end) for begin, end, f, l in placed if first <= l and f <= last]
        for offset in [0, *sorted(end for _, end in met)]:
            if all(offset + size <= begin or end <= offset for begin, end in met):
                break
        end = offset + -(-size // 256) * 256
        placed.append((offset, end, first, last))
        offsets[i], arena = offset, max(arena, end)
    return tuple(offsets), arena
""",
        ),
        "16.4, all bits set, in strides": (
            "16.4",
            '''poison = cp.RawKernel(r"""
extern "C" __global__ void poison(unsigned short* words, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) words[i] |= 0xFFFF;
}
""", "poison")
''',
        ),
        "16.6, views cut when they are asked for": (
            "16.6",
            """class Workspace:
    def __init__(self, buffers, max_tokens):
        self.buffers = buffers
        self.row = {name: columns * np.dtype(dtype).itemsize for name, (columns, dtype, _, _) in buffers.items()}
        lives = [(max_tokens * self.row[name], first, last) for name, (_, _, first, last) in buffers.items()]
        offsets, total = plan_buffers(lives)
        self.offsets, self.arena = dict(zip(buffers, offsets)), cp.empty(total, np.uint8)

    def views(self, tokens):
        found = {}
        for name, begin in self.offsets.items():
            flat = self.arena[begin : begin + tokens * self.row[name]]
            found[name] = flat.view(self.buffers[name][1]).reshape(tokens, -1)
        return found
""",
        ),
        "17.1, everything divided by T first": (
            "17.1",
            _changed(
                "17.1",
                ("fmaxf(peak, row[j])", "fmaxf(peak, row[j] / T)"),
                ("expf((row[j] - peak) / T)", "expf(row[j] / T - peak)"),
            ),
        ),
        "17.2, added up one by one": (
            "17.2",
            """def keep(logits, temperature, top_k, top_p):
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    p = np.array([np.exp((logits[i] - max(logits)) / temperature) for i in order])
    if top_k > 0:
        order, p = order[:top_k], p[:top_k]
    p, total, n = p / p.sum(), 0, 0
    while n < len(p) and (n == 0 or total < top_p):
        total, n = total + p[n], n + 1
    return order[:n], (p[:n] / p[:n].sum()).tolist()
""",
        ),
        "17.4, each thread adds up what lies in front of it": (
            "17.4",
            '''SEARCH_CUDA = r"""
__device__ int search(const float* weights, int n, float target, float* before) {
    __shared__ int found;
    int t = threadIdx.x, each = (n + blockDim.x - 1) / blockDim.x;
    int begin = min(n, t * each), end = min(n, begin + each);
    float sum = 0;
    for (int j = begin; j < end; j++) sum += weights[j];
    before[t] = sum;
    if (t == 0) found = n - 1;
    __syncthreads();
    sum = 0;
    for (int s = 0; s < t; s++) sum += before[s];
    for (int j = begin; j < end; j++) if ((sum += weights[j]) >= target) atomicMin(&found, j);
    __syncthreads();
    int index = found;
    __syncthreads();
    return index;
}
"""
''',
        ),
        "18.2, made on the device": (
            "18.2",
            """def pack(sequences):
    starts = [0]
    for tokens in sequences:
        starts.append(starts[-1] + len(tokens))
    ids = cp.concatenate([cp.asarray(tokens, dtype=np.int32) for tokens in sequences])
    positions = cp.concatenate([cp.arange(len(tokens), dtype=np.int32) for tokens in sequences])
    return [ids, positions, cp.asarray(starts, dtype=np.int32)]
""",
        ),
        "18.3, neighbouring columns for a thread": (
            "18.3",
            '''gather_last = cp.RawKernel(r"""
extern "C" __global__ void gather_last(const unsigned short* x, const int* query_starts, unsigned short* out, int H) {
    int row = query_starts[blockIdx.x + 1] - 1, each = (H + blockDim.x - 1) / blockDim.x;
    for (int c = threadIdx.x * each; c < min(H, (int)(threadIdx.x + 1) * each); c++)
        out[blockIdx.x * H + c] = x[row * H + c];
}
""", "gather_last")
''',
        ),
        "18.4, seats that empty, texts that grow": (
            "18.4",
            """def serve(prompts, next_tokens, num_slots, end_ids, max_tokens):
    texts, rows = [list(prompt) for prompt in prompts], []
    for first in range(0, len(prompts), num_slots):
        seats = [r if r < len(prompts) else None for r in range(first, first + num_slots)]
        while any(r is not None for r in seats):
            rows.append(list(seats))
            busy = [r for r in seats if r is not None]
            for r, token in zip(busy, next_tokens([texts[r] for r in busy])):
                texts[r].append(token)
                if token in end_ids or len(texts[r]) - len(prompts[r]) == max_tokens:
                    seats[seats.index(r)] = None
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts)], [list(slot) for slot in zip(*rows)]
""",
        ),
        "18.6, in floats": (
            "18.6",
            """def step_bytes(m, batch, context):
    q, kv, h = m["heads"] * m["head_dim"], m["kv_heads"] * m["head_dim"], m["hidden"]
    numbers = m["layers"] * (2 * q + 2 * kv + 3 * m["ffn"]) * h + m["vocab"] * h
    return numbers * 16 / 8, batch * context * m["layers"] * kv * 2 * 16 / 8
""",
        ),
    }


RIGHT = _answers()


@pytest.mark.parametrize("name", RIGHT)
def test_an_answer_that_is_right_in_another_way_passes(name: str) -> None:
    id, source = RIGHT[name]
    exercise = exercise_of(id)
    assert isinstance(exercise, Exercise)
    before = {earlier: _solution(earlier) for earlier in exercise.builds_on}
    verdict = judge(exercise, make_answer(exercise, source, emulation, before=before), emulation)
    assert verdict.passed, verdict.first_failure
