"""A serving pod as the operator sees it: the admin port and greedy completions, with figures that a test sets.

It listens on an address of its own (127.0.0.x), because pods share port numbers. tests/shell/test_pod_contract.py
asks it and the real engine the same questions.
"""

import asyncio
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

BASELINE_DIGEST = "b" * 64


@dataclass
class FakePod:
    ip: str
    artifact_digest: str = BASELINE_DIGEST
    baseline_digest: str = BASELINE_DIGEST
    is_recording: bool = False
    is_ready: bool = True
    is_broken: bool = False  # answers 500 on the admin port
    clock_lag_s: float = 0.0  # how far its node's clock is behind
    lies: dict[str, str] = field(default_factory=dict)  # path of the admin port -> what it answers there instead
    load_error: str | None = None  # it has no model: why, or "" while it loads
    words: tuple[str, ...] = ("a", "b", "c", "d")  # its greedy answer to everything
    preference_nats: float = 2.0  # how much more likely each of its tokens is than the next best
    started_at: datetime = field(default_factory=lambda: datetime.fromtimestamp(time.time(), UTC))
    requests: list[dict[str, Any]] = field(default_factory=list)
    recorded: list[dict[str, Any]] = field(default_factory=list)
    probes_seen: int = 0

    def __post_init__(self) -> None:
        self._runners: list[web.AppRunner] = []
        self._registry = CollectorRegistry()
        reg = self._registry
        self._started = Counter("tkcc_engine_requests_started", "", registry=reg)
        self._finished = Counter("tkcc_engine_requests", "", ("outcome",), registry=reg)
        self._query = Counter("tkcc_engine_prefix_cache_query_tokens", "", registry=reg)
        self._hit = Counter("tkcc_engine_prefix_cache_hit_tokens", "", registry=reg)
        self._generated = Counter("tkcc_engine_generation_tokens", "", registry=reg)
        self._prompt = Histogram("tkcc_engine_request_prompt_tokens", "", registry=reg)
        self._ttft = Histogram("tkcc_engine_time_to_first_token_seconds", "", registry=reg)
        self._tpot = Histogram("tkcc_engine_time_per_output_token_seconds", "", registry=reg)
        self.running = Gauge("tkcc_engine_requests_running", "", registry=reg)

    def serve_requests(
        self, count: int, *, prompt: int, cached: int = 0, output: int = 10, tpot_s: float = 0.01
    ) -> None:
        """As if `count` users had been answered just now."""
        for _ in range(count):
            self._started.inc()
            self._finished.labels("ok").inc()
            self._prompt.observe(prompt)
            self._query.inc(prompt)
            self._hit.inc(cached)
            self._generated.inc(output)
            self._ttft.observe(0.05)
            self._tpot.observe(tpot_s)
            at_ms = int(self._clock_s() * 1000)
            self.requests.append(
                {
                    "seq": len(self.requests),
                    "startedAtMs": at_ms,
                    "promptTokens": prompt,
                    "cachedTokens": cached,
                    "outputTokens": output,
                    "ttftS": 0.05,
                    "tpotS": tpot_s,
                    "outcome": "ok",
                }
            )
            if self.is_recording:
                self.recorded.append(
                    {"at": at_ms, "promptTokens": prompt, "outputTokens": output, "cachedTokens": cached}
                )

    async def start(self) -> "FakePod":
        admin = web.Application(middlewares=[self._break])
        admin.router.add_get("/health", self._health)
        admin.router.add_get("/metrics", self._metrics)
        admin.router.add_get("/tkcc/info", self._info)
        admin.router.add_get("/tkcc/requests", self._requests)
        admin.router.add_get("/tkcc/recording", self._recording)
        public = web.Application()
        public.router.add_get("/health", self._health)
        public.router.add_post("/v1/completions", self._completions)
        for app, port in ((public, 8000), (admin, 8001)):
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, self.ip, port).start()
            self._runners.append(runner)
        return self

    async def stop(self) -> None:
        await asyncio.gather(*(runner.cleanup() for runner in self._runners))
        self._runners = []

    @web.middleware
    async def _break(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.is_broken:
            return web.Response(status=500, text="broken")
        if request.path in self.lies:
            return web.Response(text=self.lies[request.path])
        response: web.StreamResponse = await handler(request)
        response.headers["Date"] = formatdate(self._clock_s(), usegmt=True)
        return response

    def _clock_s(self) -> float:
        return time.time() - self.clock_lag_s

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.is_ready else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": "text/plain"})

    async def _info(self, request: web.Request) -> web.Response:
        if self.load_error is not None:
            body = {"error": "the model is loading", "loadError": self.load_error}
            return web.json_response(body, status=503)
        return web.json_response(
            {
                "artifactDigest": self.artifact_digest,
                "baselineDigest": self.baseline_digest,
                "modelDigest": "m" * 64,
                "engineVersion": "0.1.0",
                "device": "cpu: fake",
                "dtype": "float32",
                "startedAt": self.started_at.isoformat(),
                "blockTokens": 16,
                "recording": self.is_recording,
            }
        )

    async def _requests(self, request: web.Request) -> web.Response:
        since = int(request.query.get("since", "0"))
        found = [item for item in self.requests if item["seq"] >= since]
        return web.json_response({"next": len(self.requests), "dropped": 0, "requests": found})

    async def _recording(self, request: web.Request) -> web.Response:
        if not self.is_recording:
            return web.json_response({"error": {"message": "recording is off"}}, status=403)
        since_ms, most = int(request.query.get("sinceMs", "0")), int(request.query.get("max", "1000"))
        found = [item for item in self.recorded if item["at"] >= since_ms][-most:]
        start_ms = found[0]["at"] if found else 0
        requests = [
            {"arrivalMs": item["at"] - start_ms, "blockHashes": [], **{k: v for k, v in item.items() if k != "at"}}
            for item in found
        ]
        return web.json_response(
            {"blockTokens": 16, "source": "recorded", "requests": requests, "startedAtMs": start_ms}
        )

    async def _completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.probes_seen += request.headers.get("x-tkcc-probe") == "1"
        words = self.words[: body["max_tokens"]]
        tops = [{word: -0.1, "?": -0.1 - self.preference_nats} for word in words]
        logprobs = {"tokens": list(words), "token_logprobs": [-0.1] * len(words), "top_logprobs": tops}
        return web.json_response(
            {"choices": [{"index": 0, "text": "".join(words), "logprobs": logprobs, "finish_reason": "length"}]}
        )
