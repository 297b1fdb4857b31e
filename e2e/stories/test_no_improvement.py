"""No improvement, the commonest end: the reason is told, the workload counts as served as well as is known, nothing is
searched twice. Then the brakes, each with traffic that wants a run."""

from e2e.stories import candidates
from e2e.stories.client import Mix
from e2e.stories.stage import Stage
from e2e.stories.subject import SCRIPT, Subject, deploy
from e2e.stories.telling import Story
from tkcc.api.condition import Condition, ConditionType, find_condition
from tkcc.api.run import RunOutcome, Trigger
from tkcc.api.status import Phase, Status

A = Mix(prompt_tokens=(40, 90), shared_tokens=32, per_second=6.0)
B = Mix(prompt_tokens=(150, 230), shared_tokens=32, per_second=6.0)
C = Mix(prompt_tokens=(450, 600), shared_tokens=32, per_second=4.0)
RUN_S, DRIFT_S = 600.0, 120.0

story: Story[Subject] = Story()


@story.given
def a_deployment_whose_proposer_has_nothing_good(stage: Stage) -> Subject:
    subject = deploy(stage, "no-gain", {"recompilation": {"proposer": {"type": "Scripted", "scriptConfigMap": SCRIPT}}})
    subject.script(candidates.slow(), candidates.wrong())
    subject.until_ready()
    subject.send(A)
    subject.until("a plan", lambda now: now.drift.plans)
    return subject


@story.chapter
def test_a_run_that_finds_nothing_says_why(subject: Subject) -> None:
    subject.send(B)
    subject.until_condition(ConditionType.RECOMPILING, "True", deadline_s=DRIFT_S)

    ended = subject.until_condition(ConditionType.RECOMPILING, "False", "NoImprovement", RUN_S)
    ((run, spec, status),) = subject.runs()
    assert spec.trigger is Trigger.DRIFT
    assert f"run {run} ended with NoImprovement" in ended.message
    succeeded = next(c for c in status.conditions if c.type == "Succeeded")
    assert (succeeded.status, succeeded.reason) == ("False", RunOutcome.NO_IMPROVEMENT)
    assert "judged candidates beat the incumbent" in succeeded.message
    assert (status.candidates.evaluated, status.candidates.accepted, status.candidates.refused) == (2, 0, 2)
    assert {item.outcome for item in status.top} == {"FUTILE", "WRONG"}


@story.chapter
def test_its_workload_is_a_plan_and_is_not_searched_again(subject: Subject) -> None:
    now = subject.status()
    assert (now.stable.artifact, now.rollout) == ("baseline", None)
    (_, spec, _), *_ = subject.runs()
    rebased = next(plan for plan in now.drift.plans if plan.workload_digest == spec.workload_digest)
    assert (rebased.artifact, rebased.reason) == ("baseline", "NoImprovement")

    subject.until_condition(ConditionType.TRAFFIC_DRIFTED, "False", "WithinThreshold", DRIFT_S)
    subject.stays("no second run", lambda now: now.phase is Phase.SERVING and _runs(subject) == 1, for_s=20)


@story.chapter
def test_the_cooldown_holds_a_run_back(subject: Subject) -> None:
    subject.change({"drift": {"cooldown": "1h"}})
    subject.send(C)
    held = _held(subject, "CoolingDown")
    assert "the last run ended at" in held.message and "next run not before" in held.message


@story.chapter
def test_so_does_the_number_of_runs_a_day(subject: Subject) -> None:
    subject.change({"drift": {"cooldown": "0s", "maxRunsPerDay": 1}})
    held = _held(subject, "RunsPerDayExhausted")
    assert "1 of 1 runs in 24 hours used; next run not before" in held.message


@story.chapter
def test_not_even_a_person_gets_more_runs_a_day(subject: Subject) -> None:
    subject.trigger("please")
    _held(subject, "RunsPerDayExhausted")
    subject.trigger("")


@story.chapter
def test_so_do_suspend_and_mode(subject: Subject) -> None:
    subject.change({"suspend": True, "drift": {"maxRunsPerDay": 20}})
    _held(subject, "Suspended")
    subject.change({"suspend": False, "recompilation": {"mode": "Disabled"}})
    _held(subject, "Disabled")


@story.chapter
def test_an_idle_deployment_is_deleted_with_all_that_it_owns(subject: Subject) -> None:
    subject.traffic.stop()
    subject.traffic.assert_all_answered(at_least=100)
    subject.delete()
    subject.until_gone()


def _held(subject: Subject, reason: str) -> Condition:
    """A run is wanted and does not start, for this reason, for a while."""

    def says_so(now: Status) -> Condition | None:
        found = find_condition(now.conditions, ConditionType.RECOMPILING)
        is_held = found and (found.status, found.reason) == ("False", reason)
        return found if found and is_held and "a run is wanted and does not start" in found.message else None

    held = subject.until(f"a run is held, {reason}", says_so, DRIFT_S)
    before = _runs(subject)
    subject.stays("no run starts", lambda now: now.phase is Phase.SERVING and _runs(subject) == before, for_s=6)
    return held


def _runs(subject: Subject) -> int:
    return len(subject.runs())
