"""The workload of a recording: what a forward pass is compiled for where no pods were there to be measured."""

from collections.abc import Sequence
from math import ceil

from tkcc.api.workload import Quantiles, RecordedRequest, Recording, Workload


def workload_of(recording: Recording, prefill_tokens_per_s: float, tpot_s: float) -> Workload:
    """Lengths, hit ratio and rate as recorded; concurrency as it would be if a request took the time of its uncached
    prompt tokens at `prefill_tokens_per_s` and `tpot_s` for each output token. Raises ValueError for no requests."""
    requests = recording.requests
    if not requests:
        raise ValueError("the recording has no requests")
    window_s = max(1, ceil((requests[-1].arrival_ms - requests[0].arrival_ms) / 1e3))

    def took_s(request: RecordedRequest) -> float:
        uncached_tokens = request.prompt_tokens - request.cached_tokens
        return uncached_tokens / prefill_tokens_per_s + request.output_tokens * tpot_s

    prompt_tokens = sum(request.prompt_tokens for request in requests)
    return Workload(
        prompt_tokens=_quantiles([request.prompt_tokens for request in requests]),
        output_tokens=_quantiles([request.output_tokens for request in requests]),
        concurrency=_concurrency([(r.arrival_ms / 1e3, r.arrival_ms / 1e3 + took_s(r)) for r in requests]),
        hit_ratio_milli=round(1000 * sum(request.cached_tokens for request in requests) / prompt_tokens),
        requests_per_minute=round(60 * len(requests) / window_s),
        window_s=window_s,
        num_requests=len(requests),
    )


def _concurrency(spans_s: Sequence[tuple[float, float]]) -> Quantiles:
    """Requests running at once, weighted by time, over the time in which any runs."""
    edges = sorted([(start, 1) for start, _ in spans_s] + [(end, -1) for _, end in spans_s])
    held_s: dict[int, float] = {}
    running, since_s = 0, edges[0][0]
    for at_s, change in edges:
        if running:
            held_s[running] = held_s.get(running, 0.0) + at_s - since_s
        running, since_s = running + change, at_s
    total_s = sum(held_s.values())
    if not total_s > 0:
        return Quantiles(1, 1, 1, 1)

    def at(share: float) -> int:
        passed_s = 0.0
        for count in sorted(held_s):
            passed_s += held_s[count]
            if passed_s >= share * total_s:
                return count
        return max(held_s)

    mean = sum(count * seconds for count, seconds in held_s.items()) / total_s
    return Quantiles(round(mean), at(0.5), at(0.9), at(0.99))


def _quantiles(values: Sequence[int]) -> Quantiles:
    ordered = sorted(values)

    def at(share: float) -> int:
        return ordered[max(0, ceil(share * len(ordered)) - 1)]

    return Quantiles(round(sum(ordered) / len(ordered)), at(0.5), at(0.9), at(0.99))
