"""The picture of what steps compute: it renders in silence, says what it shows, and no texts overlap."""

from __future__ import annotations

import itertools
import warnings

import pytest

from tests.course.test_figures import LONG, ODD, texts_drawn
from tinyvllm_ref.course.figures.steps import Steps, step_tokens

CASES: dict[str, tuple[dict[str, Steps], dict[str, int]]] = {
    "two": (
        {
            "as it was": [[("a", 3), ("b", 5)], [("a", 1), ("b", 1)], [("b", 1)]],
            "mended": [[("b", 8)], [], [("a", 3)]],
        },
        {"as it was": 8, "mended": 8},
    ),
    "one": ({"only": [[("a", 1)]]}, {}),
    "odd": ({LONG: [[(ODD, 3), (LONG, 4000)]], ODD: [[(ODD, 1)]]}, {LONG: 1_000_000}),
    "long": ({"many": [[(f"r{k % 9}", 1 + k % 5), ("x", 2)] for k in range(400)]}, {"many": 64}),
}


@pytest.mark.parametrize("name", CASES)
def test_figure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    panels, budgets = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = step_tokens(panels, title="What is computed", subtitle="A line below it.", budgets=budgets)
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


def test_it_says_steps_and_tokens() -> None:
    assert (
        "p: 2 steps of up to 5 tokens"
        in step_tokens({"p": [[("a", 2), ("b", 3)], [("a", 1)]]}, title="T").alt_text
    )


def test_wrong_input_is_named() -> None:
    with pytest.raises(ValueError, match="panel"):
        step_tokens({}, title="")
    with pytest.raises(ValueError, match="step"):
        step_tokens({"a": []}, title="")
    with pytest.raises(ValueError, match="no step has any tokens"):
        step_tokens({"a": [[]]}, title="")
    with pytest.raises(ValueError, match="'b' has -1 tokens"):
        step_tokens({"a": [[("b", -1)]]}, title="")
