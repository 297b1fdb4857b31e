"""Counts of yes and no: is one error ratio higher than another, and is a share of requests what it should be?"""

import math


def p_more_failures(failures_a: int, total_a: int, failures_b: int, total_b: int) -> float:
    """Fisher's exact test, one-sided: the chance that A gets as many of the failures as it did, if A and B fail alike.

    To some nine digits at any size, in microseconds a failure. 1.0 without any request or failure. Raises ValueError
    for counts that cannot be.
    """
    if not (0 <= failures_a <= total_a and 0 <= failures_b <= total_b):
        raise ValueError(f"{failures_a} of {total_a} and {failures_b} of {total_b} are no counts of failures")
    failures, total = failures_a + failures_b, total_a + total_b
    if failures == 0 or total_a == 0:
        return 1.0
    all_ways = _log_comb(total, failures)
    cases = range(failures_a, min(failures, total_a) + 1)
    chances = (math.exp(_log_comb(total_a, k) + _log_comb(total_b, failures - k) - all_ways) for k in cases)
    return min(1.0, math.fsum(chances))


def _log_comb(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def share_is_near(part: int, total: int, want_ratio: float, *, slack: float, sigmas: float) -> bool:
    """Is part / total as near to `want_ratio` as chance allows (binomial, `sigmas` wide), and `slack` more?"""
    if total <= 0:
        return False
    spread = math.sqrt(want_ratio * (1.0 - want_ratio) / total)
    return abs(part / total - want_ratio) <= slack + sigmas * spread
