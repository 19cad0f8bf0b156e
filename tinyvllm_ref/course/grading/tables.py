"""CSV that spreadsheets read safely, and names of files that are safe whatever a learner is called."""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections.abc import Sequence
from typing import Any


def table(rows: Sequence[Sequence[Any]]) -> str:
    """CSV; a cell that a spreadsheet would take for a formula gets a mark in front."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in rows:
        writer.writerow([_cell(value) for value in row])
    return out.getvalue().encode("utf-8", "backslashreplace").decode()


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:g}"
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def safe_name(learner: str) -> str:
    """A folder's name for a learner: no separators, not hidden, and no two learners the same."""
    plain = re.sub(r"[^A-Za-z0-9_.@-]+", "_", learner).lstrip(".")[:80]
    if plain == learner and plain:
        return plain
    return f"{plain or 'learner'}-{hashlib.sha256(learner.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"
