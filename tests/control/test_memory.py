"""What is remembered and what goes: plans, attempts, runs and artifacts, each within its bound."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tkcc.api.codec import sha256_hex
from tkcc.api.run import RunOutcome
from tkcc.api.status import MAX_PLANS, Attempt, Phase, Plan, RecompilationStatus, RolledBack, Status
from tkcc.control.actions import EnsureArtifactGone, EnsureRunGone
from tkcc.control.history import runs_of_the_day, with_attempt, with_plan, with_rolled_back, with_start
from tkcc.control.reconcile import reconcile
from tkcc.control.simulation import START, Load, RunScript

MINUTE = timedelta(minutes=1)


def plan(n, artifact="baseline"):
    return Plan(f"{n:064x}", artifact, 1000 + n)


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, MAX_PLANS))
def test_plans_are_bounded_unique_and_keep_the_newest(added, limit):
    status = Status()
    for n in added:
        status = with_plan(status, plan(n), limit, START)
        digests = [p.workload_digest for p in status.drift.plans]
        assert len(digests) == len(set(digests)) <= limit
        assert digests[-1] == plan(n).workload_digest


def test_of_too_many_plans_those_that_serve_stay():
    status = with_plan(Status(), plan(0), 3, START)
    for n in range(1, 6):
        status = with_plan(status, plan(n, "a" * 64), 3, START)
    assert [p.prompt_tokens for p in status.drift.plans] == [1000, 1004, 1005]


@given(st.lists(st.integers(0, 40), max_size=60))
def test_attempts_and_rolled_back_artifacts_are_bounded_and_unique(added):
    status = Status()
    for n in added:
        status = with_attempt(status, Attempt(f"{n:064x}", "baseline", 1000))
        status = with_rolled_back(status, RolledBack(f"{n:064x}", "LatencyExceeded", START))
        for items in (status.recompilation.attempts, status.rolled_back):
            assert len(items) <= MAX_PLANS and len(set(items)) == len(items)


def test_runs_of_the_day_forget_yesterday():
    recompilation = RecompilationStatus()
    for hour in (0, 10, 20, 30):
        recompilation = with_start(recompilation, f"run-{hour}", START + timedelta(hours=hour))
    assert recompilation.started_at == tuple(START + timedelta(hours=hour) for hour in (10, 20, 30))
    assert len(runs_of_the_day(recompilation, START + timedelta(hours=35))) == 2


def test_finished_runs_beyond_the_limit_go_oldest_first(story):
    ends = [RunScript(after=MINUTE, outcome=RunOutcome.NO_IMPROVEMENT)] * 9
    patch = {"drift": {"maxRunsPerDay": 9}, "recompilation": {"runHistoryLimit": 2}}
    s = story(patch, scripts=ends)
    s.establish()
    names = []
    for token in "abcd":
        s.change({"recompilation": {"triggerToken": token}})
        s.until_phase(Phase.RECOMPILING, 5)
        names.append(s.status.recompilation.active_run)
        s.until_phase(Phase.SERVING, 5)
        s.run(1)
    assert sorted(s.runs) == sorted(names[-2:])


def test_a_run_under_way_is_never_collected(story):
    s = story({"recompilation": {"runHistoryLimit": 1}}, scripts=[RunScript(after=5 * MINUTE)])
    s.establish()
    s.drift()
    assert not [a for _ in range(6) for a in s.tick() if isinstance(a, EnsureRunGone)]


def test_artifacts_that_nothing_refers_to_go_and_only_ours(story):
    s = story({"rollout": {"revisionHistoryLimit": 2}})
    s.establish()
    ours, theirs = [sha256_hex(f"ours {n}") for n in range(5)], sha256_hex("theirs")
    for digest in ours:
        s.add_artifact(digest, is_owned=True)
        s.world.now += MINUTE
    s.add_artifact(theirs)
    plans = (*s.status.drift.plans, Plan("p" * 64, ours[0], 5000, 500))
    s.world.status = replace(s.status, drift=replace(s.status.drift, plans=plans))
    s.run(2)
    assert sorted(s.artifacts) == sorted([ours[0], ours[3], ours[4], theirs]), "a plan's, the newest two, and another's"


def test_nothing_is_collected_in_a_rollout(story, names):
    s = story({"rollout": {"revisionHistoryLimit": 1}}, scripts=[RunScript(after=MINUTE, artifact=names[0])])
    s.establish()
    s.drift()
    s.until_phase(Phase.CANARY)
    for n in range(5):
        s.add_artifact(sha256_hex(f"idle {n}"), is_owned=True)
    assert not [a for _ in range(3) for a in s.tick() if isinstance(a, EnsureArtifactGone)]


def test_the_candidates_own_artifact_survives_its_rollout(story, names):
    s = story({"rollout": {"revisionHistoryLimit": 1}}).promoted()
    s.run(10)
    assert names[0] in s.artifacts


WRONG = [
    ({"model_digest": "d" * 64}, "made for model"),
    ({"engine_version": "0.9"}, "made for engine 0.9"),
    ({"dtype": "bfloat16"}, "made for dtype bfloat16"),
    ({"device": "NVIDIA H200"}, "made for device NVIDIA H200, the pods have no GPU"),
]


@pytest.mark.parametrize("difference, words", WRONG, ids=[w for _, w in WRONG])
def test_an_artifact_made_for_something_else_waits_and_says_why(story, names, difference, words):
    s = story()
    s.add_artifact(names[0])
    artifact = s.artifacts[names[0]]
    s.world.artifacts[names[0]] = replace(artifact, manifest=replace(artifact.manifest, **difference))
    s.establish()
    s.change({"rollout": {"artifact": names[0]}})
    s.run(2)
    offered = s.condition("CandidateAvailable")
    assert (offered.status, offered.reason) == ("False", "Incompatible") and words in offered.message
    assert s.canary is None


def test_a_plan_of_an_artifact_that_is_gone_is_not_used(story, names, no_improvement):
    s = story({"drift": {"cooldown": "1m"}}, scripts=[no_improvement])
    s.establish()
    gone = Plan("p" * 64, names[0], 3000, 500, "Promoted")
    s.world.status = replace(s.status, drift=replace(s.status.drift, plans=(*s.status.drift.plans, gone)))
    s.world.load = Load(60, prompt_tokens=3000)
    s.until_phase(Phase.RECOMPILING)
    assert s.status.candidate is None


def test_a_candidate_waits_for_a_stable_that_is_whole(story, names):
    s = story(start_time=3 * MINUTE)
    s.add_artifact(names[0])
    s.run(8)
    s.change({"engine": {"image": "example.org/engine:2"}, "rollout": {"artifact": names[0]}})
    s.run(2)
    assert s.status.phase is Phase.SERVING and s.condition("CandidateAvailable").reason == "ReplicasNotReady"
    s.until_phase(Phase.WARMING, 5)


def test_a_stable_of_unknown_content_is_not_whole(story, names):
    """Admin ports that do not answer: pods may be ready, but nobody knows what they run."""
    s = story()
    s.add_artifact(names[0])
    s.run(3)
    s.change({"rollout": {"artifact": names[0]}})
    seen = s.world.observe()
    silent = tuple(replace(pod, artifact_digest="", baseline_digest="") for pod in seen.stable.pods)
    _, status = reconcile(s.spec, s.status, replace(seen, stable=replace(seen.stable, pods=silent)))
    assert status.phase is Phase.SERVING and status.candidate is not None
