"""Where the stories take place: one cluster with the chart, small random models, and the faults done to them."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import RLock
from typing import TypeVar

from e2e.cluster import debian, images, toolchain
from e2e.cluster.cluster import Cluster
from e2e.cluster.errors import ClusterError
from e2e.cluster.sandbox import running
from e2e.demo.ground import Ground, image_values
from e2e.demo.setting import CHART, SYSTEM_NAMESPACE
from e2e.stories.api import Api, ApiAway
from tkcc.kube.resources import POD

CLUSTER_NAME = "stories"
KEEP = "TKCC_KEEP_STAGE"
REPOSITORY = Path(__file__).parents[2]
OUT = REPOSITORY / "build" / "stories"
LOOK_EVERY_S = 0.25
OPERATOR_LABELS = {"app.kubernetes.io/name": "tkcc-operator"}
SETTINGS = {"tickS": 1, "drain": {"acceptS": 3, "finishS": 20}}

T = TypeVar("T")


class Stage:
    """Used by several stories at once. A story that kills what others stand on, or that must not be disturbed, holds
    `undisturbed` meanwhile."""

    def __init__(self, cluster: Cluster, ground: Ground, models: Path) -> None:
        self.cluster, self.ground, self.models = cluster, ground, models
        self.api = Api(cluster.kubeconfig)
        self.undisturbed = RLock()
        self.granted: frozenset[tuple[str, str]] = frozenset()  # to the operator: (verb, GROUP/RESOURCE)
        self.at_end = ExitStack()
        self.at_end.callback(self.api.close)

    # Waiting

    def until(
        self, what: str, holds: Callable[[], T | None], deadline_s: float, explain: Callable[[], str] = lambda: ""
    ) -> T:
        """What `holds` returns once it is true. An API server that is away is waited for too."""
        until_s = time.monotonic() + deadline_s
        while True:
            try:
                found = holds()
                if found:
                    return found
            except ApiAway:
                pass
            if time.monotonic() >= until_s:
                raise AssertionError(f"not within {deadline_s:.0f} s: {what}\n{explain()}\n{self.operator_log(40)}")
            time.sleep(LOOK_EVERY_S)

    # The operator

    def install(self) -> None:
        values = image_values(self.ground)
        values["settings"] |= SETTINGS
        path = OUT / "values.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
        self.ground.helm(
            *("upgrade", "--install", "tkcc", str(CHART), "--namespace", SYSTEM_NAMESPACE, "--create-namespace"),
            *("--values", str(path), "--wait", "--timeout", "180s"),
            deadline_s=200,
        )
        self.read_grants()

    def read_grants(self) -> None:
        """What the chart lets the operator do; read while it is installed."""
        rules = []
        for kind in ("clusterrole", "role"):
            words = ("get", kind, "-n", SYSTEM_NAMESPACE, "-l", "app.kubernetes.io/instance=tkcc", "-o", "json")
            rules += [rule for role in json.loads(self.ground.kubectl(*words))["items"] for rule in role["rules"]]
        self.granted = frozenset(
            (verb, f"{group}/{resource}".lstrip("/"))
            for rule in rules
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        )

    def operator_pod(self) -> str:
        pods = self.api.list(POD, SYSTEM_NAMESPACE, **OPERATOR_LABELS)
        names: list[str] = [pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        assert len(names) == 1, f"operator pods: {names}"
        return names[0]

    def kill_operator(self) -> None:
        """SIGKILL; back when another one is ready. Its pod goes too: kubelet would wait longer before each start."""
        with self.undisturbed:
            pod = self.operator_pod()
            for process in self.cluster.pod_processes(pod, SYSTEM_NAMESPACE):
                if b"kopf" in Path(f"/proc/{process.pid}/cmdline").read_bytes():
                    process.end()
            self.ground.kubectl("-n", SYSTEM_NAMESPACE, "delete", "pod", pod, "--now")
            self.until("the operator is back", self._is_ready, 120)

    @contextmanager
    def without_operator(self) -> Iterator[None]:
        """Scaled to nothing inside the block; ready again behind it."""
        with self.undisturbed:
            self._scale_operator(0)
            self.until("the operator is gone", lambda: not self._operator_pods(), 90)
            try:
                yield
            finally:
                self._scale_operator(1)
                self.until("the operator is back", self._is_ready, 120)

    def operator_log(self, lines: int) -> str:
        try:
            said = self.ground.kubectl(
                "logs", "-n", SYSTEM_NAMESPACE, "-l", "app.kubernetes.io/name=tkcc-operator", f"--tail={lines}"
            )
        except ClusterError as err:
            said = str(err)
        return f"--- operator's log\n{said}"

    def _scale_operator(self, replicas: int) -> None:
        self.ground.kubectl("-n", SYSTEM_NAMESPACE, "scale", "deployment/tkcc-operator", f"--replicas={replicas}")

    def _operator_pods(self) -> list[dict]:  # type: ignore[type-arg]
        return self.api.list(POD, SYSTEM_NAMESPACE, **OPERATOR_LABELS)

    def operator_restarts(self) -> int:
        return sum(
            status["restartCount"] for pod in self._operator_pods() for status in pod["status"]["containerStatuses"]
        )

    def _is_ready(self) -> bool:
        return any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for pod in self._operator_pods()
            for condition in pod["status"].get("conditions", [])
        )

    # Models

    def model(self, name: str, *words: str) -> Path:
        """A random model's directory under `models`, made on first use; `words` are those of `tkcc model init`."""
        path = self.models / name
        if not path.exists():
            argv = [sys.executable, "-m", "tkcc", "model", "init", "--out", str(path), *words]
            subprocess.run(argv, check=True, timeout=120, capture_output=True)
        return path


@contextmanager
def stage() -> Iterator[Stage]:
    """The cluster is up, the operator ready, the model `tiny` there; all but the logs goes with the block.

    With KEEP in the environment the cluster stays afterwards, and a next session uses it as it is: for whoever works on
    a story. Each story needs its namespace gone.
    """
    debian.install()
    toolchain.build()
    keep = KEEP in os.environ
    cluster = Cluster(f"{CLUSTER_NAME}-kept" if keep else CLUSTER_NAME)
    if keep and str(cluster.name) in running():
        made = _staged(cluster.attach(), {})
        with made.at_end:
            yield made
        return
    shutil.rmtree(OUT, ignore_errors=True)
    built = images.build_all()
    cluster.up(die_with_parent=not keep)
    try:
        made = _staged(cluster, built)
        with made.at_end:
            made.install()
            yield made
    finally:
        cluster.keep_logs(OUT / "logs")
        if not keep:
            cluster.down()


def _staged(cluster: Cluster, built: Mapping[str, str]) -> Stage:
    made = Stage(cluster, Ground(cluster.kubeconfig, built, sysconfig.get_paths()["purelib"]), OUT / "models")
    made.model("tiny")
    return made
