"""Asks the admin port of serving pods what they run, what they counted and what they finished.

Nothing here fails as a whole: a pod that does not answer, or answers nonsense, is a reading with an error.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

import httpx

from tkcc.api.codec import from_json
from tkcc.api.observation import MetricSample, RequestSample
from tkcc.api.workload import Recording
from tkcc.shell.podapi import MAX_COUNT, FinishedRequest, FinishedRequests, Info
from tkcc.shell.render.names import ADMIN_PORT
from tkcc.shell.settings import Scrape
from tkcc.traffic.exposition import parse
from tkcc.traffic.metrics_map import ENGINES, Signal

log = logging.getLogger(__name__)

MAX_REFUSAL_BYTES = 4096
MAX_ANSWER_BYTES = 8_000_000  # of JSON: some ten times that in memory, for a moment
MAX_PAGE_BYTES = 2_000_000  # of metrics: reading them holds everything else up, some 0.2 s a megabyte
CLOCK_ERROR = timedelta(seconds=2)  # of the header Date, which tells whole seconds
MAX_NEW = 2_000  # finished requests of a pod that one round adds, its newest: after a restart all rings come at once
MAX_CLOCK_LAG = timedelta(days=1)  # what is further off is no clock
PLAIN = {"Accept-Encoding": "identity"}


@dataclass(frozen=True)
class Reading:
    """What one pod said in one round; `error` tells why a part is absent."""

    pod: str
    info: Info | None = None
    sample: MetricSample | None = None
    requests_started: int | None = None
    requests: tuple[RequestSample, ...] = ()
    next_seq: int = 0
    error: str = ""
    load_error: str = ""  # why it cannot load its model, in its own words

    @property
    def series(self) -> str:
        return series_of(self.pod, self.info) if self.info else ""


@dataclass(frozen=True)
class PodAddress:
    pod: str
    ip: str

    def url(self, port: int, path: str) -> str:
        host = f"[{self.ip}]" if ":" in self.ip else self.ip
        return f"http://{host}:{port}{path}"


def series_of(pod: str, info: Info) -> str:
    """Unique to a process life: a container that restarts keeps its pod's name and counts from zero."""
    return f"{pod}/{int(info.started_at.timestamp())}"


class LoadingError(ValueError):
    """The pod has no model yet; the message says why, if it says."""


class TooLongError(ValueError):
    """An answer of more bytes than it may have."""


class Scraper:
    def __init__(self, http: httpx.AsyncClient, settings: Scrape):
        self._http = http
        self._settings = settings

    async def read(
        self, pods: Sequence[PodAddress], engine: str, cursors: Mapping[str, int], now: datetime
    ) -> list[Reading]:
        """One round over these pods, some at a time. `cursors`: how far each series' finished requests were read."""
        slots = asyncio.Semaphore(self._settings.concurrency)

        async def one(pod: PodAddress) -> Reading:
            async with slots:
                return await self._read_pod(pod, engine, cursors, now)

        return list(await asyncio.gather(*(one(pod) for pod in pods)))

    async def recordings(
        self, pods: Sequence[PodAddress], since: datetime, max_requests: int
    ) -> AsyncIterator[Recording]:
        """Recorded requests of each pod that has any, pod by pod: they are large, so let go of one before the next.
        Pods that do not record or do not answer have none."""
        for pod in pods:
            recording = await self._recording(pod, since, max_requests)
            if recording and recording.requests:
                yield recording

    async def _recording(self, pod: PodAddress, since: datetime, max_requests: int) -> Recording | None:
        """The newest requests, as many as fit into an answer."""
        while max_requests:
            path = f"/tkcc/recording?sinceMs={int(since.timestamp() * 1000)}&max={max_requests}"
            try:
                return from_json(Recording, (await self._get(pod, path, MAX_ANSWER_BYTES)).body)
            except TooLongError:
                max_requests //= 4
            except (httpx.HTTPError, ValueError):
                break
        return None

    async def _read_pod(self, pod: PodAddress, engine: str, cursors: Mapping[str, int], now: datetime) -> Reading:
        try:
            async with asyncio.timeout(3 * self._settings.timeout_s):
                info = from_json(Info, (await self._get(pod, "/tkcc/info", MAX_ANSWER_BYTES)).body)
                since = cursors.get(series_of(pod.pod, info), 0)
                page = await self._get(pod, ENGINES[engine].path, MAX_PAGE_BYTES)
                counts = _counts(parse(page.body.decode(errors="replace"), engine))
                ring = await self._get(pod, f"/tkcc/requests?since={since}", MAX_ANSWER_BYTES)
                finished = from_json(FinishedRequests, ring.body)
        except LoadingError as err:
            return Reading(pod.pod, error=f"{pod.pod}: the model is loading", load_error=str(err))
        except (httpx.HTTPError, TimeoutError, ValueError) as err:
            log.debug("%s: %s", pod.pod, err)
            return Reading(pod.pod, error=f"{pod.pod}: {_in_short(err)}")
        return Reading(
            pod=pod.pod,
            info=info,
            sample=_sample(pod.pod, info, counts, now),
            requests_started=counts.get(Signal.REQUESTS_STARTED, 0),
            requests=tuple(_request(pod.pod, info, request, ring) for request in finished.requests[-MAX_NEW:]),
            next_seq=finished.next,
        )

    async def _get(self, pod: PodAddress, path: str, max_bytes: int) -> "_Answer":
        url, timeout = pod.url(ADMIN_PORT, path), self._settings.timeout_s
        async with self._http.stream("GET", url, headers=PLAIN, timeout=timeout) as response:
            if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                raise LoadingError(_load_error(await bounded(response, MAX_REFUSAL_BYTES)))
            response.raise_for_status()
            now = datetime.now(UTC)
            return _Answer(await bounded(response, max_bytes), now, clock_lag(response.headers.get("Date", ""), now))


@dataclass(frozen=True)
class _Answer:
    body: bytes
    at: datetime  # by our clock
    lag: timedelta  # of the pod's clock behind ours


def clock_lag(date: str, now: datetime) -> timedelta:
    """How far the clock that wrote this header Date is behind ours; nothing where that is less than Date can tell."""
    try:
        lag = now - parsedate_to_datetime(date).astimezone(UTC)
    except (ValueError, OverflowError):
        return timedelta(0)
    return lag if CLOCK_ERROR < abs(lag) < MAX_CLOCK_LAG else timedelta(0)


async def bounded(response: httpx.Response, max_bytes: int) -> bytes:
    """The body as it came. Pods run code that was not written here: a body that is too long is refused before it is in
    memory, and a compressed one is not unpacked."""
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > max_bytes:
            raise TooLongError(f"{response.url.path} answered more than {max_bytes} bytes")
    return bytes(body)


def _in_short(err: Exception) -> str:
    """What is wrong, in words that stay the same while it is, so without any of the pod's: they get into a status, and
    one that changes has the next turn begin at once."""
    name = type(err).__name__
    if isinstance(err, httpx.HTTPStatusError):
        return f"{err.request.url.path} answers {err.response.status_code}"
    return f"{name}: {str(err).partition(': ')[0][:200]}" if isinstance(err, ValueError) else name


def _load_error(body: bytes) -> str:
    """What a pod says that has no model yet: why, or "" while it simply loads."""
    try:
        return str(json.loads(body)["loadError"])[:400]
    except (ValueError, KeyError, TypeError):
        return ""


def _counts(signals: Mapping[Signal, float]) -> dict[Signal, int]:
    for signal, value in signals.items():
        if not 0 <= value <= MAX_COUNT:
            raise ValueError(f"the metrics say a count of {signal} that no process can have")
    return {signal: round(value) for signal, value in signals.items()}


def _sample(pod: str, info: Info, counts: Mapping[Signal, int], now: datetime) -> MetricSample:
    def value(signal: Signal) -> int:
        return counts.get(signal, 0)

    return MetricSample(
        series=series_of(pod, info),
        started_at=info.started_at,
        at=now,
        prompt_requests=value(Signal.PROMPT_REQUESTS),
        prompt_tokens=value(Signal.PROMPT_TOKENS),
        output_requests=value(Signal.REQUESTS_FINISHED),
        output_tokens=value(Signal.GENERATION_TOKENS),
        hit_tokens=value(Signal.HIT_TOKENS),
        query_tokens=value(Signal.QUERY_TOKENS),
        running=value(Signal.REQUESTS_RUNNING),
    )


def _request(pod: str, info: Info, request: FinishedRequest, told: _Answer) -> RequestSample:
    """By our clock: what a canary has begun and what it has finished count from a moment of ours."""
    started_at = datetime.fromtimestamp(request.started_at_ms / 1000, UTC) + told.lag
    return RequestSample(
        pod=pod,
        artifact=info.artifact,
        started_at=min(started_at, told.at),  # it has ended, after all
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        output_tokens=request.output_tokens,
        outcome=request.outcome,
        ttft_s=request.ttft_s,
        tpot_s=request.tpot_s,
    )
