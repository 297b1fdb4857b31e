"""What the shell does when the API server misbehaves in ways the real one cannot be made to show."""

import asyncio
from collections.abc import AsyncIterator, Iterable

import httpx
import pytest
from kmock import RawHandler, Request
from prometheus_client import generate_latest

from tests.conftest import refused
from tests.shell.conftest import SETTINGS
from tkcc.kube.cluster import Cluster
from tkcc.kube.errors import Conflict, Invalid, NotLeader, Unavailable
from tkcc.kube.resources import INFERENCE_DEPLOYMENT, JsonObject
from tkcc.shell.drive import Key
from tkcc.shell.lease import LeaseGate
from tkcc.shell.metrics import Metrics
from tkcc.shell.own import Own
from tkcc.shell.process import hands
from tkcc.shell.render.names import Owner
from tkcc.shell.turn import DeploymentTurns

DEPLOYMENT = {
    "apiVersion": INFERENCE_DEPLOYMENT.api_version,
    "kind": INFERENCE_DEPLOYMENT.kind,
    "metadata": {"namespace": "shop", "name": "llama", "uid": "u1", "generation": 1, "resourceVersion": "7"},
    "spec": {"model": {"uri": "pvc://weights/smol", "name": "smol"}},
}
OWNER = Owner.of(DEPLOYMENT)
WORKLOAD = ["services", "poddisruptionbudgets", "networkpolicies", "deployments"]
STATUS = "inferencedeployments/status"
ATTEMPTS = 3  # `faulty` tries each call so often


def stored(request: Request) -> JsonObject:
    return {**request.data, "metadata": {**request.data["metadata"], "uid": "u2", "resourceVersion": "8"}}


def healthy(kmock: RawHandler) -> None:
    """All that a fault declared before does not take: one InferenceDeployment and its weights, nothing made yet."""
    kmock["get tkcc.dev/v1alpha1/inferencedeployments"] << DEPLOYMENT
    kmock["get v1/persistentvolumeclaims"] << {"metadata": {}}
    kmock["list"] << {"metadata": {}, "items": []}
    kmock["get"] << refused(404, "NotFound")
    kmock["patch"] << stored
    kmock["post"] << stored


def conditions(requests: Iterable[Request], type_: str) -> list[JsonObject]:
    """This condition, in each status that was written or tried to be."""
    statuses = [r.data["status"] for r in requests if r.method == "PATCH" and r.subresource == "status"]
    return [told for status in statuses for told in status["conditions"] if told["type"] == type_]


def patched(requests: Iterable[Request]) -> list[str]:
    """What was written or tried to be, each once, in order."""
    calls = [f"{r.resource.plural}/{r.subresource or ''}".rstrip("/") for r in requests if r.method == "PATCH"]
    return list(dict.fromkeys(calls))


@pytest.fixture
async def turns(faulty: Cluster) -> AsyncIterator[DeploymentTurns]:
    async with httpx.AsyncClient(trust_env=False) as http:
        deployments, _ = hands(faulty, http, SETTINGS, Metrics(), lambda key: None)
        yield deployments
        await deployments.close()


@pytest.mark.parametrize(
    "case, failing, tried, degraded",
    [
        ("on a view with holes nothing is done, and it is told", "list v1/pods", [STATUS], ["True", "False"]),
        (
            "a write that fails is told, and nothing after it is done",
            "patch policy/v1/poddisruptionbudgets",
            [*WORKLOAD[:2], STATUS],
            ["True", "False"],
        ),
        (
            "a status that cannot be written waits for the next turn",
            "patch tkcc.dev/v1alpha1/inferencedeployments",
            [*WORKLOAD, STATUS],
            ["False"],
        ),
    ],
)
async def test_a_turn_that_meets_500s_ends_and_the_next_one_does_it_all(
    kmock: RawHandler, turns: DeploymentTurns, case, failing, tried, degraded
):
    kmock[failing][:ATTEMPTS] << refused(500, "InternalError", "etcd is on fire")
    healthy(kmock)
    with pytest.raises(Unavailable, match="etcd is on fire"):
        await turns.turn(Key("shop", "llama"))
    failed = len(kmock)
    assert patched(kmock) == tried
    await turns.turn(Key("shop", "llama"))
    assert patched(kmock[failed:]) == [*WORKLOAD, STATUS]
    told = conditions(kmock, "Degraded")
    assert list(dict.fromkeys(one["status"] for one in told)) == degraded
    assert all("etcd is on fire" in one["message"] for one in told if one["status"] == "True")


async def test_a_turn_that_meets_a_bug_of_ours_tells_it(
    kmock: RawHandler, turns: DeploymentTurns, monkeypatch: pytest.MonkeyPatch
):
    healthy(kmock)

    def buggy(*args: object) -> None:
        raise KeyError("it should never come to this")

    monkeypatch.setattr("tkcc.shell.turn.reconcile", buggy)
    with pytest.raises(KeyError):
        await turns.turn(Key("shop", "llama"))
    [told] = conditions(kmock, "Degraded")
    assert (told["status"], told["reason"]) == ("True", "OperatorError")
    assert told["message"] == "a turn failed: KeyError: 'it should never come to this'"
    monkeypatch.undo()
    await turns.turn(Key("shop", "llama"))
    assert conditions(kmock, "Degraded")[-1]["status"] == "False"


async def test_an_object_that_another_operator_looks_after_leaves_no_series(kmock: RawHandler, turns: DeploymentTurns):
    healthy(kmock)
    await turns.turn(Key("shop", "llama"))
    assert b'name="llama"' in generate_latest(turns._metrics.registry)
    await turns.forget(Key("shop", "llama"))
    assert b'name="llama"' not in generate_latest(turns._metrics.registry)


MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"namespace": "shop", "name": "a"}, "data": {"x": "1"}}


def owned_by(uid: str) -> JsonObject:
    owner = {"kind": INFERENCE_DEPLOYMENT.kind, "name": "other", "uid": uid, "controller": True}
    return {**MAP, "metadata": {**MAP["metadata"], "ownerReferences": [owner]}, "data": {"x": "stored"}}


@pytest.mark.parametrize(
    "case, found, want",
    [
        ("our own earlier try made it", owned_by("u1"), None),
        ("somebody else made theirs", owned_by("u9"), Invalid),
        ("it has gone again", refused(404, "NotFound"), Conflict),
    ],
)
async def test_a_create_that_was_forestalled(kmock: RawHandler, faulty: Cluster, case, found, want):
    kmock["get"][:1] << refused(404, "NotFound")
    kmock["post"] << refused(409, "AlreadyExists")
    kmock["get"][1:] << found
    creating = Own(faulty, OWNER).create_once(MAP)
    if want is None:
        assert await creating == found
    else:
        with pytest.raises(want):
            await creating
    assert [request.method for request in kmock] == ["GET", "POST", "GET"]


def lease_of(holder: str) -> JsonObject:
    when = "2026-01-02T03:04:05.000000Z"
    spec = {"holderIdentity": holder, "leaseDurationSeconds": 3, "acquireTime": when, "renewTime": when}
    return {"metadata": {"namespace": "tkcc-system", "name": "tkcc", "resourceVersion": "1"}, "spec": spec}


class Lease:
    """A LeaseGate of operator-0 that is being kept; `now` tells of its changes, and the door obeys it."""

    def __init__(self, cluster: Cluster):
        self.gate = LeaseGate(cluster, "tkcc-system", "tkcc", "operator-0", duration_s=3)
        self.door = cluster.gated(lambda: self.gate.is_held)
        self.changes: asyncio.Queue[bool] = asyncio.Queue()

    async def __aenter__(self) -> "Lease":
        self._task = asyncio.create_task(self.gate.keep(self.changes.put_nowait))
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def change(self) -> bool:
        async with asyncio.timeout(10):
            return await self.changes.get()


async def test_a_lease_is_lost_while_answers_come_too_late_to_renew_it(kmock: RawHandler, faulty: Cluster):
    in_time = asyncio.Event()

    async def late() -> JsonObject:
        await in_time.wait()
        return lease_of("operator-0")

    kmock["get"][:1] << refused(404, "NotFound")
    kmock["get"][1:] << late
    kmock["post coordination.k8s.io/v1/leases"] << stored
    kmock["put"] << stored
    async with Lease(faulty) as lease:
        assert await lease.change() is True
        assert await lease.change() is False
        with pytest.raises(NotLeader):
            await lease.door.create(MAP, "tkcc/workload")
        in_time.set()
        assert await lease.change() is True


async def test_a_lease_that_another_created_first_is_not_ours(kmock: RawHandler, faulty: Cluster):
    looked_again = asyncio.Event()
    kmock["get"][:1] << refused(404, "NotFound")
    kmock["post"] << refused(409, "AlreadyExists")
    kmock["get"][1:] >> looked_again << lease_of("operator-1")
    async with Lease(faulty) as lease:
        async with asyncio.timeout(10):
            await looked_again.wait()
        assert not lease.gate.is_held and lease.changes.empty()
        with pytest.raises(NotLeader):
            await lease.door.create(MAP, "tkcc/workload")
    assert "PUT" not in {request.method for request in kmock}
