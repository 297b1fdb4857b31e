"""What the daemons are told: who may reach them, and what the audit log may hold."""

import base64
from pathlib import Path

import pytest

from e2e.cluster import flags
from e2e.cluster.flags import ControlPlaneLayout

ALONE = ControlPlaneLayout(Path("/run/x"), Path("/bin"), api_port=1, etcd_port=2, etcd_peer_port=3)
WITH_NODE = ControlPlaneLayout(Path("/run/x"), Path("/bin"), 1, 2, 3, node_ip="10.250.0.10")


@pytest.mark.parametrize("argv", [flags.etcd(ALONE), flags.apiserver(ALONE), flags.controller_manager(ALONE)])
def test_a_control_plane_alone_listens_on_loopback_only(argv):
    binds = [word for word in argv if "--bind-address=" in word or "listen" in word or "advertise" in word]
    assert binds
    assert all("127.0.0.1" in word for word in binds)


def test_with_a_node_the_api_is_reachable_from_pods_and_authorizes_nodes():
    argv = flags.apiserver(WITH_NODE)
    assert "--bind-address=0.0.0.0" in argv
    assert "--advertise-address=10.250.0.10" in argv
    assert "--authorization-mode=Node,RBAC" in argv


def test_the_audit_log_holds_bodies_of_our_resources_and_of_no_secret():
    policy = flags.audit_policy()
    with_bodies = [rule for rule in policy["rules"] if rule["level"] in ("Request", "RequestResponse")]
    assert [rule["resources"] for rule in with_bodies] == [[{"group": "tkcc.dev"}]]
    assert policy["rules"][-1] == {"level": "Metadata"}  # everything is in it


def test_a_kubeconfig_stands_alone():
    config = flags.kubeconfig("https://127.0.0.1:1", b"CERT", "token", "ns")
    cluster = config["clusters"][0]["cluster"]
    assert base64.b64decode(cluster["certificate-authority-data"]) == b"CERT"
    assert config["users"][0]["user"] == {"token": "token"}
    assert config["contexts"][0]["context"]["namespace"] == "ns"
