"""A candidate that is not in service yet: adopted by hand or found, made to wait, set aside, or sent on its way."""

from dataclasses import replace

from tkcc.api.condition import ConditionStatus, ConditionType, find_condition
from tkcc.api.fields import BASELINE
from tkcc.api.spec import Approval, Mode
from tkcc.api.status import Plan, Revision, Source, Status
from tkcc.control import rollout, search
from tkcc.control.acceptance import wants_adoption
from tkcc.control.actions import Action, EmitEvent, EventType
from tkcc.control.drift import tick_of
from tkcc.control.history import with_plan, without_rolled_back
from tkcc.control.steps import steps_of
from tkcc.control.turn import (
    Turn,
    clock,
    incompatibility,
    is_rolled_back,
    is_whole,
    live_pods,
    next_try,
    revision_of,
)

Turned = tuple[Status, tuple[Action, ...]]


def adopted(turn: Turn, status: Status) -> Status:
    """Take notice of spec.rollout.artifact each time it changes; a later promotion may replace what it asked for."""
    wanted = turn.spec.rollout.artifact
    if wanted == status.adopted_artifact:
        return status
    if wanted == "" or wanted == status.stable.artifact:
        status, waiting = replace(status, adopted_artifact=wanted), status.candidate
        if waiting is not None and waiting.source is Source.MANUAL:
            return replace(status, candidate=None)
        if waiting is not None and wanted:
            return rollout.set_back(turn, status, waiting.artifact, "Declined")  # what serves was chosen over it
        return status
    if not wants_adoption(turn.spec, status) or not turn.acceptance.is_accepted or turn.spec.suspend:
        return status
    found = status.candidate if status.candidate and status.candidate.artifact == wanted else Revision()
    candidate = revision_of(wanted, turn.manifest(wanted), replace(found, source=Source.MANUAL))
    if not is_rolled_back(status, wanted):
        status = without_rolled_back(status, wanted)  # asked for anew, it does not wait for its next try
    return replace(status, adopted_artifact=wanted, candidate=candidate)


def send(turn: Turn, status: Status, candidate: Revision) -> Turned:
    """Start its rollout, let it wait (`reason_to_wait`), or drop it."""
    is_ours = candidate.source is not Source.MANUAL
    if candidate.artifact == status.stable.artifact or (is_ours and is_rolled_back(status, candidate.artifact)):
        return replace(status, candidate=None), ()
    if is_ours and search.has_moved_on(turn, candidate):
        return _set_aside(turn, status, candidate)
    if reason_to_wait(turn, status, candidate) is not None:
        return status, ()
    if _is_way_out(turn, status, candidate):
        return rollout.go_back(turn, status, candidate)
    return rollout.begin(turn, status, candidate)


def _set_aside(turn: Turn, status: Status, candidate: Revision) -> Turned:
    """Traffic has left what it was compiled for: keep it for when that comes back."""
    assert candidate.workload is not None
    if not any(plan.workload_digest == candidate.workload_digest for plan in status.drift.plans):
        plan = Plan(
            workload_digest=candidate.workload_digest,
            artifact=candidate.artifact,
            prompt_tokens=candidate.workload.prompt_tokens,
            hit_ratio_milli=candidate.workload.hit_ratio_milli,
            reason="Measured",
            added_at=turn.now,
        )
        before = status.drift
        status = with_plan(status, plan, turn.spec.rollout.revision_history_limit, turn.now)
        status = replace(status, drift=replace(before, plans=status.drift.plans))  # stable's own plans are as they were
    text = f"{candidate.name} is not rolled out: traffic has left the workload it is for; it is kept for its return"
    return replace(status, candidate=None), (EmitEvent(EventType.NORMAL, "CandidateSetAside", text),)


def reason_to_wait(turn: Turn, status: Status, candidate: Revision) -> tuple[str, str] | None:
    """(reason, message) of what keeps a candidate from its rollout now, or None."""
    spec = turn.spec
    is_ours = candidate.source is not Source.MANUAL
    wrong = incompatibility(turn, candidate.artifact)
    if wrong:
        return "Incompatible", f"{candidate.name} cannot run here: {wrong}"
    if not turn.acceptance.is_accepted:
        return turn.acceptance.reason, turn.acceptance.message
    if spec.suspend:
        return "Suspended", f"{candidate.name} waits: spec.suspend is true"
    try:
        steps_of(spec)
    except ValueError as err:
        return "InvalidSpec", str(err)
    if is_ours and spec.recompilation.mode is not Mode.AUTOMATIC:
        text = f"set spec.rollout.artifact to {candidate.artifact} to roll it out, or recompilation.mode to Automatic"
        return "RecommendOnly", text
    needs_approval = is_ours and spec.rollout.approval is Approval.BEFORE_CANARY
    if needs_approval and spec.rollout.approved_artifact != candidate.artifact:
        return "AwaitingApproval", f"set spec.rollout.approvedArtifact to {candidate.artifact} to start its canary"
    if status.observed_generation != turn.seen.meta.generation:
        return "ReplicasNotReady", f"{candidate.name} waits until the stable pods have the present spec"
    if _is_way_out(turn, status, candidate):
        return None
    again = next_try(turn, status, candidate.artifact)
    if again is not None:
        why = f"its last rollout proved nothing, {again[0].reason}"
        if turn.now < again[1]:
            return "CoolingDown", f"{candidate.name} is tried again, not before {clock(again[1])}: {why}"
        if not _has_traffic(turn):
            return "InsufficientSamples", f"{candidate.name} is tried again once there is traffic enough: {why}"
    if not is_whole(turn.seen.stable, status.stable.artifact, spec.replicas):
        return "ReplicasNotReady", f"{candidate.name} waits until all {spec.replicas} stable pods are ready"
    return None


def _is_way_out(turn: Turn, status: Status, candidate: Revision) -> bool:
    """Somebody names what served before, while stable cannot be whole or has not been for a while: a canary would have
    no whole cohort beside it, and may find no room."""
    if candidate.source is not Source.MANUAL or candidate.artifact not in (BASELINE, _previous(status)):
        return False
    if is_whole(turn.seen.stable, status.stable.artifact, turn.spec.replicas):
        return False
    told = find_condition(status.conditions, ConditionType.CANDIDATE_AVAILABLE)
    since = told.last_transition_time if told and told.status is ConditionStatus.TRUE else None
    is_late = since is not None and turn.now > turn.deadline(since, turn.spec.rollout.warmup_timeout)
    return is_late or any(pod.trouble for pod in live_pods(turn.seen.stable))


def _previous(status: Status) -> str:
    return status.previous.artifact if status.previous else BASELINE


def _has_traffic(turn: Turn) -> bool:
    """Would the traffic of the short window give the first step what it needs by its deadline?"""
    spec, step = turn.spec, steps_of(turn.spec)[0]
    length = spec.drift.windows.short
    seen = turn.traffic.window(tick_of(turn.now, spec.drift), length)
    expected = seen.requests * (spec.rollout.step_deadline / length) * step.pods / spec.replicas
    return expected >= spec.rollout.analysis.min_requests
