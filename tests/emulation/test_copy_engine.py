"""The emulated copy engine: what is right passes, and each way to get a ring of copies wrong is found.

The kernels are those of a card, with ``bulk_copy.cuh`` and ``async_copy.cuh`` before them, compiled for the emulation's
own copy engine. A fault is put in by changing a line of a kernel that is right.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinyvllm_ref import emulation as cp
from tinyvllm_ref.kernels import source

MODES = ("fast", "full")
TILE, CONSUMERS = 64, 2  # floats; warps

# Two warps add up tiles that a third one has brought through a ring of two stages. Bytes, arrivals, and by how many
# floats the two sides of a copy are off are among the arguments, for compiling takes long.
RING = """
struct Numbers { int announced, copied, from, to, filled, emptied, freeing; };
extern "C" __global__ void ring(const float* x, float* out, int tiles, const Numbers* numbers) {
    Numbers with = *numbers;
    __shared__ __align__(16) float stage[2][64];
    __shared__ PhaseBarrier full[2], empty[2];
    if (threadIdx.x == 0) {
        for (int s = 0; s < 2; s++) {
            start_phases(full + s, with.filled);
            start_phases(empty + s, with.emptied);
        }
        show_barriers();
    }
    __syncthreads();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    x += blockIdx.x * tiles * 64;
    if (warp == 2) {
        for (int t = 0; t < tiles; t++) {
            int s = t % 2, phase = t / 2 % 2;
            wait_phase(empty + s, phase ^ 1);
            if (lane != 0) continue;
            arrive_expecting(full + s, with.announced);
            copy_bulk(stage[s] + with.to, x + t * 64 + with.from, with.copied, full + s, read_once());
        }
        return;
    }
    float sum = 0.0f;
    for (int t = 0; t < tiles; t++) {
        int s = t % 2, phase = t / 2 % 2;
        wait_phase(full + s, phase);
        sum += stage[s][32 * warp + (lane + 1) % 32];
        __syncwarp();
        if (lane == 0) arrive(empty + s, with.freeing);
    }
    out[blockIdx.x * 64 + threadIdx.x] = sum;
}
"""
NUMBERS = {"announced": 256, "copied": 256, "from": 0, "to": 0, "filled": 1, "emptied": 2, "freeing": 1}
FREE = "        __syncwarp();\n        if (lane == 0) arrive(empty + s, with.freeing);\n"
READ = "        sum += stage[s][32 * warp + (lane + 1) % 32];\n"
COPY = "copy_bulk(stage[s] + with.to, x + t * 64 + with.from, with.copied, full + s, read_once());"


def kernel(code: str) -> cp.RawKernel:
    name = code.split("__global__ void ")[1].split("(")[0]
    headers = source.header("async_copy.cuh") + source.header("bulk_copy.cuh")
    return cp.RawKernel(f'{headers}#line 1 "{name}.cu"{code}', name, options=("-DEMULATED_BULK_COPY=1",))


def changed(code: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    return code


def run_ring(
    mode: str,
    *changes: tuple[str, str],
    tiles: int = 5,
    blocks: int = 1,
    missing: int = 0,
    numbers: dict[str, int] | None = None,
) -> Any:
    """The ring's sums and NumPy's, (blocks, 64) each; x is `missing` floats too short."""
    x = np.random.default_rng(tiles).integers(-99, 99, (blocks, tiles, TILE)).astype(np.float32)
    out = cp.empty((blocks, TILE), np.float32)
    given = cp.asarray(x.ravel()[: x.size - missing])
    with_numbers = cp.asarray(np.array(list((NUMBERS | (numbers or {})).values()), np.int32))
    with cp.checks(mode):
        args = (given, out, np.int32(tiles), with_numbers)
        kernel(changed(RING, *changes))((blocks,), (32 * (CONSUMERS + 1),), args)
    turned = x.reshape(blocks, tiles, CONSUMERS, 32)
    return cp.asnumpy(out), np.roll(turned, -1, axis=3).sum(axis=1).reshape(blocks, TILE)


def fails(
    code: str,
    *changes: tuple[str, str],
    mode: str,
    kind: type[Exception],
    says: str,
    line: str,
    numbers: dict[str, int] | None = None,
) -> Any:
    """The error of the changed kernel, which says this and names that line."""
    with pytest.raises(kind, match=says) as caught:
        run_ring(mode, *changes, numbers=numbers) if code is RING else run(changed(code, *changes), mode)
    error: Any = caught.value
    assert line in error.source_line, str(error)
    return error


def run(code: str, mode: str, threads: int = 32) -> np.ndarray:
    """out (threads,) of a kernel that takes x, whose elements are 0.0 to 255.0, and out."""
    x, out = cp.asarray(np.arange(256, dtype=np.float32)), cp.empty(threads, np.float32)
    with cp.checks(mode), cp.timeout(10):
        kernel(code)((1,), (threads,), (x, out))
    return np.asarray(cp.asnumpy(out))


# ---------------- what is right
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tiles", [0, 1, 2, 3, 8])
def test_a_ring(mode: str, tiles: int) -> None:
    got, want = run_ring(mode, tiles=tiles)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("mode", MODES)
def test_many_blocks(mode: str) -> None:
    """Each has barriers of its own; in fast mode several cores run them."""
    got, want = run_ring(mode, tiles=6, blocks=40)
    np.testing.assert_array_equal(got, want)


ONE = """
extern "C" __global__ void one(const float* x, float* out) {
    __shared__ __align__(16) float tile[32];
    __shared__ PhaseBarrier full;
    if (threadIdx.x == 0) {
        start_phases(&full, 1);
        show_barriers();
        arrive_expecting(&full, 128);
        copy_bulk(tile, x, 128, &full, read_once());
        wait_phase(&full, 0);
        tile[0] += 5.0f;
    }
    __syncthreads();
    out[threadIdx.x] = tile[31 - threadIdx.x];
}
"""


@pytest.mark.parametrize("mode", MODES)
def test_one_thread_waits_for_all(mode: str) -> None:
    """Who waited tells the others by a barrier of the block."""
    want = np.arange(32, dtype=np.float32)[::-1].copy()
    want[31] += 5
    np.testing.assert_array_equal(run(ONE, mode), want)


def test_what_is_copied_is_counted() -> None:
    run(ONE, "full")
    report = cp.last_report
    assert report is not None
    assert (report.global_read_bytes, report.global_read_sectors, report.global_read_requests) == (128, 4, 1)
    with cp.trace() as trace:
        run(ONE, "full")
    copied = trace.rows[trace.rows["bytes"] == 128]
    assert [*copied["kind"]] == ["read", "write"]
    assert [*copied["array"]] == ["x", "tile"]


POLLING = """
extern "C" __global__ void polling(const float* x, float* out) {
    __shared__ __align__(16) float tile[32];
    __shared__ PhaseBarrier full;
    __shared__ int there;
    if (threadIdx.x == 0) {
        there = 0;
        start_phases(&full, 1);
        show_barriers();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        arrive_expecting(&full, 128);
        copy_bulk(tile, x, 128, &full, read_once());
        wait_phase(&full, 0);
        __threadfence_block();
        atomicExch(&there, 1);
    } else if (threadIdx.x % 7 == 3) {
        while (atomicAdd(&there, 0) == 0) {}
    }
    __syncthreads();
    out[threadIdx.x] = tile[threadIdx.x];
}
"""


@pytest.mark.parametrize("mode", MODES)
def test_copies_arrive_while_threads_poll(mode: str) -> None:
    np.testing.assert_array_equal(run(POLLING, mode), np.arange(32))


STARVED = """
extern "C" __global__ void starved(const float* x, float* out) {
    __shared__ int there;
    if (threadIdx.x == 0) there = 0;
    __syncthreads();
    if (threadIdx.x == 63) atomicExch(&there, 1);
    if (threadIdx.x < 5) {
        while (atomicAdd(&there, 0) == 0) {}
    }
    out[threadIdx.x] = x[threadIdx.x];
}
"""


@pytest.mark.parametrize("mode", MODES)
def test_some_lanes_poll_for_what_another_warp_does(mode: str) -> None:
    np.testing.assert_array_equal(run(STARVED, mode, threads=64), np.arange(64))


# ---------------- order
WAIT = "        wait_phase(full + s, phase);\n"


def test_a_read_before_the_wait() -> None:
    change = (WAIT + READ, READ + WAIT)
    error = fails(
        RING, change, mode="full", kind=cp.DataRace, says="copy to it may still be on", line="sum +="
    )
    assert error.array == "stage"
    assert COPY in str(error)
    assert np.isnan(run_ring("fast", change, tiles=2)[0]).all()


@pytest.mark.parametrize("instead", ["", WAIT.replace("phase)", "phase ^ 1)")])
def test_no_wait_and_a_wait_for_the_phase_before(instead: str) -> None:
    fails(RING, (WAIT, instead), mode="full", kind=cp.DataRace, says="may still be on its", line="sum +=")
    with pytest.raises(cp.KernelFault, match="2 copies were on their way, which nobody has waited for"):
        run_ring("fast", (WAIT, instead), tiles=2)


def test_some_threads_do_not_wait() -> None:
    """Others of their warp do, before them: what they read is there by chance."""
    change = ("wait_phase(full + s, phase);", "if (lane != 9) wait_phase(full + s, phase);")
    fails(RING, change, mode="full", kind=cp.DataRace, says="may still be on its way", line="sum +=")
    got, want = run_ring("fast", change)
    assert np.isnan(got[0, [9, 41]]).all()
    np.testing.assert_array_equal(np.delete(got, [9, 41]), np.delete(want, [9, 41]))


def test_the_thread_that_copies_has_to_wait() -> None:
    change = ("wait_phase(&full, 0);", "")
    fails(ONE, change, mode="full", kind=cp.DataRace, says="may still be on its way", line="tile[0] +=")
    # In fast mode nobody waits for what is on its way as the block ends.
    fails(ONE, change, mode="fast", kind=cp.KernelFault, says="1 copies were on their way", line="copy_bulk(")


@pytest.mark.parametrize("freed", ["before the read", "without a barrier of the warp"])
def test_a_stage_is_freed_too_early(freed: str) -> None:
    change = (
        (READ + FREE, FREE + READ)
        if freed == "before the read"
        else (FREE, "        if (lane == 0) arrive(empty + s, 1);\n")
    )
    error = fails(RING, change, mode="full", kind=cp.DataRace, says="may come too early", line="copy_bulk(")
    assert error.array == "stage"
    assert error.other is not None
    assert READ.strip() == error.other.text.strip()


def test_a_stage_is_filled_before_it_is_free() -> None:
    """By another thread, so that the barrier itself has nothing to say."""
    skipped = (
        "wait_phase(empty + s, phase ^ 1);",
        "if (t >= 2 && lane == 1) wait_phase(empty + s, phase ^ 1);",
    )
    paced = (
        "if (lane != 0) continue;",
        "if (lane != 0) continue;\nif (t >= 2) wait_phase(full + s, phase ^ 1);",
    )
    fails(RING, skipped, paced, mode="full", kind=cp.DataRace, says="may come too early", line="copy_bulk(")


CLEARED = """
extern "C" __global__ void cleared(const float* x, float* out) {
    __shared__ __align__(16) float tile[32];
    __shared__ PhaseBarrier full;
    tile[threadIdx.x] = 0.0f;
    if (threadIdx.x == 0) {
        start_phases(&full, 1);
        show_barriers();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        before_bulk_copies();
        arrive_expecting(&full, 128);
        copy_bulk(tile, x, 128, &full, read_once());
    }
    wait_phase(&full, 0);
    out[threadIdx.x] = tile[threadIdx.x];
}
"""


def test_a_copy_to_where_threads_have_written() -> None:
    """The copy engine has to be told, by those who have written or by one that knows of it from a barrier."""
    told, clear = "        before_bulk_copies();\n", "    tile[threadIdx.x] = 0.0f;\n"
    by_writers = changed(CLEARED, (told, ""), (clear, clear + told))
    for code in (CLEARED, by_writers):
        np.testing.assert_array_equal(run(code, "full"), np.arange(32))
    says = r"where thread \d+ has written: nobody who knew of it has called before_bulk_copies"
    by_one_writer = clear + "if (threadIdx.x == 0) before_bulk_copies();\n"
    for change in ((told, ""),), ((told, ""), (clear, by_one_writer)):
        fails(CLEARED, *change, mode="full", kind=cp.KernelFault, says=says, line="copy_bulk(tile")


def test_two_copies_to_one_place() -> None:
    twice = (COPY, COPY + "\ncopy_bulk(stage[s], x + t * 64 + 32, 128, full + s, read_once());")
    more, kind = {"announced": 384}, cp.DataRace
    fails(RING, twice, mode="full", kind=kind, says="may still be on", line="x + t * 64 + 32", numbers=more)


def test_barriers_that_others_do_not_know_of() -> None:
    change = ("    __syncthreads();\n    int warp", "    int warp")
    error = fails(RING, change, mode="full", kind=cp.DataRace, says="empty|full", line="_phase")
    assert error.other is not None
    assert "start_phases" in error.other.text


# ---------------- memory
@pytest.mark.parametrize("mode", MODES)
def test_a_copy_past_the_end_of_an_array(mode: str) -> None:
    with pytest.raises(cp.OutOfBounds, match="reach past its end") as caught:
        run_ring(mode, missing=1)
    assert (caught.value.array, caught.value.index) == ("x", 4 * TILE)
    assert COPY in caught.value.source_line
    assert caught.value.thread == (64, 0, 0)


def test_a_copy_past_the_end_of_shared_memory() -> None:
    says, far = "reach past its end", "past the end of the block's shared memory"
    error = fails(RING, mode="full", kind=cp.OutOfBounds, says=says, line=COPY, numbers={"to": 4})
    assert error.array == "stage"
    fails(RING, mode="fast", kind=cp.KernelFault, says=far, line=COPY, numbers={"to": 32})


def test_a_copy_of_what_nobody_has_written() -> None:
    numbers = cp.asarray(np.array(list(NUMBERS.values()), np.int32))
    args = (cp.empty(TILE, np.float32), cp.empty(TILE, np.float32), np.int32(1), numbers)
    with pytest.raises(cp.UninitializedRead, match="x"):
        kernel(RING)((1,), (96,), args)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ({"from": 1}, "a copy from 0x.*, which is no multiple of 16 bytes"),
        ({"to": 2}, "a copy to 0x.*, which is no multiple of 16 bytes"),
        ({"copied": 252}, "a copy of 252 bytes, which is no multiple of 16"),
    ],
)
def test_what_is_not_aligned(mode: str, numbers: dict[str, int], says: str) -> None:
    fails(RING, mode=mode, kind=cp.KernelFault, says=says, line=COPY, numbers=numbers)


@pytest.mark.parametrize(
    ("instead", "says"),
    [
        ("copy_bulk((void*)x, x", "a copy to 0x.*, which is not in shared memory"),
        ("copy_bulk(stage[s], stage[1]", "a copy from 0x.*, which is not in global memory"),
    ],
)
def test_copies_from_elsewhere_to_elsewhere(instead: str, says: str) -> None:
    fails(
        RING,
        ("copy_bulk(stage[s] + with.to, x", instead),
        mode="fast",
        kind=cp.KernelFault,
        says=says,
        line=instead,
    )


# ---------------- barriers
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ({"announced": 272}, r"64 for full\[0\], which lacks 0 of 1 arrivals and 16 bytes"),
        ({"filled": 3}, r"64 for full\[0\], which lacks 2 of 3 arrivals"),
        (
            {"emptied": 3},
            r"64 for full\[0\], .* 1 of 1 arrivals; 32 for empty\[0\], which lacks 1 of 3 arrivals",
        ),
    ],
)
def test_a_phase_that_never_ends(mode: str, numbers: dict[str, int], says: str) -> None:
    wait, kind = "wait_phase(full + s, phase)", cp.BarrierDivergence
    error = fails(RING, mode=mode, kind=kind, says=says, line=wait, numbers=numbers)
    assert "no thread can go on" in str(error)
    assert error.other is not None
    assert "wait_phase(empty + s" in error.other.text


def test_a_copy_that_is_announced_and_not_made() -> None:
    wait, kind = "wait_phase(full + s, phase)", cp.BarrierDivergence
    fails(RING, (COPY, ""), mode="fast", kind=kind, says="lacks 0 of 1 arrivals and 256 bytes", line=wait)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("numbers", "says", "line"),
    [
        ({"announced": 240}, r"256 bytes come to full\[0\], which has been told of 240", COPY),
        (
            {"freeing": 3},
            r"3 arrival\(s\) at empty\[0\], whose phase waits for 2 more \(of 2\)",
            "arrive(empty",
        ),
        ({"filled": 0}, "must be 1 to 1048575", "start_phases(full + s"),
        ({"announced": 1 << 20}, r"1048576 bytes are announced to full\[0\]", "arrive_expecting"),
    ],
)
def test_wrong_counts(mode: str, numbers: dict[str, int], says: str, line: str) -> None:
    fails(RING, mode=mode, kind=cp.KernelFault, says=says, line=line, numbers=numbers)


@pytest.mark.parametrize(
    ("change", "says", "line"),
    [
        (
            ("wait_phase(empty + s, phase ^ 1);", ""),
            r"1 arrival\(s\) at full\[0\], whose phase waits for 0",
            "ive_ex",
        ),
        (
            ("            start_phases(empty + s, with.emptied);\n", ""),
            "empty.0. was used before start",
            "empty + s",
        ),
        (
            ("start_phases(full + s, with", "start_phases(full, with"),
            r"full\[0\] is started twice",
            "phases(full, ",
        ),
        (("        show_barriers();\n", ""), "show_barriers has not shown", COPY),
        (
            ("wait_phase(full + s, phase)", "wait_phase(full + s, phase + 2)"),
            "a wait for phase 2",
            "wait_phase(full",
        ),
        (("arrive(empty + s", "arrive((PhaseBarrier*)out"), "must lie in shared memory", "arrive("),
    ],
)
def test_barriers_used_wrongly(change: tuple[str, str], says: str, line: str) -> None:
    fails(RING, change, mode="fast", kind=cp.KernelFault, says=says, line=line)


def test_a_barrier_that_nobody_has_started_with_every_access_checked() -> None:
    change = ("            start_phases(empty + s, with.emptied);\n", "")
    fails(RING, change, mode="full", kind=cp.KernelFault, says="used before start", line="empty + s")


def test_barriers_may_be_many_and_not_too_many() -> None:
    code = """
extern "C" __global__ void many(const float* x, float* out) {
    __shared__ PhaseBarrier some[COUNT];
    for (int k = threadIdx.x; k < COUNT; k += 32) start_phases(some + k, 1);
    __syncthreads();
    if (threadIdx.x == 0)
        for (int k = 0; k < COUNT; k++) arrive(some + k);
    for (int k = 0; k < COUNT; k++) wait_phase(some + k, 0);
    out[threadIdx.x] = x[threadIdx.x];
}
"""
    np.testing.assert_array_equal(run(code.replace("COUNT", "112"), "full"), np.arange(32))
    with pytest.raises(cp.KernelFault, match="starts more than 112 barriers"):
        run(code.replace("COUNT", "113"), "full")


# ---------------- barriers of some of a block's threads
NAMED = """
extern "C" __global__ void named(const float* x, float* out) {
    __shared__ float given[32];
    if (threadIdx.x < 32) {
        for (int k = 0; k < 3; k++) {
            given[threadIdx.x] = x[threadIdx.x + 32 * k];
            arrive_threads<1, 64>();
            sync_threads<2, 64>();
        }
        return;
    }
    float sum = 0.0f;
    for (int k = 0; k < 3; k++) {
        sync_threads<1, 64>();
        sum += given[63 - threadIdx.x];
        arrive_threads<2, 64>();
    }
    out[threadIdx.x] = sum;
}
"""


READ_GIVEN = "        sum += given[63 - threadIdx.x];\n"


@pytest.mark.parametrize("mode", MODES)
def test_named_barriers(mode: str) -> None:
    got = run(NAMED, mode, threads=64)
    x = np.arange(96, dtype=np.float32).reshape(3, 32)
    np.testing.assert_array_equal(got[32:], x.sum(axis=0)[::-1])


def test_named_barriers_used_wrongly() -> None:
    def error(mode: str, old: str, new: str) -> str:
        with pytest.raises(cp.KernelError) as caught:
            run(changed(NAMED, (old, new)), mode, threads=64)
        return str(caught.value)

    assert "data race on given" in error("full", "        sync_threads<1, 64>();\n", "")
    free = "        arrive_threads<2, 64>();\n"
    early = (READ_GIVEN + free, free + READ_GIVEN)
    assert "data race on given" in error("full", *early)
    assert "32 for barrier 2, which lacks 32 of 64 arrivals" in error("fast", free, "")
    wait = "        sync_threads<1, 64>"
    assert "at which others wait for 64" in error("fast", wait, wait.replace("64", "32"))
    assert "a multiple of 32 threads" in error("fast", "arrive_threads<1, 64>", "arrive_threads<1, 48>")
    assert "barrier 16 of 64" in error("fast", "arrive_threads<1, 64>", "arrive_threads<16, 64>")


# ---------------- copies of 16 bytes
PIECES = """
extern "C" __global__ void pieces(const float* x, float* out) {
    __shared__ __align__(16) float tile[128];
    __shared__ PhaseBarrier full;
    if (threadIdx.x == 0) start_phases(&full, 32);
    __syncthreads();
    int lane = threadIdx.x;
    copy16_async_or_zero(tile + 4 * lane, x + 4 * lane, lane != 7);
    arrive_with_copies(&full);
    wait_phase(&full, 0);
    out[lane] = tile[4 * ((lane + 1) % 32) + 1];
}
"""
GROUPS = """
extern "C" __global__ void groups(const float* x, float* out) {
    __shared__ __align__(16) float tile[2][128];
    int lane = threadIdx.x;
    for (int k = 0; k < 2; k++) {
        copy16_async(tile[k] + 4 * lane, x + 128 * k + 4 * lane);
        commit_copies();
    }
    wait_copies<1>();
    float first = tile[0][4 * lane];
    wait_copies<0>();
    out[lane] = first + tile[1][4 * lane + 3];
}
"""


@pytest.mark.parametrize("mode", MODES)
def test_pieces(mode: str) -> None:
    want = 4.0 * ((np.arange(32) + 1) % 32) + 1
    want[6] = 0
    np.testing.assert_array_equal(run(PIECES, mode), want)
    np.testing.assert_array_equal(run(GROUPS, mode), 8 * np.arange(32) + 131)


def test_pieces_that_are_not_waited_for() -> None:
    no_wait = changed(PIECES, ("    wait_phase(&full, 0);\n", ""))
    with pytest.raises(cp.DataRace, match="tile"):
        run(no_wait, "full")
    with pytest.raises(cp.KernelFault, match="on their way"):
        run(no_wait, "fast")
    # A thread's own pieces are no race; what it reads too early is no number.
    for mode in MODES:
        early = run(changed(GROUPS, ("wait_copies<1>();", "wait_copies<2>();")), mode)
        assert np.isnan(early).all()
        late = changed(GROUPS, ("wait_copies<0>();", ""), ("wait_copies<1>();", "wait_copies<0>();"))
        assert not np.isnan(run(late, mode)).any()
        with pytest.raises(cp.KernelFault, match="32 copies were on their way"):
            run(changed(GROUPS, ("wait_copies<0>();", "")), mode)


def test_pieces_that_can_not_be_copied() -> None:
    for old, new, kind, says in (
        ("x + 4 * lane, lane", "x + 4 * lane + 228, lane", cp.OutOfBounds, r"x\[\d+\] was read; x has 256"),
        ("x + 4 * lane, lane", "x + 4 * lane + 2, lane", cp.KernelFault, "no multiple of 16 bytes"),
        ("&full, 32", "&full, 31", cp.KernelFault, "whose phase waits for 0 more"),
    ):
        with pytest.raises(kind, match=says):
            run(changed(PIECES, (old, new)), "fast")
    with pytest.raises(cp.OutOfBounds, match=r"x\[\d+\] was read; x has 256"):
        run(changed(PIECES, ("x + 4 * lane, lane", "x + 4 * lane + 228, lane")), "full")
