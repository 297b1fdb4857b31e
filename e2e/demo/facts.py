"""What is known of a finished (or broken off) story, and the report computed from it. Plain data, kept as story.json.

`report` has exactly the keys that the demo promises; whatever was not reached is None or empty, never made up.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from tkcc.api.condition import Condition, ConditionStatus, ConditionType, find_condition
from tkcc.api.run import CandidateCounts
from tkcc.api.status import Phase, Status
from tkcc.traffic.replay import Result


@dataclass(frozen=True)
class Look:
    """One look at the InferenceDeployment. Times are seconds since the story began; ratios 0-1."""

    at_s: float
    phase: str
    stable: str
    long_prompt_tokens: int | None
    long_hit_ratio: float | None
    long_distance: float | None
    short_distance: float | None
    desired_weight_pct: int
    observed_weight_pct: int | None


@dataclass(frozen=True)
class Sent:
    """One request of the replay."""

    at_s: float
    workload: str  # "A" or "B"
    result: Result


@dataclass(frozen=True)
class Told:
    """One line of the timeline."""

    at_s: float
    topic: str
    text: str
    weight: int


@dataclass(frozen=True)
class RunFact:
    name: str
    workload: str  # "A" or "B": what was being sent when it started
    outcome: str
    message: str
    counts: CandidateCounts
    seconds: float | None


@dataclass(frozen=True)
class CandidateFact:
    run: str
    tier: str
    stage: str  # "screen", "confirm" or an estimate of an accepted one's gain
    digest: str
    outcome: str
    gain_milli: int  # time saved against the incumbent, thousandths
    hypothesis: str
    reload_s: float | None = None


@dataclass(frozen=True)
class Ratio:
    """Baseline time over the artifact's time per output token on a workload, in the slow tier; 95 % interval."""

    artifact: str  # "A" or "B": the workload that it was compiled for
    workload: str
    median: float
    ci_low: float
    ci_high: float


@dataclass(frozen=True)
class DriftFact:
    signal: str
    distance: float | None


@dataclass
class Story:
    """Grows while the demo runs."""

    machine: dict[str, str] = field(default_factory=dict)
    looks: list[Look] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    runs: list[RunFact] = field(default_factory=list)
    candidates: list[CandidateFact] = field(default_factory=list)
    cross: list[Ratio] = field(default_factory=list)
    cross_note: str = ""  # why there is no cross table
    drift: DriftFact | None = None
    revisions: list[str] = field(default_factory=list)  # digests in service, oldest first; the first is the baseline's
    compiled_for: dict[str, str] = field(default_factory=dict)  # digest -> "A" or "B"
    canary_tpot_ratio: float | None = None
    timings_s: dict[str, float] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()
    ended: str = ""  # why it ended, if not by promotion

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def look_of(status: Status, at_s: float) -> Look:
    drift, rollout = status.drift, status.rollout
    under_way = rollout is not None and status.phase in (
        Phase.WARMING,
        Phase.CANARY,
        Phase.PROMOTING,
        Phase.ROLLING_BACK,
    )
    return Look(
        at_s=at_s,
        phase=status.phase,
        stable=status.stable.artifact,
        long_prompt_tokens=drift.long_prompt_tokens,
        long_hit_ratio=_thousandth(drift.long_hit_ratio_milli),
        long_distance=_thousandth(drift.long_distance_milli),
        short_distance=_thousandth(drift.short_distance_milli),
        desired_weight_pct=rollout.desired_weight if rollout and under_way else 0,
        observed_weight_pct=rollout.observed_weight if rollout and under_way else None,
    )


def drift_of(status: Status) -> DriftFact | None:
    """The drift that a status tells of, or None while there is none."""
    condition = find_condition(status.conditions, ConditionType.TRAFFIC_DRIFTED)
    if condition is None or condition.status is not ConditionStatus.TRUE:
        return None
    return DriftFact(condition.reason, _thousandth(status.drift.long_distance_milli))


def tpot_ratio_of(status: Status) -> float | None:
    """Canary over cohort, of the last measurement that had one."""
    if status.rollout is None:
        return None
    ratios = [
        m.ratio_milli for m in status.rollout.analysis if m.metric.lower() == "tpot" and m.ratio_milli is not None
    ]
    return ratios[0] / 1000 if ratios else None


def is_promoted(story: Story) -> bool:
    """Whether the artifact in service was compiled for workload B."""
    return bool(story.revisions) and story.compiled_for.get(story.revisions[-1]) == "B"


def report(story: Story) -> dict[str, Any]:
    """report.json."""
    promoted = is_promoted(story)
    gain = next((r for r in story.cross if promoted and (r.artifact, r.workload) == ("B", "B")), None)
    reloads = sorted(c.reload_s for c in story.candidates if c.reload_s)
    return {
        "promoted": promoted,
        "baselineRevision": story.revisions[0] if story.revisions else None,
        "promotedRevision": story.revisions[-1] if promoted else None,
        "gain": {"median": gain.median, "ciLow": gain.ci_low, "ciHigh": gain.ci_high} if gain else None,
        "canaryTpotRatio": story.canary_tpot_ratio,
        "cross": {
            "cells": [
                {
                    "artifact": r.artifact,
                    "workload": r.workload,
                    "median": r.median,
                    "ciLow": r.ci_low,
                    "ciHigh": r.ci_high,
                }
                for r in story.cross
            ],
            "conclusion": cross_conclusion(story),
        },
        "requests": {
            "sent": len(story.sent),
            "failed": sum(not sent.result.is_ok for sent in story.sent),
        },
        "drift": {"signal": story.drift.signal, "distance": story.drift.distance} if story.drift else None,
        "candidates": {
            "evaluated": sum(run.counts.evaluated for run in story.runs),
            "accepted": sum(run.counts.accepted for run in story.runs),
            "refused": sum(run.counts.refused for run in story.runs),
        },
        "hotReload_s": {"p50": quantile(reloads, 0.5), "p95": quantile(reloads, 0.95)},
        "timings_s": {name: round(seconds, 1) for name, seconds in story.timings_s.items()},
        "conditions": [
            {"type": c.type, "status": c.status, "reason": c.reason, "message": c.message} for c in story.conditions
        ],
    }


def cross_conclusion(story: Story) -> str:
    """Who wins where, in a sentence. A win is a higher median; a clear one has intervals that do not meet."""
    by_cell = {(r.artifact, r.workload): r for r in story.cross}
    if len(by_cell) < 4:
        return story.cross_note or "Not measured: the story did not bring both artifacts into service."
    verdicts, winners = [], []
    for workload in ("A", "B"):
        own, other = by_cell[workload, workload], by_cell["B" if workload == "A" else "A", workload]
        best, rest = (own, other) if own.median >= other.median else (other, own)
        winners.append(best.artifact)
        clear = best.ci_low > rest.ci_high
        verdicts.append(
            f"on workload {workload} artifact {best.artifact} is {'clearly ' if clear else ''}the faster one "
            f"({best.median:.3f} against {rest.median:.3f} times the baseline's speed"
            f"{'' if clear else '; the intervals overlap, so this may be noise'})"
        )
    head = "Each artifact wins on its own workload" if winners == ["A", "B"] else f"Artifact {winners[0]} wins on both"
    if winners == ["B", "A"]:
        head = "Each artifact wins on the other's workload, which speaks for noise"
    why = _why_both(story, winners[0]) if winners[0] == winners[1] else ""
    return f"{head}: {verdicts[0]}; {verdicts[1]}.{why}"


def _why_both(story: Story, winner: str) -> str:
    """What its last rewrite was made for, where that is known."""
    reasons = {c.digest: c.hypothesis for c in story.candidates if c.hypothesis}
    reason = next((reasons[d] for d, w in story.compiled_for.items() if w == winner and d in reasons), "")
    return f" What its run changed last pays on both workloads: {reason}." if reason else ""


def quantile(ordered: Sequence[float], q: float) -> float | None:
    """The value at rank ceil(q * n), or None of nothing."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else None


def median_tpot_s(sent: Iterable[Sent]) -> float | None:
    values = [s.result.tpot_s for s in sent if s.result.is_ok and s.result.tpot_s is not None]
    return median(values) if values else None


def fingerprint(digest: str) -> str:
    """How serving pods name the forward pass of this digest in their answers."""
    return f"fp_{digest[:16]}"


def _thousandth(milli: int | None) -> float | None:
    return None if milli is None else milli / 1000
