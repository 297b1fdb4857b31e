"""The engine's loop: schedule, run the step in one worker thread, commit, hand tokens to whoever waits for them.

All state lives on the event loop, which stays free while a step runs. It decides who is admitted to the queue and when
the engine is broken; what a step holds is the scheduler's matter, what a token means the server's.
"""

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tkcc.engine.serve.request import Outcome, Request, SampledToken, SamplingParams
from tkcc.engine.serve.scheduler import ScheduledStep, Scheduler
from tkcc.engine.step import StepKind

RunStep = Callable[[ScheduledStep], Sequence[SampledToken | None]]


@dataclass(frozen=True, slots=True)
class Limits:
    max_waiting: int = 128  # requests beside those that a step has room for
    step_timeout_s: float = 300.0  # a step that takes longer hangs
    max_failed_steps: int = 3  # of one kind in a row: then the engine gives up, as a device error would never go away


class QueueFullError(Exception):
    """No place in the queue; try again in `retry_after_s` seconds."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"the queue is full; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class DrainingError(Exception):
    """The server is shutting down and takes no new requests."""


class StepFailedError(Exception):
    """The forward pass failed under this request."""


class EngineBrokenError(Exception):
    """The engine cannot go on: its forward pass hangs, or failed several times in a row."""


@dataclass(eq=False)
class Ticket:
    """One request as its submitter sees it: an asynchronous stream of tokens, and its times (loop clock, seconds)."""

    request: Request
    arrived_at_ms: int  # Unix time
    arrived_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    _queue: asyncio.Queue[SampledToken | Exception | None] = field(default_factory=asyncio.Queue)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None with fewer than two."""
        count = len(self.request.output)
        if self.first_token_s is None or self.last_token_s is None or count < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (count - 1)

    async def next_token(self) -> SampledToken | None:
        """The next token as soon as it is there, None after the last. Raises StepFailedError or DrainingError."""
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    def push(self, token: SampledToken, now_s: float) -> None:
        self.first_token_s = now_s if self.first_token_s is None else self.first_token_s
        self.last_token_s = now_s
        self._queue.put_nowait(token)

    def close(self, error: Exception | None) -> None:
        self._queue.put_nowait(error)


OnEnd = Callable[[Ticket, Outcome], None]


class Engine:
    """`run` is the loop; `submit` and `end` are called from the same event loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        run_step: RunStep,
        limits: Limits,
        on_start: Callable[[Ticket], None] = lambda ticket: None,
        on_end: OnEnd = lambda ticket, outcome: None,
    ) -> None:
        self.scheduler = scheduler
        self.limits = limits
        self._run_step = run_step
        self._on_start, self._on_end = on_start, on_end
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tkcc-step")
        self._tickets: dict[Request, Ticket] = {}
        self._wake = asyncio.Event()
        self._durations_s: deque[float] = deque(maxlen=32)
        # In a row, by kind: when every decode fails, the prefills between them may still go well.
        self._num_failed = dict.fromkeys(StepKind, 0)
        self.is_accepting = True

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    def submit(
        self, request_id: str, prompt: Sequence[int], sampling: SamplingParams, is_probe: bool = False
    ) -> Ticket:
        """Queue a request that fits (see Scheduler.can_ever_fit). Raises QueueFullError, DrainingError."""
        if not self.is_accepting:
            raise DrainingError("the server is shutting down")
        if len(self._tickets) >= self.scheduler.config.max_running + self.limits.max_waiting:
            raise QueueFullError(self._retry_after_s())
        rng = random.Random(sampling.seed)  # None seeds from the system's entropy
        request = Request(request_id, tuple(prompt), sampling, rng, is_probe=is_probe)
        ticket = Ticket(request, int(time.time() * 1000), self._now_s())
        self.scheduler.add(request)
        self._tickets[request] = ticket
        self._on_start(ticket)
        self._wake.set()
        return ticket

    def end(self, ticket: Ticket, outcome: Outcome, error: Exception | None = None) -> None:
        """Stop a request now: OK at a stop string, CANCELLED or ERROR. Does nothing if it has ended already."""
        if self._tickets.pop(ticket.request, None) is None:
            return
        self.scheduler.remove(ticket.request)
        ticket.ended_s = self._now_s()
        if outcome is Outcome.OK:
            self._durations_s.append(ticket.ended_s - ticket.arrived_s)
        ticket.close(error)
        self._on_end(ticket, outcome)

    async def run(self) -> None:
        """Step until cancelled. Raises EngineBrokenError; every request has been told by then."""
        loop = asyncio.get_running_loop()
        while True:
            step = self.scheduler.schedule()
            if step is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            running = loop.run_in_executor(self._thread, self._run_step, step)
            await asyncio.wait({running}, timeout=self.limits.step_timeout_s)
            if not running.done():
                self._give_up(f"a {step.batch.kind} step took over {self.limits.step_timeout_s:.0f} s")
            try:
                tokens = running.result()
            except Exception as err:  # a forward pass may raise anything
                self._fail_step(step, err)
            else:
                self._num_failed[step.batch.kind] = 0
                self._commit(step, tokens)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait for those that run; what is left after `timeout_s` is ended with an error."""
        self.is_accepting = False
        deadline_s = self._now_s() + timeout_s
        while self._tickets and self._now_s() < deadline_s:
            await asyncio.sleep(0.05)
        self.end_all(DrainingError("the server is shutting down"))

    def close(self) -> None:
        """Let the worker thread go, once its step is over."""
        self._thread.shutdown(wait=False)

    def end_all(self, error: Exception) -> None:
        for ticket in list(self._tickets.values()):
            self.end(ticket, Outcome.ERROR, error)

    def _commit(self, step: ScheduledStep, tokens: Sequence[SampledToken | None]) -> None:
        finished = self.scheduler.commit(step, tokens)
        now_s = self._now_s()
        for request, token in zip(step.requests, tokens, strict=True):
            ticket = self._tickets.get(request)
            if token is not None and ticket is not None:
                ticket.push(token, now_s)
        for request in finished:
            if request in self._tickets:
                self.end(self._tickets[request], Outcome.OK)

    def _fail_step(self, step: ScheduledStep, err: Exception) -> None:
        reason = f"{type(err).__name__}: {err}"
        for request in step.requests:
            if request in self._tickets:
                self.end(self._tickets[request], Outcome.ERROR, StepFailedError(reason))
        kind = step.batch.kind
        self._num_failed[kind] += 1
        if self._num_failed[kind] >= self.limits.max_failed_steps:
            self._give_up(f"{self._num_failed[kind]} {kind} steps failed in a row, the last with {reason}")

    def _give_up(self, reason: str) -> None:
        self.is_accepting = False
        self.end_all(StepFailedError(reason))
        raise EngineBrokenError(reason)

    def _retry_after_s(self) -> int:
        """About as long as a request takes at present, for then a place has become free."""
        durations_s = sorted(self._durations_s)
        return min(60, max(1, round(durations_s[len(durations_s) // 2]))) if durations_s else 1

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()
