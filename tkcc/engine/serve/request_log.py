"""The last requests that ended, without their text: what the operator judges a canary by, request by request."""

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """Field names are the wire's (docs/architecture.md): times in seconds, startedAtMs in Unix milliseconds."""

    startedAtMs: int
    promptTokens: int
    cachedTokens: int
    outputTokens: int
    ttftS: float | None
    tpotS: float | None
    outcome: str


class RequestLog:
    """A ring of `capacity` requests. Sequence numbers start at 0 and are never used twice."""

    def __init__(self, capacity: int) -> None:
        self._ring: deque[LoggedRequest] = deque(maxlen=capacity)
        self._next = 0

    def append(self, entry: LoggedRequest) -> None:
        self._ring.append(entry)
        self._next += 1

    def since(self, seq: int) -> dict[str, Any]:
        """Entries from `seq` on; `dropped` of them have left the ring, `next` is what to ask for next time."""
        oldest = self._next - len(self._ring)
        first = min(max(seq, oldest), self._next)
        entries = [{"seq": oldest + i, **asdict(entry)} for i, entry in enumerate(self._ring) if oldest + i >= first]
        return {"next": self._next, "dropped": max(0, oldest - max(seq, 0)), "requests": entries}
