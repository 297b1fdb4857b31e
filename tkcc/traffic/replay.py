"""Sends a plan to an OpenAI-compatible server at the plan's own pace and notes how each request went.

Open loop: a request is due when the trace says so, whether or not earlier ones are done. Each has a connection of its
own, because a Kubernetes Service spreads connections, not requests. At most `max_concurrency` are in flight; a
request that has to wait for a place is sent late, and its lateness is part of the result.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import httpx

from tkcc.traffic.prompts import VocabRange, prompt_ids
from tkcc.traffic.shape import PlannedRequest


@dataclass(frozen=True)
class Target:
    url: str  # base, without /v1
    model: str
    vocab: VocabRange
    max_concurrency: int = 64
    request_timeout_s: float = 120.0  # from being sent to the last token


@dataclass(frozen=True)
class Result:
    index: int
    started_at_s: float  # unix time
    late_s: float  # behind the plan, for want of a place
    status: int  # HTTP status; 0: no answer
    error: str  # empty: it went well
    prompt_tokens: int  # planned; as the server counted them where it says so
    cached_tokens: int | None  # None: the server does not say
    output_tokens: int
    ttft_s: float | None
    tpot_s: float | None  # None with less than two tokens
    fingerprint: str  # `system_fingerprint`: which forward pass served it, if the server says so

    @property
    def is_ok(self) -> bool:
        return not self.error


async def replay(
    requests: Iterable[PlannedRequest],
    target: Target,
    on_result: Callable[[Result], None],
    *,
    duration_s: float | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Send until the plan ends, `duration_s` is over or `stop` is set, then wait for what is in flight. Never raises
    for a request that fails: `on_result` gets it. Cancelling drops what is in flight."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    places = asyncio.Semaphore(target.max_concurrency)
    stop = stop or asyncio.Event()

    dialect = _Dialect()

    async def send(client: httpx.AsyncClient, request: PlannedRequest, due_s: float) -> None:
        try:
            result = await _request(client, target, request, due_s, dialect)
            if result.status == 400 and "ignore_eos" in result.error:
                dialect.has_ignore_eos = False
                result = await _request(client, target, request, due_s, dialect)
            on_result(result)
        finally:
            places.release()

    limits = httpx.Limits(max_connections=target.max_concurrency, max_keepalive_connections=0)
    async with (
        httpx.AsyncClient(
            base_url=target.url, limits=limits, timeout=target.request_timeout_s, trust_env=False
        ) as client,
        asyncio.TaskGroup() as group,
    ):
        for request in requests:
            if duration_s is not None and request.arrival_s > duration_s:
                return
            due_s = started_s + request.arrival_s
            if await _stopped_before(stop, due_s) or await _stopped_before_place(stop, places):
                return
            group.create_task(send(client, request, due_s))


async def list_models(url: str, timeout_s: float = 10.0) -> list[str]:
    """Ids of the models that the server offers. Raises httpx.HTTPError, or ValueError for an answer of another form."""
    async with httpx.AsyncClient(base_url=url, timeout=timeout_s, trust_env=False) as client:
        response = await client.get("/v1/models")
        response.raise_for_status()
        try:
            return [str(model["id"]) for model in response.json()["data"]]
        except (ValueError, KeyError, TypeError) as err:
            raise ValueError(f"{url}/v1/models did not answer with a list of models") from err


async def _stopped_before(stop: asyncio.Event, until_s: float) -> bool:
    delay_s = until_s - asyncio.get_running_loop().time()
    if delay_s <= 0:
        return stop.is_set()
    try:
        await asyncio.wait_for(stop.wait(), delay_s)
    except TimeoutError:
        return False
    return True


async def _stopped_before_place(stop: asyncio.Event, places: asyncio.Semaphore) -> bool:
    """Wait for a place (and take it) or for `stop`, whichever is first."""
    if not places.locked():
        await places.acquire()
        return False
    acquire, stopped = asyncio.ensure_future(places.acquire()), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({acquire, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return not acquire.done()
    finally:
        stopped.cancel()
        if not acquire.done():
            acquire.cancel()


@dataclass
class _Dialect:
    """What the server was found to know beyond OpenAI's fields."""

    has_ignore_eos: bool = True  # vLLM and SGLang have it: the recorded length is the load, whatever tokens come


async def _request(
    client: httpx.AsyncClient, target: Target, request: PlannedRequest, due_s: float, dialect: _Dialect
) -> Result:
    """Send one request that was due at the loop's time `due_s`, and read its stream to the end."""
    loop = asyncio.get_running_loop()
    sent_s, started_at_s = loop.time(), time.time()
    body = {
        "model": target.model,
        "prompt": prompt_ids(request, target.vocab),
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if dialect.has_ignore_eos else {}),
    }
    answer = _Answer(sent_s)
    status = 0
    try:
        async with asyncio.timeout(target.request_timeout_s):
            async with client.stream("POST", "/v1/completions", json=body, headers={"connection": "close"}) as response:
                status = response.status_code
                if response.is_success:
                    async for data in _events(response):
                        answer.take(data, loop.time())
                else:
                    answer.error = _error_of(await response.aread())
        if not answer.error and not answer.is_done:
            answer.error = "the stream ended before [DONE]"
    except TimeoutError:
        answer.error = f"no end within {target.request_timeout_s:g} s"
    except (httpx.HTTPError, ValueError) as err:
        answer.error = f"{type(err).__name__}: {err}"
    return Result(
        index=request.index,
        started_at_s=started_at_s,
        late_s=max(0.0, sent_s - due_s),
        status=status,
        error=answer.error,
        prompt_tokens=answer.prompt_tokens if answer.prompt_tokens is not None else request.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        output_tokens=answer.output_tokens,
        ttft_s=answer.ttft_s,
        tpot_s=answer.tpot_s,
        fingerprint=answer.fingerprint,
    )


class _Answer:
    """Folds the events of one stream."""

    def __init__(self, sent_s: float) -> None:
        self._sent_s = sent_s
        self._first_s: float | None = None
        self._last_s = sent_s
        self._num_chunks = 0
        self._usage: dict[str, Any] = {}
        self.fingerprint = ""
        self.error = ""
        self.is_done = False

    def take(self, data: str, now_s: float) -> None:
        if data == "[DONE]":
            self.is_done = True
            return
        event = json.loads(data)
        if "error" in event:
            self.error = _error_of(data)
            return
        self.fingerprint = event.get("system_fingerprint") or self.fingerprint
        self._usage = event.get("usage") or self._usage
        if event.get("choices"):
            self._first_s = self._first_s if self._first_s is not None else now_s
            self._last_s = now_s
            self._num_chunks += 1

    @property
    def prompt_tokens(self) -> int | None:
        return self._usage.get("prompt_tokens")

    @property
    def cached_tokens(self) -> int | None:
        return (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens")

    @property
    def output_tokens(self) -> int:
        return int(self._usage.get("completion_tokens", self._num_chunks))

    @property
    def ttft_s(self) -> float | None:
        return None if self._first_s is None else self._first_s - self._sent_s

    @property
    def tpot_s(self) -> float | None:
        if self._first_s is None or self.output_tokens < 2:
            return None
        return (self._last_s - self._first_s) / (self.output_tokens - 1)


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of server-sent events, one line each as OpenAI-compatible servers send them."""
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            yield line.removeprefix("data:").strip()


def _error_of(body: str | bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        text = body.decode(errors="replace") if isinstance(body, bytes) else body
        return text[:200] or "an empty answer"
