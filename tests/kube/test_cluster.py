"""The door against the real API server: what is idempotent, what conflicts, what is refused and in which words."""

import asyncio

import pytest

from tests.conftest import connected
from tkcc.kube.cluster import STATUS, TRAFFIC, WORKLOAD, Cluster, connect
from tkcc.kube.errors import AlreadyExists, ClusterError, Conflict, Forbidden, Invalid, NotFound
from tkcc.kube.resources import CONFIG_MAP, INFERENCE_DEPLOYMENT, POD, SECRET, SERVICE

pytestmark = pytest.mark.shell


def config_map(namespace: str, name: str = "a", **data: str):
    meta = {"namespace": namespace, "name": name, "labels": {"x": "y"}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data}


def deployment(namespace: str, name: str = "llama", **spec: object):
    model = {"uri": "pvc://weights/smol", "name": "smol"}
    meta = {"namespace": namespace, "name": name}
    kind = INFERENCE_DEPLOYMENT
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": meta, "spec": {"model": model, **spec}}


async def test_applying_the_same_again_changes_nothing_not_even_the_version(cluster: Cluster, namespace: str):
    first = await cluster.apply(config_map(namespace, x="1"), WORKLOAD)
    again = await cluster.apply(config_map(namespace, x="1"), WORKLOAD)
    assert again["metadata"] == first["metadata"]
    changed = await cluster.apply(config_map(namespace, x="2"), WORKLOAD)
    assert changed["metadata"]["resourceVersion"] != first["metadata"]["resourceVersion"]


async def test_a_field_no_longer_applied_goes_and_somebody_elses_stays(cluster: Cluster, namespace: str):
    await cluster.apply(config_map(namespace, ours="1", gone="1"), WORKLOAD)
    await cluster.merge(CONFIG_MAP, namespace, "a", {"data": {"theirs": "1"}}, TRAFFIC)
    have = await cluster.apply(config_map(namespace, ours="1"), WORKLOAD)
    assert have["data"] == {"ours": "1", "theirs": "1"}


async def test_our_fields_are_taken_back_from_whoever_changed_them(cluster: Cluster, admin: Cluster, namespace: str):
    await cluster.apply(config_map(namespace, ours="1"), WORKLOAD)
    await admin.merge(CONFIG_MAP, namespace, "a", {"data": {"ours": "2"}}, "kubectl")
    have = await cluster.apply(config_map(namespace, ours="1"), WORKLOAD)
    assert have["data"] == {"ours": "1"}


async def test_managers_are_named_by_concern(cluster: Cluster, namespace: str):
    have = await cluster.apply(config_map(namespace, x="1"), WORKLOAD)
    assert [(item["manager"], item["operation"]) for item in have["metadata"]["managedFields"]] == [
        ("tkcc/workload", "Apply")
    ]


async def test_create_once_keeps_what_is_there(cluster: Cluster, namespace: str):
    first = await cluster.create_once(config_map(namespace, x="1"), WORKLOAD)
    assert await cluster.create_once(config_map(namespace, x="2"), WORKLOAD) == first
    with pytest.raises(AlreadyExists):
        await cluster.create(config_map(namespace, x="2"), WORKLOAD)


async def test_a_status_over_an_old_version_is_a_conflict(cluster: Cluster, admin: Cluster, namespace: str):
    read = await admin.create(deployment(namespace), "test")
    await admin.merge(INFERENCE_DEPLOYMENT, namespace, "llama", {"spec": {"replicas": 3}}, "test")
    version = read["metadata"]["resourceVersion"]
    body = {**deployment(namespace), "status": {"phase": "Serving"}}
    body.pop("spec")
    body["metadata"]["resourceVersion"] = version
    with pytest.raises(Conflict):
        await cluster.apply_status(body, STATUS)
    with pytest.raises(Conflict):
        kind = INFERENCE_DEPLOYMENT
        await cluster.merge_status(kind, namespace, "llama", version, {"phase": "Serving"}, STATUS)
    have = await cluster.get(INFERENCE_DEPLOYMENT, namespace, "llama")
    assert have and "status" not in have


async def test_a_status_that_says_the_same_writes_nothing(cluster: Cluster, admin: Cluster, namespace: str):
    await admin.create(deployment(namespace), "test")
    body = {**deployment(namespace), "status": {"phase": "Serving", "replicas": 2}}
    body.pop("spec")
    first = await cluster.apply_status(body, STATUS)
    assert (await cluster.apply_status(body, STATUS))["metadata"] == first["metadata"]


async def test_a_spec_that_the_crd_refuses_is_invalid_and_says_what_to_change(admin: Cluster, namespace: str):
    with pytest.raises(Invalid, match=r"spec\.replicas"):
        await admin.create(deployment(namespace, replicas=0), "test")


async def test_what_is_not_there_is_none_to_get_and_false_to_delete(cluster: Cluster, namespace: str):
    assert await cluster.get(SERVICE, namespace, "nobody") is None
    assert await cluster.delete(SERVICE, namespace, "nobody") is False
    with pytest.raises(NotFound):
        await cluster.merge(CONFIG_MAP, namespace, "nobody", {"data": {}}, WORKLOAD)


async def test_a_delete_of_another_object_under_the_same_name_is_a_conflict(cluster: Cluster, namespace: str):
    first = await cluster.apply(config_map(namespace, x="1"), WORKLOAD)
    await cluster.delete(CONFIG_MAP, namespace, "a")
    await cluster.apply(config_map(namespace, x="1"), WORKLOAD)
    with pytest.raises(Conflict):
        await cluster.delete(CONFIG_MAP, namespace, "a", uid=first["metadata"]["uid"])
    assert await cluster.delete(CONFIG_MAP, namespace, "a")


async def test_a_merge_patch_with_another_uid_is_refused(cluster: Cluster, admin: Cluster, namespace: str):
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": namespace, "name": "p"},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    }
    await admin.create(pod, "test")
    patch = {"metadata": {"uid": "00000000-0000-0000-0000-000000000000", "labels": {"a": "b"}}}
    with pytest.raises((Conflict, Invalid)):
        await cluster.merge(POD, namespace, "p", patch, TRAFFIC)


async def test_lists_are_whole_selected_and_typed(cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch):
    await asyncio.gather(*(cluster.apply(config_map(namespace, f"m{i:03}", x="1"), WORKLOAD) for i in range(7)))
    monkeypatch.setattr("tkcc.kube.cluster._PAGE", 3)
    found = await cluster.list(CONFIG_MAP, namespace, {"x": "y"})
    assert [item["metadata"]["name"] for item in found] == [f"m{i:03}" for i in range(7)]
    assert {(item["kind"], item["apiVersion"]) for item in found} == {("ConfigMap", "v1")}
    metas = await cluster.list(CONFIG_MAP, namespace, {"x": "y"}, metadata_only=True)
    assert [item["metadata"]["uid"] for item in metas] == [item["metadata"]["uid"] for item in found]
    assert all("data" not in item for item in metas)
    assert await cluster.list(CONFIG_MAP, namespace, {"x": "other"}, metadata_only=True) == []


async def test_what_is_not_granted_is_forbidden(plane, namespace: str):
    async with connected(plane.service_account_kubeconfig(namespace, "default")) as nobody:
        with pytest.raises(Forbidden, match="secrets"):
            await nobody.list(SECRET, namespace)


async def test_credentials_that_do_not_work_say_so(tmp_path):
    with pytest.raises(ClusterError, match="KUBECONFIG"):
        async with connect(tmp_path / "none.yaml"):
            pass
