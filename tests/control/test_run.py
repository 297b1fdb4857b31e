"""One RecompilationRun: how it ends, and that it ends once."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tkcc.api.codec import from_dict, from_json, to_json
from tkcc.api.condition import Condition, ConditionStatus, find_condition, set_condition
from tkcc.api.run import CandidateCounts, RunOutcome, RunResult, RunSpec, RunStatus, run_name
from tkcc.control.actions import EmitEvent, EnsureRunTornDown, EnsureRunWorkers
from tkcc.control.observed import RunObserved, TierSeen
from tkcc.control.run import MAX_TIER_RESTARTS, reconcile_run
from tkcc.control.simulation import START

FOUND = "f" * 64
FLAT = {"mean": 1, "p50": 1, "p90": 1, "p99": 1}
SPEC = from_dict(
    RunSpec,
    {
        "deployment": "demo",
        "workload": {
            "promptTokens": FLAT,
            "outputTokens": FLAT,
            "concurrency": FLAT,
            "hitRatioMilli": 0,
            "requestsPerMinute": 1,
            "windowS": 60,
            "numRequests": 1,
        },
        "workloadDigest": "a" * 64,
        "incumbent": "baseline",
        "trigger": "Drift",
        "model": {"uri": "pvc://w", "name": "m"},
        "budget": {"maxDuration": "20m"},
    },
)
READY = (TierSeen("fast", True), TierSeen("slow", True))
RUNNING, BROKEN = ("Unknown", "FastTierRunning"), ("False", "TierPodFailed")


def fast_tier(is_ready, restarts, problem):
    return (TierSeen("fast", is_ready, restarts, problem), READY[1])


def seen(minute=1, **fields):
    fields = {"tiers": READY, "job_exists": True, "leftovers": True} | fields
    return RunObserved(START + minute * timedelta(minutes=1), "run", 1, START, **fields)


def result(outcome=RunOutcome.SEARCH_SUCCEEDED, artifact=FOUND):
    return RunResult(outcome, "20 % faster", artifact, CandidateCounts(5, 1, 4), 200, 150, 250)


NOTHING = result(RunOutcome.NO_IMPROVEMENT, "")


def succeeded(status):
    found = find_condition(status.conditions, "Succeeded")
    return (found.status.value, found.reason) if found else None


@pytest.mark.parametrize(
    "case, fields, want",
    [
        ("just made", {"tiers": (), "job_exists": False}, ("Unknown", "Starting")),
        ("tiers load", {"tiers": (TierSeen("fast", False), TierSeen("slow", False))}, ("Unknown", "Starting")),
        ("the fast tier works", {}, ("Unknown", "FastTierRunning")),
        ("found", {"result": result(), "source_digest": FOUND}, ("True", "SearchSucceeded")),
        ("found, but the source is another", {"result": result(), "source_digest": "e" * 64}, ("False", "Failed")),
        ("found, but there is no source", {"result": result()}, ("False", "Failed")),
        ("found, but names nothing", {"result": result(artifact="")}, ("False", "Failed")),
        ("nothing better", {"result": result(RunOutcome.NO_IMPROVEMENT, "")}, ("False", "NoImprovement")),
        ("all wrong", {"result": result(RunOutcome.CORRECTNESS_FAILED, "")}, ("False", "CorrectnessFailed")),
        ("an unreadable result", {"result_error": "bad JSON"}, ("False", "Failed")),
        ("the Job failed", {"job_failed": "BackoffLimitExceeded"}, ("False", "Failed")),
        ("the Job ended without a result", {"job_succeeded": True}, ("False", "Failed")),
        ("a result counts though the Job failed", {"result": NOTHING, "job_failed": "x"}, ("False", "NoImprovement")),
        ("at its budget the worker may still write", {"minute": 27}, ("Unknown", "FastTierRunning")),
        ("past its budget it is over", {"minute": 29}, ("False", "BudgetExhausted")),
        ("one tier death is nothing", {"tiers": fast_tier(False, 1, "OOMKilled")}, RUNNING),
        ("a tier that keeps dying", {"tiers": fast_tier(True, MAX_TIER_RESTARTS, "OOMKilled")}, BROKEN),
        ("a tier may take its time", {"minute": 4, "tiers": fast_tier(False, 0, "ContainerCreating")}, RUNNING),
        ("a tier that cannot start", {"minute": 6, "tiers": fast_tier(False, 0, "ImagePullBackOff")}, BROKEN),
        ("a worker may take its time", {"minute": 4, "worker_problem": "ErrImagePull"}, RUNNING),
        ("a worker that cannot start", {"minute": 6, "worker_problem": "ErrImagePull"}, ("False", "Failed")),
    ],
)  # fmt: skip
def test_how_it_ends(case, fields, want):
    actions, status = reconcile_run(SPEC, RunStatus(), seen(**fields))
    assert succeeded(status) == want, case
    if want[0] == "Unknown":
        assert actions == (EnsureRunWorkers(),) and status.finished_at is None
    else:
        [told] = actions
        assert isinstance(told, EmitEvent) and status.finished_at is not None
        assert reconcile_run(SPEC, status, seen(**fields)) == ((EnsureRunTornDown(),), status)


def test_a_worker_that_has_begun_is_waited_for():
    _, status = reconcile_run(SPEC, RunStatus(tier="fast"), seen(6, worker_problem="0/3 nodes are available"))
    assert succeeded(status) == RUNNING


def test_what_was_found_is_shown():
    _, status = reconcile_run(SPEC, RunStatus(), seen(result=result(), source_digest=FOUND))
    assert (status.artifact, status.gain_milli, status.candidates.evaluated) == (FOUND, 200, 5)


def test_a_refused_artifact_is_not_shown():
    _, status = reconcile_run(SPEC, RunStatus(), seen(result=result(), source_digest="e" * 64))
    assert status.artifact == ""


@pytest.mark.parametrize(
    "evidence",
    [{"job_failed": "OOMKilled"}, {"tiers": fast_tier(True, MAX_TIER_RESTARTS, "OOMKilled")}],
    ids=["the Job failed", "a tier keeps dying"],
)
def test_a_kill_before_the_verdict_is_written_loses_no_evidence(evidence):
    """Whatever a turn did whose status was lost, the next one sees what that one saw, and says the same."""
    actions, first = reconcile_run(SPEC, RunStatus(), seen(3, **evidence))
    assert EnsureRunTornDown() not in actions and EnsureRunWorkers() not in actions
    _, again = reconcile_run(SPEC, RunStatus(), seen(4, **evidence))
    assert succeeded(again) == succeeded(first) != RUNNING


def test_once_ended_it_stays_ended_and_only_clears_up():
    _, ended = reconcile_run(SPEC, RunStatus(), seen(result=result(), source_digest=FOUND))
    for later in (seen(99), seen(99, job_failed="x"), seen(99, result=result(RunOutcome.FAILED, ""))):
        assert reconcile_run(SPEC, ended, later) == ((EnsureRunTornDown(),), ended)
    assert reconcile_run(SPEC, ended, seen(99, leftovers=False)) == ((), ended)


def test_the_first_turn_sets_every_condition():
    _, status = reconcile_run(SPEC, RunStatus(), seen())
    assert {c.type for c in status.conditions} == {"Admitted", "FastTierCompleted", "SlowTierCompleted", "Succeeded"}
    assert {c.observed_generation for c in status.conditions} == {1}


def worker_says(status, type_):
    told = Condition(type_, ConditionStatus.TRUE, "Completed", "3 winners")
    return replace(status, conditions=set_condition(status.conditions, told, START))


def test_what_the_worker_writes_is_kept_and_its_tier_is_told_once():
    _, status = reconcile_run(SPEC, RunStatus(), seen())
    status = worker_says(replace(status, candidates=CandidateCounts(3, 1, 2), tier="slow"), "FastTierCompleted")
    actions, new = reconcile_run(SPEC, status, seen(2))
    assert [a.reason for a in actions if isinstance(a, EmitEvent)] == ["TierCompleted"]
    assert new.candidates.evaluated == 3 and find_condition(new.conditions, "FastTierCompleted").message == "3 winners"
    assert succeeded(new) == ("Unknown", "SlowTierRunning")
    again, same = reconcile_run(SPEC, new, seen(2))
    assert same == new and again == (EnsureRunWorkers(),)


outcomes = st.builds(
    lambda outcome, artifact: result(outcome, artifact), st.sampled_from(RunOutcome), st.sampled_from(["", FOUND])
)
observations = st.builds(
    seen,
    minute=st.integers(0, 40),
    result=st.none() | outcomes,
    source_digest=st.sampled_from(["", FOUND]),
    job_failed=st.sampled_from(["", "x"]),
    job_succeeded=st.booleans(),
)


@given(st.lists(observations, max_size=12))
def test_it_ends_at_most_once_and_succeeds_only_with_its_artifact(story):
    status, ends = RunStatus(), []
    for observation in sorted(story, key=lambda o: o.now):
        _, status = reconcile_run(SPEC, status, observation)
        end = succeeded(status)
        if end and end[0] != "Unknown":
            ends.append(end)
        if end and end[0] == "True":
            assert status.artifact == FOUND
    assert len(set(ends)) <= 1
    assert from_json(RunStatus, to_json(status)) == status


def test_one_question_has_one_name():
    name = run_name("demo", "uid", "w", "baseline", "")
    assert name == run_name("demo", "uid", "w", "baseline", "") and name.startswith("demo-") and len(name) == 15
    others = {
        run_name("demo", *parts) for parts in [("u", "w", "b", ""), ("uid", "v", "b", ""), ("uid", "w", "b", "t")]
    }
    assert len(others | {name}) == 4
