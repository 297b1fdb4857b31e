"""Which series of which engine carries which signal: data, nothing else.

A signal lists alternatives, newest name first: the first one that a page declares is used, and all its series are added
up. Only token-weighted counters serve as hit ratio (each engine's hit-rate gauge covers the last batch or the last log
interval and cannot be pooled over pods). A signal that an engine does not export is absent, never zero.

Names were read in the engines' sources: vLLM 0.33 (and a recorded 0.32 page), SGLang 0.5.23, TensorRT-LLM 050f80d,
Dynamo 0014908, text-generation-inference db931fc, llm-d-inference-scheduler 520af47. Only `native` and `vllm` were seen
running.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Signal(StrEnum):
    """What the operator reads of a serving process. Counters, but for the last."""

    PROMPT_TOKENS = "prompt_tokens"  # of finished requests
    PROMPT_REQUESTS = "prompt_requests"  # how many requests those tokens came from
    HIT_TOKENS = "hit_tokens"  # prompt tokens found in the prefix cache
    QUERY_TOKENS = "query_tokens"  # prompt tokens looked up in it
    GENERATION_TOKENS = "generation_tokens"
    REQUESTS_STARTED = "requests_started"
    REQUESTS_FINISHED = "requests_finished"  # where the engine tells failures apart they are included
    REQUESTS_RUNNING = "requests_running"  # a gauge


@dataclass(frozen=True)
class Source:
    """All series of one sample name, or those whose `label` fully matches the regular expression `value`."""

    sample: str
    label: str = ""
    value: str = ""


@dataclass(frozen=True)
class EngineMetrics:
    path: str
    prefixes: tuple[str, ...]  # at least one family of a page of this engine starts with one of them
    signals: Mapping[Signal, tuple[Source, ...]]


def _prompt(histogram: str) -> dict[Signal, tuple[Source, ...]]:
    return {
        Signal.PROMPT_TOKENS: (Source(f"{histogram}_sum"),),
        Signal.PROMPT_REQUESTS: (Source(f"{histogram}_count"),),
    }


NATIVE = EngineMetrics(
    path="/metrics",
    prefixes=("tkcc_engine_",),
    signals={
        **_prompt("tkcc_engine_request_prompt_tokens"),
        Signal.HIT_TOKENS: (Source("tkcc_engine_prefix_cache_hit_tokens_total"),),
        Signal.QUERY_TOKENS: (Source("tkcc_engine_prefix_cache_query_tokens_total"),),
        Signal.GENERATION_TOKENS: (Source("tkcc_engine_generation_tokens_total"),),
        Signal.REQUESTS_STARTED: (Source("tkcc_engine_requests_started_total"),),
        Signal.REQUESTS_FINISHED: (Source("tkcc_engine_requests_total"),),
        Signal.REQUESTS_RUNNING: (Source("tkcc_engine_requests_running"),),
    },
)

VLLM = EngineMetrics(
    path="/metrics",
    prefixes=("vllm:",),
    signals={
        **_prompt("vllm:request_prompt_tokens"),
        Signal.HIT_TOKENS: (Source("vllm:prefix_cache_hits_total"), Source("vllm:gpu_prefix_cache_hits_total")),
        Signal.QUERY_TOKENS: (Source("vllm:prefix_cache_queries_total"), Source("vllm:gpu_prefix_cache_queries_total")),
        Signal.GENERATION_TOKENS: (Source("vllm:generation_tokens_total"),),
        Signal.REQUESTS_FINISHED: (Source("vllm:request_success_total"),),
        Signal.REQUESTS_RUNNING: (Source("vllm:num_requests_running"),),
    },
)

SGLANG = EngineMetrics(
    path="/metrics",  # served with --enable-metrics only
    prefixes=("sglang:",),
    signals={
        **_prompt("sglang:prompt_tokens_histogram"),
        # The mode says where the tokens came from: `input` was computed, every `*_hit` was found in some cache.
        Signal.HIT_TOKENS: (
            Source("sglang:prefill_effective_tokens_total", "mode", ".*_hit"),
            Source("sglang:cached_tokens_total"),
        ),
        Signal.QUERY_TOKENS: (Source("sglang:prefill_effective_tokens_total"), Source("sglang:prompt_tokens_total")),
        Signal.GENERATION_TOKENS: (Source("sglang:generation_tokens_total"),),
        Signal.REQUESTS_FINISHED: (Source("sglang:num_requests_total"),),
        Signal.REQUESTS_RUNNING: (Source("sglang:num_running_reqs"),),
    },
)

TRTLLM = EngineMetrics(
    path="/prometheus/metrics",  # per-request counters need return_perf_metrics, gauges enable_iter_perf_stats
    prefixes=("trtllm_",),
    signals={
        Signal.PROMPT_TOKENS: (Source("trtllm_prompt_tokens_total"),),
        Signal.PROMPT_REQUESTS: (Source("trtllm_request_success_total"),),
        Signal.HIT_TOKENS: (Source("trtllm_prompt_cached_tokens_total"),),
        Signal.QUERY_TOKENS: (Source("trtllm_prompt_tokens_total"),),
        Signal.GENERATION_TOKENS: (Source("trtllm_generation_tokens_total"),),
        Signal.REQUESTS_FINISHED: (Source("trtllm_request_success_total"),),
        Signal.REQUESTS_RUNNING: (Source("trtllm_num_requests_running"),),
    },
)

DYNAMO = EngineMetrics(
    path="/metrics",  # of the frontend
    prefixes=("dynamo_frontend_",),
    signals={
        **_prompt("dynamo_frontend_input_sequence_tokens"),
        Signal.HIT_TOKENS: (Source("dynamo_frontend_cached_tokens_sum"),),
        Signal.QUERY_TOKENS: (Source("dynamo_frontend_input_sequence_tokens_sum"),),
        Signal.GENERATION_TOKENS: (Source("dynamo_frontend_output_tokens_total"),),
        Signal.REQUESTS_FINISHED: (Source("dynamo_frontend_requests_total"),),
        Signal.REQUESTS_RUNNING: (Source("dynamo_frontend_inflight_requests"),),
    },
)

TGI = EngineMetrics(
    path="/metrics",
    prefixes=("tgi_",),
    signals={
        **_prompt("tgi_request_input_length"),
        Signal.GENERATION_TOKENS: (Source("tgi_request_generated_tokens_sum"),),
        Signal.REQUESTS_STARTED: (Source("tgi_request_count"),),
        Signal.REQUESTS_FINISHED: (Source("tgi_request_success"),),
        Signal.REQUESTS_RUNNING: (Source("tgi_batch_current_size"),),
    },
)

LLMD_EPP = EngineMetrics(
    path="/metrics",  # of the endpoint picker
    prefixes=("inference_objective_", "inference_pool_", "inference_extension_"),
    signals={
        **_prompt("inference_objective_input_tokens"),
        Signal.HIT_TOKENS: (Source("inference_objective_prompt_cached_tokens_sum"),),
        Signal.QUERY_TOKENS: (Source("inference_objective_input_tokens_sum"),),
        Signal.GENERATION_TOKENS: (Source("inference_objective_output_tokens_sum"),),
        Signal.REQUESTS_STARTED: (Source("inference_objective_request_total"),),
        Signal.REQUESTS_FINISHED: (Source("inference_objective_request_duration_seconds_count"),),
        Signal.REQUESTS_RUNNING: (Source("inference_objective_running_requests"),),
    },
)

ENGINES: Mapping[str, EngineMetrics] = {
    "native": NATIVE,
    "vllm": VLLM,
    "sglang": SGLANG,
    "trtllm": TRTLLM,
    "dynamo": DYNAMO,
    "tgi": TGI,
    "llmd-epp": LLMD_EPP,
}
