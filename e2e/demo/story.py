"""The plot: workload A until its forward pass is in service, then workload B until the one for B is. Thin: it starts
things, waits with deadlines, and leaves judging to the operator and telling to `watch`."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from e2e.demo.clock import Stopwatch
from e2e.demo.facts import Sent, Story, Told
from e2e.demo.ground import Ground, manifest
from e2e.demo.load import Load, sending, traces_config_map
from e2e.demo.setting import EXAMPLE, PACE, REPOSITORY, Subject
from e2e.demo.timeline import Entry, short
from e2e.demo.watch import SeenRun, View, Watcher
from tkcc.api.codec import to_dict
from tkcc.api.condition import ConditionStatus, ConditionType, find_condition
from tkcc.api.status import Phase
from tkcc.kube.cluster import connect
from tkcc.traffic.replay import Result

TRACES = REPOSITORY / "examples" / "traces"

LENGTH_FACTOR = 1 / 16
TIME_FACTOR = 0.5
MAX_REPLAY_S = 3600.0
FIRST_CANDIDATES = 2  # what pays most is tried first: enough for a gain

SERVING_DEADLINE_S = 300.0
QUIET_S = 15.0  # after which a wait says that it goes on
PLAN_DEADLINE_S, RUN_DEADLINE_S, ROLLOUT_DEADLINE_S, DRIFT_DEADLINE_S = 300.0, 900.0, 900.0, 600.0


class StoryError(RuntimeError):
    """The story cannot go on; the message says where it broke off and why."""


class Plot:
    """One telling."""

    def __init__(
        self, ground: Ground, subject: Subject, story: Story, watch: Stopwatch, show: Callable[[Told], None]
    ) -> None:
        self._ground, self._subject, self._story, self._watch, self._show = ground, subject, story, watch, show
        self._zero_s = 0.0
        self._zero_unix_s = 0.0

    def clock_s(self) -> float:
        return asyncio.get_running_loop().time() - self._zero_s

    async def play(self) -> None:
        subject, ground = self._subject, self._ground
        os.environ["KUBECONFIG"] = str(ground.kubeconfig)
        self._zero_s, self._zero_unix_s = asyncio.get_running_loop().time(), time.time()
        loads = [self._load("A", "chat"), self._load("B", "coding-agent")]
        async with connect() as cluster:
            watcher = Watcher(cluster, subject.namespace, subject.name, self._story, self.clock_s, self._show)
            self._watcher = watcher
            task = asyncio.create_task(watcher.run())
            try:
                with self._watch.step("serving"):
                    watcher.tell(Entry("apply", f"kubectl apply -f {_name(EXAMPLE)}, at the pace of {_name(PACE)}", 2))
                    await asyncio.to_thread(ground.kubectl, "apply", "-f", "-", stdin=manifest(subject.obj))
                    await asyncio.to_thread(
                        ground.kubectl, "apply", "-f", "-", stdin=manifest(traces_config_map(subject.namespace, loads))
                    )
                    await self._until("the pods are ready", _is_ready, SERVING_DEADLINE_S)
                async with self._sending(loads[0]):
                    await self._compile_for_a()
                async with self._sending(loads[1]):
                    await self._drift_to_b()
                    watcher.tell(Entry("traffic", "stops; what is in flight is waited for"))
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _compile_for_a(self) -> None:
        with self._watch.step("plan 0"):
            await self._until(
                "the first window is a plan",
                lambda view: bool(view.status and view.status.drift.plans),
                PLAN_DEADLINE_S,
            )
        with self._watch.step("run for A"):
            said = f"asked for by hand: triggerToken=first, maxCandidates={FIRST_CANDIDATES} so that it is soon over"
            self._watcher.tell(Entry("run", said))
            await self._recompilation({"triggerToken": "first", "budget": {"maxCandidates": FIRST_CANDIDATES}})
            await self._run_ends("A")
            await self._recompilation({"budget": to_dict(self._subject.spec.recompilation.budget)})
        with self._watch.step("canary of A's"):
            await self._promoted("A")

    async def _recompilation(self, spec: dict[str, Any]) -> None:
        """Merge this into spec.recompilation."""
        patch = json.dumps({"spec": {"recompilation": spec}})
        name, namespace = self._subject.name, self._subject.namespace
        await asyncio.to_thread(
            self._ground.kubectl, "patch", "infdep", name, "-n", namespace, "--type=merge", "-p", patch
        )

    async def _drift_to_b(self) -> None:
        with self._watch.step("drift to B"):
            await self._until("drift is seen", lambda _: self._story.drift is not None, DRIFT_DEADLINE_S)
        with self._watch.step("run for B"):
            await self._run_ends("B")
        with self._watch.step("canary of B's"):
            await self._promoted("B")

    async def _run_ends(self, workload: str) -> None:
        def ended(view: View) -> SeenRun | None:
            return next((run for run in view.runs.values() if run.workload == workload and run.end), None)

        await self._until(f"a run for {workload} ends", lambda view: ended(view) is not None, RUN_DEADLINE_S)
        run = ended(self._watcher.view)
        assert run is not None
        if run.end.status is not ConditionStatus.TRUE:
            raise StoryError(f"the run for workload {workload} ended with {run.end.reason}: {run.end.message}")

    async def _promoted(self, workload: str) -> None:
        def over(view: View) -> bool:
            status = view.status
            if status is None:
                return False
            in_service = self._story.compiled_for.get(status.stable.digest) == workload
            rollout = status.rollout
            lost = rollout is not None and bool(rollout.abort_reason) and self._watcher.workload == workload
            return (in_service or lost) and status.phase is Phase.SERVING

        await self._until(f"the artifact for {workload} is in service", over, ROLLOUT_DEADLINE_S)
        status = self._watcher.view.status
        assert status is not None
        if self._story.compiled_for.get(status.stable.digest) != workload:
            assert status.rollout is not None
            raise StoryError(
                f"{short(status.rollout.artifact)} was rolled back ({status.rollout.abort_reason}): "
                f"{status.rollout.abort_message}"
            )

    async def _until(self, what: str, done: Callable[[View], bool], deadline_s: float) -> None:
        """Wait for the watcher to see it; a wait that shows nothing for a while says that it goes on."""
        started_s = self.clock_s()
        watcher = self._watcher
        while not done(watcher.view):
            waited_s = self.clock_s() - started_s
            if waited_s >= deadline_s:
                raise StoryError(f"not within {deadline_s:.0f} s: {what}. Conditions: {_conditions(watcher.view)}")
            if self.clock_s() - self._story.told[-1].at_s >= QUIET_S:
                sent = len(self._story.sent)
                said = f"until {what}: {waited_s:.0f} s so far, {sent} requests answered{_still(watcher.view)}"
                watcher.tell(Entry("wait", said, 0))
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0), watcher.changed:
                    await watcher.changed.wait()

    @asynccontextmanager
    async def _sending(self, load: Load) -> AsyncIterator[None]:
        ground, namespace = self._ground, self._subject.namespace
        address = await asyncio.to_thread(
            ground.kubectl, "get", "service", self._subject.name, "-n", namespace, "-o", "jsonpath={.spec.clusterIP}"
        )
        self._watcher.workload = load.workload
        self._watcher.tell(
            Entry(
                "traffic",
                f"workload {load.workload}: {load.trace.name}, length factor {load.length_factor:g}, "
                f"time factor {load.time_factor:g}",
                2,
            )
        )

        def note(result: Result) -> None:
            self._story.sent.append(Sent(round(result.started_at_s - self._zero_unix_s, 2), load.workload, result))

        def say(line: str) -> None:
            self._watcher.tell(Entry("traffic", line, 0))

        async with sending(ground, load, namespace, f"http://{address}", note, say):
            yield

    def _load(self, workload: str, trace: str) -> Load:
        return Load(workload, TRACES / f"{trace}.jsonl.gz", LENGTH_FACTOR, TIME_FACTOR, MAX_REPLAY_S)


def _name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def _still(view: View) -> str:
    """What is not as it should be, in the operator's words."""
    conditions = view.status.conditions if view.status else ()
    good = (ConditionType.ACCEPTED, ConditionType.READY, ConditionType.METRICS_AVAILABLE)
    wrong = [c for c in conditions if c.type in good and c.status is not ConditionStatus.TRUE]
    return f"; {wrong[0].type}={wrong[0].status} {wrong[0].reason}: {wrong[0].message}" if wrong else ""


def _conditions(view: View) -> str:
    conditions = view.status.conditions if view.status else ()
    return "; ".join(f"{c.type}={c.status} {c.reason}: {c.message}" for c in conditions) or "none yet"


def _is_ready(view: View) -> bool:
    ready = find_condition(view.status.conditions, ConditionType.READY) if view.status else None
    return ready is not None and ready.status is ConditionStatus.TRUE
