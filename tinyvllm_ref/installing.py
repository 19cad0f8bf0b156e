"""What a person types to install what is missing and to call what is installed, for the Python that runs.

A plain ``pip`` may be another Python's, and a plain ``tinyvllm`` is found only where its environment is active.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

_REPOSITORY = Path(__file__).resolve().parent.parent


def pip_install(*packages: str) -> str:
    """``.venv/bin/python -m pip install "cupy-cuda12x>=14"``: the running Python, and these packages.

    Parameters
    ----------
    *packages : str
        As pip takes them; options too.
    """
    program = _short(Path(sys.executable)) if sys.executable else "python"
    words = [f'"{word}"' if set(word) & set("<>=[]* ") else word for word in packages]
    return " ".join([shlex.quote(program), "-m", "pip", "install", *words])


def install_extra(extra: str) -> str:
    """The line that brings an extra of this project: from its folder where that is there, else by its name."""
    if not (_REPOSITORY / "pyproject.toml").is_file():
        return pip_install(f"tinyvllm-ref[{extra}]")
    return pip_install("-e", f"{_short(_REPOSITORY)}[{extra}]")


def typed(name: str) -> str:
    """How a program of this installation is called from the course's folder.

    Parameters
    ----------
    name : str
        ``"tinyvllm"`` or ``"python"``.

    Returns
    -------
    str
        ``.venv/bin/tinyvllm`` where it lies in the course's folder, the plain name where PATH finds it (an active
        environment, a hosted notebook), else its whole path.
    """
    program = Path(sys.executable).parent / name
    if program.is_relative_to(_REPOSITORY):
        return os.fspath(program.relative_to(_REPOSITORY))
    found = shutil.which(name)
    is_this = found is not None and program.exists() and Path(found).samefile(program)
    return name if is_this or not program.exists() else shlex.quote(os.fspath(program))


def _short(path: Path) -> str:
    """Relative to the working folder where it lies in it; links are kept, for a venv's Python is one."""
    try:
        return os.fspath(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return os.fspath(path)
