"""The operator's turns without kopf, on the real API server: a test runs them one by one and looks at the cluster."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import connected
from tests.fakes.kubelet import FakeKubelet
from tests.fakes.manifest import manifest
from tkcc.api.candidate import candidate_digest
from tkcc.api.codec import from_dict, to_json
from tkcc.api.condition import Condition, find_condition
from tkcc.api.spec import Spec
from tkcc.api.status import Status
from tkcc.kube.cluster import Cluster
from tkcc.kube.errors import ClusterError, Conflict
from tkcc.kube.resources import CONFIG_MAP, INFERENCE_DEPLOYMENT, POD, RECOMPILATION_RUN, JsonObject
from tkcc.shell.drive import Key
from tkcc.shell.metrics import Metrics
from tkcc.shell.process import hands
from tkcc.shell.render.names import MANAGED_BY
from tkcc.shell.settings import Images, Settings

SETTINGS = Settings(images=Images(engine="engine:1", worker="worker:1"))
QUICK = {
    "drift": {"tick": "1s", "windows": {"long": "2s", "short": "1s"}, "ticks": 2, "minRequests": 5, "cacheFill": "0s"},
    "rollout": {
        "analysis": {"interval": "1s", "minRequests": 5},
        "warmupTimeout": "30s",
        "stepDeadline": "60s",
        "progressDeadline": "120s",
    },
}


class World:
    """One namespace, the operator's hands, and a user who changes specs."""

    def __init__(self, admin: Cluster, cluster: Cluster, namespace: str, http: httpx.AsyncClient):
        self.admin, self.cluster, self.namespace, self._http = admin, cluster, namespace, http
        self.restart()

    def restart(self) -> None:
        """As if the operator had been killed and started again: nothing in memory is left."""
        self.metrics = Metrics()
        self.deployments, self.runs = hands(self.cluster, self._http, SETTINGS, self.metrics, lambda key: None)

    def key(self, name: str) -> Key:
        return Key(self.namespace, name)

    async def apply(self, name: str = "llama", **spec: Any) -> JsonObject:
        """What `kubectl apply` does."""
        model = {"uri": "pvc://weights/smol", "name": "smol"}
        kind, meta = INFERENCE_DEPLOYMENT, {"namespace": self.namespace, "name": name}
        obj = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": meta, "spec": {"model": model, **spec}}
        return await self.admin.apply(obj, "kubectl")

    async def turn(self, name: str = "llama") -> float | None:
        """One turn of it, and one of each of its runs."""
        due_s = await self.deployments.turn(self.key(name))
        for run in await self.admin.list(RECOMPILATION_RUN, self.namespace):
            await self.runs.turn(self.key(run["metadata"]["name"]))
        return due_s

    async def until(self, is_done: Callable[[Status], bool], name: str = "llama", deadline_s: float = 25) -> Status:
        """Turns until the status is as wanted. Conflicts are the controllers' and the next turn's business."""
        status = Status()
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    with contextlib.suppress(Conflict):
                        await self.turn(name)
                    status = await self.status(name)
                    if is_done(status):
                        return status
                    await asyncio.sleep(0.1)
        except TimeoutError:
            told = "\n".join(f"{c.type} {c.status} {c.reason}: {c.message}" for c in status.conditions)
            raise AssertionError(f"not within {deadline_s} s; {status.phase}, {status.rollout}\n{told}") from None

    async def get(self, name: str = "llama") -> JsonObject:
        obj = await self.admin.get(INFERENCE_DEPLOYMENT, self.namespace, name)
        assert obj
        return obj

    async def status(self, name: str = "llama") -> Status:
        return from_dict(Status, (await self.get(name)).get("status") or {})

    async def condition(self, type_: str, name: str = "llama") -> Condition:
        found = find_condition((await self.status(name)).conditions, type_)
        assert found, f"no condition {type_}"
        return found

    async def artifact(self, source: str, owner: JsonObject | None = None) -> str:
        """A hand-made artifact ConfigMap; its digest. One with an owner is labelled as the operator labels it."""
        digest = candidate_digest(source, {})
        dtype = from_dict(Spec, {"model": {"uri": "pvc://w/x", "name": "n"}}).engine.dtype
        text = to_json(manifest(digest, dtype=dtype))
        meta: JsonObject = {"namespace": self.namespace, "name": f"tkcc-artifact-{digest[:16]}"}
        if owner:
            meta |= {"ownerReferences": [owner], "labels": {**MANAGED_BY, "app.kubernetes.io/component": "artifact"}}
        obj = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": meta,
            "immutable": True,
            "data": {"manifest.json": text, "candidate.py": source, "report.json": "{}"},
        }
        await self.admin.apply(obj, "kubectl")
        return digest


class Traffic:
    """Users of the Service: each request goes to one of the ready pods that carry the serving label, in turn."""

    def __init__(self, admin: Cluster, namespace: str, kubelet: FakeKubelet, **request: Any):
        self.admin, self.namespace, self.kubelet, self.request = admin, namespace, kubelet, request
        self.sent: dict[str, int] = {}

    async def __aenter__(self) -> "Traffic":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        turn, names = 0, list[str]()
        while True:
            labels = {"tkcc.dev/serving": "true"}
            with contextlib.suppress(ClusterError):  # serving does not need the API server, and may go on without it
                names = sorted(pod["metadata"]["name"] for pod in await self.admin.list(POD, self.namespace, labels))
            serving = [name for name in names if name in self.kubelet.pods and self.kubelet.pods[name].is_ready]
            for _ in range(12 if serving else 0):
                name = serving[turn % len(serving)]
                self.kubelet.pods[name].serve_requests(1, **self.request)
                self.sent[name] = self.sent.get(name, 0) + 1
                turn += 1
            await asyncio.sleep(0.1)


@pytest.fixture
async def world(plane: Any, operator_kubeconfig: Path, namespace: str) -> AsyncIterator[World]:
    async with (
        connected(plane.kubeconfig) as admin,
        connected(operator_kubeconfig) as cluster,
        httpx.AsyncClient(trust_env=False) as http,
    ):
        made = World(admin, cluster, namespace, http)
        yield made
        await made.deployments.close()


@pytest.fixture
async def kubelet(world: World) -> AsyncIterator[FakeKubelet]:
    async with FakeKubelet(world.admin, world.namespace) as running:
        yield running


async def versions(world: World) -> dict[str, str]:
    """resourceVersion of every object of ours but pods, ReplicaSets and samples, by kind and name."""
    from tkcc.kube import resources

    found = {}
    for kind in resources.ALL:
        if kind in (resources.EVENT, resources.LEASE, POD):
            continue
        for obj in await world.admin.list(kind, world.namespace):
            name = obj["metadata"]["name"]
            if not (kind is CONFIG_MAP and name.endswith("-observations")):
                found[f"{kind.kind} {name}"] = obj["metadata"]["resourceVersion"]
    return found
