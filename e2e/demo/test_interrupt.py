"""The demo broken off: whatever it was doing, nothing of it runs on, and it says so."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster import images
from e2e.cluster.cluster import Cluster
from e2e.cluster.names import ClusterName
from e2e.cluster.sandbox import marked, running
from e2e.demo.ground import CLUSTER_NAME

REPOSITORY = Path(__file__).parents[2]
OUT = REPOSITORY / "build" / "demo"


def _start(**environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "e2e.demo"],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _lines(process: "subprocess.Popen[str]", deadline_s: float) -> Iterator[str]:
    """Its output as it comes; a process that is silent for too long is ended, and with it the lines."""
    timer = threading.Timer(deadline_s, process.kill)
    timer.start()
    try:
        assert process.stdout
        while line := process.stdout.readline():
            yield line
    finally:
        timer.cancel()


@pytest.mark.parametrize("moment", ["start cluster demo ...", "kubectl apply"])
def test_an_interrupt_leaves_nothing_running(moment: str) -> None:
    with _start() as process:
        seen = []
        for line in _lines(process, 600):
            seen.append(line)
            if moment in line:
                process.send_signal(signal.SIGINT)
                break
        assert process.stdout
        rest = process.stdout.read()
        assert process.wait(120) == 130, "".join(seen[-20:]) + rest
    assert "nothing is left running" in rest and "Traceback" not in rest
    assert CLUSTER_NAME not in running()
    assert [one.pid for one in marked(ClusterName(CLUSTER_NAME))] == []


@pytest.mark.full
def test_a_given_cluster_is_used_and_goes_on_afterwards() -> None:
    built = images.build_all()
    with Cluster("given") as cluster:
        environment = {
            "TKCC_KUBECONFIG": str(cluster.kubeconfig),
            "TKCC_IMAGES": ",".join(f"{part}={reference}" for part, reference in built.items()),
            "TKCC_TORCH_PATH": sysconfig.get_path("purelib"),
        }
        with _start(**environment) as process:
            lines = list(_lines(process, 1500))
            assert process.wait(30) == 0, "".join(lines[-40:])
        assert not any("start cluster" in line for line in lines)
        assert json.loads((OUT / "report.json").read_text())["promoted"] is True
        assert "smollm2" in cluster.kubectl("get", "infdep", "-A")

        clean = [sys.executable, "-m", "e2e.demo", "--clean"]
        subprocess.run(clean, cwd=REPOSITORY, env={**os.environ, **environment}, timeout=300, check=True)
        assert cluster.kubectl("get", "infdep,pods,pv,pvc", "-A", "-o", "name").strip() == ""
        assert not OUT.exists()
