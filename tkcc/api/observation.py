"""Measurements that the operator takes of serving pods and keeps, so that a restart does not lose its windows.

Counters are absolute, one series per process life: a pod that restarts, or whose container does, starts a new series.
"""

from datetime import datetime

from pydantic.dataclasses import dataclass

from tkcc.api.codec import BORDER


@dataclass(frozen=True, config=BORDER)
class MetricSample:
    """Counters of one serving process at one moment, since its start."""

    series: str  # pod name and process start: unique to this process life
    started_at: datetime  # of the process
    at: datetime
    prompt_requests: int  # request_prompt_tokens_count
    prompt_tokens: int  # request_prompt_tokens_sum
    output_requests: int
    output_tokens: int
    hit_tokens: int
    query_tokens: int
    running: int = 0  # gauge


@dataclass(frozen=True, config=BORDER)
class RequestSample:
    """One finished request as its pod reported it; no text."""

    pod: str
    artifact: str  # digest, or `baseline`
    started_at: datetime
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    outcome: str  # "ok", "cancelled", "error" or "rejected"
    ttft_s: float | None = None  # absent where no token came
    tpot_s: float | None = None  # absent below two tokens
