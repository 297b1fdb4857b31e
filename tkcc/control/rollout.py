"""The way of a candidate into service: warm, step by step, promoted; and back out at the first failure.

Each function takes one turn of one phase and returns the status it leads to. Where pods go is `tkcc.control.placement`,
computed from that status; nothing here moves a pod.
"""

from dataclasses import replace
from datetime import timedelta

from tkcc.api.codec import canonical_json, sha256_hex, to_dict
from tkcc.api.fields import BASELINE
from tkcc.api.report import Verdict
from tkcc.api.spec import Approval, Spec
from tkcc.api.status import (
    Attempt,
    MetricAnalysis,
    Phase,
    Plan,
    Revision,
    RolledBack,
    RolloutStatus,
    Source,
    Status,
)
from tkcc.control.actions import EmitEvent, EventType
from tkcc.control.cohort import Cohorts, cohorts, crashed
from tkcc.control.drift import read, tick_of
from tkcc.control.history import looking_anew, with_attempt, with_plan, with_rolled_back, without_rolled_back
from tkcc.control.steps import Step, nearest_steps, steps_of
from tkcc.control.turn import (
    Turn,
    clock,
    in_service,
    is_undecided,
    is_whole,
    live_pods,
    next_try,
    serves,
    short_name,
)
from tkcc.control.verdict import (
    Failure,
    is_probed,
    judge_completion,
    judge_probes,
    judge_requests,
    overall,
)
from tkcc.control.windows import workload_of

Turned = tuple[Status, tuple[EmitEvent, ...]]

_SECOND = timedelta(seconds=1)  # times in status are whole seconds, rounded down
_REASONS = {
    "ErrorRatio": "ErrorRateExceeded",
    "TTFT": "LatencyExceeded",
    "TPOT": "LatencyExceeded",
    "Completion": "RequestsStalled",
}
# Ends that are not the artifact's fault: it is tried again when their cause has gone.
FORGIVEN = frozenset({"SpecChanged", "Suspended", "InvalidSpec"})


def rollout_digest(spec: Spec) -> str:
    """Of the part of a spec that a rollout depends on: a change of it takes the canary back to stable first. Not of
    `replicas`, which an autoscaler may change at any time: the same step goes on at the new size."""
    parts = to_dict(spec)
    rollout = {key: parts["rollout"][key] for key in ("steps", "analysis")}
    kept = {key: parts[key] for key in ("model", "engine", "pod", "traffic")}
    return sha256_hex(canonical_json({**kept, "rollout": rollout}))


def begin(turn: Turn, status: Status, candidate: Revision) -> Turned:
    steps = steps_of(turn.spec)
    rollout = replace(_started(turn, candidate), total_steps=len(steps), observed_weight=0)
    weights = ", ".join(f"{step.weight_pct} %" for step in steps)
    text = f"{candidate.name} ({candidate.source.value}) warms up on {steps[0].pods} pods; steps {weights}"
    status = replace(status, phase=Phase.WARMING, candidate=candidate, rollout=rollout)
    return status, (EmitEvent(EventType.NORMAL, "CanaryStarted", text),)


def go_back(turn: Turn, status: Status, candidate: Revision) -> Turned:
    """A rollout without a canary: the stable pods take over what served before."""
    text = f"{candidate.name} takes over without a canary: not all {turn.spec.replicas} stable pods are ready"
    status = replace(status, phase=Phase.PROMOTING, candidate=candidate, rollout=_started(turn, candidate))
    return status, (EmitEvent(EventType.NORMAL, "RollbackStarted", text),)


def _started(turn: Turn, candidate: Revision) -> RolloutStatus:
    return RolloutStatus(
        artifact=candidate.artifact,
        source=candidate.source,
        spec_digest=rollout_digest(turn.spec),
        started_at=turn.now,
        step_since=turn.now,
    )


# --- one turn of each phase -----------------------------------------------------------------------------------------


def warming(turn: Turn, status: Status) -> Turned:
    rollout = _rollout(status)
    stop = _stopped(turn, status) or _broken(turn, rollout)
    if stop is not None:
        return abort(turn, status, stop)
    steps = nearest_steps(turn.spec)
    seen = cohorts(turn.seen, rollout.artifact, rollout.started_at)
    if len(seen.warm) >= steps[0].pods:
        return _at_step(turn, status, 0), ()
    deadline = turn.deadline(rollout.started_at, turn.spec.rollout.warmup_timeout)
    if turn.now > deadline:
        text = f"{len(seen.warm)} of {steps[0].pods} canary pods were warm by {clock(deadline)}{_pod_troubles(turn)}"
        return abort(turn, status, Failure("WarmupTimedOut", text))
    return status, ()


def canary(turn: Turn, status: Status) -> Turned:
    rollout = _rollout(status)
    stop = _stopped(turn, status) or _broken(turn, rollout)
    if stop is not None:
        return abort(turn, status, stop)
    steps = nearest_steps(turn.spec)
    idx = min(rollout.step, len(steps) - 1)
    step = steps[idx]
    rollout = replace(rollout, step=idx, total_steps=len(steps), desired_weight=step.weight_pct)
    status = replace(status, rollout=rollout)
    seen = cohorts(turn.seen, rollout.artifact, rollout.started_at)
    if not _weight_is_reached(turn, seen, step):
        # A pod was lost, or is not there yet: what was measured under another weight does not count.
        observed = seen.weight_pct
        rollout = replace(rollout, observed_weight=observed, measured_since=None, measurement=0)
        return _in_time(turn, replace(status, rollout=rollout), "the weight is not reached" + _pod_troubles(turn))
    if rollout.measured_since is None or seen.has_lost_counts(rollout):
        return _begin_measuring(turn, status, seen, step)
    return _measured(turn, status, seen, steps)


def promoting(turn: Turn, status: Status) -> Turned:
    rollout = _rollout(status)
    stop = _broken(turn, rollout) or _given_up(turn, status)
    if stop is not None:
        return abort(turn, status, stop)
    if is_whole(turn.seen.stable, rollout.artifact, turn.spec.replicas):
        return _promoted(turn, status)
    deadline = turn.deadline(rollout.step_since, turn.spec.rollout.step_deadline)
    if turn.now > deadline and not rollout.abort_reason:
        kept = "; the healthy canary keeps its traffic" if rollout.total_steps else ""
        text = (
            f"the stable pods did not all take {short_name(rollout.artifact)} over by {clock(deadline)}"
            f"{_pod_troubles(turn)}{kept}"
        )
        rollout = replace(rollout, abort_reason="PromotionStalled", abort_message=text[:1024])
        return replace(status, rollout=rollout), (EmitEvent(EventType.WARNING, "PromotionStalled", text),)
    return status, ()


def rolling_back(turn: Turn, status: Status) -> Turned:
    rollout = _rollout(status)
    canary_seen = turn.seen.canary
    is_empty = canary_seen is None or (canary_seen.replicas == 0 and not in_service(canary_seen))
    is_back = is_whole(turn.seen.stable, status.stable.artifact, turn.spec.replicas)
    is_late = turn.now > rollout.step_since + turn.spec.rollout.warmup_timeout
    if is_empty and (is_back or is_late):
        return looking_anew(replace(status, phase=Phase.SERVING), turn.now), ()
    return status, ()


# --- ways out -------------------------------------------------------------------------------------------------------


def abort(turn: Turn, status: Status, failure: Failure) -> Turned:
    """Take the traffic away now. The artifact is remembered as rolled back, unless the cause lay elsewhere; without a
    verdict it is tried again, but not for ever."""
    rollout = _rollout(status)
    name = short_name(rollout.artifact)
    ended = replace(
        rollout,
        step_since=turn.now,
        desired_weight=0,
        observed_weight=0,
        awaiting_approval=False,
        abort_reason=failure.reason,
        abort_message=failure.message[:1024],
    )
    status = replace(status, phase=Phase.ROLLING_BACK, rollout=ended)
    if failure.reason in FORGIVEN:
        text = f"{name} left the canary, to start over later: {failure.message}"
        return status, (EmitEvent(EventType.NORMAL, failure.reason, text),)
    status = set_back(turn, status, rollout.artifact, failure.reason)
    again = next_try(turn, status, rollout.artifact)
    when = f"; next try not before {clock(again[1])}" if again else ""
    text = f"{name} was rolled back, {failure.reason}: {failure.message}; {status.stable.name} serves{when}"
    return status, (EmitEvent(EventType.WARNING, "RolledBack", text),)


def set_back(turn: Turn, status: Status, artifact: str, reason: str) -> Status:
    """The candidate is not picked again by itself, nor its workload searched again; or, undecided, it waits."""
    last = next((item for item in status.rolled_back if item.artifact == artifact and is_undecided(item)), None)
    item = RolledBack(artifact=artifact, reason=reason, at=turn.now, tries=last.tries + 1 if last else 1)
    status = with_rolled_back(status, item)
    if is_undecided(item) and status.candidate is not None:
        return status
    return replace(_attempted(turn, status, reason), candidate=None)


def _attempted(turn: Turn, status: Status, reason: str) -> Status:
    candidate = status.candidate
    if candidate is None or candidate.source is not Source.RUN or candidate.workload is None:
        return status
    return with_attempt(
        status,
        Attempt(
            workload_digest=candidate.workload_digest,
            incumbent=status.stable.artifact,
            prompt_tokens=candidate.workload.prompt_tokens,
            hit_ratio_milli=candidate.workload.hit_ratio_milli,
            artifact=candidate.artifact,
            reason=reason,
            ended_at=turn.now,
        ),
    )


def _promoted(turn: Turn, status: Status) -> Turned:
    rollout, before = _rollout(status), status.stable
    candidate = status.candidate or Revision(artifact=rollout.artifact, name=short_name(rollout.artifact))
    stable = replace(candidate, promoted_at=turn.now)
    done = replace(rollout, desired_weight=0, observed_weight=0, abort_reason="", abort_message="")
    status = replace(status, phase=Phase.SERVING, stable=stable, previous=before, candidate=None, rollout=done)
    status = looking_anew(without_rolled_back(status, stable.artifact), turn.now)
    plan = _plan_of_promotion(turn, stable)
    if plan is not None:
        status = with_plan(status, plan, turn.spec.rollout.revision_history_limit, turn.now)
    speedup = f", {stable.speedup} of {BASELINE}" if stable.speedup else ""
    text = f"{stable.name} serves on {turn.spec.replicas} pods{speedup}; {before.name} is kept"
    return status, (EmitEvent(EventType.NORMAL, "CandidatePromoted", text),)


def _plan_of_promotion(turn: Turn, stable: Revision) -> Plan | None:
    """What it was compiled for; for one adopted by hand, the traffic of now. A known plan that comes back stays."""
    if stable.source is Source.REUSE:
        return None
    point, digest = stable.workload, stable.workload_digest
    if point is None:
        spec = turn.spec.drift
        reading = read(turn.traffic, spec, tick_of(turn.now, spec))
        workload = workload_of(turn.traffic.window(reading.at, spec.windows.long), turn.seen.requests)
        if reading.long is None or workload is None:
            return None  # the first full window will be it
        point, digest = reading.long, workload.digest
    return Plan(
        workload_digest=digest,
        artifact=stable.artifact,
        prompt_tokens=point.prompt_tokens,
        hit_ratio_milli=point.hit_ratio_milli,
        reason="Promoted",
        added_at=turn.now,
    )


# --- parts ----------------------------------------------------------------------------------------------------------


def _rollout(status: Status) -> RolloutStatus:
    assert status.rollout is not None, f"phase {status.phase} without a rollout"
    return status.rollout


def _stopped(turn: Turn, status: Status) -> Failure | None:
    """Has a person changed what is asked for?"""
    spec, rollout = turn.spec, _rollout(status)
    if not turn.acceptance.is_accepted:
        return Failure("InvalidSpec", turn.acceptance.message)
    if spec.rollout.artifact != status.adopted_artifact:
        wanted = short_name(spec.rollout.artifact) or "nothing"
        return Failure("SpecChanged", f"spec.rollout.artifact asks for {wanted} now")
    if rollout_digest(spec) != rollout.spec_digest:
        return Failure("SpecChanged", "the spec changed in the middle of a rollout: back to stable first")
    if spec.suspend:
        return Failure("Suspended", "spec.suspend is true")
    return None


def _given_up(turn: Turn, status: Status) -> Failure | None:
    """A promotion goes through, unless a person ends one that is stuck, or the artifact crashes in the stable pods. Not
    where it came back without a canary: then there is nowhere else to go."""
    rollout = _rollout(status)
    if not turn.acceptance.may_serve:
        return None
    failure = crashed(turn.seen.stable, rollout.artifact) if rollout.total_steps else None
    return failure or (_stopped(turn, status) if rollout.abort_reason else None)


def _broken(turn: Turn, rollout: RolloutStatus) -> Failure | None:
    """Has the canary crashed or answered a probe wrong? Looked at every turn, at any weight."""
    failure = crashed(turn.seen.canary, rollout.artifact)
    if failure is not None:
        return failure
    pods = cohorts(turn.seen, rollout.artifact, rollout.started_at).loaded
    return judge_probes(turn.seen.probes, pods, rollout.started_at, turn.spec.engine.dtype)


def _at_step(turn: Turn, status: Status, idx: int) -> Status:
    step = nearest_steps(turn.spec)[idx]
    rollout = replace(
        _rollout(status),
        step=idx,
        step_since=turn.now,
        desired_weight=step.weight_pct,
        measured_since=None,
        measurement=0,
        failures=0,
        analysis=(),
    )
    return replace(status, phase=Phase.CANARY, rollout=rollout)


def _weight_is_reached(turn: Turn, seen: Cohorts, step: Step) -> bool:
    stable = turn.seen.stable
    want = turn.spec.replicas - step.pods
    return (
        len(seen.canary) == step.pods
        and stable is not None
        and stable.is_current
        and stable.replicas == stable.ready_replicas == want == len(seen.stable)
    )


def _begin_measuring(turn: Turn, status: Status, seen: Cohorts, step: Step) -> Turned:
    rollout = _rollout(status)
    ours, theirs = seen.requests_started()
    if ours is None or theirs is None:
        return _in_time(turn, status, "the pods' request counters cannot be read")
    rollout = replace(
        rollout,
        observed_weight=seen.weight_pct,
        measured_since=turn.now + _SECOND,
        canary_requests_before=ours,
        stable_requests_before=theirs,
        measurement=0,
    )
    text = f"{short_name(rollout.artifact)} serves {step.weight_pct} % on {step.pods} of {turn.spec.replicas} pods"
    return replace(status, rollout=rollout), (EmitEvent(EventType.NORMAL, "TrafficWeightUpdated", text),)


def _measured(turn: Turn, status: Status, seen: Cohorts, steps: tuple[Step, ...]) -> Turned:
    rollout, limits = _rollout(status), turn.spec.rollout.analysis
    assert rollout.measured_since is not None
    due = rollout.measured_since + (rollout.measurement + 1) * limits.interval
    if rollout.awaiting_approval and turn.spec.rollout.approved_artifact == rollout.artifact:
        return _promote(turn, status), ()
    if turn.now < due:
        return _in_time(turn, status, "the analysis did not come to an end")
    rollout = _measure(turn, rollout, seen)
    verdict = overall(rollout.analysis)
    status = replace(status, rollout=rollout)
    if verdict is Verdict.FAIL:
        failed = next(metric for metric in rollout.analysis if metric.verdict is Verdict.FAIL)
        failures = rollout.failures + 1
        if failures > limits.failure_limit:
            return abort(turn, status, Failure(_REASONS[failed.metric], f"{failed.metric}: {failed.message}"))
        return replace(status, rollout=replace(rollout, failures=failures)), ()
    if verdict is Verdict.INCONCLUSIVE or rollout.awaiting_approval:
        return _in_time(turn, status, _undecided(rollout.analysis))
    if rollout.step + 1 < len(steps):
        return _at_step(turn, status, rollout.step + 1), ()
    return _last_step_passed(turn, status)


def _measure(turn: Turn, rollout: RolloutStatus, seen: Cohorts) -> RolloutStatus:
    assert rollout.measured_since is not None
    count = rollout.measurement + 1
    since = rollout.measured_since
    ours, cohort, stable = seen.requests_since(turn.seen.requests, since)
    share, started = seen.share(rollout.canary_requests_before, rollout.stable_requests_before)
    probed = all(is_probed(turn.seen.probes, turn.seen.probe_ids, pod, since) for pod in seen.canary)
    probes = MetricAnalysis(
        metric="Probes",
        verdict=Verdict.PASS if probed else Verdict.INCONCLUSIVE,
        message="greedy tokens agree with the stable revision" if probed else "probes are not answered yet",
    )
    analysis = (
        probes,
        judge_completion(ours, stable, started, count),
        *judge_requests(ours, cohort, turn.spec.rollout.analysis, count),
        share,
    )
    return replace(rollout, measurement=count, analysis=analysis, observed_weight=seen.weight_pct)


def _last_step_passed(turn: Turn, status: Status) -> Turned:
    rollout, spec = _rollout(status), turn.spec.rollout
    if spec.approval is Approval.BEFORE_PROMOTE and spec.approved_artifact != rollout.artifact:
        text = f"all steps passed; set spec.rollout.approvedArtifact to {rollout.artifact} to promote it"
        waiting = replace(rollout, awaiting_approval=True)
        return replace(status, rollout=waiting), (EmitEvent(EventType.NORMAL, "AwaitingApproval", text),)
    return _promote(turn, status), ()


def _promote(turn: Turn, status: Status) -> Status:
    rollout = replace(_rollout(status), step_since=turn.now, awaiting_approval=False)
    return replace(status, phase=Phase.PROMOTING, rollout=rollout)


def _in_time(turn: Turn, status: Status, waiting_for: str) -> Turned:
    """Hold, unless a deadline has passed. Somebody's approval may take as long as it takes."""
    rollout, spec = _rollout(status), turn.spec.rollout
    if rollout.awaiting_approval:
        return status, ()
    deadline = turn.deadline(rollout.started_at, spec.progress_deadline)
    if turn.now > deadline:
        text = f"not through by {clock(deadline)}: {waiting_for}"
        return abort(turn, status, Failure("ProgressDeadlineExceeded", text))
    deadline = turn.deadline(rollout.step_since, spec.step_deadline)
    if turn.now > deadline:
        text = f"step not passed by {clock(deadline)}: {waiting_for}"
        return abort(turn, status, Failure("AnalysisInconclusive", text))
    return status, ()


def _undecided(analysis: tuple[MetricAnalysis, ...]) -> str:
    return "; ".join(f"{m.metric}: {m.message}" for m in analysis if m.verdict is Verdict.INCONCLUSIVE)


def _pod_troubles(turn: Turn) -> str:
    """What keeps pods from being ready, for a message."""
    troubles = []
    for serving in (turn.seen.canary, turn.seen.stable):
        for pod in live_pods(serving):
            if pod.trouble:
                troubles.append(f"{pod.name}: {pod.trouble}")
            elif pod.is_ready and pod.artifact_digest and not serves(pod, pod.template_artifact):
                troubles.append(f"{pod.name} reports artifact {short_name(pod.artifact_digest)}")
    return f" ({'; '.join(troubles[:3])})" if troubles else ""
