"""From an engine's /metrics page to our signals, each added up over its series.

Values are absolute, as counted since the process started: what happened in a window is tkcc.control.windows' to say.
"""

import math
import re

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tkcc.traffic.metrics_map import ENGINES, Signal, Source


class ExpositionError(ValueError):
    """The page cannot be used; the message says what was looked for."""


def parse(text: str, engine: str) -> dict[Signal, float]:
    """Read a page in the Prometheus text format. A declared family without series yet is zero, a signal that the page
    does not declare is absent.

    Raises ExpositionError for an unknown engine, for a page that is no exposition, for one without any metric of this
    engine, and for one whose values are no numbers.
    """
    metrics = ENGINES.get(engine)
    if metrics is None:
        raise ExpositionError(f"engine {engine!r} has no metrics map: use one of {', '.join(ENGINES)}")
    page = _read(text)
    if not any(name.startswith(metrics.prefixes) for name in page):
        wanted = " or ".join(f"{prefix}*" for prefix in metrics.prefixes)
        raise ExpositionError(f"the page has no {wanted} metric: is it a {engine} server's, and are its metrics on?")
    found = {signal: _sum(page, alternatives) for signal, alternatives in metrics.signals.items()}
    return {signal: value for signal, value in found.items() if value is not None}


def _read(text: str) -> dict[str, list[Sample]]:
    """Series by sample name; a family that is declared but has no series yet has an empty list."""
    page: dict[str, list[Sample]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for suffix in {"counter": ("_total",), "histogram": ("_sum", "_count")}.get(family.type, ("",)):
                page.setdefault(family.name + suffix, [])
            for sample in family.samples:
                page.setdefault(sample.name, []).append(sample)
    except (ValueError, KeyError, IndexError) as err:
        raise ExpositionError(f"not a Prometheus text page: {err}") from err
    return page


def _sum(page: dict[str, list[Sample]], alternatives: tuple[Source, ...]) -> float | None:
    source = next((source for source in alternatives if source.sample in page), None)
    if source is None:
        return None
    total = sum(
        sample.value
        for sample in page[source.sample]
        if not source.label or re.fullmatch(source.value, sample.labels.get(source.label, ""))
    )
    if not math.isfinite(total):
        raise ExpositionError(f"{source.sample} adds up to {total}")
    return float(total)
