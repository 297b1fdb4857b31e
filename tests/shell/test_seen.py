"""Kubernetes objects as the core's observations."""

from datetime import UTC, datetime

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


def waits(reason: str) -> list[JsonObject]:
    return [{"restartCount": 5, "state": {"waiting": {"reason": reason}}}]


def sandbox(status: str, since: str) -> list[JsonObject]:
    return [{"type": "PodReadyToStartContainers", "status": status, "lastTransitionTime": f"2026-01-01T{since}Z"}]


@pytest.mark.parametrize(
    "case, status, words",
    [
        ("it runs", {"phase": "Running", "conditions": READY}, []),
        ("its image is pulled", {"containerStatuses": waits("ContainerCreating")}, []),
        ("its image cannot be pulled", {"containerStatuses": waits("ErrImagePull")}, ["ErrImagePull"]),
        ("it waits for its volumes, not for long", {"conditions": sandbox("False", "00:58:30")}, []),
        ("its volumes are there", {"conditions": sandbox("True", "00:30:00")}, []),
        (
            "its volumes do not come",
            {"conditions": sandbox("False", "00:30:00"), "containerStatuses": waits("ContainerCreating")},
            ["not mounted since 00:30:00", "persistentVolumeClaim smol", "configMap script", "secret token"],
        ),
        ("evicted: another takes its place", {"phase": "Failed", "containerStatuses": waits("CrashLoopBackOff")}, []),
    ],
)
def test_why_a_tier_or_worker_cannot_run(case, status, words):
    volumes = [
        {"persistentVolumeClaim": {"claimName": "smol"}},
        {"configMap": {"name": "script"}},
        {"secret": {"secretName": "token"}},
        {"emptyDir": {}},
    ]
    have = {**pod(**status), "spec": {"volumes": volumes}}
    told = see.problem([have], datetime(2026, 1, 1, 1, tzinfo=UTC))
    assert bool(told) is bool(words) and all(word in told for word in words), case
    assert see.tier("fast", {}, [have], datetime(2026, 1, 1, 1, tzinfo=UTC)).problem == told
