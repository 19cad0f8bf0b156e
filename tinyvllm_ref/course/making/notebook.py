"""Notebook files: their fixed metadata, their bytes, and writing them so that a crash leaves the old one."""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import nbformat

_v4: Any = nbformat.v4  # its functions have no types

KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
# Without the version of Python: it is not the notebook's.
LANGUAGE = {
    "codemirror_mode": {"name": "ipython", "version": 3},
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "name": "python",
    "nbconvert_exporter": "python",
    "pygments_lexer": "ipython3",
}


def new(cells: list[Any], **tinyvllm: Any) -> Any:
    """A notebook of these cells, with the course's metadata."""
    metadata = {"kernelspec": dict(KERNEL), "language_info": dict(LANGUAGE), "tinyvllm": dict(tinyvllm)}
    notebook = _v4.new_notebook(cells=cells, metadata=metadata)
    notebook.nbformat_minor = 5
    return notebook


def new_cell(kind: str, source: str, name: str, metadata: dict[str, Any]) -> Any:
    """A cell without outputs."""
    make = {
        "code": _v4.new_code_cell,
        "markdown": _v4.new_markdown_cell,
        "raw": _v4.new_raw_cell,
    }[kind]
    return make(source, id=name, metadata=metadata)


def to_bytes(notebook: Any) -> bytes:
    """The file's content: the same for the same notebook.

    Raises
    ------
    nbformat.ValidationError
        It is no notebook by Jupyter's schema.
    """
    nbformat.validate(notebook)
    text: str = _v4.writes(notebook)
    return (text.rstrip("\n") + "\n").encode()


def read(path: Path) -> Any:
    """A notebook from a file.

    Raises
    ------
    ValueError
        The file is not a notebook.
    """
    try:
        notebook: Any = nbformat.reader.reads(path.read_bytes().decode())  # type: ignore[no-untyped-call]
        if notebook.get("nbformat") != 4:
            raise ValueError(f"format {notebook.get('nbformat')}, and not 4")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of cells without an id
            nbformat.validate(notebook)
    except (ValueError, AttributeError, TypeError, nbformat.ValidationError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path.parent.name}/{path.name} is not a notebook ({reason})") from None
    return notebook


def write(path: Path, data: bytes) -> bool:
    """Put `data` in the place of a file in one step; a file that has it already is left alone.

    Returns
    -------
    bool
        Was it written?
    """
    with contextlib.suppress(FileNotFoundError):
        if path.read_bytes() == data:
            return False
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    return True
