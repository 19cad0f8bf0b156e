"""The block manager: hand-made cases, and any sequence of calls against a model of sets."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tinyvllm_ref.block_manager import BlockManager


def test_a_table_grows_by_whole_blocks_when_tokens_need_them():
    blocks = BlockManager(num_blocks=4, block_size=16)
    for tokens, length in [(1, 1), (16, 1), (17, 2), (32, 2), (33, 3)]:
        assert blocks.allocate("a", tokens)
        assert len(blocks.table("a")) == length
        assert blocks.num_free == 4 - length


def test_a_refused_allocation_changes_nothing():
    blocks = BlockManager(num_blocks=3, block_size=4)
    assert blocks.allocate("a", 8)
    before = list(blocks.table("a"))
    assert not blocks.allocate("b", 5)
    assert not blocks.allocate("a", 17)
    assert blocks.table("a") == before
    assert blocks.num_free == 1
    with pytest.raises(KeyError, match="'b' has no blocks"):
        blocks.table("b")


def test_a_table_never_shrinks():
    blocks = BlockManager(num_blocks=3, block_size=4)
    blocks.allocate("a", 9)
    assert blocks.allocate("a", 1)
    assert len(blocks.table("a")) == 3


def test_freed_twice_is_an_error():
    blocks = BlockManager(num_blocks=2, block_size=4)
    blocks.allocate("a", 1)
    blocks.free("a")
    with pytest.raises(KeyError, match="never allocated, or freed already"):
        blocks.free("a")
    assert blocks.num_free == 2


def test_a_fork_shares_full_blocks_only_and_frees_them_with_the_last_owner():
    blocks = BlockManager(num_blocks=8, block_size=4)
    blocks.allocate("parent", 11)
    assert blocks.fork("parent", "child", 11) == 8
    assert blocks.table("child") == blocks.table("parent")[:2]
    assert blocks.allocate("child", 11)
    assert blocks.table("child")[2] != blocks.table("parent")[2]
    assert blocks.num_free == 4
    blocks.check()
    blocks.free("parent")
    assert blocks.num_free == 5
    blocks.check()
    blocks.free("child")
    assert blocks.num_free == 8
    blocks.check()


def test_a_fork_of_less_than_a_block_shares_nothing():
    blocks = BlockManager(num_blocks=2, block_size=4)
    blocks.allocate("parent", 3)
    assert blocks.fork("parent", "child", 3) == 0
    assert blocks.table("child") == []
    blocks.free("child")
    blocks.check()


def test_wrong_calls_are_named():
    with pytest.raises(ValueError, match="num_blocks is 0; it must be at least 1"):
        BlockManager(0, 16)
    with pytest.raises(ValueError, match="block_size is -1"):
        BlockManager(4, -1)
    blocks = BlockManager(4, 4)
    with pytest.raises(ValueError, match="num_tokens is 0"):
        blocks.allocate("a", 0)
    blocks.allocate("a", 4)
    blocks.allocate("b", 4)
    with pytest.raises(ValueError, match="'b' has blocks already"):
        blocks.fork("a", "b", 4)
    with pytest.raises(ValueError, match="5 tokens need more"):
        blocks.fork("a", "c", 5)
    with pytest.raises(KeyError, match="'nobody'"):
        blocks.fork("nobody", "c", 4)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda blocks: blocks._free.pop(), "block . is in 0 tables and not free"),
        (lambda blocks: blocks._free.append(blocks._free[0]), "twice in the free list"),
        (lambda blocks: blocks._free.append(blocks.table("a")[0]), "block 0 is in 1 tables and free"),
        (lambda blocks: blocks.table("a").append(3), "references are counted"),
        (lambda blocks: blocks.table("a").append(0), "has a block twice"),
    ],
)
def test_check_finds_damage(damage, message):
    blocks = BlockManager(4, 4)
    blocks.allocate("a", 5)
    blocks.check()
    damage(blocks)
    with pytest.raises(RuntimeError, match=message):
        blocks.check()


class AgainstSets(RuleBasedStateMachine):
    """Any sequence of calls; the model knows only who must own how many blocks, and who shares which."""

    def __init__(self):
        super().__init__()
        self.blocks = BlockManager(num_blocks=12, block_size=4)
        self.tables = {}

    def owned(self):
        return {block for table in self.tables.values() for block in table}

    @rule(name=st.sampled_from("abcdef"), tokens=st.integers(1, 60))
    def allocate(self, name, tokens):
        old = self.tables.get(name, [])
        missing = max(0, -(-tokens // 4) - len(old))
        fits = missing <= 12 - len(self.owned())
        assert self.blocks.allocate(name, tokens) is fits
        if fits:
            new = list(self.blocks.table(name))
            assert new[: len(old)] == old
            assert len(new) == len(old) + missing
            assert not set(new[len(old) :]) & self.owned(), "a block of somebody else"
            self.tables[name] = new

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data):
        name = data.draw(st.sampled_from(sorted(self.tables)))
        self.blocks.free(name)
        del self.tables[name]

    @precondition(lambda self: self.tables and len(self.tables) < 6)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(sorted(self.tables)))
        child = data.draw(st.sampled_from([name for name in "abcdef" if name not in self.tables]))
        tokens = data.draw(st.integers(0, 4 * len(self.tables[parent])))
        assert self.blocks.fork(parent, child, tokens) == tokens // 4 * 4
        self.tables[child] = self.tables[parent][: tokens // 4]

    @invariant()
    def nothing_is_lost(self):
        self.blocks.check()
        assert self.blocks.num_free == 12 - len(self.owned())
        for name, table in self.tables.items():
            assert self.blocks.table(name) == table


AgainstSets.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAgainstSets = AgainstSets.TestCase
