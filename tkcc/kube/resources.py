"""The kinds that tkcc touches: a closed table, in the order of the chart's RBAC rules.

There is no discovery: an operator that can only reach these kinds cannot surprise anybody, starts without a dozen
calls, and keeps no cache file that outlives a cluster.
"""

from dataclasses import dataclass
from typing import Any

JsonObject = dict[str, Any]  # a Kubernetes object as plain JSON: apiVersion, kind, metadata, ...


@dataclass(frozen=True)
class Kind:
    """A namespaced API resource."""

    group: str  # "" for the core group
    version: str
    kind: str
    plural: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


GROUP = "tkcc.dev"
INFERENCE_DEPLOYMENT = Kind(GROUP, "v1alpha1", "InferenceDeployment", "inferencedeployments")
RECOMPILATION_RUN = Kind(GROUP, "v1alpha1", "RecompilationRun", "recompilationruns")
DEPLOYMENT = Kind("apps", "v1", "Deployment", "deployments")
JOB = Kind("batch", "v1", "Job", "jobs")
POD = Kind("", "v1", "Pod", "pods")
SERVICE = Kind("", "v1", "Service", "services")
CONFIG_MAP = Kind("", "v1", "ConfigMap", "configmaps")
SECRET = Kind("", "v1", "Secret", "secrets")
SERVICE_ACCOUNT = Kind("", "v1", "ServiceAccount", "serviceaccounts")
ROLE = Kind("rbac.authorization.k8s.io", "v1", "Role", "roles")
ROLE_BINDING = Kind("rbac.authorization.k8s.io", "v1", "RoleBinding", "rolebindings")
NETWORK_POLICY = Kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies")
POD_DISRUPTION_BUDGET = Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets")
CLAIM = Kind("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims")
EVENT = Kind("", "v1", "Event", "events")
LEASE = Kind("coordination.k8s.io", "v1", "Lease", "leases")

ALL = (
    INFERENCE_DEPLOYMENT,
    RECOMPILATION_RUN,
    DEPLOYMENT,
    JOB,
    POD,
    SERVICE,
    CONFIG_MAP,
    SECRET,
    SERVICE_ACCOUNT,
    ROLE,
    ROLE_BINDING,
    NETWORK_POLICY,
    POD_DISRUPTION_BUDGET,
    CLAIM,
    EVENT,
    LEASE,
)
_BY_NAME = {(kind.api_version, kind.kind): kind for kind in ALL}


def kind_of(obj: JsonObject) -> Kind:
    """The kind of a rendered object. Raises ValueError for one that is not in the table."""
    key = (obj.get("apiVersion", ""), obj.get("kind", ""))
    if key not in _BY_NAME:
        raise ValueError(f"tkcc does not handle {key[1] or 'an object without kind'} of {key[0] or 'no apiVersion'}")
    return _BY_NAME[key]
