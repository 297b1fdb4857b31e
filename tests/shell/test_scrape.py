"""Rounds over fake pods on real sockets: what is read, and that one bad pod spoils nothing."""

import itertools
import json
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from tests.fakes.pod import BASELINE_DIGEST, FakePod
from tkcc.api.fields import BASELINE
from tkcc.shell.scrape import CLOCK_ERROR, PodAddress, Scraper, clock_lag
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


@pytest.mark.parametrize("lag_s", [0, 30, -30, 3000])
async def test_requests_are_dated_by_our_clock_whatever_the_pods_node_thinks(pod, scraper, lag_s):
    before_s = time.time()
    served = await pod(clock_lag_s=lag_s)
    served.serve_requests(1, prompt=10)
    [reading] = await scraper.read([at(served)], "native", {}, NOW)
    [request] = reading.requests
    assert before_s - CLOCK_ERROR.total_seconds() <= request.started_at.timestamp() <= time.time()


@pytest.mark.parametrize("date", ["", "yesterday", "Fri, 31 Dec 9999 23:59:59 -1200", "Mon, 01 Jan 1900 00:00:00 GMT"])
def test_what_is_no_clock_moves_nothing(date):
    assert clock_lag(date, NOW) == timedelta(0)


INFO = {
    "artifactDigest": "a" * 64,
    "baselineDigest": "b" * 64,
    "modelDigest": "m" * 64,
    "engineVersion": "0.1.0",
    "startedAt": "2026-01-02T03:04:05Z",
}
REQUEST = {
    "seq": 0,
    "startedAtMs": 1767323045000,
    "promptTokens": 100,
    "cachedTokens": 0,
    "outputTokens": 10,
    "outcome": "ok",
    "ttftS": 0.05,
    "tpotS": 0.01,
}


def info(**lies: object) -> dict[str, str]:
    return {"/tkcc/info": json.dumps(INFO | lies)}


def finished(**lies: object) -> dict[str, str]:
    return {"/tkcc/requests": json.dumps({"next": 1, "requests": [REQUEST | lies]})}


def metrics(count: str) -> dict[str, str]:
    return {"/metrics": f"# TYPE tkcc_engine_requests_started counter\ntkcc_engine_requests_started_total {count}\n"}


@pytest.mark.parametrize(
    "case, lies, is_believed",
    [
        ("all is well", info() | finished() | metrics("7"), True),
        ("it began in no zone", info(startedAt="2026-01-02T03:04:05"), False),
        ("it began at the end of time", info(startedAt="9999-12-31T23:59:59Z"), False),
        ("a digest that is a book", info(artifactDigest="a" * 65), False),
        ("a request in the year 33658", finished(startedAtMs=10**15), False),
        ("more tokens than there are", finished(promptTokens=10**40), False),
        ("fewer tokens than none", finished(cachedTokens=-1), False),
        ("a time that is no number", finished(ttftS=float("nan")), False),
        ("a time without end", finished(tpotS=1e300), False),
        ("an outcome that is a book", finished(outcome="ok" * 100), False),
        ("more requests than there are", metrics("1e40"), False),
        ("fewer requests than none", metrics("-1"), False),
        ("a page that is no page", {"/metrics": "{"}, False),
        ("a page without end", {"/metrics": "# padding\n" * 300_000}, False),
        ("no JSON", {"/tkcc/info": "hello"}, False),
    ],
)
async def test_what_a_pod_cannot_mean_is_an_error(pod, scraper, case, lies, is_believed):
    good, liar = await pod(), await pod(lies=lies)
    readings = await scraper.read([at(liar, "liar"), at(good, "good")], "native", {}, NOW)
    assert [not reading.error for reading in readings] == [is_believed, True], case
    assert [bool(reading.sample) for reading in readings] == [is_believed, True], case


@pytest.mark.parametrize(
    "case, first, then",
    [
        ("a page", metrics("7x"), metrics("8 y z")),
        ("bytes", metrics("\xff"), {"/metrics": "\n\n\xfe\x00"}),
        ("JSON", {"/tkcc/info": "hello"}, {"/tkcc/info": '{"artifactDigest": '}),
        ("a field", finished(promptTokens=-1), finished(seq=-2, ttftS=-1.0)),
        ("counts", metrics("-1"), metrics("-2")),
    ],
)
async def test_nonsense_that_changes_is_told_in_words_that_do_not(pod, scraper, case, first, then):
    liar, told = await pod(), []
    for liar.lies in (first, then):
        [reading] = await scraper.read([at(liar)], "native", {}, NOW)
        told.append(reading.error)
    assert told[0] and told[0] == told[1], case


async def test_a_time_too_short_to_be_one_is_none(pod, scraper):
    liar = await pod(lies=finished(ttftS=5e-324))
    [reading] = await scraper.read([at(liar)], "native", {}, NOW)
    assert [request.ttft_s for request in reading.requests] == [0.0]


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
    found = [one async for one in scraper.recordings([at(silent), at(recording)], datetime.fromtimestamp(0, UTC), 3)]
    assert [len(item.requests) for item in found] == [3]
    assert found[0].started_at_ms > 0


async def test_a_pod_that_floods_is_an_error_not_the_operators_end(pod, scraper, monkeypatch):
    served = await pod()
    served.serve_requests(200, prompt=10)
    monkeypatch.setattr("tkcc.shell.scrape.MAX_ANSWER_BYTES", 10_000)
    [reading] = await scraper.read([at(served)], "native", {}, NOW)
    assert "answered more than 10000 bytes" in reading.error


async def test_of_a_recording_that_is_too_long_the_newest_requests_are_taken(pod, scraper, monkeypatch):
    recording = await pod(is_recording=True)
    for prompt in range(200):
        recording.serve_requests(1, prompt=prompt)
    monkeypatch.setattr("tkcc.shell.scrape.MAX_ANSWER_BYTES", 10_000)
    [found] = [one async for one in scraper.recordings([at(recording)], datetime.fromtimestamp(0, UTC), 256)]
    assert [request.prompt_tokens for request in found.requests] == list(range(136, 200))


async def test_one_round_adds_the_newest_requests_of_a_pod(pod, scraper, monkeypatch):
    served = await pod()
    for prompt in range(5):
        served.serve_requests(1, prompt=prompt)
    monkeypatch.setattr("tkcc.shell.scrape.MAX_NEW", 2)
    [reading] = await scraper.read([at(served)], "native", {}, NOW)
    assert [request.prompt_tokens for request in reading.requests] == [3, 4]
    assert reading.next_seq == 5
