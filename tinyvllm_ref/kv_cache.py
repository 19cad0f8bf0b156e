"""The paged KV cache: keys and values of all layers in blocks that requests take and give back.

A token of a sequence lies in the block ``block_table[position // block_size]`` at the offset
``position % block_size``; its *slot* is block * block_size + offset. Who owns which block is the block
manager's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .config import ModelConfig
from .device import cp, free_bytes


class OutOfCacheMemory(MemoryError):
    """The memory that is free does not hold a useful cache; the message says how much is missing."""


class KVCache:
    """Keys and values of every layer, as bfloat16 bits.

    Parameters
    ----------
    config : ModelConfig
    num_blocks, block_size : int
        NB and BS.

    Attributes
    ----------
    keys, values : (num_layers, NB, BS, Hk, D) uint16
        Not set to anything: a slot that nobody wrote must not be read.

    Raises
    ------
    ValueError
        A size is not positive.
    OutOfCacheMemory
        It does not fit; the message says what it takes, what is free, and how many blocks would fit.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"KVCache: {name} is {value}; it must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (
            config.num_hidden_layers,
            num_blocks,
            block_size,
            config.num_key_value_heads,
            config.head_dim,
        )
        try:
            self.keys = cp.empty(shape, np.uint16)
            self.values = cp.empty(shape, np.uint16)
        except cp.cuda.memory.OutOfMemoryError as error:
            self.__dict__.clear()  # a notebook keeps the error, and with it this object
            raise OutOfCacheMemory(f"{_what_it_takes(config, num_blocks, block_size)} ({error})") from None
        self._layers = [(self.keys[i], self.values[i]) for i in range(shape[0])]

    def layer(self, index: int) -> tuple[Any, Any]:
        """The keys and values (NB, BS, Hk, D) of one layer: views, no copy."""
        return self._layers[index]

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values together."""
        return int(self.keys.nbytes + self.values.nbytes)


def block_bytes(config: ModelConfig, block_size: int) -> int:
    """Bytes that one block takes, keys and values of all layers."""
    return block_size * config.kv_bytes_per_token


def _what_it_takes(config: ModelConfig, num_blocks: int, block_size: int) -> str:
    """A cache that does not fit, in numbers."""
    size, free = block_bytes(config, block_size), free_bytes()
    fits = min(free // size, num_blocks - 1)  # memory in pieces may hold less than it has
    if fits < 1:
        return _not_one_fits(free, size, block_size)
    return (
        f"the KV cache may take {free:,} bytes, and needs {num_blocks * size:,} for num_blocks = {num_blocks} "
        f"of block_size = {block_size}: lower num_blocks to {fits} or less, or free memory"
    )


def _not_one_fits(free: int, size: int, block_size: int) -> str:
    """A cache that is not to be had however few its blocks."""
    return (
        f"the KV cache may take {free:,} bytes, and one block of {block_size} tokens takes {size:,}: free memory, or "
        "choose a smaller block_size"
    )


def blocks_that_fit(free_bytes: int, config: ModelConfig, block_size: int, max_tokens: int) -> int:
    """How many blocks to make.

    Parameters
    ----------
    free_bytes : int
        What the cache may take.
    config : ModelConfig
    block_size : int
        BS.
    max_tokens : int
        The most tokens that will ever be kept at a time (requests x context length): no more blocks are made.

    Raises
    ------
    OutOfCacheMemory
        Not one block fits.
    """
    size = block_bytes(config, block_size)
    count = min(free_bytes // size, -(-max_tokens // block_size))
    if count < 1:
        raise OutOfCacheMemory(_not_one_fits(max(0, free_bytes), size, block_size))
    return int(count)


def slots_of(block_table: Sequence[int], start: int, count: int, block_size: int) -> np.ndarray:
    """The slots of the tokens start, ..., start + count - 1 of one sequence.

    Parameters
    ----------
    block_table : sequence of int
        The sequence's blocks.
    start, count : int
        Positions in the sequence.
    block_size : int
        BS.

    Returns
    -------
    (count,) int64

    Raises
    ------
    ValueError
        The table has not enough blocks.
    """
    room = len(block_table) * block_size
    if start < 0 or count < 0 or start + count > room:
        raise ValueError(
            f"slots_of: tokens {start} to {start + count - 1} were asked for; {len(block_table)} blocks of "
            f"{block_size} hold tokens 0 to {room - 1}"
        )
    positions = np.arange(start, start + count, dtype=np.int64)
    blocks = np.asarray(block_table, np.int64)[positions // block_size]
    return np.asarray(blocks * block_size + positions % block_size)
