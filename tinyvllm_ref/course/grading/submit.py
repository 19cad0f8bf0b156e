"""``tinyvllm submit``: a learner's notebooks in one zip, with a list of what will be graded and a receipt."""

from __future__ import annotations

import datetime
import hashlib
import io
import re
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

from ...checkpoint.names import REPOSITORY
from ..exercises import lesson_of, lessons
from ..lessons import stub_fingerprint
from .notebooks import Unreadable, read_cells, take_answers

_DATE = (2020, 1, 1, 0, 0, 0)  # the same notebooks make the same zip


def default_folder() -> Path:
    """Where notebooks are looked for: here, in ``lessons/`` here, or in that of the checkout that runs this."""
    names = {f"{lesson.number}_{lesson.slug}.ipynb" for lesson in lessons().values()}
    for folder in (Path.cwd(), Path.cwd() / "lessons"):
        if any((folder / name).is_file() for name in names):
            return folder
    return REPOSITORY / "lessons"


def submit(
    folder: Path | None,
    numbers: Iterable[str] = (),
    *,
    learner: str,
    out: Path | None = None,
    say: Callable[[str], None] = print,
) -> Path:
    """Pack notebooks for handing in.

    Parameters
    ----------
    folder : Path or None
        That has the notebooks; None: that of :func:`default_folder`.
    numbers : iterable of str
        Lessons, such as ``"06"``; all in which something is answered by default.
    learner : str
        Who hands in: what the roster calls them.
    out : Path, optional
        The zip; in the working folder and named for the learner and the lessons by default, such as
        ``ada_lesson_06.zip``. Its receipt lies beside it.
    say : callable
        Given each line of what will be graded.

    Returns
    -------
    Path
        The zip.

    Raises
    ------
    ValueError, FileNotFoundError
        A name can not be used, a notebook is missing or can not be read, or nothing is answered.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.@-]*", learner):
        raise ValueError(
            f"--learner is {learner!r}; letters, digits, . @ - are allowed, as the roster has it"
        )
    if folder is None:
        folder = default_folder()
    chosen = list(numbers)
    packed: list[tuple[Path, list[str]]] = []
    empty: list[str] = []
    for number in chosen or lessons():
        lesson = lesson_of(number)
        path = folder / f"{lesson.number}_{lesson.slug}.ipynb"
        if not path.exists():
            if chosen:
                raise FileNotFoundError(
                    f"{path} is not there; --lessons names the folder that has the notebooks"
                )
            continue
        lines, answered = _look(path, lesson.number)
        if answered or chosen:
            packed.append((path, lines))
            empty += [] if answered else [path.name]
    if not packed:
        raise ValueError(
            f"nothing is answered in the notebooks of {folder}; name a lesson to hand it in all the same"
        )
    target = out or Path(f"{learner}_{_lessons_in([path for path, _ in packed])}.zip")
    data = _zip([path for path, _ in packed])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    receipt = target.with_suffix(".receipt.txt")
    say(f"From {folder.resolve()}:")
    for path, lines in packed:
        say(path.name)
        for line in lines:
            say(f"  {line}")
    digest = hashlib.sha256(data).hexdigest()
    receipt.write_text(_receipt(learner, target, digest, packed), encoding="utf-8")
    say(f"{target}: {len(packed)} notebook{'s' if len(packed) > 1 else ''}, sha256 {digest}")
    say(f"{receipt}: keep it; it shows what you handed in")
    for name in empty:
        say(
            f"Nothing is filled in in {name}, and it is packed all the same. Is it the right folder, and saved?"
        )
    return target


def _look(path: Path, number: str) -> tuple[list[str], int]:
    """What will be graded of a notebook, a line an exercise; and how many are answered."""
    exercises = lesson_of(number).exercises
    ids = [exercise.id for exercise in exercises]
    try:
        answers = take_answers(read_cells(path.read_bytes()), ids, {id: stub_fingerprint(id) for id in ids})
    except Unreadable as error:
        raise ValueError(f"{path} can not be handed in: {error}") from None
    words = {
        "missing": "missing: no cell begins with its comment",
        "duplicate": "answered by several cells; it will get no points. Delete all but one",
        "not filled in": "not filled in",
        "too long": "too long to be graded",
    }
    lines = []
    for exercise in exercises:
        problem = answers.problems.get(exercise.id)
        lines.append(f"{exercise.id} {exercise.title}: {words[problem] if problem else 'will be graded'}")
    return lines, len(answers.sources)


def _lessons_in(paths: list[Path]) -> str:
    """``lesson_06``, ``lessons_06_07``, or of many the first and the last."""
    numbers = [path.name[:2] for path in paths]
    if len(numbers) == 1:
        return f"lesson_{numbers[0]}"
    return f"lessons_{'_'.join(numbers)}" if len(numbers) <= 4 else f"lessons_{numbers[0]}-{numbers[-1]}"


def _zip(paths: list[Path]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in paths:
            entry = zipfile.ZipInfo(path.name, _DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, path.read_bytes())
    return out.getvalue()


def _receipt(learner: str, target: Path, digest: str, packed: list[tuple[Path, list[str]]]) -> str:
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    lines = [f"learner  {learner}", f"packed   {now}", f"file     {target.name}", f"sha256   {digest}", ""]
    for path, found in packed:
        lines.append(f"{path.name}  sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}")
        lines += [f"  {line}" for line in found]
    return "\n".join(lines) + "\n"


__all__ = ["default_folder", "submit"]
