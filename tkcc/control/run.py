"""(spec, status, observations) -> (actions, new status) of one RecompilationRun.

It decides when a run has ended and why; the worker decides what is found. Once Succeeded is True or False it stays so,
and what the run had made for itself goes, except its traffic, its result and its status.
"""

from dataclasses import dataclass, replace
from datetime import timedelta

from tkcc.api.condition import Condition, ConditionStatus, RunConditionType, find_condition, set_condition
from tkcc.api.run import RunOutcome, RunSpec, RunStatus
from tkcc.control.actions import EmitEvent, EnsureRunTornDown, EnsureRunWorkers, EventType, RunAction
from tkcc.control.observed import RunObserved, TierSeen
from tkcc.control.turn import clock, short_name

# The worker counts from its own start, and a decision that it has begun, with the sizing of its gain, is ended.
BUDGET_GRACE = timedelta(minutes=8)
START_LIMIT = timedelta(minutes=5)  # a pod that cannot even start by then never will
MAX_TIER_RESTARTS = 5

_FAST, _SLOW = "FastTierRunning", "SlowTierRunning"


@dataclass(frozen=True)
class _End:
    outcome: RunOutcome
    message: str


def reconcile_run(spec: RunSpec, status: RunStatus, seen: RunObserved) -> tuple[tuple[RunAction, ...], RunStatus]:
    """What to make true now, and what to remember. Fields that the worker writes are passed on as they are."""
    if has_ended(status):
        return ((EnsureRunTornDown(),) if seen.leftovers else ()), status
    end = _end(spec, status, seen)
    if end is not None:
        return _ended(status, seen, end)
    conditions = status.conditions
    admitted = Condition(RunConditionType.ADMITTED, ConditionStatus.TRUE, "Admitted", "no queue is used")
    conditions = _told(conditions, admitted, seen)
    for type_ in (RunConditionType.FAST_TIER_COMPLETED, RunConditionType.SLOW_TIER_COMPLETED):
        if find_condition(conditions, type_) is None:
            conditions = _told(conditions, Condition(type_, ConditionStatus.UNKNOWN, "Pending", "not begun"), seen)
    before = find_condition(conditions, RunConditionType.SUCCEEDED)
    now = _under_way(spec, status, seen)
    conditions = _told(conditions, now, seen)
    events: tuple[EmitEvent, ...] = ()
    if before is not None and before.reason == _FAST and now.reason == _SLOW:
        events = (EmitEvent(EventType.NORMAL, "TierCompleted", f"fast tier: {now.message}"),)
    started = status.started_at or seen.now
    new = replace(status, observed_generation=seen.generation, started_at=started, conditions=conditions)
    return (EnsureRunWorkers(), *events), new


def has_ended(status: RunStatus) -> bool:
    succeeded = find_condition(status.conditions, RunConditionType.SUCCEEDED)
    return succeeded is not None and succeeded.status is not ConditionStatus.UNKNOWN


def _end(spec: RunSpec, status: RunStatus, seen: RunObserved) -> _End | None:
    if seen.result is not None:
        result = seen.result
        if result.outcome is RunOutcome.SEARCH_SUCCEEDED and (
            not result.artifact or result.artifact != seen.source_digest
        ):
            got = short_name(seen.source_digest) or "no source"
            text = f"the result names {short_name(result.artifact) or 'no artifact'} and holds {got}; refused"
            return _End(RunOutcome.FAILED, text)
        return _End(result.outcome, result.message)
    if seen.result_error:
        return _End(RunOutcome.FAILED, f"the result cannot be read: {seen.result_error}")
    if seen.job_failed:
        return _End(RunOutcome.FAILED, f"the Job failed: {seen.job_failed}")
    if seen.job_succeeded:
        return _End(RunOutcome.FAILED, "the Job ended without a result")
    late = seen.created_at + spec.budget.max_duration + BUDGET_GRACE
    if seen.now > late:
        return _End(RunOutcome.BUDGET_EXHAUSTED, f"no result by {clock(late)}")
    return _broken_pod(spec, status, seen)


def _broken_pod(spec: RunSpec, status: RunStatus, seen: RunObserved) -> _End | None:
    """A worker that cannot begin, a tier that cannot start or keeps dying. One death is nothing: the worker resumes."""
    limit = min(START_LIMIT, spec.budget.max_duration / 2)
    if seen.worker_problem and not status.tier and seen.now > seen.created_at + limit:
        return _End(RunOutcome.FAILED, f"the worker cannot run: {seen.worker_problem}")
    for tier in seen.tiers:
        if tier.restarts >= MAX_TIER_RESTARTS:
            last = tier.last_words or tier.problem or "unknown"
            text = f"the {tier.name} tier restarted {tier.restarts} times; last: {last}"
            return _End(RunOutcome.TIER_POD_FAILED, text)
        if tier.problem and not tier.is_ready and seen.now > seen.created_at + limit:
            return _End(RunOutcome.TIER_POD_FAILED, f"the {tier.name} tier cannot run: {_why(tier)}")
    return None


def _why(tier: TierSeen) -> str:
    return f"{tier.problem}: {tier.last_words}" if tier.last_words else tier.problem


def _ended(status: RunStatus, seen: RunObserved, end: _End) -> tuple[tuple[RunAction, ...], RunStatus]:
    won = end.outcome is RunOutcome.SEARCH_SUCCEEDED
    state = ConditionStatus.TRUE if won else ConditionStatus.FALSE
    succeeded = Condition(RunConditionType.SUCCEEDED, state, end.outcome.value, end.message[:4096])
    new = replace(
        status,
        observed_generation=seen.generation,
        tier="",
        finished_at=seen.now,
        conditions=_told(status.conditions, succeeded, seen),
    )
    if seen.result is not None:
        gain = seen.result.gain_milli
        artifact = seen.result.artifact if won else ""
        new = replace(new, candidates=seen.result.candidates, artifact=artifact, gain_milli=gain)
    kind = EventType.NORMAL if won or end.outcome is RunOutcome.NO_IMPROVEMENT else EventType.WARNING
    # What is torn down is the evidence: it goes once the verdict is written down, not before.
    return (EmitEvent(kind, end.outcome.value, end.message),), new


def _under_way(spec: RunSpec, status: RunStatus, seen: RunObserved) -> Condition:
    waiting = [tier.name for tier in seen.tiers if not tier.is_ready]
    until = clock(seen.created_at + spec.budget.max_duration)
    if not seen.job_exists or len(waiting) == len(seen.tiers):
        reason, what = "Starting", f"tiers not ready: {', '.join(waiting) or 'none made yet'}"
    else:
        reason = _SLOW if _fast_tier_is_done(status) else _FAST
        counts = status.candidates
        what = f"{counts.evaluated} candidates evaluated, {counts.accepted} accepted, {counts.refused} refused"
    return Condition(RunConditionType.SUCCEEDED, ConditionStatus.UNKNOWN, reason, f"{what}; budget ends at {until}")


def _fast_tier_is_done(status: RunStatus) -> bool:
    done = find_condition(status.conditions, RunConditionType.FAST_TIER_COMPLETED)
    return done is not None and done.status is ConditionStatus.TRUE


def _told(have: tuple[Condition, ...], new: Condition, seen: RunObserved) -> tuple[Condition, ...]:
    return set_condition(have, replace(new, observed_generation=seen.generation), seen.now)
