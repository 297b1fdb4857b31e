"""A run through all that can befall it: traffic moves on under it, its Job and its tiers are killed. What it finds is
recommended and not rolled out, and may be adopted by a second deployment beside it."""

import json
from pathlib import Path

from e2e.stories import candidates
from e2e.stories.client import Mix
from e2e.stories.stage import Stage
from e2e.stories.subject import SCRIPT, Subject, deploy
from e2e.stories.telling import Story
from tkcc.api.condition import ConditionType
from tkcc.api.run import RunOutcome, Trigger
from tkcc.api.status import Phase
from tkcc.kube.resources import CONFIG_MAP, JOB, POD

A = Mix(prompt_tokens=(40, 90), shared_tokens=32, per_second=6.0)
B = Mix(prompt_tokens=(150, 230), shared_tokens=32, per_second=6.0)
C = Mix(prompt_tokens=(450, 600), shared_tokens=32, per_second=4.0)
FAST = candidates.fast()
RUN_S, ROLLOUT_S, DRIFT_S = 600.0, 400.0, 120.0

story: Story[Subject] = Story()


@story.given
def a_deployment_that_only_recommends(stage: Stage) -> Subject:
    spec = {"recompilation": {"mode": "RecommendOnly", "proposer": {"type": "Scripted", "scriptConfigMap": SCRIPT}}}
    subject = deploy(stage, "recommend", spec)
    subject.script(FAST, candidates.slow())
    subject.until_ready()
    subject.send(A)
    subject.until("a plan", lambda now: now.drift.plans)
    return subject


@story.chapter
def test_drift_during_a_run_supersedes_it(subject: Subject) -> None:
    subject.send(B)
    subject.until_condition(ConditionType.RECOMPILING, "True", deadline_s=DRIFT_S)
    ((first, spec, _),) = subject.runs()
    assert spec.trigger is Trigger.DRIFT

    subject.send(C)
    subject.until("a second run", lambda _: len(subject.runs()) == 2, RUN_S)
    ended = next(status for name, _, status in subject.runs() if name == first)
    succeeded = next(c for c in ended.conditions if c.type == "Succeeded")
    assert (succeeded.status, succeeded.reason) == ("False", RunOutcome.SUPERSEDED)
    assert "traffic moved on" in succeeded.message
    assert subject.runs()[-1][1].workload.prompt_tokens.mean > 2 * spec.workload.prompt_tokens.mean


@story.chapter
def test_a_killed_worker_goes_on_from_its_journal(subject: Subject) -> None:
    run = subject.runs()[-1][0]
    subject.until("a verdict is in the journal", lambda _: _verdicts(subject, run), RUN_S)
    known = _verdicts(subject, run)
    (pod,) = _pods(subject, run, "worker")
    for process in subject.stage.cluster.pod_processes(pod, subject.namespace):
        if b"worker" in Path(f"/proc/{process.pid}/cmdline").read_bytes():
            process.end()

    subject.until("a new worker is at work", lambda _: "going on from a journal" in _worker_log(subject, run, pod))
    assert _verdicts(subject, run)[: len(known)] == known


@story.chapter
def test_a_killed_tier_comes_back(subject: Subject) -> None:
    run = subject.runs()[-1][0]
    (pod,) = _pods(subject, run, "tier", "slow")
    subject.kubectl("delete", "pod", pod, "--now", "--wait=false")
    subject.until("another slow tier", lambda _: [p for p in _pods(subject, run, "tier", "slow") if p != pod])


@story.chapter
def test_the_run_ends_right_all_the_same(subject: Subject) -> None:
    recommended = subject.until_condition(ConditionType.CANDIDATE_AVAILABLE, "True", "RecommendOnly", RUN_S)
    assert f"set spec.rollout.artifact to {FAST.digest}" in recommended.message
    run, _, status = subject.runs()[-1]
    assert len(subject.runs()) == 2, "no blind retry"
    assert status.artifact == FAST.digest
    assert _verdicts(subject, run) == list(dict.fromkeys(_verdicts(subject, run))), "no verdict was given twice"
    subject.until("Job and tiers are gone", lambda _: not subject.stage.api.list(JOB, subject.namespace))


@story.chapter
def test_what_it_recommends_is_not_rolled_out(subject: Subject) -> None:
    subject.stays("stable is the baseline", lambda now: now.stable.artifact == "baseline" and not now.rollout, for_s=6)


@story.chapter
def test_two_deployments_do_not_disturb_each_other(subject: Subject) -> None:
    """A second one of the namespace adopts the artifact; the first one goes in the middle of a run."""
    second = Subject(subject.stage, subject.namespace, "second")
    second.apply({"recompilation": {"mode": "Disabled"}})
    second.until_ready()
    second.change({"rollout": {"artifact": FAST.digest}})
    second.send(C)

    subject.trigger("again")
    subject.until_phase(Phase.RECOMPILING)
    now = second.until("promoted", lambda now: now if now.stable.artifact == FAST.digest else None, ROLLOUT_S)
    assert now.recompilation.last_run == "" and not now.recompilation.started_at
    assert subject.status().stable.artifact == "baseline"


@story.chapter
def test_a_deployment_is_deleted_in_the_middle_of_a_run(subject: Subject) -> None:
    if subject.status().phase is not Phase.RECOMPILING:  # on a fast machine it has ended by now
        subject.trigger("once more")
        subject.until_phase(Phase.RECOMPILING)
    subject.traffic.stop()
    subject.traffic.assert_all_answered(at_least=100)
    subject.delete()
    subject.until_gone()


@story.chapter
def test_the_artifact_stays_for_those_who_use_it(subject: Subject) -> None:
    second = Subject(subject.stage, subject.namespace, "second")
    pods = {pod["metadata"]["name"] for pod in second.pods("stable")}
    second.kubectl("delete", "pod", sorted(pods)[0], "--wait=false")
    second.until("a new pod", lambda _: {pod["metadata"]["name"] for pod in second.pods("stable")} - pods)
    second.until_ready()
    assert second.status().stable.artifact == FAST.digest


def _pods(subject: Subject, run: str, component: str, tier: str = "") -> list[str]:
    labels = {"tkcc.dev/run": run, "app.kubernetes.io/component": component}
    pods = subject.stage.api.list(POD, subject.namespace, **labels, **({"tkcc.dev/tier": tier} if tier else {}))
    return [pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def _worker_log(subject: Subject, run: str, but: str) -> str:
    """Of the Job's pod that came after this one; "" while it has not started."""
    labels = {"tkcc.dev/run": run, "app.kubernetes.io/component": "worker"}
    for pod in subject.stage.api.list(POD, subject.namespace, **labels):
        if pod["metadata"]["name"] != but and pod["status"]["phase"] != "Pending":
            return subject.kubectl("logs", pod["metadata"]["name"])
    return ""


def _verdicts(subject: Subject, run: str) -> list[tuple[str, str, str]]:
    """(tier, stage, digest) of each verdict in the journal, oldest first."""
    result = subject.stage.api.get(CONFIG_MAP, subject.namespace, f"{run}-result") or {}
    lines = (result.get("data") or {}).get("journal.jsonl", "").splitlines()
    found = [json.loads(line) for line in lines]
    reports = [(line["stage"], line["report"]) for line in found if line["kind"] == "verdict"]
    return [(report["tier"], stage, report["digest"]) for stage, report in reports]
