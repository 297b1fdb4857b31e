"""A bounded recording of served requests for replay: arrivals, lengths and prefix-block hashes, never text. Opt-in."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tkcc.api.workload import RecordedRequest, Recording

HASH_BITS = 48  # exact in a JSON number; enough to tell the prefixes of one recording apart


@dataclass(frozen=True, slots=True)
class _Entry:
    arrived_at_ms: int  # Unix time
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    block_hashes: tuple[int, ...]


class Recorder:
    """A ring of the last `capacity` requests that gave at least one token."""

    def __init__(self, capacity: int, block_tokens: int) -> None:
        self._ring: deque[_Entry] = deque(maxlen=capacity)
        self._block_tokens = block_tokens

    def append(
        self, arrived_at_ms: int, prompt_tokens: int, output_tokens: int, cached_tokens: int, hashes: Sequence[bytes]
    ) -> None:
        """`hashes`: the chained hashes of the prompt's full blocks."""
        short = tuple(int.from_bytes(key[: HASH_BITS // 8]) for key in hashes)
        self._ring.append(_Entry(arrived_at_ms, prompt_tokens, output_tokens, cached_tokens, short))

    def since(self, arrived_at_ms: int, limit: int) -> Recording:
        """The latest `limit` requests that arrived at or after `arrived_at_ms`, oldest first."""
        kept = sorted((e for e in self._ring if e.arrived_at_ms >= arrived_at_ms), key=lambda e: e.arrived_at_ms)
        kept = kept[max(0, len(kept) - limit) :]
        first_ms = kept[0].arrived_at_ms if kept else 0
        return Recording(
            block_tokens=self._block_tokens,
            source="recorded",
            started_at_ms=first_ms,
            requests=tuple(
                RecordedRequest(
                    arrival_ms=entry.arrived_at_ms - first_ms,
                    prompt_tokens=entry.prompt_tokens,
                    output_tokens=entry.output_tokens,
                    cached_tokens=entry.cached_tokens,
                    block_hashes=entry.block_hashes,
                )
                for entry in kept
            ),
        )
