"""Pods that are evicted, cannot be replaced or crash: what becomes of canary and stable, and what a person can do."""

from dataclasses import replace
from datetime import timedelta

import pytest

from tkcc.api.fields import BASELINE
from tkcc.api.status import Phase
from tkcc.control.simulation import Behaviour, RunScript

MINUTE = timedelta(minutes=1)


def in_canary(story, names):
    s = story(scripts=[RunScript(after=2 * MINUTE, artifact=names[0])])
    s.establish()
    s.drift()
    s.run(40, lambda s: s.status.rollout and s.status.rollout.measured_since)
    return s


def test_an_evicted_canary_pod_is_not_the_artifacts_fault(story, names):
    """It stays to be seen, Failed and labelled as in service, beside the pod that takes its place."""
    s = in_canary(story, names)
    s.world.evict(s.world.canary.pods[0])
    s.run(30, lambda s: s.status.stable.artifact == names[0])
    assert s.status.rolled_back == () and s.reasons().count("CanaryStarted") == 1


def test_evicted_stable_pods_are_not_waited_for(story, names):
    s = story()
    s.add_artifact(names[0])
    s.establish()
    s.world.evict(s.world.stable.pods[0])
    s.run(2)
    assert s.condition("Ready").status == "True"
    s.change({"rollout": {"artifact": names[0]}})
    s.until_phase(Phase.PROMOTING)
    s.world.evict(s.world.stable.pods[0])
    s.run(5, lambda s: s.status.stable.artifact == names[0] and s.status.phase is Phase.SERVING)
    assert s.status.previous.artifact == BASELINE


def test_a_pod_that_was_replaced_between_two_looks_begins_the_measurement_anew(story, names):
    """Its counter of requests went with it: the share of traffic would be wrong for the rest of the step."""
    s = in_canary(story, names)
    before = s.status.rollout.measured_since
    for pod in s.world.stable.pods:
        pod.name, pod.started = f"{pod.name}-anew", 0
    s.tick()
    assert s.status.rollout.measured_since > before and s.status.rollout.measurement == 0
    s.run(30, lambda s: s.status.stable.artifact == names[0])


@pytest.mark.parametrize("lost", [1, 4], ids=["one pod", "all pods"])
@pytest.mark.parametrize("how, minutes", [({"crashes": True}, 2), ({"starts": False}, 5)], ids=["crashes", "hangs"])
@pytest.mark.parametrize("back", ["baseline", "previous"])
def test_the_way_back_is_open_while_stable_is_broken(story, names, back, how, minutes, lost):
    """It cannot be whole any more, and nothing is left to compare a canary with."""
    fast, other = names
    s = story(behaviours={fast: Behaviour(0.7), other: Behaviour(0.6)}).promoted(fast)
    if back == "previous":
        s.add_artifact(other)
        s.change({"rollout": {"artifact": other}})
        s.run(30, lambda s: s.status.stable.artifact == other)
    broken, wanted = s.status.stable.artifact, {"baseline": BASELINE, "previous": s.status.previous.artifact}[back]
    s.world.behaviours[broken] = Behaviour(**how)
    for pod in s.world.stable.pods[:lost]:
        s.world.evict(pod)
    s.run(1)
    canaries = s.reasons().count("CanaryStarted")
    s.change({"rollout": {"artifact": wanted}})
    s.run(minutes, lambda s: s.status.stable.artifact == wanted and s.status.phase is Phase.SERVING)
    assert s.reasons().count("CanaryStarted") == canaries and "RollbackStarted" in s.reasons()
    assert s.condition("Ready").status == "True" and s.condition("RolloutHealthy").status == "Unknown"


def test_the_way_back_is_open_while_stable_does_not_say_what_it_runs(story, names):
    """Its code shares a process with the admin port: it must not keep a person from taking it out. An answer that is
    missing for a moment is waited for."""
    s = story().promoted(names[0])
    observe = s.world.observe

    def silent():
        seen = observe()
        pods = tuple(replace(p, artifact_digest="", baseline_digest="") for p in seen.stable.pods)
        return replace(seen, stable=replace(seen.stable, pods=pods))

    s.world.observe = silent
    s.change({"rollout": {"artifact": BASELINE}})
    s.run(3)
    assert (s.status.phase, s.condition("CandidateAvailable").reason) == (Phase.SERVING, "ReplicasNotReady")
    s.until_phase(Phase.PROMOTING, 2)
    s.world.observe = observe
    s.run(3, lambda s: s.status.stable.artifact == BASELINE)


def test_what_never_served_waits_for_a_whole_stable(story, names):
    s = story().promoted(names[0])
    s.add_artifact(names[1])
    s.world.behaviours[names[0]] = Behaviour(starts=False)
    s.world.evict(s.world.stable.pods[0])
    s.change({"rollout": {"artifact": names[1]}})
    s.run(10)
    assert s.condition("CandidateAvailable").reason == "ReplicasNotReady" and s.status.stable.artifact == names[0]


def stalled(story, names, **behaviour):
    """In a promotion that goes no further: the candidate's pods do not come up in place of the stable ones."""
    s = in_canary(story, names)
    s.until_phase(Phase.PROMOTING)
    s.world.behaviours[names[0]] = Behaviour(0.7, starts=False, **behaviour)
    s.world.stable.pods = [p for p in s.world.stable.pods if p.artifact == BASELINE]
    return s


WAYS_OUT = [
    ("a pause", {"suspend": True}, "Suspended"),
    ("another artifact", {"rollout": {"artifact": BASELINE}}, "SpecChanged"),
    ("another spec", {"engine": {"threads": 2}}, "SpecChanged"),
]


@pytest.mark.parametrize("case, patch, reason", WAYS_OUT, ids=[w[0] for w in WAYS_OUT])
def test_a_promotion_that_is_stuck_can_be_ended(story, names, case, patch, reason):
    s = stalled(story, names)
    s.run(10, lambda s: "PromotionStalled" in s.reasons())
    s.change(patch)
    s.run(3, lambda s: s.status.phase is Phase.SERVING)
    assert (s.status.rollout.abort_reason, s.status.stable.artifact) == (reason, BASELINE)
    assert s.world.weight_pct == 0 and s.condition("Ready").status == "True"
    s.world.behaviours[names[0]] = Behaviour(0.7)
    s.change({"suspend": False})
    if case == "another artifact":
        s.run(30)
        assert (s.status.stable.artifact, s.status.candidate) == (BASELINE, None), "the choice stands"
    else:
        s.run(30, lambda s: s.status.stable.artifact == names[0])


def test_a_promotion_under_way_goes_through_a_pause(story, names):
    s = in_canary(story, names)
    s.until_phase(Phase.PROMOTING)
    s.change({"suspend": True})
    s.run(5, lambda s: s.status.stable.artifact == names[0])


def test_a_candidate_that_crashes_in_the_stable_pods_is_taken_back(story, names):
    s = stalled(story, names, crashes=True)
    s.run(3, lambda s: s.status.phase is Phase.SERVING)
    assert s.status.stable.artifact == BASELINE and s.condition("Ready").status == "True"
    assert [(r.artifact, r.reason) for r in s.status.rolled_back] == [(names[0], "CanaryCrashed")]
