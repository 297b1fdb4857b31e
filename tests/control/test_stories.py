"""Whole stories in a simulated world: the loop closes, and each brake and way out ends with its reason."""

from dataclasses import replace
from datetime import timedelta

import pytest

from tkcc.api.fields import BASELINE
from tkcc.api.report import Verdict
from tkcc.api.run import RunOutcome, Trigger
from tkcc.api.spec import Mode
from tkcc.api.status import Phase, Source
from tkcc.control.actions import EnsureCanary, EnsureRun, EnsureStable, EnsureWeight
from tkcc.control.reconcile import reconcile
from tkcc.control.simulation import Behaviour, Load, RunScript

MINUTE = timedelta(minutes=1)
HOME = Load(requests_per_minute=60, prompt_tokens=1000)
AWAY = Load(requests_per_minute=60, prompt_tokens=3000)
FAR = Load(requests_per_minute=60, prompt_tokens=9000)


def script(artifact="", minutes=2, outcome=RunOutcome.SEARCH_SUCCEEDED):
    return RunScript(after=minutes * MINUTE, outcome=outcome, artifact=artifact)


def test_promotes(story, names):
    fast, _ = names
    s = story().promoted()
    assert s.phases == [
        Phase.SERVING,
        Phase.RECOMPILING,
        Phase.SERVING,
        Phase.WARMING,
        Phase.CANARY,
        Phase.PROMOTING,
        Phase.SERVING,
    ]
    assert s.weights[:3] == [0, 25, 50] and s.weights[-1] == 0
    assert (s.status.stable.artifact, s.status.stable.source, s.status.previous.artifact) == (
        fast,
        Source.RUN,
        BASELINE,
    )
    assert s.status.stable.speedup == "1.25x"
    assert [p.artifact for p in s.status.drift.plans] == [BASELINE, fast]
    assert s.sent > 500 and s.failed == 0
    wanted = ["BaselineEstablished", "TrafficDriftDetected", "RecompilationStarted", "CandidateSelected"]
    wanted += ["CanaryStarted", "TrafficWeightUpdated", "TrafficWeightUpdated", "CandidatePromoted"]
    assert s.reasons() == wanted
    s.run(30)
    assert len(s.runs) == 1 and s.status.phase is Phase.SERVING and not s.status.drift.drifted


def test_the_run_is_for_the_traffic_that_drifted(story):
    s = story()
    s.establish()
    s.drift()
    (run,) = s.runs.values()
    assert run.spec.trigger is Trigger.DRIFT and run.spec.incumbent == BASELINE
    assert run.spec.workload.prompt_tokens.mean == pytest.approx(3000, rel=0.1)
    assert run.spec.window_end - run.spec.window_start == 2 * MINUTE


SHORTER_TICKS = {"windows": {"long": "5m", "short": "4m"}}  # drift is seen while the short window is still mixed


@pytest.mark.parametrize("drift", [{}, SHORTER_TICKS], ids=["clean windows", "a mixed window"])
def test_reuse_goes_through_the_canary_without_a_run(story, names, drift):
    fast, other = names
    each = {fast: Behaviour(0.7, home_tokens=3000), other: Behaviour(0.7, home_tokens=9000)}
    s = story({"drift": {"cooldown": "1m", **drift}}, behaviours=each).promoted(fast, AWAY)
    s.scripts.append(script(other))
    s.world.load = FAR
    s.run(40, lambda s: s.status.stable.artifact == other)
    runs = len(s.runs)
    s.world.load = AWAY
    s.run(40, lambda s: s.status.stable.artifact == fast)
    assert len(s.runs) == runs == 2
    assert s.status.stable.source is Source.REUSE
    assert s.phases[-4:] == [Phase.WARMING, Phase.CANARY, Phase.PROMOTING, Phase.SERVING]


def test_a_first_window_was_compiled_for_nothing_and_is_searched_on_return(story, names, no_improvement):
    """Going back to the built-in pass because it once served this traffic would lose what was gained since."""
    s = story({"drift": {"cooldown": "1m"}}).promoted(names[0], AWAY)
    s.scripts.append(no_improvement)
    s.world.load = HOME
    s.run(20, lambda s: len(s.runs) == 2)
    assert s.status.stable.artifact == names[0] and s.reasons().count("CanaryStarted") == 1


def test_what_a_search_found_to_be_best_is_gone_back_to(story, names, no_improvement):
    """The baseline too, where a run has shown that nothing beats it."""
    each = {names[0]: Behaviour(0.7, home_tokens=9000)}
    s = story({"drift": {"cooldown": "1m"}}, behaviours=each, scripts=[no_improvement, script(names[0])])
    s.establish()
    s.world.load = AWAY
    s.run(20, lambda s: len(s.status.drift.plans) == 2)
    s.world.load = FAR
    s.run(40, lambda s: s.status.stable.artifact == names[0])
    s.world.load = AWAY
    s.run(40, lambda s: s.status.stable.artifact == BASELINE)
    assert len(s.runs) == 2 and s.status.stable.source is Source.REUSE


def test_an_artifact_that_was_rolled_back_is_not_reused(story, names):
    fast, other = names
    each = {fast: Behaviour(0.7, home_tokens=3000), other: Behaviour(0.7, home_tokens=9000)}
    s = story({"drift": {"cooldown": "1m"}}, behaviours=each).promoted(fast, AWAY)
    s.scripts.append(script(other))
    s.world.load = FAR
    s.run(40, lambda s: s.status.stable.artifact == other)
    s.world.behaviours[fast] = Behaviour(is_wrong=True)  # its plan still fits, its canary does not
    s.world.load = AWAY
    s.run(40, lambda s: s.status.rolled_back)
    s.settle()
    s.run(40)
    assert s.status.stable.artifact == other
    assert s.reasons().count("RolledBack") == 1
    assert s.reasons().count("CandidateSelected") == 3, "two found, one known: not chosen again and again"


def test_no_improvement_rebases_the_plan_and_is_not_searched_again(story, no_improvement):
    s = story({"drift": {"cooldown": "1m"}}, scripts=[no_improvement])
    s.establish()
    s.drift()
    s.run(30)
    assert len(s.runs) == 1
    assert [(p.artifact, p.reason) for p in s.status.drift.plans] == [
        (BASELINE, "FirstWindow"),
        (BASELINE, "NoImprovement"),
    ]
    assert not s.status.drift.drifted
    assert (s.condition("Recompiling").status, s.condition("Recompiling").reason) == ("False", "NoImprovement")


def test_the_same_code_found_again_is_no_improvement(story, names):
    s = story({"drift": {"cooldown": "1m"}}).promoted(names[0])
    s.scripts.append(script(names[0]))
    s.world.load = FAR
    s.run(30, lambda s: len(s.status.drift.plans) == 3)
    assert s.status.drift.plans[-1].reason == "NoImprovement" and s.status.stable.artifact == names[0]


ABORTS = [
    ("a wrong artifact never gets traffic", Behaviour(0.5, is_wrong=True), "CorrectnessRegressed", [0]),
    ("an artifact that crashes never gets traffic", Behaviour(crashes=True), "CanaryCrashed", [0]),
    ("a slow artifact loses its traffic", Behaviour(2.0), "LatencyExceeded", [0, 25, 0]),
    ("a failing artifact loses its traffic", Behaviour(error_ratio=0.4), "ErrorRateExceeded", [0, 25, 0]),
    ("an artifact that hangs loses its traffic", Behaviour(answers=False), "RequestsStalled", [0, 25, 0]),
]


@pytest.mark.parametrize("case, behaviour, reason, weights", ABORTS, ids=[a[0] for a in ABORTS])
def test_aborts(story, names, case, behaviour, reason, weights):
    digest = names[0]
    s = story(behaviours={digest: behaviour})
    s.add_artifact(digest)
    s.establish()
    s.change({"rollout": {"artifact": digest}})
    s.until_phase(Phase.ROLLING_BACK, 15)
    assert s.world.weight_pct == 0 and s.weights == weights
    s.settle()
    assert s.status.stable.artifact == BASELINE and [r.artifact for r in s.status.rolled_back] == [digest]
    healthy = s.condition("RolloutHealthy")
    assert (healthy.status, healthy.reason) == ("False", reason)
    assert s.condition("Ready").status == "True"
    s.run(20)
    assert s.reasons().count("CanaryStarted") == 1, "it is asked for once, and tried once"


def test_a_dtype_that_the_artifact_in_service_is_not_made_for_is_refused_and_serving_goes_on(story, names):
    s = story()
    s.add_artifact(names[0])
    s.establish()
    s.change({"rollout": {"artifact": names[0]}})
    s.run(1)
    s.settle()
    assert s.status.stable.artifact == names[0]
    before = s.world.stable.template
    s.change({"rollout": {"artifact": names[0]}, "engine": {"dtype": "bfloat16"}})
    s.run(10)
    accepted = s.condition("Accepted")
    assert (accepted.status, accepted.reason) == ("False", "InvalidSpec") and "baseline first" in accepted.message
    assert s.condition("Ready").status == "True" and s.world.stable.template == before


def test_traffic_leaves_a_canary_whose_spec_cannot_be_rendered_any_more(story, names):
    fast, other = names
    s = story().promoted(fast)
    s.add_artifact(other)
    s.change({"rollout": {"artifact": other}})
    s.run(10, lambda s: s.world.weight_pct == 25)
    before = s.world.stable.template
    s.change({"engine": {"dtype": "bfloat16"}})
    s.tick()
    assert (s.status.phase, s.world.weight_pct) == (Phase.ROLLING_BACK, 0)
    s.run(5)
    assert (s.world.stable.template, s.condition("Ready").status, s.world.canary.replicas) == (before, "True", 0)
    s.change({"replicas": 6})
    s.run(2)
    assert s.world.stable.replicas == 6, "an autoscaler's word counts all the same"
    s.change({"engine": {"dtype": "float32"}, "replicas": 4})
    s.run(30, lambda s: s.status.stable.artifact == other)


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_so_many_failed_measurements_are_forgiven_and_no_more(story, names, limit):
    patch = {"rollout": {"artifact": names[0], "analysis": {"failureLimit": limit}}}
    s = story(patch, behaviours={names[0]: Behaviour(3.0)})
    s.add_artifact(names[0])
    failures = []
    while not s.status.rolled_back:
        s.run(1 / 3)
        rollout = s.status.rollout
        if rollout and rollout.measurement and any(m.verdict is Verdict.FAIL for m in rollout.analysis):
            failures.append(rollout.measurement)
    assert len(set(failures)) == limit + 1


def test_a_step_does_not_pass_on_old_probes(story, names):
    s = story(scripts=[script(names[0])])
    s.establish()
    s.drift()
    s.run(40, lambda s: s.status.rollout and s.status.rollout.measured_since)
    s.world.probes = {key: replace(p, at=s.status.rollout.started_at) for key, p in s.world.probes.items()}
    s.world._probe = lambda names, after: None
    s.run(7)
    assert (s.status.phase, s.status.rollout.step) == (Phase.CANARY, 0)
    assert [m.verdict for m in s.status.rollout.analysis if m.metric == "Probes"] == [Verdict.INCONCLUSIVE]
    s.until_phase(Phase.ROLLING_BACK, 5)
    assert "probes are not answered yet" in s.status.rollout.abort_message


def test_traffic_that_does_not_follow_the_weight_proves_nothing(story, names):
    s = story(scripts=[script(names[0])])
    s.establish()
    s.drift()
    s.until_phase(Phase.CANARY)
    s.world.sticky_ratio = 0.8
    s.run(6)
    assert (s.status.phase, s.status.rollout.step) == (Phase.CANARY, 0)
    split = s.condition("TrafficSplitVerified")
    assert (split.status, split.reason) == ("False", "WeightNotObserved") and "its pods are 25 %" in split.message
    s.world.sticky_ratio = 0.0
    s.until_phase(Phase.ROLLING_BACK, 5)
    assert s.status.rollout.abort_reason == "AnalysisInconclusive"


def test_after_a_rollback_drift_is_looked_for_anew(story, names):
    s = story({"drift": {"ticks": 4}}, behaviours={names[0]: Behaviour(is_wrong=True)}, scripts=[script(names[0])])
    s.establish()
    s.drift()
    s.until_phase(Phase.ROLLING_BACK)
    s.until_phase(Phase.SERVING)
    assert s.status.drift.evidence_since == s.world.now and s.status.drift.ticks == 0
    s.run(2)
    assert not s.status.drift.drifted, "its ticks begin after the rollout"
    s.run(8, lambda s: s.status.drift.drifted)


def test_adopting_again_by_hand_takes_another_look(story, names):
    digest = names[0]
    s = story(behaviours={digest: Behaviour(2.0)})
    s.add_artifact(digest)
    s.establish()
    s.change({"rollout": {"artifact": digest}})
    s.until_phase(Phase.ROLLING_BACK)
    s.settle()
    s.change({"rollout": {"artifact": ""}})
    s.run(1)
    s.world.behaviours[digest] = Behaviour(0.8)
    s.change({"rollout": {"artifact": digest}})
    s.run(20, lambda s: s.status.stable.artifact == digest)
    assert s.status.rolled_back == ()


def test_going_back_to_the_baseline_by_hand(story, names):
    s = story({"rollout": {"analysis": {"maxTpotRatioPercent": 200, "maxTtftRatioPercent": 200}}}).promoted()
    s.change({"rollout": {"artifact": BASELINE}})
    s.run(20, lambda s: s.status.stable.artifact == BASELINE)
    assert s.status.previous.artifact == names[0]


# --- brakes ---------------------------------------------------------------------------------------------------------


def test_cooldown_names_its_end_and_holds_until_then(story, names):
    s = story().promoted()
    s.scripts.append(script(names[1]))
    s.world.load = FAR
    s.run(15, lambda s: s.condition("Recompiling").reason == "CoolingDown")
    until = s.status.recompilation.last_ended_at + timedelta(minutes=20)
    assert f"{until:%H:%M:%SZ}" in s.condition("Recompiling").message
    s.until_phase(Phase.RECOMPILING)
    assert s.world.now >= until


def test_runs_per_day_are_bounded_and_name_the_next(story, no_improvement):
    s = story({"drift": {"cooldown": "1m", "maxRunsPerDay": 2}}, scripts=[no_improvement] * 9)
    s.establish()
    for load in (AWAY, FAR, Load(60, prompt_tokens=200)):
        s.world.load = load
        s.run(20)
    assert len(s.runs) == 2
    assert s.condition("Recompiling").reason == "RunsPerDayExhausted"
    first = min(s.status.recompilation.started_at)
    assert f"{first + timedelta(days=1):%Y-%m-%dT%H:%M:%SZ}" in s.condition("Recompiling").message


def test_recommend_only_offers_and_does_not_roll_out(story, names):
    fast, _ = names
    s = story({"recompilation": {"mode": "RecommendOnly"}}, scripts=[script(fast)] * 3)
    s.establish()
    s.drift()
    s.run(30)
    offered = s.condition("CandidateAvailable")
    assert (offered.status, offered.reason) == ("True", "RecommendOnly") and fast in offered.message
    assert s.status.rollout is None and len(s.runs) == 1
    s.change({"rollout": {"artifact": fast}})
    s.run(20, lambda s: s.status.stable.artifact == fast)


def test_disabled_watches_and_does_nothing(story):
    s = story({"recompilation": {"mode": "Disabled", "triggerToken": "now"}})
    s.establish()
    s.drift()
    s.run(10)
    assert not s.runs and s.condition("TrafficDrifted").status == "True"
    assert (s.condition("Recompiling").status, s.condition("Recompiling").reason) == ("False", "Disabled")


GPU = {"pod": {"resources": {"limits": {"nvidia.com/gpu": 1}}}}


def test_pods_on_a_gpu_are_not_searched_for_and_get_nothing_made_for_a_cpu(story, names):
    s = story({**GPU, "recompilation": {"triggerToken": "now"}})
    s.add_artifact(names[0])
    s.establish()
    s.drift()
    s.run(10)
    assert not s.runs and s.condition("Recompiling").reason == "UnsupportedDevice"
    s.change({"rollout": {"artifact": names[0]}})
    s.run(2)
    offered = s.condition("CandidateAvailable")
    assert offered.reason == "Incompatible" and "cpu: simulated, the pods have a GPU" in offered.message
    assert s.canary is None


def test_suspend_starts_nothing_and_resuming_does(story):
    s = story({"suspend": True}, scripts=[])
    s.establish()
    s.drift()
    s.run(10)
    assert not s.runs and s.condition("Recompiling").reason == "Suspended"
    s.change({"suspend": False})
    s.until_phase(Phase.RECOMPILING, 1)


def test_suspend_in_mid_canary_goes_back_and_starts_over_afterwards(story, names):
    fast, _ = names
    s = story(scripts=[script(fast)])
    s.establish()
    s.drift()
    s.until_phase(Phase.CANARY)
    s.change({"suspend": True})
    s.run(10)
    assert s.status.phase is Phase.SERVING and s.world.weight_pct == 0 and not s.status.rolled_back
    assert s.condition("CandidateAvailable").reason == "Suspended"
    s.change({"suspend": False})
    s.run(20, lambda s: s.status.stable.artifact == fast)
    assert len(s.runs) == 1


def test_a_trigger_token_forces_a_run_before_any_drift_but_not_before_a_plan(story, no_improvement):
    s = story({"recompilation": {"triggerToken": "one"}}, scripts=[no_improvement] * 3)
    s.run(5)
    assert not s.runs and s.condition("Recompiling").reason == "BaselineEstablishing"
    s.until_phase(Phase.RECOMPILING)
    s.run(30)
    (run,) = s.runs.values()
    assert (run.spec.trigger, run.spec.trigger_token) == (Trigger.TOKEN, "one")
    s.change({"recompilation": {"triggerToken": "two"}})
    s.run(5)
    assert len(s.runs) == 2, "cooldown does not hold what a person forces"


def test_approval_before_canary(story, names):
    fast, _ = names
    s = story({"rollout": {"approval": "BeforeCanary"}}, scripts=[script(fast)])
    s.establish()
    s.drift()
    s.run(20)
    assert s.condition("CandidateAvailable").reason == "AwaitingApproval" and s.canary is None
    s.change({"rollout": {"approvedArtifact": fast}})
    s.run(20, lambda s: s.status.stable.artifact == fast)


def test_approval_before_promote_holds_the_last_step_beyond_its_deadline(story, names):
    fast, _ = names
    s = story({"rollout": {"approval": "BeforePromote"}}, scripts=[script(fast)])
    s.establish()
    s.drift()
    s.run(25)
    assert (s.status.phase, s.world.weight_pct) == (Phase.CANARY, 50)
    assert s.world.now > s.status.rollout.step_since + timedelta(minutes=8)
    assert s.condition("Progressing").reason == "AwaitingApproval"
    s.change({"rollout": {"approvedArtifact": fast}})
    s.run(5, lambda s: s.status.stable.artifact == fast)


def test_a_canary_that_waits_for_approval_still_fails(story, names):
    fast, _ = names
    s = story({"rollout": {"approval": "BeforePromote"}}, scripts=[script(fast)])
    s.establish()
    s.drift()
    s.run(40, lambda s: s.status.rollout and s.status.rollout.awaiting_approval)
    s.world.behaviours[fast] = Behaviour(error_ratio=0.9)
    s.until_phase(Phase.ROLLING_BACK, 5)


# --- trouble --------------------------------------------------------------------------------------------------------


def test_unreachable_metrics_stop_everything_and_recovery_resumes(story):
    s = story()
    s.establish()
    s.world.metrics_down = True
    s.world.load = AWAY
    s.run(30)
    assert not s.runs and s.condition("MetricsAvailable").status == "False"
    s.world.metrics_down = False
    s.until_phase(Phase.RECOMPILING, 20)
    assert s.condition("MetricsAvailable").status == "True"
    assert {"MetricsUnavailable", "MetricsAvailable"} <= set(s.reasons())


def test_unreachable_metrics_in_mid_canary_hold_and_then_abort(story, names):
    s = story(scripts=[script(names[0])])
    s.establish()
    s.drift()
    s.until_phase(Phase.CANARY)
    s.world.metrics_down = True
    s.run(6)
    assert (s.status.phase, s.status.rollout.step) == (Phase.CANARY, 0)
    s.until_phase(Phase.ROLLING_BACK, 5)
    assert s.status.rollout.abort_reason == "AnalysisInconclusive"


def test_idle_traffic_holds_the_canary_and_then_aborts(story, names):
    s = story(scripts=[script(names[0])])
    s.establish()
    s.drift()
    s.until_phase(Phase.CANARY)
    s.world.load = Load(requests_per_minute=0)
    s.until_phase(Phase.ROLLING_BACK, 10)
    assert s.status.rollout.abort_reason == "AnalysisInconclusive" and s.status.rollout.step == 0


def test_idle_is_not_drift(story):
    s = story()
    s.establish()
    s.world.load = Load(requests_per_minute=0)
    s.run(30)
    assert not s.status.drift.drifted and not s.runs
    assert "no evidence" in s.condition("TrafficDrifted").message


def test_stable_that_does_not_come_up_keeps_the_healthy_canary(story, names):
    fast, _ = names
    s = story(scripts=[script(fast)])
    s.establish()
    s.drift()
    s.until_phase(Phase.PROMOTING)
    s.world.behaviours[fast] = Behaviour(0.7, starts=False)
    s.world.stable.pods = [p for p in s.world.stable.pods if p.artifact == BASELINE]
    s.run(12)
    assert s.status.phase is Phase.PROMOTING and s.world.weight_pct == 50
    progressing, degraded = s.condition("Progressing"), s.condition("Degraded")
    assert (progressing.status, progressing.reason) == ("False", "ProgressDeadlineExceeded")
    assert (degraded.status, degraded.reason) == ("True", "PartialReplicas")
    assert s.reasons().count("PromotionStalled") == 1
    s.world.behaviours[fast] = Behaviour(0.7)
    s.run(5, lambda s: s.status.phase is Phase.SERVING)
    assert s.status.stable.artifact == fast and s.condition("Degraded").status == "False"


def test_what_pods_say_at_length_is_cut_to_what_a_status_holds(story, names):
    s = story(scripts=[script(names[0])])
    s.establish()
    s.drift()
    s.until_phase(Phase.PROMOTING)
    seen = s.world.observe()
    pods = tuple(replace(p, is_ready=False, unschedulable="0/99 nodes " * 90) for p in seen.stable.pods)
    late = replace(seen, now=seen.now + 20 * MINUTE, stable=replace(seen.stable, pods=pods))
    _, status = reconcile(s.spec, s.status, late)
    assert status.rollout.abort_reason == "PromotionStalled" and len(status.rollout.abort_message) == 1024


def test_a_canary_pod_that_is_lost_is_made_again_and_measured_anew(story, names):
    fast, _ = names
    s = story(scripts=[script(fast)])
    s.establish()
    s.drift()
    s.run(40, lambda s: s.status.rollout and s.status.rollout.measured_since)
    s.world.canary.pods.clear()
    s.tick()
    s.tick()
    assert s.status.rollout.measured_since is None and s.status.phase is Phase.CANARY
    assert s.world.stable.replicas == 4, "stable fills the gap"
    s.run(20, lambda s: s.status.stable.artifact == fast)


@pytest.mark.parametrize("flicker", [{"is_ready": False}, {"artifact_digest": ""}, {"requests_started": None}], ids=str)
def test_a_canary_pod_that_flickers_moves_no_pod(story, names, flicker):
    s = story(scripts=[script(names[0])])
    s.establish()
    s.drift()
    s.run(40, lambda s: s.status.rollout and s.status.rollout.measured_since)
    seen = s.world.observe()
    pods = tuple(replace(pod, **flicker) for pod in seen.canary.pods)
    actions, status = reconcile(s.spec, s.status, replace(seen, canary=replace(seen.canary, pods=pods)))
    assert EnsureWeight(25, tuple(pod.name for pod in pods)) in actions
    assert EnsureStable(BASELINE, 3) in actions and EnsureCanary(names[0], 1) in actions
    assert status.phase is Phase.CANARY


def test_a_run_under_way_is_asked_for_each_turn(story):
    """Its traffic may be missing, if the operator died between making the one and the other."""
    s = story()
    s.establish()
    s.drift()
    (run,) = s.runs.values()
    assert EnsureRun(run.name, run.spec) in s.tick() and EnsureRun(run.name, run.spec) in s.tick()


FAILED = [RunOutcome.BUDGET_EXHAUSTED, RunOutcome.CORRECTNESS_FAILED, RunOutcome.TIER_POD_FAILED, RunOutcome.FAILED]


@pytest.mark.parametrize("outcome", FAILED)
def test_a_failed_run_is_not_repeated_for_the_same_workload(story, outcome):
    s = story({"drift": {"cooldown": "1m"}}, scripts=[script(outcome=outcome)] * 5)
    s.establish()
    s.drift()
    s.run(30)
    assert len(s.runs) == 1 and s.condition("Recompiling").reason == "AlreadyTried"
    assert outcome.value in s.condition("Recompiling").message
    s.change({"recompilation": {"triggerToken": "again"}})
    s.run(10)
    assert len(s.runs) == 2


def test_another_workload_is_searched_after_a_failed_one(story):
    s = story({"drift": {"cooldown": "1m"}}, scripts=[script(outcome=RunOutcome.FAILED)] * 5)
    s.establish()
    s.drift()
    s.run(10)
    s.world.load = FAR
    s.run(20)
    assert len(s.runs) == 2


def test_a_run_that_is_deleted_is_cancelled(story):
    s = story({"drift": {"cooldown": "60m"}})
    s.establish()
    s.drift()
    s.world.runs.clear()
    s.run(5)
    assert s.status.phase is Phase.SERVING and s.status.recompilation.last_outcome == "Cancelled"


def test_a_run_without_end_is_given_up(story):
    s = story(scripts=[RunScript(after=timedelta(days=9))])
    s.establish()
    s.drift()
    s.run(45, lambda s: s.status.phase is Phase.SERVING)
    assert s.status.recompilation.last_outcome == "Failed"


@pytest.mark.parametrize("forge", [{"source_digest": "0" * 64}, {"manifest": None}, {"result": None}], ids=str)
def test_a_result_that_is_not_what_it_names_is_refused(story, names, forge):
    s = story(scripts=[script(names[0])])
    s.establish()
    s.drift()
    s.world.advance(3 * MINUTE)
    (name,) = s.runs
    s.world.runs[name] = replace(s.runs[name], **forge)
    s.run(5)
    assert s.status.recompilation.last_outcome == "Failed" and s.status.candidate is None
    assert not s.artifacts and s.status.rollout is None


def test_candidate_found_after_traffic_moved_on_is_kept_for_its_return(story, names):
    fast, _ = names
    s = story({"drift": {"maxRunsPerDay": 1}}, scripts=[script(fast, minutes=15)])
    s.establish()
    s.drift()
    s.world.load = HOME
    s.run(25)
    assert "CandidateSetAside" in s.reasons() and s.status.rollout is None
    assert (fast, "Measured") in [(p.artifact, p.reason) for p in s.status.drift.plans]
    s.world.load = AWAY
    s.run(30, lambda s: s.status.stable.artifact == fast)
    assert s.status.stable.source is Source.REUSE and len(s.runs) == 1


@pytest.mark.parametrize("mode", list(Mode))
def test_serving_starts_in_every_mode(story, mode):
    s = story({"recompilation": {"mode": mode.value}})
    s.run(2)
    assert s.condition("Ready").status == "True"


def test_an_incompatible_artifact_is_not_rolled_out(story, names):
    s = story()
    s.add_artifact(names[0])
    s.establish()
    s.change({"engine": {"dtype": "bfloat16"}})
    s.run(3)
    s.change({"rollout": {"artifact": names[0]}})
    s.run(3)
    offered = s.condition("CandidateAvailable")
    assert (offered.status, offered.reason) == ("False", "Incompatible") and "bfloat16" in offered.message
    assert s.canary is None


def test_no_action_moves_traffic_to_a_canary_that_is_not_probed(story, names):
    s = story(scripts=[script(names[0])])
    s.establish()
    s.world.load = AWAY
    for _ in range(200):
        probed = {p.pod for p in s.world.probes.values()}
        for action in s.tick():
            if isinstance(action, EnsureWeight):
                assert set(action.pods) <= probed
    assert s.status.stable.artifact == names[0]


def test_pods_in_service_never_fall_below_the_replicas_asked_for(story, names):
    s = story(scripts=[script(names[0])])
    s.run(2)
    s.establish()
    s.world.load = AWAY
    for _ in range(250):
        s.tick()
        pods = [p for d in (s.world.stable, s.world.canary) if d for p in d.pods if p.is_ready and p.in_service]
        assert len(pods) >= 4, s.status.phase
    assert s.status.stable.artifact == names[0]


def test_settled_worlds_are_told_the_same_each_turn(story):
    s = story()
    s.establish()
    actions = [s.tick() for _ in range(12)]
    for group in actions:
        assert [type(a) for a in group if not isinstance(a, EnsureRun | EnsureCanary)][1:] == [EnsureStable]
