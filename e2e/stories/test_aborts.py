"""Aborts: an artifact brought in by hand that is wrong, or slow, loses its traffic before it can do harm."""

from datetime import UTC

from e2e.stories import candidates
from e2e.stories.client import Mix
from e2e.stories.stage import Stage
from e2e.stories.subject import Subject, deploy
from e2e.stories.telling import Story
from tkcc.api.condition import ConditionType
from tkcc.api.status import Phase

SHORT = Mix(prompt_tokens=(40, 90), shared_tokens=32, per_second=8.0)
LEAVES_WITHIN_S = 5.0

story: Story[Subject] = Story()


@story.given
def a_deployment_with_traffic(stage: Stage) -> Subject:
    subject = deploy(stage, "aborts")
    subject.until_ready()
    subject.send(SHORT)
    return subject


@story.chapter
def test_a_wrong_artifact_never_answers_a_request(subject: Subject) -> None:
    wrong = candidates.wrong()

    subject.adopt(wrong)

    told = subject.until_condition(ConditionType.ROLLOUT_HEALTHY, "False", "CorrectnessRegressed")
    assert "greedy tokens" in told.message
    now = subject.until_phase(Phase.SERVING)
    assert now.stable.artifact == "baseline"
    assert [item.artifact for item in now.rolled_back] == [wrong.digest]
    assert wrong.fingerprint not in {one.fingerprint for one in subject.traffic.answered()}


@story.chapter
def test_a_slow_artifact_loses_its_traffic_at_once(subject: Subject) -> None:
    slow = candidates.slow()

    with subject.stage.undisturbed:  # an operator that is killed meanwhile would be late for another reason
        subject.adopt(slow)
        told = subject.until_condition(ConditionType.ROLLOUT_HEALTHY, "False", "LatencyExceeded", deadline_s=240)
    assert "limit 2.50" in told.message

    now = subject.until_phase(Phase.SERVING)
    assert now.rollout
    failed_at_s = now.rollout.step_since.astimezone(UTC).timestamp()  # whole seconds, rounded down: the strict side
    started_s = [one.started_at_s for one in subject.traffic.answered() if one.fingerprint == slow.fingerprint]
    assert started_s, "the canary had no traffic: this proves nothing"
    late = [at_s - failed_at_s for at_s in started_s if at_s > failed_at_s + LEAVES_WITHIN_S]
    assert not late, f"{len(late)} requests reached it up to {max(late):.1f} s after the failing sample"


@story.chapter
def test_stable_serves_on(subject: Subject) -> None:
    since_s = max(one.started_at_s for one in subject.traffic.answered())
    subject.until_condition(ConditionType.READY, "True")
    subject.stage.until(
        "20 more requests are answered", lambda: len(subject.traffic.answered(since_s=since_s)) >= 20, 60
    )
    assert len({one.fingerprint for one in subject.traffic.answered(since_s=since_s)}) == 1
    subject.traffic.assert_all_answered(at_least=60)


@story.chapter
def test_the_same_artifacts_are_not_tried_again(subject: Subject) -> None:
    now = subject.status()
    assert {item.reason for item in now.rolled_back} == {"CorrectnessRegressed", "LatencyExceeded"}
    subject.stays("no rollout is under way", lambda now: now.phase is Phase.SERVING, for_s=5)
    subject.traffic.stop()  # others need the machine
