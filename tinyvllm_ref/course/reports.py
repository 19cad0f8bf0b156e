"""What checks, hints and measurements say: frozen records that become HTML in a notebook and plain text elsewhere."""

from __future__ import annotations

import functools
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from . import look

WIDTH = 100
_TEMPLATES = Path(__file__).parent / "templates"


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["prose"] = prose
    environment.filters["markdown"] = markdown
    return environment


def render(template: str, **values: Any) -> str:
    """Fill a template of ``templates/``; every value is escaped, and the course's style sheet comes with it."""
    return _environment().get_template(template).render({"style": Markup(look.SHEET)} | values)


def prose(text: str) -> Markup:
    """One paragraph as HTML: `code` and **bold** are marked up, everything else is escaped."""
    html = str(escape(text))
    html = re.sub(r"`([^`\n]+)`", r"<code>\1</code>", html)
    return Markup(re.sub(r"\*\*([^*\n]+)\*\*", r"<b>\1</b>", html))


def markdown(text: str) -> Markup:
    """The little Markdown of hints as HTML: paragraphs, lists with ``-``, code between three backticks."""
    out: list[str] = []
    for k, piece in enumerate(
        re.split(r"^```[^\n]*\n?", textwrap.dedent(text).strip("\n"), flags=re.MULTILINE)
    ):
        if k % 2:
            out.append(str(code_lines(piece)))
            continue
        for paragraph in re.split(r"\n\s*\n", piece.strip("\n")):
            lines = [line.strip() for line in paragraph.splitlines() if line.strip()]
            if lines and all(line.startswith("- ") for line in lines):
                out.append("<ul>" + "".join(f"<li>{prose(line[2:])}</li>" for line in lines) + "</ul>")
            elif lines:
                out.append(f"<p>{prose(' '.join(lines))}</p>")
    return Markup("\n".join(out))


def code_lines(text: str) -> Markup:
    """Source text as a block of code."""
    lines = text.strip("\n").expandtabs(4).splitlines()
    return Markup(
        '<pre class="tv-code">' + "".join(f"<span>{escape(line) or ' '}</span>" for line in lines) + "</pre>"
    )


# ---------------- plain text


def _paragraph(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent) or [""]


def _pairs(pairs: Mapping[str, str]) -> list[str]:
    widest = max((len(label) for label in pairs), default=0)
    lines = []
    for label, text in pairs.items():
        hang = " " * (widest + 4)
        lines += textwrap.wrap(f"  {label:<{widest}}  {text}", WIDTH, subsequent_indent=hang)
    return lines


def _columns(heads: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "  ") -> list[str]:
    """A table in plain text; columns of numbers stand right, and cells too long for the width are cut."""
    cells = [[str(cell) for cell in row] for row in rows]
    most = max(8, (WIDTH - len(indent)) // max(1, len(heads)) * 2)
    cells = [[cell if len(cell) <= most else cell[: most - 1] + "…" for cell in row] for row in cells]
    right = [number_column(cells, c) for c in range(len(heads))]
    wide = [max(len(str(head)), *(len(row[c]) for row in cells), 0) for c, head in enumerate(heads)]
    wide = [min(w, WIDTH) for w in wide]

    def line(row: Sequence[str]) -> str:
        both = zip(row, wide, right, strict=True)
        return (indent + "  ".join(f"{cell:>{w}}" if r else f"{cell:<{w}}" for cell, w, r in both)).rstrip()

    return [line([str(head) for head in heads]), *(line(row) for row in cells)]


def number_column(rows: Sequence[Sequence[str]], column: int) -> bool:
    """Whether every cell of a column begins like a number, so that it is set to the right."""
    return bool(rows) and all(re.match(r"^[<~≈]?[-+−]?[.\d]|^-?(nan|inf)\b", row[column]) for row in rows)


# ---------------- the records


@dataclass(frozen=True)
class Report:
    """Why an answer did not pass.

    Attributes
    ----------
    exercise, title : str
        ``"06.2"`` and its name.
    headline : str
        One sentence: what is wrong.
    kind : str
        ``"wrong values"``, ``"error"``, ``"not filled in"``, or another two words.
    case : mapping of str to str
        The smallest failing case, label by label.
    counts : sequence of str
        Short lines: "3 of 1,000 elements differ".
    rows : sequence of (index, expected, got)
        The first elements that differ.
    source : sequence of (int, str, bool)
        Line number, text, and whether the fault lies there; of the learner's own source.
    mistake : (str, str) or None
        Title and sentence of the misconception that the answer shows.
    next_step : str
        What to call next: ``hint("06.2")``.
    groups : sequence of (str, int, int, bool or None)
        Group of cases, points, of how many, and whether it passed (None: not run).
    notes : sequence of str
        Further remarks.
    fault_note : str
        A remark under the fault's line.
    """

    exercise: str
    title: str
    headline: str
    kind: str = "wrong values"
    case: Mapping[str, str] = field(default_factory=dict)
    counts: Sequence[str] = ()
    rows: Sequence[tuple[Any, Any, Any]] = ()
    source: Sequence[tuple[int, str, bool]] = ()
    mistake: tuple[str, str] | None = None
    next_step: str = ""
    groups: Sequence[tuple[str, int, int, bool | None]] = ()
    notes: Sequence[str] = ()
    fault_note: str = ""

    def render_html(self) -> str:
        """The report as one card; all text of the learner's is escaped."""
        cells = [tuple(str(cell) for cell in row) for row in self.rows]
        return render("report.html.jinja", report=self, rows=cells, groups=[_group(g) for g in self.groups])

    def render_text(self) -> str:
        """The report in lines of at most 100 characters."""
        lines = [f"{self.exercise} {self.title}: {self.kind}", *_paragraph(self.headline)]
        if self.case:
            lines += ["", "Smallest failing case", *_pairs(self.case)]
        if self.counts or self.rows:
            lines += ["", *(line for count in self.counts for line in _paragraph(count, "  "))]
        if self.rows:
            rows = [tuple(str(cell) for cell in row) for row in self.rows]
            lines += _columns(("index", "expected", "got"), rows)
        if self.source:
            lines += ["", "Your source", *self._source_lines()]
        if self.mistake:
            name, says = self.mistake
            lines += ["", *_paragraph(f"It looks like: {name}"), *_paragraph(says, "  ")]
        if self.groups:
            lines += ["", *_columns(("cases", "", "points"), [_group(group) for group in self.groups])]
        if self.notes:
            lines += ["", *(line for note in self.notes for line in _paragraph(note))]
        if self.next_step:
            lines += ["", f"Next: {self.next_step}"]
        return "\n".join(lines)

    def _source_lines(self) -> list[str]:
        wide = max(len(str(number)) for number, _, _ in self.source)
        lines = []
        for number, text, fault in self.source:
            line = f"{'->' if fault else '  '} {number:>{wide}} | {text.expandtabs(4)}".rstrip()
            lines.append(line if len(line) <= WIDTH else line[: WIDTH - 1] + "…")
            if fault and (says := self.says_of(number)):
                lines += _paragraph(says, " " * (wide + 6))
        return lines

    def says_of(self, line: int) -> str:
        """The remark under a line: of two sides, each of which names its line, the one that is there."""
        sides = [re.fullmatch(r"(.*), line (\d+)", side) for side in self.fault_note.split("; ")]
        places = {int(side[2]) for side in sides if side}
        if (
            len(sides) < 2
            or not all(sides)
            or places != {number for number, _, fault in self.source if fault}
        ):
            return self.fault_note
        return "; ".join(side[1] for side in sides if side and int(side[2]) == line)

    def _repr_html_(self) -> str:
        return self.render_html()

    def __str__(self) -> str:
        return self.render_text()


@dataclass(frozen=True)
class Link:
    """Where to go on: what it is called, and its address, relative to the notebook; "" where it has none."""

    text: str
    href: str = ""


@dataclass(frozen=True)
class PassCard:
    """That an answer has passed: one line of text, and in a notebook a small card that also says what comes next.

    Attributes
    ----------
    exercise, title : str
        ``"06.2"`` and its name.
    points : str
        ``"3 of 3 points"``.
    kept : sequence of str
        Files of ``my_engine/`` that it is kept in; none where that could not be written.
    following : sequence of Link
        What comes next. It depends on the exercise alone, so that the card is the same whenever it is shown.
    """

    exercise: str
    title: str
    points: str
    kept: Sequence[str] = ()
    following: Sequence[Link] = ()

    def _repr_html_(self) -> str:
        html = render("pass.html.jinja", card=self, style=Markup(look.PASS_CSS))
        return html.replace("\n", "")

    def __str__(self) -> str:
        return f"{self.exercise} passed: {self.title} ({self.points})"


def _group(group: tuple[str, int, int, bool | None]) -> tuple[str, str, str]:
    name, points, of_points, passed = group
    return name, "not run" if passed is None else "passed" if passed else "failed", f"{points} of {of_points}"


@dataclass(frozen=True)
class HintCard:
    """A hint of tier 1 to 3, or a solution (tier 0), in the little Markdown of ``markdown`` or as code."""

    exercise: str
    tier: int
    text: str
    is_code: bool = False
    note: str = ""

    @property
    def heading(self) -> str:
        """What the card is."""
        return f"{self.exercise} hint {self.tier} of 3" if self.tier else f"{self.exercise} a solution"

    def _repr_html_(self) -> str:
        body = code_lines(self.text) if self.is_code else markdown(self.text)
        return render("hint.html.jinja", card=self, body=body)

    def __str__(self) -> str:
        text = textwrap.dedent(self.text).strip("\n")
        if not self.is_code:
            pieces = re.split(r"^```[^\n]*\n?", text, flags=re.MULTILINE)
            text = "\n".join(
                _code(piece) if k % 2 else _unmarked(piece) for k, piece in enumerate(pieces)
            ).strip("\n")
        return "\n".join([self.heading, "", text, *(["", *_paragraph(self.note)] if self.note else [])])


def _code(piece: str) -> str:
    return textwrap.indent(piece.rstrip("\n"), "    ")


def _unmarked(piece: str) -> str:
    """Paragraphs wrapped, without the marks of bold text; list items keep their lines."""
    out = []
    for paragraph in re.split(r"\n\s*\n", piece.strip("\n")):
        lines = [line.strip().replace("**", "") for line in paragraph.splitlines()]
        if all(line.startswith("- ") for line in lines):
            out.append("\n".join(textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in lines))
        else:
            out.append(textwrap.fill(" ".join(lines), WIDTH))
    return "\n\n".join(out)


@dataclass(frozen=True)
class Table:
    """A small table with a title and notes; columns of numbers are set to the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table {self.title!r}: a row of {len(row)} cells under {len(self.columns)} columns"
                )

    def _cells(self) -> list[list[str]]:
        return [[str(cell) for cell in row] for row in self.rows]

    def _repr_html_(self) -> str:
        cells = self._cells()
        right = [number_column(cells, c) for c in range(len(self.columns))]
        return render("table.html.jinja", table=self, cells=cells, right=right)

    def __str__(self) -> str:
        lines = [self.title, *_columns(self.columns, self._cells())]
        return "\n".join([*lines, *(line for note in self.notes for line in _paragraph(note))])


@dataclass(frozen=True)
class WrongStory:
    """What a mistake does to the text: its name and sentence, the story, how many tokens agree, the logit error.

    The logit error is None where the part has no share in the logits of given tokens, as a tokenizer has none.
    `error` is the text of the error where the engine could not write at all.
    """

    name: str
    says: str
    text: str
    same_tokens: int
    logit_error: float | None
    error: str = ""


@dataclass(frozen=True)
class EngineReport:
    """The engine card: whose parts ran, the learner's story beside the reference's, and this lesson's mistakes.

    Attributes
    ----------
    lesson, title : str
        ``"06"`` and its name.
    own, total : sequence of str, int
        The learner's parts, and how many the engine has.
    runs : sequence of (str, int or None)
        This lesson's parts and how often each ran; None where that was not counted.
    missing : sequence of str
        This lesson's parts that are still the reference's.
    prompt, text, reference_text : str
        The stories, prompt included.
    same_tokens, tokens : int
        How many of the tokens agree from the start, and how many there are.
    logit_error : float or None
        Relative error of the logits; None in a lesson whose parts have no share in them.
    mistakes : sequence of WrongStory
        What each does to the text.
    note : str
        A remark.
    dial : sequence of WrongStory
        The text at each setting of the lesson's dial.
    dial_title : str
        What the dial turns.
    """

    lesson: str
    title: str
    own: Sequence[str]
    total: int
    runs: Sequence[tuple[str, int | None]]
    missing: Sequence[str]
    prompt: str
    text: str
    reference_text: str
    same_tokens: int
    tokens: int
    logit_error: float | None
    mistakes: Sequence[WrongStory] = ()
    note: str = ""
    dial: Sequence[WrongStory] = ()
    dial_title: str = ""

    @property
    def headline(self) -> str:
        """Whose the engine is."""
        return f"{len(self.own)} of {self.total} parts are yours"

    @property
    def agreement(self) -> str:
        """How the learner's story compares with the reference's."""
        if not self.own:
            return "The reference wrote this; a part of yours joins when its check passes."
        return _agreement(self.same_tokens, self.tokens) + _error_text(self.logit_error)

    @property
    def run_lines(self) -> list[str]:
        """This lesson's parts, in words."""
        ran = [_ran(part, count) for part, count in self.runs]
        return ran + [f"{part} is still the reference's." for part in self.missing]

    def _repr_html_(self) -> str:
        stories, dial = (
            [(one, *_split(one.text, self.reference_text), _says_of(one, self)) for one in some]
            for some in (self.mistakes, self.dial)
        )
        own = _split(self.text, self.reference_text)
        return render("engine.html.jinja", card=self, own=own, stories=stories, dial=dial)

    def __str__(self) -> str:
        lines = [f"Engine, lesson {self.lesson} {self.title}: {self.headline}"]
        lines += [line for text in self.run_lines for line in _paragraph(text)]
        lines += ["", *_paragraph(self.agreement), *_paragraph(self.text, "  ")]
        if self.text != self.reference_text:
            lines += ["", "The reference wrote", *_paragraph(self.reference_text, "  ")]
        titled = [(f"{self.dial_title}: {one.name}", one) for one in self.dial]
        titled += [(f"With the mistake: {wrong.name}", wrong) for wrong in self.mistakes]
        for title, one in titled:
            lines += ["", *_paragraph(title), *_paragraph(_says_of(one, self))]
            lines += _paragraph(one.text, "  ") if one.text else []
        return "\n".join([*lines, *(["", *_paragraph(self.note)] if self.note else [])])


def _ran(part: str, count: int | None) -> str:
    if count is None:
        return f"Your {part} is compiled into the kernels that wrote this story."
    if count == 0:
        return f"Your {part} was not needed for this story."
    return f"Your {part} ran {count:,} {'time' if count == 1 else 'times'} for this story."


def _agreement(same: int, tokens: int) -> str:
    if same >= tokens:
        return f"All {tokens:,} tokens are the reference's"
    if same == 0:
        return "No token agrees: the first already differs"
    return f"The first {same:,} of {tokens:,} tokens agree; token {same + 1:,} differs"


def _error_text(error: float | None) -> str:
    """The second sentence of a story's note; none where the logits tell nothing."""
    if error is None:
        return "."
    if math.isnan(error):
        return ". The logits are not numbers."
    return (
        ". The logits are equal to the bit."
        if error == 0
        else f". Relative error of the logits: {error:.2g}."
    )


def _says_of(wrong: WrongStory, card: EngineReport) -> str:
    if wrong.error:
        return f"The engine stops: {wrong.error}"
    agreement = _agreement(wrong.same_tokens, card.tokens)
    if wrong.same_tokens >= card.tokens and len(wrong.text) > len(card.reference_text):
        agreement += ", and behind them the text goes on"
    return agreement + _error_text(wrong.logit_error)


def _split(text: str, reference: str) -> tuple[str, str]:
    """A story up to where it leaves the reference's, and the rest."""
    same = 0
    while same < min(len(text), len(reference)) and text[same] == reference[same]:
        same += 1
    return text[:same], text[same:]
