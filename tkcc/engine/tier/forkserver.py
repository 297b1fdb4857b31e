"""Forks all processes of a tier that need torch, from one that has imported it once and started no thread.

It is told by the supervisor what to fork and reports what ended; it decides nothing. Exits are seen through pidfds,
not SIGCHLD: the judge stops and continues runners all the time, and each of those would wake this process up.
"""

import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import tempfile
from typing import Any

import torch

from tkcc.engine.tier import channel, sandbox
from tkcc.engine.tier.channel import Message
from tkcc.engine.tier.runner import Mount, RunnerSpec
from tkcc.engine.tier.runner import main as runner_main
from tkcc.engine.tier.sandbox import Limits, Profile

# What candidates import: loaded before the fork, so that no runner pays for it.
_PRELOAD = ("ctypes", "tkcc.engine.artifact", "tkcc.kernels.native", "tkcc.models.llama")
_COMPILER = "torch._inductor.compile_fx"  # three times as long as torch itself: on request


def preload(num_threads: int) -> None:
    """Import what candidates import and touch the libraries once, in one thread: threads do not survive a fork."""
    torch.set_num_threads(1)
    for name in _PRELOAD:
        __import__(name)
    with torch.inference_mode():
        x = torch.ones(2, 64)
        torch.nn.functional.linear(x, torch.ones(64, 64))
        q = torch.ones(1, 1, 2, 64)
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    if num_threads == 1:
        torch.set_num_interop_threads(1)
    _settle()


def _settle() -> None:
    """Fit to be forked?"""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"the forkserver has {threads} threads: a fork would be unsafe")
    gc.collect()
    gc.freeze()  # a collection in a child then copies no pages


def serve(sock: socket.socket) -> None:
    """Fork on request until the supervisor is gone."""
    selector = selectors.DefaultSelector()
    selector.register(sock, selectors.EVENT_READ)
    pids: dict[int, int] = {}  # pidfd -> pid
    channel.send(sock, {"op": "ready"})
    while True:
        for key, _ in selector.select():
            if key.fileobj is sock:
                try:
                    message = channel.receive(sock)
                except channel.ChannelClosedError:
                    return
                if message.op == "compiler":
                    __import__(_COMPILER)
                    _settle()
                    channel.send(sock, {"op": "compiler"})
                    continue
                pid = _fork(message, sock)
                pidfd = os.pidfd_open(pid)
                for fd in message.fds:
                    os.close(fd)
                pids[pidfd] = pid
                selector.register(pidfd, selectors.EVENT_READ)
                channel.send(sock, {"op": "forked", "id": message.body["id"], "pid": pid}, [pidfd])
            else:
                pidfd = int(key.fd)
                selector.unregister(pidfd)
                pid = pids.pop(pidfd)
                _, status = os.waitpid(pid, 0)
                os.close(pidfd)
                channel.send(sock, {"op": "exited", "pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _fork(message: Message, sock: socket.socket) -> int:
    """The child never returns from here."""
    pid = os.fork()
    if pid:
        return pid
    name, code = "runner", 71
    try:
        sock.close()
        os.setsid()  # its own process group: killed as one
        sandbox.die_with_parent()
        if message.op == "trusted":
            name = message.body["name"]
            sandbox.set_name(f"tkcc-{name}")
            code = _trusted(message.body, message.fds)
        else:
            sandbox.set_name("tkcc-runner")
            _candidate(message.body, message.fds)
    except BaseException as err:
        os.write(2, f"{name}: {type(err).__name__}: {err}\n".encode())
    finally:
        os._exit(code)
    raise AssertionError("unreachable")


def _trusted(body: dict[str, Any], fds: tuple[int, ...]) -> int:
    """Holder or judge: nothing of a candidate has been in this process, nor in the one it was forked from."""
    (channel_fd,) = fds
    _close_all_but({0, 1, 2, channel_fd})
    module, _, function = body["entry"].partition(":")
    return int(getattr(importlib.import_module(module), function)(channel_fd, **body["arguments"]))


def _candidate(body: dict[str, Any], fds: tuple[int, ...]) -> None:
    control, step, kv, weights, log = fds
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    _close_all_but({0, 1, 2, control, step, kv, weights})
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(body["env"])
    os.chdir(body["cwd"])
    tempfile.tempdir = None
    spec = RunnerSpec.from_dict(body["spec"])
    torch.set_num_threads(spec.num_threads)
    raw = body["profile"]
    sandbox.enter(Profile(**{**raw, "limits": Limits(**raw["limits"])}))
    runner_main(spec, Mount(step, kv, weights), socket.socket(fileno=control))


def _close_all_but(keep: set[int]) -> None:
    """Whatever the forkserver has open is none of the child's business."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd not in keep:
            try:
                os.close(fd)
            except OSError:
                continue  # the listing's own descriptor


def main(channel_fd: int, num_threads: int) -> int:
    sandbox.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to handle
    preload(num_threads)
    with socket.socket(fileno=channel_fd) as sock:
        serve(sock)
    return 0
