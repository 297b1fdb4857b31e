"""What a confined process cannot do, and what it still can: in a child for each profile, on the kernel at hand."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tkcc.engine.tier import sandbox
from tkcc.engine.tier.cpus import parse_cpus
from tkcc.engine.tier.sandbox import Limits, Profile

pytestmark = pytest.mark.skipif(bool(sandbox.missing_features()), reason="this kernel cannot contain candidates")

DENIED = "PermissionError"


def _socketpair_of_ip() -> None:
    socket.socketpair(socket.AF_INET)


def _shared_memory() -> None:
    os.close(os.memfd_create("x"))


ATTEMPTS: dict[str, Callable[[], object]] = {
    "fork": os.fork,
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "socket": lambda: socket.socket(),
    "unix socket": lambda: socket.socket(socket.AF_UNIX),
    "memory file": _shared_memory,
    "kill the parent": lambda: os.kill(os.getppid(), 0),
    "kill a group": lambda: os.killpg(os.getpgid(os.getppid()), 0),
    "read a secret": lambda: Path("/etc/passwd").read_text(),
    "read another process": lambda: Path("/proc/1/status").read_text(),
    "write elsewhere": lambda: Path("/tmp/tkcc-escape").write_text("x"),
    "leave its cores": lambda: os.sched_setaffinity(0, {0}),
    "a session of its own": os.setsid,
    "mount": lambda: os.chroot("/"),
}
ALLOWED: dict[str, Callable[[], object]] = {
    "its own maps": lambda: Path("/proc/self/maps").read_text(),
    "an import": lambda: __import__("xml.dom.minidom"),
    "a pipe": os.pipe,
    "a signal to itself": lambda: __import__("signal").raise_signal(0),
    "a thread": lambda: _run_thread(),
}


def _run_thread() -> None:
    import threading

    thread = threading.Thread(target=int)
    thread.start()
    thread.join()


def attempt_all(profile: Profile, attempts: dict[str, Callable[[], object]], directory: Path) -> dict[str, str]:
    """Name of the exception each attempt ends with in a confined child, "" for none."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        found = {}
        try:
            os.chdir(directory)
            sandbox.enter(profile)
            for name, attempt in attempts.items():
                try:
                    attempt()
                    found[name] = ""
                except BaseException as err:
                    found[name] = type(err).__name__
        finally:
            os.write(write_fd, json.dumps(found).encode())
            os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd) as file:
        raw = file.read()
    os.waitpid(pid, 0)
    found: dict[str, str] = json.loads(raw)
    return found


@pytest.fixture
def runner_profile(tmp_path: Path) -> Profile:
    return Profile(Limits(4 << 30, 1 << 20), (), (str(tmp_path),), can_start_processes=False)


def test_a_runner_can_do_none_of_these(runner_profile: Profile, tmp_path: Path) -> None:
    found = attempt_all(runner_profile, ATTEMPTS, tmp_path)
    assert found == dict.fromkeys(ATTEMPTS, DENIED)


def test_a_runner_can_do_all_of_these(runner_profile: Profile, tmp_path: Path) -> None:
    allowed = {**ALLOWED, "write to its scratch": lambda: (tmp_path / "x").write_text("x")}
    assert attempt_all(runner_profile, allowed, tmp_path) == dict.fromkeys(allowed, "")


def test_files_have_a_largest_size(runner_profile: Profile, tmp_path: Path) -> None:
    import signal

    def write_much() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        (tmp_path / "x").write_bytes(bytes(2 << 20))

    assert attempt_all(runner_profile, {"much": write_much}, tmp_path) == {"much": "OSError"}


def test_a_builder_starts_the_compiler_and_nothing_else_opens_to_it(tmp_path: Path) -> None:
    def compile_c() -> None:
        from tkcc.kernels import native

        os.environ["TKCC_BUILD_CACHE"] = os.environ["TMPDIR"] = str(tmp_path)
        assert native.load("int three(void) { return 3; }").three() == 3

    profile = Profile(Limits(4 << 30, 64 << 20), (), (str(tmp_path),), can_start_processes=True)
    attempts = {name: ATTEMPTS[name] for name in ("socket", "kill the parent", "read a secret", "write elsewhere")}
    found = attempt_all(profile, {"compile": compile_c, **attempts}, tmp_path)
    assert found == {"compile": "", **dict.fromkeys(attempts, DENIED)}


@pytest.mark.parametrize("text, cpus", [("0", {0}), ("1-3", {1, 2, 3}), ("0,2-3", {0, 2, 3})])
def test_cores(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "1,,2"])
def test_bad_cores_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="neither a core number nor a range"):
        parse_cpus(text)
