"""The thin parts of the demo that do not need a cluster to be wrong."""

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from e2e.cluster.errors import ClusterError
from e2e.demo import __main__ as demo
from e2e.demo.facts import Story
from e2e.demo.ground import BOOT_ID, Ground, image_values, parse_images
from e2e.demo.load import Load, pod_of, sending
from e2e.demo.setting import Subject, provide_weights
from e2e.demo.watch import Watcher
from tkcc.api.codec import to_dict
from tkcc.api.condition import Condition, ConditionStatus
from tkcc.api.report import Outcome, Report
from tkcc.api.run import CandidateCounts, CandidateSummary, RunSpec, RunStatus, Trigger
from tkcc.api.spec import ModelSpec
from tkcc.api.status import Revision, Source, Status
from tkcc.api.workload import Quantiles, Workload
from tkcc.kube.resources import CONFIG_MAP, INFERENCE_DEPLOYMENT, RECOMPILATION_RUN, Kind

REFERENCES = "operator=reg.example:5000/tkcc/op:1,engine=localhost/tkcc-engine:abc, worker=localhost/w:2"
BASELINE, FOR_A, FOR_B = "0" * 64, "a" * 64, "b" * 64


def test_images_are_named_by_part():
    images = parse_images(REFERENCES)
    values = image_values(Ground(Path("k"), images, "/opt/site"))
    assert values["image"]["operator"] == {"repository": "reg.example:5000/tkcc/op", "tag": "1"}
    assert values["image"]["engine"] == {"repository": "localhost/tkcc-engine", "tag": "abc"}
    assert values["settings"] == {"torchHostPath": "/opt/site"}


@pytest.mark.parametrize(
    "text", ["", "operator=a:1", REFERENCES.replace(":abc", ""), "operator=reg:5000/op,engine=e:1,worker=w:1"]
)
def test_an_image_without_a_tag_is_refused_with_an_example(text):
    with pytest.raises(ClusterError, match=r"TKCC_IMAGES has no image with a tag for .*: write operator="):
        parse_images(text)


def test_the_replay_pod_sends_the_trace_to_the_service_and_may_do_nothing_else():
    load = Load("A", Path("examples/traces/chat.jsonl.gz"), 0.125, 2.0, 600)
    pod = pod_of(load, "default", "localhost/w:2", "http://10.96.0.7")
    (container,) = pod["spec"]["containers"]
    words = " ".join(container["command"])
    assert "tkcc traffic replay /traces/chat.jsonl.gz --url http://10.96.0.7 --out -" in words
    assert "--length-factor 0.125 --time-factor 2.0" in words
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@pytest.mark.parametrize(
    "case, euid, missing, is_clean, want",
    [
        ("root on a kernel that confines candidates", 0, [], False, ""),
        ("not root", 1000, [], False, "needs root"),
        (
            "an old kernel",
            0,
            ["Landlock ABI >= 6 (this kernel: 2)"],
            False,
            "Landlock ABI >= 6 (this kernel: 2).\nBoot Linux 6.12",
        ),
        ("an old kernel is no reason not to clean up", 0, ["Landlock"], True, ""),
    ],
)
def test_a_machine_that_cannot_run_the_demo_is_refused_before_anything_is_built(
    monkeypatch, case, euid, missing, is_clean, want
):
    monkeypatch.setattr("os.geteuid", lambda: euid)
    monkeypatch.setattr(demo.sandbox, "missing_features", lambda: missing)
    said = demo.unfit(is_clean=is_clean)
    assert want in said and bool(want) == bool(said)


def _program_in(folder: Path, name: str, says: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\necho {says}\n")
    (folder / name).chmod(0o755)


def test_a_given_cluster_is_reached_with_the_programs_of_its_user(monkeypatch, tmp_path):
    for name in ("kubectl", "helm"):
        _program_in(tmp_path, name, f"my-{name}")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    given = Ground(tmp_path / "kubeconfig", parse_images(REFERENCES), is_given=True)
    assert (given.kubectl("get", "pods"), given.helm("list")) == ("my-kubectl\n", "my-helm\n")
    assert given.follow("logs")[0] == str(tmp_path / "kubectl")


class Nodes(Ground):
    """A given cluster without the claim, on these nodes; what is applied is kept."""

    def __init__(self, boot_ids: list[str], applied: list[dict]) -> None:
        super().__init__(Path("k"), parse_images(REFERENCES), is_given=True)
        object.__setattr__(self, "nodes", [{"status": {"nodeInfo": {"bootID": boot_id}}} for boot_id in boot_ids])
        object.__setattr__(self, "applied", applied)

    def kubectl(self, *words: str, stdin: str | None = None, deadline_s: float = 1.0) -> str:
        if words[0] == "apply":
            self.applied.extend(json.loads(stdin)["items"])
        return json.dumps({"items": self.nodes}) if words[:2] == ("get", "nodes") else ""


def test_files_of_this_machine_are_mounted_only_on_nodes_that_are_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("TKCC_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    here, applied = BOOT_ID.read_text().strip(), []
    with pytest.raises(ClusterError, match=r"create claim smollm2 in namespace default first"):
        provide_weights(Nodes([here, "another"], applied), Subject.read(), model)
    assert applied == []
    provide_weights(Nodes([here], applied), Subject.read(), model)
    [volume, claim] = applied
    assert claim["metadata"]["name"] == "smollm2"
    assert (Path(volume["spec"]["hostPath"]["path"]) / "smollm2-135m-instruct" / "config.json").is_file()


class Shell(Ground):
    """A ground whose pods always run and whose logs never end."""

    def kubectl(self, *words: str, stdin: str | None = None, deadline_s: float = 1.0) -> str:
        return "Running"

    def follow(self, *words: str) -> list[str]:
        return ["sh", "-c", "echo $$; while :; do echo more; sleep 0.2; done"]


async def test_a_story_that_breaks_off_leaves_no_follower_behind(tmp_path):
    load = Load("A", Path("examples/traces/chat.jsonl.gz"), 0.125, 2.0, 600)
    said: list[str] = []
    with pytest.raises(RuntimeError, match="broken off"):
        async with sending(
            Shell(tmp_path, parse_images(REFERENCES)), load, "default", "http://x", lambda _: None, said.append
        ):
            while not said:
                await asyncio.sleep(0.05)
            raise RuntimeError("broken off")
    assert not Path("/proc", said[0]).exists()


@dataclass
class Objects:
    """As much of tkcc.kube's Cluster as a watcher reads: objects by kind and name."""

    objects: dict[tuple[Kind, str], dict] = field(default_factory=dict)

    async def get(self, kind: Kind, namespace: str, name: str) -> Mapping | None:
        return self.objects.get((kind, name))

    async def list(self, kind: Kind, namespace: str) -> list:
        return [obj for (k, _), obj in self.objects.items() if k == kind]

    def deployment(self, **status) -> None:
        self.objects[INFERENCE_DEPLOYMENT, "smollm2"] = {"status": to_dict(Status(**status))}

    def run(self, name: str, status: RunStatus, *journal: dict) -> None:
        mean = Quantiles(200, 200, 200, 200)
        workload = Workload(mean, mean, mean, 400, 60, 60, 60)
        model = ModelSpec("pvc://weights/", "smollm2")
        spec = RunSpec("smollm2", workload, workload.digest, "baseline", Trigger.DRIFT, model)
        self.objects[RECOMPILATION_RUN, name] = {
            "metadata": {"name": name},
            "spec": to_dict(spec),
            "status": to_dict(status),
        }
        text = "".join(json.dumps(line) + "\n" for line in journal)
        self.objects[CONFIG_MAP, f"{name}-result"] = {"data": {"journal.jsonl": text}}


READY = Condition("Ready", ConditionStatus.TRUE, "AllReplicasReady", "2 of 2", 1)


def _verdict(digest: str, outcome: Outcome, log_gain: float, reload_s: float) -> dict:
    report = Report(digest, BASELINE, "fast", outcome, "because", log_gain=log_gain, reload_s=reload_s)
    return {"kind": "verdict", "stage": "screen", "report": to_dict(report)}


START = {"kind": "start", "at": 1.0, "campaign": {}}
ACCEPTED = _verdict(FOR_A, Outcome.ACCEPTED, 0.1, 0.7)


async def test_the_watcher_tells_each_thing_once_and_keeps_the_facts():
    objects, story, shown = Objects(), Story(), []
    watcher = Watcher(objects, "default", "smollm2", story, lambda: 5.0, shown.append)
    objects.deployment(conditions=(READY,), stable=Revision(digest=BASELINE))
    top = (CandidateSummary(FOR_A, "fast", "ACCEPTED", 90, "fewer copies"),)
    objects.run("r1", RunStatus(), START, ACCEPTED)
    await watcher.look()
    assert story.candidates == [], "told before the status says what the candidate is about"
    objects.run("r1", RunStatus(top=top), START, ACCEPTED)
    await watcher.look()
    first = len(shown)
    await watcher.look()
    assert len(shown) == first and len(story.looks) == 3
    assert [told.text for told in shown if told.topic == "verdict"] == [
        "fast screen aaaaaaaaaa ACCEPTED +9.5 % time saved: fewer copies"
    ]
    assert [(c.reload_s, c.gain_milli, c.stage) for c in story.candidates] == [(0.7, 95, "screen")]
    assert story.revisions == [BASELINE]

    ended = Condition("Succeeded", ConditionStatus.TRUE, "SearchSucceeded", "1 accepted", 1)
    objects.run(
        "r1", RunStatus(candidates=CandidateCounts(2, 1, 1), top=top, artifact=FOR_A, conditions=(ended,)),
        START, ACCEPTED, _verdict(FOR_B, Outcome.WRONG, 0.0, 0.0),
    )  # fmt: skip
    objects.deployment(conditions=(READY,), stable=Revision(FOR_A, "aaaa", FOR_A, Source.RUN, "r1"))
    await watcher.look()
    assert [(c.digest, c.outcome) for c in story.candidates] == [(FOR_A, "ACCEPTED"), (FOR_B, "WRONG")]
    assert [(run.name, run.workload, run.outcome) for run in story.runs] == [("r1", "A", "SearchSucceeded")]
    assert (story.revisions, story.compiled_for) == ([BASELINE, FOR_A], {FOR_A: "A"})
    texts = [told.text for told in shown]
    assert len(texts) == len(set(texts)), "something was told twice"


async def test_a_run_belongs_to_the_workload_that_was_being_sent_when_it_started():
    objects, story = Objects(), Story()
    watcher = Watcher(objects, "default", "smollm2", story, lambda: 5.0, lambda told: None)
    objects.run("r1", RunStatus())
    await watcher.look()
    watcher.workload = "B"
    objects.run("r2", RunStatus())
    await watcher.look()
    assert {name: run.workload for name, run in watcher.view.runs.items()} == {"r1": "A", "r2": "B"}
