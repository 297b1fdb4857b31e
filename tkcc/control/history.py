"""The bounded lists that status remembers: plans, attempts, artifacts that were rolled back, runs of the day."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import TypeVar

from tkcc.api.status import MAX_PLANS, Attempt, Plan, RecompilationStatus, RolledBack, Status
from tkcc.control.turn import stable_plans

T = TypeVar("T")
DAY = timedelta(days=1)


def with_plan(status: Status, plan: Plan, limit: int, since: datetime) -> Status:
    """Remember the plan and look for drift anew from `since`. Of too many, the oldest that do not serve go first."""
    plans = [p for p in status.drift.plans if p.workload_digest != plan.workload_digest]
    plans.append(plan)
    serving = {p.workload_digest for p in stable_plans(status)} | {plan.workload_digest}
    while len(plans) > limit:
        idle = next((p for p in plans if p.workload_digest not in serving), plans[0])
        plans.remove(idle)
    drift = replace(status.drift, plans=tuple(plans))
    return looking_anew(replace(status, drift=drift), since)


def looking_anew(status: Status, since: datetime) -> Status:
    """Nothing seen up to `since` counts as drift any more."""
    drift = replace(status.drift, ticks=0, drifted=False, signal="", detected_at=None, evidence_since=since)
    return replace(status, drift=drift)


def with_attempt(status: Status, attempt: Attempt) -> Status:
    key = (attempt.workload_digest, attempt.incumbent)
    others = tuple(a for a in status.recompilation.attempts if (a.workload_digest, a.incumbent) != key)
    return replace(status, recompilation=replace(status.recompilation, attempts=_last((*others, attempt))))


def with_rolled_back(status: Status, item: RolledBack) -> Status:
    others = tuple(r for r in status.rolled_back if r.artifact != item.artifact)
    return replace(status, rolled_back=_last((*others, item)))


def without_rolled_back(status: Status, artifact: str) -> Status:
    return replace(status, rolled_back=tuple(r for r in status.rolled_back if r.artifact != artifact))


def with_start(recompilation: RecompilationStatus, run: str, at: datetime) -> RecompilationStatus:
    return replace(recompilation, active_run=run, started_at=(*runs_of_the_day(recompilation, at), at)[-100:])


def runs_of_the_day(recompilation: RecompilationStatus, now: datetime) -> tuple[datetime, ...]:
    return tuple(at for at in recompilation.started_at if now - at < DAY)


def _last(items: tuple[T, ...]) -> tuple[T, ...]:
    return items[-MAX_PLANS:]
