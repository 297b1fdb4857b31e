"""Kubernetes objects as the core's observations."""

import pytest

from tkcc.kube.resources import JsonObject
from tkcc.shell import seen as see

READY = [{"type": "Ready", "status": "True"}]


def pod(**status: object) -> JsonObject:
    return {"metadata": {"name": "llama-stable-1", "labels": {"tkcc.dev/serving": "true"}}, "status": status}


@pytest.mark.parametrize(
    "case, status, has_ended, is_ready",
    [
        ("it serves", {"phase": "Running", "conditions": READY}, False, True),
        ("it starts", {"phase": "Pending"}, False, False),
        ("just made", {}, False, False),
        ("evicted", {"phase": "Failed", "reason": "Evicted"}, True, False),
        ("rejected by its node", {"phase": "Failed", "reason": "OutOfcpu", "conditions": []}, True, False),
        ("its node shut down", {"phase": "Succeeded", "reason": "Terminated"}, True, False),
    ],
)
def test_a_pod_that_has_ended_is_told_from_one_that_starts(case, status, has_ended, is_ready):
    told = see.pod(pod(**status), None)
    assert (told.has_ended, told.is_ready) == (has_ended, is_ready), case


def test_an_evicted_tier_says_nothing_of_the_one_that_took_its_place():
    container = {"restartCount": 5, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    told = see.tier("fast", {}, [pod(phase="Failed", containerStatuses=[container]), pod(phase="Running")])
    assert (told.restarts, told.problem) == (0, "")
