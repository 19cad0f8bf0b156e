"""Imported before matplotlib: where its folder of settings can not be made, it would say so on stderr."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path


def _folder() -> Path:
    """Where matplotlib keeps its settings on this system."""
    if sys.platform.startswith("linux"):
        return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "matplotlib"
    return Path.home() / ".matplotlib"


def _can_be_made(folder: Path) -> bool:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK)


if "MPLCONFIGDIR" not in os.environ and "matplotlib" not in sys.modules and not _can_be_made(_folder()):
    os.environ["MPLCONFIGDIR"] = tempfile.mkdtemp(prefix="tinyvllm-matplotlib-")
