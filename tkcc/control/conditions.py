"""What readers are told: every known condition, each turn, from the status that the turn led to.

Messages name numbers and absolute times, so that they change when something does and not with the clock.
"""

from tkcc.api.condition import Condition, ConditionStatus, ConditionType, find_condition, set_condition
from tkcc.api.fields import BASELINE
from tkcc.api.report import Verdict
from tkcc.api.spec import Mode
from tkcc.api.status import Phase, RolloutStatus, Status
from tkcc.control.actions import EmitEvent, EventType
from tkcc.control.candidate import reason_to_wait
from tkcc.control.cohort import cohorts
from tkcc.control.drift import is_fresh
from tkcc.control.evidence import drift_text
from tkcc.control.observed import PodSeen
from tkcc.control.rollout import FORGIVEN
from tkcc.control.search import brake, wants_drift_run, wants_forced_run
from tkcc.control.turn import (
    Turn,
    clock,
    in_service,
    is_rolled_out,
    is_undecided,
    live_pods,
    serves,
    short_name,
    stable_plans,
)

TRUE, FALSE, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN
Told = tuple[ConditionStatus, str, str]  # status, reason, message

_IN_ROLLOUT = (Phase.WARMING, Phase.CANARY, Phase.PROMOTING, Phase.ROLLING_BACK)


def conditions_of(turn: Turn, before: Status, status: Status) -> tuple[Condition, ...]:
    """`before` is the status that the turn began with."""
    told: dict[ConditionType, Told] = {
        ConditionType.ACCEPTED: _accepted(turn),
        ConditionType.READY: _ready(turn, status),
        ConditionType.METRICS_AVAILABLE: _metrics(turn),
        ConditionType.TRAFFIC_DRIFTED: _drifted(turn, status),
        ConditionType.RECOMPILING: _recompiling(turn, status),
        ConditionType.CANDIDATE_AVAILABLE: _candidate(turn, status),
        ConditionType.PROGRESSING: _progressing(turn, status),
        ConditionType.TRAFFIC_SPLIT_VERIFIED: _split(status),
        ConditionType.ROLLOUT_HEALTHY: _healthy(status),
        ConditionType.DEGRADED: _degraded(turn, status),
    }
    if before.observed_generation not in (0, turn.seen.meta.generation):
        # The pods have not been given this generation of the spec yet: Ready stays as it was said of the last one.
        del told[ConditionType.READY]
    conditions = status.conditions
    known = {(c.type, c.status, c.reason, c.message, c.observed_generation) for c in conditions}
    for type_, (state, reason, message) in told.items():
        if (type_.value, state, reason, message[:4096], turn.seen.meta.generation) in known:
            continue  # most turns change nothing, and making a border type is what costs here
        new = Condition(type_.value, state, reason, message[:4096], turn.seen.meta.generation)
        conditions = set_condition(conditions, new, turn.now)
    return conditions


def metrics_events(before: Status, after: Status) -> tuple[EmitEvent, ...]:
    """Events of metrics going away and coming back: they have no phase of their own."""
    old = find_condition(before.conditions, ConditionType.METRICS_AVAILABLE)
    new = find_condition(after.conditions, ConditionType.METRICS_AVAILABLE)
    if old is None or new is None or old.status == new.status:
        return ()
    if new.status is FALSE:
        return (EmitEvent(EventType.WARNING, "MetricsUnavailable", new.message),)
    return (EmitEvent(EventType.NORMAL, "MetricsAvailable", new.message),) if old.status is FALSE else ()


def _accepted(turn: Turn) -> Told:
    accepted = turn.acceptance
    return (TRUE if accepted.is_accepted else FALSE), accepted.reason, accepted.message


def _ready(turn: Turn, status: Status) -> Told:
    """Serving health. The operator's own rollouts do not count against it while enough pods serve."""
    want, stable = turn.spec.replicas, turn.seen.stable
    if not turn.acceptance.may_serve and stable is None:
        return FALSE, turn.acceptance.reason, f"nothing is deployed: {turn.acceptance.message}"
    if stable is None:
        return FALSE, "ReplicasNotReady", f"0 of {want} pods are ready: the stable Deployment is not there yet"
    pods = (*in_service(stable), *in_service(turn.seen.canary))
    ready = len(pods)
    wrong = [p.name for p in pods if p.artifact_digest and not serves(p, p.template_artifact)]
    if ready < want or wrong:
        reason, why = _why_not_ready(live_pods(stable))
        if wrong:
            why = f"; {wrong[0]} does not run the artifact that it was given"
        return FALSE, reason, f"{ready} of {want} pods are ready{why}"
    if status.phase not in _IN_ROLLOUT and not is_rolled_out(stable):
        reason, why = _why_not_ready(live_pods(stable))
        return FALSE, reason, f"the present spec is being rolled out to {want} pods; {ready} pods serve{why}"
    return TRUE, "AllReplicasReady", f"{ready} of {want} pods are ready"


_WAITING_REASONS = {
    "ImagePullBackOff": "ImagePullFailed",
    "ErrImagePull": "ImagePullFailed",
    "InvalidImageName": "ImagePullFailed",
    "CrashLoopBackOff": "CrashLooping",
}


def _why_not_ready(pods: tuple[PodSeen, ...]) -> tuple[str, str]:
    """(reason, "; detail") by the first pod that says why."""
    for pod in pods:
        if pod.is_ready:
            continue
        if pod.load_error:
            return "ModelCacheNotReady", f"; {pod.name}: {pod.load_error}"
        if pod.waiting_reason in _WAITING_REASONS:
            why = f": {pod.last_words}" if pod.last_words else ""
            return _WAITING_REASONS[pod.waiting_reason], f"; {pod.name}: {pod.waiting_reason}{why}"
        if pod.unschedulable:
            return "InsufficientCapacity", f"; {pod.name}: {pod.unschedulable}"
    return "ReplicasNotReady", ""


def _metrics(turn: Turn) -> Told:
    seen, spec = turn.seen, turn.spec.drift
    ready = len(in_service(seen.stable)) + len(in_service(seen.canary))
    if not ready and not seen.samples:
        return UNKNOWN, "MetricsMissing", "no pod serves yet"
    errors = "; ".join(seen.scrape_errors[:3])
    if errors and len(seen.scrape_errors) >= max(1, ready):
        return FALSE, "MetricsMissing", f"no pod's metrics can be read; drift and canary wait: {errors}"
    if turn.traffic.last_at is None:
        return UNKNOWN, "MetricsMissing", "no metrics were read yet"
    if not is_fresh(turn.traffic, spec, turn.now):
        last = clock(turn.traffic.last_at)
        return FALSE, "MetricsStale", f"the last metrics are of {last}, too long ago; drift waits"
    if errors:
        return TRUE, "MetricsFound", f"metrics of some pods cannot be read: {errors}"
    return TRUE, "MetricsFound", "the metrics of every ready pod can be read"


def _drifted(turn: Turn, status: Status) -> Told:
    drift = status.drift
    if not stable_plans(status):
        return UNKNOWN, "BaselineEstablishing", f"no plan yet; {drift_text(turn, status)}"
    if status.phase in _IN_ROLLOUT:
        state = TRUE if drift.drifted else FALSE
        return state, drift.signal or "WithinThreshold", f"not looked at during a rollout; {drift_text(turn, status)}"
    if not drift.drifted:
        return FALSE, "WithinThreshold", drift_text(turn, status)
    since = f" since {clock(drift.detected_at)}" if drift.detected_at else ""
    return TRUE, drift.signal, f"drifted{since}; {drift_text(turn, status)}"


def _recompiling(turn: Turn, status: Status) -> Told:
    recompilation = status.recompilation
    if status.phase is Phase.RECOMPILING:
        return _running(turn, recompilation.active_run)
    forced = wants_forced_run(turn, status)
    if forced or wants_drift_run(turn, status):
        held = brake(turn, status, forced=forced)
        if held is not None:
            return FALSE, held.reason, f"a run is wanted and does not start: {held.message}"
        if status.phase is not Phase.SERVING:
            return FALSE, "RolloutInProgress", "a run is wanted and waits for the end of the rollout"
        if status.candidate is None:
            return FALSE, "InsufficientSamples", f"a run is wanted and waits for traffic; {drift_text(turn, status)}"
    if turn.spec.recompilation.mode is Mode.DISABLED:
        return FALSE, "Disabled", "spec.recompilation.mode is Disabled"
    if recompilation.last_run:
        ended = f" at {clock(recompilation.last_ended_at)}" if recompilation.last_ended_at else ""
        text = f"run {recompilation.last_run} ended with {recompilation.last_outcome}{ended}"
        return FALSE, recompilation.last_outcome, text
    return FALSE, "Idle", "no run yet"


def _running(turn: Turn, name: str) -> Told:
    run = next((r for r in turn.seen.runs if r.name == name), None)
    if run is None:
        return TRUE, "Starting", f"run {name} was asked for"
    succeeded = find_condition(run.conditions, "Succeeded")
    reason = succeeded.reason if succeeded is not None else "Starting"
    until = clock(run.created_at + run.spec.budget.max_duration)
    return TRUE, reason, f"run {name}: {run.num_evaluated} candidates evaluated; its budget ends at {until}"


def _candidate(turn: Turn, status: Status) -> Told:
    candidate = status.candidate
    if candidate is not None:
        gain = f", {candidate.speedup} of baseline" if candidate.speedup else ""
        what = f"{candidate.name} ({candidate.source.value}{gain})"
        if status.phase in _IN_ROLLOUT and status.phase is not Phase.ROLLING_BACK:
            return TRUE, "ImprovementMeasured", f"{what} is being rolled out"
        held = reason_to_wait(turn, status, candidate)
        if held is None:
            return TRUE, "ImprovementMeasured", f"{what} goes to the canary"
        reason, message = held
        return (FALSE if reason == "Incompatible" else TRUE), reason, f"{what}: {message}"
    if status.rolled_back:
        last = status.rolled_back[-1]
        again = "it may be picked again" if is_undecided(last) else "it is not picked again"
        text = f"{short_name(last.artifact)} was rolled back at {clock(last.at)}, {last.reason}; {again}"
        return FALSE, "RolledBack", text
    return FALSE, "None", "no candidate waits for a rollout"


def _progressing(turn: Turn, status: Status) -> Told:
    rollout = status.rollout
    if rollout is None:
        return FALSE, "NoRollout", "no rollout yet"
    name = short_name(rollout.artifact)
    match status.phase:
        case Phase.WARMING:
            seen = cohorts(turn.seen, rollout.artifact, rollout.started_at)
            until = clock(turn.deadline(rollout.started_at, turn.spec.rollout.warmup_timeout))
            return TRUE, "WarmingUp", f"{name}: {len(seen.warm)} canary pods are warm; aborts at {until}"
        case Phase.CANARY:
            return _stepping(turn, rollout)
        case Phase.PROMOTING:
            if rollout.abort_reason:
                return FALSE, "ProgressDeadlineExceeded", rollout.abort_message
            stable = turn.seen.stable
            done = sum(serves(p, rollout.artifact) and p.is_ready for p in live_pods(stable))
            return TRUE, "Promoting", f"{done} of {turn.spec.replicas} stable pods run {name}"
        case Phase.ROLLING_BACK:
            return TRUE, "RollingBack", f"{name} has no traffic; {status.stable.name} comes back to full strength"
        case _:
            if rollout.abort_reason:
                text = f"{name} went back: {rollout.abort_reason}: {rollout.abort_message}"
                return FALSE, "RolledBack", text
            return FALSE, "RolloutCompleted", f"{name} was promoted"


def _stepping(turn: Turn, rollout: RolloutStatus) -> Told:
    name = short_name(rollout.artifact)
    if rollout.awaiting_approval:
        text = f"{name} passed all steps; set spec.rollout.approvedArtifact to {rollout.artifact} to promote it"
        return TRUE, "AwaitingApproval", text
    where = f"step {rollout.step + 1} of {rollout.total_steps}, {rollout.desired_weight} %"
    until = clock(turn.deadline(rollout.step_since, turn.spec.rollout.step_deadline))
    if rollout.measured_since is None:
        observed = f"{rollout.observed_weight or 0} %"
        return TRUE, "StepPaused", f"{name}, {where}: {observed} of the pods in service so far; aborts at {until}"
    due = clock(rollout.measured_since + (rollout.measurement + 1) * turn.spec.rollout.analysis.interval)
    text = f"{name}, {where}: {rollout.measurement} measurements, next at {due}; aborts at {until}"
    return TRUE, "StepAnalysing", text


def _split(status: Status) -> Told:
    rollout = status.rollout
    if rollout is None or status.phase is not Phase.CANARY:
        return UNKNOWN, "NotApplicable", "no canary has traffic"
    share = next((m for m in rollout.analysis if m.metric == "TrafficSplit"), None)
    if share is None:
        return UNKNOWN, "WeightNotObserved", "not measured yet at this step"
    if share.verdict is Verdict.PASS:
        return TRUE, "WeightsObserved", share.message
    return FALSE, "WeightNotObserved", share.message


def _healthy(status: Status) -> Told:
    rollout = status.rollout
    if rollout is None:
        return UNKNOWN, "NoRollout", "no rollout yet"
    if rollout.abort_reason and status.phase is not Phase.PROMOTING:
        state = UNKNOWN if rollout.abort_reason in FORGIVEN else FALSE
        return state, rollout.abort_reason, rollout.abort_message
    if status.phase is Phase.CANARY and rollout.analysis:
        text = "; ".join(f"{m.metric} {m.verdict.value}: {m.message}" for m in rollout.analysis)
        verdicts = {m.verdict for m in rollout.analysis}
        reason = "AnalysisInconclusive" if Verdict.INCONCLUSIVE in verdicts else "AnalysisRunning"
        return UNKNOWN, reason, text
    if status.phase in _IN_ROLLOUT and status.phase is not Phase.PROMOTING:
        return UNKNOWN, "AnalysisRunning", "not measured yet at this step"
    if not rollout.total_steps:
        return UNKNOWN, "NotApplicable", f"{short_name(rollout.artifact)} came back without a canary"
    return TRUE, "AnalysisSucceeded", f"{short_name(rollout.artifact)} passed every step"


def _degraded(turn: Turn, status: Status) -> Told:
    rollout, artifact = status.rollout, status.stable.artifact
    if artifact != BASELINE and turn.manifest(artifact) is None:
        text = f"ConfigMap tkcc-artifact-{artifact[:16]} does not exist: pods that start anew cannot"
        return TRUE, "ArtifactMissing", f"{text}; create it again, or set spec.rollout.artifact to {BASELINE}"
    if rollout is not None and status.phase is Phase.PROMOTING and rollout.abort_reason:
        return TRUE, "PartialReplicas", rollout.abort_message
    ready = len(in_service(turn.seen.stable)) + len(in_service(turn.seen.canary))
    if status.phase is Phase.ROLLING_BACK and rollout is not None:
        late = rollout.step_since + turn.spec.rollout.warmup_timeout
        if turn.now > late:
            return TRUE, "RollbackFailed", f"stable is not whole by {clock(late)}: {ready} pods serve"
    if 0 < ready < turn.spec.replicas and turn.seen.stable is not None and status.phase not in _IN_ROLLOUT:
        return TRUE, "PartialReplicas", f"{ready} of {turn.spec.replicas} pods serve"
    return FALSE, "AsExpected", "nothing is wrong"
