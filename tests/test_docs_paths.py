"""Files that the documents name are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
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
