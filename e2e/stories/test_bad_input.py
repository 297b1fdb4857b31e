"""Bad input: refused by the API server where it can know, else told in a condition that names what is wrong. No pod, no
Job and no operator goes down over it again and again.

Every rule of the schema has its own case in tests/api/test_crd_apiserver.py; here are some of each kind, by kubectl.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from e2e.cluster.errors import ClusterError
from e2e.demo.ground import manifest
from e2e.stories import candidates
from e2e.stories.client import Mix
from e2e.stories.stage import OUT, Stage
from e2e.stories.subject import CLAIM, MODEL, SCRIPT, SPEC, Subject, deploy, infdep, merged
from e2e.stories.telling import Story
from tkcc.api.condition import ConditionType
from tkcc.api.run import RunOutcome

REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("weights from elsewhere", {"model": {"uri": "hf://org/model"}}, ["spec.model.uri", "pvc://"]),
    ("no replicas", {"replicas": 0}, ["spec.replicas", "greater than or equal to 1"]),
    ("an engine nobody knows", {"engine": {"type": "onnx"}}, ["spec.engine.type", "native", "vllm"]),
    ("a duration in words", {"drift": {"tick": "2 seconds"}}, ["spec.drift.tick"]),
    ("short longer than long", {"drift": {"windows": {"short": "1m"}}}, ["windows.short must not be longer than long"]),
    ("steps that descend", {"rollout": {"steps": [50, 25]}}, ["rollout.steps must ascend, each weight once, like"]),
    (
        "a script of no type",
        {"recompilation": {"proposer": {"scriptConfigMap": "c"}}},
        ["type Scripted, and only then"],
    ),
]
CHANGES = [
    ("another model", {"model": {"uri": f"pvc://{CLAIM}/other"}}, "create another InferenceDeployment"),
    ("another engine", {"engine": {"type": "vllm"}}, "create another InferenceDeployment"),
]
A = Mix(prompt_tokens=(40, 90), shared_tokens=32, per_second=6.0)

story: Story[Subject] = Story()


@story.given
def a_good_deployment(stage: Stage) -> Subject:
    subject = deploy(stage, "bad-input")
    subject.until_ready()
    subject.send(A)
    return subject


@story.chapter
def test_the_api_server_says_what_to_change(subject: Subject) -> None:
    for case, spec, words in REFUSED:
        bad = infdep(subject.namespace, "bad", merged(SPEC, spec))
        said = _refusal(subject, "apply", "--dry-run=server", "-f", "-", stdin=manifest(bad))
        assert all(word in said for word in words), f"{case}: {said}"
    for case, change, advice in CHANGES:
        try:
            subject.change(change)
        except ClusterError as err:
            assert advice in str(err), f"{case}: {err}"
        else:
            raise AssertionError(f"{case} was let through")


@story.chapter
def test_what_does_not_exist_is_named(subject: Subject) -> None:
    bad = Subject(subject.stage, subject.namespace, "nowhere")
    bad.apply({"model": {"uri": "pvc://absent/tiny"}})
    told = bad.until_condition(ConditionType.ACCEPTED, "False", "ReferenceNotFound")
    assert "spec.model.uri: PersistentVolumeClaim absent does not exist" in told.message
    assert not bad.pods()
    bad.delete()


@story.chapter
def test_what_cannot_be_done_is_refused_with_what_can(subject: Subject) -> None:
    subject.change({"rollout": {"steps": [25]}})
    told = subject.until_condition(ConditionType.ACCEPTED, "False", "InvalidSpec")
    assert "25 % of 2 replicas is 0.5 pods; attainable: 50" in told.message
    subject.until_condition(ConditionType.READY, "True")
    subject.change({"rollout": {"steps": None}})
    subject.until_condition(ConditionType.ACCEPTED, "True", "Valid")

    other = Subject(subject.stage, subject.namespace, "other-engine")
    other.apply({"engine": {"type": "vllm"}})
    assert "use native" in other.until_condition(ConditionType.ACCEPTED, "False", "UnsupportedEngine").message
    other.delete()


@story.chapter
def test_a_missing_model_is_named_and_waited_for(subject: Subject) -> None:
    late = Subject(subject.stage, subject.namespace, "late")
    late.apply({"model": {"uri": f"pvc://{CLAIM}/late"}})
    told = late.until_condition(ConditionType.READY, "False", "ModelCacheNotReady", 180)
    assert "/models/late: no such model directory" in told.message

    shutil.copytree(subject.stage.model(MODEL), subject.stage.models / "late")
    late.until_ready()
    assert late.restarts() == 0
    late.delete()


@story.chapter
def test_an_unreadable_checkpoint_is_named(subject: Subject) -> None:
    broken = shutil.copytree(subject.stage.model(MODEL), subject.stage.models / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])

    bad = Subject(subject.stage, subject.namespace, "broken")
    bad.apply({"model": {"uri": f"pvc://{CLAIM}/broken"}})
    told = bad.until_condition(ConditionType.READY, "False", "ModelCacheNotReady", 180)
    assert "model.safetensors: not a readable safetensors file" in told.message
    assert bad.restarts() == 0
    assert not [pod for pod in bad.pods() if "Traceback" in bad.kubectl("logs", pod["metadata"]["name"])]
    bad.delete()


@story.chapter
def test_a_script_without_a_candidate_ends_its_run_at_once(subject: Subject) -> None:
    subject.until("a plan", lambda now: now.drift.plans)
    empty = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": SCRIPT, "namespace": subject.namespace}}
    subject.kubectl("apply", "-f", "-", stdin=manifest({**empty, "data": {"README": "no candidates"}}))
    subject.change({"recompilation": {"proposer": {"type": "Scripted", "scriptConfigMap": SCRIPT}}})
    subject.trigger("bad")

    told = subject.until_condition(ConditionType.RECOMPILING, "False", RunOutcome.FAILED, 300)
    ((run, _, status),) = subject.runs()
    assert run in told.message
    succeeded = next(c for c in status.conditions if c.type == "Succeeded")
    assert "no *.py file in it" in succeeded.message


@story.chapter
def test_an_artifact_that_is_not_what_it_claims_is_refused(subject: Subject) -> None:
    source = candidates.slow()
    digest = "0" * 64
    claims = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"tkcc-artifact-{digest[:16]}"}}
    data = {"manifest.json": "{}", "candidate.py": source.text}
    subject.kubectl("apply", "--server-side", "-f", "-", stdin=manifest({**claims, "data": data}))
    subject.change({"rollout": {"artifact": digest}})
    told = subject.until_condition(ConditionType.ACCEPTED, "False", "ReferenceNotFound")
    assert f"tkcc-artifact-{digest[:16]}" in told.message
    subject.change({"rollout": {"artifact": ""}})
    subject.until_condition(ConditionType.ACCEPTED, "True", "Valid")


@story.chapter
def test_a_bad_trace_is_named_by_line(subject: Subject) -> None:
    trace = OUT / "bad-trace.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [1]}\n{"timestamp": "soon"}\n'
    )
    argv = [sys.executable, "-m", "tkcc", "traffic", "replay", str(trace), "--url", "http://127.0.0.1:1"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and f"{Path(trace).name}" in done.stderr and "2" in done.stderr
    assert "Traceback" not in done.stderr


@story.chapter
def test_the_good_one_serves_all_the_while(subject: Subject) -> None:
    subject.traffic.stop()
    subject.traffic.assert_all_answered(at_least=100)
    assert subject.restarts() == 0
    assert subject.status().stable.artifact == "baseline"


def _refusal(subject: Subject, *words: str, stdin: str) -> str:
    try:
        subject.kubectl(*words, stdin=stdin)
    except ClusterError as err:
        return str(err)
    raise AssertionError(f"let through: {stdin[:400]}")
