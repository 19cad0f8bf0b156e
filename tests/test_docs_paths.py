"""Files that the documents name are there, and the index of benchmarks/ has a true row for each report."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
INDEX = ROOT / "benchmarks" / "README.md"
REPORTS = sorted(set((ROOT / "benchmarks").glob("*.md")) - {INDEX})
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), INDEX]
# Folders that a name in a document may be relative to, beside the document's own.
BASES = [
    "",
    "tinyvllm_ref",
    "tinyvllm_ref/course",
    "tinyvllm_ref/course/given",
    "tinyvllm_ref/emulation",
    "tinyvllm_ref/kernels",
    "tests/engine",
]
NOT_THERE_YET = ("my_engine/", "report/", ".venv/")  # made by what a document describes


def named(document):
    """Targets of links, and what stands in backticks and looks like a path of the project."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    paths = [
        word
        for word in re.findall(r"`([A-Za-z0-9_./-]+)`", text)
        if re.search(r"^(lessons|solutions|docs|tests|benchmarks|data|tinyvllm_ref)/", word)
        or (re.search(r"\.(py|md|cpp|cu|cuh|h)$", word) and not word.startswith(NOT_THERE_YET))
    ]
    return [link for link in links if link] + [
        path for path in paths if "NN" not in path and "NAME" not in path
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_that_is_named_exists(document):
    missing = [
        name
        for name in named(document)
        if not (document.parent / name).exists() and not any((ROOT / base / name).exists() for base in BASES)
    ]
    assert missing == []


def test_there_is_something_to_look_at():
    assert sum(len(named(document)) for document in DOCUMENTS) > 40


def rows_of_the_index():
    """(file, what it shows, on what, by which command) of each row."""
    text = INDEX.read_text(encoding="utf-8")
    return re.findall(r"^\| \[([\w.]+)\]\(\1\) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)


def test_the_index_of_benchmarks_has_a_row_for_each_report_and_names_each_file():
    assert sorted(name for name, *_ in rows_of_the_index()) == [path.name for path in REPORTS]
    text = INDEX.read_text(encoding="utf-8")
    files = [path for path in INDEX.parent.iterdir() if path.suffix in (".py", ".csv")]
    assert [path.name for path in files if path.name not in text] == []


@pytest.mark.parametrize("report", REPORTS, ids=lambda path: path.name)
def test_a_row_of_the_index_says_what_the_report_or_its_script_says(report):
    (row,) = [row for row in rows_of_the_index() if row[0] == report.name]
    text = report.read_text(encoding="utf-8")
    assert ("H200" in row[2]) == ("NVIDIA H200" in text)
    commands = re.findall(r"`((?:python|tinyvllm) [^`]+)`", row[3])
    assert commands
    script = report.with_suffix(".py")
    head = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) if script.exists() else ""
    for command in commands:
        assert f"`{command}`" in " ".join(text.split()) or command in (head or ""), command
