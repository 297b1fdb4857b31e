"""Resumes: whatever ends in the middle of a canary, or is changed under it, the story goes on where it was; or it goes
back to stable first, and then on."""

from e2e.stories import candidates
from e2e.stories.client import Mix
from e2e.stories.stage import Stage
from e2e.stories.subject import SMALL_CACHE, Subject, deploy
from e2e.stories.telling import Story
from tkcc.api.condition import ConditionType
from tkcc.api.status import Phase

A = Mix(prompt_tokens=(40, 90), shared_tokens=32, per_second=6.0)
GOOD = candidates.same()  # going back from it to the baseline must not look like a regression
ROLLOUT_S = 400.0

story: Story[Subject] = Story()


@story.given
def a_deployment_with_traffic(stage: Stage) -> Subject:
    subject = deploy(stage, "resumes", {"recompilation": {"mode": "Disabled"}})
    subject.until_ready()
    subject.send(A)
    return subject


@story.chapter
def test_the_api_server_is_restarted_in_mid_canary(subject: Subject) -> None:
    before = subject.uids()
    subject.adopt(GOOD)
    subject.until_phase(Phase.CANARY, ROLLOUT_S)
    with subject.stage.undisturbed:
        subject.stage.cluster.restart_apiserver()

    now = subject.until("promoted", lambda now: now if now.stable.artifact == GOOD.digest else None, ROLLOUT_S)
    assert now.rollout and not now.rollout.abort_reason
    assert {name: uid for name, uid in subject.uids().items() if name in before} == before
    assert "TrafficWeightUpdated" in dict(subject.events())


@story.chapter
def test_the_share_of_traffic_was_what_the_pods_make_it(subject: Subject) -> None:
    rollout = subject.status().rollout
    assert rollout
    (split,) = (metric for metric in rollout.analysis if metric.metric == "TrafficSplit")
    assert split.verdict == "Pass" and "50 %" in split.message


@story.chapter
def test_a_spec_change_in_mid_canary_goes_back_to_stable_first(subject: Subject) -> None:
    subject.until_phase(Phase.SERVING)
    subject.change({"rollout": {"artifact": "baseline"}})
    subject.until_phase(Phase.CANARY, ROLLOUT_S)
    subject.change({"engine": {"args": [*SMALL_CACHE, "--max-batch=8"]}})

    subject.until_phase(Phase.ROLLING_BACK)
    subject.until("all pods are stable's, with the new spec", lambda _: _args(subject, "stable") == [8, 8])
    assert "back to stable first" in dict(subject.events())["SpecChanged"]

    now = subject.until("promoted", lambda now: now if now.stable.artifact == "baseline" else None, ROLLOUT_S)
    assert now.rolled_back == ()
    assert _args(subject, "stable") == [8, 8]


@story.chapter
def test_suspend_in_mid_canary_goes_back_and_starts_over(subject: Subject) -> None:
    subject.until_phase(Phase.SERVING)
    subject.change({"rollout": {"artifact": GOOD.digest}})
    subject.until_phase(Phase.CANARY, ROLLOUT_S)
    subject.change({"suspend": True})

    subject.until_phase(Phase.SERVING)
    waits = subject.until_condition(ConditionType.CANDIDATE_AVAILABLE, "True", "Suspended")
    assert "spec.suspend is true" in waits.message
    assert subject.status().stable.artifact == "baseline"
    subject.stays("no canary", lambda now: now.phase is Phase.SERVING, for_s=5)

    subject.change({"suspend": False})
    now = subject.until("promoted", lambda now: now if now.stable.artifact == GOOD.digest else None, ROLLOUT_S)
    assert now.rolled_back == ()


@story.chapter
def test_the_operator_dies_while_it_rolls_back(subject: Subject) -> None:
    subject.until_phase(Phase.SERVING)
    subject.adopt(candidates.wrong())
    subject.until_phase(Phase.ROLLING_BACK, ROLLOUT_S)
    subject.stage.kill_operator()

    subject.until_phase(Phase.SERVING)
    now = subject.status()
    assert [item.reason for item in now.rolled_back] == ["CorrectnessRegressed"]
    subject.until_ready()
    assert not subject.pods("canary")


@story.chapter
def test_every_request_was_answered(subject: Subject) -> None:
    subject.traffic.stop()
    subject.traffic.assert_all_answered(at_least=300)


def _args(subject: Subject, role: str) -> list[int]:
    """--max-batch of each pod in service, where it is set."""
    pods = [pod for pod in subject.pods(role) if pod["metadata"]["labels"].get("tkcc.dev/serving") == "true"]
    found = [word for pod in pods for word in pod["spec"]["containers"][0]["args"] if word.startswith("--max-batch")]
    return [int(word.partition("=")[2]) for word in found]
