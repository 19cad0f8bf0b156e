"""Grading and a class's copy need what the extra `grade` declares, and not what a developer happens to have too."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tinyvllm_ref import installing
from tinyvllm_ref.checkpoint.names import REPOSITORY
from tinyvllm_ref.course.grading import runtime

from .handing_in import level


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(extra: str) -> set[str]:
    """What an extra of pyproject.toml declares, the project's own dependencies and other extras of it included."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    found, wanted = set[str](), [*project["dependencies"], *project["optional-dependencies"][extra]]
    while wanted:
        one = Requirement(wanted.pop())
        if normal(one.name) == project["name"]:
            wanted += [line for more in one.extras for line in project["optional-dependencies"][more]]
        else:
            found.add(normal(one.name))
    return found


def installed_with(names: set[str]) -> set[str]:
    """These distributions and all that they require in turn."""
    found, wanted = set[str](), list(names)
    while wanted:
        name = normal(wanted.pop())
        if name in found:
            continue
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(name)
        for one in map(Requirement, lines):
            # Extras of a requirement are taken all, which is more than enough: dask's "distributed" among them.
            if one.marker is None or one.marker.evaluate({"extra": ""}) or normal(one.name) == "distributed":
                wanted.append(one.name)
    return found


def modules_of(distributions: set[str]) -> set[str]:
    """Top-level modules that come with distributions."""
    return {
        module
        for module, names in importlib.metadata.packages_distributions().items()
        if {normal(name) for name in names} & distributions
    }


def imported_at_once(path: Path) -> set[str]:
    """Top-level modules that a file imports as soon as it is imported itself."""
    found = set[str]()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(str(node.module).split(".")[0])
    return found - set(sys.stdlib_module_names) - {"tinyvllm_ref"}


def test_what_the_grading_modules_import_is_declared():
    """By the files themselves: every module of grading, of making lessons, and what these import of the project."""
    folders = (runtime.PACKAGE / "course" / "grading", runtime.PACKAGE / "course" / "making")
    names = [
        f"tinyvllm_ref.course.{path.parent.name}.{path.stem}"
        for folder in folders
        for path in folder.glob("*.py")
    ]
    files = {runtime.PACKAGE / name for name in runtime.needed_files([*names, "tinyvllm_ref.course.grade"])}
    files |= {path for folder in folders for path in folder.glob("*.py")}
    there = modules_of(installed_with(declared("grade")))
    used = {module: path.name for path in files if path.suffix == ".py" for module in imported_at_once(path)}
    assert {"numpy", "jinja2", "nbformat"} <= set(used)
    assert {module: name for module, name in used.items() if module not in there} == {}


WITHOUT_THE_REST = """
import sys

allowed = set({allowed!r}) | set(sys.stdlib_module_names)


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {known!r} and name.split(".")[0] not in allowed:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Refuse())
from tinyvllm_ref.cli import main

main()
"""


@pytest.fixture(scope="module")
def only_grade(tmp_path_factory):
    """A script that is the command, where no module can be imported that the extra `grade` does not bring."""
    allowed = modules_of(installed_with(declared("grade"))) | {"tinyvllm_ref"}
    known = sorted(importlib.metadata.packages_distributions())
    assert "schemathesis" in known, "the developer's environment has more than that of an instructor"
    assert "schemathesis" not in allowed
    script = tmp_path_factory.mktemp("only") / "tinyvllm.py"
    script.write_text(WITHOUT_THE_REST.format(allowed=sorted(allowed), known=known))
    return script


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.slow
def test_a_class_is_graded_with_what_the_extra_brings(only_grade, tmp_path):
    """With nbval, as `make grade` does it."""
    handed_in, report = REPOSITORY / "data" / "submissions" / "partial", tmp_path / "report"
    folder = tmp_path / "in"
    shutil.copytree(handed_in, folder / "ada")
    done = run(only_grade, "grade", str(folder), "--report", str(report), "--containment", level())
    assert done.returncode == 0, done.stderr
    assert (report / "index.html").is_file()
    assert "nbval did not finish" not in (report / "index.html").read_text()


def test_a_class_s_copy_is_made_with_what_the_extra_brings(only_grade, tmp_path):
    done = run(only_grade, "build-lessons", "--class", str(tmp_path / "class"))
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "class" / "lessons").glob("*.ipynb"))) == 25


def test_the_line_that_installs_names_the_running_python(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(sys, "executable", str(REPOSITORY / ".venv" / "bin" / "python"))
    assert installing.install_extra("grade") == '.venv/bin/python -m pip install -e ".[grade]"'
    assert installing.pip_install("gguf") == ".venv/bin/python -m pip install gguf"
    monkeypatch.chdir(tmp_path)
    assert installing.install_extra("grade") == (
        f'{REPOSITORY}/.venv/bin/python -m pip install -e "{REPOSITORY}[grade]"'
    )


def test_no_message_names_a_bare_pip():
    """The emulation, which stands alone, names a package; everything else the running Python."""
    bare = [
        f"{path.relative_to(REPOSITORY)}: {line.strip()}"
        for path in (REPOSITORY / "tinyvllm_ref").rglob("*.py")
        if "emulation" not in path.parts and path.name != "installing.py"
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"(?<!-m )\bpip install\b", line)
    ]
    assert bare == []
