import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tkcc.stats.eprocess import SignEProcess, bootstrap_log_ratio, median


def run(p_win: float, pairs: int, alpha: float, rng: random.Random) -> int | None:
    """Pairs until acceptance when every pair is looked at, or None."""
    process = SignEProcess()
    for n in range(1, pairs + 1):
        process.update(rng.random() < p_win)
        if process.accepts(alpha):
            return n
    return None


@pytest.mark.parametrize("alpha", [0.05, 0.01, 0.001])
def test_peeking_after_every_pair_keeps_false_accepts_under_alpha(alpha):
    rng = random.Random(1)
    trials = 600
    false = sum(run(0.5, 120, alpha, rng) is not None for _ in range(trials))
    # three standard deviations of a binomial that is exactly at alpha
    assert false / trials <= alpha + 3 * math.sqrt(alpha / trials)


@pytest.mark.parametrize(
    "case, p_win, alpha, most_pairs",
    [
        ("a certain win is seen in a handful of pairs", 1.0, 1e-2, 12),
        ("a win in nine of ten takes few more", 0.9, 1e-3, 60),
        ("a win in seven of ten is still found", 0.7, 1e-3, 300),
    ],
)
def test_power(case, p_win, alpha, most_pairs):
    rng = random.Random(2)
    found = [run(p_win, most_pairs, alpha, rng) for _ in range(100)]
    assert sum(n is not None for n in found) >= 95, case


@given(st.lists(st.booleans(), max_size=60))
def test_capital_is_fair_one_more_pair_keeps_its_mean(outcomes):
    process = SignEProcess()
    for win in outcomes:
        process.update(win)
    won, lost = SignEProcess(process.wins + 1, process.losses), SignEProcess(process.wins, process.losses + 1)
    assert (won.e_value + lost.e_value) / 2 == pytest.approx(process.e_value)


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_both_directions_are_never_established_at_once(wins, losses):
    process = SignEProcess(wins, losses)
    assert not (process.accepts(0.05) and process.is_futile(0.05))
    assert math.isfinite(process.log_e_value)


def test_no_pairs_is_no_evidence():
    assert SignEProcess().e_value == pytest.approx(1.0)
    assert not SignEProcess().accepts(0.5)


def test_ties_counted_as_losses_never_accept():
    process = SignEProcess()
    for _ in range(1000):
        process.update(False)
    assert not process.accepts(0.05) and process.is_futile(0.05)


@pytest.mark.parametrize("alpha", [0.0, 1.0, -1.0, math.nan])
def test_an_alpha_outside_0_to_1_is_refused(alpha):
    with pytest.raises(ValueError, match="alpha"):
        SignEProcess().accepts(alpha)


def test_interval_covers_the_true_gain_under_drifting_noise():
    """AR(1) drift shared within a pair, 2 % spikes; 95 % intervals must cover at least 88 % of 100 times."""
    rng = random.Random(3)
    true_log, covered = math.log(1.05), 0
    for trial in range(100):
        mood, pairs = 0.0, []
        for _ in range(60):
            mood = 0.9 * mood + rng.gauss(0, 0.005)
            spike = 1.3 if rng.random() < 0.02 else 1.0
            pairs.append(
                (105.0 * math.exp(mood + rng.gauss(0, 0.01)) * spike, 100.0 * math.exp(mood + rng.gauss(0, 0.01)))
            )
        interval = bootstrap_log_ratio(pairs, trial, resamples=200)
        assert interval.low <= interval.median <= interval.high
        covered += interval.low <= true_log <= interval.high
    assert covered >= 88


def test_neighbours_that_move_together_widen_the_interval():
    """Sixty pairs in a row of a slow mood say less than sixty apart, and the interval knows."""
    rng = random.Random(4)
    mood, pairs = 0.0, []
    for _ in range(120):
        mood = 0.9 * mood + rng.gauss(0, 0.02)
        pairs.append((math.exp(mood), 1.0))
    in_order = bootstrap_log_ratio(pairs, 1)
    rng.shuffle(pairs)
    shuffled = bootstrap_log_ratio(pairs, 1)
    assert in_order.high - in_order.low > 1.3 * (shuffled.high - shuffled.low)


def test_interval_depends_on_the_seed_alone():
    pairs = [(1.0 + i % 7 / 10, 1.0 + i % 5 / 10) for i in range(40)]
    assert bootstrap_log_ratio(pairs, 7) == bootstrap_log_ratio(pairs, 7)
    assert bootstrap_log_ratio(pairs, 7).median == median([math.log(a / b) for a, b in pairs])


@pytest.mark.parametrize("pairs", [[], [(1.0, 0.0)], [(math.nan, 1.0)], [(1.0, math.inf)], [(-1.0, 1.0)]], ids=str)
def test_times_that_are_no_times_are_refused(pairs):
    with pytest.raises(ValueError):
        bootstrap_log_ratio(pairs, 1)
