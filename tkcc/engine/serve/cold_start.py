"""How long a start takes, phase by phase, from the process's first moment to the first servable request."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class ColdStart:
    """Seconds by phase, in order. `total` is from the process's start to `finish`."""

    def __init__(self) -> None:
        self.phases_s: dict[str, float] = {}
        self._started_s = time.monotonic() - _process_age_s()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start_s = time.monotonic()
        try:
            yield
        finally:
            self.phases_s[name] = time.monotonic() - start_s

    def mark(self, name: str) -> None:
        """Everything up to now, since the process started, as one phase."""
        self.phases_s[name] = time.monotonic() - self._started_s

    def finish(self) -> None:
        self.mark("total")


def _process_age_s() -> float:
    """Seconds since this process was executed; 0 where the system does not tell."""
    try:
        # Field 22 of stat, counted after the command's closing bracket: start time in ticks of 10 ms since boot.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, uptime_s - ticks / 100)
