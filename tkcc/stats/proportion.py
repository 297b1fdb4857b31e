"""Counts of yes and no: is one error ratio higher than another, and is a share of requests what it should be?"""

import math


def p_more_failures(failures_a: int, total_a: int, failures_b: int, total_b: int) -> float:
    """Fisher's exact test, one-sided: the chance that A gets as many of the failures as it did, if A and B fail alike.

    Exact at any size. 1.0 without any request or failure. Raises ValueError for counts that cannot be.
    """
    if not (0 <= failures_a <= total_a and 0 <= failures_b <= total_b):
        raise ValueError(f"{failures_a} of {total_a} and {failures_b} of {total_b} are no counts of failures")
    failures, total = failures_a + failures_b, total_a + total_b
    if failures == 0 or total_a == 0:
        return 1.0
    most = min(failures, total_a)
    ways = (math.comb(total_a, k) * math.comb(total_b, failures - k) for k in range(failures_a, most + 1))
    return min(1.0, sum(ways) / math.comb(total, failures))


def share_is_near(part: int, total: int, want_ratio: float, *, slack: float, sigmas: float) -> bool:
    """Is part / total as near to `want_ratio` as chance allows (binomial, `sigmas` wide), and `slack` more?"""
    if total <= 0:
        return False
    spread = math.sqrt(want_ratio * (1.0 - want_ratio) / total)
    return abs(part / total - want_ratio) <= slack + sigmas * spread
