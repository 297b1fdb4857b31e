"""How far two results are apart, and how far they may be. Pure arithmetic on tensors.

Limits are made from the baseline revision's own errors against the reference, never from the last promoted one's, or
errors would compound; plus a floor, because an fp32 baseline may have an error near zero and any reordered sum would
fail. How a sum rounds is chance, and so is the tail of its errors: the baseline is measured in several orders of its
sums, over several challenge sets, and the worst counts.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MEDIAN_FACTOR = 1.5
P99_FACTOR = 1.5
MAX_FACTOR = 3.0
FLOOR_EPS = 8.0  # times the dtype's eps, times the scale of what is compared


@dataclass(frozen=True, slots=True)
class Spread:
    """Quantiles of per-position errors; NaN where a position was not finite."""

    median: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Errors:
    """One forward pass against the reference, over one challenge set."""

    logits: Spread
    positions: int
    kv_l: tuple[float, ...]  # by layer: largest error of K and V


@dataclass(frozen=True, slots=True)
class Limits:
    logits: Spread
    kv_l: tuple[float, ...]
    logit_scale: float  # RMS of the reference's logits
    kv_scale_l: tuple[float, ...]


def position_errors(found_bv: Tensor, truth_bv: Tensor) -> Tensor:
    """Largest absolute error over the vocabulary, per row; NaN if a row has NaN or infinity where the truth has not."""
    return (found_bv.to(truth_bv.dtype) - truth_bv).abs().amax(-1)


def spread(errors_n: Tensor) -> Spread:
    if bool(errors_n.isfinite().all()):
        q = torch.quantile(errors_n.double(), torch.tensor([0.5, 0.99], dtype=torch.float64))
        return Spread(float(q[0]), float(q[1]), float(errors_n.max()))
    return Spread(math.nan, math.nan, math.nan)


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def scaled(found: Errors, logit_factor: float, kv_factor_l: Sequence[float]) -> Errors:
    """Errors of one challenge set in the scale of another, or of none."""
    logits = found.logits
    return Errors(
        Spread(logits.median * logit_factor, logits.p99 * logit_factor, logits.max * logit_factor),
        found.positions,
        tuple(error * factor for error, factor in zip(found.kv_l, kv_factor_l, strict=True)),
    )


def worst(runs: Iterable[Errors]) -> Errors:
    """Quantile by quantile, and layer by layer, the largest of some runs in one scale."""
    known = list(runs)
    logits = Spread(*(max(getattr(run.logits, q) for run in known) for q in ("median", "p99", "max")))
    kv_l = tuple(max(errors) for errors in zip(*(run.kv_l for run in known), strict=True))
    return Errors(logits, known[-1].positions, kv_l)


def limits(baseline: Errors, logit_scale: float, kv_scale_l: tuple[float, ...], dtype: torch.dtype) -> Limits:
    eps = torch.finfo(dtype).eps
    floor = FLOOR_EPS * eps * logit_scale
    return Limits(
        logits=Spread(
            MEDIAN_FACTOR * baseline.logits.median + floor,
            P99_FACTOR * baseline.logits.p99 + floor,
            MAX_FACTOR * baseline.logits.max + floor,
        ),
        kv_l=tuple(
            MAX_FACTOR * error + FLOOR_EPS * eps * scale for error, scale in zip(baseline.kv_l, kv_scale_l, strict=True)
        ),
        logit_scale=logit_scale,
        kv_scale_l=kv_scale_l,
    )


def failure(found: Errors, limit: Limits) -> str:
    """The first limit that is broken, with its numbers; empty if none is. Written so that NaN fails."""
    for name in ("median", "p99", "max"):
        error, allowed = getattr(found.logits, name), getattr(limit.logits, name)
        if not error <= allowed:
            return f"logit error {name} {error:.3g} > {allowed:.3g} over {found.positions} positions"
    for layer, (error, allowed) in enumerate(zip(found.kv_l, limit.kv_l, strict=True)):
        if not error <= allowed:
            return f"KV error {error:.3g} > {allowed:.3g} in layer {layer}"
    return ""


def worst_layer(found: Errors, limit: Limits) -> tuple[float, float]:
    """(error, limit) of the layer that comes nearest to its limit."""
    pairs = list(zip(found.kv_l, limit.kv_l, strict=True))
    return max(pairs, key=lambda pair: pair[0] / pair[1] if math.isfinite(pair[0]) else math.inf)
