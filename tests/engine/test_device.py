"""What is said of a GPU that can not be used: with a CuPy that is made up, in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tinyvllm_ref import device
from tinyvllm_ref.device import cp, free_bytes


def fake_cupy(raises="", capability=(9, 0), count=1, cuda=12080):
    """A CuPy with one device, or one whose runtime answers with an error."""

    def answer(value):
        def call(*args):
            if raises:
                raise RuntimeError(raises)
            return value

        return call

    properties = {"name": b"NVIDIA Something", "major": capability[0], "minor": capability[1]}
    runtime = SimpleNamespace(
        getDeviceCount=answer(count),
        deviceSynchronize=answer(None),
        getDeviceProperties=answer(properties),
        runtimeGetVersion=lambda: cuda,
    )
    return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, Device=lambda: SimpleNamespace(id=0)))


@pytest.fixture
def machine(monkeypatch):
    """Sets this process's CuPy, driver and CUDA_VISIBLE_DEVICES; what is found then."""

    def found(cupy, driver=True, visible=None):
        cupyx = SimpleNamespace(profiler=SimpleNamespace())
        for name, module in (("cupy", cupy), ("cupyx", cupyx), ("cupyx.profiler", cupyx.profiler)):
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(device, "has_driver", lambda: driver)
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return device._cupy()

    return found


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (10, 0), (12, 0)])
def test_a_card_that_is_new_enough_is_used(machine, capability):
    cupy = fake_cupy(capability=capability)
    assert machine(cupy)[0] is cupy


@pytest.mark.parametrize("capability", [(7, 0), (6, 1), (3, 5)])
def test_a_card_that_is_too_old_is_named(machine, capability):
    said = machine(fake_cupy(capability=capability))
    has = f"{capability[0]}.{capability[1]}"
    assert f"NVIDIA Something, has compute capability {has}; it must be 7.5 or more" in said


@pytest.mark.parametrize(
    ("cuda", "words"), [(12080, "525.60 or newer"), (13000, "580 or newer"), (14000, "update it,")]
)
def test_an_old_driver_is_told_which_one_its_cuda_needs(machine, cuda, words):
    said = machine(fake_cupy("cudaErrorInsufficientDriver: CUDA driver version is insufficient", cuda=cuda))
    assert f"older than CUDA {cuda // 1000} needs" in said
    assert words in said


@pytest.mark.parametrize("visible", ["", "7"])
def test_a_gpu_that_is_hidden_is_not_blamed_on_the_driver(machine, visible):
    said = machine(fake_cupy("cudaErrorNoDevice: no CUDA-capable device is detected"), visible=visible)
    assert f"CUDA_VISIBLE_DEVICES is {visible!r} and hides every GPU" in said
    assert "reinstall" not in said


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("cudaErrorNoDevice: no CUDA-capable device is detected", "whether `nvidia-smi` works"),
        ("cudaErrorMemoryAllocation: out of memory", "Other programs hold all of its memory"),
        (
            "cudaErrorDevicesUnavailable: CUDA-capable device(s) is/are busy or unavailable",
            "has it for itself",
        ),
        ("cudaErrorSystemDriverMismatch: system has unsupported display driver", "restart the machine"),
        ("cudaErrorSystemNotReady: system not yet initialized", "nvidia-fabricmanager"),
        ("cudaErrorUnknown: unknown error", "whether `nvidia-smi` works"),
    ],
)
def test_a_gpu_that_does_not_answer(machine, error, words):
    said = machine(fake_cupy(error))
    assert said.startswith(f"CuPy is installed, and the GPU does not answer ({error}). ")
    assert words in said
    assert "No NVIDIA driver is installed" in machine(fake_cupy(error), driver=False)


def test_no_gpu_at_all(machine):
    assert machine(fake_cupy(count=0)) == "CuPy finds no NVIDIA GPU on this machine"


def test_free_bytes_are_those_that_an_array_can_have():
    pool = cp.get_default_memory_pool()
    pool.free_all_blocks()
    try:
        pool.set_limit(pool.used_bytes() + (1 << 20))
        assert free_bytes() == 1 << 20
        array = cp.empty(1 << 19, "uint8")
        assert free_bytes() == 1 << 19
        del array  # which the pool keeps
        assert free_bytes() == 1 << 20
        kept = cp.empty(1 << 20, "uint8")
        with pytest.raises(MemoryError):
            cp.empty(512, "uint8")
        del kept
    finally:
        pool.set_limit(0)
        pool.free_all_blocks()


MEASURED_AGAIN = """
from tinyvllm_ref import LLM
sizes = []
for _ in range(3):
    llm = LLM("tiny-stories", max_num_seqs=512, memory_fraction=0.2)
    sizes.append(llm.engine.runner.num_blocks)
    del llm
print(sizes)
"""


def test_an_engine_after_another_gets_a_cache_as_large():
    """What CuPy keeps of the first one's arrays is free."""
    from test_lost_device import REPOSITORY, STAND_IN

    done = subprocess.run(
        [sys.executable, "-c", MEASURED_AGAIN],
        env=os.environ | STAND_IN,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    first, *others = json.loads(done.stdout)
    assert first > 100
    assert others == [first, first]
