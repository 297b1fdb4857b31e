"""One asyncio task per object, fed by watch events and by its own timer, that runs one turn after another.

A turn reads everything afresh, so an event only says "sooner": its content is not looked at, and many events during a
turn cost one more turn. A turn that fails is run again after a growing pause; so is one that meets a conflict, but at
first without any.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from tkcc.kube.errors import ClusterError, Conflict
from tkcc.kube.retry import Backoff

log = logging.getLogger(__name__)


class Key(NamedTuple):
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class TurnResult(StrEnum):
    """The values of the label `result` of tkcc_reconcile_total."""

    DONE = "done"
    ENDED = "ended"
    CONFLICT = "conflict"
    UNREACHABLE = "cluster_error"
    ERROR = "error"


@dataclass(frozen=True)
class Pace:
    """How often turns may run."""

    gap_s: float = 0.25  # between two turns of one object, so that a burst of events is one turn
    turn_limit_s: float = 120.0  # a turn that takes longer is cut off and counts as failed
    backoff: Backoff = field(default_factory=lambda: Backoff(first_s=1.0, cap_s=60.0))


Turn = Callable[[Key], Awaitable[float | None]]  # seconds until the next one is due; None: none until woken
TurnObserver = Callable[[Key, TurnResult, float], None]  # told of each turn and how long it took, in seconds


class Driver:
    """Keeps one task per known object. All methods are called from the event loop's thread."""

    def __init__(self, turn: Turn, pace: Pace, observer: TurnObserver = lambda key, result, took_s: None):
        self._turn = turn
        self._pace = pace
        self._observer = observer
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._wakes: dict[Key, asyncio.Event] = {}
        self._stopping = asyncio.Event()

    @property
    def keys(self) -> frozenset[Key]:
        return frozenset(self._tasks)

    def wake(self, key: Key) -> None:
        """Have a turn run soon; starts the object's task if there is none."""
        if self._stopping.is_set():
            return
        self._wakes.setdefault(key, asyncio.Event()).set()
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._drive(key), name=f"drive {key}")

    async def stop(self, deadline_s: float) -> None:
        """No new turns; those that run may finish within the deadline, then they are cancelled."""
        self._stopping.set()
        for wake in self._wakes.values():
            wake.set()
        tasks = list(self._tasks.values())
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=deadline_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _drive(self, key: Key) -> None:
        wake, failures, conflicts = self._wakes[key], 0, 0
        try:
            while not self._stopping.is_set():
                wake.clear()
                result, due_s = await self._timed_turn(key)
                match result:
                    case TurnResult.ENDED:
                        if not wake.is_set():  # else it came back under the same name while we looked
                            return
                        due_s, failures, conflicts = 0.0, 0, 0
                    case TurnResult.DONE:
                        failures, conflicts = 0, 0
                    case TurnResult.CONFLICT:
                        failures, conflicts = 0, conflicts + 1
                        due_s = self._pace.gap_s * 2.0 ** min(conflicts - 1, 6)
                    case _:
                        failures += 1
                        due_s = self._pace.backoff.pause_s(failures, random.random())
                await self._pause(wake, due_s, deaf=failures > 0)
        finally:
            self._tasks.pop(key, None)
            self._wakes.pop(key, None)

    async def _pause(self, wake: asyncio.Event, due_s: float, *, deaf: bool) -> None:
        """Until due, or earlier on a wake. After a failure wakes do not count (deaf), or the events that a failing
        turn causes would run it in a tight loop."""
        gap_s = due_s if deaf else min(due_s, self._pace.gap_s)
        await _happens(self._stopping, gap_s)
        if not self._stopping.is_set():  # stop() sets the wakes too
            await _happens(wake, due_s - gap_s)

    async def _timed_turn(self, key: Key) -> tuple[TurnResult, float]:
        start = asyncio.get_running_loop().time()
        due_s: float | None = 0.0
        try:
            async with asyncio.timeout(self._pace.turn_limit_s):
                due_s = await self._turn(key)
            result = TurnResult.ENDED if due_s is None else TurnResult.DONE
        except Conflict as err:
            log.info("%s: written by somebody else meanwhile, again: %s", key, err)
            result = TurnResult.CONFLICT
        except ClusterError as err:
            log.warning("%s: %s", key, err)
            result = TurnResult.UNREACHABLE
        except TimeoutError:
            log.error("%s: a turn took more than %g s and was cut off", key, self._pace.turn_limit_s)
            result = TurnResult.ERROR
        except Exception:  # one object's bug must not stop the others, and a bug may heal with the next observation
            log.exception("%s: turn failed", key)
            result = TurnResult.ERROR
        self._observer(key, result, asyncio.get_running_loop().time() - start)
        return result, due_s or 0.0


async def _happens(event: asyncio.Event, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
