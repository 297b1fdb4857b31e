"""Durations, times and border types: what they accept, and that they come back as they were written."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tkcc.api.candidate import Candidate, candidate_digest
from tkcc.api.codec import from_dict, from_json, to_dict, to_json
from tkcc.api.condition import Condition, ConditionStatus
from tkcc.api.fields import format_duration, parse_duration
from tkcc.api.report import Verdict
from tkcc.api.spec import Approval, Mode, Spec, model_claim
from tkcc.api.status import MetricAnalysis, Status
from tkcc.api.workload import Quantiles, Workload

MINIMAL = {"model": {"uri": "pvc://weights/smol", "name": "smol"}}


@pytest.mark.parametrize(
    "text, seconds",
    [("2s", 2), ("15m", 900), ("1h", 3600), ("1h30m", 5400), ("90m", 5400), ("1h0m1s", 3601), ("0s", 0)],
)
def test_durations_are_read(text, seconds):
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "5", "5 m", "-5m", "1.5h", "5m1h", "1d", "PT5M", None, 5, "5ms"])
def test_what_is_no_duration_says_what_one_looks_like(text):
    with pytest.raises(ValueError, match="1h30m"):
        parse_duration(text)


@given(st.integers(0, 10**7))
def test_durations_come_back(seconds):
    assert parse_duration(format_duration(timedelta(seconds=seconds))) == timedelta(seconds=seconds)


@given(st.integers(0, 2 * 10**9), st.integers(0, 999_999))
def test_times_come_back_to_the_second(second, microsecond):
    at = datetime.fromtimestamp(second, UTC).replace(microsecond=microsecond)
    condition = Condition("Ready", ConditionStatus.TRUE, "R", "m", 1, at)
    assert from_json(Condition, to_json(condition)) == condition
    assert condition.last_transition_time == at.replace(microsecond=0)


def test_times_have_a_zone():
    with pytest.raises(ValueError, match="zone"):
        from_dict(
            Condition,
            {"type": "T", "status": "True", "reason": "R", "message": "m", "lastTransitionTime": "2026-01-01T00:00:00"},
        )
    there = datetime(2026, 1, 1, 2, tzinfo=timezone(timedelta(hours=2)))
    assert '"2026-01-01T00:00:00Z"' in to_json(Condition("Ready", ConditionStatus.TRUE, "R", "m", 1, there))


@pytest.mark.parametrize(
    "case, patch, words",
    [
        ("an unknown field is named", {"drift": {"signals": []}}, ["drift.signals"]),
        ("a wrong word is named with the right ones", {"recompilation": {"mode": "Auto"}}, ["mode", "RecommendOnly"]),
        ("a number out of range is named", {"replicas": 0}, ["replicas", "greater than or equal to 1"]),
        ("a duration in words is named", {"drift": {"tick": "5 minutes"}}, ["drift.tick", "1h30m"]),
        ("a digest that is none is named", {"rollout": {"artifact": "abc"}}, ["rollout.artifact"]),
    ],
)
def test_bad_specs_name_the_field(case, patch, words):
    with pytest.raises(ValueError) as err:
        from_dict(Spec, MINIMAL | patch)
    assert all(word in str(err.value) for word in words), (case, str(err.value))


def test_required_fields_are_named():
    with pytest.raises(ValueError, match="model"):
        from_dict(Spec, {})
    with pytest.raises(ValueError, match="uri"):
        from_dict(Spec, {"model": {"name": "m"}})


def test_specs_and_statuses_come_back():
    spec = from_dict(Spec, MINIMAL)
    spec = replace(spec, recompilation=replace(spec.recompilation, mode=Mode.RECOMMEND_ONLY))
    spec = replace(spec, rollout=replace(spec.rollout, steps=(25, 50), approval=Approval.BEFORE_CANARY))
    assert from_dict(Spec, to_dict(spec)) == spec
    assert from_json(Status, to_json(Status())) == Status()


@pytest.mark.parametrize(
    "uri, claim, path",
    [("pvc://weights", "weights", ""), ("pvc://weights/a/b", "weights", "a/b"), ("pvc://weights/a/", "weights", "a")],
)
def test_model_claim(uri, claim, path):
    assert model_claim(uri) == (claim, path)


@pytest.mark.parametrize("uri", ["hf://org/model", "pvc://", "pvc://UPPER", "pvc://w/../etc", "/models", "pvc://w/a b"])
def test_other_places_for_weights_are_refused(uri):
    with pytest.raises(ValueError, match="uri"):
        from_dict(Spec, {"model": {"uri": uri, "name": "m"}})


@given(st.lists(st.text("abc def\t", max_size=8), max_size=6), st.dictionaries(st.text(max_size=3), st.integers()))
def test_a_candidates_digest_does_not_depend_on_line_ends(lines, params):
    digest = candidate_digest("\n".join(lines), params)
    assert digest == candidate_digest("\r\n".join(lines) + "\n\n", params)
    assert digest == Candidate("\n".join(line + "  " for line in lines), params, hypothesis="x").digest
    assert digest != candidate_digest("\n".join(lines) + "\npass", params)


@given(st.integers(0, 10**6), st.integers(0, 1000))
def test_a_workloads_digest_is_its_figures(tokens, hit_ratio_milli):
    flat = Quantiles(tokens, tokens, tokens, tokens)
    workload = Workload(flat, flat, flat, hit_ratio_milli, 60, 60, 60)
    assert from_json(Workload, to_json(workload)).digest == workload.digest
    assert replace(workload, requests_per_minute=61).digest != workload.digest


def test_figures_that_do_not_fit_are_cut_and_stop_no_status_from_being_written():
    shown = MetricAnalysis("TPOT", Verdict.PASS, canary="9" * 40, ratio_milli=10**30, ratio_low_milli=None)
    assert (len(shown.canary), shown.ratio_milli, shown.ratio_low_milli) == (32, 10**9, None)
