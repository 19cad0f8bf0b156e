"""Lesson 21's allocator under random traces: no block is lost, given twice, or taken from anyone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyvllm_ref import emulation
from tinyvllm_ref.course.answers import make_answer
from tinyvllm_ref.course.exercises import exercise_of
from tinyvllm_ref.course.lessons import solution_cell

BlockManager = make_answer(exercise_of("21.4"), solution_cell("21.4"), emulation)
STEPS = st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 60)), max_size=80)


@given(st.integers(1, 20), st.integers(1, 17), STEPS)
def test_no_leak_no_double_free_no_aliasing(
    num_blocks: int, block_size: int, steps: list[tuple[str, int]]
) -> None:
    blocks, tokens = BlockManager(num_blocks, block_size), {}
    for name, count in steps:
        before = {one: list(blocks.table(one)) for one in tokens}
        if count == 0 and name in tokens:
            blocks.free(name)
            del tokens[name], before[name]
        elif count == 0:
            with pytest.raises(KeyError):
                blocks.free(name)
        else:
            free = blocks.num_free
            missing = max(0, -(-count // block_size) - len(before.get(name, [])))
            given_blocks = blocks.allocate(name, count)
            assert given_blocks is (missing <= free)
            assert blocks.num_free == free - missing * given_blocks
            if given_blocks:
                tokens[name] = max(count, tokens.get(name, 0))
        tables = {one: list(blocks.table(one)) for one in tokens}
        held = [block for table in tables.values() for block in table]
        assert len(held) == len(set(held))
        assert set(held) <= set(range(num_blocks))
        assert len(held) + blocks.num_free == num_blocks
        assert all(tables[one][: len(table)] == table for one, table in before.items() if one in tables)
        assert all(len(tables[one]) == -(-count // block_size) for one, count in tokens.items())
        blocks.check()
