"""What an exercise is: inputs, an oracle, a tolerance, groups with points, hints, and the mistakes it knows.

A module of :mod:`tinyvllm_ref.course.exercises` holds one lesson, as ``LESSON``. Nothing else needs to change for
a new exercise; ``docs/writing-lessons.md`` shows how one is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .lab import Lab

CLEAN = "clean"
"""The group of points for a kernel in which the checks of full mode find nothing, in any case."""

PARTS = ("Orientation", "A model is a file", "Kernels", "One transformer", "Generation at scale")
"""Titles of the parts of the course."""

KINDS = MappingProxyType(
    {
        "kernel": "a cp.RawKernel",
        "function": "a function",
        "class": "a class",
        "source": "a string of CUDA C++",
        "value": "a value",
    }
)


@dataclass(frozen=True)
class Case:
    """One call of an answer.

    Attributes
    ----------
    label : str
        What a person calls it: ``"n = 1,000, 96 threads"``.
    inputs : mapping
        NumPy arrays, numbers, strings, None, and lists and dicts of these: what can be sent to another process.
    group : str
        The group of points that it belongs to.
    """

    label: str
    inputs: Mapping[str, Any]
    group: str = "small"


@dataclass(frozen=True)
class Tolerance:
    """How far an array may be from the expected one: ``|got - expected| <= absolute + relative * |expected|``.

    `why` says where the bound comes from.
    """

    relative: float = 0.0
    absolute: float = 0.0
    why: str = "exact"


EXACT = Tolerance()


@dataclass(frozen=True)
class Mistake:
    """A complete wrong answer, and what it says of whoever gives it.

    Attributes
    ----------
    name : str
        Short, in words: ``"last element dropped"``.
    answer : str
        Source of a whole answer cell that makes it.
    says : str
        One or two sentences: what was assumed, and what is so.
    question : str
        What ``hint(id)`` asks whoever made it. No code.
    variants : tuple of str
        Further complete answers that make the same mistake in another way.
    """

    name: str
    answer: str
    says: str
    question: str
    variants: tuple[str, ...] = ()

    @property
    def answers(self) -> tuple[str, ...]:
        """All answers that make it."""
        return (self.answer, *self.variants)


def with_changes(answer: str, changes: Iterable[tuple[str, str]]) -> str:
    """A right answer with some of its lines written otherwise: most mistakes are made so.

    Parameters
    ----------
    answer : str
    changes : iterable of (str, str)
        What stands there, and what stands there instead, one after the other.

    Raises
    ------
    ValueError
        A text to change is not there: the right answer is another one by now.
    """
    for old, new in changes:
        if old not in answer:
            raise ValueError(f"with_changes: {old!r} does not stand in the answer")
        answer = answer.replace(old, new)
    return answer


@dataclass(frozen=True)
class Hints:
    """Three tiers: a question about the failing case; the rule and a hand example; code with holes.

    `question` may use ``{case}``, the label of the smallest failing case, and the names of its inputs.
    """

    question: str
    rule: str
    code: str


@dataclass(frozen=True, eq=False)
class Exercise:
    """One exercise.

    Attributes
    ----------
    id, title : str
        ``"06.2"``, and what follows the dash in the comment of its cell.
    answer : str
        The variable that the answer cell makes.
    kind : str
        A key of :data:`KINDS`.
    cases : callable
        ``cases(rng) -> list[Case]``, drawn from a :class:`numpy.random.Generator`. The first is the smallest.
    run : callable
        ``run(answer, inputs, lab) -> dict``: calls the answer and gives plain outputs by name. It may use nothing
        but its arguments and what it imports inside: where a class is graded its source alone goes to the process
        that runs the answer.
    expected : callable
        ``expected(inputs) -> dict`` of the same names: the oracle, in NumPy float64 or by the reference.
    points : mapping
        Points by group of cases; the group :data:`CLEAN` is for kernels in which full mode finds nothing.
    hints : Hints
    mistakes : tuple of Mistake
        At least three.
    tolerance : Tolerance or mapping of str to Tolerance
        For all outputs, or by name.
    verify : callable, optional
        ``verify(inputs, outputs, observed) -> str | None``: what else must hold when the values are right (launches,
        bytes, allocations, as counted in emulation); the sentence says what does not.
    arguments : tuple of str
        Parameter names of a function, in order; a wrong number of them is reported as such.
    uses : tuple of str
        Earlier parts that the answer may name.
    builds_on : tuple of str
        Earlier exercises of the lesson, whose answers come before this one.
    makes : mapping
        Parts that a right answer makes: name of the part -> name in the answer.
    file : str
        Where the parts are kept in ``my_engine/``.
    stretch : bool
        Marked so, and nothing depends on it.
    riddle : bool
        What is expected is the whole answer, and a report keeps it to itself.
    seconds : float
        The time that one case may take.
    runs_engine : bool
        `run` calls functions of the engine, whose arrays are the device's: with a GPU it runs there alone.
    """

    id: str
    title: str
    answer: str
    kind: str
    cases: Callable[[np.random.Generator], list[Case]]
    run: Callable[[Any, Mapping[str, Any], Lab], dict[str, Any]]
    expected: Callable[[Mapping[str, Any]], dict[str, Any]]
    points: Mapping[str, int]
    hints: Hints
    mistakes: tuple[Mistake, ...]
    tolerance: Tolerance | Mapping[str, Tolerance] = EXACT
    verify: Callable[[Mapping[str, Any], dict[str, Any], Any], str | None] | None = None
    arguments: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    builds_on: tuple[str, ...] = ()
    makes: Mapping[str, str] = field(default_factory=dict)
    file: str = ""
    stretch: bool = False
    riddle: bool = False
    seconds: float = 5.0
    runs_engine: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"exercise {self.id}: kind is {self.kind!r}; it must be one of {', '.join(KINDS)}"
            )
        if bool(self.makes) != bool(self.file):
            raise ValueError(f"exercise {self.id}: makes and file go together")

    @property
    def lesson(self) -> str:
        """Number of the lesson, two digits."""
        return self.id.partition(".")[0]

    def tolerance_of(self, output: str) -> Tolerance:
        """The tolerance of one output."""
        if isinstance(self.tolerance, Tolerance):
            return self.tolerance
        return self.tolerance.get(output, EXACT)


@dataclass(frozen=True)
class Quantity:
    """Something that is predicted, then measured.

    Attributes
    ----------
    label, unit : str
        ``"barriers in one block"`` and ``""`` or ``"bytes"``.
    measure : callable
        ``measure() -> number``: by running the thing, not by a formula.
    """

    label: str
    measure: Callable[[], float]
    unit: str = ""


@dataclass(frozen=True, eq=False)
class Prediction:
    """An exercise that asks for numbers before they are measured; credit is for committing to some.

    Attributes
    ----------
    id, title : str
    quantities : mapping
        Name of the argument of ``predict`` -> :class:`Quantity`.
    explains : str
        Why the numbers come out as they do, shown beside them once they are measured.
    hints : Hints
    points : int
    """

    id: str
    title: str
    quantities: Mapping[str, Quantity]
    explains: str
    hints: Hints
    points: int = 1
    stretch: bool = False

    @property
    def lesson(self) -> str:
        """Number of the lesson, two digits."""
        return self.id.partition(".")[0]


@dataclass(frozen=True)
class Setting:
    """One setting of an engine card's dial: the engine with some parts exchanged.

    Attributes
    ----------
    name, says : str
        ``"3 fraction bits"``, and what is so there.
    change : callable
        ``change(parts) -> dict`` of the parts that take the place of those in `parts`, the learner's own.
    """

    name: str
    says: str
    change: Callable[[Any], Mapping[str, Any]]


@dataclass(frozen=True)
class EngineCard:
    """What ``show_engine`` shows at the end of a lesson.

    Attributes
    ----------
    mistakes : tuple of (str, str)
        Exercise and name of a mistake whose text is worth reading beside the right one.
    prompt : str
    max_tokens : int
    note : str
        One sentence on what to look at.
    dial : tuple of Setting
        Engines that are nobody's mistake and worth comparing all the same.
    dial_title : str
        What the dial turns.
    sampling : mapping
        Options of SamplingParams; without any the story is greedy.
    beside : tuple of str
        Further prompts that are in the batch, in front of `prompt`; their stories are not shown.
    options : mapping
        Of the engine: fields of EngineConfig, such as a small ``num_blocks``.
    write : callable, optional
        ``write(parts, task) -> (token ids, text)``: how the story comes about, where the engine alone does not write it
        (lesson 24's comes out of a server, whose part counts in that card as well).
    without : tuple of str
        Parts of the learner's that stay out of this card, since the lesson's own part could not be seen with them.
    """

    mistakes: tuple[tuple[str, str], ...] = ()
    prompt: str = "Once upon a time"
    max_tokens: int = 48
    note: str = ""
    dial: tuple[Setting, ...] = ()
    dial_title: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    write: Callable[[Any, Any], tuple[Sequence[int], str]] | None = None


@dataclass(frozen=True, eq=False)
class Lesson:
    """One lesson of the course.

    Attributes
    ----------
    number, slug, title : str
        ``"06"``, ``"tree_reduction"``, ``"Tree reduction"``.
    part : int
        Index into :data:`PARTS`.
    minutes : int
        Of core work.
    exercises : tuple
        Of :class:`Exercise` and :class:`Prediction`, in order.
    engine : EngineCard
    pictures : mapping
        Name of an exercise -> ``picture(answer, cp) -> Figure``, drawn by ``show`` from the learner's own run.
    works : mapping
        Name of an exercise -> :class:`Work`, measured by ``measure``.
    passed : callable, optional
        Called, with nothing, whenever an exercise of the lesson has just passed: the capstone's last one leaves a
        program in ``my_engine/``.
    """

    number: str
    slug: str
    title: str
    part: int
    minutes: int
    exercises: tuple[Exercise | Prediction, ...]
    engine: EngineCard = EngineCard()
    pictures: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    works: Mapping[str, Work] = field(default_factory=dict)
    passed: Callable[[], None] | None = None

    def exercise(self, id: str) -> Exercise | Prediction:
        """One exercise by its id."""
        for exercise in self.exercises:
            if exercise.id == id:
                return exercise
        known = ", ".join(exercise.id for exercise in self.exercises)
        raise KeyError(f"lesson {self.number} has no exercise {id!r}; it has {known}")


@dataclass(frozen=True)
class Work:
    """A run to be measured, and the least that any kernel must move for it.

    Attributes
    ----------
    label : str
        Names the sizes.
    make : callable
        ``make(answer, cp) -> run``: prepares the arrays of the size for the machine, and gives a function
        without arguments that launches.
    read_bytes, write_bytes : int
        The fewest bytes of global memory that the result depends on and consists of.
    small : callable, optional
        The same as `make` at a size that the emulation counts in under a second; `make` where there is none.
    small_read_bytes, small_write_bytes : int
        The fewest bytes at the small size.
    note : str
        What to look at in the counted table.
    """

    label: str
    make: Callable[[Any, Any], Callable[[], None]]
    read_bytes: int
    write_bytes: int
    small: Callable[[Any, Any], Callable[[], None]] | None = None
    small_read_bytes: int = 0
    small_write_bytes: int = 0
    small_label: str = ""
    note: str = ""
