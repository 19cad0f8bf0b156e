"""The picture of a matrix product: it renders in silence, says what it shows, and no texts overlap."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest

from tests.course.test_figures import texts_drawn, trace
from tinyvllm_ref.course.figures.products import block_reads, reads_of_block

CASES = {
    "once": (np.ones((18, 20), int), np.ones((22, 20), int)),
    "16 times": (np.pad(np.full((16, 20), 16), ((0, 2), (0, 0))), np.pad(np.full((16, 20), 16), ((0, 6), (0, 0)))),
    "uneven": (np.arange(6).reshape(2, 3), np.arange(12).reshape(4, 3)),
    "nothing": (np.zeros((1, 1), int), np.zeros((1, 1), int)),
    "most": (np.full((40, 40), 123_456_789), np.full((40, 40), 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_figure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = block_reads(*CASES[name], (16, 16), title="How often a block reads each element")
        figure.set_dpi(100)
        boxes = texts_drawn(figure, monkeypatch)
    assert figure.alt_text.endswith(".")
    width, height = figure.get_size_inches() * 100
    assert 0 < width <= 760
    assert 0 < height <= 1500
    for text, box in boxes:
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
        assert inside, f"{text!r} leaves it"
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        across, down = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across <= 1 or down <= 1.5, f"{one!r} and {other!r} overlap"


def test_reads_are_counted_for_one_block() -> None:
    rows = trace(
        [("x", 0, 2, "read", 1, 0, 0), ("x", 0, 2, "read", 1, 0, 1), ("x", 5, 2, "read", 1, 0, 2),
         ("x", 3, 2, "read", 1, 1, 0), ("x", 4, 2, "write", 1, 0, 0), ("w", 1, 2, "read", 1, 0, 0)]
    )  # fmt: skip
    assert reads_of_block(rows, "x", (2, 3)).tolist() == [[2, 0, 0], [0, 0, 1]]


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"x is \(2, 3\) and w \(4, 2\)"):
        block_reads(np.ones((2, 3)), np.ones((4, 2)), (16, 16), title="")
    with pytest.raises(ValueError, match="each from 1 to 40"):
        block_reads(np.ones((2, 41)), np.ones((4, 41)), (16, 16), title="")
