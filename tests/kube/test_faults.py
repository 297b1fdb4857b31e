"""What the door does when the API server misbehaves in ways the real one cannot be made to show."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.aio.client import ApiClient, Configuration

from tkcc.kube.cluster import WORKLOAD, Cluster
from tkcc.kube.errors import AlreadyExists, Conflict, Forbidden, Invalid, Unavailable
from tkcc.kube.resources import CONFIG_MAP, kind_of
from tkcc.kube.retry import Backoff

QUICK = Backoff(attempts=3, first_s=0.001, cap_s=0.002)
MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"namespace": "shop", "name": "a"}, "data": {"x": "1"}}


class Faulty:
    """Answers with `script` in turn, the last one for ever. "hang" never answers."""

    def __init__(self) -> None:
        self.script: list[tuple[int, object] | str] = []
        self.calls: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        step = self.script[min(len(self.calls), len(self.script) - 1)]
        self.calls.append(f"{request.method} {request.path}")
        if step == "hang":
            await asyncio.Event().wait()
        code, body = step
        if isinstance(body, str):
            return web.Response(status=code, text=body, content_type="application/json")
        return web.json_response(body, status=code)


def refused(code: int, reason: str, message: str = "because") -> tuple[int, object]:
    return code, {"kind": "Status", "code": code, "reason": reason, "message": message}


@pytest.fixture
async def api() -> Faulty:
    return Faulty()


@pytest.fixture
async def cluster(api: Faulty) -> AsyncIterator[Cluster]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.answer)
    async with TestServer(app, host="127.0.0.1") as server:
        configuration = Configuration(host=str(server.make_url("")).rstrip("/"))
        configuration.api_key["BearerToken"] = "bearer s3cret"
        client = ApiClient(configuration)
        yield Cluster(client, timeout_s=0.5, backoff=QUICK)
        await client.close()


async def test_a_server_that_recovers_within_the_attempts_is_not_noticed(api: Faulty, cluster: Cluster):
    api.script = [refused(503, "ServiceUnavailable"), refused(429, "TooManyRequests"), (200, MAP)]
    assert await cluster.get(CONFIG_MAP, "shop", "a") == MAP


async def test_a_server_that_stays_down_is_given_up_after_the_attempts(api: Faulty, cluster: Cluster):
    api.script = [refused(503, "ServiceUnavailable", "etcd has no leader")]
    with pytest.raises(Unavailable, match="etcd has no leader"):
        await cluster.get(CONFIG_MAP, "shop", "a")
    assert len(api.calls) == QUICK.attempts


async def test_a_server_that_never_answers_is_a_timeout(api: Faulty, cluster: Cluster):
    api.script = ["hang"]
    with pytest.raises(Unavailable, match="TimeoutError"):
        await cluster.get(CONFIG_MAP, "shop", "a")


@pytest.mark.parametrize(
    "code, reason, want",
    [
        (409, "Conflict", Conflict),
        (409, "AlreadyExists", AlreadyExists),
        (401, "Unauthorized", Forbidden),
        (403, "Forbidden", Forbidden),
        (422, "Invalid", Invalid),
        (400, "BadRequest", Invalid),
    ],
)
async def test_refusals_are_told_apart_and_not_retried(api: Faulty, cluster: Cluster, code, reason, want):
    api.script = [refused(code, reason, "spec.x: must be 1")]
    with pytest.raises(want, match=r"spec\.x: must be 1") as raised:
        await cluster.create(MAP, WORKLOAD)
    assert len(api.calls) == 1
    assert "s3cret" not in str(raised.value)


async def test_a_create_whose_answer_was_lost_is_done_once(api: Faulty, cluster: Cluster):
    stored = {**MAP, "data": {"x": "stored"}}
    api.script = [refused(504, "Timeout"), refused(409, "AlreadyExists"), (200, stored)]
    assert await cluster.create_once(MAP, WORKLOAD) == stored


async def test_a_proxy_that_answers_in_text_is_unavailable_not_a_crash(api: Faulty, cluster: Cluster):
    api.script = [(502, "<html>bad gateway")]
    with pytest.raises(Unavailable, match="502"):
        await cluster.get(CONFIG_MAP, "shop", "a")


async def test_an_answer_cut_in_half_is_unavailable(api: Faulty, cluster: Cluster):
    api.script = [(200, '{"kind": "Con')]
    with pytest.raises(Unavailable, match="not JSON"):
        await cluster.get(CONFIG_MAP, "shop", "a")


@given(st.integers(1, 100), st.floats(0, 1, exclude_max=True), st.floats(0.01, 10), st.floats(1, 100))
def test_pauses_grow_stay_under_the_cap_and_never_vanish(failures: int, draw: float, first_s: float, factor: float):
    backoff = Backoff(first_s=first_s, cap_s=first_s * factor)
    pause_s = backoff.pause_s(failures, draw)
    assert 0.1 * first_s * 0.999 <= pause_s <= backoff.cap_s
    assert backoff.pause_s(failures + 1, draw) >= pause_s


def test_a_kind_outside_the_table_is_refused_by_name():
    with pytest.raises(ValueError, match="Namespace of v1"):
        kind_of({"apiVersion": "v1", "kind": "Namespace"})
