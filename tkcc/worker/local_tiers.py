"""Tier engines as child processes, for a recompile on one machine."""

import contextlib
import os
import queue
import secrets
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from tkcc.engine.tier.sandbox import die_with_parent
from tkcc.worker.job import TierAddress
from tkcc.worker.tiers import TierGoneError

START_S = 300.0
STOP_S = 20.0


@contextlib.contextmanager
def tiers(commands: Mapping[str, Sequence[str]], scratch: Path) -> Iterator[dict[str, TierAddress]]:
    """Start each tier's command with a fresh token, all at once; they end with the block. Raises TierGoneError with a
    tier's last words when it does not come up."""
    token = secrets.token_hex(24)
    token_file = scratch / "token"
    token_file.touch(mode=0o600)
    token_file.write_text(token)
    with contextlib.ExitStack() as stack:
        children = {name: stack.enter_context(_child(name, cmd, token_file)) for name, cmd in commands.items()}
        yield {name: child.address(token) for name, child in children.items()}


class _Child:
    def __init__(self, name: str, command: Sequence[str], token_file: Path) -> None:
        self.name = name
        self.lines: queue.Queue[str] = queue.Queue()
        self.errors: list[str] = []
        self.process = subprocess.Popen(
            [*command, "--port", "0", "--token-file", str(token_file)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True, env=os.environ, preexec_fn=die_with_parent,
        )  # fmt: skip
        self._readers = [
            threading.Thread(target=_read, args=(self.process.stdout, self.lines.put), daemon=True),
            threading.Thread(target=_read, args=(self.process.stderr, self._remember), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _remember(self, line: str) -> None:
        self.errors = [*self.errors[-19:], line.rstrip()]

    def address(self, token: str) -> TierAddress:
        """It prints its address once its processes stand."""
        for _ in range(int(START_S)):
            with contextlib.suppress(queue.Empty):
                line = self.lines.get(timeout=1.0)
                if ": http://" in line:
                    return TierAddress("http://" + line.strip().rpartition(": http://")[2], token, self.last_words)
            if not self.is_alive():
                raise TierGoneError(f"the {self.name} tier did not start: {self.last_words()}")
        raise TierGoneError(f"the {self.name} tier did not start within {START_S:.0f} s")

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def last_words(self) -> str:
        """What it said last, once it has ended."""
        if self.is_alive():
            return ""
        errors = [line.removeprefix("tkcc: ") for line in self.errors if line]
        return errors[-1] if errors else f"exit code {self.process.returncode}"

    def stop(self) -> None:
        """SIGTERM, then SIGKILL; what it started dies with it."""
        if self.is_alive():
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        for thread in self._readers:  # they end with the process's last line
            thread.join(STOP_S)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


def _read(stream: IO[str] | None, take: Callable[[str], None]) -> None:
    for line in stream or ():
        take(line)


@contextlib.contextmanager
def _child(name: str, command: Sequence[str], token_file: Path) -> Iterator[_Child]:
    child = _Child(name, command, token_file)
    try:
        yield child
    finally:
        child.stop()
