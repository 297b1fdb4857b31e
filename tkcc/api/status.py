"""`InferenceDeployment.status`: what the operator remembers and what readers are shown.

`phase` is the operator's program counter; readers use the conditions. Every list has a bound. What is lost with the
status can be rebuilt from the owned objects (`tkcc.control.rebuild`), except measurements, which are taken again.
"""

from dataclasses import field
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass

from tkcc.api.codec import BORDER
from tkcc.api.condition import Condition
from tkcc.api.fields import ATOMIC_LIST, BASELINE, ArtifactChoice, ArtifactRef, Count, Str63, Str64, Timestamp, list_map
from tkcc.api.report import Verdict

MAX_PLANS = 16


class Phase(StrEnum):
    SERVING = "Serving"
    RECOMPILING = "Recompiling"  # serving goes on beside it
    WARMING = "Warming"  # canary pods start and are probed; no traffic yet
    CANARY = "Canary"
    PROMOTING = "Promoting"  # the stable pods take the candidate over, the canary keeps its share
    ROLLING_BACK = "RollingBack"  # no traffic on the canary; stable comes back to full strength


class Source(StrEnum):
    """Where an artifact in service, or on its way there, comes from."""

    BASELINE = "Baseline"
    RUN = "Run"
    REUSE = "Reuse"  # known from earlier, for the workload that came back
    MANUAL = "Manual"  # spec.rollout.artifact


@dataclass(frozen=True, config=BORDER)
class Point:
    """A workload as drift sees it."""

    prompt_tokens: Annotated[int, Field(ge=0, description="Mean of a request.")]
    hit_ratio_milli: int | None = Field(default=None, description="Token-weighted; absent where caches were filling.")


@dataclass(frozen=True, config=BORDER)
class Revision:
    """An artifact in service, or on its way there."""

    artifact: ArtifactRef = BASELINE
    name: str = Field(default=BASELINE, max_length=16, description="Short form of the digest.")
    digest: str = Field(default="", max_length=64, description="As the pods report it, for `baseline` too.")
    source: Source = Source.BASELINE
    run: Str63 = ""
    speedup: str = Field(default="", max_length=16, description="Against the built-in forward pass, like 1.25x.")
    promoted_at: Timestamp | None = None
    workload: Point | None = Field(default=None, description="What it was compiled or chosen for.")
    workload_digest: Str64 = ""


@dataclass(frozen=True, config=BORDER)
class Plan:
    """A workload that is served as well as is known, and the artifact that does it."""

    workload_digest: Str64
    artifact: ArtifactRef
    prompt_tokens: Count
    hit_ratio_milli: int | None = None
    reason: str = Field(default="", max_length=64, description="FirstWindow, Promoted, NoImprovement or Measured.")
    added_at: Timestamp | None = None


@dataclass(frozen=True, config=BORDER)
class DriftStatus:
    """`long*` and `short*` are of the last tick. Distances in thousandths."""

    long_prompt_tokens: int | None = None
    long_hit_ratio_milli: int | None = None
    long_requests: int = 0
    long_distance_milli: int | None = None
    short_distance_milli: int | None = None
    ticks: int = Field(default=0, description="Consecutive ticks above distance 1.")
    drifted: bool = Field(default=False, description="Clears below distance 0.7, or with a new plan.")
    signal: str = Field(
        default="",
        max_length=64,
        description="PromptLengthShifted, PrefixCacheHitRateShifted or MultipleSignalsShifted.",
    )
    detected_at: Timestamp | None = None
    nearest_plan: Str64 = ""
    tick_at: Timestamp | None = None
    evidence_since: Timestamp | None = Field(default=None, description="Ticks before this do not count.")
    plans: tuple[Plan, ...] = Field(default=(), max_length=MAX_PLANS, json_schema_extra=list_map("workloadDigest"))


@dataclass(frozen=True, config=BORDER)
class Attempt:
    """A search that brought nothing into service: not repeated until incumbent or workload changes."""

    workload_digest: Str64
    incumbent: ArtifactRef
    prompt_tokens: Count
    hit_ratio_milli: int | None = None
    artifact: ArtifactChoice = ""
    reason: Str64 = ""
    ended_at: Timestamp | None = None


@dataclass(frozen=True, config=BORDER)
class RecompilationStatus:
    active_run: Str63 = ""
    last_run: Str63 = ""
    last_outcome: Str64 = ""
    last_ended_at: Timestamp | None = None
    handled_token: Str64 = ""
    started_at: tuple[Timestamp, ...] = Field(
        default=(), max_length=100, description="Runs started in the last 24 hours.", json_schema_extra=ATOMIC_LIST
    )
    attempts: tuple[Attempt, ...] = Field(
        default=(), max_length=MAX_PLANS, json_schema_extra=list_map("workloadDigest", "incumbent")
    )


# Figures of pods, to be shown: what would not fit is cut, because a status that cannot be written stops every turn.
_Figure = Annotated[str, BeforeValidator(lambda text: text[:32]), Field(max_length=32)]
_RatioMilli = Annotated[int, AfterValidator(lambda milli: min(milli, 10**9))]


@dataclass(frozen=True, config=BORDER)
class MetricAnalysis:
    """One metric of the last measurement of a step."""

    metric: Annotated[str, Field(max_length=32)]
    verdict: Verdict
    canary: _Figure = ""
    cohort: _Figure = ""
    ratio_milli: _RatioMilli | None = None  # canary / cohort
    ratio_low_milli: _RatioMilli | None = None
    ratio_high_milli: _RatioMilli | None = None
    requests: int = 0  # of the canary
    message: str = Field(default="", max_length=512)


@dataclass(frozen=True, config=BORDER)
class RolloutStatus:
    """The way of one artifact into service, or back out."""

    artifact: ArtifactRef
    source: Source
    spec_digest: Annotated[str, Field(max_length=64, description="Of the part of spec that a rollout depends on.")]
    started_at: Timestamp
    step_since: Timestamp
    step: int = Field(default=0, ge=0)
    total_steps: int = Field(default=0, ge=0)
    desired_weight: int = Field(default=0, ge=0, le=100)
    observed_weight: int | None = None
    measured_since: Timestamp | None = Field(default=None, description="Requests that started from here on count.")
    canary_requests_before: int = Field(default=0, description="Started at the canary's pods by measuredSince.")
    stable_requests_before: int = Field(default=0, description="The same of the stable pods.")
    measurement: int = Field(default=0, ge=0, description="Of this step.")
    failures: int = Field(default=0, ge=0, description="Failed measurements of this step.")
    analysis: tuple[MetricAnalysis, ...] = Field(default=(), max_length=8, json_schema_extra=list_map("metric"))
    awaiting_approval: bool = Field(default=False, description="All steps passed; waits for approvedArtifact.")
    abort_reason: Str64 = ""
    abort_message: str = Field(default="", max_length=1024)


@dataclass(frozen=True, config=BORDER)
class RolledBack:
    """An artifact that lost a canary: never picked again by the operator itself, unless that proved nothing."""

    artifact: ArtifactRef
    reason: Str64
    at: Timestamp
    tries: int = Field(
        default=1, ge=1, description="Its rollouts that were taken back; after three without a verdict it is given up."
    )


@dataclass(frozen=True, config=BORDER)
class Status:
    observed_generation: int = 0
    phase: Phase = Phase.SERVING
    replicas: int = Field(default=0, description="Pods that exist, canary included; read by the scale subresource.")
    ready_replicas: int = 0
    selector: str = Field(default="", max_length=512, description="Of the pods; read by the scale subresource.")
    stable: Revision = field(default_factory=Revision)
    previous: Revision | None = Field(default=None, description="The revision before; its artifact is kept.")
    candidate: Revision | None = Field(default=None, description="Found and not yet in service.")
    drift: DriftStatus = field(default_factory=DriftStatus)
    recompilation: RecompilationStatus = field(default_factory=RecompilationStatus)
    rollout: RolloutStatus | None = Field(default=None, description="The last one, under way or ended.")
    rolled_back: tuple[RolledBack, ...] = Field(
        default=(), max_length=MAX_PLANS, json_schema_extra=list_map("artifact")
    )
    adopted_artifact: ArtifactChoice = Field(default="", description="spec.rollout.artifact as last acted upon.")
    conditions: tuple[Condition, ...] = Field(default=(), json_schema_extra=list_map("type"))
