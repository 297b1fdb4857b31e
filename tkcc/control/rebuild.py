"""A status from the owned objects alone, for one that was lost: where the rollout stands, which run is under way, what
was compiled for what.

What cannot be known is taken on the safe side: an artifact that a run once found, and that does not serve though it was
in the canary, counts as rolled back. What spec.rollout.artifact names counts as acted upon only if it got that far.
"""

from collections.abc import Iterable
from dataclasses import replace

from tkcc.api.condition import ConditionStatus, RunConditionType, find_condition
from tkcc.api.fields import BASELINE
from tkcc.api.run import RunOutcome
from tkcc.api.spec import Spec
from tkcc.api.status import (
    DriftStatus,
    Phase,
    Plan,
    Point,
    RecompilationStatus,
    Revision,
    RolledBack,
    RolloutStatus,
    Source,
    Status,
)
from tkcc.control.history import DAY
from tkcc.control.observed import Observed, RunSeen
from tkcc.control.rollout import rollout_digest
from tkcc.control.steps import nearest_steps
from tkcc.control.turn import in_service, short_name, speedup_text


def is_lost(status: Status, seen: Observed) -> bool:
    """Has this object been at work before, though its status says nothing?"""
    return status.observed_generation == 0 and not status.conditions and seen.stable is not None


def rebuild(spec: Spec, seen: Observed) -> Status:
    assert seen.stable is not None
    runs = sorted(seen.runs, key=lambda r: r.created_at)
    wanted, canary = spec.rollout.artifact, seen.canary
    was_adopted = wanted == seen.stable.artifact or (canary is not None and wanted == canary.artifact)
    status = Status(
        stable=_revision(seen, runs, seen.stable.artifact),
        drift=DriftStatus(plans=_plans(spec, seen, runs)),
        recompilation=_recompilation(seen, runs),
        adopted_artifact=wanted if was_adopted else "",
    )
    if canary is not None and (canary.replicas > 0 or in_service(canary)):
        return _in_rollout(spec, seen, status, runs, canary.artifact)
    phase = Phase.RECOMPILING if status.recompilation.active_run else Phase.SERVING
    return _with_last_find(seen, replace(status, phase=phase), runs)


def _with_last_find(seen: Observed, status: Status, runs: list[RunSeen]) -> Status:
    """What the last run found is a candidate, unless the canary Deployment shows that it has been there already."""
    found = next((run.result.artifact for run in reversed(runs) if run.result and run.result.artifact), "")
    if not found or found == status.stable.artifact or not any(a.digest == found for a in seen.artifacts):
        return status
    if seen.canary is not None and seen.canary.artifact == found:
        return replace(status, rolled_back=(RolledBack(artifact=found, reason="StatusLost", at=seen.now),))
    return replace(status, candidate=_revision(seen, runs, found))


def _in_rollout(spec: Spec, seen: Observed, status: Status, runs: list[RunSeen], artifact: str) -> Status:
    assert seen.canary is not None
    rollout = RolloutStatus(
        artifact=artifact,
        source=Source.MANUAL,
        spec_digest=rollout_digest(spec),
        started_at=seen.now,
        step_since=seen.now,
    )
    candidate = _revision(seen, runs, artifact)
    try:
        steps = nearest_steps(spec)
    except ValueError:
        steps = ()
    served = len(in_service(seen.canary))
    if artifact == status.stable.artifact:
        # Stable already takes it over; which artifact it had before is not known any more.
        weight_pct = round(100 * seen.canary.replicas / spec.replicas)
        rollout = replace(rollout, desired_weight=min(100, weight_pct), total_steps=len(steps))
        phase = Phase.PROMOTING
    elif not steps:
        phase = Phase.ROLLING_BACK
    elif not served:
        phase = Phase.WARMING
        rollout = replace(rollout, total_steps=len(steps))
    else:
        idx = max((i for i, step in enumerate(steps) if step.pods <= seen.canary.replicas), default=0)
        phase = Phase.CANARY
        rollout = replace(rollout, step=idx, total_steps=len(steps), desired_weight=steps[idx].weight_pct)
    return replace(status, phase=phase, candidate=candidate, rollout=replace(rollout, source=candidate.source))


def _revision(seen: Observed, runs: list[RunSeen], artifact: str) -> Revision:
    if artifact == BASELINE:
        return Revision()
    run = next((r for r in reversed(runs) if r.result is not None and r.result.artifact == artifact), None)
    manifest = next((a.manifest for a in seen.artifacts if a.digest == artifact), None)
    return Revision(
        artifact=artifact,
        name=short_name(artifact),
        digest=artifact,
        source=Source.RUN if run else Source.MANUAL,
        run=run.name if run else "",
        speedup=speedup_text(manifest.gain_milli) if manifest else "",
        workload=_point(run) if run else None,
        workload_digest=run.spec.workload_digest if run else "",
    )


def _point(run: RunSeen) -> Point:
    known = run.spec.hit_ratio_known
    return Point(
        prompt_tokens=run.spec.workload.prompt_tokens.mean,
        hit_ratio_milli=run.spec.workload.hit_ratio_milli if known else None,
    )


def _plans(spec: Spec, seen: Observed, runs: Iterable[RunSeen]) -> tuple[Plan, ...]:
    assert seen.stable is not None
    plans: dict[str, Plan] = {}
    for run in runs:
        reason, artifact = "", run.spec.incumbent
        if outcome_of(run) == RunOutcome.NO_IMPROVEMENT:
            reason = "NoImprovement"
        elif run.result is not None and run.result.artifact == seen.stable.artifact:
            reason, artifact = "Promoted", run.result.artifact
        if reason:
            point = _point(run)
            plans[run.spec.workload_digest] = Plan(
                workload_digest=run.spec.workload_digest,
                artifact=artifact,
                prompt_tokens=point.prompt_tokens,
                hit_ratio_milli=point.hit_ratio_milli,
                reason=reason,
                added_at=run.finished_at or run.created_at,
            )
    return tuple(plans.values())[-spec.rollout.revision_history_limit :]


def _recompilation(seen: Observed, runs: list[RunSeen]) -> RecompilationStatus:
    active = next((run for run in reversed(runs) if not outcome_of(run)), None)
    ended = next((run for run in reversed(runs) if outcome_of(run)), None)
    token = next((run.spec.trigger_token for run in reversed(runs) if run.spec.trigger_token), "")
    return RecompilationStatus(
        active_run=active.name if active else "",
        last_run=ended.name if ended else "",
        last_outcome=outcome_of(ended) if ended else "",
        last_ended_at=(ended.finished_at or ended.created_at) if ended else None,
        handled_token=token,
        started_at=tuple(run.created_at for run in runs if seen.now - run.created_at < DAY),
    )


def outcome_of(run: RunSeen) -> str:
    """Reason of the Succeeded condition once it is decided, else ""."""
    ended = find_condition(run.conditions, RunConditionType.SUCCEEDED)
    return ended.reason if ended is not None and ended.status is not ConditionStatus.UNKNOWN else ""
