"""``tinyvllm run-solutions --restyle``: the style sheet in saved outputs, brought up to date without executing.

Every card and table brings the course's style sheet along, so a saved output keeps that of the day it was made. What a
run found (numbers, times, pictures, texts) stays as it is; where a template has changed, only a run helps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .. import look
from . import notebook as files
from .source import discover

_SHEET = re.compile(r"<style>(\.tv \{[^<]*)</style>(?=\s*(<div class=\"[^\"]*\">))")


def with_present_sheet(html: str) -> str:
    """HTML of a report with the style sheet that the report would bring today."""

    def present(found: re.Match[str]) -> str:
        sheet = look.PASS_CSS if "tv-pass" in found[2] else look.SHEET
        return f"<style>{sheet}</style>"

    return _SHEET.sub(present, html)


def outputs_of_older_sheets(cell: Any) -> list[Any]:
    """Those outputs of a notebook's cell whose style sheet is not today's."""
    outputs = (output for output in cell.get("outputs", ()) if "data" in output)
    return [one for one in outputs if with_present_sheet(_html(one)) != _html(one)]


def restyle(root: Path, numbers: Iterable[str] = (), say: Callable[[str], None] = print) -> None:
    """Put today's style sheet into the saved outputs of solutions.

    Parameters
    ----------
    root : Path
        The folder that has ``solutions/``.
    numbers : iterable of str
        Which lessons; all by default.
    say : callable
        Given a line for each notebook that changed.

    Raises
    ------
    ValueError
        A file is not a notebook.
    """
    for path in discover(root, numbers):
        path = path.with_suffix(".ipynb")
        if not path.exists():
            continue
        notebook = files.read(path)
        older = [output for cell in notebook.cells for output in outputs_of_older_sheets(cell)]
        for output in older:
            output["data"]["text/html"] = with_present_sheet(_html(output))
        if older:
            files.write(path, files.to_bytes(notebook))
            say(f"solutions/{path.name}: {len(older)} outputs have today's style sheet")


def _html(output: Any) -> str:
    found = output["data"].get("text/html", "")
    return found if isinstance(found, str) else "".join(found)
