"""The judge's clock: wall time of a step, less the time in which the kernel made it wait for a core that others had.

On a machine of one's own nothing is ever subtracted. On a shared one, a neighbour's turn on the core is no property of
the code under test. The kernel's own accounting is read from outside the runner, and only a wait of its only thread
counts: a runner that sleeps, or works in another thread, gets wall time.
"""

import time
from dataclasses import dataclass

_HELPERS_RATIO, _HELPERS_S = 0.02, 200e-6  # CPU time outside the main thread that is still accounting noise


@dataclass(frozen=True, slots=True)
class _Account:
    wall_s: float
    main_cpu_s: float  # of the runner's main thread
    main_wait_s: float  # it was runnable and had no core
    all_cpu_s: float  # of all its threads
    own_wait_s: float  # the same of this thread


class RunnerClock:
    """Times one runner's requests."""

    def __init__(self, pid: int) -> None:
        self._schedstat = f"/proc/{pid}/schedstat"
        self._cpu_clock = (~pid << 3) | 2  # the process's CPU clock, as clock_getcpuclockid(3) makes it
        self._start: _Account | None = None

    def start(self) -> None:
        self._start = self._read()

    def stop(self) -> float:
        """Seconds since `start`."""
        begin, end = self._start, self._read(time.perf_counter())
        assert begin is not None
        wall_s = end.wall_s - begin.wall_s
        main_cpu_s = end.main_cpu_s - begin.main_cpu_s
        helpers_s = end.all_cpu_s - begin.all_cpu_s - main_cpu_s
        if helpers_s > _HELPERS_S + _HELPERS_RATIO * main_cpu_s:
            return wall_s
        waited_s = end.main_wait_s - begin.main_wait_s + end.own_wait_s - begin.own_wait_s
        return max(wall_s - waited_s, main_cpu_s)

    def _read(self, wall_s: float | None = None) -> _Account:
        main_cpu_s, main_wait_s = _schedstat(self._schedstat)
        _, own_wait_s = _schedstat("/proc/thread-self/schedstat")
        try:
            all_cpu_s = time.clock_gettime(self._cpu_clock)
        except OSError:  # it is gone: its last account stands
            all_cpu_s = main_cpu_s
        return _Account(
            time.perf_counter() if wall_s is None else wall_s, main_cpu_s, main_wait_s, all_cpu_s, own_wait_s
        )


def _schedstat(path: str) -> tuple[float, float]:
    """Seconds on a core, and seconds runnable without one; zeros where the kernel does not account."""
    try:
        with open(path) as file:
            ran, waited, _ = file.read().split()
    except (OSError, ValueError):
        return 0.0, 0.0
    return int(ran) / 1e9, int(waited) / 1e9
