"""The supervisor's ends of its channels: asyncio around `channel`, and child processes started with one end."""

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tkcc.engine.tier import channel
from tkcc.engine.tier.channel import Message

_KEPT_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "LANG", "CC", "CUDA_HOME", "CUDA_VISIBLE_DEVICES")


class Link:
    """One end of a channel on the event loop."""

    def __init__(
        self, sock: socket.socket, on_message: Callable[[Message], None], on_close: Callable[[], None]
    ) -> None:
        sock.setblocking(False)
        self._sock, self._on_message, self._on_close = sock, on_message, on_close
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._read)
        self.is_open = True

    def send(self, body: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Raises ChannelClosedError, also when the other side has stopped reading."""
        if not self.is_open:
            raise channel.ChannelClosedError
        try:
            channel.send(self._sock, body, fds)
        except BlockingIOError as err:
            raise channel.ChannelClosedError from err

    def _read(self) -> None:
        try:
            message = channel.receive(self._sock)
        except BlockingIOError:
            return
        except (channel.ChannelClosedError, OSError):
            self.close()
            self._on_close()
            return
        self._on_message(message)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._loop.remove_reader(self._sock)
            self._sock.close()


def child_environment(**extra: str) -> dict[str, str]:
    """A scrubbed environment: what imports and compilers need, and one thread for every library that has its own."""
    kept = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    # Python's hash seed is fixed so that two runners of one candidate lay their dicts out alike.
    return {**kept, **threads, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", **extra}


async def start_child(
    command: Sequence[str], environment: dict[str, str]
) -> tuple[asyncio.subprocess.Process, socket.socket]:
    """Start a trusted process with `--channel-fd N` appended; returns it and our end of its channel."""
    ours, theirs = channel.pair()
    try:
        process = await asyncio.create_subprocess_exec(
            *command, "--channel-fd", str(theirs.fileno()), pass_fds=[theirs.fileno()], env=environment,
            stdin=asyncio.subprocess.DEVNULL, stdout=sys.stderr,
        )  # fmt: skip
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, ours


async def stop_child(process: asyncio.subprocess.Process, patience_s: float = 2.0) -> None:
    """Its channel is closed, so it should end; if it does not, it is killed."""
    try:
        await asyncio.wait_for(process.wait(), patience_s)
    except TimeoutError:
        process.kill()
        await process.wait()
