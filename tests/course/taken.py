"""The course as someone leaves it who has passed all of it: the solutions' answers in a ``my_engine/`` of their own."""

from __future__ import annotations

import os
from pathlib import Path

from tinyvllm_ref import emulation
from tinyvllm_ref.course import my_engine
from tinyvllm_ref.course.answers import make_namespace
from tinyvllm_ref.course.exercise import Exercise
from tinyvllm_ref.course.exercises import lessons
from tinyvllm_ref.course.lessons import solution_cell


def pass_all(folder: Path, last: str = "23") -> None:
    """Save the answers of all lessons up to `last` to ``$TINYVLLM_MY_ENGINE``, which must be `folder`."""
    assert Path(os.environ["TINYVLLM_MY_ENGINE"]) == folder
    for number, lesson in sorted(lessons().items()):
        for exercise in lesson.exercises:
            if number > last or not isinstance(exercise, Exercise):
                continue
            source = solution_cell(exercise.id)
            assert source is not None, exercise.id
            is_text = exercise.makes and not exercise.file.endswith(".py")
            my_engine.save(exercise, source, make_namespace(exercise, source, emulation) if is_text else {})
            if lesson.passed is not None:
                lesson.passed()


# Python imports this on its own when it starts, if it lies on PYTHONPATH.
ONLY_THE_DEVICE = """
import importlib.abc
import sys


class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("tinyvllm_ref.") and name.split(".")[1] not in ("device", "emulation"):
            raise ImportError(f"{name} was imported")
        return None


sys.meta_path.insert(0, Refuse())
"""


def only_the_device(folder: Path) -> dict[str, str]:
    """An environment in which a Python process can import nothing of this project but the device."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(ONLY_THE_DEVICE)
    environment = {name: value for name, value in os.environ.items() if name != "TINYVLLM_MY_ENGINE"}
    return {**environment, "PYTHONPATH": str(folder), "TINYVLLM_DEVICE": "cpu"}
