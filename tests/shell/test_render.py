"""Rendered objects: stable from turn to turn, restricted, and without rights that nobody asked for."""

import json
from itertools import product

import pytest

from tkcc.api.codec import from_dict, to_dict
from tkcc.api.fields import BASELINE
from tkcc.api.run import RunSpec
from tkcc.api.spec import Spec
from tkcc.api.workload import RecordedRequest, Recording
from tkcc.kube.resources import INFERENCE_DEPLOYMENT, RECOMPILATION_RUN, JsonObject
from tkcc.shell.render import run as render_run
from tkcc.shell.render import serving
from tkcc.shell.render.names import CANARY, STABLE, Owner
from tkcc.shell.settings import Images, Settings

DIGEST = "ab" * 32
SETTINGS = Settings(images=Images(engine="engine:1", worker="worker:1", pull_secrets=("registry",)))
OWNER = Owner(INFERENCE_DEPLOYMENT, "shop", "llama", "uid-1")
RUN = Owner(RECOMPILATION_RUN, "shop", "llama-0123456789", "uid-2")
GPU = {
    "resources": {"limits": {"nvidia.com/gpu": 2, "memory": "40Gi"}, "requests": {"cpu": "500m"}},
    "nodeSelector": {"nvidia.com/gpu.product": "H200"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "runtimeClassName": "nvidia",
    "priorityClassName": "batch",
}
WORKLOAD = {
    "promptTokens": {"mean": 900, "p50": 800, "p90": 1500, "p99": 2000},
    "outputTokens": {"mean": 40, "p50": 32, "p90": 64, "p99": 100},
    "concurrency": {"mean": 2, "p50": 2, "p90": 3, "p99": 4},
    "hitRatioMilli": 600,
    "requestsPerMinute": 30,
    "windowS": 3600,
    "numRequests": 1800,
}


def spec(**extra: object) -> Spec:
    return from_dict(Spec, {"model": {"uri": "pvc://weights/smol/v1", "name": "smol"}, **extra})


def run_spec(**extra: object) -> RunSpec:
    return from_dict(
        RunSpec,
        {
            "deployment": "llama",
            "workload": WORKLOAD,
            "workloadDigest": DIGEST,
            "incumbent": BASELINE,
            "trigger": "Drift",
            "model": {"uri": "pvc://weights/smol/v1", "name": "smol"},
            **extra,
        },
    )


def run_objects(given: RunSpec, settings: Settings = SETTINGS) -> list[JsonObject]:
    objects = [
        render_run.token(RUN, given, "s3cret"),
        render_run.traffic(RUN, given, Recording(16, "recorded", (RecordedRequest(0, 5, 5, 0),), 1)),
        render_run.order(RUN, given, {"fast": "10.0.0.1", "slow": "fd00::1"}),
        render_run.result(RUN, given),
        render_run.service_account(RUN, given),
        render_run.role(RUN, given),
        render_run.role_binding(RUN, given),
        render_run.job(RUN, given, settings),
        *render_run.network_policies(RUN, given),
    ]
    for tier in ("fast", "slow"):
        objects += [render_run.tier_service(RUN, given, tier), render_run.tier_deployment(RUN, given, settings, tier)]
    return objects


def all_objects(settings: Settings = SETTINGS) -> list[JsonObject]:
    pair = product((STABLE, CANARY), (BASELINE, DIGEST))
    deployments = [serving.deployment(OWNER, spec(), settings, role, artifact, 2) for role, artifact in pair]
    return [
        serving.service(OWNER),
        serving.disruption_budget(OWNER),
        serving.network_policy(OWNER, settings),
        *deployments,
        *run_objects(run_spec(incumbent=DIGEST), settings),
    ]


def pods(objects: list[JsonObject]) -> list[JsonObject]:
    return [obj["spec"]["template"]["spec"] for obj in objects if obj["kind"] in ("Deployment", "Job")]


def args(pod: JsonObject) -> str:
    return " ".join(pod["containers"][0]["args"])


def test_equal_inputs_give_equal_json():
    assert json.dumps(all_objects()) == json.dumps(all_objects())


def test_every_object_is_labelled_owned_and_in_its_owners_namespace():
    for obj in all_objects():
        meta = obj["metadata"]
        assert meta["namespace"] == "shop"
        assert meta["labels"]["app.kubernetes.io/managed-by"] == "tkcc"
        assert meta["labels"]["tkcc.dev/deployment"] == "llama"
        [ref] = meta["ownerReferences"]
        assert ref["controller"] and ref["uid"] in ("uid-1", "uid-2")
        assert "finalizers" not in meta


def test_every_pod_is_restricted_and_has_no_token_but_the_jobs():
    for pod in pods(all_objects()):
        [container] = pod["containers"]
        assert pod["automountServiceAccountToken"] is (container["name"] == "worker")
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert not [volume for volume in pod["volumes"] if "hostPath" in volume]
        assert pod["imagePullSecrets"] == [{"name": "registry"}]


def test_weights_are_read_only_wherever_they_are_mounted():
    engines = [pod for pod in pods(all_objects()) if pod["containers"][0]["name"] != "worker"]
    assert len(engines) == 6
    for pod in engines:
        [claim] = [v["persistentVolumeClaim"] for v in pod["volumes"] if "persistentVolumeClaim" in v]
        assert claim == {"claimName": "weights", "readOnly": True}
        [mount] = [m for m in pod["containers"][0]["volumeMounts"] if m["mountPath"] == "/models"]
        assert mount["readOnly"]
        assert "--model /models/smol/v1" in args(pod)


def test_a_mounted_torch_is_a_read_only_host_path_of_engines_alone():
    objects = all_objects(Settings(images=SETTINGS.images, torch_host_path="/opt/venv/lib/site-packages"))
    for pod in pods(objects):
        paths = [volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume]
        is_worker = pod["containers"][0]["name"] == "worker"
        assert paths == ([] if is_worker else ["/opt/venv/lib/site-packages"])
        mounts = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "torch"]
        assert all(mount == {"name": "torch", "mountPath": "/opt/torch", "readOnly": True} for mount in mounts)


def test_stable_pods_serve_from_the_start_and_canary_pods_are_let_in_one_by_one():
    stable = serving.deployment(OWNER, spec(), SETTINGS, STABLE, BASELINE, 2)["spec"]
    canary = serving.deployment(OWNER, spec(), SETTINGS, CANARY, DIGEST, 1)["spec"]
    wanted = serving.service(OWNER)["spec"]["selector"]
    assert wanted.items() <= stable["template"]["metadata"]["labels"].items()
    assert not wanted.items() <= canary["template"]["metadata"]["labels"].items()
    for have in (stable, canary):  # the serving label changes on pods: no selector may depend on it
        assert "tkcc.dev/serving" not in have["selector"]["matchLabels"]
        assert have["selector"]["matchLabels"].items() <= have["template"]["metadata"]["labels"].items()
    assert stable["selector"] != canary["selector"]


def test_tier_pods_are_not_selected_by_the_service_or_counted_as_serving():
    labels = render_run.tier_deployment(RUN, run_spec(), SETTINGS, "fast")["spec"]["template"]["metadata"]["labels"]
    assert not serving.service(OWNER)["spec"]["selector"].items() <= labels.items()
    assert labels["app.kubernetes.io/component"] == "tier"


def test_an_artifact_is_mounted_and_named_and_the_baseline_is_not():
    with_it = serving.deployment(OWNER, spec(), SETTINGS, CANARY, DIGEST, 1)["spec"]["template"]
    assert with_it["metadata"]["annotations"] == {"tkcc.dev/artifact": DIGEST}
    assert {"name": "artifact", "configMap": {"name": f"tkcc-artifact-{DIGEST[:16]}"}} in with_it["spec"]["volumes"]
    assert "--artifact /artifact" in args(with_it["spec"])
    without = serving.deployment(OWNER, spec(), SETTINGS, STABLE, BASELINE, 1)["spec"]["template"]
    assert without["metadata"]["annotations"] == {"tkcc.dev/artifact": BASELINE}
    assert "--artifact" not in args(without["spec"])


def test_what_spec_leaves_open_is_left_out():
    pod = serving.deployment(OWNER, spec(), SETTINGS, STABLE, BASELINE, 1)["spec"]["template"]["spec"]
    for name in ("nodeSelector", "tolerations", "runtimeClassName", "priorityClassName"):
        assert name not in pod
    assert "--threads" not in args(pod) and "--record" not in args(pod) and "--device" not in args(pod)
    assert "TKCC_CPUS" not in {item["name"] for item in pod["containers"][0]["env"]}


def test_gpu_fields_reach_serving_pods_and_each_tier():
    given = run_spec(tiers={"fast": {"layers": 3, "pod": GPU}, "slow": {"pod": GPU}, "threads": 2, "cpus": "1-3"})
    tiers = [render_run.tier_deployment(RUN, given, SETTINGS, tier) for tier in ("fast", "slow")]
    for pod in pods([serving.deployment(OWNER, spec(pod=GPU), SETTINGS, STABLE, BASELINE, 1), *tiers]):
        assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "2", "memory": "40Gi"}
        assert pod["nodeSelector"] == GPU["nodeSelector"]
        assert pod["tolerations"] == GPU["tolerations"]
        assert (pod["runtimeClassName"], pod["priorityClassName"]) == ("nvidia", "batch")
    assert "--device cuda" in args(pods([serving.deployment(OWNER, spec(pod=GPU), SETTINGS, STABLE, BASELINE, 1)])[0])
    assert "--layers 3 --tier fast" in args(pods(tiers)[0]) and "--layers all --tier slow" in args(pods(tiers)[1])
    assert "--threads 2" in args(pods(tiers)[0])
    assert {"name": "TKCC_CPUS", "value": "1-3"} in pods(tiers)[0]["containers"][0]["env"]


def test_recording_threads_pinning_and_extra_arguments_reach_the_engine():
    given = spec(
        engine={"threads": 1, "cpus": "0", "args": ["--max-batch", "4"], "image": "mine:2", "dtype": "bfloat16"},
        traffic={"recording": {"enabled": True, "maxRequests": 300}},
    )
    [pod] = pods([serving.deployment(OWNER, given, SETTINGS, STABLE, BASELINE, 1)])
    assert pod["containers"][0]["image"] == "mine:2"
    assert "--dtype bfloat16 --threads 1 --record 300" in args(pod) and args(pod).endswith("--max-batch 4")
    assert {"name": "TKCC_CPUS", "value": "0"} in pod["containers"][0]["env"]


def test_a_pod_has_longer_to_leave_than_it_takes_to_drain():
    [pod] = pods([serving.deployment(OWNER, spec(), SETTINGS, STABLE, BASELINE, 1)])
    assert pod["terminationGracePeriodSeconds"] > SETTINGS.drain.accept_s + SETTINGS.drain.finish_s


def test_a_worker_may_patch_its_own_run_and_its_own_result_and_nothing_else():
    assert render_run.role(RUN, run_spec())["rules"] == [
        {
            "apiGroups": ["tkcc.dev"],
            "resources": ["recompilationruns/status"],
            "resourceNames": [RUN.name],
            "verbs": ["patch"],
        },
        {
            "apiGroups": [""],
            "resources": ["configmaps"],
            "resourceNames": [f"{RUN.name}-result"],
            "verbs": ["get", "patch"],
        },
    ]


def test_the_order_names_tiers_by_address_and_says_what_is_mounted():
    given = run_spec(incumbent=DIGEST, proposer={"type": "Scripted", "scriptConfigMap": "two"})
    text = render_run.order(RUN, given, {"fast": "10.0.0.1", "slow": "fd00::1"})["data"]["run.json"]
    order = json.loads(text)
    assert order["tiers"] == {"fast": "http://10.0.0.1:8090", "slow": "http://[fd00::1]:8090"}
    assert from_dict(RunSpec, order["spec"]) == given
    [pod] = pods([render_run.job(RUN, given, SETTINGS)])
    mounts = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert {order["incumbentDir"], order["scriptDir"], "/run/tkcc/run", "/run/tkcc/token"} <= mounts


def test_only_pods_of_the_job_reach_a_tier_and_a_tier_reaches_nobody():
    policies = {item["metadata"]["name"]: item["spec"] for item in render_run.network_policies(RUN, run_spec())}
    tier, worker = policies[f"{RUN.name}-tier"], policies[f"{RUN.name}-worker"]
    assert "egress" not in tier and tier["policyTypes"] == ["Ingress", "Egress"]
    [rule] = tier["ingress"]
    job_labels = render_run.job(RUN, run_spec(), SETTINGS)["spec"]["template"]["metadata"]["labels"]
    assert rule["from"][0]["podSelector"]["matchLabels"].items() <= job_labels.items()
    assert "ingress" not in worker


def test_no_secret_is_written_in_clear():
    assert "s3cret" not in json.dumps(run_objects(run_spec()))


def test_a_patch_of_a_runs_status_names_only_what_changed():
    from tkcc.api.run import RunStatus

    old = RunStatus(tier="fast", gain_milli=5)
    assert render_run.status_patch(old, old) == {}
    new = from_dict(RunStatus, {**to_dict(old), "gainMilli": 7, "finishedAt": "2026-01-01T00:00:00Z"})
    assert render_run.status_patch(old, new) == {"gainMilli": 7, "finishedAt": "2026-01-01T00:00:00Z"}
    assert render_run.status_patch(new, old) == {"gainMilli": 5, "finishedAt": None}


@pytest.mark.parametrize("surge, unavailable", [(1, 0), (0, 1)])
def test_pods_are_exchanged_as_the_settings_say(surge: int, unavailable: int):
    settings = Settings(images=SETTINGS.images, rolling={"maxSurge": surge, "maxUnavailable": unavailable})
    rolling = serving.deployment(OWNER, spec(), settings, STABLE, BASELINE, 1)["spec"]["strategy"]["rollingUpdate"]
    assert rolling == {"maxSurge": surge, "maxUnavailable": unavailable}
