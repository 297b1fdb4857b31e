"""What the core asks the shell to make true. All but EmitEvent are absolute: doing one twice is doing it once.

The shell carries them out in order and stops at the first that fails; the next reconcile starts from the old status.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from tkcc.api.run import RunSpec


@dataclass(frozen=True)
class EnsureService:
    """The Service NAME, which selects pods with the serving label, exists."""


@dataclass(frozen=True)
class EnsureStable:
    """Deployment NAME-stable runs `artifact` with `replicas` pods, rendered from the present spec, all in service."""

    artifact: str  # digest or BASELINE
    replicas: int


@dataclass(frozen=True)
class EnsureCanary:
    """Deployment NAME-canary runs `artifact` with `replicas` pods. New pods are *not* in service: EnsureWeight admits
    them. With 0 replicas a missing Deployment stays missing."""

    artifact: str
    replicas: int


@dataclass(frozen=True)
class EnsureSize:
    """The Deployment of this role has `replicas` pods, of the template that it has: for a spec that renders none."""

    role: str  # "stable" or "canary"
    replicas: int


@dataclass(frozen=True)
class EnsureWeight:
    """Exactly the canary pods named here are in service (label tkcc.dev/serving: "true"); all others of the canary are
    taken out of it. `weight_pct` is the share this makes, for people."""

    weight_pct: int
    pods: tuple[str, ...]


@dataclass(frozen=True)
class EnsureProbed:
    """Each of these pods has answered every fixed prompt (Observed.probe_ids) since `after`."""

    pods: tuple[str, ...]
    after: datetime


@dataclass(frozen=True)
class EnsureRun:
    """The RecompilationRun exists, and the traffic recorded from spec.window_start to window_end is kept for it. Asked
    for each turn that the run is under way."""

    name: str
    spec: RunSpec


@dataclass(frozen=True)
class EnsureRunEnded:
    """The run's condition Succeeded is False with this reason, unless it has ended already."""

    name: str
    reason: str
    message: str


@dataclass(frozen=True)
class EnsureRunGone:
    """The RecompilationRun does not exist any more (history beyond its limit)."""

    name: str


@dataclass(frozen=True)
class EnsureArtifact:
    """The artifact ConfigMap of this digest exists, made of the run's result."""

    digest: str
    run: str


@dataclass(frozen=True)
class EnsureArtifactGone:
    """The artifact ConfigMap of this digest does not exist any more. Only ever asked for those this object owns."""

    digest: str


class EventType(StrEnum):
    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True)
class EmitEvent:
    """Comes last of the actions. The shell names the Event by the digest of its content: a repeat only counts."""

    type: EventType
    reason: str
    message: str


Action = (
    EnsureService
    | EnsureStable
    | EnsureCanary
    | EnsureSize
    | EnsureWeight
    | EnsureProbed
    | EnsureRun
    | EnsureRunEnded
    | EnsureRunGone
    | EnsureArtifact
    | EnsureArtifactGone
    | EmitEvent
)


# --- of a RecompilationRun ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EnsureRunWorkers:
    """Token, traffic, empty result, role, tiers and the Job of this run exist."""


@dataclass(frozen=True)
class EnsureRunTornDown:
    """Job, tiers, role and token of this run are gone; traffic and result stay."""


RunAction = EnsureRunWorkers | EnsureRunTornDown | EmitEvent
