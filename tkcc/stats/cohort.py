"""Is one cohort slower than another? A rank test on log times, after taking out what the requests' sizes explain.

It compares two groups of requests served at the same time by different pods. Ranks need no distribution and shrug off
outliers; the ratio and its interval are Hodges and Lehmann's (the shift that makes the groups look alike), the
p-values Mann and Whitney's with correction for ties and continuity, which hold from about eight a side.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

MIN_SAMPLES = 8  # a side: below, the normal approximation of the rank sum does not hold
_MAX_SAMPLES = 300  # a side, newest: bounds the work of one comparison to some 10 ms
_PRIOR_SXX = 0.1  # weight of a slope of 1 against the data: that of a hundred requests whose sizes differ by 3 %
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Sample:
    """One request: a positive time, and a positive size that explains some of it (tokens to prefill, say)."""

    time_s: float
    size: float


@dataclass(frozen=True)
class Comparison:
    """Times of `canary` over those of `cohort`: 1.1 is 10 % slower. The interval has the confidence asked for."""

    ratio: float
    low: float
    high: float
    log_shift_canary: tuple[float, ...]
    log_shift_cohort: tuple[float, ...]

    def p_above(self, limit_ratio: float) -> float:
        """P-value against "the ratio is `limit_ratio` or less": small when the canary is slower than the limit."""
        return _p_greater(self._scaled(limit_ratio), self.log_shift_cohort)

    def p_below(self, limit_ratio: float) -> float:
        """P-value against "the ratio is `limit_ratio` or more": small when the canary keeps within the limit."""
        return _p_greater(self.log_shift_cohort, self._scaled(limit_ratio))

    def _scaled(self, limit_ratio: float) -> list[float]:
        return [value - math.log(limit_ratio) for value in self.log_shift_canary]


def compare(canary: Sequence[Sample], cohort: Sequence[Sample], *, confidence: float = 0.9) -> Comparison | None:
    """Compare the newest samples (last in order). None with fewer than MIN_SAMPLES on a side.

    Raises ValueError for a time or size that is not positive and finite.
    """
    if len(canary) < MIN_SAMPLES or len(cohort) < MIN_SAMPLES:
        return None
    ours, theirs = _residuals(canary[-_MAX_SAMPLES:], cohort[-_MAX_SAMPLES:])
    shift, low, high = _shift_interval(sorted(ours), sorted(theirs), confidence)
    return Comparison(math.exp(shift), math.exp(low), math.exp(high), tuple(ours), tuple(theirs))


def _residuals(canary: Sequence[Sample], cohort: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Log times less slope * log size. The slope is fitted within the groups, so a gap between them does not bend it;
    it is kept between 0 and 1: more work never takes less time, nor more than its share. Where sizes hardly differ
    within a group, it is 1."""
    groups = []
    sxx = sxy = 0.0
    for group in (canary, cohort):
        xs, ys = [_log(s.size) for s in group], [_log(s.time_s) for s in group]
        mean_x, mean_y = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
        sxx += math.fsum((x - mean_x) ** 2 for x in xs)
        sxy += math.fsum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
        groups.append((xs, ys))
    slope = min(1.0, max(0.0, (sxy + _PRIOR_SXX) / (sxx + _PRIOR_SXX)))
    ours, theirs = ([y - slope * x for x, y in zip(xs, ys, strict=True)] for xs, ys in groups)
    return ours, theirs


def _log(value: float) -> float:
    if not 0.0 < value < math.inf:
        raise ValueError(f"times and sizes must be positive and finite, got {value}")
    return math.log(value)


def _shift_interval(xs: Sequence[float], ys: Sequence[float], confidence: float) -> tuple[float, float, float]:
    """(median, low, high) of the pairwise differences x - y of two sorted sequences: the ends are those that the rank
    test would just not reject."""
    n, m = len(xs), len(ys)
    z = _NORMAL.inv_cdf(0.5 + confidence / 2.0)
    outside = max(0, math.floor(n * m / 2.0 - z * math.sqrt(n * m * (n + m + 1) / 12.0)))
    middle = (n * m - 1) // 2
    return (
        (_kth_difference(xs, ys, middle) + _kth_difference(xs, ys, n * m - 1 - middle)) / 2.0,
        _kth_difference(xs, ys, outside),
        _kth_difference(xs, ys, n * m - 1 - outside),
    )


def _kth_difference(xs: Sequence[float], ys: Sequence[float], k: int) -> float:
    """The k-th smallest of all x - y, from 0, to within 1e-5: by bisection, since there are n * m of them."""
    low, high = xs[0] - ys[-1], xs[-1] - ys[0]
    while high - low > 1e-5:
        mid = (low + high) / 2.0
        if len(xs) * len(ys) - sum(bisect_left(ys, x - mid) for x in xs) > k:  # pairs with x - y <= mid
            high = mid
        else:
            low = mid
    return high


def _p_greater(xs: Sequence[float], ys: Sequence[float]) -> float:
    """One-sided p-value of Mann and Whitney: small when xs tend to be greater than ys."""
    n, m = len(xs), len(ys)
    order = sorted([(value, True) for value in xs] + [(value, False) for value in ys])
    rank_sum = tie_term = 0.0
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and order[end][0] == order[start][0]:
            end += 1
        ties = end - start
        rank_sum += (start + end + 1) / 2.0 * sum(is_x for _, is_x in order[start:end])  # mean of ranks start+1..end
        tie_term += ties**3 - ties
        start = end
    u = rank_sum - n * (n + 1) / 2.0
    total = n + m
    variance = n * m / 12.0 * (total + 1 - tie_term / (total * (total - 1)))
    if variance <= 0.0:
        return 1.0  # all equal: no evidence either way
    return 1.0 - _NORMAL.cdf((u - n * m / 2.0 - 0.5) / math.sqrt(variance))
