"""The forkserver as the supervisor sees it: processes forked on request, and their ends reported.

All of a tier's processes that need torch come from it, so that torch is imported once.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tkcc.engine.tier import channel
from tkcc.engine.tier.channel import Message
from tkcc.engine.tier.link import Link, child_environment, start_child, stop_child

START_S = 300.0  # importing torch takes seconds, on a starved core minutes
FORK_S = 20.0
COMPILER_S = 200.0  # importing torch's compiler takes some 8 s on a core of its own
STOP_S = 2.0


class ForkError(Exception):
    """A process could not be had."""


@dataclass(slots=True)
class Forked:
    """A process, by a descriptor that cannot come to mean another one. `close` when it is done with."""

    pid: int
    pidfd: int
    code: int | None = None  # once it exited; None too if its end was not seen
    is_lost: bool = False  # the forkserver ended, and with it all that it had forked
    exited: asyncio.Event = field(default_factory=asyncio.Event)

    def kill(self) -> None:
        if not self.exited.is_set() and self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    async def stop(self) -> None:
        """Its channel is closed, so it should end; if it does not, it is killed."""
        for _ in range(2):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.exited.wait(), STOP_S)
                break
            self.kill()
        self.close()

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Forkserver:
    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Forked]] = {}
        self._processes: dict[int, Forked] = {}  # by pid
        self._ready = asyncio.Event()
        self._compiler = asyncio.Event()
        self._busy = asyncio.Lock()  # it imports, or is to be asked for something

    async def start(self) -> None:
        """Raises ForkError when it does not come up."""
        command = [sys.executable, "-m", "tkcc.engine.tier", "--threads", str(self._num_threads)]
        self._process, sock = await start_child(command, child_environment())
        self._link = Link(sock, self._on_message, self._on_close)
        try:
            await asyncio.wait_for(self._ready.wait(), START_S)
        except TimeoutError:
            raise ForkError("the forkserver did not come up") from None

    async def stop(self) -> None:
        self._link.close()
        await stop_child(self._process)

    @property
    def is_up(self) -> bool:
        return self._ready.is_set() and self._link.is_open

    async def fork(self, body: dict[str, Any], fds: Sequence[int]) -> Forked:
        """What the child is to be is in `body`, see `forkserver`. Raises ForkError."""
        if not self.is_up:
            raise ForkError("the forkserver is down")
        fork_id = next(self._ids)
        future: asyncio.Future[Forked] = asyncio.get_running_loop().create_future()
        self._waiting[fork_id] = future
        try:
            async with self._busy:
                self._link.send({**body, "id": fork_id}, fds)
                return await asyncio.wait_for(future, FORK_S)
        except (channel.ChannelClosedError, TimeoutError) as err:
            raise ForkError("the forkserver does not answer") from err
        finally:
            self._waiting.pop(fork_id, None)

    async def start_trusted(self, name: str, entry: str, **arguments: Any) -> tuple[Forked, socket.socket]:
        """A process that runs the function `module:name` with its end of a channel and these arguments; returns it and
        our end. Raises ForkError."""
        ours, theirs = channel.pair()
        try:
            body = {"op": "trusted", "name": name, "entry": entry, "arguments": arguments}
            return await self.fork(body, [theirs.fileno()]), ours
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    async def load_compiler(self) -> bool:
        """Have what is forked from now on come with torch's compiler imported. False if it does already. Raises
        ForkError."""
        async with self._busy:
            if self._compiler.is_set():
                return False
            try:
                self._link.send({"op": "compiler"})
                await asyncio.wait_for(self._compiler.wait(), COMPILER_S)
            except (channel.ChannelClosedError, TimeoutError) as err:
                raise ForkError("the forkserver does not answer") from err
        return True

    def _on_message(self, message: Message) -> None:
        match message.op:
            case "ready":
                self._ready.set()
            case "compiler":
                self._compiler.set()
            case "forked":
                forked = Forked(message.body["pid"], message.fds[0])
                self._processes[forked.pid] = forked  # now: its end may be the next message
                waiting = self._waiting.pop(message.body["id"], None)
                if waiting is None or waiting.done():  # nobody wants it any more
                    forked.kill()
                else:
                    waiting.set_result(forked)
            case "exited":
                forked = self._processes.pop(message.body["pid"])
                forked.code = message.body["code"]
                forked.exited.set()

    def _on_close(self) -> None:
        """It is gone and, by their parent-death signal, so is all that it forked."""
        for future in self._waiting.values():
            future.set_exception(ForkError("the forkserver ended"))
        self._waiting.clear()
        for forked in self._processes.values():
            forked.is_lost = True
            forked.exited.set()
        self._processes.clear()
        self._ready.set()
        self._compiler.set()
