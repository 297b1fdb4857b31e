"""What is kept between turns: bounded, and fair to every pod."""

from datetime import UTC, datetime, timedelta

import pytest

from tkcc.api.observation import RequestSample
from tkcc.shell.memory import newest_of_each, unbroken

START = datetime(2026, 1, 1, tzinfo=UTC)


def requests(pod: str, n: int, start: int = 0) -> list[RequestSample]:
    return [RequestSample(pod, "baseline", START + timedelta(seconds=start + i), 1, 0, 1, "ok") for i in range(n)]


@pytest.mark.parametrize(
    "case, found, kept",
    [
        ("all fit", {"canary": 3, "stable": 5}, {"canary": 3, "stable": 5}),
        ("of each pod the newest", {"canary": 9, "stable": 9}, {"canary": 5, "stable": 5}),
        ("a pod that finishes much drives nobody out", {"canary": 2, "stable": 90}, {"canary": 2, "stable": 5}),
        ("nor does one that is read last", {"canary": 90, "stable": 2}, {"canary": 5, "stable": 2}),
        ("nothing", {}, {}),
    ],
)
def test_what_does_not_fit_is_forgotten_of_each_pod_alike(case, found, kept):
    everything = [request for pod, n in found.items() for request in requests(pod, n)]
    left = newest_of_each(everything, 10)
    assert {pod: [r for r in left if r.pod == pod] for pod in found} == {
        pod: requests(pod, found[pod])[-n:] for pod, n in kept.items()
    }, case


def test_newest_is_by_time_and_not_by_when_it_was_read():
    late, early = requests("canary", 5, start=100), requests("canary", 5)
    assert newest_of_each([*late, *early], 5) == tuple(late)


@pytest.mark.parametrize(
    "case, seconds, since",
    [
        ("the first look", [0], 0),
        ("turn upon turn", [0, 15, 30, 90], 0),
        ("after a break", [0, 15, 200, 215], 200),
        ("after two", [0, 500, 1000, 1060], 1000),
    ],
)
def test_since_when_turns_follow_each_other(case, seconds, since):
    have = last = None
    for now in (START + timedelta(seconds=s) for s in seconds):
        have, last = unbroken(have, last, now), now
    assert have == START + timedelta(seconds=since), case
