"""Allocations, pools, pinned memory, and the functions of ``cp.cuda.runtime`` that take addresses."""

from __future__ import annotations

import ctypes
import gc
import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tinyvllm_ref.emulation import cuda, cupyx, memory, native
from tinyvllm_ref.emulation.array import asarray, ascontiguousarray, empty, ndarray
from tinyvllm_ref.emulation.errors import CUDARuntimeError, OutOfMemoryError

runtime = cuda.runtime


def bytes_at(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


# ---------------------------------------------------------------- the pool


def test_pool_counts_in_multiples_of_512() -> None:
    pool = memory.MemoryPool()
    held = [pool.malloc(size) for size in (1, 512, 513)]
    assert pool.used_bytes() == 512 + 512 + 1024
    assert (pool.free_bytes(), pool.total_bytes(), pool.n_free_blocks()) == (0, 2048, 0)
    assert [p.mem.size for p in held] == [1, 512, 513]
    held.pop()
    assert (pool.used_bytes(), pool.free_bytes(), pool.total_bytes()) == (1024, 1024, 2048)
    assert pool.n_free_blocks() == 1
    pool.free_all_blocks()
    assert (pool.used_bytes(), pool.free_bytes(), pool.n_free_blocks()) == (1024, 0, 0)
    del held
    assert (pool.used_bytes(), pool.free_bytes()) == (0, 1024)


def test_pool_hands_out_a_freed_block_again_as_fresh_memory() -> None:
    pool = memory.MemoryPool()
    first = pool.malloc(1000)
    address = first.ptr
    first.memset(0, 1000)
    del first
    again = pool.malloc(1000)
    assert again.ptr == address
    assert bytes_at(address, 1000) == b"\xff" * 1000
    assert pool.total_bytes() == 1024


def test_pool_keeps_bounds_exact() -> None:
    """A block of another size is not handed out, even where it counts the same."""
    pool = memory.MemoryPool()
    pool.malloc(600)
    assert pool.n_free_blocks() == 1
    other = pool.malloc(700)
    assert other.mem.size == 700
    assert native.runtime().emu_is_live(other.ptr, 700)
    assert not native.runtime().emu_is_live(other.ptr, 701)
    assert pool.total_bytes() == 1024


def test_addresses_are_aligned_and_do_not_overlap() -> None:
    pointers = [memory.alloc(size) for size in (1, 17, 512, 4096, 100_000) for _ in range(3)]
    spans = sorted((p.ptr, p.ptr + p.mem.size) for p in pointers)
    assert all(start % 512 == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_an_empty_allocation_is_null() -> None:
    pool = memory.MemoryPool()
    assert pool.malloc(0).ptr == 0
    assert pool.total_bytes() == 0
    pool.malloc(0).copy_from_host(0, 0)
    with pytest.raises(ValueError, match="0 or more bytes, not -1"):
        memory.Memory(-1)


def test_a_block_can_be_freed_early_and_only_once() -> None:
    pool = memory.MemoryPool()
    pointer = pool.malloc(100)
    assert isinstance(pointer.mem, memory.PooledMemory)
    pointer.mem.free()
    pointer.mem.free()
    assert (pool.used_bytes(), pool.n_free_blocks()) == (0, 1)
    with pytest.raises(CUDARuntimeError, match="invalid argument"):
        pointer.memset(0, 1)
    del pointer
    assert pool.n_free_blocks() == 1


def test_limits() -> None:
    pool = memory.MemoryPool()
    assert pool.get_limit() == 0
    pool.set_limit(size=4096)
    held = pool.malloc(4096)
    with pytest.raises(
        OutOfMemoryError, match=r"allocating 512 bytes \(allocated so far: 4,096 bytes, limit set "
    ):
        pool.malloc(1)
    del held
    assert pool.malloc(2048).mem.size == 2048  # the free block of 4,096 had to go for it
    assert pool.total_bytes() == 2048
    pool.set_limit(fraction=0.5)
    assert pool.get_limit() == memory.total_bytes() // 2
    pool.set_limit()
    assert pool.get_limit() == 0
    for arguments, text in (
        ({"size": 1, "fraction": 0.5}, "cannot be specified at the same time"),
        ({"fraction": 1.5}, "fraction out of range: 1.5"),
        ({"size": -1}, "size out of range: -1"),
    ):
        with pytest.raises(ValueError, match=text):
            pool.set_limit(**arguments)


def test_out_of_memory_is_an_error_and_not_the_end() -> None:
    too_much = memory.total_bytes() * 2
    with pytest.raises(OutOfMemoryError, match=rf"Out of memory allocating {too_much:,} bytes"):
        memory.alloc(too_much)
    with pytest.raises(MemoryError):
        empty(2**60, np.uint8)
    assert empty(3).shape == (3,)


def test_pool_gives_its_free_blocks_back_before_it_gives_up() -> None:
    tries: list[int] = []

    def allocator(size: int) -> memory.MemoryPointer:
        tries.append(size)
        if len(tries) == 2:  # the machine is full until the free block is given back
            assert pool.n_free_blocks() == 1
            raise OutOfMemoryError(size, 0)
        return memory.MemoryPointer(memory.Memory(size), 0)

    pool = memory.MemoryPool(allocator)
    pool.malloc(1000)
    assert pool.malloc(3000).mem.size == 3000
    assert tries == [1000, 3000, 3000]
    assert pool.n_free_blocks() == 1  # the second: the first block went


def test_freed_memory_goes_back_to_the_system() -> None:
    live = native.runtime().emu_live_bytes
    before = live()
    held = memory.Memory(10_000)
    assert live() == before + 10_000
    del held
    assert live() == before


def test_garbage_in_a_cycle_gives_its_block_back_whole() -> None:
    """The collector finalises the objects of a cycle in any order."""
    pool = memory.MemoryPool()
    with memory.using_allocator(pool.malloc):
        for _ in range(20):
            array = empty(10)
            cycle: dict[str, Any] = {"array": array, "pointer": array.data, "memory": array.data.mem}
            cycle["self"] = cycle
            del array, cycle
            gc.collect()
            fresh = empty(10)
            assert fresh.data.ptr != 0
            fresh.fill(1)
            del fresh
    assert (pool.used_bytes(), pool.n_free_blocks()) == (0, 1)


def test_pool_serves_several_threads() -> None:
    pool = memory.MemoryPool()
    failures: list[BaseException] = []

    def work(value: int) -> None:
        try:
            for size in [700, 100, 5000] * 60:
                pointer = pool.malloc(size)
                pointer.memset(value, size)
                assert bytes_at(pointer.ptr, size) == bytes([value]) * size
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert pool.used_bytes() == 0


# ---------------------------------------------------------------- allocators


def test_allocators_can_be_replaced() -> None:
    sizes: list[int] = []

    def allocator(size: int) -> memory.MemoryPointer:
        sizes.append(size)
        return memory.malloc_managed(size)

    before = memory.get_allocator()
    assert before == memory.default_memory_pool.malloc
    with memory.using_allocator(allocator):
        assert isinstance(empty(5).data.mem, memory.ManagedMemory)
        with memory.using_allocator(None):
            assert type(empty(5).data.mem) is memory.Memory
        with pytest.raises(ValueError, match="Can't change the global allocator inside `using_allocator`"):
            memory.set_allocator(None)
    assert sizes == [40]
    memory.set_allocator(None)
    try:
        assert type(empty(5).data.mem) is memory.Memory
    finally:
        memory.set_allocator(before)


def test_using_allocator_holds_for_its_thread_alone() -> None:
    seen: list[Any] = []
    with memory.using_allocator(None):
        thread = threading.Thread(target=lambda: seen.append(memory.get_allocator()))
        thread.start()
        thread.join()
    assert seen == [memory.default_memory_pool.malloc]


# ---------------------------------------------------------------- pointers


def test_pointers_move_and_copy() -> None:
    host = np.arange(64, dtype=np.uint8)
    pointer = memory.alloc(64)
    pointer.copy_from_host(host.ctypes.data, 64)
    moved = 8 + (pointer + 16) - 4
    assert moved.ptr == pointer.ptr + 20
    assert int(moved) == moved.ptr
    assert moved.mem is pointer.mem
    out = np.zeros(4, np.uint8)
    moved.copy_to_host(ctypes.c_void_p(out.ctypes.data), 4)
    assert out.tolist() == [20, 21, 22, 23]
    other = memory.alloc(8)
    other.copy_from(moved, 8)
    assert bytes_at(other.ptr, 8) == bytes(range(20, 28))
    other.copy_from_async(host.ctypes.data, 2)
    other.memset_async(0x1AB, 1, stream=None)
    assert bytes_at(other.ptr, 3) == bytes([0xAB, 1, 22])
    assert pointer.device.id == pointer.device_id == 0


@pytest.mark.parametrize("call", [
    lambda p, h: p.copy_from_host(h, 65), lambda p, h: (p + 60).copy_from_host(h, 5),
    lambda p, h: p.memset(0, 65), lambda p, h: (p - 1).memset(0, 1),
    lambda p, h: p.copy_to_host(h, 100), lambda p, h: p.memset(0, -1),
    lambda p, h: p.copy_from_device(p + 32, 33), lambda p, h: p.copy_from_host(0, 1),
])  # fmt: skip
def test_pointers_stay_in_their_allocation(call: Callable[[Any, int], Any]) -> None:
    host = np.zeros(200, np.uint8)
    with pytest.raises(CUDARuntimeError, match=r"^cudaErrorInvalidValue: invalid argument: \w+: "):
        call(memory.alloc(64), host.ctypes.data)


def test_unowned_memory() -> None:
    owner = memory.Memory(128)
    view = memory.UnownedMemory(owner.ptr, 128, owner)
    array = ndarray((32,), np.float32, memptr=memory.MemoryPointer(view, 0))
    array.fill(2)
    assert np.frombuffer(bytes_at(owner.ptr, 128), np.float32).tolist() == [2] * 32
    with pytest.raises(CUDARuntimeError, match=r"needs 200 bytes from byte 0 of an allocation of 128 bytes"):
        memory.UnownedMemory(owner.ptr, 200, owner)
    with pytest.raises(CUDARuntimeError, match="the only device is 0"):
        memory.UnownedMemory(owner.ptr, 128, owner, 3)


# ---------------------------------------------------------------- cp.cuda.runtime


def test_runtime_copies_in_every_direction() -> None:
    host, back = np.arange(10, dtype=np.float32), np.zeros(10, np.float32)
    first, second = runtime.malloc(40), runtime.malloc(40)
    runtime.memcpy(first, host.ctypes.data, 40, runtime.memcpyHostToDevice)
    runtime.memcpyAsync(second, first, 40, runtime.memcpyDeviceToDevice, 0)
    runtime.memset(second, 0, 4)
    runtime.memcpy(back.ctypes.data, second, 40, runtime.memcpyDeviceToHost)
    assert back.tolist() == [0, *range(1, 10)]
    runtime.memcpy(back.ctypes.data, host.ctypes.data, 40, runtime.memcpyHostToHost)
    assert back.tolist() == list(range(10))
    runtime.memcpy(back.ctypes.data, second, 8, runtime.memcpyDefault)
    assert back.tolist() == [0, 1, *range(2, 10)]
    runtime.memcpy(first, back.ctypes.data, 0, runtime.memcpyHostToDevice)
    runtime.free(first)
    runtime.freeAsync(second, 0)
    runtime.free(0)


@pytest.mark.parametrize(("call", "text"), [
    (lambda d, h: runtime.memcpy(d, h, 65, 1),
     "memcpy: destination needs 65 bytes from byte 0 of an allocation of 64 bytes"),
    (lambda d, h: runtime.memcpy(d + 60, h, 5, 1), "needs 5 bytes from byte 60"),
    (lambda d, h: runtime.memcpy(h, d, 65, 2), "memcpy: source needs 65 bytes"),
    (lambda d, h: runtime.memcpy(h, d, 8, 1), "destination 0x[0-9a-f]+ is not device memory"),
    (lambda d, h: runtime.memcpy(d, d, 8, 1), "source 0x[0-9a-f]+ is device memory, but the kind says host"),
    (lambda d, h: runtime.memcpy(d, 0, 8, 1), "source is a null pointer"),
    (lambda d, h: runtime.memcpy(0, d, 8, 2), "destination is a null pointer"),
    (lambda d, h: runtime.memcpy(d, h, 8, 9), "kind is 9; it must be 0 to 4"),
    (lambda d, h: runtime.memcpy(d, h, -8, 1), "size is -8; it must be 0 or more"),
    (lambda d, h: runtime.memset(d, 0, 65), "memset: destination needs 65 bytes"),
    (lambda d, h: runtime.memset(h, 0, 4), "is not device memory, or was freed"),
    (lambda d, h: runtime.free(d), "did not come from malloc, or was freed before"),
    (lambda d, h: runtime.free(h), "did not come from malloc"),
    (lambda d, h: runtime.freeHost(d), "did not come from hostAlloc"),
])  # fmt: skip
def test_runtime_refuses_what_would_crash(call: Callable[[int, int], Any], text: str) -> None:
    device, host = memory.alloc(64), np.zeros(100, np.uint8)
    with pytest.raises(CUDARuntimeError, match=text) as caught:
        call(device.ptr, host.ctypes.data)
    assert caught.value.status == 1


def test_freed_memory_is_not_device_memory() -> None:
    address = runtime.malloc(1 << 16)
    runtime.free(address)
    with pytest.raises(CUDARuntimeError, match="not device memory, or was freed"):
        runtime.memset(address, 0, 1)
    with pytest.raises(CUDARuntimeError, match="was freed before"):
        runtime.free(address)


def test_memory_sizes() -> None:
    free, total = runtime.memGetInfo()
    assert 0 < free <= total
    assert cuda.Device().mem_info[1] == total
    assert runtime.getDeviceProperties(0)["totalGlobalMem"] == total


# ---------------------------------------------------------------- pinned memory


def test_pinned_memory_is_a_buffer() -> None:
    pointer = memory.alloc_pinned_memory(40)
    assert isinstance(pointer, memory.PinnedMemoryPointer)
    numbers: np.ndarray = np.frombuffer(pointer, np.float32, 10)  # type: ignore[call-overload]
    numbers[:] = np.arange(10)
    assert pointer.ptr == numbers.ctypes.data
    assert pointer.size() == 40
    moved = pointer + 8
    assert (moved.ptr, moved.size()) == (pointer.ptr + 8, 32)
    assert np.frombuffer(moved, np.float32, 2).tolist() == [2, 3]  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="offset 41 lies outside of pinned memory of 40 bytes"):
        memory.PinnedMemoryPointer(pointer.mem, 41)


def test_pinned_memory_outlives_its_pointer() -> None:
    numbers: np.ndarray = np.frombuffer(memory.alloc_pinned_memory(8000), np.float64)  # type: ignore[call-overload]
    numbers[:] = 7
    gc.collect()
    others = [np.full(1000, 3.0) for _ in range(20)]
    assert (numbers == 7).all()
    assert len(others) == 20


def test_pinned_arrays() -> None:
    made = cupyx.zeros_pinned((2, 3), np.float32)
    assert made.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert cupyx.empty_pinned(4, np.int8).shape == (4,)
    assert cupyx.empty_pinned((0, 2)).size == 0
    fortran = cupyx.zeros_like_pinned(asarray(np.zeros((2, 3))).T)
    assert (fortran.shape, fortran.flags.f_contiguous) == ((3, 2), True)
    assert cupyx.empty_like_pinned(made, shape=(5,), dtype=np.uint8).shape == (5,)
    array = ascontiguousarray(made)
    array += 1
    assert array.get(out=made) is made
    assert made.sum() == 6


def test_host_alloc() -> None:
    address = runtime.hostAlloc(16, runtime.hostAllocDefault)
    ctypes.memset(address, 5, 16)
    device = runtime.malloc(16)
    runtime.memcpy(device, address, 16, runtime.memcpyHostToDevice)
    assert bytes_at(device, 16) == b"\x05" * 16
    runtime.free(device)
    runtime.freeHost(address)
    with pytest.raises(CUDARuntimeError, match="was freed before"):
        runtime.freeHost(address)


def test_pinned_allocator_can_be_replaced() -> None:
    sizes: list[int] = []
    pool = memory.PinnedMemoryPool()

    def allocator(size: int) -> memory.PinnedMemoryPointer:
        sizes.append(size)
        return pool.malloc(size)

    memory.set_pinned_memory_allocator(allocator)
    try:
        cupyx.empty_pinned(3, np.float32)
    finally:
        memory.set_pinned_memory_allocator(memory.default_pinned_memory_pool.malloc)
    assert sizes == [12]
    pool.free_all_blocks()
    assert pool.n_free_blocks() == 0
