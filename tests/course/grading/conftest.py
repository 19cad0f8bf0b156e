"""Grading in tests: nothing of the person who runs them takes part."""

import pytest

from .handing_in import level


@pytest.fixture(autouse=True)
def _own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("TINYVLLM_MY_ENGINE", str(tmp_path / "my_engine"))
    monkeypatch.setenv("TINYVLLM_DEVICE", "cpu")


@pytest.fixture
def contained():
    """For answers that would harm the machine, or that only bubblewrap stops."""
    if level() != "bubblewrap":
        pytest.skip("bubblewrap does not work here, and this answer must not run without it")
