"""What serving pods answer on their admin port, as types (docs/architecture.md, "Serving pod")."""

from datetime import datetime

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from tkcc.api.codec import BORDER
from tkcc.api.fields import BASELINE

_LENIENT = ConfigDict({**BORDER, "extra": "ignore"})  # a newer engine may say more
MAX_REQUESTS = 20_000  # of one answer; the engine's ring is bounded too


@dataclass(frozen=True, config=_LENIENT)
class Info:
    """GET /tkcc/info."""

    artifact_digest: str
    baseline_digest: str
    model_digest: str
    engine_version: str
    started_at: datetime
    block_tokens: int = 0
    recording: bool = False

    @property
    def artifact(self) -> str:
        return BASELINE if self.artifact_digest == self.baseline_digest else self.artifact_digest


@dataclass(frozen=True, config=_LENIENT)
class FinishedRequest:
    seq: int
    started_at_ms: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    outcome: str
    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, config=_LENIENT)
class FinishedRequests:
    """GET /tkcc/requests. `dropped`: how many left the ring before they were asked for."""

    next: int
    dropped: int = 0
    requests: tuple[FinishedRequest, ...] = Field(default=(), max_length=MAX_REQUESTS)
