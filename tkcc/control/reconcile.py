"""(spec, status, observations) -> (actions, new status) of one InferenceDeployment. No I/O, clock or randomness.

One turn takes at most one step of the phase. `decide` says where to go and what to make on the way, `place` where pods
and traffic belong then, `conditions_of` what readers are told. Run again at once when the phase has changed.
"""

from dataclasses import replace
from datetime import timedelta
from typing import assert_never

from tkcc.api.run import Trigger
from tkcc.api.spec import Mode, Spec
from tkcc.api.status import Phase, Status
from tkcc.control import candidate, rollout, search
from tkcc.control.actions import Action, EmitEvent, EventType
from tkcc.control.conditions import conditions_of, metrics_events
from tkcc.control.evidence import measure
from tkcc.control.garbage import collect
from tkcc.control.observed import Observed
from tkcc.control.placement import place
from tkcc.control.rebuild import is_lost, rebuild
from tkcc.control.turn import Turn, live_pods, serves

Turned = tuple[Status, tuple[Action, ...]]


def reconcile(spec: Spec, status: Status, seen: Observed) -> tuple[tuple[Action, ...], Status]:
    """What to make true now, in this order, and what to remember. Equal input gives equal output; where nothing is to
    be done the new status equals the old."""
    if is_lost(status, seen):
        status = rebuild(spec, seen)
    turn = Turn.of(spec, status, seen)
    measured, noticed = measure(turn, status)
    decided, made = decide(turn, measured)
    decided = _counted(turn, decided)
    new = replace(decided, conditions=conditions_of(turn, status, decided))
    made = (*noticed, *made, *metrics_events(status, new))
    ensured = tuple(action for action in made if not isinstance(action, EmitEvent))
    events = tuple(action for action in made if isinstance(action, EmitEvent))
    return (*ensured, *place(turn, status.phase, new), *collect(turn, new), *events), new


def decide(turn: Turn, status: Status) -> Turned:
    """One step of the phase."""
    match status.phase:
        case Phase.SERVING:
            return _serving(turn, status)
        case Phase.RECOMPILING:
            return search.follow(turn, status)
        case Phase.WARMING:
            return rollout.warming(turn, status)
        case Phase.CANARY:
            return rollout.canary(turn, status)
        case Phase.PROMOTING:
            return rollout.promoting(turn, status)
        case Phase.ROLLING_BACK:
            return rollout.rolling_back(turn, status)
        case _:
            assert_never(status.phase)


def look_again_in(spec: Spec, status: Status) -> timedelta:
    """When the next turn is due where nothing wakes it: a rollout is watched closely."""
    if status.phase in (Phase.SERVING, Phase.RECOMPILING):
        return min(spec.drift.tick, timedelta(seconds=15))
    return min(spec.rollout.analysis.interval, timedelta(seconds=2))


def _serving(turn: Turn, status: Status) -> Turned:
    """In order: what a person asks for, a candidate that waits, a run that is already there, a new one."""
    status = candidate.adopted(turn, status)
    if status.candidate is not None:
        status, actions = candidate.send(turn, status, status.candidate)
        if status.phase is not Phase.SERVING or actions:
            return status, actions
    unknown = search.unknown_run(turn, status)
    if unknown is not None:
        return search.adopt_run(status, unknown), ()
    if not turn.spec.recompilation.trigger_token and status.recompilation.handled_token:
        status = replace(status, recompilation=replace(status.recompilation, handled_token=""))
    if search.wants_forced_run(turn, status) and search.brake(turn, status, forced=True) is None:
        return search.start(turn, status, Trigger.TOKEN) or (status, ())
    if search.wants_drift_run(turn, status):
        return _answer_drift(turn, status)
    return status, ()


def _answer_drift(turn: Turn, status: Status) -> Turned:
    """A known artifact for this workload, else a run."""
    may_switch = turn.acceptance.is_accepted and turn.spec.recompilation.mode is not Mode.DISABLED
    if status.candidate is None and may_switch and not turn.spec.suspend:
        known = search.known_artifact(turn, status)
        if known is not None:
            text = f"{known.name} was compiled for this workload; it goes through the canary, without a run"
            return replace(status, candidate=known), (EmitEvent(EventType.NORMAL, "CandidateSelected", text),)
    if search.brake(turn, status, forced=False) is None:
        return search.start(turn, status, Trigger.DRIFT) or (status, ())
    return status, ()


def _counted(turn: Turn, status: Status) -> Status:
    """The figures that mirror the world."""
    seen = turn.seen
    pods = (*live_pods(seen.stable), *live_pods(seen.canary))
    ready = sum(pod.is_ready and pod.in_service for pod in pods)
    stable = status.stable
    answer = next((pod for pod in live_pods(seen.stable) if serves(pod, stable.artifact)), None)
    if answer is not None and stable.digest != answer.artifact_digest:
        stable = replace(stable, digest=answer.artifact_digest)
    return replace(
        status,
        observed_generation=seen.meta.generation,
        replicas=(seen.stable.replicas if seen.stable else 0) + (seen.canary.replicas if seen.canary else 0),
        ready_replicas=ready,
        selector=f"tkcc.dev/deployment={seen.meta.name},tkcc.dev/serving=true",
        stable=stable,
    )
