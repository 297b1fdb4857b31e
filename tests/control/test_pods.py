"""Pods that are evicted, cannot be replaced or crash: what becomes of canary and stable, and what a person can do."""

from datetime import timedelta

from tkcc.api.fields import BASELINE
from tkcc.api.status import Phase
from tkcc.control.simulation import RunScript

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
