"""How long each step of the demo took."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Seconds by step, in the order in which the steps began; a step that failed counts too."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self.steps_s: dict[str, float] = {}

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        start_s = time.monotonic()
        self.steps_s[name] = 0.0
        try:
            yield
        finally:
            self.steps_s[name] = time.monotonic() - start_s
