"""The operator dies between any two actions, at any turn, and the world comes out the same; and a turn that sees an
old picture of the world does no harm."""

from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tkcc.api.codec import sha256_hex
from tkcc.api.run import RunOutcome
from tkcc.api.status import Phase, Status
from tkcc.control.actions import EmitEvent, EnsureRun
from tkcc.control.reconcile import reconcile
from tkcc.control.simulation import Behaviour, Load, RunScript

MINUTE = timedelta(minutes=1)
AWAY = Load(60, prompt_tokens=3000)
BAD = {"slow": Behaviour(3.0), "wrong": Behaviour(is_wrong=True), "good": Behaviour(0.7)}
STEP = timedelta(seconds=20)


def make(story, names, kind):
    """Of "asked", the spec names an artifact from the first turn on."""
    behaviour = BAD.get(kind, Behaviour(0.7))
    outcome = RunOutcome.SEARCH_SUCCEEDED if kind in BAD else RunOutcome.NO_IMPROVEMENT
    ends = RunScript(after=3 * MINUTE, outcome=outcome, artifact=names[0])
    asked = {"rollout": {"artifact": names[1]}} if kind == "asked" else {}
    s = story(asked, load=Load(60), behaviours={names[0]: behaviour, names[1]: Behaviour(0.75)}, scripts=[ends])
    s.add_artifact(names[1])
    return s


def play(s, turns, kills):
    """`kills` maps a turn to the number of actions that happen before the operator dies in it."""
    for turn in range(turns):
        if turn == 35:
            s.world.load = AWAY
        s.world.advance(STEP)
        if turn in kills:
            s.world.turn(die_after=kills[turn])
            continue
        s.world.turn()
        pods = [p for d in (s.world.stable, s.world.canary) if d for p in d.pods if p.is_ready and p.in_service]
        least = 2 if s.status.phase is Phase.ROLLING_BACK else 4  # traffic leaves a bad canary before stable has grown
        assert turn < 5 or len(pods) >= least, f"{len(pods)} pods serve in {s.status.phase}"
        assert sum(r.finished_at is None for r in s.runs.values()) <= 1
        if s.status.phase in (Phase.SERVING, Phase.RECOMPILING, Phase.WARMING):
            assert s.world.weight_pct == 0


def outcome(s):
    canary = s.world.canary
    return {
        "stable": s.status.stable.artifact,
        "phase": s.status.phase,
        "pods": [(d.artifact, d.replicas) for d in (s.world.stable,)],
        "canary": canary.replicas if canary else 0,
        "weight": s.world.weight_pct,
        "runs": len(s.runs),
        "artifacts": sorted(s.artifacts),
        "rolled back": [(r.artifact, r.reason) for r in s.status.rolled_back],
        # Whether the first window is there before or after what is asked for, is up to the kills.
        "plans": [(p.artifact, p.reason) for p in s.status.drift.plans if not s.spec.rollout.artifact],
        "last": s.status.recompilation.last_outcome,
    }


KINDS = ["good", "slow", "wrong", "none", "asked"]
TURNS = 130
kills = st.dictionaries(st.integers(0, 105), st.integers(0, 7), max_size=25)
_calm = {}


def calm(story, names, kind):
    if kind not in _calm:
        s = make(story, names, kind)
        play(s, TURNS, {})
        _calm[kind] = outcome(s)
    return _calm[kind]


EXPECTED = {
    "good": "Promoted",
    "slow": "LatencyExceeded",
    "wrong": "CorrectnessRegressed",
    "none": "NoImprovement",
    "asked": "'stable': '" + sha256_hex("other"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_calm_stories_end_as_they_should(story, names, kind):
    assert EXPECTED[kind] in str(calm(story, names, kind))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(KINDS), when=kills)
def test_killed_between_any_two_actions_the_story_ends_the_same(story, names, kind, when):
    s = make(story, names, kind)
    play(s, TURNS, when)
    assert outcome(s) == calm(story, names, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefix", [0, 2, 4])
def test_killed_at_every_third_turn(story, names, kind, prefix):
    """Systematically: two of three turns get through, every third dies after so many actions."""
    s = make(story, names, kind)
    play(s, TURNS, {turn: prefix for turn in range(0, 105, 3)})
    assert outcome(s) == calm(story, names, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_each_turn_reaches_a_fixpoint_even_on_an_old_picture(story, names, kind):
    """Reconciling again and again on the same observation settles within a few turns, without oscillation, and does
    not ask for a second run."""
    s = make(story, names, kind)
    for turn in range(TURNS):
        if turn == 35:
            s.world.load = AWAY
        s.world.advance(STEP)
        seen, status, asked = s.world.observe(), s.status, set()
        for _ in range(6):
            actions, new = reconcile(s.spec, status, seen)
            asked |= {a.name for a in actions if isinstance(a, EnsureRun)}
            if new == status:
                break
            status = new
        else:
            raise AssertionError(f"no fixpoint in {status.phase}")
        assert len(asked) <= 1
        again, same = reconcile(s.spec, status, seen)
        assert same == status and not [a for a in again if isinstance(a, EmitEvent)]
        s.world.turn()


@pytest.mark.parametrize("kind", KINDS)
def test_reconcile_is_a_function(story, names, kind):
    s = make(story, names, kind)
    for turn in range(70):
        if turn == 35:
            s.world.load = AWAY
        s.world.advance(STEP)
        seen = s.world.observe()
        assert reconcile(s.spec, s.status, seen) == reconcile(s.spec, s.status, seen)
        s.world.turn()


PHASES = [Phase.SERVING, Phase.RECOMPILING, Phase.WARMING, Phase.CANARY, Phase.PROMOTING]


@pytest.mark.parametrize("phase", PHASES)
def test_a_lost_status_is_rebuilt_in_every_phase(story, names, phase):
    """Status gone (restored from a backup without it): the same artifact is promoted in the end, by no other run."""
    s = story(scripts=[RunScript(after=3 * MINUTE, artifact=names[0])])
    s.establish()
    s.drift()
    s.until_phase(phase)
    before = (s.status.phase, s.status.stable.artifact, s.status.recompilation.active_run, len(s.runs))
    s.world.status = Status()
    s.tick()
    if phase in (Phase.RECOMPILING, Phase.CANARY, Phase.WARMING):
        assert (s.status.phase, s.status.stable.artifact, s.status.recompilation.active_run) == before[:3]
    s.run(60, lambda s: s.status.stable.artifact == names[0] and s.status.phase is Phase.SERVING)
    assert len(s.runs) == 1 and s.world.weight_pct == 0


@pytest.mark.parametrize("actions", range(4))
def test_an_artifact_that_was_asked_for_is_not_forgotten_with_the_first_status(story, names, actions):
    """The stable Deployment stands, and the status that says so was never written."""
    s = story({"rollout": {"artifact": names[0]}})
    s.add_artifact(names[0])
    s.world.turn(die_after=actions)
    s.run(30, lambda s: s.status.stable.artifact == names[0])


def test_a_lost_status_does_not_bring_back_what_was_rolled_back(story, names):
    s = make(story, names, "slow")
    play(s, TURNS, {})
    assert s.status.rolled_back and s.reasons().count("CanaryStarted") == 1
    s.world.status = Status()
    s.run(20)
    assert s.reasons().count("CanaryStarted") == 1
    assert [(r.artifact, r.reason) for r in s.status.rolled_back] == [(names[0], "StatusLost")]


def test_a_rebuilt_status_knows_what_was_compiled_and_what_was_forced(story, names):
    s = story({"recompilation": {"triggerToken": "one"}}, scripts=[RunScript(after=3 * MINUTE, artifact=names[0])])
    s.run(40, lambda s: s.status.stable.artifact == names[0])
    known = s.status
    s.world.status = Status()
    s.run(10)
    assert s.status.stable.artifact == names[0] and s.status.stable.speedup == known.stable.speedup
    assert (names[0], "Promoted") in [(p.artifact, p.reason) for p in s.status.drift.plans]
    assert s.status.recompilation.handled_token == "one" and len(s.runs) == 1
    assert s.status.recompilation.last_outcome == "SearchSucceeded"
