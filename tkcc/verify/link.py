"""The judge's end of its channel to the supervisor: blocking calls, and an inbox for what comes meanwhile."""

import itertools
import select
import socket
import time
from collections import deque
from typing import Any

from tkcc.engine.tier import channel
from tkcc.engine.tier.channel import Message

CALL_S = 60.0


class SupervisorError(Exception):
    """The supervisor could not do what was asked."""


class SupervisorLink:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._inbox: deque[Message] = deque()
        self._calls = itertools.count(1)

    def send(self, op: str, **body: Any) -> None:
        channel.send(self._sock, {"op": op, **body})

    def call(self, op: str, **body: Any) -> Message:
        """Ask and wait for the reply. Raises SupervisorError, ChannelClosedError."""
        call = next(self._calls)
        self.send(op, call=call, **body)
        deadline = time.monotonic() + CALL_S
        while (left_s := deadline - time.monotonic()) > 0:
            if not self._readable(left_s):
                break
            message = channel.receive(self._sock)
            if message.op == "reply" and message.body["call"] == call:
                if "error" in message.body:
                    raise SupervisorError(message.body["error"])
                return message
            self._inbox.append(message)
        raise SupervisorError(f"no answer to {op} in {CALL_S:.0f} s")

    def next(self, timeout_s: float | None) -> Message | None:
        """The next message that is no reply; None if there is none in time. Raises ChannelClosedError."""
        if self._inbox:
            return self._inbox.popleft()
        if timeout_s is not None and not self._readable(timeout_s):
            return None
        return channel.receive(self._sock)

    def _readable(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))
