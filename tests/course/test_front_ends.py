"""Cards and pictures in VS Code: a page with the rules of its notebooks' webview, and none of Jupyter's variables."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import pytest

from tinyvllm_ref.course import figures as f
from tinyvllm_ref.course import front_end, notebook
from tinyvllm_ref.course.course_map import CourseMap
from tinyvllm_ref.course.exercise import Exercise, Prediction
from tinyvllm_ref.course.exercises import lessons
from tinyvllm_ref.course.lessons import heading_of
from tinyvllm_ref.course.next_steps import after_exercise
from tinyvllm_ref.course.reports import HintCard, PassCard, Table

from .pages import contrasts
from .test_reports import card as engine_card
from .test_reports import report

# As src/vs/workbench/contrib/notebook/browser/view/renderers/backLayerWebView.ts of microsoft/vscode has them, and the
# colours of the themes Light Modern and Dark Modern (extensions/theme-defaults).
WEBVIEW = """
body { background: transparent; color: var(--vscode-editor-foreground); font: 13px system-ui; margin: 0; }
html { background: var(--vscode-editor-background); }
a, a code { color: var(--vscode-textLink-foreground); }
code { color: var(--vscode-textPreformat-foreground); background: var(--vscode-textPreformat-background); }
table, thead, tr, th, td, tbody { border: none; border-spacing: 0; border-collapse: collapse; }
table, th, tr { vertical-align: middle; text-align: right; }
thead { font-weight: bold; background-color: rgba(130, 130, 130, 0.16); }
th, td { padding: 4px 8px; }
tr:nth-child(even) { background-color: rgba(130, 130, 130, 0.08); }
tbody th { font-weight: normal; }
img { max-width: 100%; }
"""
THEMES = {
    "vscode-light": {
        "foreground": "#3B3B3B",
        "descriptionForeground": "#3B3B3B",
        "editor-foreground": "#3B3B3B",
        "editor-background": "#FFFFFF",
        "textLink-foreground": "#005FB8",
        "textPreformat-foreground": "#3B3B3B",
        "textPreformat-background": "#0000001F",
    },
    "vscode-dark": {
        "foreground": "#CCCCCC",
        "descriptionForeground": "#9D9D9D",
        "editor-foreground": "#CCCCCC",
        "editor-background": "#1F1F1F",
        "textLink-foreground": "#4daafc",
        "textPreformat-foreground": "#D0D0D0",
        "textPreformat-background": "#3C3C3C",
    },
}

STYLES = "(elements, name) => elements.map(e => getComputedStyle(e)[name])"


@pytest.fixture
def vscode(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that VS Code's Jupyter extension has started."""
    shell = SimpleNamespace(
        kernel=object(), user_ns={"__vsc_ipynb_file__": "/course/lessons/00_welcome.ipynb"}
    )
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)


def cards() -> dict[str, Any]:
    """One of each kind."""
    everything = list(lessons().values())
    exercise = next(e for e in everything[0].exercises if isinstance(e, Exercise))
    drawn = [
        SimpleNamespace(
            number=lesson.number,
            title=lesson.title,
            part=lesson.part,
            minutes=lesson.minutes,
            exercises=[(e.id, e.title, e.stretch) for e in lesson.exercises],
        )
        for lesson in everything
    ]
    links = {lesson.number: f"{lesson.number}.ipynb" for lesson in everything}
    return {
        "report": report(),
        "hint": HintCard("06.2", 2, "The rule: `i < n`.\n\n```\nif (i < n) y[i] = 0;\n```", note="Go on."),
        "pass": PassCard(
            exercise.id, exercise.title, "3 of 3 points", ("00_1.py",), after_exercise(exercise)
        ),
        "table": Table(
            "Counted", ("", "yours", "reference"), (("launches", "2", "1"),), ("No time is claimed.",)
        ),
        "map": CourseMap(drawn, {exercise.id: "passed"}, links),
        "engine": engine_card(),
    }


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.usefixtures("vscode")
def test_cards_are_read_in_vscode(browser, theme):
    variables = "".join(f"--vscode-{name}: {value};" for name, value in THEMES[theme].items())
    outputs = "".join(f'<div id="{name}">{card._repr_html_()}</div>' for name, card in cards().items())
    page = browser.new_page(viewport={"width": 900, "height": 1200})
    page.set_content(
        f'<html style="{variables}"><style>{WEBVIEW}</style><body class="{theme}">{outputs}</body></html>'
    )
    written = page.locator(
        ".tv p, .tv li, .tv td, .tv th, .tv a, .tv code, .tv pre span, .tv b, .tv summary, .tv-callout"
    )
    marks = re.compile(r"[●◆◐◈○◇→✓\s]*")  # shapes; test_accessibility.py asks 3 of them
    said = zip(written.all_inner_texts(), contrasts(written), strict=True)
    assert [(text, found) for text, found in said if found < 4.5 and not marks.fullmatch(text)] == []
    # VS Code paints heads and every second row of a table, and sets numbers' headings to the right: not in ours.
    backgrounds = page.locator(".tv thead, .tv tr").evaluate_all(STYLES, "backgroundColor")
    assert set(backgrounds) == {"rgba(0, 0, 0, 0)"}
    aligned = page.locator(".tv td:not(.tv-num), .tv th:not(.tv-num)").evaluate_all(STYLES, "textAlign")
    assert set(aligned) == {"left"}
    # Nothing is wider than its output.
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.close()


@pytest.mark.usefixtures("vscode")
def test_pictures_have_their_size_in_vscode(browser, monkeypatch):
    sent: list[Any] = []
    monkeypatch.setattr("IPython.display.display", lambda data, metadata=None, raw=False: sent.append(data))
    monkeypatch.setattr("IPython.display.publish_display_data", lambda data, metadata: sent.append(data))
    figure = f.blocks_over_array(n=12, block=4, grid=3)
    f.display_figure(figure)
    notebook.display_png(figure.png(), 'It says "done" & <b>.')
    assert [data["text/plain"] for data in sent] == [figure.alt_text, 'It says "done" & <b>.']
    page = browser.new_page(viewport={"width": 1600, "height": 900})
    page.set_content(f"<style>{WEBVIEW}</style>" + "".join(data["text/html"] for data in sent))
    pictures = page.locator("img")
    assert [picture.get_attribute("alt") for picture in pictures.all()] == [
        data["text/plain"] for data in sent
    ]
    for picture in pictures.all():
        assert picture.evaluate("img => img.decode().then(() => img.width / img.naturalWidth)") == 0.5
        shown = picture.evaluate("img => [img.width / img.height, img.naturalWidth / img.naturalHeight]")
        assert shown[0] == pytest.approx(shown[1], rel=0.01)
    page.set_viewport_size({"width": 400, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.close()


def test_elsewhere_a_picture_is_a_png():
    assert not front_end.in_vscode()
    data, about = f.row_column_major((2, 3))._repr_mimebundle_()
    assert set(data) == {"image/png", "text/plain"}
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert set(about) == {"image/png"}


# Ids that VS Code 1.139 gave to headings of lesson 00, read in a browser.
SEEN = {
    "00.1 · Which element is mine?": "#001--which-element-is-mine",
    "00.2 · A guard": "#002--a-guard",
    "A language model is a file and a program": "#a-language-model-is-a-file-and-a-program",
}


@pytest.mark.usefixtures("vscode")
def test_a_link_goes_to_a_heading_in_vscode():
    for heading, address in SEEN.items():
        assert front_end.link_to_cell("a-cell", heading) == address
    assert front_end.link_to_cell("a-cell", " x ↔ Y (z) ") == "#x-%E2%86%94-y-z"
    exercise = lessons()["00"].exercises[0]
    assert [link.href for link in after_exercise(exercise)] == ["#002--a-guard"]


@pytest.mark.usefixtures("vscode")
def test_links_of_a_lesson_are_told_apart_in_vscode():
    for lesson in lessons().values():
        exercises = [e for e in lesson.exercises if isinstance(e, (Exercise, Prediction))]
        addresses = [front_end.link_to_cell(*heading_of(e.id)) for e in exercises]
        assert len(set(addresses)) == len(addresses)
        assert all(re.fullmatch(r"#[\w%-]+", address) for address in addresses), addresses


def test_elsewhere_a_link_goes_to_a_cell():
    assert front_end.link_to_cell("00-2-a-guard", "00.2 · A guard") == "#cell-id=00-2-a-guard"


class _Elements(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert not [name for name, _ in attrs if name.startswith("on")], attrs


def test_cards_need_no_script():
    """What an untrusted notebook, or a front end with rules of its own, would not run."""
    for name, card in cards().items():
        assert not _Elements(card._repr_html_()).tags & {"script", "iframe", "button", "input", "link"}, name
