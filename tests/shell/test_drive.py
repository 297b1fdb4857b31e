"""The driver's timing rules, with turns that a test controls; milliseconds of real time, no sleeps of its own."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from tkcc.kube.errors import Conflict, Unavailable
from tkcc.kube.retry import Backoff
from tkcc.shell.drive import Driver, Key, Pace, TurnResult

KEY = Key("default", "llama")
FAST = Pace(gap_s=0.01, turn_limit_s=0.2, backoff=Backoff(first_s=0.03, cap_s=0.06))
NEVER_S = 3600.0


class Turns:
    """A turn whose outcomes are given beforehand; the last one repeats."""

    def __init__(self, *outcomes: float | Exception | Callable[[], float | None] | None):
        self.outcomes = list(outcomes)
        self.count = 0
        self.changed = asyncio.Condition()

    async def __call__(self, key: Key) -> float | None:
        outcome = self.outcomes[min(self.count, len(self.outcomes) - 1)]
        async with self.changed:
            self.count += 1
            self.changed.notify_all()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome() if callable(outcome) else outcome

    async def reach(self, count: int) -> None:
        async with asyncio.timeout(5), self.changed:
            await self.changed.wait_for(lambda: self.count >= count)


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., tuple[Driver, list[TurnResult]]]]:
    drivers: list[Driver] = []

    def make(turn: Turns, pace: Pace = FAST) -> tuple[Driver, list[TurnResult]]:
        results: list[TurnResult] = []
        drivers.append(Driver(turn, pace, lambda key, result, took_s: results.append(result)))
        return drivers[-1], results

    yield make
    for driver in drivers:
        await driver.stop(deadline_s=1)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_timer_runs_turns_without_any_event(start):
    turns = Turns(0.01)
    driver, _ = start(turns)
    driver.wake(KEY)
    await turns.reach(4)


async def test_an_event_runs_a_turn_long_before_the_timer(start):
    turns = Turns(NEVER_S)
    driver, _ = start(turns)
    driver.wake(KEY)
    await turns.reach(1)
    driver.wake(KEY)
    await turns.reach(2)


async def test_a_burst_of_events_during_a_turn_costs_one_more_turn(start):
    release = asyncio.Event()
    count = 0

    async def turn(key: Key) -> float:
        nonlocal count
        count += 1
        await release.wait()
        return NEVER_S

    driver, results = start(turn)
    driver.wake(KEY)
    await settle()
    for _ in range(50):
        driver.wake(KEY)
    release.set()
    async with asyncio.timeout(5):
        while len(results) < 2:
            await asyncio.sleep(0.01)
    await asyncio.sleep(5 * FAST.gap_s)
    assert count == 2


async def test_a_conflict_runs_again_at_once_and_is_no_failure(start):
    turns = Turns(Conflict("409"), NEVER_S)
    driver, results = start(turns, Pace(gap_s=0.01, backoff=Backoff(first_s=50, cap_s=60)))
    driver.wake(KEY)
    await turns.reach(2)
    await settle()
    assert results == [TurnResult.CONFLICT, TurnResult.DONE]


async def test_failures_wait_longer_each_time_and_events_do_not_shorten_that(start):
    turns = Turns(Unavailable("down"))
    driver, results = start(turns, Pace(gap_s=0.0, backoff=Backoff(first_s=20, cap_s=60)))
    driver.wake(KEY)
    await turns.reach(1)
    for _ in range(20):
        driver.wake(KEY)
        await settle()
    assert turns.count == 1
    assert results == [TurnResult.UNREACHABLE]


async def test_after_failures_it_recovers(start):
    turns = Turns(Unavailable("down"), ValueError("a bug"), NEVER_S)
    driver, results = start(turns)
    driver.wake(KEY)
    await turns.reach(3)
    await settle()
    assert results == [TurnResult.UNREACHABLE, TurnResult.ERROR, TurnResult.DONE]


async def test_a_hanging_turn_is_cut_off(start):
    async def turn(key: Key) -> float:
        await asyncio.Event().wait()
        return 0.0

    driver, results = start(turn)
    driver.wake(KEY)
    async with asyncio.timeout(5):
        while not results:
            await asyncio.sleep(0.01)
    assert results[0] is TurnResult.ERROR


async def test_the_task_of_a_deleted_object_ends(start):
    turns = Turns(None)
    driver, results = start(turns)
    driver.wake(KEY)
    await turns.reach(1)
    async with asyncio.timeout(5):
        while driver.keys:
            await asyncio.sleep(0.001)
    assert results == [TurnResult.ENDED]


async def test_an_object_made_again_while_its_end_was_noticed_is_driven(start):
    def recreated() -> None:
        driver.wake(KEY)  # the event of the new object arrives during the turn that misses the old one

    turns = Turns(recreated, NEVER_S)
    driver, results = start(turns)
    driver.wake(KEY)
    await turns.reach(2)
    await settle()
    assert results == [TurnResult.ENDED, TurnResult.DONE]


async def test_one_failing_object_does_not_slow_another(start):
    seen: list[str] = []

    async def turn(key: Key) -> float:
        seen.append(key.name)
        if key.name == "bad":
            raise ValueError("a bug")
        return 0.01

    driver, _ = start(turn, Pace(gap_s=0.0, backoff=Backoff(first_s=50, cap_s=60)))
    driver.wake(Key("default", "bad"))
    driver.wake(Key("default", "good"))
    async with asyncio.timeout(5):
        while seen.count("good") < 5:
            await asyncio.sleep(0.01)
    assert seen.count("bad") == 1


async def test_stop_lets_a_running_turn_finish_but_not_beyond_its_deadline(start):
    started, ended = asyncio.Event(), []

    async def turn(key: Key) -> float:
        started.set()
        if key.name == "short":
            await asyncio.sleep(0.02)
            ended.append(key.name)
        else:
            await asyncio.Event().wait()
        return NEVER_S

    driver, _ = start(turn, Pace(turn_limit_s=60))
    driver.wake(Key("default", "short"))
    driver.wake(Key("default", "hangs"))
    await started.wait()
    async with asyncio.timeout(2):
        await driver.stop(deadline_s=0.1)
    assert ended == ["short"]
    assert not driver.keys
    driver.wake(KEY)
    assert not driver.keys, "a stopped driver starts nothing"
