"""A RecompilationRun on the real API server: what it is given, what its worker may do, what is left of it."""

import asyncio
import base64
import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import connected
from tests.fakes.manifest import WORKLOAD, manifest
from tests.shell.conftest import QUICK, Traffic, World
from tkcc.api.candidate import candidate_digest
from tkcc.api.codec import from_dict, from_json, to_json
from tkcc.api.fields import BASELINE
from tkcc.api.run import RunOutcome, RunResult, RunSpec, Trigger
from tkcc.api.spec import ModelSpec
from tkcc.api.status import Phase
from tkcc.api.workload import Recording, Workload
from tkcc.kube.cluster import WORKER, Cluster
from tkcc.kube.errors import Conflict, Forbidden, Invalid
from tkcc.kube.resources import (
    CONFIG_MAP,
    DEPLOYMENT,
    INFERENCE_DEPLOYMENT,
    JOB,
    NETWORK_POLICY,
    RECOMPILATION_RUN,
    ROLE,
    ROLE_BINDING,
    SECRET,
    SERVICE,
    SERVICE_ACCOUNT,
    JsonObject,
    Kind,
)
from tkcc.shell.render.names import Owner, artifact_name
from tkcc.shell.render.run import recompilation_run

pytestmark = pytest.mark.shell

SPEC: dict[str, Any] = {**QUICK, "replicas": 2, "traffic": {"recording": {"enabled": True}}}
ONE_RUN = {"runHistoryLimit": 1}
RUN_SPEC = RunSpec(
    deployment="llama",
    workload=WORKLOAD,
    workload_digest=WORKLOAD.digest,
    incumbent=BASELINE,
    trigger=Trigger.TOKEN,
    model=ModelSpec(uri="pvc://weights/smol", name="smol"),
)
ENDED = {"type": "Succeeded", "status": "False", "reason": "NoImprovement", "message": "", "observedGeneration": 1}
SOURCE = "def build(spec, weights, cells):\n    return None\n"


@pytest.fixture
async def run(world: World, kubelet) -> JsonObject:
    """A run that was asked for by its trigger token, with its workers made and traffic recorded."""
    kubelet._prepare = lambda name, pod: setattr(pod, "is_recording", True)
    await world.apply(**SPEC)
    await world.until(lambda status: status.ready_replicas == 2)
    async with Traffic(world.admin, world.namespace, kubelet, prompt=100, cached=32):
        await world.until(lambda status: bool(status.drift.plans))
        await world.apply(**SPEC, recompilation={"triggerToken": "now"})
        status = await world.until(lambda status: status.phase is Phase.RECOMPILING)
        await world.turn()
    found = await world.admin.get(RECOMPILATION_RUN, world.namespace, status.recompilation.active_run)
    assert found
    return found


def owned_by_run(name: str) -> list[tuple[Kind, str]]:
    return [
        (SECRET, f"{name}-token"),
        (SERVICE_ACCOUNT, name),
        (ROLE, name),
        (ROLE_BINDING, name),
        (JOB, name),
        *((kind, f"{name}-{tier}") for kind in (DEPLOYMENT, SERVICE) for tier in ("fast", "slow")),
        (NETWORK_POLICY, f"{name}-tier"),
        (NETWORK_POLICY, f"{name}-worker"),
    ]


async def data_of(world: World, name: str) -> dict[str, str]:
    have = await world.admin.get(CONFIG_MAP, world.namespace, name)
    assert have, name
    return {**have.get("data", {}), **have.get("binaryData", {})}


def result(outcome: RunOutcome, artifact: str = "") -> str:
    return to_json(RunResult(outcome=outcome, message="as the test says", artifact=artifact, gain_milli=200))


async def until_gone(world: World, things: list[tuple[Kind, str]], step: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while True:
            await step()
            left = [name for kind, name in things if await world.admin.get(kind, world.namespace, name)]
            if not left:
                return
            await asyncio.sleep(0.2)


async def test_a_run_gets_what_it_needs_owned_by_it_and_is_owned_itself(world: World, run: JsonObject):
    name = run["metadata"]["name"]
    assert run["metadata"]["ownerReferences"][0]["name"] == "llama"
    for kind, child in [*owned_by_run(name), (CONFIG_MAP, f"{name}-traffic"), (CONFIG_MAP, f"{name}-result")]:
        have = await world.admin.get(kind, world.namespace, child)
        assert have, f"{kind.kind} {child}"
        assert have["metadata"]["ownerReferences"][0]["uid"] == run["metadata"]["uid"]
    patch = {"spec": {"budget": {"maxDuration": "9h"}}}
    with pytest.raises(Invalid, match="cannot change"):
        await world.admin.merge(RECOMPILATION_RUN, world.namespace, name, patch, "kubectl")
    again = {key: await world.admin.get(key[0], world.namespace, key[1]) for key in owned_by_run(name)}
    await world.turn()
    world.restart()
    await world.turn()
    for (kind, child), before in again.items():
        have = await world.admin.get(kind, world.namespace, child)
        assert have and before and have["metadata"]["uid"] == before["metadata"]["uid"]
        assert have.get("data") == before.get("data"), "a token is made once"


async def test_the_job_is_told_where_its_tiers_are_and_what_was_served(world: World, run: JsonObject, kubelet):
    name = run["metadata"]["name"]
    data = await data_of(world, f"{name}-traffic")
    order = json.loads(data["run.json"])
    fast = await world.admin.get(SERVICE, world.namespace, f"{name}-fast")
    assert fast and order["tiers"]["fast"] == f"http://{fast['spec']['clusterIP']}:8090"
    assert order["spec"] == run["spec"]
    recording = from_json(Recording, gzip.decompress(base64.b64decode(data["recording.json.gz"])))
    assert recording.source == "recorded"
    # It is what this test's users sent to this test's pod, and is in no file.
    assert {(request.prompt_tokens, request.cached_tokens) for request in recording.requests} == {(100, 32)}
    served = sorted(item["at"] for pod in kubelet.pods.values() for item in pod.recorded)
    found = [recording.started_at_ms + request.arrival_ms for request in recording.requests]
    assert len(found) > 20 and found == served[served.index(found[0]) :][: len(found)]
    assert from_json(Workload, data["workload.json"]).prompt_tokens.mean == 100


async def test_a_worker_can_write_its_own_result_and_status_and_nothing_else(plane, world: World, run: JsonObject):
    name, namespace = run["metadata"]["name"], world.namespace
    async with connected(plane.service_account_kubeconfig(namespace, name)) as worker:
        await worker.merge(CONFIG_MAP, namespace, f"{name}-result", {"data": {"journal.jsonl": "{}"}}, WORKER)
        assert await worker.get(CONFIG_MAP, namespace, f"{name}-result")
        kind = RECOMPILATION_RUN
        body = {
            "apiVersion": kind.api_version,
            "kind": kind.kind,
            "metadata": {"namespace": namespace, "name": name},
            "status": {"tier": "fast", "candidates": {"evaluated": 3, "accepted": 1, "refused": 2}},
        }
        await worker.apply_status(body, WORKER)
        for forbidden in (
            worker.get(CONFIG_MAP, namespace, f"{name}-traffic"),
            worker.get(SECRET, namespace, f"{name}-token"),
            worker.list(CONFIG_MAP, namespace),
            worker.merge(CONFIG_MAP, namespace, f"{name}-traffic", {"data": {}}, WORKER),
            worker.merge(RECOMPILATION_RUN, namespace, name, {"spec": {}}, WORKER),
            worker.get(RECOMPILATION_RUN, namespace, name),
            worker.delete(JOB, namespace, name),
        ):
            with pytest.raises(Forbidden):
                await forbidden
    await world.turn()  # the operator's write keeps the worker's part
    have = await world.admin.get(RECOMPILATION_RUN, namespace, name)
    assert have and have["status"]["candidates"]["evaluated"] == 3 and have["status"]["tier"] == "fast"


async def test_a_found_artifact_is_made_immutable_goes_into_service_and_the_run_is_torn_down(
    world: World, run: JsonObject, kubelet
):
    name, namespace = run["metadata"]["name"], world.namespace
    digest = candidate_digest(SOURCE, {})
    accepted = manifest(digest, from_dict(Workload, run["spec"]["workload"]), verdict="Pass", gain_milli=200)
    files = {
        "candidate.py": SOURCE,
        "manifest.json": to_json(accepted),
        "report.json": "{}",
        "result.json": result(RunOutcome.SEARCH_SUCCEEDED, digest),
    }
    await world.admin.merge(CONFIG_MAP, namespace, f"{name}-result", {"data": files}, WORKER)
    async with Traffic(world.admin, namespace, kubelet, prompt=100):
        status = await world.until(lambda status: status.stable.artifact == digest and status.phase is Phase.SERVING)
    assert (status.stable.run, status.stable.speedup) == (name, "1.25x")
    artifact = await world.admin.get(CONFIG_MAP, namespace, f"tkcc-artifact-{digest[:16]}")
    assert artifact and artifact["immutable"] and artifact["data"]["candidate.py"] == SOURCE
    assert artifact["metadata"]["ownerReferences"][0]["name"] == "llama"
    assert b'tkcc_recompilation_runs_total{name="llama"' in _page(world)
    await until_gone(world, owned_by_run(name), world.turn)
    await world.admin.delete(CONFIG_MAP, namespace, artifact_name(digest))
    await world.turn()
    again = await world.admin.get(CONFIG_MAP, namespace, artifact_name(digest))
    assert again and again["data"] == artifact["data"], "pods that start anew need it"
    assert await data_of(world, f"{name}-traffic") and await data_of(world, f"{name}-result")
    assert await world.runs.turn(world.key(name)) is None, "an ended run needs no more turns"


async def test_a_result_that_is_not_what_it_claims_makes_no_artifact(world: World, run: JsonObject):
    name, namespace = run["metadata"]["name"], world.namespace
    claimed = candidate_digest(SOURCE, {})
    files = {
        "candidate.py": SOURCE + "import os\n",
        "manifest.json": to_json(manifest(claimed)),
        "result.json": result(RunOutcome.SEARCH_SUCCEEDED, claimed),
    }
    await world.admin.merge(CONFIG_MAP, namespace, f"{name}-result", {"data": files}, WORKER)
    status = await world.until(lambda status: status.phase is Phase.SERVING)
    assert status.recompilation.last_outcome == "Failed"
    assert await world.admin.get(CONFIG_MAP, namespace, f"tkcc-artifact-{claimed[:16]}") is None


async def test_a_run_without_a_gain_ends_and_says_so(world: World, run: JsonObject):
    name, namespace = run["metadata"]["name"], world.namespace
    patch = {"data": {"result.json": result(RunOutcome.NO_IMPROVEMENT)}}
    await world.admin.merge(CONFIG_MAP, namespace, f"{name}-result", patch, WORKER)
    status = await world.until(lambda status: status.phase is Phase.SERVING)
    assert status.recompilation.last_outcome == "NoImprovement"
    have = await world.admin.get(RECOMPILATION_RUN, namespace, name)
    assert have
    [end] = [c for c in have["status"]["conditions"] if c["type"] == "Succeeded"]
    assert (end["status"], end["reason"]) == ("False", "NoImprovement")


async def test_a_crash_between_run_and_traffic_is_made_good(world: World, run: JsonObject):
    name, namespace = run["metadata"]["name"], world.namespace
    for kind, child in ((CONFIG_MAP, f"{name}-traffic"), (JOB, name)):  # as if the operator had died before them
        await world.admin.delete(kind, namespace, child)
    world.restart()

    async def missing() -> bool:
        await world.turn()
        things = ((CONFIG_MAP, f"{name}-traffic"), (JOB, name))
        return not all([await world.admin.get(kind, namespace, child) for kind, child in things])

    async with asyncio.timeout(20):
        while await missing():
            await asyncio.sleep(0.2)
    assert {"run.json", "workload.json", "recording.json.gz"} <= (await data_of(world, f"{name}-traffic")).keys()


async def test_traffic_that_goes_with_its_run_is_not_made_anew_by_a_turn_under_way(
    world: World, run: JsonObject, monkeypatch: pytest.MonkeyPatch
):
    name, traffic = run["metadata"]["name"], f"{run['metadata']['name']}-traffic"
    await world.admin.delete(JOB, world.namespace, name)  # a turn makes it again, and looks after what comes before it
    await world.admin.delete(SERVICE, world.namespace, f"{name}-slow")
    create_once = Cluster.create_once

    async def collect_garbage_too(self: Cluster, obj: JsonObject, manager: str) -> JsonObject:
        made = await create_once(self, obj, manager)
        if obj["kind"] == SERVICE.kind:
            await world.admin.delete(CONFIG_MAP, world.namespace, traffic)
        return made

    monkeypatch.setattr(Cluster, "create_once", collect_garbage_too)
    with pytest.raises(Conflict):
        await world.turn()
    assert await world.admin.get(CONFIG_MAP, world.namespace, traffic) is None


async def test_deleting_the_deployment_takes_the_run_and_all_of_it(world: World, run: JsonObject):
    name = run["metadata"]["name"]
    await world.admin.delete(INFERENCE_DEPLOYMENT, world.namespace, "llama")  # no operator runs: nothing may block

    async def nothing() -> None:
        pass

    everything = [*owned_by_run(name), (RECOMPILATION_RUN, name), (CONFIG_MAP, f"{name}-traffic"), (SERVICE, "llama")]
    await until_gone(world, everything, nothing)


async def test_what_is_beyond_its_limit_goes(world: World):
    """Finished runs and artifacts that nothing refers to; the newest stay, and so does what others own."""
    obj = await world.apply(
        replicas=2, **{**QUICK, "rollout": {**QUICK["rollout"], "revisionHistoryLimit": 1}}, recompilation=ONE_RUN
    )
    reference = Owner.of(obj).reference
    owned = [await world.artifact(f"x = {i}\n", owner=reference) for i in range(2)]
    foreign = await world.artifact("y = 1\n")
    names = [f"llama-{i}" for i in range(2)]
    for name in names:
        made = recompilation_run(Owner.of(obj), name, RUN_SPEC)
        made = await world.admin.create(made, "test")
        ended = {"conditions": [{**ENDED, "lastTransitionTime": "2026-01-01T00:00:00Z"}]}
        version = made["metadata"]["resourceVersion"]
        await world.admin.merge_status(RECOMPILATION_RUN, world.namespace, name, version, ended, WORKER)
    await world.until(lambda status: bool(status.conditions))
    await world.turn()
    runs = await world.admin.list(RECOMPILATION_RUN, world.namespace)
    assert len(runs) == 1
    maps = {have["metadata"]["name"] for have in await world.admin.list(CONFIG_MAP, world.namespace)}
    assert len(maps & {artifact_name(digest) for digest in owned}) == 1
    assert artifact_name(foreign) in maps


def _page(world: World) -> bytes:
    from prometheus_client import generate_latest

    return generate_latest(world.metrics.registry)
