"""The ring of samples: what the windows need stays, what nobody can reach goes, and it fits into a ConfigMap."""

import random
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tkcc.api.observation import MetricSample
from tkcc.api.spec import DriftSpec, WindowSpec
from tkcc.shell.samples import extend, pack, reach, unpack

START = datetime(2026, 1, 1, tzinfo=UTC)
DRIFT = DriftSpec(
    windows=WindowSpec(long=timedelta(minutes=60), short=timedelta(minutes=15)), tick=timedelta(minutes=5), ticks=3
)


def sample(minutes: float, series: str = "a/1", count: int = 0) -> MetricSample:
    return MetricSample(series, START, START + timedelta(minutes=minutes), count, count * 10, count, count, 0, 0)


def fed(minutes: list[float], series: str = "a/1") -> tuple[MetricSample, ...]:
    samples: tuple[MetricSample, ...] = ()
    for minute in minutes:
        samples = extend(samples, [sample(minute, series)], DRIFT, START + timedelta(minutes=minute))
    return samples


@given(st.lists(st.floats(0.1, 4), min_size=2, max_size=400))
def test_samples_are_spaced_by_the_tick_and_the_newest_is_always_there(steps: list[float]):
    minutes = [sum(steps[:i]) for i in range(1, len(steps) + 1)]
    samples = fed(minutes)
    assert samples[-1] == sample(minutes[-1])
    gaps = [b.at - a.at for a, b in pairwise(samples)]
    # Nothing is further apart than a tick and one turn, and three in a row always span a tick.
    assert all(gap <= DRIFT.tick + timedelta(minutes=4) for gap in gaps)
    assert all(a + b >= DRIFT.tick for a, b in pairwise(gaps))


@given(st.integers(1, 600))
def test_the_reach_is_covered_and_not_exceeded(minutes: int):
    samples = fed([float(minute) for minute in range(minutes)])
    now = START + timedelta(minutes=minutes - 1)
    assert all(now - kept.at <= reach(DRIFT) for kept in samples)
    assert samples[0].at <= max(START, now - reach(DRIFT) + DRIFT.tick + timedelta(minutes=1))
    assert len(samples) <= reach(DRIFT) / DRIFT.tick * 2 + 2


def test_many_series_are_spaced_wider_and_windows_stay_covered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tkcc.shell.samples.MAX_SAMPLES", 100)
    samples: tuple[MetricSample, ...] = ()
    for minute in range(300):
        new = [sample(minute, f"pod-{pod}/1", minute) for pod in range(10)]
        samples = extend(samples, new, DRIFT, START + timedelta(minutes=minute))
        assert len(samples) <= 100
    for pod in range(10):
        minutes = [(kept.at - START) / timedelta(minutes=1) for kept in samples if kept.series == f"pod-{pod}/1"]
        assert minutes[0] <= 299 - DRIFT.windows.long / timedelta(minutes=1) and minutes[-1] == 299


def test_a_dead_process_keeps_its_samples_until_no_window_reaches_them():
    samples = fed([0, 5, 10])
    samples = extend(samples, [sample(60, "b/2")], DRIFT, START + timedelta(minutes=60))
    assert [kept.series for kept in samples] == ["a/1", "a/1", "a/1", "b/2"]
    samples = extend(samples, [sample(91, "b/2")], DRIFT, START + timedelta(minutes=91))
    assert [kept.series for kept in samples] == ["a/1", "b/2", "b/2"]


def test_a_page_that_arrives_late_changes_nothing():
    samples = fed([0, 5, 10])
    assert extend(samples, [sample(7)], DRIFT, START + timedelta(minutes=10)) == samples


def test_a_checkpoint_gives_back_what_was_packed():
    samples = fed([float(minute) for minute in range(100)])
    assert unpack(pack(samples)) == samples
    assert pack(samples) == pack(samples)


def test_a_checkpoint_that_would_not_fit_loses_its_oldest_samples(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tkcc.shell.samples.MAX_PACKED_BYTES", 20_000)
    rng = random.Random(1)
    many = tuple(sample(i / 100, f"pod-{rng.getrandbits(64):x}/{i}", rng.getrandbits(30)) for i in range(1_000))
    packed = pack(many)
    assert len(packed["samples.json.gz"]) <= 20_000 * 4 // 3 + 4
    kept = unpack(packed)
    assert kept == many[-len(kept) :]
    assert len(kept) > len(many) // 8


@pytest.mark.parametrize("data", [{}, {"samples.json.gz": "!!"}, {"samples.json.gz": "aGVsbG8="}])
def test_a_foreign_checkpoint_is_refused_by_name(data):
    with pytest.raises(ValueError, match="no checkpoint of samples"):
        unpack(data)
