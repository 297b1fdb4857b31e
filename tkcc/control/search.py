"""When to look for another forward pass, what a search that ended means, and which known artifact to go back to.

Everything that may hold a run back is one list, `brake`, so that the conditions can say which one it is and until when.
"""

import math
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from tkcc.api.condition import ConditionStatus, RunConditionType, find_condition
from tkcc.api.run import RunOutcome, RunSpec, Trigger, run_name
from tkcc.api.spec import Mode
from tkcc.api.status import Attempt, Phase, Plan, Point, Revision, Source, Status
from tkcc.control.actions import Action, EmitEvent, EnsureArtifact, EnsureRun, EnsureRunEnded, EventType
from tkcc.control.drift import distance, is_away, nearest, point_of, read, tick_of, ticks_away
from tkcc.control.evidence import point_text
from tkcc.control.history import DAY, runs_of_the_day, with_attempt, with_plan, with_start
from tkcc.control.observed import RunSeen
from tkcc.control.turn import Turn, clock, incompatibility, is_rolled_back, revision_of, short_name, stable_plans
from tkcc.control.windows import Window, workload_of

RUN_GRACE = timedelta(minutes=10)  # a run ends itself at its budget; by then the operator stops waiting for it
RUN_APPEARS_IN = timedelta(minutes=1)  # a run that was just made may be missing from a view that is a little old
_UNMEASURED = "FirstWindow"  # a plan that nothing was compiled for: no reason to go back to its artifact


@dataclass(frozen=True)
class Brake:
    """Why no run starts now; `until` where time alone will lift it."""

    reason: str
    message: str
    until: datetime | None = None


# --- starting -------------------------------------------------------------------------------------------------------


def wants_forced_run(turn: Turn, status: Status) -> bool:
    return turn.spec.recompilation.trigger_token not in ("", status.recompilation.handled_token)


def wants_drift_run(turn: Turn, status: Status) -> bool:
    return status.drift.drifted and status.drift.ticks >= turn.spec.drift.ticks


def brake(turn: Turn, status: Status, *, forced: bool) -> Brake | None:
    """What keeps a run from starting now, or None."""
    spec, recompilation, now = turn.spec, status.recompilation, turn.now
    if not turn.acceptance.is_accepted:
        return Brake(turn.acceptance.reason, turn.acceptance.message)
    if spec.recompilation.mode is Mode.DISABLED:
        return Brake("Disabled", "spec.recompilation.mode is Disabled")
    if spec.suspend:
        return Brake("Suspended", "spec.suspend is true")
    if spec.pod.has_gpu:
        return Brake("UnsupportedDevice", "the pods ask for a GPU, and runs measure on the CPU alone")
    if not stable_plans(status):
        return Brake("BaselineEstablishing", "no plan yet: the first full window of traffic becomes one")
    today = runs_of_the_day(recompilation, now)
    if len(today) >= spec.drift.max_runs_per_day:
        until = min(today) + DAY if today else None
        when = f"; next run not before {clock(until)}" if until else ""
        return Brake(
            "RunsPerDayExhausted", f"{len(today)} of {spec.drift.max_runs_per_day} runs in 24 hours used{when}", until
        )
    if forced:
        return None
    ended = recompilation.last_ended_at
    if ended is not None and now < ended + spec.drift.cooldown:
        until = ended + spec.drift.cooldown
        return Brake("CoolingDown", f"the last run ended at {clock(ended)}; next run not before {clock(until)}", until)
    return _already_answered(turn, status) or _coming_back(turn, status)


def _already_answered(turn: Turn, status: Status) -> Brake | None:
    """Traffic must have left not only the plans, but also what was searched in vain and what a candidate waits for."""
    spec, candidate = turn.spec.drift, status.candidate
    answered: list[tuple[Plan, Brake]] = []
    if candidate is not None and candidate.workload is not None:
        text = f"candidate {candidate.name} is for this workload and waits for its rollout"
        answered.append((_as_plan(candidate.workload, candidate.artifact), Brake("CandidateWaiting", text)))
    for attempt in status.recompilation.attempts:
        if attempt.incumbent == status.stable.artifact:
            text = (
                f"the last search for this workload ended with {attempt.reason}; it is not repeated until the "
                f"workload is another for {spec.ticks} ticks, or stable or spec.recompilation.triggerToken changes"
            )
            point = Point(prompt_tokens=attempt.prompt_tokens, hit_ratio_milli=attempt.hit_ratio_milli)
            answered.append((_as_plan(point, attempt.incumbent), Brake("AlreadyTried", text)))
    if not answered:
        return None
    known = (*stable_plans(status), *(plan for plan, _ in answered))
    at = tick_of(turn.now, spec)
    ticks, reading = ticks_away(turn.traffic, spec, known, at, status.drift.evidence_since)
    if ticks >= spec.ticks:
        return None
    here = reading.long or known[-1]
    return min(answered, key=lambda pair: distance(here, pair[0], spec).value)[1]


def _as_plan(point: Point, artifact: str) -> Plan:
    return Plan("", artifact, prompt_tokens=point.prompt_tokens, hit_ratio_milli=point.hit_ratio_milli)


def start(turn: Turn, status: Status, trigger: Trigger) -> tuple[Status, tuple[Action, ...]] | None:
    """Start a run for the traffic of now. None where the window holds too little to compile for."""
    seen = _design_window(turn)
    workload = workload_of(seen, turn.seen.requests) if seen else None
    if seen is None or workload is None:
        return None
    spec = turn.spec
    token = spec.recompilation.trigger_token if trigger is Trigger.TOKEN else ""
    name = run_name(turn.seen.meta.name, turn.seen.meta.uid, workload.digest, status.stable.artifact, token)
    run = RunSpec(
        deployment=turn.seen.meta.name,
        workload=workload,
        workload_digest=workload.digest,
        incumbent=status.stable.artifact,
        trigger=trigger,
        model=spec.model,
        trigger_token=token,
        hit_ratio_known=seen.hit_ratio is not None,
        window_start=seen.start,
        window_end=seen.end,
        engine=spec.engine,
        budget=spec.recompilation.budget,
        tiers=spec.recompilation.tiers,
        proposer=spec.recompilation.proposer,
        acceptance=spec.recompilation.acceptance,
    )
    recompilation = with_start(status.recompilation, name, turn.now)
    if trigger is Trigger.TOKEN:
        recompilation = replace(recompilation, handled_token=token)
    why = f"triggerToken {token}" if token else f"distance {(status.drift.long_distance_milli or 0) / 1000:.2f}"
    message = (
        f"run {name} for {point_text(workload.prompt_tokens.mean, workload.hit_ratio_milli)} against "
        f"{status.stable.name}, because of {why}"
    )
    status = replace(status, phase=Phase.RECOMPILING, recompilation=recompilation)
    return status, (EnsureRun(name, run), EmitEvent(EventType.NORMAL, "RecompilationStarted", message))


def _design_window(turn: Turn) -> Window | None:
    """What to compile for: the newer half of the long window, but no more than the ticks that made the drift, since
    before them traffic may still have been the old one. Longer windows where that holds too few requests."""
    spec = turn.spec.drift
    at = tick_of(turn.now, spec)
    recent = min(spec.windows.long / 2, spec.ticks * spec.tick)
    for length in (recent, spec.windows.short, spec.windows.long):
        seen = turn.traffic.window(at, length)
        if seen.requests >= math.ceil(spec.min_requests * (length / spec.windows.long)):
            return seen
    return None


def _design_point(turn: Turn) -> Point | None:
    seen = _design_window(turn)
    return point_of(seen, 1) if seen else None


# --- going back to a known artifact ---------------------------------------------------------------------------------


def known_artifact(turn: Turn, status: Status) -> Revision | None:
    """The artifact of the nearest plan that fits, if it can be used. It must fit the traffic that a run would be made
    for, and the short window; the long one may still be full of what was before."""
    here = _design_point(turn)
    short = read(turn.traffic, turn.spec.drift, tick_of(turn.now, turn.spec.drift)).short
    if here is None or short is None:
        return None
    fitting = [plan for plan in _usable_plans(turn, status, here) if plan in _usable_plans(turn, status, short)]
    found = nearest(here, fitting, turn.spec.drift)
    if found is None:
        return None
    plan = found[0]
    point = Point(prompt_tokens=plan.prompt_tokens, hit_ratio_milli=plan.hit_ratio_milli)
    like = Revision(source=Source.REUSE, workload=point, workload_digest=plan.workload_digest)
    return revision_of(plan.artifact, turn.manifest(plan.artifact), like)


def _usable_plans(turn: Turn, status: Status, here: Point) -> list[Plan]:
    """Plans that cover this point, and whose artifact could serve in place of the stable one."""
    return [
        plan
        for plan in status.drift.plans
        if plan.reason != _UNMEASURED
        and plan.artifact != status.stable.artifact
        and not is_rolled_back(status, plan.artifact)
        and not incompatibility(turn, plan.artifact)
        and distance(here, plan, turn.spec.drift).value <= 1.0
    ]


def _coming_back(turn: Turn, status: Status) -> Brake | None:
    """The newest traffic is what a known artifact is for, and the short window is about to show it: no run, then."""
    here = _design_point(turn)
    plans = _usable_plans(turn, status, here) if here else []
    if not plans:
        return None
    text = (
        f"the newest traffic is what {short_name(plans[0].artifact)} was compiled for; the short window is waited for"
    )
    return Brake("KnownArtifactNear", text)


# --- while a run is under way ---------------------------------------------------------------------------------------


def follow(turn: Turn, status: Status) -> tuple[Status, tuple[Action, ...]]:
    """One turn of Phase.RECOMPILING: wait for the run, supersede it, or take its end."""
    name = status.recompilation.active_run
    run = next((r for r in turn.seen.runs if r.name == name), None)
    if run is None:
        asked_at = max(status.recompilation.started_at, default=None)
        if asked_at is not None and turn.now < asked_at + RUN_APPEARS_IN:
            return status, ()
        return _failed(turn, status, None, RunOutcome.CANCELLED, f"run {name} was deleted")
    ended = find_condition(run.conditions, RunConditionType.SUCCEEDED)
    if ended is not None and ended.status is not ConditionStatus.UNKNOWN:
        return _take_end(turn, status, run, ended.reason, ended.message)
    stop = _reason_to_stop(turn, status, run)
    if stop is not None:
        outcome, message = stop
        status, actions = _failed(turn, status, run, outcome, message)
        return status, (EnsureRunEnded(name, outcome.value, message), *actions)
    return status, (EnsureRun(name, run.spec),)


def _reason_to_stop(turn: Turn, status: Status, run: RunSeen) -> tuple[RunOutcome, str] | None:
    spec = turn.spec
    if turn.now > run.created_at + run.spec.budget.max_duration + RUN_GRACE:
        return RunOutcome.FAILED, f"no end by {clock(run.created_at + run.spec.budget.max_duration + RUN_GRACE)}"
    if spec.recompilation.mode is Mode.DISABLED:
        return RunOutcome.CANCELLED, "spec.recompilation.mode is Disabled"
    if spec.engine != run.spec.engine:
        return RunOutcome.SUPERSEDED, "spec.engine changed: what it measures does not hold any more"
    if spec.rollout.artifact not in ("", status.adopted_artifact, status.stable.artifact):
        return RunOutcome.SUPERSEDED, f"spec.rollout.artifact {short_name(spec.rollout.artifact)} goes first"
    return _moved_on(turn, status, run)


def _moved_on(turn: Turn, status: Status, run: RunSeen) -> tuple[RunOutcome, str] | None:
    """Drift during a run supersedes it where another run may start for the new workload; else it runs on."""
    target = _plan_of(run, status.stable.artifact, "", turn.now)
    plans = (target, *stable_plans(status))
    ticks, reading = ticks_away(
        turn.traffic, turn.spec.drift, plans, tick_of(turn.now, turn.spec.drift), run.created_at
    )
    if ticks < turn.spec.drift.ticks or reading.long is None or turn.spec.suspend:
        return None
    if len(runs_of_the_day(status.recompilation, turn.now)) >= turn.spec.drift.max_runs_per_day:
        return None
    here = point_text(reading.long.prompt_tokens, reading.long.hit_ratio_milli)
    return RunOutcome.SUPERSEDED, f"traffic moved on to {here} for {ticks} ticks"


def _take_end(turn: Turn, status: Status, run: RunSeen, reason: str, message: str) -> tuple[Status, tuple[Action, ...]]:
    outcome = RunOutcome(reason) if reason in set(RunOutcome) else RunOutcome.FAILED
    result = run.result
    if result is not None and result.artifact == status.stable.artifact:
        outcome, message = RunOutcome.NO_IMPROVEMENT, f"the best found is what serves: {message}"
    if outcome is RunOutcome.NO_IMPROVEMENT:
        plan = _plan_of(run, status.stable.artifact, "NoImprovement", turn.now)
        status = with_plan(_ended(turn, status, run.name, outcome), plan, _plan_limit(turn), turn.now)
        text = f"run {run.name}: {message}; {status.stable.name} stays, and this workload is its plan now"
        return status, (EmitEvent(EventType.NORMAL, "RecompilationCompleted", text),)
    if outcome is not RunOutcome.SEARCH_SUCCEEDED:
        return _failed(turn, status, run, outcome, message)
    if result is None or not result.artifact or result.artifact != run.source_digest or run.manifest is None:
        return _failed(turn, status, run, RunOutcome.FAILED, "the result does not hold the artifact that it names")
    if is_rolled_back(status, result.artifact):
        text = f"found {short_name(result.artifact)}, which was rolled back before"
        return _failed(turn, status, run, RunOutcome.SEARCH_SUCCEEDED, text, result.artifact)
    like = Revision(source=Source.RUN, run=run.name, workload=_point(run), workload_digest=run.spec.workload_digest)
    candidate = revision_of(result.artifact, run.manifest, like)
    status = replace(_ended(turn, status, run.name, outcome), candidate=candidate)
    text = f"run {run.name} found {candidate.name}: {result.message}"
    return status, (
        EnsureArtifact(result.artifact, run.name),
        EmitEvent(EventType.NORMAL, "CandidateSelected", text),
    )


_FAILURE_EVENTS = {
    RunOutcome.BUDGET_EXHAUSTED: "BudgetExhausted",
    RunOutcome.CORRECTNESS_FAILED: "CorrectnessCheckFailed",
}


def _failed(
    turn: Turn, status: Status, run: RunSeen | None, outcome: RunOutcome, message: str, artifact: str = ""
) -> tuple[Status, tuple[Action, ...]]:
    """The run brought nothing. Its workload is not searched again by itself, unless somebody stopped the run."""
    name = status.recompilation.active_run
    status = _ended(turn, status, name, outcome)
    if run is not None and outcome not in (RunOutcome.SUPERSEDED, RunOutcome.CANCELLED):
        point = _point(run)
        attempt = Attempt(
            workload_digest=run.spec.workload_digest,
            incumbent=run.spec.incumbent,
            prompt_tokens=point.prompt_tokens,
            hit_ratio_milli=point.hit_ratio_milli,
            artifact=artifact,
            reason=outcome.value,
            ended_at=turn.now,
        )
        status = with_attempt(status, attempt)
    event = _FAILURE_EVENTS.get(outcome, "RecompilationFailed")
    kind = EventType.NORMAL if outcome is RunOutcome.SUPERSEDED else EventType.WARNING
    if outcome is RunOutcome.SUPERSEDED:
        event = "RecompilationSuperseded"
    return status, (EmitEvent(kind, event, f"run {name} ended with {outcome.value}: {message}"),)


def _ended(turn: Turn, status: Status, name: str, outcome: RunOutcome) -> Status:
    """Cooldown starts, unless the run was superseded: the one that takes its place must not wait."""
    ended_at = status.recompilation.last_ended_at if outcome is RunOutcome.SUPERSEDED else turn.now
    recompilation = replace(
        status.recompilation, active_run="", last_run=name, last_outcome=outcome.value, last_ended_at=ended_at
    )
    return replace(status, phase=Phase.SERVING, recompilation=recompilation)


def unknown_run(turn: Turn, status: Status) -> RunSeen | None:
    """The newest owned run that status does not know of: the operator died between making it and saying so."""
    newest = max(turn.seen.runs, key=lambda r: r.created_at, default=None)
    known = status.recompilation
    if newest is None or newest.name in (known.last_run, known.active_run):
        return None
    latest = max(known.started_at, default=None)
    return newest if latest is None or newest.created_at > latest else None


def adopt_run(status: Status, run: RunSeen) -> Status:
    recompilation = with_start(status.recompilation, run.name, run.created_at)
    if run.spec.trigger_token:
        recompilation = replace(recompilation, handled_token=run.spec.trigger_token)
    return replace(status, phase=Phase.RECOMPILING, recompilation=recompilation)


def has_moved_on(turn: Turn, candidate: Revision) -> bool:
    """Is traffic, in both windows, away from what this candidate is for?"""
    if candidate.workload is None:
        return False
    plan = _as_plan(candidate.workload, candidate.artifact)
    return is_away(read(turn.traffic, turn.spec.drift, tick_of(turn.now, turn.spec.drift)), (plan,), turn.spec.drift)


def _point(run: RunSeen) -> Point:
    known = run.spec.hit_ratio_known
    workload = run.spec.workload
    return Point(prompt_tokens=workload.prompt_tokens.mean, hit_ratio_milli=workload.hit_ratio_milli if known else None)


def _plan_of(run: RunSeen, artifact: str, reason: str, at: datetime) -> Plan:
    point = _point(run)
    return Plan(
        workload_digest=run.spec.workload_digest,
        artifact=artifact,
        prompt_tokens=point.prompt_tokens,
        hit_ratio_milli=point.hit_ratio_milli,
        reason=reason,
        added_at=at,
    )


def _plan_limit(turn: Turn) -> int:
    return turn.spec.rollout.revision_history_limit
