"""The choice between cuBLAS and our own kernel."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tinyvllm_ref import blas
from tinyvllm_ref.device import cp

from .cases import bits, poisoned, random


def test_both_paths_agree() -> None:
    rng = random("paths")
    x, w = cp.asarray(bits(rng, 9, 130)), cp.asarray(bits(rng, 33, 130))
    outs = [cp.asnumpy(blas.linear_of(path)(x, w, poisoned(9, 33))) for path in blas.PATHS]
    np.testing.assert_allclose(outs[0], outs[1], rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(
        cp.asnumpy(blas.linear(x, w, poisoned(9, 33))), outs[blas.PATHS.index(blas.best_path())]
    )


@pytest.mark.parametrize(
    ("gpu", "capability", "path"),
    [
        (True, "70", "kernel"),
        (True, "75", "kernel"),
        (True, "80", "cublas"),
        (True, "120", "cublas"),
        (False, "00", "cublas"),
    ],
)
def test_the_choice(monkeypatch: pytest.MonkeyPatch, gpu: bool, capability: str, path: str) -> None:
    card = SimpleNamespace(
        cuda=SimpleNamespace(Device=lambda: SimpleNamespace(compute_capability=capability))
    )
    monkeypatch.setattr(blas, "cp", card)
    monkeypatch.setattr(blas, "is_gpu", gpu)
    assert blas.best_path.__wrapped__() == path


def test_an_unknown_path() -> None:
    with pytest.raises(ValueError, match="path is 'cutlass'; it must be one of: cublas, kernel"):
        blas.linear_of("cutlass")
