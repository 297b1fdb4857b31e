"""Prometheus metrics of one serving engine, in a registry of its own. Names are a contract: docs/architecture.md."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from tkcc.engine.serve.request import Outcome

# The field's usual ones: 1-2-5 for tokens; seconds as the large servers have them. Means come from _sum and _count.
_TOKEN_BUCKETS = [m * 10**e for e in range(6) for m in (1, 2, 5)] + [1_000_000]
_TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0),
)
_TPOT_BUCKETS_S = (
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
    80.0,
)


class Metrics:
    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"tkcc_engine_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: list[int] | tuple[float, ...]) -> Histogram:
            return Histogram(f"tkcc_engine_{name}", text, buckets=tuple(buckets), registry=registry)

        self.started = counter("requests_started", "Requests taken into the queue")
        self.requests = counter("requests", "Requests ended, by outcome", ("outcome",))
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests whose prefill is done")
        self.generation_tokens = counter("generation_tokens", "Tokens generated")
        self.query_tokens = counter("prefix_cache_query_tokens", "Prompt tokens looked up in the prefix cache")
        self.hit_tokens = counter("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache")
        self.preemptions = counter("preemptions", "Times that a request lost its KV blocks and was computed anew")
        self.prompt_length = histogram("request_prompt_tokens", "Prompt tokens per request", _TOKEN_BUCKETS)
        self.generation_length = histogram("request_generation_tokens", "Tokens generated per request", _TOKEN_BUCKETS)
        self.ttft = histogram("time_to_first_token_seconds", "Arrival to first token", _TTFT_BUCKETS_S)
        self.tpot = histogram("time_per_output_token_seconds", "Mean per request after its first", _TPOT_BUCKETS_S)
        self.cold_start = Gauge(
            "tkcc_engine_cold_start_seconds", "Time of each start-up phase", ("phase",), registry=registry
        )
        for outcome in Outcome:  # series that exist from the start: a rate over a missing one is no data
            self.requests.labels(outcome.value)

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge `tkcc_engine_<name>` that is read at each scrape."""
        Gauge(f"tkcc_engine_{name}", text, registry=self.registry).set_function(read)

    def text(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)
