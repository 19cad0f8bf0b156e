"""Answers of lessons 13 to 15 that are right in another way than the solution: a layer, a model, a cache."""

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


_SPLIT = """    q, k, v = (
        cp.ascontiguousarray(part).reshape(tokens, -1, head_dim)
        for part in cp.split(qkv, [heads * head_dim, (heads + kv_heads) * head_dim], axis=1)
    )
    rope("""

_BEATS = """struct Candidate { float value; int index; };
__device__ __forceinline__ bool beats(Candidate a, Candidate b) {
    return a.value != b.value ? a.value > b.value : a.index < b.index;
}
__device__ __forceinline__ Candidate block_best(Candidate mine, Candidate* scratch) {
    int t = threadIdx.x;
    scratch[t] = mine;
    __syncthreads();
"""
_TAIL = """    mine = scratch[0];
    __syncthreads();
    return mine;
}
"""


def _best(rounds: str) -> str:
    return f'BLOCK_BEST_CUDA = r"""\n{_BEATS}{rounds}{_TAIL}"""\n'


def _answers() -> dict[str, tuple[str, str]]:
    layer = _solution("13.4")
    cut = layer[layer.index("    q_end, k_end") : layer.index("    rope(") + len("    rope(")]
    first = layer[layer.index("    if layer == 0") : layer.index("    qkv = ")]
    return {
        "13.1, by the hyperbolic tangent": (
            "13.1",
            _changed("13.1", ("x[i] / (1.0f + expf(-x[i]))", "0.5f * x[i] * (1.0f + tanhf(0.5f * x[i]))")),
        ),
        "13.3, the product first": (
            "13.3",
            _changed("13.3", ("gate / (1.0f + expf(-gate)) * up", "gate * up / (1 + exp(-gate))")),
        ),
        "13.4, x zeroed in layer 0, and always added": (
            "13.4",
            layer.replace(
                first,
                "    if not layer:\n        x.fill(0)\n"
                '    add_rms_norm(x, residual, weight("input_layernorm"), eps, h)\n',
            ),
        ),
        "13.4, cut by split": ("13.4", layer.replace(cut, _SPLIT)),
        "14.1, neighbours first": (
            "14.1",
            _best(
                """    for (int s = 1; s < blockDim.x; s *= 2) {
        if (t % (2 * s) == 0 && t + s < blockDim.x && beats(scratch[t + s], scratch[t])) scratch[t] = scratch[t + s];
        __syncthreads();
    }
"""
            ),
        ),
        "14.1, every thread joins, in doubling steps": (
            "14.1",
            _best(
                """    for (int s = 1; s < blockDim.x; s *= 2) {
        Candidate other = t + s < blockDim.x ? scratch[t + s] : mine;
        __syncthreads();
        if (beats(other, scratch[t])) scratch[t] = other;
        __syncthreads();
    }
"""
            ),
        ),
        "14.2, neighbouring columns, smaller parts, more threads": (
            "14.2",
            _changed(
                "14.2",
                ("THREADS, PART = 64, 512", "THREADS, PART = 128, 300"),
                (
                    "for (int c = begin + threadIdx.x; c < end; c += blockDim.x) {",
                    "int each = (part + blockDim.x - 1) / blockDim.x, from = begin + threadIdx.x * each;\n"
                    "    for (int c = from; c < min(end, from + each); c++) {",
                ),
            ),
        ),
        "14.3, added by hand, rows before the norm": (
            "14.3",
            _changed(
                "14.3",
                ("h = cp.empty((tokens,", "wanted = inputs.logits_rows\n    h = cp.empty((len(wanted),"),
                (
                    'add_rms_norm(x, residual, weights["norm"]',
                    'residual += x\n    rms_norm(residual[wanted], weights["norm"]',
                ),
                ("rows = h[inputs.logits_rows]", "rows = h"),
            ),
        ),
        "14.4, the first of a generator, without a division": (
            "14.4",
            """def first_difference(mine, golden, tolerance):
    def agrees(name):
        return np.linalg.norm(mine[name] - golden[name]) <= tolerance * np.linalg.norm(golden[name])
    return next((name for name in mine if not agrees(name)), None)
""",
        ),
        "15.1, a thread for each number": (
            "15.1",
            '''kv_write_kernel = cp.RawKernel(BF16_CUDA + r"""
extern "C" __global__ void kv_write_kernel(
    const float* k, const float* v, const long long* slots, bf16* key_cache, bf16* value_cache, int width, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int slot = slots[i / width];
    if (slot < 0) return;
    key_cache[slot * width + i % width] = float_to_bf16(k[i]);
    value_cache[slot * width + i % width] = float_to_bf16(v[i]);
}
""", "kv_write_kernel")


def kv_write(k, v, slots, key_cache, value_cache):
    n = k.size
    kv_write_kernel((-(-n // 128),), (128,), (k, v, slots, key_cache, value_cache, np.int32(n // len(k)), np.int32(n)))
''',
        ),
        "15.2, the length counted when the step begins": (
            "15.2",
            """class CachedAttend:
    def __init__(self, config, max_len):
        shape = (config.num_hidden_layers, 1, max_len, config.num_key_value_heads, config.head_dim)
        self.keys, self.values = cp.empty(shape, np.uint16), cp.empty(shape, np.uint16)
        self.scale, self.length = config.head_dim ** -0.5, 0

    def begin(self, count):
        self.slots = cp.arange(self.length, self.length + count, dtype=np.int64)
        self.positions = self.slots.astype(np.int32)
        self.length += count

    def __call__(self, layer, q, k, v, out):
        kv_write(k, v, self.slots, self.keys[layer], self.values[layer])
        keys, values = (
            cache[layer].reshape(-1, *k.shape[1:])[: self.length] for cache in (self.keys, self.values)
        )
        attention_gqa(q, keys, values, self.scale, out)
        return out

    def end(self):
        pass
""",
        ),
        "15.3, the prompt's step by itself, tokens left on the device": (
            "15.3",
            """from types import SimpleNamespace


def generate(prompt, count, weights):
    attend = CachedAttend(weights.config, len(prompt) + count)

    def step(ids):
        attend.begin(len(ids))
        inputs = SimpleNamespace(
            ids=ids, positions=attend.positions, logits_rows=cp.full(1, len(ids) - 1, dtype=np.int32)
        )
        token = argmax(forward(inputs, weights, attend), cp.empty(1, np.int32))
        attend.end()
        return token

    tokens = [step(cp.asarray(np.array(prompt, np.int32)))]
    while len(tokens) < count:
        tokens.append(step(tokens[-1]))
    return [int(token[0]) for token in tokens]
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
