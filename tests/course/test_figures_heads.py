"""The picture of shared heads: it renders in silence, says what it shows, and no texts overlap."""

from __future__ import annotations

import itertools
import warnings

import pytest

from tests.course.test_figures import LONG, ODD, texts_drawn
from tinyvllm_ref.course.figures.heads import shared_heads

CASES = {
    "three kinds": {"MHA": [{h} for h in range(8)], "GQA": [{h // 4} for h in range(8)], "MQA": [{0}] * 8},
    "most": {"Llama": [{h // 4} for h in range(32)], "each": [{h} for h in range(32)]},
    "one": {"one": [{0}]},
    "none read": {ODD: [set(), set()]},
    "several": {LONG * 3: [{0, 1, 5}, {2}, {31}]},
}


@pytest.mark.parametrize("name", CASES)
def test_figure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = shared_heads(CASES[name], title="Who reads whom")
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


def test_the_words_count_what_is_read() -> None:
    figure = shared_heads({"GQA": [{h // 3} for h in range(6)]}, title="")
    assert "6 query heads read 2 KV heads" in figure.alt_text


def test_bad_heads_are_named() -> None:
    with pytest.raises(ValueError, match="reads head -1"):
        shared_heads({"a": [{-1}]}, title="")
    with pytest.raises(ValueError, match="reads head 40"):
        shared_heads({"a": [{0}, {40}]}, title="")
    with pytest.raises(ValueError, match="query head"):
        shared_heads({"a": []}, title="")
    with pytest.raises(ValueError, match="panel"):
        shared_heads({}, title="")
