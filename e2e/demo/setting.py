"""What is there before the story: the subject, the chart and its operator, the weights; and the last look at it all."""

import json
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster import cache, progress
from e2e.cluster.errors import ClusterError
from e2e.demo.clock import Stopwatch
from e2e.demo.ground import Ground, image_values, manifest
from tkcc.api.codec import from_dict
from tkcc.api.spec import Spec, model_claim

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "smollm2.yaml"
PACE = Path(__file__).with_name("pace.yaml")
CHART = REPOSITORY / "charts" / "tkcc"
SYSTEM_NAMESPACE = "tkcc-system"
INSTALL_DEADLINE_S = 120.0


@dataclass(frozen=True)
class Subject:
    """The InferenceDeployment that the story is about: the example, at the demo's pace."""

    obj: dict[str, Any]
    name: str
    namespace: str
    spec: Spec

    @classmethod
    def read(cls, example: Path = EXAMPLE, pace: Path = PACE) -> "Subject":
        """Raises ValueError where the two do not make a valid spec."""
        obj = _merge(yaml.safe_load(example.read_text()), yaml.safe_load(pace.read_text()))
        meta = obj["metadata"]
        meta.setdefault("namespace", "default")
        return cls(obj, meta["name"], meta["namespace"], from_dict(Spec, obj["spec"]))


def _merge(into: Any, patch: Any) -> Any:
    """JSON merge patch (RFC 7386) without its nulls."""
    if not isinstance(into, dict) or not isinstance(patch, dict):
        return patch
    return {**into, **{key: _merge(into.get(key), value) for key, value in patch.items()}}


def install(ground: Ground, watch: Stopwatch) -> None:
    """The chart, and its operator ready."""
    with watch.step("install"), progress.step("install the chart"):
        values = json.dumps(image_values(ground))
        path = REPOSITORY / "build" / "demo" / "values.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(values)
        ground.helm(
            *("upgrade", "--install", "tkcc", str(CHART), "--namespace", SYSTEM_NAMESPACE, "--create-namespace"),
            *("--values", str(path), "--wait", "--timeout", f"{INSTALL_DEADLINE_S:.0f}s"),
            deadline_s=INSTALL_DEADLINE_S + 30,
        )


def provide_weights(ground: Ground, subject: Subject, model_dir: Path) -> None:
    """A read-only claim on the model's files of this machine, unless the cluster has the claim already."""
    claim, path = model_claim(subject.spec.model.uri)
    have = ground.kubectl("get", "pvc", claim, "-n", subject.namespace, "--ignore-not-found", "-o", "name")
    if have.strip():
        return
    if not ground.runs_here():
        raise ClusterError(
            f"the cluster's nodes are not this machine: create claim {claim} in namespace {subject.namespace} first, "
            f'with the model in its folder {path} (examples/smollm2-weights.yaml; "Serve" in docs/operator.md)'
        )
    root = cache.root() / "claims" / claim  # laid out as the claim promises, by hard links
    shutil.rmtree(root, ignore_errors=True)
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(model_dir, root / path, copy_function=os.link, dirs_exist_ok=True)
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": _volume(subject)},
        "spec": {
            "capacity": {"storage": "2Gi"},
            "accessModes": ["ReadOnlyMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
            "hostPath": {"path": str(root), "type": "Directory"},
            "claimRef": {"namespace": subject.namespace, "name": claim},
        },
    }
    wanted = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": claim, "namespace": subject.namespace},
        "spec": {
            "accessModes": ["ReadOnlyMany"],
            "storageClassName": "",
            "volumeName": _volume(subject),
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    ground.kubectl("apply", "-f", "-", stdin=manifest(volume, wanted))


def _volume(subject: Subject) -> str:
    return f"{subject.namespace}-{model_claim(subject.spec.model.uri)[0]}"


def remove(ground: Ground, subject: Subject) -> None:
    """All that a demo put into a cluster, in the order in which nothing is left hanging."""
    claim, _ = model_claim(subject.spec.model.uri)
    gone = ("--ignore-not-found", "--wait=true", "--timeout=120s")
    ground.kubectl("delete", "infdep", subject.name, "-n", subject.namespace, *gone, deadline_s=150)
    ground.kubectl("delete", "pods,configmaps", "-n", subject.namespace, "-l", "app=traffic", *gone, deadline_s=150)
    ground.helm("uninstall", "tkcc", "--namespace", SYSTEM_NAMESPACE, "--ignore-not-found", "--wait")
    ground.kubectl("delete", "namespace", SYSTEM_NAMESPACE, *gone, deadline_s=150)
    if ground.kubectl("get", "pv", _volume(subject), "--ignore-not-found", "-o", "name").strip():  # ours, then
        ground.kubectl("delete", "pvc", claim, "-n", subject.namespace, *gone, deadline_s=150)
        ground.kubectl("delete", "pv", _volume(subject), *gone, deadline_s=150)


def machine() -> dict[str, str]:
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {"cores": str(os.cpu_count()), "CPU": cpu, "kernel": platform.release(), "Python": platform.python_version()}


def closing(ground: Ground, subject: Subject) -> str:
    """The last word: objects and conditions as kubectl shows them."""
    table = ground.kubectl("get", "infdep,recompilationruns", "-n", subject.namespace)
    obj: dict[str, Any] = json.loads(
        ground.kubectl("get", "infdep", subject.name, "-n", subject.namespace, "-o", "json")
    )
    lines = [
        f"{c['type']:22s} {c['status']:8s} {c['reason']:24s} {c['message']}"
        for c in obj.get("status", {}).get("conditions", [])
    ]
    return f"{table}\n" + "\n".join(lines)
