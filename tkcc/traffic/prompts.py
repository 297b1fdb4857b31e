"""Token ids for planned requests, and the recording that serving pods would make of them.

A block's tokens are a fixed function of its id, so equal ids are equal tokens in every process. They are drawn from a
range of the vocabulary that holds no special token; the text they spell means nothing and its lengths are all that
matter.
"""

import hashlib
import sys
from array import array
from dataclasses import dataclass

from tkcc.api.workload import RecordedRequest, Recording
from tkcc.traffic.shape import Plan, PlannedRequest
from tkcc.traffic.trace import TraceError

_HASH_BITS = 48  # as api.RecordedRequest


@dataclass(frozen=True)
class VocabRange:
    """Token ids `first` to `last`, both included."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last:
            raise TraceError(f"vocabulary range {self.first}:{self.last}: expected FIRST:LAST with 0 <= FIRST < LAST")


# Byte-level BPE vocabularies keep special tokens at either end; every model this project serves has more than 49,000.
DEFAULT_VOCAB = VocabRange(1_000, 48_000)


def prompt_ids(request: PlannedRequest, vocab: VocabRange) -> list[int]:
    """The prompt's token ids, `request.prompt_tokens` of them."""
    ids: list[int] = []
    for block, tokens in request.spans:
        ids += _tokens(f"block {block}", tokens, vocab)
    return ids + _tokens(f"tail {request.index}", request.tail_tokens, vocab)


def to_recording(plan: Plan, block_tokens: int, vocab: VocabRange = DEFAULT_VOCAB) -> Recording:
    """What pods with prefix blocks of `block_tokens` and an infinite cache would have recorded of the plan."""
    seen: set[int] = set()
    requests = []
    for request in plan.requests:
        hashes = _chained_hashes(prompt_ids(request, vocab), block_tokens)
        shared = next((i for i, value in enumerate(hashes) if value not in seen), len(hashes))
        seen.update(hashes)
        requests.append(
            RecordedRequest(
                arrival_ms=round(request.arrival_s * 1e3),
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.output_tokens,
                # One token is always computed: a prefill has to give the first output token.
                cached_tokens=min(shared * block_tokens, request.prompt_tokens - 1),
                block_hashes=hashes,
            )
        )
    return Recording(block_tokens=block_tokens, source="synthetic", requests=tuple(requests))


def _tokens(name: str, count: int, vocab: VocabRange) -> list[int]:
    """The first `count` of an endless stream that `name` fixes. A longer stream starts with the shorter one."""
    words = array("I")
    words.frombytes(hashlib.shake_128(name.encode()).digest(count * words.itemsize))
    if sys.byteorder == "big":
        words.byteswap()
    size = vocab.last - vocab.first + 1
    return [vocab.first + word % size for word in words]


def _chained_hashes(ids: list[int], block_tokens: int) -> tuple[int, ...]:
    hashes = []
    running = b""
    for end in range(block_tokens, len(ids) + 1, block_tokens):
        block = array("I", ids[end - block_tokens : end]).tobytes()
        running = hashlib.blake2b(running + block, digest_size=_HASH_BITS // 8).digest()
        hashes.append(int.from_bytes(running, "big"))
    return tuple(hashes)
