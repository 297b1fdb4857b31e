"""What serving pods answer on their admin port, as types (docs/architecture.md, "Serving pod").

Candidate code runs in the process that answers, so every field is bounded: what is out of bounds is no answer, and
what is within them fits into a status and into arithmetic.
"""

from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, ConfigDict, Field
from pydantic.dataclasses import dataclass

from tkcc.api.codec import BORDER
from tkcc.api.fields import BASELINE

_LENIENT = ConfigDict({**BORDER, "extra": "ignore"})  # a newer engine may say more
MAX_REQUESTS = 20_000  # of one answer; the engine's ring is bounded too
MAX_COUNT = 10**13  # a million tokens a second for four months
_FIRST, _LAST = datetime(2000, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)

_Moment = Annotated[AwareDatetime, Field(ge=_FIRST, le=_LAST)]
_MomentMs = Annotated[int, Field(ge=int(_FIRST.timestamp() * 1000), le=int(_LAST.timestamp() * 1000))]
_Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
_Tokens = Annotated[int, Field(ge=0, le=10**9)]
_Seconds = Annotated[float, Field(ge=0, le=10**6), AfterValidator(lambda time_s: round(time_s, 9))]  # never NaN
_Digest = Annotated[str, Field(max_length=64)]


@dataclass(frozen=True, config=_LENIENT)
class Info:
    """GET /tkcc/info."""

    artifact_digest: _Digest
    baseline_digest: _Digest
    model_digest: _Digest
    engine_version: Annotated[str, Field(max_length=128)]
    started_at: _Moment
    block_tokens: _Tokens = 0
    recording: bool = False

    @property
    def artifact(self) -> str:
        return BASELINE if self.artifact_digest == self.baseline_digest else self.artifact_digest


@dataclass(frozen=True, config=_LENIENT)
class FinishedRequest:
    seq: _Count
    started_at_ms: _MomentMs
    prompt_tokens: _Tokens
    cached_tokens: _Tokens
    output_tokens: _Tokens
    outcome: Annotated[str, Field(max_length=32)]
    ttft_s: _Seconds | None = None
    tpot_s: _Seconds | None = None


@dataclass(frozen=True, config=_LENIENT)
class FinishedRequests:
    """GET /tkcc/requests. `dropped`: how many left the ring before they were asked for."""

    next: _Count
    dropped: _Count = 0
    requests: tuple[FinishedRequest, ...] = Field(default=(), max_length=MAX_REQUESTS)
