"""The command, and what the repository says of itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

REPOSITORY = Path(__file__).parents[1]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tinyvllm_ref", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_doctor_says_it_in_ten_lines():
    done = run("doctor", TINYVLLM_DEVICE="cpu")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 10
    names = [line.split()[0] for line in lines]
    assert names[:5] == ["System", "Python", "Driver", "CuPy", "Device"]
    assert names[5:] == ["Compiler", "Emulation", "Packages", "Caches", "Settings"]


def test_doctor_says_what_grading_has(monkeypatch, tmp_path):
    from tinyvllm_ref import doctor

    (tmp_path / "bwrap").write_text("#!/bin/sh\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor._packages().value.endswith("; for grading: packages, bubblewrap")
    monkeypatch.setenv("PATH", "")
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "psutil" else version(name))
    said = doctor._packages()
    assert said.value.endswith(
        "; for grading: psutil missing (make grade brings them), no bubblewrap (docs/instructors.md)"
    )
    assert said.advice == ""


def test_doctor_counts_the_cache_while_another_process_compiles(monkeypatch, tmp_path):
    from tinyvllm_ref import doctor

    (tmp_path / "kept.so").write_bytes(bytes(2**20))
    (tmp_path / "made.tmp").write_bytes(bytes(2**20))
    entries = list(os.scandir(tmp_path))
    (tmp_path / "made.tmp").unlink()  # renamed between the listing and the look at its size
    monkeypatch.setattr(doctor.os, "scandir", lambda folder: entries)
    assert "(1.0 MB of compiled kernels)" in doctor._caches().value


def test_a_folder_that_is_given_as_a_name_is_pointed_out(monkeypatch, tmp_path):
    from tinyvllm_ref.checkpoint.names import resolve

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"is given as \./mine\.$"):
        resolve("mine")
    assert resolve("./mine").samefile(tmp_path / "mine")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"CXX": "no-such-compiler"}, "no-such-compiler"),
        ({"TINYVLLM_DEVICE": "tpu"}, "TINYVLLM_DEVICE is 'tpu'; it must be one of: auto, cuda, cpu"),
        ({"TINYVLLM_DEVICE": "cuda"}, "TINYVLLM_DEVICE=cuda, but CuPy"),
    ],
)
def test_doctor_names_what_is_wrong(environment, words):
    if environment.get("TINYVLLM_DEVICE") == "cuda" and Path("/proc/driver/nvidia/version").exists():
        pytest.skip("there is a GPU")
    done = run("doctor", **environment)
    assert done.returncode == 0, done.stderr
    assert words in done.stdout
    assert "->" in done.stdout


def test_no_arguments_print_the_help():
    assert "doctor" in run().stdout


def test_the_readme_s_kernel_fails_as_the_readme_says(tmp_path):
    text = (REPOSITORY / "README.md").read_text()
    (code,) = re.findall(r"```python\n(import numpy.*?)```", text, re.DOTALL)
    (said,) = re.findall(r"```\n(OutOfBounds.*?)```", text, re.DOTALL)
    script = tmp_path / "script.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TINYVLLM_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert done.stderr.endswith("tinyvllm_ref.emulation.errors." + said)


def test_links_in_the_readme_lead_somewhere():
    text = (REPOSITORY / "README.md").read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (REPOSITORY / target).exists(), target


def test_device_gives_the_emulation_where_there_is_no_gpu():
    code = "from tinyvllm_ref.device import cp, is_gpu; print(cp.__name__, is_gpu)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TINYVLLM_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("tinyvllm_ref.emulation False\n", "")


def test_a_broken_cupy_does_not_stop_the_emulation(tmp_path):
    (tmp_path / "cupy.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')\n")
    code = "from tinyvllm_ref.device import cp; print(cp.__name__)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TINYVLLM_DEVICE": "auto"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("tinyvllm_ref.emulation\n", "")
    environment["TINYVLLM_DEVICE"] = "cuda"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert "libcuda.so.1" in done.stderr
    assert 'pip install "cupy-cuda12x' in done.stderr


def test_numpy_is_new_enough_for_the_promotion_rules():
    assert np.lib.NumpyVersion(np.__version__) >= "2.1.0"


def test_the_readme_s_text_is_generated(tmp_path):
    text = (REPOSITORY / "README.md").read_text()
    (code,) = re.findall(r"```python\n(from tinyvllm_ref import LLM.*?)```", text, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TINYVLLM_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(", there was a")
    again = run("generate", "Once upon a time", "--max-tokens", "8", TINYVLLM_DEVICE="cpu")
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith("Once upon a time, there was a")
