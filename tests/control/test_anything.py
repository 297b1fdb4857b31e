"""Anything may happen at any time: whatever people, traffic, pods and runs do, no rule is broken and no turn fails."""

from datetime import timedelta

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tkcc.api.codec import from_json, to_json
from tkcc.api.condition import ConditionType
from tkcc.api.run import RunOutcome
from tkcc.api.status import Phase, Status
from tkcc.control.actions import EnsureRun, EnsureStable, EnsureWeight
from tkcc.control.simulation import Behaviour, Load, RunScript

STEP = timedelta(seconds=30)
MINUTE = timedelta(minutes=1)
IN_TRAFFIC = (Phase.CANARY, Phase.PROMOTING)


def digest(n):
    return f"{n:064x}"


spec_changes = st.sampled_from(
    [
        {"replicas": 1},
        {"replicas": 2},
        {"replicas": 3},
        {"replicas": 8},
        {"rollout": {"steps": []}},
        {"rollout": {"steps": [50]}},
        {"rollout": {"steps": [25, 50]}},
        {"rollout": {"artifact": ""}},
        {"rollout": {"artifact": digest(1)}},
        {"rollout": {"artifact": digest(9)}},  # not there
        {"rollout": {"artifact": "baseline"}},
        {"rollout": {"approval": "BeforePromote"}},
        {"rollout": {"approval": "None", "approvedArtifact": ""}},
        {"suspend": True},
        {"suspend": False},
        {"recompilation": {"mode": "RecommendOnly"}},
        {"recompilation": {"mode": "Disabled"}},
        {"recompilation": {"mode": "Automatic"}},
        {"recompilation": {"triggerToken": "one"}},
        {"recompilation": {"triggerToken": "two"}},
        {"drift": {"maxRunsPerDay": 0}},
        {"drift": {"maxRunsPerDay": 9}},
        {"engine": {"image": "example.org/engine:2"}},
        {"engine": {"dtype": "bfloat16"}},
    ]
)
happenings = st.one_of(
    st.tuples(st.just("spec"), spec_changes),
    st.tuples(st.just("load"), st.sampled_from([(0, 1000), (60, 1000), (60, 3000), (60, 9000), (240, 300)])),
    st.tuples(st.just("metrics"), st.booleans()),
    st.tuples(st.just("behaviour"), st.sampled_from(["fine", "slow", "wrong", "crashes", "sleeps", "fails", "hangs"])),
    st.tuples(st.just("die"), st.integers(0, 6)),
    st.tuples(
        st.just("lose"), st.sampled_from(["status", "canary pods", "a stable pod", "runs", "artifacts", "stable"])
    ),
    st.tuples(st.just("evict"), st.sampled_from(["stable", "canary"])),
    st.tuples(st.just("restart"), st.integers(0, 40)),  # after so many minutes without an operator
    st.tuples(st.just("wait"), st.integers(1, 30)),
)
BEHAVIOURS = {
    "fine": Behaviour(0.8),
    "slow": Behaviour(2.0),
    "wrong": Behaviour(is_wrong=True),
    "crashes": Behaviour(crashes=True),
    "sleeps": Behaviour(starts=False),
    "fails": Behaviour(error_ratio=0.5),
    "hangs": Behaviour(answers=False),
}
scripts = st.lists(
    st.builds(
        RunScript,
        after=st.sampled_from([MINUTE, 5 * MINUTE, 90 * MINUTE]),
        outcome=st.sampled_from([RunOutcome.SEARCH_SUCCEEDED, RunOutcome.NO_IMPROVEMENT, RunOutcome.FAILED]),
        artifact=st.sampled_from([digest(1), digest(2)]),
    ),
    max_size=4,
)


def happen(s, kind, value):
    world = s.world
    if kind == "spec":
        s.change(value)
    elif kind == "load":
        world.load = Load(value[0], prompt_tokens=value[1])
    elif kind == "metrics":
        world.metrics_down = value
    elif kind == "behaviour":
        world.behaviours[digest(1)] = BEHAVIOURS[value]
    elif kind == "evict":
        deployment = {"stable": world.stable, "canary": world.canary}[value]
        for pod in deployment.pods[:1] if deployment else ():
            world.evict(pod)
    elif kind == "restart":
        for _ in range(value):
            world.advance(MINUTE)
        world.restart()
    elif value == "status":
        world.status = Status()
    elif value == "canary pods" and world.canary:
        world.canary.pods.clear()
    elif value == "a stable pod" and world.stable and world.stable.pods:
        world.stable.pods.pop()
    elif value == "stable":
        world.stable = None
    elif value == "runs":
        world.runs.clear()
    elif value == "artifacts":
        world.artifacts.clear()


def checked_turn(s):
    before = s.status
    s.world.advance(STEP)
    actions = s.world.turn()
    status = s.status
    assert from_json(Status, to_json(status)) == status
    assert {c.type for c in status.conditions} == {t.value for t in ConditionType}
    assert sum(run.finished_at is None for run in s.runs.values()) <= 1, "two runs at once"
    weight = [a for a in actions if isinstance(a, EnsureWeight) and a.pods]
    assert not weight or status.phase in IN_TRAFFIC, f"traffic to a canary in {status.phase}"
    for action in weight:
        probed = {p.pod for p in s.world.probes.values() if p.tokens_match}
        assert set(action.pods) <= probed, "traffic to a pod that was not probed"
    for action in actions:
        if isinstance(action, EnsureStable):
            assert 1 <= action.replicas <= s.spec.replicas
            assert (
                action.artifact
                in {before.stable.artifact, status.stable.artifact}
                | {status.rollout.artifact if status.rollout and status.phase is Phase.PROMOTING else ""}
                or before == Status()
            ), "an artifact nobody promoted"
        if isinstance(action, EnsureRun) and action.name not in s.runs:
            raise AssertionError("a run was asked for and is not there")
    if status.phase is Phase.PROMOTING and before.phase is Phase.CANARY:
        assert before.rollout.step + 1 == before.rollout.total_steps, "promoted before the last step"
    starts = [a for a in actions if isinstance(a, EnsureRun) and before.phase is Phase.SERVING]
    if starts:
        assert not s.spec.suspend and len(status.recompilation.started_at) <= s.spec.drift.max_runs_per_day
    return actions


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(plan=st.lists(happenings, max_size=25), runs=scripts)
def test_no_rule_is_broken_whatever_happens(story, plan, runs):
    s = story({"drift": {"cooldown": "2m", "maxRunsPerDay": 5}}, scripts=list(runs))
    s.world.behaviours = {digest(1): Behaviour(0.8), digest(2): Behaviour(0.7)}
    s.add_artifact(digest(1))
    for _ in range(22):
        checked_turn(s)
    for kind, value in plan:
        if kind == "die":
            s.world.advance(STEP)
            s.world.turn(die_after=value)
            continue
        if kind != "wait":
            happen(s, kind, value)
        for _ in range(value if kind == "wait" else 2):
            checked_turn(s)
    s.world.metrics_down = False
    s.change(
        {"suspend": True, "replicas": 4, "rollout": {"steps": [25, 50]}, "engine": {"image": "", "dtype": "float32"}}
    )
    for _ in range(60):
        checked_turn(s)
    if s.status.phase is not Phase.RECOMPILING:
        assert s.status.phase is Phase.SERVING and s.world.weight_pct == 0, "suspended, it comes to rest"
