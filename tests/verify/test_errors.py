"""Limits are made of the baseline's errors plus a floor; NaN and infinity never pass."""

import math

import pytest
import torch

from tkcc.verify import errors
from tkcc.verify.errors import Errors, Limits, Spread

BASE = Errors(Spread(1e-5, 2e-5, 4e-5), 256, (1e-6, 2e-6))
LIMITS = errors.limits(BASE, logit_scale=10.0, kv_scale_l=(1.0, 1.0), dtype=torch.float32)


def found(median: float = 1e-5, p99: float = 2e-5, top: float = 4e-5, kv: tuple[float, ...] = (1e-6, 2e-6)) -> Errors:
    return Errors(Spread(median, p99, top), 256, kv)


@pytest.mark.parametrize(
    "case, errors_found, failure",
    [
        ("the baseline's own errors pass", found(), ""),
        ("one and a half times the median passes", found(median=1.5e-5), ""),
        ("twice the median plus the floor fails", found(median=3e-5), "logit error median"),
        ("p99 has the same factor", found(p99=4.2e-5), "logit error p99"),
        ("three times the largest passes", found(top=1.2e-4), ""),
        ("four times the largest fails", found(top=1.6e-4), "logit error max"),
        ("KV is judged by layer", found(kv=(1e-6, 1e-5)), "in layer 1"),
        ("NaN fails", found(median=math.nan), "logit error median"),
        ("NaN in the cache fails", found(kv=(math.nan, 0.0)), "in layer 0"),
        ("infinity fails", found(top=math.inf), "logit error max"),
    ],
)
def test_limits(case: str, errors_found: Errors, failure: str) -> None:
    reason = errors.failure(errors_found, LIMITS)
    assert failure in reason and bool(failure) == bool(reason), reason


def test_a_baseline_without_errors_leaves_a_floor_of_eight_eps() -> None:
    exact = Errors(Spread(0.0, 0.0, 0.0), 256, (0.0,))
    limits = errors.limits(exact, logit_scale=10.0, kv_scale_l=(2.0,), dtype=torch.float32)
    eps = 2.0**-23
    assert limits.logits.median == pytest.approx(80 * eps) and limits.kv_l[0] == pytest.approx(16 * eps)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_position_spoils_every_quantile(bad: float) -> None:
    found_bv = torch.zeros(4, 3)
    found_bv[2, 1] = bad
    spread = errors.spread(errors.position_errors(found_bv, torch.zeros(4, 3, dtype=torch.float64)))
    assert math.isnan(spread.median) and math.isnan(spread.max)


def test_the_worse_of_two_runs_counts_quantile_by_quantile() -> None:
    a, b = found(median=1.0, p99=2.0, kv=(5.0, 1.0)), found(median=0.5, p99=3.0, kv=(1.0, 6.0))
    worse = errors.worst([a, b])
    assert (worse.logits.median, worse.logits.p99, worse.kv_l) == (1.0, 3.0, (5.0, 6.0))


def test_the_layer_nearest_to_its_limit_is_reported() -> None:
    limits = Limits(Spread(1, 1, 1), (10.0, 1.0), 1.0, (1.0, 1.0))
    assert errors.worst_layer(found(kv=(5.0, 0.9)), limits) == (0.9, 1.0)
