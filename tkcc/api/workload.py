"""The workload a forward pass is compiled for, and the recorded requests it was made from.

All numbers are integers (tokens, thousandths, milliseconds): Kubernetes API objects avoid floats, and a digest over
integers does not depend on how a float prints.
"""

from pydantic.dataclasses import dataclass

from tkcc.api.codec import BORDER, sha256_hex, to_json


@dataclass(frozen=True, config=BORDER)
class Quantiles:
    """A distribution of a non-negative integer quantity, in that quantity's unit."""

    mean: int
    p50: int
    p90: int
    p99: int


@dataclass(frozen=True, config=BORDER)
class Workload:
    """What traffic looked like in one window, summed over all serving pods."""

    prompt_tokens: Quantiles
    output_tokens: Quantiles
    concurrency: Quantiles  # requests running at once, per pod
    hit_ratio_milli: int  # prefix-cache hits, token-weighted, in thousandths (0-1000)
    requests_per_minute: int
    window_s: int
    num_requests: int

    @property
    def digest(self) -> str:
        """Identity of the workload, in full SHA-256 hex."""
        return sha256_hex(to_json(self))


@dataclass(frozen=True, config=BORDER)
class RecordedRequest:
    """One served request, without its text. A prefix block is `block_tokens` tokens long; equal chained hashes mean
    equal prefixes up to and including that block."""

    arrival_ms: int  # since the recording's first request
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    block_hashes: tuple[int, ...] = ()  # one per full prompt block, chained, 48 bits


@dataclass(frozen=True, config=BORDER)
class Recording:
    """A bounded sample of traffic, oldest first: what the slow tier replays."""

    block_tokens: int
    source: str  # "recorded" (served by our pods) or "synthetic" (made up from a Workload or read from a trace file)
    requests: tuple[RecordedRequest, ...]
    started_at_ms: int = 0  # unix time of the first request's arrival, so that pods' recordings merge; 0 = unknown
