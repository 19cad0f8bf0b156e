"""Streams, events, the device, the namespaces of ``cp.cuda``, and timing that claims nothing."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tinyvllm_ref.emulation import cuda, cupyx, report, stream
from tinyvllm_ref.emulation.array import asarray, zeros
from tinyvllm_ref.emulation.errors import CompileException, CUDADriverError, CUDARuntimeError


def test_streams_nest() -> None:
    assert cuda.get_current_stream() == cuda.Stream.null
    outer, inner = cuda.Stream(), cuda.Stream(non_blocking=True)
    with outer:
        assert cuda.get_current_stream() is outer
        with inner as entered:
            assert entered is inner
            assert cuda.get_current_stream() is inner
        assert cuda.get_current_stream() is outer
        with outer, outer:
            pass
        assert cuda.get_current_stream() is outer
    assert cuda.get_current_stream() == cuda.Stream.null


def test_a_stream_is_restored_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="inside"), cuda.Stream():
        raise RuntimeError("inside")
    assert cuda.get_current_stream() == cuda.Stream.null


def test_use_holds_for_its_thread() -> None:
    mine = cuda.Stream()
    assert mine.use() is mine
    try:
        seen: list[Any] = []
        thread = threading.Thread(target=lambda: seen.append(cuda.get_current_stream()))
        thread.start()
        thread.join()
        assert seen == [cuda.Stream.null]
        assert cuda.get_current_stream() is mine
    finally:
        cuda.Stream.null.use()


def test_stream_identity() -> None:
    assert (cuda.Stream.null.ptr, cuda.Stream.ptds.ptr) == (0, 2)
    assert cuda.Stream(null=True) == cuda.Stream.null
    assert cuda.Stream() != cuda.Stream()
    first = cuda.Stream(non_blocking=True)
    assert (first.is_non_blocking, first.done, first.is_capturing) == (True, True, False)
    assert cuda.ExternalStream(first.ptr) == first
    assert len({first, cuda.Stream.null, cuda.Stream(null=True)}) == 2
    with pytest.raises(ValueError, match="null and ptds cannot both be true"):
        cuda.Stream(null=True, ptds=True)


def test_events_and_callbacks() -> None:
    mine = cuda.Stream()
    event = mine.record()
    assert event.done
    event.synchronize()
    mine.wait_event(event)
    mine.synchronize()
    called: list[Any] = []
    mine.add_callback(lambda s, status, arg: called.append((s, status, arg)), "a")
    mine.launch_host_func(called.append, "b")
    assert called == [(mine, 0, "a"), "b"]
    with pytest.raises(TypeError, match="an Event is needed"):
        mine.wait_event("event")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="recorded on a Stream"):
        event.record("stream")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Timing must be disabled for interprocess events"):
        cuda.Event(interprocess=True)


def test_elapsed_time_is_not_a_number_and_says_so_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_said", set())
    start, end = cuda.Event(), cuda.Event()
    start.record()
    end.record()
    assert math.isnan(cuda.get_elapsed_time(start, end))
    assert math.isnan(cuda.get_elapsed_time(start, end))
    out, err = capfd.readouterr()
    assert out.count("no GPU code ran") == 1
    assert err == ""


def test_elapsed_time_has_cudas_conditions() -> None:
    recorded = cuda.Stream.null.record()
    with pytest.raises(CUDARuntimeError, match=r"cudaErrorInvalidResourceHandle.*end event was not recorded"):
        cuda.get_elapsed_time(recorded, cuda.Event())
    silent = cuda.Event(disable_timing=True)
    silent.record()
    with pytest.raises(CUDARuntimeError, match="start event was made with disable_timing=True"):
        cuda.get_elapsed_time(silent, recorded)


@pytest.mark.parametrize("call", [lambda: cuda.Stream().begin_capture(), lambda: cuda.Stream().end_capture(),
                                  lambda: cuda.Graph()])  # fmt: skip
def test_graphs_need_a_card(call: Callable[[], Any]) -> None:
    with pytest.raises(NotImplementedError, match="CUDA graphs need a card"):
        call()


# ---------------------------------------------------------------- the device


def test_the_device_says_what_it_is() -> None:
    properties = cuda.runtime.getDeviceProperties(0)
    assert properties["name"] == b"CPU emulation (no GPU)"
    assert (properties["major"], properties["minor"]) == (0, 0)
    assert not cuda.is_available()
    assert cuda.runtime.driverGetVersion() == cuda.runtime.runtimeGetVersion() == 0
    assert cuda.Device().compute_capability == "00"


def test_the_device_has_cudas_limits() -> None:
    properties, attributes = cuda.runtime.getDeviceProperties(0), cuda.Device(0).attributes
    assert properties["maxThreadsPerBlock"] == attributes["MaxThreadsPerBlock"] == 1024
    assert properties["sharedMemPerBlock"] == attributes["MaxSharedMemoryPerBlock"] == 49152
    assert properties["sharedMemPerBlockOptin"] == attributes["MaxSharedMemoryPerBlockOptin"] == 101376
    assert properties["warpSize"] == attributes["WarpSize"] == 32
    assert properties["maxThreadsDim"] == (1024, 1024, 64)
    assert properties["maxGridSize"] == (2**31 - 1, 65535, 65535)
    assert properties["multiProcessorCount"] >= 1
    for name, value in attributes.items():
        assert cuda.runtime.deviceGetAttribute(getattr(cuda.runtime, f"cudaDevAttr{name}"), 0) == value
    with pytest.raises(CUDARuntimeError, match="no attribute 9999"):
        cuda.runtime.deviceGetAttribute(9999, 0)


def test_there_is_one_device() -> None:
    assert cuda.runtime.getDeviceCount() == 1
    assert cuda.runtime.getDevice() == cuda.get_device_id() == 0
    with cuda.Device(0) as device:
        assert device == cuda.Device()
        device.use().synchronize()
        assert int(device) == 0
    cuda.runtime.setDevice(0)
    cuda.runtime.deviceSynchronize()
    for call in (lambda: cuda.Device(1), lambda: cuda.runtime.setDevice(3), lambda: cuda.Device().pci_bus_id):
        with pytest.raises(CUDARuntimeError, match="cudaErrorInvalidDevice") as caught:
            call()
        assert caught.value.status == 101


def test_namespaces_have_cupys_names() -> None:
    assert cuda.compiler.CompileException is CompileException
    assert cuda.driver.CUDADriverError is CUDADriverError
    assert cuda.runtime.CUDARuntimeError is CUDARuntimeError
    assert cuda.device.Device is cuda.Device
    assert cuda.device.get_cublas_handle() == cuda.get_cublas_handle() == cuda.Device().cublas_handle
    assert cuda.memory.MemoryPool is cuda.MemoryPool
    assert cuda.stream.Event is cuda.Event
    assert cuda.pinned_memory.PinnedMemory is cuda.PinnedMemory
    assert cuda.Stream is stream.Stream
    for name in cuda.__all__:
        assert hasattr(cuda, name)


@pytest.mark.parametrize(("space", "name"), [
    (cuda, "nvtx"), (cuda.runtime, "mallocArray"), (cuda.driver, "launchKernel"), (cuda.device, "peer"),
])  # fmt: skip
def test_what_is_missing_is_named(space: Any, name: str) -> None:
    with pytest.raises(AttributeError, match=rf"^cupy\.cuda[\w.]*\.{name} is not in the CPU emulation"):
        getattr(space, name)


# ---------------------------------------------------------------- cupyx


def test_benchmark_measures_the_cpu_and_claims_nothing_of_a_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []

    def work(n: int, *, twice: bool = False) -> None:
        calls.append(n * (2 if twice else 1))

    result = cupyx.profiler.benchmark(work, (3,), {"twice": True}, n_repeat=4, n_warmup=2)
    assert calls == [6] * 6
    assert result.name == "work"
    assert (result.cpu_times.shape, result.gpu_times.shape) == ((4,), (1, 4))
    assert (result.cpu_times >= 0).all()
    assert np.isnan(result.gpu_times).all()
    assert "CPU:" in str(result)
    assert "nan" in str(result)
    assert capfd.readouterr().err == ""


def test_benchmark_stops_at_its_time_limit() -> None:
    result = cupyx.profiler.benchmark(lambda: None, n_repeat=10**9, n_warmup=0, max_duration=0.01, name="f")
    assert 1 <= len(result.cpu_times) < 10**9
    assert result.to_str().startswith("f ")


@pytest.mark.parametrize(("arguments", "text"), [
    ({"func": 3}, "`func` should be a callable"), ({"args": [1]}, "`args` should be of tuple type"),
    ({"kwargs": [1]}, "`kwargs` should be of dict type"),
    ({"n_repeat": 1.5}, "`n_repeat` should be an integer"),
    ({"n_repeat": 0}, "`n_repeat` is 0; it must be 1 or more"), ({"devices": (1,)}, "the only device is 0"),
])  # fmt: skip
def test_benchmark_checks_its_arguments(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        cupyx.profiler.benchmark(**{"func": lambda: None, **arguments})


def test_scatter_add_counts_an_index_as_often_as_it_comes() -> None:
    a = zeros(4)
    cupyx.scatter_add(a, asarray([1, 1, 3]), asarray([1.0, 2.0, 4.0]))
    assert a.tolist() == [0, 3, 0, 4]
    with pytest.raises(TypeError, match="Unsupported type"):
        cupyx.scatter_add(np.zeros(3), [0], 1.0)  # type: ignore[arg-type]
