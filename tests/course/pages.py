"""What is seen on a page: the contrast of a text with what lies behind it."""

from __future__ import annotations

from typing import Any

from .colours import contrast

# The colours of each element's text and of what is behind it, as #rrggbb; see-through ones mix with what they cover.
_SEEN = """elements => elements.map(element => {
    const parts = colour => {
        const [r, g, b, a = 1] = colour.match(/[\\d.]+/g).map(Number);
        return [r, g, b, a];
    };
    const over = (top, below) => [0, 1, 2].map(k => top[k] * top[3] + below[k] * (1 - top[3]));
    const layers = [];
    for (let e = element; e; e = e.parentElement) layers.push(parts(getComputedStyle(e).backgroundColor));
    const behind = layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
    const text = over(parts(getComputedStyle(element).color), behind);
    const hex = colour => "#" + colour.map(v => Math.round(v).toString(16).padStart(2, "0")).join("");
    return [hex(text), hex(behind)];
})"""


def contrasts(locator: Any) -> list[float]:
    """For each element: the contrast ratio of WCAG 2.2 of its text with its background, from 1 to 21."""
    return [contrast(text, behind) for text, behind in locator.evaluate_all(_SEEN)]
