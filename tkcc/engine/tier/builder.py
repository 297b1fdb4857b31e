"""Builds a candidate in a process of its own that may start the compiler, so that runners need not.

What it compiles lands in the candidate's build directory; each runner gets a copy. A candidate cannot reach another
one's build.
"""

import asyncio
import json
import mmap
import shutil
import time
from pathlib import Path

from tkcc.api.candidate import Candidate
from tkcc.engine.tier import protocol
from tkcc.engine.tier.arena import Layout
from tkcc.engine.tier.config import TierConfig
from tkcc.engine.tier.pool import Pool, Runner
from tkcc.engine.tier.protocol import Op, Request, RunnerGoneError, RunnerLateError, Status
from tkcc.engine.tier.records import Build


def write_bundle(step_fd: int, layout: Layout, candidate: Candidate, build_cache: Path) -> None:
    """Put the candidate where its runner reads it."""
    data = json.dumps(
        {"source": candidate.source, "params": candidate.params, "build_cache": str(build_cache)}
    ).encode()
    slot = layout.slots[0]
    assert slot.name == "bundle" and len(data) <= slot.num_bytes, (slot.name, len(data))
    with mmap.mmap(step_fd, layout.num_bytes) as memory:
        memory[slot.offset : slot.offset + slot.num_bytes] = data.ljust(slot.num_bytes, b"\0")


def hand_over_build(runner: Runner, build: Build, layout: Layout) -> None:
    """Give a runner its candidate, with a copy of the build that is its own."""
    copy = runner.scratch / "build"
    shutil.copytree(build.build_dir, copy, symlinks=True)
    write_bundle(runner.step_fd, layout, build.candidate, copy)


async def build_candidate(pool: Pool, config: TierConfig, candidate: Candidate, layout: Layout, norms_fd: int) -> Build:
    """Import it, call its build() and prepare(), all within one deadline. Raises ForkError when none can be forked."""
    started = time.monotonic()
    build_dir = config.cache_dir / "builds" / candidate.digest
    build_dir.mkdir(parents=True, exist_ok=True)
    runner = await pool.take_builder(build_dir)
    write_bundle(runner.step_fd, layout, candidate, build_dir)
    state = ""
    try:
        state, reason = await asyncio.to_thread(_drive, runner, norms_fd, config.limits.build_s)
    finally:
        how = await pool.retire(runner, is_gone=state == "CRASHED")
    if state == "CRASHED":
        reason = f"the build {how or reason}"
    return Build(candidate, state, reason, time.monotonic() - started, build_dir)


def _drive(runner: Runner, norms_fd: int, build_s: float) -> tuple[str, str]:
    deadline = time.monotonic() + build_s
    try:
        for seq, op in enumerate((Op.LOAD, Op.PREPARE)):
            timeout_s = max(deadline - time.monotonic(), 0.0)
            fds = [norms_fd] if op is Op.LOAD else []
            reply = protocol.call(runner.control, Request(op, seq), timeout_s, fds)
            if reply.status is not Status.OK:
                return "BUILD_FAIL", f"{op.name.lower()}: {reply.text}"
    except RunnerLateError:
        return "TIMEOUT", f"the build took longer than {build_s:.0f} s"
    except RunnerGoneError as err:
        return "CRASHED", str(err)
    return "BUILT", ""
