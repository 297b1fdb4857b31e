"""The operator's own HTTP port: /metrics for Prometheus, /healthz for the liveness probe, /readyz."""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

Problems = Callable[[], list[str]]  # what is wrong now, for people; empty: all is well


class Server:
    def __init__(self, registry: CollectorRegistry, problems: Problems, is_ready: Callable[[], bool]):
        self._registry = registry
        self._problems = problems
        self._is_ready = is_ready
        self._runner: web.AppRunner | None = None

    async def start(self, port: int, host: str = "0.0.0.0") -> None:
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()

    async def stop(self) -> None:
        if self._runner:
            await self._runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _healthz(self, request: web.Request) -> web.Response:
        problems = self._problems()
        return web.Response(status=503 if problems else 200, text="\n".join(problems or ["ok"]) + "\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        ready = self._is_ready()
        return web.Response(status=200 if ready else 503, text="ok\n" if ready else "starting\n")
