"""What `make` does on machines that have little: tools/setup.sh with a made-up PATH, and the conda file."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tinyvllm_ref import installing

REPOSITORY = Path(__file__).parents[1]
NEEDED = ("sh", "dirname", "touch", "cat", "env", "uname", "printf")


def machine(folder: Path, *programs: str) -> Path:
    """A folder for PATH that holds the shell's own needs and these programs."""
    folder.mkdir()
    for name in (*NEEDED, *programs):
        found = shutil.which(name)
        if found:
            (folder / name).symlink_to(found)
    return folder


def fake(path: Path, text: str) -> None:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


def setup(path: Path, venv: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", str(REPOSITORY / "tools/setup.sh"), str(venv), "course"],
        env={"PATH": str(path), "HOME": str(venv.parent)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_no_python_at_all(tmp_path):
    path = machine(tmp_path / "bin", "apt-get")
    done = setup(path, tmp_path / "venv")
    assert done.returncode == 1
    assert "Python 3.11 or newer" in done.stderr
    if shutil.which("apt-get"):
        assert "sudo apt-get install python3 python3-venv" in done.stderr


def test_an_old_python_is_refused_by_its_version(tmp_path):
    path = machine(tmp_path / "bin")
    fake(path / "python3", 'case "$2" in *print*) echo 3.10;; *) exit 1;; esac\n')
    done = setup(path, tmp_path / "venv")
    assert done.returncode == 1
    assert "Python 3.10 is too old" in done.stderr


def test_python_without_venv_says_what_to_install(tmp_path):
    path = machine(tmp_path / "bin")
    fake(path / "python3", f'case "$2" in *ensurepip*) exit 1;; esac\nexec {sys.executable} "$@"\n')
    done = setup(path, tmp_path / "venv")
    # virtualenv may be importable by this Python, and then it is used; else the line to type is shown.
    if done.returncode != 0:
        assert "venv, or uv, or virtualenv" in done.stderr or "installation failed" in done.stderr


def test_uv_is_used_where_there_is_no_python(tmp_path):
    path = machine(tmp_path / "bin", "mkdir", "ln")
    log = tmp_path / "log"
    fake(
        path / "uv",
        f'echo "$@" >> {log}\n'
        f'if [ "$1" = venv ]; then for last; do :; done; mkdir -p "$last/bin"; '
        f'ln -s {sys.executable} "$last/bin/python"; fi\n',
    )
    done = setup(path, tmp_path / "venv")
    assert done.returncode == 0, done.stderr
    said = log.read_text().splitlines()
    assert said[0].startswith("venv --quiet --seed --python >=3.11")
    assert "pip install" in said[1]
    assert ".[course]" in said[1]
    assert "CuPy is not installed, kernels will run in the CPU emulation" in done.stdout


def test_a_driver_brings_the_gpu_extra(tmp_path):
    path = machine(tmp_path / "bin", "mkdir", "ln")
    log = tmp_path / "log"
    fake(path / "nvidia-smi", "exit 0\n")
    fake(
        path / "uv",
        f'echo "$@" >> {log}\n'
        f'if [ "$1" = venv ]; then for last; do :; done; mkdir -p "$last/bin"; '
        f'ln -s {sys.executable} "$last/bin/python"; fi\n',
    )
    assert setup(path, tmp_path / "venv").returncode == 0
    assert ".[course,gpu]" in log.read_text()


def test_the_second_make_does_nothing():
    """The stamp is newer than what it depends on: make has nothing to install."""
    make = shutil.which("make")
    venv = os.environ.get("TINYVLLM_VENV", ".venv")
    if make is None or not (REPOSITORY / venv / ".installed-dev").exists():
        pytest.skip("not run through make")
    done = subprocess.run(
        [make, "-n", "lint", f"VENV={venv}"], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert "setup.sh" not in done.stdout


def conda_pip_section() -> list[str]:
    text = (REPOSITORY / "environment.yml").read_text()
    return re.findall(r"^      - (.+)$", text, re.MULTILINE)


def test_the_conda_file_names_what_the_course_needs():
    text = (REPOSITORY / "environment.yml").read_text()
    for package in (
        "jupyterlab",
        "numpy",
        "safetensors",
        "tokenizers",
        "matplotlib",
        "nbval",
        "cxx-compiler",
    ):
        assert re.search(rf"^  - {package}", text, re.MULTILINE), package
    section = conda_pip_section()
    assert any(line.startswith("cupy-cuda12x") for line in section)
    assert "-e .[course]" in section


@pytest.mark.slow
def test_the_conda_file_s_pip_section_resolves(tmp_path):
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("\n".join(conda_pip_section()) + "\n")
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "-r", str(requirements)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


# ---------------- what a person types afterwards
@pytest.fixture
def program(tmp_path, monkeypatch):
    """An installation in ``tmp_path``/venv that runs this, and none on PATH."""
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "tinyvllm"):
        fake(programs / name, "exit 0\n")
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setattr(installing, "_REPOSITORY", tmp_path / "elsewhere")
    monkeypatch.setenv("PATH", "/nowhere")
    return programs


def test_a_command_is_called_where_it_lies(program, tmp_path, monkeypatch):
    assert installing.typed("tinyvllm") == str(program / "tinyvllm")
    monkeypatch.setattr(installing, "_REPOSITORY", tmp_path)
    assert installing.typed("tinyvllm") == "venv/bin/tinyvllm"


def test_a_command_that_path_finds_is_called_by_its_name(program, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(program))
    assert installing.typed("tinyvllm") == "tinyvllm"
    other = tmp_path / "other"
    other.mkdir()
    fake(other / "tinyvllm", "exit 0\n")
    monkeypatch.setenv("PATH", str(other))
    assert installing.typed("tinyvllm") == str(program / "tinyvllm"), "PATH finds another one"


def test_make_help_names_the_targets_and_the_options_of_lab():
    done = subprocess.run(
        ["make", "help"], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True
    )
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[0].split()
    named = set(re.findall(r"make ([\w-]+)", done.stdout))
    assert set(targets) - named <= {"help", "lint"}
    for variable in re.findall(r"\$\(([A-Z]+_OPTIONS)\)", makefile):
        assert variable in done.stdout
