"""The picture of an engine's run: it renders in silence, says what it shows, and no texts overlap."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest

from tests.course.test_figures import LONG, texts_drawn
from tinyvllm_ref.course.figures.engine_run import Step, engine_run


def random_run(steps: int, requests: int, blocks: int) -> list[Step]:
    rng = np.random.default_rng(steps)
    found = []
    for _ in range(steps):
        who = rng.permutation(requests)[: int(rng.integers(0, min(requests, 9) + 1))]
        computed = {int(n): int(rng.choice([1, 1, 1, 12])) for n in who}
        lost = tuple(int(n) for n in rng.permutation(requests)[: int(rng.random() < 0.2)])
        found.append(Step(computed, frozenset(list(computed)[:1]), lost, int(rng.integers(0, blocks + 1))))
    return found


CASES = {
    "one": ([Step({0: 3}, used=1)], 1, 1, "One step"),
    "few": (random_run(7, 3, 5), 3, 5, "A few steps"),
    "forty": (
        random_run(72, 40, 48),
        40,
        48,
        "40 prompts, 24 new tokens each, in 48 blocks of 16, by your Scheduler",
    ),
    "most": (random_run(1999, 64, 4096), 64, 4096, LONG),
}


@pytest.mark.parametrize("name", CASES)
def test_figure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, requests, blocks, title = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = engine_run(steps, requests, blocks, title=title)
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


def test_the_run_is_said() -> None:
    steps = [
        Step({0: 4, 1: 2}, used=3),
        Step({0: 1}, preempted=(1,), used=2),
        Step({1: 3}, frozenset({1}), used=1),
    ]
    text = engine_run(steps, 2, 3, title="T").alt_text
    assert text == "T: 2 requests in 3 steps, 1 preemption; of 3 blocks 2 are in use on average, at most 3."


def test_wrong_input_is_named() -> None:
    with pytest.raises(ValueError, match="step 0 has request 2; there are 0 to 1"):
        engine_run([Step({2: 1})], 2, 3, title="")
    with pytest.raises(ValueError, match="step 0 uses 4 blocks; there are 3"):
        engine_run([Step({0: 1}, used=4)], 2, 3, title="")
    with pytest.raises(ValueError, match="step"):
        engine_run([], 2, 3, title="")
