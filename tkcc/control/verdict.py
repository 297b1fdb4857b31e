"""The verdict on a canary: probes first, then errors and times against a cohort of stable pods of the same size.

No data is Inconclusive, never Pass. Every measurement of a step looks at all its requests so far. The k-th may fail at
alpha / (k (k + 1)), so that looking often does not make a false Fail more likely than alpha in all: it would cost a
good artifact for ever. Passing spends nothing: a canary right at its limit is allowed to pass.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from tkcc.api.observation import RequestSample
from tkcc.api.report import Verdict
from tkcc.api.spec import AnalysisSpec, Dtype
from tkcc.api.status import MetricAnalysis
from tkcc.control.observed import ProbeSeen
from tkcc.stats.cohort import MIN_SAMPLES, Sample, compare
from tkcc.stats.proportion import p_more_failures

FAIL_ALPHA = 0.01  # chance that one metric of an equal canary ever fails in a step
PASS_ALPHA = 0.05  # chance that one metric of a canary at its limit passes in one measurement
MIN_TIES = 3  # below it a near tie or two may come first by chance, while the other prompts are still to be asked

MAX_STALLED_RATIO = 0.5  # more unfinished requests than the stable pods by this share of the started


@dataclass(frozen=True)
class Rounding:
    """What the order of sums alone may do to greedy tokens."""

    near_tie_nats: float  # two tokens this close in the stable pod's logprobs: either may be chosen
    max_tie_ratio: float  # more prompts than this ending in near ties is no rounding


# Two orders of the same sums differ by up to 0.75 in a bfloat16 logit (SmolLM2, 30 layers), by 1e-3 in a float32 one.
ROUNDING = {Dtype.FLOAT32: Rounding(0.05, 0.5), Dtype.BFLOAT16: Rounding(0.75, 1.0)}


@dataclass(frozen=True)
class Failure:
    """Why a canary must lose its traffic, at once."""

    reason: str
    message: str


def judge_probes(
    probes: Iterable[ProbeSeen], pods: Sequence[str], after: datetime, dtype: Dtype = Dtype.FLOAT32
) -> Failure | None:
    """The first of these pods whose answers since `after` are wrong: tokens that differ from a stable pod's, at a place
    where the two tokens were no near tie."""
    rounding = ROUNDING[dtype]
    for pod in pods:
        answered = [p for p in probes if p.pod == pod and p.at >= after and not p.error]
        ties = []
        for probe in answered:
            if probe.tokens_match:
                continue
            gap = probe.logprob_gap_nats
            if gap is None or not abs(gap) <= rounding.near_tie_nats:
                size = "unknown" if gap is None else f"{gap:.3f} nats"
                where = "" if probe.divergence_idx is None else f" at token {probe.divergence_idx}"
                return Failure(
                    "CorrectnessRegressed",
                    f"probe {probe.prompt_id} on {pod} differs{where} from the stable revision's greedy tokens; "
                    f"gap {size}, a near tie is {rounding.near_tie_nats} or less",
                )
            ties.append(probe.prompt_id)
        if len(ties) >= MIN_TIES and len(ties) > rounding.max_tie_ratio * len(answered):
            return Failure(
                "CorrectnessRegressed",
                f"{len(ties)} of {len(answered)} probes on {pod} end in near ties; rounding explains at most half",
            )
    return None


def is_probed(probes: Iterable[ProbeSeen], probe_ids: Sequence[str], pod: str, after: datetime) -> bool:
    """Has the pod answered each of these prompts since `after`? Never without a prompt."""
    answered = {p.prompt_id for p in probes if p.pod == pod and p.at >= after and not p.error}
    return bool(probe_ids) and answered >= set(probe_ids)


def judge_requests(
    canary: Sequence[RequestSample], cohort: Sequence[RequestSample], limits: AnalysisSpec, measurement: int
) -> tuple[MetricAnalysis, ...]:
    """One measurement of a step: errors, time to first token, time per output token. `measurement` counts from 1."""
    spend = 1.0 / (measurement * (measurement + 1))
    errors = _judge_errors(canary, cohort, limits, spend)
    ttft = _judge_times("TTFT", _ttft(canary), _ttft(cohort), limits.max_ttft_ratio_percent, limits, spend)
    tpot = _judge_times("TPOT", _tpot(canary), _tpot(cohort), limits.max_tpot_ratio_percent, limits, spend)
    return errors, ttft, tpot


@dataclass(frozen=True)
class Started:
    """Requests that the pods of each side have begun since the step is measured."""

    canary: int
    cohort: int


def judge_completion(
    canary: Sequence[RequestSample], stable: Sequence[RequestSample], started: Started, measurement: int
) -> MetricAnalysis:
    """Do requests come to an end? A canary that hangs finishes none, so the other metrics would see nothing."""
    spend = 1.0 / (measurement * (measurement + 1))
    open_ours = max(0, started.canary - len(canary))
    open_theirs = max(0, started.cohort - len(stable))
    ours, theirs = started.canary, started.cohort
    more = open_ours / ours - open_theirs / theirs if ours and theirs else 0.0
    is_stalled = more > MAX_STALLED_RATIO and p_more_failures(open_ours, ours, open_theirs, theirs) < FAIL_ALPHA * spend
    return MetricAnalysis(
        metric="Completion",
        verdict=Verdict.FAIL if is_stalled else Verdict.PASS if ours else Verdict.INCONCLUSIVE,
        canary=f"{ours - open_ours}/{ours}",
        cohort=f"{theirs - open_theirs}/{theirs}",
        requests=ours,
        message=f"{open_ours} of {ours} requests are not finished, {open_theirs} of {theirs} of the stable pods",
    )


def overall(analysis: Sequence[MetricAnalysis]) -> Verdict:
    """Fail if any failed, Pass if all passed; nothing measured is Inconclusive."""
    verdicts = [metric.verdict for metric in analysis]
    if Verdict.FAIL in verdicts:
        return Verdict.FAIL
    return Verdict.PASS if verdicts and set(verdicts) == {Verdict.PASS} else Verdict.INCONCLUSIVE


def _judge_errors(
    canary: Sequence[RequestSample], cohort: Sequence[RequestSample], limits: AnalysisSpec, spend: float
) -> MetricAnalysis:
    ours, theirs = _errors(canary), _errors(cohort)
    limit_ratio = limits.max_error_increase_milli / 1000
    our_ratio = ours[0] / ours[1] if ours[1] else 0.0
    their_ratio = theirs[0] / theirs[1] if theirs[1] else 0.0
    is_higher = our_ratio - their_ratio > limit_ratio
    p = p_more_failures(*ours, *theirs)
    if is_higher and p < FAIL_ALPHA * spend:
        verdict = Verdict.FAIL
    elif ours[1] < limits.min_requests or not theirs[1] or is_higher:
        verdict = Verdict.INCONCLUSIVE
    else:
        verdict = Verdict.PASS
    return MetricAnalysis(
        metric="ErrorRatio",
        verdict=verdict,
        canary=f"{ours[0]}/{ours[1]}",
        cohort=f"{theirs[0]}/{theirs[1]}",
        requests=ours[1],
        message=f"{ours[0]} of {ours[1]} requests failed, {theirs[0]} of {theirs[1]} in the cohort; "
        f"{limits.min_requests} needed, {100 * limit_ratio:g} points more allowed",
    )


def _errors(requests: Sequence[RequestSample]) -> tuple[int, int]:
    """(errors, requests) without those that the client cancelled or that were refused as bad."""
    counted = [r.outcome for r in requests if r.outcome in ("ok", "error")]
    return counted.count("error"), len(counted)


def _judge_times(
    name: str, ours: list[Sample], theirs: list[Sample], limit_percent: int, limits: AnalysisSpec, spend: float
) -> MetricAnalysis:
    limit_ratio = limit_percent / 100
    result = compare(ours, theirs)
    if result is None:
        return MetricAnalysis(
            metric=name,
            verdict=Verdict.INCONCLUSIVE,
            requests=len(ours),
            message=f"{len(ours)} requests and {len(theirs)} in the cohort; {MIN_SAMPLES} needed to compare",
        )
    enough = len(ours) >= limits.min_requests
    if result.p_above(limit_ratio) < FAIL_ALPHA * spend:
        verdict = Verdict.FAIL
    elif enough and result.p_below(limit_ratio) < PASS_ALPHA:
        verdict = Verdict.PASS
    else:
        verdict = Verdict.INCONCLUSIVE
    return MetricAnalysis(
        metric=name,
        verdict=verdict,
        canary=_middle_ms(ours),
        cohort=_middle_ms(theirs),
        ratio_milli=round(1000 * result.ratio),
        ratio_low_milli=round(1000 * result.low),
        ratio_high_milli=round(1000 * result.high),
        requests=len(ours),
        message=f"{result.ratio:.2f} x the cohort's (90 % {result.low:.2f} to {result.high:.2f}), limit "
        f"{limit_ratio:.2f}; {len(ours)} of {limits.min_requests} requests",
    )


def _middle_ms(samples: list[Sample]) -> str:
    ordered = sorted(s.time_s for s in samples)
    return f"{1000 * ordered[len(ordered) // 2]:.1f}ms"


def _ttft(requests: Iterable[RequestSample]) -> list[Sample]:
    """The size is what had to be prefilled: a cold cache does more work, which is not the canary's fault."""
    done = ((r, r.ttft_s) for r in requests if r.outcome == "ok" and _is_time(r.ttft_s))
    return [Sample(ttft_s or 0.0, max(1, r.prompt_tokens - r.cached_tokens)) for r, ttft_s in done]


def _tpot(requests: Iterable[RequestSample]) -> list[Sample]:
    """The size is the mean context that a token attended to."""
    done = ((r, r.tpot_s) for r in requests if r.outcome == "ok" and _is_time(r.tpot_s))
    return [Sample(tpot_s or 0.0, max(1.0, r.prompt_tokens + r.output_tokens / 2)) for r, tpot_s in done]


def _is_time(value_s: float | None) -> bool:
    """A pod may say anything: what is no time is no sample, and never stops a turn."""
    return value_s is not None and 0.0 < value_s < math.inf
