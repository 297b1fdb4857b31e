"""The liveness of watches, with a clock that the test turns and a real HTTP server for the signs of life."""

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from tkcc.shell.watches import Watches


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_watch_that_never_came_stalls_and_one_that_speaks_does_not():
    clock = Clock()
    watches = Watches(["pods", "jobs"], 60, clock)
    clock.now_s += 50
    watches.saw("pods")
    assert watches.stalled() == {}
    clock.now_s += 20
    assert watches.stalled() == {"jobs": 70}
    watches.saw("jobs")
    assert watches.stalled() == {}


def test_each_namespace_is_watched_for_itself():
    clock = Clock()
    watches = Watches(["pods"], 60, clock)
    watches.saw("pods", "a")
    watches.saw("pods", "b")
    clock.now_s += 61
    watches.saw("pods", "b")
    assert watches.stalled() == {"a/pods": 61}


def test_resources_that_nobody_watches_do_not_count():
    watches = Watches(["pods"], 60, Clock())
    watches.saw("namespaces")
    assert watches.stalled() == {}


async def test_an_answered_request_is_a_sign_of_life_and_a_refused_one_is_not():
    seen: list[str] = []
    watches = Watches(["pods", "jobs"], 60, Clock(), seen.append)
    app = web.Application()
    app.router.add_get("/api/v1/namespaces/shop/pods", _refuse)
    app.router.add_get("/{path:.*}", _answer)
    async with TestServer(app) as server, aiohttp.ClientSession(trace_configs=[watches.trace()]) as session:
        for path in ("/api/v1/pods", "/apis/batch/v1/namespaces/shop/jobs", "/api/v1/namespaces/shop/pods"):
            async with session.get(server.make_url(path)):
                pass
    assert seen == ["pods", "shop/jobs"]


async def _answer(request: web.Request) -> web.Response:
    return web.Response()


async def _refuse(request: web.Request) -> web.Response:
    return web.Response(status=403)
