"""Figures and reports for people who see colours otherwise, or hear the page: measured, and said in words as well."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyvllm_ref.course import course_map, look
from tinyvllm_ref.course import figures as f
from tinyvllm_ref.course.figures.canvas import Sheet

from .colours import KINDS, contrast, distance, linear, seen
from .test_figures import CASES

SIGHTS = ("normal", *KINDS)
STYLE = Path(look.__file__).parent / "grading" / "templates" / "style.css.jinja"
# The backgrounds of JupyterLab's two themes.
LIGHT, DARK = "#FFFFFF", "#111111"
NAMES = {hue: name for name, hue in vars(look).items() if isinstance(hue, look.Hue)}
EVERY_PAIR = list(itertools.combinations((*look.CYCLE, look.GREY), 2))
NEIGHBOURS = list(itertools.pairwise(look.CYCLE))


def closest(one: str, other: str) -> float:
    """The distance of two colours for whoever tells them apart least."""
    return min(distance(one, other, kind) for kind in SIGHTS)


# ---------------- the simulation itself
def test_the_simulation_keeps_white_and_brings_red_and_green_together():
    """Each matrix's rows add up to 1, so white stays white; a reddish and a greenish brown nearly meet."""
    for kind, matrix in KINDS.items():
        np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=2e-6, err_msg=kind)
        np.testing.assert_allclose(seen("#FFFFFF", kind), 1, atol=1e-5)
    assert distance("#B45A3C", "#788C3C", "normal") > 45
    assert distance("#B45A3C", "#788C3C", "deuteranopia") < 15
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21, rel=1e-3)
    assert linear("#808080") == pytest.approx(0.2158605, rel=1e-5)  # IEC 61966-2-1


# ---------------- the palette
@pytest.mark.parametrize(("what", "any_two", "neighbours"), [("line", 10, 20), ("fill", 5, 12)])
def test_the_palette_is_told_apart(what, any_two, neighbours):
    """About 2.3 is just noticed side by side; a line and its fill are seen together, and never without a label."""
    for pairs, least in ((EVERY_PAIR, any_two), (NEIGHBOURS, neighbours)):
        for one, other in pairs:
            found = closest(getattr(one, what), getattr(other, what))
            assert found >= least, f"{NAMES[one]} and {NAMES[other]} as {what}: {found:.1f}"


def test_the_palette_can_be_read():
    """WCAG 2.2: 3 for lines and marks, 4.5 for text; dark text stands on fills."""
    for hue in NAMES:
        assert contrast(hue.line, look.PAPER) >= 3, NAMES[hue]
        assert contrast(look.INK, hue.fill) >= 7, NAMES[hue]
    for text in (look.INK, look.MUTED):
        assert contrast(text, look.PAPER) >= 4.5


# ---------------- figures
@pytest.mark.parametrize("name", CASES)
def test_a_key_s_entries_are_told_apart(name, monkeypatch):
    """By a hatching, a dashed line, or colours that are apart for everybody."""
    keys: list[list[tuple[str, dict[str, Any]]]] = []
    monkeypatch.setattr(Sheet, "key", lambda self, entries: keys.append(list(entries)))
    CASES[name]()  # a figure without a key passes: what it shows is labelled in place
    for key in keys:
        for (one, a), (other, b) in itertools.combinations(key, 2):
            if any(a.get(mark) != b.get(mark) for mark in ("hatch", "dashed")):
                continue
            apart = [
                closest(a[part], b[part])
                for part in ("fill", "edge")
                if str(a.get(part)).startswith("#") and str(b.get(part)).startswith("#")
            ]
            outlined = ("edge" in a) != ("edge" in b)
            assert outlined or max(apart, default=0) >= 5, f"{one!r} and {other!r} look alike"


def test_lines_carry_their_names():
    """Each line is named at its end, so that no colour has to be found in a key."""
    labels = [f"line {k}" for k in range(7)]
    figure = f.error_lines([1, 2, 3], {label: [k, k + 1, k + 2] for k, label in enumerate(labels)}, "x", "y")
    written = {text.get_text() for axes in figure.axes for text in axes.texts} | {
        t.get_text() for t in figure.texts
    }
    assert set(labels) <= written
    dashes = {str(line.get_linestyle()) for axes in figure.axes for line in axes.get_lines()}
    assert len(dashes) > 1


def test_shades_get_darker_for_everybody():
    """The maps of attention and errors: more is darker, whatever the eye."""
    from tinyvllm_ref.course.figures.arrays import SHADES

    colours = ["#" + "".join(f"{round(255 * v):02X}" for v in SHADES(x)[:3]) for x in np.linspace(0, 1, 9)]
    for kind in SIGHTS:
        lightness = [float(np.dot([0.2126, 0.7152, 0.0722], seen(colour, kind))) for colour in colours]
        assert all(a > b for a, b in itertools.pairwise(lightness)), kind


# ---------------- reports and the map in a notebook
def test_marks_are_seen_in_both_themes():
    """What the style sheet draws in a colour of its own, on JupyterLab's light and dark pages."""
    rules = re.findall(r"([^{}]+)\{([^{}]*)\}", look.CSS)
    marks = {
        colour
        for _, body in rules
        for colour in re.findall(
            r"(?<![\w-])(?:color|border-left|border-left-color|underline wavy)[^;]*?(#\w{6})", body
        )
    }
    assert marks
    for colour in marks:
        assert min(contrast(colour, LIGHT), contrast(colour, DARK)) >= 3, colour


def test_the_map_tells_states_by_shape():
    shapes = course_map._SHAPES
    assert len(set("".join(shapes.values()))) == 2 * len(shapes)


# ---------------- the grading report
def schemes() -> dict[str, dict[str, str]]:
    """The colours of the light and of the dark page."""
    light, dark = STYLE.read_text(encoding="utf-8").split("@media (prefers-color-scheme: dark)")
    found = {
        name: dict(re.findall(r"--([\w-]+): (#[0-9a-fA-F]{6})", part))
        for name, part in (("light", light), ("dark", dark.split("* {")[0]))
    }
    assert all(len(colours) >= 12 for colours in found.values())
    return found


@pytest.mark.parametrize("name", ["light", "dark"])
def test_the_grades_can_be_read_and_told_apart(name):
    colours = schemes()[name]
    states = ("good", "part", "bad", "none")
    for state in states:
        assert contrast(colours[state], colours[f"{state}-fill"]) >= 4.5, state
    for text in ("ink", "soft", "link"):
        assert contrast(colours[text], colours["paper"]) >= 4.5, text
    assert contrast(colours["bar"], colours["paper"]) >= 3
    for one, other in itertools.combinations(states, 2):
        assert closest(colours[f"{one}-fill"], colours[f"{other}-fill"]) >= 8, (one, other)
