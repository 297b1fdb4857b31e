"""Names, labels and owner references of everything the operator makes (docs/architecture.md, "Objects")."""

from collections.abc import Mapping
from dataclasses import dataclass

from tkcc.api.fields import BASELINE
from tkcc.kube.resources import GROUP, INFERENCE_DEPLOYMENT, RECOMPILATION_RUN, JsonObject, Kind

DEPLOYMENT_LABEL = f"{GROUP}/deployment"
ROLE_LABEL = f"{GROUP}/role"  # stable or canary
SERVING_LABEL = f"{GROUP}/serving"  # "true": the Service sends requests there
RUN_LABEL = f"{GROUP}/run"
TIER_LABEL = f"{GROUP}/tier"
ARTIFACT_LABEL = f"{GROUP}/artifact"  # short digest
COMPONENT_LABEL = "app.kubernetes.io/component"
MANAGED_BY = {"app.kubernetes.io/managed-by": "tkcc"}

ARTIFACT_ANNOTATION = f"{GROUP}/artifact"  # of a pod template: digest or `baseline`

STABLE, CANARY = "stable", "canary"
ROLES = (STABLE, CANARY)
TIERS = ("fast", "slow")

SERVING_PORT, ADMIN_PORT, TIER_PORT = 8000, 8001, 8090


@dataclass(frozen=True)
class Owner:
    """An object that others are made for and garbage-collected with."""

    kind: Kind
    namespace: str
    name: str
    uid: str

    @classmethod
    def of(cls, obj: JsonObject) -> "Owner":
        kinds = {kind.kind: kind for kind in (INFERENCE_DEPLOYMENT, RECOMPILATION_RUN)}
        meta = obj["metadata"]
        return cls(kinds[obj["kind"]], meta["namespace"], meta["name"], meta["uid"])

    @property
    def reference(self) -> JsonObject:
        return {
            "apiVersion": self.kind.api_version,
            "kind": self.kind.kind,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": False,  # nothing waits for us when the owner goes
        }


def labels(deployment: str, component: str, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    return {
        **MANAGED_BY,
        "app.kubernetes.io/name": "tkcc",
        COMPONENT_LABEL: component,
        DEPLOYMENT_LABEL: deployment,
        **(extra or {}),
    }


def owned(kind: Kind, owner: Owner, name: str, object_labels: Mapping[str, str], **body: object) -> JsonObject:
    """An object in the owner's namespace that goes when the owner goes."""
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {
            "namespace": owner.namespace,
            "name": name,
            "labels": dict(object_labels),
            "ownerReferences": [owner.reference],
        },
        **body,
    }


def serving_name(deployment: str, role: str) -> str:
    return f"{deployment}-{role}"


def observations_name(deployment: str) -> str:
    return f"{deployment}-observations"


def artifact_name(digest: str) -> str:
    if digest == BASELINE:
        raise ValueError("the baseline revision has no artifact object")
    return f"tkcc-artifact-{digest[:16]}"


def token_name(run: str) -> str:
    return f"{run}-token"


def traffic_name(run: str) -> str:
    return f"{run}-traffic"


def result_name(run: str) -> str:
    return f"{run}-result"


def tier_name(run: str, tier: str) -> str:
    return f"{run}-{tier}"
