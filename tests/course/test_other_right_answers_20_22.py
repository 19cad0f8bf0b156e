"""Answers of lessons 20 to 22 that are right in another way than the solution: a softmax in one pass, and pages."""

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
        assert text.count(old) == 1, (id, old)
        text = text.replace(old, new)
    return text


_TILE_TERMS = """        float shrink = expf(peak - new_peak);
        sum *= shrink;
        for (int d = 0; d < HEAD_DIM; d++) total[d] *= shrink;
        for (int j = 0; j < count; j++) {
            float weight = expf(score[j] - new_peak);
"""

RIGHT = {
    "20.1, a mean that is kept up to date": (
        "20.1",
        """def one_pass(pairs):
    peak, total, mean = -np.inf, 0.0, 0.0
    for score, value in pairs:
        if score > peak:
            total *= np.exp(peak - score)
            peak = score
        weight = np.exp(score - peak)
        total += weight
        mean = mean + (value - mean) * (weight / total)
    return peak, total, mean
""",
    ),
    "20.1, in place": (
        "20.1",
        """def one_pass(pairs):
    peak, total, out = -np.inf, 0.0, None
    for score, value in pairs:
        new = max(peak, score)
        shrink, weight = np.exp(peak - new), np.exp(score - new)
        total = total * shrink + weight
        if out is None:
            out = value * weight
        else:
            out *= shrink
            out += weight * value
        peak = new
    return peak, total, out / total
""",
    ),
    "20.3, each kind of row for itself": (
        "20.3",
        _changed(
            "20.3",
            (
                "    float peak = fmaxf(lse_a[row], lse_b[row]);\n",
                """    if (isinf(lse_a[row]) || isinf(lse_b[row])) {
        const float* there = isinf(lse_a[row]) ? out_b : out_a;
        float its = isinf(lse_a[row]) ? lse_b[row] : lse_a[row];
        for (int d = threadIdx.x; d < width; d += blockDim.x)
            out[row * width + d] = isinf(its) ? 0.0f : there[row * width + d];
        if (threadIdx.x == 0) lse[row] = its;
        return;
    }
    float peak = fmaxf(lse_a[row], lse_b[row]);
""",
            ),
        ),
    ),
    "20.4, rescaled once a key": (
        "20.4",
        _changed(
            "20.4",
            ("            new_peak = fmaxf(new_peak, score[j]);\n", ""),
            (
                _TILE_TERMS,
                """        for (int j = 0; j < count; j++) {
            float before = new_peak;
            new_peak = fmaxf(new_peak, score[j]);
            float shrink = expf(before - new_peak), weight = expf(score[j] - new_peak);
            sum *= shrink;
            for (int d = 0; d < HEAD_DIM; d++) total[d] *= shrink;
""",
            ),
        ),
    ),
    "20.4, a whole tile with scores of minus infinity": (
        "20.4",
        _changed(
            "20.4",
            ("            score[j] = 0.0f;\n", "            score[j] = j < count ? 0.0f : MINUS_INFINITY;\n"),
            (
                "        for (int j = 0; j < count; j++) {\n            score",
                "        for (int j = 0; j < TILE; j++) {\n            score",
            ),
            (
                "        for (int j = 0; j < count; j++) {\n            float weight",
                "        for (int j = 0; j < TILE; j++) {\n            float weight",
            ),
        ),
    ),
    "21.4, a queue, and a slice": (
        "21.4",
        """class BlockManager:
    def __init__(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free_blocks = list(range(num_blocks))
        self.tables = {}

    @property
    def num_free(self):
        return len(self.free_blocks)

    def allocate(self, id, num_tokens):
        have = self.tables.get(id, [])
        missing = max(0, -(-num_tokens // self.block_size) - len(have))
        if missing > self.num_free:
            return False
        taken, self.free_blocks = self.free_blocks[:missing], self.free_blocks[missing:]
        self.tables[id] = have + taken
        return True

    def free(self, id):
        self.free_blocks.extend(self.tables.pop(id))

    def table(self, id):
        return self.tables[id]

    def check(self):
        held = self.free_blocks + sum(self.tables.values(), [])
        if len(held) != self.num_blocks or len(set(held)) != len(held):
            raise RuntimeError(f"lost count: {held}")
""",
    ),
    "21.5, large pieces first": (
        "21.5",
        """from itertools import combinations


def shrink(trace, leaks):
    steps, size = list(trace), len(trace) // 2
    while size > 2:
        at = 0
        while at < len(steps):
            rest = steps[:at] + steps[at + size :]
            if leaks(rest):
                steps = rest
            else:
                at += size
        size //= 2
    for count in (1, 2):
        for out in combinations(range(len(steps)), count):
            rest = [step for i, step in enumerate(steps) if i not in out]
            if leaks(rest):
                return shrink(rest, leaks)
    return steps
""",
    ),
    "22.2, weights of 0 passed over": (
        "22.2",
        _changed("22.2", ("total += weight[j] *", "if (weight[j] > 0.0f) total += weight[j] *")),
    ),
    "22.3, the whole sum known to all after each tile": (
        "22.3",
        _changed(
            "22.3",
            ("sum = sum * shrink + weight[t];", "sum = sum * shrink + block_sum(weight[t], scratch);"),
            ("    sum = block_sum(sum, scratch);\n", ""),
        ),
    ),
    "22.5, a sum that every lane has": (
        "22.5",
        _changed("22.5", ("__shfl_down_sync(", "__shfl_xor_sync(")),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_an_answer_that_is_right_in_another_way_passes(name: str) -> None:
    id, source = RIGHT[name]
    exercise = exercise_of(id)
    assert isinstance(exercise, Exercise)
    before = {earlier: _solution(earlier) for earlier in exercise.builds_on}
    verdict = judge(exercise, make_answer(exercise, source, emulation, before=before), emulation)
    assert verdict.passed, verdict.first_failure
