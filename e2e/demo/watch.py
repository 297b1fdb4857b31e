"""Keeps looking at the InferenceDeployment and its runs, and tells the story what changed."""

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from e2e.demo.facts import CandidateFact, RunFact, Story, Told, drift_of, look_of, tpot_ratio_of
from e2e.demo.timeline import Entry, candidate_entry, deployment_entries, run_entries
from tkcc.api.codec import from_dict
from tkcc.api.condition import ConditionStatus, RunConditionType, find_condition
from tkcc.api.report import Report
from tkcc.api.run import RunSpec, RunStatus
from tkcc.api.status import Status
from tkcc.kube.cluster import Cluster
from tkcc.kube.errors import ClusterError
from tkcc.kube.resources import CONFIG_MAP, INFERENCE_DEPLOYMENT, RECOMPILATION_RUN, JsonObject

LOOK_EVERY_S = 1.0
HELD_LOOKS = 4


@dataclass
class SeenRun:
    spec: RunSpec
    status: RunStatus
    workload: str  # what was being sent when it started
    since_s: float
    journal: int = 0  # lines told
    looks_held: int = 0  # a line was kept back, for want of the status that says what its candidate is about

    @property
    def end(self) -> Any:
        """The Succeeded condition once it is decided, else None."""
        condition = find_condition(self.status.conditions, RunConditionType.SUCCEEDED)
        return None if condition is None or condition.status is ConditionStatus.UNKNOWN else condition


@dataclass
class View:
    """The newest state that was seen."""

    status: Status | None = None
    runs: dict[str, SeenRun] = field(default_factory=dict)


class Watcher:
    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        name: str,
        story: Story,
        clock_s: Callable[[], float],
        show: Callable[[Told], None],
    ) -> None:
        self._cluster, self._namespace, self._name = cluster, namespace, name
        self._story, self._clock_s, self._show = story, clock_s, show
        self.view = View()
        self.workload = "A"
        self.changed = asyncio.Condition()

    async def run(self) -> None:
        """Look once a second until cancelled. An API server that is away for a while is waited for."""
        while True:
            try:
                await self.look()
            except ClusterError as err:
                self.tell(Entry("watch", f"no answer from the API server: {err}", 0))
            async with self.changed:
                self.changed.notify_all()
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        obj = await self._cluster.get(INFERENCE_DEPLOYMENT, self._namespace, self._name)
        if obj and obj.get("status"):
            self._deployment(from_dict(Status, obj["status"]))
        for run in await self._cluster.list(RECOMPILATION_RUN, self._namespace):
            if run["spec"]["deployment"] == self._name:
                await self._run(run)
        for digest in self._story.revisions:
            source = self._finder(digest)
            if source:
                self._story.compiled_for.setdefault(digest, source.workload)

    def tell(self, entry: Entry) -> None:
        told = Told(round(self._clock_s(), 1), entry.topic, entry.text, entry.weight)
        self._story.told.append(told)
        self._show(told)

    def _deployment(self, status: Status) -> None:
        for entry in deployment_entries(self.view.status, status):
            self.tell(entry)
        self.view.status = status
        story = self._story
        story.looks.append(look_of(status, round(self._clock_s(), 1)))
        story.conditions = status.conditions
        story.canary_tpot_ratio = tpot_ratio_of(status) or story.canary_tpot_ratio
        if self.workload == "B":
            story.drift = story.drift or drift_of(status)
        digest = status.stable.digest or status.stable.artifact
        if len(digest) == 64 and (not story.revisions or story.revisions[-1] != digest):
            story.revisions.append(digest)

    def _finder(self, digest: str) -> SeenRun | None:
        """The run that found this artifact, whether it went into service at once or was set aside and came back."""
        return next((run for run in self.view.runs.values() if run.status.artifact == digest), None)

    async def _run(self, obj: JsonObject) -> None:
        name = obj["metadata"]["name"]
        status = from_dict(RunStatus, obj.get("status") or {})
        seen = self.view.runs.get(name)
        if seen is None:
            spec = from_dict(RunSpec, obj["spec"])
            seen = SeenRun(spec, status, self.workload, self._clock_s())
            entries = run_entries(name, spec, None, status)
            self.view.runs[name] = seen
        else:
            entries = run_entries(name, seen.spec, seen.status, status)
        was_over, seen.status = seen.end is not None, status
        if not was_over:
            await self._journal(name, seen)
        for entry in entries:
            if entry.topic != "verdict":  # the journal tells each one, the status the best ones only
                self.tell(entry)
        if seen.end is not None and name not in {run.name for run in self._story.runs}:
            took_s = round(self._clock_s() - seen.since_s, 1)
            self._story.runs.append(
                RunFact(name, seen.workload, seen.end.reason, seen.end.message, status.candidates, took_s)
            )

    async def _journal(self, run: str, seen: SeenRun) -> None:
        """Tell the verdicts that the worker has written down since the last look."""
        config_map = await self._cluster.get(CONFIG_MAP, self._namespace, f"{run}-result")
        lines = ((config_map or {}).get("data") or {}).get("journal.jsonl", "").splitlines()
        for line in lines[seen.journal :]:
            fact = candidate_of(run, line, seen.status)
            if fact and not fact.hypothesis and seen.looks_held < HELD_LOOKS and seen.end is None:
                seen.looks_held += 1
                return
            seen.journal, seen.looks_held = seen.journal + 1, 0
            if fact:
                self._story.candidates.append(fact)
                where = f"{fact.tier} {fact.stage}"
                self.tell(candidate_entry(where, fact.digest, fact.outcome, fact.gain_milli, fact.hypothesis))


def candidate_of(run: str, line: str, status: RunStatus) -> CandidateFact | None:
    """A verdict in a line of the worker's journal, or None where it tells of something else. What a candidate is about
    is in the run's status, if it is among the best."""
    entry = json.loads(line)
    if entry.get("kind") != "verdict":
        return None
    report = from_dict(Report, entry["report"])
    return CandidateFact(
        run=run,
        tier=report.tier,
        stage=entry["stage"],
        digest=report.digest,
        outcome=report.outcome,
        gain_milli=round(-1000 * math.expm1(-report.log_gain)),
        hypothesis=next((top.hypothesis for top in status.top if top.digest == report.digest), ""),
        reload_s=report.reload_s or None,
    )
