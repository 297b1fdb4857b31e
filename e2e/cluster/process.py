"""Processes that outlive the command that started them, and the proof that one is ours before it is killed.

A pid alone names a process only until the kernel reuses it. A record therefore holds the start time too, and a signal
is sent through a pidfd that was opened before both were compared.
"""

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from e2e.cluster.errors import ClusterError, with_tail

PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
MARK = "TKCC_CLUSTER"  # in the environment of everything that a cluster starts; its value is the cluster's name


@dataclass(frozen=True)
class Process:
    """One process for ever: its pid and when it started (clock ticks since boot, field 22 of /proc/PID/stat)."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> "Process | None":
        """The process that has `pid` now, None when it is gone or a zombie."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        fields = stat[stat.rindex(")") + 2 :].split()  # the command's name, in brackets, may hold spaces
        return None if fields[0] in "ZX" else cls(pid, int(fields[19]))

    def is_alive(self) -> bool:
        return Process.of(self.pid) == self

    def is_marked(self, name: str) -> bool:
        """Whether its environment says that cluster `name` started it."""
        until = time.monotonic() + 1.0
        while True:
            try:
                environ = Path(f"/proc/{self.pid}/environ").read_bytes()
            except OSError:
                return False
            if environ or time.monotonic() >= until:  # empty for a moment while the process is in exec
                return f"{MARK}={name}".encode() in environ.split(b"\0")
            time.sleep(0.005)

    def send(self, sig: signal.Signals) -> None:
        """Signal this very process; nothing happens when it is gone, whoever has its pid now."""
        with suppress(ProcessLookupError):
            pidfd = os.pidfd_open(self.pid)
            try:
                if self.is_alive():
                    signal.pidfd_send_signal(pidfd, sig)
            finally:
                os.close(pidfd)

    def end(self, grace_s: float = 0.0) -> None:
        """SIGTERM and up to `grace_s` to leave, then SIGKILL; returns once it is gone."""
        if grace_s > 0:
            self.send(signal.SIGTERM)
            if self.wait_gone(grace_s):
                return
        self.send(signal.SIGKILL)
        if not self.wait_gone(10.0):
            raise ClusterError(f"process {self.pid} still runs 10 s after SIGKILL")

    def wait_gone(self, deadline_s: float) -> bool:
        until = time.monotonic() + deadline_s
        while self.is_alive():
            if time.monotonic() >= until:
                return False
            _reap(self.pid)
            time.sleep(0.02)
        _reap(self.pid)
        return True

    def children(self) -> list[int]:
        try:
            return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]
        except OSError:
            return []


def _reap(pid: int) -> None:
    """Collect the exit status if the process is a child of this one; others are reaped by their own parent."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _wait_tethered(pid: int) -> None:
    """Wait until setpriv has tied the process and become its command: before that, our death would not end it."""
    until = time.monotonic() + 10.0
    with suppress(OSError):
        while Path(f"/proc/{pid}/comm").read_text() == "setpriv\n" and time.monotonic() < until:
            time.sleep(0.002)


def _child_of(pid: int) -> Process | None:
    """The one process that `pid` forks, waited for; None when `pid` ends without."""
    until = time.monotonic() + 10.0
    while (parent := Process.of(pid)) and time.monotonic() < until:
        for child in parent.children():
            return Process.of(child)
        time.sleep(0.01)
    _reap(pid)
    return None


@dataclass(frozen=True)
class Daemon:
    """A named background process of a cluster: its record file says which process it is, its log what it said."""

    name: str
    run_dir: Path
    cluster: str

    @property
    def log(self) -> Path:
        return self.run_dir / "logs" / f"{self.name}.log"

    @property
    def record(self) -> Path:
        return self.run_dir / "pids" / f"{self.name}.json"

    def process(self) -> Process | None:
        """The recorded process, if it still runs and is this cluster's."""
        try:
            process = Process(**json.loads(self.record.read_text()))
        except (OSError, ValueError, TypeError):
            return None
        return process if process.is_alive() and process.is_marked(self.cluster) else None

    def start(
        self,
        argv: Sequence[str],
        *,
        enter: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        die_with_parent: bool = False,
    ) -> Process:
        """Start `argv`, through `enter` (a command that forks it, such as nsenter) where one is given.

        `die_with_parent`: the kernel kills it when the *thread* that called this ends, so call it from the main thread.
        """
        if self.process():
            raise ClusterError(f"{self.name} of cluster {self.cluster} runs already")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.record.parent.mkdir(parents=True, exist_ok=True)
        tether = ["setpriv", "--pdeathsig", "KILL"] if die_with_parent else []
        # posix_spawn, not Popen: a Popen object warns when it is dropped while its child runs, and here that is meant.
        pid = os.posix_spawnp(
            (command := [*tether, *enter, *argv])[0],
            command,
            {"PATH": PATH, "HOME": str(Path.home()), **(env or {}), MARK: self.cluster},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
        if tether:
            _wait_tethered(pid)
        process = _child_of(pid) if enter else Process.of(pid)
        if process is None:
            raise with_tail(f"{self.name} of cluster {self.cluster} did not start", self.log)
        self.record.write_text(json.dumps(asdict(process)))
        return process

    def stop(self, grace_s: float = 0.0) -> None:
        process = self.process()
        if process:
            process.end(grace_s)
        self.record.unlink(missing_ok=True)

    def check_alive(self) -> None:
        """Raise, with the end of its log, when it has left on its own."""
        if self.process() is None:
            raise with_tail(f"{self.name} of cluster {self.cluster} is not running", self.log)
