"""A model that says what a test wants: its tokens are single bytes, and the `argmax` part reads them from a text."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from tinyvllm_ref import LLM
from tinyvllm_ref.assembly import Parts

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))

from models import tiny_folder  # noqa: F401


class Script:
    """An `argmax` that gives the bytes of a text, one a step, and then the end token."""

    END = 257  # </s> of the model in tests/engine/models.py

    def __init__(self) -> None:
        self.ids: list[int] = []

    def say(self, data: bytes) -> None:
        self.ids = [*data, self.END]

    def __call__(self, logits, out):
        out.set(np.full(out.shape, self.ids.pop(0), np.int32))
        return out


def scripted_llm(folder: Path, script: Script) -> LLM:
    return LLM(folder, parts=Parts().replace(argmax=script), num_blocks=64, max_num_seqs=1)
