"""Results that are known already: by the answer, the exercise, the seed and the code that grades."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..exercises import lesson_of
from ..store import write_atomically
from . import runtime


class Cache:
    """A folder of results, each in a file that is named by a hash of all that it hangs on."""

    def __init__(self, folder: Path, *, fresh: bool = False) -> None:
        self._folder, self._fresh = folder, fresh

    @staticmethod
    def key(*parts: Any) -> str:
        """The name of what these plain values make."""
        text = json.dumps([runtime.version(), *parts], sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:40]

    def get(self, key: str) -> dict[str, Any] | None:
        """What is kept under a key; None where nothing is, or where it can not be read."""
        if self._fresh:
            return None
        try:
            found = json.loads((self._folder / f"{key}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def put(self, key: str, value: Mapping[str, Any]) -> None:
        """Keep something."""
        write_atomically(self._folder / f"{key}.json", json.dumps(value) + "\n")


def exercise_text(id: str) -> str:
    """The source of an exercise's whole lesson: whatever changes there, its answers are judged again."""
    return inspect.getsource(sys.modules[_module(id)])


def _module(id: str) -> str:
    lesson = lesson_of(id)
    return f"tinyvllm_ref.course.exercises.lesson_{lesson.number}_{lesson.slug}"
