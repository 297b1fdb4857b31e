"""What a runner and the one that drives it say to each other: fixed-length frames beside shared memory.

The driver (judge or builder's supervisor) writes inputs to shared memory and rings; the runner writes tensors and rings
back. A runner sends no time, no verdict and no reference, so there is nothing to forge; its text is shown, not parsed.
"""

import array
import select
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

_REQUEST = struct.Struct("<4sBBHIIIQ")
_REPLY = struct.Struct("<4sQB400s")
_MAGIC = b"TKR1"
TEXT_BYTES = 400


class Op(IntEnum):
    LOAD = 1  # import the bundle's module and call its build(); carries the norm weights' memory file
    PREPARE = 2
    PREFILL = 3
    DECODE = 4


class Status(IntEnum):
    OK = 0
    ERROR = 1  # the candidate raised
    CONTRACT = 2  # it returned something that is not the logits


class RunnerGoneError(Exception):
    """The runner ended, or broke the protocol, in the middle of a request."""


class RunnerLateError(Exception):
    """The runner did not answer by its deadline."""


@dataclass(frozen=True, slots=True)
class Request:
    op: Op
    seq: int
    num_requests: int = 0
    num_tokens: int = 0
    num_pages: int = 0
    reuse_inputs: bool = False  # copy the inputs to where the last ones were, not to new tensors

    def pack(self) -> bytes:
        return _REQUEST.pack(
            _MAGIC, self.op, self.reuse_inputs, 0, self.num_requests, self.num_tokens, self.num_pages, self.seq
        )

    @staticmethod
    def unpack(frame: bytes) -> "Request":
        magic, op, reuse, _, num_requests, num_tokens, num_pages, seq = _REQUEST.unpack(frame)
        assert magic == _MAGIC, magic
        return Request(Op(op), seq, num_requests, num_tokens, num_pages, bool(reuse))


@dataclass(frozen=True, slots=True)
class Reply:
    seq: int
    status: Status
    text: str = ""

    def pack(self) -> bytes:
        return _REPLY.pack(_MAGIC, self.seq, self.status, self.text.encode()[:TEXT_BYTES])

    @staticmethod
    def unpack(frame: bytes) -> "Reply":
        """Raises RunnerGoneError: what a runner sends is not to be trusted."""
        if len(frame) != _REPLY.size:
            raise RunnerGoneError(f"sent a frame of {len(frame)} bytes")
        magic, seq, status, raw = _REPLY.unpack(frame)
        if magic != _MAGIC or status not in Status.__members__.values():
            raise RunnerGoneError("sent a frame that is none of the protocol's")
        text = raw.rstrip(b"\0").decode(errors="replace")
        return Reply(seq, Status(status), "".join(c if c.isprintable() else " " for c in text))


def receive_request(sock: socket.socket) -> tuple[Request, int] | None:
    """The next request and the descriptor that came with it (-1: none); None when the driver is gone."""
    frame, ancillary, _, _ = sock.recvmsg(_REQUEST.size, socket.CMSG_LEN(4))
    if not frame:
        return None
    fds = array.array("i")
    for _, _, payload in ancillary:
        fds.frombytes(payload)
    return Request.unpack(frame), fds[0] if fds else -1


def call(sock: socket.socket, request: Request, timeout_s: float, fds: Sequence[int] = ()) -> Reply:
    """Ring and wait. Raises RunnerGoneError or RunnerLateError. The caller times it: nothing slow happens in here."""
    try:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sock.sendmsg([request.pack()], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            raise RunnerLateError(f"no answer to {request.op.name.lower()} in {timeout_s:.1f} s")
        frame = sock.recv(_REPLY.size + 1, socket.MSG_DONTWAIT)
    except OSError as err:  # the socket's end is closed, or it is stuffed with frames nobody asked for
        raise RunnerGoneError(f"ended during {request.op.name.lower()}") from err
    if not frame:
        raise RunnerGoneError(f"ended during {request.op.name.lower()}")
    reply = Reply.unpack(frame)
    if reply.seq != request.seq:
        raise RunnerGoneError(f"answered request {reply.seq}, asked was {request.seq}")
    return reply
