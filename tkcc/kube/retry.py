"""How often and how long to try again: full-jitter exponential backoff within a bound.

Jitter matters when an API server comes back: without it every client that lost it returns in the same instant.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from tkcc.kube.errors import Unavailable

T = TypeVar("T")


@dataclass(frozen=True)
class Backoff:
    """`attempts` tries in all; before try n + 1 a pause drawn from [floor, first_s * 2**n], at most cap_s."""

    attempts: int = 4
    first_s: float = 0.2
    cap_s: float = 5.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or not 0 < self.first_s <= self.cap_s:
            raise ValueError(f"backoff needs attempts >= 1 and 0 < first_s <= cap_s, not {self}")

    def pause_s(self, failures: int, draw: float) -> float:
        """The pause after `failures` >= 1 failed tries; `draw` in [0, 1). Never under a tenth of the ceiling."""
        ceiling = min(self.cap_s, self.first_s * 2.0 ** min(failures - 1, 32))
        return ceiling * (0.1 + 0.9 * draw)


DEFAULT_BACKOFF = Backoff()


async def retrying(call: Callable[[], Awaitable[T]], backoff: Backoff) -> T:
    """Run `call` until it returns or raises something other than Unavailable, `backoff.attempts` times at most."""
    failures = 0
    while True:
        try:
            return await call()
        except Unavailable as err:
            failures += 1
            if failures >= backoff.attempts:
                raise
            asked_s = min(err.retry_after_s or 0.0, backoff.cap_s)
            await asyncio.sleep(max(asked_s, backoff.pause_s(failures, random.random())))
