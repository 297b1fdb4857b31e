"""Reuse: traffic moves from A to B and back to A, and what was compiled for A serves again without a new search.

On the way: runs replay what the pods recorded, which is in no file; and the operator is killed on entry to each phase.
"""

import base64
import gzip
import json
from collections import Counter
from datetime import timedelta

from e2e.stories import candidates
from e2e.stories.client import Answered, Mix
from e2e.stories.stage import Stage
from e2e.stories.subject import SCRIPT, Subject, deploy
from e2e.stories.telling import Story
from tkcc.api.codec import from_json
from tkcc.api.condition import ConditionType
from tkcc.api.run import RunSpec, Trigger
from tkcc.api.status import Phase, Source
from tkcc.api.workload import Recording
from tkcc.kube.resources import POD

SHARED_TOKENS, BLOCK_TOKENS = 32, 16
A = Mix(prompt_tokens=(40, 90), shared_tokens=SHARED_TOKENS, per_second=6.0)
B = Mix(prompt_tokens=(400, 600), shared_tokens=SHARED_TOKENS, per_second=4.0)
LIMIT_TOKENS = 200  # between the two
FOR_A, FOR_B = candidates.for_short(LIMIT_TOKENS), candidates.for_long(LIMIT_TOKENS)
RUN_S, ROLLOUT_S, DRIFT_S = 600.0, 400.0, 120.0

story: Story[Subject] = Story()


@story.given
def a_deployment_that_records(stage: Stage) -> Subject:
    spec = {
        "traffic": {"recording": {"enabled": True}},
        "recompilation": {"proposer": {"type": "Scripted", "scriptConfigMap": SCRIPT}, "runHistoryLimit": 1},
    }
    subject = deploy(stage, "reuse", spec)
    subject.script(FOR_A, FOR_B)
    subject.until_ready()
    subject.send(A)
    return subject


@story.chapter
def test_the_first_full_window_is_plan_0(subject: Subject) -> None:
    now = subject.until("a plan", lambda now: now if now.drift.plans else None)
    assert [(plan.artifact, plan.reason) for plan in now.drift.plans] == [("baseline", "FirstWindow")]
    assert 40 <= now.drift.plans[0].prompt_tokens <= 90
    assert "first full window" in subject.until_event("BaselineEstablished")


@story.chapter
def test_a_run_for_a_is_started_by_hand_though_the_operator_dies_as_it_begins(subject: Subject) -> None:
    subject.trigger("first")
    subject.until_phase(Phase.RECOMPILING)
    subject.stage.kill_operator()
    subject.until("the worker is at work", lambda _: _worker_log(subject) is not None)
    ((_, spec, _),) = subject.runs()
    assert (spec.trigger, spec.trigger_token, spec.incumbent) == (Trigger.TOKEN, "first", "baseline")


@story.chapter
def test_its_slow_tier_replays_what_was_recorded(subject: Subject) -> None:
    ((run, spec, _),) = subject.runs()
    recorded = _recording(subject, run)
    assert recorded.source == "recorded"
    _assert_was_sent(recorded, spec, subject.traffic.answered())

    said = f"slow tier: waiting for it, then calibrating on {len(recorded.requests)} requests"
    subject.until("the worker hands it to the slow tier", lambda _: said in (_worker_log(subject) or ""))


@story.chapter
def test_what_was_found_for_a_serves_though_the_operator_dies_in_each_phase(subject: Subject) -> None:
    before = subject.uids()
    subject.until_phase(Phase.WARMING, RUN_S)
    subject.stage.kill_operator()
    subject.until_phase(Phase.CANARY, ROLLOUT_S)
    subject.stage.kill_operator()
    subject.until_phase(Phase.PROMOTING, ROLLOUT_S)
    subject.stage.kill_operator()

    now = subject.until("promoted", lambda now: now if now.stable.artifact == FOR_A.digest else None, ROLLOUT_S)
    assert (now.stable.source, now.stable.run) == (Source.RUN, subject.runs()[0][0])
    assert now.rollout and not now.rollout.abort_reason
    assert len(subject.runs()) == 1
    assert {name: uid for name, uid in subject.uids().items() if name in before} == before


@story.chapter
def test_its_artifact_tells_what_it_was_measured_on(subject: Subject) -> None:
    ((run, _, _),) = subject.runs()
    data = subject.run_data(run, "result")["data"]
    assert json.loads(data["manifest.json"])["trafficSource"] == "recorded"
    cells = json.loads(data["report.json"])["tiers"]["slow"]["cells"]
    assert cells and all(cell["contextTokens"] <= max(A.prompt_tokens) + A.output_tokens for cell in cells)
    assert json.loads(data["result.json"])["gainLowMilli"] > 0


@story.chapter
def test_drift_to_b_starts_a_run_with_the_traffic_that_drifted(subject: Subject) -> None:
    subject.until_phase(Phase.SERVING)
    subject.send(B)
    drifted = subject.until_condition(ConditionType.TRAFFIC_DRIFTED, "True", deadline_s=DRIFT_S)
    assert "distance" in drifted.message

    subject.until("a second run", lambda _: len(subject.runs()) == 2)
    run, spec, _ = subject.runs()[-1]
    assert (spec.trigger, spec.incumbent) == (Trigger.DRIFT, FOR_A.digest)
    recorded = _recording(subject, run)
    _assert_was_sent(recorded, spec, subject.traffic.answered())
    assert min(request.prompt_tokens for request in recorded.requests) >= min(B.prompt_tokens)


@story.chapter
def test_what_was_found_for_b_serves(subject: Subject) -> None:
    now = subject.until("promoted", lambda now: now if now.stable.artifact == FOR_B.digest else None, RUN_S + ROLLOUT_S)
    assert now.stable.source is Source.RUN
    assert now.previous and now.previous.artifact == FOR_A.digest
    assert {plan.artifact for plan in now.drift.plans} >= {FOR_A.digest, FOR_B.digest}


@story.chapter
def test_back_at_a_its_artifact_serves_again_without_a_run(subject: Subject) -> None:
    subject.until_phase(Phase.SERVING)
    last_run = subject.status().recompilation.last_run
    subject.send(A)

    now = subject.until("promoted", lambda now: now if now.stable.artifact == FOR_A.digest else None, ROLLOUT_S)
    assert now.stable.source is Source.REUSE
    assert now.recompilation.last_run == last_run and len(now.recompilation.started_at) == 2
    assert "without a run" in dict(subject.events())["CandidateSelected"]
    assert now.rollout and now.rollout.total_steps == 1, "it went through the canary"


@story.chapter
def test_an_artifact_that_was_rolled_back_is_never_picked(subject: Subject) -> None:
    subject.until_phase(Phase.SERVING)
    subject.change({"drift": {"maxRunsPerDay": 2}})  # both are used: what happens now happens without a run
    subject.change({"rollout": {"artifact": FOR_B.digest}})  # which is slow on A
    subject.until_condition(ConditionType.ROLLOUT_HEALTHY, "False", "LatencyExceeded", ROLLOUT_S)
    subject.until_phase(Phase.SERVING)

    subject.send(B)
    held = subject.until_condition(ConditionType.RECOMPILING, "False", "RunsPerDayExhausted", DRIFT_S)
    assert "2 of 2 runs in 24 hours used; next run not before" in held.message
    subject.stays("it is not picked", lambda now: now.phase is Phase.SERVING and now.candidate is None, for_s=10)
    assert subject.status().stable.artifact == FOR_A.digest


@story.chapter
def test_every_request_was_answered(subject: Subject) -> None:
    subject.traffic.stop()
    subject.traffic.assert_all_answered(at_least=500)


def _worker_log(subject: Subject) -> str | None:
    """Of the newest worker that has said something; None before, and after the run was cleared away."""
    labels = {"app.kubernetes.io/component": "worker", "tkcc.dev/deployment": subject.name}
    for pod in subject.stage.api.list(POD, subject.namespace, **labels):
        if pod["status"]["phase"] != "Pending":
            return subject.kubectl("logs", pod["metadata"]["name"]) or None
    return None


def _recording(subject: Subject, run: str) -> Recording:
    packed = subject.run_data(run, "traffic")["binaryData"]["recording.json.gz"]
    return from_json(Recording, gzip.decompress(base64.b64decode(packed)))


def _assert_was_sent(recorded: Recording, spec: RunSpec, answered: list[Answered]) -> None:
    """Every recorded request is one that our clients sent in the run's window, with the prefix that they share."""
    assert spec.window_start and spec.window_end
    start_s, end_s = spec.window_start.timestamp(), spec.window_end.timestamp()
    slack_s = timedelta(seconds=2).total_seconds()  # status keeps whole seconds, and a request takes time to arrive
    sent = [one for one in answered if start_s - slack_s <= one.started_at_s <= end_s + slack_s]
    inside = [one for one in sent if start_s + slack_s <= one.started_at_s and one.ended_at_s <= end_s]
    lengths = Counter(request.prompt_tokens for request in recorded.requests)
    unknown = lengths - Counter(one.prompt_tokens for one in sent)
    assert not unknown, f"recorded and never sent: {unknown}"
    missing = Counter(one.prompt_tokens for one in inside) - lengths
    assert not missing, f"sent in the window and not recorded: {missing}"

    at_ms = [recorded.started_at_ms + request.arrival_ms for request in recorded.requests]
    assert at_ms == sorted(at_ms) and start_s - 1 <= at_ms[0] / 1000 and at_ms[-1] / 1000 <= end_s + 1
    shared = SHARED_TOKENS // BLOCK_TOKENS
    assert len({request.block_hashes[:shared] for request in recorded.requests}) == 1
    rests = [request.block_hashes[shared:] for request in recorded.requests if len(request.block_hashes) > shared]
    assert len(set(rests)) == len(rests)
