"""What is known of one answer once it is judged: a plain record that goes into reports, caches and other machines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

STATUSES = {
    "passed": "passed",
    "partial": "some groups of cases pass",
    "failed": "no group of cases passes",
    "error": "the cell makes no answer",
    "stopped": "the process was stopped, or ended without a result",
    "not filled in": "still the stub",
    "missing": "not in the notebook",
    "duplicate": "answered more than once",
    "unreadable": "the file could not be read",
    "not handed in": "no notebook of this lesson",
    "not graded": "the grader failed; run it again",
}

NOT_RUN = frozenset({"not filled in", "missing", "duplicate", "unreadable", "not handed in", "not graded"})


@dataclass(frozen=True)
class Result:
    """The result of one exercise for one learner.

    Attributes
    ----------
    exercise, status : str
        ``"06.2"``, and a key of :data:`STATUSES`.
    groups : mapping of str to (int, int)
        Group of cases -> points earned and possible.
    says : str
        What happened, for the instructor.
    feedback : str
        The same for the learner, without values of hidden cases.
    kind, case : str
        The kind of fault, and the label of the smallest case that fails.
    counts : tuple of str
    rows : tuple of (str, str, str)
        Index, expected, got: for the instructor.
    source : tuple of (int, str, bool)
        Lines of the learner's source around a fault.
    mistake : (str, str) or None
        Name of the known mistake that it makes, and what it says.
    seed : int
        Of the inputs.
    notes : tuple of str
        For the learner as well.
    remarks : tuple of str
        Of the grading itself, for the instructor alone.
    """

    exercise: str
    status: str
    groups: Mapping[str, tuple[int, int]]
    says: str = ""
    feedback: str = ""
    kind: str = ""
    case: str = ""
    counts: tuple[str, ...] = ()
    rows: tuple[tuple[str, str, str], ...] = ()
    source: tuple[tuple[int, str, bool], ...] = ()
    mistake: tuple[str, str] | None = None
    seed: int = 0
    notes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def points(self) -> int:
        return sum(earned for earned, _ in self.groups.values())

    @property
    def possible(self) -> int:
        return sum(possible for _, possible in self.groups.values())

    @property
    def passed(self) -> bool:
        return self.status == "passed"

    def with_note(self, note: str) -> Result:
        """The same with one more note."""
        return self.with_notes([note])

    def with_notes(self, notes: Iterable[str]) -> Result:
        """The same with more notes."""
        return replace(self, notes=(*self.notes, *notes))

    def with_remarks(self, remarks: Iterable[str]) -> Result:
        """The same with more remarks."""
        return replace(self, remarks=(*self.remarks, *remarks))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, parts: Mapping[str, Any]) -> Result:
        """From JSON, whose lists become tuples again.

        Raises
        ------
        KeyError, TypeError, ValueError
            It is no result.
        """
        parts = {"remarks": (), **parts}  # a report that was written before there were any has none
        values = {field.name: parts[field.name] for field in fields(cls)}
        values["groups"] = {str(name): (int(a), int(b)) for name, (a, b) in values["groups"].items()}
        for name in ("counts", "notes", "remarks"):
            values[name] = tuple(map(str, values[name]))
        for name in ("rows", "source"):
            values[name] = tuple(map(tuple, values[name]))
        if values["mistake"] is not None:
            first, second = values["mistake"]
            values["mistake"] = (str(first), str(second))
        return cls(**values)
