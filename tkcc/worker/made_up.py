"""Requests made up from a workload's quantiles, where none were recorded."""

import random
from itertools import pairwise

from tkcc.api.workload import Quantiles, RecordedRequest, Recording, Workload

BLOCK_TOKENS = 16
NUM_REQUESTS = 200


def make_up(workload: Workload, seed: int = 0) -> Recording:
    """A recording with the workload's lengths, rate and hit ratio. Its source says that nobody sent it."""
    rng = random.Random(seed)
    gap_ms = 60_000 / max(1, workload.requests_per_minute)
    at_ms, requests = 0.0, []
    for _ in range(NUM_REQUESTS):
        prompt = _draw(workload.prompt_tokens, rng)
        cached = prompt * workload.hit_ratio_milli // 1000 // BLOCK_TOKENS * BLOCK_TOKENS
        output = _draw(workload.output_tokens, rng)
        requests.append(RecordedRequest(round(at_ms), prompt, output, min(cached, prompt - 1)))
        at_ms += rng.expovariate(1 / gap_ms)
    return Recording(BLOCK_TOKENS, "synthetic", tuple(requests))


def _draw(quantiles: Quantiles, rng: random.Random) -> int:
    """Linear between the known quantiles; the lowest is taken as half the median."""
    points = [(0.0, quantiles.p50 / 2), (0.5, quantiles.p50), (0.9, quantiles.p90), (0.99, quantiles.p99)]
    u = min(rng.random(), 0.99)
    for (low, a), (high, b) in pairwise(points):
        if u <= high:
            return max(1, round(a + (b - a) * (u - low) / (high - low)))
    return max(1, quantiles.p99)
