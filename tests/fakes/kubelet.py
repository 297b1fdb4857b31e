"""Stands in for scheduler and kubelet where there is no node: gives serving pods an address and a FakePod behind it.

Deployments, ReplicaSets, pods and their deletion are the real controllers' work; this only says what a kubelet would
say about the pods they make, and lets a test say what engine runs in them.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable
from datetime import UTC, datetime

from tests.fakes.pod import BASELINE_DIGEST, FakePod
from tkcc.kube.cluster import Cluster
from tkcc.kube.errors import ClusterError, Conflict, NotFound
from tkcc.kube.resources import POD, JsonObject

_addresses = itertools.count(2)  # of this process: 127.10.0.2 and on


class FakeKubelet:
    """Use as an async context manager. `pods` are the running engines by pod name, `ever` all that have run."""

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        prepare: Callable[[str, FakePod], None] = lambda name, pod: None,
        poll_s: float = 0.1,
    ):
        self.pods: dict[str, FakePod] = {}
        self.ever: dict[str, FakePod] = {}
        self._cluster, self._namespace = cluster, namespace
        self._prepare = prepare  # called with the pod's name before its engine starts
        self._poll_s = poll_s
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "FakeKubelet":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._task
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        for pod in self.pods.values():
            await pod.stop()

    def of_role(self, role: str) -> list[FakePod]:
        return [pod for name, pod in self.pods.items() if f"-{role}-" in name]

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(ClusterError):  # the API server may be down on purpose
                await self._sync()
            await asyncio.sleep(self._poll_s)

    async def _sync(self) -> None:
        labels = {"app.kubernetes.io/component": "serving"}
        objects = {pod["metadata"]["name"]: pod for pod in await self._cluster.list(POD, self._namespace, labels)}
        for name in self.pods.keys() - objects.keys():
            await self.pods.pop(name).stop()
        for name, obj in objects.items():
            if name not in self.pods:
                await self._start(name, obj)
            is_ready = self.pods[name].is_ready
            if _says_ready(obj) != is_ready:
                await self._say(obj, self.pods[name], is_ready)

    async def _start(self, name: str, obj: JsonObject) -> None:
        number = next(_addresses)
        artifact = obj["metadata"]["annotations"]["tkcc.dev/artifact"]
        digest = BASELINE_DIGEST if artifact == "baseline" else artifact
        pod = FakePod(f"127.10.{number // 250}.{number % 250 + 2}", artifact_digest=digest)
        self._prepare(name, pod)
        self.pods[name] = self.ever[name] = await pod.start()

    async def _say(self, obj: JsonObject, pod: FakePod, is_ready: bool) -> None:
        now = datetime.fromtimestamp(time.time(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        value = "True" if is_ready else "False"
        types = {"PodScheduled": "True", "Initialized": "True", "ContainersReady": value, "Ready": value}
        status = {
            "phase": "Running",
            "podIP": pod.ip,
            "podIPs": [{"ip": pod.ip}],
            "startTime": now,
            "conditions": [
                {"type": type_, "status": is_so, "lastTransitionTime": now} for type_, is_so in types.items()
            ],
        }
        version, name = obj["metadata"]["resourceVersion"], obj["metadata"]["name"]
        with contextlib.suppress(NotFound, Conflict):  # looked at again in a moment
            await self._cluster.merge_status(POD, self._namespace, name, version, status, "fake-kubelet")


def _says_ready(obj: JsonObject) -> bool:
    conditions = obj.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
