"""report.html: one file, no script, nothing fetched. What it says is the story's facts; how it looks is
page.html.j2's."""

from pathlib import Path
from statistics import median
from typing import Any

import jinja2

from e2e.demo.facts import Sent, Story, fingerprint, is_promoted, median_tpot_s, quantile, report
from e2e.demo.plot import Chart, Mark, Series, render
from e2e.demo.timeline import short

_ROLLING = 15  # requests of a rolling mean
_TURNING_POINT = 2


def render_page(story: Story) -> str:
    """The whole page as text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["clock"] = clock
    end_s = max([entry.at_s for entry in story.told] + [s.at_s for s in story.sent] + [1.0])
    marks = [Mark(entry.at_s, entry.text) for entry in story.told if entry.weight >= _TURNING_POINT]
    return environment.get_template("page.html.j2").render(
        story=story,
        report=report(story),
        verdict=verdict(story),
        charts=[(chart.title, render(chart, marks, end_s)) for chart in charts(story)],
        marks=marks,
        serving=serving_table(story),
        short=short,
    )


def clock(at_s: float) -> str:
    return f"{int(at_s) // 60}:{int(at_s) % 60:02d}"


def verdict(story: Story) -> str:
    """The page's first sentence."""
    facts = report(story)
    if not is_promoted(story):
        return f"Not promoted: {story.ended or 'the story was broken off'}."
    gain = facts["gain"]
    gained = (
        f"A token takes {1 / gain['median']:.2f} times as long as with the built-in forward pass (speed-up "
        f"{gain['median']:.3f}, 95 % interval {gain['ciLow']:.3f} to {gain['ciHigh']:.3f}, slow tier)."
        if gain
        else "The gain against the baseline was not measured."
    )
    requests = facts["requests"]
    return (
        f"The traffic moved, the forward pass was recompiled for it and promoted. {gained} "
        f"{requests['sent']} requests were sent, {requests['failed']} failed."
    )


def charts(story: Story) -> list[Chart]:
    looks, sent = story.looks, sorted(story.sent, key=lambda one: one.at_s)
    return [
        Chart(
            "Prompt length",
            "tokens",
            [
                Series("requests", [(s.at_s, float(s.result.prompt_tokens)) for s in sent], "dots", 3),
                Series(f"mean of {_ROLLING} requests", _rolling(sent, _mean_prompt), "line", 0),
                Series(
                    "operator's window", [(look.at_s, _float(look.long_prompt_tokens)) for look in looks], "step", 1
                ),
            ],
        ),
        Chart(
            "Prefix-cache hit ratio",
            "share of prompt tokens",
            [
                Series(f"{_ROLLING} requests", _rolling(sent, _hit_ratio), "line", 0),
                Series("operator's window", [(look.at_s, look.long_hit_ratio) for look in looks], "step", 1),
            ],
            top=1.0,
        ),
        Chart(
            "Drift: distance to the nearest compiled plan",
            "1 is the limit",
            [
                Series("long window", [(look.at_s, look.long_distance) for look in looks], "step", 1),
                Series("short window", [(look.at_s, look.short_distance) for look in looks], "step", 0),
            ],
            limit=1.0,
            limit_name="drift above",
        ),
        Chart(
            "Canary weight",
            "% of requests",
            [
                Series("asked for", [(look.at_s, float(look.desired_weight_pct)) for look in looks], "step", 1),
                Series("observed", [(look.at_s, _float(look.observed_weight_pct)) for look in looks], "dots", 0),
            ],
            top=100.0,
        ),
        _tpot_chart(story, sent),
    ]


def _tpot_chart(story: Story, sent: list[Sent]) -> Chart:
    series = []
    values = sorted(s.result.tpot_s * 1e3 for s in sent if s.result.tpot_s is not None)
    for style, (served_by, name) in enumerate(_forward_passes(story)):
        own = [s for s in sent if s.result.fingerprint == served_by and s.result.tpot_s is not None]
        series.append(Series(name, [(s.at_s, (s.result.tpot_s or 0) * 1e3) for s in own], "dots", style))
        series.append(Series(f"{name}, median", _rolling(own, _tpot_ms), "line", style, is_named=False))
    # A few stragglers would flatten the rest: the axis ends at the 99th percentile.
    return Chart("Time per output token", "ms, one dot a request", series, top=quantile(values, 0.99))


def _forward_passes(story: Story) -> list[tuple[str, str]]:
    """Fingerprints that answered requests and what to call them, in the order of their first request."""
    ordered = sorted(story.sent, key=lambda one: one.at_s)
    names = {fingerprint(digest): f"compiled for {label}" for digest, label in story.compiled_for.items()}
    if story.revisions:
        names[fingerprint(story.revisions[0])] = "baseline"
    seen = dict.fromkeys(s.result.fingerprint for s in ordered if s.result.is_ok)
    return [(served_by, names.get(served_by, served_by or "unknown")) for served_by in seen]


def serving_table(story: Story) -> list[dict[str, Any]]:
    """Per workload and forward pass: how requests went, as the client saw them."""
    rows = []
    for workload in ("A", "B"):
        for served_by, name in _forward_passes(story):
            own = [s for s in story.sent if s.workload == workload and s.result.fingerprint == served_by]
            if not own:
                continue
            ttft = sorted(s.result.ttft_s for s in own if s.result.ttft_s is not None)
            tpot_s = median_tpot_s(own)
            rows.append(
                {
                    "workload": workload,
                    "served_by": name,
                    "requests": len(own),
                    "failed": sum(not s.result.is_ok for s in own),
                    "prompt_tokens": _mean_prompt(own),
                    "hit_ratio": _hit_ratio(own),
                    "ttft_ms": median(ttft) * 1e3 if ttft else None,
                    "tpot_ms": tpot_s * 1e3 if tpot_s is not None else None,
                }
            )
    return rows


def _rolling(sent: list[Sent], figure: Any) -> list[tuple[float, float | None]]:
    """`figure` over each request and those before it, up to _ROLLING of them."""
    return [(sent[i].at_s, figure(sent[max(0, i - _ROLLING + 1) : i + 1])) for i in range(min(4, len(sent)), len(sent))]


def _mean_prompt(sent: list[Sent]) -> float:
    return sum(s.result.prompt_tokens for s in sent) / len(sent)


def _hit_ratio(sent: list[Sent]) -> float | None:
    told = [s.result for s in sent if s.result.cached_tokens is not None]
    tokens = sum(result.prompt_tokens for result in told)
    return sum(result.cached_tokens or 0 for result in told) / tokens if tokens else None


def _tpot_ms(sent: list[Sent]) -> float | None:
    tpot_s = median_tpot_s(sent)
    return None if tpot_s is None else tpot_s * 1e3


def _float(value: int | None) -> float | None:
    return None if value is None else float(value)
