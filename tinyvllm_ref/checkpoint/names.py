"""Where models lie: one function for every name, so that it means the same wherever a program is started."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from tinyvllm_ref.installing import typed

_PACKAGE = Path(__file__).resolve().parent.parent
REPOSITORY = _PACKAGE.parent


def home() -> Path:
    """Where fetched models and all else of this user are kept: ``$TINYVLLM_HOME``, or the platform's."""
    configured = os.environ.get("TINYVLLM_HOME")
    return Path(configured).expanduser() if configured else Path(platformdirs.user_data_dir("tinyvllm"))


def resolve(model: str | os.PathLike[str]) -> Path:
    """The folder of a model.

    Parameters
    ----------
    model : str or PathLike
        A name such as ``"tiny-stories"`` is looked for in the package's data, in the repository's ``data/``,
        and among the fetched models; never in the working folder. What has a separator in it (or is a
        ``Path``) is a folder: taken as it is, or from the root of the repository.

    Returns
    -------
    Path
        A folder that holds a ``config.json``.

    Raises
    ------
    FileNotFoundError
        There is none; the message says where it was looked for.

    Examples
    --------
    >>> resolve("tiny-stories").name  # doctest: +SKIP
    'tiny-stories'
    """
    text = os.fspath(model)
    is_name = isinstance(model, str) and text not in ("", ".", "..") and not set(text) & {"/", os.sep}
    if is_name and not text.startswith("~"):
        candidates = [_PACKAGE / "data" / text, REPOSITORY / "data" / text, home() / "models" / text]
    else:
        path = Path(text).expanduser()
        candidates = [path] if path.is_absolute() else [Path.cwd() / path, REPOSITORY / path]
    for folder in candidates:
        if (folder / "config.json").is_file():
            return folder
    places = "".join(f"\n  {folder}" for folder in candidates)
    advice = f"\n`{typed('tinyvllm')} fetch {text}` gets the models that it knows." if is_name else ""
    if is_name and (Path.cwd() / text / "config.json").is_file():
        advice = f"\nThe folder of that name here is given as ./{text}."
    raise FileNotFoundError(f"no model {text!r}: none of these folders has a config.json{places}{advice}")
