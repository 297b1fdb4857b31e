"""Distance to the nearest plan, and when it is drift: both windows, enough ticks, enough requests."""

import math
import random
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tkcc.api.codec import from_dict
from tkcc.api.observation import MetricSample
from tkcc.api.spec import DriftSpec
from tkcc.api.status import Plan, Point
from tkcc.control.drift import Reading, Traffic, distance, is_away, nearest, point_of, read, tick_of, ticks_away
from tkcc.control.simulation import START

SPEC = from_dict(DriftSpec, {"tick": "1m", "ticks": 3, "minRequests": 12, "windows": {"long": "12m", "short": "3m"}})
MINUTE = timedelta(minutes=1)
HOME = Plan("home", "baseline", 1000, 500)

points = st.builds(Point, st.integers(1, 200_000), st.none() | st.integers(0, 1000))


@pytest.mark.parametrize(
    "case, prompt_tokens, hit_ratio_milli, value, signal",
    [
        ("the same workload", 1000, 500, 0.0, None),
        ("prompts by the limit", 1250, 500, 1.0, None),
        ("prompts past the limit", 1400, 500, 1.508, "PromptLengthShifted"),
        ("shorter prompts count as much", 800, 500, 1.0, None),
        ("a logit of one more", 1000, 731, 1.0, None),
        ("the hit ratio fell away", 1000, 100, 2.197, "PrefixCacheHitRateShifted"),
        ("both moved", 2000, 100, 3.106, "MultipleSignalsShifted"),
        ("an unknown hit ratio does not count", 1250, None, 1.0, None),
        ("beyond 1 % a logit says nothing more", 1000, 0, 4.595, "PrefixCacheHitRateShifted"),
    ],
)
def test_distance(case, prompt_tokens, hit_ratio_milli, value, signal):
    found = distance(Point(prompt_tokens, hit_ratio_milli), HOME, SPEC)
    assert found.value == pytest.approx(value, abs=0.002), case
    if signal:
        assert found.signal == signal


@given(points, points)
def test_distance_is_symmetric_and_zero_only_to_itself(a, b):
    assert distance(a, b, SPEC).value == pytest.approx(distance(b, a, SPEC).value)
    assert distance(a, a, SPEC).value == 0.0


@given(points, points, points)
def test_prompt_distance_keeps_the_triangle(a, b, c):
    assert distance(a, c, SPEC).prompt <= distance(a, b, SPEC).prompt + distance(b, c, SPEC).prompt + 1e-9


@given(points, st.lists(st.builds(Plan, st.uuids().map(str), st.just("baseline"), st.integers(1, 200_000)), max_size=5))
def test_nearest_is_no_farther_than_any_other(point, plans):
    found = nearest(point, plans, SPEC)
    assert (found is None) == (not plans)
    if found:
        assert all(found[1].value <= distance(point, plan, SPEC).value for plan in plans)


def away(long, short):
    return is_away(Reading(START, long, short, 100, True), (HOME,), SPEC)


@pytest.mark.parametrize(
    "case, long, short, want",
    [
        ("both windows moved", Point(2000), Point(2000), True),
        ("the long window's echo of a spike that is over", Point(2000), Point(1000), False),
        ("a spike that just began", Point(1000), Point(2000), False),
        ("no evidence in the long window", None, Point(2000), False),
        ("no evidence in the short window", Point(2000), None, False),
    ],
)
def test_both_windows_must_be_away(case, long, short, want):
    assert away(long, short) is want, case


def test_without_a_plan_nothing_is_away():
    assert not is_away(Reading(START, Point(2000), Point(2000), 100, True), (), SPEC)


def traffic(tokens_by_minute, requests=10):
    """One pod; minute m of the list had requests of that many tokens (None: no requests)."""
    samples, total, tokens_total = [], 0, 0
    for m, tokens in enumerate([None, *tokens_by_minute]):
        total += requests if tokens else 0
        tokens_total += requests * (tokens or 0)
        samples.append(MetricSample("pod", START, START + m * MINUTE, total, tokens_total, 0, 0, 0, 0))
    return Traffic(tuple(samples), timedelta(0))


def count(tokens_by_minute, *, at=None, since=None, requests=10):
    at = len(tokens_by_minute) if at is None else at
    return ticks_away(traffic(tokens_by_minute, requests), SPEC, (HOME,), START + at * MINUTE, since)[0]


@pytest.mark.parametrize(
    "case, minutes, ticks",
    [
        ("steady traffic", [1000] * 20, 0),
        ("a shift counts from when both windows left", [1000] * 12 + [3000] * 2, 1),
        ("and on", [1000] * 12 + [3000] * 3, 2),
        ("up to what is needed and no further", [1000] * 12 + [3000] * 20, 3),
        ("a spike that is over resets the count", [1000] * 12 + [3000] * 3 + [1000] * 3, 0),
        ("idle is no evidence", [1000] * 12 + [3000] * 5 + [None] * 12, 0),
        ("an idle short window is no evidence", [1000] * 12 + [3000] * 5 + [None] * 3, 0),
        ("a window that samples do not cover is no evidence", [3000] * 11, 0),
    ],
)
def test_ticks_away(case, minutes, ticks):
    assert count(minutes) == ticks, case


def test_too_few_requests_are_no_evidence():
    minutes = [1000] * 12 + [3000] * 12
    assert count(minutes, requests=1) == 3  # 12 in the long window
    assert read(traffic(minutes, 1), SPEC, START + 24 * MINUTE).requests == 12
    assert count([1000] * 12 + [3000] * 11 + [None], requests=1) == 0


def test_ticks_before_the_evidence_starts_do_not_count():
    minutes = [1000] * 12 + [3000] * 20
    assert count(minutes, since=START + 31 * MINUTE) == 1
    assert count(minutes, since=START + 32 * MINUTE) == 0


@given(st.lists(st.sampled_from([None, 700, 1000, 1200, 3000]), min_size=1, max_size=40))
def test_a_restart_forgets_nothing(minutes):
    """Ticks are a function of the samples: counting at each tick, or once at the end, is the same."""
    counted = 0
    for at in range(1, len(minutes) + 1):
        one = ticks_away(traffic(minutes), SPEC, (HOME,), START + at * MINUTE, START + (at - 1) * MINUTE)[0]
        counted = min(SPEC.ticks, counted + 1) if one else 0
    assert count(minutes) == counted


@given(st.integers(0, 10**7))
def test_ticks_lie_on_a_grid(seconds):
    now = START + timedelta(seconds=seconds)
    at = tick_of(now, SPEC)
    assert at <= now < at + SPEC.tick and (at - START) % SPEC.tick == timedelta(0)


def test_a_mean_needs_requests():
    assert point_of(traffic([1000]).window(START + MINUTE, MINUTE), 11) is None
    assert point_of(traffic([None]).window(START + MINUTE, MINUTE), 0) is None
    assert point_of(traffic([1000]).window(START + MINUTE, MINUTE), 10) == Point(1000, None)


def test_thresholds_are_the_specs():
    wide = from_dict(DriftSpec, {"promptRatioPercent": 200})
    assert distance(Point(2000), HOME, wide).value == pytest.approx(1.0)
    assert distance(Point(2000), HOME, SPEC).value == pytest.approx(math.log(2) / math.log(1.25))


def first_drift(shape, hours=24, default=DriftSpec()):  # noqa: B008 - frozen
    """Minutes after hour 4 at which the default settings see drift; `shape(minute)` is the mean prompt of that minute,
    in units of the plan's, with an agentic day's noise of 8 % from one five-minute mean to the next."""
    rng = random.Random(1)
    samples, total, tokens = [], 0, 0
    for tick in range(hours * 12):
        total += 150
        tokens += round(150 * 1000 * shape(5 * tick - 240) * rng.lognormvariate(0.0, 0.08))
        samples.append(MetricSample("pod", START, START + 5 * tick * MINUTE, total, tokens, 0, 0, 0, 0))
    seen = Traffic(tuple(samples), timedelta(0))
    for tick in range(13, hours * 12):
        if ticks_away(seen, default, (HOME,), START + 5 * tick * MINUTE, None)[0] >= default.ticks:
            return 5 * tick - 240
    return None


@pytest.mark.parametrize(
    "case, shape, soonest, latest",
    [
        ("steady traffic never", lambda m: 1.0, None, None),
        ("a fifth more never", lambda m: 1.2 if m > 0 else 1.0, None, None),
        ("a spike of 15 minutes never", lambda m: 2.0 if 0 < m <= 15 else 1.0, None, None),
        ("a spike of half an hour never", lambda m: 2.0 if 0 < m <= 30 else 1.0, None, None),
        ("a spike of an hour and a half, while it lasts", lambda m: 2.0 if 0 < m <= 90 else 1.0, 60, 90),
        ("1.4 times, within two hours", lambda m: 1.4 if m > 0 else 1.0, 60, 120),
        ("half, within two hours", lambda m: 0.5 if m > 0 else 1.0, 60, 120),
        ("a ramp to 1.8 over ten hours, past 1.25", lambda m: 1 + 0.8 * min(1, max(0, m / 600)), 187, 420),
    ],
)
def test_the_default_settings_see_what_lasts_and_not_what_passes(case, shape, soonest, latest):
    at = first_drift(shape)
    assert at is None if soonest is None else soonest <= at <= latest, (case, at)
