"""The admin port, for the operator and probes only: health, metrics, what is served, finished requests, recording."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from tkcc.api.codec import to_json
from tkcc.engine.serve.accounts import Accounts
from tkcc.engine.serve.api import PublicApi

MAX_RECORDING = 20_000  # requests in one answer


class AdminApi:
    def __init__(
        self,
        public: PublicApi,
        accounts: Accounts,
        info: Callable[[], dict[str, Any] | None],
        load_error: Callable[[], str],
    ) -> None:
        """`info`: None until the model is loaded; `load_error`: why it was not, the last time that was tried."""
        self._public, self._accounts, self._info, self._load_error = public, accounts, info, load_error

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1024)
        app.router.add_get("/health", self._public.health)
        app.router.add_get("/metrics", self._public.metrics)
        app.router.add_get("/tkcc/info", self.info)
        app.router.add_get("/tkcc/requests", self.requests)
        app.router.add_get("/tkcc/recording", self.recording)
        return app

    async def info(self, request: web.Request) -> web.Response:
        info = self._info()
        if info is None:
            body = {"error": "the model is loading", "loadError": self._load_error()}
            return web.json_response(body, status=503)
        return web.json_response(info)

    async def requests(self, request: web.Request) -> web.Response:
        return web.json_response(self._accounts.log.since(_integer(request, "since", 0)))

    async def recording(self, request: web.Request) -> web.Response:
        recorder = self._accounts.recorder
        if recorder is None:
            return web.json_response({"error": "recording is off: start with --record N"}, status=403)
        limit = min(_integer(request, "max", MAX_RECORDING), MAX_RECORDING)
        recording = recorder.since(_integer(request, "sinceMs", 0), limit)
        return web.Response(text=to_json(recording), content_type="application/json")


def utc_iso(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat()


def _integer(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    if not text.isdecimal() or len(text) > 15:
        raise web.HTTPBadRequest(text=f"{name}={text!r}: a whole number is expected")
    return int(text)
