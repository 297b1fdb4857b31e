"""How each part of Kubernetes is told to run, as values: command lines and configuration files. Pure.

Configuration is written as JSON, which every reader of YAML reads.
"""

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOOPBACK = "127.0.0.1"
SERVICE_CIDR = "10.96.0.0/16"
KUBERNETES_SERVICE_IP = "10.96.0.1"  # the first of SERVICE_CIDR: the API server's own Service
POD_CIDR = "10.244.0.0/16"
NODE = "node1"
NODE_IP, NODE_GATEWAY = "10.250.0.10", "10.250.0.1"  # the same in every cluster: each has a network of its own


@dataclass(frozen=True)
class ControlPlaneLayout:
    """Where one control plane keeps its files and which ports it listens on."""

    run_dir: Path
    programs: Path
    api_port: int
    etcd_port: int
    etcd_peer_port: int
    node_ip: str | None = None  # None: a control plane alone, on loopback, without nodes

    @property
    def pki(self) -> Path:
        return self.run_dir / "pki"

    @property
    def audit_log(self) -> Path:
        return self.run_dir / "audit" / "audit.jsonl"

    @property
    def audit_policy(self) -> Path:
        return self.run_dir / "audit" / "policy.json"

    @property
    def url(self) -> str:
        return f"https://{LOOPBACK}:{self.api_port}"

    def kubeconfig(self, user: str) -> Path:
        return self.run_dir / "kubeconfigs" / f"{user}.json"


def etcd(at: ControlPlaneLayout) -> list[str]:
    """A single member on loopback; no fsync, because its data dies with the cluster."""
    client, peer = f"http://{LOOPBACK}:{at.etcd_port}", f"http://{LOOPBACK}:{at.etcd_peer_port}"
    return [
        str(at.programs / "etcd"),
        f"--data-dir={at.run_dir / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def apiserver(at: ControlPlaneLayout) -> list[str]:
    """RBAC and the Node authorizer, default admission, an audit log that blocks so that it is complete."""
    alone = at.node_ip is None
    return [
        str(at.programs / "kube-apiserver"),
        f"--etcd-servers=http://{LOOPBACK}:{at.etcd_port}",
        f"--bind-address={LOOPBACK if alone else '0.0.0.0'}",
        f"--advertise-address={at.node_ip or LOOPBACK}",
        *(["--endpoint-reconciler-type=none"] if alone else []),
        f"--secure-port={at.api_port}",
        f"--tls-cert-file={at.pki / 'apiserver.crt'}",
        f"--tls-private-key-file={at.pki / 'apiserver.key'}",
        f"--client-ca-file={at.pki / 'ca.crt'}",
        f"--token-auth-file={at.pki / 'tokens.csv'}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-signing-key-file={at.pki / 'sa.key'}",
        f"--service-account-key-file={at.pki / 'sa.pub'}",
        f"--service-cluster-ip-range={SERVICE_CIDR}",
        "--authorization-mode=Node,RBAC",
        "--allow-privileged=true",
        "--kubelet-preferred-address-types=InternalIP",
        "--profiling=false",
        f"--audit-policy-file={at.audit_policy}",
        f"--audit-log-path={at.audit_log}",
        "--audit-log-mode=blocking",
        "--shutdown-watch-termination-grace-period=2s",  # else SIGTERM waits a minute for watches that never end
        "--audit-log-maxsize=2000",  # MiB: never rotated within a test run
    ]


def audit_policy() -> dict[str, Any]:
    """Bodies of our own resources; of all others who did what to what, and with which outcome. No body of a Secret."""
    return {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "omitManagedFields": True,
        "rules": [
            {"level": "RequestResponse", "verbs": ["create", "update", "patch"], "resources": [{"group": "tkcc.dev"}]},
            {"level": "Metadata"},
        ],
    }


def controller_manager(at: ControlPlaneLayout) -> list[str]:
    config = at.kubeconfig("controller-manager")
    nodes = ["--allocate-node-cidrs=true", f"--cluster-cidr={POD_CIDR}"] if at.node_ip else []
    return [
        str(at.programs / "kube-controller-manager"),
        *_client(config),
        "--use-service-account-credentials=true",
        f"--service-account-private-key-file={at.pki / 'sa.key'}",
        f"--root-ca-file={at.pki / 'ca.crt'}",
        f"--flex-volume-plugin-dir={at.run_dir / 'flexvolume'}",  # else it makes one under /usr/libexec
        "--kube-api-qps=500",  # the default of 20 makes it spend seconds on its forty ServiceAccounts
        "--kube-api-burst=1000",
        *nodes,
        *([] if at.node_ip else ["--secure-port=0"]),
    ]


def scheduler(at: ControlPlaneLayout) -> list[str]:
    return [str(at.programs / "kube-scheduler"), *_client(at.kubeconfig("scheduler"))]


def _client(config: Path) -> list[str]:
    """A component that is alone of its kind and serves nobody but its own node."""
    given = [f"--{what}kubeconfig={config}" for what in ("", "authentication-", "authorization-")]
    return [*given, f"--bind-address={LOOPBACK}", "--leader-elect=false"]


def kubeconfig(url: str, ca: bytes, token: str, namespace: str = "default") -> dict[str, Any]:
    """A kubeconfig with everything inside, so that it can be copied anywhere."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "tkcc", "cluster": {"server": url, "certificate-authority-data": base64.b64encode(ca).decode()}}
        ],
        "users": [{"name": "tkcc", "user": {"token": token}}],
        "contexts": [{"name": "tkcc", "context": {"cluster": "tkcc", "user": "tkcc", "namespace": namespace}}],
        "current-context": "tkcc",
    }
