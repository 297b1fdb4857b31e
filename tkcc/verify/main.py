"""The judge's process: one message at a time, challenges made ahead while there is nothing to do."""

import hashlib
import os
import socket
import sys
import traceback
from pathlib import Path

import torch

from tkcc import stats
from tkcc.api.codec import from_dict, to_dict
from tkcc.api.report import AlphaTicket
from tkcc.api.workload import Recording
from tkcc.engine.tier import arena, sandbox, tensors
from tkcc.engine.tier.arena import Layout
from tkcc.engine.tier.channel import ChannelClosedError, Message
from tkcc.engine.tier.records import Stage
from tkcc.models.forward import ModelConfig
from tkcc.verify.judge import Judge
from tkcc.verify.link import SupervisorError, SupervisorLink
from tkcc.verify.model import TierModel
from tkcc.verify.trial import RefusalError

VERSION = "1"
IDLE_S = 1.0  # without a message before work in the background: what follows a verdict at once would wait for it
POLL_S = 0.2  # between looks at that work


def source_hash() -> str:
    """SHA-256 over the source of the judge and of its statistics: which rules a verdict was made by."""
    digest = hashlib.sha256()
    for package in (Path(__file__).parent, Path(stats.__file__).parent):
        for path in sorted(package.glob("*.py")):
            digest.update(f"{package.name}/{path.name}".encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def main(channel_fd: int) -> int:
    """Never returns: libraries' reports at the interpreter's end would bury the judge's own last words."""
    status = 1
    try:
        status = _serve(channel_fd)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _serve(channel_fd: int) -> int:
    sandbox.hide_memory()
    with socket.socket(fileno=channel_fd) as sock, torch.inference_mode():
        link = SupervisorLink(sock)
        try:
            start = link.next(None)
            assert start is not None and start.op == "start"
            judge = _make(link, start)
            link.send("hello", version=VERSION, source_hash=source_hash())
            while True:
                message = link.next(IDLE_S)
                while message is None:
                    judge.work_ahead()
                    is_free = judge.take_ahead(wait=False)
                    message = link.next(None if is_free and not judge.has_room else POLL_S)
                judge.take_ahead(wait=True)
                _handle(judge, link, message)
        except ChannelClosedError:
            return 0


def _make(link: SupervisorLink, start: Message) -> Judge:
    body = start.body
    weights_fd, norms_fd = start.fds
    for fd in (weights_fd, norms_fd):
        if not arena.is_sealed(fd):
            raise SystemExit("tkcc judge: the weights are not sealed: refused")
    torch.set_num_threads(body["num_threads"])
    model = TierModel(
        config=ModelConfig(**body["config"]),
        full_layers=body["full_layers"],
        dtype_name=body["dtype"],
        threads=body["num_threads"],
        weights=tensors.views(arena.map_file(weights_fd, writable=False), Layout.from_dict(body["weights"])),
        norms=tensors.views(arena.map_file(norms_fd, writable=False), Layout.from_dict(body["norms"])),
        norms_fd=norms_fd,
    )
    os.close(weights_fd)
    return Judge(link, model, body["tier"], body["load_s"], body["prepare_s"])


def _handle(judge: Judge, link: SupervisorLink, message: Message) -> None:
    body = message.body
    try:
        match message.op:
            case "workload":
                plan = judge.take_workload(from_dict(Recording, body["recording"]), body["estimates_only"])
                link.send("cells", **plan.describe())
            case "incumbent":
                contest = judge.take_incumbent(body["digest"])
                link.send(
                    "ready",
                    noise_floor=contest.noise_floor,
                    calibration=contest.calibration,
                    cells=[cell.describe() for cell in contest.trial.cells],
                )
            case "judge":
                ticket = from_dict(AlphaTicket, body["ticket"])
                report = judge.judge(body["digest"], body["against"], Stage(body["stage"]), ticket)
                link.send("report", report=to_dict(report))
    except (RefusalError, SupervisorError) as err:
        link.send("failed", reason=str(err))
