"""Who owns which block of the paged KV cache: a free list, and a block table per request.

The manager deals in numbers only; the arrays that the numbers index are elsewhere. Token ``t`` of a request
lies in slot ``table[t // block_size] * block_size + t % block_size`` of the cache.

>>> blocks = BlockManager(num_blocks=4, block_size=16)
>>> blocks.allocate("a", num_tokens=17)
True
>>> blocks.table("a")
[0, 1]
>>> blocks.allocate("b", num_tokens=33)  # needs three blocks, two are free
False
>>> blocks.free("a")
>>> blocks.num_free
4
"""

from __future__ import annotations


class BlockManager:
    """Hands out the blocks of a pool of fixed size, and takes them back.

    A block may belong to several requests (completions of one prompt share the prompt's full blocks, which
    nobody writes to again); it is free again when the last of them gives it back.

    Parameters
    ----------
    num_blocks : int
        Blocks of the pool.
    block_size : int
        Token slots in a block.

    Raises
    ------
    ValueError
        One of them is not positive.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"BlockManager: {name} is {value}; it must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack with block 0 on top: the block that was freed last is the one whose memory is still in a
        # cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._tables: dict[str, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that belong to nobody."""
        return len(self._free)

    def allocate(self, request_id: str, num_tokens: int) -> bool:
        """Make a request's table long enough for its first `num_tokens` tokens.

        Returns
        -------
        bool
            False where the pool has too few free blocks; nothing has changed then.

        Raises
        ------
        ValueError
            `num_tokens` is not positive.
        """
        if num_tokens < 1:
            raise ValueError(f"request {request_id!r}: num_tokens is {num_tokens}; it must be at least 1")
        table = self._tables.get(request_id, [])
        missing = (num_tokens + self.block_size - 1) // self.block_size - len(table)
        if missing <= 0:  # the usual case: the last block has room
            return True
        if missing > len(self._free):
            return False
        self._tables[request_id] = table
        for _ in range(missing):
            block = self._free.pop()
            self._references[block] = 1
            table.append(block)
        return True

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> int:
        """Start a request's table with the full blocks among the first `num_tokens` tokens of another's.

        Parameters
        ----------
        parent_id, child_id : str
            The parent has a table that covers `num_tokens`; the child has none.
        num_tokens : int
            Tokens that both have in common and the parent has computed.

        Returns
        -------
        int
            Tokens in the shared blocks: `num_tokens` rounded down to whole blocks. The child computes the
            rest into blocks of its own, so a shared block is never written to.

        Raises
        ------
        KeyError
            The parent has no table.
        ValueError
            The child has one, or the parent's table is shorter than `num_tokens`.
        """
        table = self.table(parent_id)
        if child_id in self._tables:
            raise ValueError(
                f"request {child_id!r} has blocks already; only a request without can be forked into"
            )
        if num_tokens > len(table) * self.block_size:
            raise ValueError(f"request {parent_id!r} has {len(table)} blocks; {num_tokens} tokens need more")
        shared = table[: num_tokens // self.block_size]
        for block in shared:
            self._references[block] += 1
        self._tables[child_id] = list(shared)
        return len(shared) * self.block_size

    def free(self, request_id: str) -> None:
        """Give back all blocks of a request.

        Raises
        ------
        KeyError
            It has none: never allocated, or freed already.
        """
        table = self.table(request_id)
        del self._tables[request_id]
        for block in reversed(table):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)

    def table(self, request_id: str) -> list[int]:
        """The request's blocks in the order of its tokens: the manager's own list, not to be changed.

        Raises
        ------
        KeyError
            It has none.
        """
        try:
            return self._tables[request_id]
        except KeyError:
            raise KeyError(
                f"request {request_id!r} has no blocks: never allocated, or freed already"
            ) from None

    def check(self) -> None:
        """Verify that free list and tables together hold every block, each as often as it is counted.

        Raises
        ------
        RuntimeError
            They do not; the message names the block.
        """
        references = [0] * self.num_blocks
        for request_id, table in self._tables.items():
            if len(set(table)) != len(table):
                raise RuntimeError(f"request {request_id!r} has a block twice: {table}")
            for block in table:
                references[block] += 1
        if len(set(self._free)) != len(self._free):
            raise RuntimeError(f"a block is twice in the free list: {sorted(self._free)}")
        free = set(self._free)
        for block, count in enumerate(references):
            if count != self._references[block]:
                raise RuntimeError(
                    f"block {block} is in {count} tables; {self._references[block]} references are counted"
                )
            if (count == 0) is not (block in free):
                raise RuntimeError(f"block {block} is in {count} tables and {'' if count else 'not '}free")
