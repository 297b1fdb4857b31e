"""Turns on the real API server: what appears, what stays as it is, and what a user is told when it cannot be."""

import asyncio

import pytest

from tests.shell.conftest import QUICK, Traffic, World, versions
from tkcc.api.condition import ConditionType
from tkcc.api.status import Phase
from tkcc.kube.errors import ClusterError, Conflict, Invalid
from tkcc.kube.resources import (
    CONFIG_MAP,
    DEPLOYMENT,
    EVENT,
    INFERENCE_DEPLOYMENT,
    NETWORK_POLICY,
    POD,
    POD_DISRUPTION_BUDGET,
    SERVICE,
    JsonObject,
)

pytestmark = pytest.mark.shell


async def test_what_is_asked_for_appears_owned_by_who_asked(world: World):
    obj = await world.apply(replicas=1)
    await world.turn()
    for kind, name in (
        (SERVICE, "llama"),
        (DEPLOYMENT, "llama-stable"),
        (POD_DISRUPTION_BUDGET, "llama"),
        (NETWORK_POLICY, "llama-serving"),
    ):
        have = await world.admin.get(kind, world.namespace, name)
        assert have, f"{kind.kind} {name}"
        [owner] = have["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (obj["metadata"]["uid"], True)
        assert have["metadata"]["managedFields"][0]["manager"] == "tkcc/workload"
    assert await world.admin.get(DEPLOYMENT, world.namespace, "llama-canary") is None


async def test_every_known_condition_is_set_at_first_sight(world: World):
    await world.apply()
    await world.turn()
    status = await world.status()
    assert {condition.type for condition in status.conditions} == set(ConditionType)
    assert {c.observed_generation for c in status.conditions} == {1}
    assert not (await world.get())["metadata"].get("finalizers")
    assert "annotations" not in (await world.get())["metadata"]


async def test_another_turn_writes_nothing_and_so_does_a_restarted_operator(world: World):
    await world.apply(replicas=1)
    await world.turn()
    await asyncio.sleep(0.5)  # the controllers answer
    await world.turn()
    before = await versions(world)
    await world.turn()
    world.restart()
    await world.turn()
    assert await versions(world) == before


async def test_pods_that_serve_are_seen_and_measured(world: World, kubelet):
    await world.apply(replicas=2, **QUICK)
    status = await world.until(lambda status: status.ready_replicas == 2)
    assert status.stable.digest == kubelet.of_role("stable")[0].artifact_digest
    async with Traffic(world.admin, world.namespace, kubelet, prompt=100, cached=40):
        status = await world.until(lambda status: bool(status.drift.plans))
    assert status.drift.plans[0].prompt_tokens == 100
    assert status.drift.plans[0].hit_ratio_milli == 400
    assert (await world.condition("MetricsAvailable")).reason == "MetricsFound"


async def test_samples_outlive_the_operator(world: World, kubelet):
    await world.apply(replicas=1, **QUICK)
    async with Traffic(world.admin, world.namespace, kubelet, prompt=100):
        await world.until(lambda status: bool(status.drift.plans))
    have = await world.admin.get(CONFIG_MAP, world.namespace, "llama-observations")
    assert have and have["metadata"]["ownerReferences"][0]["name"] == "llama"
    world.restart()
    for pod in kubelet.pods.values():  # no new page can be read: what is known comes from the checkpoint alone
        pod.is_broken = True
    await world.turn()
    _, memory = world.deployments._memories[world.key("llama")]
    assert memory.samples


async def test_metrics_that_cannot_be_read_are_said_and_nothing_else_happens(world: World, kubelet):
    await world.apply(replicas=1, **QUICK)
    await world.until(lambda status: status.ready_replicas == 1)
    [pod] = kubelet.pods.values()
    pod.is_broken = True
    await asyncio.sleep(3.5)
    await world.turn()
    told = await world.condition("MetricsAvailable")
    assert told.status == "False" and "500" in told.message
    assert (await world.status()).phase is Phase.SERVING
    pod.is_broken = False
    await world.turn()
    assert (await world.condition("MetricsAvailable")).status == "True"


async def test_a_write_between_read_and_status_is_a_conflict_and_the_next_turn_heals_it(world: World, monkeypatch):
    await world.apply(replicas=1)
    observe = world.deployments._observer.observe

    async def meanwhile(*args):
        seen = await observe(*args)
        patch = {"metadata": {"labels": {"user": "was-here"}}}
        await world.admin.merge(INFERENCE_DEPLOYMENT, world.namespace, "llama", patch, "kubectl")
        return seen

    monkeypatch.setattr(world.deployments._observer, "observe", meanwhile)
    with pytest.raises(Conflict):
        await world.turn()
    assert not (await world.get()).get("status")
    monkeypatch.undo()
    await world.turn()
    assert (await world.status()).conditions


async def test_a_service_of_somebody_else_is_left_alone_and_named(world: World):
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": world.namespace, "name": "llama"},
        "spec": {"ports": [{"port": 99}], "selector": {"app": "theirs"}},
    }
    await world.admin.apply(service, "kubectl")
    await world.apply()
    with pytest.raises(Invalid):
        await world.turn()
    told = await world.condition("Degraded")
    assert (told.status, told.reason) == ("True", "OperatorError")
    assert "Service" in told.message and "not ours" in told.message
    have = await world.admin.get(SERVICE, world.namespace, "llama")
    assert have and have["spec"]["selector"] == {"app": "theirs"}
    await world.admin.delete(SERVICE, world.namespace, "llama")
    await world.turn()
    assert (await world.condition("Degraded")).status == "False"


async def test_what_the_api_server_refuses_is_said_in_its_words(world: World):
    await world.apply(pod={"nodeSelector": {"no label": "x"}})
    with pytest.raises(ClusterError):
        await world.turn()
    assert "nodeSelector: Invalid value" in (await world.condition("Degraded")).message
    await world.apply(pod={"nodeSelector": {"a-label": "x"}})
    await world.turn()
    assert (await world.condition("Degraded")).status == "False"


async def test_a_template_that_is_refused_in_mid_canary_takes_no_pods_from_stable(world: World, kubelet):
    digest = await world.artifact("def build(): ...\n")
    await world.apply(replicas=2, **QUICK)
    await world.until(lambda status: status.ready_replicas == 2)
    spec = {**QUICK, "rollout": {**QUICK["rollout"], "artifact": digest}}
    await world.apply(replicas=2, **spec)
    await world.until(lambda status: status.rollout is not None and status.rollout.observed_weight == 50)

    async def stable() -> JsonObject:
        have = await world.admin.get(DEPLOYMENT, world.namespace, "llama-stable")
        assert have
        return have

    before = await stable()
    assert before["spec"]["replicas"] == 1
    await world.apply(replicas=2, **spec, pod={"nodeSelector": {"no label": "x"}})
    with pytest.raises(Invalid):
        await world.turn()
    after = await stable()
    assert after["spec"] == {**before["spec"], "replicas": 2}
    in_service = await world.admin.list(POD, world.namespace, {"tkcc.dev/serving": "true"})
    assert {pod["metadata"]["labels"]["tkcc.dev/role"] for pod in in_service} == {"stable"}
    await world.apply(replicas=2, **QUICK)
    await world.until(lambda status: status.phase is Phase.SERVING and status.ready_replicas == 2)


async def test_gpu_fields_are_accepted_by_the_api_server_as_they_are_rendered(world: World):
    pod = {
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "nodeSelector": {"nvidia.com/gpu.product": "H200"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    }
    await world.apply(pod=pod)
    await world.turn()
    have = await world.admin.get(DEPLOYMENT, world.namespace, "llama-stable")
    assert have
    template = have["spec"]["template"]["spec"]
    assert template["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert template["nodeSelector"] == pod["nodeSelector"] and template["tolerations"] == pod["tolerations"]


async def test_pods_pass_pod_security_restricted(world: World):
    patch = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    from tkcc.kube.resources import Kind

    namespaces = Kind("", "v1", "Namespace", "namespaces")
    await world.admin._request(
        "patch",
        f"/api/v1/{namespaces.plural}/{world.namespace}",
        body=patch,
        content_type="application/merge-patch+json",
    )
    await world.apply(replicas=1)
    await world.turn()
    async with asyncio.timeout(10):
        while not await world.admin.list(POD, world.namespace, {"tkcc.dev/role": "stable"}):
            await asyncio.sleep(0.1)


async def test_an_artifact_goes_through_the_canary_into_service(world: World, kubelet):
    digest = await world.artifact("def build(): ...\n")
    await world.apply(replicas=2, **QUICK)
    await world.until(lambda status: status.ready_replicas == 2)
    async with Traffic(world.admin, world.namespace, kubelet, prompt=100, tpot_s=0.01) as traffic:
        await world.apply(replicas=2, **{**QUICK, "rollout": {**QUICK["rollout"], "artifact": digest}})
        await world.until(lambda status: status.phase is Phase.CANARY)
        status = await world.until(lambda status: status.phase is Phase.SERVING and status.stable.artifact == digest)
    assert status.stable.digest == digest
    assert any("canary" in name for name in traffic.sent), "the canary had traffic"
    probed = {name.split("-")[1] for name, pod in kubelet.ever.items() if pod.probes_seen}
    assert probed == {"stable", "canary"}
    canary = await world.admin.get(DEPLOYMENT, world.namespace, "llama-canary")
    assert canary and canary["spec"]["replicas"] == 0
    events = await world.admin.list(EVENT, world.namespace)
    reasons = {event["reason"] for event in events if event["involvedObject"]["name"] == "llama"}
    assert {"CanaryStarted", "CandidatePromoted"} <= reasons
    await world.apply(replicas=2, **QUICK)  # it serves on, and nothing but the status names it
    await world.turn()
    assert (await world.condition("Degraded")).status == "False"
    await world.admin.delete(CONFIG_MAP, world.namespace, f"tkcc-artifact-{digest[:16]}")
    await world.turn()
    assert (await world.condition("Degraded")).reason == "ArtifactMissing"


async def test_a_wrong_canary_never_gets_traffic(world: World, kubelet):
    digest = await world.artifact("def build(): wrong\n")
    kubelet._prepare = lambda name, pod: setattr(pod, "words", ("z",)) if "canary" in name else None
    await world.apply(replicas=2, **QUICK)
    await world.until(lambda status: status.ready_replicas == 2)
    async with Traffic(world.admin, world.namespace, kubelet, prompt=100) as traffic:
        await world.apply(replicas=2, **{**QUICK, "rollout": {**QUICK["rollout"], "artifact": digest}})
        await world.until(lambda status: bool(status.rolled_back))
        await world.until(lambda status: status.phase is Phase.SERVING and status.ready_replicas == 2)
    assert not any("canary" in name for name in traffic.sent)
    assert (await world.condition("RolloutHealthy")).reason == "CorrectnessRegressed"


async def test_a_canary_that_answers_nonsense_once_it_has_traffic_loses_it_by_the_deadline(world: World, kubelet):
    digest = await world.artifact("def build(): ...\n")
    rollout = {**QUICK["rollout"], "stepDeadline": "4s", "artifact": digest}
    await world.apply(replicas=2, **QUICK)
    await world.until(lambda status: status.ready_replicas == 2)
    async with Traffic(world.admin, world.namespace, kubelet, prompt=100):
        await world.apply(replicas=2, **{**QUICK, "rollout": rollout})
        await world.until(lambda status: status.rollout is not None and status.rollout.observed_weight == 50)
        [canary] = kubelet.of_role("canary")
        page = "# TYPE tkcc_engine_requests_started counter\ntkcc_engine_requests_started_total 1e40\n"
        canary.lies = {"/metrics": page, "/tkcc/requests": '{"next": 1, "requests": [{"startedAtMs": 1e15}]}'}
        status = await world.until(lambda status: status.phase is Phase.ROLLING_BACK)
        assert status.rollout and status.rollout.abort_reason == "AnalysisInconclusive"
        await world.until(lambda status: status.phase is Phase.SERVING and status.ready_replicas == 2)


async def test_an_artifact_that_is_not_what_it_claims_is_never_mounted(world: World):
    digest = await world.artifact("def build(): ...\n")
    name = f"tkcc-artifact-{digest[:16]}"
    have = await world.admin.get(CONFIG_MAP, world.namespace, name)
    assert have
    await world.admin.delete(CONFIG_MAP, world.namespace, name)
    meta = {"namespace": world.namespace, "name": name}
    forged = {**have, "metadata": meta, "data": {**have["data"], "candidate.py": "import os\n"}}
    await world.admin.create(forged, "kubectl")
    await world.apply(replicas=2, **{**QUICK, "rollout": {**QUICK["rollout"], "artifact": digest}})
    await world.turn()
    told = await world.condition("Accepted")
    assert (told.status, told.reason) == ("False", "ReferenceNotFound")


async def test_two_deployments_do_not_disturb_each_other(world: World, kubelet):
    await world.apply("one", replicas=1)
    await world.apply("two", replicas=1)
    for name in ("one", "two"):
        await world.until(lambda status: status.ready_replicas == 1, name)
    before = {key: value for key, value in (await versions(world)).items() if " one" in key}
    await world.apply("two", replicas=2)
    await world.until(lambda status: status.ready_replicas == 2, "two")
    await world.turn("one")
    assert {key: value for key, value in (await versions(world)).items() if " one" in key} == before
    stable = await world.admin.list(POD, world.namespace, {"tkcc.dev/deployment": "one"})
    assert len(stable) == 1


async def test_a_deleted_object_ends_its_turns_and_its_series(world: World, kubelet):
    await world.apply(replicas=1)
    await world.until(lambda status: status.ready_replicas == 1)
    assert b'name="llama"' in _page(world)
    await world.admin.delete(INFERENCE_DEPLOYMENT, world.namespace, "llama")
    assert await world.deployments.turn(world.key("llama")) is None
    assert b'name="llama"' not in _page(world)
    async with asyncio.timeout(30):  # the garbage collector's work: nothing of ours blocks it
        while await versions(world):
            left = await versions(world)
            if not [key for key in left if "llama" in key]:
                break
            await asyncio.sleep(0.2)


def _page(world: World) -> bytes:
    from prometheus_client import generate_latest

    return generate_latest(world.metrics.registry)
