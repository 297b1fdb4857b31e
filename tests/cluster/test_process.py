"""Daemons: what is recorded is found and ended, and no other process is ever signalled."""

import json
import signal
import subprocess
import sys
import time

import pytest

from e2e.cluster.errors import ClusterError
from e2e.cluster.process import Daemon, Process

SLEEP = ["sleep", "60"]


@pytest.fixture
def daemon(tmp_path):
    daemon = Daemon("sleeper", tmp_path, "proc-test")
    yield daemon
    daemon.stop()


def test_a_daemon_is_found_by_its_record_and_ended(daemon):
    process = daemon.start(SLEEP)
    assert daemon.process() == process
    daemon.stop()
    assert not process.is_alive()
    assert daemon.process() is None


def test_a_second_start_is_refused_while_it_runs(daemon):
    daemon.start(SLEEP)
    with pytest.raises(ClusterError, match="runs already"):
        daemon.start(SLEEP)


def test_a_forked_daemon_is_recorded_not_the_command_that_forked_it(daemon):
    process = daemon.start(SLEEP, enter=["unshare", "--fork"] if _may_unshare() else ["sh", "-c", '"$@" & wait', "sh"])
    assert b"sleep" in _command_of(process)


def _may_unshare() -> bool:
    return subprocess.run(["unshare", "--fork", "true"], capture_output=True, check=False).returncode == 0


def _command_of(process: Process) -> bytes:
    until = time.monotonic() + 5
    while time.monotonic() < until:
        with open(f"/proc/{process.pid}/cmdline", "rb") as cmdline:
            command = cmdline.read()
        if b"sleep\0" in command:
            return command
    return command


def test_a_process_that_is_not_the_clusters_is_left_alone_whatever_the_record_says(daemon):
    stranger = subprocess.Popen(SLEEP)
    try:
        found = Process.of(stranger.pid)
        assert found
        daemon.record.parent.mkdir(parents=True)
        daemon.record.write_text(json.dumps({"pid": found.pid, "start_ticks": found.start_ticks}))
        assert daemon.process() is None
        daemon.stop()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_reused_pid_is_not_signalled(daemon):
    process = daemon.start(SLEEP)
    Process(process.pid, process.start_ticks - 1).send(signal.SIGKILL)
    assert process.is_alive()


def test_a_daemon_dies_with_the_process_that_started_it(tmp_path):
    code = f"""
import os, signal
from pathlib import Path
from e2e.cluster.process import Daemon
print(Daemon("sleeper", Path({str(tmp_path)!r}), "proc-test").start({SLEEP!r}, die_with_parent=True).pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    starter = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert starter.returncode == -signal.SIGKILL, starter.stderr
    until = time.monotonic() + 5
    while (left := Process.of(int(starter.stdout))) and time.monotonic() < until:
        time.sleep(0.02)
    assert left is None


def test_the_end_of_the_log_explains_a_daemon_that_left(daemon):
    with pytest.raises(ClusterError, match="the reason"):  # from start itself, where it leaves at once
        daemon.start(["sh", "-c", "echo the reason; exit 3"])
        while daemon.process():
            time.sleep(0.02)
        daemon.check_alive()
