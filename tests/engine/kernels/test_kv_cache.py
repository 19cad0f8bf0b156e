"""The paged cache: its layout, slots, and how many blocks are made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinyvllm_ref.config import ModelConfig
from tinyvllm_ref.device import cp, free_bytes
from tinyvllm_ref.kv_cache import KVCache, OutOfCacheMemory, block_bytes, blocks_that_fit, slots_of

CONFIG = ModelConfig.from_dict(
    {
        **{"model_type": "llama", "vocab_size": 10, "hidden_size": 12, "intermediate_size": 8},
        **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6},
    }
)


def test_layout() -> None:
    cache = KVCache(CONFIG, num_blocks=5, block_size=4)
    assert cache.keys.shape == cache.values.shape == (3, 5, 4, 2, 6)
    assert cache.keys.dtype == np.uint16
    assert cache.nbytes == 5 * block_bytes(CONFIG, 4) == 2 * 3 * 5 * 4 * 2 * 6 * 2
    assert cache.num_layers == 3


def test_layers_are_views() -> None:
    cache = KVCache(CONFIG, num_blocks=2, block_size=4)
    for index in range(3):
        keys, values = cache.layer(index)
        keys.fill(index + 1)
        values.fill(index + 100)
        assert keys.flags.c_contiguous
    np.testing.assert_array_equal(cp.asnumpy(cache.keys)[:, 0, 0, 0, 0], [1, 2, 3])
    np.testing.assert_array_equal(cp.asnumpy(cache.values)[:, 1, 3, 1, 5], [100, 101, 102])


@pytest.mark.parametrize("sizes", [(0, 16), (3, 0), (-1, 16)])
def test_sizes_that_are_none(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="it must be at least 1"):
        KVCache(CONFIG, *sizes)


@pytest.mark.parametrize(
    ("free", "max_tokens", "count"),
    [
        (288 * 4 * 7 // 4, 10**6, 1),
        (10**9, 4 * 11, 11),
        (10**9, 4 * 11 + 1, 12),
        (block_bytes(CONFIG, 4), 99, 1),
    ],
)
def test_blocks_that_fit(free: int, max_tokens: int, count: int) -> None:
    got = blocks_that_fit(free, CONFIG, 4, max_tokens)
    assert got * block_bytes(CONFIG, 4) <= free
    if max_tokens < 10**6:
        assert got == count


@pytest.mark.parametrize("free", [block_bytes(CONFIG, 4) - 1, 0, -5])
def test_no_block_fits(free: int) -> None:
    with pytest.raises(OutOfCacheMemory, match="one block of 4 tokens takes 576"):
        blocks_that_fit(free, CONFIG, 4, 100)


@pytest.mark.parametrize(
    ("room", "fits"), [(20_000, True), (block_bytes(CONFIG, 4) - 1, False), (-600, False)]
)
def test_a_cache_that_does_not_fit_names_a_number_that_may_be_asked_for(room: int, fits: bool) -> None:
    """Never to have no blocks, or to have less than nothing."""
    pool = cp.get_default_memory_pool()
    held = cp.empty(1024, np.uint8)  # a limit of 0 would be none
    pool.free_all_blocks()
    pool.set_limit(pool.used_bytes() + room)
    try:
        assert free_bytes() == max(0, room)
        with pytest.raises(OutOfCacheMemory) as caught:
            KVCache(CONFIG, 1000, 4)
    finally:
        pool.set_limit(0)
        del held
    said = str(caught.value)
    assert f"may take {max(0, room):,} bytes" in said
    assert ("lower num_blocks to 34 or less" in said) == fits
    assert ("one block of 4 tokens takes 576: free memory, or choose a smaller block_size" in said) != fits


def test_slots() -> None:
    np.testing.assert_array_equal(slots_of([7, 2, 5], 3, 6, 4), [31, 8, 9, 10, 11, 20])
    assert slots_of([7], 0, 0, 4).dtype == np.int64
    with pytest.raises(ValueError, match="tokens 3 to 4 were asked for; 1 blocks of 4 hold tokens 0 to 3"):
        slots_of([7], 3, 2, 4)


def test_a_slot_that_nobody_wrote_is_noticed() -> None:
    """With all checks on, attention over a cache with a hole is an uninitialised read, no silent number."""
    if not getattr(cp, "is_emulation", False):
        pytest.skip("the emulation's check")
    from tinyvllm_ref.kernels.paged_attention import paged_attention

    cache = KVCache(CONFIG, num_blocks=1, block_size=4)
    arrays: list[Any] = [cp.zeros((1, 4, 6), np.float32), *cache.layer(0), cp.zeros((1, 1), np.int32)]
    with cp.checks("full"), pytest.raises(cp.UninitializedRead, match="key_cache"):
        paged_attention(*arrays, cp.ones(1, np.int32), 1.0, cp.empty((1, 4, 6), np.uint16))
