"""The same questions to the fake pod and to the real engine: what the operator's shell takes for granted of a pod."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from tests.fakes.pod import FakePod
from tkcc.api.fields import BASELINE
from tkcc.shell.probe import PROMPTS, Prober
from tkcc.shell.scrape import PodAddress, Reading, Scraper
from tkcc.shell.settings import Scrape

LONG_AGO = datetime.fromtimestamp(0, UTC)


@dataclass
class Pod:
    """A pod that serves; `complete` is a user's request of a few tokens."""

    address: PodAddress
    model: str
    fake: FakePod | None = None

    async def complete(self, http: httpx.AsyncClient) -> None:
        if self.fake:
            self.fake.serve_requests(1, prompt=5, output=3)
            return
        body = {"model": self.model, "prompt": "One two three four five", "max_tokens": 3, "temperature": 0}
        (await http.post(self.address.url(8000, "/v1/completions"), json=body, timeout=60)).raise_for_status()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    argv = [sys.executable, "-m", "tkcc", "model", "init", "--out", str(path), "--layers", "2"]
    subprocess.run(argv, check=True, capture_output=True, timeout=120)
    return path


@pytest.fixture(scope="session")
def engine(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PodAddress]:
    """The real `tkcc serve` on an address of its own."""
    ip = "127.0.3.1"
    log = tmp_path_factory.mktemp("engine") / "log"
    argv = [
        sys.executable,
        "-m",
        "tkcc",
        "serve",
        "--model",
        str(model_dir),
        "--host",
        ip,
        "--served-model-name",
        "tiny",
    ]
    argv += ["--threads", "1", "--record", "50", "--drain-accept-s", "0"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    deadline_s = time.monotonic() + 90
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"http://{ip}:8001/health", timeout=2, trust_env=False).status_code == 200:
                break
        assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()[-3000:]
        time.sleep(0.2)
    yield PodAddress("real-1", ip)
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()


@pytest.fixture(params=["fake", "real"])
async def pod(request: pytest.FixtureRequest) -> AsyncIterator[Pod]:
    if request.param == "real":
        yield Pod(request.getfixturevalue("engine"), "tiny")
        return
    fake = await FakePod("127.0.3.2", is_recording=True).start()
    yield Pod(PodAddress("fake-1", fake.ip), "tiny", fake)
    await fake.stop()


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False) as client:
        yield client


async def read(http: httpx.AsyncClient, pod: Pod, cursors: dict[str, int] | None = None) -> Reading:
    now = datetime.fromtimestamp(time.time(), UTC)
    [reading] = await Scraper(http, Scrape(timeout_s=10)).read([pod.address], "native", cursors or {}, now)
    assert reading.error == ""
    return reading


async def test_without_an_artifact_it_says_that_it_serves_the_baseline(pod: Pod, http):
    reading = await read(http, pod)
    assert reading.info and reading.info.artifact == BASELINE
    assert len(reading.info.baseline_digest) == len(reading.info.model_digest) == 64
    assert reading.info.block_tokens > 0 and reading.info.recording
    assert abs(time.time() - reading.info.started_at.timestamp()) < 600


async def test_a_request_is_counted_listed_once_and_recorded(pod: Pod, http):
    before = await read(http, pod)
    await pod.complete(http)
    after = await read(http, pod, {before.series: before.next_seq})
    assert before.sample and after.sample and before.requests_started is not None
    assert after.requests_started == before.requests_started + 1
    assert after.sample.prompt_requests == before.sample.prompt_requests + 1
    assert after.sample.output_tokens == before.sample.output_tokens + 3
    [request] = after.requests
    assert request.outcome == "ok" and request.output_tokens == 3
    assert request.ttft_s and request.tpot_s
    assert after.sample.prompt_tokens == before.sample.prompt_tokens + request.prompt_tokens
    assert (await read(http, pod, {after.series: after.next_seq})).requests == ()
    scraper = Scraper(http, Scrape(timeout_s=10))
    [recording] = [one async for one in scraper.recordings([pod.address], LONG_AGO, 100)]
    assert recording.source == "recorded" and recording.requests[-1].prompt_tokens == request.prompt_tokens
    last_ms = recording.started_at_ms + recording.requests[-1].arrival_ms
    assert abs(time.time() - last_ms / 1000) < 60
    assert last_ms / 1000 == pytest.approx(request.started_at.timestamp(), abs=0.5)


async def test_probes_are_answered_with_comparable_tokens_and_leave_no_trace(pod: Pod, http):
    before = await read(http, pod)
    done = asyncio.Event()
    prober = Prober(http, 60.0, done.set)
    prober.ensure([pod.address], pod.address, pod.model, LONG_AGO)  # against itself
    async with asyncio.timeout(90):
        await done.wait()
    assert {probe.prompt_id for probe in prober.seen} == set(PROMPTS)
    assert [probe for probe in prober.seen if probe.error or not probe.tokens_match] == []
    after = await read(http, pod, {before.series: before.next_seq})
    assert after.requests == () and after.requests_started == before.requests_started
    assert after.sample and before.sample and after.sample.prompt_requests == before.sample.prompt_requests


async def test_recording_and_requests_are_on_the_admin_port_alone(pod: Pod, http):
    for path in ("/tkcc/info", "/tkcc/requests", "/tkcc/recording"):
        assert (await http.get(pod.address.url(8000, path))).status_code == 404
