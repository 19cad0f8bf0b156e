"""``my_engine/``: what a learner has passed, as plain files that the engine runs and a person can read.

``parts.json`` lists the parts; each lies in a ``.cu`` file (device functions) or a ``.py`` file, which is the answer
cell with its imports on top. ``answers/`` holds every answer that passed, by exercise. What a part imports of
:mod:`.given` lies beside it as a copy; the capstone adds the rest of what a program needs (:func:`save_program`).
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from tinyvllm_ref.assembly import Parts
from tinyvllm_ref.checkpoint.names import REPOSITORY
from tinyvllm_ref.parts import Parts as PlainParts

from . import given
from .exercise import Exercise
from .store import write_atomically

# Resolves at import what a part is made of: the folder's own, or the reference's where there is none.
_EARLIER = '''"""The parts that other parts here are made of: this folder's, or the reference's where one is missing."""

import importlib
import json
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    entry = json.loads((_FOLDER / "parts.json").read_text(encoding="utf-8"))["parts"].get(name)
    if entry is None:
        from tinyvllm_ref.assembly import Parts

        return getattr(Parts.reference(), name)
    if not entry["file"].endswith(".py"):
        return (_FOLDER / entry["file"]).read_text(encoding="utf-8")
    module = importlib.import_module(f".{entry['file'].removesuffix('.py')}", __package__)
    return getattr(module, entry.get("name", name))
'''


def folder() -> Path:
    """``$TINYVLLM_MY_ENGINE``, else ``my_engine/`` beside ``lessons/``."""
    configured = os.environ.get("TINYVLLM_MY_ENGINE")
    return Path(configured).expanduser() if configured else REPOSITORY / "my_engine"


def parts() -> Parts:
    """The learner's parts, with the reference's where one is missing."""
    return Parts.mine(folder())


def own_parts() -> PlainParts:
    """The learner's parts alone."""
    return PlainParts.load(folder())


def answer(exercise: str) -> str | None:
    """The answer cell that passed an exercise; None where none has."""
    try:
        return _answer_path(exercise).read_text(encoding="utf-8")
    except OSError:
        return None


def files_of(exercise: Exercise) -> tuple[str, ...]:
    """What :func:`save` writes, part first, as the course calls it wherever the folder is: ``my_engine/...``."""
    files = ([exercise.file] if exercise.makes else []) + [f"answers/{_answer_path(exercise.id).name}"]
    return tuple(f"my_engine/{file}" for file in files)


def save(exercise: Exercise, source: str, namespace: dict[str, Any]) -> None:
    """Keep an answer that passed, and the parts that it makes.

    Parameters
    ----------
    exercise : Exercise
    source : str
        The answer cell.
    namespace : dict
        What the cell made, for parts that are texts.
    """
    write_atomically(_answer_path(exercise.id), source.rstrip("\n") + "\n")
    if not exercise.makes:
        return
    write_atomically(folder() / "__init__.py", '"""My engine, part by part."""\n')
    write_atomically(folder() / "earlier.py", _EARLIER)
    if exercise.file.endswith(".py"):
        _write_module(exercise.file, f"{', '.join(exercise.makes)}: made in", exercise, source)
    else:
        (name,) = exercise.makes.values()
        write_atomically(folder() / exercise.file, str(namespace[name]))
    listing = _listing()
    for part, name in exercise.makes.items():
        listing[part] = {"file": exercise.file} | ({"name": name} if exercise.file.endswith(".py") else {})
    _write_listing(listing)


def save_program(exercise: Exercise, file: str) -> Path:
    """Write what makes a program of the parts: an answer that is no part, as a module, and the given modules.

    Parameters
    ----------
    exercise : Exercise
        Whose answer, which has passed, becomes the module.
    file : str
        The module's name in the folder.

    Returns
    -------
    Path
        The program, ``generate.py``.
    """
    _write_module(file, f"{exercise.title}:", exercise, answer(exercise.id) or "", alone=True)
    for name in given.MODULES:
        write_atomically(folder() / f"{name}.py", given.module_text(name))
    return folder() / "generate.py"


def remove(exercise: Exercise) -> list[Path]:
    """Take an answer and its parts out; they are moved to ``removed/``, and where to is the answer."""
    listing = {name: entry for name, entry in _listing().items() if name not in exercise.makes}
    moved = [_move_away(_answer_path(exercise.id))]
    if exercise.makes:
        _write_listing(listing)
        if not any(entry["file"] == exercise.file for entry in listing.values()):
            moved.append(_move_away(folder() / exercise.file))
    return [path for path in moved if path is not None]


def _write_module(file: str, says: str, exercise: Exercise, source: str, *, alone: bool = False) -> None:
    """Write a module that is the answer cell, with what it may name imported on top; and what it imports beside it."""
    before = "" if alone else "".join(f"\n\n{(answer(id) or '').rstrip()}\n" for id in exercise.builds_on)
    body = given.localized(f"{before}\n\n{source.rstrip()}\n")
    names = [name for name in exercise.uses if re.search(rf"\b{name}\b", body)]
    earlier = f"\nfrom .earlier import {', '.join(names)}\n" if names else ""
    text = (
        f'"""{says} exercise {exercise.id}."""\n\n'
        f"import numpy as np\n\nfrom tinyvllm_ref.device import cp\n{earlier}{body}"
    )
    write_atomically(folder() / file, text)
    for name in given.needed_by(body):
        write_atomically(folder() / f"{name}.py", given.module_text(name))


def _answer_path(exercise: str) -> Path:
    return folder() / "answers" / f"{exercise.replace('.', '_')}.py"


def _listing() -> dict[str, Any]:
    try:
        return dict(json.loads((folder() / "parts.json").read_text(encoding="utf-8"))["parts"])
    except FileNotFoundError:
        return {}


def _write_listing(listing: dict[str, Any]) -> None:
    write_atomically(folder() / "parts.json", json.dumps({"version": 1, "parts": listing}, indent=1) + "\n")


def _move_away(path: Path) -> Path | None:
    """Move a file to ``removed/``, under a number that is free."""
    if not path.exists():
        return None
    number = 1
    while (to := folder() / "removed" / f"{path.stem}-{number}{path.suffix}").exists():
        number += 1
    to.parent.mkdir(parents=True, exist_ok=True)
    os.replace(path, to)
    return to
