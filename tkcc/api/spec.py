"""`InferenceDeployment.spec`: what a user asks for. Every field here works; what does not work yet is not here.

Defaults live here alone: the CRD schema is generated from these classes, so the API server fills in the same ones.
"""

from dataclasses import field
from datetime import timedelta
from enum import StrEnum
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from tkcc.api.codec import BORDER
from tkcc.api.fields import ATOMIC_LIST, ArtifactChoice, Duration, Quantity, cel

_PVC_URI = "^pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*/?$"
_CPU_LIST = "^(|[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*)$"

CpuList = Annotated[str, Field(pattern=_CPU_LIST, max_length=256)]
Percent = Annotated[int, Field(ge=1, le=99)]


class EngineType(StrEnum):
    NATIVE = "native"
    VLLM = "vllm"
    SGLANG = "sglang"
    TRTLLM = "trtllm"


class Dtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Mode(StrEnum):
    AUTOMATIC = "Automatic"
    RECOMMEND_ONLY = "RecommendOnly"
    DISABLED = "Disabled"


class Approval(StrEnum):
    NONE = "None"
    BEFORE_CANARY = "BeforeCanary"
    BEFORE_PROMOTE = "BeforePromote"


class ProposerType(StrEnum):
    OFFLINE = "Offline"
    SCRIPTED = "Scripted"


@dataclass(frozen=True, config=BORDER)
class ModelSpec:
    uri: Annotated[
        str,
        Field(
            max_length=512,
            pattern=_PVC_URI,
            description="Weights: pvc://CLAIM/PATH, a Hugging Face model's folder on a PersistentVolumeClaim of this "
            "namespace, mounted read-only. Cannot change: another model is another InferenceDeployment.",
            json_schema_extra=cel(("self == oldSelf", "model.uri cannot change; create another InferenceDeployment")),
        ),
    ]
    name: Annotated[str, Field(min_length=1, max_length=128, description="The name that clients send as `model`.")]


@dataclass(frozen=True, config=BORDER)
class EngineSpec:
    type: EngineType = Field(
        default=EngineType.NATIVE,
        description="The engine that serves. Only native works today; any other gives Accepted=False.",
        json_schema_extra=cel(("self == oldSelf", "engine.type cannot change; create another InferenceDeployment")),
    )
    image: str = Field(default="", max_length=512, description="Engine image. Empty: the one the operator came with.")
    dtype: Dtype = Field(default=Dtype.FLOAT32, description="Type of weights and activations.")
    threads: int = Field(default=0, ge=0, le=1024, description="Compute threads of one pod. 0: one a core it may use.")
    cpus: CpuList = Field(default="", description="Cores that serving pods are pinned to, like 0 or 1-3. Empty: any.")
    args: tuple[Annotated[str, Field(max_length=256)], ...] = Field(
        default=(), max_length=32, description="More arguments of `tkcc serve`.", json_schema_extra=ATOMIC_LIST
    )


@dataclass(frozen=True, config=BORDER)
class Toleration:
    key: str = ""
    operator: str = Field(default="Equal", pattern="^(Exists|Equal)$")
    value: str = ""
    effect: str = Field(default="", pattern="^(|NoSchedule|PreferNoSchedule|NoExecute)$")


@dataclass(frozen=True, config=BORDER)
class Resources:
    requests: dict[str, Quantity] = Field(default_factory=dict, max_length=16)
    limits: dict[str, Quantity] = Field(
        default_factory=dict, max_length=16, description="GPUs go here, as nvidia.com/gpu."
    )


@dataclass(frozen=True, config=BORDER)
class PodSettings:
    """Scheduling of one kind of pod. GPU use of these is rendered and checked, not yet proven on a GPU node."""

    resources: Resources = Field(
        default_factory=Resources,
        json_schema_extra=cel(
            (
                "!has(self.requests) || !has(self.limits) || self.requests.all(name, !(name in self.limits) || "
                "quantity(string(self.requests[name])).compareTo(quantity(string(self.limits[name]))) <= 0)",
                "resources.requests must not be above resources.limits",
            )
        ),
    )
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = Field(default=(), max_length=32, json_schema_extra=ATOMIC_LIST)
    runtime_class_name: str = Field(default="", max_length=253)
    priority_class_name: str = Field(default="", max_length=253)

    @property
    def has_gpu(self) -> bool:
        return "nvidia.com/gpu" in self.resources.limits


@dataclass(frozen=True, config=BORDER)
class RecordingSpec:
    enabled: bool = Field(
        default=False,
        description="Keep a ring of served requests in each pod: arrival, lengths, hashes of prefix blocks; no text. "
        "A run then replays this traffic; without it, it replays requests made up from the workload's figures.",
    )
    max_requests: int = Field(default=2000, ge=16, le=20000, description="Size of the ring, requests a pod.")


@dataclass(frozen=True, config=BORDER)
class TrafficSpec:
    recording: RecordingSpec = field(default_factory=RecordingSpec)


@dataclass(frozen=True, config=BORDER)
class WindowSpec:
    long: Duration = Field(default=timedelta(minutes=60), validate_default=True)
    short: Duration = Field(default=timedelta(minutes=15), validate_default=True)


@dataclass(frozen=True, config=BORDER)
class DriftSpec:
    """Distance to the nearest compiled plan is the larger of |ln of the ratio of mean prompt tokens| /
    ln(promptRatioPercent / 100) and |difference of the hit ratios' logits| / (hitLogitMilli / 1000). More than 1 in
    both windows for `ticks` ticks is drift."""

    prompt_ratio_percent: int = Field(
        default=125, ge=101, le=1000, description="Ratio of mean prompt tokens, either way, that counts as distance 1."
    )
    hit_logit_milli: int = Field(
        default=1000, ge=10, le=10000, description="Change of the hit ratio's logit, in thousandths, of distance 1."
    )
    windows: WindowSpec = Field(
        default_factory=WindowSpec,
        json_schema_extra=cel(
            ("duration(self.short) <= duration(self.long)", "drift.windows.short must not be longer than long"),
            ("duration(self.short) >= duration('1s')", "drift.windows.short must be 1s or more"),
        ),
    )
    tick: Duration = Field(
        default=timedelta(minutes=5),
        validate_default=True,
        description="How often distance is measured.",
        json_schema_extra=cel(("duration(self) >= duration('1s')", "drift.tick must be 1s or more")),
    )
    ticks: int = Field(default=12, ge=1, le=288, description="Consecutive ticks above distance 1 that make a drift.")
    min_requests: int = Field(
        default=60, ge=1, description="Requests in the long window below which there is no evidence."
    )
    cache_fill: Duration = Field(
        default=timedelta(minutes=15),
        validate_default=True,
        description="How long after its start a pod's hit ratio is not looked at.",
    )
    cooldown: Duration = Field(
        default=timedelta(hours=2), validate_default=True, description="From the end of one run to the next."
    )
    max_runs_per_day: int = Field(default=4, ge=0, le=100, description="Runs in any 24 hours, forced ones included.")


@dataclass(frozen=True, config=BORDER)
class BudgetSpec:
    max_duration: Duration = Field(
        default=timedelta(hours=1),
        validate_default=True,
        description="A run begins no judgement after this; it is ended 8 minutes later.",
        json_schema_extra=cel(("duration(self) >= duration('1s')", "budget.maxDuration must be 1s or more")),
    )
    max_candidates: int = Field(
        default=1000,
        ge=1,
        le=100_000,
        description="What a run proposes at most; 12 in a row that are no better end the search, too.",
    )


@dataclass(frozen=True, config=BORDER)
class FastTierSpec:
    layers: int = Field(default=4, ge=1, le=1024, description="Layers of the model that the fast tier runs.")
    pod: PodSettings = field(default_factory=PodSettings)


@dataclass(frozen=True, config=BORDER)
class SlowTierSpec:
    pod: PodSettings = field(default_factory=PodSettings)


@dataclass(frozen=True, config=BORDER)
class TiersSpec:
    fast: FastTierSpec = field(default_factory=FastTierSpec)
    slow: SlowTierSpec = field(default_factory=SlowTierSpec)
    threads: int = Field(default=0, ge=0, le=1024, description="Compute threads of one tier. 0: as the engine's.")
    cpus: CpuList = Field(default="", description="Cores that tiers are pinned to, apart from serving. Empty: any.")


@dataclass(frozen=True, config=BORDER)
class ProposerSpec:
    type: ProposerType = ProposerType.OFFLINE
    script_config_map: str = Field(default="", max_length=253, description="ConfigMap of candidates, for Scripted.")


@dataclass(frozen=True, config=BORDER)
class AcceptanceSpec:
    min_gain_milli: int = Field(
        default=5, ge=0, le=999, description="Least share of the time per token saved worth a rollout, thousandths."
    )


@dataclass(frozen=True, config=BORDER)
class RecompilationSpec:
    mode: Mode = Field(
        default=Mode.AUTOMATIC,
        description="Automatic: run and roll out. RecommendOnly: run and say what was found. Disabled: no runs.",
    )
    trigger_token: str = Field(default="", max_length=64, description="Change it to force one run.")
    budget: BudgetSpec = field(default_factory=BudgetSpec)
    tiers: TiersSpec = field(default_factory=TiersSpec)
    proposer: ProposerSpec = Field(
        default_factory=ProposerSpec,
        json_schema_extra=cel(
            (
                "(self.type == 'Scripted') == (has(self.scriptConfigMap) && self.scriptConfigMap != '')",
                "proposer.scriptConfigMap is set with type Scripted, and only then",
            )
        ),
    )
    acceptance: AcceptanceSpec = field(default_factory=AcceptanceSpec)
    run_history_limit: int = Field(default=5, ge=1, le=50, description="Finished runs that are kept.")


@dataclass(frozen=True, config=BORDER)
class AnalysisSpec:
    interval: Duration = Field(
        default=timedelta(seconds=30),
        validate_default=True,
        description="From one measurement to the next.",
        json_schema_extra=cel(("duration(self) >= duration('1s')", "analysis.interval must be 1s or more")),
    )
    min_requests: int = Field(
        default=50, ge=1, description="Finished requests of the canary that a step needs before it can pass."
    )
    failure_limit: int = Field(default=0, ge=0, le=100, description="Failed measurements of a step that are forgiven.")
    max_error_increase_milli: int = Field(
        default=10, ge=0, le=1000, description="How far the canary's error ratio may exceed the cohort's, thousandths."
    )
    max_ttft_ratio_percent: int = Field(
        default=125, ge=100, le=1000, description="Limit of the canary's first-token time against the cohort's."
    )
    max_tpot_ratio_percent: int = Field(
        default=110, ge=100, le=1000, description="Limit of the canary's time per output token against the cohort's."
    )


@dataclass(frozen=True, config=BORDER)
class RolloutSpec:
    steps: tuple[Percent, ...] = Field(
        default=(),
        max_length=20,
        description="Canary weights in percent of `replicas`, ascending. Empty: one pod, then half of them.",
        json_schema_extra={
            **ATOMIC_LIST,
            **cel(
                (
                    "self.isSorted() && self.all(i, self.exists_one(j, j == i))",
                    "rollout.steps must ascend, each weight once, like [25, 50]",
                )
            ),
        },
    )
    analysis: AnalysisSpec = field(default_factory=AnalysisSpec)
    warmup_timeout: Duration = Field(
        default=timedelta(minutes=10),
        validate_default=True,
        description="By when the canary's first pods must be ready and have answered the probes right.",
    )
    step_deadline: Duration = Field(
        default=timedelta(minutes=30), validate_default=True, description="By when a step must have passed."
    )
    progress_deadline: Duration = Field(
        default=timedelta(hours=2), validate_default=True, description="By when a rollout must have ended."
    )
    approval: Approval = Field(default=Approval.NONE, description="Where a rollout waits for approvedArtifact.")
    approved_artifact: ArtifactChoice = Field(default="", description="Digest of the artifact that may go on.")
    artifact: ArtifactChoice = Field(
        default="",
        description="Set or change it to adopt this artifact through the canary, in any mode. `baseline` goes back to "
        "the built-in forward pass.",
    )
    revision_history_limit: int = Field(default=10, ge=1, le=16, description="Artifacts and plans that are kept.")


@dataclass(frozen=True, config=BORDER)
class Spec:
    model: ModelSpec
    engine: EngineSpec = field(default_factory=EngineSpec)
    replicas: int = Field(default=2, ge=1, le=1000, description="Serving pods, canary included.")
    pod: PodSettings = field(default_factory=PodSettings)
    traffic: TrafficSpec = field(default_factory=TrafficSpec)
    drift: DriftSpec = Field(
        default_factory=DriftSpec,
        json_schema_extra=cel(
            ("duration(self.tick) <= duration(self.windows.short)", "drift.tick must not be longer than windows.short"),
        ),
    )
    recompilation: RecompilationSpec = field(default_factory=RecompilationSpec)
    rollout: RolloutSpec = Field(
        default_factory=RolloutSpec,
        json_schema_extra=cel(
            (
                "duration(self.stepDeadline) <= duration(self.progressDeadline)",
                "rollout.stepDeadline must not be longer than progressDeadline",
            ),
            (
                "duration(self.analysis.interval) < duration(self.stepDeadline)",
                "rollout.analysis.interval must be shorter than stepDeadline",
            ),
            (
                "self.approval != 'None' || !has(self.approvedArtifact) || self.approvedArtifact == ''",
                "rollout.approvedArtifact needs approval BeforeCanary or BeforePromote",
            ),
        ),
    )
    suspend: bool = Field(
        default=False,
        description="Start no run and no rollout. A canary under way goes back to stable and starts over afterwards.",
    )


def model_claim(uri: str) -> tuple[str, str]:
    """(claim name, path inside it, "" for the root) of a `pvc://CLAIM/PATH` URI."""
    claim, _, path = uri.removeprefix("pvc://").partition("/")
    return claim, path.strip("/")
