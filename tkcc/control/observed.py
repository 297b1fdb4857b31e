"""Everything the core may look at, as one value per reconcile. What could not be read is absent, never guessed."""

from dataclasses import dataclass
from datetime import datetime

from tkcc.api.candidate import Artifact
from tkcc.api.condition import Condition
from tkcc.api.observation import MetricSample, RequestSample
from tkcc.api.run import RunResult, RunSpec


@dataclass(frozen=True)
class Meta:
    """Of the object itself."""

    name: str
    namespace: str
    uid: str
    generation: int


@dataclass(frozen=True)
class PodSeen:
    """A serving pod, and what its admin port said; the digests are "" where it did not answer."""

    name: str
    is_ready: bool
    in_service: bool  # carries tkcc.dev/serving: "true"
    template_artifact: str  # annotation: digest or BASELINE
    artifact_digest: str = ""
    baseline_digest: str = ""
    model_digest: str = ""
    engine_version: str = ""
    requests_started: int | None = None  # counter of its process, as just scraped
    restarts: int = 0
    waiting_reason: str = ""  # of a container that waits: ImagePullBackOff, CrashLoopBackOff, ...
    load_error: str = ""  # why it cannot load its model, in its own words
    last_words: str = ""  # of a container that ended
    unschedulable: str = ""  # message of PodScheduled=False
    is_terminating: bool = False
    has_ended: bool = False  # phase Failed or Succeeded: evicted or rejected, and replaced by its Deployment

    @property
    def trouble(self) -> str:
        """What keeps it from being ready, if it says so."""
        return "" if self.is_ready else self.load_error or self.waiting_reason or self.unschedulable


@dataclass(frozen=True)
class ServingSeen:
    """The Deployment of one role. `is_current`: its controller has seen the last write to it."""

    artifact: str  # template annotation: digest or BASELINE
    replicas: int  # spec
    ready_replicas: int
    updated_replicas: int  # pods of the present template
    is_current: bool
    pods: tuple[PodSeen, ...] = ()


@dataclass(frozen=True)
class RunSeen:
    """An owned RecompilationRun. `result` is there once the worker wrote it whole and it could be parsed;
    `source_digest` is the digest computed over its candidate.py and params."""

    name: str
    created_at: datetime
    spec: RunSpec
    conditions: tuple[Condition, ...] = ()
    result: RunResult | None = None
    source_digest: str = ""
    manifest: Artifact | None = None
    finished_at: datetime | None = None
    num_evaluated: int = 0


@dataclass(frozen=True)
class ArtifactSeen:
    """An artifact ConfigMap of this namespace that parses. `is_owned`: this InferenceDeployment made it."""

    digest: str
    manifest: Artifact
    is_owned: bool
    created_at: datetime


@dataclass(frozen=True)
class ProbeSeen:
    """One fixed prompt, greedy, on one canary pod, against the tokens of a stable pod."""

    pod: str
    at: datetime
    prompt_id: str
    tokens_match: bool
    divergence_idx: int | None = None  # first token that differs
    logprob_gap_nats: float | None = (
        None  # there, of the stable pod: its own token's logprob minus the canary's token's
    )
    error: str = ""  # the pod did not answer: no evidence


@dataclass(frozen=True)
class MissingReference:
    """Something that spec names and that does not exist."""

    field: str  # like spec.model.uri
    kind: str
    name: str


@dataclass(frozen=True)
class Observed:
    now: datetime
    meta: Meta
    stable: ServingSeen | None = None
    canary: ServingSeen | None = None
    runs: tuple[RunSeen, ...] = ()
    artifacts: tuple[ArtifactSeen, ...] = ()
    samples: tuple[MetricSample, ...] = ()  # oldest first; at least windows.long + ticks x tick back, one a pod a tick
    requests: tuple[RequestSample, ...] = ()  # finished ones; at least since the step began
    probes: tuple[ProbeSeen, ...] = ()  # the latest of each pod and prompt
    probe_ids: tuple[str, ...] = ()  # the prompts that a pod is asked
    missing: tuple[MissingReference, ...] = ()
    scrape_errors: tuple[str, ...] = ()  # of the last round, one a pod that could not be read
    watched_since: datetime | None = None  # since when turns have followed each other without a break


@dataclass(frozen=True)
class TierSeen:
    """One tier engine's Deployment."""

    name: str  # "fast" or "slow"
    is_ready: bool
    restarts: int = 0
    problem: str = ""  # why its pod cannot run: waiting reason or unschedulable message
    last_words: str = ""  # of its container that ended


@dataclass(frozen=True)
class RunObserved:
    """For `reconcile_run`. `job_*` as the Job's status says; `result` as in RunSeen."""

    now: datetime
    name: str
    generation: int
    created_at: datetime
    tiers: tuple[TierSeen, ...] = ()
    job_exists: bool = False
    worker_problem: str = ""  # why the Job's pod cannot run, as of a tier's
    job_failed: str = ""  # message of its Failed condition
    job_succeeded: bool = False
    leftovers: bool = False  # Job, tiers or token still exist
    result: RunResult | None = None
    result_error: str = ""  # result.json is there and does not parse
    source_digest: str = ""
