"""What a learner has done, in one small file: ``progress.json`` in ``$TINYVLLM_HOME``, or the platform's data folder.

Nothing in it depends on a notebook's name or on a kernel that still runs.
"""

from __future__ import annotations

import datetime
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import filelock

from tinyvllm_ref.checkpoint.names import home

VERSION = 1


def path() -> Path:
    """Where progress is kept."""
    return home() / "progress.json"


def read() -> dict[str, dict[str, Any]]:
    """Exercise -> what is known of it: ``passed`` (ISO time), ``attempts``, ``failed``, ``hints``, ``predicted``."""
    try:
        text = path().read_text(encoding="utf-8")
    except OSError:
        return {}
    try:
        content = json.loads(text)
        entries = content["exercises"]
        if content["version"] == VERSION and isinstance(entries, dict):
            return {id: entry for id, entry in entries.items() if isinstance(entry, dict)}
    except (ValueError, KeyError, TypeError):
        pass
    _keep_broken()
    return {}


def entry(exercise: str) -> dict[str, Any]:
    """What is known of one exercise; empty where nothing is."""
    return read().get(exercise, {})


def update(exercise: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the entry of one exercise, while no other process does.

    Parameters
    ----------
    exercise : str
    change : callable
        Gets the entry, a dict, and changes it in place. One left empty is taken out.
    """
    try:
        path().parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(str(path()) + ".lock", timeout=10):
            entries = read()
            change(entries.setdefault(exercise, {}))
            _write({id: one for id, one in entries.items() if one})
    except (OSError, filelock.Timeout) as error:
        print(
            f"progress is not kept: {path()} can not be written ({error}); set TINYVLLM_HOME to a folder that can"
        )


def now() -> str:
    """The time, to the second, with its zone."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def _write(entries: dict[str, Any]) -> None:
    write_atomically(path(), json.dumps({"version": VERSION, "exercises": entries}, indent=1) + "\n")


def write_atomically(target: Path, text: str) -> None:
    """Replace a file's text; a reader sees the old or the new, never a part."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _keep_broken() -> None:
    """Put a file that can not be read out of the way, so that nothing in it is lost."""
    number = 1
    while (aside := path().with_name(f"progress.broken-{number}.json")).exists():
        number += 1
    with suppress(OSError):
        os.replace(path(), aside)
        print(f"progress could not be read; the file is kept as {aside}")
