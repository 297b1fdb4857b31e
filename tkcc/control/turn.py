"""One reconcile's view of the world: the spec, what was seen, and the figures that several decisions need of it."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from tkcc.api.candidate import Artifact
from tkcc.api.fields import BASELINE
from tkcc.api.spec import Spec
from tkcc.api.status import Plan, Revision, RolledBack, Status
from tkcc.control.acceptance import Acceptance, accept
from tkcc.control.drift import Traffic
from tkcc.control.observed import Observed, PodSeen, ServingSeen

# Ends that say little about the artifact: no room for its pods, too little traffic, metrics that cannot be read.
UNDECIDED = frozenset({"WarmupTimedOut", "AnalysisInconclusive", "ProgressDeadlineExceeded"})
MAX_TRIES = 3


@dataclass(frozen=True)
class Turn:
    spec: Spec
    seen: Observed
    traffic: Traffic
    acceptance: Acceptance

    @classmethod
    def of(cls, spec: Spec, status: Status, seen: Observed) -> "Turn":
        return cls(spec, seen, Traffic(seen.samples, spec.drift.cache_fill), accept(spec, status, seen))

    @property
    def now(self) -> datetime:
        return self.seen.now

    def deadline(self, since: datetime, limit: timedelta) -> datetime:
        """Time in which nobody looked on does not count: nothing was decided in it."""
        return max(since, self.seen.watched_since or since) + limit

    def manifest(self, artifact: str) -> Artifact | None:
        return next((a.manifest for a in self.seen.artifacts if a.digest == artifact), None)


def serves(pod: PodSeen, artifact: str) -> bool:
    """Does the pod itself say that it runs this artifact? Not without an answer."""
    if artifact == BASELINE:
        return bool(pod.artifact_digest) and pod.artifact_digest == pod.baseline_digest
    return pod.artifact_digest == artifact


def live_pods(serving: ServingSeen | None) -> tuple[PodSeen, ...]:
    """Those that its Deployment counts."""
    return tuple(pod for pod in serving.pods if not (pod.is_terminating or pod.has_ended)) if serving else ()


def in_service(serving: ServingSeen | None) -> tuple[PodSeen, ...]:
    """Ready pods that the Service selects."""
    return tuple(pod for pod in live_pods(serving) if pod.is_ready and pod.in_service)


def is_rolled_out(serving: ServingSeen) -> bool:
    """Is every pod of the present template and ready, with none of an older one left? The three counts alone do not
    say: old pods may be ready while as many new ones are not."""
    counts = (serving.updated_replicas, serving.ready_replicas, len(live_pods(serving)))
    return serving.is_current and set(counts) == {serving.replicas}


def is_whole(stable: ServingSeen | None, artifact: str, replicas: int) -> bool:
    """Has every one of `replicas` stable pods the present template, is ready, and says it runs the artifact?"""
    if stable is None or stable.artifact != artifact or stable.replicas != replicas or not is_rolled_out(stable):
        return False
    return sum(pod.is_ready and serves(pod, artifact) for pod in live_pods(stable)) >= replicas


def stable_plans(status: Status) -> tuple[Plan, ...]:
    """Plans of the artifact in service."""
    return tuple(plan for plan in status.drift.plans if plan.artifact == status.stable.artifact)


def is_rolled_back(status: Status, artifact: str) -> bool:
    """For good."""
    return any(item.artifact == artifact and not is_undecided(item) for item in status.rolled_back)


def is_undecided(item: RolledBack) -> bool:
    """Did its rollout end without a verdict, so that it is to be tried again?"""
    return item.reason in UNDECIDED and item.tries < MAX_TRIES


def next_try(turn: Turn, status: Status, artifact: str) -> tuple[RolledBack, datetime] | None:
    """How its last rollout ended without a verdict, and when the next may start: each waits longer than the last."""
    item = next((item for item in status.rolled_back if item.artifact == artifact), None)
    if item is None or not is_undecided(item):
        return None
    return item, item.at + item.tries * turn.spec.drift.cooldown


def incompatibility(turn: Turn, artifact: str) -> str:
    """Why the stable pods' engine cannot run this artifact as it was judged, or ""."""
    if artifact == BASELINE:
        return ""
    manifest = turn.manifest(artifact)
    if manifest is None:
        return f"ConfigMap tkcc-artifact-{artifact[:16]} does not exist"
    for pod in live_pods(turn.seen.stable):
        if pod.model_digest and pod.model_digest != manifest.model_digest:
            return f"made for model {manifest.model_digest[:12]}, the pods serve {pod.model_digest[:12]}"
        if pod.engine_version and pod.engine_version != manifest.engine_version:
            return f"made for engine {manifest.engine_version}, the pods run {pod.engine_version}"
    if manifest.dtype != turn.spec.engine.dtype.value:
        return f"made for dtype {manifest.dtype}, spec.engine.dtype is {turn.spec.engine.dtype.value}"
    if manifest.device.startswith("cpu") == turn.spec.pod.has_gpu:
        return f"made for device {manifest.device}, the pods have {'a GPU' if turn.spec.pod.has_gpu else 'no GPU'}"
    return ""


def revision_of(artifact: str, manifest: Artifact | None, like: Revision) -> Revision:
    """`like`, with the name and speed-up of this artifact."""
    return Revision(
        artifact=artifact,
        name=short_name(artifact),
        digest="" if artifact == BASELINE else artifact,
        source=like.source,
        run=like.run,
        speedup=speedup_text(manifest.gain_milli) if manifest else "",
        workload=like.workload,
        workload_digest=like.workload_digest,
    )


def short_name(artifact: str) -> str:
    return artifact[:12]


def speedup_text(gain_milli: int) -> str:
    """Time saved, in thousandths, as a factor: 200 is 1.25x."""
    return f"{1000 / (1000 - gain_milli):.2f}x" if gain_milli < 1000 else ""


def clock(at: datetime) -> str:
    """A time for a message."""
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")
