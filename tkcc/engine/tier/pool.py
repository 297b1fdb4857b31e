"""Runners: forked ahead of need, watched, and always killed after use.

It decides what bounds a candidate's process from outside (memory, scratch files, output) and what its end is called. It
does not talk to runners: the judge does, and for builds the supervisor.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
from collections import deque
from collections.abc import Coroutine
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tkcc.engine.tier import arena, channel
from tkcc.engine.tier.arena import Geometry, Layout
from tkcc.engine.tier.config import MEMORY_FACTOR, MEMORY_FLOOR_BYTES, TierConfig
from tkcc.engine.tier.forks import Forked, ForkError, Forkserver
from tkcc.engine.tier.link import child_environment
from tkcc.engine.tier.pids import PidLimit
from tkcc.engine.tier.sandbox import Limits, Profile

EXIT_S = 10.0
EXIT_REPORT_S = 1.0
WATCH_INTERVAL_S = 0.25
LOG_TAIL_BYTES = 2048


@dataclass(slots=True)
class Runner:
    """One candidate's process, seen from the supervisor."""

    id: int
    process: Forked
    control: socket.socket  # the driver's end
    step_fd: int
    kv_fd: int
    log_fd: int
    scratch: Path
    generation: int
    pid_limit: PidLimit
    log: bytearray = field(default_factory=bytearray)
    logged_bytes: int = 0
    killed_for: str = ""

    def end(self) -> str:
        """How it ended, for people; empty while it lives."""
        if self.killed_for:
            return self.killed_for
        code = self.process.code
        if self.process.is_lost:
            return "the forkserver ended"
        if code is None:
            return ""
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def log_tail(self) -> str:
        return bytes(self.log[-LOG_TAIL_BYTES:]).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class RunnerKind:
    """What all runners of one workload are told; `spec` is RunnerSpec as JSON."""

    spec: dict[str, Any]
    geometry: Geometry
    kv: Layout
    step: Layout


class Pool:
    def __init__(self, config: TierConfig, forks: Forkserver, weights_fd: int, weights_bytes: int) -> None:
        self._config, self._forks = config, forks
        self._weights_fd, self._weights_bytes = weights_fd, weights_bytes
        self._memory_bytes = config.limits.memory_bytes or MEMORY_FACTOR * weights_bytes + MEMORY_FLOOR_BYTES
        self.kind: RunnerKind | None = None
        self._generation = 0
        self._next_id = 0
        self._runners: dict[int, Runner] = {}
        self._spares: deque[Runner] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_kills = 0  # for what a candidate did; every other runner ends once it was used

    def start(self) -> None:
        self._spawn_task(self._watch())

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(self.retire(runner) for runner in list(self._runners.values())))

    # --- runners ---

    async def configure(self, kind: RunnerKind) -> None:
        """From now on runners are of this kind; spares of the old one are killed and made anew."""
        self.kind = kind
        self._generation += 1
        while self._spares:
            await self.retire(self._spares.popleft())
        self._refill()

    @property
    def num_spares(self) -> int:
        return len(self._spares)

    async def load_compiler(self) -> None:
        """Have runners come with torch's compiler imported from now on. Raises ForkError."""
        if not await self._forks.load_compiler():
            return
        self._generation += 1  # spares without it are of no use
        self._refill()

    async def take(self) -> Runner:
        """A fresh runner, from the spares if there is one. Raises ForkError."""
        while self._spares:
            runner = self._spares.popleft()
            if not runner.process.exited.is_set() and runner.generation == self._generation:
                self._refill()
                return runner
            await self.retire(runner)
        runner = await self._fork(None)
        self._refill()
        return runner

    async def take_builder(self, build_dir: Path) -> Runner:
        """A process that may start a compiler and write to `build_dir`. Raises ForkError."""
        return await self._fork(build_dir)

    async def retire(self, runner: Runner, is_gone: bool = False) -> str:
        """Kill it, with all it started, and free what it held. Returns how it had ended, if it had.

        is_gone: its socket was seen closing, so its exit is about to be reported.
        """
        if is_gone:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(runner.process.exited.wait(), EXIT_REPORT_S)
        how = runner.end()
        self._kill(runner, "")
        try:
            await asyncio.wait_for(runner.process.exited.wait(), EXIT_S)
        except TimeoutError:
            print(f"tkcc tier: runner {runner.process.pid} does not die", file=sys.stderr)
        self._drain_log(runner)
        self._forget(runner)
        return how

    def _refill(self) -> None:
        if self.kind is not None and len(self._spares) < self._config.num_spares:
            self._spawn_task(self._add_spare())

    async def _add_spare(self) -> None:
        generation = self._generation
        try:
            runner = await self._fork(None)
        except ForkError:
            return  # take() tries again and reports
        if generation != self._generation or len(self._spares) >= self._config.num_spares:
            await self.retire(runner)
        else:
            self._spares.append(runner)

    async def _fork(self, build_dir: Path | None) -> Runner:
        if self.kind is None:
            raise ForkError("no workload yet")
        self._next_id += 1
        runner_id = self._next_id
        scratch = self._config.cache_dir / "scratch" / f"{os.getpid()}-{runner_id}"
        scratch.mkdir(parents=True)
        pid_limit = PidLimit(f"tkcc-{os.getpid()}-{runner_id}", self._config.limits.processes)
        step_fd = arena.create("tkcc-step", self.kind.step.num_bytes)
        kv_fd = arena.create("tkcc-kv", self.kind.kv.num_bytes)
        for fd in (step_fd, kv_fd):
            arena.fix_size(fd)
        ours, theirs = channel.pair()
        log_fd, log_write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(log_write_fd, True)
        body = {
            "op": "candidate",
            "spec": self.kind.spec,
            "profile": asdict(self._profile(scratch, build_dir)),
            "env": child_environment(HOME=str(scratch), TMPDIR=str(scratch)),
            "cwd": str(scratch),
        }
        try:
            process = await self._forks.fork(body, [theirs.fileno(), step_fd, kv_fd, self._weights_fd, log_write_fd])
        finally:
            theirs.close()
            os.close(log_write_fd)
        runner = Runner(runner_id, process, ours, step_fd, kv_fd, log_fd, scratch, self._generation, pid_limit)
        pid_limit.hold(process.pid)  # it waits for its driver: nothing of the candidate has run
        self._runners[runner_id] = runner
        asyncio.get_running_loop().add_reader(log_fd, self._drain_log, runner)
        return runner

    def _profile(self, scratch: Path, build_dir: Path | None) -> Profile:
        limits = self._config.limits
        return Profile(
            limits=Limits(
                memory_bytes=self._memory_bytes,
                file_bytes=limits.file_bytes,
                processes=limits.processes,
            ),
            readable=(),
            writable=(str(scratch),) if build_dir is None else (str(scratch), str(build_dir)),
            can_start_processes=build_dir is not None,
            is_confined=self._config.is_confined,
        )

    # --- bounds from outside ---

    async def _watch(self) -> None:
        """Memory and files that rlimits do not count: shared mappings, many small files."""
        limits = self._config.limits
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            for runner in list(self._runners.values()):
                if runner.process.exited.is_set() or self.kind is None:
                    continue
                shared = self._weights_bytes + self.kind.kv.num_bytes + self.kind.step.num_bytes
                if _resident_bytes(runner.process.pid) > self._memory_bytes + shared:
                    self._kill(runner, f"killed: more than {self._memory_bytes >> 20} MiB of memory")
                elif _tree_bytes(runner.scratch) > limits.scratch_bytes:
                    self._kill(runner, f"killed: more than {limits.scratch_bytes >> 20} MiB of files")

    def _drain_log(self, runner: Runner) -> None:
        try:
            data = os.read(runner.log_fd, 1 << 16)
        except (BlockingIOError, OSError):
            return
        if not data:
            asyncio.get_running_loop().remove_reader(runner.log_fd)
            return
        runner.logged_bytes += len(data)
        runner.log = (runner.log + data)[-LOG_TAIL_BYTES:]
        if runner.logged_bytes > self._config.limits.log_bytes and not runner.killed_for:
            self._kill(runner, f"killed: wrote more than {self._config.limits.log_bytes >> 20} MiB to its output")

    def _kill(self, runner: Runner, reason: str) -> None:
        """The whole process group by pid; the leader by pidfd, which cannot hit anyone else."""
        if reason and not runner.process.exited.is_set() and not runner.killed_for:
            runner.killed_for = reason
            self.num_kills += 1
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(runner.process.pid, signal.SIGKILL)
        runner.process.kill()

    def _forget(self, runner: Runner) -> None:
        if self._runners.pop(runner.id, None) is None:
            return
        asyncio.get_running_loop().remove_reader(runner.log_fd)
        runner.control.close()
        runner.process.close()
        for fd in (runner.step_fd, runner.kv_fd, runner.log_fd):
            os.close(fd)
        runner.pid_limit.remove()
        shutil.rmtree(runner.scratch, ignore_errors=True)

    def _spawn_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def _tree_bytes(path: Path) -> int:
    total = 0
    for root, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
            except OSError:
                continue
    return total
