"""The picture of a paged kernel's reads: it renders in silence, says what it shows, and no texts overlap."""

from __future__ import annotations

import itertools
import warnings

import pytest

from tests.course.test_figures import LONG, ODD, texts_drawn
from tinyvllm_ref.course.figures.paging import block_walks

CASES = {
    "three": ({"request 0, 37 tokens": [5, 2, 7], "b": [0], "c": [11, 9, 8, 1]}, 12),
    "one": ({"a": [0]}, 1),
    "odd": ({LONG: [3, 1], ODD: [2]}, 7),
    "most": ({f"request {k}": list(range(k, 64, 8)) * 4 for k in range(8)}, 64),
}


@pytest.mark.parametrize("name", CASES)
def test_figure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    walks, blocks = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = block_walks(walks, blocks, title="What is read", subtitle="A line below it.")
        figure.set_dpi(100)
        boxes = texts_drawn(figure, monkeypatch)
    assert figure.alt_text.endswith(".")
    width, height = figure.get_size_inches() * 100
    for text, box in boxes:
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
        assert inside, f"{text!r} leaves it"
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        across, down = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across <= 1 or down <= 1.5, f"{one!r} and {other!r} overlap"


def test_walks_are_said() -> None:
    assert "a reads 2, 0" in block_walks({"a": [2, 0]}, 4, title="T").alt_text
    assert "2 read by nobody" in block_walks({"a": [2, 0]}, 4, title="T").alt_text


def test_wrong_input_is_named() -> None:
    with pytest.raises(ValueError, match="reads block 4"):
        block_walks({"a": [4]}, 4, title="")
    with pytest.raises(ValueError, match="request"):
        block_walks({}, 4, title="")
