"""Products by warpgroups: NumPy in float64, planted NaN, what is refused, NVIDIA's compiler, a graph."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests import nvrtc
from tinyvllm_ref import bf16
from tinyvllm_ref.device import cp, is_gpu
from tinyvllm_ref.kernels import source
from tinyvllm_ref.kernels import warpgroup_linear as warpgroup
from tinyvllm_ref.kernels.warpgroup_linear import pays, unsupported, warpgroup_gate_up, warpgroup_linear

from .cases import (
    BF16,
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
SUMS = 2e-5  # float32 sums of up to 2,048 products, relative to the root mean square of all sums

on_hopper = pytest.mark.skipif(
    not is_gpu or int(cp.cuda.Device().compute_capability) != 90, reason="no Hopper GPU"
)


# ---------------- cases
def _case(rows: int, outputs: int, columns: int, *, gate: bool) -> Case:
    rng = random("warpgroup", rows, outputs, columns)
    w = bf16.float_to_bf16(normal(rng, outputs * (1 + gate), columns) / np.sqrt(F32(columns)))
    x = normal(rng, rows, columns) + F32(0.5)
    x[-1] *= F32(4)
    stored = bf16.float_to_bf16(x)

    def run() -> Arrays:
        out = (poisoned_bf16 if gate else poisoned)(rows, outputs)
        (warpgroup_gate_up if gate else warpgroup_linear)(cp.asarray(stored), cp.asarray(w), out)
        return {"out": cp.asnumpy(out)}

    def want() -> Arrays:
        y = f64(stored) @ f64(w).T
        if gate:
            gates = y[:, :outputs]
            y = gates / (1 + np.exp(-gates)) * y[:, outputs:]
        return {"out": y}

    name = f"{'gate_up' if gate else 'linear'} R={rows} N={outputs} K={columns}"
    # Tensor cores cut off what they do not keep of a sum, so that errors grow with the number of terms.
    tolerance = BF16 if gate else SUMS * max(1, columns / 2048)
    return Case(name, run, want, tolerance, rows * outputs * columns > 20_000)


def cases() -> Iterator[Case]:
    # One column more than nothing, a chunk and a bit, a tile and a bit, several tiles a block; each padding of the
    # rows, full or not.
    sizes = ((1, 8, 8), (3, 72, 64), (33, 136, 72), (64, 520, 200), (65, 200, 136), (128, 128, 576))
    for (rows, outputs, columns), gate in itertools.product(sizes, (False, True)):
        yield _case(rows, outputs, columns, gate=gate)


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


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_a_card(case: Case) -> None:
    assert case.wrong() == {}


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("rows", [33, 64, 100, 128])
@pytest.mark.parametrize(
    ("outputs", "columns"), [(3072, 2048), (8192, 2048), (576, 8192), (49152, 576), (32776, 584)]
)
@pytest.mark.parametrize("gate", [False, True])
def test_large_matrices_on_a_card(rows: int, outputs: int, columns: int, gate: bool) -> None:
    """Rings that go round, within a tile and from one to the next."""
    assert _case(rows, outputs, columns, gate=gate).wrong() == {}


@pytest.mark.parametrize("columns", [72, 584])
def test_a_row_of_nan_stays_one_row(columns: int) -> None:
    """Rows and columns that pad a product are zeros, and no result of one row comes into another's."""
    rng = random("warpgroup nan", columns)
    x, w = bits(rng, 5, columns), bits(rng, 16, columns)
    w[3, 1], x[2, 7] = 0x7F80, 0x7FC0  # an infinite weight, a NaN
    out = warpgroup_linear(cp.asarray(x), cp.asarray(w), poisoned(5, 16))
    want = np.ones((5, 16), bool)
    want[2], want[:, 3] = False, False
    np.testing.assert_array_equal(np.isfinite(cp.asnumpy(out)), want)


@pytest.mark.gpu
@on_hopper
def test_what_lies_behind_x_is_not_read() -> None:
    """x of 40 rows in a larger array whose further rows are NaN."""
    rng = random("warpgroup behind")
    room = cp.asarray(np.full((128, 2048), 0x7FC0, U16))
    room[:40] = cp.asarray(bits(rng, 40, 2048))
    w = cp.asarray(bits(rng, 2048, 2048))
    got = cp.asnumpy(warpgroup_linear(room[:40], w, poisoned(40, 2048)))
    want = f64(cp.asnumpy(room[:40])) @ f64(cp.asnumpy(w)).T
    assert np.abs(got - want).max() <= SUMS * np.sqrt((want**2).mean())


@pytest.mark.parametrize("gate", [False, True])
def test_a_row_gives_the_same_bits_in_any_batch_and_place(gate: bool) -> None:
    columns, outputs, rows = (2056, 2048, 128) if is_gpu else (136, 24, 70)
    rng = random("warpgroup alone", gate)
    stored, w = bits(rng, rows, columns), cp.asarray(bits(rng, outputs * (1 + gate), columns))

    def of(places: list[int]) -> np.ndarray:
        out = (poisoned_bf16 if gate else poisoned)(len(places), outputs)
        product = warpgroup_gate_up if gate else warpgroup_linear
        return np.asarray(cp.asnumpy(product(cp.asarray(stored[places]), w, out)))

    together = of(list(range(rows)))
    for places in ([5], [rows - 1, 5], list(range(40, 3, -1)), list(range(1, rows))):
        np.testing.assert_array_equal(of(places), together[places])


# ---------------- what is refused
SPECS: dict[str, dict[str, tuple[tuple[int, ...], Any]]] = {
    "warpgroup_linear": {"x": ((3, 16), U16), "w": ((8, 16), U16), "out": ((3, 8), F32)},
    "warpgroup_gate_up": {"x": ((3, 16), U16), "w": ((16, 16), U16), "out": ((3, 8), U16)},
}
ARRAYS = [(name, array) for name, specs in SPECS.items() for array in specs]


def _call(name: str, **changed: Any) -> Any:
    arrays = {key: cp.zeros(*spec) for key, spec in SPECS[name].items()} | changed
    return getattr(warpgroup, name)(*arrays.values())


@pytest.mark.parametrize("name", SPECS)
def test_right_arguments_pass(name: str) -> None:
    assert not cp.asnumpy(_call(name)).any()


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


@pytest.mark.parametrize(("name", "array"), ARRAYS)
def test_an_array_that_vectors_can_not_read(name: str, array: str) -> None:
    shape, dtype = SPECS[name][array]
    shifted = cp.zeros(int(np.prod(shape)) + 1, dtype)[1:].reshape(shape)
    with pytest.raises(ValueError, match=rf"{name}: {array} starts at address .* multiple of 16 bytes"):
        _call(name, **{array: shifted})


def test_sizes_that_have_no_kernel() -> None:
    def of(rows: int, outputs: int, columns: int) -> Any:
        x, w = cp.zeros((rows, columns), U16), cp.zeros((outputs, columns), U16)
        return warpgroup_linear(x, w, poisoned(rows, outputs))

    with pytest.raises(ValueError, match="warpgroup_linear: x has 129 rows; it must have at most 128"):
        of(129, 8, 16)
    with pytest.raises(ValueError, match="x has 12 columns; their number must be a multiple of 8, and not 0"):
        of(2, 8, 12)
    with pytest.raises(ValueError, match="x has 0 columns"):
        of(2, 8, 0)
    with pytest.raises(ValueError, match="there are 12 outputs; their number must be a multiple of 8"):
        of(2, 12, 16)
    with pytest.raises(ValueError, match="warpgroup_gate_up: the height of w is 24; it must be 2F = 16"):
        _call("warpgroup_gate_up", w=cp.zeros((24, 16), U16))
    assert unsupported(128, 8, 8192) == unsupported(0, 8, 8) == ""


@pytest.mark.parametrize("capability", ["89", "100", "120"])
def test_other_cards_have_no_such_products(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _card(monkeypatch, capability)
    says = f"compute capability is {capability}; products by warpgroups need 90"
    assert unsupported(64, 2048, 2048) == says
    assert not pays(128, 8192, 2048, gate=True)


def test_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not pays(128, 8192, 2048, gate=True)  # in the emulation
    _card(monkeypatch, "90")
    assert pays(128, 8192, 2048, gate=True)  # 128 tiles
    assert pays(33, 128256, 2048)  # 1,002, in eight rounds
    assert not pays(128, 14336, 4096, gate=True)  # 224: the second round is for 92 of 132
    assert not pays(128, 3072, 2048)
    assert not pays(129, 8192, 2048, gate=True)
    assert not pays(128, 0, 2048)


def _card(monkeypatch: pytest.MonkeyPatch, capability: str) -> None:
    card = SimpleNamespace(compute_capability=capability, attributes={"MultiProcessorCount": 132})
    monkeypatch.setattr(warpgroup, "is_gpu", True)
    monkeypatch.setattr(warpgroup, "cp", SimpleNamespace(cuda=SimpleNamespace(Device=lambda: card)))
    monkeypatch.setattr(warpgroup, "multiprocessors", lambda in_emulation: 132)


@pytest.mark.parametrize("name", SPECS)
def test_no_rows_and_no_outputs(name: str) -> None:
    dtype = SPECS[name]["out"][1]
    assert _call(name, x=cp.zeros((0, 16), U16), out=cp.zeros((0, 8), dtype)).shape == (0, 8)
    assert _call(name, w=cp.zeros((0, 16), U16), out=cp.zeros((3, 0), dtype)).shape == (3, 0)


# ---------------- NVIDIA's compiler
@pytest.mark.parametrize("arch", ["75", "80", "90", "90a", "120"])
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("gate", [0, 1])
def test_nvidias_compiler_accepts_it(arch: str, rows: int, gate: int) -> None:
    hopper, options = arch == "90a", (f"-DROWS={rows}", "-DSTAGES=6", f"-DGATE={gate}")
    try:
        done = nvrtc.compile_source(source.text("warpgroup_linear"), f"compute_{arch}", options)
    except nvrtc.NvrtcMissing as missing:
        pytest.skip(str(missing))
    assert done.ok, done.log
    assert done.log == ""
    products = done.ptx.count("wgmma.mma_async")
    assert (products > 0) == hopper
    assert done.ptx.count(f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16") == products
    assert ("cp.async.bulk.tensor" in done.ptx) == hopper
    if hopper:  # until then the kernel before may still read what is written, and write what is read
        assert done.ptx.count("griddepcontrol.wait") == 2
        assert not re.search(r"\bld\.global", done.ptx)
        for store in re.finditer(r"\bst\.global", done.ptx):
            assert "griddepcontrol.wait" in done.ptx[: store.start()]


def test_cupys_own_target_does_not_take_the_special_ones_place() -> None:
    """CuPy adds -arch=sm_90 to the options: whichever comes first, the code is for sm_90a."""
    code = source.text("warpgroup_linear")
    try:
        for one, other in (("sm_90a", "sm_90"), ("sm_90", "sm_90a")):
            done = nvrtc.compile_source(code, one, (f"-arch={other}",))
            assert done.ok, done.log
            assert ".target sm_90a" in done.ptx
            assert "wgmma" in done.ptx
    except nvrtc.NvrtcMissing as missing:
        pytest.skip(str(missing))


# ---------------- in a graph
@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("rows", [40, 128])
def test_in_a_graph(rows: int) -> None:
    """Products that read what the one before wrote, each let on before that one is done, replayed: the same bits."""
    hidden, ffn, rng = 2048, 8192, random("warpgroup graph", rows)
    up, down = (
        cp.asarray(bf16.float_to_bf16(F32(scale) * normal(rng, *shape)))
        for scale, shape in ((0.02, (2 * ffn, hidden)), (0.03, (2 * hidden, ffn)))
    )
    x, activated, back = (
        cp.asarray(bits(rng, rows, hidden)),
        poisoned_bf16(rows, ffn),
        poisoned_bf16(rows, hidden),
    )
    product = poisoned(rows, 2 * ffn)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()  # the stream does not wait for what others have begun

    def step() -> None:
        for _ in range(4):
            warpgroup_gate_up(x, up, activated)
            warpgroup_gate_up(activated, down, back)
            warpgroup_linear(back, up, product)

    with stream:
        step()
        stream.synchronize()
        want = cp.asnumpy(product)
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        for array in (activated, back, product):
            array.fill(0)
        graph.launch(stream=stream)
        stream.synchronize()
    assert np.isfinite(want).all()
    assert want.std() > 0.1
    np.testing.assert_array_equal(cp.asnumpy(product), want)
