"""What was handed in: a folder or a zip, as learners, teachers and learning platforms make them.

- a folder for each learner, ``ada/06_tree_reduction.ipynb``;
- files that are named for the learner, ``ada_06_tree_reduction.ipynb``;
- Canvas's zip, ``lovelaceada_12345_67890_06_tree_reduction.ipynb``, with ``LATE_`` before the first number where
  it was;
- Moodle's zip, ``Ada Lovelace_12345_assignsubmission_file/06_tree_reduction.ipynb``;
- in any of these a zip in the place of a notebook, such as ``tinyvllm submit`` makes;
- all of this in one folder more, as ``zip -r class.zip class`` makes it.

Nothing is unpacked onto the disk, and no link is followed.
"""

from __future__ import annotations

import io
import os
import re
import stat
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from .notebooks import MOST_BYTES
from .roster import Roster

_MOST_FILES = 20_000
_MOST_TOTAL = 2 << 30
_MOST_TOTAL_INSIDE = 200 << 20  # of a learner's own zip
_CANVAS = re.compile(r"(?P<name>[^_]+)_(?:LATE_)?(?P<id>\d+)_\d+_(?P<file>.+)", re.DOTALL)
_MOODLE = re.compile(r"(?P<name>.+?)_(?P<id>\d+)_assignsubmission_file_?(?P<file>.*)", re.DOTALL)
_NAMED = re.compile(r"(?P<learner>.+?)_(?P<file>\d\d(?:_.*)?\.ipynb|.*\.zip)", re.DOTALL)
_STARTS_WITH_LESSON = re.compile(r"\d\d_[A-Za-z]")
_LESSON = re.compile(r"(?:^|[^0-9])(\d\d)_[A-Za-z]")


@dataclass(frozen=True)
class File:
    """One notebook, or what stood in its place.

    Attributes
    ----------
    learner : str
    name : str
        As it was handed in, for the report.
    data : bytes or None
    problem : str
        Why there are no bytes.
    """

    learner: str
    name: str
    data: bytes | None
    problem: str = ""

    @property
    def lesson(self) -> str | None:
        """The lesson that its name says."""
        return lesson_in_name(self.name)


def lesson_in_name(name: str) -> str | None:
    """``"06"`` of ``06_tree_reduction.ipynb``."""
    found = _LESSON.search(name.rpartition("/")[2])
    return found.group(1) if found else None


@dataclass
class Collected:
    """All files, and what was wrong with what is not among them."""

    files: list[File] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def collect(path: Path, roster: Roster) -> Collected:
    """Read what was handed in.

    Raises
    ------
    FileNotFoundError, ValueError
        There is nothing at `path`, or it is no folder and no zip.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there; name the folder or the zip of submissions")
    collected = Collected()
    if path.is_dir():
        _take(_walk(path, collected), roster, collected)
    elif zipfile.is_zipfile(path):
        with open(path, "rb") as file:
            _take(_unzip(file, collected, "", _MOST_TOTAL), roster, collected)
    else:
        raise ValueError(f"{path} is neither a folder nor a zip; name the folder or the zip of submissions")
    collected.files.sort(key=lambda file: (file.learner, file.name))
    return collected


def printable(name: str) -> str:
    """A file's name for a report, whatever its bytes are."""
    text = os.fsencode(name).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


# ---------------- entries: (path inside, bytes or None, problem)

_Entry = tuple[str, bytes | None, str]


def _walk(root: Path, collected: Collected) -> Iterator[_Entry]:
    """Files of a folder; links and devices are named and not opened."""
    count = 0
    for folder, folders, names in os.walk(root, followlinks=False):
        folders[:] = sorted(name for name in folders if not _ignored(name))
        for name in list(folders):
            if os.path.islink(os.path.join(folder, name)):
                collected.problems.append(f"{printable(name)}: a link to a folder, which was not followed")
        for name in sorted(names):
            full = os.path.join(folder, name)
            inside = os.path.relpath(full, root)
            if _ignored(name) or not _wanted(name):
                continue
            count += 1
            if count > _MOST_FILES:
                collected.problems.append(f"more than {_MOST_FILES:,} files; the rest was left out")
                return
            yield inside, *_read_file(full)


def _read_file(path: str) -> tuple[bytes | None, str]:
    try:
        # Never through a link, and never waiting for the other end of a pipe.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if os.path.islink(path):
            return None, "it is a link, which was not followed"
        return None, f"it can not be read ({error.strerror})"
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            return None, "it is no file"
        if status.st_size > MOST_BYTES:
            return None, f"it has {status.st_size:,} bytes; at most {MOST_BYTES:,} are read"
        return file.read(MOST_BYTES + 1), ""


def _unzip(file: IO[bytes], collected: Collected, prefix: str, most: int) -> Iterator[_Entry]:
    """Entries of a zip: nothing that points out of it, no links, no more than its share when unpacked."""
    total = 0
    with zipfile.ZipFile(file) as archive:
        for number, entry in enumerate(archive.infolist()):
            name = f"{prefix}{entry.filename}"
            if number >= _MOST_FILES:
                collected.problems.append(
                    f"{printable(prefix or 'the zip')}: more than {_MOST_FILES:,} files; the rest was left out"
                )
                return
            if entry.is_dir():
                continue
            if _leaves(entry.filename):
                collected.problems.append(f"{printable(name)}: its name points out of the zip; left out")
                continue
            if _ignored_path(entry.filename) or not _wanted(entry.filename):
                continue
            if stat.S_ISLNK(entry.external_attr >> 16):
                yield entry.filename, None, "it is a link, which was not followed"
                continue
            data, problem = _read_entry(archive, entry)
            total += len(data or b"")
            if total > most:
                collected.problems.append(
                    f"{printable(prefix or 'the zip')}: more than {most:,} bytes when unpacked; the rest was left out"
                )
                return
            yield entry.filename, data, problem


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> tuple[bytes | None, str]:
    try:
        with archive.open(entry) as file:
            data = file.read(MOST_BYTES + 1)  # what the header says of the size is not believed
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, OSError, EOFError, ValueError) as error:
        return None, f"it can not be unpacked ({error})"
    except Exception as error:  # of a decompressor
        return None, f"it can not be unpacked ({type(error).__name__})"
    if len(data) > MOST_BYTES:
        return None, f"it has more than {MOST_BYTES:,} bytes when unpacked"
    return data, ""


def _leaves(name: str) -> bool:
    parts = PurePosixPath(name.replace("\\", "/"))
    return parts.is_absolute() or ".." in parts.parts or re.match(r"[A-Za-z]:", name) is not None


def _ignored(name: str) -> bool:
    return name.startswith((".", "__MACOSX"))


def _ignored_path(name: str) -> bool:
    return any(_ignored(part) for part in PurePosixPath(name.replace("\\", "/")).parts)


def _wanted(name: str) -> bool:
    return name.lower().endswith((".ipynb", ".zip"))


# ---------------- whose it is


class Owner(NamedTuple):
    """Whose file it is.

    Attributes
    ----------
    learner : str
    file : str
        Its name without the learner's.
    number : str
        The platform's number of somebody whom the roster does not know.
    """

    learner: str
    file: str
    number: str = ""


def _take(entries: Iterable[_Entry], roster: Roster, collected: Collected) -> None:
    entries = list(entries)
    outer = _outer_folders([inside for inside, _, _ in entries], roster)
    if outer:
        collected.problems.append(
            f"{'/'.join(outer)}: a folder with all in it; it was not taken for a learner"
        )
    owners = [owner(_parts(inside)[len(outer) :], roster) for inside, _, _ in entries]
    shared = _shared_names(owners)
    for (_, data, problem), whose in zip(entries, owners, strict=True):
        learner = whose.learner
        if learner in shared and whose.number:
            learner = f"{learner} ({whose.number})"
        if not whose.file.lower().endswith(".zip"):
            collected.files.append(File(learner, whose.file, data, problem))
        elif data is None:
            collected.files.append(File(learner, whose.file, None, problem))
        else:
            _take_zip(learner, whose.file, data, collected)


def _outer_folders(paths: Sequence[str], roster: Roster) -> list[str]:
    """Folders around the whole class, outermost first; a learner's own folder is none of them."""
    found: list[str] = []
    inner = [_parts(path) for path in paths]
    while inner and all(len(parts) > 1 and parts[0] == inner[0][0] for parts in inner):
        first = inner[0][0]
        inner = [parts[1:] for parts in inner]
        if roster.find(first) or _MOODLE.fullmatch(first) or not _is_class(inner, roster):
            break
        found.append(first)
    return found


def _is_class(inner: Sequence[tuple[str, ...]], roster: Roster) -> bool:
    """Whether these paths are those of a class, and not of one learner's folder."""
    owners = {owner(parts, roster).learner for parts in inner}
    if any(roster.find(name) for name in owners):
        return True
    if all(len(parts) > 1 and parts[0] == inner[0][0] for parts in inner):
        return _is_class([parts[1:] for parts in inner], roster)
    files = [parts[0] for parts in inner if len(parts) == 1]
    return len(owners) > 1 and all(_names_learner(file) for file in files)


def _names_learner(file: str) -> bool:
    return not _STARTS_WITH_LESSON.match(file) and bool(_CANVAS.fullmatch(file) or _NAMED.fullmatch(file))


def _shared_names(owners: Iterable[Owner]) -> set[str]:
    """Names that a platform gives to several people, whom the roster does not tell apart.

    Moodle numbers a person anew in each assignment, so that two numbers are two people where both hand in one lesson.
    """
    numbers: dict[tuple[str, str | None], set[str]] = {}
    for whose in owners:
        if whose.number:
            lesson = lesson_in_name(whose.file)
            numbers.setdefault((whose.learner, lesson), set()).add(whose.number)
    return {learner for (learner, _), found in numbers.items() if len(found) > 1}


def _take_zip(learner: str, name: str, data: bytes, collected: Collected) -> None:
    """A learner's own zip; a zip in it is not opened."""
    found = 0
    try:
        for inside, content, problem in _unzip(
            io.BytesIO(data), collected, f"{learner}/{name}: ", _MOST_TOTAL_INSIDE
        ):
            if inside.lower().endswith(".ipynb"):
                found += 1
                collected.files.append(File(learner, f"{name}/{printable(inside)}", content, problem))
    except zipfile.BadZipFile:
        collected.files.append(File(learner, name, None, "it is not a zip, though its name says so"))
        return
    if not found:
        collected.files.append(File(learner, name, None, "there is no notebook in it"))


def owner(parts: Sequence[str], roster: Roster) -> Owner:
    """Whose file it is, by the parts of its path inside of what was handed in."""
    first, rest = parts[0], "/".join(parts[1:])
    moodle = _MOODLE.fullmatch(first)
    if moodle:
        known = roster.find(moodle["name"], moodle_id=moodle["id"])
        return Owner(known or moodle["name"], rest or moodle["file"], "" if known else moodle["id"])
    if rest:
        return Owner(roster.find(first) or first, rest)
    canvas = _CANVAS.fullmatch(first)
    if canvas:
        known = roster.find(canvas["name"], canvas_id=canvas["id"])
        return Owner(known or canvas["name"], canvas["file"], "" if known else canvas["id"])
    named = _NAMED.fullmatch(first)
    if named:
        return Owner(roster.find(named["learner"]) or named["learner"], named["file"])
    stem = first.rpartition(".")[0]
    return Owner(roster.find(stem) or stem, first)


def _parts(inside: str) -> tuple[str, ...]:
    return tuple(printable(part) for part in PurePosixPath(inside.replace("\\", "/")).parts)
