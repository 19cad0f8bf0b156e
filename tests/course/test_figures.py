"""Every figure, on typical and on awkward data: it renders in silence, says what it shows, and no texts overlap."""

from __future__ import annotations

import base64
import itertools
import re
import struct
import warnings
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.text import Text

from tinyvllm_ref.course import figures as f
from tinyvllm_ref.course.figures.canvas import spread, text_width
from tinyvllm_ref.course.figures.numbers import FORMATS, bits_value, format_bits, spacing
from tinyvllm_ref.emulation.report import TRACE_DTYPE

LONG = "model.layers.15.post_attention_layernorm.weight_with_a_name_that_does_not_end"
ODD = "a $x^2$ & <b>\n\t☃ 漢字 🙂 %s {}"


def trace(accesses: list[tuple[Any, ...]]) -> np.ndarray[Any, Any]:
    return np.array(accesses, TRACE_DTYPE)


def reduction(n: int, kind: str = "sequential") -> np.ndarray[Any, Any]:
    """What a block of n threads does in a tree reduction of scratch, in the order of the emulation."""
    rows: list[tuple[Any, ...]] = [("scratch", t, 4, "write", 5, 0, t) for t in range(n)]
    strides = [1 << k for k in range(max(0, (n - 1).bit_length()))]
    for stride in reversed(strides) if kind == "sequential" else strides:
        for t in range(n):
            active = t < stride if kind == "sequential" else t % (2 * stride) == 0
            if active and t + stride < n:
                for index, what in ((t, "read"), (t + stride, "read"), (t, "write")):
                    rows.append(("scratch", index, 4, what, 8, 0, t))
    return trace(rows)


def loads(indices: list[int], size: int = 4, array: str = "x") -> np.ndarray[Any, Any]:
    return trace([(array, i, size, "read", 7, 0, t) for t, i in enumerate(indices)])


def blocks(steps: int, count: int) -> list[list[f.BlockUse | None]]:
    rng = np.random.default_rng(3)
    out: list[list[f.BlockUse | None]] = []
    for step in range(steps):
        row: list[f.BlockUse | None] = []
        for block in range(count):
            owner = (block // 2 + step // 15) % 5
            row.append(None if owner == 4 else f.BlockUse(f"request {owner}", int(rng.integers(0, 17))))
        out.append(row)
    return out


RNG = np.random.default_rng(0)
CAUSAL = np.tril(RNG.random((4, 9, 9)) ** 3)
CAUSAL /= CAUSAL.sum(-1, keepdims=True)
X = np.geomspace(1, 8192, 14)
INV = 500000.0 ** (-np.arange(32) / 32)
SLOTS = {
    "static": [
        ["A"] * 4 + [None] * 8 + ["E"] * 6,
        ["B"] * 12 + ["F"] * 2 + [None] * 4,
        ["C"] * 7 + [None] * 5 + ["G"] * 6,
    ],
    "continuous": [["A"] * 4 + ["E"] * 6 + ["H"] * 2, ["B"] * 12, ["C"] * 7 + ["F"] * 2 + [None] * 3],
}
FILE = [
    f.Segment("length", 0, 8, "header"),
    f.Segment("JSON header", 8, 1400, "header"),
    f.Segment("embed_tokens.weight", 1400, 61400, "weights"),
    f.Segment("layers.0.input_layernorm.weight", 61400, 61500, "norms"),
    f.Segment("layers.0.self_attn.q_proj.weight", 61500, 90000, "weights"),
    f.Segment("layers.0.self_attn.k_proj.weight", 90064, 97000, "weights"),
    f.Segment("norm.weight", 97000, 97100, "norms"),
]
BUFFERS = [
    f.Lifetime("residual", 4096, 0, 9), f.Lifetime("normed", 2048, 1, 2), f.Lifetime("qkv", 6144, 2, 4),
    f.Lifetime("attention", 2048, 4, 5), f.Lifetime("gate_up", 16384, 6, 7), f.Lifetime("silu", 8192, 7, 8),
]  # fmt: skip

CASES: dict[str, Callable[[], f.AltFigure]] = {
    "blocks": lambda: f.blocks_over_array(37, 8, 5),
    "blocks, wide": lambda: f.blocks_over_array(300, 128, 3),
    "blocks, too few": lambda: f.blocks_over_array(20, 8, 2),
    "blocks, one": lambda: f.blocks_over_array(1, 1, 1),
    "blocks, empty array": lambda: f.blocks_over_array(0, 32, 1),
    "blocks, most": lambda: f.blocks_over_array(500, 512, 1),
    "bytes": lambda: f.byte_strip(FILE, zoom=(0, 2000)),
    "bytes, one": lambda: f.byte_strip([f.Segment(LONG, 0, 1)]),
    "bytes, none": lambda: f.byte_strip([f.Segment("nothing", 0, 0)]),
    "bytes, many": lambda: f.byte_strip(
        [f.Segment(f"{LONG}.{k}", 100 * k, 100 * k + 90, f"kind {k % 4}") for k in range(180)], zoom=(0, 900)
    ),
    "bytes, odd": lambda: f.byte_strip([f.Segment(ODD, 3, 9, ODD), f.Segment("b", 10**9, 10**9 + 4, "x")], title=ODD),
    "bits": lambda: f.bit_layout(value=3.14159),
    "bits, no value": lambda: f.bit_layout(),
    "bits, nan": lambda: f.bit_layout(["bfloat16"], float("nan")),
    "bits, overflow": lambda: f.bit_layout(value=-1e39),
    "spacing": lambda: f.number_spacing(),
    "spacing, narrow": lambda: f.number_spacing(["float16"], 1.0, 1.5),
    "lines": lambda: f.error_lines(
        X, {"BF16 accumulation": X**0.5 * 1e-3, "FP32 accumulation": X**0.1 * 1e-7, "pairwise": X**0.1 * 1.1e-7},
        "width of the row", "relative error", log_x=True, log_y=True, title="Error as rows grow wider",
        marks={"1,024 threads": 1024, "2048: Llama": 2048},
    ),
    "lines, one point": lambda: f.error_lines([1], {LONG: [0.0]}, LONG, LONG),
    "lines, eight equal": lambda: f.error_lines([0, 1], {f"line {k} {ODD}": [1, 1] for k in range(8)}, ODD, ODD),
    "lines, nan": lambda: f.error_lines([1, 2], {"a": [np.nan, np.inf], "b": [-1, 0]}, "x", "y", log_y=True),
    "tree 16": lambda: f.reduction_tree(f.reduction_steps(reduction(16), "scratch")),
    "tree 16 interleaved": lambda: f.reduction_tree(f.reduction_steps(reduction(16, "modulo"), "scratch")),
    "tree 32": lambda: f.reduction_tree(f.reduction_steps(reduction(32), "scratch")),
    "tree 64": lambda: f.reduction_tree(f.reduction_steps(reduction(64), "scratch")),
    "tree 2": lambda: f.reduction_tree(f.reduction_steps(reduction(2), "scratch")),
    "tree 13": lambda: f.reduction_tree(f.reduction_steps(reduction(13), "scratch")),
    "addresses": lambda: f.threads_over_addresses(loads(list(range(32))), "x"),
    "addresses, strided": lambda: f.threads_over_addresses(loads([2048 * k for k in range(32)]), "x"),
    "addresses, twos": lambda: f.threads_over_addresses(loads([2 * k for k in range(32)]), "x"),
    "addresses, shifted": lambda: f.threads_over_addresses(loads(list(range(5, 25))), "x"),
    "addresses, float4": lambda: f.threads_over_addresses(loads([4 * k for k in range(32)], 16), "x", itemsize=4),
    "addresses, bf16": lambda: f.threads_over_addresses(loads([3 * k for k in range(32)], 2), "x"),
    "addresses, one": lambda: f.threads_over_addresses(loads([7]), "x"),
    "addresses, random": lambda: f.threads_over_addresses(
        loads(sorted(RNG.integers(0, 2000, 32).tolist()), array=LONG[:32]), LONG[:32]
    ),
    "banks": lambda: f.bank_conflicts(loads([2 * k for k in range(32)]), "x"),
    "banks, none": lambda: f.bank_conflicts(loads(list(range(32))), "x"),
    "banks, all": lambda: f.bank_conflicts(loads([32 * k for k in range(32)]), "x"),
    "banks, eight": lambda: f.bank_conflicts(loads([8 * k for k in range(32)]), "x"),
    "measured": lambda: f.measured_bars(
        [f.Measured("bytes read", 8320, 8192, 8192), f.Measured("sectors", 260, 256),
         f.Measured("bank conflicts", 0, 0, 31), f.Measured("time", float("nan"), unit="us"), 
         f.Measured("traffic", 123_456_789_012, 2e9, unit="B")]
    ),
    "measured, odd": lambda: f.measured_bars([f.Measured(LONG, 0.0), f.Measured(ODD, 1e30, 1e-30, 5.5, LONG)]),
    "levels": lambda: f.memory_hierarchy(
        [f.Level("registers", 256 * 1024, None, "of each SM"),
         f.Level("shared memory", 228 * 1024, 33e12, "of each SM; all SMs together"),
         f.Level("L2 cache", 50 * 2**20, 5.5e12), f.Level("HBM", 80 * 2**30, 3.35e12),
         f.Level("PCIe to the host", 2**40, 64e9)],
        source="numbers made up for this test",
    ),
    "levels, one": lambda: f.memory_hierarchy([f.Level(LONG, 1, 1.0, LONG)], source=LONG),
    "arena": lambda: f.arena_map(
        [("qkv", 0, 6000), ("o", 6144, 2048), ("norm", 8192, 64), ("gate_up", 8448, 30000), ("down", 38656, 15000)],
        kinds={"norm": "norms"},
    ),
    "memory map": lambda: f.memory_map({"contiguous": blocks(60, 8), "paged": blocks(60, 8)}, 16),
    "memory map, one": lambda: f.memory_map([[f.BlockUse(LONG, 0)]], 16),
    "memory map, free": lambda: f.memory_map([[None] * 40] * 3, 1),
    "memory map, large": lambda: f.memory_map(blocks(200, 64), 16),
    "lifetimes": lambda: f.lifetimes(BUFFERS, [0, 4096, 6144, 4096, 4096, 20480]),
    "lifetimes, one": lambda: f.lifetimes([f.Lifetime(LONG, 0, 3, 3)], [0]),
    "lifetimes, many": lambda: f.lifetimes(
        [f.Lifetime(f"buffer {k}", 100, k, k + 1) for k in range(60)], [k % 2 * 256 for k in range(60)]
    ),
    "timeline": lambda: f.timeline(SLOTS, title="Static and continuous batching"),
    "timeline, one": lambda: f.timeline([["A"]]),
    "timeline, idle": lambda: f.timeline([[None, None]], title=LONG),
    "timeline, long": lambda: f.timeline([[f"request {(k + s) // 37}" for k in range(1000)] for s in range(40)]),
    "timeline, names": lambda: f.timeline({LONG: [[ODD] * 3 + [LONG]]}, time=LONG),
    "roofline": lambda: f.roofline(
        [f.Point("decode, batch 1", 1.0, 2.4e12), f.Point("decode, batch 32", 31.0), f.Point("prefill", 900.0, 4e14),
         f.Point("rms_norm", 0.9, 2e12)],
        3.35e12, 989e12, device="Numbers made up for this test.",
    ),
    "roofline, ten": lambda: f.roofline([f.Point(f"{k} {LONG}", 1.0) for k in range(10)], 1.0, 1.0),
    "major": lambda: f.row_column_major((2, 3)),
    "major, one": lambda: f.row_column_major((1, 1)),
    "major, large": lambda: f.row_column_major((8, 8)),
    "attention": lambda: f.attention_map(
        CAUSAL[0], ["Once", " upon", " a", " time", ",", " there", " was", " a", " cat"]
    ),
    "attention, decode": lambda: f.attention_map(CAUSAL[0][-1:], [ODD, LONG, *"abcdefg"]),
    "attention, one": lambda: f.attention_map([[1.0]], [""]),
    "attention, 100": lambda: f.attention_map(np.tril(np.ones((100, 100))) / 100, [f" token{k}" for k in range(100)]),
    "heads": lambda: f.attention_heads(CAUSAL),
    "heads, 32": lambda: f.attention_heads(np.tile(CAUSAL, (8, 1, 1)), [LONG] * 32),
    "heads, six in a row": lambda: f.attention_heads(np.tile(CAUSAL, (8, 1, 1))[:30], [LONG] * 30, columns=6),
    "heads, one": lambda: f.attention_heads([[[1.0]]]),
    "rotation": lambda: f.rope_rotation(INV, [0, 1, 2, 3, 4, 8, 16, 64, 256, 1024]),
    "rotation, one": lambda: f.rope_rotation([1.0], [131071]),
    "wavelengths": lambda: f.wavelengths(
        {"theta 500,000": INV, "Llama-3 scaling": INV / np.linspace(1, 8, 32)}, context=8192
    ),
    "filters": lambda: f.distribution_filters(
        [" the", " a", "\n", " cat", " dog", "🙂"],
        {"as it is": [0.5, 0.2, 0.15, 0.1, 0.04, 0.01], "temperature 0.7": [0.65, 0.17, 0.1, 0.06, 0.02, 0.0004],
         "top-k 3": [0.6, 0.22, 0.18, 0, 0, 0], "top-p 0.8": [0.6, 0.22, 0.18, 0, 0, 0]},
    ),
    "filters, one": lambda: f.distribution_filters([LONG], {LONG: [1.0]}),
    "filters, zeros": lambda: f.distribution_filters([ODD] * 30, {f"{k} {LONG}": [0.0] * 30 for k in range(5)}),
    "tokens": lambda: f.token_strip(
        [b"Once", b" upon", b" a", b" time", b",", b" a", b" happy", b" \xf0\x9f", b"\x99\x82", b" said", b":", b"\n",
         "漢字".encode(), b" na", b"\xc3", b"\xafve"] * 2, list(range(50000, 50032)),
    ),
    "tokens, odd": lambda: f.token_strip([b"", LONG * 3, ODD, b"\xff" * 60]),
    "merges": lambda: f.merge_tree(list(" lowest"), [("e", "s"), ("es", "t"), ("l", "o"), (" ", "lo"), (" lo", "w")]),
    "merges, none": lambda: f.merge_tree(["a"], []),
    "merges, long": lambda: f.merge_tree(["a", "b"] * 20, [("a", "b"), ("ab", "ab"), ("abab", "abab")]),
    "grid": lambda: f.grid(RNG.random((4, 6)), title="Logit error", rows=["a", "b", "c", "d"], value_label="error"),
    "grid, nan": lambda: f.grid([[np.nan]], title=ODD, rows=[LONG], columns=[LONG], row_label=LONG, column_label="c"),
    "grid, large": lambda: f.grid(np.arange(256 * 200).reshape(256, 200), title="Large", value_label=LONG),
    "grid, names": lambda: f.grid(-np.eye(12), title="Eye", columns=[f"{LONG[:k]}" for k in range(12)]),
}  # fmt: skip


def texts_drawn(figure: f.AltFigure, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The texts that the Agg renderer draws, with their boxes in pixels."""
    drawn: list[Text] = []
    original = Text.draw

    def draw(self: Text, renderer: Any, *args: Any, **kwargs: Any) -> None:
        if self.get_visible() and self.get_text().strip():
            drawn.append(self)
        original(self, renderer, *args, **kwargs)

    monkeypatch.setattr(Text, "draw", draw)
    figure.canvas.draw()
    monkeypatch.undo()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    return [(text.get_text(), Text.get_window_extent(text, renderer)) for text in drawn]


# A range whose ends are the same: "128 to 128", "goes from 0 at 1 to 0 at 64".
NO_RANGE = re.compile(r"(?<![\w.,])(?:(-?\d\S*)|from (\S+) at \S+) to (?:\1|\2)(?![\w,]|\.\d)")


@pytest.mark.parametrize("name", CASES)
def test_figure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(mpl.rcParams)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = CASES[name]()
        figure.set_dpi(100)
        boxes = texts_drawn(figure, monkeypatch)
    assert dict(mpl.rcParams) == before
    assert figure.alt_text.endswith(".")
    assert "\n" not in figure.alt_text.replace(ODD, "")
    assert NO_RANGE.search(figure.alt_text) is None
    width, height = figure.get_size_inches() * 100
    assert 0 < width <= 760
    assert 0 < height <= 1000
    assert boxes, "a figure without a word"
    for text, box in boxes:
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
        assert inside, f"{text!r} leaves the figure"
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        down = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across <= 1 or down <= 1.5, (
            f"{one!r} and {other!r} overlap by {across:.1f} x {down:.1f} pixels"
        )


def test_the_overlap_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = f.bit_layout()
    figure.text(0.5, 0.5, "one")
    figure.text(0.5, 0.5, "other")
    boxes = dict(texts_drawn(figure, monkeypatch))
    assert boxes["one"].overlaps(boxes["other"])


def test_a_magnified_strip_names_nothing_outside_and_ends_where_it_is_told() -> None:
    segments = [f.Segment("before", 0, 100), f.Segment("inside", 100, 160), f.Segment("behind", 160, 200)]
    figure = f.byte_strip(segments, zoom=(100, 160), end=256)
    names = [text.get_text() for text in figure.findobj(Text)]
    assert [names.count(name) for name in ("before", "inside", "behind")] == [1, 2, 1]
    assert "byte 256" in names
    assert "56 bytes belong to no part" in figure.alt_text


def test_a_range_with_one_end_is_said_as_one_number() -> None:
    text = f.wavelengths({"same": [2 * np.pi, 2 * np.pi], "two": [2 * np.pi, np.pi]}, context=128).alt_text
    assert text == "Wavelengths of 2 pairs in positions: same 1; two 1 to 2. The context has 128 positions."
    lines = {
        "even": [3, 3.0001, 3],
        "back": [0, 5, 0],
        "up": [1, 7, 2],
        "alone": [np.nan, 4, np.nan],
        "none": [np.nan] * 3,
    }
    text = f.error_lines([1, 2, 4], lines, "x", "y", title="T").alt_text
    assert "even is 3 from 1 to 4; back is 0 at 1 and at 4, and between them from 0 to 5; " in text
    assert "up goes from 1 at 1 to 2 at 4; alone is 4 at 2; none has no finite value." in text
    assert f.grid([[2, 2], [2, 2]], title="T").alt_text.endswith("values, all 2.")
    assert f.grid([[2, 2], [2, 3]], title="T").alt_text.endswith("values, from 2 to 3.")
    for said in ("128 to 128", "goes from 0 at 1 to 0 at 64", "2e+05 to 2e+05."):
        assert NO_RANGE.search(said)
    for said in ("12 to 128", "1 to 1.5", "goes from 0 at 1 to 0.5 at 1", "1 to 1,024"):
        assert NO_RANGE.search(said) is None


class Spoken(HTMLParser):
    """What a screen reader says for pictures, and that there is nothing to see."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.labels: list[str | None] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert dict(attrs)["role"] == "img"
        self.labels.append(dict(attrs)["aria-label"])

    def handle_data(self, data: str) -> None:
        raise AssertionError(f"{data!r} would be seen")


def test_display_sends_one_png_with_its_alt_text(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[Any, Any]] = []
    monkeypatch.setattr(
        "IPython.display.display", lambda data, metadata=None, raw=False: sent.append((data, metadata))
    )
    figure = f.row_column_major((2, 3))
    f.display_figure(figure)
    (data, metadata), (spoken, _) = sent
    assert Spoken(spoken["text/html"]).labels == [figure.alt_text]
    png = base64.b64decode(data["image/png"])
    assert png.startswith(b"\x89PNG\r\n")
    width, height = struct.unpack(">II", png[16:24])
    about = metadata["image/png"]
    assert about["alt"] == data["text/plain"] == figure.alt_text
    assert abs(width - 2 * about["width"]) <= 2
    assert abs(height - 2 * about["height"]) <= 2


@pytest.mark.parametrize(
    ("draw", "says"),
    [
        (lambda: f.byte_strip([]), "segment"),
        (lambda: f.byte_strip([f.Segment("a", 0, 9), f.Segment("b", 8, 10)]), "overlap"),
        (lambda: f.byte_strip([f.Segment("a", 9, 0)]), "no range"),
        (lambda: f.byte_strip([f.Segment("a", 0, 9)], zoom=(4, 40)), "zoom"),
        (lambda: f.byte_strip([f.Segment("a", 0, 9)], end=8), "end=8"),
        (lambda: f.blocks_over_array(4, 0, 1), "block"),
        (lambda: f.blocks_over_array(10**6, 256, 4000), "do not fit"),
        (lambda: f.bit_layout([]), "format"),
        (lambda: f.bit_layout(["float8"]), "float8"),
        (lambda: f.number_spacing(["float32"], 2, 1), "low"),
        (lambda: f.error_lines([], {"a": []}, "x", "y"), "point"),
        (lambda: f.error_lines([1], {}, "x", "y"), "line"),
        (lambda: f.error_lines([1], {"a": [1, 2]}, "x", "y"), "2 values for 1"),
        (lambda: f.reduction_tree([]), "round"),
        (lambda: f.reduction_steps(trace([]), "scratch"), "scratch"),
        (lambda: f.threads_over_addresses(loads([0]), "y"), "'y'"),
        (lambda: f.threads_over_addresses(loads([0]), "x", warp=3), "warp 3"),
        (lambda: f.threads_over_addresses(loads([0]), "x", request=1), "request 1"),
        (lambda: f.bank_conflicts(trace([]), "x"), "'x'"),
        (lambda: f.measured_bars([]), "row"),
        (lambda: f.measured_bars([f.Measured("a", -1)]), "negative"),
        (lambda: f.memory_hierarchy([], source="s"), "level"),
        (lambda: f.memory_hierarchy([f.Level("a", 0, 1.0)], source="s"), "positive"),
        (lambda: f.arena_map([]), "item"),
        (lambda: f.memory_map([], 16), "step"),
        (lambda: f.memory_map([[f.BlockUse("a", 17)]], 16), "17"),
        (lambda: f.lifetimes([], []), "buffer"),
        (lambda: f.lifetimes(BUFFERS, [0]), "offsets"),
        (lambda: f.timeline([]), "slot"),
        (lambda: f.timeline([[]]), "step"),
        (lambda: f.roofline([], 1, 1), "point"),
        (lambda: f.roofline([f.Point("a", 0)], 1, 1), "positive"),
        (lambda: f.row_column_major((0, 3)), "side"),
        (lambda: f.attention_map(np.empty((0, 0)), []), "weights"),
        (lambda: f.attention_map([[1.0]], ["a", "b"]), "2 tokens for 1"),
        (lambda: f.attention_heads([]), "weights"),
        (lambda: f.attention_heads(CAUSAL, columns=9), "columns is 9"),
        (lambda: f.rope_rotation([], [0]), "frequency"),
        (lambda: f.rope_rotation([1.0], []), "position"),
        (lambda: f.rope_rotation([1.0], [0], pairs=[1]), "pair 1 of 1"),
        (lambda: f.wavelengths({}), "setting"),
        (lambda: f.distribution_filters([], {}), "token"),
        (lambda: f.distribution_filters(["a"], {"b": [2.0]}), "probabilities"),
        (lambda: f.token_strip([]), "token"),
        (lambda: f.token_strip(["a"], [1, 2]), "2 ids"),
        (lambda: f.merge_tree([], []), "symbol"),
        (lambda: f.merge_tree(["a"], [("a", "b")]), "side by side"),
        (lambda: f.grid([], title="t"), "matrix"),
        (lambda: f.grid([[1]], title="t", rows=["a", "b"]), "2 names"),
    ],
)
def test_wrong_input_is_named(draw: Callable[[], Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        draw()


@pytest.mark.parametrize("kind", ["sequential", "modulo"])
def test_rounds_of_a_reduction(kind: str) -> None:
    steps = f.reduction_steps(reduction(16, kind), "scratch")
    assert [len(one) for one in steps] == [8, 4, 2, 1]
    cells = np.arange(16.0)
    for one in steps:
        before = cells.copy()
        for step in one:
            cells[step.target] = before[list(step.reads)].sum()
    assert cells[0] == np.arange(16.0).sum()


def test_rounds_of_a_real_trace() -> None:
    """A kernel of the emulation that sums twice in one buffer: the rounds give the sum of what it was given."""
    from tinyvllm_ref import emulation as cp

    source = r"""
    __device__ float block_sum(float value, float* scratch) {
        scratch[threadIdx.x] = value;
        __syncthreads();
        for (int stride = blockDim.x / 2; stride > 0; stride /= 2) {
            if (threadIdx.x < stride) scratch[threadIdx.x] += scratch[threadIdx.x + stride];
            __syncthreads();
        }
        float sum = scratch[0];
        __syncthreads();
        return sum;
    }
    extern "C" __global__ void twice(const float* x, float* out) {
        __shared__ float scratch[16];
        float sum = block_sum(x[threadIdx.x], scratch);
        out[threadIdx.x] = block_sum(x[threadIdx.x] + sum, scratch);
    }"""
    x = np.arange(16, dtype=np.float32)
    out = cp.empty(16, cp.float32)
    with cp.checks("full"), cp.trace() as recorded:
        cp.RawKernel(source, "twice")((1,), (16,), (cp.asarray(x), out))
    steps = f.reduction_steps(recorded.rows, "scratch")
    assert [len(one) for one in steps] == [8, 4, 2, 1, 8, 4, 2, 1]
    assert f.reduction_tree(steps[:4]).alt_text
    (request,) = f.warp_requests(recorded.rows, "out")
    assert request.sectors == [0, 1]
    assert request.fewest_sectors == 2


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1.0, 3.14159, 1e-40, 65504.0, 65520.0, -3e38, float("inf"), float("nan")]
)
def test_bits_are_those_of_ml_dtypes(name: str, value: float) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = {"bfloat16": ml_dtypes.bfloat16}.get(name, name)
    with np.errstate(over="ignore", under="ignore"):
        expected = np.asarray(np.float32(value)).astype(kind)
    np.testing.assert_equal(bits_value(name, format_bits(name, value)), float(expected))


@pytest.mark.parametrize("x", [1.0, 1.999, 2.0, 1e-5, 6e-8, 1000.0])
def test_spacing_is_that_of_numpy(x: float) -> None:
    assert spacing("float32", x) == np.spacing(np.float32(x))
    assert spacing("float16", x) == np.spacing(np.float16(x))


def test_sectors_and_banks_are_counted() -> None:
    (strided,) = f.warp_requests(loads([2048 * k for k in range(32)]), "x")
    assert (len(strided.sectors), strided.fewest_sectors, strided.turns) == (32, 4, 32)
    (dense,) = f.warp_requests(loads(list(range(32))), "x")
    assert (len(dense.sectors), dense.fewest_sectors, dense.turns) == (4, 4, 1)
    (same,) = f.warp_requests(loads([7] * 32), "x")
    assert (len(same.sectors), same.fewest_sectors, same.turns) == (1, 1, 1)


def test_labels_are_spread() -> None:
    at = spread([1.0, 1.0, 1.1], [0.5, 0.5, 0.5], 0.0, 3.0, 0.1)
    assert all(b - a >= 0.6 - 1e-9 for a, b in itertools.pairwise(sorted(at)))
    assert min(at) >= 0.25
    assert max(at) <= 2.75
    with pytest.raises(ValueError, match="room"):
        spread([0.0, 0.0], [1.0, 1.0], 0.0, 1.5, 0.0)
    assert text_width("", 9) == 0.0
