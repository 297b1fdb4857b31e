"""The verdict on a step: what each metric says of so many requests, and what the probes say."""

import random
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tkcc.api.observation import RequestSample
from tkcc.api.report import Verdict
from tkcc.api.spec import AnalysisSpec, Dtype
from tkcc.api.status import MetricAnalysis
from tkcc.control.observed import ProbeSeen
from tkcc.control.simulation import START
from tkcc.control.verdict import Started, is_probed, judge_completion, judge_probes, judge_requests, overall

PASS, FAIL, OPEN = Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE
LIMITS = AnalysisSpec(min_requests=40)


def requests(n, *, pod="p", time_ratio=1.0, errors=0, cancelled=0, prompt=1000, cached=500, seed=1):
    """`n` requests of which so many failed or were cancelled; sizes differ, and times follow
    them with 10 % noise."""
    rng = random.Random(seed)
    out = []
    for i in range(n):
        outcome = "error" if i < errors else "cancelled" if i < errors + cancelled else "ok"
        size = rng.lognormvariate(0.0, 0.5)
        noise = rng.lognormvariate(0.0, 0.1)
        out.append(
            RequestSample(
                pod=pod,
                artifact="baseline",
                started_at=START + timedelta(seconds=i),
                prompt_tokens=round(prompt * size),
                cached_tokens=round(cached * size),
                output_tokens=50,
                outcome=outcome,
                ttft_s=0.001 * (prompt - cached) * size * time_ratio * noise if outcome == "ok" else None,
                tpot_s=0.02 * time_ratio * rng.lognormvariate(0.0, 0.1) if outcome == "ok" else None,
            )
        )
    return out


def verdicts(canary, cohort, measurement=1):
    return [m.verdict for m in judge_requests(canary, cohort, LIMITS, measurement)]


@pytest.mark.parametrize(
    "case, canary, cohort, errors, ttft, tpot",
    [
        ("the same speed passes", {"n": 60}, {"n": 60}, PASS, PASS, PASS),
        ("faster passes", {"n": 60, "time_ratio": 0.7}, {"n": 60}, PASS, PASS, PASS),
        ("twice as slow fails", {"n": 60, "time_ratio": 2.0}, {"n": 60}, PASS, FAIL, FAIL),
        ("it fails before there are enough to pass", {"n": 15, "time_ratio": 2.0}, {"n": 60}, OPEN, FAIL, FAIL),
        ("over TPOT's limit and within TTFT's", {"n": 200, "time_ratio": 1.18}, {"n": 200}, PASS, PASS, FAIL),
        ("right at the limit stays open", {"n": 60, "time_ratio": 1.1}, {"n": 60}, PASS, PASS, OPEN),
        ("too few requests stay open", {"n": 39}, {"n": 60}, OPEN, OPEN, OPEN),
        ("no requests stay open", {"n": 0}, {"n": 60}, OPEN, OPEN, OPEN),
        ("no cohort stays open", {"n": 60}, {"n": 0}, OPEN, OPEN, OPEN),
        ("a third of errors fails", {"n": 60, "errors": 20}, {"n": 60}, FAIL, PASS, PASS),
        ("all errors fail soon", {"n": 8, "errors": 8}, {"n": 60}, FAIL, OPEN, OPEN),
        ("one error more stays open", {"n": 60, "errors": 1}, {"n": 60}, OPEN, PASS, PASS),
        ("as many errors as the cohort pass", {"n": 60, "errors": 6}, {"n": 60, "errors": 6}, PASS, PASS, PASS),
        ("what clients cancel is nobody's error", {"n": 80, "cancelled": 30}, {"n": 60}, PASS, PASS, PASS),
        ("a cold cache does more work and is not slower", {"n": 60, "cached": 0}, {"n": 60}, PASS, PASS, PASS),
    ],
)  # fmt: skip
def test_requests(case, canary, cohort, errors, ttft, tpot):
    assert verdicts(requests(**canary), requests(**cohort, seed=2)) == [errors, ttft, tpot], case


def test_looking_again_and_again_does_not_fail_a_canary_that_is_at_its_limit():
    """Twelve looks at growing data, forty times: alpha is 1 % for all the looks of a step, though each is a chance."""
    failed = 0
    for trial in range(40):
        ours, theirs = requests(96, seed=trial, time_ratio=1.1), requests(96, seed=1000 + trial)
        looks = (verdicts(ours[:n], theirs[:n], k)[2] for k, n in enumerate(range(8, 97, 8), start=1))
        failed += FAIL in looks
    assert failed <= 2


def test_messages_say_how_much_and_how_many():
    errors, ttft, tpot = judge_requests(requests(60, time_ratio=2.0), requests(60, seed=2), LIMITS, 1)
    assert "60 of 40 requests" in tpot.message and "limit 1.10" in tpot.message and "limit 1.25" in ttft.message
    assert tpot.ratio_milli == pytest.approx(2000, rel=0.1)
    assert tpot.ratio_low_milli < tpot.ratio_milli < tpot.ratio_high_milli
    assert errors.canary == "0/60"


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), -1.0, 0.0, None])
def test_times_that_are_no_times_are_no_evidence(nonsense):
    told = [replace(r, ttft_s=nonsense, tpot_s=nonsense) for r in requests(60)]
    assert verdicts(told, requests(60, seed=2)) == [PASS, OPEN, OPEN]


def metric(verdict):
    return MetricAnalysis(metric="m", verdict=verdict)


@given(st.lists(st.sampled_from(Verdict), max_size=6))
def test_overall_fails_with_any_passes_with_all_and_never_without_data(each):
    want = FAIL if FAIL in each else PASS if each and set(each) == {PASS} else OPEN
    assert overall([metric(v) for v in each]) is want


@pytest.mark.parametrize(
    "case, ours, theirs, started, want",
    [
        ("all finish", 30, 90, Started(30, 90), PASS),
        ("a few are under way on both sides", 27, 85, Started(30, 90), PASS),
        ("none of the canary's finish", 0, 90, Started(20, 90), FAIL),
        ("hardly any of the canary's finish", 5, 88, Started(30, 90), FAIL),
        ("nobody finishes: it is not the canary", 0, 0, Started(30, 90), PASS),
        ("a few under way are too few to say", 0, 10, Started(2, 10), PASS),
        ("nothing started", 0, 0, Started(0, 0), OPEN),
    ],
)
def test_completion(case, ours, theirs, started, want):
    assert judge_completion(requests(ours), requests(theirs), started, 1).verdict is want, case


def probe(pod="c", at=10, prompt="p1", match=True, idx=None, gap=None, error=""):
    return ProbeSeen(pod, START + timedelta(seconds=at), prompt, match, idx, gap, error)


@pytest.mark.parametrize(
    "case, probes, is_wrong",
    [
        ("the same tokens", [probe()], False),
        ("other tokens", [probe(), probe(prompt="p2", match=False, idx=3, gap=2.0)], True),
        ("other tokens at an unknown gap", [probe(), probe(prompt="p2", match=False, idx=3)], True),
        ("a gap that is no number", [probe(), probe(prompt="p2", match=False, idx=3, gap=float("nan"))], True),
        ("a near tie among matches", [probe(), probe(prompt="p2", match=False, idx=9, gap=0.01)], False),
        ("nothing but near ties", [probe(prompt=p, match=False, idx=9, gap=0.01) for p in ("p1", "p2", "p3")], True),
        ("a near tie at the first prompt", [probe(match=False, idx=9, gap=0.01)], False),
        ("an old answer does not count", [probe(at=-5, match=False, idx=3, gap=2.0)], False),
        ("another pod's answer does not count", [probe(pod="d", match=False, idx=3, gap=2.0)], False),
        ("no answer is no evidence", [probe(match=False, error="timeout")], False),
    ],
)
def test_probes(case, probes, is_wrong):
    failure = judge_probes(probes, ("c",), START)
    assert (failure is not None) is is_wrong, case
    if failure:
        assert failure.reason == "CorrectnessRegressed"


def test_a_near_tie_is_wider_where_rounding_is_coarser():
    ties = [probe(prompt=p, match=False, idx=9, gap=0.4) for p in ("p1", "p2", "p3")]
    assert judge_probes(ties, ("c",), START, Dtype.FLOAT32)
    assert not judge_probes(ties, ("c",), START, Dtype.BFLOAT16)
    assert judge_probes([probe(match=False, idx=9, gap=2.0)], ("c",), START, Dtype.BFLOAT16)


@pytest.mark.parametrize(
    "case, probes, want",
    [
        ("answered since", [probe(), probe(prompt="p2")], True),
        ("never asked", [], False),
        ("asked before", [probe(at=-1), probe(at=-1, prompt="p2")], False),
        ("one of two not answered again yet", [probe(), probe(at=-9, prompt="p2")], False),
        ("one of two not answered yet", [probe()], False),
        ("no answer", [probe(), probe(prompt="p2", error="connection refused")], False),
    ],
)
def test_a_pod_is_probed_when_every_prompt_was_answered_since(case, probes, want):
    assert is_probed(probes, ("p1", "p2"), "c", START) is want, case


def test_without_prompts_nothing_is_probed():
    assert not is_probed([probe()], (), "c", START)
