"""Tensor maps: what the driver is asked for, and what it says. Kernels that use them: test_warpgroup_linear.py."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tinyvllm_ref import dependent_launch
from tinyvllm_ref.dependent_launch import launch_dependent
from tinyvllm_ref.device import cp, is_gpu
from tinyvllm_ref.tensor_map import COLUMNS, tensor_map

MADE = bytes(range(128))


class _Driver:
    """Answers with a status, fills in a map, and remembers what it was asked for."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.asked: dict[str, Any] = {}

    def cuTensorMapEncodeTiled(self, *args: Any) -> int:
        to, kind, rank, address, shape, strides, box, steps, *modes = args
        self.asked = {
            "aligned": to.value % 64 == 0,
            "kind": kind.value,
            "rank": rank.value,
            "address": address.value,
            "shape": list(shape),
            "strides": list(strides),
            "box": list(box),
            "steps": list(steps),
            "modes": [mode.value for mode in modes],
        }
        ctypes.memmove(to, MADE, len(MADE))
        return self.status

    def cuGetErrorName(self, status: int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0

    def cuLaunchKernelEx(self, config: Any, function: int, values: Any, extra: Any) -> int:
        self.asked = {"map": ctypes.string_at(values[0], 128)}
        return 0


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(driver: _Driver) -> _Driver:
        monkeypatch.setattr(dependent_launch, "_driver", lambda: driver)
        return driver

    return use


def test_what_the_driver_is_asked_for(use: Any) -> None:
    """Of cuda.h: 16-bit numbers, no interleaving, a swizzle of 128 bytes, L2 promotion to 128, zeros outside."""
    driver, array = use(_Driver()), cp.zeros((40, 80), np.uint16)
    made = tensor_map(array, (80, 40), (160,), (COLUMNS, 16))
    assert made.tobytes() == MADE
    assert driver.asked == {
        "aligned": True,
        "kind": 1,
        "rank": 2,
        "address": array.data.ptr,
        "shape": [80, 40],
        "strides": [160],
        "box": [64, 16],
        "steps": [1, 1],
        "modes": [0, 3, 2, 0],
    }


def test_a_map_is_handed_to_a_kernel_by_value(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = use(_Driver())
    monkeypatch.setattr(dependent_launch, "has_dependent_launch", lambda: True)
    made = tensor_map(cp.zeros((8, 64), np.uint16), (64, 8), (128,), (COLUMNS, 8))
    kernel = SimpleNamespace(kernel=SimpleNamespace(ptr=0xF00), name="take")
    launch_dependent(kernel, (1,), (32,), (made,), stream=SimpleNamespace(ptr=0))
    assert driver.asked == {"map": MADE}


def test_a_refusal_says_what_was_asked_for(use: Any) -> None:
    use(_Driver(1))
    says = (
        r"cuTensorMapEncodeTiled of shape \(9, 4\), strides \(18,\), box \(64, 4\): "
        r"CUDA_ERROR_INVALID_VALUE \(1\)"
    )
    with pytest.raises(RuntimeError, match=says):
        tensor_map(cp.zeros((4, 9), np.uint16), (9, 4), (18,), (COLUMNS, 4))


@pytest.mark.gpu
@pytest.mark.skipif(not is_gpu or int(cp.cuda.Device().compute_capability) < 90, reason="no Hopper GPU")
def test_the_driver_itself_refuses_rows_that_copies_can_not_begin_at() -> None:
    with pytest.raises(RuntimeError, match=r"strides \(18,\).*CUDA_ERROR_INVALID_VALUE"):
        tensor_map(cp.zeros((4, 9), np.uint16), (9, 4), (18,), (COLUMNS, 4))
