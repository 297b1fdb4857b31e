"""Rollouts that end without a verdict: the artifact is tried again, each time later, and not for ever."""

from datetime import timedelta
from itertools import pairwise

import pytest

from tkcc.api.status import Phase
from tkcc.control.simulation import Behaviour, Load, RunScript

MINUTE = timedelta(minutes=1)


def found(story, names, **world):
    s = story(scripts=[RunScript(after=2 * MINUTE, artifact=names[0])], **world)
    s.establish()
    s.drift()
    return s


@pytest.mark.parametrize("phase", [Phase.WARMING, Phase.CANARY])
def test_time_without_an_operator_does_not_count(story, names, phase):
    """Down beyond every deadline; then the probes that it kept in memory are asked again."""
    s = found(story, names)
    s.until_phase(phase)
    for _ in range(40):
        s.world.advance(MINUTE)
    s.world.restart()
    s.run(15, lambda s: s.status.stable.artifact == names[0])
    assert s.status.rolled_back == () and s.reasons().count("CanaryStarted") == 1


def test_a_canary_without_traffic_is_tried_again_when_there_is_some(story, names):
    s = found(story, names)
    s.until_phase(Phase.CANARY)
    load, s.world.load = s.world.load, Load(requests_per_minute=0)
    s.run(10, lambda s: s.condition("CandidateAvailable").reason == "CoolingDown")
    assert [(r.reason, r.tries) for r in s.status.rolled_back] == [("AnalysisInconclusive", 1)]
    again = s.status.rolled_back[0].at + 20 * MINUTE
    assert f"not before {again:%Y-%m-%dT%H:%M:%SZ}" in s.condition("CandidateAvailable").message
    s.run(8 * 60)
    assert s.world.now > again and s.condition("CandidateAvailable").reason == "InsufficientSamples"
    assert s.status.rolled_back[0].tries == 1, "a night without traffic costs one try"
    s.world.load = load
    s.run(20, lambda s: s.status.stable.artifact == names[0])
    assert s.status.rolled_back == () and len(s.runs) == 1


@pytest.mark.parametrize("by_hand", [False, True], ids=["found", "asked for"])
def test_after_three_tries_it_is_given_up(story, names, by_hand):
    never = {names[0]: Behaviour(starts=False)}
    if by_hand:
        s = story(behaviours=never)
        s.add_artifact(names[0])
        s.establish()
        s.change({"rollout": {"artifact": names[0]}})
    else:
        s = found(story, names, behaviours=never)
    s.run(180)
    begun = [at for at, event in s.world.events if event.reason == "CanaryStarted"]
    waits = [(b - a) // MINUTE for a, b in pairwise(begun)]
    assert len(waits) == 2 and 20 <= waits[0] < 30 and 40 <= waits[1] < 50
    assert [(r.reason, r.tries) for r in s.status.rolled_back] == [("WarmupTimedOut", 3)]
    assert s.condition("CandidateAvailable").reason == "RolledBack" and s.status.candidate is None
    assert len(s.runs) <= 1, "its workload is not searched again"


def test_asked_for_anew_it_does_not_wait(story, names):
    s = found(story, names, behaviours={names[0]: Behaviour(starts=False)})
    s.run(20, lambda s: s.status.rolled_back and s.status.phase is Phase.SERVING)
    s.world.behaviours[names[0]] = Behaviour(0.7)
    s.change({"rollout": {"artifact": names[0]}})
    s.until_phase(Phase.WARMING, 1)
