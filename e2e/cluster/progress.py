"""Long steps, made visible: what runs, for how long, and, while it runs, its latest line of output."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster.errors import ClusterError, tail, with_tail

HEARTBEAT_S = 10.0


def say(text: str) -> None:
    """One line of progress, on stderr so that stdout stays for results."""
    print(f"[cluster] {text}", file=sys.stderr, flush=True)


@contextmanager
def step(title: str) -> Iterator[None]:
    """Announce a step, then how long it took or that it failed."""
    say(f"{title} ...")
    start = time.monotonic()
    try:
        yield
    except BaseException:
        say(f"{title}: failed after {time.monotonic() - start:.1f} s")
        raise
    say(f"{title}: {time.monotonic() - start:.1f} s")


def run(
    title: str,
    argv: Sequence[str],
    log: Path,
    *,
    deadline_s: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run one command as a step, its output in `log`; a failure or a passed deadline shows how the log ends."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with step(title), log.open("wb") as out:
        start = time.monotonic()
        child = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *argv],  # even if we are killed hard, it does not run on
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=env,
            start_new_session=True,
        )
        try:
            code = _wait(child, title, log, start, deadline_s)
        except BaseException:
            kill_group(child)
            raise
    if code != 0:
        raise with_tail(f"{title}: {argv[0]} exited with {code}", log)


def _wait(child: "subprocess.Popen[bytes]", title: str, log: Path, start: float, deadline_s: float) -> int:
    while True:
        elapsed_s = time.monotonic() - start
        if elapsed_s >= deadline_s:
            raise with_tail(f"{title}: not done after {deadline_s:.0f} s, given up", log)
        try:
            return child.wait(timeout=min(HEARTBEAT_S, deadline_s - elapsed_s))
        except subprocess.TimeoutExpired:
            latest = tail(log, 1).strip()[:100]
            say(f"{title}: {time.monotonic() - start:.0f} s so far: {latest}")


def kill_group(child: "subprocess.Popen[bytes]") -> None:
    """End a command that we started with a session of its own, and all that it started."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(timeout=10)


def output(argv: Sequence[str], *, deadline_s: float = 30.0, env: Mapping[str, str] | None = None) -> str:
    """What a quick command prints; an exit code other than 0 is a ClusterError that quotes its stderr."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=deadline_s, env=env, check=False)
    except subprocess.TimeoutExpired as late:
        raise ClusterError(f"{' '.join(argv)}: no answer in {deadline_s:.0f} s") from late
    except FileNotFoundError as missing:
        raise ClusterError(
            f"{argv[0]}: not installed ({missing}); run `python -m e2e.cluster build` first"
        ) from missing
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(argv)}: exit {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout
