"""Which KV blocks are free, used or cached, and the prefix cache over them. Host arithmetic only.

A block is *used* while a request refers to it, *cached* when nobody does but its content is known by hash, else *free*:
free + used + cached == num_blocks at every moment. Cached blocks are handed out again, least recently used first, when
no free one is left. Hashes are chained, so one hash names a block's tokens and all tokens before them.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from hashlib import blake2b


def chained_hashes(tokens: Sequence[int], block_tokens: int, parent: bytes = b"") -> list[bytes]:
    """One 128-bit hash per full block of `tokens`, which continue the prefix that `parent` is the last hash of.

    128 bits: equal hashes are taken for equal content, so a collision would serve another prompt's keys and values.
    """
    hashes = []
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        block = array("q", tokens[end - block_tokens : end])
        parent = blake2b(block.tobytes(), digest_size=16, key=parent).digest()
        hashes.append(parent)
    return hashes


class BlockPool:
    """Blocks 1 .. num_blocks; block 0 is the scratch block of the forward pass and never handed out."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, num_blocks
        self.num_blocks = num_blocks
        self._free = deque(range(1, num_blocks + 1))
        self._refs = [0] * (num_blocks + 1)
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_available(self) -> int:
        """Blocks that an allocation may take: free ones, and cached ones by eviction."""
        return len(self._free) + len(self._cached)

    @property
    def usage_ratio(self) -> float:
        return 1.0 - self.num_available / self.num_blocks

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest cached prefix; changes nothing."""
        blocks = []
        for key in hashes:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def allocate(self, num_new: int, shared: Sequence[int] = ()) -> list[int] | None:
        """`shared` (from `match`) with a reference more, then `num_new` blocks of unknown content; None if too few."""
        num_revived = sum(1 for block in shared if not self._refs[block])
        if num_new > self.num_available - num_revived:
            return None
        for block in shared:  # before any eviction, which could take one of them
            if not self._refs[block]:
                del self._cached[block]
            self._refs[block] += 1
        return [*shared, *(self._take() for _ in range(num_new))]

    def _take(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._hash_of.pop(block)]
        self._refs[block] = 1
        return block

    def publish(self, block: int, key: bytes) -> None:
        """The block's content is complete: prefixes with this hash may share it from now on."""
        assert self._refs[block], f"block {block} is published but not used"
        if key not in self._block_of and block not in self._hash_of:
            self._block_of[key] = block
            self._hash_of[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each. The tail of a prefix becomes the first to be evicted: a head is of more use."""
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} is released twice"
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if block in self._hash_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def check(self) -> None:
        """The invariants, for tests. Raises AssertionError."""
        used = {block for block, refs in enumerate(self._refs) if refs}
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & used or free & cached or used & cached), "a block is in two states"
        assert free | used | cached == set(range(1, self.num_blocks + 1)), "a block is lost"
        assert {block: key for key, block in self._block_of.items()} == self._hash_of, "hash maps disagree"
        assert cached <= self._hash_of.keys() and not free & self._hash_of.keys()
