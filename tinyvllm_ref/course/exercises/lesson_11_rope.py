"""Lesson 11: positions as rotations of pairs of columns, and the frequencies that they turn with."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from tinyvllm_ref import LLM, SamplingParams, emulation
from tinyvllm_ref.checkpoint.names import resolve
from tinyvllm_ref.config import ModelConfig, RopeScaling
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
    with_changes,
)
from tinyvllm_ref.kernels import source as kernel_source
from tinyvllm_ref.kernels.rope import rope as reference_rope
from tinyvllm_ref.parts import Parts

_TURNED = Tolerance(
    1e-3, 2e-3, "an angle near 4,096 is rounded to float32 by up to 2.4e-4 radians before its sine is taken"
)


# ---------------- 11.1: two vectors, by hand


def _hand_cases(rng: np.random.Generator) -> list[Case]:
    return [Case("q = (2, 0) and k = (0, 2), 30 degrees a position", {"degrees": 30}, "numbers")]


def _run_hand(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    return {"turned": {name: float(value) for name, value in answer.items() if value is not None}}


def _turn(vector: tuple[float, float], degrees: float) -> complex:
    """A rotation, as a product of complex numbers."""
    return complex(*vector) * complex(math.cos(math.radians(degrees)), math.sin(math.radians(degrees)))


def _expect_hand(inputs: Any) -> dict[str, Any]:
    step = inputs["degrees"]

    def score(query_at: int, key_at: int) -> float:
        return (_turn((2, 0), step * query_at) * _turn((0, 2), step * key_at).conjugate()).real

    q = _turn((2, 0), step * 3)
    exact = {
        "q_x": q.real,
        "q_y": q.imag,
        "score": score(3, 1),
        "later": score(13, 11),
        "swapped": score(1, 3),
    }
    return {"turned": {name: round(value, 6) for name, value in exact.items()}}


def _hand(**changes: float) -> str:
    values = {"q_x": 0, "q_y": 2, "score": 3.46, "later": 3.46, "swapped": -3.46} | changes
    return f"turned = {values!r}\n"


_HAND = Exercise(
    id="11.1",
    title="two vectors, by hand",
    answer="turned",
    kind="value",
    cases=_hand_cases,
    run=_run_hand,
    expected=_expect_hand,
    points={"numbers": 2},
    tolerance=Tolerance(0.0, 0.01, "two digits by hand"),
    hints=Hints(
        question="By how many degrees is q turned at position 3? Draw it. And k, at position 1? What is the angle between the two?",
        rule="A vector at position p is turned by 30 p degrees, counterclockwise. (x, y) becomes (x cos - y sin, x sin + y cos). "
        "The dot product of two vectors of length 2 is 4 times the cosine of the angle between them.\n\n"
        "By hand: q = (2, 0) at position 1 points to 30 degrees. k = (0, 2) starts at 90 degrees, so at position 0 it is 60 "
        "degrees away, and the score is 4 cos 60 = 2.",
        code="q_x, q_y = 2 * cos(____), 2 * sin(____)\n# k at position 1 points to 90 + ____ degrees\nscore = 4 * cos(____)",
    ),
    mistakes=(
        Mistake(
            "turned clockwise",
            _hand(q_y=-2, score=-3.46, later=-3.46, swapped=3.46),
            "Here angles grow counterclockwise: from the x axis toward the y axis, as in mathematics. (2, 0) turned by 90 degrees is "
            "(0, 2). Against the model's own direction all signs of distance are reversed: the token before looks like the token after.",
            "Toward which axis does (2, 0) move when it begins to turn?",
            variants=(_hand(q_y=-2),),
        ),
        Mistake(
            "the key not turned",
            _hand(score=4, later=2, swapped=2),
            "Both are turned, each by its own position. If only the query is, the score depends on where the query stands and not on "
            "how far away the key is.",
            "By how many degrees is k turned at position 1?",
        ),
        Mistake(
            "angles added, not subtracted",
            _hand(score=-3.46, later=0, swapped=-3.46),
            "When both vectors turn, the angle between them changes by the difference of their turns. Ten positions more for both "
            "change nothing.",
            "If you turn two hands of a clock by the same angle, what becomes of the angle between them?",
        ),
        Mistake(
            "the order does not matter",
            _hand(swapped=3.46),
            "With the query at 1 and the key at 3 the key is turned further than the query: the angle between them grows where it shrank "
            "before. A score knows which of the two comes first.",
            "With q at 1 and k at 3, which direction does each point to?",
        ),
    ),
)


# ---------------- 11.2: how far do pairs turn?


@functools.cache
def _turned_after(tokens: int, pair: int) -> float:
    """Radians that a pair of a head of 64 has turned after so many tokens, followed step by step through a kernel."""
    half, theta = 32, 10_000.0
    inv_freq = (theta ** (-np.arange(half) / half)).astype(np.float32)
    q = np.zeros((tokens + 1, 1, 2 * half), np.float32)
    q[:, :, pair] = 1
    device_q, device_k = emulation.asarray(q), emulation.asarray(q)
    arguments = (
        *(
            device_q,
            device_k,
            emulation.asarray(np.arange(tokens + 1, dtype=np.int32)),
            emulation.asarray(inv_freq),
        ),
        *(np.int32(tokens + 1), np.int32(1), np.int32(1), np.int32(half)),
    )
    with emulation.checks("fast"):
        emulation.RawKernel(kernel_source.text("rope"), "rope")((64,), (32,), arguments)
    turned = device_q.get()[:, 0]
    return float(np.unwrap(np.arctan2(turned[:, pair + half], turned[:, pair]))[-1])


_TURNS = Prediction(
    id="11.2",
    title="how far do pairs turn?",
    quantities={
        "fastest": Quantity(
            "full turns of pair 0 in 1,000 tokens", lambda: _turned_after(1000, 0) / (2 * math.pi)
        ),
        "slowest": Quantity(
            "degrees that pair 31 has turned by then", lambda: math.degrees(_turned_after(1000, 31))
        ),
    },
    explains="Pair 0 turns by 1 radian a token, so it takes 2 pi = 6.28 tokens for a turn. Pair 31 turns by 10,000^(-31/32) = 0.000133 "
    "radians a token. The fast pairs tell neighbours apart, and the slow ones what is near from what is far.",
    hints=Hints(
        question="How many radians does pair 0 turn in one token? How many radians is a full turn?",
        rule="Pair i turns by theta^(-2i/D) radians a token; here theta = 10,000 and D = 64, so 2i/D = i/32. After 1,000 tokens it has "
        "turned 1,000 times as much. A full turn is 2 pi radians, or 360 degrees.",
        code="fastest = 1000 / (2 * np.pi)\nslowest = 1000 * 10_000 ** ____ / (2 * np.pi) * ____",
    ),
)


# ---------------- 11.3: the frequencies of a model


_SCALING = (
    "rope_type",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)
_LLAMA = ("llama3", 32.0, 1.0, 4.0, 8192)  # Llama 3.2 1B's rope_scaling, as in its config.json
_TINY = ("llama3", 8.0, 1.0, 4.0, 128)


def _frequency_cases(rng: np.random.Generator) -> list[Case]:
    def case(
        name: str,
        head_dim: int,
        theta: float,
        scaling: tuple[Any, ...],
        group: str,
        hidden: int = 0,
        longest: int = 131072,
    ) -> Case:
        inputs = {
            "head_dim": head_dim,
            "rope_theta": theta,
            **dict(zip(_SCALING, scaling, strict=False)),
            "hidden_size": hidden or 4 * head_dim,
            "max_position_embeddings": longest,
        }
        return Case(f"{name}: head_dim {head_dim}, theta {theta:,.0f}, {scaling[0]}", inputs, group)

    factor = float(rng.integers(3, 20))
    return [
        case("a small head", 8, 10_000.0, ("default",), "plain"),
        case("an odd head", 20, 500_000.0, ("default",), "plain", hidden=96),
        case("stretched", 12, 10_000.0, ("linear", 4.0), "scaled"),
        case("tiny-stories", 32, 10_000.0, _TINY, "scaled", longest=1024),
        case("Llama 3.2 1B", 64, 500_000.0, _LLAMA, "scaled"),
        case(
            "another",
            50,
            float(rng.integers(2000, 900_000)),
            ("llama3", factor, 2.0, 5.0, 700),
            "scaled",
            hidden=333,
        ),
    ]


def _run_frequencies(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    from tinyvllm_ref.config import ModelConfig, RopeScaling

    sizes = ("head_dim", "rope_theta", "hidden_size", "max_position_embeddings")
    scaling = {name: value for name, value in inputs.items() if name not in sizes}
    config = ModelConfig(
        vocab_size=32, hidden_size=inputs["hidden_size"], intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=inputs["head_dim"], max_position_embeddings=inputs["max_position_embeddings"], rms_norm_eps=1e-5,
        rope_theta=inputs["rope_theta"], rope_scaling=RopeScaling(**scaling), tie_word_embeddings=True,
        bos_token_id=None, eos_token_ids=(),
    )  # fmt: skip
    found = answer(config)
    values = lab.get(found, "what the function returns")
    return {"inv_freq": values, "dtype": str(values.dtype)}


def _expect_frequencies(inputs: Any) -> dict[str, Any]:
    """By wavelengths and cases, in float64, as Hugging Face transformers has it."""
    dim = inputs["head_dim"]
    plain = 1.0 / inputs["rope_theta"] ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    kind, *numbers = (inputs[name] for name in _SCALING if name in inputs)
    if kind == "linear":
        plain = plain / numbers[0]
    elif kind == "llama3":
        factor, low, high, original = numbers
        wavelength = 2 * np.pi / plain
        smooth = (original / wavelength - low) / (high - low)
        blended = (1 - smooth) * plain / factor + smooth * plain
        plain = np.where(
            wavelength > original / low,
            plain / factor,
            np.where(wavelength < original / high, plain, blended),
        )
    return {"inv_freq": plain.astype(np.float32), "dtype": "float32"}


_FREQUENCY_BODY = """    head_dim, scaling = config.head_dim, config.rope_scaling
    pairs = np.arange(head_dim // 2)
    inv_freq = config.rope_theta ** (-2 * pairs / head_dim)
    if scaling.rope_type == "linear":
        inv_freq = inv_freq / scaling.factor
    if scaling.rope_type == "llama3":
        turns = scaling.original_max_position_embeddings * inv_freq / (2 * np.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0, 1)
        inv_freq = (1 - kept) * inv_freq / scaling.factor + kept * inv_freq
    return cp.asarray(inv_freq.astype(np.float32))
"""


def _frequencies(*changes: tuple[str, str]) -> str:
    """A whole answer for 11.3, with some things exchanged."""
    text = _FREQUENCY_BODY
    text = with_changes(text, changes)
    return f"def rope_frequencies(config):\n{text}"


_LLAMA3_BODY = _FREQUENCY_BODY[
    _FREQUENCY_BODY.index('    if scaling.rope_type == "llama3"') : _FREQUENCY_BODY.index("    return")
]

_FREQUENCIES = Exercise(
    id="11.3",
    title="the frequencies of a model: a part",
    answer="rope_frequencies",
    kind="function",
    arguments=("config",),
    cases=_frequency_cases,
    run=_run_frequencies,
    expected=_expect_frequencies,
    points={"plain": 1, "scaled": 2},
    tolerance=Tolerance(2e-6, 0.0, "float64, rounded to float32"),
    makes={"rope_frequencies": "rope_frequencies"},
    file="rope_frequencies.py",
    hints=Hints(
        question="Take {case}. How many pairs has a head? What is the exponent of the last of them?",
        rule='Pair i of head_dim / 2 has the frequency theta^(-2i / head_dim). "linear" divides all of them by the factor. For '
        '"llama3" count how often each pair turns in the original context: turns = original * frequency / (2 pi). kept = '
        "(turns - low) / (high - low), cut to 0 ... 1. The new frequency is (1 - kept) * f / factor + kept * f.\n\n"
        "By hand, original = 128, low = 1, high = 4, factor = 8: a pair of wavelength 64 turns twice. kept = (2 - 1) / 3 = 1/3, so "
        "its frequency is multiplied by 2/3 / 8 + 1/3 = 0.417. A pair of wavelength 16 turns 8 times and is kept; one of wavelength "
        "1,000 turns less than once and is divided by 8.",
        code="""pairs = np.arange(____)
inv_freq = config.rope_theta ** (____)
if scaling.rope_type == "linear":
    inv_freq = ____
if scaling.rope_type == "llama3":
    turns = scaling.original_max_position_embeddings * ____ / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip(____, 0, 1)
    inv_freq = (1 - kept) * ____ + kept * ____
return cp.asarray(inv_freq.astype(____))""",
    ),
    mistakes=(
        Mistake(
            "the exponent is i / head_dim",
            _frequencies(("-2 * pairs / head_dim", "-pairs / head_dim")),
            "There are head_dim / 2 pairs, and the exponents of all of them reach from 0 to nearly -1. With i / head_dim they end at "
            "-1/2, and the slow pairs turn far too fast.",
            "What is the exponent of the last pair, and what should it nearly be?",
        ),
        Mistake(
            "the last pair gets exactly 1 / theta",
            _frequencies(("-2 * pairs / head_dim", "-pairs / (head_dim // 2 - 1)")),
            "The exponents are -2i / head_dim; the last pair has -(head_dim - 2) / head_dim, which is close to -1 and not -1.",
            "With head_dim = 8, what are the four exponents?",
        ),
        Mistake(
            "the wrong sign of the exponent",
            _frequencies(("-2 * pairs / head_dim", "2 * pairs / head_dim")),
            "theta^(2i / head_dim) grows: these are wavelengths, but for the factor 2 pi. A frequency is one over that.",
            "Which pair should turn fastest, the first or the last?",
        ),
        Mistake(
            "no scaling",
            _frequencies(
                (
                    _FREQUENCY_BODY[
                        _FREQUENCY_BODY.index("    if scaling") : _FREQUENCY_BODY.index("    return")
                    ],
                    "",
                )
            ),
            "These are the frequencies without the scaling that config.rope_scaling asks for in this case. Near the beginning of a text hardly anything shows; the model was trained with the "
            "scaled frequencies all the same, and the further on, the more it shows.",
            "What is config.rope_scaling.rope_type in the case that fails?",
            variants=(
                _frequencies((_LLAMA3_BODY, "")),
                _frequencies(('"linear"', '"Linear"')),
            ),
        ),
        Mistake(
            "the exponent is 2i / (head_dim / 2)",
            _frequencies(("-2 * pairs / head_dim", "-2 * pairs / (head_dim // 2)")),
            "The D of the formula is head_dim, the number of columns, and not the number of pairs. Like this the exponents reach nearly "
            "-2, and the slow pairs hardly turn at all.",
            "With head_dim = 8, what is the exponent of pair 2?",
        ),
        Mistake(
            "turns counted without 2 pi",
            _frequencies((" / (2 * np.pi)", "")),
            "A frequency is in radians a token, and a turn is 2 pi radians. L times the frequency counts radians.",
            "A pair of wavelength 64: how often does it turn in 128 tokens, and what does your line give?",
        ),
        Mistake(
            "the same theta for all models",
            _frequencies(("config.rope_theta", "10_000.0")),
            "theta differs from model to model: 500,000 in Llama 3. The config says what it is.",
            "What is config.rope_theta in the case that fails?",
        ),
        Mistake(
            "multiplied by the factor",
            _frequencies(("inv_freq = inv_freq / scaling.factor", "inv_freq = inv_freq * scaling.factor")),
            "Stretching makes all pairs turn more slowly, so that a position further on looks as one did before: the frequencies are "
            "divided by the factor.",
            "Should position 100,000 look like a nearer one, or like one further on?",
        ),
        Mistake(
            "llama3 taken for linear",
            _frequencies(
                (_LLAMA3_BODY, ""), ('scaling.rope_type == "linear"', 'scaling.rope_type != "default"')
            ),
            '"llama3" slows only the slow pairs by the whole factor. The fast ones tell neighbours apart, and they are kept.',
            "Which pairs does the rule leave as they are?",
        ),
        Mistake(
            "no blending",
            _frequencies(
                ("kept = np.clip((turns - low) / (high - low), 0, 1)", "kept = (turns > high) * 1.0")
            ),
            "There are three kinds of pairs: kept, slowed, and those between, which are a mixture of the two.",
            "A pair turns between low and high times in the original context. What becomes of it?",
            variants=(
                _frequencies(
                    (
                        "kept = np.clip((turns - low) / (high - low), 0, 1)",
                        "kept = (turns >= high).astype(float)",
                    )
                ),
            ),
        ),
        Mistake(
            "the fast pairs are slowed",
            _frequencies(
                (
                    "(1 - kept) * inv_freq / scaling.factor + kept * inv_freq",
                    "kept * inv_freq / scaling.factor + (1 - kept) * inv_freq",
                )
            ),
            "The other way round: pairs that turn often have seen all their angles in training, and stay. Slow pairs have not, and are "
            "stretched.",
            "Which pairs would come to angles that they never had in training, if the text grew longer?",
        ),
        Mistake(
            "the share is not cut to 0 ... 1",
            _frequencies(("np.clip((turns - low) / (high - low), 0, 1)", "(turns - low) / (high - low)")),
            "For a pair that turns 100 times the share comes out as 33, and the blend goes far beyond the frequency itself.",
            "What is `kept` of the fastest pair?",
        ),
        Mistake(
            "blended by wavelength",
            _frequencies(
                (
                    "inv_freq = (1 - kept) * inv_freq / scaling.factor + kept * inv_freq",
                    "inv_freq = 1 / ((1 - kept) * scaling.factor / inv_freq + kept / inv_freq)",
                )
            ),
            "The mixture is one of frequencies. One over a mixture of wavelengths is something else.",
            "What is mixed in the formula, f or one over f?",
        ),
        Mistake(
            "the longest context, not the original one",
            _frequencies(("scaling.original_max_position_embeddings", "config.max_position_embeddings")),
            "How often a pair turned in its training depends on the context of that training, original_max_position_embeddings. "
            "max_position_embeddings is what the scaling makes possible.",
            "How long were the texts that the model saw before it was stretched?",
        ),
        Mistake(
            "head_dim computed from the hidden size",
            _frequencies(
                (
                    "head_dim, scaling = config.head_dim,",
                    "head_dim, scaling = config.hidden_size // config.num_attention_heads,",
                )
            ),
            "For many models hidden_size / heads is head_dim, and for some it is not. The config says what it is.",
            "What is config.head_dim in the case that fails?",
        ),
        Mistake(
            "left in float64",
            _frequencies(("inv_freq.astype(np.float32)", "inv_freq")),
            "The kernel takes a float32 array. Given the bytes of float64 numbers, it would read nonsense.",
            "How many bytes has a number in your array, and how many does a `float` have?",
        ),
    ),
)


# ---------------- 11.4: a pair a thread


def _turn_cases(rng: np.random.Generator) -> list[Case]:
    def case(positions: Any, heads: tuple[int, int], half: int, group: str, told: str) -> Case:
        tokens, (q_heads, k_heads) = len(positions), heads
        inputs = {
            "x": rng.standard_normal((tokens, q_heads + 2 * k_heads, 2 * half)).astype(np.float32),
            "positions": np.asarray(positions, np.int32),
            "inv_freq": (10_000.0 ** (-np.arange(half) / half)).astype(np.float32),
            "turned": q_heads + k_heads,
        }
        return Case(f"{told}, {q_heads} + {k_heads} + {k_heads} heads of {2 * half}", inputs, group)

    far = sorted(int(p) for p in rng.integers(1000, 4096, 3))
    return [
        case([1], (1, 1), 2, "small", "a token at position 1"),
        case(range(4), (2, 1), 4, "small", "4 tokens from 0"),
        case([7], (3, 1), 5, "awkward", "a token at position 7"),
        case([5, 4096, 0], (2, 2), 16, "awkward", "tokens at 5, 4,096 and 0"),
        case(far, (4, 2), 10, "awkward", f"tokens at {far[0]:,} to {far[-1]:,}"),
        case(range(70), (1, 1), 1, "awkward", "70 tokens from 0"),
    ]


def _run_turn(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    tokens, heads, dim = inputs["x"].shape
    turned = inputs["turned"]
    x = lab.inout(inputs["x"])
    positions, inv_freq = (
        lab.input("positions", inputs["positions"]),
        lab.input("inv_freq", inputs["inv_freq"]),
    )
    sizes = (np.int32(tokens), np.int32(heads), np.int32(turned), np.int32(dim // 2))
    answer((-(-tokens * turned * (dim // 2) // 64),), (64,), (x, positions, inv_freq, *sizes))
    return {"x": lab.get(x, "x")}


def _rotated(x: Any, positions: Any, inv_freq: Any) -> Any:
    """Each pair of columns (i, i + half) as a complex number, times e^(i angle)."""
    half = len(inv_freq)
    angles = np.outer(positions.astype(np.float64), inv_freq.astype(np.float64))[:, None, :]
    turned = (x[..., :half].astype(np.float64) + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1).astype(np.float32)


def _expect_turn(inputs: Any) -> dict[str, Any]:
    x = inputs["x"].copy()
    x[:, : inputs["turned"]] = _rotated(x[:, : inputs["turned"]], inputs["positions"], inputs["inv_freq"])
    return {"x": x}


_TURN_BODY = """    if (p >= tokens * turned * half) return;
    int i = p % half, head = p / half % turned, token = p / (half * turned);
    float* row = x + ((size_t)token * heads + head) * 2 * half;
    float angle = positions[token] * inv_freq[i];
    float a = row[i], b = row[i + half];
    row[i] = a * cosf(angle) - b * sinf(angle);
    row[i + half] = b * cosf(angle) + a * sinf(angle);"""


def _turn_answer(*changes: tuple[str, str]) -> str:
    """A whole answer for 11.4, with some things exchanged."""
    body = _TURN_BODY
    body = with_changes(body, changes)
    return f'''turn_heads = cp.RawKernel(r"""
extern "C" __global__ void turn_heads(float* x, const int* positions, const float* inv_freq,
                                      int tokens, int heads, int turned, int half) {{
    int p = blockIdx.x * blockDim.x + threadIdx.x;
{body}
}}
""", "turn_heads")
'''


_ADJACENT = (
    "This is RoPE on adjacent pairs (2i, 2i + 1), as the first paper has it. The checkpoints of this family were trained with half-split "
    "pairs: column i turns with column i + head_dim / 2."
)
_BACKWARDS = (
    "The rotation goes the wrong way round: the signs of the two sine terms are exchanged. Scores still depend on the distance alone, but "
    "the token before now looks like the token after."
)
_SAME_SIGNS = (
    "One of the two sine terms has a minus and the other a plus. With equal signs the pair is not turned but skewed: its "
    "length changes."
)
_OVERWRITTEN = "The first line overwrites column i, and the second one needs what was there before. Keep both old values in variables, then write."
_BY_ROW = (
    "The row of a token in this step is not its position in the text. In a decode step there is one row, number 0, and its position may be "
    "500. That is what `positions` is for."
)

_TURN = Exercise(
    id="11.4",
    title="a pair a thread",
    answer="turn_heads",
    kind="kernel",
    cases=_turn_cases,
    run=_run_turn,
    expected=_expect_turn,
    points={"small": 1, "awkward": 2, "clean": 1},
    tolerance=_TURNED,
    hints=Hints(
        question="Take {case}. Which two columns form pair 0? By which angle are they turned?",
        rule="Thread p takes pair i = p % half of head (p / half) % turned of token p / (half * turned). The head's row begins "
        "(token * heads + head) * 2 * half elements in. The angle is positions[token] * inv_freq[i]. Read a = row[i] and "
        "b = row[i + half]; then row[i] becomes a cos - b sin, and row[i + half] becomes b cos + a sin. The value heads, which come "
        "after the first `turned`, are left alone.\n\n"
        "By hand, half = 2, angle pi / 2 for pair 0: the row 1 2 3 4 has the pairs (1, 3) and (2, 4). Pair 0 turns to (-3, 1), and the "
        "row becomes -3 2 1 4 if pair 1 stands still.",
        code="""if (p >= ____) return;
int i = p % half, head = p / half % ____, token = p / ____;
float* row = x + ((size_t)token * ____ + head) * 2 * half;
float angle = ____ * inv_freq[i];
float a = row[i], b = row[____];
row[i] = a * cosf(angle) - ____;
row[____] = ____;""",
    ),
    mistakes=(
        Mistake(
            "adjacent pairs",
            _turn_answer(
                ("a = row[i], b = row[i + half]", "a = row[2 * i], b = row[2 * i + 1]"),
                ("row[i] = a", "row[2 * i] = a"),
                ("row[i + half] = b", "row[2 * i + 1] = b"),
            ),
            _ADJACENT,
            "With head_dim = 4, which column turns with column 0?",
        ),
        Mistake(
            "rotation backwards",
            _turn_answer(
                ("- b * sinf(angle)", "+ b * sinf(angle)"), ("b * cosf(angle) + a", "b * cosf(angle) - a")
            ),
            _BACKWARDS,
            "Turn (1, 0) by a small angle with your two lines. Does the second number become positive?",
        ),
        Mistake(
            "both signs alike",
            _turn_answer(("b * cosf(angle) + a", "b * cosf(angle) - a")),
            _SAME_SIGNS,
            "Is the length of your pair the same after the turn? Try (1, 1) and a quarter turn.",
            variants=(_turn_answer(("- b * sinf(angle)", "+ b * sinf(angle)")),),
        ),
        Mistake(
            "overwritten before its use",
            _turn_answer(
                ("    float a = row[i], b = row[i + half];\n", ""),
                (
                    "row[i] = a * cosf(angle) - b * sinf(angle);",
                    "row[i] = row[i] * cosf(angle) - row[i + half] * sinf(angle);",
                ),
                ("b * cosf(angle) + a * sinf(angle)", "row[i + half] * cosf(angle) + row[i] * sinf(angle)"),
            ),
            _OVERWRITTEN,
            "When your last line reads column i, what is in it?",
        ),
        Mistake(
            "the row as position",
            _turn_answer(("positions[token] * inv_freq[i]", "token * inv_freq[i]")),
            _BY_ROW,
            "In the case that fails, which position has the first token?",
        ),
        Mistake(
            "values turned as well",
            _turn_answer(
                ("tokens * turned * half", "tokens * heads * half"),
                (
                    "p / half % turned, token = p / (half * turned)",
                    "p / half % heads, token = p / (half * heads)",
                ),
            ),
            "Each row of the product holds query heads, then key heads, then value heads, and only queries and keys are turned. Values are "
            "what is handed over; where they came from must not change them. (Besides, the launch has threads for `turned` heads only.)",
            "How many heads has a row of x, and how many of them are to be turned?",
        ),
        Mistake(
            "rows are `turned` heads apart",
            _turn_answer(("(size_t)token * heads + head", "(size_t)token * turned + head")),
            "A row of x has all heads, those of the values as well. The next token begins heads * head_dim numbers further on.",
            "Where does token 1 begin?",
        ),
        Mistake(
            "no guard",
            _turn_answer(("    if (p >= tokens * turned * half) return;\n", "")),
            "The grid is rounded up to whole blocks, and the threads past the last pair turn what lies behind.",
            "How many pairs are there in the case that fails, and how many threads?",
        ),
        Mistake(
            "the number of the thread for token or pair",
            _turn_answer(("positions[token]", "positions[p]")),
            "p counts all pairs of all heads of all tokens. `positions` has an entry for each token, and inv_freq one for each pair of a "
            "head.",
            "Which token does thread 1 work on, and which pair?",
            variants=(_turn_answer(("inv_freq[i]", "inv_freq[p]")),),
        ),
        Mistake(
            "rows of `half` numbers",
            _turn_answer(("+ head) * 2 * half", "+ head) * half")),
            "A head has 2 * half columns, so the next one begins 2 * half numbers further on.",
            "With half = 2, where does head 1 begin?",
        ),
        Mistake(
            "position divided by the frequency",
            _turn_answer(("positions[token] * inv_freq[i]", "positions[token] / inv_freq[i]")),
            "inv_freq is radians a token, in spite of its name (it is one over theta^(2i/D)). The angle is their product.",
            "By how many radians should pair 1 turn at position 1, by more or by less than pair 0?",
        ),
        Mistake(
            "head and pair exchanged",
            _turn_answer(
                ("i = p % half, head = p / half % turned", "i = p / turned % half, head = p % half")
            ),
            "p % half runs over the pairs of one head, and (p / half) % turned over the heads. With the sizes mixed up some pairs are turned "
            "twice and others never.",
            "Which pair and which head do the threads 0, 1, 2 get?",
        ),
    ),
)


# ---------------- 11.5: the part


def _rope_cases(rng: np.random.Generator) -> list[Case]:
    def case(positions: Any, heads: tuple[int, int], half: int, group: str, told: str) -> Case:
        tokens, (q_heads, k_heads) = len(positions), heads
        inputs = {
            "q": rng.standard_normal((tokens, q_heads, 2 * half)).astype(np.float32),
            "k": rng.standard_normal((tokens, k_heads, 2 * half)).astype(np.float32),
            "positions": np.asarray(positions, np.int32),
            "inv_freq": (500_000.0 ** (-np.arange(half) / half)).astype(np.float32),
        }
        return Case(f"{told}, {q_heads} and {k_heads} heads of {2 * half}", inputs, group)

    far = [int(p) for p in rng.integers(100, 4096, 5)]
    return [
        case([1], (1, 1), 2, "small", "a token at position 1"),
        case(range(3), (2, 1), 2, "small", "3 tokens from 0"),
        case(range(5), (6, 2), 16, "small", "5 tokens from 0"),
        case([9], (3, 1), 5, "awkward", "one new token at 9"),
        case(far, (4, 4), 10, "awkward", "5 requests' new tokens"),
        case([0, 1, 2, 0, 1, 4096, 4095], (2, 1), 33, "awkward", "7 tokens of three requests"),
        case(range(1100), (1, 1), 1, "awkward", "1,100 tokens from 0"),
        case([77], (1, 1), 600, "awkward", "one token at 77"),
    ]


def _run_rope(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    q, k = lab.inout(inputs["q"]), lab.inout(inputs["k"])
    positions, inv_freq = (
        lab.input("positions", inputs["positions"]),
        lab.input("inv_freq", inputs["inv_freq"]),
    )
    answer(q, k, positions, inv_freq)
    return {"q": lab.get(q, "q"), "k": lab.get(k, "k")}


def _expect_rope(inputs: Any) -> dict[str, Any]:
    return {name: _rotated(inputs[name], inputs["positions"], inputs["inv_freq"]) for name in "qk"}


def _in_one_launch(inputs: Any, outputs: Any, observed: Any) -> str | None:
    if observed.allocations:
        return (
            f"The values are right, and {observed.allocations} array(s) were made on the device on the way. RoPE is in place: a thread "
            "reads its pair, turns it and writes it back"
        )
    if len(observed.launches) != 1:
        return (
            f"The values are right, in {len(observed.launches)} launches. A thread that has computed one angle can turn that pair in "
            "every head of q and of k: one launch is enough"
        )
    return None


_ROPE_BODY = """    if (p >= tokens * half) return;
    int i = p % half, token = p / half;
    float angle = positions[token] * inv_freq[i];
    float cosine = cosf(angle), sine = sinf(angle);
    for (int head = 0; head < q_heads; head++) turn(q + ((size_t)token * q_heads + head) * 2 * half, i, half, cosine, sine);
    for (int head = 0; head < k_heads; head++) turn(k + ((size_t)token * k_heads + head) * 2 * half, i, half, cosine, sine);"""
_TURN_FUNCTION = """    float a = row[i], b = row[i + half];
    row[i] = a * cosine - b * sine;
    row[i + half] = b * cosine + a * sine;"""


def _rope_answer(*changes: tuple[str, str]) -> str:
    """A whole answer for 11.5, with some things exchanged."""
    text = f'''rope_kernel = cp.RawKernel(r"""
__device__ __forceinline__ void turn(float* row, int i, int half, float cosine, float sine) {{
{_TURN_FUNCTION}
}}

extern "C" __global__ void rope_kernel(float* q, float* k, const int* positions, const float* inv_freq,
                                       int tokens, int q_heads, int k_heads, int half) {{
    int p = blockIdx.x * blockDim.x + threadIdx.x;
{_ROPE_BODY}
}}
""", "rope_kernel")


def rope(q, k, positions, inv_freq):
    tokens, q_heads, _ = q.shape
    k_heads, half, threads = k.shape[1], len(inv_freq), 64
    sizes = (np.int32(tokens), np.int32(q_heads), np.int32(k_heads), np.int32(half))
    blocks = (tokens * half + threads - 1) // threads
    rope_kernel((blocks,), (threads,), (q, k, positions, inv_freq, *sizes))
'''
    return with_changes(text, changes)


_PART = Exercise(
    id="11.5",
    title="queries and keys at once: the part",
    answer="rope",
    kind="function",
    arguments=("q", "k", "positions", "inv_freq"),
    cases=_rope_cases,
    run=_run_rope,
    expected=_expect_rope,
    points={"small": 1, "awkward": 2, "clean": 1},
    tolerance=_TURNED,
    verify=_in_one_launch,
    makes={"rope": "rope"},
    file="rope.py",
    hints=Hints(
        question="Take {case}. How many threads do you launch, and how many pairs are there in q and in k together?",
        rule="A thread takes one pair i of one token: i = p % half, token = p / half. It computes the angle once, and its cosine and sine. "
        "Then it turns pair i in every head of q, in a loop over q_heads, and in every head of k, in a loop over k_heads. Row (token, head) "
        "of q begins (token * q_heads + head) * 2 * half elements in; in k it is k_heads.\n\n"
        "By hand, 3 tokens with half = 2: 6 threads. Thread 5 takes pair 1 of token 2. With 2 and 1 heads it turns three pairs of numbers.",
        code="""// turn
float a = row[i], b = row[____];
row[i] = ____;
row[____] = ____;

// rope_kernel
if (p >= ____) return;
int i = p % half, token = p / half;
float angle = ____;
float cosine = cosf(angle), sine = sinf(angle);
for (int head = 0; head < ____; head++) turn(q + ____, i, half, cosine, sine);
for (int head = 0; head < ____; head++) turn(k + ____, i, half, cosine, sine);""",
    ),
    mistakes=(
        Mistake(
            "adjacent pairs",
            _rope_answer(
                ("a = row[i], b = row[i + half]", "a = row[2 * i], b = row[2 * i + 1]"),
                ("row[i] = a", "row[2 * i] = a"),
                ("row[i + half] = b", "row[2 * i + 1] = b"),
            ),
            _ADJACENT,
            "With head_dim = 4, which column turns with column 0?",
        ),
        Mistake(
            "rotation backwards",
            _rope_answer(("- b * sine", "+ b * sine"), ("b * cosine + a", "b * cosine - a")),
            _BACKWARDS,
            "Turn (1, 0) by a small angle with your two lines. Does the second number become positive?",
        ),
        Mistake(
            "both signs alike",
            _rope_answer(("b * cosine + a", "b * cosine - a")),
            _SAME_SIGNS,
            "Is the length of your pair the same after the turn? Try (1, 1) and a quarter turn.",
            variants=(_rope_answer(("- b * sine", "+ b * sine")),),
        ),
        Mistake(
            "overwritten before its use",
            _rope_answer(
                ("    float a = row[i], b = row[i + half];\n", ""),
                ("row[i] = a * cosine - b * sine;", "row[i] = row[i] * cosine - row[i + half] * sine;"),
                ("b * cosine + a * sine", "row[i + half] * cosine + row[i] * sine"),
            ),
            _OVERWRITTEN,
            "When your last line reads column i, what is in it?",
        ),
        Mistake(
            "the row as position",
            _rope_answer(("positions[token] * inv_freq[i]", "token * inv_freq[i]")),
            _BY_ROW,
            "In a decode step q has one row. Which position would you give it?",
        ),
        Mistake(
            "k looped over the query heads",
            _rope_answer(
                (
                    "head < k_heads; head++) turn(k + ((size_t)token * k_heads",
                    "head < q_heads; head++) turn(k + ((size_t)token * q_heads",
                ),
            ),
            "k has k_heads heads a token, and most models have fewer of them than query heads. The loop runs past the token's keys.",
            "How many heads has k in the case that fails?",
            variants=(
                _rope_answer(("(size_t)token * k_heads", "(size_t)token * q_heads")),
                _rope_answer(("head < k_heads", "head < q_heads")),
            ),
        ),
        Mistake(
            "nothing turned",
            _rope_answer(
                ("    rope_kernel((blocks,), (threads,), (q, k, positions, inv_freq, *sizes))\n", "")
            ),
            "q and k are as they were before. Is the kernel launched, at the end of `rope`, and does `turn` write to `row`?",
            "Which line of yours writes to q?",
            variants=(_rope_answer((_TURN_FUNCTION, "")),),
        ),
        Mistake(
            "a thread for each token",
            _rope_answer(("if (p >= tokens * half) return;", "if (p >= tokens) return;")),
            "The guard lets `tokens` threads through, and there is one for each pair of each token: tokens * half.",
            "With 3 tokens and half = 2, what does thread 5 do?",
            variants=(_rope_answer(("(tokens * half + threads - 1)", "(tokens + threads - 1)")),),
        ),
        Mistake(
            "rows of `half` numbers",
            _rope_answer(
                ("token * q_heads + head) * 2 * half", "token * q_heads + head) * half"),
                ("token * k_heads + head) * 2 * half", "token * k_heads + head) * half"),
            ),
            "A head has 2 * half columns, so the next one begins 2 * half numbers further on.",
            "With half = 2, where does head 1 begin?",
        ),
        Mistake(
            "keys not turned",
            _rope_answer((_ROPE_BODY[_ROPE_BODY.index("\n    for (int head = 0; head < k_heads") :], "")),
            "Both are turned, each by its own position; only then does their product depend on the distance alone.",
            "What does your kernel write to k?",
        ),
        Mistake(
            "only the first head turned",
            _rope_answer(
                ("head < q_heads; head++)", "head < 1; head++)"),
                ("head < k_heads; head++)", "head < 1; head++)"),
            ),
            "Every head has pairs of its own, and all are turned by the same angles.",
            "How many heads has a token, and how many does your loop visit?",
        ),
        Mistake(
            "grid rounded down",
            _rope_answer(("(tokens * half + threads - 1) // threads", "tokens * half // threads")),
            "The last pairs have no thread. Round up, and keep the guard in the kernel. (With less than a block's worth of pairs there would be "
            "no block at all, which CUDA refuses.)",
            "With 6 pairs and 64 threads a block, how many blocks do you launch?",
            variants=(
                _rope_answer(
                    ("(tokens * half + threads - 1) // threads", "max(1, tokens * half // threads)")
                ),
            ),
        ),
        Mistake(
            "in two launches",
            _rope_answer(
                (
                    "    rope_kernel((blocks,), (threads,), (q, k, positions, inv_freq, *sizes))\n",
                    "    none = np.int32(0)\n"
                    "    rope_kernel((blocks,), (threads,), (q, k, positions, inv_freq, sizes[0], sizes[1], none, sizes[3]))\n"
                    "    rope_kernel((blocks,), (threads,), (q, k, positions, inv_freq, sizes[0], none, sizes[2], sizes[3]))\n",
                ),
            ),
            "The values are right. But each angle and its sine are computed twice, and a launch costs a few microseconds in every layer of "
            "every step. A thread that has the sine at hand can turn the pair in k as well.",
            "Which numbers do your two launches both compute?",
        ),
    ),
)


# ---------------- what is drawn and measured


@functools.cache
def recorded_positions(prompt: str = "Once upon a time", max_tokens: int = 4) -> tuple[list[list[int]], Any]:
    """What `rope` is given while the real model writes: the positions of each step, in layer 0, and the frequencies."""
    steps: list[list[int]] = []
    frequencies: list[Any] = []
    layers = ModelConfig.from_json(resolve("tiny-stories")).num_hidden_layers

    def recording(q: Any, k: Any, positions: Any, inv_freq: Any) -> Any:
        frequencies.append(inv_freq.get())
        steps.append(positions.get().tolist())
        return reference_rope(q, k, positions, inv_freq)

    with emulation.checks("fast"):
        llm = LLM("tiny-stories", parts=Parts().replace(rope=recording))
        llm.generate([prompt], SamplingParams(max_tokens=max_tokens, temperature=0.0), use_tqdm=False)
    return steps[::layers], frequencies[0]


def draw_rotations() -> Any:
    """The rotations of some pairs at the positions that the real model gets, with its own frequencies."""
    steps, inv_freq = recorded_positions("Once upon a time", 6)
    positions = [position for step in steps for position in step][:10]
    return figures.rope_rotation(inv_freq, positions, pairs=[0, 2, 5, 9])


def _wavelength_picture(answer: Any, cp: Any) -> Any:
    """Wavelengths by the learner's function: tiny-stories as it is, and with no scaling."""
    config = ModelConfig.from_json(resolve("tiny-stories"))
    plain = dataclasses.replace(config, rope_scaling=RopeScaling())
    lines = {"tiny-stories": answer(config).get(), "without scaling": answer(plain).get()}
    return figures.wavelengths(lines, context=config.rope_scaling.original_max_position_embeddings)


def _distance_picture(answer: Any, cp: Any) -> Any:
    """The same query and the same key at every position, turned by the learner's kernel: exponentials of the scores."""
    count, dim = 24, 32
    rng = np.random.default_rng(4)
    vector = rng.standard_normal(dim)
    q = np.tile(vector + 0.3 * rng.standard_normal(dim), (count, 1, 1)).astype(np.float32)
    k = np.tile(vector, (count, 1, 1)).astype(np.float32)
    device_q, device_k = cp.asarray(q), cp.asarray(k)
    inv_freq = cp.asarray((10_000.0 ** (-np.arange(dim // 2) / (dim // 2))).astype(np.float32))
    answer(device_q, device_k, cp.asarray(np.arange(count, dtype=np.int32)), inv_freq)
    scores = device_q.get()[:, 0] @ device_k.get()[:, 0].T / np.sqrt(dim)
    weights = np.tril(np.exp(scores - scores.max()))
    return figures.attention_map(
        weights, [str(position) for position in range(count)],
        title="One query and one key, at all positions: only the distance counts",
    )  # fmt: skip


def _make_run(tokens: int, q_heads: int = 32, k_heads: int = 8, half: int = 32) -> Any:
    def make(answer: Any, cp: Any) -> Any:
        positions = cp.asarray(np.arange(tokens, dtype=np.int32))
        inv_freq = cp.asarray((500_000.0 ** (-np.arange(half) / half)).astype(np.float32))
        if hasattr(answer, "code"):
            x = cp.ones((tokens, q_heads + 2 * k_heads, 2 * half), np.float32)
            turned = q_heads + k_heads
            sizes = (np.int32(tokens), np.int32(q_heads + 2 * k_heads), np.int32(turned), np.int32(half))
            return lambda: answer(
                (-(-tokens * turned * half // 64),), (64,), (x, positions, inv_freq, *sizes)
            )
        q, k = (cp.ones((tokens, heads, 2 * half), np.float32) for heads in (q_heads, k_heads))
        return lambda: answer(q, k, positions, inv_freq)

    return make


_LARGE, _SMALL = 8192, 16
_BYTES = 4 * (32 + 8) * 64  # of one token's queries and keys
_WORK = Work(
    label="8,192 tokens, 32 and 8 heads of 64",
    make=_make_run(_LARGE),
    read_bytes=_LARGE * _BYTES,
    write_bytes=_LARGE * _BYTES,
    small=_make_run(_SMALL),
    small_read_bytes=_SMALL * _BYTES,
    small_write_bytes=_SMALL * _BYTES,
    small_label="16 tokens, 32 and 8 heads of 64",
)

LESSON = Lesson(
    number="11",
    slug="rope",
    title="RoPE",
    part=3,
    minutes=55,
    exercises=(_HAND, _TURNS, _FREQUENCIES, _TURN, _PART),
    engine=EngineCard(
        mistakes=(
            ("11.5", "adjacent pairs"),
            ("11.5", "the row as position"),
            ("11.5", "rotation backwards"),
            ("11.3", "no scaling"),
        ),
        prompt="Long ago, there lived a quiet otter named Hazel. One day, Hazel could not find",
        max_tokens=40,
        note="rope runs once for each layer in every step; rope_frequencies once, when the model is loaded. The error of the logits is "
        "measured with the whole text as one prompt, where a token's row is its position.",
        without=("decoder_layer", "forward"),
    ),
    pictures={"11.3": _wavelength_picture, "11.5": _distance_picture},
    works={"11.4": _WORK, "11.5": _WORK},
)
