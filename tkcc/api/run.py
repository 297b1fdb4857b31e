"""`RecompilationRun`: one bounded search for a better forward pass. Its spec never changes; its name is a digest of it.

The operator writes the spec, `Admitted` and `Succeeded`. The worker writes the rest of the status while it searches and
at its end, last of all, the key `result.json` of the ConfigMap `RUN-result`: a RunResult.
"""

from dataclasses import field
from enum import StrEnum
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from tkcc.api.codec import BORDER, canonical_json, sha256_hex
from tkcc.api.condition import Condition
from tkcc.api.fields import ArtifactChoice, ArtifactRef, Str64, Timestamp, list_map
from tkcc.api.spec import (
    AcceptanceSpec,
    BudgetSpec,
    EngineSpec,
    ModelSpec,
    ProposerSpec,
    TiersSpec,
)
from tkcc.api.workload import Workload


class Trigger(StrEnum):
    DRIFT = "Drift"
    TOKEN = "Token"  # spec.recompilation.triggerToken changed


class RunOutcome(StrEnum):
    """Ends of a run: the reason of its Succeeded condition. SearchSucceeded is the only one with an artifact."""

    SEARCH_SUCCEEDED = "SearchSucceeded"
    NO_IMPROVEMENT = "NoImprovement"
    BUDGET_EXHAUSTED = "BudgetExhausted"  # it ended before anything was judged or confirmed, or nothing could be built
    CORRECTNESS_FAILED = "CorrectnessFailed"  # every faster candidate was wrong
    TIER_POD_FAILED = "TierPodFailed"
    SUPERSEDED = "Superseded"
    CANCELLED = "Cancelled"
    FAILED = "Failed"


@dataclass(frozen=True, config=BORDER)
class RunSpec:
    deployment: Annotated[str, Field(max_length=63, description="The InferenceDeployment it is for.")]
    workload: Workload
    workload_digest: Str64
    incumbent: ArtifactRef
    trigger: Trigger
    model: ModelSpec
    trigger_token: Str64 = ""
    hit_ratio_known: bool = Field(default=True, description="False while caches were filling.")
    window_start: Timestamp | None = Field(default=None, description="Recorded requests are taken from here ...")
    window_end: Timestamp | None = Field(default=None, description="... to here: the window that drifted.")
    engine: EngineSpec = field(default_factory=EngineSpec)
    budget: BudgetSpec = field(default_factory=BudgetSpec)
    tiers: TiersSpec = field(default_factory=TiersSpec)
    proposer: ProposerSpec = field(default_factory=ProposerSpec)
    acceptance: AcceptanceSpec = field(default_factory=AcceptanceSpec)


@dataclass(frozen=True, config=BORDER)
class CandidateCounts:
    evaluated: int = 0
    accepted: int = 0
    refused: int = 0


@dataclass(frozen=True, config=BORDER)
class CandidateSummary:
    digest: Str64
    tier: str = Field(default="", max_length=16)
    outcome: str = Field(default="", max_length=32)
    gain_milli: int = 0  # time saved per step against the incumbent, thousandths
    hypothesis: str = Field(default="", max_length=512)


@dataclass(frozen=True, config=BORDER)
class RunStatus:
    observed_generation: int = 0
    tier: str = Field(default="", max_length=16, description="The tier that is at work.")
    candidates: CandidateCounts = field(default_factory=CandidateCounts)
    top: tuple[CandidateSummary, ...] = Field(default=(), max_length=10, json_schema_extra=list_map("digest"))
    gain_milli: int = Field(default=0, description="Best gain against the incumbent, confirmed, thousandths.")
    artifact: ArtifactChoice = ""
    started_at: Timestamp | None = None
    finished_at: Timestamp | None = None
    conditions: tuple[Condition, ...] = Field(default=(), json_schema_extra=list_map("type"))


@dataclass(frozen=True, config=BORDER)
class RunResult:
    """`result.json`. `artifact` is the digest of the accepted candidate in `candidate.py` and `manifest.json` beside
    it, or "" with any outcome but SearchSucceeded."""

    outcome: RunOutcome
    message: str
    artifact: ArtifactChoice = ""
    candidates: CandidateCounts = field(default_factory=CandidateCounts)
    gain_milli: int = 0  # against the incumbent
    gain_low_milli: int = 0  # 95 % interval
    gain_high_milli: int = 0


def run_name(deployment: str, uid: str, workload_digest: str, incumbent: str, trigger_token: str) -> str:
    """Name of the run that these call for: one question has one name, so asking twice is asking once."""
    identity = {"uid": uid, "workload": workload_digest, "incumbent": incumbent, "token": trigger_token}
    return f"{deployment}-{sha256_hex(canonical_json(identity))[:10]}"
