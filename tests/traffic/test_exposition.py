"""Pages as engines write them, and what is read off them."""

from pathlib import Path

import pytest

from tkcc.api.spec import EngineType
from tkcc.traffic.exposition import ExpositionError, parse
from tkcc.traffic.metrics_map import ENGINES, Signal

PAGES = Path(__file__).parent / "pages"


def test_vllm_pages_recorded_around_a_known_load_differ_by_that_load():
    before, after = (parse((PAGES / f"vllm-0.32.0-{when}.prom").read_text(), "vllm") for when in ("before", "after"))
    assert {signal: after[signal] - before[signal] for signal in after} == {
        Signal.PROMPT_TOKENS: 43_477,
        Signal.PROMPT_REQUESTS: 40,
        Signal.HIT_TOKENS: 4_864,
        Signal.QUERY_TOKENS: 43_477,
        Signal.GENERATION_TOKENS: 320,
        Signal.REQUESTS_FINISHED: 40,
        Signal.REQUESTS_RUNNING: 0,
    }


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


@pytest.mark.parametrize(
    "case, text, engine, want",
    [
        (
            "series of all labels are added up",
            NATIVE,
            "native",
            {
                Signal.REQUESTS_FINISHED: 10,
                Signal.PROMPT_REQUESTS: 7,
                Signal.PROMPT_TOKENS: 840,
                Signal.REQUESTS_RUNNING: 3,
            },
        ),
        (
            "hits are told by label, and never come from the gauge",
            SGLANG,
            "sglang",
            {Signal.HIT_TOKENS: 400, Signal.QUERY_TOKENS: 1000},
        ),
        (
            "an older engine that lacks the new name is read by the old one",
            "".join(line for line in SGLANG.splitlines(keepends=True) if "prefill_effective" not in line),
            "sglang",
            {Signal.HIT_TOKENS: 1, Signal.QUERY_TOKENS: 2},
        ),
        (
            "a declared counter without series is zero, an undeclared one absent",
            "# TYPE tkcc_engine_requests_total counter\n",
            "native",
            {Signal.REQUESTS_FINISHED: 0},
        ),
    ],
)
def test_what_a_page_says(case, text, engine, want):
    assert parse(text, engine) == want


@pytest.mark.parametrize(
    "case, text, engine, message",
    [
        ("an unknown engine", NATIVE, "ollama", "use one of native, vllm"),
        ("another engine's page", NATIVE, "vllm", "the page has no vllm:"),
        ("an empty page", "", "trtllm", "trtllm_"),
        ("a web page", "<html>nope</html>", "native", "not a Prometheus text page"),
        ("a value that is no number", "tkcc_engine_requests_running much\n", "native", "not a Prometheus text page"),
        ("NaN", "tkcc_engine_requests_running NaN\n", "native", "requests_running adds up to nan"),
        (
            "a sum beyond all numbers",
            'tkcc_engine_requests_total{outcome="ok"} 1e308\ntkcc_engine_requests_total{outcome="error"} 1e308\n',
            "native",
            "requests_total adds up to inf",
        ),
    ],
)
def test_an_unusable_page_is_refused_by_name(case, text, engine, message):
    with pytest.raises(ExpositionError, match=message):
        parse(text, engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_tells_at_least_the_mean_prompt_length(engine):
    signals = ENGINES[engine].signals
    assert {Signal.PROMPT_TOKENS, Signal.PROMPT_REQUESTS} <= set(signals)
    assert (Signal.HIT_TOKENS in signals) == (Signal.QUERY_TOKENS in signals)


def test_every_engine_that_a_spec_may_name_has_a_map():
    assert set(EngineType) <= set(ENGINES)
