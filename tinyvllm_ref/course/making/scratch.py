"""A place of its own for a run of a notebook: nothing of the user's is read or written, but kernels stay compiled."""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...emulation import cache


@contextmanager
def scratch_environment() -> Iterator[dict[str, str]]:
    """Environment variables for a kernel that runs a notebook from the start, in the emulation.

    ``TINYVLLM_HOME`` and ``TINYVLLM_MY_ENGINE`` are temporary folders. The home's ``kernels`` is a link to the
    user's cache of compiled kernels, so that they are compiled once and not once a run; its entries are named by
    the hash of what made them, so one run can not see another's in it. (Grading must not do this: a submission
    could plant a library.)
    """
    _make_font_list()
    with tempfile.TemporaryDirectory(prefix="tinyvllm-", ignore_cleanup_errors=True) as folder:
        home = Path(folder) / "home"
        home.mkdir()
        (home / "kernels").symlink_to(cache.folder().resolve(), target_is_directory=True)
        yield {
            **os.environ,
            "TINYVLLM_DEVICE": "cpu",
            "TINYVLLM_CHECKS": "full",
            "TINYVLLM_HOME": str(home),
            "TINYVLLM_MY_ENGINE": str(Path(folder) / "my_engine"),
            "IPYTHONDIR": str(Path(folder) / "ipython"),  # the user's own startup files stay out
        }


def _make_font_list() -> None:
    """Matplotlib makes it once a machine, and says so on stderr when that takes long: not in a notebook."""
    with contextlib.suppress(ImportError):
        importlib.import_module("matplotlib.font_manager")
