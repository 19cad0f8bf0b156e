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
    """The class; empty where there is no file.

    Attributes
    ----------
    learners : list of Learner
    unused : tuple of str
        Columns of the file that mean nothing here.
    """

    learners: list[Learner] = field(default_factory=list)
    unused: tuple[str, ...] = ()

    def find(self, name: str, *, canvas_id: str = "", moodle_id: str = "") -> str | None:
        """The learner that a folder or a file names: by the platform's number, by id, by name or address.

        None where it names nobody, and where it names several: a name that two people have is neither's.
        """
        if canvas_id:
            for learner in self.learners:
                if learner.canvas_id == canvas_id:
                    return learner.id
        key = _key(name)
        ways = (
            [one for one in self.learners if one.id == name],
            [one for one in self.learners if key and _key(one.id) == key],
            [one for one in self.learners if key and key in {_key(text) for text in _names(one)}],
        )
        named = next(filter(None, ways), [])
        if len(named) == 1:
            return named[0].id
        # Last, for Moodle numbers people anew in each assignment.
        numbered = [one for one in named or self.learners if moodle_id and one.moodle_id == moodle_id]
        return numbered[0].id if len(numbered) == 1 else None

    def of(self, id: str) -> Learner:
        """The row of a learner; an empty one for somebody who is not in the roster."""
        return next((learner for learner in self.learners if learner.id == id), Learner(id))

    def __contains__(self, id: str) -> bool:
        return any(learner.id == id for learner in self.learners)


def _names(learner: Learner) -> tuple[str, str, str]:
    """As people and Canvas write it: "Ada Lovelace", "lovelaceada", ada@example.org."""
    return learner.name, "".join(reversed(learner.name.split(" ", 1))), learner.email


def _key(text: str) -> str:
    return re.sub(r"[\W_]+", "", text).casefold()


def read_table(path: Path, needed: tuple[str, ...]) -> list[dict[str, str]]:
    """Rows of a CSV file with a header; names of columns are small letters with ``_`` for blanks.

    Raises
    ------
    ValueError
        A column is missing, a row has more cells than the header, or the file is not UTF-8.
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
            rows = []
            for row in reader:
                if None in row:
                    raise ValueError(
                        f"{path}: line {reader.line_num} has more cells than the header, which has {len(names)}; "
                        "a text with a comma in it needs quotation marks"
                    )
                if any(row.values()):
                    rows.append({name: (row.get(name) or "").strip() for name in names})
            return rows
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
    unused = tuple(sorted(set(rows[0] if rows else ()) - known - {"learner", ""}))
    return Roster(learners, unused)
