"""JSON messages with file descriptors over a UNIX socket, between the trusted processes of a tier.

Runners do not speak this: theirs is `protocol`, of fixed-length frames. A message is one packet; a long one travels as
a memory file whose descriptor comes first.
"""

import array
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_FDS = 16
_MAX_PACKET_BYTES = 32 << 10
_MAX_MESSAGE_BYTES = 64 << 20


class ChannelClosedError(Exception):
    """The other side is gone."""


@dataclass(frozen=True, slots=True)
class Message:
    body: dict[str, Any]
    fds: tuple[int, ...] = field(default=())

    @property
    def op(self) -> str:
        return str(self.body.get("op", ""))


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(sock: socket.socket, body: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Raises ChannelClosedError, or TimeoutError by the socket's own timeout."""
    assert len(fds) < MAX_FDS, len(fds)
    data = json.dumps(body, separators=(",", ":")).encode()
    spill = -1
    if len(data) > _MAX_PACKET_BYTES:
        spill = os.memfd_create("tkcc-message", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(spill), "wb") as file:
            file.write(data)
        data, fds = b"\x00", [spill, *fds]
    try:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sock.sendmsg([data], rights)
    except (BrokenPipeError, ConnectionResetError) as err:
        raise ChannelClosedError from err
    finally:
        if spill >= 0:
            os.close(spill)


def receive(sock: socket.socket) -> Message:
    """The next message; its descriptors are the caller's to close. Raises ChannelClosedError, or BlockingIOError and
    TimeoutError as the socket is set."""
    fds = array.array("i")
    try:
        data, ancillary, flags, _ = sock.recvmsg(_MAX_PACKET_BYTES, socket.CMSG_LEN(MAX_FDS * fds.itemsize))
    except ConnectionResetError as err:
        raise ChannelClosedError from err
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    for fd in fds:
        os.set_inheritable(fd, False)
    if not data:
        raise ChannelClosedError
    assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC), "packet cut: both sides must be of one version"
    received = tuple(fds)
    if data == b"\x00":
        spill, received = received[0], received[1:]
        with os.fdopen(spill, "rb") as file:
            file.seek(0)
            data = file.read(_MAX_MESSAGE_BYTES)
    return Message(json.loads(data), received)
