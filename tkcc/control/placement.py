"""Where pods and traffic go in each phase: absolute actions, computed from the status alone and said again every turn.

The total in service stays `replicas`: a canary pod is admitted when it is warm, and only then does a stable pod go. So
a rollout needs room for as many more pods as a step adds, while they warm up.
"""

from datetime import datetime

from tkcc.api.spec import Spec
from tkcc.api.status import Phase, RolloutStatus, Status
from tkcc.control.actions import (
    Action,
    EnsureCanary,
    EnsureProbed,
    EnsureService,
    EnsureSize,
    EnsureStable,
    EnsureWeight,
)
from tkcc.control.cohort import Cohorts, cohorts
from tkcc.control.steps import nearest_steps
from tkcc.control.turn import Turn, is_rolled_out, live_pods


def place(turn: Turn, before: Phase, status: Status) -> tuple[Action, ...]:
    """`before` is the phase that the turn began with."""
    rollout = status.rollout
    if not turn.acceptance.may_serve:
        return () if status.phase is Phase.PROMOTING else _without_template(turn, keep_pods=status.phase is not before)
    match status.phase:
        case Phase.SERVING | Phase.RECOMPILING:
            return _only_stable(turn, status)
        case Phase.ROLLING_BACK:
            # The pods that failed are the evidence: they go once the failure is written down, not before.
            return _only_stable(turn, status, keep_pods=before is not Phase.ROLLING_BACK)
        case Phase.WARMING:
            assert rollout is not None
            return _warming(turn, status, rollout)
        case Phase.CANARY:
            assert rollout is not None
            return _canary(turn, status, rollout)
        case Phase.PROMOTING:
            assert rollout is not None
            return _promoting(turn, rollout)


def _only_stable(turn: Turn, status: Status, *, keep_pods: bool = False) -> tuple[Action, ...]:
    """Traffic leaves the canary first; then stable comes to full strength, then the canary's pods go."""
    canary = turn.seen.canary
    gone: tuple[Action, ...] = ()
    if canary is not None and canary.replicas > 0 and not keep_pods:
        gone = (EnsureCanary(canary.artifact, 0),)
    return (*_traffic_away(turn), EnsureService(), EnsureStable(status.stable.artifact, turn.spec.replicas), *gone)


def _without_template(turn: Turn, *, keep_pods: bool) -> tuple[Action, ...]:
    """The same of a spec that renders no pod: those that are there can still be more or fewer."""
    stable, canary = turn.seen.stable, turn.seen.canary
    sizes = []
    if stable is not None and stable.replicas != turn.spec.replicas:
        sizes.append(EnsureSize("stable", turn.spec.replicas))
    if canary is not None and canary.replicas > 0 and not keep_pods:
        sizes.append(EnsureSize("canary", 0))
    return (*_traffic_away(turn), *sizes)


def _traffic_away(turn: Turn) -> tuple[Action, ...]:
    return (EnsureWeight(0, ()),) if any(pod.in_service for pod in live_pods(turn.seen.canary)) else ()


def _warming(turn: Turn, status: Status, rollout: RolloutStatus) -> tuple[Action, ...]:
    seen = cohorts(turn.seen, rollout.artifact, rollout.started_at)
    return (
        EnsureService(),
        EnsureStable(status.stable.artifact, turn.spec.replicas),
        EnsureCanary(rollout.artifact, nearest_steps(turn.spec)[0].pods),
        EnsureWeight(0, ()),
        *_probed(seen, rollout.started_at),
    )


def _canary(turn: Turn, status: Status, rollout: RolloutStatus) -> tuple[Action, ...]:
    steps = nearest_steps(turn.spec)
    step = steps[min(rollout.step, len(steps) - 1)]
    seen = cohorts(turn.seen, rollout.artifact, rollout.started_at)
    admitted = seen.warm[: step.pods]
    return (
        EnsureService(),
        EnsureCanary(rollout.artifact, step.pods),
        EnsureWeight(step.weight_pct, admitted),
        EnsureStable(status.stable.artifact, turn.spec.replicas - len(admitted)),
        *_probed(seen, rollout.measured_since or rollout.step_since),
    )


def _promoting(turn: Turn, rollout: RolloutStatus) -> tuple[Action, ...]:
    """Stable takes the candidate over beside the canary, and grows to full strength once it did."""
    seen = cohorts(turn.seen, rollout.artifact, rollout.started_at)
    size = turn.seen.canary.replicas if turn.seen.canary else 0
    admitted = seen.warm[:size]
    return (
        EnsureService(),
        EnsureCanary(rollout.artifact, size),
        EnsureWeight(rollout.desired_weight, admitted),
        EnsureStable(rollout.artifact, _promoted_size(turn.spec, turn, rollout, len(admitted))),
        *_probed(seen, rollout.started_at),
    )


def _promoted_size(spec: Spec, turn: Turn, rollout: RolloutStatus, num_admitted: int) -> int:
    stable = turn.seen.stable
    beside = max(1, spec.replicas - num_admitted)
    if stable is None:
        return spec.replicas
    has_taken_over = stable.artifact == rollout.artifact and is_rolled_out(stable) and stable.ready_replicas >= beside
    has_grown = stable.artifact == rollout.artifact and stable.replicas >= spec.replicas  # and does not shrink again
    return spec.replicas if has_taken_over or has_grown else beside


def _probed(seen: Cohorts, after: datetime) -> tuple[Action, ...]:
    return (EnsureProbed(seen.loaded, after),) if seen.loaded else ()
