"""Kubernetes objects and pod readings as the core's observations. Pure; what is absent stays absent."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tkcc.api.candidate import Artifact, candidate_digest, parse_artifact
from tkcc.api.codec import from_dict, from_json
from tkcc.api.run import RunResult, RunSpec, RunStatus
from tkcc.control.observed import ArtifactSeen, Meta, PodSeen, RunSeen, ServingSeen, TierSeen
from tkcc.kube.resources import JsonObject
from tkcc.shell.render.names import ARTIFACT_ANNOTATION, SERVING_LABEL
from tkcc.shell.scrape import Reading

_ORDINARY_WAITS = ("ContainerCreating", "PodInitializing")
MOUNT_LIMIT = timedelta(minutes=2)  # for volumes to be attached; what takes longer is in somebody's way


@dataclass(frozen=True)
class ResultSeen:
    """The ConfigMap RUN-result. `error`: `result.json` is there and does not parse."""

    result: RunResult | None = None
    source_digest: str = ""
    manifest: Artifact | None = None
    error: str = ""


def meta(obj: JsonObject) -> Meta:
    have = obj["metadata"]
    return Meta(have["name"], have["namespace"], have["uid"], have.get("generation", 0))


def when(text: str) -> datetime:
    return datetime.fromisoformat(text)


def is_controlled_by(obj: JsonObject, uid: str) -> bool:
    return any(ref["uid"] == uid and ref.get("controller") for ref in obj["metadata"].get("ownerReferences", []))


def serving(deployment: JsonObject, pods: Sequence[PodSeen]) -> ServingSeen:
    spec, status = deployment["spec"], deployment.get("status", {})
    template = spec["template"]["metadata"].get("annotations", {})
    return ServingSeen(
        artifact=template.get(ARTIFACT_ANNOTATION, ""),
        replicas=spec.get("replicas", 1),
        ready_replicas=status.get("readyReplicas", 0),
        updated_replicas=status.get("updatedReplicas", 0),
        is_current=status.get("observedGeneration", 0) >= deployment["metadata"]["generation"],
        pods=tuple(pods),
    )


def pod(obj: JsonObject, reading: Reading | None) -> PodSeen:
    have, status = obj["metadata"], obj.get("status", {})
    info = reading.info if reading else None
    return PodSeen(
        name=have["name"],
        is_ready=is_ready(obj),
        in_service=have.get("labels", {}).get(SERVING_LABEL) == "true",
        template_artifact=have.get("annotations", {}).get(ARTIFACT_ANNOTATION, ""),
        artifact_digest=info.artifact_digest if info else "",
        baseline_digest=info.baseline_digest if info else "",
        model_digest=info.model_digest if info else "",
        engine_version=info.engine_version if info else "",
        requests_started=reading.requests_started if reading else None,
        restarts=_restarts(status),
        waiting_reason=_waiting(status),
        load_error=reading.load_error if reading else "",
        last_words=_last_words(status),
        unschedulable=_unschedulable(status),
        is_terminating="deletionTimestamp" in have,
        has_ended=has_ended(obj),
    )


def has_ended(pod: JsonObject) -> bool:
    """Evicted, rejected by its node, or done: it stays to be looked at, and another one takes its place."""
    return pod.get("status", {}).get("phase") in ("Failed", "Succeeded")


def is_ready(obj: JsonObject) -> bool:
    """A pod that takes requests: one that terminates is ready for a while, but no longer ours to count."""
    conditions = obj.get("status", {}).get("conditions", [])
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return ready and "deletionTimestamp" not in obj["metadata"]


def run(obj: JsonObject, result: ResultSeen) -> RunSeen:
    """Raises ValueError where spec or status does not parse."""
    status = from_dict(RunStatus, obj.get("status") or {})
    return RunSeen(
        name=obj["metadata"]["name"],
        created_at=when(obj["metadata"]["creationTimestamp"]),
        spec=from_dict(RunSpec, obj["spec"]),
        conditions=status.conditions,
        result=result.result,
        source_digest=result.source_digest,
        manifest=result.manifest,
        finished_at=status.finished_at,
        num_evaluated=status.candidates.evaluated,
    )


def result(data: Mapping[str, str]) -> ResultSeen:
    """What the worker wrote. Until `result.json` is there nothing counts: it is written last."""
    if "result.json" not in data:
        return ResultSeen()
    try:
        parsed = from_json(RunResult, data["result.json"])
        if not parsed.artifact:
            return ResultSeen(parsed)
        missing = [key for key in ("manifest.json", "candidate.py") if key not in data]
        if missing:
            raise ValueError(f"the result names an artifact, but {', '.join(missing)} is missing")
        manifest = from_json(Artifact, data["manifest.json"])
        return ResultSeen(parsed, candidate_digest(data["candidate.py"], manifest.params), manifest)
    except ValueError as err:
        return ResultSeen(error=str(err)[:1000])


def artifact(obj: JsonObject, owner_uid: str) -> ArtifactSeen:
    """Raises ValueError where the content is not what its manifest claims."""
    manifest, _ = parse_artifact(obj.get("data", {}))
    created_at = when(obj["metadata"]["creationTimestamp"])
    return ArtifactSeen(manifest.digest, manifest, is_controlled_by(obj, owner_uid), created_at)


def tier(name: str, deployment: JsonObject, pods: Iterable[JsonObject], now: datetime) -> TierSeen:
    live = [have for have in pods if _is_live(have)]
    statuses = [have.get("status", {}) for have in live]
    return TierSeen(
        name=name,
        is_ready=deployment.get("status", {}).get("readyReplicas", 0) >= 1,
        restarts=sum(_restarts(status) for status in statuses),
        problem=problem(live, now),
        last_words=next((words for status in statuses if (words := _last_words(status))), ""),
    )


def problem(pods: Iterable[JsonObject], now: datetime) -> str:
    """Why the first of these that cannot run cannot, or ""."""
    live = (have for have in pods if _is_live(have))
    found = (
        _waiting(have.get("status", {})) or _unschedulable(have.get("status", {})) or _unmounted(have, now)
        for have in live
    )
    return next((why for why in found if why), "")


def _is_live(pod: JsonObject) -> bool:
    return "deletionTimestamp" not in pod["metadata"] and not has_ended(pod)


def job_end(job: JsonObject, pods: Iterable[JsonObject]) -> tuple[bool, str]:
    """(succeeded, why it failed or "") of a Job. What its newest pod said at its end says more than any count."""
    conditions = job.get("status", {}).get("conditions", [])
    true = {c["type"]: c for c in conditions if c["status"] == "True"}
    failed = true.get("Failed")
    if not failed:
        return "Complete" in true, ""
    newest = sorted(pods, key=lambda have: str(have["metadata"]["creationTimestamp"]), reverse=True)
    words = next((words for have in newest if (words := _last_words(have.get("status", {})))), "")
    return False, f"{failed.get('reason', '')}: {words or failed.get('message', '')}"


def _restarts(status: JsonObject) -> int:
    return sum(container.get("restartCount", 0) for container in status.get("containerStatuses", []))


def _waiting(status: JsonObject) -> str:
    for container in status.get("containerStatuses", []):
        reason: str = container.get("state", {}).get("waiting", {}).get("reason", "")
        if reason and reason not in _ORDINARY_WAITS:
            return reason
    return ""


def _last_words(status: JsonObject) -> str:
    """The last line of the container that ended, now or before its restart."""
    for container in status.get("containerStatuses", []):
        for state in (container.get("state", {}), container.get("lastState", {})):
            message: str = state.get("terminated", {}).get("message", "").strip()
            if message:
                return message.splitlines()[-1][:400]
    return ""


def _unschedulable(status: JsonObject) -> str:
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            message: str = condition.get("message", condition.get("reason", ""))
            return message
    return ""


def _unmounted(pod: JsonObject, now: datetime) -> str:
    """A node makes a pod's sandbox once its volumes are mounted, and before it pulls images. Where that takes long,
    some volume is missing, or in use on another node; which one, only an Event of the node tells."""
    for condition in pod.get("status", {}).get("conditions", []):
        if condition["type"] == "PodReadyToStartContainers" and condition["status"] == "False":
            since = when(condition["lastTransitionTime"])
            if now - since > MOUNT_LIMIT:
                return f"its volumes are not mounted since {since:%H:%M:%S}: {', '.join(_mounted(pod))}"
    return ""


def _mounted(pod: JsonObject) -> list[str]:
    sources = (("persistentVolumeClaim", "claimName"), ("configMap", "name"), ("secret", "secretName"))
    volumes = pod["spec"].get("volumes", [])
    return [f"{kind} {volume[kind][key]}" for kind, key in sources for volume in volumes if kind in volume]
