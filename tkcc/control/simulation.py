"""A world for the core to act on, in memory: pods that start and answer, traffic, runs that end as a script says.

It stands in for cluster and shell in property tests and in `tkcc simulate`. It keeps what the actions promise and no
more; what a real cluster does besides is shown by the tests that run on one.
"""

import heapq
import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from tkcc.api.candidate import Artifact
from tkcc.api.codec import sha256_hex
from tkcc.api.condition import Condition, ConditionStatus, RunConditionType, set_condition
from tkcc.api.fields import BASELINE
from tkcc.api.observation import MetricSample, RequestSample
from tkcc.api.run import CandidateCounts, RunOutcome, RunResult
from tkcc.api.spec import Spec
from tkcc.api.status import Status
from tkcc.api.workload import Quantiles, Workload
from tkcc.control import actions as act
from tkcc.control.observed import (
    ArtifactSeen,
    Meta,
    MissingReference,
    Observed,
    PodSeen,
    ProbeSeen,
    RunSeen,
    ServingSeen,
)
from tkcc.control.reconcile import reconcile

START = datetime(2026, 1, 1, tzinfo=UTC)
BASELINE_DIGEST = sha256_hex("the built-in forward pass")
MODEL_DIGEST = sha256_hex("the model")
ENGINE_VERSION = "simulated"

PROBE_IDS = ("p1", "p2")

_TPOT_S = 0.02
_PREFILL_S_PER_TOKEN = 0.0005
_MAX_REMEMBERED = 4000  # finished requests, as pods keep a bounded ring


@dataclass(frozen=True)
class Load:
    """What clients send."""

    requests_per_minute: float = 60.0
    prompt_tokens: int = 1000
    output_tokens: int = 50
    hit_ratio: float = 0.5


@dataclass(frozen=True)
class Behaviour:
    """What an artifact does when it serves. Times are those of `baseline` times `time_ratio`; with `home_tokens`, for
    prompts near that length alone, and as the baseline's elsewhere."""

    time_ratio: float = 1.0
    home_tokens: int = 0
    error_ratio: float = 0.0
    is_wrong: bool = False  # probes answer other tokens
    crashes: bool = False
    starts: bool = True  # becomes ready
    answers: bool = True  # finishes requests

    def time_ratio_of(self, prompt_tokens: int) -> float:
        is_home = not self.home_tokens or 0.5 < prompt_tokens / self.home_tokens < 2.0
        return self.time_ratio if is_home else 1.0


@dataclass(frozen=True)
class RunScript:
    """How the next run ends."""

    after: timedelta = timedelta(minutes=10)
    outcome: RunOutcome = RunOutcome.SEARCH_SUCCEEDED
    artifact: str = ""  # digest
    gain_milli: int = 200
    message: str = "as the script says"


@dataclass
class Pod:
    name: str
    artifact: str
    template: str
    made_at: datetime
    in_service: bool
    is_ready: bool = False
    has_ended: bool = False
    restarts: int = 0
    started: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    hit_tokens: int = 0


@dataclass
class Workloads:
    """One Deployment and its pods."""

    role: str
    artifact: str = BASELINE
    template: str = ""
    replicas: int = 0
    pods: list[Pod] = field(default_factory=list)


@dataclass
class World:
    """Mutable. `turn` is what the shell does: observe, reconcile, apply, write status."""

    spec: Spec
    seed: int = 0
    now: datetime = START
    generation: int = 1
    status: Status = field(default_factory=Status)
    load: Load = field(default_factory=Load)
    behaviours: dict[str, Behaviour] = field(default_factory=dict)
    scripts: list[RunScript] = field(default_factory=list)
    start_time: timedelta = timedelta(seconds=20)  # of a pod, until it is ready
    metrics_down: bool = False
    sticky_ratio: float = 0.0  # of the requests, that go to the first pod whatever the weights say
    missing: tuple[MissingReference, ...] = ()
    watched_since: datetime = START

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.stable: Workloads | None = None
        self.canary: Workloads | None = None
        self.runs: dict[str, RunSeen] = {}
        self.artifacts: dict[str, ArtifactSeen] = {}
        self.samples: list[MetricSample] = []
        self.requests: list[RequestSample] = []
        self.probes: dict[tuple[str, str], ProbeSeen] = {}
        self.events: list[tuple[datetime, act.EmitEvent]] = []
        self.failed = 0  # requests that got an error, or that no pod could take
        self.sent = 0
        self._under_way: list[tuple[datetime, int, Pod, RequestSample]] = []
        self._owed = 0.0
        self._made = 0
        self._script_of: dict[str, RunScript] = {}

    # --- the core's turn ---------------------------------------------------------------------------------------------

    def turn(self, *, die_after: int | None = None) -> tuple[act.Action, ...]:
        """One reconcile. With `die_after`, only so many actions happen and the status is not written."""
        actions, new = reconcile(self.spec, self.status, self.observe())
        self.apply(actions if die_after is None else actions[:die_after])
        if die_after is None:
            self.status = new
        return actions

    def change(self, spec: Spec) -> None:
        if spec != self.spec:
            self.spec, self.generation = spec, self.generation + 1

    def add_artifact(self, digest: str, gain_milli: int = 200, *, is_owned: bool = False) -> None:
        self.artifacts.setdefault(digest, ArtifactSeen(digest, self._manifest(digest, gain_milli), is_owned, self.now))

    def restart(self) -> None:
        """Of the operator: what it kept in memory is gone."""
        self.probes.clear()
        self.watched_since = self.now

    def evict(self, pod: Pod) -> None:
        """It ends and stays where it can be seen; its Deployment makes another."""
        pod.has_ended, pod.is_ready = True, False

    # --- time --------------------------------------------------------------------------------------------------------

    def advance(self, dt: timedelta) -> None:
        """Pods start, clients send, runs end, metrics are read."""
        self.now += dt
        for deployment in (self.stable, self.canary):
            if deployment is not None:
                self._start_pods(deployment)
                self._settle(deployment)
        self._send(dt)
        self._finish()
        for run in list(self.runs.values()):
            script = self._script_of.get(run.name)
            if script is not None and self.now >= run.created_at + script.after:
                self._end_run(run, script)
        self._sample()

    def _start_pods(self, deployment: Workloads) -> None:
        for pod in deployment.pods:
            behaviour = self.behaviours.get(pod.artifact, Behaviour())
            if pod.is_ready or pod.has_ended or self.now < pod.made_at + self.start_time:
                continue
            if behaviour.crashes:
                pod.restarts += 1
            elif behaviour.starts:
                pod.is_ready = True

    def _settle(self, deployment: Workloads) -> None:
        """A rolling update that never takes a ready pod away before another stands in for it."""
        live = [p for p in deployment.pods if not p.has_ended]
        fresh = [p for p in live if p.template == deployment.template]
        while len(fresh) < deployment.replicas:
            self._made += 1
            pod = Pod(
                name=f"{deployment.role}-{self._made}",
                artifact=deployment.artifact,
                template=deployment.template,
                made_at=self.now,
                in_service=deployment.role == "stable",
            )
            fresh.append(pod)
            deployment.pods.append(pod)
        for pod in sorted(fresh, key=lambda p: (p.is_ready, p.in_service))[: len(fresh) - deployment.replicas]:
            deployment.pods.remove(pod)
        ready = sum(p.is_ready for p in deployment.pods if p.template == deployment.template)
        stale = [p for p in live if p.template != deployment.template]
        for pod in stale[max(0, deployment.replicas - ready) :]:
            deployment.pods.remove(pod)

    def _send(self, dt: timedelta) -> None:
        pods = [p for d in (self.stable, self.canary) if d for p in d.pods if p.is_ready and p.in_service]
        if not pods and not self.sent:
            return  # clients come once something serves
        self._owed += self.load.requests_per_minute * dt.total_seconds() / 60.0
        while self._owed >= 1.0:
            self._owed -= 1.0
            self.sent += 1
            if not pods:
                self.failed += 1
                continue
            pod = pods[0] if self.sticky_ratio and self.rng.random() < self.sticky_ratio else self.rng.choice(pods)
            self._serve(pod, self.now - dt * self.rng.random())

    def _serve(self, pod: Pod, at: datetime) -> None:
        behaviour = self.behaviours.get(pod.artifact, Behaviour())
        prompt = max(1, round(self.load.prompt_tokens * self.rng.lognormvariate(0.0, 0.2)))
        cached = round(prompt * self.load.hit_ratio)
        fails = self.rng.random() < behaviour.error_ratio
        noise = self.rng.lognormvariate(0.0, 0.1)
        time_ratio = behaviour.time_ratio_of(prompt)
        ttft_s = _PREFILL_S_PER_TOKEN * (prompt - cached) * time_ratio * noise
        tpot_s = _TPOT_S * time_ratio * self.rng.lognormvariate(0.0, 0.1)
        pod.started += 1
        pod.prompt_tokens += prompt
        pod.hit_tokens += cached
        request = RequestSample(
            pod=pod.name,
            artifact=pod.artifact,
            started_at=at,
            prompt_tokens=prompt,
            cached_tokens=cached,
            output_tokens=0 if fails else self.load.output_tokens,
            outcome="error" if fails else "ok",
            ttft_s=None if fails else ttft_s,
            tpot_s=None if fails else tpot_s,
        )
        if behaviour.answers:
            end = at + timedelta(seconds=0.0 if fails else ttft_s + tpot_s * self.load.output_tokens)
            heapq.heappush(self._under_way, (end, self.sent, pod, request))

    def _finish(self) -> None:
        while self._under_way and self._under_way[0][0] <= self.now:
            _, _, pod, request = heapq.heappop(self._under_way)
            pod.finished += 1
            pod.output_tokens += request.output_tokens
            self.failed += request.outcome == "error"
            self.requests.append(request)
        del self.requests[:-_MAX_REMEMBERED]

    def _sample(self) -> None:
        spec = self.spec.drift
        last = self.samples[-1].at if self.samples else None
        if self.metrics_down or (last is not None and self.now < last + spec.tick):
            return
        keep = self.now - spec.windows.long - (spec.ticks + 3) * spec.tick
        self.samples = [s for s in self.samples if s.at >= keep]
        for deployment in (self.stable, self.canary):
            for pod in deployment.pods if deployment else ():
                if pod.is_ready:
                    self.samples.append(
                        MetricSample(
                            series=pod.name,
                            started_at=pod.made_at,
                            at=self.now,
                            prompt_requests=pod.started,
                            prompt_tokens=pod.prompt_tokens,
                            output_requests=pod.finished,
                            output_tokens=pod.output_tokens,
                            hit_tokens=pod.hit_tokens,
                            query_tokens=pod.prompt_tokens,
                            running=pod.started - pod.finished,
                        )
                    )

    # --- what the core sees ------------------------------------------------------------------------------------------

    def observe(self) -> Observed:
        errors: tuple[str, ...] = ()
        if self.metrics_down:
            pods = [p for d in (self.stable, self.canary) if d for p in d.pods]
            errors = tuple(f"{pod.name}: connection refused" for pod in pods)
        return Observed(
            now=self.now,
            meta=Meta("demo", "default", "uid-1", self.generation),
            stable=self._seen(self.stable),
            canary=self._seen(self.canary),
            runs=tuple(self.runs.values()),
            artifacts=tuple(self.artifacts.values()),
            samples=tuple(self.samples),
            requests=tuple(self.requests),
            probes=tuple(self.probes.values()),
            probe_ids=PROBE_IDS,
            missing=self.missing,
            scrape_errors=errors,
            watched_since=self.watched_since,
        )

    def _seen(self, deployment: Workloads | None) -> ServingSeen | None:
        if deployment is None:
            return None
        return ServingSeen(
            artifact=deployment.artifact,
            replicas=deployment.replicas,
            ready_replicas=sum(p.is_ready for p in deployment.pods),
            updated_replicas=sum(p.template == deployment.template and not p.has_ended for p in deployment.pods),
            is_current=True,
            pods=tuple(self._pod_seen(pod) for pod in deployment.pods),
        )

    def _pod_seen(self, pod: Pod) -> PodSeen:
        digest = BASELINE_DIGEST if pod.artifact == BASELINE else pod.artifact
        return PodSeen(
            name=pod.name,
            is_ready=pod.is_ready,
            in_service=pod.in_service,
            template_artifact=pod.artifact,
            artifact_digest=digest if pod.is_ready else "",
            baseline_digest=BASELINE_DIGEST if pod.is_ready else "",
            model_digest=MODEL_DIGEST if pod.is_ready else "",
            engine_version=ENGINE_VERSION if pod.is_ready else "",
            requests_started=pod.started if pod.is_ready and not self.metrics_down else None,
            restarts=pod.restarts,
            waiting_reason="CrashLoopBackOff" if pod.restarts else "",
            has_ended=pod.has_ended,
        )

    @property
    def weight_pct(self) -> int:
        """The canary's share of the pods that serve."""
        serving = [p for d in (self.stable, self.canary) if d for p in d.pods if p.is_ready and p.in_service]
        ours = sum(p.name.startswith("canary") for p in serving)
        return round(100 * ours / len(serving)) if serving else 0

    # --- what the actions do -----------------------------------------------------------------------------------------

    def apply(self, actions: Iterable[act.Action]) -> None:
        for action in actions:
            self._apply(action)

    def _apply(self, action: act.Action) -> None:
        match action:
            case act.EnsureStable(artifact, replicas):
                template = f"{artifact}/{self.spec.engine}/{self.spec.pod}"
                self.stable = self._ensured(self.stable, "stable", artifact, template, replicas)
            case act.EnsureCanary(artifact, replicas):
                if self.canary is not None or replicas:
                    self.canary = self._ensured(self.canary, "canary", artifact, artifact, replicas)
            case act.EnsureSize(role, replicas):
                deployment = {"stable": self.stable, "canary": self.canary}[role]
                assert deployment is not None, "only what is there"
                deployment.replicas = replicas
                self._settle(deployment)
            case act.EnsureWeight(_, pods):
                for pod in self.canary.pods if self.canary else ():
                    pod.in_service = pod.name in pods
            case act.EnsureProbed(pods, after):
                self._probe(pods, after)
            case act.EnsureRun(name, spec):
                if name not in self.runs:
                    self.runs[name] = RunSeen(name, self.now, spec)
                    self._script_of[name] = self.scripts.pop(0) if self.scripts else RunScript(after=timedelta(days=1))
            case act.EnsureRunEnded(name, reason, message):
                run = self.runs.get(name)
                if run is not None and run.finished_at is None:
                    self._end_run(run, RunScript(outcome=RunOutcome(reason), message=message))
            case act.EnsureRunGone(name):
                self.runs.pop(name, None)
            case act.EnsureArtifact(digest, run_name):
                made_by = self.runs[run_name]
                assert made_by.manifest is not None
                self.artifacts.setdefault(digest, ArtifactSeen(digest, made_by.manifest, True, self.now))
            case act.EnsureArtifactGone(digest):
                self.artifacts.pop(digest, None)
            case act.EmitEvent():
                self.events.append((self.now, action))
            case act.EnsureService():
                pass

    def _ensured(self, have: Workloads | None, role: str, artifact: str, template: str, replicas: int) -> Workloads:
        deployment = have or Workloads(role)
        deployment.artifact, deployment.template, deployment.replicas = artifact, template, replicas
        self._settle(deployment)
        return deployment

    def _probe(self, names: Iterable[str], after: datetime) -> None:
        for pod in self.canary.pods if self.canary else ():
            if pod.name not in names or not pod.is_ready:
                continue
            for prompt_id in PROBE_IDS:
                last = self.probes.get((pod.name, prompt_id))
                if last is None or last.at < after:
                    wrong = self.behaviours.get(pod.artifact, Behaviour()).is_wrong
                    gap = 3.0 if wrong else None
                    probe = ProbeSeen(pod.name, self.now, prompt_id, not wrong, 4 if wrong else None, gap)
                    self.probes[pod.name, prompt_id] = probe

    def _end_run(self, run: RunSeen, script: RunScript) -> None:
        if run.finished_at is not None:
            return
        won = script.outcome is RunOutcome.SEARCH_SUCCEEDED
        state = ConditionStatus.TRUE if won else ConditionStatus.FALSE
        ended = Condition(RunConditionType.SUCCEEDED, state, script.outcome.value, script.message)
        result = RunResult(
            outcome=script.outcome,
            message=script.message,
            artifact=script.artifact if won else "",
            candidates=CandidateCounts(evaluated=2, accepted=int(won), refused=2 - int(won)),
            gain_milli=script.gain_milli if won else 0,
        )
        self.runs[run.name] = replace(
            run,
            conditions=set_condition(run.conditions, ended, self.now),
            result=result,
            source_digest=result.artifact,
            manifest=self._manifest(script.artifact, script.gain_milli) if won else None,
            finished_at=self.now,
            num_evaluated=2,
        )

    def _manifest(self, digest: str, gain_milli: int) -> Artifact:
        flat = Quantiles(1000, 1000, 1000, 1000)
        workload = Workload(flat, flat, flat, 500, 60, 1800, 1800)
        return Artifact(
            digest=digest,
            params={},
            model_digest=MODEL_DIGEST,
            engine_version=ENGINE_VERSION,
            device="cpu: simulated",
            dtype=self.spec.engine.dtype.value,
            workload=workload,
            workload_digest=workload.digest,
            verdict="Pass",
            judge_version="simulated",
            judge_source_hash="",
            traffic_source="synthetic",
            gain_milli=gain_milli,
        )
