"""What a campaign leaves behind: the artifact and its manifest, the report for people and plots, the run's result."""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from tkcc.api.candidate import Artifact
from tkcc.api.codec import to_dict
from tkcc.api.report import Outcome, Report
from tkcc.api.run import CandidateCounts, CandidateSummary, RunOutcome, RunResult
from tkcc.api.workload import Recording, Workload
from tkcc.worker.campaign import Result, State, Tried

MAX_TOP = 10


def saved_milli(log_gain: float) -> int:
    """Time saved per token, in thousandths of the old time."""
    return round(-1000 * math.expm1(-log_gain))


def manifest(result: Result, workload: Workload, recording: Recording, info: Mapping[str, Any]) -> Artifact:
    """Of the accepted candidate; `info` is the slow tier's GET /v1/info."""
    winner, gain = result.winner, result.gain
    assert winner is not None and gain is not None, result.outcome
    environment = gain.environment or {}
    return Artifact(
        digest=winner.candidate.digest,
        params=winner.candidate.params,
        model_digest=info["modelDigest"],
        engine_version=info["engineVersion"],
        device=environment.get("device", info["device"]),
        dtype=info["dtype"],
        workload=workload,
        workload_digest=workload.digest,
        verdict="Pass",
        judge_version=info["judgeVersion"],
        judge_source_hash=info["judgeSourceHash"],
        traffic_source=recording.source,
        parent=winner.reports["slow confirm"].incumbent_digest,
        hypothesis=winner.candidate.hypothesis,
        gain_milli=saved_milli(gain.log_gain),
    )


def counts(tried: Sequence[Tried]) -> CandidateCounts:
    """evaluated: correctness was measured; refused: any end but an accept or not being tried further."""
    refused = {o.value for o in Outcome} - {Outcome.ACCEPTED, Outcome.DUPLICATE, Outcome.EXPIRED}
    return CandidateCounts(
        evaluated=sum(t.was_evaluated for t in tried),
        accepted=sum(t.state == State.ACCEPTED for t in tried),
        refused=sum(t.state in refused for t in tried),
    )


def top(tried: Sequence[Tried]) -> tuple[CandidateSummary, ...]:
    """The best measured first, then the newest."""
    ranked = sorted(tried, key=lambda t: (-(t.log_gain if t.log_gain is not None else -math.inf), -t.number))
    return tuple(_summary(t) for t in ranked[:MAX_TOP] if t.reports)


def _summary(tried: Tried) -> CandidateSummary:
    last = list(tried.reports.values())[-1]
    return CandidateSummary(
        digest=tried.candidate.digest,
        tier=last.tier,
        outcome=tried.state,
        gain_milli=saved_milli(tried.log_gain or 0.0),
        hypothesis=tried.candidate.hypothesis[:512],
    )


def run_result(result: Result) -> RunResult:
    gain = result.gain_over_incumbent
    accepted = result.outcome is RunOutcome.SEARCH_SUCCEEDED and result.winner is not None and gain is not None
    return RunResult(
        outcome=result.outcome,
        message=result.message,
        artifact=result.winner.candidate.digest if result.winner else "",
        candidates=counts(result.tried),
        gain_milli=saved_milli(gain.log_gain) if accepted and gain else 0,
        gain_low_milli=saved_milli(gain.log_gain_low) if accepted and gain else 0,
        gain_high_milli=saved_milli(gain.log_gain_high) if accepted and gain else 0,
    )


def report(
    result: Result, tiers: Mapping[str, Mapping[str, Any]], seconds: float, operator_gains: Mapping[str, float]
) -> dict[str, Any]:
    """The body of report.json. Gains are ratios: old time / new time per token."""
    reports = [r for tried in result.tried for r in tried.reports.values()]
    body: dict[str, Any] = {
        "result": to_dict(run_result(result)),
        "gain": _ratio(result.gain),
        "gainOverIncumbent": _ratio(result.gain_over_incumbent),
        "hotReload_s": reload_times(reports),
        "candidatesPerMinute": round(60 * counts(result.tried).evaluated / seconds, 2) if seconds > 0 else 0.0,
        "seconds": round(seconds, 1),
        "operatorGains": {name: round(math.exp(gain), 4) for name, gain in sorted(operator_gains.items())},
        "tiers": {name: _tier(info) for name, info in tiers.items()},
        "candidates": [_candidate(tried) for tried in result.tried],
    }
    if result.winner is not None:
        body["winner"] = {key: to_dict(r) for key, r in result.winner.reports.items()}
    return body


def reload_times(reports: Sequence[Report]) -> dict[str, Any]:
    """p50 and p95 of source received -> first verified token, by tier, and the p50 of each phase."""
    out: dict[str, Any] = {}
    for tier in sorted({r.tier for r in reports}):
        mine = [r for r in reports if r.tier == tier and r.phases_s]
        if not mine:
            continue
        totals = sorted(r.reload_s for r in mine)
        phases = {name for r in mine for name in (r.phases_s or {})}
        out[tier] = {
            "count": len(totals),
            "p50": round(median(totals), 3),
            "p95": round(totals[min(len(totals) - 1, math.ceil(0.95 * len(totals)) - 1)], 3),
            "phases_p50": {
                name: round(median([(r.phases_s or {}).get(name, 0.0) for r in mine]), 4) for name in sorted(phases)
            },
        }
    return out


def _ratio(report: Report | None) -> dict[str, float] | None:
    if report is None:
        return None
    return {
        "median": round(math.exp(report.log_gain), 4),
        "ciLow": round(math.exp(report.log_gain_low), 4),
        "ciHigh": round(math.exp(report.log_gain_high), 4),
        "pairs": report.pairs,
    }


def _tier(info: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("device", "dtype", "threads", "layers", "cells", "noiseFloor", "calibration", "judgeVersion")
    return {key: info[key] for key in kept if key in info}


def _candidate(tried: Tried) -> dict[str, Any]:
    return {
        "digest": tried.candidate.digest,
        "operators": list(tried.candidate.operators),
        "params": tried.candidate.params,
        "hypothesis": tried.candidate.hypothesis,
        "state": str(tried.state),
        "reason": tried.reason,
        "gain": round(math.exp(tried.log_gain), 4) if tried.log_gain is not None else None,
        "stages": {
            key: {
                "outcome": str(r.outcome),
                "pairs": r.pairs,
                "gain": round(math.exp(r.log_gain), 4) if r.pairs else None,
            }
            for key, r in tried.reports.items()
        },
    }
