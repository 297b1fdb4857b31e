"""KV blocks: sharing, eviction, and that no block is ever lost or in two states."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tkcc.engine.serve.kv_blocks import BlockPool, chained_hashes

S = 4


def test_hashes_are_chained():
    a = chained_hashes([1, 2, 3, 4, 5, 6, 7, 8, 9], S)
    assert len(a) == 2  # full blocks only
    assert chained_hashes([1, 2, 3, 4], S) == a[:1]
    assert chained_hashes([5, 6, 7, 8], S, a[0]) == a[1:]
    assert chained_hashes([5, 6, 7, 8], S) != a[1:]  # the same tokens after another prefix
    assert chained_hashes([0, 2, 3, 4, 5, 6, 7, 8], S)[1] != a[1]


@pytest.mark.parametrize("tokens", [[], [1, 2, 3]])
def test_less_than_a_block_has_no_hash(tokens):
    assert chained_hashes(tokens, S) == []


def fill(pool, hashes):
    """A request that computes these blocks and ends."""
    blocks = pool.allocate(len(hashes))
    for block, key in zip(blocks, hashes, strict=True):
        pool.publish(block, key)
    pool.release(blocks)
    return blocks


def test_what_was_released_is_found_and_shared():
    pool = BlockPool(4)
    blocks = fill(pool, [b"a", b"b"])
    assert (pool.num_free, pool.num_cached, pool.num_used) == (2, 2, 0)
    assert pool.match([b"a", b"b", b"c"]) == blocks
    first, second = pool.allocate(1, blocks), pool.allocate(1, blocks)
    assert first[:2] == second[:2] == blocks and first[2] != second[2]
    assert pool.allocate(1) is None
    pool.release(first)
    assert pool.match([b"a", b"b"]) == blocks  # the second still holds them
    pool.release(second)
    pool.check()


def test_a_prefix_matches_only_from_its_start():
    pool = BlockPool(4)
    fill(pool, [b"a", b"b"])
    assert pool.match([b"b"]) != [] and pool.match([b"x", b"b"]) == []


def test_the_least_recently_used_goes_first_and_a_tail_before_its_head():
    pool = BlockPool(4)
    old, new = fill(pool, [b"old1", b"old2"]), fill(pool, [b"new1", b"new2"])
    assert pool.allocate(1) == [old[1]] and pool.match([b"old1", b"old2"]) == [old[0]]
    assert pool.allocate(1) == [old[0]]
    assert pool.allocate(1) == [new[1]]
    pool.check()


def test_use_makes_recent():
    pool = BlockPool(2)
    a, b = fill(pool, [b"a"]), fill(pool, [b"b"])
    pool.release(pool.allocate(0, a))
    assert pool.allocate(1) == b and pool.match([b"a"]) == a


def test_an_allocation_does_not_evict_what_it_shares():
    pool = BlockPool(2)
    shared = fill(pool, [b"a", b"b"])
    assert pool.allocate(1, shared) is None
    pool.check()
    assert pool.num_cached == 2  # a refusal changes nothing


def test_two_requests_that_computed_the_same_are_no_conflict():
    pool = BlockPool(3)
    one, two = pool.allocate(1), pool.allocate(1)
    pool.publish(one[0], b"a")
    pool.publish(two[0], b"a")
    pool.release(one)
    pool.release(two)
    assert (pool.num_cached, pool.num_free) == (1, 2)
    pool.check()


def test_a_double_release_is_a_programming_error():
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


class PoolMachine(RuleBasedStateMachine):
    """Requests come, share, publish and go in any order. The model: what each request believes its blocks hold."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(7)
        self.held = {}  # request number -> (blocks, hashes)
        self.count = 0

    @rule(family=st.integers(0, 2), length=st.integers(1, 5))
    def arrive(self, family, length):
        hashes = [b"%d-%d" % (family, i) for i in range(length)]
        shared = self.pool.match(hashes)
        blocks = self.pool.allocate(length - len(shared), shared)
        available = self.pool.num_available
        if blocks is None:
            assert available < length
            return
        assert blocks[: len(shared)] == shared and len(blocks) == length
        self.held[self.count] = (blocks, hashes)
        self.count += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def publish(self, data):
        blocks, hashes = self.held[data.draw(st.sampled_from(sorted(self.held)))]
        for block, key in zip(blocks, hashes, strict=True):
            self.pool.publish(block, key)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data):
        blocks, _ = self.held.pop(data.draw(st.sampled_from(sorted(self.held))))
        self.pool.release(blocks)

    @invariant()
    def nothing_is_lost(self):
        self.pool.check()
        assert self.pool.num_free + self.pool.num_used + self.pool.num_cached == self.pool.num_blocks
        assert self.pool.num_used == len({block for blocks, _ in self.held.values() for block in blocks})

    @invariant()
    def a_block_in_use_by_two_holds_the_same_for_both(self):
        content = {}
        for blocks, hashes in self.held.values():
            for block, key in zip(blocks, hashes, strict=True):
                assert content.setdefault(block, key) == key

    def teardown(self):
        for blocks, _ in self.held.values():
            self.pool.release(blocks)
        self.pool.check()
        assert self.pool.num_used == 0


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
