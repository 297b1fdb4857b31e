"""Rounds over fake pods on real sockets: what is read, and that one bad pod spoils nothing."""

import itertools
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from tests.fakes.pod import BASELINE_DIGEST, FakePod
from tkcc.api.fields import BASELINE
from tkcc.shell.scrape import PodAddress, Scraper
from tkcc.shell.settings import Scrape

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
_octets = itertools.count(10)


@pytest.fixture
async def pod() -> AsyncIterator[Callable[..., object]]:
    pods: list[FakePod] = []

    async def make(**state: object) -> FakePod:
        pods.append(await FakePod(f"127.0.1.{next(_octets)}", **state).start())
        return pods[-1]

    yield make
    for started in pods:
        await started.stop()


@pytest.fixture
async def scraper() -> AsyncIterator[Scraper]:
    async with httpx.AsyncClient(trust_env=False) as http:
        yield Scraper(http, Scrape(timeout_s=0.5))


def at(pod: FakePod, name: str = "llama-stable-1") -> PodAddress:
    return PodAddress(name, pod.ip)


async def test_a_round_reads_identity_counters_and_finished_requests(pod, scraper):
    served = await pod()
    served.serve_requests(3, prompt=100, cached=60, output=7)
    served.running.set(2)
    [reading] = await scraper.read([at(served)], "native", {}, NOW)
    assert reading.error == ""
    assert reading.info.artifact == BASELINE
    sample = reading.sample
    assert (sample.prompt_requests, sample.prompt_tokens, sample.hit_tokens, sample.query_tokens) == (3, 300, 180, 300)
    assert (sample.output_requests, sample.output_tokens, sample.running) == (3, 21, 2)
    assert sample.at == NOW and reading.requests_started == 3
    assert sample.series == f"llama-stable-1/{int(served.started_at.timestamp())}"
    assert [request.cached_tokens for request in reading.requests] == [60, 60, 60]
    assert {request.artifact for request in reading.requests} == {BASELINE}


async def test_the_next_round_reads_only_what_finished_since(pod, scraper):
    served = await pod()
    served.serve_requests(2, prompt=10)
    [first] = await scraper.read([at(served)], "native", {}, NOW)
    served.serve_requests(1, prompt=99)
    [second] = await scraper.read([at(served)], "native", {first.series: first.next_seq}, NOW)
    assert [request.prompt_tokens for request in second.requests] == [99]


async def test_a_restarted_engine_is_another_series_and_is_read_from_its_start(pod, scraper):
    served = await pod()
    served.serve_requests(2, prompt=10)
    [before] = await scraper.read([at(served)], "native", {}, NOW)
    again = await pod(started_at=served.started_at + timedelta(seconds=60))
    again.serve_requests(1, prompt=20)
    [after] = await scraper.read([at(again)], "native", {before.series: before.next_seq}, NOW)
    assert after.series != before.series
    assert [request.prompt_tokens for request in after.requests] == [20]


async def test_an_artifact_is_told_from_the_baseline(pod, scraper):
    served = await pod(artifact_digest="a" * 64, baseline_digest=BASELINE_DIGEST)
    served.serve_requests(1, prompt=5)
    [reading] = await scraper.read([at(served)], "native", {}, NOW)
    assert reading.info.artifact == "a" * 64
    assert reading.requests[0].artifact == "a" * 64


async def test_bad_pods_are_errors_and_the_others_are_read(pod, scraper):
    good, broken = await pod(), await pod(is_broken=True)
    addresses = [at(broken, "broken"), PodAddress("nobody", "127.0.1.250"), at(good, "good")]
    readings = await scraper.read(addresses, "native", {}, NOW)
    assert [reading.pod for reading in readings] == ["broken", "nobody", "good"]
    assert "500" in readings[0].error and readings[0].sample is None
    assert readings[1].error.startswith("nobody: ConnectError")
    assert readings[2].error == "" and readings[2].sample


async def test_a_pod_that_cannot_load_its_model_says_why(pod, scraper):
    pods = [await pod(load_error="/models/x: no such model directory"), await pod(load_error="")]
    readings = await scraper.read([at(one) for one in pods], "native", {}, NOW)
    assert [reading.load_error for reading in readings] == ["/models/x: no such model directory", ""]
    assert all("the model is loading" in reading.error for reading in readings)


async def test_a_page_of_another_engine_is_an_error_that_says_what_was_expected(pod, scraper):
    served = await pod()
    [reading] = await scraper.read([at(served)], "vllm", {}, NOW)
    assert "vllm:" in reading.error


async def test_recordings_come_from_pods_that_record(pod, scraper):
    silent, recording = await pod(), await pod(is_recording=True)
    recording.serve_requests(4, prompt=50, cached=16)
    found = await scraper.recordings([at(silent), at(recording)], datetime.fromtimestamp(0, UTC), 3)
    assert [len(item.requests) for item in found] == [3]
    assert found[0].started_at_ms > 0


async def test_a_pod_that_floods_is_an_error_not_the_operators_end(pod, scraper, monkeypatch):
    served = await pod()
    served.serve_requests(200, prompt=10)
    monkeypatch.setattr("tkcc.shell.scrape.MAX_ANSWER_BYTES", 10_000)
    [reading] = await scraper.read([at(served)], "native", {}, NOW)
    assert "answered more than 10000 bytes" in reading.error
