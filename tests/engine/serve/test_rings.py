"""What a serving pod remembers of finished requests: the log and the recording, both bounded and without text."""

import pytest

from tkcc.engine.serve.kv_blocks import chained_hashes
from tkcc.engine.serve.recording import Recorder
from tkcc.engine.serve.request_log import LoggedRequest, RequestLog


def logged(number):
    return LoggedRequest(1000 + number, number, 0, 1, 0.1, None, "ok")


@pytest.mark.parametrize(
    "case, since, want_seqs, want_dropped",
    [
        ("all that is kept", 0, [2, 3, 4], 2),
        ("from where the last answer ended", 4, [4], 0),
        ("nothing new", 5, [], 0),
        ("a cursor of another life", 99, [], 0),
        ("some were missed", 1, [2, 3, 4], 1),
    ],
)
def test_the_log_is_a_ring_with_a_cursor(case, since, want_seqs, want_dropped):
    log = RequestLog(capacity=3)
    for number in range(5):
        log.append(logged(number))
    answer = log.since(since)
    assert [entry["seq"] for entry in answer["requests"]] == want_seqs, case
    assert [entry["promptTokens"] for entry in answer["requests"]] == want_seqs, case
    assert (answer["next"], answer["dropped"]) == (5, want_dropped), case


def test_a_recording_is_bounded_sorted_and_relative():
    recorder = Recorder(capacity=3, block_tokens=4)
    for arrived_at_ms in (100, 400, 300, 200):  # they finish in another order than they came
        recorder.append(arrived_at_ms, 9, 2, 4, chained_hashes(range(8), 4))
    recording = recorder.since(0, 10)
    assert [r.arrival_ms for r in recording.requests] == [0, 100, 200]
    assert (recording.started_at_ms, recording.block_tokens, recording.source) == (200, 4, "recorded")
    assert [r.arrival_ms for r in recorder.since(300, 10).requests] == [0, 100]
    assert recorder.since(0, 1).started_at_ms == 400  # the latest
    assert recorder.since(500, 10).requests == ()


def test_recorded_hashes_tell_prefixes_apart_and_fit_json():
    recorder = Recorder(capacity=9, block_tokens=2)
    for tokens in ([1, 2, 3, 4], [1, 2, 9, 9], [7, 2, 3, 4]):
        recorder.append(0, 4, 1, 0, chained_hashes(tokens, 2))
    a, b, c = (r.block_hashes for r in recorder.since(0, 9).requests)
    assert a[0] == b[0] and a[1] != b[1] and a[0] != c[0] and a[1] != c[1]
    assert all(0 <= key < 2**48 for key in (*a, *b, *c))
