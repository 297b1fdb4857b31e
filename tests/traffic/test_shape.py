"""Reuse in traces, and what scaling and thinning keep of it."""

import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tkcc.traffic.prompts import DEFAULT_VOCAB, VocabRange, prompt_ids, to_recording
from tkcc.traffic.reuse import infinite_hit_ratio, lru_hit_ratio, sessions
from tkcc.traffic.shape import HIT_RATIO_TOLERANCE, Plan, repeat, scale, thin
from tkcc.traffic.trace import Trace, TraceError, TraceRequest, read

SHIPPED = Path(__file__).parents[2] / "examples" / "traces"
CHAT, AGENT = (read(SHIPPED / f"{name}.jsonl.gz") for name in ("chat", "coding-agent"))


def _trace(*rows: tuple[int, tuple[int, ...]], block_tokens: int = 10) -> Trace:
    return Trace(tuple(TraceRequest(float(i), p, 4, ids) for i, (p, ids) in enumerate(rows)), block_tokens)


def _sent_hit_ratio(plan: Plan, block_tokens: int) -> float:
    """Of an infinite cache with blocks of `block_tokens`, over the very token ids that are sent."""
    seen: set[tuple[int, ...]] = set()
    hits = total = 0
    for request in plan.requests:
        ids = tuple(prompt_ids(request, DEFAULT_VOCAB))
        prefixes = [ids[:end] for end in range(block_tokens, len(ids) + 1, block_tokens)]
        hits += block_tokens * sum(1 for _ in itertools.takewhile(seen.__contains__, prefixes))
        seen.update(prefixes)
        total += len(ids)
    return hits / total


def test_hit_ratio_counts_whole_leading_blocks():
    trace = _trace((25, (1, 2)), (25, (1, 2)), (25, (1, 3)), (10, (3,)), (10, (9,)))
    assert infinite_hit_ratio(trace) == pytest.approx((20 + 10 + 10) / 95)
    assert infinite_hit_ratio(_trace((7, ()), (7, ()), block_tokens=0)) == 0


def test_a_partial_last_block_saves_no_more_than_the_prompt():
    assert infinite_hit_ratio(_trace((15, (1, 2)), (15, (1, 2)))) == 0.5


def test_lru_forgets_what_was_used_least_recently_tail_first():
    trace = _trace((30, (1, 2, 3)), (20, (7, 8)), (30, (1, 2, 3)))
    assert lru_hit_ratio(trace, 50) == pytest.approx(30 / 80)
    assert lru_hit_ratio(trace, 40) == pytest.approx(20 / 80)  # block 3, the tail, made room
    assert lru_hit_ratio(trace, 0) == 0


def test_sessions_are_told_or_share_a_block_that_not_everybody_has():
    system = 0
    rows = [(30, (system, i // 3 + 1, 1000 + i)) for i in range(60)]
    assert sessions(_trace(*rows).requests) == [i // 3 for i in range(60)]
    told = [TraceRequest(0.0, 1, 1, (5,), session=s) for s in (8, 2, 8)]
    assert sessions(told) == [0, 1, 0]
    assert sessions(_trace((5, ()), (5, ())).requests) == [0, 1]


@pytest.mark.parametrize("trace", [CHAT, AGENT], ids=["chat", "coding-agent"])
@pytest.mark.parametrize("length_factor", [0.125, 0.25, 1.0])
def test_what_is_sent_hits_an_infinite_cache_as_the_source_did(trace, length_factor):
    plan = scale(trace, length_factor, 2.0)
    assert plan.hit_ratio == pytest.approx(plan.source_hit_ratio, abs=0.002)
    assert _sent_hit_ratio(plan, block_tokens=16) == pytest.approx(plan.source_hit_ratio, abs=HIT_RATIO_TOLERANCE)
    assert plan.mean_prompt_tokens == pytest.approx(trace.mean_prompt_tokens * length_factor, rel=0.01)
    assert plan.mean_output_tokens == pytest.approx(trace.mean_output_tokens * length_factor, rel=0.02)
    assert plan.span_s == pytest.approx(trace.span_s * 2.0)


@pytest.mark.parametrize("fraction", [0.7, 0.4])
def test_thinning_keeps_sessions_whole_and_the_hit_ratio(fraction):
    kept = thin(CHAT, fraction)
    assert abs(infinite_hit_ratio(kept) - infinite_hit_ratio(CHAT)) <= HIT_RATIO_TOLERANCE
    assert len(kept.requests) == pytest.approx(fraction * len(CHAT.requests), rel=0.15)
    names = {request.session for request in kept.requests}
    assert len(kept.requests) == sum(request.session in names for request in CHAT.requests)
    assert thin(CHAT, fraction) == kept  # nothing random in it


def test_thinning_to_a_handful_is_refused_with_the_numbers():
    with pytest.raises(TraceError, match="of 20 sessions changes the hit ratio"):
        thin(AGENT, 0.01)


def test_the_two_demo_workloads_are_told_apart_by_both_signals_of_drift():
    chat, agent = (scale(trace, 0.125, 1.0) for trace in (CHAT, AGENT))
    assert agent.mean_prompt_tokens / chat.mean_prompt_tokens > 1.25
    logit = {plan: math.log(plan.hit_ratio / (1 - plan.hit_ratio)) for plan in (chat, agent)}
    assert logit[agent] - logit[chat] > 1.0


def test_a_recording_of_the_plan_has_its_hits():
    plan = scale(AGENT, 0.125, 1.0)
    recording = to_recording(plan, block_tokens=16)
    cached = sum(request.cached_tokens for request in recording.requests)
    total = sum(request.prompt_tokens for request in recording.requests)
    assert cached / total == pytest.approx(_sent_hit_ratio(plan, 16), abs=0.001)
    assert all(r.cached_tokens < r.prompt_tokens for r in recording.requests)
    assert all(len(r.block_hashes) == r.prompt_tokens // 16 for r in recording.requests)
    assert max(h for r in recording.requests for h in r.block_hashes) < 2**48


def test_a_pass_that_is_repeated_meets_a_cold_cache_and_keeps_the_pace():
    plan = scale(_trace((20, (1, 2)), (20, (1, 2))), 1.0, 3.0)
    first, second = itertools.islice(repeat(plan), 2)
    assert first == plan
    assert [r.arrival_s for r in first.requests + second.requests] == [0.0, 3.0, 6.0, 9.0]
    ids = [tuple(prompt_ids(r, DEFAULT_VOCAB)) for r in first.requests + second.requests]
    assert ids[0] == ids[1] != ids[2] == ids[3]
    assert [r.index for r in second.requests] == [2, 3]


def test_long_prompts_are_left_out_and_the_plan_says_what_that_did():
    plan = scale(_trace((20, (1, 2)), (90, (1, 2)), (20, (1, 2))), 0.5, 1.0, max_prompt_tokens=10)
    assert [request.prompt_tokens for request in plan.requests] == [10, 10]
    assert (plan.hit_ratio, plan.source_hit_ratio) == (0.5, pytest.approx(40 / 130))
    with pytest.raises(TraceError, match="lower the length factor or raise --max-prompt"):
        scale(_trace((20, ())), 1.0, 1.0, max_prompt_tokens=5)


@pytest.mark.parametrize("factors", [(0.0, 1.0), (1.0, -1.0), (math.nan, 1.0), (1.0, math.inf)])
def test_factors_that_mean_nothing_are_refused(factors):
    with pytest.raises(TraceError, match="expected a positive number"):
        scale(CHAT, *factors)


_ROWS = st.lists(
    st.tuples(st.integers(1, 200), st.lists(st.integers(0, 5), max_size=6).map(tuple)), min_size=1, max_size=8
)


@given(_ROWS, st.floats(0.01, 2), st.integers(1, 40))
@settings(max_examples=200)
def test_prompts_have_the_planned_length_and_equal_prefixes_have_equal_tokens(rows, factor, block_tokens):
    plan = scale(_trace(*rows, block_tokens=block_tokens), factor, 1.0)
    prompts = [prompt_ids(request, DEFAULT_VOCAB) for request in plan.requests]
    for (tokens, _), request, ids in zip(rows, plan.requests, prompts, strict=True):
        assert len(ids) == request.prompt_tokens == max(1, round(tokens * factor))
        assert request.output_tokens >= 1
        assert all(DEFAULT_VOCAB.first <= token <= DEFAULT_VOCAB.last for token in ids)
    for (a, ids_a), (b, ids_b) in itertools.combinations(zip(plan.requests, prompts, strict=True), 2):
        shared = 0
        for (block_a, tokens_a), (block_b, tokens_b) in zip(a.spans, b.spans, strict=False):
            if block_a != block_b:
                break
            shared += min(tokens_a, tokens_b)
            if tokens_a != tokens_b:
                break
        assert ids_a[:shared] == ids_b[:shared]


@pytest.mark.parametrize("bounds", [(-1, 5), (5, 5), (9, 2)])
def test_an_empty_vocabulary_range_is_refused(bounds):
    with pytest.raises(TraceError, match="expected FIRST:LAST"):
        VocabRange(*bounds)
