"""Has traffic moved away from what the artifact in service was compiled for? Distance to the nearest compiled plan.

A tick is a moment on a fixed grid. Each evaluation looks at the last `ticks` of them afresh, from the samples alone, so
nothing is counted in memory and a restart loses nothing. No evidence is never drift: too few requests, windows that
samples do not cover, or scrapes that stopped.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property

from tkcc.api.observation import MetricSample
from tkcc.api.spec import DriftSpec
from tkcc.api.status import Plan, Point
from tkcc.control.windows import Increase, Window, increases, window

CLEAR_BELOW = 0.7  # a drift is over below this distance, not already at 1: no flapping at the edge
_HIT_EDGE = 0.01  # ratios are compared within [1 %, 99 %]: beyond, a logit magnifies what costs nothing
_FRESH_AT_LEAST = timedelta(minutes=1)  # a busy machine may miss some very short ticks
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Traffic:
    """All samples, made ready at most once a reconcile."""

    samples: tuple[MetricSample, ...]
    cache_fill: timedelta

    @cached_property
    def history(self) -> tuple[Increase, ...]:
        return increases(self.samples, self.cache_fill)

    @cached_property
    def first_at(self) -> datetime | None:
        return min((s.at for s in self.samples), default=None)

    @cached_property
    def last_at(self) -> datetime | None:
        return max((s.at for s in self.samples), default=None)

    def window(self, end: datetime, length: timedelta) -> Window:
        return window(self.history, self.first_at, end, length)


@dataclass(frozen=True)
class Reading:
    """One tick. `long` and `short` are None where their window holds no evidence."""

    at: datetime
    long: Point | None
    short: Point | None
    requests: int  # in the long window
    is_covered: bool


def tick_of(now: datetime, spec: DriftSpec) -> datetime:
    """The last moment of the tick grid."""
    return now - (now - _EPOCH) % spec.tick


def is_fresh(traffic: Traffic, spec: DriftSpec, now: datetime) -> bool:
    """Has any pod been read in the last three ticks, or minute?"""
    return traffic.last_at is not None and now - traffic.last_at <= max(3 * spec.tick, _FRESH_AT_LEAST)


def read(traffic: Traffic, spec: DriftSpec, at: datetime) -> Reading:
    long = traffic.window(at, spec.windows.long)
    short = traffic.window(at, spec.windows.short)
    share = spec.windows.short / spec.windows.long
    return Reading(
        at=at,
        long=point_of(long, spec.min_requests) if long.is_covered else None,
        short=point_of(short, math.ceil(spec.min_requests * share)) if long.is_covered else None,
        requests=long.requests,
        is_covered=long.is_covered,
    )


def point_of(seen: Window, min_requests: int) -> Point | None:
    mean = seen.mean_prompt_tokens
    if mean is None or seen.requests < max(1, min_requests):
        return None
    ratio = seen.hit_ratio
    return Point(prompt_tokens=round(mean), hit_ratio_milli=None if ratio is None else round(1000 * ratio))


@dataclass(frozen=True)
class Distance:
    """In units of the thresholds: more than 1 is away."""

    prompt: float
    hit: float

    @property
    def value(self) -> float:
        return max(self.prompt, self.hit)

    @property
    def signal(self) -> str:
        """Which of the two is away, as a condition's reason."""
        if self.prompt > 1.0 and self.hit > 1.0:
            return "MultipleSignalsShifted"
        return "PrefixCacheHitRateShifted" if self.hit > self.prompt else "PromptLengthShifted"


def distance(a: Point | Plan, b: Point | Plan, spec: DriftSpec) -> Distance:
    """Symmetric. A hit ratio that one side does not know does not count."""
    prompt = abs(math.log(max(1, a.prompt_tokens) / max(1, b.prompt_tokens))) / math.log(
        spec.prompt_ratio_percent / 100
    )
    hit = 0.0
    if a.hit_ratio_milli is not None and b.hit_ratio_milli is not None:
        hit = abs(_logit(a.hit_ratio_milli / 1000) - _logit(b.hit_ratio_milli / 1000)) / (spec.hit_logit_milli / 1000)
    return Distance(prompt, hit)


def _logit(ratio: float) -> float:
    ratio = min(1.0 - _HIT_EDGE, max(_HIT_EDGE, ratio))
    return math.log(ratio / (1.0 - ratio))


def nearest(point: Point, plans: Sequence[Plan], spec: DriftSpec) -> tuple[Plan, Distance] | None:
    """The plan at the least distance; the older of two equal ones."""
    found = None
    for plan in plans:
        far = distance(point, plan, spec)
        if found is None or far.value < found[1].value:
            found = plan, far
    return found


def is_away(reading: Reading, plans: Sequence[Plan], spec: DriftSpec) -> bool:
    """Are both windows farther than 1 from every one of these plans? Never without evidence in both."""
    if reading.long is None or reading.short is None or not plans:
        return False
    return all(distance(point, plan, spec).value > 1.0 for point in (reading.long, reading.short) for plan in plans)


def ticks_away(
    traffic: Traffic, spec: DriftSpec, plans: Sequence[Plan], at: datetime, since: datetime | None
) -> tuple[int, Reading]:
    """Consecutive ticks up to `at` that were away from all plans, at most `spec.ticks`, and the reading at `at`. Ticks
    up to `since` do not count."""
    latest = reading = read(traffic, spec, at)
    count = 0
    while count < spec.ticks and is_away(reading, plans, spec) and (since is None or reading.at > since):
        count += 1
        reading = read(traffic, spec, at - count * spec.tick)
    return count, latest
