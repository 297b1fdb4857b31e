"""One InferenceDeployment in a namespace of its own, as its user sees it: spec in, status, events and answers out."""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import yaml

from e2e.cluster.errors import ClusterError
from e2e.demo.ground import manifest
from e2e.stories.api import ApiAway
from e2e.stories.candidates import Source
from e2e.stories.client import Mix
from e2e.stories.stage import OUT, Stage
from e2e.stories.traffic import Traffic
from tkcc.api.candidate import Artifact
from tkcc.api.codec import from_dict, to_json
from tkcc.api.condition import Condition, ConditionType, find_condition
from tkcc.api.run import RunSpec, RunStatus
from tkcc.api.status import Phase, Status
from tkcc.api.workload import Quantiles, Workload
from tkcc.kube.resources import (
    ALL,
    CONFIG_MAP,
    DEPLOYMENT,
    EVENT,
    INFERENCE_DEPLOYMENT,
    POD,
    RECOMPILATION_RUN,
    SERVICE,
    JsonObject,
)
from tkcc.shell.render.names import MANAGED_BY

MODEL = "tiny"
CLAIM = "models"
SCRIPT = "script"
NAME = "tiny"
INFDEP = INFERENCE_DEPLOYMENT.kind
READY_S = 180.0
DELETE_S = 30.0  # nothing holds it: no finalizer, and its owned objects go in the background

SMALL_CACHE = ["--kv-cache-mib=32"]  # the default of 1 GiB, times the pods of all stories, is more than a machine has

# Windows of 20 s and ticks of 2 s; requests, so that pods get their share of a node that does other things too.
SPEC: Mapping[str, Any] = {
    "model": {"uri": f"pvc://{CLAIM}/{MODEL}", "name": MODEL},
    "engine": {"threads": 1, "args": SMALL_CACHE},
    "replicas": 2,
    "pod": {"resources": {"requests": {"cpu": "50m"}}},
    "drift": {
        "tick": "2s",
        "ticks": 3,
        "minRequests": 20,
        "windows": {"long": "20s", "short": "10s"},
        "cacheFill": "0s",
        "cooldown": "0s",
        "maxRunsPerDay": 20,
    },
    "recompilation": {
        "mode": "Automatic",
        "budget": {"maxDuration": "10m"},
        "tiers": {
            "threads": 1,
            "fast": {"layers": 2, "pod": {"resources": {"requests": {"cpu": "100m"}}}},
            "slow": {"pod": {"resources": {"requests": {"cpu": "100m"}}}},
        },
    },
    "rollout": {
        # What is slow here is slow by a factor of ten; a busy node is not to be taken for it.
        "analysis": {"interval": "2s", "minRequests": 20, "maxTtftRatioPercent": 1000, "maxTpotRatioPercent": 250},
        "stepDeadline": "5m",
        "progressDeadline": "10m",
        "warmupTimeout": "3m",
    },
}

T = TypeVar("T")


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with what `over` says, mappings within mappings."""
    both = dict(base)
    for key, value in over.items():
        have = both.get(key)
        both[key] = merged(have, value) if isinstance(have, Mapping) and isinstance(value, Mapping) else value
    return both


def deploy(stage: Stage, namespace: str, spec: Mapping[str, Any] | None = None) -> "Subject":
    """A new InferenceDeployment in a new namespace, with `spec` laid over SPEC."""
    make_namespace(stage, namespace)
    subject = Subject(stage, namespace)
    subject.apply(spec or {})
    return subject


class Subject:
    """The InferenceDeployment of that name, whether it is there or not."""

    def __init__(self, stage: Stage, namespace: str, name: str = NAME) -> None:
        self.stage, self.namespace, self.name = stage, namespace, name
        self._traffic: Traffic | None = None

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    # What a user does

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        return self.stage.ground.kubectl("-n", self.namespace, *words, stdin=stdin)

    def apply(self, spec: Mapping[str, Any]) -> None:
        """SPEC with `spec` laid over it."""
        self.kubectl("apply", "-f", "-", stdin=manifest(infdep(self.namespace, self.name, merged(SPEC, spec))))

    def delete(self) -> None:
        """As users do: kubectl waits until the object has gone, and fails where it does not go."""
        self.kubectl("delete", "infdep", self.name, f"--timeout={DELETE_S:.0f}s")

    def change(self, spec: Mapping[str, Any]) -> None:
        """Merge into spec; None removes."""
        patch = json.dumps({"spec": spec})
        self.kubectl("patch", "infdep", self.name, "--type=merge", "-p", patch)

    def trigger(self, token: str) -> None:
        self.change({"recompilation": {"triggerToken": token}})

    def adopt(self, source: Source) -> None:
        """Make it an artifact by hand, and ask for it."""
        self.provide(source)
        self.change({"rollout": {"artifact": source.digest}})

    def script(self, *sources: Source) -> None:
        """The candidates that runs will propose, in this order."""
        data: dict[str, str] = {}
        for i, source in enumerate(sources):
            data |= {f"{i}.py": source.text, f"{i}.json": json.dumps(source.params)}
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": SCRIPT, "namespace": self.namespace},
            "data": data,
        }
        self.kubectl("apply", "--server-side", "-f", "-", stdin=manifest(body))

    def provide(self, source: Source) -> None:
        """The artifact's ConfigMap, as somebody would write it who was told its digest."""
        info = self.pod_info()
        known = Artifact(
            digest=source.digest,
            params=source.params,
            model_digest=info["modelDigest"],
            engine_version=info["engineVersion"],
            device=info["device"],
            dtype=info["dtype"],
            workload=NO_WORKLOAD,
            workload_digest=NO_WORKLOAD.digest,
            verdict="Unjudged",
            judge_version="",
            judge_source_hash="",
            traffic_source="",
        )
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"tkcc-artifact-{source.digest[:16]}", "namespace": self.namespace},
            "immutable": True,
            "data": {"manifest.json": to_json(known), "candidate.py": source.text},
        }
        self.kubectl("apply", "--server-side", "-f", "-", stdin=manifest(body))

    # Its clients

    @property
    def traffic(self) -> Traffic:
        assert self._traffic is not None, "no clients yet: call send"
        return self._traffic

    def send(self, mix: Mix) -> None:
        """Clients send requests like this from now on."""
        if self._traffic is None:
            service = self.stage.until(f"{self} has a Service", lambda: self._get(SERVICE, self.name), 60, self.explain)
            out = OUT / "traffic" / f"{self.namespace}-{self.name}.jsonl"
            self._traffic = Traffic(self.stage.cluster, f"http://{service['spec']['clusterIP']}", MODEL, out)
            self.stage.at_end.callback(self._traffic.end)
        self._traffic.send(mix)

    # What can be seen

    def status(self) -> Status:
        found = self._get(INFERENCE_DEPLOYMENT, self.name)
        assert found, f"{self} is not there"
        return from_dict(Status, found.get("status") or {})

    def condition(self, type_: ConditionType) -> Condition | None:
        return find_condition(self.status().conditions, type_)

    def runs(self) -> list[tuple[str, RunSpec, RunStatus]]:
        """Oldest first."""
        found = self.stage.api.list(RECOMPILATION_RUN, self.namespace)
        mine = [run for run in found if run["spec"]["deployment"] == self.name]
        mine.sort(key=lambda run: run["metadata"]["creationTimestamp"])
        return [
            (run["metadata"]["name"], from_dict(RunSpec, run["spec"]), from_dict(RunStatus, run.get("status") or {}))
            for run in mine
        ]

    def run_data(self, run: str, what: str) -> JsonObject:
        """The ConfigMap `RUN-traffic` or `RUN-result`."""
        found = self._get(CONFIG_MAP, f"{run}-{what}")
        assert found, f"{run}-{what} is not there"
        return found

    def events(self) -> list[tuple[str, str]]:
        """(reason, message), oldest first."""
        found = self.stage.api.list(EVENT, self.namespace)
        about = [event for event in found if event["involvedObject"]["kind"] in ("InferenceDeployment",)]
        about = [event for event in about if event["involvedObject"]["name"] == self.name]
        about.sort(key=lambda event: (event["lastTimestamp"], event["metadata"]["creationTimestamp"]))
        return [(event["reason"], event["message"]) for event in about]

    def pods(self, role: str = "") -> list[JsonObject]:
        labels = {"tkcc.dev/deployment": self.name, **({"tkcc.dev/role": role} if role else {})}
        found = self.stage.api.list(POD, self.namespace, **labels)
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def restarts(self) -> int:
        """Of all containers of its pods."""
        return sum(s["restartCount"] for pod in self.pods() for s in pod["status"].get("containerStatuses", []))

    def ready_pods(self) -> list[JsonObject]:
        return _ready(self.pods())

    def uids(self) -> dict[str, str]:
        """Of what lives as long as the InferenceDeployment."""
        wanted = [(SERVICE, self.name), (DEPLOYMENT, f"{self.name}-stable"), (DEPLOYMENT, f"{self.name}-canary")]
        found = {f"{kind.kind}/{name}": self._get(kind, name) for kind, name in wanted}
        return {name: obj["metadata"]["uid"] for name, obj in found.items() if obj}

    def pod_info(self) -> JsonObject:
        """GET /tkcc/info of a stable pod."""
        pod = self.stage.until(
            f"{self} has a ready pod", lambda: next(iter(_ready(self.pods("stable"))), None), READY_S
        )
        said = self.stage.cluster.run(["curl", "-sSf", "-m", "10", f"http://{pod['status']['podIP']}:8001/tkcc/info"])
        info: JsonObject = json.loads(said.stdout)
        return info

    def _get(self, kind: Any, name: str) -> JsonObject | None:
        return self.stage.api.get(kind, self.namespace, name)

    # Waiting

    def until(self, what: str, holds: Callable[[Status], T | None], deadline_s: float = 120.0) -> T:
        return self.stage.until(f"{self}: {what}", lambda: holds(self.status()), deadline_s, self.explain)

    def until_condition(
        self, type_: ConditionType, status: str, reason: str = "", deadline_s: float = 120.0
    ) -> Condition:
        def holds(now: Status) -> Condition | None:
            found = find_condition(now.conditions, type_)
            return found if found and found.status == status and reason in ("", found.reason) else None

        return self.until(f"{type_} is {status} {reason}", holds, deadline_s)

    def until_phase(self, phase: Phase, deadline_s: float = 120.0) -> Status:
        return self.until(f"phase {phase}", lambda now: now if now.phase is phase else None, deadline_s)

    def until_ready(self) -> None:
        self.until_condition(ConditionType.READY, "True", deadline_s=READY_S)

    def until_event(self, reason: str, deadline_s: float = 120.0) -> str:
        """Its newest message."""

        def newest() -> str | None:
            return next((message for found, message in reversed(self.events()) if found == reason), None)

        return self.stage.until(f"{self}: event {reason}", newest, deadline_s, self.explain)

    def until_gone(self) -> None:
        """All that was made for it, in whatever kind; an artifact that another one uses too stays."""

        def left() -> list[str]:
            labels = {**MANAGED_BY, "tkcc.dev/deployment": self.name}
            found = {kind: self.stage.api.list(kind, self.namespace, **labels) for kind in ALL}
            mine = [(kind, obj) for kind, objects in found.items() for obj in objects if not self._is_shared(obj)]
            return [f"{kind.kind}/{obj['metadata']['name']}" for kind, obj in mine]

        self.stage.until(f"{self} is gone", lambda: not left(), 120, lambda: f"left: {', '.join(left())}")

    def _is_shared(self, obj: JsonObject) -> bool:
        owners = [ref["name"] for ref in obj["metadata"].get("ownerReferences", []) if ref["kind"] == INFDEP]
        return bool(owners) and self.name not in owners

    def stays(self, what: str, holds: Callable[[Status], bool], for_s: float) -> None:
        """It holds now and at each look for so long."""
        until_s = time.monotonic() + for_s
        while time.monotonic() < until_s:
            try:
                now = self.status()
                assert holds(now), f"{self}: not any more: {what}\n{self.explain()}"
            except ApiAway:
                pass
            time.sleep(0.5)

    def explain(self) -> str:
        """What a reader wants to know of a wait that was in vain."""
        try:
            return "\n".join(self._explanation())
        except (ApiAway, ClusterError, AssertionError) as err:
            return f"(cannot be explained: {err})"

    def _explanation(self) -> list[str]:
        now = self.status()
        lines = [f"--- {self}: phase {now.phase}, stable {now.stable.name}, plans {len(now.drift.plans)}"]
        lines += [f"{c.type:22} {c.status:8} {c.reason:24} {c.message}" for c in now.conditions]
        lines += [f"--- rollout {now.rollout}"] if now.rollout else []
        for name, spec, status in self.runs():
            lines.append(f"--- run {name} ({spec.trigger}): {status.candidates}")
            lines += [f"{c.type:22} {c.status:8} {c.reason:24} {c.message}" for c in status.conditions]
        lines += ["--- events", *(f"{reason:24} {message}" for reason, message in self.events()[-15:])]
        lines += ["--- pods", self.kubectl("get", "pods", "-o", "wide", "--show-labels=false")]
        for pod in self.stage.api.list(POD, self.namespace):
            if not _ready([pod]):
                name = pod["metadata"]["name"]
                lines.append(f"--- {name}: {yaml.safe_dump(pod['status'].get('containerStatuses', []))}")
                lines.append(self.kubectl("logs", name, "--tail=15"))
        return lines


NO_WORKLOAD = Workload(Quantiles(0, 0, 0, 0), Quantiles(0, 0, 0, 0), Quantiles(0, 0, 0, 0), 0, 0, 0, 0)


def infdep(namespace: str, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": INFERENCE_DEPLOYMENT.api_version,
        "kind": INFERENCE_DEPLOYMENT.kind,
        "metadata": {"name": name, "namespace": namespace},
        "spec": spec,
    }


def make_namespace(stage: Stage, namespace: str) -> None:
    """Anew, with a claim on the directory that holds all models."""
    volume = f"{namespace}-{CLAIM}"
    for left in (f"namespace/{namespace}", f"persistentvolume/{volume}"):  # of a session that kept its stage
        stage.ground.kubectl("delete", left, "--ignore-not-found", "--timeout=100s")
    objects: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": {
                **_VOLUME,
                "capacity": {"storage": "1Gi"},
                "persistentVolumeReclaimPolicy": "Retain",
                "hostPath": {"path": str(stage.models), "type": "Directory"},
                "claimRef": {"namespace": namespace, "name": CLAIM},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": CLAIM, "namespace": namespace},
            "spec": {**_VOLUME, "volumeName": volume, "resources": {"requests": {"storage": "1Gi"}}},
        },
    ]
    stage.ground.kubectl("apply", "-f", "-", stdin=manifest(*objects))


_VOLUME = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}


def _ready(pods: list[JsonObject]) -> list[JsonObject]:
    return [
        pod
        for pod in pods
        if any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))
    ]
