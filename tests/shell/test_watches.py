"""The liveness of watches, with a clock that the test turns and a scripted HTTP server for the signs of life."""

import aiohttp
from kmock import RawHandler

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


async def test_an_answered_request_is_a_sign_of_life_and_a_refused_one_is_not(kmock: RawHandler):
    seen: list[str] = []
    watches = Watches(["pods", "jobs"], 60, Clock(), seen.append)
    kmock["get /api/v1/namespaces/shop/pods"] << 403
    kmock << 200
    async with aiohttp.ClientSession(kmock.url, trace_configs=[watches.trace()]) as session:
        for path in ("/api/v1/pods", "/apis/batch/v1/namespaces/shop/jobs", "/api/v1/namespaces/shop/pods"):
            async with session.get(path):
                pass
    assert seen == ["pods", "shop/jobs"]


async def test_a_watch_that_ends_lives_while_it_is_answered_anew(kmock: RawHandler):
    clock = Clock()
    watches = Watches(["pods"], 60, clock)
    kmock["watch v1/pods"][:3] << ({"type": "ADDED", "object": {}},)
    kmock["watch v1/pods"][3:] << 500
    stalled = []
    async with aiohttp.ClientSession(kmock.url, trace_configs=[watches.trace()]) as session:
        for _ in range(5):
            async with session.get("/api/v1/pods?watch=true") as watch:
                await watch.read()
            clock.now_s += 40
            stalled.append(watches.stalled())
    assert stalled == [{}, {}, {}, {"pods": 80}, {"pods": 120}]
