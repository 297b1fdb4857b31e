"""The tier's HTTP API: authentication, parsing, status codes. What is done is the supervisor's matter.

Every call but /healthz needs the run's bearer token, which only the worker and this process have.
"""

import asyncio
import contextlib
import hmac
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from tkcc.api.candidate import Candidate
from tkcc.api.codec import from_dict, to_dict
from tkcc.api.report import AlphaTicket
from tkcc.api.workload import Recording, Workload
from tkcc.engine.tier.records import Stage, TierError
from tkcc.engine.tier.supervisor import Supervisor

MAX_BODY_BYTES = 32 << 20  # a recording of 20,000 long prompts
MAX_WAIT_S = 60.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SUPERVISOR = web.AppKey("supervisor", Supervisor)


def make_app(supervisor: Supervisor) -> web.Application:
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors, _authenticate])
    app[SUPERVISOR] = supervisor
    app.router.add_get("/healthz", _healthz)
    app.router.add_get("/metrics", _metrics)
    app.router.add_get("/v1/info", _info)
    app.router.add_put("/v1/workload", _put_workload)
    app.router.add_post("/v1/candidates", _post_candidate)
    app.router.add_post("/v1/judgements", _post_judgement)
    app.router.add_get("/v1/judgements/{id}", _get_judgement)
    return app


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except TierError as err:
        return web.json_response({"error": str(err)}, status=err.status)
    except ValueError as err:
        return web.json_response({"error": str(err)}, status=400)


@web.middleware
async def _authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.path != "/healthz":
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), request.app[SUPERVISOR].config.token.encode()):
            raise TierError("the bearer token of this run is asked for", 401)
    return await handler(request)


async def _healthz(request: web.Request) -> web.Response:
    supervisor = request.app[SUPERVISOR]
    body = {"state": supervisor.state, "failure": supervisor.failure}
    return web.json_response(body, status=200 if supervisor.is_healthy else 503)


async def _info(request: web.Request) -> web.Response:
    supervisor = request.app[SUPERVISOR]
    return web.json_response(supervisor.describe())


async def _put_workload(request: web.Request) -> web.Response:
    supervisor = request.app[SUPERVISOR]
    body = await _json_object(request)
    workload = from_dict(Workload, _need(body, "workload"))
    recording = from_dict(Recording, _need(body, "recording"))
    incumbent = from_dict(Candidate, body["incumbent"]) if body.get("incumbent") else None
    await supervisor.put_workload(workload, recording, incumbent, bool(body.get("estimatesOnly", False)))
    return web.json_response({"cells": supervisor.describe_cells(), "steps": supervisor.num_steps})


async def _post_candidate(request: web.Request) -> web.Response:
    build = await request.app[SUPERVISOR].submit(from_dict(Candidate, await _json_object(request)))
    return web.json_response(
        {"digest": build.candidate.digest, "state": build.state, "reason": build.reason, "build_s": build.build_s}
    )


async def _post_judgement(request: web.Request) -> web.Response:
    body = await _json_object(request)
    try:
        stage = Stage(_need(body, "stage"))
    except ValueError:
        raise TierError(f"stage: one of {', '.join(Stage)} is expected", 400) from None
    ticket = from_dict(AlphaTicket, _need(body, "ticket"))
    judgement = request.app[SUPERVISOR].judge(str(_need(body, "digest")), ticket, stage)
    return web.json_response({"id": judgement.id}, status=202)


async def _get_judgement(request: web.Request) -> web.Response:
    judgement = request.app[SUPERVISOR].judgements.get(request.match_info["id"])
    if judgement is None:
        raise TierError(f"no judgement {request.match_info['id']}", 404)
    wait_s = min(float(request.query.get("waitS", "0")), MAX_WAIT_S)
    if wait_s > 0:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(judgement.done.wait(), wait_s)
    if judgement.report is None:
        return web.json_response({"state": judgement.state, "pairs": judgement.pairs}, status=202)
    return web.json_response(to_dict(judgement.report))


async def _metrics(request: web.Request) -> web.Response:
    return web.Response(text=request.app[SUPERVISOR].metrics(), content_type="text/plain")


async def _json_object(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read() or b"{}")
    except (ValueError, RecursionError) as err:
        raise TierError(f"the body is not JSON: {err}", 400) from None
    if not isinstance(body, dict):
        raise TierError("the body must be a JSON object", 400)
    return body


def _need(body: dict[str, Any], key: str) -> Any:
    if key not in body:
        raise TierError(f"the body lacks {key!r}", 400)
    return body[key]
