"""Conditions: what readers of a custom resource ask, in the form of the Kubernetes API conventions.

`reason` is CamelCase and stable (machines branch on it); `message` is for people. Absent is not False: every known
type is set at first sight.
"""

from dataclasses import replace
from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from tkcc.api.codec import BORDER
from tkcc.api.fields import Str64, Timestamp


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class ConditionType(StrEnum):
    """Those of an InferenceDeployment. TrafficDrifted and Degraded are bad when True, Recompiling and Progressing are
    transitions, the others are good when True."""

    ACCEPTED = "Accepted"
    READY = "Ready"
    METRICS_AVAILABLE = "MetricsAvailable"
    TRAFFIC_DRIFTED = "TrafficDrifted"
    RECOMPILING = "Recompiling"
    CANDIDATE_AVAILABLE = "CandidateAvailable"
    PROGRESSING = "Progressing"
    TRAFFIC_SPLIT_VERIFIED = "TrafficSplitVerified"
    ROLLOUT_HEALTHY = "RolloutHealthy"
    DEGRADED = "Degraded"


class RunConditionType(StrEnum):
    """Those of a RecompilationRun. The operator writes Admitted and Succeeded, the worker the other two."""

    ADMITTED = "Admitted"
    FAST_TIER_COMPLETED = "FastTierCompleted"
    SLOW_TIER_COMPLETED = "SlowTierCompleted"
    SUCCEEDED = "Succeeded"


@dataclass(frozen=True, config=BORDER)
class Condition:
    type: Str64
    status: ConditionStatus
    reason: Annotated[str, Field(max_length=64, pattern="^[A-Za-z][A-Za-z0-9]*$")]
    message: Annotated[str, Field(max_length=4096)]
    observed_generation: int = 0
    last_transition_time: Timestamp | None = None


def find_condition(conditions: tuple[Condition, ...], type_: str) -> Condition | None:
    return next((c for c in conditions if c.type == type_), None)


def set_condition(have: tuple[Condition, ...], new: Condition, now: datetime) -> tuple[Condition, ...]:
    """Upsert by type. The transition time moves only when `status` flips; other types keep their place."""
    old = find_condition(have, new.type)
    since = old.last_transition_time if old and old.status == new.status else now
    new = replace(new, last_transition_time=since)
    if new == old:
        return have
    if old is None:
        return (*have, new)
    return tuple(new if c.type == new.type else c for c in have)
