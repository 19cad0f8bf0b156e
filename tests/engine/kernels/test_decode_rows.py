"""The row kernels of a decode step: NumPy in float64, the simple kernels, one row alone, NVIDIA's compiler, a graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests import nvrtc
from tinyvllm_ref import bf16
from tinyvllm_ref.device import cp, is_gpu
from tinyvllm_ref.kernels import decode_rows, source
from tinyvllm_ref.kernels.add_rms_norm import add_rms_norm
from tinyvllm_ref.kernels.argmax import argmax
from tinyvllm_ref.kernels.decode_rows import (
    ARGMAX_PART,
    add_norm_rows,
    argmax_rows,
    argmax_scratch,
    embed_norm,
    norm_rows,
    silu_mul_rows,
)
from tinyvllm_ref.kernels.embedding import embedding
from tinyvllm_ref.kernels.rms_norm import rms_norm
from tinyvllm_ref.kernels.silu_mul import silu_mul

from .cases import (
    BF16,
    EPS,
    EXACT,
    Arrays,
    Case,
    bits,
    checked,
    f64,
    in_emulation,
    normal,
    poisoned,
    poisoned_bf16,
    random,
)

F32, U16, I32, U64 = np.float32, np.uint16, np.int32, np.uint64


# ---------------- cases
def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return np.asarray(x / np.sqrt((x**2).mean(axis=1, keepdims=True) + EPS) * f64(weight))


# The last ones ask for more than one vector a thread on a card too.
NORM_SIZES = ((1, 8), (3, 192), (2, 264), (2, 576), (1, 2048), (1, 4104), (2, 8192))


def norm_cases() -> Iterator[Case]:
    for tokens, hidden in NORM_SIZES:
        rng = random("decode norm", tokens, hidden)
        x, residual = normal(rng, tokens, hidden) + 2, normal(rng, tokens, hidden)
        x[-1] *= 1e-3
        residual[-1] *= 1e-3
        weight, table = bits(rng, hidden), bits(rng, 5, hidden)
        ids = rng.integers(0, 5, tokens).astype(I32)
        ids[0] = 4
        arrays, sizes, long = (x, residual, weight, table, ids), f"T={tokens} H={hidden}", hidden > 2048

        def run_embed(arrays: Any = arrays) -> Arrays:
            x, _, weight, table, ids = arrays
            residual, out = poisoned(*x.shape), poisoned_bf16(*x.shape)
            embed_norm(cp.asarray(ids), cp.asarray(table), cp.asarray(weight), EPS, residual, out)
            return {"out": cp.asnumpy(out), "residual": cp.asnumpy(residual).astype(np.float64)}

        def want_embed(arrays: Any = arrays) -> Arrays:
            _, _, weight, table, ids = arrays
            return {"out": _norm(f64(table)[ids], weight), "residual": f64(table)[ids]}

        def run_norm(arrays: Any = arrays) -> Arrays:
            x, _, weight, *_ = arrays
            stream = cp.asarray(x)
            out = norm_rows(stream, cp.asarray(weight), EPS, poisoned_bf16(*x.shape))
            return {"out": cp.asnumpy(out), "residual": cp.asnumpy(stream)}

        def want_norm(arrays: Any = arrays) -> Arrays:
            x, _, weight, *_ = arrays
            return {"out": _norm(f64(x), weight), "residual": f64(x)}

        def run_add(arrays: Any = arrays) -> Arrays:
            x, residual, weight, *_ = arrays
            stream = cp.asarray(residual)
            out = add_norm_rows(cp.asarray(x), stream, cp.asarray(weight), EPS, poisoned_bf16(*x.shape))
            return {"out": cp.asnumpy(out), "residual": cp.asnumpy(stream)}

        def want_add(arrays: Any = arrays) -> Arrays:
            x, residual, weight, *_ = arrays
            return {"out": _norm(f64(x) + f64(residual), weight), "residual": f64(x + residual)}

        yield Case(f"embed_norm {sizes}", run_embed, want_embed, BF16, long)
        yield Case(f"norm_rows {sizes}", run_norm, want_norm, BF16, long)
        yield Case(f"add_norm_rows {sizes}", run_add, want_add, BF16, long)


def unknown_id_case() -> Case:
    """Ids outside of the vocabulary: NaN in their rows, and nothing in the others."""
    rng = random("unknown ids")
    table, weight = bits(rng, 3, 40), bits(rng, 40)
    ids = np.array([2, 3, -1, 0, 2**31 - 1, -(2**31)], I32)
    valid = np.array([True, False, False, True, False, False])

    def run() -> Arrays:
        residual, out = poisoned(6, 40), poisoned_bf16(6, 40)
        embed_norm(cp.asarray(ids), cp.asarray(table), cp.asarray(weight), EPS, residual, out)
        return {"out": cp.asnumpy(out), "residual": cp.asnumpy(residual)}

    def want() -> Arrays:
        rows = np.where(valid[:, None], f64(table)[np.where(valid, ids, 0)], np.nan)
        return {"out": _norm(rows, weight), "residual": rows}

    return Case("embed_norm, unknown ids", run, want, BF16)


def silu_cases() -> Iterator[Case]:
    for tokens, ffn, kind in ((t, f, k) for t, f in ((1, 8), (3, 520), (2, 4104)) for k in (F32, U16)):
        gate_up = 3 * normal(random("decode silu", tokens, ffn), tokens, 2 * ffn)
        gate_up[0, 0] = -200.0  # exp(200) is too large for float32
        gate_up[-1, ffn - 1] = 200.0
        if kind == U16:
            gate_up = bf16.float_to_bf16(gate_up)

        def run(gate_up: np.ndarray = gate_up) -> Arrays:
            out = poisoned_bf16(len(gate_up), gate_up.shape[1] // 2)
            return {"out": cp.asnumpy(silu_mul_rows(cp.asarray(gate_up), out))}

        def want(gate_up: np.ndarray = gate_up) -> Arrays:
            gate, up = np.split(f64(gate_up), 2, axis=1)
            return {"out": gate / (1 + np.exp(-gate)) * up}

        yield Case(f"silu_mul_rows {np.dtype(kind)} T={tokens} F={ffn}", run, want, BF16, ffn * tokens > 4096)


def _argmax(x: np.ndarray, scratch: Any = None) -> np.ndarray:
    if scratch is None:
        scratch = poisoned(*argmax_scratch(*x.shape), dtype=U64)
    return np.asarray(cp.asnumpy(argmax_rows(cp.asarray(x), poisoned(len(x), dtype=I32), scratch)))


def argmax_cases() -> Iterator[Case]:
    part = ARGMAX_PART
    for rows, width in (
        *((1, 1), (3, 17), (2, 31), (3, 32), (2, 132), (4, part), (3, part + 1), (3, part + 4)),
        *((1, 3 * part - 4), (2, 40 * part + 8)),
    ):
        x = normal(random("decode argmax", rows, width), rows, width) - 100
        x[0, width // 2 :] = x[0].max() + 1  # a tie over half of the row
        if rows > 2:
            x[1, 3 % width], x[1, width - 1] = np.nan, -np.nan
            x[2] = -np.inf
        if rows > 3:
            x[3] = -np.abs(x[3])
            x[3, [5, 70, 900]] = -0.0, 0.0, -0.0  # they are equal

        def run(x: np.ndarray = x) -> Arrays:
            return {"out": _argmax(x)}

        def want(x: np.ndarray = x) -> Arrays:
            return {"out": np.argmax(x, axis=1)}

        yield Case(f"argmax_rows R={rows} V={width}", run, want, EXACT, rows * width > 10_000)


CASES = [*norm_cases(), unknown_id_case(), *silu_cases(), *argmax_cases()]


@in_emulation
@pytest.mark.parametrize("case", [c for c in CASES if not c.long], ids=lambda case: case.name)
def test_with_every_access_checked(case: Case) -> None:
    with checked("full"):
        assert case.wrong() == {}


@in_emulation
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fast(case: Case) -> None:
    with checked("fast"):
        assert case.wrong() == {}


@pytest.fixture
def blocks_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_rows, "_MOST_THREADS", 512)
    monkeypatch.setattr(decode_rows, "_SILU_THREADS", 256)
    monkeypatch.setattr(decode_rows, "_ARGMAX_THREADS", 256)


@in_emulation
@pytest.mark.parametrize("mode", ["fast", "full"])
@pytest.mark.parametrize("case", [c for c in CASES if not c.long], ids=lambda case: case.name)
def test_with_blocks_of_several_warps(case: Case, mode: str, blocks_of_a_card: None) -> None:
    """What a card is given: the barrier and the second round of shuffles, with every access checked."""
    with checked(mode):
        assert case.wrong() == {}


@in_emulation
@pytest.mark.parametrize("case", [c for c in CASES if c.long], ids=lambda case: case.name)
def test_long_rows_with_blocks_of_several_warps(case: Case, blocks_of_a_card: None) -> None:
    with checked("fast"):
        assert case.wrong() == {}


@pytest.mark.gpu
@pytest.mark.skipif(not is_gpu, reason="no NVIDIA GPU")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_a_card(case: Case) -> None:
    assert case.wrong() == {}


# ---------------- beside the simple kernels
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 192), (5, 576), (3, 2048)])
def test_norms_as_the_simple_kernels_have_them(tokens: int, hidden: int) -> None:
    """Equal but for the order of the additions: at most one step of bfloat16 apart, and rarely that."""
    rng = random("beside", tokens, hidden)
    ids = cp.asarray(rng.integers(-1, 8, tokens).astype(I32))
    table, weight = cp.asarray(bits(rng, 7, hidden)), cp.asarray(bits(rng, hidden))
    x = cp.asarray(normal(rng, tokens, hidden))
    ours, simple, ours_out, simple_out = (
        f(tokens, hidden) for f in (poisoned, poisoned, poisoned_bf16, poisoned_bf16)
    )
    embed_norm(ids, table, weight, EPS, ours, ours_out)
    rms_norm(embedding(ids, table, simple), weight, EPS, simple_out)
    _beside(ours, simple, ours_out, simple_out)
    add_norm_rows(x, ours, weight, EPS, ours_out)
    add_rms_norm(x, simple, weight, EPS, simple_out)
    _beside(ours, simple, ours_out, simple_out)
    norm_rows(ours, weight, EPS, ours_out)
    rms_norm(simple, weight, EPS, simple_out)
    _beside(ours, simple, ours_out, simple_out)


def _beside(ours: Any, simple: Any, ours_out: Any, simple_out: Any) -> None:
    np.testing.assert_array_equal(cp.asnumpy(ours).view(np.uint32), cp.asnumpy(simple).view(np.uint32))
    a, b = (cp.asnumpy(out).astype(np.int64) for out in (ours_out, simple_out))
    assert np.abs(a - b).max() <= 1
    assert (a != b).mean() < 0.01


@pytest.mark.parametrize(("tokens", "ffn"), [(1, 8), (3, 512), (2, 1536)])
def test_silu_to_the_bit_as_the_simple_kernel_has_it(tokens: int, ffn: int) -> None:
    gate_up = 4 * normal(random("silu beside", tokens, ffn), tokens, 2 * ffn)
    gate_up[0, :4] = -200, 200, np.nan, -np.inf
    for stored in (gate_up, bf16.float_to_bf16(gate_up)):
        numbers = stored if stored.dtype == F32 else bf16.bf16_to_float(stored)
        ours = silu_mul_rows(cp.asarray(stored), poisoned_bf16(tokens, ffn))
        simple = silu_mul(cp.asarray(numbers), poisoned_bf16(tokens, ffn))
        np.testing.assert_array_equal(cp.asnumpy(ours), cp.asnumpy(simple))


SPECIAL = (0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, -np.nan, 3.4e38, -3.4e38)


@pytest.mark.parametrize("width", [1, 7, 8, 64, ARGMAX_PART + 4])
def test_argmax_as_the_simple_kernel_and_numpy_have_it(width: int) -> None:
    """Rows that are full of ties, infinities and NaN."""
    rng = random("argmax beside", width)
    x = rng.choice(np.array(SPECIAL, F32), (40, width))
    x[20:] = np.where(np.isnan(x[20:]), F32(-1), x[20:])
    x[30:] = np.where(x[30:] == np.inf, F32(-0.0), x[30:])
    ours = _argmax(x)
    np.testing.assert_array_equal(ours, np.argmax(x, axis=1))
    np.testing.assert_array_equal(ours, cp.asnumpy(argmax(cp.asarray(x), poisoned(40, dtype=I32))))


def test_argmax_finds_every_column() -> None:
    """The largest logit at each column in turn, through all parts, lanes and vectors."""
    width = 2 * ARGMAX_PART + 12
    columns = np.arange(0, width, 7, dtype=I32)
    x = np.zeros((len(columns), width), F32)
    x[np.arange(len(columns)), columns] = 1e-3
    np.testing.assert_array_equal(_argmax(x), columns)


def test_argmax_scratch_serves_fewer_rows() -> None:
    x = normal(random("scratch"), 3, 5000)
    scratch = poisoned(*argmax_scratch(9, 5000), dtype=U64)
    np.testing.assert_array_equal(_argmax(x, scratch[:3]), np.argmax(x, axis=1))


@pytest.mark.parametrize("hidden", [192, 2048])
def test_a_row_gives_the_same_bits_alone_and_in_a_batch(hidden: int) -> None:
    rng = random("alone", hidden)
    x, residual, weight = normal(rng, 9, hidden), normal(rng, 9, hidden), bits(rng, hidden)
    gate_up = normal(rng, 9, 2 * hidden)

    def all_of(rows: slice) -> list[np.ndarray]:
        stream, shape = cp.asarray(residual[rows]), x[rows].shape
        first = add_norm_rows(cp.asarray(x[rows]), stream, cp.asarray(weight), EPS, poisoned_bf16(*shape))
        second = norm_rows(stream, cp.asarray(weight), EPS, poisoned_bf16(*shape))
        third = silu_mul_rows(cp.asarray(gate_up[rows]), poisoned_bf16(*shape))
        return [cp.asnumpy(array) for array in (first, stream, second, third)]

    together = all_of(slice(None))
    for row in (0, 4, 8):
        for alone, batch in zip(all_of(slice(row, row + 1)), together, strict=True):
            np.testing.assert_array_equal(alone[0], batch[row])


# ---------------- what is refused
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "embed_norm": (
        embed_norm,
        {
            **{"ids": ((3,), I32), "table": ((5, 16), U16), "weight": ((16,), U16), "eps": EPS},
            **{"residual": ((3, 16), F32), "out": ((3, 16), U16)},
        },
    ),
    "norm_rows": (
        norm_rows,
        {"residual": ((3, 16), F32), "weight": ((16,), U16), "eps": EPS, "out": ((3, 16), U16)},
    ),
    "add_norm_rows": (
        add_norm_rows,
        {
            **{"x": ((3, 16), F32), "residual": ((3, 16), F32), "weight": ((16,), U16), "eps": EPS},
            "out": ((3, 16), U16),
        },
    ),
    "silu_mul_rows": (silu_mul_rows, {"gate_up": ((3, 32), F32), "out": ((3, 16), U16)}),
    "silu_mul_rows bf16": (silu_mul_rows, {"gate_up": ((3, 32), U16), "out": ((3, 16), U16)}),
    "argmax_rows": (argmax_rows, {"logits": ((3, 16), F32), "out": ((3,), I32), "scratch": ((3, 1), U64)}),
}
ARRAYS = [(n, a) for n, (_, specs) in CALLS.items() for a, spec in specs.items() if isinstance(spec, tuple)]


def _call(name: str, **changed: Any) -> Any:
    function, specs = CALLS[name]
    made = {key: cp.zeros(*spec) if isinstance(spec, tuple) else spec for key, spec in specs.items()}
    return function(*(made | changed).values())


@pytest.mark.parametrize("name", CALLS)
def test_right_arguments_pass(name: str) -> None:
    specs = CALLS[name][1]
    out = _call(name)
    assert out.shape == specs["out"][0]


@pytest.mark.parametrize(("name", "array"), ARRAYS)
def test_wrong_arrays(name: str, array: str) -> None:
    shape, dtype = CALLS[name][1][array]
    wider, longer = (*shape[:-1], 2 * shape[-1]), (shape[0] + 3, *shape[1:])
    function = name.split()[0]
    for wrong, says in (
        (cp.zeros(shape, np.float64), "float64"),
        (cp.zeros((*shape, 1), dtype), re.escape(str((*shape, 1)))),
        (cp.zeros(wider, dtype)[..., ::2], "C-contiguous"),
        (np.zeros(shape, dtype), "NumPy"),
        *(() if (name, array) == ("embed_norm", "table") else [(cp.zeros(longer, dtype), "must be")]),
    ):
        with pytest.raises(ValueError, match=f"{function}: .*{says}"):
            _call(name, **{array: wrong})


@pytest.mark.parametrize(
    ("name", "array"),
    [pair for pair in ARRAYS if pair[1] not in ("ids", "scratch") and pair[0] != "argmax_rows"],
)
def test_an_array_that_vectors_can_not_read(name: str, array: str) -> None:
    shape, dtype = CALLS[name][1][array]
    shifted = cp.zeros(int(np.prod(shape)) + 1, dtype)[1:].reshape(shape)
    with pytest.raises(ValueError, match=rf": {array} starts at address .* multiple of 16 bytes"):
        _call(name, **{array: shifted})


def test_logits_that_vectors_can_not_read() -> None:
    shifted = cp.zeros(3 * 16 + 1, F32)[1:].reshape(3, 16)
    with pytest.raises(ValueError, match=r"argmax_rows: logits starts at address"):
        _call("argmax_rows", logits=shifted)


@pytest.mark.parametrize("hidden", [1, 12, 4100])
def test_a_width_that_vectors_do_not_divide(hidden: int) -> None:
    message = rf"the width of out is {hidden}; it must be a multiple of 8"
    row, weight, out = cp.zeros((1, hidden), F32), cp.zeros(hidden, U16), cp.zeros((1, hidden), U16)
    with pytest.raises(ValueError, match=f"norm_rows: {message}"):
        norm_rows(row, weight, EPS, out)
    with pytest.raises(ValueError, match=f"silu_mul_rows: {message}"):
        silu_mul_rows(cp.zeros((1, 2 * hidden), F32), out)


def test_sizes_that_do_not_fit_each_other() -> None:
    with pytest.raises(ValueError, match="silu_mul_rows: the width of gate_up is 40; it must be 2F = 32"):
        _call("silu_mul_rows", gate_up=cp.zeros((3, 40), F32))
    with pytest.raises(
        ValueError, match=r"argmax_rows: the shape of scratch is \(3, 2\); it must be \(3, 1\)"
    ):
        _call("argmax_rows", scratch=cp.zeros((3, 2), U64))
    with pytest.raises(ValueError, match="argmax_rows: the width of logits is 0; it must be at least 1"):
        _call("argmax_rows", logits=cp.zeros((3, 0), F32))
    with pytest.raises(ValueError, match="embed_norm: the height of table is 0; it must be at least 1"):
        _call("embed_norm", table=cp.zeros((0, 16), U16))


@pytest.mark.parametrize("name", CALLS)
def test_no_rows(name: str) -> None:
    empty = {
        key: cp.zeros((0, *spec[0][1:]), spec[1])
        for key, spec in CALLS[name][1].items()
        if isinstance(spec, tuple) and spec[0][0] == 3
    }
    assert _call(name, **empty).shape[0] == 0


# ---------------- NVIDIA's compiler
@pytest.mark.parametrize("arch", ["compute_75", "compute_80", "compute_90", "compute_120"])
@pytest.mark.parametrize("per_thread", [1, 2, 4])
def test_nvidias_compiler_accepts_it(arch: str, per_thread: int) -> None:
    try:
        done = nvrtc.compile_source(source.text("decode_rows"), arch, (f"-DPER_THREAD={per_thread}",))
    except nvrtc.NvrtcMissing as missing:
        pytest.skip(str(missing))
    assert done.ok, done.log
    assert done.log == ""
    entries = dict(re.findall(r"\.entry (\w+)\((.*?)\n}", done.ptx, re.DOTALL))
    assert entries.keys() == {
        *("embed_norm", "norm_rows", "add_norm_rows", "silu_mul_rows_float", "silu_mul_rows_bf16"),
        *("argmax_rows_parts", "argmax_rows_merge"),
    }
    for name, body in entries.items():
        assert ".local" not in body, f"{name} keeps numbers in local memory"
        dependent = arch in ("compute_90", "compute_120")
        assert body.count("griddepcontrol.wait") == dependent
        assert body.count("griddepcontrol.launch_dependents") == dependent
        stores = [match.start() for match in re.finditer(r"\bst\.global", body)]
        assert stores
        if dependent:  # nothing is written while the kernel before may still read
            assert min(stores) > body.index("griddepcontrol.wait")


@pytest.mark.parametrize("name", ["norm_rows", "add_norm_rows", "embed_norm", "silu_mul_rows_float"])
def test_memory_is_read_and_written_by_vectors(name: str) -> None:
    try:
        done = nvrtc.compile_source(source.text("decode_rows"), "compute_90")
    except nvrtc.NvrtcMissing as missing:
        pytest.skip(str(missing))
    body = re.search(rf"\.entry {name}\((.*?)\n}}", done.ptx, re.DOTALL)
    assert body is not None
    accesses = re.findall(r"\b(?:ld|st)\.global\S*", body[1])
    narrow = [access for access in accesses if ".v4." not in access]
    assert len(accesses) > len(narrow)
    assert len(narrow) == (name == "embed_norm")  # the token's id


# ---------------- in a graph
@pytest.mark.gpu
@pytest.mark.skipif(not is_gpu, reason="no NVIDIA GPU")
@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("tokens", [1, 37, 256])
def test_in_a_graph(tokens: int, dependent: bool) -> None:
    """A chain in which each kernel reads what the one before it wrote, replayed, against the simple kernels."""
    hidden, vocab, rng = 2048, 4096, random("graph rows", tokens)
    table, weight = cp.asarray(bits(rng, vocab, hidden)), cp.asarray(bits(rng, hidden))
    x = cp.asarray(normal(rng, tokens, hidden))
    gate_up = cp.asarray(normal(rng, tokens, 2 * hidden))
    first_ids = cp.asarray(rng.integers(0, hidden, tokens).astype(I32))
    rounds, stream = 20, cp.cuda.Stream(non_blocking=True)
    with stream:
        ids, residual, out = first_ids.copy(), poisoned(tokens, hidden), poisoned_bf16(tokens, hidden)
        gated, scratch = (
            poisoned_bf16(tokens, hidden),
            poisoned(*argmax_scratch(tokens, hidden), dtype=U64),
        )

        def chain() -> None:
            for _ in range(rounds):
                embed_norm(ids, table, weight, EPS, residual, out, dependent=dependent)
                add_norm_rows(x, residual, weight, EPS, out, dependent=dependent)
                norm_rows(residual, weight, EPS, out, dependent=dependent)
                silu_mul_rows(gate_up, gated, dependent=dependent)
                argmax_rows(residual, ids, scratch, dependent=dependent)

        chain()
        stream.synchronize()
        used = cp.get_default_memory_pool().used_bytes()
        stream.begin_capture()
        chain()
        graph = stream.end_capture()
        assert cp.get_default_memory_pool().used_bytes() == used
        ids[:] = first_ids
        for array in (residual, out, gated):
            array.view(np.uint8).fill(255)
        graph.launch(stream)
        stream.synchronize()

        simple_ids, simple, simple_out = (
            first_ids.copy(),
            poisoned(tokens, hidden),
            poisoned_bf16(tokens, hidden),
        )
        for _ in range(rounds):
            embedding(simple_ids, table, simple)
            add_rms_norm(x, simple, weight, EPS, simple_out)
            argmax(simple, simple_ids)
        np.testing.assert_array_equal(cp.asnumpy(ids), cp.asnumpy(simple_ids))
        _beside(residual, simple, out, simple_out)
        simple_gated = silu_mul(gate_up, poisoned_bf16(tokens, hidden))
        np.testing.assert_array_equal(cp.asnumpy(gated), cp.asnumpy(simple_gated))
