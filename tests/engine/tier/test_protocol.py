"""The doorbell: deadlines, dead runners and forged frames each raise what they are."""

import os
import threading
import time
from collections.abc import Callable

import pytest

from tkcc.engine.tier import channel, protocol
from tkcc.engine.tier.protocol import Op, Reply, Request, RunnerGoneError, RunnerLateError, Status

REQUEST = Request(Op.DECODE, seq=2**62 + 1, num_requests=3, num_tokens=3, num_pages=7, reuse_inputs=True)


def call(answer: Callable[..., None], timeout_s: float = 5.0) -> Reply:
    """Ring a runner that `answer`s in a thread of its own."""
    ours, theirs = channel.pair()
    with ours, theirs:
        thread = threading.Thread(target=answer, args=(theirs,))
        thread.start()
        try:
            return protocol.call(ours, REQUEST, timeout_s)
        finally:
            thread.join()


def test_a_request_and_its_reply_arrive_whole() -> None:
    seen = []

    def answer(sock: object) -> None:
        received = protocol.receive_request(sock)  # type: ignore[arg-type]
        seen.append(received)
        sock.send(Reply(REQUEST.seq, Status.ERROR, "ValueError: no \x1b[31m").pack())  # type: ignore[attr-defined]

    reply = call(answer)
    assert seen == [(REQUEST, -1)] and reply.status is Status.ERROR
    assert reply.text == "ValueError: no  [31m", "control characters do not reach a terminal"


@pytest.mark.parametrize(
    "frame, error, words",
    [
        (Reply(7, Status.OK).pack(), RunnerGoneError, "answered request 7"),
        (b"short", RunnerGoneError, "a frame of 5 bytes"),
        (Reply(REQUEST.seq, Status.OK).pack()[:-1] + b"xx", RunnerGoneError, "a frame of"),
        (b"XXXX" + Reply(REQUEST.seq, Status.OK).pack()[4:], RunnerGoneError, "none of the protocol's"),
    ],
)
def test_forged_frames_are_told_apart(frame: bytes, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call(lambda sock: sock.send(frame))


def test_a_runner_that_ends_is_gone_at_once() -> None:
    start = time.monotonic()
    with pytest.raises(RunnerGoneError, match="ended during decode"):
        call(lambda sock: sock.close(), timeout_s=60.0)
    assert time.monotonic() - start < 30.0


def test_a_runner_that_is_silent_is_late() -> None:
    with pytest.raises(RunnerLateError, match="no answer to decode"):
        call(lambda sock: None, timeout_s=0.05)


def test_a_long_message_travels_in_a_memory_file_and_leaves_no_descriptor() -> None:
    ours, theirs = channel.pair()
    before = len(os.listdir("/proc/self/fd"))
    with ours, theirs:
        body = {"op": "x", "text": "y" * 500_000}
        channel.send(ours, body)
        assert channel.receive(theirs).body == body
        assert len(os.listdir("/proc/self/fd")) == before
        ours.close()
        with pytest.raises(channel.ChannelClosedError):
            channel.receive(theirs)
