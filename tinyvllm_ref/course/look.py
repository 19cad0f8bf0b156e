"""The one look of the course: colours, fonts and the style sheet that figures and HTML share.

The hues are those of Okabe and Ito, "Color Universal Design" (https://jfly.uni-koeln.de/color/). Lightness is spread so
that people with the common kinds of colour blindness tell them apart as lines and as fills too
(tests/course/test_accessibility.py measures it). A colour never carries a meaning alone: there is always a label, a
shape or a hatching beside it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Hue:
    """One colour of the palette: `line` for strokes and marks, `fill` for areas that carry dark text."""

    line: str
    fill: str


BLUE = Hue("#005283", "#B5D3F7")
ORANGE = Hue("#A06900", "#FADFB0")
GREEN = Hue("#008A63", "#D5F7E8")
VERMILION = Hue("#903B00", "#F0BFAA")
PURPLE = Hue("#7C3C65", "#F2C0DD")
SKY = Hue("#3398D1", "#E2EEFB")
YELLOW = Hue("#9E9400", "#FBF6C4")
GREY = Hue("#7C838C", "#DFE0E2")

# In this order neighbours differ in lightness too.
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, YELLOW, VERMILION, SKY)

PAPER = "#FDFCFA"  # figures bring their own paper, so that one PNG reads well in both themes
INK = "#1F2328"
MUTED = "#59616B"
RULE = "#C4C8CD"
WASTE = "#ECEAE6"  # always hatched as well
HATCH = "////"

SANS = "DejaVu Sans"  # matplotlib brings both fonts, so a figure is the same on every machine
MONO = "DejaVu Sans Mono"

# Sizes in points. A figure is shown at 100 CSS pixels an inch: 9 pt are 12.5 px, 8 pt are 11 px.
TITLE_SIZE = 11.0
TEXT_SIZE = 9.0
SMALL_SIZE = 8.0

FIGURE_WIDTH = 7.4  # inches: 740 CSS pixels, the text column of a notebook
PIXELS_PER_INCH = 100
SAVED_DPI = 200  # twice the shown size, for high-density screens


def hue(k: int) -> Hue:
    """The k-th colour of the cycle."""
    return CYCLE[k % len(CYCLE)]


# Text takes the colour of its surroundings and panels are a see-through grey, so that the same HTML suits the
# light and the dark theme of JupyterLab, VS Code and a plain browser, without knowing which one it is in.
CSS = """
.tv { --tv-text: var(--jp-content-font-color1, var(--vscode-foreground, inherit));
  --tv-soft: var(--jp-content-font-color2, var(--vscode-descriptionForeground, inherit));
  --tv-line: rgba(128,128,128,.35); --tv-panel: rgba(128,128,128,.09);
  --tv-mono: var(--jp-code-font-family, ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace);
  color: var(--tv-text); font-family: var(--jp-content-font-family, system-ui, sans-serif);
  font-size: 14px; line-height: 1.5; max-width: 760px; margin: 4px 0 8px; box-sizing: border-box; }
.tv.tv-card { border: 1px solid var(--tv-line); border-left: 4px solid #D55E00; border-radius: 4px;
  padding: 12px 18px 10px; }
.tv.tv-card.tv-quiet { border-left-color: #2F8FC4; }
.tv.tv-card.tv-todo { border-left-color: #8A9099; }
.tv .tv-title { font-size: 12.5px; margin: 0 0 4px; color: var(--tv-soft); }
.tv .tv-title b { color: var(--tv-text); font-weight: 600; }
.tv .tv-kind { float: right; border: 1px solid var(--tv-line); border-radius: 9px; padding: 0 9px;
  margin-left: 12px; }
.tv .tv-headline { font-size: 16px; line-height: 1.4; font-weight: 600; margin: 0 0 10px; }
.tv p { margin: 0 0 8px; }
.tv .tv-label { font-size: 12px; font-weight: 600; color: var(--tv-soft); margin: 12px 0 3px; }
.tv .tv-list { margin: 0 0 8px; padding: 0; list-style: none; }
.tv .tv-list li { margin: 0; padding: 0; }
.tv table.tv-table { border-collapse: collapse; border: none; table-layout: auto; width: auto; margin: 0 0 8px;
  font-size: 13px; }
.tv table.tv-table thead, .tv table.tv-table tr, .tv table.tv-table tbody tr:nth-child(odd) { background: none; }
.tv table.tv-table th, .tv table.tv-table td { text-align: left; vertical-align: top; border: none;
  border-bottom: 1px solid var(--tv-line); padding: 3px 22px 3px 0; background: none; max-width: 420px;
  overflow-wrap: anywhere; white-space: normal; }
.tv table.tv-table thead th { font-weight: 600; font-size: 12px; color: var(--tv-soft); }
.tv table.tv-table th.tv-num, .tv table.tv-table td.tv-num { text-align: right;
  font-variant-numeric: tabular-nums; }
.tv table.tv-table.tv-case td, .tv table.tv-table.tv-case th { border-bottom: none; padding-top: 1px;
  padding-bottom: 1px; }
.tv table.tv-table.tv-case th { color: var(--tv-soft); font-weight: 400; white-space: nowrap; }
.tv .tv-mono { font-family: var(--tv-mono); font-size: 12.5px; }
.tv pre.tv-code { font-family: var(--tv-mono); font-size: 12.5px; line-height: 1.5; margin: 0 0 8px; padding: 6px 0;
  background: var(--tv-panel); border-radius: 3px; overflow-x: auto; color: var(--tv-text); white-space: pre; }
.tv pre.tv-code span { display: block; padding: 0 12px; }
.tv pre.tv-code span.tv-fault { background: rgba(213,94,0,.16); font-weight: 600; }
.tv pre.tv-code span.tv-says { color: var(--tv-soft); font-family: var(--jp-content-font-family, system-ui,
  sans-serif); white-space: normal; padding-left: 64px; background: rgba(213,94,0,.16); }
.tv .tv-callout { background: rgba(230,159,0,.14); border-radius: 3px; padding: 8px 14px; margin: 10px 0; }
.tv .tv-callout b { display: block; font-weight: 600; margin: 0; }
.tv .tv-next { border-top: 1px solid var(--tv-line); margin: 12px 0 0; padding-top: 8px; font-size: 13px;
  color: var(--tv-soft); }
.tv code { font-family: var(--tv-mono); font-size: 12.5px; background: var(--tv-panel); color: inherit;
  padding: 1px 4px; border-radius: 3px; }
.tv .tv-note { font-size: 12.5px; color: var(--tv-soft); margin: 6px 0 4px; }
.tv table.tv-map { border-collapse: collapse; border: none; table-layout: auto; width: 100%; max-width: 640px;
  margin: 0; font-size: 13px; }
.tv table.tv-map tr, .tv table.tv-map tbody tr:nth-child(odd) { background: none; }
.tv table.tv-map td, .tv table.tv-map th { text-align: left; border: none; padding: 1px 12px 1px 0;
  background: none; line-height: 1.45; white-space: nowrap; }
.tv table.tv-map th { font-weight: 600; padding-top: 10px; font-size: 12px; color: var(--tv-soft); }
.tv table.tv-map td.tv-num { text-align: right; padding-left: 14px; font-variant-numeric: tabular-nums; color:
  var(--tv-soft);
  padding-right: 0; }
.tv table.tv-map td.tv-where { width: 1.2em; padding: 0 4px 0 0; color: #D55E00; font-weight: 700; }
.tv table.tv-map tr.tv-here td.tv-name { font-weight: 600; }
.tv table.tv-map td.tv-name { width: 60%; }
.tv table.tv-map td.tv-dots { letter-spacing: 3px; font-size: 14px; line-height: 1.3; }
.tv .tv-passed { color: #00966C; } .tv .tv-tried { color: #C97900; } .tv .tv-untouched { color: #8A9099; }
.tv .tv-bar { height: 6px; border-radius: 3px; background: var(--tv-panel); border: 1px solid var(--tv-line);
  margin: 6px 0 4px; overflow: hidden; }
.tv .tv-bar i { display: block; height: 100%; background: #009E73; }
.tv .tv-story { background: var(--tv-panel); border-radius: 3px; padding: 8px 14px; white-space: pre-wrap;
  font-family: Georgia, "DejaVu Serif", serif; font-size: 14.5px; line-height: 1.55; }
.tv .tv-story .tv-prompt { font-weight: 600; }
.tv .tv-story .tv-off { text-decoration: underline wavy #D55E00 1px; text-underline-offset: 3px; }
.tv details { border-top: 1px solid var(--tv-line); padding: 5px 0; }
.tv summary { cursor: pointer; }
.tv details p { margin: 6px 0; }
.tv ul { margin: 0 0 8px; padding-left: 20px; }
.tv ul.tv-list { padding-left: 0; }
.tv.tv-card.tv-pass { border-left-color: #009E73; padding: 8px 18px 6px; }
.tv.tv-card.tv-pass .tv-title { font-size: 14px; }
.tv a { color: var(--jp-content-link-color, var(--vscode-textLink-foreground, revert)); }
"""

SHEET = re.sub(r"\s*\n\s*", " ", CSS).strip()
"""As reports bring it: a notebook file has a string for every line."""


def _rules_for(*classes: str) -> str:
    """The rules of the style sheet for these classes alone, on one line."""
    rules = re.findall(r"[^{}]+\{[^{}]*\}", SHEET)
    named = ((rule, re.findall(r"\.([a-z][\w-]*)", rule.partition("{")[0])) for rule in rules)
    return "".join(rule.strip() for rule, names in named if set(names) <= set(classes))


# A pass is in every executed solution, many times: it brings only the rules that it needs.
PASS_CSS = _rules_for("tv", "tv-card", "tv-pass", "tv-title", "tv-kind", "tv-note", "tv-passed")
