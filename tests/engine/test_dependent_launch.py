"""Dependent launches: what the driver is asked for, its structures beside NVIDIA's header, and the way back."""

from __future__ import annotations

import ctypes
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests import nvrtc
from tinyvllm_ref import dependent_launch
from tinyvllm_ref.dependent_launch import has_dependent_launch, launch_dependent
from tinyvllm_ref.device import cp, is_gpu

ADD = r"""
extern "C" __global__ void add(const float* x, float* out, int n, float much) {
    extern __shared__ float row[];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    row[threadIdx.x] = x[i];
    out[i] = row[threadIdx.x] + much;
}
"""


def _arguments() -> tuple[Any, Any, np.int32, np.float32]:
    return cp.arange(100, dtype=np.float32), cp.zeros(100, np.float32), np.int32(100), np.float32(0.5)


def test_the_result_is_that_of_an_ordinary_launch() -> None:
    """On a card of compute capability 9.0 and above through the driver, elsewhere the launch itself."""
    x, out, n, much = _arguments()
    kernel = cp.RawKernel(ADD, "add")
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    for some, where in ((out, None), (cp.zeros(100, np.float32), stream)):
        launch_dependent(kernel, (4,), (32,), (x, some, n, much), 128, where)
        cp.cuda.Device().synchronize()
        np.testing.assert_array_equal(cp.asnumpy(some), np.arange(100) + 0.5)


class _Driver:
    """Answers with a status each time, and remembers what it was asked for while it could be read."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.seen: list[dict[str, Any]] = []

    def cuLaunchKernelEx(self, config: Any, function: int, values: Any, extra: Any) -> int:
        config = config._obj
        attribute = config.attributes[0]
        kinds = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_float)
        self.seen.append(
            {
                "grid": tuple(config.grid),
                "block": tuple(config.block),
                "shared_mem": config.shared_mem,
                "stream": config.stream,
                "attributes": [(attribute.id, attribute.value)] * config.attribute_count,
                "values": [kind.from_address(at).value for kind, at in zip(kinds, values, strict=True)],
                "function": function,
                "extra": extra,
            }
        )
        return self.statuses.pop(0)

    def cuGetErrorName(self, status: int, name: Any) -> int:
        if status == 1:
            name._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0


KERNEL = SimpleNamespace(kernel=SimpleNamespace(ptr=0xF00), name="add")


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(driver: _Driver) -> _Driver:
        monkeypatch.setattr(dependent_launch, "has_dependent_launch", lambda: True)
        monkeypatch.setattr(dependent_launch, "_driver", lambda: driver)
        return driver

    return use


def test_what_the_driver_is_asked_for(use: Any) -> None:
    driver = use(_Driver(0))
    x, out, n, much = _arguments()
    launch_dependent(KERNEL, (4, 2), (32,), (x, out, n, much), 128, SimpleNamespace(ptr=0xABC))
    assert driver.seen == [
        {
            "grid": (4, 2, 1),
            "block": (32, 1, 1),
            "shared_mem": 128,
            "stream": 0xABC,
            "attributes": [(6, 1)],
            "values": [x.data.ptr, out.data.ptr, 100, 0.5],
            "function": 0xF00,
            "extra": None,
        }
    ]


def test_a_thread_without_a_context_gets_one(use: Any) -> None:
    driver = use(_Driver(201, 0))
    launch_dependent(KERNEL, (4,), (32,), _arguments())
    assert driver.seen[0] == driver.seen[1]


@pytest.mark.parametrize(("status", "name"), [(1, "CUDA_ERROR_INVALID_VALUE"), (4321, "an unknown error")])
def test_a_refusal_has_the_drivers_name(use: Any, status: int, name: str) -> None:
    use(_Driver(status))
    with pytest.raises(RuntimeError, match=rf"cuLaunchKernelEx of add, grid \(4,\).*: {name} \({status}\)"):
        launch_dependent(KERNEL, (4,), (32,), _arguments())


@pytest.mark.parametrize("wrong", [3, 0.5, None, np.zeros(3, np.float32)])
def test_an_argument_without_a_type(use: Any, wrong: Any) -> None:
    driver = use(_Driver())
    x, out, n, _ = _arguments()
    with pytest.raises(
        TypeError, match=r"launch_dependent: argument 3 is .*must be an array on the device or"
    ):
        launch_dependent(KERNEL, (4,), (32,), (x, out, n, wrong))
    assert driver.seen == []


def _offset(structure: str, member: str) -> str:
    """offsetof, by what NVRTC's front end has for it."""
    return f"__INTADDR__(&((({structure}*)0)->{member}))"


def test_the_structures_are_those_of_nvidias_header() -> None:
    """cuda.h itself, compiled by NVRTC with what ctypes thinks of it as assertions."""
    try:
        text = (nvrtc.header_folder() / "cuda.h").read_text(encoding="utf-8")
    except nvrtc.NvrtcMissing as missing:
        pytest.skip(str(missing))
    config, attribute = dependent_launch._Config, dependent_launch._Attribute
    names = {
        **{"grid": "gridDimX", "block": "blockDimX", "shared_mem": "sharedMemBytes", "stream": "hStream"},
        **{"attributes": "attrs", "attribute_count": "numAttrs"},
    }
    facts = {
        "sizeof(CUlaunchConfig)": ctypes.sizeof(config),
        "sizeof(CUlaunchAttribute)": ctypes.sizeof(attribute),
        _offset("CUlaunchAttribute", "id"): attribute.id.offset,
        _offset("CUlaunchAttribute", "value"): attribute.value.offset,
        "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION": (
            dependent_launch._PROGRAMMATIC_STREAM_SERIALIZATION
        ),
        "CUDA_ERROR_INVALID_CONTEXT": dependent_launch._INVALID_CONTEXT,
        **{_offset("CUlaunchConfig", theirs): getattr(config, ours).offset for ours, theirs in names.items()},
    }
    source = "typedef unsigned int uint32_t; typedef unsigned long long uint64_t;\n"
    source += re.sub(r"^\s*#\s*include\s*<.*$", "", text, flags=re.MULTILINE)
    source += "".join(f'static_assert({what} == {value}, "{what}");\n' for what, value in facts.items())
    done = nvrtc.compile_source(source, "compute_90", ("-default-device",))
    assert done.ok, done.log
    wrong = source.replace("sizeof(CUlaunchConfig) == ", "sizeof(CUlaunchConfig) == 1 + ")
    assert not nvrtc.compile_source(wrong, "compute_90", ("-default-device",)).ok


@pytest.mark.parametrize(
    ("gpu", "capability", "has"),
    [(True, "75", False), (True, "89", False), (True, "90", True), (True, "120", True), (False, "00", False)],
)
def test_which_devices_have_it(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, capability: str, has: bool
) -> None:
    card = SimpleNamespace(
        cuda=SimpleNamespace(Device=lambda: SimpleNamespace(compute_capability=capability))
    )
    monkeypatch.setattr(dependent_launch, "cp", card)
    monkeypatch.setattr(dependent_launch, "is_gpu", gpu)
    assert has_dependent_launch.__wrapped__() == has


@pytest.mark.gpu
@pytest.mark.skipif(not is_gpu, reason="no NVIDIA GPU")
def test_in_a_graph() -> None:
    x, out, n, much = _arguments()
    kernel, stream = cp.RawKernel(ADD, "add"), cp.cuda.Stream(non_blocking=True)
    launch_dependent(kernel, (4,), (32,), (x, out, n, much), 128, stream)
    stream.synchronize()
    stream.begin_capture()
    launch_dependent(kernel, (4,), (32,), (x, out, n, much), 128, stream)
    graph = stream.end_capture()
    x += 1
    cp.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    np.testing.assert_array_equal(cp.asnumpy(out), np.arange(100) + 1.5)
