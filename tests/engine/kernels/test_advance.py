"""What a decode step leaves for the next one: drawn tokens, longer contexts; rows that pad the batch stay."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from tests import nvrtc
from tinyvllm_ref.device import cp, is_gpu
from tinyvllm_ref.kernels import advance as module
from tinyvllm_ref.kernels import source
from tinyvllm_ref.kernels.advance import advance

from .cases import random

HERE = pytest.param("here", marks=pytest.mark.skipif(is_gpu, reason="the emulation is not used on a card"))
CARD = pytest.param("card", marks=[pytest.mark.gpu, pytest.mark.skipif(not is_gpu, reason="no NVIDIA GPU")])
I32 = np.int32


def _rows(count: int) -> list[np.ndarray]:
    """chosen, ids, context_lens and steps; every third context is 0, and one has the largest numbers."""
    rng = random("advance", count)
    arrays = [rng.integers(0, 2**31 - 2, count).astype(I32) for _ in range(4)]
    arrays[2][::3] = 0
    arrays[0][-1], arrays[2][-1], arrays[3][-1] = 2**31 - 1, 131_071, 2**31 - 2
    return arrays


def _want(chosen: np.ndarray, ids: np.ndarray, lens: np.ndarray, steps: np.ndarray) -> list[np.ndarray]:
    live = lens != 0
    return [chosen, np.where(live, chosen, ids), lens + live, steps + live]


@pytest.mark.parametrize("where", [HERE, CARD])
@pytest.mark.parametrize("mode", ["full", "fast"])
@pytest.mark.parametrize("threads", [1, 32, 128])
@pytest.mark.parametrize("count", [1, 2, 31, 33, 128, 129, 300])
def test_values(where: str, mode: str, threads: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_THREADS", threads)
    arrays = _rows(count)
    # Rows behind those of the launch must stay: a step of fewer requests works on the first rows of larger arrays.
    given = [cp.asarray(np.concatenate([array, [7, 7]]).astype(I32)) for array in arrays]
    with nullcontext() if is_gpu else cp.checks(mode):
        advance(*(array[:count] for array in given))
    for got, want in zip(given, _want(*arrays), strict=True):
        np.testing.assert_array_equal(cp.asnumpy(got), [*want, 7, 7])


def test_steps_one_after_the_other() -> None:
    arrays = [cp.asarray(array) for array in ([5, 6, 7], [1, 2, 3], [4, 0, 1], [0, 9, 2])]
    given = [array.astype(I32) for array in arrays]
    for _ in range(10):
        advance(*given)
    assert [array.tolist() for array in given] == [[5, 6, 7], [5, 2, 7], [14, 0, 11], [10, 9, 12]]


@pytest.mark.parametrize("name", ["chosen", "ids", "context_lens", "steps"])
def test_what_is_refused(name: str) -> None:
    specs = dict.fromkeys(("chosen", "ids", "context_lens", "steps"), ((3,), I32))

    def call(**changed: Any) -> None:
        advance(*({key: cp.zeros(*spec) for key, spec in specs.items()} | changed).values())

    call()
    for wrong, says in (
        (cp.zeros(3, np.int64), "int64"),
        (cp.zeros((3, 1), I32), re.escape("(3, 1)")),
        (cp.zeros(6, I32)[::2], "C-contiguous"),
        (np.zeros(3, I32), "NumPy"),
        (cp.zeros(4, I32), "must be"),
    ):
        with pytest.raises(ValueError, match=f"advance: .*{says}"):
            call(**{name: wrong})


def test_no_requests() -> None:
    advance(*(cp.zeros(0, I32) for _ in range(4)))


@pytest.mark.parametrize("arch", ["compute_75", "compute_80", "compute_90", "compute_120"])
def test_nvidias_compiler_accepts_it(arch: str) -> None:
    try:
        done = nvrtc.compile_source(source.text("advance"), arch)
    except nvrtc.NvrtcMissing as missing:
        pytest.skip(str(missing))
    assert done.ok, done.log
    assert done.log == ""
    assert ".entry advance(" in done.ptx


@pytest.mark.gpu
@pytest.mark.skipif(not is_gpu, reason="no NVIDIA GPU")
def test_in_a_graph() -> None:
    """Recorded once and started three times: each start goes on from what is in the arrays."""
    arrays = _rows(70)
    arrays[3][-1] = 9
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        given = [cp.asarray(array) for array in arrays]
        stream.begin_capture()
        advance(*given)
        graph = stream.end_capture()
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
    want = arrays
    for _ in range(3):
        want = _want(*want)
    for got, values in zip(given, want, strict=True):
        np.testing.assert_array_equal(cp.asnumpy(got), values)
