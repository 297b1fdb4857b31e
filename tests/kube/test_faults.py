"""What the door does when the API server misbehaves in ways the real one cannot be made to show."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kmock import RawHandler, Response

from tests.conftest import refused
from tkcc.kube.cluster import WORKLOAD, Cluster
from tkcc.kube.errors import AlreadyExists, Conflict, Forbidden, Invalid, Unavailable
from tkcc.kube.resources import CONFIG_MAP, kind_of
from tkcc.kube.retry import Backoff

MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"namespace": "shop", "name": "a"}, "data": {"x": "1"}}


async def test_a_server_that_recovers_within_the_attempts_is_not_noticed(kmock: RawHandler, faulty: Cluster):
    kmock[:1] << refused(503, "ServiceUnavailable")
    kmock[1:2] << refused(429, "TooManyRequests")
    kmock[2:] << MAP
    assert await faulty.get(CONFIG_MAP, "shop", "a") == MAP


async def test_a_server_that_stays_down_is_given_up_after_the_attempts(kmock: RawHandler, faulty: Cluster):
    kmock << refused(503, "ServiceUnavailable", "etcd has no leader")
    with pytest.raises(Unavailable, match="etcd has no leader"):
        await faulty.get(CONFIG_MAP, "shop", "a")
    assert len(kmock) == 3


async def test_a_server_that_never_answers_is_a_timeout(kmock: RawHandler, faulty: Cluster):
    kmock << (lambda: asyncio.Event().wait())
    with pytest.raises(Unavailable, match="TimeoutError"):
        await faulty.get(CONFIG_MAP, "shop", "a")


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
async def test_refusals_are_told_apart_and_not_retried(kmock: RawHandler, faulty: Cluster, code, reason, want):
    kmock << refused(code, reason, "spec.x: must be 1")
    with pytest.raises(want, match=r"spec\.x: must be 1") as raised:
        await faulty.create(MAP, WORKLOAD)
    assert len(kmock) == 1
    assert "s3cret" in kmock[0].headers["Authorization"] and "s3cret" not in str(raised.value)


async def test_a_create_whose_answer_was_lost_is_done_once(kmock: RawHandler, faulty: Cluster):
    stored = {**MAP, "data": {"x": "stored"}}
    kmock["post"][:1] << refused(504, "Timeout")
    kmock["post"][1:] << refused(409, "AlreadyExists")
    kmock["get"] << stored
    assert await faulty.create_once(MAP, WORKLOAD) == stored


async def test_a_proxy_that_answers_in_text_is_unavailable_not_a_crash(kmock: RawHandler, faulty: Cluster):
    kmock << 502 << b"<html>bad gateway"
    with pytest.raises(Unavailable, match="502"):
        await faulty.get(CONFIG_MAP, "shop", "a")


async def test_an_answer_cut_in_half_is_unavailable(kmock: RawHandler, faulty: Cluster):
    kmock << Response(payload=b'{"kind": "Con', headers={"Content-Type": "application/json"})
    with pytest.raises(Unavailable, match="not JSON"):
        await faulty.get(CONFIG_MAP, "shop", "a")


@given(st.integers(1, 100), st.floats(0, 1, exclude_max=True), st.floats(0.01, 10), st.floats(1, 100))
def test_pauses_grow_stay_under_the_cap_and_never_vanish(failures: int, draw: float, first_s: float, factor: float):
    backoff = Backoff(first_s=first_s, cap_s=first_s * factor)
    pause_s = backoff.pause_s(failures, draw)
    assert 0.1 * first_s * 0.999 <= pause_s <= backoff.cap_s
    assert backoff.pause_s(failures + 1, draw) >= pause_s


def test_a_kind_outside_the_table_is_refused_by_name():
    with pytest.raises(ValueError, match="Namespace of v1"):
        kind_of({"apiVersion": "v1", "kind": "Namespace"})
