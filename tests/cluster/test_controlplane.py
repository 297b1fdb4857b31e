"""The control plane alone: faults that tests ask for, and nothing left when it or its owner ends."""

import subprocess
import sys
import time

import pytest

from e2e.cluster import flags, sandbox, toolchain
from e2e.cluster.controlplane import ControlPlane
from e2e.cluster.errors import ClusterError
from e2e.cluster.names import ClusterName

pytestmark = [
    pytest.mark.shell,
    pytest.mark.skipif(
        not toolchain.bin_dir().exists(),
        reason="Kubernetes is not built: run `python -m e2e.cluster build --programs-only`",
    ),
]


def test_data_and_url_survive_a_killed_and_a_restarted_api_server():
    with ControlPlane() as plane:
        url, name = plane.url, plane.name
        plane.kubectl("create", "configmap", "kept", "--from-literal=a=1")
        plane.kill_apiserver()
        with pytest.raises(ClusterError, match="refused"):
            plane.kubectl("get", "configmap", "kept")
        plane.start_apiserver()
        plane.restart_apiserver()
        assert plane.url == url
        assert plane.kubectl("get", "configmap", "kept", "-o", "jsonpath={.data.a}") == "1"

        created = [e for e in plane.audit_events() if e["verb"] == "create" and e["objectRef"]["name"] == "kept"]
        assert [(e["user"]["username"], e["responseStatus"]["code"]) for e in created] == [("admin", 201)]
    assert not list(sandbox.marked(name))
    assert not name.run_dir.exists()


def test_an_api_server_that_cannot_start_is_explained_by_its_log(monkeypatch):
    real = flags.apiserver
    monkeypatch.setattr(flags, "apiserver", lambda at: [*real(at), "--no-such-flag"])
    with pytest.raises(ClusterError, match="unknown flag: --no-such-flag"):
        ControlPlane("broken-test").start()
    assert not list(sandbox.marked(ClusterName("broken-test")))
    assert not ClusterName("broken-test").run_dir.exists()


def test_its_daemons_die_with_the_process_that_started_it():
    code = """
import os, signal
from e2e.cluster.controlplane import ControlPlane
plane = ControlPlane("orphan-test")
plane.start()
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], timeout=100, check=False)
    until = time.monotonic() + 10
    while (left := list(sandbox.marked(ClusterName("orphan-test")))) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left
    ControlPlane("orphan-test").stop()
    assert not ClusterName("orphan-test").run_dir.exists()
