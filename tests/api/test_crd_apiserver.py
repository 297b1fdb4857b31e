"""The CRDs on the real API server: what it fills in, what it refuses and in which words, and that status comes back."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tkcc.api.codec import from_dict, to_dict
from tkcc.api.condition import Condition, ConditionStatus
from tkcc.api.run import CandidateCounts, CandidateSummary, RunSpec, RunStatus
from tkcc.api.spec import Spec
from tkcc.api.status import Attempt, Plan, Point, RolledBack, RolloutStatus, Source, Status
from tkcc.api.workload import Quantiles, Workload
from tkcc.control.simulation import START

pytestmark = pytest.mark.shell

CRDS = Path(__file__).parents[2] / "crds"
MODEL = {"uri": "pvc://weights/smol", "name": "smol"}
FLAT = Quantiles(9, 9, 9, 9)
WORKLOAD = Workload(FLAT, FLAT, FLAT, 500, 60, 60, 60)
RUN = {
    "deployment": "demo",
    "workload": to_dict(WORKLOAD),
    "workloadDigest": WORKLOAD.digest,
    "incumbent": "baseline",
    "trigger": "Drift",
    "model": MODEL,
}


@pytest.fixture(scope="module")
def crds(plane):
    """The repository's CRDs as they are, over whatever the chart installed."""
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRDS))
    plane.kubectl("wait", "--for=condition=Established", "crd", "--all")
    return plane


@pytest.fixture
async def admin(crds) -> AsyncIterator:
    from tkcc.kube.cluster import connect

    async with connect(crds.kubeconfig) as cluster:
        yield cluster


def obj(namespace, name, spec, kind="InferenceDeployment", **more):
    meta = {"name": name, "namespace": namespace}
    return {"apiVersion": "tkcc.dev/v1alpha1", "kind": kind, "metadata": meta, "spec": spec, **more}


async def test_defaults_are_those_of_the_classes(admin, namespace):
    stored = await admin.create(obj(namespace, "demo", {"model": MODEL}), "test")
    assert from_dict(Spec, stored["spec"]) == from_dict(Spec, {"model": MODEL})
    assert stored["spec"]["drift"]["windows"] == {"long": "1h", "short": "15m"}
    assert stored["spec"]["rollout"]["analysis"]["interval"] == "30s"
    run = await admin.create(obj(namespace, "run", RUN, "RecompilationRun"), "test")
    assert from_dict(RunSpec, run["spec"]) == from_dict(RunSpec, RUN)


MORE_THAN_ALLOWED = {"requests": {"memory": "1Gi", "cpu": "0.6"}, "limits": {"memory": "1024Mi", "cpu": "500m"}}
REFUSED = [
    ("no model", {"model": None}, ["spec.model: Required value"]),
    ("weights from elsewhere", {"model": {"uri": "hf://org/model", "name": "m"}}, ["spec.model.uri", "pvc://"]),
    ("a path that climbs", {"model": {"uri": "pvc://w/../../etc", "name": "m"}}, ["spec.model.uri"]),
    ("an engine nobody knows", {"engine": {"type": "onnx"}}, ["spec.engine.type", "native", "vllm"]),
    ("a list of cores that is none", {"engine": {"cpus": "0-"}}, ["spec.engine.cpus"]),
    ("no replicas", {"replicas": 0}, ["spec.replicas", "greater than or equal to 1"]),
    ("a duration in words", {"drift": {"tick": "5 minutes"}}, ["spec.drift.tick"]),
    ("an empty duration", {"drift": {"tick": ""}}, ["spec.drift.tick"]),
    ("a tick of nothing", {"drift": {"tick": "0s"}}, ["drift.tick must be 1s or more"]),
    ("short longer than long", {"drift": {"windows": {"long": "5m"}}}, ["windows.short must not be longer than long"]),
    ("a tick longer than short", {"drift": {"tick": "30m"}}, ["drift.tick must not be longer than windows.short"]),
    ("a ratio of one", {"drift": {"promptRatioPercent": 100}}, ["spec.drift.promptRatioPercent", "101"]),
    ("an unknown mode", {"recompilation": {"mode": "Auto"}}, ["spec.recompilation.mode", "RecommendOnly"]),
    ("no budget", {"recompilation": {"budget": {"maxDuration": "0s"}}}, ["budget.maxDuration must be 1s or more"]),
    ("an unasked script", {"recompilation": {"proposer": {"scriptConfigMap": "c"}}}, ["type Scripted, and only then"]),
    ("scripted by nothing", {"recompilation": {"proposer": {"type": "Scripted"}}}, ["type Scripted, and only then"]),
    ("steps that descend", {"rollout": {"steps": [50, 25]}}, ["rollout.steps must ascend"]),
    ("a step twice", {"rollout": {"steps": [25, 25]}}, ["rollout.steps must ascend"]),
    ("a step of everything", {"rollout": {"steps": [100]}}, ["spec.rollout.steps[0]", "99"]),
    ("a step beyond the rollout", {"rollout": {"stepDeadline": "3h"}}, ["must not be longer than progressDeadline"]),
    ("an interval beyond its step", {"rollout": {"analysis": {"interval": "1h"}}}, ["shorter than stepDeadline"]),
    ("approved, but nobody asked", {"rollout": {"approvedArtifact": "a" * 64}}, ["approvedArtifact needs approval"]),
    ("a digest that is none", {"rollout": {"artifact": "latest"}}, ["spec.rollout.artifact"]),
    ("a quantity that is none", {"pod": {"resources": {"limits": {"memory": "1Gx"}}}}, ["limits.memory"]),
    ("less than nothing", {"pod": {"resources": {"requests": {"cpu": "-1"}}}}, ["requests.cpu"]),
    ("more asked for than allowed", {"pod": {"resources": MORE_THAN_ALLOWED}}, ["must not be above resources.limits"]),
    (
        "more asked for a tier than allowed",
        {"recompilation": {"tiers": {"slow": {"pod": {"resources": MORE_THAN_ALLOWED}}}}},
        ["must not be above resources.limits"],
    ),
    ("a toleration nobody knows", {"pod": {"tolerations": [{"operator": "Like"}]}}, ["tolerations[0].operator"]),
]  # fmt: skip


@pytest.mark.parametrize("case, patch, words", REFUSED, ids=[r[0] for r in REFUSED])
async def test_a_bad_spec_is_refused_in_words_that_say_what_to_change(admin, namespace, case, patch, words):
    from tkcc.kube.errors import Invalid

    spec = {key: value for key, value in ({"model": MODEL} | patch).items() if value is not None}
    with pytest.raises(Invalid) as err:
        await admin.create(obj(namespace, "demo", spec), "test")
    assert all(word in str(err.value) for word in words), str(err.value)


@pytest.mark.parametrize(
    "name, words",
    [
        ("n" * 41, "at most 40 characters"),
        ("qwen2.5-7b", "must begin with a letter and have only a-z, 0-9 and -"),
        ("7b-chat", "must begin with a letter and have only a-z, 0-9 and -"),
    ],
)
async def test_a_name_that_its_children_cannot_have_is_refused(admin, namespace, name, words):
    from tkcc.kube.errors import Invalid

    with pytest.raises(Invalid, match=words):
        await admin.create(obj(namespace, name, {"model": MODEL}), "test")


GOOD = [
    {"engine": {"type": "vllm"}},
    {"replicas": 8, "rollout": {"steps": [12, 25, 50]}},
    {"drift": {"tick": "2s", "windows": {"long": "20s", "short": "6s"}, "cacheFill": "0s", "cooldown": "0s"}},
    {"rollout": {"analysis": {"interval": "2s"}, "stepDeadline": "1m", "progressDeadline": "5m"}},
    {"recompilation": {"proposer": {"type": "Scripted", "scriptConfigMap": "script"}}},
    {"rollout": {"approval": "BeforePromote", "approvedArtifact": "a" * 64}},
    {"pod": {"resources": {"limits": {"nvidia.com/gpu": 1, "memory": "2Gi"}}, "runtimeClassName": "nvidia"}},
    {"pod": {"resources": {"limits": {"memory": "1.5Gi", "cpu": 2}, "requests": {"cpu": "2000m", "memory": 10**9}}}},
    {"suspend": True, "rollout": {"artifact": "baseline"}},
]


async def test_good_specs_are_taken_and_read_back(admin, namespace):
    for idx, patch in enumerate(GOOD):
        stored = await admin.create(obj(namespace, f"good-{idx}", {"model": MODEL} | patch), "test")
        assert from_dict(Spec, stored["spec"]) == from_dict(Spec, {"model": MODEL} | patch), patch


FROZEN = [
    ("model.uri", {"model": {"uri": "pvc://other", "name": "smol"}}, "model.uri cannot change"),
    ("engine.type", {"engine": {"type": "vllm"}}, "engine.type cannot change"),
]


@pytest.mark.parametrize("field, patch, words", FROZEN, ids=[f[0] for f in FROZEN])
async def test_what_cannot_change_is_refused(admin, namespace, field, patch, words):
    from tkcc.kube.errors import Invalid
    from tkcc.kube.resources import INFERENCE_DEPLOYMENT

    await admin.create(obj(namespace, "demo", {"model": MODEL}), "test")
    with pytest.raises(Invalid, match=words):
        await admin.merge(INFERENCE_DEPLOYMENT, namespace, "demo", {"spec": patch}, "test")
    await admin.merge(INFERENCE_DEPLOYMENT, namespace, "demo", {"spec": {"model": {"name": "other"}}}, "test")


async def test_the_spec_of_a_run_cannot_change(admin, namespace):
    from tkcc.kube.errors import Invalid
    from tkcc.kube.resources import RECOMPILATION_RUN

    await admin.create(obj(namespace, "run", RUN, "RecompilationRun"), "test")
    with pytest.raises(Invalid, match="spec of a RecompilationRun cannot change"):
        patch = {"spec": {"budget": {"maxDuration": "2h"}}}
        await admin.merge(RECOMPILATION_RUN, namespace, "run", patch, "test")


def full_status() -> Status:
    plan = Plan("w" * 64, "a" * 64, 1000, 500, "Promoted", START)
    base = Status(observed_generation=1, adopted_artifact="a" * 64)
    return replace(
        base,
        drift=replace(base.drift, plans=(plan, replace(plan, workload_digest="v" * 64)), long_hit_ratio_milli=0),
        recompilation=replace(
            base.recompilation,
            started_at=(START,),
            attempts=(Attempt("w" * 64, "baseline", 1000, reason="Failed", ended_at=START),),
        ),
        stable=replace(base.stable, workload=Point(1000, None), speedup="1.25x"),
        previous=base.stable,
        candidate=replace(base.stable, artifact="a" * 64),
        rollout=RolloutStatus(
            artifact="a" * 64, source=Source.RUN, spec_digest="s" * 64, started_at=START, step_since=START
        ),
        rolled_back=(RolledBack("b" * 64, "LatencyExceeded", START),),
        conditions=(Condition("Ready", ConditionStatus.TRUE, "AllReplicasReady", "2 of 2", 1, START),),
    )


async def test_a_status_comes_back_as_it_was_written(admin, namespace):
    from tkcc.kube.resources import INFERENCE_DEPLOYMENT, RECOMPILATION_RUN

    await admin.create(obj(namespace, "demo", {"model": MODEL}), "test")
    await admin.apply_status({**obj(namespace, "demo", {}), "status": to_dict(full_status())}, "test")
    stored = await admin.get(INFERENCE_DEPLOYMENT, namespace, "demo")
    assert from_dict(Status, stored["status"]) == full_status()
    await admin.create(obj(namespace, "run", RUN, "RecompilationRun"), "test")
    status = RunStatus(
        tier="slow",
        candidates=CandidateCounts(5, 1, 4),
        top=(CandidateSummary("a" * 64, "slow", "ACCEPTED", 200, "fused heads"),),
        artifact="a" * 64,
        started_at=START,
        conditions=(Condition("Succeeded", ConditionStatus.UNKNOWN, "SlowTierRunning", "5 evaluated", 1, START),),
    )
    await admin.apply_status({**obj(namespace, "run", {}, "RecompilationRun"), "status": to_dict(status)}, "test")
    stored = await admin.get(RECOMPILATION_RUN, namespace, "run")
    assert from_dict(RunStatus, stored["status"]) == status


async def test_kubectl_shows_the_columns_by_the_short_names(admin, crds, namespace):
    await admin.create(obj(namespace, "demo", {"model": MODEL}), "test")
    await admin.apply_status({**obj(namespace, "demo", {}), "status": to_dict(full_status())}, "test")
    await admin.create(obj(namespace, "run", RUN, "RecompilationRun"), "test")
    head, row = crds.kubectl("-n", namespace, "get", "infdep").splitlines()
    columns = "NAME READY REASON MODEL ENGINE REVISION DRIFT RECOMPILING WEIGHT SPEEDUP AGE"
    assert head.split() == columns.split()
    assert "True" in row and "AllReplicasReady" in row and "1.25x" in row
    wide = crds.kubectl("-n", namespace, "get", "infdep", "-o", "wide").splitlines()[0].split()
    assert wide[-5:] == ["PHASE", "PROMPT", "HITMILLI", "RUN", "MESSAGE"]
    assert "DEPLOYMENT" in crds.kubectl("-n", namespace, "get", "rrun")
    both = crds.kubectl("-n", namespace, "get", "tkcc", "-o", "name")
    assert "inferencedeployment.tkcc.dev/demo" in both and "recompilationrun.tkcc.dev/run" in both


async def test_scale_and_explain_work(admin, crds, namespace):
    from tkcc.kube.resources import INFERENCE_DEPLOYMENT

    await admin.create(obj(namespace, "demo", {"model": MODEL}), "test")
    crds.kubectl("-n", namespace, "scale", "infdep/demo", "--replicas=4")
    stored = await admin.get(INFERENCE_DEPLOYMENT, namespace, "demo")
    assert stored["spec"]["replicas"] == 4
    assert "Consecutive ticks above distance 1" in crds.kubectl("explain", "infdep.spec.drift.ticks")
