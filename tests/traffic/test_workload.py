"""The workload of a recording, on arithmetic small enough to do by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from tkcc.api.workload import Quantiles, RecordedRequest, Recording
from tkcc.traffic import shape
from tkcc.traffic.prompts import to_recording
from tkcc.traffic.trace import read
from tkcc.traffic.workload import workload_of

CHAT = Path(__file__).parents[2] / "examples" / "traces" / "chat.jsonl.gz"


def _recording(*rows: tuple[int, int, int, int]) -> Recording:
    return Recording(16, "synthetic", tuple(RecordedRequest(*row) for row in rows))


def test_lengths_hits_and_rate_are_the_recordings():
    workload = workload_of(_recording((0, 100, 10, 0), (30_000, 300, 20, 200)), 100.0, 0.1)
    assert workload.prompt_tokens == Quantiles(200, 100, 300, 300)
    assert workload.output_tokens == Quantiles(15, 10, 20, 20)
    assert (workload.hit_ratio_milli, workload.num_requests) == (500, 2)
    assert (workload.window_s, workload.requests_per_minute) == (30, 4)


@pytest.mark.parametrize(
    "case, arrivals_s, want",
    [
        ("one at a time", (0, 10, 20), Quantiles(1, 1, 1, 1)),
        ("all at once", (0, 0, 0), Quantiles(3, 3, 3, 3)),
        ("two overlap for a ninth of the busy time", (0, 2), Quantiles(1, 1, 2, 2)),
        ("idle time does not count", (0, 0, 100, 100), Quantiles(2, 2, 2, 2)),
    ],
)
def test_concurrency_is_weighted_by_time(case, arrivals_s, want):
    """Each request takes 2.5 s: 100 tokens at 100 a second, then 15 at 0.1 s each."""
    recording = _recording(*((at_s * 1000, 100, 15, 0) for at_s in arrivals_s))
    assert workload_of(recording, 100.0, 0.1).concurrency == want


def test_a_cached_prompt_takes_less_time():
    cold = _recording((0, 1000, 1, 0), (5000, 1000, 1, 0))
    warm = replace(cold, requests=tuple(replace(r, cached_tokens=990) for r in cold.requests))
    assert workload_of(cold, 100.0, 0.1).concurrency.p99 == 2
    assert workload_of(warm, 100.0, 0.1).concurrency.p99 == 1


def test_a_shipped_trace_has_a_workload():
    recording = to_recording(shape.scale(read(CHAT), 0.125, 1.0), block_tokens=16)
    workload = workload_of(recording, 300.0, 0.05)
    assert workload.prompt_tokens.mean == 216 and workload.hit_ratio_milli == pytest.approx(433, abs=5)
    assert workload.requests_per_minute == pytest.approx(14.8, abs=1)


def test_no_requests_are_no_workload():
    with pytest.raises(ValueError, match="has no requests"):
        workload_of(_recording(), 1.0, 1.0)
