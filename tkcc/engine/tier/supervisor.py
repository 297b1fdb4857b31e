"""The supervisor: starts holder, forkserver and judge, builds candidates, and hands runners to the judge.

It has no torch and takes no verdict. The judge, a process of its own started from a command that the composition root
passes, asks it for runners and for their end; a candidate is never in its address space.
"""

import asyncio
import contextlib
import itertools
import os
import sys
from collections import Counter
from typing import Any

import tkcc
from tkcc.api.candidate import Candidate
from tkcc.api.codec import from_dict, to_dict
from tkcc.api.report import AlphaTicket, Outcome, Report
from tkcc.api.workload import Recording, Workload
from tkcc.engine.tier import channel, sandbox, triage
from tkcc.engine.tier.arena import Geometry, Layout
from tkcc.engine.tier.builder import build_candidate, hand_over_build
from tkcc.engine.tier.channel import Message
from tkcc.engine.tier.config import TierConfig
from tkcc.engine.tier.forks import ForkError, Forkserver
from tkcc.engine.tier.link import Link
from tkcc.engine.tier.pool import Pool, Runner, RunnerKind
from tkcc.engine.tier.records import Build, Judgement, Stage, TierError

HOLDER_START_S = 300.0
JUDGE_START_S = 300.0
WORKLOAD_S = 300.0
MAX_JUDGE_STARTS = 3


class Supervisor:
    """One tier. `start` before use, `stop` after; both on one event loop."""

    def __init__(self, config: TierConfig) -> None:
        self.config = config
        self.builds: dict[str, Build] = {}
        self.judgements: dict[str, Judgement] = {}
        self.info: dict[str, Any] = {}
        self.cells: list[dict[str, Any]] = []
        self.num_steps = 0
        self.state = "STARTING"  # WAITING for a workload, CALIBRATING, READY, FAILED
        self.failure = ""
        self.broken = asyncio.Event()  # FAILED for good: only another process can help
        self._incumbent: Build | None = None
        self._wanted: Candidate  # what is to be the incumbent, built or not yet
        self._workload: dict[str, Any] | None = None
        self._runners: dict[int, Runner] = {}
        self._queue: asyncio.Queue[Judgement] = asyncio.Queue(config.limits.queue)
        self._current: Judgement | None = None
        self._idle = asyncio.Event()
        self._judge_starts = 0
        self._judge_said_hello = asyncio.Event()
        self._workload_known: asyncio.Future[None] | None = None
        self._build_slots = asyncio.Semaphore(max(1, (os.cpu_count() or 1) // 2))
        self._tasks: set[asyncio.Task[None]] = set()
        self._ids = itertools.count(1)

    # --- start and stop ---

    async def start(self) -> None:
        """Raises TierError with the reason when a process of the tier does not come up."""
        missing = sandbox.missing_features()
        if missing and self.config.is_confined:
            raise TierError(
                f"this kernel cannot contain candidates: it lacks {'; '.join(missing)}. Use another machine, or run"
                " trusted candidates only with --allow-unconfined"
            )
        say(f"tier {self.config.tier}: starting, then loading weights from {self.config.model_dir}")
        self.forks = Forkserver(self.config.num_threads)
        try:
            await self.forks.start()
            await self._start_holder()
            say(f"tier {self.config.tier}: {self._weights.num_bytes >> 20} MiB of weights sealed; the judge is next")
            self.pool = Pool(self.config, self.forks, self._weights_fd, self._weights.num_bytes)
            self.pool.start()
            await self._start_judge()
        except ForkError as err:
            raise TierError(str(err)) from err
        self._add_task(self._work())
        self.state = "WAITING"
        say(f"tier {self.config.tier}: waiting for a workload")

    async def _start_holder(self) -> None:
        config = self.config
        self._holder, self._holder_sock = await self.forks.start_trusted(
            "holder",
            "tkcc.engine.tier.holder:main",
            model_dir=str(config.model_dir),
            num_layers=config.num_layers,
            dtype=config.dtype,
        )
        loop = asyncio.get_running_loop()
        self._holder_sock.settimeout(HOLDER_START_S)
        try:
            message = await loop.run_in_executor(None, channel.receive, self._holder_sock)
        except (channel.ChannelClosedError, TimeoutError):
            raise TierError("the holder ended before the weights were loaded") from None
        if message.op != "weights":
            raise TierError(str(message.body.get("reason", "the holder failed")))
        self._weights_fd, self._norms_fd = message.fds
        self._model = message.body["config"]
        self._full_layers = message.body["full_layers"]
        self._weights = Layout.from_dict(message.body["weights"])
        self._norms = Layout.from_dict(message.body["norms"])
        self.baseline = self._wanted = from_dict(Candidate, message.body["baseline"])
        self.info["modelDigest"] = message.body["model_digest"]
        self.info["baselineDigest"] = self.baseline.digest

    async def _start_judge(self) -> None:
        self._judge_starts += 1
        self._judge_said_hello.clear()
        self._judge, sock = await self.forks.start_trusted("judge", self.config.judge_entry)
        self._link = Link(sock, self._on_judge, self._on_judge_gone)
        body = {
            "op": "start",
            "tier": self.config.tier,
            "config": self._model,
            "full_layers": self._full_layers,
            "dtype": self.config.dtype,
            "device": self.config.device,
            "num_threads": self.config.num_threads,
            "weights": self._weights.to_dict(),
            "norms": self._norms.to_dict(),
            "baseline": self.baseline.digest,
            "load_s": self.config.limits.load_s,
            "prepare_s": self.config.limits.prepare_s,
        }
        self._link.send(body, [self._weights_fd, self._norms_fd])
        try:
            await asyncio.wait_for(self._judge_said_hello.wait(), JUDGE_START_S)
        except TimeoutError:
            raise TierError("the judge did not come up") from None

    async def stop(self) -> None:
        self.state = "STOPPED"
        for task in self._tasks:
            task.cancel()
        if hasattr(self, "_link"):
            self._link.close()
            await self._judge.stop()
        if hasattr(self, "pool"):
            await self.pool.stop()
        if hasattr(self, "_holder"):
            self._holder_sock.close()
            await self._holder.stop()
        if hasattr(self, "forks"):
            await self.forks.stop()

    @property
    def is_healthy(self) -> bool:
        return self.state in ("WAITING", "CALIBRATING", "READY") and self.forks.is_up and self._link.is_open

    # --- what the API asks for ---

    def describe(self) -> dict[str, Any]:
        """The body of GET /v1/info."""
        config = self.config
        return {
            "tier": config.tier,
            "state": self.state,
            "failure": self.failure,
            "engineVersion": tkcc.__version__,
            "device": config.device,
            "dtype": config.dtype,
            "threads": config.num_threads,
            "layers": self._model["num_layers"],
            "model": self._model,
            "incumbentDigest": self._incumbent.candidate.digest if self._incumbent else self.baseline.digest,
            "spares": self.pool.num_spares,
            "cells": self.describe_cells(),
            "confined": config.is_confined,
            "missingFeatures": sandbox.missing_features(),
            **self.info,
        }

    def describe_cells(self) -> list[dict[str, Any]]:
        names = {"new_tokens": "newTokens", "context_tokens": "contextTokens", "weight_ratio": "weightRatio"}
        return [{names.get(key, key): value for key, value in cell.items()} for cell in self.cells]

    def metrics(self) -> str:
        """Prometheus text."""
        states = Counter(build.state for build in self.builds.values())
        reports = Counter(j.report.outcome for j in self.judgements.values() if j.report)
        lines = ["# TYPE tkcc_tier_candidates gauge"]
        lines += [f'tkcc_tier_candidates{{state="{state}"}} {n}' for state, n in sorted(states.items())]
        lines += ["# TYPE tkcc_tier_judgements gauge"]
        lines += [f'tkcc_tier_judgements{{outcome="{outcome}"}} {n}' for outcome, n in sorted(reports.items())]
        lines += [
            "# TYPE tkcc_tier_runners_killed_total counter",
            f"tkcc_tier_runners_killed_total {self.pool.num_kills}",
        ]
        return "\n".join(lines) + "\n"

    async def put_workload(
        self, workload: Workload, recording: Recording, incumbent: Candidate | None = None, estimates_only: bool = False
    ) -> None:
        """Turn recorded requests into steps and cells, and calibrate the judge on them, with the forward pass that
        candidates must beat (None: the baseline revision). estimates_only: sooner ready, but nothing can be decided.
        Raises TierError."""
        if not recording.requests:
            raise TierError("the recording has no requests", 400)
        if self._current is not None or not self._queue.empty():
            raise TierError("judgements are under way: wait for them before changing the workload")
        given = {"workload": to_dict(workload), "recording": to_dict(recording)}
        self._workload = {**given, "estimates_only": estimates_only}
        self._workload_known = asyncio.get_running_loop().create_future()
        self.builds.clear()
        self._incumbent = None
        self._wanted = incumbent or self.baseline
        self.state = "CALIBRATING"
        self._idle.clear()
        self._link.send({"op": "workload", **self._workload})
        try:
            await asyncio.wait_for(self._workload_known, WORKLOAD_S)
        except TimeoutError:
            raise TierError("the judge did not make cells of the workload in time", 500) from None

    async def submit(self, candidate: Candidate) -> Build:
        """Triage and build; the same digest is built once. Raises TierError while there is no workload."""
        known = self.builds.get(candidate.digest)
        if known is not None:
            return known
        refusal = triage.refusal(candidate)
        if refusal:
            return self._remember(Build(candidate, "REJECTED_STATIC", refusal, 0.0, self.config.cache_dir))
        kind = self._need_kind()
        async with self._build_slots:
            known = self.builds.get(candidate.digest)
            if known is not None:
                return known
            try:
                if triage.wants_compiler(candidate):
                    await self.pool.load_compiler()
                build = await build_candidate(self.pool, self.config, candidate, kind.step, self._norms_fd)
            except ForkError as err:
                raise TierError(str(err), 503) from err
        return self._remember(build)

    def judge(self, digest: str, ticket: AlphaTicket, stage: Stage) -> Judgement:
        """Queue a judgement. Raises TierError."""
        if self.state == "FAILED":
            raise TierError(self.failure, 503)
        build = self.builds.get(digest)
        if build is None:
            raise TierError(f"no candidate {digest[:16]} here: POST /v1/candidates first", 404)
        if build.state != "BUILT":
            raise TierError(f"candidate {digest[:16]} is {build.state}: {build.reason}")
        if self._workload and self._workload["estimates_only"] and not stage.is_estimate:
            raise TierError("the workload was given for estimates only")
        judgement = Judgement(f"j{next(self._ids)}", digest, stage, ticket)
        try:
            self._queue.put_nowait(judgement)
        except asyncio.QueueFull:
            raise TierError(f"{self.config.limits.queue} judgements wait already: try later", 429) from None
        self.judgements[judgement.id] = judgement
        _forget_oldest(self.judgements, self.config.limits.known)
        return judgement

    def _remember(self, build: Build) -> Build:
        self.builds[build.candidate.digest] = build
        _forget_oldest(self.builds, self.config.limits.known)
        return build

    def _need_kind(self) -> RunnerKind:
        if self._workload is None or self.pool.kind is None:
            raise TierError("no workload yet: PUT /v1/workload first")
        return self.pool.kind

    # --- the judge's work, one at a time ---

    async def _work(self) -> None:
        while True:
            judgement = self._current = await self._queue.get()
            await self._idle.wait()
            if judgement.report is not None:  # it was ended meanwhile, with the judge
                continue
            judgement.state = "CORRECTNESS"
            try:
                self._link.send(await self._order(judgement))
                await asyncio.wait_for(judgement.done.wait(), self.config.limits.judgement_s)
            except TierError as err:
                self._end_current(Outcome.EXPIRED, str(err))
            except (channel.ChannelClosedError, TimeoutError) as err:
                late = isinstance(err, TimeoutError)
                reason = f"no verdict in {self.config.limits.judgement_s:.0f} s" if late else "the judge is down"
                self._end_current(Outcome.TIMEOUT if late else Outcome.EXPIRED, reason)
                if late:  # it may be in any state: a new one is the only safe way on
                    self._judge.kill()

    async def _order(self, judgement: Judgement) -> dict[str, Any]:
        """What the judge is told to do. Raises TierError where what it is to be measured against does not build."""
        assert self._incumbent is not None
        against = self._incumbent
        if judgement.stage is Stage.ESTIMATE_BASELINE:
            against = await self.submit(self.baseline)
            if against.state != "BUILT":
                raise TierError(_unbuilt(against))
        return {
            "op": "judge",
            "digest": judgement.digest,
            "against": against.candidate.digest,
            "stage": judgement.stage,
            "ticket": to_dict(judgement.ticket),
        }

    def _end_current(self, outcome: Outcome, reason: str) -> None:
        judgement, self._current = self._current, None
        if judgement is not None and judgement.report is None:
            incumbent = self._incumbent.candidate.digest if self._incumbent else ""
            judgement.report = Report(
                judgement.digest, incumbent, self.config.tier, outcome, reason, ticket_id=judgement.ticket.id
            )
            judgement.state = "DONE"
            judgement.done.set()

    def _on_judge_gone(self) -> None:
        for runner in list(self._runners.values()):
            self._add_task(self._retire(runner, None, is_gone=False))
        self._end_current(Outcome.EXPIRED, "the judge ended unexpectedly; its verdict is lost")
        self._idle.clear()
        if self.state != "STOPPED":
            self._add_task(self._restart_judge())

    async def _restart_judge(self) -> None:
        await self._judge.stop()
        if self._judge_starts >= MAX_JUDGE_STARTS:
            self._break(f"the judge ended {self._judge_starts} times")
            return
        try:
            await self._start_judge()
        except (TierError, ForkError) as err:
            self._break(str(err))
            return
        if self._workload is not None:
            self.state = "CALIBRATING"
            self._link.send({"op": "workload", **self._workload})

    def _break(self, failure: str) -> None:
        """For good: who runs this process must know."""
        self._fail(failure)
        self.broken.set()

    def _fail(self, failure: str) -> None:
        """Nothing can be judged: nobody waits for it in vain."""
        self.state, self.failure = "FAILED", failure
        self._end_current(Outcome.EXPIRED, failure)
        while not self._queue.empty():
            self._current = self._queue.get_nowait()
            self._end_current(Outcome.EXPIRED, failure)

    def _on_judge(self, message: Message) -> None:
        body = message.body
        match message.op:
            case "hello":
                self.info |= {"judgeVersion": body["version"], "judgeSourceHash": body["source_hash"]}
                self._judge_said_hello.set()
            case "cells":
                self._add_task(self._take_cells(body))
            case "ready":
                self.info |= {"noiseFloor": body["noise_floor"], "calibration": body["calibration"]}
                self.cells = body["cells"]
                self.state = "READY"
                say(f"tier {self.config.tier}: calibrated, noise floor {100 * body['noise_floor']:.1f} %")
                self._idle.set()
            case "failed":
                self._fail(body["reason"])
                if self._workload_known is not None and not self._workload_known.done():
                    self._workload_known.set_exception(TierError(body["reason"], 422))
            case "progress":
                if self._current is not None:
                    self._current.state, self._current.pairs = body["state"], body["pairs"]
            case "report":
                judgement, self._current = self._current, None
                if judgement is not None:
                    judgement.report = from_dict(Report, body["report"])
                    judgement.state = "DONE"
                    judgement.done.set()
            case "spawn":
                self._add_task(self._spawn(body))
            case "retire":
                runner = self._runners.get(body["runner"])
                self._add_task(self._retire(runner, body["call"], body["is_gone"]))

    async def _take_cells(self, body: dict[str, Any]) -> None:
        """The judge made cells of the workload: from now on runners are built for them."""
        self.cells, self.num_steps = body["cells"], body["steps"]
        geometry = Geometry(**body["geometry"])
        model = self._model
        layout = geometry.kv_layout(model["num_layers"], model["num_kv_heads"], model["head_dim"], self.config.dtype)
        spec = {
            "config": model,
            "dtype": self.config.dtype,
            "device": self.config.device,
            "geometry": body["geometry"],
            "num_threads": self.config.num_threads,
            "cells": body["cells"],
            "weights": self._weights.to_dict(),
            "norms": self._norms.to_dict(),
        }
        step = geometry.step_layout(model["vocab_size"], self.config.dtype)
        await self.pool.configure(RunnerKind(spec, geometry, layout, step))
        wanted = self._wanted
        build = await self.submit(wanted)
        if build.state != "BUILT":
            self._fail(_unbuilt(build))
            if self._workload_known is not None and not self._workload_known.done():
                self._workload_known.set_exception(TierError(self.failure, 422))
            return
        self._incumbent = build
        if self._workload_known is not None and not self._workload_known.done():
            self._workload_known.set_result(None)
        self._link.send({"op": "incumbent", "digest": wanted.digest})

    async def _spawn(self, body: dict[str, Any]) -> None:
        build = self.builds.get(body["digest"])
        reply: dict[str, Any] = {"op": "reply", "call": body["call"]}
        try:
            if build is None or build.state != "BUILT":
                raise ForkError(f"candidate {body['digest'][:16]} is not built")
            runner = await self.pool.take()
            hand_over_build(runner, build, self._need_kind().step)
        except (ForkError, OSError) as err:
            with contextlib.suppress(channel.ChannelClosedError):
                self._link.send({**reply, "error": str(err)})
            return
        self._runners[runner.id] = runner
        fds = [runner.control.fileno(), runner.step_fd, runner.kv_fd, runner.process.pidfd]
        with contextlib.suppress(channel.ChannelClosedError):
            self._link.send({**reply, "runner": runner.id, "pid": runner.process.pid, "built_s": build.build_s}, fds)

    async def _retire(self, runner: Runner | None, call: int | None, is_gone: bool) -> None:
        end, log = "", ""
        if runner is not None:
            self._runners.pop(runner.id, None)
            end = await self.pool.retire(runner, is_gone)
            log = runner.log_tail()
        if call is not None:
            with contextlib.suppress(channel.ChannelClosedError):
                self._link.send({"op": "reply", "call": call, "end": end, "log": log})

    def _add_task(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _unbuilt(build: Build) -> str:
    return f"the incumbent {build.candidate.digest[:16]} does not build: {build.state}: {build.reason}"


def say(text: str) -> None:
    """A line for whoever reads this process's log."""
    print(text, file=sys.stderr, flush=True)


def _forget_oldest(records: dict[str, Any], keep: int) -> None:
    while len(records) > keep:
        del records[next(iter(records))]
