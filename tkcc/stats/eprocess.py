"""Is B better than A? A sequential test on the signs of paired differences, and an interval for the size of the gain.

The test may be looked at after every pair and stopped at any time without spending more than alpha; it assumes only
that without a gain each pair is lost at least as often as won, which randomising the order within a pair provides.
Sizes are estimated apart, from pairs that did not decide (else the winner's estimate is too high).
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Bets mixed with equal weight: small ones win slowly on rare wins, large ones fast on near-certain ones.
_LOG_STAKES = tuple((math.log1p(k / 10), math.log1p(-k / 10)) for k in range(1, 10))


@dataclass
class SignEProcess:
    """Bets on each pair that B wins it. Under H0 (P(win) <= 1/2) the capital `e_value` is a supermartingale that starts
    at 1, so P(it ever reaches 1/alpha) <= alpha (Ville's inequality). Count ties as losses.

    The capital depends on the two counts alone, so they are the whole state.
    """

    wins: int = 0
    losses: int = 0

    def update(self, win: bool) -> None:
        if win:
            self.wins += 1
        else:
            self.losses += 1

    @property
    def log_e_value(self) -> float:
        """Natural log of the capital: mean over stakes s of (1 + s)^wins * (1 - s)^losses."""
        return _log_capital(self.wins, self.losses)

    @property
    def e_value(self) -> float:
        """The capital; infinity where it passes the range of a float."""
        log_e = self.log_e_value
        return math.exp(log_e) if log_e < 709.0 else math.inf

    def accepts(self, alpha: float) -> bool:
        """Is B better, at error probability `alpha`? Ask after every pair if you like; stop when it says so."""
        return self.log_e_value >= -math.log(_checked_alpha(alpha))

    def is_futile(self, alpha: float) -> bool:
        """The mirror test: is it established, at error probability `alpha`, that P(win) < 1/2?"""
        return _log_capital(self.losses, self.wins) >= -math.log(_checked_alpha(alpha))


def _log_capital(wins: int, losses: int) -> float:
    logs = [wins * log_win + losses * log_loss for log_win, log_loss in _LOG_STAKES]
    top = max(logs)
    return top + math.log(sum(math.exp(x - top) for x in logs) / len(logs))


def _checked_alpha(alpha: float) -> float:
    if not 0.0 < alpha < 1.0:
        raise ValueError(f"alpha must lie between 0 and 1, got {alpha}")
    return alpha


class Interval(NamedTuple):
    median: float
    low: float
    high: float


def bootstrap_log_ratio(
    pairs: Sequence[tuple[float, float]], seed: int, *, confidence: float = 0.95, resamples: int = 2000
) -> Interval:
    """ln(a / b) over (a, b) pairs of positive times, in the order they were measured: median and percentile interval.

    Blocks of neighbouring pairs are resampled whole (circular blocks of about n^(1/3) pairs), because neighbours share
    the machine's mood. Raises ValueError without pairs, or for a time that is not positive and finite.
    """
    if not pairs:
        raise ValueError("no pairs: nothing was measured")
    for a, b in pairs:
        if not (0.0 < a < math.inf and 0.0 < b < math.inf):
            raise ValueError(f"times must be positive and finite, got {a} and {b}")
    logs = [math.log(a / b) for a, b in pairs]
    n = len(logs)
    block = max(1, round(n ** (1 / 3)))
    ring = logs + logs[: block - 1]
    rng = random.Random(seed)
    num_blocks = -(-n // block)
    medians = []
    for _ in range(resamples):
        sample: list[float] = []
        for start in rng.choices(range(n), k=num_blocks):
            sample += ring[start : start + block]
        medians.append(median(sample[:n]))
    medians.sort()
    tail = (1.0 - confidence) / 2.0
    return Interval(median(logs), medians[int(tail * resamples)], medians[-1 - int(tail * resamples)])


def median(values: Sequence[float]) -> float:
    """Middle value, or the mean of the two in the middle. Raises ValueError when there are none."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2.0


def centre_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """(median, standard deviation) of values normal but for outliers; the latter from the median absolute deviation."""
    centre = median(values)
    return centre, 1.4826 * median([abs(x - centre) for x in values])


def median_error(spread: float, count: int) -> float:
    """Standard error of a median of so many normal values of this standard deviation."""
    return 1.2533 * spread / math.sqrt(count)
