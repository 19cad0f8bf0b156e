"""Products of few rows: NumPy in float64, a row alone, planted NaN, what is refused, NVIDIA's compiler, a graph."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests import nvrtc
from tinyvllm_ref import bf16
from tinyvllm_ref.device import cp, is_gpu
from tinyvllm_ref.kernels import skinny_linear as skinny
from tinyvllm_ref.kernels import source
from tinyvllm_ref.kernels.decode_rows import norm_rows, silu_mul_rows
from tinyvllm_ref.kernels.skinny_linear import (
    MOST_NORM_ROWS,
    Norm,
    SkinnyScratch,
    skinny_gate_up,
    skinny_linear,
    unsupported,
)

from .cases import (
    BF16,
    EPS,
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

F32, U16 = np.float32, np.uint16
SUMS = 2e-5  # float32 sums of up to some thousand products, relative to the root mean square of all sums
# A normed number may fall on the other side of a tie, and is then off by 2^-8 of it: one of the sum's numbers.
NORMED = 2.0**-8


# ---------------- cases
def _normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """What the kernels multiply with: a norm is rounded to bfloat16."""
    normed = f64(x) / np.sqrt((f64(x) ** 2).mean(axis=1, keepdims=True) + EPS) * f64(weight)
    return f64(bf16.float_to_bf16(normed.astype(F32)))


def _silu(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / (1 + np.exp(-x)))


def _case(rows: int, outputs: int, columns: int, *, norm: bool, gate: bool, add: bool) -> Case:
    rng = random("skinny", rows, outputs, columns)
    weight, old = bits(rng, columns), normal(rng, rows, outputs)
    w = bf16.float_to_bf16(normal(rng, outputs * (1 + gate), columns) / np.sqrt(F32(columns)))
    x = normal(rng, rows, columns) + F32(0.5)
    x[-1] *= F32(1e-3) if norm else F32(4)
    stored = x if norm else bf16.float_to_bf16(x)

    def run() -> Arrays:
        scratch = SkinnyScratch(rows, len(w), columns)
        out = poisoned_bf16(rows, outputs) if gate else cp.asarray(old) if add else poisoned(rows, outputs)
        given: dict[str, Any] = {"norm": Norm(cp.asarray(weight), EPS)} if norm else {}
        if gate:
            skinny_gate_up(cp.asarray(stored), cp.asarray(w), out, scratch, **given)
        else:
            skinny_linear(cp.asarray(stored), cp.asarray(w), out, scratch, accumulate=add, **given)
        return {"out": cp.asnumpy(out), "arrived": cp.asnumpy(scratch.arrived).astype(np.int64)}

    def want() -> Arrays:
        y = (_normed(x, weight) if norm else f64(stored)) @ f64(w).T
        if gate:
            y = _silu(y[:, :outputs]) * y[:, outputs:]
        arrived = np.zeros(len(SkinnyScratch(1, 1, 1).arrived), np.int64)
        return {"out": y + old if add else y, "arrived": arrived}

    how = " ".join(
        name for name, on in (("gate_up", gate), ("linear", not gate), ("norm", norm), ("+=", add)) if on
    )
    name = f"{how} R={rows} N={outputs} K={columns}"
    return Case(
        name, run, want, BF16 if gate else NORMED if norm else SUMS, rows * outputs * columns > 20_000
    )


def cases() -> Iterator[Case]:
    kinds: list[dict[str, bool]] = [
        {"norm": norm, "gate": gate, "add": add}
        for norm, gate, add in itertools.product((False, True), repeat=3)
        if not (gate and add)
    ]
    # One column more than nothing, a chunk and a bit, odd shares of the blocks, several chunks a warp; and each
    # padding of the rows, full and with one row.
    for rows, outputs, columns in (
        *((1, 1, 8), (3, 7, 64), (8, 24, 72), (9, 36, 136), (16, 5, 200), (17, 12, 72), (32, 40, 64)),
        *((2, 28, 576), (5, 100, 320), (6, 13, 2048)),
    ):
        for kind in kinds:
            if not unsupported(rows, columns, kind["norm"]):
                yield _case(rows, outputs, columns, **kind)
    for rows, outputs, columns in ((3, 12, 2056), (11, 20, 4160), (32, 8, 6152)):  # shared by blocks
        for kind in kinds:
            if not kind["norm"]:
                yield _case(rows, outputs, columns, **kind)


CASES = list(cases())


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
    monkeypatch.setattr(skinny, "_MOST_WARPS", 8)


@in_emulation
@pytest.mark.parametrize("mode", ["fast", "full"])
@pytest.mark.parametrize(
    "case",
    [
        _case(rows, outputs, columns, norm=rows <= 8, gate=gate, add=not gate)
        for rows, outputs, columns in ((8, 20, 576), (17, 8, 1032), (9, 12, 2184))
        for gate in (False, True)
    ],
    ids=lambda case: case.name,
)
def test_with_blocks_of_several_warps(case: Case, mode: str, blocks_of_a_card: None) -> None:
    """What a card is given, with every access checked."""
    with checked(mode):
        assert case.wrong() == {}


# ---------------- the path of cards that have a copy engine, in the emulation
@pytest.fixture
def copy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny, "_EMULATED_COPIES", True)


def copied_cases() -> Iterator[Any]:
    """Tiles that lack rows or columns, rings that go round, blocks that share columns; and a block's most warps."""
    for rows, outputs, columns, warps in (
        *(
            (3, 7, 64, 2),
            (8, 25, 72, 2),
            (5, 50, 320, 2),
            (3, 10, 2056, 2),
            (8, 21, 576, 8),
            (9, 14, 2184, 8),
        ),
        *((1, 1, 8, 2), (17, 12, 136, 2), (17, 9, 1032, 8), (6, 13, 2048, 8)),
    ):
        for gate, mode in itertools.product((False, True), ("fast", "full")):
            norm = gate and not unsupported(rows, columns, norm=True)
            case = _case(rows, outputs, columns, norm=norm, gate=gate, add=not gate)
            quick = gate == (mode == "full") and (rows, outputs) not in ((1, 1), (17, 12), (17, 9), (6, 13))
            marks = [] if quick else [pytest.mark.slow]
            yield pytest.param(case, warps, mode, id=f"{case.name}, {warps} warps, {mode}", marks=marks)


@in_emulation
@pytest.mark.parametrize(("case", "warps", "mode"), list(copied_cases()))
def test_with_a_copy_engine(
    case: Case, warps: int, mode: str, copy_engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skinny, "_MOST_WARPS", warps)
    with checked(mode):
        assert case.wrong() == {}


def _gate_up_with(*changes: tuple[str, str], outputs: int) -> np.ndarray:
    """A product by the kernel with other lines in it."""
    text = source.read("skinny_linear.cu")
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    rng, launch = random("skinny wrong"), source.with_headers(skinny_gate_up, {"skinny_linear.cu": text})
    x, w = cp.asarray(bits(rng, 3, 136)), cp.asarray(bits(rng, 2 * outputs, 136))
    return np.asarray(cp.asnumpy(launch(x, w, poisoned_bf16(3, outputs))))


@in_emulation
@pytest.mark.parametrize("outputs", [1, 2, 3, 4, 31, 32])
def test_a_read_past_the_end_of_w(outputs: int, copy_engine: None) -> None:
    """There was one, which only a card met: a tile has four gates and four ups, and the last may lack some of each."""
    rows = "unsigned rows = GATE ? TILE : min(TILE, matrix.outputs - tile * TILE);"
    announced = "    if (lane == 0) arrive_expecting(full + ring.stage, matrix.rows_of(tile) * bytes);\n"
    as_it_was = (
        (announced, rows + announced.replace("matrix.rows_of(tile)", "rows")),
        ("lane < TILE && matrix.has_row(tile, lane)", "lane < rows"),
    )
    for mode in ("fast", "full"):
        with checked(mode):
            if outputs % 4 == 0:
                _gate_up_with(*as_it_was, outputs=outputs)
                continue
            with pytest.raises(cp.OutOfBounds, match=r"w\[\d+\] was read; w has") as caught:
                _gate_up_with(*as_it_was, outputs=outputs)
        assert (caught.value.array, caught.value.index) == ("w", 2 * outputs * 136)
        assert "copy_bulk(to, matrix.row(tile, lane)" in caught.value.source_line


WAIT = "        wait_phase(full + ring.stage, ring.phase);\n"
REFILL = "        __syncthreads();\n        BRING(t + STAGES);\n"


@in_emulation
@pytest.mark.parametrize(
    ("old", "new", "kind", "says"),
    [
        (WAIT, "", "DataRace", "a copy to it may still be on its way"),
        (WAIT, WAIT.replace("wait", "if (threadIdx.x % 32) wait"), "DataRace", "may still be on its way"),
        (REFILL, "        BRING(t + STAGES);\n        __syncthreads();\n", "DataRace", "may come too early"),
        (
            "matrix.rows_of(tile) * bytes",
            "TILE * bytes",
            "BarrierDivergence",
            "lacks 0 of 1 arrivals and 544 by",
        ),
        ("        show_barriers();\n", "", "KernelFault", "show_barriers has not shown"),
    ],
)
def test_copies_that_are_wrong(old: str, new: str, kind: str, says: str, copy_engine: None) -> None:
    with checked("full"), pytest.raises(getattr(cp, kind), match=says):
        _gate_up_with((old, new), outputs=31)


@pytest.mark.gpu
@pytest.mark.skipif(not is_gpu, reason="no NVIDIA GPU")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_a_card(case: Case) -> None:
    assert case.wrong() == {}


@pytest.mark.gpu
@pytest.mark.skipif(not is_gpu, reason="no NVIDIA GPU")
@pytest.mark.parametrize("rows", [2, 8, 13, 32])
@pytest.mark.parametrize(("outputs", "columns"), [(3072, 2048), (2048, 8192), (49152, 576)])
def test_large_matrices_on_a_card(rows: int, outputs: int, columns: int) -> None:
    """Rings that go round, and more tiles than blocks."""
    for gate in (False, True):
        case = _case(
            rows,
            outputs,
            columns,
            norm=not unsupported(rows, columns, norm=True),
            gate=gate,
            add=not gate,
        )
        assert case.wrong() == {}


# ---------------- beside the launches that it stands for
@pytest.mark.parametrize(("rows", "columns"), [(3, 192), (8, 576)])
def test_as_norm_product_and_gate_one_after_the_other(rows: int, columns: int) -> None:
    """Equal but for the order of additions, and what that does to numbers that lie near a tie."""
    rng = random("skinny beside", rows, columns)
    ffn = 24
    stream, weight = cp.asarray(normal(rng, rows, columns)), cp.asarray(bits(rng, columns))
    w = cp.asarray(bf16.float_to_bf16(normal(rng, 2 * ffn, columns) / np.sqrt(F32(columns))))
    ours = skinny_gate_up(stream, w, poisoned_bf16(rows, ffn), norm=Norm(weight, EPS))
    normed = norm_rows(stream, weight, EPS, poisoned_bf16(rows, columns))
    product = skinny_linear(normed, w, poisoned(rows, 2 * ffn))
    apart = silu_mul_rows(product, poisoned_bf16(rows, ffn))
    a, b = (f64(cp.asnumpy(array)) for array in (ours, apart))
    assert np.abs(a - b).max() <= BF16 * np.abs(b).max()
    assert np.sqrt(((a - b) ** 2).mean()) <= 2.0**-10 * np.sqrt((b**2).mean())


@pytest.mark.parametrize("columns", [576, 2056])
@pytest.mark.parametrize("kind", ["linear", "add", "norm", "gate"])
def test_a_row_gives_the_same_bits_in_any_batch_and_place(columns: int, kind: str) -> None:
    if kind == "norm" and unsupported(1, columns, norm=True):
        columns = 2048
    rng, most = random("skinny alone", columns), 8 if kind == "norm" else 32
    x, outputs = normal(rng, 32, columns), 20
    stored = x if kind == "norm" else bf16.float_to_bf16(x)
    w, weight = cp.asarray(bits(rng, 2 * outputs, columns)), cp.asarray(bits(rng, columns))
    old = normal(rng, 32, 2 * outputs)
    scratch = SkinnyScratch(32, 2 * outputs, columns)

    def of(places: list[int]) -> np.ndarray:
        some = cp.asarray(stored[places])
        if kind == "gate":
            out = skinny_gate_up(some, w, poisoned_bf16(len(places), outputs), scratch)
        elif kind == "norm":
            out = skinny_linear(some, w, poisoned(len(places), 2 * outputs), scratch, norm=Norm(weight, EPS))
        else:
            out = cp.asarray(old[places]) if kind == "add" else poisoned(len(places), 2 * outputs)
            skinny_linear(some, w, out, scratch, accumulate=kind == "add")
        return np.asarray(cp.asnumpy(out))

    together = of(list(range(most)))
    for places in ([5], [most - 1, 5], list(range(9)), list(range(31, 15, -1)), [*range(17, 0, -1)]):
        places = [place for place in places if place < most]
        if places:
            np.testing.assert_array_equal(of(places), together[places])


@pytest.mark.parametrize("columns", [72, 2056])
def test_a_row_of_nan_stays_one_row(columns: int) -> None:
    """Rows and columns that pad a product are zeros, and no result of one row comes into another's."""
    rng = random("skinny nan", columns)
    x, w = bits(rng, 5, columns), bits(rng, 12, columns)
    w[3, 1], x[2, 7] = 0x7F80, 0x7FC0  # an infinite weight, a NaN
    out = skinny_linear(cp.asarray(x), cp.asarray(w), poisoned(5, 12), SkinnyScratch(5, 12, columns))
    finite = np.isfinite(cp.asnumpy(out))
    want = np.ones((5, 12), bool)
    want[2], want[:, 3] = False, False
    np.testing.assert_array_equal(finite, want)


def test_scratch_serves_what_is_smaller() -> None:
    rng = random("skinny scratch")
    scratch = SkinnyScratch(32, 64, 8192)
    for rows, outputs, columns in ((32, 64, 4104), (3, 5, 2056), (9, 40, 8192)):
        x, w = bits(rng, rows, columns), bits(rng, outputs, columns)
        got = cp.asnumpy(skinny_linear(cp.asarray(x), cp.asarray(w), poisoned(rows, outputs), scratch))
        want = f64(x) @ f64(w).T
        assert np.abs(got - want).max() <= SUMS * np.sqrt((want**2).mean())
        assert not cp.asnumpy(scratch.arrived).any()


# ---------------- what is refused
SPECS: dict[str, dict[str, tuple[tuple[int, ...], Any]]] = {
    "skinny_linear": {"x": ((3, 16), U16), "w": ((5, 16), U16), "out": ((3, 5), F32)},
    "skinny_gate_up": {"x": ((3, 16), U16), "w": ((10, 16), U16), "out": ((3, 5), U16)},
}
ARRAYS = [(name, array) for name, specs in SPECS.items() for array in specs]


def _call(name: str, norm: Any = None, **changed: Any) -> Any:
    arrays = {key: cp.zeros(*spec) for key, spec in SPECS[name].items()} | changed
    return {"skinny_linear": skinny_linear, "skinny_gate_up": skinny_gate_up}[name](
        *arrays.values(), norm=norm
    )


@pytest.mark.parametrize("name", SPECS)
def test_right_arguments_pass(name: str) -> None:
    assert not cp.asnumpy(_call(name)).any()
    norm = Norm(cp.zeros(16, U16), EPS)
    assert not cp.asnumpy(_call(name, x=cp.zeros((3, 16), F32), norm=norm)).any()


@pytest.mark.parametrize(("name", "array"), ARRAYS)
def test_wrong_arrays(name: str, array: str) -> None:
    shape, dtype = SPECS[name][array]
    for wrong, says in (
        (cp.zeros(shape, np.float64), "float64"),
        (cp.zeros((*shape, 1), dtype), re.escape(str((*shape, 1)))),
        (cp.zeros((shape[0], 2 * shape[1]), dtype)[:, ::2], "C-contiguous"),
        (np.zeros(shape, dtype), "NumPy"),
        (cp.zeros((shape[0] + 2, shape[1]), dtype), "must be"),
    ):
        with pytest.raises(ValueError, match=f"{name}: .*{says}"):
            _call(name, **{array: wrong})


@pytest.mark.parametrize(("name", "array"), [pair for pair in ARRAYS if pair[1] != "out"])
def test_an_array_that_vectors_can_not_read(name: str, array: str) -> None:
    shape, dtype = SPECS[name][array]
    shifted = cp.zeros(int(np.prod(shape)) + 1, dtype)[1:].reshape(shape)
    with pytest.raises(ValueError, match=rf"{name}: {array} starts at address .* multiple of 16 bytes"):
        _call(name, **{array: shifted})


@pytest.mark.parametrize("name", SPECS)
def test_a_norm_that_does_not_fit(name: str) -> None:
    stream = cp.zeros((3, 16), F32)
    with pytest.raises(
        ValueError, match=rf"{name}: x has shape \(3, 16\) and dtype uint16; it must be float32"
    ):
        _call(name, norm=Norm(cp.zeros(16, U16), EPS))
    with pytest.raises(
        ValueError, match=rf"{name}: x has shape \(3, 16\) and dtype float32; it must be uint16"
    ):
        _call(name, x=stream)
    with pytest.raises(ValueError, match=rf"{name}: norm.weight has shape \(8,\)"):
        _call(name, x=stream, norm=Norm(cp.zeros(8, U16), EPS))
    with pytest.raises(ValueError, match=rf"{name}: norm.weight starts at address"):
        _call(name, x=stream, norm=Norm(cp.zeros(17, U16)[1:], EPS))


def test_sizes_that_have_no_kernel() -> None:
    def of(rows: int, columns: int, **given: Any) -> Any:
        x = cp.zeros((rows, columns), F32 if "norm" in given else U16)
        return skinny_linear(x, cp.zeros((4, columns), U16), poisoned(rows, 4), **given)

    with pytest.raises(ValueError, match="x has 33 rows; it must have at most 32"):
        of(33, 16)
    with pytest.raises(ValueError, match="x has 12 columns; their number must be a multiple of 8, and not 0"):
        of(2, 12)
    with pytest.raises(ValueError, match="x has 0 columns"):
        of(2, 0)
    with pytest.raises(ValueError, match="x has 9 rows; for a norm it must have at most 8"):
        of(9, 16, norm=Norm(cp.zeros(16, U16), EPS))
    with pytest.raises(ValueError, match="x has 2056 columns; for a norm it must have at most 2048"):
        of(2, 2056, norm=Norm(cp.zeros(2056, U16), EPS))
    with pytest.raises(ValueError, match="the scratch's room is 0; it must be at least 128 numbers"):
        of(2, 2056)
    with pytest.raises(ValueError, match="the scratch's room is 128; it must be at least 192 numbers"):
        of(2, 4104, scratch=SkinnyScratch(2, 4, 2056))
    with pytest.raises(ValueError, match="skinny_gate_up: the height of w is 12; it must be 2F = 10"):
        _call("skinny_gate_up", w=cp.zeros((12, 16), U16))
    assert unsupported(32, 8192) == unsupported(0, 8) == unsupported(8, 2048, norm=True) == ""


@pytest.mark.parametrize("name", SPECS)
def test_no_rows_and_no_outputs(name: str) -> None:
    dtype = SPECS[name]["out"][1]
    assert _call(name, x=cp.zeros((0, 16), U16), out=cp.zeros((0, 5), dtype)).shape == (0, 5)
    assert _call(name, w=cp.zeros((0, 16), U16), out=cp.zeros((3, 0), dtype)).shape == (3, 0)


# ---------------- NVIDIA's compiler
KINDS = ("NORM", "GATE", "ADD", "CLUSTER")


def _ptx(arch: str, rows: int, on: tuple[str, ...]) -> str:
    constants = {
        "ROWS": rows,
        "WARPS": 8,
        "CHUNKS": 4,
        "STAGES": 3,
    }
    constants |= {"SPLIT": 4, "WIDTH": 8192} if "SPLIT" in on else {"SPLIT": 1, "WIDTH": 2048}
    constants |= {kind: int(kind in on) for kind in KINDS}
    options = tuple(f"-D{name}={value}" for name, value in constants.items())
    try:
        done = nvrtc.compile_source(source.text("skinny_linear"), arch, options)
    except nvrtc.NvrtcMissing as missing:
        pytest.skip(str(missing))
    assert done.ok, done.log
    assert done.log == ""
    return done.ptx


def _programs() -> Iterator[Any]:
    kinds: list[tuple[str, ...]] = [
        (),
        ("NORM",),
        ("NORM", "GATE"),
        ("ADD",),
        ("ADD", "SPLIT"),
        ("GATE", "SPLIT"),
    ]
    kinds += [(*kind, "CLUSTER") for kind in kinds if "SPLIT" in kind]
    for arch, rows, on in itertools.product((75, 80, 90, 120), (8, 16, 32), kinds):
        if not ("CLUSTER" in on and arch < 90) and not ("NORM" in on and rows > MOST_NORM_ROWS):
            yield pytest.param(f"compute_{arch}", rows, on, id=f"{arch}-{rows}-{'+'.join(on)}")


@pytest.mark.parametrize(("arch", "rows", "on"), list(_programs()))
def test_nvidias_compiler_accepts_it(arch: str, rows: int, on: tuple[str, ...]) -> None:
    ptx = _ptx(arch, rows, on)
    hopper, ampere = arch in ("compute_90", "compute_120"), arch != "compute_75"
    assert (".local" in ptx) == (not ampere)
    pairs = -(-rows // 16)
    assert ptx.count("mma.sync.aligned.m16n8k16") == ampere * 16 * pairs
    assert ("cp.async.bulk" in ptx) == ("mbarrier.try_wait" in ptx) == hopper
    assert ("cp.async.cg" in ptx) == (arch == "compute_80")
    assert ptx.count("griddepcontrol.launch_dependents") == hopper
    assert ptx.count("griddepcontrol.wait") == hopper
    assert ptx.count("barrier.cluster.wait") == 2 * ("CLUSTER" in on)
    assert ("atom.global" in ptx) == ("SPLIT" in on and "CLUSTER" not in on)
    if hopper:  # until then the kernel before may still read what is written, and write what is read
        before, _, after = ptx.partition("griddepcontrol.wait")
        assert not re.search(r"\bst\.global|\batom", before)
        assert len(re.findall(r"\bld\.global", before)) == 8 * ("NORM" in on)  # the norm's weight
        assert re.search(r"\bst\.global", after)


def test_x_and_w_are_read_by_vectors() -> None:
    ptx = _ptx("compute_90", 8, ("NORM",))
    assert set(re.findall(r"\bld\.global\S*", ptx)) == {"ld.global.v4.u32", "ld.global.v4.f32"}
    assert ptx.count("ld.shared.v4.u32") == 8


# ---------------- in a graph
@pytest.mark.gpu
@pytest.mark.skipif(not is_gpu, reason="no NVIDIA GPU")
@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("rows", [3, 16, 32])
def test_in_a_graph(rows: int, dependent: bool) -> None:
    """A feed-forward block whose every product reads what the one before it wrote, replayed: the same bits."""
    hidden, ffn, rng = 2048, 8192, random("skinny graph", rows)
    scale = F32(0.02)
    up, down = (
        cp.asarray(bf16.float_to_bf16(scale * normal(rng, *shape)))
        for shape in ((2 * ffn, hidden), (hidden, ffn))
    )
    norm, first = Norm(cp.asarray(bits(rng, hidden)), EPS), cp.asarray(normal(rng, rows, hidden))
    scratch, stream = SkinnyScratch(rows, hidden, ffn), cp.cuda.Stream(non_blocking=True)
    with stream:
        residual, activated = first.copy(), poisoned_bf16(rows, ffn)
        normed = poisoned_bf16(rows, hidden)

        def chain(dependent: bool) -> None:
            for _ in range(8):
                if rows <= MOST_NORM_ROWS:
                    skinny_gate_up(residual, up, activated, norm=norm, dependent=dependent)
                else:
                    norm_rows(residual, *norm, normed, dependent=dependent)
                    skinny_gate_up(normed, up, activated, dependent=dependent)
                skinny_linear(activated, down, residual, scratch, accumulate=True, dependent=dependent)

        chain(False)
        want = residual.copy()
        stream.synchronize()
        assert np.isfinite(cp.asnumpy(want)).all()
        used = cp.get_default_memory_pool().used_bytes()
        stream.begin_capture()
        chain(dependent)
        graph = stream.end_capture()
        assert cp.get_default_memory_pool().used_bytes() == used
        for _ in range(3):
            residual[:] = first
            activated.fill(0xFFFF)
            graph.launch(stream)
            np.testing.assert_array_equal(cp.asnumpy(residual), cp.asnumpy(want))
