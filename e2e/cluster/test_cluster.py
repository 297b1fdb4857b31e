"""The local cluster itself: what a pod can do in it, what faults it survives, and that nothing of it stays behind."""

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster import images, sandbox
from e2e.cluster.cluster import Cluster

NAME = "self-test"
CLIENT = """
import ssl, sys, urllib.error, urllib.request
account = "/var/run/secrets/kubernetes.io/serviceaccount/"
trust = ssl.create_default_context(cafile=account + "ca.crt")
def ask(path):
    headers = {"Authorization": "Bearer " + open(account + "token").read()}
    request = urllib.request.Request("https://10.96.0.1" + path, headers=headers)
    try:
        return urllib.request.urlopen(request, context=trust, timeout=5).status
    except urllib.error.HTTPError as refused:
        return refused.code
print(ask("/api/v1/namespaces/default/pods"), ask("/api/v1/namespaces/default/secrets"))
print(urllib.request.urlopen(f"http://{sys.argv[1]}/weights.txt", timeout=5).read().decode())
try:
    open("/models/new", "w")
except OSError as refused:
    print(refused.strerror)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    images.build_all()
    with Cluster(NAME) as running:
        yield running


def test_a_pod_uses_its_account_a_read_only_claim_and_a_service(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "weights.txt").write_text("some weights")
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o755)  # pods do not run as root
    server = ["python3", "-m", "http.server", "8000", "--directory", "/models"]
    _apply(cluster, *_weights(tmp_path), *_reader(), _pod("server", server), _service("server", 8000))
    cluster.kubectl("wait", "pod/server", "--for=condition=Ready", "--timeout=60s", deadline_s=70)

    address = cluster.service_ip("server")
    _apply(cluster, _pod("client", ["python3", "-c", CLIENT, address], serviceAccountName="reader"))
    cluster.kubectl("wait", "pod/client", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=60s", deadline_s=70)
    assert cluster.logs("client").splitlines() == ["200 403", "some weights", "Read-only file system"]

    with urllib.request.urlopen(cluster.door(address, 80) + "/weights.txt", timeout=5) as answer:
        assert answer.read() == b"some weights"
    assert "No module named 'torch'" in cluster.kubectl(
        "exec", "server", "--", "sh", "-c", "python3 -c 'import torch' 2>&1 || true"
    )


def test_a_killed_container_is_restarted(cluster: Cluster) -> None:
    for process in cluster.pod_processes("server"):
        if b"http.server" in Path(f"/proc/{process.pid}/cmdline").read_bytes():
            process.send(signal.SIGKILL)
    restarted = "--for=jsonpath={.status.containerStatuses[0].restartCount}=1"
    cluster.kubectl("wait", "pod/server", restarted, "--timeout=60s", deadline_s=70)
    cluster.kubectl("wait", "pod/server", "--for=condition=Ready", "--timeout=60s", deadline_s=70)


def test_pods_and_data_survive_the_api_server(cluster: Cluster) -> None:
    before = cluster.kubectl("get", "pod", "server", "-o", "jsonpath={.metadata.uid}")
    address = cluster.pod_ip("server")
    cluster.kill("kube-apiserver")
    with urllib.request.urlopen(cluster.door(address, 8000) + "/weights.txt", timeout=5) as answer:
        assert answer.read() == b"some weights"
    cluster.start("kube-apiserver")
    cluster.wait_ready()
    assert cluster.kubectl("get", "pod", "server", "-o", "jsonpath={.metadata.uid}") == before


@pytest.mark.full
def test_two_clusters_do_not_meet_and_neither_leaves_anything(cluster: Cluster) -> None:
    before = _traces("second")
    with Cluster("second") as second:
        assert second.kubectl("get", "pods", "-o", "name") == ""
        assert cluster.kubectl("get", "pod", "server", "-o", "name") == "pod/server\n"
    assert _traces("second") == before == []
    cluster.kubectl("delete", "pod", "client", "--now")  # needs the CNI state that is on a mount of its own


@pytest.mark.full
def test_a_cluster_that_was_killed_hard_starts_clean() -> None:
    name = "killed"
    with Cluster(name) as cluster:
        cluster.kubectl("create", "configmap", "old")
        for process in reversed(list(sandbox.marked(cluster.name))):
            process.send(signal.SIGKILL)
        subprocess.run(["rm", "-r", str(cluster.run_dir / "pids")], check=True)
        cluster.up(die_with_parent=True)
        assert "old" not in cluster.kubectl("get", "configmaps", "-o", "name")
    assert _traces(name) == []


def _traces(name: str) -> list[str]:
    """Whatever of a cluster a host can see: processes, mounts, cgroups, files."""
    cluster = Cluster(name)
    processes = [str(process.pid) for process in sandbox.marked(cluster.name)]
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(cluster.run_dir) in line]
    groups = [str(root) for root, _ in sandbox.host_cgroup_roots() if (root / cluster.name.cgroup).exists()]
    files = [str(cluster.run_dir)] if os.path.exists(cluster.run_dir) else []
    return processes + mounts + groups + files


def _apply(cluster: Cluster, *objects: dict[str, Any]) -> None:
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))


def _weights(directory: Path) -> list[dict[str, Any]]:
    size = {"storage": "1Gi"}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "weights"},
        "spec": {
            "capacity": size,
            "accessModes": ["ReadOnlyMany"],
            "storageClassName": "",
            "hostPath": {"path": str(directory), "type": "Directory"},
        },
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "weights"},
        "spec": {
            "accessModes": ["ReadOnlyMany"],
            "storageClassName": "",
            "volumeName": "weights",
            "resources": {"requests": size},
        },
    }
    return [volume, claim]


def _reader() -> list[dict[str, Any]]:
    """A ServiceAccount that may list pods and nothing else."""
    rbac = "rbac.authorization.k8s.io"
    meta = {"metadata": {"name": "reader"}}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", **meta},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "Role",
            **meta,
            "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}],
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            **meta,
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": "reader"},
            "subjects": [{"kind": "ServiceAccount", "name": "reader", "namespace": "default"}],
        },
    ]


def _pod(name: str, command: Sequence[str], **spec: Any) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": "main",
        "image": images.build_all()["operator"],
        "command": list(command),
        "volumeMounts": [{"name": "weights", "mountPath": "/models", "readOnly": True}],
    }
    if name == "server":
        container["readinessProbe"] = {"httpGet": {"path": "/", "port": 8000}, "periodSeconds": 1}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "restartPolicy": "Always" if name == "server" else "Never",
            "containers": [container],
            "volumes": [{"name": "weights", "persistentVolumeClaim": {"claimName": "weights", "readOnly": True}}],
            **spec,
        },
    }


def _service(name: str, target_port: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": {"app": name}, "ports": [{"port": 80, "targetPort": target_port}]},
    }
