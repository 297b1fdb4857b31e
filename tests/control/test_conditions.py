"""What readers are told: all of it, from the first sight on, with numbers, and never again without a change."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tkcc.api.codec import from_json, to_json
from tkcc.api.condition import Condition, ConditionStatus, ConditionType, find_condition, set_condition
from tkcc.api.status import Phase, Status
from tkcc.control.actions import EnsureStable
from tkcc.control.observed import MissingReference
from tkcc.control.reconcile import look_again_in, reconcile
from tkcc.control.simulation import START, Load, RunScript

ALL = {type_.value for type_ in ConditionType}


def told(status):
    return {c.type: (c.status.value, c.reason) for c in status.conditions}


def test_every_condition_is_set_at_first_sight(story):
    s = story()
    _, status = reconcile(s.spec, Status(), s.world.observe())
    assert told(status) == {
        "Accepted": ("True", "Valid"),
        "Ready": ("False", "ReplicasNotReady"),
        "MetricsAvailable": ("Unknown", "MetricsMissing"),
        "TrafficDrifted": ("Unknown", "BaselineEstablishing"),
        "Recompiling": ("False", "Idle"),
        "CandidateAvailable": ("False", "None"),
        "Progressing": ("False", "NoRollout"),
        "TrafficSplitVerified": ("Unknown", "NotApplicable"),
        "RolloutHealthy": ("Unknown", "NoRollout"),
        "Degraded": ("False", "AsExpected"),
    }


def test_conditions_carry_the_generation_and_move_their_time_only_when_they_flip(story):
    s = story()
    s.run(3)
    before = {c.type: c for c in s.status.conditions}
    s.change({"drift": {"cooldown": "3h"}})
    s.run(3)
    assert {c.observed_generation for c in s.status.conditions} == {2} and s.status.observed_generation == 2
    for condition in s.status.conditions:
        old = before[condition.type]
        if old.status == condition.status:
            assert condition.last_transition_time == old.last_transition_time, condition.type


REFUSED = [
    ("an engine that is not there yet", {"engine": {"type": "vllm"}}, "UnsupportedEngine", ["vllm", "use native"]),
    ("weights that replicas cannot make", {"rollout": {"steps": [5]}}, "InvalidSpec", ["5 %", "25, 50, 75"]),
    ("one replica", {"replicas": 1, "rollout": {"steps": []}}, "InvalidSpec", ["2 or more"]),
    ("an artifact that is not there", {"rollout": {"artifact": "a" * 64}}, "ReferenceNotFound", ["tkcc-artifact-aaaa"]),
]


@pytest.mark.parametrize("case, patch, reason, words", REFUSED, ids=[r[0] for r in REFUSED])
def test_a_spec_that_cannot_be_acted_upon_says_what_to_change(story, case, patch, reason, words):
    s = story(patch)
    s.run(1)
    accepted = s.condition("Accepted")
    assert (accepted.status, accepted.reason) == ("False", reason)
    assert all(word in accepted.message for word in words), accepted.message
    s.run(20)
    assert not s.runs and s.status.rollout is None


def test_an_unsupported_engine_deploys_nothing(story):
    s = story({"engine": {"type": "trtllm"}})
    assert s.tick() == ()
    assert told(s.status)["Ready"] == ("False", "UnsupportedEngine")


def test_one_replica_is_fine_where_nothing_rolls_out_by_itself(story):
    s = story({"replicas": 1, "rollout": {"steps": []}, "recompilation": {"mode": "Disabled"}})
    s.run(2)
    assert told(s.status)["Accepted"] == ("True", "Valid") and told(s.status)["Ready"][0] == "True"


def test_a_bad_change_leaves_what_serves_alone(story):
    s = story()
    s.run(3)
    s.change({"rollout": {"steps": [5]}})
    s.run(3)
    assert told(s.status)["Accepted"][0] == "False" and told(s.status)["Ready"][0] == "True"
    assert EnsureStable("baseline", 4) in s.tick()


def test_a_missing_claim_is_named_and_nothing_is_made_until_it_is_there(story):
    s = story()
    s.world.missing = (MissingReference("spec.model.uri", "PersistentVolumeClaim", "weights"),)
    assert s.tick() == ()
    accepted = s.condition("Accepted")
    assert accepted.reason == "ReferenceNotFound"
    assert "spec.model.uri: PersistentVolumeClaim weights does not exist" in accepted.message
    s.world.missing = ()
    s.run(2)
    assert told(s.status)["Ready"][0] == "True"
    s.world.missing = (MissingReference("spec.model.uri", "PersistentVolumeClaim", "weights"),)
    s.run(1)
    assert told(s.status)["Ready"][0] == "True", "pods that run go on"


POD_TROUBLES = [
    ({"waiting_reason": "ImagePullBackOff"}, "ImagePullFailed"),
    ({"waiting_reason": "CrashLoopBackOff"}, "CrashLooping"),
    ({"load_error": "/models/x: no such model directory"}, "ModelCacheNotReady"),
    ({"unschedulable": "0/3 nodes are available"}, "InsufficientCapacity"),
    ({}, "ReplicasNotReady"),
]


@pytest.mark.parametrize("trouble, reason", POD_TROUBLES, ids=[r for _, r in POD_TROUBLES])
def test_ready_says_why_pods_are_not(story, trouble, reason):
    s = story()
    s.tick()
    seen = s.world.observe()
    pods = tuple(replace(pod, is_ready=False, **trouble) for pod in seen.stable.pods)
    _, status = reconcile(s.spec, s.status, replace(seen, stable=replace(seen.stable, ready_replicas=0, pods=pods)))
    assert told(status)["Ready"] == ("False", reason)


def test_what_a_container_said_last_is_told(story):
    s = story()
    s.tick()
    seen = s.world.observe()
    trouble = {"waiting_reason": "CrashLoopBackOff", "last_words": "tkcc: cannot listen on 0.0.0.0:8000"}
    pods = tuple(replace(pod, is_ready=False, **trouble) for pod in seen.stable.pods)
    _, status = reconcile(s.spec, s.status, replace(seen, stable=replace(seen.stable, ready_replicas=0, pods=pods)))
    assert "CrashLoopBackOff: tkcc: cannot listen" in find_condition(status.conditions, "Ready").message


def test_ready_waits_for_the_present_spec_and_not_for_old_pods(story):
    """Old pods that still serve do not make a new spec Ready."""
    s = story(start_time=timedelta(minutes=1))
    s.run(3)
    s.change({"engine": {"image": "example.org/engine:2"}})
    s.tick()
    seen = s.world.observe()
    old = replace(seen.stable, updated_replicas=1)
    _, status = reconcile(s.spec, s.status, replace(seen, stable=old))
    assert told(status)["Ready"] == ("False", "ReplicasNotReady")
    assert (
        "the present spec is being rolled out to 4 pods; 4 pods serve"
        in find_condition(status.conditions, "Ready").message
    )
    s.run(3)
    assert told(s.status)["Ready"][0] == "True"


def test_new_pods_that_are_not_ready_beside_old_ones_that_are_do_not_make_ready(story):
    s = story(start_time=timedelta(minutes=3))
    s.run(8)
    s.change({"engine": {"image": "example.org/engine:2"}})
    s.run(2)
    seen = s.world.observe().stable
    assert seen.updated_replicas == seen.ready_replicas == seen.replicas == 4, "the counts alone look whole"
    assert told(s.status)["Ready"] == ("False", "ReplicasNotReady")


def test_ready_is_not_said_of_a_spec_that_no_pod_was_given_yet(story):
    s = story()
    s.run(3)
    s.change({"engine": {"image": "example.org/engine:2"}})
    s.tick()
    assert (s.condition("Ready").status, s.condition("Ready").observed_generation) == ("True", 1)
    s.run(3)
    assert (s.condition("Ready").status, s.condition("Ready").observed_generation) == ("True", 2)


def test_a_pod_that_runs_another_artifact_is_not_ready(story):
    s = story()
    s.run(2)
    seen = s.world.observe()
    pods = (replace(seen.stable.pods[0], artifact_digest="f" * 64), *seen.stable.pods[1:])
    _, status = reconcile(s.spec, s.status, replace(seen, stable=replace(seen.stable, pods=pods)))
    assert told(status)["Ready"][0] == "False"


def test_an_artifact_that_was_deleted_while_it_serves_is_named(story, names):
    s = story().promoted(names[0])
    kept = s.world.artifacts.pop(names[0])
    s.run(2)
    degraded = s.condition("Degraded")
    assert (degraded.status, degraded.reason) == ("True", "ArtifactMissing")
    assert f"tkcc-artifact-{names[0][:16]}" in degraded.message
    s.world.artifacts[names[0]] = kept
    s.run(1)
    assert told(s.status)["Degraded"][0] == "False"


def test_a_settled_world_writes_nothing(story):
    """Between ticks the same status comes out, though time goes on."""
    s = story({"drift": {"tick": "10m"}})
    s.run(12)
    writes = 0
    for _ in range(40):
        before = s.status
        s.tick(timedelta(seconds=5))
        writes += s.status != before
    assert writes <= 2, "one a tick at most"


def test_messages_hold_no_ages(story, names):
    """A message that counted seconds would be written each turn: through a whole story, few writes between events."""
    s = story(scripts=[RunScript(after=timedelta(minutes=5), artifact=names[0])])
    s.establish()
    s.world.load = Load(60, prompt_tokens=3000)
    s.until_phase(Phase.RECOMPILING)
    before, writes = s.status, 0
    for _ in range(20):
        s.tick(timedelta(seconds=2))
        writes += s.status != before
        before = s.status
    assert writes <= 2


def test_status_comes_back_from_json_as_it_was_through_a_whole_story(story, names):
    s = story(scripts=[RunScript(after=timedelta(minutes=2), artifact=names[0])])
    for minute in range(40):
        if minute == 12:
            s.world.load = Load(60, prompt_tokens=3000)
        s.run(1)
        assert from_json(Status, to_json(s.status)) == s.status
    assert s.status.stable.artifact == names[0]


def test_a_reader_sees_all_conditions_in_every_phase(story, names):
    s = story(scripts=[RunScript(after=timedelta(minutes=2), artifact=names[0])])
    phases = set()
    for turn in range(150):
        if turn == 36:
            s.world.load = Load(60, prompt_tokens=3000)
        s.tick()
        phases.add(s.status.phase)
        assert {c.type for c in s.status.conditions} == ALL
        assert all(c.message and c.reason for c in s.status.conditions)
    assert phases >= {Phase.SERVING, Phase.RECOMPILING, Phase.WARMING, Phase.CANARY, Phase.PROMOTING}


def test_a_rollout_is_watched_more_closely(story, names):
    s = story(scripts=[RunScript(after=timedelta(minutes=2), artifact=names[0])])
    calm = look_again_in(s.spec, s.status)
    s.establish()
    s.world.load = Load(60, prompt_tokens=3000)
    s.until_phase(Phase.CANARY)
    assert look_again_in(s.spec, s.status) < calm


conditions = st.builds(
    Condition,
    type=st.sampled_from(["Ready", "Accepted", "Degraded"]),
    status=st.sampled_from(ConditionStatus),
    reason=st.sampled_from(["A", "B"]),
    message=st.just("m"),
)


@given(st.lists(conditions, max_size=20))
def test_a_transition_time_is_that_of_the_last_flip(written):
    have, flipped = (), {}
    for minute, condition in enumerate(written):
        now = START + minute * timedelta(minutes=1)
        old = find_condition(have, condition.type)
        if old is None or old.status != condition.status:
            flipped[condition.type] = now
        have = set_condition(have, condition, now)
        assert find_condition(have, condition.type).last_transition_time == flipped[condition.type]
    assert len({c.type for c in have}) == len(have)
