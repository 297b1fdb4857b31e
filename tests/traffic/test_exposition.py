"""Pages as engines write them, and the arithmetic between two of them."""

import dataclasses
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tkcc.api import codec
from tkcc.traffic.exposition import CounterSample, ExpositionError, Increase, increase, parse, total
from tkcc.traffic.metrics_map import ENGINES, Gauge, Signal

PAGES = Path(__file__).parent / "pages"


def test_increase_has_one_field_per_signal():
    assert [f.name for f in dataclasses.fields(Increase)] == [*Signal, "was_reset"]


def test_vllm_page_recorded_around_a_known_load_gives_that_load():
    before, after = (parse((PAGES / f"vllm-0.32.0-{when}.prom").read_text(), "vllm") for when in ("before", "after"))
    seen = increase(before, after)
    assert (seen.prompt_tokens, seen.prompt_requests, seen.generation_tokens) == (43_477, 40, 320)
    assert (seen.hit_tokens, seen.query_tokens) == (4_864, 43_477)
    assert (seen.requests_finished, seen.requests_failed, seen.requests_started) == (40, 0, None)
    assert seen.mean_prompt_tokens == pytest.approx(1086.925)
    assert seen.hit_ratio == pytest.approx(0.1119, abs=1e-4)
    assert seen.mean_ttft_s == pytest.approx(0.1298, abs=1e-4)
    assert seen.mean_tpot_s == pytest.approx(0.003738, abs=1e-6)
    assert not seen.was_reset
    assert after.gauges == {Gauge.REQUESTS_RUNNING: 0, Gauge.REQUESTS_WAITING: 0, Gauge.KV_USAGE_RATIO: 0}
    assert after.missing == (Signal.REQUESTS_STARTED,)


NATIVE = """\
# HELP tkcc_engine_requests_total Finished requests by outcome.
# TYPE tkcc_engine_requests_total counter
tkcc_engine_requests_total{outcome="ok"} 7.0
tkcc_engine_requests_total{outcome="error"} 2.0
tkcc_engine_requests_total{outcome="cancelled"} 1.0
# HELP tkcc_engine_request_prompt_tokens Prompt tokens.
# TYPE tkcc_engine_request_prompt_tokens histogram
tkcc_engine_request_prompt_tokens_bucket{le="100.0"} 3.0
tkcc_engine_request_prompt_tokens_bucket{le="+Inf"} 7.0
tkcc_engine_request_prompt_tokens_count 7.0
tkcc_engine_request_prompt_tokens_sum 840.0
# TYPE tkcc_engine_requests_running gauge
tkcc_engine_requests_running 3.0
"""

SGLANG = """\
# TYPE sglang:prefill_effective_tokens_total counter
sglang:prefill_effective_tokens_total{mode="input",tp_rank="0"} 600.0
sglang:prefill_effective_tokens_total{mode="device_hit",tp_rank="0"} 300.0
sglang:prefill_effective_tokens_total{mode="host_hit",tp_rank="0"} 100.0
# TYPE sglang:cached_tokens_total counter
sglang:cached_tokens_total{cache_source="device"} 1.0
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{is_streaming="true"} 2.0
# TYPE sglang:cache_hit_rate gauge
sglang:cache_hit_rate 0.99
"""

EMPTY = CounterSample(engine="sglang", counters={}, gauges={})


def test_outcomes_are_told_apart_by_label():
    sample = parse(NATIVE, "native")
    since_start = increase(dataclasses.replace(sample, counters={}), sample)
    assert (since_start.requests_finished, since_start.requests_failed) == (10, 2)
    assert since_start.mean_prompt_tokens == 120
    assert sample.gauges == {Gauge.REQUESTS_RUNNING: 3}


def test_hit_ratio_comes_from_token_counters_never_from_the_gauge():
    assert increase(EMPTY, parse(SGLANG, "sglang")).hit_ratio == pytest.approx(0.4)


def test_an_older_engine_that_lacks_the_new_name_is_read_by_the_old_one():
    old = "\n".join(line for line in SGLANG.splitlines() if "prefill_effective" not in line) + "\n"
    assert increase(EMPTY, parse(old, "sglang")).hit_ratio == pytest.approx(0.5)


def test_no_traffic_is_no_evidence():
    sample = parse(NATIVE, "native")
    idle = increase(sample, sample)
    assert (idle.prompt_requests, idle.mean_prompt_tokens) == (0, None)


def test_a_declared_counter_without_series_is_zero_and_an_undeclared_one_is_unknown():
    sample = parse("# TYPE tkcc_engine_requests_total counter\n", "native")
    seen = increase(sample, sample)
    assert (seen.requests_finished, seen.requests_failed, seen.hit_tokens) == (0, 0, None)


def _finished(value: float, started_at_s: float | None = None) -> CounterSample:
    return CounterSample("native", {Signal.REQUESTS_FINISHED: {"a": value, "b": 10.0}}, {}, started_at_s)


@pytest.mark.parametrize(
    "case, old, new, want, was_reset",
    [
        ("a new pod's first page says nothing about the window", None, _finished(5), 0, False),
        ("one series that fell counts from zero, the other goes on", _finished(50), _finished(4), 4, True),
        (
            "a restart that counters hide shows in the start time",
            _finished(1, 100.0),
            _finished(9, 200.0),
            19,
            True,
        ),
        ("the same start time is no restart", _finished(1, 100.0), _finished(9, 100.0), 8, False),
    ],
)
def test_resets(case, old, new, want, was_reset):
    seen = increase(old, new)
    assert (seen.requests_finished, seen.was_reset) == (want, was_reset)


def test_a_label_that_appears_later_counts_from_zero():
    old = parse(NATIVE.replace('tkcc_engine_requests_total{outcome="error"} 2.0\n', ""), "native")
    assert increase(old, parse(NATIVE, "native")).requests_failed == 2


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=6), st.integers(0, 5))
def test_the_sum_over_intervals_is_the_increase_over_all_of_them(steps, restart_at):
    """Restarts included: what each process counted before its last page is never lost and never doubled."""
    pages, value, counted = [_finished(0.0, 0.0)], 0.0, 0.0
    pages[0] = CounterSample("native", {Signal.REQUESTS_FINISHED: {"a": 0.0}}, {}, 0.0)
    for i, step in enumerate(steps):
        value = float(step) if i == restart_at else value + step
        counted += step
        started = 1.0 if i >= restart_at else 0.0
        pages.append(CounterSample("native", {Signal.REQUESTS_FINISHED: {"a": value}}, {}, started))
    seen = total(increase(a, b) for a, b in itertools.pairwise(pages))
    assert seen.requests_finished == counted


def test_total_leaves_out_pods_that_do_not_tell():
    assert total([Increase(hit_tokens=1), Increase(), Increase(hit_tokens=2, was_reset=True)]) == Increase(
        hit_tokens=3, was_reset=True
    )


@pytest.mark.parametrize(
    "case, text, engine, message",
    [
        ("an unknown engine", NATIVE, "ollama", "use one of native, vllm"),
        ("another engine's page", NATIVE, "vllm", "the page has no vllm:"),
        ("an empty page", "", "trtllm", "trtllm_"),
        ("a web page", "<html>nope</html>", "native", "not a Prometheus text page"),
        ("a value that is no number", "tkcc_engine_requests_running much\n", "native", "not a Prometheus text page"),
    ],
)
def test_an_unusable_page_is_refused_by_name(case, text, engine, message):
    with pytest.raises(ExpositionError, match=message):
        parse(text, engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_tells_at_least_the_mean_prompt_length(engine):
    counters = ENGINES[engine].counters
    assert {Signal.PROMPT_TOKENS, Signal.PROMPT_REQUESTS} <= set(counters)
    assert (Signal.HIT_TOKENS in counters) == (Signal.QUERY_TOKENS in counters)


def test_a_sample_survives_a_checkpoint():
    sample = parse((PAGES / "vllm-0.32.0-after.prom").read_text(), "vllm")
    assert codec.from_json(CounterSample, codec.to_json(sample)) == sample
