"""Which canary weights a number of replicas can make, by the share of pods behind one Service.

`replicas` is the total. A weight of w % is k canary pods of them, where k / replicas is w % to the nearest percent and
at least one pod stays stable.
"""

from dataclasses import dataclass

from tkcc.api.spec import Spec


@dataclass(frozen=True)
class Step:
    weight_pct: int
    pods: int  # of the canary


def attainable(replicas: int) -> tuple[Step, ...]:
    """Every weight that can be made, ascending; none with one replica."""
    return tuple(Step(round(100 * pods / replicas), pods) for pods in range(1, replicas))


def steps_of(spec: Spec) -> tuple[Step, ...]:
    """The steps of a rollout. Raises ValueError that names the attainable ones."""
    steps = nearest_steps(spec)
    for weight_pct, step in zip(spec.rollout.steps, steps, strict=False):
        if abs(weight_pct - 100 * step.pods / spec.replicas) > 0.5:
            names = ", ".join(str(step.weight_pct) for step in _sampled(attainable(spec.replicas)))
            raise ValueError(
                f"spec.rollout.steps: {weight_pct} % of {spec.replicas} replicas is "
                f"{weight_pct * spec.replicas / 100:g} pods; attainable: {names}"
            )
    return steps


def nearest_steps(spec: Spec) -> tuple[Step, ...]:
    """The same of a rollout under way, at whatever size it has come to. Raises ValueError with one replica."""
    possible = attainable(spec.replicas)
    if not possible:
        raise ValueError(
            f"spec.replicas {spec.replicas} leaves no room for a canary; set it to 2 or more, or "
            "spec.recompilation.mode to RecommendOnly or Disabled"
        )
    if not spec.rollout.steps:
        return tuple(possible[pods - 1] for pods in sorted({1, spec.replicas // 2}))
    wanted = (round(weight_pct * spec.replicas / 100) for weight_pct in spec.rollout.steps)
    return tuple(possible[min(max(1, pods), spec.replicas - 1) - 1] for pods in wanted)


def _sampled(possible: tuple[Step, ...], most: int = 20) -> tuple[Step, ...]:
    return possible[:: -(-len(possible) // most)]
