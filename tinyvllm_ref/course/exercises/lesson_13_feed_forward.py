"""Lesson 13: the gate of the feed-forward block, and one whole layer made of all parts so far."""

from __future__ import annotations

from typing import Any

import numpy as np

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

_FLOAT = Tolerance(1e-5, 1e-6, "float32, and expf is off by a few units in the last place")
_BF16 = Tolerance(
    4e-3, 1e-6, "BF16 keeps 8 significant bits: rounding moves a value by up to one part in 256"
)

# ---------------- 13.1: SiLU


def _silu_cases(rng: np.random.Generator) -> list[Case]:
    def numbers(n: int, size: float = 3.0) -> Any:
        return (rng.standard_normal(n) * size).astype(np.float32)

    large = np.array([-1000, -100, -90, -20, 0, 20, 90, 100, 1000], np.float32)
    return [
        Case("5 numbers", {"x": np.array([-2, -1, 0, 1, 2], np.float32)}, "small"),
        Case("300 numbers", {"x": numbers(300)}, "small"),
        Case("large ones: -1000 to 1000", {"x": large}, "awkward"),
        Case("1 number", {"x": numbers(1)}, "awkward"),
        Case("1,025 numbers", {"x": numbers(1025, 20.0)}, "awkward"),
    ]


def _run_silu(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    n = len(inputs["x"])
    x, out = lab.input("x", inputs["x"]), lab.output(n)
    answer((-(-n // 128),), (128,), (x, out, np.int32(n)))
    return {"out": lab.get(out)}


def _sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)) in float64, by tanh: that overflows nowhere, and is nobody's answer."""
    return 0.5 * (1 + np.tanh(x.astype(np.float64) / 2))


def _expect_silu(inputs: Any) -> dict[str, Any]:
    return {"out": (inputs["x"] * _sigmoid(inputs["x"])).astype(np.float32)}


def _silu(value: str, guard: str = "i < n") -> str:
    return f'''silu = cp.RawKernel(r"""
extern "C" __global__ void silu(const float* x, float* out, int n) {{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if ({guard}) out[i] = {value};
}}
""", "silu")
'''


_OVERFLOW = (
    "exp(x) is infinity for x above 88, and infinity divided by infinity is NaN. With exp(-x) the same formula is safe: for a "
    "very negative x the divisor is infinity, and the quotient 0, which is right."
)
_SIGMOID = "That is the sigmoid, a number from 0 to 1. SiLU is x times it: it lets large x through, and holds negative ones back."

_SILU = Exercise(
    id="13.1",
    title="SiLU",
    answer="silu",
    kind="kernel",
    cases=_silu_cases,
    run=_run_silu,
    expected=_expect_silu,
    points={"small": 1, "awkward": 1, "clean": 1},
    tolerance=_FLOAT,
    hints=Hints(
        question="Take {case}. What is exp(-x) for x = 0, and what should come out there? And for x = 2?",
        rule="SiLU(x) = x / (1 + exp(-x)). In CUDA, expf(v) is the exponential of a float.\n\nBy hand: SiLU(0) = 0 / 2 = 0, "
        "and SiLU(2) = 2 / (1 + 0.135) = 1.762.",
        code="if (i < ____) out[i] = ____ / (1.0f + expf(____));",
    ),
    mistakes=(
        Mistake(
            "sigmoid only",
            _silu("1.0f / (1.0f + expf(-x[i]))"),
            _SIGMOID,
            "What is SiLU of 0? What does your formula give there?",
        ),
        Mistake(
            "exp(x) in numerator and denominator",
            _silu("x[i] * expf(x[i]) / (1.0f + expf(x[i]))"),
            _OVERFLOW,
            "How large is exp(100), and what is the largest float?",
            variants=(_silu("x[i] * (expf(x[i]) / (expf(x[i]) + 1.0f))"),),
        ),
        Mistake(
            "the exponent's sign",
            _silu("x[i] / (1.0f + expf(x[i]))"),
            "With exp(x) in the divisor it is large x that is held back. The exponent is -x.",
            "For x = 20 the result should be very nearly 20. What does yours give?",
        ),
        Mistake(
            "ReLU",
            _silu("fmaxf(x[i], 0.0f)"),
            "ReLU cuts off everything below 0. SiLU lets a little of it through: -0.27 at x = -1.",
            "What is SiLU of -1, by the formula?",
        ),
        Mistake(
            "brackets left out",
            _silu("x[i] / 1.0f + expf(-x[i])"),
            "Division comes before addition: this is x + exp(-x). The sum 1 + exp(-x) needs brackets.",
            "In which order does C compute a / b + c?",
        ),
        Mistake(
            "no guard, or one that lets thread n through",
            _silu("x[i] / (1.0f + expf(-x[i]))", "true"),
            "The last element is x[n - 1]. The last block has threads from n on, and they must do nothing.",
            "How many threads are launched for 5 numbers, and which of them have one?",
            variants=(_silu("x[i] / (1.0f + expf(-x[i]))", "i <= n"),),
        ),
    ),
)

# ---------------- 13.2: a prediction


def _layer_parameters(*names: str) -> int:
    """Parameters of these tensors of layer 0, counted in the checkpoint itself."""
    from tinyvllm_ref.checkpoint.names import resolve
    from tinyvllm_ref.checkpoint.weights import open_checkpoint

    _, views = open_checkpoint(resolve("tiny-stories"))
    return sum(
        int(np.prod(view.shape))
        for name, view in views.items()
        if name.startswith("model.layers.0.") and any(part in name for part in names)
    )


_PREDICTION = Prediction(
    id="13.2",
    title="where are the parameters?",
    quantities={
        "attention": Quantity("parameters of attention, layer 0", lambda: _layer_parameters("self_attn")),
        "feed_forward": Quantity("parameters of the feed-forward, layer 0", lambda: _layer_parameters("mlp")),
    },
    explains="Attention: queries 192 x 192, keys and values 64 x 192 each, output 192 x 192. Feed-forward: gate and up 512 x 192 "
    "each, down 192 x 512. That is three quarters of the layer. In larger models the share is larger still: F grows with H, and "
    "sharing KV heads makes attention smaller.",
    hints=Hints(
        question="A linear layer that turns K numbers into N has N x K parameters. What does each of the four matrices of attention "
        "turn into what?",
        rule="Attention: queries (6 heads of 32 from 192 numbers), keys and values (2 heads of 32 each), and the output (192 from "
        "192). Feed-forward: gate and up (512 from 192 each) and down (192 from 512).",
        code="attention = 192 * ____ + 2 * ____ * 192 + 192 * 192\nfeed_forward = 3 * ____ * ____",
    ),
)

# ---------------- 13.3: silu_mul, the part


def _mul_cases(rng: np.random.Generator) -> list[Case]:
    def case(tokens: int, ffn: int, group: str, size: float = 2.0, label: str = "") -> Case:
        values = (rng.standard_normal((tokens, 2 * ffn)) * size).astype(np.float32)
        said = label or f"T = {tokens}, F = {ffn:,}"
        return Case(said, {"gate_up": values}, group)

    large = case(5, 7, "awkward", 30.0, "T = 5, F = 7, gates up to 200")
    large.inputs["gate_up"][:3, 0] = [200, -200, 90]
    wide = case(3, int(rng.integers(1030, 1500)), "awkward", 2.0, "T = 3, F above 1,024")
    return [
        Case(
            "T = 2, F = 2",
            {"gate_up": np.array([[2, -1, 3, 0.5], [1, -2, -1, 4]], np.float32)},
            "small",
        ),
        case(4, 64, "small"),
        case(1, 33, "awkward"),
        large,
        wide,
        case(65, 3, "awkward"),
    ]


def _run_mul(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    tokens, width = inputs["gate_up"].shape
    gate_up, out = lab.input("gate_up", inputs["gate_up"]), lab.output((tokens, width // 2), np.uint16)
    bits = lab.returned(answer(gate_up, out), out)
    return {"out": (bits.astype(np.uint32) << 16).view(np.float32)}


def _expect_mul(inputs: Any) -> dict[str, Any]:
    gate, up = np.split(inputs["gate_up"].astype(np.float64), 2, axis=1)
    return {"out": (gate * _sigmoid(gate) * up).astype(np.float32)}


def _one_pass(inputs: Any, outputs: Any, observed: Any) -> str | None:
    launches, made = len(observed.launches), observed.allocations
    if launches == 1 and not made:
        return None
    arrays = f" and {made} array{'s' if made > 1 else ''} made on the way" if made else ""
    return (
        f"The values are right, in {launches} launch{'es' if launches != 1 else ''}{arrays}. One kernel that reads gate_up once and "
        "writes out once is enough"
    )


_MUL_WRAPPER = """

def silu_mul(gate_up, out):
    tokens, ffn = out.shape
    n = tokens * ffn
    silu_mul_kernel((-(-n // 256),), (256,), (gate_up, out, np.int32(ffn), np.int32(n)))
    return out
"""


def _mul(
    value: str = "gate / (1.0f + expf(-gate)) * up",
    gate: str = "row[c]",
    up: str = "row[ffn + c]",
    row: str = "gate_up + (size_t)t * 2 * ffn",
    guard: str = "if (i >= n) return;",
    store: str = "float_to_bf16({})",
) -> str:
    return f'''silu_mul_kernel = cp.RawKernel(BF16_CUDA + r"""
extern "C" __global__ void silu_mul_kernel(const float* gate_up, bf16* out, int ffn, int n) {{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    {guard}
    int t = i / ffn, c = i % ffn;
    const float* row = {row};
    float gate = {gate}, up = {up};
    out[i] = {store.format(value)};
}}
""", "silu_mul_kernel")
{_MUL_WRAPPER}'''


_IN_CUPY = """def silu_mul(gate_up, out):
    ffn = out.shape[1]
    gate, up = gate_up[:, :ffn], gate_up[:, ffn:]
    bits = (gate / (1 + cp.exp(-gate)) * up).view(np.uint32)
    out[...] = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return out
"""

_MUL = Exercise(
    id="13.3",
    title="silu_mul, the part",
    answer="silu_mul",
    kind="function",
    arguments=("gate_up", "out"),
    uses=("BF16_CUDA",),
    cases=_mul_cases,
    run=_run_mul,
    expected=_expect_mul,
    points={"small": 1, "awkward": 2, "clean": 1},
    tolerance=_BF16,
    verify=_one_pass,
    makes={"silu_mul": "silu_mul"},
    file="silu_mul.py",
    hints=Hints(
        question="Take {case}. Thread i makes out[i]. Which row and column of out is that, and where in gate_up lie the two numbers "
        "that it needs?",
        rule="out has F columns: i lies in row t = i / F and column c = i % F. A row of gate_up is 2F long and begins at 2F * t. Its "
        "gate is c columns from there, its up F further on. Then SiLU(gate) * up, rounded by float_to_bf16.\n\nBy hand, F = 2 and "
        "the row 2 -1 3 0.5: out = SiLU(2) * 3, SiLU(-1) * 0.5 = 5.285, -0.134.",
        code="int t = i / ____, c = i % ____;\n"
        "const float* row = gate_up + (size_t)t * ____;\n"
        "float gate = row[____], up = row[____];\n"
        "out[i] = float_to_bf16(____ * up);",
    ),
    mistakes=(
        Mistake(
            "SiLU of the product",
            _mul("gate * up / (1.0f + expf(-gate * up))"),
            "The gate alone goes through SiLU, and what comes out multiplies up. Up is not squeezed by anything.",
            "In SiLU(gate) * up, which of the two numbers does SiLU see?",
        ),
        Mistake(
            "gate and up swapped",
            _mul(gate="row[ffn + c]", up="row[c]"),
            "The first F columns are the gate, for its rows come first in the stacked weight. They go through SiLU.",
            "Which half of a row is the gate?",
        ),
        Mistake(
            "split interleaved",
            _mul(gate="row[2 * c]", up="row[2 * c + 1]"),
            "This takes gate and up by turns. The two weights are stacked one under the other, so a row of the product is first all "
            "gates, then all ups.",
            "In the row 2 -1 3 0.5, which two numbers are the gates?",
        ),
        Mistake(
            "rows F apart",
            _mul(row="gate_up + (size_t)t * ffn"),
            "A row of gate_up holds gate and up: it is 2F long. With one token nobody would notice.",
            "Where in gate_up does the second token's row begin?",
        ),
        Mistake(
            "first all tokens' gates, then all ups",
            _mul(gate="gate_up[i]", up="gate_up[n + i]"),
            "It is each *row* that has a first and a second half, not the whole array. With one token the two are the same, so it is "
            "the prompt that this ruins.",
            "With two tokens: what lies behind the gates of the first one?",
        ),
        Mistake(
            "sigmoid only",
            _mul("up / (1.0f + expf(-gate))"),
            _SIGMOID + " Sigmoid times up is another gate, called GLU.",
            "What does a gate of 0 let through, and a gate of 20?",
        ),
        Mistake(
            "no activation",
            _mul("gate * up"),
            "Gate times up alone is bilinear; the model was trained with SiLU between.",
            "Where is SiLU in your line?",
        ),
        Mistake(
            "exp(x) in numerator and denominator",
            _mul("gate * expf(gate) / (1.0f + expf(gate)) * up"),
            _OVERFLOW,
            "How large is exp(100), and what is the largest float?",
        ),
        Mistake(
            "low bits cut off, not rounded",
            _mul(store="(bf16)(__float_as_uint({}) >> 16)"),
            "The upper 16 bits alone are the value rounded toward zero: twice the error, and always to the same side. float_to_bf16 "
            "rounds to the nearest.",
            "Which of the two BF16 numbers around your value lies nearer to it?",
        ),
        Mistake(
            "a float stored without float_to_bf16",
            _mul(store="{}"),
            "To the compiler a bf16 is a 16-bit integer: stored there, 5.3 becomes the integer 5, and read as BF16 the bits of that are next "
            "to nothing. float_to_bf16 gives the bits that stand for 5.3.",
            "Which 16 bits are the number 5 as an integer, and which are 5.0 in BF16?",
            variants=(_mul(store="(bf16)({})"),),
        ),
        Mistake(
            "no guard, or one that lets thread n through",
            _mul(guard=""),
            "The last output is out[n - 1]. The last block has threads from n on, and they must do nothing.",
            "How many threads are launched for 4 outputs, and which of them have one?",
            variants=(_mul(guard="if (i > n) return;"),),
        ),
        Mistake(
            "array by array",
            _IN_CUPY,
            "The values are right. But each operation on arrays is a kernel of its own that writes its result to memory, for the next "
            "to fetch. In one kernel the numbers stay in registers.",
            "How many times do the gates cross the memory's bus in your version?",
        ),
    ),
)

# ---------------- 13.4: a whole layer


def _layer_cases(rng: np.random.Generator) -> list[Case]:
    def case(layer: int, tokens: int, past: int, group: str, heads: tuple[int, int, int] = (4, 2, 8)) -> Case:
        query_heads, kv_heads, head_dim = heads
        hidden, ffn = 24, 20
        sizes: dict[str, Any] = {
            "hidden_size": hidden,
            "intermediate_size": ffn,
            "num_attention_heads": query_heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "rms_norm_eps": 1e-5,
        }
        weights: dict[str, Any] = {}
        for i in sorted({0, layer, layer + 1}):
            weights |= random_layer(rng, i, sizes)
        inputs = {
            "sizes": sizes,
            "layer": layer,
            "past": past,
            "weights": weights,
            "inv_freq": (10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)).astype(np.float32),
            "residual": rng.standard_normal((tokens, hidden)).astype(np.float32),
            "x": rng.standard_normal((tokens, hidden)).astype(np.float32),
            "past_k": rng.standard_normal((past, kv_heads, head_dim)).astype(np.float32),
            "past_v": rng.standard_normal((past, kv_heads, head_dim)).astype(np.float32),
        }
        told = f", {past} tokens before" if past else ""
        label = f"layer {layer}, {tokens} token{'s' if tokens > 1 else ''}{told}"
        return Case(label, inputs, group)

    return [
        case(0, 3, 0, "first"),
        case(1, 3, 0, "later"),
        case(2, 1, 5, "later"),
        case(3, 7, 2, "awkward", (6, 3, 4)),
        case(1, 65, 0, "awkward", (3, 1, 10)),
    ]


def _run_layer(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    from types import SimpleNamespace

    import numpy as np

    sizes, past = dict(inputs["sizes"]), inputs["past"]
    sizes["q_size"] = sizes["num_attention_heads"] * sizes["head_dim"]
    sizes["kv_size"] = sizes["num_key_value_heads"] * sizes["head_dim"]
    tokens = len(inputs["residual"])

    class Weights(dict):  # type: ignore[type-arg]
        config = SimpleNamespace(**sizes)

    weights = Weights({name: lab.input(name, values) for name, values in inputs["weights"].items()})
    weights["inv_freq"] = lab.input("inv_freq", inputs["inv_freq"])
    asked: list[int] = []

    def attend(layer: Any, q: Any, k: Any, v: Any, out: Any) -> Any:
        asked.append(int(layer))
        heads, kv_heads, columns = (
            sizes[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        wanted = {"q": (q, heads), "k": (k, kv_heads), "v": (v, kv_heads)}
        for name, (array, count) in wanted.items():
            if array.shape != (tokens, count, columns) or array.dtype != np.float32:
                raise ValueError(
                    f"attend got {name} {array.shape} {array.dtype}; it must be {(tokens, count, columns)} float32"
                )
            if not array.flags.c_contiguous:
                raise ValueError(f"attend got {name} as a view with gaps; it must be C-contiguous")
        if out.shape != q.shape or out.dtype != np.uint16:
            raise ValueError(f"attend got out {out.shape} {out.dtype}; it must be {q.shape} uint16")
        q = q.get().astype(np.float64)
        k = np.concatenate([inputs["past_k"], k.get()]).astype(np.float64).repeat(heads // kv_heads, axis=1)
        v = np.concatenate([inputs["past_v"], v.get()]).astype(np.float64).repeat(heads // kv_heads, axis=1)
        scores = np.einsum("nhd,mhd->hnm", q, k) * columns**-0.5
        scores[:, ~np.tri(tokens, past + tokens, past, dtype=bool)] = -np.inf
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        u = np.einsum("hnm,mhd->nhd", shares, v).astype(np.float32).view(np.uint32)
        out.set(((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16))
        return out

    attend.positions = lab.input(  # type: ignore[attr-defined]
        "positions", np.arange(past, past + tokens, dtype=np.int32)
    )
    residual = lab.inout(inputs["residual"])
    # Before layer 0 nobody has written x.
    x = lab.inout(inputs["x"]) if inputs["layer"] else lab.output(inputs["x"].shape)
    after = lab.returned(answer(x, residual, weights, inputs["layer"], attend), x, "x")
    return {"calls of attend, by layer": asked, "residual": lab.get(residual, "residual"), "x": after}


def layer_in_float64(
    stream: Any, weights: Any, sizes: Any, inv_freq: Any, positions: Any, seen: Any, past_k: Any, past_v: Any
) -> tuple[Any, Any]:
    """One layer in float64, rounded to BF16 where the engine does: the inputs of products.

    Parameters
    ----------
    stream : (T, H)
        All that came before, added.
    weights : mapping of str to BF16 bits
        Of this layer: ``"qkv"`` and the like.
    sizes : mapping
        Of the config.
    inv_freq : (D/2,)
    positions : (T,)
    seen : (T, past + T) bool
        Which keys each query reads.
    past_k, past_v : (past, Hk, D)

    Returns
    -------
    The stream after attention, and what the feed-forward has computed.
    """
    w = {name: bf16_to_float(bits).astype(np.float64) for name, bits in weights.items()}

    def rounded(values: Any) -> Any:
        return bf16_to_float(float_to_bf16(values.astype(np.float32))).astype(np.float64)

    def norm(values: Any, weight: Any) -> Any:
        return rounded(values / np.sqrt((values**2).mean(-1, keepdims=True) + sizes["rms_norm_eps"]) * weight)

    tokens, heads, kv_heads, width = (
        len(stream), sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["head_dim"],
    )  # fmt: skip
    qkv = norm(stream, w["input_layernorm"]) @ w["qkv"].T
    q, k, v = (
        part.reshape(tokens, -1, width)
        for part in np.split(qkv, [heads * width, (heads + kv_heads) * width], axis=1)
    )
    angle = np.outer(positions, inv_freq.astype(np.float64))[:, None, :]

    def turned(a: Any) -> Any:
        left, right = np.split(a, 2, axis=-1)
        return np.concatenate(
            [left * np.cos(angle) - right * np.sin(angle), right * np.cos(angle) + left * np.sin(angle)],
            axis=-1,
        )

    k = np.concatenate([past_k, turned(k)]).repeat(heads // kv_heads, axis=1)
    v = np.concatenate([past_v, v]).repeat(heads // kv_heads, axis=1)
    scores = np.einsum("nhd,mhd->hnm", turned(q), k) * width**-0.5
    scores[:, ~seen] = -np.inf
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    stream = stream + rounded(np.einsum("hnm,mhd->nhd", shares, v).reshape(tokens, -1)) @ w["o_proj"].T
    gate, up = np.split(norm(stream, w["post_attention_layernorm"]) @ w["gate_up"].T, 2, axis=1)
    return stream, rounded(gate * _sigmoid(gate) * up) @ w["down_proj"].T


def weights_of_layer(weights: Any, layer: int) -> dict[str, Any]:
    """One layer's weights, by their short names."""
    of = f"layers.{layer}."
    return {name.removeprefix(of): bits for name, bits in weights.items() if name.startswith(of)}


def random_layer(rng: np.random.Generator, layer: int, sizes: Any) -> dict[str, Any]:
    """Weights of one layer, such that what it computes is about as large as the stream."""
    hidden, ffn, head_dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    q_size, kv_size = sizes["num_attention_heads"] * head_dim, sizes["num_key_value_heads"] * head_dim

    def weight(*shape: int, size: float) -> Any:
        return float_to_bf16((rng.standard_normal(shape) * size).astype(np.float32))

    def norm() -> Any:
        return float_to_bf16((1 + 0.5 * rng.standard_normal(hidden)).astype(np.float32))

    return {
        f"layers.{layer}.input_layernorm": norm(),
        f"layers.{layer}.qkv": weight(q_size + 2 * kv_size, hidden, size=hidden**-0.5),
        f"layers.{layer}.o_proj": weight(hidden, q_size, size=2 * q_size**-0.5),
        f"layers.{layer}.post_attention_layernorm": norm(),
        f"layers.{layer}.gate_up": weight(2 * ffn, hidden, size=hidden**-0.5),
        f"layers.{layer}.down_proj": weight(hidden, ffn, size=2 * ffn**-0.5),
    }


def _expect_layer(inputs: Any) -> dict[str, Any]:
    layer, past, tokens = inputs["layer"], inputs["past"], len(inputs["residual"])
    stream = inputs["residual"].astype(np.float64)
    if layer:
        stream = stream + inputs["x"]
    stream, x = layer_in_float64(
        stream,
        weights_of_layer(inputs["weights"], layer),
        inputs["sizes"],
        inputs["inv_freq"],
        np.arange(past, past + tokens),
        np.tri(tokens, past + tokens, past, dtype=bool),
        inputs["past_k"],
        inputs["past_v"],
    )
    return {
        "calls of attend, by layer": [layer],
        "residual": stream.astype(np.float32),
        "x": x.astype(np.float32),
    }


_LAYER_TEXT = """def decoder_layer(x, residual, weights, layer, attend):
    config, tokens = weights.config, len(x)
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    eps = config.rms_norm_eps

    def new(columns, dtype):
        return cp.empty((tokens, columns), dtype)

    def weight(name):
        return weights[f"layers.{layer}.{name}"]

    h = new(config.hidden_size, np.uint16)
    if layer == 0:
        rms_norm(residual, weight("input_layernorm"), eps, h)
    else:
        add_rms_norm(x, residual, weight("input_layernorm"), eps, h)
    qkv = linear(h, weight("qkv"), new((heads + 2 * kv_heads) * head_dim, np.float32))
    q_end, k_end = heads * head_dim, (heads + kv_heads) * head_dim
    q = cp.ascontiguousarray(qkv[:, :q_end]).reshape(tokens, heads, head_dim)
    k = cp.ascontiguousarray(qkv[:, q_end:k_end]).reshape(tokens, kv_heads, head_dim)
    v = cp.ascontiguousarray(qkv[:, k_end:]).reshape(tokens, kv_heads, head_dim)
    rope(q, k, attend.positions, weights["inv_freq"])
    attended = cp.empty((tokens, heads, head_dim), np.uint16)
    attend(layer, q, k, v, attended)
    linear(attended.reshape(tokens, heads * head_dim), weight("o_proj"), x)
    add_rms_norm(x, residual, weight("post_attention_layernorm"), eps, h)
    gate_up = linear(h, weight("gate_up"), new(2 * config.intermediate_size, np.float32))
    activated = silu_mul(gate_up, new(config.intermediate_size, np.uint16))
    linear(activated, weight("down_proj"), x)
    return x
"""


def _layer(*changes: tuple[str, str]) -> str:
    """The whole answer for 13.4, with some things exchanged."""
    text = _LAYER_TEXT
    return with_changes(text, changes)


_FIRST_NORM = """    if layer == 0:
        rms_norm(residual, weight("input_layernorm"), eps, h)
    else:
        add_rms_norm(x, residual, weight("input_layernorm"), eps, h)
"""
_SECOND_NORM = 'add_rms_norm(x, residual, weight("post_attention_layernorm"), eps, h)'

_LAYER = Exercise(
    id="13.4",
    title="a whole layer, the part",
    answer="decoder_layer",
    kind="function",
    arguments=("x", "residual", "weights", "layer", "attend"),
    uses=("rms_norm", "add_rms_norm", "linear", "rope", "silu_mul"),
    cases=_layer_cases,
    run=_run_layer,
    expected=_expect_layer,
    points={"first": 1, "later": 2, "awkward": 1},
    tolerance=Tolerance(
        2e-2, 3e-2, "a BF16 value may round the other way, by one part in 256, at each of four places"
    ),
    makes={"decoder_layer": "decoder_layer"},
    file="decoder_layer.py",
    hints=Hints(
        question="Take {case}. Say in words what is in residual and in x: when the layer begins, after attention has been added, and "
        "when it ends.",
        rule="The stream is residual. Each block reads a *norm* of it and leaves its result in x; the next norm adds x to the stream "
        "first. So add_rms_norm stands wherever something has just been computed, and only layer 0 begins with rms_norm. The layer "
        "ends with down_proj into x: whoever comes next adds it.\n\nThe columns of qkv: first Hq * D of the queries, then Hk * D "
        "of the keys, then Hk * D of the values.",
        code="""if layer == 0:
    ____(residual, weight("input_layernorm"), eps, h)
else:
    ____(x, residual, weight("input_layernorm"), eps, h)
qkv = linear(h, weight("qkv"), new(____, np.float32))
q = cp.ascontiguousarray(qkv[:, :____]).reshape(tokens, heads, head_dim)
k = cp.ascontiguousarray(qkv[:, ____:____]).reshape(tokens, kv_heads, head_dim)
v = cp.ascontiguousarray(qkv[:, ____:]).reshape(tokens, kv_heads, head_dim)
rope(q, k, ____, weights["inv_freq"])
attended = cp.empty((tokens, heads, head_dim), np.uint16)
attend(____, q, k, v, attended)
linear(attended.reshape(tokens, heads * head_dim), weight("o_proj"), ____)
____(x, residual, weight("post_attention_layernorm"), eps, h)
gate_up = linear(h, weight("gate_up"), new(____, np.float32))
activated = silu_mul(gate_up, new(____, np.uint16))
linear(activated, weight("down_proj"), ____)
return x""",
    ),
    mistakes=(
        Mistake(
            "attention never added",
            _layer((_SECOND_NORM, _SECOND_NORM.replace("add_rms_norm(x, ", "rms_norm("))),
            "The second norm reads the stream as it was before attention, and then down_proj overwrites x: what attention has found "
            "is lost. add_rms_norm adds x to the stream first.",
            "What is in x just before the second norm, and who adds it to the stream?",
        ),
        Mistake(
            "the norm of attention's result alone",
            _layer((_SECOND_NORM, _SECOND_NORM.replace("add_rms_norm(x, residual", "rms_norm(x"))),
            "Without the residual the feed-forward sees only what attention has computed, and the stream never gets it. The block "
            "reads a norm of the whole stream.",
            "What does the second norm have to read: x, the stream, or their sum?",
        ),
        Mistake(
            "x added in layer 0 as well",
            _layer((_FIRST_NORM, '    add_rms_norm(x, residual, weight("input_layernorm"), eps, h)\n')),
            "Before layer 0 nobody has computed anything: x is memory that was never written. There the stream is complete, and "
            "rms_norm is enough.",
            "Who writes to x before layer 0?",
        ),
        Mistake(
            "the layer before never added",
            _layer((_FIRST_NORM, '    rms_norm(residual, weight("input_layernorm"), eps, h)\n')),
            "From layer 1 on, x holds what the feed-forward of the layer before has computed, and it has not been added to the stream "
            "yet.",
            "What is in x when layer 1 begins?",
        ),
        Mistake(
            "the feed-forward's result added at once",
            _layer(("    return x", "    residual += x\n    return x")),
            "The layer leaves its last result in x, and the next norm adds it in the same pass. Added here as well, it counts twice.",
            "Who adds x to the stream after this layer has ended?",
        ),
        Mistake(
            "queries and keys not rotated",
            _layer(('    rope(q, k, attend.positions, weights["inv_freq"])\n', "")),
            "Without RoPE attention does not know where anything stands.",
            "Between the product and attention, what has to happen to q and k?",
        ),
        Mistake(
            "positions from 0 in every step",
            _layer(("attend.positions", "cp.arange(tokens, dtype=np.int32)")),
            "The tokens of this step need not be the first of their text. attend knows where they stand: attend.positions.",
            "If 5 tokens came before, which position has the first of this step?",
        ),
        Mistake(
            "keys and values swapped",
            _layer(
                ("k = cp.ascontiguousarray(qkv[:, q_end:k_end])", "k = cp.ascontiguousarray(qkv[:, k_end:])"),
                ("v = cp.ascontiguousarray(qkv[:, k_end:])", "v = cp.ascontiguousarray(qkv[:, q_end:k_end])"),
            ),
            "The weights are stacked as q, k, v, so the columns come in that order.",
            "In which order were the three weights put under each other?",
        ),
        Mistake(
            "views, not arrays of their own",
            _layer(
                ("cp.ascontiguousarray(qkv[:, :q_end])", "qkv[:, :q_end]"),
                ("cp.ascontiguousarray(qkv[:, q_end:k_end])", "qkv[:, q_end:k_end]"),
                ("cp.ascontiguousarray(qkv[:, k_end:])", "qkv[:, k_end:]"),
            ),
            "Columns cut out of a larger array lie in memory with gaps between the rows, and a kernel that gets the address knows "
            "nothing of these. cp.ascontiguousarray makes a copy without gaps.",
            "How far apart in memory are q of token 0 and q of token 1, and how far does a kernel take them to be?",
        ),
        Mistake(
            "the two arrays exchanged",
            _layer(
                (_FIRST_NORM, _FIRST_NORM.replace("add_rms_norm(x, residual", "add_rms_norm(residual, x")),
                (_SECOND_NORM, _SECOND_NORM.replace("add_rms_norm(x, residual", "add_rms_norm(residual, x")),
            ),
            "add_rms_norm(x, residual, ...) reads its first array and writes the sum into its second: that has to be the stream. The "
            "other way round the stream is never added to, and the next product overwrites the sum in x.",
            "Into which of its two arrays does add_rms_norm write the sum?",
            variants=(
                _layer(
                    (
                        _SECOND_NORM,
                        _SECOND_NORM.replace("add_rms_norm(x, residual", "add_rms_norm(residual, x"),
                    )
                ),
            ),
        ),
        Mistake(
            "the two norms' weights exchanged",
            _layer(
                (
                    'rms_norm(residual, weight("input_layernorm")',
                    'rms_norm(residual, weight("post_attention_layernorm")',
                ),
                (
                    'add_rms_norm(x, residual, weight("input_layernorm")',
                    'add_rms_norm(x, residual, weight("?")',
                ),
                (
                    'add_rms_norm(x, residual, weight("post_attention_layernorm")',
                    'add_rms_norm(x, residual, weight("input_layernorm")',
                ),
                ('weight("?")', 'weight("post_attention_layernorm")'),
            ),
            "The layer begins with input_layernorm. post_attention_layernorm is what its name says: the norm after attention.",
            "Which of the two norms comes after attention?",
        ),
        Mistake(
            "layer 0's weights in every layer",
            _layer(('f"layers.{layer}.{name}"', 'f"layers.0.{name}"')),
            "Every layer has weights of its own, by its number.",
            "Which weights does layer 1 use in your function?",
        ),
        Mistake(
            "attend told the wrong layer",
            _layer(("attend(layer, q", "attend(0, q")),
            "attend keeps keys and values of each layer apart, and needs to know which one this is.",
            "What does attend do with its first argument?",
        ),
        Mistake(
            "one norm's weight for both",
            _layer(('weight("post_attention_layernorm")', 'weight("input_layernorm")')),
            "The two norms of a layer have weights of their own.",
            "Which weights does the second norm take?",
        ),
        Mistake(
            "the feed-forward reads what attention read",
            _layer(
                (_SECOND_NORM, "residual += x"),
            ),
            "The stream is added to, and then the feed-forward gets the norm from before attention: it does not see what attention "
            "has found.",
            "When was the h computed that gate_up reads?",
        ),
    ),
)

# ---------------- pictures


def draw_activations() -> Any:
    """SiLU beside ReLU."""
    from tinyvllm_ref.course import figures

    x = np.linspace(-6, 4, 201)
    lines = {"SiLU": x * _sigmoid(x), "ReLU": np.maximum(x, 0), "sigmoid": _sigmoid(x)}
    return figures.error_lines(
        x,
        lines,
        "x",
        "what comes out",
        title="SiLU is a soft ReLU",
        subtitle="x times its sigmoid: nearly x where x is large, nearly 0 where it is very negative, and smooth between.",
    )


def draw_parameters() -> Any:
    """Where the parameters of four models are; the sizes are those of the models' config.json."""
    from tinyvllm_ref.checkpoint.names import resolve
    from tinyvllm_ref.config import ModelConfig
    from tinyvllm_ref.course.figures.model_sizes import parameter_shares

    def of(vocab: int, hidden: int, ffn: int, layers: int, q: int, kv: int, tied: bool) -> dict[str, int]:
        return {
            "embedding": vocab * hidden * (1 if tied else 2),
            "attention": layers * hidden * (2 * q + 2 * kv),
            "feed-forward": layers * 3 * hidden * ffn,
        }

    c = ModelConfig.from_json(resolve("tiny-stories"))
    ours = of(
        c.vocab_size,
        c.hidden_size,
        c.intermediate_size,
        c.num_hidden_layers,
        c.q_size,
        c.kv_size,
        c.tie_word_embeddings,
    )
    return parameter_shares(
        {
            "tiny-stories": ours,
            "SmolLM2 135M": of(49152, 576, 1536, 30, 576, 192, True),
            "Llama 3.2 1B": of(128256, 2048, 8192, 16, 2048, 512, True),
            "Llama 3.1 8B": of(128256, 4096, 14336, 32, 4096, 1024, False),
        },
        title="Where the parameters are",
        subtitle="Norms are left out: they are less than a thousandth of each.",
    )


# ---------------- what is measured


def _make_run(tokens: int, ffn: int) -> Any:
    def make(answer: Any, cp: Any) -> Any:
        gate_up, out = cp.ones((tokens, 2 * ffn), np.float32), cp.empty((tokens, ffn), np.uint16)
        return lambda: answer(gate_up, out)

    return make


_LARGE, _SMALL, _FFN = 8192, 8, 1024
_WORK = Work(
    label=f"T = {_LARGE:,}, F = {_FFN:,}",
    make=_make_run(_LARGE, _FFN),
    read_bytes=8 * _LARGE * _FFN,
    write_bytes=2 * _LARGE * _FFN,
    small=_make_run(_SMALL, _FFN),
    small_read_bytes=8 * _SMALL * _FFN,
    small_write_bytes=2 * _SMALL * _FFN,
    small_label=f"T = {_SMALL}, F = {_FFN:,}",
)

LESSON = Lesson(
    number="13",
    slug="feed_forward",
    title="Feed-forward, and a whole layer",
    part=3,
    minutes=55,
    exercises=(_SILU, _PREDICTION, _MUL, _LAYER),
    engine=EngineCard(
        mistakes=(
            ("13.3", "SiLU of the product"),
            ("13.3", "first all tokens' gates, then all ups"),
            ("13.4", "attention never added"),
        ),
        note="silu_mul and decoder_layer run once for each layer and step. Around them the reference's forward still counts the "
        "layers; lesson 14 takes that over.",
    ),
    works={"13.3": _WORK},
)
