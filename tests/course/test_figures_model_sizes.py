"""The picture of a model's parameters: it renders in silence, says what it shows, and no texts overlap."""

from __future__ import annotations

import itertools
import warnings

import pytest

from tests.course.test_figures import LONG, ODD, texts_drawn
from tinyvllm_ref.course.figures.model_sizes import parameter_shares

CASES = {
    "three": {
        "a": {"embedding": 10**9, "attention": 2 * 10**8, "feed-forward": 7 * 10**9},
        "Llama 3.2 1B": {"embedding": 262668288, "attention": 167772160, "feed-forward": 805306368},
    },
    "tiny shares": {"x": {"embedding": 1, "attention": 10**9, "feed-forward": 3}},
    "odd": {LONG: {ODD: 5, LONG: 5}, ODD: {ODD: 0, LONG: 1}},
    "most": {f"model {k}": {f"kind {j}": j + 1 for j in range(6)} for k in range(8)},
}


@pytest.mark.parametrize("name", CASES)
def test_figure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = parameter_shares(CASES[name], title="Where the parameters are", subtitle="A line below it.")
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


def test_shares_are_said() -> None:
    assert (
        "attention 25%, feed-forward 75%"
        in parameter_shares({"m": {"attention": 1, "feed-forward": 3}}, title="T").alt_text
    )


def test_wrong_input_is_named() -> None:
    with pytest.raises(ValueError, match="'b' has the kinds"):
        parameter_shares({"a": {"x": 1}, "b": {"y": 1}}, title="")
    with pytest.raises(ValueError, match="positive"):
        parameter_shares({"a": {"x": 0}}, title="")
    with pytest.raises(ValueError, match="model"):
        parameter_shares({}, title="")
