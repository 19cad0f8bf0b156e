"""The figures of a card in README.md are those of the report that they come from, rounded as README prints them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
LADDER = ROOT / "benchmarks" / "decode_ladder.md"

Row = dict[str, str]


@dataclass(frozen=True)
class Figure:
    """One figure, as README prints it, and what the report has for it in README's unit."""

    what: str
    printed: str
    reported: float

    def differs(self) -> str:
        """Both figures, where they differ by more than the rounding of what is printed; else nothing."""
        value = number(self.printed)
        decimals = len(self.printed.partition(".")[2])
        # The report is rounded, too: a half, say, may have been rounded to either side.
        if abs(value - self.reported) <= 0.5 * 10**-decimals + 1e-9 * abs(value):
            return ""
        right = f"{self.reported:,.{decimals}f}"
        return f"{self.what}: README.md has {self.printed}, benchmarks/decode_ladder.md {self.reported:,.10g} ({right})"


def number(text: str) -> float:
    """``1,558`` or ``87.3%`` as a number."""
    return float(text.replace(",", "").removesuffix("%"))


def section(text: str, heading: str) -> str:
    """What stands under the heading that begins so."""
    found = re.search(rf"^## {re.escape(heading)}.*?\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"there is no section {heading!r}"
    return found[1]


def tables(text: str) -> Iterator[list[Row]]:
    """Each table of a page, its rows by the names of the columns."""
    for found in re.finditer(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[0].splitlines()]
        yield [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def table_with(text: str, *columns: str) -> list[Row]:
    """The table that has these columns, which must be one."""
    found = [rows for rows in tables(text) if rows and set(columns) <= set(rows[0])]
    assert len(found) == 1, f"{len(found)} tables have the columns {columns}"
    return found[0]


def figures_of_the_table(readme: str, ladder: str) -> Iterator[Figure]:
    """Decoding by the engine: README's table beside the report's rows with the fast path on."""
    shown = table_with(
        readme, "requests at once", "tokens/s, decoding", "a token, ms", "of the card's read bandwidth"
    )
    measured = {
        row["requests"]: row for row in table_with(section(ladder, "The engine"), "fast path", "us a token")
        if row["fast path"] == "on"
    }  # fmt: skip
    assert [row["requests at once"] for row in shown] == list(measured)
    for row in shown:
        requests, there = row["requests at once"], measured[row["requests at once"]]
        for column, reported in (
            ("tokens/s, decoding", number(there["tokens/s, decode"])),
            ("a token, ms", number(there["us a token"]) / 1000),
            ("of the card's read bandwidth", number(there["of read"])),
        ):
            what = f"{column}, {requests} at once"
            yield Figure(what, row[column].removesuffix("%").strip(), reported)


def figures_of_the_sentence(readme: str, ladder: str) -> Iterator[Figure]:
    """First tokens, and a token behind a long context."""
    text = " ".join(readme.split())
    first = re.search(
        r"The first token of ([\d,]+) comes after ([\d.,]+) ms, that of ([\d,]+) after ([\d.,]+) ms; "
        r"one request with ([\d,]+) tokens behind it gets its next in ([\d.,]+) ms\.", text
    )  # fmt: skip
    assert first, "README.md has no sentence of first tokens"
    column = "first token of the engine, ms"
    prefills = {row["tokens"]: row for row in table_with(section(ladder, "Prefill"), "tokens", column)}
    for tokens, printed in ((first[1], first[2]), (first[3], first[4])):
        yield Figure(f"first token of {tokens}, ms", printed, number(prefills[tokens][column]))
    rungs = table_with(section(ladder, f"Decode, 1 request, context {first[5]}"), "rung", "measured us")
    persistent = [row for row in rungs if row["rung"].startswith("5.")]
    assert len(persistent) == 1, f"rung 5 has {len(persistent)} rows"
    what = f"a token with {first[5]} behind it, ms"
    yield Figure(what, first[6], number(persistent[0]["measured us"]) / 1000)


def differences(readme: str, ladder: str) -> list[str]:
    found = [*figures_of_the_table(readme, ladder), *figures_of_the_sentence(readme, ladder)]
    return [said for figure in found if (said := figure.differs())]


def test_the_card_s_figures_are_those_of_the_report():
    different = differences(README.read_text(encoding="utf-8"), LADDER.read_text(encoding="utf-8"))
    assert not different, "\n" + "\n".join(different)


# ---------------- the rule itself

MEASURED = """\
## The engine: prompts

| fast path | requests | us a token | of read | tokens/s, decode |
| --- | --- | --- | --- | --- |
| off | 1 | 4,000.0 | 10.0% | 250 |
| on | 1 | 641.8 | 87.3% | 1,558 |
| on | 8 | 885.0 | 64.5% | 9,039 |

## Prefill of one prompt

| tokens | measured ms | first token of the engine, ms |
| --- | --- | --- |
| 16 | 1.306 | 1.919 |
| 2,048 | 8.226 | 8.561 |

## Decode, 1 request, context 512

| rung | measured us |
| --- | --- |
| 0. simple | 3,956.3 |
| 5. one persistent kernel | 742.8 |
"""
SHOWN = """\
| requests at once | tokens/s, decoding | a token, ms | of the card's read bandwidth | another engine |
|---|---|---|---|---|
| 1 | 1,558 | 0.64 | 87 % | 13 to 23 |
| 8 | 9,039 | 0.89 | 65 % | |

The first token of 16 comes after 1.9 ms, that of 2,048
after 8.6 ms; one request with 512 tokens behind it gets its next in 0.74 ms.
"""


def test_figures_that_are_rounded_are_the_same():
    assert differences(SHOWN, MEASURED) == []
    assert (
        differences(SHOWN.replace("0.89", "0.88").replace("65 %", "64 %"), MEASURED) == []
    )  # of 885.0 and 64.5


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("1,558", "1,556", "tokens/s, decoding, 1 at once: README.md has 1,556, {} 1,558 (1,558)"),
        ("0.89", "0.90", "a token, ms, 8 at once: README.md has 0.90, {} 0.885 (0.89)"),
        ("87 %", "88 %", "of the card's read bandwidth, 1 at once: README.md has 88, {} 87.3 (87)"),
        ("1.9 ms", "2.0 ms", "first token of 16, ms: README.md has 2.0, {} 1.919 (1.9)"),
        ("8.6 ms", "8.5 ms", "first token of 2,048, ms: README.md has 8.5, {} 8.561 (8.6)"),
        ("0.74 ms", "0.75 ms", "a token with 512 behind it, ms: README.md has 0.75, {} 0.7428 (0.74)"),
    ],
)
def test_a_figure_that_drifts_is_named_with_both(right, wrong, said):
    assert differences(SHOWN.replace(right, wrong), MEASURED) == [said.format("benchmarks/decode_ladder.md")]


def test_a_row_a_column_or_a_sentence_that_is_gone_is_no_agreement():
    for readme, ladder in (
        (SHOWN.replace("| 8 |", "| 9 |"), MEASURED),
        (SHOWN.replace("a token, ms", "a token"), MEASURED),
        (SHOWN.replace("The first token", "A first token"), MEASURED),
        (SHOWN, MEASURED.replace("| on | 8 |", "| off | 8 |")),
        (SHOWN, MEASURED.replace("5. one", "4. one")),
    ):
        with pytest.raises(AssertionError):
            differences(readme, ladder)
