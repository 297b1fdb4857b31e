"""From an engine's /metrics page to what happened between two pages of it.

A counter is only worth its increase: taken per series (a series that fell was reset and counts from zero), then added
up over series and pods. What a window means (drift, verdicts) is decided elsewhere. 0/0 is None: no evidence, which is
neither zero nor a change.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from pydantic.dataclasses import dataclass

from tkcc.api.codec import BORDER
from tkcc.traffic.metrics_map import ENGINES, EngineMetrics, Gauge, Signal, Source

_STARTED_AT = "process_start_time_seconds"


class ExpositionError(ValueError):
    """The page cannot be used; the message says what was looked for."""


@dataclass(frozen=True, config=BORDER)
class CounterSample:
    """One page of one pod, reduced to our signals. Plain data: it can be checkpointed with tkcc.api.codec."""

    engine: str
    counters: dict[Signal, dict[str, float]]  # signal -> series (sample name and labels) -> cumulative value
    gauges: dict[Gauge, float]  # summed over series
    started_at_s: float | None = None  # of the process, where the page tells: proves a reset that the counters hide

    @property
    def missing(self) -> tuple[Signal, ...]:
        """Signals that this page does not declare."""
        return tuple(signal for signal in Signal if signal not in self.counters)


@dataclass(frozen=True, config=BORDER)
class Increase:
    """What was added between two samples. None: the engine does not export that signal."""

    prompt_tokens: float | None = None
    prompt_requests: float | None = None
    hit_tokens: float | None = None
    query_tokens: float | None = None
    generation_tokens: float | None = None
    requests_started: float | None = None
    requests_finished: float | None = None
    requests_failed: float | None = None
    ttft_s: float | None = None
    ttft_requests: float | None = None
    tpot_s: float | None = None
    tpot_requests: float | None = None
    was_reset: bool = False  # some process restarted: its prefix cache refills, and counts of its last moments are lost

    @property
    def mean_prompt_tokens(self) -> float | None:
        return _quotient(self.prompt_tokens, self.prompt_requests)

    @property
    def hit_ratio(self) -> float | None:
        """Token-weighted, 0-1."""
        return _quotient(self.hit_tokens, self.query_tokens)

    @property
    def mean_ttft_s(self) -> float | None:
        return _quotient(self.ttft_s, self.ttft_requests)

    @property
    def mean_tpot_s(self) -> float | None:
        return _quotient(self.tpot_s, self.tpot_requests)


def parse(text: str, engine: str) -> CounterSample:
    """Read a page in the Prometheus text format. Raises ExpositionError for an unknown engine, for a page that is no
    exposition, and for one without any metric of this engine. A declared family without series yet counts as zero."""
    metrics = ENGINES.get(engine)
    if metrics is None:
        raise ExpositionError(f"engine {engine!r} has no metrics map: use one of {', '.join(ENGINES)}")
    page = _Page(text)
    if not page.has_family(metrics.prefixes):
        wanted = " or ".join(f"{prefix}*" for prefix in metrics.prefixes)
        raise ExpositionError(f"the page has no {wanted} metric: is it a {engine} server's, and are its metrics on?")
    picked = {signal: page.pick(sources) for signal, sources in metrics.counters.items()}
    return CounterSample(
        engine=engine,
        counters={signal: series for signal, series in picked.items() if series is not None},
        gauges=_gauges(page, metrics),
        started_at_s=page.values.get(_STARTED_AT, {}).get(_STARTED_AT),
    )


def increase(old: CounterSample | None, new: CounterSample) -> Increase:
    """What `new` counted since `old`, of the same pod. Without an old sample (a new pod) nothing is known to have
    happened in the window, so every exported signal is zero."""
    if old is None:
        return _increase(dict.fromkeys(new.counters, 0.0), was_reset=False)
    assert old.engine == new.engine, (old.engine, new.engine)
    restarted = None not in (old.started_at_s, new.started_at_s) and old.started_at_s != new.started_at_s
    amounts: dict[Signal, float] = {}
    for signal, series in new.counters.items():
        before = {} if restarted else old.counters.get(signal, {})
        amounts[signal] = 0.0
        for key, value in series.items():
            start = before.get(key, 0.0)
            if value < start:
                restarted, start = True, 0.0
            amounts[signal] += value - start
    return _increase(amounts, restarted)


def total(increases: Iterable[Increase]) -> Increase:
    """Sum over pods or over consecutive intervals; a signal is None only where nobody exports it."""
    parts = list(increases)
    sums = {}
    for signal in Signal:
        known = [value for part in parts if (value := getattr(part, signal.value)) is not None]
        if known:
            sums[signal] = math.fsum(known)
    return _increase(sums, any(part.was_reset for part in parts))


def _increase(amounts: Mapping[Signal, float], was_reset: bool) -> Increase:
    fields: dict[str, Any] = {signal.value: amount for signal, amount in amounts.items()}
    return Increase(**fields, was_reset=was_reset)


class _Page:
    """Series by sample name; a family that is declared but has no series yet is an empty mapping."""

    def __init__(self, text: str) -> None:
        self.values: dict[str, dict[str, float]] = {}
        self._labels: dict[str, Mapping[str, str]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for suffix in {"counter": ("_total",), "histogram": ("_sum", "_count")}.get(family.type, ("",)):
                    self.values.setdefault(family.name + suffix, {})
                for sample in family.samples:
                    if sample.name.endswith(("_bucket", "_created")):
                        continue
                    key = sample.name + "".join(f",{k}={v}" for k, v in sorted(sample.labels.items()))
                    series = self.values.setdefault(sample.name, {})
                    series[key] = series.get(key, 0.0) + float(sample.value)
                    self._labels[key] = sample.labels
        except (ValueError, KeyError, IndexError) as err:
            raise ExpositionError(f"not a Prometheus text page: {err}") from err

    def has_family(self, prefixes: tuple[str, ...]) -> bool:
        return any(name.startswith(prefixes) for name in self.values)

    def pick(self, alternatives: tuple[Source, ...]) -> dict[str, float] | None:
        for source in alternatives:
            series = self.values.get(source.sample)
            if series is None:
                continue
            return {
                key: value
                for key, value in series.items()
                if math.isfinite(value)
                and (not source.label or re.fullmatch(source.value, self._labels[key].get(source.label, "")))
            }
        return None


def _gauges(page: _Page, metrics: EngineMetrics) -> dict[Gauge, float]:
    picked = {gauge: page.pick(sources) for gauge, sources in metrics.gauges.items()}
    return {gauge: math.fsum(series.values()) for gauge, series in picked.items() if series}


def _quotient(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or not denominator else numerator / denominator
