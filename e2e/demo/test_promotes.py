"""The story *Promotes*: the demo itself, as a user runs it, and what must be true of it afterwards."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.names import ClusterName
from e2e.cluster.sandbox import marked, running
from e2e.demo.ground import CLUSTER_NAME

REPOSITORY = Path(__file__).parents[2]
OUT = REPOSITORY / "build" / "demo"
DEADLINE_S = 2400

pytestmark = pytest.mark.timeout(DEADLINE_S + 60)

Demo = tuple[dict[str, Any], dict[str, Any]]  # report.json, story.json


@pytest.fixture(scope="module")
def demo() -> Demo:
    """One run; its output goes to the terminal as it comes."""
    done = subprocess.run([sys.executable, "-m", "e2e.demo"], cwd=REPOSITORY, timeout=DEADLINE_S, check=False)
    report, story = (json.loads((OUT / name).read_text()) for name in ("report.json", "story.json"))
    assert done.returncode == 0, story["ended"]
    return report, story


def test_the_forward_pass_for_the_new_traffic_is_in_service(demo: Demo) -> None:
    report, story = demo
    assert report["promoted"] is True
    baseline, for_a, for_b = story["revisions"]
    assert (report["baselineRevision"], report["promotedRevision"]) == (baseline, for_b)
    assert story["compiled_for"] == {for_a: "A", for_b: "B"}


def test_it_is_faster_than_the_baseline_beyond_doubt(demo: Demo) -> None:
    report, _ = demo
    gain = report["gain"]
    assert 1 < gain["ciLow"] <= gain["median"] <= gain["ciHigh"]
    assert 0 < report["canaryTpotRatio"] < 1.1


def test_every_request_was_answered(demo: Demo) -> None:
    report, _ = demo
    assert report["requests"]["sent"] >= 100
    assert report["requests"]["failed"] == 0


def test_drift_was_seen_beyond_its_limit(demo: Demo) -> None:
    report, _ = demo
    assert report["drift"]["distance"] > 1
    assert report["drift"]["signal"] in ("PromptLengthShifted", "PrefixCacheHitRateShifted", "MultipleSignalsShifted")


def test_candidates_were_judged(demo: Demo) -> None:
    report, story = demo
    counts = report["candidates"]
    assert counts["evaluated"] >= counts["accepted"] + counts["refused"] and counts["accepted"] >= 2
    assert {c["tier"] for c in story["candidates"]} == {"fast", "slow"}
    assert 0 < report["hotReload_s"]["p50"] <= report["hotReload_s"]["p95"]


def test_both_artifacts_were_measured_on_both_workloads(demo: Demo) -> None:
    report, _ = demo
    cells = {(c["artifact"], c["workload"]): c for c in report["cross"]["cells"]}
    assert set(cells) == {("A", "A"), ("A", "B"), ("B", "A"), ("B", "B")}
    assert all(c["ciLow"] <= c["median"] <= c["ciHigh"] for c in cells.values())
    own_wins = all(cells[w, w]["median"] >= cells[other, w]["median"] for w, other in (("A", "B"), ("B", "A")))
    assert report["cross"]["conclusion"].startswith("Each artifact wins on its own workload") == own_wins


def test_the_timeline_has_each_turn_in_its_order(demo: Demo) -> None:
    _, story = demo
    turns = [(entry["topic"], entry["text"]) for entry in story["told"] if entry["weight"] == 2]

    def first(topic: str, words: str, after: int = -1) -> int:
        found = [i for i, (t, text) in enumerate(turns) if i > after and t == topic and words in text]
        assert found, f"no {topic} entry with {words!r} after number {after} of {turns}"
        return found[0]

    order = [first("apply", "kubectl apply"), first("traffic", "workload A"), first("plan", "plan 0")]
    order += [first("run", "started (Token)"), first("canary", "weight"), first("promote", "is the stable revision")]
    order.append(first("traffic", "workload B"))
    order.append(first("drift", "seen", order[-1]))
    order.append(first("run", "started (Drift)", order[-1]))
    order.append(first("canary", "weight", order[-1]))
    order.append(first("promote", "is kept", order[-1]))
    assert all(a < b for a, b in pairwise(order))


def test_the_conditions_are_those_of_a_healthy_deployment(demo: Demo) -> None:
    report, _ = demo
    status = {c["type"]: c["status"] for c in report["conditions"]}
    assert (status["Ready"], status["Accepted"], status["Degraded"]) == ("True", "True", "False")


def test_every_step_is_timed_and_the_page_is_there(demo: Demo) -> None:
    report, _ = demo
    story = {"serving", "plan 0", "run for A", "canary of A's", "drift to B", "run for B", "canary of B's", "cross"}
    assert set(report["timings_s"]) >= {"build", "install", "whole"} | story
    assert (OUT / "report.html").stat().st_size > 20_000


def test_nothing_is_left_running(demo: Demo) -> None:
    assert CLUSTER_NAME not in running()
    assert [process.pid for process in marked(ClusterName(CLUSTER_NAME))] == []
