"""The safety rules, one by one."""

from datetime import timedelta

import pytest

from tkcc.api.fields import BASELINE
from tkcc.api.run import RunOutcome
from tkcc.api.status import Phase, Source
from tkcc.control.actions import EnsureCanary, EnsureRun, EnsureRunEnded, EnsureStable, EnsureWeight
from tkcc.control.simulation import Behaviour, Load, RunScript

MINUTE = timedelta(minutes=1)
HOME, AWAY, FAR = (Load(60, prompt_tokens=n) for n in (1000, 3000, 9000))


def script(artifact="", minutes=2, outcome=RunOutcome.SEARCH_SUCCEEDED):
    return RunScript(after=minutes * MINUTE, outcome=outcome, artifact=artifact)


PHASES = [Phase.RECOMPILING, Phase.WARMING, Phase.CANARY, Phase.PROMOTING]


@pytest.mark.parametrize("phase", PHASES)
def test_rule_1_serving_never_depends_on_the_operator(story, names, phase):
    """With no turn at all from the entry to any phase on, every request is still served."""
    s = story(scripts=[script(names[0])])
    s.establish()
    s.drift()
    s.until_phase(phase)
    failed = s.failed
    for _ in range(12):
        s.world.advance(10 * timedelta(seconds=1))
    assert s.failed == failed
    s.run(30, lambda s: s.status.stable.artifact == names[0])


def test_rule_1_serving_never_depends_on_a_run(story):
    s = story(scripts=[script(outcome=RunOutcome.FAILED)])
    s.establish()
    s.drift()
    s.run(30)
    assert s.condition("Ready").status == "True", "a failed run does not flip Ready"
    pods = {p.name for p in s.world.stable.pods}
    assert pods == {f"stable-{n}" for n in range(1, 5)}, "no pod was touched"


def test_rule_2_drift_before_the_canary_supersedes_the_run(story, names):
    fast, other = names
    s = story(scripts=[script(fast, minutes=25), script(other)])
    s.establish()
    s.drift(AWAY)
    s.world.load = FAR
    s.run(15, lambda s: len(s.runs) == 2)
    first, second = sorted(s.runs.values(), key=lambda r: r.created_at)
    assert first.result.outcome is RunOutcome.SUPERSEDED
    assert second.spec.workload.prompt_tokens.mean == pytest.approx(9000, rel=0.15)
    s.run(30, lambda s: s.status.stable.artifact == other)


def test_rule_2_no_supersede_where_no_run_could_follow(story, names):
    s = story({"drift": {"maxRunsPerDay": 1}}, scripts=[script(names[0], minutes=20)])
    s.establish()
    s.drift(AWAY)
    s.world.load = FAR
    s.run(15)
    assert s.status.phase is Phase.RECOMPILING


def test_rule_2_drift_during_the_canary_is_queued(story, names):
    fast, other = names
    s = story({"drift": {"cooldown": "1m"}}, scripts=[script(fast), script(other)])
    s.establish()
    s.drift(AWAY)
    s.until_phase(Phase.CANARY)
    s.world.load = FAR
    s.run(30, lambda s: s.status.phase is Phase.SERVING and s.status.stable.artifact == fast)
    assert len(s.runs) == 1, "the rollout ends first"
    s.run(40, lambda s: s.status.stable.artifact == other)


def test_rule_2_nothing_counts_as_drift_during_a_rollout(story, names):
    s = story({"rollout": {"approval": "BeforePromote", "artifact": ""}})
    s.add_artifact(names[0])
    s.establish()
    s.change({"rollout": {"artifact": names[0]}})
    s.until_phase(Phase.CANARY)
    s.world.load = AWAY
    s.run(15)
    drift = s.status.drift
    assert s.status.phase is Phase.CANARY and drift.long_distance_milli > 1000
    assert (drift.ticks, drift.drifted) == (0, False)
    assert "not looked at during a rollout" in s.condition("TrafficDrifted").message


@pytest.mark.parametrize("phase", [Phase.WARMING, Phase.CANARY])
@pytest.mark.parametrize(
    "case, patch",
    [
        ("another image", {"engine": {"image": "example.org/engine:2"}}),
        ("other steps", {"rollout": {"steps": [50]}}),
        ("other limits", {"rollout": {"analysis": {"minRequests": 30}}}),
    ],
)
def test_rule_3_a_spec_change_in_mid_canary_goes_back_to_stable_first(story, names, phase, case, patch):
    fast, _ = names
    s = story(scripts=[script(fast)])
    s.establish()
    s.drift()
    s.until_phase(phase)
    s.change(patch)
    actions = s.tick()
    assert s.status.phase is Phase.ROLLING_BACK and s.world.weight_pct == 0, case
    moves = [a for a in actions if isinstance(a, EnsureWeight | EnsureStable | EnsureCanary)]
    order = [type(a) for a in moves]
    assert order == ([EnsureWeight, EnsureStable] if phase is Phase.CANARY else [EnsureStable])
    assert EnsureStable(BASELINE, s.spec.replicas) in actions
    later = [a for a in s.tick() if isinstance(a, EnsureCanary)]
    assert [a.replicas for a in later] == [0], "its pods go once the reason is written down"
    s.run(5, lambda s: s.status.phase is Phase.SERVING)
    assert s.status.rolled_back == () and s.condition("RolloutHealthy").status == "Unknown"
    s.run(30, lambda s: s.status.stable.artifact == fast)
    assert len(s.runs) == 1, "what was found is not searched again"


@pytest.mark.parametrize(
    "case, sizes",
    [
        ("grows", [8]),
        ("shrinks to where a step cannot be made exactly", [3]),
        ("shrinks to where all steps are one", [2]),
        ("goes to and fro, as by an autoscaler", [6, 4] * 20),
    ],
)
def test_rule_3_another_size_in_mid_canary_goes_on_at_the_same_step(story, names, case, sizes):
    s = story(scripts=[script(names[0])])
    s.establish()
    s.drift()
    s.until_phase(Phase.CANARY)
    for replicas in sizes:
        if s.status.phase is Phase.SERVING:
            break
        s.change({"replicas": replicas})
        s.run(3)
        pods = [p for d in (s.world.stable, s.world.canary) for p in d.pods if p.is_ready and p.in_service]
        assert len(pods) == replicas, "clients get the new size at once"
    s.run(30, lambda s: s.status.stable.artifact == names[0])
    assert s.reasons().count("CanaryStarted") == 1 and s.status.rolled_back == (), case


def test_rule_3_a_size_without_room_for_a_canary_ends_it(story, names):
    s = story(scripts=[script(names[0])])
    s.establish()
    s.drift()
    s.until_phase(Phase.CANARY)
    s.change({"replicas": 1})
    s.run(2)
    assert s.status.rollout.abort_reason == "InvalidSpec" and s.world.weight_pct == 0


UNRELATED = [
    {"drift": {"cooldown": "3h"}},
    {"recompilation": {"triggerToken": "later"}},
    {"rollout": {"approval": "BeforePromote"}},
    {"recompilation": {"mode": "RecommendOnly"}},
]


@pytest.mark.parametrize("patch", UNRELATED, ids=str)
def test_rule_3_a_change_that_no_pod_sees_leaves_the_canary_alone(story, names, patch):
    s = story(scripts=[script(names[0])])
    s.establish()
    s.drift()
    s.until_phase(Phase.CANARY)
    s.change(patch)
    s.tick()
    assert s.status.phase is Phase.CANARY


def test_rule_4_what_failed_is_remembered_until_workload_or_incumbent_changes(story, names):
    fast, other = names
    s = story({"drift": {"cooldown": "1m"}}, behaviours={fast: Behaviour(3.0), other: Behaviour(0.7)})
    s.world.scripts += [script(fast), script(other)]
    s.establish()
    s.drift()
    s.run(30)
    (attempt,) = s.status.recompilation.attempts
    assert (attempt.artifact, attempt.reason, attempt.incumbent) == (fast, "LatencyExceeded", BASELINE)
    assert len(s.runs) == 1 and [r.artifact for r in s.status.rolled_back] == [fast]
    assert s.condition("Recompiling").reason == "AlreadyTried"
    s.add_artifact(other)
    s.change({"rollout": {"artifact": other}})  # another incumbent
    s.run(20, lambda s: s.status.stable.artifact == other)
    s.world.load = HOME
    s.run(30, lambda s: len(s.runs) == 2)


def test_rule_4_a_run_that_finds_what_was_rolled_back_ends_there(story, names):
    fast, _ = names
    s = story({"drift": {"cooldown": "1m"}}, behaviours={fast: Behaviour(3.0)}, scripts=[script(fast), script(fast)])
    s.establish()
    s.drift()
    s.run(30)
    s.world.load = FAR
    s.run(40)
    assert len(s.runs) == 2 and s.reasons().count("CanaryStarted") == 1
    assert s.status.candidate is None and s.status.recompilation.attempts[-1].artifact == fast


def test_rule_5_drift_clears_below_seven_tenths_and_not_at_one(story):
    s = story({"recompilation": {"mode": "Disabled"}})
    s.establish()
    s.drift()
    s.world.load = Load(60, prompt_tokens=1220)  # distance 0.9: within, but at the edge
    s.run(20)
    assert s.status.drift.long_distance_milli < 1000 and s.condition("TrafficDrifted").status == "True"
    s.world.load = Load(60, prompt_tokens=1100)
    s.run(15, lambda s: s.condition("TrafficDrifted").status == "False")


def test_rule_5_at_the_edge_the_condition_does_not_flap(story):
    s = story({"recompilation": {"mode": "Disabled"}})
    s.establish()
    flips, before = 0, "False"
    for minute in range(80):
        s.world.load = Load(60, prompt_tokens=1350 if minute % 16 < 8 else 1200)
        s.run(1)
        now = s.condition("TrafficDrifted").status
        flips, before = flips + (now != before), now
    assert flips == 1


@pytest.mark.parametrize(
    "case, outcome, num_plans",
    [
        ("no improvement re-bases", RunOutcome.NO_IMPROVEMENT, 2),
        ("a failure does not", RunOutcome.FAILED, 1),
        ("an exhausted budget does not", RunOutcome.BUDGET_EXHAUSTED, 1),
    ],
)
def test_rule_5_plans_change_only_with_a_promotion_or_no_improvement(story, case, outcome, num_plans):
    s = story(scripts=[script(outcome=outcome)])
    s.establish()
    s.drift()
    s.run(15)
    assert len(s.status.drift.plans) == num_plans, case


def test_rule_6_traffic_that_swings_is_served_from_known_artifacts(story, names):
    fast, other = names
    day, night = AWAY, FAR
    each = {fast: Behaviour(0.7, home_tokens=3000), other: Behaviour(0.7, home_tokens=9000)}
    s = story({"drift": {"cooldown": "1m"}}, behaviours=each).promoted(fast, day)
    s.world.scripts.append(script(other))
    for swing in range(4):
        s.world.load = night if swing % 2 == 0 else day
        want = other if swing % 2 == 0 else fast
        s.run(40, lambda s, want=want: s.status.stable.artifact == want and s.status.phase is Phase.SERVING)
    assert len(s.runs) == 2 and s.status.stable.source is Source.REUSE


def test_no_two_runs_at_once(story, names):
    s = story({"drift": {"cooldown": "1m"}}, scripts=[script(minutes=20, outcome=RunOutcome.FAILED)] * 4)
    s.establish()
    s.world.load = AWAY
    for turn in range(240):
        if turn == 60:
            s.world.load = FAR
        if turn == 90:
            s.change({"recompilation": {"triggerToken": "now"}})
        actions = s.tick()
        started = [a.name for a in actions if isinstance(a, EnsureRun)]
        ended = [a.name for a in actions if isinstance(a, EnsureRunEnded)]
        open_runs = [r.name for r in s.runs.values() if r.finished_at is None]
        assert len(open_runs) <= 1, (started, ended)
