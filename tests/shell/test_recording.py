"""Recordings of several pods as one: real distances in time, bounded size."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from tkcc.api.workload import RecordedRequest, Recording
from tkcc.shell.recording import fitted, merged

T0_MS = 1_700_000_000_000


def recording(started_at_ms: int, arrivals_ms: list[int], tokens: int = 10, block: int = 16) -> Recording:
    requests = tuple(RecordedRequest(at, tokens, 5, 0) for at in arrivals_ms)
    return Recording(block, "recorded", requests, started_at_ms)


def shape(found: Recording | None) -> list[tuple[int, int]]:
    assert found
    return [(request.arrival_ms, request.prompt_tokens) for request in found.requests]


def test_pods_interleave_as_they_were_served():
    one, two = recording(T0_MS, [0, 100, 200], tokens=1), recording(T0_MS + 50, [0, 100], tokens=2)
    found = merged([two, one], None, 100)
    assert shape(found) == [(0, 1), (50, 2), (100, 1), (150, 2), (200, 1)]
    assert found and found.started_at_ms == T0_MS


def test_the_newest_are_kept_and_time_starts_with_the_first_of_them():
    found = merged([recording(T0_MS, [0, 100, 250])], None, 2)
    assert shape(found) == [(0, 10), (150, 10)]
    assert found and found.started_at_ms == T0_MS + 100


def test_what_arrived_after_the_window_is_left_out():
    until = datetime.fromtimestamp((T0_MS + 150) / 1000, UTC)
    assert shape(merged([recording(T0_MS, [0, 100, 200])], until, 100)) == [(0, 10), (100, 10)]
    assert merged([recording(T0_MS + 1000, [0])], until, 100) is None


def test_a_recording_without_a_place_in_time_starts_with_the_earliest():
    assert shape(merged([recording(T0_MS, [0, 100], 1), recording(0, [0, 50], 2)], None, 9)) == [
        (0, 1),
        (0, 2),
        (50, 2),
        (100, 1),
    ]


def test_other_block_sizes_do_not_mix():
    assert shape(merged([recording(T0_MS, [0]), recording(T0_MS, [0, 5], block=32)], None, 9)) == [(0, 10)]


def test_nothing_recorded_is_none():
    assert merged([], None, 9) is None
    assert merged([recording(T0_MS, [])], None, 9) is None


def test_what_does_not_fit_is_cut_from_the_oldest():
    hashes = tuple(range(2**40, 2**40 + 64))
    requests = tuple(
        RecordedRequest(i * 10, 1024, 5, 0, tuple(h * (i + 1) % 2**48 for h in hashes)) for i in range(400)
    )
    full = Recording(16, "recorded", requests, T0_MS)
    small = fitted(full, max_bytes=10_000)
    assert 1 < len(small.requests) < 99
    assert small.requests[0].arrival_ms == 0
    assert small.requests[-1].block_hashes == requests[-1].block_hashes
    assert small.started_at_ms + small.requests[-1].arrival_ms == T0_MS + requests[-1].arrival_ms
    assert fitted(full) is full


def test_long_prompts_leave_room_for_fewer_requests(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tkcc.shell.recording.MAX_BLOCKS", 10)
    whole = recording(T0_MS, [0, 1, 2, 3])
    for blocks, kept in ((0, 4), (3, 3), (5, 2), (11, 1)):
        requests = tuple(replace(request, block_hashes=tuple(range(blocks))) for request in whole.requests)
        assert len(shape(merged([replace(whole, requests=requests)], None, 100))) == kept


def test_pod_by_pod_is_the_same_as_all_at_once():
    pods = [recording(T0_MS + 10 * pod, [0, 7, 40 + pod], tokens=pod) for pod in range(5)]
    kept = None
    for pod in pods:
        kept = merged([*([kept] if kept else []), pod], None, 6)
    assert kept == merged(pods, None, 6)
