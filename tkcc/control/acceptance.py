"""May this spec be acted upon, and if not, what should its author change?

An unaccepted spec never stops what already serves: it only keeps runs and rollouts from starting.
"""

from dataclasses import dataclass

from tkcc.api.fields import BASELINE
from tkcc.api.spec import EngineType, Mode, Spec
from tkcc.api.status import Phase, Status
from tkcc.control.observed import Observed
from tkcc.control.steps import nearest_steps, steps_of


@dataclass(frozen=True)
class Acceptance:
    """`may_serve`: the stable Deployment can be rendered from this spec; where it cannot, the present one goes on."""

    is_accepted: bool
    may_serve: bool
    reason: str
    message: str


def accept(spec: Spec, status: Status, seen: Observed) -> Acceptance:
    if spec.engine.type is not EngineType.NATIVE:
        return Acceptance(
            False,
            False,
            "UnsupportedEngine",
            f"spec.engine.type {spec.engine.type.value} is not supported yet; use {EngineType.NATIVE.value}",
        )
    for missing in seen.missing:
        needed = missing.field == "spec.model.uri"  # without weights no pod starts; those that run go on
        return Acceptance(
            False,
            not needed or seen.stable is not None,
            "ReferenceNotFound",
            f"{missing.field}: {missing.kind} {missing.name} does not exist in namespace {seen.meta.namespace}; "
            "create it or change the field",
        )
    serving = next((a.manifest for a in seen.artifacts if a.digest == status.stable.artifact), None)
    if serving is not None and serving.dtype != spec.engine.dtype.value:
        return Acceptance(
            False,
            False,
            "InvalidSpec",
            f"spec.engine.dtype {spec.engine.dtype.value}: the artifact in service is made for {serving.dtype}; set "
            f"spec.rollout.artifact to {BASELINE} first",
        )
    wanted = spec.rollout.artifact
    if wants_adoption(spec, status) and wanted != BASELINE and not any(a.digest == wanted for a in seen.artifacts):
        return Acceptance(
            False,
            True,
            "ReferenceNotFound",
            f"spec.rollout.artifact: there is no ConfigMap tkcc-artifact-{wanted[:16]} with this digest in namespace "
            f"{seen.meta.namespace}; create it or change the field",
        )
    if spec.recompilation.mode is Mode.AUTOMATIC or wants_adoption(spec, status) or spec.rollout.steps:
        is_under_way = status.phase in (Phase.WARMING, Phase.CANARY, Phase.PROMOTING)
        try:
            nearest_steps(spec) if is_under_way else steps_of(spec)
        except ValueError as err:
            return Acceptance(False, True, "InvalidSpec", str(err))
    return Acceptance(True, True, "Valid", "the spec is valid and all that it names exists")


def wants_adoption(spec: Spec, status: Status) -> bool:
    """Has spec.rollout.artifact been set or changed to something that does not serve yet?"""
    return spec.rollout.artifact not in ("", status.adopted_artifact, status.stable.artifact)
