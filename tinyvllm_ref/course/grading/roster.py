"""Who is in the class: ``roster.csv``."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Learner:
    """One row of the roster.

    Attributes
    ----------
    id : str
        The column ``learner``: what folders and files of submissions are named for.
    name, email : str
    canvas_id, sis_user_id, sis_login_id, section : str
        As Canvas's gradebook exports them: ``ID``, ``SIS User ID``, ``SIS Login ID``, ``Section``.
    moodle_id, id_number : str
        The number in the names of Moodle's folders, and the profile's ID number.
    """

    id: str
    name: str = ""
    email: str = ""
    canvas_id: str = ""
    sis_user_id: str = ""
    sis_login_id: str = ""
    section: str = ""
    moodle_id: str = ""
    id_number: str = ""


@dataclass
class Roster:
    """The class; empty where there is no file."""

    learners: list[Learner] = field(default_factory=list)

    def find(self, name: str, number: str = "") -> str | None:
        """The learner that a folder or a file names: by a number of a platform, by id, or by name."""
        if number:
            for learner in self.learners:
                if number in (learner.canvas_id, learner.moodle_id, learner.id_number):
                    return learner.id
        key = _key(name)
        for learner in self.learners:
            last_first = "".join(reversed(learner.name.split(" ", 1)))
            if key in {_key(text) for text in (learner.id, learner.name, last_first, learner.email) if text}:
                return learner.id
        return None

    def of(self, id: str) -> Learner:
        """The row of a learner; an empty one for somebody who is not in the roster."""
        return next((learner for learner in self.learners if learner.id == id), Learner(id))

    def __contains__(self, id: str) -> bool:
        return any(learner.id == id for learner in self.learners)


def _key(text: str) -> str:
    return re.sub(r"[\W_]+", "", text).casefold()


def read_table(path: Path, needed: tuple[str, ...]) -> list[dict[str, str]]:
    """Rows of a CSV file with a header; names of columns are small letters with ``_`` for blanks.

    Raises
    ------
    ValueError
        A column is missing, or the file is not UTF-8.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            names = [(name or "").strip().casefold().replace(" ", "_") for name in reader.fieldnames or []]
            reader.fieldnames = names
            missing = [name for name in needed if name not in names]
            if missing:
                raise ValueError(
                    f"{path}: there is no column {missing[0]!r}; it has {', '.join(names) or 'nothing'}"
                )
            return [
                {name: (row.get(name) or "").strip() for name in names} for row in reader if any(row.values())
            ]
    except UnicodeDecodeError:
        raise ValueError(f"{path}: it must be UTF-8; save it again as CSV UTF-8") from None
    except csv.Error as error:
        raise ValueError(f"{path}: {error}") from None


def read_roster(path: Path | None) -> Roster:
    """The roster; an empty one where there is no file.

    Raises
    ------
    ValueError
        The column ``learner`` is missing, or two rows have the same one.
    """
    if path is None:
        return Roster()
    rows = read_table(path, ("learner",))
    known = set(Learner.__dataclass_fields__) - {"id"}
    learners = [
        Learner(row["learner"], **{name: value for name, value in row.items() if name in known})
        for row in rows
    ]
    ids = [learner.id for learner in learners]
    twice = sorted({id for id in ids if ids.count(id) > 1})
    if twice or "" in ids:
        raise ValueError(
            f"{path}: learner {twice[0] if twice else ''!r} must stand in one row, and not be empty"
        )
    return Roster(learners)
