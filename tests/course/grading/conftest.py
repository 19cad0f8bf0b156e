"""Grading in tests: nothing of the person who runs them takes part."""

import pytest

from .handing_in import level


@pytest.fixture(autouse=True)
def _own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("TINYVLLM_MY_ENGINE", str(tmp_path / "my_engine"))
    monkeypatch.setenv("TINYVLLM_DEVICE", "cpu")


@pytest.fixture
def contained():
    """For answers that would harm the machine where limits are all that stops them."""
    if level() == "limits":
        pytest.skip(
            "neither bubblewrap nor another user keeps answers apart here, and this one must not run so"
        )


@pytest.fixture
def bubblewrapped():
    """For what only bubblewrap stops."""
    if level() != "bubblewrap":
        pytest.skip("bubblewrap does not work here")
