"""Keeps `status.drift` up to date: once a tick it measures distance, sees drift come and go, and makes the first plan.

It starts nothing: `tkcc.control.search` acts on what stands here.
"""

from dataclasses import replace
from datetime import datetime

from tkcc.api.status import DriftStatus, Phase, Plan, Status
from tkcc.control.actions import EmitEvent, EventType
from tkcc.control.drift import CLEAR_BELOW, Reading, is_fresh, nearest, read, tick_of, ticks_away
from tkcc.control.history import with_plan
from tkcc.control.turn import Turn, clock, stable_plans
from tkcc.control.windows import workload_of

# A rollout moves pods and caches about: what is measured meanwhile is shown, and counts for nothing.
_COUNTING = (Phase.SERVING, Phase.RECOMPILING)


def measure(turn: Turn, status: Status) -> tuple[Status, tuple[EmitEvent, ...]]:
    """The status after this tick; unchanged between ticks."""
    spec = turn.spec.drift
    at = tick_of(turn.now, spec)
    if status.drift.tick_at == at:
        return status, ()
    if not is_fresh(turn.traffic, spec, turn.now):
        return replace(status, drift=_blank(status.drift, at)), ()
    plans = stable_plans(status)
    ticks, reading = ticks_away(turn.traffic, spec, plans, at, status.drift.evidence_since)
    status = replace(status, drift=_shown(turn, status.drift, plans, reading))
    if status.phase not in _COUNTING:
        return status, ()
    if not plans:
        return _first_plan(turn, status, reading)
    return _drifted(turn, replace(status, drift=replace(status.drift, ticks=ticks)), reading)


def _blank(drift: DriftStatus, at: datetime) -> DriftStatus:
    return replace(
        drift,
        tick_at=at,
        ticks=0,
        long_prompt_tokens=None,
        long_hit_ratio_milli=None,
        long_requests=0,
        long_distance_milli=None,
        short_distance_milli=None,
    )


def _shown(turn: Turn, drift: DriftStatus, plans: tuple[Plan, ...], reading: Reading) -> DriftStatus:
    long = nearest(reading.long, plans, turn.spec.drift) if reading.long else None
    short = nearest(reading.short, plans, turn.spec.drift) if reading.short else None
    return replace(
        _blank(drift, reading.at),
        long_prompt_tokens=reading.long.prompt_tokens if reading.long else None,
        long_hit_ratio_milli=reading.long.hit_ratio_milli if reading.long else None,
        long_requests=reading.requests,
        long_distance_milli=round(1000 * long[1].value) if long else None,
        short_distance_milli=round(1000 * short[1].value) if short else None,
        nearest_plan=long[0].workload_digest if long else drift.nearest_plan,
    )


def _first_plan(turn: Turn, status: Status, reading: Reading) -> tuple[Status, tuple[EmitEvent, ...]]:
    """The first full window becomes the plan of an artifact that has none."""
    workload = workload_of(turn.traffic.window(reading.at, turn.spec.drift.windows.long), turn.seen.requests)
    if reading.long is None or workload is None:
        return status, ()
    plan = Plan(
        workload_digest=workload.digest,
        artifact=status.stable.artifact,
        prompt_tokens=reading.long.prompt_tokens,
        hit_ratio_milli=reading.long.hit_ratio_milli,
        reason="FirstWindow",
        added_at=turn.now,
    )
    status = with_plan(status, plan, turn.spec.rollout.revision_history_limit, reading.at)
    message = f"first full window: {point_text(plan.prompt_tokens, plan.hit_ratio_milli)}, {reading.requests} requests"
    return status, (EmitEvent(EventType.NORMAL, "BaselineEstablished", message),)


def _drifted(turn: Turn, status: Status, reading: Reading) -> tuple[Status, tuple[EmitEvent, ...]]:
    drift, spec = status.drift, turn.spec.drift
    if drift.drifted:
        is_back = drift.long_distance_milli is not None and drift.long_distance_milli < 1000 * CLEAR_BELOW
        return replace(
            status, drift=replace(drift, drifted=False, signal="", detected_at=None) if is_back else drift
        ), ()
    found = nearest(reading.long, stable_plans(status), spec) if reading.long else None
    if drift.ticks < spec.ticks or found is None:
        return status, ()
    plan, far = found
    drift = replace(drift, drifted=True, signal=far.signal, detected_at=turn.now)
    message = (
        f"{far.signal}: {point_text(drift.long_prompt_tokens, drift.long_hit_ratio_milli)} over {reading.requests} "
        f"requests is {far.value:.2f} from the nearest plan ({point_text(plan.prompt_tokens, plan.hit_ratio_milli)}) "
        f"for {drift.ticks} ticks"
    )
    return replace(status, drift=drift), (EmitEvent(EventType.NORMAL, "TrafficDriftDetected", message),)


def point_text(prompt_tokens: int | None, hit_ratio_milli: int | None) -> str:
    hit = "hit ratio unknown" if hit_ratio_milli is None else f"hit ratio {hit_ratio_milli / 1000:.2f}"
    return f"mean prompt {prompt_tokens} tokens, {hit}"


def drift_text(turn: Turn, status: Status) -> str:
    """Where traffic stands, with numbers, for a condition."""
    drift, spec = status.drift, turn.spec.drift
    if drift.long_prompt_tokens is None:
        reading = read(turn.traffic, spec, tick_of(turn.now, spec))
        if not reading.is_covered and turn.traffic.first_at is not None:
            full = clock(turn.traffic.first_at + spec.windows.long)
            return f"the long window is full at {full}; {drift.long_requests} of {spec.min_requests} requests so far"
        return f"{drift.long_requests} of {spec.min_requests} requests needed in the long window: no evidence"
    here = point_text(drift.long_prompt_tokens, drift.long_hit_ratio_milli)
    if drift.long_distance_milli is None:
        return f"{here}; no plan yet"
    short = "no evidence" if drift.short_distance_milli is None else f"{drift.short_distance_milli / 1000:.2f}"
    return (
        f"{here}; distance {drift.long_distance_milli / 1000:.2f} in the long window, {short} in the short one, "
        f"above 1 in both for {drift.ticks} of {spec.ticks} ticks"
    )
