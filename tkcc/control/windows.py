"""What traffic was in a window of time, from absolute counters of pods that come and go.

Increases are taken per series first and summed then, so a restart never counts backwards; the first sample of a series
starts it and counts for nothing. Hits and queries of a pod whose cache was still filling are left out.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tkcc.api.observation import MetricSample, RequestSample
from tkcc.api.workload import Quantiles, Workload

_MIN_LENGTHS = 20  # recorded requests below which a distribution is only its mean


@dataclass(frozen=True)
class Increase:
    """What one series counted between two samples; booked at the later one."""

    at: datetime
    requests: int
    prompt_tokens: int
    output_requests: int
    output_tokens: int
    hit_tokens: int
    query_tokens: int
    is_warm: bool  # the pod's cache had had time to fill when the interval began
    running: int


@dataclass(frozen=True)
class Window:
    """Totals over (start, end]. `is_covered`: samples reach back to the start, so nothing in it went unseen."""

    start: datetime
    end: datetime
    requests: int
    prompt_tokens: int
    output_requests: int
    output_tokens: int
    hit_tokens: int
    query_tokens: int
    warm_hit_tokens: int
    warm_query_tokens: int
    running: tuple[int, ...]
    is_covered: bool

    @property
    def mean_prompt_tokens(self) -> float | None:
        return self.prompt_tokens / self.requests if self.requests else None

    @property
    def hit_ratio(self) -> float | None:
        """Token-weighted, of warm pods only; None without evidence."""
        return min(1.0, self.warm_hit_tokens / self.warm_query_tokens) if self.warm_query_tokens else None


def increases(samples: Iterable[MetricSample], cache_fill: timedelta) -> tuple[Increase, ...]:
    """Increases of every series, oldest first."""
    last: dict[str, MetricSample] = {}
    out = []
    for sample in sorted(samples, key=lambda s: s.at):
        before = last.get(sample.series)
        last[sample.series] = sample
        if before is None or sample.at == before.at:
            continue
        out.append(
            Increase(
                at=sample.at,
                requests=_grown(before.prompt_requests, sample.prompt_requests),
                prompt_tokens=_grown(before.prompt_tokens, sample.prompt_tokens),
                output_requests=_grown(before.output_requests, sample.output_requests),
                output_tokens=_grown(before.output_tokens, sample.output_tokens),
                hit_tokens=_grown(before.hit_tokens, sample.hit_tokens),
                query_tokens=_grown(before.query_tokens, sample.query_tokens),
                is_warm=before.at - sample.started_at >= cache_fill,
                running=sample.running,
            )
        )
    return tuple(out)


def _grown(before: int, now: int) -> int:
    """Increase of a counter; one that fell has restarted and counts from zero. Never negative, whatever a pod says."""
    return now - before if now >= before else max(0, now)


def window(history: Sequence[Increase], first_at: datetime | None, end: datetime, length: timedelta) -> Window:
    """Totals of the increases booked in (end - length, end]. `first_at` is the time of the oldest sample of all."""
    start = end - length
    inside = [i for i in history if start < i.at <= end]
    warm = [i for i in inside if i.is_warm]
    return Window(
        start=start,
        end=end,
        requests=sum(i.requests for i in inside),
        prompt_tokens=sum(i.prompt_tokens for i in inside),
        output_requests=sum(i.output_requests for i in inside),
        output_tokens=sum(i.output_tokens for i in inside),
        hit_tokens=sum(i.hit_tokens for i in inside),
        query_tokens=sum(i.query_tokens for i in inside),
        warm_hit_tokens=sum(i.hit_tokens for i in warm),
        warm_query_tokens=sum(i.query_tokens for i in warm),
        running=tuple(i.running for i in inside),
        is_covered=first_at is not None and first_at <= start,
    )


def workload_of(seen: Window, requests: Iterable[RequestSample]) -> Workload | None:
    """The workload of a window; None where nothing was asked. Means come from the counters; the shapes of the length
    distributions from the requests that pods still remember, or are the mean where those are few."""
    if not seen.requests:
        return None
    inside = [r for r in requests if seen.start < r.started_at <= seen.end and r.outcome == "ok"]
    prompt = round(seen.prompt_tokens / seen.requests)
    output = round(seen.output_tokens / seen.output_requests) if seen.output_requests else 0
    length_s = round((seen.end - seen.start).total_seconds())
    hit_ratio = seen.hit_ratio
    if hit_ratio is None:  # every cache was filling: what was counted is better than nothing
        hit_ratio = min(1.0, seen.hit_tokens / seen.query_tokens) if seen.query_tokens else 0.0
    return Workload(
        prompt_tokens=_quantiles([r.prompt_tokens for r in inside], prompt),
        output_tokens=_quantiles([r.output_tokens for r in inside], output),
        concurrency=_quantiles(list(seen.running), round(math.fsum(seen.running) / max(1, len(seen.running))), least=1),
        hit_ratio_milli=round(1000 * hit_ratio),
        requests_per_minute=round(60 * seen.requests / length_s) if length_s else 0,
        window_s=length_s,
        num_requests=seen.requests,
    )


def _quantiles(values: list[int], mean: int, least: int = _MIN_LENGTHS) -> Quantiles:
    if len(values) < least:
        return Quantiles(mean=mean, p50=mean, p90=mean, p99=mean)
    ordered = sorted(values)

    def at(q: float) -> int:
        return ordered[min(len(ordered) - 1, math.ceil(q * len(ordered)) - 1)]

    return Quantiles(mean=mean, p50=at(0.5), p90=at(0.9), p99=at(0.99))
