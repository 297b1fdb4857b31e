"""(spec, status, observations) -> (actions, new status) of one InferenceDeployment."""

from dataclasses import replace
from datetime import datetime

from tkcc.api.condition import Condition, ConditionStatus, ConditionType, set_condition
from tkcc.api.spec import Spec
from tkcc.api.status import Phase, Status
from tkcc.control.actions import Action, EnsureCanary, EnsureService, EnsureStable, EnsureWeight
from tkcc.control.observed import Observed


def reconcile(spec: Spec, status: Status, seen: Observed) -> tuple[tuple[Action, ...], Status]:
    """What to make true now, and what to remember. No I/O, clock or randomness in here."""
    actions: list[Action] = [EnsureService(), EnsureStable(status.stable.artifact, spec.replicas)]
    if seen.canary and seen.canary.replicas > 0:
        actions += [EnsureWeight(0, ()), EnsureCanary(seen.canary.artifact, 0)]
    ready = seen.stable.ready_replicas if seen.stable else 0
    is_ready = ready >= spec.replicas
    new = replace(
        status,
        phase=Phase.SERVING,
        observed_generation=seen.meta.generation,
        ready_replicas=ready,
        replicas=seen.stable.replicas if seen.stable else 0,
        selector=f"tkcc.dev/deployment={seen.meta.name},tkcc.dev/serving=true",
        conditions=_set(
            status.conditions,
            ConditionType.READY,
            is_ready,
            "AllReplicasReady" if is_ready else "ReplicasNotReady",
            f"{ready} of {spec.replicas} pods are ready",
            seen.meta.generation,
            seen.now,
        ),
    )
    return tuple(actions), new


def _set(
    have: tuple[Condition, ...], type_: str, is_true: bool, reason: str, message: str, generation: int, now: datetime
) -> tuple[Condition, ...]:
    status = ConditionStatus.TRUE if is_true else ConditionStatus.FALSE
    return set_condition(have, Condition(type_, status, reason, message, generation), now)
