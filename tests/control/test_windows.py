"""Windows over absolute counters of pods that restart, come and go."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tkcc.api.observation import MetricSample, RequestSample
from tkcc.control.windows import increases, window, workload_of

T0 = datetime(2026, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
NO_FILL = timedelta(0)


def sample(minute, requests, *, series="a", tokens=100, hits=0.5, started=-600, running=0):
    """`requests` so far, each of `tokens` tokens, of which the share `hits` came from the cache."""
    total = requests * tokens
    return MetricSample(
        series=series,
        started_at=T0 + started * MINUTE,
        at=T0 + minute * MINUTE,
        prompt_requests=requests,
        prompt_tokens=total,
        output_requests=requests,
        output_tokens=requests * 10,
        hit_tokens=round(total * hits),
        query_tokens=total,
        running=running,
    )


def seen(samples, end=10, length=10, fill=NO_FILL):
    first = min((s.at for s in samples), default=None)
    return window(increases(samples, fill), first, T0 + end * MINUTE, length * MINUTE)


@pytest.mark.parametrize(
    "case, samples, requests",
    [
        ("one sample is a start, not an increase", [sample(1, 50)], 0),
        ("two samples are one increase", [sample(1, 50), sample(2, 60)], 10),
        ("a new pod's first interval is dropped", [sample(1, 0), sample(9, 8, series="b"), sample(2, 5)], 5),
        ("a counter that fell has restarted from zero", [sample(1, 50), sample(2, 7)], 7),
        ("pods add up", [sample(1, 0), sample(2, 4), sample(1, 0, series="b"), sample(2, 6, series="b")], 10),
        ("samples may come in any order", [sample(3, 9), sample(1, 0), sample(2, 4)], 9),
        ("what is booked after the end does not count", [sample(1, 0), sample(9, 3), sample(11, 50)], 3),
        ("what is booked at the start does not count", [sample(-1, 0), sample(0, 3), sample(5, 10)], 7),
        ("a pod that went is counted as far as it was seen", [sample(1, 0), sample(2, 4), sample(8, 0, series="b")], 4),
        ("the same moment twice is one sample", [sample(1, 0), sample(1, 0), sample(2, 4)], 4),
        ("a counter below zero counts nothing", [sample(1, 50), sample(2, -7)], 0),
        ("nothing is nothing", [], 0),
    ],
)
def test_requests_in_a_window(case, samples, requests):
    assert seen(samples).requests == requests, case


def test_restart_as_a_new_series_never_counts_backwards():
    before = [sample(1, 1000), sample(2, 1010)]
    after = [sample(3, 2, series="a2", started=3), sample(4, 5, series="a2", started=3)]
    assert seen(before + after).requests == 10 + 3


@pytest.mark.parametrize(
    "case, started, hit_ratio",
    [
        ("an old pod's hits count", -600, 0.9),
        ("a pod whose cache fills is left out", 0, None),
        ("from its cache-fill time on it counts", -14, 0.9),
    ],
)
def test_hits_of_a_filling_cache_are_masked(case, started, hit_ratio):
    window_ = seen([sample(1, 0, started=started), sample(5, 10, hits=0.9, started=started)], fill=15 * MINUTE)
    assert window_.hit_ratio == (None if hit_ratio is None else pytest.approx(hit_ratio)), case
    assert window_.requests == 10  # its prompts count all the same


def test_a_pod_from_the_end_of_time_has_no_warm_cache():
    far = datetime(9999, 12, 31, tzinfo=UTC)
    assert seen([replace(sample(n, n), started_at=far) for n in (1, 5)], fill=15 * MINUTE).hit_ratio is None


def test_one_restarted_pod_does_not_hide_the_others_hits():
    old = [sample(1, 0), sample(5, 10, hits=0.8)]
    new = [sample(1, 0, series="b", started=1), sample(5, 10, series="b", hits=0.0, started=1)]
    assert seen(old + new, fill=15 * MINUTE).hit_ratio == pytest.approx(0.8)
    assert seen(old + new, fill=NO_FILL).hit_ratio == pytest.approx(0.4)


@pytest.mark.parametrize("first, is_covered", [(0, True), (-5, True), (1, False)])
def test_a_window_is_covered_by_samples_from_its_start_on(first, is_covered):
    assert seen([sample(first, 0), sample(9, 1)]).is_covered is is_covered


increments = st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=2, max_size=25)


@given(increments, st.integers(1, 24))
def test_two_halves_hold_what_the_whole_holds(steps, cut):
    """Whatever restarts between samples, no request is counted twice or lost at a window's edge."""
    total, samples = 0, []
    for minute, (grown, restarts) in enumerate(steps):
        total = grown if restarts else total + grown
        samples.append(sample(minute, total))
    end = len(steps)
    history, first = increases(samples, NO_FILL), samples[0].at
    whole = window(history, first, T0 + end * MINUTE, end * MINUTE)
    cut = min(cut, end)
    late = window(history, first, T0 + end * MINUTE, cut * MINUTE)
    early = window(history, first, T0 + (end - cut) * MINUTE, (end - cut) * MINUTE)
    assert late.requests + early.requests == whole.requests
    assert late.prompt_tokens + early.prompt_tokens == whole.prompt_tokens == whole.requests * 100


def test_workload_takes_means_from_counters_and_shapes_from_requests():
    window_ = seen([sample(1, 0), sample(9, 40, running=3)])
    lengths = [RequestSample("a", "baseline", T0 + 2 * MINUTE, n, 0, 10 + n, "ok") for n in range(1, 101)]
    workload = workload_of(window_, lengths)
    assert workload is not None
    assert (workload.prompt_tokens.mean, workload.prompt_tokens.p50, workload.prompt_tokens.p99) == (100, 50, 99)
    assert (workload.output_tokens.mean, workload.output_tokens.p90) == (10, 100)
    assert (workload.hit_ratio_milli, workload.requests_per_minute, workload.num_requests) == (500, 4, 40)
    assert workload.concurrency.mean == 3


def test_few_remembered_requests_have_no_shape():
    window_ = seen([sample(1, 0), sample(9, 40)])
    failed = [RequestSample("a", "baseline", T0 + 2 * MINUTE, 9999, 0, 0, "error")] * 100
    old = [replace(r, started_at=T0 - MINUTE, outcome="ok") for r in failed]
    workload = workload_of(window_, failed + old)
    assert workload is not None and workload.prompt_tokens.p99 == 100


def test_no_requests_is_no_workload():
    assert workload_of(seen([sample(1, 5), sample(9, 5)]), []) is None
