import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tkcc.stats.cohort import MIN_SAMPLES, Sample, compare
from tkcc.stats.proportion import p_more_failures, share_is_near


def requests(rng: random.Random, n: int, factor: float = 1.0, size_factor: float = 1.0) -> list[Sample]:
    """Time grows with the square root of size; log-normal noise of 30 % and a few stragglers."""
    out = []
    for _ in range(n):
        size = size_factor * math.exp(rng.gauss(6.0, 1.0))
        straggler = 5.0 if rng.random() < 0.03 else 1.0
        out.append(Sample(factor * straggler * 0.01 * math.sqrt(size) * math.exp(rng.gauss(0.0, 0.3)), size))
    return out


@pytest.mark.parametrize("n", [8, 25, 60])
def test_equal_cohorts_are_called_slower_no_more_often_than_alpha(n):
    rng = random.Random(n)
    trials, alpha = 400, 0.05
    false = 0
    for _ in range(trials):
        result = compare(requests(rng, n), requests(rng, n))
        assert result is not None
        false += result.p_above(1.0) < alpha
    assert false / trials <= alpha + 3 * math.sqrt(alpha / trials)


def test_a_canary_right_at_the_limit_is_passed_no_more_often_than_alpha():
    rng = random.Random(5)
    trials, alpha = 300, 0.05
    passed = sum(compare(requests(rng, 40, 1.1), requests(rng, 40)).p_below(1.1) < alpha for _ in range(trials))
    assert passed / trials <= alpha + 3 * math.sqrt(alpha / trials)


@pytest.mark.parametrize(
    "case, factor, method, limit",
    [
        ("half as fast again is seen", 1.5, "p_above", 1.1),
        ("twenty percent faster is seen to keep the limit", 0.8, "p_below", 1.1),
        ("equal speed keeps a wide limit", 1.0, "p_below", 1.3),
    ],
)
def test_power_with_sixty_requests(case, factor, method, limit):
    rng = random.Random(6)
    found = sum(getattr(compare(requests(rng, 60, factor), requests(rng, 60)), method)(limit) < 0.05 for _ in range(60))
    assert found >= 54, case


def test_interval_covers_the_true_ratio():
    rng = random.Random(7)
    covered = 0
    for _ in range(200):
        result = compare(requests(rng, 30, 1.2), requests(rng, 30), confidence=0.9)
        assert result is not None and result.low <= result.ratio <= result.high
        covered += result.low <= 1.2 <= result.high
    assert covered >= 167  # 0.9 * 200 less three standard deviations


def test_longer_prompts_are_not_taken_for_a_slower_canary():
    rng = random.Random(8)
    result = compare(requests(rng, 80, 1.0, size_factor=4.0), requests(rng, 80))
    assert result is not None and result.low <= 1.0 <= result.high
    raw = compare(
        [Sample(s.time_s, 1.0) for s in requests(rng, 80, 1.0, 4.0)], [Sample(s.time_s, 1.0) for s in requests(rng, 80)]
    )
    assert raw is not None and raw.ratio > 1.2  # without sizes it would be


def test_twice_the_work_in_twice_the_time_is_the_same_speed():
    rng = random.Random(10)
    ours = [Sample(2.0 * rng.lognormvariate(0, 0.1), 1000.0) for _ in range(40)]
    theirs = [Sample(1.0 * rng.lognormvariate(0, 0.1), 500.0) for _ in range(40)]
    result = compare(ours, theirs)
    assert result is not None and result.low <= 1.0 <= result.high


def test_too_few_samples_are_no_evidence():
    rng = random.Random(9)
    assert compare(requests(rng, MIN_SAMPLES - 1), requests(rng, 100)) is None


def test_all_equal_times_are_no_evidence_of_a_difference():
    same = [Sample(1.0, 1.0)] * 20
    result = compare(same, same)
    assert result is not None and result.p_above(1.0) == 1.0 and result.p_below(1.0) == 1.0


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_times_that_are_no_times_are_refused(bad):
    with pytest.raises(ValueError):
        compare([Sample(bad, 1.0)] * 8, [Sample(1.0, 1.0)] * 8)


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12), st.integers(0, 12))
def test_fisher_is_a_probability_and_falls_with_each_more_failure(fa, ok_a, fb, ok_b):
    p = p_more_failures(fa, fa + ok_a, fb, fb + ok_b)
    assert 0.0 < p <= 1.0
    if ok_a:
        assert p_more_failures(fa + 1, fa + ok_a, fb, fb + ok_b) <= p + 1e-12


@pytest.mark.parametrize(
    "case, counts, p",
    [
        ("Fisher's tea: four of four", (4, 4, 0, 4), 1 / 70),
        ("Fisher's tea: three of four", (3, 4, 1, 4), 17 / 70),
        ("a thousand a side", (510, 1000, 490, 1000), 0.197747100955065),
        ("ten thousand a side, half of them failed", (5100, 10000, 4900, 10000), 0.0024436763394863),
        ("a chance that no float can tell from none", (20_000, 20_000, 0, 20_000), 0.0),
        ("fewer than the others, of many", (0, 10_000, 5000, 10_000), 1.0),
        ("nobody failed", (0, 50, 0, 50), 1.0),
        ("nothing was sent", (0, 0, 0, 0), 1.0),
    ],
)
def test_fisher_table(case, counts, p):
    assert p_more_failures(*counts) == pytest.approx(p, rel=1e-8), case


def test_counts_that_cannot_be_are_refused():
    with pytest.raises(ValueError):
        p_more_failures(3, 2, 0, 1)


@pytest.mark.parametrize(
    "case, part, total, near",
    [
        ("exact", 25, 100, True),
        ("as far as chance goes", 35, 100, True),
        ("all of it", 100, 100, False),
        ("none of it", 0, 100, False),
        ("nothing seen is not verified", 0, 0, False),
        ("few requests allow more", 4, 8, True),
    ],
)
def test_share(case, part, total, near):
    assert share_is_near(part, total, 0.25, slack=0.05, sigmas=3.0) is near, case
