"""report.json and report.html: figures that are right, and a page that a browser shows whole."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from e2e.demo.facts import CandidateFact, Ratio, Story, drift_of, look_of, quantile, report, tpot_ratio_of
from e2e.demo.page import charts, render_page, serving_table
from e2e.demo.plot import Chart, Mark, Series, render
from tkcc.api.condition import Condition, ConditionStatus
from tkcc.api.report import Verdict
from tkcc.api.status import DriftStatus, MetricAnalysis, Phase, RolloutStatus, Source, Status

CHROMIUM = shutil.which("chromium")
KEYS = (
    *("promoted", "baselineRevision", "promotedRevision", "gain", "canaryTpotRatio", "cross", "requests", "drift"),
    *("candidates", "hotReload_s", "timings_s", "conditions"),
)


def test_report_has_the_promised_keys_and_the_storys_figures(story):
    facts = json.loads(json.dumps(report(story)))
    assert tuple(facts) == KEYS
    assert facts["promoted"] is True
    assert (facts["baselineRevision"], facts["promotedRevision"]) == ("0" * 64, "b" * 64)
    assert facts["gain"] == {"median": 1.271, "ciLow": 1.262, "ciHigh": 1.283}
    assert facts["canaryTpotRatio"] == 0.91
    assert facts["requests"] == {"sent": len(story.sent), "failed": 0}
    assert facts["drift"] == {"signal": "MultipleSignalsShifted", "distance": 2.1}
    assert facts["candidates"] == {"evaluated": 14, "accepted": 3, "refused": 11}
    assert facts["hotReload_s"] == {"p50": 0.5, "p95": 1.9}


def test_a_story_that_broke_off_makes_nothing_up():
    facts = report(Story())
    assert tuple(facts) == KEYS
    assert facts["promoted"] is False
    assert [facts[key] for key in ("promotedRevision", "gain", "canaryTpotRatio", "drift")] == [None] * 4
    assert facts["hotReload_s"] == {"p50": None, "p95": None}


def test_only_the_artifact_compiled_for_b_counts_as_promoted(story):
    story.revisions.pop()
    assert report(story)["promoted"] is False and report(story)["gain"] is None


def test_failed_requests_are_counted(story):
    story.sent[3] = replace(story.sent[3], result=replace(story.sent[3].result, error="refused"))
    assert report(story)["requests"]["failed"] == 1


@pytest.mark.parametrize(
    "case, medians, conclusion",
    [
        (
            "own wins, clearly",
            (1.15, 1.05, 1.05, 1.25),
            "Each artifact wins on its own workload: on workload A artifact A is",
        ),
        ("one wins both", (1.15, 1.05, 1.20, 1.25), "Artifact B wins on both: on workload A artifact B is clearly"),
        (
            "the wrong way round",
            (1.1, 1.3, 1.2, 1.2),
            "Each artifact wins on the other's workload, which speaks for noise",
        ),
        ("within the noise", (1.15, 1.05, 1.145, 1.25), "the intervals overlap, so this may be noise"),
    ],
)
def test_the_cross_table_is_read_out_plainly(case, medians, conclusion):
    cells = zip(("AA", "AB", "BA", "BB"), medians, strict=True)
    story = Story(cross=[Ratio(c[0], c[1], m, m - 0.01, m + 0.01) for c, m in cells])
    assert conclusion in report(story)["cross"]["conclusion"]


def test_one_that_wins_both_is_told_with_what_it_changed():
    cells = [Ratio("A", "A", 1.1, 1.0, 1.2), Ratio("A", "B", 1.1, 1.0, 1.2)]
    cells += [Ratio("B", "A", 1.3, 1.2, 1.4), Ratio("B", "B", 1.3, 1.2, 1.4)]
    told = CandidateFact("run", "slow", "confirm", "b" * 64, "ACCEPTED", 80, "fewer rows at a time")
    story = Story(cross=cells, compiled_for={"a" * 64: "A", "b" * 64: "B"}, candidates=[told])
    assert report(story)["cross"]["conclusion"].endswith("pays on both workloads: fewer rows at a time.")


def test_a_missing_cross_table_says_why():
    assert report(Story(cross_note="The tier died."))["cross"] == {"cells": [], "conclusion": "The tier died."}


@pytest.mark.parametrize("q, want", [(0.0, 1), (0.5, 2), (0.51, 3), (0.95, 4), (1.0, 4)])
def test_quantile_is_a_value_that_was_seen(q, want):
    assert quantile([1, 2, 3, 4], q) == want


def test_a_look_holds_what_the_status_said():
    moment = datetime(2026, 1, 2, tzinfo=UTC)
    status = Status(
        phase=Phase.CANARY,
        drift=DriftStatus(270, 600, 40, 1350, 1420),
        rollout=RolloutStatus(
            artifact="a" * 64,
            source=Source.RUN,
            spec_digest="",
            started_at=moment,
            step_since=moment,
            desired_weight=50,
            observed_weight=48,
            analysis=(MetricAnalysis("TPOT", Verdict.PASS, ratio_milli=903),),
        ),
        conditions=(Condition("TrafficDrifted", ConditionStatus.TRUE, "PromptLengthShifted", "m", 1),),
    )
    look = look_of(status, 12.5)
    assert (look.long_prompt_tokens, look.long_hit_ratio, look.long_distance, look.short_distance) == (
        270,
        0.6,
        1.35,
        1.42,
    )
    assert (look.desired_weight_pct, look.observed_weight_pct) == (50, 48)
    assert look_of(replace(status, phase=Phase.SERVING), 13.0).desired_weight_pct == 0
    assert tpot_ratio_of(status) == 0.903
    drift = drift_of(status)
    assert drift and (drift.signal, drift.distance) == ("PromptLengthShifted", 1.35)


def test_requests_are_told_apart_by_workload_and_forward_pass(story):
    rows = {(row["workload"], row["served_by"]): row for row in serving_table(story)}
    assert list(rows) == [("A", "baseline"), ("A", "compiled for A"), ("B", "compiled for A"), ("B", "compiled for B")]
    assert sum(row["requests"] for row in rows.values()) == len(story.sent)
    assert rows["A", "baseline"]["tpot_ms"] > rows["B", "compiled for B"]["tpot_ms"]
    assert rows["B", "compiled for B"]["hit_ratio"] == pytest.approx(0.88, abs=0.01)


_POINTS = st.lists(st.tuples(st.floats(0, 1e4), st.none() | st.floats(0, 1e9)), max_size=20)


@given(_POINTS, st.sampled_from(["line", "step", "dots"]), st.floats(0, 1e4), st.none() | st.floats(0, 1e9))
def test_a_chart_of_any_data_is_well_formed_and_stays_in_its_frame(points, kind, end_s, limit):
    chart = Chart("a <title> & more", "ms", [Series('"s"', points, kind)], limit, "limit")
    svg = ElementTree.fromstring(render(chart, [Mark(3.0, "x"), Mark(4.0, "y")], end_s))
    assert svg.find("title").text == "a <title> & more"
    numbers = [float(n) for e in svg.iter() for k in ("x1", "x2", "y1", "y2", "cx", "cy", "x", "y") if (n := e.get(k))]
    numbers += [float(n) for e in svg.iter("path") for n in re.findall(r"-?[\d.]+", e.get("d"))]
    assert all(-1 <= n <= 900 for n in numbers)


def test_marks_that_would_touch_share_a_label():
    svg = render(Chart("t", "u", []), [Mark(10.0, "a"), Mark(11.0, "b"), Mark(500.0, "c")], 600.0)
    assert re.findall(r'class="number"[^>]*>([^<]+)<', svg) == ["1-2", "3"]


def test_the_page_fetches_nothing_and_escapes_what_others_wrote(story):
    page = render_page(story)
    assert "<script" not in page and "<b>&</b>" not in page
    assert not re.search(r"""(?:src|href)\s*=|url\(|@import|https?://""", page)
    for title in ("Prompt length", "Prefix-cache hit ratio", "Drift", "Canary weight", "Time per output token"):
        assert title in page


def test_a_broken_off_story_has_a_page_too():
    page = render_page(Story(ended="the operator's pod did not become ready within 120 s"))
    assert "Not promoted: the operator&#39;s pod did not become ready within 120 s." in page


@pytest.fixture(scope="session")
def chromium() -> str:
    assert CHROMIUM, "chromium is missing: run `bash .ci/packages` as root"
    return CHROMIUM


def _browse(chromium: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1000,1400"),
            *(f"--user-data-dir={folder / 'profile'}", *options, (folder / "report.html").as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


def test_a_browser_shows_all_of_it(story, chromium, tmp_path):
    (tmp_path / "report.html").write_text(render_page(story))
    dom = _browse(chromium, tmp_path, "--dump-dom").stdout
    assert dom.count("<svg") == len(charts(story)) == dom.count("</svg>")
    assert dom.count("<circle") > len(story.sent)  # prompts and times, one dot each
    assert "alert(1)" in dom and "<script" not in dom
    sizes = {}
    for theme, setting in (("light", 1), ("dark", 0)):
        shot = tmp_path / f"{theme}.png"
        _browse(chromium, tmp_path, f"--screenshot={shot}", f"--blink-settings=preferredColorScheme={setting}")
        assert shot.read_bytes().startswith(b"\x89PNG")
        sizes[theme] = shot.read_bytes()
    assert sizes["light"] != sizes["dark"]
    assert all(len(image) > 40_000 for image in sizes.values())  # an empty page is about 5 kB
